"""Attempts of whole towers: what is tried again, what it holds meanwhile, what the one result says (S9, G10).

The pauses are the longest ones here (the chance is 1), so that every instant is a number: 0.2 s, 0.4 s, 0.8 s.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, here, on_stage, retake, run_batch, sound, whole_again

from towerman import (
    Call,
    Context,
    Event,
    PolicyError,
    Pool,
    RateLimited,
    Result,
    Retry,
    ToolError,
    Tower,
)
from towerman.runner import Shell
from towerman.sealing import ENDS_TURN
from towerman.testing import Rehearsal
from towerman.timeline import stories

stage = pytest.fixture(on_stage)


def tower_of(stage: Stage, **options: Any) -> Tower:
    """A tower whose pauses are the longest."""
    tower = stage.tower(**options)
    tower._core.random = lambda: 1.0
    return tower


def failing(times: int, error: Callable[[], BaseException] = ConnectionError) -> Callable[[], None]:
    """What raises so many times, then not any more."""
    left = iter([True] * times)

    def maybe() -> None:
        if next(left, False):
            raise error()

    return maybe


def facts(result: Result) -> tuple[object, ...]:
    """What a result says of effects and attempts."""
    return result.outcome, result.code, result.started, result.applied, result.retryable, result.attempts


# ==================================================================== P-70: pay()


def pay_tool(tower: Tower, paid: list[tuple[str | None, int]], **options: Any) -> None:
    """P-70's tool: it does the effect, then raises the first time."""

    @tower.tool(name="pay", writes="account:{account}", **options)
    async def pay(account: str, ctx: Context[None]) -> str:
        paid.append((ctx.idempotency_key, ctx.attempt))
        if len(paid) == 1:
            raise ConnectionError("the answer was lost")
        return "paid"


PAY = Call("pay", {"account": "a"}, "c1", idempotency_key="order-1")


def test_p70_r120_a_write_that_may_have_been_applied_is_not_repeated(stage: Stage) -> None:
    """P-70, G10, R-120: not marked idempotent: a retry is refused at the declaration, and without one it runs once; the
    effect is unknown, and said to be.
    """
    tower = tower_of(stage)
    paid: list[tuple[str | None, int]] = []
    with pytest.raises(PolicyError, match=r"tool 'pay': retry repeats a call, .* say idempotent=True"):
        pay_tool(tower, paid, retry=3)
    pay_tool(tower, paid)
    (result,) = run_batch(stage, tower, [PAY])
    assert paid == [("order-1", 1)]
    assert facts(result) == ("error", "handler_error", True, "unknown", "unknown", 1)


def test_p70_r121_an_idempotent_write_is_tried_again_with_the_same_key(stage: Stage) -> None:
    """P-70, R-121, S9: marked idempotent: tried again, and the handler sees the same key in each attempt."""
    tower = tower_of(stage)
    paid: list[tuple[str | None, int]] = []
    pay_tool(tower, paid, idempotent=True, retry=3)
    (result,) = run_batch(stage, tower, [PAY])
    assert paid == [("order-1", 1), ("order-1", 2)]
    assert facts(result) == ("ok", None, True, "yes", "no", 2)
    assert result.message == "The call succeeded at attempt 2."


def test_p70_r75_an_error_before_the_start_may_always_be_tried_again(stage: Stage) -> None:
    """P-70, R-75: a write that admission refused did nothing: retryable "yes", and the runtime itself does not try."""
    tower = tower_of(stage, max_concurrency=1)
    paid: list[tuple[str | None, int]] = []
    pay_tool(tower, paid, idempotent=True, retry=3, when_busy="reject")
    holds = stage_hold(tower)

    async def main() -> Result:
        async with tower.run() as one, tower.run() as other:
            busy = asyncio.ensure_future(one.execute([Call("hold", {})]))
            await asyncio.sleep(0.1)
            (refused,) = await other.execute([PAY])
            await asyncio.sleep(10)
            holds.set()
            await busy
            return refused

    refused = stage.run(main())
    assert facts(refused) == ("rejected", "concurrency_limit", False, "no", "yes", 0)
    assert paid == []


def stage_hold(tower: Tower) -> asyncio.Event:
    """A tool `hold` that holds its place until the event is set."""
    release = asyncio.Event()

    @tower.tool(name="hold", independent=True, read_only=True, timeout=1e6)
    async def hold() -> str:
        await release.wait()
        return "held"

    return release


# ==================================================================== P-71: a session that drops


class Session:
    """A fake client of a tool server: it does the call, then the session drops before the answer comes."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.opened = 1
        self.drops = 1

    async def call(self, tool: str) -> str:
        """Have it done over there."""
        self.done.append(tool)
        if tool == "bad":
            raise ToolError("no such row")
        if self.drops:
            self.drops -= 1
            self.opened += 1
            raise ConnectionResetError("session expired")
        return tool


@pytest.mark.parametrize(
    ("tool", "done", "said"),
    [
        ("write", 1, ("error", "handler_error", True, "unknown", "unknown", 1)),
        ("read", 2, ("ok", None, True, "no", "no", 2)),
        ("bad", 1, ("error", "handler_error", True, "no", "yes", 1)),
    ],
)
def test_p71_what_a_dropped_session_had_done_is_not_sent_again(
    stage: Stage, tool: str, done: int, said: tuple[object, ...]
) -> None:
    """P-71: a write whose session dropped is not sent again and is unknown; a read is, once; an ordinary error of a
    tool on a live session never is.
    """
    tower = tower_of(stage)
    session = Session()
    repeats: dict[str, Any] = {"read_only": True, "retry": 2}
    for name, options in {"write": {"writes": "rows:x"}, "read": repeats, "bad": repeats}.items():

        async def handler(name: str = name) -> str:
            return await session.call(name)

        tower.add_tool(handler, name=name, **options)
    (result,) = run_batch(stage, tower, [Call(tool, {})])
    assert session.done == [tool] * done
    assert facts(result) == said


# ==================================================================== what is held, and when


def test_r119_r124_a_rest_holds_nothing_and_each_attempt_is_admitted(stage: Stage) -> None:
    """R-119, R-124, S9: while a call rests, its only place goes to a call of another run; its next attempt waits for
    that place like any, and waits, runs and rests are told apart.
    """
    tower = tower_of(stage, pools={"api": 1})
    maybe = failing(2)

    @tower.tool(reads="a:x", pools=["api"], retry=3)
    async def flaky() -> str:
        with stage.on("flaky"):
            await asyncio.sleep(1.0)
            maybe()
        return "done"

    @tower.tool(independent=True, pools=["api"])
    async def other() -> str:
        return await stage.work("other", 5.0)

    async def main() -> Any:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("flaky", {})]))
            await asyncio.sleep(0.5)
            second = asyncio.ensure_future(two.execute([Call("other", {})]))
            await asyncio.sleep(0.6)
            seen = tower.statistics()
            assert (seen.backing_off, seen.running, seen.waiting, seen.retries) == (1, 1, 0, 0)
            assert seen.pools["api"].held == 1
            return await first, await second

    (result,), _ = stage.run(main())
    # 0-1 runs, rests 0.2, waits 1.2-6 for the other one, runs 6-7, rests 0.4, runs 7.4-8.4
    assert [span[:2] for span in stage.spans] == [("flaky", 0.0), ("other", 1.0), ("flaky", 6.0), ("flaky", 7.4)]
    assert (result.ok, result.attempts, result.ran) == (True, 3, pytest.approx(3.0))
    assert result.waited == pytest.approx(4.8)
    assert result.waited_for == ("pool api",)
    assert tower.statistics().retries == 2


def test_g4_a_call_that_is_tried_again_goes_before_what_conflicts_with_it(stage: Stage) -> None:
    """G4, S9: calls behind it in its batch, by conflict or by need, wait for its last attempt; what does not conflict
    goes on, and so do other runs.
    """
    tower = tower_of(stage)
    maybe = failing(2)
    story: list[str] = []

    def tool(name: str, **options: Any) -> None:
        async def handler(ctx: Context[None]) -> str:
            story.append(f"{name} {ctx.attempt}")
            await asyncio.sleep(0.05)
            if name == "put":
                maybe()
            return name

        tower.add_tool(handler, name=name, **options)

    tool("put", writes="k", idempotent=True, retry=3)
    tool("get", reads="k")
    tool("aside", reads="other")
    tool("after", independent=True)

    async def main() -> None:
        async with tower.run() as run, tower.run() as stranger:
            calls = [Call("put", {}, "p"), Call("get", {}), Call("aside", {}), Call("after", {}, "", ["p"])]
            mine = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(0.1)
            assert (await stranger.execute([Call("get", {})])).ok
            story.append("the stranger was served")
            done = await mine
            assert done.ok
            assert done[1].waited_for == ("call 0",)

    stage.run(main())
    assert story[:4] == ["put 1", "aside 1", "get 1", "the stranger was served"]
    assert story[4:6] == ["put 2", "put 3"]
    assert sorted(story[6:]) == ["after 1", "get 1"]


@pytest.mark.parametrize("kind", ["ordered", "exclusive"])
def test_g4_an_undeclared_call_keeps_its_turn(stage: Stage, kind: Any) -> None:
    """G4: a tool that declares nothing runs alone and in emitted order, attempts and all."""
    tower = tower_of(stage, undeclared=kind)
    maybe = failing(1)
    story: list[int] = []

    @tower.tool(idempotent=True, retry=2)
    async def step(n: int) -> None:
        story.append(n)
        await asyncio.sleep(0.1)
        if n == 0:
            maybe()

    assert run_batch(stage, tower, [Call("step", {"n": n}) for n in range(3)]).ok
    assert story == [0, 0, 1, 2]


def test_the_wait_of_an_attempt_is_clocked_anew(stage: Stage) -> None:
    """S2, S8, S9: max_wait holds for each attempt; when it is over, the call comes to what its last attempt came to."""
    tower = tower_of(stage, pools={"api": 1}, max_wait=3.0)

    @tower.tool(reads="a", pools=["api"], retry=5)
    async def flaky() -> None:
        await asyncio.sleep(1.0)
        raise RateLimited(1)

    @tower.tool(independent=True, pools=["api"], timeout=1e6)
    async def hog() -> str:
        return await stage.work("hog", 60.0)

    async def main() -> Result:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("flaky", {})]))
            await asyncio.sleep(0.5)
            second = asyncio.ensure_future(two.execute([Call("hog", {})]))
            (result,) = await first
            assert stage.clock.value == pytest.approx(1.0 + 1.2 + 3.0)
            await second
            return result

    result = stage.run(main())
    assert facts(result) == ("error", "rate_limited", True, "no", "yes", 1)
    assert result.retry_after == 1.0
    assert result.message.endswith("It was not tried again: waited 3 s for pool api. Try again later.")
    assert result.waited == pytest.approx(3.0)
    assert result.waited_for == ("pool api",)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"when_busy": "reject"}, "pool api is busy"),
        ({"max_queued": 0}, "too many calls already wait"),
    ],
)
def test_s8_a_refused_attempt_leaves_what_the_last_one_came_to(
    stage: Stage, options: dict[str, Any], code: str
) -> None:
    """S8, R-75, S9: an attempt that the gate refuses is no reason to try again; the result is the last attempt's and
    says what was refused.
    """
    tower = tower_of(stage, pools={"api": Pool(1)})
    events: list[Event] = []
    tower.add_observer(events.append)

    @tower.tool(writes="k", idempotent=True, pools=["api"], retry=9, **options)
    async def flaky() -> None:
        await asyncio.sleep(1.0)
        raise ConnectionError

    @tower.tool(independent=True, pools=["api"])
    async def hog() -> str:
        return await stage.work("hog", 9.0)

    async def main() -> Result:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("flaky", {})]))
            await asyncio.sleep(0.5)
            second = asyncio.ensure_future(two.execute([Call("hog", {})]))
            (result,) = await first
            assert stage.clock.value == pytest.approx(1.2)
            await second
            return result

    result = stage.run(main())
    assert facts(result) == ("error", "handler_error", True, "unknown", "yes", 1)
    assert isinstance(result.exception, ConnectionError)
    assert f"The tool failed with ConnectionError. It was not tried again: {code}" in result.message
    tower.flush()
    refused = [event for event in events if event.kind == "retry_refused"]
    assert [(event.attempt, event.code) for event in refused] == [
        (2, "concurrency_limit" if "when_busy" in options else "queue_full")
    ]


def test_g12_no_rest_goes_beyond_the_deadline(stage: Stage) -> None:
    """G12, S9: an attempt that the run's deadline would not let start is not waited for."""
    tower = tower_of(stage)

    @tower.tool(reads="k", retry=9)
    async def flaky() -> None:
        await asyncio.sleep(1.0)
        raise RateLimited(2)

    (result,) = run_batch(stage, tower, [Call("flaky", {})], deadline=3.0)
    assert stage.clock.value == pytest.approx(1.0)
    assert (result.attempts, result.code, result.retry_after) == (1, "rate_limited", 2.0)
    assert result.message.endswith("It was not tried again: the run's deadline comes first.")


def test_r122_a_service_that_asks_for_long_is_left_alone(stage: Stage) -> None:
    """R-122, G12: a pause above max_delay is not made; the result says after how long it makes sense."""
    tower = tower_of(stage)

    @tower.tool(reads="k", retry=3)
    async def flaky() -> None:
        raise RateLimited("60")

    (result,) = run_batch(stage, tower, [Call("flaky", {})])
    assert (result.attempts, result.retry_after, result.retryable) == (1, 60.0, "yes")
    assert result.message == (
        "The service behind this tool takes no more calls for now; it did nothing. Try again in 60 s. "
        "It was not tried again: the service asks for a longer pause than this tool makes."
    )


# ==================================================================== what comes of it


def test_attempts_run_out(stage: Stage) -> None:
    """S9: after the last attempt its failure is the result: what was raised, how often, how long, for how much wait."""
    tower = tower_of(stage)

    @tower.tool(reads="k", retry=Retry(max_attempts=4, initial_delay=1.0, max_delay=3.0))
    async def flaky() -> None:
        await asyncio.sleep(0.5)
        raise TimeoutError

    (result,) = run_batch(stage, tower, [Call("flaky", {})])
    assert stage.clock.value == pytest.approx(4 * 0.5 + 1 + 2 + 3)
    assert facts(result) == ("error", "handler_error", True, "no", "yes", 4)
    assert result.message == "The tool failed with TimeoutError. It was tried 4 times."
    assert (result.ran, result.waited) == (pytest.approx(2.0), 0.0)


def test_p77_r118_only_what_may_pass_is_tried_again(stage: Stage) -> None:
    """P-77, R-118: a failure that would come again is told at once; so is one leaf of it in a group."""
    tower = tower_of(stage)
    errors: dict[str, Callable[[], BaseException]] = {
        "value": ValueError,
        "tool": lambda: ToolError("no such row"),
        "mixed": lambda: ExceptionGroup("g", [ConnectionError(), PermissionError("no")]),
        "cancel": asyncio.CancelledError,
        "fine": lambda: ExceptionGroup("g", [ConnectionError(), ExceptionGroup("h", [RateLimited(1)])]),
    }

    @tower.tool(independent=True, read_only=True, retry=2)
    async def fail(how: str) -> None:
        raise errors[how]()

    done = run_batch(stage, tower, [Call("fail", {"how": how}) for how in errors])
    assert [result.attempts for result in done] == [1, 1, 1, 1, 2]
    assert [result.code for result in done] == ["handler_error"] * 3 + ["handler_cancelled", "handler_error"]


def test_g10_what_any_attempt_may_have_done_the_call_may_have_done(stage: Stage) -> None:
    """G10: the first attempt's effect is unknown; that the last one did nothing does not make it known."""
    tower = tower_of(stage)
    errors: Iterator[BaseException] = iter([ConnectionError(), ToolError("row is locked", applied="no")])

    @tower.tool(writes="k", idempotent=True, retry=2)
    async def put() -> None:
        raise next(errors)

    (result,) = run_batch(stage, tower, [Call("put", {})])
    assert facts(result) == ("error", "handler_error", True, "unknown", "yes", 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"writes": "k"}, ("error", "rate_limited", True, "no", "yes", 1)),
        ({"reads": "k"}, ("error", "rate_limited", True, "no", "yes", 1)),
        ({"writes": "k", "idempotent": True, "retry": 2}, ("error", "rate_limited", True, "no", "yes", 2)),
    ],
)
@pytest.mark.parametrize("where", ["loop", "thread"])
def test_r122_rate_limited_is_told_by_its_code(
    stage: Stage, options: dict[str, Any], said: tuple[object, ...], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-122: a handler that is told to slow down says so: code, retry_after, and that nothing was done; the shell hears
    of it once for each attempt.
    """
    tower = tower_of(stage)
    heard: list[float | None] = []
    monkeypatch.setattr(Shell, "_rate_limited", lambda shell, job, seconds: heard.append(seconds))

    async def on_loop() -> None:
        raise RateLimited(1.5)

    def on_thread() -> None:
        raise RateLimited(1.5)

    tower.add_tool(on_loop if where == "loop" else on_thread, name="ask", **options)
    (result,) = run_batch(stage, tower, [Call("ask", {})])
    assert facts(result) == said
    assert result.retry_after == 1.5
    assert heard == [1.5] * result.attempts


@pytest.mark.parametrize("where", ["loop", "thread"])
@pytest.mark.parametrize("retry", [1, 3])
def test_g1_a_limit_that_is_heard_may_end_the_batch(
    stage: Stage, where: str, retry: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1, R-122: slowing others down may have the caller cancel the batch in that very step: still one result a call,
    and no further attempt.
    """
    tower = tower_of(stage)
    monkeypatch.setattr(Shell, "_rate_limited", lambda shell, job, seconds: shell.cancel_work(job.work, "enough"))
    seen: list[int] = []

    async def on_loop(n: int) -> None:
        raise RateLimited(1)

    def on_thread(n: int) -> None:
        raise RateLimited(1)

    tower.add_tool(on_loop if where == "loop" else on_thread, name="ask", reads="k", retry=retry)
    calls = [Call("ask", {"n": n}) for n in range(2)]
    done = run_batch(stage, tower, calls, on_result=lambda result: seen.append(result.index))
    sound(done, calls)
    assert sorted(seen) == [0, 1]
    assert [result.attempts for result in done][1:] == [0] or where == "thread"
    assert {result.outcome for result in done} == {"cancelled"}


@pytest.mark.parametrize(
    ("named", "attempts", "left"),
    [
        ("Thu, 01 Jan 1970 00:00:13 GMT", 2, None),
        (datetime(1970, 1, 1, 0, 0, 13, tzinfo=UTC), 2, None),
        ("Thu, 01 Jan 1970 00:00:05 GMT", 2, None),
        ("Thu, 01 Jan 1970 00:05:10 GMT", 1, 300.0),
        (float("inf"), 1, 31_536_000.0),
    ],
)
def test_s9_a_service_that_names_an_instant_is_heard(
    stage: Stage, named: Any, attempts: int, left: float | None
) -> None:
    """S9, R-122: a Retry-After that is a date is waited for by the wall clock (on virtual time its own, from 1970); one
    that is over costs only the pause; one that is too far off is told.
    """
    tower = tower_of(stage)
    stage.clock.value = 10.0
    began: list[float] = []

    @tower.tool(reads="k", retry=Retry(2, initial_delay=0.0, max_delay=60.0))
    async def ask() -> str:
        began.append(stage.clock.value)
        if len(began) == 1:
            raise RateLimited(named)
        return "heard"

    (result,) = run_batch(stage, tower, [Call("ask", {})])
    assert result.attempts == attempts
    assert result.retry_after == left
    if attempts == 2:
        assert result.ok
        assert began[1] == (10.0 if "05 GMT" in str(named) else 13.0)
    else:
        assert "It was not tried again" in result.message


@pytest.mark.parametrize("given_length", ["soon", -1, float("nan"), object(), None, b"\xff"])
def test_r51_rubbish_for_retry_after_is_not_known(stage: Stage, given_length: Any) -> None:
    """R-51: a retry_after that is no length of time costs nothing: it is as if the service had not said."""
    tower = tower_of(stage)

    @tower.tool(reads="k", retry=2)
    async def ask() -> None:
        raise RateLimited(given_length)

    (result,) = run_batch(stage, tower, [Call("ask", {})])
    assert (result.code, result.retry_after, result.attempts) == ("rate_limited", None, 2)
    assert "Try again later." in result.message


# ==================================================================== timeouts


def test_a_timeout_is_tried_again_when_its_attempt_has_ended(stage: Stage) -> None:
    """S9: an attempt whose time is over and that ends within grace is followed by another one, not before."""
    tower = tower_of(stage, grace=2.0)
    first = True

    @tower.tool(reads="k", timeout=1.0, retry=2)
    async def slow() -> str:
        nonlocal first
        if not first:
            return await stage.work("second", 0.5)
        first = False
        with stage.on("first"):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(1.5)
        return "never"

    (result,) = run_batch(stage, tower, [Call("slow", {})])
    assert [(name, came, went) for name, came, went in stage.spans] == [("first", 0.0, 2.5), ("second", 2.7, 3.2)]
    assert (result.ok, result.attempts) == (True, 2)
    assert result.ran == pytest.approx(3.0)
    assert tower.dead_letters() == ()


@pytest.mark.parametrize("kind", ["deaf", "thread"])
def test_s9_g7_no_attempt_while_the_last_one_goes_on(stage: Stage, kind: str) -> None:
    """S9, G7: a handler that outlives its grace, or a thread, cannot be waited for: sealed, not tried again, and what
    it holds stays taken until it has ended.
    """
    tower = tower_of(stage, grace=0.5, max_wait=100)
    starts: list[str] = []

    async def deaf() -> str:
        starts.append("flaky")
        return await stage.stubborn("deaf", 10.0)

    def on_thread() -> str:
        starts.append("flaky")
        return stage.sync_work(stage.loop, "thread", 10.0)

    tower.add_tool(
        deaf if kind == "deaf" else on_thread, name="flaky", writes="k", idempotent=True, retry=3, timeout=1.0
    )

    @tower.tool(reads="k")
    async def look() -> float:
        return stage.clock.value

    done = run_batch(stage, tower, [Call("flaky", {}), Call("look", {})])
    assert starts == ["flaky"]
    assert facts(done[0]) == ("timed_out", "handler_timeout", True, "unknown", "yes", 1)
    assert done[0].still_running
    assert done[1].value == 10.0


def test_timeouts_run_out(stage: Stage) -> None:
    """S9: each attempt has the tool's time; the last one's timeout is the result."""
    tower = tower_of(stage)

    @tower.tool(reads="k", timeout=1.0, retry=3)
    async def slow() -> str:
        return await stage.work("slow", 60)

    (result,) = run_batch(stage, tower, [Call("slow", {})])
    assert stage.clock.value == pytest.approx(3.6)
    assert facts(result) == ("timed_out", "handler_timeout", True, "no", "yes", 3)
    assert result.message == "The call did not end within 1 s. It has no side effect. It was tried 3 times."


def test_no_timeout_is_tried_again_where_it_is_not_named(stage: Stage) -> None:
    """R-118: retry_on without TimeoutError."""
    tower = tower_of(stage)

    @tower.tool(reads="k", timeout=1.0, retry=Retry(retry_on=(ConnectionError,)))
    async def slow() -> str:
        return await stage.work("slow", 60)

    (result,) = run_batch(stage, tower, [Call("slow", {})])
    assert (result.code, result.attempts) == ("handler_timeout", 1)


def test_an_exit_at_the_end_of_time_is_an_exit(stage: Stage) -> None:
    """P-02: a handler that leaves the program when it is told to stop is not called again."""
    tower = tower_of(stage)

    @tower.tool(reads="k", timeout=1.0, retry=3)
    async def leaves() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise SystemExit(3) from None

    async def main() -> list[Result]:
        async with tower.run() as run:
            with pytest.raises(SystemExit):
                await run.execute([Call("leaves", {})])
            assert run.last_batch is not None
            return list(run.last_batch)

    (result,) = stage.run(main())
    assert (result.outcome, result.attempts) == ("error", 1)


# ==================================================================== cancel, fail_fast, ends


def test_cancel_in_a_rest_seals_at_once_with_the_facts(stage: Stage) -> None:
    """S16, G10: what was cancelled while it rested has started and may have had an effect; the rest is over at once."""
    tower = tower_of(stage)

    @tower.tool(writes="k", idempotent=True, retry=3)
    async def put() -> None:
        await asyncio.sleep(1.0)
        raise RateLimited(4) if tower.statistics().retries else ConnectionError("lost")

    async def main() -> list[Result]:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("put", {}), Call("put", {})]))
            await asyncio.sleep(3.0)  # 0-1, 1.2-2.2, rests until 6.4
            assert tower.statistics().backing_off == 1
            run.cancel("enough")
            done = await task
            assert stage.clock.value == 3.0
            return list(done)

    first, second = stage.run(main())
    assert facts(first) == ("cancelled", "cancelled", True, "unknown", "yes", 2)
    assert first.message.endswith("It was tried 2 times. It was not tried again: enough.")
    assert first.ran == pytest.approx(2.0)
    assert facts(second) == ("cancelled", "cancelled", False, "no", "yes", 0)


def test_one_call_is_cancelled_in_its_rest(stage: Stage) -> None:
    """S16: by its id; its siblings go on."""
    tower = tower_of(stage)

    @tower.tool(reads="k:{n}", retry=3)
    async def get(n: int) -> int:
        await asyncio.sleep(1.0)
        if n == 0:
            raise RateLimited(5)
        return n

    async def main() -> list[Result]:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("get", {"n": n}, f"c{n}") for n in range(3)]))
            await asyncio.sleep(1.5)
            run.cancel("not needed", call_id="c0")
            return list(await task)

    done = stage.run(main())
    assert stage.clock.value == 1.5
    assert facts(done[0]) == ("cancelled", "cancelled", True, "no", "yes", 1)
    assert done[1].ok and done[2].ok


def test_fail_fast_waits_for_the_last_attempt(stage: Stage) -> None:
    """A failure that another attempt follows stops nobody; the last one stops the run, and those that rest with it."""
    tower = tower_of(stage)

    @tower.tool(reads="a", retry=2)
    async def fails() -> None:
        await asyncio.sleep(1.0)
        raise ConnectionError

    @tower.tool(reads="b", retry=2)
    async def rests() -> None:
        await asyncio.sleep(2.0)
        raise RateLimited(5)

    done = run_batch(stage, tower, [Call("fails", {}), Call("rests", {})], fail_fast=True)
    assert stage.clock.value == pytest.approx(2.2)
    assert facts(done[0]) == ("error", "handler_error", True, "no", "yes", 2)
    assert facts(done[1]) == ("cancelled", "sibling_failed", True, "no", "yes", 1)


def test_a_spared_write_is_not_tried_again(stage: Stage) -> None:
    """A batch that is being ended starts nothing more, attempts included."""
    tower = tower_of(stage)

    @tower.tool(independent=True)
    async def fails() -> None:
        await asyncio.sleep(1.0)
        raise ToolError("no")

    @tower.tool(independent=True, idempotent=True, retry=3)
    async def put() -> None:
        await asyncio.sleep(2.0)
        raise ConnectionError

    done = run_batch(stage, tower, [Call("fails", {}), Call("put", {})], fail_fast=True)
    assert stage.clock.value == 2.0
    assert facts(done[1]) == ("error", "handler_error", True, "unknown", "yes", 1)


def test_g12_a_tower_that_ends_lets_nobody_rest(stage: Stage) -> None:
    """G12: aclose seals what rests, and leaves no timer behind."""
    tower = tower_of(stage)

    @tower.tool(reads="k", retry=3)
    async def get() -> None:
        raise RateLimited(5)

    async def main() -> list[Result]:
        run = tower.run()
        task = asyncio.ensure_future(run.execute([Call("get", {})]))
        await asyncio.sleep(0.1)
        assert tower.statistics().backing_off == 1
        await tower.aclose()
        return list(await task)

    (result,) = stage.run(main())
    assert facts(result) == ("cancelled", "cancelled", True, "no", "yes", 1)
    assert stage.clock.value == pytest.approx(0.1)


# ==================================================================== arguments


def test_each_attempt_gets_the_arguments_that_came(stage: Stage) -> None:
    """S9: what a handler does to its arguments is gone with its attempt."""
    tower = tower_of(stage)
    seen: list[Any] = []

    @tower.tool(reads="k", retry=3)
    async def get(rows: list[Any], deep: dict[str, list[int]]) -> int:
        seen.append(([*rows], {**deep}))
        rows.clear()
        deep["a"].append(9)
        if len(seen) < 3:
            raise ConnectionError
        return len(seen)

    calls = [Call("get", {"rows": [1, {"x": 2}], "deep": {"a": [1]}})]
    assert run_batch(stage, tower, calls).ok
    assert [rows for rows, _ in seen] == [[1, {"x": 2}]] * 3
    assert calls[0].arguments == {"rows": [1, {"x": 2}], "deep": {"a": [1]}}


class Once:
    """A value that cannot be copied."""

    def __deepcopy__(self, memo: object) -> Once:
        raise TypeError("I am the only one")


def test_arguments_that_cannot_be_copied_are_used_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """S9: an attempt with arguments that the last one may have changed would be another call; it is told once."""
    tower = tower_of(stage)

    @tower.tool(reads="k", retry=3, schema={"type": "object"})
    async def get(**given_arguments: object) -> None:
        raise ConnectionError

    with caplog.at_level(logging.WARNING, "towerman"):
        for _ in range(2):
            (result,) = run_batch(stage, tower, [Call("get", {"x": 1})])
            assert result.attempts == 3
        shell_check = tower._core.tools["get"].checker
        odd: Any = Once()
        object.__setattr__(tower._core.tools["get"], "checker", Given({"x": odd}))
        for _ in range(2):
            (result,) = run_batch(stage, tower, [Call("get", {"x": 1})])
            assert (result.code, result.attempts) == ("handler_error", 1)
        object.__setattr__(tower._core.tools["get"], "checker", shell_check)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["tool 'get': its calls are not tried again where their arguments cannot be copied (TypeError)"]


class Given:
    """A checker that gives these."""

    def __init__(self, keywords: dict[str, object]) -> None:
        self.keywords = keywords

    def check(self, arguments: object) -> dict[str, object]:
        """The same each time."""
        return dict(self.keywords)


# ==================================================================== groups, nested calls, other places


def test_s11_identical_calls_share_what_the_last_attempt_came_to(stage: Stage) -> None:
    """S11, S9: the leader is tried again first; its followers get copies, and are counted no attempts."""
    tower = tower_of(stage)
    maybe = failing(2)
    starts: list[int] = []

    @tower.tool(reads="doc", share_identical=True, retry=3)
    async def read(ctx: Context[None]) -> str:
        starts.append(ctx.index)
        maybe()
        return "text"

    done = run_batch(stage, tower, [Call("read", {})] * 3)
    assert starts == [0, 0, 0]
    assert [(result.attempts, result.shared_with) for result in done] == [(3, None), (0, 0), (0, 0)]


def merging(tower: Tower, seen: list[Any], maybe: Callable[[], None], **options: Any) -> None:
    """A tool whose neighbouring calls are one run."""

    @tower.tool(
        name="put",
        writes="sheet",
        idempotent=True,
        merge=lambda sets: {"rows": [row for one in sets for row in one["rows"]]},
        **options,
    )
    async def put(rows: list[int]) -> int:
        seen.append(rows)
        await asyncio.sleep(1.0)
        maybe()
        return len(rows)


def test_s11_merged_calls_stay_merged(stage: Stage) -> None:
    """S11, S9: each attempt has the same rows, also those of a call that was cancelled during a rest: without them it
    would be another call.
    """
    tower = tower_of(stage)
    seen: list[Any] = []
    merging(tower, seen, failing(1), retry=Retry(3, initial_delay=1.0))

    async def main() -> list[Result]:
        async with tower.run() as run:
            calls = [Call("put", {"rows": [n]}, f"c{n}") for n in range(3)]
            task = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(1.5)
            run.cancel("not this one", call_id="c1")
            done = await task
            sound(done, calls)
            return list(done)

    done = stage.run(main())
    assert seen == [[0, 1, 2], [0, 1, 2]]
    assert [result.outcome for result in done] == ["ok", "cancelled", "ok"]
    assert [result.attempts for result in done] == [2, 0, 0]
    assert (done[1].started, done[1].applied) == (True, "unknown")
    assert "merged" in done[0].message


def test_s11_a_merged_run_that_is_cancelled_in_its_rest(stage: Stage) -> None:
    """S11, G1: everybody whose arguments were in it is told what it came to."""
    tower = tower_of(stage)
    seen: list[Any] = []
    merging(tower, seen, failing(9), retry=Retry(3, initial_delay=5.0))

    async def main() -> list[Result]:
        async with tower.run() as run:
            calls = [Call("put", {"rows": [n]}, f"c{n}") for n in range(3)]
            task = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(1.5)
            run.cancel("enough")
            done = await task
            sound(done, calls)
            return list(done)

    done = stage.run(main())
    assert stage.clock.value == 1.5
    assert seen == [[0, 1, 2]]
    assert [(result.outcome, result.started, result.applied) for result in done] == [("cancelled", True, "unknown")] * 3


def test_s10_a_nested_call_is_tried_again_and_borrows_anew(stage: Stage) -> None:
    """S10, S9: in its rest a nested call holds nothing of its caller either; a sibling borrows the place meanwhile."""
    tower = tower_of(stage, max_concurrency=1, pools={"db": 1})
    maybe = failing(2)
    story: list[str] = []

    @tower.tool(writes="k", pools=["db"])
    async def outer(ctx: Context[None]) -> list[int]:
        done = await ctx.execute([Call("inner", {}), Call("beside", {})])
        return [result.attempts for result in done]

    @tower.tool(reads="k", pools=["db"], retry=3)
    async def inner() -> None:
        story.append("inner")
        await asyncio.sleep(0.1)
        maybe()

    @tower.tool(independent=True, pools=["db"])
    async def beside() -> None:
        story.append("beside")

    (result,) = run_batch(stage, tower, [Call("outer", {})])
    assert result.value == [3, 1]
    assert story == ["inner", "beside", "inner", "inner"]


def test_s10_an_attempt_that_leaves_calls_at_work_has_not_ended(stage: Stage) -> None:
    """S10, S9: an attempt whose own calls go on after it is not followed by another one; the result says so."""
    tower = tower_of(stage, max_concurrency=2)
    left: list[asyncio.Task[Any]] = []
    story: list[str] = []

    @tower.tool(reads="k", retry=2)
    async def outer(ctx: Context[None]) -> None:
        left.append(asyncio.ensure_future(ctx.execute([Call("inner", {})])))
        await asyncio.sleep(0.1)
        raise ConnectionError

    @tower.tool(reads="k")
    async def inner() -> None:
        story.append("on")
        try:
            await asyncio.sleep(1.0)
        finally:
            story.append("off")

    async def main() -> Result:
        (result,) = await tower.execute([Call("outer", {})])
        await asyncio.wait(left)
        return result

    result = stage.run(main())
    assert (result.code, result.attempts) == ("handler_error", 1)
    assert result.message.endswith("It was not tried again: calls that it has made were still at work.")
    assert story == ["on", "off"]


def test_a_caller_that_waits_for_its_calls_is_tried_again(stage: Stage) -> None:
    """S10, S9: an attempt whose nested calls are answered has ended, and is followed by another one."""
    tower = tower_of(stage, max_concurrency=2)
    maybe = failing(1)

    @tower.tool(reads="k", retry=2)
    async def outer(ctx: Context[None]) -> bool:
        done = await ctx.execute([Call("inner", {})])
        maybe()
        return done.ok

    @tower.tool(reads="k")
    async def inner() -> str:
        return await stage.work("inner", 1.0)

    (result,) = run_batch(stage, tower, [Call("outer", {})])
    assert (result.value, result.attempts, stage.started["inner"]) == (True, 2, 2)


def test_an_attempt_that_would_wait_in_a_circle_is_refused(stage: Stage) -> None:
    """S10, S8: an attempt of a nested call that closes a circle of waits is refused, and keeps what it came to."""
    tower = tower_of(stage, max_wait=1e6)
    maybe = failing(1)

    @tower.tool(writes="{own}")
    async def outer(own: str, other: str, seconds: float, ctx: Context[None]) -> Any:
        await asyncio.sleep(seconds)
        (result,) = await ctx.execute([Call("inner", {"key": other})])
        return facts(result)

    @tower.tool(writes="{key}", idempotent=True, retry=3)
    async def inner(key: str) -> None:
        if key == "k:b":
            await asyncio.sleep(1.0)
            maybe()

    async def main() -> Any:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("outer", {"own": "k:a", "other": "k:b", "seconds": 0})]))
            await asyncio.sleep(1.1)  # while that one's nested call rests, another run takes what it wants
            second = asyncio.ensure_future(two.execute([Call("outer", {"own": "k:b", "other": "k:a", "seconds": 0})]))
            return await first, await second

    (first,), (second,) = stage.run(main())
    codes = {first.value[1], second.value[1]}
    assert first.value == ("error", "handler_error", True, "unknown", "yes", 1)
    assert second.value[0] == "ok"
    assert codes == {"handler_error", None}


@pytest.mark.parametrize("where", ["task", "shared task", "thread", "coroutine of a thread"])
def test_wherever_a_handler_runs(stage: Stage, where: str) -> None:
    """S9: on the loop, in a shared task, on a thread."""
    tower = tower_of(stage, run_concurrency=2)
    left = dict.fromkeys(range(4), 2)

    def body(n: int) -> int:
        if n % 2 and left[n]:
            left[n] -= 1
            raise ConnectionError
        return n

    async def on_loop(n: int) -> int:
        await asyncio.sleep(0)
        return body(n)

    def on_thread(n: int) -> int:
        return body(n)

    def odd(n: int) -> Coroutine[Any, Any, int]:
        return on_loop(n)

    handler = {"task": on_loop, "shared task": on_loop, "thread": on_thread, "coroutine of a thread": odd}[where]
    tower.add_tool(handler, name="get", reads="k:{n}", retry=3, own_task=where != "shared task")
    calls = [Call("get", {"n": n}) for n in range(4)]
    done = run_batch(stage, tower, calls)
    sound(done, calls)
    assert [(result.value, result.attempts) for result in done] == [(0, 1), (1, 3), (2, 1), (3, 3)]


def test_several_loops_each_with_a_rest() -> None:
    """S9, P-94: calls of one tower that rest on different loops come on again on their own."""
    tower = Tower(pools={"api": 1})
    left = dict.fromkeys(range(3), 2)

    @tower.tool(reads="k:{n}", pools=["api"], retry=Retry(3, initial_delay=0.01))
    async def get(n: int) -> object:
        if left[n]:
            left[n] -= 1
            raise ConnectionError
        return asyncio.get_running_loop()

    import threading

    done: dict[int, Any] = {}

    def one(n: int) -> None:
        async def main() -> None:
            batch = await tower.execute([Call("get", {"n": n})])
            done[n] = batch[0].attempts, batch[0].value is asyncio.get_running_loop()

        asyncio.run(main())

    threads = [threading.Thread(target=one, args=(n,)) for n in left]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == dict.fromkeys(left, (3, True))
    whole_again(tower)


def test_a_loop_that_is_gone_takes_its_rests_with_it() -> None:
    """G3, P-94: a loop is closed over a call that rests: it is counted no more, and other loops go on."""
    tower = Tower()

    @tower.tool(reads="k", retry=3)
    async def get() -> None:
        raise RateLimited(5)

    loop = asyncio.new_event_loop()
    tasks: list[asyncio.Task[Any]] = []

    async def begin() -> None:
        tasks.append(loop.create_task(tower.execute([Call("get", {})])))
        for _ in range(10):
            await asyncio.sleep(0)
        assert tower.statistics().backing_off == 1

    loop.run_until_complete(begin())
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # the test throws it away on purpose
    loop.close()

    async def other() -> None:
        tower._shells.here()
        assert tower.statistics().backing_off == 0

    asyncio.run(other())


def test_after_a_fork_nobody_rests() -> None:
    """P-95: the child of a fork has no part in what rests in its parent."""
    tower = Tower()
    tower._core.backing_off = 3
    tower._after_fork()
    assert tower.statistics().backing_off == 0


def test_observe_mode_tries_again_as_well(stage: Stage) -> None:
    """S13: limits are only watched; attempts are what they are, each counted at the limits."""
    tower = tower_of(stage, mode="observe", pools={"api": 1})
    maybe = failing(1)

    @tower.tool(reads="k:{n}", pools=["api"], retry=2)
    async def get(n: int) -> int:
        await asyncio.sleep(1.0)
        if n == 0:
            maybe()
        return n

    done = run_batch(stage, tower, [Call("get", {"n": n}) for n in range(2)])
    assert [result.attempts for result in done] == [2, 1]


def test_a_rehearsal_has_the_same_pauses_each_time() -> None:
    """R-115: what is tried again in a rehearsal comes at the same instants each time."""
    tower = Tower()

    @tower.tool(reads="k", retry=4)
    async def get() -> None: ...

    seen = []
    for _ in range(2):
        with Rehearsal(tower) as rehearsal:
            rehearsal.script("get", raises=ConnectionError)
            (result,) = rehearsal.execute([Call("get", {})])
            assert result.attempts == 4
            seen.append([visit.started for visit in rehearsal.visits])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 4


# ==================================================================== trace, timeline


def test_r131_each_attempt_is_told_and_drawn(stage: Stage) -> None:
    """R-131: events for each attempt, none with a text of the exception; the timeline draws them apart, from results
    and from events alike.
    """
    tower = tower_of(stage, pools={"api": 1})
    events: list[Event] = []
    tower.add_observer(events.append)
    maybe = failing(2, lambda: ConnectionError("S3CRET"))

    @tower.tool(reads="k", pools=["api"], retry=Retry(3, initial_delay=2.0))
    async def get() -> str:
        await asyncio.sleep(1.0)
        maybe()
        return "done"

    done = run_batch(stage, tower, [Call("get", {})])
    tower.flush()
    told = [(event.kind, event.attempt) for event in events if event.index is not None]
    assert told == [
        ("admitted", None),
        ("started", None),
        ("retrying", 1),
        ("admitted", 2),
        ("started", 2),
        ("retrying", 2),
        ("admitted", 3),
        ("started", 3),
        ("finished", 3),
    ]
    first = next(event for event in events if event.kind == "retrying")
    assert (first.code, first.ran, first.pause) == ("handler_error", 1.0, 2.0)
    assert "S3CRET" not in repr(events)
    (span,) = done.spans()
    assert span.attempts == ((0.0, 0.0, 1.0), (3.0, 3.0, 4.0), (8.0, 8.0, 9.0))
    (story,) = stories(events)
    assert story.spans == (span,)
    drawing = done.timeline(100)
    (row,) = [line for line in drawing.splitlines() if line.startswith("0")]
    assert row.count("╌") > row.count("█") > 0
    assert [part for part in row.replace("╌", " ").split() if set(part) == {"█"}].__len__() == 3
    assert "resting before another attempt" in drawing


def test_a_refused_attempt_is_drawn_as_a_wait(stage: Stage) -> None:
    """R-131: the wait for an attempt that never came is seen, from results and from events alike."""
    tower = tower_of(stage, pools={"api": 1}, max_wait=2.0)
    events: list[Event] = []
    tower.add_observer(events.append)

    @tower.tool(reads="k", pools=["api"], retry=Retry(3, initial_delay=1.0))
    async def get() -> None:
        await asyncio.sleep(1.0)
        raise ConnectionError

    @tower.tool(independent=True, pools=["api"])
    async def hog() -> str:
        return await stage.work("hog", 9.0)

    async def main() -> Any:
        async with tower.run("one") as one, tower.run("two") as two:
            first = asyncio.ensure_future(one.execute([Call("get", {})]))
            await asyncio.sleep(0.5)
            second = asyncio.ensure_future(two.execute([Call("hog", {})]))
            return await first, await second

    done, _ = stage.run(main())
    tower.flush()
    (span,) = done.spans()
    assert span.attempts == ((0.0, 0.0, 1.0), (2.0, None, 4.0))
    assert stories(events)[0].spans == (span,)
    (row,) = [line for line in done.timeline().splitlines() if line.startswith("0")]
    assert row.index("█") < row.index("╌") < row.index("░")


# ==================================================================== end_turn


def refusing(stage: Stage, **options: Any) -> Tower:
    """A tower whose one place is taken when its tool is called."""
    tower = tower_of(stage, max_concurrency=1, run_concurrency=1)

    @tower.tool(reads="k", **options)
    async def get() -> str:
        return "got"

    return tower


@pytest.mark.parametrize(
    ("options", "code", "end"),
    [
        ({"on_refusal": "end_turn", "when_busy": "reject"}, "concurrency_limit", True),
        ({"on_refusal": "end_turn", "max_queued": 0}, "queue_full", True),
        ({"on_refusal": "end_turn", "max_wait": 1.0}, "wait_timeout", True),
        ({"on_refusal": "tell", "when_busy": "reject"}, "concurrency_limit", False),
        ({"when_busy": "reject"}, "concurrency_limit", False),
    ],
)
def test_r74_a_refusal_ends_the_turn_where_it_is_declared(
    stage: Stage, options: dict[str, Any], code: str, end: bool
) -> None:
    """R-74: a refused call is told to the model, and ends the turn where its tool says so."""
    tower = refusing(stage, **options)
    release = stage_hold(tower)

    async def main() -> Any:
        async with tower.run() as one, tower.run() as two:
            busy = asyncio.ensure_future(one.execute([Call("hold", {})]))
            await asyncio.sleep(0.1)
            done = await two.execute([Call("get", {})])
            release.set()
            assert not (await busy).end_turn
            return done

    done = stage.run(main())
    assert (done[0].code, done.end_turn) == (code, end)
    assert len(done.turn()) > 0


def test_r74_what_is_no_refusal_ends_no_turn(stage: Stage) -> None:
    """R-74: mistakes of the model, missing permission, failures and cancelled calls are told as ever."""
    tower = tower_of(stage)

    @tower.tool(independent=True, on_refusal="end_turn")
    async def get(n: int) -> int:
        if n:
            raise RateLimited(1)
        return n

    calls = [Call("get", "{"), Call("get", {"n": 0}), Call("get", {"n": 1}), Call("nobody", {})]
    done = run_batch(stage, tower, calls)
    assert [result.code for result in done] == ["invalid_arguments", None, "rate_limited", "unknown_tool"]
    assert not done.end_turn
    assert not run_batch(stage, tower, [Call("get", {"n": 0})], deny=["get"]).end_turn
    assert not run_batch(stage, tower, []).end_turn
    late = run_batch(stage, tower, [Call("get", {"n": 0})], deadline=0)
    assert (late[0].code, late.end_turn) == ("deadline_exceeded", True)


def test_r74_the_page_names_what_ends_a_turn() -> None:
    """R-74: the codes that count are those on the page."""
    page = (ROOT / "docs" / "retries.md").read_text(encoding="utf-8")
    told = page.partition("These refusals count: ")[2].partition(". A mistake")[0]
    assert set(re.findall(r"`(\w+)`", told)) == ENDS_TURN


# ==================================================================== live changes, debug


def test_a_change_tells_of_a_retry(stage: Stage) -> None:
    """R-64, R-62: retry is an option like any: changed while the tower lives, and refused where it may not be."""
    tower = tower_of(stage)

    @tower.tool(reads="k")
    async def get() -> None:
        raise ConnectionError

    @tower.tool(writes="k")
    async def put() -> None: ...

    assert str(tower.policy("get", retry=2)) == "None"
    changes = tower.configure(tools={"get": {"retry": {"max_attempts": 3, "initial_delay": 0}}})
    assert str(changes) == (
        "tools.get.retry: 2 attempts, pauses 0.2 to 5 s, on ConnectionError, TimeoutError -> "
        "3 attempts, pauses 0 to 5 s, on ConnectionError, TimeoutError"
    )
    (result,) = run_batch(stage, tower, [Call("get", {})])
    assert result.attempts == 3
    with pytest.raises(PolicyError, match=r"tool 'put': retry repeats a call.*retry is given in tower.policy '\*t'"):
        tower.policy("*t", retry=2)
    tower.policy("put", retry=1)
    tower.policy("*t", retry=2)


def test_debug_prints_each_attempt(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """debug=True: a traceback for each attempt that raised, once."""
    tower = tower_of(stage, debug=True)

    @tower.tool(reads="k", retry=2)
    async def get() -> None:
        raise ConnectionError("seen locally")

    run_batch(stage, tower, [Call("get", {})])
    assert capsys.readouterr().err.count("ConnectionError: seen locally") == 2


# ==================================================================== whatever fails, however often


@settings(max_examples=150)
@given(
    schedules=st.lists(
        st.tuples(
            st.lists(st.sampled_from(["lost", "limited", "late", "said", "wrong", "long"]), max_size=5),
            st.sampled_from(["get", "put", "look", "note"]),
            st.sampled_from(["a", "b"]),
        ),
        min_size=1,
        max_size=8,
    ),
    places=st.integers(1, 3),
    attempts=st.integers(1, 4),
    deadline=st.one_of(st.none(), st.floats(0.5, 20)),
    cancel_at=st.one_of(st.none(), st.floats(0, 10)),
    chances=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5),
)
def test_s9_g1_random_failures(
    schedules: list[tuple[list[str], str, str]],
    places: int,
    attempts: int,
    deadline: float | None,
    cancel_at: float | None,
    chances: list[float],
) -> None:
    """S9, G1, G2, G3: whatever fails and however often: one result a call, never more starts than attempts, nothing
    held by what rests, conflicting calls in emitted order and never two at once, all free afterwards.
    """
    stage = Stage()
    tower = stage.tower(max_concurrency=places, max_wait=5.0)
    turns = iter(range(10**9))
    tower._core.random = lambda: chances[next(turns) % len(chances)]
    starts: dict[int, int] = {}
    at_work: dict[int, str] = {}
    order: list[int] = []
    wrong: list[str] = []

    async def handler(n: int, key: str, ctx: Context[None]) -> int:
        starts[n] = starts.get(n, 0) + 1
        tool, seen = schedules[n][1], tower.statistics()
        beside = {schedules[m][1] for m in at_work if schedules[m][2] == key}
        meets = {"put": {"put", "get"}, "get": {"put"}}.get(tool, set())
        if ctx.attempt != starts[n] or beside & meets or not seen.running == seen.pools["process"].held <= places:
            wrong.append(f"{n} at attempt {ctx.attempt} beside {beside}: {seen}")
        if tool == "put":
            order.append(n)
        at_work[n] = tool
        try:
            script = schedules[n][0]
            what = script[ctx.attempt - 1] if ctx.attempt <= len(script) else ""
            await asyncio.sleep(0.3)
            match what:
                case "lost":
                    raise ConnectionError
                case "limited":
                    raise RateLimited(0.5)
                case "long":
                    raise RateLimited(50)
                case "said":
                    raise ToolError("no")
                case "wrong":
                    raise ValueError
                case "late":
                    await asyncio.sleep(9)
            return n
        finally:
            del at_work[n]

    again: dict[str, Any] = {"retry": attempts, "timeout": 1.0}
    tower.add_tool(handler, name="get", reads="{key}", **again)
    tower.add_tool(handler, name="put", writes="{key}", idempotent=True, **again)
    tower.add_tool(handler, name="look", independent=True, read_only=True, **again)
    tower.add_tool(handler, name="note", independent=True, timeout=1.0)
    calls = [Call(tool, {"n": n, "key": key}, f"c{n}") for n, (_, tool, key) in enumerate(schedules)]

    async def main() -> Any:
        stage.loop = here()
        async with tower.run(deadline=deadline) as run:
            task = asyncio.ensure_future(run.execute(calls))
            if cancel_at is not None:
                await asyncio.sleep(cancel_at)
                run.cancel("enough")
            return await task

    try:
        done = stage.run(main())
        sound(done, calls)
        assert not wrong
        for n, result in enumerate(done):
            most = 1 if schedules[n][1] == "note" else attempts
            assert starts.get(n, 0) == result.attempts <= most
            if result.ok:
                assert len(schedules[n][0]) < result.attempts, "it had more failures in store"
            elif result.outcome == "error" and "not tried again" not in result.message:
                last = schedules[n][0][result.attempts - 1]
                assert result.attempts == most or last in ("said", "wrong")
        for key in ("a", "b"):
            mine = [n for n in order if schedules[n][2] == key]
            assert mine == sorted(mine), "attempts of conflicting writes left their order"
        whole_again(tower)
        stage.run(retake(tower))
    except BaseException as failure:
        failure.add_note("\n".join(stage.story[-60:]))
        raise
    finally:
        tower._core.workers.close()
        tower._courier.close()
