"""The graph of one batch while it runs: told of seals and ends, it tells what is ready and what is skipped.

Theory. A call is ready when all edges that lead to it have settled. A call that ends before it was ready (skipped, or
given up by its caller) becomes a node like a junction: what comes behind it goes on waiting for what it waited for,
else a write could overtake the write before the skipped one.

Not here: how the edges come about (needs, conflicts).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal

from towerman.calls import Hold, X
from towerman.plan.conflicts import link_conflicts
from towerman.plan.groups import find_groups
from towerman.plan.needs import link_needs

EdgeKind = Literal["needs", "after"]
"""Asked for, and a failure skips; or made by a conflict, order only."""

EXACT_SUCCESSORS: Final = 2_000
"""Largest batch whose successors are counted exactly: the sets take size * size bits."""

_LOOKED_THROUGH: Final = 1_000  # nodes that one question for blockers passes through

_SEALED: Final = 1
_ENDED: Final = 2
_FAILED: Final = 4
_HELD: Final = 8


class Plan:
    """The graph of one batch, told of seals and ends, telling what is ready and what is skipped.

    Args:
        size: number of calls.
        needs: for each call the indexes whose results it needs (as `resolve_needs` returns them).
        holds: for each call its (flat key, mode) pairs, a key at most once. A call that will not run
            should have none: it would keep others in order for nothing.
        estimates: for each call how long it may take, in any one unit, not negative; left out, every
            call counts 1 and paths are counted in hops.
        alike: for each call what is equal for calls that one run could answer (their holds are equal then), or None;
            left out, each call runs. Compared, and not kept.
        anyway: calls that run although one that they need failed; they still wait for it.

    Attributes:
        size: number of calls.
        groups: calls of which one run may answer several: each waits for the one before it.
        trivial: there is no edge; then no state is kept for a call, and its rank is its index.
        edge_count: edges that are kept, those of junctions included.
        junction_count: nodes that stand for a whole group of calls.

    Raises:
        PlanRefused: `needs` has a cycle.
        ValueError: a length that is not `size`, or an index outside the batch.
    """

    __slots__ = (
        "_after",
        "_after_left",
        "_anyway",
        "_before",
        "_dependents",
        "_early",
        "_estimates",
        "_flags",
        "_keys",
        "_made_at",
        "_needs",
        "_needs_left",
        "_order",
        "_places",
        "_started",
        "edge_count",
        "groups",
        "junction_count",
        "size",
        "trivial",
    )

    def __init__(
        self,
        size: int,
        needs: Sequence[Sequence[int]] | None = None,
        holds: Sequence[Sequence[Hold]] | None = None,
        estimates: Sequence[float] | None = None,
        alike: Sequence[Hashable | None] | None = None,
        anyway: Collection[int] = (),
    ) -> None:
        self.size = size
        self.groups: Sequence[tuple[int, ...]] = ()
        self.trivial = True
        self.edge_count = 0
        self.junction_count = 0
        self._started = False
        self._early: set[int] | None = None
        if (
            (needs is not None and len(needs) != size)
            or (holds is not None and len(holds) != size)
            or (estimates is not None and len(estimates) != size)
            or (alike is not None and len(alike) != size)
        ):
            given = {"needs": needs, "holds": holds, "estimates": estimates, "alike": alike}
            lengths = ", ".join(f"{name}: {len(each)} entries" for name, each in given.items() if each is not None)
            raise ValueError(f"{lengths} for {size} calls")
        needed = needs if needs is not None and any(needs) else None
        # Where nobody writes (the write modes are the odd ones), nobody conflicts.
        held = holds if holds is not None and any(mode & 1 for hold in holds for _, mode in hold) else None
        if needed is None and held is None and alike is None:
            return

        order: Sequence[int] = range(size)
        dependents: list[list[int] | None] = [None] * size
        if needed is not None:
            order = link_needs(needed, dependents)
        conflicts = link_conflicts(size, order, held) if held is not None else None
        if alike is not None:
            self.groups = find_groups(order, needed, held, alike)
        if needed is None and conflicts is None and not self.groups:
            return

        # All that follows exists only in a plan with edges.
        self.trivial = False
        after, after_left, made_at = conflicts or ([None] * size, [0] * size, [])
        if self.groups:
            _chain(self.groups, held, after, after_left)
            estimates = _once(self.groups, estimates or [1.0] * size)
        self.junction_count = len(made_at)
        self._order = order
        self._needs: Sequence[Sequence[int]] = needed or ((),) * size
        self._needs_left = [len(wanted) for wanted in self._needs]
        self._dependents = dependents
        self._anyway = frozenset(anyway)
        self._after = after
        self._after_left = after_left
        self._made_at = made_at  # for each junction the call that it was made for, in the plan's order
        self.edge_count = sum(self._needs_left) + sum(after_left)
        self._flags = bytearray(size) + bytes((_ENDED,)) * len(made_at)
        self._estimates = estimates
        self._keys: list[tuple[float, int, int]] | None = None
        self._before: list[list[int]] | None = None
        self._places: list[int] | None = None

    def start(self) -> Sequence[int]:
        """The calls that are ready at once, in the order of `key`; without an edge a `range`.

        Calls that were sealed or ended before are left out. Until `start`, `seal` and `end` tell of
        nothing as ready: it is told here. A second call returns nothing.
        """
        if self._started:
            return ()
        self._started = True
        if self.trivial:
            early, self._early = self._early, None
            return [index for index in range(self.size) if index not in early] if early else range(self.size)
        needs_left, after_left, flags = self._needs_left, self._after_left, self._flags
        return self._ranked(
            [index for index in range(self.size) if not (needs_left[index] or after_left[index] or flags[index])]
        )

    def seal(self, index: int, ok: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The result of a call has been sealed.

        A call may be sealed before it was ready; then it is not told as ready any more. What fails
        skips all that needs it, directly or not, but for those that run anyway, and for what needs only
        these. A skipped call counts as sealed and ended.

        Args:
            index: the call.
            ok: its result can be used by the calls that need it.

        Returns:
            The calls that became ready, in the order of `key`; and the skipped calls, by index, each
            with the call that failed. Both empty when it had been sealed before.
        """
        if self.trivial:
            if not self._started:
                self._note(index)
            return [], []
        flags = self._flags
        if flags[index] & _SEALED:
            return [], []
        flags[index] |= _SEALED if ok else _SEALED | _FAILED
        dependents = self._dependents[index]
        if dependents is None:
            return [], []
        if not ok:
            return self._skip(index)
        needs_left, after_left = self._needs_left, self._after_left
        ready: list[int] = []
        for other in dependents:
            needs_left[other] = left = needs_left[other] - 1
            if not left and not after_left[other] and not flags[other]:
                ready.append(other)
        return self._ranked(ready), []

    def end(self, index: int) -> list[int]:
        """The work of a call has ended, before, with or long after its seal.

        Returns:
            The calls that became ready, in the order of `key`. Empty when it had ended before.
        """
        if self.trivial:
            if not self._started:
                self._note(index)
            return []
        flags = self._flags
        if flags[index] & _ENDED:
            return []
        flags[index] |= _ENDED
        # What ends before it was ready passes the word on when its own turn would have come.
        if self._after[index] is None or self._after_left[index]:
            return []
        ready: list[int] = []
        self._pass_on([index], ready)
        return self._ranked(ready)

    def hold(self, index: int) -> list[int]:
        """A call that is ready does not go on, and has not ended either: whoever waits for it, directly or not, is held
        with it, and none of them is told as ready any more.

        Args:
            index: the call.

        Returns:
            Those who are held because of it and were not before, by index.
        """
        if self.trivial:
            return []
        flags, after_left = self._flags, self._after_left
        flags[index] |= _HELD
        held: list[int] = []
        stack, seen = [index], {index}
        while stack:
            node = stack.pop()
            nexts = [*(self._after[node] or ())]
            if node < self.size:
                nexts += self._dependents[node] or ()
            for other in nexts:
                if other in seen or flags[other] & _HELD:
                    continue
                seen.add(other)
                if not flags[other]:
                    flags[other] |= _HELD
                    held.append(other)
                elif not (flags[other] & _ENDED and after_left[other]):
                    continue  # sealed, and whoever is behind it does not wait for what is held
                stack.append(other)
        held.sort()
        return held

    def key(self, index: int) -> tuple[float, int, int]:
        """The sort key of the order of starting (rule S6): smaller goes first.

        The longest remaining path comes first, that is the largest sum of estimates over a chain of
        edges that begins with the call, its own included (the upward rank of list scheduling). Ties
        go to the call with more calls behind it, then to the one emitted first. Above
        `EXACT_SUCCESSORS` calls the number behind is an upper estimate: the sum over the direct
        successors, each with its own number, at most the calls that are later in the plan's order;
        exact for trees. Computed for the whole batch when first asked for.
        """
        if self.trivial:
            return 0.0, 0, index
        keys = self._keys
        if keys is None:
            keys = self._rank()
        return keys[index]

    def longest(self, durations: Sequence[float]) -> float:
        """How long the longest chain of edges takes: the least time in which the whole batch could be done.

        Args:
            durations: of each call, in any one unit, not negative.
        """
        if self.trivial:
            return max(durations, default=0.0)
        size, after, dependents = self.size, self._after, self._dependents
        paths = [0.0] * len(after)
        for node in reversed(self._sequence()):
            nexts = after[node] or ()
            behind = max([paths[other] for other in nexts], default=0.0)
            if node < size:
                behind = max([behind, *(paths[other] for other in dependents[node] or ())]) + durations[node]
            paths[node] = behind
        return max(paths)

    def blockers(self, index: int, limit: int = 16) -> list[tuple[EdgeKind, int]]:
        """What a call waits for now: needed calls without a result, then earlier ones still at work.

        Args:
            index: the call.
            limit: the most that is told.

        Returns:
            (kind, index) pairs of calls; junctions and skipped calls are looked through, up to a
            bound (where that is met, the skipped call stands for what is before it).
        """
        if self.trivial or self._flags[index]:
            return []
        flags = self._flags
        found: list[tuple[EdgeKind, int]] = [
            ("needs", other) for other in self._needs[index] if not flags[other] & _SEALED
        ][:limit]
        if self._after_left[index]:
            found += [("after", other) for other in self._unended(index, limit - len(found))]
        return found

    def nexts(self, node: int) -> Iterator[int]:
        """The nodes that wait for a node directly; those from `size` on are junctions."""
        if not self.trivial:
            if node < self.size:
                yield from self._dependents[node] or ()
            yield from self._after[node] or ()

    def place(self, index: int) -> int:
        """The place of a call in the plan's order: behind all that it needs, else as emitted."""
        if self.trivial or isinstance(self._order, range):
            return index
        if self._places is None:
            self._places = [0] * self.size
            for place, one in enumerate(self._order):
                self._places[one] = place
        return self._places[index]

    def needed(self, index: int) -> Sequence[int]:
        """The calls whose results a call needs."""
        return () if self.trivial else self._needs[index]

    def edges(self) -> Iterator[tuple[int, int, EdgeKind]]:
        """All edges between calls as (earlier, later, kind), by the earlier one; for explanation.

        Lazy: junctions are opened pair by pair, which can be many more than `edge_count`.
        """
        if self.trivial:
            return
        size, after = self.size, self._after
        for index in range(size):
            for other in dict.fromkeys(self._dependents[index] or ()):
                yield index, other, "needs"
            told: set[int] = set()
            for node in after[index] or ():
                for other in (node,) if node < size else after[node] or ():
                    if other not in told:
                        told.add(other)
                        yield index, other, "after"

    def validate(self) -> None:
        """Check that the counts agree with the edges and that the graph has no cycle.

        Raises:
            AssertionError: with the first node that is wrong.
        """
        if self.trivial:
            return
        size, flags, total = self.size, self._flags, len(self._after)
        place = {node: position for position, node in enumerate(self._sequence())}
        if len(place) != total or total != size + self.junction_count:
            raise AssertionError(f"plan: {len(place)} of {total} nodes have a place in the order")
        needs_open = [0] * size
        after_open = [0] * total
        for node in range(total):
            dependents = self._dependents[node] if node < size else None
            for other in dependents or ():
                anyway = other in self._anyway
                needs_open[other] += not flags[node] & _SEALED or (bool(flags[node] & _FAILED) and not anyway)
                if flags[node] & _FAILED and not flags[other] and not anyway:
                    raise AssertionError(f"plan: call {other} needs call {node}, which failed, and was not skipped")
            followers = self._after[node]
            if node >= size and not (followers and flags[node] == _ENDED):
                raise AssertionError(f"plan: junction {node} leads nowhere or is no junction")
            passed = flags[node] & _ENDED and not self._after_left[node]
            for other in followers or ():
                after_open[other] += not passed
            for other in (*(dependents or ()), *(followers or ())):
                if place[other] <= place[node]:
                    raise AssertionError(f"plan: the edge from {node} to {other} goes back")
        for node in range(total):
            counted = (self._needs_left[node] if node < size else 0, self._after_left[node])
            found = (needs_open[node] if node < size else 0, after_open[node])
            if counted != found:
                raise AssertionError(f"plan: node {node} counts {counted} open needs and afters, there are {found}")

    def __repr__(self) -> str:
        if self.trivial:
            return f"Plan({self.size} calls, no edges)"
        calls = self._flags[: self.size]
        sealed = sum(flag & _SEALED for flag in calls)
        ended = sum(bool(flag & _ENDED) for flag in calls)
        return (
            f"Plan({self.size} calls, {self.edge_count} edges, {self.junction_count} junctions, "
            f"{sealed} sealed, {ended} ended)"
        )

    def _note(self, index: int) -> None:
        """Without an edge only what is refused before the start must be remembered, until then."""
        if self._early is None:
            self._early = set()
        self._early.add(index)

    def _ranked(self, ready: list[int]) -> list[int]:
        if not self._started:
            return []
        if len(ready) > 1:
            ready.sort(key=self.key)
        return ready

    def _skip(self, root: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Skip what needs a failed call; a call that its caller has touched is the caller's to seal."""
        flags, dependents, anyway, needs_left = self._flags, self._dependents, self._anyway, self._needs_left
        skipped: list[int] = []
        going: list[int] = []
        stack = [root]
        while stack:
            for other in dependents[stack.pop()] or ():
                if other in anyway:
                    needs_left[other] -= 1
                    going.append(other)
                elif not flags[other]:
                    flags[other] = _SEALED | _ENDED | _FAILED
                    skipped.append(other)
                    stack.append(other)
        skipped.sort()
        # Only now, when all of them are marked, may the order be passed on: none of them can become ready.
        after_left = self._after_left
        ready = [
            other for other in dict.fromkeys(going) if not (needs_left[other] or after_left[other] or flags[other])
        ]
        self._pass_on([index for index in skipped if not after_left[index]], ready)
        return self._ranked(ready), [(index, root) for index in skipped]

    def _pass_on(self, passed: list[int], ready: list[int]) -> None:
        """Settle the `after` edges that leave nodes which have ended and wait for nothing."""
        flags, after, after_left, needs_left = self._flags, self._after, self._after_left, self._needs_left
        while passed:
            for other in after[passed.pop()] or ():
                after_left[other] = left = after_left[other] - 1
                if left:
                    continue
                flag = flags[other]
                if flag & _ENDED:
                    passed.append(other)
                elif not flag and not needs_left[other]:
                    ready.append(other)

    def _sequence(self) -> Sequence[int]:
        """All nodes so that every edge leads forward: a junction stands before the call it was made for."""
        if not self._made_at:
            return self._order
        sequence: list[int] = []
        junctions = iter(enumerate(self._made_at, self.size))
        junction, maker = next(junctions)
        for index in self._order:
            while maker == index:
                sequence.append(junction)
                junction, maker = next(junctions, (-1, -1))
            sequence.append(index)
        return sequence

    def _rank(self) -> list[tuple[float, int, int]]:
        """Longest paths and numbers of successors, in one pass from the last node to the first, and what orders the
        calls by them.
        """
        size, after, dependents, estimates = self.size, self._after, self._dependents, self._estimates
        total = len(after)
        paths = [0.0] * total
        counts = [0] * total
        exact = size <= EXACT_SUCCESSORS
        sets = [0] * total if exact else []
        later = 0
        for node in reversed(self._sequence()):
            call = node < size
            nexts = after[node]
            if call:
                needing = dependents[node]
                if needing is not None:
                    nexts = needing if nexts is None else needing + nexts
            longest = 0.0
            count = behind = 0
            for other in nexts or ():
                if paths[other] > longest:
                    longest = paths[other]
                if exact:
                    behind |= sets[other]
                else:
                    count += counts[other] + (other < size)
            if exact:
                count = behind.bit_count()
                sets[node] = behind | 1 << node if call else behind
            counts[node] = min(count, later)
            if call:
                longest += 1.0 if estimates is None else estimates[node]
                later += 1
            paths[node] = longest
        keys = self._keys = [(-paths[call], -counts[call], call) for call in range(size)]
        return keys

    def _unended(self, index: int, limit: int) -> list[int]:
        """Earlier calls at work that a call waits for, found against the edges.

        What has passed is taken out of the lists on the way, so that asking for every call again and
        again does not walk through a long group each time.
        """
        flags, after_left = self._flags, self._after_left
        before = self._before
        if before is None:
            before = self._before = [[] for _ in self._after]
            for node, followers in enumerate(self._after):
                for other in followers or ():
                    before[other].append(node)
        found: set[int] = set()
        seen = {index}
        stack = [index]
        while stack and len(found) < limit and len(seen) < _LOOKED_THROUGH:
            waits = before[stack.pop()]
            unsettled: list[int] = []
            looked = 0
            for node in waits:
                if len(found) >= limit:
                    break
                looked += 1
                if not flags[node] & _ENDED:
                    found.add(node)
                elif not after_left[node]:
                    continue
                elif node not in seen:
                    seen.add(node)
                    stack.append(node)
                unsettled.append(node)
            waits[:looked] = unsettled
        return sorted(found or [node for node in stack if node < self.size][:limit])


def _chain(
    groups: Sequence[Sequence[int]],
    held: Sequence[Sequence[Hold]] | None,
    after: list[list[int] | None],
    after_left: list[int],
) -> None:
    """Let each member of a group wait for the one before it, unless it does so for what both of them hold."""
    for members in groups:
        if held is not None and any(mode == X for _, mode in held[members[0]]):
            continue  # nobody stands between them, so each was linked to the one before
        for earlier, later in pairwise(members):
            followers = after[earlier]
            if followers is None:
                after[earlier] = [later]
            else:
                followers.append(later)
            after_left[later] += 1


def _once(groups: Sequence[Sequence[int]], estimates: Sequence[float]) -> list[float]:
    """The same estimates, with a group as long as one run of it."""
    once = list(estimates)
    for members in groups:
        for index in members[1:]:
            once[index] = 0.0
    return once
