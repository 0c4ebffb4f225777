"""A file, or a folder that replicas share: who writes what, what goes, and that nothing is lost."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_recycle.core.state_place import StatePlace


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
    first = write(other, "first")
    assert place.new_files() == [first]
    place.note_taken_in(first)
    assert place.new_files() == []
    second = write(other, "second")
    assert place.new_files() == [second]


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
        for path in self.place.files():
            self.take_in(path)

    def take_in(self, path: Path) -> None:
        self.known |= set(path.read_text().split())
        self.place.note_taken_in(path)

    def write(self, meanwhile: Callable[[], None]) -> None:
        content = " ".join(self.known)  # a copy: what it learns meanwhile is not in the file

        def save(path: Path) -> None:
            path.write_text(content)
            meanwhile()

        self.place.write(save)


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

    def save(self, replica: Replica, meanwhile: Callable[[], None] = lambda: None) -> None:
        known = set(replica.known)
        replica.write(meanwhile)
        self.written |= known

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
        for path in replica.place.new_files():
            replica.take_in(path)

    @rule(index=index, other=index)
    def write(self, index: int, other: int) -> None:
        replica, meanwhile = self.pick(index), self.pick(other)
        if replica is meanwhile:
            self.save(replica)
        else:
            self.save(replica, lambda: self.save(meanwhile))

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
