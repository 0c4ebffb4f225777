"""Rounds of Ouroboros with a smaller window and fewer guesses than others of the same requests."""

from __future__ import annotations

import torch

from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.ouroboros import OuroborosProposer

VOCAB = 97
SHAPE = DraftShape(gamma=4, window=4, guesses=4, phrase_length=4, branches=2)
SMALLER = SHAPE.halved()
SLOT = torch.tensor([1])


class Successors:
    """A draft model that looks at each row's token alone."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def forward(
        self, idx_mapping: torch.Tensor, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor
    ) -> torch.Tensor:
        self.widths.append(row_token_ids.shape[1])
        last = (new_token_ids >= 0).sum(dim=1, keepdim=True) - 1
        rows = torch.cat((new_token_ids.gather(1, last), row_token_ids), dim=1)
        return (rows * 5 + 1) % VOCAB


def proposer() -> OuroborosProposer:
    return OuroborosProposer(
        SHAPE,
        smaller_shapes=[SMALLER],
        vocab_size=VOCAB,
        max_num_reqs=2,
        stops_early=False,
        shares_pool=False,
    )


def drafts(one: OuroborosProposer, first: int, shapes: list[DraftShape]) -> list[list[int]]:
    """Of a request in the slot, a round of each of these shapes; what it drafts is accepted."""
    prompt = torch.arange(first, first + 9) % VOCAB
    one.begin(torch.full_like(prompt, int(SLOT)), prompt)
    found, last = [], prompt[-1:]
    for shape in shapes:
        draft = one.propose(SLOT, last, draft_model=Successors(), shape=shape)
        found.append(draft[0].tolist())
        last = draft[:, SHAPE.gamma - 1]
    one.release([int(SLOT)])
    return found


def test_forwards_have_the_rows_of_the_round():
    model, one = Successors(), proposer()
    one.begin(SLOT.repeat(5), torch.arange(5))
    for shape in (SHAPE, SMALLER):
        one.propose(SLOT, torch.tensor([4]), draft_model=model, shape=shape)
    assert set(model.widths) == {shape.lookahead().num_nodes for shape in (SHAPE, SMALLER)}


def test_drafts_of_every_shape_are_the_model_s():
    for draft in drafts(proposer(), 3, [SHAPE, SMALLER, SMALLER, SHAPE, SHAPE]):
        trunk = draft[: SHAPE.gamma]
        assert [(token * 5 + 1) % VOCAB for token in trunk[:-1]] == trunk[1:]


def test_a_window_that_grows_holds_nothing_of_another_request():
    shapes = [SMALLER] * 3 + [SHAPE] * 4
    used, fresh = proposer(), proposer()
    drafts(used, 40, [SHAPE] * 4)
    assert drafts(used, 3, shapes) == drafts(fresh, 3, shapes)
    assert used.windows[SLOT].equal(fresh.windows[SLOT])
