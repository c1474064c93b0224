"""Shared by the tests of gate and ledger: small worlds, a naive model that watches them, and an explorer.

A `World` is one gate with a few calls, each of which may be offered, finished, orphaned, cancelled or withdrawn. After each
event the `World` compares the gate with what a naive model says, counted from the outside: who holds what is added up from
those that were granted and have not finished; who was passed how often is counted grant by grant; when a wait may be over is
read off the instants at which its own run held what it waits for.

`explore` goes through every order of events of a world, and remembers the states that it has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from towerman.calls import COMPATIBLE, IS, IX, Hold, S, X
from towerman.gate import DONE, GRANTED, NEVER, PARKED, REJECTED, Entry, Flow, Gate, Lot
from towerman.ledger import Ledger, Pool, State, Wants

MODES = {"IS": IS, "IX": IX, "S": S, "X": X}
OWN = "own"
"""In the permits of a call: the pool of its own run, of scope "run"."""

Event = tuple[str, int]
"""(offer | all | finish | orphan | cancel | withdraw, call), (tick | step, 0)."""


@dataclass(frozen=True)
class One:
    """A call of a case: `permits` as "P Q2" (two of Q), `holds` as "k:X p:IX"."""

    flow: int
    permits: str = ""
    holds: str = ""
    wait: bool = True
    max_wait: float = NEVER
    priority: int = 0
    bound: int | None = None


@dataclass(frozen=True)
class Case:
    """A small world: `pools` as "P1 Q2" (limits), or "P2/1" (limit 2, one in reserve).

    Args:
        name: what it is about.
        pools: as above.
        calls: the calls, those of one flow in the order in which it offers them.
        passes: of the gate.
        window: calls of a flow that may run at once; also the limit of its own pool.
        orphans: running calls may become orphans.
        cancels: waiting calls may be cancelled or withdrawn.
        steps: how often the clock may move by one without a tick.
        limits: instants after which a flow may start nothing.
        together: all calls of a flow may be offered in one event too.
    """

    name: str
    pools: str
    calls: tuple[One, ...]
    passes: int = 2
    window: int = 2
    orphans: bool = True
    cancels: bool = True
    steps: int = 0
    limits: tuple[float, ...] = ()
    together: bool = False


@cache
def permits_of(text: str) -> tuple[tuple[str, int], ...]:
    """(name, number) for each word: "P Q2" is P once and Q twice."""
    words = [(word.rstrip("0123456789"), word) for word in text.split()]
    return tuple((name, int(word[len(name) :] or 1)) for name, word in words)


@cache
def holds_of(text: str) -> tuple[Hold, ...]:
    """(key, mode) for each word of "k:X p:IX"."""
    return tuple((key, MODES[mode]) for key, mode in (word.split(":") for word in text.split()))


def make_ledger(pools: str, flows: int = 0, window: int = 1) -> Ledger[Lot[int]]:
    """A ledger with the pools of a case, and one pool for each flow."""
    ledger: Ledger[Lot[int]] = Ledger()
    for word in pools.split():
        plain, _, reserve = word.partition("/")
        for name, limit in permits_of(plain):
            ledger.add_pool(Pool(name, f"pool {name}", limit, reserve=int(reserve or 0)))
    for flow in range(flows):
        ledger.add_pool(Pool(f"{OWN}:{flow}", "run", window, scope="run"))
    return ledger


def wants_of(ledger: Ledger[Lot[int]], one: One) -> Wants[Lot[int]]:
    """What a call of a case wants."""
    permits = tuple((f"{OWN}:{one.flow}" if key == OWN else key, units) for key, units in permits_of(one.permits))
    bounds = () if one.bound is None else (("q", one.bound),)
    return ledger.look_up(
        Wants(
            one.flow,
            "tool",
            permits,
            holds_of(one.holds),
            priority=one.priority,
            wait=one.wait,
            max_wait=one.max_wait,
            bounds=bounds,
        )
    )


class World:
    """One gate, the calls of a case, and a naive model beside it."""

    def __init__(self, case: Case, kind: type[Gate[int]] = Gate) -> None:
        flows = 1 + max(one.flow for one in case.calls)
        self.case = case
        self.now = 0.0
        self.steps = 0
        self.late = 0
        self.ledger = make_ledger(case.pools, flows, case.window)
        self.gate = kind(self.ledger, passes=case.passes)
        limits = [*case.limits, *[NEVER] * flows]
        self.flows: list[Flow[int]] = [self.gate.open_flow(flow, case.window, limits[flow]) for flow in range(flows)]
        shared: dict[One, Wants[Lot[int]]] = {}
        self.wants = [shared.setdefault(one, wants_of(self.ledger, one)) for one in case.calls]
        self.entries: dict[int, Entry[int]] = {}  # decided, or parked
        self.behind: set[int] = set()  # offered, not handed in
        self.gone: set[int] = set()  # withdrawn
        self.ready: dict[int, float] = {}
        self.passed: dict[int, int] = {}
        self.stood: dict[int, float] = {}  # the last instant at which a call waited for its own siblings

    # ------------------------------------------------------------------ events

    def offered(self, call: int) -> bool:
        return call in self.entries or call in self.behind or call in self.gone

    def open_events(self) -> list[Event]:
        """What may happen next."""
        case, events = self.case, list[Event]()
        for flow in range(len(self.flows)):
            left = [call for call, one in enumerate(case.calls) if one.flow == flow and not self.offered(call)]
            if left:
                events.append(("offer", left[0]))
                if case.together and len(left) > 1:
                    events.append(("all", left[0]))
        for call, entry in sorted(self.entries.items()):
            if entry.status == GRANTED:
                events.append(("finish", call))
                if case.orphans and not entry.orphan:
                    events.append(("orphan", call))
            elif entry.status == PARKED and case.cancels:
                events.append(("cancel", call))
        if case.cancels:
            events += [("withdraw", call) for call in sorted(self.behind)]
        if self.now < self.gate.wake_at < NEVER or self.gate.wake_at <= self.now:
            events.append(("tick", 0))
        if self.steps < case.steps:
            events.append(("step", 0))
        return events

    def apply(self, event: Event, *, check: bool = True) -> None:
        """Let it happen, and check everything afterwards."""
        word, call = event
        gate, now = self.gate, self.now
        before = {one for one, entry in self.entries.items() if entry.status == PARKED}
        heads = self._heads()
        if word in ("offer", "all"):
            flow = self.case.calls[call].flow
            calls = [call]
            if word == "all":
                calls = [one for one in range(call, len(self.wants)) if self.case.calls[one].flow == flow]
            for one in calls:
                self.ready[one] = now
            self.behind.update(calls)
            decided = gate.offer(self.flows[flow], [(self.wants[one], one, now) for one in calls], now)
        elif word == "finish":
            decided = gate.finish(self.entries[call], now)
            self._late(gate.finish(self.entries[call], now), gate.cancel(self.entries[call], now))
        elif word == "orphan":
            decided = gate.orphan(self.entries[call], now)
            self._late(gate.orphan(self.entries[call], now), gate.cancel(self.entries[call], now))
        elif word == "cancel":
            decided = gate.cancel(self.entries[call], now)
            self._late(gate.cancel(self.entries[call], now), gate.finish(self.entries[call], now))
            assert self.entries[call] in decided, "the cancelled one was not told"
            assert self.entries[call].rejection.code == "cancelled"
        elif word == "withdraw":
            decided = []
            assert gate.withdraw(self.flows[self.case.calls[call].flow], lambda owner: owner == call) == [call]
            self.behind.remove(call)
            self.gone.add(call)
        elif word == "tick":
            now = self.now = max(now, gate.wake_at)
            decided = gate.tick(now)
            assert gate.wake_at > now, "the tick left something due"
        else:
            assert word == "step"
            self.steps += 1
            self.now += 1
            decided = []
        self._decisions(decided, before, heads)
        self._watch_clocks()
        if check:
            self._check(ticked=word == "tick")

    def _late(self, *decided: list[Entry[int]]) -> None:
        self.late += len(decided)
        assert not any(decided), "a late event decided something"
        assert self.gate.statistics()["late_events"] == self.late, "a late event was not counted"

    def _heads(self) -> dict[int, tuple[str, int]]:
        """The unpromoted who stand first in their bay, with the name of the state and their class."""
        heads: dict[int, tuple[str, int]] = {}
        for state in self.ledger.states_with_lots():
            assert state.lot is not None
            for bay in state.lot.bays.values():
                rank = bay.head()
                if rank is not None:
                    heads[rank[4].owner] = (state.key, rank[0])
        return heads

    # ------------------------------------------------------------------ the naive model

    def _decisions(self, decided: list[Entry[int]], before: set[int], heads: dict[int, tuple[str, int]]) -> None:
        for flow in self.flows:
            for entry in self.gate.parked_of(flow):
                if entry.owner not in self.entries:
                    self.behind.remove(entry.owner)
                    self.entries[entry.owner] = entry
        for entry in decided:
            call = entry.owner
            known = self.entries.get(call)
            assert known is None or (known is entry and call in before), f"call {call} was decided twice"
            before.discard(call)
            self.behind.discard(call)
            self.entries[call] = entry
            if entry.status == GRANTED:
                waited = self.now - max(entry.since, self.stood.get(call, 0.0))
                assert known is None or waited < self.case.calls[call].max_wait or self.stood.get(call) == self.now, (
                    f"call {call} started although its wait was over"
                )
                self._granted(call, heads)
            else:
                assert entry.status == REJECTED, f"call {call} was told before it was decided"
                self._rejected(call, entry)

    def _granted(self, call: int, heads: dict[int, tuple[str, int]]) -> None:
        one = self.case.calls[call]
        touched = {key for key, _ in (*self.wants[call].permits, *self.wants[call].holds)}
        for other, (key, klass) in heads.items():
            waiter = self.entries[other]
            if waiter.status == PARKED and key in touched and self.case.calls[other].flow != one.flow:
                assert waiter.rank is not None
                if -one.priority < klass:
                    self.passed[other] = self.passed.get(other, 0) + 1
        for other in sorted(self.behind):  # the same want of the same run: first come, first served
            assert other > call or self.wants[other] is not self.wants[call], f"call {call} went before call {other}"
        assert self.now < self.flows[one.flow].limit, f"call {call} started after its run's deadline"

    def _rejected(self, call: int, entry: Entry[int]) -> None:
        one, code = self.case.calls[call], entry.rejection.code
        waited = self.now - max(self.ready[call], self.stood.get(call, 0.0))
        if code == "wait_timeout":
            assert waited >= one.max_wait, f"call {call} was given up after {waited}"
        elif code == "deadline_exceeded":
            assert self.now >= self.flows[one.flow].limit
        elif code == "concurrency_limit":
            assert not one.wait or any(units > pool.limit - pool.reserve for pool, units in self.wants[call].pools)
        elif code == "queue_full":
            assert one.bound is not None
            assert one.bound <= sum(self.entries[other].queued for other in self._parked()), "the queue is not full"
        else:
            assert code == "cancelled"

    def _parked(self) -> set[int]:
        return {call for call, entry in self.entries.items() if entry.status == PARKED}

    def _free(self, wants: Wants[Lot[int]], holders: list[int]) -> bool:
        for pool, units in wants.pools:
            held = sum(more for one in holders for that, more in self.wants[one].pools if that is pool)
            if held + units > (pool.limit if wants.priority > 0 else pool.limit - pool.reserve):
                return False
        taken = [hold for one in holders for hold in self.wants[one].holds]
        return all(COMPATIBLE[mode][other] for key, mode in wants.holds for that, other in taken if that == key)

    def _check(self, *, ticked: bool) -> None:
        gate = self.gate
        gate.validate()
        holders = [call for call, entry in self.entries.items() if entry.status == GRANTED]
        for key, pool in self.ledger.pools.items():
            held = sum(units for call in holders for that, units in self.wants[call].permits if that == key)
            assert held == pool.held <= pool.limit, f"{pool} should hold {held}"
        for call in holders:
            rest = [other for other in holders if other != call]
            taken = [hold for other in rest for hold in self.wants[other].holds]
            for key, mode in self.wants[call].holds:
                assert all(COMPATIBLE[mode][more] for that, more in taken if that == key), f"call {call} is not alone"
        parked = self._parked()
        assert parked == {entry.owner for flow in self.flows for entry in gate.parked_of(flow)}, "somebody is forgotten"
        assert self.behind == {
            one[1] for flow in self.flows for line in flow.lines.values() for one in line.backlog or ()
        }, "the backlog is not what was offered"
        assert holders or not (parked or self.behind), f"deadlock: nothing runs, {sorted(parked)} wait"
        claims = gate.statistics()["claimants"]
        for call in parked:
            assert claims or not self._free(self.wants[call], holders), f"call {call} waits for nothing"
            entry = self.entries[call]
            stood = self.stood.get(call, 0.0)
            over = stood < self.now and self.now - max(entry.since, stood) >= self.case.calls[call].max_wait
            assert not (ticked and over), f"call {call} waits too long"
            passed = self.passed.get(call, 0)
            rank = entry.line.bay.head()
            if rank is not None and rank[4] is entry:
                assert passed < self.case.passes, f"call {call} was passed {passed} times and is not promoted"

    def _watch_clocks(self) -> None:
        """Note who waits for something that a running call of its own run holds."""
        for flow in self.flows:
            for bay, line in flow.lines.items():
                need = bay.state.key
                running = [call for call, entry in self.entries.items() if entry.status == GRANTED and not entry.orphan]
                if any(
                    self.case.calls[call].flow == flow.number
                    and any(need == key for key, _ in (*self.wants[call].permits, *self.wants[call].holds))
                    for call in running
                ):
                    for call in [*(entry.owner for entry in line.parked), *(one[1] for one in line.backlog or ())]:
                        self.stood[call] = self.now

    def settled(self) -> bool:
        """Everything that was to happen has happened."""
        return not self.behind and all(
            call in self.gone or (call in self.entries and self.entries[call].status in (REJECTED, DONE))
            for call in range(len(self.wants))
        )

    def check_empty(self) -> None:
        """All is free, nothing is remembered, and the whole capacity can be taken again."""
        check_empty(self.gate)
        for flow in self.flows:
            self.gate.close_flow(flow)
        self.gate.validate()

    # ------------------------------------------------------------------ telling states apart

    def fingerprint(self) -> tuple[object, ...]:
        """All that decides what can happen from here, with instants, tags and numbers made relative."""
        gate, now = self.gate, self.now
        served = gate._served
        ranked = sorted((entry.rank for call in self._parked() if (entry := self.entries[call]).rank is not None))
        order = {rank[4].owner: place for place, rank in enumerate(ranked)}
        promoted = sorted(rank[1] for rank in ranked if rank[1] != NEVER)
        calls: list[object] = []
        for call in range(len(self.wants)):
            entry = self.entries.get(call)
            if entry is None:
                calls.append("behind" if call in self.behind else "gone" if call in self.gone else "")
            elif entry.status == PARKED:
                rank, bay = entry.rank, entry.line.bay
                assert rank is not None
                first = promoted.index(rank[1]) if rank[1] != NEVER else -1
                passes = entry.passes + (bay.passes if rank[1] == NEVER else 0)
                clock = entry.clock - now if entry.clock != NEVER else NEVER
                tag = max(rank[2] - served, 0.0)
                calls.append(
                    (bay.state.key, bay.need, order[call], rank[0], first, round(tag, 6), passes, clock, entry.queued)
                )
                calls.append((entry.deadline - now, self.passed.get(call, 0), self.stood.get(call, now) - now))
            elif entry.status == GRANTED:
                calls.append("orphan" if entry.orphan else "runs")
            else:
                calls.append("over")
        flows: list[object] = []
        for flow in self.flows:
            flows.append((round(max(flow.tag - served, 0.0), 6), flow.limit - now))
            for bay, line in flow.lines.items():
                behind = tuple(one[1] for one in line.backlog or ())
                flows.append((bay.state.key, bay.need, tuple(entry.owner for entry in line.parked), behind))
                flows.append((line.freed - now, *(self.stood.get(one, now) - now for one in behind)))
        return (*calls, "|", *flows, gate.wake_at - now, self.steps, self.now if self.case.limits else 0)


def check_empty(gate: Gate[int]) -> None:
    """All is free, nothing is remembered, and the whole capacity can be taken again."""
    gate.validate()
    ledger = gate.ledger
    assert ledger.counts() == (0, 0), "something is still held"
    assert not ledger._nodes, "a node is remembered"
    assert not ledger.states_with_lots(), "a lot is remembered"
    assert gate._deadlines.records == 0, "a deadline is remembered"
    assert not gate._queued, "a queue counts somebody"
    statistics = gate.statistics()
    assert not any(statistics[name] for name in ("running", "parked", "behind", "orphans", "claimants")), statistics
    for key, pool in ledger.pools.items():
        whole: Wants[Lot[int]] = ledger.look_up(Wants(-1, "all", ((key, pool.limit),), priority=1))
        assert ledger.claim(whole) is None, f"{pool} cannot be taken whole"
        ledger.give(whole)
    ledger.validate()


class Violation(AssertionError):
    """What went wrong, and the events that led there."""


def explore(
    case: Case,
    kind: type[Gate[int]] = Gate,
    *,
    most: int = 1_000_000,
    make: Callable[[Case, type[Gate[int]]], World] = World,
) -> int:
    """Go through every order of events of a case; returns how many states were seen.

    Raises:
        Violation: with the events that led to it.
    """
    seen: set[tuple[object, ...]] = set()
    path: list[Event] = []

    def told(error: Exception) -> Violation:
        return Violation(f"{case.name}: {' '.join(f'{word}{call}' for word, call in path)}: {type(error).__name__} {error}")

    def visit(world: World) -> None:
        mark = world.fingerprint()
        if mark in seen or len(seen) >= most:
            return
        seen.add(mark)
        events = world.open_events()
        if world.settled():
            world.check_empty()
            return
        assert events, "hang: nothing can happen any more"
        for place, event in enumerate(events):
            if place:
                world = make(case, kind)
                for old in path:
                    world.apply(old, check=False)
            path.append(event)
            try:
                world.apply(event)
                visit(world)
            except Violation:
                raise
            except Exception as error:
                raise told(error) from error
            path.pop()

    visit(make(case, kind))
    return len(seen)


def states_of(gate: Gate[int]) -> Iterator[State[Lot[int]]]:
    """Every pool and node of a gate's ledger."""
    yield from gate.ledger.pools.values()
    yield from gate.ledger._nodes.values()
