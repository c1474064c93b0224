"""Which calls and arrows of an explanation are drawn, and in which column.

Theory. The groups are the columns. A refused call that needs others, or that others need, stands behind what it needs.
Where needs go in a circle, one arrow of it leads back: the calls are taken in order by Kahn's algorithm, and where that
comes to a stand all that is left waits for something left, so walking back finds a circle to be cut.

House rules. Whatever is large is bounded here, and what is left out is counted.

Not here: where things stand (layout), what they look like (drawing).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from towerman.explain.parts import Edge, PlannedCall, RefusedCall

MAX_CARDS: Final = 400
"""Most calls that are drawn: more can be read by nobody."""

MAX_IN_COLUMN: Final = 60
"""Most calls that are drawn of one group, where not all are."""

MAX_COLUMNS: Final = 100

MAX_ARROWS: Final = 1_500

_PALE: Final = 40  # with more cards than this, arrows that follow from others are not drawn at all
_SOFT: Final = ("pool", "rate")  # reasons that depend on how long calls last


class Chosen:
    """What is drawn of a batch.

    Args:
        calls: those that would run.
        groups: of them.
        links: between two of them, with junctions where many wait for many; and needs of calls that are refused.
        refused: those that would not run.
        chain: those on the critical path.
        members: of a plan that is refused whole, those at fault.

    Attributes:
        columns: indexes of the calls that have cards, from left to right.
        more: for each group that has a column how many of its calls have no card.
        drawn: all that have cards.
        links: the arrows that lead to the right.
        back: those that close a circle and lead back.
        fed: for each junction the calls before it.
        feeds: for each junction those behind it.
        implied: places of links that follow from others, where these are drawn.
        dropped: how many of them are not.
        cut: how many other arrows are not.
        circle: for each call of the circle that a plan is refused for the one that it needs.
        whole: the plan is refused as a whole.
    """

    def __init__(
        self,
        calls: Sequence[PlannedCall],
        groups: Sequence[Sequence[int]],
        links: Sequence[Edge],
        refused: Sequence[RefusedCall],
        chain: Sequence[int],
        members: Sequence[int],
    ) -> None:
        self.calls = {call.index: call for call in calls}
        self.refused = {one.index: one for one in refused}
        self.groups = groups
        self.chain = chain
        self.members = set(members)
        around = members if any(one.code == "dependency_cycle" for one in refused) else ()
        self.circle = dict(zip(around, [*around[1:], *around[:1]], strict=True))  # each needs the next
        self.whole = bool(members)
        columns, self.more = _columns(groups, set(chain))
        self.columns, back = self._with_refused(columns, links)
        self.drawn = {index for column in self.columns for index in column}
        self.back, self.links = self._drawn_links(links, back)
        self.fed, self.feeds = self._ends_of_junctions()
        self.implied = self._implied()
        self.dropped = 0
        if len(self.drawn) > _PALE:
            self.dropped = len(self.implied)
            self.links = [link for number, link in enumerate(self.links) if number not in self.implied]
            self.implied = set()
            self.fed, self.feeds = self._ends_of_junctions()
        self.cut = max(0, len(self.links) - MAX_ARROWS)
        self.links = self.links[:MAX_ARROWS]

    def _with_refused(
        self, columns: list[list[int]], links: Sequence[Edge]
    ) -> tuple[list[list[int]], set[tuple[int, int]]]:
        """Refused calls that need others, or that others need, get cards behind what they need.

        Returns:
            The columns, and the (before, after) of arrows that close a circle.
        """
        joined = {end for link in links if link.after in self.refused for end in (link.before, link.after)}
        wanted = sorted((index for index in joined if index in self.refused), key=lambda i: (i not in self.members, i))
        if self.whole:  # then the plan is what there is to see
            rest = [index for index in self.refused if index not in joined]
            wanted += sorted(rest, key=lambda index: (index not in self.members, index))
        chosen = set(wanted[: max(0, MAX_CARDS - sum(map(len, columns)))])
        column_of = {index: number for number, column in enumerate(columns) for index in column}
        needs: dict[int, list[int]] = {index: [] for index in chosen}
        for link in links:
            if link.after in chosen and (link.before in chosen or link.before in column_of):
                needs[link.after].append(link.before)
        back: set[tuple[int, int]] = set()
        for index in _in_order(needs, back):
            behind = [column_of.get(other, MAX_COLUMNS) for other in needs[index] if (other, index) not in back]
            column = max(behind, default=-1) + 1
            if column >= MAX_COLUMNS:  # or what it needs has no card either
                continue
            while column >= len(columns):
                columns.append([])
            columns[column].append(index)
            column_of[index] = column
        return columns, back

    def _drawn_links(self, links: Sequence[Edge], back: set[tuple[int, int]]) -> tuple[list[Edge], list[Edge]]:
        """Those between what is drawn, apart from those that lead back; junctions only with both sides."""
        nodes = self.calls.keys() | self.refused.keys()
        near = [
            link
            for link in links
            if (link.before in self.drawn or link.before not in nodes)
            and (link.after in self.drawn or link.after not in nodes)
        ]
        whole = {link.after for link in near if link.after not in nodes}
        whole &= {link.before for link in near if link.before not in nodes}
        near = [
            link
            for link in near
            if (link.before in self.drawn or link.before in whole) and (link.after in self.drawn or link.after in whole)
        ]
        return (
            [link for link in near if (link.before, link.after) in back],
            [link for link in near if (link.before, link.after) not in back],
        )

    def _ends_of_junctions(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """For each junction the calls that lead into it, and those that it leads to."""
        fed: dict[int, list[int]] = {}
        feeds: dict[int, list[int]] = {}
        for link in self.links:
            if link.after not in self.drawn:
                fed.setdefault(link.after, []).append(link.before)
            if link.before not in self.drawn:
                feeds.setdefault(link.before, []).append(link.after)
        return fed, feeds

    def _implied(self) -> set[int]:
        """Places of arrows that follow from others, since these lead to the same call by a way round."""
        direct: dict[int, list[int]] = {}
        for link in self.links:
            if link.kind not in _SOFT and link.after in self.drawn:
                direct.setdefault(link.after, []).append(link.before)
        behind: dict[int, int] = {}  # for each call a bit for each that it waits for, directly or not
        beyond: dict[int, int] = {}  # the same without those that only stand directly before it
        through: dict[int, tuple[int, int]] = {}
        for column in self.columns:
            for index in column:
                near = far = 0
                for one in direct.get(index, ()):
                    if one in self.drawn:
                        near |= 1 << one
                        far |= behind.get(one, 0)
                        continue
                    if one not in through:
                        fed = self.fed.get(one, [])
                        bits = [behind.get(other, 0) for other in fed]
                        through[one] = (_union(1 << other for other in fed), _union(bits))
                    near |= through[one][0]
                    far |= through[one][1]
                behind[index], beyond[index] = near | far, far
        return {
            number
            for number, link in enumerate(self.links)
            if link.kind not in _SOFT
            and link.before in self.drawn
            and link.after in self.drawn
            and beyond[link.after] >> link.before & 1
        }

    def critical(self) -> set[int]:
        """Places of the arrows on the critical path."""
        pairs = set(zip(self.chain, self.chain[1:], strict=False))
        after = dict(pairs)
        before = {other: one for one, other in pairs}
        found = set()
        for number, link in enumerate(self.links):
            if link.kind in _SOFT:
                continue
            if link.after not in self.drawn:
                on = after.get(link.before) in self.feeds.get(link.after, ())
            elif link.before not in self.drawn:
                on = before.get(link.after) in self.fed.get(link.before, ())
            else:
                on = (link.before, link.after) in pairs
            if on:
                found.add(number)
        return found

    def in_circle(self, link: Edge) -> bool:
        """It is one of the needs that the plan is refused for."""
        return self.circle.get(link.after) == link.before


def _columns(groups: Sequence[Sequence[int]], chain: Collection[int]) -> tuple[list[list[int]], list[int]]:
    """The calls that are drawn of each group, as long as there is room; and how many of each are not."""
    columns: list[list[int]] = []
    more: list[int] = []
    room = MAX_CARDS
    whole = sum(map(len, groups)) <= MAX_CARDS
    for group in groups:
        if room <= 0 or len(columns) == MAX_COLUMNS:
            break
        most = room if whole else min(room, MAX_IN_COLUMN)
        row = list(group)
        if len(row) > most:
            row = sorted(sorted(row, key=lambda index: (index not in chain, index))[:most])
        columns.append(row)
        more.append(len(group) - len(row))
        room -= len(row)
    return columns, more


def _in_order(needs: Mapping[int, Sequence[int]], back: set[tuple[int, int]]) -> Iterable[int]:
    """Each call behind all that it needs; where needs go in a circle one of them is put into `back`."""
    left = {index: sum(other in needs for other in wanted) for index, wanted in needs.items()}
    dependents: dict[int, list[int]] = {}
    for index, wanted in needs.items():
        for other in wanted:
            dependents.setdefault(other, []).append(index)
    heap = [index for index, count in left.items() if not count]
    heapify(heap)
    order: list[int] = []
    done: set[int] = set()
    while len(order) < len(needs):
        if not heap:
            index = _on_a_circle(needs, done)
            back.update((other, index) for other in needs[index] if other in needs and other not in done)
            left[index] = 0
            heappush(heap, index)
        index = heappop(heap)
        order.append(index)
        done.add(index)
        for other in dependents.get(index, ()):
            if other not in done and (index, other) not in back:
                left[other] -= 1
                if not left[other]:
                    heappush(heap, other)
    return order


def _on_a_circle(needs: Mapping[int, Sequence[int]], done: Collection[int]) -> int:
    """Who is left needs somebody who is left, so walking back must meet itself: the first of that circle."""
    index = min(index for index in needs if index not in done)
    way: dict[int, int] = {}
    while index not in way:
        way[index] = len(way)
        index = next(other for other in needs[index] if other in needs and other not in done)
    return min(list(way)[way[index] :])


def _union(sets: Iterable[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union
