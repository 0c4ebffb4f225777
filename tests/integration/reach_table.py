"""Where vLLM's `ngram` and Token Recycling run, and whether the tokens are those without them.

    make vision
    .venv/bin/python tests/integration/reach_table.py > examples/reach.md

Each cell is an engine in a process of its own, on the CPU, in float32 unless a kernel of vLLM takes
none; drafts cost nothing, so that they are made. The models are small: see `derived_models`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
HEAD = """# Reach

Made by `python tests/integration/reach_table.py`: 6 greedy requests of 40 tokens, all in flight,
twice. A cell says how many of the 12 answers are those without speculation, and how many tokens of
a draft are accepted. What vLLM cannot run without speculation on the machine is left out. Where
trees do not go, Token Recycling drafts chains.

| | vLLM's `ngram` | Token Recycling |
| --- | --- | --- |"""


def rows() -> dict[str, Any]:
    """The kinds of models and flags, by name."""
    import cpu_torchvision

    cpu_torchvision.add()  # before transformers is imported
    import mrope_model
    from derived_models import deepseek, gemma4, with_windows
    from test_architectures import KINDS
    from test_reach import ROWS, Row

    mrope_model.register()
    windows = partial(with_windows, window=24, windowed="fssfss")
    return {
        "the embedded target": Row(),
        "sliding windows": Row(windows),
        "a shared KV cache (Gemma 4)": Row(gemma4),
        **{name: Row(make, settings) for name, (make, settings) in KINDS.items()},
        **ROWS,
        "MLA in bfloat16": Row(deepseek, {"dtype": "bfloat16"}),
    }


def measure(row: Any, method: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Outputs of two passes and what was accepted."""
    from engines import counter, engine, generate
    from vllm import SamplingParams

    with engine(method, **row.made(folder)) as llm:
        prompts = row.prompts(llm)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **row.params)
        outputs = [one for _ in range(2) for one in generate(llm, prompts, params)]
        names = ("drafts", "accepted_tokens")
        drafts, accepted = (counter(llm, f"spec_decode_num_{name}") for name in names)
        kind = ""
        if method is not None and method["method"] == "token_recycling":
            from vllm_recycle.integration.options import settings_of

            is_chain = not settings_of(llm.llm_engine.vllm_config).options.has_trees
            kind = "chains, " if is_chain else "trees, "
        return {"outputs": outputs, "kind": kind, "accepted": accepted / max(1, drafts)}


def cell(name: str, method: str) -> dict[str, Any]:
    """What a process has measured, or its last error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, method, folder]
        environment = {**os.environ, **ENVIRONMENT}
        run = subprocess.run(command, env=environment, capture_output=True, check=False)
        output = Path(folder) / "measured"
        if run.returncode == 0 and output.exists():
            return pickle.loads(output.read_bytes())
        said = [line for line in run.stderr.decode().splitlines() if "Error" in line]
        return {"error": said[-1] if said else f"exit status {run.returncode}"}


def described(found: dict[str, Any], plain: list[Any]) -> str:
    if "error" in found:
        return found["error"].partition("Error: ")[2].partition(";")[0] or found["error"]
    equal = sum(one == other for one, other in zip(found["outputs"], plain, strict=True))
    return f"{found['kind']}{equal} of {len(plain)}, {found['accepted']:.2f}"


def main(*given: str) -> None:
    if given:
        name, method, folder = given
        row = rows()[name]
        from engines import GROWN

        methods = {"none": None, "ngram": NGRAM, "ours": GROWN}
        found = measure(row, methods[method], Path(folder))
        (Path(folder) / "measured").write_bytes(pickle.dumps(found))
        return
    print(HEAD)
    for name in rows():
        plain = cell(name, "none")
        if "error" not in plain:
            cells = [
                described(cell(name, method), plain["outputs"]) for method in ("ngram", "ours")
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
