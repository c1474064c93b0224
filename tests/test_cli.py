"""The command line: what it reads, what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from towerman.calls import Result, make_result
from towerman.cli import main
from towerman.cli.live import Board
from towerman.cli.show import results_table
from towerman.observers import JsonlObserver
from towerman.timeline import columns
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
def leave(how: str, code: int | None = None) -> str:
    """End the program."""
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "group":
        raise BaseExceptionGroup("several", [SystemExit(code)])
    sys.exit(code if how == "exit" else "a farewell")


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
    with open("slept", "w") as file:
        file.write("yes")
    return "slept"
'''


def calls(*several: tuple[str, object]) -> str:
    """Calls in Towerman's own form, with ids."""
    return json.dumps(
        [{"id": f"c{number}", "tool": tool, "arguments": arguments} for number, (tool, arguments) in enumerate(several)]
    )


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
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
    told = ("CI", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR")
    kept = {key: value for key, value in os.environ.items() if key not in told}
    return {**kept, "PYTHONPATH": SOURCE}


# Words.


def test_help_names_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """`towerman --help` lists what there is and what the exit codes mean."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("demo", "run", "schema", "trace", "Exit code 0", "130"):
        assert word in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo", ["--json", "--format", "--keep", "--trace", "exit code is 0 when every call ends as promised"]),
        ("run", ["CALLS", "--tools", "--config", "--format", "--trace", "--json", "Ctrl-C"]),
        ("schema", ["--json", "JSON schema of towerman.toml"]),
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
        (["run"], "Missing option '--tools' (see towerman run --help)"),
        (["run", "--tools", "x:y"], "name what is to be run: a file with calls, - for stdin, or --resume ID"),
        (["explain", "--tools", "x:y"], "name what is to be run"),
        (["run", "c.json", "--tools", "x:y", "--batch-id", "b"], "--batch-id: it says which batch --resume means"),
        (["run", "--resume", "r", "--tools", "x:y", "--run-id", "s"], "--run-id: --resume names the run already"),
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
        "tokens": None,
        "attempts": [],
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


@pytest.mark.parametrize("command", ["trace", "run", "demo", "help"])
def test_a_reader_that_goes_away_is_no_traceback(command: str, desk: Path) -> None:
    """`towerman ... | head -1` ends quietly with exit code 1, wherever it is in its output."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1})))
    words = {
        "trace": ["trace", recorded(desk / "t.jsonl")],
        "run": ["run", "calls.json", "--tools", "my_tools:tower"],
        "demo": ["demo"],
        "help": ["--help"],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "towerman", *words[command]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=desk,
        env=_environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(desk: Path) -> None:
    """Output that cannot be written is told in one line, with exit code 1."""
    recorded(desk / "t.jsonl")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "towerman", "trace", "t.jsonl"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=desk,
            env=_environment(),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b"towerman: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_break_nothing(closed: str, desk: Path) -> None:
    """A command whose standard files are closed does its work all the same: every result where stdout is open, the
    same exit code as ever, no traceback; and no file that it opens is taken for a standard file by a child process.
    """
    shut = ">&-" in closed.replace("2>&-", "")
    for batch, ends in (((("chatter", {}), ("fail", {})), 1), ((("chatter", {}),), 0)):
        (desk / "calls.json").write_text(calls(*batch))
        command = f"{sys.executable} -m towerman run calls.json --tools my_tools:tower --trace t.jsonl {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, cwd=desk, env=_environment(), check=False)
        assert done.returncode == (ends or int(shut))
        assert b"Traceback" not in done.stderr
        assert done.stdout == b"" if shut else len(json.loads(done.stdout)) == len(batch)
        assert "chatter from" not in (desk / "t.jsonl").read_text()
    assert towerman("trace", "t.jsonl", cwd=desk).returncode == 0


@pytest.mark.parametrize("words", [["run", "calls.json", "--tools", "my_tools:tower"], ["--help"], ["--version"]])
def test_a_closed_stdout_is_told(words: list[str], desk: Path) -> None:
    """With its stdout closed a command has printed nothing: that is never exit code 0, and one line says so."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1})))
    command = " ".join([sys.executable, "-m", "towerman", *words, ">&-"])
    done = subprocess.run(["sh", "-c", command], capture_output=True, cwd=desk, env=_environment(), check=False)
    assert done.returncode == 1
    assert done.stderr == b"towerman: stdout is closed, so nothing was printed\n"


@pytest.mark.parametrize("command", ["run - --tools my_tools:tower", "trace -"])
def test_a_closed_stdin_is_wrong_input(command: str, desk: Path) -> None:
    """`-` with a closed stdin is one line and exit code 2."""
    line = f"{sys.executable} -m towerman {command} <&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, cwd=desk, env=_environment(), check=False)
    assert done.returncode == 2
    assert done.stderr == b"towerman: stdin: it is closed; give it a file or a pipe, or name a file\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", ["run calls.json --tools my_tools:tower", "demo"])
def test_a_trace_that_cannot_be_written_is_told(command: str, desk: Path) -> None:
    """Events that did not get into the trace are never lost in silence: the results are printed, exit code 1."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1})))
    done = towerman(*command.split(), "--json", "--trace", "/dev/full", cwd=desk)
    assert done.returncode == 1
    assert json.loads(done.stdout)
    (line,) = [line for line in done.stderr.decode().splitlines() if line.startswith("towerman: --trace")]
    count = re.fullmatch(
        r"towerman: --trace /dev/full: (\d+) events could not be written: No space left on device; make room or name "
        r"another file; the results are complete",
        line,
    )
    assert count is not None
    # As many as a trace that can be written has.
    assert b"--trace" not in towerman(*command.split(), "--json", "--trace", "t", cwd=desk).stderr
    assert int(count[1]) == len((desk / "t").read_text().splitlines())


def test_a_trace_that_cannot_be_written_is_told_also_of_a_run_that_ends_early(desk: Path) -> None:
    """A tool that exits hides no loss of events: both are told, and the exit code is the tool's."""
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    batch = calls(("leave", {"how": "exit", "code": 7})).encode()
    done = towerman("run", "-", "--tools", "my_tools:tower", "--trace", "/dev/full", stdin=batch, cwd=desk)
    assert done.returncode == 7
    assert len(json.loads(done.stdout)) == 1
    assert [line.split(b" ")[1:3] for line in done.stderr.splitlines()] == [
        [b"--trace", b"/dev/full:"],
        [b"the", b"tool"],
    ]


def test_g12_a_trace_that_nobody_reads_holds_nothing_up(desk: Path) -> None:
    """G12: a trace that goes into a pipe whose reader is stuck: the results are printed, the process ends, and one line
    says how much of the trace is missing.
    """
    limits = 'pools={"one": 1}, max_calls_per_batch=600, grace=0.2'
    (desk / "my_tools.py").write_text(TOOLS.replace('pools={"one": 1}', limits, 1))
    os.mkfifo(desk / "pipe")
    reader = os.open(desk / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        batch = calls(*[("add", {"a": number, "b": 1}) for number in range(600)]).encode()
        words = ["run", "-", "--tools", "my_tools:tower", "--trace", "pipe"]
        done = towerman(*words, stdin=batch, cwd=desk)
    finally:
        os.close(reader)
    assert done.returncode == 1
    assert len(json.loads(done.stdout)) == 600
    (line,) = done.stderr.decode().splitlines()
    assert re.fullmatch(r"towerman: --trace pipe: \d+ events could not be written: .*; the results are complete", line)


@pytest.mark.parametrize(
    ("how", "code", "ends", "told"),
    [
        ("exit", 0, 1, "'leave' ended the program (SystemExit)"),
        ("exit", None, 1, "'leave' ended the program (SystemExit)"),
        ("exit", 7, 7, "'leave' ended the program (SystemExit)"),
        ("exit", 4096, 1, "'leave' ended the program (SystemExit)"),
        ("words", None, 1, "'leave' ended the program (SystemExit)"),
        ("group", 0, 1, "'leave' ended the program (SystemExit)"),
        ("interrupt", None, 130, "'leave' interrupted the program (KeyboardInterrupt)"),
    ],
)
def test_g1_a_tool_that_ends_the_program(how: str, code: int | None, ends: int, told: str, desk: Path) -> None:
    """G1, R-84: a tool that exits takes no result with it: all are printed, one line says what it did, and the exit
    code is never 0.
    """
    batch = calls(("add", {"a": 1, "b": 1}), ("leave", {"how": how, "code": code}), ("sleep", {"seconds": 0.0}))
    done = towerman("run", "-", "--tools", "my_tools:tower", "--json", stdin=batch.encode(), cwd=desk)
    assert done.returncode == ends
    assert [one["tool"] for one in json.loads(done.stdout)] == ["add", "leave", "sleep"]
    line = done.stderr.decode().splitlines()[-1]  # before it, that a call is waited for may be told
    assert line == f"towerman: the tool {told}; what had not ended was cancelled"


# What a person sees.


def board_text(board: Board, rows: int = 40, width: int = 80) -> str:
    """The board as a terminal without colours would show it."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(board.table(rows))
    return out.getvalue()


def event(kind: str, index: int | None = None, **fields: object) -> Event:
    return Event(1.0, kind, "r", 1, index, **fields)  # type: ignore[arg-type]


def test_the_board_tells_who_runs_and_who_waits_for_what() -> None:
    """R-131: held back, waiting and for what, running, done and how: one line per call, as the events tell it."""
    board = Board(["a", "b", "c", "d", "e", "f\x1b[31m"])
    for one in (
        event("batch_started", size=6),
        event("waiting", 0, waiting_for="pool crm"),
        event("waiting", 1, waiting_for="resource file:{path}"),
        event("started", 2),
        event("started", 3),
        event("finished", 3, outcome="ok", ran=0.25),
        event("rejected", 4, outcome="rejected", code="unknown_tool", ran=0.0),
        event("started", 99),
        event("batch_finished"),
    ):
        board(one)
    lines = board_text(board).splitlines()
    assert "1 running" in lines[0]
    assert "3 waiting" in lines[0]
    assert "2 done  of 6 calls" in lines[0]
    rows = [line.split() for line in lines[2:]]
    assert rows[0][:5] == ["0", "a", "waiting", "pool", "crm"]
    assert rows[1][:4] == ["1", "b", "waiting", "file:{path}"]
    assert rows[2][:3] == ["2", "c", "running"]
    assert rows[3] == ["3", "d", "done", "ok", "0.2"]
    assert rows[4] == ["4", "e", "done", "unknown_tool"]
    assert rows[5] == ["5", "f\\x1b[31m", "waiting", "calls", "before", "it"]


def test_the_board_shows_work_that_outlives_its_result() -> None:
    """P-82: a call whose work goes on after its result is shown as that until the work ends."""
    board = Board(["slow"])
    board(event("started", 0))
    board(event("orphaned", 0))
    board(event("finished", 0, outcome="timed_out", code="handler_timeout", ran=1.0))
    assert "handler_timeout (still at work)" in board_text(board)
    board(event("ended", 0))
    assert "still at work" not in board_text(board)


def test_a_long_board_shows_what_is_at_work_first() -> None:
    """Of 1,000 calls the running and the waiting ones are shown, in emitted order, and the rest is counted."""
    board = Board(["t"] * 1_000)
    for index in (900, 5):
        board(event("started", index))
    board(event("waiting", 700, waiting_for="pool crm"))
    rows = [line.split() for line in board_text(board, rows=4).splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "5", "700", "900", "and"]
    assert rows[4] == ["and", "996", "more"]


def result(index: int, tool: str, outcome: str = "ok", code: str | None = None, told: str = "told") -> Result:
    return make_result(index, "", tool, outcome, code, told, told)  # type: ignore[arg-type]


def test_the_results_table_has_one_line_each() -> None:
    """Each result is one line: index, tool, outcome, code, and what the model is told, without its line breaks."""
    results = [result(0, "read", told="one\ntwo\x1b[2J"), result(1, "x" * 200, "error", "handler_error", "no " * 100)]
    wide = results_table(results, width=120).split("\n")
    assert wide[0].split() == ["#", "tool", "outcome", "code", "what", "the", "model", "is", "told"]
    assert wide[1].split() == ["0", "read", "ok", "one", "two\\x1b[2J"]
    assert wide[2].split()[2:6] == ["error", "handler_error", "no", "no"]
    assert len(wide) == 3
    narrow = results_table(results, width=80).split("\n")
    assert narrow[0].split()[:3] == ["#", "tool", "status"]
    assert narrow[1].split()[2] == "ok"
    assert narrow[2].split()[2] == "handler_error"
    colored = results_table(results, width=80, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored).split("\n")[2].split() == narrow[2].split()
    assert "\x1b[32m" in colored
    assert "\x1b[31m" in colored


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.text(max_size=200), st.sampled_from([None, "unresolved_placeholder"]), st.text(max_size=300))
    ),
    st.integers(0, 200),
    st.booleans(),
)
def test_every_line_of_the_results_fits(cells: list[tuple[str, str | None, str]], width: int, ascii_only: bool) -> None:
    """No line is wider than asked, whatever the model or a tool wrote, and nothing in it drives the terminal."""
    results = [
        result(index, tool, "error" if code else "ok", code, told) for index, (tool, code, told) in enumerate(cells)
    ]
    table = results_table(results, width=width, ascii_only=ascii_only)
    lines = table.split("\n")
    assert len(lines) == len(results) + 1
    assert all(columns(line) <= max(width, 40) for line in lines)
    assert "\x1b" not in table
    assert table.isascii() or not ascii_only


# Runs.


def run_json(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, object]], str]:
    """Run `towerman run` and read its JSON."""
    code = main(["run", *words])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_run_answers_each_call_in_the_form_it_came_in(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-105, R-106: one message per call, in emitted order, paired by id; exit code 0 when all is well."""
    message = {
        "role": "assistant",
        "tool_calls": [
            {"id": f"x{a}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": a, "b": 1})}}
            for a in range(3)
        ],
    }
    (desk / "calls.json").write_text(json.dumps(message))
    code, messages, err = run_json("calls.json", "--tools", "my_tools:tower", capsys=capsys)
    assert (code, err) == (0, "")
    assert [(one["role"], one["tool_call_id"], one["content"]) for one in messages] == [
        ("tool", "x0", "1"),
        ("tool", "x1", "2"),
        ("tool", "x2", "3"),
    ]


def test_run_reads_anthropic_blocks_and_a_named_format(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The form is found out, or taken as it is named; the answer has the same form."""
    blocks = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2, "b": 2}}],
    }
    (desk / "calls.json").write_text(json.dumps(blocks), encoding="utf-8-sig")
    for more in ([], ["--format", "anthropic"]):
        code, messages, _ = run_json("calls.json", "--tools", "my_tools:tower", *more, capsys=capsys)
        assert code == 0
        content = messages[0]["content"]
        assert isinstance(content, list)
        assert (content[0]["type"], content[0]["tool_use_id"]) == ("tool_result", "t1")
    assert main(["run", "calls.json", "--tools", "my_tools:tower", "--format", "openai"]) == 2
    assert capsys.readouterr() == ("", "towerman: calls.json: no calls in it as openai, but 1 as anthropic\n")


def test_r108_run_with_failures_exits_1_and_keeps_every_answer(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-108: a failing, an unknown and a malformed call leave the others their answers; the exit code is 1."""
    (desk / "calls.json").write_text(
        calls(("add", {"a": 1, "b": 1}), ("fail", {}), ("ad", {}), ("add", '{"a": 1'), ("add", {"a": 2, "b": 2}))
    )
    code, messages, err = run_json("calls.json", "--tools", "my_tools:tower", "--json", capsys=capsys)
    assert code == 1
    assert err == "towerman: 3 of 5 calls did not end ok\n"
    assert [one["code"] for one in messages] == [None, "handler_error", "unknown_tool", "invalid_arguments", None]
    assert "S3CRET" not in json.dumps(messages) + err


def test_run_reads_stdin(desk: Path) -> None:
    """`-` reads the calls from stdin, and `python -m towerman` is the same command."""
    done = towerman("run", "-", "--tools", "my_tools:tower", stdin=calls(("add", {"a": 1, "b": 2})).encode(), cwd=desk)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)[0]["content"] == "3"


def test_run_keeps_stdout_clean(desk: Path) -> None:
    """What tools and their child processes print goes to stderr: stdout holds the JSON and nothing else."""
    done = towerman("run", "-", "--tools", "my_tools:tower", stdin=calls(("chatter", {})).encode(), cwd=desk)
    assert done.returncode == 0
    assert json.loads(done.stdout)[0]["outcome"] == "ok"
    assert b"chatter from Python" in done.stderr
    assert b"chatter from a child" in done.stderr


def test_run_without_calls_is_a_note(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty batch is no mistake: exit code 0, an empty list, and a note on stderr."""
    for text in ("[]", '{"role": "assistant", "content": "Nothing to do."}'):
        (desk / "calls.json").write_text(text)
        code, messages, err = run_json("calls.json", "--tools", "my_tools:tower", capsys=capsys)
        assert (code, messages) == (0, [])
        assert err == "towerman: calls.json: there are no tool calls in it, so nothing ran\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "towerman: calls.json: there is no such file"),
        (b"", "towerman: calls.json: it is empty; an empty batch is []\n"),
        (b" \n", "towerman: calls.json: it is empty; an empty batch is []\n"),
        (
            b'[\n  {"tool": "add", arguments: {}}\n]',
            "towerman: calls.json: no JSON: Expecting property name enclosed in double quotes at line 2, column 19\n",
        ),
        (b"\xff\xfe\x00", "towerman: calls.json: not UTF-8 text (byte 1)"),
        (b"17", "towerman: calls.json: "),
        (b'{"S3CRET": 1}', "towerman: calls.json: "),
        (b'[{"tool": "add", "argumens": {"token": "S3CRET"}}]', "towerman: calls.json: "),
        (b"[" * 100_000, "towerman: calls.json: "),
    ],
)
def test_wrong_calls_are_one_line_and_exit_2(
    content: bytes | None, said: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no batch of calls is told in one line that names the file, without its values; nothing runs."""
    if content is not None:
        (desk / "calls.json").write_bytes(content)
    assert main(["run", "calls.json", "--tools", "my_tools:tower"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert '"S3CRET"' not in err


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere:tower", "there is no module 'nowhere' in the current folder or on sys.path"),
        ("nowhere.at.all:tower", "there is no module 'nowhere' in the current folder or on sys.path"),
        ("nowhere.py:tower", "there is no file nowhere.py"),
        ("calls.json:tower", "there is no module 'calls'"),
        ("my_tools:towel", "my_tools has no 'towel'; it has tower, other"),
        ("json:tower", "json has no 'tower'; and no Tower under another name either"),
        ("my_tools:number", "'number' is not a Tower but int; make one with tower = Tower()"),
        ("my_tools:Tower", "'Tower' is not a Tower but Tower"),
        ("my_tools:", "write it as module:tower, for example my_tools:tower"),
        (":tower", "write it as module:tower, for example my_tools:tower"),
        ("broken:tower", "broken fails while it is imported: ValueError: no good (broken.py, line 2)"),
        ("unfinished:tower", "unfinished fails while it is imported: SyntaxError: "),
        ("needy:tower", "needy needs the module 'not_there', which is not installed"),
        ("leaving:tower", "leaving ends the program while it is imported"),
        ("undeclared:tower", "undeclared fails while it is imported: PolicyError: "),
    ],
)
def test_wrong_tools_are_one_line_and_exit_2(
    spec: str, said: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module or tower that is not there, or fails, is told in one line that says what and how to mend it."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1})))
    (desk / "broken.py").write_text("\nraise ValueError('no good')\n")
    (desk / "unfinished.py").write_text("def f(:\n")
    (desk / "needy.py").write_text("import not_there\n")
    (desk / "leaving.py").write_text("raise SystemExit(0)\n")
    (desk / "undeclared.py").write_text("from towerman import Tower\ntower = Tower(pools={'a': 0})\n")
    assert main(["run", "calls.json", "--tools", spec]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"towerman: --tools {spec}: ")
    assert said in err
    assert err.count("\n") == 1


def test_tools_may_be_named_by_file_and_by_default(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`folder/tools.py:tower` works as `module:tower` does; without a name it is `tower`."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1})))
    (desk / "deep").mkdir()
    (desk / "deep" / "other_tools.py").write_text(TOOLS)
    (desk / "deep" / "holder.py").write_text("import other_tools\nclass Holder:\n    tower = other_tools.tower\n")
    for spec in ("my_tools", "deep/other_tools.py:tower", "deep/other_tools.py", "deep/holder.py:Holder.tower"):
        code, messages, _ = run_json("calls.json", "--tools", spec, capsys=capsys)
        assert (code, messages[0]["content"]) == (0, "2")
        capsys.readouterr()


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """API section 7: `towerman schema` prints the JSON schema of towerman.toml, with --json or without."""
    assert main(["schema"]) == 0
    plain = capsys.readouterr().out
    assert json.loads(plain)["title"] == "towerman.toml"
    assert main(["schema", "--json"]) == 0
    assert capsys.readouterr().out == plain


def test_run_reads_the_named_file(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """API section 7: `--config F` is the file of the tower that the tools make; the environment is left as it was."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})))
    (desk / "towerman.toml").write_text("max_calls_per_batch = 1\n")
    assert main(["run", "calls.json", "--tools", "my_tools:tower", "--config", "towerman.toml"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 2
    assert "1 of 2 calls did not end ok" in err
    assert "TOWERMAN_CONFIG" not in os.environ


def test_run_keeps_the_variable_that_names_a_file(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """API section 7: `--config` wins over TOWERMAN_CONFIG, which is as before afterwards."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 2})))
    (desk / "towerman.toml").write_text("grace = 1\n")
    monkeypatch.setenv("TOWERMAN_CONFIG", "no.toml")
    assert main(["run", "calls.json", "--tools", "my_tools:tower", "--config", "towerman.toml"]) == 0
    assert os.environ["TOWERMAN_CONFIG"] == "no.toml"
    capsys.readouterr()


def test_a_wrong_configuration_is_one_line_and_exit_2(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """API section 7: a file with mistakes, one that is not there, and one that the tower does not read are told by
    name on one line, and nothing runs.
    """
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 2})))
    (desk / "bad.toml").write_text("timeout = 0\n[pools.crm]\npermit = 2\n")
    (desk / "good.toml").write_text("grace = 1\n")
    (desk / "own_tools.py").write_text(TOOLS.replace("Tower(", 'Tower({"grace": 2}, '))
    for tools, config, expected in (
        (
            "my_tools",
            "bad.toml",
            "towerman: --config: bad.toml: 3 mistakes: - timeout: seconds, more than 0; got 0 - po",
        ),
        ("my_tools", "no.toml", "towerman: --config: config 'no.toml': there is no such file"),
        (
            "own_tools",
            "good.toml",
            "towerman: --config good.toml: not read, for the tower in own_tools has a config= of",
        ),
    ):
        assert main(["run", "calls.json", "--tools", tools, "--config", config]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(expected)


def test_run_records_a_trace_that_can_be_drawn(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--trace OUT` appends the events of each run, and `towerman trace OUT` draws them."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1}), ("nothing", {})))
    for _ in range(2):
        assert main(["run", "calls.json", "--tools", "my_tools:tower", "--trace", "out.jsonl"]) == 1
        for name in list(sys.modules):
            if name == "my_tools":
                del sys.modules[name]
    capsys.readouterr()
    assert main(["trace", "out.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("1 ok, 1 rejected") == 2
    assert out.count("unknown_tool") == 2
    assert "nothing" not in out
    assert main(["run", "calls.json", "--tools", "my_tools:tower", "--trace", "no/folder/out.jsonl"]) == 2
    assert capsys.readouterr() == (
        "",
        "towerman: --trace no/folder/out.jsonl: cannot be written: No such file or directory\n",
    )


def test_a_trace_beside_the_towers_own_observers(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tower that has observers keeps them when the command line adds one."""
    (desk / "watched.py").write_text(
        "from towerman import JsonlObserver, Tower\n"
        "tower = Tower(observers=[JsonlObserver('mine.jsonl')])\n"
        "@tower.tool(independent=True)\n"
        "def add(a: int, b: int) -> int:\n"
        "    return a + b\n"
    )
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1})))
    assert main(["run", "calls.json", "--tools", "watched:tower", "--trace", "theirs.jsonl"]) == 0
    capsys.readouterr()
    mine, theirs = (desk / "mine.jsonl").read_bytes(), (desk / "theirs.jsonl").read_bytes()
    assert mine == theirs
    assert mine.count(b"\n") >= 5


def test_p92_an_argument_appears_in_no_output(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P-92, G8: a token among the arguments is in no message, no trace and no drawing."""
    (desk / "calls.json").write_text(calls(("login", {"token": "S3CRET-123"}), ("login", {"tokn": "S3CRET-123"})))
    assert main(["run", "calls.json", "--tools", "my_tools:tower", "--trace", "out.jsonl"]) == 1
    assert main(["trace", "out.jsonl"]) == 0
    assert main(["trace", "out.jsonl", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "login" in out
    assert "S3CRET" not in out + err + (desk / "out.jsonl").read_text()


def interrupted(desk: Path, asked: signal.Signals) -> tuple[list[dict[str, object]], list[str]]:
    """Start a run, ask it to end while `sleep` is at work; gives its messages and its lines on stderr."""
    (desk / "sleeping").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "towerman", "run", "calls.json", "--tools", "my_tools:tower"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=desk,
        env=_environment(),
    )
    while not (desk / "sleeping").exists():
        assert process.poll() is None
    process.send_signal(asked)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    return json.loads(out), err.decode().splitlines()


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_p01_ctrl_c_prints_the_sealed_results(asked: signal.Signals, desk: Path) -> None:
    """P-01, S16: after Ctrl-C, or when asked to end, every call has its result on stdout; the exit code is 130."""
    batch = json.loads(calls(("add", {"a": 1, "b": 1}), ("sleep", {"seconds": 1}), ("sleep", {"seconds": 1})))
    batch[1]["needs"] = ["c0"]
    batch[2]["needs"] = ["c0"]
    (desk / "calls.json").write_text(json.dumps(batch))
    messages, told = interrupted(desk, asked)
    assert [one["id"] for one in messages] == ["c0", "c1", "c2"]
    assert [(one["outcome"], one["started"]) for one in messages] == [
        ("ok", True),
        ("cancelled", True),
        ("cancelled", False),
    ]
    assert messages[1]["applied"] == "unknown"
    # The thread that was in the middle of its work came to its end before the process did.
    assert told == [
        "towerman: 1 call is still at work; waiting up to 5 s for the end (Ctrl-C leaves at once)",
        "towerman: interrupted",
    ]
    assert (desk / "slept").exists()


def test_p82_a_thread_that_does_not_end_holds_the_process_for_its_grace_only(desk: Path) -> None:
    """P-82: work that ignores the cancel is waited for as long as the tower's grace, and the process ends."""
    (desk / "my_tools.py").write_text(TOOLS.replace('pools={"one": 1}', 'pools={"one": 1}, grace=0.1'))
    (desk / "calls.json").write_text(calls(("sleep", {"seconds": 3_000}), ("sleep", {"seconds": 3_000})))
    messages, told = interrupted(desk, signal.SIGINT)
    assert [one["outcome"] for one in messages] == ["cancelled", "cancelled"]
    assert messages[0]["still_running"] is True
    assert "waiting up to 0.1 s" in told[0]
    assert not (desk / "slept").exists()


def on_a_terminal(*words: str, cwd: Path, columns: int = 100, rows: int = 40) -> tuple[int, str]:
    """Run the command on a pseudo-terminal; gives its exit code and everything it wrote."""
    import fcntl
    import pty
    import struct
    import termios

    pid, master = pty.fork()
    if pid == 0:  # pragma: no cover - another process
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.chdir(cwd)
        environment = {**_environment(), "TERM": "xterm-256color"}
        os.execve(sys.executable, [sys.executable, "-m", "towerman", *words], environment)
    written = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other side has gone
            break
        if not part:
            break
        written += part
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode(errors="replace")


def test_on_a_terminal_there_is_a_live_table_then_timeline_and_results(desk: Path) -> None:
    """A person sees what runs and what waits for what, then the timeline, then one line per result."""
    (desk / "calls.json").write_text(
        calls(("sleep", {"seconds": 0.5}), ("sleep", {"seconds": 0}), ("fail", {}), ("login", {"token": "S3CRET"}))
    )
    code, screen = on_a_terminal("run", "calls.json", "--tools", "my_tools:tower", cwd=desk)
    assert code == 1
    live, _, rest = screen.partition("calls in ")
    assert "running" in live
    assert "waiting" in live
    assert "pool one" in live
    assert "of 4 calls" in live
    assert "3 ok, 1 error" in rest
    assert rest.index("░") < rest.index("what the model is told") < rest.index("logged in")
    assert "1 of 4 calls did not end ok" in rest
    assert "S3CRET" not in screen
    assert "Traceback" not in screen


def test_on_a_terminal_many_calls_fit_the_screen(desk: Path) -> None:
    """A batch that is longer than the screen shows what is at work, and how many more there are."""
    (desk / "calls.json").write_text(calls(*[("sleep", {"seconds": 0.02})] * 24))
    code, screen = on_a_terminal("run", "calls.json", "--tools", "my_tools:tower", cwd=desk, columns=60, rows=12)
    assert code == 0
    live, _, rest = screen.partition("24 calls in ")
    assert "and 16 more" in live
    assert "24 ok" in rest


def test_json_is_also_for_terminals(desk: Path) -> None:
    """`--json` on a terminal prints the JSON and no table."""
    (desk / "calls.json").write_text(calls(("add", {"a": 1, "b": 1})))
    code, screen = on_a_terminal("run", "calls.json", "--tools", "my_tools:tower", "--json", cwd=desk)
    assert code == 0
    assert json.loads(screen)[0]["content"] == "2"
