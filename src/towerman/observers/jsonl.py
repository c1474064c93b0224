"""Events as lines of JSON: written while a tower works, read back for a timeline.

Theory. A line is one event, and it goes to the operating system whole, in one write to a file opened for appending.
So a crash of the process loses nothing that reached the observer, two processes may share a file, and a reader sees
whole lines except perhaps the last. A file that ends in half a line (the machine went down) is not made worse: the
next line starts on a line of its own.

House rules. Writing never raises after the file was opened: what could not be written is counted and told once.
Reading never shows what a broken line held, only where it stands and what is wrong with it.

Not here: rotation, compression, and putting events together (timeline).
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Final, cast, get_args
from weakref import WeakSet

from towerman.calls import Outcome
from towerman.errors import Code, PolicyError
from towerman.trace import Event, Kind

_log = logging.getLogger("towerman.observers")

_KINDS: Final = frozenset(get_args(Kind))
_OUTCOMES: Final = frozenset(get_args(Outcome))

CLOSE_SECONDS: Final = 5.0
"""How long `close` and `flush` wait for a write that is under way: a pipe that nobody reads, a server that is away."""

LONGEST_LINE: Final = 1_000_000
"""Bytes; a longer line is no event of ours."""


@dataclass(frozen=True, slots=True)
class JsonlStatistics:
    """What became of the events.

    Args:
        written: events handed to the operating system, or to the given file.
        lost: events that could not be written.
    """

    written: int
    lost: int


_OPEN: WeakSet[JsonlObserver] = WeakSet()


class JsonlObserver:
    """Append each event to a file as one line of JSON, so that a crash loses little.

    Args:
        target: a path, opened for appending (and made, but not its folder); or a file opened for writing, text or
            binary, which stays the caller's: `close` flushes it and leaves it open.
        flush_every: hand the lines to the operating system after so many events. At 1, the default, a crash of the
            process loses no event that was delivered. More is quicker and loses up to so many; the end of a batch
            and `close` always flush.

    Attributes:
        failure: why events were lost, in the system's words; None while none were.

    Raises:
        OSError: the path cannot be opened; the message names it.
        PolicyError: `target` is no path that a file can have and no file that can be written, or `flush_every` is not a
            whole number of 1 or more.
    """

    def __init__(self, target: str | os.PathLike[str] | IO[str] | IO[bytes], *, flush_every: int = 1) -> None:
        if type(flush_every) is not int or flush_every < 1:
            raise PolicyError(f"flush_every: events, a whole number of 1 or more; got {flush_every!r}")
        self._flush_every = flush_every
        self._lock = threading.Lock()
        _OPEN.add(self)
        self._buffer: list[bytes] = []
        self._written = 0
        self._lost = 0
        self._told = False
        self.failure: str | None = None
        self._closed = False
        # A line that was cut by an error or a crash must not swallow the next one.
        self._broken_line = False
        self._raw: io.FileIO | None = None
        self._file: IO[str] | IO[bytes] | None = None
        if isinstance(target, str | os.PathLike):
            self._name = _usable(target)
            self._raw = open(self._name, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            self._broken_line = _ends_in_half_a_line(self._name)
        elif callable(getattr(target, "write", None)):
            if getattr(target, "closed", False) is True or not _writable(target):
                raise PolicyError("JsonlObserver: target is a file that is closed or was opened for reading only")
            self._name = str(getattr(target, "name", None) or f"<{type(target).__name__}>")
            self._file = target
        else:
            kind = type(target).__name__
            raise PolicyError(f"JsonlObserver: target is a path (text) or a file opened for writing; got {kind}")
        self._text = self._file is not None and _takes_text(self._file)

    def __call__(self, event: Event) -> None:
        """Write one event; never raises."""
        with self._lock:
            try:
                line = json.dumps(event.as_dict(), separators=(",", ":")).encode("ascii") + b"\n"
            except Exception as error:  # an event is plain data; a stranger one is counted, not fatal
                self._lose(1, error)
                return
            if self._closed:
                self._lost += 1
                return
            self._buffer.append(line)
            if len(self._buffer) >= self._flush_every or event.kind == "batch_finished":
                self._flush()

    def _flush(self) -> None:
        lines, self._buffer = self._buffer, []
        if not lines:
            return
        try:
            if self._raw is not None:
                self._write_raw(b"".join(lines))
            else:
                self._write_file(b"".join(lines))
        except Exception as error:
            self._lose(len(lines), error)
        else:
            self._written += len(lines)

    def _write_raw(self, data: bytes) -> None:
        assert self._raw is not None
        if self._broken_line:
            data = b"\n" + data
        view = memoryview(data)
        while view:
            done = self._raw.write(view)
            # A full disk takes a part first and raises at the rest.
            self._broken_line = done is None or done < len(view)
            view = view[done or 0 :]
        self._broken_line = False

    def _write_file(self, data: bytes) -> None:
        assert self._file is not None
        if self._text:
            cast("IO[str]", self._file).write(data.decode("ascii"))
        else:
            cast("IO[bytes]", self._file).write(data)
        self._file.flush()

    def _lose(self, events: int, error: Exception) -> None:
        self._lost += events
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        self.failure = self.failure or reason
        if not self._told:
            self._told = True
            _log.warning("events are lost: cannot write to %r: %s", self._name, reason)

    def flush(self, timeout: float = CLOSE_SECONDS) -> None:
        """Hand every event so far to the operating system; never raises.

        Args:
            timeout: seconds to wait for a write that is under way and does not come back.
        """
        if self._lock.acquire(timeout=timeout):
            try:
                self._flush()
            finally:
                self._lock.release()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Flush, and close the file if this observer opened it; more closes do nothing, later events are lost.

        Args:
            timeout: seconds to wait for a write that is under way. If it does not come back, `failure` says so, and
                the file is closed when it does or when the process ends.
        """
        if self._closed:
            return
        if not self._lock.acquire(timeout=timeout):
            self._closed = True
            self._lose(0, TimeoutError(errno.ETIMEDOUT, "a write does not come back"))
            return
        try:
            self._close()
        finally:
            self._lock.release()

    def _close(self) -> None:
        if self._closed:  # by another thread, while this one waited
            return
        self._flush()
        self._closed = True
        if self._raw is not None:
            try:
                self._raw.close()
            except OSError as error:  # some file systems tell only now that there is no room
                self._lose(0, error)

    @property
    def name(self) -> str:
        """The path, or what the given file calls itself."""
        return str(self._name)

    @property
    def lost(self) -> int:
        """Events that could not be written; `Tower.statistics()` counts them as well."""
        return self._lost

    def statistics(self) -> JsonlStatistics:
        """How many events were written and how many were lost."""
        return JsonlStatistics(self._written, self._lost)

    def __enter__(self) -> JsonlObserver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # An observer is often made right in the call of Tower(...) and never named: it closes with it.
        if getattr(self, "_raw", None) is not None and not self._closed:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"JsonlObserver({self._name!r}, {state}, written={self._written}, lost={self._lost})"


def _usable(target: str | os.PathLike[str]) -> str:
    """The path as text, if a file can have it."""
    try:
        path = os.fsdecode(target)
        os.fsencode(path)
    except (TypeError, UnicodeError):
        raise PolicyError("JsonlObserver: target is no path: it cannot be written as the name of a file") from None
    if not path:
        raise PolicyError("JsonlObserver: target is an empty path; name a file")
    if "\0" in path:
        raise PolicyError("JsonlObserver: target is a path with a NUL character; no file can have it")
    return path


def _writable(file: IO[str] | IO[bytes]) -> bool:
    """Whether it can be written, as far as it says so."""
    tell = getattr(file, "writable", None)
    return not callable(tell) or bool(tell())


def _after_fork() -> None:
    """In the child of a fork: whoever held a lock is not here, and lines that wait are the parent's to write."""
    for observer in list(_OPEN):
        observer._lock = threading.Lock()
        observer._buffer.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _ends_in_half_a_line(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # empty, or no file that one can seek in or read
        return False


def _takes_text(file: IO[str] | IO[bytes]) -> bool:
    if isinstance(file, io.TextIOBase):
        return True
    if isinstance(file, io.RawIOBase | io.BufferedIOBase):
        return False
    return "b" not in str(getattr(file, "mode", ""))


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line that is no event.

    Args:
        line: its number, from 1.
        reason: what is wrong with it; never what it held.
    """

    line: int
    reason: str


def read_events(lines: Iterable[bytes]) -> tuple[list[Event], list[Skipped]]:
    """Read back what a `JsonlObserver` wrote, and name the lines that cannot be read.

    Args:
        lines: lines of bytes, for example a file opened with `"rb"`. Empty ones are passed over.

    Returns:
        The events in the order of the lines, and the lines that were skipped.
    """
    events: list[Event] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            events.append(_event(line))
        except _NoEvent as problem:
            reason = str(problem)
            if not line.endswith(b"\n"):
                reason += " (the last line: cut off?)"
            skipped.append(Skipped(number, reason))
    return events, skipped


class _NoEvent(Exception):
    """A line is no event; the text says why and shows nothing of the line."""


def _event(line: bytes) -> Event:
    if len(line) > LONGEST_LINE:
        raise _NoEvent(f"longer than {LONGEST_LINE:,} bytes")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _NoEvent("not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise _NoEvent("not JSON") from None
    if not isinstance(record, dict):
        raise _NoEvent("not a JSON object")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _NoEvent(
            '"kind" is not one that this version knows' if "kind" in record else 'no event: "kind" is missing'
        )
    time = _seconds(record, "time")
    if time is None:
        raise _NoEvent('"time" is missing')
    run_id = _text(record, "run_id")
    batch = _whole(record, "batch")
    if run_id is None or batch is None:
        raise _NoEvent('"run_id" and "batch" are needed')
    outcome = _text(record, "outcome")
    if outcome is not None and outcome not in _OUTCOMES:
        raise _NoEvent('"outcome" is not one that this version knows')
    scopes = record.get("scopes")
    if scopes is not None and not (
        isinstance(scopes, dict) and all(isinstance(scope, str) for scope in scopes.values())
    ):
        raise _NoEvent('"scopes" is not a mapping of names to scopes')
    waited_for = record.get("waited_for")
    if waited_for is not None and not (
        isinstance(waited_for, list) and all(isinstance(name, str) for name in waited_for)
    ):
        raise _NoEvent('"waited_for" is not a list of names')
    return Event(
        time,
        cast("Kind", kind),
        run_id,
        batch,
        index=_whole(record, "index"),
        call_id=_text(record, "call_id"),
        tool=_text(record, "tool"),
        outcome=cast("Outcome | None", outcome),
        # A code that a newer version brought is shown as it stands.
        code=cast("Code | None", _text(record, "code")),
        waited=_seconds(record, "waited"),
        ran=_seconds(record, "ran"),
        waiting_for=_text(record, "waiting_for"),
        waited_for=None if waited_for is None else tuple(waited_for),
        size=_whole(record, "size"),
        wall=_seconds(record, "wall"),
        scopes=scopes,
        reason=_text(record, "reason"),
        shared_with=_whole(record, "shared_with"),
        approval=_text(record, "approval"),
        decision=_text(record, "decision"),
        tokens=_whole(record, "tokens"),
    )


def _seconds(record: dict[str, object], name: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NoEvent(f'"{name}" is not a number of seconds')
    try:
        seconds = float(value)
    except OverflowError:
        raise _NoEvent(f'"{name}" is not a number of seconds') from None
    if not math.isfinite(seconds):
        raise _NoEvent(f'"{name}" is not a number of seconds')
    return seconds


def _whole(record: dict[str, object], name: str) -> int | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise _NoEvent(f'"{name}" is not a whole number of 0 or more')
    return value


def _text(record: dict[str, object], name: str) -> str | None:
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _NoEvent(f'"{name}" is not text')
    return value
