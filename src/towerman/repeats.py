"""A run that makes the same call turn after turn, with nothing new in between: when to stop it.

Theory. A model that is stuck emits the same call again and again, turn after turn. That a call comes again is no
fault by itself: a build is run anew after each fix. What tells a loop is that nothing new has happened in between. So
for each call, known by a digest of its tool and arguments, the turns are counted in which it came; when a turn holds
a call with an effect that is new itself, or was not made since such a one, the counts of all calls that are not in that
turn begin anew. Calls that stand in one response several times count once: what to do with those is another question
(`share_identical`).

So reading the same page ten times over is a loop, also between other reads that repeat; building, editing something
else, building is none. Two calls with effects that take turns are taken for progress: a budget ends them.

House rules. Pure. Digests only, no arguments, and no more than `MOST` of them: the one that came longest ago goes.

Not here: how digests are made (arguments), what the model is told (sealing).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST: Final = 1_000
"""Calls of a run that are remembered."""


class Repeats:
    """What a run has repeated."""

    __slots__ = ("_counts", "_era")

    def __init__(self) -> None:
        self._counts: dict[bytes, tuple[int, int]] = {}
        self._era = 0

    def turn(self, calls: Iterable[tuple[bytes, bool]]) -> dict[bytes, int]:
        """A turn comes in.

        Args:
            calls: digest of each call, and whether it may have an effect.

        Returns:
            In how many turns each of them came by now with nothing new in between, this one included.
        """
        effects = dict(calls)
        counts: dict[bytes, int] = {}
        new = False
        for mark, effect in effects.items():
            count, era = self._counts.pop(mark, (0, self._era))
            counts[mark] = count + 1 if era == self._era else 1
            new = new or (effect and counts[mark] == 1)
        self._era += new
        for mark, count in counts.items():  # last in the row: they came last
            self._counts[mark] = count, self._era
        for mark in list(self._counts)[: max(0, len(self._counts) - MOST)]:
            del self._counts[mark]
        return counts

    def __repr__(self) -> str:
        return f"Repeats({len(self._counts)} calls)"
