"""`vllm-recycle demo` without a run: what it would ask, and outputs that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import EMBEDDED, MODEL, PROMPTS
from vllm_recycle.cli import demo, main
from vllm_recycle.cli.bench.prompts import read_prompts


def replies(*outputs):
    counts = {"wall_s": 1.0, "steps": 2, "accepted_tokens": 1, "others_cpu_share": 0.0}
    return [counts | {"tokens": len(output), "outputs": [output]} for output in outputs]


def test_no_terminal_has_no_colours(capsys):
    events = [{"event": "text", "text": text, "tokens": 2, "prompt": 0} for text in ("a b", " c")]
    assert demo.show([*events, {"tokens": 4}]) == {"tokens": 4}
    assert capsys.readouterr().out == "a b c\n\n"


def test_outputs_that_differ_are_an_error(monkeypatch, capsys):
    given = {demo.PLAIN: replies([5, 6, 7], [8]), demo.RECYCLING: replies([5, 6, 7], [9])}
    monkeypatch.setattr(demo, "generate", lambda plan: given)
    assert main(["demo", EMBEDDED, "--num-prompts=2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "outputs differ in prompts 2"
    assert any(line.startswith("token recycling ") and line.endswith(" NO") for line in lines)


@pytest.fixture
def plan_of(monkeypatch):
    """The plan of a run that is not made."""

    def made(*arguments: str) -> demo.Plan:
        plans, given = [], dict.fromkeys(demo.TITLES, replies([5]))
        monkeypatch.setattr(demo, "generate", lambda plan: plans.append(plan) or given)
        assert main(["demo", *arguments]) == 0
        assert len(plans[0].prompts) == demo.NUM_PROMPTS
        return plans[0]

    return made


def test_without_the_chat_model_the_embedded_one_runs_on_what_it_knows(
    plan_of, monkeypatch, capsys
):
    monkeypatch.setattr(demo, "CHAT_MODEL", Path("models/missing"))
    plan = plan_of()
    assert "models/missing (`make model` fetches it): the small embedded" in capsys.readouterr().out
    assert (plan.model, plan.chat, plan.dtype) == (str(MODEL), False, "float32")
    gsm8k, humaneval = map(read_prompts, (PROMPTS, PROMPTS.with_name("humaneval.jsonl")))
    assert plan.prompts[:3] == (gsm8k[0], humaneval[0], gsm8k[1])


def test_the_chat_model_is_asked_a_question_of_each_category(plan_of, tmp_path, monkeypatch):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    monkeypatch.setattr(demo, "CHAT_MODEL", tmp_path)
    plan = plan_of()
    assert (plan.model, plan.chat) == (str(tmp_path), True)
    assert len({prompt.category for prompt in plan.prompts}) == demo.NUM_PROMPTS
    assert all(len(prompt.turns) == 1 for prompt in plan.prompts)
    assert set(plan.prompts) <= set(read_prompts(PROMPTS.with_name("spec_bench.jsonl")))


def test_an_installed_package_has_prompts_of_its_own(plan_of, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "EXAMPLES", tmp_path / "examples")
    prompts = plan_of(EMBEDDED).prompts
    assert tuple(prompt.turns[0] for prompt in prompts) == demo.PROMPTS_OF_PACKAGE
