"""What both drawings say of a call, and in which unit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from towerman.calls import Outcome
from towerman.trace import Span

_OUTCOMES: Final[tuple[str, ...]] = get_args(Outcome)


# The stretches of a bar; 0 is empty.
HELD: Final = 1
WAITING: Final = 2
RUNNING: Final = 3
AFTER: Final = 4
NOT_RUN: Final = 5
GOES_ON: Final = 6
SHARED: Final = 7
RESTING: Final = 8

LEGEND: Final[dict[int, str]] = {
    HELD: "held behind a call of this batch",
    WAITING: "waiting in the queue",
    RUNNING: "running",
    AFTER: "at work after its result",
    NOT_RUN: "did not run",
    SHARED: "answered by another call's run",
    RESTING: "resting before another attempt",
    GOES_ON: "no end seen",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """How lengths of time are written in one drawing."""

    name: str
    per_second: float
    decimals: int

    def text(self, seconds: float) -> str:
        return number(seconds * self.per_second, self.decimals)


def number(value: float, decimals: int) -> str:
    """A plain number, or a short one where the plain one would fill the line."""
    return f"{value:.{decimals}f}" if value < 1e7 else f"{value:.3g}"


def unit_for(seconds: float) -> Unit:
    """The unit for a drawing that covers so many seconds."""
    if seconds >= 1:
        return Unit("s", 1.0, 2 if seconds < 100 else 1 if seconds < 1000 else 0)
    if seconds >= 1e-3:
        return Unit("ms", 1e3, 1 if seconds < 0.01 else 0)
    return Unit("µs", 1e6, 0)


def finite(seconds: float) -> float:
    """Times before the batch, or no times at all, are drawn at its start; later than any clock is cut."""
    return min(seconds, 1e15) if 0 <= seconds < math.inf else 0.0


def tries(span: Span) -> Sequence[tuple[float | None, float | None, float]]:
    """For each attempt when it was handed in, started and ended; of most calls there is one."""
    return span.attempts or ((span.queued, span.started, span.sealed),)


def waited(span: Span, unit: Unit) -> str:
    """How long it was in the queue, all attempts together; empty where it was not."""
    if span.queued is None:
        return ""
    waits = [
        max(0.0, finite(end if started is None else started) - finite(queued))
        for queued, started, end in tries(span)
        if queued is not None
    ]
    return unit.text(sum(waits))


def ran(span: Span, unit: Unit) -> str:
    """How long it ran until its result, all attempts together; empty where it did not."""
    if span.started is None:
        return ""
    runs = [finite(end) - finite(started) for _, started, end in tries(span) if started is not None]
    return unit.text(sum(max(0.0, run) for run in runs))


def is_open(span: Span) -> bool:
    """No result was seen. (A call that waits for a decision always has a code.)"""
    return span.outcome == "pending" and span.code is None


def status(span: Span) -> str:
    """Its code, or its outcome where there is none."""
    return "no result" if is_open(span) else span.code or span.outcome


def blockers(span: Span) -> list[str]:
    """What it waited for, first to last, as short as it is clear beside the name of its tool."""
    own = {f"{what} of tool {span.tool}": f"own {what}" for what in ("limit", "rate")}
    return [own.get(name, name).removeprefix("resource ") for name in span.waited_for]


def stretches(span: Span) -> list[tuple[int, float, float]]:
    """What a call did until its result: (stretch, start, end), one after the other."""
    found: list[tuple[int, float, float]] = []
    if span.waited_for:  # else what is empty before it is only the time that the batch took to get there
        first = span.sealed if span.started is None else span.started
        found.append((HELD, 0.0, first if span.queued is None else span.queued))
    rests_since = None
    for queued, started, end in tries(span):
        if rests_since is not None and queued is not None:
            found.append((RESTING, rests_since, queued))
        if queued is not None:
            found.append((WAITING, queued, end if started is None else started))
        if started is not None:
            found.append((RUNNING, started, end))
        rests_since = end
    if span.attempts and rests_since is not None and rests_since < span.sealed:
        found.append((RESTING, rests_since, span.sealed))
    return found


def step_for(whole: float, width: float, least: float, blank: float, per_digit: float = 1.0) -> tuple[float, int]:
    """The smallest step of 1, 2 or 5 times a power of ten whose labels do not touch, and the decimals that it needs.

    Args:
        whole: the length of the axis in its unit, more than 0.
        width: its width on the page.
        least: the least distance between two labels there.
        blank: the least room between them.
        per_digit: the width of a digit.
    """
    step = 10.0 ** math.floor(math.log10(whole / width))
    for attempt in range(60):  # pragma: no branch - a step as long as the axis always fits
        candidate = step * 10.0 ** (attempt // 3) * (1.0, 2.0, 5.0)[attempt % 3]
        decimals = max(0, -math.floor(math.log10(candidate) + 1e-9))
        room = max(least, len(number(whole, decimals)) * per_digit + blank)
        if candidate / whole * width >= room or candidate > whole:
            break
    return candidate, decimals


def count_of(spans: Sequence[Span]) -> str:
    """`3 ok, 1 error`."""
    seen = Counter("without a result" if is_open(span) else span.outcome for span in spans)
    return ", ".join(f"{seen[name]:,} {name}" for name in (*_OUTCOMES, "without a result") if seen[name])


def tokens_of(number: int) -> str:
    """`1 token`, `2 tokens`."""
    return "1 token" if number == 1 else f"{number:,} tokens"


def calls_of(number: int) -> str:
    """`1 call`, `2 calls`."""
    return "1 call" if number == 1 else f"{number:,} calls"


def headline(spans: Sequence[Span], sealed: float, unit: Unit, name: str) -> str:
    """The whole batch in one line.

    Args:
        spans: all its calls.
        sealed: when the last result was.
        unit: in which that is told.
        name: of that unit, as it can be written.
    """
    still = sum(1 for span in spans if span.still_running and not is_open(span))
    head = f"{calls_of(len(spans))} in {unit.text(sealed)} {name}: {count_of(spans)}"
    counted = [span.tokens for span in spans if span.tokens is not None]
    if counted:
        head += f"; about {tokens_of(sum(counted))}"
    if still:
        head += f"; {still:,} still at work"
    return head
