"""How long calls are taken to last: means by tool, the median where a tool has none, or hops."""

from __future__ import annotations

from towerman.estimates import estimated


def test_s6_nothing_known_is_no_estimate() -> None:
    """S6: then paths are counted in calls."""
    assert estimated({}, ["a", "b"]) is None
    assert estimated({"c": (3, 2.0)}, ["a", None]) is None
    assert estimated({}, [], []) is None


def test_s6_a_tool_without_history_takes_the_median_of_those_with_one() -> None:
    """S6: not the mean, which one slow tool would draw away."""
    means = {"a": (1, 1.0), "b": (9, 2.0), "slow": (1, 100.0)}
    assert estimated(means, ["a", "new", "b", None]) == [1.0, 2.0, 2.0, 2.0]
    assert estimated(means, ["a", "b"]) == [1.0, 2.0]


def test_what_was_said_of_a_call_goes_before_the_mean_of_its_tool() -> None:
    means = {"a": (1, 1.0), "b": (1, 3.0)}
    assert estimated(means, ["a", "a", "new"], [7.0, None, None]) == [7.0, 1.0, 2.0]
    assert estimated({}, ["a", "b", "c"], [4.0, None, 8.0]) == [4.0, 6.0, 8.0]
    assert estimated({}, ["a"], [0.0]) == [0.0]
