"""What the method makes of a configuration on CUDA, and what vLLM and we are configured with then.

On any machine, since no engine starts.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import fa_utils, flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.integration.engines import PUBLISHED, TARGET, TOKEN_RECYCLING, make_config
from tests.integration.models.random_models import gpt_oss
from vllm_recycle.integration.options import OuroborosOptions, limits, settings_of
from vllm_recycle.integration.options.base import TABLE
from vllm_recycle.integration.options.limits import halving_schedule
from vllm_recycle.integration.options.ouroboros import SIZES
from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.schedule.draft_sizes import sizes_of
from vllm_recycle.integration.start import config as engine_config
from vllm_recycle.integration.start import platform
from vllm_recycle.integration.start.versions import FEATURES

FLASH_ATTN = AttentionBackendEnum.FLASH_ATTN
MINE = [(1, 4, 16), (5, 1024, 0)]
HEAD = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}
# As of Ouroboros: trees along a trunk.
ALONG_A_TRUNK = PUBLISHED | {"preset": None}
# A draft model that two ranks can share.
METHODS = {"token_recycling": TOKEN_RECYCLING}
if FEATURES.v2_hosts:
    METHODS["ouroboros"] = PUBLISHED | {"model": TARGET}
    METHODS["trunk"] = ALONG_A_TRUNK | {"model": TARGET}


def make(config: dict = TOKEN_RECYCLING, **flags) -> EngineArgs:
    return engine_config.rewrite(EngineArgs(TARGET, speculative_config=config, **flags))


@pytest.mark.usefixtures("_on_cuda")
class TestRewrite:
    """What vLLM is given to read."""

    @pytest.fixture
    def _on_cuda(self, monkeypatch):
        a_gpu = SimpleNamespace(is_cuda=lambda: True, device_type="cuda", device_name="a GPU")
        a_gpu.is_device_capability_family = lambda family: False
        for module in (engine_config, platform):
            monkeypatch.setattr(module, "current_platform", a_gpu)
        for feature in ("v2_hosts", "v2_runs_trees"):
            monkeypatch.setattr(FEATURES, feature, True)

    @pytest.mark.parametrize(
        ("method", "host", "num_nodes", "chooses"),
        [
            (TOKEN_RECYCLING, "ngram_gpu", 63, True),  # whole tiles, with the root
            (TOKEN_RECYCLING | {"tree": "default"}, "ngram_gpu", 80, True),
            (TOKEN_RECYCLING | {"max_nodes": 7}, "ngram_gpu", 7, True),
            (TOKEN_RECYCLING | {"scope": "isolated"}, "ngram_gpu", 63, False),
            (TOKEN_RECYCLING | {"preset": "paper"}, "ngram_gpu", 80, False),
            (TOKEN_RECYCLING | {TABLE: [(1, 1024, 8)]}, "ngram_gpu", 63, False),
            (TOKEN_RECYCLING | {"trunk": HEAD}, "eagle3", 63, True),
            (ALONG_A_TRUNK, "draft_model", 63, True),
            (ALONG_A_TRUNK | {"scope": "isolated"}, "draft_model", 63, False),
            (PUBLISHED, "draft_model", 12 + 3 * 6, False),
        ],
    )
    def test_the_host_method_drafts_as_many_tokens_as_a_tree_has_nodes(
        self, method, host, num_nodes, chooses
    ):
        """Sizes are chosen by worth but where requests are isolated or the user says them."""
        made = make(method)
        assert made.worker_cls == "vllm_recycle.integration.cuda.worker.TreeGPUWorker"
        assert made.async_scheduling is None  # as vLLM likes
        spec = made.speculative_config
        assert (spec["method"], spec["num_speculative_tokens"]) == (host, num_nodes)
        assert spec.get("model") == {**method, **method.get("trunk", {})}.get("model")
        # A schedule comes with the tree; that of the user wins.
        expected = method.get(TABLE, halving_schedule(num_nodes, limits.MAX_TREE_ROWS))
        assert spec[TABLE] == ([(1, 2, 30), (3, 1 << 20, 0)] if method is PUBLISHED else expected)
        assert made.additional_config["vllm_recycle"]["chooses_sizes"] is chooses

    @pytest.mark.parametrize(("ranks", "chooses"), [(1, True), (2, False)])
    def test_sizes_go_by_no_clock_where_each_rank_has_a_scheduler(self, ranks, chooses):
        launcher = {"distributed_executor_backend": "external_launcher"}
        made = make(TOKEN_RECYCLING, tensor_parallel_size=ranks, **launcher)
        assert made.additional_config["vllm_recycle"]["chooses_sizes"] is chooses
        made = make(TOKEN_RECYCLING, tensor_parallel_size=ranks)
        assert made.additional_config["vllm_recycle"]["chooses_sizes"] is True

    @pytest.mark.parametrize(
        "method", [TOKEN_RECYCLING | {"trunk": HEAD}, ALONG_A_TRUNK, PUBLISHED]
    )
    def test_what_model_runner_v2_lacks_is_refused(self, method, monkeypatch):
        monkeypatch.setattr(FEATURES, "v2_hosts", False)
        assert make(TOKEN_RECYCLING).speculative_config["method"] == "ngram_gpu"
        with pytest.raises(NotImplementedError, match=r"on a GPU before vLLM 0\.32"):
            make(method)
        monkeypatch.setattr(FEATURES, "v2_runs_trees", False)
        with pytest.raises(NotImplementedError, match=r"does not support a GPU before vLLM 0\.31"):
            make(TOKEN_RECYCLING)

    def test_a_price_of_the_user_s_and_model_runner_v1_are_refused(self, monkeypatch):
        for method in (TOKEN_RECYCLING, PUBLISHED):
            with pytest.raises(NotImplementedError, match="expected none on a GPU"):
                make(method | {"row_cost": 0.1})
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        with pytest.raises(NotImplementedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            make()

    def test_the_largest_graph_is_vllm_s_so_that_it_adds_none_for_batches_of_trees(self):
        assert make().max_cudagraph_capture_size == 512
        assert make(max_num_seqs=2).max_cudagraph_capture_size == 256  # 2 x 2 x 64
        # What the user has said stays.
        assert make(max_cudagraph_capture_size=1000).max_cudagraph_capture_size == 1000
        for given in ({"cudagraph_capture_sizes": [8]}, {"max_cudagraph_capture_size": 64}):
            made = make(compilation_config=given)
            assert made.max_cudagraph_capture_size is None
            assert [getattr(made.compilation_config, name) for name in given] == [*given.values()]
        made = make(cudagraph_capture_sizes=[8])
        assert (made.max_cudagraph_capture_size, made.cudagraph_capture_sizes) == (None, [8])

    def test_ouroboros_drafts_for_as_many_requests_as_its_forwards_have_rows_for(self):
        options = OuroborosOptions.parse(PUBLISHED, on_gpu=True)
        assert options.max_draft_rows([(1, 1, 30)], 1, on_gpu=True) == 20 + 220
        small = {"window": 4, "guesses": 4, "phrase_length": 4, "branches": 1}
        for given, flags, trees in (
            ({}, {"max_num_batched_tokens": 260}, [(1, 1, 30)]),
            # 17 + 20 rows a forward; and 16 a tree, of which fewer fit where there are as many.
            (small, {}, [(1, 13, 15)]),
            (small | {"window": 1, "guesses": 1}, {}, [(1, 16, 15), (17, 23, 7)]),
        ):
            table = make(PUBLISHED | given, **flags).speculative_config[TABLE]
            assert table == [*trees, (trees[-1][1] + 1, 1 << 20, 0)]


@pytest.mark.parametrize(
    ("given", "on_gpu", "expected"),
    [
        ({}, True, SIZES | {"max_forwards": 4}),
        ({}, False, SIZES | {"max_forwards": 12}),
        ({"window": None, "max_forwards": None}, False, SIZES | {"max_forwards": 12}),
        ({"gamma": 1}, True, SIZES | {"gamma": 1, "max_forwards": 1}),
        ({"max_forwards": 14}, True, SIZES | {"gamma": 14, "max_forwards": 14}),
    ],
)
def test_sizes_that_are_not_given_are_the_paper_s_and_fit_the_others(given, on_gpu, expected):
    options = OuroborosOptions.parse(PUBLISHED | given, on_gpu=on_gpu)
    assert {key: getattr(options, key) for key in expected} == expected


def test_the_largest_batch_with_drafts():
    largest, table = limits.largest_drafting_batch, [(1, 4, 16), (5, 8, 3), (9, 1024, 0)]
    assert [largest(table, most) for most in (3, 6, 8, 256)] == [3, 6, 8, 8]
    assert largest([(1, 1024, 0)], 8) == 0


@pytest.mark.parametrize("num_nodes", [1, 2, 15, 80, 255])
@pytest.mark.parametrize("max_rows", [2, 64, 256])
def test_the_schedule_fits_its_rows_and_has_no_gap(num_nodes, max_rows):
    schedule = halving_schedule(num_nodes, max_rows)
    assert schedule[0][0] == 1
    assert schedule[-1][1:] == (1 << 20, 0)
    for (_, last, nodes), (first, _, fewer) in pairwise(schedule):
        assert first == last + 1
        assert fewer < nodes <= num_nodes
        # The largest batch that has room for so many nodes a request.
        assert last * (nodes + 1) <= max_rows < first * (nodes + 1)
    if num_nodes < max_rows:
        assert schedule[0][2] == num_nodes


def finish(method: dict[str, Any], **flags: Any) -> Any:
    return make_config(method, **{"enforce_eager": False} | flags)


@pytest.mark.skipif(not FEATURES.v2_runs_trees, reason="vLLM has no trees on Model Runner V2")
@pytest.mark.usefixtures("_on_v2")
class TestFinish:
    """What vLLM has read, with Model Runner V2."""

    @pytest.fixture
    def _on_v2(self, monkeypatch):
        """What a GPU has is what this machine has."""
        register()
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True, raising=False)
        monkeypatch.setitem(platform.PLATFORMS, "cpu", platform.PLATFORMS["cuda"])

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
    def test_vllm_has_the_table_that_we_have_and_there_are_sizes(self, method, flags, keys):
        config = finish(METHODS[method] | keys, **flags)
        table = settings_of(config).table
        assert config.speculative_config.num_speculative_tokens_per_batch_size == table
        assert sizes_of(config)[1]
        assert not keys or table == MINE

    @pytest.mark.parametrize(
        ("given", "num_nodes"),
        [({}, 4), ({"max_nodes": 24}, 24), ({"num_speculative_tokens": 63}, 24)],
    )
    @pytest.mark.parametrize("tree", ["dynamic", "chain"])
    def test_drafts_of_one_length_have_the_nodes_that_the_user_says(self, tree, given, num_nodes):
        """Those of ranks that run each forward together; 24 is the longest chain."""
        given = {key: min(value, 24) if tree == "chain" else value for key, value in given.items()}
        config = finish(
            given | {"tree": tree}, data_parallel_size=2, hf_overrides={"num_local_experts": 4}
        )
        settings = settings_of(config)
        assert (settings.options.tree, settings.options.num_nodes) == ("chain", num_nodes)
        assert (settings.table, settings.chooses_sizes) == (
            [(1, limits.UNLIMITED, num_nodes)],
            False,
        )
        assert config.speculative_config.num_speculative_tokens == num_nodes

    @pytest.mark.parametrize(
        ("tree", "given", "expected"),
        [
            ("dynamic", None, ("dynamic", FLASH_ATTN)),
            ("default", "FLASH_ATTN", ("default", FLASH_ATTN)),
            ("dynamic", "FLASHINFER", ("chain", AttentionBackendEnum.FLASHINFER)),
            ("chain", None, ("chain", None)),
        ],
    )
    def test_trees_have_their_attention_backend_and_chains_go_with_any(self, tree, given, expected):
        config = finish({"tree": tree}, attention_backend=given)
        options = settings_of(config).options
        assert (options.tree, config.attention_config.backend) == expected
        assert config.speculative_config.num_speculative_tokens == options.num_nodes
        # But a template goes with no other.
        with pytest.raises(NotImplementedError, match="support --attention-backend FLASHINFER"):
            finish({"tree": "default"}, attention_backend="FLASHINFER")

    @pytest.mark.parametrize(
        ("flags", "is_same"),
        [({}, True), ({"max_num_batched_tokens": 300}, False)],
        ids=["", "fewer tokens than the largest graph has"],
    )
    def test_with_lora_memory_is_measured_by_steps_as_large_as_without(self, flags, is_same):
        plain, lora = (finish({}, enable_lora=on, **flags) for on in (False, True))
        graphs = lora.compilation_config.max_cudagraph_capture_size or 0
        assert graphs <= lora.scheduler_config.max_num_batched_tokens
        assert (lora.scheduler_config == plain.scheduler_config) == is_same
        ranges = [c.compilation_config.compile_ranges_endpoints for c in (plain, lora)]
        assert (ranges[0] == ranges[1]) == is_same

    def test_trees_leave_attention_sinks_to_the_backend_that_vllm_takes_where_ours_has_none(
        self, tmp_path, monkeypatch
    ):
        """By the version of FlashAttention that a GPU has."""
        monkeypatch.setattr(flash_attn, "is_flash_attn_varlen_func_available", lambda: True)
        supports_sinks = fa_utils.flash_attn_supports_sinks  # imported where it is installed
        monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", supports_sinks, raising=False)
        model = gpt_oss(tmp_path / "model", 16, [1.0] * 4)
        for version, expected in ((3, ("dynamic", FLASH_ATTN)), (2, ("chain", None))):
            monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda *_, v=version, **__: v)
            config = finish({}, model=model, max_model_len=64)
            found = settings_of(config).options.tree, config.attention_config.backend
            assert found == expected

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
        self, options, num_batched_tokens, most_requests, message
    ):
        given = (
            PUBLISHED | options | {TABLE: [(1, most_requests, 30), (most_requests + 1, 1 << 20, 0)]}
        )
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            finish(given, max_num_batched_tokens=num_batched_tokens)
