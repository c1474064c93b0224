"""Deferring (R-74, R-123, S3, S14): calls that cannot start at once go into a durable queue, and workers run them."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from test_journal_store import OK, Wall, dead, deferred, rows

from towerman import (
    Approved,
    BatchResult,
    Breaker,
    Budget,
    Call,
    Context,
    Event,
    Journal,
    PolicyError,
    Rate,
    Result,
    Retry,
    Tower,
    Worker,
    read_result,
)  # fmt: skip
from towerman.journal.writer import Writer
from towerman.records import Answer, Deferred, QueueFull, packed, unpacked
from towerman.runner import deferring
from towerman.runner import worker as worker_room

CANARY = "canary-8c1f"


class Desk:
    """A tower with a pool of one place, a tool that holds it, and tools that are deferred for it."""

    def __init__(self, journal: Any, **options: Any) -> None:
        self.did: list[str] = []
        self.door = asyncio.Event()
        self.inside = asyncio.Event()
        self.events: list[Event] = []
        tower = self.tower = Tower(journal=journal, pools={"crm": 1}, **options)

        @tower.tool(independent=True, read_only=True, pools=["crm"])
        async def hold() -> str:
            self.inside.set()
            await self.door.wait()
            return "held"

        @tower.tool(writes="box:{box}", pools=["crm"], idempotent=False, when_busy="defer")
        async def pack(box: str, ctx: Context, fail: bool = False) -> str:
            self.did.append(f"pack {box}")
            if fail:
                raise ValueError(box)
            return f"packed {box} {ctx.idempotency_key is not None}"

        @tower.tool(writes="box:{box}", pools=["crm"], idempotent=True, when_busy="defer")
        async def label(box: str) -> str:
            self.did.append(f"label {box}")
            return f"labelled {box}"

        @tower.tool(reads="box:{box}")
        async def look(box: str) -> str:
            self.did.append(f"look {box}")
            return f"looked {box}"

        @tower.tool(independent=True, read_only=True)
        async def chat() -> str:
            self.did.append("chat")
            return "chatted"

    async def busy(
        self,
        *calls: Call,
        run_id: str | None = "run",
        hook: Callable[[], Awaitable[None]] | None = None,
        **options: Any,
    ) -> BatchResult:
        """Answer a batch while the pool has no place."""
        async with self.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await self.inside.wait()
            try:
                async with self.tower.run(run_id, **{k: v for k, v in options.items() if k != "batch_id"}) as run:
                    done = await run.execute(list(calls), batch_id=options.get("batch_id"))
                if hook is not None:
                    await hook()
            finally:
                self.door.set()
                await held
                self.door.clear()
                self.inside.clear()
        return done

    async def work(self, **options: Any) -> Any:
        """Let a worker run what is there, then leave."""
        return await Worker(self.tower, poll=0.01, **options).run(once=True)

    def states(self) -> list[tuple[str, str, str | None]]:
        """All deferred calls: tool, state, how it ended."""
        assert self.tower.journal is not None
        return [(one.tool, one.state, one.outcome) for one in self.tower.journal.deferred_calls().result()]

    def answer(self, handle: str | None) -> str:
        """What a deferred call was answered."""
        assert self.tower.journal is not None and handle is not None
        found = self.tower.journal.deferred(handle).result()
        assert found is not None and found[1] is not None
        return found[1].content


def play(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine, with a limit."""
    asyncio.run(asyncio.wait_for(main(), 60))  # type: ignore[arg-type]  # a coroutine function


def told(done: BatchResult) -> list[tuple[str, str | None]]:
    return [(one.outcome, one.code) for one in done]


# ==================================================================== into the queue


def test_r74_a_call_that_cannot_start_goes_into_the_durable_queue(tmp_path: Path) -> None:
    """R-74: a busy tool's call is written down and answered pending, with a handle and a word for the model; siblings
    that have nothing to do with it go on; a worker runs it later, through the same limits.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        [one, other] = await desk.busy(Call("pack", {"box": "a"}, "x"), Call("chat", {}))
        assert (one.outcome, one.code, one.started, one.applied, one.retryable) == (
            "pending", "deferred", False, "no", "no",
        )  # fmt: skip
        assert one.handle is not None and one.handle in one.message and "Do not call it again" in one.message
        assert json.loads(one.content)["error"]["handle"] == one.handle
        assert one.waited_for == ("pool crm",)
        assert other.ok and desk.did == ["chat"]
        assert desk.states() == [("pack", "queued", None)]
        report = await desk.work()
        assert (report.done, report.failed) == (1, 0)
        assert desk.did == ["chat", "pack a"] and desk.answer(one.handle) == "packed a True"
        assert desk.states() == [("pack", "done", "ok")]
        await desk.tower.aclose()

    play(main)


def test_the_write_is_durable_before_the_result_is_there(tmp_path: Path) -> None:
    """S14: whoever is told "deferred" finds the call on the disk, from another connection."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        seen: list[Any] = []

        def look(result: Result) -> None:
            if result.code == "deferred":
                seen.append(rows(tmp_path / "j.db", "SELECT handle, state FROM deferred"))

        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            async with desk.tower.run() as run:
                [one] = await run.execute([Call("pack", {"box": "a"})], on_result=look)
            desk.door.set()
            await held
        assert seen == [[(one.handle, "queued")]]
        await desk.tower.aclose()

    play(main)


def test_s3_what_comes_behind_a_deferred_call_goes_there_too(tmp_path: Path) -> None:
    """S3: calls that need a deferred call or touch what it touches are held behind it, in order, as one chain; what a
    call of this process still holds them back is over by then; unrelated siblings go on.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        done = await desk.busy(
            Call("pack", {"box": "a"}, "1"),
            Call("look", {"box": "a"}, "2"),
            Call("look", {"box": "b"}, "3"),
            Call("label", {"box": "b"}, "4", needs=("2",)),
            Call("look", {"box": "b"}, "5"),
            Call("chat", {}, "6"),
        )
        assert told(done) == [
            ("pending", "deferred"),
            ("pending", "held_behind"),
            ("ok", None),
            ("pending", "held_behind"),
            ("pending", "held_behind"),
            ("ok", None),
        ]
        assert "call 0 (1)" in done[1].message and "call 1 (2)" in done[3].message
        assert desk.did == ["chat", "look b"] or desk.did == ["look b", "chat"]
        del desk.did[:]
        assert desk.tower.journal is not None
        calls = {one.handle: one for one in desk.tower.journal.deferred_calls().result()}
        chain = [calls[one.handle] for one in done if one.handle is not None]
        assert {one.chain for one in chain} == {chain[0].handle}
        assert [one.position for one in chain] == [0, 1, 3, 4]
        assert [one.needs for one in chain] == [(), (), (chain[1].handle,), ()]
        await desk.work()
        assert desk.did == ["pack a", "look a", "label b", "look b"]
        await desk.tower.aclose()

    play(main)


def test_a_call_behind_two_chains_joins_them(tmp_path: Path) -> None:
    """S3: what comes behind two deferred calls that have nothing to do with each other comes after both."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", run_concurrency=4)
        done = await desk.busy(
            Call("pack", {"box": "a"}, "1"),
            Call("pack", {"box": "b"}, "2"),
            Call("look", {"box": "a"}, "3"),
            Call("chat", {}, "4", needs=("1", "2")),
        )
        assert [one.code for one in done] == ["deferred", "deferred", "held_behind", "held_behind"]
        await desk.work()
        assert desk.did[-1] == "chat"
        assert desk.did.index("look a") > desk.did.index("pack a")
        assert [state for _, state, _ in desk.states()] == ["done"] * 4
        await desk.tower.aclose()

    play(main)


def test_what_a_deferred_call_fails_for_skips_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    """S1, S3: in the queue as in a batch: a failure skips what needs the call, and not what only comes after it."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        done = await desk.busy(
            Call("pack", {"box": "a", "fail": True}, "1"),
            Call("chat", {}, "2", needs=("1",)),
            Call("chat", {}, "3", needs=("2",)),
            Call("look", {"box": "a"}, "4"),
        )
        assert {one.outcome for one in done} == {"pending"}
        report = await desk.work()
        assert (report.done, report.failed, report.unknown) == (1, 3, 0)
        assert desk.did == ["pack a", "look a"]
        assert [(state, outcome) for _, state, outcome in desk.states()] == [
            ("done", "error"), ("done", "skipped"), ("done", "ok"), ("done", "skipped"),
        ]  # fmt: skip
        assert "dependency_failed" in desk.answer(done[1].handle)
        # Nobody knows whether it took effect, and that is listed, though the queue goes on.
        assert desk.tower.journal is not None
        assert [one.tool for one in desk.tower.journal.unknown().result()] == ["pack"]
        await desk.tower.aclose()

    play(main)


def test_a_skipped_call_hands_on_what_it_came_behind(tmp_path: Path) -> None:
    """S1: a call that comes behind a deferred one only by way of a skipped one goes into the queue all the same."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")

        @desk.tower.tool(independent=True, read_only=True)
        async def broken() -> None:
            raise ValueError

        done = await desk.busy(
            Call("pack", {"box": "a"}, "1"),
            Call("broken", {}, "2"),
            Call("label", {"box": "a"}, "3", needs=("2",)),
            Call("look", {"box": "a"}, "4"),
        )
        assert told(done) == [
            ("pending", "deferred"),
            ("error", "handler_error"),
            ("skipped", "dependency_failed"),
            ("pending", "held_behind"),
        ]
        await desk.work()
        assert desk.did == ["pack a", "look a"]
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize("skipped", [False, True])
def test_what_waits_for_many_deferred_calls_comes_behind_all_of_them(tmp_path: Path, skipped: bool) -> None:
    """S3: a write behind several deferred reads comes behind all of them; so does, by way of it, what comes behind the
    write, also where the write itself is skipped.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", run_concurrency=20)

        @desk.tower.tool(reads="box:{box}", pools=["crm"], when_busy="defer")
        async def peek(box: str, n: int) -> str:
            desk.did.append(f"peek {n}")
            return f"peeked {n}"

        @desk.tower.tool(independent=True, read_only=True)
        async def broken() -> None:
            raise ValueError

        calls = [Call("peek", {"box": "a", "n": n}) for n in range(4)]
        calls += [
            Call("broken", {}, "x"),
            Call("label", {"box": "a"}, "w", needs=("x",) if skipped else ()),
            Call("label", {"box": "b"}, "o"),
            Call("look", {"box": "a"}, "r"),
            Call("label", {"box": "a"}, "v"),
        ]
        done = await desk.busy(*calls)
        assert [one.code for one in done] == [
            *["deferred"] * 4,
            "handler_error",
            "dependency_failed" if skipped else "held_behind",
            "deferred",
            "held_behind",
            "held_behind",
        ]
        await desk.work()
        await desk.work()
        assert {state for _, state, _ in desk.states()} == {"done"}
        did = [one for one in desk.did if "b" not in one.split()]
        assert sorted(did[:4]) == [f"peek {n}" for n in range(4)]
        assert did[4:] == ["look a", "label a"] if skipped else ["label a", "look a", "label a"]
        await desk.tower.aclose()

    play(main)


def test_a_rate_that_is_used_up_defers_and_the_worker_waits_for_it(tmp_path: Path) -> None:
    """R-74, R-72: a call that a rate limit does not let start is deferred; the worker is put off until there is room,
    and does not try in vain.
    """

    async def main() -> None:
        tower = Tower(journal=tmp_path / "j.db")
        did: list[int] = []

        @tower.tool(independent=True, rate=Rate(1, per=0.3), when_busy="defer", idempotent=False)
        async def send(n: int) -> int:
            did.append(n)
            return n

        done = await tower.execute([Call("send", {"n": n}) for n in range(3)])
        assert [one.code for one in done] == [None, "deferred", "deferred"]
        assert "the rate of tool send" in done[1].message
        report = await Worker(tower, poll=0.01, patience=0.05).run(once=True)
        assert report.done == 2 and sorted(did) == [0, 1, 2]
        assert 1 <= report.returned <= 4
        await tower.aclose()

    play(main)


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    """G6: as many calls wait in the durable queue as may wait; the next one is refused, and says so, also where it
    would have to go there since it comes behind one that is there.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", max_queued=2)
        done = await desk.busy(
            Call("pack", {"box": "a"}),
            Call("pack", {"box": "b"}),
            Call("pack", {"box": "c"}),
            Call("look", {"box": "a"}),
        )
        assert told(done) == [
            ("pending", "deferred"),
            ("pending", "deferred"),
            ("rejected", "queue_full"),
            ("rejected", "queue_full"),
        ]
        for index in (2, 3):
            assert done[index].retryable == "yes" and "durable queue is full" in done[index].message
        assert done[3].applied == "no"
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize("way", ["defer", "submit"])
@pytest.mark.parametrize("whose", ["tower", "tool"])
def test_g6_a_chain_takes_no_more_places_than_there_are(tmp_path: Path, way: str, whose: str) -> None:
    """G6, S3: of a chain of calls behind a deferred one the first ones go into the queue, as many as may, in emitted
    order. The others are refused at once, none of them runs out of order, and what needs one of them is skipped.
    """
    calls = [Call("pack", {"box": "a"}, f"{number}") for number in range(6)]
    calls += [Call("look", {"box": "b"}, "6", ["5"]), Call("look", {"box": "c"}, "7", ["2"])]

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", **({"max_queued": 3} if whose == "tower" else {}))
        if whose == "tool":
            desk.tower.policy("pack", max_queued=3)
        if way == "submit":
            async with desk.tower.run() as run:
                done = await run.submit(calls)
        else:
            done = await desk.busy(*calls)
        first = ("pending", "deferred")
        behind = ("pending", "held_behind")
        full = ("rejected", "queue_full")
        after = [("skipped", "dependency_failed"), full if whose == "tower" else behind]
        assert told(done) == [first, behind, behind, full, full, full, *after]
        assert desk.did == []
        assert len(desk.states()) == (3 if whose == "tower" else 4)
        report = await desk.work()
        assert report.left == 0
        assert desk.did == ["pack a", "pack a", "pack a", *(["look c"] if whose == "tool" else [])]
        await desk.tower.aclose()

    play(main)


def test_g12_the_deadline_of_a_run_goes_with_its_deferred_calls(tmp_path: Path) -> None:
    """G12: a deferred call does not start when its run's deadline is over: it is answered so, once and for good, and
    so is its chain; one whose run has time left runs, and its handler is told how long.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        left: dict[str, float] = {}

        @desk.tower.tool(writes="box:{box}", pools=["crm"], when_busy="defer")
        async def weigh(box: str, ctx: Context) -> str:
            assert ctx.deadline is not None
            left[box] = ctx.deadline - desk.tower._core.now()
            return "weighed"

        late = await desk.busy(Call("pack", {"box": "a"}), Call("look", {"box": "a"}), deadline=0.2)
        soon = await desk.busy(Call("weigh", {"box": "b"}), Call("weigh", {"box": "b"}), deadline=40.0)
        free = await desk.busy(Call("weigh", {"box": "c"}))
        assert told(late) == told(soon) == [("pending", "deferred"), ("pending", "held_behind")]
        assert desk.tower.journal is not None
        ends = {one.deadline for one in desk.tower.journal.deferred_calls(run_id="run").result()}
        assert len(ends) == 3 and None in ends
        await asyncio.sleep(0.25)
        report = await desk.work()
        assert desk.did == []
        assert report.left == 0
        answers = [answer(desk, one.handle) for one in late]
        assert [(one.outcome, one.code, one.attempts) for one in answers] == [("rejected", "deadline_exceeded", 0)] * 2
        assert [desk.answer(one.handle) for one in [*soon, *free]] == ["weighed"] * 3
        assert 20 < left["b"] < 40 < left["c"]
        await desk.tower.aclose()

    play(main)


def answer(desk: Desk, handle: str | None) -> Answer:
    """What a deferred call came to."""
    assert desk.tower.journal is not None and handle is not None
    found = desk.tower.journal.deferred(handle).result()
    assert found is not None and found[1] is not None
    return found[1]


def test_g12_a_deferred_call_that_runs_into_its_deadline_is_ended(tmp_path: Path) -> None:
    """G12: the end of the run's time ends its handler in the worker as it would have in the batch."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")

        @desk.tower.tool(independent=True, read_only=True, pools=["crm"], when_busy="defer")
        async def long() -> str:
            desk.did.append("long")
            await asyncio.sleep(30)
            return "never"

        (late,) = await desk.busy(Call("long", {}), deadline=1.0)
        await desk.work()
        assert desk.did == ["long"]
        found = answer(desk, late.handle)
        assert (found.outcome, found.code) == ("timed_out", "deadline_exceeded")
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize("options", [{"deny": ["ch*"]}, {"allow": ("out*",)}, {"allow": "out*", "deny": []}, {}])
def test_r74_what_a_run_may_call_holds_for_what_its_deferred_calls_make(tmp_path: Path, options: Any) -> None:
    """R-123, R-74: a deferred call makes no calls of its own that its run was not allowed, in whatever process."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        seen: list[str | None] = []

        @desk.tower.tool(independent=True, read_only=True, pools=["crm"], when_busy="defer")
        async def outer(ctx: Context) -> str:
            seen.extend(one.code for one in await ctx.execute([Call("chat", {})]))
            return "done"

        (later,) = await desk.busy(Call("outer", {}), **options)
        assert later.code == "deferred"
        await desk.work()
        assert desk.answer(later.handle) == "done"
        assert seen == (["permission_denied"] if options else [None])
        await desk.tower.aclose()

    play(main)


def test_what_could_never_run_is_refused_and_not_deferred(tmp_path: Path) -> None:
    """R-74: only what a later moment can help is deferred: not a weight above the limit, not bad arguments, not an
    unknown tool, not a circuit that is open, nothing after the run's deadline.
    """

    async def main() -> None:
        tower = Tower(journal=tmp_path / "j.db", pools={"crm": 3})

        @tower.tool(independent=True, pools={"crm": 2}, when_busy="defer", idempotent=False)
        async def wide(n: int) -> int:
            return n

        @tower.tool(independent=True, breaker=Breaker(failures=1), when_busy="defer", idempotent=False)
        async def flaky() -> int:
            raise ValueError

        tower.configure(pools={"crm": 1})
        async with tower.run() as run:
            done = await run.execute([Call("wide", {"n": 1}), Call("wide", {"n": "x"}), Call("nope", {})])
            assert [one.code for one in done] == ["concurrency_limit", "invalid_arguments", "unknown_tool"]
            await run.execute([Call("flaky", {})])
            assert [one.code for one in await run.execute([Call("flaky", {})])] == ["circuit_open"]
        async with tower.run(deadline=0) as run:
            assert [one.code for one in await run.execute([Call("flaky", {})])] == ["deadline_exceeded"]
        assert tower.journal is not None and tower.journal.deferred_calls().result() == []
        await tower.aclose()

    play(main)


def test_arguments_that_are_no_json_are_not_deferred(tmp_path: Path) -> None:
    """S14: what cannot be written down whole is refused as it would be without a queue; what would have to come behind
    a deferred call is refused, and runs nowhere.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")

        class Box(str):
            pass

        @desk.tower.tool(independent=True, pools=["crm"], when_busy="defer", idempotent=False)
        async def throw(what: object) -> str:
            desk.did.append("throw")
            return "thrown"

        @desk.tower.tool(writes="box:{box}", idempotent=False)
        async def mark(box: str, what: object) -> str:
            desk.did.append("mark")
            return "marked"

        done = await desk.busy(
            Call("throw", {"what": {1, 2}}), Call("pack", {"box": "a"}), Call("mark", {"box": "a", "what": {1}})
        )
        assert told(done) == [
            ("rejected", "concurrency_limit"),
            ("pending", "deferred"),
            ("rejected", "held_behind"),
        ]
        assert desk.did == []
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize("options", [{"when_busy": "defer"}, {"journal": Journal(":memory:", arguments=False)}])
def test_deferring_without_a_place_for_it_is_refused_early(options: dict[str, Any]) -> None:
    """R-74: `when_busy="defer"` without a journal that stores arguments is refused where it is said, with the fix."""

    def declare() -> None:
        Tower(**options).add_tool(lambda: None, name="x", when_busy="defer")

    with pytest.raises(PolicyError, match=r"deferred into the journal.*(Tower\(journal=|arguments=True)"):
        declare()
    tower = Tower()
    with pytest.raises(PolicyError, match="tool 'x': when_busy='defer'"):
        tower.add_tool(lambda: None, name="x", when_busy="defer")
    tower.add_tool(lambda: None, name="x")
    with pytest.raises(PolicyError, match=r"tower.policy 'x': when_busy='defer'"):
        tower.policy("x", when_busy="defer")
    with pytest.raises(PolicyError, match=r"tools.x.*when_busy='defer'"):
        Tower({"tools": {"x": {"when_busy": "defer"}}})
    with pytest.raises(PolicyError, match="Worker: the tower has no journal"):
        Worker(tower)
    with pytest.raises(PolicyError, match="submit: calls are deferred"):
        asyncio.run(tower.submit([]))


def test_a_journal_that_cannot_write_defers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: full or locked: the call is answered `journal_unavailable`, and nothing is in the queue, now or later."""

    async def main() -> None:
        desk = Desk(Journal(tmp_path / "j.db", busy_timeout=0.05))
        journal = desk.tower.journal
        assert journal is not None
        journal.counts().result()
        other = sqlite3.connect(tmp_path / "j.db", isolation_level=None)

        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            other.execute("BEGIN IMMEDIATE")
            async with desk.tower.run() as run:
                done = await run.execute([Call("label", {"box": "a"}), Call("look", {"box": "a"}), Call("chat", {})])
            other.execute("ROLLBACK")
            other.close()
            desk.door.set()
            await held
        assert [one.code for one in done] == ["journal_unavailable", None, None]
        assert "not deferred" in done[0].message and done[0].retryable == "yes" and done[0].applied == "no"
        assert desk.states() == []
        await desk.tower.aclose()
        journal.close()

    play(main)


def held_up(journal: Journal) -> Callable[[], None]:
    """Let a journal do nothing until what is returned is called."""
    gate, at_it = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        at_it.set()
        assert gate.wait(30)

    journal._writer.ask(wait)
    assert at_it.wait(30)
    return gate.set


@pytest.mark.parametrize("when", ["asked", "written"])
@pytest.mark.parametrize("what", ["run", "call"])
def test_a_cancel_while_a_call_is_written_down_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, what: str
) -> None:
    """G12, S14: a call that is cancelled while it goes into the queue is answered cancelled, and never runs: it is not
    written where that had not begun, else it is taken back.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        journal = desk.tower.journal
        assert journal is not None
        journal.counts().result()
        async with desk.tower.run("holder") as holder, desk.tower.run() as run:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            release: Callable[[], None]
            if when == "asked":
                release = held_up(journal)
            else:
                gate, at_it = threading.Event(), threading.Event()
                release = gate.set
                done_one = Writer._do_one

                def slowly(self: Writer, session: Any, step: Any) -> Any:
                    came = done_one(self, session, step)
                    if isinstance(came[0], Deferred):
                        at_it.set()
                        assert gate.wait(30)
                    return came

                monkeypatch.setattr(Writer, "_do_one", slowly)
            batch = asyncio.create_task(run.execute([Call("label", {"box": "a"}, "x"), Call("look", {"box": "a"})]))
            if when == "asked":
                while not journal._writer._queue:
                    await asyncio.sleep(0.001)
            else:
                while not at_it.is_set():
                    await asyncio.sleep(0.001)
            if what == "run":
                run.cancel("enough")
            else:
                run.cancel("enough", call_id="x")
            await asyncio.sleep(0.01)
            release()
            done = await batch
            desk.door.set()
            await held
        assert told(done)[0] == ("cancelled", "cancelled")
        assert "enough" in done[0].message
        assert told(done)[1] == (("cancelled", "cancelled") if what == "run" else ("ok", None))
        assert [state for _, state, _ in desk.states()] == ([] if when == "asked" else ["cancelled"])
        await desk.tower.aclose()

    play(main)


def test_a_cancel_that_comes_too_late_tells_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G10: where a worker was faster than the cancel the call is answered that it is in the queue."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        journal = desk.tower.journal
        assert journal is not None

        def taken(handle: str) -> Future[str | None]:
            future: Future[str | None] = Future()
            future.set_result("claimed")
            return future

        monkeypatch.setattr(journal, "cancel_deferred", taken)
        handed = deferring.Deferring._handed

        def late(self: Any, hand: Any, done: Any) -> None:
            hand.stop = "enough"
            handed(self, hand, done)

        monkeypatch.setattr(deferring.Deferring, "_handed", late)
        [one] = await desk.busy(Call("label", {"box": "a"}))
        assert (one.outcome, one.code) == ("pending", "deferred")
        await desk.tower.aclose()

    play(main)


def test_a_journal_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G12: the wait for the queue has a limit; what is written after it is taken back."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        journal = desk.tower.journal
        assert journal is not None
        journal.counts().result()
        monkeypatch.setattr(deferring, "JOURNAL_SECONDS", 0.05)
        gate = threading.Event()
        done_one = Writer._do_one

        def slowly(self: Writer, session: Any, step: Any) -> Any:
            came = done_one(self, session, step)
            if isinstance(came[0], Deferred):
                assert gate.wait(30)
            return came

        monkeypatch.setattr(Writer, "_do_one", slowly)
        [one] = await desk.busy(Call("pack", {"box": "a"}))
        assert (one.outcome, one.code, one.applied) == ("rejected", "journal_unavailable", "unknown")
        gate.set()
        await asyncio.sleep(0.05)
        while desk.states() != [("pack", "cancelled", "cancelled")]:
            await asyncio.sleep(0.01)
        release = held_up(journal)
        [one] = await desk.busy(Call("pack", {"box": "a"}))
        assert (one.code, one.applied) == ("journal_unavailable", "no")
        release()
        assert len(desk.states()) == 1
        await desk.tower.aclose()

    play(main)


# ==================================================================== handed in again


def test_r123_a_batch_that_is_handed_in_again_finds_its_calls_in_the_queue(tmp_path: Path) -> None:
    """R-123, S14: redelivery puts nothing in twice and runs nothing beside the queue, whether there is room by now or
    not; once a worker has run the calls their answers come.
    """
    calls = [Call("pack", {"box": "a"}, "1"), Call("look", {"box": "a"}, "2"), Call("chat", {}, "3", needs=("1",))]

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        first = await desk.busy(*calls, batch_id="b")
        async with desk.tower.run("run") as run:
            again = await run.execute(list(calls), batch_id="b")  # there is room now
        assert told(again) == told(first) == [
            ("pending", "deferred"), ("pending", "held_behind"), ("pending", "held_behind"),
        ]  # fmt: skip
        assert [one.handle for one in again] == [one.handle for one in first]
        assert desk.did == [] and len(desk.states()) == 3
        await desk.work()
        assert desk.did == ["pack a", "look a", "chat"]
        async with desk.tower.run("run") as run:
            after = await run.execute(list(calls), batch_id="b")
        assert [one.content for one in after] == ["packed a True", "looked a", "chatted"]
        assert all(one.replayed for one in after) and len(desk.did) == 3
        await desk.tower.aclose()

    play(main)


def test_a_batch_whose_process_died_half_way_into_the_queue_keeps_its_order(tmp_path: Path) -> None:
    """S3, S14: the first call is in the queue, the second is not yet: handed in again it goes behind the first one."""
    calls = [Call("pack", {"box": "a"}, "1"), Call("look", {"box": "a"}, "2")]

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        await desk.busy(*calls, batch_id="b")
        assert desk.tower.journal is not None
        desk.tower.journal._writer.ask(lambda one: one.db.execute("DELETE FROM deferred WHERE tool = 'look'")).result()
        async with desk.tower.run("run") as run:
            again = await run.execute(list(calls), batch_id="b")
        assert told(again) == [("pending", "deferred"), ("pending", "held_behind")]
        assert desk.did == []
        await desk.work()
        assert desk.did == ["pack a", "look a"]
        await desk.tower.aclose()

    play(main)


def test_the_same_key_with_other_arguments_is_a_conflict(tmp_path: Path) -> None:
    """S14: a call with the idempotency key of a deferred one, and other arguments, is refused."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        [one] = await desk.busy(Call("pack", {"box": "a"}, idempotency_key="k"))
        [same] = await desk.tower.execute([Call("pack", {"box": "a"}, idempotency_key="k")])
        [other] = await desk.tower.execute([Call("pack", {"box": "b"}, idempotency_key="k")])
        assert (one.code, same.handle, other.code) == ("deferred", one.handle, "idempotency_conflict")
        assert desk.tower.journal is not None and one.handle is not None
        assert desk.tower.journal.cancel_deferred(one.handle).result() == "cancelled"
        [gone] = await desk.tower.execute([Call("pack", {"box": "a"}, idempotency_key="k")])
        assert (gone.outcome, gone.code) == ("cancelled", "cancelled") and desk.did == []
        await desk.tower.aclose()

    play(main)


def test_two_who_hand_in_the_same_call_at_once_put_it_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-123: between the look and the write another process has put the call in, or has begun it: it is there once."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        journal = desk.tower.journal
        assert journal is not None
        look = journal.deferred_by
        first = await desk.busy(Call("pack", {"box": "a"}, idempotency_key="k"))

        def blind(keys: Any) -> Any:
            monkeypatch.setattr(journal, "deferred_by", look)
            return look([])

        monkeypatch.setattr(journal, "deferred_by", blind)
        second = await desk.busy(Call("pack", {"box": "a"}, idempotency_key="k"))
        assert second[0].handle == first[0].handle and len(desk.states()) == 1
        monkeypatch.setattr(journal, "deferred_by", blind)
        [third] = await desk.tower.execute([Call("pack", {"box": "a"}, idempotency_key="k")])  # there is room
        assert (third.code, third.handle) == ("deferred", first[0].handle)
        assert desk.did == []
        await desk.tower.aclose()

    play(main)


# ==================================================================== the worker


def test_r04_a_worker_goes_through_the_same_admission(tmp_path: Path) -> None:
    """R-04, G3: a worker beside live calls never exceeds a pool, and runs a call in a run of its id, tenant and
    priority.
    """

    async def main() -> None:
        tower = Tower(journal=tmp_path / "j.db", pools={"crm": 2})
        inside = peak = 0
        seen: list[tuple[str, str | None, str]] = []

        @tower.tool(independent=True, pools=["crm"], when_busy="defer", idempotent=False)
        async def send(n: int, ctx: Context) -> int:
            nonlocal inside, peak
            inside += 1
            peak = max(peak, inside)
            seen.append((ctx.run_id, ctx.tenant, ctx.call_id))
            await asyncio.sleep(0.005)
            inside -= 1
            return n

        async with tower.run("r", tenant="t", priority=3) as run:
            done = await run.submit([Call("send", {"n": n}, f"c{n}") for n in range(20)])
        assert {one.code for one in done} == {"deferred"}
        assert tower.journal is not None
        assert {one.priority for one in tower.journal.deferred_calls().result()} == {3}
        worker = Worker(tower, poll=0.01)
        live = asyncio.create_task(tower.execute([Call("send", {"n": n}) for n in range(4)]))
        report = await worker.run(once=True)
        others = [one.handle for one in await live if one.handle is not None]
        if others:
            report = await worker.run(once=True)
        assert report.done == 20 + len(others) and peak <= 2
        assert ("r", "t", "c3") in seen
        await tower.aclose()

    play(main)


def test_a_busy_worker_gives_calls_back_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-74, R-75: a call for which there is no room in the worker goes back into the queue, is put off for longer each
    time, and is never refused for it; it keeps no call of another tool from running.
    """
    monkeypatch.setattr(worker_room, "FIRST_BACK_OFF", 0.02)

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        async with desk.tower.run("r") as run:
            await run.submit([Call("pack", {"box": f"b{n}"}) for n in range(6)])
            await run.submit([Call("chat", {})])
        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            worker = Worker(desk.tower, poll=0.01, patience=0.02)
            working = asyncio.create_task(worker.run(once=True))
            while worker.report().returned < 8:
                await asyncio.sleep(0.005)
            assert desk.did == ["chat"]
            assert desk.tower.journal is not None
            assert max(one.returned for one in desk.tower.journal.deferred_calls().result()) >= 1
            desk.door.set()
            await held
            report = await working
        assert report.done == 7 and report.failed == 0
        assert sorted(desk.did) == ["chat", *(f"pack b{n}" for n in range(6))]
        await desk.tower.aclose()

    play(main)


def test_a_tool_that_is_gone_or_has_changed_ends_with_a_clear_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R-123: a call of a tool that the worker has not is left to others for a while, and then answered `unknown_tool`;
    one whose arguments do not fit any more is answered so. Neither runs.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        async with desk.tower.run("r") as run:
            [gone, changed] = await run.submit([Call("pack", {"box": "a"}), Call("look", {"box": "a"})])
        await desk.tower.aclose()
        other = Tower(journal=tmp_path / "j.db")

        @other.tool(reads="box:{number}")
        async def look(number: int) -> int:
            return number

        with caplog.at_level(logging.WARNING, "towerman"):
            report = await Worker(other, poll=0.01, foreign_after=3600).run(once=True)
        assert report == worker_room.WorkerReport(left=2) and "'pack'" in caplog.text
        report = await Worker(other, poll=0.01, foreign_after=0).run(once=True)
        assert report.failed == 2
        assert other.journal is not None
        for result, code in ((gone, "unknown_tool"), (changed, "invalid_arguments")):
            assert result.handle is not None
            found = other.journal.deferred(result.handle).result()
            assert found is not None and (found[0].state, found[0].code) == ("done", code)
        await other.aclose()

    play(main)


@pytest.mark.parametrize("begun", [False, True])
def test_a_call_that_a_worker_has_can_be_cancelled(tmp_path: Path, begun: bool) -> None:
    """R-123: cancelled while it is claimed and waits, a call never begins; while it runs, it is told to stop."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", grace=0.05)
        running = asyncio.Event()

        @desk.tower.tool(independent=True, idempotent=False)
        async def long() -> None:
            running.set()
            await asyncio.sleep(60)

        async with desk.tower.run("r") as run:
            [one] = await run.submit([Call("long" if begun else "pack", {} if begun else {"box": "a"})])
        assert one.handle is not None and desk.tower.journal is not None
        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            working = asyncio.create_task(Worker(desk.tower, poll=0.01, patience=30).run(once=True))
            if begun:
                await running.wait()
            while desk.states()[0][1] != "claimed":
                await asyncio.sleep(0.005)
            assert desk.tower.journal.cancel_deferred(one.handle).result() == "claimed"
            await working
            desk.door.set()
            await held
        assert desk.states()[0][1:] == (("done" if begun else "cancelled"), "cancelled")
        assert desk.did == []
        await desk.tower.aclose()

    play(main)


def test_a_worker_that_stops_ends_what_runs_and_gives_back_what_waits(tmp_path: Path) -> None:
    """G12: nothing new is taken, what runs ends within its grace, what waits for room goes back, and nothing is left
    claimed.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        going, go_on = asyncio.Event(), asyncio.Event()

        @desk.tower.tool(independent=True, idempotent=False)
        async def slow() -> str:
            going.set()
            await go_on.wait()
            return "slow"

        async with desk.tower.run("r") as run:
            await run.submit([Call("slow", {}), Call("pack", {"box": "a"})])
        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            worker = Worker(desk.tower, poll=0.01, patience=30)
            working = asyncio.create_task(worker.run())
            await going.wait()
            while [state for _, state, _ in desk.states()] != ["claimed", "claimed"]:
                await asyncio.sleep(0.005)
            worker.stop(grace=30)
            while desk.states()[1][1] != "queued":
                await asyncio.sleep(0.005)
            assert not working.done()
            go_on.set()
            report = await working
            desk.door.set()
            await held
        assert (report.done, report.returned, report.unknown) == (1, 1, 0)
        assert desk.states() == [("slow", "done", "ok"), ("pack", "queued", None)]
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize("harmless", [False, True])
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_what_outlives_the_grace_of_a_worker(tmp_path: Path, harmless: bool, how: str) -> None:
    """G10, R-123: what a worker had to cut off is run again where that does no harm, else nobody knows and a person
    settles it; settled as not applied it runs again, once.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", grace=0.02)
        going = asyncio.Event()
        count = 0

        @desk.tower.tool(independent=True, idempotent=harmless)
        async def slow() -> str:
            nonlocal count
            count += 1
            going.set()
            if count == 1:
                await asyncio.sleep(60)
            return "slow"

        async with desk.tower.run("r") as run:
            [one] = await run.submit([Call("slow", {})])
        worker = Worker(desk.tower, poll=0.01)
        working = asyncio.create_task(worker.run())
        await going.wait()
        if how == "stop":
            worker.stop(grace=0)
            await working
        else:
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
        assert desk.tower.journal is not None
        if not harmless:
            assert desk.states()[0][:2] == ("slow", "unknown")
            await desk.work()
            assert count == 1
            [unknown] = desk.tower.journal.unknown().result()
            desk.tower.journal.settle(unknown.number, applied=False).result()
        assert desk.states() == [("slow", "queued", None)]
        await desk.work()
        assert count == 2 and desk.states() == [("slow", "done", "ok")]
        assert desk.answer(one.handle) == "slow"
        await desk.tower.aclose()

    play(main)


def test_a_thread_that_goes_on_after_its_result_keeps_its_chain_waiting(tmp_path: Path) -> None:
    """S1, G7: a call that timed out on a thread has ended when its work has: what comes behind it begins then, and its
    answer is what came of it.
    """

    async def main() -> None:
        tower = Tower(journal=tmp_path / "j.db")
        did: list[str] = []
        gate = threading.Event()

        @tower.tool(writes="box", timeout=0.05, idempotent=False)
        def slow() -> str:
            did.append("begin")
            gate.wait(30)
            did.append("end")
            return "after all"

        @tower.tool(reads="box")
        async def look() -> str:
            did.append("look")
            return "looked"

        async with tower.run("r") as run:
            [one, _] = await run.submit([Call("slow", {}), Call("look", {})])
        working = asyncio.create_task(Worker(tower, poll=0.01).run(once=True))
        while tower.statistics().orphans != 1:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert did == ["begin"]
        gate.set()
        await working
        if "look" not in did:
            await Worker(tower, poll=0.01).run(once=True)
        assert did == ["begin", "end", "look"]
        assert tower.journal is not None and one.handle is not None
        found = tower.journal.deferred(one.handle).result()
        assert found is not None and found[1] is not None and found[1].content == "after all"
        await tower.aclose()

    play(main)


def test_a_worker_waits_for_a_journal_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: a worker whose journal cannot be used says so once, goes on trying, and begins nothing meanwhile."""
    monkeypatch.setattr(worker_room, "TROUBLE_SECONDS", 0.02)

    async def main() -> None:
        desk = Desk(Journal(tmp_path / "j.db", busy_timeout=0.01))
        async with desk.tower.run("r") as run:
            await run.submit([Call("pack", {"box": "a"})])
        other = sqlite3.connect(tmp_path / "j.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        working = asyncio.create_task(Worker(desk.tower, poll=0.01).run(once=True))
        await asyncio.sleep(0.2)
        assert desk.did == [] and not working.done()
        other.execute("ROLLBACK")
        other.close()
        await working
        assert desk.did == ["pack a"]
        assert desk.tower.journal is not None
        closing = asyncio.create_task(Worker(desk.tower, poll=0.01).run())
        await asyncio.sleep(0.05)
        desk.tower.journal.close()
        await closing  # nothing is left to do for it
        await desk.tower.aclose()

    play(main)


def test_g12_a_worker_that_is_cancelled_at_any_moment_leaves_nothing_claimed(tmp_path: Path) -> None:
    """G12, R-123: wherever the cancel of a worker comes, also twice, no call is left claimed, none is lost and none
    runs twice.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", grace=0.01)
        assert desk.tower.journal is not None
        runs: list[int] = []

        @desk.tower.tool(independent=True, idempotent=False)
        async def send(n: int) -> int:
            runs.append(n)
            await asyncio.sleep(0)
            return n

        for trial in range(40):
            async with desk.tower.run("r") as run:
                await run.submit([Call("send", {"n": trial})])
            working = asyncio.create_task(Worker(desk.tower, poll=0.01, grace=5).run())
            for _ in range(trial):
                await asyncio.sleep(0 if trial % 2 else 0.0003)
            working.cancel()
            if trial % 3 == 0:
                await asyncio.sleep(0)
                working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
            desk.tower.journal.counts().result()  # what was asked before is done
            assert "claimed" not in {state for _, state, _ in desk.states()}
        await desk.work()
        states = desk.states()
        assert len(states) == 40 and len(runs) == len(set(runs))
        assert {state for _, state, _ in states} <= {"done", "unknown"}
        assert len([one for one in states if one[1] == "done"]) + len(desk.tower.journal.unknown().result()) == 40
        await desk.tower.aclose()

    play(main)


def test_g12_a_cancel_that_comes_as_the_worker_wakes_is_heard(tmp_path: Path) -> None:
    """G12: the cancel of a worker is not lost where its rest ends in the same moment."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        worker = Worker(desk.tower, poll=60)
        working = asyncio.create_task(worker.run())
        while worker._wake is None or not worker._wake._waiters:  # it rests
            await asyncio.sleep(0.001)
        worker._wake.set()
        working.cancel()
        await asyncio.wait([working], timeout=10)
        assert working.cancelled()
        await desk.tower.aclose()

    play(main)


def test_a_call_that_is_cancelled_just_before_it_begins_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-123: a cancel that the worker has not heard of stops the call where its intent would be written: it is over,
    not left claimed.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        async with desk.tower.run("r") as run:
            [one] = await run.submit([Call("pack", {"box": "a"})])
        assert desk.tower.journal is not None and one.handle is not None
        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            worker = Worker(desk.tower, poll=60, patience=30)
            working = asyncio.create_task(worker.run(once=True))
            while desk.states()[0][1] != "claimed":
                await asyncio.sleep(0.005)
            assert desk.tower.journal.cancel_deferred(one.handle).result() == "claimed"
            desk.door.set()
            await held
            while desk.states()[0][1] != "cancelled":
                await asyncio.sleep(0.005)
            worker.stop()
            await working
        assert desk.did == [] and worker.report().lost == 0
        assert desk.tower.journal.calls().result() == []
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize("harmless", [False, True])
def test_a_tower_that_is_closed_under_its_worker_loses_no_call(tmp_path: Path, harmless: bool) -> None:
    """G12, R-123: nobody wanted the calls cancelled: what waited goes back, what ran too, or it is unknown."""

    async def main() -> None:
        with Journal(tmp_path / "j.db") as journal:
            desk = Desk(journal, grace=0.02)
            going = asyncio.Event()

            @desk.tower.tool(independent=True, idempotent=harmless)
            async def slow() -> None:
                going.set()
                await asyncio.sleep(60)

            async with desk.tower.run("r") as run:
                await run.submit([Call("slow", {}), Call("pack", {"box": "a"})])
            async with desk.tower.run("holder") as holder:
                held = asyncio.create_task(holder.execute([Call("hold", {})]))
                await desk.inside.wait()
                worker = Worker(desk.tower, poll=0.01, patience=30)
                working = asyncio.create_task(worker.run())
                await going.wait()
                while [state for _, state, _ in desk.states()] != ["claimed", "claimed"]:
                    await asyncio.sleep(0.005)
                await desk.tower.aclose()
                worker.stop(grace=0)
                await working
                await held
            assert [state for _, state, _ in desk.states()] == ["queued" if harmless else "unknown", "queued"]
            assert desk.did == []

    play(main)


def test_a_fault_of_the_worker_costs_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P-28: where the worker itself fails over a call, the call goes back and is answered later, and runs once."""
    monkeypatch.setattr(worker_room, "MOST_BACK_OFF", 0.05)

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        async with desk.tower.run("r") as run:
            [one] = await run.submit([Call("pack", {"box": "a"})])
        state_of, failed = worker_room._state_of, []

        def faulty(*given: Any) -> Any:
            if not failed:
                failed.append(1)
                raise ZeroDivisionError
            return state_of(*given)

        monkeypatch.setattr(worker_room, "_state_of", faulty)
        report = await desk.work()
        assert (report.done, report.returned) == (1, 1) and "ZeroDivisionError" in caplog.text
        assert desk.did == ["pack a"] and "packed a" in desk.answer(one.handle)
        await desk.tower.aclose()

    play(main)


def test_a_call_that_waits_for_a_person_is_put_off_and_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-126, G12: without anybody to ask a deferred call that needs an approval is put off, until it has expired; with
    somebody it runs.
    """
    monkeypatch.setattr(worker_room, "APPROVAL_SECONDS", 0.05)

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", approval_lifetime=0.3)

        @desk.tower.tool(independent=True, idempotent=False, requires_approval=True)
        async def pay(n: int) -> int:
            desk.did.append(f"pay {n}")
            return n

        async def yes(_: Any) -> Approved:
            return Approved()

        async with desk.tower.run("r") as run:
            [one] = await run.submit([Call("pay", {"n": 1})])
        report = await desk.work()
        assert report.failed == 1 and report.returned >= 1 and desk.did == []
        assert "approval_expired" in desk.answer(one.handle)
        async with desk.tower.run("r") as run:
            await run.submit([Call("pay", {"n": 2})])
        await desk.work(approver=yes)
        assert desk.did == ["pay 2"]
        await desk.tower.aclose()

    play(main)


def test_handlers_of_a_worker_get_their_deps_and_a_key(tmp_path: Path) -> None:
    """R-121: a deferred call keeps its idempotency key; what its run was given as deps is the worker's to give."""

    async def main() -> None:
        tower = Tower(journal=tmp_path / "j.db")
        seen: list[tuple[object, str | None]] = []

        @tower.tool(independent=True, idempotent=False)
        async def send(ctx: Context) -> None:
            seen.append((ctx.deps, ctx.idempotency_key))

        async with tower.run("r", deps="lost") as run:
            await run.submit([Call("send", {}, idempotency_key="k")])
        await Worker(tower, poll=0.01, deps=lambda run_id: f"for {run_id}").run(once=True)
        assert seen == [("for r", "k")]
        await tower.aclose()

    play(main)


def test_nested_calls_of_a_worker_may_be_deferred_themselves(tmp_path: Path) -> None:
    """S10: a call that a worker runs makes calls of its own; one of these that is busy is deferred as ever, and the
    worker's own call is not put back by that.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        got: list[tuple[str, str | None]] = []

        @desk.tower.tool(independent=True, idempotent=False)
        async def outer(ctx: Context) -> str:
            got.extend(told(await ctx.execute([Call("pack", {"box": "n"})])))
            return "outer"

        async with desk.tower.run("r") as run:
            await run.submit([Call("outer", {})])
        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            worker = Worker(desk.tower, poll=0.01)
            working = asyncio.create_task(worker.run(once=True))
            while not got:
                await asyncio.sleep(0.005)
            assert got == [("pending", "deferred")]
            desk.door.set()
            await held
            await working
        await desk.work()
        assert [state for _, state, _ in desk.states()] == ["done", "done"] and desk.did == ["pack n"]
        await desk.tower.aclose()

    play(main)


def test_a_retry_that_meets_a_busy_limit_is_not_deferred(tmp_path: Path) -> None:
    """S8, S9: a call that has begun before is not put into the queue; it comes to what its last attempt came to."""

    async def main() -> None:
        tower = Tower(journal=tmp_path / "j.db")
        count = 0

        @tower.tool(
            independent=True, idempotent=True, rate="1/h", when_busy="defer",
            retry=Retry(max_attempts=3, initial_delay=0.001, retry_on=(ValueError,)),
        )  # fmt: skip
        async def flaky() -> None:
            nonlocal count
            count += 1
            raise ValueError

        [one] = await tower.execute([Call("flaky", {})])
        assert (one.outcome, one.code, one.started, count) == ("error", "handler_error", True, 1)
        assert tower.journal is not None and tower.journal.deferred_calls().result() == []
        await tower.aclose()

    play(main)


def test_budgets_and_repeats_in_a_worker(tmp_path: Path) -> None:
    """G9, P-61: a deferred call gives its share back and reserves again in the worker; what a budget that renews has
    too little for is put off, not refused; that a call goes back into the queue is no repeat.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db", budgets={"tenant": Budget(calls=2, per="day")}, max_repeats=1)
        done = await desk.busy(Call("pack", {"box": "a"}), Call("pack", {"box": "b"}), tenant="t")
        assert told(done) == [("pending", "deferred")] * 2
        async with desk.tower.run("r", tenant="t") as run:
            assert (await run.execute([Call("chat", {})])).ok  # two are free again, and one of them is used
        report = await desk.work(patience=0.05)
        assert (report.done, report.failed) == (1, 0) and report.returned == 1
        assert desk.tower.journal is not None
        [left] = desk.tower.journal.deferred_calls(state="queued").result()
        assert left.not_before > 0 and left.returned == 1
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"patience": 0}, "patience"),
        ({"poll": "x"}, "poll"),
        ({"grace": -1}, "grace"),
        ({"foreign_after": float("nan")}, "foreign_after"),
        ({"on_end": 5}, "on_end"),
    ],
)
def test_wrong_options_of_a_worker(options: dict[str, Any], wrong: str) -> None:
    """Style 7: a wrong option is refused when the worker is made, by name."""
    with Tower(journal=":memory:") as tower:
        with pytest.raises(PolicyError, match=wrong):
            Worker(tower, **options)
        with pytest.raises(PolicyError, match="a Tower"):
            Worker(object())  # type: ignore[arg-type]
        with pytest.raises(PolicyError, match="grace"):
            Worker(tower).stop(grace=-1)


def test_a_worker_runs_once_at_a_time_and_survives_its_hook(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that is at work is not started again; a hook that fails is told and costs nothing."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        async with desk.tower.run("r") as run:
            await run.submit([Call("chat", {}), Call("chat", {})])

        def hook(handle: str, state: str) -> None:
            raise ValueError(state)

        worker = Worker(desk.tower, poll=0.01, on_end=hook)
        working = asyncio.create_task(worker.run(once=True))
        await asyncio.sleep(0)
        with pytest.raises(PolicyError, match="runs already"):
            await worker.run()
        assert (await working).done == 2 and "on_end failed with ValueError" in caplog.text
        worker.stop()
        assert (await worker.run()).done == 2  # stopped before it began
        await desk.tower.aclose()

    play(main)


def test_a_claim_that_was_lost_is_left_to_its_new_owner(tmp_path: Path) -> None:
    """R-123, G11: a worker that was taken for dead begins nothing that another one has taken over, writes no answer of
    it, and says that it lost it.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        async with desk.tower.run("r") as run:
            [one] = await run.submit([Call("pack", {"box": "a"})])
        async with desk.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await desk.inside.wait()
            worker = Worker(desk.tower, poll=0.01, patience=30)
            working = asyncio.create_task(worker.run())
            while desk.states()[0][1] != "claimed":
                await asyncio.sleep(0.005)
            dead(tmp_path / "j.db")
            with Journal(tmp_path / "j.db") as other:
                [(theirs, _)] = other.claim_next().result()
                assert theirs.handle == one.handle
                while not worker.report().lost:
                    await asyncio.sleep(0.005)
                worker.stop(grace=0)
                await working
                desk.door.set()
                await held
                assert theirs.claim is not None and other.finish_deferred(theirs.claim, OK).result() is True
        assert desk.did == []
        await desk.tower.aclose()

    play(main)


def test_the_model_follows_a_deferred_call_with_read_result(tmp_path: Path) -> None:
    """R-74: the tool `read_result` tells how a deferred call stands, and what it came to; only to its own tenant."""

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        desk.tower.add_tool(read_result)
        [one] = await desk.busy(Call("label", {"box": "a"}), tenant="t")
        assert "read that with read_result" in one.message and one.handle is not None

        async def read(handle: str, tenant: str | None = "t") -> Result:
            return (await desk.tower.execute([Call("read_result", {"handle": handle})], tenant=tenant))[0]

        assert "waits in the queue" in (await read(one.handle)).message
        assert "no deferred call" in (await read(one.handle, None)).message
        assert "no deferred call" in (await read("later-nothing")).message
        await desk.work()
        assert (await read(one.handle)).content == "labelled a"
        assert (await read(one.handle, "other")).code == "handler_error"
        async with desk.tower.run("r", tenant="t") as run:
            [other] = await run.submit([Call("label", {"box": "b"})])
        assert other.handle is not None and desk.tower.journal is not None
        desk.tower.journal.cancel_deferred(other.handle).result()
        assert "cancelled" in (await read(other.handle)).message
        await desk.tower.aclose()

    play(main)


# ==================================================================== what is stored, rubbish


def test_g8_arguments_of_deferred_calls_stand_in_one_table(tmp_path: Path) -> None:
    """G8: the arguments and the key of a deferred call are in the table of arguments while it waits, and nowhere else:
    not in a message, an event, a log, a repr, another table; when it has its answer they are gone.
    """

    async def main() -> None:
        desk = Desk(tmp_path / "j.db")
        events: list[Event] = []
        desk.tower.add_observer(events.append)
        done = await desk.busy(
            Call("pack", {"box": CANARY}, "1", idempotency_key=f"key-{CANARY}"), Call("look", {"box": CANARY}, "2")
        )
        assert [one.code for one in done] == ["deferred", "held_behind"]
        desk.tower.flush()
        kinds = [event.kind for event in events]
        assert kinds.count("deferred") == 2
        assert CANARY not in repr(done) + str([one.message + one.content + repr(one) for one in done]) + repr(events)
        for table in ("deferred", "calls", "answers", "approvals", "blobs", "facts"):
            assert CANARY.encode() not in b"".join(
                repr(row).encode() for row in rows(tmp_path / "j.db", f"SELECT * FROM {table}")
            )
        stored = rows(tmp_path / "j.db", "SELECT kind, body FROM arguments")
        assert len(stored) == 2 and all(kind == "queued" and CANARY.encode() in body for kind, body in stored)
        await desk.work()
        assert rows(tmp_path / "j.db", "SELECT count(*) FROM arguments") == [(0,)]
        await desk.tower.aclose()

    play(main)


@pytest.mark.parametrize(
    "handle",
    ["", "x" * 10_000, "later-'; DROP TABLE deferred", "\ud800", "later-\0", "ü", None, 5, b"a", ["a"], {}, object()],
    ids=range(12),
)
def test_rubbish_handles_name_nothing(handle: Any) -> None:
    """Anything may be asked for as a handle: there is no call of that name, and nothing breaks."""
    with Journal(":memory:") as journal:
        journal.enqueue(deferred("a"), b"1").result()
        assert journal.deferred(handle).result() is None
        assert journal.cancel_deferred(handle).result() is None
        assert [one.state for one in journal.deferred_calls().result()] == ["queued"]


@pytest.mark.parametrize("stored", [b"", b"[]", b"{}", b"[1, 2]", b'["x", 5]', b"[[], null]", b'["x"]', b"\xff"])
def test_stored_rubbish_is_no_call(stored: bytes) -> None:
    """What stands in the table of arguments and is none is told, and runs nothing."""
    with pytest.raises(ValueError):
        unpacked(stored)

    async def main() -> None:
        desk = Desk(":memory:")
        assert desk.tower.journal is not None
        desk.tower.journal.enqueue(deferred("a", tool="chat"), stored).result()
        report = await desk.work()
        assert report.failed == 1 and desk.did == [] and desk.states() == [("chat", "done", "rejected")]
        await desk.tower.aclose()

    play(main)


@given(
    st.one_of(
        st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)),
        st.text(st.characters(exclude_categories=["Cs"])),
    ),
    st.none() | st.text(st.characters(exclude_categories=["Cs"])),
)
def test_what_is_packed_comes_out_again(arguments: Any, key: str | None) -> None:
    """Arguments and key of a deferred call are the same when a worker reads them."""
    stored = packed(arguments, key)
    if stored is not None:
        assert unpacked(stored) == (arguments, key)


# ==================================================================== the queue against a model


class Queue(RuleBasedStateMachine):
    """The file against a plain list: claims, ends, returns, cancels, deaths, chains that join."""

    handles = Bundle("handles")

    @initialize()
    def open(self) -> None:
        self.wall = Wall()
        self.journal = Journal(":memory:", _wall=self.wall)
        self.rows: dict[str, dict[str, Any]] = {}
        self.claims: dict[str, bytes] = {}
        self.count = 0

    def chain_of(self, name: str) -> str:
        return self.rows[name]["chain"] or name

    @rule(
        target=handles,
        behind=st.lists(handles, max_size=3),
        needs=st.booleans(),
        priority=st.integers(-1, 1),
        position=st.integers(0, 5),
    )
    def enqueue(self, behind: list[str], needs: bool, priority: int, position: int) -> str:
        name = f"h{self.count}"
        self.count += 1
        behind = list(dict.fromkeys(behind))
        needed = tuple(behind[:1]) if needs else ()
        chain = None
        if behind:
            chains = []
            for one in sorted(behind, key=lambda one: list(self.rows).index(one)):
                if self.rows[one]["chain"] is None:
                    self.rows[one]["chain"] = one
                if self.rows[one]["chain"] not in chains:
                    chains.append(self.rows[one]["chain"])
            chain = chains[0]
            members = [row for row in self.rows.values() if row["chain"] in chains]
            for row in members:
                row["chain"] = chain
        made = self.journal.enqueue(
            deferred(name, priority=priority, position=position, needs=needed),
            b"x",
            behind=behind,
            most=[(None, 12)],
        )
        if sum(row["state"] == "queued" for row in self.rows.values()) >= 12:
            with pytest.raises(QueueFull):
                made.result()
            return next(iter(self.rows))
        made.result()
        self.rows[name] = {
            "state": "queued", "chain": chain, "position": position, "priority": priority, "needs": needed, "off": 0.0,
            "outcome": None, "stop": False,
        }  # fmt: skip
        return name

    def may_go(self, name: str) -> bool:
        row = self.rows[name]
        order = list(self.rows)
        return (
            row["state"] == "queued"
            and row["off"] <= self.wall.now
            and (
                row["chain"] is None
                or not any(
                    other["chain"] == row["chain"]
                    and other["state"] not in ("done", "cancelled")
                    and (
                        other["state"] == "claimed"
                        or (other["position"], order.index(one)) < (row["position"], order.index(name))
                    )
                    for one, other in self.rows.items()
                )
            )
        )

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        order = list(self.rows)
        expected = sorted(
            (one for one in order if self.may_go(one)), key=lambda one: (-self.rows[one]["priority"], order.index(one))
        )[:limit]
        assert self.journal.due().result().now is bool(expected)
        got = self.journal.claim_next(limit=limit).result()
        assert [one.handle for one, _ in got] == expected
        for one, _ in got:
            assert one.claim is not None
            row = self.rows[one.handle]
            lacking = [
                name
                for name in row["needs"]
                if (self.rows[name]["state"], self.rows[name]["outcome"]) != ("done", "ok")
            ]
            assert one.lacks == (lacking[0] if lacking else None)
            row["state"] = "claimed"
            self.claims[one.handle] = one.claim

    @rule(name=handles, ok=st.booleans(), lost=st.booleans())
    def finish(self, name: str, ok: bool, lost: bool) -> None:
        claim = self.claims.pop(name, None)
        if claim is None:
            return
        from dataclasses import replace

        answer = OK if ok else replace(OK, outcome="error", code="handler_error")
        state = "unknown" if lost else "done"
        assert self.journal.finish_deferred(claim, answer, state).result() is True  # type: ignore[arg-type]
        assert self.journal.finish_deferred(claim, answer).result() is False
        self.rows[name].update(state=state, outcome=answer.outcome)

    @rule(name=handles, wait=st.sampled_from([0.0, 5.0]))
    def give_back(self, name: str, wait: float) -> None:
        claim = self.claims.pop(name, None)
        if claim is None:
            return
        assert self.journal.give_back(claim, wait=wait).result() is True
        row = self.rows[name]
        if row["stop"]:
            row.update(state="cancelled", outcome="cancelled")
        else:
            row.update(state="queued", off=self.wall.now + wait if wait else 0.0)

    @rule(name=handles)
    def cancel(self, name: str) -> None:
        row = self.rows[name]
        if row["state"] == "queued":
            row.update(state="cancelled", outcome="cancelled")
        elif row["state"] == "claimed":
            row["stop"] = True
        assert self.journal.cancel_deferred(name).result() == row["state"]

    @rule()
    def die(self) -> None:
        """The process is taken for dead: its claims go back."""
        if not self.claims:
            return
        session = self.journal._writer._session
        assert session is not None
        session.me = None
        self.journal._writer.ask(lambda one: one.db.execute("UPDATE owners SET ended = 0")).result()
        self.journal.requeue_dead().result()
        for name in self.claims:
            row = self.rows[name]
            row.update(state="cancelled", outcome="cancelled") if row["stop"] else row.update(state="queued")
        self.claims.clear()

    @rule()
    def pass_time(self) -> None:
        self.wall.now += 3

    @invariant()
    def agrees(self) -> None:
        listed = self.journal.deferred_calls().result()
        assert [
            (one.handle, one.state, one.chain, one.position, one.outcome, one.stop) for one in listed
        ] == [
            (name, row["state"], row["chain"], row["position"], row["outcome"], row["stop"])
            for name, row in self.rows.items()
        ]  # fmt: skip
        waiting = [one.handle for one in listed if one.state in ("queued", "claimed", "unknown")]
        kept = self.journal._writer.ask(
            lambda one: [ref for (ref,) in one.db.execute("SELECT ref FROM arguments WHERE kind = 'queued'")]
        ).result()
        assert sorted(kept) == sorted(waiting)

    def teardown(self) -> None:
        self.journal.close()


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
