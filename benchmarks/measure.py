"""How everything here is measured: interleaved rounds, ratios within a round, their median and spread.

Theory. A shared machine is slow now and quick a second later, so a time by itself says little. Each round runs every
system once, in an order that rotates, and what counts is the ratio of two systems within one round. Told are the median
of these ratios and the middle half of them. Work that never waits is measured in CPU time of the process, all its
threads; work that sleeps, in wall time.

House rules. The collector is run before each sample and left on during it, unless a measurement says otherwise. Memory
is measured in passes of its own, since tracing allocations slows what it watches. Before anything is timed, its results
are checked.

Not here: what is measured (calls, waiting, offload, imports) and how it is shown (report).
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

Samples = dict[str, list[float]]
"""By system, one number for each round."""

Pass = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Figure:
    """Ratios, or plain numbers, of all rounds.

    Args:
        median: of the rounds.
        low: lower quartile.
        high: upper quartile.
        rounds: how many.
    """

    median: float
    low: float
    high: float
    rounds: int


def figure(values: Sequence[float]) -> Figure:
    """Median and middle half of some numbers."""
    if len(values) == 1:
        return Figure(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(median, low, high, len(values))


def ratio(samples: Samples, ours: str, theirs: str) -> Figure:
    """Ours over theirs, round by round."""
    return figure([a / b for a, b in zip(samples[ours], samples[theirs], strict=True)])


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names, beginning with another one each round."""
    by %= len(names)
    return [*names[by:], *names[:by]]


async def sample(one: Pass, clock: Callable[[], float], passes: int = 1) -> float:
    """Seconds that a pass takes; with several passes, of one on average."""
    gc.collect()
    before = clock()
    for _ in range(passes):
        await one()
    return (clock() - before) / passes


async def interleaved(
    systems: Mapping[str, Pass],
    rounds: int,
    *,
    clock: Callable[[], float] = time.process_time,
    passes: int = 1,
) -> Samples:
    """Seconds of each system in each round.

    Args:
        systems: by name, one pass of each.
        rounds: how many; each system runs once in each.
        clock: CPU time of the process, or `time.perf_counter` for what sleeps.
        passes: of each system in each round, of which the mean counts: more for short ones.
    """
    found: Samples = {name: [] for name in systems}
    for one in systems.values():  # caches, free lists and specialised bytecode are warm for all alike
        await one()
    for round_ in range(rounds):
        for name in rotated(list(systems), round_):
            found[name].append(await sample(systems[name], clock, passes))
    return found


async def peak_bytes(one: Pass) -> int:
    """The most that the heap grew during one pass; what the pass returns is kept until the end."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        kept = await one()
        peak = tracemalloc.get_traced_memory()[1] - before
        del kept
        return peak
    finally:
        tracemalloc.stop()


async def longest_turn(one: Pass) -> tuple[float, object]:
    """The longest turn of the loop during one pass, in CPU seconds, and what it returned.

    The collector is off meanwhile, and what was returned is kept.
    """
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        before = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            longest = max(longest, now - before)
            before = now

    gc.collect()
    gc.disable()
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.sleep(0)
        kept = await one()
        await asyncio.sleep(0)
        return longest, kept
    finally:
        watcher.cancel()
        gc.enable()


async def turns(count: int) -> None:
    """Give the loop some turns."""
    for _ in range(count):
        await asyncio.sleep(0)
