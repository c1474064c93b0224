"""Nested calls (S10): a handler that makes calls of its own lends them what it holds, and nobody waits in a circle.

Everything here is on virtual time: where nothing can go on, the loop says so (`Deadlock`), so a hanging circle is a
failure with its story, not a test that never ends.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from kit import Stage, codes, gate_of, here, on_stage, run_batch, sound, whole_again

from towerman import BatchResult, Call, Context, Pool
from towerman.gate import Gate

stage = pytest.fixture(on_stage)


# ==================================================================== borrowing


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("limit", [1, 3])
def test_p34_agents_and_leaves_share_one_limit(stage: Stage, limit: int, width: int) -> None:
    """P-34, R-61, S10: tools that call tools share one limit with them; all end, and never do more leaves work at once
    than the limit allows.
    """
    tower = stage.tower(max_concurrency=limit)

    @tower.tool(independent=True)
    async def leaf(n: int) -> str:
        return await stage.work(f"leaf {n}", 1)

    @tower.tool(independent=True)
    async def agent(n: int) -> str:
        ctx = contexts[n]
        done = await ctx.execute([Call("leaf", {"n": 10 * n + one}) for one in range(width)])
        sound(done, [Call("leaf", {})] * width)
        return "done" if done.ok else "failed"

    contexts: dict[int, Context[None]] = {}

    @tower.tool(independent=True)
    async def boss(ctx: Context[None], n: int) -> str:
        contexts[n] = ctx
        return await agent(n)

    done = run_batch(stage, tower, [Call("boss", {"n": n}) for n in range(3)])
    assert done.ok
    assert all(result.value == "done" for result in done)
    assert stage.peak <= limit
    assert stage.started.total() == 3 * width


def test_p35_a_pool_permit_is_lent_below(stage: Stage) -> None:
    """P-35: four calls hold all permits of a pool, and each runs a tool that needs one: each borrows its caller's."""
    tower = stage.tower(pools={"model": 4})

    @tower.tool(independent=True, pools=["model"])
    async def think(n: int) -> str:
        return await stage.work(f"inner {n}", 1)

    @tower.tool(independent=True, pools=["model"])
    async def ask(ctx: Context[None], n: int) -> str:
        (inner,) = await ctx.execute([Call("think", {"n": n})])
        return inner.content

    done = run_batch(stage, tower, [Call("ask", {"n": n}) for n in range(4)])
    assert [result.content for result in done] == [f"inner {n}" for n in range(4)]
    assert tower.statistics().pools["model"].peak == 4
    assert {came for _, came, _ in stage.spans} == {0.0}


def test_s10_further_calls_take_what_is_free(stage: Stage) -> None:
    """S10: nested calls borrow first, so one of them costs no second permit; others take free permits and run beside
    it.
    """
    tower = stage.tower(max_concurrency=3)

    @tower.tool(independent=True)
    async def leaf(n: int) -> str:
        held.append(tower.statistics().pools["process"].held)
        return await stage.work(f"{n}", 1)

    @tower.tool(independent=True)
    async def agent(ctx: Context[None], width: int) -> str:
        await ctx.execute([Call("leaf", {"n": n}) for n in range(width)])
        return "done"

    held: list[int] = []
    assert run_batch(stage, tower, [Call("agent", {"width": 1})]).ok
    assert held == [1]
    held.clear()
    stage.spans.clear()
    assert run_batch(stage, tower, [Call("agent", {"width": 4})]).ok
    assert sorted(went for _, _, went in stage.spans) == [2.0, 2.0, 2.0, 3.0]
    assert max(held) == 3


@pytest.mark.parametrize(
    ("held", "wanted"), [("writes", "writes"), ("writes", "reads"), ("reads", "reads"), ("reads", "writes")]
)
def test_s10_resources_of_the_caller_are_lent(stage: Stage, held: str, wanted: str) -> None:
    """S10: what the caller holds is in nobody's way below it, also for more than it asked for itself; siblings below
    exclude each other all the same.
    """
    tower = stage.tower()

    @tower.tool(**{wanted: "k"})
    async def inner(n: int) -> str:
        return await stage.work(f"{n}", 1)

    @tower.tool(**{held: "k"})
    async def outer(ctx: Context[None]) -> str:
        done = await ctx.execute([Call("inner", {"n": n}) for n in range(2)])
        return "done" if done.ok else "failed"

    assert run_batch(stage, tower, [Call("outer", {})])[0].value == "done"
    ends = sorted(went for _, _, went in stage.spans)
    assert ends == ([1.0, 2.0] if wanted == "writes" else [1.0, 1.0])


def test_s10_outsiders_wait_for_caller_and_nested_calls(stage: Stage) -> None:
    """S10, G4: a call of another run on the same resource waits until the caller has ended, nested calls and all."""
    tower = stage.tower()

    @tower.tool(writes="k")
    async def inner() -> str:
        return await stage.work("inner", 1)

    @tower.tool(writes="k")
    async def outer(ctx: Context[None]) -> str:
        await ctx.execute([Call("inner", {})])
        return await stage.work("outer", 1)

    async def main() -> None:
        async with tower.run() as one, tower.run() as other:
            first = asyncio.ensure_future(one.execute([Call("outer", {})]))
            await asyncio.sleep(0.5)
            assert (await other.execute([Call("inner", {})])).ok
            assert (await first).ok

    stage.run(main())
    assert stage.spans == [("inner", 0.0, 1.0), ("outer", 1.0, 2.0), ("inner", 2.0, 3.0)]


def test_s10_undeclared_tools_below_one_that_declares(stage: Stage) -> None:
    """S10, R-24: a tool that declares nothing runs alone and in order, also below a caller that is at work."""
    tower = stage.tower()

    @tower.tool
    async def step(n: int) -> str:
        return await stage.work(f"{n}", 1)

    @tower.tool(writes="k")
    async def outer(ctx: Context[None]) -> str:
        done = await ctx.execute([Call("step", {"n": n}) for n in range(3)])
        return "done" if done.ok else "failed"

    @tower.tool
    async def undeclared_outer(ctx: Context[None]) -> str:
        done = await ctx.execute([Call("step", {"n": n}) for n in range(3)])
        return "done" if done.ok else "failed"

    for name in ("outer", "undeclared_outer"):
        stage.spans.clear()
        start = stage.clock.value
        assert run_batch(stage, tower, [Call(name, {})])[0].value == "done"
        assert [(came - start, went - start) for _, came, went in stage.spans] == [(0, 1), (1, 2), (2, 3)]


def test_s10_nesting_goes_deep(stage: Stage) -> None:
    """S10, R-61: twenty levels on one permit and one key, each of them lent on."""
    tower = stage.tower(max_concurrency=1)

    @tower.tool(writes="k")
    async def level(ctx: Context[None], n: int) -> int:
        if n == 0:
            return 0
        (below,) = await ctx.execute([Call("level", {"n": n - 1})])
        return below.value + 1  # type: ignore[operator]

    assert run_batch(stage, tower, [Call("level", {"n": 20})])[0].value == 20
    assert tower.statistics().pools["process"].peak == 1


@pytest.mark.parametrize("way", ["run", "tower", "sub-run"])
def test_s10_a_handler_may_use_the_tower_in_any_way(stage: Stage, way: str) -> None:
    """R-61, R-04: the chain of holds travels with the context: `tower.execute`, a run of its own, or a task that the
    handler makes borrow like `ctx.execute`.
    """
    tower = stage.tower(max_concurrency=1)

    @tower.tool(independent=True)
    async def leaf() -> str:
        return await stage.work("leaf", 1)

    @tower.tool(independent=True)
    async def agent() -> str:
        if way == "tower":
            return (await tower.execute([Call("leaf", {})]))[0].content
        async with tower.run() as sub:
            if way == "run":
                return (await sub.execute([Call("leaf", {})]))[0].content
            async with asyncio.TaskGroup() as group:
                task = group.create_task(sub.execute([Call("leaf", {})]))
            return task.result()[0].content

    assert run_batch(stage, tower, [Call("agent", {})])[0].value == "leaf"


def test_what_a_call_left_behind_calls_for_itself(stage: Stage) -> None:
    """S10: a task that a handler made and left behind is nobody's nested call once that handler has ended."""
    tower = stage.tower(max_concurrency=1)
    later: list[asyncio.Task[BatchResult]] = []

    @tower.tool(independent=True)
    async def leaf() -> str:
        return await stage.work("leaf", 1)

    @tower.tool(independent=True)
    async def agent() -> str:
        async def after() -> BatchResult:
            await asyncio.sleep(5)
            return await tower.execute([Call("leaf", {})])

        later.append(asyncio.ensure_future(after()))
        return "done"

    async def main() -> None:
        assert (await tower.execute([Call("agent", {})])).ok
        assert (await later[0]).ok

    stage.run(main())


# ==================================================================== circles


def test_s10_two_agents_want_each_others_resource(stage: Stage) -> None:
    """S10: two callers hold a resource each and need the other's below: the one who closes the circle is refused
    `would_deadlock`, told to its caller, and both go on.
    """
    tower = stage.tower()
    told: dict[str, Any] = {}

    @tower.tool(writes="{key}")
    async def touch(key: str) -> str:
        return await stage.work(f"touch {key}", 1)

    @tower.tool(writes="{mine}")
    async def agent(ctx: Context[None], mine: str, other: str, after: float) -> str:
        await asyncio.sleep(after)
        (told[mine],) = await ctx.execute([Call("touch", {"key": other})])
        return "done"

    calls = [
        Call("agent", {"mine": "a", "other": "b", "after": 1}),
        Call("agent", {"mine": "b", "other": "a", "after": 2}),
    ]
    assert run_batch(stage, tower, calls).ok
    assert (told["a"].code, told["b"].code) == (None, "would_deadlock")
    assert told["b"].retryable == "yes"
    assert not told["b"].started
    assert "resource {key}" in told["b"].message
    assert told["b"].waited == 0


def test_s10_a_circle_over_permits(stage: Stage) -> None:
    """S10: each caller holds one of two permits and its nested call needs both: one is refused, the other goes on."""
    tower = stage.tower(pools={"gpu": 2})
    told: list[Any] = []

    @tower.tool(independent=True, pools={"gpu": 2})
    async def wide() -> str:
        return await stage.work("wide", 1)

    @tower.tool(independent=True, pools=["gpu"])
    async def agent(ctx: Context[None], after: float) -> str:
        await asyncio.sleep(after)
        told.extend(await ctx.execute([Call("wide", {})]))
        return "done"

    assert run_batch(stage, tower, [Call("agent", {"after": 1}), Call("agent", {"after": 2})]).ok
    assert sorted(str(one.code) for one in told) == ["None", "would_deadlock"]


def test_s10_who_waits_for_somebody_at_work_is_not_refused(stage: Stage) -> None:
    """S10: the same wait is no circle as long as one of the holders waits for nobody."""
    tower = stage.tower(pools={"gpu": 2})

    @tower.tool(independent=True, pools={"gpu": 2})
    async def wide() -> str:
        return await stage.work("wide", 1)

    @tower.tool(independent=True, pools=["gpu"])
    async def agent(ctx: Context[None]) -> str:
        await asyncio.sleep(1)
        (inner,) = await ctx.execute([Call("wide", {})])
        return inner.content

    @tower.tool(independent=True, pools=["gpu"])
    async def plain() -> str:
        return await stage.work("plain", 9)

    done = run_batch(stage, tower, [Call("agent", {}), Call("plain", {})])
    assert done.ok
    assert done[0].value == "wide"


def test_s10_three_in_a_circle_and_one_beside_it(stage: Stage) -> None:
    """S10: a circle of three over two runs; a nested call that only waits for one of them is not the victim."""
    tower = stage.tower()
    told: dict[str, Any] = {}

    @tower.tool(writes="{key}")
    async def touch(key: str) -> str:
        return await stage.work(f"touch {key}", 1)

    @tower.tool(writes="{mine}")
    async def agent(ctx: Context[None], mine: str, other: str, after: float) -> str:
        await asyncio.sleep(after)
        (told[mine],) = await ctx.execute([Call("touch", {"key": other})])
        return "done"

    def call(mine: str, other: str, after: float) -> Call:
        return Call("agent", {"mine": mine, "other": other, "after": after})

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([call("a", "b", 1), call("d", "a", 1.5)]))
            second = asyncio.ensure_future(two.execute([call("b", "c", 2), call("c", "a", 3)]))
            assert (await first).ok
            assert (await second).ok

    stage.run(main())
    assert {mine: one.code for mine, one in told.items()} == {"a": None, "b": None, "c": "would_deadlock", "d": None}


def test_s10_claims_do_not_hold_up_nested_calls(stage: Stage) -> None:
    """S5, S10: a promoted waiter hides what is free from lower ranks, but not from calls below one who holds what it
    waits for: that would be a circle.
    """
    tower = stage.tower(max_concurrency=2, _clock=stage.clock)
    gate_of(tower)._passes = 1

    @tower.tool(independent=True, weight=2, max_wait=100)
    async def wide() -> str:
        return await stage.work("wide", 1)

    @tower.tool(independent=True)
    async def leaf(n: int) -> str:
        return await stage.work(f"leaf {n}", 1)

    @tower.tool(independent=True)
    async def agent(ctx: Context[None]) -> str:
        for n in range(3):
            await ctx.execute([Call("leaf", {"n": n}), Call("leaf", {"n": n})])
        return "done"

    async def main() -> None:
        async with tower.run() as one, tower.run() as two, tower.run() as three:
            first = asyncio.ensure_future(one.execute([Call("agent", {})]))
            await asyncio.sleep(0.1)
            second = asyncio.ensure_future(two.execute([Call("wide", {})]))
            await asyncio.sleep(0.1)
            third = asyncio.ensure_future(three.execute([Call("leaf", {"n": 9})]))
            assert (await first).ok
            assert (await second).ok
            assert (await third).ok

    stage.run(main())


# ==================================================================== ends


@pytest.mark.parametrize(
    "how", ["timeout", "cancel the caller", "cancel the run", "cancel the call", "raise", "return"]
)
@pytest.mark.parametrize("deaf", [False, True])
def test_s10_the_caller_ends_before_its_nested_calls(stage: Stage, how: str, deaf: bool) -> None:
    """S10, G7, G10: whatever ends a caller ends the calls that it has made; what it lent goes back when the last
    borrower has ended, also one that does not listen.
    """
    tower = stage.tower(max_concurrency=2, grace=1.0)
    left: list[asyncio.Task[Any]] = []
    seen: list[Any] = []

    @tower.tool(writes="k")
    async def leaf(n: int) -> str:
        return await (stage.stubborn if deaf else stage.work)(f"leaf {n}", 20)

    @tower.tool(writes="k", timeout=2 if how == "timeout" else 100)
    async def agent(ctx: Context[None]) -> str:
        inner = ctx.execute([Call("leaf", {"n": 0}), Call("leaf", {"n": 1})], on_result=seen.append)
        if how in ("raise", "return"):
            left.append(asyncio.ensure_future(inner))
            await asyncio.sleep(2)
            if how == "raise":
                raise ValueError
            return "done"
        await inner
        return "done"

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("agent", {})]))
            await asyncio.sleep(2)
            if how == "cancel the caller":
                task.cancel()
            elif how == "cancel the run":
                run.cancel("enough")
            elif how == "cancel the call":
                run.cancel("enough", index=0)
            await asyncio.wait([task])
            if task.cancelled():
                assert run.last_batch is not None
            assert here().time() <= 3.0 + 1e-9
            if deaf:
                later = asyncio.ensure_future(tower.execute([Call("leaf", {"n": 2})]))
                await asyncio.sleep(1)
                assert stage.started["leaf 2"] == 0
                await later
            await asyncio.gather(*left, return_exceptions=True)
        await stage.settled(tower)

    stage.run(main())
    assert [result.index for result in sorted(seen, key=lambda one: one.index)] == [0, 1]
    assert {result.outcome for result in seen} == {"cancelled"}
    assert stage.started["leaf 1"] == 0


def test_s10_an_orphan_makes_no_calls(stage: Stage) -> None:
    """S10, G10: a handler that goes on after its result was sealed gets its nested calls refused: nobody would see
    what they did.
    """
    tower = stage.tower(grace=1.0, timeout=1.0)
    seen: list[Any] = []

    @tower.tool(independent=True)
    async def leaf() -> str:
        return await stage.work("leaf", 1)

    @tower.tool(independent=True)
    async def deaf(ctx: Context[None]) -> None:
        await stage.stubborn("deaf", 5)
        seen.extend(await ctx.execute([Call("leaf", {})]))

    assert codes(run_batch(stage, tower, [Call("deaf", {})])) == ["handler_timeout"]
    assert codes(seen) == ["cancelled"]
    assert not stage.started["leaf"]


def test_cleaning_up_may_make_calls(stage: Stage) -> None:
    """S10: a cancelled handler may still make calls while it cleans up, within its grace."""
    tower = stage.tower(grace=2.0)
    seen: list[Any] = []

    @tower.tool(independent=True)
    async def undo() -> str:
        return await stage.work("undo", 1)

    @tower.tool(independent=True)
    async def agent(ctx: Context[None]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.extend(await ctx.execute([Call("undo", {})]))

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("agent", {})]))
            await asyncio.sleep(1)
            run.cancel("enough")
            assert codes(await task) == ["cancelled"]

    stage.run(main())
    assert codes(seen) == [None]


def test_last_batch_is_the_callers(stage: Stage) -> None:
    """API: nested batches do not take the place of the run's own in `last_batch`."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def leaf() -> str:
        return "leaf"

    @tower.tool(independent=True)
    async def agent(ctx: Context[None]) -> str:
        await ctx.execute([Call("leaf", {}), Call("leaf", {})])
        return "agent"

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("agent", {})])
            assert run.last_batch is not None
            assert [one.content for one in run.last_batch] == ["agent"] == [one.content for one in done]

    stage.run(main())


# ==================================================================== random nestings


def random_nesting(seed: int, *, calm: bool = False) -> tuple[int, float]:
    """A tower of random limits, agents that call random calls at random depth; unless calm, some are impatient or
    cancelled. Returns how many were refused `would_deadlock`, and how long all of it took.
    """
    rng = random.Random(seed)
    stage = Stage()
    tower = stage.tower(
        timeout=1e7,
        max_concurrency=rng.randint(1, 4),
        run_concurrency=rng.randint(1, 4),
        pools={"a": rng.randint(1, 2), "b": Pool(rng.randint(1, 2))},
        grace=rng.choice([0.0, 0.5]),
        max_calls_per_batch=100,
        max_wait=1e6,
    )
    keys = "xyz"

    async def body(ctx: Context[None], n: int, depth: int) -> str:
        with stage.on(f"{n}"):
            await asyncio.sleep(rng.random())
        for _ in range(rng.randint(0, 2) if depth else 0):
            inner = calls(rng.randint(1, 3), depth - 1)
            sound(await ctx.execute(inner), inner)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random())
        return "done"

    def declare(name: str, **options: Any) -> None:
        async def handler(ctx: Context[None], n: int, depth: int, key: str) -> str:
            return await body(ctx, n, depth)

        tower.add_tool(handler, name=name, **options)

    declare("free", independent=True)
    declare("pool_a", independent=True, pools=["a"])
    declare("pool_b", independent=True, pools=["b"], max_concurrency=rng.randint(1, 3))
    declare("both", independent=True, pools=["a", "b"])
    declare("read", reads="{key}")
    declare("write", writes="{key}", pools=rng.choice([[], ["a"]]))
    declare("undeclared")
    declare("timed", writes="{key}", timeout=1e7 if calm else 1.0)
    names = list(tower.tools)
    count = 0

    def calls(number: int, depth: int) -> list[Call]:
        nonlocal count
        made = []
        for _ in range(number):
            count += 1
            made.append(Call(rng.choice(names), {"n": count, "depth": depth, "key": rng.choice(keys)}))
        return made

    async def one_run() -> None:
        async with tower.run(priority=rng.randint(0, 1)) as run:
            for _ in range(2):
                batch = calls(rng.randint(1, 4), rng.randint(0, 3))
                task = asyncio.ensure_future(run.execute(batch))
                if not calm and rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 3)
                    if rng.random() < 0.5:
                        run.cancel("enough")
                    else:
                        task.cancel()
                try:
                    sound(await task, batch)
                except asyncio.CancelledError:
                    assert run.last_batch is not None
                    sound(run.last_batch, batch)

    async def main() -> None:
        await asyncio.gather(*(one_run() for _ in range(rng.randint(1, 4))))
        await stage.settled(tower)

    try:
        stage.run(main())
        took = stage.clock.value
        whole_again(tower)
        assert not gate_of(tower)._lenders
        return tower.statistics().rejections.get("would_deadlock", 0), took
    except BaseException as failure:
        failure.add_note(f"seed {seed}; the story:\n" + "\n".join(stage.story[-60:]))
        raise
    finally:
        tower._core.workers.close()


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_r61_random_nestings_are_never_stuck(first: int) -> None:
    """R-61, S10, G1, G3: random agents on random narrow limits and keys, cancelled at random: each call has its
    result, nobody hangs, and everything is whole afterwards.
    """
    for seed in range(first, first + 30):
        random_nesting(seed)


def refused_exactly_where_stuck(seeds: range) -> tuple[int, int]:
    """With and without a look for circles; returns how many cases had one, and how many had none."""
    circles = 0
    for seed in seeds:
        refused, took = random_nesting(seed, calm=True)
        assert took < 1e5, f"seed {seed}: somebody waited until time was over"
        with pytest.MonkeyPatch.context() as blind:
            blind.setattr(Gate, "_break_deadlock", lambda self, now: self._suspects.clear())
            _, without = random_nesting(seed, calm=True)
        assert bool(refused) == (without > 1e5), f"seed {seed}: refused {refused}, without a look it took {without} s"
        circles += bool(refused)
    return circles, len(seeds) - circles


def test_s10_refused_exactly_where_nobody_could_go_on() -> None:
    """S10: `would_deadlock` is told in just those cases in which, without it, calls wait for one another until their
    time is over.
    """
    circles, none = refused_exactly_where_stuck(range(5_000, 5_120))
    assert circles > 20
    assert none > 20


@pytest.mark.long
@pytest.mark.parametrize("first", range(30_000, 34_000, 200))
def test_s10_refused_exactly_where_nobody_could_go_on_in_very_many(first: int) -> None:
    """S10: the same, four thousand times."""
    assert min(refused_exactly_where_stuck(range(first, first + 200))) > 20


@pytest.mark.long
@pytest.mark.parametrize("first", range(1_000, 21_000, 500))
def test_r61_very_many_random_nestings_are_never_stuck(first: int) -> None:
    """R-61, S10: the same, twenty thousand times."""
    for seed in range(first, first + 500):
        random_nesting(seed)
