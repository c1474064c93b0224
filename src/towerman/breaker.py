"""When to stop asking for what keeps failing: the state machine of a circuit breaker.

Theory. Closed: calls go, failures are remembered. With so many failures within a window of time it opens: nothing
goes. When it has been open for its time it lets a few calls through, the probes, no more at once than it asks for. When
all of them have come back well it closes and has forgotten the failures; with the first that fails it is open again. A
probe that comes to nothing (cancelled, or not started) says nothing, and its place is free again. (Nygard, Release It!,
2007; the counted probes as in failsafe.)

Only what has begun counts. Whoever was at work when it opened tells nothing new by failing, and nothing by ending
well: a breaker that is not closed listens to its probes alone.

House rules. Time comes in, in whole microseconds on one scale, as for rates. Nothing here waits: whoever is not let
through is refused.

Not here: what counts as a failure (runner), who is refused (gate).
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

State = Literal["closed", "open", "half_open"]

VERDICTS: Final = ("well", "failed", "nothing")
Verdict = Literal["well", "failed", "nothing"]
"""How a call came back."""


class Circuit:
    """One circuit breaker.

    Args:
        failures: so many within the window open it, 1 or more.
        window: microseconds.
        open_for: microseconds for which it stays open.
        probes: calls that may be on trial at once, and that must come back well to close it, 1 or more.

    Attributes:
        probing: probes that are out.
        opened: how often it opened.
        refused: calls that were not let through.
    """

    __slots__ = (
        "_failed",
        "_until",
        "_well",
        "failures",
        "generation",
        "open_for",
        "opened",
        "probes",
        "probing",
        "refused",
        "window",
    )

    def __init__(self, failures: int, window: int, open_for: int, probes: int) -> None:
        self.failures = failures
        self.window = window
        self.open_for = open_for
        self.probes = probes
        self.probing = 0
        self.opened = 0
        self.refused = 0
        self.generation = 0  # rises with each change of state: what was let through before is of no interest
        self._failed: deque[int] = deque()
        self._well = 0
        self._until: int | None = None  # when its time of being open is over; None: it is closed

    def state(self, now: int) -> State:
        """What it is at this instant."""
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half_open"

    def lets(self, now: int) -> bool:
        """May one more go?"""
        return self._until is None or (now >= self._until and self.probing + self._well < self.probes)

    def go(self) -> int:
        """One goes that may. Returns the generation in which it did, to be told when it comes back."""
        if self._until is not None:
            self.probing += 1
        return self.generation

    def back(self, generation: int, verdict: Verdict, now: int) -> bool:
        """One has come back; says whether the breaker has opened by that."""
        if generation != self.generation:
            return False
        if self._until is None:
            if verdict == "failed":
                return self._count(now)
            return False
        self.probing -= 1
        if verdict == "failed":
            self._open(now)
            return True
        if verdict == "well":
            self._well += 1
            self._close_if_well()
        return False

    def _close_if_well(self) -> None:
        if self._until is not None and self._well >= self.probes:
            self._until = None
            self._change()

    def _count(self, now: int) -> bool:
        failed = self._failed
        failed.append(now)
        while failed[0] <= now - self.window:
            failed.popleft()
        if len(failed) < self.failures:
            return False
        self._open(now)
        return True

    def _open(self, now: int) -> None:
        self._until = now + self.open_for
        self.opened += 1
        self._change()

    def _change(self) -> None:
        self.generation += 1
        self.probing = self._well = 0
        self._failed.clear()

    def retry_after(self, now: int) -> int:
        """Microseconds after which it may let one through again: the rest of its time, or 0 while probes are out."""
        return max(0, self._until - now) if self._until is not None else 0

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Failures, window, time open, probes."""
        return (self.failures, self.window, self.open_for, self.probes)

    def rested(self, now: int) -> bool:
        """Is it as if nothing had ever failed?"""
        return self._until is None and (not self._failed or self._failed[-1] <= now - self.window)

    def set(self, failures: int, window: int, open_for: int, probes: int) -> None:
        """Other numbers come into force; what it is it stays. Where as many probes have come back well as it asks for
        by now, it closes: none that is still to come could close it.
        """
        if self._until is not None:
            self._until += open_for - self.open_for
        self.failures, self.window, self.open_for, self.probes = failures, window, open_for, probes
        self._close_if_well()

    def shift(self, by: int) -> None:
        """All instants are so much later, or earlier, than they were thought to be."""
        self._failed = deque(instant + by for instant in self._failed)
        if self._until is not None:
            self._until += by

    def validate(self) -> None:
        """Raise AssertionError when it is what it cannot be."""
        assert self.probing >= 0, f"{self} has lost a probe"
        assert self._until is not None or not (self.probing or self._well), f"{self} probes although it is closed"

    def __repr__(self) -> str:
        word = "closed" if self._until is None else "open or half open"
        return f"Circuit({word}, {len(self._failed)} of {self.failures} failures, {self.probing} probes out)"
