"""Trees along what vLLM's own methods draft: outputs are vLLM's, and so are the trunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import heads
import pytest
import torch
from engines import TARGET, TRUNK, counter, engine, generate, mixed_params, read_prompts, runner
from vllm import SamplingParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

LENGTH = 3
PROMPTS = read_prompts(4)
MIXED = mixed_params(4, max_tokens=40)
ALL_GREEDY = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 4
# Prefixes that are cached; and with greedy requests prompts in chunks, beside others' drafts. Plain
# vLLM on a CPU has no seeds with these.
ARGUMENTS = {"enable_prefix_caching": True, "max_num_seqs": 4}
IN_CHUNKS = {"max_num_batched_tokens": 96}
Chains = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name the target, and what drafts."""
    folder = tmp_path_factory.mktemp("heads")
    length = {"num_speculative_tokens": LENGTH}
    return {
        "eagle": (TARGET, {"method": "eagle", "model": heads.eagle(folder / "eagle"), **length}),
        "eagle3": (TARGET, {"method": "eagle3", "model": heads.eagle3(folder / "e3"), **length}),
        "mtp": (heads.with_mtp(folder / "mtp"), {"method": "mtp", **length}),
        "draft_model": (TARGET, {"method": "draft_model", "model": TRUNK["model"], **length}),
        "ngram": (TARGET, {"method": "ngram", "prompt_lookup_max": 3, **length}),
        "suffix": (TARGET, {"method": "suffix", **length}),
    }


HAS_SUFFIX = find_spec("arctic_inference") is not None
SOURCES = ["eagle", "eagle3", "mtp", "draft_model", "ngram"]
SOURCES += [pytest.param("suffix", marks=pytest.mark.skipif(not HAS_SUFFIX, reason="make suffix"))]


@contextmanager
def watched_chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chains]:
    """What vLLM's proposer drafts behind each text."""
    chains: Chains = {}
    propose = GPUModelRunner.propose_draft_token_ids

    def watched(self: Any, output: Any, sampled: Any, *args: Any) -> Any:
        drafts = propose(self, output, sampled, *args)
        batch, rows = self.input_batch, drafts.tolist() if torch.is_tensor(drafts) else drafts
        for index, chain in enumerate(rows):
            text = batch.token_ids_cpu[index, : batch.num_tokens_no_spec[index]].tolist()
            if torch.is_tensor(sampled):  # before vLLM has taken them in
                text += [token for token in sampled[index].tolist() if token >= 0]
            if chain and len(text) > batch.num_prompt_tokens[index]:
                chains[tuple(text)] = [*map(int, chain)]
        return drafts

    with monkeypatch.context() as patch:
        patch.setattr(GPUModelRunner, "propose_draft_token_ids", watched)
        yield chains


def run(
    model: str, method: dict[str, Any] | None, monkeypatch: Any, params: Any = MIXED, **flags: Any
) -> tuple[list[Any], Chains, dict[str, int]]:
    """Tokens of two passes, the chains behind each text, and counts."""
    counts: Counter[str] = Counter()
    with (
        watched_chains(monkeypatch) as chains,
        engine(method, model=model, **ARGUMENTS | flags) as llm,
    ):
        compact = runner(llm)._compact_kv_cache if method else None

        def watched(path: torch.Tensor) -> None:
            compact(path)
            counts["moved"] += runner(llm).moved is not None

        if method:
            runner(llm)._compact_kv_cache = watched
        tokens = [generate(llm, PROMPTS, params) for _ in range(2)]
        if method:
            counts["accepted"] = counter(llm, "spec_decode_num_accepted_tokens")
            counts["rounds"] = runner(llm).tree_drafter.num_rounds
    return tokens, chains, counts


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("cost", [{"row_cost": 0}, {}], ids=["whole", "priced"])
def test_outputs_are_vllms_and_trunks_are_its_chains(name, cost, sources, monkeypatch):
    model, trunk = sources[name]
    plain, _, _ = run(model, None, monkeypatch)
    method = {"method": "token_recycling", "trunk": trunk, "max_nodes": 12, **cost}
    tokens, _, counts = run(model, method, monkeypatch)
    assert tokens == plain
    assert counts["accepted"] > 0
    if not cost:
        return
    assert counts["rounds"] > 40
    greedy, chains, counts = run(model, method, monkeypatch, ALL_GREEDY, **IN_CHUNKS)
    assert greedy == run(model, None, monkeypatch, ALL_GREEDY, **IN_CHUNKS)[0]
    assert counts["moved"] >= 4
    if name == "suffix":  # which drafts from all that it has seen
        return
    assert len(chains) > 10
    # Behind the same texts, as prompts without the token that the target says next.
    texts = [*chains][:60]
    with watched_chains(monkeypatch) as expected, engine(trunk, model=model, **ARGUMENTS) as llm:
        prompts = [{"prompt_token_ids": [*text[:-1]]} for text in texts]
        generate(llm, prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [chains[text] for text in texts] == [expected.get(text) for text in texts]
