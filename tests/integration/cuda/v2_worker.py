"""Our GPU worker and runner where there is no GPU; see `v2_shim`."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_recycle.integration.cpu.lora import keep_base_rows_plain
from vllm_recycle.integration.cuda.runner import TreeModelRunner
from vllm_recycle.integration.cuda.worker import TreeGPUWorker


class TreeV2Runner(TreeModelRunner, CPUModelRunner):
    def load_lora_model(self, *args, **kwargs):
        model = super().load_lora_model(*args, **kwargs)
        keep_base_rows_plain(model.lora_manager.modules.values())  # as Triton kernels do
        return model


class TreeV2Worker(TreeGPUWorker, CPUWorker):
    runner_class = TreeV2Runner
    replaced_backend = AttentionBackendEnum.CPU_ATTN

    def init_device(self):
        super().init_device()
        self.model_runner = self._make_model_runner()

    def determine_available_memory(self):
        if self.lora_config is None:  # vLLM's LoRA for CPUs wants a mapping of as many rows
            self.model_runner.profile_run()  # as on a GPU, before there is a KV cache
        return super().determine_available_memory()
