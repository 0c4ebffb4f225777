"""Model Runner V2 with chains: drafts are verified by vLLM's own attention, whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import TOKEN_RECYCLING, counter, engine, runner
from test_runner import GRAMMARS, LOOKING_BACK, MIXED
from v2_engines import LLM_ARGUMENTS, generate, watch_moves
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

pytestmark = pytest.mark.slow

# Chains that are asked for, and those that come where trees do not go.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chains": ({"tree": "chain", "max_nodes": 6}, {}),
    "embeddings": ({}, {"enable_prompt_embeds": True}),
}


@pytest.mark.parametrize("run", RUNS)
def test_tokens_equal_those_without_speculation(result, run):
    for plain, chains in zip(result["plain"], result[run]["outputs"], strict=False):
        assert chains["token_ids"] == plain["token_ids"]
        for kind, values in plain["logprobs"].items():
            assert chains["logprobs"][kind] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(("run", "nodes"), [("chains", 6), ("embeddings", 24)])
def test_drafts_are_accepted_and_nothing_of_trees_runs(result, run, nodes):
    found = result[run]
    assert found["most nodes"] == nodes
    assert found["accepted tokens"] > 0
    assert found["moved rows"] == 0
    assert found["attention"] == [FlashAttentionImpl.__name__]


def test_requests_that_look_back_have_drafts(result):
    assert result["chains"]["undrafted requests"] == 0
    assert result["chains"]["accepted of those that look back"] > 0


def serve(method: dict[str, Any], batches: Any, **arguments: Any) -> dict[str, Any]:
    """In the process with the engines: what an engine with chains gives, and what was seen."""
    moved = watch_moves()
    with engine(TOKEN_RECYCLING | method, **LLM_ARGUMENTS | arguments) as llm:
        outputs, accepted = [], []
        for batch in batches:
            before = counter(llm, "spec_decode_num_accepted_tokens")
            outputs += generate(llm, [batch])
            accepted.append(counter(llm, "spec_decode_num_accepted_tokens") - before)
        [statistics] = llm.collective_rpc("draft_statistics")
        layers = runner(llm).compilation_config.static_forward_context.values()
        return {
            "outputs": outputs,
            "accepted tokens": sum(accepted),
            "accepted of those that look back": accepted[-1],
            "most nodes": runner(llm).num_speculative_steps,
            "undrafted requests": statistics["undrafted_requests"],
            "moved rows": moved.total(),
            "attention": sorted({type(layer.impl).__name__ for layer in layers}),
        }


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without drafts, and two with chains."""
    batches = [MIXED, GRAMMARS, LOOKING_BACK[1:]]
    with engine(**LLM_ARGUMENTS) as llm:
        result: dict[str, Any] = {"plain": generate(llm, batches)}
    for name, (method, arguments) in RUNS.items():
        served = batches if name == "chains" else [MIXED[:2]]
        result[name] = serve(method, served, **arguments)
    return result
