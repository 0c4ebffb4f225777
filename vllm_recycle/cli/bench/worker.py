"""A child process of the benchmark: one vLLM engine, asked over a connection, answering over it.

Each request and each reply is a dictionary; {"error": "..."} stands for a failure:

    {"op": "load", ...as `Worker`...}    -> what the engine runs with
    {"op": "run", ...as `Worker.run`...} -> one pass over prompts; with "stream" before it, for each
          step of each request, {"event": "text", "prompt": I, "text": "...", "tokens": N}

The engine is as vLLM lays it out, in processes of its own. Requests are fed to it by hand, which
gives exact counts: a step of a request is a decode step unless it is the one that ends its prompt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # of what a CPU does
Events = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(slots=True)
class PromptCounts:
    """What one prompt counts, over all its turns."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0  # decode steps
    draft_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0  # its share of the engine steps that it was in flight in


@dataclasses.dataclass(slots=True)
class Conversation:
    """A prompt under way: the turns to come, what was said, and the answer that is being made."""

    index: int
    turns: Iterator[str]
    counts: PromptCounts = dataclasses.field(default_factory=PromptCounts)
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    answer: list[int] = dataclasses.field(default_factory=list)  # token ids
    output: list[int] = dataclasses.field(default_factory=list)  # those of all answers before


@dataclasses.dataclass(slots=True)
class Pass:
    """One pass over the prompts: how requests are sampled, which run, and counts of its steps."""

    params: Any  # of vLLM
    stream: bool
    requests: dict[str, Conversation] = dataclasses.field(default_factory=dict)
    engine_steps: int = 0
    decode_ms: list[float] = dataclasses.field(default_factory=list)  # engine steps without prompts
    last_end: float = dataclasses.field(default_factory=time.perf_counter)  # of an engine step


class Worker:
    """One engine and the prompts that it runs; `events` is told of each step of a stream."""

    def __init__(
        self, engine: dict[str, Any], prompts: list[dict[str, Any]], chat: bool, *, events: Events
    ) -> None:
        from vllm import LLM

        self.llm = LLM(**engine)
        self.engine = self.llm.llm_engine
        if engine.get("speculative_config") and not self.engine.vllm_config.speculative_config:
            raise RuntimeError(
                "no C++ kernels, so that nothing is drafted: install the package g++"
            )
        self.prompts, self.chat = prompts, chat
        # In advance, so that what is too long is refused before anything is measured.
        turns = enumerate(prompt["turns"][0] for prompt in prompts)
        self.first_turns = [self._render([_user_message(turn)], index) for index, turn in turns]
        self.events = events
        self.method = (engine.get("speculative_config") or {}).get("method")
        self.request_ids = map(str, itertools.count())

    def describe(self) -> dict[str, Any]:
        """Versions and settings, as they are in this process."""
        import torch
        import transformers
        import vllm

        config, modules = self.engine.vllm_config, (vllm, torch, transformers)
        device = config.device_config.device_type
        return {
            "versions": {module.__name__: module.__version__ for module in modules},
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "compilation_mode": config.compilation_config.mode.name,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        }

    def run(
        self, *, start: int, stop: int, concurrency: int, stream: bool = False, **sampling: Any
    ) -> dict[str, Any]:
        """One pass over the prompts from `start` to `stop`, excluded, in file order.

        `sampling` are parameters of vLLM. Where it is not greedy, a prompt's seed is its number.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
        prompt_pass = Pass(params, stream)
        turns = enumerate((prompt["turns"] for prompt in self.prompts[start:stop]), start)
        conversations = [Conversation(index, iter(texts)) for index, texts in turns]
        old_counts, others_start = self._draft_counts(), others_cpu_seconds()
        start_time = prompt_pass.last_end = time.perf_counter()
        self._generate(conversations, concurrency, prompt_pass)
        wall_seconds = time.perf_counter() - start_time
        draft_counts = self._draft_counts()
        others_seconds = others_cpu_seconds() - others_start
        prompts = [dataclasses.asdict(conversation.counts) for conversation in conversations]
        sums = ("requests", "tokens", "steps", "draft_tokens", "accepted_tokens")
        return {
            "wall_s": wall_seconds,
            **{key: sum(prompt[key] for prompt in prompts) for key in sums},
            "engine_steps": prompt_pass.engine_steps,
            "step_ms": statistics.median(prompt_pass.decode_ms) if prompt_pass.decode_ms else None,
            **{name: count - old_counts[name] for name, count in draft_counts.items()},
            "others_cpu_share": max(0.0, others_seconds / (wall_seconds * (os.cpu_count() or 1))),
            "prompts": prompts,
            "outputs": [conversation.output for conversation in conversations],
        }

    def _generate(
        self, conversations: list[Conversation], concurrency: int, prompt_pass: Pass
    ) -> None:
        queue = iter(conversations)
        while True:
            for conversation in itertools.islice(queue, concurrency - len(prompt_pass.requests)):
                self._ask_next(conversation, prompt_pass)
            if not prompt_pass.requests:
                return
            for conversation in self._step(prompt_pass):
                self._ask_next(conversation, prompt_pass)

    def _ask_next(self, conversation: Conversation, prompt_pass: Pass) -> None:
        """Send the next turn of a conversation to the engine, if there is one."""
        index, turn = conversation.index, next(conversation.turns, None)
        if turn is None:
            return
        messages = [*conversation.messages, _user_message(turn)]
        engine_input = self._render(messages, index) if messages[1:] else self.first_turns[index]
        conversation.messages, request_id = messages, next(self.request_ids)
        params = self._params_of(index, prompt_pass.params)
        self.engine.add_request(request_id, engine_input, params, arrival_time=time.time())
        conversation.counts.requests += 1
        prompt_pass.requests[request_id] = conversation

    def _params_of(self, index: int, params: Any) -> Any:
        """The parameters of one prompt: with its seed, its schema and its hint."""
        from vllm.sampling_params import StructuredOutputsParams

        params = params.clone()
        if params.temperature:
            params.seed = index
        if hint := self.prompts[index]["hint"]:
            params.extra_args = {"hint": hint}
        if schema := self.prompts[index]["json_schema"]:
            params.structured_outputs = StructuredOutputsParams(json=schema)
        return params

    def _render(self, messages: list[dict[str, str]], index: int) -> Any:
        """What the engine takes for a conversation, or without a template for its only turn."""
        prompt: dict[str, Any] = {"prompt": messages[0]["content"]}
        if self.chat:
            token_ids = self.llm.get_tokenizer().apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            prompt = {"prompt_token_ids": token_ids}
        try:
            (engine_input,) = self.engine.renderer.render_cmpl([prompt])
        except ValueError as error:
            turn = (len(messages) + 1) // 2
            raise ValueError(f"prompt {index + 1}, turn {turn}: {error}") from error
        return engine_input

    def _step(self, prompt_pass: Pass) -> list[Conversation]:
        """One step of the engine; the conversations that it brought an answer to.

        The engine is at work while this process is, so that a step lasts from the results before to
        its own.
        """
        requests = prompt_pass.requests
        decode_only = all(conversation.answer for conversation in requests.values())
        results = self.engine.step()
        end = time.perf_counter()
        seconds, prompt_pass.last_end = end - prompt_pass.last_end, end
        for conversation in requests.values():
            conversation.counts.seconds += seconds / len(requests)
        prompt_pass.engine_steps += 1
        if decode_only and results:
            prompt_pass.decode_ms.append(1000 * seconds)
        answered_conversations = []
        for result in results:
            conversation, (output,) = requests[result.request_id], result.outputs
            conversation.counts.steps += bool(conversation.answer and output.token_ids)
            conversation.counts.tokens += len(output.token_ids)
            conversation.answer.extend(output.token_ids)
            if prompt_pass.stream:
                fields = {"prompt": conversation.index, "tokens": len(output.token_ids)}
                self.events({"event": "text", "text": output.text, **fields})
            if result.finished:
                self._finish(conversation, output.spec_decode_metrics)
                answered_conversations.append(requests.pop(result.request_id))
        return answered_conversations

    def _finish(self, conversation: Conversation, metrics: Any) -> None:
        """Count an answer, and put it into the conversation."""
        if self.method:
            accepted = sum(tokens * steps for tokens, steps in enumerate(metrics.histogram))
            conversation.counts.draft_tokens += metrics.num_draft_tokens
            conversation.counts.accepted_tokens += accepted
        if self.chat:
            answer = self.llm.get_tokenizer().decode(conversation.answer, skip_special_tokens=True)
            conversation.messages.append({"role": "assistant", "content": answer})
        conversation.output += conversation.answer
        conversation.answer = []

    def _draft_counts(self) -> dict[str, int]:
        """Draft forwards and rounds since the start, where we count them, of the first rank."""
        if self.method != "ouroboros":
            return {}
        statistics = self.llm.collective_rpc("draft_statistics")[0]
        return {f"draft_{name}": statistics[name] for name in ("rounds", "forwards")}


def _user_message(turn: str) -> dict[str, str]:
    return {"role": "user", "content": turn}


def others_cpu_seconds() -> float:
    """CPU time that processes which are not the engine's have used.

    One that ends meanwhile counts as another's, if it is not waited for.
    """
    cpu_times = psutil.cpu_times()
    cpu_seconds = sum(getattr(cpu_times, name, 0.0) for name in BUSY)
    own_process = psutil.Process()
    for process in (own_process, *own_process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_seconds -= sum(process.cpu_times()[:4])  # of user, system, and of ended children
    return cpu_seconds


def main(driver: Connection) -> None:
    """Answer requests until there are no more."""
    import vllm  # noqa: F401 - slow, and not worth waiting for the first request

    worker: Worker | None = None
    with contextlib.suppress(EOFError):
        while True:
            request = driver.recv()
            op = request.pop("op")
            try:
                if op == "load":
                    worker = Worker(**request, events=driver.send)
                    driver.send(worker.describe())
                else:
                    assert worker is not None
                    assert op == "run", op
                    driver.send(worker.run(**request))
            except Exception as error:  # reported to the driver, which ends this process
                traceback.print_exc()
                driver.send({"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]})


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
