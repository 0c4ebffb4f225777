"""The Triton kernels give what the torch functions give that they are twins of, bit for bit."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from grown_trees import batch_of
from grown_trees import on_device as place_trees
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import K, drafts, samples, trees

from vllm_recycle.core import REFERENCE, TemplateMatrix, TemplateProposer, TreeTemplate
from vllm_recycle.kernels.triton import top_k as learning
from vllm_recycle.kernels.triton.operations import OPERATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 90
MAX_NUM_REQS = 3
OVERLAY_ROWS = 4
KINDS = [("sequence", True), ("sequence", False), ("shared", True), ("isolated", True)]
HALF_TYPES = [torch.bfloat16, torch.float16]

every_kind = pytest.mark.parametrize(("scope", "hot_start"), KINDS)


def make_matrix(scope="sequence", hot_start=True, *, vocab_size=VOCAB, k=K) -> TemplateMatrix:
    options = {"scope": scope, "hot_start": hot_start, "max_num_reqs": MAX_NUM_REQS}
    return TemplateMatrix(vocab_size, k, overlay_rows=OVERLAY_ROWS, device=DEVICE, **options)


def on_device(*lists: list) -> list[torch.Tensor]:
    return [torch.tensor(values, device=DEVICE) for values in lists]


# Drafting.

req_state_indices = st.integers(0, MAX_NUM_REQS - 1)
# Few tokens, so that rows are found where tokens point.
few_tokens = st.integers(0, 11)
rows_of_few = st.tuples(
    req_state_indices, few_tokens, st.lists(few_tokens, min_size=K, max_size=K, unique=True)
)


@every_kind
@settings(max_examples=40, deadline=None)
@given(
    tree=trees(),
    rows=st.lists(rows_of_few, min_size=8, max_size=40),
    batch=st.lists(st.tuples(req_state_indices, few_tokens | st.just(-1)), min_size=1, max_size=4),
)
def test_fill_equals_torch(scope, hot_start, tree, rows, batch):
    tree, matrix = tree.to(DEVICE), make_matrix(scope, hot_start)
    matrix.update(*on_device(*zip(*rows, strict=True)))
    idx_mapping, last = on_device(*zip(*batch, strict=True))
    arguments = {"tree": tree, "layout": matrix.layout}
    expected = REFERENCE.fill_tree(matrix.table, idx_mapping, last, **arguments)
    got = OPERATIONS.fill_tree(matrix.table, idx_mapping, last, **arguments)
    assert got.dtype == torch.int64
    assert got.equal(expected)


@pytest.mark.parametrize("depth", [1, 40, 256])
def test_a_chain_of_any_depth_is_filled(depth):
    tree = TreeTemplate(tuple((row, 0) for row in range(depth))).to(DEVICE)
    matrix = make_matrix()
    tokens = torch.arange(VOCAB, device=DEVICE)
    following = ((tokens + 7) % VOCAB)[:, None].expand(-1, K)
    matrix.update(torch.zeros_like(tokens), tokens, following)
    filled = OPERATIONS.fill_tree(
        matrix.table, *on_device([0], [5]), tree=tree, layout=matrix.layout
    )
    assert filled[0].tolist() == [(5 + 7 * step) % VOCAB for step in range(1, depth + 1)]


# The walk.


@st.composite
def ragged_steps(draw):
    """A tree; of one to four requests the drafts of all nodes, and tokens of a prefix of rows."""
    tree = draw(trees(max_nodes=30))
    drafted, sampled = [], []
    for _ in range(draw(st.integers(1, 4))):
        drafted.append(draw(drafts(tree, vocab_size=7)))
        tokens = draw(samples(tree, drafted[-1], vocab_size=7))
        sampled.append(tokens[: draw(st.integers(1, tree.num_nodes + 1) | st.just(len(tokens)))])
    return tree, drafted, sampled


@settings(max_examples=100, deadline=None)
@given(step=ragged_steps(), starts_type=st.sampled_from([torch.int32, torch.int64]))
def test_walk_equals_torch(step, starts_type):
    tree, drafted, sampled = step
    tree = tree.to(DEVICE)
    # Behind the last row lie tokens that belong to nobody.
    flat = [token for tokens in sampled for token in tokens] + [0] * tree.num_nodes
    starts = torch.tensor([0, *map(len, sampled)], device=DEVICE).cumsum(0).to(starts_type)
    arguments = (*on_device(flat, drafted), starts)
    expected, got = (walk(*arguments, tree=tree) for walk in (REFERENCE.walk, OPERATIONS.walk))
    for name in ("path", "token_ids", "lengths"):
        assert getattr(got, name).dtype == getattr(expected, name).dtype
        assert getattr(got, name).equal(getattr(expected, name)), name


def test_the_walk_ends_where_the_scheduled_rows_end_although_drafts_go_on():
    tree = TreeTemplate(((0, 0), (1, 0), (2, 0))).to(DEVICE)
    # The rows of a second sequence follow at once, and agree with the first one's drafts.
    sampled, drafted = on_device([5, 6, 7, 8], [[5, 6, 7], [1, 8, 1]])
    result = OPERATIONS.walk(sampled, drafted, *on_device([0, 2, 4]), tree=tree)
    assert result.path.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
    assert result.token_ids.tolist() == [[5, 6, -1, -1], [7, -1, -1, -1]]
    assert result.lengths.tolist() == [2, 1]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(ragged_steps(), min_size=1, max_size=2),
    idx_type=st.sampled_from([torch.int32, torch.int64]),
    deeper=st.integers(0, 5),
)
def test_walk_of_a_tree_for_each_request_equals_torch(steps, idx_type, deeper):
    templates = [tree for tree, drafted, _ in steps for _ in drafted]
    trees = batch_of(templates, max(tree.num_nodes for tree in templates))
    nodes, batch = trees.num_nodes, len(templates)
    drafted = [[*tokens, *[-1] * nodes][:nodes] for _, several, _ in steps for tokens in several]
    sampled = [tokens for _, _, several in steps for tokens in several]
    flat = [token for tokens in sampled for token in tokens]
    arguments = on_device(flat, drafted, [0, *accumulate(map(len, sampled))])
    expected = REFERENCE.walk(*arguments, tree=trees)
    idx_mapping = [*range(batch - 1, -1, -1)]
    placed = place_trees(trees, idx_mapping, batch + 1, DEVICE, depth=trees.depth + deeper)
    got = OPERATIONS.walk(
        *arguments, tree=placed, idx_mapping=torch.tensor(idx_mapping, device=DEVICE).to(idx_type)
    )
    assert got.lengths.equal(expected.lengths)
    for name in ("path", "token_ids"):
        padded = torch.nn.functional.pad(getattr(expected, name), (0, deeper), value=-1)
        assert getattr(got, name).equal(padded), name


@pytest.mark.parametrize("depth", [1, 40, 256])
def test_a_chain_of_any_depth_is_walked(depth):
    tree = TreeTemplate(tuple((row, 0) for row in range(depth))).to(DEVICE)
    tokens = list(range(depth + 1))
    sampled, drafted = on_device(tokens, [tokens[:-1]])
    result = OPERATIONS.walk(sampled, drafted, *on_device([0, depth + 1]), tree=tree)
    assert result.path.tolist() == result.token_ids.tolist() == [tokens]
    assert result.lengths.tolist() == [depth + 1]


# Learning.


def distinct_logits(seed: int, num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers around zero in random order, exact in each type for at most 512 of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)]
    return (torch.stack(rows) - vocab_size // 2).to(DEVICE, dtype)


def in_order(logits: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [n, k], the top k; of equal logits the lowest id first."""
    return logits.float().sort(dim=1, descending=True, stable=True).indices[:, :k]


def updated(matrix: TemplateMatrix, update, *arguments) -> torch.Tensor:
    """The table after an update, without the row that nobody reads."""
    table = matrix.table.clone()
    update(table, *arguments, layout=matrix.layout)
    table[matrix.layout.dump_address] = 0
    return table


def learned(matrix: TemplateMatrix, logits: torch.Tensor) -> list[list[int]]:
    """The successors of tokens 0, 1, ... after an update with one row of logits each."""
    tokens = torch.arange(len(logits), device=DEVICE)
    OPERATIONS.update_from_logits(
        matrix.table, torch.zeros_like(tokens), tokens, logits, layout=matrix.layout
    )
    return matrix.shared[: len(logits)].tolist()


learned_rows = st.lists(st.tuples(req_state_indices, st.integers(-1, 9)), min_size=1, max_size=14)


@every_kind
@settings(max_examples=20, deadline=None)
@given(
    rows=learned_rows,
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, *HALF_TYPES]),
    # Fewer than rows and logits, so that there are several blocks and chunks of them.
    later=st.sampled_from([2, 128]),
    chunk=st.sampled_from([32, 8192]),
)
def test_update_equals_torch(scope, hot_start, rows, seed, dtype, later, chunk):
    matrix = make_matrix(scope, hot_start)
    idx_mapping, tokens = on_device(*zip(*rows, strict=True))
    logits = distinct_logits(seed, len(rows), VOCAB, dtype)
    arguments = (idx_mapping, tokens, logits)
    # What was there before stays where nothing is written.
    matrix.update(*on_device([0, 1, 2, 2], [0, 5, 6, 2]), distinct_logits(seed, 4, K, torch.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "LATER", later)
        patch.setattr(learning, "CHUNK", chunk)
        got = updated(matrix, OPERATIONS.update_from_logits, *arguments)
    assert got.equal(updated(matrix, REFERENCE.update_from_logits, *arguments))


def test_a_row_superseded_in_the_shared_matrix_alone_stays_in_its_overlay():
    matrix = make_matrix("sequence")
    logits = distinct_logits(0, 3, VOCAB, torch.float32)
    arguments = (*on_device([0, 1, 0], [2, 2, 2 + OVERLAY_ROWS]), logits)
    got = updated(matrix, OPERATIONS.update_from_logits, *arguments)
    assert got.equal(updated(matrix, REFERENCE.update_from_logits, *arguments))
    first = matrix.layout.first_overlay
    own = in_order(logits, K).tolist()
    # Token 2 from its last row; its row in sequence 0 gave way to a token of the same slot.
    assert got[1 + 2].tolist() == got[first + OVERLAY_ROWS + 2].tolist() == [2, *own[1]]
    assert got[first + 2].tolist() == [2 + OVERLAY_ROWS, *own[2]]


def test_a_token_that_comes_again_far_behind_is_written_once():
    """All rows are of one token but a few, and there are more than are looked at at a time."""
    matrix = make_matrix("shared")
    tokens = torch.full((300,), 3, device=DEVICE)
    tokens[[7, 150]] = 4
    tokens[[8, 299]] = 5
    idx_mapping = torch.arange(300, device=DEVICE) % 2
    logits = distinct_logits(1, 300, VOCAB, torch.float32)
    arguments = (idx_mapping, tokens, logits)
    got = updated(matrix, OPERATIONS.update_from_logits, *arguments)
    assert got.equal(updated(matrix, REFERENCE.update_from_logits, *arguments))


@pytest.mark.parametrize(
    ("vocab_size", "k"), [(1, 1), (5, 5), (9, 8), (64, 1), (64, 64), (90, 3), (257, 16), (500, 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_vocabulary_and_k_give_the_top_k(vocab_size, k, dtype):
    matrix = make_matrix("sequence", vocab_size=vocab_size, k=k)
    logits = distinct_logits(vocab_size, 1, vocab_size, dtype)
    # Nothing is written behind the rows either.
    arguments = (*on_device([1], [0]), logits)
    got = updated(matrix, OPERATIONS.update_from_logits, *arguments)
    assert got.equal(updated(matrix, REFERENCE.update_from_logits, *arguments))
    assert got[1].tolist() == [0, *logits[0].topk(k).indices.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_a_large_vocabulary_of_few_values_gives_the_lowest_ids(dtype):
    vocab_size = 20_011  # three chunks, and no multiple of anything
    matrix = make_matrix("shared", vocab_size=vocab_size, k=8)
    generator = torch.Generator().manual_seed(0)
    # Rounded in the half types, so that the greatest come several times.
    logits = torch.randn(2, vocab_size, generator=generator).to(DEVICE, dtype)
    top = logits[:, [11, 8191, 8192, 20_010]]
    logits[:, [11, 8191, 8192, 20_010]] = top.abs() + 4
    assert learned(matrix, logits) == in_order(logits, 8).tolist()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), values=st.integers(1, 12), dtype=st.sampled_from(HALF_TYPES))
def test_of_equal_logits_the_lowest_id_comes_first(seed, values, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (2, VOCAB), generator=generator).to(DEVICE, dtype) - values / 2
    assert learned(make_matrix("shared"), logits) == in_order(logits, K).tolist()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({70: -5.0}, [70, 0, 1, 2]),
        ({2: 3.0, 60: INF, 3: 2.0, 89: NAN, 0: NAN}, [60, 2, 3, 0]),
        (dict.fromkeys(range(VOCAB), NAN), [0, 1, 2, 3]),
        ({**dict.fromkeys(range(VOCAB), NAN), 40: -1.0, 88: -1e30}, [40, 88, 0, 1]),
        # A zero and its negative are equal.
        ({5: -0.0, 17: 0.0, 30: -0.0, 31: 0.0, 80: 0.0}, [5, 17, 30, 31]),
    ],
    ids=["all -inf", "all but one -inf", "nan and inf", "all nan", "all but two nan", "zeros"],
)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logit_breaks_the_order(values, expected, dtype):
    logits = torch.full((1, VOCAB), -INF, dtype=dtype, device=DEVICE)
    for token, value in values.items():
        logits[0, token] = value
    assert learned(make_matrix("shared"), logits) == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_any_strides_are_read(dtype):
    logits = distinct_logits(3, 2, VOCAB, dtype)
    padded = torch.full((2, VOCAB + 38), INF, dtype=dtype, device=DEVICE)
    padded[:, :VOCAB] = logits
    expected = in_order(logits, K).tolist()
    for view in (padded[:, :VOCAB], padded.T.contiguous().T[:, :VOCAB]):
        assert view.equal(logits)
        assert learned(make_matrix("shared"), view) == expected


# All together.


@pytest.mark.parametrize("scope", ["sequence", "shared"])
def test_a_proposer_drafts_the_same_with_either_set_of_operations(scope):
    tree = TreeTemplate(((0, 0), (0, 1), (1, 0), (1, 2), (3, 1), (2, 0))).to(DEVICE)
    generator = torch.Generator().manual_seed(4)
    idx_mapping = torch.tensor([0, 0, 0, 1, 1, 2], device=DEVICE)
    proposers = [
        TemplateProposer(make_matrix(scope), tree, operations=operations)
        for operations in (REFERENCE, OPERATIONS)
    ]
    for step in range(6):
        tokens = torch.randint(-1, 12, (6,), generator=generator).to(DEVICE)
        logits = distinct_logits(step, 6, VOCAB, torch.bfloat16)
        # The successors are among the tokens of the steps, so that there are deep drafts.
        logits[:, 12:] -= VOCAB
        for proposer in proposers:
            proposer.observe(idx_mapping, tokens, logits, torch.arange(7, device=DEVICE))
        expected, got = (proposer.propose(idx_mapping, tokens) for proposer in proposers)
        assert got.equal(expected)
    assert int((got[:, 4] >= 0).sum()) > 1
