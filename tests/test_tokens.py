"""Estimates of what results cost the model to read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerman.tokens import Counter, estimate, of_bytes

SECRET = "zqxjkvbpwm"


@given(st.text())
def test_r143_a_quarter_of_the_bytes_rounded_up(text: str) -> None:
    """R-143: without a counter a token is four bytes of UTF-8, also of text that UTF-8 cannot hold as it is."""
    size = len(text.encode("utf-8", "replace"))
    assert estimate(text) == of_bytes(size) == -(-size // 4) == Counter(None)(text)


def test_r143_a_counter_of_ones_own_counts() -> None:
    """R-143: what it says holds, and totals go by what it has counted so far."""
    counter = Counter(lambda text: len(text.split()))
    assert counter.of_total(1000) == 250
    assert counter("to be or not to be") == 6
    assert counter.of_total(180) == 60
    assert counter.counted == (18, 6)
    assert repr(counter) == "Counter(plugged in)"
    assert repr(Counter(None)) == "Counter(bytes / 4)"
    assert Counter(None).of_total(9) == 3


@pytest.mark.parametrize(
    "wrong",
    [-1, float("nan"), 2.0, "5", None, True, 10**5000, 9_000, [1], object()],
    ids=lambda wrong: type(wrong).__name__,
)
def test_r143_a_counter_that_lies_is_told_once(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    """R-143: what is no number of tokens is not believed; bytes / 4 count, which is logged once, without the text."""
    counter = Counter(lambda text: wrong)
    with caplog.at_level(logging.WARNING, "towerman"):
        assert [counter(SECRET), counter(SECRET)] == [3, 3]
    (record,) = caplog.records
    assert "count_tokens: it gave" in record.getMessage()
    assert SECRET not in record.getMessage()
    assert counter.counted == (0, 0)


def test_r143_a_counter_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """R-143, G8: its exception goes no further, and neither does what it says."""

    def fail(text: str) -> int:
        raise ValueError(text)

    counter = Counter(fail)
    with caplog.at_level(logging.WARNING, "towerman"):
        assert [counter(SECRET), counter("")] == [3, 0]
    (record,) = caplog.records
    assert record.getMessage() == "count_tokens: it failed with ValueError; bytes / 4 are shown where it does"
    assert record.exc_info is None


def test_r143_what_stands_around_a_text_may_count() -> None:
    """R-143: a counter may add what a message costs beside its text."""
    assert Counter(lambda text: 4)("") == 4
