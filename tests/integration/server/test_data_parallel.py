"""`vllm serve --data-parallel-size 2`, with adapters: two engines, each with a file of its own."""

from __future__ import annotations

import concurrent.futures
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.integration.engines import TARGET, engine
from tests.integration.models.adapters import write_adapter
from tests.integration.server.servers import MAX_TOKENS
from tests.integration.server.test_server import PROMPTS, MethodServer

# By adapter, as the client calls them; the first is the base model.
MODELS = ("target", "adapter")
LABELS = ('engine="0"', 'engine="1"')
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("adapters") / "one"
    return write_adapter(folder, TARGET, seed=1, has_head=True)


@pytest.fixture(scope="module")
def expected(adapter) -> dict[str, list[str]]:
    """By model, without speculation; the base first, see `test_lora`."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with engine(enable_lora=True) as llm:
        return {
            model: [result.outputs[0].text for result in llm.generate(
                PROMPTS, params, lora_request=lora_request, use_tqdm=False
            )]
            for model, lora_request in zip(
                MODELS, (None, LoRARequest("adapter", 1, adapter)), strict=True
            )
        }  # fmt: skip


@pytest.fixture(scope="module")
def server(adapter, tmp_path_factory) -> Iterator[MethodServer]:
    server = MethodServer(
        tmp_path_factory.mktemp("server"),
        "token_recycling",
        *("--data-parallel-size", "2", "--enable-lora", "--lora-modules", f"adapter={adapter}"),
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_SERVER_DEV_MODE="1",
    )
    try:
        server.wait_until_healthy()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def files_of_ranks(server: MethodServer) -> list[Path]:
    path = server.state_file
    return [path, path.with_name("state.dp1.safetensors")]


def test_both_ranks_answer_as_vllm_does_without_speculation(server, expected):
    requests = [(model, index) for model in MODELS for index in range(len(PROMPTS))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            answers = pool.map(lambda r: server.complete(PROMPTS[r[1]], model=r[0]), requests)
            texts = [answer.choices[0].text for answer in answers]
            assert texts == [expected[model][index] for model, index in requests]
    for label in LABELS:
        assert server.counter("request_success_total", label) > 0
        assert server.counter("spec_decode_num_accepted_tokens_total", label) > 0


def test_a_call_to_the_workers_reaches_both_ranks(server):
    body = json.dumps({"method": "save_draft_state"}).encode()
    request = urllib.request.Request(
        f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"}
    )
    results = json.load(urllib.request.urlopen(request, timeout=60))["results"]
    assert results == [str(server.state_file)]  # vLLM returns those of the first engine
    assert all(path.exists() for path in files_of_ranks(server))


def test_both_ranks_save_what_they_learnt_at_shutdown(server):
    """Last: it ends the server."""
    for path in files_of_ranks(server):
        path.unlink()
    # Who has learnt nothing since it was last written writes nothing.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(server.complete, PROMPTS))
    assert server.stop() == 0
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(p.exists() for p in files_of_ranks(server)):
        time.sleep(0.1)
    first, second = (load_file(path)["adjacency_matrix"] for path in files_of_ranks(server))
    assert not torch.equal(first, second), "each rank has learnt from its own requests"
