"""Drafting by phrases: the rows of a draft forward, and the window that phrases come from.

Ouroboros (arXiv 2402.13720), section 3.1, on lookahead decoding. A forward of the draft model
carries, behind the last token, a window of W columns by L - 2 levels, and the phrases that followed
the last token before, as guesses. What each of these rows may see, and its position, are those of a
tree below the last token, so that trees' masks, positions and walk serve here too:

    level 0 of the window     a chain, column w below column w - 1: guesses of the next W tokens
    level l > 0, column w     below level l - 1 of its column: the text going on from there
    each guess                a chain of its own

A column is complete when it has all its levels: with the draft's output at its last row it is a
phrase that follows the token before the column. Then every level moves up, and the outputs become
the last one.

Names of dimensions, beside those of `core.tree` and `core.phrase_pool`: `levels` L - 2 of the
paper, one less than the tokens of a phrase; `window` the paper's W; `guesses` its G.
"""

from __future__ import annotations

import torch

from vllm_recycle.core.tree import Node, TreeTemplate
from vllm_recycle.core.verification import NO_TOKEN


def lookahead_template(*, window: int, levels: int, guesses: int, length: int) -> TreeTemplate:
    """The rows of a draft forward as a tree: the window level by level, then guess by guess.

    Each guess has `length` tokens. Ranks only tell siblings apart.
    """
    nodes: list[Node] = [(column, 0) for column in range(window)]
    # Column w of level 0 already has column w + 1 below it.
    for level in range(1, levels):
        first_parent = len(nodes) - window + 1
        nodes += [(first_parent + column, 1 if level == 1 else 0) for column in range(window)]
    for guess in range(guesses):
        nodes.append((0, 1 + guess))
        nodes += [(len(nodes) + place, 0) for place in range(length - 1)]
    return TreeTemplate(tuple(nodes), f"lookahead {window} x {levels}, {guesses} x {length}")


def lengthened_template(*, gamma: int, branches: int, length: int) -> TreeTemplate:
    """What the target verifies: a trunk, and phrases below its end (section 3.2).

    The trunk has gamma tokens, and below it are so many branches (the paper's K) of so many tokens.
    """
    nodes: list[Node] = [(row, 0) for row in range(gamma)]
    for branch in range(branches):
        nodes.append((gamma, branch))
        nodes += [(len(nodes) + place, 0) for place in range(length - 1)]
    return TreeTemplate(tuple(nodes), f"ouroboros {gamma} + {branches} x {length}")


def advance_window(
    window: torch.Tensor,
    num_filled: torch.Tensor,
    outputs: torch.Tensor,
    last_token_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take in the draft's outputs at the window's rows.

    While levels are missing, the outputs of the last one there is become the next one. With all of
    them, each column and its output are a phrase, and every level moves up.

    Args:
        window: int64 [batch, levels, window]; levels that hold no tokens are not read.
        num_filled: int64 [batch], levels that hold tokens, at least 1.
        outputs: int64 [batch, levels, window], the draft's most probable token at each row.
        last_token_ids: int64 [batch], the token before the window.

    Returns:
        Window and levels as above; the token that each new phrase follows, int64 [batch, window],
        -1 for none; and these phrases, int64 [batch, window, length].

    """
    batch, levels, columns = window.shape
    is_complete = num_filled == levels
    last_level = (num_filled - 1)[:, None, None].expand(batch, 1, columns)
    new_level = outputs.gather(1, last_level)
    owners = torch.cat((last_token_ids[:, None], window[:, 0, :-1]), dim=1)
    phrases = torch.cat((window, new_level), dim=1).transpose(1, 2)
    moved_window = torch.cat((window[:, 1:], new_level), dim=1)
    filled_window = window.scatter(1, (last_level + 1).clamp(max=levels - 1), new_level)
    return (
        torch.where(is_complete[:, None, None], moved_window, filled_window),
        (num_filled + 1).clamp(max=levels),
        owners.where(is_complete[:, None], NO_TOKEN),
        phrases,
    )
