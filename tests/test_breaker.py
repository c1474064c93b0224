"""The state machine of a circuit breaker, on numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerman.breaker import VERDICTS, Circuit


def test_it_opens_with_so_many_failures_within_its_window() -> None:
    """Three failures within ten: the third opens it, unless the first is too long ago; successes change nothing."""
    circuit = Circuit(3, 10, 5, 1)
    for instant in (0, 9):
        assert not circuit.back(circuit.go(), "failed", instant)
    assert not circuit.back(circuit.go(), "well", 9)
    assert not circuit.back(circuit.go(), "failed", 10), "the first was ten ago"
    assert circuit.state(10) == "closed"
    assert circuit.back(circuit.go(), "failed", 11)
    assert (circuit.state(11), circuit.opened) == ("open", 1)
    assert not circuit.lets(15)
    assert circuit.retry_after(12) == 4
    assert (circuit.state(16), circuit.lets(16), circuit.retry_after(16)) == ("half_open", True, 0)


def test_half_open_lets_counted_probes_through_and_closes_when_all_are_well() -> None:
    """Two probes at once, no more; both well: closed, and the failures are forgotten."""
    circuit = Circuit(1, 10, 5, 2)
    assert circuit.back(circuit.go(), "failed", 0)
    first, second = (circuit.go() for _ in range(2) if circuit.lets(5))
    assert not circuit.lets(5)
    assert not circuit.back(first, "well", 6)
    assert not circuit.lets(6), "one is well and one is out: that makes two"
    assert not circuit.back(second, "nothing", 6)
    assert circuit.lets(6), "one that came to nothing gives its place back"
    assert not circuit.back(circuit.go(), "well", 7)
    assert (circuit.state(7), circuit.rested(7)) == ("closed", True)


def test_the_first_probe_that_fails_opens_it_again() -> None:
    """For its whole time; what the other probe comes to is of no interest any more."""
    circuit = Circuit(1, 10, 5, 2)
    assert circuit.back(circuit.go(), "failed", 0)
    first, second = circuit.go(), circuit.go()
    assert circuit.back(first, "failed", 6)
    assert (circuit.state(10), circuit.opened) == ("open", 2)
    assert not circuit.back(second, "failed", 10)
    assert circuit.lets(11)
    assert circuit.probing == 0


def test_who_went_before_it_opened_is_not_heard() -> None:
    """Calls that were at work when it opened neither open it again nor close it."""
    circuit = Circuit(1, 10, 5, 1)
    early, late = circuit.go(), circuit.go()
    assert circuit.back(early, "failed", 0)
    assert not circuit.back(late, "failed", 1)
    assert not circuit.back(late, "well", 6)
    assert circuit.state(6) == "half_open"


def test_other_numbers_and_a_clock_that_is_set() -> None:
    """R-64: it stays what it is, its time becomes longer or shorter; a shifted scale changes nothing."""
    circuit = Circuit(2, 9, 4, 1)
    circuit.set(2, 10, 5, 1)
    circuit.back(circuit.go(), "failed", 0)
    circuit.shift(100)
    circuit.back(circuit.go(), "failed", 105)
    assert circuit.state(109) == "open"
    circuit.shift(-100)
    circuit.set(3, 10, 8, 1)
    assert (circuit.state(12), circuit.state(13)) == ("open", "half_open")
    assert circuit.numbers == (3, 10, 8, 1)
    assert repr(circuit) == "Circuit(open or half open, 0 of 3 failures, 0 probes out)"
    assert repr(Circuit(3, 1, 1, 1)) == "Circuit(closed, 0 of 3 failures, 0 probes out)"


def test_fewer_probes_are_asked_for_while_some_are_out() -> None:
    """R-64: where as many have come back well as it asks for by now it closes, for it would let nobody through any
    more; where more are out than it asks for it lets nobody through until enough are back.
    """
    circuit = Circuit(1, 10, 5, 3)
    circuit.back(circuit.go(), "failed", 0)
    circuit.back(circuit.go(), "well", 5)
    late = circuit.go()
    circuit.set(1, 10, 5, 2)
    assert (circuit.state(5), circuit.probing, circuit.lets(5)) == ("half_open", 1, False)
    circuit.set(1, 10, 5, 1)
    assert (circuit.state(5), circuit.lets(5)) == ("closed", True)
    assert not circuit.back(late, "failed", 6)  # of a time that is over
    circuit.validate()

    circuit = Circuit(1, 10, 5, 2)
    circuit.back(circuit.go(), "failed", 0)
    early, late = circuit.go(), circuit.go()
    circuit.set(1, 10, 5, 1)
    assert not circuit.lets(5)
    circuit.back(early, "nothing", 6)
    assert (circuit.probing, circuit.lets(6)) == (1, False)
    circuit.back(late, "nothing", 7)
    assert circuit.lets(7)


@given(
    failures=st.integers(1, 4),
    window=st.integers(1, 12),
    open_for=st.integers(1, 12),
    probes=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["go", *VERDICTS, "wait"]), st.integers(0, 8)), max_size=80),
)
@settings(max_examples=300, deadline=None)
def test_any_history(failures: int, window: int, open_for: int, probes: int, steps: list[tuple[str, int]]) -> None:
    """Beside a plain model: never more probes out than asked for, nothing through while it is open, never stuck."""
    circuit = Circuit(failures, window, open_for, probes)
    now = opened_at = 0
    out: list[int] = []
    failed: list[int] = []
    for step, number in steps:
        if step == "wait":
            now += number
        elif step == "go":
            before = circuit.state(now)
            if circuit.lets(now):
                assert before != "open"
                out.append(circuit.go())
            else:
                assert before != "closed"
        elif out:
            generation = out.pop(number % len(out))
            current, state = generation == circuit.generation, circuit.state(now)
            opened = circuit.back(generation, step, now)  # type: ignore[arg-type]  # one of the verdicts
            if state == "closed" and current and step == "failed":
                failed = [one for one in failed if one > now - window] + [now]
                assert opened == (len(failed) >= failures)
            else:
                assert opened == (current and state == "half_open" and step == "failed")
            if opened:
                failed, opened_at = [], now
            elif circuit.state(now) == "closed" and state != "closed":
                failed = []
        if circuit.opened and circuit.state(now) == "open":
            assert now < opened_at + open_for
        assert circuit.probing <= probes
        circuit.validate()
    for generation in out:
        circuit.back(generation, "nothing", now)
    assert circuit.probing == 0
    now += open_for
    for _ in range(probes):
        if circuit.state(now) != "closed":
            assert circuit.lets(now), "stuck"
            circuit.back(circuit.go(), "well", now)
    assert circuit.state(now) == "closed"
    circuit.validate()


def test_what_cannot_be_is_noticed() -> None:
    """The test of the test."""
    circuit = Circuit(1, 1, 1, 1)
    circuit.probing = 1
    with pytest.raises(AssertionError, match="probes although it is closed"):
        circuit.validate()
