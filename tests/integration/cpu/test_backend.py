"""Which rows of a step our attention takes, and which are vLLM's."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.integration.engines import GROWN, TOKEN_RECYCLING, counter, engine, read_prompts
from vllm_recycle.integration.cpu.backend import TreeCPUAttentionMetadataBuilder, TreeMetadata
from vllm_recycle.integration.options import settings_of

PROMPTS = read_prompts(2)
# Where rows have a price, chains pay.
METHODS = {"trees": GROWN, "priced": {**TOKEN_RECYCLING, "row_cost": 0.02}}


def run(llm: Any) -> list[tuple[Any, list[int], Any]]:
    """Of each step its drafts, where the rows of its requests end, and the metadata.

    One request drafts, and one does not and comes while that runs.
    """
    build, steps = TreeCPUAttentionMetadataBuilder.build, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        step, common = self.step, kwargs.get("common_attn_metadata") or args[1]
        built = build(self, *args, **kwargs)
        if step is not None:
            steps.append((step, common.query_start_loc_cpu[1:].tolist(), built))
        return built

    drafts, plain = (
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra)
        for extra in (None, {"speculate": False})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeCPUAttentionMetadataBuilder, "build", watched)
        llm.llm_engine.add_request("drafts", PROMPTS[0], drafts)
        for _ in range(3):
            llm.llm_engine.step()
        llm.llm_engine.add_request("plain", PROMPTS[1], plain)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    return steps


@cache
def steps_of(name: str, dtype: str = "float32") -> list[tuple[Any, list[int], Any]]:
    with engine(METHODS[name], dtype=dtype) as llm:
        return run(llm)


@pytest.mark.parametrize("name", METHODS)
def test_beside_drafts_roots_are_ours_and_prompts_vllms(name):
    found = set()  # what requests had in a step, and whose attention took them
    for step, ends, built in steps_of(name):
        trees = built.trees if isinstance(built, TreeMetadata) else None
        ours = [] if trees is None else (trees.root_rows + trees.num_rows).tolist()
        kinds = []
        for end, length, nodes in zip(ends, np.diff([0, *ends]), step.num_nodes, strict=True):
            kind = "root" if length == 1 else "draft" if nodes else "prompt"
            kinds.append(f"{kind} {'ours' if end in ours else 'vLLM'}")
        found.add(tuple(sorted(kinds)))
    some = {("draft ours", "root ours"), ("draft ours", "prompt vLLM"), ("prompt vLLM",)}
    assert some <= found
    kinds = {"draft ours", "root ours", "root vLLM", "prompt vLLM"}
    assert {kind for step in found for kind in step} == kinds
    # Where nobody drafts, the step is vLLM's.
    assert all("draft ours" in step for step in found if "root ours" in step)


def test_what_the_kernel_lacks_is_drafted_for_in_chains_by_vllms_attention():
    with engine(GROWN, dtype="float16") as llm:
        assert run(llm) == []
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert not settings_of(llm.llm_engine.vllm_config).options.has_trees


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chains_are_ours_where_their_rows_share_loads(dtype):
    # In AMX's layout, of bfloat16, vLLM's shares them too.
    shares_loads = dtype == "float32" or not torch.cpu._is_amx_tile_supported()
    steps = steps_of("priced", dtype)
    chains = [built for step, _, built in steps if any(step.num_nodes) and step.trees.are_chains]
    assert chains
    assert {isinstance(built, TreeMetadata) for built in chains} == {shares_loads}
