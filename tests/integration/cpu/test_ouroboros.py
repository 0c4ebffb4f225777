"""Ouroboros in the engine: its drafts and its pool, step by step, against a slow reference."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.core.slow_ouroboros import Phrase, SlowOuroboros, load
from tests.integration.engines import (
    EXAMPLES,
    OUROBOROS,
    SMALL_OUROBOROS,
    TARGET,
    TRUNK,
    core,
    counter,
    engine,
    generate,
    read_prompts,
    runner,
)
from tests.integration.models.random_models import gemma4
from tests.kernels.cpu.cache_layouts import gather_keys_values
from vllm_recycle.core.choose import Chooser
from vllm_recycle.core.curve import Load
from vllm_recycle.core.draft import Drafts
from vllm_recycle.integration.cpu.runner import TreeCPUModelRunner
from vllm_recycle.integration.cpu.trunk import FORWARDS

DRAFT = EXAMPLES / "models" / "draft"
PROMPTS = [
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Question: Tom has 12 apples and eats 3. How many apples are left?\nAnswer:",
]
SIZES = {
    **{"gamma": 6, "window": 8, "guesses": 4, "phrase_length": 5, "branches": 2},
    "max_forwards": 6,
}
NUM_TOKENS = 40
PRICED = {**TRUNK, "row_cost": None}


@pytest.mark.parametrize("method", [TRUNK, SMALL_OUROBOROS], ids=["grown", "published"])
def test_a_draft_model_that_fails_to_say_a_number_does_no_harm(method, monkeypatch):
    params, num_calls = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), 0
    with engine() as llm:
        expected = generate(llm, PROMPTS, params)
    with engine(method) as llm:
        model = runner(llm).drafter.model
        compute_logits = model.compute_logits

        def with_nan(hidden: Any, *args: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            logits = compute_logits(hidden, *args)
            return logits.fill_(torch.nan) if num_calls in (2, 3) else logits

        monkeypatch.setattr(model, "compute_logits", with_nan)
        assert generate(llm, PROMPTS, params) == expected
        assert num_calls > 6
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


# Of each round the trunk, the branches, and the draft model's forwards.
Drafted = list[tuple[list[int], list[Phrase], int]]


def run_slowly(token_ids: list[list[int]], options: dict) -> tuple[Drafted, list, dict]:
    """Rounds of all prompts, their outputs and the pool."""
    slow = SlowOuroboros(load(TARGET), load(DRAFT), **SIZES | options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices
    rounds, outputs = [], []
    for prompt in token_ids:
        sequence = slow.begin_behind(prompt)
        while len(sequence.token_ids) - len(prompt) < NUM_TOKENS:
            done = slow.step(sequence)
            rounds.append((done.trunk, done.branches, done.draft_forwards))
        outputs.append(tuple(sequence.token_ids[len(prompt) :][:NUM_TOKENS]))
        rounds.append(([], [], 0))  # what has all its tokens is not drafted for
    torch.set_num_threads(threads)
    return rounds, outputs, {token: phrases for token, phrases in slow.pool.items() if phrases}


def run_engine(token_ids: list[list[int]], options: dict) -> tuple[Drafted, list, dict]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    rounds = []
    with engine({**OUROBOROS, **SIZES, **options, "row_cost": 0}) as llm:
        drafter = runner(llm).tree_drafter
        proposer, draft = drafter.proposer, drafter.draft

        def recorded(*args: Any) -> Drafts:
            before = proposer.num_forwards
            made = draft(*args)
            drafts, gamma = made.token_ids[0], proposer.shape.gamma
            trunk = [token for token in drafts[:gamma] if token >= 0]
            branches = torch.tensor(drafts[gamma:]).view(-1, proposer.shape.length).tolist()
            there = [tuple(branch) for branch in branches if branch[0] >= 0]
            rounds.append((trunk, there, proposer.num_forwards - before))
            return made

        drafter.draft = recorded
        prompts = [[{"prompt_token_ids": prompt}] for prompt in token_ids]
        outputs = [generate(llm, prompt, params)[0][0] for prompt in prompts]
        pool = {
            token: [tuple(phrase) for phrase in phrases if phrase[0] >= 0]
            for token, phrases in enumerate(proposer.pool.phrases.tolist())
        }
    return rounds, outputs, {token: phrases for token, phrases in pool.items() if phrases}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"max_forwards": 2, "harvest_trunk": False, "harvest_branches": False},
            marks=pytest.mark.slow,
        ),
        # Fewer guesses than branches.
        pytest.param({"window": 0, "guesses": 1}, marks=pytest.mark.slow),
        pytest.param({"guesses": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_and_pool_equal_those_of_the_slow_reference(options):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    token_ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    rounds, outputs, pool = run_engine(token_ids, options)
    assert (rounds, outputs, pool) == run_slowly(token_ids, options)
    assert len(pool) > (50 if options.get("window", 1) else 5)


def test_a_draft_model_whose_layers_share_a_kv_cache_is_refused(tmp_path):
    method = {**OUROBOROS, "model": gemma4(tmp_path / "gemma4")}
    message = "layers share a KV cache, as draft_model.model.layers.2.self_attn.attn does"
    with pytest.raises(NotImplementedError, match=message), engine(method, load_format="dummy"):
        pass


def test_start_up_says_what_rounds_take_and_the_chooser_knows_what_is_left(monkeypatch):
    known, said = [], []
    price_rows = TreeCPUModelRunner.price_rows

    def choose_trunks(chooser, load, rate, *, num_left, reading, is_look):
        known.append((float(reading[0]), int(num_left[0])))
        return num_left < 0

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (prompt,) = read_prompts(1)
    priced = lambda self: said.append(price_rows(self)) or said[0]  # noqa: E731
    monkeypatch.setattr(TreeCPUModelRunner, "price_rows", priced)
    monkeypatch.setattr(Chooser, "choose_trunks", choose_trunks)
    # Blocks that are not there yet do not make an answer shorter.
    with engine(PRICED, block_size=32) as llm:
        drafter = runner(llm).tree_drafter
        cost = FORWARDS * drafter.forward_seconds[1] / drafter.curve.plain(Load(1))
        token_seconds = drafter.token_seconds
        num_unseen = len(llm.get_tokenizer().encode(prompt)) - 1 - drafter.gamma
        assert len(generate(llm, [prompt], params)[0][0]) == 40
        generate(llm, [prompt], params)  # vLLM says with the next step who ended
        mean_length = drafter.mean_length
    sentence = r"forwards of the draft model take, in parts of a step, (.*) for 1, .* requests"
    found = re.search(sentence, said[0])
    assert cost > 0
    assert found
    assert float(found[1]) == pytest.approx(cost, abs=0.006)
    # The steps before had no drafts, as each at a load that is new.
    plain = 38 - known[0][1]
    assert 0 < plain < 6
    assert known[0][0] == pytest.approx(token_seconds * (num_unseen + plain))
    assert mean_length == (40.0, 1)
    assert known[-1][1] <= 40


# The same products in GEMMs of other shapes; keys and values are of order one to ten.
TOLERANCE = 2e-3
# Chunked prefill; room for about three of the eight requests; prefixes that come again.
SCARCE = {
    "block_size": 32,
    "num_gpu_blocks_override": 26,
    "max_num_seqs": 8,
    "max_model_len": 640,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
}


@torch.no_grad()
def largest_difference(llm: Any, request: Any, draft: Any) -> float:
    """Between the draft's cache and a fresh computation, over the tokens of a request's text."""
    drafter = runner(llm).tree_drafter
    known = int(drafter.num_cached[runner(llm).req_state_indices[request.request_id]])
    if not known:
        return 0.0  # it has nothing of it yet
    (blocks,) = core(llm).scheduler.kv_cache_manager.get_block_ids(request.request_id)
    layers = runner(llm).compilation_config.static_forward_context
    cache = draft(torch.tensor([request.all_token_ids[:known]]), use_cache=True).past_key_values
    differences = []
    for name, fresh in zip(sorted(drafter.attention_layers), cache.layers, strict=True):
        pair = gather_keys_values(layers[name].kv_cache, blocks, layers[name].isa)
        for held, expected in zip(pair, (fresh.keys, fresh.values), strict=True):
            differences.append((held[:known].transpose(0, 1)[None] - expected).abs().max())
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("method", [SMALL_OUROBOROS, PRICED], ids=["every step", "priced"])
def test_the_draft_s_keys_and_values_are_those_of_the_text(method, monkeypatch):
    """Of every running request after some steps, with each kind of event among them."""
    draft, found = load(DRAFT), []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(method, **SCARCE) as llm:
        prompts = read_prompts(10)
        # The last ones are in the cache still.
        for turn, batch in enumerate((prompts, prompts[::-1])):

            def choose_trunks(chooser, load, rate, *, num_left, turn=turn, **kwargs):
                # Where rounds are priced, at first there are some of a part of the requests.
                return (num_left > 0) & (np.arange(len(num_left)) % 3 < 1 + 2 * turn)

            monkeypatch.setattr(Chooser, "choose_trunks", choose_trunks)
            for number, prompt in enumerate(batch):
                llm.llm_engine.add_request(f"{turn} {number}", prompt, params)
            step = 0
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
                step += 1
                running = core(llm).scheduler.running if step % 4 == 0 else ()
                found += [largest_difference(llm, request, draft) for request in running]
        counted = ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens")
        assert min(counter(llm, name) for name in counted) > 0
    assert len(found) > 50
    assert max(found) < TOLERANCE
