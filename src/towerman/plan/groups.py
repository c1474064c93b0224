"""Calls that can be answered by one run: who they are, and which of them has run.

Theory (rule S11). Calls are alike when whoever asks says so, they need the same calls and hold the same. Alike calls
make a group as long as no other call stands between them, in the plan's order, that conflicts with what they hold: a
read after a write is another read. One pass finds them: for each key it is counted how many holds of each mode have
gone by, and a group knows what it had counted when its last member went by. Where the next one like it finds more
holds that conflict, somebody else stood between. That is linear in the number of holds.

The members of a group are a chain: each waits for the one before (plan). So one runs at a time, and when it has
answered the others need not.

House rules. What makes calls alike may hold argument values: it is compared and not kept.

Not here: what alike means (arguments), what the others are answered with (runner).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from towerman.calls import COMPATIBLE, Hold

_IN_THE_WAY: Final = tuple(tuple(mode for mode, both in enumerate(compatible) if not both) for compatible in COMPATIBLE)
"""For each mode those that conflict with it."""


class Group:
    """Calls of which one run may answer several.

    Attributes:
        members: two or more, in the plan's order.
        merged: what is run stands for several calls at once, each with arguments of its own.
        source: the member whose run answers for others, or is to; -1 while there is none.
        inside: where `merged`: the other members whose arguments are in that run.
        note: where `merged`: what is said of that.
        passed: so many of the first members are known to have results.
    """

    __slots__ = ("inside", "members", "merged", "note", "passed", "source")

    def __init__(self, members: tuple[int, ...], merged: bool) -> None:
        self.members = members
        self.merged = merged
        self.source = -1
        self.inside: frozenset[int] = frozenset()
        self.note = ""
        self.passed = 0

    def __repr__(self) -> str:
        return f"Group({len(self.members)} calls{', merged' if self.merged else ''})"


class _Open:
    """A group while it is looked for."""

    __slots__ = ("members", "seen")

    def __init__(self, index: int) -> None:
        self.members = [index]
        self.seen: list[int] = []


def find_groups(
    order: Sequence[int],
    needs: Sequence[Sequence[int]] | None,
    holds: Sequence[Sequence[Hold]] | None,
    alike: Sequence[Hashable | None],
) -> list[tuple[int, ...]]:
    """The groups of two or more, each in the plan's order.

    Args:
        order: the indexes of all calls as the plan would run them one by one.
        needs: for each call the indexes that it needs; None when no call needs any.
        holds: for each call its (flat key, mode) pairs; None when nobody holds what another one could mind.
        alike: for each call what is equal for calls that one run could answer; None: no other is like it. Equal ones
            have the same holds.
    """
    counts: dict[str, list[int]] = {}
    latest: dict[Hashable, _Open] = {}
    found: list[_Open] = []
    for index in order:
        held = holds[index] if holds is not None else ()
        likeness = alike[index]
        group = None
        if likeness is not None:
            key = (likeness, frozenset(needs[index])) if needs is not None else likeness
            group = latest.get(key)
            if group is not None and group.seen == _seen(counts, held):
                group.members.append(index)
            else:
                group = latest[key] = _Open(index)
                found.append(group)
        for flat, mode in held:
            row = counts.get(flat)
            if row is None:
                row = counts[flat] = [0, 0, 0, 0]
            row[mode] += 1
        if group is not None:
            group.seen = _seen(counts, held)  # its own members do not stand in its way
    return [tuple(group.members) for group in found if len(group.members) > 1]


def _seen(counts: dict[str, list[int]], holds: Sequence[Hold]) -> list[int]:
    """For each of these holds, how many that conflict with it have gone by."""
    seen = []
    for flat, mode in holds:
        row = counts.get(flat)
        seen.append(sum([row[other] for other in _IN_THE_WAY[mode]]) if row is not None else 0)
    return seen
