"""An explanation as SVG: groups are columns, calls are cards, edges are arrows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from typing import Final

from towerman.explain.parts import DeferredCall, Edge, EdgeKind, PlannedCall, RefusedCall
from towerman.explain.telling import INDEPENDENT, counted, headline, pools, waits
from towerman.timeline import columns, fit, printable

MAX_CARDS: Final = 250
"""Most calls that are drawn: more can be read by nobody."""

MAX_ARROWS: Final = 1_000

_CARD: Final = 260  # width
_GAP: Final = 92  # between columns
_ROW: Final = 14  # between cards
_MARGIN: Final = 28
_TOP: Final = 104  # where cards begin
_LINE: Final = 17  # of text in a card
_CHARACTERS: Final = 37  # of small text in a card
_NAME_CHARACTERS: Final = 24
_PLAIN_CHARACTER: Final = 6.7  # width of a small one
_HEAD_CHARACTER: Final = 8.5  # of a headline, in the widest of its fonts

_STYLE: Final = """
:root{--page:#fff;--card:#f6f7f9;--edge:#d3d8df;--ink:#1a2027;--soft:#5a6572;--chain:#1a2027;
--needs:#2f6fde;--resource:#b25a00;--order:#7a4fc0;--pool:#0b7a6c;--bad:#b3261e;--badcard:#fdf1f0}
@media (prefers-color-scheme:dark){:root{--page:#14181d;--card:#1f262e;--edge:#3a444f;--ink:#e8ecf0;--soft:#a3afbc;
--chain:#e8ecf0;--needs:#7fb0ff;--resource:#f0a958;--order:#c2a2f5;--pool:#5cd0bf;--bad:#ff9a92;--badcard:#2e1f1f}}
svg{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;font-size:12px}
.page{fill:var(--page)}.card{fill:var(--card);stroke:var(--edge)}.chain{stroke:var(--chain);stroke-width:1.6}
.bad{fill:var(--badcard);stroke:var(--bad)}text{fill:var(--ink)}.head{font-size:15px;font-weight:600}
.group{font-size:13px;font-weight:600}.name{font-size:13px;font-weight:600}.soft{fill:var(--soft)}.code{fill:var(--bad)}
.arrow{fill:none;stroke-width:1.6;opacity:.85}.needs{stroke:var(--needs)}.resource{stroke:var(--resource)}
.order{stroke:var(--order)}.pool,.rate{stroke:var(--pool);stroke-dasharray:5 4}.implied{opacity:.22}
.tshared{fill:var(--pool);font-style:italic}.tneeds{fill:var(--needs)}.tresource{fill:var(--resource)}.torder{fill:var(--order)}.tpool,.trate{fill:var(--pool)}
""".strip()

# Two reasons between the same two cards do not hide each other.
_SHIFT: Final[dict[EdgeKind, int]] = {"needs": -7, "resource": 0, "order": 7, "pool": 7, "rate": 7}

_SOFT: Final = ("pool", "rate")
"""Reasons that depend on how long calls last."""

_LEGEND: Final[dict[EdgeKind, str]] = {
    "needs": "needs the result",
    "resource": "same resource",
    "order": "order of the run",
    "pool": "waits for a place",
    "rate": "waits for a rate",
}


@dataclass(frozen=True, slots=True)
class _Card:
    x: float
    y: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def draw(
    calls: Sequence[PlannedCall],
    groups: Sequence[Sequence[int]],
    edges: Sequence[Edge],
    refused: Sequence[RefusedCall],
    chain: Sequence[int],
    deferred: Sequence[DeferredCall] = (),
) -> str:
    """The drawing, whole and well-formed; colours follow the reader's light or dark scheme."""
    by_index = {call.index: call for call in calls}
    rows, left_out = _rows(groups, edges)
    reasons = waits(edges, details=False)
    lines = {index: _card_lines(by_index[index], reasons.get(index, ())) for row in rows for index in row}
    in_chain = set(chain)
    cards: dict[int, _Card] = {}
    for column, row in enumerate(rows):
        y: float = _TOP
        for index in row:
            height = 32 + _LINE * len(lines[index])
            cards[index] = _Card(_MARGIN + column * (_CARD + _GAP), y, height)
            y += height + _ROW
    bottom: float = max((card.y + card.height for card in cards.values()), default=_TOP - 2 * _ROW)
    arrows = [edge for edge in edges if edge.before in cards and edge.after in cards]
    title = (
        headline(calls, len(groups), len(refused), chain, len(deferred))
        if calls or refused or deferred
        else "No calls."
    )
    inner = max(len(rows), 2) * (_CARD + _GAP) - _GAP
    width = 2 * _MARGIN + max(inner, ceil(_HEAD_CHARACTER * columns(title)))

    implied = _implied(arrows[:MAX_ARROWS], rows)
    body = [_arrow(edge, cards, number in implied) for number, edge in enumerate(arrows[:MAX_ARROWS])]
    for column, row in enumerate(rows):
        x = _MARGIN + column * (_CARD + _GAP)
        body.append(_text(x, _TOP - 14, f"group {column + 1}", "group"))
        body.append(_text(x + 62, _TOP - 14, counted(len(groups[column])), "soft"))
        body += [_card(by_index[index], cards[index], lines[index], index in in_chain) for index in row]
    notes = []
    if left_out:
        notes.append(f"{counted(left_out)} more, not drawn.")
    if len(arrows) > MAX_ARROWS:
        notes.append(f"{len(arrows) - MAX_ARROWS} more arrows, not drawn.")
    if len(groups) > 1:
        notes.append("A group is what runs at the same time if every call lasts equally long.")
    for note in notes:
        bottom += 26
        body.append(_text(_MARGIN, bottom, note, "soft"))
    for what, others in (("refused", refused), ("deferred", deferred)):
        if others:
            below, bottom = _others(what, others, bottom + 34, width)
            body += below
    body += _legend({edge.kind for edge in arrows}, chain, pale=bool(implied))
    total = bottom + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{total:g}" '
            f'viewBox="0 0 {width:g} {total:g}" role="img">',
            f"<title>{_safe(title)}</title>",
            f"<style>{_STYLE}</style>",
            f"<defs>{''.join(_marker(kind) for kind in _LEGEND)}</defs>",
            f'<rect class="page" width="{width:g}" height="{total:g}"/>',
            _text(_MARGIN, 34, title, "head"),
            *body,
            "</svg>\n",
        ]
    )


def _rows(groups: Sequence[Sequence[int]], edges: Sequence[Edge]) -> tuple[list[list[int]], int]:
    """The calls of each column from top to bottom, near those that they wait for; and how many are left out."""
    before: dict[int, list[int]] = {}
    for edge in edges:
        before.setdefault(edge.after, []).append(edge.before)
    rows: list[list[int]] = []
    place: dict[int, float] = {}
    room = MAX_CARDS
    for group in groups:
        if room <= 0:
            break
        row = list(group)[:room]

        def wish(index: int) -> tuple[float, int]:
            known = [place[other] for other in before.get(index, ()) if other in place]
            return (sum(known) / len(known) if known else float(len(place)), index)

        if rows:
            row.sort(key=wish)
        place.update((index, float(number)) for number, index in enumerate(row))
        rows.append(row)
        room -= len(row)
    return rows, sum(map(len, groups)) - sum(map(len, rows))


def _implied(arrows: Sequence[Edge], rows: Sequence[Sequence[int]]) -> set[int]:
    """Places of arrows that follow from others, since these lead to the same call by a way round."""
    before: dict[int, list[int]] = {}
    for edge in arrows:
        if edge.kind not in _SOFT:
            before.setdefault(edge.after, []).append(edge.before)
    behind: dict[int, set[int]] = {}
    for row in rows:
        for index in row:
            direct = before.get(index, ())
            behind[index] = {*direct, *(far for one in direct for far in behind[one])}
    return {
        number
        for number, edge in enumerate(arrows)
        if edge.kind not in _SOFT and any(edge.before in behind[one] for one in before[edge.after])
    }


def _card_lines(call: PlannedCall, reasons: Sequence[tuple[EdgeKind, str]]) -> list[tuple[str, str]]:
    """The small lines of a card as (class, text): what it touches, what it takes, what it waits for."""
    lines = [("soft", touched) for touched in call.touches[:3]]
    if len(call.touches) > 3:
        lines.append(("soft", f"and {len(call.touches) - 3} more"))
    lines += [("soft", pool) for pool in pools(call)]
    if not lines:
        lines.append(("soft", INDEPENDENT))
    if call.told:
        lines.append(("tshared", call.told))
    lines += [(f"t{kind}", f"after {reason}") for kind, reason in reasons[:4]]
    if len(reasons) > 4:
        lines.append(("soft", f"and {len(reasons) - 4} more reasons to wait"))
    return lines


def _card(call: PlannedCall, card: _Card, lines: Sequence[tuple[str, str]], in_chain: bool) -> str:
    name = printable(call.tool)
    parts = [
        f"<g><title>{_safe(f'call {call.index}, {name}')}</title>",
        f'<rect class="card{" chain" if in_chain else ""}" x="{card.x:g}" y="{card.y:g}" '
        f'width="{_CARD}" height="{card.height:g}" rx="7"/>',
        _text(card.x + 12, card.y + 21, str(call.index), "name soft"),
        _text(card.x + 22 + 8 * len(str(call.index)), card.y + 21, fit(name, _NAME_CHARACTERS).rstrip(), "name"),
    ]
    for number, (kind, line) in enumerate(lines):
        parts.append(_small(card.x + 12, card.y + 21 + _LINE * (number + 1), line, kind, _CHARACTERS))
    return "".join([*parts, "</g>"])


def _arrow(edge: Edge, cards: Mapping[int, _Card], implied: bool) -> str:
    one, other, shift = cards[edge.before], cards[edge.after], _SHIFT[edge.kind]
    x1, y1, x2, y2 = one.x + _CARD, one.middle + shift, other.x - 3, other.middle + shift
    bend = min(70.0, (x2 - x1) / 2)
    path = f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    told = f"call {edge.after} waits for call {edge.before}: {edge}"
    return (
        f'<path class="arrow {edge.kind}{" implied" if implied else ""}" d="{path}" marker-end="url(#{edge.kind})">'
        f"<title>{_safe(printable(told))}</title></path>"
    )


def _marker(kind: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="t{kind}" d="M0 0L8 4L0 8z"/></marker>'
    )


def _legend(kinds: set[EdgeKind], chain: Sequence[int], *, pale: bool) -> list[str]:
    parts = []
    x = float(_MARGIN)
    for kind, words in _LEGEND.items():
        if kind in kinds:
            parts.append(f'<path class="arrow {kind}" d="M{x:g} 56H{x + 26:g}" marker-end="url(#{kind})"/>')
            parts.append(_text(x + 34, 60, words, "soft"))
            x += 52 + _PLAIN_CHARACTER * len(words)
    if len(chain) > 1:
        parts.append(f'<rect class="card chain" x="{x:g}" y="49" width="24" height="14" rx="4"/>')
        parts.append(_text(x + 32, 60, "on the longest chain", "soft"))
        x += 50 + _PLAIN_CHARACTER * 20
    if pale:
        parts.append(_text(x, 60, "pale: follows from others", "soft"))
    return parts


def _others(
    what: str, refused: Sequence[RefusedCall | DeferredCall], y: float, width: float
) -> tuple[list[str], float]:
    """Below the columns, a row for each call that would not start now; returns the parts and where they end."""
    parts = [
        _text(_MARGIN, y, what, "group"),
        _text(_MARGIN + (62 if what == "refused" else 70), y, counted(len(refused)), "soft"),
    ]
    y += 14
    inner = width - 2 * _MARGIN
    for one in refused[:MAX_CARDS]:
        name = printable(one.tool)
        parts.append(f'<rect class="bad" x="{_MARGIN}" y="{y:g}" width="{inner:g}" height="46" rx="7"/>')
        parts.append(_text(_MARGIN + 12, y + 19, str(one.index), "name soft"))
        x = _MARGIN + 22 + 8 * len(str(one.index))
        parts.append(_text(x, y + 19, fit(name, _NAME_CHARACTERS).rstrip(), "name"))
        parts.append(_text(x + 8 * min(columns(name), _NAME_CHARACTERS) + 16, y + 19, one.code, "code"))
        told = " ".join(one.message.split())
        parts.append(_small(_MARGIN + 12, y + 37, told, "soft", int(inner / _PLAIN_CHARACTER) - 4))
        y += 46 + _ROW / 2
    if len(refused) > MAX_CARDS:
        y += 20
        parts.append(_text(_MARGIN, y, f"{counted(len(refused) - MAX_CARDS)} more, not drawn.", "soft"))
    return parts, y


def _small(x: float, y: float, text: str, kind: str, most: int) -> str:
    """A line of small text, cut to so many characters; the whole of it shows when one points at it."""
    whole = printable(text)
    if columns(whole) <= most:
        return _text(x, y, whole, kind)
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{_safe(fit(whole, most))}<title>{_safe(whole)}</title></text>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape(text, quote=True)
