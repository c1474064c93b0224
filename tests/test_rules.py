"""The rules of order and time (S1 to S16) and the guarantees (G1 to G12), one test or a few for each, by whole towers.

What a rule or guarantee says of rates, budgets of other units, approvals, retries, plans with references, nested calls,
engines and replicas comes with these; of budgets there is the cap of a batch.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, gate_of, on_stage, retake, sound, whole_again

from towerman import BatchResult, Call, Context, Event, Result, ToolError, Tower

stage = pytest.fixture(on_stage)


def worker(stage: Stage, name: str = "work", seconds: float = 1.0) -> Callable[..., Any]:
    """A handler that works for so long under the name it is given."""

    async def work(who: str = name, seconds: float = seconds) -> str:
        return await stage.work(who, seconds)

    return work


def came(stage: Stage) -> dict[str, float]:
    """When each came on."""
    return {name: began for name, began, _ in stage.spans}


async def later(tower: Tower, tool: str, **options: Any) -> asyncio.Task[BatchResult]:
    """One call in a run of its own, handed in now."""
    arguments = options.pop("arguments", {})
    task = asyncio.ensure_future(tower.execute([Call(tool, arguments)], **options))
    await asyncio.sleep(0)
    return task


# --- S1: edges --------------------------------------------------------------------------------------------------------


def test_s1_needs_settles_at_the_seal_and_after_when_the_work_has_ended(stage: Stage) -> None:
    """S1: a write is sealed at 2 s (time and grace are over) and works on until 10 s. Who needs its result is told at 2
    s; who only comes after it on the same resource starts at 10 s, though the result was sealed long before.
    """
    tower = stage.tower(grace=1, max_wait=60)

    @tower.tool(writes="thing:x", timeout=1)
    async def deaf() -> None:
        await stage.stubborn("deaf", 10)

    tower.add_tool(worker(stage, "after"), name="after", writes="thing:x")
    tower.add_tool(worker(stage, "needs"), name="needs", independent=True)
    sealed: dict[str, float] = {}

    async def main() -> None:
        async with tower.run() as run:
            calls = [Call("deaf", {}, "a"), Call("after", {}), Call("needs", {}, needs=["a"])]
            batch = await run.execute(
                calls, on_result=lambda result: sealed.__setitem__(result.tool, stage.clock.now())
            )
            sound(batch, calls)
            assert [result.code for result in batch] == ["handler_timeout", None, "dependency_failed"]
            assert batch[1].waited == 8  # behind a call that was sealed while its work goes on: from that seal

    stage.run(main())
    assert sealed == {"deaf": 2, "needs": 2, "after": 11}
    assert came(stage) == {"deaf": 0, "after": 10}


def test_s1_conflict_edges_follow_the_order_of_needs(stage: Stage) -> None:
    """S1, R-44: the first emitted call needs the last one, and both write one resource: an edge by emitted order would
    make a cycle. Edges follow the topological order of `needs`: the needed one goes first, nothing hangs.
    """
    tower = stage.tower()

    @tower.tool(writes="thing:x")
    async def write(who: str) -> None:
        await stage.work(who, 1)

    calls = [
        Call("write", {"who": "a"}, "a", needs=["c"]),
        Call("write", {"who": "b"}, "b"),
        Call("write", {"who": "c"}, "c"),
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    # Smallest index first among those that are free: b, then c; then a, which needed c.
    assert came(stage) == {"b": 0, "c": 1, "a": 2}


def test_s1_a_failed_call_skips_who_needs_it_and_not_who_comes_after(stage: Stage) -> None:
    """S1: failure skips along `needs`, transitively; along an order-only edge it does not."""
    tower = stage.tower()

    @tower.tool(writes="thing:x")
    async def boom() -> None:
        raise ValueError

    tower.add_tool(worker(stage, "after"), name="after", writes="thing:x")
    tower.add_tool(worker(stage, "free"), name="free", independent=True)
    calls = [
        Call("boom", {}, "a"),
        Call("after", {}, "b"),
        Call("free", {"who": "c"}, "c", needs=["a"]),
        Call("free", {"who": "d"}, "d", needs=["c"]),
        Call("free", {"who": "e"}, "e", needs=["b"]),
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.code for result in batch] == ["handler_error", None, "dependency_failed", "dependency_failed", None]
    assert came(stage).keys() == {"after", "e"}


# --- S2: clocks -------------------------------------------------------------------------------------------------------


def test_s2_siblings_of_a_call_do_not_eat_its_wait(stage: Stage) -> None:
    """S2: ten calls of 10 s on one place with a `max_wait` of 3 s: the tenth starts after 90 s, since its own siblings
    are not "waiting", and `max_queued=0` of others' concern does not refuse them.
    """
    tower = stage.tower(max_concurrency=1, max_wait=3, max_queued=0)
    tower.add_tool(worker(stage, seconds=10), name="work", independent=True)
    batch = stage.run(tower.execute([Call("work", {})] * 10))
    assert batch.ok
    assert stage.clock.now() == 100
    assert tower.statistics().outcomes == {"ok": 10}


def test_s2_behind_others_the_wait_counts_for_the_first_of_a_run(stage: Stage) -> None:
    """S2: behind another run's call of 100 s the clock runs: at 3 s the calls that were handed in are told, and those
    that stood behind them inherit their clock, so the batch is over at 3 s and not after ten times 3 s.
    """
    tower = stage.tower(max_concurrency=1, max_wait=3)
    tower.add_tool(worker(stage, seconds=100), name="work", independent=True)

    async def main() -> None:
        holding = await later(tower, "work")
        batch = await tower.execute([Call("work", {})] * 20)
        assert {result.code for result in batch} == {"wait_timeout"}
        assert stage.clock.now() == 3
        assert (await holding).ok

    stage.run(main())


def test_s2_wait_run_and_grace_eat_nothing_of_each_other(stage: Stage) -> None:
    """S2: a call that waited 9 of 10 s has its whole 5 s to run and then its whole 2 s of grace."""
    tower = stage.tower(max_concurrency=1, max_wait=10, timeout=5, grace=2)
    tower.add_tool(worker(stage, "hold", 9), name="hold", independent=True, timeout=20)

    @tower.tool(independent=True)
    async def work() -> None:
        with stage.on("work"):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await asyncio.sleep(1.5)
                raise

    async def main() -> None:
        holding = await later(tower, "hold")
        (result,) = await tower.execute([Call("work", {})])
        assert (result.code, result.waited, result.ran, result.still_running) == ("handler_timeout", 9, 6.5, False)
        assert (await holding).ok

    stage.run(main())
    assert stage.spans[-1] == ("work", 9, 15.5)


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_s2_a_thread_is_sealed_at_once_and_a_coroutine_when_it_ends(kind: str, stage: Stage) -> None:
    """S2: a thread's timeout is sealed at that instant, since it cannot be told; a coroutine's when it has ended, or
    when the grace is over.
    """
    tower = stage.tower(grace=3)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()

        @tower.tool(independent=True, timeout=2)
        def thread() -> None:
            stage.sync_work(loop, "work", 4)

        @tower.tool(independent=True, timeout=2)
        async def coroutine() -> None:
            await stage.stubborn("work", 4)

        (result,) = await tower.execute([Call(kind, {})])
        assert result.code == "handler_timeout"
        assert stage.clock.now() == (2 if kind == "thread" else 4)
        assert result.still_running is (kind == "thread")
        await stage.settled(tower)

    stage.run(main())


@pytest.mark.parametrize("kind", ["coroutine", "shared task"])
def test_s2_run_time_counts_from_the_first_line(kind: str, stage: Stage) -> None:
    """S2: a loop that is blocked between the grant and the first line eats nothing of the time to run, and the deadline
    that the handler is told counts from there too.
    """
    tower = stage.tower(timeout=1.0)
    told: list[float] = []

    @tower.tool(independent=True, own_task=kind == "coroutine")
    async def work(ctx: Context[None]) -> str:
        told.append(ctx.deadline)
        return await stage.work("work", 0.9)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("work", {})]))
            await asyncio.sleep(0)  # it is granted in this turn
            stage.clock.value += 5  # a handler of somebody else's that does not yield
            assert (await task).ok

    stage.run(main())
    assert told == [6.0]


def test_s2_defaults() -> None:
    """S2, API: `max_wait` 30 s, `timeout` 300 s, `grace` 5 s."""
    policy = Tower().options
    assert (policy.max_wait, policy.timeout, policy.grace) == (30, 300, 5)


# --- S5: rank ---------------------------------------------------------------------------------------------------------


def test_s5_a_higher_class_goes_first(stage: Stage) -> None:
    """S5: of waiters of three classes the highest goes first, inside a class who came first."""
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage), name="work", independent=True)

    async def main() -> None:
        tasks = [await later(tower, "work")]
        for who, priority in (("a0", 0), ("b-1", -1), ("c0", 0), ("d2", 2), ("e-1", -1), ("f2", 2)):
            tasks.append(await later(tower, "work", arguments={"who": who}, priority=priority))
        await asyncio.wait(tasks)

    stage.run(main())
    assert [name for name, _, _ in stage.spans[1:]] == ["d2", "f2", "a0", "c0", "b-1", "e-1"]


def test_s5_runs_of_one_class_share_fairly(stage: Stage) -> None:
    """S5: a run with 30 calls and one with three, handed in a moment later, on one place: they take turns, so the small
    run is through after about six calls, not after 33.
    """
    tower = stage.tower(max_concurrency=1, max_calls_per_batch=100, max_wait=1000)
    tower.add_tool(worker(stage), name="work", independent=True)

    async def main() -> None:
        big = asyncio.ensure_future(tower.execute([Call("work", {"who": "big"})] * 30))
        await asyncio.sleep(0.5)
        small = await tower.execute([Call("work", {"who": "small"})] * 3)
        assert small.ok
        assert stage.clock.now() <= 8
        assert (await big).ok

    stage.run(main())


def test_s5_a_waiter_that_was_passed_sixteen_times_is_promoted(stage: Stage) -> None:
    """S5: a call that wants both places is passed by calls of other runs that want one; after at most 16 passes it is
    promoted, claims what it needs, and runs, though the stream never stops by itself.
    """
    seen: list[Event] = []
    tower = stage.tower(max_concurrency=2, max_wait=1000, observers=[seen.append])
    tower.add_tool(worker(stage), name="narrow", independent=True)
    tower.add_tool(worker(stage, "wide"), name="wide", independent=True, weight=2)
    passed = 0

    async def stream(start: float) -> None:
        nonlocal passed
        await asyncio.sleep(start)
        while "wide" not in stage.ended:
            assert (await tower.execute([Call("narrow", {})])).ok
            passed += "wide" not in stage.started

    async def main() -> None:
        streams = [asyncio.ensure_future(stream(start)) for start in (0, 0.25, 0.5, 0.75)]
        await asyncio.sleep(3)
        nonlocal passed
        passed = 0
        assert (await (await later(tower, "wide"))).ok
        await asyncio.wait(streams)

    stage.run(main())
    tower.flush(30)
    assert tower.statistics().promotions == 1
    assert [event.tool for event in seen if event.kind == "promoted"] == ["wide"]
    assert 16 <= passed <= 16 + 4


# --- S6: order of starting --------------------------------------------------------------------------------------------


def test_s6_the_longest_remaining_path_goes_first(stage: Stage) -> None:
    """S6: of calls that are ready together the one with the longest path behind it starts first, though it was emitted
    last; without history paths count hops.
    """
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage), name="work", independent=True)
    calls = [
        *(Call("work", {"who": f"single {i}"}, f"s{i}") for i in range(2)),
        Call("work", {"who": "short"}, "d"),
        Call("work", {"who": "short's end"}, "e", needs=["d"]),
        Call("work", {"who": "long"}, "a"),
        Call("work", {"who": "long's middle"}, "b", needs=["a"]),
        Call("work", {"who": "long's end"}, "c", needs=["b"]),
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    order = sorted(came(stage), key=came(stage).__getitem__)
    assert order[:2] == ["long", "short"]


def test_s6_a_call_that_gets_ready_passes_shorter_ones_of_its_plan(stage: Stage) -> None:
    """S6: a chain of three and three single calls on two places take three steps and not four, since the chain's second
    call, when it gets ready, goes before single calls that were ready earlier.
    """
    tower = stage.tower(max_concurrency=2)
    tower.add_tool(worker(stage), name="work", independent=True)
    calls = [
        *(Call("work", {"who": f"single {i}"}, f"s{i}") for i in range(3)),
        Call("work", {"who": "first"}, "a"),
        Call("work", {"who": "second"}, "b", needs=["a"]),
        Call("work", {"who": "third"}, "c", needs=["b"]),
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    assert [came(stage)[name] for name in ("first", "second", "third")] == [0, 1, 2]
    assert stage.clock.now() == 3


def test_s6_estimates_come_from_what_a_tool_took(stage: Stage) -> None:
    """S6: once a tool has answered, its running mean is its estimate: a single call of 10 s goes before a chain of
    three calls of a second, which counted in hops went first. A tool without history counts as the others do on
    average.
    """
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage, "slow", 10), name="slow", independent=True)
    tower.add_tool(worker(stage, "quick", 1), name="quick", independent=True)
    tower.add_tool(worker(stage, "new", 1), name="new", independent=True)
    calls = [
        Call("quick", {"who": "chain"}, "a"),
        Call("quick", {}, "b", needs=["a"]),
        Call("quick", {}, "c", needs=["b"]),
        Call("slow", {"who": "single"}),
        Call("new", {"who": "new"}),
    ]

    def order() -> list[str]:
        stage.spans.clear()
        batch = stage.run(tower.execute(calls))
        assert batch.ok
        return [name for name, _, _ in stage.spans if name in ("chain", "single", "new")]

    assert order() == ["chain", "single", "new"]
    tower._core.means.pop("new")
    assert order() == ["single", "new", "chain"]  # 10; the mean of 1, 1, 1, 10; 3


def test_s6_no_level_barrier(stage: Stage) -> None:
    """S6, R-37: a = 300 ms, b = 10 ms, c after b = 300 ms, limit 2: c starts when b has ended, so the whole takes 310
    ms.
    """
    tower = stage.tower(max_concurrency=2)
    tower.add_tool(worker(stage), name="work", independent=True)
    calls = [
        Call("work", {"who": "a", "seconds": 0.3}, "a"),
        Call("work", {"who": "b", "seconds": 0.01}, "b"),
        Call("work", {"who": "c", "seconds": 0.3}, "c", needs=["b"]),
    ]
    assert stage.run(tower.execute(calls)).ok
    assert stage.clock.now() == pytest.approx(0.31)


def test_s6_what_does_not_fit_is_skipped(stage: Stage) -> None:
    """S6: the first waiter wants three places of which one is free: the one behind it, which wants one, starts at once;
    it is no strict first in, first out.
    """
    tower = stage.tower(max_concurrency=3)
    tower.add_tool(worker(stage, "hold", 5), name="hold", independent=True, weight=2)
    tower.add_tool(worker(stage, "wide"), name="wide", independent=True, weight=3)
    tower.add_tool(worker(stage, "narrow"), name="narrow", independent=True)

    async def main() -> None:
        await asyncio.wait([await later(tower, name) for name in ("hold", "wide", "narrow")])

    stage.run(main())
    assert came(stage) == {"hold": 0, "narrow": 0, "wide": 5}


# --- S8: the cap, which is a budget of calls for one batch ------------------------------------------------------------


def test_s8_the_first_calls_are_eligible_and_the_rest_is_told_at_once(stage: Stage) -> None:
    """S8 and G9, for calls: with a cap of 6 and a batch of 8, the first six in emitted order run, whatever ends first,
    and the last two are told before anything starts. A call that is refused for another reason does not hand its share
    on.
    """
    tower = stage.tower(max_calls_per_batch=6, max_concurrency=2)
    tower.add_tool(worker(stage), name="work", independent=True)
    told: list[tuple[int, str | None, int]] = []

    async def main() -> None:
        async with tower.run() as run:
            calls = [Call("work" if i != 2 else "nope", {"who": f"{i}"}) for i in range(8)]
            batch = await run.execute(
                calls, on_result=lambda result: told.append((result.index, result.code, len(stage.started)))
            )
            sound(batch, calls)

    stage.run(main())
    assert told[:3] == [(2, "unknown_tool", 0), (6, "call_cap", 0), (7, "call_cap", 0)]
    assert sorted(stage.started) == ["0", "1", "3", "4", "5"]


# --- S15, S16 ---------------------------------------------------------------------------------------------------------


def test_s15_a_direct_call_is_a_plain_call(stage: Stage) -> None:
    """S15: a decorated function stays the function that it was: called directly it is not admitted, waits for nothing
    and is counted nowhere; the docs say so.
    """
    from pathlib import Path

    tower = stage.tower(max_concurrency=1)

    async def plain(i: int) -> int:
        return i

    decorated = tower.tool(plain)
    assert decorated is plain
    assert tower.tool(independent=True, name="again")(plain) is plain
    tower.add_tool(worker(stage, seconds=5), name="hold", independent=True)

    async def main() -> None:
        holding = await later(tower, "hold")
        assert await decorated(5) == 5
        assert stage.clock.now() == 0
        assert tower.statistics().pools["process"].held == 1
        assert (await holding).ok

    stage.run(main())
    assert tower.statistics().outcomes == {"ok": 1}
    docs = Path(__file__).resolve().parent.parent / "docs"
    assert any("not admitted" in path.read_text() for path in docs.glob("*.md"))


def test_s16_the_callers_cancel_seals_first_and_propagates_once(stage: Stage) -> None:
    """S16: cancelled at 1 s, the caller hears of it when the batch is sealed, at most `grace` later, once; the results
    stay on `run.last_batch`; the run can go on.
    """
    tower = stage.tower(grace=2, run_concurrency=4)

    @tower.tool(independent=True)
    async def tidy() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await stage.work("tidying", 1.5)
            raise

    @tower.tool(independent=True)
    async def deaf() -> None:
        await stage.stubborn("deaf", 5)

    tower.add_tool(worker(stage, seconds=0.5), name="work", independent=True)

    async def main() -> None:
        async with tower.run() as run:
            calls = [Call("work", {}), Call("tidy", {}), Call("deaf", {}), *[Call("tidy", {})] * 3]
            task = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(1)
            task.cancel("the user left")
            with pytest.raises(asyncio.CancelledError):
                await task
            assert stage.clock.now() == 3
            assert task.cancelled()
            assert run.last_batch is not None
            sound(run.last_batch, calls)
            assert [result.outcome for result in run.last_batch] == ["ok", *["cancelled"] * 5]
            assert [result.still_running for result in run.last_batch] == [False, False, True, False, False, False]
            assert (await run.execute([Call("work", {})])).ok
            await stage.settled(tower)

    stage.run(main())


# --- the guarantees ---------------------------------------------------------------------------------------------------


def test_g1_one_result_per_call_whatever_happens(stage: Stage) -> None:
    """G1: errors, refusals, timeouts, a crash of a sibling, repeated and missing ids, unknown tools and broken JSON in
    one batch that is cancelled half-way: n calls in, n results out, in emitted order, each sealed once.
    """
    tower = stage.tower(run_concurrency=4, grace=1)
    sealed: Counter[int] = Counter()

    async def work(how: str) -> str:
        if how == "raises":
            raise RuntimeError
        if how == "sleeps":
            await asyncio.sleep(100)
        if how == "is deaf":
            await stage.stubborn("deaf", 5)
        return how

    tower.add_tool(work, independent=True, timeout=3)
    tower.add_tool(work, name="ordered")
    calls = [
        *(
            Call("work", {"how": how}, own)
            for how, own in zip(("ends", "raises", "sleeps", "is deaf"), ("", "a", "a", ""), strict=True)
        ),
        Call("nope", {}, "a"),
        Call("work", '{"how": ', "b"),
        Call("ordered", {"how": "ends"}, "b"),
        *[Call("work", {"how": "sleeps"}, "x")] * 9,
        Call("ordered", {"how": "sleeps"}),
    ]

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute(calls, on_result=lambda result: sealed.update({result.index: 1})))
            await asyncio.sleep(5)
            run.cancel("enough")
            batch = await task
            sound(batch, calls)
            assert sealed == dict.fromkeys(range(len(calls)), 1)
            assert len({result.code for result in batch}) >= 5
            await stage.settled(tower)

    stage.run(main())


def test_g2_a_waiting_call_holds_nothing(stage: Stage) -> None:
    """G2: a call that wants two pools and two resources, and cannot have one of these four, holds none of the others:
    four calls that want one each run beside it.
    """
    tower = stage.tower(pools={"p": 1, "q": 1}, run_concurrency=20)
    wants: list[dict[str, Any]] = [
        {"pools": ["p"], "independent": True},
        {"pools": ["q"], "independent": True},
        {"writes": "thing:r"},
        {"writes": "thing:s"},
    ]
    for place, options in enumerate(wants):
        tower.add_tool(worker(stage, f"part {place}", 5), name=f"part{place}", **options)
    tower.add_tool(worker(stage, "all", 1), name="all", pools=["p", "q"], writes=["thing:r", "thing:s"])

    async def main() -> None:
        for blocker in range(4):
            began = stage.clock.now()
            tasks = [await later(tower, f"part{blocker}"), await later(tower, "all")]
            await asyncio.sleep(1)
            tasks += [await later(tower, f"part{place}") for place in range(4) if place != blocker]
            done = await asyncio.gather(*tasks)
            assert [batch[0].waited for batch in done[2:]] == [0, 0, 0]
            assert done[1][0].ok
            assert stage.clock.now() == began + 7  # after the last of them

    stage.run(main())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_g3_no_limit_is_exceeded_and_no_capacity_lost(seed: int) -> None:
    """G3: after any history of success, failure, timeout, and cancel of calls, runs and callers, every pool held at
    most its limit at every instant, and the whole capacity is there again at once.
    """
    chance = random.Random(seed)
    stage = Stage()
    limits = {name: chance.randint(1, 3) for name in "ab"}
    tower = stage.tower(
        max_concurrency=chance.randint(1, 4),
        pools=limits,
        grace=1,
        max_wait=20,
        on_orphan=chance.choice(["hold", "release"]),
    )
    inside: Counter[str] = Counter()

    def tool(name: str, pools: list[str], **options: Any) -> None:
        async def work(how: str, seconds: float, key: str) -> None:
            for pool in pools:
                inside[pool] += 1
                assert inside[pool] <= limits[pool] or tower.options.on_orphan == "release"
            try:
                if how == "deaf":
                    await stage.stubborn("deaf", seconds + 5)
                else:
                    await asyncio.sleep(seconds)
                if how == "fails":
                    raise ValueError
            finally:
                inside.subtract(pools)

        tower.add_tool(work, name=name, pools=pools, timeout=4, **options)

    tool("free", ["a"], independent=True)
    tool("both", ["a", "b"], writes="thing:{key}")
    tool("ordered", ["b"])

    async def one() -> None:
        async with tower.run(fail_fast=chance.random() < 0.2, deadline=chance.choice([None, 10])) as run:
            calls = [
                Call(
                    chance.choice(["free", "both", "ordered"]),
                    {
                        "how": chance.choice(["ends", "ends", "fails", "deaf"]),
                        "seconds": chance.randint(0, 6),
                        "key": chance.choice("xy"),
                    },
                    f"c{place}",
                )
                for place in range(chance.randint(1, 6))
            ]
            await asyncio.sleep(chance.random() * 3)
            task = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(chance.random() * 5)
            act = chance.choice(["nothing", "run", "call", "caller", "close"])
            if act == "run":
                run.cancel()
            elif act == "call":
                run.cancel(call_id="c0")
            elif act == "caller":
                task.cancel()
            elif act == "close":
                await run.aclose()
            await asyncio.wait([task])
            assert run.last_batch is not None
            sound(run.last_batch, calls)

    async def main() -> None:
        await asyncio.gather(*(one() for _ in range(chance.randint(1, 5))))
        await stage.settled(tower)

    stage.run(main())
    whole_again(tower)
    stage.run(retake(tower))


Step = tuple[str, str, int]
"""(what, key, value): a call of G4's small world."""


@settings(max_examples=150)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["set", "add", "read", "read_all", "wipe", "swap"]),
            st.sampled_from("xy"),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=8,
    ),
    delays=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    limit=st.integers(1, 8),
)
def test_g4_a_batch_has_the_effect_of_its_calls_one_by_one(steps: list[Step], delays: list[int], limit: int) -> None:
    """G4: on declared resources (keys, subtrees, several at once) every result and the final state are those of the
    calls run one by one in emitted order, whatever each of them takes and however many may run at once.
    """

    def model(what: str, key: str, value: int, store: dict[str, int]) -> Callable[[], object]:
        """Read now; what comes back writes later: a lost update shows."""
        before = dict(store)

        def write() -> object:
            if what == "set":
                store[key] = value
            elif what == "add":
                store[key] = before[key] * 10 + value
            elif what == "wipe":
                store.update(x=value, y=value)
            elif what == "swap":
                store.update(x=before["y"], y=before["x"])
            return before[key] if what in ("read", "add") else dict(before) if what in ("read_all", "swap") else None

        return write

    expected_store = {"x": 1, "y": 2}
    expected = [model(*step, expected_store)() for step in steps]

    stage = Stage()
    tower = stage.tower(max_concurrency=limit)
    store = {"x": 1, "y": 2}

    def tool(what: str, **access: Any) -> None:
        async def work(key: str, value: int, delay: int) -> object:
            write = model(what, key, value, store)
            await asyncio.sleep(delay)
            return write()

        tower.add_tool(work, name=what, **access)

    tool("set", writes="cell:all/{key}")
    tool("add", writes="cell:all/{key}")
    tool("read", reads="cell:all/{key}")
    tool("read_all", reads="cell:all/**")
    tool("wipe", writes="cell:all/**")
    tool("swap", writes=["cell:all/x", "cell:all/y"])
    calls = [
        Call(what, {"key": key, "value": value, "delay": delays[place]})
        for place, (what, key, value) in enumerate(steps)
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.value for result in batch] == expected
    assert store == expected_store


def test_g4_what_does_not_conflict_overlaps(stage: Stage) -> None:
    """G4: the same world is not simply run one by one: eight writes of eight keys take as long as one."""
    tower = stage.tower()

    @tower.tool(writes="cell:{key}")
    async def put(key: int) -> None:
        await stage.work("put", 1)

    assert stage.run(tower.execute([Call("put", {"key": key}) for key in range(8)])).ok
    assert stage.clock.now() == 1


def test_g4_runs_exclude_each_other_on_a_resource(stage: Stage) -> None:
    """G4: conflicting calls of different runs exclude each other: a hundred increments by ten runs are all there."""
    tower = stage.tower()
    store = Counter[str]()

    @tower.tool(writes="cell:{key}")
    async def inc(key: str) -> None:
        value = store[key]
        await asyncio.sleep(0.01)
        store[key] = value + 1

    async def main() -> None:
        calls = [Call("inc", {"key": "xy"[i % 2]}) for i in range(10)]
        batches = await asyncio.gather(*(tower.execute(calls) for _ in range(10)))
        assert all(batch.ok for batch in batches)

    stage.run(main())
    assert store == {"x": 50, "y": 50}


BAD_PLANS: dict[str, tuple[str, list[tuple[str, list[str]]]]] = {
    "a cycle of two": ("dependency_cycle", [("a", ["b"]), ("b", ["a"]), ("c", [])]),
    "a cycle behind what could run": ("dependency_cycle", [("a", []), ("b", ["a", "d"]), ("c", ["b"]), ("d", ["c"])]),
    "a call that needs itself": ("dependency_cycle", [("a", []), ("b", ["b"])]),
    "an unknown id": ("unknown_dependency", [("a", []), ("b", ["zzz"])]),
    "an id that stands twice": ("duplicate_call_id", [("a", []), ("a", []), ("b", ["a"])]),
}


@pytest.mark.parametrize("plan", BAD_PLANS)
def test_g5_a_bad_plan_runs_nothing(plan: str, stage: Stage) -> None:
    """G5, R-30 to R-33: a cycle, an unknown dependency, an id that is needed and stands twice: refused before any
    handler starts, each call told by the same code. (References come with plans.)
    """
    code, steps = BAD_PLANS[plan]
    tower = stage.tower()
    tower.add_tool(worker(stage), name="work", independent=True)
    calls = [Call("work", {}, own, needs=needs) for own, needs in steps]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert {result.code for result in batch} == {code}
    assert not stage.started
    assert all("Traceback" not in result.message for result in batch)
    if code == "dependency_cycle":
        members = [
            own for own, _ in steps[(0 if plan == "a cycle of two" else 1) : (2 if plan == "a cycle of two" else None)]
        ]
        assert all(repr(member) in batch[0].message for member in members), batch[0].message


def test_g6_lower_classes_get_on_under_a_stream_of_higher_ones(stage: Stage) -> None:
    """G6: calls of priority 5 arrive without end; a call of priority 0 waits a bounded time (ageing by passes), not for
    ever.
    """
    tower = stage.tower(max_concurrency=1, max_wait=10_000)
    tower.add_tool(worker(stage), name="work", independent=True)

    async def stream() -> None:
        while "low" not in stage.ended:
            assert (await tower.execute([Call("work", {"who": "high"})], priority=5)).ok

    async def main() -> None:
        streams = [asyncio.ensure_future(stream()) for _ in range(3)]
        await asyncio.sleep(0.5)
        (result,) = await tower.execute([Call("work", {"who": "low"})])
        assert result.ok
        assert 10 < result.waited < 16 * 8
        await asyncio.wait(streams)

    stage.run(main())


def test_g6_who_was_cancelled_or_expired_never_starts(stage: Stage) -> None:
    """G6: of eight waiters two are cancelled, two are over their wait, two over their run's deadline: only the other
    two start, when the place is free.
    """
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage, seconds=10), name="work", independent=True)
    tower.add_tool(worker(stage), name="hasty", independent=True, max_wait=3)

    async def main() -> None:
        holding = await later(tower, "work", arguments={"who": "hold"})
        tasks = [
            *[await later(tower, "work", arguments={"who": "cancelled"}) for _ in range(2)],
            *[await later(tower, "hasty", arguments={"who": "expired"}) for _ in range(2)],
            *[await later(tower, "work", arguments={"who": "over"}, deadline=4) for _ in range(2)],
            *[await later(tower, "work", arguments={"who": "good", "seconds": 1}) for _ in range(2)],
        ]
        await asyncio.sleep(1)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.wait([holding, *tasks])

    stage.run(main())
    assert stage.started == {"hold": 1, "good": 2}


@pytest.mark.parametrize("on_orphan", ["hold", "release"])
def test_g7_a_resource_is_free_when_the_work_has_ended(on_orphan: Any, stage: Stage) -> None:
    """G7: a write that timed out keeps its resource until its work has ended: the next write of another run starts
    then. The operator may choose `on_orphan="release"`, which is counted and shown.
    """
    tower = stage.tower(grace=1, on_orphan=on_orphan)

    @tower.tool(writes="file:/srv/report", timeout=1)
    async def write() -> None:
        await stage.stubborn("deaf", 10)

    tower.add_tool(worker(stage, "next"), name="next", writes="file:/srv/report")

    async def main() -> None:
        (first,) = await tower.execute([Call("write", {})])
        assert stage.clock.now() == 2
        assert first.still_running
        assert (await tower.execute([Call("next", {})])).ok
        assert tower.statistics().orphans_released == (on_orphan == "release")
        await stage.settled(tower)

    stage.run(main())
    assert came(stage)["next"] == (10 if on_orphan == "hold" else 2)


def test_g8_see_the_canary(stage: Stage) -> None:
    """G8: names, sizes, times and codes only: every place of a batch against every sink is test_canary.py; here the one
    line that says what an event of a call with a secret holds.
    """
    seen: list[Event] = []
    tower = stage.tower(observers=[seen.append])

    @tower.tool(writes="account:{token}")
    async def login(token: str) -> str:
        return token

    assert stage.run(tower.execute([Call("login", {"token": "hunter2"}, "c1")])).ok
    tower.flush(30)
    (finished,) = [event.as_dict() for event in seen if event.kind == "finished"]
    assert finished == {
        "time": 0.0,
        "kind": "finished",
        "run_id": finished["run_id"],
        "batch": 1,
        "index": 0,
        "call_id": "c1",
        "tool": "login",
        "outcome": "ok",
        "waited": 0.0,
        "ran": 0.0,
        "size": 7,
        "tokens": 2,
    }


EFFECTS: dict[str, tuple[dict[str, Any], str]] = {
    "reads": ({"reads": "thing:x"}, "no"),
    "read_only": ({"read_only": True}, "no"),
    "writes": ({"writes": "thing:x"}, "unknown"),
    "nothing said": ({}, "unknown"),
    "independent": ({"independent": True}, "unknown"),
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_g10_the_effect_is_never_guessed(effect: str, stage: Stage) -> None:
    """G10: each result says `started` and `applied`. What did not start has no effect; what answered has it; what
    failed, was stopped or timed out has none where the tool has no side effect and is unknown otherwise, unless the
    handler says it.
    """
    options, doubtful = EFFECTS[effect]
    tower = stage.tower(grace=0)

    async def act(how: str) -> str:
        if how == "raises":
            raise ConnectionError
        if how == "tells":
            raise ToolError("nothing was sent", applied="no")
        if how == "tells yes":
            raise ToolError("it was sent, the answer was lost", applied="yes")
        if how == "sleeps":
            await asyncio.sleep(100)
        return how

    tower.add_tool(act, timeout=1, **options)

    def told(how: str) -> tuple[bool, str]:
        (result,) = stage.run(tower.execute([Call("act", {"how": how})]))
        return result.started, result.applied

    assert told("answers") == (True, "no" if doubtful == "no" else "yes")
    assert told("raises") == (True, doubtful)
    assert told("sleeps") == (True, doubtful)
    assert told("tells") == (True, "no")
    assert told("tells yes") == (True, "yes")
    (result,) = stage.run(tower.execute([Call("act", "{")]))
    assert (result.started, result.applied) == (False, "no")


def test_g10_the_key_reaches_the_handler_unchanged(stage: Stage) -> None:
    """G10, R-121: an idempotency key that came with a call is what the handler sees, beside which attempt this is. One
    without, if it may have an effect, has a key of its own.
    """
    tower = stage.tower()
    seen: list[tuple[str | None, int]] = []

    @tower.tool(independent=True)
    async def pay(ctx: Context[None]) -> None:
        seen.append((ctx.idempotency_key, ctx.attempt))

    assert stage.run(tower.execute([Call("pay", {}, idempotency_key="key-1"), Call("pay", {})])).ok
    (given, first), (made, second) = seen
    assert (given, first, second) == ("key-1", 1, 1)
    assert made is not None and made != "key-1"


def test_g12_everything_ends_by_default(stage: Stage) -> None:
    """G12: with default limits and handlers that never end and ignore their cancel, a batch of calls that wait for each
    other ends within wait + run + grace along its longest chain, and leaving the run leaves no task or timer.
    """
    tower = stage.tower()

    @tower.tool(writes="thing:x")
    async def for_ever() -> None:
        await asyncio.Event().wait()

    @tower.tool(writes="thing:x")
    async def deaf() -> None:
        await stage.stubborn("deaf", 400)

    async def main() -> None:
        calls = [Call("for_ever", {}), Call("deaf", {}), Call("for_ever", {}), Call("deaf", {})]
        batch = await tower.execute(calls)
        sound(batch, calls)
        assert stage.clock.now() <= 4 * (30 + 300 + 5)
        await stage.settled(tower)

    stage.run(main())  # what is left behind, tasks or timers, fails it


def test_g12_a_run_that_is_left_ends_what_is_at_work(stage: Stage) -> None:
    """G12: leaving `async with tower.run()` while a batch is at work cancels it, seals it, and waits at most
    `grace`.
    """
    tower = stage.tower(grace=2)

    @tower.tool(independent=True)
    async def deaf() -> None:
        await stage.stubborn("deaf", 10)

    tower.add_tool(worker(stage, seconds=100), name="work", independent=True)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("work", {}), Call("deaf", {})]))
            await asyncio.sleep(1)
        assert stage.clock.now() == 3
        batch = await task
        assert [result.outcome for result in batch] == ["cancelled"] * 2
        assert [result.still_running for result in batch] == [False, True]
        assert gate_of(tower).statistics()["flows"] == 0
        await stage.settled(tower)

    stage.run(main())


def test_g12_a_deadline_ends_a_run(stage: Stage) -> None:
    """G12, R-99: nothing of a run starts after its deadline, and what runs then is stopped."""
    tower = stage.tower(max_concurrency=2, run_concurrency=2)
    tower.add_tool(worker(stage, seconds=3), name="work", independent=True)

    async def main() -> None:
        async with tower.run(deadline=5) as run:
            calls = [Call("work", {"who": str(i)}) for i in range(6)]
            batch = await run.execute(calls)
            sound(batch, calls)
            assert stage.clock.now() == 5
            assert [result.code for result in batch] == [None, None, *["deadline_exceeded"] * 4]
            assert [result.started for result in batch] == [True] * 4 + [False] * 2
            assert [result.outcome for result in batch[2:]] == ["timed_out"] * 2 + ["rejected"] * 2
            assert (await run.execute([Call("work", {})]))[0].code == "deadline_exceeded"

    stage.run(main())


def test_the_answer_to_a_batch_is_a_sequence(stage: Stage) -> None:
    """API: no calls give an empty, false batch; otherwise it is a sequence of results with its verdict."""
    tower = stage.tower()
    tower.add_tool(worker(stage), name="work", independent=True)
    empty = stage.run(tower.execute([]))
    assert (len(empty), bool(empty), list(empty), empty.ok) == (0, False, [], True)
    batch = stage.run(tower.execute([Call("work", {}), Call("nope", {})]))
    assert [type(result) for result in batch] == [Result, Result]
    assert batch[-1].code == "unknown_tool"
    assert [result.index for result in batch[0:2]] == [0, 1]
    assert not batch.ok
    assert json.loads(batch.messages("openai")[1]["content"])["error"]["code"] == "unknown_tool"  # type: ignore[arg-type]
    assert next(iter(batch)).ok


def test_s13_observe_relaxes_capacity_and_nothing_else(stage: Stage) -> None:
    """S13: with mode="observe" no pool holds a call back, and the peak shows what it would have; order on a resource,
    permission, arguments, unknown tools, only_call and the cap on calls hold as ever.
    """
    tower = stage.tower(max_concurrency=2, run_concurrency=1, pools={"crm": 1}, mode="observe", max_calls_per_batch=8)

    @tower.tool(independent=True, pools=["crm"], max_concurrency=1, when_busy="reject")
    async def look(n: int) -> str:
        return await stage.work(f"look {n}", 1)

    @tower.tool(writes="thing:one")
    async def write(n: int) -> str:
        return await stage.work(f"write {n}", 1)

    @tower.tool(only_call=True, independent=True)
    async def alone() -> str:
        return await stage.work("alone", 1)

    calls = [Call("look", {"n": n}) for n in range(3)]
    calls += [Call("write", {"n": 0}), Call("write", {"n": 1}), Call("look", {"n": "x"}), Call("alone", {})]
    calls += [Call("lock", {}), Call("look", {"n": 9})]
    batch = stage.run(tower.execute(calls, deny="nobody"))
    codes = [result.code for result in batch]
    assert codes == [*[None] * 5, "invalid_arguments", "not_alone", "unknown_tool", "call_cap"]
    came = {name: start for name, start, _ in stage.spans}
    assert [came[name] for name in ("look 0", "look 1", "look 2", "write 0", "write 1")] == [0, 0, 0, 0, 1]
    seen = tower.statistics().pools
    assert (seen["process"].limit, seen["process"].peak) == (2, 4)
    assert (seen["crm"].limit, seen["crm"].peak) == (1, 3)
    assert (seen["tool:look"].limit, seen["tool:look"].peak) == (1, 3)
    refused = stage.run(tower.execute([Call("look", {"n": 1})], deny="look"))
    assert refused[0].code == "permission_denied"


def test_s13_observe_keeps_plans_and_bounds(stage: Stage) -> None:
    """S13: with mode="observe" a plan with a circle or an unknown need runs nothing, a call waits for what it needs and
    is skipped where that failed, fail_fast ends a batch, and timeouts, deadlines and sizes are as declared.
    """
    tower = stage.tower(mode="observe", run_concurrency=1, timeout=2.0, grace=0.5, max_result_bytes=100)

    @tower.tool(independent=True, read_only=True)
    async def step(seconds: float = 1.0) -> str:
        return await stage.work(f"{seconds}", seconds)

    @tower.tool(independent=True)
    async def fail() -> str:
        raise ToolError("no")

    @tower.tool(independent=True)
    async def long() -> str:
        return "x" * 1000

    def plan(*needs: tuple[str, ...]) -> list[Call]:
        return [Call("step", {}, f"c{n}", one) for n, one in enumerate(needs)]

    def codes(calls: list[Call], **options: Any) -> list[str | None]:
        return [result.code for result in stage.run(tower.execute(calls, **options))]

    assert codes(plan(("c2",), ("c0",), ("c1",))) == ["dependency_cycle"] * 3
    assert "unknown_dependency" in codes(plan((), ("c9",)))
    assert not stage.started
    assert codes(plan((), ("c0",), ("c0",))) == [None] * 3
    assert sorted(start for _, start, _ in stage.spans) == [0, 1, 1]
    needing = [Call("fail", {}, "f"), Call("step", {}, "s", ["f"])]
    assert codes(needing) == ["handler_error", "dependency_failed"]
    assert codes([Call("fail", {}), Call("step", {})], fail_fast=True) == ["handler_error", "sibling_failed"]
    assert codes([Call("step", {"seconds": 9})]) == ["handler_timeout"]
    assert codes([Call("step", {"seconds": 1.5})], deadline=1) == ["deadline_exceeded"]
    (cut,) = stage.run(tower.execute([Call("long", {})]))
    assert len(cut.content.encode()) <= 100 < cut.original_bytes
