"""Prompts of `vllm-recycle bench`: what is read of a file, and those of the examples."""

from __future__ import annotations

import json
import re

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.tool_parsers.utils import get_json_schema_from_tools

from tests.cli.commands import PROMPTS
from vllm_recycle.cli.bench.prompts import Prompt, read_prompts


def test_only_a_chat_has_more_turns_than_one(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "sums", "turns": ["one", "two"]}\n\n{"prompt": "three"}')
    last = Prompt(("three",))
    assert read_prompts(path, chat=True) == (Prompt(("one", "two"), "sums"), last)
    assert read_prompts(path) == (Prompt(("one",), "sums"), last)


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    path, text = tmp_path / "prompts.jsonl", "one\u2028two\x85three"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n{line}\n".encode())
    assert read_prompts(path) == (Prompt((text,)), Prompt((text,)))


def test_there_are_prompts_with_hints():
    prompts = read_prompts(PROMPTS.with_name("edits.jsonl"))
    assert len(prompts) == 16
    for prompt in prompts:
        (turn,) = prompt.turns
        assert prompt.hint
        assert prompt.hint not in turn
        # What is renamed is so in the hint alone.
        names = re.findall(r"`(\w+)`", turn.partition("\n")[0])
        assert len(names) == (2 if prompt.category == "rename" else 0)
        found = [re.search(rf"\b{name}\(", prompt.hint) is not None for name in names]
        assert found == [False, True][: len(names)]


def test_there_are_prompts_with_schemas():
    prompts = read_prompts(PROMPTS.with_name("json_schema.jsonl"))
    assert len(prompts) == 24
    for prompt in prompts:
        assert prompt.json_schema["required"] == list(prompt.json_schema["properties"])


@pytest.mark.parametrize("name", ["tool_calls", "tool_calls_settings"])
def test_schemas_of_tool_calls_are_those_that_a_server_makes(name):
    prompts = read_prompts(PROMPTS.with_name(f"{name}.jsonl"))
    assert len(prompts) == 12
    for prompt in prompts:
        [turn] = prompt.turns
        functions = [json.loads(line) for line in turn.splitlines() if line.startswith("{")]
        assert 2 <= len(functions) <= 4
        tools = [ChatCompletionToolsParam(function=function) for function in functions]
        assert prompt.json_schema == get_json_schema_from_tools("required", tools)
