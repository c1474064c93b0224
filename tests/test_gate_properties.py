"""Random histories of gate and ledger beside the naive model of the kit; shares and waits over long streams."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from gate_kit import OWN, Case, One, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from towerman.gate import GRANTED, NEVER

LONG = os.environ.get("TOWERMAN_LONG", "") not in ("", "0")
FLOWS = 4


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
    )
    def begin(self, pools: str, passes: int, window: int, limits: list[float], classes: list[int]) -> None:
        self.classes = classes
        self.pools = pools
        self.world = World(Case("any", pools, passes=passes, window=window, limits=tuple(limits), flows=FLOWS))

    def _add(self, one: One, **more: object) -> int:
        return self.world.add(replace(one, priority=self.classes[one.flow], **more))

    def _one_of(self, data: st.DataObject, calls: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(calls)))

    @rule(data=st.data(), times=st.integers(1, 4))
    def offer(self, data: st.DataObject, times: int) -> None:
        one = data.draw(ones(self.pools, root=self.world.root))
        call = [self._add(one) for _ in range(times)][0]
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
TestHistory.__doc__ = """G2, G3, G6, G7, S2, S5, R-46 to R-50, R-53, R-58 to R-60, R-77 to R-79, R-82, R-83, R-88: one decision per entry, held
<= limit at every instant, free + held = total, nothing both held and waiting, nobody waits for what could be had, nobody
is passed more often than allowed, no wait ends early or late, and after draining all is free and forgotten."""
if not LONG:
    TestHistory.settings = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))


# ------------------------------------------------------------------ long runs


def long_run(seed: int, events: int, every: int) -> Counter[str]:
    """Random events over a small world with many calls; counts what happened."""
    rng = Random(seed)
    pools = rng.choice(["P3 Q2 R1", "P4/1 Q2", "P8 Q3 R2", "P2"])
    case = Case("long", pools, passes=rng.choice([2, 16]), window=rng.choice([1, 2, 4]), flows=6)
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
                world.add(replace(rng.choice(menu), flow=one.flow, priority=one.priority, after=choice[0], urgent=rng.randint(-1, 1)))
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
