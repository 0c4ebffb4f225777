"""What Model Runner V2 is configured with, by vLLM and us, for many flags; no engine starts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from vllm.v1.attention.backends import fa_utils, flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.integration.engines import PUBLISHED, TARGET, TOKEN_RECYCLING, make_config
from tests.integration.models.random_models import gpt_oss
from vllm_recycle.integration.draft_sizes import sizes_of
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.base import TABLE
from vllm_recycle.integration.platform import PLATFORMS
from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.versions import FEATURES

# A draft model that two ranks can share.
METHODS = {"token_recycling": TOKEN_RECYCLING, "ouroboros": PUBLISHED | {"model": TARGET}}
METHODS["trunk"] = METHODS["ouroboros"] | {"preset": None}
if not FEATURES.v2_hosts:
    del METHODS["ouroboros"], METHODS["trunk"]
MINE = [(1, 4, 16), (5, 1024, 0)]


@pytest.fixture(autouse=True)
def _on_v2(monkeypatch):
    """What a GPU has is what this machine has."""
    register()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True, raising=False)
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cuda"])


def make(method: dict[str, Any], **flags: Any) -> Any:
    return make_config(method, **{"enforce_eager": False} | flags)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({}, {}),
        ({"data_parallel_size": 2}, {}),
        ({"data_parallel_size": 2}, {TABLE: MINE}),
        ({"tensor_parallel_size": 2}, {}),
        ({"enforce_eager": True}, {}),
        ({"enable_lora": True}, {}),
        ({"max_num_seqs": 1}, {}),
        ({"max_num_seqs": 1024}, {}),
        ({"cudagraph_capture_sizes": [8, 16]}, {}),
    ],
)
def test_vllm_has_the_table_that_we_have_and_there_are_sizes(method, flags, keys):
    config = make(METHODS[method] | keys, **flags)
    table = settings_of(config).table
    assert config.speculative_config.num_speculative_tokens_per_batch_size == table
    assert sizes_of(config)[1]
    assert not keys or table == MINE


@pytest.mark.parametrize(
    ("tree", "given", "expected"),
    [
        ("dynamic", None, ("dynamic", AttentionBackendEnum.FLASH_ATTN)),
        ("default", "FLASH_ATTN", ("default", AttentionBackendEnum.FLASH_ATTN)),
        ("dynamic", "FLASHINFER", ("chain", AttentionBackendEnum.FLASHINFER)),
        ("chain", None, ("chain", None)),
    ],
)
def test_trees_have_their_attention_backend_and_chains_go_with_any(tree, given, expected):
    config = make({"tree": tree}, attention_backend=given)
    options = settings_of(config).options
    assert (options.tree, config.attention_config.backend) == expected
    assert config.speculative_config.num_speculative_tokens == options.num_nodes


def test_a_template_goes_with_no_other_attention_backend():
    with pytest.raises(NotImplementedError, match="support --attention-backend FLASHINFER"):
        make({"tree": "default"}, attention_backend="FLASHINFER")


@pytest.mark.parametrize(
    ("version", "expected"),
    [(3, ("dynamic", AttentionBackendEnum.FLASH_ATTN)), (2, ("chain", None))],
)
def test_trees_leave_attention_sinks_to_the_backend_that_vllm_takes_where_ours_has_none(
    version, expected, tmp_path, monkeypatch
):
    """By the version of FlashAttention that a GPU has."""
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda *args, **kwargs: version)
    monkeypatch.setattr(flash_attn, "is_flash_attn_varlen_func_available", lambda: True)
    supports_sinks = fa_utils.flash_attn_supports_sinks  # imported where there is FlashAttention
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", supports_sinks, raising=False)
    config = make({}, model=gpt_oss(tmp_path / "model", 16, [1.0] * 4), max_model_len=64)
    assert (settings_of(config).options.tree, config.attention_config.backend) == expected


@pytest.mark.skipif(not FEATURES.v2_hosts, reason="vLLM has no draft model there")
@pytest.mark.parametrize(
    ("options", "num_batched_tokens", "most_requests", "message"),
    [
        ({}, 480, 2, None),
        ({}, 240, 1, None),
        ({}, 239, 1, "got 239, expected at least the 240 rows"),
        ({}, 480, 3, "got 480, expected at least the 720 rows"),
        ({"window": 24}, 480, 2, "has 260 rows of a request, expected at most 257"),
    ],
)
def test_draft_forwards_that_do_not_fit_are_refused(
    options, num_batched_tokens, most_requests, message
):
    table = [(1, most_requests, 30), (most_requests + 1, 1 << 20, 0)]
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        make(PUBLISHED | options | {TABLE: table}, max_num_batched_tokens=num_batched_tokens)
