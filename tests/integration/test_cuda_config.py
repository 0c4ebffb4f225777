"""What the method makes of a configuration on CUDA; on any machine, since no engine starts."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from engines import TARGET, TOKEN_RECYCLING
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_recycle.integration import engine_config
from vllm_recycle.integration.row_budget import MAX_TREE_ROWS, halving_schedule


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch):
    platform = SimpleNamespace(is_cuda=lambda: True, device_type="cuda", device_name="a GPU")
    monkeypatch.setattr(engine_config, "current_platform", platform)


def rewrite(method: dict | None = None, **flags) -> EngineArgs:
    config = TOKEN_RECYCLING | (method or {})
    return engine_config.rewrite(EngineArgs(TARGET, speculative_config=config, **flags))


def test_the_host_method_and_our_classes():
    made = rewrite()
    assert made.worker_cls == "vllm_recycle.integration.gpu_worker.TreeGPUWorker"
    assert made.speculative_config["method"] == "ngram_gpu"
    assert made.async_scheduling is None  # as vLLM likes
    assert made.attention_config.backend is AttentionBackendEnum.FLASH_ATTN


def test_all_nodes_are_the_default():
    made = rewrite()
    assert made.speculative_config["num_speculative_tokens"] == 80
    assert made.additional_config["vllm_recycle"]["max_nodes"] == 80
    assert rewrite({"max_nodes": 7}).speculative_config["num_speculative_tokens"] == 7


def test_a_schedule_comes_with_the_tree_and_that_of_the_user_wins():
    key = "num_speculative_tokens_per_batch_size"
    assert rewrite().speculative_config[key] == halving_schedule(80, MAX_TREE_ROWS)
    mine = [(1, 4, 16), (5, 1024, 0)]
    assert rewrite({key: mine}).speculative_config[key] == mine


@pytest.mark.parametrize("name", ["attention_backend", "attention_config"])
def test_another_attention_backend_is_refused(name):
    def given(backend: str) -> dict:
        return {name: backend if name == "attention_backend" else {"backend": backend}}

    assert rewrite(**given("FLASH_ATTN")).attention_backend is None
    message = "--attention-backend: got FLASHINFER, expected none or FLASH_ATTN"
    with pytest.raises(NotImplementedError, match=message):
        rewrite(**given("FLASHINFER"))


def test_model_runner_v1_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(NotImplementedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        rewrite()


def test_lora_is_refused():
    with pytest.raises(NotImplementedError, match="--enable-lora"):
        rewrite(enable_lora=True)


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
