"""Lets vLLM's Model Runner V2 start on a CPU, as it runs on a GPU; for tests alone.

V2 asks for Triton, and Triton has no CPU backend to compile its kernels with. Its interpreter runs
them, slowly, once vLLM is told that there is a backend. vLLM's CPU platform turns asynchronous
scheduling off and has one attention backend, of another KV cache layout. Both are set back here:
to asynchronous scheduling, and to FlashAttention, of an H100's version. FlashAttention's functions,
which only CUDA has, are torch here; so is vLLM's kernel for grammars, which the interpreter cannot
run.

Several ranks are as many processes that run one script, as torchrun would start them: each brings
the shim for itself, where workers that vLLM starts would be without it.

Remove when a Triton with a CPU backend is on the package index.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.integration.cuda import triton_interpreter
from tests.integration.engines import spare_later_engines


def install() -> None:
    """Prepare this process; to be called before vllm is imported."""
    assert "vllm" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    # The engine in this process: in a child what follows would be missing.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Inductor would ask for a driver of Triton's; a vocabulary that ranks share is compiled.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    # Which configuration of a kernel is the fastest the interpreter cannot say.
    os.environ["VLLM_TRITON_FORCE_FIRST_CONFIG"] = "1"
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    triton_interpreter.speed_up()
    _schedule_asynchronously()
    _attend_by_flash_attention()
    _mask_grammars_in_torch()
    _run_mamba2_in_triton()
    _talk_without_shared_memory()
    _leave_out_experts_of_other_ranks()
    _bring_our_worker()
    _attend_to_trees_in_few_programs()
    _sample_in_few_programs()
    spare_later_engines()


def _schedule_asynchronously() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check_and_update_config = CpuPlatform.check_and_update_config

    def keeping_asynchronous_scheduling(vllm_config: Any) -> None:
        given = vllm_config.scheduler_config.async_scheduling
        check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = given

    CpuPlatform.check_and_update_config = staticmethod(keeping_asynchronous_scheduling)


def _attend_by_flash_attention() -> None:
    """vLLM's classes for it, with torch in the place of what they call."""
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = AttentionBackendEnum.FLASH_ATTN.get_path()
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    fa_utils.get_flash_attn_version = lambda *args, **kwargs: 3
    fa_utils.is_flash_attn_varlen_func_available = lambda: True
    fa_utils.flash_attn_varlen_func = _attend
    fa_utils.get_scheduler_metadata = _plan
    fa_utils.reshape_and_cache_flash = _store
    fa_utils.compile_flash_attn_varlen_func_from_specs = None


def _plan(**given: Any) -> torch.Tensor:
    """In the place of a schedule: what it is made for, by which `_attend` knows its own."""
    return torch.cat((torch.tensor([given["max_seqlen_q"]]), given["cache_seqlens"])).int()


def _attend(**given: Any) -> None:
    """Causal attention of each request's last tokens over its paged keys and values."""
    starts, lengths = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
    longest = given["max_seqlen_q"]
    plan = given["scheduler_metadata"]
    assert plan is None or plan.tolist() == [longest, *lengths]
    assert max(lengths) <= given["max_seqlen_k"]
    assert given["causal"] is True
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        num_rows = rows.stop - rows.start
        assert num_rows <= longest
        if num_rows:
            token = torch.arange(length)
            size = given["k"].shape[1]
            block = given["block_table"][request][token // size].long()
            keys, values = (given[name][block, token % size].transpose(0, 1) for name in "kv")
            query = given["q"][rows].transpose(0, 1)
            position = torch.arange(length - num_rows, length)[:, None]
            window = given["window_size"][0] + 1 or length
            mask = (token <= position) & (token > position - window)
            group = len(query) // len(keys)
            keys, values = (side.repeat_interleave(group, dim=0) for side in (keys, values))
            scores = query @ keys.transpose(1, 2) * given["softmax_scale"]
            scores = scores.masked_fill(~mask, -torch.inf)
            if given["s_aux"] is not None:
                sinks = given["s_aux"][:, None, None].expand(-1, num_rows, 1)
                scores = torch.cat((scores, sinks), dim=2)
            weights = scores.softmax(dim=2)[..., :length]
            given["out"][rows] = (weights @ values).transpose(0, 1)


def _store(
    key: torch.Tensor, value: torch.Tensor, keys: Any, values: Any, slots: torch.Tensor, *_: Any
) -> None:
    """Write the rows that have a slot."""
    rows = [row for row, slot in enumerate(slots.tolist()) if slot >= 0]
    rows = torch.tensor(rows, dtype=torch.int64)
    block, token = slots[rows] // keys.shape[1], slots[rows] % keys.shape[1]
    keys[block, token], values[block, token] = key[rows], value[rows]


def _mask_grammars_in_torch() -> None:
    """In the place of a kernel of vLLM's that the interpreter cannot run."""
    from vllm.v1.worker.gpu import structured_outputs

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return self.launch

        def launch(
            self, logits: Any, _: int, at: Any, starts: Any, bitmask: Any, *args: Any, **kw: Any
        ) -> None:
            request, place = at // kw["MASK_STRIDE"], at % kw["MASK_STRIDE"]
            real = place < starts[request + 1] - starts[request]
            rows = (starts[request] + place)[real]
            allowed = (bitmask[real][:, :, None] >> torch.arange(32) & 1).flatten(1)
            logits[rows] = logits[rows].masked_fill(allowed[:, : logits.shape[1]] == 0, -torch.inf)

    structured_outputs._apply_grammar_bitmask_kernel = Kernel()


def _run_mamba2_in_triton() -> None:
    """By the kernels of a GPU, where vLLM has others for a CPU."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import utils  # noqa: F401 - imports what these do, but as ever

    CpuPlatform.is_cpu = lambda self: False
    from vllm.model_executor.layers.mamba.ops import (  # noqa: F401
        causal_conv1d,
        mamba_ssm,
        ssd_combined,
    )

    del CpuPlatform.is_cpu
    from vllm.config.mamba import MambaBackendEnum
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import _BACKEND_REGISTRY

    _BACKEND_REGISTRY[MambaBackendEnum.CPU] = _BACKEND_REGISTRY[MambaBackendEnum.TRITON]


def _talk_without_shared_memory() -> None:
    """Ranks that vLLM has not started find theirs by a name that those of other runs have too.

    And what experts need, which vLLM's ranks on a CPU have not.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: Any = None) -> Any:
        assert dim == 0
        parts = [None] * self.world_size
        torch.distributed.all_gather_object(parts, given, group=self.device_group)
        return [torch.cat(of_all) for of_all in zip(*parts, strict=True)]

    def reduce_scatterv(self: Any, given: Any, dim: int, sizes: list[int]) -> Any:
        assert dim == 0
        total = given.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group]

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def _leave_out_experts_of_other_ranks() -> None:
    """vLLM's kernel for a CPU looks for them too, and crashes."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def of_this_rank(self: Any, **given: Any) -> None:
        if given["expert_map"] is not None:
            local = given["expert_map"][given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(local < 0, 0)
            given["topk_ids"] = local.clamp(min=0).to(given["topk_ids"].dtype)
        apply(self, **given)

    CPUUnquantizedExperts.apply = of_this_rank


def _bring_our_worker() -> None:
    """What `platform.PLATFORMS` says of CUDA, for this platform."""
    from vllm_recycle.integration.start.platform import PLATFORMS, Platform

    PLATFORMS["cpu"] = Platform(
        "tests.integration.cuda.v2_worker.TreeV2Worker", PLATFORMS["cuda"].host, True, None
    )


def _attend_to_trees_in_few_programs() -> None:
    """The same kernel, with larger tiles than float32 has on a GPU, and contexts left whole."""
    from vllm_recycle.kernels.triton.attention import tree_attention

    tile = tree_attention.Tile(queries=64, tokens=128, warps=4)
    tree_attention.choose_tile = lambda *args, **kwargs: tile
    tree_attention.choose_num_splits = lambda *programs: 1


def _sample_in_few_programs() -> None:
    """vLLM's kernel, with all of our vocabulary in one block."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    code = gumbel_sample.__code__
    assert code.co_consts.count(1024) == 1, "expected one block size"
    sizes = tuple(4096 if value == 1024 else value for value in code.co_consts)
    gumbel_sample.__code__ = code.replace(co_consts=sizes)
