"""The count of turns in which a run makes the same call, and the digests by which calls are known."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from enum import Enum
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from towerman.arguments import identity, mark
from towerman.repeats import MOST, Repeats

READ, OTHER, BUILD, EDIT = (
    (name.encode(), effect) for name, effect in (("r", False), ("o", False), ("b", 1), ("e", 1))
)
KEY = b"k" * 32


def turns(repeats: Repeats, *calls: Iterable[Any]) -> list[dict[bytes, int]]:
    """The counts of one turn after the other."""
    return [repeats.turn(one) for one in calls]


def test_the_same_call_turn_after_turn_is_counted() -> None:
    """P-62: a call that comes in each turn has come once more each time; twice in one turn is once."""
    counts = turns(Repeats(), [READ], [READ, READ], [READ], [OTHER], [READ])
    assert [one.get(b"r") for one in counts] == [1, 2, 3, None, 4]
    assert repr(Repeats()) == "Repeats(0 calls)"


def test_p23_what_is_made_after_a_change_is_no_repeat() -> None:
    """P-23: building again after each new edit is no loop; building again and again with nothing else is one, and so
    are two reads that take turns.
    """
    edits = [(bytes([number]), True) for number in range(5)]
    counts = turns(Repeats(), *[step for edit in edits for step in ([edit], [BUILD])])
    assert {one.get(b"b", 1) for one in counts} == {1}
    assert [one[b"b"] for one in turns(Repeats(), [BUILD], [BUILD], [BUILD])] == [1, 2, 3]
    assert turns(Repeats(), [READ], [OTHER], [READ], [OTHER], [READ])[-1] == {b"r": 3}
    assert [one[b"b"] for one in turns(Repeats(), [BUILD, EDIT], [BUILD, EDIT], [BUILD, EDIT])] == [1, 2, 3]


def test_the_memory_is_bounded() -> None:
    """A run that makes ever other calls is remembered as far as `MOST` of them; the one that came longest ago goes."""
    repeats = Repeats()
    for number in range(MOST):
        repeats.turn([(str(number).encode(), False)])
    assert repeats.turn([(b"0", False), (b"new", False)]) == {b"0": 2, b"new": 1}
    assert len(repeats._counts) == MOST
    assert repeats.turn([(b"1", False)]) == {b"1": 1}  # it has gone
    assert repeats.turn([(str(number).encode(), False) for number in range(2 * MOST)])[b"0"] == 3
    assert len(repeats._counts) == MOST


class Colour(Enum):
    """Two members of one value's spelling."""

    RED = 1
    BLUE = "1"


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 2),
        st.floats(allow_nan=False, width=16),
        st.text(max_size=2),
        st.binary(max_size=2),
        st.sampled_from([Decimal("1"), Decimal("1.0"), Colour.RED, Colour.BLUE, "\ud800"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=1), inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("ab"), values), st.dictionaries(st.sampled_from("ab"), values))
def test_digests_are_equal_where_calls_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    """P-22, G8: two calls have the same digest exactly where no handler could tell them apart."""
    assert (mark(KEY, "t", one) == mark(KEY, "t", other)) == (identity(one) == identity(other))
    assert mark(KEY, "t", one) != mark(KEY, "u", one)
    assert mark(KEY, "t", one) != mark(b"x" * 32, "t", one)
    assert len(mark(KEY, "t", one) or b"") == 16


def test_what_cannot_be_compared_has_no_digest() -> None:
    """Where nobody can say whether two calls are the same, neither is taken for a repeat."""
    assert mark(KEY, "t", {"a": object()}) is None
