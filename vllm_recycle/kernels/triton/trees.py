"""Trees as data: the topology of each request's tree in buffers that never move.

Kernels that know one template for all read the same tables without a request's index; those of a
template are constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_recycle.core.tree import TreeTemplate

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class DeviceTrees:
    """The trees of all requests, by `req_state_idx`; each is written anew when it is grown.

    Rows behind the last node of a tree are children of its root, as in `Trees`.

    Attributes:
        parents: int32 [max_num_reqs, rows]; the root has parent 0.
        depths: int32 [max_num_reqs, rows]; the root has depth 0.
        ancestor_bits: int32 [max_num_reqs, rows, words], see the function of that name.
        depth: the most levels of any tree below its root, on the host.

    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestor_bits: torch.Tensor
    depth: int

    @classmethod
    def make(
        cls, max_num_reqs: int, num_nodes: int, *, depth: int, device: torch.device | str
    ) -> DeviceTrees:
        """Trees without a node, with room for some."""
        template = TreeTemplate(tuple((0, rank) for rank in range(num_nodes)))
        tables = (template.parents, template.depths, ancestor_bits(template.ancestor_mask))
        parents, depths, bits = (
            table.to(device, torch.int32).repeat(max_num_reqs, *[1] * table.ndim)
            for table in tables
        )
        return cls(parents, depths, bits, depth)

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1] - 1


def ancestor_bits(ancestor_mask: torch.Tensor) -> torch.Tensor:
    """Ancestor masks in bits: column c of a row is bit c % 32 of its word c // 32.

    Args:
        ancestor_mask: bool [..., rows, rows], see `core.tree`.

    Returns:
        int32 [..., rows, words].

    """
    columns = ancestor_mask.shape[-1]
    mask = torch.nn.functional.pad(ancestor_mask.to(torch.int32), (0, -columns % WORD_BITS))
    bit = torch.arange(WORD_BITS, dtype=torch.int32, device=mask.device)
    return (mask.unflatten(-1, (-1, WORD_BITS)) << bit).sum(dim=-1, dtype=torch.int32)
