"""Requests that follow a grammar have trees, and the output of vLLM, with every backend."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tests.integration.engines import (
    GROWN,
    HOSTED,
    PAPER,
    SMALL_OUROBOROS,
    TRUNK,
    core,
    counter,
    engine,
    generate,
    read_prompts,
    runner,
    watch_steps,
)
from vllm_recycle.integration.cpu.grammar_ahead import (
    MOST_ROWS,
    GrammarAhead,
    GrammarsAhead,
    longest_of,
    use_all_cores,
)
from vllm_recycle.integration.schedule.grammar import ALL_ALLOWED, GrammarMasks, fill_tree
from vllm_recycle.integration.schedule.scheduler import TreeScheduler
from vllm_recycle.integration.start.versions import FEATURES

APPLES = """Tom has 3 apples.
{"name": "Tom", "apples": 3}
Anna has 5 apples.
{"name": "Anna", "apples": 5}
Ben has 7 apples.
"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "apples": {"type": "integer"}},
    "required": ["name", "apples"],
    "additionalProperties": False,
}
VERDICTS = ["The answer is right.", "The answer is wrong."]
QUERIES = "SELECT age FROM people\nSELECT price FROM shops\n"
# By kind, the text before, and what has to follow.
JSON = (APPLES, {"json": SCHEMA})
REGEX = ("Call 555-1234 now.\nCall 555-4321 now.\n", {"regex": r"Call \d{3}-\d{4} (now|later)\."})
CHOICE = ("\n".join([*VERDICTS, ""]), {"choice": VERDICTS})
EBNF = """root ::= "SELECT " ("age" | "name" | "price") " FROM " ("people" | "shops")"""
LARK = """start: "SELECT " ("age" | "name" | "price") " FROM " ("people" | "shops")"""
KINDS = {
    "xgrammar": [JSON, REGEX, CHOICE, (QUERIES, {"grammar": EBNF})],
    "guidance": [JSON, REGEX, CHOICE, (QUERIES, {"grammar": LARK})],
    "outlines": [JSON, REGEX, CHOICE],
}
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SEEDED = {"temperature": 0.9, "max_tokens": 24, "seed": 7, "frequency_penalty": 0.2}
# What ends a grammar ends no request that ignores it: then all is allowed.
WAYS = [GREEDY, {**GREEDY, "ignore_eos": True}, SEEDED]
PLAIN = read_prompts(2, max_words=30)
CASES = {
    "xgrammar": ("xgrammar", GROWN),
    "guidance": ("guidance", GROWN),
    "outlines": ("outlines", GROWN),
    "a template": ("xgrammar", PAPER),
    "ouroboros": ("xgrammar", SMALL_OUROBOROS),
    "ouroboros along a trunk": ("xgrammar", TRUNK),
    "along vLLM's trunk": ("xgrammar", HOSTED),
    "trees of which outlines comes back from few tokens": ("outlines", {**GROWN, "max_nodes": 3}),
}
# Of which the prompt has nothing, and no request before.
UNSEEN = r"The (zebra|giraffe) in enclosure \d\d measures \d+ centimetres\."


def requests(backend: str) -> tuple[list[str], list[SamplingParams]]:
    """One of each kind in each way, and two among them that follow no grammar."""
    prompts, params = [], []
    for text, grammar in KINDS[backend]:
        for way in WAYS:
            prompts.append(text)
            structured = StructuredOutputsParams(**grammar)
            params.append(SamplingParams(**way, structured_outputs=structured))
    free = [SamplingParams(**GREEDY), SamplingParams(**SEEDED)]
    return [PLAIN[0], *prompts, PLAIN[1]], [free[0], *params, free[1]]


@cache
def plain(backend: str) -> tuple[list[list[tuple[int, ...]]], list[Any]]:
    """The answers of vLLM alone to `requests`, and to those that end where no token is left."""
    with engine(structured_outputs_config={"backend": backend}) as llm:
        return generate(llm, *requests(backend)), reach_dead_ends(llm)


@pytest.fixture(scope="module", params=CASES)
def served(request):
    """An engine, and what it says first: then there is a backend."""
    backend, method = CASES[request.param]
    plain(backend)  # before an engine with speculation is there
    settings = {"per_request_spec_decode_metrics": "summary"}
    with engine(method, structured_outputs_config={"backend": backend}, **settings) as llm:
        first = generate(llm, *requests(backend))
        yield SimpleNamespace(llm=llm, backend=backend, first=first)


def of_cases(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", names, indirect=True)


def compiled(llm: Any, regex: str) -> Any:
    """A grammar of the engine's backend."""
    backend = core(llm).structured_output_manager.backend
    stop_token_ids = {llm.get_tokenizer().eos_token_id}
    return backend.compile_grammar(
        StructuredOutputOptions.REGEX, regex, stop_token_ids=stop_token_ids
    )


@pytest.mark.versions
def test_output_equals_vllm_and_drafts_are_accepted_of_each_kind(served):
    expected, _ = plain(served.backend)
    assert served.first == expected
    # What was seen is drafted.
    results = served.llm.generate(*requests(served.backend), use_tqdm=False)
    outputs = [result.outputs[0] for result in results]
    assert [[tuple(output.token_ids)] for output in outputs] == expected
    for kind in range(len(KINDS[served.backend])):
        first = 1 + len(WAYS) * kind
        of_kind = [output.spec_decode_metrics for output in outputs[first : first + len(WAYS)]]
        assert any(sum(one.histogram[1:]) for one in of_kind), KINDS[served.backend][kind]


# Grammars that a second constraint leaves no token of, after some.
DEAD_ENDS = [
    ({"regex": "yes, (yes|no)"}, {"allowed_token_ids": [5, 6]}),
    ({"regex": "(yes|no) yes"}, {"bad_words": ["yes", "y"]}),
    ({"json": SCHEMA}, {"bad_words": ["apples", "a"]}),
]


def reach_dead_ends(llm: Any) -> list[Any]:
    """Tokens and reasons to finish, and those of others beside them."""
    params = [
        SamplingParams(**way, **more, structured_outputs=StructuredOutputsParams(**grammar))
        for grammar, more in DEAD_ENDS
        for way in (GREEDY, SEEDED)
    ]
    params += [SamplingParams(**GREEDY), *params]
    outputs = llm.generate([APPLES] * len(params), params, use_tqdm=False)
    return [(tuple(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in outputs]


def test_a_request_that_no_token_is_left_for_ends_as_in_vllm(served):
    _, expected = plain(served.backend)
    assert sum(reason == "error" for _, reason in expected) >= 4
    for _ in range(2):
        assert reach_dead_ends(served.llm) == expected


def test_greedy_output_equals_vllm_where_all_is_greedy(served):
    expected, _ = plain(served.backend)
    cases = [*zip(*requests(served.backend), expected, strict=True)]
    greedy = [case for case in cases if not case[1].temperature]
    prompts, params, answers = map(list, zip(*greedy, strict=True))
    assert generate(served.llm, prompts, params) == answers


@of_cases("xgrammar")
def test_what_a_grammar_forbids_has_no_rows(served, monkeypatch):
    llm, seen, scheduler = served.llm, [], core(served.llm).scheduler
    make_masks, prune = scheduler.get_grammar_bitmask, TreeScheduler._prune

    def watching(step: Any) -> Any:
        """Masks of a step; whether those that follow a grammar may have a row, of each."""
        output = make_masks(step)
        masks = iter(() if output is None else output.grammar_bitmask)
        for name in () if output is None else output.structured_output_request_ids:
            draft = step.scheduled_spec_decode_tokens.get(name, ())
            of_rows = [next(masks) for _ in range(1 + len(draft))]
            parents = scheduler.requests[name].draft_parents if draft else ()
            for token, parent in zip(draft, parents, strict=False):
                seen.append(token < 0 or of_rows[parent][token // 32] >> token % 32 & 1)
        return output

    monkeypatch.setattr(scheduler, "get_grammar_bitmask", watching)
    found = []
    for method in (prune, lambda *_: None):  # the other way drafts stay as they are
        monkeypatch.setattr(TreeScheduler, "_prune", method)
        runner(llm).tree_drafter.reset()
        seen.clear()
        assert generate(llm, *requests("xgrammar")) == plain("xgrammar")[0]
        found += [len(seen), seen.count(0)]
    num_rows, num_forbidden, num_whole_rows, num_whole_forbidden = found
    assert num_forbidden == 0 < num_whole_forbidden
    assert 0 < num_rows <= num_whole_rows - num_whole_forbidden / 2


@pytest.mark.parametrize("way", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@of_cases(*KINDS)
def test_what_a_grammar_expects_takes_no_steps_of_its_own(served, way, monkeypatch):
    llm, structured = served.llm, StructuredOutputsParams(regex=UNSEEN)
    params = SamplingParams(**{**way, "max_tokens": 60}, structured_outputs=structured)
    monkeypatch.setattr(runner(llm).grammars, "waits", True)  # however busy this machine is
    steps, outputs, counts = watch_steps(llm), [], []
    for grows_with_it in (False, True):
        monkeypatch.setattr(runner(llm), "grows", grows_with_it)
        runner(llm).tree_drafter.reset()
        steps.clear()
        outputs.append(generate(llm, PLAIN[:1], params))
        counts.append(sum(len(step.num_scheduled_tokens) for step in steps))
    assert outputs[0] == outputs[1]
    # Before vLLM 0.32 seeded answers are others, with less in them that a grammar expects.
    assert counts[1] < (0.7 if FEATURES.bounds_constraints else 0.75) * counts[0]


@of_cases(*KINDS)
def test_masks_of_a_tree_are_those_of_its_paths(served):
    backend = core(served.llm).structured_output_manager.backend
    tokenizer, choose = served.llm.get_tokenizer(), random.Random(0)
    tokens = tokenizer.convert_tokens_to_ids(["a", "c", "e", "in", "er", "on", "7"])
    tokens += [tokenizer.eos_token_id, -1]

    @cache
    def mask_behind(path: tuple[int, ...]) -> torch.Tensor | None:
        """None where the path cannot be."""
        grammar = compiled(served.llm, "[a-z]{2,9}")
        mask = backend.allocate_token_bitmask(1).fill_(ALL_ALLOWED)
        for token in path:
            if grammar.is_terminated():
                return None
            grammar.fill_bitmask(mask, 0)
            if token < 0 or not mask[0, token // 32] >> token % 32 & 1:
                return None
            assert grammar.accept_tokens("", [token])
        if grammar.is_terminated():
            return mask[0].fill_(ALL_ALLOWED)
        grammar.fill_bitmask(mask, 0)
        return mask[0]

    found = set()
    for begun in [(), (tokens[0],)] * 20:
        parents = [choose.randint(max(0, row - 4), row) for row in range(24)]
        draft = choose.choices(tokens, k=len(parents))
        masks = backend.allocate_token_bitmask(1 + len(parents)).fill_(ALL_ALLOWED)
        grammar = compiled(served.llm, "[a-z]{2,9}")
        assert grammar.accept_tokens("", list(begun))
        reached = fill_tree(masks, grammar, draft, parents)
        paths = [begun]
        for token, parent in zip(draft, parents, strict=True):
            paths.append((*paths[parent], token))
        for row, path in enumerate(paths):
            mask = mask_behind(path)
            assert torch.equal(masks[row], masks[row] * 0 - 1 if mask is None else mask)
            assert row == 0 or (row in reached) == (mask is not None)
            ends = path[-1:] == (tokenizer.eos_token_id,)
            found.add("forbidden" if mask is None else "ended" if ends else "")
        # The grammar is where it was.
        grammar.fill_bitmask(masks, 1)
        assert torch.equal(masks[1], mask_behind(begun))
        assert not grammar.is_terminated()
    assert {"forbidden", "ended"} <= found


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["t", "ti", "title"], "title"),
        (["title"], "title"),
        (["<0x74>", "t", "ti"], "ti"),
        (["<0x74>"], "<0x74>"),
        (["po", "p", "n", "ne"], None),
        (["t", "tom", "ti"], None),
        ([b"t", b"title"], None),
        ([], None),
    ],
)
def test_the_longest_of_tokens_is_expected_if_all_begin_it(texts, expected):
    token = longest_of(dict(enumerate(texts)))
    assert (None if token < 0 else texts[token]) == expected


@of_cases(*KINDS)
def test_a_grammar_goes_ahead_and_comes_back(served):
    manager, tokenizer = core(served.llm).structured_output_manager, served.llm.get_tokenizer()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    sentence = "The total number (runs|leaves) today[.]"
    grammar = compiled(served.llm, f"{sentence}\n{sentence}")
    start = manager.backend.allocate_token_bitmask(2).fill_(ALL_ALLOWED)
    grammar.fill_bitmask(start, 0)
    ahead, first = GrammarAhead(grammar, manager), "The total number runs today.\n"
    branch, second = len(encode("The total number")), len(encode(first + "The total number"))
    text = encode(first + "The total number leaves today.")
    for place, token in enumerate(text[:second]):
        allowed = ahead.allowed(text[:place])
        assert allowed.has(token)
        assert allowed.expected == (-1 if place == branch else token)
    assert ahead.allowed(text[:2]) == ahead.allowed(text[:2])
    for count in range(2 * MOST_ROWS):
        ahead.allowed(text[:count])
    assert len(ahead.seen) <= MOST_ROWS
    # What is no token of the grammar leaves it where it is.
    ahead.follow([])
    assert ahead.allowed([encode("zebra")[0]]) is None
    ahead.follow([])
    grammar.fill_bitmask(start, 1)
    assert start[0].equal(start[1])
    # What came before where the same is allowed comes first.
    assert ahead.allowed(text[:branch]).expected == -1
    ahead.follow(text[: branch + 1])
    assert ahead.allowed(text[branch + 1 : second]).expected == text[branch]
    # Behind the end there is nothing, nor behind what is no text of the grammar.
    ahead.follow(text[:-1])
    assert ahead.allowed(text[-1:]).expected == tokenizer.eos_token_id
    assert ahead.allowed([text[-1], tokenizer.eos_token_id]) is None
    ahead.follow([*text[:-1], encode("zebra")[0]])
    assert ahead.allowed([]) is None


@of_cases("xgrammar")
def test_while_a_request_reasons_it_may_not_sample_what_would_end_that_too_early(
    served, monkeypatch
):
    """vLLM 0.33 names such tokens."""
    manager, tokenizer = core(served.llm).structured_output_manager, served.llm.get_tokenizer()
    scheduled = {"two": [33, 40], "none": [], "reasons": []}
    made = [
        SimpleNamespace(
            request_id=name,
            draft_parents=[0, 1],
            structured_output_request=SimpleNamespace(
                grammar=compiled(served.llm, "[a-z]{2,9}"), reasoning_ended=None
            ),
        )
        for name in scheduled
    ]
    monkeypatch.setattr(
        GrammarMasks, "is_constrained", lambda _, request: request.request_id != "reasons"
    )
    monkeypatch.setattr(manager, "_masked_reasoning_ends", lambda _: (31, 40), raising=False)
    masks = GrammarMasks(manager).fill(made, scheduled)
    assert masks.shape == (5, -(-len(tokenizer) // 32))
    assert (masks[3] != ALL_ALLOWED).any()
    forbidden = np.unpackbits(~masks[4].view(np.uint8), bitorder="little").nonzero()[0]
    assert forbidden.tolist() == [31, 40]


def test_output_equals_vllm_where_requests_are_preempted_and_aborted():
    scarce = {"block_size": 32, "num_gpu_blocks_override": 17, "max_model_len": 384}
    scarce["structured_outputs_config"] = {"backend": "xgrammar"}
    prompts, params = requests("xgrammar")
    with engine(GROWN, **scarce) as llm:
        for _ in range(2):
            llm.llm_engine.add_request("aborted", prompts[1], params[2])
            for _ in range(4):
                llm.llm_engine.step()
            llm.llm_engine.abort_request(["aborted"])
            assert generate(llm, prompts, params) == plain("xgrammar")[0]
        assert counter(llm, "num_preemptions") > 0


@of_cases("xgrammar")
def test_drafts_grow_without_a_grammar_that_the_worker_cannot_compile(served, monkeypatch):
    def fail(*_: Any) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(GrammarsAhead, "_compile", fail)
    before = counter(served.llm, "spec_decode_num_accepted_tokens")
    prompts, params = (given[1:2] * 2 for given in requests("xgrammar"))
    assert generate(served.llm, prompts, params) == plain("xgrammar")[0][1:2] * 2
    assert counter(served.llm, "spec_decode_num_accepted_tokens") > before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no cores to be bound to")
def test_grammars_are_compiled_on_any_core():
    allowed = os.sched_getaffinity(0)

    def bound() -> set[int]:
        os.sched_setaffinity(0, {min(allowed)})
        use_all_cores()
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bound).result() >= allowed
