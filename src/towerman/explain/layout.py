"""Where the cards of a drawing stand, and how the arrows get from one to the other.

Theory. Layers from left to right, after Sugiyama, Tagawa and Toda (1981): every arrow leads to a column further right.
An arrow over more than one column has a lane in each column between, as high as it needs to be, so that it never runs
through a card; arrows of one kind from one place share their lanes, and so do those into one junction. The order within
a column comes from a few passes in which everything moves to the mean place of what it is joined to on one side, then
on the other. Heights come from passes of the same kind, in which what is joined moves to one height as far as the
order and the distances let it: the least sum of squares, found by pooling neighbours that would overlap. Cards that
nothing leads to or from fill what room is left, from the top.

House rules. Numbers only: no text, no SVG. The same input gives the same layout. The cost is about linear in what is
drawn, and what is drawn is bounded.

Not here: which calls and arrows are drawn, and how (drawing).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from towerman.explain.parts import EdgeKind

PASSES: Final = 6
"""How often the order and the heights are gone over, in turn from left and from right."""

MOST_LANES: Final = 4_000
"""Most lanes; the longest arrows are left out first."""

_LANE: Final = 4.0  # height of a lane
_JUNCTIONS: Final = 16.0  # between two junctions
_AROUND: Final = 14.0  # between two arrows that lead back


@dataclass(frozen=True, slots=True)
class Measures:
    """Sizes, in pixels.

    Args:
        left: of the first column.
        top: of its first card.
        card: width of a card.
        gap: between two columns.
        row: between two cards, or lanes.
        shift: how far from a card's middle the arrows of each kind begin and end.
    """

    left: float
    top: float
    card: float
    gap: float
    row: float
    shift: Mapping[EdgeKind, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A card's place."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Link:
    """An arrow that is wanted; a node that stands in no column is a junction."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(slots=True)
class Stroke:
    """A piece of one or more arrows, drawn once.

    Attributes:
        kind: of the arrows.
        start: where it begins.
        end: where it ends; the head of an arrow is there if `arrow`. A lane through a column is a stroke of its own.
        links: numbers of the arrows that it belongs to.
        arrow: it leads into a card.
    """

    kind: EdgeKind
    start: tuple[float, float]
    end: tuple[float, float]
    arrow: bool
    links: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Layout:
    """What stands where.

    Args:
        boxes: the card of each node.
        junctions: the middle of each junction.
        strokes: the arrows, piece by piece.
        lanes: where arrows pass through columns, as (left, y).
        left_out: numbers of arrows that are not drawn.
        bottom: below all cards and lanes.
    """

    boxes: dict[int, Box]
    junctions: dict[int, tuple[float, float]]
    strokes: list[Stroke]
    lanes: list[tuple[float, float]]
    left_out: list[int]
    bottom: float


def arrange(
    columns: Sequence[Sequence[int]], heights: Mapping[int, float], links: Sequence[Link], sizes: Measures
) -> Layout:
    """Lay out cards in columns, with arrows that all lead to a column further right.

    Args:
        columns: the nodes of each, in the order that is kept where arrows do not say otherwise.
        heights: of the card of each of these.
        links: from node to node, from node to junction, or from junction to node. Those that do not lead to the right
            are a mistake of the caller's.
        sizes: of what is the same everywhere.
    """
    return _Arranging(columns, heights, links, sizes).done()


class _Arranging:
    def __init__(
        self, columns: Sequence[Sequence[int]], heights: Mapping[int, float], links: Sequence[Link], sizes: Measures
    ) -> None:
        self.sizes = sizes
        self.heights = dict(heights)
        self.links = links
        self.column = {node: number for number, column in enumerate(columns) for node in column}
        self.gaps = self._gaps_of_junctions()
        self.rows: list[list[int]] = [[] for _ in columns]  # what has arrows, top to bottom: cards and lanes
        self.inner: list[list[int]] = [[] for _ in columns]  # the junctions behind each column
        for junction, gap in self.gaps.items():
            self.inner[gap].append(junction)
        self.before: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        self.steps: dict[tuple[int, int, EdgeKind], list[int]] = {}
        self.lanes: dict[tuple[str, int, str, int], int] = {}
        self.next_lane = -1
        self.left_out = self._route()
        joined = {node for step in self.steps for node in step[:2]}
        for number, column in enumerate(columns):
            self.rows[number][:0] = [node for node in column if node in joined]
        self.alone = [[node for node in column if node not in joined] for column in columns]
        self.at: dict[int, float] = {}  # the middle of each

    def done(self) -> Layout:
        self._order()
        self._heights()
        boxes, bottom = self._boxes()
        return Layout(
            boxes,
            {one: (self._junction_x(gap), self.at[one]) for one, gap in self.gaps.items() if one in self.at},
            [*self._passes(), *(self._stroke(step, numbers) for step, numbers in self.steps.items())],
            [(self._x(self.column[lane]), self.at[lane]) for lane in self.lanes.values()],
            self.left_out,
            bottom,
        )

    # ---------------------------------------------------------------- who is joined to whom

    def _gaps_of_junctions(self) -> dict[int, int]:
        """A junction stands in the gap before the first column that it leads to."""
        gaps: dict[int, int] = {}
        fed = {link.after for link in self.links}
        for link in self.links:
            if link.before not in self.column and link.before in fed:
                gap = self.column[link.after] - 1
                gaps[link.before] = min(gap, gaps.get(link.before, gap))
        return gaps

    def _route(self) -> list[int]:
        """Cut each arrow into steps from column to column; the shortest first, as long as there are lanes."""
        spans = []
        left_out = []
        for number, link in enumerate(self.links):
            ends = [end in self.column or end in self.gaps for end in (link.before, link.after)]
            if all(ends):
                start = self.column.get(link.before, self.gaps.get(link.before, 0))
                end = self.column.get(link.after, self.gaps.get(link.after, 0) + 1)
                spans.append((end - start, number, start, end))
                continue
            left_out.append(number)
        for _, number, start, end in sorted(spans):
            link = self.links[number]
            way = ("into", link.after, link.kind) if link.after not in self.column else ("from", link.before, link.kind)
            wanted = [(*way, between) for between in range(start + 1, end)]
            if len(self.lanes) + len(wanted) > MOST_LANES and any(key not in self.lanes for key in wanted):
                left_out.append(number)
                continue
            path = [link.before, *map(self._lane, wanted), link.after]
            for one, other in pairwise(path):
                step = (one, other, link.kind)
                if step not in self.steps:
                    self.steps[step] = []
                    self.before.setdefault(other, []).append(one)
                    self.after.setdefault(one, []).append(other)
                self.steps[step].append(number)
        return sorted(left_out)

    def _lane(self, key: tuple[str, int, str, int]) -> int:
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = self.next_lane
            self.next_lane -= 1
            self.column[lane] = key[3]
            self.heights[lane] = _LANE
            self.rows[key[3]].append(lane)
        return lane

    # ---------------------------------------------------------------- order, then heights

    def _order(self) -> None:
        for row in self.rows:
            self._number(row)
        for turn in range(PASSES):
            self._sweep(turn % 2 == 0, self._reorder)
        self._sweep(True, self._reorder)

    def _number(self, row: Sequence[int]) -> None:
        self.at.update((node, float(place)) for place, node in enumerate(row))

    def _reorder(self, number: int, wish: Callable[[int], float]) -> None:
        row = self.rows[number]
        row.sort(key=lambda node: (wish(node), self.at[node]))
        self._number(row)

    def _sweep(self, forward: bool, move: Callable[[int, Callable[[int], float]], None]) -> None:
        """Let each column, from one side to the other, move to what it is joined to on the side it comes from."""
        joined = self.before if forward else self.after
        count = len(self.rows)

        def wish(node: int) -> float:
            others = [self.at[other] for other in joined.get(node, ()) if other in self.at]
            return sum(others) / len(others) if others else self.at.get(node, 0.0)

        for number in range(count) if forward else range(count - 1, -1, -1):
            # The junctions between the column before and this one come first.
            gap = number - 1 if forward else number
            if 0 <= gap < count:
                for junction in self.inner[gap]:
                    self.at[junction] = wish(junction)
            move(number, wish)

    def _heights(self) -> None:
        for row in self.rows:
            top = 0.0
            for node in row:
                height = self.heights[node]
                self.at[node] = top + height / 2
                top += height + self.sizes.row
        for turn in range(PASSES):
            self._sweep(turn % 2 == 1, self._settle)
        for junctions in self.inner:
            means = {one: self._between(one) for one in junctions}
            junctions.sort(key=lambda one: (means[one], one))
            middles = spread([means[one] for one in junctions], [_JUNCTIONS] * len(junctions))
            self.at.update(zip(junctions, middles, strict=True))
        tops = [self.at[row[0]] - self.heights[row[0]] / 2 for row in self.rows if row]
        down = self.sizes.top - min(tops, default=self.sizes.top)
        for node in self.at:
            self.at[node] = round(self.at[node] + down, 1)

    def _settle(self, number: int, wish: Callable[[int], float]) -> None:
        row = self.rows[number]
        needed = [0.0] + [
            (self.heights[one] + self.heights[other]) / 2 + self.sizes.row for one, other in pairwise(row)
        ]
        self.at.update(zip(row, spread([wish(node) for node in row], needed), strict=True))

    def _between(self, junction: int) -> float:
        sides = [
            [self.at[one] for one in joined.get(junction, ()) if one in self.at] for joined in (self.before, self.after)
        ]
        means = [sum(side) / len(side) for side in sides if side]
        return sum(means) / max(1, len(means))

    # ---------------------------------------------------------------- where things are

    def _x(self, column: int) -> float:
        return self.sizes.left + column * (self.sizes.card + self.sizes.gap)

    def _junction_x(self, gap: int) -> float:
        return self._x(gap) + self.sizes.card + self.sizes.gap * 0.45

    def _boxes(self) -> tuple[dict[int, Box], float]:
        boxes: dict[int, Box] = {}
        bottom = self.sizes.top
        for number, (row, alone) in enumerate(zip(self.rows, self.alone, strict=True)):
            x = self._x(number)
            for node in row:
                if node >= 0:
                    height = self.heights[node]
                    boxes[node] = Box(x, self.at[node] - height / 2, self.sizes.card, height)
            taken = [(self.at[node] - self.heights[node] / 2, self.at[node] + self.heights[node] / 2) for node in row]
            place, y = 0, self.sizes.top
            for node in alone:
                height = self.heights[node]
                while place < len(taken) and y + height + self.sizes.row > taken[place][0]:
                    y = max(y, taken[place][1] + self.sizes.row)
                    place += 1
                boxes[node] = Box(x, y, self.sizes.card, height)
                y += height + self.sizes.row
            bottom = max([bottom, y - self.sizes.row, *(end for _, end in taken)])
        return boxes, bottom

    def _stroke(self, step: tuple[int, int, EdgeKind], numbers: list[int]) -> Stroke:
        one, other, kind = step
        shift = self.sizes.shift[kind]
        if one in self.gaps:
            start = (self._junction_x(self.gaps[one]), self.at[one])
        else:
            start = (self._x(self.column[one]) + self.sizes.card, self.at[one] + (shift if one >= 0 else 0.0))
        if other in self.gaps:
            return Stroke(kind, start, (self._junction_x(self.gaps[other]), self.at[other]), False, numbers)
        x = self._x(self.column[other])
        if other < 0:
            return Stroke(kind, start, (x, self.at[other]), False, numbers)
        return Stroke(kind, start, (x - 2, self.at[other] + shift), True, numbers)

    def _passes(self) -> list[Stroke]:
        """The lanes, each drawn once for all that use it: dashes upon dashes would make a solid line."""
        users: dict[int, list[int]] = {}
        for (_, other, _), numbers in self.steps.items():
            if other < 0:
                users.setdefault(other, []).extend(numbers)
        passes = []
        for lane, numbers in users.items():
            x, y = self._x(self.column[lane]), self.at[lane]
            passes.append(Stroke(self.links[numbers[0]].kind, (x, y), (x + self.sizes.card, y), False, sorted(numbers)))
        return passes


def spread(wishes: Sequence[float], needed: Sequence[float]) -> list[float]:
    """Places in the given order and at least so far apart, as near to the wishes as can be (least squares).

    Args:
        wishes: one a place.
        needed: for each place its least distance from the one before; the first is not looked at.
    """
    # Less what is needed, the places only must not fall: neighbours that would are pooled at their mean.
    pools: list[tuple[float, int]] = []  # (sum, count)
    offsets: list[float] = []
    offset = 0.0
    for place, wish in enumerate(wishes):
        offset += needed[place] if place else 0.0
        offsets.append(offset)
        total, count = wish - offset, 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            more, others = pools.pop()
            total, count = total + more, count + others
        pools.append((total, count))
    levels = [total / count for total, count in pools for _ in range(count)]
    return [level + offset for level, offset in zip(levels, offsets, strict=True)]
