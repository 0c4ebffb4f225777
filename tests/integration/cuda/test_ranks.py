"""Two tensor-parallel ranks on Model Runner V2, with the drafts of each method."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from engines import TARGET, counter, engine, runner
from test_ouroboros import METHOD as OUROBOROS
from test_ouroboros import TRUNK
from v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, tokens_of
from v2_ranks import NUM_RANKS, run_ranks, take_port

pytestmark = pytest.mark.slow

METHODS = {
    "token_recycling": {"method": "token_recycling", "k": 4, "max_nodes": 4, "context_mib": 1},
    # The target drafts for itself: the heads of the small draft model are three.
    "ouroboros": {**OUROBOROS, "model": TARGET},
    "trunk": {**TRUNK, "model": TARGET, "max_nodes": 4},
}
ARGUMENTS = {
    **LLM_ARGUMENTS,
    "model": TARGET,
    "tensor_parallel_size": NUM_RANKS,
    "distributed_executor_backend": "external_launcher",
}
# Which tokens of TEXT are the prompt, and the sampling parameters.
BATCH = [((0, 33), GREEDY), ((3, 40), SEEDED)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank has to say."""
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), num_engines=5)


def test_each_rank_has_its_share_of_the_heads(ranks):
    assert [rank["ouroboros"]["KV heads"] for rank in ranks] == [1, 1]


@pytest.mark.parametrize("method", METHODS)
def test_tokens_equal_those_without_speculation(ranks, method):
    for rank in ranks:
        assert rank[method]["token ids"] == ranks[0]["plain"]["token ids"]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_were_accepted(ranks, method):
    for rank in ranks:
        assert rank[method]["accepted tokens"] > 0


@pytest.mark.parametrize("method", [*METHODS, "started again"])
def test_ranks_know_the_same(ranks, method):
    known = [rank[method]["known"] for rank in ranks]
    assert known[0]["entries"] > 100
    assert known[1] == known[0]


def test_the_first_rank_alone_writes_the_state_file(ranks):
    assert [rank["has a file"] for rank in ranks] == [True, False]


def serve(method: dict[str, Any] | None, *batches: list) -> dict[str, Any]:
    """In a rank: an engine's tokens, and with a method what it was like."""
    take_port()
    with engine(method, **ARGUMENTS) as llm:
        result: dict[str, Any] = {
            "token ids": tokens_of(llm, *batches),
            "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens"),
        }
        if method is not None:
            tensors = list(runner(llm).tree_drafter.state.tensors.values())
            digest = sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
            result["known"] = {"entries": int((tensors[0] >= 0).sum()), "digest": digest}
            result["KV heads"] = runner(llm).paged_layers[0].kv_caches[0].shape[1]
    return result


def main(state_file: Path) -> dict[str, Any]:
    """In a rank: an engine without speculation, one with each method, and one of them again."""
    result = {"plain": serve(None, BATCH)}
    kept = METHODS["token_recycling"] | {"matrix_file": str(state_file)}
    methods = METHODS | {"token_recycling": kept}
    result |= {name: serve(method, BATCH) for name, method in methods.items()}
    result["started again"] = serve(kept)
    return result | {"has a file": state_file.exists()}
