"""F5, F6, F7, F12: what those who wait cost those who do not, and how cheaply they give up."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from benchmarks.calls import BY_BESIDE, CAP, OWN, REUSED, beside_rows
from benchmarks.measure import Pass, Samples, figure, interleaved, longest_turn, ratio, rotated, turns
from benchmarks.report import Row, note
from benchmarks.settings import Settings
from benchmarks.systems import (
    BESIDE,
    LONG,
    REF,
    Beside,
    Maker,
    Sleeps,
    add_blocker,
    at_once,
    by_semaphore,
    by_towerman,
    calls_of,
    furnish,
    limiters,
    make_tower,
    message_of,
    yields,
)
from towerman import BatchResult, Call, Run, Tower
from towerman.calls import Result
from towerman.gate import Entry, Gate, Lot
from towerman.ledger import Ledger, Pool, Wants

# ---------------------------------------------------------------------------------------------- F5

_EACH = 200
"""Cancels in one sample."""


def parked_gate(n: int) -> tuple[Gate[int], list[Entry[int]]]:
    """A gate with one permit that somebody holds, and n entries parked for it."""
    ledger: Ledger[Lot[int]] = Ledger()
    ledger.add_pool(Pool("process", "pool process", 1))
    gate: Gate[int] = Gate(ledger)
    holder = gate.open_flow(1, 1)
    flow = gate.open_flow(2, n)
    wants: Wants[Lot[int]] = ledger.look_up(Wants(2, "look", (("process", 1),), max_wait=LONG))
    gate.offer(holder, [(wants, -1, 0.0)], 0.0)
    gate.offer(flow, [(wants, i, 0.0) for i in range(n)], 0.0)
    parked = flow.parked
    assert len(parked) == n
    assert gate.statistics()["parked"] == n
    return gate, parked


def _spread(n: int, count: int, round_: int) -> range:
    """Some places all over the queue, other ones each round."""
    step = n // count
    return range((step // 2 + round_) % step, n, step)[:count]


class _Gates:
    """Cancels through the gate."""

    def __init__(self, n: int) -> None:
        self.n = n

    async def build(self) -> None:
        """Park them."""
        self.gate, self.entries = parked_gate(self.n)

    async def cancel(self, places: range) -> float:
        """CPU seconds for each."""
        gate, entries = self.gate, [self.entries[place] for place in places]
        before = time.process_time()
        for entry in entries:
            gate.cancel(entry, 1.0)
        spent = time.process_time() - before
        assert all(entry.rejection.code == "cancelled" for entry in entries)
        return spent / len(entries)

    async def drop(self) -> None:
        """Let all go."""
        del self.gate, self.entries


class _Runs:
    """Cancels through `run.cancel(index=)`, in one batch that waits as a whole."""

    def __init__(self, n: int, beside: Beside = "nothing") -> None:
        self.n = n
        self.beside = beside

    async def build(self) -> None:
        """A call that holds the only permit, and a batch behind it."""
        self.sealed = 0
        tower, budget = furnish(1, at_once, beside=self.beside)
        add_blocker(tower)
        self.first, self.second = tower.run(), tower.run(budget=budget)
        self.holder = asyncio.ensure_future(self.first.execute(calls_of(1, "block")))
        await turns(3)
        self.waiting = asyncio.ensure_future(self.second.execute(calls_of(self.n), on_result=self._count))
        while (statistics := tower.statistics()).waiting + statistics.behind < self.n:
            await asyncio.sleep(0)

    def _count(self, result: Result) -> None:
        self.sealed += 1

    async def cancel(self, places: range) -> float:
        """CPU seconds for each."""
        run, sealed = self.second, self.sealed
        before = time.process_time()
        for place in places:
            run.cancel(index=place)
        spent = time.process_time() - before
        assert self.sealed == sealed + len(places), "a cancelled call has no result"
        return spent / len(places)

    async def drop(self) -> None:
        """End both runs."""
        self.second.cancel()
        self.first.cancel()
        await asyncio.gather(self.holder, self.waiting)
        await self.second.aclose()
        await self.first.aclose()


class _Semaphores:
    """Cancels tasks that wait for `asyncio.Semaphore`."""

    def __init__(self, n: int) -> None:
        self.n = n

    async def build(self) -> None:
        """Tasks behind a semaphore that somebody holds."""
        semaphore = asyncio.Semaphore(1)
        await semaphore.acquire()
        self.tasks = [asyncio.ensure_future(semaphore.acquire()) for _ in range(self.n)]
        await turns(2)

    async def cancel(self, places: range) -> float:
        """CPU seconds for each, until it has left the queue."""
        tasks = [self.tasks[place] for place in places]
        before = time.process_time()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        spent = time.process_time() - before
        assert all(task.cancelled() for task in tasks)
        return spent / len(tasks)

    async def drop(self) -> None:
        """Cancel the rest, first come first: the cheap order for a queue."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def f5_cancel(settings: Settings) -> list[Row]:
    """Cancel one of many who wait. The collector is off meanwhile."""
    kinds: dict[str, Callable[[int], _Gates | _Runs | _Semaphores]] = {
        "the gate": _Gates,
        "run.cancel": _Runs,
        "asyncio.Semaphore": _Semaphores,
    }
    ways = {"the gate": "`Gate.cancel`", "run.cancel": "`run.cancel(index=)`"}
    for beside, words in BESIDE.items():
        kinds[f"run.cancel, {beside}"] = partial(_Runs, beside=beside)
        ways[f"run.cancel, {beside}"] = f"`run.cancel(index=)`, {words}"
    cases = [(name, n) for n in settings.waiters for name in kinds]
    samples: Samples = {f"{name} {n}": [] for name, n in cases}
    kept: dict[tuple[str, int], _Gates | _Runs | _Semaphores] = {}
    try:
        for round_ in range(settings.rounds):
            for place in rotated([str(one) for one in range(len(cases))], round_):
                name, n = cases[int(place)]
                queue = kept.get((name, n))
                if queue is None:
                    queue = kinds[name](n)
                    await queue.build()
                gc.collect()
                gc.freeze()
                gc.disable()
                try:
                    count = min(_EACH, n // 5)
                    samples[f"{name} {n}"].append(await queue.cancel(_spread(n, count, round_)))
                finally:
                    gc.enable()
                    gc.unfreeze()
                if n >= _EACH * settings.rounds * 10:  # so many that those cancelled so far do not count
                    kept[name, n] = queue
                else:
                    await queue.drop()
    finally:
        for queue in kept.values():
            await queue.drop()
    few, many = settings.waiters[0], settings.waiters[-1]
    micro = {name: [figure(samples[f"{name} {n}"]).median * 1e6 for n in settings.waiters] for name in kinds}
    told = {
        name: " / ".join(f"{one:.2f}" if one < 10 else f"{one:.0f}" for one in found) for name, found in micro.items()
    }
    sizes = " / ".join(f"{n:,}" for n in settings.waiters)
    note(f"F5 microseconds a cancel at {sizes}: {told}")
    rows = []
    for name, how in ways.items():
        rows.append(
            Row(
                "F5",
                f"cancel a parked call by {how} at {sizes} waiters: {told[name]} us; the last against the first",
                ratio(samples, f"{name} {many}", f"{name} {few}"),
                most=5.0,
                beside={"asyncio.Semaphore": ratio(samples, f"asyncio.Semaphore {many}", f"asyncio.Semaphore {few}")},
                samples=samples if name == "the gate" else {},
            )
        )
        rows.append(
            Row(
                "F5",
                f"asyncio.Semaphore against {how} at {many:,} waiters (semaphore: {told['asyncio.Semaphore']} us)",
                ratio(samples, f"asyncio.Semaphore {many}", f"{name} {many}"),
                least=100.0,
            )
        )
    return rows


# ---------------------------------------------------------------------------------------------- F6


async def f6_stall(settings: Settings) -> list[Row]:
    """The longest turn of the loop, while a batch is submitted and run, and while it is cancelled."""
    n = settings.sizes[-1]
    message = "towerman, an OpenAI message"
    running: dict[str, Callable[[], Pass]] = {
        REF: lambda: by_semaphore(n, yields, CAP),
        OWN: lambda: _whole_batch(calls_of(n), own_task=True),
        REUSED: lambda: _whole_batch(calls_of(n), own_task=False),
        message: lambda: _whole_batch(message_of(n), own_task=True),
        **{one: partial(_whole_batch, calls_of(n), own_task=True, beside=beside) for one, beside in BY_BESIDE.items()},
    }
    by_run, by_caller = "towerman, run.cancel", "towerman, its caller is cancelled"
    stopping: dict[str, Callable[[], Awaitable[float]]] = {
        REF: lambda: _stall_of_gather_cancelled(n),
        by_run: lambda: _stall_of_batch_cancelled(n, by_caller=False),
        by_caller: lambda: _stall_of_batch_cancelled(n, by_caller=True),
        **{
            one: partial(_stall_of_batch_cancelled, n, by_caller=False, beside=beside)
            for one, beside in BY_BESIDE.items()
        },
    }
    runs: Samples = {name: [] for name in running}
    stops: Samples = {name: [] for name in stopping}
    for round_ in range(-1, settings.rounds):
        for name in rotated(list(running), max(0, round_)):
            longest, kept = await longest_turn(running[name]())
            found = kept if isinstance(kept, list) else [result.value for result in cast(BatchResult, kept)]
            assert found == list(range(n)), f"{name}: results are wrong or out of order"
            if round_ >= 0:
                runs[name].append(longest)
            del kept, found
        for name in rotated(list(stopping), max(0, round_)):
            longest = await stopping[name]()
            if round_ >= 0:
                stops[name].append(longest)

    def milliseconds(samples: Samples, name: str) -> str:
        return f"{figure(samples[name]).median * 1e3:.2f} ms"

    return [
        Row(
            "F6",
            f"longest turn of the loop while {n:,} calls are submitted and run "
            f"({milliseconds(runs, OWN)} against {milliseconds(runs, REF)})",
            ratio(runs, OWN, REF),
            most=0.03,
            against=REF,
            beside={REUSED: ratio(runs, REUSED, REF)},
            samples=runs,
        ),
        Row(
            "F6",
            f"the same, from an OpenAI message ({milliseconds(runs, message)})",
            ratio(runs, message, REF),
            against=REF,
        ),
        Row(
            "F6",
            f"the same while it is cancelled by `run.cancel()` "
            f"({milliseconds(stops, by_run)} against {milliseconds(stops, REF)})",
            ratio(stops, by_run, REF),
            most=0.1,
            against=REF,
            samples=stops,
        ),
        Row(
            "F6",
            f"the same while its caller is cancelled ({milliseconds(stops, by_caller)})",
            ratio(stops, by_caller, REF),
            most=0.1,
            against=REF,
        ),
        *beside_rows("F6", f"longest turn of the loop while {n:,} calls are submitted and run", runs, REF),
        *beside_rows("F6", f"the same, {n:,} calls cancelled by `run.cancel()`", stops, REF),
    ]


def _whole_batch(calls: object, *, own_task: bool, beside: Beside = "nothing") -> Pass:
    tower, budget = furnish(CAP, yields, own_task=own_task, beside=beside)

    async def run() -> BatchResult:
        async with tower.run(budget=budget) as run:
            return await run.execute(calls)

    return run


async def _stall_of_gather_cancelled(n: int) -> float:
    sleeper = Sleeps(LONG)
    semaphore = asyncio.Semaphore(CAP)

    async def bounded(i: int) -> int:
        async with semaphore:
            return await sleeper.call(i)

    tasks = [asyncio.ensure_future(bounded(i)) for i in range(n)]
    gathered = asyncio.gather(*tasks, return_exceptions=True)
    await turns(3)
    assert sleeper.running == CAP

    async def stop() -> object:
        gathered.cancel()
        try:
            return await gathered
        except asyncio.CancelledError:
            return None

    longest, _ = await longest_turn(stop)
    assert all(task.cancelled() for task in tasks)
    return longest


async def _stall_of_batch_cancelled(n: int, *, by_caller: bool, beside: Beside = "nothing") -> float:
    sleeper = Sleeps(LONG)
    tower, budget = furnish(CAP, sleeper.call, beside=beside)
    async with tower.run(budget=budget) as run:
        batch = asyncio.ensure_future(run.execute(calls_of(n)))
        while (statistics := tower.statistics()).waiting + statistics.behind + CAP < n:
            await asyncio.sleep(0)
        while sleeper.running < CAP:  # with a journal their intents are written first
            await asyncio.sleep(0)

        async def stop() -> object:
            if by_caller:
                batch.cancel()
            else:
                run.cancel()
            try:
                return await batch
            except asyncio.CancelledError:
                return run.last_batch

        longest, _ = await longest_turn(stop)
        results = run.last_batch
        assert results is not None
        assert [result.index for result in results] == list(range(n))
        assert all(result.outcome == "cancelled" for result in results)
        assert sum(result.started for result in results) == CAP
    return longest


# ---------------------------------------------------------------------------------------------- F7


async def f7_sleeps(settings: Settings) -> list[Row]:
    """100 sleeps of 10 ms at a concurrency of 8, in wall time."""
    from benchmarks.peers import frameworks

    n, seconds = (40, 0.002) if settings.quick else (100, 0.010)
    others, _ = limiters()
    makers: dict[str, Maker] = {REF: by_semaphore, OWN: by_towerman, REUSED: partial(by_towerman, own_task=False)}
    makers |= others
    peers = frameworks()
    makers |= peers
    peaks: dict[str, int] = {}
    systems: dict[str, Pass] = {}
    for name, maker in makers.items():
        watched = Sleeps(seconds)
        one = maker(n, watched.call, CAP)
        try:
            assert await one() == list(range(n)), "results are wrong or out of order"
        except Exception as error:
            if name not in peers:
                raise
            note(f"left out: {name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        peaks[name] = watched.peak
        systems[name] = one
    samples = await interleaved(systems, settings.rounds, clock=time.perf_counter)
    return [
        Row(
            "F7",
            f"{n} sleeps of {seconds * 1e3:.0f} ms, cap {CAP}",
            ratio(samples, OWN, REF),
            most=1.03,
            against=REF,
            exact=(f"peak exactly {CAP}", peaks[OWN] == CAP),
            beside={
                f"{name} (peak {peaks[name]})": ratio(samples, name, REF) for name in systems if name not in (REF, OWN)
            },
            samples=samples,
        )
    ]


# ---------------------------------------------------------------------------------------------- F12


async def f12_bystander(settings: Settings) -> list[Row]:
    """What a call on another pool costs while very many are parked on a full one."""
    n = min(1000, settings.sizes[0])
    parked, runs = settings.waiters[-1], 100
    busy, free = _pooled_tower(), _pooled_tower()
    open_runs: list[Run] = [busy.run(max_concurrency=parked // runs) for _ in range(runs)]
    blocker = busy.run()
    waiting = [asyncio.ensure_future(blocker.execute([Call("block", {"i": 0})]))]
    await turns(3)
    calls = calls_of(parked // runs, "full")
    waiting += [asyncio.ensure_future(run.execute(calls)) for run in open_runs]
    while (statistics := busy.statistics()).waiting < parked:
        assert not statistics.behind or statistics.waiting + statistics.behind <= parked
        await asyncio.sleep(0)
    quiet, crowded = "nothing parked", f"{parked:,} parked"
    gc.collect()
    gc.freeze()
    try:
        rows = []
        for what, handler in (("queue", yields), ("return at once", at_once)):
            systems: dict[str, Pass] = {}
            for name, tower in ((quiet, free), (crowded, busy)):
                if handler.__name__ not in tower.tools:
                    tower.add_tool(handler, independent=True, pools=["other"])
                systems[name] = _batch_on(tower, handler.__name__, n)
            samples = await interleaved(systems, settings.rounds, passes=max(1, 3000 // n))
            rows.append(
                Row(
                    "F12",
                    f"{n:,} calls that {what} on another pool, while {crowded} on a full one from {runs} runs",
                    ratio(samples, crowded, quiet),
                    most=1.1,
                    against=quiet,
                    samples=samples,
                )
            )
    finally:
        gc.unfreeze()
    for run in (*open_runs, blocker):
        run.cancel()
    results = await asyncio.gather(*waiting)
    assert sum(len(batch) for batch in results) == parked + 1
    assert busy.statistics().waiting == 0
    for run in (*open_runs, blocker):
        await run.aclose()
    return rows


def _pooled_tower() -> Tower:
    tower = make_tower(1_000, pools={"full": 1, "other": CAP})
    add_blocker(tower, pools=["full"])

    async def full(i: int) -> int:
        return i

    tower.add_tool(full, independent=True, pools=["full"])
    return tower


def _batch_on(tower: Tower, name: str, n: int) -> Pass:
    calls = calls_of(n, name)

    async def run() -> None:
        async with tower.run(max_concurrency=CAP) as run:
            batch = await run.execute(calls)
        assert batch.ok
        assert len(batch) == n

    return run
