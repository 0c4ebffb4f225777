"""vLLM's GPU worker with a model runner that verifies trees."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

from vllm_recycle.integration.cuda.backend import TreeFlashAttentionBackend
from vllm_recycle.integration.cuda.runner import TreeModelRunner
from vllm_recycle.integration.start.shims import without_speculator
from vllm_recycle.integration.worker import TreeWorker

# Recurrent layers whose states V2 takes back to the last accepted row.
REVERTIBLE_MAMBA = (
    MambaAttentionBackendEnum.MAMBA2,
    MambaAttentionBackendEnum.GDN_ATTN,
    MambaAttentionBackendEnum.SHORT_CONV,
)


class TreeGPUWorker(TreeWorker):
    """Model Runner V2 and FlashAttention, with trees."""

    runner_class = TreeModelRunner
    replaced_backend = AttentionBackendEnum.FLASH_ATTN
    tree_backend = TreeFlashAttentionBackend

    def init_device(self) -> None:
        without_speculator()
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for name, layer in get_layers_from_vllm_config(self.vllm_config, MambaBase).items():
            if layer.mamba_type not in REVERTIBLE_MAMBA:
                raise NotImplementedError(
                    f"layer {name}: its states are of the kind {layer.mamba_type.name}, expected "
                    f"one of {[kind.name for kind in REVERTIBLE_MAMBA]}; start without speculation"
                )

    def warm_up(self) -> Any:
        # vLLM warms up with as many requests as fit, each with a whole tree: thousands of rows,
        # which no step has, and for which no memory was left.
        runner = self.model_runner
        config, num_nodes = runner.scheduler_config, runner.num_speculative_steps
        max_num_seqs = config.max_num_seqs
        config.max_num_seqs = max(1, sum(num_nodes in sizes for sizes in runner.sizes_of_batch))
        try:
            return super().warm_up()
        finally:
            config.max_num_seqs = max_num_seqs

    def _maybe_activate_jit_monitor(self) -> None:
        # With this vLLM's warm-up ends: a kernel that is compiled from here on is complained of, or
        # ends the engine.
        self.model_runner.warm_up()
        super()._maybe_activate_jit_monitor()
