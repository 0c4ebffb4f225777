"""Files of what was learnt: refused before weights are loaded, saved or said why."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams

from tests.integration.engines import OUROBOROS, core, engine, make_config
from vllm_recycle.core import state_file
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.state_file import StateFileError
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.state.saved_state import fingerprint

TEMPLATE = {"method": "token_recycling", "tree": "default", "row_cost": 0, "contexts": [1]}
GROWN = {"method": "token_recycling", "row_cost": 0, "context_mib": 1}
# Of each kind of state: its options, and the option that names its file.
STATES = {"matrix": (TEMPLATE, "matrix_file"), "pool": (OUROBOROS, "pool_file")}


def write_state(method: dict, path: Path, **changed) -> None:
    """The file that an engine of this configuration would write, for a model if told."""
    config = make_config(method)
    options = settings_of(config).options
    model = changed.get("fingerprint") or fingerprint(config.model_config)
    state = options.make_state(config, "cpu")
    state.save(path, state.form(model))


@pytest.mark.parametrize("kind", STATES)
def test_a_state_file_is_checked_before_weights_are_loaded(kind, tmp_path):
    method, option = STATES[kind]
    path = tmp_path / "state"
    write_state(method, path)
    method = {**method, option: str(path)}
    make_config(method)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{option} {path}: no .*: "):
        make_config(method)
    write_state(STATES[kind][0], path, fingerprint="of another model")
    with pytest.raises(ValueError, match="fingerprint is of another model, expected"):
        make_config(method)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{option} is '{path}', expected a file, not a directory"):
        make_config(method)


def test_a_matrix_file_of_an_older_format_is_refused(tmp_path):
    path = tmp_path / "matrix.safetensors"
    facts = {"vocab_size": "4096", "k": "8"}
    save_file({"adjacency_matrix": torch.zeros(4096, 8, dtype=torch.int32)}, path, facts)
    with pytest.raises(ValueError, match=f"matrix_file {path}: format is None, .*; remove it to"):
        make_config({**GROWN, "matrix_file": str(path)})


def test_a_save_that_fails_at_shutdown_is_said_in_one_line(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("vllm.recycle"), "error", lambda *args: said.append(args))
    path = tmp_path / "folder" / "matrix"
    path.parent.mkdir()
    with engine({**TEMPLATE, "matrix_file": str(path)}) as llm:
        llm.generate(["One"], SamplingParams(max_tokens=4), use_tqdm=False)
        path.parent.rmdir()
        failure = f"matrix_file {path}: cannot be written: No such file or directory"
        with pytest.raises(StateFileError, match=f"^{failure}"):
            core(llm).model_executor.collective_rpc("save_draft_state")
    [(form, error)] = said
    assert form % error == f"{failure}; what was learnt since it was last written is lost"


def start_in(path: Path | str, rank: int = 0, ranks: int = 1, **options) -> TokenRecyclingV1Drafter:
    """A replica's drafter; it writes prompts for all requests, where there is nothing else."""
    method = {**TEMPLATE, "scope": "shared", "matrix_file": str(path), **options}
    config = make_config(method, data_parallel_size=ranks)
    config.parallel_config.data_parallel_index = rank  # as vLLM does in a rank's process
    drafter = TokenRecyclingV1Drafter(config, torch.device("cpu"), None)
    drafter.reset()
    return drafter


def learn_and_end(drafter: TokenRecyclingV1Drafter, token_ids: range) -> None:
    saver = drafter.make_saver()
    with saver.changing():
        drafter.add_requests([NewRequest(0, token_ids)])
    saver.close()


def test_each_data_parallel_rank_has_a_file_of_its_own(tmp_path):
    path, other = tmp_path / "matrix.safetensors", tmp_path / "matrix.dp1.safetensors"
    learn_and_end(start_in(path, 0, 2), range(3, 9))
    of_first, second = path.read_bytes(), start_in(path, 1, 2)
    assert second.state.matrix.num_written == 5, "starts from the first rank's file"
    learn_and_end(second, range(20, 24))
    assert start_in(path, 1, 2).state.matrix.num_written == 5 + 3, "goes on from its own"
    assert {*tmp_path.iterdir()} == {path, other}
    assert path.read_bytes() == of_first

    other.write_bytes(other.read_bytes()[:-1])
    start_in(path)
    with pytest.raises(ValueError, match=r"matrix_file .*/matrix\.dp1\.safetensors: no "):
        start_in(path, 0, 2)


@pytest.mark.parametrize("save_every", [None, 0])
def test_replicas_that_end_leave_what_each_has_learnt(save_every, tmp_path):
    replicas = [start_in(tmp_path, save_every=save_every) for _ in range(3)]
    for first, drafter in enumerate(replicas):
        learn_and_end(drafter, range(100 * first + 3, 100 * first + 9))
    later = start_in(tmp_path, save_every=save_every)
    assert later.state.matrix.num_written == 3 * 5
    # Its own file has all that they knew, so theirs go once they are old.
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    learn_and_end(later, range(903, 909))
    assert len(list(tmp_path.iterdir())) == 1
    assert start_in(tmp_path).state.matrix.num_written == 4 * 5


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_state_that_can_only_be_read_is_read(is_folder, tmp_path, monkeypatch):
    path = tmp_path if is_folder else tmp_path / "matrix"
    learn_and_end(start_in(path), range(3, 9))
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(state_file, "_partial_file", refuse)
    with pytest.raises(ValueError, match=r"expected one that can be read and written: Permission"):
        start_in(path)
    drafter = start_in(path, save_every=0)
    assert drafter.state.matrix.num_written == 5
    learn_and_end(drafter, range(103, 109))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    with pytest.raises(StateFileError, match="cannot be written: Permission denied"):
        drafter.make_saver().save()


def test_a_path_of_a_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    learn_and_end(start_in("~"), range(3, 9))
    assert len(list(tmp_path.iterdir())) == 1
