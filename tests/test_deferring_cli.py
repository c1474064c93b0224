"""`towerman worker`, `submit`, `status`, `result`, `cancel`: exit codes, JSON, and a worker that is asked to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_journal_store import deferred

from towerman import Journal
from towerman.cli import main

TOOLS = """
import asyncio
from towerman import Tower, ToolError

tower = Tower(journal="j.db", pools={"one": 1})

@tower.tool(writes="box:{n}", pools=["one"], when_busy="defer", idempotent=False)
async def pack(n: int, seconds: float = 0.0) -> str:
    with open("packed", "a") as file:
        print(n, file=file)
    await asyncio.sleep(seconds)
    return f"packed {n}"

@tower.tool(reads="box:{n}")
async def look(n: int) -> str:
    if n < 0:
        raise ToolError("not there", applied="no")
    return f"looked {n}"

plain = Tower()
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with tools, and nothing of the machine's own environment."""
    for name in [name for name in os.environ if name.startswith("TOWERMAN_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box_tools.py").write_text(TOOLS)
    return tmp_path


def say(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "towerman", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    """The same in this process, as JSON."""
    code = main([*map(str, words), "--json"])
    told = capsys.readouterr()
    return code, json.loads(told.out) if told.out.strip() else None, told.err


def write(calls: object) -> str:
    Path("calls.json").write_text(json.dumps(calls))
    return "calls.json"


CALLS = [
    {"tool": "pack", "arguments": {"n": 1}, "id": "a"},
    {"tool": "look", "arguments": {"n": 1}, "id": "b"},
    {"tool": "look", "arguments": {"n": -1}, "id": "c"},
    {"tool": "look", "arguments": {"n": 5}, "id": "d", "needs": ["c"]},
]


def test_r123_submitted_calls_are_run_and_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """R-123: submit, status, worker, result: what was put in is run once, in order, and can be followed by handle."""
    submit = ("submit", write(CALLS), "--tools", "box_tools.py:tower", "--run-id", "r", "--batch-id", "b")
    code, out, err = say(*submit, "--tenant", "t", "--priority", 2, "--json")
    assert (code, err) == (0, "")
    first = json.loads(out)["calls"]
    assert [one["code"] for one in first] == ["deferred", "held_behind", "deferred", "held_behind"]
    code, out, _ = say(*submit, "--tenant", "t")
    assert code == 0 and [line.split()[2] for line in out.splitlines()] == [one["handle"] for one in first]
    code, told, _ = said(capsys, "status", "--journal", "j.db")
    assert code == 0 and told["counts"] == {"queued": 4}
    assert {one["tenant"] for one in told["calls"]} == {"t"} and {one["priority"] for one in told["calls"]} == {2}
    handle = first[0]["handle"]
    code, told, err = said(capsys, "result", handle, "--journal", "j.db", "--wait", 0.01)
    assert code == 1 and told["state"] == "queued" and told["content"] is None and "it waits in the queue" in err
    code, out, _ = say("worker", "--tools", "box_tools.py:tower", "--once")
    assert code == 1 and out.splitlines()[-1] == "2 done, 2 failed, 0 returned, 0 unknown, 0 lost"
    assert Path("packed").read_text() == "1\n"
    code, told, _ = said(capsys, "result", handle, "--tools", "box_tools.py:tower")
    assert code == 0 and (told["content"], told["outcome"], told["run_id"]) == ("packed 1", "ok", "r")
    assert main(["result", handle, "--journal", "j.db"]) == 0 and capsys.readouterr().out == "packed 1\n"
    code, told, err = said(capsys, "result", first[3]["handle"], "--journal", "j.db")
    assert code == 1 and told["code"] == "dependency_failed" and "skipped" in err
    assert main(["status", handle, "--journal", "j.db"]) == 0
    assert "it ended ok" in capsys.readouterr().out
    assert main(["status", first[2]["handle"], "--journal", "j.db"]) == 1
    assert "it ended error (handler_error)" in capsys.readouterr().out
    assert main(["status", "--journal", "j.db"]) == 0 and capsys.readouterr().out == "4 done\n"
    code, out, _ = say("worker", "--tools", "box_tools.py:tower", "--once", "--json")
    assert code == 0 and json.loads(out) == {
        "done": 0, "failed": 0, "returned": 0, "unknown": 0, "lost": 0, "left": 0, "waiting_for_approval": 0,
    }  # fmt: skip


def test_what_is_refused_is_told_and_costs_the_others_nothing() -> None:
    """Submit looks each call over: exit code 1 where one is refused; the others are in the queue."""
    calls = [{"tool": "pack", "arguments": {"n": "x"}}, {"tool": "nope", "arguments": {}}, CALLS[0]]
    code, out, err = say("submit", write(calls), "--tools", "box_tools.py:tower")
    assert code == 1 and err == ""
    lines = out.splitlines()
    assert "invalid_arguments" in lines[0] and "unknown_tool" in lines[1] and "later-" in lines[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["worker", "--tools", "box_tools.py:plain"], "no journal"),
        (["worker", "--tools", "box_tools.py:tower", "--poll", "0"], "poll"),
        (["worker", "--tools", "nowhere:tower"], "no module"),
        (["submit", "calls.json", "--tools", "box_tools.py:plain"], "the tower has none"),
        (["submit", "calls.json", "--tools", "box_tools.py:tower", "--run-id", "a b"], "run_id"),
        (["submit", "missing.json", "--tools", "box_tools.py:tower"], "no such file"),
        (["status", "x", "--journal", "j.db"], "no deferred call 'x'"),
        (["status", "--journal", "missing.db"], "no such file"),
        (["result", "", "--journal", "j.db"], "no deferred call ''"),
        (["result", "x", "--tools", "box_tools.py:plain"], "no journal"),
        (["cancel", "x", "--journal", "j.db"], "no deferred call 'x'"),
        (["cancel", "x", "--journal", "calls.json"], "no journal"),
    ],
)
def test_wrong_input_is_one_clear_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line on stderr that names the place; nothing on stdout."""
    write(CALLS)
    with Journal("j.db") as journal:
        journal.counts().result()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert told in err and len(err.splitlines()) == 1 and out == ""


def test_calls_are_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    """A call that waits is cancelled; one that is at work is told to stop; one that is over is not."""
    with Journal("j.db") as journal:
        for name in ("a", "b", "c"):
            journal.enqueue(deferred(name), b"[{}, null]").result()
        [(b, _), (c, _)] = sorted(journal.claim_next(limit=9).result()[1:], key=lambda one: one[0].handle)
        [(a, _)] = [one for one in [journal.deferred("a").result()] if one is not None]
        assert a.state == "claimed" and b.claim is not None and c.claim is not None
        journal.give_back(b.claim).result()
        code, told, _ = said(capsys, "cancel", "a", "b", "--journal", "j.db")
        assert code == 0 and [one["state"] for one in told["calls"]] == ["claimed", "cancelled"]
        assert main(["status", "a", "--journal", "j.db"]) == 0
        assert "is told to stop it" in capsys.readouterr().out
        assert main(["cancel", "b", "--journal", "j.db"]) == 0
        assert "b: cancelled" in capsys.readouterr().out
        from towerman.records import Answer

        journal.finish_deferred(c.claim, Answer("ok", None, "yes", content="x"), "unknown").result()
        assert main(["cancel", "c", "--journal", "j.db"]) == 1
        assert "not cancelled, it is unknown" in capsys.readouterr().out
        code, told, _ = said(capsys, "status", "--journal", "j.db")
        assert code == 1 and told["counts"] == {"claimed": 1, "cancelled": 1, "unknown": 1}
        assert main(["result", "c", "--journal", "j.db"]) == 1
        assert "nobody knows" in capsys.readouterr().err
        assert main(["status", "b", "--journal", "j.db"]) == 1
        assert "cancelled before it began" in capsys.readouterr().out
    assert main(["status", "--journal", "j.db"]) == 1
    assert main(["result", "a", "--journal", "j.db"]) == 1


def test_an_empty_queue_and_a_file_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty queue is well; a journal that cannot be read now is exit code 1, and one line."""
    with Journal("j.db") as journal:
        journal.counts().result()
    assert main(["status", "--journal", "j.db"]) == 0 and capsys.readouterr().out == "nothing was deferred\n"
    from concurrent.futures import Future

    from towerman.records import JournalUnavailable

    def locked(*_: object, **__: object) -> Future[object]:
        future: Future[object] = Future()
        future.set_exception(JournalUnavailable("locked", "journal j.db: another program holds its lock for too long"))
        return future

    for name in ("deferred", "deferred_calls", "cancel_deferred"):
        monkeypatch.setattr(Journal, name, locked)
    for words in (["status"], ["status", "x"], ["result", "x"], ["cancel", "x"]):
        assert main([*words, "--journal", "j.db"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and "holds its lock" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_g12_a_worker_that_is_asked_to_end_finishes_what_runs(number: int) -> None:
    """G12, R-123: on SIGTERM and Ctrl-C what runs ends, what waits stays in the queue, nothing is left claimed, and the
    exit code is 0.
    """
    calls = [{"tool": "pack", "arguments": {"n": n, "seconds": 0.6}} for n in range(3)]
    assert say("submit", write(calls), "--tools", "box_tools.py:tower")[0] == 0
    worker = subprocess.Popen(
        [sys.executable, "-m", "towerman", "worker", "--tools", "box_tools.py:tower", "--json"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while not Path("packed").exists() and time.monotonic() < end:
        time.sleep(0.01)
    worker.send_signal(number)
    out, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    report = json.loads(out)
    assert report["done"] == 1 and report["unknown"] == 0 and report["failed"] == 0
    with Journal("j.db") as journal:
        states = sorted(one.state for one in journal.deferred_calls().result())
        assert states == ["done", "queued", "queued"]
        assert journal.unknown().result() == []
    assert Path("packed").read_text() == "0\n"
