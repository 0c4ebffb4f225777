"""Model Runner V2 with layers of sliding windows: what V2 gives without trees, token for token.

A draft model may have them only where no text can reach beyond one.

It runs under the Triton interpreter, in a process of its own: see `test_runner`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from v2_scripts import run_script

pytestmark = pytest.mark.slow

WINDOW = 24


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v2")
    return run_script(__file__, folder / "result.json", folder)


def test_tokens_equal_those_without_speculation(result):
    assert result["trees"] == result["plain"]


def test_trees_were_accepted_and_compacted_in_each_group(result):
    assert result["groups"] == 2
    assert result["accepted tokens"] > 0
    assert min(result["moved rows"].values()) > 0
    assert len(result["moved rows"]) == 2


def test_windows_matter(result):
    assert result["without windows"] != result["plain"]


def test_a_draft_model_may_have_a_window_that_no_text_can_reach(result):
    assert result["window of all texts"] == result["without windows"]
    assert result["accepted tokens of all texts"] > 0


def test_a_draft_model_with_a_window_that_texts_can_reach_is_refused(result):
    assert result["refused"][0] == (
        "ouroboros: on a GPU the draft model may have no sliding windows; use another one"
    )


def test_a_draft_model_whose_layers_share_a_kv_cache_is_refused(result):
    named = "layers share a KV cache, as draft_model.model.layers.2.self_attn.attn does"
    assert named in result["refused"][1]


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines."""
    import torch
    from derived_models import gemma4, with_windows
    from engines import core, counter, runner
    from test_ouroboros import FORWARDS, SCHEDULE, SIZES
    from test_runner import GREEDY, LLM_ARGUMENTS, MODEL, SEEDED, generate
    from vllm import LLM

    from vllm_recycle.integration.cuda import runner as v2_runner

    batch = [((0, 60), GREEDY | {"max_tokens": 16}), ((3, 50), SEEDED | {"max_tokens": 16})]
    LLM_ARGUMENTS["num_gpu_blocks_override"] = 24  # for two groups
    model = with_windows(folder / "model", WINDOW, "sf", source=MODEL)
    windowed = LLM_ARGUMENTS | {"model": model}

    def tokens_of(llm: Any) -> list[list[int]]:
        return [output["token_ids"] for output in generate(llm, [batch])]

    result: dict[str, Any] = {}
    for name, arguments in (("without windows", LLM_ARGUMENTS), ("plain", windowed)):
        llm = LLM(**arguments)
        result[name] = tokens_of(llm)
        llm.llm_engine.engine_core.shutdown()
    moved: dict[str, int] = {}
    compact_path = v2_runner.compact_path

    def watched(layers: Any, slots: Any, rows: Any, starts: Any, path: Any) -> None:
        count = int((path > torch.arange(path.shape[1])).sum())
        moved[str(id(layers))] = moved.get(str(id(layers)), 0) + count
        compact_path(layers, slots, rows, starts, path)

    v2_runner.compact_path = watched
    method = {"method": "token_recycling", "max_nodes": 8, "context_mib": 1}
    method["num_speculative_tokens_per_batch_size"] = [(1, 4, 8)]
    llm = LLM(**windowed, speculative_config=method)
    result["groups"] = len(core(llm).scheduler.kv_cache_config.kv_cache_groups)
    assert len(runner(llm).paged_layers) == result["groups"]
    result["trees"] = tokens_of(llm)
    result["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens")
    result["moved rows"] = moved
    v2_runner.compact_path = compact_path
    llm.llm_engine.engine_core.shutdown()

    def draft_with(draft: str, **settings: str) -> Any:
        method = {"method": "ouroboros", "model": draft, "max_forwards": FORWARDS, **SIZES}
        method["num_speculative_tokens_per_batch_size"] = SCHEDULE
        return LLM(**LLM_ARGUMENTS, **settings, speculative_config=method)

    def windowed(window: int) -> str:
        return with_windows(folder / f"draft-{window}", window, "ss", source=MODEL)

    longest = LLM_ARGUMENTS["max_model_len"]
    llm = draft_with(windowed(longest))
    result["window of all texts"] = tokens_of(llm)
    result["accepted tokens of all texts"] = counter(llm, "spec_decode_num_accepted_tokens")
    llm.llm_engine.engine_core.shutdown()
    result["refused"] = []
    for draft, settings in (
        (windowed(longest - 1), {}),
        (gemma4(folder / "gemma4"), {"load_format": "dummy"}),
    ):
        try:
            draft_with(draft, **settings)
        except NotImplementedError as error:
            result["refused"].append(str(error))
    return result


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    outputs = Path(sys.argv[1])
    (outputs / "result.json").write_text(json.dumps(main(outputs)))
