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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from engines import GROWN, OUROBOROS, core, counter, engine, generate, read_prompts, runner
from safetensors.torch import load_file
from vllm import SamplingParams

from vllm_recycle.core.phrase_pool import PhrasePool
from vllm_recycle.core.state_place import StatePlace
from vllm_recycle.core.token_recycling import TokenRecyclingState
from vllm_recycle.integration.saved_state import StateSaver

# Of each kind of state: a method, the option that names its file, and the tensor in it.
KINDS = {
    "matrix": ({**GROWN, "context_mib": 1}, "matrix_file", "adjacency_matrix"),
    "pool": (OUROBOROS, "pool_file", "phrase_pool"),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = read_prompts(3)
PATIENCE_S = 60.0


def saving(kind: str, path: Path, every: float) -> dict:
    method, option, _ = KINDS[kind]
    return {**method, option: str(path), "save_every": every}


def learnt_by(llm) -> str:
    state = runner(llm).tree_drafter.state
    if isinstance(state, TokenRecyclingState):
        return digest(state.matrix.shared_entries())
    return digest(state.phrases)


def written_in(path: Path, kind: str) -> str | None:
    return digest(load_file(path)[KINDS[kind][2]]) if path.exists() else None


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def plain() -> list:
    with engine() as llm:
        return generate(llm, PROMPTS, GREEDY)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_written_while_serving_and_outputs_are_as_before(kind, plain, tmp_path):
    path = tmp_path / "state"
    with engine(saving(kind, path, 0.01)) as llm:
        time.sleep(0.2)
        assert not path.exists(), "expected nothing to be written before anything is learnt"
        assert generate(llm, PROMPTS, GREEDY) == plain
        assert core(llm).model_executor.collective_rpc("save_draft_state") == [str(path)]
        assert generate(llm, PROMPTS, GREEDY) == plain
        # An idle engine writes what its last steps taught, and then nothing.
        wait_until(lambda: written_in(path, kind) == learnt_by(llm))
        time.sleep(0.2)
        written = path.stat().st_mtime_ns
        time.sleep(0.2)
        assert path.stat().st_mtime_ns == written
    assert path.stat().st_mtime_ns == written


def test_nothing_is_written_before_the_end_where_it_is_not_asked_for(tmp_path):
    path = tmp_path / "matrix"
    with engine(saving("matrix", path, 0)) as llm:
        generate(llm, PROMPTS[:1], GREEDY)
        time.sleep(0.2)
        assert not path.exists()
        learnt = learnt_by(llm)
    assert written_in(path, "matrix") == learnt


def test_a_replica_starts_from_the_newest_file_that_can_be_read(tmp_path):
    method, last = saving("matrix", tmp_path, 300), None

    def known_by(llm) -> list[str]:
        return [learnt_by(llm), digest(runner(llm).tree_drafter.state.acceptance.counts)]

    for prompts in (PROMPTS[:1], PROMPTS[1:]):
        with engine(method) as llm:
            assert last is None or known_by(llm) == last
            generate(llm, prompts, GREEDY)
            assert known_by(llm) != last
            last = known_by(llm)
        path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        torn = path.with_stem(f"{path.stem}-torn")
        torn.write_bytes(path.read_bytes()[:-1])
        os.utime(path, (0, 0))  # old enough to be removed by the next, which has taken it in
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    with engine(method) as llm:
        assert known_by(llm) == last
    assert sorted(tmp_path.iterdir()) == files  # it has learnt nothing


def test_a_replica_reads_what_others_write_meanwhile(plain, tmp_path):
    first, later = tmp_path / "first", tmp_path / "later"
    for folder in (first, later):
        folder.mkdir()
    with engine(saving("matrix", first, 0)) as llm:
        assert generate(llm, PROMPTS, GREEDY) == plain
        cold = counter(llm, "spec_decode_num_drafts")
    (written,) = first.iterdir()
    learnt = load_file(written)["adjacency_matrix"]
    with engine(saving("matrix", later, 0.05)) as llm:
        matrix = runner(llm).tree_drafter.state.matrix
        assert matrix.num_written == 0
        (later / f"{written.stem}-torn.safetensors").write_bytes(written.read_bytes()[:-1])
        (later / written.name).write_bytes(written.read_bytes())
        wait_until(lambda: matrix.table.equal(learnt))
        assert generate(llm, PROMPTS, GREEDY) == plain
        assert counter(llm, "spec_decode_num_drafts") < 0.7 * cold


def test_no_half_of_a_step_is_written(tmp_path):
    """All phrases are of one step, in every file that is ever there."""
    path = tmp_path / "matrix"
    state, copy, loaded = (PhrasePool(1 << 16, per_token=2, length=4) for _ in range(3))
    saver = StateSaver(state, copy, StatePlace(path, name=""), fingerprint="f", every=0.001)
    seen, step = set(), 0
    deadline = time.monotonic() + PATIENCE_S
    while len(seen) < 10:
        step += 1
        with saver.changing():
            for part in state.phrases.split(1 << 12):
                part.fill_(step % 1000)
        if path.exists():
            loaded.load(path, fingerprint="f")
            (value,) = loaded.phrases.unique().tolist()
            seen.add(value)
        assert time.monotonic() < deadline
    saver.close()
    loaded.load(path, fingerprint="f")
    assert loaded.phrases.equal(state.phrases)


@pytest.mark.parametrize("step", ["files", "read", "write"])
def test_saving_goes_on_after_errors_and_says_each_once(step, tmp_path, monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.recycle"), "error", lambda form, *args: logged.append(form % args)
    )
    state, copy, other = (PhrasePool(64, per_token=2, length=4) for _ in range(3))
    place, other_place = StatePlace(tmp_path, name=""), StatePlace(tmp_path, name="")
    other.phrases.fill_(2)
    other_place.write(partial(other.save, fingerprint="f"))
    owner, name = {
        "files": (place, "new_files"),
        "read": (copy, "read"),
        "write": (place, "write"),
    }[step]
    work, errors = getattr(owner, name), [OSError(116, "Stale file handle")] * 3

    def fail_at_first(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail_at_first)
    saver = StateSaver(state, copy, place, fingerprint="f", every=0.02)
    with saver.changing():
        state.phrases[:8] = 1
    wait_until(lambda: bool((state.phrases[8:] == 2).all()))
    with saver.changing():
        state.phrases[:8] = 3
    wait_until(lambda: not errors)
    saver.close()
    [path] = place.files()
    copy.clear()
    copy.load(path, fingerprint="f")
    assert copy.phrases.equal(state.phrases)
    assert len(logged) == 1
    assert "Stale file handle" in logged[0]


def test_no_copy_is_written_of_a_file_that_is_half_taken_in(tmp_path, monkeypatch):
    state, copy, other = (PhrasePool(64, per_token=2, length=4) for _ in range(3))
    other.phrases.fill_(2)
    StatePlace(tmp_path, name="").write(partial(other.save, fingerprint="f"))
    merge = state.merge
    saving: list[Thread] = []

    def merge_while_another_thread_saves(tensors: Any) -> Iterator[bool]:
        saving.append(Thread(target=saver.save))
        saving[0].start()
        saving[0].join(0.2)
        assert saving[0].is_alive()
        yield from merge(tensors)

    monkeypatch.setattr(state, "merge", merge_while_another_thread_saves)
    saver = StateSaver(state, copy, StatePlace(tmp_path, name=""), fingerprint="f", every=0.1)
    wait_until(lambda: bool(saving))
    saving[0].join(PATIENCE_S)
    saver.close()
    files = StatePlace(tmp_path, name="").files()
    assert len(files) == 1
    copy.clear()
    copy.load(files[0], fingerprint="f")
    assert copy.phrases.equal(other.phrases)


@pytest.mark.slow
def test_a_killed_engine_keeps_what_it_learnt(tmp_path):
    path = tmp_path / "state"
    kind = "matrix"
    command = [sys.executable, __file__, kind, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        try:
            said = next(line for line in served.stdout if line.startswith("learnt "))
            _, learnt, cold = said.split()
            wait_until(lambda: written_in(path, kind) == learnt)
            assert served.poll() is None
        finally:
            served.kill()
    assert served.returncode == -signal.SIGKILL
    with engine(saving(kind, path, 0)) as llm:
        assert learnt_by(llm) == learnt
        generate(llm, PROMPTS, GREEDY)
        assert counter(llm, "spec_decode_num_accepted_tokens") > int(cold)


def main(kind: str, path: str) -> None:
    """In a process of its own: serve, say what was learnt, and idle until killed."""
    with engine(saving(kind, Path(path), 0.2)) as llm:
        generate(llm, PROMPTS, GREEDY)
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
        print("learnt", learnt_by(llm), accepted, flush=True)
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
