"""The two ready-made observers, and reading back what one of them wrote."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerman.errors import CODES, PolicyError
from towerman.observers import JsonlObserver, JsonlStatistics, LogObserver, Skipped, read_events
from towerman.observers import jsonl as jsonl_room
from towerman.observers.log import line_of
from towerman.trace import Event

FULL = Event(
    12.5,
    "finished",
    "run-1",
    2,
    index=0,
    call_id="call_1",
    tool="read",
    outcome="error",
    code="handler_error",
    waited=0.25,
    ran=0.5,
    waited_for=("pool crm", "resource file:{path}"),
    size=17,
)
EVENTS = [
    Event(12.0, "batch_started", "run-1", 2, size=1, wall=1_700_000_000.5),
    Event(12.0, "waiting", "run-1", 2, 0, "call_1", "read", waiting_for="pool crm"),
    Event(12.25, "admitted", "run-1", 2, 0, "call_1", "read", waited=0.25, scopes={"crm": "process"}),
    Event(12.25, "started", "run-1", 2, 0, "call_1", "read"),
    FULL,
    Event(12.6, "batch_finished", "run-1", 2, reason="the user left"),
]


def read(path: Path) -> tuple[list[Event], list[Skipped]]:
    with path.open("rb") as lines:
        return read_events(lines)


# Lines of JSON.


def test_r129_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    """R-129: the record of a decision has run id, tool, waiting and reason, and can be read again."""
    path = tmp_path / "trace.jsonl"
    with JsonlObserver(path) as observer:
        for event in EVENTS:
            observer(event)
        assert observer.statistics() == JsonlStatistics(written=6, lost=0)
    assert read(path) == (EVENTS, [])
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {
        "time": 12.0,
        "kind": "batch_started",
        "run_id": "run-1",
        "batch": 2,
        "size": 1,
        "wall": 1_700_000_000.5,
    }


def test_every_line_is_there_at_once(tmp_path: Path) -> None:
    """A crash loses little: by default an event is with the operating system before the next one comes."""
    path = tmp_path / "trace.jsonl"
    observer = JsonlObserver(str(path))
    for number, event in enumerate(EVENTS, 1):
        observer(event)
        assert len(path.read_bytes().splitlines()) == number
    observer.close()


def test_a_killed_process_loses_no_event_that_was_delivered(tmp_path: Path) -> None:
    """A process that dies without a word leaves every event in the file."""
    path = tmp_path / "trace.jsonl"
    program = (
        "import os, sys; from towerman.observers import JsonlObserver; from towerman.trace import Event\n"
        "observer = JsonlObserver(sys.argv[1])\n"
        "for number in range(10): observer(Event(float(number), 'started', 'r', 1, number))\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], env=_environment(), check=False)
    events, skipped = read(path)
    assert [event.index for event in events] == list(range(10))
    assert not skipped


def _environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parent.parent / "src")
    return {**os.environ, "PYTHONPATH": source}


def test_rarer_flushes_keep_the_end_of_a_batch(tmp_path: Path) -> None:
    """With `flush_every` lines are gathered, but the end of a batch, `flush` and `close` let nothing wait."""
    path = tmp_path / "trace.jsonl"
    observer = JsonlObserver(path, flush_every=4)
    for event in EVENTS[:3]:
        observer(event)
    assert path.read_bytes() == b""
    observer(EVENTS[3])
    assert len(read(path)[0]) == 4
    observer(EVENTS[4])
    assert len(read(path)[0]) == 4
    observer(EVENTS[5])
    assert len(read(path)[0]) == 6
    observer(EVENTS[0])
    observer.flush()
    assert len(read(path)[0]) == 7
    observer(EVENTS[0])
    observer.close()
    assert len(read(path)[0]) == 8


def test_a_file_is_continued(tmp_path: Path) -> None:
    """A second observer on the same path appends."""
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        with JsonlObserver(path) as observer:
            observer(FULL)
    assert read(path) == ([FULL, FULL], [])


def test_a_half_line_from_a_crash_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    """What follows a line that was cut off stands on a line of its own."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"time":1.0,"kind":"sta')
    with JsonlObserver(path) as observer:
        observer(FULL)
        observer(FULL)
    assert read(path) == ([FULL, FULL], [Skipped(1, "not JSON")])


def test_two_observers_on_one_path_do_not_mix_lines(tmp_path: Path) -> None:
    """A line goes out in one piece, so that two processes may append to one file."""
    path = tmp_path / "trace.jsonl"
    observers = [JsonlObserver(path), JsonlObserver(path, flush_every=7)]
    threads = [threading.Thread(target=lambda one=one: [one(FULL) for _ in range(200)]) for one in observers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in observers:
        one.close()
    assert read(path) == ([FULL] * 400, [])


def test_names_cannot_begin_a_line_of_their_own(tmp_path: Path) -> None:
    """Line breaks, lone surrogates and terminal sequences in a name stay inside their JSON string."""
    path = tmp_path / "trace.jsonl"
    wicked = 'x\n{"kind":"started"}\r\u2028\x1b[2J\ud800"'
    event = Event(1.0, "started", wicked, 1, 0, tool=wicked)
    with JsonlObserver(path) as observer:
        observer(event)
    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert data.isascii()
    assert b"\x1b" not in data
    assert b"\r" not in data
    assert read(path) == ([event], [])


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A wrong path is told at once, when the observer is made, and by its name."""
    with pytest.raises(FileNotFoundError, match="no-folder"):
        JsonlObserver(tmp_path / "no-folder" / "trace.jsonl")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        JsonlObserver(tmp_path)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "1", None])
def test_flush_every_is_a_positive_whole_number(wrong: object, tmp_path: Path) -> None:
    """A wrong `flush_every` is refused when the observer is made."""
    with pytest.raises(PolicyError, match="flush_every"):
        JsonlObserver(tmp_path / "t", flush_every=wrong)  # type: ignore[arg-type]


class Path2(os.PathLike[str]):
    """Something that says what its path is."""

    def __init__(self, path: object) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("a\0b", "NUL"),
        (Path("\0"), "NUL"),
        (Path2(b"\0"), "NUL"),
        ("", "empty"),
        (Path2(b""), "empty"),
        ("\ud800", "no path"),
        (Path2(7), "no path"),
        (Path2(None), "no path"),
    ],
)
def test_what_no_file_can_be_called_is_refused(path: str, complaint: str) -> None:
    """What no file system takes as a name is refused in words that name the argument, not by an error of the system."""
    with pytest.raises(PolicyError, match=f"^JsonlObserver: target .*{complaint}"):
        JsonlObserver(path)


def test_a_path_may_be_told_in_bytes(tmp_path: Path) -> None:
    """A path object may say its path in bytes, also such that are no UTF-8."""
    raw = os.fsencode(tmp_path) + b"/\xe9.jsonl"
    with JsonlObserver(Path2(raw)) as observer:
        observer(FULL)
    with open(raw, "rb") as lines:
        assert read_events(lines) == ([FULL], [])


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file that is closed, or opened for reading only, would lose every event: it is refused at once."""
    (tmp_path / "t").write_text("")
    for mode in ("r", "rb"):
        with (tmp_path / "t").open(mode) as file, pytest.raises(PolicyError, match="target is a file"):
            JsonlObserver(file)  # type: ignore[arg-type]
    closed = [io.StringIO(), io.BytesIO(), (tmp_path / "t").open("w")]
    for one in closed:
        one.close()
        with pytest.raises(PolicyError, match="target is a file"):
            JsonlObserver(one)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 7, True, b"t", [], object()])
def test_a_target_is_a_path_or_a_file(wrong: object) -> None:
    """Something that is neither a path nor a file is refused by its type."""
    with pytest.raises(PolicyError, match=type(wrong).__name__):
        JsonlObserver(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["text", "bytes", "file", "binary file", "named like text", "named like bytes"])
def test_a_given_file_is_written_and_left_open(kind: str, tmp_path: Path) -> None:
    """An open file, text or binary, takes the lines and stays the caller's."""
    buffer: io.BytesIO = io.BytesIO()

    class Bare:
        mode = "wb" if kind == "named like bytes" else "w"

        def write(self, data: str | bytes) -> None:
            buffer.write(data.encode() if isinstance(data, str) else data)
            assert isinstance(data, bytes) == (kind == "named like bytes")

        def flush(self) -> None:
            pass

    path = tmp_path / "out"
    made = {
        "text": io.StringIO,
        "bytes": io.BytesIO,
        "file": lambda: path.open("w"),
        "binary file": lambda: path.open("wb"),
    }
    target = made.get(kind, Bare)()
    with JsonlObserver(target) as observer:  # type: ignore[arg-type]
        observer(FULL)
        observer.close()
    if isinstance(target, io.StringIO):
        data = target.getvalue().encode()
    elif isinstance(target, io.BytesIO):
        data = target.getvalue()
    elif isinstance(target, Bare):
        data = buffer.getvalue()
    else:
        assert not target.closed
        data = path.read_bytes()
        target.close()
    assert read_events(io.BytesIO(data)) == ([FULL], [])


class FullDisk(io.RawIOBase):
    """A file that takes a number of bytes and then has no room, until it is given some."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = bytes(data)[: self.room]  # type: ignore[call-overload]
        self.data += part
        self.room -= len(part)
        return len(part)


def test_p92_a_full_disk_is_counted_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An observer never raises: what did not fit is counted and logged once, with no word of the event in it."""
    observer = JsonlObserver(tmp_path / "trace.jsonl")
    size = len(json.dumps(FULL.as_dict(), separators=(",", ":"))) + 1
    disk = FullDisk(size + 20)
    observer._raw.close()  # type: ignore[union-attr]
    observer._raw = disk  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, logger="towerman.observers"):
        for _ in range(4):
            observer(FULL)
    assert observer.statistics() == JsonlStatistics(written=1, lost=3)
    assert observer.lost == 3
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "trace.jsonl" in message
    assert "No space left on device" in message
    assert "call_1" not in message
    # Room again: the cut line is ended first, so that it costs no other.
    disk.room = 10_000
    observer(FULL)
    observer.close()
    assert read_events(io.BytesIO(disk.data)) == ([FULL, FULL], [Skipped(2, "not JSON")])
    assert "written=2" in repr(observer)
    assert "lost=3" in repr(observer)
    assert "closed" in repr(observer)


def test_an_event_that_is_no_plain_data_is_counted(tmp_path: Path) -> None:
    """What cannot be written as JSON is lost alone."""
    with JsonlObserver(tmp_path / "trace.jsonl") as observer:
        observer(Event(1.0, "started", "r", 1, reason=object()))  # type: ignore[arg-type]
        observer(FULL)
        assert observer.statistics() == JsonlStatistics(written=1, lost=1)


def test_after_close_events_are_lost_and_close_again_does_nothing(tmp_path: Path) -> None:
    """A closed observer is deaf, not broken."""
    observer = JsonlObserver(tmp_path / "trace.jsonl")
    observer.close()
    observer.close()
    observer(FULL)
    observer.flush()
    assert observer.statistics() == JsonlStatistics(written=0, lost=1)


def test_a_file_that_fails_at_the_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file system that tells only at the close that there was no room breaks nothing either."""

    class Late(FullDisk):
        def close(self) -> None:
            if not self.closed:
                super().close()
                raise OSError(errno.EIO, "Input/output error")

    observer = JsonlObserver(tmp_path / "trace.jsonl")
    observer._raw.close()  # type: ignore[union-attr]
    observer._raw = Late(10_000)  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, logger="towerman.observers"):
        observer.close()
    assert "Input/output error" in caplog.text


def test_g12_a_write_that_does_not_come_back_holds_up_no_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """G12: while a write hangs (a pipe that nobody reads), flushing, closing and counting end in their time, and the
    observer says why its file is not complete.
    """
    entered, go = threading.Event(), threading.Event()

    class Stuck(FullDisk):
        def write(self, data: object) -> int:
            entered.set()
            assert go.wait(30)
            return super().write(data)

    observer = JsonlObserver(tmp_path / "trace.jsonl")
    observer._raw.close()  # type: ignore[union-attr]
    observer._raw = disk = Stuck(10_000)  # type: ignore[assignment]
    writer = threading.Thread(target=observer, args=(FULL,))
    writer.start()
    assert entered.wait(30)
    with caplog.at_level(logging.WARNING, logger="towerman.observers"):
        observer.flush(0)
        assert observer.failure is None
        observer.close(0)
        observer.close()
    assert observer.statistics() == JsonlStatistics(written=0, lost=0)
    assert observer.failure == "a write does not come back"
    assert observer.failure in caplog.text
    go.set()
    writer.join(30)
    observer(FULL)
    assert observer.statistics() == JsonlStatistics(written=1, lost=1)
    assert read_events(io.BytesIO(disk.data)) == ([FULL], [])


def test_a_forgotten_observer_closes_its_file(tmp_path: Path) -> None:
    """An observer that was never named, in `Tower(observers=[JsonlObserver(path)])`, leaves no open file."""
    observer = JsonlObserver(tmp_path / "trace.jsonl", flush_every=10)
    raw = observer._raw
    observer(FULL)
    del observer
    assert raw is not None
    assert raw.closed
    assert read(tmp_path / "trace.jsonl") == ([FULL], [])


# Reading.


STEM = b'{"kind":"started","time":1,"run_id":"r","batch":1,'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\xff\xfe", "not UTF-8 text"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"SECRET"', "not a JSON object"),
        (b"{}", 'no event: "kind" is missing'),
        (b'{"kind":"SECRET"}', '"kind" is not one that this version knows'),
        (b'{"kind":[]}', '"kind" is not one that this version knows'),
        (b'{"kind":"started"}', '"time" is missing'),
        (b'{"kind":"started","time":"SECRET"}', '"time" is not a number of seconds'),
        (b'{"kind":"started","time":true}', '"time" is not a number of seconds'),
        (b'{"kind":"started","time":NaN}', '"time" is not a number of seconds'),
        (b'{"kind":"started","time":1' + b"0" * 400 + b"}", '"time" is not a number of seconds'),
        (b'{"kind":"started","time":1}', '"run_id" and "batch" are needed'),
        (b'{"kind":"started","time":1,"run_id":1,"batch":1}', '"run_id" is not text'),
        (b'{"kind":"started","time":1,"run_id":"r","batch":1.5}', '"batch" is not a whole number of 0 or more'),
        (STEM + b'"index":-1}', '"index" is not a whole number of 0 or more'),
        (STEM + b'"index":true}', '"index" is not a whole number of 0 or more'),
        (STEM + b'"tool":{}}', '"tool" is not text'),
        (STEM + b'"outcome":"SECRET"}', '"outcome" is not one that this version knows'),
        (STEM + b'"waited_for":"SECRET"}', '"waited_for" is not a list of names'),
        (STEM + b'"waited_for":[1]}', '"waited_for" is not a list of names'),
        (STEM + b'"scopes":[]}', '"scopes" is not a mapping of names to scopes'),
        (STEM + b'"scopes":{"a":1}}', '"scopes" is not a mapping of names to scopes'),
        (b'"' + b"x" * jsonl_room.LONGEST_LINE + b'"', "longer than 1,000,000 bytes"),
    ],
)
def test_a_line_that_is_no_event_is_named_and_passed_over(line: bytes, reason: str) -> None:
    """G8: what is wrong with a line is said by its number and kind; nothing that stood in it is shown."""
    good = json.dumps(FULL.as_dict()).encode()
    events, skipped = read_events([good + b"\n", b"\n", line + b"\n", good])
    assert events == [FULL, FULL]
    assert skipped == [Skipped(3, reason)]
    assert "SECRET" not in str(skipped)


def test_a_last_line_that_was_cut_off_is_said_to_be_that() -> None:
    """The half line that a crash leaves is told apart from garbage in the middle."""
    good = json.dumps(FULL.as_dict()).encode()
    assert read_events([good + b"\n", good[:30]]) == (
        [FULL],
        [Skipped(2, "not JSON (the last line: cut off?)")],
    )


def test_lines_from_a_newer_version_are_read_as_far_as_they_are_known() -> None:
    """A code that came later is kept, a field that came later is left out; a byte order mark does no harm."""
    line = b'\xef\xbb\xbf{"kind":"finished","time":1,"run_id":"r","batch":1,"code":"a_new_code","colour":"red"}\n'
    events, skipped = read_events([line])
    assert not skipped
    assert events[0].code == "a_new_code"
    assert events[0].time == 1.0


_names = st.none() | st.text(max_size=20)
_seconds = st.none() | st.floats(0, 1e9)
_events = st.builds(
    Event,
    time=st.floats(0, 1e9),
    kind=st.sampled_from(["batch_started", "waiting", "admitted", "started", "finished", "batch_finished"]),
    run_id=st.text(max_size=20),
    batch=st.integers(1, 100),
    index=st.none() | st.integers(0, 10_000),
    call_id=_names,
    tool=_names,
    outcome=st.sampled_from([None, "ok", "error", "pending"]),
    code=st.sampled_from([None, *sorted(CODES)]),
    waited=_seconds,
    ran=_seconds,
    waiting_for=_names,
    waited_for=st.none() | st.lists(st.text(max_size=10), max_size=3).map(tuple),
    size=st.none() | st.integers(0, 2**50),
    wall=_seconds,
    scopes=st.none() | st.dictionaries(st.text(max_size=5), st.sampled_from(["process", "run"]), max_size=2),
    reason=_names,
)


@settings(max_examples=150)
@given(st.lists(_events, max_size=5))
def test_whatever_was_written_is_read_back(events: list[Event]) -> None:
    """Writing and reading are inverse, for any names and numbers, and each event takes one line."""
    out = io.BytesIO()
    observer = JsonlObserver(out)
    for event in events:
        observer(event)
    assert out.getvalue().count(b"\n") == len(events)
    out.seek(0)
    assert read_events(out) == (events, [])


@settings(max_examples=150)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_can_be_read(noise: bytes, cut: int) -> None:
    """Reading never raises, whatever a file holds, and keeps the good lines before the damage."""
    good = json.dumps(FULL.as_dict()).encode() + b"\n"
    events, _ = read_events(io.BytesIO(good + noise + b"\n" + good[:cut]))
    assert events[0] == FULL


# Logging.


def test_one_record_per_event_made_of_words(caplog: pytest.LogCaptureFixture) -> None:
    """R-129: each event is one line of key=value words with run, tool, waiting and reason."""
    observer = LogObserver()
    with caplog.at_level(logging.INFO, logger="towerman"):
        for event in EVENTS:
            observer(event)
    assert [record.getMessage() for record in caplog.records] == [
        "batch_started time=12 run=run-1 batch=2 size=1 wall=1700000000.5",
        'waiting time=12 run=run-1 batch=2 index=0 call=call_1 tool=read waiting_for="pool crm"',
        "admitted time=12.25 run=run-1 batch=2 index=0 call=call_1 tool=read waited=0.25 scopes=crm:process",
        "started time=12.25 run=run-1 batch=2 index=0 call=call_1 tool=read",
        "finished time=12.5 run=run-1 batch=2 index=0 call=call_1 tool=read outcome=error code=handler_error "
        'waited=0.25 ran=0.5 waited_for="pool crm, resource file:{path}" size=17',
        'batch_finished time=12.6 run=run-1 batch=2 reason="the user left"',
    ]
    assert {(record.name, record.levelno) for record in caplog.records} == {("towerman", logging.INFO)}


@pytest.mark.parametrize(
    "wicked", ["a\nERROR forged", "a\r\nb", "\x1b[31m", "\u2028x", "\x85", 'a" outcome="ok', "a=b", ""]
)
def test_no_name_can_forge_a_record(wicked: str) -> None:
    """A line break, a terminal sequence or a quote in a name is escaped, and can be read back."""
    line = line_of(Event(1.0, "started", "r", 1, 0, tool=wicked))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line.split(" tool=")[1]) == wicked


@settings(max_examples=100)
@given(_events)
def test_every_line_is_one_printable_line(event: Event) -> None:
    """Whatever an event holds, its record is one line of printable ASCII."""
    line = line_of(event)
    assert line.isascii()
    assert line.isprintable()


def test_logger_and_level_can_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """A logger, an adapter or a name, and a level as a number or a name."""
    mine = logging.getLogger("mine")
    with caplog.at_level(logging.DEBUG):
        LogObserver(mine, logging.DEBUG)(FULL)
        LogObserver("theirs", "warning")(FULL)
        LogObserver(logging.LoggerAdapter(mine, {}), 35)(FULL)
    assert [(record.name, record.levelno) for record in caplog.records] == [("mine", 10), ("theirs", 30), ("mine", 35)]
    assert repr(LogObserver(mine, "debug")) == "LogObserver('mine', level='DEBUG', lost=0)"


@pytest.mark.parametrize(("logger", "level"), [(7, 20), (None, "loud"), (None, True), (None, 1.5)])
def test_a_wrong_logger_or_level_is_refused(logger: object, level: object) -> None:
    """A mistake in the set-up is told when the observer is made."""
    with pytest.raises(PolicyError, match=r"logger|level"):
        LogObserver(logger, level)  # type: ignore[arg-type]


def test_the_library_is_silent_until_logging_is_set_up() -> None:
    """Without any configuration nothing is written to stderr (the NullHandler convention)."""
    program = (
        "from towerman.observers import LogObserver; from towerman.trace import Event\n"
        "LogObserver(level='CRITICAL')(Event(1.0, 'started', 'r', 1))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=_environment(), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_a_level_that_is_off_costs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens no line is made."""
    from towerman.observers import log as log_room

    monkeypatch.setattr(log_room, "line_of", lambda event: pytest.fail("made a line for nobody"))
    quiet = logging.getLogger("quiet")
    quiet.setLevel(logging.ERROR)
    LogObserver(quiet)(FULL)


def test_a_broken_handler_breaks_no_call() -> None:
    """An observer never raises: a handler that does is counted."""

    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("no")

    logger = logging.getLogger("broken")
    logger.propagate = False
    logger.addHandler(Broken())
    logger.setLevel(logging.INFO)
    observer = LogObserver(logger)
    observer(FULL)
    assert observer.lost == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_a_line_is_written(tmp_path: Path) -> None:
    """P-94: a process forks while the observer's thread is in the middle of a write: the child can write, and what
    waited to be written is in the file once.
    """
    code = """if True:
        import os, sys, threading, warnings
        warnings.simplefilter("ignore")
        from towerman.observers import JsonlObserver
        from towerman.trace import Event
        observer = JsonlObserver(sys.argv[1], flush_every=100)
        observer(Event(1.0, "started", "waits", 1))
        with observer._lock:
            child = os.fork()
        if not child:
            observer(Event(1.0, "started", "child", 1))
            observer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        observer.close()
    """
    path = tmp_path / "t.jsonl"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src")}
    subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=True, timeout=60)
    assert [json.loads(line)["run_id"] for line in path.read_text().splitlines()] == ["child", "waits"]
