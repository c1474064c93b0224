"""Calls of which a part counts over many processes, in the gate: asked about, turned away, offered, let in (rule S12).

The engine is a plain model: some of each pool and key is with other processes, more or less of it at any time. What is
looked at after every event: the books of the gate, and that no more is leased than there is; at the end: that every
call came to exactly one end, and that nothing is held.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from gate_kit import One, make_ledger, share_pools, wants_of

from towerman.calls import COMPATIBLE
from towerman.gate import DONE, GRANTED, NEVER, PARKED, REJECTED, Entry, Flow, Gate, Lot
from towerman.ledger import Ledger, Pool, Wants
from towerman.lots import There

LIMITS = {"P": 3, "Q": 2}
"""Pools that count over all processes; the pool L is of this process."""


class Place:
    """What a call has, or waits for, at the engine."""

    def __init__(self, world: World, entry: Entry[int]) -> None:
        self.world = world
        self.entry = entry
        self.leased = False
        self.asked = True
        self.unreached = False
        self.fence = None

    def over(self) -> None:
        self.leased = self.asked = False
        self.world.places.pop(self.entry.owner, None)

    def begun(self) -> None: ...

    def orphaned(self) -> None: ...

    def told(self, verdict: object) -> None: ...


class World:
    """One gate, calls of some runs, and an engine of which others have some."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.window = pick.choice([1, 2, 3])
        self.flows_count = pick.choice([1, 2, 4])
        ledger: Ledger[Lot[int]] = make_ledger(f"P3 Q2 L{pick.choice([1, 2, 4])}", self.flows_count, self.window)
        self.gate: Gate[int] = Gate(ledger, passes=pick.choice([1, 2, 16]))
        self.now = 0.0
        limit = pick.choice([NEVER, NEVER, 60.0])
        self.flows: list[Flow[int]] = [
            self.gate.open_flow(number, self.window, limit) for number in range(self.flows_count)
        ]
        self.foreign: Counter[str] = Counter()
        self.places: dict[int, Place] = {}
        self.running: dict[int, Entry[int]] = {}
        self.parked: dict[int, Entry[int]] = {}
        self.ends: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.count = 0
        self.tools: dict[One, Wants[Lot[int]]] = {}
        self.gate.notes = []
        self.most: Counter[str] = Counter()

    # ------------------------------------------------------------ the engine

    def leased(self, *but: int) -> list[Wants[Lot[int]]]:
        return [one.entry.wants for owner, one in self.places.items() if one.leased and owner not in but]

    def free_there(self, wants: Wants[Lot[int]]) -> bool:
        held = Counter(self.foreign)
        for other in self.leased():
            for pool, units in other.pools:
                held[pool.key] += units
            for key, mode in other.holds:
                for mine, my_mode in wants.holds:
                    if key == mine and not COMPATIBLE[mode][my_mode]:
                        return False
        if any(self.foreign[f"key {key}"] for key, _ in wants.holds):
            return False
        return all(pool.key not in LIMITS or held[pool.key] + units <= LIMITS[pool.key] for pool, units in wants.pools)

    def in_the_way(self, wants: Wants[Lot[int]]) -> object:
        for pool, _ in wants.pools:
            if pool.key in LIMITS:
                return pool
        return wants.holds[0][0]

    # ------------------------------------------------------------ events

    def take(self, decided: list[Entry[int]]) -> None:
        for entry in decided:
            owner = entry.owner
            self.parked.pop(owner, None)
            if entry.status == REJECTED:
                self.ends[owner] += 1
                self.codes[entry.rejection.code] += 1
                assert entry.there is None or not entry.there.leased  # type: ignore[attr-defined]
                continue
            assert entry.status == GRANTED
            there = entry.there
            if there is None:
                if any(pool.key in LIMITS for pool, _ in entry.wants.pools) or entry.wants.holds:
                    place = Place(self, entry)
                    entry.there = place
                    self.places[owner] = place
                else:
                    self.running[owner] = entry
            else:
                assert isinstance(there, Place)
                there.asked = True
        self.gate.validate()
        for pool in self.gate.ledger.pools.values():
            here = sum(dict(one.pools).get(pool, 0) for one in self.leased()) if pool.key in LIMITS else 0
            assert here + self.foreign[pool.key] <= pool.limit
            self.most[pool.key] = max(self.most[pool.key], here)

    def answer(self) -> None:
        """The engine answers somebody who has asked, or offers something to somebody who waits."""
        if not self.places:
            return
        place = self.random.choice(list(self.places.values()))
        entry = place.entry
        if place.leased:
            return
        if entry.status == GRANTED and place.asked:
            place.asked = False
            if self.random.random() < 0.05:
                self.take(self.gate.turned_down(entry, "circuit_open", "a breaker", self.now, 1.0))
            elif self.random.random() < 0.1:
                place.unreached = True
                self.parked[entry.owner] = entry
                state = self.in_the_way(entry.wants)
                self.take(self.gate.turned_away(entry, state, self.now, unreached=True))  # type: ignore[arg-type]
            elif self.free_there(entry.wants):
                place.leased = True
                self.running[entry.owner] = entry
            elif not entry.wants.wait:
                self.take(self.gate.turned_down(entry, "concurrency_limit", "pool", self.now))
            else:
                place.unreached = False
                self.parked[entry.owner] = entry
                self.take(self.gate.turned_away(entry, self.in_the_way(entry.wants), self.now))  # type: ignore[arg-type]
        elif entry.status == PARKED:
            if place.unreached and self.random.random() < 0.5:
                place.unreached = False
                self.take(self.gate.turned_away(entry, self.in_the_way(entry.wants), self.now))  # type: ignore[arg-type]
            elif self.free_there(entry.wants):
                granted, decided = self.gate.let_in(entry, self.now)
                if granted:
                    self.parked.pop(entry.owner, None)
                    assert entry.status == GRANTED
                    place.leased, place.asked = True, False
                    self.running[entry.owner] = entry
                self.take(decided)

    def offer(self) -> None:
        pick = self.random
        flow = pick.randrange(self.flows_count)
        offers = []
        for _ in range(pick.choice([1, 1, 3, 8])):
            one = One(
                flow,
                pick.choice(["own P L", "own P", "own P2", "own L", "own Q L", "own P Q"]),
                pick.choice(["", "", "", "k:X", "k:S", "m:X"]),
                wait=pick.random() > 0.1,
                max_wait=pick.choice([NEVER, 5.0, 20.0]),
                bound=pick.choice([None, None, 6]),
            )
            offers.append((share_pools(wants_of(self.gate.ledger, one), one, self.tools), self.count, self.now))
            self.count += 1
        before = self.gate.statistics()
        self.take(self.gate.offer(self.flows[flow], offers, self.now))
        assert before is not None
        self.note_parked()

    def note_parked(self) -> None:
        self.parked = {entry.owner: entry for flow in self.flows for entry in self.gate.parked_of(flow)}

    def finish(self) -> None:
        if self.running:
            owner = self.random.choice(list(self.running))
            entry = self.running.pop(owner)
            if self.random.random() < 0.1:
                self.take(self.gate.orphan(entry, self.now))
            self.ends[owner] += 1
            self.take(self.gate.finish(entry, self.now))
            assert entry.status == DONE and owner not in self.places

    def step(self) -> None:
        pick = self.random
        event = pick.choice(["offer", "finish", "finish", "answer", "answer", "answer", "foreign", "cancel", "time"])
        if event == "offer":
            self.offer()
        elif event == "finish":
            self.finish()
        elif event == "answer":
            self.answer()
        elif event == "foreign":
            key = pick.choice(["P", "P", "Q", "key k"])
            leased = (
                sum(dict(one.pools).get(self.gate.ledger.pools[key], 0) for one in self.leased())
                if key in LIMITS
                else 0
            )
            most = (
                LIMITS[key] - leased
                if key in LIMITS
                else int(not any(h[0] == "k" for one in self.leased() for h in one.holds))
            )
            self.foreign[key] = pick.randint(0, max(0, most))
        elif event == "cancel":
            self.note_parked()
            if self.parked and pick.random() < 0.3:
                self.take(self.gate.cancel(pick.choice(list(self.parked.values())), self.now))
        else:
            self.now += pick.choice([0.1, 1.0, 7.0])
            if self.gate.wake_at <= self.now:
                self.take(self.gate.tick(self.now))
        self.note_parked()

    def drain(self) -> None:
        """Others let go of everything: all that is left comes to its end."""
        self.foreign.clear()
        for _ in range(200 * self.count + 200):
            if sum(self.ends.values()) == self.count:
                break
            self.answer()
            self.finish()
            self.now += 0.01
            if self.gate.wake_at <= self.now:
                self.take(self.gate.tick(self.now))
        assert self.ends == Counter(range(self.count)), "a call has no end, or two"
        assert not self.places and not self.running
        for flow in self.flows:
            self.gate.close_flow(flow)
        assert self.gate.ledger.counts() == (0, 0)
        assert not self.gate.anybody
        self.gate.validate()


@pytest.mark.parametrize("part", range(8))
def test_g1_g3_s12_every_call_comes_to_one_end_whatever_the_engine_says(part: int) -> None:
    """G1, G3, S12: nobody holds what others have, nobody is forgotten, and nothing stays held."""
    for seed in range(part * 50, part * 50 + 50):
        world = World(seed)
        try:
            for _ in range(120):
                world.step()
            world.drain()
        except AssertionError as wrong:
            wrong.add_note(f"seed {seed}")
            raise


def one_flow(pools: str = "P3 L4", window: int = 2) -> tuple[Gate[int], Flow[int], Ledger[Lot[int]]]:
    ledger: Ledger[Lot[int]] = make_ledger(pools, 1, window)
    gate: Gate[int] = Gate(ledger)
    return gate, gate.open_flow(0, window), ledger


def granted(decided: list[Entry[int]]) -> list[int]:
    return [entry.owner for entry in decided if entry.status == GRANTED]


class Nothing:
    """At the engine: nothing to give back."""

    unreached = False
    fence = None

    def __init__(self) -> None:
        self.overs = 0

    def over(self) -> None:
        self.overs += 1

    def begun(self) -> None: ...

    def orphaned(self) -> None: ...

    def told(self, verdict: object) -> None: ...


def test_s12_as_many_of_one_run_are_asked_about_as_may_run_the_others_stand_behind() -> None:
    """S12: where the engine lets calls wait, those of the same run that want the same do not all come and ask."""
    gate, flow, ledger = one_flow()
    one = One(0, "own P L")
    tools: dict[One, Wants[Lot[int]]] = {}
    offers = [(share_pools(wants_of(ledger, one), one, tools), owner, 0.0) for owner in range(1000)]
    asked = gate.offer(flow, offers, 0.0)
    seen = 0
    while asked:
        seen += len(asked)
        for entry in list(asked):
            entry.there = Nothing()
            asked.remove(entry)
            asked += gate.turned_away(entry, ledger.pools["P"], 0.0)
        gate.validate()
    assert seen <= 2 * flow.window + 1
    assert ledger.counts() == (0, 0)
    # One is let in: the next one asks in its place.
    first = gate.parked_of(flow)[0]
    let, decided = gate.let_in(first, 1.0)
    assert let and first.status == GRANTED
    assert len(granted(decided)) == 0 or all(entry.there is None for entry in decided)
    gate.validate()


def test_s12_who_is_offered_something_and_is_busy_here_waits_here_and_keeps_its_clock() -> None:
    """S2, S12: an offer that comes while what is local is busy is declined; the wait goes on from where it began."""
    gate, flow, ledger = one_flow("P3 L1", window=4)
    other = gate.open_flow(1, 4)
    far = One(0, "P L", max_wait=10.0)
    (entry,) = gate.offer(flow, [(wants_of(ledger, far), 0, 0.0)], 0.0)
    place: There = Nothing()
    entry.there = place
    assert gate.turned_away(entry, ledger.pools["P"], 0.0) == []
    (busy,) = gate.offer(other, [(wants_of(ledger, One(1, "L")), 1, 0.0)], 1.0)
    assert gate.let_in(entry, 2.0) == (False, [])
    assert entry.blocked_by == ("pool P", "pool L")
    gate.validate()
    assert gate.finish(busy, 3.0) == [entry]
    assert entry.status == GRANTED
    assert gate.turned_away(entry, ledger.pools["P"], 3.0) == []
    gate.validate()
    assert gate.wake_at <= 10.0
    (refused,) = gate.tick(10.0)
    assert refused is entry and entry.rejection.code == "wait_timeout" and place.overs == 1  # type: ignore[attr-defined]


def test_s12_a_wait_for_an_engine_that_is_not_reached_has_a_code_of_its_own() -> None:
    """S12: whose wait is over while the engine is not reached is told that, not that a pool is busy."""
    gate, flow, ledger = one_flow()
    (entry,) = gate.offer(flow, [(wants_of(ledger, One(0, "P", max_wait=5.0)), 0, 0.0)], 0.0)
    place = Nothing()
    entry.there = place
    gate.turned_away(entry, ledger.pools["P"], 0.0, unreached=True)
    place.unreached = True
    gate.validate()
    (refused,) = gate.tick(5.0)
    assert (refused.rejection.code, refused.rejection.blocker) == ("engine_unavailable", "engine")


def test_s12_late_answers_are_ignored_and_counted() -> None:
    """G7: an answer about a call that has ended changes nothing."""
    gate, flow, ledger = one_flow()
    (entry,) = gate.offer(flow, [(wants_of(ledger, One(0, "P")), 0, 0.0)], 0.0)
    gate.finish(entry, 1.0)
    late = gate.statistics()["late_events"]
    assert gate.turned_away(entry, ledger.pools["P"], 2.0) == []
    assert gate.turned_down(entry, "circuit_open", "x", 2.0) == []
    assert gate.let_in(entry, 2.0) == (False, [])
    assert gate.statistics()["late_events"] == late + 2
    assert isinstance(ledger.pools["P"], Pool)
    gate.validate()
