"""Every order of events of small cases, and a test of that test: gates with one fault each, which it must catch."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from gate_kit import Case, One, Violation, explore

from towerman import lots
from towerman.calls import COMPATIBLE
from towerman.gate import Entry, Gate
from towerman.lots import NEVER

HOUR = 3600.0

CASES = [
    Case("one pool, alike", "P1", (One(0, "P"), One(1, "P"), One(0, "P"), One(1, "P")), passes=1),
    Case("one pool, one run", "P1", (One(0, "P"), One(0, "P"), One(0, "P"), One(0, "P")), together=True),
    Case(
        "a batch",
        "P1",
        (One(0, "P"), One(0, "P"), One(0, "P"), One(0, "P", "k:X"), One(1, "P", "k:X")),
        window=1,
        together=True,
        rows=True,
    ),
    Case("two permits", "P2", (One(0, "P"), One(1, "P"), One(2, "P"), One(0, "P")), passes=1),
    Case("a wide one", "P2", (One(0, "P2"), One(1, "P"), One(1, "P"), One(2, "P")), passes=1),
    Case("two wide ones", "P2", (One(0, "P2"), One(1, "P2"), One(2, "P"), One(2, "P")), passes=1),
    Case("crossing pools", "P1 Q1", (One(0, "P Q"), One(1, "P"), One(2, "Q"), One(1, "P")), passes=1),
    Case("crossing pools, two passes", "P1 Q1", (One(0, "P Q"), One(1, "P"), One(2, "Q"), One(2, "Q"))),
    Case("opposite orders", "P1 Q1", (One(0, "P Q"), One(1, "Q P"), One(2, "P"), One(2, "Q")), passes=1),
    Case("two claims", "P1 Q1", (One(0, "P Q"), One(1, "P Q", priority=1), One(2, "P"), One(2, "Q")), passes=1),
    Case("tool and own pool", "P1", (One(0, "own P"), One(0, "own"), One(1, "own P"), One(0, "own P"))),
    Case("tool, own and all", "A2 T1", (One(0, "A own T"), One(0, "A own T"), One(1, "A own T"), One(1, "A own"))),
    Case(
        "refusing to wait", "P1", (One(0, "own P", wait=False), One(0, "own", wait=False), One(0, "own"), One(1, "P"))
    ),
    Case(
        "refusing to wait behind siblings",
        "P2",
        (One(0, "own P"), One(0, "own P", wait=False), One(0, "own P"), One(0, "own P", wait=False)),
        window=1,
        together=True,
    ),
    Case(
        "refusing to wait behind an orphan",
        "",
        (One(0, "own"), One(0, "own"), One(0, "own", wait=False), One(0, "own", wait=False)),
    ),
    Case("refused for a key", "P2", (One(0, "P", "k:X"), One(1, "P", "k:S", wait=False), One(2, "", "k:X"))),
    Case("refused for a claim", "P1", (One(0, "P", "k:X"), One(1, "P"), One(2, "", "k:X", wait=False)), passes=1),
    Case("one key", "", (One(0, "", "k:X"), One(1, "", "k:X"), One(0, "", "k:X"), One(0, "", "k:X")), passes=1),
    Case(
        "readers and a writer",
        "",
        (One(0, "", "k:S"), One(1, "", "k:X"), One(2, "", "k:S"), One(0, "", "k:S")),
        passes=1,
    ),
    Case(
        "subtree and nodes below",
        "",
        (One(0, "", "r:S"), One(1, "", "r:IX a:X"), One(2, "", "r:IX b:X"), One(1, "", "r:IS a:S")),
        passes=1,
    ),
    Case(
        "two keys crossing",
        "",
        (One(0, "", "a:X b:X"), One(1, "", "b:X a:X"), One(2, "", "a:X"), One(2, "", "b:X")),
        passes=1,
    ),
    Case("key and pool", "P1", (One(0, "P", "k:X"), One(1, "P"), One(2, "", "k:X"), One(1, "P", "k:S")), passes=1),
    Case(
        "one tool, several keys",
        "P1",
        (One(0, "P", "a:X"), One(0, "P", "b:X"), One(1, "", "b:X"), One(0, "P", "c:X")),
        passes=1,
    ),
    Case(
        "claimed key that nobody holds",
        "P1",
        (One(0, "P", "k:X"), One(1, "P"), One(2, "", "k:X"), One(1, "P")),
        passes=1,
    ),
    Case(
        "claimed key and readers", "P2", (One(0, "P2", "k:IX"), One(1, "P"), One(1, "P"), One(2, "", "k:IS")), passes=1
    ),
    Case("an orphan bars the way", "P2", (One(0, "P2"), One(1, "P"), One(2, "P"), One(1, "P")), passes=1, window=1),
    Case("room beside an orphan", "P3", (One(0, "P2"), One(1, "P"), One(2, "P2"), One(1, "P")), passes=1),
    Case(
        "waits that end",
        "P1",
        (One(0, "P", max_wait=2), One(1, "P", max_wait=3), One(1, "P", max_wait=3), One(0, "P", max_wait=2)),
        steps=1,
        cancels=False,
    ),
    Case(
        "waits behind siblings",
        "P1",
        (One(0, "P", max_wait=2), One(0, "P", max_wait=2), One(0, "P", max_wait=2), One(1, "P")),
        steps=2,
        window=1,
        cancels=False,
        together=True,
    ),
    Case("no wait at all", "P1", (One(0, "P", max_wait=0), One(0, "P", max_wait=0), One(1, "P", max_wait=0)), steps=1),
    Case(
        "waits that move on",
        "P1 Q1",
        (One(0, "P Q", max_wait=2), One(1, "P", max_wait=HOUR), One(0, "Q"), One(0, "P Q", max_wait=2)),
        steps=1,
        window=1,
    ),
    Case(
        "runs that end",
        "P1",
        (One(0, "P"), One(1, "P"), One(1, "P"), One(1, "P", wait=False)),
        steps=1,
        limits=(NEVER, 1),
    ),
    Case(
        "runs that end, one by one",
        "P2",
        (One(0, "own P"), One(0, "own P"), One(0, "own P", wait=False), One(1, "P2", max_wait=1)),
        steps=1,
        limits=(1.5, 2),
        window=1,
    ),
    Case(
        "an end makes others ready",
        "P1",
        (One(0, "P own"), One(0, "P own", after=0, urgent=-1), One(0, "P own", after=0, urgent=1), One(1, "P")),
        passes=1,
    ),
    Case(
        "what becomes ready is more urgent",
        "P1 Q1",
        (One(0, "P"), One(0, "P", urgent=2), One(0, "P", after=0, urgent=1), One(0, "P Q", after=0, urgent=3)),
    ),
    Case(
        "what becomes ready is more urgent than who waits",
        "P2 Q1",
        (One(0, "Q"), One(0, "P2"), One(0, "P2", urgent=2), One(0, "P2", after=0, urgent=1, max_wait=1)),
    ),
    Case(
        "what becomes ready, and others wait",
        "P1",
        (One(0, "P", max_wait=1), One(0, "P", urgent=2), One(1, "P"), One(0, "P", after=0, urgent=1, wait=False)),
        passes=1,
        steps=1,
    ),
    Case("classes", "P1", (One(0, "P"), One(1, "P", priority=1), One(2, "P", priority=2), One(0, "P")), passes=1),
    Case(
        "classes and width",
        "P2",
        (One(0, "P2"), One(1, "P", priority=1), One(1, "P", priority=1), One(2, "P")),
        passes=1,
    ),
    Case("a reserve", "P2/1", (One(0, "P"), One(1, "P", priority=1), One(2, "P"), One(1, "P", priority=1)), passes=1),
    Case("never to be had", "P2/1", (One(0, "P2"), One(1, "P2", priority=1), One(2, "P"), One(2, "P"))),
    Case(
        "bounded queue", "P1", (One(0, "P", bound=1), One(1, "P", bound=1), One(2, "P", bound=1), One(0, "P", bound=1))
    ),
    Case("raised", "P1", (One(0, "P"), One(1, "P"), One(2, "P"), One(0, "P")), passes=1, sets=("P2",)),
    Case("lowered", "P2", (One(0, "P"), One(1, "P"), One(2, "P"), One(0, "P")), passes=1, sets=("P1",)),
    Case("lowered and raised", "P2", (One(0, "P2"), One(1, "P"), One(2, "P")), passes=1, sets=("P1", "P3")),
    Case("too wide now", "P2", (One(0, "P2"), One(1, "P2"), One(1, "P2"), One(2, "P")), passes=1, sets=("P1",)),
    Case("wide, claimed, then hopeless", "P2 Q1", (One(0, "P2 Q"), One(1, "P"), One(2, "P Q")), passes=1, sets=("P1",)),
    Case(
        "a reserve comes",
        "P2",
        (One(0, "P"), One(1, "P", priority=1), One(2, "P"), One(1, "P", priority=1)),
        passes=1,
        sets=("P2/1",),
    ),
    Case(
        "a reserve goes",
        "P2/1",
        (One(0, "P"), One(1, "P", priority=1), One(2, "P"), One(0, "P2")),
        passes=1,
        sets=("P2",),
    ),
    Case(
        "a wider window",
        "P1",
        (One(0, "own P"), One(0, "own"), One(0, "own P"), One(1, "P")),
        window=1,
        sets=("own:0=2",),
    ),
    Case(
        "a narrower window",
        "P2",
        (One(0, "own P"), One(0, "own P"), One(0, "own", "k:X"), One(1, "P", "k:X")),
        sets=("own:0=1",),
    ),
    Case(
        "lowered over an orphan that bars the way",
        "P3",
        (One(0, "P2"), One(1, "P"), One(2, "P2"), One(1, "P")),
        passes=1,
        sets=("P2",),
    ),
    Case(
        "raised for those with a clock",
        "P1",
        (One(0, "P", max_wait=1), One(1, "P", max_wait=2), One(0, "P", wait=False), One(1, "P", bound=1)),
        steps=1,
        sets=("P2",),
    ),
    Case(
        "bounded to nothing", "", (One(0, "", "k:X", bound=0), One(1, "", "k:X", bound=0), One(0, "", "k:X", bound=0))
    ),
]
"""At most five calls, three runs, three things to share."""

PER_CASE = 40
"""Fewer states than that, and a case is not worth its place."""


def tell(states: dict[str, int]) -> None:
    for name, count in states.items():
        print(f"{count:8,} states: {name}")
    print(f"{sum(states.values()):8,} states in {len(states)} cases, no violation")


def test_g3_g6_every_order_of_small_cases() -> None:
    """G2, G3, G6, S5, R-46, R-47, R-50, R-59, R-83: no order of events breaks a limit, loses a permit or a waiter.

    Every interleaving of offer, finish, time-out (orphan, finish later), cancel, withdraw and tick; after each event
    the
    gate's own invariants and a naive model, at each end the whole capacity can be taken again. Prints the number of
    states.
    """
    states = {case.name: explore(case) for case in CASES}
    tell(states)
    assert min(states.values()) >= PER_CASE
    assert sum(states.values()) >= 10_000


@pytest.mark.parametrize("near", [1, 2])
def test_g3_g6_every_order_of_small_batches_in_rows(monkeypatch: pytest.MonkeyPatch, near: int) -> None:
    """G2, G3, G6, S2: the same where a run's calls are offered as batches, of which few become offers at a time."""
    monkeypatch.setattr(lots, "NEAR", near)
    states = {case.name: explore(replace(case, together=True, rows=True)) for case in CASES}
    tell(states)
    assert min(states.values()) >= PER_CASE
    assert sum(states.values()) >= 10_000


def random_case(seed: int, calls: int) -> Case:
    """A case that nobody thought of."""
    rng = Random(seed)
    pools = rng.choice(["P1", "P2", "P1 Q1", "P2 Q1", "P2/1 Q1", "P3 Q2", "P2 Q2 R1", ""])
    limits = [(word[0], int(word[1])) for word in pools.split()]
    flows = rng.choice([1, 2, 2, 3, 3])
    classes = [rng.choice([0, 0, 0, 1, -1]) for _ in range(flows)]
    made: list[One] = []
    for _ in range(calls):
        permits = [f"{name}{rng.randint(1, limit)}" for name, limit in rng.sample(limits, rng.randint(0, len(limits)))]
        if rng.random() < 0.3:
            permits.insert(rng.randint(0, len(permits)), "own")
        holds: list[str] = []
        if not limits or rng.random() < 0.4:
            holds = [f"{key}:{rng.choice(['S', 'X', 'X', 'IX', 'IS'])}" for key in rng.sample("ab", rng.randint(1, 2))]
        flow = rng.randrange(flows)
        earlier = [call for call, one in enumerate(made) if one.flow == flow]
        made.append(
            One(
                flow,
                " ".join(permits),
                " ".join(holds),
                wait=rng.random() < 0.85,
                max_wait=rng.choice([NEVER, NEVER, 1, 2, 0]),
                priority=classes[flow],
                bound=rng.choice([None, None, None, 1, 2]),
                after=rng.choice(earlier) if earlier and rng.random() < 0.3 else None,
                urgent=rng.choice([0, 0, 1, 2]),
            )
        )
    return Case(
        f"random {seed}",
        pools,
        tuple(made),
        passes=rng.choice([1, 1, 2]),
        window=rng.choice([1, 2, 3]),
        orphans=rng.random() < 0.7,
        cancels=rng.random() < 0.7,
        steps=rng.choice([0, 0, 1]),
        limits=tuple(rng.choice([NEVER, NEVER, 1]) for _ in range(3)),
        together=rng.random() < 0.3,
        rows=rng.random() < 0.5,
        sets=random_sets(rng, limits, 1 + max(one.flow for one in made)),
    )


def random_sets(rng: Random, limits: list[tuple[str, int]], flows: int) -> tuple[str, ...]:
    """Limits that come into force some time, in half of the cases."""
    if rng.random() < 0.5:
        return ()
    pools = [f"{name}{rng.randint(1, limit + 1)}" for name, limit in rng.sample(limits, min(1, len(limits)))]
    return tuple(pools) if pools and rng.random() < 0.7 else (f"own:{rng.randrange(flows)}={rng.randint(1, 3)}",)


def test_g3_g6_orders_of_random_cases() -> None:
    """G3, G6: the same for the first states of cases that nobody thought of, drawn with fixed seeds."""
    states = {f"random {seed}": explore(random_case(seed, 4), most=100) for seed in range(40)}
    print(f"{sum(states.values()):,} states in {len(states)} random cases, no violation")
    assert sum(states.values()) >= 2_500


@pytest.mark.long
@pytest.mark.parametrize("calls", [4, 5])
@pytest.mark.parametrize("first", range(1_000, 1_500, 50))
def test_g3_g6_many_orders_of_many_cases(calls: int, first: int) -> None:
    """G3, G6, S5, R-59: half a thousand random cases of four calls, and as many of five."""
    states = {f"random {seed}": explore(random_case(seed, calls), most=1_500) for seed in range(first, first + 50)}
    print(f"{sum(states.values()):,} states in {len(states)} random cases, no violation")
    assert sum(states.values()) >= 10_000


# ------------------------------------------------------------------ the test of the test


class CountsTwice(Gate[int]):
    """D-1: hands over without lowering the count, and raises it again."""

    def _hand_over(self, entry, now):
        done = super()._hand_over(entry, now)
        if done:
            self.ledger.take(entry.wants)
        return done


class CountsNothing(Gate[int]):
    """Grants without counting."""

    def _grant(self, entry, *rank):
        super()._grant(entry, *rank)
        self.ledger.give(entry.wants)


class GivesTwice(Gate[int]):
    """P-37: a second release frees somebody else's permit."""

    def finish(self, entry, now):
        if entry.status == 4:
            self.ledger.give(entry.wants)
        return super().finish(entry, now)


class LosesTheCancelled(Gate[int]):
    """P-38: a permit that goes to one who is cancelled is lost."""

    def cancel(self, entry, now, code="cancelled"):
        self.ledger.take(entry.wants)
        return super().cancel(entry, now, code)


class LooksAtTheFirst(Gate[int]):
    """Looks at those who wait for the first of the things that became free."""

    def _pump(self, states, now):
        super()._pump(states[:1], now)


class TriesOnce(Gate[int]):
    """Serves one, and leaves the rest for later."""

    def _pump(self, states, now):
        for state in states:
            for bay in state.lot.bays.values() if state.lot else ():
                if (head := bay.head()) and self.ledger.claim(head[4].wants) is None:
                    self._leave(head[4])
                    self._grant(head[4], *head[:4])
                    return


class ForgetsARefill(Gate[int]):
    """Nobody comes after one that waited in vain."""

    def _reject(self, entry, code, now):
        super()._reject(entry, code, now)
        self._refills.clear()


class ForgetsSiblings(Gate[int]):
    """When the last running call of a run lets go, the clocks and calls behind it are forgotten."""

    def _let_go(self, flow, states, now):
        pass


class ForgetsSuccessors(Gate[int]):
    """Nobody is parked after one that was granted."""

    def _succeed(self, flow, line, now):
        pass


class ClockNeverStops(Gate[int]):
    """Waiting for one's own siblings counts."""

    def _look_at(self, entry, now):
        self._reject(entry, "wait_timeout", now)


class ClockStartsAnew(Gate[int]):
    """A wait is never over."""

    def _clock(self, entry, now):
        return now


class ForgetsTheClock(Gate[int]):
    """The clock that stood is not started when the run lets go."""

    def _watch(self, entry, now):
        if entry.since == now:
            super()._watch(entry, now)


class StartsTheExpired(Gate[int]):
    """Hands over to one whose wait is over."""

    def _hand_over(self, entry, now):
        return super()._hand_over(entry, -NEVER)


class PumpsTheExpired(Gate[int]):
    """Serves one whose wait is over."""

    def _pump(self, states, now):
        for flow in self._flows.values():
            for entry in flow.parked:
                entry.deadline = NEVER
        super()._pump(states, now)


class NeverPromotes(Gate[int]):
    """What fits passes what does not, for ever."""

    def _count_passes(self, granted, key):
        pass


class CountsNoMoves(Gate[int]):
    """Being tried in vain is not counted: two streams take turns, and the one who wants both gets neither."""

    def _move(self, entry, blocker, now):
        entry.passes -= 1
        super()._move(entry, blocker, now)


class TwoOrders(Gate[int]):
    """Claims compare by class as well as by order of promotion: two claimants wait for each other."""

    def _hidden(self, wants, klass, promotion):
        found = super()._hidden(wants, klass, promotion)
        if found is None and promotion != NEVER:
            for other in self._claimants:
                if -other.rank[0] > klass:
                    for pool, _ in wants.pools:
                        if any(that is pool for that, _ in other.wants.pools):
                            return pool
        return found


class KeepsClaims(Gate[int]):
    """What a claim hid is not looked at when the claim is lifted."""

    def _unclaim(self, entry):
        if entry in self._claimants:
            self._claimants.remove(entry)


class ClaimsForEver(Gate[int]):
    """Claims are not lifted at all."""

    def _unclaim(self, entry):
        pass


class ClaimsBehindOrphans(Gate[int]):
    """Holds others back for something that an orphan may hold for ever."""

    def _claim(self, entry: Entry[int]) -> None:
        if entry not in self._claimants:
            self._claimants.append(entry)


class HidesNothing(Gate[int]):
    """Claims are posted and not respected."""

    def _hidden(self, wants, klass, promotion):
        return None


class HidesKeys(Gate[int]):
    """A claim hides a key from those whom it would not disturb, too."""

    def _hidden(self, wants, klass, promotion):
        found = super()._hidden(wants, klass, promotion)
        if found is None and any(one.rank[1] < promotion for one in self._claimants):
            return next((self.ledger.node_for(key) for key, mode in wants.holds if COMPATIBLE[mode][0]), None)
        return found


class CountsSiblings(Gate[int]):
    """Those who wait for their own siblings fill the queue."""

    def _hand_in(self, flow, one, line, clock, now, *, standing, counted):
        super()._hand_in(flow, one, line, clock, now, standing=standing, counted=True)


class KeepsNodes(Gate[int]):
    """Keys are remembered for ever."""

    def _sweep(self):
        self._ended.clear()


class LosesARow(Gate[int]):
    """Of a batch only those who are near are remembered."""

    def offer_row(self, flow, source, calls, now):
        decided = super().offer_row(flow, source, calls, now)
        for line in flow.lines.values():
            if line.backlog:
                line.backlog.rows.clear()
        return decided


class RaisesInVain(Gate[int]):
    """A raised limit wakes nobody."""

    def reconfigure(self, limits, windows, now):
        for pool, limit, reserve, enforced in limits:
            self.ledger.set_limit(pool, limit, reserve, enforced=enforced)
        return []


class HandsOverTheSurplus(Gate[int]):
    """What is held above a lowered limit goes from one to the next."""

    def _hand_over(self, entry, now):
        self.ledger.uneven = False
        return super()._hand_over(entry, now)


class KeepsTheWindow(Gate[int]):
    """A wider window lets no more calls of the run come forward."""

    def reconfigure(self, limits, windows, now):
        decided = super().reconfigure(limits, (), now)
        for flow, window in windows:
            flow.window = window
        return decided


class ForgetsTheLimit(Gate[int]):
    """A run's deadline does not end its waits."""

    def _watch_limit(self, flow):
        flow.timed = True


FAULTS: dict[type[Gate[int]], str] = {
    CountsTwice: "one pool, alike",
    CountsNothing: "one pool, alike",
    GivesTwice: "one pool, alike",
    LosesTheCancelled: "one pool, alike",
    LooksAtTheFirst: "crossing pools",
    TriesOnce: "a wide one",
    ForgetsARefill: "one pool, one run",
    ForgetsSiblings: "one pool, alike",
    ForgetsSuccessors: "one pool, one run",
    ClockNeverStops: "waits that end",
    ClockStartsAnew: "waits that move on",
    ForgetsTheClock: "waits behind siblings",
    StartsTheExpired: "runs that end",
    PumpsTheExpired: "waits that end",
    NeverPromotes: "a wide one",
    CountsNoMoves: "crossing pools",
    TwoOrders: "classes",
    KeepsClaims: "a wide one",
    ClaimsForEver: "a wide one",
    ClaimsBehindOrphans: "an orphan bars the way",
    HidesNothing: "a wide one",
    HidesKeys: "claimed key and readers",
    CountsSiblings: "bounded queue",
    KeepsNodes: "one key",
    LosesARow: "a batch",
    RaisesInVain: "raised",
    HandsOverTheSurplus: "lowered",
    ForgetsTheLimit: "runs that end",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_gate_with_one_fault_is_caught(monkeypatch: pytest.MonkeyPatch, fault: type[Gate[int]]) -> None:
    """The test of the test: each of these gates fails in some order of events of one case (DESIGN.md section 6)."""
    monkeypatch.setattr(lots, "NEAR", 1)
    [case] = [case for case in CASES if case.name == FAULTS[fault]]
    with pytest.raises(Violation) as caught:
        explore(case, fault)
    assert isinstance(caught.value.__cause__, AssertionError), "it does not even run"
    print(caught.value)
