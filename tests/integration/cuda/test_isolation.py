"""Under `isolated` nothing of a request's drafts tells what its neighbour says, on Model Runner V2.

As in `test_isolation`: a request decodes beside one that repeats itself, whose drafts are long and
accepted, and beside one that does not; their lengths are the same.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import TARGET, core, engine, runner
from v2_engines import GREEDY, LLM_ARGUMENTS, TEXT, with_sizes
from vllm import SamplingParams

pytestmark = pytest.mark.slow

PHRASE_LENGTH = 20
ENDLESS = {**GREEDY, "max_tokens": 150}
PROBE = ((0, 75), {**GREEDY, "max_tokens": 12})
# Few KV blocks, so that a draft must end with its request's last one.
ARGUMENTS = {**LLM_ARGUMENTS, "model": TARGET, "max_model_len": 192}
ARGUMENTS |= {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 8}
GROWN = {"method": "token_recycling", "max_nodes": 6, "context_mib": 1}
SCOPES = {
    "isolated": {**GROWN, "scope": "isolated"},
    "sequence": with_sizes(GROWN, [(1, 4, 6)]),  # whose trees have the same sizes
}


def test_what_is_drafted_and_accepted_says_nothing_of_the_neighbour(result):
    repeats, differs = result["isolated"]
    assert sum(repeats["probe"]["nodes"]) > 0
    assert sum(repeats["probe"]["accepted tokens"]) > 0
    assert repeats["probe"] == differs["probe"]
    # Of which there was something to say.
    assert repeats["accepted by the other"] > differs["accepted by the other"]


def test_without_isolation_it_does(result):
    repeats, differs = result["sequence"]
    assert repeats["probe"] != differs["probe"]


class Watch:
    """In the process with the engines: what is drafted, verified and accepted, step by step."""

    def __init__(self, llm: Any) -> None:
        self.scheduler, self.speculator = core(llm).scheduler, runner(llm).speculator
        self.schedule, self.scheduler.schedule = self.scheduler.schedule, self.watched_schedule
        self.update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self.watched_update
        self.propose, self.speculator.propose = self.speculator.propose, self.watched_propose
        self.clear()

    def clear(self) -> None:
        self.drafts: list[list[int]] = []
        self.nodes: list[int] = []
        self.accepted: list[int] = []
        self.accepted_by_the_other = 0

    def found(self) -> dict[str, Any]:
        probe = {"drafts": self.drafts, "nodes": self.nodes, "accepted tokens": self.accepted}
        return {"probe": probe, "accepted by the other": self.accepted_by_the_other}

    def watched_schedule(self, *args: Any) -> Any:
        step = self.schedule(*args)
        assert not step.preempted_req_ids
        for name in filter(is_probe, step.num_scheduled_tokens):
            assert len(step.num_scheduled_tokens) == 2
            self.nodes.append(len(step.scheduled_spec_decode_tokens.get(name, ())))
        return step

    def watched_update(self, step: Any, output: Any) -> Any:
        for name in step.scheduled_spec_decode_tokens:
            accepted = len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
            if is_probe(name):
                self.accepted.append(accepted)
            else:
                self.accepted_by_the_other += accepted
        return self.update(step, output)

    def watched_propose(self, input_batch: Any, *args: Any, **given: Any) -> Any:
        drafts = self.propose(input_batch, *args, **given)
        for name, draft in zip(input_batch.req_ids, drafts.tolist(), strict=True):
            if is_probe(name):
                self.drafts.append(draft)
        return drafts


def is_probe(name: str) -> bool:
    return name.startswith("probe")


def beside(llm: Any, watch: Watch, token_ids: list[int]) -> dict[str, Any]:
    """In the process with the engines: a request's steps, beside one of this prompt."""
    requests, (at, params) = llm.llm_engine, PROBE
    other = {"prompt_token_ids": token_ids}
    requests.add_request("other", other, SamplingParams(**ENDLESS))
    while not requests.step():
        pass
    watch.clear()
    probe = {"prompt_token_ids": llm.get_tokenizer().encode(TEXT)[slice(*at)]}
    requests.add_request("probe", probe, SamplingParams(**params))
    while not any(is_probe(out.request_id) and out.finished for out in requests.step()):
        pass
    found = watch.found()
    requests.abort_request(["other"])
    while requests.has_unfinished_requests():
        requests.step()
    return found


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines."""
    choose, result = random.Random(0), {}
    for scope, method in SCOPES.items():
        result[scope] = []
        for repeats in (True, False):
            with engine(method, **ARGUMENTS) as llm:
                phrase = llm.get_tokenizer().encode(TEXT)[:PHRASE_LENGTH]
                mixed = [choose.randrange(3, 4096) for _ in range(2 * PHRASE_LENGTH)]
                token_ids = 2 * phrase if repeats else mixed
                result[scope].append(beside(llm, Watch(llm), token_ids))
    return result
