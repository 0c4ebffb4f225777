"""Model Runner V2 with trees gives what V2 gives without, token for token.

V2 runs under the Triton interpreter, which has to be set up before vllm is imported: the engines
are in a process of their own, which this file is the script of. The shim makes what runs what a GPU
runs: the runner, worker and scheduler of CUDA, asynchronous scheduling, all of our Triton kernels,
a KV cache of the GPU's layout. What still differs from a GPU:

    the rows that are no tree are attended to by vLLM's Triton kernel instead of FlashAttention
    trees are attended to in larger tiles than float32 has, and no context is split
    nothing is captured into CUDA graphs (but in `test_full_graphs`)
    vLLM's kernels for top-k and top-p do not run in the interpreter: no request asks for them
    float32, so that outputs compare; the interpreter knows nothing of tensor cores
    one process, one rank (but `test_ranks`)
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from v2_scripts import run_script

from vllm_recycle.core import TreeTemplate

pytestmark = pytest.mark.slow

MODEL = str(Path(__file__).parents[3] / "examples" / "models" / "draft")
TEXT = """Question: A train travels 60 miles an hour. How many miles does it travel in 3 hours?
Answer: It travels 60 * 3 = 180 miles. #### 180

Question: A car travels 40 miles an hour. How many miles does it travel in 2 hours?
Answer: It travels 40 * 2 = 80 miles. #### 80

Question: A bus travels 30 miles an hour. How many miles does it travel in 5 hours?
Answer: It travels"""
BLOCK_SIZE = 32
LLM_ARGUMENTS = {
    "model": MODEL,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 112,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 11,  # one of them is never used
    "kv_cache_memory_bytes": 8 << 20,
    "disable_log_stats": False,
    "async_scheduling": True,
}
# Siblings first, so that no accepted path of two nodes lies where a chain's would.
TREE = TreeTemplate(((0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (3, 0), (1, 1), (4, 0)), "siblings")
# Three requests or four get a prefix of it.
SCHEDULE = [(1, 2, 8), (3, 4, 5)]
GREEDY = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 7, "max_tokens": 10, "ignore_eos": True, "logprobs": 1}
# Batches of requests: which tokens of TEXT are the prompt, and the sampling parameters.
MIXED = [
    ((0, 16), GREEDY),
    ((0, BLOCK_SIZE + 1), SEEDED),
    # Its prompt takes several steps, while the others decode, and it ends with the context.
    ((0, 100), {**GREEDY, "max_tokens": 12, "prompt_logprobs": 0}),
    ((0, BLOCK_SIZE + 8), {**SEEDED, "seed": 8, "min_p": 0.02, "logit_bias": {14: 2.0}}),
]
# Requests that look back on their own output get no drafts; the others do beside them.
LOOKING_BACK = [
    ((0, 24), {**GREEDY, "logprob_token_ids": [14, 15]}),
    ((0, 40), {**GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.2}),
    ((3, 40), {**SEEDED, "presence_penalty": 0.5, "bad_words": ["miles"]}),
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
ONE_AT_A_TIME = [LOOKING_BACK, GRAMMARS]
ONE_AT_A_TIME_AT = slice(len(MIXED) + 1, len(MIXED) + 1 + sum(map(len, ONE_AT_A_TIME)))
LOGPROB_TOLERANCE = 1e-4  # float32 sums, over batches of other shapes
# What waits for the device, as CUDA's synchronisation debug mode would say.
SYNCHRONISING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v2")
    tree, output = folder / "tree.json", folder / "result.json"
    TREE.save(tree)
    return run_script(__file__, output, tree, output)


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


def test_requests_that_look_back_get_no_drafts(result):
    assert result["seen"]["drafts of requests that look back"] == 0


@pytest.mark.parametrize("run", ["seen", "seen one at a time"])
def test_drafts_are_accepted_where_a_grammar_is_followed(result, run):
    assert result[run]["accepted tokens that follow a grammar"] > 0


def test_tokens_are_the_same_without_scheduling_ahead(result):
    plain = [output["token_ids"] for output in result["plain"][ONE_AT_A_TIME_AT]]
    assert [output["token_ids"] for output in result["one at a time"]] == plain
    seen = result["seen one at a time"]
    assert seen["steps scheduled ahead"] == 0
    assert seen["drafts"] > 0
    assert seen["drafts of requests that look back"] == 0


def test_our_part_of_a_step_waits_for_no_device(result):
    assert result["waits"] == []
    assert result["a wait that was planted"] == ["aten._local_scalar_dense.default"]


class Waits(TorchDispatchMode):
    """Records the operations that would wait for a device, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        masks = [index for index in indices or () if getattr(index, "dtype", None) == torch.bool]
        if masks or name.split(".")[1] in SYNCHRONISING:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def generate(llm: Any, batches: Any = BATCHES) -> list[dict[str, Any]]:
    """In the process with the engines: token ids and their logprobs of every request."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    token_ids = llm.get_tokenizer().encode(TEXT)
    outputs = []
    for batch in batches:
        prompts = [{"prompt_token_ids": token_ids[slice(*at)]} for at, _ in batch]
        params = []
        for _, given in batch:
            grammar = given.get("structured_outputs")
            more = {"structured_outputs": StructuredOutputsParams(**grammar)} if grammar else {}
            params.append(SamplingParams(**{**given, **more}))
        for request, given in zip(
            llm.generate(prompts, params, use_tqdm=False), params, strict=True
        ):
            output = request.outputs[0]
            found = {}
            if given.logprobs is not None:
                found["sampled"] = pick(output.token_ids, output.logprobs)
            if given.logprob_token_ids:
                chosen = [[step[token].logprob for token in (14, 15)] for step in output.logprobs]
                found["chosen tokens"] = [value for values in chosen for value in values]
            if given.prompt_logprobs is not None:
                found["prompt"] = pick(request.prompt_token_ids[1:], request.prompt_logprobs[1:])
            outputs.append({"token_ids": list(output.token_ids), "logprobs": found})
    return outputs


def pick(token_ids: Any, logprobs: Any) -> list[float]:
    return [step[token_id].logprob for token_id, step in zip(token_ids, logprobs, strict=True)]


def watch(llm: Any, seen: Counter, waits: Waits) -> None:
    """In the process with the engines: count what the steps are like."""
    from engines import core, runner
    from v2_learning import watch_learning

    from vllm_recycle.integration.cuda import runner as v2_runner
    from vllm_recycle.integration.cuda.sampling import logprobs_of_paths

    model_runner, scheduler = runner(llm), core(llm).scheduler
    prepare_attn, propose = model_runner.prepare_attn, model_runner.speculator.propose
    schedule, compact_path = scheduler.schedule, v2_runner.compact_path
    update_from_output = scheduler.update_from_output

    def watched_schedule(*args: Any) -> Any:
        ahead = any(request.num_output_placeholders for request in scheduler.running)
        output = schedule(*args)
        seen["steps scheduled ahead"] += ahead
        for request_id, draft in output.scheduled_spec_decode_tokens.items():
            seen[f"trees of {len(draft)} nodes"] += 1
            request = scheduler.requests[request_id]
            looks_back = not scheduler.may_speculate(request)
            seen["drafts of requests that look back"] += looks_back
        return output

    def watched_update(step: Any, output: Any) -> Any:
        for request_id in step.scheduled_spec_decode_tokens:
            request = scheduler.requests.get(request_id)
            if request is not None and request.use_structured_output:
                sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
                seen["accepted tokens that follow a grammar"] += max(0, len(sampled) - 1)
        return update_from_output(step, output)

    def watched_prepare_attn(input_batch: Any) -> Any:
        num_nodes = input_batch.num_draft_tokens_per_req
        trees = 0 if num_nodes is None else int((num_nodes > 0).sum())
        seen["mixed steps"] += 0 < trees < input_batch.num_reqs
        with waits:
            return prepare_attn(input_batch)

    def watched_propose(*args: Any, **kwargs: Any) -> Any:
        with waits:
            return propose(*args, **kwargs)

    def watched_compact_path(layers: Any, slots: Any, rows: Any, starts: Any, path: Any) -> None:
        seen["moved rows"] += int((path > torch.arange(path.shape[1])).sum())
        with waits:
            compact_path(layers, slots, rows, starts, path)

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    model_runner.add_requests = watched(model_runner.add_requests, waits)
    v2_runner.logprobs_of_paths = watched(logprobs_of_paths, waits)
    model_runner.prepare_attn = watched_prepare_attn
    model_runner.speculator.propose = watched_propose
    v2_runner.compact_path = watched_compact_path
    drafter = model_runner.drafter
    for name in ("observe", "accept"):
        setattr(drafter, name, watched(getattr(drafter, name), waits))
    watch_learning(drafter, seen)
    if not hasattr(v2_runner.walk_trees, "watched"):
        v2_runner.walk_trees = watched(v2_runner.walk_trees, waits)


def watched(function: Any, waits: Waits) -> Any:
    """The function, with its waits recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with waits:
            return function(*args, **kwargs)

    call.watched = True
    return call


def serve(
    options: dict[str, Any], batches: Any, waits: Waits, **arguments: Any
) -> tuple[list, Counter]:
    """In the process with the engines: an engine with trees, its outputs and what was seen."""
    from engines import counter, runner
    from v2_worker import TreeV2Runner
    from vllm import LLM

    method: dict[str, Any] = {"method": "token_recycling", **options}
    method["num_speculative_tokens_per_batch_size"] = SCHEDULE
    llm = LLM(**LLM_ARGUMENTS | arguments, speculative_config=method)
    assert type(runner(llm)) is TreeV2Runner
    seen: Counter = Counter()
    watch(llm, seen, waits)
    outputs = generate(llm, batches)
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        seen[name.replace("_", " ")] = counter(llm, f"spec_decode_num_{name}")
    seen["preemptions"] = counter(llm, "num_preemptions")
    llm.llm_engine.engine_core.shutdown()
    return outputs, seen


def main(tree: str) -> dict[str, Any]:
    """In the process with the engines: one without trees, and three with them."""
    from vllm import LLM

    llm = LLM(**LLM_ARGUMENTS)
    plain = generate(llm)
    llm.llm_engine.engine_core.shutdown()
    waits = Waits()
    grown = {"max_nodes": TREE.num_nodes, "context_mib": 1}
    trees, seen = serve(grown, BATCHES, waits)
    template, seen_of_template = serve({"tree": tree}, [MIXED], waits)
    one_at_a_time, seen_then = serve(grown, ONE_AT_A_TIME, waits, async_scheduling=False)
    with Waits() as planted:
        torch.ones(1).item()
    return {
        "plain": plain,
        "trees": trees,
        "seen": seen,
        "template": template,
        "seen of the template": seen_of_template,
        "one at a time": one_at_a_time,
        "seen one at a time": seen_then,
        "waits": waits.seen,
        "a wait that was planted": planted.seen,
    }


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    Path(sys.argv[2]).write_text(json.dumps(main(sys.argv[1])))
