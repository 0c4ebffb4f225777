"""What judges the engines of a GPU, in the interpreter: it sees what is right and what is wrong."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cuda.gpu_checks import Row, judge, judge_rows, serve, watch_rows
from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    LLM_ARGUMENTS,
    SCHEDULE,
    TEXT,
    with_sizes,
)
from tests.integration.engines import engine

pytestmark = pytest.mark.slow

SHORT = {"max_tokens": 6, "ignore_eos": True}
PARAMS = [
    GREEDY | SHORT | {"logprobs": 0},
    {"temperature": 0.9, "seed": 3, "min_p": 0.02, **SHORT},
]
ERROR = 1e-3  # float32, over batches of other shapes


def test_what_is_right_is_found_right(result):
    right = result["right"]
    assert max(right["gap"], right["logprob_error"], result["rows are off by"]) < ERROR
    assert right["drawn_again"] == 1.0
    assert max(result["depths of rows"]) > 1


def test_what_is_wrong_is_seen(result):
    wrong = result["wrong"]
    assert min(wrong["gap"], wrong["logprob_error"], result["wrong rows are off by"]) > 100 * ERROR
    assert wrong["drawn_again"] < 1.0


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines: one with trees, and the judge."""
    rows: list[Row] = []
    with engine(with_sizes(GROWN, SCHEDULE), **LLM_ARGUMENTS) as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)
        requests = [(token_ids[at : at + 30], PARAMS[at % 2]) for at in range(3)]
        watch_rows(llm, rows, most=6, first_step=3)
        answers = serve(llm, requests, steps_between=2)
    arguments = LLM_ARGUMENTS | {"max_num_seqs": 16, "num_gpu_blocks_override": None}
    with engine(**arguments) as llm:
        right, off = judge(llm, answers), judge_rows(llm, rows)
        moved = [replace(one, token_ids=one.token_ids[::-1]) for one in answers]
        wrong = judge(llm, moved)
        shorter = [replace(row, token_ids=row.token_ids[:-1]) for row in rows]
        wrong_off = judge_rows(llm, shorter)
    return {
        "right": asdict(right),
        "wrong": asdict(wrong),
        "rows are off by": off,
        "wrong rows are off by": wrong_off,
        "depths of rows": [row.depth for row in rows],
    }
