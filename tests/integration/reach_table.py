"""Where vLLM's `ngram` and Token Recycling run, and whether the tokens are those without them.

    python tests/integration/reach_table.py > examples/reach.md

Each cell is an engine in a process of its own, on the CPU, in float32; drafts cost nothing, so that
they are made. The models are small: see `derived_models`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
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


def rows() -> dict[str, tuple[Callable[[Path], str] | None, dict[str, Any], Any]]:
    """By name: what makes the model, or none for the target; engine settings; prompts."""
    from derived_models import gemma4, with_windows
    from test_architectures import KINDS
    from test_reach import ROWS, texts

    windows = partial(with_windows, window=24, windowed="fssfss")
    return {
        "the embedded target": (None, {}, texts),
        "sliding windows": (windows, {}, texts),
        "a shared KV cache (Gemma 4)": (gemma4, {}, texts),
        **{name: (make, settings, texts) for name, (make, settings) in KINDS.items()},
        **{name: row[:3] for name, row in ROWS.items()},
    }


def measure(name: str, method: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Outputs of two passes and what was accepted, in a process of its own."""
    from engines import TARGET, counter, engine, generate
    from vllm import SamplingParams

    make, settings, prompts_of = rows()[name]
    model = TARGET if make is None else make(folder / "model")
    if "kv_transfer_config" in settings:
        place = {"kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")}}
        settings = {"kv_transfer_config": settings["kv_transfer_config"] | place}
    with engine(method, model=model, **settings) as llm:
        prompts = prompts_of(llm)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = [one for _ in range(2) for one in generate(llm, prompts, params)]
        names = ("drafts", "accepted_tokens")
        drafts, accepted = (counter(llm, f"spec_decode_num_{name}") for name in names)
        kind = ""
        if method is not None and method["method"] == "token_recycling":
            from vllm_recycle.integration.options import options_of

            is_chain = not options_of(llm.llm_engine.vllm_config).has_trees
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
        from engines import GROWN

        name, method, folder = given
        methods = {"none": None, "ngram": NGRAM, "ours": GROWN}
        found = measure(name, methods[method], Path(folder))
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
