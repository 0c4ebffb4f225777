"""What the nodes of a template are worth, counted while serving; and how many of them to verify."""

from __future__ import annotations

import torch

from vllm_recycle.core.acceptance import MOST_SEEN, PRIOR_WEIGHT
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.verification import NO_TOKEN, WalkResult

# What is taken to be right of a node that was hardly seen: many, so that it is tried.
PRIOR = 0.5


class NodeAcceptance:
    """How often each node was right where its parent was visited.

    It is counted at every visited row, of all nodes that were drafted below it, verified or not. So
    a tree that was cut to nothing still teaches what its first nodes are worth.

    Args:
        tree: the template.

    Attributes:
        counts: float64 [nodes, 2], how often a node was right, and how often it was seen.

    """

    def __init__(self, tree: TreeTemplate) -> None:
        self.tree = tree
        self.counts = torch.empty(tree.num_nodes, 2, dtype=torch.float64)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.counts[:] = torch.tensor([PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT])

    def count(self, drafts: torch.Tensor, walked: WalkResult) -> None:
        """Take in a step.

        Args:
            drafts: int64 [batch, nodes], all that was drafted, padded with -1.
            walked: what the walk accepted.

        """
        batch, rows = len(drafts), self.tree.num_nodes + 1
        # One row more than there are, for the places of a path that are none.
        follower = torch.full((batch, rows + 1), NO_TOKEN)
        follower.scatter_(1, walked.path.where(walked.path >= 0, rows), walked.token_ids)
        follows = follower[:, self.tree.parents[1:]]
        was_seen = (drafts != NO_TOKEN) & (follows != NO_TOKEN)
        self.counts[:, 0] += (was_seen & (drafts == follows)).sum(0)
        self.counts[:, 1] += was_seen.sum(0)
        self.counts[self.counts[:, 1] > MOST_SEEN] *= 0.5

    def worths(self, drafts: torch.Tensor) -> torch.Tensor:
        """float64 [batch, nodes], the chance that each node of these drafts is accepted."""
        filled = torch.nn.functional.pad((drafts != NO_TOKEN).double(), (1, 0), value=1.0)
        worths = filled.clone()
        rates = torch.nn.functional.pad(self.counts[:, 0] / self.counts[:, 1], (1, 0))
        for level in self.tree.levels:
            above = worths[:, self.tree.parents[level]]
            worths[:, level] = filled[:, level] * rates[level] * above
        return worths[:, 1:]


def best_prefix(worths: torch.Tensor, num_other_rows: int, times: torch.Tensor) -> int:
    """How many nodes of their drafts some requests should have verified, all as many.

    Args:
        worths: float64 [batch, nodes], 0 where a node was not filled.
        num_other_rows: rows of the step beside those of these trees, each of which gives a token.
        times: float64 [rows + 1], the time of a step by its rows.

    Returns:
        The number with the most tokens for the time; of several the least.

    """
    batch, nodes = worths.shape
    # Of a prefix nobody computes what is behind its last filled node.
    place = torch.arange(1, nodes + 1).where(worths > 0, 0)
    rows = torch.nn.functional.pad(place.cummax(1).values.sum(0), (1, 0))
    tokens = torch.nn.functional.pad(worths.sum(0).cumsum(0), (1, 0))
    rows, tokens = rows + batch + num_other_rows, tokens + batch + num_other_rows
    gains = tokens / times[rows.clamp(max=len(times) - 1)]
    gains[1:].masked_fill_(rows[1:] >= len(times), 0.0)
    return int(gains.argmax())
