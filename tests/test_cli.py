"""The command line: what it reads, what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from towerman.cli import main
from towerman.observers import JsonlObserver
from towerman.trace import Event

SOURCE = str(Path(__file__).resolve().parent.parent / "src")

TOOLS = '''
"""Tools that a user may have."""

import os
import sys
import time

from towerman import Tower

tower = Tower(pools={"one": 1})
other = tower
number = 7


@tower.tool(independent=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tower.tool(independent=True)
def fail() -> str:
    """Fail."""
    raise RuntimeError("S3CRET-in-the-error")


@tower.tool(independent=True)
def login(token: str) -> str:
    """Log in."""
    return "logged in"


@tower.tool(independent=True)
def chatter() -> str:
    """Print where the JSON goes."""
    print("chatter from Python")
    os.system("echo chatter from a child")
    return "done"


@tower.tool(pools=["one"], independent=True)
def sleep(seconds: float) -> str:
    """Sleep, and say so in a file first."""
    with open("sleeping", "w") as file:
        file.write("yes")
    time.sleep(seconds)
    return "slept"
'''


def calls(*several: tuple[str, object]) -> str:
    """Calls in Towerman's own form, with ids."""
    return json.dumps(
        [{"id": f"c{number}", "tool": tool, "arguments": arguments} for number, (tool, arguments) in enumerate(several)]
    )


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of tools in it, as the current folder; what is imported from it is forgotten."""
    (tmp_path / "my_tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def towerman(*words: str, stdin: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m towerman` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "towerman", *words],
        input=stdin,
        capture_output=True,
        cwd=cwd,
        env=_environment(),
        check=False,
        timeout=60,
    )


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": SOURCE}


# Words.


def test_help_names_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """`towerman --help` lists what there is and what the exit codes mean."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("demo", "run", "trace", "Exit code 0", "130"):
        assert word in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo", ["--json", "--format", "--keep", "--trace", "exit code is 0 when every call ends as promised"]),
        ("run", ["CALLS", "--tools", "--format", "--trace", "--json", "Ctrl-C"]),
        ("trace", ["FILE", "--json", "passed over"]),
    ],
)
def test_each_command_has_a_help_of_its_own(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is explained where it is used; the demo says when it exits 0 although calls fail on purpose."""
    assert main([command, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in (*words, "Exit code 0"):
        assert word in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`towerman --version` prints name and version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("towerman ")


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command there is the help, and the exit code of a wrong input."""
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["demoo"], "No such command 'demoo'. Did you mean 'demo'? (see towerman --help)"),
        (["--colour"], "No such option: --colour (see towerman --help)"),
        (["run"], "Missing argument 'CALLS' (see towerman run --help)"),
        (["run", "calls.json"], "Missing option '--tools' (see towerman run --help)"),
        (["demo", "extra"], "Got unexpected extra argument"),
        (["demo", "--format", "xml"], "'xml' is not one of 'openai', 'anthropic', 'towerman'"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line is answered by one line on stderr and exit code 2, with nothing on stdout."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert err.startswith("towerman: ")
    assert err.count("\n") == 1


def test_f16_importing_the_command_imports_no_terminal_library() -> None:
    """F16: the package of the command line stays light until a command runs."""
    program = "import sys, towerman.cli; print([m for m in ('typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], env=_environment(), capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


# Traces.

EVENTS = [
    Event(1.0, "batch_started", "run \x1b[31m", 1, size=2, wall=1_700_000_000.0),
    Event(1.0, "started", "run \x1b[31m", 1, 0, "c0", "read", waited=0.0),
    Event(1.0, "waiting", "run \x1b[31m", 1, 1, "c1", "list\n", waiting_for="pool crm"),
    Event(1.5, "finished", "run \x1b[31m", 1, 0, "c0", "read", "ok", waited=0.0, ran=0.5),
    Event(1.5, "started", "run \x1b[31m", 1, 1, "c1", "list\n", waited=0.5),
    Event(2.0, "finished", "run \x1b[31m", 1, 1, "c1", "list\n", "error", "handler_error", 0.5, 0.5),
    Event(2.0, "batch_finished", "run \x1b[31m", 1),
    Event(3.0, "batch_started", "other", 1, size=3, wall=1e300),
    Event(3.0, "started", "other", 1, 0, "c0", "read"),
]


def recorded(path: Path, events: list[Event] = EVENTS) -> str:
    with JsonlObserver(path) as observer:
        for event in events:
            observer(event)
    return str(path)


def test_trace_draws_each_batch_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-133: `towerman trace FILE` draws the timeline of every batch in the file; names are escaped."""
    assert main(["trace", recorded(tmp_path / "t.jsonl")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "run run \\x1b[31m, batch 1, 2023-11-1" in out
    assert "2 calls in 1.00 s: 1 ok, 1 error" in out
    assert "list\\x0a" in out
    assert "pool crm" in out
    assert "run other, batch 1, its end is not in the file, 2 of its 3 calls are not in the file" in out
    assert "1 call in 0 µs: 1 without a result" in out
    assert "\x1b" not in out


def test_trace_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` gives a program the same spans, with the seconds since the batch came in."""
    assert main(["trace", recorded(tmp_path / "t.jsonl"), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["skipped"] == []
    first, second = read["batches"]
    assert (first["run_id"], first["batch"], first["finished"], first["size"]) == ("run \x1b[31m", 1, True, 2)
    assert first["calls"][1] == {
        "index": 1,
        "tool": "list\n",
        "outcome": "error",
        "code": "handler_error",
        "queued": 0.0,
        "started": 0.5,
        "sealed": 1.0,
        "ended": None,
        "waited_for": ["pool crm"],
        "still_running": False,
    }
    assert second["calls"][0]["still_running"] is True


def test_trace_names_corrupt_lines_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """G8: a line that is no event is named by its number, nothing of it is shown, and the exit code is 1."""
    path = tmp_path / "t.jsonl"
    recorded(path)
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([good[0], b'{"S3CRET": 1}\n', b"\xff S3CRET\n", *good[1:8], good[8][:20]]))
    assert main(["trace", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "1 ok, 1 error" in out
    assert err.splitlines() == [
        f'towerman: {path}, line 2: no event: "kind" is missing; passed over',
        f"towerman: {path}, line 3: not UTF-8 text; passed over",
        f"towerman: {path}, line 11: not JSON (the last line: cut off?); passed over",
    ]
    assert main(["trace", "--json", str(path)]) == 1
    skipped = json.loads(capsys.readouterr().out)["skipped"]
    assert [line["line"] for line in skipped] == [2, 3, 11]
    assert "S3CRET" not in str(skipped) + out + err


def test_trace_names_few_of_many_corrupt_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file full of damage does not fill the terminal."""
    path = tmp_path / "t.jsonl"
    recorded(path)
    path.write_bytes(path.read_bytes() + b"?\n" * 500)
    assert main(["trace", str(path)]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 11
    assert err[-1].endswith("490 more lines passed over")


def test_trace_of_something_else_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with no event at all is no trace: exit code 2 and one line."""
    path = tmp_path / "t.jsonl"
    path.write_text("hello\nworld\n")
    assert main(["trace", str(path)]) == 2
    assert capsys.readouterr() == ("", f"towerman: {path}: no event in it; line 1: not JSON\n")
    assert main(["trace", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr() == ("", f"towerman: {tmp_path / 'absent'}: there is no such file\n")
    assert main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"towerman: {tmp_path}: cannot be read: Is a directory\n")
    assert main(["trace", "a\0b"]) == 2
    assert "this is no file name" in capsys.readouterr().err


def test_trace_of_an_empty_file_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tower that saw no batch leaves an empty file, and that is all right."""
    (tmp_path / "t.jsonl").write_bytes(b"")
    assert main(["trace", str(tmp_path / "t.jsonl")]) == 0
    assert capsys.readouterr() == ("", f"towerman: {tmp_path / 't.jsonl'}: no batch in it\n")


def test_trace_reads_stdin_and_writes_ascii_where_it_must(tmp_path: Path) -> None:
    """`-` is stdin; a terminal that cannot show the drawing's signs gets them in ASCII."""
    data = Path(recorded(tmp_path / "t.jsonl")).read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "towerman", "trace", "-"],
        input=data,
        capture_output=True,
        env={**_environment(), "PYTHONIOENCODING": "ascii", "COLUMNS": "90"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"####" in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:])) <= 90


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    """`towerman trace FILE | head -1` ends quietly with exit code 1."""
    events = [
        Event(float(number), kind, f"r{number}", 1, size=1)  # type: ignore[arg-type]
        for number in range(3_000)
        for kind in ("batch_started", "batch_finished")
    ]
    path = recorded(tmp_path / "t.jsonl", events)
    process = subprocess.Popen(
        [sys.executable, "-m", "towerman", "trace", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1
