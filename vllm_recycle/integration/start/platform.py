"""How our methods run on a kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

# vLLM's V1 runner makes one of these for `custom_class`; ours has its drafter beside it.
PLACEHOLDER = "vllm_recycle.integration.cpu.drafter.Placeholder"


@dataclass(frozen=True, slots=True)
class Platform:
    """How our methods run on a kind of device.

    Attributes:
        worker: qualified name of our worker.
        host: the keys of vLLM's method that ours takes the place of, where there is no trunk.
        on_v2: whether our runner is made of Model Runner V2.
        attention_backend: the one that trees take the place of; None where vLLM has but one.
        support: qualified name of the module that says what our kernels are there for; None where
            they are there for all that `refusals` lets pass.
    """

    worker: str
    host: dict[str, str]
    on_v2: bool
    attention_backend: AttentionBackendEnum | None
    support: str | None = None

    def has_kernels(self) -> bool:
        """Whether there are kernels; a warning says why not."""
        return self.support is None or import_module(self.support).has_kernels()

    def unsupported_by_trees(self, vllm_config: Any, name: str, model: Any) -> dict[str, bool]:
        """What trees do not go with, and whether a model, with this name in words, has it."""
        if self.support is None:
            return {}
        return import_module(self.support).unsupported_by_trees(vllm_config, name, model)


PLATFORMS = {
    "cpu": Platform(
        "vllm_recycle.integration.cpu.worker.TreeCPUWorker",
        {"method": "custom_class", "model": PLACEHOLDER},
        False,
        None,
        "vllm_recycle.integration.cpu.support",
    ),
    "cuda": Platform(
        "vllm_recycle.integration.cuda.worker.TreeGPUWorker",
        {"method": "ngram_gpu"},
        True,
        AttentionBackendEnum.FLASH_ATTN,
    ),
}


def get_platform(method: str) -> Platform:
    """How a method of ours runs here; raises NotImplementedError where it does not."""
    name = "cuda" if current_platform.is_cuda() else current_platform.device_type
    if name not in PLATFORMS:
        raise NotImplementedError(
            f"{method}: got platform {current_platform.device_name!r}, expected one of "
            f"{list(PLATFORMS)}"
        )
    return PLATFORMS[name]
