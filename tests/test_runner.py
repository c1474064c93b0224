"""Whole towers, one promise at a time: results, order, threads, time, context, limits, refusals. On virtual time,
where not said otherwise.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import io
import itertools
import json
import logging
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kit import Latch, Stage, codes, here, on_stage, run_batch, sound, until

import towerman.runner.intake
import towerman.runner.shell
from towerman import (
    Batch,
    BatchResult,
    Call,
    Context,
    Event,
    InputError,
    JsonlObserver,
    PolicyError,
    Pool,
    Result,
    ToolError,
    Tower,
)

stage = pytest.fixture(on_stage)


# ==================================================================== one result a call


def test_g1_every_path_gives_one_result(stage: Stage) -> None:
    """G1, R-104 to R-107, R-116, R-117: whatever becomes of a call, it has one result in its place, and none spoils
    another.
    """
    tower = stage.tower(
        pools={"db": 1}, timeout=2.0, grace=0.5, max_calls_per_batch=100, max_wait=1.0, run_concurrency=50
    )

    @tower.tool(independent=True)
    async def echo(x: str) -> str:
        return x

    @tower.tool(independent=True)
    async def fail() -> None:
        raise ValueError("secret")

    @tower.tool(independent=True)
    async def tell() -> None:
        raise ToolError("there is no such customer", applied="no")

    @tower.tool(independent=True)
    async def cancel() -> None:
        raise asyncio.CancelledError

    @tower.tool(independent=True)
    async def slow() -> None:
        await asyncio.sleep(100)

    @tower.tool(independent=True)
    async def deaf() -> None:
        await stage.stubborn("deaf", 5)

    @tower.tool(independent=True)
    async def odd() -> object:
        return object()

    @tower.tool(independent=True)
    def in_thread() -> str:
        return "from a thread"

    @tower.tool(independent=True)
    def thread_fails() -> str:
        raise LookupError

    @tower.tool(independent=True, only_call=True)
    async def alone() -> str:
        return "alone"

    @tower.tool(independent=True)
    async def forbidden() -> str:
        return "never"

    @tower.tool(independent=True, pools=["db"])
    async def holder() -> str:
        await asyncio.sleep(1.5)
        return "held"

    @tower.tool(independent=True, pools=["db"], when_busy="reject")
    async def impatient() -> str:
        return "never"

    @tower.tool(independent=True, pools=["db"], max_queued=0)
    async def no_queue() -> str:
        return "after my sibling"

    calls = [
        Call("echo", '{"x": "a"}', "1"),
        Call("echo", {"x": "b"}, ""),
        Call("echo", {"x": "c"}, ""),
        Call("echo", {"x": "d"}, "1"),
        Call("fail", {}, "5"),
        Call("tell", "", "6"),
        Call("cancel", {}, "7"),
        Call("slow", {}, "8"),
        Call("deaf", {}, "9"),
        Call("odd", {}, "10"),
        Call("in_thread", {}, "11"),
        Call("thread_fails", {}, "12"),
        Call("alone", {}, "13"),
        Call("forbidden", {}, "14"),
        Call("nobody", {}, "15"),
        Call("", {}, "16"),
        Call("echo", '{"x": ', "17"),
        Call("echo", "{}", "18"),
        Call("echo", '{"x": 5}', "19"),
        Call("echo", "[1]", "20"),
        Call("holder", {}, "21"),
        Call("impatient", {}, "22"),
        Call("no_queue", {}, "23"),
        Call("echo", {"x": "the end"}, "24"),
    ]
    seen: list[int] = []
    done = run_batch(stage, tower, calls, deny="forbidden", on_result=lambda result: seen.append(result.index))
    sound(done, calls)
    assert sorted(seen) == list(range(len(calls)))
    assert codes(done) == [
        None,
        None,
        None,
        None,
        "handler_error",
        "handler_error",
        "handler_cancelled",
        "handler_timeout",
        "handler_timeout",
        "encoding_error",
        None,
        "handler_error",
        "not_alone",
        "permission_denied",
        "unknown_tool",
        "unknown_tool",
        "invalid_arguments",
        "invalid_arguments",
        "invalid_arguments",
        "invalid_arguments",
        None,
        "concurrency_limit",
        None,  # it waits for its own sibling, which no queue counts
        None,
    ]
    assert [done[n].content for n in range(4)] == list("abcd")
    assert done[5].message == "there is no such customer"
    assert done[8].still_running
    assert not done.ok
    assert "secret" not in repr(list(done)) + "".join(result.content + result.message for result in done)


def test_no_calls(stage: Stage) -> None:
    """API: no calls: an empty, falsy batch that is all right."""
    tower = stage.tower()
    done = run_batch(stage, tower, [])
    assert len(done) == 0
    assert not done
    assert done.ok
    assert done.messages() == []
    assert done.notice is None


def test_what_is_no_batch_is_told_before_anything_runs(stage: Stage) -> None:
    """InputError: input that is no batch names the place; the run goes on."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return "done"

    async def main() -> None:
        async with tower.run() as run:
            for wrong in (5, {"role": "nobody"}, "no JSON at all {", [5]):
                with pytest.raises(InputError):
                    await run.execute(wrong)
            assert run.last_batch is None
            assert (await run.execute([Call("work", {})])).ok

    stage.run(main())


def test_p05_missing_and_repeated_ids(stage: Stage) -> None:
    """P-05, R-116: ids '', '', 'a', 'a': four runs, four results, each paired with its own slot."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def echo(x: int) -> int:
        await stage.work(f"{x}", 1.0 / x)
        return x

    done = run_batch(stage, tower, [Call("echo", {"x": x}, name) for x, name in enumerate(("", "", "a", "a"), 1)])
    assert [result.value for result in done] == [1, 2, 3, 4]
    assert [result.call_id for result in done] == ["", "", "a", "a"]
    assert stage.started.total() == 4


def test_p07_emitted_order(stage: Stage) -> None:
    """P-07, R-106: what finishes last may stand first: results come in emitted order, the hook sees them as they are
    sealed.
    """
    tower = stage.tower()
    sealed: list[str] = []

    @tower.tool(independent=True)
    async def sleep_echo(t: float, x: str) -> str:
        await asyncio.sleep(t)
        return x

    calls = [Call("sleep_echo", {"t": t, "x": x}) for t, x in ((0.3, "a"), (0.2, "b"), (0.0, "c"))]
    done = run_batch(stage, tower, calls, on_result=lambda result: sealed.append(result.content))
    assert [result.content for result in done] == ["a", "b", "c"]
    assert sealed == ["c", "b", "a"]


def test_p08_emitted_order_of_many_random_batches(stage: Stage) -> None:
    """P-08, R-106, R-114: 33 batches of 2 to 8 calls with random delays: exported order equals emitted order in
    each.
    """
    tower = stage.tower()
    pick = random.Random(8)

    @tower.tool(independent=True)
    async def sleep_echo(t: float, x: int) -> int:
        await asyncio.sleep(t)
        return x

    async def main() -> None:
        async with tower.run() as run:
            for _ in range(33):
                size = pick.randint(2, 8)
                calls = [Call("sleep_echo", {"t": pick.random(), "x": x}, f"id{x}") for x in range(size)]
                done = await run.execute(calls)
                assert [result.value for result in done] == list(range(size))
                assert [one["id"] for one in done.messages("towerman")] == [call.id for call in calls]

    stage.run(main())


def test_r114_paris_and_rome_never_swap(stage: Stage) -> None:
    """R-114: two cities in one batch, the second finishing first: each answer stands with its own call."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def weather(city: str) -> dict[str, str]:
        await asyncio.sleep(2.0 if city == "Paris" else 0.1)
        return {"city": city}

    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{city}",
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps({"city": city})},
            }
            for city in ("Paris", "Rome")
        ],
    }
    turn = run_batch(stage, tower, message).turn()
    assert [(one["tool_call_id"], json.loads(str(one["content"]))) for one in turn[1:]] == [
        ("call_Paris", {"city": "Paris"}),
        ("call_Rome", {"city": "Rome"}),
    ]


def test_r115_the_same_inputs_give_the_same_bytes(stage: Stage) -> None:
    """R-115: same inputs and outcomes, whatever the order of finishing: the same messages, byte for byte."""

    def once(delays: tuple[float, ...]) -> str:
        tower = stage.tower(timeout=5.0, max_batch_bytes=4_000, max_result_bytes=2_000)

        @tower.tool(independent=True)
        async def work(n: int) -> object:
            await asyncio.sleep(delays[n])
            match n:
                case 0:
                    return {"b", "a", "c"}
                case 1:
                    raise LookupError(f"at {id(object())}")
                case 2:
                    return "x" * 50_000
                case 3:
                    await asyncio.sleep(100)
            return {"n": n}

        calls = [Call("work", {"n": n}, f"c{n}") for n in range(5)] + [Call("wrok", {"n": 1}), Call("work", "{")]
        done = run_batch(stage, tower, calls)
        return json.dumps([done.messages("openai"), done.messages("anthropic"), done.messages("towerman")])

    first = once((0.1, 0.2, 0.3, 0.0, 0.5))
    assert first == once((0.5, 0.4, 0.3, 0.0, 0.1))


def test_p04_the_first_outcome_stands(stage: Stage) -> None:
    """P-04, G1: a call that was sealed as timed out and then fails, or answers, has one result; what comes late is
    dropped and counted.
    """
    tower = stage.tower(timeout=0.5, grace=0.1)
    sealed: list[int] = []

    @tower.tool(independent=True)
    async def late(fails: bool) -> str:
        await stage.stubborn("late", 1)
        if fails:
            raise ValueError
        return "late"

    calls = [Call("late", {"fails": fails}) for fails in (True, False)]
    done = run_batch(stage, tower, calls, on_result=lambda result: sealed.append(result.index))
    assert codes(done) == ["handler_timeout"] * 2
    assert sorted(sealed) == [0, 1]
    seen = tower.statistics()
    assert (seen.late_results, seen.orphans) == (1, 0)
    assert dict(seen.outcomes) == {"ok": 0, "timed_out": 2}


# ==================================================================== limits


def test_r134_six_calls_on_two_places(stage: Stage) -> None:
    """R-134, R-48, R-137: six calls of 20 ms on limit 2: the most at once is 2 exactly, in 60 ms, and both places are
    free afterwards.
    """
    tower = stage.tower(max_concurrency=2)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 0.02)

    assert run_batch(stage, tower, [Call("work", {})] * 6).ok
    assert stage.peak == 2
    assert stage.clock.value == pytest.approx(0.06)


def test_p10_800_calls_eight_at_once(stage: Stage) -> None:
    """P-10: one response asks for 800 calls: eight run at once, never nine, all are answered in order, in a hundredth
    of the serial time.
    """
    tower = stage.tower(max_concurrency=8, max_calls_per_batch=800)

    @tower.tool(independent=True)
    async def q(i: int) -> int:
        await stage.work("q", 0.01)
        return i

    done = run_batch(stage, tower, [Call("q", {"i": i}) for i in range(800)], max_concurrency=100)
    assert [result.value for result in done] == list(range(800))
    assert stage.peak == 8
    assert stage.clock.value == pytest.approx(1.0)


def test_p11_limits_of_tools_and_of_the_whole(stage: Stage) -> None:
    """P-11, R-54, R-55, R-58: two tools with limits of 2 and 3 under a limit of 4: all three hold, and who waits for
    one does not block another.
    """
    tower = stage.tower(max_concurrency=4)

    @tower.tool(independent=True, max_concurrency=2)
    async def api() -> None:
        await stage.work("api", 1)
        assert stage.running["api"] <= 2

    @tower.tool(independent=True, max_concurrency=3)
    async def db() -> None:
        await stage.work("db", 1)
        assert stage.running["db"] <= 3

    peaks: list[tuple[int, int]] = []
    stage.clock.now()
    done = run_batch(
        stage,
        tower,
        [Call(("api", "db")[n % 2], {}) for n in range(12)],
        on_result=lambda _: peaks.append((stage.running["api"], stage.running["db"])),
    )
    assert done.ok
    assert stage.peak == 4
    assert stage.clock.value == pytest.approx(3.0)
    pools = tower.statistics().pools
    assert (pools["process"].peak, pools["tool:api"].peak, pools["tool:db"].peak) == (4, 2, 2)


def test_r58_who_waits_for_a_small_pool_holds_no_place_of_the_large_one(stage: Stage) -> None:
    """R-58, D-3: two places, `search` has one: with two searches and another call, the other starts while the second
    search waits.
    """
    tower = stage.tower(max_concurrency=2, pools={"search": 1})

    @tower.tool(independent=True, pools=["search"])
    async def search(n: int) -> str:
        return await stage.work(f"search {n}", 1)

    @tower.tool(independent=True)
    async def other() -> str:
        return await stage.work("other", 1)

    done = run_batch(stage, tower, [Call("search", {"n": 1}), Call("search", {"n": 2}), Call("other", {})])
    assert done.ok
    assert {name: came for name, came, _ in stage.spans} == {"search 1": 0.0, "other": 0.0, "search 2": 1.0}
    assert done[1].waited_for == ("pool search",)


def test_r07_r08_pools_of_the_process_and_of_a_run(stage: Stage) -> None:
    """R-07, R-08, R-136: two runs share a process pool of 1 one after another, and reach 2 with a run pool of 1;
    tenants share a tenant pool.
    """
    tower = stage.tower(
        pools={"shared": 1, "own": Pool(1, scope="run"), "theirs": Pool(1, scope="tenant")}, run_concurrency=4
    )
    for name in ("shared", "own", "theirs"):

        def declare(name: str) -> None:
            @tower.tool(name=name, independent=True, pools=[name])
            async def work() -> str:
                return await stage.work(name, 1)

        declare(name)

    async def main() -> None:
        for name, peak in (("shared", 1), ("own", 3), ("theirs", 2)):
            stage.peak = 0
            runs = [tower.run(tenant=tenant) for tenant in ("ann", "ann", "bob")]
            for done in await asyncio.gather(*(run.execute([Call(name, {})] * 2) for run in runs)):
                assert done.ok
            assert stage.peak == peak, name
            scopes = {tower.statistics().pools[pool].scope for pool in tower.statistics().pools}
            assert scopes == {"process", "run", "tenant"}
            for run in runs:
                await run.aclose()

    stage.run(main())


def test_r46_weights_count(stage: Stage) -> None:
    """R-46: calls of weight 2 on five places: two of them and one light one run at once."""
    tower = stage.tower(max_concurrency=5)

    @tower.tool(independent=True, weight=2)
    async def heavy() -> str:
        return await stage.work("heavy", 1)

    @tower.tool(independent=True)
    async def light() -> str:
        return await stage.work("light", 1)

    assert run_batch(stage, tower, [Call("heavy", {})] * 3 + [Call("light", {})] * 2).ok
    first = [name for name, came, _ in stage.spans if came == 0]
    assert sorted(first) == ["heavy", "heavy", "light"]
    assert stage.clock.value == pytest.approx(2.0)


def test_r11_a_reserve_for_what_is_urgent(stage: Stage) -> None:
    """R-11: background work that fills a pool leaves its reserve to runs of a priority above 0, which start at once."""
    tower = stage.tower(pools={"api": Pool(3, reserve=1)})

    @tower.tool(independent=True, pools=["api"])
    async def work(n: str) -> str:
        return await stage.work(n, 10)

    async def main() -> None:
        async with tower.run() as background, tower.run(priority=1) as urgent:
            slow = asyncio.ensure_future(background.execute([Call("work", {"n": "slow"})] * 4))
            await asyncio.sleep(1)
            assert stage.running["slow"] == 2
            done = await urgent.execute([Call("work", {"n": "urgent"})])
            assert done[0].waited == 0
            await slow

    stage.run(main())


def test_p46_p47_nobody_starves(stage: Stage) -> None:
    """P-46, P-47, G6, R-53: one place; five callers who come again at once, a hundred times; who waits is served in
    its turn, the slow caller too.
    """
    tower = stage.tower(max_concurrency=1)
    waits: list[float] = []

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 0.005)

    async def aggressive() -> None:
        async with tower.run() as run:
            for _ in range(100):
                await run.execute([Call("work", {})])

    async def slow() -> None:
        async with tower.run() as run:
            for _ in range(20):
                await asyncio.sleep(0.011)
                waits.append((await run.execute([Call("work", {})]))[0].waited)

    async def main() -> None:
        await asyncio.gather(slow(), *(aggressive() for _ in range(5)))

    stage.run(main())
    assert max(waits) <= 6 * 0.005 + 1e-9


def test_g6_a_wide_call_is_not_passed_for_ever(stage: Stage) -> None:
    """G6, S5: a call of weight 4 on four places is passed by a stream of light calls only so often, then it is
    promoted and runs.
    """
    tower = stage.tower(max_concurrency=4, max_wait=1e6)

    @tower.tool(independent=True)
    async def light() -> str:
        return await stage.work("light", 1)

    @tower.tool(independent=True, weight=4)
    async def wide() -> str:
        return await stage.work("wide", 1)

    ended = False

    async def stream(first: float) -> None:
        await asyncio.sleep(first)
        async with tower.run() as run:
            while not ended:
                await run.execute([Call("light", {})])

    async def main() -> None:
        nonlocal ended
        streams = [asyncio.ensure_future(stream(n / 8)) for n in range(8)]
        await asyncio.sleep(2)
        async with tower.run() as run:
            done = await run.execute([Call("wide", {})])
            assert done.ok
            assert done[0].waited < 20
        ended = True
        await asyncio.gather(*streams)

    stage.run(main())
    assert tower.statistics().promotions >= 1


def test_r02_r03_limits_hold_whatever_the_provider_emits(stage: Stage) -> None:
    """R-02, R-03: one call a turn in each of three runs is held to the shared limit as a wide batch is."""
    tower = stage.tower(max_concurrency=2)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    async def turns() -> None:
        async with tower.run() as run:
            for _ in range(4):
                assert (await run.execute([Call("work", {})])).ok

    async def main() -> None:
        await asyncio.gather(turns(), turns(), turns())

    stage.run(main())
    assert stage.peak == 2
    assert stage.clock.value == pytest.approx(6.0)


def test_r86_a_failing_call_gives_its_place_back(stage: Stage) -> None:
    """R-86, R-45, R-135: fifty failing calls on one place leave it free."""
    tower = stage.tower(max_concurrency=1, max_calls_per_batch=50)

    @tower.tool(independent=True)
    async def fail() -> None:
        raise ValueError

    assert codes(run_batch(stage, tower, [Call("fail", {})] * 50)) == ["handler_error"] * 50


# ==================================================================== resources and order


def test_p14_no_update_is_lost_on_threads(stage: Stage) -> None:
    """P-14, R-19, R-49: twenty sync read-modify-writes of one key: none is lost; on twenty keys they overlap."""
    tower = stage.tower(run_concurrency=20)
    state: dict[str, int] = {}

    @tower.tool(writes="state:{key}")
    def inc(key: str) -> None:
        with stage.on(key):
            before = state.get(key, 0)
            stage.rest(stage.loop, 0.005)
            state[key] = before + 1

    assert run_batch(stage, tower, [Call("inc", {"key": "one"})] * 20).ok
    assert state == {"one": 20}
    assert stage.peak == 1
    assert run_batch(stage, tower, [Call("inc", {"key": f"k{n}"}) for n in range(20)]).ok
    assert stage.peak == 20


def test_p16_sequential_calls_keep_their_order(stage: Stage) -> None:
    """P-16, R-27, S1: add, commit, push strictly in emitted order and each alone, 200 times over, whatever they
    take.
    """
    pick = random.Random(16)
    tower = stage.tower()

    @tower.tool(sequential=True)
    async def git(cmd: str) -> str:
        assert stage.running["git"] == 0
        assert stage.running["read"] == 0
        await stage.work("git", pick.random())
        return cmd

    @tower.tool(reads="repo")
    async def read() -> str:
        return await stage.work("read", pick.random())

    @tower.tool(independent=True)
    async def clock() -> str:
        return await stage.work("clock", pick.random())

    async def main() -> None:
        async with tower.run() as run:
            for _ in range(200):
                order: list[str] = []
                calls = [
                    Call("read", {}),
                    Call("git", {"cmd": "add"}),
                    Call("clock", {}),
                    Call("git", {"cmd": "commit"}),
                    Call("read", {}),
                    Call("git", {"cmd": "push"}),
                ]
                done = await run.execute(calls, on_result=lambda result, order=order: order.append(result.content))
                assert done.ok
                assert [one for one in order if one in ("add", "commit", "push")] == ["add", "commit", "push"]
                assert order.index("read") < order.index("add")

    stage.run(main())


def test_r24_a_tool_that_declares_nothing_runs_alone_and_in_order(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """R-24, G4: undeclared calls run alone in their run, in emitted order, beside independent ones only; other runs
    are not held up.
    """
    tower = stage.tower()

    @tower.tool
    async def unknown(n: str) -> str:
        return await stage.work(n, 1)

    @tower.tool(reads="k")
    async def read() -> str:
        return await stage.work("read", 1)

    @tower.tool(independent=True)
    async def free() -> str:
        return await stage.work("free", 1)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            await asyncio.gather(
                one.execute(
                    [Call("unknown", {"n": "1"}), Call("read", {}), Call("free", {}), Call("unknown", {"n": "2"})]
                ),
                two.execute([Call("unknown", {"n": "other run"})]),
            )

    stage.run(main())
    assert {name: came for name, came, _ in stage.spans} == {"1": 0, "free": 0, "other run": 0, "read": 1, "2": 2}


@pytest.mark.parametrize(("undeclared", "peak"), [("exclusive", 1), ("ordered", 2), ("independent", 4)])
def test_undeclared_as_the_operator_says(stage: Stage, undeclared: Any, peak: int) -> None:
    """R-24: two runs with two undeclared calls each: alone in the process, alone in their run, or free."""
    tower = stage.tower(undeclared=undeclared)

    @tower.tool
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        runs = [tower.run(), tower.run()]
        await asyncio.gather(*(run.execute([Call("work", {})] * 2) for run in runs))
        for run in runs:
            await run.aclose()

    stage.run(main())
    assert stage.peak == peak


def test_a_tool_declared_later_excludes_those_before_it(stage: Stage) -> None:
    """R-24, G4: a call whose tool touches nothing that time, prepared before the first ordered tool was declared,
    still does not overlap it later.
    """
    tower = stage.tower()

    @tower.tool(writes=lambda key: [f"k:{key}"] if key else [])
    async def maybe(key: str) -> str:
        return await stage.work("maybe", 1)

    async def main() -> None:
        async with tower.run() as run:
            assert (await run.execute([Call("maybe", {"key": ""})])).ok

            @tower.tool
            async def ordered() -> str:
                return await stage.work("ordered", 1)

            assert (await run.execute([Call("ordered", {}), Call("maybe", {"key": ""}), Call("ordered", {})])).ok

    stage.run(main())
    assert [came for _, came, _ in stage.spans] == [0, 1, 2, 3]


def test_conflicting_calls_of_two_batches_of_one_run(stage: Stage) -> None:
    """G4: two batches of one run at the same time: their writes of one key exclude each other."""
    tower = stage.tower()

    @tower.tool(writes="k")
    async def write(n: str) -> str:
        return await stage.work(n, 1)

    async def main() -> None:
        async with tower.run() as run:
            one, two = await asyncio.gather(*(run.execute([Call("write", {"n": n})] * 2) for n in "ab"))
            assert one.ok
            assert two.ok
            assert one[0].waited_for == ()
            assert two[0].waited_for == ("resource k",)

    stage.run(main())
    assert stage.peak == 1
    assert stage.clock.value == pytest.approx(4.0)


def test_when_busy_reject_is_not_for_siblings(stage: Stage) -> None:
    """Decision 3, R-67: `reject` never refuses a call for a sibling's access, only for somebody else's, or for a full
    pool.
    """
    tower = stage.tower(pools={"db": 1})

    @tower.tool(writes="k", when_busy="reject")
    async def write(n: str) -> str:
        return await stage.work(n, 1)

    @tower.tool(independent=True, pools=["db"], when_busy="reject")
    async def query(n: str) -> str:
        return await stage.work(n, 1)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("write", {"n": "a"}), Call("write", {"n": "b"})]))
            await asyncio.sleep(0.5)
            (refused,) = await two.execute([Call("write", {"n": "c"})])
            assert (refused.outcome, refused.code, refused.waited_for) == (
                "rejected",
                "concurrency_limit",
                ("resource k",),
            )
            assert refused.retryable == "yes"
            assert (await first).ok
            done = await one.execute([Call("query", {"n": "d"}), Call("query", {"n": "e"})])
            assert codes(done) == [None, "concurrency_limit"]
            assert done[1].waited_for == ("pool db",)

    stage.run(main())
    assert stage.started["c"] == stage.started["e"] == 0


# ==================================================================== needs


def test_needs_diamond_and_failure(stage: Stage) -> None:
    """R-29, R-38: a diamond runs in order with its middle side by side; where its root fails, the rest is skipped and
    never starts.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def step(name: str, fails: bool = False) -> str:
        await stage.work(name, 1)
        if fails:
            raise ToolError("no")
        return name

    def diamond(fails: bool) -> list[Call]:
        wants = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}
        return [Call("step", {"name": n, "fails": fails and n == "a"}, n, wants[n]) for n in "abcd"]

    assert run_batch(stage, tower, diamond(False)).ok
    assert [(name, came) for name, came, _ in stage.spans] == [("a", 0), ("b", 1), ("c", 1), ("d", 2)]
    stage.spans.clear()
    done = run_batch(stage, tower, diamond(True))
    assert [result.outcome for result in done] == ["error", "skipped", "skipped", "skipped"]
    assert codes(done)[1:] == ["dependency_failed"] * 3
    assert "call 0 (a)" in done[1].message
    assert [name for name, _, _ in stage.spans] == ["a"]


@pytest.mark.parametrize(
    ("needs", "code"),
    [
        ({"a": ["c"], "b": ["a"], "c": ["b"]}, "dependency_cycle"),
        ({"a": ["a"], "b": [], "c": []}, "dependency_cycle"),
        ({"a": ["zzz"], "b": [], "c": []}, "unknown_dependency"),
    ],
)
def test_g5_a_bad_plan_runs_nothing(stage: Stage, needs: dict[str, list[str]], code: str) -> None:
    """G5, R-30 to R-33: refused before any handler starts, every call with the reason."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def step() -> str:
        return await stage.work("step", 1)

    done = run_batch(stage, tower, [Call("step", {}, name, needs[name]) for name in "abc"])
    assert codes(done) == [code] * 3
    assert not stage.started


def test_a_needed_call_that_was_refused_skips(stage: Stage) -> None:
    """R-38: a need that was refused before it started, or had bad arguments, skips as a failed one does."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def step(n: int) -> str:
        return await stage.work("step", 1)

    calls = [
        Call("step", "{", "bad"),
        Call("nobody", {}, "none"),
        Call("step", {"n": 1}, "x", ["bad"]),
        Call("step", {"n": 2}, "y", ["none"]),
    ]
    done = run_batch(stage, tower, calls)
    assert codes(done) == ["invalid_arguments", "unknown_tool", "dependency_failed", "dependency_failed"]
    assert not stage.started


def test_a_failed_write_does_not_skip_the_next_one(stage: Stage) -> None:
    """S1: an order-only edge settles when the work has ended, also when it failed."""
    tower = stage.tower()

    @tower.tool(writes="k")
    async def write(fails: bool) -> str:
        await stage.work("write", 1)
        if fails:
            raise ToolError("no")
        return "done"

    assert codes(run_batch(stage, tower, [Call("write", {"fails": n == 0}) for n in range(2)])) == [
        "handler_error",
        None,
    ]


# ==================================================================== isolation


def test_p25_siblings_are_isolated(stage: Stage) -> None:
    """P-25, R-108: one fails in the middle; the others run to their ends and keep their values."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def ok(t: float) -> str:
        return await stage.work("ok", t)

    @tower.tool(independent=True)
    async def boom() -> None:
        await stage.work("boom", 0.005)
        raise RuntimeError

    done = run_batch(stage, tower, [Call("ok", {"t": 0.01}), Call("boom", {}), Call("ok", {"t": 0.05})])
    assert [result.outcome for result in done] == ["ok", "error", "ok"]
    assert stage.started == {"ok": 2, "boom": 1}


def test_p26_one_harmless_error_among_27(stage: Stage) -> None:
    """P-26: by default 26 answers and one error; with fail_fast the rest does not start or is told to stop, and the
    message names the culprit.
    """
    tower = stage.tower(run_concurrency=10, max_calls_per_batch=30)

    @tower.tool(independent=True, read_only=True)
    async def sh(n: int) -> str:
        if n == 1:
            await asyncio.sleep(0.001)
            raise ToolError("exit 1")
        return await stage.work("sh", 0.02)

    calls = [Call("sh", {"n": n}) for n in range(27)]
    done = run_batch(stage, tower, calls)
    assert sum(result.ok for result in done) == 26
    assert done[1].message == "exit 1"
    stage.started.clear()
    done = run_batch(stage, tower, calls, fail_fast=True)
    assert codes(done) == ["sibling_failed", "handler_error", *["sibling_failed"] * 25]
    assert [result.started for result in done] == [True] * 10 + [False] * 17
    assert stage.started["sh"] == 9
    for result in (done[0], done[20]):
        assert result.outcome == "cancelled"
        assert "call 1 (sh) failed" in result.message


def test_fail_fast_spares_what_writes(stage: Stage) -> None:
    """Decision 9, R-85: after a failure running writes go on to their ends and answer; a timeout counts as a failure,
    a refusal does not.
    """
    tower = stage.tower(run_concurrency=3)

    @tower.tool(independent=True)
    async def change(n: int) -> str:
        return await stage.work("change", 2)

    @tower.tool(independent=True, timeout=1, read_only=True)
    async def slow() -> str:
        return await stage.work("slow", 5)

    calls = [
        Call("change", {"n": 1}),
        Call("nobody", {}),
        Call("slow", {}),
        Call("change", {"n": 2}),
        Call("change", {"n": 3}),
    ]
    done = run_batch(stage, tower, calls, fail_fast=True)
    assert codes(done) == [None, "unknown_tool", "handler_timeout", None, "sibling_failed"]


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_g1_two_calls_are_due_and_the_first_ends_the_second(stage: Stage, where: str) -> None:
    """G1: two calls run out of time in one instant and the run fails fast: the first one's end seals the second,
    once.
    """
    tower = stage.tower(timeout=1.0, grace=0.0)
    sealed: list[int] = []

    async def deaf() -> None:
        await stage.stubborn("deaf", 3)

    def sync() -> None:
        stage.sync_work(stage.loop, "sync", 3)

    tower.add_tool(deaf if where == "loop" else sync, name="slow", independent=True, read_only=True)
    calls = [Call("slow", {})] * 3
    done = run_batch(stage, tower, calls, fail_fast=True, on_result=lambda result: sealed.append(result.index))
    assert sorted(sealed) == [0, 1, 2]
    assert done[0].code == "handler_timeout"
    assert {result.code for result in done} <= {"handler_timeout", "sibling_failed"}
    seen = tower.statistics()
    assert (seen.orphans, sum(seen.outcomes.values())) == (0, 3)


def test_a_caller_who_gives_up_does_not_wait_for_what_a_failure_spared(stage: Stage) -> None:
    """S16, G12: after a fail-fast stop the caller, or the run, gives up: what was spared is told to stop now, within
    grace.
    """
    for by_run in (False, True):
        tower = stage.tower(grace=1.0)

        @tower.tool(independent=True)
        async def change() -> str:
            return await stage.work("change", 100)

        @tower.tool(independent=True)
        async def fail() -> None:
            raise ToolError("no")

        async def main(tower: Tower = tower, by_run: bool = by_run) -> None:
            async with tower.run(fail_fast=True) as run:
                task = asyncio.ensure_future(run.execute([Call("change", {}), Call("fail", {})]))
                await asyncio.sleep(5)
                assert not task.done()
                before = here().time()
                if by_run:
                    run.cancel("enough")
                    await task
                else:
                    task.cancel("enough")
                    with pytest.raises(asyncio.CancelledError):
                        await task
                assert here().time() - before <= 1.0
                assert run.last_batch is not None
                assert codes(run.last_batch) == ["cancelled", "handler_error"]
                assert "enough" in run.last_batch[0].message

        stage.run(main())


def test_p28_a_broken_hook_is_told_after_the_batch(stage: Stage) -> None:
    """P-28: what the caller's own hook raises reaches the caller when everything has its result; nothing runs on
    unowned.
    """
    tower = stage.tower()
    flags: list[str] = []

    @tower.tool(independent=True)
    async def slow() -> str:
        flags.append(await stage.work("slow", 1))
        return "done"

    @tower.tool(independent=True)
    async def quick() -> str:
        return await stage.work("quick", 0.01)

    def hook(result: Result) -> None:
        raise RuntimeError("the hook is broken")

    async def main() -> None:
        async with tower.run() as run:
            with pytest.raises(RuntimeError, match="the hook is broken"):
                await run.execute([Call("slow", {}), Call("slow", {}), Call("quick", {})], on_result=hook)
            assert flags == ["slow", "slow"]
            assert run.last_batch is not None
            assert run.last_batch.ok
            assert asyncio.all_tasks() == {asyncio.current_task()}

    stage.run(main())


def test_a_hook_that_cannot_be_called_is_told_first(stage: Stage) -> None:
    """DESIGN style 7: a hook that is no plain function (a coroutine function, say) is refused before anything runs."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    async def hook(result: Result) -> None:
        """Nobody would await it."""

    for wrong in (hook, 5):
        with pytest.raises(PolicyError, match="on_result: a plain function that takes a Result"):
            run_batch(stage, tower, [Call("work", {})], on_result=wrong)
    assert not stage.started


def test_a_cancel_is_not_hidden_by_a_broken_hook(stage: Stage) -> None:
    """S16: the caller was cancelled and its hook raised: the cancel is told, the hook's error stands behind it."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def slow() -> str:
        return await stage.work("slow", 1)

    def hook(result: Result) -> None:
        raise RuntimeError("the hook is broken")

    async def main() -> None:
        async with tower.run() as run:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await run.execute([Call("slow", {})], on_result=hook)
            task = asyncio.ensure_future(run.execute([Call("slow", {})], on_result=hook))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as told:
                await task
            assert told.value.__cause__ is None or isinstance(told.value.__cause__, RuntimeError)

    stage.run(main())


# ==================================================================== failures


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Speechless(ToolError):
    """A ToolError whose author forgot to call the base."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("where", ["loop", "thread", "shared"])
def test_p76_errors_without_text_and_with_too_much(stage: Stage, where: str) -> None:
    """P-76, R-117: the type is always told, the message is never empty, never the exception's text, and short."""
    tower = stage.tower(debug=False)
    errors: list[Any] = [
        ValueError(),
        TimeoutError(),
        KeyError("x"),
        Unspeakable(),
        RuntimeError("y" * 1_000_000),
        StopIteration("z"),
        StopAsyncIteration(),
        RecursionError(),
    ]

    def fail(n: int) -> None:
        raise errors[n]

    async def afail(n: int) -> None:
        raise errors[n]

    handler: Callable[..., Any] = fail if where == "thread" else afail
    tower.add_tool(handler, name="fail", independent=True, own_task=where != "shared")
    done = run_batch(stage, tower, [Call("fail", {"n": n}) for n in range(len(errors))])
    assert codes(done) == ["handler_error"] * len(errors)
    for result, error in zip(done, errors, strict=True):
        name = type(error).__name__
        if not isinstance(error, StopIteration | StopAsyncIteration):  # a coroutine turns them into RuntimeError
            assert name in result.message
            assert result.exception is error
        assert len(result.message) < 300
        assert "yyy" not in result.content
        assert result.applied == "unknown"
        assert repr(result)


def test_p77_groups_are_told_by_their_leaves(stage: Stage) -> None:
    """P-77: nested groups: the leaves are named, each once, and that it was a group."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def one() -> None:
        raise ExceptionGroup("g", [ExceptionGroup("h", [PermissionError("no")])])

    @tower.tool(independent=True)
    async def two() -> None:
        raise ExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [KeyError("b"), ValueError("c")])])

    first, second = run_batch(stage, tower, [Call("one", {}), Call("two", {})])
    assert "PermissionError" in first.message
    assert "group" in first.message
    assert "ValueError, KeyError" in second.message
    assert "3 errors" in second.message


def test_tool_errors_speak_for_themselves(stage: Stage) -> None:
    """API: the text of a ToolError reaches the model, bounded; `applied` is what the handler says, else what is
    known.
    """
    tower = stage.tower(max_result_bytes=400)
    errors = [
        ToolError("No such customer."),
        ToolError("Half of it.", applied="yes"),
        ToolError("Nothing done.", applied="no"),
        ToolError("   "),
        ToolError("long " * 10_000),
        Speechless(),
        ToolError(5),  # type: ignore[arg-type]
        ToolError("odd", applied="maybe"),  # type: ignore[arg-type]
    ]

    @tower.tool(independent=True)
    async def fail(n: int) -> None:
        raise errors[n]

    done = run_batch(stage, tower, [Call("fail", {"n": n}) for n in range(len(errors))])
    sound(done, errors)
    assert [result.applied for result in done] == ["unknown", "yes", "no", *["unknown"] * 5]
    assert [result.retryable for result in done] == ["unknown", "unknown", "yes", *["unknown"] * 5]
    assert done[0].message == "No such customer."
    assert done[3].message == done[5].message == done[6].message == "The tool failed."
    assert len(done[4].content.encode()) <= 400 + 200


def test_debug_prints_tracebacks_here_only(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """API: debug=True prints tracebacks to stderr, even of exceptions without text; results stay as they are."""
    tower = stage.tower(debug=True)

    @tower.tool(independent=True)
    async def fail() -> None:
        raise ValueError("only here")

    @tower.tool(independent=True)
    async def worse() -> None:
        raise Unspeakable

    done = run_batch(stage, tower, [Call("fail", {}), Call("worse", {})])
    assert codes(done) == ["handler_error"] * 2
    assert "only here" in capsys.readouterr().err
    assert "only here" not in done[0].content


def test_a_closed_stderr_costs_no_result(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1: debug=True with a stderr that is closed: the result is there all the same."""
    tower = stage.tower(debug=True)

    @tower.tool(independent=True)
    async def fail() -> None:
        raise ValueError

    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", closed)
        done = run_batch(stage, tower, [Call("fail", {})])
    assert codes(done) == ["handler_error"]


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_r109_what_cannot_be_encoded(stage: Stage, where: str) -> None:
    """R-109, P-58: a value without a JSON form, an encoder and a summarizer that fail: that call's error only; a
    write had its effect.
    """
    tower = stage.tower(max_result_bytes=200)

    def broken(value: object) -> object:
        raise ValueError("broken")

    def declare(name: str, value: object, **options: Any) -> None:
        def sync() -> object:
            return value

        async def coroutine() -> object:
            return value

        handler: Callable[[], object] = sync if where == "thread" else coroutine
        tower.add_tool(handler, name=name, independent=True, **options)

    declare("object", object())
    declare("object_read", object(), read_only=True)
    declare("encoder", "value", encode=broken)
    declare("summarizer", "value " * 100, summarize=broken)
    declare("shortened", "value " * 100, summarize=lambda value: "short")
    declare("encoded", {"a": 1}, encode=lambda value: f"as {value}")
    names = ["object", "object_read", "encoder", "summarizer", "shortened", "encoded"]
    done = run_batch(stage, tower, [Call(name, {}) for name in names])
    assert codes(done) == ["encoding_error", "encoding_error", "encoding_error", None, None, None]
    assert [result.applied for result in done] == ["yes", "no", "yes", "yes", "yes", "yes"]
    assert done[0].retryable == "no"
    assert done[4].content.startswith("short\n[summary of 600 bytes")
    assert done[4].original_bytes == 600
    assert done[5].content == "as {'a': 1}"
    assert len(done[3].content.encode()) <= 200


def test_r110_r111_p55_results_are_bounded(stage: Stage) -> None:
    """R-110, R-111, P-55: five results of 1.7 MB and a small one: each under its cap, all under the batch's, the
    small one whole, the cut said.
    """
    tower = stage.tower(max_result_bytes=20_000, max_batch_bytes=50_000)

    @tower.tool(independent=True)
    async def dump() -> str:
        return "line of text\n" * 130_000

    @tower.tool(independent=True)
    async def rows() -> object:
        return {"items": [{"n": n, "text": "x" * 50} for n in range(20_000)], "next": "c2"}

    @tower.tool(independent=True)
    async def small() -> object:
        return {"ok": True}

    done = run_batch(stage, tower, [*[Call("dump", {})] * 4, Call("rows", {}), Call("small", {})])
    sizes = [len(result.content.encode()) for result in done]
    assert max(sizes) <= 20_000
    assert sum(sizes) <= 50_000
    assert json.loads(done[5].content) == {"ok": True}
    assert done[0].original_bytes == 13 * 130_000
    assert str(13 * 130_000) in done[0].content
    cut = json.loads(done[4].content)
    assert cut["result"]["next"] == "c2"


def test_p59_empty_results_are_marked(stage: Stage) -> None:
    """P-59: '', None, no bytes, blank text: success, with content that says so."""
    tower = stage.tower()
    values: list[object] = ["", None, b"", "   ", []]

    @tower.tool(independent=True)
    async def give(n: int) -> object:
        return values[n]

    done = run_batch(stage, tower, [Call("give", {"n": n}) for n in range(len(values))])
    assert done.ok
    assert all(result.content.strip() for result in done)
    assert all(message["content"] for message in done.messages("openai"))


# ==================================================================== applied, retryable


@pytest.mark.parametrize(
    ("options", "ended", "expected"),
    [
        # what the tool is, how it ended -> (applied, retryable)
        ({}, "ok", ("yes", "no")),
        ({"read_only": True}, "ok", ("no", "no")),
        ({"idempotent": True}, "ok", ("yes", "no")),
        ({}, "error", ("unknown", "unknown")),
        ({"read_only": True}, "error", ("no", "yes")),
        ({"idempotent": True}, "error", ("unknown", "yes")),
        ({}, "said no", ("no", "yes")),
        ({}, "said yes", ("yes", "unknown")),
        ({"idempotent": True}, "said yes", ("yes", "yes")),
        ({}, "timeout", ("unknown", "unknown")),
        ({"read_only": True}, "timeout", ("no", "yes")),
        ({"idempotent": True}, "timeout", ("unknown", "yes")),
        ({}, "cancelled", ("unknown", "unknown")),
        ({"read_only": True}, "cancelled", ("no", "yes")),
        ({}, "own cancel", ("unknown", "unknown")),
        ({"read_only": True}, "own cancel", ("no", "yes")),
        ({}, "not encodable", ("yes", "no")),
        ({"read_only": True}, "not encodable", ("no", "no")),
        ({}, "never started", ("no", "yes")),
        ({"read_only": True}, "never started", ("no", "yes")),
    ],
)
@pytest.mark.parametrize("where", ["loop", "thread"])
def test_g10_the_effect_is_never_guessed(
    stage: Stage, options: dict[str, bool], ended: str, expected: tuple[str, str], where: str
) -> None:
    """G10, R-85, R-117: what is known of the effect, and whether another try can help and can do no harm, by kind of
    tool and end.
    """
    tower = stage.tower(timeout=1.0, grace=0.1, max_concurrency=1)

    def finish() -> object:
        match ended:
            case "error":
                raise ValueError
            case "said no":
                raise ToolError("no", applied="no")
            case "said yes":
                raise ToolError("partly", applied="yes")
            case "own cancel":
                raise asyncio.CancelledError
            case "not encodable":
                return object()
        return "done"

    lasting = {"timeout": 5.0, "cancelled": 5.0}.get(ended, 0.1)

    async def coroutine() -> object:
        await asyncio.sleep(lasting)
        return finish()

    def sync() -> object:
        stage.rest(stage.loop, lasting)
        return finish()

    tower.add_tool(coroutine if where == "loop" else sync, name="work", independent=True, **options)

    @tower.tool(independent=True, timeout=50)
    async def holder() -> None:
        await asyncio.sleep(10)

    async def main() -> None:
        stage.loop = here()
        async with tower.run() as run:
            if ended == "never started":
                task = asyncio.ensure_future(run.execute([Call("holder", {}), Call("work", {})]))
                await asyncio.sleep(0.5)
                run.cancel("stop", index=1)
                result = (await task)[1]
            else:
                task = asyncio.ensure_future(run.execute([Call("work", {})]))
                await asyncio.sleep(0.5)
                if ended == "cancelled":
                    run.cancel("stop")
                (result,) = await task
            assert (result.applied, result.retryable) == expected
            assert result.started == (ended != "never started")
        await stage.settled(tower)

    stage.run(main())


# ==================================================================== time


def test_s2_waiting_does_not_eat_running_time(stage: Stage) -> None:
    """S2: a call that waits 0.9 s of 1 s and then runs 1.9 s of 2 s is all right: the clocks are apart."""
    tower = stage.tower(max_concurrency=1, max_wait=1.0, timeout=2.0)

    @tower.tool(independent=True)
    async def work(seconds: float) -> str:
        return await stage.work("work", seconds)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("work", {"seconds": 0.9})]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            done = await two.execute([Call("work", {"seconds": 1.9})])
            assert done.ok
            assert done[0].waited == pytest.approx(0.9)
            assert done[0].ran == pytest.approx(1.9)
            await first

    stage.run(main())


def test_s2_own_siblings_are_not_waiting(stage: Stage) -> None:
    """S2: thirty calls of one run on one place take thirty times as long as max_wait allows: waiting for siblings
    does not count, nor fill a queue.
    """
    tower = stage.tower(run_concurrency=1, max_wait=1.0, max_queued=1, max_calls_per_batch=30)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    @tower.tool(writes="k")
    async def write() -> str:
        return await stage.work("write", 1)

    assert run_batch(stage, tower, [Call("work", {})] * 30).ok
    done = run_batch(stage, tower, [Call("write", {})] * 30)
    assert done.ok
    assert done[29].waited == 0
    assert done[29].waited_for == ("call 28",)


def test_r66_a_wait_has_an_end(stage: Stage) -> None:
    """R-66, R-73, G6: a waiter whose deadline passes is told what it waited for and how long, leaves the queue, and
    is not started later.
    """
    tower = stage.tower(max_concurrency=1, max_wait=2.0)

    @tower.tool(independent=True)
    async def work(n: str) -> str:
        return await stage.work(n, 10)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("work", {"n": "first"})]))
            await asyncio.sleep(1)
            (late,) = await two.execute([Call("work", {"n": "late"})])
            assert here().time() == pytest.approx(3.0)
            assert (late.outcome, late.code, late.started) == ("rejected", "wait_timeout", False)
            assert late.waited == pytest.approx(2.0)
            assert late.waited_for == ("pool process",)
            assert "2 s" in late.message
            assert "pool process" in late.message
            assert tower.statistics().waiting == 0
            await first
        assert stage.started["late"] == 0

    stage.run(main())


def test_r68_a_queue_is_bounded(stage: Stage) -> None:
    """R-68: with max_queued=3 of other runs' calls, the fourth waiter is answered at once; the bound counts per
    tower, tool and pool.
    """
    tower = stage.tower(max_concurrency=1, max_queued=3)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        runs = [tower.run() for _ in range(6)]
        done = await asyncio.gather(*(run.execute([Call("work", {})]) for run in runs))
        assert codes([one[0] for one in done]) == [None, None, None, None, "queue_full", "queue_full"]
        assert done[4][0].waited == 0
        for run in runs:
            await run.aclose()

    stage.run(main())


def test_r75_a_refusal_is_not_retried(stage: Stage) -> None:
    """R-75, R-76: refused once is refused: the runtime does not try again by itself, and codes tell the kinds apart."""
    tower = stage.tower(max_concurrency=1, when_busy="reject")

    @tower.tool(independent=True)
    async def work(n: str) -> str:
        return await stage.work(n, 1)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("work", {"n": "a"})]))
            await asyncio.sleep(0.5)
            assert codes(await two.execute([Call("work", {"n": "b"})])) == ["concurrency_limit"]
            await first
            await asyncio.sleep(5)

    stage.run(main())
    assert stage.started == {"a": 1}


def test_p82_a_thread_that_outlives_its_timeout(stage: Stage) -> None:
    """P-82, G7, R-84: the result comes at the timeout and says that the work goes on; its place stays taken until it
    really ends; the loop is free.
    """
    tower = stage.tower(max_concurrency=1, max_wait=100)
    beats: list[float] = []

    @tower.tool(independent=True, timeout=1.0)
    def slow() -> str:
        return stage.sync_work(stage.loop, "slow", 8)

    @tower.tool(independent=True)
    async def next_one() -> str:
        return await stage.work("next", 1)

    async def heartbeat() -> None:
        while True:
            beats.append(here().time())
            await asyncio.sleep(0.5)

    async def main() -> None:
        stage.loop = here()
        beating = asyncio.ensure_future(heartbeat())
        async with tower.run() as run:
            (told,) = await run.execute([Call("slow", {})])
            assert here().time() == pytest.approx(1.0)
            assert (told.code, told.still_running, told.applied) == ("handler_timeout", True, "unknown")
            assert tower.statistics().pools["process"].held == 1
            assert tower.statistics().orphans == 1
            (after,) = await run.execute([Call("next_one", {})])
            assert after.ok
            assert after.waited == pytest.approx(7.0)
            assert tower.statistics().late_results == 1
        beating.cancel()
        await asyncio.wait([beating])

    stage.run(main())
    assert beats == [pytest.approx(n / 2) for n in range(len(beats))]
    assert stage.peak == 1


def test_on_orphan_release(stage: Stage) -> None:
    """G7, R-84: where the operator chose so, what goes on gives its place and its resource to others, which is
    counted and shown.
    """
    tower = stage.tower(max_concurrency=1, on_orphan="release", timeout=1.0, grace=0.5)

    @tower.tool(writes="k")
    async def deaf(n: str) -> str:
        return await stage.stubborn(n, 5) if n == "first" else await stage.work(n, 0.5)

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("deaf", {"n": "first"}), Call("deaf", {"n": "second"})])
            assert codes(done) == ["handler_timeout", None]
            assert here().time() == pytest.approx(2.0)
            seen = tower.statistics()
            assert (seen.orphans, seen.orphans_released, seen.pools["process"].held) == (1, 1, 0)
        await stage.settled(tower)

    stage.run(main())
    assert stage.peak == 2


def test_s2_who_stands_behind_an_orphan_is_clocked_from_the_seal(stage: Stage) -> None:
    """S1, S2, G7: the call ordered after a timed-out write waits for the work to end, as long as max_wait allows from
    the seal on.
    """
    for lasts, code in ((3.0, None), (30.0, "wait_timeout")):
        tower = stage.tower(timeout=1.0, grace=0.5, max_wait=2.0)
        began = stage.clock.value

        @tower.tool(writes="k")
        async def write(n: str, lasts: float) -> str:
            return await stage.stubborn(n, lasts)

        async def main(
            tower: Tower = tower, lasts: float = lasts, code: str | None = code, began: float = began
        ) -> None:
            async with tower.run() as run:
                calls = [Call("write", {"n": "1", "lasts": lasts}), Call("write", {"n": "2", "lasts": 0.1})]
                done = await run.execute(calls)
                assert codes(done) == ["handler_timeout", code]
                assert done[1].waited == pytest.approx(1.5 if code is None else 2.0)
                assert done[1].waited_for == ("call 0", "resource k")
            await stage.settled(tower)

        stage.run(main())


def test_a_run_has_a_deadline(stage: Stage) -> None:
    """G12, R-99: after a run's deadline nothing starts, what runs is stopped, what waits is told; given in seconds or
    as an instant with a zone.
    """
    for deadline in (2.0, datetime.now(UTC) + timedelta(seconds=2.0)):
        tower = stage.tower(run_concurrency=1, grace=0.5)

        @tower.tool(independent=True)
        async def work(n: str, seconds: float) -> str:
            return await stage.work(n, seconds)

        async def main(tower: Tower = tower, deadline: Any = deadline) -> None:
            async with tower.run(deadline=deadline) as run:
                calls = [Call("work", {"n": str(n), "seconds": s}) for n, s in enumerate((1.0, 5.0, 1.0))]
                done = await run.execute(calls)
                assert codes(done) == [None, "deadline_exceeded", "deadline_exceeded"]
                assert [result.outcome for result in done] == ["ok", "timed_out", "rejected"]
                after = await run.execute([Call("work", {"n": "3", "seconds": 1})])
                assert codes(after) == ["deadline_exceeded"]
                assert not after[0].started

        before = stage.clock.value
        stage.run(main())
        assert stage.clock.value - before == pytest.approx(2.0, abs=0.1)


def test_a_deadline_that_has_passed_already(stage: Stage) -> None:
    """G12: deadline=0: everything is told at once, nothing starts, coroutine or thread."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    @tower.tool(writes="k")
    def sync() -> None:
        stage.started["sync"] += 1

    done = run_batch(stage, tower, [Call("work", {}), Call("sync", {}), Call("sync", {})], deadline=0)
    assert codes(done) == ["deadline_exceeded"] * 3
    assert not stage.started


def test_r103_every_batch_ends(stage: Stage) -> None:
    """R-103, G12: handlers that never end and ignore every cancel: the batch ends within timeout + grace, and waiters
    within max_wait after that.
    """
    tower = stage.tower(max_concurrency=2, run_concurrency=2, timeout=3.0, grace=1.0, max_wait=5.0)
    over = False

    @tower.tool(independent=True)
    async def never() -> None:
        while not over:
            try:
                await asyncio.sleep(0.25)
            except asyncio.CancelledError:
                pass

    async def main() -> None:
        nonlocal over
        async with tower.run() as run:
            done = await run.execute([Call("never", {})] * 4)
            assert here().time() == pytest.approx(3 + 1 + 5)
            assert codes(done) == ["handler_timeout", "handler_timeout", "wait_timeout", "wait_timeout"]
        over = True
        await stage.settled(tower)

    stage.run(main())


# ==================================================================== caps and permissions


def test_r97_over_the_cap_the_model_is_told(stage: Stage) -> None:
    """R-96, R-97: 200 calls with a cap of 20: the first 20 run, the rest is answered `call_cap`, with one notice; or
    all run, slower.
    """
    for on_excess in ("tell", "queue"):
        tower = stage.tower(max_calls_per_batch=20, on_excess=on_excess)

        @tower.tool(independent=True)
        async def fetch(n: int) -> int:
            await stage.work("fetch", 0.1)
            return n

        stage.started.clear()
        done = run_batch(stage, tower, [Call("fetch", {"n": n}) for n in range(200)])
        if on_excess == "tell":
            assert codes(done) == [None] * 20 + ["call_cap"] * 180
            assert stage.started["fetch"] == 20
            assert done.notice is not None
            assert "20 of 200" in done.notice
            assert "20 of 200" in done[199].message
            assert all("at most 20 calls" in result.message for result in done[20:])
        else:
            assert [result.value for result in done] == list(range(200))
            assert done.notice is None


def test_plans_are_not_cut(stage: Stage) -> None:
    """API: a batch with needs is run whole, whatever the cap."""
    tower = stage.tower(max_calls_per_batch=3)

    @tower.tool(independent=True)
    async def step() -> str:
        return await stage.work("step", 1)

    calls = [Call("step", {}, str(n), [str(n - 1)] if n else ()) for n in range(6)]
    assert run_batch(stage, tower, calls).ok


def test_only_call(stage: Stage) -> None:
    """API: `only_call` may not share a batch: refused `not_alone` with others, run alone; the others are not harmed."""
    tower = stage.tower()

    @tower.tool(independent=True, only_call=True)
    async def finish() -> str:
        return await stage.work("finish", 1)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    assert codes(run_batch(stage, tower, [Call("work", {}), Call("finish", {})])) == [None, "not_alone"]
    assert stage.started == {"work": 1}
    assert run_batch(stage, tower, [Call("finish", {})]).ok


def test_truncated_responses(stage: Stage) -> None:
    """Issue item 6: of a response cut at the token limit nothing with side effects runs, and not its last call; reads
    before it do.
    """
    tower = stage.tower()

    @tower.tool(reads="k")
    async def read() -> str:
        return await stage.work("read", 1)

    @tower.tool(writes="k")
    async def write() -> str:
        return await stage.work("write", 1)

    batch = Batch((Call("read", {}), Call("write", {}), Call("read", {})), truncated=True)
    done = run_batch(stage, tower, batch)
    assert codes(done) == [None, "truncated_response", "truncated_response"]
    assert stage.started == {"read": 1}


def test_r128_permission_comes_before_capacity(stage: Stage) -> None:
    """R-128: what a run may not call takes no place, no queue and no check of its arguments; patterns, deny before
    allow.
    """
    tower = stage.tower(pools={"crm": 1})
    checked: list[int] = []

    def declare(name: str) -> None:
        @tower.tool(name=name, independent=True, pools=["crm"])
        async def handler() -> str:
            return await stage.work(name, 1)

    for name in ("crm_read", "crm_write", "mail"):
        declare(name)
    calls = [Call("crm_read", {}), Call("crm_write", "{ broken"), Call("mail", {})]
    done = run_batch(stage, tower, calls, allow="crm_*", deny=["*_write"])
    assert codes(done) == [None, "permission_denied", "permission_denied"]
    assert stage.started == {"crm_read": 1}
    assert done[1].waited_for == ()
    assert tower.statistics().pools["crm"].peak == 1
    assert not checked
    assert codes(run_batch(stage, tower, calls[:1], allow=[])) == ["permission_denied"]
    for wrong in ([5], [""], 5):
        with pytest.raises((PolicyError, TypeError)):
            tower.run(allow=wrong)  # type: ignore[arg-type]


def test_p74_unknown_tools_are_answered_with_near_names(stage: Stage) -> None:
    """P-74: an invented name is that call's refusal, with the names that are near and allowed; long names are cut,
    and none is recorded.
    """
    events: list[Event] = []
    tower = stage.tower(observers=[events.append])

    @tower.tool(independent=True)
    async def read_customer() -> str:
        return "done"

    @tower.tool(independent=True)
    async def read_customers() -> str:
        return "done"

    long_name = "x" * 10_000
    calls = [Call(name, {}) for name in ("read_customer", "Read_Customer", "missing", "", long_name)]
    done = run_batch(stage, tower, calls, deny="read_customers")
    assert codes(done) == [None, *["unknown_tool"] * 4]
    assert "'read_customer'" in done[1].message
    assert "read_customers" not in done[1].message
    assert len(done[4].tool) <= 128
    assert len(done[4].message) < 300
    assert tower.flush(30)
    assert {event.tool for event in events if event.index is not None} == {"read_customer", "<unknown tool>"}


def test_p73_empty_and_broken_arguments(stage: Stage) -> None:
    """P-73: '' and blank text are no arguments where none is needed, and a refusal with a hint where some are; never
    {} for required ones.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def nothing() -> str:
        return "done"

    @tower.tool(independent=True)
    async def city(city: str) -> str:
        stage.started["city"] += 1
        return city

    texts = ["", "  ", "{}", "null", '{"city": "San Fra']
    assert [one.ok for one in run_batch(stage, tower, [Call("nothing", text) for text in texts])][:3] == [True] * 3
    done = run_batch(stage, tower, [*(Call("city", text) for text in texts), Call("nothing", "")])
    assert codes(done) == [*["invalid_arguments"] * 5, None]
    assert stage.started["city"] == 0
    assert all(result.retryable == "no" or result.message for result in done)


# ==================================================================== threads


def test_p31_sync_handlers_run_on_our_own_threads(stage: Stage) -> None:
    """P-31, issue item 4: five sync calls run side by side on daemon threads that say whose they are; the loop and
    its default executor are left alone.
    """
    tower = stage.tower()
    seen: list[threading.Thread] = []
    beats: list[float] = []

    @tower.tool(independent=True)
    def t() -> str:
        seen.append(threading.current_thread())
        return stage.sync_work(stage.loop, "t", 0.2)

    async def heartbeat() -> None:
        while True:
            beats.append(here().time())
            await asyncio.sleep(0.01)

    async def main() -> None:
        loop = stage.loop = here()
        beating = asyncio.ensure_future(heartbeat())
        async with tower.run() as run:
            assert (await run.execute([Call("t", {})] * 5)).ok
            assert loop.time() == pytest.approx(0.2)
        beating.cancel()
        await asyncio.wait([beating])
        assert loop._default_executor is None  # type: ignore[attr-defined]

    stage.run(main())
    assert stage.peak == 5
    assert len(set(seen)) == 5
    assert all(thread.daemon and thread.name.startswith("towerman-worker-") for thread in seen)
    assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 0.05


def test_threads_do_not_count_when_nothing_is_at_work(stage: Stage) -> None:
    """G12: threads are used again by later calls, and end when the tower is closed."""
    tower = stage.tower()

    @tower.tool(writes="k")
    def work() -> str:
        return stage.sync_work(stage.loop, "work", 0.1)

    async def main() -> None:
        stage.loop = here()
        async with tower:
            async with tower.run() as run:
                assert (await run.execute([Call("work", {})] * 5)).ok
            assert tower.statistics().threads == 1

    stage.run(main())
    until(lambda: not tower.statistics().threads)
    tower._closed = False  # so that the look afterwards can ask for its capacity


def test_a_sync_handler_can_see_that_it_was_cancelled(stage: Stage) -> None:
    """R-80: a thread cannot be stopped, but `ctx.cancelled` tells it, and `ctx.deadline` when its time is over."""
    tower = stage.tower(timeout=3.0)
    saw: list[tuple[bool, float]] = []

    @tower.tool(independent=True)
    def watch(ctx: Context[None]) -> str:
        while not ctx.cancelled:
            saw.append((ctx.cancelled, ctx.deadline))
            stage.rest(stage.loop, 0.5)
        saw.append((ctx.cancelled, ctx.deadline))
        return "stopped by myself"

    async def main() -> None:
        stage.loop = here()
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("watch", {})]))
            await asyncio.sleep(0.7)
            run.cancel("stop")
            assert codes(await task) == ["cancelled"]
        await stage.settled(tower)
        assert here().time() == pytest.approx(1.0, abs=0.11)

    stage.run(main())
    assert saw[-1] == (True, 3.0)


def test_a_system_without_threads_answers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1, G3: where the system gives no thread, that call says so and never started; others go on."""
    tower = stage.tower()

    @tower.tool(independent=True)
    def sync() -> str:
        return "never"

    @tower.tool(independent=True)
    async def on_loop() -> str:
        return "done"

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        done = run_batch(stage, tower, [Call("sync", {}), Call("on_loop", {})])
    assert codes(done) == ["handler_error", None]
    assert (done[0].started, done[0].applied) == (False, "no")
    assert "thread" in done[0].message


# ==================================================================== kinds of handlers


class Calls:
    """Handlers that are not plain functions."""

    def method(self, x: int) -> int:
        return x + 1

    async def amethod(self, x: int) -> int:
        return x + 2

    @staticmethod
    async def static(x: int) -> int:
        return x + 3

    async def __call__(self, x: int) -> int:
        return x + 4


def test_handlers_of_every_kind(stage: Stage) -> None:
    """API: functions, methods, partials, callable objects, functions that return an awaitable; on the loop and on a
    thread.
    """
    tower = stage.tower(max_calls_per_batch=50)
    where: dict[str, str] = {}

    async def coroutine(x: int) -> int:
        where["coroutine"] = threading.current_thread().name
        await asyncio.sleep(0)
        return x

    def returns_awaitable(x: int) -> Awaitable[int]:
        where["awaitable"] = threading.current_thread().name
        return coroutine(x)

    def plain(x: int) -> int:
        where["plain"] = threading.current_thread().name
        return x

    one = Calls()
    handlers: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
        "method": (one.method, {}, 1),
        "amethod": (one.amethod, {}, 2),
        "static": (Calls.static, {}, 3),
        "object": (one, {}, 4),
        "partial": (functools.partial(plain), {}, 0),
        "apartial": (functools.partial(coroutine), {}, 0),
        "plain_on_loop": (plain, {"run_in": "loop"}, 0),
        "awaitable_on_loop": (returns_awaitable, {"run_in": "loop"}, 0),
        "awaitable_in_thread": (returns_awaitable, {}, 0),
        "coroutine_in_thread": (coroutine, {"run_in": "thread"}, 0),
    }
    for name, (handler, options, _) in handlers.items():
        tower.add_tool(handler, name=name, independent=True, **options)
    done = run_batch(stage, tower, [Call(name, {"x": 10}) for name in handlers], max_concurrency=1)
    assert {result.tool: result.value for result in done} == {
        name: 10 + plus for name, (_, _, plus) in handlers.items()
    }
    run_batch(stage, tower, [Call("plain_on_loop", {"x": 1})])
    assert where["plain"] == threading.main_thread().name
    run_batch(stage, tower, [Call("coroutine_in_thread", {"x": 1})])
    assert where["coroutine"].startswith("towerman-worker")


def test_s15_a_direct_call_is_a_plain_call(stage: Stage) -> None:
    """S15: a decorated function stays what it was: calling it is not admitted, counted or changed."""
    tower = stage.tower(max_concurrency=1)

    @tower.tool(independent=True)
    def plain(x: int) -> int:
        return x + 1

    assert plain(1) == 2
    assert tower.statistics().outcomes.get("ok", 0) == 0


def test_what_a_handler_may_know_of_its_call(stage: Stage) -> None:
    """API: Context: run, call, tenant, deps, attempt, key, deadline; its repr shows no argument."""
    tower = stage.tower(timeout=7.0)
    seen: list[Context[dict[str, int]]] = []

    @tower.tool(independent=True)
    async def work(x: int, ctx: Context[dict[str, int]]) -> str:
        seen.append(ctx)
        return "done"

    calls = [Call("work", {"x": 1}), Call("work", {"x": 2}, "id-2", idempotency_key="key-2")]
    assert run_batch(stage, tower, calls, run_id="run-1", tenant="ann", deps={"db": 5}).ok
    first, second = seen
    assert (first.run_id, first.tenant, first.deps, first.index, first.call_id) == ("run-1", "ann", {"db": 5}, 0, "")
    assert (second.index, second.call_id, second.idempotency_key, second.attempt) == (1, "id-2", "key-2", 1)
    assert first.idempotency_key not in (None, "", "key-2")
    assert first.deadline == 7.0
    assert not first.cancelled
    assert repr(second) == "Context(run_id='run-1', index=1)"
    assert "ctx" not in json.dumps(tower.schemas("towerman"))


def test_a_handler_may_use_the_tower(stage: Stage) -> None:
    """G2, R-61: a handler looks at the statistics, declares a tool, and runs a batch of its own, also where nothing is
    free.
    """
    tower = stage.tower(max_concurrency=2, max_wait=1.0)

    @tower.tool(independent=True)
    async def leaf() -> str:
        return await stage.work("leaf", 0.1)

    @tower.tool(independent=True)
    async def parent(n: int) -> list[str | None]:
        assert tower.statistics().running >= 1
        tower.add_tool(leaf, name=f"leaf{n}", independent=True)
        return codes(await tower.execute([Call("leaf", {}), Call(f"leaf{n}", {})]))

    assert run_batch(stage, tower, [Call("parent", {"n": 1})])[0].value == [None, None]
    done = run_batch(stage, tower, [Call("parent", {"n": 2}), Call("parent", {"n": 3})])
    assert [result.value for result in done] == [[None, None]] * 2
    assert stage.peak <= 2


# ==================================================================== context variables, spans, tasks

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE", default="nowhere")


def test_p91_context_variables(stage: Stage) -> None:
    """P-91: four async and four sync calls, one of each queued: what the caller set is seen in all, what one sets is
    seen by no other nor by the caller.
    """
    tower = stage.tower(run_concurrency=7)
    seen: list[str] = []

    @tower.tool(independent=True)
    async def on_loop(n: int) -> None:
        seen.append(PLACE.get())
        PLACE.set(f"async {n}")
        await asyncio.sleep(0.1)
        assert PLACE.get() == f"async {n}"

    @tower.tool(independent=True)
    def in_thread(n: int) -> None:
        seen.append(PLACE.get())
        PLACE.set(f"sync {n}")
        stage.rest(stage.loop, 0.1)
        assert PLACE.get() == f"sync {n}"

    async def main() -> None:
        stage.loop = here()
        async with tower.run() as run:
            PLACE.set("the caller")
            done = await run.execute([Call(("on_loop", "in_thread")[n % 2], {"n": n}) for n in range(8)])
            assert done.ok
            assert PLACE.get() == "the caller"

    stage.run(main())
    assert seen == ["the caller"] * 8


def test_p91_the_active_span_is_seen_in_every_handler(stage: Stage) -> None:
    """P-91: eight spans opened in async and sync handlers, one queued, are all children of the span that was active
    around the batch.
    """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    tower = stage.tower(run_concurrency=7)

    @tower.tool(independent=True)
    async def on_loop(n: int) -> None:
        with tracer.start_as_current_span(f"async {n}"):
            await asyncio.sleep(0.1)

    @tower.tool(independent=True)
    def in_thread(n: int) -> None:
        assert trace.get_current_span().get_span_context().is_valid
        with tracer.start_as_current_span(f"sync {n}"):
            stage.rest(stage.loop, 0.1)

    async def main() -> None:
        stage.loop = here()
        async with tower.run() as run:
            with tracer.start_as_current_span("the batch"):
                assert (await run.execute([Call(("on_loop", "in_thread")[n % 2], {"n": n}) for n in range(8)])).ok

    stage.run(main())
    spans = exporter.get_finished_spans()
    (batch,) = [span for span in spans if span.name == "the batch"]
    children = [span for span in spans if span is not batch]
    assert len(children) == 8
    assert batch.context is not None
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == batch.context.span_id


def test_own_task_false_shares_a_task_while_the_context_stays(stage: Stage) -> None:
    """API: own_task=False: calls of one batch that follow one another run in one task, until a handler changes its
    context: the next sees nothing of it.
    """
    tower = stage.tower(run_concurrency=1)
    tasks: list[asyncio.Task[Any] | None] = []
    seen: list[str] = []

    @tower.tool(independent=True, own_task=False)
    async def work(n: int) -> None:
        tasks.append(asyncio.current_task())
        seen.append(PLACE.get())
        if n == 2:
            PLACE.set("changed by 2")
        if n == 4:
            token = PLACE.set("for a moment")
            PLACE.reset(token)
        await asyncio.sleep(0.1)

    async def main() -> None:
        PLACE.set("the caller")
        async with tower.run() as run:
            assert (await run.execute([Call("work", {"n": n}) for n in range(6)])).ok

    stage.run(main())
    assert seen == ["the caller"] * 6
    assert tasks[0] is tasks[1] is tasks[2]
    assert tasks[3] is not tasks[2]
    assert tasks[3] is tasks[4] is tasks[5]


def test_own_task_true_gives_each_call_its_own(stage: Stage) -> None:
    """API: by default no two calls share a task."""
    tower = stage.tower(run_concurrency=1)
    tasks: list[asyncio.Task[Any] | None] = []

    @tower.tool(independent=True)
    async def work() -> None:
        tasks.append(asyncio.current_task())

    run_batch(stage, tower, [Call("work", {})] * 4)
    assert len(set(map(id, tasks))) == 4


class Incomparable:
    """Like an array: it does not let itself be compared to a truth value."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


ARRAY: contextvars.ContextVar[object] = contextvars.ContextVar("ARRAY")


def test_a_context_that_cannot_be_compared(stage: Stage) -> None:
    """G1: own_task=False and a handler that sets a variable to something incomparable: the call is answered, the next
    gets a task of its own.
    """
    tower = stage.tower(run_concurrency=1)

    @tower.tool(independent=True, own_task=False)
    async def work() -> str:
        ARRAY.set(Incomparable())
        return "done"

    async def main() -> None:
        ARRAY.set(Incomparable())
        async with tower.run() as run:
            assert (await run.execute([Call("work", {})] * 4)).ok

    stage.run(main())


def test_own_task_false_and_failures(stage: Stage) -> None:
    """P-25: calls that share a task fail, are refused and time out each for itself."""
    tower = stage.tower(run_concurrency=1, timeout=1.0)

    @tower.tool(independent=True, own_task=False)
    async def work(n: int) -> int:
        if n == 1:
            raise ValueError
        if n == 3:
            await asyncio.sleep(5)
        return n

    done = run_batch(stage, tower, [Call("work", {"n": n}) for n in range(6)])
    assert codes(done) == [None, "handler_error", None, "handler_timeout", None, None]


@pytest.mark.parametrize("style", ["old", "new", "broken"])
def test_a_loop_with_a_task_factory(stage: Stage, style: str) -> None:
    """G1, P-91: a loop whose task factory knows no context=, or fails: calls get their context, or an answer."""
    tower = stage.tower()
    seen: list[str] = []

    @tower.tool(independent=True)
    async def work() -> str:
        seen.append(PLACE.get())
        return "done"

    def old(loop: Any, coro: Any) -> Any:
        return asyncio.Task(coro, loop=loop)

    def new(loop: Any, coro: Any, **options: Any) -> Any:
        return asyncio.Task(coro, loop=loop, **options)

    def broken(loop: Any, coro: Any, **options: Any) -> Any:
        raise MemoryError

    async def main() -> BatchResult:
        PLACE.set("the caller")
        loop = here()
        async with tower.run() as run:
            loop.set_task_factory({"old": old, "new": new, "broken": broken}[style])
            try:
                return await run.execute([Call("work", {})] * 3)
            finally:
                loop.set_task_factory(None)

    done = stage.run(main())
    if style == "broken":
        assert codes(done) == ["handler_error"] * 3
        assert not any(result.started for result in done)
    else:
        assert done.ok
        assert seen == ["the caller"] * 3


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="eager tasks came with Python 3.12")
@pytest.mark.parametrize("own_task", [True, False])
def test_eager_tasks(stage: Stage, own_task: bool) -> None:
    """F2: with eager tasks a handler that does not wait ends while it is being started: 2,000 of them one after
    another, in order, without recursion.
    """
    tower = stage.tower(run_concurrency=1, max_calls_per_batch=2_000)

    @tower.tool(independent=True, own_task=own_task)
    async def work(n: int) -> int:
        if n % 500 == 7:
            await asyncio.sleep(0.1)
        return n

    async def main() -> None:
        loop = here()
        loop.set_task_factory(asyncio.eager_task_factory)
        async with tower.run() as run:
            done = await run.execute([Call("work", {"n": n}) for n in range(2_000)])
            assert [result.value for result in done] == list(range(2_000))
        loop.set_task_factory(None)

    stage.run(main())


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="eager tasks came with Python 3.12")
def test_an_eager_handler_cancels_its_own_run(stage: Stage) -> None:
    """F2, R-80: a handler that cancels its run in its eager first step is told to stop like any other."""
    tower = stage.tower(run_concurrency=2)

    @tower.tool(independent=True)
    async def work(ctx: Context[Any]) -> str:
        if ctx.index == 0:
            ctx.deps[0].cancel("enough")
        return await stage.work("work", 10)

    async def main() -> None:
        loop = here()
        loop.set_task_factory(asyncio.eager_task_factory)
        deps: list[Any] = []
        async with tower.run(deps=deps) as run:
            deps.append(run)
            assert codes(await run.execute([Call("work", {})] * 3)) == ["cancelled"] * 3
        loop.set_task_factory(None)

    stage.run(main())
    assert stage.clock.value == 0
    assert stage.started["work"] == 1


# ==================================================================== loops


def test_p94_one_tower_on_several_loops_one_after_another(stage: Stage) -> None:
    """P-94: a tower made at import, used by one asyncio.run after another: it works, and its limits still count."""
    tower = stage.tower(max_concurrency=2)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 0.1)

    for turn in range(3):
        before = stage.clock.value
        assert run_batch(stage, tower, [Call("work", {})] * 6).ok
        assert stage.clock.value - before == pytest.approx(0.3), turn
    assert stage.peak == 2


def test_p95_one_tower_on_two_loops_at_once(stage: Stage) -> None:
    """P-95, R-49: two loops in two threads hand in twenty calls each, at once, limit 5: the limit holds over both,
    and wake-ups reach the right loop.
    """
    tower = stage.tower(_clock=None, max_concurrency=5, run_concurrency=20)
    lock = threading.Lock()
    running = peak = 0
    where: dict[str, set[int]] = {"a": set(), "b": set()}
    failures: list[BaseException] = []
    both = threading.Barrier(2)

    async def step(name: str) -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        for _ in range(20):
            await asyncio.sleep(0)
        with lock:
            running -= 1
        where[name].add(threading.get_ident())

    @tower.tool(independent=True)
    async def work(name: str) -> str:
        await step(name)
        return name

    @tower.tool(writes="k")
    async def write(name: str) -> str:
        await step(name)
        return name

    async def main(name: str) -> None:
        both.wait(30)
        async with tower.run() as run:
            for _ in range(5):
                calls = [Call(("work", "write")[n % 5 == 0], {"name": name}) for n in range(20)]
                async with asyncio.timeout(60):
                    done = await run.execute(calls)
                assert done.ok, codes(done)

    def on_thread(name: str) -> None:
        try:
            asyncio.run(main(name))
        except BaseException as failure:
            failures.append(failure)

    crowd = [threading.Thread(target=on_thread, args=(name,)) for name in "ab"]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(90)
        assert not thread.is_alive()
    assert not failures, failures
    assert peak == 5
    assert len(where["a"]) == len(where["b"]) == 1
    assert where["a"] != where["b"]
    assert tower.statistics().outcomes["ok"] == 200


def test_a_run_is_cancelled_and_closed_from_another_thread(stage: Stage) -> None:
    """API: `run.cancel` may be called from any thread; a run may be closed on another loop than the one its batch
    runs on.
    """
    tower = stage.tower(_clock=None)
    entered = threading.Event()
    outcome: list[BatchResult] = []

    @tower.tool(independent=True)
    async def forever() -> None:
        entered.set()
        await asyncio.Event().wait()

    for closes in (False, True):
        entered.clear()
        run = tower.run(max_concurrency=1)  # so that one runs and one waits

        async def main(run: Any = run) -> None:
            outcome.append(await run.execute([Call("forever", {})] * 2))

        thread = threading.Thread(target=lambda main=main: asyncio.run(main()))
        thread.start()
        assert entered.wait(30)
        if closes:
            asyncio.run(run.aclose())
        else:
            run.cancel("from outside")
        thread.join(30)
        assert not thread.is_alive()
        assert codes(outcome[-1]) == ["cancelled", "cancelled"]
        if not closes:
            asyncio.run(run.aclose())
    assert not tower._core.gate._flows


# ==================================================================== what is told

CANARY = "S3CRET-canary-7391"


def test_g8_no_argument_leaves_by_a_side_door(
    stage: Stage, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """G8, P-92, R-130: a secret in arguments, resource keys, values, exceptions and invented names is in no event,
    message, repr, log or statistic.
    """
    caplog.set_level(logging.DEBUG)
    events: list[Event] = []
    tower = stage.tower(
        max_concurrency=2, run_concurrency=1, observers=[events.append], max_wait=9.0, timeout=2.0, grace=0.1
    )

    @tower.tool(writes="ticket:{secret}")
    async def write(secret: str, fails: bool = False) -> str:
        await stage.work("write", 0.5)
        if fails:
            raise ValueError(secret)
        return "done"

    @tower.tool(reads="ticket:{secret}")
    def read(secret: str) -> str:
        raise LookupError(f"{secret} is not here")

    @tower.tool(independent=True)
    async def deaf(secret: str) -> None:
        await stage.stubborn("deaf", 4)

    @tower.tool(independent=True)
    async def odd(secret: str) -> object:
        return {CANARY: object()}

    calls = [
        Call("write", {"secret": CANARY}, "1"),
        Call("write", json.dumps({"secret": CANARY, "fails": True}), "2"),
        Call("read", {"secret": CANARY}, "3"),
        Call("deaf", {"secret": CANARY}, "4"),
        Call("odd", {"secret": CANARY}, "5"),
        Call(CANARY, {}, "6"),
        Call("write", f'{{"secret": "{CANARY}', "7"),
        Call("write", {"secret": CANARY, CANARY: 1}, "8"),
        Call("write", {"secret": {"no": CANARY}}, "9"),
        Call("write", {"secret": CANARY}, "10", ["2"]),
    ]

    async def main() -> BatchResult:
        async with tower.run("run-1") as run, tower.run("run-2") as other:
            beside = [Call("write", {"secret": CANARY}), Call("deaf", {"secret": CANARY})]
            task = asyncio.ensure_future(other.execute(beside))
            await asyncio.sleep(0.1)
            done = await run.execute(calls)
            await task
        await stage.settled(tower)
        return done

    done = stage.run(main())
    assert tower.flush(30)
    assert len({result.code for result in done}) >= 6
    told = "\n".join(
        [
            *(result.message for result in done),
            *(result.content for result in done if not result.ok),
            *(repr(result) for result in done),
            *(str(result.waited_for) for result in done),
            repr(done),
            done.timeline(),
            repr(done.spans()),
            *(json.dumps(event.as_dict()) for event in events),
            *(repr(event) for event in events),
            *(repr(call) for call in calls),
            repr(tower),
            repr(tower.statistics()),
            repr(tower._core.gate),
            caplog.text,
            *capsys.readouterr(),
        ]
    )
    assert CANARY not in told
    assert "ticket:{secret}" in told


def test_r129_r131_the_story_of_a_call(stage: Stage) -> None:
    """R-87, R-129, R-131 to R-133: each step is an event of its own, with run, batch, index, tool, times and reason."""
    events: list[Event] = []
    tower = stage.tower(pools={"crm": 1}, observers=[events.append])

    @tower.tool(independent=True, pools=["crm"])
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run("run-1") as run:
            task = asyncio.ensure_future(run.execute([Call("work", {}, f"c{n}") for n in range(3)]))
            await asyncio.sleep(1.5)
            run.cancel("the user pressed stop")
            await task

    stage.run(main())
    assert tower.flush(30)
    assert {(event.run_id, event.batch) for event in events} == {("run-1", 1)}
    story = [(round(event.time, 6), event.kind) for event in events if event.index == 1]
    assert story == [(0.0, "waiting"), (1.0, "admitted"), (1.0, "started"), (1.5, "finished")]
    by_kind = {event.kind: event for event in events if event.index == 1}
    assert by_kind["waiting"].waiting_for == "pool crm"
    assert by_kind["admitted"].waited == pytest.approx(1.0)
    assert by_kind["admitted"].scopes == {"process": "process", "run": "run", "crm": "process"}
    assert (by_kind["finished"].outcome, by_kind["finished"].code) == ("cancelled", "cancelled")
    assert by_kind["finished"].reason == "the user pressed stop"
    assert by_kind["finished"].ran == pytest.approx(0.5)
    last = [event for event in events if event.index == 2][-1]
    assert (last.kind, last.outcome, last.reason) == ("rejected", "cancelled", "the user pressed stop")
    assert [event.kind for event in events if event.index is None] == ["batch_started", "batch_finished"]
    assert events[0].wall is not None


def test_r132_pools_are_counted(stage: Stage) -> None:
    """R-132: held, most held, queued are seen for each pool while it goes on."""
    tower = stage.tower(pools={"crm": 2}, run_concurrency=5)

    @tower.tool(independent=True, pools=["crm"])
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run("run-1") as run, tower.run("run-2") as other:
            one = asyncio.ensure_future(run.execute([Call("work", {})] * 4))
            two = asyncio.ensure_future(other.execute([Call("work", {})] * 2))
            await asyncio.sleep(0.5)
            seen = tower.statistics()
            crm = seen.pools["crm"]
            assert (crm.limit, crm.held, crm.peak, crm.scope) == (2, 2, 2, "process")
            assert crm.queued == seen.waiting >= 2
            assert seen.waiting + seen.behind == 4
            assert (seen.running, seen.runs) == (2, 2)
            assert {"run:run-1", "run:run-2"} <= set(seen.pools)
            await one
            await two

    stage.run(main())


def test_an_observer_that_fails_or_sleeps_disturbs_nobody(stage: Stage) -> None:
    """R-131, trace: a broken observer is counted; a blocked one delays no call."""
    blocked = threading.Event()

    def broken(event: Event) -> None:
        raise RuntimeError("no")

    def slow(event: Event) -> None:
        assert blocked.wait(30)

    tower = stage.tower(observers=[broken, slow])

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    assert run_batch(stage, tower, [Call("work", {})] * 3).ok
    blocked.set()
    assert tower.flush(30)
    seen = tower.statistics()
    assert 2 * seen.observer_failures == seen.events_sent > 0
    assert seen.events_dropped == 0


def test_p91_what_observers_lost_is_in_the_towers_counts(stage: Stage, tmp_path: Path) -> None:
    """P-91: events that an observer got and could not keep, and those that it did not get before it was removed, are
    counted by the tower, also after the observer has gone; a method can be removed as it was added.
    """
    held = threading.Event()
    entered = threading.Event()
    seen: list[Event] = []

    class Stuck:
        def watch(self, event: Event) -> None:
            entered.set()
            assert held.wait(30)

    stuck, file = Stuck(), JsonlObserver(tmp_path / "trace.jsonl")
    tower = stage.tower(observers=[stuck.watch, file, seen.append], grace=0)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    file.close()
    assert run_batch(stage, tower, [Call("work", {})] * 3).ok
    assert entered.wait(30)
    tower.remove_observer(stuck.watch)
    assert tower.flush(30)
    events = len(seen)
    assert events > 10
    for _ in range(2):
        counts = tower.statistics()
        assert (counts.events_lost, counts.events_dropped, counts.events_pending) == (events, events - 1, 0)
        assert counts.events_sent == 2 * events + 1
        tower.remove_observer(file)
    held.set()


# ==================================================================== long batches


def test_f6_long_batches_give_the_loop_its_turn(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: preparing, starting and cancelling a long batch is done in slices, with turns of the loop between them."""
    monkeypatch.setattr(towerman.runner.intake, "SLICE", -1.0)
    tower = stage.tower(max_calls_per_batch=2_000, run_concurrency=2)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run() as run:
            loop = here()
            before = loop.turns
            task = asyncio.ensure_future(run.execute([Call("work", {})] * 2_000))
            while not tower.statistics().running:
                await asyncio.sleep(0)
            assert loop.turns - before > 20
            await asyncio.sleep(0.5)
            before = loop.turns
            run.cancel("enough")
            done = await task
            assert loop.turns - before > 20
            assert len(done) == 2_000
            assert {result.code for result in done} == {"cancelled"}

    stage.run(main())


def test_a_batch_is_cancelled_while_it_is_prepared(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-52, S16: cancelled between two slices of its preparation: nothing of it starts, nothing of it waits."""
    monkeypatch.setattr(towerman.runner.intake, "SLICE", -1.0)
    for kind in ("independent", "chain"):
        tower = stage.tower(max_calls_per_batch=500)

        @tower.tool(**({"independent": True} if kind == "independent" else {"writes": "k"}))
        async def work() -> str:
            return await stage.work("work", 1)

        async def main(tower: Tower = tower) -> None:
            async with tower.run() as run:
                task = asyncio.ensure_future(run.execute([Call("work", {})] * 500))
                for _ in range(3):
                    await asyncio.sleep(0)
                run.cancel("never mind")
                done = await task
                assert {result.code for result in done} == {"cancelled"}

        stage.run(main())
    assert not stage.started


def test_wide_batches_of_threads(stage: Stage) -> None:
    """F11: a hundred sync calls on eight places: eight threads at most, all answered."""
    tower = stage.tower(max_concurrency=8, run_concurrency=100, max_calls_per_batch=100)

    @tower.tool(independent=True)
    def work(n: int) -> int:
        with stage.on("work"):
            return n

    done = run_batch(stage, tower, [Call("work", {"n": n}) for n in range(100)])
    assert [result.value for result in done] == list(range(100))
    assert stage.peak <= 8
    assert tower._core.workers.statistics()["peak"] <= 8


def test_latches_do_not_hang(stage: Stage) -> None:
    """Of the kit: a thread that waits for a latch does not stop time, and a latch that nobody opens is not waited for
    for ever.
    """
    tower = stage.tower(timeout=1.0)
    latches: list[Latch] = []

    @tower.tool(independent=True)
    def wait() -> str:
        latches[0].wait()
        return "late"

    async def main() -> None:
        latches.append(Latch(here()))
        async with tower.run() as run:
            assert codes(await run.execute([Call("wait", {})])) == ["handler_timeout"]
            latches[0].open()
        await stage.settled(tower)

    stage.run(main())


@pytest.mark.parametrize("name", ["towerman.runner.intake.Plan", "towerman.core.near_names"])
def test_a_fault_of_our_own_is_told_after_sealing(stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """G1: something of Towerman's own breaks while a batch is prepared: every call has a result, then the fault is
    raised.
    """
    tower = stage.tower()

    def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError

    @tower.tool(writes="k")
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run() as run:
            with monkeypatch.context() as patched:
                patched.setattr(name, broken)
                with pytest.raises(ZeroDivisionError):
                    await run.execute([Call("work", {}), Call("nobody", {}), Call("work", {})])
            assert run.last_batch is not None
            sound(run.last_batch, [None] * 3)
            assert "ZeroDivisionError" in run.last_batch[2].message
            assert (await run.execute([Call("work", {})])).ok

    stage.run(main())
    assert stage.started["work"] == 1


def test_g1_a_fault_of_its_own_seals_the_batch_and_is_raised(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1, P-28: a fault inside Towerman at the end of a call hangs nobody: every call has a result, then it is
    raised.
    """
    tower = stage.tower(max_concurrency=2)

    @tower.tool(independent=True)
    async def work(seconds: float) -> str:
        return await stage.work("work", seconds)

    shell = towerman.runner.shell.Shell
    end = shell._end

    def broken(self: towerman.runner.shell.Shell, job: Any, *rest: Any) -> None:
        if job.index == 1:
            raise ArithmeticError("a fault")
        end(self, job, *rest)

    monkeypatch.setattr(shell, "_end", broken)

    async def main() -> None:
        async with tower.run() as run:
            with pytest.raises(ArithmeticError):
                await run.execute([Call("work", {"seconds": seconds}) for seconds in (3, 1, 1, 1)])
            assert run.last_batch is not None
            codes = [result.code for result in run.last_batch]
            assert codes == ["cancelled", "handler_error", "cancelled", "cancelled"]

    stage.run(main())


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), KeyboardInterrupt),
        (BaseExceptionGroup("g", [ValueError(), BaseExceptionGroup("h", [SystemExit(7)])]), SystemExit),
        (BaseExceptionGroup("g", [SystemExit(7), KeyboardInterrupt()]), KeyboardInterrupt),
        (BaseExceptionGroup("g", [asyncio.CancelledError(), ValueError()]), None),
    ],
    ids=["interrupt", "exit within", "both", "neither"],
)
@pytest.mark.parametrize("in_thread", [False, True])
def test_r84_an_exit_inside_a_group_leaves_after_sealing(
    stage: Stage, raised: BaseException, told: type[BaseException] | None, in_thread: bool
) -> None:
    """R-84, G1: a task group wraps an interrupt in a group: it ends the batch and reaches the caller like a bare one; a
    group without one is an ordinary failure.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def grouped() -> None:
        raise raised

    @tower.tool(independent=True)
    def grouped_in_thread() -> None:
        raise raised

    @tower.tool(independent=True)
    async def beside() -> str:
        return await stage.work("beside", 5)

    calls = [Call("grouped_in_thread" if in_thread else "grouped", {}), Call("beside", {})]

    async def main() -> None:
        async with tower.run() as run:
            if told is None:
                await run.execute(calls)
            else:
                with pytest.raises(told):
                    await run.execute(calls)
            assert run.last_batch is not None
            assert codes(run.last_batch) == ["handler_error", None if told is None else "cancelled"]

    stage.run(main())


def test_a_very_deep_group_is_looked_through(stage: Stage) -> None:
    """R-84: groups within groups, deeper than the interpreter's stack, are told like any other."""
    tower = stage.tower()
    error: BaseException = KeyboardInterrupt()
    for _ in range(5_000):
        error = BaseExceptionGroup("g", [error])

    @tower.tool(independent=True)
    async def deep() -> None:
        raise error

    with pytest.raises(KeyboardInterrupt):
        run_batch(stage, tower, [Call("deep", {})])


class _Hostile(str):
    """Text whose every use fails."""

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise ZeroDivisionError

    def __getitem__(self, key: Any) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("field", ["tool", "id", "idempotency_key", "needs", "arguments"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_fields_of_a_call_that_cannot_be_used(stage: Stage, field: str, wrapped: bool) -> None:
    """G1: a Call or a Batch made by hand with fields that are nothing of what they should be is refused by name before
    anything runs, or answered; it never hangs and never fails half-way.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    told: list[str] = []
    for value in (_Hostile("x"), object(), 7, b"x", ["x"], float("nan")):
        fields: dict[str, Any] = {"tool": "work", "arguments": {}, field: value}
        calls: Any = [Call("work", {}), Call(**fields)]

        async def main(calls: Any = calls) -> None:
            async with tower.run() as run:
                try:
                    done = await run.execute(Batch(tuple(calls)) if wrapped else calls)
                except InputError as caught:
                    told.append(str(caught))
                    assert run.last_batch is None
                else:
                    assert len(done) == 2

        stage.run(main())
    assert all("[1]" in one for one in told)
    assert bool(told) == (field not in ("tool", "arguments"))


@pytest.mark.parametrize("calls", [7, None, "work", [7], ("work",), [Call("work", {})]])
def test_a_batch_made_by_hand_is_looked_through(stage: Stage, calls: Any) -> None:
    """G1: the calls of a Batch are checked like those of a list."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return "done"

    if isinstance(calls, list) and isinstance(calls[0], Call):
        assert run_batch(stage, tower, Batch(calls)).ok  # type: ignore[arg-type]
    else:
        with pytest.raises(InputError):
            run_batch(stage, tower, Batch(calls))  # type: ignore[arg-type]
