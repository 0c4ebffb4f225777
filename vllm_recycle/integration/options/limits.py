"""How many nodes a tree has in a batch of a given size, by default.

Every prefix of a template is a tree, so a draft is made to fit by taking a prefix. Drafting by a
draft model costs rows too, those of its forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

Schedule = Sequence[tuple[int, int, int]]
# More requests, or rows, than any step has.
UNLIMITED = 1 << 20

# Rows of all trees of a step together, on a GPU. Below some 300 rows the matrix products of an
# H100 in 16 bits take as long as the reading of their weights (990 TFLOPS, 3.35 TB/s, two bytes a
# weight), so that further rows cost little; a tree of 80 nodes fits three times. For trees that are
# grown this is where nothing else is known.
MAX_TREE_ROWS = 256
# Fewer rows than these of all trees of a step together are not worth a size of their own.
MIN_TREE_ROWS = 6
# Rows of a draft forward of Ouroboros, of all its requests together: on CPU those of four requests
# with the paper's sizes. By its peaks an H100 takes less than twice as long for 512 as for one.
MAX_DRAFT_ROWS, MAX_DRAFT_ROWS_ON_GPU = 1024, 512


def halving_schedule(
    num_nodes: int, max_rows: int, *, max_num_reqs: int = UNLIMITED - 1
) -> list[tuple[int, int, int]]:
    """vLLM's `num_speculative_tokens_per_batch_size` for a tree, halved whenever it must shrink.

    Few sizes, since vLLM captures a set of CUDA graphs for each.

    Args:
        num_nodes: of the whole tree.
        max_rows: of all trees of a batch together, roots included.
        max_num_reqs: of the largest batch that has drafts.

    Returns:
        (first batch size, last batch size, nodes), without gaps, from batch size 1; behind the
        last size that has room for a node there are none.
    """
    schedule, range_start = [], 1
    for nodes in _halved(num_nodes):
        range_end = min(max_rows // (nodes + 1), max_num_reqs)
        if range_end >= range_start:
            schedule.append((range_start, range_end, nodes))
            range_start = range_end + 1
    return [*schedule, (range_start, UNLIMITED, 0)]


def sizes_of_batches(num_nodes: int, max_rows: int, max_num_reqs: int) -> list[list[int]]:
    """As `halving_schedule`, all sizes that fit, by the number of requests, without 0.

    Few batches, since each has CUDA graphs of its own.
    """
    return [
        [
            nodes
            for nodes in _halved(num_nodes)
            if 0 < batch * (nodes + 1) <= max_rows
            and (nodes == num_nodes or batch * (nodes + 1) >= MIN_TREE_ROWS)
        ]
        for batch in range(max_num_reqs + 1)
    ]


def _halved(num_nodes: int) -> list[int]:
    """The sizes that a tree may have, the largest first."""
    return [num_nodes >> shift for shift in range(num_nodes.bit_length())]


def largest_drafting_batch(schedule: Schedule, max_num_reqs: int) -> int:
    """The size of the largest batch that has drafts; 0 where none has."""
    sizes = [
        min(range_end, max_num_reqs)
        for range_start, range_end, nodes in schedule
        if nodes and range_start <= max_num_reqs
    ]
    return max(sizes, default=0)
