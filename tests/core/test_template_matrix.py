"""The adjacency matrix: against a model of dictionaries, and its file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from strategies import THOROUGH, K, trees

from vllm_recycle.core import SCOPES, TemplateMatrix, TreeTemplate
from vllm_recycle.core.template_matrix import fill_tree

VOCAB = 11
OVERLAY_ROWS = 4  # fewer than tokens, so that tokens of one slot push each other out
MAX_NUM_REQS = 3
FINGERPRINT = "model-a"
KINDS = [
    (scope, hot) for scope in SCOPES for hot in (True, False) if (scope, hot) != ("shared", False)
]

Row = tuple[int, int, list[int]]  # req_state_idx, token, successors


@dataclass
class Model:
    """What `TemplateMatrix` does, one row after the other."""

    scope: str
    hot_start: bool
    shared: dict[int, list[int]] = field(default_factory=dict)
    overlays: dict[tuple[int, int], tuple[int, list[int]]] = field(default_factory=dict)

    def update(self, rows: list[Row]) -> None:
        for req_state_idx, token, successors in rows:
            if token < 0:
                continue
            if self.scope != "isolated":
                self.shared[token] = successors
            if self.scope != "shared":
                self.overlays[req_state_idx, token % OVERLAY_ROWS] = (token, successors)

    def clear_overlays(self, req_state_indices: list[int]) -> None:
        self.overlays = {
            at: row for at, row in self.overlays.items() if at[0] not in req_state_indices
        }

    def row(self, req_state_idx: int, token: int) -> list[int]:
        nothing = [-1] * K
        if token < 0:
            return nothing
        tag, successors = self.overlays.get((req_state_idx, token % OVERLAY_ROWS), (-1, nothing))
        if tag == token:
            return successors
        return self.shared.get(token, nothing) if self.hot_start else nothing

    def fill(self, tree: TreeTemplate, req_state_idx: int, last_token: int) -> list[int]:
        filled = [last_token]
        for parent, rank in tree.nodes:
            filled.append(self.row(req_state_idx, filled[parent])[rank])
        return filled[1:]


def make_matrix(scope="sequence", *, vocab_size=VOCAB, k=K, **options) -> TemplateMatrix:
    options = {"max_num_reqs": MAX_NUM_REQS, "overlay_rows": OVERLAY_ROWS, **options}
    return TemplateMatrix(vocab_size, k, scope=scope, **options)


def update(matrix: TemplateMatrix, rows: list[Row]) -> None:
    idx_mapping, tokens, successors = zip(*rows, strict=True)
    matrix.update(torch.tensor(idx_mapping), torch.tensor(tokens), torch.tensor(successors))


def fill(
    matrix: TemplateMatrix, idx_mapping: torch.Tensor, last: torch.Tensor, tree: TreeTemplate
) -> list[list[int]]:
    return fill_tree(matrix.table, idx_mapping, last, tree=tree, layout=matrix.layout).tolist()


def rows_seen(matrix: TemplateMatrix, req_state_idx: int) -> list[list[int]]:
    """The successors that a request sees for each token of the vocabulary."""
    tokens = torch.arange(VOCAB)
    return matrix.rows_of(torch.full_like(tokens, req_state_idx), tokens).tolist()


token_ids = st.integers(0, VOCAB - 1)
row = st.tuples(
    st.integers(0, MAX_NUM_REQS - 1),
    token_ids | st.just(-1),
    st.lists(token_ids, min_size=K, max_size=K),
)
batches = st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=4)


@pytest.mark.parametrize(("scope", "hot_start"), KINDS)
@THOROUGH
@given(batches=batches, ended=st.lists(st.integers(0, MAX_NUM_REQS - 1), max_size=2))
def test_update_equals_writing_the_rows_in_order(scope, hot_start, batches, ended):
    model = Model(scope, hot_start)
    matrix = make_matrix(scope, hot_start=hot_start)
    for step, rows in enumerate(batches):
        if step == 1:
            model.clear_overlays(ended)
            matrix.clear_overlays(ended)
        model.update(rows)
        update(matrix, rows)
        for req_state_idx in range(MAX_NUM_REQS):
            expected = [model.row(req_state_idx, token) for token in range(VOCAB)]
            assert rows_seen(matrix, req_state_idx) == expected
        assert matrix.num_written == len(model.shared)


@pytest.mark.parametrize(("scope", "hot_start"), KINDS)
@THOROUGH
@given(rows=st.lists(row, min_size=1, max_size=20), tree=trees(max_nodes=25), data=st.data())
def test_fill_equals_filling_node_by_node(scope, hot_start, rows, tree, data):
    model = Model(scope, hot_start)
    matrix = make_matrix(scope, hot_start=hot_start)
    model.update(rows)
    update(matrix, rows)
    batch = data.draw(st.lists(st.tuples(st.integers(0, MAX_NUM_REQS - 1), token_ids), max_size=4))
    idx_mapping, last = torch.tensor([*batch, (0, 0)]).T
    expected = [model.fill(tree, *pair) for pair in [*batch, (0, 0)]]
    assert fill(matrix, idx_mapping, last, tree) == expected


def test_an_unfilled_node_keeps_its_place_and_its_subtree_stays_unfilled():
    tree = TreeTemplate(((0, 0), (0, 1), (1, 0), (2, 0), (3, 0)))
    matrix = make_matrix("shared")
    update(matrix, [(0, 1, [2, 3, 0, 0]), (0, 3, [4, 0, 0, 0]), (0, 0, [7, 7, 7, 7])])
    # Nothing is known after token 2, the first node.
    filled = fill(matrix, torch.tensor([0]), torch.tensor([1]), tree)
    assert filled == [[2, 3, -1, 4, -1]]


def test_no_token_has_no_successors_even_where_an_overlay_was_cleared():
    matrix = make_matrix()
    # In the slot that -1 would have: its row keeps its successors when it is cleared.
    update(matrix, [(0, OVERLAY_ROWS - 1, [1] * K)])
    matrix.clear_overlays([0])
    seen = matrix.rows_of(torch.tensor([0, 0]), torch.tensor([OVERLAY_ROWS - 1, -1]))
    assert seen.tolist() == [[1] * K, [-1] * K]


# Who sees what.


@pytest.mark.parametrize("scope", ["sequence", "isolated"])
def test_clearing_overlays_forgets_these_sequences_alone(scope):
    matrix = make_matrix(scope, hot_start=False)
    update(matrix, [(0, 1, [2] * K), (1, 1, [3] * K), (2, 1, [4] * K)])
    matrix.clear_overlays([0, 2])
    seen = [rows_seen(matrix, req_state_idx)[1][0] for req_state_idx in range(MAX_NUM_REQS)]
    assert seen == [-1, 3, -1]


@pytest.mark.parametrize("hot_start", [True, False])
def test_isolated_sequences_never_see_each_others_tokens(hot_start):
    matrix = make_matrix("isolated", hot_start=hot_start)
    update(matrix, [(0, token, [token] * K) for token in range(VOCAB)])
    assert max(map(max, rows_seen(matrix, 0))) >= 0
    assert rows_seen(matrix, 1) == [[-1] * K] * VOCAB
    assert matrix.num_written == 0


@pytest.mark.parametrize("scope", ["sequence", "shared"])
def test_other_scopes_let_sequences_learn_from_each_other(scope):
    matrix = make_matrix(scope)
    update(matrix, [(0, 5, [1] * K)])
    assert rows_seen(matrix, 1)[5] == [1] * K


def test_clear_forgets_everything():
    matrix = make_matrix()
    update(matrix, [(0, 5, [1] * K)])
    matrix.clear()
    assert matrix.num_written == 0
    assert rows_seen(matrix, 0) == [[-1] * K] * VOCAB


# Files.


@pytest.fixture
def written():
    matrix = make_matrix()
    update(matrix, [(0, 5, [1, 2, 3, 4]), (1, 0, [9, 0, 8, 7])])
    return matrix


@pytest.mark.parametrize("scope", SCOPES)
def test_a_saved_matrix_is_loaded_as_it_was(tmp_path, written, scope):
    path = tmp_path / "matrix.safetensors"
    written.save(path, fingerprint=FINGERPRINT)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = make_matrix(scope)
    update(loaded, [(0, 2, [6] * K)])
    loaded.load(path, fingerprint=FINGERPRINT)
    assert loaded.shared.equal(written.shared)
    assert loaded.num_written == written.num_written == 2
    # What a request wrote into its overlay stays before the file's rows; shared rows do not.
    expected = written.shared.tolist()
    assert rows_seen(loaded, 1) == expected
    if scope != "shared":
        expected[2] = [6] * K
    assert rows_seen(loaded, 0) == expected


@pytest.mark.parametrize(
    ("saved_as", "message"),
    [
        ({"vocab_size": 12}, "vocab_size is 12, expected 11"),
        ({"k": K + 1}, f"k is {K + 1}, expected {K}"),
        ({"fingerprint": "model-b"}, "fingerprint is model-b, expected model-a"),
    ],
)
def test_a_matrix_of_another_model_is_refused(tmp_path, written, saved_as, message):
    path = tmp_path / "matrix.safetensors"
    fingerprint = saved_as.pop("fingerprint", FINGERPRINT)
    make_matrix(**saved_as).save(path, fingerprint=fingerprint)
    refuses_to_load(written, path, message)


@pytest.mark.parametrize("content", [None, b"", b"no safetensors", "truncated", "no metadata"])
def test_a_file_without_matrix_is_refused(tmp_path, written, content):
    path = tmp_path / "matrix.safetensors"
    message = "no adjacency matrix"
    if content == "truncated":
        written.save(path, fingerprint=FINGERPRINT)
        path.write_bytes(path.read_bytes()[:-1])
    elif content == "no metadata":
        save_file({"adjacency_matrix": written.shared.contiguous()}, path)
        message = f"vocab_size is None, expected {VOCAB}"
    elif content is not None:
        path.write_bytes(content)
    refuses_to_load(written, path, message)


def refuses_to_load(matrix: TemplateMatrix, path, message: str) -> None:
    before = matrix.table.clone()
    with pytest.raises(ValueError, match=re.escape(f"state file {path}: {message}")):
        matrix.load(path, fingerprint=FINGERPRINT)
    assert matrix.table.equal(before)


# Options and size.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "global"}, "scope: got 'global', expected one of"),
        ({"scope": "shared", "hot_start": False}, "hot_start: got false with scope 'shared'"),
        ({"overlay_rows": 0}, "overlay_rows: got 0, expected a power of two"),
        ({"overlay_rows": 12}, "overlay_rows: got 12, expected a power of two"),
    ],
)
def test_options_that_make_no_matrix_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_matrix(**options)


def test_the_table_holds_the_shared_matrix_and_an_overlay_a_sequence():
    row_bytes = 4 * (1 + 8)
    shared_bytes = (VOCAB + 2) * row_bytes
    for scope, overlays in (("shared", 0), ("sequence", 2), ("isolated", 2)):
        matrix = TemplateMatrix(VOCAB, 8, scope=scope, max_num_reqs=2)
        # 4,096 rows, 147 KB, a request.
        assert matrix.num_bytes == shared_bytes + overlays * 147_456


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(12, 4, dtype=torch.int32), r"matrix is torch.int32 \[12, 4\], expected"),
        (torch.zeros(11, 4), r"matrix is torch.float32 \[11, 4\], expected torch.int32"),
        (torch.full((11, 4), 99, dtype=torch.int32), "it has numbers that are no token ids"),
    ],
)
def test_a_file_with_another_tensor_is_refused(tmp_path, tensor, message):
    matrix = TemplateMatrix(11, 4)
    before = matrix.table.clone()
    metadata = {"vocab_size": "11", "k": "4", "fingerprint": "f"}
    save_file({"adjacency_matrix": tensor}, tmp_path / "matrix", metadata)
    with pytest.raises(ValueError, match=message):
        matrix.load(tmp_path / "matrix", fingerprint="f")
    assert torch.equal(matrix.table, before)
