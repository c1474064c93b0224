"""The arithmetic of what is held: all or nothing, exactly, and nothing remembered."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement

import pytest
from gate_kit import One, make_ledger, wants_of
from hypothesis import given
from hypothesis import strategies as st

from towerman.calls import COMPATIBLE, IS, IX, S, X
from towerman.gate import Lot
from towerman.ledger import Ledger, Node, Pool, Wants

MODES = ["IS", "IX", "S", "X"]


def wants(ledger: Ledger[Lot[int]], permits: str = "", holds: str = "", priority: int = 0) -> Wants[Lot[int]]:
    return wants_of(ledger, One(0, permits, holds, priority=priority))


def test_r58_all_or_nothing() -> None:
    """R-58, R-60, G2: what cannot be had wholly is not taken at all, and the first thing in the way is named."""
    ledger = make_ledger("P2 Q1")
    first = wants(ledger, "P Q", "k:X")
    assert ledger.claim(first) is None
    assert ledger.counts() == (2, 1)
    for permits, holds, blocker in [("P Q", "", "Q"), ("P2", "", "P"), ("P", "k:S", "k"), ("", "j:X k:IS", "k")]:
        found = ledger.claim(wants(ledger, permits, holds))
        assert found is not None
        assert found.key == blocker
        assert ledger.counts() == (2, 1)
        assert ledger.node("j") is None
    ledger.give(first)
    assert ledger.counts() == (0, 0)


def test_r46_a_pool_is_never_over_its_limit() -> None:
    """R-46, R-48: weights add up to the limit and no further; given back, the whole of it can be taken at once."""
    ledger = make_ledger("P5")
    taken = [wants(ledger, f"P{units}") for units in (2, 2, 1)]
    assert [ledger.claim(one) for one in taken] == [None, None, None]
    pool = ledger.pools["P"]
    assert ledger.claim(wants(ledger, "P")) is pool
    ledger.validate()
    for one in taken:
        ledger.give(one)
    assert ledger.claim(wants(ledger, "P5")) is None
    assert (pool.held, pool.peak) == (5, 5)
    assert repr(pool) == "Pool('P', 5 of 5 held)"


def test_a_reserve_is_for_those_above_the_middle() -> None:
    """API section 1: permits in reserve can be had with a priority above 0 only."""
    ledger = make_ledger("P3/1")
    assert ledger.claim(wants(ledger, "P2")) is None
    assert ledger.claim(wants(ledger, "P")) is ledger.pools["P"]
    assert ledger.claim(wants(ledger, "P", priority=-1)) is ledger.pools["P"]
    assert ledger.claim(wants(ledger, "P", priority=1)) is None
    ledger.validate()


def test_what_can_never_be_had_is_known_at_once() -> None:
    """FIELD 1.3: an ask for more than a pool will ever give to its class is known without a wait."""
    ledger = make_ledger("P3/1 Q2")
    assert ledger.hopeless(wants(ledger, "P3")) is ledger.pools["P"]
    assert ledger.hopeless(wants(ledger, "P3", priority=1)) is None
    assert ledger.hopeless(wants(ledger, "P2 Q3")) is ledger.pools["Q"]
    assert ledger.hopeless(wants(ledger, "P2 Q2")) is None


def test_what_a_call_costs_its_run() -> None:
    """S5: a call weighs its permits of the first pool, or one."""
    ledger = make_ledger("A9 P3")
    assert [wants(ledger, text).weight for text in ("A4 P2", "P2", "")] == [4, 2, 1]


@pytest.mark.parametrize(("first", "second"), list(combinations_with_replacement(range(4), 2)))
def test_g4_modes(first: int, second: int) -> None:
    """G4, R-56: two calls hold one key at once exactly if their modes are compatible, whichever came first."""
    for one, other in ((first, second), (second, first)):
        ledger = make_ledger("")
        assert ledger.claim(wants(ledger, holds=f"k:{MODES[one]}")) is None
        blocker = ledger.claim(wants(ledger, holds=f"k:{MODES[other]}"))
        assert (blocker is None) is COMPATIBLE[one][other]
        ledger.validate()
    assert (COMPATIBLE[X][IS], COMPATIBLE[S][IX], COMPATIBLE[S][S], COMPATIBLE[IX][IX]) == (False, False, True, True)


def test_nothing_is_remembered_of_a_key() -> None:
    """R-81: ten thousand keys, used once each, leave nothing behind."""
    ledger = make_ledger("")
    for number in range(10_000):
        one = wants(ledger, holds=f"k{number}:X root:IX")
        assert ledger.claim(one) is None
        assert ledger.counts() == (0, 2)
        ledger.give(one)
        assert not ledger._nodes
    assert ledger.node("k1") is None


def test_orphans_bar_what_they_alone_keep_others_from() -> None:
    """S5, G7: it is known what would still be in the way when all but the orphans had let go."""
    ledger = make_ledger("P4/1")
    pool = ledger.pools["P"]
    runs, orphan = wants(ledger, "P", "k:S j:IX"), wants(ledger, "P2", "k:S")
    for one in (runs, orphan):
        assert ledger.claim(one) is None
    node = ledger.node("k")
    assert node is not None
    assert not node.barred(X)
    ledger.mark_orphan(orphan, 1)
    ledger.validate()
    assert [pool.barred(units, 0) for units in (1, 2)] == [False, True]
    assert [pool.barred(units, 1) for units in (2, 3)] == [False, True]
    assert [node.barred(mode) for mode in (IS, IX, S, X)] == [False, True, False, True]
    ledger.mark_orphan(orphan, -1)
    assert not (pool.barred(3, 0) or node.barred(X))
    ledger.give(orphan)
    ledger.give(runs)
    assert ledger.counts() == (0, 0)


def test_pools_come_and_go() -> None:
    """A pool is kept as long as somebody holds it or waits for it; one that is added twice is the first one."""
    ledger = make_ledger("P1")
    pool = ledger.pools["P"]
    assert ledger.add_pool(Pool("P", "another", 9)) is pool
    one = wants(ledger, "P")
    assert ledger.claim(one) is None
    assert not ledger.drop_pool("P")
    ledger.give(one)
    pool.lot = Lot()
    assert not ledger.drop_pool("P")
    pool.lot = None
    assert ledger.drop_pool("P")
    assert ledger.drop_pool("P")
    assert not ledger.pools
    with pytest.raises(KeyError):
        wants(ledger, "P")


def test_a_pool_comes_back_as_long_as_somebody_names_it() -> None:
    """G3: an ask that was made before a pool was forgotten counts in the pool of that key that comes later."""
    ledger = make_ledger("P1")
    pool, early = ledger.pools["P"], wants(ledger, "P")
    assert ledger.drop_pool("P") and ledger.claim(early) is None
    assert ledger.bring_back("P") is pool is ledger.pools["P"]
    assert ledger.blocker(wants(ledger, "P")) is pool
    ledger.give(early)
    assert ledger.drop_pool("P")
    del early, pool
    assert ledger.bring_back("P") is None and ledger.bring_back("Q") is None
    assert not ledger.pools


def test_part_of_it() -> None:
    """The resource part alone can be tried, taken and given back."""
    ledger = make_ledger("P1")
    one, other = wants(ledger, "P", "a:X b:S"), wants(ledger, "P", "b:S c:X")
    ledger.take_holds(one.holds)
    assert ledger.open(other.holds)
    assert not ledger.open((("a", IS),))
    ledger.give_holds(one.holds)
    assert ledger.open((("a", X),))
    assert ledger.counts() == (0, 0)


def test_g8_no_key_is_shown() -> None:
    """G8: keys hold argument values: people are shown templates, and no repr tells a key."""
    ledger = make_ledger("P1")
    one: Wants[Lot[int]] = ledger.look_up(
        Wants(
            1,
            "edit",
            (("P", 1),),
            (("file:/home/canary", X), ("other:canary", S)),
            labels={"file:/home/canary": "file:{path}"},
        )
    )
    assert ledger.claim(one) is None
    node, other = ledger.node_for("file:/home/canary"), ledger.node_for("other:canary")
    assert ledger.label(node, one) == "resource file:{path}"
    assert ledger.label(other, one) == "resource shared by others"
    assert ledger.label(ledger.pools["P"], one) == "pool P"
    assert "canary" not in f"{ledger!r} {node!r} {other!r} {one!r}"
    assert repr(ledger) == "Ledger(1 pools, 1 permits held, 2 resource nodes held)"


def spoil_over(ledger: Ledger[Lot[int]]) -> None:
    ledger.pools["P"].held = 3


def spoil_under(ledger: Ledger[Lot[int]]) -> None:
    ledger.pools["P"].held = -1


def spoil_orphans(ledger: Ledger[Lot[int]]) -> None:
    ledger.pools["P"].orphaned = 2


def spoil_writers(ledger: Ledger[Lot[int]]) -> None:
    ledger.node_for("k").counts[X] += 1


def spoil_modes(ledger: Ledger[Lot[int]]) -> None:
    ledger.node_for("k").counts[S] += 1


def spoil_counts(ledger: Ledger[Lot[int]]) -> None:
    ledger.node_for("k").counts[IX] -= 1


def spoil_node_orphans(ledger: Ledger[Lot[int]]) -> None:
    ledger.node_for("k").orphaned = [0, 0, 0, 2]


def spoil_idle(ledger: Ledger[Lot[int]]) -> None:
    ledger.node_for("nobody's")


def spoil_lot(ledger: Ledger[Lot[int]]) -> None:
    ledger.node_for("k").lot = Lot()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_over, "over its limit"),
        (spoil_under, "less than nothing"),
        (spoil_orphans, "permits with orphans"),
        (spoil_writers, "for writing twice"),
        (spoil_modes, "modes that conflict"),
        (spoil_counts, "less than nothing"),
        (spoil_node_orphans, "miscounts orphans"),
        (spoil_idle, "was not forgotten"),
        (spoil_lot, "an empty lot"),
    ],
)
def test_a_spoiled_ledger_is_noticed(spoil: Callable[[Ledger[Lot[int]]], None], told: str) -> None:
    """DESIGN 5.9: `validate` notices what must not be, and tells what it is, without the key."""
    ledger = make_ledger("P2")
    assert ledger.claim(wants(ledger, "P", "k:X")) is None
    ledger.validate(lambda lot: lot.count)
    spoil(ledger)
    with pytest.raises(AssertionError, match=told):
        ledger.validate(lambda lot: lot.count)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "P", "P2", "P3 Q", "Q2", "Q P"]),
            st.sampled_from(["", "a:X", "a:S b:IS", "b:X", "a:IX b:S"]),
            st.integers(-1, 1),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_r47_what_is_taken_is_given_back_exactly(steps: list[tuple[str, str, int, bool]]) -> None:
    """G3, R-46, R-47: over any history a claim succeeds exactly if all of it is free, and free + held = total."""
    ledger = make_ledger("P3/1 Q2")
    held: list[Wants[Lot[int]]] = []
    for permits, holds, priority, give in steps:
        if give and held:
            ledger.give(held.pop(0))
        one = wants(ledger, permits, holds, priority)
        free = all(pool.fits(units, priority) for pool, units in one.pools) and all(
            COMPATIBLE[mode][more]
            for key, mode in one.holds
            for other in held
            for that, more in other.holds
            if key == that
        )
        assert (ledger.blocker(one) is None) is free
        if ledger.claim(one) is None:
            held.append(one)
        ledger.validate()
        for key, pool in ledger.pools.items():
            assert pool.held == sum(units for other in held for that, units in other.permits if that == key)
    for one in held:
        ledger.give(one)
    assert ledger.counts() == (0, 0)
    assert not ledger._nodes


def test_a_node_that_is_used_is_not_swept() -> None:
    """Only what nobody holds and nobody waits for is forgotten, and only if it is still the one in use."""
    ledger = make_ledger("P1")
    stale: Node[Lot[int]] = Node("k")
    node = ledger.node_for("k")
    for state in (stale, ledger.pools["P"]):
        ledger.sweep(state)
    assert ledger.node("k") is node
    node.lot = Lot()
    ledger.sweep(node)
    assert ledger.states_with_lots() == [node]
    node.lot = None
    node.counts[S] = 1
    ledger.sweep(node)
    assert ledger.node("k") is node
    node.counts[S] = 0
    ledger.sweep(node)
    assert ledger.node("k") is None


def test_s13_a_limit_that_is_only_watched() -> None:
    """S13: a pool that is watched, not enforced, counts what is held past the limit that was declared."""
    ledger: Ledger[Lot[int]] = Ledger()
    pool = ledger.add_pool(Pool("P", "pool P", 2, reserve=1, enforced=False))
    for _ in range(5):
        assert ledger.claim(wants(ledger, "P")) is None
    assert (pool.declared, pool.held, pool.peak) == (2, 5, 5)
    assert ledger.hopeless(wants(ledger, "P9")) is None
    ledger.validate()


def test_r64_a_lower_limit_holds_nobody_who_is_there() -> None:
    """R-64, G3: below what is held a limit takes nobody new; what is above it goes down with each that ends and never
    up again; a reserve counts at once.
    """
    ledger = make_ledger("P3")
    pool = ledger.pools["P"]
    three = [wants(ledger, "P") for _ in range(3)]
    for one in three:
        assert ledger.claim(one) is None
    ledger.set_limit(pool, 1)
    ledger.validate()
    assert (pool.limit, pool.declared, pool.held) == (1, 1, 3)
    assert ledger.claim(wants(ledger, "P")) is pool
    ledger.give(three.pop())
    ledger.validate()
    pool.held += 1
    with pytest.raises(AssertionError, match="over its limit"):
        ledger.validate()
    pool.held -= 1
    while three:
        ledger.give(three.pop())
        ledger.validate()
    ledger.set_limit(pool, 2, 1)
    assert ledger.hopeless(wants(ledger, "P2")) is pool
    assert ledger.claim(wants(ledger, "P")) is None
    assert ledger.claim(wants(ledger, "P")) is pool
    assert ledger.claim(wants(ledger, "P", priority=1)) is None
    ledger.set_limit(pool, 2, enforced=False)
    assert ledger.claim(wants(ledger, "P")) is None
    assert pool.anew().held == 0
