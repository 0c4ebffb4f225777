"""Model Runner V2 with recurrent layers: vLLM keeps a state behind each row of a chain.

Those of Mamba2: gated delta nets have no kernels for float32. `test_gpu` has both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import TOKEN_RECYCLING, counter, engine, make_config, runner
from random_models import granite_hybrid, mamba1
from v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, tokens_of

from vllm_recycle.integration.draft_limits import UNLIMITED
from vllm_recycle.integration.options import settings_of

pytestmark = pytest.mark.slow

LENGTH = {"max_tokens": 12}
# One does without drafts. In the second step it is beside the last part of a prompt that is as
# long as the rows of a whole draft.
BATCH = [
    ((0, 16), GREEDY | LENGTH | {"extra_args": {"speculate": False}}),
    ((0, 37), GREEDY | LENGTH),
    ((3, 60), SEEDED | LENGTH),
]
BATCHES = [BATCH, BATCH[1:]]
ARGUMENTS = LLM_ARGUMENTS | {
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
}
# A step has room for less than two whole drafts.
METHOD = TOKEN_RECYCLING | {"k": 4, "contexts": [1, 2], "context_mib": 1, "budget_share": 0.15}


def test_tokens_equal_those_without_speculation(result):
    found = result["served"]
    assert found["chains"] == found["plain"]
    assert found["accepted tokens"] > 0
    assert {*found["lengths"]} >= {3, 4}


def test_requests_without_a_draft_come_before_prompts(result):
    """Where vLLM's kernels look for them."""
    assert "as long as a draft" in result["served"]["prompts beside plain requests"]
    assert "before" not in result["served"]["prompts beside plain requests"]


def test_drafts_have_one_length_at_any_load(result):
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


def serve(model: str) -> dict[str, Any]:
    """In the process with the engines: one without drafts, and one with chains."""
    arguments = ARGUMENTS | {"model": model}

    with engine(**arguments) as llm:
        result: dict[str, Any] = {"plain": tokens_of(llm, *BATCHES)}
    lengths, seen = [], []
    with engine(METHOD, **arguments) as llm:
        watch_batches(llm, lengths, seen)
        result["chains"] = tokens_of(llm, *BATCHES)
        result["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens")
    return result | {"lengths": lengths, "prompts beside plain requests": seen}


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines."""
    model = granite_hybrid(folder / "Mamba2")
    result: dict[str, Any] = {"served": serve(model)}
    result["table"] = settings_of(make_config(METHOD, **ARGUMENTS | {"model": model})).table
    try:
        with engine(TOKEN_RECYCLING, **ARGUMENTS | {"model": mamba1(folder / "Mamba1")}):
            pass
    except NotImplementedError as error:
        result["refused"] = str(error)
    return result
