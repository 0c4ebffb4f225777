"""Engines with a draft model on Model Runner V2: their steps, drafts and caches are watched."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

from tests.core.slow_ouroboros import load
from tests.integration.cuda import v2_graphs
from tests.integration.cuda.v2_engines import LLM_ARGUMENTS, Waits, unwatched, watch_moves
from tests.integration.engines import OUROBOROS, core, runner
from vllm_recycle.core.curve import TREES, TRUNKS
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import ChoiceAcceptance
from vllm_recycle.integration.cuda.ouroboros.drafter import TrunkV2Drafter

# Of the rounds.
SIZES = {"gamma": 3, "window": 3, "guesses": 2, "phrase_length": 4, "branches": 2}


class Watch:
    """In the process with the engines: counts what the steps are like, and checks the cache."""

    def __init__(self, llm: Any) -> None:
        self.runner, self.scheduler = runner(llm), core(llm).scheduler
        self.waits, self.seen, self.draft = Waits(), Counter(), load(OUROBOROS["model"])
        self.cache_error = 0.0
        # Of trunks: the last of each request with the length of its text, and what they teach.
        self.trunks, self.choices = {}, ChoiceAcceptance(torch.zeros(1))
        # By the number of a request: what was drafted for it, and the index of its state.
        self.rounds, self.states = defaultdict(list), {}
        self.schedule, self.scheduler.schedule = self.scheduler.schedule, self.watched_schedule
        self.speculator = speculator = self.runner.speculator
        self.propose, speculator.propose = speculator.propose, self.watched_propose
        in_vain = "draft forwards without drafts"
        speculator.model.register_forward_pre_hook(
            lambda *_: self.seen.update({in_vain: not self.drafts_now})
        )
        self.draft_round, speculator.draft = speculator.draft, self.watched_round
        self.take_in, speculator._take_in = speculator._take_in, self.watched_take_in
        unwatched(speculator, "_build_attn_metadata")
        # What was never written is not read.
        context = self.runner.compilation_config.static_forward_context
        for layer_name in speculator.draft_attn_layer_names:
            context[layer_name].kv_cache.fill_(torch.nan)
        self.drafts_now = True
        # Of so many steps in a row either all have rounds or none; 0 where all may have them.
        self.held_steps = self.num_steps = 0
        self.launches = defaultdict(list)
        self.moved = watch_moves()
        self.waits.watch(self.runner.tree_drafter, "observe")
        self.waits.watch(self.runner, "add_requests")

    def counted(self, name: str, function: Any) -> Any:
        """The function, with its launches counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            graph = v2_graphs.Graph()
            with v2_graphs.record(graph):
                result = function(*args, **kwargs)
            self.launches[name].append(graph.num_kernels)
            return result

        return call

    def watched_schedule(self, *args: Any) -> Any:
        ahead = any(request.num_output_placeholders for request in self.scheduler.running)
        output = self.schedule(*args)
        self.seen["ahead"] += ahead
        self.num_steps += 1
        if self.held_steps:
            is_alone = self.num_steps // self.held_steps % 2 == 1
            output.step_note.kind = TREES if is_alone else TRUNKS
        for request in output.scheduled_new_reqs:
            found = request.num_computed_tokens // LLM_ARGUMENTS["block_size"]
            self.seen["tokens from the prefix cache"] += request.num_computed_tokens
            is_marked = self.speculator.cache.blocks.is_marked[request.block_ids[0][:found]]
            self.seen["blocks in vain"] += int((~is_marked).sum())
        return output

    def watched_round(self, idx_mapping: torch.Tensor) -> None:
        self.seen[f"rounds of {len(idx_mapping)}"] += 1
        self.draft_round(idx_mapping)

    def watched_take_in(self, input_batch: Any, counts: Any) -> None:
        self.seen["catching up without a prompt"] += not input_batch.has_prefill
        self.take_in(input_batch, counts)

    def watched_propose(self, input_batch: Any, *args: Any, **given: Any) -> torch.Tensor:
        num_nodes = input_batch.num_draft_tokens_per_req
        trees = 0 if num_nodes is None else int((num_nodes > 0).sum())
        kind = {0: "only plain rows", input_batch.num_reqs: "only trees"}.get(trees, "both")
        self.seen[kind] += 1
        self.drafts_now = bool(given["num_speculative_tokens"])
        self.seen["steps without drafts"] += not self.drafts_now
        self.seen["trees that are the last"] += trees > 0 and not self.drafts_now
        with self.waits:
            drafts = self.propose(input_batch, *args, **given)
        is_trunk = isinstance(self.runner.tree_drafter, TrunkV2Drafter)
        look = self.check_trunk if is_trunk else self.record_round
        for place, state in enumerate(input_batch.idx_mapping_np):
            number = input_batch.req_ids[place].split("-")[0]
            self.states[number] = int(state)
            has_round = look(number, state, drafts[place])
            self.check_cache(place, state, has_draft=has_round)
        return drafts

    @torch.no_grad()
    def check_trunk(self, number: str, state: int, draft: torch.Tensor) -> bool:
        """Whether the request has a trunk; it against the draft model, computed anew."""
        drafter, length = self.runner.tree_drafter, int(self.runner.req_states.total_len.gpu[state])
        found = Trunks(drafter.trunks.token_ids[state], drafter.last_trunks.probabilities[state])
        has_trunk = self.drafts_now and bool(found.token_ids[0, 0] >= 0)
        if not has_trunk:
            self.seen["trees without a trunk"] += self.drafts_now and bool(draft[0] >= 0)
            return False
        text = self.runner.req_states.all_token_ids.gpu[state, :length].long()
        if number in self.trunks:
            before, old_length = self.trunks[number]
            follows = text[old_length:][: SIZES["gamma"]]
            self.choices.classes = drafter.state.matrix.classes
            self.choices.count(before, torch.tensor([int(state)]), follows[None])
        trunk = found.token_ids[:, 0]
        logits = self.draft(torch.cat((text, trunk))[None, :-1]).logits[0, length - 1 :]
        chances, token_ids = logits.softmax(-1).topk(found.token_ids.shape[1])
        is_equal = found.token_ids.equal(token_ids) and found.chances.allclose(chances, atol=1e-4)
        self.seen["trunks"] += 1
        # What lies behind the end of the context is computed for nothing.
        fits = length + len(trunk) <= LLM_ARGUMENTS["max_model_len"]
        self.seen["other trunks"] += fits and not is_equal
        drafted = draft[draft >= 0].tolist()
        self.seen["tokens beside trunks"] += len({*drafted} - {*trunk.tolist()})
        self.rounds[number].append([trunk.tolist(), drafted])
        self.trunks[number] = Trunks(*(values[None].clone() for values in found)), length
        return True

    def record_round(self, number: str, _: int, draft: torch.Tensor) -> bool:
        gamma, length = SIZES["gamma"], SIZES["phrase_length"] - 1
        trunk = [token for token in draft[:gamma].tolist() if token >= 0]
        branches = draft[gamma:].view(-1, length).tolist()
        if trunk:
            self.rounds[number].append([trunk, [branch for branch in branches if branch[0] >= 0]])
        return bool(trunk)

    @torch.no_grad()
    def check_cache(self, place: int, state: int, *, has_draft: bool) -> None:
        """The draft's keys and values of a request, against those of its text computed anew."""
        states, tables = self.runner.req_states, self.runner.block_tables.input_block_tables
        num_cached = int(self.speculator.cache.num_cached[state])
        is_behind = num_cached < int(states.num_computed_tokens.gpu[state])
        self.seen["caches behind the text"] += is_behind
        self.seen["drafts behind a part of the text"] += is_behind and has_draft
        if not num_cached:
            return
        text = states.all_token_ids.gpu[state, :num_cached].long()
        expected = self.draft(text[None], use_cache=True).past_key_values
        block_size, token = LLM_ARGUMENTS["block_size"], torch.arange(num_cached)
        blocks = tables[0][place][token // block_size].long()
        context = self.runner.compilation_config.static_forward_context
        for index, layer in enumerate(expected.layers):
            kv_cache = context[f"draft_model.model.layers.{index}.self_attn.attn"].kv_cache
            pairs = torch.cat((layer.keys, layer.values), dim=-1)[0].transpose(0, 1)
            found = kv_cache[blocks, :, token % block_size]
            error = float((found - pairs).abs().nan_to_num(torch.inf).max())
            self.cache_error = max(self.cache_error, error)
        self.seen["checked caches"] += 1


def capture_rounds(watch: Watch) -> None:
    """As the start of an engine does on a GPU; and count what is launched beside them."""
    speculator, drafter = watch.speculator, watch.runner.tree_drafter
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL)
    speculator.capture()
    drafter.reset()
    replay = speculator.graphs.replay

    def replayed(batch: int) -> bool:
        with v2_graphs.unrecorded():
            return replay(batch)

    speculator.graphs.replay = replayed
    drafter.observe = watch.counted("observe", drafter.observe)
    watch.propose = watch.counted("propose", watch.propose)
