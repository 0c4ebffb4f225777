"""Model Runner V2 with trees gives what V2 gives without, token for token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from tests.integration.cuda.v2_engines import (
    BLOCK_SIZE,
    GREEDY,
    GROWN,
    LLM_ARGUMENTS,
    SCHEDULE,
    SEEDED,
    TREE,
    Waits,
    generate,
    watch_moves,
    with_sizes,
)
from tests.integration.cuda.v2_learning import watch_learning
from tests.integration.cuda.v2_worker import TreeV2Runner
from tests.integration.engines import core, counter, engine, runner
from vllm_recycle.integration.cuda import runner as v2_runner
from vllm_recycle.integration.cuda import sampling

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
# Requests that look back on their own output, and one that does without the first bad words.
LOOKING_BACK = [
    ((0, 24), {**GREEDY, "logprob_token_ids": [14, 15]}),
    ((0, 40), {**GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.2}),
    ((3, 40), {**SEEDED, "presence_penalty": 0.5, "bad_words": ["miles"]}),
    ((0, 16), {**GREEDY, "bad_words": BAD_WORDS}),
]
# They go on behind the end of the grammar, where all is allowed.
GRAMMARS = [
    ((0, 60), {**GREEDY, "structured_outputs": {"choice": [" 60 * 3 = 180 miles.", " no miles"]}}),
    ((0, 60), {**SEEDED, "structured_outputs": {"regex": r" 60 \* \d = \d+ (miles|hours)\."}}),
    ((0, 24), GREEDY),
]
# Two blocks each for the prompt, which leaves too few for all to have a third.
CROWDED = [((i, i + 61), {**GREEDY, "max_tokens": 20}) for i in range(4)]
# The second time, all of the second prompt but its last token comes from the prefix cache.
BATCHES = [MIXED, MIXED[1:2], LOOKING_BACK, GRAMMARS, CROWDED]
REQUESTS = [request for batch in BATCHES for request in batch]
ONE_AT_A_TIME = [LOOKING_BACK, GRAMMARS]
ONE_AT_A_TIME_AT = slice(len(MIXED) + 1, len(MIXED) + 1 + sum(map(len, ONE_AT_A_TIME)))
LOGPROB_TOLERANCE = 1e-4  # float32 sums, over batches of other shapes


def test_tokens_equal_those_without_speculation(result):
    for plain, trees in zip(result["plain"], result["trees"], strict=True):
        assert trees["token_ids"] == plain["token_ids"]


def test_logprobs_are_those_of_the_accepted_path(result):
    for plain, trees in zip(result["plain"], result["trees"], strict=True):
        assert trees["logprobs"].keys() == plain["logprobs"].keys()
        for kind, values in plain["logprobs"].items():
            assert trees["logprobs"][kind] == pytest.approx(values, abs=LOGPROB_TOLERANCE)
    kinds = Counter(kind for output in result["trees"] for kind in output["logprobs"])
    assert kinds == {"sampled": 5, "prompt": 1, "chosen tokens": 1}


def test_logprobs_are_computed_for_paths_alone(result):
    # Whole trees of two requests are 18 rows, those of four 24.
    assert (
        0 < result["seen of the template"]["most rows with logprobs"] <= 4 * (1 + TREE.depth) < 18
    )


def test_trees_were_verified_accepted_and_compacted(result):
    seen = result["seen"]
    assert seen["drafts"] > 0
    assert seen["draft tokens"] > seen["drafts"]
    assert seen["accepted tokens"] > 0
    assert seen["moved rows"] > 0


def test_steps_were_ahead_mixed_cut_and_preempted(result):
    seen = result["seen"]
    assert seen["steps scheduled ahead"] > 0
    assert seen["mixed steps"] > 0
    assert seen["trees of 8 nodes"] > 0
    assert seen["trees of 5 nodes"] > 0
    assert seen["preemptions"] > 0


def test_learning_and_growing_are_told_where_texts_end(result):
    seen = result["seen"]
    assert seen["steps without trees"] > 0
    assert seen["texts"] > 50
    assert seen["texts that end elsewhere"] == 0


def test_a_template_gives_the_same(result):
    plain = [output["token_ids"] for output in result["plain"][: len(MIXED)]]
    assert [output["token_ids"] for output in result["template"]] == plain
    seen = result["seen of the template"]
    assert min(seen["accepted tokens"], seen["moved rows"]) > 0


@pytest.mark.parametrize("run", ["seen", "seen of the template"])
def test_nothing_is_learnt_in_the_middle_of_a_prompt(result, run):
    seen = result[run]
    assert seen["rows within prompts"] > 0
    assert seen["rows within prompts learnt from"] == 0
    assert seen["rows learnt from"] > seen["drafts"] > 0


@pytest.mark.parametrize("run", ["seen", "seen one at a time"])
@pytest.mark.parametrize("kind", ["of penalised requests", "beside bad words"])
def test_drafts_are_accepted_of_requests_that_look_back(result, run, kind):
    assert result[run][f"accepted tokens {kind}"] > 0
    assert result[run]["undrafted requests"] == 0


def test_bad_words_matter(result):
    without = result["plain"][0]["token_ids"]
    (at,) = [at for at, (_, given) in enumerate(REQUESTS) if given.get("bad_words") == BAD_WORDS]
    assert result["plain"][at]["token_ids"] != without


@pytest.mark.parametrize("run", ["seen", "seen one at a time"])
def test_drafts_are_accepted_where_a_grammar_is_followed(result, run):
    assert result[run]["accepted tokens that follow a grammar"] > 0


def test_greedy_and_sampled_requests_are_counted_apart(result):
    greedy, sampled = (result["seen"][f"counts of {name} requests"] for name in CLASSES)
    assert greedy > 0
    assert sampled > 0


def test_masks_take_the_memory_of_the_rows_that_a_step_may_have(result):
    tokens = LLM_ARGUMENTS["max_num_batched_tokens"]
    assert result["seen"]["rows of masks"] == LLM_ARGUMENTS["max_num_seqs"] + tokens // 2


def test_tokens_are_the_same_without_scheduling_ahead(result):
    plain = [output["token_ids"] for output in result["plain"][ONE_AT_A_TIME_AT]]
    assert [output["token_ids"] for output in result["one at a time"]] == plain
    seen = result["seen one at a time"]
    assert seen["steps scheduled ahead"] == 0
    assert seen["drafts"] > 0


def test_our_part_of_a_step_waits_for_no_device(result):
    assert result["waits"] == []
    assert result["a wait that was planted"] == ["aten._local_scalar_dense.default"]


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


def watch_scores(seen: Counter) -> None:
    """In the process with the engines: how many rows of a step have logprobs computed."""

    def watched(logits: torch.Tensor, *args: Any, **given: Any) -> Any:
        seen["most rows with logprobs"] = max(seen["most rows with logprobs"], len(logits))
        return compute_topk_scores(logits, *args, **given)

    sampling.compute_topk_scores = watched


def serve(
    method: dict[str, Any], batches: Any, waits: Waits, **arguments: Any
) -> tuple[list, Counter]:
    """In the process with the engines: an engine with trees, its outputs and what was seen."""
    seen, moved = Counter[str](), watch_moves(waits)
    watch_scores(seen)
    with engine(with_sizes(method, SCHEDULE), **LLM_ARGUMENTS | arguments) as llm:
        assert type(runner(llm)) is TreeV2Runner
        watch(llm, seen, waits)
        counts = runner(llm).tree_drafter.counts.counts
        before = counts.clone()
        outputs = generate(llm, batches)
        for of_class, changed in zip(CLASSES, (counts != before)[: len(CLASSES)], strict=True):
            seen[f"counts of {of_class} requests"] = int(changed.sum())
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            seen[name.replace("_", " ")] = counter(llm, f"spec_decode_num_{name}")
        [statistics] = llm.collective_rpc("draft_statistics")
        seen["undrafted requests"] = statistics["undrafted_requests"]
        masks = runner(llm).structured_outputs_worker.grammar_bitmask
        seen["rows of masks"] = len(masks)
        seen["preemptions"] = counter(llm, "num_preemptions")
    seen["moved rows"] = moved.total()
    return outputs, seen


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without trees, and three with them."""
    with engine(**LLM_ARGUMENTS) as llm:
        result: dict[str, Any] = {"plain": generate(llm, BATCHES)}
    TREE.save(folder / "tree.json")
    template = {"method": "token_recycling", "tree": str(folder / "tree.json")}
    waits = Waits()
    waits.watch(v2_runner, "logprobs_of_paths", "walk")
    for name, seen, served in (
        ("trees", "seen", serve(GROWN, BATCHES, waits)),
        ("template", "seen of the template", serve(template, [MIXED], waits)),
        (
            "one at a time",
            "seen one at a time",
            serve(GROWN, ONE_AT_A_TIME, waits, async_scheduling=False),
        ),
    ):
        result[name], result[seen] = served
    with Waits() as planted:
        torch.ones(1).item()
    return result | {"waits": waits.seen, "a wait that was planted": planted.seen}
