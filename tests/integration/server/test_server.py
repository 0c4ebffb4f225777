"""What users do with a server, and find at it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
from vllm import SamplingParams

from tests.integration.engines import EXAMPLES, SMALL_OUROBOROS, TARGET, engine, read_prompts
from tests.integration.server.servers import MAX_TOKENS, VLLM, Server, wait_until

PROMPTS = read_prompts(8)
# Of each method: its options, the option that names its file, and what its start-up line says.
METHODS = {
    "token_recycling": (
        {"method": "token_recycling", "tree": "paper-80", "row_cost": 0},
        "matrix_file",
        "token_recycling: tree paper-80, 80 nodes, depth 6, a row's cost 0 of a step, k 8",
    ),
    "ouroboros": (SMALL_OUROBOROS, "pool_file", "gamma 5, window 4, guesses 3, phrase length 4"),
}
GREEDY = {"model": "target", "max_tokens": MAX_TOKENS, "temperature": 0}


class MethodServer(Server):
    """Serves with a method, and writes what it learnt to a file."""

    def __init__(
        self, folder: Path, method: str, *flags: str, forks: bool, **environment: str
    ) -> None:
        options, file_option, self.start_up_line = METHODS[method]
        self.state_file = folder / "state.safetensors"
        self.options = options = {**options, file_option: str(self.state_file)}
        super().__init__(
            folder / "server.log",
            *("--speculative-config", json.dumps(options), "--shutdown-timeout", "20"),
            *("--per-request-spec-decode-metrics", "detailed"),
            *flags,
            forks=forks,
            environment=environment,
        )


@pytest.fixture(
    scope="module",
    params=["token_recycling", pytest.param("ouroboros", marks=pytest.mark.slow)],
)
def server(request, tmp_path_factory):
    """With the first method as vLLM starts it."""
    folder, forks = tmp_path_factory.mktemp("server"), request.param != "token_recycling"
    server = MethodServer(folder, request.param, forks=forks, VLLM_SERVER_DEV_MODE="1")
    try:
        server.wait_until_healthy()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with engine() as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        results = llm.generate(PROMPTS, params, use_tqdm=False)
        return [result.outputs[0].text for result in results]


def test_start_up_says_what_is_on(server):
    assert server.start_up_line in server.log.read_text()


def test_completions_streams_and_chats_are_those_of_vllm(server, expected):
    assert [server.complete(prompt).choices[0].text for prompt in PROMPTS] == expected
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = [answer.choices[0].text for answer in pool.map(server.complete, PROMPTS)]
    assert texts == expected
    stream = server.complete(PROMPTS[0], stream=True)
    parts = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(parts) > 1
    assert "".join(parts) == expected[0]
    question = "Tom has 3 apples and buys 4. How many has he?"
    answer = server.client.chat.completions.create(
        messages=[{"role": "user", "content": question}], **GREEDY
    )
    plain = server.complete(f"Question: {question}\nAnswer:")
    assert answer.choices[0].message.content == plain.choices[0].text


def test_sampling_parameters_that_vllm_refuses_under_speculation(server):
    server.complete(PROMPTS[0], temperature=1, extra_body={"min_p": 0.1})
    biased = server.complete(PROMPTS[0], logit_bias={"300": 100}, max_tokens=2)
    assert biased.choices[0].text


def test_aborting_in_mid_stream_leaves_nothing_running(server, expected):
    stream = server.complete(
        PROMPTS[1], max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_idle()
    assert server.complete(PROMPTS[0]).choices[0].text == expected[0]


def test_metrics_are_what_the_dashboard_and_the_alerts_ask_for(server):
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    drafts, nodes, accepted = (server.counter(f"spec_decode_{name}") for name in names)
    assert 0 < drafts <= nodes <= 80 * drafts
    assert 0 < accepted <= 6 * drafts
    there = {re.split("[{ ]", line)[0] for line in server.metrics()}
    for file, count in (("grafana.json", 12), ("alerts.yaml", 5)):
        asked = set(re.findall(r"vllm:\w+", (EXAMPLES / file).read_text()))
        assert len(asked) >= count
        assert asked <= there


@pytest.mark.parametrize("stop", [None, " the"])
def test_metrics_of_a_request(server, stop):
    before = server.counter("generation_tokens_total")
    answer = server.complete(PROMPTS[0], stop=stop)
    assert server.counter("generation_tokens_total") - before == answer.usage.completion_tokens
    found = answer.model_extra["metrics"]["speculative_decoding"]
    drafted, accepted = found["per_step_drafted"], found["per_step_accepted"]
    assert found["num_draft_tokens"] == sum(drafted) > 0
    assert found["num_accepted_draft_tokens"] == sum(accepted) > 0
    assert found["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)
    # Behind a stop string nothing is received.
    assert stop or sum(accepted) < answer.usage.completion_tokens
    assert all(0 <= a <= d <= 80 for a, d in zip(accepted, drafted, strict=True))


def test_bad_input_is_a_4xx(server):
    ours = ({"speculate": "perhaps"}, {"hint": ["a text", 5]}, {"owner": 1.5})
    of_ours = [{"extra_body": {"vllm_xargs": bad}} for bad in ours]
    for bad in ({"max_tokens": -1}, {"temperature": -2}, *of_ours):
        with pytest.raises(openai.BadRequestError):
            server.complete(PROMPTS[0], **bad)


def test_a_request_can_opt_out(server, expected):
    before = server.counter("spec_decode_num_draft_tokens_total")
    answer = server.complete(PROMPTS[0], extra_body={"vllm_xargs": {"speculate": False}})
    assert answer.choices[0].text == expected[0]
    assert server.counter("spec_decode_num_draft_tokens_total") == before


def test_hints_and_learnt_texts(server, expected):
    drafts = server.options["method"] == "token_recycling"
    refused = (
        contextlib.nullcontext()
        if drafts
        else pytest.raises((openai.BadRequestError, urllib.error.HTTPError))
    )
    hint = {"extra_body": {"vllm_xargs": {"hint": expected[0]}}}
    body = {"method": "learn_texts", "args": [["One text.", [5, 6, 7]]]}
    call = urllib.request.Request(f"{server.url}/collective_rpc", json.dumps(body).encode())
    with refused:
        assert server.complete(PROMPTS[0], **hint).choices[0].text == expected[0]
    with refused:
        (learnt,) = json.loads(urllib.request.urlopen(call).read())["results"]
        assert int(learnt) > 3
    is_refused = pytest.raises(openai.BadRequestError, match="'prediction' is")
    question = {"model": "target", "messages": [{"role": "user", "content": "How many?"}]}
    prediction = {"prediction": {"type": "content", "content": 5}}
    with is_refused if drafts else contextlib.nullcontext():
        server.client.chat.completions.create(**question, extra_body=prediction)
    assert server.complete(PROMPTS[0]).choices[0].text == expected[0]


def test_shuts_down_cleanly_and_saves_what_it_learnt(server):
    """Last: it ends the server."""
    assert server.stop() == 0
    # The worker process, which has it, may outlive the command a little.
    wait_until(server.state_file.exists)


def test_bad_options_end_the_command_with_one_clear_error():
    options = '{"method": "token_recycling", "branches": 3}'
    command = [VLLM, "serve", TARGET, "--speculative-config", options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    said = "unknown key 'branches', expected any of ['method', 'preset', 'k'"
    assert said in result.stdout + result.stderr
