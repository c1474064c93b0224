"""Planners' plans on the command line: the form is found out or named, and what is wrong is told in one line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from towerman.cli import main

TOOLS = '''
from towerman import Tower

tower = Tower()


@tower.tool(independent=True)
async def look(text: str) -> dict:
    """Look something up."""
    return {"n": len(text)}


@tower.tool(independent=True)
async def add(one: dict, other: dict) -> int:
    """Add two numbers."""
    return one["n"] + other["n"]


print("loaded")
'''

PLANS = {
    "llmcompiler": '1. look("abc")\n2. look("de")\n3. add($1, $2)\n4. join()<END_OF_PLAN>',
    "rewoo": "Plan: x\n#E1 = look[abc]\n#E2 = look[#E1 and more]",
    "taskbench": '{"task_nodes": [{"task": "look", "arguments": ["abc"]}, {"task": "add", "arguments": '
    '["<node-0>", {"name": "other", "value": "<node-0>"}]}], "task_links": [{"source": "look", "target": "add"}]}',
    "hugginggpt": '[{"task": "look", "id": 0, "dep": [-1], "args": {"text": "abc"}},'
    ' {"task": "add", "id": 1, "dep": [0], "args": {"one": "<GENERATED>-0", "other": "<GENERATED>-0"}}]',
    "nestful": '[{"name": "look", "label": "var1", "arguments": {"text": "abc"}},'
    ' {"name": "add", "label": "var2", "arguments": {"one": "$var1$", "other": {"n": "$var1.n$"}}}]',
    "worfbench:look": "Node:\n1: Look up\n2: Then rest\nEdges: (START,1) (1,2) (2,END)",
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of tools in it, as the current folder; what is imported from it is forgotten."""
    (tmp_path / "planned_tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("planned_tools", None)


def command(name: str, plan: str, *words: str) -> int:
    Path("plan.txt").write_text(plan)
    return main([name, "plan.txt", "--tools", "planned_tools:tower", *words])


@pytest.mark.parametrize("form", PLANS)
@pytest.mark.parametrize("named", [False, True])
def test_a_plan_runs_and_is_explained(form: str, named: bool, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-29, R-40: in every form, found out or named; stdout holds the results alone."""
    words = ["--format", form] if named or ":" in form else []
    assert command("run", PLANS[form], *words) == 0
    out, err = capsys.readouterr()
    results = json.loads(out)
    assert [one["outcome"] for one in results] == ["ok"] * len(results)
    assert err == "loaded\n"
    last = {"llmcompiler": "5", "taskbench": "6", "hugginggpt": "6", "nestful": "6"}.get(form)
    assert last is None or results[-1]["content"] == last
    assert command("explain", PLANS[form], "--json", *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["groups"]) == 2
    assert told["refused"] == []


def test_a_plan_from_stdin(desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(PLANS["llmcompiler"].encode())))
    assert main(["run", "-", "--tools", "planned_tools:tower"]) == 0
    assert json.loads(capsys.readouterr().out)[2]["content"] == "5"


@pytest.mark.parametrize("name", ["run", "explain"])
@pytest.mark.parametrize(
    ("plan", "words", "said"),
    [
        (
            "1. look('a'\n",
            [],
            "plan.txt: line 2, in the step that begins in line 1: ',' or ')' is wanted; write text in",
        ),
        ("hello", [], "plan.txt: neither JSON nor a plan in a known form; --format says in which it is written"),
        ("", ["--format", "rewoo"], "plan.txt: no step of the form 'rewoo'"),
        ("", [], "plan.txt: it is empty; an empty batch is []"),
        ("1. look(1)\n#E1 = look[x]", [], "plan.txt: this could be a plan in the form 'llmcompiler' and 'rewoo': say"),
        ("x", ["--format", "dot"], "--format 'dot': no such form; known are openai, anthropic, towerman, llmcompiler,"),
        ("[]", ["--format", "llmcompiler"], "plan.txt: no step of the form 'llmcompiler'"),
        ('{"task_nodes": 3}', [], "plan.txt: task_nodes: a list is wanted, got int"),
        (PLANS["worfbench:look"], [], "plan.txt: no node's text is the name of a tool; name the tool"),
        ("#E1 = look[x]", ["--format", "openai"], "plan.txt: no JSON"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    name: str, plan: str, words: list[str], said: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(name, plan, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.removeprefix("loaded\n").startswith(f"towerman: {said}")
    assert err.removeprefix("loaded\n").count("\n") == 1


def test_r30_a_plan_that_is_refused_is_exit_1(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """G5, R-30: each step has its result, with the reason."""
    plan = "1. look('a')\n2. add($1, $2)"
    assert command("run", plan) == 1
    out, err = capsys.readouterr()
    results: list[dict[str, Any]] = json.loads(out)
    assert [one["code"] for one in results] == ["dependency_cycle"] * 2
    assert err == "loaded\ntowerman: 2 of 2 calls did not end ok\n"
    assert command("explain", plan) == 1
    assert "the whole plan, dependency_cycle: call '2' needs itself" in " ".join(capsys.readouterr().out.split())


def test_submit_takes_calls_only(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The queue has no place for values that are still to come: a planner's plan is no batch there."""
    assert main(["submit", "nothing.txt", "--tools", "planned_tools:tower"]) == 2
    assert command("submit", PLANS["llmcompiler"]) == 2
    assert "no JSON" in capsys.readouterr().err
