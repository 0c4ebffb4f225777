"""`vllm-recycle bench --chat --by-category`: conversations turn by turn, counted by category."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.tool_parsers.utils import get_json_schema_from_tools

from vllm_recycle.cli import main
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.methods import HINTS
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.prompts import Prompt, read_prompts

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
PROMPTS = (
    Prompt(("Tom has 3 apples and buys 4. How many has he?", "And if he eats two?"), "sums"),
    Prompt(("def add(a, b):",), "code"),
    Prompt(("Anna runs 5 miles a day. How many in a week?",), "sums"),
    Prompt(("class Stack:",), "code"),
)
EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """The embedded target, whose tokenizer is given a chat template."""
    folder = tmp_path_factory.mktemp("chat-model")
    for file in (EXAMPLES / "models/target").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"category": one.category, "turns": one.turns}) for one in PROMPTS]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_the_answers_go_into_the_next_turn(chat_model):
    plan = Plan(
        str(chat_model),
        Path("prompts.jsonl"),
        PROMPTS,
        {"none": None},
        chat=True,
        max_tokens=12,
        dtype="float32",
        engine_args=EAGER,
    )
    with driver.children(plan) as running:
        driver.load(plan, running["none"], None)
        reply = running["none"].ask("run", **driver.pass_arguments(plan, 1, 0))
        together = running["none"].ask("run", **driver.pass_arguments(plan, 4, 0))
        warm = driver.pass_arguments(replace(plan, temperature=1.0), 1, 0)
        sampled = [running["none"].ask("run", **warm)["outputs"] for _ in range(2)]
        *events, streamed = running["none"].follow(
            "run", stream=True, **driver.pass_arguments(plan, 1, 0)
        )
    expected, texts = _chat(str(chat_model))
    assert reply["outputs"] == together["outputs"] == streamed["outputs"] == expected
    assert sampled[0] == sampled[1] != expected
    assert [one["requests"] for one in reply["prompts"]] == [2, 1, 1, 1]
    assert [one["tokens"] for one in reply["prompts"]] == list(map(len, expected))
    assert 0.9 < sum(one["seconds"] for one in reply["prompts"]) / reply["wall_s"] <= 1
    told = ["".join(e["text"] for e in events if e["prompt"] == i) for i in range(len(PROMPTS))]
    assert told == texts
    assert sum(event["tokens"] for event in events) == reply["tokens"]


@pytest.mark.slow
def test_an_answer_follows_the_schema_of_its_prompt():
    of_bool = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema = {**of_bool, "additionalProperties": False}
    model, prompt = EXAMPLES / "models/target", PROMPTS[1]
    prompts = (prompt, replace(prompt, json_schema=schema))
    plan = Plan(str(model), Path("p"), prompts, {"none": None}, dtype="float32", engine_args=EAGER)
    with driver.children(plan) as running:
        driver.load(plan, running["none"], None)
        free, follows = running["none"].ask("run", **driver.pass_arguments(plan, 2, 0))["outputs"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert not tokenizer.decode(free).lstrip().startswith("{")
    assert json.loads(tokenizer.decode(follows, skip_special_tokens=True)).keys() == {"ok"}


@pytest.mark.slow
def test_only_the_method_hints_is_told_the_hints():
    prompt, own = PROMPTS[1], {"method": "token_recycling", "row_cost": 0, "scope": "isolated"}
    settings = {"dtype": "float32", "engine_args": EAGER, "max_tokens": 24}
    plan = Plan(str(EXAMPLES / "models/target"), Path("p"), (prompt,), {"none": None}, **settings)
    with driver.children(plan) as running:
        driver.load(plan, running["none"], None)
        answer = running["none"].ask("run", **driver.pass_arguments(plan, 1, 0))["outputs"][0]
    text = AutoTokenizer.from_pretrained(plan.model).decode(answer)
    methods = {"token_recycling": own, HINTS: own}
    plan = replace(plan, prompts=(replace(prompt, hint=text),), methods=methods)
    with driver.children(plan) as running:
        found = {}
        for name, child in running.items():
            driver.load(plan, child, own)
            found[name] = child.ask("run", **driver.pass_arguments(plan, 1, 0))
    assert [one["outputs"] for one in found.values()] == [[answer]] * 2
    assert found["hints"]["steps"] < found["token_recycling"]["steps"]


def test_there_are_prompts_with_hints():
    prompts = read_prompts(EXAMPLES / "prompts/edits.jsonl")
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
    prompts = read_prompts(EXAMPLES / "prompts/json_schema.jsonl")
    assert len(prompts) == 24
    for prompt in prompts:
        assert prompt.json_schema["required"] == list(prompt.json_schema["properties"])


@pytest.mark.parametrize("name", ["tool_calls", "tool_calls_settings"])
def test_schemas_of_tool_calls_are_those_that_a_server_makes(name):
    prompts = read_prompts(EXAMPLES / f"prompts/{name}.jsonl")
    assert len(prompts) == 12
    for prompt in prompts:
        [turn] = prompt.turns
        functions = [json.loads(line) for line in turn.splitlines() if line.startswith("{")]
        assert 2 <= len(functions) <= 4
        tools = [ChatCompletionToolsParam(function=function) for function in functions]
        assert prompt.json_schema == get_json_schema_from_tools("required", tools)


def _chat(model: str) -> tuple[list[list[int]], list[str]]:
    """Token ids and text of each conversation's answers, by vLLM's own `LLM.chat`."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", seed=0, enable_prefix_caching=False, **EAGER)
    outputs, texts = [], []
    try:
        for prompt in PROMPTS:
            messages, token_ids, text = [], [], ""
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                params = SamplingParams(temperature=0, max_tokens=12)
                (result,) = llm.chat(messages, params, use_tqdm=False)
                messages.append({"role": "assistant", "content": result.outputs[0].text})
                token_ids += result.outputs[0].token_ids
                text += result.outputs[0].text
            outputs.append(token_ids)
            texts.append(text)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return outputs, texts


@pytest.mark.slow
def test_categories_are_reported(chat_model, prompts_file, tmp_path, capsys):
    arguments = ["bench", f"--model={chat_model}", f"--prompts={prompts_file}"]
    arguments += [f"--json={tmp_path}/result.json"]
    arguments += ["--chat", "--by-category", "--methods=none,token_recycling"]
    # Whatever a row costs on a busy machine.
    arguments += ['--speculative-config=token_recycling={"method":"token_recycling","row_cost":0}']
    arguments += ["--max-tokens=12", "--repeats=2", "--concurrency=1,2", "--dtype=float32"]
    assert main([*arguments, f"--engine-args={json.dumps(EAGER)}"]) == 0
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["conditions"]["chat"] is True
    rows = report["results"]
    assert [(row["method"], row["concurrency"]) for row in rows] == [
        ("none", 1),
        ("token_recycling", 1),
        ("none", 2),
        ("token_recycling", 2),
    ]
    for row in rows:
        assert row["outputs_equal"] is True
        assert row["requests"] == 5
        assert list(row["categories"]) == ["sums", "code"]
        figures = row["categories"].values()
        assert [one["runs"] for one in figures] == [4, 4]  # two prompts in two repeats
        assert sum(one["tokens"] for one in figures) == 2 * row["tokens"]
        # The categories' times are all of the passes' but what is between the steps.
        seconds = sum(one["tokens"] / one["tokens_per_s"] for one in figures)
        assert 0.8 * sum(row["wall_s"]) < seconds < sum(row["wall_s"])
        if row["method"] == "none":
            assert {(one["speedup"], one["mean_accepted_tokens"]) for one in figures} == {(1, 1)}
            assert row["rows_per_step"] == 1
        else:
            assert row["rows_per_step"] > row["mean_accepted_tokens"] > 1
    table = capsys.readouterr().out.splitlines()
    for level in (1, 2):
        start = table.index(f"speedup (accepted) with {level} in flight")
        heads, *lines = (line.split() for line in table[start + 1 : start + 5])
        assert heads == ["runs", "none", "token_recycling"]
        assert [line[:2] for line in lines] == [["sums", "4"], ["code", "4"], ["all", "8"]]


def test_only_a_chat_has_more_turns_than_one(prompts_file):
    assert read_prompts(prompts_file, chat=True) == PROMPTS
    first = read_prompts(prompts_file)[0]
    assert first == Prompt(PROMPTS[0].turns[:1], "sums")
