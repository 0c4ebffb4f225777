"""After many tree steps the paged cache holds what plain decoding would have put there."""

from __future__ import annotations

import torch
from vllm import SamplingParams

from tests.integration.engines import PAPER, core, engine, read_prompts, runner
from tests.kernels.cpu.cache_layouts import gather_keys_values
from vllm_recycle.integration.cpu import accepted_step
from vllm_recycle.kernels.cpu.kv_cache import slot_elements

NUM_TOKENS = 60
# The same products in GEMMs of other shapes; keys and values are of order one to ten.
TOLERANCE = 2e-3


def cache_of_running_request(llm) -> torch.Tensor:
    """Keys and values of the first tokens of the only request, [2, layers, heads, tokens, dim]."""
    request = core(llm).scheduler.running[0]
    known = min(request.num_computed_tokens, request.num_prompt_tokens + NUM_TOKENS)
    (blocks,) = core(llm).scheduler.kv_cache_manager.get_block_ids(request.request_id)
    layers = runner(llm).compilation_config.static_forward_context.values()
    pairs = [gather_keys_values(layer.kv_cache, blocks, layer.isa) for layer in layers]
    sides = [torch.stack(side)[:, :known].transpose(1, 2) for side in zip(*pairs, strict=True)]
    return torch.stack(sides)


def run(method) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS + 40, ignore_eos=True)
    with engine(method, max_num_seqs=1, block_size=32) as llm:
        llm.llm_engine.add_request("0", read_prompts(2)[1], params)
        while len(core(llm).scheduler.running) == 0 or (
            core(llm).scheduler.running[0].num_output_tokens <= NUM_TOKENS
        ):
            llm.llm_engine.step()
        return cache_of_running_request(llm)


def test_cache_equals_that_of_plain_decoding_and_moves_are_exact(monkeypatch):
    moved, real_move_slots = [], accepted_step.move_slots

    def checked(kv_caches, source, target, *, isa):
        shape = kv_caches[0].shape
        before = [
            cache.view(-1)[slot_elements(source, shape=shape, isa=isa)] for cache in kv_caches
        ]
        real_move_slots(kv_caches, source, target, isa=isa)
        for cache, values in zip(kv_caches, before, strict=True):
            assert (cache.view(-1)[slot_elements(target, shape=shape, isa=isa)] == values).all()
        moved.append(len(source))

    monkeypatch.setattr(accepted_step, "move_slots", checked)
    torch.testing.assert_close(run(PAPER), run(None), atol=TOLERANCE, rtol=0)
    assert sum(moved) > 10
