"""What a decode step takes on an H100 by counting, with trees and without; nothing was timed.

    python examples/gpu/estimates.py

prints three tables: of steps, of steps along a trunk of an EAGLE-3 head, and of what programs of
attention that find nothing to do cost. `examples/benchmarks/README.md` has the first two. Graphs,
tiles and splits are those that the package chooses, programs and bytes are counted; what each takes
was estimated from the compiled kernels, to 30 %. `estimates.json` has the ratios, for `verdict.py`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from vllm_recycle.core.graph_curve import GraphShape
from vllm_recycle.integration.cuda.graphs import plan_full_graphs
from vllm_recycle.integration.options.limits import sizes_of_batches
from vllm_recycle.kernels.triton.attention.tiles import Tile, choose_num_splits, choose_tile
from vllm_recycle.kernels.triton.attention.tree_attention import LEAST_SHARE

# Llama-3-8B in 16 bits.
LAYERS, KV_HEADS, GROUP, HEAD_SIZE = 32, 8, 4, 128
TOKEN_BYTES = 2 * KV_HEADS * HEAD_SIZE * 2  # of a layer's cache
# An H100 SXM: what of its 3.35 TB/s is reached, its multiprocessors, and room beside the weights.
BYTES_A_US, PROCESSORS, CACHE_BYTES = 0.85 * 3.35e6, 132, 60e9
NODES, MAX_NUM_REQS, LARGEST = 63, 256, 512
CAPTURE_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]
# Microseconds of a program of attention: for 64 tokens, by the queries of its tile; to begin with;
# and in all, where it finds nothing. Of a launch, and of the one that combines shares.
BLOCK, BLOCK_US = 64, {128: 0.95, 64: 0.55, 32: 0.4, 16: 0.35}
BEGIN_US, EMPTY_US, LAUNCH_US, COMBINE_US = 0.5, 0.75, 4.5, 3.0
FLASH_US = 4.0  # of a launch of FlashAttention, beside its bytes
# The matrix products: weights once, and what a row more takes, at least and at most.
WEIGHTS_US, ROW_US = 5050.0, (4.3, 6.8)
# Norms, rotations and activations; and what vLLM does beside its graph.
OTHERS_US, OTHERS_ROW_US, PLAIN_US, PLAIN_REQUEST_US = 300.0, 0.9, 60.0, 0.5
# Launches of ours beside the graph, as `v2_launches.json` counts them, but for those that read
# logits, which go by the row: made by the last layer, read by two launches.
LAUNCHES_US = {
    "_place_tree_rows_kernel": (2.5, 2.5),
    "_compact_path_kernel": (3.5, 3.5),
    "_mark_step_kernel": (8.0, 8.0),
    "_walk_kernel": (4.0, 4.0),
    "_write_step_kernel": (5.0, 5.0),
    "_count_trunks_kernel": (4.0, 6.0),
    "_draft_copies_kernel": (8.0, 20.0),  # by the length of the text
    "_grow_kernel": (20.0, 50.0),  # by the levels that it goes down
    "_to_copy": (6.0, 6.0),  # both
    "sum": (4.0, 4.0),
    "_get_num_sampled_and_rejected_kernel": (2.0, 2.0),
}
LOGITS = {"index", "_group_maxima_kernel", "_top_k_kernel"}
LOGITS_ROW_US, GAPS_US = 0.33, 25.0  # with vLLM's own launches for drafts
# An EAGLE-3 head, whose trunk has four tokens: a layer that reads an embedding and a hidden state,
# its own vocabulary, and once a step a layer that joins three hidden states.
HIDDEN, INNER, HEAD_VOCAB, TRUNK = 4096, 14336, 32_000, 4
LAYER = 2 * HIDDEN * (HIDDEN + 2 * KV_HEADS * HEAD_SIZE) + HIDDEN * HIDDEN + 3 * HIDDEN * INNER
HEAD_BYTES, JOIN_BYTES = 2 * (LAYER + HIDDEN * HEAD_VOCAB), 2 * 3 * HIDDEN * HIDDEN
# Launches beside its forwards, as `v2_launches.json` counts them for a trunk of two tokens.
HEAD_LAUNCHES, HEAD_LAUNCH_US = 69, (2.0, 5.0)
MARKS = {1: 1.11, 8: 1.18, 64: 1.12}  # of a plain step, by requests
# Rows of each request, at 2,048 tokens unless told.
STEPS = [(64,), (32,), (16,) * 8, (4,) * 64, (2,) * 64]
MIXED = [(32, *(1,) * 7), (64, 64, *(1,) * 22), (16, 16, 16, *(1,) * 61)]
CONTEXT, OTHER_CONTEXTS = 2048, (512, 8192, 32768)
LISTED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # splits that a work list may choose of


@dataclass(frozen=True)
class Attention:
    """Of one layer in a graph: what is launched, and how long it takes, with a work list too."""

    splits: int
    programs: int
    empty: int
    iterations: int
    us: float
    us_of_list: float


@cache
def graphs() -> list[GraphShape]:
    sizes_of_batch = sizes_of_batches(NODES, LARGEST, MAX_NUM_REQS)
    return plan_full_graphs(sizes_of_batch, CAPTURE_SIZES, has_plain_requests=True)


def graph_of(rows: tuple[int, ...]) -> GraphShape:
    """Of a step whose requests have so many rows."""
    step = (sum(rows), len(rows), max(rows))
    return next(g for g in graphs() if all(a >= b for a, b in zip(g, step, strict=True)))


@cache
def attention(rows: tuple[int, ...], context: int) -> Attention:
    graph = graph_of(rows)
    tile = choose_tile(graph.max_query_len * GROUP, HEAD_SIZE, itemsize=2, capability=9)
    tiles = -(-graph.max_query_len * GROUP // tile.queries)
    of_one, slots = KV_HEADS * tiles, PROCESSORS * tile.resident
    full = min(graph.num_reqs, -(-graph.num_tokens // graph.max_query_len))
    splits = choose_num_splits(full * of_one, (graph.num_reqs - full) * of_one, slots)
    found = [*_iterations(rows, context, tile, splits)]
    launched = graph.num_reqs * of_one * splits
    empty = launched - len(found)
    # Of the splits that a step may have, those that serve it best.
    listed = min(_us([*_iterations(rows, context, tile, n)], 0, tile) for n in LISTED)
    read = _reading_us(len(rows), context)
    extra = LAUNCH_US + (COMBINE_US if splits > 1 else 0.0)
    us, us_of_list = (max(us, read) + extra for us in (_us(found, empty, tile), listed))
    return Attention(splits, launched, empty, sum(found), us, us_of_list)


def _reading_us(batch: int, context: int) -> float:
    """Of the keys and values of a layer."""
    return batch * context * TOKEN_BYTES / BYTES_A_US


def _iterations(rows: tuple[int, ...], context: int, tile: Tile, splits: int) -> Iterator[int]:
    """Of each program that finds something to do, as they are launched."""
    for of_request in rows:
        blocks = -(-(context + of_request) // BLOCK)
        share = max(-(-blocks // splits), LEAST_SHARE // BLOCK)
        tiles = -(-of_request * GROUP // tile.queries)
        for first in range(0, blocks, share):
            yield from [min(share, blocks - first)] * (KV_HEADS * tiles)


def _us(iterations: list[int], empty: int, tile: Tile) -> float:
    """Until all programs have run, each where one ends first."""
    slots = [0.0] * (PROCESSORS * tile.resident)
    for us in [*(BEGIN_US + n * BLOCK_US[tile.queries] for n in iterations), *[EMPTY_US] * empty]:
        heapq.heapreplace(slots, slots[0] + us)
    return max(slots)


def parts_us(rows: tuple[int, ...], context: int, bound: int) -> dict[str, tuple[float, float]]:
    """Of a plain step and of the one with trees, at least with `bound` 0, at most with 1."""
    batch, padded, row_us = len(rows), graph_of(rows).num_tokens, ROW_US[bound]
    launches = sum(us[bound] for us in LAUNCHES_US.values())
    outside = PLAIN_US + PLAIN_REQUEST_US * batch
    return {
        "products": (WEIGHTS_US + row_us * batch, WEIGHTS_US + row_us * padded),
        "attention": (
            LAYERS * (FLASH_US + _reading_us(batch, context)),
            LAYERS * attention(rows, context).us,
        ),
        "others": (OTHERS_US + OTHERS_ROW_US * batch, OTHERS_US + OTHERS_ROW_US * padded),
        "outside": (outside, outside + launches + LOGITS_ROW_US * sum(rows) + GAPS_US),
    }


def ratios(rows: tuple[int, ...], context: int = CONTEXT) -> tuple[float, float]:
    """Of the step with trees to the plain one, at least and at most."""
    at_least, at_most = (_sums(parts_us(rows, context, bound)) for bound in (0, 1))
    return at_least[1] / at_least[0], at_most[1] / at_most[0]


def trunk_us(batch: int, context: int, bound: int) -> float:
    """A trunk for each request: the head's forwards, and what is launched beside them."""
    attention = FLASH_US + _reading_us(batch, context)
    forward = HEAD_BYTES / BYTES_A_US + ROW_US[bound] / LAYERS * batch + attention
    forward += (OTHERS_US + OTHERS_ROW_US * batch) / LAYERS
    return TRUNK * forward + JOIN_BYTES / BYTES_A_US + HEAD_LAUNCHES * HEAD_LAUNCH_US[bound]


def ratio_along(rows: tuple[int, ...], context: int, bound: int) -> float:
    """Of the step with trees along trunks to the plain one."""
    plain, trees = _sums(parts_us(rows, context, bound))
    return (trees + trunk_us(len(rows), context, bound)) / plain


def _sums(parts: dict[str, tuple[float, float]]) -> tuple[float, float]:
    plain, trees = (sum(us) for us in zip(*parts.values(), strict=True))
    return plain, trees


def step_table() -> Iterator[str]:
    yield _line("ms, without trees and with them", *map(_name, STEPS))
    yield _line(*["---"] * (1 + len(STEPS)))
    bounds = [[parts_us(rows, CONTEXT, bound) for bound in (0, 1)] for rows in STEPS]
    for part in bounds[0][0]:
        yield _line(part, *(_ms(*(bound[part] for bound in both)) for both in bounds))
    yield _line("**step**", *(_ms(*map(_sums, both)) for both in bounds))
    yield _line("**ratio**", *(_range(*ratios(rows)) for rows in STEPS))
    yield _line("mark, at most", *(f"{MARKS[len(rows)]}" for rows in STEPS))
    for context in OTHER_CONTEXTS:
        found = (
            _range(*ratios(rows, context)) if _fits(rows, context) else "no room" for rows in STEPS
        )
        yield _line(f"ratio at {context:,} tokens", *found)


def trunk_table() -> Iterator[str]:
    heads = ("a trunk, ms", "ratio with it", "of the head's own chain", "gain needed")
    yield _line("requests x rows", *heads)
    yield _line(*["---"] * 5)
    for rows in ((32,), (32,) * 8, (8,) * 64):
        chain, batch = (1 + TRUNK,) * len(rows), len(rows)
        bounds = [
            (
                trunk_us(batch, CONTEXT, bound) / 1e3,
                ratio_along(rows, CONTEXT, bound),
                ratio_along(chain, CONTEXT, bound),
            )
            for bound in (0, 1)
        ]
        gain = sorted(along / own for _, along, own in bounds)
        ranges = (_range(*both) for both in zip(*bounds, strict=True))
        yield _line(_name(rows), *ranges, _range(*gain))


def program_table() -> Iterator[str]:
    heads = ("splits", "programs", "find nothing", "iterations", "us a layer", "with a list")
    yield _line("step", "context", *heads, "of a step")
    yield _line(*["---"] * 9)
    for context in (CONTEXT, OTHER_CONTEXTS[-1]):
        for rows in (rows for rows in (*STEPS, *MIXED) if _fits(rows, context)):
            one = attention(rows, context)
            _, step = _sums(parts_us(rows, context, 0))
            saved = LAYERS * (one.us - one.us_of_list) / step
            us = (f"{one.us:.1f}", f"{one.us_of_list:.1f}", f"{saved:.1%}")
            counts = (one.splits, one.programs, one.empty, one.iterations)
            yield _line(_name(rows), f"{context:,}", *counts, *us)


def _fits(rows: tuple[int, ...], context: int) -> bool:
    return len(rows) * context * TOKEN_BYTES * LAYERS < CACHE_BYTES


def _name(rows: tuple[int, ...]) -> str:
    """Requests times their rows, those with trees first."""
    counts = Counter(rows)
    return " + ".join(f"{count} x {number}" for number, count in counts.items())


def _ms(at_least: tuple[float, float], at_most: tuple[float, float]) -> str:
    plain, trees = zip(at_least, at_most, strict=True)
    return f"{_range(*(us / 1e3 for us in plain))} -> {_range(*(us / 1e3 for us in trees))}"


def _range(least: float, most: float) -> str:
    first, last = f"{least:.2f}", f"{most:.2f}"
    return first if first == last else f"{first} to {last}"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print("\n".join((*step_table(), "", *trunk_table(), "", *program_table())))
