"""What the method makes of a configuration on CUDA; on any machine, since no engine starts."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.integration.engines import PUBLISHED, TARGET, TOKEN_RECYCLING
from vllm_recycle.integration import config as engine_config
from vllm_recycle.integration import platform
from vllm_recycle.integration.draft_limits import (
    MAX_TREE_ROWS,
    draft_forward_rows,
    halving_schedule,
    largest_drafting_batch,
)
from vllm_recycle.integration.options.ouroboros import SIZES, OuroborosOptions
from vllm_recycle.integration.versions import FEATURES

TABLE = "num_speculative_tokens_per_batch_size"


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch):
    a_gpu = SimpleNamespace(
        is_cuda=lambda: True,
        device_type="cuda",
        device_name="a GPU",
        is_device_capability_family=lambda family: False,
    )
    for module in (engine_config, platform):
        monkeypatch.setattr(module, "current_platform", a_gpu)
    for feature in ("v2_hosts", "v2_runs_trees"):
        monkeypatch.setattr(FEATURES, feature, True)


def make(config: dict = TOKEN_RECYCLING, **flags) -> EngineArgs:
    return engine_config.rewrite(EngineArgs(TARGET, speculative_config=config, **flags))


HEAD = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}
# As of Ouroboros: trees along a trunk.
ALONG_A_TRUNK = PUBLISHED | {"preset": None}


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
    method, host, num_nodes, chooses
):
    """Sizes are chosen by worth but where requests are isolated or the user says them."""
    made = make(method)
    assert made.worker_cls == "vllm_recycle.integration.cuda.worker.TreeGPUWorker"
    assert made.async_scheduling is None  # as vLLM likes
    spec = made.speculative_config
    assert (spec["method"], spec["num_speculative_tokens"]) == (host, num_nodes)
    assert spec.get("model") == {**method, **method.get("trunk", {})}.get("model")
    assert spec[TABLE]
    assert made.additional_config["vllm_recycle"]["chooses_sizes"] is chooses


@pytest.mark.parametrize("method", [TOKEN_RECYCLING | {"trunk": HEAD}, ALONG_A_TRUNK, PUBLISHED])
def test_what_model_runner_v2_lacks_is_refused(method, monkeypatch):
    monkeypatch.setattr(FEATURES, "v2_hosts", False)
    assert make(TOKEN_RECYCLING).speculative_config["method"] == "ngram_gpu"
    with pytest.raises(NotImplementedError, match=r"on a GPU before vLLM 0\.32"):
        make(method)
    monkeypatch.setattr(FEATURES, "v2_runs_trees", False)
    with pytest.raises(NotImplementedError, match=r"does not support a GPU before vLLM 0\.31"):
        make(TOKEN_RECYCLING)


@pytest.mark.parametrize("method", [TOKEN_RECYCLING, PUBLISHED])
def test_rows_have_no_price_of_the_user_s(method):
    with pytest.raises(NotImplementedError, match="expected none on a GPU"):
        make(method | {"row_cost": 0.1})


def test_a_schedule_comes_with_the_tree_and_that_of_the_user_wins():
    assert make().speculative_config[TABLE] == halving_schedule(63, MAX_TREE_ROWS)
    mine = [(1, 4, 16), (5, 1024, 0)]
    assert make(TOKEN_RECYCLING | {TABLE: mine}).speculative_config[TABLE] == mine


def test_the_largest_graph_is_vllm_s_so_that_it_adds_none_for_batches_of_trees():
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
    options = OuroborosOptions.parse({"model": "x", **given}, on_gpu=on_gpu)
    assert {key: getattr(options, key) for key in expected} == expected


def test_ouroboros_drafts_for_as_many_requests_as_its_forwards_have_rows_for():
    shape = OuroborosOptions.parse({"model": "x", "preset": "paper"}, on_gpu=True).shape()
    assert draft_forward_rows(shape) == 20 + 220
    small = {"window": 4, "guesses": 4, "phrase_length": 4, "branches": 1}
    for given, flags, trees in (
        ({}, {}, [(1, 2, 30)]),
        ({}, {"max_num_batched_tokens": 260}, [(1, 1, 30)]),
        # 17 + 20 rows a forward; and 16 a tree, of which fewer fit where there are as many as that.
        (small, {}, [(1, 13, 15)]),
        (small | {"window": 1, "guesses": 1}, {}, [(1, 16, 15), (17, 23, 7)]),
    ):
        table = make(PUBLISHED | given, **flags).speculative_config[TABLE]
        assert table == [*trees, (trees[-1][1] + 1, 1 << 20, 0)]
    mine = [(1, 4, 16), (5, 1024, 0)]
    assert make(PUBLISHED | {TABLE: mine}).speculative_config[TABLE] == mine


def test_the_largest_batch_with_drafts():
    table = [(1, 4, 16), (5, 8, 3), (9, 1024, 0)]
    assert [largest_drafting_batch(table, most) for most in (3, 6, 8, 256)] == [3, 6, 8, 8]
    assert largest_drafting_batch([(1, 1024, 0)], 8) == 0


def test_model_runner_v1_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(NotImplementedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        make()


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
