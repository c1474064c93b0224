"""Budgets of whole towers: who may start, who is told at once, what goes back, and what everything adds up to.

Theory. What a budget promises is about handlers: so many came on, never more, whatever was handed in from however many
places, and whatever was cancelled, failed or waited in between. After every test all of what was reserved is free again
(kit), and the sums of the accounts are looked at whenever time jumps.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, codes, on_stage, run_batch, sound, whole_again

from towerman import Budget, Call, Context, Event, PolicyError, Pool, Result, ToolError, Tower
from towerman.clock import VirtualClock, calendar
from towerman.runner import Shell, intake

stage = pytest.fixture(on_stage)


@pytest.fixture(autouse=True)
def _nothing_is_reserved(stage: Stage) -> Iterator[None]:
    """When a test is over nothing is reserved any more."""
    yield
    for tower in stage.towers:
        assert all(not any(one.reserved.values()) for one in tower.statistics().budgets.values()), "a share is lost"
        assert tower._core.purse.live == {}


def worker(stage: Stage, tower: Tower, name: str = "work", seconds: float = 1.0, **options: Any) -> None:
    """A tool whose calls take so long."""
    options = {"independent": True, **options}

    async def handler(n: int = 0) -> int:
        await stage.work(f"{name}{n}", seconds)
        return n

    tower.add_tool(handler, name=name, **options)


def calls(size: int, name: str = "work") -> list[Call]:
    """So many calls, each with a number of its own."""
    return [Call(name, {"n": n}) for n in range(size)]


def came_on(stage: Stage) -> int:
    """How many handlers came on."""
    return stage.started.total()


def of(tower: Tower, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """What a budget has spent and reserved, less what is 0."""
    seen = tower.statistics().budgets[name]
    spent, reserved = ({unit: n for unit, n in one.items() if n} for one in (seen.spent, seen.reserved))
    return spent, reserved


# ==================================================================== the first k


def test_r98_ten_of_twenty_start(stage: Stage) -> None:
    """R-98, R-95: 20 calls with 10 left: exactly the first 10 in emitted order start, and 10 have a structured budget
    result at once.
    """
    tower = stage.tower(run_concurrency=3)
    worker(stage, tower)
    done = run_batch(stage, tower, calls(20), budget=Budget(calls=10))
    sound(done, calls(20))
    assert codes(done) == [None] * 10 + ["budget_exhausted"] * 10
    assert sorted(stage.started) == sorted(f"work{n}" for n in range(10))
    refused = done[12]
    assert (refused.outcome, refused.started, refused.applied, refused.waited) == ("rejected", False, "no", 0.0)
    assert (refused.retryable, refused.retry_after) == ("no", None)
    assert refused.waited_for == ("budget of run (calls)",)
    assert refused.message == "Not started: this run's budget of 10 calls is used up."
    assert json.loads(refused.content)["error"]["code"] == "budget_exhausted"
    assert (done.exhausted, done.notice) == (True, done[19].message)
    assert done.notice == (
        "Ran 10 of 20 calls: this run's budget of 10 calls is used up. Do not call more tools now; answer with what "
        "you have."
    )


def test_p61_partial_and_all_or_none(stage: Stage) -> None:
    """P-61: budget 6, a batch of 8: the first 6 run and 2 are told; whole or not at all: 0 run, 8 structured refusals,
    and a batch of 6 runs afterwards.
    """
    tower = stage.tower()
    worker(stage, tower)
    assert codes(run_batch(stage, tower, calls(8), budget=Budget(calls=6))) == [None] * 6 + ["budget_exhausted"] * 2
    assert came_on(stage) == 6
    stage.started.clear()

    async def whole() -> None:
        async with tower.run(budget=Budget(calls=6, partial=False)) as run:
            none = await run.execute(calls(8))
            assert codes(none) == ["budget_exhausted"] * 8
            assert (came_on(stage), none.exhausted) == (0, False)
            assert none[0].message == (
                "Not started: this response takes more than is left of this run's budget of 6 calls, and is not run in "
                "part."
            )
            assert none.notice == none[7].message
            assert "Ran none of 8 calls" in (none.notice or "")
            assert "Send fewer calls at once" in (none.notice or "")
            six = await run.execute(calls(6))
            assert (six.ok, six.exhausted) == (True, True)

    stage.run(whole())
    assert came_on(stage) == 6


@pytest.mark.parametrize("partial", [True, False])
def test_p61_two_batches_race_on_one_budget(stage: Stage, partial: bool) -> None:
    """P-61, G9: two batches of one run at once on a budget of 6: exactly 6 run in total; whole or not: one of them."""
    tower = stage.tower()
    worker(stage, tower)

    async def race() -> None:
        async with tower.run(budget=Budget(calls=6, partial=partial)) as run:
            both = await asyncio.gather(*(run.execute(calls(5)) for _ in range(2)))
        assert [batch.ok for batch in both] == [True, False]
        assert came_on(stage) == (6 if partial else 5)

    stage.run(race())


def test_g9_loops_and_threads_race_on_one_budget() -> None:
    """G9, P-61: batches of several loops on several threads, on one budget of the process: exactly so many start."""
    tower = Tower(budgets={"process": Budget(calls=60)}, max_concurrency=7)
    lock, ran = threading.Lock(), [0]

    @tower.tool(independent=True)
    async def work() -> None:
        with lock:
            ran[0] += 1
        await asyncio.sleep(0)

    async def several() -> int:
        batches = [tower.execute([Call("work", {})] * 5) for _ in range(4)]
        return sum(result.ok for batch in await asyncio.gather(*batches) for result in batch)

    answered: list[int] = []
    threads = [threading.Thread(target=lambda: answered.append(asyncio.run(several()))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (sum(answered), ran[0]) == (60, 60)
    assert of(tower, "process") == ({"calls": 60}, {})
    whole_again(tower)
    tower.close()


def test_r100_a_budget_alone_does_not_bound_simultaneity(stage: Stage) -> None:
    """R-100: with a budget and nothing else, five calls start in the same instant; a limit is what keeps them apart."""
    tower = stage.tower(max_concurrency=100, run_concurrency=100)
    worker(stage, tower)
    assert codes(run_batch(stage, tower, calls(6), budget=Budget(calls=5)))[5] == "budget_exhausted"
    assert stage.peak == 5
    assert {came for _, came, _ in stage.spans} == {0.0}
    stage.peak = 0
    run_batch(stage, tower, calls(5), budget=Budget(calls=5), max_concurrency=2)
    assert stage.peak == 2


def test_r63_refused_calls_spend_nothing(stage: Stage) -> None:
    """R-63, R-128: what is unknown, forbidden, beyond the cap or has wrong arguments takes nothing from the others, and
    keeps its own code.
    """
    tower = stage.tower(max_calls_per_batch=7)
    worker(stage, tower)
    worker(stage, tower, "secret")
    batch = [
        Call("wrok", {}),
        Call("work", {"n": "many"}),
        Call("secret", {}),
        *calls(4),
        Call("work", {}),
    ]
    done = run_batch(stage, tower, batch, budget=Budget(calls=3), deny="secret")
    assert codes(done) == [
        "unknown_tool",
        "invalid_arguments",
        "permission_denied",
        None,
        None,
        None,
        "budget_exhausted",
        "call_cap",
    ]
    assert (done.notice or "").startswith("Ran 7 of 8 calls: at most 7 calls are run for one response.")
    assert "Ran 3 of 8 calls: this run's budget of 3 calls is used up." in (done.notice or "")


def test_what_needs_a_refused_call_is_skipped(stage: Stage) -> None:
    """R-102: a call that needs one which the budget refuses is `dependency_failed`, and what needs a call that was
    refused for itself takes nothing from those behind it.
    """
    tower = stage.tower()
    worker(stage, tower)
    batch = [
        Call("nobody", {}, id="a"),
        Call("work", {"n": 1}, id="b", needs=("a",)),
        Call("work", {"n": 2}, id="c"),
        Call("work", {"n": 3}, id="d"),
        Call("work", {"n": 4}, id="e", needs=("d",)),
    ]
    done = run_batch(stage, tower, batch, budget=Budget(calls=1))
    assert codes(done) == ["unknown_tool", "dependency_failed", None, "budget_exhausted", "dependency_failed"]
    assert stage.started == {"work2": 1}


# ==================================================================== what goes back


def test_r102_what_never_starts_is_refunded(stage: Stage) -> None:
    """R-102, S8: cancelled in the queue, timed out in it, skipped for a failed need, refused since the limit is busy:
    what did not start can be spent by others.
    """
    tower = stage.tower(pools={"one": 1})
    worker(stage, tower, pools=["one"], max_wait=2)
    worker(stage, tower, "impatient", pools=["one"], when_busy="reject")

    @tower.tool(independent=True)
    async def fails() -> None:
        raise ToolError("no")

    async def main() -> None:
        async with tower.run(budget=Budget(calls=9)) as run, tower.run() as other:
            busy = asyncio.ensure_future(other.execute([Call("work", {"n": 99})]))
            await asyncio.sleep(0)
            refused = await run.execute(calls(1, "impatient"))
            assert codes(refused) == ["concurrency_limit"]
            assert run.remaining == {"calls": 9}
            waiting = asyncio.ensure_future(run.execute(calls(3)))
            await asyncio.sleep(0.5)
            assert (run.remaining, of(tower, f"run:{run.run_id}")) == ({"calls": 6}, ({}, {"calls": 3}))
            run.cancel("enough")
            assert codes(await waiting) == ["cancelled"] * 3
            assert run.remaining == {"calls": 9}
            await busy
            skipped = await run.execute([Call("fails", {}, id="f"), Call("work", {}, needs=("f",))])
            assert codes(skipped) == ["handler_error", "dependency_failed"]
            assert run.remaining == {"calls": 8}

    stage.run(main())


def test_a_wait_that_is_over_costs_nothing(stage: Stage) -> None:
    """R-102: a call whose wait is over has not started and is refunded."""
    tower = stage.tower(pools={"one": 1})
    worker(stage, tower, pools=["one"], max_wait=2, seconds=5.0)

    async def main() -> None:
        async with tower.run(budget=Budget(calls=9)) as run, tower.run() as other:
            busy = asyncio.ensure_future(other.execute([Call("work", {"n": 99})]))
            await asyncio.sleep(0)
            assert codes(await run.execute(calls(1))) == ["wait_timeout"]
            assert run.remaining == {"calls": 9}
            await busy

    stage.run(main())


def test_a_call_that_has_started_is_spent_whatever_comes_of_it(stage: Stage) -> None:
    """S8: errors, timeouts and cancels of running calls give nothing back."""
    tower = stage.tower()
    worker(stage, tower, "slow", seconds=9.0, timeout=1)

    @tower.tool(independent=True)
    async def fails(n: int) -> None:
        raise ValueError

    async def main() -> None:
        async with tower.run("r", budget=Budget(calls=9)) as run:
            await run.execute([*calls(2, "fails"), *calls(1, "slow")])
            assert of(tower, "run:r") == ({"calls": 3}, {})

    stage.run(main())


def test_identical_calls_cost_once_and_merged_ones_each(stage: Stage) -> None:
    """S11: what the run of another call answers is refunded when the two are identical, since it has happened once;
    what was merged has happened, and is spent.
    """
    tower = stage.tower()

    @tower.tool(reads="k", share_identical=True)
    async def look(n: int) -> int:
        return n

    def together(given: list[dict[str, Any]]) -> dict[str, Any]:
        return {"rows": [row for one in given for row in one["rows"]]}

    @tower.tool(writes="t", merge=together, spends=lambda rows: {"rows": len(rows)})
    async def insert(rows: list[int]) -> int:
        return len(rows)

    async def main() -> None:
        async with tower.run("r", budget=Budget(calls=20, rows=10)) as run:
            done = await run.execute([Call("look", {"n": 1})] * 4)
            assert [result.shared_with for result in done] == [None, 0, 0, 0]
            assert of(tower, "run:r") == ({"calls": 1}, {})
            done = await run.execute([Call("insert", {"rows": [1, 2, 3]})] * 4)
            assert [result.shared_with for result in done] == [None, 0, 0, None]
            assert codes(done) == [None, None, None, "budget_exhausted"]
            assert of(tower, "run:r") == ({"calls": 4, "rows": 9}, {})
            assert done[0].value == 9

    stage.run(main())


def test_who_gets_off_a_merged_run_has_spent(stage: Stage) -> None:
    """S11: a call that is cancelled while its arguments are in a run that is under way is spent."""
    tower = stage.tower()

    @tower.tool(writes="t", merge=lambda given: {"n": sum(one["n"] for one in given)})
    async def add(n: int) -> int:
        await asyncio.sleep(1)
        return n

    async def main() -> None:
        async with tower.run("r", budget=Budget(calls=20)) as run:
            work = asyncio.ensure_future(run.execute([Call("add", {"n": n}) for n in range(3)]))
            await asyncio.sleep(0.5)
            run.cancel("not this one", index=1)
            assert codes(await work) == [None, "cancelled", None]
            assert of(tower, "run:r") == ({"calls": 3}, {})

    stage.run(main())


# ==================================================================== units and charges


def test_r101_fan_out_is_charged_call_by_call(stage: Stage) -> None:
    """R-101: 50 parallel searches are charged as 50, in calls, cost and tokens."""
    tower = stage.tower(max_calls_per_batch=100, max_concurrency=100, run_concurrency=100)

    @tower.tool(independent=True, spends={"cost": 0.01})
    async def search(ctx: Context[None], n: int) -> None:
        ctx.charge(tokens=n)

    async def main() -> None:
        async with tower.run("r", budget=Budget(calls=100, cost=0.45, tokens=10_000)) as run:
            done = await run.execute([Call("search", {"n": n}) for n in range(50)])
            assert codes(done) == [None] * 45 + ["budget_exhausted"] * 5
            assert done[49].waited_for == ("budget of run (cost)",)
            assert of(tower, "run:r") == ({"calls": 45, "cost": 0.45, "tokens": sum(range(45))}, {})

    stage.run(main())


def test_g9_charges_go_past_a_limit_by_what_was_in_flight(stage: Stage) -> None:
    """G9, R-95: tokens that are known only afterwards: of 10 calls, two at a time, those in flight when the budget is
    used up go past it, those that wait are refused at their grant, and the next batch at once.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def think(ctx: Context[None], n: int) -> float:
        await stage.work(f"think{n}", 1.0)
        ctx.charge(tokens=400)
        return ctx.remaining["tokens"]

    async def main() -> None:
        async with tower.run("r", budget=Budget(tokens=1000), max_concurrency=2) as run:
            done = await run.execute(calls(10, "think"))
            assert codes(done) == [None] * 4 + ["budget_exhausted"] * 6
            assert [result.value for result in done[:4]] == [600, 200, 0, 0]
            assert of(tower, "run:r") == ({"calls": 4, "tokens": 1600}, {})
            late = done[5]
            assert late.message == "Not started: this run's budget of 1000 tokens is used up."
            assert late.waited_for == ("pool run", "budget of run (tokens)")
            assert late.waited == 0.0 or late.waited > 0
            assert done.exhausted
            assert done.notice == (
                "Ran 4 of 10 calls: this run's budget of 1000 tokens is used up. Do not call more tools now; answer "
                "with what you have."
            )
            assert codes(await run.execute(calls(1, "think"))) == ["budget_exhausted"]
        assert came_on(stage) == 4

    stage.run(main())


def test_what_a_handler_charges_takes_the_place_of_what_was_asked(stage: Stage) -> None:
    """API section 1: `spends` is what a call takes until it is known what it took."""
    tower = stage.tower()

    @tower.tool(independent=True, spends={"cost": Decimal("0.5")})
    async def pay(ctx: Context[None], cost: float) -> None:
        assert of(tower, "run:r")[0]["cost"] >= 0.5
        ctx.charge(cost=cost / 2)
        ctx.charge(cost=cost / 2)

    async def main() -> None:
        async with tower.run("r", budget=Budget(cost=10)) as run:
            for cost, spent in ((0.2, 0.2), (0.9, 1.1), (0.1 + 0.2, 1.4)):
                assert (await run.execute([Call("pay", {"cost": cost})])).ok
                assert of(tower, "run:r")[0]["cost"] == spent

    stage.run(main())


def test_run_charge_counts_what_a_run_spends_itself(stage: Stage) -> None:
    """API section 2: `run.charge` counts for run, tenant and process at once; nothing starts once it is too much."""
    tower = stage.tower(budgets={"tenant": {"tokens": 5000}, "process": Budget(tokens=10**6)})
    worker(stage, tower)

    async def main() -> None:
        async with tower.run("r", tenant="a", budget=Budget(tokens=100)) as run:
            assert run.remaining == {"tokens": 100}
            run.charge(tokens=60.5, cost=0.001)
            assert run.remaining == {"tokens": 39.5}
            assert (await run.execute(calls(1))).ok
            run.charge(tokens=60)
            assert run.remaining == {"tokens": 0}
            done = await run.execute(calls(1))
            assert (codes(done), done.exhausted) == (["budget_exhausted"], True)
            for name in ("run:r", "tenant:a", "process"):
                assert of(tower, name)[0] == {"calls": 1, "tokens": 120.5, "cost": 0.001}
        run.charge(tokens=1)  # the answer of a model that ends the run
        assert of(tower, "tenant:a")[0]["tokens"] == 121.5

    stage.run(main())


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": -1},
        {"tokens": float("nan")},
        {"tokens": True},
        {"tokens": "5"},
        {"token": 5},
        {"seconds": 5},
        {"cost": 1, "tokens": None},
    ],
)
def test_a_wrong_charge_is_refused_and_charges_nothing(stage: Stage, given: dict[str, Any]) -> None:
    """DESIGN style 7: what is no amount of a unit is refused in words, and nothing of it is charged."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def think(ctx: Context[None]) -> str:
        with pytest.raises(PolicyError, match=r"^charge: "):
            ctx.charge(**given)
        return "refused"

    async def main() -> None:
        async with tower.run("r", budget=Budget(tokens=100)) as run:
            with pytest.raises(PolicyError, match=r"^charge: "):
                run.charge(**given)
            assert (await run.execute([Call("think", {})])).ok
            assert run.remaining == {"tokens": 100}

    stage.run(main())


def test_without_a_budget_a_charge_is_heard_and_nothing_is_left(stage: Stage) -> None:
    """A handler that charges runs in a tower without budgets, too."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def think(ctx: Context[None]) -> dict[str, float]:
        ctx.charge(tokens=5)
        return ctx.remaining

    async def main() -> None:
        async with tower.run() as run:
            run.charge(tokens=3)
            done = await run.execute([Call("think", {})])
            assert (done[0].value, run.remaining, done.exhausted) == ({}, {}, False)
        assert tower.statistics().budgets == {}

    stage.run(main())


def test_charges_come_from_threads_and_after_the_end(stage: Stage) -> None:
    """A sync handler charges from its thread; what it charges after its result was sealed counts, too."""
    tower = stage.tower()

    @tower.tool(independent=True, timeout=1)
    def think(ctx: Context[None]) -> None:
        ctx.charge(tokens=5)
        stage.rest(stage.loop, 3.0)
        ctx.charge(tokens=7)

    assert codes(run_batch(stage, tower, [Call("think", {})], tenant="a", budget=Budget(tokens=9))) == [
        "handler_timeout"
    ]
    seen: list[float] = []

    @tower.tool(independent=True)
    async def leave(ctx: Context[None]) -> None:
        asyncio.get_running_loop().call_later(5, lambda: (ctx.charge(tokens=2), seen.append(ctx.remaining["tokens"])))

    async def main() -> None:
        async with tower.run(budget=Budget(tokens=9)) as run:
            await run.execute([Call("leave", {})])
            await asyncio.sleep(6)
            assert (seen, run.remaining) == ([7], {"tokens": 7})

    stage.run(main())


@pytest.mark.parametrize(
    ("spends", "told"),
    [
        (lambda: {"cost": -1}, "spends gave no amounts"),
        (lambda: {"seconds": 1}, "spends gave no amounts"),
        (lambda: "zqxjk", "spends gave no amounts"),
        (lambda: None, "spends gave no amounts"),
        (lambda: {1: 2}, "spends gave no amounts"),
        (lambda: 1 / 0, "spends raised ZeroDivisionError"),
    ],
    ids=["negative", "seconds", "text", "nothing", "no unit", "raises"],
)
def test_a_function_that_gives_no_amounts_refuses_the_call(stage: Stage, spends: Any, told: str) -> None:
    """R-63: where nobody can tell what a call takes it does not start, and the others are not kept."""
    tower = stage.tower(budgets={"process": Budget(calls=5)})
    worker(stage, tower, "odd", spends=lambda n=0: spends())
    worker(stage, tower)
    done = run_batch(stage, tower, [Call("odd", {}), *calls(1)])
    assert codes(done) == ["policy_error", None]
    assert told in done[0].message
    assert "zqxjk" not in done[0].content


def test_a_function_says_what_a_call_takes(stage: Stage) -> None:
    """API section 1: `spends` as a function of the arguments: by their names, or all of them as one mapping."""
    tower = stage.tower()
    worker(stage, tower, "by_name", spends=lambda n: n)
    worker(stage, tower, "by_mapping", spends=lambda arguments: {"cost": arguments["n"] / 10})
    with pytest.raises(PolicyError, match="spends is async"):
        worker(stage, tower, "waits", spends=_waits)
    with pytest.raises(PolicyError, match="names 'x', which is no parameter of the tool"):
        worker(stage, tower, "strange", spends=lambda x: x)
    done = run_batch(
        stage, tower, [Call("by_name", {"n": 3}), Call("by_mapping", {"n": 3})], budget=Budget(calls=9, cost=9)
    )
    assert done.ok

    async def main() -> None:
        async with tower.run("r", budget=Budget(calls=5, cost=9)) as run:
            done = await run.execute(
                [Call("by_name", {"n": 3}), Call("by_mapping", {"n": 3}), Call("by_name", {"n": 2})]
            )
            assert codes(done) == [None, None, "budget_exhausted"]
            assert done[2].message == (
                "Ran 2 of 3 calls: what is left of this run's budget of 5 calls is not enough. Do not call more tools "
                "now; answer with what you have."
            )
            assert of(tower, "run:r")[0] == {"calls": 4, "cost": 0.3}
            assert not done.exhausted  # a smaller call would fit
            assert (await run.execute([Call("by_name", {"n": 2})])).exhausted  # this one would not, nor would any

    stage.run(main())


async def _waits(n: int) -> int:
    return n


def test_a_unit_of_ones_own_bounds_the_tools_that_spend_it(stage: Stage) -> None:
    """API section 1: with searches used up a run searches no more and does whatever else it likes: the loop is not told
    to stop, and the model is told to do without.
    """
    tower = stage.tower(run_concurrency=1)
    worker(stage, tower)
    worker(stage, tower, "search", spends={"searches": 1})

    async def main() -> None:
        async with tower.run(budget=Budget(searches=2)) as run:
            done = await run.execute([*calls(3, "search"), *calls(2)])
            assert codes(done) == [None, None, "budget_exhausted", None, None]
            assert done[2].message == (
                "Ran 4 of 5 calls: this run's budget of 2 searches is used up. Do without more of these calls."
            )
            done = await run.execute(calls(1, "search"))
            assert (codes(done), done.exhausted) == (["budget_exhausted"], False)
            assert (await run.execute(calls(1))).ok
            run.charge(searches=1)  # what nobody has asked for may come from anywhere
            done = await run.execute(calls(1))
            assert (codes(done), done.exhausted) == (["budget_exhausted"], True)

    stage.run(main())


def test_a_tool_that_takes_nothing_runs_when_all_is_used_up(stage: Stage) -> None:
    """API section 1: a tool that says 0 of a unit runs also when that is used up: a way to end in good order."""
    tower = stage.tower()
    worker(stage, tower)
    worker(stage, tower, "finish", spends=0)

    async def main() -> None:
        async with tower.run(budget=Budget(calls=1)) as run:
            done = await run.execute([*calls(2), Call("finish", {})])
            assert codes(done) == [None, "budget_exhausted", None]
            assert codes(await run.execute([Call("finish", {}), *calls(1)])) == [None, "budget_exhausted"]

    stage.run(main())


# ==================================================================== whom a budget counts for


def test_r95_run_tenant_and_process(stage: Stage) -> None:
    """R-95, R-102: a run's budget is its own, a tenant's counts its runs together, the process's all of them; the
    tightest one decides, and what one refuses is taken from none.
    """
    tower = stage.tower(
        budgets={"run": Budget(calls=4), "tenant": Budget(calls=6), "tenant:b": Budget(calls=2), "process": Budget(9)}
    )
    worker(stage, tower)

    async def main() -> None:
        async with tower.run("a1", tenant="a") as one, tower.run("a2", tenant="a") as two:
            assert codes(await one.execute(calls(5))) == [None] * 4 + ["budget_exhausted"]
            done = await two.execute(calls(4))
            assert codes(done) == [None, None, "budget_exhausted", "budget_exhausted"]
            assert done[2].waited_for == ("budget of tenant (calls)",)
            assert (done[2].message, done.exhausted) == (
                "Not started: this tenant's budget of 6 calls is used up.",
                True,
            )
            assert of(tower, "run:a2") == ({"calls": 2}, {})
        async with tower.run("b1", tenant="b", budget=Budget(calls=99)) as own:
            assert codes(await own.execute(calls(3))) == [None, None, "budget_exhausted"]
        async with tower.run("a3", tenant="a") as later:  # what was spent is not forgotten with the last run
            done = await later.execute(calls(2))
            assert (codes(done), done.exhausted) == (["budget_exhausted"] * 2, True)
        async with tower.run("n") as nobody:
            done = await nobody.execute(calls(2))
            assert codes(done) == [None, "budget_exhausted"]
            assert done[1].waited_for == ("budget of process (calls)",)
        assert {name: of(tower, name)[0]["calls"] for name in tower.statistics().budgets} == {
            "process": 9,
            "tenant:a": 6,
            "tenant:b": 2,
            "tenant:": 1,
        }

    stage.run(main())
    assert came_on(stage) == 9


def test_a_batch_has_a_budget_once(stage: Stage) -> None:
    """Design: a budget of batches counts the calls of one response, with those that their handlers make; the next
    response has it anew, and a batch that has used it up does not stop the loop.
    """
    tower = stage.tower(budgets={"batch": Budget(searches=3)})
    worker(stage, tower, spends={"searches": 1})

    @tower.tool(independent=True)
    async def fan_out(ctx: Context[None]) -> list[str | None]:
        return codes(await ctx.execute(calls(3)))

    async def main() -> None:
        async with tower.run() as run:
            for _ in range(2):
                done = await run.execute([Call("fan_out", {}), *calls(1)])
                assert (done.ok, done.exhausted) == (True, False)
                assert done[0].value == [None, None, "budget_exhausted"]
                assert run.remaining == {}
            done = await run.execute(calls(4))
            assert done[3].message.startswith("Ran 3 of 4 calls: this batch's budget of 3 searches is used up.")
            assert not done.exhausted

    stage.run(main())


def test_r101_nested_calls_count_and_cannot_go_round(stage: Stage) -> None:
    """R-101, G2: what a handler calls counts in the budget of its run: through its context, through the run, and also
    through a run of its own that it opens on the tower.
    """
    tower = stage.tower()
    worker(stage, tower)
    inner: list[list[str | None]] = []

    @tower.tool(independent=True)
    async def by_context(ctx: Context[None]) -> None:
        inner.append(codes(await ctx.execute(calls(3))))

    @tower.tool(independent=True)
    async def by_another_run() -> None:
        inner.append(codes(await tower.execute(calls(3), budget=Budget(calls=2))))

    async def main() -> None:
        async with tower.run("r", budget=Budget(calls=6)) as run:
            assert (await run.execute([Call("by_context", {})])).ok
            assert (await run.execute([Call("by_another_run", {})])).exhausted
            assert of(tower, "run:r") == ({"calls": 6}, {})
        assert inner == [[None] * 3, [None, "budget_exhausted", "budget_exhausted"]]

    stage.run(main())


# ==================================================================== seconds


def test_r99_nothing_starts_after_the_seconds(stage: Stage) -> None:
    """R-99: a budget of 2.5 seconds: calls of one second, one at a time: three start; those that wait are refused at
    the instant at which it is over, while the one at work goes on to its end.
    """
    tower = stage.tower(pools={"one": 1})
    worker(stage, tower, pools=["one"])
    at: dict[int, float] = {}

    def seen(result: Result) -> None:
        at[result.index] = stage.clock.value

    async def main() -> None:
        async with tower.run("r", budget=Budget(seconds=2.5, calls=99)) as run:
            done = await run.execute(calls(5), on_result=seen)
            assert codes(done) == [None, None, None, "budget_exhausted", "budget_exhausted"]
            assert (at[2], at[3], at[4]) == (3.0, 2.5, 2.5)
            assert done[3].message == "Not started: the seconds of this run's budget are over."
            assert done[3].waited_for == ("pool one", "budget of run (seconds)")
            assert tower.statistics().budgets["run:r"].refused == 2
            assert (done.exhausted, run.remaining) == (True, {"seconds": 0, "calls": 96})
            late = await run.execute(calls(2))
            assert codes(late) == ["budget_exhausted"] * 2
            assert late[0].message == "Not started: the 2.5 seconds of this run's budget are over."
            assert (late[0].waited_for, late.exhausted) == (("budget of run (seconds)",), True)
            told = tower.statistics().budgets["run:r"]
            assert (told.seconds_left, told.limits, told.per, told.renews_in) == (0.0, {"calls": 99}, None, None)

    stage.run(main())
    assert came_on(stage) == 3


@pytest.mark.parametrize(("deadline", "code"), [(1.5, "deadline_exceeded"), (9.0, "budget_exhausted")])
def test_seconds_and_a_deadline_beside_each_other(stage: Stage, deadline: float, code: str) -> None:
    """R-99: the earlier of the two is what is told; a deadline stops what runs, a budget does not."""
    tower = stage.tower(pools={"one": 1})
    worker(stage, tower, pools=["one"])
    done = run_batch(stage, tower, calls(9), budget=Budget(seconds=2.5), deadline=deadline)
    assert {one.code for one in done if not one.started} == {code}
    assert [one.code for one in done if one.started] == (
        [None, "deadline_exceeded"] if code == "deadline_exceeded" else [None] * 3
    )


def test_a_call_whose_turn_comes_after_the_seconds_does_not_start(stage: Stage) -> None:
    """R-99: a call that becomes ready behind others after the seconds are over is refused, not started."""
    tower = stage.tower()
    worker(stage, tower, writes="k", independent=None)
    done = run_batch(stage, tower, calls(4), budget=Budget(seconds=1.5))
    assert codes(done) == [None, None, "budget_exhausted", "budget_exhausted"]


def test_seconds_count_for_runs_that_a_handler_opens(stage: Stage) -> None:
    """R-99: a run that a handler opens on the tower ends its starts with the seconds of the run above it."""
    tower = stage.tower(pools={"one": 1})
    worker(stage, tower, pools=["one"])

    @tower.tool(independent=True)
    async def inside() -> list[str | None]:
        return codes(await tower.execute(calls(4)))

    done = run_batch(stage, tower, [Call("inside", {})], budget=Budget(seconds=1.5))
    assert done[0].value == [None, None, "budget_exhausted", "budget_exhausted"]


# ==================================================================== windows


def test_a_daily_budget_renews_at_midnight(stage: Stage) -> None:
    """R-95: `per="day"`: when the day is over in UTC all is there again, and a refusal says when that is."""
    tower = stage.tower(budgets={"tenant": Budget(calls=2, per="day")})
    worker(stage, tower)
    stage.clock.set(86_400 - 90.0)  # the zero of a virtual clock is midnight

    async def main() -> None:
        done = await tower.execute(calls(3), tenant="a")
        refused = done[2]
        assert (refused.code, refused.retryable, refused.retry_after) == ("budget_exhausted", "yes", 90.0)
        assert refused.message.startswith(
            "Ran 2 of 3 calls: this tenant's budget of 2 calls is used up. It renews in 90 s."
        )
        assert json.loads(refused.content)["error"]["retry_after"] == 90
        seen = tower.statistics().budgets["tenant:a"]
        assert (seen.per, seen.renews_in, seen.refused) == ("day", 89.0, 1)
        await asyncio.sleep(88.5)
        assert (await tower.execute(calls(1), tenant="a"))[0].code == "budget_exhausted"
        await asyncio.sleep(0.5)
        assert (await tower.execute(calls(2), tenant="a")).ok

    stage.run(main())


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_step_of_the_clock_neither_locks_out_nor_gives_away(stage: Stage, step: float) -> None:
    """R-95: a clock that is set back within the day changes nothing of it, nor does one that leaps forward in it."""
    tower = stage.tower(budgets={"process": Budget(calls=2, per="day")})
    worker(stage, tower, seconds=0.0)
    stage.clock.value = 40_000.0

    async def hand_in() -> list[str | None]:
        return codes(await tower.execute(calls(1)))

    stage.run(hand_in())
    left = tower.statistics().budgets["process"].renews_in
    stage.clock.value += step
    seen = tower.statistics().budgets["process"]
    assert seen.spent == {"calls": 1}
    assert left is not None
    assert seen.renews_in == (left if step < 0 else left - step)
    assert stage.run(hand_in()) == [None]
    assert stage.run(hand_in()) == ["budget_exhausted"]


def test_the_wall_clock_is_read_once() -> None:
    """R-95: a real clock's calendar is that of the machine; a virtual clock's zero is 1970."""
    assert calendar(VirtualClock(7.0)) == 0.0
    tower = Tower(budgets={"process": Budget(calls=1, per="day")})
    renews = tower.statistics().budgets["process"].renews_in
    assert renews is not None
    assert 0 < renews <= 86_400
    tower.close()


# ==================================================================== the loop above


def test_p62_the_loop_is_told_to_stop(stage: Stage) -> None:
    """P-62: budget 10 a run, one call a turn for ever: the batch in which the last of it is spent says so, further
    ones are refused without touching a limiter, and a loop that goes by `exhausted` ends.
    """
    tower = stage.tower(pools={"crm": Pool(1, rate="1000/s", breaker=True)})
    worker(stage, tower, pools=["crm"], seconds=0.01)
    turns = 0

    async def main() -> None:
        nonlocal turns
        async with tower.run(budget=Budget(calls=10)) as run:
            while True:
                done = await run.execute(calls(1))
                turns += 1
                if done.exhausted:
                    break
            assert (turns, done.ok, done.notice) == (10, True, None)
            before = tower.statistics()
            for _ in range(200):
                done = await run.execute(calls(3))
                assert (codes(done), done.exhausted) == (["budget_exhausted"] * 3, True)
                assert (done.notice or "").startswith("Ran none of 3 calls")
            after = tower.statistics()
            assert after.rates == before.rates
            assert after.pools == before.pools
            assert after.rejections["budget_exhausted"] == 600
            assert after.budgets[f"run:{run.run_id}"].refused == 600
            assert run._state.flow.tag == pytest.approx(run._state.flow.tag)

    stage.run(main())
    assert came_on(stage) == 10


def test_an_exhausted_run_says_so_whatever_is_handed_in(stage: Stage) -> None:
    """P-62: also a batch of calls that are refused for other reasons says that the run's budget is used up."""
    tower = stage.tower()
    worker(stage, tower)

    async def main() -> None:
        async with tower.run(budget=Budget(calls=1)) as run:
            await run.execute(calls(1))
            assert (await run.execute([Call("nobody", {})])).exhausted

    stage.run(main())


# ==================================================================== repeats


def test_repeated_calls_are_refused_after_so_many_turns(stage: Stage) -> None:
    """P-62: a run that makes the same call turn after turn is told after so many, until it does something new; another
    run counts for itself, and other arguments are another call.
    """
    tower = stage.tower(max_repeats=3)
    worker(stage, tower, read_only=True)
    worker(stage, tower, "write")

    async def main() -> None:
        async with tower.run(budget=Budget(calls=100)) as run:
            for _ in range(3):
                assert (await run.execute([Call("work", {"n": 1}), Call("work", '{"n": 1}')])).ok
            for _ in range(2):
                done = await run.execute([Call("work", {"n": 1}), Call("work", {"n": 2})])
                assert codes(done) == ["repeated_call", None]
            assert done[0].message == (
                "Not run: you have made this very call in 3 turns already, with nothing new in between. Use what it "
                "answered then, do something else, or answer with what you have."
            )
            assert (done[0].retryable, run.remaining) == ("no", {"calls": 92})
            assert (await run.execute([Call("write", {})])).ok
            assert (await run.execute([Call("work", {"n": 1})])).ok
        assert (await tower.execute([Call("work", {"n": 1})])).ok

    stage.run(main())


def test_p23_repeats_run_unless_asked(stage: Stage) -> None:
    """P-23: by default the same call in later turns runs, however often; a tool may bound its own, or leave it open."""
    tower = stage.tower()
    worker(stage, tower)
    bounded = stage.tower(max_repeats=1)
    worker(stage, bounded, "open", max_repeats="any")
    worker(stage, bounded)
    worker(stage, tower, "bounded", max_repeats=2)

    async def main() -> None:
        async with tower.run() as run, bounded.run() as other:
            for turn in range(8):
                done = await run.execute([Call("work", {}), Call("bounded", {})])
                assert codes(done) == [None, None if turn < 2 else "repeated_call"]
                done = await other.execute([Call("open", {}), Call("work", {})])
                assert codes(done) == [None, None if turn < 1 else "repeated_call"]

    stage.run(main())


def test_what_a_handler_calls_is_no_turn(stage: Stage) -> None:
    """Nested calls are code's own: they may repeat."""
    tower = stage.tower(max_repeats=1)
    worker(stage, tower)

    @tower.tool(independent=True)
    async def polls(ctx: Context[None], n: int) -> bool:
        return all([(await ctx.execute(calls(1))).ok for _ in range(5)])

    assert run_batch(stage, tower, [Call("polls", {"n": 1})])[0].value is True


# ==================================================================== options while calls run


def test_r64_budgets_change_while_calls_run(stage: Stage) -> None:
    """R-64: a tenant's and the process's budget change where they are: what is spent stays spent, a higher limit lets
    further batches in, a lower one meets those who wait; budgets of runs hold for runs to come.
    """
    tower = stage.tower(pools={"one": 1})
    worker(stage, tower, pools=["one"])

    async def main() -> None:
        async with tower.run("r", tenant="a") as run:
            assert (await run.execute(calls(2))).ok
            changes = tower.configure(budgets={"tenant": Budget(calls=3), "run": {"calls": 1}})
            assert [str(one) for one in changes] == [
                "budgets.tenant: none -> 3 calls",
                "budgets.run: none -> 1 calls",
            ]
            assert codes(await run.execute(calls(4))) == [None] * 3 + ["budget_exhausted"]
            assert not tower.configure(budgets={"tenant": Budget(calls=3)})
            tower.configure(budgets={"tenant": Budget(calls=10)})
            waiting = asyncio.ensure_future(run.execute(calls(5)))
            await asyncio.sleep(0.5)
            tower.configure(budgets={"tenant": Budget(calls=5)})
            assert codes(await waiting) == [None, None, *["budget_exhausted"] * 3]
            assert of(tower, "tenant:a") == ({"calls": 5}, {})
            tower.configure(budgets={"tenant": None, "process": Budget(calls=2)})
            assert "tenant:a" not in tower.statistics().budgets
            assert codes(await run.execute(calls(3))) == [None, None, "budget_exhausted"]
        assert codes(await tower.execute(calls(2))) == ["budget_exhausted"] * 2
        tower.configure(budgets={"process": None})
        assert codes(await tower.execute(calls(2))) == [None, "budget_exhausted"]
        assert tower.options.budgets == {"run": Budget(calls=1)}

    stage.run(main())


def test_what_tools_spend_changes_live(stage: Stage) -> None:
    """R-64: `spends` and `max_repeats` of tools change for calls to come, and are told."""
    tower = stage.tower(budgets={"process": Budget(calls=10)})
    worker(stage, tower)
    told = tower.configure(tools={"work": {"spends": {"calls": 5, "cost": 0.5}, "max_repeats": 2}}, max_repeats=7)
    assert [str(one) for one in told] == [
        "max_repeats: 'any' -> 7",
        "tools.work.spends: none -> 5 calls, 0.5 cost",
        "tools.work.max_repeats: none -> 2",
    ]
    assert codes(run_batch(stage, tower, calls(3))) == [None, None, "budget_exhausted"]
    assert not tower.configure(tools={"work": {"spends": {"cost": 0.5, "calls": 5.0}}})


def test_a_file_gives_budgets(stage: Stage, tmp_path: Path) -> None:
    """API section 6: budgets out of a file; an argument wins one by one, None takes one away, and reading the file
    anew changes them.
    """
    path = tmp_path / "towerman.toml"
    path.write_text(
        '[budgets.run]\ncalls = 2\n[budgets.tenant]\ncost = 1.5\nper = "day"\n[budgets."tenant:b"]\ncalls = 0\n'
        "[budgets.process]\nmails = 5\n[tools.work]\nspends = { mails = 1 }\n"
    )
    tower = stage.tower(config=path, budgets={"run": {"calls": 3}, "tenant": None})
    worker(stage, tower)
    assert tower.options.budgets == {
        "run": Budget(calls=3),
        "tenant:b": Budget(calls=0),
        "process": Budget(mails=5),
    }
    assert codes(run_batch(stage, tower, calls(4))) == [None] * 3 + ["budget_exhausted"]
    assert codes(run_batch(stage, tower, calls(1), tenant="b")) == ["budget_exhausted"]
    path.write_text("[budgets.process]\nmails = 4\n")
    assert {one.name for one in tower.configure(path)} == {"budgets.process", "budgets.tenant:b", "tools.work.spends"}
    assert tower.statistics().budgets["process"].limits == {"mails": 4}


# ==================================================================== observe, explain, events


def test_s13_observe_refuses_nobody_and_says_whom_it_would(stage: Stage) -> None:
    """S13: with mode="observe" budgets hold nobody back; the report says how many calls they would have refused, by
    the very rules: what would not have run is not counted as spent.
    """
    tower = stage.tower(mode="observe", budgets={"process": Budget(cost=1.0)}, pools={"one": 1})
    worker(stage, tower, spends={"cost": 0.3}, seconds=0.1)

    @tower.tool(independent=True)
    async def think(ctx: Context[None], n: int) -> None:
        await asyncio.sleep(n)
        ctx.charge(tokens=60)

    @tower.tool(writes="k")
    async def in_order(ctx: Context[None], n: int) -> None:
        ctx.charge(tokens=60)

    async def main() -> None:
        done = await tower.execute(calls(5), budget=Budget(seconds=0.05))
        assert (done.ok, done.exhausted, done.notice) == (True, False, None)
        assert of(tower, "process") == ({"calls": 3, "cost": 0.9}, {})
        async with tower.run(budget=Budget(tokens=100), max_concurrency=2) as run:
            assert (await run.execute([Call("think", {"n": 1})] * 5)).ok
            assert run.remaining["tokens"] == 0
            assert (await run.execute([Call("think", {"n": 1})] * 3)).ok
            assert of(tower, f"run:{run.run_id}")[0] == {"calls": 5, "tokens": 300}
        async with tower.run(budget=Budget(tokens=100)) as run:
            assert (await run.execute([Call("in_order", {"n": n}) for n in range(4)])).ok
        async with tower.run(budget=Budget(seconds=1)) as run:
            await asyncio.sleep(1)
            assert (await run.execute(calls(1))).ok

    stage.run(main())
    report = tower.report()
    assert {one.name: one.refused for one in report.budgets} == {
        "budget of process (cost)": 2,
        "budget of run (tokens)": 5,
        "budget of run (seconds)": 1,
    }
    assert "What the budgets would have refused" in str(report)
    assert "budget of process (cost)  2" in str(report)
    assert report.to_dict()["budgets"]
    assert tower.statistics().rejections == {}


def test_r140_explain_says_what_would_be_refused(stage: Stage) -> None:
    """R-140: an explanation goes by what is left now, says what the calls would spend, and spends nothing."""
    tower = stage.tower(budgets={"process": Budget(calls=5)})
    worker(stage, tower, spends={"cost": 0.25})
    run_batch(stage, tower, calls(2))
    told = tower.explain(calls(4))
    assert [one.index for one in told.refused] == [3]
    assert of(tower, "process") == ({"calls": 2, "cost": 0.5}, {})
    assert (told.refused[0].code, told.spends) == ("budget_exhausted", {"calls": 3, "cost": 0.75})
    assert told.refused[0].message == told.notice
    assert "would spend: 3 calls, 0.75 cost" in str(told)
    assert told.to_dict()["spends"] == {"calls": 3, "cost": 0.75}
    assert len(tower.explain(calls(4), budget=Budget(calls=1)).refused) == 3
    whole = tower.explain(calls(4), budget=Budget(calls=9, partial=False))
    assert (len(whole.refused), whole.spends) == (4, {})
    assert told.refused[0].message == run_batch(stage, tower, calls(4))[3].message  # the same words
    assert stage.tower().explain([]).spends == {}


def test_explain_tells_what_a_skipped_call_would_not_spend(stage: Stage) -> None:
    """R-140: a call that would be skipped takes nothing."""
    tower = stage.tower(budgets={"process": Budget(calls=2)})
    worker(stage, tower, spends=lambda n: {"cost": n})
    batch = [
        Call("nobody", {}, id="a"),
        Call("work", {"n": 1}, needs=("a",)),
        Call("work", {"n": 2}),
        Call("work", {"n": 3}),
    ]
    told = tower.explain(batch)
    assert [(one.index, one.code) for one in told.refused] == [(0, "unknown_tool"), (1, "dependency_failed")]
    assert told.spends == {"calls": 2, "cost": 5}
    worker(stage, tower, "odd", spends=lambda: 1 / 0)
    assert tower.explain([Call("odd", {})]).refused[0].code == "policy_error"


def test_g8_events_say_which_budget_and_no_amount(stage: Stage) -> None:
    """G8: the event of a refusal has its code and whose budget it was; nothing that a call asked, which may be made of
    its arguments, is in events, messages or repr.
    """
    tower = stage.tower()
    events: list[Event] = []
    tower.add_observer(events.append)
    worker(stage, tower, spends=lambda n: {"eur": n})
    done = run_batch(
        stage, tower, [Call("work", {"n": 7_654_321}), Call("work", {"n": 7_654_322})], budget=Budget(eur=10_000_000)
    )
    tower.flush()
    [refusal] = [event for event in events if event.kind == "rejected"]
    assert (refusal.code, refusal.waited_for) == ("budget_exhausted", ("budget of run (eur)",))
    told = [repr(events), repr(done), repr(tower._core.purse), repr(done[1]), done.timeline(), done[1].content]
    assert not [text for text in [*told, done[1].message] if "765432" in text]


# ==================================================================== rubbish, faults, everything at once


RUBBISH: list[Any] = [
    5,
    "calls",
    [],
    {},
    {"calls": "x"},
    {3: 4},
    {"calls": 1, "seconds": -1},
    {"calls": 1, "per": []},
    {"calls": float("inf")},
    object(),
]


@pytest.mark.parametrize("rubbish", RUBBISH, ids=[str(number) for number in range(len(RUBBISH))])
def test_rubbish_as_a_budget_names_the_place(rubbish: Any) -> None:
    """DESIGN style 7: whatever is given as a budget, it is refused in words that name the place."""
    tower = Tower()
    with pytest.raises(PolicyError, match=r"^budget"):
        tower.run(budget=rubbish)
    with pytest.raises(PolicyError, match=r"^budgets"):
        Tower(budgets={"run": rubbish})
    with pytest.raises(PolicyError, match=r"^budgets"):
        tower.configure(budgets={"process": rubbish})
    assert tower.options.budgets == {}


def test_what_a_fault_costs_is_not_the_budget(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1, G3: a fault of ours at any step of a share gives every call its result and what never started back."""
    for step in ("_reserve", "_refuse_short", "_pay", "_settle_share", "_close_share", "_sum_up"):
        tower = stage.tower(pools={"one": 1})
        worker(stage, tower, pools=["one"])

        async def main(tower: Tower, step: str) -> None:
            async with tower.run(budget=Budget(calls=3)) as run:
                with monkeypatch.context() as patched:
                    patched.setattr(Shell, step, _raise)
                    try:
                        await run.execute(calls(5))
                    except ZeroDivisionError:
                        pass
                    assert run.last_batch is not None, step
                    sound(run.last_batch, calls(5))

        stage.run(main(tower, step))


def _raise(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


moves = st.lists(
    st.tuples(st.sampled_from(["batch", "cancel", "charge", "wait", "lower"]), st.integers(0, 4)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(moves=moves, limit=st.integers(0, 12), partial=st.booleans(), places=st.integers(1, 4))
def test_g9_random_batches_on_one_budget(
    moves: Iterable[tuple[str, int]], limit: int, partial: bool, places: int
) -> None:
    """G9, G3: whatever is handed in, cancelled, charged and changed at whatever times: no more start than the budget
    has, everyone has a result, and afterwards nothing is reserved and what is spent is what has started.
    """
    stage = Stage()
    tower = stage.tower(budgets={"process": Budget(calls=limit, partial=partial)}, pools={"some": places})
    worker(stage, tower, pools=["some"])

    async def main() -> None:
        tasks: list[asyncio.Task[Any]] = []
        async with tower.run("r", budget=Budget(tokens=5)) as run:
            for move, number in moves:
                if move == "batch":
                    tasks.append(asyncio.ensure_future(run.execute(calls(number))))
                elif move == "cancel":
                    run.cancel("enough", index=number)
                elif move == "charge":
                    run.charge(tokens=number)
                elif move == "lower":
                    tower.configure(budgets={"process": Budget(calls=limit - min(number, limit), partial=partial)})
                else:
                    await asyncio.sleep(number / 4)
                tower.validate()
            for task in tasks:
                sound(await task, (await task)._batch.calls)
            assert came_on(stage) <= limit
            spent, reserved = of(tower, "process")
            assert (spent.get("calls", 0), reserved) == (came_on(stage), {})
        whole_again(tower)

    stage.run(main())
    tower._core.workers.close()
    tower._courier.close()


def test_tenants_without_runs_are_forgotten_when_they_have_renewed(stage: Stage) -> None:
    """R-102: what a tenant has spent outlives its runs, and no longer than its window; memory does not grow with
    tenants that were there once.
    """
    tower = stage.tower(budgets={"tenant": Budget(calls=5, per="minute")})
    worker(stage, tower, seconds=0.0)

    async def main() -> None:
        for number in range(50):
            await tower.execute(calls(1), tenant=f"t{number}")
        assert len(tower.statistics().budgets) == 50
        await asyncio.sleep(60)
        for _ in range(8):
            await tower.execute(calls(1), tenant="again")
        assert set(tower.statistics().budgets) == {"tenant:again"}

    stage.run(main())


def test_a_budget_is_told_in_the_run(stage: Stage) -> None:
    """API section 1: a handler sees what is left, less what others of its batch have set aside."""
    tower = stage.tower()

    @tower.tool(independent=True, spends={"cost": 1})
    async def look(ctx: Context[None]) -> dict[str, float]:
        await asyncio.sleep(0)
        return ctx.remaining

    async def main() -> None:
        async with tower.run(budget=Budget(cost=5, seconds=10)) as run:
            done = await run.execute([Call("look", {})] * 3)
            assert done[0].value == {"cost": 2, "seconds": 10}

    stage.run(main())


# ==================================================================== ways round a start


def test_what_a_closed_loop_has_reserved_is_free_again() -> None:
    """G3, P-94: a loop that is closed over calls that wait gives back what they had set aside."""
    tower = Tower(pools={"one": 1}, budgets={"process": Budget(calls=5)})

    @tower.tool(independent=True, pools=["one"])
    async def work() -> None:
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    task = loop.create_task(tower.execute([Call("work", {})] * 3))
    while not tower.statistics().running:
        loop.run_until_complete(asyncio.sleep(0))
    assert of(tower, "process") == ({"calls": 1}, {"calls": 2})
    for one in asyncio.all_tasks(loop):
        one._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    tower.statistics()
    assert of(tower, "process") == ({"calls": 1}, {})
    tower.validate()
    del task, one
    tower.close()


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_a_share_that_is_given_back_is_reserved_again(stage: Stage, mode: Any) -> None:
    """S8: a call that waits for something else gives its share back, and is refused if it finds nothing left when it
    comes again; with mode="observe" that is only counted.
    """
    tower = stage.tower(mode=mode, pools={"one": 1})
    worker(stage, tower, pools=["one"])

    async def main() -> None:
        async with tower.run("r", budget=Budget(calls=2)) as run, tower.run() as free:
            shells = tower._shells.here()
            none = asyncio.ensure_future(free.execute(calls(1)))
            await asyncio.sleep(0)
            [unpaid] = free._state.works
            shells._share_back(unpaid, 0)
            assert shells._reserve_again(unpaid, 0)
            waiting = asyncio.ensure_future(run.execute(calls(2)))
            await asyncio.sleep(0.1)
            [work] = run._state.works
            left = {"enforce": 1, "observe": 1}[mode]
            shells._share_back(work, 1)
            assert run.remaining == {"calls": left}
            assert shells._reserve_again(work, 1)
            assert run.remaining == {"calls": 0}
            shells._share_back(work, 1)
            run.charge(calls=5)
            assert shells._reserve_again(work, 1) is (mode == "observe")
            done = await waiting
            await none
            if mode == "observe":
                assert done.ok
            else:
                assert codes(done) == ["budget_exhausted"] * 2  # the first at its grant

    stage.run(main())
    if mode == "observe":
        assert {one.name for one in tower.report().budgets} == {"budget of run (calls)"}


def test_code_without_a_loop_has_budgets(stage: Stage) -> None:
    """R-95: runs as plain context managers, and one batch in a run of its own."""
    tower = Tower()

    @tower.tool(independent=True)
    def work(ctx: Context[None]) -> None:
        ctx.charge(tokens=1)

    with tower.run(budget={"calls": 3, "tokens": 10}) as run:
        done = run.execute_sync([Call("work", {})] * 5)
        assert codes(done) == [None] * 3 + ["budget_exhausted"] * 2
        assert run.remaining == {"calls": 0, "tokens": 7}
    assert tower.execute_sync([Call("work", {})] * 2, budget=Budget(calls=1)).exhausted
    tower.close()


@pytest.mark.parametrize("turns", [3, 50, 330, 355, 500])
def test_a_large_batch_is_refused_in_slices(stage: Stage, monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """R-98: a batch of many is looked over, reserved and refused with turns for the loop in between; a cancel in one of
    them seals the rest, and gives everything back.
    """
    monkeypatch.setattr(intake, "SLICE", -1.0)
    tower = stage.tower(on_excess="queue", max_batch_bytes=10**9, max_repeats=5, budgets={"process": Budget(calls=100)})
    worker(stage, tower, "asks", spends=lambda n: 1)

    async def main(cancels: bool) -> None:
        async with tower.run("r") as run:
            work = asyncio.ensure_future(run.execute(calls(300, "asks")))
            for _ in range(turns if cancels else 0):
                await asyncio.sleep(0)
            if cancels:
                run.cancel("enough")
            done = await work
            sound(done, calls(300, "asks"))
            if not cancels:
                assert codes(done) == [None] * 100 + ["budget_exhausted"] * 200

    for cancels in (True, False):
        stage.run(main(cancels))
        tower.configure(budgets={"process": Budget(calls=100 + came_on(stage))})
