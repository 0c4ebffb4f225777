"""Weights that change under running requests: outputs stay vLLM's, and counts weigh less."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm import SamplingParams

from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    IS_V2,
    LLM_ARGUMENTS,
    MODEL,
    SEEDED,
    TEXT,
)
from tests.integration.engines import GROWN as FREE_ROWS
from tests.integration.engines import core, counter, engine, runner

METHOD = GROWN if IS_V2 else {**FREE_ROWS, "max_nodes": 8}
PARAMS = [{**GREEDY, "max_tokens": 16}, {**SEEDED, "max_tokens": 16}]


def test_a_request_under_which_weights_change_ends_as_with_vllm(served):
    assert served["ours"] == served["plain"]
    for ours, unchanged in zip(served["ours"], served["unchanged"], strict=True):
        assert ours != unchanged
    assert served["accepted"] > 0


def test_counts_weigh_half_as_much_once_however_often_weights_were_brought(served):
    before, *after = served["counted"]
    assert after == [[one / 2**times for one in before] for times in (1, 2, 3)]
    assert served["entries"] > 0


def bring(llm: Any, factor: float) -> None:
    """Weights of another model: MLPs times a factor."""
    weights = load_file(Path(MODEL) / "model.safetensors")
    weights |= {name: weights[name] * factor for name in weights if "down_proj" in name}
    pairs = iter(weights.items())
    core(llm).collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})


def serve(llm: Any, params: dict[str, Any], at: int | None) -> tuple[list[int], int]:
    """Tokens of a request whose weights change once it has `at` of them; and how many it had."""
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode(TEXT)[:20]}
    llm.llm_engine.add_request("0", prompt, SamplingParams(**params))
    had, tokens = 0, []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens = [*output.outputs[0].token_ids]
        if at is not None and not had and len(tokens) >= at:
            had = len(tokens)
            bring(llm, -1.0)
    if had:
        bring(llm, 1.0)
    return tokens, had


def main(_: Path) -> dict[str, Any]:
    """With each runner."""
    # A step that is under way must not see half of the old weights and half of the new ones.
    arguments = LLM_ARGUMENTS | {"enable_prefix_caching": False, "async_scheduling": False}
    found: dict[str, Any] = {"ours": [], "plain": []}
    places = []
    with engine(METHOD, **arguments) as llm:
        for params in PARAMS * 2:
            tokens, had = serve(llm, params, 6)
            found["ours"].append(tokens)
            places.append(had)
        found["accepted"] = counter(llm, "spec_decode_num_accepted_tokens")
        state = runner(llm).tree_drafter.state
        found["entries"] = state.matrix.num_written

        def counted() -> list[float]:
            return state.acceptance.counts[0, 0, 0, 0].flatten().tolist()

        worker = llm.llm_engine.model_executor.driver_worker.worker
        worker.has_new_weights = False
        found["counted"] = [counted()]
        model = worker.get_model()
        changes = [partial(bring, llm, 1.0), worker.weights_changed]
        for change in (*changes, partial(model.load_weights, iter(()))):
            change()
            assert worker.has_new_weights
            worker.tree_drafter.weights_changed()
            found["counted"].append(counted())
    with engine(**arguments) as llm:
        for params, had in zip(PARAMS * 2, places, strict=True):
            found["plain"].append(serve(llm, params, had)[0])
        found["unchanged"] = [serve(llm, params, None)[0] for params in PARAMS] * 2
    return found
