"""Files that outlive an engine: refused places, whole writes, leftovers, hostile content."""

from __future__ import annotations

import os
import re
import resource
import stat
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from vllm_recycle.core import state_file
from vllm_recycle.core.state_file import (
    ABANDONED_AFTER,
    MAX_JSON_BYTES,
    PARTIAL_PREFIX,
    StateFileError,
    check_place,
    check_tensors,
    is_writable,
    read_json,
    read_tensors,
    save_tensors,
    write_file,
)

TENSORS = {"numbers": torch.arange(12, dtype=torch.int32).view(3, 4)}
FACTS = {"k": 4}
LONGEST_NAME = "n" * 255
NOBODY = 65534  # a user that owns no folder here


def load(path):
    return read_tensors(path, TENSORS, facts=FACTS, kind="matrix_file")


def save(path):
    save_tensors(path, TENSORS, facts=FACTS, kind="matrix_file")


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
    check_tensors(path, like, facts=FACTS, kind="matrix_file")


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
        place = {"may_be_folder": True, "may_be_read_only": may_be_read_only}
        if may_be_read_only and name != "new":
            check_place(path, kind="matrix_file", **place)
        else:
            with pytest.raises(ValueError, match="can be read and written: Permission denied"):
                check_place(path, kind="matrix_file", **place)
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


@pytest.mark.parametrize(("owner", "stage"), [(Path, "read_bytes"), (state_file, "load")])
def test_a_file_that_another_process_removes_while_it_is_read(owner, stage, tmp_path, monkeypatch):
    path = tmp_path / "matrix"
    save(path)
    read = getattr(owner, stage)

    def remove_and_read(*args):
        path.unlink(missing_ok=True)
        return read(*args)

    monkeypatch.setattr(owner, stage, remove_and_read)
    if stage == "load":  # has all of it
        assert load(path)["numbers"].equal(TENSORS["numbers"])
    else:
        with pytest.raises(ValueError, match=f"^matrix_file {path}: no numbers: "):
            load(path)


def test_an_error_of_any_kind_is_one_of_the_file(tmp_path, monkeypatch):
    save(tmp_path / "matrix")
    error = RuntimeError("no such file any more")
    monkeypatch.setattr(state_file, "load", Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"no numbers: no such file any more$"):
        load(tmp_path / "matrix")


@pytest.mark.parametrize("content", ["pipe", "torn", "header", "huge header", "other", "facts"])
def test_a_hostile_file_is_found_by_its_header(content, tmp_path):
    path = tmp_path / "matrix"
    save(path)
    whole, message = path.read_bytes(), "no numbers: "
    bad_bytes = {
        "torn": whole[:-1],
        "header": whole[:8] + b"[" * 64,
        "huge header": (1 << 62).to_bytes(8, "little") + whole[8:],
    }
    if content in bad_bytes:
        path.write_bytes(bad_bytes[content])
    elif content == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif content == "other":
        other = {"numbers": torch.zeros(2, 4)}
        save_tensors(path, other, facts=FACTS, kind="matrix_file")
        message = "numbers is torch.float32 [2, 4], expected torch.int32 [3, 4]"
    else:
        save_tensors(path, TENSORS, facts={"k": "5" * 1000}, kind="matrix_file")
        message = f"k is {'5' * 200}, expected 4"
    with pytest.raises(ValueError, match=f"^matrix_file {re.escape(f'{path}: {message}')}"):
        check_tensors(path, TENSORS, facts=FACTS, kind="matrix_file")


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
