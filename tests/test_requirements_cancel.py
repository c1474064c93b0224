"""Requirements R-77 to R-89, each by a whole tower: cancellation. Every instant of every scene: test_cancel.py."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from kit import Stage, gate_of, on_stage, sound

from towerman import BatchResult, Call, Event, Tower

stage = pytest.fixture(on_stage)


def worker(stage: Stage, name: str = "work", seconds: float = 1.0) -> Callable[..., Any]:
    """A handler that works for so long under the name it is given."""

    async def work(who: str = name) -> str:
        return await stage.work(who, seconds)

    return work


async def later(tower: Tower, who: str) -> asyncio.Task[BatchResult]:
    """A call of a run of its own, handed in now."""
    task = asyncio.ensure_future(tower.execute([Call("work", {"who": who})]))
    await asyncio.sleep(0)
    return task


def test_r77_r79_a_cancelled_waiter_leaves_the_queue(stage: Stage) -> None:
    """R-77, R-79: cancelling one of three waiters takes it out of the queue at once; the count does not change and the
    others keep their places; in the end the queue is empty.
    """
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage), name="work", independent=True)

    async def main() -> None:
        tasks = [await later(tower, who) for who in ("hold", "one", "two", "three")]
        await asyncio.sleep(0.5)
        assert tower.statistics().waiting == 3
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        seen = tower.statistics()
        assert (seen.waiting, seen.pools["process"].queued, seen.pools["process"].held) == (2, 2, 1)
        assert stage.clock.now() == 0.5
        await asyncio.wait(tasks)
        assert [name for name, _, _ in stage.spans] == ["hold", "one", "three"]
        assert [came for _, came, _ in stage.spans] == [0, 1, 2]
        seen = tower.statistics()
        assert (seen.waiting, seen.behind) == (0, 0)

    stage.run(main())


def test_r78_a_cancelled_waiter_never_starts(stage: Stage) -> None:
    """R-78, R-135: occupy the only place, queue one, cancel it, free the place: it is not started, then or later."""
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage), name="work", independent=True)

    async def main() -> None:
        async with tower.run() as run:
            holding = await later(tower, "hold")
            queued = asyncio.ensure_future(run.execute([Call("work", {"who": "queued"}, "c")]))
            await asyncio.sleep(0.5)
            run.cancel("no longer wanted", call_id="c")
            (result,) = await queued
            assert (result.code, result.started, result.applied) == ("cancelled", False, "no")
            assert (await holding).ok
            await asyncio.sleep(100)
            assert (await (await later(tower, "next"))).ok

    stage.run(main())
    assert stage.started == {"hold": 1, "next": 1}


def test_r80_the_cancel_reaches_the_operation(stage: Stage) -> None:
    """R-80: the signal reaches the handler and what it waits on, tasks of its own included, and a sync handler by
    `ctx.cancelled`.
    """
    from towerman import Context

    tower = stage.tower(grace=5)
    told: list[str] = []

    async def inner() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            told.append("inner task")
            raise

    async def deep() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(inner())
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                told.append("handler")
                raise

    tower.add_tool(deep, independent=True)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()

        @tower.tool(independent=True)
        def looks(ctx: Context[None]) -> None:
            while not ctx.cancelled:
                stage.rest(loop, 0.25)
            told.append("thread")

        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("deep", {}), Call("looks", {})]))
            await asyncio.sleep(1)
            run.cancel("enough")
            batch = await task
            assert [result.outcome for result in batch] == ["cancelled"] * 2
            await stage.settled(tower)

    stage.run(main())
    assert sorted(told) == ["handler", "inner task", "thread"]


def test_r81_a_long_run_grows_nothing(stage: Stage) -> None:
    """R-81: 10,000 calls on one long-lived run, a part of them cancelled, leave no growth: no batch, job, entry, line,
    node or timer is kept.
    """
    tower = stage.tower(max_concurrency=4, max_calls_per_batch=100, run_concurrency=8)

    @tower.tool(writes="thing:{i}")
    async def work(i: int) -> int:
        await asyncio.sleep(0.001)
        return i

    def alive() -> dict[str, int]:
        gc.collect()
        kinds = ("Work", "Job", "Entry", "Line", "Bay", "Lot", "Node", "Want", "Result", "Plan", "Event")
        ours = [type(one).__name__ for one in gc.get_objects() if type(one).__module__.startswith("towerman")]
        return {kind: ours.count(kind) for kind in kinds}

    async def main() -> None:
        async with tower.run() as run:

            async def hundred(cancel: bool) -> None:
                calls = [Call("work", {"i": i % 30}, f"c{i}") for i in range(100)]
                task = asyncio.ensure_future(run.execute(calls))
                if cancel:
                    await asyncio.sleep(0.002)
                    run.cancel("enough", call_id="c90")
                    run.cancel("enough", call_id="c0")
                await task

            await hundred(True)
            before = alive()
            for round_ in range(100):
                await hundred(round_ % 3 == 0)
            assert alive() == before

    stage.run(main())


@pytest.mark.parametrize("when", ["cancelled", "cancelled twice", "cancelled and over time", "ended by itself"])
def test_r82_a_running_call_frees_its_place_once(when: str, stage: Stage) -> None:
    """R-82: however often it is told to stop, its place is free once, when the work has ended: the pool of one is never
    held by two, nor by less than none.
    """
    tower = stage.tower(max_concurrency=1, grace=10)

    @tower.tool(independent=True, timeout=3)
    async def work(who: str) -> None:
        with stage.on(who):
            try:
                await asyncio.sleep(2.5 if who == "first" else 1)
            except asyncio.CancelledError:
                await asyncio.sleep(2)  # cleaning up
                raise

    async def main() -> None:
        async with tower.run() as run:
            first = asyncio.ensure_future(run.execute([Call("work", {"who": "first"})]))
            await asyncio.sleep(0)
            others = [await later(tower, who) for who in ("second", "third")]
            await asyncio.sleep(2)
            if when != "ended by itself":
                run.cancel("enough")
            if when == "cancelled twice":
                await asyncio.sleep(0.5)
                run.cancel("really")
            (result,) = await first
            assert result.outcome == ("ok" if when == "ended by itself" else "cancelled")
            ended = stage.clock.now()
            assert ended == {"ended by itself": 2.5}.get(when, 4)
            for task in others:
                assert (await task).ok
            assert [came for name, came, _ in stage.spans if name != "first"] == [ended, ended + 1]

    stage.run(main())
    assert stage.peak == 1


@pytest.mark.parametrize("order", ["cancel, then the end", "the end, then cancel"])
def test_r83_cancel_and_hand_over_meet_in_one_tick(order: str, stage: Stage) -> None:
    """R-83: the holder ends and the waiter is cancelled in one turn of the loop, in either order: the waiter has
    exactly one outcome, and the place is not lost. (All interleavings: test_p37, test_cancel.py and the explorer.)
    """
    tower = stage.tower(max_concurrency=1)
    release = asyncio.Event()

    @tower.tool(independent=True)
    async def hold() -> None:
        await release.wait()

    tower.add_tool(worker(stage), name="work", independent=True)
    results: list[Any] = []

    async def main() -> None:
        async with tower.run() as run:
            holding = asyncio.ensure_future(tower.execute([Call("hold", {})]))
            await asyncio.sleep(0)
            waiting = asyncio.ensure_future(run.execute([Call("work", {"who": "second"})], on_result=results.append))
            third = await later(tower, "third")
            await asyncio.sleep(1)
            acts: list[Callable[[], object]] = [lambda: run.cancel("enough"), release.set]
            for act in acts if order == "cancel, then the end" else reversed(acts):
                act()
            (result,) = await waiting
            assert len(results) == 1
            assert (result.outcome, result.started) == ("cancelled", False)
            assert (await holding).ok
            assert (await third).ok

    stage.run(main())
    assert stage.started == {"third": 1}


@pytest.mark.parametrize("on_orphan", ["hold", "release"])
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_r84_what_ignores_its_cancel_is_an_orphan(kind: str, on_orphan: Any, stage: Stage) -> None:
    """R-84, G7: it is not told as stopped; its place is kept until the work really ends, or released at once where the
    operator chose so; either way it is counted and shown as long as it lasts.
    """
    tower = stage.tower(max_concurrency=1, grace=1, on_orphan=on_orphan)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()

        @tower.tool(independent=True)
        async def coroutine() -> None:
            await stage.stubborn("deaf", 10)

        @tower.tool(independent=True)
        def thread() -> None:
            stage.sync_work(loop, "deaf", 10)

        tower.add_tool(worker(stage), name="work", independent=True)
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call(kind, {})]))
            await asyncio.sleep(2)
            run.cancel("enough")
            (result,) = await task
            sealed = stage.clock.now()
            assert sealed == (3 if kind == "coroutine" else 2)
            assert (result.outcome, result.still_running) == ("cancelled", True)
            seen = tower.statistics()
            assert seen.orphans == 1
            assert seen.orphans_released == (on_orphan == "release")
            assert seen.pools["process"].held == seen.pools["process"].orphaned == (on_orphan == "hold")
            (after,) = await (await later(tower, "after"))
            assert after.ok
            assert after.waited == (10 - sealed if on_orphan == "hold" else 0)
            await stage.settled(tower)
            assert tower.statistics().late_results == 1

    stage.run(main())


@pytest.mark.parametrize("effect", ["writes", "reads"])
def test_r85_the_effect_of_a_write_that_timed_out_is_unknown(effect: str, stage: Stage) -> None:
    """R-85, G10: the caller's time is over while the upstream goes on: of a write it is told that the effect is
    unknown, never success and never "not done"; of a read that there was none.
    """
    tower = stage.tower(grace=0.5)

    async def slow() -> str:
        await stage.stubborn("slow", 5)
        return "done after all"

    options: dict[str, Any] = {effect: "thing:x"}
    tower.add_tool(slow, timeout=1, **options)

    async def main() -> None:
        (result,) = await tower.execute([Call("slow", {})])
        assert (result.outcome, result.started, result.still_running) == ("timed_out", True, True)
        assert result.applied == ("unknown" if effect == "writes" else "no")
        assert result.retryable == ("unknown" if effect == "writes" else "yes")
        assert ("not known" in result.message) == (effect == "writes")
        await stage.settled(tower)

    stage.run(main())


def test_r86_a_failing_call_frees_its_place(stage: Stage) -> None:
    """R-86, R-135: a pool of one, a call that fails: the next one starts at that instant."""
    tower = stage.tower(max_concurrency=1)

    @tower.tool(independent=True)
    async def boom() -> None:
        await stage.work("boom", 1)
        raise ValueError

    tower.add_tool(worker(stage), name="work", independent=True)
    batch = stage.run(tower.execute([Call("boom", {}), Call("work", {})]))
    assert [result.outcome for result in batch] == ["error", "ok"]
    assert stage.spans == [("boom", 0, 1), ("work", 1, 2)]


@pytest.mark.parametrize("way", ["the run", "the call", "the caller"])
def test_r87_the_reason_reaches_result_and_trace(way: str, stage: Stage) -> None:
    """R-87: the canceller's words stand in the result's message and in the event, cut to a bound, for calls that run
    and for calls that wait.
    """
    seen: list[Event] = []
    tower = stage.tower(max_concurrency=1, observers=[seen.append])
    tower.add_tool(worker(stage), name="work", independent=True)
    words = "the user closed the window " + "x" * 10_000

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("work", {}, f"c{i}") for i in range(2)]))
            await asyncio.sleep(0.5)
            if way == "the run":
                run.cancel(words)
            elif way == "the caller":
                task.cancel(words)
            else:
                run.cancel(words, call_id="c1")
                run.cancel(words, call_id="c0")
            await asyncio.wait([task])
            assert run.last_batch is not None
            for result in run.last_batch:
                assert result.code == "cancelled"
                assert "the user closed the window" in result.message
                assert len(result.message) < 1000

    stage.run(main())
    tower.flush(30)
    reasons = [event.reason for event in seen if event.kind in ("finished", "rejected")]
    assert len(reasons) == 2
    assert all(reason and reason.startswith("the user closed the window") and len(reason) < 1000 for reason in reasons)


def test_r88_cancelling_one_run_disturbs_no_other(stage: Stage) -> None:
    """R-88: another run's running calls, waiting calls and their order are as if nothing had happened."""
    tower = stage.tower(max_concurrency=2)
    tower.add_tool(worker(stage), name="work", independent=True)

    async def main() -> None:
        async with tower.run() as run:
            theirs = [await later(tower, "a")]
            mine = asyncio.ensure_future(run.execute([Call("work", {"who": "mine"})] * 3))
            await asyncio.sleep(0)
            theirs += [await later(tower, who) for who in ("b", "c")]
            await asyncio.sleep(0.5)
            run.cancel("enough")
            await mine
            for task in theirs:
                assert (await task).ok

    stage.run(main())
    assert [(name, came) for name, came, _ in stage.spans if name != "mine"] == [("a", 0), ("b", 0.5), ("c", 1)]


def test_r89_after_a_cancelled_turn_every_id_has_one_result(stage: Stage) -> None:
    """R-89, G1: done, cancelled while running, cancelled before the start, unknown effect: each emitted id has exactly
    one result, and the turn can be sent to the provider.
    """
    tower = stage.tower(run_concurrency=3, grace=1)

    @tower.tool(independent=True)
    async def write(seconds: float) -> str:
        return await stage.work("write", seconds)

    @tower.tool(independent=True)
    async def deaf() -> None:
        await stage.stubborn("deaf", 10)

    calls = [
        Call("write", {"seconds": 1}, "done"),
        Call("write", {"seconds": 50}, "running"),
        Call("deaf", {}, "unknown"),
        Call("write", {"seconds": 50}, "then running"),
        Call("write", {"seconds": 50}, "waiting"),
        Call("write", "{", "refused"),
    ]

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(2)
            run.cancel("enough")
            batch = await task
            sound(batch, calls)
            assert [(result.outcome, result.started, result.applied) for result in batch] == [
                ("ok", True, "yes"),
                ("cancelled", True, "unknown"),
                ("cancelled", True, "unknown"),
                ("cancelled", True, "unknown"),
                ("cancelled", False, "no"),
                ("rejected", False, "no"),
            ]
            sent = batch.messages("openai")
            assert [one["tool_call_id"] for one in sent] == [call.id for call in calls]
            await stage.settled(tower)
            assert gate_of(tower).statistics()["orphans"] == 0

    stage.run(main())
