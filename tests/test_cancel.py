"""Cancel, everywhere: each scenario is run once to count its steps, then again and again with a cancel between any
two of them.

Whatever is cancelled (the caller, once or twice; the run; one call) and whenever: every call has exactly one result,
a cancel reaches the caller
once and after sealing, nothing is held, no task and no timer is left, and no handler starts after its result.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit import CountedWorkers, Stage, gate_of, here, on_stage, sound, until, whole_again

import towerman.runner.intake
from towerman import (
    ApprovalRequest,
    Approved,
    BatchResult,
    Breaker,
    Budget,
    Call,
    Context,
    Denied,
    Pool,
    Rate,
    RateLimited,
    Result,
    Run,
    ToolError,
    Tower,
)
from towerman.threads import Ticket
from towerman.work import Job

stage = pytest.fixture(on_stage)

# ==================================================================== scenarios


@dataclass
class Scene:
    """One tower and one batch, ready to be handed in.

    Attributes:
        calls: the batch under test.
        beside: other work of the same tower that goes on meanwhile, started first.
        options: of `Tower.run`.
        on_result: the caller's hook, beside the test's own.
        begin: hands the batch in; default: `Run.execute`.
    """

    stage: Stage
    tower: Tower
    calls: list[Call]
    beside: Callable[[], Coroutine[Any, Any, object]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    on_result: Callable[[Result], None] | None = None
    may_raise: tuple[type[BaseException], ...] = ()
    begin: Callable[[Run], Coroutine[Any, Any, BatchResult]] | None = None
    sealed: dict[int, Result] = field(default_factory=dict)
    caller: asyncio.Task[Any] | None = None
    run: Run | None = None
    ended_at: float = 0.0

    def hand_in(self, run: Run) -> Coroutine[Any, Any, BatchResult]:
        """Have the batch answered."""
        return run.execute(self.calls, on_result=self.hook) if self.begin is None else self.begin(run)

    def hook(self, result: Result) -> None:
        """Sees each result; none may come twice."""
        assert result.index not in self.sealed, f"two results for call {result.index}"
        self.sealed[result.index] = result
        if self.on_result is not None:
            self.on_result(result)


SCENES: dict[str, Callable[[Stage], Scene]] = {}


def scene(make: Callable[[Stage], Scene]) -> Callable[[Stage], Scene]:
    """Register a scenario."""
    SCENES[make.__name__] = make
    return make


@scene
def independent(stage: Stage) -> Scene:
    """Three calls side by side, of different lengths; one yields and one does not wait at all."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work(n: int, seconds: float) -> str:
        if not seconds:
            return await stage.work(f"{n}", 0) if n % 2 else "at once"
        return await stage.work(f"{n}", seconds)

    return Scene(stage, tower, [Call("work", {"n": n, "seconds": s}, str(n)) for n, s in enumerate((0.2, 0, 0.1, 0))])


@scene
def keyed_chain(stage: Stage) -> Scene:
    """Write, read, read, write of one resource, and a call of another one."""
    tower = stage.tower()

    @tower.tool(writes="ticket:{t}")
    async def write(t: int, n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    @tower.tool(reads="ticket:{t}")
    async def read(t: int, n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    calls = [("write", 1), ("read", 1), ("read", 1), ("write", 1), ("write", 2)]
    return Scene(stage, tower, [Call(tool, {"t": t, "n": n}, str(n)) for n, (tool, t) in enumerate(calls)])


@scene
def queued_on_another_run(stage: Stage) -> Scene:
    """Every call waits for a pool that another run holds, which hands it over while they wait."""
    tower = stage.tower(pools={"db": 1}, max_concurrency=3)

    @tower.tool(independent=True, pools=["db"])
    async def query(n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    async def other() -> None:
        async with tower.run() as run:
            await run.execute([Call("query", {"n": 100 + n}) for n in range(3)])

    return Scene(stage, tower, [Call("query", {"n": n}, str(n)) for n in range(3)], beside=other)


@scene
def wide_behind_narrow(stage: Stage) -> Scene:
    """A call of weight 3 and calls of weight 1, of two runs, on three places."""
    tower = stage.tower(max_concurrency=3, run_concurrency=3)

    @tower.tool(independent=True)
    async def narrow(n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    @tower.tool(independent=True, weight=3)
    async def wide(n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    async def other() -> None:
        async with tower.run() as run:
            await run.execute([Call("narrow", {"n": 100 + n}) for n in range(4)])

    calls = [Call(tool, {"n": n}, str(n)) for n, tool in enumerate(("narrow", "wide", "narrow", "wide"))]
    return Scene(stage, tower, calls, beside=other)


@scene
def needs_diamond(stage: Stage) -> Scene:
    """A diamond of needs, and a branch whose root fails."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def step(n: int) -> str:
        if n == 4:
            await asyncio.sleep(0.05)
            raise ToolError("no")
        return await stage.work(f"{n}", 0.1)

    wants = {1: ["0"], 2: ["0"], 3: ["1", "2"], 5: ["4"], 6: ["5"]}
    return Scene(stage, tower, [Call("step", {"n": n}, str(n), wants.get(n, ())) for n in range(7)])


@scene
def shared_task(stage: Stage) -> Scene:
    """own_task=False: several calls in one task, one behind another on one place, then two."""
    tower = stage.tower(run_concurrency=2)

    @tower.tool(independent=True, own_task=False)
    async def work(n: int) -> str:
        with stage.on(f"{n}"):
            if n % 2:
                await asyncio.sleep(0.1)
        return "done"

    return Scene(stage, tower, [Call("work", {"n": n}, str(n)) for n in range(7)])


@scene
def threads(stage: Stage) -> Scene:
    """Sync handlers: two at work, two waiting for a place."""
    tower = stage.tower(run_concurrency=2)

    @tower.tool(independent=True)
    def work(n: int) -> str:
        return stage.sync_work(stage.loop, f"{n}", 0.1)

    return Scene(stage, tower, [Call("work", {"n": n}, str(n)) for n in range(4)])


@scene
def threads_in_order(stage: Stage) -> Scene:
    """Sync and async handlers that write one resource in turn."""
    tower = stage.tower()

    @tower.tool(writes="k")
    def in_thread(n: int) -> str:
        return stage.sync_work(stage.loop, f"{n}", 0.1)

    @tower.tool(writes="k")
    async def on_loop(n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    return Scene(stage, tower, [Call(("in_thread", "on_loop")[n % 2], {"n": n}, str(n)) for n in range(4)])


@scene
def stubborn(stage: Stage) -> Scene:
    """Handlers that ignore every cancel, longer than grace, with calls ordered behind them."""
    tower = stage.tower(grace=0.2)

    @tower.tool(writes="k")
    async def hold(n: int) -> str:
        return await stage.stubborn(f"{n}", 1.0)

    @tower.tool(independent=True)
    async def aside(n: int) -> str:
        return await stage.stubborn(f"{n}", 0.1)

    return Scene(stage, tower, [Call(tool, {"n": n}, str(n)) for n, tool in enumerate(("hold", "aside", "hold"))])


@scene
def stubborn_released(stage: Stage) -> Scene:
    """The same where orphans give back what they hold."""
    tower = stage.tower(grace=0.2, on_orphan="release", run_concurrency=2)

    @tower.tool(writes="k")
    async def hold(n: int) -> str:
        return await stage.stubborn(f"{n}", 1.0)

    return Scene(stage, tower, [Call("hold", {"n": n}, str(n)) for n in range(3)])


@scene
def cleaning_up(stage: Stage) -> Scene:
    """Handlers that need a while to clean up, within grace; one cleans up by calling a batch of its own kind of
    work.
    """
    tower = stage.tower(grace=1.0, run_concurrency=2)

    @tower.tool(independent=True)
    async def work(n: int) -> str:
        with stage.on(f"{n}"):
            try:
                await asyncio.sleep(0.3)
            finally:
                await asyncio.sleep(0.1)
        return "done"

    return Scene(stage, tower, [Call("work", {"n": n}, str(n)) for n in range(3)])


@scene
def out_of_time(stage: Stage) -> Scene:
    """Timeouts of running calls and of waiting ones, a run deadline, while it goes on."""
    tower = stage.tower(pools={"db": 1}, timeout=0.3, max_wait=0.35, grace=0.1)

    @tower.tool(independent=True, pools=["db"])
    async def slow(n: int) -> str:
        return await stage.work(f"{n}", 5.0)

    @tower.tool(sequential=True)
    async def short(n: int) -> str:
        return await stage.work(f"{n}", 0.2)

    async def other() -> None:
        async with tower.run() as run:
            await run.execute([Call("slow", {"n": 100})])

    calls = [Call(tool, {"n": n}, str(n)) for n, tool in enumerate(("slow", "short", "slow", "short"))]
    return Scene(stage, tower, calls, beside=other, options={"deadline": 0.6})


@scene
def failing_fast(stage: Stage) -> Scene:
    """The first failure stops the rest; a write in flight is spared and goes on."""
    tower = stage.tower(run_concurrency=3, grace=0.3)

    @tower.tool(independent=True, read_only=True)
    async def look(n: int) -> str:
        return await stage.work(f"{n}", 0.5)

    @tower.tool(independent=True)
    async def change(n: int) -> str:
        return await stage.stubborn(f"{n}", 0.7)

    @tower.tool(independent=True)
    async def fail(n: int) -> str:
        await asyncio.sleep(0.2)
        raise ToolError("no")

    calls = [Call(tool, {"n": n}, str(n)) for n, tool in enumerate(("look", "change", "fail", "look", "change"))]
    return Scene(stage, tower, calls, options={"fail_fast": True})


@scene
def raising_hook(stage: Stage) -> Scene:
    """The caller's hook raises at the first and at the last result."""
    tower = stage.tower(run_concurrency=2)

    @tower.tool(independent=True)
    async def work(n: int) -> str:
        return await stage.work(f"{n}", 0.1 * (n + 1))

    def hook(result: Result) -> None:
        if result.index in (0, 3):
            raise LookupError("the hook is broken")

    calls = [Call("work", {"n": n}, str(n)) for n in range(4)]
    return Scene(stage, tower, calls, on_result=hook, may_raise=(LookupError,))


@scene
def too_large(stage: Stage) -> Scene:
    """Values that do not fit: kept at once, written down on a thread, summed up there, trimmed with their batch."""
    tower = stage.tower(max_result_bytes=600, max_batch_bytes=1_500, run_concurrency=2)
    rows = [{"n": n} for n in range(200)]

    @tower.tool(independent=True)
    async def give(n: int) -> object:
        await stage.work(f"{n}", 0.1)
        return rows

    @tower.tool(independent=True)
    def give_in_thread(n: int) -> object:
        return stage.sync_work(stage.loop, f"{n}", 0.1) * 1_000

    @tower.tool(independent=True, summarize=lambda value: f"{len(value)} rows")
    async def sum_up(n: int) -> object:
        await stage.work(f"{n}", 0.1)
        return rows

    @tower.tool(independent=True, summarize=lambda value: {}[value])
    def sum_up_in_thread(n: int) -> object:
        return stage.sync_work(stage.loop, f"{n}", 0.1) * 1_000

    @tower.tool(independent=True)
    async def whole(n: int) -> str:
        return await stage.work(f"{n}", 0.1) * 590

    names = ("give", "sum_up", "give_in_thread", "sum_up_in_thread", "whole")
    return Scene(stage, tower, [Call(name, {"n": n}, str(n)) for n, name in enumerate(names)])


@scene
def in_slices(stage: Stage) -> Scene:
    """A long batch with bad calls among it: prepared and sealed in slices, with a turn of the loop between them."""
    tower = stage.tower(run_concurrency=2, max_calls_per_batch=200)

    @tower.tool(independent=True)
    async def work(n: int) -> str:
        with stage.on(f"{n}"):
            await asyncio.sleep(0.1)
        return "done"

    calls = [Call("work", "{" if n % 9 == 3 else {"n": n}, str(n)) for n in range(70)]
    return Scene(stage, tower, calls, options={"deadline": 0.45})


@scene
def own_cancel(stage: Stage) -> Scene:
    """Handlers that raise CancelledError or cancel their own task, beside others (P-02)."""
    tower = stage.tower(run_concurrency=2)

    @tower.tool(independent=True)
    async def raises(n: int) -> str:
        await asyncio.sleep(0.1)
        raise asyncio.CancelledError

    @tower.tool(independent=True, own_task=False)
    async def itself(n: int) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "cancelled my task"

    @tower.tool(independent=True, own_task=False)
    async def fine(n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    calls = [Call(tool, {"n": n}, str(n)) for n, tool in enumerate(("raises", "fine", "itself", "fine", "fine"))]
    return Scene(stage, tower, calls)


@scene
def sharing(stage: Stage) -> Scene:
    """Identical reads share a run, twice, with a write between them; the first run of each kind fails (S11)."""
    tower = stage.tower()

    @tower.tool(reads="doc:{p}", share_identical=True)
    async def read(p: int, ctx: Context) -> str:
        if ctx.index == 0:
            with stage.on("0"):
                await asyncio.sleep(0.1)
                raise ToolError("no")
        return await stage.work(f"{ctx.index}", 0.1)

    @tower.tool(writes="doc:{p}")
    async def write(p: int, ctx: Context) -> str:
        return await stage.work(f"{ctx.index}", 0.1)

    calls = [("read", 1)] * 4 + [("write", 1), ("read", 1), ("read", 2), ("read", 1)]
    return Scene(stage, tower, [Call(tool, {"p": p}, str(n)) for n, (tool, p) in enumerate(calls)])


@scene
def attempts(stage: Stage) -> Scene:
    """Calls that fail and rest and are tried again, in order on one resource, on one place, by need, out of time."""
    tower = stage.tower(run_concurrency=2, pools={"db": 1}, grace=0.2)
    tower._core.random = lambda: 1.0
    failures = {0: 2, 2: 9, 3: 1, 6: 1}

    def attempt(n: int) -> None:
        failures[n] = failures.get(n, 0) - 1
        if failures[n] >= 0:
            raise ConnectionError

    @tower.tool(writes="k", idempotent=True, retry=3)
    async def put(n: int) -> None:
        with stage.on(f"{n}"):
            await asyncio.sleep(0.1)
            attempt(n)

    @tower.tool(reads="k", pools=["db"], retry=3)
    def get(n: int) -> None:
        with stage.on(f"{n}"):
            stage.rest(stage.loop, 0.05)
            attempt(n)

    @tower.tool(independent=True, read_only=True, pools=["db"], retry=2, timeout=0.15, own_task=False)
    async def slow(n: int) -> None:
        with stage.on(f"{n}"):
            await asyncio.sleep(9 if n == 4 else 0.1)

    async def other() -> None:
        async with tower.run() as run:
            await run.execute([Call("slow", {"n": 100 + n}) for n in range(3)])

    names = ("put", "slow", "put", "get", "slow", "slow", "get")
    wants = {5: ["3"]}
    calls = [Call(tool, {"n": n}, str(n), wants.get(n, ())) for n, tool in enumerate(names)]
    return Scene(stage, tower, calls, beside=other)


@scene
def rated(stage: Stage) -> Scene:
    """Calls that wait for rates on the loop and on threads, beside another run; a service that wants a pause, and a
    breaker that opens and is closed again by a probe.
    """
    tower = stage.tower(run_concurrency=3, pools={"api": Pool(2, rate="2/100ms")}, max_wait=5)
    failures = {0: 1, 2: 1, 5: 1}

    def attempt(n: int, wrong: Exception) -> None:
        failures[n] = failures.get(n, 0) - 1
        if failures[n] >= 0:
            raise wrong

    @tower.tool(independent=True, pools=["api"])
    async def search(n: int) -> None:
        with stage.on(f"{n}"):
            await asyncio.sleep(0.03)
            attempt(n, RateLimited(0.2))

    @tower.tool(independent=True, pools=["api"], rate=Rate(10, per=1.0, burst=1))
    def fetch(n: int) -> None:
        with stage.on(f"{n}"):
            stage.rest(stage.loop, 0.02)

    @tower.tool(independent=True, read_only=True, breaker=Breaker(failures=1, open_for=0.1), retry=3)
    async def ask(n: int) -> None:
        with stage.on(f"{n}"):
            await asyncio.sleep(0.05)
            attempt(n, ConnectionError())

    async def other() -> None:
        async with tower.run() as run:
            await run.execute([Call("search", {"n": 100 + n}) for n in range(3)])

    tools = ("search", "fetch", "ask", "search", "fetch", "ask", "search", "ask")
    return Scene(stage, tower, [Call(tool, {"n": n}, str(n)) for n, tool in enumerate(tools)], beside=other)


@scene
def attempts_of_merged_calls(stage: Stage) -> Scene:
    """A merged run that fails and rests, between writes of the same resource; and one that is made by a call."""
    tower = stage.tower(run_concurrency=2)
    tower._core.random = lambda: 1.0
    failures = {"0": 1, "inner": 1}

    def attempt(name: str) -> None:
        failures[name] = failures.get(name, 0) - 1
        if failures[name] >= 0:
            raise ConnectionError

    @tower.tool(
        writes="k", idempotent=True, retry=2, merge=lambda sets: {"rows": [row for one in sets for row in one["rows"]]}
    )
    async def put(rows: list[int], ctx: Context) -> None:
        with stage.on(f"{ctx.index}"):
            await asyncio.sleep(0.1)
            attempt(f"{ctx.index}")

    @tower.tool(writes="k")
    async def outer(ctx: Context) -> None:
        with stage.on(f"{ctx.index}"):
            await ctx.execute([Call("inner", {})])

    @tower.tool(writes="k", idempotent=True, retry=2)
    async def inner() -> None:
        await asyncio.sleep(0.1)
        attempt("inner")

    calls = [Call("put", {"rows": [n]}, str(n)) for n in range(3)] + [Call("outer", {}, "3")]
    return Scene(stage, tower, calls)


@scene
def sharing_on_threads(stage: Stage) -> Scene:
    """Identical calls of a tool that declares nothing, on threads, one of which is needed by another call."""
    tower = stage.tower()

    @tower.tool(share_identical=True)
    def send(to: str, ctx: Context) -> str:
        return stage.sync_work(stage.loop, f"{ctx.index}", 0.1)

    calls = [Call("send", {"to": to}, str(n), ["1"] if n == 3 else []) for n, to in enumerate("aaabab")]
    return Scene(stage, tower, calls)


@scene
def merging(stage: Stage) -> Scene:
    """Writes of one resource in one run; one run fails without an effect, so that the others try again."""
    tower = stage.tower()

    @tower.tool(writes="list:{p}", merge=lambda sets: {"p": sets[0]["p"], "n": [n for one in sets for n in one["n"]]})
    async def add(p: int, n: list[int], ctx: Context) -> str:
        if ctx.index == 4:
            with stage.on("4"):
                await asyncio.sleep(0.1)
                raise ToolError("no", applied="no")
        return await stage.work(f"{ctx.index}", 0.1)

    @tower.tool(reads="list:{p}")
    async def read(p: int, ctx: Context) -> str:
        return await stage.work(f"{ctx.index}", 0.1)

    tools = ("add", "add", "add", "read", "add", "add", "add")
    calls = [Call(tool, {"p": 1, "n": [n]} if tool == "add" else {"p": 1}, str(n)) for n, tool in enumerate(tools)]
    return Scene(stage, tower, calls)


@scene
def merging_stubborn(stage: Stage) -> Scene:
    """The same with handlers that ignore a cancel for longer than grace, beside one that stops the batch."""
    tower = stage.tower(grace=0.2)

    @tower.tool(writes="list", merge=lambda sets: {"n": [n for one in sets for n in one["n"]]})
    async def add(n: list[int], ctx: Context) -> str:
        return await stage.stubborn(f"{ctx.index}", 1.0)

    @tower.tool(independent=True)
    async def fail(ctx: Context) -> str:
        with stage.on(f"{ctx.index}"):
            await asyncio.sleep(0.5)
            raise ToolError("no")

    calls = [Call("fail" if n == 1 else "add", {} if n == 1 else {"n": [n]}, str(n)) for n in range(4)]
    return Scene(stage, tower, calls, options={"fail_fast": True})


@scene
def written_down(stage: Stage) -> Scene:
    """With a journal: writes on the loop and on a thread, a read, one call twice, a failure, one that needs another;
    and the first call of all is at work in another run, and joined.
    """
    tower = stage.tower(journal=":memory:", run_concurrency=2)

    @tower.tool(independent=True)
    async def pay(n: int, ctx: Context) -> str:
        # The same call of the other run may be the one that runs.
        with stage.on(f"{n}" if ctx.run_id == "mine" else f"other {n}"):
            await asyncio.sleep(0.1)
            if n == 3:
                raise ToolError("no", applied="no")
        return f"{n}"

    @tower.tool(independent=True)
    def pay_in_thread(n: int) -> str:
        return stage.sync_work(stage.loop, f"{n}", 0.1)

    @tower.tool(independent=True, read_only=True)
    async def look(n: int, ctx: Context) -> str:
        return await stage.work(f"{ctx.index}", 0.05)

    async def other() -> None:
        async with tower.run("other") as run:
            await run.execute([Call("pay", {"n": 0}, idempotency_key="zero")])

    calls = [
        Call("pay", {"n": 0}, "0", idempotency_key="zero"),
        Call("pay_in_thread", {"n": 1}, "1", idempotency_key="one"),
        Call("look", {"n": 2}, "2", idempotency_key="two"),
        Call("pay", {"n": 3}, "3", idempotency_key="three"),
        Call("pay", {"n": 4}, "4", ["0"]),
        Call("look", {"n": 2}, "5", idempotency_key="two"),
    ]
    return Scene(stage, tower, calls, beside=other, options={"run_id": "mine"})


@scene
def written_down_merged(stage: Stage) -> Scene:
    """With a journal: writes that are merged into one run, and identical calls that share one."""
    tower = stage.tower(journal=":memory:")

    @tower.tool(writes="list", merge=lambda sets: {"n": [n for one in sets for n in one["n"]]})
    async def add(n: list[int], ctx: Context) -> str:
        with stage.on(f"{ctx.index}"):
            await asyncio.sleep(0.1)
            if 1 in n and len(n) > 1:
                raise ToolError("no", applied="no")
        return "added"

    @tower.tool(independent=True, share_identical=True)
    async def send(ctx: Context) -> str:
        return await stage.work(f"{ctx.index}", 0.1)

    calls = [Call("add", {"n": [n]}, str(n)) for n in (1, 2, 3)] + [Call("send", {}, str(n)) for n in (4, 5)]
    return Scene(stage, tower, calls)


@scene
def deferred(stage: Stage) -> Scene:
    """With a durable queue: a call for which there is no place, on the loop and on a thread, what is ordered behind it
    directly and by way of others, and what has nothing to do with it.
    """
    tower = stage.tower(journal=":memory:", pools={"crm": 1})

    @tower.tool(independent=True, read_only=True, pools=["crm"])
    async def hold() -> None:
        await asyncio.sleep(2.0)

    @tower.tool(writes="box:{n}", pools=["crm"], when_busy="defer")
    async def pack(n: int, ctx: Context) -> str:
        return await stage.work(f"{ctx.index}", 0.1)

    @tower.tool(reads="box:{n}")
    def look(n: int, ctx: Context) -> str:
        return stage.sync_work(stage.loop, f"{ctx.index}", 0.1)

    @tower.tool(independent=True)
    async def chat(n: int, ctx: Context) -> str:
        return await stage.work(f"{ctx.index}", 0.1)

    async def other() -> None:
        async with tower.run("other") as run:
            await run.execute([Call("hold", {})])

    calls = [
        Call("pack", {"n": 1}, "0", idempotency_key="zero"),
        Call("pack", {"n": 2}, "1"),
        Call("look", {"n": 1}, "2"),
        Call("look", {"n": 3}, "3"),
        Call("chat", {"n": 4}, "4", ["1", "3"]),
        Call("pack", {"n": 1}, "5", ["2"]),
        Call("chat", {"n": 6}, "6"),
    ]
    return Scene(stage, tower, calls, beside=other, options={"run_id": "mine"})


@scene
def asking_people(stage: Stage) -> Scene:
    """Calls that wait for a person: approved, edited, denied, undecided with calls behind it, never decided; on the
    loop and on a thread, and an approval that is over while its call waits for a place.
    """
    tower = stage.tower(run_concurrency=2, approval_lifetime=1.0, grace=0.2)

    @tower.tool(writes="k:{k}", requires_approval=lambda k: k < 5)
    async def act(k: int, n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    @tower.tool(independent=True, requires_approval=True, still_valid=lambda n: n != 7)
    def in_thread(n: int) -> str:
        return stage.sync_work(stage.loop, f"{n}", 0.3)

    async def approver(request: ApprovalRequest) -> Approved | Denied | None:
        n = request.arguments["n"]
        await asyncio.sleep(5.0 if n == 5 else 0.1)
        return {
            0: Approved(),
            1: Denied("no"),
            2: Approved({"k": 2, "n": 2}),
            6: Approved(),
            7: Approved(),
            8: Approved(expires_in=0.1),
        }.get(n)  # type: ignore[call-overload]

    keys = (0, 0, 2, 3, 3, 4)
    calls = [Call("act", {"k": k, "n": n}, str(n)) for n, k in enumerate(keys)]
    calls += [Call("in_thread", {"n": n}, str(n)) for n in (6, 7, 8)]
    calls.append(Call("act", {"k": 9, "n": 9}, "9", ["3"]))
    return Scene(stage, tower, calls, options={"approver": approver})


@scene
def going_on(stage: Stage) -> Scene:
    """The same batch gone on with from its written state, with decisions for some of its calls."""
    made = asking_people(stage)
    tower, calls = made.tower, made.calls

    async def first() -> BatchResult:
        async with tower.run() as run:
            return await run.execute(calls)

    batch = stage.run(first())
    by_id = {request.call_id: request.approval_id for request in batch.pending}
    decisions = {by_id["0"]: Approved(), by_id["1"]: Denied(), by_id["6"]: Approved(), by_id["3"]: Approved()}
    made.options = {}
    state = batch.state()
    made.begin = lambda run: run.resume(state, decisions, on_result=made.hook)
    return made


@scene
def budgeted(stage: Stage) -> Scene:
    """Budgets that refuse some calls at once and others at their grant, while calls charge, share a run, are merged
    and call others; two runs on the budget of the process.
    """
    tower = stage.tower(pools={"db": 1}, budgets={"process": Budget(cost=9, per="minute"), "batch": Budget(calls=9)})

    @tower.tool(independent=True, pools=["db"], spends={"cost": 1})
    async def pay(n: int, ctx: Context) -> str:
        ctx.charge(tokens=3)
        return await stage.work(f"{n}", 0.2)

    @tower.tool(reads="k", share_identical=True)
    def look(n: int, ctx: Context) -> str:
        ctx.charge(cost=0.5)
        return stage.sync_work(stage.loop, f"{ctx.index}", 0.1)

    @tower.tool(writes="list", merge=lambda sets: {"n": [n for one in sets for n in one["n"]]})
    async def add(n: list[int], ctx: Context) -> str:
        await ctx.execute([Call("pay", {"n": 50 + ctx.index})])
        return await stage.work(f"{ctx.index}", 0.1)

    async def other() -> None:
        async with tower.run(budget=Budget(seconds=0.5)) as run:
            await run.execute([Call("pay", {"n": 100 + n}) for n in range(4)])

    pays = [Call("pay", {"n": n}, str(n)) for n in range(3)]
    adds = [Call("add", {"n": [n]}, str(n)) for n in range(5, 7)]
    last = [Call("pay", {"n": 7}, "7"), Call("look", {"n": 2}, "8", ("7",))]
    calls = [*pays, Call("look", {"n": 1}, "3"), Call("look", {"n": 1}, "4"), *adds, *last]
    return Scene(stage, tower, calls, beside=other, options={"budget": Budget(calls=8, tokens=8)})


# ==================================================================== running one, with something done at a step

Act = Callable[[Scene, int], None]


def cancel_caller(scene: Scene, step: int) -> None:
    """The caller's task is cancelled."""
    assert scene.caller is not None
    scene.caller.cancel("the user went away")


def cancel_run(scene: Scene, step: int) -> None:
    """The run is cancelled; it stays open."""
    assert scene.run is not None
    scene.run.cancel("not wanted any more")


def cancel_call(scene: Scene, step: int) -> None:
    """One call is cancelled, another one at each step."""
    assert scene.run is not None
    scene.run.cancel("this one is not wanted", index=step % len(scene.calls))


def close_run(scene: Scene, step: int) -> None:
    """The run is closed by somebody else while its batch is at work."""
    assert scene.run is not None
    closing.append(asyncio.get_running_loop().create_task(scene.run.aclose()))


closing: list[asyncio.Task[None]] = []


async def play(scene: Scene, act: Act | None, steps: frozenset[int], seen: list[int]) -> tuple[str, list[int]]:
    """Run a scene's batch; do something after certain steps of the loop; say how the caller fared and at which steps
    it was done.
    """
    loop = scene.stage.loop = here()
    closing.clear()
    beside = asyncio.ensure_future(scene.beside()) if scene.beside is not None else None
    if beside is not None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    acted: list[int] = []
    raised = 0

    async def caller(run: Run) -> str:
        nonlocal raised
        try:
            await scene.hand_in(run)
        except asyncio.CancelledError:
            raised += 1
            assert run.last_batch is not None, "the cancel came before the results were sealed"
            raise
        except scene.may_raise as told:
            return type(told).__name__
        return "returned"

    async with scene.tower.run(**scene.options) as run:
        scene.run = run
        task = scene.caller = asyncio.ensure_future(caller(run))
        loop.ticks = 0

        def on_tick(step: int) -> None:
            if act is not None and step in steps and not task.done():
                acted.append(step)
                act(scene, step)

        loop.on_tick = on_tick
        await asyncio.wait([task])
        seen.append(loop.ticks)
        loop.on_tick = None
        scene.ended_at = loop.time()
        fate = "cancelled" if task.cancelled() else task.result()
        assert raised <= 1
        for one in closing:
            await one
        if run.last_batch is not None:
            sound(run.last_batch, scene.calls)
            assert [one.outcome for one in run.last_batch] == [scene.sealed[n].outcome for n in range(len(scene.calls))]
    if beside is not None:
        await beside
    await scene.stage.settled(scene.tower)
    await asyncio.sleep(0)
    return fate, acted


def trial(name: str, act: Act | None, steps: frozenset[int] = frozenset()) -> tuple[int, str, Scene]:
    """One run of a scenario, with everything looked at afterwards. Returns its steps, the caller's fate and the
    scene.
    """
    stage = Stage()
    made = SCENES[name](stage)
    seen: list[int] = []
    what = f"{name}, {act.__name__ if act else 'nothing'} at {sorted(steps)}"
    patched = pytest.MonkeyPatch()
    if name in ("in_slices", "sharing", "merging"):
        patched.setattr(towerman.runner.intake, "SLICE", -1.0)  # every look at the clock finds the slice used up
    try:
        fate, acted = stage.run(play(made, act, steps, seen))
        assert set(made.sealed) == set(range(len(made.calls))) or not made.sealed, what
        if made.sealed:
            for call, result in zip(made.calls, (made.sealed[n] for n in range(len(made.calls))), strict=True):
                name_of_call = str(result.index)
                if not result.started:
                    assert not stage.started[name_of_call], f"{call} was started"
                assert stage.started[name_of_call] <= max(1, result.attempts)
        else:
            assert fate == "cancelled", what
            assert not any(stage.started[str(index)] for index in range(len(made.calls))), what
        if act is cancel_caller and acted:
            # Cancelled before all was sealed: it is told. Afterwards it may have been too late.
            stopped = any(result.code == "cancelled" for result in made.sealed.values())
            assert fate in ("cancelled", *(told.__name__ for told in made.may_raise)) or not stopped, what
        if act is not cancel_caller:
            assert fate != "cancelled", what
        whole_again(made.tower)
        assert not stage.running.total(), what
        books(made)
    except BaseException as failure:
        failure.add_note(f"{what}; the story:\n" + "\n".join(stage.story[-100:]))
        raise
    finally:
        patched.undo()
        made.tower._core.workers.close()
        if made.tower._journal is not None:
            made.tower._journal.close()
    return seen[0], fate, made


def books(made: Scene) -> None:
    """What the journal says of a scene that is over: what started is there with what came of it, and nothing else is;
    nothing is open, nobody waits.
    """
    tower = made.tower
    if tower._journal is None:
        return
    core = tower._core
    waiting = [one.handle for one in tower._journal.deferred_calls().result() if one.state == "queued"]
    assert sorted(waiting) == sorted(
        one.handle for one in made.sealed.values() if one.outcome == "pending" and one.handle is not None
    )
    assert not any(shell._handings for shell in tower._shells._all())
    assert not core.flights and not core.joined and not any(shell._joins for shell in tower._shells._all())
    records = tower._journal.calls(limit=1000).result()
    counts = tower._journal.statistics()
    assert (counts["watched"], counts["later"], counts["given_up"]) == (0, 0, 0)
    assert all(one.state in ("done", "unknown") for one in records), records
    for index, result in made.sealed.items():
        found = next((one for one in records if one.run_id != "other" and one.index == index), None)
        tool = tower._core.tools[result.tool]
        if not result.started and result.shared_with is None:
            assert found is None, f"{result!r} never started, and is written down: {found}"
        elif not tool.effect_free and not result.replayed and result.shared_with is None:
            assert found is not None, f"{result!r} is not written down"
            if result.applied != "unknown":
                assert (found.state, found.applied) == ("done", result.applied), (result, found)


def every_step(name: str, act: Act, *, stride: int = 1, twice: int = 0) -> int:
    """Do it after each step (or each `stride`-th, beginning differently each time); how many trials that made."""
    steps, _, _ = trial(name, None)
    count = 0
    for step in range(1, steps + 3, stride):
        trial(name, act, frozenset({step, step + twice} if twice else {step}))
        count += 1
    return count


SLOW = {"threads", "threads_in_order", "in_slices"}


@pytest.mark.parametrize("name", SCENES)
def test_the_caller_is_cancelled_at_every_step(name: str) -> None:
    """R-60, R-77 to R-83, R-89, S16, P-37, P-38: cancelled between any two steps, the caller gets the cancel once,
    after sealing, and nothing is lost.
    """
    assert every_step(name, cancel_caller, stride=2 if name == "in_slices" else 1) >= 10


@pytest.mark.parametrize("name", SCENES)
def test_the_caller_is_cancelled_twice(name: str) -> None:
    """S16: a second cancel, at once or a little later, changes nothing and is not raised a second time."""
    for twice, stride in ((1, 3), (5, 4)):
        every_step(name, cancel_caller, stride=29 if name in SLOW else stride, twice=twice)


@pytest.mark.parametrize("name", SCENES)
def test_the_run_is_cancelled_at_every_step(name: str) -> None:
    """R-88, R-89, S16: `run.cancel` between any two steps ends the batch, not the caller."""
    every_step(name, cancel_run, stride=23 if name in SLOW else 2)


@pytest.mark.parametrize("name", SCENES)
def test_one_call_is_cancelled_at_every_step(name: str) -> None:
    """R-77, R-78, R-82: one call is cancelled at each step; its siblings are not disturbed."""
    every_step(name, cancel_call, stride=19 if name in SLOW else 1)


@pytest.mark.parametrize("name", SCENES)
def test_the_run_is_closed_at_every_step(name: str) -> None:
    """G12, R-89: closing the run from elsewhere, at any step, ends its batch with a result for every call."""
    every_step(name, close_run, stride=23 if name in SLOW else 3)


@pytest.mark.long
@pytest.mark.parametrize("act", [cancel_caller, cancel_run, cancel_call, close_run], ids=lambda act: act.__name__)
@pytest.mark.parametrize("name", SCENES)
def test_everything_is_cancelled_at_every_step(name: str, act: Act) -> None:
    """R-60, R-77 to R-89: the same without leaving out a step, alone and together with a second time."""
    every_step(name, act)
    for later in (1, 2, 3, 7, 13):
        every_step(name, act, twice=later, stride=2)


@pytest.mark.parametrize("name", SCENES)
def test_a_timeout_around_execute(name: str) -> None:
    """S16, R-80: asyncio.timeout around execute turns its own cancel into TimeoutError, at every instant at which
    something happens.
    """
    _, _, plain = trial(name, None)
    instants = sorted({round(moment, 6) for _, came, went in plain.stage.spans for moment in (came, went)})
    for instant in [0.0, *(one + shift for one in instants for shift in (0.0, 0.01))]:
        stage = Stage()
        made = SCENES[name](stage)

        async def main(made: Scene = made, instant: float = instant) -> None:
            made.stage.loop = here()
            beside = asyncio.ensure_future(made.beside()) if made.beside is not None else None
            async with made.tower.run(**made.options) as run:
                try:
                    async with asyncio.timeout(instant):
                        await made.hand_in(run)
                except (TimeoutError, *made.may_raise):
                    pass
                task = asyncio.current_task()
                assert task is not None
                assert not task.cancelling(), "a cancel is left on the caller"
                if made.sealed:
                    assert run.last_batch is not None
                    sound(run.last_batch, made.calls)
            if beside is not None:
                await beside
            await made.stage.settled(made.tower)
            await asyncio.sleep(0)

        stage.run(main())
        whole_again(made.tower)
        made.tower._core.workers.close()


@pytest.mark.parametrize("way", ["wait_for", "task group"])
def test_other_ways_to_give_up(stage: Stage, way: str) -> None:
    """S16, R-80: wait_for, and a failing sibling in a task group: the batch is sealed before they are told."""
    tower = stage.tower(grace=1.0)

    @tower.tool(independent=True)
    async def cleans_up() -> str:
        with stage.on("work"):
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0.5)
        return "never"

    async def failing() -> None:
        await asyncio.sleep(1)
        raise LookupError

    async def group_of(*coroutines: Coroutine[Any, Any, object]) -> None:
        async with asyncio.TaskGroup() as group:
            for one in coroutines:
                group.create_task(one)

    async def main() -> None:
        async with tower.run() as run:
            calls = [Call("cleans_up", {})] * 2
            match way:
                case "wait_for":
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(run.execute(calls), 1)
                case "task group":
                    with pytest.raises(ExceptionGroup) as told:
                        await group_of(run.execute(calls), failing())
                    assert [type(one) for one in told.value.exceptions] == [LookupError]
            assert here().time() == pytest.approx(1.5)
            assert run.last_batch is not None
            assert [one.code for one in run.last_batch] == ["cancelled", "cancelled"]
            assert not stage.running.total()

    stage.run(main())


# ==================================================================== anyio


@contextmanager
def caught_scope(kind: str, seconds: float) -> Iterator[Any]:
    """anyio's ways to give up."""
    if kind == "move_on_after":
        with anyio.move_on_after(seconds) as scope:
            yield scope
    elif kind == "fail_after":
        try:
            with anyio.fail_after(seconds) as scope:
                yield scope
        except TimeoutError:
            pass
    else:
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(seconds, scope.cancel, "enough of this")
            yield scope


@pytest.mark.parametrize("kind", ["move_on_after", "fail_after", "cancel"])
@pytest.mark.parametrize("name", SCENES)
def test_anyio_scopes_around_execute(name: str, kind: str) -> None:
    """DESIGN decision 8, S16: under an anyio scope every wait is cancelled again and again; sealing is not disturbed
    and nothing is lost.
    """
    for instant in (0.0, 0.005, 0.1, 0.25):
        stage = Stage()
        made = SCENES[name](stage)

        async def main(made: Scene = made, instant: float = instant) -> None:
            made.stage.loop = here()
            beside = asyncio.ensure_future(made.beside()) if made.beside is not None else None
            with caught_scope(kind, instant) as scope:
                async with made.tower.run(**made.options) as run:
                    made.run = run
                    try:
                        await made.hand_in(run)
                    except made.may_raise:
                        pass
            assert made.run is not None
            if made.sealed:
                assert made.run.last_batch is not None
                sound(made.run.last_batch, made.calls)
            for result in made.sealed.values():
                assert "scope" not in result.message, "anyio's inner words reach the model"
            await asyncio.sleep(instant)  # of the scope's own timer nothing is left
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            assert scope is not None
            if beside is not None:
                await beside
            await made.stage.settled(made.tower)
            await asyncio.sleep(0)

        stage.run(main(), step=0.001)
        whole_again(made.tower)
        made.tower._core.workers.close()


def test_the_reason_given_to_an_anyio_scope_is_told(stage: Stage) -> None:
    """R-87, R-115: of an anyio cancel the reason reaches results; addresses, tasks and paths do not, so the bytes are
    the same each time.
    """

    def once() -> str:
        tower = stage.tower()

        @tower.tool(independent=True)
        async def work() -> str:
            return await stage.work("work", 1)

        async def main() -> str:
            async with tower.run() as run:
                with anyio.CancelScope() as scope:
                    asyncio.get_running_loop().call_later(0.5, scope.cancel, "enough of this")
                    await run.execute([Call("work", {})])
                assert run.last_batch is not None
                return run.last_batch[0].content

        return stage.run(main(), step=0.001)

    first, second = once(), once()
    assert first == second
    assert "enough of this" in first
    assert "0x" not in first
    assert ".py" not in first


# ==================================================================== the windows, one by one


def only(stage: Stage, **options: Any) -> Tower:
    """A tower with one place and a tool that works as long as it is told."""
    tower = stage.tower(max_concurrency=1, **options)

    @tower.tool(independent=True)
    async def work(n: str, seconds: float = 1.0) -> str:
        return await stage.work(n, seconds)

    return tower


def test_r52_a_caller_that_is_cancelled_already_starts_nothing(stage: Stage) -> None:
    """R-52: no queue entry, no slot, no thread, the reason kept: for a coroutine and for a sync handler."""
    tower = stage.tower()
    touched = threading.Event()

    @tower.tool(independent=True)
    def in_thread() -> None:
        touched.set()

    @tower.tool(independent=True)
    async def on_loop() -> None:
        touched.set()

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.current_task()
            assert task is not None
            task.cancel("changed my mind")
            with pytest.raises(asyncio.CancelledError):
                await run.execute([Call("in_thread", {}), Call("on_loop", {})])
            task.uncancel()
            assert run.last_batch is not None
            assert [one.code for one in run.last_batch] == ["cancelled", "cancelled"]
            assert not any(one.started for one in run.last_batch)
            assert "changed my mind" in run.last_batch[0].message
        assert tower.statistics().pools["process"].peak == 0

    stage.run(main())
    assert not touched.is_set()


def test_a_task_that_is_cleaning_up_can_still_run_a_batch(stage: Stage) -> None:
    """S16: who was cancelled before and caught it is not "cancelled already": what it runs while it cleans up is
    run.
    """
    tower = only(stage)

    async def caller(run: Run) -> str:
        try:
            await asyncio.sleep(10)
        finally:
            done = await run.execute([Call("work", {"n": "clean up"})])
            assert done.ok
        return "never"

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(caller(run))
            await asyncio.sleep(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    stage.run(main())
    assert stage.started["clean up"] == 1


def test_r77_r78_a_queued_call_that_is_cancelled_never_starts(stage: Stage) -> None:
    """R-77, R-78, R-79: it leaves the queue at once, the count does not change, the next one keeps its place, and it
    never starts.
    """
    tower = only(stage)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two, tower.run() as three:
            first = asyncio.ensure_future(one.execute([Call("work", {"n": "first"})]))
            await asyncio.sleep(0.1)
            second = asyncio.ensure_future(two.execute([Call("work", {"n": "second"})]))
            await asyncio.sleep(0.1)
            third = asyncio.ensure_future(three.execute([Call("work", {"n": "third"})]))
            await asyncio.sleep(0.1)
            assert tower.statistics().waiting == 2
            held = tower.statistics().pools["process"].held
            second.cancel("not needed")
            with pytest.raises(asyncio.CancelledError):
                await second
            assert tower.statistics().waiting == 1
            assert tower.statistics().pools["process"].held == held == 1
            assert two.last_batch is not None
            told = two.last_batch[0]
            assert (told.outcome, told.code, told.started) == ("cancelled", "cancelled", False)
            assert told.waited == pytest.approx(0.2)
            assert "not needed" in told.message
            assert (await first).ok
            assert (await third).ok
            assert third.result()[0].waited == pytest.approx(0.8)

    stage.run(main())
    assert stage.started == {"first": 1, "third": 1}


def test_a_queued_call_that_alone_is_cancelled_says_how_long_it_waited(stage: Stage) -> None:
    """R-73, R-87, R-117: cancel of one queued call tells the wait, what it waited for, and the reason."""
    tower = only(stage)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("work", {"n": "first"})]))
            await asyncio.sleep(0.1)
            second = asyncio.ensure_future(two.execute([Call("work", {"n": "second"}, "id-2")]))
            await asyncio.sleep(0.5)
            two.cancel("not this one", call_id="id-2")
            told = (await second)[0]
            assert (told.code, told.started, told.waited_for) == ("cancelled", False, ("pool process",))
            assert told.waited == pytest.approx(0.5)
            assert "not this one" in told.message
            await first

    stage.run(main())


@pytest.mark.parametrize("order", ["release then cancel", "cancel then release"])
def test_p37_release_and_cancel_meet_in_one_step(stage: Stage, order: str) -> None:
    """P-37, R-83: limit 1; the holder ends and the next one is cancelled in the same step; the third always runs,
    nothing is lost. All distances.
    """
    for distance in range(12):
        tower = only(stage)

        async def main(tower: Tower = tower, distance: int = distance) -> None:
            gate = asyncio.Event()

            @tower.tool(independent=True)
            async def holder() -> str:
                await gate.wait()
                return "held"

            async with tower.run() as one, tower.run() as two, tower.run() as three:
                first = asyncio.ensure_future(one.execute([Call("holder", {})]))
                await asyncio.sleep(0.1)
                second = asyncio.ensure_future(two.execute([Call("work", {"n": "second"})]))
                await asyncio.sleep(0.1)
                third = asyncio.ensure_future(three.execute([Call("work", {"n": "third"})]))
                await asyncio.sleep(0.1)
                if order == "release then cancel":
                    gate.set()
                    for _ in range(distance):
                        await asyncio.sleep(0)
                    second.cancel()
                else:
                    second.cancel()
                    for _ in range(distance):
                        await asyncio.sleep(0)
                    gate.set()
                results = await asyncio.gather(first, second, third, return_exceptions=True)
                assert results[0][0].ok  # type: ignore[index]
                assert isinstance(results[1], asyncio.CancelledError)
                assert results[2][0].ok  # type: ignore[index]
                assert two.last_batch is not None
                assert two.last_batch[0].outcome == "cancelled"

        stage.run(main())
        whole_again(tower)


def test_p38_no_permit_is_lost_in_500_rounds(stage: Stage) -> None:
    """P-38, R-48: limit 2; 500 rounds of five calls of which two are cancelled at random steps; then 50 plain calls
    run with a peak of two.
    """
    tower = stage.tower(max_concurrency=2)
    pick = random.Random(38)

    @tower.tool(independent=True)
    async def work(n: int) -> str:
        with stage.on("work"):
            for _ in range(n % 3):
                await asyncio.sleep(0)
        return "done"

    async def main() -> None:
        for _ in range(500):
            runs = [tower.run() for _ in range(5)]
            tasks = [asyncio.ensure_future(run.execute([Call("work", {"n": n})])) for n, run in enumerate(runs)]
            for task in pick.sample(tasks, 2):
                for _ in range(pick.randint(0, 3)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for run in runs:
                await run.aclose()
            assert tower.statistics().pools["process"].held == 0
        stage.peak = 0
        async with tower.run(max_concurrency=50) as run:
            done = await run.execute([Call("work", {"n": 2})] * 25)
            assert done.ok
            assert (await run.execute([Call("work", {"n": 2})] * 25)).ok
        assert stage.peak == 2

    stage.run(main())


def test_a_call_is_cancelled_between_its_grant_and_its_first_line(stage: Stage) -> None:
    """R-83, G6: granted, its task not yet stepped: it never starts, says so, and its place goes to the next one in
    the same step.
    """
    tower = only(stage)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            first = asyncio.ensure_future(one.execute([Call("work", {"n": "first"})]))
            await asyncio.sleep(0)  # execute has run; the handler's task has not
            assert tower.statistics().running == 1
            second = asyncio.ensure_future(two.execute([Call("work", {"n": "second"})]))
            one.cancel("changed our minds")
            done = await first
            assert (done[0].code, done[0].started, done[0].applied) == ("cancelled", False, "no")
            assert (await second).ok

    stage.run(main())
    assert stage.started == {"second": 1}


class HeldTicket:
    """A thread's ticket that the test holds back, before it is taken and after."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.before, self.taken, self.after = threading.Event(), threading.Event(), threading.Event()

    def take(self) -> bool:
        """On the thread."""
        assert self.before.wait(30)
        got = self.ticket.take()
        self.taken.set()
        assert self.after.wait(30)
        return got


class HeldWorkers(CountedWorkers):
    """Threads that take their calls when the test lets them."""

    __slots__ = ("held",)

    def submit(self, port: Any, job: Job, ticket: Any, context: Any, function: Callable[[], object]) -> None:
        """As usual, held."""
        self.held = HeldTicket(ticket)
        super().submit(port, job, self.held, context, function)


@pytest.mark.parametrize("window", ["before its thread takes it", "before its first line"])
def test_a_thread_job_is_cancelled(stage: Stage, window: str) -> None:
    """R-78, R-83, R-84: a sync call given up before its thread came to it is skipped there; where the thread was
    first, it is an orphan. Never both.
    """
    tower = stage.tower()
    workers = tower._core.workers = HeldWorkers("towerman-worker")
    ran = threading.Event()

    @tower.tool(independent=True)
    def work() -> str:
        ran.set()
        return "late"

    async def main() -> None:
        await asyncio.sleep(5)
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("work", {})]))
            await asyncio.sleep(0)
            held = workers.held
            if window == "before its first line":
                held.before.set()
                assert held.taken.wait(30)
            run.cancel("at once")
            done = await task
            assert done[0].code == "cancelled"
            assert done[0].ran == 0
            assert done[0].started == done[0].still_running == (window == "before its first line")
            held.before.set()
            held.after.set()
            await stage.settled(tower)
        assert tower.statistics().late_results == int(done[0].started)
        assert ran.is_set() == done[0].started

    stage.run(main())


def test_finished_and_not_yet_handed_back(stage: Stage) -> None:
    """R-82: a thread has ended and its loop does not know yet when the call is cancelled: one result, one release,
    the value counted as late.
    """
    tower = stage.tower(max_concurrency=1)

    @tower.tool(independent=True)
    def work() -> str:
        return "done"

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("work", {})]))
            await asyncio.sleep(0)
            workers = tower._core.workers
            until(lambda: workers.statistics()["idle"])  # the thread has ended its work; the loop has not had a turn
            run.cancel("too late")
            done = await task
            assert done[0].outcome in ("ok", "cancelled")
            await stage.settled(tower)
            assert tower.statistics().late_results == (done[0].outcome == "cancelled")

    stage.run(main())


def test_cancelling_what_is_sealed_changes_nothing(stage: Stage) -> None:
    """G1: the first outcome stands: cancel of a sealed call, of a done batch and of a closed run is nothing."""
    tower = only(stage)

    async def main() -> None:
        async with tower.run(max_concurrency=1) as run:
            task = asyncio.ensure_future(run.execute([Call("work", {"n": "1"}), Call("work", {"n": "2"})]))
            await asyncio.sleep(1.5)
            run.cancel("the first", index=0)
            done = await task
            assert done.ok
            run.cancel("all")
            run.cancel("a call", index=0)
            run.cancel("nobody", call_id="nobody")
        run.cancel("closed")
        await run.aclose()

    stage.run(main())


def test_a_call_held_behind_its_siblings_is_cancelled(stage: Stage) -> None:
    """R-78, S1: cancelled while it waits in the plan: it never starts, and what comes behind it still waits for what
    it waited for.
    """
    tower = stage.tower()

    @tower.tool(writes="k")
    async def write(n: str) -> str:
        return await stage.work(n, 1.0)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("write", {"n": str(n)}) for n in range(4)]))
            await asyncio.sleep(0.5)
            run.cancel("not this", index=1)
            done = await task
            assert [one.outcome for one in done] == ["ok", "cancelled", "ok", "ok"]
            assert not done[1].started

    stage.run(main())
    assert [name for name, _, _ in stage.spans] == ["0", "2", "3"]
    assert [came for _, came, _ in stage.spans] == [0.0, 1.0, 2.0]


def test_the_first_reason_stands_and_grace_is_not_prolonged(stage: Stage) -> None:
    """G12, S16: a call whose time is over is told to stop; cancelling it afterwards changes neither its code nor
    when grace ends.
    """
    tower = stage.tower(timeout=1.0, grace=1.0)

    @tower.tool(independent=True)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 5)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("deaf", {})]))
            await asyncio.sleep(1.7)
            run.cancel("too late to matter", index=0)
            run.cancel("too late to matter")
            done = await task
            assert here().time() == pytest.approx(2.0)
            assert (done[0].code, done[0].still_running) == ("handler_timeout", True)
        await stage.settled(tower)

    stage.run(main())


def test_the_first_cancel_of_a_caller_is_the_one_that_is_raised(stage: Stage) -> None:
    """S16, R-87: cancelled again while the batch is being sealed: the first cancel's words reach the results and the
    caller.
    """
    tower = stage.tower(grace=1.0)

    @tower.tool(independent=True)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 5)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("deaf", {})]))
            await asyncio.sleep(1)
            task.cancel("the first")
            await asyncio.sleep(0.5)
            task.cancel("the second")
            with pytest.raises(asyncio.CancelledError, match="the first"):
                await task
            assert run.last_batch is not None
            assert "the first" in run.last_batch[0].message
        await stage.settled(tower)

    stage.run(main())


def test_r88_cancelling_one_batch_does_not_disturb_another_of_its_run(stage: Stage) -> None:
    """R-88: of two batches of one run that wait for the same pool, one is given up: the other keeps its place and
    runs.
    """
    tower = only(stage)

    async def main() -> None:
        async with tower.run() as other, tower.run() as run:
            holding = asyncio.ensure_future(other.execute([Call("work", {"n": "holder"})]))
            await asyncio.sleep(0.1)
            batches = [
                asyncio.ensure_future(run.execute([Call("work", {"n": f"{name}{n}"}) for n in range(2)]))
                for name in "ab"
            ]
            await asyncio.sleep(0.1)
            batches[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await batches[0]
            assert (await batches[1]).ok
            assert (await holding).ok

    stage.run(main())
    assert stage.started == {"holder": 1, "b0": 1, "b1": 1}


# ==================================================================== what cancel means


def test_p01_a_cancelled_run_answers_every_call(stage: Stage) -> None:
    """P-01, R-89: three calls of 5 s on two places, cancelled at 0.1 s: three results in order, started and not
    started told apart, provider messages whole.
    """
    tower = stage.tower(run_concurrency=2)

    @tower.tool(independent=True)
    async def slow(s: int) -> str:
        return await stage.work("slow", s)

    async def main() -> None:
        async with tower.run() as run:
            calls = [
                {"id": f"c{n}", "type": "function", "function": {"name": "slow", "arguments": '{"s": 5}'}}
                for n in range(3)
            ]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            task = asyncio.ensure_future(run.execute(message))
            await asyncio.sleep(0.1)
            run.cancel("the user pressed stop")
            done = await task
            assert here().time() == pytest.approx(0.1)
            assert [(one.outcome, one.started, one.applied) for one in done] == [
                ("cancelled", True, "unknown"),
                ("cancelled", True, "unknown"),
                ("cancelled", False, "no"),
            ]
            turn = done.turn()
            assert [one["tool_call_id"] for one in turn[1:]] == ["c0", "c1", "c2"]
            assert all("the user pressed stop" in str(one["content"]) for one in turn[1:])

    stage.run(main())


def test_p02_a_handlers_own_cancelled_error_is_its_result(stage: Stage) -> None:
    """P-02, R-109: a CancelledError of a handler's own making is that call's error; the sibling and the caller are
    untouched.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def inner_cancel() -> None:
        inner = asyncio.ensure_future(asyncio.sleep(10))
        inner.cancel()
        await inner

    @tower.tool(independent=True)
    async def ok() -> str:
        return await stage.work("ok", 1)

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("inner_cancel", {}), Call("ok", {})])
            assert [(one.outcome, one.code) for one in done] == [("error", "handler_cancelled"), ("ok", None)]
            assert done[0].applied == "unknown"
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()

    stage.run(main())


def test_p02_a_real_cancel_reaches_the_caller_after_sealing(stage: Stage) -> None:
    """P-02, S16: the second half: cancelled for real at 50 ms, the caller gets CancelledError after both results are
    sealed, and the reason with it.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def slow() -> str:
        return await stage.work("slow", 1)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("slow", {}), Call("slow", {})]))
            await asyncio.sleep(0.05)
            task.cancel("why not")
            with pytest.raises(asyncio.CancelledError, match="why not"):
                await task
            assert run.last_batch is not None
            assert [one.code for one in run.last_batch] == ["cancelled"] * 2
            assert all("why not" in one.message for one in run.last_batch)

    stage.run(main())


def test_a_sibling_in_a_shared_task_is_not_cancelled_by_a_handler(stage: Stage) -> None:
    """P-02, P-25: with own_task=False a handler that cancels its own task cancels nobody else."""
    tower = stage.tower(run_concurrency=1)

    @tower.tool(independent=True, own_task=False)
    async def selfish() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "cancelled my task"

    @tower.tool(independent=True, own_task=False)
    async def innocent() -> str:
        return await stage.work("innocent", 1)

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("selfish", {}), Call("innocent", {}), Call("innocent", {})])
            assert [one.outcome for one in done] == ["ok", "ok", "ok"]

    stage.run(main())


def test_p83_a_handler_that_ignores_cancel(stage: Stage) -> None:
    """P-83, R-84, S2: timeout 0.5 s, grace 0.2 s, work of 2 s: one result at 0.7 s that says the work goes on; the
    late value is dropped, counted, traced.
    """
    events: list[Any] = []
    tower = stage.tower(timeout=0.5, grace=0.2, observers=[events.append])

    @tower.tool(writes="k")
    async def deaf() -> str:
        return await stage.stubborn("deaf", 2)

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("deaf", {})])
            assert here().time() == pytest.approx(0.7)
            told = done[0]
            assert (told.outcome, told.code, told.started, told.applied) == (
                "timed_out",
                "handler_timeout",
                True,
                "unknown",
            )
            assert told.still_running
            assert told.value is None
            seen = tower.statistics()
            assert (seen.orphans, seen.late_results, seen.pools["process"].held) == (1, 0, 1)
            await stage.settled(tower)
            assert tower.statistics().late_results == 1
            assert tower.statistics().pools["process"].held == 0
            assert done[0] is told

    stage.run(main())
    tower.flush()
    kinds = [(event.kind, round(event.time, 6)) for event in events]
    assert ("finished", 0.7) in kinds
    assert ("orphaned", 0.7) in kinds
    assert ("late_result", 2.0) in kinds
    assert [kind for kind, _ in kinds].count("finished") == 1


def test_a_handler_that_swallows_cancel_and_returns_in_time(stage: Stage) -> None:
    """R-85, S2: told to stop, it returns a value within grace: the result says timed out, not "still running", and
    its slot is free.
    """
    tower = stage.tower(timeout=0.5, grace=1.0)

    @tower.tool(independent=True)
    async def swallow() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)
        return "anyway"

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("swallow", {})])
            assert here().time() == pytest.approx(0.7)
            assert (done[0].code, done[0].still_running, done[0].applied) == ("handler_timeout", False, "unknown")

    stage.run(main())


@pytest.mark.parametrize("grace", [0.0, 0.3])
def test_grace_bounds_the_wait_of_a_cancelled_caller(stage: Stage, grace: float) -> None:
    """G12, S16: a caller who gives up waits for grace and no longer; a handler that cleans up in time is waited for."""
    tower = stage.tower(grace=grace)

    @tower.tool(independent=True)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 5)

    @tower.tool(independent=True)
    async def polite() -> str:
        return await stage.work("polite", 5)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("deaf", {}), Call("polite", {})]))
            await asyncio.sleep(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert here().time() == pytest.approx(1 + grace)
            assert run.last_batch is not None
            assert [one.still_running for one in run.last_batch] == [True, False]
        await stage.settled(tower)

    stage.run(main())


def test_r88_cancelling_one_run_does_not_disturb_another(stage: Stage) -> None:
    """R-88: what another run has at work or in the queue goes on as if nothing had happened."""
    tower = stage.tower(max_concurrency=2)

    @tower.tool(independent=True)
    async def work(n: str) -> str:
        return await stage.work(n, 1)

    async def main() -> None:
        async with tower.run() as one, tower.run() as two:
            tasks = [
                asyncio.ensure_future(run.execute([Call("work", {"n": f"{name}{n}"}) for n in range(3)]))
                for name, run in (("a", one), ("b", two))
            ]
            await asyncio.sleep(0.5)
            one.cancel("only this run")
            assert {result.code for result in await tasks[0]} == {"cancelled"}
            assert (await tasks[1]).ok

    stage.run(main())


def test_a_run_can_go_on_after_it_was_cancelled(stage: Stage) -> None:
    """`run.cancel` ends what is at work; the run stays open for the next batch."""
    tower = only(stage)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("work", {"n": "1"})]))
            await asyncio.sleep(0.5)
            run.cancel("this batch only")
            assert not (await task).ok
            assert (await run.execute([Call("work", {"n": "2"})])).ok

    stage.run(main())


def test_r81_nothing_grows_on_a_long_run(stage: Stage) -> None:
    """R-81: 10,000 calls on one run, some of them cancelled, leave no batch, job, timer or entry behind."""
    tower = stage.tower(max_calls_per_batch=100)

    @tower.tool(independent=True, own_task=False)
    async def work(n: int) -> None:
        if n == 7:
            await asyncio.sleep(1)

    async def main() -> None:
        async with tower.run() as run:
            for turn in range(100):
                task = asyncio.ensure_future(run.execute([Call("work", {"n": n}) for n in range(100)]))
                if turn % 10 == 0:
                    await asyncio.sleep(0.5)
                    run.cancel("now and then", index=7)
                await task
            state = run._state
            assert not state.works
            assert len(state.bases) == 1
            assert len(here().timers()) <= 1
            flow = state.flow
            assert not flow.running
            assert not flow.lines
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one).__name__ == "Job"]
        assert len(alive) <= 100, f"{len(alive)} jobs are kept by something"

    stage.run(main())


# ==================================================================== interrupts


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["loop", "thread", "shared"])
def test_interrupts_leave_after_sealing(stage: Stage, error: type[BaseException], where: str) -> None:
    """G1, issue item 4: KeyboardInterrupt and SystemExit of a handler reach the caller, after every call of the batch
    has its result.
    """
    tower = stage.tower(run_concurrency=2)
    kept: list[Run] = []

    async def on_loop() -> None:
        await asyncio.sleep(0.1)
        raise error("stop everything")

    def in_thread() -> None:
        raise error("stop everything")

    if where == "thread":
        tower.add_tool(in_thread, name="stop", independent=True)
    else:
        tower.add_tool(on_loop, name="stop", independent=True, own_task=where == "loop")

    @tower.tool(independent=True)
    async def work(n: str) -> str:
        return await stage.work(n, 1)

    async def main() -> None:
        run = tower.run()
        kept.append(run)
        async with run:
            await run.execute([Call("work", {"n": "0"}), Call("stop", {}), Call("work", {"n": "2"})])

    with pytest.raises(error, match="stop everything"):
        stage.run(main())
    done = kept[0].last_batch
    assert done is not None
    sound(done, [None] * 3)
    assert [one.code for one in done] == ["cancelled", "handler_error", "cancelled"]
    assert [one.started for one in done] == [True, True, False]
    assert "stop everything" not in "".join(one.content + one.message for one in done)


def test_a_late_interrupt_of_an_orphan_is_not_swallowed(stage: Stage) -> None:
    """Issue item 4: an orphan that raises SystemExit while its batch still runs: the batch is sealed and the exit
    leaves.
    """
    tower = stage.tower(grace=0.1, timeout=0.5)
    kept: list[Run] = []

    @tower.tool(independent=True)
    async def leaves() -> None:
        await stage.stubborn("leaves", 1.0)
        raise SystemExit(3)

    @tower.tool(independent=True, timeout=60)
    async def work() -> str:
        return await stage.work("work", 5)

    async def main() -> None:
        run = tower.run()
        kept.append(run)
        async with run:
            await run.execute([Call("leaves", {}), Call("work", {})])

    with pytest.raises(SystemExit):
        stage.run(main())
    done = kept[0].last_batch
    assert done is not None
    assert [one.code for one in done] == ["handler_timeout", "cancelled"]
    assert stage.clock.value == pytest.approx(1.0)


def test_ctrl_c_under_asyncio_run(stage: Stage) -> None:
    """S16: a real SIGINT under asyncio.run cancels the main task: the batch is sealed, then KeyboardInterrupt
    leaves.
    """
    tower = stage.tower(_clock=None)
    kept: list[Run] = []

    @tower.tool(independent=True)
    async def press(key: bool) -> None:
        if key:
            signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    async def main() -> None:
        run = tower.run()
        kept.append(run)
        async with run:
            await run.execute([Call("press", {"key": True}), Call("press", {"key": False})])

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    done = kept[0].last_batch
    assert done is not None
    assert {one.code for one in done} == {"cancelled"}


# ==================================================================== loops that end


def test_asyncio_run_ends_with_work_in_flight(stage: Stage) -> None:
    """G12: main returns while another task still executes: asyncio.run's teardown cancels it, all is sealed, nothing
    is held.
    """
    tower = stage.tower(_clock=None, max_concurrency=2)
    kept: list[Run] = []
    sealed: list[Result] = []

    @tower.tool(independent=True)
    async def forever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        run = tower.run()
        kept.append(run)
        task = asyncio.ensure_future(run.execute([Call("forever", {})] * 4, on_result=sealed.append))
        kept.append(task)  # type: ignore[arg-type]  # or it could be collected
        while tower.statistics().running < 2:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert [one.code for one in sealed] == ["cancelled"] * 4 or sorted(one.index for one in sealed) == [0, 1, 2, 3]
    assert kept[0].last_batch is not None
    asyncio.run(kept[0].aclose())


def test_handler_tasks_are_cancelled_by_somebody_else(stage: Stage) -> None:
    """G1, P-02: somebody cancels every task but the caller's: started handlers answer `handler_cancelled`; one that
    had not begun says so too, in time.
    """
    for turns in (1, 2, 3):
        tower = stage.tower(timeout=5.0, grace=0.5)

        @tower.tool(independent=True)
        async def work(n: str) -> str:
            return await stage.work(n, 1)

        async def main(tower: Tower = tower, turns: int = turns, began_at: float = stage.clock.value) -> None:
            mine = asyncio.current_task()
            async with tower.run() as run:
                task = asyncio.ensure_future(run.execute([Call("work", {"n": "a"}), Call("work", {"n": "b"})]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                for one in asyncio.all_tasks() - {mine, task}:
                    one.cancel()
                done = await task
                sound(done, [None, None])
                began = {name: stage.started[name] for name in "ab"}
                for name, result in zip("ab", done, strict=True):
                    if began[name]:
                        assert (result.code, result.started) == ("handler_cancelled", True)
                    else:
                        assert (result.outcome, result.started, result.applied) == ("cancelled", False, "no")
                assert here().time() - began_at <= 5.5

        stage.run(main())
        stage.started.clear()
        whole_again(tower)


@contextmanager
def expected_complaints() -> Iterator[None]:
    """asyncio rightly complains about tasks of a loop that was closed over them."""
    logger = logging.getLogger("asyncio")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
        gc.collect()
    finally:
        logger.disabled = before


def test_a_loop_is_closed_while_coroutines_work(stage: Stage) -> None:
    """G3, decision 7: a loop closed over running handlers, waiting calls and a held resource: all of it is free for
    the next loop.
    """
    tower = stage.tower(_clock=None, max_concurrency=2, run_concurrency=2)

    @tower.tool(writes="k:{n}")
    async def forever(n: int) -> None:
        await asyncio.Event().wait()

    @tower.tool(writes="k:{n}")
    async def short(n: int) -> str:
        return "done"

    async def main() -> None:
        await tower.run().execute([Call("forever", {"n": n}) for n in range(4)])

    with expected_complaints():
        loop = asyncio.new_event_loop()
        task = loop.create_task(main())
        for _ in range(5):
            loop.call_soon(loop.stop)
            loop.run_forever()
        assert tower.statistics().running == 2
        loop.close()
        del loop, task
        gc.collect()

        async def next_loop() -> None:
            async with tower.run() as run:
                assert (await run.execute([Call("short", {"n": n}) for n in range(4)])).ok

        asyncio.run(next_loop())
    for state in list(tower._runs.values()):
        asyncio.run(Run(tower, state).aclose())


@pytest.mark.parametrize("ended", ["after the loop", "before the loop, untaken", "one before, one after"])
def test_a_loop_is_closed_while_a_thread_works(stage: Stage, ended: str) -> None:
    """G3, G7: the loop of sync calls is closed; their permits come back when their work ends, to whoever comes on
    another loop.
    """
    tower = stage.tower(_clock=None, max_concurrency=2)
    workers = tower._core.workers
    inside = threading.Semaphore(0)
    go_on = [threading.Event(), threading.Event()]

    @tower.tool(independent=True)
    def work(n: int) -> str:
        inside.release()
        assert go_on[n].wait(30)
        return "done"

    async def main() -> None:
        await tower.run().execute([Call("work", {"n": 0}), Call("work", {"n": 1})])

    def end(n: int, idle: int) -> None:
        go_on[n].set()
        until(lambda: workers.statistics()["idle"] >= idle)

    with expected_complaints():
        loop = asyncio.new_event_loop()
        task = loop.create_task(main())
        for _ in range(2):
            loop.call_soon(loop.stop)
            loop.run_forever()
        for _ in range(2):
            assert inside.acquire(timeout=30)
        assert tower.statistics().pools["process"].held == 2
        if ended != "after the loop":  # handed to the loop, which is closed before it takes it
            end(0, 1)
        if ended == "before the loop, untaken":
            end(1, 2)
        loop.close()
        del loop, task
        end(0, 1)
        end(1, 2)

        async def next_loop() -> None:
            inside = asyncio.Barrier(2)

            @tower.tool(independent=True)
            async def both() -> None:
                await inside.wait()

            async with tower.run() as run, asyncio.timeout(20):
                assert (await run.execute([Call("both", {}), Call("both", {})])).ok

        asyncio.run(next_loop())
        for state in list(tower._runs.values()):
            asyncio.run(Run(tower, state).aclose())


def test_grants_for_a_lost_loop_go_to_others(stage: Stage) -> None:
    """Decision 7: thousands of calls of a closed loop stand in the queue; a release passes over all of them to one
    that lives.
    """
    tower = stage.tower(_clock=None, max_concurrency=1, max_queued=10_000, max_calls_per_batch=10_000)
    go_on = threading.Event()
    inside = threading.Event()

    @tower.tool(independent=True)
    def hold() -> None:
        inside.set()
        assert go_on.wait(30)

    @tower.tool(independent=True)
    async def quick() -> str:
        return "done"

    async def holder() -> None:
        async with tower.run() as run:
            await run.execute([Call("hold", {})])

    def on_thread() -> None:
        asyncio.run(holder())

    thread = threading.Thread(target=on_thread)
    thread.start()
    assert inside.wait(30)
    with expected_complaints():
        loop = asyncio.new_event_loop()

        async def lost() -> None:
            await tower.run(max_concurrency=5_000).execute([Call("quick", {})] * 5_000)

        task = loop.create_task(lost())
        while tower.statistics().waiting + tower.statistics().behind < 5_000:
            loop.call_soon(loop.stop)
            loop.run_forever()
        loop.close()
        del loop, task

        async def alive() -> None:
            async with tower.run() as run:
                task = asyncio.ensure_future(run.execute([Call("quick", {})]))
                await asyncio.sleep(0)
                go_on.set()
                async with asyncio.timeout(20):
                    assert (await task).ok

        asyncio.run(alive())
        thread.join(30)
        for state in list(tower._runs.values()):
            asyncio.run(Run(tower, state).aclose())


def test_a_loop_dies_while_another_one_lives(stage: Stage) -> None:
    """Decision 7: a grant to a call of a loop that was closed meanwhile is revoked at once and goes on to a living
    one, with no new loop to notice.
    """
    tower = stage.tower(_clock=None, max_concurrency=1)
    opened = threading.Event()

    @tower.tool(independent=True)
    async def hold() -> str:
        await release.wait()
        return "done"

    @tower.tool(independent=True)
    async def quick() -> str:
        return "done"

    dead = tower.run()

    def other_loop() -> None:
        loop = asyncio.new_event_loop()
        lost = loop.create_task(dead.execute([Call("quick", {})] * 3))
        while tower.statistics().waiting < 1:
            loop.call_soon(loop.stop)
            loop.run_forever()
        lost._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        opened.set()

    release: asyncio.Event

    async def main() -> None:
        nonlocal release
        release = asyncio.Event()
        async with tower.run() as run, tower.run() as later, asyncio.timeout(20):
            holding = asyncio.ensure_future(run.execute([Call("hold", {})]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            threading.Thread(target=other_loop).start()
            assert await asyncio.get_running_loop().run_in_executor(None, opened.wait, 20)
            waiting = asyncio.ensure_future(later.execute([Call("quick", {})]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            release.set()
            assert (await waiting).ok
            assert (await holding).ok

    asyncio.run(main())
    asyncio.run(dead.aclose())


@pytest.mark.parametrize("when", ["before it waits", "while it waits"])
def test_g3_a_loop_that_dies_gives_back_to_those_that_live(stage: Stage, when: str) -> None:
    """G3, decision 7: a loop is closed over a running handler; calls of another loop that the tower has long known get
    its permit, whether they come afterwards or wait already, well before their wait is over.
    """
    tower = stage.tower(_clock=None, max_concurrency=1, max_wait=25)

    @tower.tool(independent=True)
    async def quick() -> str:
        return "done"

    @tower.tool(independent=True)
    async def forever() -> None:
        await asyncio.Event().wait()

    kept: list[Any] = []

    def begin() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        run = tower.run()
        task = loop.create_task(run.execute([Call("forever", {})]))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        kept.extend((run, task))
        for _ in range(5):
            loop.call_soon(loop.stop)
            loop.run_forever()
        assert tower.statistics().running == 1
        return loop

    async def main() -> None:
        async with tower.run() as run, asyncio.timeout(20):
            assert (await run.execute([Call("quick", {})])).ok  # so that this loop is known
            other = await asyncio.to_thread(begin)
            if when == "before it waits":
                other.close()
            waiting = asyncio.ensure_future(run.execute([Call("quick", {})]))
            for _ in range(3):
                await asyncio.sleep(0)
            if when == "while it waits":
                assert not waiting.done()
                other.close()
            assert (await waiting).ok

    with expected_complaints():
        asyncio.run(main())
        asyncio.run(kept[0].aclose())
        kept.clear()


def test_a_caller_is_thrown_away_after_its_loop_was_closed(stage: Stage) -> None:
    """G3, G12: a coroutine of `execute` that somebody drove by hand is closed when its loop is gone: it holds and
    waits for nothing from then on.
    """
    tower = stage.tower(_clock=None, max_concurrency=2)
    run = tower.run()

    @tower.tool(independent=True)
    async def forever() -> None:
        await asyncio.Event().wait()

    with expected_complaints():
        loop = asyncio.new_event_loop()
        coroutine = run.execute([Call("forever", {})] * 5)

        async def begin(driven: Any) -> None:
            driven.send(None)

        loop.run_until_complete(begin(coroutine))
        assert tower.statistics().running == 2
        loop.close()
        coroutine.close()
        seen = tower.statistics()
        assert (seen.running, seen.waiting, seen.behind) == (0, 0, 0)
        asyncio.run(run.aclose())
        del loop, coroutine


def test_closed_loops_are_not_kept(stage: Stage) -> None:
    """R-81, G12: a tower that is used by one asyncio.run after another keeps none of their loops."""
    import weakref

    tower = stage.tower(_clock=None)

    @tower.tool(independent=True)
    async def work() -> str:
        return "done"

    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await tower.execute([Call("work", {})])

    for _ in range(5):
        asyncio.run(main())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1


def test_a_coroutine_that_holds_a_run_is_thrown_away(stage: Stage) -> None:
    """G12: a coroutine inside `async with tower.run()` is closed where no loop runs: the run is closed, nothing is
    raised.
    """
    tower = stage.tower()

    class Forever:
        def __await__(self) -> Any:
            yield

    async def holder() -> None:
        async with tower.run():
            await Forever()

    coroutine = holder()
    coroutine.send(None)
    assert tower.statistics().runs == 1
    coroutine.close()
    assert tower.statistics().runs == 0


def test_a_caller_that_is_thrown_away(stage: Stage) -> None:
    """G12: a coroutine of `execute` that is closed half-way (GeneratorExit) stops its handlers, and holds and waits
    for nothing.
    """
    tower = stage.tower(max_concurrency=2, run_concurrency=2)

    @tower.tool(independent=True)
    async def work(n: str) -> str:
        return await stage.work(n, 100)

    async def main() -> None:
        async with tower.run() as run:
            coroutine = run.execute([Call("work", {"n": str(n)}) for n in range(4)])
            coroutine.send(None)
            await asyncio.sleep(1)
            assert tower.statistics().running == 2
            coroutine.close()
            await asyncio.sleep(1)
            seen = tower.statistics()
            assert (seen.running, seen.waiting, seen.behind) == (0, 0, 0)
        assert here().time() < 10

    stage.run(main())


def test_a_caller_is_thrown_away_while_its_batch_is_prepared(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G12: thrown away between two slices of the preparation: nothing of the batch starts."""
    monkeypatch.setattr(towerman.runner.intake, "SLICE", -1.0)
    tower = stage.tower(max_calls_per_batch=200)

    @tower.tool(independent=True)
    async def work(n: int) -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run() as run:
            coroutine = run.execute([Call("work", {"n": n}) for n in range(200)])
            coroutine.send(None)
            coroutine.close()
            await asyncio.sleep(1)
            assert tower.statistics().outcomes["cancelled"] == 200

    stage.run(main())
    assert not stage.started


def test_what_is_thrown_away_while_the_lock_is_held_is_found_later(stage: Stage) -> None:
    """G3: the collector may throw a coroutine away in the middle of a decision: it waits for no lock, and the next
    one cleans up.
    """
    tower = stage.tower(_clock=None, max_concurrency=1)
    run = tower.run()

    @tower.tool(independent=True)
    async def forever() -> None:
        await asyncio.Event().wait()

    @tower.tool(independent=True)
    async def quick() -> str:
        return "done"

    with expected_complaints():
        loop = asyncio.new_event_loop()
        task = loop.create_task(run.execute([Call("forever", {})]))
        for _ in range(4):
            loop.call_soon(loop.stop)
            loop.run_forever()
        (work,) = run._state.works
        loop.close()
        with tower._core.lock:
            work.shell._stray(work)  # type: ignore[attr-defined]
            assert tower._core.gate.statistics()["running"] == 1
        tower._shells._shells.clear()  # nobody else knows of that loop
        del loop, task, work

    async def alive() -> None:
        async with tower.run() as run, asyncio.timeout(20):
            assert (await run.execute([Call("quick", {})])).ok

    asyncio.run(alive())
    asyncio.run(run.aclose())


def test_a_loop_is_closed_over_an_orphan(stage: Stage) -> None:
    """G3, R-84: work that went on after its result, on a loop that is closed over it: it is no orphan any more, and
    holds nothing.
    """
    tower = stage.tower(_clock=None, max_concurrency=2, timeout=0.01, grace=0.0)

    @tower.tool(independent=True)
    async def deaf() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

    @tower.tool(independent=True)
    async def other() -> str:
        await asyncio.Event().wait()
        return "never"

    with expected_complaints():
        loop = asyncio.new_event_loop()
        run = tower.run(max_concurrency=1)
        assert loop.run_until_complete(run.execute([Call("deaf", {})]))[0].still_running
        task = loop.create_task(run.execute([Call("other", {}), Call("other", {})]))
        for _ in range(3):
            loop.call_soon(loop.stop)
            loop.run_forever()
        assert (tower.statistics().orphans, tower.statistics().runs) == (1, 1)

        async def next_loop() -> None:
            await run.aclose()

        loop.close()
        del loop, task
        asyncio.run(next_loop())
        gc.collect()
    assert tower.statistics().orphans == 0
    assert not tower._core.gate._flows


# ==================================================================== closing


def test_leaving_a_run_cancels_what_is_at_work(stage: Stage) -> None:
    """G12: `async with` ends: what is at work is cancelled, waited for, and every call has its result; then the run
    takes nothing new.
    """
    tower = only(stage)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("work", {"n": "1"}), Call("work", {"n": "2"})]))
            await asyncio.sleep(0.5)
        assert here().time() == pytest.approx(0.5)
        done = await task
        assert {one.code for one in done} == {"cancelled"}
        after = await run.execute([Call("work", {"n": "3"})])
        assert [(one.code, one.started) for one in after] == [("run_closed", False)]

    stage.run(main())
    assert stage.started == {"1": 1}


def test_closing_a_run_is_cancelled(stage: Stage) -> None:
    """S16: whoever closes a run is cancelled meanwhile: the run is closed all the same, then the cancel goes on."""
    tower = stage.tower(grace=1.0)

    @tower.tool(independent=True)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 3)

    async def main() -> None:
        run = tower.run()
        task = asyncio.ensure_future(run.execute([Call("deaf", {})]))
        await asyncio.sleep(0.5)
        closer = asyncio.ensure_future(run.aclose())
        await asyncio.sleep(0.2)
        closer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closer
        await task
        assert tower.statistics().runs == 0
        await stage.settled(tower)

    stage.run(main())


def test_closing_the_tower_ends_every_run(stage: Stage) -> None:
    """G12: `aclose` of the tower cancels what every run has at work; later batches are told that it is closed."""
    tower = only(stage)

    async def main() -> None:
        one, two = tower.run(), tower.run()
        tasks = [asyncio.ensure_future(run.execute([Call("work", {"n": "n"})])) for run in (one, two)]
        await asyncio.sleep(0.5)
        await tower.aclose()
        for task in tasks:
            assert [result.code for result in await task] == ["cancelled"]
        assert tower.statistics().runs == 0
        async with tower.run() as three:
            done = await three.execute([Call("work", {"n": "n"})])
            assert [result.code for result in done] == ["run_closed"]

    stage.run(main())
    tower._closed = False  # so that the look afterwards can ask for its capacity


# ==================================================================== what hangs on a handler


def alive_in_group(group: int) -> list[str]:
    """Processes of a group that are at work; what only waits for its parent to look is not."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = place.read_text().rpartition(")")
        except OSError:
            continue
        state, _, of_group = rest.split()[:3]
        if int(of_group) == group and state != "Z":
            found.append(name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_p29_a_cancelled_shell_command_leaves_no_process(stage: Stage) -> None:
    """P-29: the handler's clean-up is awaited within grace: the process group is gone, the result says cancelled
    after it had started.
    """
    tower = stage.tower(_clock=None)
    pids: list[int] = []

    @tower.tool(sequential=True)
    async def sh() -> None:
        process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60 & wait", start_new_session=True)
        pids.append(process.pid)
        try:
            started.set()
            await process.wait()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def main() -> None:
        global started
        started = asyncio.Event()
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("sh", {})]))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert run.last_batch is not None
            told = run.last_batch[0]
            assert (told.outcome, told.started, told.still_running) == ("cancelled", True, False)
        until(lambda: not alive_in_group(pids[0]))  # killed, and perhaps not yet dead

    asyncio.run(main())


started: asyncio.Event


def test_a_hook_cancels_the_run(stage: Stage) -> None:
    """G1, G6: `run.cancel` out of an on_result hook, between a grant and the first line of the next call: what is
    sealed never starts.
    """
    for own_task in (True, False):
        tower = stage.tower(run_concurrency=1)

        @tower.tool(independent=True, own_task=own_task)
        async def work(n: str) -> str:
            with stage.on(n):
                if n == "0":
                    await asyncio.sleep(0.1)
            return "done"

        @tower.tool(independent=True, own_task=own_task)
        async def fail() -> None:
            raise ToolError("no")

        async def main(tower: Tower = tower) -> None:
            async with tower.run() as run:
                # Call 1 fails; sealing 2, which needs it, happens after 3 was granted: there the hook cancels.
                def hook(result: Result) -> None:
                    if result.code == "dependency_failed":
                        run.cancel("seen enough")

                calls = [
                    Call("work", {"n": "0"}, "0"),
                    Call("fail", {}, "1"),
                    Call("work", {"n": "2"}, "2", ["1"]),
                    Call("work", {"n": "3"}, "3"),
                    Call("work", {"n": "4"}, "4"),
                ]
                done = await run.execute(calls, on_result=hook)
                sound(done, calls)
                for result in done:
                    assert stage.started[result.call_id] == (result.started and result.tool == "work"), result

        stage.started.clear()
        stage.run(main())
        whole_again(tower)


def test_a_hook_cancels_a_call_that_shares_a_task(stage: Stage) -> None:
    """G1, G6: the next call of a shared task is granted, then cancelled by a hook before its first line: it never
    starts.
    """
    tower = stage.tower(run_concurrency=1)

    @tower.tool(independent=True, own_task=False)
    async def work(n: str) -> str:
        with stage.on(n):
            return "done"

    async def main() -> None:
        async with tower.run() as run:

            def hook(result: Result) -> None:
                if result.index == 1:
                    run.cancel("not the next one", index=2)
                    run.cancel("nor the last one", index=4)

            calls = [Call("work", {"n": str(n)}) for n in range(5)]
            done = await run.execute(calls, on_result=hook)
            assert [one.outcome for one in done] == ["ok", "ok", "cancelled", "ok", "cancelled"]

    stage.run(main())
    assert sorted(stage.started) == ["0", "1", "3"]


def test_a_hook_cancels_between_two_grants_of_a_sliced_batch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G6, S16: in one step a call is started, one is refused, whose hook cancels the run, and two are granted: these
    never start.
    """
    monkeypatch.setattr(towerman.runner.intake, "SLICE", -1.0)  # so that sealing the rest takes several turns
    tower = stage.tower(pools={"db": 1}, max_calls_per_batch=50)

    @tower.tool(independent=True)
    async def work(n: int) -> str:
        return await stage.work(f"{n}", 1)

    @tower.tool(independent=True, pools=["db"], when_busy="reject")
    async def query(n: int) -> str:
        return await stage.work(f"{n}", 5)

    async def main() -> None:
        async with tower.run() as other, tower.run(max_concurrency=50) as run:
            holding = asyncio.ensure_future(other.execute([Call("query", {"n": 100})]))
            await asyncio.sleep(0.1)

            def hook(result: Result) -> None:
                if result.code == "concurrency_limit":
                    run.cancel("seen enough")

            calls = [Call("query" if n == 1 else "work", {"n": n}) for n in range(20)]
            done = await run.execute(calls, on_result=hook)
            sound(done, calls)
            assert [one.code for one in done] == ["cancelled", "concurrency_limit", *["cancelled"] * 18]
            assert (await holding).ok

    stage.run(main())
    assert stage.started == {"100": 1}


def test_another_runs_hook_cancels_the_next_call_of_a_shared_task(stage: Stage) -> None:
    """G1, G6: in one step the next call of a shared task is granted and another run's waiter is refused, whose hook
    cancels that call: it never starts.
    """
    tower = stage.tower(max_concurrency=3)
    seen: list[str] = []

    @tower.tool(independent=True, own_task=False, weight=2)
    async def first() -> str:
        # Until the very turn in which the other run's waiter is due, ahead of the timer that would tell it.
        while stage.clock.value < due:
            await asyncio.sleep(0)
        return "done"

    @tower.tool(independent=True, own_task=False)
    async def second() -> str:
        seen.append("started")
        return "done"

    @tower.tool(independent=True)
    async def hold() -> str:
        return await stage.work("hold", 2)

    @tower.tool(independent=True, max_wait=0.5)
    async def impatient() -> str:
        return await stage.work("impatient", 1)

    due = float("inf")

    async def main() -> None:
        nonlocal due
        async with tower.run() as holder, tower.run(priority=1) as run, tower.run() as other:
            holding = asyncio.ensure_future(holder.execute([Call("hold", {})]))
            batch = asyncio.ensure_future(run.execute([Call("first", {}), Call("second", {})]))
            await asyncio.sleep(0.1)

            def hook(result: Result) -> None:
                run.cancel("seen enough")

            waiting = asyncio.ensure_future(other.execute([Call("impatient", {})], on_result=hook))
            while tower.statistics().waiting < 2:
                await asyncio.sleep(0)
            due = gate_of(tower).wake_at
            assert [one.code for one in await waiting] == ["wait_timeout"]
            done = await batch
            assert [(one.code, one.started) for one in done] == [(None, True), ("cancelled", False)]
            await holding

    stage.run(main(), step=0.001)
    assert seen == []
