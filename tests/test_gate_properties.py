"""Random histories of gate and ledger beside the naive model of the kit; shares and waits over long streams."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from random import Random

import pytest
from gate_kit import OWN, Case, One, Stream, World, check_empty, make_ledger
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from towerman import lots
from towerman.gate import GRANTED, NEVER, Entry, Flow, Gate, Lot
from towerman.ledger import Wants

LONG = os.environ.get("TOWERMAN_LONG", "") not in ("", "0")
FLOWS = 4


@pytest.fixture(scope="module", autouse=True)
def short_rows() -> Iterator[None]:
    """Batches here are small; so that rows last, two calls of a row become offers at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lots, "NEAR", 2)
        yield


# ------------------------------------------------------------------ any history, beside the naive model


def ones(pools: str, *, root: bool = False) -> st.SearchStrategy[One]:
    """Calls over the pools and two keys; after `root`, of whole subtrees too."""
    names = [(word[0], int(word[1])) for word in pools.split()]
    permits = [f"{name}{units}" for name, limit in names for units in range(1, limit + 1)]
    holds = ["a:X", "a:S", "b:X", "b:S", "a:X b:S", "b:X a:X", "a:IX b:X"]
    return st.builds(
        One,
        flow=st.integers(0, FLOWS - 1),
        permits=st.lists(
            st.sampled_from([*permits, OWN]), max_size=3, unique_by=lambda word: word.rstrip("0123456789")
        ).map(" ".join),
        holds=st.sampled_from(["", "", "", *holds, *(["root:S", "root:X"] if root else [])]),
        wait=st.sampled_from([True, True, True, False]),
        max_wait=st.sampled_from([NEVER, NEVER, 0, 1, 2, 5]),
        bound=st.sampled_from([None, None, None, 1, 3]),
    )


class History(RuleBasedStateMachine):
    """Any calls, in any order of events; the World checks everything after each of them."""

    world: World
    pools: str

    @initialize(
        pools=st.sampled_from(["P1", "P2", "P1 Q1", "P3 Q1", "P2/1 Q2", "P4 Q2 R1"]),
        passes=st.sampled_from([1, 2, 4, 16]),
        window=st.integers(1, 3),
        limits=st.lists(st.sampled_from([NEVER, NEVER, 3, 8]), min_size=FLOWS, max_size=FLOWS),
        classes=st.lists(st.sampled_from([0, 0, 0, 1, 2, -1]), min_size=FLOWS, max_size=FLOWS),
        rows=st.booleans(),
    )
    def begin(self, pools: str, passes: int, window: int, limits: list[float], classes: list[int], rows: bool) -> None:
        self.classes = classes
        self.pools = pools
        case = Case("any", pools, passes=passes, window=window, limits=tuple(limits), rows=rows, flows=FLOWS)
        self.world = World(case)

    def _add(self, one: One, **more: object) -> int:
        return self.world.add(replace(one, priority=self.classes[one.flow], **more))

    def _one_of(self, data: st.DataObject, calls: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(calls)))

    @rule(data=st.data(), times=st.integers(1, 6))
    def offer(self, data: st.DataObject, times: int) -> None:
        one = data.draw(ones(self.pools, root=self.world.root))
        call = next(self._add(one) for _ in range(times))
        self.world.apply(("all" if times > 1 else "offer", call))

    @rule(data=st.data())
    def offer_different(self, data: st.DataObject) -> None:
        first, second = (data.draw(ones(self.pools, root=self.world.root)) for _ in range(2))
        call = self._add(first)
        self._add(replace(second, flow=first.flow))
        self.world.apply(("all", call))

    @precondition(lambda self: self.world.calls)
    @rule(data=st.data(), urgent=st.integers(-2, 2), times=st.integers(1, 3))
    def follow(self, data: st.DataObject, urgent: int, times: int) -> None:
        """Calls that are ready only when another one of their run has ended."""
        first = self._one_of(data, list(self.world.calls))
        one = replace(data.draw(ones(self.pools, root=self.world.root)), flow=self.world.calls[first].flow)
        for _ in range(times):
            self._add(one, after=first, urgent=urgent)

    @precondition(lambda self: self.world.running())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.apply(("finish", self._one_of(data, self.world.running())))

    @precondition(lambda self: any(not entry.orphan for flow in self.world.flows for entry in flow.running))
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        running = [call for call in self.world.running() if not self.world.entries[call].orphan]
        self.world.apply(("orphan", self._one_of(data, running)))

    @precondition(lambda self: self.world.parked())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.apply(("cancel", self._one_of(data, self.world.parked())))

    @precondition(lambda self: self.world.behind)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.world.apply(("withdraw", self._one_of(data, list(self.world.behind))))

    @precondition(lambda self: self.world.gate.wake_at != NEVER)
    @rule()
    def tick(self) -> None:
        self.world.apply(("tick", 0))

    @rule(data=st.data(), limit=st.integers(1, 6), reserve=st.sampled_from([0, 0, 0, 1]))
    def change_a_limit(self, data: st.DataObject, limit: int, reserve: int) -> None:
        name = data.draw(st.sampled_from([word[0] for word in self.pools.split()]))
        self.world.change(f"{name}{limit}/{min(reserve, limit - 1)}")

    @rule(flow=st.integers(0, FLOWS - 1), window=st.integers(1, 4))
    def change_a_window(self, flow: int, window: int) -> None:
        self.world.change(f"own:{flow}={window}")

    @rule()
    def time_passes(self) -> None:
        self.world.apply(("step", 0))

    @precondition(lambda self: not self.world.root)
    @rule()
    def expand(self) -> None:
        self.world.expand()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_empty()


TestHistory = History.TestCase
TestHistory.__doc__ = """G2, G3, G6, G7, S2, S5, R-46 to R-50, R-53, R-58 to R-60, R-77 to R-79, R-82, R-83, R-88: one
decision per entry, held
<= limit at every instant, free + held = total, nothing both held and waiting, nobody waits for what could be had,
nobody
is passed more often than allowed, no wait ends early or late, and after draining all is free and forgotten."""
if not LONG:
    TestHistory.settings = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))


# ------------------------------------------------------------------ long runs


def long_run(seed: int, events: int, every: int) -> Counter[str]:
    """Random events over a small world with many calls; counts what happened."""
    rng = Random(seed)
    pools = rng.choice(["P3 Q2 R1", "P4/1 Q2", "P8 Q3 R2", "P2"])
    case = Case("long", pools, passes=rng.choice([2, 16]), window=rng.choice([1, 2, 4]), rows=seed % 2 == 0, flows=6)
    world = World(case)
    names = [(word[0], int(word[1])) for word in pools.split()]
    classes = [rng.choice([0, 0, 0, 1, -1]) for _ in range(6)]
    menu = [
        One(
            flow,
            " ".join(
                [
                    *rng.sample([OWN], rng.randint(0, 1)),
                    *(f"{name}{rng.randint(1, limit)}" for name, limit in names if rng.random() < 0.6),
                ]
            ),
            rng.choice(["", "", "", "a:X", "a:S", "a:S b:X", "b:S"]),
            wait=rng.random() < 0.9,
            max_wait=rng.choice([NEVER, 3, 10, 30]),
            priority=classes[flow],
            bound=rng.choice([None, None, 8]),
        )
        for flow in range(6)
        for _ in range(4)
    ]
    counts: Counter[str] = Counter()
    for number in range(events):
        word = rng.choices(
            ["offer", "all", "finish", "orphan", "cancel", "withdraw", "tick", "step"], [20, 4, 40, 5, 6, 4, 6, 6]
        )[0]
        live = len(world.calls)
        choice: list[int] = []
        if word in ("offer", "all") and live < 80:
            one = rng.choice(menu)
            choice = [world.add(one) for _ in range(1 if word == "offer" else rng.randint(2, 8))][:1]
            if rng.random() < 0.2:
                world.add(
                    replace(
                        rng.choice(menu),
                        flow=one.flow,
                        priority=one.priority,
                        after=choice[0],
                        urgent=rng.randint(-1, 1),
                    )
                )
        elif word == "finish":
            choice = world.running()
        elif word == "orphan":
            choice = [call for call in world.running() if not world.entries[call].orphan]
        elif word == "cancel":
            choice = world.parked()
        elif word == "withdraw":
            choice = sorted(world.behind)
        elif word == "step" or (word == "tick" and world.gate.wake_at != NEVER):
            choice = [0]
        if choice:
            for entry in world.apply((word, rng.choice(choice)), check=number % every == 0):
                counts["granted" if entry.status == GRANTED else entry.rejection.code] += 1
    counts["promoted"] = world.gate.statistics()["promotions"]
    world.drain()
    world.check_empty()
    return counts


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_g3_long_random_runs(seed: int) -> None:
    """G3, R-48, R-137: thousands of random events, and then the whole capacity can be taken again."""
    counts = long_run(seed, 3_000, every=10)
    assert counts["granted"] > 300
    assert counts["cancelled"] > 10


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 18))
def test_g3_very_long_random_runs(seed: int) -> None:
    """G3, R-48, R-137: a hundred thousand events, with everything that can happen among them."""
    counts = long_run(seed, 100_000, every=25)
    print(seed, dict(counts))
    assert counts["granted"] > 10_000
    assert counts["wait_timeout"] > 10


# ------------------------------------------------------------------ shares and waits over long streams


@given(limit=st.integers(1, 5), window=st.integers(1, 10), data=st.data())
@settings(max_examples=200 if LONG else 40)
def test_s5_two_runs_with_endless_equal_work_get_equal_shares(limit: int, window: int, data: st.DataObject) -> None:
    """S5, R-53: once both are there, neither is more than a turn ahead, whoever came first and whichever call ends.

    A turn is the call that is served and the one that is next: at any moment the two differ by two calls at most, which
    is the bound of start-time fair queueing.
    """
    stream = Stream(f"P{limit}", 2, window=window)
    stream.offer(0, "P", 300)
    for _ in range(data.draw(st.integers(0, 20))):
        stream.finish()
    stream.offer(1, "P", 300)
    counts = Counter[int]()
    for _ in range(200):
        counts.update(stream.finish(data.draw(st.integers(0, len(stream.running) - 1)) if limit > 1 else 0))
        assert abs(counts[0] - counts[1]) <= 2


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_s5_one_permit_and_two_runs(window: int) -> None:
    """S5: with one permit, and the call that ran when the second run came counted, they are never more than one
    apart.
    """
    stream = Stream("P1", 2, window=window)
    stream.offer(0, "P", 300)
    stream.offer(1, "P", 300)
    for _ in range(400):
        stream.finish()
        assert abs(stream.starts.count(0) - stream.starts.count(1)) <= 1


@given(weights=st.lists(st.integers(1, 4), min_size=3, max_size=3), limit=st.integers(1, 3), window=st.integers(1, 8))
@settings(max_examples=100 if LONG else 30)
def test_s5_runs_share_by_weight(weights: list[int], limit: int, window: int) -> None:
    """S5: calls that weigh more of the process cost their run more: three runs that wait for one pool get the same
    weight.
    """
    stream = Stream(f"A1000 P{limit}", 3, window=window)
    for flow in range(3):
        stream.offer(flow, f"A{weights[flow]} P", 600)
    while len(stream.starts) < 600:
        stream.finish()
    counts = Counter(stream.starts)
    got = [counts[flow] * weights[flow] for flow in range(3)]
    assert max(got) - min(got) <= 2 * max(weights) + limit * max(weights), got


@pytest.mark.parametrize("limit", [3, 4, 8])
def test_s5_wide_calls_get_on_beside_narrow_ones(limit: int) -> None:
    """S5, S6: where a permit at a time becomes free, narrow calls fit and wide ones do not: those get on by
    promotion.
    """
    stream = Stream(f"P{limit}", 3)
    for flow in range(3):
        stream.offer(flow, f"P{flow + 1}", 600)
    while len(stream.starts) < 600:
        stream.finish()
    assert all(flow in stream.starts[place : place + 3 * 17] for flow in range(3) for place in range(0, 540, 17))


@given(flows=st.integers(2, 12), limit=st.integers(1, 4), rounds=st.integers(5, 15))
@settings(max_examples=100 if LONG else 30)
def test_s5_many_runs_take_turns(flows: int, limit: int, rounds: int) -> None:
    """S5: with many runs nobody gets a second turn more than everybody else."""
    stream = Stream(f"P{limit}", flows)
    for flow in range(flows):
        stream.offer(flow, "P", 100)
    counts = Counter[int]()
    for _ in range(flows * rounds):
        counts.update(stream.finish())
        assert max(counts.values()) - min(counts[flow] for flow in range(flows)) <= 2


@given(waiting=st.integers(1, 30), calls=st.integers(1, 8))
@settings(max_examples=100 if LONG else 30)
def test_g6_an_old_run_is_not_starved_by_a_stream_of_new_ones(waiting: int, calls: int) -> None:
    """G6, R-53: each call of an old run starts after two turns of those who wait, however many new runs keep coming.

    New runs all begin with the same start tag: what is being served must move on by itself.
    """
    stream = Stream("P1", 2)
    stream.offer(0, "P")
    stream.offer(1, "P", calls)
    new = 1
    for turn in range(2 * (waiting + 2) * (calls + 2) + 16):
        while len(stream.flows) - 2 - stream.starts.count(-1) < waiting:
            new += 1
            stream.open(new)
            stream.offer(new, "P", owner=-1)
        stream.finish()
        if stream.starts.count(1) == calls:
            assert turn <= 2 * (waiting + 2) * calls + 16
            return
    raise AssertionError(f"{stream.starts.count(1)} of {calls} calls started")


@given(share=st.integers(1, 4), classes=st.integers(1, 3), passes=st.integers(1, 16))
@settings(max_examples=100 if LONG else 30)
def test_g6_a_lower_class_gets_on_by_ageing(share: int, classes: int, passes: int) -> None:
    """G6, S5: passed often enough, a call of a lower class is promoted and then raised, class by class, until it
    starts.
    """
    stream = Stream(f"P{share}", 2, passes=passes)
    stream.offer(0, "P", 2_000, priority=classes)
    stream.offer(1, "P")
    for turn in range(passes * (classes + 2) + share + 1):
        if 1 in stream.finish():
            assert turn >= passes - 1, "a higher class goes first as long as it may"
            return
    raise AssertionError("starved")


@pytest.mark.parametrize("passes", [1, 4, 16])
def test_g6_two_streams_cannot_starve_one_who_wants_both(passes: int) -> None:
    """G6, S5: whoever is tried in vain, now for one thing and now for the other, is passed, and promoted for it."""
    stream = Stream("P1 Q1", 3, passes=passes)
    stream.offer(0, "P", 1_000)
    stream.offer(1, "Q", 1_000)
    stream.offer(2, "P Q")
    for turn in range(3 * passes + 5):
        started = stream.finish()
        if not stream.running or 2 in started:
            assert 2 in started or 2 in stream.finish()
            assert turn <= passes + 2
            return
        if not started:  # held back for the claims
            assert 2 in stream.finish()
            return
    raise AssertionError("starved")


@pytest.mark.parametrize("passes", [1, 16])
@pytest.mark.parametrize("orphans", [0, 1, 4])
def test_g6_a_wide_call_is_bypassed_a_bounded_number_of_times(passes: int, orphans: int) -> None:
    """G6, S5, R-53: a call that needs half of the pool is passed so many times, no more, also beside orphans."""
    stream = Stream("P8", 3, passes=passes)
    if orphans:
        stream.offer(0, "P", orphans)
        for entry in stream.running:
            stream.gate.orphan(entry, 0.0)
        stream.running.clear()
    stream.offer(1, "P", 8 - orphans)
    stream.offer(2, "P4")
    passed = 0
    while 2 not in stream.starts:
        before = len(stream.starts)
        stream.finish()
        stream.offer(1, "P")
        passed += len(stream.starts) - before
        assert passed <= passes + 1
    assert passed >= passes
    assert stream.gate.statistics()["promotions"] == 1


def test_s5_no_claim_for_what_an_orphan_bars() -> None:
    """S5: with too little left beside orphans, a wide call is promoted but holds nobody back; it claims when they
    end.
    """
    stream = Stream("P8", 3, passes=1)
    stream.offer(0, "P", 5)
    orphans, stream.running = stream.running, []
    for entry in orphans:
        stream.gate.orphan(entry, 0.0)
    stream.offer(1, "P", 3)
    stream.offer(2, "P4")
    for _ in range(20):
        stream.finish()
        stream.offer(1, "P")
        assert len(stream.running) == 3
    assert stream.gate.statistics() | {"claimants": 0, "promotions": 1} == stream.gate.statistics()
    stream.took(stream.gate.finish(orphans.pop(), 0.0))
    assert stream.gate.statistics()["claimants"] == 1
    stream.offer(1, "P")
    assert len(stream.running) == 3
    assert [stream.finish(), stream.finish(), stream.finish()] == [[], [], [2]]


# ------------------------------------------------------------------ starvation in figures (FIELD.md B4)


def starvation(load: float, seed: int, *, passes: int, calls: int = 4_000) -> tuple[list[float], list[float]]:
    """A pool of 8, Poisson arrivals, one call in a hundred takes all of it, mean service 1; waits of both kinds.

    Each call is a run of its own.
    """
    rng = Random(seed)
    ledger = make_ledger("P8")
    gate: Gate[int] = Gate(ledger, passes=passes)
    now, waits, wide_waits = 0.0, list[float](), list[float]()
    events: list[tuple[float, int, str, Entry[int] | None]] = []
    number = 0
    mean = 0.99 * 1 + 0.01 * 8
    at = 0.0
    for _ in range(calls):
        at += rng.expovariate(load * 8 / mean)
        events.append((at, number, "wide" if rng.random() < 0.01 else "small", None))
        number += 1
    heapify(events)
    flows: dict[int, Flow[int]] = {}
    while events:
        now, own, word, ended = heappop(events)
        if ended is not None:
            decided = gate.finish(ended, now)
            gate.close_flow(ended.flow)
        else:
            flow = flows[own] = gate.open_flow(own, 1)
            permits = (("P", 8 if word == "wide" else 1),)
            wants: Wants[Lot[int]] = ledger.look_up(Wants(own, word, permits, max_wait=NEVER))
            decided = gate.offer(flow, [(wants, own, now)], now)
        for entry in decided:
            (wide_waits if entry.wants.tool == "wide" else waits).append(now - entry.since)
            number += 1
            heappush(events, (now + rng.expovariate(1.0), number, "end", entry))
    check_empty(gate)
    return waits, wide_waits


@pytest.mark.parametrize(
    ("load", "small_mean", "wide_mean", "wide_most"), [(0.6, 0.8, 7.0, 15.0), (0.8, 4.0, 9.0, 30.0)]
)
def test_g6_whole_pool_calls_are_served_beside_a_stream_of_small_ones(
    load: float, small_mean: float, wide_mean: float, wide_most: float
) -> None:
    """G6, S5, S6, R-53: calls that take the whole pool are all served and wait a bounded time; small ones hardly pay.

    Where nobody is ever promoted they wait many times longer.
    """
    waits, wide = list[float](), list[float]()
    for seed in range(4):
        some, few = starvation(load, seed, passes=16)
        waits += some
        wide += few
    never = [wait for seed in range(4) for wait in starvation(load, seed, passes=10**9)[1]]
    print(
        f"load {load}: small {sum(waits) / len(waits):.2f} mean, {sorted(waits)[len(waits) * 99 // 100]:.1f} p99; "
        "whole pool"
        f" {sum(wide) / len(wide):.1f} mean, {max(wide):.1f} most; never promoted {sum(never) / len(never):.1f}, "
        f"{max(never):.1f}"
    )
    assert sum(waits) / len(waits) < small_mean
    assert sum(wide) / len(wide) < wide_mean
    assert max(wide) < wide_most
    assert max(never) > 2 * max(wide)
