"""How much is measured: the whole, or a smoke run that shows that everything still runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Amounts.

    Args:
        quick: a smoke run: small amounts, numbers that mean little.
        rounds: of every comparison in time.
        counted: passes of what is counted and not timed (bytes of memory), which varies little.
        sizes: calls of a batch, small and large.
        waiters: how many wait, small to large.
        alone: passes of one call alone in each round.
        out: where samples go as JSON lines, or None.
    """

    quick: bool = False
    rounds: int = 11
    counted: int = 3
    sizes: tuple[int, ...] = (1_000, 10_000)
    waiters: tuple[int, ...] = (1_000, 10_000, 100_000)
    alone: int = 200
    out: Path | None = None


QUICK = Settings(quick=True, rounds=2, counted=1, sizes=(200, 1_000), waiters=(200, 1_000, 2_000), alone=20)
