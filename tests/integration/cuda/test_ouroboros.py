"""Ouroboros on Model Runner V2: its output, its drafts, and what its draft model's cache holds.

As published, and with trees that grow along the draft model's trunk. With steps scheduled ahead or
one at a time, with a pool that requests share or one of each, with rounds that are launched or
replayed, and with steps that draft nothing between those that do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import v2_graphs
from engines import OUROBOROS, TARGET, core, counter, engine, runner
from v2_engines import (
    GREEDY,
    LLM_ARGUMENTS,
    SEEDED,
    TEXT,
    Waits,
    tokens_of,
    watch_moves,
    with_sizes,
)
from vllm.config.compilation import CUDAGraphMode

from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import ChoiceAcceptance
from vllm_recycle.integration.cuda.ouroboros.trunk import TrunkV2Drafter

pytestmark = pytest.mark.slow

# 20 rows of a request in a draft forward: with the engine's budget of 48 tokens, two requests are
# drafted for, and of more none.
SIZES = {"gamma": 3, "window": 3, "guesses": 2, "phrase_length": 4, "branches": 2}
FORWARDS = 2
METHOD = {**OUROBOROS, "max_forwards": FORWARDS, **SIZES}
SCHEDULE = [(1, 2, 9), (3, 1024, 0)]
# 17 rows in a draft forward: two requests have a trunk, a third one a tree without.
TRUNK = {"method": "ouroboros", "model": OUROBOROS["model"], "gamma": SIZES["gamma"]}
TRUNK |= {"max_nodes": 15, "context_mib": 1}
ARGUMENTS = {**LLM_ARGUMENTS, "model": TARGET, "num_gpu_blocks_override": 8}
OPTED_OUT = {**GREEDY, "extra_args": {"speculate": False}}
# Batches of requests: which tokens of TEXT are the prompt, and the sampling parameters.
ALONE = ((0, 40), {**GREEDY, "max_tokens": 16})
BATCHES = {
    "alone": [ALONE],
    # All of the prompt above but its last token comes from the prefix cache. The second one takes
    # several steps, while the first decodes, and ends with the context.
    "two": [((0, 33), SEEDED), ((0, 100), {**GREEDY, "max_tokens": 12})],
    "one opted out": [((0, 24), GREEDY), ((3, 40), OPTED_OUT)],
    # Of what is in the prefix cache now the draft's has nothing.
    "after it": [((3, 40), {**GREEDY, "max_tokens": 6})],
    # Too many to be drafted for; two blocks each, which are more than there are, so that one has to
    # wait, and the others are drafted for again.
    "crowded": [((i, i + 28), {**GREEDY, "max_tokens": 24 - 4 * i}) for i in range(4)],
    "same prompt": [ALONE, ((0, 40), {**SEEDED, "max_tokens": 16})],
}
REPLAYED, TRUNK_REPLAYED = "rounds replayed", "trunk, rounds replayed"
NOW_AND_THEN, HELD_STEPS = (
    "trunk, now and then",
    5,
)  # of so many steps either all have rounds or none
# Engines with speculation: the method, what differs from the default of the engine, and batches.
ENGINES = {
    "ahead": (METHOD, {}, ["alone", "two", "one opted out", "after it", "crowded"]),
    "step by step": (
        METHOD,
        {"async_scheduling": False},
        ["same prompt", "one opted out", "crowded"],
    ),
    "own pools": ({**METHOD, "scope": "request"}, {}, ["alone", "same prompt"]),
    REPLAYED: (METHOD, {}, ["alone", "two", "crowded"]),
    "trunk": (TRUNK, {}, ["alone", "two", "one opted out", "after it", "crowded"]),
    TRUNK_REPLAYED: (TRUNK, {}, ["alone", "two", "crowded"]),
    NOW_AND_THEN: (TRUNK, {}, ["alone", "two", "one opted out", "after it", "crowded"]),
}
NUM_ROUNDS = 6
# Keys and values are of order one to ten; float32, over forwards of other shapes.
CACHE_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def slow_rounds(result) -> list[list]:
    """Trunk and branches of the first rounds behind a prompt, and of those when it comes again."""
    from slow_ouroboros import SlowOuroboros

    slow = SlowOuroboros(load(TARGET), load(OUROBOROS["model"]), **SIZES, max_forwards=FORWARDS)
    prompt = result["prompt"]
    with torch.no_grad():
        # The token that ends the prompt's own step.
        token_id = int(slow.target(torch.tensor([prompt])).logits[0, -1].argmax())
    found = []
    for _ in range(2):
        sequence = slow.begin(prompt)
        sequence.token_ids.append(token_id)
        rounds = [slow.step(sequence) for _ in range(NUM_ROUNDS)]
        found.append([[done.trunk, [list(branch) for branch in done.branches]] for done in rounds])
    return found


@pytest.mark.parametrize("name", ENGINES)
class TestEveryEngine:
    def test_tokens_equal_those_without_speculation(self, result, name):
        drafted = result[name]["token ids"]
        assert drafted == {name: result["plain"][name] for name in drafted}

    def test_drafts_were_accepted(self, result, name):
        assert result[name]["seen"]["accepted tokens"] > 10

    def test_the_draft_s_cache_has_the_text_that_it_is_said_to_have(self, result, name):
        assert result[name]["seen"]["checked caches"] > 25
        assert result[name]["cache error"] < CACHE_TOLERANCE

    def test_drafts_see_the_whole_text(self, result, name):
        assert result[name]["seen"]["drafts behind a part of the text"] == 0

    def test_the_draft_model_is_not_run_in_vain(self, result, name):
        assert result[name]["seen"]["draft forwards without drafts"] == 0

    def test_drafting_waits_for_no_device(self, result, name):
        assert result[name]["waits"] == []


@pytest.mark.parametrize("name", ["ahead", "step by step", "trunk"])
def test_steps_were_of_every_kind(result, name):
    seen = result[name]["seen"]
    kinds = ("only trees", "only plain rows", "both", "trees that are the last")
    assert all(seen[kind] > 0 for kind in kinds), seen
    # The first branch behind a trunk lies where it would be moved to.
    assert (seen["moved rows"] > 0) == (name == "trunk")
    assert min(seen["rounds of 1"], seen["rounds of 2"]) > 0
    assert seen["preemptions"] > 0
    assert seen["tokens from the prefix cache"] > 0
    assert (seen["ahead"] > 0) == (name != "step by step")


def test_the_draft_catches_up_where_nothing_was_drafted(result):
    seen = result["ahead"]["seen"]
    kinds = ("steps without drafts", "caches behind the text", "catching up without a prompt")
    assert all(seen[kind] > 0 for kind in (*kinds, "blocks in vain")), seen


def test_paths_are_moved_in_the_target_s_layers_alone(result):
    assert result["ahead"]["layers with trees"] == [6]


def test_drafts_equal_those_of_the_slow_reference(result, slow_rounds):
    rounds = slow_rounds[0]
    assert result["ahead"]["rounds"]["0"][:NUM_ROUNDS] == rounds
    assert any(branches for _, branches in rounds)


def test_rounds_were_replayed(result):
    launched, replayed = result["ahead"], result[REPLAYED]
    assert launched["replays"] == 0
    assert replayed["replays"] > 20
    assert replayed["rounds"]["0"] == launched["rounds"]["0"]


def test_trunks_are_what_the_draft_model_says(result):
    seen = result["trunk"]["seen"]
    assert min(seen["trunks"], seen["trees without a trunk"], seen["tokens beside trunks"]) > 10
    assert seen["other trunks"] == 0
    assert result["trunk"]["choices"] == result["trunk"]["expected choices"]
    assert result[TRUNK_REPLAYED]["replays"] > 20
    # Whether its round is launched or replayed, a trunk and what is beside it are the same.
    replayed, launched = (result[name]["rounds"]["0"] for name in (TRUNK_REPLAYED, "trunk"))
    assert replayed[:NUM_ROUNDS] == launched[:NUM_ROUNDS]


def test_rounds_go_on_behind_steps_without(result):
    seen = result[NOW_AND_THEN]["seen"]
    assert min(seen["trunks"], seen["trees without a trunk"]) > 10
    assert min(seen["catching up without a prompt"], seen["caches behind the text"]) > 0
    assert seen["other trunks"] == 0


def test_few_launches_are_outside_of_graphs(result):
    launches = result[REPLAYED]["launches"]
    # The most probable tokens, whose they are, the harvest, and two insertions; none without trees.
    assert set(launches["observe"]) == {0, 5}
    # Where all requests are drafted for: what begins the round.
    assert min(launches["propose"]) == 1


def test_a_request_learns_from_no_other_where_pools_are_their_own(result, slow_rounds):
    own = result["own pools"]
    rounds, rounds_after_others = slow_rounds
    assert rounds_after_others != rounds
    # The second one comes after the first, in its place, and beside a third.
    assert own["states"]["1"] == own["states"]["0"]
    assert own["rounds"]["0"][:NUM_ROUNDS] == rounds
    assert own["rounds"]["1"][:NUM_ROUNDS] == rounds


def load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


class Watch:
    """In the process with the engines: counts what the steps are like, and checks the cache."""

    def __init__(self, llm: Any) -> None:
        self.runner, self.scheduler = runner(llm), core(llm).scheduler
        self.waits, self.seen, self.draft = Waits(), Counter(), load(OUROBOROS["model"])
        self.cache_error = 0.0
        # Of trunks: the last of each request with the length of its text, and what they teach.
        self.trunks, self.choices = {}, ChoiceAcceptance()
        # By the number of a request: what was drafted for it, and the index of its state.
        self.rounds, self.states = defaultdict(list), {}
        self.schedule, self.scheduler.schedule = self.scheduler.schedule, self.watched_schedule
        self.speculator = speculator = self.runner.speculator
        self.propose, speculator.propose = speculator.propose, self.watched_propose
        speculator.model.register_forward_pre_hook(self.watched_forward)
        self.draft_round, speculator.draft = speculator.draft, self.watched_round
        self.take_in, speculator._take_in = speculator._take_in, self.watched_take_in
        # What was never written is not read.
        context = self.runner.compilation_config.static_forward_context
        for layer_name in speculator.draft_attn_layer_names:
            context[layer_name].kv_cache.fill_(torch.nan)
        self.drafts_now = True
        self.goes_alone_after = 0  # steps, now and then; 0 for never
        self.num_steps = 0
        self.launches = defaultdict(list)
        self.moved = watch_moves()
        self.waits.watch(self.runner.drafter, "observe")
        self.waits.watch(self.runner, "add_requests")

    def counted(self, name: str, function: Any) -> Any:
        """The function, with its launches counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            graph = v2_graphs.Graph()
            with v2_graphs.record(graph):
                result = function(*args, **kwargs)
            self.launches[name].append(graph.num_kernels)
            return result

        return call

    def watched_schedule(self, *args: Any) -> Any:
        ahead = any(request.num_output_placeholders for request in self.scheduler.running)
        output = self.schedule(*args)
        self.seen["ahead"] += ahead
        self.num_steps += 1
        if self.goes_alone_after:
            output.drafts_alone = self.num_steps // self.goes_alone_after % 2 == 1
        for request in output.scheduled_new_reqs:
            found = request.num_computed_tokens // LLM_ARGUMENTS["block_size"]
            self.seen["tokens from the prefix cache"] += request.num_computed_tokens
            is_marked = self.speculator.cache.is_marked[request.block_ids[0][:found]]
            self.seen["blocks in vain"] += int((~is_marked).sum())
        return output

    def watched_forward(self, *args: Any) -> None:
        self.seen["draft forwards without drafts"] += not self.drafts_now

    def watched_round(self, idx_mapping: torch.Tensor) -> None:
        self.seen[f"rounds of {len(idx_mapping)}"] += 1
        self.draft_round(idx_mapping)

    def watched_take_in(self, input_batch: Any, counts: Any) -> None:
        self.seen["catching up without a prompt"] += not input_batch.has_prefill
        self.take_in(input_batch, counts)

    def watched_propose(self, input_batch: Any, *args: Any, **given: Any) -> torch.Tensor:
        num_nodes = input_batch.num_draft_tokens_per_req
        trees = 0 if num_nodes is None else int((num_nodes > 0).sum())
        kind = {0: "only plain rows", input_batch.num_reqs: "only trees"}.get(trees, "both")
        self.seen[kind] += 1
        self.drafts_now = bool(given["num_speculative_tokens"])
        self.seen["steps without drafts"] += not self.drafts_now
        self.seen["trees that are the last"] += trees > 0 and not self.drafts_now
        with self.waits:
            drafts = self.propose(input_batch, *args, **given)
        for place, state in enumerate(input_batch.idx_mapping_np):
            number = input_batch.req_ids[place].split("-")[0]
            self.states[number] = int(state)
            if isinstance(self.runner.drafter, TrunkV2Drafter):
                has_round = self.check_trunk(number, state, drafts[place])
            else:
                has_round = bool(drafts[place, 0] >= 0)
                self.record_round(number, drafts[place])
            self.check_cache(place, state, has_draft=has_round)
        return drafts

    @torch.no_grad()
    def check_trunk(self, number: str, state: int, draft: torch.Tensor) -> bool:
        """Whether the request has a trunk; it against the draft model, computed anew."""
        drafter, length = self.runner.drafter, int(self.runner.req_states.total_len.gpu[state])
        found = Trunks(drafter.trunks.token_ids[state], drafter.probabilities[state])
        has_trunk = self.drafts_now and bool(found.token_ids[0, 0] >= 0)
        if not has_trunk:
            self.seen["trees without a trunk"] += self.drafts_now and bool(draft[0] >= 0)
            return False
        text = self.runner.req_states.all_token_ids.gpu[state, :length].long()
        if number in self.trunks:
            before, old_length = self.trunks[number]
            follows = text[old_length:][: SIZES["gamma"]]
            self.choices.count(before, follows[None])
        trunk = found.token_ids[:, 0]
        behind = torch.cat((text, trunk))[None, :-1]
        said = self.draft(behind).logits[0, length - 1 :].softmax(-1).topk(found.token_ids.shape[1])
        is_equal = found.token_ids.equal(said.indices) and found.chances.allclose(
            said.values, atol=1e-4
        )
        self.seen["trunks"] += 1
        # What lies behind the end of the context is computed for nothing.
        fits = length + len(trunk) <= LLM_ARGUMENTS["max_model_len"]
        self.seen["other trunks"] += fits and not is_equal
        drafted = draft[draft >= 0].tolist()
        self.seen["tokens beside trunks"] += len({*drafted} - {*trunk.tolist()})
        self.rounds[number].append([trunk.tolist(), drafted])
        self.trunks[number] = Trunks(*(values[None].clone() for values in found)), length
        return True

    def record_round(self, number: str, draft: torch.Tensor) -> None:
        gamma, length = SIZES["gamma"], SIZES["phrase_length"] - 1
        trunk = [token for token in draft[:gamma].tolist() if token >= 0]
        branches = draft[gamma:].view(-1, length).tolist()
        if trunk:
            self.rounds[number].append([trunk, [branch for branch in branches if branch[0] >= 0]])

    @torch.no_grad()
    def check_cache(self, place: int, state: int, *, has_draft: bool) -> None:
        """The draft's keys and values of a request, against those of its text computed anew."""
        states, tables = self.runner.req_states, self.runner.block_tables.input_block_tables
        num_cached = int(self.speculator.cache.num_cached[state])
        is_behind = num_cached < int(states.num_computed_tokens.gpu[state])
        self.seen["caches behind the text"] += is_behind
        self.seen["drafts behind a part of the text"] += is_behind and has_draft
        if not num_cached:
            return
        text = states.all_token_ids.gpu[state, :num_cached].long()
        expected = self.draft(text[None], use_cache=True).past_key_values
        block_size, token = LLM_ARGUMENTS["block_size"], torch.arange(num_cached)
        blocks = tables[0][place][token // block_size].long()
        context = self.runner.compilation_config.static_forward_context
        for index, layer in enumerate(expected.layers):
            kv_cache = context[f"draft_model.model.layers.{index}.self_attn.attn"].kv_cache
            pairs = torch.cat((layer.keys, layer.values), dim=-1)[0].transpose(0, 1)
            found = kv_cache[blocks, :, token % block_size]
            error = float((found - pairs).abs().nan_to_num(torch.inf).max())
            self.cache_error = max(self.cache_error, error)
        self.seen["checked caches"] += 1


def token_ids(llm: Any, names: Iterable[str]) -> dict[str, list]:
    """In the process with the engines: what they say, by the name of a batch."""
    return {name: tokens_of(llm, BATCHES[name]) for name in names}


def capture_rounds(watch: Watch) -> None:
    """As the start of an engine does on a GPU; and count what is launched beside them."""
    runner, speculator = watch.runner, watch.speculator
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL)
    speculator.capture()
    runner.drafter.reset()
    replay = speculator.graphs.replay

    def replayed(batch: int) -> bool:
        with v2_graphs.unrecorded():
            return replay(batch)

    speculator.graphs.replay = replayed
    runner.drafter.observe = watch.counted("observe", runner.drafter.observe)
    watch.propose = watch.counted("propose", watch.propose)


def serve(name: str) -> dict[str, Any]:
    """In the process with the engines: one with speculation, and what it was like."""
    method, overrides, batches = ENGINES[name]
    with engine(with_sizes(method, SCHEDULE), **ARGUMENTS | overrides) as llm:
        watch = Watch(llm)
        watch.goes_alone_after = HELD_STEPS if name == NOW_AND_THEN else 0
        if name in (REPLAYED, TRUNK_REPLAYED):
            capture_rounds(watch)
        found = token_ids(llm, batches)
        rounds = watch.runner.speculator.graphs
        graphs = [] if rounds is None else rounds.graphs.values()
        for counted in ("drafts", "accepted_tokens"):
            watch.seen[counted.replace("_", " ")] = counter(llm, f"spec_decode_num_{counted}")
        watch.seen["preemptions"] = counter(llm, "num_preemptions")
        watch.seen["moved rows"] = watch.moved.total()
        choices = getattr(watch.runner.drafter, "choices", watch.choices).counts.tolist()
        layers_with_trees = [len(layers.kv_caches) for layers in watch.runner.paged_layers.values()]
    return {
        "token ids": found,
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
        result = {"plain": token_ids(llm, BATCHES), "prompt": prompt}
    return result | {name: serve(name) for name in ENGINES}
