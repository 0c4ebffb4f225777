"""Files that outlive an engine: refused places, whole writes, hostile content, shared folders."""

from __future__ import annotations

import itertools
import os
import re
import resource
import stat
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.core.strategies import THOROUGH
from vllm_recycle.core import state_file
from vllm_recycle.core.state_file import (
    ABANDONED_AFTER,
    MAX_JSON_BYTES,
    PARTIAL_PREFIX,
    StateFileError,
    TensorForm,
    check_place,
    is_writable,
    read_json,
    write_file,
)
from vllm_recycle.core.state_place import StatePlace

TENSORS = {"numbers": torch.arange(12, dtype=torch.int32).view(3, 4)}
FACTS = {"k": 4}
FORM = TensorForm(TENSORS, FACTS, "matrix_file")
LONGEST_NAME = "n" * 255
NOBODY = 65534  # a user that owns no folder here


def load(path):
    return FORM.read(path)


def save(path):
    FORM.save(path, TENSORS)


def test_files_are_those_of_safetensors(tmp_path):
    """Also where a tensor of smaller numbers, an odd count of them, comes first."""
    tensors = {
        "numbers": torch.randn(3, 5)[:, ::2],
        "counts": torch.randn(2, 2, dtype=torch.float64),
    }
    form = TensorForm(tensors, FACTS, "matrix_file")
    form.save(tmp_path / "ours", tensors)
    torch.testing.assert_close(safetensors.torch.load_file(tmp_path / "ours"), tensors)
    torch.testing.assert_close(form.read(tmp_path / "ours"), tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, tmp_path / "theirs", {"k": "4"})
    torch.testing.assert_close(form.read(tmp_path / "theirs"), tensors)


def test_tensors_are_written_from_where_they_lie_and_read_to_where_they_stay(monkeypatch, tmp_path):
    """Any copy, as by safetensors, would hold the GIL, and so a step of another thread."""
    parts = []
    monkeypatch.setattr(state_file, "write_file", lambda _, *given, kind: parts.extend(given))
    numbers = TENSORS["numbers"]
    save(tmp_path / "matrix")
    assert np.shares_memory(np.frombuffer(parts[-1], np.int32), numbers.numpy())
    monkeypatch.undo()
    save(tmp_path / "matrix")
    num_bytes = load(tmp_path / "matrix")["numbers"].untyped_storage().nbytes()
    assert num_bytes == (tmp_path / "matrix").stat().st_size


@pytest.mark.parametrize("name", ["new", LONGEST_NAME, "link to nothing"])
def test_a_place_that_is_accepted_can_be_written(name, tmp_path):
    path = tmp_path / name
    if name == "link to nothing":
        path.symlink_to(tmp_path / "target")
    check_place(path, kind="matrix_file")
    assert not path.exists()
    save(path)
    check_place(path, kind="matrix_file")
    assert load(path)["numbers"].equal(TENSORS["numbers"])
    assert not list(tmp_path.glob(f"{PARTIAL_PREFIX}*"))
    # By its header alone, without memory for its tensors.
    like = {"numbers": torch.empty(3, 4, dtype=torch.int32, device="meta")}
    TensorForm(like, FACTS, "matrix_file").check(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0b", "expected a path without NUL"),
        ("a\ud800b", "expected a path that UTF-8 can express"),
        (LONGEST_NAME + "n", "expected one that can be read and written: File name too long"),
        ("x/" * 4000, r"\(\d,\d+ characters\), expected one that can be .*: File name too long"),
        ("folder", "expected a file, not a directory, pipe or device"),
        ("pipe", "expected a file, not a directory, pipe or device"),
        ("no/such", "expected a file in a directory that exists"),
        ("no folder/", "expected a directory that exists, or a file"),
        ("file/in", "expected one that can be read and written: Not a directory"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(name, message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for may_be_folder in (False, True)[: 1 if name == "folder" else 2]:
        with pytest.raises(ValueError, match=f"^matrix_file is .*{message}$"):
            check_place(f"{tmp_path}/{name}", kind="matrix_file", may_be_folder=may_be_folder)


def test_a_folder_is_accepted_where_files_may_be_written_in_it(tmp_path):
    check_place(f"{tmp_path}/", kind="matrix_file", may_be_folder=True)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def read_only_folder():
    """A folder that this process may only read, as root too, with a file in it."""
    with tempfile.TemporaryDirectory() as name:
        folder, user = Path(name), os.geteuid()
        save(folder / "file")
        folder.chmod(0o555)
        if user == 0:
            os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


@pytest.mark.parametrize("name", ["", "file", "new"])
def test_what_can_only_be_read_is_accepted_where_that_is_enough(name, read_only_folder):
    path = read_only_folder / name
    for may_be_read_only in (False, True):
        is_refused = pytest.raises(ValueError, match="can be read and written: Permission denied")
        with nullcontext() if may_be_read_only and name != "new" else is_refused:
            flags = {"may_be_folder": True, "may_be_read_only": may_be_read_only}
            check_place(path, kind="matrix_file", **flags)
    assert not is_writable(path)
    assert load(read_only_folder / "file")["numbers"].equal(TENSORS["numbers"])


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    folder, link = tmp_path / "elsewhere", tmp_path / "link"
    folder.mkdir()
    target = folder / "target"
    target.touch(mode=0o600)
    link.symlink_to(target)
    save(link)
    assert link.readlink() == target
    assert load(target)["numbers"].equal(TENSORS["numbers"])
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_write_that_fails_is_one_line_and_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "matrix"
    save(path)
    before = path.read_bytes()
    message = re.escape(f"matrix_file {path}: cannot be written: File too large")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))  # as on a full disk
    try:
        with pytest.raises(StateFileError, match=f"^{message}$"):
            save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_what_a_killed_writer_left_goes_once_it_is_old(kind, tmp_path):
    partial = tmp_path / f"{PARTIAL_PREFIX}left"
    partial.touch() if kind == "file" else os.mkfifo(partial)
    check_place(tmp_path / "matrix", kind="matrix_file")
    assert partial.exists(), "expected the file of a living writer to stay"
    written = partial.stat().st_mtime - ABANDONED_AFTER - 1
    os.utime(partial, (written, written))
    write_file(tmp_path / "matrix", b"1", kind="matrix_file")
    assert [path.name for path in tmp_path.iterdir()] == ["matrix"]


@pytest.mark.parametrize(("owner", "stage"), [(Path, "open"), (TensorForm, "_check_header")])
def test_a_file_that_another_process_removes_while_it_is_read(owner, stage, tmp_path, monkeypatch):
    path = tmp_path / "matrix"
    save(path)
    read = getattr(owner, stage)

    def remove_and_read(*args):
        path.unlink(missing_ok=True)
        return read(*args)

    monkeypatch.setattr(owner, stage, remove_and_read)
    if owner is TensorForm:  # has all of it
        assert load(path)["numbers"].equal(TENSORS["numbers"])
    else:
        with pytest.raises(ValueError, match=f"^matrix_file {path}: no numbers: "):
            load(path)


def test_an_error_of_any_kind_is_one_of_the_file(tmp_path, monkeypatch):
    save(tmp_path / "matrix")
    error = RuntimeError("no such file any more")
    monkeypatch.setattr(TensorForm, "_check_header", Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"no numbers: no such file any more$"):
        load(tmp_path / "matrix")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no numbers: "),  # a pipe
        (lambda whole: whole[:-1], "no numbers: "),
        (lambda whole: whole[:8] + b"[" * 64, "no numbers: "),
        (lambda whole: whole.replace(b"[0, 48]", b"[4, 48]"), "no numbers: "),
        (lambda whole: (1 << 62).to_bytes(8, "little") + whole[8:], "no numbers: "),
        ({"k": "5" * 1000}, f"k is {'5' * 200}, expected 4"),
        (
            {"numbers": torch.zeros(2, 4)},
            "numbers is torch.float32 [2, 4], expected torch.int32 [3, 4]",
        ),
    ],
)
def test_a_hostile_file_is_found_by_its_header(change, message, tmp_path):
    path = tmp_path / "matrix"
    changed = change if isinstance(change, dict) else {}
    given = {**TENSORS, **FACTS, **changed}
    replace(FORM, facts={"k": given["k"]}).save(path, {"numbers": given["numbers"]})
    if change is None:
        path.unlink()
        os.mkfifo(path)
    elif callable(change):
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^matrix_file {re.escape(f'{path}: {message}')}"):
        FORM.check(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "not JSON: nested too deep"),
        (b"[" + b"1" * 5000 + b"]", "not JSON: Exceeds the limit"),
        (b" " * (MAX_JSON_BYTES + 1), "not JSON: more than 1,048,576 bytes"),
        (b"\xff", "not JSON: "),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_json_is_read_and_what_is_none_is_refused_by_name(content, message, tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"a": [1, "ä"]}', encoding="utf-8")
    assert read_json(path, kind="tree file") == {"a": [1, "ä"]}
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^tree file {re.escape(str(path))}: {message}"):
        read_json(path, kind="tree file")


# A file, or a folder that replicas share.


def write(place: StatePlace, content: str) -> Path:
    return place.write(lambda path: path.write_text(content))


def contents(place: StatePlace) -> list[str]:
    return [path.read_text() for path in place.files()]


def make_older(path: Path, seconds: float) -> None:
    written = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(written, written))


def test_a_file_is_what_all_write_and_read(tmp_path):
    path = tmp_path / "matrix"
    first, second = StatePlace(path, name="a"), StatePlace(path, name="a")
    assert first.files() == []
    write(first, "first")
    write(second, "second")
    assert contents(first) == ["second"]
    assert list(tmp_path.iterdir()) == [path]


def test_in_a_folder_each_replaces_its_own_file_and_the_newest_comes_first(tmp_path):
    (tmp_path / "a-gone.safetensors").symlink_to(tmp_path / "nowhere")  # removed meanwhile
    for age in range(3):
        place = StatePlace(tmp_path, name="a")
        before, after = write(place, "before"), write(place, str(age))
        assert before != after, "expected no name to be used twice"
        make_older(after, age)
    assert contents(StatePlace(tmp_path, name="a")) == ["0", "1", "2"]
    assert contents(StatePlace(tmp_path, name="b")) == []


def test_files_of_others_are_new_until_they_are_taken_in(tmp_path):
    place, other = StatePlace(tmp_path, name="a"), StatePlace(tmp_path, name="a")
    write(place, "mine")
    for content in ("first", "second"):
        path = write(other, content)
        assert place.new_files() == [path]
        place.note_taken_in(path)
        assert place.new_files() == []


def test_a_file_goes_once_it_is_taken_in_and_old_by_the_clock_of_the_folder(tmp_path):
    place = StatePlace(tmp_path, name="a", stale_after=60)
    old, young, future = (write(StatePlace(tmp_path, name="a"), "") for _ in range(3))
    make_older(old, 61)
    make_older(young, 30)
    make_older(future, -1e9)
    write(place, "mine")
    assert {old, young, future} < set(place.files()), "expected what nobody took in to stay"
    for path in (old, young, future):
        place.note_taken_in(path)
    mine = write(place, "mine, and theirs")
    assert set(place.files()) == {young, mine}


class Replica:
    """It knows numbers; its file has them."""

    def __init__(self, folder: Path) -> None:
        self.place = StatePlace(folder, name="a", stale_after=10)
        self.known: set[str] = set()
        self.take_in(self.place.files())

    def take_in(self, paths: list[Path]) -> None:
        for path in paths:
            self.known |= set(path.read_text().split())
            self.place.note_taken_in(path)


class SharedFolder(RuleBasedStateMachine):
    """Replicas that start, learn, exchange, write, and end or are killed, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.folder = Path(self.root.name)
        self.replicas = [Replica(self.folder)]
        self.numbers = map(str, itertools.count())
        self.written: set[str] = set()

    def pick(self, index: int) -> Replica:
        return self.replicas[index % len(self.replicas)]

    index = st.integers(0, 5)

    @rule()
    def start(self) -> None:
        self.replicas.append(Replica(self.folder))

    @rule(index=index)
    def learn(self, index: int) -> None:
        self.pick(index).known.add(next(self.numbers))

    @rule(index=index)
    def exchange(self, index: int) -> None:
        replica = self.pick(index)
        replica.take_in(replica.place.new_files())

    @rule(index=index, other=index)
    def write(self, index: int, other: int | None) -> None:
        replica = self.pick(index)
        known = set(replica.known)  # a copy: what it learns meanwhile is not in the file

        def save(path: Path) -> None:
            path.write_text(" ".join(known))
            if other is not None and self.pick(other) is not replica:
                self.write(other, None)  # meanwhile

        replica.place.write(save)
        self.written |= known

    @rule(index=index)
    def end(self, index: int) -> None:
        if len(self.replicas) > 1:
            self.replicas.remove(self.pick(index))

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        for path in self.folder.iterdir():
            make_older(path, seconds)

    @invariant()
    def nothing_that_was_written_is_lost(self) -> None:
        texts = [path.read_text() for path in self.folder.iterdir()]
        assert self.written <= set(" ".join(texts).split())

    def teardown(self) -> None:
        self.root.cleanup()


TestNothingIsLost = SharedFolder.TestCase
TestNothingIsLost.settings = THOROUGH
