"""A file, or a folder that replicas share: who writes where, what a new one starts from."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from vllm_recycle.core.state_place import StatePlace


def write(place: StatePlace, content: str) -> None:
    place.write(lambda path: path.write_text(content))


def contents(place: StatePlace) -> list[str]:
    return [path.read_text() for path in place.candidates()]


def test_a_file_is_what_all_write_and_read(tmp_path):
    path = tmp_path / "matrix"
    first, second = StatePlace(path, name="a"), StatePlace(path, name="a")
    assert first.candidates() == []
    write(first, "first")
    write(second, "second")
    assert contents(first) == ["second"]
    assert list(tmp_path.iterdir()) == [path]


def test_in_a_folder_each_writes_its_own_file_and_the_newest_comes_first(tmp_path):
    places = [StatePlace(tmp_path, name="a") for _ in range(3)]
    for number, place in enumerate(places):
        write(place, str(number))
        os.utime(place.file, ns=(0, number))
    assert contents(StatePlace(tmp_path, name="a")) == ["2", "1", "0"]
    os.utime(places[1].file, ns=(0, 9))
    assert contents(places[0]) == ["1", "2", "0"]
    assert contents(StatePlace(tmp_path, name="b")) == []


def _write_and_wait(folder, name, written):
    place = StatePlace(folder, name=name)
    write(place, "of a dead one")
    written.set()
    multiprocessing.Event().wait()


@pytest.mark.parametrize("name", ["same", "other"])
def test_what_a_killed_writer_left_goes_when_another_has_written(name, tmp_path):
    context = multiprocessing.get_context("fork")
    written = context.Event()
    writer = context.Process(target=_write_and_wait, args=(tmp_path, "same", written))
    writer.start()
    assert written.wait(60)
    place = StatePlace(tmp_path, name=name)
    write(place, "mine")
    assert len(list(tmp_path.iterdir())) == 2, "expected the file of a living writer to stay"
    writer.kill()
    writer.join()
    starting = StatePlace(tmp_path, name="same")
    assert "of a dead one" in contents(starting)
    write(place, "mine, later")
    assert ("of a dead one" in contents(starting)) == (name == "other")
    assert contents(place) == ["mine, later"]
    place.close()


def test_a_file_that_goes_while_the_folder_is_read_is_no_candidate(tmp_path):
    write(StatePlace(tmp_path, name="a"), "there")
    (tmp_path / "a-gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert contents(StatePlace(tmp_path, name="a")) == ["there"]
