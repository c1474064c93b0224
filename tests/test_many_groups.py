"""The simulation of a limit that is lent in chunks: what its page says of it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.groups import Plan, Root, Sim, World, filled

SMALL = World(replicas=40, groups=8, limit=80, hot=2, shift=20.0, seconds=60.0, warm=10.0)
LENT = Plan("lent", "lent", 1, 1.0, 5.0)


@given(limit=st.integers(1, 100), wants=st.lists(st.integers(0, 60), max_size=12))
def test_water_is_filled_up_to_one_level(limit: int, wants: list[int]) -> None:
    """Max-min fairness: nobody gets more than is wanted, all together no more than there is, unless that is less than
    one each; who gets less than is wanted gets no less than anybody else.
    """
    level = filled(limit, wants)
    given_out = [min(want, level) for want in wants]
    hungry = sum(want > 0 for want in wants)
    assert sum(given_out) <= max(limit, hungry)
    assert all(got in (want, level) for got, want in zip(given_out, wants, strict=True))
    if sum(wants) > limit >= hungry:
        assert sum(given_out) > limit - hungry  # no more is left over than cannot be dealt out evenly


@given(data=st.data(), chunk=st.sampled_from([1, 3, 10]))
def test_a_root_never_lends_more_than_there_is(data: st.DataObject, chunk: int) -> None:
    """Whatever groups say and whenever: what is lent, and what still runs of it, is within the limit."""
    root = Root(50, 5, chunk)
    running = [0] * 5
    share = [0] * 5
    until = [0.0] * 5
    now = 0.0
    for _ in range(data.draw(st.integers(1, 30))):
        now += data.draw(st.sampled_from([0.1, 1.0, 2.0]))
        one = data.draw(st.integers(0, 4))
        for group in range(5):
            if until[group] <= now:  # a loan is over: here its calls are over, too
                share[group] = running[group] = 0
            running[group] = data.draw(st.integers(0, max(share[group], running[group])))
        share[one] = root.answer(one, data.draw(st.integers(0, 60)), running[one], now, 5.0)
        until[one] = now + 5.0
        assert sum(max(*pair) for pair in zip(share, running, strict=True)) <= 50


@pytest.mark.parametrize("load", [0.6, 1.2])
def test_what_the_page_says(load: float) -> None:
    """Equal parts waste places, lent ones hardly; nobody exceeds the limit; the same seed gives the same figures."""
    world = replace(SMALL, load=load)
    one, split, lent = (Sim(world, plan).run() for plan in (Plan("one", "one"), Plan("split", "split"), LENT))
    assert one.used > 0.99 and one.most <= 1
    assert split.used < lent.used - 0.1 and split.refused >= lent.refused
    assert lent.used > 0.85 and lent.most <= 1 and lent.even > 0.97
    assert lent.root < one.root
    assert Sim(world, LENT).run() == lent


def test_a_group_that_is_cut_off_outlives_its_loan_and_a_root_that_forgets_exceeds_nothing() -> None:
    """The two things that are lost, and the one that is not."""
    world = replace(SMALL, load=1.3, mean=15.0, seconds=120.0)
    assert Sim(replace(world, cut=(30.0, 90.0)), LENT).run().most > 1
    assert Sim(replace(world, forget=60.0), LENT).run().most <= 1
