"""What Model Runner V2 is configured with, by vLLM and us, for many flags; no engine starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import PUBLISHED, TARGET, TOKEN_RECYCLING
from random_models import gpt_oss

from vllm_recycle.integration.versions import FEATURES

# A draft model that two ranks can share.
METHODS = {"token_recycling": TOKEN_RECYCLING, "ouroboros": PUBLISHED | {"model": TARGET}}
METHODS["trunk"] = METHODS["ouroboros"] | {"preset": None}
if not FEATURES.v2_hosts:
    del METHODS["ouroboros"], METHODS["trunk"]
MINE = [(1, 4, 16), (5, 1024, 0)]
# By name: flags, and keys of the method.
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "two replicas": ({"data_parallel_size": 2}, {}),
    "two replicas, a table": (
        {"data_parallel_size": 2},
        {"num_speculative_tokens_per_batch_size": MINE},
    ),
    "two ranks": ({"tensor_parallel_size": 2}, {}),
    "eager": ({"enforce_eager": True}, {}),
    "adapters": ({"enable_lora": True}, {}),
    "one request": ({"max_num_seqs": 1}, {}),
    "1,024 requests": ({"max_num_seqs": 1024}, {}),
    "capture sizes": ({"cudagraph_capture_sizes": [8, 16]}, {}),
}
CASES = [(method, name) for method in METHODS for name in FLAGS]
# By name: the tree, the attention backend that is given, the tree and the backend that come of it.
BACKENDS = {
    "none given": ("dynamic", None, ("dynamic", "FLASH_ATTN")),
    "that of trees": ("default", "FLASH_ATTN", ("default", "FLASH_ATTN")),
    "another": ("dynamic", "FLASHINFER", ("chain", "FLASHINFER")),
    "chains": ("chain", None, ("chain", None)),
    "a template": ("default", "FLASHINFER", "does not support --attention-backend FLASHINFER"),
}
# By the version of FlashAttention that a GPU has: of a model with attention sinks.
SINKS = {3: ["dynamic", "FLASH_ATTN"], 2: ["chain", None]}


@pytest.mark.parametrize(("method", "name"), CASES)
def test_vllm_has_the_table_that_we_have_and_there_are_sizes(result, method, name):
    found = result[f"{method}, {name}"]
    assert found["table of vLLM"] == found["our table"]
    assert found["sizes of one request"]
    mine = "num_speculative_tokens_per_batch_size" in FLAGS[name][1]
    assert not mine or found["our table"] == [list(entry) for entry in MINE]


@pytest.mark.parametrize("name", BACKENDS)
def test_trees_have_their_attention_backend_and_chains_go_with_any(result, name):
    _, _, expected = BACKENDS[name]
    found = result["backends"][name]
    assert expected in found if isinstance(expected, str) else tuple(found) == expected


def test_trees_leave_attention_sinks_to_the_backend_that_vllm_takes_where_ours_has_none(result):
    assert result["backends"]["sinks"] == {str(key): value for key, value in SINKS.items()}


def attention_backends(make: Any, folder: Path) -> dict[str, Any]:
    """In a process where V2 is what a GPU has: what comes of each that is given, or the error."""
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_recycle.integration.options import settings_of
    from vllm_recycle.integration.platform import PLATFORMS

    ours, found = PLATFORMS["cpu"], {"sinks": {}}
    trees = replace(ours, attention_backend=AttentionBackendEnum.FLASH_ATTN)
    PLATFORMS["cpu"] = trees
    for name, (tree, given, _) in BACKENDS.items():
        try:
            config = make(TARGET, TOKEN_RECYCLING | {"tree": tree}, attention_backend=given)
        except NotImplementedError as error:
            found[name] = str(error)
        else:
            backend, options = config.attention_config.backend, settings_of(config).options
            assert config.speculative_config.num_speculative_tokens == options.num_nodes
            found[name] = [options.tree, backend and backend.name]
    model = gpt_oss(folder / "sinks", 16, [1.0] * 4)
    version_of = fa_utils.get_flash_attn_version
    for version in SINKS:
        fa_utils.get_flash_attn_version = lambda *args, version=version, **kwargs: version
        config = make(model, TOKEN_RECYCLING, max_model_len=64)
        backend, tree = config.attention_config.backend, settings_of(config).options.tree
        found["sinks"][version] = [tree, backend and backend.name]
    fa_utils.get_flash_attn_version = version_of
    PLATFORMS["cpu"] = ours
    return found


def main(folder: Path) -> dict[str, Any]:
    """In a process where V2 is what a GPU has."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_recycle.integration.draft_sizes import sizes_of
    from vllm_recycle.integration.options import settings_of

    def make(model: str, method: dict[str, Any], **flags: Any) -> Any:
        args = EngineArgs(model, dtype="float32", speculative_config=method, **flags)
        return args.create_engine_config()

    result: dict[str, Any] = {}
    for method, name in CASES:
        flags, keys = FLAGS[name]
        config = make(TARGET, METHODS[method] | keys, **flags)
        result[f"{method}, {name}"] = {
            "table of vLLM": config.speculative_config.num_speculative_tokens_per_batch_size,
            "our table": settings_of(config).table,
            "sizes of one request": sizes_of(config)[1],
        }
    return result | {"backends": attention_backends(make, folder)}
