"""`towerman explain` and `towerman check`: what an operator sees before anything runs."""

from __future__ import annotations

import io
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from towerman.cli import main

TOOLS = '''
"""Tools of a user, and a word at import that belongs on stderr."""

from towerman import Pool, Tower

print("hello from the module")
tower = Tower(pools={"one": Pool(1, max_queued=10)})
clean = Tower(pools={"one": Pool(1, max_queued=10)})


@tower.tool(writes="file:{path}", pools=["one"])
def write(path: str) -> str:
    """Write a file."""
    raise AssertionError("it ran")


@tower.tool
def legacy() -> str:
    """Do something."""
    raise AssertionError("it ran")


@clean.tool(reads="größe:{path}", pools=["one"], timeout=20)
def read(path: str) -> str:
    """Read a file."""
    raise AssertionError("it ran")
'''

CALLS = [
    {"id": "a", "tool": "write", "arguments": {"path": "/srv/S3CRET"}},
    {"id": "b", "tool": "write", "arguments": {"path": "/srv/S3CRET"}},
    {"id": "c", "tool": "legacy", "arguments": {}},
]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of tools and a batch, as the current folder."""
    (tmp_path / "my_tools.py").write_text(TOOLS, encoding="utf-8")
    (tmp_path / "calls.json").write_text(json.dumps(CALLS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("COLUMNS", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_explain_prints_groups_and_draws(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-140, G8: `towerman explain` says what would run together and why not, draws it, and runs nothing."""
    assert main(["explain", "calls.json", "--tools", "my_tools:tower", "--graph", "out.svg"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 calls would run in 3 groups (critical path: 0, 1, 2).\n")
    assert "waits for 0: resource file:{path} (write, then write)" in out
    assert err == "hello from the module\n"
    drawing = (desk / "out.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert "S3CRET" not in out + drawing


def test_explain_as_json_is_nothing_else(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-140: with --json, stdout is JSON and nothing else, whatever the module prints."""
    assert main(["explain", "calls.json", "--tools", "my_tools:tower", "--json", "--format", "towerman"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["groups"] == [[0], [1], [2]]


def test_explain_exits_1_when_a_call_would_be_refused(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-140: what would not be well is told by the exit code, as by `towerman run`."""
    (desk / "calls.json").write_text(json.dumps([*CALLS, {"id": "d", "tool": "wirte", "arguments": {}}]))
    assert main(["explain", "calls.json", "--tools", "my_tools:tower"]) == 1
    assert "unknown_tool: There is no tool of this name. Did you mean 'write'?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain", "absent.json", "--tools", "my_tools:tower"], "absent.json: there is no such file"),
        (["explain", "calls.json", "--tools", "absent:tower"], "--tools absent:tower: there is no module"),
        (["explain", "calls.json", "--tools", "my_tools:tower", "--graph", "no/out.svg"], "--graph no/out.svg: cannot"),
        (["explain", "calls.json", "--tools", "my_tools:tower", "--graph", "a\0b"], "Invalid value for '--graph'"),
        (["explain", "calls.json"], "Missing option '--tools' (see towerman explain --help)"),
        (["check"], "check: name what is to be checked: --tools MODULE:TOWER"),
        (["check", "--tools", "my_tools:tower", "--deadline", "0"], "--deadline: seconds, more than 0; got 0.0"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    desk: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """R-140: what is wrong with the words is one line on stderr, exit code 2, and nothing on stdout."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.replace("hello from the module\n", "").splitlines()
    assert told in line


def test_r140_check_prints_answers_and_exits_by_them(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-140: `towerman check` answers the nine questions; findings above a note give exit code 1."""
    assert main(["check", "--tools", "my_tools:tower"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("Nine questions before enabling concurrent tools\n")
    assert "[undeclared_access]" in out
    assert err == "hello from the module\n"
    assert main(["check", "--tools", "my_tools:clean"]) == 0
    assert "Findings: 0 errors, 0 warnings, 0 notes" in capsys.readouterr().out
    assert main(["check", "--tools", "my_tools:clean", "--deadline", "10", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["code"] for one in told["findings"]] == ["timeout_above_deadline", "wait_above_deadline"]


def test_text_goes_where_only_ascii_goes(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-140: a stdout that takes ASCII only gets every line all the same, with other characters by their numbers."""
    (desk / "calls.json").write_text(json.dumps([{"id": "a", "tool": "read", "arguments": {"path": "x"}}]))
    raw = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        assert main(["explain", "calls.json", "--tools", "my_tools:clean"]) == 0
        sys.stdout.flush()
        text = raw.getvalue().decode("ascii")
    assert "read gr\\xf6\\xdfe:{path}, pool one" in text


@pytest.mark.parametrize("width", [80, 100])
def test_r140_an_explanation_is_as_wide_as_the_terminal(
    desk: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R-140: where the width is known lines are broken at it; groups stand at a line of box characters, and in ASCII
    where only that can be written.
    """
    monkeypatch.setenv("COLUMNS", str(width))
    long = [{"id": name, "tool": name, "arguments": {}} for name in ("nobody" * 3, "wirte", "legacy")]
    (desk / "calls.json").write_text(json.dumps([*CALLS, *long]))
    assert main(["explain", "calls.json", "--tools", "my_tools:tower"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert "┌ group 1: 1 call" in lines
    assert "│ ● 0  write           write file:{path}, pool one" in lines
    assert "│      ╰╌ waits for 0: resource file:{path} (write, then write)" in lines
    raw = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        assert main(["explain", "calls.json", "--tools", "my_tools:tower"]) == 1
        sys.stdout.flush()
        plain = raw.getvalue().decode("ascii").splitlines()
    assert max(map(len, plain)) <= width
    assert "+ group 1: 1 call" in plain
    assert "|      `= waits for 0: resource file:{path} (write, then write)" in plain
    assert len(plain) == len(lines)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("explain", ["CALLS", "--tools", "--format", "--graph", "--json", "run nothing"]),
        ("check", ["--tools", "--deadline", "--json", "nine questions"]),
    ],
)
def test_each_command_has_a_help_of_its_own(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is explained where it is used."""
    assert main([command, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in (*words, "Exit code 0"):
        assert word in out
    assert main(["--help"]) == 0
    assert command in capsys.readouterr().out
