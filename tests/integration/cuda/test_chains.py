"""Model Runner V2 with chains: drafts are verified by vLLM's own layers, whatever they are.

Recurrent layers, of which vLLM keeps a state behind each row, are those of Mamba2: gated delta nets
have no kernels for float32. `test_gpu` has both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from tests.integration.cuda.test_runner import GRAMMARS, LOOKING_BACK, MIXED
from tests.integration.cuda.v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, generate, watch_moves
from tests.integration.engines import TOKEN_RECYCLING, counter, engine, make_config, runner
from tests.integration.models.random_models import granite_hybrid, mamba1
from vllm_recycle.core import adjacency
from vllm_recycle.integration.draft_limits import UNLIMITED
from vllm_recycle.integration.options import settings_of

pytestmark = pytest.mark.slow

ENDS = {"reasoning_start_str": "Question", "reasoning_end_str": "Answer"}
# Their prompts are thoughts, too.
THINKING = [
    ((0, 16), {**GREEDY, "thinking_token_budget": 18}),
    ((0, 12), {**SEEDED, "thinking_token_budget": 13}),
]

ARGUMENTS = {**LLM_ARGUMENTS, "reasoning_config": ENDS}
BATCHES = [MIXED, GRAMMARS, LOOKING_BACK[1:], THINKING]
RECURRENT = LLM_ARGUMENTS | {
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
}
LENGTH = {"max_tokens": 12}
# One does without drafts. In the second step it is beside the last part of a prompt that is as
# long as the rows of a whole draft.
BESIDE = [
    ((0, 16), GREEDY | LENGTH | {"extra_args": {"speculate": False}}),
    ((0, 37), GREEDY | LENGTH),
    ((3, 60), SEEDED | LENGTH),
]
# Chains that are asked for, and those that come where trees do not go.
RUNS: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any]]] = {
    "chains": ({"tree": "chain", "max_nodes": 6}, BATCHES, ARGUMENTS),
    "embeddings": ({}, [MIXED[:2]], ARGUMENTS | {"enable_prompt_embeds": True}),
    # A step has room for less than two whole drafts.
    "recurrent": (
        {"k": 4, "contexts": [1, 2], "context_mib": 1, "budget_share": 0.15},
        [BESIDE, BESIDE[1:]],
        RECURRENT,
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_tokens_equal_those_without_speculation(result, run):
    plain_outputs = result["plain, recurrent" if run == "recurrent" else "plain"]
    assert result[run]["accepted tokens"] > 0
    for plain, chains in zip(plain_outputs, result[run]["outputs"], strict=False):
        assert chains["token_ids"] == plain["token_ids"]
        for kind, values in plain["logprobs"].items():
            assert chains["logprobs"][kind] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(("run", "nodes"), [("chains", 6), ("embeddings", 24)])
def test_nothing_of_trees_runs(result, run, nodes):
    found = result[run]
    assert found["most nodes"] == nodes
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


def test_requests_without_a_draft_come_before_prompts(result):
    """Where vLLM's kernels for recurrent layers look for them."""
    found = result["recurrent"]
    assert "as long as a draft" in found["prompts beside plain requests"]
    assert "before" not in found["prompts beside plain requests"]
    assert {*found["lengths"]} >= {3, 4}


def test_drafts_for_recurrent_layers_have_one_length_at_any_load(result):
    assert result["table"] == [[1, UNLIMITED, 4]]


def test_layers_whose_states_do_not_go_back_are_refused(result):
    assert "states are of the kind MAMBA1, expected one of ['MAMBA2'," in result["refused"]


def watch_batches(llm: Any, lengths: list[int], seen: list[str]) -> None:
    """Take down how long drafts are, and where prompts are beside requests without a draft."""
    prepare_inputs = runner(llm).prepare_inputs

    def watched(output: Any, batch: Any, *args: Any) -> Any:
        lengths.extend(map(len, output.scheduled_spec_decode_tokens.values()))
        drafts = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in batch.req_ids]
        rows = zip(batch.is_prefilling_np, batch.num_scheduled_tokens, drafts, strict=True)
        kinds = ["prompt" if is_prompt else n or "plain" for is_prompt, _, n in rows]
        if "prompt" in kinds and "plain" in kinds:
            first = kinds.index("prompt")
            seen.append("before" if "plain" in kinds[first:] else "behind")
            if batch.num_scheduled_tokens[first] == 5:
                seen.append("as long as a draft")
        return prepare_inputs(output, batch, *args)

    runner(llm).prepare_inputs = watched


def serve(method: dict[str, Any], batches: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """In the process with the engines: what an engine with chains gives, and what was seen."""
    moved, lengths, beside = watch_moves(), [], []
    with engine(TOKEN_RECYCLING | method, **arguments) as llm:
        watch_batches(llm, lengths, beside)
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
            "attention": sorted(
                {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}
            ),
            "lengths": lengths,
            "prompts beside plain requests": beside,
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
    """In the process with the engines: of each model one without drafts, and those with chains."""
    RECURRENT["model"] = granite_hybrid(folder / "Mamba2")
    with engine(**ARGUMENTS) as llm:
        free = [(at, params | {"thinking_token_budget": None}) for at, params in THINKING]
        result: dict[str, Any] = {"thinking freely": generate(llm, [free])}
        result["plain"] = generate(llm, BATCHES)
    with engine(**RECURRENT) as llm:
        result["plain, recurrent"] = generate(llm, RUNS["recurrent"][1])
    result |= {name: serve(*run) for name, run in RUNS.items()}
    config = make_config(RUNS["recurrent"][0], **RECURRENT)
    result["table"] = settings_of(config).table
    model = mamba1(folder / "Mamba1")
    with (
        pytest.raises(NotImplementedError) as error,
        engine(TOKEN_RECYCLING, **RECURRENT | {"model": model}),
    ):
        pass
    return result | {"refused": str(error.value)}
