"""Chains, and models of other layers, on Model Runner V2: what V2 gives without, token for token.

Where there are only chains, vLLM's own layers verify them, whatever they are. Requests that look
back have chains beside trees. Recurrent layers, of which vLLM keeps a state behind each row, are
those of Mamba2: gated delta nets have no kernels for float32. `test_gpu` has both. Trees are for
layers with windows, sinks, or KV caches that they share.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from tests.integration.cuda.test_runner import GRAMMARS, LOOKING_BACK, MIXED
from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    LLM_ARGUMENTS,
    MODEL,
    SEEDED,
    TREE,
    generate,
    watch_moves,
    with_sizes,
)
from tests.integration.engines import THINKING as ENDS
from tests.integration.engines import TOKEN_RECYCLING, core, counter, engine, make_config, runner
from tests.integration.models.derived_models import with_windows
from tests.integration.models.random_models import gemma4, gpt_oss, granite_hybrid, mamba1
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.limits import UNLIMITED
from vllm_recycle.integration.requests.parameters import looks_back

pytestmark = pytest.mark.slow

LENGTH = {"max_tokens": 12}
# Which tokens of TEXT are the prompt, and the sampling parameters.
BATCHES = {
    "mixed": MIXED,
    "grammars": GRAMMARS,
    "looking back": LOOKING_BACK[1:],
    # Their prompts are thoughts, too.
    "thinking": [
        ((0, 16), {**GREEDY, "thinking_token_budget": 18}),
        ((0, 12), {**SEEDED, "thinking_token_budget": 13}),
    ],
    # All at once: two blocks each for the prompts, which take several steps, and too few for a
    # third. One follows a grammar too, and one is like others.
    "crowded": [
        ((0, 57), {**GREEDY, "thinking_token_budget": 19, "max_tokens": 12}),
        ((1, 62), {**GREEDY, "max_tokens": 12}),
        ((2, 63), {**SEEDED, "presence_penalty": 0.5, "bad_words": ["miles"]}),
        ((0, 60), {**GRAMMARS[0][1], "repetition_penalty": 1.2}),
    ],
    "pair": [((0, 60), GREEDY | {"max_tokens": 16}), ((3, 50), SEEDED | {"max_tokens": 16})],
    # One does without drafts. In the second step it is beside the last part of a prompt that is as
    # long as the rows of a whole draft.
    "beside": [
        ((0, 16), GREEDY | LENGTH | {"extra_args": {"speculate": False}}),
        ((0, 37), GREEDY | LENGTH),
        ((3, 60), SEEDED | LENGTH),
    ],
}
BATCHES["beside again"] = BATCHES["beside"][1:]
CHAINED = ["mixed", "grammars", "looking back", "thinking"]
WINDOW = 24
OF_GROUPS = LLM_ARGUMENTS | {"num_gpu_blocks_override": 40}  # for two
RECURRENT = LLM_ARGUMENTS | {
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
}
# Of each model, which is added: the arguments of engines, and what they are asked.
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": (LLM_ARGUMENTS | ENDS, [*CHAINED, "crowded", "pair"]),
    "recurrent": (RECURRENT, ["beside", "beside again"]),
    "windows": (OF_GROUPS, ["pair"]),
    "sinks": (OF_GROUPS, ["pair"]),
    "shared": (OF_GROUPS, ["pair"]),
}
TREES = with_sizes(GROWN, [(1, 4, TREE.num_nodes)])
# A step has room for less than two whole drafts.
OF_STATES = {"k": 4, "contexts": [1, 2], "context_mib": 1, "budget_share": 0.15}
# The model, batches, the method, and what differs from the default of the engine.
RUNS: dict[str, tuple[str, list[str], dict[str, Any], dict[str, Any]]] = {
    # Chains that are asked for, and those that come where trees do not go.
    "chains": ("plain", CHAINED, {"tree": "chain", "max_nodes": 6}, {}),
    "embeddings": ("plain", ["pair"], {}, {"enable_prompt_embeds": True}),
    "looking back": ("plain", ["thinking", "crowded", "looking back"], TREES, {}),
    "recurrent": ("recurrent", ["beside", "beside again"], OF_STATES, {}),
    **{name: (name, ["pair"], TREES, {}) for name in ("windows", "sinks", "shared")},
}


@pytest.mark.parametrize("run", RUNS)
def test_tokens_equal_those_without_speculation(result, run):
    assert sum(result[run]["accepted tokens"].values()) > 0
    for batch, outputs in result[run]["outputs"].items():
        for plain, ours in zip(result["without"][RUNS[run][0]][batch], outputs, strict=True):
            assert ours["token_ids"] == plain["token_ids"]
            for kind, values in plain["logprobs"].items():
                assert ours["logprobs"][kind] == pytest.approx(values, abs=1e-4)


def test_chains_have_nothing_of_trees_and_requests_that_look_back_have_drafts(result):
    for run, nodes in {"chains": 6, "embeddings": 24}.items():
        assert result[run]["most nodes"] == nodes
        assert sum(result[run]["moved rows"].values()) == 0
        assert result[run]["attention"] == [FlashAttentionImpl.__name__]
    assert result["chains"]["undrafted requests"] == 0
    accepted = result["chains"]["accepted tokens"]
    assert min(accepted["looking back"], accepted["thinking"]) > 0


def test_beside_trees_requests_that_look_back_have_chains(result):
    found = result["looking back"]
    assert min(found["accepted tokens"].values()) > 0
    assert found["undrafted requests"] == 0
    assert found["preemptions"] > 0
    seen = found["seen"]
    assert min(seen["chains that look back"], seen["trees of others"]) > 0
    assert "trees that look back" not in seen


def test_budgets_end_what_is_thought(result):
    pairs = zip(result["thinking freely"], result["without"]["plain"]["thinking"], strict=True)
    assert all(one != other for one, other in pairs)


def test_nothing_is_learnt_where_input_is_no_token(result):
    # What follows tokens, and nothing that an image is before.
    of_embeddings, of_an_image, of_tokens = 0, 1 + 1, 1 + 2 + 2 + 3
    assert result["embeddings"]["entries written"] == [of_embeddings, of_an_image, of_tokens]


def test_requests_without_a_draft_come_before_prompts(result):
    """Where vLLM's kernels for recurrent layers look for them."""
    found = result["recurrent"]
    assert found["seen"]["as long as a draft"] > 0
    assert "plain requests behind a prompt" not in found["seen"]
    assert {*found["lengths"]} >= {3, 4}
    # At any load there is one length.
    assert result["table"] == [[1, UNLIMITED, 4]]


def test_layers_whose_states_do_not_go_back_are_refused(result):
    assert "states are of the kind MAMBA1, expected one of ['MAMBA2'," in result["refused"]


@pytest.mark.parametrize(("model", "groups"), [("windows", 2), ("sinks", 2), ("shared", 1)])
def test_models_have_windows_sinks_and_shared_caches_with_rows_moved_in_each(result, model, groups):
    found = result[model]
    assert found["groups"] == len(found["moved rows"]) == groups
    # Random weights that repeat themselves are drafted in the first nodes, which stay.
    assert model == "shared" or min(found["moved rows"].values()) > 0
    assert found["layers with sinks"] == 4 * (model == "sinks")
    assert found["layers that share"] == 2 * (model == "shared")
    # They saw trees beside prompts.
    assert model != "shared" or found["seen"]["trees beside a prompt"] > 0
    assert result["without"]["windows"]["pair"] != result["without"]["plain"]["pair"]


def watch_batches(llm: Any, lengths: list[int], seen: Counter[str]) -> None:
    """Take down how long drafts are, and where prompts are beside requests without a draft."""
    prepare_inputs = runner(llm).prepare_inputs

    def watched(output: Any, batch: Any, *args: Any) -> Any:
        lengths.extend(map(len, output.scheduled_spec_decode_tokens.values()))
        drafts = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in batch.req_ids]
        rows = zip(batch.is_prefilling_np, drafts, strict=True)
        kinds = ["prompt" if is_prompt else "tree" if n else "plain" for is_prompt, n in rows]
        seen["trees beside a prompt"] += {"prompt", "tree"} <= {*kinds}
        if {"prompt", "plain"} <= {*kinds}:
            first = kinds.index("prompt")
            seen["as long as a draft"] += int(batch.num_scheduled_tokens[first]) == 5
            if "plain" in kinds[first:]:
                seen["plain requests behind a prompt"] += 1
        return prepare_inputs(output, batch, *args)

    runner(llm).prepare_inputs = watched


def watch_chains(llm: Any, seen: Counter[str]) -> None:
    """Take down whose drafts are chains."""
    ours, requests = runner(llm), core(llm).scheduler.requests
    prepare_attn, trees = ours.prepare_attn, ours.tree_drafter.trees

    def watched(batch: Any) -> Any:
        lengths = [] if batch.num_draft_tokens_per_req is None else batch.num_draft_tokens_per_req
        for name, index, length in zip(batch.req_ids, batch.idx_mapping, lengths, strict=False):
            parents, nodes = trees.parents[index, 1 : 1 + length], torch.arange(length)
            is_node = ours.req_states.draft_tokens[index, :length] >= 0
            kind = "trees" if (is_node & (parents != nodes)).any() else "chains"
            whose = "that look back" if looks_back(requests[name].sampling_params) else "of others"
            seen[f"{kind} {whose}"] += bool(length)
        return prepare_attn(batch)

    ours.prepare_attn = watched


def serve(
    model: str, batches: list[str], method: dict[str, Any], flags: dict[str, Any]
) -> dict[str, Any]:
    """In the process with the engines: what one with drafts gives, and what was seen."""
    moved, lengths, seen = watch_moves(), [], Counter[str]()
    outputs, accepted = {}, {}
    with engine(TOKEN_RECYCLING | method, **MODELS[model][0] | flags) as llm:
        ours = runner(llm)
        watch_batches(llm, lengths, seen)
        watch_chains(llm, seen)
        for name in batches:
            before = counter(llm, "spec_decode_num_accepted_tokens")
            outputs[name] = generate(llm, [BATCHES[name]])
            accepted[name] = counter(llm, "spec_decode_num_accepted_tokens") - before
        [statistics] = llm.collective_rpc("draft_statistics")
        layers = ours.compilation_config.static_forward_context.values()
        shared = [getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers]
        names = [name for name, _ in ours.model.named_parameters()]
        return {
            "outputs": outputs,
            "accepted tokens": accepted,
            "most nodes": ours.num_speculative_steps,
            "undrafted requests": statistics["undrafted_requests"],
            "preemptions": counter(llm, "num_preemptions"),
            "moved rows": dict(moved),  # engines that come later are counted too
            "entries written": entries_of_holes(llm) if flags else [],
            "attention": sorted(
                {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}
            ),
            "lengths": lengths,
            "seen": seen,
            "groups": len(core(llm).scheduler.kv_cache_config.kv_cache_groups),
            "layers that share": len(shared) - shared.count(None),
            "layers with sinks": sum(name.endswith(".sinks") for name in names),
        }


def entries_of_holes(llm: Any) -> list[int]:
    """How many entries are written of embeddings, of an image between tokens, and of tokens."""
    drafter = runner(llm).tree_drafter
    params = SamplingParams(max_tokens=1, extra_args={"owner": "a"})  # else nothing is learnt
    embeddings = {"prompt_embeds": torch.zeros(12, runner(llm).model_config.get_hidden_size())}
    text = [901, 902, 903, 904, 905]
    image = [*text[:2], -1, *text[3:]]
    runner(llm).req_states.all_token_ids.gpu[0, : len(text)] = torch.tensor(text)
    counts = [drafter.state.matrix.num_written]
    for act in (
        lambda: llm.generate([embeddings], params, use_tqdm=False),
        lambda: drafter.add_requests([NewRequest(0, image)]),
        lambda: drafter.add_requests([NewRequest(0, text)]),
    ):
        act()
        counts.append(drafter.state.matrix.num_written)
    return [after - before for before, after in pairwise(counts)]


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: of each model one without drafts, and those with them."""
    paths = {
        "recurrent": granite_hybrid(folder / "Mamba2"),
        "windows": with_windows(folder / "windows", WINDOW, "sf", source=MODEL),
        "sinks": gpt_oss(folder / "sinks", WINDOW, [-1.0, 2.0, 4.0, 6.0]),
        "shared": gemma4(folder / "gemma4"),
    }
    result: dict[str, Any] = {"without": {}}
    for model, (arguments, batches) in MODELS.items():
        MODELS[model] = arguments | {"model": paths.get(model, MODEL)}, batches
        with engine(**MODELS[model][0]) as llm:
            result["without"][model] = {name: generate(llm, [BATCHES[name]]) for name in batches}
            if model == "plain":
                thoughts = BATCHES["thinking"]
                free = [(at, params | {"thinking_token_budget": None}) for at, params in thoughts]
                result["thinking freely"] = generate(llm, [free])
    result |= {name: serve(*run) for name, run in RUNS.items()}
    result["table"] = settings_of(make_config(OF_STATES, **MODELS["recurrent"][0])).table
    arguments = RECURRENT | {"model": mamba1(folder / "Mamba1")}
    with pytest.raises(NotImplementedError) as error, engine(TOKEN_RECYCLING, **arguments):
        pass
    return result | {"refused": str(error.value)}
