"""Shared by the tests of gate and ledger: small worlds, a naive model that watches them, and an explorer.

A `World` is one gate and some calls, each of which may be offered, finished, orphaned, cancelled or withdrawn. After
each
event it compares the gate with what a naive model says, counted from the outside: who holds what is added up from
those that
were granted and have not finished; who was passed how often is counted grant by grant; when a wait may be over is read
off
the instants at which the call's own run held what it waits for. The model is slow and plain, and shares no code with
the gate.

`explore` goes through every order of the events of a case, and remembers the states that it has seen.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import FrameType
from typing import Generic, TypeVar

from towerman.calls import COMPATIBLE, IS, IX, Hold, S, X
from towerman.gate import DONE, GRANTED, NEVER, PARKED, REJECTED, Entry, Flow, Gate, Lot
from towerman.ledger import Ledger, Pool, State, Wants
from towerman.lots import Line

OwnerT = TypeVar("OwnerT")

MODES = {"IS": IS, "IX": IX, "S": S, "X": X}
OWN = "own"
"""In the permits of a call: the pool of its own run, of scope "run"."""

Event = tuple[str, int]
"""(offer | all | finish | orphan | cancel | withdraw, call), (tick | step, 0), (set, place in the case's `sets`)."""

Key = tuple[int, float, float, int]
"""A rank without its entry."""


@dataclass(frozen=True)
class One:
    """A call: `permits` as "P Q2" (two of Q), `holds` as "k:X p:IX".

    Args:
        after: the call of its run whose end makes it ready.
        urgent: its place in the order of its run's plan; the least goes first.
    """

    flow: int
    permits: str = ""
    holds: str = ""
    wait: bool = True
    max_wait: float = NEVER
    priority: int = 0
    bound: int | None = None
    after: int | None = None
    urgent: float = 0.0


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
        limits: instants from which on a flow may start nothing.
        together: all calls of a flow may be offered in one event too.
        rows: then they are offered in a row, as a batch is.
        sets: limits that come into force at any time, each once: "P1" as in `pools`, "own:0=1" for a flow's window.
    """

    name: str
    pools: str
    calls: tuple[One, ...] = ()
    passes: int = 2
    window: int = 2
    orphans: bool = True
    cancels: bool = True
    steps: int = 0
    limits: tuple[float, ...] = ()
    together: bool = False
    rows: bool = False
    flows: int = 0
    sets: tuple[str, ...] = ()


@cache
def permits_of(text: str) -> tuple[tuple[str, int], ...]:
    """(name, number) for each word: "P Q2" is P once and Q twice."""
    words = [(word.rstrip("0123456789"), word) for word in text.split()]
    return tuple((name, int(word[len(name) :] or 1)) for name, word in words)


@cache
def holds_of(text: str) -> tuple[Hold, ...]:
    """(key, mode) for each word of "k:X p:IX"."""
    return tuple((key, MODES[mode]) for key, mode in (word.split(":") for word in text.split()))


def make_ledger(pools: str, flows: int = 0, window: int = 1) -> Ledger[Lot[OwnerT]]:
    """A ledger with the pools of a case, and one pool for each flow."""
    ledger: Ledger[Lot[OwnerT]] = Ledger()
    for word in pools.split():
        plain, _, reserve = word.partition("/")
        for name, limit in permits_of(plain):
            ledger.add_pool(Pool(name, f"pool {name}", limit, reserve=int(reserve or 0)))
    for flow in range(flows):
        ledger.add_pool(Pool(f"{OWN}:{flow}", "run", window, scope="run"))
    return ledger


def wants_of(ledger: Ledger[Lot[OwnerT]], one: One, *, root: bool = False) -> Wants[Lot[OwnerT]]:
    """What a call wants of this ledger; with `root`, intentions on the node "root" above all keys, too."""
    holds = holds_of(one.holds)
    if root and holds and all(key != "root" for key, _ in holds):
        holds = (("root", IX if any(mode in (IX, X) for _, mode in holds) else IS), *holds)
    permits = tuple((f"{OWN}:{one.flow}" if key == OWN else key, units) for key, units in permits_of(one.permits))
    return ledger.look_up(
        Wants(
            one.flow,
            "tool",
            permits,
            holds,
            priority=one.priority,
            wait=one.wait,
            max_wait=one.max_wait,
            bounds=() if one.bound is None else (("q", one.bound),),
        )
    )


def share_pools(wants: Wants[Lot[OwnerT]], one: One, tools: dict[One, Wants[Lot[OwnerT]]]) -> Wants[Lot[OwnerT]]:
    """Calls of one tool and one run have their pools in common, whatever they hold."""
    first = tools.setdefault(replace(one, holds="", after=None, urgent=0.0), wants)
    wants.pools, wants.pool_states = first.pools, first.pool_states
    return wants


class Listed(Generic[OwnerT]):
    """A batch, as the gate sees it: what each call wants, and its name."""

    def __init__(self, wants: Sequence[Wants[Lot[OwnerT]] | None], owners: Sequence[OwnerT]) -> None:
        self.wants = list(wants)
        self.owner = owners.__getitem__


def behind_of(line: Line[OwnerT]) -> list[OwnerT]:
    """Who stands in the backlog of a line, in order."""
    return [one[1] for one in line.backlog.everyone()] if line.backlog is not None else []


def check_empty(gate: Gate[OwnerT]) -> None:
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
        whole: Wants[Lot[OwnerT]] = ledger.look_up(Wants(-1, "all", ((key, pool.limit),), priority=1))
        assert ledger.claim(whole) is None, f"{pool} cannot be taken whole"
        ledger.give(whole)
    ledger.validate()


@cache
def _telling(kind: type[Gate[int]]) -> type[TellingGate]:
    return type(kind.__name__, (TellingGate, kind), {})


class TellingGate(Gate[int]):
    """Counts for itself who is passed, at the moment of the grant."""

    def __init__(self, ledger: Ledger[Lot[int]], *, passes: int) -> None:
        super().__init__(ledger, passes=passes)
        self.passed: Counter[int] = Counter()

    def _grant(self, entry: Entry[int], klass: int, promotion: float, tag: float, number: int) -> None:
        """Whoever is first in a bay for something of it, and of another flow, is passed, unless it was not its turn."""
        for key, _ in (*entry.wants.permits, *entry.wants.holds):
            state = self.ledger.pools.get(key) or self.ledger.node(key)
            for bay in state.lot.bays.values() if state is not None and state.lot is not None else ():
                rank = bay.head()
                if rank is None or rank[4].flow is entry.flow:
                    continue
                its_turn = rank[0] == klass and rank[:4] > (klass, promotion, tag, number)
                self.passed[rank[4].owner] += not its_turn
        super()._grant(entry, klass, promotion, tag, number)

    def _move(self, entry: Entry[int], blocker: State[Lot[int]], now: float) -> None:
        """One that is tried in vain is passed, unless its own siblings are in the way."""
        self.passed[entry.owner] += not any(
            blocker.key in dict(one.wants.permits + one.wants.holds) for one in entry.flow.running
        )
        super()._move(entry, blocker, now)


class World:
    """One gate, the calls of a case and those that are added, and a naive model beside them.

    Attributes:
        calls: what each call is, by number; those that are over are forgotten.
        entries: those that are parked or run.
        behind: those that were offered and not handed in.
        over: those that were refused or have ended.
    """

    def __init__(self, case: Case, kind: type[Gate[int]] = Gate) -> None:
        flows = max([case.flows, *(one.flow + 1 for one in case.calls)])
        self.case = case
        self.now = 0.0
        self.steps = 0
        self.late = 0
        self.added = 0
        self.root = False
        self.ledger = make_ledger(case.pools, flows, case.window)
        self.gate = _telling(kind)(self.ledger, passes=case.passes)
        limits = [*case.limits, *[NEVER] * flows]
        self.flows: list[Flow[int]] = [self.gate.open_flow(flow, case.window, limits[flow]) for flow in range(flows)]
        self.calls: dict[int, One] = {}
        self.wants: dict[int, Wants[Lot[int]]] = {}
        self.touches: dict[int, set[str]] = {}
        self.shared: dict[One, Wants[Lot[int]]] = {}
        self.tools: dict[One, Wants[Lot[int]]] = {}
        self.entries: dict[int, Entry[int]] = {}
        self.behind: set[int] = set()
        self.over: set[int] = set()
        self.siblings: dict[int, set[int]] = {}  # who ran before the event, by flow
        self.ready: dict[int, float] = {}
        self.stood: dict[int, float] = {}  # the last instant at which what it waits for was held by its own run
        self.joined: dict[int, float] = {}  # ... at which anything that it wants was
        self.sets = list(case.sets)
        self.set: list[int] = []  # of the case's changes, those that have come
        self.over_limit: dict[str, int] = {}  # the most that may be held of a pool whose limit was lowered
        for one in case.calls:
            self.add(one)

    def add(self, one: One) -> int:
        """One more call, which may be offered then; calls that are the same share what they want."""
        call = self.added
        self.added += 1
        self.calls[call] = one
        self._want(call)
        return call

    def _want(self, call: int) -> Wants[Lot[int]]:
        one = self.calls[call]
        wants = self.shared.get(one)
        if wants is None:
            wants = self.shared[one] = share_pools(wants_of(self.ledger, one, root=self.root), one, self.tools)
        self.wants[call] = wants
        self.touches[call] = {key for key, _ in (*wants.permits, *wants.holds)}
        return wants

    def expand(self) -> None:
        """From now on there may be calls for all that is below "root": the others say that they are below it."""
        old = {wants: one for one, wants in self.shared.items()}
        self.shared.clear()
        self.root = True
        calls = {old[wants]: call for call, wants in self.wants.items()}
        self.gate.expand(lambda wants: self._want(calls[old[wants]]))
        for call in self.calls:
            self._want(call)
        self.check()

    # ------------------------------------------------------------------ events

    def running(self) -> list[int]:
        return [call for call, entry in self.entries.items() if entry.status == GRANTED]

    def parked(self) -> list[int]:
        return [call for call, entry in self.entries.items() if entry.status == PARKED]

    def unoffered(self, flow: int) -> list[int]:
        return [
            call
            for call, one in self.calls.items()
            if one.flow == flow and one.after is None and call not in self.entries and call not in self.behind
        ]

    def open_events(self) -> list[Event]:
        """What may happen next."""
        case, events = self.case, list[Event]()
        for flow in range(len(self.flows)):
            left = self.unoffered(flow)
            if left:
                events.append(("offer", left[0]))
                if case.together and len(left) > 1:
                    events.append(("all", left[0]))
        for call in sorted(self.running()):
            events.append(("finish", call))
            if case.orphans and not self.entries[call].orphan:
                events.append(("orphan", call))
        if case.cancels:
            events += [("cancel", call) for call in sorted(self.parked())]
            events += [("withdraw", call) for call in sorted(self.behind)]
        if self.gate.wake_at != NEVER:
            events.append(("tick", 0))
        if self.steps < case.steps:
            events.append(("step", 0))
        events += [("set", place) for place in range(len(self.sets)) if place not in self.set]
        return events

    def apply(self, event: Event, *, check: bool = True) -> list[Entry[int]]:
        """Let it happen, and check what came of it; `check=False` leaves out what looks at everybody."""
        word, call = event
        gate, now = self.gate, self.now
        self.siblings = {flow.number: {entry.owner for entry in flow.running} for flow in self.flows if flow.running}
        before: dict[int, Key] = {one: entry.rank[:4] for one, entry in self.entries.items() if entry.rank is not None}
        claimed = {one: before[one] for one in self._claimants()} if check else {}
        decided: list[Entry[int]] = []
        self.fresh = word in ("offer", "all") or any(one.after == call for one in self.calls.values())
        if word in ("offer", "all"):
            flow = self.calls[call].flow
            calls = [call] if word == "offer" else self.unoffered(flow)
            self.ready.update(dict.fromkeys(calls, now))
            self.behind.update(calls)
            if self.case.rows and word == "all":
                batch = Listed([self.wants[one] for one in calls], calls)
                decided = gate.offer_row(self.flows[flow], batch, range(len(calls)), now)
            else:
                decided = gate.offer(self.flows[flow], [(self.wants[one], one, now) for one in calls], now)
        elif word == "finish":
            entry = self.entries.pop(call)
            ready = [one for one, that in self.calls.items() if that.after == call]
            self.ready.update(dict.fromkeys(ready, now))
            self.behind.update(ready)
            if ready:
                decided = gate.finish(entry, now, [(self.wants[one], one, now) for one in ready], self.urgency)
            else:
                decided = gate.finish(entry, now)
            self._forget(call)
            self._late(gate.finish(entry, now), gate.cancel(entry, now))
        elif word == "orphan":
            entry = self.entries[call]
            decided = gate.orphan(entry, now)
            self._late(gate.orphan(entry, now), gate.cancel(entry, now))
        elif word == "cancel":
            entry = self.entries[call]
            decided = gate.cancel(entry, now)
            self._late(gate.cancel(entry, now), gate.finish(entry, now))
            assert entry in decided, "the cancelled one was not told"
            assert entry.rejection.code == "cancelled"
        elif word == "withdraw":
            assert gate.withdraw(self.flows[self.calls[call].flow], lambda owner: owner == call) == [call]
            self.behind.remove(call)
            self._forget(call)
        elif word == "tick":
            now = self.now = max(now, gate.wake_at)
            decided = gate.tick(now)
            assert gate.wake_at > now, "the tick left something due"
        elif word == "set":
            self.set.append(call)
            decided = self.reconfigure(self.sets[call])
        else:
            assert word == "step"
            self.steps += 1
            self.now += 1
        started = self._decisions(decided, before)
        for one in started:
            for key, _ in self.wants[one].permits:
                pool = self.ledger.pools[key]
                assert pool.held <= pool.limit, f"call {one} started above the limit of {pool}"
        self._watch_clocks()
        if check:
            if word == "offer" and call in self.entries and self.stood.get(call) == now:
                assert not self.entries[call].queued, f"call {call} waits for its siblings and fills the queue"
            if word != "orphan":
                self._check_claims(claimed, started, before)
            self.check(ticked=word == "tick")
        return decided

    def reconfigure(self, text: str) -> list[Entry[int]]:
        """A limit as in `pools`, or "own:0=1", comes into force."""
        name, _, window = text.partition("=")
        if window:
            key, limit, reserve = name, int(window), 0
        else:
            plain, _, kept = text.partition("/")
            [(key, limit)] = permits_of(plain)
            reserve = int(kept or 0)
        windows = [(self.flows[int(name.partition(":")[2])], limit)] if window else []
        self.over_limit[key] = self.ledger.pools[key].held
        return self.gate.reconfigure([(self.ledger.pools[key], limit, reserve, True)], windows, self.now)

    def change(self, text: str) -> None:
        """A change that the case does not know of."""
        self.sets.append(text)
        self.apply(("set", len(self.sets) - 1))

    def urgency(self, call: int) -> tuple[float, int, int]:
        return (self.calls[call].urgent, 0, call)

    def _forget(self, call: int) -> None:
        """It is over; those who were to come after it never will, unless they have come."""
        self.over.add(call)
        for one in [one for one, that in self.calls.items() if that.after == call and one not in self.ready]:
            self._forget(one)
        for table in (self.calls, self.wants, self.touches, self.ready, self.gate.passed, self.stood, self.joined):
            table.pop(call, None)

    def _late(self, *decided: list[Entry[int]]) -> None:
        self.late += len(decided)
        assert not any(decided), "a late event decided something"
        assert self.gate.statistics()["late_events"] == self.late, "a late event was not counted"

    # ------------------------------------------------------------------ the naive model: decisions

    def _decisions(self, decided: list[Entry[int]], before: dict[int, Key]) -> dict[int, One]:
        """Each call is decided once, and rightly; returns those that started."""
        for flow in self.flows:
            for entry in self.gate.parked_of(flow):
                known = self.entries.get(entry.owner)
                if known is None:
                    self.behind.remove(entry.owner)
                    self.entries[entry.owner] = entry
                elif known is not entry and known.status == DONE:
                    self.entries[entry.owner] = entry  # in one step it stood back, and its turn came again
                    self.gate.passed.pop(entry.owner, None)
        started: dict[int, One] = {}
        told: set[int] = set()
        for entry in decided:
            call = entry.owner
            assert call in before or call in self.behind, f"call {call} was decided twice"
            assert call not in told, f"call {call} was told twice"
            assert entry is self.entries.get(call, entry), f"call {call} is another entry now"
            told.add(call)
            self.behind.discard(call)
            if entry.status == GRANTED:
                self.entries[call] = entry
                started[call] = self.calls[call]
                self._granted(call, entry, call in before, decided)
            else:
                assert entry.status == REJECTED, f"call {call} was told before it was decided"
                self._rejected(call, entry, decided)
                self.entries.pop(call, None)
        for entry in decided:
            if entry.status == REJECTED:
                self._forget(entry.owner)
        for call in [call for call, entry in self.entries.items() if entry.status == DONE]:
            del self.entries[call]  # a more urgent one of its run took its place, and what its place was passed
            self.gate.passed.pop(call, None)
            self.behind.add(call)
        return started

    def _granted(self, call: int, entry: Entry[int], waited_before: bool, decided: list[Entry[int]]) -> None:
        one, flow = self.calls[call], entry.flow
        assert self.now < flow.limit, f"call {call} started after its run's deadline"
        for other in self.behind if self.fresh and not waited_before else ():
            alike = self.wants[other] is self.wants[call] and self.calls[other].urgent == one.urgent
            assert other > call or not alike, f"call {call} came and went before call {other}"
        if waited_before and self.stood.get(call) != self.now:
            joined = any(  # a sibling holds, or was served first in this step: now it waits for that one
                self.touches[call] & self.touches.get(other.owner, set())
                for other in (*flow.running, *decided)
                if other is not entry and other.flow is flow
            )
            waited = self.now - max(entry.since, self.joined.get(call, 0.0))
            assert joined or waited < one.max_wait, f"call {call} started although its wait was over"

    def _rejected(self, call: int, entry: Entry[int], decided: list[Entry[int]]) -> None:
        one, code = self.calls[call], entry.rejection.code
        if code == "wait_timeout":
            waited = self.now - max(self.ready[call], self.stood.get(call, 0.0))
            assert waited >= one.max_wait, f"call {call} was given up after {waited}"
        elif code == "deadline_exceeded":
            assert self.now >= entry.flow.limit
        elif code == "concurrency_limit":
            hopeless = any(units > pool.limit - pool.reserve for pool, units in self.wants[call].pools)
            assert hopeless or not one.wait, f"call {call} was to wait"
        elif code == "queue_full":
            assert one.bound is not None
            queued = sum(self.entries[other].queued for other in self.parked())
            assert one.bound <= queued + len(decided) - 1, "the queue is not full"
            assert self.fresh, f"call {call} stood behind its siblings, and is refused as if it came"
            own = [other.owner for other in entry.flow.running]
            own = [other for other in own if other in self.siblings.get(entry.flow.number, ())]
            held = set[str]().union(*(self.touches[other] for other in own))
            assert not any(entry.rejection.blocker == f"pool {key}" for key in held), "siblings filled the queue"
        else:
            assert code == "cancelled"

    def _watch_clocks(self) -> None:
        """Note who waits for something that a running call of its own run holds."""
        for flow in self.flows:
            if not flow.lines:
                continue
            held = set[str]().union(*(self.touches[entry.owner] for entry in flow.running))
            for bay, line in flow.lines.items():
                for call in [*(entry.owner for entry in line.parked), *behind_of(line)]:
                    if bay.state.key in held:
                        self.stood[call] = self.now
                    if held & self.touches[call]:
                        self.joined[call] = self.now

    # ------------------------------------------------------------------ the naive model: states

    def _free(self, wants: Wants[Lot[int]], holders: Iterable[int], only: str | None = None) -> bool:
        """Could it be had beside these? `only` looks at one state."""
        taken = [self.wants[one] for one in holders]
        for pool, units in wants.pools:
            if only in (None, pool.key):
                held = sum(more for other in taken for that, more in other.pools if that is pool)
                if held + units > (pool.limit if wants.priority > 0 else pool.limit - pool.reserve):
                    return False
        return all(
            COMPATIBLE[mode][more]
            for key, mode in wants.holds
            if only in (None, key)
            for other in taken
            for that, more in other.holds
            if that == key
        )

    def _claimants(self) -> list[int]:
        """The promoted who wait for something that orphans alone do not bar, in the order of their promotion."""
        found: list[tuple[float, int]] = []
        orphans = [call for call in self.running() if self.entries[call].orphan]
        for call in self.parked():
            entry = self.entries[call]
            if entry.promoted and self._free(self.wants[call], orphans, only=entry.line.bay.state.key):
                assert entry.rank is not None
                found.append((entry.rank[1], call))
        return [call for _, call in sorted(found)]

    def _hidden(self, call: int, holders: list[int], claimants: list[int]) -> bool:
        """Do claims of better rank leave too little for a call?"""
        rank = self.entries[call].rank
        assert rank is not None
        better: list[int] = []
        for one in claimants:
            other = self.entries[one].rank
            assert other is not None
            if other[1] < rank[1] if rank[1] != NEVER else other[0] <= rank[0]:
                better.append(one)
        rivals = [call, *better]  # each of them must still have room when it comes last
        return bool(better) and any(
            not self._free(self.wants[one], [*holders, *(other for other in rivals if other != one)], only=key)
            for one in rivals
            for key in self.touches[call] & self.touches[one]
        )

    def _check_claims(self, claimed: Mapping[int, Key], started: dict[int, One], before: dict[int, Key]) -> None:
        """What was claimed all the while went to nobody of a lower rank."""
        if not claimed or any(before.get(call, (0, NEVER))[1] != NEVER for call in started):
            return  # earlier claimants may have been served
        for waiter in claimed.keys() & self._claimants():
            wants = self.wants[waiter]
            for call, one in started.items():
                if -one.priority < claimed[waiter][0] or call not in self.wants:
                    continue
                for pool, units in wants.pools:
                    room = pool.limit if wants.priority > 0 else pool.limit - pool.reserve
                    took = pool.key in dict(self.wants[call].permits)
                    assert not took or pool.held + units <= room, f"call {call} got what call {waiter} claims"
                for key, mode in wants.holds:
                    other = dict(self.wants[call].holds).get(key)
                    assert other is None or COMPATIBLE[mode][other], f"call {call} got what call {waiter} claims"

    def check(self, *, ticked: bool = False) -> None:
        """The gate's own invariants, and everybody against the naive model."""
        gate = self.gate
        gate.validate()
        holders, parked = self.running(), self.parked()
        for key, pool in self.ledger.pools.items():
            held = sum(units for call in holders for that, units in self.wants[call].permits if that == key)
            over = self.over_limit[key] = min(self.over_limit.get(key, 0), held)
            assert held == pool.held <= max(pool.limit, over), f"{pool} should hold {held}"
        taken = [(key, mode, call) for call in holders for key, mode in self.wants[call].holds]
        for key, mode, call in taken:
            alone = all(COMPATIBLE[mode][more] for that, more, other in taken if that == key and other != call)
            assert alone, f"call {call} is not alone"
        waiting = {entry.owner for flow in self.flows for entry in gate.parked_of(flow)}
        assert set(parked) == waiting, "somebody is forgotten"
        lines = [line for flow in self.flows for line in flow.lines.values()]
        assert self.behind == {call for line in lines for call in behind_of(line)}, "the backlog lost somebody"
        assert holders or not (parked or self.behind), f"deadlock: nothing runs, {sorted(parked)} wait"
        claimants = self._claimants()
        assert gate.statistics()["claimants"] == len(claimants), "the wrong ones claim"
        for call in parked:
            entry = self.entries[call]
            if self._free(self.wants[call], holders):
                assert self._hidden(call, holders, claimants), f"call {call} waits for nothing"
            joined = self.joined.get(call, 0.0)
            over = joined < self.now and self.now - max(entry.since, joined) >= self.calls[call].max_wait
            assert not (ticked and over), f"call {call} waits too long"
            rank = entry.line.bay.head()
            if rank is not None and rank[4] is entry:
                passed = self.gate.passed[call]
                assert passed < self.case.passes, f"call {call} was passed {passed} times and is not promoted"
        for flow in self.flows:
            assert not flow.lines or gate.wake_at <= flow.limit, f"{flow} would not be stopped at its deadline"
            assert not (ticked and flow.lines and flow.limit <= self.now), f"{flow} was not stopped at its deadline"

    def settled(self) -> bool:
        """Everything that was to happen has happened."""
        return not self.calls

    def drain(self) -> None:
        """Let everything happen that is left, the oldest first."""
        while self.calls:
            running = self.running()
            if running:
                self.apply(("finish", min(running)))
            else:
                self.apply(("offer", min(call for call in self.calls if call not in self.entries)))

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
        ranked = sorted(entry.rank for entry in self.entries.values() if entry.rank is not None)
        order = {rank[4].owner: place for place, rank in enumerate(ranked)}
        promoted = sorted(rank[1] for rank in ranked if rank[1] != NEVER)
        calls: list[object] = []
        for call in range(self.added):
            entry = self.entries.get(call)
            if entry is None:
                calls.append("behind" if call in self.behind else "over" if call in self.over else "")
            elif entry.status == PARKED:
                rank, bay = entry.rank, entry.line.bay
                assert rank is not None
                first = promoted.index(rank[1]) if rank[1] != NEVER else -1
                passes = entry.passes + (bay.passes if rank[1] == NEVER else 0)
                tag = round(max(rank[2] - served, 0.0), 6)
                calls.append((bay.state.key, bay.need, order[call], rank[0], first, tag, passes, entry.queued))
                calls.append((entry.clock - now, entry.deadline - now, self.gate.passed[call], *self._stood(call)))
            else:
                calls.append("orphan" if entry.orphan else "runs")
        flows: list[object] = []
        for flow in self.flows:
            flows.append((round(max(flow.tag - served, 0.0), 6), flow.limit - now))
            for bay, line in flow.lines.items():
                behind = tuple(behind_of(line))
                rows = [(row.first, row.stop) for row in line.backlog.rows] if line.backlog is not None else []
                flows.append((bay.state.key, bay.need, tuple(entry.owner for entry in line.parked), behind, *rows))
                flows.append((line.freed - now, *(self._stood(one) for one in behind)))
        limits = [(pool.limit, pool.reserve, self.over_limit.get(key)) for key, pool in self.ledger.pools.items()]
        changed = (*limits, *sorted(self.set)) if self.case.sets else ()
        return (*calls, "|", *flows, "|", *changed, gate.wake_at - now, self.steps, self.now if self.case.limits else 0)

    def _stood(self, call: int) -> tuple[float, float]:
        return self.stood.get(call, NEVER) - self.now, self.joined.get(call, NEVER) - self.now


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

    def visit(world: World) -> None:
        mark = world.fingerprint()
        if mark in seen or len(seen) >= most:
            return
        seen.add(mark)
        if world.settled():
            world.check_empty()
            return
        events = world.open_events()
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
                story = " ".join(f"{word}{call}" for word, call in path)
                raise Violation(f"{case.name}: {story}: {type(error).__name__} {error}") from error
            path.pop()

    visit(make(case, kind))
    return len(seen)


class Desk:
    """A gate to be driven by hand: owners are names, what happened is written down.

    Attributes:
        now: the instant at which events happen.
        started: the owners in the order in which they were granted.
        refused: owner -> code of those that were rejected.
    """

    def __init__(self, pools: str = "", *, passes: int = 16) -> None:
        self.ledger: Ledger[Lot[str]] = make_ledger(pools)
        self.gate: Gate[str] = Gate(self.ledger, passes=passes)
        self.now = 0.0
        self.flows: dict[int, Flow[str]] = {}
        self.granted: dict[str, Entry[str]] = {}
        self.started: list[str] = []
        self.refused: dict[str, str] = {}
        self._wants: dict[One, Wants[Lot[str]]] = {}
        self._tools: dict[One, Wants[Lot[str]]] = {}

    def flow(self, number: int, window: int = 8, limit: float = NEVER) -> Flow[str]:
        """The run of that number, opened when it is new, with a pool of its own."""
        if number not in self.flows:
            self.ledger.add_pool(Pool(f"{OWN}:{number}", "run", window, scope="run"))
            self.flows[number] = self.gate.open_flow(number, window, limit)
        return self.flows[number]

    def wants(self, one: One) -> Wants[Lot[str]]:
        if one not in self._wants:
            self._wants[one] = share_pools(wants_of(self.ledger, one), one, self._tools)
        return self._wants[one]

    def offer(self, names: str, one: One) -> list[str]:
        """Calls by these names, in one step; returns who started."""
        flow, wants = self.flow(one.flow), self.wants(one)
        return self.took(self.gate.offer(flow, [(wants, name, self.now) for name in names.split()], self.now))

    def offer_row(self, names: str, *ones: One) -> list[str]:
        """A batch of calls of one run, by these names; what each is, or what all are. Returns who started."""
        batch = Listed([self.wants(one) for one in ones] * (1 if ones[1:] else len(names.split())), names.split())
        return self.offer_batch(ones[0].flow, batch, range(len(batch.wants)))

    def offer_batch(self, flow: int, batch: Listed[str], calls: range) -> list[str]:
        """Some calls of a batch, in one step; returns who started."""
        return self.took(self.gate.offer_row(self.flow(flow), batch, calls, self.now))

    def finish(self, name: str, *ready: tuple[str, One]) -> list[str]:
        """Its work ends; `ready` are calls of its run, most urgent first, that are ready because of it."""
        entry = self.granted[name]
        offers = [(self.wants(one), other, self.now) for other, one in ready]
        order = {other: place for place, (other, _) in enumerate(ready)}
        if not ready:
            return self.took(self.gate.finish(entry, self.now))
        return self.took(self.gate.finish(entry, self.now, offers, lambda owner: (order.get(owner, 99), 0, 0)))

    def orphan(self, name: str) -> list[str]:
        return self.took(self.gate.orphan(self.granted[name], self.now))

    def cancel(self, name: str) -> list[str]:
        return self.took(self.gate.cancel(self.parked()[name], self.now))

    def tick(self, now: float | None = None) -> list[str]:
        """The clock goes to that instant, or to the next one at which something is due."""
        self.now = self.gate.wake_at if now is None else now
        return self.took(self.gate.tick(self.now))

    def took(self, decided: list[Entry[str]]) -> list[str]:
        self.gate.validate()
        started = [entry.owner for entry in decided if entry.status == GRANTED]
        self.granted.update({entry.owner: entry for entry in decided if entry.status == GRANTED})
        self.started += started
        self.refused.update({entry.owner: entry.rejection.code for entry in decided if entry.status == REJECTED})
        return started

    def parked(self) -> dict[str, Entry[str]]:
        """Those who wait as entries, by name."""
        return {entry.owner: entry for flow in self.flows.values() for entry in self.gate.parked_of(flow)}

    def behind(self) -> list[str]:
        """Those who wait behind siblings."""
        lines = [line for flow in self.flows.values() for line in flow.lines.values()]
        return [name for line in lines for name in behind_of(line)]

    def held(self, pool: str) -> int:
        return self.ledger.pools[pool].held

    def check_empty(self) -> None:
        """End all that runs, then look that the whole capacity is there again and nothing is remembered."""
        while any(entry.status == GRANTED for entry in self.granted.values()):
            for name in [name for name, entry in self.granted.items() if entry.status == GRANTED]:
                self.finish(name)
        check_empty(self.gate)
        for flow in self.flows.values():
            self.gate.close_flow(flow)
        self.gate.validate()


class Stream:
    """One gate under streams of calls; the one that runs longest ends first, unless said otherwise.

    Attributes:
        starts: the owners in the order in which they started.
    """

    def __init__(self, pools: str, flows: int, *, window: int = 8, passes: int = 16) -> None:
        self.ledger = make_ledger(pools)
        self.gate: Gate[int] = Gate(self.ledger, passes=passes)
        self.window = window
        self.flows: dict[int, Flow[int]] = {}
        self.running: list[Entry[int]] = []
        self.starts: list[int] = []
        for flow in range(flows):
            self.open(flow)

    def open(self, flow: int) -> None:
        self.flows[flow] = self.gate.open_flow(flow, self.window)

    def offer(self, flow: int, permits: str, times: int = 1, *, owner: int | None = None, priority: int = 0) -> None:
        """Calls of a flow that want the same; they are known by the flow's number, if nothing else is said."""
        wants = wants_of(self.ledger, One(flow, permits, priority=priority))
        name = flow if owner is None else owner
        self.took(self.gate.offer(self.flows[flow], [(wants, name, 0.0)] * times, 0.0))

    def finish(self, place: int = 0) -> list[int]:
        """One that runs ends; who starts then?"""
        return self.took(self.gate.finish(self.running.pop(place), 0.0))

    def took(self, decided: list[Entry[int]]) -> list[int]:
        started = [entry for entry in decided if entry.status == GRANTED]
        self.running += started
        self.starts += [entry.owner for entry in started]
        return [entry.owner for entry in started]


def _nothing() -> None:
    pass


def steps_of(action: Callable[[], object]) -> int:
    """How many instructions of the interpreter an action takes: a measure that does not depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.collect()
    gc.disable()  # what the collector calls on the way, for garbage of others, is no part of the action
    sys.settrace(trace)
    _nothing()  # Python 3.12 counts instructions only from the first frame on that was asked for them
    sys.settrace(None)
    count = 0
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
