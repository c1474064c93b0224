"""The gate with everything at once: places, resources, rates, breakers, orphans, pauses, changes, clocks that are set.

Beside it stands a plain account that is kept from the outside: who was granted, who has begun, who has ended. The two
are compared after each event, and at the end everything that waits is let through by time alone.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerman.breaker import Circuit, Verdict
from towerman.calls import COMPATIBLE, S, X
from towerman.gate import GRANTED, NEVER, PARKED, REJECTED, Entry, Flow, Gate, Lot
from towerman.ledger import Fuse, Ledger, Meter, Pool, Wants
from towerman.rates import MICRO, Numbers, make

LONG = os.environ.get("TOWERMAN_LONG", "") not in ("", "0")

RATES: dict[str, list[Numbers | None]] = {
    "r": [(2, 3 * MICRO, None, 0), (3, 2 * MICRO, None, 1)],
    "s": [(1, MICRO, 2, 0), (3, 5 * MICRO, 4, 2), None],
}
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
