"""F1 to F4: what a call costs in time and memory.

Concurrency is 8 for all alike. CPU time, but for memory.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.measure import Figure, Pass, Samples, figure, interleaved, peak_bytes, ratio, rotated, turns
from benchmarks.report import Row, note
from benchmarks.settings import Settings
from benchmarks.systems import (
    BESIDE,
    REF,
    REF_JSON,
    Beside,
    Handler,
    Maker,
    Unfit,
    add_blocker,
    add_handler,
    at_once,
    by_semaphore,
    by_semaphore_json,
    by_towerman,
    by_towerman_json,
    calls_of,
    check,
    furnish,
    limiters,
    make_tower,
    message_of,
    prototypes,
    yields,
)

CAP = 8

OWN = "towerman"
REUSED = "towerman own_task=False"
FLAT = "towerman, flat keys"
NESTED = "towerman, nested keys"
SUBTREE = "towerman, nested keys beside a subtree"
WATCHED = "towerman with an observer"

_OURS: dict[str, Maker] = {
    OWN: by_towerman,
    REUSED: partial(by_towerman, own_task=False),
    FLAT: partial(by_towerman, keys="flat"),
    NESTED: partial(by_towerman, keys="nested"),
    SUBTREE: partial(by_towerman, keys="nested+subtree"),
    WATCHED: partial(by_towerman, observers=[lambda event: None]),
}

BY_BESIDE: dict[str, Beside] = {f"towerman, {beside}": beside for beside in BESIDE}
"""What else of admission a call may go through, by the name under which it is measured."""


def beside_rows(goal: str, what: str, samples: Samples, against: str, *, most: float | None = None) -> list[Row]:
    """A row for each of these that was measured."""
    return [
        Row(goal, f"{what}, {BESIDE[beside]}", ratio(samples, name, against), most=most, against=against)
        for name, beside in BY_BESIDE.items()
        if name in samples
    ]


def besides(maker: Maker) -> dict[str, Maker]:
    """Ours once for each of them."""
    return {name: partial(maker, beside=beside) for name, beside in BY_BESIDE.items()}


async def _fit(makers: Mapping[str, Maker], n: int = 50) -> dict[str, Maker]:
    """Those whose results are right; a peer that is not is left out, ours is an error."""
    found: dict[str, Maker] = {}
    for name, maker in makers.items():
        try:
            await check(name, maker, n, CAP)
        except Unfit as unfit:
            if name in _OURS:
                raise
            note(f"left out: {unfit}")
        else:
            found[name] = maker
    return found


def _passes(makers: Mapping[str, Maker], n: int, handler: Handler) -> dict[str, Pass]:
    return {name: maker(n, handler, CAP) for name, maker in makers.items()}


async def f1_queueing(settings: Settings) -> list[Row]:
    """Calls that queue: the handler gives the loop one turn."""
    others, missing = limiters()
    others |= prototypes("proto core", "proto core task reuse (bound)")
    for one in missing:
        note(one)
    makers = await _fit({REF: by_semaphore, **_OURS, **besides(by_towerman), **others})
    rows = []
    for n in settings.sizes:
        samples = await interleaved(_passes(makers, n, yields), settings.rounds, passes=max(1, min(5, 3000 // n)))
        beside = {name: ratio(samples, name, REF) for name in others if name in samples}
        for name, what, most in (
            (OWN, "a task of its own for each call", 0.95),
            (REUSED, "own_task=False", 0.75),
            (NESTED, "nested resource keys", 1.15),
            (SUBTREE, "nested resource keys, another tool declares a subtree", 1.15),
            (FLAT, "flat resource keys", None),
            (WATCHED, "an observer that does nothing", None),
        ):
            rows.append(
                Row(
                    "F1",
                    f"{n:,} calls that queue, {what}",
                    ratio(samples, name, REF),
                    most=most,
                    against=REF,
                    beside=beside if name == OWN else {},
                    samples=samples if name == OWN else {},
                )
            )
        rows += beside_rows("F1", f"{n:,} calls that queue", samples, REF)
    return rows


async def f2_no_op(settings: Settings) -> list[Row]:
    """Calls that return at once; and one call alone on a warm loop."""
    others, _ = limiters()
    others |= prototypes("proto core", "proto core task reuse (bound)")
    ours = {name: _OURS[name] for name in (OWN, REUSED)}
    makers = await _fit({REF: by_semaphore, **ours, **besides(by_towerman), **others})
    n = min(1000, settings.sizes[0])
    samples = await interleaved(_passes(makers, n, at_once), settings.rounds, passes=max(1, 3000 // n))
    rows = [
        Row(
            "F2",
            f"{n:,} calls that return at once, {what}",
            ratio(samples, name, REF),
            most=most,
            against=REF,
            beside={one: ratio(samples, one, REF) for one in others if one in samples} if name == OWN else {},
            samples=samples if name == OWN else {},
        )
        for name, what, most in ((OWN, "a task of its own", 1.3), (REUSED, "own_task=False", 0.95))
    ]
    rows += beside_rows("F2", f"{n:,} calls that return at once", samples, REF)
    return rows + await _f2_alone(settings)


async def _f2_alone(settings: Settings) -> list[Row]:
    in_run, own_run = "towerman, in an open run", "towerman, a run of its own"
    tower = make_tower(CAP)
    add_handler(tower, at_once, "none")
    (call,) = calls_of(1)
    async with tower.run() as run:

        async def once() -> list[object]:
            return [result.value for result in await run.execute([call])]

        assert await once() == [0]
        systems: dict[str, Pass] = {
            REF: by_semaphore(1, at_once, CAP),
            in_run: once,
            own_run: by_towerman(1, at_once, CAP),
        }
        if sys.version_info >= (3, 12):
            systems |= {f"{name}, eager tasks": _eager(one) for name, one in list(systems.items())}
        samples = await interleaved(systems, settings.rounds, passes=settings.alone)
    rows = [
        Row(
            "F2",
            "one call alone on a warm loop, in an open run",
            ratio(samples, in_run, REF),
            most=1.2,
            against=REF,
            samples=samples,
        ),
        Row("F2", "one call alone, a run of its own", ratio(samples, own_run, REF), against=REF),
    ]
    eager = f"{in_run}, eager tasks"
    if eager in samples:
        theirs = f"{REF}, eager tasks"
        rows.append(
            Row(
                "F2",
                "one call alone on a warm loop whose task factory is eager",
                ratio(samples, eager, REF),
                most=0.65,
                against=REF,
                beside={theirs: ratio(samples, theirs, REF)},
            )
        )
    return rows


def _eager(one: Pass) -> Pass:
    """The same pass on a loop whose tasks take their first step at once (Python 3.12 and later)."""

    async def run() -> object:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        try:
            return await one()
        finally:
            loop.set_task_factory(None)

    return run


async def f3_whole_path(settings: Settings) -> list[Row]:
    """JSON in, validation, admission, trace, result bound, JSON out."""
    from benchmarks.peers import frameworks

    n = min(1000, settings.sizes[0])
    ours: dict[str, Maker] = {OWN: by_towerman_json, REUSED: partial(by_towerman_json, own_task=False)}
    others = prototypes("proto core+json")
    makers = await _fit({REF: by_semaphore, REF_JSON: by_semaphore_json, **ours, **besides(by_towerman_json), **others})
    for name, maker in frameworks().items():
        try:
            await check(name, maker, n, CAP, capped=False)
        except Exception as error:  # a framework fails in ways of its own
            note(f"left out: {name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            makers[name] = maker
            others[name] = maker
    samples = await interleaved(_passes(makers, n, at_once), settings.rounds, passes=1 if settings.quick else 2)
    return [
        Row(
            "F3",
            f"{n:,} calls, an OpenAI message in and its tool messages out",
            ratio(samples, OWN, REF_JSON),
            most=1.2,
            against=REF_JSON,
            beside={name: ratio(samples, name, REF_JSON) for name in (REF, *others) if name in samples},
            samples=samples,
        ),
        Row("F3", "the same, own_task=False", ratio(samples, REUSED, REF_JSON), against=REF_JSON),
        *beside_rows("F3", "the same", samples, REF_JSON),
    ]


async def f4_memory(settings: Settings) -> list[Row]:
    """Peak memory of a call, and what a call that waits takes."""
    n = settings.sizes[-1]
    makers: dict[str, Maker] = {
        REF: by_semaphore,
        OWN: by_towerman,
        REUSED: _OURS[REUSED],
        **besides(by_towerman),
    }
    names = list(makers)
    passes = _passes(makers, n, yields)
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for one in passes.values():
        await one()
    for round_ in range(settings.counted):
        for name in rotated(names, round_):
            peaks[name].append(await peak_bytes(passes[name]) / n)
    rows = [
        Row(
            "F4",
            f"peak memory a call, {n:,} calls that queue ({figure(peaks[OWN]).median:,.0f} bytes a call)",
            ratio(peaks, OWN, REF),
            most=0.35,
            against=REF,
            beside={REUSED: ratio(peaks, REUSED, REF)},
            samples=peaks,
        )
    ]
    rows += beside_rows("F4", f"peak memory a call, {n:,} calls that queue", peaks, REF)
    waiting = figure([await _parked_task(n) for _ in range(settings.counted)])
    for what, calls in (
        ("arguments given as a mapping", lambda: calls_of(n)),
        ("arguments given as JSON in an OpenAI message", lambda: message_of(n)),
    ):
        rows.append(
            Row(
                "F4",
                f"a parked call beyond the emitted one, {n:,} in one batch, {what}",
                figure([await _parked_call(n, calls) for _ in range(settings.counted)]),
                most=256,
                unit="bytes",
                beside={"a task that waits for a semaphore": waiting},
            )
        )
    for beside, words in BESIDE.items():
        rows.append(
            Row(
                "F4",
                f"a parked call beyond the emitted one, arguments given as a mapping, {words}",
                figure([await _parked_call(n, lambda: calls_of(n), beside) for _ in range(settings.counted)]),
                most=256,
                unit="bytes",
            )
        )
    rows.append(
        Row(
            "F4",
            f"an entry of the gate, {n:,} parked at once for runs that may have as many",
            _parked_entry(n, settings),
            unit="bytes",
        )
    )
    return rows


async def _parked_call(n: int, emit: Callable[[], object], beside: Beside = "nothing") -> float:
    """Bytes that a call takes while it waits behind a full tower, beyond what its caller had already."""
    from towerman.adapters import decode

    tower, budget = furnish(1, at_once, beside=beside)
    add_blocker(tower)
    async with tower.run() as first, tower.run(budget=budget) as second:
        holder = asyncio.ensure_future(first.execute(calls_of(1, "block")))
        await turns(3)
        batch = decode(emit())
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        waiting = asyncio.ensure_future(second.execute(batch))
        while (statistics := tower.statistics()).waiting + statistics.behind < n:
            await asyncio.sleep(0)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        second.cancel()
        first.cancel()
        await asyncio.gather(holder, waiting)
    return grown / n


async def _parked_task(n: int) -> float:
    """Bytes of a task that waits for a semaphore."""
    semaphore = asyncio.Semaphore(1)
    await semaphore.acquire()

    async def bounded(i: int) -> int:
        async with semaphore:
            return await at_once(i)

    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tasks = [asyncio.ensure_future(bounded(i)) for i in range(n)]
    await turns(2)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    semaphore.release()
    await asyncio.gather(*tasks)
    return grown / n


def _parked_entry(n: int, settings: Settings) -> Figure:
    from benchmarks.waiting import parked_gate

    found = []
    for _ in range(settings.counted):
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        kept = parked_gate(n)
        gc.collect()
        found.append((tracemalloc.get_traced_memory()[0] - before) / n)
        tracemalloc.stop()
        del kept
    return figure(found)
