"""One batch drawn as text: who ran when, who waited, and for what.

Theory. Every call is one row, in emitted order, on one time axis that starts when the batch came in. A row has up
to four stretches, and they look different: held in the plan behind a call of its own batch, waiting in the queue,
running, and work that goes on after the result was sealed. A call that was tried again waits and runs several times,
and rests in between. A call that never started ends in a cross, one that the run of another call answered in a diamond.
The story of a batch comes either as spans or as the events that observers saw; `stories` turns the second into the
first.

House rules. Pure: no terminal, no clock, no colour library. No line is wider than asked. Nothing that came from
outside is printed as it is: control, format and unassigned characters are escaped, so that a tool's name can
neither move the cursor nor turn the text around.

Not here: tables of results and the live view (cli), files of events (observers).
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from towerman.calls import Outcome
from towerman.errors import Code
from towerman.trace import UNKNOWN_TOOL, Event, Span

LEAST_WIDTH: Final = 24
"""Narrower than this is drawn as this."""

_OUTCOMES: Final[tuple[str, ...]] = get_args(Outcome)

# The stretches of a bar; 0 is empty.
_HELD: Final = 1
_WAITING: Final = 2
_RUNNING: Final = 3
_AFTER: Final = 4
_NOT_RUN: Final = 5
_GOES_ON: Final = 6
_SHARED: Final = 7
_RESTING: Final = 8

_SIGNS: Final[dict[int, tuple[str, str]]] = {
    0: (" ", " "),
    _HELD: ("·", "."),
    _WAITING: ("░", "-"),
    _RUNNING: ("█", "#"),
    _AFTER: ("▒", "="),
    _NOT_RUN: ("×", "x"),  # noqa: RUF001 - it is a cross, and meant
    _GOES_ON: ("→", ">"),
    _SHARED: ("◆", "*"),
    _RESTING: ("╌", "~"),
}
_LEGEND: Final[dict[int, str]] = {
    _HELD: "held behind a call of this batch",
    _WAITING: "waiting in the queue",
    _RUNNING: "running",
    _AFTER: "at work after its result",
    _NOT_RUN: "did not run",
    _SHARED: "answered by another call's run",
    _RESTING: "resting before another attempt",
    _GOES_ON: "no end seen",
}
_STRETCH_COLOR: Final[dict[int, str]] = {
    _HELD: "2",
    _WAITING: "33",
    _AFTER: "35",
    _NOT_RUN: "31",
    _GOES_ON: "35",
    _RESTING: "2",
}
_OUTCOME_COLOR: Final[dict[str, str]] = {
    "ok": "32",
    "error": "31",
    "rejected": "31",
    "skipped": "33",
    "cancelled": "33",
    "timed_out": "31",
    "pending": "36",
}

# Characters that are told by their number: they would move, hide or turn what stands around them.
_ESCAPED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str, *, ascii_only: bool = False) -> str:
    """The text on one line, with every character that a terminal would obey written as its number.

    Args:
        text: anything, for example a tool's name or a run's id.
        ascii_only: write every character beyond ASCII as its number too.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character, ascii_only) for character in text)


def _shown(character: str, ascii_only: bool) -> str:
    number = ord(character)
    if 32 <= number < 127:
        return character
    variation = 0xFE00 <= number <= 0xFE0F or 0xE0100 <= number <= 0xE01EF
    if not ascii_only and not variation and unicodedata.category(character) not in _ESCAPED:
        return character
    if number < 256:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


def columns(text: str) -> int:
    """How many terminal columns a printable text takes (East Asian wide characters take two, marks none)."""
    if text.isascii():
        return len(text)
    return sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, *, right: bool = False, ascii_only: bool = False) -> str:
    """The text in exactly `width` columns: filled with blanks, or cut with a sign that shows it.

    Args:
        text: printable text.
        width: columns, 0 or more.
        right: put the blanks in front.
        ascii_only: show the cut by `~` instead of an ellipsis.
    """
    taken = columns(text)
    if taken > width:
        sign = "" if width < 1 else "~" if ascii_only else "…"
        taken = end = 0
        while taken + _columns_of(text[end]) <= width - 1:
            taken += _columns_of(text[end])
            end += 1
        text = text[:end] + sign
        taken += len(sign)
    blanks = " " * (width - taken)
    return blanks + text if right else text + blanks


@dataclass(frozen=True, slots=True)
class _Unit:
    """How lengths of time are written in one drawing."""

    name: str
    per_second: float
    decimals: int

    def text(self, seconds: float) -> str:
        return _number(seconds * self.per_second, self.decimals)


def _number(value: float, decimals: int) -> str:
    """A plain number, or a short one where the plain one would fill the line."""
    return f"{value:.{decimals}f}" if value < 1e7 else f"{value:.3g}"


def _unit_for(seconds: float) -> _Unit:
    if seconds >= 1:
        return _Unit("s", 1.0, 2 if seconds < 100 else 1 if seconds < 1000 else 0)
    if seconds >= 1e-3:
        return _Unit("ms", 1e3, 1 if seconds < 0.01 else 0)
    return _Unit("µs", 1e6, 0)


def _finite(seconds: float) -> float:
    """Times before the batch, or no times at all, are drawn at its start; later than any clock is cut."""
    return min(seconds, 1e15) if 0 <= seconds < math.inf else 0.0


def _tries(span: Span) -> Sequence[tuple[float | None, float | None, float]]:
    """For each attempt when it was handed in, started and ended; of most calls there is one."""
    return span.attempts or ((span.queued, span.started, span.sealed),)


def _waited(span: Span, unit: _Unit) -> str:
    if span.queued is None:
        return ""
    waits = [
        max(0.0, _finite(end if started is None else started) - _finite(queued))
        for queued, started, end in _tries(span)
        if queued is not None
    ]
    return unit.text(sum(waits))


def _ran(span: Span, unit: _Unit) -> str:
    if span.started is None:
        return ""
    runs = [_finite(end) - _finite(started) for _, started, end in _tries(span) if started is not None]
    return unit.text(sum(max(0.0, run) for run in runs))


def _open(span: Span) -> bool:
    """No result was seen. (A call that waits for a decision always has a code.)"""
    return span.outcome == "pending" and span.code is None


def _status(span: Span) -> str:
    return "no result" if _open(span) else span.code or span.outcome


def _blockers(span: Span) -> str:
    return ", ".join(name.removeprefix("resource ") for name in span.waited_for)


def _bar(span: Span, width: int, horizon: float) -> list[int]:
    """What stands in each column of the axis."""

    def column(seconds: float) -> int:
        return min(width - 1, int(min(1.0, _finite(seconds) / horizon) * width)) if horizon > 0 else 0

    cells = [0] * width

    def fill(start: float, end: float, sign: int) -> None:
        for place in range(column(start), column(end)):
            cells[place] = sign

    seal = column(span.sealed)
    waits_until = span.sealed if span.started is None else span.started
    if span.waited_for:  # else what is empty before it is only the time that the batch took to get there
        fill(0.0, waits_until if span.queued is None else span.queued, _HELD)
    first = 0
    if span.attempts:
        fill(span.attempts[0][2], span.sealed, _RESTING)
    for queued, started, end in _tries(span):
        if queued is not None:
            fill(queued, end if started is None else started, _WAITING)
        if started is None:
            continue
        first = column(started)
        # A seal on a column's edge belongs to the column before it; what ran at all takes one column at least.
        reach = math.ceil(_finite(end) / horizon * width) if horizon > 0 else 1
        for place in range(first, max(first + 1, min(reach, width))):
            cells[place] = _RUNNING
    if span.started is None:
        cells[seal] = _GOES_ON if _open(span) else _NOT_RUN if span.shared_with is None else _SHARED
        return cells
    if span.ended is not None:
        for place in range(max(seal, first + 1), column(span.ended) + 1):
            cells[place] = _AFTER
    elif span.still_running:
        for place in range(max(seal, first + 1), width):
            cells[place] = _RUNNING if _open(span) else _AFTER
        cells[width - 1] = _GOES_ON
    return cells


def _ticks(width: int, horizon: float, unit: _Unit, ascii_only: bool) -> tuple[str, str]:
    """The labels of the axis and the ruler below them."""
    name = "us" if ascii_only and unit.name == "µs" else unit.name
    whole = horizon * unit.per_second
    corner, dash = ("+", "-") if ascii_only else ("┬", "─")
    if whole <= 0:
        return fit(f"0 {name}", width, ascii_only=ascii_only), corner + dash * (width - 1)
    # The smallest step of 1, 2 or 5 times a power of ten whose labels do not touch.
    step = 10.0 ** math.floor(math.log10(whole / width))
    factors = (1.0, 2.0, 5.0)
    decimals = 0
    for attempt in range(60):  # pragma: no branch - a step as long as the axis always fits
        candidate = step * 10.0 ** (attempt // 3) * factors[attempt % 3]
        decimals = max(0, -math.floor(math.log10(candidate) + 1e-9))
        room = max(5, len(_number(whole, decimals)) + 2)
        if candidate / whole * width >= room or candidate > whole:
            step = candidate
            break
    labels = [" "] * width
    ruler = [dash] * width
    for number in range(int(whole / step) + 1):
        place = int(number * step / whole * width)
        label = f"0 {name}" if number == 0 else _number(number * step, decimals)
        if place < width:
            ruler[place] = corner
            if number == 0 or place + len(label) <= width:
                labels[place : place + len(label)] = label
    return fit("".join(labels), width, ascii_only=ascii_only), "".join(ruler)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Widths of the columns; 0 means that the column is left out."""

    gap: int
    index: int
    tool: int
    status: int
    waited: int
    ran: int
    tokens: int
    blockers: int
    bar: int


def _layout(
    width: int, index: int, tool: int, status: int, waited: int, ran: int, tokens: int, blockers: int
) -> _Layout:
    gap = 2 if width >= 90 else 1
    least_bar = 28 if width >= 90 else 16 if width >= 70 else 10
    if width < 100:
        tokens = 0
    if width < 64:
        waited = ran = 0
    if width < 48:
        blockers = 0
    if width < 36:
        status = 0
    texts = [min(tool, 28), min(status, 22), min(blockers, 36)]
    fixed = [column for column in (index, waited, ran, tokens) if column]
    gaps = gap * (len(fixed) + sum(1 for text in texts if text))
    room = width - sum(fixed) - gaps - least_bar
    while sum(texts) > room and max(texts) > 4:
        texts[texts.index(max(texts))] -= 1
    bar = max(1, width - sum(fixed) - gaps - sum(texts))
    return _Layout(gap, index, texts[0], texts[1], waited, ran, tokens, texts[2], bar)


def _count(spans: Sequence[Span]) -> str:
    seen = Counter("without a result" if _open(span) else span.outcome for span in spans)
    return ", ".join(f"{seen[name]:,} {name}" for name in (*_OUTCOMES, "without a result") if seen[name])


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number:,} calls"


def draw(
    spans: Sequence[Span],
    *,
    width: int = 100,
    color: bool = False,
    ascii_only: bool = False,
    max_rows: int = 200,
) -> str:
    """Draw the calls of one batch as a text of several lines, none wider than `width` columns.

    A row says: the call's index, its tool, its status (the code, or the outcome where there is none), its bar on the
    common axis, how long it waited in the queue and how long it ran until its result, about how many tokens its result
    takes of the model's context, and what blocked it, first to last.

    Args:
        spans: the calls of the batch; they are drawn in emitted order.
        width: columns of the drawing; less than 24 is taken as 24. Narrow drawings leave out, in this order, the
            tokens, the seconds, the blockers and the codes.
        color: add ANSI colour sequences; they take no columns.
        ascii_only: use no character beyond ASCII.
        max_rows: draw at most so many calls and say how many were left out; the axis covers all of them.

    Returns:
        The drawing, without a line end after its last line.
    """
    width = max(width, LEAST_WIDTH)
    if not spans:
        return "no calls"
    ordered = sorted(spans, key=lambda span: span.index)
    shown = ordered[: max(max_rows, 1)]
    sealed = max(_finite(span.sealed) for span in ordered)
    horizon = max(sealed, max(_finite(span.ended or 0.0) for span in ordered))
    if horizon < 1e-9:  # no clock tells less: everything happened at once
        horizon = 0.0
    unit = _unit_for(horizon)
    name = "us" if ascii_only and unit.name == "µs" else unit.name

    tools = [printable(span.tool, ascii_only=ascii_only) for span in shown]
    states = [printable(_status(span), ascii_only=ascii_only) for span in shown]
    blockers = [printable(_blockers(span), ascii_only=ascii_only) for span in shown]
    waits = [_waited(span, unit) for span in shown]
    runs = [_ran(span, unit) for span in shown]
    tokens = ["" if span.tokens is None else f"{span.tokens:,}" for span in shown]
    named = any(blockers)
    layout = _layout(
        width,
        max(1, *(len(str(span.index)) for span in shown)),
        max(4, *map(columns, tools)),
        max(7, *map(columns, states)),
        max(4, *map(len, waits)),
        max(3, *map(len, runs)),
        max(6, *map(len, tokens)) if any(tokens) else 0,
        max(10, *map(columns, blockers)) if named else 0,
    )
    bars = [_bar(span, layout.bar, horizon) for span in shown]

    def paint(text: str, sgr: str) -> str:
        bare = text.rstrip()
        return f"\x1b[{sgr}m{bare}\x1b[0m{text[len(bare) :]}" if color and bare else text

    def row(index: str, tool: str, status: str, bar: str, waited: str, ran: str, tokens: str, blocked: str) -> str:
        cells = [fit(index, layout.index, right=True), fit(tool, layout.tool, ascii_only=ascii_only)]
        if layout.status:
            cells.append(status)
        cells.append(bar)
        if layout.waited:
            cells.append(fit(waited, layout.waited, right=True))
            cells.append(fit(ran, layout.ran, right=True))
        if layout.tokens:
            cells.append(fit(tokens, layout.tokens, right=True))
        if layout.blockers:
            cells.append(blocked)
        return (" " * layout.gap).join(cells).rstrip()

    labels, ruler = _ticks(layout.bar, horizon, unit, ascii_only)
    still = sum(1 for span in ordered if span.still_running and not _open(span))
    head = f"{_calls(len(ordered))} in {unit.text(sealed)} {name}: {_count(ordered)}"
    counted = [span.tokens for span in ordered if span.tokens is not None]
    if counted:
        head += f"; about {_tokens(sum(counted))}"
    if still:
        head += f"; {still:,} still at work"
    lines = [
        fit(head, width, ascii_only=ascii_only).rstrip(),
        "",
        row("#", "tool", fit("status", layout.status), labels, "wait", "ran", "tokens", "waited for"),
        row("", "", " " * layout.status, paint(ruler, "2"), "", "", "", ""),
    ]
    for span, tool, state, cells, waited, ran, count, blocked in zip(
        shown, tools, states, bars, waits, runs, tokens, blockers, strict=True
    ):
        outcome_color = _OUTCOME_COLOR[span.outcome]
        status = paint(fit(state, layout.status, ascii_only=ascii_only), outcome_color)
        bar = _ink(cells, outcome_color, ascii_only, color)
        blocker = paint(fit(blocked, layout.blockers, ascii_only=ascii_only), "33")
        lines.append(row(str(span.index), tool, status, bar, waited, ran, count, blocker))
    left = len(ordered) - len(shown)
    if left:
        note = f"... and {left:,} more: {_count(ordered[len(shown) :])}"
        lines.append(fit(note, width, ascii_only=ascii_only).rstrip())
    lines.append("")
    lines.extend(_legend(bars, width, ascii_only, name if layout.waited else None))
    return "\n".join(lines)


def _ink(cells: Sequence[int], running: str, ascii_only: bool, color: bool) -> str:
    """The bar's signs, coloured by stretch."""
    out: list[str] = []
    start = 0
    for end in range(1, len(cells) + 1):
        if end == len(cells) or cells[end] != cells[start]:
            text = _SIGNS[cells[start]][ascii_only] * (end - start)
            sgr = running if cells[start] == _RUNNING else _STRETCH_COLOR.get(cells[start])
            out.append(f"\x1b[{sgr}m{text}\x1b[0m" if color and sgr else text)
            start = end
    return "".join(out)


def _legend(bars: Sequence[Sequence[int]], width: int, ascii_only: bool, unit: str | None) -> list[str]:
    """What the signs of this drawing mean, on as many lines as it takes."""
    used = {sign for bar in bars for sign in bar}
    parts = [f"{_SIGNS[sign][ascii_only]} {text}" for sign, text in _LEGEND.items() if sign in used]
    if unit is not None:
        parts.append(f"wait (in the queue), ran: in {unit}")
    lines = [""]
    for part in parts:
        if lines[-1] and columns(lines[-1]) + 3 + columns(part) > width:
            lines.append("")
        lines[-1] += part if not lines[-1] else "   " + part
    return [fit(line, width, ascii_only=ascii_only).rstrip() for line in lines]


@dataclass(frozen=True, slots=True)
class Story:
    """One batch as its events told it.

    Args:
        run_id: the run's id.
        batch: number of the batch within its run, from 1.
        wall: Unix time in seconds at which the batch came in, or None when no event said so.
        calls: how many calls the batch had; at least as many as were seen.
        spans: the calls that were seen, in emitted order. One without a result is `pending` with no code.
        finished: the end of the batch was seen.
    """

    run_id: str
    batch: int
    wall: float | None
    calls: int
    spans: tuple[Span, ...]
    finished: bool


@dataclass(slots=True)
class _Told:
    """A call while its events are read; the times are seconds since its batch came in."""

    tool: str = UNKNOWN_TOOL
    outcome: Outcome | None = None
    code: Code | None = None
    queued: float | None = None
    waited: float | None = None
    started: float | None = None
    sealed: float = 0.0
    ended: float | None = None
    waited_for: tuple[str, ...] = ()
    orphan: bool = False
    shared_with: int | None = None
    tokens: int | None = None
    attempts: list[tuple[float, float | None, float]] = field(default_factory=list)

    def handed_in(self, end: float) -> float | None:
        """When it was handed to the gate, this attempt or its only one; None: it was not."""
        # The time in the queue that the gate itself counted is the truth; when it was first seen waiting is a guess.
        if self.waited is not None and (self.started is not None or self.waited > 0):
            return max(0.0, (end if self.started is None else self.started) - self.waited)
        return self.started if self.queued is None else self.queued

    def attempt_ends(self, at: float) -> None:
        """An attempt has ended, and another one may come."""
        queued = self.handed_in(at)
        if queued is not None:
            self.attempts.append((queued, self.started, at))
        self.queued = self.waited = self.started = None


@dataclass(slots=True)
class _Telling:
    """A batch while its events are read."""

    run_id: str
    batch: int
    began: float
    wall: float | None
    calls: int = 0
    last: float = 0.0
    finished: bool = False
    told: dict[int, _Told] = field(default_factory=dict)


def stories(events: Iterable[Event]) -> list[Story]:
    """Put the events of one or many batches together, each batch apart, in the order in which they began.

    Events of several batches may be mixed. A batch whose beginning is missing is told from the first event that was
    seen of it; a call whose end is missing is told as still running or still waiting.

    Args:
        events: in the order in which they were delivered.
    """
    tellings: list[_Telling] = []
    current: dict[tuple[str, int], _Telling] = {}
    for event in events:
        key = (event.run_id, event.batch)
        telling = current.get(key)
        # Run ids may come again in one file: a second beginning is another batch.
        if telling is None or event.kind == "batch_started":
            telling = _Telling(event.run_id, event.batch, event.time, event.wall)
            current[key] = telling
            tellings.append(telling)
        _take(telling, event)
    return [_story(telling) for telling in tellings]


def _take(telling: _Telling, event: Event) -> None:
    at = max(0.0, event.time - telling.began)
    # What outlives its batch must not make a batch look longer for calls whose end was lost.
    if not telling.finished:
        telling.last = max(telling.last, at)
    if event.kind == "batch_started":
        telling.calls = event.size or 0
    elif event.kind == "batch_finished":
        telling.finished = True
    if event.index is None:
        return
    call = telling.told.setdefault(event.index, _Told())
    call.tool = event.tool or call.tool
    if event.waited is not None and not (call.attempts and event.kind == "finished"):  # which tells of all together
        call.waited = event.waited
    if event.tokens is not None:
        call.tokens = event.tokens
    if event.kind == "waiting":
        # Behind a call of its own batch a call waits in the plan: it is not in the queue yet.
        if call.queued is None and not (event.waiting_for or "").startswith("call "):
            call.queued = at
        if event.waiting_for and event.waiting_for not in call.waited_for:
            call.waited_for = (*call.waited_for, event.waiting_for)
    elif event.kind == "started":
        call.started = at
    elif event.kind == "retrying":
        call.attempt_ends(at)
    elif event.kind in ("finished", "rejected"):
        call.outcome, call.code, call.sealed = event.outcome or "rejected", event.code, at
        call.shared_with = event.shared_with
        if event.waited_for is not None:
            call.waited_for = event.waited_for
    elif event.kind == "orphaned":
        call.orphan = True
    elif event.kind == "ended":
        call.ended = at


def _story(telling: _Telling) -> Story:
    spans = tuple(_span(index, call, telling.last) for index, call in sorted(telling.told.items()))
    calls = max(telling.calls, len(spans))
    return Story(telling.run_id, telling.batch, telling.wall, calls, spans, telling.finished)


def _span(index: int, call: _Told, last: float) -> Span:
    sealed = last if call.outcome is None else call.sealed
    queued, started = call.handed_in(sealed), call.started
    if call.attempts:
        call.attempt_ends(sealed)
        queued, started, _ = call.attempts[0]
    return Span(
        index,
        call.tool,
        call.outcome or "pending",
        call.code,
        queued,
        started,
        sealed,
        call.ended,
        call.waited_for,
        call.ended is None and (call.orphan or call.outcome is None),
        call.shared_with,
        call.tokens,
        tuple(call.attempts),
    )
