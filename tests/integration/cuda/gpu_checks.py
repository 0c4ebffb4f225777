"""What engines of Model Runner V2 are asked on a GPU, and how it is judged without luck.

In 16 bits near ties fall either way, and texts that part once stay apart. So an engine without
speculation judges each token behind the very text that it was given: how far a greedy token is from
the best one, and whether a seeded one is drawn again, since noise goes by seed and position. Of
trees it judges the logits of rows that were accepted or not. `test_gpu` does this on a GPU,
`test_runner` in the interpreter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams

from tests.integration.engines import runner

BEST = 4  # tokens of a row whose logprobs are compared
KNOWN = 20  # among so many of the judge's, as many as an engine gives


@dataclass(frozen=True)
class Answer:
    """Of a request: its prompt, parameters and adapter, and what came.

    Attributes:
        logprobs: of the tokens, empty where none were asked for.
    """

    prompt: list[int]
    params: dict[str, Any]
    adapter: Any
    token_ids: list[int]
    logprobs: list[float]
    text: str


def serve(
    llm: Any,
    requests: Sequence[tuple[list[int], dict[str, Any]]],
    *,
    steps_between: int = 0,
    adapters: Sequence[Any] = (None,),
) -> list[Answer]:
    """Answers to requests that come at once, or one by one with steps between them."""
    engine, answers = llm.llm_engine, {}
    waiting = deque(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(len(waiting), 1 if steps_between else len(waiting))):
            index, (prompt, params) = waiting.popleft()
            engine.add_request(
                str(index),
                {"prompt_token_ids": prompt},
                SamplingParams(**params),
                lora_request=adapters[index % len(adapters)],
            )
        for _ in range(max(1, steps_between)):
            answers |= {one.request_id: one.outputs[0] for one in engine.step() if one.finished}
    found = []
    for index, (prompt, params) in enumerate(requests):
        output = answers[str(index)]
        steps = zip(output.token_ids, output.logprobs or (), strict=False)
        logprobs = [step[token].logprob for token, step in steps]
        adapter = adapters[index % len(adapters)]
        tokens = list(output.token_ids)
        found.append(Answer(prompt, params, adapter, tokens, logprobs, output.text))
    return found


@dataclass(frozen=True)
class Row:
    """Of a tree: the text that ends with it, and its best tokens with their logprobs."""

    token_ids: list[int]
    best: dict[int, float]
    depth: int


def watch_rows(llm: Any, rows: list[Row], *, most: int, first_step: int = 4) -> None:
    """Keep rows of trees from now on, of all depths, the deepest of a tree first."""
    model_runner, steps = runner(llm), 0
    observe, states = model_runner.tree_drafter.observe, model_runner.req_states

    def watched(batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        nonlocal steps
        steps += batch.num_draft_tokens > 0
        if batch.num_draft_tokens and steps >= first_step and len(rows) < most:
            rows.extend(_rows_of(batch, row_token_ids.tolist(), logits)[: most - len(rows)])
        observe(batch, row_token_ids, logits)

    def _rows_of(batch: Any, tokens: list[int], logits: torch.Tensor) -> list[Row]:
        """Three of a step: of the tree of the first request, the deepest, and two between."""
        start, end = batch.cu_num_logits_np[:2].tolist()
        state = int(batch.idx_mapping_np[0])
        parents = model_runner.tree_drafter.trees.parents[state].tolist()
        text = states.all_token_ids.gpu[state, : int(states.total_len.gpu[state])].tolist()
        paths: list[list[int]] = [[]]
        for row in range(1, end - start):
            paths.append([*paths[parents[row]], tokens[start + row]])
        real = sorted(
            (row for row, path in enumerate(paths) if -1 not in path), key=lambda r: len(paths[r])
        )
        best = logits[start:end].float().log_softmax(-1).topk(BEST)
        return [
            Row(
                text + paths[row],
                dict(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)),
                len(paths[row]),
            )
            for row in {real[-1]: 0, real[len(real) // 2]: 0, real[len(real) // 4]: 0}
        ]

    model_runner.tree_drafter.observe = watched


@dataclass(frozen=True)
class Verdict:
    """How far answers are from what the judge would say behind the same texts.

    Attributes:
        gap: of all greedy tokens, the most that the best one's logprob is above theirs.
        logprob_error: the most that logprobs of tokens differ.
        drawn_again: the part of seeded tokens that is drawn again; 1 where there are none.
    """

    gap: float
    logprob_error: float
    drawn_again: float


def judge(llm: Any, answers: Sequence[Answer]) -> Verdict:
    """By an engine without speculation."""
    greedy = [one for one in answers if not one.params.get("temperature")]
    gaps, errors = [0.0], [0.0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for one, scored in zip(greedy, _generate(llm, greedy, params), strict=True):
        steps = scored.prompt_logprobs[len(one.prompt) :]
        for place, (token, step) in enumerate(zip(one.token_ids, steps, strict=True)):
            gaps.append(max(entry.logprob for entry in step.values()) - step[token].logprob)
            if one.logprobs:
                errors.append(abs(step[token].logprob - one.logprobs[place]))
    assert all(map(math.isfinite, gaps + errors))  # `max` may leave out what is not a number
    seeded = [one for one in answers if one.params.get("temperature")]
    again = []
    for one in seeded:
        places = range(len(one.token_ids))
        prefixes = [{"prompt_token_ids": one.prompt + one.token_ids[:at]} for at in places]
        params = SamplingParams(**{**one.params, "max_tokens": 1})
        drawn = llm.generate(prefixes, params, lora_request=one.adapter, use_tqdm=False)
        again += [
            found.outputs[0].token_ids[0] == token
            for found, token in zip(drawn, one.token_ids, strict=True)
        ]
    return Verdict(max(gaps), max(errors), sum(again) / len(again) if again else 1.0)


def _generate(llm: Any, answers: Sequence[Answer], params: SamplingParams) -> list[Any]:
    texts = [{"prompt_token_ids": one.prompt + one.token_ids} for one in answers]
    adapters = [one.adapter for one in answers]
    lora_request = adapters if any(adapters) else None
    return llm.generate(texts, params, lora_request=lora_request, use_tqdm=False) if texts else []


def judge_rows(llm: Any, rows: Sequence[Row]) -> float:
    """The most that logprobs of rows of trees differ from those behind a plain prefill."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=KNOWN, detokenize=False)
    texts = [{"prompt_token_ids": row.token_ids} for row in rows]
    errors = []
    for row, found in zip(rows, llm.generate(texts, params, use_tqdm=False), strict=True):
        (step,) = found.outputs[0].logprobs
        # A token that is not among the judge's best is at most as probable as the last of them.
        last = min(entry.logprob for entry in step.values())
        for token, logprob in row.best.items():
            errors.append(abs(logprob - (step[token].logprob if token in step else last)))
    return max(errors)
