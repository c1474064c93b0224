"""The gate, event by event: who starts, who waits and for what, who is refused, and when."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise, permutations
from random import Random

import pytest
from gate_kit import Desk, Listed, One, Stream, check_empty, make_ledger, steps_of, wants_of

from towerman import lots
from towerman.calls import IX, S, X
from towerman.gate import DONE, GRANTED, NEVER, PARKED, REJECTED, Entry, Gate, Lot
from towerman.ledger import Wants
from towerman.lots import NEAR, Row

# ------------------------------------------------------------------ permits: taken once, given back once


@pytest.mark.parametrize("end", ["finish", "orphan, finish", "cancel"])
def test_r45_r86_whatever_the_end_the_slot_comes_back(end: str) -> None:
    """R-45, R-86, G7: whichever way it ends, the permit is back when the work has ended; a cancelled waiter had
    none.
    """
    desk = Desk("P1")
    desk.offer("a b", One(0, "P"))
    if end == "cancel":
        assert desk.cancel("b") == []
    if end == "orphan, finish":
        assert desk.orphan("a") == []
        assert desk.held("P") == 1
    assert desk.finish("a") == ([] if end == "cancel" else ["b"])
    desk.check_empty()


def test_r46_r49_r50_the_count_changes_when_the_slot_is_handed_over() -> None:
    """R-46, R-49, R-50, P-10: with 800 calls for 8 permits exactly 8 are held, at every instant and hand-over."""
    desk = Desk("P8")
    names = [str(number) for number in range(800)]
    desk.offer(" ".join(names), One(0, "P"))
    assert (len(desk.started), len(desk.parked()), len(desk.behind())) == (8, 1, 791)
    for place in range(792):
        assert desk.held("P") == 8
        assert desk.finish(names[place]) == [names[place + 8]]
    assert desk.started == names
    assert desk.ledger.pools["P"].peak == 8
    desk.check_empty()


def test_r48_d1_limit_2_and_6_calls_leave_the_capacity_whole() -> None:
    """R-48, R-137, D-1: after two permits went through six calls, two more are granted at once, and a third is not."""
    desk = Desk("P2")
    desk.offer("a b c d e f", One(0, "P"))
    for name in "abcdef":
        desk.finish(name)
        assert desk.held("P") <= 2
    assert desk.held("P") == 0
    assert desk.offer("x y z", One(0, "P")) == ["x", "y"]
    desk.check_empty()


def test_r47_a_second_release_does_nothing() -> None:
    """R-47, R-82, D-2: a second release frees nobody else's permit; it is counted."""
    desk = Desk("P1")
    desk.offer("a b c", One(0, "P"))
    assert desk.finish("a") == ["b"]
    assert desk.finish("a") == []
    assert desk.orphan("a") == []
    assert desk.held("P") == 1
    assert desk.gate.statistics()["late_events"] == 2
    assert desk.finish("a", ("d", One(0, "P"))) == []
    assert sorted([*desk.parked(), *desk.behind()]) == ["c", "d"]
    desk.check_empty()


def test_r53_first_come_first_served() -> None:
    """R-53, P-46: runs with one call each are served in the order in which they came, and so are the calls of one
    run.
    """
    desk = Desk("P1")
    desk.offer("a1 a2 a3", One(0, "P"))
    for run in range(1, 5):
        desk.offer(f"r{run}", One(run, "P"))
    for name in ["a1", "r1", "r2", "r3", "r4", "a2"]:
        desk.finish(name)
    assert desk.started == ["a1", "r1", "r2", "r3", "r4", "a2", "a3"]
    desk.check_empty()


def test_p46_five_that_hurry_do_not_starve_one_that_waits() -> None:
    """P-46: five callers that come again at once, for a hundred rounds, leave the one that waits its turn within a
    turn.
    """
    stream = Stream("P1", 6, window=1)
    for flow in range(1, 6):
        stream.offer(flow, "P")
    stream.offer(0, "P")
    for _ in range(600):
        ended = stream.starts[-1]
        stream.finish()
        stream.offer(ended, "P")
    assert stream.starts.index(0) == 5
    turns = [place for place, flow in enumerate(stream.starts) if flow == 0]
    assert all(later - earlier == 6 for earlier, later in pairwise(turns))


def test_p47_whoever_takes_it_again_at_once_waits_its_turn() -> None:
    """P-47: a run of 400 calls in a row lets another run's one call start after its present call, not after the
    last.
    """
    desk = Desk("P1")
    desk.offer(" ".join(f"a{number}" for number in range(400)), One(0, "P"))
    desk.offer("b", One(1, "P"))
    assert desk.finish("a0") == ["b"]
    assert desk.finish("b") == ["a1"]


def test_r54_r55_r57_pools_of_every_kind() -> None:
    """R-54, R-55, R-57, P-11: a limit for all, smaller ones per tool, one that several tools share; each holds."""
    desk = Desk("G4 A2 D3 N1")
    for pair in range(6):
        desk.offer(f"a{pair}", One(0, "G A"))
        desk.offer(f"d{pair}", One(0, "G D"))
    assert desk.started == ["a0", "d0", "a1", "d1"]
    while desk.parked():
        running = [name for name in desk.started if desk.granted[name].status == GRANTED]
        assert desk.held("A") <= 2
        assert desk.held("D") <= 3
        assert len(running) == 4 == desk.held("G")
        desk.finish(running[0])
    assert len(desk.started) == 12
    for name in desk.started:
        desk.finish(name)
    assert desk.offer("s", One(1, "G A N")) == ["s"]
    assert desk.offer("t", One(2, "G D N")) == []
    desk.check_empty()


def test_r58_a_call_that_waits_for_its_tool_holds_no_global_slot() -> None:
    """R-58, D-3: with two global slots and one for `search`, another call starts while the second search waits."""
    desk = Desk("G2 S1")
    desk.offer("s1 s2", One(0, "G S"))
    assert (desk.held("G"), desk.held("S")) == (1, 1)
    assert desk.offer("other", One(0, "G")) == ["other"]
    assert desk.finish("s1") == ["s2"]
    desk.check_empty()


@pytest.mark.parametrize("seed", range(40))
def test_r59_no_order_of_pools_deadlocks(seed: int) -> None:
    """R-59: calls that want random pools in random orders all get through, whichever ends first."""
    rng = Random(seed)
    names = "PQRT"[: rng.randint(2, 4)]
    desk = Desk(" ".join(f"{name}{rng.randint(1, 3)}" for name in names), passes=rng.choice([1, 3, 16]))
    for call in range(60):
        wanted = rng.sample(names, rng.randint(1, len(names)))
        permits = " ".join(f"{name}{rng.randint(1, desk.ledger.pools[name].limit)}" for name in wanted)
        desk.offer(str(call), One(rng.randrange(5), permits, priority=0))
    while len(desk.started) < 60:
        running = [name for name in desk.started if desk.granted[name].status == GRANTED]
        assert running, f"{sorted(desk.parked())} wait and nothing runs"
        desk.finish(rng.choice(running))
    desk.check_empty()


def test_r60_nothing_of_what_could_not_be_had_wholly_is_kept() -> None:
    """R-60: a call that waits for the second of its pools has nothing of the first, nor when its wait ends in vain."""
    desk = Desk("P1 Q1")
    desk.offer("q", One(0, "Q"))
    desk.offer("both", One(1, "P Q", "k:X", max_wait=5))
    assert (desk.held("P"), desk.ledger.node("k")) == (0, None)
    desk.tick()
    assert desk.refused == {"both": "wait_timeout"}
    assert (desk.held("P"), desk.ledger.node("k")) == (0, None)
    desk.check_empty()


def test_g4_what_touches_one_thing_is_apart() -> None:
    """G4, R-56: readers of one key overlap, writers do not; a subtree waits for all below it."""
    desk = Desk()
    desk.offer("r1 r2", One(0, holds="k:S"))
    desk.offer("w", One(1, holds="k:X"))
    assert desk.started == ["r1", "r2"]
    assert desk.finish("r1") == []
    assert desk.finish("r2") == ["w"]
    desk.offer("below", One(2, holds="root:IX a:X"))
    assert desk.offer("tree", One(3, holds="root:S")) == []
    assert desk.offer("beside", One(4, holds="root:IX b:X")) == ["beside"]
    assert desk.finish("below") == []
    assert desk.finish("beside") == ["tree"]
    desk.check_empty()


def test_a_run_writes_one_key_again_and_again() -> None:
    """Several calls of one run that stand behind each other for a key nobody else wants: the key is not forgotten
    between them.
    """
    desk = Desk()
    for name in ("a", "b", "c", "d"):
        desk.offer(name, One(0, holds="k:X", max_wait=float(len(desk.started) + 1)))
    for name, heir in [("a", "b"), ("b", "c"), ("c", "d")]:
        assert desk.finish(name) == [heir]
    desk.check_empty()


# ------------------------------------------------------------------ waiting, refusing


def test_r66_a_wait_that_is_over_ends_in_an_error_and_never_in_a_start() -> None:
    """R-66, R-76: whoever waited for its time leaves the queue with `wait_timeout`, and is not started later."""
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    desk.offer("b", One(1, "P", max_wait=5))
    desk.now = 1
    desk.offer("c", One(2, "P", max_wait=5))
    assert desk.gate.wake_at == 5
    assert desk.tick(4.9) == []
    assert desk.refused == {}
    desk.tick(5)
    assert desk.refused == {"b": "wait_timeout"}
    assert list(desk.parked()) == ["c"]
    assert desk.gate.wake_at == 6
    assert desk.finish("a") == ["c"]
    desk.check_empty()


@pytest.mark.parametrize("alike", [True, False])
def test_r66_a_permit_that_comes_at_the_last_instant_comes_too_late(alike: bool) -> None:
    """R-66, G6: what is over at this instant is refused, also when a permit becomes free before the clock is looked
    at.
    """
    desk = Desk("P1 Q9")
    desk.offer("a", One(0, "P"))
    desk.offer("b", One(1, "P" if alike else "P Q", max_wait=5))
    desk.offer("c", One(2, "P", max_wait=9))
    desk.now = 5
    assert desk.finish("a") == ["c"]
    assert desk.refused == {"b": "wait_timeout"}
    desk.check_empty()


def test_r67_fail_fast() -> None:
    """R-65, R-67, R-75: a call that refuses to wait is answered at once, without queueing, and never comes back by
    itself.
    """
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    assert desk.offer("b", One(1, "P", wait=False)) == []
    assert desk.refused == {"b": "concurrency_limit"}
    assert desk.gate.statistics()["peak_parked"] == 0
    assert desk.finish("a") == []
    assert desk.offer("c", One(1, "P", wait=False)) == ["c"]
    desk.check_empty()


def test_r67_refused_for_a_key_that_is_held_or_claimed() -> None:
    """R-67: the same for a resource; and a claimed key is not remembered for the sake of one that was refused."""
    desk = Desk("P2", passes=1)
    desk.offer("small", One(0, "P"))
    desk.offer("wide", One(1, "P2", "k:X"))
    desk.offer("another", One(0, "P"))
    assert desk.parked()["wide"].promoted
    desk.offer("b", One(2, "", "k:S", wait=False))
    assert desk.refused == {"b": "concurrency_limit"}
    assert desk.ledger.node("k") is None
    desk.check_empty()


def test_when_busy_reject_does_not_refuse_for_siblings() -> None:
    """DESIGN decision 3: in a run's own pool, full of its own calls, even those who refuse to wait are only not yet
    their turn.
    """
    desk = Desk("P9")
    desk.flow(0, window=1)
    one = One(0, "own P", wait=False)
    assert desk.offer("a b c", one) == ["a"]
    assert desk.refused == {}
    assert desk.finish("a") == ["b"]
    desk.orphan("b")
    assert desk.refused == {"c": "concurrency_limit"}
    desk.check_empty()


def test_when_busy_reject_is_told_what_is_full_when_its_turn_has_come() -> None:
    """DESIGN decision 3: ... and when it is its turn, a full pool refuses it."""
    desk = Desk("P2")
    desk.flow(0, window=1)
    desk.offer("a", One(0, "own"))
    desk.offer("b c", One(0, "own P", wait=False))
    desk.offer("x", One(1, "P2"))
    assert desk.finish("a") == []
    assert desk.refused == {"b": "concurrency_limit", "c": "concurrency_limit"}
    desk.check_empty()


def test_when_busy_reject_waits_for_its_turn_behind_an_orphan_of_its_run() -> None:
    """A permit of the run's own pool that an orphan gives back goes to the next sibling."""
    desk = Desk()
    desk.flow(0, window=2)
    desk.offer("a b", One(0, "own"))
    desk.offer("c", One(0, "own", wait=False))
    desk.orphan("a")
    assert desk.refused == {}
    assert desk.finish("a") == ["c"]
    desk.check_empty()


def test_r68_the_queue_is_bounded() -> None:
    """R-68, D-4: the next call after the last place in the queue is refused with `queue_full`; a place that is left
    is free.
    """
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    one = [One(run, "P", bound=3) for run in range(1, 7)]
    for run in range(5):
        desk.offer(f"b{run}", one[run])
    assert desk.refused == {"b3": "queue_full", "b4": "queue_full"}
    desk.cancel("b0")
    desk.offer("late", one[5])
    assert list(desk.parked()) == ["b1", "b2", "late"]
    desk.offer("more", one[5])
    assert desk.refused["more"] == "queue_full"
    desk.check_empty()


def test_r68_a_full_queue_refuses_the_rest_of_a_batch() -> None:
    """R-68: of a batch that comes to a full queue the first ones get the places that are left, the others are told
    at once.
    """
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    desk.offer("b c d e", One(1, "P", bound=2))
    assert list(desk.parked()) == ["b", "c"]
    assert desk.refused == {"d": "queue_full", "e": "queue_full"}
    desk.check_empty()


def test_r68_a_queue_of_no_places_remembers_no_key() -> None:
    """R-68, R-81: where nobody may wait, a refused call leaves neither a lot nor a key behind."""
    desk = Desk()
    desk.offer("a", One(0, holds="k:X"))
    desk.offer("b", One(1, holds="k:X", bound=0))
    assert desk.refused == {"b": "queue_full"}
    desk.finish("a")
    check_empty(desk.gate)


def test_r68_siblings_do_not_fill_the_queue() -> None:
    """S2, R-68: calls that wait for their own run count against no bound, neither before nor when others get ahead
    of them.
    """
    desk = Desk("P1")
    desk.offer("a b c d e", One(0, "P", bound=1))
    assert desk.refused == {}
    desk.offer("x", One(1, "P", bound=1))
    desk.offer("y", One(2, "P", bound=1))
    assert desk.refused == {"y": "queue_full"}
    assert desk.finish("a") == ["x"]
    desk.offer("z", One(3, "P", bound=1))
    assert desk.refused == {"y": "queue_full", "z": "queue_full"}
    assert (list(desk.parked()), desk.behind()) == (["b", "c"], ["d", "e"])
    desk.cancel("b")
    desk.cancel("c")
    assert (list(desk.parked()), desk.behind()) == (["d"], ["e"])
    assert desk.finish("x") == ["d"]
    assert desk.finish("d") == ["e"]
    desk.check_empty()


def test_r76_codes_are_distinct() -> None:
    """R-76, R-87: each cause has its own code, and a cancel the one that its canceller gave."""
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    desk.flow(9, limit=1)
    desk.offer("late", One(9, "P"))
    desk.offer("wait", One(1, "P", max_wait=2, bound=9))
    desk.offer("full", One(2, "P", bound=1))
    desk.offer("busy", One(3, "P", wait=False))
    desk.offer("given up", One(4, "P"))
    desk.offer("failed", One(5, "P"))
    desk.took(desk.gate.cancel(desk.parked()["given"], 0.0))
    desk.took(desk.gate.cancel(desk.parked()["up"], 0.0, "run_closed"))
    desk.took(desk.gate.cancel(desk.parked()["failed"], 0.0, "sibling_failed"))
    desk.tick(2)
    assert desk.refused == {
        "late": "deadline_exceeded",
        "wait": "wait_timeout",
        "full": "queue_full",
        "busy": "concurrency_limit",
        "given": "cancelled",
        "up": "run_closed",
        "failed": "sibling_failed",
    }
    desk.check_empty()


def test_what_can_never_be_had_is_refused_at_once() -> None:
    """FIELD 1.3: a call that is too heavy for its pool, or for what is not in reserve, does not wait for nothing."""
    desk = Desk("P3/1 Q1")
    desk.offer("q", One(9, "Q"))
    desk.offer("a", One(0, "P3"))
    desk.offer("b", One(1, "Q P3"))
    assert desk.refused == {"a": "concurrency_limit", "b": "concurrency_limit"}
    assert desk.offer("c", One(2, "P3", priority=1)) == ["c"]
    desk.check_empty()


def test_r73_waits_are_measured() -> None:
    """R-73: length of each queue, since when each waits, and what for, first to last, as people are shown it."""
    desk = Desk("P1 Q1")
    desk.gate.notes = []
    desk.offer("p", One(0, "P"))
    desk.offer("q", One(1, "Q"))
    desk.now = 3
    desk.offer("both", One(2, "P Q", "k:X"))
    desk.offer("k", One(3, "", "k:S"))
    assert desk.gate.queue_lengths() == {"P": 1, "Q": 1}
    assert desk.finish("p") == []
    both = desk.parked()["both"]
    assert (both.since, both.blocked_by) == (3, ("pool P", "pool Q"))
    assert [(kind, entry.owner, label) for kind, entry, label in desk.gate.notes] == [
        ("waiting", "both", "pool P"),
        ("waiting", "both", "pool Q"),
    ]
    assert desk.gate.statistics() == {
        "flows": 4,
        "running": 2,
        "parked": 1,
        "peak_parked": 1,
        "behind": 0,
        "orphans": 0,
        "claimants": 0,
        "promotions": 0,
        "late_events": 0,
    }
    assert repr(desk.gate).startswith("Gate(flows=4, running=2, parked=1,")
    assert repr(both) == "Entry('tool' of run 2, parked)"
    assert repr(desk.flows[2]) == "Flow(2, running=0, parked=1, behind=0)"
    desk.check_empty()


# ------------------------------------------------------------------ clocks (S2)


def test_s2_own_siblings_are_not_waiting() -> None:
    """S2: however long a run works through its calls one by one, none of them has waited."""
    desk = Desk("P1")
    desk.offer("a b c", One(0, "P", max_wait=5))
    assert desk.gate.wake_at == NEVER
    desk.now = 100
    assert desk.finish("a") == ["b"]
    assert desk.granted["b"].since == 0
    desk.now = 200
    assert desk.finish("b") == ["c"]
    assert desk.granted["c"].since == 100
    assert desk.refused == {}
    desk.check_empty()


def test_s2_a_wait_of_no_length_still_waits_for_siblings() -> None:
    """S2: `max_wait=0` refuses whoever others keep waiting, not the second call of a run."""
    desk = Desk("P1")
    one = One(0, "P", max_wait=0)
    desk.offer("a b", one)
    desk.offer("x", One(1, "P", max_wait=0))
    desk.tick()
    assert desk.refused == {"x": "wait_timeout"}
    desk.now = 7
    assert desk.finish("a") == ["b"]
    desk.check_empty()


def test_s2_the_clock_starts_when_the_run_lets_go() -> None:
    """S2: a wait counts only while nobody of the own run holds what it waits for."""
    desk = Desk("P2")
    desk.offer("a", One(0, "P"))
    desk.offer("x", One(1, "P"))
    desk.offer("b", One(0, "P2", max_wait=5))
    desk.now = 50
    assert desk.finish("a") == []
    assert desk.gate.wake_at == 55
    desk.tick(54)
    assert desk.refused == {}
    desk.tick(55)
    assert desk.refused == {"b": "wait_timeout"}
    desk.check_empty()


def test_s2_the_clock_stands_again_when_a_sibling_gets_ahead() -> None:
    """S2: ... nor while a sibling holds it again in between; then it counts from when that one let go."""
    desk = Desk("P2")
    desk.offer("x y", One(1, "P"))
    desk.offer("wide", One(0, "P2", max_wait=5))
    desk.now = 2
    desk.finish("x")
    desk.offer("small", One(0, "P"))
    assert desk.started[-1] == "small"
    desk.tick(5)
    assert desk.refused == {}
    assert desk.gate.wake_at == NEVER
    desk.now = 8
    desk.finish("small")
    desk.tick(12.9)
    assert desk.refused == {}
    desk.tick(13)
    assert desk.refused == {"wide": "wait_timeout"}
    desk.check_empty()


def test_s2_the_clock_counts_from_the_last_sibling() -> None:
    """S2: a sibling that came and went while the clock ran sets it to the instant at which it went."""
    desk = Desk("P2")
    desk.offer("x y", One(1, "P"))
    desk.offer("wide", One(0, "P2", max_wait=5))
    desk.now = 1
    desk.finish("x")
    desk.offer("small", One(0, "P"))
    desk.now = 4
    desk.finish("small")
    desk.tick(5)
    assert desk.gate.wake_at == 9
    desk.tick(9)
    assert desk.refused == {"wide": "wait_timeout"}
    desk.check_empty()


def test_s2_behind_an_orphan_a_wait_counts_from_the_seal() -> None:
    """S2, G7: work that goes on after its result was sealed is nobody's sibling: from then on the run waits."""
    desk = Desk("P1")
    desk.offer("a b c", One(0, "P", max_wait=5))
    desk.now = 20
    desk.orphan("a")
    assert {name: entry.since for name, entry in desk.parked().items()} == {"b": 0, "c": 20}
    assert desk.gate.wake_at == 25
    desk.tick(25)
    assert desk.refused == {"b": "wait_timeout", "c": "wait_timeout"}
    desk.check_empty()


def test_s2_the_successor_of_one_that_waited_in_vain_inherits_its_clock() -> None:
    """S2: a run that waits for others loses all its calls when its time is over, not one at a time."""
    desk = Desk("P1")
    desk.offer("x", One(1, "P"))
    desk.flow(0, window=2)
    desk.offer("a b c d e", One(0, "P", max_wait=5))
    assert (list(desk.parked()), desk.behind()) == (["a", "b"], ["c", "d", "e"])
    desk.tick()
    assert desk.now == 5
    assert set(desk.refused) == set("abcde")
    assert set(desk.refused.values()) == {"wait_timeout"}
    desk.check_empty()


def test_s2_a_cancelled_predecessor_hands_on_the_clock_as_it_stands() -> None:
    """S2: ... and not an older one: what its run held meanwhile does not count."""
    desk = Desk("P1")
    desk.flow(0, window=1)
    desk.offer("a b c", One(0, "P", max_wait=30))
    desk.offer("x", One(1, "P"))
    desk.now = 28
    assert desk.finish("a") == ["x"]
    desk.now = 29
    desk.cancel("b")
    desk.tick(30)
    assert desk.refused == {"b": "cancelled"}
    assert desk.gate.wake_at == 58
    desk.check_empty()


def test_s2_whoever_moves_behind_another_takes_no_older_clock() -> None:
    """S2: calls that stood behind a sibling for one thing, and now stand behind one for another thing, start anew
    there.
    """
    desk = Desk("P1 R1")
    desk.flow(0, window=1)
    desk.offer("r", One(1, "R"))
    desk.offer("first", One(0, "R", max_wait=10))
    desk.offer("p", One(0, "P"))
    desk.offer("head tail", One(0, "P R", max_wait=10))
    desk.now = 9
    assert desk.finish("p") == []
    desk.tick(10)
    assert desk.refused == {"first": "wait_timeout"}
    assert desk.gate.wake_at == 19
    desk.tick(19)
    assert set(desk.refused) == {"first", "head", "tail"}
    desk.check_empty()


def test_s2_a_line_remembers_when_its_run_let_go() -> None:
    """S2: an older clock that comes into a line from elsewhere is not handed on to those who stood behind siblings."""
    desk = Desk("Q1 R1")
    desk.flow(0, window=2)
    both = One(0, "Q R", max_wait=10)
    desk.offer("r", One(1, "R"))
    desk.offer("old1 old2", One(0, "R Q", max_wait=10))  # wait for the other run, from 0
    desk.offer("q", One(0, "Q"))
    desk.offer("head a b last", both)  # wait for their sibling, until 8
    desk.offer("x", One(2, "Q", priority=-1))
    desk.now = 8
    assert desk.finish("q") == ["x"]
    assert desk.behind() == ["last"]
    desk.now = 9
    assert desk.finish("r") == []
    for name in ("head", "a", "b"):
        desk.cancel(name)
    assert sorted(desk.parked()) == ["old1", "old2"]
    desk.tick(10)
    assert "last" not in desk.refused
    desk.tick(17.9)
    assert "last" not in desk.refused
    desk.tick(18)
    assert desk.refused["last"] == "wait_timeout"
    desk.check_empty()


def test_the_deadline_of_the_run_ends_every_wait() -> None:
    """R-52, G12: at the run's deadline all that waits is refused, standing, clocked or behind, and nothing starts
    any more.
    """
    desk = Desk("P1 Q1")
    desk.flow(0, window=1, limit=10)
    desk.offer("a b c", One(0, "own P"))
    desk.offer("q", One(1, "Q"))
    desk.offer("d", One(0, "Q", max_wait=10))
    desk.offer("n", One(0, "own", wait=False))
    assert desk.gate.wake_at == 10
    desk.tick(10)
    assert desk.refused == dict.fromkeys("bcdn", "deadline_exceeded")
    desk.offer("e", One(0, ""))
    assert desk.refused["e"] == "deadline_exceeded"
    assert desk.gate.wake_at == NEVER
    desk.check_empty()


def test_the_deadline_of_the_run_is_kept_when_the_clock_is_late() -> None:
    """R-66: a permit that becomes free after the run's deadline, but before the tick, goes to somebody else."""
    desk = Desk("P1")
    desk.flow(0, limit=10)
    desk.offer("x", One(1, "P"))
    desk.offer("a", One(0, "P"))
    desk.offer("y", One(2, "P"))
    desk.now = 11
    assert desk.finish("x") == ["y"]
    assert desk.refused == {"a": "deadline_exceeded"}
    desk.check_empty()


# ------------------------------------------------------------------ cancel


def test_r77_r79_a_cancelled_waiter_leaves_the_queue() -> None:
    """R-77, R-79, R-88: the count does not change, the others keep their places, the queue's length goes back to 0."""
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    for run, name in enumerate("bcd", 1):
        desk.offer(name, One(run, "P", bound=9))
    desk.cancel("c")
    assert desk.held("P") == 1
    assert desk.gate.queue_lengths() == {"P": 2}
    assert desk.finish("a") == ["b"]
    desk.cancel("d")
    assert desk.gate.queue_lengths() == {}
    desk.check_empty()


def test_r78_a_cancelled_call_never_starts() -> None:
    """R-78, G6: occupy the only slot, queue one, cancel it, free the slot: it does not start, then or later."""
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    desk.offer("b", One(1, "P"))
    entry = desk.parked()["b"]
    desk.cancel("b")
    assert desk.finish("a") == []
    assert (entry.status, entry.rejection.code, entry.rejection.blocker) == (REJECTED, "cancelled", "pool P")
    assert desk.gate.cancel(entry, 0.0) == []
    assert desk.gate.finish(entry, 0.0) == []
    desk.check_empty()


@pytest.mark.parametrize("round_", range(6))
def test_p37_r82_r83_cancel_before_at_and_after_the_hand_over(round_: int) -> None:
    """P-37, R-82, R-83: whichever comes first, release or cancel, each call has one outcome and the third always
    runs.
    """
    order = list(permutations(["release", "cancel", "end"]))[round_]
    for turn in range(1_000):
        desk = Desk("P1")
        desk.offer("holder", One(0, "P"))
        desk.offer("woken", One(1, "P"))
        desk.offer("third", One(2, "P"))
        woken = desk.parked()["woken"]
        for event in order:
            if event == "release":
                desk.finish("holder")
            elif event == "cancel":
                desk.took(desk.gate.cancel(woken, float(turn)))
            elif woken.status == GRANTED:
                desk.finish("woken")
        assert woken.status in (REJECTED, GRANTED, DONE)
        if woken.status == GRANTED:
            desk.finish("woken")
        assert desk.started[-1] == "third"
        assert ("woken" in desk.started) is ("woken" not in desk.refused)
        desk.check_empty()


def test_p38_no_permit_is_lost_to_cancels() -> None:
    """P-38: 500 rounds of five calls for two permits, two of which are cancelled anywhere: both permits are there
    afterwards.
    """
    rng = Random(947)
    desk = Desk("P2")
    for turn in range(500):
        names = [f"{turn}.{number}" for number in range(5)]
        doomed = set(rng.sample(names, 2))
        for run, name in enumerate(names):
            desk.offer(name, One(run, "P"))
        todo = names * 2
        rng.shuffle(todo)
        for name in todo:
            if name in doomed and name in desk.parked():
                desk.cancel(name)
            elif name in desk.granted:
                desk.finish(name)
        for name in names:
            if name in desk.granted:
                desk.finish(name)
        assert desk.held("P") == 0
        assert not desk.parked()
    names = [f"plain{number}" for number in range(50)]
    desk.offer(" ".join(names), One(0, "P"))
    for name in names:
        assert desk.held("P") == min(2, 50 - names.index(name))
        desk.finish(name)
    assert desk.started[-50:] == names
    desk.check_empty()


def test_r88_r89_a_cancelled_run_disturbs_no_other() -> None:
    """R-88, R-89: everything of a run that waits is told, once each; the calls of others keep their places and their
    slots.
    """
    desk = Desk("P2")
    desk.offer("a x", One(0, "P"))
    desk.offer("b1 b2 b3 b4", One(1, "P"))
    desk.offer("c1 c2", One(2, "P"))
    flow = desk.flows[1]
    assert desk.gate.withdraw(flow, lambda owner: owner == "b4") == []
    desk.flow(1).window = 8
    told = desk.gate.withdraw(flow, lambda owner: True)
    for entry in desk.gate.parked_of(flow):
        desk.took(desk.gate.cancel(entry, 0.0))
    assert sorted([*told, *desk.refused]) == ["b1", "b2", "b3", "b4"]
    assert desk.finish("a") == ["c1"]
    assert desk.finish("x") == ["c2"]
    desk.check_empty()


def test_withdraw_takes_the_named_ones_out_of_the_backlog() -> None:
    """R-89: calls that stand behind siblings can be taken out by name; the others stay, in order; entries are not
    touched.
    """
    desk = Desk("P1")
    desk.offer("a b c d e", One(0, "P"))
    assert desk.gate.withdraw(desk.flows[0], lambda owner: owner in "bd") == ["d"]
    assert (list(desk.parked()), desk.behind()) == (["b"], ["c", "e"])
    assert desk.gate.withdraw(desk.flows[0], lambda owner: True) == ["c", "e"]
    assert desk.gate.withdraw(desk.flows[0], lambda owner: True) == []
    assert desk.finish("a") == ["b"]
    desk.check_empty()


# ------------------------------------------------------------------ loans


def test_s10_a_lender_that_ends_first_gives_back_with_its_last_borrower() -> None:
    """S10, G7: what is lent stays held until the nested call has ended, however often the lender's own end is told."""
    desk = Desk("P1")
    desk.offer("caller", One(0, "P"))
    caller = desk.granted["caller"]
    loan = desk.gate.lend(caller)
    nested = wants_of(desk.ledger, One(0, "P"))
    nested.loan = loan
    assert desk.took(desk.gate.offer(desk.flow(0), [(nested, "nested", 0.0)], 0.0)) == ["nested"]
    assert desk.took(desk.gate.lent_back(caller, 0.0)) == []
    late = desk.gate.statistics()["late_events"]
    assert desk.finish("caller") == []
    assert repr(loan) == "Loan(0 batches, 1 calls below)"
    assert (desk.held("P"), desk.gate.statistics()["late_events"]) == (1, late)
    assert desk.finish("caller") == []
    assert (desk.held("P"), desk.gate.statistics()["late_events"]) == (1, late + 1)
    assert desk.finish("nested") == []
    assert caller.status == DONE
    assert desk.held("P") == 0
    desk.check_empty()


def test_s10_a_more_urgent_nested_call_takes_the_place_of_its_sibling() -> None:
    """S10, S6: nested calls that wait for their own run stand in the order of their urgency, like any others."""
    desk = Desk("P1 Q1")
    desk.offer("caller", One(0, "Q"))
    desk.offer("holder", One(0, "P"))
    desk.offer("ends", One(0))
    gate, flow = desk.gate, desk.flow(0)
    loan = gate.lend(desk.granted["caller"])
    first, second = (wants_of(desk.ledger, One(0, "P")) for _ in range(2))
    first.loan = second.loan = loan
    assert desk.took(gate.offer(flow, [(first, "first", 0.0)], 0.0)) == []
    urgency = ["second", "first"].index
    ready = [(second, "second", 0.0)]
    assert desk.took(gate.finish(desk.granted["ends"], 0.0, ready, lambda owner: (urgency(owner), 0, 0))) == []
    assert (list(desk.parked()), desk.behind()) == (["second"], ["first"])
    assert desk.finish("holder") == ["second"]
    assert desk.finish("second") == ["first"]
    assert desk.finish("first") == []
    assert desk.took(gate.lent_back(desk.granted["caller"], 0.0)) == []
    desk.check_empty()


# ------------------------------------------------------------------ batches in rows


def numbered(count: int, letter: str = "") -> str:
    return " ".join(f"{letter}{number}" for number in range(count))


def offers_behind(desk: Desk, flow: int = 0) -> int:
    """How many of those behind siblings are offers of their own."""
    return sum(len(line.backlog or ()) for line in desk.flows[flow].lines.values())


@pytest.mark.parametrize("slice_", [1, 7, 128, 1_000])
def test_f4_a_batch_behind_siblings_stands_in_rows(slice_: int) -> None:
    """F4, S2, S6: of a thousand calls behind siblings few are offers at a time, whether they were offered at once or in
    slices; all are counted, and they start in the order in which they were emitted.
    """
    desk = Desk("P2")
    one, names = One(0, "P"), numbered(1_000).split()
    batch = Listed([desk.wants(one)] * 1_000, names)
    for first in range(0, 1_000, slice_):
        desk.offer_batch(0, batch, range(first, min(first + slice_, 1_000)))
    assert desk.gate.statistics()["behind"] == 997
    assert desk.behind() == names[3:]
    for place, name in enumerate(names):
        assert offers_behind(desk) <= NEAR
        assert desk.finish(name) == names[place + 2 : place + 3]
    assert desk.started == names
    desk.check_empty()


def test_a_row_takes_no_memory_for_each_call() -> None:
    """F4: ten thousand calls of a batch behind a full pool take less than two bytes each in the gate."""
    desk = Desk("P1")
    desk.offer("holder", One(1, "P"))
    batch = Listed([desk.wants(One(0, "P"))] * 10_000, range(10_000))
    flow = desk.flow(0, window=1)
    gc.collect()
    tracemalloc.start()
    try:
        for first in range(0, 10_000, 128):
            desk.gate.offer_row(flow, batch, range(first, min(first + 128, 10_000)), 0.0)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert desk.gate.statistics()["behind"] == 9_999
    assert kept / 10_000 < 2


def test_a_row_is_broken_where_something_else_is_wanted() -> None:
    """G2, S6: a batch over several pools is granted, parked and put behind as if each call were offered alone; one that
    wants nothing is not offered.
    """
    ones = [One(0, word) for word in ("P", "P", "Q", "P", "Q", "P", "P", "Q")]
    row, alone = Desk("P1 Q1"), Desk("P1 Q1")
    for desk in (row, alone):
        desk.flow(0, window=1)
    row.offer_row("a b c d e f g h", *ones)
    for name, one in zip("abcdefgh", ones, strict=True):
        alone.offer(name, one)
    assert row.started == alone.started == ["a", "c"]
    assert (list(row.parked()), row.behind()) == (list(alone.parked()), alone.behind())
    while row.held("P") or row.held("Q"):
        name = next(name for name, entry in row.granted.items() if entry.status == GRANTED)
        assert row.finish(name) == alone.finish(name)
    assert sorted(row.started) == [*"abcdefgh"]
    want = row.wants(ones[0])
    batch = Listed([None, want, None, want, want, None], "uvwxyz")
    assert row.offer_batch(0, batch, range(6)) == ["v"]
    assert (list(row.parked()), row.behind()) == (["x"], ["y"])
    row.check_empty()


@pytest.mark.parametrize("near", [1, 2, 32])
def test_one_that_is_not_to_start_any_more_is_left_out_of_its_row(monkeypatch: pytest.MonkeyPatch, near: int) -> None:
    """G6, R-77: calls that were refused while they stood in a row never start, not even where all of them were."""
    monkeypatch.setattr(lots, "NEAR", near)
    desk = Desk("P1")
    for left in ("cfgi", "i", ""):
        batch = Listed([desk.wants(One(0, "P"))] * 9, [*"abcdefghi"])
        desk.offer("holder", One(1, "P"))
        desk.flow(0, window=1)
        desk.offer_batch(0, batch, range(9))
        near_ones = [one[1] for line in desk.flows[0].lines.values() for one in line.backlog or ()]
        for place, name in enumerate("abcdefghi"):
            if name not in left:
                batch.wants[place] = None
        desk.started.clear()
        for name in ["holder", *"abcdefghi"]:
            if name in desk.granted and desk.granted[name].status == GRANTED:
                desk.finish(name)
        # Those that were offers or parked already start; whoever owns them gives back what it does not need.
        assert desk.started == sorted({"a", *near_ones, *left})
        assert not desk.parked()
        assert desk.behind() == []
    desk.check_empty()


def test_withdraw_takes_one_batch_and_leaves_the_rows_of_others() -> None:
    """R-89: a batch that stands in rows is taken out whole, the rows of other batches stay rows; single calls can be
    taken out of the midst of a row, and the order stays.
    """
    desk = Desk("P1")
    one = One(0, "P")
    for letter in "abc":
        desk.offer_row(numbered(200, letter), one)
    flow = desk.flows[0]
    assert desk.gate.withdraw(flow, lambda owner: owner == "nobody") == []
    assert desk.gate.withdraw(flow, lambda owner: owner.startswith("b")) == numbered(200, "b").split()
    desk.gate.validate()
    assert offers_behind(desk) <= NEAR
    assert desk.behind() == [*numbered(200, "a").split()[2:], *numbered(200, "c").split()]
    assert desk.gate.withdraw(flow, lambda owner: owner in ("a2", "c7", "c8")) == ["a2", "c7", "c8"]
    desk.gate.validate()
    left = [name for name in numbered(200, "c").split() if name not in ("c7", "c8")]
    assert desk.behind() == [*numbered(200, "a").split()[3:], *left]
    assert len(desk.gate.withdraw(flow, lambda owner: True)) == 197 + 198
    assert desk.gate.withdraw(flow, lambda owner: True) == []
    assert desk.finish("a0") == ["a1"]
    desk.check_empty()


def test_others_come_behind_and_among_a_row() -> None:
    """S6: a call that is offered alone stands behind the rows before it, and one that an end makes ready among them, by
    urgency.
    """
    desk = Desk("P1 Q1")
    one = One(0, "P")
    desk.offer("first", One(0, "Q"))
    desk.offer_row(numbered(100), one)
    desk.offer("alone", one)
    assert desk.behind() == [*numbered(100).split()[2:], "alone"]
    desk.offer_row("u v w", one)
    batch = [*numbered(100).split()[2:], "alone", "u", "v", "w"]
    assert desk.behind() == batch
    order = {name: place for place, name in enumerate([*batch[:50], "urgent", *batch[50:]])}
    entry = desk.granted["first"]
    offers = [(desk.wants(one), "urgent", desk.now)]
    desk.took(desk.gate.finish(entry, desk.now, offers, lambda owner: (order.get(owner, -1), 0, 0)))
    assert desk.behind() == [*batch[:50], "urgent", *batch[50:]]
    for name in ["0", "1", *desk.behind()]:
        desk.finish(name)
    assert desk.started == ["first", "0", "1", *batch[:50], "urgent", *batch[50:]]
    desk.check_empty()


@pytest.mark.parametrize("way", ["claimed", "key"])
def test_where_something_may_have_changed_each_call_of_a_batch_is_looked_at(way: str) -> None:
    """S5, G4: while there are claims, or where a key is in the way, no call is put behind others unseen."""
    desk = Desk("P2 Q9", passes=1)
    if way == "claimed":
        desk.offer("a", One(1, "P"))
        desk.offer("wide", One(2, "P2"))
        desk.offer("passes", One(3, "P"))
        assert desk.gate.statistics()["claimants"] == 1
        assert desk.offer_row("x y z", *[One(0, "P", "k:X"), One(0, "P", "l:X"), One(0, "P")]) == []
        assert len(desk.parked()) + len(desk.behind()) == 4
    else:
        desk.offer("a", One(1, "", "k:X"))
        desk.flow(0, window=1)
        ones = [One(0, "Q", "k:X"), One(0, "Q", "k:X"), One(0, "Q", "l:X"), One(0, "Q", "k:X")]
        assert desk.offer_row("x y z w", *ones) == ["z"]
        assert (list(desk.parked()), desk.behind()) == (["x"], ["y", "w"])
    desk.check_empty()


def test_a_decision_list_is_the_callers_own() -> None:
    """What one event has returned is never touched by the next: nobody is told twice."""
    desk = Desk("P1")
    first = desk.gate.offer(desk.flow(0), [], 0.0)
    first += desk.gate.offer(desk.flow(0), [(desk.wants(One(0, "P")), "a", 0.0)], 0.0)
    assert [entry.owner for entry in first] == ["a"]
    assert desk.gate.tick(0.0) == []


# ------------------------------------------------------------------ who goes first (S5, S6)


def test_s5_classes() -> None:
    """S5: a higher class goes first, whoever came first; within a class it is the order of coming."""
    desk = Desk("P1")
    desk.offer("a", One(0, "P"))
    for run, (name, priority) in enumerate([("low", -1), ("mid", 0), ("high", 2), ("mid2", 0), ("high2", 2)], 1):
        desk.offer(name, One(run, "P", priority=priority))
    for name in ["a", "high", "high2", "mid", "mid2"]:
        desk.finish(name)
    assert desk.started == ["a", "high", "high2", "mid", "mid2", "low"]
    desk.check_empty()


def test_s6_what_does_not_fit_is_skipped() -> None:
    """S6: a call that fits passes one that does not: no strict first-in-first-out."""
    desk = Desk("P3")
    desk.offer("a b", One(0, "P"))
    assert desk.offer("wide", One(1, "P3")) == []
    assert desk.offer("small", One(2, "P")) == ["small"]
    desk.check_empty()


def test_s5_after_sixteen_passes_a_waiter_is_promoted_and_claims() -> None:
    """S5, G6: passed sixteen times by calls of other runs, it goes before all of its class, and what it needs is
    hidden.
    """
    desk = Desk("P2")
    desk.gate.notes = []
    desk.offer("s0", One(0, "P"))
    desk.offer("wide", One(1, "P2"))
    for number in range(1, 17):
        assert not desk.parked()["wide"].promoted
        desk.offer(f"s{number}", One(0, "P"))
        desk.finish(f"s{number - 1}")
    assert desk.parked()["wide"].promoted
    assert ("promoted", "wide", "pool P") in [(kind, entry.owner, label) for kind, entry, label in desk.gate.notes]
    assert desk.offer("s17", One(2, "P")) == []
    assert desk.parked()["s17"].blocked_by == ("pool P",)
    assert desk.finish("s16") == ["wide"]
    assert desk.finish("wide") == ["s17"]
    desk.check_empty()


def test_s5_own_siblings_do_not_count_as_passing() -> None:
    """S5: a run's own small calls may pass its wide one as often as they like; that is its own order."""
    desk = Desk("P2")
    desk.offer("s0", One(0, "P"))
    desk.offer("wide", One(0, "P2"))
    for number in range(1, 40):
        desk.offer(f"s{number}", One(0, "P"))
        desk.finish(f"s{number - 1}")
    assert not desk.parked()["wide"].promoted
    desk.check_empty()


def test_s5_claims_have_one_order_over_all_classes() -> None:
    """S5: two who claim the same two things, of different classes, promoted in the other order: both get through.

    If their claims compared by class as well, each would wait for the other for ever.
    """
    desk = Desk("P1 Q1", passes=1)
    desk.offer("p", One(0, "P"))
    desk.offer("low", One(1, "P Q"))
    desk.offer("q", One(2, "Q"))
    desk.offer("high", One(3, "P Q", priority=1))
    assert desk.finish("p") == []
    desk.offer("p2", One(0, "P"))
    desk.finish("q")
    while desk.parked():
        running = [name for name in desk.started if desk.granted[name].status == GRANTED]
        assert running, "deadlock"
        desk.finish(running[0])
    assert {"low", "high"} <= set(desk.started)
    desk.check_empty()


def test_s5_a_claim_is_lifted_with_its_claimant() -> None:
    """S5: when a claimant gives up, what it had hidden is had at once by those who waited for it."""
    for end in ("cancel", "tick"):
        desk = Desk("P2", passes=1)
        desk.offer("s1", One(0, "P"))
        desk.offer("wide", One(1, "P2", max_wait=5))
        desk.offer("s2", One(2, "P"))
        desk.finish("s1")
        assert desk.offer("s3", One(3, "P")) == []
        assert (desk.cancel("wide") if end == "cancel" else desk.tick()) == ["s3"]
        desk.check_empty()


def test_s5_claims_reach_keys_too() -> None:
    """S5: a promoted writer hides its key from further readers, the key of a pool call even when nobody holds it."""
    desk = Desk("P1", passes=1)
    desk.offer("r1", One(0, holds="k:S"))
    desk.offer("w", One(1, holds="k:X"))
    assert desk.offer("r2", One(2, holds="k:S")) == ["r2"]
    assert desk.offer("r3", One(3, holds="k:S")) == []
    assert desk.offer("beside", One(4, holds="k2:S")) == ["beside"]
    desk.finish("r1")
    assert desk.finish("r2") == ["w"]
    assert desk.finish("w") == ["r3"]
    desk.check_empty()


def test_s5_a_reserve_is_not_given_away_under_a_claim() -> None:
    """S5: a call that may use the reserve leaves a claimant that may not what it needs outside of it."""
    desk = Desk("P4/1", passes=1)
    desk.offer("a", One(0, "P3"))
    desk.offer("claims", One(1, "P1"))
    desk.offer("passes", One(2, "P", priority=1))
    assert desk.parked()["claims"].promoted
    desk.finish("passes")
    desk.offer("b", One(3, "P", priority=0))
    assert desk.finish("a") == ["claims", "b"]
    desk.check_empty()


def test_s5_a_cancelled_wait_costs_its_run_nothing() -> None:
    """S5: start tags are charged for what was served: a run whose calls gave up is not behind all the others."""
    desk = Desk("P1 Q1")
    desk.offer("q", One(9, "Q"))
    desk.offer("x", One(1, "P"))
    names = [f"w{number}" for number in range(50)]
    for name in names:
        desk.offer(name, One(0, "Q"))
    while set(desk.parked()) | set(desk.behind()):
        desk.cancel(next(iter(desk.parked())))
    desk.offer("a", One(0, "P"))
    desk.offer("b1 b2", One(2, "P"))
    assert desk.finish("x") == ["a"]
    desk.check_empty()


def test_s6_what_becomes_ready_goes_by_urgency() -> None:
    """S6: a call that is ready because another ended goes before calls of its run that were ready earlier but matter
    less.
    """
    desk = Desk("P1")
    one = One(0, "P")
    desk.offer("a b c", one)
    assert desk.finish("a", ("urgent", one), ("next", one)) == ["urgent"]
    assert [*desk.parked(), *desk.behind()] == ["next", "b", "c"]
    for name in ["urgent", "next", "b"]:
        desk.finish(name)
    assert desk.started == ["a", "urgent", "next", "b", "c"]
    desk.check_empty()


def test_s6_the_one_at_the_head_makes_room_for_a_more_urgent_one() -> None:
    """S6, S2: whoever waits for its own siblings only changes places with a more urgent one, and with nobody else's
    call.
    """
    desk = Desk("P2")
    one = One(0, "P2")
    desk.gate.notes = []
    desk.offer("q", One(0, ""))
    desk.offer("a b c", one)
    desk.offer("other", One(1, "P"))
    before = desk.parked()["b"]
    assert desk.finish("q", ("urgent", one)) == []
    assert [name for name in desk.parked() if name != "other"] == ["urgent"]
    assert desk.behind() == ["b", "c"]
    assert desk.gate.cancel(before, 0.0) == []
    assert [entry.owner for _, entry, _ in desk.gate.notes] == ["b", "other", "urgent"]
    assert desk.finish("a") == ["other"]
    assert desk.finish("other") == ["urgent"]
    desk.check_empty()


def test_s6_urgency_does_not_reach_across_runs() -> None:
    """S5, S6: where another run waits, what is given back goes to it by rank, however urgent a sibling is. When it is
    the run's turn again, the most urgent one of it has that.
    """
    desk = Desk("P1")
    one = One(0, "P")
    desk.offer("a b", one)
    desk.offer("x", One(1, "P"))
    assert desk.finish("a", ("urgent", one)) == ["x"]
    assert desk.finish("x") == ["urgent"]
    desk.check_empty()


def test_s2_who_waited_for_a_sibling_is_not_given_up_when_that_one_ends_late() -> None:
    """S2, S6: its clock stood while a call of its own run held what it wants, however long ago it began to wait for
    others; also where the end makes another call ready, before which it is tried.
    """
    desk = Desk("P2")
    desk.offer("x", One(0, "P"))
    desk.offer("wide", One(1, "P2", max_wait=1.0))
    desk.offer("narrow", One(1, "P"))
    desk.now = 5.0  # nobody has told the gate that a deadline went by
    ready = [(desk.wants(One(1, "")), "next", desk.now)]
    urgent = {"wide": 0, "next": 1}
    assert desk.took(desk.gate.finish(desk.granted["narrow"], desk.now, ready, lambda name: (urgent[name],))) == [
        "next"
    ]
    assert desk.refused == {}
    assert desk.finish("x") == ["wide"]
    desk.check_empty()


def test_s6_the_most_urgent_of_a_run_goes_wherever_it_waits() -> None:
    """S6: calls of one run that wait for different limits start by urgency, not in the order in which they came."""
    desk = Desk("P1 Q1")
    urgent = {"late": 2, "both": 1, "z": 3}

    def finish(name: str, *ready: str) -> list[str]:
        offers = [(desk.wants(One(0, "P")), one, desk.now) for one in ready]
        return desk.took(desk.gate.finish(desk.granted[name], desk.now, offers, lambda owner: (urgent[owner],)))

    desk.offer("first", One(0, ""))
    finish("first")  # from here on the gate knows what orders the calls of this run
    desk.offer("p", One(0, "P"))
    desk.offer("q", One(0, "Q"))
    desk.offer("late", One(0, "P"))
    desk.offer("both", One(0, "P Q"))
    assert finish("q", "z") == []
    assert finish("p") == ["both"]
    for name in ("both", "late", "z"):
        finish(name)
    assert desk.started == ["first", "p", "q", "both", "late", "z"]
    desk.check_empty()


def test_s6_a_call_that_stands_back_is_told_by_its_new_place() -> None:
    """S2, S6: one that waits for its siblings alone and comes to another queue of its run stands there by urgency."""
    desk = Desk("P1 Q1")
    one, two = One(0, "P Q"), One(0, "Q")
    desk.gate.notes = []
    desk.offer("p", One(0, "P"))
    desk.offer("q", One(0, "Q"))
    desk.offer("a", one)
    desk.offer("b c", two)
    urgent = {"a": 5, "b": 1, "c": 3, "d": 2}

    def urgency(name: str) -> tuple[object, ...]:
        return (urgent[name],)

    desk.took(desk.gate.finish(desk.granted["p"], desk.now, [(desk.wants(two), "d", desk.now)], urgency))
    assert set(desk.parked()) | set(desk.behind()) == {"a", "b", "c", "d"}
    for name in ("q", "b", "d", "c", "a"):
        desk.took(desk.gate.finish(desk.granted[name], desk.now, (), urgency))
    assert desk.started == ["p", "q", "b", "d", "c", "a"]
    desk.check_empty()


def test_s6_a_thousand_calls_made_ready_at_once() -> None:
    """S6, P-10: a fan-out is placed in the time of its length, by the urgency of each."""
    counts = []
    for width in (100, 1_000):
        desk = Desk("P1")
        one = One(0, "P")
        desk.offer("root", one)
        names = [f"n{number}" for number in range(width)]
        counts.append(steps_of(lambda: desk.finish("root", *[(name, one) for name in names])))  # noqa: B023
        assert [*desk.started, *desk.parked(), *desk.behind()] == ["root", *names]
    assert counts[1] < 20 * counts[0]


def test_finish_without_an_order_offers_afterwards() -> None:
    """Calls that are ready because of an end, without an order, come after those who wait."""
    desk = Desk("P1")
    one = One(0, "P")
    desk.offer("a b", one)
    decided = desk.gate.finish(desk.granted["a"], 0.0, [(desk.wants(one), "c", 0.0)])
    assert desk.took(decided) == ["b"]
    assert list(desk.parked()) == ["c"]
    desk.check_empty()


@pytest.mark.parametrize("other", ["", "x:X"])
def test_a_hand_over_between_calls_that_touch_different_things(other: str) -> None:
    """R-50, G4: a permit goes from one call of a tool to the next, and what each of them touches changes hands, too.

    Where the next one's resource is held by somebody else, it waits for that, and the permit goes on.
    """
    desk = Desk("P1")
    if other:
        desk.offer("holder", One(2, holds=other))
    desk.offer("a", One(0, "P", "k:X"))
    desk.offer("b", One(0, "P", "x:S"))
    desk.offer("c", One(0, "P", "z:X"))
    assert desk.finish("a") == (["c"] if other else ["b"])
    assert desk.ledger.node("k") is None
    desk.check_empty()


# ------------------------------------------------------------------ new tools, while calls are in flight


def test_expand_takes_further_locks_for_all_in_flight() -> None:
    """G4, decision 4: a tool for whole subtrees, declared later, waits for what already runs below, orphans too."""
    desk = Desk("P9")
    below = One(0, "P", "a:X")
    desk.offer("a", below)
    desk.offer("b", One(1, "P", "b:X"))
    desk.orphan("b")
    desk.flow(2, window=1)
    desk.offer_row("waits stands", One(2, "P", "a:X"))
    assert desk.behind() == ["stands"]
    desk.offer("ended", One(3, "P", "c:X"))
    desk.gate.close_flow(desk.flows.pop(3))

    def more(wants: Wants[Lot[str]]) -> Wants[Lot[str]]:
        if not wants.holds:
            return wants
        wider: Wants[Lot[str]] = Wants(
            wants.run, wants.tool, wants.permits, (("root", IX), *wants.holds), max_wait=wants.max_wait
        )
        return desk.ledger.look_up(wider)

    desk.gate.expand(more)
    desk.gate.validate()
    assert desk.offer("tree", One(4, "", "root:S")) == []
    assert desk.finish("a") == ["waits"]
    for name in ("b", "waits", "ended"):
        desk.finish(name)
    assert desk.started[-1] == "stands"
    assert desk.finish("stands") == ["tree"]
    desk.check_empty()


def test_runs_end_before_their_calls() -> None:
    """G7: what still runs of a closed run is counted, holds what it held, and gives it back."""
    desk = Desk("P2")
    desk.offer("a b", One(0, "P"))
    flow = desk.flows.pop(0)
    desk.gate.close_flow(flow)
    desk.gate.close_flow(flow)
    desk.gate.validate()
    assert desk.gate.statistics()["running"] == 2
    assert desk.offer("c", One(1, "P")) == []
    assert desk.finish("a") == ["c"]
    desk.check_empty()


def test_a_run_that_waits_cannot_be_closed_and_a_number_not_used_twice() -> None:
    """DESIGN 5.9: mistakes of whoever drives the gate are told at once."""
    desk = Desk("P1")
    desk.offer("a b", One(0, "P"))
    with pytest.raises(AssertionError, match="still waits"):
        desk.gate.close_flow(desk.flows[0])
    with pytest.raises(AssertionError, match="is open"):
        desk.gate.open_flow(0, 1)
    desk.check_empty()


# ------------------------------------------------------------------ what is remembered, what it costs


def test_r81_ten_thousand_keys_leave_nothing() -> None:
    """R-81: keys that were held, waited for, and let go are forgotten, with their lots and bays."""
    desk = Desk("P2")
    for number in range(10_000):
        one = [One(run, "P", f"k{number}:X") for run in (0, 1)]
        wants: list[Wants[Lot[str]]] = [wants_of(desk.ledger, other) for other in one]
        [a] = desk.gate.offer(desk.flow(0), [(wants[0], "a", 0.0)], 0.0)
        assert desk.gate.offer(desk.flow(1), [(wants[1], "b", 0.0)], 0.0) == []
        [b] = desk.gate.finish(a, 0.0)
        assert desk.gate.finish(b, 0.0) == []
        assert not desk.ledger._nodes
    check_empty(desk.gate)


@pytest.mark.parametrize("kind", ["one length", "many lengths", "run deadline", "inherited"])
def test_g12_short_waits_behind_a_long_one_leave_nothing(kind: str) -> None:
    """G12, R-81: a stream of waits that end at once keeps no records, though the oldest record stays for long."""
    ledger = make_ledger("P1")
    gate: Gate[int] = Gate(ledger)
    hold = gate.open_flow(0, 1)
    gate.offer(hold, [(wants_of(ledger, One(0, "P")), 0, 0.0)], 0.0)
    wait = gate.open_flow(1, 1)
    gate.offer(wait, [(wants_of(ledger, One(1, "P", max_wait=1e6)), 1, 0.0)], 0.0)
    for number in range(2, 5_000):
        now = number / 1_000
        flow = gate.open_flow(number, 1, 1e5 if kind == "run deadline" else NEVER)
        length = 1e6 + (number if kind == "many lengths" else 0)
        wants: Wants[Lot[int]] = wants_of(ledger, One(number, "P", max_wait=length))
        gate.offer(flow, [(wants, number, now)] * (2 if kind == "inherited" else 1), now)
        while flow.parked:
            gate.cancel(flow.parked[0], now + 0.0005)
        gate.close_flow(flow)
        assert gate._deadlines.records <= 2 * 2 + 64 + 1
        assert len(gate._deadlines._lanes) <= 2 * 2 + 64 + 1
        assert len(gate._deadlines._limits) <= 2 * 3 + 64 + 1
    assert gate.wake_at == (1e5 if kind == "run deadline" else 1e6)


def test_stale_ranks_are_dropped() -> None:
    """F5: those who left do not stay in the heap of their bay for the sake of one who is before them."""
    stream = Stream("P1", 1_002)
    for flow in range(1_002):
        stream.offer(flow, "P")
    lot = stream.ledger.pools["P"].lot
    assert lot is not None
    [bay] = lot.bays.values()
    for flow in range(1_001, 5, -1):
        stream.gate.cancel(stream.flows[flow].parked[0], 0.0)
        assert len(bay.heap) <= max(64, 2 * bay.count) + 1
    for _ in range(5):
        stream.finish()
    assert stream.starts == [0, 1, 2, 3, 4, 5]


def test_r81_nothing_is_left_to_the_collector() -> None:
    """R-81, D-1: entries, ranks, lines and lots that are done with are free at once: they sit in no cycle."""
    gc.collect()
    gc.disable()
    try:
        desk = Desk("P2 Q1", passes=2)
        for turn in range(20):
            now = desk.now = float(turn)
            desk.offer(f"a{turn} b{turn} c{turn}", One(0, "P Q", f"k{turn}:X", max_wait=3))
            desk.offer(f"d{turn}", One(1, "P2", f"k{turn}:S", max_wait=2))
            desk.offer(f"e{turn} f{turn}", One(2, "P", max_wait=1, bound=3))
            desk.orphan(next(name for name, entry in desk.granted.items() if entry.status == GRANTED))
            desk.cancel(next(iter(desk.parked())))
            desk.tick(now + 0.5)
            for name in [name for name, entry in desk.granted.items() if entry.status == GRANTED][:2]:
                desk.finish(name)
        desk.check_empty()
        desk.granted.clear()
        assert gc.collect() == 0
    finally:
        gc.enable()


def parked_gate(waiting: int, *, window: int = 1, flows: int | None = None) -> Stream:
    """One pool that is full, and so many who wait for it, each in a run of its own or all in one."""
    stream = Stream("P1 B9", 1 + (flows or waiting), window=window)
    stream.offer(0, "P")
    for flow in range(1, 1 + (flows or waiting)):
        stream.offer(flow, "P", waiting // (flows or waiting))
    return stream


def test_f5_cancel_costs_the_same_at_any_length() -> None:
    """F5, R-77: instructions to cancel a hundred waiters, at a hundred thousand no more than at one thousand."""
    costs = []
    for waiting in (1_000, 100_000):
        stream = parked_gate(waiting, window=waiting, flows=1)
        parked = stream.flows[1].parked
        some = Random(1).sample(parked, 100)
        costs.append(steps_of(lambda: [stream.gate.cancel(entry, 0.0) for entry in some]))  # noqa: B023
    assert costs[1] <= 1.05 * costs[0]


def test_f12_waiters_of_another_pool_cost_nothing() -> None:
    """F12: a hundred thousand calls parked on one pool, and a call on another one takes the same instructions as
    ever.
    """
    costs = []
    for waiting in (10, 100_000):
        stream = parked_gate(waiting, window=waiting, flows=1)
        stream.open(10**6)

        def bystander(stream: Stream = stream) -> None:
            stream.offer(10**6, "B")
            stream.finish(1)

        bystander()
        costs.append(steps_of(bystander))
    assert costs[0] == costs[1]


def test_decision_6_a_release_looks_at_those_it_concerns() -> None:
    """Decision 6: the instructions of a hand-over do not grow with those who wait in the same queue."""
    costs = []
    for waiting in (100, 10_000):
        stream = parked_gate(waiting)
        stream.finish()
        costs.append(steps_of(lambda: [stream.finish() for _ in range(50)]))  # noqa: B023
    assert costs[1] <= 1.3 * costs[0]


# ------------------------------------------------------------------ the gate's own watch


def spoil_queue(gate: Gate[str], entry: Entry[str]) -> None:
    gate._queued["q"] = 1


def spoil_parked(gate: Gate[str], entry: Entry[str]) -> None:
    gate._parked += 1


def spoil_free(gate: Gate[str], entry: Entry[str]) -> None:
    gate.ledger.pools["P"].limit = 9


def spoil_clock(gate: Gate[str], entry: Entry[str]) -> None:
    entry.clock = 0.0


def spoil_rank(gate: Gate[str], entry: Entry[str]) -> None:
    entry.rank = None


def spoil_running(gate: Gate[str], entry: Entry[str]) -> None:
    entry.flow.running[entry] = None


def spoil_row(gate: Gate[str], entry: Entry[str]) -> None:
    entry.line.behind_in_row(Row(Listed([entry.wants] * 40, numbered(40).split()), 0, 40, 0.0))
    assert entry.line.backlog is not None
    entry.line.backlog.rows[0].first = 40


def lose_row(gate: Gate[str], entry: Entry[str]) -> None:
    entry.line.behind_in_row(Row(Listed([entry.wants] * 40, numbered(40).split()), 0, 40, 0.0))
    assert entry.line.backlog is not None
    entry.line.backlog.clear()


def spoil_held(gate: Gate[str], entry: Entry[str]) -> None:
    gate.ledger.pools["P"].held = 0


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_queue, "queues are miscounted"),
        (spoil_parked, "parked by count"),
        (spoil_free, "waits for nothing"),
        (spoil_clock, "miscounts who stands"),
        (spoil_rank, "miscounts a bay"),
        (spoil_running, "holds"),
        (spoil_row, "keeps a row of nobody"),
        (lose_row, "has lost a row"),
        (spoil_held, "should hold"),
    ],
)
def test_a_spoiled_gate_is_noticed(spoil, told: str) -> None:  # type: ignore[no-untyped-def]
    """DESIGN 5.9: `validate` notices what must not be between events, and tells the story."""
    desk = Desk("P1")
    desk.offer("a b", One(0, "P"))
    assert desk.parked()["b"].status == PARKED
    spoil(desk.gate, desk.parked()["b"])
    with pytest.raises(AssertionError, match=told):
        desk.gate.validate()


def test_g8_no_owner_and_no_key_is_shown() -> None:
    """G8: what stands for a call, and what it touches, is in no text of the gate."""
    desk = Desk()
    one = One(0, holds="canary:X")
    desk.offer("canary1 canary2 canary3", one)
    told = f"{desk.gate!r} {desk.flows[0]!r} {desk.granted['canary1']!r} {desk.parked()['canary2']!r}"
    assert "canary" not in told
    assert desk.parked()["canary2"].blocked_by == ("resource shared by others",)
    assert (S, X) == (2, 3)
    desk.check_empty()
