"""Rule S4: one batch that several hosts go on with at the same time, in one process. Nothing runs twice, and each of
them is told at its end what is true then.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, here, on_stage, sound

from towerman import Approved, BatchResult, Budget, Call, Context, Denied, Retry, Run, Tower

stage = pytest.fixture(on_stage)

AT_WORK = "Not run again: whoever went on with this batch before is at work with it."


def told(batch: BatchResult) -> list[tuple[str, str | None, str]]:
    """What a model would be told of each call."""
    return [(one.outcome, one.code, one.content) for one in batch]


def outcomes(batch: BatchResult) -> list[str]:
    """The code of each result, or ok."""
    return [result.code or result.outcome for result in batch]


def yes(batch: BatchResult) -> dict[str, Approved | Denied | None]:
    """Everything that is asked for is approved."""
    return {one.approval_id: Approved() for one in batch.pending}


def bank(stage: Stage, seconds: float = 1.0, **options: Any) -> Tower:
    """Accounts: `pay` needs approval, `balance` reads, `stamp` and `put` may be answered by the run of another one."""
    tower = stage.tower(**options)

    @tower.tool(writes="account:{account}", requires_approval=True)
    async def pay(account: str, name: str) -> str:
        return await stage.work(name, seconds)

    @tower.tool(reads="account:{account}")
    async def balance(account: str, name: str) -> str:
        return await stage.work(name, seconds)

    @tower.tool(writes="account:{account}", share_identical=True)
    async def stamp(account: str, ctx: Context) -> str:
        return await stage.work(f"stamp {account}", seconds)

    @tower.tool(writes="account:{account}", merge=lambda sets: {**sets[0], "names": "+".join(n["names"] for n in sets)})
    async def put(account: str, names: str) -> str:
        for name in names.split("+"):
            stage.started[name] += 1
        return await stage.work(f"put {names}", seconds)

    return tower


CHAIN = [
    Call("pay", {"account": "x", "name": "first"}),
    Call("balance", {"account": "x", "name": "between"}),
    Call("pay", {"account": "x", "name": "last"}),
    Call("balance", {"account": "x", "name": "after"}, id="b", needs=()),
]


@pytest.mark.parametrize("hosts", [2, 4, 9])
@pytest.mark.parametrize("apart", [0.0, 0.5, 1.5])
def test_s4_several_go_on_at_once_with_calls_that_stand_behind_one_another(
    stage: Stage, hosts: int, apart: float
) -> None:
    """S4: each call runs once, in emitted order, and every host has all the results when it is done."""
    tower = bank(stage)

    async def main() -> list[BatchResult]:
        async with tower.run() as run:
            first = await run.execute(CHAIN)
            state, decisions = first.state(), yes(first)

            async def go_on(number: int) -> BatchResult:
                await asyncio.sleep(number * apart)
                return await run.resume(state, decisions)

            return await asyncio.gather(*(go_on(number) for number in range(hosts)))

    found = stage.run(main())
    for one in found:
        sound(one, CHAIN)
        assert one.ok
        assert told(one) == told(found[0])
    assert stage.started == {"first": 1, "between": 1, "last": 1, "after": 1}
    assert [name for name, _, _ in stage.spans] == ["first", "between", "last", "after"]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_s4_nothing_runs_twice_whoever_goes_on_when(data: st.DataObject) -> None:
    """S4, G1: random batches with calls behind others, identical ones, and ones that are merged; random hosts, moments
    and decisions. A call runs at most once; a result that is there is the same for each host; only what nobody has
    decided, and what stands behind that, is pending in the end.
    """
    stage = Stage()
    tower = bank(stage, data.draw(st.sampled_from([0.0, 0.1, 1.0])))
    calls = []
    for number in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["pay", "pay", "balance", "stamp", "put"]))
        account = data.draw(st.sampled_from("xy"))
        field = {"pay": "name", "balance": "name", "put": "names"}.get(kind)
        arguments = {"account": account} | ({field: f"{number}"} if field else {})
        needs = [f"c{data.draw(st.integers(0, number - 1))}"] if number and data.draw(st.booleans()) else []
        calls.append(Call(kind, arguments, f"c{number}", needs))
    moments = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 1.7, 3.0]), min_size=1, max_size=5))

    async def main() -> tuple[BatchResult, list[BatchResult], BatchResult]:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute(calls)
            states = [first.state()]
            answers: dict[str, Any] = {
                one.approval_id: data.draw(st.sampled_from([Approved(), Approved(), Denied("no"), None]))
                for one in first.pending
            }

            async def go_on(number: int, moment: float) -> BatchResult:
                await asyncio.sleep(moment)
                done = await (run if number % 2 else other).resume(states[-1 if number % 3 else 0], answers)
                states.append(done.state())
                return done

            hosts = await asyncio.gather(*(go_on(number, moment) for number, moment in enumerate(moments)))
            return first, hosts, await other.resume(states[0], answers)

    first, hosts, last = stage.run(main())
    for one in [first, *hosts, last]:
        sound(one, calls)
    assert not [name for name, count in stage.started.items() if count > 1 and not name.startswith("stamp")]
    for index, result in enumerate(last):
        seen = {(one[index].outcome, one[index].code, one[index].content) for one in [*hosts, last]}
        assert len(seen) == 1, (index, seen)
        if calls[index].tool == "stamp" and result.ok and result.shared_with is None:
            same = [one for one in last if one.tool == "stamp" and one.content == result.content]
            ran = [one for one in same if one.shared_with is None]
            assert stage.started[result.content] == len(ran)
    for tower_ in stage.towers:
        tower_.validate()


def test_s4_with_a_journal_too(stage: Stage, tmp_path: Path) -> None:
    """S4, S14: the same where the journal knows what is at work."""
    tower = bank(stage, journal=str(tmp_path / "towerman.db"))

    async def main() -> list[BatchResult]:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute(CHAIN)
            state, decisions = first.state(), yes(first)
            runs: list[Run] = [run, other, run, other]
            tasks = []
            for number, one in enumerate(runs):
                tasks.append(asyncio.ensure_future(one.resume(state, decisions)))
                await asyncio.sleep(0.3 * (number % 2))
            return await asyncio.gather(*tasks)

    found = stage.run(main())
    for one in found:
        assert one.ok, outcomes(one)
        assert [result.content for result in one] == ["first", "between", "last", "after"]
    assert stage.started == {"first": 1, "between": 1, "last": 1, "after": 1}


@pytest.mark.parametrize("tool", ["stamp", "put"])
def test_s4_what_another_run_answered_is_not_run_by_the_next_host(stage: Stage, tool: str) -> None:
    """S4, S11: of calls that one run has answered, each has its result: a host that comes later runs none of them."""
    tower = bank(stage)
    more = [{"names": "1"}, {"names": "2"}] if tool == "put" else [{}, {}]
    calls = [Call("pay", {"account": "x", "name": "pay"}), *(Call(tool, {"account": "x"} | one) for one in more)]

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute(calls)
            state, decisions = first.state(), yes(first)
            hosts = [run.resume(state, decisions) for _ in range(3)]
            found = [await hosts[0], *await asyncio.gather(*hosts[1:])]
            assert found[0].ok
            assert all(told(one) == told(found[0]) for one in found)
            assert [one.shared_with for one in found[0]] == [None, None, 1]

    stage.run(main())
    expected = {"pay": 1, "1": 1, "2": 1, "put 1+2": 1} if tool == "put" else {"pay": 1, "stamp x": 1}
    assert stage.started == expected


def test_s4_who_merges_leaves_out_what_somebody_else_has(stage: Stage) -> None:
    """S4, S11: one host is at work with a call that the other one's run would have taken in: it takes in the rest."""
    tower = bank(stage)
    calls = [
        Call("pay", {"account": "x", "name": "pay"}, "p"),
        Call("put", {"account": "x", "names": "1"}, "1", ["p"]),
        Call("put", {"account": "x", "names": "2"}, "2", ["p"]),
    ]

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute(calls)
            state, decisions = first.state(), yes(first)
            await run.resume(state, {})
            book = tower._core.book
            records = list(book._records.values())
            held = next(one for one in records if not one.needed)
            somebody = object()
            assert held.claim(somebody)
            host = asyncio.ensure_future(run.resume(state, decisions))
            await asyncio.sleep(2.5)
            assert stage.started["pay"] == 1
            with tower._core.lock:
                held.release()
            assert (await host).ok

    stage.run(main())
    assert stage.started["1"] == stage.started["2"] == 1


def test_s4_a_call_that_did_not_start_is_run_by_who_follows(stage: Stage) -> None:
    """S4: whoever has claimed a call and does not start it lets go of it; who has followed starts it, once."""
    tower = stage.tower()
    tries = []

    @tower.tool(independent=True, requires_approval=True, still_valid=lambda: tries.append(1) is None)
    async def act() -> str:
        return await stage.work("act", 1.0)

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute([Call("act", {})])
            state, decisions = first.state(), yes(first)
            name = first.pending[0].approval_id
            with tower._core.lock:
                record = tower._core.book.find(name)
                assert record is not None
                assert record.decide(Approved(), stage.clock.value, 100.0) == "taken"
                assert record.claim(tower)
            hosts = [asyncio.ensure_future(run.resume(state, decisions)) for _ in range(3)]
            await asyncio.sleep(5)
            assert not stage.started
            assert not any(one.done() for one in hosts)
            with tower._core.lock:
                record.release()
            for one in await asyncio.gather(*hosts):
                assert one.ok
            assert record.followers == []

    stage.run(main())
    assert stage.started == {"act": 1}


def test_r70_who_follows_is_told_when_the_approval_is_over(stage: Stage) -> None:
    """R-70: a call that followed another one, and then waits for a place itself, is refused in the instant in which its
    approval is over.
    """
    tower = stage.tower(pools={"db": 1})

    @tower.tool(independent=True, pools=["db"])
    async def busy() -> str:
        return await stage.work("busy", 20.0)

    @tower.tool(independent=True, pools=["db"], requires_approval=True)
    async def act() -> str:
        return await stage.work("act", 1.0)

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute([Call("act", {})])
            state, name = first.state(), first.pending[0].approval_id
            with tower._core.lock:
                record = tower._core.book.find(name)
                assert record is not None
                assert record.decide(Approved(expires_in=10.0), stage.clock.value, 100.0) == "taken"
                assert record.claim(tower)
            host = asyncio.ensure_future(run.resume(state, {}))
            await asyncio.sleep(1)
            holding = asyncio.ensure_future(other.execute([Call("busy", {})]))
            await asyncio.sleep(1)
            with tower._core.lock:
                record.release()
            assert outcomes(await host) == ["approval_expired"]
            assert stage.clock.value == 10.0
            await holding

    stage.run(main())
    assert not stage.started["act"]


def test_s4_who_follows_in_a_circle_is_told_at_once(stage: Stage) -> None:
    """S4, S10: a handler that goes on with the very batch that it is a call of cannot wait for itself."""
    tower = stage.tower()
    inner: list[BatchResult] = []
    state, decisions = "", {}

    @tower.tool(independent=True, requires_approval=True)
    async def act(ctx: Context) -> str:
        with stage.on("act"):
            before = stage.clock.value
            async with tower.run() as run:
                inner.append(await run.resume(state, decisions))
            assert stage.clock.value == before
        return "done"

    async def main() -> None:
        nonlocal state, decisions
        async with tower.run() as run:
            first = await run.execute([Call("act", {}, "a"), Call("act", {}, "b", ["a"])])
            state, decisions = first.state(), {first.pending[0].approval_id: Approved()}
            assert outcomes(await run.resume(state, decisions)) == ["ok", "approval_missing"]

    stage.run(main())
    assert outcomes(inner[0]) == ["approval_missing", "held_behind"]
    assert inner[0][0].message == AT_WORK
    assert stage.started == {"act": 1}


def test_g12_who_follows_waits_no_longer_than_the_call_may_take(stage: Stage) -> None:
    """G12: a call that is tried for a long time keeps its follower for as long as one attempt may take; then it comes
    back pending, and going on again brings its result. A call that needs no approval says that it is held.
    """
    tower = stage.tower(grace=1.0)

    @tower.tool(writes="k", requires_approval=True, timeout=5.0, max_wait=3.0)
    async def gate() -> str:
        return await stage.work("gate", 0.5)

    @tower.tool(
        reads="k",
        timeout=5.0,
        max_wait=3.0,
        retry=Retry(max_attempts=4, initial_delay=10.0, max_delay=10.0),
        idempotent=True,
    )
    async def slow() -> str:
        await stage.work("slow", 4.0)
        if stage.started["slow"] < 4:
            raise ConnectionError
        return "at last"

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute([Call("gate", {}), Call("slow", {})])
            state, decisions = first.state(), yes(first)
            one = asyncio.ensure_future(run.resume(state, decisions))
            await asyncio.sleep(1)
            began = stage.clock.value
            two = await other.resume(state, decisions)
            assert stage.clock.value == began + 9.0
            assert outcomes(two) == ["ok", "held_behind"]
            assert two[1].message == AT_WORK
            done = await one
            assert done.ok
            assert told(await other.resume(two.state(), {})) == told(done)

    stage.run(main())
    assert stage.started == {"gate": 1, "slow": 4}


def test_s4_a_wait_for_a_busy_resource_ends_in_the_same_answer(stage: Stage) -> None:
    """S4, G10: two hosts want the same resource for the same call. The second may wait at the gate for max_wait; what
    it is told then is not a refusal of a call that is at work, or has been.
    """
    tower = bank(stage, seconds=20.0, max_wait=3.0)
    calls = [Call("pay", {"account": "x", "name": "pay"})]

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute(calls)
            state, decisions = first.state(), yes(first)
            found = await asyncio.gather(run.resume(state, decisions), other.resume(state, decisions))
            assert told(found[0]) == told(found[1])
            assert found[1].ok

    stage.run(main())
    assert stage.started == {"pay": 1}


@pytest.mark.parametrize("moment", ["following", "at the gate"])
def test_g10_who_is_cancelled_while_another_is_at_work_does_not_say_that_nothing_happened(
    stage: Stage, moment: str
) -> None:
    """G10: the call may take effect where it is at work."""
    tower = stage.tower()

    options: dict[str, Any] = {"writes": "k"} if moment == "at the gate" else {"independent": True, "read_only": False}

    @tower.tool(requires_approval=True, **options)
    async def pay() -> str:
        return await stage.work("pay", 10.0)

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute([Call("pay", {})])
            state, decisions = first.state(), yes(first)
            one = asyncio.ensure_future(run.resume(state, decisions))
            await asyncio.sleep(1)
            two = asyncio.ensure_future(other.resume(state, decisions))
            await asyncio.sleep(1)
            other.cancel("enough")
            told_ = (await two)[0]
            assert (told_.outcome, told_.started, told_.applied) == ("cancelled", False, "unknown")
            sound(await two, [Call("pay", {})])
            assert (await one).ok
            assert (await run.resume(state, decisions)).ok

    stage.run(main())
    assert stage.started == {"pay": 1}


def test_g9_who_follows_has_nothing_reserved(stage: Stage) -> None:
    """S8, G9: what one run answers is paid for once: who follows gives its share back while it waits."""
    tower = stage.tower(budgets={"process": Budget(calls=3)})

    @tower.tool(independent=True, requires_approval=True)
    async def act() -> str:
        return await stage.work("act", 5.0)

    @tower.tool(independent=True)
    async def free() -> str:
        return "free"

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute([Call("act", {})])
            state, decisions = first.state(), yes(first)
            hosts = [asyncio.ensure_future(run.resume(state, decisions)) for _ in range(3)]
            await asyncio.sleep(1)
            done = await run.execute([Call("free", {})] * 3)
            assert outcomes(done) == ["ok", "ok", "budget_exhausted"]
            assert all(one.ok for one in await asyncio.gather(*hosts))

    stage.run(main())
    assert stage.started == {"act": 1}


@pytest.mark.parametrize("begun", [True, False])
def test_g10_a_loop_that_is_closed_over_a_call_leaves_nobody_waiting(begun: bool) -> None:
    """G10, G12: whoever goes on with a batch that another loop was at work with when it was closed is told that its
    effect is not known, or runs the call where it had not begun.
    """
    tower = Tower(max_concurrency=1)
    ran: list[str] = []

    @tower.tool(independent=True, read_only=False, requires_approval=True)
    async def act() -> str:
        ran.append("act")
        if len(ran) == 1 and begun:
            await asyncio.sleep(1e6)
        return "done"

    @tower.tool(independent=True)
    async def block() -> str:
        await asyncio.sleep(1e6)
        return "never"

    first = asyncio.run(tower.execute([Call("act", {})]))
    state, decisions = first.state(), yes(first)
    loop = asyncio.new_event_loop()
    tasks = []
    if not begun:
        tasks.append(loop.create_task(tower.execute([Call("block", {})])))
        loop.run_until_complete(asyncio.sleep(0.01))
    tasks.append(loop.create_task(tower.run().resume(state, decisions)))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert ran == ["act"] * begun
    found: list[BatchResult] = []
    other = threading.Thread(target=lambda: found.append(asyncio.run(tower.run().resume(state, decisions))))
    other.start()
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()
    for task in tasks:
        task.get_coro().close()
    tasks.clear()
    del task
    gc.collect()
    other.join(20)
    assert not other.is_alive()
    result = found[0][0]
    if begun:
        assert (result.outcome, result.started, result.applied) == ("cancelled", True, "unknown")
        assert ran == ["act"]
    else:
        assert result.ok
        assert ran == ["act"]
    tower.close()
    logging.getLogger("asyncio").handlers[0].heard.clear()  # type: ignore[attr-defined]  # it says what we did


def test_s4_each_host_sees_each_result_once(stage: Stage) -> None:
    """API section 2: `on_result` sees what was not there before, also where another host has run it."""
    tower = bank(stage)
    seen: list[list[int]] = [[], []]

    async def main() -> None:
        assert here()
        async with tower.run() as run:
            first = await run.execute(CHAIN)
            state, decisions = first.state(), yes(first)

            def host(number: int) -> Any:
                return run.resume(state, decisions, on_result=lambda result: seen[number].append(result.index))

            await asyncio.gather(host(0), host(1))

    stage.run(main())
    assert seen == [[0, 1, 2, 3]] * 2
