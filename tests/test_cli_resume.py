"""`towerman run --resume`, `explain --resume`, `journal show --batches`: a run gone on with by its id (R-43)."""

from __future__ import annotations

import json
import shlex
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from towerman import Journal
from towerman.cli import main

CANARY = "canary-41d7"

TOOLS = """
from towerman import Tower
from towerman.journal import Journal

tower = Tower({options})


@tower.tool(reads="row")
async def look(n: int) -> dict:
    return {{"n": n + 1}}


@tower.tool(independent=True, read_only=False)
async def write(n: int, text: str = "") -> str:
    with open("effects", "a") as file:
        file.write(f"{{n}}\\n")
    if n == 13:
        raise ValueError("unlucky")
    return f"wrote {{n}}"
"""

PLAN = {
    "plan": [
        {"id": "a", "tool": "look", "arguments": {"n": 1}},
        {"id": "b", "tool": "write", "arguments": {"n": "${a.n}", "text": CANARY}},
        {"id": "c", "tool": "write", "arguments": {"n": 7}, "needs": ["b"]},
    ]
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tools, a plan, and an empty journal's place."""
    monkeypatch.chdir(tmp_path)
    tools(tmp_path, 'journal="j.db"')
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return tmp_path


def tools(folder: Path, options: str, name: str = "mine") -> None:
    (folder / f"{name}.py").write_text(TOOLS.format(options=options))


def say(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def effects() -> list[str]:
    path = Path("effects")
    return path.read_text().split() if path.exists() else []


def rows(path: Path, sql: str, *given: object) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        return db.execute(sql, given).fetchall()
    finally:
        db.close()


def cut_off(path: Path, *, unknown: bool = False) -> None:
    """As if the process had died: in the middle of the last step, or before it."""
    rows(path, "UPDATE owners SET pid = 999999999, beat = 0, ended = NULL")
    rows(path, "UPDATE batches SET token = x'01', ended_at = NULL, ok = NULL")
    if unknown:
        rows(
            path, "UPDATE calls SET state = 'open', ended_at = NULL, outcome = NULL, applied = 'unknown' WHERE slot = 2"
        )
    else:
        rows(path, "DELETE FROM calls WHERE slot = 2")


def test_r43_the_id_is_said_and_is_enough_to_go_on(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-43: what has finished is answered, what had not begun runs; a run that has ended prints its results again."""
    code, out, err = say(capsys, "run", "plan.json", "--tools", "mine.py")
    assert code == 0 and effects() == ["2", "7"]
    first = json.loads(out)
    run = err.split()[2].rstrip(";")
    assert err == f"towerman: run {run}; if it is cut off: towerman run --tools mine.py --resume {run}\n"
    cut_off(desk / "j.db")
    code, out, err = say(capsys, "run", "--resume", run, "--tools", "mine.py")
    assert (code, err) == (0, "")
    assert [one["content"] for one in json.loads(out)] == [one["content"] for one in first]
    assert effects() == ["2", "7", "7"]
    code, out, err = say(capsys, "run", "--resume", run, "--tools", "mine.py", "--json")
    assert code == 0 and [one["content"] for one in json.loads(out)] == [one["content"] for one in first]
    assert effects() == ["2", "7", "7"], "nothing runs"


def test_r43_what_is_unknown_is_held_and_named(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-43, G10: the numbers and the next words to say are on stderr; once it is settled the run ends."""
    assert say(capsys, "run", "plan.json", "--tools", "mine.py", "--run-id", "mine")[0] == 0
    cut_off(desk / "j.db", unknown=True)
    code, out, err = say(capsys, "run", "--resume", "mine", "--tools", "mine.py")
    assert code == 1 and [one["code"] for one in json.loads(out)] == [None, None, "effect_unknown"]
    ((number,),) = rows(desk / "j.db", "SELECT id FROM calls WHERE slot = 2")
    assert f"towerman journal resolve {number} --applied or --not-applied" in err
    assert "towerman run --tools mine.py --resume mine" in err and CANARY not in err
    code, out, _ = say(capsys, "explain", "--resume", "mine", "--tools", "mine.py")
    assert code == 0 and f"unknown: call {number} of the journal" in out and "2 done, 1 unknown" in out
    assert say(capsys, "journal", "resolve", number, "--not-applied", "--journal", "j.db")[0] == 0
    assert "settled: it did not take effect" in say(capsys, "explain", "--resume", "mine", "--tools", "mine.py")[1]
    code, _, err = say(capsys, "run", "--resume", "mine", "--tools", "mine.py")
    assert (code, err) == (0, "")
    assert effects() == ["2", "7", "7"]


def test_the_graph_is_printed_and_drawn_with_each_steps_state(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-43: as text, as JSON and as a picture; nothing runs, and no value is shown."""
    assert say(capsys, "run", "plan.json", "--tools", "mine.py", "--run-id", "mine")[0] == 0
    cut_off(desk / "j.db")
    before = effects()
    code, out, _ = say(capsys, "explain", "--resume", "mine", "--tools", "mine.py", "--graph", "g.svg", "--json")
    told = json.loads(out)
    assert code == 0 and [call["state"] for call in told["calls"]] == ["done", "done", "not begun"]
    picture = Path("g.svg").read_text()
    assert 'class="card chain is-done"' in picture and "State: 2 done, 1 not begun." in picture
    text = say(capsys, "explain", "--resume", "mine", "--tools", "mine.py")[1]
    assert "2 done, 1 not begun" in text
    assert CANARY not in out + picture + text
    assert effects() == before
    plain = say(capsys, "explain", "plan.json", "--tools", "mine.py", "--graph", "p.svg")[1]
    assert "not begun" not in plain and "is-done" not in Path("p.svg").read_text()


def test_a_plain_batch_is_gone_on_with_too(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-43: what the command line was given is written down, plan or not; a failure is told again and not repeated."""
    (desk / "calls.json").write_text(json.dumps([{"tool": "write", "arguments": {"n": n}} for n in (13, 2, 3)]))
    assert say(capsys, "run", "calls.json", "--tools", "mine.py", "--run-id", "mine")[0] == 1
    assert sorted(effects()) == ["13", "2", "3"]
    cut_off(desk / "j.db")
    code, out, _ = say(capsys, "run", "--resume", "mine", "--tools", "mine.py")
    assert code == 1 and [one["code"] for one in json.loads(out)] == ["handler_error", None, None]
    assert sorted(effects()) == ["13", "2", "3", "3"]
    states = json.loads(say(capsys, "explain", "--resume", "mine", "--tools", "mine.py", "--json")[1])["calls"]
    assert states[0]["state"].startswith("unknown: call ") and states[1]["state"] == "done"


def test_without_stored_arguments_the_plan_is_handed_in_again(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said plainly; another plan is refused by its digest, and nothing runs."""
    tools(desk, 'journal=Journal("bare.db", arguments=False)', "bare")
    assert say(capsys, "run", "plan.json", "--tools", "bare.py", "--run-id", "mine")[0] == 0
    cut_off(desk / "bare.db")
    code, out, err = say(capsys, "run", "--resume", "mine", "--tools", "bare.py")
    assert (code, out) == (2, "") and "it stores no arguments" in err and "towerman run CALLS --resume mine" in err
    other = json.loads(json.dumps(PLAN))
    other["plan"][2]["arguments"]["n"] = 8
    (desk / "other.json").write_text(json.dumps(other))
    code, out, err = say(capsys, "run", "other.json", "--resume", "mine", "--tools", "bare.py")
    assert (code, out) == (2, "") and "these are not the calls that were begun" in err
    assert effects() == ["2", "7"]
    code, _, _ = say(capsys, "run", "plan.json", "--resume", "mine", "--tools", "bare.py")
    assert code == 0 and effects() == ["2", "7", "7"]


def test_what_cannot_be_gone_on_with_is_one_line(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown id, a tower without a journal, several batches in a run, a name that none has."""
    tools(desk, "", "none")
    for words, told in (
        (("--resume", "nobody", "--tools", "mine.py"), "no batch of run 'nobody' is written down in"),
        (("--resume", "mine", "--tools", "none.py"), "has no journal; say Tower(journal='towerman.db')"),
    ):
        for command in ("run", "explain"):
            code, out, err = say(capsys, command, *words)
            assert (code, out) == (2, "") and told in err and len(err.splitlines()) == 1
    assert say(capsys, "run", "plan.json", "--tools", "mine.py", "--run-id", "two")[0] == 0
    with Journal(desk / "j.db") as journal:
        journal.begin_batch(b"k", b"t", run_id="two", name="another", plan=True, size=1).result()
        journal.finish_batch(b"t", 1).result()
    code, _, err = say(capsys, "run", "--resume", "two", "--tools", "mine.py")
    assert code == 2 and "has several batches: 'another', 'batch'; say which: --batch-id NAME" in err
    code, _, err = say(capsys, "run", "--resume", "two", "--tools", "mine.py", "--batch-id", "zzz")
    assert code == 2 and "no batch 'zzz' of run 'two'" in err
    code, _, err = say(capsys, "run", "--resume", "two", "--tools", "mine.py", "--batch-id", "another")
    assert code == 2 and "some have no form that can be stored" in err
    assert say(capsys, "run", "--resume", "two", "--tools", "mine.py", "--batch-id", "batch")[0] == 0


@pytest.mark.parametrize("name", ["", "a b", "ü", "../x", "x" * 200, "a\nb", "\udcff"])
@pytest.mark.parametrize("options", ['journal="j.db"', ""])
def test_a_name_that_no_run_can_have_is_one_line(
    name: str, options: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the empty one, which is not replaced without a word; with a journal and without; nothing runs."""
    tools(desk, options)
    for words in (
        ("run", "plan.json", "--run-id", name),
        ("run", "plan.json", "--resume", name),
        ("explain", "--resume", name),
    ):
        code, out, err = say(capsys, *words, "--tools", "mine.py")
        assert (code, out) == (2, ""), words
        assert err.startswith(f"towerman: {words[-2]}: 1 to 128 letters, digits, '_', '-' or '.'; got '"), err
        assert err.count("\n") == 1
    assert effects() == []


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 400, "\udcff"])
def test_a_name_that_no_batch_has_is_one_line(name: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one is told as such, each other one is not written down."""
    assert say(capsys, "run", "plan.json", "--tools", "mine.py", "--run-id", "mine")[0] == 0
    for command in ("run", "explain"):
        code, out, err = say(capsys, command, "--resume", "mine", "--batch-id", name, "--tools", "mine.py")
        assert (code, out) == (2, "")
        assert err.startswith("towerman: --resume: no batch " if name else "towerman: --batch-id: the name of a batch")
        assert err.count("\n") == 1


def test_the_hint_can_be_said_as_it_stands(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-43: also where the id looks like an option, and where the place of the tools has a blank in it."""
    (desk / "my tools").mkdir()
    tools(desk / "my tools", 'journal="j.db"')
    code, first, err = say(capsys, "run", "plan.json", "--tools", "my tools/mine.py", "--run-id=-x")
    assert code == 0
    hint = err.partition("cut off: ")[2]
    assert hint == "towerman run --tools 'my tools/mine.py' --resume=-x\n"
    code, out, err = say(capsys, *shlex.split(hint)[1:])
    assert (code, err) == (0, "")
    assert [one["content"] for one in json.loads(out)] == [one["content"] for one in json.loads(first)]
    assert effects() == ["2", "7"]


def test_a_document_that_cannot_be_read_is_told(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever has happened to the file: handed in again, the plan goes on."""
    assert say(capsys, "run", "plan.json", "--tools", "mine.py", "--run-id", "mine")[0] == 0
    rows(desk / "j.db", "UPDATE arguments SET body = x'007b7d' WHERE kind = 'batch'")
    code, _, err = say(capsys, "run", "--resume", "mine", "--tools", "mine.py")
    assert code == 2 and "cannot be read (a stored batch has another form); hand them in again" in err
    assert say(capsys, "run", "plan.json", "--resume", "mine", "--tools", "mine.py")[0] == 0


def test_a_run_that_is_at_work_elsewhere_is_not_run_beside_it(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S14: who is at work on it is named; a tower that does not join answers at once."""
    tools(desk, 'journal="j.db", on_duplicate="conflict"', "strict")
    tools(desk, 'journal="j.db", max_wait=0.1', "short")
    assert say(capsys, "run", "plan.json", "--tools", "mine.py", "--run-id", "mine")[0] == 0
    rows(desk / "j.db", "UPDATE owners SET ended = NULL")  # this process, which lives
    rows(desk / "j.db", "UPDATE batches SET token = x'01', ended_at = NULL")
    before = effects()
    for name, code, told in (("strict", "idempotency_conflict", "not waited for"), ("short", "wait_timeout", "0.1 s")):
        exit_code, out, err = say(capsys, "run", "--resume", "mine", "--tools", f"{name}.py")
        assert exit_code == 1 and {one["code"] for one in json.loads(out)} == {code}
        assert "run mine is at work in process" in err and told in err
    assert effects() == before


def test_batches_are_listed(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest first, with how each stands; nothing of arguments."""
    assert "no batch is written down" in say(capsys, "journal", "show", "--batches", "--journal", made(desk))[1]
    for run in ("one", "two"):
        assert say(capsys, "run", "plan.json", "--tools", "mine.py", "--run-id", run)[0] == 0
    rows(desk / "j.db", "UPDATE owners SET pid = 999999999, beat = 0, ended = NULL")
    rows(desk / "j.db", "UPDATE batches SET token = x'01', ended_at = NULL, ok = NULL WHERE run_id = 'two'")
    code, out, _ = say(capsys, "journal", "show", "--batches", "--journal", "j.db")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3 and "cut off" in lines[1] and "plan batch  3" in lines[1]
    assert "ended" in lines[2] and CANARY not in out
    told = json.loads(say(capsys, "journal", "show", "--batches", "--run", "one", "--journal", "j.db", "--json")[1])
    assert [(one["run_id"], one["batch_id"], one["state"], one["ok"]) for one in told["batches"]] == [
        ("one", "batch", "ended", 3)
    ]
    code, _, err = say(capsys, "journal", "show", "--batches", "--tool", "x", "--journal", "j.db")
    assert code == 2 and "--tool and --state are of calls" in err


def made(folder: Path) -> Path:
    with Journal(folder / "j.db") as journal:
        journal.migrate()
    return folder / "j.db"
