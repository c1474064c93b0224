"""One batch as a graph: what waits for what, what is ready, what is skipped.

Theory. An edge says that a call waits for an earlier one. There are two kinds (rule S1). `needs` was
asked for: it settles when the needed call's result is sealed, and when that call failed, the dependent
is skipped. `after` is made here, of holds that conflict: it settles when the earlier call's *work* has
ended, and it never skips. Two conflicting calls are put in the order in which `needs` alone would let
the batch run one call at a time, the smallest index first; that order is total, so both kinds of edges
together have no cycle. (Choosing pair by pair, with a declared need winning, makes cycles.)

`after` edges are made in one pass per key. Since the last X, a key has a row of groups, S and IX in
turn, each in conflict with the next, and beside them the IS holders, which mind an X only. A member of
a group waits for the group before it, an X for the last group and the IS holders. Where a whole group
is waited for, a junction stands between: a node that is no call, and whose work has ended from the
start, so that it passes the word on as soon as nothing is open before it. The edges are thus at most
about three for each hold, and two calls are joined by a path exactly when a chain of conflicts joins them.

A call that ends before it was ready (skipped, or given up by its caller) becomes such a node as well:
what comes behind it goes on waiting for what it waited for, else a write could overtake the write
before the skipped one.

House rules. Node numbers: calls are 0 to size - 1, junctions follow. No recursion: chains are long. A
batch without an edge keeps no state for its calls. Nothing here knows a clock, a limit or an argument;
keys are compared and never shown.

Not here: which holds a call has (access), what may run now of that which is ready (gate), references
to the results of other calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Final, Literal

from towerman.calls import IS, Hold, X
from towerman.errors import Code, TowermanError

EdgeKind = Literal["needs", "after"]
"""Asked for, and a failure skips; or made by a conflict, order only."""

ID_CHARACTERS: Final = 64
"""Longest part of an id that a message shows."""

EXACT_SUCCESSORS: Final = 2_000
"""Largest batch whose successors are counted exactly: the sets take size * size bits."""

_SHOWN: Final = 8  # ids, or links of a cycle, in one message
_NEAR: Final = 100  # ids that are compared with an unknown one
_LOOKED_THROUGH: Final = 1_000  # nodes that one question for blockers passes through

_SEALED: Final = 1
_ENDED: Final = 2
_FAILED: Final = 4


class PlanRefused(TowermanError):
    """A batch whose dependencies cannot be followed; nothing of it may run (G5).

    Args:
        code: `unknown_dependency`, `duplicate_call_id` or `dependency_cycle`.
        members: indexes of the calls concerned: those with the unknown need, those that share the id,
            or the cycle, in which each call needs the next and the last one needs the first.
        message: a sentence for the model, with ids as they were given, each cut to 64 characters.
    """

    def __init__(self, code: Code, members: tuple[int, ...], message: str) -> None:
        super().__init__(code, members, message)
        self.code: Code = code
        self.members = members
        self.message = message

    def __str__(self) -> str:
        return self.message


def resolve_needs(ids: Sequence[str], needs: Sequence[Sequence[str]]) -> list[tuple[int, ...]] | None:
    """Turn the needed ids of each call into indexes, or refuse the batch.

    Args:
        ids: the id of each call, in emitted order; an empty one cannot be needed.
        needs: for each call the ids that it needs, compared exactly; a single string is one id.

    Returns:
        The indexes that each call needs, without repeats; None when no call needs anything.

    Raises:
        PlanRefused: an id that no call has, one that several calls have, or a cycle, in this order.
    """
    if not any(needs):
        return None
    size = len(ids)
    if len(needs) != size:
        raise ValueError(f"needs: {len(needs)} entries for {size} calls")
    where = dict(zip(ids, range(size), strict=True))
    repeated = _repeated(ids) if len(where) != size else frozenset()
    where.pop("", None)
    resolved: list[tuple[int, ...]] = []
    unknown: list[tuple[int, str]] = []
    doubled: dict[str, None] = {}
    ahead = False
    for index, wanted in enumerate(needs):
        if not wanted:
            resolved.append(())
            continue
        found: dict[int, None] = {}
        for name in (wanted,) if isinstance(wanted, str) else wanted:
            other = where.get(name)
            if other is None:
                unknown.append((index, name))
                continue
            if name in repeated:
                doubled[name] = None
            if other >= index:
                ahead = True
            found[other] = None
        resolved.append(tuple(found))
    if unknown:
        raise _unknown(ids, unknown)
    if doubled:
        raise _doubled(ids, doubled)
    # Needs that point back only cannot close a circle.
    if ahead:
        _topological(resolved, ids)
    return resolved


class Plan:
    """The graph of one batch, told of seals and ends, telling what is ready and what is skipped.

    Args:
        size: number of calls.
        needs: for each call the indexes whose results it needs (as `resolve_needs` returns them).
        holds: for each call its (flat key, mode) pairs, a key at most once. A call that will not run
            should have none: it would keep others in order for nothing.
        estimates: for each call how long it may take, in any one unit, not negative; left out, every
            call counts 1 and paths are counted in hops.

    Attributes:
        size: number of calls.
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
        "_before",
        "_dependents",
        "_early",
        "_estimates",
        "_flags",
        "_made_at",
        "_needs",
        "_needs_left",
        "_order",
        "_paths",
        "_started",
        "_successors",
        "edge_count",
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
    ) -> None:
        self.size = size
        self.trivial = True
        self.edge_count = 0
        self.junction_count = 0
        self._started = False
        self._early: set[int] | None = None
        if (
            (needs is not None and len(needs) != size)
            or (holds is not None and len(holds) != size)
            or (estimates is not None and len(estimates) != size)
        ):
            given = {"needs": needs, "holds": holds, "estimates": estimates}
            lengths = ", ".join(f"{name}: {len(each)} entries" for name, each in given.items() if each is not None)
            raise ValueError(f"{lengths} for {size} calls")
        needed = needs if needs is not None and any(needs) else None
        # Where nobody writes (the write modes are the odd ones), nobody conflicts.
        held = holds if holds is not None and any(mode & 1 for hold in holds for _, mode in hold) else None
        if needed is None and held is None:
            return

        order: Sequence[int] = range(size)
        dependents: list[list[int] | None] = [None] * size
        if needed is not None:
            order = _link_needs(needed, dependents)
        conflicts = _link_conflicts(size, order, held) if held is not None else None
        if needed is None and conflicts is None:
            return

        # All that follows exists only in a plan with edges.
        self.trivial = False
        after, after_left, made_at = conflicts or ([None] * size, [0] * size, [])
        self.junction_count = len(made_at)
        self._order = order
        self._needs: Sequence[Sequence[int]] = needed or ((),) * size
        self._needs_left = [len(wanted) for wanted in self._needs]
        self._dependents = dependents
        self._after = after
        self._after_left = after_left
        self._made_at = made_at  # for each junction the call that it was made for, in the plan's order
        self.edge_count = sum(self._needs_left) + sum(after_left)
        self._flags = bytearray(size) + bytes((_ENDED,)) * len(made_at)
        self._estimates = estimates
        self._paths: list[float] | None = None
        self._successors: list[int] = []
        self._before: list[list[int]] | None = None

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
        skips all that needs it, directly or not. A skipped call counts as sealed and ended.

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
        paths = self._paths
        if paths is None:
            paths = self._rank()
        return -paths[index], -self._successors[index], index

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
                needs_open[other] += not flags[node] & _SEALED or bool(flags[node] & _FAILED)
                if flags[node] & _FAILED and not flags[other]:
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
        flags, dependents = self._flags, self._dependents
        skipped: list[int] = []
        stack = [root]
        while stack:
            for other in dependents[stack.pop()] or ():
                if not flags[other]:
                    flags[other] = _SEALED | _ENDED | _FAILED
                    skipped.append(other)
                    stack.append(other)
        skipped.sort()
        # Only now, when all of them are marked, may the order be passed on: none of them can become ready.
        ready: list[int] = []
        after_left = self._after_left
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

    def _rank(self) -> list[float]:
        """Longest paths and numbers of successors, in one pass from the last node to the first."""
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
        self._successors = counts
        self._paths = paths
        return paths

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


class _Row:
    """The holders of one key, as far as a later holder must know them."""

    __slots__ = ("barrier", "intents", "members", "mode", "writer")

    def __init__(self, index: int, mode: int) -> None:
        self.writer = -1  # the last X
        self.barrier = -1  # what the members of the present group wait for: a writer, or the group before
        self.mode = mode  # of the present group
        self.members: list[int] = []  # of the present group
        self.intents: list[int] = []  # IS since the last X
        if mode == X:
            self.writer = self.barrier = index
        elif mode == IS:
            self.intents.append(index)
        else:
            self.members.append(index)


def _link_conflicts(
    size: int, order: Sequence[int], holds: Sequence[Sequence[Hold]]
) -> tuple[list[list[int] | None], list[int], list[int]] | None:
    """Make the `after` edges.

    Returns:
        For each node those that wait for it, for each node the number that it waits for, and for
        each junction the call that it was made for; None when nothing conflicts.
    """
    after: list[list[int] | None] = [None] * size
    left = [0] * size
    made_at: list[int] = []
    # Most keys have one holder: it is kept as a number until a second one comes.
    rows: dict[str, int | _Row] = {}

    def link(earlier: int, later: int) -> None:
        followers = after[earlier]
        if followers is None:
            after[earlier] = [later]
        elif followers[-1] == later:
            return  # the two meet on several keys
        else:
            followers.append(later)
        left[later] += 1

    def gather(members: list[int], maker: int) -> int:
        if len(members) == 1:
            return members[0]
        junction = len(after)
        after.append(None)
        left.append(0)
        made_at.append(maker)
        for member in members:
            link(member, junction)
        return junction

    for index in order:
        for key, mode in holds[index]:
            row = rows.get(key)
            if row is None:
                rows[key] = index << 2 | mode
                continue
            if isinstance(row, int):
                row = rows[key] = _Row(row >> 2, row & 3)
            if mode == X:
                if row.members:
                    link(gather(row.members, index), index)
                    row.members = []
                elif not row.intents:
                    link(row.barrier, index)
                if row.intents:
                    link(gather(row.intents, index), index)
                    row.intents = []
                row.writer = row.barrier = index
            elif mode == IS:
                row.intents.append(index)
                if row.writer >= 0:
                    link(row.writer, index)
            else:
                if row.mode != mode:
                    row.mode = mode
                    if row.members:
                        row.barrier = gather(row.members, index)
                        row.members = []
                row.members.append(index)
                if row.barrier >= 0:
                    link(row.barrier, index)
    # Without an edge nothing was gathered either: a junction has members that are linked to it.
    return (after, left, made_at) if any(left) else None


def _link_needs(needs: Sequence[Sequence[int]], dependents: list[list[int] | None]) -> Sequence[int]:
    """Fill in who needs each call, and return the order in which the calls could run one by one."""
    size = len(needs)
    ahead = False
    for index, wanted in enumerate(needs):
        for other in wanted:
            if not 0 <= other < index:
                if not 0 <= other < size:
                    raise ValueError(f"needs[{index}]: {other} is no call of a batch of {size}")
                ahead = True
            needing = dependents[other]
            if needing is None:
                dependents[other] = [index]
            else:
                needing.append(index)
    # Where every need points back, the smallest index that can run next is always the next one.
    return _topological(needs) if ahead else range(size)


def _topological(needs: Sequence[Sequence[int]], ids: Sequence[str] | None = None) -> list[int]:
    """The order of a run one by one, the smallest index first (Kahn's algorithm with a heap).

    Raises:
        PlanRefused: there is a cycle; `ids` name its members, else their indexes do.
    """
    left = [len(wanted) for wanted in needs]
    dependents: list[list[int]] = [[] for _ in needs]
    for index, wanted in enumerate(needs):
        for other in wanted:
            dependents[other].append(index)
    heap = [index for index, count in enumerate(left) if not count]
    order: list[int] = []
    while heap:
        index = heappop(heap)
        order.append(index)
        for other in dependents[index]:
            left[other] -= 1
            if not left[other]:
                heappush(heap, other)
    if len(order) < len(needs):
        raise _cyclic(needs, left, ids)
    return order


def _cyclic(needs: Sequence[Sequence[int]], left: list[int], ids: Sequence[str] | None) -> PlanRefused:
    """Name one cycle. What is left after Kahn's algorithm needs something left, so walking back must meet itself."""
    index = next(node for node, count in enumerate(left) if count)
    place: dict[int, int] = {}
    while index not in place:
        place[index] = len(place)
        index = next(other for other in needs[index] if left[other])
    cycle = list(place)[place[index] :]
    first = cycle.index(min(cycle))
    members = (*cycle[first:], *cycle[:first])
    names = [_name(ids, member) for member in members[: _SHOWN + 1]]
    if len(members) == 1:
        text = f"{names[0]} needs itself; take this need away"
    else:
        more = len(members) - _SHOWN
        names.append(names[0])
        links = [f"{names[i]} needs {names[i + 1]}" for i in range(min(len(members), _SHOWN))]
        tail = f", and so on over {more} more, back to the first" if more > 0 else ""
        text = f"these calls need each other in a circle: {', '.join(links)}{tail}; take one of these needs away"
    return PlanRefused("dependency_cycle", members, text)


def _unknown(ids: Sequence[str], unknown: list[tuple[int, str]]) -> PlanRefused:
    """Name the needs that meet no call, and ids that come near the first of them."""
    from difflib import get_close_matches  # only on this path, and it is slow to import

    index, wanted = unknown[0]
    start = max(0, index - _NEAR // 2)
    folded = {name[:ID_CHARACTERS].casefold(): name for name in reversed(ids[start : start + _NEAR]) if name}
    near = [folded[match] for match in get_close_matches(wanted[:ID_CHARACTERS].casefold(), folded)]
    known = list(dict.fromkeys(name for name in ids if name))
    if near:
        hint = f"near {_quoted(wanted)} come {_listed(near)}"
    elif known:
        hint = f"the ids of this batch are {_listed(known[:_SHOWN])}{' ...' if len(known) > _SHOWN else ''}"
    else:
        hint = "no call of this batch has an id"
    misses = ", ".join(f"{_name(ids, who)} needs {_quoted(what)}" for who, what in unknown[:_SHOWN])
    more = len(unknown) - _SHOWN
    text = f"{misses}{f' and {more} more such needs' if more > 0 else ''}: no call of this batch has that id; {hint}"
    return PlanRefused("unknown_dependency", tuple(dict.fromkeys(who for who, _ in unknown)), text)


def _doubled(ids: Sequence[str], doubled: dict[str, None]) -> PlanRefused:
    """Name the ids that are needed and that several calls have."""
    members = tuple(index for index, name in enumerate(ids) if name in doubled)
    more = len(doubled) - _SHOWN
    text = (
        f"{_listed(list(doubled)[:_SHOWN])}{f' and {more} more' if more > 0 else ''}: needed by a call, but "
        "several calls have this id; give every call an id of its own"
    )
    return PlanRefused("duplicate_call_id", members, text)


def _repeated(ids: Sequence[str]) -> frozenset[str]:
    once: set[str] = set()
    repeated: set[str] = set()
    for name in ids:
        (repeated if name in once else once).add(name)
    return frozenset(repeated)


def _name(ids: Sequence[str] | None, index: int) -> str:
    return f"call {_quoted(ids[index])}" if ids is not None and ids[index] else f"call {index}"


def _quoted(name: str) -> str:
    return repr(name[:ID_CHARACTERS])


def _listed(names: list[str]) -> str:
    return ", ".join(map(_quoted, names))
