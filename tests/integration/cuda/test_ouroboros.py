"""Ouroboros on Model Runner V2: its output, its drafts, and what its draft model's cache holds.

As published, and with trees that grow along the draft model's trunk. With steps scheduled ahead or
one at a time, with a pool that requests share or one of each, with rounds that are launched or
replayed, and with steps that draft nothing between those that do. Of priced rounds what they cost
is replaced between batches of requests: they are made where they are worth their time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.core.slow_ouroboros import SlowOuroboros, load
from tests.integration.cuda import v2_graphs
from tests.integration.cuda.v2_engines import (
    GREEDY,
    LLM_ARGUMENTS,
    SEEDED,
    TEXT,
    Waits,
    serve_priced,
    tokens_of,
    unwatched,
    with_sizes,
)
from tests.integration.cuda.watched_rounds import SIZES, Watch, capture_rounds
from tests.integration.engines import OUROBOROS, TARGET, counter, engine, runner

pytestmark = pytest.mark.slow

# 20 rows of a request in a draft forward: with the engine's budget of 48 tokens, two requests are
# drafted for, and of more none.
FORWARDS = 2
METHOD = {**OUROBOROS, "max_forwards": FORWARDS, **SIZES}
SCHEDULE = [(1, 2, 9), (3, 1024, 0)]
# 17 rows in a draft forward: two requests have a trunk, a third one a tree without.
TRUNK = {"method": "ouroboros", "model": OUROBOROS["model"], "gamma": SIZES["gamma"]}
TRUNK |= {"max_nodes": 15, "context_mib": 1}
ARGUMENTS = {**LLM_ARGUMENTS, "model": TARGET, "num_gpu_blocks_override": 8}
OPTED_OUT = {**GREEDY, "extra_args": {"speculate": False}}
# Batches of requests: which tokens of TEXT are the prompt, and the sampling parameters.
ALONE = ((0, 40), {**GREEDY, "max_tokens": 12})
BATCHES = {
    "alone": [ALONE],
    # All of the prompt above but its last token comes from the prefix cache. The second one takes
    # several steps, while the first decodes, and ends with the context.
    "two": [((0, 33), SEEDED), ((0, 100), {**GREEDY, "max_tokens": 12})],
    "one opted out": [((0, 24), GREEDY), ((3, 40), OPTED_OUT)],
    # Only a chain of their draft is verified.
    "looking back": [
        ((0, 40), {**GREEDY, "repetition_penalty": 1.2}),
        ((3, 40), {**SEEDED, "bad_words": ["miles", "to the"]}),
    ],
    # Of what is in the prefix cache now the draft's has nothing.
    "after it": [((3, 40), {**GREEDY, "max_tokens": 4})],
    # Too many to be drafted for; two blocks each, which are more than there are, so that one has to
    # wait, and the others are drafted for again.
    "crowded": [((i, i + 28), {**GREEDY, "max_tokens": 16 - 3 * i}) for i in range(4)],
    # The first one has a tree in the step in which the others' prompts end.
    "one more": [((i, i + n), {**GREEDY, "max_tokens": 6}) for i, n in enumerate((28, 28, 16))],
    "same prompt": [ALONE, ((0, 40), {**SEEDED, "max_tokens": 12})],
    "long": [((0, 40), {**GREEDY, "max_tokens": 40})],
    "pair": [((0, 20), GREEDY), ((3, 24), SEEDED)],
    # Two have a trunk.
    "four": [*(((i, i + 12), GREEDY) for i in range(3)), ((5, 17), OPTED_OUT)],
}
ALL = ["alone", "two", "one opted out", "after it", "crowded", "one more", "looking back"]
REPLAYED, TRUNK_REPLAYED = "rounds replayed", "trunk, rounds replayed"
NOW_AND_THEN = "trunk, now and then"
# Engines with speculation: the method, what differs from the default of the engine, and batches.
ENGINES = {
    "ahead": (METHOD, {}, ALL),
    "step by step": (METHOD, {"async_scheduling": False}, ["one opted out", "crowded", "one more"]),
    "own pools": ({**METHOD, "scope": "request"}, {}, ["alone", "same prompt"]),
    REPLAYED: (METHOD, {}, ["alone", "two"]),
    "trunk": (TRUNK, {}, ALL),
    TRUNK_REPLAYED: (TRUNK, {}, ["alone", "two"]),
    NOW_AND_THEN: (TRUNK, {}, ["long", "two", "one opted out", "crowded"]),
}
# Batches, and what a round and trees that grow alone are taken to last; see `serve_priced`.
PRICES = {
    "as measured": ("pair", None, 1e9),
    "dear": ("pair", 1e9, 1e9),
    "dear, rows alone free": ("pair", 1e9, 0.0),
    "free": ("four", 0.0, 1e9),
}
NUM_ROUNDS = 4
# Keys and values are of order one to ten; float32, over forwards of other shapes.
CACHE_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def slow_rounds(result) -> list[list]:
    """Trunk and branches of the first rounds behind a prompt, and of those when it comes again."""
    slow = SlowOuroboros(load(TARGET), load(OUROBOROS["model"]), **SIZES, max_forwards=FORWARDS)
    found = []
    for _ in range(2):
        sequence = slow.begin_behind(result["prompt"])
        rounds = [slow.step(sequence) for _ in range(NUM_ROUNDS)]
        found.append([[done.trunk, [list(branch) for branch in done.branches]] for done in rounds])
    return found


@pytest.mark.parametrize("name", ENGINES)
class TestEveryEngine:
    def test_tokens_equal_those_without_speculation(self, result, name):
        drafted = result[name]["token ids"]
        assert drafted == {name: result["plain"][name] for name in drafted}
        assert result[name]["seen"]["accepted tokens"] > 2

    def test_the_draft_s_cache_has_the_text_and_drafting_is_not_in_vain(self, result, name):
        seen = result[name]["seen"]
        assert seen["checked caches"] > 10
        assert result[name]["cache error"] < CACHE_TOLERANCE
        assert (
            seen["drafts behind a part of the text"] == seen["draft forwards without drafts"] == 0
        )
        assert result[name]["waits"] == []


@pytest.mark.parametrize("name", ["ahead", "step by step", "trunk"])
def test_steps_were_of_every_kind(result, name):
    seen = result[name]["seen"]
    kinds = ["only trees", "only plain rows", "both", "trees that are the last"]
    kinds += ["rounds of 1", "rounds of 2", "preemptions", "tokens from the prefix cache"]
    assert [kind for kind in kinds if not seen[kind]] == []
    # The first branch behind a trunk lies where it would be moved to.
    assert (seen["moved rows"] > 0) == (name == "trunk")
    assert (seen["ahead"] > 0) == (name != "step by step")


def test_the_draft_catches_up_where_nothing_was_drafted(result):
    seen = result["ahead"]["seen"]
    kinds = ("steps without drafts", "caches behind the text", "catching up without a prompt")
    assert all(seen[kind] > 0 for kind in (*kinds, "blocks in vain")), seen
    # And paths are moved in the target's layers alone.
    assert result["ahead"]["layers with trees"] == [6]


def test_drafts_equal_those_of_the_slow_reference_and_rounds_were_replayed(result, slow_rounds):
    rounds = slow_rounds[0]
    launched, replayed = result["ahead"], result[REPLAYED]
    assert launched["rounds"]["0"][:NUM_ROUNDS] == rounds
    assert any(branches for _, branches in rounds)
    assert launched["replays"] == 0
    assert replayed["replays"] > 10
    assert replayed["rounds"]["0"] == launched["rounds"]["0"]


def test_trunks_are_what_the_draft_model_says(result):
    seen = result["trunk"]["seen"]
    assert min(seen["trunks"], seen["trees without a trunk"], seen["tokens beside trunks"]) > 10
    assert result["trunk"]["choices"] == result["trunk"]["expected choices"]
    assert result[TRUNK_REPLAYED]["replays"] > 10
    # Whether its round is launched or replayed, a trunk and what is beside it are the same.
    replayed, launched = (result[name]["rounds"]["0"] for name in (TRUNK_REPLAYED, "trunk"))
    assert replayed[:NUM_ROUNDS] == launched[:NUM_ROUNDS]
    assert [result[name]["seen"]["other trunks"] for name in ("trunk", NOW_AND_THEN)] == [0, 0]


def test_rounds_go_on_behind_steps_without(result):
    seen = result[NOW_AND_THEN]["seen"]
    assert min(seen["trunks"], seen["trees without a trunk"]) > 5
    assert min(seen["catching up without a prompt"], seen["caches behind the text"]) > 0


def test_launches_outside_of_graphs_are_few_whatever_the_batch(result):
    launches = result[REPLAYED]["launches"]
    # The harvest and two insertions, whatever the batch; none without trees.
    assert set(launches["observe"]) == {0, 123}
    # Where all requests are drafted for: what begins the round.
    assert min(launches["propose"]) < 35


def test_a_request_learns_from_no_other_where_pools_are_their_own(result, slow_rounds):
    own = result["own pools"]
    rounds, rounds_after_others = slow_rounds
    assert rounds_after_others != rounds
    # The second one comes after the first, in its place, and beside a third.
    assert own["states"]["1"] == own["states"]["0"]
    assert [own["rounds"][number][:NUM_ROUNDS] for number in "01"] == [rounds] * 2


class TestPricedRounds:
    def test_tokens_are_the_same_whatever_is_drafted_and_nothing_waits(self, result):
        expected = {name: result["plain"][batch] for name, (batch, *_) in PRICES.items()}
        assert result["priced"]["token ids"] == expected
        assert result["priced"]["waits"] == []

    def test_rounds_are_timed_at_the_start(self, result):
        # For two requests there is room in a draft forward; of four two have a trunk.
        timed = result["priced"]["rounds timed for"]
        assert sorted(timed) == ["1", "2", "4"]
        [(batch, alone)] = result["priced"]["alone timed for"].items()
        assert 0 < alone < timed[batch]

    def test_rounds_are_made_as_long_as_they_are_worth_their_time(self, result):
        rounds, accepted = result["priced"]["rounds"], result["priced"]["accepted tokens"]
        assert min(rounds["as measured"], rounds["free"]) > 5
        # Those that the last steps before had asked for, and one to see what it would give.
        assert max(rounds["dear"], rounds["dear, rows alone free"]) <= 3 * 2
        # Where only a round is dear, trees grow alone.
        assert accepted["dear, rows alone free"] > 2
        assert accepted["free"] > 0


def serve(name: str) -> dict[str, Any]:
    """In the process with the engines: one with speculation, and what it was like."""
    method, overrides, batches = ENGINES[name]
    with engine(with_sizes(method, SCHEDULE), **ARGUMENTS | overrides) as llm:
        watch = Watch(llm)
        watch.held_steps = 5 if name == NOW_AND_THEN else 0
        if name in (REPLAYED, TRUNK_REPLAYED):
            capture_rounds(watch)
        token_ids = {batch: tokens_of(llm, BATCHES[batch]) for batch in batches}
        rounds = watch.runner.speculator.graphs
        graphs = [] if rounds is None else rounds.graphs.values()
        watch.seen["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens")
        watch.seen["preemptions"] = counter(llm, "num_preemptions")
        watch.seen["moved rows"] = watch.moved.total()
        choices = getattr(watch.runner.tree_drafter, "choices", watch.choices).counts.tolist()
        layers_with_trees = [len(layers.kv_caches) for layers in watch.runner.paged_layers.values()]
    return {
        "token ids": token_ids,
        "rounds": watch.rounds,
        "states": watch.states,
        "cache error": watch.cache_error,
        "layers with trees": layers_with_trees,
        "choices": choices,
        "expected choices": watch.choices.counts.tolist(),
        "launches": watch.launches,
        "replays": sum(graph.num_replays for graph in graphs),
        "seen": watch.seen,
        "waits": watch.waits.seen,
    }


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines: one without speculation, and those with it."""
    v2_graphs.install()
    with engine(**ARGUMENTS) as llm:
        prompt = llm.get_tokenizer().encode(TEXT)[slice(*ALONE[0])]
        plain = {name: tokens_of(llm, batch) for name, batch in BATCHES.items()}
    result: dict[str, Any] = {"plain": plain, "prompt": prompt}
    with engine(TRUNK, **LLM_ARGUMENTS | {"model": TARGET}) as llm:
        waits = Waits()
        waits.watch(runner(llm).speculator, "propose")
        unwatched(runner(llm).speculator, "_build_attn_metadata")
        prices = {name: (BATCHES[batch], *seconds) for name, (batch, *seconds) in PRICES.items()}
        result["priced"] = serve_priced(llm, prices) | {"waits": waits.seen}
    return result | {name: serve(name) for name in ENGINES}
