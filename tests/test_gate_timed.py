"""The gate with everything at once: places, resources, rates, breakers, orphans, pauses, changes, clocks that are set.

Beside it stands a plain account that is kept from the outside: who was granted, who has begun, who has ended. The two
are compared after each event, and at the end everything that waits is let through by time alone.
"""

from __future__ import annotations

import os
from collections import Counter
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from towerman.breaker import Circuit, Verdict
from towerman.calls import COMPATIBLE, S, X
from towerman.gate import GRANTED, NEVER, PARKED, REJECTED, Entry, Flow, Gate, Lot
from towerman.ledger import Fuse, Ledger, Meter, Pool, Wants
from towerman.lots import Backlog, Bay, Line
from towerman.rates import MICRO, Numbers, make
from towerman.turns import Turns

LONG = os.environ.get("TOWERMAN_LONG", "") not in ("", "0")

RATES: dict[str, list[Numbers | None]] = {
    "r": [(2, 3 * MICRO, None, 0), (3, 2 * MICRO, None, 1)],
    "s": [(1, MICRO, 2, 0), (3, 5 * MICRO, 4, 2), None],
}
SHORT_RATES: list[Numbers] = [
    (1, MICRO, None, 0), (2, 3 * MICRO, None, 0), (3, 2 * MICRO, None, 1), (5, MICRO, None, 0),
    (1, MICRO, 2, 0), (4, MICRO, 1, 0), (2, MICRO, 3, 1),
]  # fmt: skip
BREAKERS = {"b": (2, 10 * MICRO, 4 * MICRO, 1), "c": (1, 5 * MICRO, 2 * MICRO, 2)}


class Account:
    """One gate, and what is known about it from the outside."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 100.0
        self.ledger: Ledger[Lot[int]] = Ledger()
        self.pools = {"p": 2, "q": 1}
        for key, limit in self.pools.items():
            self.ledger.add_pool(Pool(key, f"pool {key}", limit, reserve=int(key == "p" and seed % 3 == 0)))
        self.rates = {key: self.random.choice(numbers) for key, numbers in RATES.items()}
        for key, numbers in self.rates.items():
            self.ledger.add_meter(Meter(key, f"rate {key}", make(numbers)))
        for key, others in BREAKERS.items():
            self.ledger.add_fuse(Fuse(key, f"breaker {key}", Circuit(*others)))
        self.gate: Gate[int] = Gate(self.ledger, passes=self.random.choice([1, 3, 16]))
        self.flows: list[Flow[int]] = [self.gate.open_flow(number, 3) for number in range(3)]
        for number in range(3):
            self.ledger.add_pool(Pool(f"own:{number}", "run", 3, scope="run"))
        self.entries: dict[int, Entry[int]] = {}
        self.wants: dict[int, Wants[Lot[int]]] = {}
        self.begun: set[int] = set()
        self.decided: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.starts: dict[str, list[int]] = {"r": [], "s": []}
        self.probing: Counter[str] = Counter()  # when it was looked at last
        self.fixed = True  # no rate was changed, no clock was set
        self.tools = [self._tool(number % 3) for number in range(9)]
        self.made = 0

    def _tool(self, flow: int) -> tuple[int, Wants[Lot[int]]]:
        rng = self.random
        permits = ((f"own:{flow}", 1), *((key, 1) for key in self.pools if rng.random() < 0.5))
        holds = ((("k", rng.choice([S, X])),) if rng.random() < 0.4 else ()) + (
            (("j", X),) if rng.random() < 0.2 else ()
        )
        return flow, self.ledger.look_up(
            Wants(
                flow,
                "tool",
                permits,
                holds,
                priority=int(flow == 2),
                wait=rng.random() < 0.8,
                max_wait=rng.choice([NEVER, NEVER, 2.0, 7.0]),
                bounds=(("all", 6),) if rng.random() < 0.3 else (),
                rates=tuple(key for key in RATES if rng.random() < 0.5),
                breakers=tuple(key for key in BREAKERS if rng.random() < 0.3),
            )
        )

    # ------------------------------------------------------------------ events

    def took(self, decided: list[Entry[int]]) -> None:
        """What the gate has decided."""
        for entry in decided:
            call = entry.owner
            self.decided[call] += 1
            assert self.decided[call] == 1, f"call {call} was decided twice"
            if entry.status == GRANTED:
                self.entries[call] = entry
            else:
                assert entry.status == REJECTED
                code, left = entry.rejection.code, entry.rejection.retry_after
                self.codes[code] += 1
                assert code != "rate_limited" or (left is not None and left > 0), "refused, and it could come at once"
                assert code != "wait_timeout" or entry.wants.max_wait < NEVER

    def offer(self, count: int) -> None:
        """Calls of one tool, or of several of one run."""
        flow, wants = self.random.choice(self.tools)
        asked = [wants if self.random.random() < 0.7 else self.random.choice(
            [other for that, other in self.tools if that == flow]
        ) for _ in range(count)]  # fmt: skip
        offers = []
        for one in asked:
            self.wants[self.made] = one
            offers.append((one, self.made, self.now))
            self.made += 1
        self.took(self.gate.offer(self.flows[flow], offers, self.now))

    def begin(self, call: int) -> None:
        """Its first line is reached."""
        entry = self.entries[call]
        self.gate.begun(entry, self.now)
        self.gate.begun(entry, self.now)  # a second time changes nothing
        self.begun.add(call)
        for meter in entry.wants.meters:
            self.starts[meter.key].append(round(self.now * MICRO))

    def end(self, call: int, verdict: Verdict | None) -> None:
        """Its work ends; a verdict only of what has begun."""
        entry = self.entries[call]
        if verdict is not None and call in self.begun:
            self.took(self.gate.verdict(entry, verdict, self.now))
            self.took(self.gate.verdict(entry, "failed", self.now))  # only the first is heard
        del self.entries[call]
        self.took(self.gate.finish(entry, self.now))

    def tick(self) -> None:
        """The next instant at which something is due."""
        if self.gate.wake_at < NEVER:
            self.now = max(self.now, self.gate.wake_at)
            self.took(self.gate.tick(self.now))
            assert self.gate.wake_at > self.now, "the tick left something due"

    def parked(self) -> list[Entry[int]]:
        return [entry for flow in self.flows for entry in self.gate.parked_of(flow)]

    def step(self) -> None:
        """Anything may happen."""
        rng = self.random
        granted = list(self.entries)
        idle = [call for call in granted if call not in self.begun]
        word = rng.choices(
            ["offer", "begin", "end", "orphan", "cancel", "wait", "tick", "pause", "change", "set"],
            [20, 25, 20, 3, 4, 10, 12, 1, 1, 1],
        )[0]
        if word == "offer" and len(self.parked()) < 30:
            self.offer(rng.choice([1, 1, 2, 5]))
        elif word == "begin" and idle:
            self.begin(rng.choice(idle))
        elif word == "end" and granted:
            self.end(rng.choice(granted), rng.choice(["well", "failed", "nothing", None]))
        elif word == "orphan" and granted:
            entry = self.entries[rng.choice(granted)]
            if not entry.orphan:
                self.took(self.gate.orphan(entry, self.now))
        elif word == "cancel" and self.parked():
            self.took(self.gate.cancel(rng.choice(self.parked()), self.now))
        elif word == "wait":
            self.now += rng.choice([0.1, 0.5, 1.0, 3.0])
        elif word == "tick":
            self.tick()
        elif word == "pause" and granted:
            self.took(self.gate.pause(self.entries[rng.choice(granted)].wants.meters, rng.choice([0.5, 4.0]), self.now))
        elif word == "change":
            self.fixed = False
            key = rng.choice(list(RATES))
            self.rates[key] = rng.choice(RATES[key])
            meter = self.ledger.meters[key]
            fuse = self.ledger.fuses[rng.choice(list(BREAKERS))]
            numbers = rng.choice(list(BREAKERS.values()))
            limits = [(self.ledger.pools["p"], rng.choice([1, 2, 3]), 0, True)]
            self.took(self.gate.reconfigure(limits, [], self.now, [(meter, self.rates[key], True)], [(fuse, numbers)]))
        elif word == "set":
            self.fixed = False
            self.now = max(50.0, self.now - rng.choice([0.5, 20.0]))
        self.check()

    # ------------------------------------------------------------------ the plain account

    def check(self) -> None:
        """Each quantity is what was granted and has not ended: all or nothing, nothing twice, nothing lost."""
        self.gate.validate()
        holders = list(self.entries.values())
        for key, pool in self.ledger.pools.items():
            held = sum(units for entry in holders for that, units in entry.wants.permits if that == key)
            assert pool.held == held, f"{pool} should hold {held}"
        taken = [(number, key, mode) for number, entry in enumerate(holders) for key, mode in entry.wants.holds]
        for one, key, mode in taken:
            assert all(COMPATIBLE[mode][other] for two, that, other in taken if that == key and one != two)
        waiting = [call for call, entry in self.entries.items() if call not in self.begun]
        for meter in self.ledger.meters.values():
            pending = sum(meter in self.entries[call].wants.meters for call in waiting)
            assert meter.pace.pending == pending, f"{meter} should have {pending} to begin"
        for fuse in self.ledger.fuses.values():
            out = sum(fuse in entry.wants.fuses for entry in holders)
            probing = fuse.circuit.probing
            assert probing <= out, f"{fuse} has lost a probe"
            # Fewer may be asked for while more are out; none is added to those.
            assert probing <= max(self.probing[fuse.key], fuse.circuit.probes), f"{fuse} lets too many through"
            self.probing[fuse.key] = probing
            assert probing or fuse.circuit.lets(round(self.now * MICRO) + 10**9), f"{fuse} is shut for ever"

    def check_rates(self) -> None:
        """No window held more starts than it may, and no stretch more than the burst and the pace; by first lines."""
        for key, numbers in self.rates.items():
            if numbers is None or not self.fixed:
                continue
            limit, period, burst, _ = numbers
            starts = self.starts[key]
            for first, since in enumerate(starts):
                inside = sum(since <= start < since + period for start in starts[first:])
                if burst is None:
                    assert inside <= limit, f"{key}: {inside} starts from {since} on"
                for number, start in enumerate(starts[first:] if burst is not None else (), 1):
                    assert (number - (burst or 0)) * period <= (start - since) * limit, (
                        f"{key}: {number} from {since} on"
                    )

    def drain(self) -> None:
        """Whatever runs ends, and whoever waits is let through or refused, by time alone."""
        for _ in range(10_000):
            for call in list(self.entries):
                if call not in self.begun:
                    self.begin(call)
                self.end(call, "well")
            if not self.parked() and not self.entries:
                break
            if not self.entries:
                assert self.gate.wake_at < NEVER, "those who wait are woken by nobody"
                self.tick()
            self.check()
        assert not self.parked(), f"{len(self.parked())} wait for ever"
        assert set(self.decided) == set(range(self.made)), "somebody was forgotten"
        self.gate.validate()
        assert self.ledger.counts() == (0, 0)
        assert not self.gate._marks
        for meter in self.ledger.meters.values():
            assert meter.pace.pending == 0
            assert meter.lot is None
        for flow in self.flows:
            self.gate.close_flow(flow)


def history(seed: int, steps: int) -> Counter[str]:
    """A random history of so many events; how it was refused."""
    account = Account(seed)
    for _ in range(steps):
        account.step()
    account.check_rates()
    account.drain()
    account.codes["granted"] = account.made - sum(account.codes.values())
    return account.codes


@given(seed=st.integers(0, 10**9))
@example(700030)  # an alarm for this very instant, set while the instant is dealt with
@example(5618441)  # a first line that comes when what a pause has left is over
@settings(max_examples=600 if LONG else 60, deadline=None)
def test_g2_g3_everything_at_once(seed: int) -> None:
    """G2, G3, G6, R-49, R-58, R-60, R-91, R-94, S7: places, resources, rates and breakers are taken together or not at
    all; each quantity is conserved over any history; nobody waits for what could be had, and time alone lets everybody
    through in the end.
    """
    history(seed, 120)


def test_every_kind_of_refusal_happens() -> None:
    """The test of the test: the random histories meet every way in which the gate says no."""
    codes: Counter[str] = Counter()
    for seed in range(40):
        codes += history(seed, 150)
    assert set(codes) >= {
        "granted",
        "cancelled",
        "circuit_open",
        "concurrency_limit",
        "queue_full",
        "rate_limited",
        "wait_timeout",
    }, codes
    assert codes["granted"] > 500


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_g3_very_long_histories_with_everything(seed: int) -> None:
    """G3, R-48: tens of thousands of events."""
    print(seed, dict(history(1000 + seed, 30_000)))


def test_s5_whoever_waits_for_a_rate_claims_nothing() -> None:
    """S5: a waiter that was passed often and waits for a rate hides no free place from others."""
    ledger: Ledger[Lot[int]] = Ledger()
    ledger.add_pool(Pool("p", "pool p", 1))
    ledger.add_meter(Meter("r", "rate r", make((2, 100 * MICRO, None, 1))))
    gate: Gate[int] = Gate(ledger, passes=1)
    low, high = gate.open_flow(0, 4), gate.open_flow(1, 4)
    slow = ledger.look_up(Wants(0, "slow", (("p", 1),), max_wait=NEVER, rates=("r",)))
    rated = ledger.look_up(Wants(1, "rated", (("p", 1),), priority=1, max_wait=NEVER, rates=("r",)))
    free = ledger.look_up(Wants(1, "free", (("p", 1),), max_wait=NEVER))
    [first] = gate.offer(low, [(slow, 0, 0.0)], 0.0)
    gate.begun(first, 0.0)
    gate.finish(first, 0.0)
    assert gate.offer(low, [(slow, 1, 0.0)], 0.0) == []
    [second] = gate.offer(high, [(rated, 2, 0.0)], 0.0)
    gate.begun(second, 0.0)
    gate.finish(second, 0.0)
    (waiter,) = gate.parked_of(low)
    assert waiter.promoted
    assert gate.statistics()["claimants"] == 0
    [third] = gate.offer(high, [(free, 3, 0.0)], 0.0)
    assert third.status == GRANTED
    assert waiter.status == PARKED


class Streams:
    """Endless work of other runs for each pool and each rate by itself and for some two of them, and one call that
    wants several of these at once.
    """

    def __init__(self, seed: int) -> None:
        pick = self.random = Random(seed)
        self.ledger: Ledger[Lot[int]] = Ledger()
        self.pools = {key: pick.choice([1, 1, 2, 3]) for key in "pq"}
        self.rates: dict[str, Numbers] = {key: pick.choice(SHORT_RATES) for key in "rs"}
        for key, limit in self.pools.items():
            self.ledger.add_pool(Pool(key, f"pool {key}", limit))
        for key, numbers in self.rates.items():
            self.ledger.add_meter(Meter(key, f"rate {key}", make(numbers)))
        self.longest = pick.choice([0.3, 1.0, 2.0])
        self.gate: Gate[int] = Gate(self.ledger, passes=2)
        things = [*self.pools, *self.rates]
        wanted = pick.sample(things, pick.choice([2, 2, 3, 4]))
        if not set(wanted) & set(self.rates):
            wanted.append(pick.choice(list(self.rates)))
        asked = [[key] for key in things] + [pick.sample(things, 2)]
        self.streams = [(self.gate.open_flow(flow, 8), self._wants(flow, keys)) for flow, keys in enumerate(asked)]
        self.mine = self.gate.open_flow(99, 8)
        self.wants = self._wants(99, wanted, pick.choice([1, 1, 2]))
        self.running: list[tuple[float, int, Entry[int]]] = []
        self.now, self.made, self.since, self.started = 0.0, 0, NEVER, NEVER

    def _wants(self, flow: int, keys: list[str], units: int = 1) -> Wants[Lot[int]]:
        permits = tuple((key, min(self.pools[key], units)) for key in keys if key in self.pools)
        rates = tuple(key for key in keys if key in self.rates)
        return self.ledger.look_up(Wants(flow, "tool", permits, (), rates=rates, max_wait=NEVER))

    def took(self, decided: list[Entry[int]]) -> None:
        for entry in decided:
            assert entry.status == GRANTED
            if entry.owner < 0:
                self.started = self.now
            if entry.wants.marked:
                self.gate.begun(entry, self.now)
            end = self.now + self.random.uniform(0.01, self.longest)
            heappush(self.running, (end, entry.owner, entry))

    def wait(self) -> float:
        """How long the one call waits; NEVER: longer than anybody would look."""
        gate = self.gate
        while self.now < 300.0 and self.started == NEVER:
            for flow, wants in self.streams:
                while flow.parked_total + flow.behind < 3:
                    self.took(gate.offer(flow, [(wants, self.made, self.now)], self.now))
                    self.made += 1
            if self.since == NEVER and self.now > 3.0:
                self.since = self.now
                self.took(gate.offer(self.mine, [(self.wants, -1, self.now)], self.now))
            gate.validate()
            self.now = max(self.now, min(self.running[0][0], gate.wake_at) if self.running else gate.wake_at)
            while self.running and self.running[0][0] <= self.now:
                self.took(gate.finish(heappop(self.running)[2], self.now))
            if gate.wake_at <= self.now:
                self.took(gate.tick(self.now))
        return self.started - self.since


@pytest.mark.parametrize("part", range(4))
def test_g6_s5_nobody_is_passed_for_ever_whatever_is_needed_together(part: int) -> None:
    """G6, S5: of pools and rates that others keep busy without a pause a call gets several at once: after it was passed
    so often that it goes first, it waits for each of them once, each time as long as one call or one period takes.
    """
    for seed in range(25 * part, 25 * part + 25):
        streams = Streams(seed)
        period = max(numbers[1] for numbers in streams.rates.values()) / MICRO
        most = (2 + 4) * (streams.longest + period)  # 2 passes, 4 things
        waited = streams.wait()
        assert waited <= most, f"seed {seed}: waited {waited} s"


def test_s5_a_start_is_hidden_from_those_who_came_later_and_given_back_with_the_claim() -> None:
    """S5: who was passed and waits for a pool has one start of its rate put aside; when it is cancelled, others have
    it at once.
    """
    ledger: Ledger[Lot[int]] = Ledger()
    ledger.add_pool(Pool("p", "pool p", 1))
    ledger.add_meter(Meter("r", "rate r", make((2, 10 * MICRO, None, 0))))
    gate: Gate[int] = Gate(ledger, passes=1)
    one, other, urgent = gate.open_flow(0, 4), gate.open_flow(1, 4), gate.open_flow(2, 4)
    both = ledger.look_up(Wants(0, "both", (("p", 1),), max_wait=NEVER, rates=("r",)))
    place = ledger.look_up(Wants(1, "place", (("p", 1),), max_wait=NEVER))
    high = ledger.look_up(Wants(2, "high", (("p", 1),), max_wait=NEVER, priority=1))
    start = ledger.look_up(Wants(1, "start", (), max_wait=NEVER, rates=("r",)))
    asks = ledger.look_up(Wants(1, "asks", (), wait=False, rates=("r",)))
    [begun] = gate.offer(other, [(start, 0, 0.0)], 0.0)
    gate.begun(begun, 0.0)
    gate.finish(begun, 0.0)
    [first] = gate.offer(other, [(place, 1, 0.0)], 0.0)
    assert gate.offer(one, [(both, 2, 0.0)], 0.0) == []
    assert gate.offer(urgent, [(high, 3, 0.0)], 0.0) == []
    [second] = gate.finish(first, 1.0)
    (waiter,) = gate.parked_of(one)
    assert second.owner == 3 and waiter.promoted  # it was passed once
    gate.validate()
    [refused] = gate.offer(other, [(asks, 4, 1.0)], 1.0)  # one start is left, and it is not for this one
    assert (refused.rejection.code, refused.rejection.retry_after) == ("rate_limited", 9.0)
    assert gate.offer(other, [(start, 5, 1.0)], 1.0) == []
    gate.validate()
    assert [entry.owner for entry in gate.cancel(waiter, 2.0) if entry.status == GRANTED] == [5]
    gate.validate()


def test_an_explained_wait_behind_two_rates() -> None:
    """A call behind two rates, of which one has room again when the other has: it goes when both have."""
    ledger: Ledger[Lot[int]] = Ledger()
    for key, numbers in (("r", (1, 2 * MICRO, None, 0)), ("s", (1, 3 * MICRO, None, 0))):
        ledger.add_meter(Meter(key, f"rate {key}", make(numbers)))  # type: ignore[arg-type]  # the numbers are right
    gate: Gate[int] = Gate(ledger)
    flow = gate.open_flow(0, 4)
    both = ledger.look_up(Wants(0, "both", (), max_wait=NEVER, rates=("r", "s")))
    [first] = gate.offer(flow, [(both, 0, 0.0), (both, 1, 0.0)], 0.0)
    gate.begun(first, 0.0)
    (waiter,) = gate.parked_of(flow)
    assert gate.tick(2.0) == []
    assert waiter.blocked_by == ("rate r", "rate s")
    assert gate.tick(3.0) == [waiter]
    gate.begun(waiter, 3.0)
    assert gate.finish(first, 3.0) == gate.finish(waiter, 3.0) == []
    gate.validate()


# --- what a wake costs ------------------------------------------------------------------------------------------------


class Batch:
    """Calls of one batch, for `Gate.offer_row`."""

    def __init__(self, wants: list[Wants[Lot[int]] | None], first: int = 0) -> None:
        self.wants: list[Wants[Lot[int]] | None] = wants
        self.first = first

    def owner(self, index: int) -> int:
        return self.first + index


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of one number: how often somebody was looked at, taken in, or put behind others one by one."""
    count = [0]

    def counted(of: type, name: str) -> None:
        real = getattr(of, name)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            count[0] += 1
            return real(self, *given, **named)

        monkeypatch.setattr(of, name, call)

    for of, name in ((Turns, "_enter"), (Ledger, "blocker"), (Line, "behind"), (Backlog, "append"), (Bay, "head")):
        counted(of, name)
    return count


RULES: list[Numbers] = [(5, MICRO, None, 0), (5, MICRO, 4, 0), (4, MICRO, None, 1)]


def wake_costs(
    monkeypatch: pytest.MonkeyPatch, numbers: Numbers, calls: int, *, kinds: int, runs: int, row: bool, window: int
) -> tuple[int, list[int]]:
    """So many calls wait for one rate and the places of their runs; the most that an event looks at, and who started,
    in order, in the first 20 s.
    """
    ledger: Ledger[Lot[int]] = Ledger()
    ledger.add_meter(Meter("r", "rate r", make(numbers)))
    for run in range(runs):
        ledger.add_pool(Pool(f"own:{run}", "run", window, scope="run"))
    gate: Gate[int] = Gate(ledger)
    flows = [gate.open_flow(run, window) for run in range(runs)]
    granted: list[Entry[int]] = []
    started: list[int] = []
    for run, flow in enumerate(flows):
        tools = [
            ledger.look_up(Wants(run, f"tool {kind}", ((f"own:{run}", 1),), max_wait=NEVER, rates=("r",)))
            for kind in range(kinds)
        ]
        mine = [tools[index % kinds] for index in range(calls // runs)]
        first = run * (calls // runs)
        if row:
            granted += gate.offer_row(flow, Batch([*mine], first), range(len(mine)), 0.0)
        else:
            granted += gate.offer(flow, [(want, first + index, 0.0) for index, want in enumerate(mine)], 0.0)
    count, most = looks(monkeypatch), 0

    def heard(decided: list[Entry[int]]) -> None:
        nonlocal most
        most, count[0] = max(most, count[0]), 0
        granted.extend(decided)

    now = 0.0
    while now < 20:
        while granted:
            entry = granted.pop(0)
            started.append(entry.owner)
            gate.begun(entry, now)
            heard(gate.finish(entry, now))
        now = gate.wake_at
        heard(gate.tick(now))
    monkeypatch.undo()
    gate.validate()
    return most, started


@pytest.mark.parametrize("numbers", RULES)
@pytest.mark.parametrize(
    ("kinds", "runs", "row"), [(1, 1, True), (1, 1, False), (4, 1, True), (4, 1, False), (1, 40, True), (2, 20, False)]
)
def test_g6_s5_a_wake_does_not_look_at_all_who_wait(
    numbers: Numbers, kinds: int, runs: int, row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6, S5, P-40: whoever waits for a rate, as one run or many, for one tool or several that share the rate, costs
    each wake and each end as little when ten times as many wait; and within a run they start in emitted order.
    """
    for window in (2, 30):
        options: dict[str, Any] = {"numbers": numbers, "kinds": kinds, "runs": runs, "row": row, "window": window}
        few, _ = wake_costs(monkeypatch, calls=400, **options)
        many, started = wake_costs(monkeypatch, calls=4000, **options)
        assert many <= max(few, 60), "it depends on how many wait"
        assert len(started) >= 60
        share = 4000 // runs
        for run in range(runs):
            mine = [call for call in started if call // share == run]
            assert mine == list(range(run * share, run * share + len(mine))), "not in emitted order"
        fair = [sum(call // share == run for call in started) for run in range(runs)]
        assert max(fair) - min(fair) <= max(numbers[0], window if runs == 1 else 2), "not shared fairly"


def test_s10_callers_whose_calls_wait_for_a_rate_share_a_bay() -> None:
    """S10, G6: a start cannot be lent, so nested calls of many callers wait for a rate among all the others, and a wake
    does not look at each caller.
    """
    ledger: Ledger[Lot[int]] = Ledger()
    meter = ledger.add_meter(Meter("r", "rate r", make((1, MICRO, None, 0))))
    gate: Gate[int] = Gate(ledger)
    flow = gate.open_flow(0, 100)
    outer = ledger.look_up(Wants(0, "outer", (), max_wait=NEVER))
    callers = gate.offer(flow, [(outer, number, 0.0) for number in range(5)], 0.0)
    inner: list[Entry[int]] = []
    for number, caller in enumerate(callers):
        want = ledger.look_up(Wants(0, "inner", (), max_wait=NEVER, rates=("r",)))
        want.loan, want.borrowed = gate.lend(caller), []
        inner += gate.offer(flow, [(want, 10 + number, 0.0)], 0.0)
    gate.validate()
    assert meter.lot is not None and (len(meter.lot.bays), meter.lot.count) == (1, 4)
    now = 0.0
    for _ in range(5):
        (entry,) = inner
        gate.begun(entry, now)
        assert gate.finish(entry, now) == []
        now += 1
        inner = gate.tick(now)
    for caller in callers:
        gate.lent_back(caller, now)
        gate.finish(caller, now)
    gate.validate()
    gate.close_flow(flow)


def test_s6_siblings_behind_one_rate_pass_those_whose_pool_is_full() -> None:
    """S6, G3: of calls of one run that wait for one rate, those go on for whom nothing else is in the way: what other
    runs hold keeps back whoever wants it and nobody else; each of them goes when it can, in emitted order.
    """
    ledger: Ledger[Lot[int]] = Ledger()
    ledger.add_meter(Meter("r", "rate r", make((4, MICRO, None, 0))))
    pools = [ledger.add_pool(Pool(key, f"pool {key}", 1)) for key in ("x", "y")]
    ledger.add_pool(Pool("own", "run", 3, scope="run"))
    gate: Gate[int] = Gate(ledger)
    flow, other = gate.open_flow(0, 3), gate.open_flow(1, 3)
    held = [gate.offer(other, [(ledger.look_up(Wants(1, "hold", ((key, 1),))), -1, 0.0)], 0.0)[0] for key in ("x", "y")]
    tools = [
        ledger.look_up(Wants(0, f"tool {key}", (("own", 1), *((one, 1) for one in key)), max_wait=NEVER, rates=("r",)))
        for key in ("x", "y", "")
    ]
    calls = 90
    granted = gate.offer_row(flow, Batch([tools[index % 3] for index in range(calls)]), range(calls), 0.0)
    started: list[int] = []
    now = 0.0

    def play(until: float) -> None:
        nonlocal now, granted
        while True:
            while granted:
                entry = granted.pop(0)
                started.append(entry.owner)
                gate.begun(entry, now)
                granted += gate.finish(entry, now)
                gate.validate()
            if not now <= gate.wake_at <= until:
                return
            now = gate.wake_at
            granted += gate.tick(now)
            gate.validate()

    play(3.0)
    assert started == list(range(2, calls, 3))[:16]
    granted += gate.finish(held[0], now)
    play(9.0)
    assert [call for call in started if call % 3 == 0] == list(range(0, calls, 3))[: sum(c % 3 == 0 for c in started)]
    assert not any(call % 3 == 1 for call in started)
    granted += gate.finish(held[1], now)
    play(60.0)
    assert sorted(started) == list(range(calls))
    for kind in range(3):
        assert [call for call in started if call % 3 == kind] == list(range(kind, calls, 3))
    assert [pool.held for pool in pools] == [0, 0]
    assert not gate.parked_of(flow)
    gate.close_flow(flow)
    gate.close_flow(other)


@pytest.mark.parametrize("kind", ["reject", "breaker", "impatient", "too wide", "heavier", "another", "plain"])
@pytest.mark.parametrize("over", [0, 300])
def test_g1_each_of_those_who_move_on_together_is_decided(kind: str, over: int) -> None:
    """G1, R-67: calls of one run that wait behind one another for its places and for a rate, among them those who
    refuse to wait, go through a breaker, wait less long, want more than there will ever be, or want something else:
    each gets one decision, the one that it would have got alone, also where there are more kinds than are looked at.
    """
    ledger: Ledger[Lot[int]] = Ledger()
    ledger.add_meter(Meter("r", "rate r", make((3, MICRO, None, 0))))
    ledger.add_meter(Meter("s", "rate s", make((1, MICRO, 2, 0))))
    ledger.add_pool(Pool("own", "run", 2, scope="run"))
    shrunk = ledger.add_pool(Pool("p", "pool p", 4))
    ledger.add_fuse(Fuse("b", "breaker b", Circuit(1, 10 * MICRO, 10**9 * MICRO, 1)))
    gate: Gate[int] = Gate(ledger)
    flow = gate.open_flow(0, 2)

    def tool(name: str, units: int = 1, own: int = 1, rates: tuple[str, ...] = ("r",), **more: Any) -> Wants[Lot[int]]:
        wants = Wants[Lot[int]](0, name, (("own", own), ("p", units)), **{"max_wait": NEVER, **more}, rates=rates)
        return ledger.look_up(wants)

    usual = tool("usual")
    odd = {
        "reject": lambda: tool("reject", wait=False),
        "breaker": lambda: tool("breaker", breakers=("b",)),
        "impatient": lambda: tool("impatient", max_wait=0.2),
        "too wide": lambda: tool("too wide", units=4),
        "heavier": lambda: tool("heavier", own=2),
        "another": lambda: tool("another", rates=("s",)),
        "plain": lambda: tool("plain"),
    }[kind]()
    wants = [odd if index % 5 == 4 else usual for index in range(20)]
    wants += [tool(f"many {number}") for number in range(over)]
    decided = gate.offer(flow, [(want, index, 0.0) for index, want in enumerate(wants)], 0.0)
    ledger.fuses["b"].circuit.back(ledger.fuses["b"].circuit.go(), "failed", 0)
    decided += gate.reconfigure([(shrunk, 3, 0, True)], [], 0.0)
    codes: dict[int, str | None] = {}
    now = 0.0
    while decided:
        entry = decided.pop(0)
        assert entry.owner not in codes, "decided twice"
        codes[entry.owner] = None if entry.status == GRANTED else entry.rejection.code
        if entry.status == GRANTED:
            gate.begun(entry, now)
            decided += gate.finish(entry, now)
        while not decided and gate.wake_at < NEVER:
            now = gate.wake_at
            decided += gate.tick(now)
        gate.validate()
    assert set(codes) == set(range(len(wants))), "somebody was forgotten"
    told = {codes[index] for index in range(4, 20, 5)}
    allowed: dict[str, set[str | None]] = {
        "reject": {None, "rate_limited"},
        "breaker": {"circuit_open"},
        "impatient": {"rate_limited", "wait_timeout"},
        "too wide": {"concurrency_limit"},
        "heavier": {None},
        "another": {None},
        "plain": {None},
    }
    assert told <= allowed[kind], told
    assert {codes[index] for index, want in enumerate(wants) if want is not odd} == {None}
    assert not gate.parked_of(flow) and not flow.lines
    gate.close_flow(flow)
