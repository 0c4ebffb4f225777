"""Which vLLM is supported, and every place where it is changed at run time.

Everything else is a subclass behind one of vLLM's own extension points (`worker_cls`,
`scheduler_cls`, the backend registry, `custom_class` proposers). A shim is idempotent, leaves
engines that do not use our methods as they are, and says when it can go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_VLLM = ">=0.32,<0.33"

_SHIM = "_vllm_recycle_shim"


def check_vllm_version() -> None:
    """Raise RuntimeError where vLLM is not of a supported version."""
    installed = Version(vllm.__version__)
    if not SpecifierSet(SUPPORTED_VLLM).contains(installed.base_version):
        raise RuntimeError(f"vllm_recycle supports vllm {SUPPORTED_VLLM}, found {installed}")


def wrap_create_engine_config(rewrite: Callable[[Any], Any], check: Callable[[Any], None]) -> None:
    """Let `EngineArgs` accept our method names in `speculative_config`.

    Args:
        rewrite: from engine arguments to those that vLLM itself accepts, or None where our
            methods are not asked for.
        check: raises for a configuration that our methods do not support.

    Remove when vLLM has a registry of speculative methods.

    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, _SHIM):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        rewritten = rewrite(self)
        if rewritten is None:
            return original(self, *args, **kwargs)
        config = original(rewritten, *args, **kwargs)
        check(config)
        return config

    setattr(create_engine_config, _SHIM, True)
    EngineArgs.create_engine_config = create_engine_config


def wrap_validate_spec_decode(validate: Callable[[Any, Any], bool]) -> None:
    """Lift vLLM's refusal of `min_p` and `logit_bias` under speculation, for our methods.

    Args:
        validate: given sampling parameters and the speculative configuration, true where it has
            judged the parameters itself.

    Remove when vLLM's refusal asks the method (patches/0003).

    """
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    if hasattr(original, _SHIM):
        return

    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if not validate(self, speculative_config):
            original(self, speculative_config)

    setattr(_validate_spec_decode, _SHIM, True)
    SamplingParams._validate_spec_decode = _validate_spec_decode
