"""The timeline as SVG: a row for each call, and above many rows how many calls did what over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
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
    finite,
    headline,
    is_open,
    stretches,
    unit_for,
)
from towerman.timeline.svg import document, head_width, safe, short, text, wide
from towerman.trace import Span

MOST_ROWS: Final = 200
"""Most calls that have a row: more can be read by nobody."""

_MARGIN: Final = 24
_ROW: Final = 22
_AXIS: Final = 520  # width of the axis
_GAP: Final = 18  # between columns
_CROWD: Final = 40  # from so many calls on there is a sum over all of them
_SUM: Final = 84  # its height
_BINS: Final = 260  # its columns
_SHARES: Final = (0.4, 0.3, 0.3)  # of the rows: not ok, waited longest, ran longest

_STYLE: Final = (
    ".band{fill:#f4f6f8}.grid{stroke:#dfe4ea;stroke-width:1}.rule{stroke:#8a95a3;stroke-width:1}.running{fill:#0b6bb3}"
    ".failed{fill:#c8501b}.held{fill:url(#tm-held)}.waiting{fill:url(#tm-waiting);stroke:#b07800}"
    ".after{fill:url(#tm-after);stroke:#8f4a80}.resting{stroke:#8a95a3;stroke-width:2;stroke-dasharray:5 3}"
    ".line{stroke:#8a95a3;stroke-width:3;stroke-dasharray:0 7;stroke-linecap:round}"
    ".dot{fill:#8a95a3}.slant{stroke:#b07800;stroke-width:2.4}.cross{stroke:#8f4a80;stroke-width:1.2}"
    ".pale{fill:#fff6e0}.paler{fill:#f8eaf4}.mark{fill:none;stroke-width:1.7;stroke-linecap:round}"
    ".good{stroke:#1b7f4b}.bad{stroke:#b3261e}.mild{stroke:#8a6100}.gone{stroke:#8a95a3;stroke-dasharray:1 4}"
    ".diamond{fill:#5a6572}"
)
_DARK: Final = (
    ".band{fill:#1b2128}.grid{stroke:#2d363f}.rule{stroke:#7d8997}.running{fill:#5fb0ee}.failed{fill:#f08a54}"
    ".waiting{stroke:#e5b04a}.after{stroke:#dd9bd0}.resting,.line{stroke:#7d8997}.dot{fill:#8e9aa8}.slant{stroke:#e5b04a}"
    ".cross{stroke:#dd9bd0}.pale{fill:#2e2614}.paler{fill:#2e1d2a}.good{stroke:#62cf97}.bad{stroke:#ff9a92}"
    ".mild{stroke:#e5b04a}.gone{stroke:#7d8997}.diamond{fill:#a3afbc}"
)
# What tells stretches apart without colours: dots, slanted lines, nothing, crossed lines.
_DEFS: Final = (
    '<pattern id="tm-held" width="7" height="7" patternUnits="userSpaceOnUse">'
    '<circle class="dot" cx="3.5" cy="3.5" r="1.3"/></pattern>'
    '<pattern id="tm-waiting" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="pale" width="7" height="7"/><path class="slant" d="M2 0V7"/></pattern>'
    '<pattern id="tm-after" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="paler" width="6" height="6"/><path class="cross" d="M0 3H6M3 0V6"/></pattern>'
)
_CLASSES: Final = {HELD: "held", WAITING: "waiting", RUNNING: "running", AFTER: "after"}
_MARKS: Final[dict[str, tuple[str, str]]] = {
    "ok": ("good", "M1 6.5L4.5 10L11 2.5"),
    "error": ("bad", "M2 2L10 10M10 2L2 10"),
    "rejected": ("bad", "M6 1A5 5 0 1 0 6 11A5 5 0 1 0 6 1M3.2 6H8.8"),
    "skipped": ("mild", "M2 2L6 6L2 10M6.5 2L10.5 6L6.5 10"),
    "cancelled": ("mild", "M2 2H10V10H2Z"),
    "timed_out": ("bad", "M6 1A5 5 0 1 0 6 11A5 5 0 1 0 6 1M6 3.5V6L8 7.5"),
    "pending": ("mild", "M1.5 6H1.6M6 6H6.1M10.4 6H10.5"),
}
_ABOUT: Final = (
    "One row for each call in emitted order, on one axis of time: dots where it was held behind a call of its batch, "
    "slanted lines where it waited in the queue, plain where it ran, crossed lines where work outlived its result. "
    "Beside it stand how it ended, how long it waited and ran, and what it waited for."
)


def draw_svg(spans: Sequence[Span], *, max_rows: int = MOST_ROWS) -> str:
    """Draw the calls of one batch as a picture that stands alone and follows light and dark pages.

    Args:
        spans: the calls of the batch; they are drawn in emitted order.
        max_rows: give at most so many calls a row: of more, the first that did not end ok and those that waited or
            ran longest, and say so. Above the rows of a large batch stands how many of all its calls were
            held, waited and ran at each time.

    Returns:
        An SVG document.
    """
    ordered = sorted(spans, key=lambda span: span.index)
    sealed = max((finite(span.sealed) for span in ordered), default=0.0)
    horizon = max([sealed, *(finite(span.ended or 0.0) for span in ordered)])
    if horizon < 1e-9:  # no clock tells less: everything happened at once
        horizon = 0.0
    unit = unit_for(horizon)
    title = headline(ordered, sealed, unit, unit.name) if ordered else "No calls."
    shown = _chosen(ordered, max(max_rows, 1))
    sheet = _Sheet(shown, horizon, unit)
    y = 62.0
    body = [text(_MARGIN, 34, title, "head")]
    if len(shown) < len(ordered):
        body.append(text(_MARGIN, 54, _left_out(len(shown), len(ordered)), "soft"))
        y += 22
    if len(ordered) > _CROWD:
        body += sheet.sum(ordered, y)
        y += _SUM + 44
    if ordered:
        rows, y = sheet.rows(y)
        body += rows
        legend, y = sheet.legend(y + 26)
        body += legend
    width = max(sheet.width, 2 * _MARGIN + ceil(head_width(title)))
    return document(width, ceil(y + _MARGIN), title, _ABOUT, _STYLE, _DARK, _DEFS, body)


def _left_out(shown: int, size: int) -> str:
    return (
        f"{shown:,} of {size:,} calls have a row: the first that did not end ok, and those that waited or ran longest. "
        "A dotted line stands for those between."
    )


def _chosen(ordered: Sequence[Span], most: int) -> list[Span]:
    """The calls that have a row: all, or those that tell most, in emitted order."""
    if len(ordered) <= most:
        return list(ordered)
    waits, runs = ({span.index: _length(span, running) for span in ordered} for running in (False, True))
    orders = (
        [span for span in ordered if span.outcome != "ok"],
        sorted(ordered, key=lambda span: (-waits[span.index], span.index)),
        sorted(ordered, key=lambda span: (-runs[span.index], span.index)),
    )
    chosen: dict[int, Span] = {}
    reach = 0.0
    for share, order in zip(_SHARES, orders, strict=True):
        reach += share * most
        for span in order:
            if len(chosen) >= round(reach):
                break
            chosen[span.index] = span
    return [chosen[index] for index in sorted(chosen)]


def _length(span: Span, running: bool) -> float:
    return finite(sum(end - start for kind, start, end in stretches(span) if (kind == RUNNING) == running))


class _Sheet:
    """Where everything stands.

    Args:
        shown: the calls that have a row.
        horizon: seconds on the axis.
        unit: of the times.
    """

    def __init__(self, shown: Sequence[Span], horizon: float, unit: Unit) -> None:
        self.shown = shown
        self.horizon = horizon
        self.unit = unit
        self.used: set[int] = set()
        self.failed = False  # one that ran did not end ok
        self.tool_room = min(190.0, max([60.0, *(wide(span.tool, 13.4) for span in shown)]))
        status_room = min(170.0, max([50.0, *(wide(measures.status(span), 13.4) for span in shown)]))
        numbers = [measures.waited(span, unit) for span in shown] + [measures.ran(span, unit) for span in shown]
        number_room = max([30.0, *map(wide, numbers)])
        self.behind = ["" if not span.waited_for else ", ".join(measures.blockers(span)) for span in shown]
        self.behind_room = min(230.0, max(map(wide, self.behind), default=0.0))
        self.index_end = _MARGIN + max([14.0, *(wide(str(span.index)) for span in shown)])
        self.tool = self.index_end + 10
        self.mark = self.tool + self.tool_room + _GAP
        self.status = self.mark + 18
        self.status_room = status_room
        self.axis = round(self.status + status_room + _GAP)
        self.waited_end = self.axis + _AXIS + 2 * _GAP + number_room
        self.ran_end = self.waited_end + _GAP + number_room
        self.blocked = self.ran_end + _GAP
        end = self.blocked + max(self.behind_room, 70.0) if self.behind_room else self.ran_end
        self.width = ceil(end + _MARGIN)

    def at(self, seconds: float) -> float:
        """Where an instant is on the axis."""
        share = min(1.0, finite(seconds) / self.horizon) if self.horizon > 0 else 0.0
        return round(self.axis + share * _AXIS, 1)

    def ticks(self, top: float, bottom: float) -> list[str]:
        """The axis: its labels above `top`, and a line at each down to `bottom`."""
        whole = self.horizon * self.unit.per_second
        steps = [(0.0, f"0 {self.unit.name}")]
        if whole > 0:
            step, decimals = measures.step_for(whole, _AXIS, 56, 14, 7.5)
            steps += [
                (count * step / whole, measures.number(count * step, decimals))
                for count in range(1, int(whole / step + 1e-9) + 1)
            ]
        parts = []
        for share, label in steps:
            x = round(self.axis + share * _AXIS, 1)
            parts.append(f'<path class="grid" d="M{x:g} {top:g}V{bottom:g}"/>')
            parts.append(text(x - 2, top - 6, label, "soft num"))
        parts.append(f'<path class="rule" d="M{self.axis} {top:g}H{self.axis + _AXIS}"/>')
        return parts

    def sum(self, ordered: Sequence[Span], top: float) -> list[str]:
        """How many of all calls ran, waited and were held at each time, one upon the other."""
        top += 14
        bottom = top + _SUM
        levels: dict[int, list[int]] = {}
        for kind in (RUNNING, AFTER, WAITING, HELD):
            steps = [0] * (_BINS + 1)
            for span in ordered:
                for what, start, end in (*stretches(span), *_tail(span, self.horizon)):
                    if what == kind and end > start:
                        steps[self._bin(start)] += 1
                        steps[self._bin(end)] -= 1
            levels[kind] = list(accumulate(steps))[:_BINS]
        most = max(map(sum, zip(*levels.values(), strict=True))) or 1
        parts = [
            text(_MARGIN, top + 12, "all calls", "strong"),
            text(_MARGIN, top + 30, f"up to {measures.calls_of(most)} at a time", "soft"),
            *self.ticks(top, bottom),
        ]
        base = [0] * _BINS
        for kind, level in levels.items():
            if not any(level):
                continue
            self.used.add(kind)
            upper = [one + other for one, other in zip(base, level, strict=True)]
            parts.append(f'<path class="{_CLASSES[kind]}" stroke="none" d="{self._area(base, upper, most, bottom)}"/>')
            base = upper
        parts.append(f'<path class="rule" d="M{self.axis} {bottom:g}H{self.axis + _AXIS}"/>')
        return parts

    def _bin(self, seconds: float) -> int:
        return min(_BINS, int(finite(seconds) / self.horizon * _BINS)) if self.horizon > 0 else 0

    def _area(self, base: Sequence[int], upper: Sequence[int], most: int, bottom: float) -> str:
        def line(levels: Sequence[int], order: Sequence[int]) -> list[str]:
            points = []
            for place in order:
                y = round(bottom - levels[place] / most * _SUM, 1)
                sides = (place, place + 1) if order[0] < order[-1] else (place + 1, place)
                points += [f"{round(self.axis + side * _AXIS / _BINS, 1):g} {y:g}" for side in sides]
            return points

        bins = range(_BINS)
        return "M" + "L".join([*line(upper, bins), *line(base, bins[::-1])]) + "Z"

    def rows(self, top: float) -> tuple[list[str], float]:
        """Headings, axis and a row for each call; and where they end."""
        top += 14
        bottom = top + _ROW * len(self.shown) + 4
        head = top - 6
        bands, rows = [], []
        for number, (span, behind) in enumerate(zip(self.shown, self.behind, strict=True)):
            y = top + 4 + _ROW * number
            if number % 2:
                bands.append(
                    f'<rect class="band" x="{_MARGIN - 8}" y="{y:g}" width="{self.width - 2 * _MARGIN + 16}" '
                    f'height="{_ROW}"/>'
                )
            if number and span.index > self.shown[number - 1].index + 1:
                bands.append(f'<path class="gone" d="M{_MARGIN} {y:g}H{self.width - _MARGIN}"/>')
            rows.append(self._row(span, behind, y))
        parts = [
            *bands,
            text(self.index_end, head, "#", "soft", end=True),
            text(self.tool, head, "tool", "soft"),
            text(self.mark, head, "status", "soft"),
            text(self.waited_end, head, "wait", "soft", end=True),
            text(self.ran_end, head, "ran", "soft", end=True),
            *self.ticks(top, bottom),
            *rows,
        ]
        if self.behind_room:
            parts.append(text(self.blocked, head, "waited for", "soft"))
        return parts, bottom

    def _row(self, span: Span, behind: str, y: float) -> str:
        base = y + 15.5
        kind, mark = _MARKS[span.outcome]
        told = measures.status(span)
        parts = [
            f"<g><title>{safe(self._told(span))}</title>",
            f'<rect fill="none" pointer-events="all" x="{_MARGIN}" y="{y:g}" '
            f'width="{self.width - 2 * _MARGIN}" height="{_ROW}"/>',
            text(self.index_end, base, str(span.index), "soft num", end=True),
            short(self.tool, base, span.tool, "", self.tool_room + 2),
            f'<path class="mark {kind}" transform="translate({self.mark:g} {y + 5:g})" d="{mark}"/>',
            short(self.status, base, told, "code" if kind == "bad" else "soft", self.status_room + 2),
            *self._bar(span, y + 5),
            text(self.waited_end, base, measures.waited(span, self.unit), "num", end=True),
            text(self.ran_end, base, measures.ran(span, self.unit), "num", end=True),
        ]
        if behind:
            parts.append(short(self.blocked, base, behind, "soft", self.behind_room + 2))
        return "".join([*parts, "</g>"])

    def _bar(self, span: Span, y: float) -> list[str]:
        parts = []
        for kind, start, end in (*stretches(span), *_tail(span, self.horizon)):
            left, right = self.at(start), self.at(end)
            if right <= left and kind != RUNNING:
                continue
            self.used.add(kind)
            if kind in (RESTING, HELD):
                name, inset = ("resting", 0.0) if kind == RESTING else ("line", 3.0)
                parts.append(f'<path class="{name}" d="M{left + inset:g} {y + 6:g}H{max(right, left + inset):g}"/>')
                continue
            long = max(right - left, 2.0)  # what ran at all can be seen
            inset, name = 0.5 if kind in (WAITING, AFTER) else 0.0, _CLASSES[kind]
            if kind == RUNNING and not is_open(span) and span.outcome != "ok":
                name, self.failed = "failed", True
            parts.append(
                f'<rect class="{name}" x="{left + inset:g}" y="{y + inset:g}" width="{max(long - 2 * inset, 1):g}" '
                f'height="{12 - 2 * inset:g}" rx="1.5"/>'
            )
        x = self.at(span.sealed)
        if span.started is None:
            sign = GOES_ON if is_open(span) else NOT_RUN if span.shared_with is None else SHARED
            self.used.add(sign)
            # At the very start of the axis half a sign would stand outside.
            x = min(max(x, self.axis + 6), self.axis + _AXIS - 6)
            parts.append(_sign(sign, x, y + 6))
        elif span.still_running and span.ended is None:
            self.used.add(GOES_ON)
            parts.append(_sign(GOES_ON, float(self.axis + _AXIS) + 5, y + 6))
        return parts

    def _told(self, span: Span) -> str:
        unit = self.unit
        told = f"call {span.index}, {span.tool}: {measures.status(span)}"
        if span.shared_with is not None:
            told += f"; answered by the run of call {span.shared_with}"
        if waited := measures.waited(span, unit):
            told += f"; waited in the queue for {waited} {unit.name}"
        if ran := measures.ran(span, unit):
            told += f"; ran for {ran} {unit.name}"
        if len(span.attempts) > 1:
            told += f" in {len(span.attempts)} attempts"
        if span.ended is not None:
            told += f"; at work until {unit.text(finite(span.ended))} {unit.name}"
        elif span.still_running and not is_open(span):
            told += "; still at work"
        if span.waited_for:
            told += f"; waited for {', '.join(span.waited_for)}"
        if span.tokens is not None:
            told += f"; about {measures.tokens_of(span.tokens)}"
        return told

    def legend(self, y: float) -> tuple[list[str], float]:
        """What the patterns and signs of this drawing mean, and where that ends."""
        parts: list[str] = []
        x = float(_MARGIN)
        entries: list[tuple[int, str, str]] = []
        for kind, words in LEGEND.items():
            if kind in self.used:
                entries.append((kind, _CLASSES.get(kind, ""), words))
                if kind == RUNNING and self.failed:
                    entries.append((kind, "failed", "running, and it did not end ok"))
        for kind, name, words in entries:
            room = 42 + wide(words)
            if x > _MARGIN and x + room > self.width - _MARGIN:
                x, y = float(_MARGIN), y + 22
            if kind == HELD:
                parts.append(f'<path class="line" d="M{x + 3:g} {y - 4:g}h21"/>')
            elif name:
                parts.append(f'<rect class="{name}" x="{x:g}" y="{y - 10:g}" width="24" height="12" rx="1.5"/>')
            elif kind == RESTING:
                parts.append(f'<path class="resting" d="M{x:g} {y - 4:g}h24"/>')
            else:
                parts.append(_sign(kind, x + 12, y - 4))
            parts.append(text(x + 31, y, words, "soft"))
            x += room + 8
        note = f"wait (in the queue) and ran are in {self.unit.name}"
        if x > _MARGIN and x + wide(note) > self.width - _MARGIN:
            x, y = float(_MARGIN), y + 22
        parts.append(text(x, y, note, "soft"))
        return parts, y


def _tail(span: Span, horizon: float) -> list[tuple[int, float, float]]:
    """The work of a call after its result, where there was any."""
    if span.started is None:
        return []
    if span.ended is not None:
        return [(AFTER, span.sealed, span.ended)]
    if span.still_running:
        return [(RUNNING if is_open(span) else AFTER, span.sealed, horizon)]
    return []


def _sign(kind: int, x: float, y: float) -> str:
    if kind == SHARED:
        return f'<path class="diamond" d="M{x:g} {y - 5:g}l5 5l-5 5l-5 -5Z"/>'
    if kind == GOES_ON:
        return f'<path class="mark mild" d="M{x - 5:g} {y:g}h9m-4 -4l4 4l-4 4"/>'
    return f'<path class="mark bad" d="M{x - 4:g} {y - 4:g}l8 8m0 -8l-8 8"/>'
