"""vLLM's CPU worker with a model runner that verifies trees."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_recycle.integration.cpu_backend import TreeCPUAttentionImpl, tree_attention_backend
from vllm_recycle.integration.drafter import TreeDrafter
from vllm_recycle.kernels.cpu_kv_cache import ISAS

logger = init_logger("vllm.recycle")


class TreeCPUWorker(CPUWorker):
    """Creates our runner, gives it our attention, and keeps the matrix file."""

    def init_device(self) -> None:
        super().init_device()
        # CPUWorker names its runner class in `init_device`, so the runner that it made is
        # dropped. Remove when it calls `_make_model_runner`, as the GPU worker does.
        self.model_runner = self._make_model_runner()

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from vllm_recycle.integration.v2_runner import TreeCPUModelRunnerV2

            return TreeCPUModelRunnerV2(self.vllm_config, self.device)
        from vllm_recycle.integration.v1_runner import TreeCPUModelRunner

        return TreeCPUModelRunner(self.vllm_config, self.device)

    @property
    def drafter(self) -> TreeDrafter:
        return self.model_runner.drafter

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with tree_attention_backend():
            super().load_model(*args, **kwargs)
        for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items():
            if type(layer.impl) is not TreeCPUAttentionImpl:
                raise RuntimeError(
                    f"layer {name}: attention is {type(layer.impl).__name__}, expected "
                    f"{TreeCPUAttentionImpl.__name__}"
                )

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items():
            if layer.isa not in ISAS:
                raise NotImplementedError(
                    f"layer {name}: KV cache layout {layer.isa!r}, expected one of {ISAS}"
                )
        if self.rank == 0:
            logger.info(self.drafter.describe())

    def save_adjacency_matrix(self) -> str | None:
        """Write the matrix file now; for `collective_rpc`. Returns its path on rank 0."""
        return self.drafter.save() if self.rank == 0 else None

    def shutdown(self) -> None:
        try:
            # There is nothing to save where the start failed.
            if self.model_runner is not None and hasattr(self.drafter, "proposer"):
                self.save_adjacency_matrix()
        finally:
            super().shutdown()
