"""Streams by token: what a parser is given of steps of any size is what plain decoding gives it."""

from __future__ import annotations

import itertools
import runpy
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from tests.integration.engines import EXAMPLES, TARGET, TOKEN_RECYCLING
from vllm_recycle.integration.requests.streaming import by_token, split

# Which has the texts, and vLLM's own output processor.
parsers = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "benchmarks" / "tool_parsers.py")))
TEXTS = {kind: parsers.GIVEN[f"{kind}_parsers"] for kind in ("tool", "reasoning")}
REGISTERED = {
    "tool": ToolParserManager.list_registered(),
    "reasoning": ReasoningParserManager.list_registered(),
}
TWO_CALLS = parsers.tokens(TEXTS["tool"]["xlam"][1])
PROSE = "The quick brown fox jumps over the lazy dog again and again. " * 6


@pytest.mark.parametrize("kind", TEXTS)
def test_every_parser_has_a_text(kind):
    others = {name.split(" ")[0] for name in parsers.NOT_RUN}
    assert {*TEXTS[kind]} <= {*REGISTERED[kind]} <= {*TEXTS[kind]} | others


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, texts in TEXTS.items() for name in texts if name in REGISTERED[kind]],
)
def test_parsers_give_what_they_give_with_plain_decoding(kind, name):
    for text in TEXTS[kind][name]:
        assert not parsers.differences(kind, name, text, by_token=True)


@pytest.mark.parametrize("interval", [1, 4, 16])
def test_a_client_gets_as_many_chunks_as_with_plain_decoding(interval):
    plain = [*parsers.deltas("tool", "xlam", PROSE, 1, by_token=False, interval=interval)]
    for cut in (1, 3):
        chunks = [*parsers.deltas("tool", "xlam", PROSE, cut, by_token=True, interval=interval)]
        assert len(plain) / 2 < len(chunks) <= len(plain)


@pytest.mark.parametrize("name", ["xlam", "deepseek_v31", "hunyuan_a13b", "step3"])
def test_parsers_differ_where_steps_are_not_split(name):
    for text in TEXTS["tool"][name]:
        assert {7, 12} <= {*parsers.differences("tool", name, text, by_token=False)}


@pytest.mark.parametrize("method", [None, TOKEN_RECYCLING])
def test_only_servers_that_parse_for_our_engines_split(method):
    config = EngineArgs(TARGET, dtype="float32", speculative_config=method).create_engine_config()
    server, stream = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config)), object()
    assert by_token(server, None, object(), stream) is stream
    assert (by_token(server, object, object(), stream) is stream) == (method is None)


def tokens_of(results: Any) -> list[tuple[Any, ...]]:
    parts = [chunk.outputs[0] for result in results for chunk in split(result, {}, 1)]
    return [(p.text, [*p.token_ids], p.finish_reason, p.stop_reason) for p in parts]


@pytest.mark.parametrize("piles_up", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stop": ["days", "Łó"]},
        {"stop": ["Łódź"], "include_stop_str_in_output": True},
        {"stop": ["days"], "min_tokens": 40, "max_tokens": 200},
        {"skip_special_tokens": False},
        {"include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_each_token_has_the_text_of_plain_decoding(params, piles_up):
    plain = tokens_of(parsers.steps(TWO_CALLS, 1, by_token=False, **params))
    assert any(not text for text, *_ in plain[:-1])  # in the middle of a character
    for cut, interval in itertools.product(parsers.CUTS, (1, 4)):
        given = {**params, "stream_interval": interval}
        results = [*parsers.steps(TWO_CALLS, cut, by_token=True, **given)]
        if piles_up:  # as where vLLM's server is slower than the engine
            for result in results[1:]:
                results[0].add(result, aggregate=True)
            del results[1:]
        assert tokens_of(results) == plain
