"""Model Runner V2 with trees gives what V2 gives without, token for token.

And what judges the engines of a GPU, `gpu_checks`, sees what is right and what is wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from tests.integration.cuda import gpu_checks
from tests.integration.cuda.v2_engines import (
    BLOCK_SIZE,
    GREEDY,
    GROWN,
    LLM_ARGUMENTS,
    SCHEDULE,
    SEEDED,
    TEXT,
    TREE,
    Waits,
    generate,
    watch_moves,
    with_sizes,
)
from tests.integration.cuda.v2_worker import TreeV2Runner
from tests.integration.engines import core, counter, engine, runner
from vllm_recycle.integration.cuda import runner as v2_runner
from vllm_recycle.integration.cuda import sampling, token_recycling

CLASSES = ("greedy", "sampled")  # in the order of the counts

pytestmark = [pytest.mark.slow, pytest.mark.versions]

# Batches of requests: which tokens of TEXT are the prompt, and the sampling parameters.
MIXED = [
    ((0, 16), GREEDY),
    ((0, BLOCK_SIZE + 1), SEEDED),
    # Its prompt takes several steps, while the others decode, and it ends with the context.
    ((0, 100), {**GREEDY, "max_tokens": 12, "prompt_logprobs": 0}),
    ((0, BLOCK_SIZE + 8), {**SEEDED, "seed": 8, "min_p": 0.02, "logit_bias": {14: 2.0}}),
]
# Of several tokens, which greedy texts have.
BAD_WORDS = ["him to the", "to a first", "first day"]
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1}
# Requests that look back on their own output, and one that does without the first bad words.
LOOKING_BACK = [
    ((0, 24), {**GREEDY, "logprob_token_ids": [14, 15]}),
    ((0, 40), {**GREEDY, **PENALTIES, "max_tokens": 16}),
    ((3, 40), {**SEEDED, "presence_penalty": 0.5, "bad_words": ["miles"]}),
    ((0, 16), {**GREEDY, "bad_words": BAD_WORDS}),
]
# They go on behind the end of the grammar, where all is allowed.
GRAMMARS = [
    ((0, 60), {**GREEDY, "structured_outputs": {"choice": [" 60 * 3 = 180 miles.", " no miles"]}}),
    ((0, 60), {**SEEDED, "structured_outputs": {"regex": r" 60 \* \d = \d+ (miles|hours)\."}}),
    ((0, 24), GREEDY),
]
BATCHES = {
    "mixed": MIXED,
    # All of the prompt but its last token comes from the prefix cache.
    "again": MIXED[1:2],
    "looking back": LOOKING_BACK,
    "grammars": GRAMMARS,
    # Two blocks each for the prompt, which leaves too few for all to have a third.
    "crowded": [((i, i + 61), {**GREEDY, "max_tokens": 10}) for i in range(4)],
}
# The method, batches, and what differs from the default of the engine.
RUNS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "trees": (GROWN, [*BATCHES], {}),
    "template": ({"method": "token_recycling"}, ["mixed"], {}),
    "one at a time": (GROWN, ["looking back", "grammars"], {"async_scheduling": False}),
}
LOGPROB_TOLERANCE = 1e-4  # float32 sums, over batches of other shapes
JUDGED = [
    {**GREEDY, "max_tokens": 6, "logprobs": 0},
    {"temperature": 0.9, "seed": 3, "min_p": 0.02, "max_tokens": 6, "ignore_eos": True},
]


@pytest.mark.parametrize("run", RUNS)
def test_tokens_and_logprobs_equal_those_without_speculation(result, run):
    for batch, outputs in result[run]["outputs"].items():
        for plain, ours in zip(result["plain"][batch], outputs, strict=True):
            assert ours["token_ids"] == plain["token_ids"]
            assert ours["logprobs"] == {
                kind: pytest.approx(values, abs=LOGPROB_TOLERANCE)
                for kind, values in plain["logprobs"].items()
            }


def test_logprobs_are_computed_for_paths_alone(result):
    outputs = [output for batch in result["trees"]["outputs"].values() for output in batch]
    kinds = Counter(kind for output in outputs for kind in output["logprobs"])
    assert kinds == {"sampled": 5, "prompt": 1, "chosen tokens": 1}
    # Whole trees of two requests are 18 rows, those of four 24.
    most = result["template"]["seen"]["most rows with logprobs"]
    assert 0 < most <= 4 * (1 + TREE.depth) < 18


def test_steps_were_of_every_kind(result):
    seen = result["trees"]["seen"]
    kinds = ["drafts", "accepted tokens", "moved rows", "preemptions", "steps scheduled ahead"]
    kinds += ["mixed steps", "steps without trees", "trees of 8 nodes", "trees of 5 nodes"]
    # Greedy and sampled requests are counted apart.
    kinds += [f"counts of {name} requests" for name in CLASSES]
    assert [kind for kind in kinds if not seen[kind] > 0] == []
    assert seen["draft tokens"] > seen["drafts"]
    assert min(result["template"]["seen"][kind] for kind in kinds[:3]) > 0
    assert result["one at a time"]["seen"]["steps scheduled ahead"] == 0


@pytest.mark.parametrize("run", ["trees", "template"])
def test_learning_and_growing_are_told_where_texts_end(result, run):
    seen = result[run]["seen"]
    assert seen["texts"] > (40 if run == "trees" else 10)
    assert seen["texts that end elsewhere"] == 0
    # Nothing is learnt in the middle of a prompt.
    assert seen["rows within prompts"] > seen["rows within prompts learnt from"] == 0
    assert seen["rows learnt from"] > seen["drafts"] > 0


@pytest.mark.parametrize("run", ["trees", "one at a time"])
def test_drafts_are_accepted_of_requests_that_look_back_or_follow_a_grammar(result, run):
    kinds = ("of penalised requests", "beside bad words", "that follow a grammar")
    assert min(result[run]["seen"][f"accepted tokens {kind}"] for kind in kinds) > 0
    assert result[run]["seen"]["undrafted requests"] == 0


def test_bad_words_matter(result):
    without, *_, with_bad_words = result["plain"]["mixed"][0], *result["plain"]["looking back"]
    assert with_bad_words["token_ids"] != without["token_ids"]


def test_masks_take_the_memory_of_the_rows_that_a_step_may_have(result):
    tokens = LLM_ARGUMENTS["max_num_batched_tokens"]
    rows = LLM_ARGUMENTS["max_num_seqs"] + tokens // 2
    assert result["trees"]["seen"]["rows of masks"] == rows


def test_our_part_of_a_step_waits_for_no_device(result):
    assert result["waits"] == []
    assert result["a wait that was planted"] == ["aten._local_scalar_dense.default"]


def test_what_is_right_is_found_right_and_what_is_wrong_is_seen(result):
    right, wrong = result["right"], result["wrong"]
    assert max(right[kind] for kind in ("gap", "logprob_error", "rows")) < 10 * LOGPROB_TOLERANCE
    assert right["drawn_again"] == 1.0
    assert max(right["depths"]) > 1
    assert min(wrong[kind] for kind in ("gap", "logprob_error", "rows")) > 0.1
    assert wrong["drawn_again"] < 1.0


def watch(llm: Any, seen: Counter, waits: Waits) -> None:
    """In the process with the engines: count what the steps are like."""
    model_runner, scheduler = runner(llm), core(llm).scheduler
    schedule, update_from_output = scheduler.schedule, scheduler.update_from_output

    def watched_schedule(*args: Any) -> Any:
        ahead = any(request.num_output_placeholders for request in scheduler.running)
        output = schedule(*args)
        seen["steps scheduled ahead"] += ahead
        for draft in output.scheduled_spec_decode_tokens.values():
            seen[f"trees of {len(draft)} nodes"] += 1
        return output

    def watched_update(step: Any, output: Any) -> Any:
        for request_id in step.scheduled_spec_decode_tokens:
            request = scheduler.requests.get(request_id)
            if request is None:
                continue
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            for name, is_one in (
                ("that follow a grammar", request.use_structured_output),
                ("of penalised requests", request.sampling_params.repetition_penalty != 1.0),
                ("beside bad words", request.sampling_params.bad_words == BAD_WORDS),
            ):
                seen[f"accepted tokens {name}"] += max(0, len(sampled) - 1) * is_one
        return update_from_output(step, output)

    waits.watch(model_runner, "prepare_attn", "add_requests")
    waits.watch(model_runner.speculator, "propose")
    waits.watch(model_runner.tree_drafter, "observe", "accept")
    prepare_attn = model_runner.prepare_attn

    def watched_prepare_attn(input_batch: Any) -> Any:
        num_nodes = input_batch.num_draft_tokens_per_req
        trees = 0 if num_nodes is None else int((num_nodes > 0).sum())
        seen["mixed steps"] += 0 < trees < input_batch.num_reqs
        return prepare_attn(input_batch)

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    model_runner.prepare_attn = watched_prepare_attn
    watch_learning(model_runner.tree_drafter, seen)


def watch_learning(drafter: Any, seen: Counter) -> None:
    """In the process with the engines: count texts that end elsewhere than they should.

    And the rows that are learnt from.

    A text ends with the root of the step where it is learnt from, and with the newest token where
    drafts are made.
    """
    accept, propose, learn = drafter.accept, drafter.propose, token_recycling.learn
    told: list[tuple[torch.Tensor, torch.Tensor]] = []  # where texts end, and where they should
    learns: list[torch.Tensor] = []

    def ends(idx_mapping: torch.Tensor) -> torch.Tensor:
        token_ids, lengths = drafter.texts
        return token_ids[idx_mapping, lengths[idx_mapping].long() - 1]

    def seen_learn(*args: Any, **given: Any) -> None:
        learns.append(given["learns"])
        learn(*args, **given)

    def compared_accept(input_batch: Any, row_token_ids: torch.Tensor, *args: Any) -> None:
        output, path = args
        for end, expected in told:
            seen["texts"] += len(end)
            seen["texts that end elsewhere"] += int((end != expected).sum())
        told.clear()
        seen["steps without trees"] += path is None
        end = ends(input_batch.idx_mapping)
        accept(input_batch, row_token_ids, *args)
        # A prompt that goes on ends elsewhere.
        is_sampled = output.num_sampled > 0
        roots = row_token_ids[input_batch.cu_num_logits[:-1]]
        told.append((end[is_sampled], roots[is_sampled]))
        drafter.is_sampled = bool(is_sampled.all())
        counts = input_batch.cu_num_logits.diff()
        last = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        goes_on = torch.from_numpy(last < input_batch.prefill_len_np).repeat_interleave(counts)
        is_learnt = (learns.pop() != 0).repeat_interleave(counts) & (row_token_ids >= 0)
        seen["rows within prompts"] += int(goes_on.sum())
        seen["rows within prompts learnt from"] += int((goes_on & is_learnt).sum())
        seen["rows learnt from"] += int(is_learnt.sum())

    def compared_propose(idx_mapping: torch.Tensor) -> torch.Tensor:
        if drafter.is_sampled:  # else a prompt goes on behind what is told of it
            newest = drafter.req_states.last_sampled_tokens[idx_mapping, 0]
            told.append((ends(idx_mapping), newest))
        return propose(idx_mapping)

    drafter.is_sampled = False
    drafter.accept, drafter.propose = compared_accept, compared_propose
    token_recycling.learn = seen_learn  # type: ignore[assignment]


def serve(
    method: dict[str, Any], batches: list[str], arguments: dict[str, Any], waits: Waits
) -> dict[str, Any]:
    """In the process with the engines: an engine with trees, its outputs and what was seen."""
    seen, moved = Counter[str](), watch_moves(waits)

    def watched_scores(logits: torch.Tensor, *args: Any, **given: Any) -> Any:
        seen["most rows with logprobs"] = max(seen["most rows with logprobs"], len(logits))
        return compute_topk_scores(logits, *args, **given)

    sampling.compute_topk_scores = watched_scores
    with engine(with_sizes(method, SCHEDULE), **LLM_ARGUMENTS | arguments) as llm:
        assert type(runner(llm)) is TreeV2Runner
        watch(llm, seen, waits)
        counts = runner(llm).tree_drafter.counts.counts
        before = counts.clone()
        outputs = {name: generate(llm, [BATCHES[name]]) for name in batches}
        for request_class, changed in zip(CLASSES, (counts != before)[: len(CLASSES)], strict=True):
            seen[f"counts of {request_class} requests"] = int(changed.sum())
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            seen[name.replace("_", " ")] = counter(llm, f"spec_decode_num_{name}")
        [statistics] = llm.collective_rpc("draft_statistics")
        seen["undrafted requests"] = statistics["undrafted_requests"]
        seen["rows of masks"] = len(runner(llm).structured_outputs_worker.grammar_bitmask)
        seen["preemptions"] = counter(llm, "num_preemptions")
    seen["moved rows"] = moved.total()
    return {"outputs": outputs, "seen": seen}


def judge() -> dict[str, Any]:
    """In the process with the engines: one with trees, and one that judges it."""
    rows: list[gpu_checks.Row] = []
    with engine(with_sizes(GROWN, SCHEDULE), **LLM_ARGUMENTS) as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)
        requests = [(token_ids[at : at + 30], JUDGED[at % 2]) for at in range(3)]
        gpu_checks.watch_rows(llm, rows, most=6, first_step=3)
        answers = gpu_checks.serve(llm, requests, steps_between=2)
    others = [replace(one, token_ids=one.token_ids[::-1]) for one in answers]
    shorter = [replace(row, token_ids=row.token_ids[:-1]) for row in rows]
    found = {}
    with engine(**LLM_ARGUMENTS | {"max_num_seqs": 16, "num_gpu_blocks_override": None}) as llm:
        for name, given in {"right": (answers, rows), "wrong": (others, shorter)}.items():
            verdict = asdict(gpu_checks.judge(llm, given[0]))
            found[name] = verdict | {"rows": gpu_checks.judge_rows(llm, given[1])}
    found["right"]["depths"] = [row.depth for row in rows]
    return found


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without trees, and three with them."""
    with engine(**LLM_ARGUMENTS) as llm:
        plain = {name: generate(llm, [batch]) for name, batch in BATCHES.items()}
    TREE.save(folder / "tree.json")
    RUNS["template"][0]["tree"] = str(folder / "tree.json")
    waits = Waits()
    waits.watch(v2_runner, "logprobs_of_paths", "walk")
    result: dict[str, Any] = {name: serve(*run, waits) for name, run in RUNS.items()}
    with Waits() as planted:
        torch.ones(1).item()
    result |= {"plain": plain, "waits": waits.seen, "a wait that was planted": planted.seen}
    return result | judge()
