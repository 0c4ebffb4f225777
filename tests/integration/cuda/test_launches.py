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
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    LLM_ARGUMENTS,
    TREE,
    tokens_of,
    with_sizes,
)
from tests.integration.engines import TARGET, core, engine, runner
from tests.integration.models import heads
from vllm_recycle.integration.cuda import backend

pytestmark = pytest.mark.slow

TABLE = Path(__file__).with_name("v2_launches.json")
SAMPLED = {**GREEDY, "temperature": 0.9, "seed": 7, "min_p": 0.02}
NODES = TREE.num_nodes
KINDS = {
    "vllm": "vLLM without speculation",
    "vllm, sampled": "the same with sampling parameters",
    "grown": "a grown tree for each request",
    "grown, sampled": "the same with sampling parameters",
    "grown, size 0": "trees that are not worth their time",
    "template": "a tree of one template for each request",
    "template, size 0": "a template, where the schedule says 0",
    "head": "a tree along a trunk of two tokens of an EAGLE head, beside the head's two forwards",
}
WITH_TREES = {"grown", "grown, sampled", "template", "head"}
ATTENTION = "attention of a layer"
# Of a kind, so that a step that looks at trees, or ends a request, is not taken for it.
LEAST_STEPS = 2
# Operators that are no launch, beside those that make a view.
TAKE_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_what_the_table_says_whatever_the_batch(result, kind):
    assert result[kind] == json.loads(TABLE.read_text())[kind]
    assert len(result[kind]["batches"]) > 1


class Launches(TorchDispatchMode):
    """Counts launches by part of a step, in the functions that are told to be parts.

    A launch is a kernel of Triton or an operator of torch, those of vLLM's sampler among them. No
    launch are operators that make a view or take memory. Nor are copies from the host seen where
    the device is the host; a step that only decodes has none.

    Attributes:
        counts: by part and name.
        part: of the step, where it is now; None where nothing is counted.

    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Counter[str]] = {}
        self.part: str | None = None
        self._is_on = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        # In inference mode an operator comes here before it is taken apart.
        with self:
            result = operator.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in TAKE_MEMORY:
            self._count(name)
        return operator(*args, **(kwargs or {}))

    def within(self, part: str | None, function: Callable) -> Callable:
        """The function, whose launches are those of a part, or of none."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            outer = self.part, self._is_on
            mode = nullcontext() if self._is_on else self
            self.part, self._is_on = part, True
            try:
                with mode:
                    return function(*args, **kwargs)
            finally:
                self.part, self._is_on = outer

        return called

    def count_kernels(self) -> None:
        """See those of Triton too; to be called once in a process."""
        from triton.runtime.interpreter import InterpretedFunction

        # What the interpreter does for a kernel is none of a device's.
        run = self.within(None, InterpretedFunction.run)

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self._count(kernel.__name__)
            return run(kernel, *args, **kwargs)

        InterpretedFunction.run = launched

    def take(self) -> dict[str, dict[str, int]]:
        """What was counted since the last time."""
        taken = {part: dict(sorted(names.items())) for part, names in sorted(self.counts.items())}
        self.counts = {}
        return taken

    def _count(self, name: str) -> None:
        if self.part is not None:
            self.counts.setdefault(self.part, Counter())[name] += 1


@dataclass
class Steps:
    """In the process with the engines: what the steps of a kind launched, by batch.

    Attributes:
        launches: what counts them.
        layers: of the model.
        kind: of the steps to come.

    """

    launches: Launches
    layers: int = 0
    kind: str = ""
    counted: dict[str, dict[int, Counter[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )

    def watch(self, model_runner: Any) -> None:
        """Count those of a runner."""
        self.layers = model_runner.model_config.hf_config.num_hidden_layers
        within, speculator = self.launches.within, model_runner.speculator
        model, sample = model_runner.model, model_runner.sample
        sample_tokens = model_runner.sample_tokens
        batches: list[Any] = []

        def watched_sample(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            batches.append(input_batch)
            return sample(hidden_states, input_batch, grammar_output)

        def watched_sample_tokens(*args: Any) -> Any:
            output = sample_tokens(*args)
            if batches:
                self._end(batches.pop())
            return output

        model_runner.sample_tokens = watched_sample_tokens
        model_runner.sample = within("sampling", watched_sample)
        model.compute_logits = within(None, model.compute_logits)
        if speculator is not None:
            model_runner.prepare_attn = within("placing", model_runner.prepare_attn)
            speculator.propose = within("drafting", speculator.propose)
            if (head := getattr(speculator, "model", None)) is not None:
                head.forward = within(None, head.forward)
                head.compute_logits = within(None, head.compute_logits)

    def _end(self, batch: Any) -> None:
        """A step has ended."""
        launched = self.launches.take()
        if ATTENTION in launched:
            of_layers = launched[ATTENTION].items()
            launched[ATTENTION] = {name: count // self.layers for name, count in of_layers}
        nodes = batch.num_draft_tokens_per_req
        nodes = 0 if nodes is None else nodes
        decodes = bool((batch.num_scheduled_tokens == 1 + nodes).all())
        if decodes and (batch.num_draft_tokens > 0) == (self.kind in WITH_TREES):
            self.counted[self.kind][batch.num_reqs][json.dumps(launched)] += 1

    def usual(self, kind: str) -> dict[str, Any]:
        """What a step of a kind launches, whatever the batch; fails where that differs."""
        batches = {}
        for batch, steps in self.counted[kind].items():
            if batch == 1 and kind == "head":  # spares torch two copies
                continue
            (launched, count), *_ = steps.most_common(1)
            assert count >= LEAST_STEPS, (kind, batch, steps)
            batches[batch] = json.loads(launched)
        launched, *others = batches.values()
        assert all(other == launched for other in others), (kind, batches)
        total = {part: sum(names.values()) for part, names in launched.items()}
        return {"what": KINDS[kind], "batches": sorted(batches), "total": total, **launched}


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without speculation, grown trees, and a template."""
    launches = Launches()
    launches.count_kernels()
    GPUModelRunner.prepare_attn = launches.within(None, GPUModelRunner.prepare_attn)
    backend.tree_attention = launches.within(ATTENTION, backend.tree_attention)
    steps = Steps(launches)

    def serve(llm: Any, kind: str, params: dict[str, Any], *batches: int) -> None:
        steps.kind = kind
        for batch in batches:
            tokens_of(llm, [((i, i + 12), params) for i in range(batch)])

    with engine(**LLM_ARGUMENTS) as llm:
        steps.watch(runner(llm))
        serve(llm, "vllm", GREEDY, 1, 2)
        serve(llm, "vllm, sampled", SAMPLED, 1, 2)
    with engine(GROWN, **LLM_ARGUMENTS) as llm:
        steps.watch(runner(llm))
        for kind, params, nodes in (
            ("grown", GREEDY, NODES),
            ("grown, sampled", SAMPLED, NODES),
            ("grown, size 0", GREEDY, 0),
        ):
            # In the place of what chooses by worth.
            core(llm).scheduler.dynamic_sd_lookup = [nodes] * (1 + LLM_ARGUMENTS["max_num_seqs"])
            serve(llm, kind, params, 1, 2)
    TREE.save(folder / "tree.json")
    template = {"method": "token_recycling", "tree": str(folder / "tree.json")}
    with engine(with_sizes(template, [(1, 2, NODES), (3, 4, 0)]), **LLM_ARGUMENTS) as llm:
        steps.watch(runner(llm))
        serve(llm, "template", GREEDY, 1, 2)
        serve(llm, "template, size 0", GREEDY, 3, 4)
    trunk = {"method": "eagle", "model": heads.eagle(folder / "head"), "num_speculative_tokens": 2}
    along = with_sizes({**GROWN, "trunk": trunk}, [(1, 4, NODES)])
    more = {"model": TARGET, "num_gpu_blocks_override": 24}
    with engine(along, **LLM_ARGUMENTS | more) as llm:
        steps.watch(runner(llm))
        serve(llm, "head", GREEDY, 2, 3)
    return {kind: steps.usual(kind) for kind in KINDS}
