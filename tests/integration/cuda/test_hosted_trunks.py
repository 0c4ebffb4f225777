"""Trees along what vLLM's heads draft, on Model Runner V2: outputs and trunks are vLLM's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.integration.cuda.v2_engines import (
    GREEDY,
    LLM_ARGUMENTS,
    SEEDED,
    Waits,
    serve_priced,
    tokens_of,
    with_sizes,
)
from tests.integration.engines import TARGET, counter, engine, runner
from tests.integration.models import heads
from vllm_recycle.integration.cuda import hosted_trunk
from vllm_recycle.integration.cuda.hosted_trunk import HOSTED, move_rows

pytestmark = pytest.mark.slow

LENGTH, NODES = 3, 12
METHOD = {"method": "token_recycling", "max_nodes": NODES, "context_mib": 1}
SOURCES = ("eagle", "eagle3", "mtp")
ARGUMENTS = {name: value for name, value in LLM_ARGUMENTS.items() if name != "model"}
ARGUMENTS |= {"max_model_len": 160, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 30}
MANY = {"max_num_seqs": 12, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 80}
OPTED_OUT = {**GREEDY, "extra_args": {"speculate": False}}
# Which tokens of TEXT are the prompt, and the sampling parameters.
BATCHES = {
    # The third prompt comes in chunks, beside the others' drafts.
    "three": [((0, 40), {**GREEDY, "max_tokens": 12}), ((3, 30), SEEDED), ((5, 100), GREEDY)],
    # All of the first prompt but its last token comes from the prefix cache.
    "again": [((0, 40), {**GREEDY, "max_tokens": 8}), ((10, 40), OPTED_OUT)],
    # A chain beside a tree.
    "looking back": [((3, 40), {**GREEDY, "repetition_penalty": 1.1}), ((0, 30), GREEDY)],
}


@pytest.mark.parametrize("name", SOURCES)
class TestEverySource:
    def test_tokens_equal_those_without_speculation(self, result, name):
        plain = result["plain with mtp" if name == "mtp" else "plain"]
        assert result[name]["token ids"] == plain
        assert result[name]["seen"]["accepted"] > 10
        # New weights halve what is counted.
        before, after = result[name]["counted"]
        assert 0 < before == 2 * after

    def test_trunks_are_vllms_own_chains_in_trees_whose_rows_are_moved(self, result, name):
        found, seen = result[name], result[name]["seen"]
        assert len(found["trunks"]) > 15
        assert found["trunks"] == found["chains of vLLM"]
        assert seen["moved rows"] > 0
        assert seen["trunks in trees"] > 10
        assert seen["other trunks"] == 0

    def test_drafting_waits_for_no_device(self, result, name):
        # vLLM's heads look at lengths on the host, for the first token of a chain and for the rest.
        assert result[name]["waits"] == ["aten.item.default"] * 2 * result[name]["calls"]


def test_a_head_drafts_where_that_is_worth_its_time(result):
    priced, plain = result["priced"], result["plain"]["three"]
    assert priced["token ids"] == {"free": plain, "dear": plain}
    assert priced["rounds"]["free"] > 10
    # Those that the last steps before had asked for, and one to see what it would give.
    assert priced["rounds"]["dear"] <= 9
    # On a busy machine one of them may have waited.
    timed = priced["alone timed for"], priced["rounds timed for"]
    alone, rounds = (of_batches[max(of_batches, key=int)] for of_batches in timed)
    assert 0 < alone < 2 * rounds


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_rows_of_accepted_paths_come_to_those_of_chains(dtype):
    """Of two requests, whose rows are anywhere among the tokens of a step."""
    indices, starts = torch.tensor([4, 0, 7, 2, 5, 1, 8]), torch.tensor([0, 4, 7])
    path = torch.tensor([[0, 2, 3, -1], [0, 2, -1, -1]])
    rows = torch.arange(10).to(dtype)
    wide_rows = 10 * rows[:, None] + torch.arange(3).to(dtype)
    move_rows((rows, wide_rows), indices, starts.int(), path)
    assert rows.tolist() == [7, 8, 2, 3, 4, 5, 6, 2, 8, 9]
    assert wide_rows.equal(10 * rows[:, None] + torch.arange(3).to(dtype))


def test_what_a_trunk_does_not_go_with_is_refused(result):
    assert "a trunk on a GPU with --kv-cache-dtype fp8" in result["refused"]


def text_of(req_states: Any, index: int) -> str:
    tokens = req_states.all_token_ids.gpu[index, : req_states.total_len.gpu[index]]
    return ",".join(map(str, tokens.tolist()))


class WatchedChains:
    """What vLLM's speculators draft behind each text, from now on."""

    def __init__(self) -> None:
        self.chains: dict[str, list[int]] = {}
        self.req_states: Any = None
        self.num_calls = 0
        for speculator_class in HOSTED:
            speculator_class.propose = self.watched(speculator_class.propose)

    def watched(self, propose: Any) -> Any:
        def call(speculator: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = propose(speculator, *args, **kwargs)
            if kwargs.get("dummy_run"):
                return drafts
            self.num_calls += 1
            if kwargs.get("num_speculative_tokens") != 0 and self.req_states is not None:
                batch, num_sampled = args[0], args[5]
                for place, index in enumerate(batch.idx_mapping.tolist()):
                    if num_sampled[place] > 0:
                        self.chains[text_of(self.req_states, index)] = drafts[place].tolist()
            return drafts

        return call

    def watch(self, llm: Any) -> dict[str, list[int]]:
        """Forget what was seen, and watch this engine."""
        self.req_states, self.chains = runner(llm).req_states, {}
        return self.chains


def watch_trees(llm: Any, chains: dict[str, list[int]]) -> Counter[str]:
    """See what becomes of chains."""
    seen: Counter[str] = Counter()
    drafter, req_states = runner(llm).tree_drafter, runner(llm).req_states
    propose = drafter.propose

    def watched_propose(idx_mapping: torch.Tensor) -> torch.Tensor:
        drafts = propose(idx_mapping)
        for place, index in enumerate(idx_mapping.tolist()):
            trunk = drafter.trunks.token_ids[index, :, 0].tolist()
            if trunk[0] < 0:
                continue
            parents = drafter.trees.parents[index, 1:].tolist()
            nodes = zip(parents, drafts[place].tolist(), strict=True)
            seen["trunks in trees"] += (0, trunk[0]) in set(nodes)
            found = [token for token in trunk if token >= 0]
            chain = chains.get(text_of(req_states, index), [])
            seen["other trunks"] += found != chain[: len(found)]
        return drafts

    def watched_move(tensors: Any, indices: Any, starts: Any, path: Any) -> None:
        seen["moved rows"] += int((path > torch.arange(path.shape[1])).sum())
        move_rows(tensors, indices, starts, path)

    drafter.propose, hosted_trunk.move_rows = watched_propose, watched_move
    return seen


def serve(model: str, trunk: dict[str, Any], watched: WatchedChains) -> dict[str, Any]:
    """In the process with the engines: one with trees, and vLLM's own behind the same texts."""
    waits = Waits()
    with engine(
        with_sizes(METHOD | {"trunk": trunk}, [(1, 4, NODES)]), model=model, **ARGUMENTS
    ) as llm:
        chains, drafter = watched.watch(llm), runner(llm).tree_drafter
        seen = watch_trees(llm, chains)
        token_ids = {name: tokens_of(llm, batch) for name, batch in BATCHES.items()}
        seen["accepted"] = counter(llm, "spec_decode_num_accepted_tokens")
        # Once more, without what is watched above, which waits too.
        del drafter.propose
        hosted_trunk.move_rows = move_rows
        watched.req_states, watched.num_calls = None, 0
        waits.watch(runner(llm).speculator, "propose")
        tokens_of(llm, BATCHES["again"])
        calls, counted = watched.num_calls, [float(drafter.choices.counts.sum())]
        drafter.weights_changed()
        counted.append(float(drafter.choices.counts.sum()))
    texts = list(chains)[:24]
    with engine(trunk, model=model, **ARGUMENTS | MANY) as llm:
        expected = watched.watch(llm)
        prompts = [{"prompt_token_ids": [*map(int, text.split(","))][:-1]} for text in texts]
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    both = [text for text in texts if text in expected]
    return {
        "token ids": token_ids,
        "seen": seen,
        "waits": waits.seen,
        "calls": calls,
        "counted": counted,
        "trunks": [chains[text] for text in both],
        "chains of vLLM": [expected[text] for text in both],
    }


def refused(trunk: dict[str, Any], **flags: Any) -> str:
    """In the process with the engines: why there is none."""
    method = METHOD | {"trunk": trunk}
    with pytest.raises(NotImplementedError) as error, engine(method, model=TARGET, **flags):
        pass
    return str(error.value)


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: two without speculation, and those with it."""
    sources = heads.trunks(folder, LENGTH)
    result: dict[str, Any] = {}
    for name, model in (("plain", TARGET), ("plain with mtp", sources["mtp"][0])):
        with engine(model=model, **ARGUMENTS) as llm:
            result[name] = {batch: tokens_of(llm, BATCHES[batch]) for batch in BATCHES}
    watched = WatchedChains()
    result |= {name: serve(*sources[name], watched) for name in SOURCES}
    watched.req_states = None
    result["refused"] = refused(sources["eagle"][1], kv_cache_dtype="fp8")
    with engine(METHOD | {"trunk": sources["eagle"][1]}, model=TARGET, **ARGUMENTS) as llm:
        prices = {"free": (BATCHES["three"], 0.0, 0.0), "dear": (BATCHES["three"], 1e9, 0.0)}
        result["priced"] = serve_priced(llm, prices)
    return result
