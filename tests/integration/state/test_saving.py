"""What is learnt is written while serving: whole, between steps, and kept when a worker is killed.

This file is also the script of an engine that is killed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from tests.integration.cuda.v2_engines import (
    GREEDY,
    IS_V2,
    LLM_ARGUMENTS,
    SCHEDULE,
    TREE,
    tokens_of,
    with_sizes,
)
from tests.integration.engines import (
    GROWN,
    OUROBOROS,
    core,
    counter,
    engine,
    generate,
    read_prompts,
    runner,
)
from vllm_recycle.core.paper.phrase_pool import PhrasePool
from vllm_recycle.core.state_place import StatePlace
from vllm_recycle.integration.state.saved_state import StateSaver

# Of each kind of state: a method, and the option that names its file.
KINDS = {"matrix": ({**GROWN, "context_mib": 1}, "matrix_file"), "pool": (OUROBOROS, "pool_file")}
TOKENS = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = read_prompts(3)
# Which tokens of TEXT each of several replicas has as prompts.
OF_REPLICAS = [[(0, 16)], [(0, 16), (20, 48)], []]
PATIENCE_S = 60.0


def saving(kind: str, path: Path, every: float) -> dict:
    method, option = KINDS[kind]
    return {**method, option: str(path), "save_every": every}


def learnt_by(llm: Any) -> str:
    return digest(runner(llm).tree_drafter.state.contents())


def written_in(path: Path) -> str | None:
    return digest(load_file(path)) if path.exists() else None


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    parts = [tensors[name].contiguous().numpy().tobytes() for name in sorted(tensors)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def plain() -> list:
    with engine() as llm:
        return generate(llm, PROMPTS, TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_written_while_serving_and_outputs_are_as_before(kind, plain, tmp_path):
    path = tmp_path / "state"
    with engine(saving(kind, path, 0.01)) as llm:
        time.sleep(0.2)
        assert not path.exists(), "expected nothing to be written before anything is learnt"
        assert generate(llm, PROMPTS, TOKENS) == plain
        assert core(llm).model_executor.collective_rpc("save_draft_state") == [str(path)]
        assert generate(llm, PROMPTS, TOKENS) == plain
        # An idle engine writes what its last steps taught, and then nothing.
        wait_until(lambda: written_in(path) == learnt_by(llm))
        time.sleep(0.2)
        written = path.stat().st_mtime_ns
        time.sleep(0.2)
        assert path.stat().st_mtime_ns == written
    assert path.stat().st_mtime_ns == written


def test_a_replica_starts_from_the_newest_file_and_writes_when_asked_and_at_the_end(served):
    first, second, third = served["replicas"]
    assert first["entries at the start"] == 0
    for replica, later in ((first, second), (second, third)):
        assert replica["files before"] == replica["files at the start"]
        assert replica["learnt"] != replica["known at the start"]
        assert replica["written"] == replica["learnt"]
        assert replica["written at the end"] == replica["learnt at the end"] != replica["learnt"]
        assert later["known at the start"] == replica["written at the end"]
    # Two that are torn, and the last: that of the first replica was old enough to be removed.
    assert third["files at the start"] == third["files at the end"]
    assert len(third["files at the end"]) == 3
    # What is known tells nothing.
    assert second["token ids"][:1] == first["token ids"]


def test_what_warm_up_steps_teach_is_forgotten(served):
    """V1 has no such steps."""
    assert 0 not in [replica["entries behind warm-up"] for replica in served["replicas"]]
    assert served["replicas"][0]["entries at the start"] == 0


def watched_warm_up() -> list[int]:
    """The entries behind the warm-up of each engine, as on a GPU from now on but for top-k."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    compile_or_warm_up, entries = CPUWorker.compile_or_warm_up_model, []

    def warm_up_as_on_a_gpu(worker: Any) -> Any:
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        entries.append(worker.tree_drafter.state.matrix.num_written)
        return compile_or_warm_up(worker)

    CPUWorker.compile_or_warm_up_model = warm_up_as_on_a_gpu
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(**GREEDY))
    return entries


def serve_replica(method: dict[str, Any], at: list[Any], folder: Path) -> dict[str, Any]:
    """With either runner: a replica that starts from the files in a folder."""
    batch, found = [(place, GREEDY) for place in at], {}

    def note_files(when: str) -> None:
        found[f"files {when}"] = sorted(path.name for path in folder.iterdir())

    note_files("at the start")
    with engine(with_sizes(method, SCHEDULE), **LLM_ARGUMENTS) as llm:
        found["entries at the start"] = runner(llm).tree_drafter.state.matrix.num_written
        found["known at the start"] = learnt_by(llm)
        if batch:
            found["token ids"] = tokens_of(llm, batch)
            time.sleep(0.2)
            note_files("before")
            found["learnt"] = learnt_by(llm)
            [path] = core(llm).model_executor.collective_rpc("save_draft_state")
            found["written"] = written_in(Path(path))
            tokens_of(llm, batch)  # so that there is something to write at the end
            found["learnt at the end"] = learnt_by(llm)
    note_files("at the end")
    if batch:
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        found["written at the end"] = written_in(newest)
        torn = newest.with_stem(f"{newest.stem}-torn")
        torn.write_bytes(newest.read_bytes()[:-1])
        os.utime(newest, (0, 0))  # old enough to be removed by the next, which has taken it in
    return found


def main(folder: Path) -> dict[str, Any]:
    """With each runner: replicas that fill a template, grow trees, and are asked for nothing."""
    tree, files = folder / "tree.json", folder / "files"
    TREE.save(tree)
    files.mkdir()
    method = {"method": "token_recycling", "matrix_file": str(files), "save_every": 0}
    method |= {"context_mib": 1, "max_nodes": TREE.num_nodes}
    taught, replicas = watched_warm_up() if IS_V2 else [None] * 3, []
    for at, of_replica in zip(OF_REPLICAS, [{"tree": str(tree)}, {}, {}], strict=True):
        found = serve_replica(method | of_replica, at, files)
        replicas.append(found | {"entries behind warm-up": taught.pop()})
    return {"replicas": replicas}


def test_a_replica_reads_what_others_write_meanwhile(plain, tmp_path):
    first, later = (tmp_path / name for name in ("first", "later"))
    first.mkdir()
    later.mkdir()
    with engine(saving("matrix", first, 0)) as llm:
        assert generate(llm, PROMPTS, TOKENS) == plain
        cold = counter(llm, "spec_decode_num_drafts")
    (written,) = first.iterdir()
    learnt = load_file(written)["adjacency_matrix"]
    with engine(saving("matrix", later, 0.05)) as llm:
        matrix = runner(llm).tree_drafter.state.matrix
        assert matrix.num_written == 0
        (later / f"{written.stem}-torn.safetensors").write_bytes(written.read_bytes()[:-1])
        (later / written.name).write_bytes(written.read_bytes())
        wait_until(lambda: matrix.table.equal(learnt))
        assert generate(llm, PROMPTS, TOKENS) == plain
        assert counter(llm, "spec_decode_num_drafts") < 0.7 * cold


def make_pool(size: int = 64, value: int = -1) -> PhrasePool:
    pool = PhrasePool(size, per_token=2, length=4)
    pool.phrases.fill_(value)
    return pool


def pool_in(path: Path, size: int = 64) -> PhrasePool:
    pool = make_pool(size)
    pool.replace(pool.read(path, pool.form("f")))
    return pool


def write_another(folder: Path) -> None:
    """As another replica does."""
    pool = make_pool(value=2)
    StatePlace(folder, name="").write(lambda path: pool.save(path, pool.form("f")))


def test_no_half_of_a_step_is_written(tmp_path):
    """All phrases are of one step, in every file that is ever there."""
    path, size = tmp_path / "matrix", 1 << 16
    state, place = make_pool(size), StatePlace(path, name="")
    saver = StateSaver(state, make_pool(size), place, state.form("f"), every=0.001)
    seen, step = set(), 0
    deadline = time.monotonic() + PATIENCE_S
    while len(seen) < 10:
        step += 1
        with saver.changing():
            for part in state.phrases.split(1 << 12):
                part.fill_(step % 1000)
        if path.exists():
            (value,) = pool_in(path, size).phrases.unique().tolist()
            seen.add(value)
        assert time.monotonic() < deadline
    saver.close()
    assert pool_in(path, size).phrases.equal(state.phrases)


@pytest.mark.parametrize("step", ["files", "read", "write"])
def test_saving_goes_on_after_errors_and_says_each_once(step, tmp_path, monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.recycle"), "error", lambda form, *args: logged.append(form % args)
    )
    write_another(tmp_path)
    state, copy, place = make_pool(), make_pool(), StatePlace(tmp_path, name="")
    owners = {"files": (place, "new_files"), "read": (copy, "read"), "write": (place, "write")}
    owner, name = owners[step]
    work, errors = getattr(owner, name), [OSError(116, "Stale file handle")] * 3

    def fail_at_first(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail_at_first)
    saver = StateSaver(state, copy, place, state.form("f"), every=0.02)
    with saver.changing():
        state.phrases[:8] = 1
    wait_until(lambda: bool((state.phrases[8:] == 2).all()))
    wait_until(lambda: not place.new_files())  # what was taken in is noted a little later
    with saver.changing():
        state.phrases[:8] = 3
    wait_until(lambda: not errors)
    saver.close()
    [path] = place.files()
    assert pool_in(path).phrases.equal(state.phrases)
    [said] = logged
    assert "Stale file handle" in said


def test_no_copy_is_written_of_a_file_that_is_half_taken_in(tmp_path, monkeypatch):
    write_another(tmp_path)
    state, place = make_pool(), StatePlace(tmp_path, name="")
    merge, saving = state.merge, []

    def merge_while_another_thread_saves(tensors: Any) -> Iterator[bool]:
        thread = Thread(target=saver.save)
        thread.start()
        saving.append(thread)
        thread.join(0.2)
        assert thread.is_alive()
        yield from merge(tensors)

    monkeypatch.setattr(state, "merge", merge_while_another_thread_saves)
    saver = StateSaver(state, make_pool(), place, state.form("f"), every=0.1)
    wait_until(lambda: bool(saving))
    saving[0].join(PATIENCE_S)
    saver.close()
    [path] = place.files()
    assert pool_in(path).phrases.equal(make_pool(value=2).phrases)


@pytest.mark.slow
def test_a_killed_engine_keeps_what_it_learnt(tmp_path):
    path = tmp_path / "state"
    command, env = [sys.executable, __file__, str(path)], {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=os.environ | env, stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            said = next(line for line in served.stdout if line.startswith("learnt "))
            _, learnt, cold = said.split()
            wait_until(lambda: written_in(path) == learnt)
            assert served.poll() is None
        finally:
            served.kill()
    assert served.returncode == -signal.SIGKILL
    with engine(saving("matrix", path, 0)) as llm:
        assert learnt_by(llm) == learnt
        generate(llm, PROMPTS, TOKENS)
        assert counter(llm, "spec_decode_num_accepted_tokens") > int(cold)


if __name__ == "__main__":  # serve, say what was learnt, and idle until killed
    with engine(saving("matrix", Path(sys.argv[1]), 0.2)) as llm:
        generate(llm, PROMPTS, TOKENS)
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
        print("learnt", learnt_by(llm), accepted, flush=True)
        signal.pause()
