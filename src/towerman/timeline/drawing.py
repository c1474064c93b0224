"""The timeline as text: a row of signs for each call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from towerman.timeline import measures
from towerman.timeline.measures import (
    AFTER,
    GOES_ON,
    HELD,
    LEGEND,
    NOT_RUN,
    RESTING,
    RUNNING,
    SHARED,
    WAITING,
    Unit,
    count_of,
    finite,
    headline,
    is_open,
    stretches,
    unit_for,
)
from towerman.timeline.words import columns, fit, printable
from towerman.trace import Span

LEAST_WIDTH: Final = 24
"""Narrower than this is drawn as this."""

_SIGNS: Final[dict[int, tuple[str, str]]] = {
    0: (" ", " "),
    HELD: ("·", "."),
    WAITING: ("░", "-"),
    RUNNING: ("█", "#"),
    AFTER: ("▒", "="),
    NOT_RUN: ("×", "x"),  # noqa: RUF001 - it is a cross, and meant
    GOES_ON: ("→", ">"),
    SHARED: ("◆", "*"),
    RESTING: ("╌", "~"),
}
_STRETCH_COLOR: Final[dict[int, str]] = {
    HELD: "2",
    WAITING: "33",
    AFTER: "35",
    NOT_RUN: "31",
    GOES_ON: "35",
    RESTING: "2",
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


def _bar(span: Span, width: int, horizon: float) -> list[int]:
    """What stands in each column of the axis."""

    def column(seconds: float) -> int:
        return min(width - 1, int(min(1.0, finite(seconds) / horizon) * width)) if horizon > 0 else 0

    cells = [0] * width

    def fill(start: float, end: float, sign: int) -> None:
        for place in range(column(start), column(end)):
            cells[place] = sign

    first = 0
    for kind, start, end in stretches(span):
        if kind != RUNNING:
            fill(start, end, kind)
            continue
        first = column(start)
        # A seal on a column's edge belongs to the column before it; what ran at all takes one column at least.
        reach = math.ceil(finite(end) / horizon * width) if horizon > 0 else 1
        for place in range(first, max(first + 1, min(reach, width))):
            cells[place] = RUNNING
    seal = column(span.sealed)
    if span.started is None:
        cells[seal] = GOES_ON if is_open(span) else NOT_RUN if span.shared_with is None else SHARED
        return cells
    if span.ended is not None:
        for place in range(max(seal, first + 1), column(span.ended) + 1):
            cells[place] = AFTER
    elif span.still_running:
        for place in range(max(seal, first + 1), width):
            cells[place] = RUNNING if is_open(span) else AFTER
        cells[width - 1] = GOES_ON
    return cells


def _ticks(width: int, horizon: float, unit: Unit, ascii_only: bool) -> tuple[str, str]:
    """The labels of the axis and the ruler below them."""
    name = "us" if ascii_only and unit.name == "µs" else unit.name
    whole = horizon * unit.per_second
    corner, dash = ("+", "-") if ascii_only else ("┬", "─")
    if whole <= 0:
        return fit(f"0 {name}", width, ascii_only=ascii_only), corner + dash * (width - 1)
    step, decimals = measures.step_for(whole, width, 5, 2)
    labels = [" "] * width
    ruler = [dash] * width
    for number in range(int(whole / step) + 1):
        place = int(number * step / whole * width)
        label = f"0 {name}" if number == 0 else measures.number(number * step, decimals)
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
    least_bar = 24 if width >= 90 else 16 if width >= 70 else 10
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
    between = len(fixed) + sum(1 for text in texts if text)
    gap = 2 if width >= 90 else 1
    if sum(texts) > width - sum(fixed) - gap * between - least_bar:
        gap = 1  # a blank less between columns is no loss, a word cut short is
    gaps = gap * between
    room = width - sum(fixed) - gaps - least_bar
    while sum(texts) > room and max(texts) > 4:
        texts[texts.index(max(texts))] -= 1
    bar = max(1, width - sum(fixed) - gaps - sum(texts))
    return _Layout(gap, index, texts[0], texts[1], waited, ran, tokens, texts[2], bar)


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
    sealed = max(finite(span.sealed) for span in ordered)
    horizon = max(sealed, max(finite(span.ended or 0.0) for span in ordered))
    if horizon < 1e-9:  # no clock tells less: everything happened at once
        horizon = 0.0
    unit = unit_for(horizon)
    name = "us" if ascii_only and unit.name == "µs" else unit.name

    tools = [printable(span.tool, ascii_only=ascii_only) for span in shown]
    states = [printable(measures.status(span), ascii_only=ascii_only) for span in shown]
    blockers = [printable(", ".join(measures.blockers(span)), ascii_only=ascii_only) for span in shown]
    waits = [measures.waited(span, unit) for span in shown]
    runs = [measures.ran(span, unit) for span in shown]
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
    head = headline(ordered, sealed, unit, name)
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
        note = f"... and {left:,} more: {count_of(ordered[len(shown) :])}"
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
            sgr = running if cells[start] == RUNNING else _STRETCH_COLOR.get(cells[start])
            out.append(f"\x1b[{sgr}m{text}\x1b[0m" if color and sgr else text)
            start = end
    return "".join(out)


def _legend(bars: Sequence[Sequence[int]], width: int, ascii_only: bool, unit: str | None) -> list[str]:
    """What the signs of this drawing mean, on as many lines as it takes."""
    used = {sign for bar in bars for sign in bar}
    parts = [f"{_SIGNS[sign][ascii_only]} {text}" for sign, text in LEGEND.items() if sign in used]
    if unit is not None:
        parts.append(f"wait (in the queue), ran: in {unit}")
    lines = [""]
    for part in parts:
        if lines[-1] and columns(lines[-1]) + 3 + columns(part) > width:
            lines.append("")
        lines[-1] += part if not lines[-1] else "   " + part
    return [fit(line, width, ascii_only=ascii_only).rstrip() for line in lines]
