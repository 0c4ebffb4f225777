"""Model Runner V2 with trees gives what V2 gives without, token for token.

V2 runs under the Triton interpreter, which has to be set up before vllm is imported: the engines
are in a process of their own, which this file is the script of.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_recycle.core import TreeTemplate

MODEL = str(Path(__file__).parents[2] / "examples" / "models" / "draft")
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
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 15,  # one of them is never used
    "kv_cache_memory_bytes": 8 << 20,
    "disable_log_stats": False,
}
# Siblings first, so that no accepted path of two nodes lies where a chain's would.
TREE = TreeTemplate(((0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (3, 0), (1, 1), (4, 0)), "siblings")
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 7, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
# Batches of requests: which tokens of TEXT are the prompt, and the sampling parameters.
MIXED = [
    ((0, 16), GREEDY),
    ((0, BLOCK_SIZE + 1), SEEDED),
    # Its prompt takes three steps, while the others decode.
    ((0, 100), {**GREEDY, "max_tokens": 24}),
    ((0, BLOCK_SIZE + 8), {**SEEDED, "seed": 8, "min_p": 0.02, "logit_bias": {14: 2.0}}),
]
# Three blocks each for the prompt, which leaves too few for all to have a fourth.
CROWDED = [((i, i + 94), {**GREEDY, "max_tokens": 20}) for i in range(4)]
# The second time, all of the second prompt but its last token comes from the prefix cache, and vLLM
# schedules a full draft of placeholders with that.
BATCHES = [MIXED, MIXED, CROWDED]
LOGPROB_TOLERANCE = 1e-4  # float32 sums, over batches of other shapes


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    if find_spec("triton") is None:
        pytest.skip("Model Runner V2 needs triton, which is not installed")
    folder = tmp_path_factory.mktemp("v2")
    tree, output = folder / "tree.json", folder / "result.json"
    TREE.save(tree)
    command = [sys.executable, __file__, tree, output]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(output.read_text())


def test_tokens_equal_those_without_speculation(result):
    for plain, trees in zip(result["plain"], result["trees"], strict=True):
        assert trees["token_ids"] == plain["token_ids"]


def test_logprobs_are_those_of_the_accepted_path(result):
    for plain, trees in zip(result["plain"], result["trees"], strict=True):
        assert trees["logprobs"] == pytest.approx(plain["logprobs"], abs=LOGPROB_TOLERANCE)


def test_trees_were_verified_accepted_and_compacted(result):
    seen = result["seen"]
    assert seen["drafts"] > 0
    assert seen["draft tokens"] > seen["drafts"]
    assert seen["accepted tokens"] > 0
    assert seen["moved slots"] > 0


def test_steps_were_mixed_padded_and_preempted(result):
    seen = result["seen"]
    assert seen["mixed steps"] > 0
    assert seen["padded requests"] > 0
    assert seen["preemptions"] > 0
    assert sum(bool(output["logprobs"]) for output in result["trees"]) == 4


def generate(llm: Any) -> list[dict[str, Any]]:
    """In the process with the engines: token ids and their logprobs of every request."""
    from vllm import SamplingParams

    token_ids = llm.get_tokenizer().encode(TEXT)
    outputs = []
    for batch in BATCHES:
        prompts = [{"prompt_token_ids": token_ids[slice(*at)]} for at, _ in batch]
        params = [SamplingParams(**given) for _, given in batch]
        for request in llm.generate(prompts, params, use_tqdm=False):
            output = request.outputs[0]
            at = zip(output.token_ids, output.logprobs or (), strict=False)
            logprobs = [entries[token_id].logprob for token_id, entries in at]
            outputs.append({"token_ids": list(output.token_ids), "logprobs": logprobs})
    return outputs


def watch(model_runner: Any, seen: Counter) -> None:
    """In the process with the engines: count what the steps of a runner are like."""
    from vllm_recycle.integration import tree_rows

    prepare_attn, move_slots = model_runner.prepare_attn, tree_rows.move_slots

    def watched_prepare_attn(input_batch: Any) -> Any:
        prepared = prepare_attn(input_batch)
        has_tree = (model_runner.trees.num_nodes > 0).numpy()
        seen["mixed steps"] += bool(has_tree.any()) and not has_tree.all()
        seen["padded requests"] += int((has_tree & input_batch.is_prefilling_np).sum())
        return prepared

    def watched_move_slots(kv_caches: Any, source: Any, target: Any, **kwargs: Any) -> None:
        seen["moved slots"] += len(source)
        move_slots(kv_caches, source, target, **kwargs)

    model_runner.prepare_attn = watched_prepare_attn
    tree_rows.move_slots = watched_move_slots


def main(tree: str) -> dict[str, Any]:
    """In the process with the engines: one without trees and one with them."""
    from engines import counter, runner
    from vllm import LLM

    from vllm_recycle.integration.v2_runner import TreeCPUModelRunnerV2

    llm = LLM(**LLM_ARGUMENTS)
    plain = generate(llm)
    llm.llm_engine.engine_core.shutdown()

    llm = LLM(**LLM_ARGUMENTS, speculative_config={"method": "token_recycling", "tree": tree})
    assert type(runner(llm)) is TreeCPUModelRunnerV2
    seen: Counter = Counter()
    watch(runner(llm), seen)
    trees = generate(llm)
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        seen[name.replace("_", " ")] = counter(llm, f"spec_decode_num_{name}")
    seen["preemptions"] = counter(llm, "num_preemptions")
    llm.llm_engine.engine_core.shutdown()
    return {"plain": plain, "trees": trees, "seen": seen}


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    Path(sys.argv[2]).write_text(json.dumps(main(sys.argv[1])))
