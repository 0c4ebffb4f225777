"""The trees of requests on a device, in buffers that never move."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_recycle.core.tree import TreeTemplate

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class DeviceTrees:
    """`Trees` of all requests, by `req_state_idx`, with masks in bits, as attention reads them.

    A tree that is grown is written anew each time; those of a template stay as they are.

    Attributes:
        parents: int32 [max_num_reqs, rows]; the root has parent 0.
        depths: int32 [max_num_reqs, rows]; the root has depth 0.
        ancestor_bits: int32 [max_num_reqs, rows, words], see the function of that name.
        are_chains: bool [max_num_reqs], whether a tree that is grown is a chain.
        depth: the most levels of any tree below its root, on the host.

    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestor_bits: torch.Tensor
    are_chains: torch.Tensor
    depth: int

    @classmethod
    def of(
        cls, template: TreeTemplate, max_num_reqs: int, device: torch.device | str
    ) -> DeviceTrees:
        """The same tree for each request."""
        tables = (template.parents, template.depths, ancestor_bits(template.ancestor_mask))
        parents, depths, bits = (
            table.to(device, torch.int32).repeat(max_num_reqs, *[1] * table.ndim)
            for table in tables
        )
        are_chains = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        return cls(parents, depths, bits, are_chains, template.depth)

    @classmethod
    def empty(
        cls, num_nodes: int, max_num_reqs: int, *, depth: int, device: torch.device | str
    ) -> DeviceTrees:
        """Trees to be grown; before that all nodes are children of the root."""
        star = TreeTemplate(tuple((0, rank) for rank in range(num_nodes)))
        return replace(cls.of(star, max_num_reqs, device), depth=depth)

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
