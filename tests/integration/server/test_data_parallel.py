"""`vllm serve --data-parallel-size 2`, with adapters: two engines, each with a file of its own."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.integration.engines import TARGET, engine
from tests.integration.models.adapters import write_adapter
from tests.integration.server.servers import MAX_TOKENS, wait_until
from tests.integration.server.test_server import PROMPTS, MethodServer


@pytest.mark.slow
def test_two_ranks_answer_as_vllm_does_and_save_what_each_has_learnt(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", TARGET, seed=1, has_head=True)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    # By model, as the client calls them; the base first, see `test_lora`.
    models, expected = {"target": None, "adapter": LoRARequest("adapter", 1, adapter)}, []
    with engine(enable_lora=True) as llm:
        for of in models.values():
            results = llm.generate(PROMPTS, params, lora_request=of, use_tqdm=False)
            expected += [result.outputs[0].text for result in results]
    server = MethodServer(
        tmp_path,
        "token_recycling",
        *("--data-parallel-size", "2", "--enable-lora", "--lora-modules", f"adapter={adapter}"),
        forks=True,
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_SERVER_DEV_MODE="1",
    )
    files = [server.state_file, server.state_file.with_name("state.dp1.safetensors")]
    try:
        server.wait_until_healthy()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for _ in range(2):
                asked = product(models, PROMPTS)
                answers = pool.map(lambda pair: server.complete(pair[1], model=pair[0]), asked)
                assert [answer.choices[0].text for answer in answers] == expected
            for name in ("request_success", "spec_decode_num_accepted_tokens"):
                assert server.counter(f"{name}_total", 'engine="0"') > 0
                assert server.counter(f"{name}_total", 'engine="1"') > 0
            # A call to the workers reaches both; vLLM returns the result of the first engine.
            body = json.dumps({"method": "save_draft_state"}).encode()
            call = urllib.request.Request(
                f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"}
            )
            results = json.load(urllib.request.urlopen(call, timeout=60))["results"]
            assert results == [str(server.state_file)]
            for file in files:
                file.unlink()  # fails where it is not there
            # Who has learnt nothing since it was last written writes nothing.
            list(pool.map(server.complete, PROMPTS))
        assert server.stop() == 0
        wait_until(lambda: all(file.exists() for file in files))
    finally:
        server.kill()
    first, second = (load_file(file)["adjacency_matrix"] for file in files)
    assert not torch.equal(first, second), "each rank has learnt from its own requests"
