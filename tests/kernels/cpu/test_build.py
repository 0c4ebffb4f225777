"""Building the C++ kernels, and their attention against that of torch; see `test_drafting` too.

Attention agrees within a tolerance, that of `test_tree_attention`, which has more of it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile

import pytest
import torch
from cache_layouts import STALE, skip_reason
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import trees
from tolerance import is_within_tolerance

from vllm_recycle.core import reference
from vllm_recycle.kernels.cpu import build, cache_calls, calls, native_operations, tree_attention
from vllm_recycle.kernels.cpu.kv_cache import slot_elements
from vllm_recycle.kernels.cpu.tree_attention import TreeQueries

pytestmark = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler on this machine"
)


# Compiled for speed, the same sources take ten times as long.
QUICK = ("-O0", *build.FLAGS[1:])
BLOCK_SIZE, NUM_BLOCKS, KV_HEADS, HEAD_SIZE = 32, 12, 2, 32


@settings(max_examples=60, deadline=None)
@given(tree=trees(), data=st.data(), group=st.integers(1, 4), isa=st.sampled_from(["amx", "vec"]))
def test_attention_with_own_keys_and_values_equals_torch(tree, data, group, isa):
    dtype = torch.bfloat16
    if isa == "vec" or skip_reason("amx"):
        isa, dtype = "vec", data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    torch.manual_seed(0)
    size = st.tuples(st.integers(0, 4 * BLOCK_SIZE), st.integers(1, tree.num_nodes + 1))
    num_context, num_rows = torch.tensor(data.draw(st.lists(size, min_size=1, max_size=3))).T
    # Behind the contexts: blocks out of range, and in their last block anything.
    stale = data.draw(st.sampled_from([float("nan"), STALE]))
    kv_cache = torch.full((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), stale).to(dtype)
    blocks = torch.randperm(NUM_BLOCKS).view(3, 4)[: len(num_context)]
    token = torch.arange(4 * BLOCK_SIZE)
    in_context = token < num_context[:, None]
    slots = (blocks[:, token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE)[in_context]
    elements = slot_elements(slots, shape=kv_cache.shape, isa=isa)
    kv_cache.view(-1)[elements] = torch.randn(elements.shape).to(dtype)
    trees = TreeQueries(
        trees=tree.of_batch(len(num_rows)),
        first=num_rows.cumsum(0) - num_rows,
        num_rows=num_rows.contiguous(),
        num_context=num_context.contiguous(),
        block_table=blocks.where(in_context[:, ::BLOCK_SIZE], 2**30).int(),
        block_size=BLOCK_SIZE,
    )
    tokens = int(num_rows.sum())
    query = torch.randn(tokens, KV_HEADS * group, HEAD_SIZE).to(dtype)
    own = torch.randn(tokens, 2, KV_HEADS, HEAD_SIZE).to(dtype).unbind(1)
    expected, got = torch.empty_like(query), torch.empty_like(query)
    window = data.draw(st.none() | st.integers(1, 3 * BLOCK_SIZE))
    given = {"trees": trees, "scale": 0.2, "isa": isa, "own": own, "window": window}
    for twin, output in ((tree_attention, expected), (cache_calls, got)):
        twin.tree_attention(query, kv_cache, output, **given)
    assert expected.isfinite().all()
    assert is_within_tolerance(got, expected)


@pytest.fixture(scope="module")
def full_cache(tmp_path_factory):
    """A cache with the kernels, quickly compiled."""
    folder = tmp_path_factory.mktemp("full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("CXX", raising=False)
        patch.setattr(build, "FLAGS", QUICK)
        assert build.find_or_build().problems == []
    return folder


@pytest.fixture
def cache(full_cache, tmp_path, monkeypatch):
    """The file of the kernels in a copy of it, which is the cache of this test."""
    shutil.copytree(full_cache, tmp_path / "cache")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "FLAGS", QUICK)
    (library,) = tmp_path.glob("cache/vllm_recycle/*.so")
    yield library
    assert not [*tmp_path.glob("tmp/*")], "what was compiled was left behind"
    build.load_library.cache_clear()


def start(caplog, operations=calls) -> list[str]:
    """The warnings of a start that leads to these operations."""
    build.load_library.cache_clear()
    caplog.clear()
    with caplog.at_level("WARNING"):
        assert native_operations() is native_operations() is operations
    assert operations is reference or build.load_library().reads_amx_layout() in (0, 1)
    return [record.message for record in caplog.records]


def test_kernels_that_are_kept_are_not_compiled_again(cache, caplog):
    written = cache.stat().st_mtime_ns
    assert start(caplog) == []
    assert cache.stat().st_mtime_ns == written


@pytest.mark.parametrize("size", [0, 3000])
def test_a_library_that_was_cut_is_compiled_anew(size, cache, caplog):
    """The loader would end the process by SIGBUS."""
    os.truncate(cache, size)
    assert start(caplog) == [f"{cache} is damaged, and is compiled anew"]
    assert start(caplog) == []


@pytest.mark.parametrize("place", ["no such home", "an unknown home", "an unknown CPU"])
def test_where_kernels_cannot_be_kept_they_are_compiled_all_the_same(
    place, cache, caplog, monkeypatch
):
    if place == "an unknown CPU":
        monkeypatch.setattr(build, "CPU_INFO", cache / "cpuinfo")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", "/proc/nohome")
    if place == "an unknown home":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    (warning,) = start(caplog)
    assert warning.startswith("the kernels cannot be kept (")
    assert warning.endswith("each start: set XDG_CACHE_HOME to a folder that can be written")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("env g++ -m64", None),
        ("no-such-compiler -O", "CXX is 'no-such-compiler -O', expected a compiler that is there"),
        ("'g++", 'CXX is "\'g++", expected a compiler that is there'),
        ("false", f"{shutil.which('false')} cannot compile the kernels (exit status 1)"),
    ],
)
def test_a_compiler_of_the_users(given, problem, cache, caplog, monkeypatch):
    """It may have options; where it is none, g++ is taken, whose kernels are there."""
    monkeypatch.setenv("CXX", given)
    written, warnings = cache.stat().st_mtime_ns, start(caplog)
    assert len(warnings) == (problem is not None)
    assert all(problem in warning for warning in warnings)
    assert cache.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "no C++ compiler found: "),
        ("no-such-compiler", "CXX is 'no-such-compiler', expected a compiler that is there: "),
        (shutil.which("false"), "false cannot compile the kernels (exit status 1): "),
    ],
)
def test_without_a_compiler_the_reference_does_the_work(given, problem, cache, caplog, monkeypatch):
    monkeypatch.setenv("PATH", str(cache.parent))
    monkeypatch.setenv("CXX", given)
    (warning,) = start(caplog, reference)
    assert problem in warning
    assert warning.endswith("install the package g++")
