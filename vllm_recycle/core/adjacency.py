"""The adjacency matrix: each token's k most probable successors, as the target last gave them.

Token Recycling, section 3.1. One table holds all rows, so that a look-up is one gather and an
update one scatter:

    address 0                        the row of "no token": every successor is -1
    1 .. vocab                       the shared matrix, the row of token t at t + 1
    vocab + 1                        a row that is written and never read
    then overlay_rows a sequence     each sequence's overlay, direct-mapped: token t at t % rows

A row is `[tag, successor 0 .. successor k - 1]`, int32, best first. The tag is the token that the
row answers for, so a row that was never written and an overlay row of another token answer for
none. The overlay, where there is one, is consulted before the shared matrix.

`fill_tree` and `write_rows` are pure tensor functions over a whole batch, the references for
their device kernels; `AdjacencyMatrix` owns the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_recycle.core.tree import TreeTemplate

Scope = Literal["sequence", "shared", "isolated"]
SCOPES: tuple[str, ...] = get_args(Scope)

OVERLAY_ROWS = 4096
NO_TOKEN_ADDRESS = 0
UNWRITTEN = -1
# Differs from every token and from -1, so that the look-up of -1 never meets an empty tag.
EMPTY_TAG = -2


class AdjacencyMatrix:
    """The shared matrix, the overlays of the running sequences, and who reads and writes what.

    Args:
        vocab_size: number of token ids.
        k: successors kept for each token.
        scope: `sequence`: every step is written to its sequence's overlay and to the shared
            matrix; `shared`: to the shared matrix alone, and there are no overlays; `isolated`:
            to the overlay alone, so that no sequence sees another's tokens.
        num_sequences: most sequences at a time; sequences are numbered from 0.
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
        num_sequences: int = 1,
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
        self.vocab_size = vocab_size
        self.k = k
        self.scope = scope
        self.hot_start = hot_start
        self.overlay_rows = overlay_rows if scope != "shared" else 0
        rows = vocab_size + 2 + num_sequences * self.overlay_rows
        self.table = torch.empty(rows, 1 + k, dtype=torch.int32, device=device)
        self.clear()

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

    def clear(self) -> None:
        """Forget everything."""
        self.table.fill_(UNWRITTEN)
        self.table[:, 0] = EMPTY_TAG

    def clear_overlays(self, sequences: Sequence[int]) -> None:
        """Forget what these sequences wrote into their overlays."""
        if self.overlay_rows:
            overlays = self.table[self.vocab_size + 2 :].view(-1, self.overlay_rows, 1 + self.k)
            for sequence in sequences:
                overlays[sequence, :, 0] = EMPTY_TAG

    def fill(
        self,
        sequences: torch.Tensor,
        last_token_ids: torch.Tensor,
        *,
        tree: TreeTemplate,
    ) -> torch.Tensor:
        """Draft a tree below the last token of each sequence; see `fill_tree`."""
        return fill_tree(
            self.table,
            sequences,
            last_token_ids,
            tree=tree,
            vocab_size=self.vocab_size,
            overlay_rows=self.overlay_rows,
            reads_shared=self.hot_start,
        )

    def rows_of(self, sequences: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 [n, k], the successors that each sequence sees for each token, -1 where none."""
        address = row_address(
            self.table,
            sequences,
            token_ids,
            vocab_size=self.vocab_size,
            overlay_rows=self.overlay_rows,
            reads_shared=self.hot_start,
        )
        return self.table[address, 1:]

    def update(
        self,
        sequences: torch.Tensor,
        token_ids: torch.Tensor,
        successors: torch.Tensor,
    ) -> None:
        """Write rows; of rows for the same place, the last one given stays.

        Args:
            sequences: int64 [n], the sequence of each row.
            token_ids: int64 [n], the token of each row, -1 for a row to ignore.
            successors: integer [n, k], best first.

        """
        rows = torch.cat((token_ids[:, None], successors), dim=1).to(torch.int32)
        shared = token_ids + 1
        ignored = shared == NO_TOKEN_ADDRESS
        address = shared.masked_fill(ignored, self.vocab_size + 1)
        if self.overlay_rows:
            slot = token_ids & (self.overlay_rows - 1)
            overlay = self.vocab_size + 2 + sequences * self.overlay_rows + slot
            overlay = overlay.masked_fill(ignored, self.vocab_size + 1)
            if self.scope == "isolated":
                address = overlay
            else:
                address, rows = torch.cat((address, overlay)), torch.cat((rows, rows))
        write_rows(self.table, address, rows, dump_address=self.vocab_size + 1)

    def save(self, path: str | Path, *, fingerprint: str) -> None:
        """Write the shared matrix as safetensors, with what `load` checks."""
        metadata = {"vocab_size": str(self.vocab_size), "k": str(self.k)}
        metadata["fingerprint"] = fingerprint
        partial = Path(f"{path}.partial")
        save_file({"adjacency_matrix": self.shared.cpu().contiguous()}, partial, metadata)
        partial.replace(path)

    def load(self, path: str | Path, *, fingerprint: str) -> None:
        """Read the shared matrix from a file that `save` wrote.

        Raises:
            ValueError: no such file, or one of another vocabulary, k or model.

        """
        try:
            with safe_open(str(path), "pt") as file:
                got = file.metadata() or {}
                expected = {"vocab_size": str(self.vocab_size), "k": str(self.k)}
                expected["fingerprint"] = fingerprint
                for name, value in expected.items():
                    if got.get(name) != value:
                        raise ValueError(
                            f"matrix file {path}: {name} is {got.get(name)}, expected {value}"
                        )
                shared = file.get_tensor("adjacency_matrix")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"matrix file {path}: no adjacency matrix: {error}") from error
        self.shared.copy_(shared)
        tags = torch.arange(self.vocab_size, dtype=torch.int32).where(shared[:, 0] >= 0, EMPTY_TAG)
        self.table[1 : self.vocab_size + 1, 0] = tags.to(self.table.device)


def row_address(
    table: torch.Tensor,
    sequences: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    vocab_size: int,
    overlay_rows: int,
    reads_shared: bool,
) -> torch.Tensor:
    """The row that answers for each token, seen from its sequence.

    Args:
        table: int32 [addresses, 1 + k], laid out as this module says.
        sequences: int64 [...], broadcastable to `token_ids`.
        token_ids: int64 [...]; -1 is answered by the row of "no token".
        vocab_size: number of token ids.
        overlay_rows: rows of one overlay, 0 where there are none.
        reads_shared: whether a token that the overlay lacks is looked up in the shared matrix.

    Returns:
        int64 [...], addresses into `table`.

    """
    shared = token_ids + 1 if reads_shared else torch.zeros_like(token_ids)
    if not overlay_rows:
        return shared
    slot = token_ids & (overlay_rows - 1)
    overlay = slot + (sequences * overlay_rows + (vocab_size + 2))
    hit = table[:, 0].take_along_dim(overlay.flatten(), 0).view_as(token_ids) == token_ids
    return torch.where(hit, overlay, shared)


def fill_tree(
    table: torch.Tensor,
    sequences: torch.Tensor,
    last_token_ids: torch.Tensor,
    *,
    tree: TreeTemplate,
    vocab_size: int,
    overlay_rows: int,
    reads_shared: bool,
) -> torch.Tensor:
    """Draft a tree below each last token, one gather a level.

    Args:
        table: int32 [addresses, 1 + k].
        sequences: int64 [batch].
        last_token_ids: int64 [batch].
        tree: the template to fill.
        vocab_size: number of token ids.
        overlay_rows: rows of one overlay, 0 where there are none.
        reads_shared: as for `row_address`.

    Returns:
        int64 [batch, nodes]; -1 where the matrix has no successor, and below such a node.

    """
    width = table.shape[1]
    successors = table.view(-1)
    filled = last_token_ids.new_empty(last_token_ids.shape[0], tree.num_nodes + 1)
    filled[:, 0] = last_token_ids
    for level in tree.levels:
        address = row_address(
            table,
            sequences[:, None],
            filled[:, tree.parents[level]],
            vocab_size=vocab_size,
            overlay_rows=overlay_rows,
            reads_shared=reads_shared,
        )
        filled[:, level] = successors[address * width + (1 + tree.ranks[level])].to(filled.dtype)
    return filled[:, 1:]


def write_rows(
    table: torch.Tensor,
    address: torch.Tensor,
    rows: torch.Tensor,
    *,
    dump_address: int,
) -> None:
    """Scatter rows so that of several for one address the last stays, on every rank alike.

    A scatter with repeated addresses has no order of its own; here all but the last of them are
    redirected to a row that nobody reads.

    Args:
        table: int32 [addresses, 1 + k], written in place.
        address: int64 [n].
        rows: int32 [n, 1 + k].
        dump_address: the address of the row that is never read.

    """
    in_order, order = address.sort(stable=True)
    superseded = torch.zeros_like(in_order, dtype=torch.bool)
    superseded[:-1] = in_order[:-1] == in_order[1:]
    table[in_order.masked_fill_(superseded, dump_address)] = rows[order]
