"""Trees along what vLLM's own methods draft: outputs are vLLM's, and so are the trunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.integration.engines import (
    HOSTED,
    TARGET,
    Chains,
    core,
    counter,
    engine,
    generate,
    mixed_params,
    read_prompts,
    runner,
    watched_chains,
)
from tests.integration.models import heads
from vllm_recycle.core.choose import Chooser, Price

LENGTH = 3
PROMPTS = read_prompts(4)
MIXED = mixed_params(4, max_tokens=40)
ALL_GREEDY = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 4
ARGUMENTS = {"enable_prefix_caching": True, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name the target, and what drafts."""
    folder = tmp_path_factory.mktemp("heads")
    medusa = {"method": "medusa", "model": heads.medusa(folder / "medusa")}
    medusa["num_speculative_tokens"] = LENGTH
    return {**heads.trunks(folder, LENGTH), "medusa": (TARGET, medusa)}


SOURCES = ["eagle", "eagle3", "medusa", "mtp"]
CASES = [pytest.param({"row_cost": 0}, name, id=f"whole-{name}") for name in SOURCES]
# What takes time, and what is drafted in each step.
CASES += [pytest.param({}, name, id=f"priced-{name}") for name in ("eagle", "medusa")]


def watch(llm: Any, chains: Chains) -> tuple[list[tuple[int, ...]], Counter[str]]:
    """Texts of chains behind a step whose rows were moved, and what becomes of chains."""
    ours, moved, counts = runner(llm), [], Counter[str]()
    choices, draft = ours.tree_drafter.choices, ours.tree_drafter.draft
    draft_chains, chances = ours.draft_chains, choices.chances
    last: dict[str, Any] = {}

    def watched_chains(length: int) -> Any:
        known = set(chains)
        last["chains"] = draft_chains(length)
        if ours.moved is not None:
            moved.extend(text for text in chains if text not in known)
        return last["chains"]

    def watched_chances(trunks: Any, idx_mapping: Any) -> Any:
        last["trunks"] = trunks.token_ids[:, :, 0].tolist()
        for trunk, chain in zip(last["trunks"], last["chains"], strict=True):
            tokens = [token for token in trunk if token >= 0]
            counts["wrong trunks"] += tokens not in ([], [*map(int, chain)][: len(trunk)])
        return chances(trunks, idx_mapping)

    def watched_draft(*args: Any) -> Any:
        last["trunks"] = []
        drafts = draft(*args)
        for index, trunk in enumerate(last["trunks"]):
            nodes = zip(drafts.parents[index], drafts.token_ids[index], strict=True)
            counts["trunks in trees"] += (0, trunk[0]) in set(nodes)
        return drafts

    ours.draft_chains, choices.chances = watched_chains, watched_chances
    ours.tree_drafter.draft = watched_draft
    return moved, counts


def two_passes(llm: Any, params: Any) -> list[Any]:
    return [generate(llm, PROMPTS, params) for _ in range(2)]


@pytest.fixture(scope="module")
def plain() -> Callable[[str], tuple[list[Any], list[Any]]]:
    """Tokens of a model without speculation: of two passes of mixed requests, then of greedy."""

    @cache
    def tokens_of(model: str) -> tuple[list[Any], list[Any]]:
        with engine(model=model, **ARGUMENTS) as llm:
            return two_passes(llm, MIXED), two_passes(llm, ALL_GREEDY)

    return tokens_of


@pytest.mark.parametrize(("cost", "name"), CASES)
def test_outputs_are_vllms_and_trunks_are_its_chains(name, cost, sources, plain, monkeypatch):
    model, trunk = sources[name]
    mixed, greedy = plain(model)
    method = {"method": "token_recycling", "trunk": trunk, "max_nodes": 12, **cost}
    with watched_chains(monkeypatch) as chains, engine(method, model=model, **ARGUMENTS) as llm:
        moved, seen = watch(llm, chains)
        assert two_passes(llm, MIXED) == mixed
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0 or not cost
        drafter = runner(llm).tree_drafter
        assert drafter.num_rounds > (40 if cost else 0)
        assert seen["wrong trunks"] == 0
        if not cost:
            counts = drafter.choices.counts.clone()
            drafter.weights_changed()
            assert counts.any()
            assert drafter.choices.counts.equal(counts / 2), "expected new weights to halve them"
            return
        # Prompts in chunks, beside others' drafts. Plain vLLM on a CPU has no seeds with these.
        core(llm).scheduler.max_num_scheduled_tokens = 96
        llm.reset_prefix_cache()
        for of_mixed in (chains, moved, seen):
            of_mixed.clear()
        assert two_passes(llm, ALL_GREEDY) == greedy
    assert seen["wrong trunks"] == 0
    assert seen["trunks in trees"] > 0
    assert moved
    # Behind the same texts, as prompts without the token that the target says next.
    texts = list(dict.fromkeys([*moved, *chains]))[:60]
    with watched_chains(monkeypatch) as expected, engine(trunk, model=model, **ARGUMENTS) as llm:
        prompts = [{"prompt_token_ids": [*text[:-1]]} for text in texts]
        generate(llm, prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [chains[text] for text in texts] == [expected.get(text) for text in texts]


def test_a_trunk_is_no_longer_than_a_draft(plain):
    method = {**HOSTED, "trunk": HOSTED["trunk"] | {"num_speculative_tokens": 9}, "max_nodes": 3}
    with engine(method) as llm:
        assert runner(llm).tree_drafter.length == 3
        assert generate(llm, PROMPTS, MIXED) == plain(TARGET)[0][0]


def test_where_trees_do_not_go_chains_begin_with_the_trunk(sources, monkeypatch):
    """In float16; of a head, whose rounds are priced, here as free as rows."""
    model, trunk = sources["eagle"]
    always = lambda self, load, rate, *, num_left, **kwargs: num_left > 0  # noqa: E731
    monkeypatch.setattr(Chooser, "choose_trunks", always)
    free = lambda self, kind, seconds, load: Price(torch.ones_like(seconds))  # noqa: E731
    monkeypatch.setattr(Chooser, "price", free)
    method = {"method": "token_recycling", "trunk": trunk}
    with engine(method, model=model, dtype="float16", **ARGUMENTS) as llm:
        _, seen = watch(llm, {})
        generate(llm, PROMPTS, ALL_GREEDY)
        assert runner(llm).tree_drafter.options.tree == "chain"
    assert seen["wrong trunks"] == 0
    assert seen["trunks in trees"] > 0
