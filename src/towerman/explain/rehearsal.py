"""A batch gone through on a gate that nobody else uses, round by round, without handlers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from towerman import sealing
from towerman.budgets import Asks, number
from towerman.calls import COMPATIBLE, IX, ROOT, Outcome, X
from towerman.errors import Code
from towerman.explain.explanation import Explanation
from towerman.explain.parts import (
    MAX_EDGES,
    DeferredCall,
    Edge,
    EdgeKind,
    Limit,
    PlannedCall,
    RateInForce,
    RefusedCall,
    Seen,
)
from towerman.gate import GRANTED, NEVER, Entry, Flow, Gate, Offer
from towerman.ledger import UNLIMITED, Meter, Pool, Wants
from towerman.lots import Lot
from towerman.plan import Plan, PlanRefused
from towerman.policy import told_rate
from towerman.trace import ID_CHARACTERS
from towerman.watched import limit_name


def explain(
    calls: Sequence[Seen],
    needs: Sequence[Sequence[int]] | PlanRefused | None,
    gate: Gate[int],
    flow: Flow[int],
    now: float,
    *,
    estimates: Sequence[float] | None = None,
    notice: str | None = None,
) -> Explanation:
    """Say what a batch would do.

    Args:
        calls: all of them, looked over, in emitted order.
        needs: for each call the indexes that it needs; None when no call needs any; or why they cannot be followed.
        gate: with the limits that hold and nobody in it; it is used up.
        flow: the run, open in that gate.
        now: the instant at which the batch would come in.
        estimates: how long each call may take, which is what the order of starting goes by; None: nothing is known.
        notice: what the model would be told about the batch as a whole.
    """
    if isinstance(needs, PlanRefused):
        refused = [
            RefusedCall(i, one.tool, "rejected", needs.code, needs.message, _id(one)) for i, one in enumerate(calls)
        ]
        return Explanation(refused=tuple(refused), links=tuple(_wanted(calls)), members=needs.members)
    rounds = _Rounds(calls, _plan(calls, needs, estimates), gate, flow, now)
    rounds.go()
    group_of = {index: number for number, group in enumerate(rounds.groups) for index in group}
    shared = rounds.shared
    hard = list(islice(_hard_edges(calls, _plan(calls, needs), group_of, shared), MAX_EDGES + 1))
    edges = sorted([*hard[:MAX_EDGES], *rounds.pool_edges], key=lambda edge: (edge.after, edge.before, edge.kind))
    plan = _plan(calls, needs)
    links = [*_links(calls, plan, group_of, shared), *rounds.pool_edges]
    chain, lasts = _longest_chain(plan, group_of, shared, estimates)
    if needs is not None:
        links += [Edge(before, one, "needs", "needs") for one in sorted(rounds.refused) for before in needs[one]]
    behind = _behind(calls, plan, group_of) if any(one.defers for one in calls) else {}
    planned = [
        PlannedCall(
            index,
            one.tool,
            group_of[index],
            one.touches,
            {} if index in shared else _permits(one.wants),
            shared.get(index),
            index in shared and one.merged,
            one.approval,
            _id(one) if needs is not None else "",
            None if estimates is None or index in shared else estimates[index],
            one.defers,
            behind.get(index, ()),
        )
        for index, one in enumerate(calls)
        if index in group_of and one.wants is not None
    ]
    return Explanation(
        calls=tuple(planned),
        groups=tuple(tuple(sorted(group)) for group in rounds.groups),
        edges=tuple(edges),
        refused=tuple(
            replace(rounds.refused[index], id=_id(calls[index])) if needs is not None else rounds.refused[index]
            for index in sorted(rounds.refused)
        ),
        deferred=tuple(rounds.deferred[index] for index in sorted(rounds.deferred)),
        limits=_limits(gate, [one.wants for index, one in enumerate(calls) if index in group_of]),
        rates=_rates([one.wants for index, one in enumerate(calls) if index in group_of]),
        rate_seconds=round(rounds.waited, 6),
        spends=_spends(
            one.asks for index, one in enumerate(calls) if index in group_of and (index not in shared or one.merged)
        ),
        critical_path=chain,
        critical_seconds=lasts,
        links=tuple(links),
        notice=notice,
        complete=len(hard) <= MAX_EDGES,
    )


def _plan(
    calls: Sequence[Seen], needs: Sequence[Sequence[int]] | None, estimates: Sequence[float] | None = None
) -> Plan:
    holds = [one.wants.holds if one.wants is not None else () for one in calls]
    alike = [one.likeness for one in calls] if any(one.likeness is not None for one in calls) else None
    return Plan(len(calls), needs, holds, estimates, alike)


class _Rounds:
    """The groups of a batch.

    Attributes:
        groups: the calls of each, as they were granted.
        refused: by index.
        deferred: by index, what would go into the durable queue.
        pool_edges: whose place a call gets that waited for a limit.
        shared: by index, the call whose run answers it too.
        waited: how long rates alone have kept calls waiting, in seconds.
    """

    def __init__(self, calls: Sequence[Seen], plan: Plan, gate: Gate[int], flow: Flow[int], now: float) -> None:
        self.groups: list[list[int]] = []
        self.refused: dict[int, RefusedCall] = {}
        self.deferred: dict[int, DeferredCall] = {}
        self.pool_edges: list[Edge] = []
        self._held: dict[int, int] = {}  # who comes behind a deferred call, and behind which
        self.shared: dict[int, int] = {}
        self.waited = 0.0
        self._since = now
        self._leaders: dict[int, int] = {}  # by the first member of a group of the plan, the one that has run
        self._first = {index: members[0] for members in plan.groups for index in members}
        self._calls = calls
        self._plan = plan
        self._gate = gate
        self._flow = flow
        self._now = now
        self._ready: dict[int, Wants[Lot[int]]] = {}  # told as ready and not decided
        self._blocked: dict[int, str] = {}  # of these, who has waited for a limit since the last round, and which
        self._granted: list[Entry[int]] = []
        self._last: dict[Meter[Lot[int]], list[int]] = {}  # who has started, by the rate that it counts in
        self._decided: deque[tuple[Entry[int], int | None]] = deque()  # with the call whose end has led to it

    def go(self) -> None:
        """Round by round: what was granted in one ends, and what that lets in is the next."""
        plan = self._plan
        for index, one in enumerate(self._calls):
            if one.refusal is not None:
                self._refuse(index, "rejected", *one.refusal)
        for index in list(self.refused):
            self._offer(self._follow(index, ok=False))
        self._offer(plan.start())
        self._carry_out()
        while self._granted or self._wait_for_a_rate():
            running, self._granted = self._granted, []
            self.groups.append([entry.owner for entry in running])
            self._look_who_waits()
            for entry in running:
                if entry.owner in self._first:
                    self._leaders[self._first[entry.owner]] = entry.owner
                offers = self._offers(self._unanswered(self._follow(entry.owner, ok=True)))
                decided = self._gate.finish(entry, self._now, offers, plan.key)
                self._decided += [(one, entry.owner) for one in decided]
                self._carry_out()

    def _wait_for_a_rate(self) -> bool:
        """Nothing is at work: let the time pass that lets somebody start; is there such a time?"""
        while self._ready and not self._granted and self._gate.wake_at < NEVER:
            self._now = max(self._now, self._gate.wake_at)
            self._decided += [(entry, None) for entry in self._gate.tick(self._now)]
            self._carry_out()
        return bool(self._granted)

    def _follow(self, index: int, *, ok: bool) -> list[int]:
        """A call has its result and its work has ended: who is ready, once those are refused that needed it in vain."""
        ready, skipped = self._plan.seal(index, ok)
        for other, culprit in skipped:
            if other not in self.refused:
                message = sealing.unneeded(culprit, self._calls[culprit].call)
                self._refuse(other, "skipped", "dependency_failed", message)
        return [*ready, *self._plan.end(index)]

    def _unanswered(self, ready: Iterable[int]) -> list[int]:
        """Of the ready calls those that run themselves; what the run that has just ended answers too is followed."""
        rest: list[int] = []
        todo = deque(ready)
        while todo:
            index = todo.popleft()
            leader = self._leaders.get(self._first.get(index, -1))
            if leader is None:
                rest.append(index)
                continue
            self.shared[index] = leader
            self.groups[-1].append(index)
            todo.extend(self._follow(index, ok=True))
        return rest

    def _refuse(self, index: int, outcome: Outcome, code: Code, message: str) -> None:
        self.refused[index] = RefusedCall(index, self._calls[index].tool, outcome, code, sealing.clean(message))

    def _defer(self, index: int, code: Code, why: str) -> list[int]:
        """A call goes into the durable queue, and with it whatever comes behind it; who is ready now."""
        self.deferred[index] = DeferredCall(index, self._calls[index].tool, code, sealing.clean(why))
        todo, size = [index], self._plan.size
        seen = {index}
        while todo:
            for node in self._plan.nexts(todo.pop()):
                if node not in seen and node not in self._held:
                    seen.add(node)
                    todo.append(node)
                    if node < size:
                        self._held[node] = index
        return self._follow(index, ok=True)

    def _offers(self, ready: Iterable[int]) -> list[Offer[int]]:
        offers: list[Offer[int]] = []
        todo = deque(ready)
        while todo:
            index = todo.popleft()
            if index in self._held:
                first = self._held[index]
                why = f"It comes after call {first}{sealing.named(self._calls[first].call)}, which would be deferred."
                todo.extend(self._defer(index, "held_behind", why))
                continue
            wants = self._calls[index].wants
            assert wants is not None, "a refused call is never ready"
            self._ready[index] = wants
            offers.append((wants, index, self._now))
        return offers

    def _offer(self, ready: Iterable[int], freed_by: int | None = None) -> None:
        offers = self._offers(ready)
        if offers:
            self._decided += [(entry, freed_by) for entry in self._gate.offer(self._flow, offers, self._now)]

    def _carry_out(self) -> None:
        """Do what the gate has decided. A refusal may let others in, so this goes on until there is nothing left."""
        while self._decided:
            entry, freed_by = self._decided.popleft()
            index = entry.owner
            del self._ready[index]
            limit = self._blocked.pop(index, None)
            if entry.status == GRANTED:
                self._granted.append(entry)
                self._begin(entry)
                if limit is not None and freed_by is not None:
                    self.pool_edges.append(Edge(freed_by, index, "pool", limit))
            else:
                code, blocker = entry.rejection.code, entry.rejection.blocker
                never = code == "concurrency_limit" and self._gate.ledger.hopeless(entry.wants) is not None
                if self._calls[index].defers and code in sealing.DEFERRED_FOR and not never:
                    told = sealing.DEFERRED_FOR[code].format(blocker=blocker or "its turn")
                    told = f"{told[:1].upper()}{told[1:]}: it would run later, in a worker."
                    self._offer(self._defer(index, "deferred", told), freed_by)
                    continue
                left = entry.rejection.retry_after
                message = sealing.refusal(code, blocker, entry.wants.max_wait, never=never, retry_after=left)
                self._refuse(index, "rejected", code, message)
                self._offer(self._follow(index, ok=False), freed_by)

    def _begin(self, entry: Entry[int]) -> None:
        """It starts, and counts in its rates; one that they held back waits for the start that makes room for it."""
        self._gate.begun(entry, self._now)
        self.waited = self._now - self._since
        for meter in entry.wants.meters:
            before = self._last.setdefault(meter, [])
            numbers = meter.pace.numbers
            if meter.label in entry.blocked_by and numbers is not None:
                limit, _, burst, reserve = numbers
                room = (burst or limit) - (0 if entry.wants.priority > 0 else reserve)
                if len(before) >= room:
                    why = f"{meter.label} ({told_rate(*numbers)})"
                    self.pool_edges.append(Edge(before[-room if burst is None else -1], entry.owner, "rate", why))
            before.append(entry.owner)

    def _look_who_waits(self) -> None:
        """Who is ready and was not let in. Within a run only a limit can be the reason: the plan keeps the order."""
        ledger = self._gate.ledger
        blockers = [(one, ledger.blocker(wants)) for one, wants in self._ready.items() if one not in self._blocked]
        self._blocked.update({index: _told(pool) for index, pool in blockers if isinstance(pool, Pool)})


def _told(pool: Pool[Lot[int]]) -> str:
    """`pool crm (limit 2)`, `limit of tool fetch (1)`."""
    number = pool.declared if pool.label.startswith("limit") else f"limit {pool.declared}"
    return f"{pool.label} ({number})"


def _hard_edges(
    calls: Sequence[Seen], plan: Plan, runs: Mapping[int, int], shared: Mapping[int, int]
) -> Iterator[Edge]:
    """What the plan keeps in order, between calls that run; what the run of another one answers waits as that does."""
    held: dict[int, dict[str, int]] = {}
    for before, after, kind in plan.edges():
        if before not in runs or after not in runs or after in shared:
            continue
        if kind == "needs":
            yield Edge(before, after, "needs", "needs")
            continue
        earlier, later = calls[before].wants, calls[after].wants
        assert earlier is not None
        assert later is not None
        if before not in held:
            held[before] = dict(earlier.holds)
        yield Edge(before, after, *_reason(held[before], earlier, later))


def _behind(calls: Sequence[Seen], plan: Plan, runs: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """For each call the nearest ones before it that would go into the durable queue: it would go there behind them."""
    befores: dict[int, list[int]] = {}
    for before, after, _ in islice(plan.edges(), MAX_EDGES + 1):
        if before in runs and after in runs:
            befores.setdefault(after, []).append(before)
    found: dict[int, tuple[int, ...]] = {}
    for index in sorted(befores, key=lambda one: (runs[one], one)):  # whoever comes before it starts earlier
        nearest: dict[int, None] = {}
        for before in befores[index]:
            nearest.update(dict.fromkeys((before,) if calls[before].defers else found.get(before, ())))
        if nearest:
            found[index] = tuple(sorted(nearest))
    return found


def _reason(held: Mapping[str, int], earlier: Wants[Lot[int]], later: Wants[Lot[int]]) -> tuple[EdgeKind, str, str]:
    """What two calls conflict on: a resource, told by what was declared, or else the order of tools that have none."""
    order = ""
    for key, mode in later.holds:
        other = held.get(key)
        if other is None or COMPATIBLE[other][mode]:
            continue
        label = later.labels[key]
        if not key.startswith(ROOT):
            first, second = _verb(other), _verb(mode)
            of = earlier.labels[key]
            detail = f"{first}, then {second}" if of == label else f"{first} {of}, then {second} {label}"
            return "resource", f"resource {label}", detail
        order = order or label
    return "order", order, ""


def _verb(mode: int) -> str:
    return "write" if mode in (IX, X) else "read"


def _links(calls: Sequence[Seen], plan: Plan, runs: Mapping[int, int], shared: Mapping[int, int]) -> list[Edge]:
    """The same as the plan keeps it: with junctions, so that the number of links is that of holds and not of pairs.

    What is told of a junction is told of one call on either side of it: all others are kept in order for the same key.
    """
    size = plan.size
    into: dict[int, list[int]] = {}  # the calls before each junction
    links: list[Edge] = []
    behind = _followers(plan)
    for index in range(size):
        if index not in runs:
            continue
        if index not in shared:
            links += [Edge(before, index, "needs", "needs") for before in plan.needed(index) if before in runs]
        for node in dict.fromkeys(behind[index]):
            if node >= size:
                into.setdefault(node, []).append(index)
            elif node in runs and node not in shared:
                links.append(_after(calls, index, index, node, node))
    for junction, befores in into.items():
        out = [index for index in behind[junction] if index in runs and index not in shared]
        if len(befores) == 1:
            links += [_after(calls, befores[0], befores[0], after, after) for after in out]
            continue
        links += [_after(calls, before, before, junction, after) for before in befores for after in out[:1]]
        links += [_after(calls, junction, befores[0], after, after) for after in out]
    return links


def _followers(plan: Plan) -> list[list[int]]:
    """For each node of the plan those that follow it in order; those that need its result are left out."""
    needing = [0] * (plan.size + plan.junction_count)
    for index in range(plan.size):
        for before in plan.needed(index):
            needing[before] += 1
    return [[*islice(plan.nexts(node), count, None)] for node, count in enumerate(needing)]  # they come first


def _after(calls: Sequence[Seen], before: int, earlier: int, after: int, later: int) -> Edge:
    """A link between two nodes, told by a pair of calls that it keeps in order."""
    first, second = calls[earlier].wants, calls[later].wants
    assert first is not None
    assert second is not None
    return Edge(before, after, *_reason(dict(first.holds), first, second))


def _longest_chain(
    plan: Plan, runs: Mapping[int, int], shared: Mapping[int, int], estimates: Sequence[float] | None
) -> tuple[tuple[int, ...], float | None]:
    """The longest chain of calls each of which waits for the one before, whatever the limits; and how long it takes.

    Junctions, and calls that do not run, take no time and pass on what they wait for. So do those that the run of
    another one answers, and they wait for that.
    """
    size = plan.size
    total = size + plan.junction_count
    waits: list[list[int]] = [[] for _ in range(total)]
    passes: list[list[int]] = [[] for _ in range(total)]
    for index in range(size):
        if index in runs:  # what does not run waits for nobody's result
            waits[index] += plan.needed(index)
        if index in shared:
            waits[index].append(shared[index])
    for node, behind in enumerate(_followers(plan)):
        for after in behind:
            waits[after].append(node)
    for node, befores in enumerate(waits):
        for before in befores:
            passes[before].append(node)
    left = [len(befores) for befores in waits]
    length = [(0.0, 0)] * total  # how long the longest chain up to a node is, and of how many calls
    latest = [-1] * total
    todo = deque(node for node, count in enumerate(left) if not count)
    while todo:
        node = todo.popleft()
        for before in waits[node]:
            if length[before] >= length[node]:
                length[node], latest[node] = length[before], before
        if node in runs and node not in shared:
            longest, hops = length[node]
            length[node] = longest + (1.0 if estimates is None else estimates[node]), hops + 1
        for after in passes[node]:
            left[after] -= 1
            if not left[after]:
                todo.append(after)
    node = max((index for index in runs if index not in shared), key=lambda index: (length[index], index), default=-1)
    lasts = None if estimates is None or node < 0 else round(length[node][0], 6)
    chain = []
    while node >= 0:
        if node in runs and node not in shared:
            chain.append(node)
        node = latest[node]
    return tuple(reversed(chain)), lasts


def _wanted(calls: Sequence[Seen]) -> Iterator[Edge]:
    """What the calls of a plan need that cannot be followed, as far as there are such calls."""
    where = {one.call.id: index for index, one in reversed(list(enumerate(calls))) if one.call.id}
    for index, one in enumerate(calls):
        needs = one.call.needs
        for name in dict.fromkeys((needs,) if isinstance(needs, str) else needs):
            if name in where:
                yield Edge(where[name], index, "needs", "needs")


def _id(one: Seen) -> str:
    return str(one.call.id)[:ID_CHARACTERS]


def _spends(asks: Iterable[Asks | None]) -> dict[str, float]:
    """What calls take of budgets together."""
    sums: dict[str, int] = {}
    for one in asks:
        for unit, amount in one.some if one is not None else ():
            sums[unit] = sums.get(unit, 0) + amount
    return {unit: number(amount) for unit, amount in sums.items()}


def _permits(wants: Wants[Lot[int]]) -> dict[str, int]:
    return {limit_name(pool.key): units for pool, units in wants.pools}


def _rates(wants: Iterable[Wants[Lot[int]] | None]) -> tuple[RateInForce, ...]:
    """The rate limits in which these calls count."""
    meters = dict.fromkeys(meter for one in wants if one is not None for meter in one.meters)
    return tuple(
        RateInForce(
            limit_name(meter.key.removeprefix("rate:")), told_rate(*meter.pace.numbers), meter.scope, meter.enforced
        )
        for meter in meters
        if meter.pace.numbers is not None
    )


def _limits(gate: Gate[int], wants: Iterable[Wants[Lot[int]] | None]) -> tuple[Limit, ...]:
    """The limits that these calls want of, in the order in which the tower has them."""
    used = {key for one in wants if one is not None for key, _ in one.permits}
    return tuple(
        Limit(limit_name(key), pool.declared, pool.scope, pool.limit != UNLIMITED)
        for key, pool in gate.ledger.pools.items()
        if key in used
    )
