"""What a CUDA wheel of vLLM and this package say to each other, on a machine without a GPU.

    python -m tests.cuda_wheel.check FOLDER

FOLDER has `libcuda.so.1` (`stub_driver`); PYTHONPATH has PyTorch for CUDA, and vLLM's wheel. GPUs
are made up, by their compute capability. What the shim of other tests imitates is real here: vLLM's
platform, its compiled extensions, its choice of attention, our configuration on `cuda`. No kernel
runs. It prints what it looked at, and fails where something is not as expected.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "models"

NUM_GPUS = 2
FLAGS: list[dict[str, Any]] = [{}, {"max_num_seqs": 1}, {"max_num_seqs": 1024}]
FLAGS += [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"enforce_eager": True}]
FLAGS += [{"enable_lora": True}, {"cudagraph_capture_sizes": [8, 16]}]
# By compute capability: the class that a model without and one with attention sinks gets, and
# whether the latter's drafts are trees.
EXPECTED = {
    (8, 0): ("TreeFlashAttentionBackend", "TritonAttentionBackend", False),
    (9, 0): ("TreeFlashAttentionBackend", "TreeFlashAttentionBackend", True),
    (10, 0): ("TreeFlashAttentionBackend", "TreeFlashAttentionBackend", True),
    (12, 0): ("TreeFlashAttentionBackend", "TritonAttentionBackend", False),
}


def make_up_gpus(driver: Path, capability: tuple[int, int]) -> None:
    """Before vLLM is imported, which keeps what it has found."""
    ctypes.CDLL(str(driver / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    import torch

    sizes = {"total_memory": 80 << 30, "multi_processor_count": 132, "L2_cache_size": 50 << 20}
    sizes |= {"warp_size": 32, "major": capability[0], "minor": capability[1]}
    properties = SimpleNamespace(name="made up", uuid="0", **sizes)
    torch.cuda.device_count = lambda: NUM_GPUS
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_name = lambda *_: properties.name
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    NonNvmlCudaPlatform.device_count = classmethod(lambda cls: NUM_GPUS)
    platforms._current_platform = NonNvmlCudaPlatform()


def import_all() -> int:
    """Every module but those for CPUs; the first that cannot be imported raises."""
    files = sorted((ROOT / "vllm_recycle").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    names = [name for name in names if ".__main__" not in name and ".cpu" not in name]
    for name in names:
        importlib.import_module(name.removesuffix(".__init__"))
    return len(names)


def configure(method: dict[str, Any], model: str = str(MODELS / "target"), **flags: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "bfloat16", "max_model_len": 512} | flags
    return EngineArgs(model, speculative_config=method, **given).create_engine_config()


def check_configurations() -> int:
    """Ours on `cuda`, as vLLM completes them."""
    from vllm_recycle.integration.options import settings_of
    from vllm_recycle.integration.schedule.draft_sizes import sizes_of

    draft = {"method": "ouroboros", "model": str(MODELS / "target")}
    methods = [{"method": "token_recycling"}, draft, draft | {"preset": "paper"}]
    methods.append({"method": "token_recycling", "tree": "chain"})
    for method, flags in itertools.product(methods, FLAGS):
        config = configure(method, **flags)
        table = config.speculative_config.num_speculative_tokens_per_batch_size
        assert table == settings_of(config).table, (method, flags)
        assert config.use_v2_model_runner, (method, flags)
        assert config.scheduler_config.async_scheduling, (method, flags)
        assert sizes_of(config)[1], (method, flags)
    return len(methods) * len(FLAGS)


def check_attention(capability: tuple[int, int], folder: Path) -> None:
    """Which backend layers get on this kind of GPU."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    from tests.integration.models.random_models import gpt_oss
    from vllm_recycle.integration.cuda.worker import TreeGPUWorker
    from vllm_recycle.integration.options import settings_of
    from vllm_recycle.integration.start.attention_override import override_backend

    *names, has_trees = EXPECTED[capability]
    with_sinks = gpt_oss(folder / "sinks", 128, [1.0] * 4)
    for model, name in zip((str(MODELS / "target"), with_sinks), names, strict=True):
        config = configure({"method": "token_recycling"}, model)
        trees = settings_of(config).options.has_trees
        assert trees == (has_trees or model != with_sinks), (capability, model)
        replaced, ours = TreeGPUWorker.replaced_backend, TreeGPUWorker.tree_backend
        given = {"has_sink": True} if model == with_sinks else {}
        override = override_backend(replaced, ours) if trees else nullcontext()
        with set_current_vllm_config(config), override:
            backend = get_attn_backend(64, torch.bfloat16, None, **given)
        assert backend.__name__ == name, (capability, model, backend)


def main(folder: Path, gpu: str | None = None) -> None:
    """Of one kind of GPU its attention, in a process of its own; else all."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if gpu is not None:
        major, minor = map(int, gpu.split("."))
        make_up_gpus(folder, (major, minor))
        with tempfile.TemporaryDirectory() as made:
            check_attention((major, minor), Path(made))
        return
    make_up_gpus(folder, (9, 0))
    import torch
    import triton
    import vllm

    print(f"vllm {vllm.__version__}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{import_all()} modules", flush=True)
    print(f"{check_configurations()} configurations", flush=True)
    for major, minor in EXPECTED:
        command = [sys.executable, "-m", "tests.cuda_wheel.check", str(folder)]
        subprocess.run([*command, f"{major}.{minor}"], check=True)
    print(f"attention of {len(EXPECTED)} kinds of GPUs")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
