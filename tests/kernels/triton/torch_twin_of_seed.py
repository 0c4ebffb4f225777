"""What seeding does to the adjacency matrix on the device: plain Python, and what is correct.

There a slice of a prompt is taken in at once, see `vllm_recycle.kernels.triton.matrix.seed`;
`core.learn.seed` goes position by position. Both are the same where nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.adjacency import MAX_STEADINESS, AdjacencyMatrix


def seed(
    matrix: AdjacencyMatrix,
    stamps: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    req_state_indices: Sequence[int],
    lengths: Sequence[int],
    slice_size: int,
) -> None:
    """See `vllm_recycle.kernels.triton.matrix.seed.seed`."""
    assert not stamps.any()
    layout = matrix.layout
    texts = [text.tolist() for text in token_ids.split(list(lengths))]
    positions = [
        (req_state_idx, text, end)
        for req_state_idx, text in zip(req_state_indices, texts, strict=True)
        for end in range(1, len(text))
    ]
    for first in range(0, len(positions), slice_size):
        # By address, what was found of it in order: (head, salt), follower, rest.
        found: dict[int, list[tuple[tuple[int, int], int, list[int]]]] = {}
        for req_state_idx, text, end in positions[first : first + slice_size]:
            salt = int(matrix.salts[req_state_idx])
            if not 0 <= text[end] < layout.vocab_size:
                continue
            context = text[max(0, end - layout.reach) : end][::-1]
            known = {
                index: matrix.table[address, 1:-1].tolist()
                for address, index, _ in matrix.known_entries(context, salt)
            }
            for index, own, address, head in layout.each_address(context, salt):
                if bool(own) == layout.has_own:
                    rest = known.get(index, known.get(0, []))
                    one = ((head, salt if own else 0), text[end], rest)
                    found.setdefault(address, []).append(one)
        merged = {address: _merged(matrix, address, seen) for address, seen in found.items()}
        for address, entry in merged.items():
            matrix.table[address] = torch.tensor(entry, dtype=torch.int32)


def _merged(
    matrix: AdjacencyMatrix,
    address: int,
    seen: list[tuple[tuple[int, int], int, list[int]]],
) -> list[int]:
    (head, salt), _, rest = seen[-1]
    followers = [follower for context, follower, _ in reversed(seen) if context == (head, salt)]
    latest = list(dict.fromkeys(followers))[:3]
    run = next((i for i, token in enumerate(followers) if token != latest[0]), len(followers))
    old, first = matrix.table[address, :2].tolist()
    stays = matrix.is_written(address, head, salt) and first == latest[0] and len(latest) == 1
    steadiness = min(MAX_STEADINESS, (old & 3) + run if stays else run - 1)
    successors = [*latest, *(token for token in rest if token >= 0 and token not in latest)]
    successors = [*successors, *[-1] * matrix.layout.k][: matrix.layout.k]
    return [head | steadiness, *successors, salt]
