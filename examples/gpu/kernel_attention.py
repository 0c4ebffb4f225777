"""Tree attention for `kernels.py`: its inputs, what it is compared with, and whether it agrees."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from kernel_timing import DEVICE, DTYPE, HAS_GPU, Call, Peaks, count, host_us, measure, random
from torch.nn import functional as F

from tests.kernels.triton.torch_twins import tree_attention as torch_tree_attention
from vllm_recycle.core.tree import TreeTemplate, load_tree
from vllm_recycle.kernels.triton.attention.queries import TreeQueries
from vllm_recycle.kernels.triton.attention.tree_attention import tree_attention
from vllm_recycle.kernels.triton.trees import DeviceTrees

BLOCK_SIZE = 16
# Of a row's output: keys, values and weights have 8 bits, and weights are summed over thousands.
TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Heads:
    name: str
    queries: int
    keys: int
    size: int


@dataclass(frozen=True, slots=True)
class AttentionCase:
    heads: Heads
    rows: int  # of a request
    context: int
    batch: int

    @property
    def length(self) -> int:
        return self.context + self.rows

    @property
    def scale(self) -> float:
        return self.heads.size**-0.5


class AttentionInputs:
    """Paged keys and values, their blocks in random order, and queries."""

    def __init__(self, case: AttentionCase) -> None:
        self.case, heads = case, case.heads
        blocks = -(-case.length // BLOCK_SIZE)
        shape = (case.batch * blocks, BLOCK_SIZE, heads.keys, 2 * heads.size)
        self.kv_cache = random(*shape).transpose(1, 2)  # by tokens, vLLM's default
        order = torch.randperm(case.batch * blocks, device=DEVICE)
        self.block_table = order.to(torch.int32).view(case.batch, blocks)
        self.query = random(case.batch * case.rows, heads.queries, heads.size)
        self.output = torch.empty_like(self.query)
        self.query_start_loc = count(case.batch + 1, torch.int32) * case.rows
        self.seq_lens = torch.full((case.batch,), case.length, dtype=torch.int32, device=DEVICE)

    def rows(self, tree: TreeTemplate) -> TreeQueries:
        batch = self.case.batch
        trees = DeviceTrees.of(tree, batch, DEVICE)
        return TreeQueries(
            ancestor_bits=trees.ancestor_bits,
            depths=trees.depths,
            idx_mapping=count(batch),
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            max_rows=self.case.rows,
            num_rows=batch * self.case.rows,
        )


def measure_attention(case: AttentionCase, peaks: Peaks) -> dict[str, Any]:
    inputs = AttentionInputs(case)
    tree = load_tree("default").prefix(case.rows - 1)
    chain = TreeTemplate(tuple((node, 0) for node in range(case.rows - 1)), "chain")
    compared = {"tree": (ours, tree), "chain": (ours, chain), "sdpa": (sdpa, tree)}
    if HAS_GPU and find_spec("vllm") is not None:
        compared["unified"] = (unified, tree)
    variants: dict[str, Call] = {}
    for name, (make, template) in compared.items():
        variants[name] = make(inputs, template)
        check_attention(f"{name} of {case}", inputs, template, variants[name])
    variants["copy"] = partial(torch.empty_like(inputs.kv_cache).copy_, inputs.kv_cache)
    tokens = case.batch * case.length
    kv_bytes = tokens * 2 * case.heads.keys * case.heads.size * DTYPE.itemsize
    num_bytes = kv_bytes + 2 * inputs.output.nbytes
    flops = 4 * tokens * case.rows * case.heads.queries * case.heads.size
    return {
        **asdict(case),
        "heads": case.heads.name,
        "kv_bytes": kv_bytes,
        "bytes": num_bytes,
        "flops": flops,
        "floor_us": peaks.floor_us(num_bytes, flops),
        "times": measure(variants),
        "host_us": host_us(variants["tree"]),
    }


def ours(inputs: AttentionInputs, tree: TreeTemplate) -> Call:
    arguments = (inputs.query, inputs.kv_cache, inputs.output)
    return partial(tree_attention, *arguments, rows=inputs.rows(tree), scale=inputs.case.scale)


def sdpa(inputs: AttentionInputs, tree: TreeTemplate) -> Call:
    """Rows times the heads of a group as the queries of each key head."""
    case, keys = inputs.case, inputs.case.heads.keys
    group = case.heads.queries // keys
    # Room for every row to begin at a multiple of 16, or torch copies the mask in each call.
    mask = torch.zeros(case.rows * group, -(-case.length // 16) * 16, dtype=DTYPE, device=DEVICE)
    mask = mask[:, : case.length]
    hidden = ~tree.ancestor_mask.to(DEVICE).repeat_interleave(group, dim=0)
    mask[:, case.context :].masked_fill_(hidden, float("-inf"))
    query = inputs.query.view(case.batch, case.rows, keys, group, -1).transpose(1, 2).flatten(2, 3)
    paged = inputs.kv_cache[inputs.block_table.long()].transpose(1, 2)
    dense = paged.flatten(2, 3)[:, :, : case.length].chunk(2, dim=-1)
    key, value = (part.contiguous() for part in dense)
    attend = F.scaled_dot_product_attention
    return partial(attend, query, key, value, attn_mask=mask, scale=case.scale)


def unified(inputs: AttentionInputs, tree: TreeTemplate) -> Call:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    key, value = (part.transpose(1, 2) for part in inputs.kv_cache.chunk(2, dim=-1))
    hidden = ~tree.ancestor_mask.to(DEVICE)
    return partial(
        unified_attention,
        q=inputs.query,
        k=key,
        v=value,
        out=inputs.output,
        cu_seqlens_q=inputs.query_start_loc,
        max_seqlen_q=inputs.case.rows,
        seqused_k=inputs.seq_lens,
        max_seqlen_k=inputs.case.length,
        softmax_scale=inputs.case.scale,
        causal=True,
        window_size=(-1, -1),
        block_table=inputs.block_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        qq_bias=torch.zeros(hidden.shape, device=DEVICE).masked_fill(hidden, float("-inf")),
    )


def check_attention(name: str, inputs: AttentionInputs, tree: TreeTemplate, call: Call) -> None:
    """Compare with the torch reference, row by row."""
    inputs.output.fill_(float("nan"))
    output, expected = call(), torch.zeros_like(inputs.output, dtype=torch.float32)
    if output is None:
        output = inputs.output
    else:  # SDPA's [batch, kv_heads, rows * group, head_size]
        output = output.unflatten(2, (inputs.case.rows, -1)).transpose(1, 2).reshape(expected.shape)
    arguments, rows = (inputs.query, inputs.kv_cache, expected), inputs.rows(tree)
    torch_tree_attention(*arguments, rows=rows, scale=inputs.case.scale)
    errors = (output.float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    if not (error := errors.max().item()) <= TOLERANCE:  # NaN is none either
        sys.exit(f"wrong: {name}: a row is off by {error:.3g}, more than {TOLERANCE}")
