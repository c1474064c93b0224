"""`towerman journal`: what happened to which call; unknown effects are listed and settled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from towerman import Journal
from towerman.cli import main
from towerman.journal import file
from towerman.records import Answer, Intent

OK = Answer("ok", None, "yes", content="x")
LOST = Answer("timed_out", "handler_timeout", "unknown", content="x")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the machine's own environment says is no part of a test."""
    for name in [name for name in os.environ if name.startswith("TOWERMAN_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A journal with one call that is done, two that are unknown, and one whose journal was closed over it."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        for number, answer in enumerate((OK, LOST, LOST, None)):
            name = "pay" if number < 3 else "mail"
            one = Intent(os.urandom(16), None, None, name, f"run-{number}", 1, 0, call_id="c", harmless=number == 2)
            journal.begin(one).result()
            if answer is not None:
                journal.finish(one.token, answer).result()
    return path


def say(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main(["journal", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    """Exit code, and what it says as JSON."""
    code, out, _ = say(capsys, *words, "--json")
    return code, json.loads(out)


def test_show(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The latest calls, the newest first, with what came of each; filters; nothing of arguments or answers."""
    code, found = told(capsys, "show", "--journal", made)
    assert code == 0
    assert [one["number"] for one in found["calls"]] == [4, 3, 2, 1]
    assert [one["state"] for one in found["calls"]] == ["unknown", "unknown", "unknown", "done"]
    assert found["counts"] == {"open": 0, "done": 1, "unknown": 3, "settled": 0}
    assert not {"arguments", "answer", "content", "digest"} & set(found["calls"][0])
    code, found = told(capsys, "show", "--journal", made, "--tool", "pay", "--state", "unknown", "--limit", 1)
    assert (code, [one["number"] for one in found["calls"]]) == (0, [3])
    code, out, _ = say(capsys, "show", "--journal", made, "--run", "run-0")
    assert code == 0 and "pay" in out and "done" in out and "1 done, 3 unknown" in out
    assert say(capsys, "show", "--journal", made, "--run", "no")[1].startswith("none of the calls is like that")


def test_unknown_and_resolve(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S14: every unknown call is listed, exit code 1 while there are any; they are settled all or none."""
    code, found = told(capsys, "unknown", "--journal", made)
    assert (code, [one["number"] for one in found["calls"]]) == (1, [2, 3, 4])
    assert [one["harmless"] for one in found["calls"]] == [False, True, False]
    code, out, _ = say(capsys, "unknown", "--journal", made)
    assert code == 1 and "its process is gone" in out and "handler_timeout" in out and "unknown, harmless" in out
    code, _, err = say(capsys, "resolve", 2, 1, "--applied", "--journal", made)
    assert (
        code == 2
        and err
        == "towerman: resolve: call 1 (pay) has its outcome; only unknown ones can be settled; nothing was changed\n"
    )
    assert say(capsys, "resolve", 2, "--journal", made)[2].startswith("towerman: resolve: say --applied or --not-")
    for both in (("--applied", "--not-applied"), ("--not-applied", "--applied")):  # the last one is not meant more
        code, _, err = say(capsys, "resolve", 2, *both, "--journal", made)
        assert (code, err) == (2, "towerman: resolve: say --applied or --not-applied, not both\n")
    assert say(capsys, "resolve", 99, "--applied", "--journal", made)[0] == 2
    code, found = told(capsys, "resolve", 2, 3, "--applied", "--by", "ada", "--note", "seen", "--journal", made)
    assert (code, [one["state"] for one in found["calls"]]) == (0, ["settled", "settled"])
    assert (found["calls"][0]["settled_by"], found["calls"][0]["note"]) == ("ada", "seen")
    code, out, _ = say(capsys, "resolve", 4, "--not-applied", "--journal", made)
    assert code == 0 and "settled" in out
    assert say(capsys, "unknown", "--journal", made)[:2] == (0, "no call is unknown\n")


def test_prune_and_migrate(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Retention by age; the form of the file."""
    assert told(capsys, "prune", "--older-than", "30d", "--journal", made)[1]["forgotten"]["calls"] == 0
    code, out, _ = say(capsys, "prune", "--older-than", "0s", "--journal", made)
    assert (code, out) == (
        0,
        "forgotten: 1 calls, 0 approvals, 0 deferred calls, 0 contents, 0 batches, 0 times of tools\n",
    )
    code, _, err = say(capsys, "prune", "--older-than", "soon", "--journal", made)
    assert (
        code == 2
        and err == "towerman: --older-than soon: a whole number and a unit, s, m, h, d or w, for example 30d\n"
    )
    newest = file.newest()
    assert told(capsys, "migrate", "--journal", made) == (0, {"journal": str(made), "form": newest, "newest": newest})
    assert say(capsys, "migrate", "--journal", made)[1].endswith(f"has form {newest}, the newest\n")


def test_where_the_journal_is(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """It is named, or found where towers find it; none is made."""
    code, _, err = say(capsys, "show")
    assert code == 2 and "name the journal" in err
    code, _, err = say(capsys, "show", "--journal", tmp_path / "no.db")
    assert code == 2 and "there is no such file" in err
    config = tmp_path / "towerman.toml"
    config.write_text('journal = "j.db"\n')
    assert told(capsys, "show", "--config", config)[1]["journal"] == str(made)
    monkeypatch.setenv("TOWERMAN_CONFIG", str(config))
    assert told(capsys, "show")[1]["journal"] == str(made)
    monkeypatch.delenv("TOWERMAN_CONFIG")
    monkeypatch.setenv("TOWERMAN_JOURNAL", str(made))
    assert told(capsys, "show")[1]["journal"] == str(made)
    monkeypatch.delenv("TOWERMAN_JOURNAL")
    config.write_text("timeout = 5\n")
    assert "it names no journal" in say(capsys, "show", "--config", config)[2]
    config.write_text("tmeout = 5\n")
    assert say(capsys, "show", "--config", config)[0] == 2
    made.rename(tmp_path / "towerman.db")
    assert told(capsys, "show")[1]["journal"] == "towerman.db"
    assert not (tmp_path / "no.db").exists()


def test_what_is_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong file is one clear line and exit code 2; trouble with a right one is exit code 1."""
    other = tmp_path / "other.db"
    other.write_text("no database " * 50)
    for command in (["show"], ["unknown"], ["prune", "--older-than", "1d"], ["migrate"], ["resolve", 1, "--applied"]):
        code, out, err = say(capsys, *command, "--journal", other)
        assert (code, out) == (2, "") and err.count("\n") == 1 and "no journal" in err
    assert say(capsys)[0] == 2


def test_trouble_now_is_exit_code_1(made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A journal that cannot be read or written at this moment is no mistake of whoever asks."""
    import sqlite3

    monkeypatch.setitem(Journal.__init__.__kwdefaults__, "busy_timeout", 0.05)

    holder = sqlite3.connect(made, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for command in (["resolve", 2, "--applied"], ["prune", "--older-than", "0s"]):
        code, out, err = say(capsys, *command, "--journal", made)
        assert (code, out) == (1, "") and "another program holds its lock" in err
    holder.close()


@pytest.mark.parametrize(("group", "commands"), [("journal", ["show", "resolve"]), ("approvals", ["approve", "deny"])])
def test_a_group_of_commands_alone_shows_what_it_has(
    group: str, commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its help, in lines, on stdout, and the exit code of wrong words: as `towerman` alone does."""
    assert main([group]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"Usage: towerman {group} [OPTIONS] COMMAND [ARGS]...\n")
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert set(commands) <= set(lines)
    assert main([group, "--help"]) == 0
    assert capsys.readouterr().out.strip() == out.strip()
