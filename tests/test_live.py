"""Options that change while calls run and wait: `Tower.configure`, `Tower.policy`, and a followed file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, codes, on_stage, until

from towerman import Call, Context, PolicyError, Pool, Tower
from towerman.changes import Changes
from towerman.follow import Follower, Taken

stage = pytest.fixture(on_stage)


def worker(stage: Stage, tower: Tower, name: str = "work", **options: Any) -> None:
    """A tool whose calls take as many seconds as they are told."""

    async def work(seconds: float = 1.0) -> str:
        return await stage.work(name, seconds)

    tower.add_tool(work, **{"name": name, "independent": True, "read_only": True, **options})


def at(instant: float, act: Callable[[], Any]) -> list[Any]:
    """Do something at that virtual instant; the list is what comes of it."""
    told: list[Any] = []
    asyncio.get_running_loop().call_later(instant, lambda: told.append(act()))
    return told


def starts(stage: Stage, name: str = "work") -> list[float]:
    """When calls of a tool began."""
    return sorted(came for who, came, _ in stage.spans if who == name)


# ==================================================================== R-64: limits


def test_r64_a_higher_limit_wakes_waiters(stage: Stage) -> None:
    """R-64: raising wakes who waits, at that instant and as many as fit."""
    tower = stage.tower(pools={"crm": 1})
    worker(stage, tower, pools=["crm"])

    async def main() -> Changes:
        told = at(0.5, lambda: tower.configure(pools={"crm": 3}))
        assert (await tower.execute([Call("work", {})] * 4)).ok
        return told[0]

    changes = stage.run(main())
    assert starts(stage) == [0, 0.5, 0.5, 1]
    assert str(changes) == "pools.crm.permits: 1 -> 3\nwaiting calls that start now: 2"
    assert (changes.granted, changes.rejected, dict(changes.over), changes.too_wide) == (2, 0, {}, ())
    assert tower.options.pools["crm"] == Pool(3)
    assert tower.statistics().pools["crm"].limit == 3


def test_r64_a_lower_limit_kills_nobody(stage: Stage) -> None:
    """R-64, G3: lowering ends nothing; nobody starts until what is held has come down below the new limit."""
    tower = stage.tower(pools={"crm": 3})
    worker(stage, tower, pools=["crm"])

    async def main() -> Changes:
        told = at(0.5, lambda: tower.configure(pools={"crm": 1}))
        assert (await tower.execute([Call("work", {"seconds": number}) for number in (1, 2, 3, 1, 1)])).ok
        return told[0]

    changes = stage.run(main())
    assert starts(stage) == [0, 0, 0, 3, 4]
    assert dict(changes.over) == {"crm": 2}
    assert str(changes) == "pools.crm.permits: 3 -> 1\ncrm is held 2 above its new limit, until calls end"
    assert tower.statistics().pools["crm"].peak == 3


def test_r64_a_waiter_heavier_than_the_new_limit_is_rejected(stage: Stage) -> None:
    """R-64: whoever waits for more than there is now is answered `concurrency_limit` at once, whoever stood behind it
    goes on, and a call that comes later is refused as it comes, until there is enough again.
    """
    tower = stage.tower(pools={"crm": 4})
    worker(stage, tower, "light", pools=["crm"])
    worker(stage, tower, "heavy", pools={"crm": 3})

    async def main() -> Changes:
        told = at(0.5, lambda: tower.configure(pools={"crm": 2}))
        calls = [Call("light", {}), Call("light", {}), Call("heavy", {}), Call("heavy", {}), Call("light", {})]
        done = await tower.execute(calls)
        assert codes(done) == [None, None, "concurrency_limit", "concurrency_limit", None]
        assert done[2].waited == 0.5
        assert done[2].waited_for == ("pool crm",)
        why = "Not started: it takes more of pool crm than there is for it, even when nothing else is at work."
        assert [(done[n].message, done[n].retryable) for n in (2, 3)] == [(why, "no")] * 2
        assert why in [one.message for one in tower.explain([Call("heavy", {})]).refused]
        assert codes(await tower.execute([Call("heavy", {})])) == ["concurrency_limit"]
        tower.configure(pools={"crm": 3})
        assert codes(await tower.execute([Call("heavy", {})])) == [None]
        return told[0]

    changes = stage.run(main())
    assert (changes.rejected, changes.too_wide) == (2, ("heavy",))
    assert "waiting calls that need more than there is now, refused: 2" in str(changes)
    assert changes.to_dict() == {
        "changes": [{"name": "pools.crm.permits", "before": "4", "after": "2"}],
        "over": {"crm": 1},
        "granted": 0,
        "rejected": 2,
        "too_wide": ["heavy"],
    }


def test_r64_what_stood_behind_its_siblings_is_rejected_when_it_can_never_start(stage: Stage) -> None:
    """R-64: also a call that waited for its own run, and only then comes to the limit that was lowered."""
    tower = stage.tower(pools={"one": 2, "two": 2}, max_wait=1e9)
    worker(stage, tower, "light", pools=["two"])
    worker(stage, tower, "heavy", pools={"one": 2, "two": 1})

    async def main() -> Any:
        async with tower.run(max_concurrency=2) as run:
            calls = [Call("light", {"seconds": 5.0})] * 4 + [Call("heavy", {"seconds": 2.0})] * 6
            task = asyncio.create_task(run.execute(calls))
            await asyncio.sleep(1)
            tower.configure(pools={"one": Pool(1)})
            return await task

    assert codes(stage.run(main())) == [None] * 4 + ["concurrency_limit"] * 6
    assert stage.clock.now() == 10


def test_r64_the_limit_of_the_process_and_of_runs(stage: Stage) -> None:
    """R-64: `max_concurrency` counts over all runs at once; `run_concurrency` is that of runs which brought none of
    their own, and of runs that come.
    """
    tower = stage.tower(max_concurrency=2, run_concurrency=1)
    worker(stage, tower)
    calls = [Call("work", {})] * 4

    async def main() -> None:
        at(0.5, lambda: tower.configure(max_concurrency=9, run_concurrency=3))
        async with tower.run("plain") as plain, tower.run("own", max_concurrency=1) as own:
            first, second = await asyncio.gather(plain.execute(calls), own.execute(calls))
            assert first.ok
            assert second.ok
            pools = tower.statistics().pools
            assert (pools["run:plain"].limit, pools["run:own"].limit, pools["process"].limit) == (3, 1, 9)

    stage.run(main())
    assert starts(stage) == [0, 0, 0.5, 0.5, 1, 1, 2, 3]
    assert stage.peak == 4


def test_r64_a_narrower_run(stage: Stage) -> None:
    """R-64: a run whose window becomes narrower starts nothing until it is within it."""
    tower = stage.tower(run_concurrency=3)
    worker(stage, tower)

    async def main() -> None:
        at(0.5, lambda: tower.configure(run_concurrency=1))
        assert (await tower.execute([Call("work", {})] * 5)).ok

    stage.run(main())
    assert starts(stage) == [0, 0, 0, 1, 2]


def test_r64_a_reserve_changes(stage: Stage) -> None:
    """R-64, R-11: permits put in reserve are from then on for runs of a priority alone."""
    tower = stage.tower(pools={"crm": 3})
    worker(stage, tower, pools=["crm"])

    async def main() -> None:
        changes = tower.configure(pools={"crm": Pool(3, reserve=2)})
        assert [str(one) for one in changes] == ["pools.crm.reserve: 0 -> 2"]
        low, high = await asyncio.gather(
            tower.execute([Call("work", {})] * 2), tower.execute([Call("work", {})] * 2, priority=1)
        )
        assert low.ok
        assert high.ok

    stage.run(main())
    assert starts(stage) == [0, 0, 0, 1]


def test_r64_a_limit_that_a_tool_did_not_have(stage: Stage) -> None:
    """R-64, G3: a limit that is new counts those of its calls that are at work; when it is taken away again, whoever
    waits for it goes on at once, and nothing is remembered of it.
    """
    tower = stage.tower()
    worker(stage, tower)
    calls = [Call("work", {"seconds": 2})] * 3

    async def main() -> None:
        first = asyncio.ensure_future(tower.execute(calls))
        await asyncio.sleep(0.5)
        changes = tower.policy_changes = tower.configure(tools={"work": {"max_concurrency": 4}})  # type: ignore[attr-defined]
        assert str(changes) == "tools.work.max_concurrency: none -> 4"
        assert tower.statistics().pools["tool:work"].held == 3
        second = asyncio.ensure_future(tower.execute(calls))
        await asyncio.sleep(0.5)
        assert tower.statistics().pools["tool:work"].held == 4
        tower.validate()
        changes = tower.configure(tools={"work": {"max_concurrency": 1}})
        assert dict(changes.over) == {"tool:work": 3}
        await asyncio.sleep(0)
        assert (await first).ok
        assert tower.statistics().pools["tool:work"].held == 1
        assert (await second).ok

    stage.run(main())
    assert starts(stage) == [0, 0, 0, 0.5, 2.5, 4.5]


def test_r64_a_limit_of_a_file_is_taken_away(stage: Stage) -> None:
    """R-64: what a file does not say any more falls back: a tool's own limit and a pool are gone, those who waited for
    them go on at once, those who hold them give them back.
    """
    tower = stage.tower(config={"pools": {"crm": 1}, "tools": {"work": {"pools": ["crm"], "max_concurrency": 1}}})
    worker(stage, tower)

    async def main() -> None:
        told = at(0.5, lambda: tower.configure({"max_wait": 7}))
        assert (await tower.execute([Call("work", {})] * 3)).ok
        assert sorted(map(str, told[0])) == [
            "max_wait: 30 -> 7",
            "pools.crm: Pool(permits=1) -> none",
            "tools.work.max_concurrency: 1 -> none",
            "tools.work.pools: 'crm': 1 -> none",
        ]

    stage.run(main())
    assert starts(stage) == [0, 0.5, 0.5]
    assert tower.options.pools == {}
    assert sorted(tower.statistics().pools) == ["process"]


@pytest.mark.parametrize("limit", ["pool", "tool"])
@pytest.mark.parametrize("where", ["plan", "gate", "nested"])
def test_r64_a_limit_that_is_taken_away_and_given_again(stage: Stage, limit: str, where: str) -> None:
    """R-64, G3: a limit that comes back counts the calls that were handed in before it went, whether they still wait
    for siblings, stand in the gate, or are made by a call at work.
    """
    tool = {"pools": ["crm"]} if limit == "pool" else {"max_concurrency": 1}
    file = {"pools": {"crm": 1}, "tools": {"work": tool}}
    tower = stage.tower(config=file, max_concurrency=1 if where == "gate" else 9)
    worker(stage, tower)
    worker(stage, tower, "before")

    @tower.tool(independent=True)
    async def outer(ctx: Context[None]) -> bool:
        return (await ctx.execute([Call("before", {}, "a"), *[Call("work", {}, needs=("a",))] * 3])).ok

    def change() -> None:
        for _ in range(3):
            tower.configure({})
            tower.configure(file)
        tower.configure(max_concurrency=9)
        tower.validate()

    calls = {
        "plan": [Call("before", {}, "a"), *[Call("work", {}, needs=("a",))] * 3],
        "gate": [Call("before", {}), *[Call("work", {})] * 3],
        "nested": [Call("outer", {})],
    }

    async def main() -> None:
        at(0.5, change)
        assert (await tower.execute(calls[where])).ok

    stage.run(main())
    begin = 0.5 if where == "gate" else 1
    assert starts(stage) == [begin, begin + 1, begin + 2]
    assert "pool:crm" not in {key for key, pool in tower._core.gate.ledger.pools.items() if pool.held}


def test_r64_a_run_that_is_closed_by_another_loop_while_its_batch_is_looked_over() -> None:
    """R-64, G1: the limits of a run go with it; what of it is still being looked over elsewhere is answered."""
    tower = Tower(pools={"mine": Pool(1, scope="run")})
    run = tower.run()

    def places(place: int) -> str:
        if place == 1:
            thread = threading.Thread(target=lambda: asyncio.run(run.aclose()))
            thread.start()
            thread.join(30)
        return f"place:{place}"

    @tower.tool(reads=places)
    async def look(place: int) -> None:
        raise AssertionError("it was closed before")

    @tower.tool(independent=True, pools=["mine"])
    async def other() -> None:
        raise AssertionError("it was closed before")

    calls = [Call("look", {"place": 0}), Call("look", {"place": 1}), Call("other", {}), Call("look", {"place": 2})]
    batch = asyncio.run(run.execute(calls))
    assert codes(batch) == ["cancelled", "cancelled", "run_closed", "cancelled"]
    assert sorted(tower.statistics().pools) == ["process"]
    tower.validate()


def test_tools_are_declared_while_batches_are_looked_over() -> None:
    """P-94, G1: tools may be declared on one thread while batches begin and end on another: what these are putting in
    is left to them, and the locks that a tool makes necessary are taken by calls that were looked over before.
    """
    tower = Tower(max_calls_per_batch=300)
    run = tower.run()
    told: list[str] = []

    def declare(place: int) -> None:
        tower.add_tool(alone, name=f"alone_{place}", sequential=True)
        tower.add_tool(alone, name=f"below_{place}", reads="place:a/**")

    def places(place: int) -> str:
        if place in (100, 200):
            (work,) = run._state.works
            wants = work.wants
            thread = threading.Thread(target=declare, args=(place,))
            thread.start()
            thread.join(30)
            assert work.wants is wants
        return f"place:a/{place}"

    async def alone() -> None:
        told.append("alone")

    @tower.tool(reads=places)
    async def look(place: int) -> None:
        held = tower._core.gate.ledger.node("place:a/**")
        assert held is not None and not held.idle, "the lock above it is not held"

    batch = asyncio.run(run.execute([Call("look", {"place": place}) for place in range(300)]))
    assert codes(batch) == [None] * 300
    again = asyncio.run(run.execute([Call("look", {"place": 1}), Call("alone_100", {})]))
    assert codes(again) == [None] * 2 and told == ["alone"]
    tower.validate()


def test_options_change_while_a_tool_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-64: of a declaration and a change at the same time the later one sees what the earlier one has said."""
    from towerman import tools
    from towerman.tower import declaring

    tower = Tower()
    changer = threading.Thread(target=lambda: tower.policy("late", timeout=7))

    def meanwhile(*given: Any) -> Any:
        made = tools.compile_tool(*given)
        if not changer.ident:
            changer.start()
            until(lambda: not changer.is_alive() or tower._changing.locked())
        return made

    monkeypatch.setattr(declaring, "compile_tool", meanwhile)
    tower.add_tool(lambda: None, name="late", independent=True)
    changer.join(30)
    assert tower._core.tools["late"].timeout == 7


def test_r64_a_caller_is_given_a_limit_for_which_its_own_calls_wait(stage: Stage) -> None:
    """R-64, S10: what a caller is counted in from now on it also lends from now on: its calls go on at once."""
    tower = stage.tower(pools={"crm": 1})
    worker(stage, tower, pools=["crm"])
    worker(stage, tower, "other", pools=["crm"])

    @tower.tool(independent=True)
    async def outer(ctx: Context[None]) -> bool:
        await asyncio.sleep(1)
        return (await ctx.execute([Call("work", {})])).ok

    async def main() -> None:
        told = at(2, lambda: tower.configure(tools={"outer": {"pools": ["crm"]}}))
        assert (await tower.execute([Call("other", {"seconds": 9}), Call("outer", {})])).ok
        assert (told[0].granted, dict(told[0].over)) == (1, {"crm": 1})

    stage.run(main())
    assert starts(stage) == [2]


@pytest.mark.parametrize("scope", ["process", "run", "tenant"])
def test_r64_a_pool_that_a_tool_did_not_take_of(stage: Stage, scope: Any) -> None:
    """R-64, G3: a pool of any scope that a tool takes of from now on counts what of it is at work and waits."""
    tower = stage.tower(run_concurrency=2)
    worker(stage, tower)

    async def main() -> None:
        file = {"pools": {"new": {"permits": 1, "scope": scope}}, "tools": {"w*": {"pools": ["new"]}}}
        at(0.5, lambda: tower.configure(file))
        assert (await tower.execute([Call("work", {})] * 5, tenant="t")).ok

    stage.run(main())
    assert starts(stage) == [0, 0, 1, 2, 3]


def test_r64_nested_calls_and_their_callers(stage: Stage) -> None:
    """R-64, S10: a limit that is new counts a caller that waits, which then lends it; a lower limit that closes a
    circle of waits is told at once, `would_deadlock`, and a call that can borrow what it needs goes on.
    """
    tower = stage.tower(pools={"crm": 3})
    worker(stage, tower, "leaf", pools=["crm"])

    @tower.tool(independent=True)
    async def agent(children: int) -> list[str | None]:
        return codes(await tower.execute([Call("leaf", {})] * children))

    async def main() -> None:
        told = at(0.5, lambda: tower.configure(pools={"crm": 1}, tools={"agent": {"pools": ["crm"]}}))
        done = await tower.execute([Call("agent", {"children": 1}), Call("agent", {"children": 2})])
        assert done.ok
        assert [result.value for result in done] == [[None], [None, None]]
        assert dict(told[0].over) == {"crm": 4}  # three leaves, and two callers beside what they lend

    stage.run(main())

    @tower.tool(independent=True, pools=["crm"])
    async def circle() -> list[str | None]:
        await stage.work("circle", 1)
        return codes(await tower.execute([Call("wide", {})]))

    tower.configure(pools={"crm": 3})
    worker(stage, tower, "wide", pools={"crm": 2})

    async def closes() -> None:
        at(1.5, lambda: tower.configure(pools={"crm": 2}))
        long = asyncio.ensure_future(tower.execute([Call("leaf", {"seconds": 5})]))
        await asyncio.sleep(0)
        done = await tower.execute([Call("circle", {})] * 2)
        assert [result.value for result in done] == [[None], ["would_deadlock"]]
        assert (await long).ok

    stage.run(closes())


def test_r64_orphans_count_in_a_new_limit(stage: Stage) -> None:
    """R-64, G7: work that goes on after its result was sealed holds a limit that is new, too."""
    tower = stage.tower(grace=0)

    @tower.tool(independent=True, read_only=True, timeout=1)
    async def stubborn() -> str:
        return await stage.stubborn("stubborn", 5)

    async def main() -> None:
        async with tower.run() as run:
            assert codes(await run.execute([Call("stubborn", {})])) == ["handler_timeout"]
            tower.configure(tools={"stubborn": {"max_concurrency": 1, "max_wait": 2}})
            seen = tower.statistics().pools["tool:stubborn"]
            assert (seen.held, seen.orphaned) == (1, 1)
            assert codes(await run.execute([Call("stubborn", {})])) == ["wait_timeout"]
        await stage.settled(tower)

    stage.run(main())


# ==================================================================== other options


def test_times_and_bounds_hold_for_calls_that_come(stage: Stage) -> None:
    """R-64: a timeout, a wait and a bound hold for calls that come after the change; those on their way keep theirs."""
    tower = stage.tower(pools={"crm": 1}, timeout=50, max_wait=50)
    worker(stage, tower, pools=["crm"])

    async def main() -> None:
        first = asyncio.ensure_future(tower.execute([Call("work", {"seconds": 9})] * 2))
        await asyncio.sleep(1)
        changes = tower.configure(timeout=2, max_wait=3, max_queued=1, grace=0, on_orphan="release", debug=True)
        assert sorted(one.name for one in changes) == [
            "debug",
            "grace",
            "max_queued",
            "max_wait",
            "on_orphan",
            "timeout",
        ]
        two = await asyncio.gather(*(tower.execute([Call("work", {})]) for _ in range(2)))
        assert [codes(one) for one in two] == [["wait_timeout"], ["queue_full"]]
        assert (await first).ok
        assert codes(await tower.execute([Call("work", {"seconds": 9})])) == ["handler_timeout"]

    stage.run(main())


def test_caps_and_sizes_hold_at_once(stage: Stage) -> None:
    """R-64: the cap on calls and the bound of results hold for the next batch."""
    tower = stage.tower()
    tower.add_tool(lambda: "x" * 5_000, name="long", independent=True)
    tower.configure(max_calls_per_batch=1, max_result_bytes=100)

    done = stage.run(tower.execute([Call("long", {})] * 2))
    assert codes(done) == [None, "call_cap"]
    assert len(done[0].content.encode()) <= 100


def test_the_order_of_authority_holds_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """API section 1: argument, then environment, then file, then default, also when the file is read anew; what is
    given to `configure` is an argument.
    """
    monkeypatch.setenv("TOWERMAN_MAX_WAIT", "11")
    tower = Tower({"max_wait": 1, "timeout": 1, "grace": 1}, timeout=2)
    assert (tower.options.max_wait, tower.options.timeout, tower.options.grace) == (11, 2, 1)
    changes = tower.configure({"max_wait": 3, "timeout": 3, "max_queued": 3})
    assert [str(one) for one in changes] == ["max_queued: 1000 -> 3", "grace: 1 -> 5"]
    tower.configure(max_wait=4)
    assert tower.options.max_wait == 4
    tower.configure({"max_wait": 5})
    assert (tower.options.max_wait, tower.options.max_queued) == (4, 1000)
    tower.close()


def test_a_number_for_a_pool_changes_its_permits_alone() -> None:
    """R-64: `pools={"crm": 4}` keeps the pool's bound, scope and reserve; a Pool replaces them."""
    tower = Tower(pools={"crm": Pool(2, max_queued=7, reserve=1), "db": 1})
    tower.configure(pools={"crm": 4})
    assert tower.options.pools == {"crm": Pool(4, max_queued=7, reserve=1), "db": Pool(1)}
    assert [str(one) for one in tower.configure(pools={"crm": Pool(4), "new": Pool(3, max_queued=2)})] == [
        "pools.crm.max_queued: 7 -> none",
        "pools.crm.reserve: 1 -> 0",
        "pools.new: none -> Pool(permits=3, max_queued=2)",
    ]
    tower.add_tool(lambda: "done", name="work", pools=["new"], independent=True)
    assert tower.execute_sync([Call("work", {})]).ok
    tower.close()


def test_nothing_changes_where_nothing_is_different() -> None:
    """The same said once more is no change, and says so."""
    tower = Tower(pools={"crm": 2}, timeout=3)
    for nothing in (tower.configure(), tower.configure(timeout=3, pools={"crm": 2}), tower.configure({})):
        assert not nothing
        assert list(nothing) == []
        assert nothing[:] == ()
        assert str(nothing) == "nothing has changed"
    tower.close()


def test_every_kind_of_value_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is told as it would be written; functions, long texts and the environment's values are not shown."""
    monkeypatch.setenv("PLACE", "S3CRET")
    tower = Tower()
    tower.add_tool(
        lambda path: path, name="read", reads="file:{path}", schema={"type": "object", "properties": {"path": {}}}
    )
    options = {"reads": ["dir:${PLACE}/{path}", "dir:x"], "description": "y" * 500, "own_task": False, "timeout": 2.5}
    told = [str(one) for one in tower.configure({"tools": {"read": {**options, "reads": "dir:x"}}})]
    assert told == [
        "tools.read.timeout: none -> 2.5",
        "tools.read.own_task: True -> False",
        "tools.read.description: a text -> another text",
    ]  # what is given at the tool wins over the file
    tower.policy("other", reads=lambda arguments: ["k"], encode=str)
    tower.add_tool(lambda path: path, name="other", schema={"type": "object", "properties": {"path": {}}})
    told = [str(one) for one in tower.configure({"tools": {"other": {"max_wait": 1}}})]
    assert told == [
        "tools.read.timeout: 2.5 -> none",
        "tools.read.own_task: False -> True",
        "tools.read.description: a text -> another text",
        "tools.other.max_wait: none -> 1",
    ]
    tower.policy("other", encode=repr)
    changes = tower.configure({"tools": {"other": {"reads": options["reads"], "pools": {"a": 2}}}, "pools": {"a": 3}})
    assert "S3CRET" not in str(changes) + repr(changes) + json.dumps(changes.to_dict())
    tower.close()


# ==================================================================== refusals: nothing of it is taken


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_concurrency": 0}, "max_concurrency: a whole number, 1 or more; got 0"),
        ({"max_concurency": 3}, "configure: no option 'max_concurency'; did you mean 'max_concurrency'?"),
        ({"mode": "observe"}, "mode: a tower keeps its mode for life"),
        ({"pools": {"crm": 0}}, "pools.crm: a whole number, 1 or more; got 0"),
        ({"pools": {"crm": Pool(2, scope="run")}}, "pools.crm.scope: a pool keeps the scope 'process' for life"),
        ({"pools": 3}, "pools: a mapping of name to permits or Pool"),
        ({"pools": {"db": Pool(2, reserve=1)}}, None),
        ({"tools": {"work": {"timeout": -1}}}, "policy 'work': timeout: seconds, more than 0; got -1"),
        ({"tools": {"work": {"pools": ["crn"]}}}, "no pool 'crn'; did you mean 'crm'?"),
        ({"tools": {"work": {"weight": 99}}}, "weight 99 is more than the tower's max_concurrency 32"),
        ({"tools": {"work": 3}}, "configure: tools.'work': a mapping of options; got 3"),
        ({"tools": 3}, "configure: tools: a mapping such as"),
        ({"config": {"max_wait": -1}}, "max_wait: seconds, more than 0; got -1"),
        ({"config": "/nowhere/towerman.toml"}, "there is no such file"),
        ({"config": {"pools": {}}, "timeout": "x"}, "timeout: a finite number of seconds; got 'x'"),
        ({"observers": [print]}, "configure: no option 'observers'"),
    ],
)
def test_a_wrong_change_is_refused_whole(stage: Stage, change: dict[str, Any], told: str | None) -> None:
    """Validate first, commit second: with one mistake nothing of a change is taken, and the message names the place."""
    tower = stage.tower(pools={"crm": 2}, max_wait=9)
    worker(stage, tower, pools=["crm"])
    before = tower.options, tower._core.tools["work"], tower._layers, dict(tower.statistics().pools)
    if told is None:
        assert tower.configure(**change)
        return
    with pytest.raises(PolicyError) as wrong:
        tower.configure(**{"max_queued": 5, **change})
    assert told in str(wrong.value)
    assert before == (tower.options, tower._core.tools["work"], tower._layers, dict(tower.statistics().pools))


def test_g4_what_tools_touch_changes_between_calls_only(stage: Stage) -> None:
    """G4: while calls are at work, also as orphans, what a declared tool touches cannot change; all else can, and
    afterwards it can, too.
    """
    tower = stage.tower()
    worker(stage, tower, independent=None, read_only=None, writes="k")

    async def main() -> None:
        async with tower.run() as run:
            going = asyncio.ensure_future(run.execute([Call("work", {})]))
            await asyncio.sleep(0.5)
            tower.configure(tools={"work": {"only_call": True}}, undeclared="exclusive", config={"tools": {}})
            tower.policy("other", timeout=1)
            with pytest.raises(PolicyError, match="it changes what 'work' touches, and calls are at work"):
                tower.configure({"tools": {"work": {"sequential": True}}})
            tower.configure(tools={"work": {"timeout": 3}})
            assert (await going).ok
            tower.configure({"tools": {"work": {"sequential": True}}})
            assert (await run.execute([Call("work", {})])).ok

    stage.run(main())


# ==================================================================== many loops and threads


def test_a_change_reaches_waiters_of_every_loop() -> None:
    """R-64, P-95: a change from a plain thread wakes those who wait on each loop, on their own loops."""
    tower = Tower(pools={"crm": 1}, max_wait=60)
    held, go = threading.Event(), threading.Event()
    inside = 0

    @tower.tool(independent=True, pools=["crm"])
    async def hold() -> None:
        held.set()
        await asyncio.to_thread(go.wait, 30)

    @tower.tool(independent=True, pools=["crm"])
    async def quick() -> int:
        nonlocal inside
        inside += 1
        return threading.get_ident()

    def one(tool: str) -> None:
        ident = threading.get_ident()
        done = asyncio.run(tower.execute([Call(tool, {})]))
        assert done.ok
        if tool == "quick":
            assert done[0].value == ident

    threads = [threading.Thread(target=one, args=("hold",))]
    threads[0].start()
    assert held.wait(30)
    threads += [threading.Thread(target=one, args=("quick",)) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    until(lambda: tower.statistics().waiting == 3)
    assert inside == 0
    tower.configure(pools={"crm": 2})
    for thread in threads[1:]:
        thread.join(30)
    assert inside == 3
    go.set()
    threads[0].join(30)
    tower.validate()
    tower.close()


def test_changes_while_threads_go_on() -> None:
    """R-64, G1, G3: limits of every kind go up and down while batches run on several loops and threads: each call has
    its result, no limit is ever exceeded by those who start under it, and in the end nothing is held.
    """
    tower = Tower(pools={"crm": 4}, max_wait=60, max_calls_per_batch=100)
    lock, at_once, peak = threading.Lock(), 0, 0

    @tower.tool(independent=True, pools=["crm"])
    async def work() -> None:
        nonlocal at_once, peak
        with lock:
            at_once += 1
            peak = max(peak, at_once)
        await asyncio.sleep(0)
        with lock:
            at_once -= 1

    @tower.tool(independent=True)
    def thread() -> None:
        return None

    results: list[str | None] = []

    def batches() -> None:
        for _ in range(12):
            done = tower.execute_sync([Call("work", {}), Call("thread", {})] * 10)
            results.extend(codes(done))

    threads = [threading.Thread(target=batches) for _ in range(3)]
    for one in threads:
        one.start()
    number = 0
    while any(one.is_alive() for one in threads):
        number += 1
        tower.configure(
            max_concurrency=1 + number % 7,
            run_concurrency=1 + number % 3,
            pools={"crm": 1 + number % 4},
            tools={"work": {"max_concurrency": 1 + number % 5}, "thread": {"pools": ["crm"]} if number % 2 else {}},
        )
        tower.validate()
    for one in threads:
        one.join()
    assert results == [None] * 720
    assert peak <= 4
    tower.validate()
    seen = tower.statistics()
    assert (seen.running, seen.waiting, seen.behind) == (0, 0, 0)
    assert number > 3
    tower.close()


@settings(max_examples=40)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0]),
            st.fixed_dictionaries(
                {},
                optional={
                    "max_concurrency": st.integers(1, 5),
                    "run_concurrency": st.integers(1, 4),
                    "pools": st.fixed_dictionaries({}, optional={"a": st.integers(1, 4), "b": st.integers(1, 3)}),
                    "tools": st.fixed_dictionaries(
                        {},
                        optional={
                            "one": st.fixed_dictionaries(
                                {}, optional={"max_concurrency": st.integers(1, 3), "pools": st.just(["a", "b"])}
                            ),
                            "two": st.fixed_dictionaries({}, optional={"weight": st.just(1), "timeout": st.just(9)}),
                        },
                    ),
                },
            ),
        ),
        max_size=6,
    ),
    calls=st.lists(st.sampled_from(["one", "two", "wide", "write"]), min_size=1, max_size=14),
)
def test_r64_any_changes_at_any_time(changes: list[tuple[float, dict[str, Any]]], calls: list[str]) -> None:
    """R-64, G1, G3: whatever changes and whenever, each call has one result: `ok`, or `concurrency_limit` where it
    needs more than there is; in the end the whole capacity can be taken.
    """
    made = on_stage()
    stage = next(made)
    tower = stage.tower(pools={"a": 2, "b": 3}, max_concurrency=4)
    worker(stage, tower, "one", pools=["a"])
    worker(stage, tower, "two", pools=["b"], max_concurrency=2)
    worker(stage, tower, "wide", pools={"a": 2, "b": 2}, weight=2)
    worker(stage, tower, "write", independent=None, read_only=None, writes="k")

    async def main() -> None:
        for instant, change in changes:
            at(instant, lambda change=change: tower.configure(**change))  # type: ignore[misc]
        first, second = await asyncio.gather(
            tower.execute([Call(name, {}) for name in calls]), tower.execute([Call(name, {}) for name in calls])
        )
        for name, code in zip(calls * 2, codes(first) + codes(second), strict=True):
            assert code is None or (code == "concurrency_limit" and name == "wide"), (name, code)

    stage.run(main(), leftovers=True)
    for _ in made:
        pass


def test_s13_changes_while_observing(stage: Stage) -> None:
    """S13, R-64: in observe mode a limit that changes holds nobody back either; what is above it is counted from then
    on against the new one.
    """
    tower = stage.tower(mode="observe", pools={"crm": 5})
    worker(stage, tower, pools=["crm"])

    async def main() -> None:
        at(1, lambda: tower.configure(pools={"crm": 1}, tools={"work": {"max_concurrency": 2}}))
        at(1.5, lambda: tower.configure({"pools": {"new": 1}, "tools": {"work": {"pools": ["crm", "new"]}}}))
        at(2, lambda: tower.configure(pools={"crm": 4}))
        assert (await tower.execute([Call("work", {"seconds": 3})] * 3)).ok

    stage.run(main())
    assert starts(stage) == [0, 0, 0]
    found = {one.name: one for one in tower.report().limits}
    assert (found["crm"].limit, found["crm"].peak, found["crm"].over_seconds) == (4, 3, 1.0)
    assert (found["tool:work"].limit, found["tool:work"].peak) == (2, 3)


def test_a_handler_may_change_limits(stage: Stage) -> None:
    """R-64: a call of the tower itself may change its limits, also those that it holds."""
    tower = stage.tower(pools={"crm": 1})

    @tower.tool(independent=True, pools=["crm"])
    async def tune(ctx: Context) -> list[str | None]:
        tower.configure(pools={"crm": 2}, tools={"tune": {"max_concurrency": 1}})
        return codes(await ctx.execute([Call("other", {})]))

    worker(stage, tower, "other", pools=["crm"])
    done = stage.run(tower.execute([Call("tune", {}), Call("other", {})]))
    assert done.ok
    assert done[0].value == [None]


# ==================================================================== a followed file


def write(path: Path, text: str) -> None:
    """Put a file in place at once, with another time than before."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_a_followed_file_counts_once_it_stands_still(tmp_path: Path) -> None:
    """A change is told when the file is the same in two looks; a change that cannot be taken yet is told again; one
    that has gone, or came back as it was, is none.
    """
    path = tmp_path / "towerman.toml"
    write(path, "a")
    told: list[str] = []
    answers = [Taken.DONE]

    def changed() -> Taken:
        told.append(path.read_text() if path.exists() else "gone")
        return answers.pop() if answers else Taken.DONE

    follower = Follower(str(path), changed, 1, lambda: True)
    assert follower.look() is Taken.DONE
    write(path, "ab")
    follower.look()
    write(path, "abc")
    follower.look()
    assert told == []
    follower.look()
    follower.look()
    assert told == ["abc"]
    path.unlink()
    follower.look()
    write(path, "abcd")
    answers[:] = [Taken.DONE, Taken.LATER]
    for _ in range(5):
        follower.look()
    assert told == ["abc", "abcd", "abcd"]
    path.unlink()
    for _ in range(3):
        follower.look()
    assert told[3:] == ["gone"]


def test_r64_a_watched_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R-64: an edit of the file comes into force in the running tower, and is logged; a wrong edit changes nothing, and
    is logged with its place; the next right one counts again.
    """
    caplog.set_level(logging.INFO, "towerman")
    path = tmp_path / "towerman.toml"
    write(path, "[pools]\ncrm = 2\n")
    tower = Tower(path)
    tower.add_tool(lambda: "done", name="work", pools=["crm"], independent=True)
    tower.watch(0.01)
    write(path, "max_wait = 4\n[pools]\ncrm = 5\n")
    until(lambda: tower.options.pools["crm"].permits == 5)
    until(lambda: "pools.crm.permits: 2 -> 5" in caplog.text)
    assert tower.options.max_wait == 4
    write(path, "max_wait = 4\n[pools]\ncrn = 5\n")
    until(lambda: "not taken, what held before still holds" in caplog.text)
    assert "no pool 'crm'" in caplog.text
    assert tower.options.pools == {"crm": Pool(5)}
    write(path, "[pools.crm]\npermts = 5\n")
    until(lambda: "did you mean 'permits'?" in caplog.text)
    assert [one.getMessage().count(str(path)) for one in caplog.records if "permts" in one.getMessage()] == [1]
    path.unlink()
    until(lambda: "there is no such file" in caplog.text)
    write(path, "[pools]\ncrm = 1\n")
    until(lambda: tower.options.pools["crm"].permits == 1)
    assert tower.options.max_wait == 30
    follower = tower._follower
    assert follower is not None
    tower.watch(0.01)
    until(lambda: not follower.alive)
    last = tower._follower
    assert last is not None
    tower.close()
    until(lambda: not last.alive)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_watched_file_that_is_no_file_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R-64, G12: a pipe or a folder in the place of the file is told and not waited for: other changes go on."""
    path = tmp_path / "towerman.toml"
    write(path, "max_wait = 2\n")
    tower = Tower(path)
    tower.watch(0.01)
    path.unlink()
    os.mkfifo(path)
    until(lambda: "is no file any more" in caplog.text)
    assert tower.configure(max_wait=3)
    path.unlink()
    path.mkdir()
    until(lambda: caplog.text.count("is no file any more") == 2)
    path.rmdir()
    write(path, "timeout = 4\n")
    until(lambda: tower.options.timeout == 4)
    assert tower.options.max_wait == 3
    tower.close()


def test_a_watched_file_waits_for_calls_at_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """G4: an edit of what tools touch is taken once nothing is at work, and is told once meanwhile."""
    path = tmp_path / "towerman.toml"
    write(path, "")
    tower = Tower(path)
    inside, go = threading.Event(), threading.Event()

    @tower.tool
    def work() -> None:
        inside.set()
        go.wait(30)

    tower.watch(0.01)
    thread = threading.Thread(target=lambda: tower.execute_sync([Call("work", {})]))
    thread.start()
    assert inside.wait(30)
    write(path, '[tools.work]\nwrites = "k"\n')
    until(lambda: "not taken yet" in caplog.text)
    go.set()
    thread.join(30)
    until(lambda: tower._core.tools["work"].policy.writes == "k")
    assert caplog.text.count("not taken yet") == 1
    tower.unwatch()
    tower.unwatch()
    tower.close()


def test_a_tower_that_nobody_keeps_is_not_kept_by_its_file(tmp_path: Path) -> None:
    """G12: the thread that follows a file ends with its tower, closed or dropped."""
    path = tmp_path / "towerman.toml"
    write(path, "")
    tower = Tower(path)
    tower.watch(0.01)
    follower = tower._follower
    assert follower is not None
    del tower
    import gc

    gc.collect()
    until(lambda: not follower.alive)
    closed = Tower(path)
    closed.close()
    closed.watch(0.01)
    follower = closed._follower
    assert follower is not None
    until(lambda: not follower.alive)
    with pytest.raises(PolicyError, match="watch: the tower was made without a file"):
        Tower().watch()
    with pytest.raises(PolicyError, match="watch: every: seconds, more than 0; got 0"):
        Tower(path).watch(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_watched_file_after_a_fork(tmp_path: Path) -> None:
    """P-94: in the child of a fork the file is still followed."""
    path = tmp_path / "towerman.toml"
    write(path, "")
    tower = Tower(path)
    tower.watch(0.01)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, b"go")
            until(lambda: tower.options.max_wait == 3)
            os.write(writer, b"ok")
        finally:
            os._exit(0)
    assert os.read(reader, 2) == b"go"
    write(path, "max_wait = 3\n")
    assert os.read(reader, 2) == b"ok"
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    tower.close()
