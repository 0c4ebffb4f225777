"""What the method makes of a configuration on CUDA; on any machine, since no engine starts."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from engines import PUBLISHED, TARGET, TOKEN_RECYCLING
from vllm.engine.arg_utils import EngineArgs

from vllm_recycle.integration import config as engine_config
from vllm_recycle.integration import platform, refusals
from vllm_recycle.integration.draft_limits import (
    MAX_TREE_ROWS,
    draft_forward_rows,
    halving_schedule,
    largest_drafting_batch,
)
from vllm_recycle.integration.options import Settings
from vllm_recycle.integration.options.ouroboros import SIZES, OuroborosOptions
from vllm_recycle.integration.platform import PLATFORMS
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


def rewrite(method: dict | None = None, **flags) -> EngineArgs:
    config = TOKEN_RECYCLING | (method or {})
    return make(config, **flags)


def make(config: dict, **flags) -> EngineArgs:
    return engine_config.rewrite(EngineArgs(TARGET, speculative_config=config, **flags))


HEAD = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("method", "host", "nodes"),
    [
        (TOKEN_RECYCLING, "ngram_gpu", 63),  # whole tiles, with the root
        (TOKEN_RECYCLING | {"tree": "default"}, "ngram_gpu", 80),
        (TOKEN_RECYCLING | {"max_nodes": 7}, "ngram_gpu", 7),
        (TOKEN_RECYCLING | {"trunk": HEAD}, "eagle3", 63),
        (PUBLISHED | {"preset": None}, "draft_model", 63),
        (PUBLISHED, "draft_model", 12 + 3 * 6),
    ],
)
def test_the_host_method_drafts_as_many_tokens_as_a_tree_has_nodes(method, host, nodes):
    made = make(method)
    assert made.worker_cls == "vllm_recycle.integration.cuda.worker.TreeGPUWorker"
    assert made.async_scheduling is None  # as vLLM likes
    assert made.speculative_config["method"] == host
    assert made.speculative_config["num_speculative_tokens"] == nodes
    assert made.speculative_config.get("model") == {**method, **method.get("trunk", {})}.get(
        "model"
    )


@pytest.mark.parametrize(
    "method", [TOKEN_RECYCLING | {"trunk": HEAD}, PUBLISHED | {"preset": None}, PUBLISHED]
)
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
    assert rewrite().speculative_config[TABLE] == halving_schedule(63, MAX_TREE_ROWS)
    mine = [(1, 4, 16), (5, 1024, 0)]
    assert rewrite({TABLE: mine}).speculative_config[TABLE] == mine


@pytest.mark.parametrize(
    ("method", "chooses"),
    [
        (TOKEN_RECYCLING, True),
        (TOKEN_RECYCLING | {"tree": "default"}, True),
        (TOKEN_RECYCLING | {"scope": "isolated"}, False),
        (TOKEN_RECYCLING | {"preset": "paper"}, False),
        (TOKEN_RECYCLING | {TABLE: [(1, 1024, 8)]}, False),
        (PUBLISHED, False),
        (PUBLISHED | {"preset": None}, True),
        (PUBLISHED | {"preset": None, "scope": "isolated"}, False),
    ],
)
def test_sizes_are_chosen_by_worth_but_where_requests_are_isolated_or_the_user_says_them(
    method, chooses
):
    made = make(method)
    assert made.additional_config["vllm_recycle"]["chooses_sizes"] is chooses
    assert made.speculative_config[TABLE]


def test_the_largest_graph_is_vllm_s_so_that_it_adds_none_for_batches_of_trees():
    assert rewrite().max_cudagraph_capture_size == 512
    assert rewrite(max_num_seqs=2).max_cudagraph_capture_size == 256  # 2 x 2 x 64
    # What the user has said stays.
    assert rewrite(max_cudagraph_capture_size=1000).max_cudagraph_capture_size == 1000
    for given in ({"cudagraph_capture_sizes": [8]}, {"max_cudagraph_capture_size": 64}):
        made = rewrite(compilation_config=given)
        assert made.max_cudagraph_capture_size is None
        assert [getattr(made.compilation_config, name) for name in given] == [*given.values()]
    made = rewrite(cudagraph_capture_sizes=[8])
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


def check_draft_model(*, max_num_batched_tokens: int = 480, last: int = 2, **given) -> None:
    """What is refused when vLLM's configuration is known; so many requests have drafts at most."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2048),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=256
        ),
        speculative_config=SimpleNamespace(
            draft_model_config=EngineArgs(PUBLISHED["model"]).create_model_config(),
        ),
    )
    options = OuroborosOptions.parse({"model": "x", **given}, on_gpu=True)
    table = [(1, last, 30), (last + 1, 1 << 20, 0)]
    settings = Settings(options=options, chooses_sizes=False, table=table)
    config.additional_config = settings.put({})
    refusals.check_draft_model(config, options, PLATFORMS["cuda"])


def test_draft_forwards_that_do_not_fit_are_refused():
    check_draft_model()
    check_draft_model(max_num_batched_tokens=240, last=1)
    with pytest.raises(ValueError, match="got 239, expected at least the 240 rows"):
        check_draft_model(max_num_batched_tokens=239, last=1)
    with pytest.raises(ValueError, match="got 480, expected at least the 720 rows"):
        check_draft_model(last=3)
    with pytest.raises(ValueError, match="has 260 rows of a request, expected at most 257"):
        check_draft_model(window=24)


def test_model_runner_v1_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(NotImplementedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        rewrite()


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
