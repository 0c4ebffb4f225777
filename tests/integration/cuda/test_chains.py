"""Model Runner V2 with chains: drafts are verified by vLLM's own attention, whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TOKEN_RECYCLING, counter, engine, runner
from test_runner import GRAMMARS, LOOKING_BACK, MIXED
from v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, generate, watch_moves
from vllm import SamplingParams
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from vllm_recycle.core import adjacency

pytestmark = pytest.mark.slow

ENDS = {"reasoning_start_str": "Question", "reasoning_end_str": "Answer"}
# Their prompts are thoughts, too.
THINKING = [
    ((0, 16), {**GREEDY, "thinking_token_budget": 18}),
    ((0, 12), {**SEEDED, "thinking_token_budget": 13}),
]

ARGUMENTS = {**LLM_ARGUMENTS, "reasoning_config": ENDS}
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
    assert min(result["chains"]["accepted of those that look back"]) > 0


def test_budgets_end_what_is_thought(result):
    free, plain = result["thinking freely"], result["plain"][-len(THINKING) :]
    assert all(one != other for one, other in zip(free, plain, strict=True))


def test_nothing_is_learnt_where_input_is_no_token(result):
    of_embeddings, of_an_image, of_tokens = result["embeddings"]["entries written"]
    assert of_embeddings == 0
    # What follows tokens, and nothing that an image is before.
    assert (of_an_image, of_tokens) == (1 + 1, 1 + 2 + 2 + 3)


def serve(method: dict[str, Any], batches: Any, **arguments: Any) -> dict[str, Any]:
    """In the process with the engines: what an engine with chains gives, and what was seen."""
    moved = watch_moves()
    with engine(TOKEN_RECYCLING | method, **ARGUMENTS | arguments) as llm:
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
            "accepted of those that look back": accepted[-2:],
            "most nodes": runner(llm).num_speculative_steps,
            "undrafted requests": statistics["undrafted_requests"],
            "moved rows": moved.total(),
            "entries written": entries_of_holes(llm) if "enable_prompt_embeds" in arguments else [],
            "attention": sorted({type(layer.impl).__name__ for layer in layers}),
        }


def entries_of_holes(llm: Any) -> list[int]:
    """How many entries are written of embeddings, of an image between tokens, and of tokens."""
    drafter = runner(llm).tree_drafter
    matrix = drafter.state.matrix

    def written(act: Any) -> int:
        before = matrix.num_written
        act()
        return matrix.num_written - before

    embeddings = {"prompt_embeds": torch.zeros(12, runner(llm).model_config.get_hidden_size())}
    params = SamplingParams(max_tokens=1)
    text = [901, 902, 903, 904, 905]
    runner(llm).req_states.all_token_ids.gpu[0, : len(text)] = torch.tensor(text)
    return [
        written(lambda: llm.generate([embeddings], params, use_tqdm=False)),
        written(
            lambda: drafter.begin([0], [[*text[:2], -1, *text[3:]]], [adjacency.GREEDY], [None])
        ),
        written(lambda: drafter.begin([0], [text], [adjacency.GREEDY], [None])),
    ]


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without drafts, and two with chains."""
    batches = [MIXED, GRAMMARS, LOOKING_BACK[1:], THINKING]
    with engine(**ARGUMENTS) as llm:
        free = [(at, params | {"thinking_token_budget": None}) for at, params in THINKING]
        result: dict[str, Any] = {"thinking freely": generate(llm, [free])}
        result["plain"] = generate(llm, batches)
    for name, (method, arguments) in RUNS.items():
        served = batches if name == "chains" else [MIXED[:2]]
        result[name] = serve(method, served, **arguments)
    return result
