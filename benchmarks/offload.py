"""F11: sync handlers on worker threads, beside `asyncio.to_thread`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable

from benchmarks.calls import OWN
from benchmarks.measure import Pass, Samples, figure, interleaved, ratio, rotated
from benchmarks.report import Row
from benchmarks.settings import Settings
from benchmarks.systems import calls_of, make_tower
from towerman import Call

TO_THREAD = "asyncio.to_thread"

THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Threads of the default executor of an event loop: ours gets as many where the two are compared."""


def at_once(i: int) -> int:
    """A sync call that never waits."""
    return i


class _Blocks:
    """A sync call that blocks its thread, and the most that were seen at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = 0
        self.peak = 0
        self._lock = threading.Lock()

    def call(self, i: int) -> int:
        """Block and answer."""
        with self._lock:
            self.running += 1
            self.peak = max(self.peak, self.running)
        time.sleep(self.seconds)
        with self._lock:
            self.running -= 1
        return i


def _to_thread(n: int, handler: Callable[[int], int]) -> Pass:
    async def run() -> list[int]:
        return await asyncio.gather(*[asyncio.to_thread(handler, i) for i in range(n)])

    return run


def _towerman(n: int, handler: Callable[[int], int], cap: int) -> Pass:
    tower = make_tower(cap)
    tower.add_tool(handler, name="look", independent=True)
    calls = calls_of(n)

    async def run() -> list[object]:
        async with tower.run() as run:
            batch = await run.execute(calls)
        return [result.value for result in batch]

    return run


async def f11_threads(settings: Settings) -> list[Row]:
    """1,000 at once, one alone, many blockers, and a short call behind blockers."""
    return [*await _f11_overhead(settings), *await _f11_blockers(settings), *await _f11_short(settings)]


async def _f11_overhead(settings: Settings) -> list[Row]:
    n = min(1000, settings.sizes[0])
    systems = {TO_THREAD: _to_thread(n, at_once), OWN: _towerman(n, at_once, THREADS)}
    for name, one in systems.items():
        assert await one() == list(range(n)), f"{name}: results are wrong or out of order"
    bulk = await interleaved(systems, settings.rounds, passes=1 if settings.quick else 2)

    tower = make_tower(THREADS)
    tower.add_tool(at_once, name="look", independent=True)
    (call,) = calls_of(1)
    async with tower.run() as run:

        async def once() -> None:
            batch = await run.execute([call])
            assert batch[0].value == 0

        alone = await interleaved(
            {TO_THREAD: _to_thread(1, at_once), OWN: once},
            settings.rounds,
            clock=time.perf_counter,
            passes=settings.alone,
        )
    return [
        Row(
            "F11",
            f"{n:,} sync handlers at once on {THREADS} threads, CPU",
            ratio(bulk, OWN, TO_THREAD),
            most=0.35,
            against=TO_THREAD,
            samples=bulk,
        ),
        Row(
            "F11",
            "one sync handler alone, wall time",
            ratio(alone, OWN, TO_THREAD),
            most=0.6,
            against=TO_THREAD,
            samples=alone,
        ),
    ]


async def _f11_blockers(settings: Settings) -> list[Row]:
    n, seconds = (16, 0.010) if settings.quick else (64, 0.050)
    watched = _Blocks(seconds)
    systems = {TO_THREAD: _to_thread(n, _Blocks(seconds).call), OWN: _towerman(n, watched.call, n)}
    samples = await interleaved(systems, settings.rounds, clock=time.perf_counter)
    of_ideal = {name: [one / seconds for one in found] for name, found in samples.items()}
    return [
        Row(
            "F11",
            f"{n} blockers of {seconds * 1e3:.0f} ms, room for all",
            figure(of_ideal[OWN]),
            most=1.15,
            against="all at once",
            exact=(f"peak exactly {n}", watched.peak == n),
            beside={TO_THREAD: figure(of_ideal[TO_THREAD])},
            samples=of_ideal,
        )
    ]


async def _f11_short(settings: Settings) -> list[Row]:
    blocking = 0.05 if settings.quick else 0.4
    tower = make_tower(64)
    tower.add_tool(_Blocks(blocking).call, name="block", independent=True)
    tower.add_tool(_Blocks(0.001).call, name="short", independent=True)

    async def short() -> None:
        async with tower.run() as run:
            assert (await run.execute([Call("short", {"i": 1})]))[0].value == 1

    async def blockers() -> None:
        async with tower.run() as run:
            assert (await run.execute(calls_of(6, "block"))).ok

    systems: dict[str, tuple[Callable[[], Awaitable[object]], Callable[[], Awaitable[object]]]] = {
        TO_THREAD: (_to_thread(1, _Blocks(0.001).call), _to_thread(6, _Blocks(blocking).call)),
        OWN: (short, blockers),
    }
    behind: Samples = {name: [] for name in systems}
    for quick, slow in systems.values():  # threads are there
        await asyncio.gather(slow(), quick())
    for round_ in range(min(settings.rounds, 9)):
        for name in rotated(list(systems), round_):
            quick, slow = systems[name]
            free = []
            for _ in range(5):
                started = time.perf_counter()
                await quick()
                free.append(time.perf_counter() - started)
            blocked = asyncio.ensure_future(slow())
            await asyncio.sleep(0.01)
            started = time.perf_counter()
            await quick()
            behind[name].append((time.perf_counter() - started) / figure(free).median)
            await blocked
    return [
        Row(
            "F11",
            f"a call of 1 ms behind 6 blockers of {blocking * 1e3:.0f} ms",
            figure(behind[OWN]),
            most=2.0,
            against="its free time",
            beside={TO_THREAD: figure(behind[TO_THREAD])},
            samples=behind,
        )
    ]
