"""The adjacency matrix: each token's k most probable successors, as the target last gave them.

Token Recycling, section 3.1. One table holds all rows, so that a look-up is one gather and an
update one scatter:

    address 0                        the row of "no token": every successor is -1
    1 .. vocab                       the shared matrix, the row of token t at t + 1
    vocab + 1                        a row that is written and never read
    then overlay_rows a sequence     each sequence's overlay, direct-mapped: token t at t % rows

A row is `[tag, successor 0 .. successor k - 1]`, int32, best first. The tag is the token that the
row answers for: an overlay row of another token is passed over. In the shared matrix the tag says
that the row was ever written; one that was not has successors -1. The overlay, where there is one,
is consulted before the shared matrix.

`fill_tree` and `update_from_logits` are pure tensor functions over a whole batch, the references
for their kernels; `TemplateMatrix` owns the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from vllm_recycle.core.saved_state import KIND, SavedState, check_token_ids
from vllm_recycle.core.tree import TreeTemplate

Scope = Literal["sequence", "shared", "isolated"]
SCOPES: tuple[str, ...] = get_args(Scope)

OVERLAY_ROWS = 4096
UNWRITTEN = -1
# Differs from every token and from -1, so that the look-up of -1 never meets an empty tag.
EMPTY_TAG = -2


@dataclass(frozen=True, slots=True)
class TemplateLayout:
    """Where rows are, and who reads and writes them.

    Attributes:
        vocab_size: number of token ids.
        k: successors of a row.
        overlay_rows: rows of one overlay, a power of two; 0 where there are none.
        reads_shared: whether a token that the overlay lacks is looked up in the shared matrix.
        writes_shared: whether the shared matrix is written.

    """

    vocab_size: int
    k: int
    overlay_rows: int
    reads_shared: bool
    writes_shared: bool

    @property
    def dump_address(self) -> int:
        """The row that is written and never read."""
        return self.vocab_size + 1

    @property
    def first_overlay(self) -> int:
        return self.vocab_size + 2


class TemplateMatrix(SavedState):
    """The shared matrix, the overlays of the running sequences, and who reads and writes what.

    Args:
        vocab_size: number of token ids.
        k: successors kept for each token.
        scope: `sequence`: every step is written to its sequence's overlay and to the shared
            matrix; `shared`: to the shared matrix alone, and there are no overlays; `isolated`:
            to the overlay alone, so that no sequence sees another's tokens.
        max_num_reqs: most sequences at a time; each has a `req_state_idx` below it.
        hot_start: whether a sequence reads the shared matrix, and so inherits what was there
            before it.
        overlay_rows: rows of one overlay, a power of two.
        device: where the table lives.

    Raises:
        ValueError: `hot_start=False` with scope `shared`, which has nothing else to read.

    """

    def __init__(
        self,
        vocab_size: int,
        k: int,
        *,
        scope: Scope = "sequence",
        max_num_reqs: int = 1,
        hot_start: bool = True,
        overlay_rows: int = OVERLAY_ROWS,
        device: torch.device | str = "cpu",
    ) -> None:
        if scope not in SCOPES:
            raise ValueError(f"scope: got {scope!r}, expected one of {SCOPES}")
        if scope == "shared" and not hot_start:
            raise ValueError(
                "hot_start: got false with scope 'shared', expected scope 'sequence' or "
                "'isolated': without an overlay a sequence would have nothing to draft from"
            )
        if overlay_rows < 1 or overlay_rows & (overlay_rows - 1):
            raise ValueError(f"overlay_rows: got {overlay_rows}, expected a power of two")
        self.scope = scope
        self.layout = TemplateLayout(
            vocab_size=vocab_size,
            k=k,
            overlay_rows=overlay_rows if scope != "shared" else 0,
            reads_shared=hot_start,
            writes_shared=scope != "isolated",
        )
        rows = self.layout.first_overlay + max_num_reqs * self.layout.overlay_rows
        self.table = torch.empty(rows, 1 + k, dtype=torch.int32, device=device)
        self.clear()

    @property
    def vocab_size(self) -> int:
        return self.layout.vocab_size

    @property
    def k(self) -> int:
        return self.layout.k

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"adjacency_matrix": self.table}

    @property
    def places(self) -> dict[str, torch.Tensor]:
        return {"adjacency_matrix": self.shared}

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes

    @property
    def shared(self) -> torch.Tensor:
        """int32 [vocab, k], the shared matrix (a view); -1 in rows that were never written."""
        return self.table[1 : self.vocab_size + 1, 1:]

    @property
    def num_written(self) -> int:
        """How many rows of the shared matrix were ever written."""
        return int((self.table[1 : self.vocab_size + 1, 0] >= 0).sum())

    @property
    def share_written(self) -> float:
        """The part of the rows of the shared matrix that were ever written."""
        return self.num_written / self.vocab_size

    def clear(self) -> None:
        """Forget everything."""
        self.table.fill_(UNWRITTEN)
        self.table[:, 0] = EMPTY_TAG

    def clear_overlays(self, req_state_indices: Sequence[int]) -> None:
        """Forget what these sequences wrote into their overlays."""
        rows = self.layout.overlay_rows
        if rows:
            overlays = self.table[self.layout.first_overlay :].view(-1, rows, 1 + self.k)
            for req_state_idx in req_state_indices:
                overlays[req_state_idx, :, 0] = EMPTY_TAG

    def rows_of(self, expanded_idx_mapping: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 [n, k], the successors that each sequence sees for each token, -1 where none."""
        address = _row_address(self.table, expanded_idx_mapping, token_ids, self.layout)
        return self.table[address, 1:]

    def update(
        self, expanded_idx_mapping: torch.Tensor, token_ids: torch.Tensor, successors: torch.Tensor
    ) -> None:
        """Write rows; of rows for the same place, the last one given stays.

        Args:
            expanded_idx_mapping: int64 [n], of each row.
            token_ids: int64 [n], the token of each row, -1 for a row to ignore.
            successors: integer [n, k], best first.

        """
        _write_rows(self.table, expanded_idx_mapping, token_ids, successors, self.layout)

    def validate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_token_ids(tensors["adjacency_matrix"], self.vocab_size)

    def load(self, path: str | Path, *, fingerprint: str, kind: str = KIND) -> None:
        super().load(path, fingerprint=fingerprint, kind=kind)
        tokens = torch.arange(self.vocab_size, dtype=torch.int32, device=self.table.device)
        self.table[1 : self.vocab_size + 1, 0] = tokens.where(self.shared[:, 0] >= 0, EMPTY_TAG)

    @property
    def facts(self) -> dict[str, object]:
        return {"vocab_size": self.vocab_size, "k": self.k}


def fill_tree(
    table: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_token_ids: torch.Tensor,
    *,
    tree: TreeTemplate,
    layout: TemplateLayout,
) -> torch.Tensor:
    """Draft a tree below each last token, one gather a level (section 3.2).

    Args:
        table: int32 [addresses, 1 + k].
        idx_mapping: int64 [batch].
        last_token_ids: int64 [batch].
        tree: the template to fill.
        layout: of the table.

    Returns:
        int64 [batch, nodes]; -1 where the matrix has no successor, and below such a node.

    """
    filled = last_token_ids.new_empty(last_token_ids.shape[0], tree.num_nodes + 1)
    filled[:, 0] = last_token_ids
    for level in tree.levels:
        parents = filled[:, tree.parents[level]]
        address = _row_address(table, idx_mapping[:, None], parents, layout)
        filled[:, level] = table[address, 1 + tree.ranks[level]].to(filled.dtype)
    return filled[:, 1:]


def update_from_logits(
    table: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    *,
    layout: TemplateLayout,
) -> None:
    """Write the top-k of every row as the successors of its token (section 3.1).

    Of several rows for one place the last stays, on every rank alike.

    Args:
        table: int32 [addresses, 1 + k], written in place.
        expanded_idx_mapping: int64 [n], of each row.
        token_ids: int64 [n], the token of each row, -1 for a row to ignore.
        logits: floating [n, vocab].
        layout: of the table.

    """
    successors = logits.topk(layout.k, dim=-1).indices
    _write_rows(table, expanded_idx_mapping, token_ids, successors, layout)


def _row_address(
    table: torch.Tensor, idx_mapping: torch.Tensor, token_ids: torch.Tensor, layout: TemplateLayout
) -> torch.Tensor:
    """int64, the address of the row that answers for each token, seen from its sequence."""
    shared = token_ids + 1 if layout.reads_shared else torch.zeros_like(token_ids)
    if not layout.overlay_rows:
        return shared
    own = _overlay_address(idx_mapping, token_ids, layout)
    return torch.where(table[own, 0] == token_ids, own, shared)


def _overlay_address(
    idx_mapping: torch.Tensor, token_ids: torch.Tensor, layout: TemplateLayout
) -> torch.Tensor:
    slot = token_ids & (layout.overlay_rows - 1)
    return layout.first_overlay + idx_mapping * layout.overlay_rows + slot


def _write_rows(
    table: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    successors: torch.Tensor,
    layout: TemplateLayout,
) -> None:
    rows = torch.cat((token_ids[:, None], successors), dim=1).to(torch.int32)
    places = [token_ids + 1] if layout.writes_shared else []
    if layout.overlay_rows:
        places.append(_overlay_address(expanded_idx_mapping, token_ids, layout))
    # A scatter with repeated addresses has no order of its own: all but the last row for an
    # address, and rows to ignore, are redirected to the row that nobody reads.
    address = torch.cat([place.masked_fill(token_ids < 0, layout.dump_address) for place in places])
    in_order, order = address.sort(stable=True)
    superseded = torch.zeros_like(in_order, dtype=torch.bool)
    superseded[:-1] = in_order[:-1] == in_order[1:]
    target = in_order.masked_fill(superseded, layout.dump_address)
    table[target] = rows.repeat(len(places), 1)[order]
