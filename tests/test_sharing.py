"""One run that answers several calls: share_identical and merge (S11, R-23, P-22, P-23)."""

from __future__ import annotations

import asyncio
import copy
import enum
import json
import logging
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import Stage, here, on_stage, run_batch, sound

import towerman.runner.intake
import towerman.runner.sharing
from towerman import BatchResult, Call, Context, Event, Result, Run, ToolError, Tower
from towerman.arguments import identity
from towerman.arguments.identity import MAX_VALUES
from towerman.plan import Plan
from towerman.timeline import stories

stage = pytest.fixture(on_stage)


def shared(done: Sequence[Result]) -> list[int | None]:
    """Whose run answered each call."""
    return [result.shared_with for result in done]


def outcomes(done: Sequence[Result]) -> list[str]:
    """How each call ended."""
    return [result.outcome for result in done]


def joined(sets: list[dict[str, Any]]) -> dict[str, Any]:
    """A merge function: the same resource, all numbers."""
    return {**sets[0], "n": [number for one in sets for number in one["n"]]}


# ==================================================================== identical calls


def test_p22_send_three_times_then_another_then_again(stage: Stage) -> None:
    """P-22, S11: send a, a, a, b, a: three runs (a, b, a), five results, shared ones with the id of the call that
    ran; the messages pair every id with its own result.
    """
    tower = stage.tower()
    sent: list[str] = []

    @tower.tool(share_identical=True)
    async def send(x: str) -> dict[str, str]:
        sent.append(x)
        return {"sent": x}

    done = run_batch(stage, tower, [Call("send", {"x": x}, f"c{n}") for n, x in enumerate("aaaba")])
    assert sent == ["a", "b", "a"]
    assert shared(done) == [None, 0, 0, None, None]
    assert outcomes(done) == ["ok"] * 5
    assert [result.content for result in done] == [json.dumps({"sent": x}, separators=(",", ":")) for x in "aaaba"]
    assert done[2].message == "This is the result of call 0 (c0), which is identical and has run."
    assert [done[2].call_id, done[2].waited_for, done[2].attempts, done[2].ran] == ["c2", ("call 0",), 0, 0.0]
    assert [(result.started, result.applied) for result in done] == [(True, "yes")] * 5
    assert tower.statistics().shared == 2
    assert tower.statistics().outcomes["ok"] == 5
    told: Any = done.messages("openai")
    assert [message["tool_call_id"] for message in told] == [f"c{n}" for n in range(5)]
    assert [json.loads(message["content"])["sent"] for message in told] == list("aaaba")
    assert [message["shared_with"] for message in done.messages("towerman")] == [None, 0, 0, None, None]
    sound(done, [Call("send", {}, f"c{n}") for n in range(5)])


def test_p23_nothing_is_shared_unasked_nor_across_batches(stage: Stage) -> None:
    """P-23: a repeat in a later batch runs again, with sharing on; and without the option in one batch too."""
    tower = stage.tower()
    runs: list[str] = []

    @tower.tool(share_identical=True)
    async def build() -> str:
        runs.append("build")
        return "done"

    @tower.tool
    async def plain() -> str:
        runs.append("plain")
        return "done"

    async def main() -> None:
        async with tower.run() as run:
            for _ in range(2):
                done = await run.execute([Call("build", {}), Call("build", {})])
                assert shared(done) == [None, 0]
            assert shared(await run.execute([Call("plain", {}), Call("plain", {})])) == [None, None]

    stage.run(main())
    assert runs == ["build", "build", "plain", "plain"]


@pytest.mark.parametrize("sharing", [False, True])
def test_p23_a_build_after_a_fix_is_a_build(sharing: bool, stage: Stage) -> None:
    """P-23: one call each in two batches of a run, with the same arguments and even the same id, one after the other,
    at the same time, and in two runs: each runs and has its own value, by default and with in-batch sharing on.
    """
    tower = stage.tower()
    runs: list[int] = []

    async def build() -> int:
        runs.append(len(runs))
        await asyncio.sleep(1)
        return len(runs)

    tower.add_tool(build, independent=True, **({"share_identical": True} if sharing else {}))
    batch = [Call("build", {}, "same")]

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            done = [await run.execute(batch), await run.execute(batch)]
            assert [one[0].value for one in done] == [1, 2]
            done += await asyncio.gather(run.execute(batch), run.execute(batch), other.execute(batch))
            assert [shared(one) for one in done] == [[None]] * 5
            assert [one[0].attempts for one in done] == [1] * 5

    stage.run(main())
    assert len(runs) == 5
    assert tower.statistics().shared == 0


@pytest.mark.parametrize("number", [9, 70])
def test_p22_one_completion_with_many_identical_calls(number: int, stage: Stage) -> None:
    """P-22: nine and seventy identical calls in one response: one run by a sync tool, each id with its own result."""
    tower = stage.tower(max_calls_per_batch=number)
    sent: list[str] = []

    @tower.tool(share_identical=True)
    def send(x: str) -> str:
        sent.append(x)
        return "sent"

    calls = [Call("send", {"x": "a"}, f"c{n}") for n in range(number)]
    done = run_batch(stage, tower, calls)
    sound(done, calls)
    assert sent == ["a"]
    assert shared(done) == [None] + [0] * (number - 1)
    assert all("call 0 (c0)" in result.message for result in done[1:])
    assert [result.content for result in done] == [done[0].content] * number


def test_s11_read_write_read_is_two_reads(stage: Stage) -> None:
    """S11, G4: reads share a run on either side of a write, never across it; what they read is the order's."""
    tower = stage.tower()
    world = {"a": 0}
    runs: list[str] = []

    @tower.tool(reads="k:{k}", share_identical=True)
    async def read(k: str) -> int:
        runs.append("read")
        await asyncio.sleep(1)
        return world[k]

    @tower.tool(writes="k:{k}")
    async def write(k: str) -> None:
        runs.append("write")
        world[k] += 1

    @tower.tool(independent=True)
    async def aside() -> None:
        return None

    names = ["read", "aside", "read", "write", "read", "read"]
    done = run_batch(stage, tower, [Call(name, {} if name == "aside" else {"k": "a"}) for name in names])
    assert runs == ["read", "write", "read"]
    assert [result.value for result in done] == [0, None, 0, None, 1, 1]
    assert shared(done) == [None, None, 0, None, None, 4]


def test_s11_copies_are_not_aliased(stage: Stage) -> None:
    """S11: each gets a copy of its own; a value that does not let itself be copied is left out, the content is there,
    also when the whole batch is cut.
    """
    tower = stage.tower(max_batch_bytes=2_000, max_result_bytes=4_000)

    @tower.tool(independent=True, share_identical=True)
    async def look() -> dict[str, list[int]]:
        return {"found": [1]}

    @tower.tool(independent=True, share_identical=True, encode=lambda value: ["x" * 30] * 100)
    async def lock() -> object:
        return threading.Lock()

    @tower.tool(independent=True, share_identical=True)
    async def text() -> str:
        return "a" * 3_000

    done = run_batch(stage, tower, [Call("look", {})] * 3 + [Call("lock", {})] * 2 + [Call("text", {})] * 2)
    values: Any = [result.value for result in done]
    values[0]["found"].append(2)
    values[1]["found"].append(3)
    assert values[:3] == [{"found": [1, 2]}, {"found": [1, 3]}, {"found": [1]}]
    assert values[3] is not None
    assert values[4] is None
    assert done[3].content == done[4].content
    assert done[5].content == done[6].content
    assert sum(len(result.content) for result in done) <= 2_000


@pytest.mark.parametrize("where", ["loop", "thread", "one task"])
def test_s11_a_failure_is_not_shared(stage: Stage, where: str) -> None:
    """S11: where the first fails the second runs; only an answer goes to the others."""
    tower = stage.tower()
    runs: list[int] = []

    def body() -> str:
        runs.append(len(runs))
        if len(runs) < 3:
            raise ToolError("no")
        return "done"

    async def work() -> str:
        return body()

    options: dict[str, Any] = {"own_task": where != "one task"}
    tower.add_tool(body if where == "thread" else work, name="work", independent=True, share_identical=True, **options)
    done = run_batch(stage, tower, [Call("work", {})] * 6)
    assert outcomes(done) == ["error", "error", "ok", "ok", "ok", "ok"]
    assert shared(done) == [None, None, None, 2, 2, 2]
    assert [result.waited_for for result in done] == [(), ("call 0",), ("call 0",), *[("call 2",)] * 3]
    assert len(runs) == 3


def test_s11_a_process_runs_once(stage: Stage) -> None:
    """S11: a handler in a process of its own answers identical calls once, too."""
    tower = Tower()
    tower.add_tool(textwrap.dedent, run_in="process", independent=True, share_identical=True, read_only=True)
    with tower:
        done = tower.execute_sync([Call("dedent", {"text": " a"})] * 3)
    assert [result.value for result in done] == ["a"] * 3
    assert shared(done) == [None, 0, 0]


@pytest.mark.parametrize("end", ["cancelled", "timed out", "timed out on a thread"])
def test_s11_a_cancelled_leader_does_not_cancel_followers(stage: Stage, end: str) -> None:
    """S11: the call that runs is cancelled, or out of time: the next one runs, and answers the third."""
    tower = stage.tower(timeout=2.0, grace=0.5)
    count = 0

    async def slow() -> str:
        nonlocal count
        count += 1
        return await stage.work(f"slow {count}", 5.0 if count == 1 else 1.0)

    def slow_in_thread() -> str:
        nonlocal count
        count += 1
        return stage.sync_work(stage.loop, f"slow {count}", 5.0 if count == 1 else 1.0)

    handler: Callable[..., object] = slow_in_thread if end.endswith("thread") else slow
    tower.add_tool(handler, name="slow", reads="k", share_identical=True)

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run() as run:
            if end == "cancelled":
                here().call_later(1.0, lambda: run.cancel("not wanted", index=0))
            done = await run.execute([Call("slow", {})] * 3)
        await stage.settled(tower)
        return done

    done = stage.run(main())
    assert outcomes(done) == ["cancelled" if end == "cancelled" else "timed_out", "ok", "ok"]
    assert shared(done) == [None, None, 1]
    assert count == 2


def test_s11_a_follower_that_is_cancelled_by_itself(stage: Stage) -> None:
    """S11, G10: it has not run and had no effect; the others go on sharing."""
    tower = stage.tower()

    @tower.tool(share_identical=True)
    async def send(x: str) -> str:
        return await stage.work("send", 1.0)

    async def main() -> BatchResult:
        async with tower.run() as run:
            here().call_later(0.5, lambda: run.cancel("not wanted", index=1))
            return await run.execute([Call("send", {"x": "a"})] * 3)

    done = stage.run(main())
    assert outcomes(done) == ["ok", "cancelled", "ok"]
    assert shared(done) == [None, None, 0]
    assert (done[1].started, done[1].applied) == (False, "no")
    assert stage.started["send"] == 1


def test_s11_needs_are_settled_by_an_answer_of_another_call(stage: Stage) -> None:
    """S1, S11, R-38: what needs a follower runs once that is answered; calls that need different calls are not
    identical; what needs a follower whose run failed is skipped.
    """
    tower = stage.tower()
    runs: list[str] = []

    @tower.tool(independent=True, share_identical=True)
    async def look(x: str, ctx: Context) -> str:
        runs.append(f"{x}{ctx.index}")
        if x == "bad":
            raise ToolError("no")
        return x

    calls = [
        Call("look", {"x": "a"}, "0"),
        Call("look", {"x": "a"}, "1"),
        Call("look", {"x": "b"}, "2", ["1"]),
        Call("look", {"x": "b"}, "3", ["1"]),
        Call("look", {"x": "b"}, "4"),
        Call("look", {"x": "bad"}, "5"),
        Call("look", {"x": "bad"}, "6"),
        Call("look", {"x": "c"}, "7", ["6"]),
        Call("look", {"x": "c"}, "8", ["3"]),
    ]
    done = run_batch(stage, tower, calls)
    assert outcomes(done) == ["ok"] * 5 + ["error", "error", "skipped", "ok"]
    assert shared(done) == [None, 0, None, 2, None, None, None, None, None]
    assert sorted(runs) == ["a0", "b2", "b4", "bad5", "bad6", "c8"]
    sound(done, calls)


def test_s11_what_is_not_identical_is_not_shared(stage: Stage) -> None:
    """S11: another value, another type, another idempotency key; values of which nobody knows."""
    tower = stage.tower()

    @tower.tool(independent=True, share_identical=True)
    async def look(x: Any) -> str:
        return type(x).__name__

    def runs(*calls: Call) -> int:
        return sum(one is None for one in shared(run_batch(stage, tower, list(calls))))

    def of(x: object, key: str | None = None) -> Call:
        return Call("look", {"x": x}, idempotency_key=key)

    assert runs(of(1), of(1)) == 1
    assert runs(of({"a": 1, "b": [2]}), of({"b": [2], "a": 1})) == 1
    assert runs(of(1), of(1.0), of(True), of("1"), of(None), of([1]), of({})) == 7
    assert runs(of(1, "k"), of(1, "k"), of(1, "l"), of(1)) == 3
    lock = threading.Lock()
    assert runs(of(lock), of(lock)) == 2


def test_s11_refusals_and_caps_concern_one_call(stage: Stage) -> None:
    """G1, R-96: a call that is refused, or beyond the cap, is no follower and no leader."""
    tower = stage.tower(max_calls_per_batch=4)

    @tower.tool(share_identical=True, independent=True)
    async def look(x: int) -> int:
        return x

    given = ["{", {"x": 1}, {"x": 1}, {"x": "y"}, {"x": 1}, {"x": 1}]
    done = run_batch(stage, tower, [Call("look", x, str(n)) for n, x in enumerate(given)])  # type: ignore[arg-type]
    told = ["invalid_arguments", None, None, "invalid_arguments", "call_cap", "call_cap"]
    assert [result.code for result in done] == told
    assert shared(done) == [None, None, 1, None, None, None]


def test_s11_a_full_place_refuses_one_after_another(stage: Stage) -> None:
    """S11, R-67: a leader that the gate refuses does not answer the others: each of them tries itself."""
    tower = stage.tower(max_concurrency=1)

    @tower.tool(independent=True, share_identical=True, when_busy="reject")
    async def look() -> str:
        return await stage.work("look", 1.0)

    @tower.tool(independent=True)
    async def hold() -> str:
        return await stage.work("hold", 1.0)

    async def main() -> BatchResult:
        first = asyncio.ensure_future(tower.execute([Call("hold", {})]))
        await asyncio.sleep(0.5)
        done = await tower.execute([Call("look", {})] * 3)
        await first
        return done

    done = stage.run(main())
    assert [result.code for result in done] == ["concurrency_limit"] * 3
    assert shared(done) == [None] * 3


def test_s11_inside_a_nested_batch(stage: Stage) -> None:
    """S10, S11: a nested batch shares within itself only."""
    tower = stage.tower()
    runs: list[str] = []

    @tower.tool(reads="k", share_identical=True)
    async def look(ctx: Context) -> str:
        runs.append("look")
        return "found"

    @tower.tool(writes="list", merge=joined)
    async def add(n: list[int]) -> int:
        runs.append(f"add {n}")
        return len(n)

    @tower.tool(independent=True)
    async def agent(ctx: Context) -> list[int | None]:
        return shared(await ctx.execute([Call("look", {})] * 2 + [Call("add", {"n": [n]}) for n in range(3)]))

    done = run_batch(stage, tower, [Call("agent", {}), Call("look", {}), Call("agent", {})])
    assert [result.value for result in done] == [[None, 0, None, 2, 2], "found", [None, 0, None, 2, 2]]
    assert sorted(runs) == ["add [0, 1, 2]"] * 2 + ["look"] * 3


def test_s11_ten_thousand_identical_calls(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """S11, F10: one run, ten thousand results, no recursion, and the loop has its turns."""
    monkeypatch.setattr(towerman.runner.intake, "SLICE", -1.0)  # every look at the clock finds the slice used up
    size = 10_000
    tower = stage.tower(max_calls_per_batch=size)
    runs: list[str] = []

    @tower.tool(share_identical=True)
    async def send(x: str) -> list[str]:
        runs.append(x)
        return [x]

    turns = 0

    async def main() -> BatchResult:
        nonlocal turns
        async with tower.run() as run:
            begun = here().turns
            done = await run.execute([Call("send", {"x": "a"}, str(n)) for n in range(size)])
            turns = here().turns - begun
            return done

    done = stage.run(main())
    assert runs == ["a"]
    assert done.ok
    assert shared(done) == [None] + [0] * (size - 1)
    assert turns > size // 8
    assert tower.statistics().shared == size - 1


def test_s11_ten_thousand_that_fail(stage: Stage) -> None:
    """S11: each of them runs, one after another."""
    size = 10_000
    tower = stage.tower(max_calls_per_batch=size)

    @tower.tool(independent=True, share_identical=True)
    async def fail() -> None:
        raise ToolError("no")

    done = run_batch(stage, tower, [Call("fail", {})] * size)
    assert set(outcomes(done)) == {"error"}
    assert shared(done) == [None] * size


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, asyncio.CancelledError])
def test_s11_a_value_whose_copy_raises(stage: Stage, error: type[BaseException]) -> None:
    """G1: whatever copying raises, each call has its result; an interrupt leaves after sealing."""
    tower = stage.tower()

    class Odd:
        def __deepcopy__(self, memo: object) -> object:
            raise error

    @tower.tool(independent=True, share_identical=True, encode=lambda value: "odd")
    async def look() -> Odd:
        return Odd()

    sealed: list[Result] = []

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("look", {})] * 3, on_result=sealed.append)

    if issubclass(error, KeyboardInterrupt | SystemExit):
        with pytest.raises(error):
            stage.run(main())
        assert outcomes(sealed) == ["ok", "ok", "ok"] or "cancelled" in outcomes(sealed)
    else:
        stage.run(main())
        assert outcomes(sealed) == ["ok"] * 3
        assert [result.value for result in sealed[1:]] == [None, None]
    assert [result.index for result in sealed] == [0, 1, 2]


@pytest.mark.parametrize("at", range(1, 30))
def test_s11_a_fault_while_answers_are_given_in_slices(stage: Stage, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """G1: the plan fails once, between two turns of the loop: each call has its result, and the caller is told."""
    monkeypatch.setattr(towerman.runner.intake, "SLICE", -1.0)
    tower = stage.tower(max_calls_per_batch=30)

    @tower.tool(independent=True, share_identical=True)
    async def look() -> str:
        return "found"

    count = 0
    real = Plan.end

    def fails(plan: Plan, index: int) -> list[int]:
        nonlocal count
        count += 1
        if count == at:
            raise LookupError
        return real(plan, index)

    monkeypatch.setattr(Plan, "end", fails)
    sealed: list[Result] = []

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("look", {})] * 30, on_result=sealed.append)

    with pytest.raises(LookupError):
        stage.run(main())
    monkeypatch.undo()
    assert sorted(result.index for result in sealed) == list(range(30))


def test_s11_a_copy_may_end_the_batch(stage: Stage) -> None:
    """G1: a value cancels the run while it is copied: every call has one result all the same."""
    tower = stage.tower()
    runs: list[Run] = []

    class Odd:
        def __deepcopy__(self, memo: object) -> str:
            runs[0].cancel("enough")
            return "copy"

    @tower.tool(independent=True, share_identical=True, encode=lambda value: "odd")
    async def look() -> Odd:
        return Odd()

    sealed: list[Result] = []

    async def main() -> BatchResult:
        async with tower.run() as run:
            runs.append(run)
            return await run.execute([Call("look", {})] * 4, on_result=sealed.append)

    done = stage.run(main())
    assert outcomes(done) == ["ok"] * 4
    assert sorted(result.index for result in sealed) == [0, 1, 2, 3]


def test_s11_a_hook_may_end_the_batch_while_answers_are_given(stage: Stage) -> None:
    """G1: the caller's hook cancels the run at the second answer of five: every call has one result."""
    tower = stage.tower()

    @tower.tool(independent=True, share_identical=True)
    async def look() -> str:
        return "found"

    async def main() -> BatchResult:
        async with tower.run() as run:

            def hook(result: Result) -> None:
                if result.index == 1:
                    run.cancel("enough")

            return await run.execute([Call("look", {})] * 5, on_result=hook)

    done = stage.run(main())
    # Their answer was there, so they have it.
    assert outcomes(done) == ["ok"] * 5
    assert shared(done) == [None, 0, 0, 0, 0]


def test_s11_a_call_is_cancelled_while_its_likeness_is_looked_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11: one call, or the whole run, is cancelled at any turn while the batch is prepared in slices: the others share
    as if the cancelled one had not been there.
    """
    monkeypatch.setattr(towerman.runner.intake, "SLICE", -1.0)
    for turns in range(1, 8):
        for index in (1, None):
            tower = stage.tower()

            @tower.tool(writes="k", share_identical=True)
            async def look() -> str:
                return await stage.work("look", 1.0)

            async def main(tower: Tower, index: int | None, turns: int) -> BatchResult:
                async with tower.run() as run:
                    task = asyncio.ensure_future(run.execute([Call("look", {})] * 4))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    run.cancel("not wanted", index=index)
                    return await task

            done = stage.run(main(tower, index, turns))
            assert outcomes(done) == (["ok", "cancelled", "ok", "ok"] if index else ["cancelled"] * 4)
            assert shared(done) == ([None, None, 0, 0] if index else [None] * 4)


# ==================================================================== what is told of it


def test_r117_events_timeline_and_explanation_tell_of_it(stage: Stage) -> None:
    """R-117, G8: a shared call has an event of its own with the index of the call that ran; timelines show it apart;
    the report does not count it as held back.
    """
    events: list[Event] = []
    tower = stage.tower(mode="observe", observers=[events.append])

    @tower.tool(reads="k:{k}", share_identical=True)
    async def read(k: str) -> str:
        return await stage.work("read", 1.0)

    done = run_batch(stage, tower, [Call("read", {"k": "a"}, "x"), Call("read", {"k": "a"}, "y")])
    assert tower.flush()
    told = [(event.kind, event.shared_with) for event in events if event.index == 1]
    assert told == [("waiting", None), ("shared", 0), ("finished", 0)]
    assert [event.waiting_for for event in events if event.kind == "waiting"] == ["call 0"]
    assert done.spans()[1].shared_with == 0
    assert done.spans()[1].started is None
    assert "◆ answered by another call's run" in done.timeline()
    (story,) = stories(events)
    assert [span.shared_with for span in story.spans] == [None, 0]
    assert tower.report().tools[0].serialised == 0
    explained = tower.explain([Call("read", {"k": "a"}), Call("read", {"k": "a"})])
    assert explained.groups == ((0, 1),)
    assert [call.shared_with for call in explained.calls] == [None, 0]
    assert "shares the run of call 0" in str(explained)
    assert "shares the run of call 0" in explained.to_svg()
    assert json.loads(json.dumps(explained.to_dict()))["calls"][1]["shared_with"] == 0


def test_r117_an_explanation_shows_what_would_be_answered_together(stage: Stage) -> None:
    """R-117: chains, edges and limits count runs; needs of a follower are told; a refused leader is passed over."""
    tower = stage.tower(pools={"db": 1})

    @tower.tool(reads="k:{k}", share_identical=True, pools=["db"])
    async def read(k: str) -> str:
        return k

    @tower.tool(writes="k:{k}", merge=lambda sets: sets[0])
    async def write(k: str, n: int) -> str:
        return k

    @tower.tool(independent=True)
    async def after() -> None:
        return None

    calls = [
        Call("read", {"k": "a"}, "0"),
        Call("read", {"k": "a"}, "1"),
        Call("write", {"k": "a", "n": 1}, "2"),
        Call("write", {"k": "a", "n": 2}, "3"),
        Call("after", {}, "4", ["3"]),
        Call("read", "{", "5"),
    ]
    told = tower.explain(calls)
    assert told.groups == ((0, 1), (2, 3), (4,))
    assert told.critical_path == (0, 2, 4)
    assert [(call.shared_with, call.merged) for call in told.calls] == [
        (None, False),
        (0, False),
        (None, False),
        (2, True),
        (None, False),
    ]
    assert [dict(call.permits) for call in told.calls][1] == {}
    assert {(edge.before, edge.after) for edge in told.edges} == {(0, 2), (1, 2), (3, 4)}
    assert "3 calls would run in 3 groups" in str(told)
    assert "2 calls would be answered by the run of another" in str(told)
    assert "is merged into the run of call 2" in str(told)
    done = run_batch(stage, tower, calls)
    assert shared(done) == [None, 0, None, 2, None, None]


def test_check_has_notes_on_sharing(stage: Stage) -> None:
    """Findings: an option that can do nothing, an effect that is done once, reads that are put in a row."""

    def notes(tower: Tower) -> list[tuple[str, str]]:
        wanted = ("sharing_without_effect", "sharing_an_effect", "merging_reads")
        return [(one.code, one.where) for one in tower.check().findings if one.code in wanted]

    async def work(n: list[int]) -> None:
        return None

    tower = stage.tower()
    tower.add_tool(work, name="send", writes="k", share_identical=True)
    tower.add_tool(work, name="put", writes="k", share_identical=True, idempotent=True)
    tower.add_tool(work, name="look", reads="k", share_identical=True)
    tower.add_tool(work, name="alone", reads="k", share_identical=True, only_call=True)
    tower.add_tool(work, name="looks", reads="k", merge=joined)
    tower.add_tool(work, name="add", writes="k", merge=joined)
    assert notes(tower) == [
        ("sharing_an_effect", "tool send"),
        ("sharing_without_effect", "tool alone"),
        ("merging_reads", "tool looks"),
    ]
    one = stage.tower(max_calls_per_batch=1)
    one.add_tool(work, name="add", writes="k", merge=joined)
    assert notes(one) == [("sharing_without_effect", "tool add")]


def test_options_by_pattern_and_from_a_file(stage: Stage) -> None:
    """API section 6: share_identical from a mapping and by pattern; a contradiction names the place it comes from."""
    tower = stage.tower(config={"tools": {"get_*": {"share_identical": True}}})
    tower.policy("put_*", merge=joined)

    @tower.tool(reads="k")
    async def get_it() -> str:
        return "it"

    @tower.tool(writes="k")
    async def put_it(n: list[int]) -> int:
        return len(n)

    done = run_batch(stage, tower, [Call("get_it", {})] * 2 + [Call("put_it", {"n": [1]})] * 2)
    assert shared(done) == [None, 0, None, 2]
    with pytest.raises(Exception, match=r"share_identical=True contradicts merge.*get_\*"):
        tower.add_tool(put_it, name="get_both", writes="k", merge=joined)
    tower.add_tool(put_it, name="get_own", writes="k", merge=joined, share_identical=False)


# ==================================================================== merged calls


@dataclass
class Lists:
    """A tower with a tool that adds numbers to lists, its runs, and what became of the lists."""

    tower: Tower
    runs: list[tuple[str, list[int]]] = field(default_factory=list)
    lists: dict[str, list[int]] = field(default_factory=dict)

    def add(self, key: str, *numbers: int) -> Call:
        """A call."""
        return Call("add", {"key": key, "n": list(numbers)}, f"{key}{numbers}")


def with_lists(
    stage: Stage, merge: Any = joined, fail: Callable[[list[int]], object] = lambda n: None, **options: Any
) -> Lists:
    """A tower with the tools `add` and `read`."""
    made = Lists(stage.tower(**options))

    @made.tower.tool(writes="list:{key}", merge=merge)
    async def add(key: str, n: list[int]) -> dict[str, int]:
        made.runs.append((key, n))
        await asyncio.sleep(1)
        fail(n)
        made.lists.setdefault(key, []).extend(n)
        return {"length": len(made.lists[key])}

    @made.tower.tool(reads="list:{key}")
    async def read(key: str) -> list[int]:
        return list(made.lists.get(key, []))

    return made


def test_r23_writes_of_one_entity_are_merged(stage: Stage) -> None:
    """R-23, S11: neighbouring writes of one list run once, one result for each id; a read between them, or another
    list, ends what can be merged.
    """
    made = with_lists(stage)
    calls = [
        made.add("a", 1),
        made.add("b", 9),
        made.add("a", 2, 3),
        Call("read", {"key": "a"}, "r"),
        made.add("a", 4),
        made.add("a", 5),
        made.add("a", 6),
    ]
    done = run_batch(stage, made.tower, calls)
    assert sorted(made.runs) == [("a", [1, 2, 3]), ("a", [4, 5, 6]), ("b", [9])]
    assert outcomes(done) == ["ok"] * 7
    assert shared(done) == [None, None, 0, None, None, 4, 4]
    assert [result.value for result in done] == [
        {"length": 3},
        {"length": 1},
        {"length": 3},
        [1, 2, 3],
        {"length": 6},
        {"length": 6},
        {"length": 6},
    ]
    assert done[5].value is not done[6].value
    assert done[0].message == "The call succeeded. It was merged with call 2."
    assert done[2].message == "The call succeeded. It was merged with another call: call 0 (a(1,)) has run."
    assert done[4].message == "The call succeeded. It was merged with calls 5, 6."
    assert done[6].message == "The call succeeded. It was merged with 2 other calls: call 4 (a(4,)) has run."
    assert [message["id"] for message in done.messages("towerman")] == [call.id for call in calls]
    assert made.tower.statistics().shared == 3
    sound(done, calls)


def test_r23_merged_alone_is_a_plain_call(stage: Stage) -> None:
    """R-23: one call, or calls with idempotency keys, which one run could not carry: nothing is merged."""
    asked: list[int] = []
    made = with_lists(stage, lambda sets: asked.append(1))
    assert run_batch(stage, made.tower, [made.add("a", 1)])[0].message == "The call succeeded."
    keyed = [Call("add", {"key": "a", "n": [n]}, idempotency_key=f"k{n}") for n in range(2)]
    assert shared(run_batch(stage, made.tower, keyed)) == [None, None]
    assert asked == []


class Quits(Exception):
    """Made by a merge function; its text must not be told."""


async def _coroutine(sets: object) -> dict[str, object]:
    return {}


def _raises(error: type[BaseException]) -> Callable[[Any], Any]:
    def merge(sets: Any) -> Any:
        raise error("zqxjkv")

    return merge


BAD_MERGES: dict[str, tuple[Any, str]] = {
    "raises": (_raises(Quits), "it failed with Quits"),
    "is cancelled": (_raises(asyncio.CancelledError), "it failed with CancelledError"),
    "gives a list": (lambda sets: sets, "it gave no mapping of arguments, but list"),
    "gives nothing": (lambda sets: None, "it gave no mapping of arguments, but NoneType"),
    "gives text": (lambda sets: '{"key": "a"}', "it gave no mapping of arguments, but str"),
    "gives a coroutine": (lambda sets: _coroutine(sets), "it gave no mapping of arguments, but coroutine"),
    "lacks an argument": (lambda sets: {"key": "a"}, "the arguments that it gave are refused"),
    "adds an argument": (lambda sets: {**sets[0], "zqxjkv": 1}, "the arguments that it gave are refused"),
    "names no resource": (lambda sets: {**sets[0], "key": ""}, "the arguments that it gave are refused"),
    "touches another list": (lambda sets: {**sets[0], "key": "zqxjkv"}, "it gave touch something else"),
    "spoils what it got": (lambda sets: [one["n"].clear() for one in sets], "it gave no mapping of arguments"),
    "takes nothing": (lambda *, n: n, "it failed with TypeError"),
}


@pytest.mark.parametrize("name", BAD_MERGES)
def test_r23_a_merge_function_that_cannot_be_used_costs_nothing(
    name: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """R-23, G8: the calls run one by one, in order, with their own arguments; it is told once, without a value."""
    merge, told = BAD_MERGES[name]
    made = with_lists(stage, merge)
    with caplog.at_level(logging.WARNING, "towerman"):
        for _ in range(2):
            done = run_batch(stage, made.tower, [made.add("a", 1), made.add("a", 2), made.add("a", 3)])
            assert outcomes(done) == ["ok"] * 3
            assert shared(done) == [None] * 3
    assert made.lists["a"] == [1, 2, 3, 1, 2, 3]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tool 'add': its merge function is not used, its calls run one by one: ")
    assert told in line
    assert "zqxjkv" not in line


def test_r23_arguments_that_cannot_be_copied_are_not_merged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """R-23: a Python object that a native call brings and nobody can copy."""
    tower = stage.tower()

    @tower.tool(writes="k", merge=lambda sets: sets[0])
    async def put(x: Any) -> str:
        return "done"

    done = run_batch(stage, tower, [Call("put", {"x": threading.Lock()})] * 2)
    assert outcomes(done) == ["ok", "ok"]
    assert "cannot be copied" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_r23_a_merge_function_that_wants_the_process_to_end(stage: Stage, error: type[BaseException]) -> None:
    """R-109: an interrupt in it leaves after sealing."""
    made = with_lists(stage, _raises(error))
    sealed: list[Result] = []

    async def main() -> None:
        async with made.tower.run() as run:
            await run.execute([made.add("a", 1), made.add("a", 2)], on_result=sealed.append)

    with pytest.raises(error):
        stage.run(main())
    assert outcomes(sealed) == ["cancelled", "cancelled"]
    assert made.runs == []


@pytest.mark.parametrize("index", [None, 0, 1])
def test_r23_a_merge_function_that_cancels(stage: Stage, index: int | None) -> None:
    """G1: it cancels the run, the call that is about to start, or one that it was to merge."""
    runs: list[Run] = []

    def merge(sets: list[dict[str, Any]]) -> dict[str, Any]:
        runs[0].cancel("enough", index=index)
        return joined(sets)

    made = with_lists(stage, merge)

    async def main() -> BatchResult:
        async with made.tower.run() as run:
            runs.append(run)
            return await run.execute([made.add("a", n) for n in range(3)])

    done = stage.run(main())
    assert outcomes(done) == ["cancelled" if index is None or index == n else "ok" for n in range(3)]
    assert shared(done) == [None] * 3
    assert made.lists.get("a", []) == ([] if index is None else [n for n in range(3) if n != index])


@pytest.mark.parametrize("applied", ["no", "unknown"])
def test_r23_a_merged_run_that_fails(stage: Stage, applied: Any) -> None:
    """R-23, G10: without an effect, the others try again without the one that failed; else all of them were in it, and
    all say so.
    """

    def fail(numbers: list[int]) -> None:
        if 1 in numbers:
            raise ToolError("no room", applied=applied)

    made = with_lists(stage, fail=fail)
    calls = [made.add("a", 1), made.add("a", 2), made.add("a", 3), Call("read", {"key": "a"})]
    done = run_batch(stage, made.tower, calls)
    assert done[0].message == "no room It was merged with calls 1, 2."
    if applied == "no":
        assert made.runs == [("a", [1, 2, 3]), ("a", [2, 3])]
        assert outcomes(done) == ["error", "ok", "ok", "ok"]
        assert shared(done) == [None, None, 1, None]
        assert done[3].value == [2, 3]
    else:
        assert made.runs == [("a", [1, 2, 3])]
        assert outcomes(done) == ["error", "error", "error", "ok"]
        assert shared(done) == [None, 0, 0, None]
        assert [(result.started, result.applied, result.retryable) for result in done[:3]] == [
            (True, "unknown", "unknown")
        ] * 3
        assert done[2].message == "no room It was merged with 2 other calls: call 0 (a(1,)) has run."
        assert json.loads(done[2].content)["error"]["message"] == done[2].message
    sound(done, calls)


def test_r23_what_needs_a_merged_call_that_failed_is_skipped(stage: Stage) -> None:
    """S1, R-38: an outcome that is shared settles needs like any other."""

    def fail(numbers: list[int]) -> None:
        raise ToolError("no")

    made = with_lists(stage, fail=fail)
    calls = [made.add("a", 1), made.add("a", 2), Call("read", {"key": "b"}, "r", ["a(2,)"])]
    assert outcomes(run_batch(stage, made.tower, calls)) == ["error", "error", "skipped"]
    done = run_batch(stage, made.tower, calls, fail_fast=True)
    assert outcomes(done) == ["error", "error", "cancelled"]
    assert shared(done) == [None, 0, None]


def test_r23_a_call_is_cancelled_whose_arguments_are_in_a_run(stage: Stage) -> None:
    """G10: it is answered at once and says that it may have been applied; the run goes on for the others."""
    made = with_lists(stage)
    sealed: list[tuple[float, int]] = []

    async def main() -> BatchResult:
        async with made.tower.run() as run:
            here().call_later(0.5, lambda: run.cancel("not wanted", index=1))
            calls = [made.add("a", n) for n in range(3)]
            return await run.execute(calls, on_result=lambda one: sealed.append((here().time(), one.index)))

    done = stage.run(main())
    assert outcomes(done) == ["ok", "cancelled", "ok"]
    assert sealed == [(0.5, 1), (1.0, 0), (1.0, 2)]
    assert (done[1].started, done[1].applied, done[1].shared_with) == (True, "unknown", 0)
    assert done[1].message == (
        "The call was cancelled when its arguments had gone into the run of call 0 (a(0,)): not wanted. "
        "Whether it took effect is not known."
    )
    assert made.lists["a"] == [0, 1, 2]


def test_r23_merged_reads_that_stop_have_no_effect(stage: Stage) -> None:
    """S11, G10: reads may be merged too; the one that runs is cancelled, and the others run without it."""
    tower = stage.tower()
    runs: list[list[int]] = []

    @tower.tool(reads="table", merge=joined)
    async def look(n: list[int]) -> list[int]:
        runs.append(n)
        await asyncio.sleep(1)
        return n

    async def main() -> BatchResult:
        async with tower.run() as run:
            here().call_later(0.5, lambda: run.cancel("not wanted", index=1))
            here().call_later(0.6, lambda: run.cancel("not wanted", index=0))
            return await run.execute([Call("look", {"n": [n]}) for n in range(4)])

    done = stage.run(main())
    assert runs == [[0, 1, 2, 3], [2, 3]]
    assert outcomes(done) == ["cancelled", "cancelled", "ok", "ok"]
    assert [result.applied for result in done] == ["no"] * 4
    assert "no side effect" in done[1].message
    assert [result.value for result in done[2:]] == [[2, 3], [2, 3]]


@pytest.mark.parametrize("way", ["timeout", "run cancelled", "run closed"])
def test_r23_a_merged_run_that_does_not_end(stage: Stage, way: str) -> None:
    """G7, G10: on a thread that cannot be told: all that were in it say the same, and that the work goes on."""
    tower = stage.tower(timeout=1.0, grace=0.5)

    @tower.tool(writes="k", merge=joined)
    def add(n: list[int]) -> int:
        stage.sync_work(stage.loop, "add", 5.0)
        return len(n)

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run() as run:
            if way == "run cancelled":
                here().call_later(0.2, lambda: run.cancel("enough"))
            elif way == "run closed":
                here().call_later(0.2, lambda: closing.append(asyncio.ensure_future(run.aclose())))
            done = await run.execute([Call("add", {"n": [n]}, str(n)) for n in range(3)])
            await asyncio.gather(*closing)
        assert [span.still_running for span in done.spans()] == [True] * 3
        await stage.settled(tower)
        return done

    closing: list[asyncio.Future[None]] = []
    done = stage.run(main())
    assert outcomes(done) == ["timed_out" if way == "timeout" else "cancelled"] * 3
    assert shared(done) == [None, 0, 0]
    assert [(result.started, result.applied, result.still_running) for result in done] == [(True, "unknown", True)] * 3
    assert [span.still_running for span in done.spans()] == [False] * 3


def test_r23_thousands_are_merged_in_parts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-23, F10: at most so many in one run, so that the loop has its turns; the rest in the next ones."""
    monkeypatch.setattr(towerman.runner.sharing, "MOST_MERGED", 100)
    made = with_lists(stage, max_calls_per_batch=250)
    done = run_batch(stage, made.tower, [made.add("a", n) for n in range(250)])
    assert [len(numbers) for _, numbers in made.runs] == [100, 100, 50]
    assert made.lists["a"] == list(range(250))
    assert [shared(done)[n] for n in (0, 99, 100, 199, 200, 249)] == [None, 0, None, 100, None, 200]
    assert done[0].message.endswith("It was merged with calls 1, 2, 3, 4, 5, 6, 7, 8 and 91 more.")


def test_r23_a_resource_that_depends_on_nothing(stage: Stage) -> None:
    """R-23: a fixed resource, merged arguments that spell the same resource otherwise, own_task=False."""
    tower = stage.tower()

    @tower.tool(writes="file:{path}", merge=lambda sets: {**joined(sets), "path": "/a/./b"}, own_task=False)
    async def put(path: str, n: list[int]) -> int:
        return len(n)

    @tower.tool(writes="k", merge=joined)
    async def log(n: list[int]) -> int:
        return len(n)

    calls = [Call("put", {"path": "/a/b", "n": [1]})] * 2 + [Call("log", {"n": [1]})] * 3
    assert [result.value for result in run_batch(stage, tower, calls)] == [2, 2, 3, 3, 3]


# ==================================================================== against the sequential run


class Step(NamedTuple):
    """A call of a random batch."""

    tool: str
    key: str
    number: int
    needs: tuple[int, ...]


steps = st.builds(
    Step,
    st.sampled_from(["read", "read", "put", "put", "touch", "all"]),
    st.sampled_from("ab"),
    st.integers(0, 1),
    st.just(()),
)


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """A batch whose needs point back."""
    drawn = draw(st.lists(steps, min_size=1, max_size=12))
    if not draw(st.booleans()):
        return drawn
    return [
        one._replace(needs=tuple(draw(st.lists(st.sampled_from(range(n)), max_size=1)))) if n else one
        for n, one in enumerate(drawn)
    ]


def clash(a: Step, b: Step) -> bool:
    """Do two calls conflict?"""
    if "all" in (a.tool, b.tool):
        return True
    return a.key == b.key and not (a.tool == "read" and b.tool == "read")


def likeness(one: Step) -> object:
    """What calls must have in common for one run; None: they never have."""
    if one.tool == "read":
        return "read", one.key, frozenset(one.needs)
    return ("put", one.key, frozenset(one.needs)) if one.tool == "put" else None


def least_runs(program: list[Step]) -> int:
    """Runs by the rule, looked at pair by pair; needs point back, so the emitted order is the plan's."""
    groups: list[list[int]] = []
    for index, one in enumerate(program):
        for group in reversed(groups):
            if likeness(one) is not None and likeness(program[group[0]]) == likeness(one):
                if any(clash(other, one) for other in program[group[-1] + 1 : index]):
                    groups.append([index])
                else:
                    group.append(index)
                break
        else:
            groups.append([index])
    return len(groups)


@given(programs(), st.booleans())
def test_g4_s11_the_same_as_one_by_one(program: list[Step], threads: bool) -> None:
    """G4, S11, R-23: reads that share, puts that merge, calls that do neither, and one alone against all: the state and
    what was read are those of the run one by one, and it takes as many runs as the rule says, no more and no fewer.
    """
    stage = Stage()
    tower = stage.tower()
    world: dict[str, list[int]] = {"a": [], "b": []}
    runs: list[str] = []

    def read(key: str) -> list[int]:
        runs.append("read")
        return list(world[key])

    def put(key: str, n: list[int]) -> None:
        runs.append("put")
        world[key].extend(n)

    async def read_on_loop(key: str) -> list[int]:
        await asyncio.sleep(0.1)
        return read(key)

    async def put_on_loop(key: str, n: list[int]) -> None:
        await asyncio.sleep(0.2)
        put(key, n)

    async def touch(key: str, n: list[int]) -> None:
        await asyncio.sleep(0.1)
        put(key, n)

    async def everything(key: str, n: list[int]) -> None:
        put("a", n)
        put("b", n)
        runs.pop()

    reading: Any = read if threads else read_on_loop
    tower.add_tool(reading, name="read", reads="k:{key}", share_identical=True)
    tower.add_tool(put if threads else put_on_loop, name="put", writes="k:{key}", merge=joined)
    tower.add_tool(touch, name="touch", writes="k:{key}")
    tower.add_tool(everything, name="all")
    calls = [
        Call(
            one.tool,
            {"key": one.key} if one.tool == "read" else {"key": one.key, "n": [one.number]},
            str(index),
            [str(need) for need in one.needs],
        )
        for index, one in enumerate(program)
    ]
    try:
        done = run_batch(stage, tower, calls)
    finally:
        tower._core.workers.close()
    sequential: dict[str, list[int]] = {"a": [], "b": []}
    for result, one in zip(done, program, strict=True):
        if one.tool == "read":
            assert result.value == sequential[one.key]
        else:
            for key in "ab" if one.tool == "all" else one.key:
                sequential[key].append(one.number)
    assert world == sequential
    assert outcomes(done) == ["ok"] * len(program)
    assert len(runs) == least_runs(program) == sum(one is None for one in shared(done))
    sound(done, calls)


# ==================================================================== what is identical


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1
    BLUE = 2


class Model(pydantic.BaseModel):
    """A model."""

    x: int = 1
    _seen: int = pydantic.PrivateAttr(0)


class Open(pydantic.BaseModel, extra="allow"):
    """A model that takes anything."""


@dataclass
class Plain:
    """A dataclass."""

    a: int = 1


@dataclass(slots=True)
class Slotted:
    """The same without a dictionary."""

    a: int = 1


class Named(NamedTuple):
    """A named tuple."""

    a: int


class Watched:
    """It stands for itself."""


class Half:
    """A plain class with a slot."""

    __slots__ = "a"


@dataclass
class Mixed(Half):
    """A dataclass that holds more than its fields."""

    b: int = 1


class Listed(list[int]):
    """A list of its own."""


def seen(model: Model, times: int) -> Model:
    """A model with a private attribute set."""
    model._seen = times
    return model


def dated(zone: Any, fold: int = 0) -> datetime:
    """An instant, or two."""
    return datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=fold)


parsed = pydantic.TypeAdapter(datetime).validate_python

# Each row: values that are made anew and are identical; no value of one row is identical to one of another.
ROWS: list[Callable[[], object]] = [
    lambda: 1,
    lambda: 1.0,
    lambda: True,
    lambda: "1",
    lambda: b"1",
    lambda: None,
    lambda: 0.0,
    lambda: -0.0,
    lambda: complex(0, 1),
    lambda: [1],
    lambda: (1,),
    lambda: {1},
    lambda: frozenset({1}),
    lambda: {"a": [1, {"b": None}]},
    lambda: {"a": [1, {"b": False}]},
    lambda: {1: "a"},
    lambda: {"1": "a"},
    lambda: Decimal("1"),
    lambda: Decimal("1.0"),
    lambda: Fraction(1, 2),
    lambda: UUID(int=1),
    lambda: IPv4Address("10.0.0.1"),
    lambda: PurePosixPath("/a"),
    lambda: date(2026, 1, 1),
    lambda: timedelta(seconds=1),
    lambda: time(1, 2),
    lambda: time(1, 2, tzinfo=UTC),
    lambda: dated(None),
    lambda: dated(None, 1),
    lambda: dated(UTC),
    lambda: dated(timezone(timedelta(hours=1))),
    lambda: dated(timezone(timedelta(hours=1), "CET")),
    lambda: dated(ZoneInfo("Europe/Oslo")),
    lambda: parsed("2026-10-25T02:30:00+01:00"),
    lambda: parsed("2026-10-25T01:30:00Z"),
    lambda: Colour.RED,
    lambda: Colour.BLUE,
    lambda: Model(),
    lambda: Model(x=1),
    lambda: seen(Model(), 1),
    lambda: Open(),
    lambda: Open(a=1),
    lambda: Plain(),
    lambda: Plain(2),
    lambda: Slotted(),
    lambda: Slotted(2),
    lambda: Named(1),
    lambda: [Model(x=2), Plain(3)],
]


def test_s11_types_and_spellings_count() -> None:
    """S11: made twice a value is identical to itself, and to no other of this list."""
    known = [identity({"v": make()}) for make in ROWS]
    alive = [make() for make in ROWS]
    again = [identity({"v": value}) for value in alive]
    assert None not in known
    assert known == again
    assert len(set(known)) == len(ROWS)
    assert identity({"a": 1, "b": 2}) == identity({"b": 2, "a": 1}) != identity({"a": 2, "b": 1})
    assert identity({}) == identity({}) != identity({"a": None})


def _cycle() -> object:
    value: list[object] = []
    value.append(value)
    return value


def _bulk() -> object:
    value: list[object] = []
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "make",
    [
        Watched,
        object,
        threading.Lock,
        lambda: bytearray(b"a"),
        lambda: Listed([1]),
        lambda: Mixed(),
        lambda: [object()],
        lambda: {"a": {"b": object()}},
        lambda: {object(): 1},
        lambda: Plain(object()),  # type: ignore[arg-type]
        lambda: lambda: 1,
        lambda: Watched,
        lambda: list(range(MAX_VALUES + 1)),
        _cycle,
        _bulk,
    ],
)
def test_s11_what_is_not_certain_has_no_identity(make: Callable[[], object]) -> None:
    """S11: objects that nobody knows, such that hold more than they show, endless and huge ones."""
    assert identity({"v": make()}) is None


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([0.0, 1.0, -0.0])
    | st.sampled_from(["", "a", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(json_values, json_values)
def test_s11_json_is_identical_when_it_is_written_alike(a: Any, b: Any) -> None:
    """S11: for JSON, identical means the same text with sorted keys."""
    same = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    assert (identity({"v": a}) == identity({"v": b})) == same
    assert identity({"v": a}) == identity({"v": copy.deepcopy(a)})
