"""An explanation as SVG: groups are columns, calls are cards, edges are arrows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil
from typing import Final

from towerman.explain.choosing import Chosen
from towerman.explain.layout import Box, Layout, Link, Measures, Stroke, arrange
from towerman.explain.parts import DeferredCall, Edge, EdgeKind, Limit, PlannedCall, RateInForce, RefusedCall
from towerman.explain.telling import (
    AT_FAULT,
    INDEPENDENT,
    about,
    counted,
    headline,
    limits_told,
    listed,
    on_path,
    pools,
    rates_told,
    stand_of,
    standing,
    waits,
)
from towerman.timeline.svg import document, head_width, safe, short, text, wide

MAX_ROWS: Final = 60
"""Most refused calls that are listed below the columns."""

_COMPACT: Final = 60  # with more cards than this each has one line only, and the rest shows when one points at it
_AROUND: Final = 40  # most arrows that lead back

_MARGIN: Final = 28
_LINE: Final = 17  # of text in a card
_SHIFT: Final[dict[EdgeKind, float]] = {"needs": -6, "resource": 0, "order": 6, "pool": 6, "rate": 6}

_LEGEND: Final[dict[EdgeKind, str]] = {
    "needs": "needs the result",
    "resource": "after: same resource",
    "order": "after: order of the run",
    "pool": "waits for a place",
    "rate": "waits for a rate",
}

_STYLE: Final = (
    ".card{fill:#f6f7f9;stroke:#d3d8df}.chain{stroke:#1a2027;stroke-width:2}.bad{fill:#fdf1f0;stroke:#b3261e}"
    ".fault{stroke-width:2.5}.more{fill:none;stroke:#8a95a3;stroke-dasharray:3 3}.arrow{fill:none;stroke-width:1.5}"
    ".needs{stroke:#2f6fde}.resource{stroke:#b25a00;stroke-dasharray:7 4}.order{stroke:#7a4fc0;stroke-dasharray:7 4}"
    ".pool,.rate{stroke:#0b7a6c;stroke-dasharray:1 4.5;stroke-linecap:round;stroke-width:2}.critical{stroke-width:3.2}"
    ".implied{opacity:.25}.circle{stroke:#b3261e}.tshared,.tpool,.trate{fill:#0b7a6c}.tshared{font-style:italic}"
    ".tneeds{fill:#2f6fde}.tresource{fill:#b25a00}.torder{fill:#7a4fc0}.tcircle{fill:#b3261e}.tasks{fill:#7a4fc0}"
)
_DARK: Final = (
    ".card{fill:#1f262e;stroke:#3a444f}.chain{stroke:#e8ecf0}.bad{fill:#2e1f1f;stroke:#ff9a92}.more{stroke:#7d8997}"
    ".needs{stroke:#7fb0ff}.resource{stroke:#f0a958}.order{stroke:#c2a2f5}.pool,.rate{stroke:#5cd0bf}"
    ".circle{stroke:#ff9a92}.tshared,.tpool,.trate{fill:#5cd0bf}.tneeds{fill:#7fb0ff}.tresource{fill:#f0a958}"
    ".torder,.tasks{fill:#c2a2f5}.tcircle{fill:#ff9a92}"
)
_STANDS: Final = (  # of a batch that was begun before
    ".is-done{stroke:#2e7d4f}.is-bad{stroke:#b3261e}.is-work{stroke:#2f6fde;stroke-dasharray:5 3}.tdone{fill:#2e7d4f}"
    ".tbad{fill:#b3261e}.twork{fill:#2f6fde}"
)
_STANDS_DARK: Final = (
    ".is-done{stroke:#6fce97}.is-bad{stroke:#ff9a92}.is-work{stroke:#7fb0ff}.tdone{fill:#6fce97}.tbad{fill:#ff9a92}"
    ".twork{fill:#7fb0ff}"
)
_COLOURS: Final = {
    "done": "done", "settled": "done", "failed": "bad", "unknown": "bad", "at work": "work", "queued": "work",
}  # fmt: skip
_ABOUT: Final = (
    "Calls are cards; a column holds those that run at the same time, and columns follow each other to the right. "
    "An arrow leads from a call to one that waits for it; its kind says why. A dot stands for a whole set of calls "
    "that another set waits for."
)
_NOTE: Final = "A group is what runs at the same time if every call lasts equally long."


def draw(
    calls: Sequence[PlannedCall],
    groups: Sequence[Sequence[int]],
    edges: Sequence[Edge],
    links: Sequence[Edge],
    refused: Sequence[RefusedCall],
    chain: Sequence[int],
    members: Sequence[int],
    limits: Sequence[Limit] = (),
    rates: Sequence[RateInForce] = (),
    seconds: float | None = None,
    deferred: Sequence[DeferredCall] = (),
) -> str:
    """The drawing, whole and well-formed; colours follow the reader's light or dark scheme.

    Args:
        calls: those that would run.
        groups: of them.
        edges: between two of them, for the words on the cards.
        links: the same edges, with junctions where many calls wait for many; and needs of calls that are refused.
        refused: those that would not.
        chain: the critical path.
        members: of a plan that is refused whole, those at fault.
        limits: that calls take permits of.
        rates: in which they count.
        seconds: of the critical path, where that is known.
        deferred: those that would go into the durable queue.
    """
    some = calls or refused or deferred
    title = headline(calls, len(groups), len(refused), chain, seconds, len(deferred)) if some else "No calls."
    what = Chosen(calls, groups, links, refused, on_path(calls, chain, seconds), members)
    stands = standing(calls)
    lasting = [*([f"State: {stands}."] if stands else []), *limits_told(limits), *rates_told(rates)]
    return _Picture(what, edges, deferred).done(title, lasting)


class _Picture:
    def __init__(self, what: Chosen, edges: Sequence[Edge], deferred: Sequence[DeferredCall]) -> None:
        self.what = what
        self.deferred = deferred
        self.compact = len(what.drawn) > _COMPACT
        self.reasons = {} if self.compact else waits(edges, details=False)

    # ---------------------------------------------------------------- the document

    def done(self, title: str, lasting: Sequence[str]) -> str:
        """The whole of it, with the limits below."""
        card, gap = (172.0, 66.0) if self.compact else (268.0, 92.0)
        lines = {index: self._lines(index) for index in self.what.drawn}
        heights = {index: 26.0 if self.compact else 32.0 + _LINE * len(lines[index]) for index in self.what.drawn}
        inner = max(len(self.what.columns), 1) * (card + gap) - gap
        width = 2 * _MARGIN + max(inner, ceil(head_width(title)), 420.0)
        legend, y = self._legend(60.0, width)
        top = y + (44.0 if self.what.groups else 24.0)
        sizes = Measures(float(_MARGIN), top, card, gap, 8.0 if self.compact else 14.0, _SHIFT)
        plain = [Link(link.before, link.after, link.kind) for link in self.what.links]
        layout = arrange(self.what.columns, heights, plain, sizes)
        critical = self.what.critical()
        body = [text(_MARGIN, 34, title, "head"), *legend]
        body += self._strokes(layout, critical)
        body += [self._junction(one, place) for one, place in sorted(layout.junctions.items())]
        around, bottom = self._around(layout)
        body += around
        ends = [top - 14.0] * len(self.what.columns)
        for number, column in enumerate(self.what.columns):
            x = _MARGIN + number * (card + gap)
            if number < len(self.what.groups):
                body.append(text(x, top - 14, f"group {number + 1}", "strong"))
                body.append(
                    text(x + 16 + wide(f"group {number + 1}"), top - 14, counted(len(self.what.groups[number])), "soft")
                )
            for index in column:
                body.append(self._card(index, layout.boxes[index], lines[index]))
                ends[number] = max(ends[number], layout.boxes[index].y + layout.boxes[index].height)
        bottom = max([bottom, *ends])
        body_more, bottom = self._mores(ends, layout, card, gap, bottom)
        body += body_more
        notes = self._notes(len(layout.left_out))
        for note in [*notes, *lasting]:
            bottom += 26 if note == [*notes, *lasting][0] else 20
            body.append(short(_MARGIN, bottom, note, "soft", width - 2 * _MARGIN))
        if self.what.refused:
            below, bottom = self._refused(bottom + 34, width)
            body += below
        if self.deferred:
            below, bottom = self._deferred(bottom + 34, width)
            body += below
        heads = "".join(_marker(kind) for kind in [*_LEGEND, "circle"])
        style, dark = _STYLE, _DARK
        if any(call.state for call in self.what.calls.values()):
            style, dark = style + _STANDS, dark + _STANDS_DARK
        return document(width, ceil(bottom + _MARGIN), title, _ABOUT, style, dark, heads, body)

    def _notes(self, left_out: int) -> list[str]:
        notes = []
        cards = len(self.what.drawn & self.what.calls.keys())
        if cards < len(self.what.calls):
            notes.append(f"{counted(len(self.what.calls) - cards)} more, not drawn.")
        if self.what.whole and len(self.what.drawn) < len(self.what.refused):
            notes.append(f"{counted(len(self.what.refused) - len(self.what.drawn))} more, not drawn.")
        missing = self.what.cut + left_out + max(0, len(self.what.back) - _AROUND)
        if missing:
            notes.append(f"{missing:,} more arrows, not drawn.")
        if self.what.dropped:
            what = "1 arrow that follows" if self.what.dropped == 1 else f"{self.what.dropped:,} arrows that follow"
            notes.append(f"{what} from others, not drawn.")
        if len(self.what.groups) > 1:
            notes.append(_NOTE)
        return notes

    def _mores(
        self, ends: Sequence[float], layout: Layout, card: float, gap: float, bottom: float
    ) -> tuple[list[str], float]:
        """Below each column that is cut, how many calls of its group have no card."""
        parts = []
        for number, left in enumerate(self.what.more):
            if not left or number >= len(ends):
                continue
            x = _MARGIN + number * (card + gap)
            lanes = [y + 10 for lane_x, y in layout.lanes if lane_x == x]
            y = max([ends[number] + 10, *lanes])
            parts.append(f'<rect class="more" x="{x:g}" y="{y:g}" width="{card:g}" height="26" rx="6"/>')
            parts.append(text(x + 12, y + 17, f"and {left:,} more", "soft"))
            bottom = max(bottom, y + 26)
        return parts, bottom

    # ---------------------------------------------------------------- cards

    def _lines(self, index: int) -> list[tuple[str, str]]:
        """The small lines of a card as (class, text): what it touches, what it takes, what it waits for."""
        if index in self.what.refused:
            one = self.what.refused[index]
            lines: list[tuple[str, str]] = [("code", one.code)]
            if index in self.what.members:
                lines.append(("tcircle", AT_FAULT.get(one.code, "at fault")))
            return lines
        call = self.what.calls[index]
        colour = _COLOURS.get(stand_of(call.state))
        lines = [(f"t{colour}" if colour else "soft", call.state)] if call.state else []
        begun = len(lines)
        lines += [("soft", touched) for touched in call.touches[:3]]
        if len(call.touches) > 3:
            lines.append(("soft", f"and {len(call.touches) - 3} more"))
        lines += [("soft", pool) for pool in pools(call)]
        if len(lines) == begun:
            lines.append(("soft", INDEPENDENT))
        if call.approval:
            lines.append(("tasks", "needs approval"))
        if call.told:
            lines.append(("tshared", call.told))
        reasons = self.reasons.get(index, ())
        for kind, reason in reasons[:4]:
            for what in ("limit", "rate"):  # the tool's name stands above
                reason = reason.replace(f"{what} of tool {call.tool} ", f"own {what} ")
            lines.append((f"t{kind}", f"after {reason}"))
        if len(reasons) > 4:
            lines.append(("soft", f"and {len(reasons) - 4} more reasons to wait"))
        return lines

    def _card(self, index: int, box: Box, lines: Sequence[tuple[str, str]]) -> str:
        call: PlannedCall | RefusedCall = (
            self.what.calls[index] if index in self.what.calls else self.what.refused[index]
        )
        name = call.tool
        kinds = "bad" if index in self.what.refused else "card"
        if index in self.what.chain:
            kinds += " chain"
        if index in self.what.members:
            kinds += " fault"
        if isinstance(call, PlannedCall) and stand_of(call.state) in _COLOURS:
            kinds += f" is-{_COLOURS[stand_of(call.state)]}"
        told = f"call {index}, {f'step {call.id}, ' if call.id else ''}{name}"
        lasts = about(call.estimate) if isinstance(call, PlannedCall) and call.estimate is not None else ""
        aside = " · ".join(part for part in (call.id, lasts) if part)
        if self.compact:
            on = "on the critical path" if index in self.what.chain else ""
            told = "; ".join(part for part in (told, *(line for _, line in lines), lasts, on) if part)
        base = box.y + (17 if self.compact else 21)
        x = box.x + (9 if self.compact else 12)
        start = x + 10 + wide(str(index))
        room = box.x + box.width - start - 8
        parts = [
            f"<g><title>{safe(told)}</title>",
            f'<rect class="{kinds}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" '
            f'rx="{5 if self.compact else 7}"/>',
            text(x, base, str(index), "strong soft num"),
        ]
        if aside and not self.compact:
            # The name comes first; what is left is for the step and the time.
            most = min(max(room - wide(name, 13.5) - 10, 62.0), wide(aside))
            parts.append(short_end(box.x + box.width - 12, base, aside, "soft", most))
            room -= most + 12
        parts.append(short(start, base, name, "strong", room, 13.5))
        if not self.compact:
            for number, (kind, line) in enumerate(lines):
                parts.append(short(x, base + _LINE * (number + 1), line, kind, box.width - 22))
        return "".join([*parts, "</g>"])

    # ---------------------------------------------------------------- arrows

    def _strokes(self, layout: Layout, critical: Collection[int]) -> list[str]:
        """From the least to the most important, so that this is never hidden by that."""
        parts = []
        for stroke in layout.strokes:
            on = any(number in critical for number in stroke.links)
            pale = all(number in self.what.implied for number in stroke.links)
            parts.append((0 if pale else 2 if on else 1, self._stroke(stroke, on, pale)))
        return [part for _, part in sorted(parts, key=lambda part: part[0])]

    def _stroke(self, stroke: Stroke, critical: bool, pale: bool) -> str:
        (x1, y1), (x2, y2) = stroke.start, stroke.end
        bend = (x2 - x1) / 2
        path = f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
        if y1 == y2:
            path = f"M{x1:g} {y1:g}H{x2:g}"
        circle = any(self.what.in_circle(self.what.links[number]) for number in stroke.links)
        kind = "circle" if circle else stroke.kind
        kinds = f"arrow {kind}{' critical' if critical or circle else ''}{' implied' if pale else ''}"
        head = f' marker-end="url(#tm-{kind})"' if stroke.arrow else ""
        told = [self._told(self.what.links[number]) for number in stroke.links[:3]]
        if len(stroke.links) > 3:
            told.append(f"and {len(stroke.links) - 3} more")
        return f'<path class="{kinds}" d="{path}"{head}><title>{safe("; ".join(told))}</title></path>'

    def _told(self, link: Edge) -> str:
        before = self.what.fed.get(link.before, [link.before])
        after = self.what.feeds.get(link.after, [link.after])
        return (
            f"call{'s' if len(after) > 1 else ''} {listed(after)} wait{'' if len(after) > 1 else 's'} for "
            f"call{'s' if len(before) > 1 else ''} {listed(before)}: {link}"
        )

    def _junction(self, junction: int, place: tuple[float, float]) -> str:
        link = next(link for link in self.what.links if link.after == junction)
        told = self._told(Edge(junction, junction, link.kind, link.why, link.detail))
        x, y = place
        return f'<circle class="t{link.kind}" cx="{x:g}" cy="{y:g}" r="4.5"><title>{safe(told)}</title></circle>'

    def _around(self, layout: Layout) -> tuple[list[str], float]:
        """The arrows that close a circle go back below all the others."""
        parts = []
        bottom = layout.bottom
        for number, link in enumerate(self.what.back[:_AROUND]):
            one, other = layout.boxes[link.before], layout.boxes[link.after]
            bottom += 18 if number == 0 else 12
            right, left = one.x + one.width, other.x - 2
            out, back = right + 14 + 3 * (number % 4), other.x - 18 - 3 * (number % 4)
            y1, y2, r = one.middle + 6, other.middle + 6, 8
            path = (
                f"M{right:g} {y1:g}H{out - r:g}Q{out:g} {y1:g} {out:g} {y1 + r:g}V{bottom - r:g}"
                f"Q{out:g} {bottom:g} {out - r:g} {bottom:g}H{back + r:g}Q{back:g} {bottom:g} {back:g} {bottom - r:g}"
                f"V{y2 + r:g}Q{back:g} {y2:g} {back + r:g} {y2:g}H{left:g}"
            )
            told = f"call {link.after} waits for call {link.before}: {link}; this closes a circle"
            kinds = f"arrow circle{' critical' if self.what.in_circle(link) else ''}"
            parts.append(
                f'<path class="{kinds}" d="{path}" marker-end="url(#tm-circle)"><title>{safe(told)}</title></path>'
            )
        return parts, bottom

    # ---------------------------------------------------------------- what stands above and below

    def _legend(self, y: float, width: float) -> tuple[list[str], float]:
        """What is drawn how, on as many lines as it takes, the first of them at `y`; and where they end."""
        kinds = {link.kind for link in self.what.links}
        entries: list[tuple[str, str]] = [(kind, words) for kind, words in _LEGEND.items() if kind in kinds]
        if self.what.back:
            entries.append(("circle", "part of a circle"))
        if self.what.feeds:
            entries.append(("junction", "many wait for many"))
        if self.what.chain:
            entries.append(("chain", "on the critical path"))
        if self.what.implied:
            entries.append(("", "pale: follows from others"))
        parts = []
        x = float(_MARGIN)
        for kind, words in entries:
            room = wide(words) + (36 if kind else 0)
            if x > _MARGIN and x + room > width - _MARGIN:
                x, y = float(_MARGIN), y + 20
            if kind == "chain":
                parts.append(f'<rect class="card chain" x="{x:g}" y="{y - 11:g}" width="24" height="14" rx="4"/>')
            elif kind == "junction":
                first = next(link.kind for link in self.what.links if link.before in self.what.feeds)
                parts.append(f'<circle class="t{first}" cx="{x + 12:g}" cy="{y - 4:g}" r="4.5"/>')
            elif kind:
                parts.append(f'<path class="arrow {kind}" d="M{x:g} {y - 4:g}h26" marker-end="url(#tm-{kind})"/>')
            parts.append(text(x + (36 if kind else 0), y, words, "soft"))
            x += room + 20
        return parts, y if entries else y - 20

    def _deferred(self, y: float, width: float) -> tuple[list[str], float]:
        """Below the columns, a row for each call that would go into the durable queue; and where they end."""
        parts = [
            text(_MARGIN, y, "deferred", "strong"),
            text(_MARGIN + 16 + wide("deferred"), y, counted(len(self.deferred)), "soft"),
        ]
        for one in self.deferred[:MAX_ROWS]:
            y += 20
            told = f"{one.index}  {one.tool}  {one.code}: {' '.join(one.message.split())}"
            parts.append(short(_MARGIN, y, told, "soft", width - 2 * _MARGIN))
        if len(self.deferred) > MAX_ROWS:
            y += 20
            parts.append(text(_MARGIN, y, f"and {counted(len(self.deferred) - MAX_ROWS)} more", "soft"))
        return parts, y + 6

    def _refused(self, y: float, width: float) -> tuple[list[str], float]:
        """Below the columns, a row for each call that would not start, or one for all; and where they end."""
        parts = [
            text(_MARGIN, y, "refused", "strong"),
            text(_MARGIN + 16 + wide("refused"), y, counted(len(self.what.refused)), "soft"),
        ]
        y += 14
        inner = width - 2 * _MARGIN
        rows = list(self.what.refused.values())
        same = self.what.whole
        for one in rows[:1] if same else rows[:MAX_ROWS]:
            name = "the whole plan" if same else one.tool
            number = "" if same else str(one.index)
            start = _MARGIN + 12 + (wide(number) + 10 if number else 0)
            told = " ".join(one.message.split())
            room = inner - 24
            lines = _wrapped(told, room)
            height = 29 + 17 * len(lines)
            parts.append(f'<rect class="bad" x="{_MARGIN}" y="{y:g}" width="{inner:g}" height="{height:g}" rx="7"/>')
            if number:
                parts.append(text(_MARGIN + 12, y + 19, number, "strong soft num"))
            code = wide(one.code) + 16
            parts.append(short(start, y + 19, name, "strong", max(60.0, inner - code - start), 13.5))
            shown = min(wide(name, 14.5), max(60.0, inner - code - start))
            parts.append(text(start + shown + 12, y + 19, one.code, "code"))
            parts += [short(_MARGIN + 12, y + 37 + 17 * i, line, "soft", room + 2) for i, line in enumerate(lines)]
            y += height + 7
        if len(rows) > MAX_ROWS and not same:
            y += 20
            parts.append(text(_MARGIN, y, f"{counted(len(rows) - MAX_ROWS)} more, not drawn.", "soft"))
        return parts, y


def _wrapped(words: str, room: float) -> list[str]:
    """A sentence on at most three lines; the last one may still be too long."""
    lines = [""]
    for word in words.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and wide(longer) > room and len(lines) < 3:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def short_end(x: float, y: float, words: str, kind: str, room: float) -> str:
    """A line of text that ends at `x`, cut to the room."""
    return short(x, y, words, kind, room).replace("<text ", '<text text-anchor="end" ', 1)


def _marker(kind: str) -> str:
    return (
        f'<marker id="tm-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" orient="auto" '
        f'markerUnits="userSpaceOnUse"><path class="t{kind}" d="M0 0L8 4L0 8z"/></marker>'
    )
