"""Model Runner V2 with windows, sinks, or shared KV caches: what V2 gives without trees.

A draft model may have windows only where no text can reach beyond one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.cuda.test_ouroboros import METHOD, SCHEDULE
from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    LLM_ARGUMENTS,
    MODEL,
    SEEDED,
    TREE,
    tokens_of,
    watch_moves,
    with_sizes,
)
from tests.integration.engines import core, counter, engine, runner
from tests.integration.models.derived_models import with_windows
from tests.integration.models.random_models import gemma4, gpt_oss

pytestmark = pytest.mark.slow

WINDOW = 24
BATCH = [((0, 60), GREEDY | {"max_tokens": 16}), ((3, 50), SEEDED | {"max_tokens": 16})]
ARGUMENTS = LLM_ARGUMENTS | {"num_gpu_blocks_override": 40}  # for two groups


@pytest.mark.parametrize(("model", "groups"), [("windows", 2), ("sinks", 2), ("shared", 1)])
def test_tokens_equal_those_without_speculation(result, model, groups):
    found = result[model]
    assert found["trees"] == found["plain"]
    # Drafts were accepted, and compacted in each group.
    assert found["groups"] == len(found["moved rows"]) == groups
    assert found["accepted tokens"] > 0
    # Random weights that repeat themselves are drafted in the first nodes, which stay.
    assert model == "shared" or min(found["moved rows"].values()) > 0


def test_the_models_have_windows_sinks_and_shared_caches(result):
    assert result["without windows"] != result["windows"]["plain"]
    assert result["sinks"]["layers with sinks"] == 4
    assert result["shared"]["layers that share"] == 2
    # They saw trees beside prompts.
    assert result["shared"]["mixed steps"] > 0


def test_a_draft_model_may_have_a_window_that_no_text_can_reach(result):
    assert result["window of all texts"] == result["without windows"]
    assert result["accepted tokens of all texts"] > 0


def test_a_draft_model_whose_layers_share_a_kv_cache_is_refused(result):
    named = "layers share a KV cache, as draft_model.model.layers.2.self_attn.attn does"
    assert named in result["refused"]


def serve(model: str) -> dict[str, Any]:
    """In the process with the engines: one without trees, and one with, of two groups."""
    with engine(**ARGUMENTS | {"model": model}) as llm:
        result: dict[str, Any] = {"plain": tokens_of(llm, BATCH)}
    moved = watch_moves()
    method = with_sizes(GROWN, [(1, 4, TREE.num_nodes)])
    with engine(method, **ARGUMENTS | {"model": model}) as llm:
        result["groups"] = len(core(llm).scheduler.kv_cache_config.kv_cache_groups)
        assert len(runner(llm).paged_layers) == result["groups"]
        mixed, prepare_attn = [], runner(llm).prepare_attn

        def watched(batch: Any) -> Any:
            mixed.append(batch.has_prefill and batch.num_draft_tokens > 0)
            return prepare_attn(batch)

        runner(llm).prepare_attn = watched
        result["trees"] = tokens_of(llm, BATCH)
        result["mixed steps"] = sum(map(bool, mixed))
        layers = runner(llm).compilation_config.static_forward_context.values()
        result["layers that share"] = sum(
            getattr(layer, "kv_sharing_target_layer_name", None) is not None for layer in layers
        )
        result["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens")
        names = [name for name, _ in runner(llm).model.named_parameters()]
        result["layers with sinks"] = sum(name.endswith(".sinks") for name in names)
    return result | {"moved rows": dict(moved)}  # engines that come later are counted too


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines."""
    result: dict[str, Any] = {
        "windows": serve(with_windows(folder / "windows", WINDOW, "sf", source=MODEL)),
        "sinks": serve(gpt_oss(folder / "sinks", WINDOW, [-1.0, 2.0, 4.0, 6.0])),
        "shared": serve(gemma4(folder / "gemma4")),
    }
    with engine(**ARGUMENTS) as llm:
        result["without windows"] = tokens_of(llm, BATCH)

    def draft_with(draft: str) -> Any:
        return engine(with_sizes(METHOD | {"model": draft}, SCHEDULE), **ARGUMENTS)

    longest = ARGUMENTS["max_model_len"]
    with draft_with(with_windows(folder / "draft", longest, "ss", source=MODEL)) as llm:
        result["window of all texts"] = tokens_of(llm, BATCH)
        result["accepted tokens of all texts"] = counter(llm, "spec_decode_num_accepted_tokens")
    with pytest.raises(NotImplementedError) as error, draft_with(str(folder / "gemma4")):
        pass
    return result | {"refused": str(error.value)}
