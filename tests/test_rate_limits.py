"""Rate limits by whole towers: S7, R-72, R-90 to R-94, R-11, R-122, P-40, P-41, P-43, P-44.

Time is virtual, so instants are exact. After every test `stage` asks each tower for its whole capacity again.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import CountedWorkers, Stage, codes, gate_of, on_stage, run_batch, sound

from towerman import Call, Context, Event, PolicyError, Pool, Rate, RateLimited, Tower
from towerman.policy import rate_of
from towerman.testing import Rehearsal

stage = pytest.fixture(on_stage)


def clocked(stage: Stage, starts: list[float], seconds: float = 0.0) -> Callable[..., Any]:
    """A handler that notes when its first line was reached."""

    async def handler() -> str:
        starts.append(stage.clock.value)
        if seconds:
            await asyncio.sleep(seconds)
        return "fine"

    return handler


def wide(stage: Stage, **options: Any) -> Tower:
    """A tower in whose way nothing stands but what a test declares."""
    return stage.tower(
        **{"max_concurrency": 2000, "run_concurrency": 2000, "max_calls_per_batch": 2000, "max_wait": 1e6, **options}
    )


def most_in_a_window(starts: list[float], seconds: float) -> int:
    """The most starts that any half-open window of that length holds."""
    return max(sum(first <= one < first + seconds - 1e-9 for one in starts) for first in starts)


# --- exact windows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_p40_ten_at_once_start_three_by_three(together: bool, stage: Stage) -> None:
    """P-40, R-90, S7: a rate of 3 in 3 s lets ten start at 0,0,0,3,3,3,6,6,6,9, together or one by one."""
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate="3/3s")

    async def main() -> None:
        async with tower.run() as run:
            if together:
                await run.execute([Call("q", {})] * 10)
            else:
                await asyncio.gather(*(run.execute([Call("q", {})]) for _ in range(10)))

    stage.run(main())
    assert starts == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_r91_four_places_and_two_in_a_second(stage: Stage) -> None:
    """R-91, R-92, R-72: with 4 free places and "2/s" no window of one second ever holds more than 2 starts: the rate
    counts starts in an interval, the pool counts who is at work.
    """
    tower, starts = wide(stage, pools={"four": 4}), list[float]()
    tower.add_tool(clocked(stage, starts, 0.3), name="q", independent=True, pools=["four"], rate="2/s")
    run_batch(stage, tower, [Call("q", {})] * 9)
    assert most_in_a_window(starts, 1.0) == 2
    assert starts == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert tower.statistics().pools["four"].peak == 2


@pytest.mark.parametrize("late", [0.4, 1.7])
def test_s7_starts_count_from_the_first_line(late: float, stage: Stage) -> None:
    """S7: a call that was let in and whose first line comes late counts from that line; nobody comes into its window
    meanwhile, and whoever waits is woken for it.
    """
    tower, starts = wide(stage), list[float]()
    first = True

    def slow_to_begin(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal first
        task = asyncio.Task(coroutine, loop=loop, **options)
        if first and "_in_task" in str(coroutine):
            first = False
            stage.clock.value += late
        return task

    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate="1/s")

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(slow_to_begin)
        async with tower.run() as run:
            await run.execute([Call("q", {})] * 3)

    stage.run(main())
    assert starts == [late, late + 1, late + 2]


def test_s7_real_time_and_threads_hold_the_window() -> None:
    """S7, R-91: measured by the handlers themselves, on threads and on a real clock, no window holds more."""
    tower = Tower(max_concurrency=64, run_concurrency=64, max_calls_per_batch=100)
    starts: list[float] = []
    lock = threading.Lock()

    @tower.tool(independent=True, rate="4/100ms")
    def q() -> None:
        with lock:
            starts.append(time.monotonic())

    done = tower.execute_sync([Call("q", {})] * 24)
    assert done.ok
    starts.sort()
    # What a handler measures of its own start is a little later than the start; so is what the next one measures.
    assert all(later - first > 0.098 for first, later in zip(starts, starts[4:], strict=False)), starts


@pytest.mark.parametrize("text", ["10/s", "600/min", "10 / sec", "10/1000ms", "36000/h", "864000/day"])
def test_r92_the_same_rate_in_other_words(text: str) -> None:
    """R-92: a rate says starts per interval, in the usual spellings."""
    if text == "864000/day":
        with pytest.raises(PolicyError, match="an exact window remembers each start, so 100000 at most"):
            rate_of("rate", text)
        return
    rate = rate_of("rate", text)
    assert rate.limit / rate.per == pytest.approx(10)


@pytest.mark.parametrize(
    "wrong",
    ["", "10", "10/", "/s", "0/s", "10/0s", "10/00s", "-1/s", "10/fortnight", "1.5/s", "10/s/s", 10, 1.5, True, None,
     [], {"per": 1}, {"limit": 0}, {"limit": 1, "per": 0}, {"limit": 1, "per": 1e-9}, {"limit": 1, "burst": 0},
     {"limit": 2, "reserve": 2}, {"limit": 5, "burst": 2, "reserve": 2}, {"limit": 1, "extra": 1},
     {"limit": True}, {"limit": 1, "per": float("nan")}, {"limit": 1, "per": float("inf")}],
)  # fmt: skip
def test_r51_a_wrong_rate_is_refused_where_it_is_declared(wrong: Any) -> None:
    """R-51: with the place and what is allowed, at a tool, at a pool and in a file alike."""
    with pytest.raises(PolicyError, match="rate"):
        rate_of("rate", wrong)
    if wrong is not None:
        with pytest.raises(PolicyError, match=r"tool 'q': rate"):
            Tower().add_tool(lambda: None, name="q", rate=wrong)
        with pytest.raises(PolicyError, match=r"Pool\.rate"):
            Pool(1, rate=wrong)
        with pytest.raises(PolicyError, match=r"pools\.crm\.rate"):
            Tower({"pools": {"crm": {"permits": 1, "rate": wrong}}})


# --- bursts -----------------------------------------------------------------------------------------------------------


def test_s7_a_burst_and_then_an_even_pace(stage: Stage) -> None:
    """S7: `Rate(10, per=1, burst=3)` lets three start together and then one each 0.1 s."""
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate=Rate(10, per=1.0, burst=3))
    run_batch(stage, tower, [Call("q", {})] * 6)
    assert starts == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])


@given(
    limit=st.integers(1, 5),
    per=st.sampled_from([0.5, 1.0, 3.0]),
    burst=st.sampled_from([None, None, 1, 2, 6]),
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.7, 4.0]), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_s7_no_window_holds_more_whenever_calls_come(
    limit: int, per: float, burst: int | None, gaps: list[float]
) -> None:
    """S7, R-91: calls that come at any instants, from two runs, keep the rate, and none waits for nothing."""
    stage = Stage()
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate=Rate(limit, per=per, burst=burst))

    async def main() -> None:
        async with tower.run() as one, tower.run() as other:
            tasks = []
            for number, gap in enumerate(gaps):
                await asyncio.sleep(gap)
                run = (one, other)[number % 2]
                tasks.append(asyncio.create_task(run.execute([Call("q", {})] * (1 + number % 3))))
            for task in tasks:
                assert (await task).ok

    stage.run(main())
    if burst is None:
        assert most_in_a_window(starts, per) <= limit
    for first, since in enumerate(starts):
        for last in range(first, len(starts)):
            most = burst + (starts[last] - since) * limit / per if burst is not None else None
            assert most is None or last - first + 1 <= most + 1e-6
    tower._courier.close()


# --- keys and scopes --------------------------------------------------------------------------------------------------


def test_p41_four_a_day_on_each_of_ten_keys(stage: Stage) -> None:
    """P-41: 1,000 tries at once with random keys on ten keys of 4 a day let exactly 40 in, a hundred times over."""
    counts: list[int] = []
    for seed in range(100):
        tower = wide(stage)
        rng = Random(seed)
        runs = 0

        async def q() -> None:
            nonlocal runs
            runs += 1

        for key in range(10):
            tower.add_tool(q, name=f"key-{key}", independent=True, rate="4/day", when_busy="reject")
        done = run_batch(stage, tower, [Call(f"key-{rng.randrange(10)}", {}) for _ in range(1000)])
        counts.append(runs)
        assert codes(done).count("rate_limited") == 960
        stage.towers.remove(tower)  # a day would have to pass for its probes
        tower._courier.close()
    assert counts == [40] * 100


def test_r93_a_part_of_the_quota_is_kept_for_others(stage: Stage) -> None:
    """R-93, R-11: with 4 of "10/s" in reserve agents start 6 in a second, and interactive runs still 4 at once."""
    tower = wide(stage, pools={"api": Pool(100, rate=Rate(10, reserve=4))})
    agents, people = list[float](), list[float]()
    tower.add_tool(clocked(stage, agents), name="agent", independent=True, pools=["api"])
    tower.add_tool(clocked(stage, people), name="person", independent=True, pools=["api"])

    async def main() -> None:
        async with tower.run() as agent, tower.run(priority=1) as person:
            background = asyncio.create_task(agent.execute([Call("agent", {})] * 30))
            await asyncio.sleep(0.5)
            await person.execute([Call("person", {})] * 4)
            await background

    stage.run(main())
    assert people == [0.5] * 4, "nobody interactive waits for the agents"
    assert most_in_a_window(agents, 1.0) <= 6
    assert most_in_a_window(agents + people, 1.0) <= 10


def test_r72_a_pools_rate_counts_all_its_tools_and_a_tenants_pool_each_tenant(stage: Stage) -> None:
    """R-72, R-06: a rate on a pool is shared by its tools; with scope="tenant" each tenant has its own."""
    tower = wide(stage, pools={"api": Pool(100, rate="2/s"), "quota": Pool(100, rate="1/s", scope="tenant")})
    shared, own = list[float](), dict[str, list[float]]()
    tower.add_tool(clocked(stage, shared), name="a", independent=True, pools=["api"])
    tower.add_tool(clocked(stage, shared), name="b", independent=True, pools=["api"])

    @tower.tool(independent=True, pools=["quota"])
    async def of_tenant(name: str) -> None:
        own.setdefault(name, []).append(stage.clock.value)

    async def main() -> None:
        async with tower.run(tenant="x") as x, tower.run(tenant="y") as y, tower.run(tenant="x") as again:
            await asyncio.gather(
                x.execute([Call("a", {}), Call("b", {})] * 2),
                *(
                    run.execute([Call("of_tenant", {"name": name})] * 2)
                    for run, name in ((x, "x"), (y, "y"), (again, "x"))
                ),
            )
        async with tower.run(tenant="x") as later:
            await later.execute([Call("of_tenant", {"name": "x"})])

    stage.run(main())
    assert shared == [0, 0, 1, 1]
    assert own == {"x": [0, 1, 2, 3, 4], "y": [0, 1]}, "a tenant that comes back has used what it has used"
    assert set(tower.statistics().rates) == {"api", "quota@tenant:x"}, "what remembers nothing is forgotten"


def test_s7_what_a_rate_remembers_of_tenants_is_forgotten_with_time(stage: Stage) -> None:
    """G12: rates of tenants that are gone are kept as long as they remember something, and no longer."""
    tower = wide(stage, pools={"quota": Pool(100, rate="1/s", scope="tenant", breaker=True)})
    tower.add_tool(clocked(stage, []), name="q", independent=True, pools=["quota"])

    async def main() -> None:
        for number in range(200):
            async with tower.run(tenant=f"t{number}") as run:
                await run.execute([Call("q", {})])
        assert len(gate_of(tower).ledger.meters) == 200
        await asyncio.sleep(1)
        for _ in range(40):
            async with tower.run(tenant="last") as run:
                await run.execute([])
        assert len(gate_of(tower).ledger.meters) <= 2

    stage.run(main())


# --- all or nothing ---------------------------------------------------------------------------------------------------


def test_p43_refused_calls_take_nothing(stage: Stage) -> None:
    """P-43, R-58, R-94: five calls that fail fast over one place: one runs, four are refused, and of the rate of five
    a minute four are left.
    """
    tower, starts = wide(stage), list[float]()
    tower.add_tool(
        clocked(stage, starts, 1.0), name="q", independent=True, max_concurrency=1, rate="5/min", when_busy="reject"
    )

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("q", {})] * 5)
            assert codes(done) == [None, *["concurrency_limit"] * 4]
            assert tower.statistics().rates["tool:q"].started == 1
            for _ in range(4):
                assert (await run.execute([Call("q", {})])).ok
            [refused] = await run.execute([Call("q", {})])
            assert refused.code == "rate_limited"

    stage.run(main())
    assert starts == [0, 1, 2, 3, 4]


def test_p44_a_cancelled_waiter_leaves_no_debt(stage: Stage) -> None:
    """P-44, R-94: rate 1/s; a runs, b and c wait; b is cancelled, d comes: c starts at 1 s and d at 2 s, and a hundred
    rounds of cancelling and coming again leave nothing behind.
    """
    tower = wide(stage)
    starts: dict[str, float] = {}

    @tower.tool(independent=True, rate="1/s", max_queued=3)
    async def q(name: str) -> None:
        starts[name] = stage.clock.value

    async def main() -> None:
        async with tower.run() as run:
            tasks = {name: asyncio.create_task(run.execute([Call("q", {"name": name})])) for name in "abc"}
            await asyncio.sleep(0.5)
            tasks["b"].cancel()
            tasks["d"] = asyncio.create_task(run.execute([Call("q", {"name": "d"})]))
            for _ in range(100):
                ghost = asyncio.create_task(run.execute([Call("q", {"name": "ghost"})]))
                await asyncio.sleep(0.0001)
                ghost.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    stage.run(main())
    assert starts == {"a": 0, "c": 1, "d": 2}


@pytest.mark.parametrize("rate", ["1/10s", Rate(1, per=10, burst=1)])
def test_r94_a_grant_that_never_begins_is_given_back(rate: Any, stage: Stage) -> None:
    """R-94, S7: a call that was granted and is cancelled before its first line gives its start back at once: the next
    one starts in its place.
    """
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate=rate)

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            first = asyncio.create_task(run.execute([Call("q", {})]))
            second = asyncio.create_task(other.execute([Call("q", {})]))
            pace = gate_of(tower).ledger.meters["rate:tool:q"].pace
            while not pace.pending:
                await asyncio.sleep(0)
            assert (pace.pending, starts) == (1, []), "granted, not begun"
            run.cancel("no")
            assert codes(await first) == ["cancelled"]
            assert (await second).ok

    stage.run(main())
    assert starts == [0]


def test_r94_who_waits_for_a_rate_holds_no_place(stage: Stage) -> None:
    """R-94, R-58: with one place in the process, a call that waits for its rate leaves it to another one."""
    tower, starts, others = wide(stage, max_concurrency=1), list[float](), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate="1/10s")
    tower.add_tool(clocked(stage, others), name="other", independent=True)
    run_batch(stage, tower, [Call("q", {}), Call("q", {}), Call("other", {})])
    assert (starts, others) == ([0, 10], [0])


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_r76_a_refusal_says_when_to_come_again(stage: Stage) -> None:
    """R-76, R-117: `rate_limited` at once for who does not wait, and for who would wait in vain, with the seconds; who
    waits and is served by nobody in time gets `wait_timeout`.
    """
    tower, starts = wide(stage, max_wait=5), list[float]()
    tower.add_tool(clocked(stage, starts), name="no", independent=True, rate="1/10s", when_busy="reject")
    tower.add_tool(clocked(stage, starts), name="vain", independent=True, rate="1/10s")
    tower.add_tool(clocked(stage, starts), name="late", independent=True, rate="1/4s", max_wait=5)

    async def main() -> None:
        async with tower.run() as run:
            assert (await run.execute([Call("no", {}), Call("vain", {})])).ok
            await asyncio.sleep(2.5)
            for name in ("no", "vain"):
                [refused] = done = await run.execute([Call(name, {})])
                sound(done, [Call(name, {})])
                assert (refused.code, refused.outcome, refused.retryable) == ("rate_limited", "rejected", "yes")
                assert refused.retry_after == 7.5
                assert refused.waited_for == (f"rate of tool {name}",)
                assert (
                    refused.message
                    == f"Not started: the rate of tool {name} lets no more calls start now. Try again in 7.5 s."
                )
                assert '"retry_after":7.5' in refused.content
            begun = stage.clock.value
            done = await run.execute([Call("late", {})] * 3)
            assert codes(done) == [None, None, "rate_limited"] or codes(done) == [None, None, "wait_timeout"]
            assert stage.clock.value - begun <= 5
            assert done[2].retry_after is not None

    stage.run(main())


def test_r67_who_fails_fast_waits_behind_no_sibling(stage: Stage) -> None:
    """R-67: a tool that does not wait is refused for a rate that its own siblings have used up, too."""
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate="2/s", when_busy="reject")
    done = run_batch(stage, tower, [Call("q", {})] * 4)
    assert codes(done) == [None, None, "rate_limited", "rate_limited"]


def test_g6_runs_share_a_rate_fairly(stage: Stage) -> None:
    """G6, S5: of two runs that wait for one rate neither gets more than a turn ahead, whoever came first."""
    tower = wide(stage)
    order: list[str] = []

    @tower.tool(independent=True, rate="1/s")
    async def q(name: str) -> None:
        order.append(name)

    async def main() -> None:
        async with tower.run() as one, tower.run() as other:
            early = asyncio.create_task(one.execute([Call("q", {"name": "one"})] * 10))
            await asyncio.sleep(2.5)
            await asyncio.gather(early, other.execute([Call("q", {"name": "other"})] * 6))

    stage.run(main())
    late = order[3:]
    assert all(abs(late[:n].count("one") - late[:n].count("other")) <= 2 for n in range(13))


def test_r79_a_closed_run_and_a_deadline_leave_nothing_in_a_rate(stage: Stage) -> None:
    """R-79, R-88: a run whose deadline comes while it waits for a rate is answered, and others get its turns."""
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate="1/s")

    async def main() -> None:
        async with tower.run(deadline=1.5) as short, tower.run() as long:
            cut, rest = await asyncio.gather(short.execute([Call("q", {})] * 8), long.execute([Call("q", {})] * 3))
            assert codes(cut).count("deadline_exceeded") >= 6
            assert rest.ok
        assert not gate_of(tower).anybody

    stage.run(main())
    assert most_in_a_window(starts, 1.0) == 1


def test_g4_a_rate_keeps_the_order_of_conflicting_calls(stage: Stage) -> None:
    """G4, R-27: writes of one resource start in emitted order also where a rate holds them back."""
    tower = wide(stage)
    order: list[int] = []

    @tower.tool(writes="file:{path}", rate="2/s")
    async def write(path: str, n: int) -> None:
        order.append(n)

    run_batch(stage, tower, [Call("write", {"path": "a", "n": n}) for n in range(7)])
    assert order == list(range(7))


# --- looking in -------------------------------------------------------------------------------------------------------


def test_r129_a_wait_for_a_rate_is_told(stage: Stage) -> None:
    """R-129, R-131, R-132: who waits for a rate says so in the result, in the trace and in the statistics."""
    events: list[Event] = []
    tower = wide(stage, observers=[events.append])
    tower.add_tool(clocked(stage, []), name="q", independent=True, rate="1/s")

    async def main() -> None:
        async with tower.run() as run:
            batch = asyncio.create_task(run.execute([Call("q", {})] * 3))
            await asyncio.sleep(0.25)
            seen = tower.statistics().rates["tool:q"]
            assert (seen.rate, seen.started, seen.queued, seen.scope, seen.free_in) == ("1/s", 1, 2, "process", 0.75)
            done = await batch
            assert [result.waited_for for result in done] == [(), ("rate of tool q",), ("rate of tool q",)]
            assert [result.waited for result in done] == [0, 1, 2]

    stage.run(main())
    tower.flush()
    assert [event.waiting_for for event in events if event.kind == "waiting"] == ["rate of tool q"] * 2


def test_r64_rates_change_while_calls_wait(stage: Stage) -> None:
    """R-64: a higher rate wakes those who wait, a lower one holds back who comes, none lets all of them go; what has
    started counts under each of them.
    """
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True)

    async def main() -> None:
        async with tower.run() as run:
            changes = tower.configure(tools={"q": {"rate": "1/10s"}})
            assert str(changes) == "tools.q.rate: none -> 1/10s"
            batch = asyncio.create_task(run.execute([Call("q", {})] * 6))
            await asyncio.sleep(5)
            assert starts == [0]
            tower.configure(tools={"q": {"rate": "3/10s"}})
            await asyncio.sleep(1)
            assert starts == [0, 5, 5]
            tower.configure(tools={"q": {"rate": "1/100s"}})
            await asyncio.sleep(50)
            assert starts == [0, 5, 5]
            tower.configure(tools={"q": {"rate": {"limit": 50, "per": 1, "burst": 50}}})
            assert (await batch).ok
            assert starts == [0, 5, 5, 56, 56, 56]

    stage.run(main())


def test_r64_a_pools_rate_comes_and_goes(stage: Stage) -> None:
    """R-64: a rate that a pool gets holds for calls that wait already; one that it loses holds nobody any more."""
    tower, starts = wide(stage, pools={"api": 1}), list[float]()
    tower.add_tool(clocked(stage, starts, 1.0), name="q", independent=True, pools=["api"])

    async def main() -> None:
        async with tower.run() as run:
            batch = asyncio.create_task(run.execute([Call("q", {})] * 6))
            await asyncio.sleep(0.5)
            tower.configure(pools={"api": Pool(1, rate="1/5s")})
            await asyncio.sleep(7)
            tower.configure(pools={"api": Pool(1)})
            assert (await batch).ok

    stage.run(main())
    assert starts == [0, 1, 6, 7.5, 8.5, 9.5]
    assert not tower.statistics().rates


def test_g12_a_clock_that_goes_back_locks_nobody_out(stage: Stage) -> None:
    """P-40, S7: when the clock is set back by an hour, who waits is not kept for an hour; nobody gets more either."""
    tower, starts = wide(stage), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate="1/s", when_busy="reject")
    ledger = gate_of(tower).ledger

    async def main() -> None:
        async with tower.run() as run:
            stage.clock.value = 10_000.0
            assert (await run.execute([Call("q", {})])).ok
            stage.clock.value = 6_400.0
            [refused] = await run.execute([Call("q", {})])
            assert (refused.code, refused.retry_after) == ("rate_limited", 1.0)
            await asyncio.sleep(1)
            assert (await run.execute([Call("q", {})])).ok

    stage.run(main())
    assert ledger.instant == 6_401_000_000


# --- observe mode -----------------------------------------------------------------------------------------------------


def test_s13_observe_mode_counts_what_a_rate_would_have_held_back(stage: Stage) -> None:
    """S13, R-01: with mode="observe" a rate holds nobody back; the report says how many calls came too early and what
    they would have waited together, which is what they do wait with the rate in force.
    """
    tower, starts = wide(stage, mode="observe"), list[float]()
    tower.add_tool(clocked(stage, starts), name="q", independent=True, rate="2/s")
    tower.add_tool(clocked(stage, starts), name="no", independent=True, rate="1/s", when_busy="reject")
    done = run_batch(stage, tower, [Call("q", {})] * 6 + [Call("no", {})] * 2)
    assert done.ok
    assert starts == [0] * 8
    told = tower.report()
    assert [(one.name, one.rate, one.too_early, one.waited, one.longest) for one in told.rates] == [
        ("tool:q", "2/s", 4, 6.0, 2.0),
        ("tool:no", "1/s", 1, 1.0, 1.0),
    ]
    assert {one.name: (one.would_have_waited, one.would_have_been_refused) for one in told.tools} == {
        "no": (0, 1),
        "q": (4, 0),
    }
    assert "What the rates would have held back" in str(told)
    assert told.to_dict()["rates"][0]["rate"] == "2/s"  # type: ignore[index]  # it is a list
    assert tower.statistics().rates["tool:q"].free_in == 0

    real = wide(stage)
    real.add_tool(clocked(stage, []), name="q", independent=True, rate="2/s")
    assert sum(result.waited for result in run_batch(stage, real, [Call("q", {})] * 6)) == 6.0


# --- services that say that it is too much ----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [None, "1000/s"])
@pytest.mark.parametrize("thread", [False, True])
def test_r122_one_fan_out_does_not_become_200_failures(rate: str | None, thread: bool, stage: Stage) -> None:
    """R-122: of 200 calls 8 are inside when the service says that it takes no more for 5 s: these 8 fail, the other 192
    wait, holding nothing, and go on then; whether the tool has a rate or not.
    """
    tower = stage.tower(run_concurrency=8, max_calls_per_batch=200, max_wait=1e6)
    starts: list[float] = []

    async def on_loop() -> str:
        starts.append(stage.clock.value)
        await asyncio.sleep(0.1)
        if stage.clock.value < 1:
            raise RateLimited(5)
        return "fine"

    def on_thread() -> str:
        starts.append(stage.clock.value)
        stage.rest(stage.loop, 0.1)
        if stage.clock.value < 1:
            raise RateLimited(5)
        return "fine"

    tower.add_tool(on_thread if thread else on_loop, name="q", independent=True, rate=rate)
    done = run_batch(stage, tower, [Call("q", {})] * 200)
    assert codes(done).count("rate_limited") == 8
    assert codes(done).count(None) == 192
    assert [result.retry_after for result in done[:8]] == [5.0] * 8
    assert sorted(starts)[8] == pytest.approx(5.1)


def test_r122_who_would_wait_in_vain_is_told_at_once(stage: Stage) -> None:
    """R-122: calls whose wait is over before the service takes any again are answered `rate_limited` in that step, with
    the seconds, and do not start; so are those that come later.
    """
    tower = stage.tower(run_concurrency=2, max_wait=10)
    starts: list[float] = []

    @tower.tool(independent=True)
    async def q() -> None:
        starts.append(stage.clock.value)
        await asyncio.sleep(1)
        raise RateLimited(60)

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("q", {})] * 20)
            assert stage.clock.value == 1
            assert codes(done) == ["rate_limited"] * 20
            assert [result.started for result in done] == [True] * 2 + [False] * 18
            assert {result.retry_after for result in done[2:]} == {60.0}
            await asyncio.sleep(30)
            [late] = await run.execute([Call("q", {})])
            assert (late.code, late.started, late.retry_after) == ("rate_limited", False, 30.0)
            assert tower.statistics().rates["tool:q"].rate is None
            await asyncio.sleep(30)
            [fresh] = await run.execute([Call("q", {})])
            assert fresh.started

    stage.run(main())


def test_r122_g12_whom_a_pause_refuses_is_answered(stage: Stage) -> None:
    """R-122, G12: calls that wait for the rate of a tool when its service says that it takes no more for a minute are
    answered in that step: nothing else would ever look at them again, and their batch would not end.
    """
    tower = stage.tower()
    starts: list[float] = []

    @tower.tool(independent=True, rate="1/2s")
    async def q() -> None:
        starts.append(stage.clock.value)
        await asyncio.sleep(0.5)
        raise RateLimited(60)

    done = run_batch(stage, tower, [Call("q", {})] * 3)
    assert codes(done) == ["rate_limited"] * 3 and [one.started for one in done] == [True, False, False]
    assert (starts, stage.clock.value) == ([0], 0.5)


def test_r122_r119_a_tool_that_is_tried_again_waits_for_its_service(stage: Stage) -> None:
    """R-119, R-122, S9: attempts are admitted again and keep the pause like everybody else; after it all are well."""
    tower = stage.tower(run_concurrency=4, max_calls_per_batch=40, max_wait=1e6)
    starts: list[float] = []

    @tower.tool(independent=True, read_only=True, retry=3, rate="20/s")
    async def q() -> str:
        starts.append(stage.clock.value)
        await asyncio.sleep(0.1)
        if stage.clock.value < 3:
            raise RateLimited(3)
        return "fine"

    done = run_batch(stage, tower, [Call("q", {})] * 40)
    assert done.ok
    assert sorted(result.attempts for result in done) == [1] * 36 + [2] * 4
    assert len(starts) == 44
    assert min(start for start in starts if start > 0) >= 3.1
    assert most_in_a_window(starts, 1.0) <= 20


def test_g12_a_pause_has_a_limit(stage: Stage) -> None:
    """G12: however long a service asks for, its tool pauses for an hour at most; nonsense is a second."""
    tower = stage.tower(max_wait=1e6)
    asked: list[Any] = [1e12]

    @tower.tool(independent=True)
    async def q() -> None:
        raise RateLimited(asked[0])

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("q", {})])
            assert tower.statistics().rates["tool:q"].free_in == 3600
            await asyncio.sleep(3600)
            for nonsense in (None, float("nan"), -5, "soon", object()):
                asked[0] = nonsense
                await run.execute([Call("q", {})])
                assert tower.statistics().rates["tool:q"].free_in == 1
                await asyncio.sleep(1)

    stage.run(main())


# --- beside everything else -------------------------------------------------------------------------------------------


def test_s10_nested_calls_wait_for_a_rate_and_no_circle_is_seen(stage: Stage) -> None:
    """S10: nested calls take starts of their own, which nobody can lend; a caller that holds the only place of the
    process waits for them, and nobody is refused for a circle, since time goes on.
    """
    tower, starts = stage.tower(max_concurrency=1, max_wait=1e6), list[float]()
    tower.add_tool(clocked(stage, starts), name="leaf", independent=True, rate="1/s", breaker=True)

    @tower.tool(independent=True)
    async def agent(ctx: Context) -> list[str | None]:
        return codes(await ctx.execute([Call("leaf", {})] * 3))

    done = run_batch(stage, tower, [Call("agent", {})])
    assert done[0].value == [None] * 3
    assert starts == [0, 1, 2]
    assert repr(gate_of(tower).ledger.meters["rate:tool:leaf"]).startswith("Meter('rate:tool:leaf', Window(1 in ")
    assert repr(gate_of(tower).ledger.fuses["breaker:tool:leaf"]).startswith("Fuse('breaker:tool:leaf', Circuit(closed")
    assert tower.explain([Call("leaf", {})]).ok


def test_r64_pools_and_pauses_that_go(stage: Stage) -> None:
    """R-64: a pool that is taken away takes its rate and breaker along; a tool that was asked to pause keeps pausing
    when its options change, and gets a rate in place of the pause.
    """
    tower = stage.tower(config={"pools": {"api": {"permits": 2, "rate": "1/s", "breaker": True}}}, max_wait=1e6)
    starts: list[float] = []
    tower.add_tool(clocked(stage, starts), name="other", independent=True)

    @tower.tool(independent=True)
    async def asked() -> None:
        if not starts:
            raise RateLimited(10)
        starts.append(stage.clock.value)

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("asked", {})])
            tower.configure(tools={"asked": {"timeout": 5}})
            assert tower.statistics().rates["tool:asked"].free_in == 10
            tower.configure({"pools": {}})
            assert set(tower.statistics().rates) == {"tool:asked"}
            assert not tower.statistics().breakers
            starts.append(0)
            await run.execute([Call("asked", {})] * 2)
            assert starts == [0, 10, 10]
            tower.configure(tools={"asked": {"rate": "1/s"}})
            await run.execute([Call("asked", {})] * 3)
            assert starts[3:] == [10, 11, 12]

    stage.run(main())


def test_a_rate_in_the_child_of_a_fork_is_its_own(stage: Stage) -> None:
    """R-09: rates count for one process; after a fork the child begins anew, with what it has declared."""
    tower = wide(stage, pools={"api": Pool(5, rate="1/h", breaker=True)})
    tower.add_tool(clocked(stage, []), name="q", independent=True, pools=["api"], when_busy="reject")
    assert codes(run_batch(stage, tower, [Call("q", {})] * 2)) == [None, "rate_limited"]
    tower._after_fork()
    tower._core.workers = CountedWorkers("towerman-worker")
    assert codes(run_batch(stage, tower, [Call("q", {})] * 2)) == [None, "rate_limited"]
    stage.towers.remove(tower)  # an hour would have to pass for its probes


def test_r122_in_the_child_of_a_fork_a_tool_without_a_rate_pauses_and_runs() -> None:
    """A tool that was asked to pause before the fork has no rate in the child, until it is asked again there."""
    tower = Tower()

    @tower.tool(independent=True)
    async def look() -> str:
        raise RateLimited(0.001)

    def hand_in() -> list[str | None]:
        return [result.code for result in asyncio.run(tower.execute([Call("look", {})] * 2))]

    told = hand_in()
    child = os.fork()
    if child == 0:
        os._exit(0 if hand_in() == told and hand_in() == told else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_r122_a_tool_without_a_rate_pauses_in_a_rehearsal_too() -> None:
    """What is rehearsed is what happens: the calls behind a pause are told, and do not start."""
    tower = Tower()

    @tower.tool(independent=True, max_wait=5)
    async def look() -> None:
        """Nobody's."""

    with Rehearsal(tower) as rehearsal:
        rehearsal.script("look", raises=RateLimited(60))
        batch = rehearsal.execute([Call("look", {})] * 20)
        again = rehearsal.execute([Call("look", {})])
    assert sum(result.started for result in batch) == 8
    assert again[0].code == "rate_limited"


def test_r122_a_tool_pauses_in_the_child_of_a_fork_as_before(stage: Stage) -> None:
    """R-122, R-09: a tool without a rate that was asked to pause before a fork pauses when its service asks for it
    in the child.
    """
    tower = stage.tower(max_wait=10)

    @tower.tool(independent=True)
    async def q() -> None:
        raise RateLimited(60)

    for _ in range(2):
        assert [one.started for one in run_batch(stage, tower, [Call("q", {})])] == [True]
        assert [one.started for one in run_batch(stage, tower, [Call("q", {})])] == [False]
        tower._after_fork()
        tower._core.workers = CountedWorkers("towerman-worker")
