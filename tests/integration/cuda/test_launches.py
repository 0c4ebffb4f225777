"""What a step of decoding launches on Model Runner V2 beyond the target's forward.

`v2_launches.json` has it by kind of step, and of each part of a step by the name of what is
launched. In the forward, and so in a CUDA graph where the step has one, ours is the attention of
each layer to trees. Before it trees are placed; behind it tokens are sampled, walked and learnt
from; then drafts are made. Beside ours stand vLLM's own steps. The table has to be written anew
where a step launches less, so that it can only go down:

    cd tests/integration/cuda
    PYTHONPATH=../../.. python -m tests.integration.cuda.v2_scripts \
        test_launches.py v2_launches.json /tmp
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.integration.cuda.v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, TREE, tokens_of
from tests.integration.engines import TARGET, core, engine, runner
from tests.integration.models import heads
from vllm_recycle.integration.cuda import backend

pytestmark = pytest.mark.slow

TABLE = Path(__file__).with_name("v2_launches.json")
SAMPLED = {**GREEDY, "temperature": 0.9, "seed": 7, "min_p": 0.02}
NODES, MOST = TREE.num_nodes, LLM_ARGUMENTS["max_num_seqs"]
HEAD = "a tree along a trunk of two tokens of an EAGLE head, beside the head's two forwards"
# Of a step: in words, the sampling parameters, and how many requests it may have.
KINDS = {
    "vllm": ("vLLM without speculation", GREEDY, (1, 2)),
    "vllm, sampled": ("the same with sampling parameters", SAMPLED, (1, 2)),
    "grown": ("a grown tree for each request", GREEDY, (1, 2)),
    "grown, sampled": ("the same with sampling parameters", SAMPLED, (1, 2)),
    "grown, size 0": ("trees that are not worth their time", GREEDY, (1, 2)),
    "template": ("a tree of one template for each request", GREEDY, (1, 2)),
    "template, size 0": ("a template, where the schedule says 0", GREEDY, (3, 4)),
    # One request spares torch two copies.
    "head": (HEAD, GREEDY, (2, 3)),
}
WITH_TREES = {"grown", "grown, sampled", "template", "head"}
ATTENTION, NO_PART = "attention of a layer", ""
# Of a kind, so that a step that looks at trees, or ends a request, is not taken for it.
LEAST_STEPS = 2
# Operators that are no launch, beside those that make a view.
TAKE_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_what_the_table_says_whatever_the_batch(result, kind):
    assert result[kind] == json.loads(TABLE.read_text())[kind]


class Launches(TorchDispatchMode):
    """Counts launches by part of a step, in the functions that are told to be parts.

    A launch is a kernel of Triton or an operator of torch, those of vLLM's sampler among them. No
    launch are operators that make a view or take memory. Nor are copies from the host seen where
    the device is the host; a step that only decodes has none.

    Attributes:
        kind: of the steps to come.
        part: of the step, where it is now; `NO_PART` within others, and None outside of all.
        counts: of the step, by part and name.
        steps: how many launched what, by kind and batch.

    """

    def __init__(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        super().__init__()
        self.kind, self.part = "", None
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.steps: dict[str, dict[int, Counter[str]]] = {}
        # What the interpreter does for a kernel is none of a device's.
        run = self.within(NO_PART, InterpretedFunction.run)

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[self.part][kernel.__name__] += 1
            return run(kernel, *args, **kwargs)

        InterpretedFunction.run = launched

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        # In inference mode an operator comes here before it is taken apart.
        with self:
            result = operator.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in TAKE_MEMORY:
            self.counts[self.part][name] += 1
        return operator(*args, **(kwargs or {}))

    def within(self, part: str, function: Callable) -> Callable:
        """The function, whose launches are those of a part, or of none."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            outer, self.part = self.part, part
            try:
                with self if outer is None else nullcontext():
                    return function(*args, **kwargs)
            finally:
                self.part = outer

        return called

    def watch(self, model_runner: Any) -> None:
        """Count those of a runner's steps."""
        within, speculator = self.within, model_runner.speculator
        layers, model = model_runner.model_config.hf_config.num_hidden_layers, model_runner.model
        sample_tokens = model_runner.sample_tokens

        def watched(*args: Any) -> Any:
            state = model_runner.execute_model_state
            output = sample_tokens(*args)
            if state is not None:
                self._end(state.input_batch, layers)
            return output

        model_runner.sample_tokens = watched
        model_runner.sample = within("sampling", model_runner.sample)
        model.compute_logits = within(NO_PART, model.compute_logits)
        if speculator is not None:
            model_runner.prepare_attn = within("placing", model_runner.prepare_attn)
            speculator.propose = within("drafting", speculator.propose)
            if (head := getattr(speculator, "model", None)) is not None:
                head.forward = within(NO_PART, head.forward)
                head.compute_logits = within(NO_PART, head.compute_logits)

    def _end(self, batch: Any, layers: int) -> None:
        """A step has ended."""
        launched = {part: dict(names) for part, names in self.counts.items() if part}
        self.counts.clear()
        if ATTENTION in launched:
            of_layers = launched[ATTENTION].items()
            launched[ATTENTION] = {name: count // layers for name, count in of_layers}
        nodes = batch.num_draft_tokens_per_req if batch.num_draft_tokens else 0
        decodes = bool((batch.num_scheduled_tokens == 1 + nodes).all())
        if decodes and (batch.num_draft_tokens > 0) == (self.kind in WITH_TREES):
            steps = self.steps.setdefault(self.kind, defaultdict(Counter))
            steps[batch.num_reqs][json.dumps(launched, sort_keys=True)] += 1

    def usual(self, kind: str) -> dict[str, Any]:
        """What a step of a kind launches, whatever the batch; fails where that differs."""
        what, _, sizes = KINDS[kind]
        usual = {size: self.steps[kind][size].most_common(1)[0] for size in sizes}
        assert min(count for _, count in usual.values()) >= LEAST_STEPS, (kind, self.steps[kind])
        [launched] = {launched for launched, _ in usual.values()}
        launched = json.loads(launched)
        total = {part: sum(names.values()) for part, names in launched.items()}
        return {"what": what, "batches": sorted(usual), "total": total, **launched}


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines."""
    launches = Launches()
    GPUModelRunner.prepare_attn = launches.within(NO_PART, GPUModelRunner.prepare_attn)
    backend.tree_attention = launches.within(ATTENTION, backend.tree_attention)
    TREE.save(folder / "tree.json")
    template = {"method": "token_recycling", "tree": str(folder / "tree.json")}
    trunk = {"method": "eagle", "model": heads.eagle(folder / "head"), "num_speculative_tokens": 2}
    sizes = "num_speculative_tokens_per_batch_size"
    template[sizes], along = [(1, 2, NODES), (3, 4, 0)], {**GROWN, "trunk": trunk}
    along[sizes] = [(1, 4, NODES)]
    for method, more, kinds in (
        (None, {}, ("vllm", "vllm, sampled")),
        (GROWN, {}, ("grown", "grown, sampled", "grown, size 0")),
        (template, {}, ("template", "template, size 0")),
        (along, {"model": TARGET, "num_gpu_blocks_override": 24}, ("head",)),
    ):
        with engine(method, **LLM_ARGUMENTS | more) as llm:
            launches.watch(runner(llm))
            for kind in kinds:
                if method is GROWN:  # in the place of what chooses by worth
                    nodes = 0 if kind == "grown, size 0" else NODES
                    core(llm).scheduler.dynamic_sd_lookup = [nodes] * (1 + MOST)
                launches.kind, (_, params, batches) = kind, KINDS[kind]
                for batch in batches:
                    tokens_of(llm, [((i, i + 12), params) for i in range(batch)])
    return {kind: launches.usual(kind) for kind in KINDS}
