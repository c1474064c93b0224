"""Loops that stand still, timers that come late, results that come too late, and what is left when a tower ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from typing import Any

import pytest
from kit import Stage, codes, here, on_stage, until

from towerman import Call, CloseReport, Context, DeadLetter, Event, Leftover, ToolError, Tower
from towerman.clock import VirtualClock
from towerman.core import MOST_LETTERS, Core
from towerman.gate import Gate
from towerman.ledger import Ledger
from towerman.policy import TowerPolicy
from towerman.runner.stalls import BEAT, IDLE_LOOKS, STALL, Stalls, at_work

stage = pytest.fixture(on_stage)


class Seen:
    """An observer that wakes whoever waits for a kind of event."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.events: list[Event] = []
        self.seen = threading.Event()

    def __call__(self, event: Event) -> None:
        if event.kind == self.kind:
            self.events.append(event)
            self.seen.set()


# ==================================================================== P-32: a loop that stands still


def test_p32_a_stalled_loop_names_the_tool(caplog: pytest.LogCaptureFixture) -> None:
    """P-32: a coroutine that blocks its loop is named, while it does so, in an event, in the log and in the statistics;
    the ten calls of the batch end all the same.
    """
    observer = Seen("stalled")
    tower = Tower(observers=[observer], run_concurrency=10)

    @tower.tool(independent=True)
    async def fake_async() -> bool:
        return observer.seen.wait(30)  # it blocks until the detector has told

    @tower.tool(independent=True)
    async def honest() -> str:
        await asyncio.sleep(0)
        return "done"

    async def main() -> None:
        async with tower:
            done = await tower.execute([Call("honest", {})] * 5 + [Call("fake_async", {}, id="c7")] * 5)
            assert done.ok
            assert [result.value for result in done[5:]] == [True] * 5

    asyncio.run(main())
    first = observer.events[0]
    assert (first.tool, first.call_id, first.index) == ("fake_async", "c7", 5)
    assert first.ran is not None
    assert first.ran >= STALL
    until(lambda: not tower._core.watching)
    seen = tower.statistics()
    assert set(seen.stalls) == {"fake_async"}
    assert seen.stalled_seconds >= seen.longest_stall >= STALL
    told = [record.message for record in caplog.records if "stands still" in record.message]
    assert len(told) == 1
    assert "a call of the tool 'fake_async'" in told[0]
    assert "run_in='thread'" in told[0]


def test_p32_the_same_work_on_threads_holds_up_nothing() -> None:
    """P-32: with run_in="thread" the loop goes round as often as it likes while ten handlers block, and no stall is
    told.
    """
    observer = Seen("stalled")
    tower = Tower(observers=[observer], run_concurrency=10)
    inside, go = threading.Barrier(11), threading.Event()

    async def fake_async() -> bool:
        inside.wait(30)
        return go.wait(30)

    tower.add_tool(fake_async, independent=True, run_in="thread")

    async def main() -> None:
        going = asyncio.ensure_future(tower.execute([Call("fake_async", {})] * 10))
        while inside.n_waiting < 10:
            await asyncio.sleep(0)
        inside.wait(30)
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert not going.done()
        go.set()
        assert (await going).ok

    asyncio.run(main())
    tower.flush()
    assert observer.events == []
    assert tower.statistics().stalls == {}
    tower.close()


def test_p32_plain_functions_on_the_loop_and_tools_of_one_task() -> None:
    """P-32: with run_in="loop", and where several calls run in one task, it is the call at work that is named."""
    observer = Seen("stalled")
    tower = Tower(observers=[observer])

    @tower.tool(independent=True, own_task=False)
    async def quick() -> str:
        return "done"

    @tower.tool(independent=True, own_task=False)
    async def slow() -> bool:
        return observer.seen.wait(30)

    @tower.tool(independent=True, run_in="loop")
    def plain() -> bool:
        return observer.seen.wait(30)

    async def main(names: list[str]) -> None:
        assert (await tower.execute([Call(name, {}) for name in names])).ok

    asyncio.run(main(["quick", "slow", "quick"]))
    assert observer.seen.wait(30)
    assert observer.events[0].tool == "slow"
    observer.seen.clear()
    observer.events.clear()
    asyncio.run(main(["plain", "quick"]))
    assert observer.events[0].tool == "plain"
    tower.close()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks tell their context from Python 3.12 on")
def test_p32_a_task_that_a_handler_has_made() -> None:
    """P-32: what blocks in a task of a handler's own is that handler's call."""
    observer = Seen("stalled")
    tower = Tower(observers=[observer])

    @tower.tool(independent=True)
    async def gathers() -> None:
        async def part() -> None:
            observer.seen.wait(30)

        await asyncio.gather(part(), part())

    async def main() -> None:
        assert (await tower.execute([Call("gathers", {})])).ok

    asyncio.run(main())
    assert observer.events[0].tool == "gathers"
    tower.close()


def test_p32_code_that_is_no_call(caplog: pytest.LogCaptureFixture) -> None:
    """P-32: while calls are at work, other code of the loop that blocks it is told of in the log, without a tool."""
    tower = Tower()
    free = asyncio.Event()

    @tower.tool(independent=True)
    async def waits() -> None:
        await free.wait()

    async def main() -> None:
        going = asyncio.ensure_future(tower.execute([Call("waits", {})]))
        await asyncio.sleep(0.01)
        until(lambda: tower.statistics().stalls == {"": 1})
        free.set()
        assert (await going).ok

    asyncio.run(main())
    assert "code that is no call of this tower" in caplog.text
    tower.close()


class Fake:
    """A shell whose loop answers when it is told to."""

    def __init__(self) -> None:
        self.loop = self
        self.works: dict[object, None] = {}
        self.pulse: Any = None
        self.running = True
        self.gone = False
        self.jobs: dict[int, Any] = {}
        self.asked: list[Any] = []

    def call_soon_threadsafe(self, function: Any, *arguments: Any) -> None:
        if self.gone:
            raise RuntimeError
        self.asked.append((function, arguments))

    def is_running(self) -> bool:
        return self.running

    def answer(self) -> None:
        while self.asked:
            function, arguments = self.asked.pop()
            function(*arguments)


def test_p32_who_counts_as_standing_still() -> None:
    """P-32: a loop that does not answer for 100 ms stands still, is told once, and its time is added up; not one that
    does not run, or is gone, or when the whole process came late.
    """
    now = 0.0
    core = Core(TowerPolicy(pools={}), Gate(Ledger()), VirtualClock())
    fake = Fake()
    stalls = Stalls(core, lambda: [fake], lambda: now)  # type: ignore[list-item]
    fake.works[Fake()] = None

    def step(seconds: float = BEAT) -> bool:
        nonlocal now
        now += seconds
        return stalls.look()

    assert step()
    fake.answer()
    for _ in range(6):  # asked, and not answered
        assert step()
    assert core.stalls == {"": 1}
    assert core.stalled_seconds == 0
    fake.answer()
    step()
    assert core.longest_stall == core.stalled_seconds == pytest.approx(5 * BEAT)
    fake.answer()
    step()
    step(10)  # the thread itself came late: the machine gave no time
    assert core.stalls == {"": 1}
    fake.answer()
    step()
    fake.running = False
    for _ in range(9):
        step()
    assert core.stalls == {"": 1}
    fake.running = True
    step()
    step()
    step()
    step()
    assert core.stalls == {"": 2}
    fake.running = False  # it ended standing still
    step()
    assert core.stalled_seconds > 5 * BEAT
    fake.gone = True
    step()
    assert fake.pulse is None
    fake.gone = False
    step()
    assert fake.pulse is not None
    fake.works.clear()
    core.watching = True
    assert all(step() for _ in range(IDLE_LOOKS))
    assert not step()
    assert not core.watching


def test_p32_the_thread_is_there_while_calls_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """G12: nobody watches a tower without calls, nor one on a clock of its own; where the system gives no thread, calls
    go on unwatched; who begins while the thread is about to end is watched.
    """
    tower = Tower()
    tower.add_tool(lambda: "done", name="work", independent=True)
    assert not tower._core.watching
    assert tower.execute_sync([Call("work", {})]).ok
    assert tower._core.watching
    until(lambda: not tower._core.watching)

    def refused(*_: object, **__: object) -> Any:
        raise RuntimeError("can't start new thread")

    core = Core(TowerPolicy(pools={}), Gate(Ledger()), tower._core.clock)
    fake = Fake()
    stalls = Stalls(core, lambda: [fake], lambda: 0.0)  # type: ignore[list-item]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        stalls.begin()
    assert not core.watching
    core.watching = True
    stalls.begin()  # somebody watches already
    stalls._idle = IDLE_LOOKS
    asked = iter([[], [fake]])
    fake.works[object()] = None
    stalls._shells = lambda: next(asked)  # type: ignore[assignment,return-value]
    assert stalls.look()
    assert core.watching
    assert Core(TowerPolicy(pools={}), Gate(Ledger()), VirtualClock()).watching
    tower.close()


def test_who_is_at_work_cannot_be_told_of_a_loop_that_moves_on() -> None:
    """P-32: a loop that goes on while it is looked at has nobody who holds it up."""

    class Moves:
        loop = None
        core = None

        @property
        def works(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError

    moving = Moves()
    with contextlib.suppress(RuntimeError):
        asyncio.current_task(None)
    moving.loop = Odd()  # type: ignore[assignment]
    assert at_work(moving) is None  # type: ignore[arg-type]


# ==================================================================== timers that come late


def test_g1_who_ended_while_the_loop_stood_still_is_heard_first(stage: Stage) -> None:
    """P-32, G1: a call that blocks the loop past the timeouts of others costs them nothing: what ended meanwhile counts
    as ended, and its place goes to whoever waits for it; what has not ended is timed out.
    """
    tower = stage.tower(pools={"one": 1})

    @tower.tool(independent=True, read_only=True, timeout=5)
    async def three() -> str:
        return await stage.work("three", 3)

    @tower.tool(independent=True, read_only=True, timeout=5)
    async def never() -> str:
        return await stage.work("never", 1_000)

    @tower.tool(independent=True, read_only=True, pools=["one"], timeout=6)
    async def holds() -> str:
        return await stage.work("holds", 4)

    @tower.tool(independent=True)
    async def blocks() -> str:
        await asyncio.sleep(1)
        stage.clock.value += 20.0
        return "done"

    async def main() -> None:
        first, second = await asyncio.gather(
            tower.execute([Call("three", {}), Call("never", {}), Call("holds", {}), Call("blocks", {})]),
            tower.execute([Call("holds", {})]),
        )
        assert codes(first) == [None, "handler_timeout", None, None]
        assert codes(second) == [None]

    stage.run(main())


def test_a_timer_in_time_is_judged_at_once(stage: Stage) -> None:
    """S2: a timer that fires in time ends what is due at that very instant."""
    tower = stage.tower(grace=0)

    @tower.tool(independent=True, read_only=True, timeout=5)
    async def stubborn() -> str:
        return await stage.stubborn("stubborn", 9)

    async def main() -> None:
        done = await tower.execute([Call("stubborn", {})])
        assert codes(done) == ["handler_timeout"]
        assert here().time() == 5
        await stage.settled(tower)

    stage.run(main())


# ==================================================================== dead letters


def test_g10_a_late_result_is_a_dead_letter(stage: Stage) -> None:
    """G1, G10: what a call brings after its result was sealed changes nothing there; the host finds it among the dead
    letters, whether it came back or failed, on a task or on a thread, bounded like any result.
    """
    tower = stage.tower(grace=0, max_result_bytes=100)

    @tower.tool(writes="account", timeout=2)
    async def pay() -> str:
        await stage.stubborn("pay", 5)
        return "paid " * 500

    @tower.tool(independent=True, timeout=2)
    def pay_on_a_thread() -> str:
        stage.rest(stage.loop, 6)
        return "paid"

    @tower.tool(independent=True, timeout=2)
    async def fails() -> None:
        await stage.stubborn("fails", 7)
        raise ToolError("the bank said no", applied="no")

    @tower.tool(independent=True, read_only=True, timeout=2)
    async def odd() -> object:
        await stage.stubborn("odd", 8)
        return object()

    @tower.tool(independent=True, read_only=True, timeout=2, encode=lambda value: 1 // 0)
    async def unwritten() -> object:
        await stage.stubborn("unwritten", 9)
        return object()

    @tower.tool(independent=True, timeout=2)
    async def gives_up() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(50)
        await asyncio.sleep(1)
        raise asyncio.CancelledError

    names = ["pay", "pay_on_a_thread", "fails", "odd", "unwritten", "gives_up"]

    async def main() -> None:
        stage.loop = here()
        done = await tower.execute([Call(name, {}, id=f"id-{name}") for name in names], run_id="r")
        assert codes(done) == ["handler_timeout"] * 6
        assert [result.applied for result in done] == ["unknown", "unknown", "unknown", "no", "no", "unknown"]
        await stage.settled(tower)

    stage.run(main())
    letters = tower.dead_letters()
    assert [(one.tool, one.index, one.ok, one.applied, one.late) for one in letters] == [
        ("pay", 0, True, "yes", 3),
        ("pay_on_a_thread", 1, True, "yes", 4),
        ("fails", 2, False, "no", 5),
        ("odd", 3, True, "no", 6),
        ("unwritten", 4, True, "no", 7),
    ]
    assert (letters[0].run_id, letters[0].batch, letters[0].call_id) == ("r", 1, "id-pay")
    assert letters[0].content.startswith("paid paid")
    assert len(letters[0].content.encode()) <= 100
    assert letters[1].content == "paid"
    assert "the bank said no" in letters[2].content
    assert all(letter.content for letter in letters)
    assert "paid" not in repr(letters)
    assert tower.statistics().late_results == 4


def test_g10_what_came_back_although_it_was_told_to_stop(stage: Stage) -> None:
    """G10: a write that was told to stop and finishes within its grace has `applied` "unknown" in its result; that it
    came back is kept.
    """
    tower = stage.tower(grace=5)

    @tower.tool(writes="account", timeout=2)
    async def pay() -> str:
        return await stage.stubborn("pay", 4)

    async def main() -> None:
        done = await tower.execute([Call("pay", {})])
        assert codes(done) == ["handler_timeout"]
        assert done[0].applied == "unknown"

    stage.run(main())
    (letter,) = tower.dead_letters()
    assert (letter.tool, letter.ok, letter.applied, letter.late, letter.content) == ("pay", True, "yes", 0, "pay")


def test_dead_letters_are_bounded(stage: Stage) -> None:
    """G12: the last hundred are kept."""
    tower = stage.tower(grace=0, max_calls_per_batch=200, run_concurrency=200, max_concurrency=200)

    @tower.tool(independent=True, read_only=True, timeout=1)
    async def late(number: int) -> int:
        await stage.stubborn("late", 2)
        return number

    async def main() -> None:
        await tower.execute([Call("late", {"number": number}) for number in range(150)])
        await stage.settled(tower)

    stage.run(main())
    assert tower.statistics().late_results == 150
    assert len({letter.content for letter in tower.dead_letters()}) == MOST_LETTERS


# ==================================================================== the end of a tower


def test_g12_closing_tells_what_was_left(stage: Stage) -> None:
    """G7, G12: `aclose(grace)` gives everything at work that long, tasks and threads alike, and lists what goes on
    after it; what waits or obeys is answered `cancelled`.
    """
    tower = stage.tower(grace=60, pools={"one": 1})

    @tower.tool(independent=True, pools=["one"])
    async def obeys() -> None:
        await stage.work("obeys", 100)

    @tower.tool(independent=True)
    async def cleans_up() -> None:
        await stage.stubborn("cleans_up", 3)

    @tower.tool(independent=True)
    async def stubborn() -> None:
        await stage.stubborn("stubborn", 9)

    @tower.tool(independent=True)
    def quick_thread() -> None:
        stage.rest(stage.loop, 3)

    @tower.tool(independent=True)
    def slow_thread() -> None:
        stage.rest(stage.loop, 9)

    calls = [Call(name, {}) for name in ("obeys", "obeys", "cleans_up", "stubborn", "quick_thread", "slow_thread")]

    async def main() -> CloseReport:
        stage.loop = here()
        run = tower.run("r")
        going = asyncio.ensure_future(run.execute(calls))
        await asyncio.sleep(1)
        report = await tower.aclose(grace=4)
        assert here().time() == 5
        done = await going
        assert codes(done) == ["cancelled"] * 6
        assert [result.still_running for result in done] == [False, False, False, True, True, True]
        await stage.settled(tower)
        return report

    report = stage.run(main())
    assert [(one.tool, one.index, one.ran) for one in report.orphans] == [("slow_thread", 5, 5), ("stubborn", 3, 5)]
    assert (report.cancelled, report.undelivered, report.clean) == (6, 0, False)
    assert str(report).splitlines() == [
        "cancelled: 6 calls",
        "still running: slow_thread, call 5 of batch 1 of run r, for 5.0 s",
        "still running: stubborn, call 3 of batch 1 of run r, for 5.0 s",
    ]
    assert report.to_dict()["orphans"] == [
        {"run_id": "r", "batch": 1, "index": 5, "call_id": "", "tool": "slow_thread", "ran": 5},
        {"run_id": "r", "batch": 1, "index": 3, "call_id": "", "tool": "stubborn", "ran": 5},
    ]


def test_g12_a_caller_that_has_ended_is_not_left_over(stage: Stage) -> None:
    """G12, S10: work that goes on is listed, not the calls above it that have ended and wait for what they lent; what
    ends after the tower is told to observers, and leaves no thread behind.
    """
    tower = stage.tower(grace=1)
    seen = Seen("ended")
    tower.add_observer(seen)

    @tower.tool(independent=True)
    async def stubborn() -> None:
        await stage.stubborn("stubborn", 9)

    @tower.tool(independent=True)
    async def outer(ctx: Context[None]) -> None:
        await ctx.execute([Call("stubborn", {})])

    async def main() -> CloseReport:
        going = asyncio.ensure_future(tower.execute([Call("outer", {})]))
        await asyncio.sleep(1)
        report = await tower.aclose()
        assert [result.still_running for result in await going] == [False]
        await stage.settled(tower)
        return report

    report = stage.run(main())
    assert [one.tool for one in report.orphans] == ["stubborn"]
    until(lambda: bool(seen.events) and all(one.courier.ended for one in tower._courier._all))


def test_closing_a_tower_at_rest(stage: Stage) -> None:
    """G12: a tower of which nothing is at work ends at once, whatever the grace, and says that nothing was left."""
    tower = stage.tower()

    async def main() -> None:
        async with tower.run():
            report = await tower.aclose(grace=1_000)
        assert here().time() == 0
        assert report == CloseReport()
        assert report.clean
        assert str(report) == "nothing was left"

    stage.run(main())
    assert Tower().close() == CloseReport()


def test_events_that_observers_have_not_seen_are_counted() -> None:
    """G12: an observer that never comes back keeps no tower from ending; what it has not seen is counted."""
    stuck = threading.Event()
    tower = Tower(observers=[lambda event: stuck.wait(30)])
    tower.add_tool(lambda: "done", name="work", independent=True)
    assert tower.execute_sync([Call("work", {})]).ok
    report = tower.close(grace=0.01)
    stuck.set()
    assert report.undelivered > 0
    assert str(report) == f"not seen by observers: {report.undelivered} events"


def test_closing_from_a_thread_ends_what_runs_on_other_loops() -> None:
    """P-94, G12: `close()` in a plain thread tells calls of every loop to stop, waits for them, and lists those of
    threads that cannot be told.
    """
    tower = Tower()
    inside, go = threading.Barrier(3), threading.Event()
    results: list[Any] = []

    @tower.tool(independent=True)
    async def sleeps() -> None:
        inside.wait(30)
        await asyncio.sleep(1_000)

    @tower.tool(independent=True)
    def blocks() -> None:
        inside.wait(30)
        go.wait(30)

    threads = [
        threading.Thread(target=lambda: results.append(codes(asyncio.run(tower.execute([Call("sleeps", {})]))))),
        threading.Thread(target=lambda: results.append(codes(tower.execute_sync([Call("blocks", {})])))),
    ]
    for thread in threads:
        thread.start()
    inside.wait(30)
    report = tower.close(grace=0.2)
    assert [one.tool for one in report.orphans] == ["blocks"]
    assert report.cancelled == 2
    go.set()
    for thread in threads:
        thread.join(30)
    assert results == [["cancelled"], ["cancelled"]]
    until(lambda: not tower.statistics().orphans)
    tower.validate()


def test_closing_within_a_loop_by_the_plain_door_does_not_wait(stage: Stage) -> None:
    """P-94: `close()` where a loop runs in this very thread tells calls to stop and returns; they end on their loop."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def sleeps() -> None:
        await stage.work("sleeps", 100)

    async def main() -> None:
        going = asyncio.ensure_future(tower.execute([Call("sleeps", {})]))
        await asyncio.sleep(1)
        assert tower.close().clean
        assert codes(await going) == ["cancelled"]
        assert here().time() == 1

    stage.run(main())


def test_g8_letters_and_reports_show_no_values(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """G8: what is printed of dead letters and of a closed tower has no value of an argument or a result."""
    caplog.set_level(logging.DEBUG)
    tower = stage.tower(grace=0)

    @tower.tool(writes="k:{secret}", timeout=1)
    async def late(secret: str) -> str:
        await stage.stubborn("late", 3)
        return f"value {secret}"

    async def main() -> None:
        await tower.execute([Call("late", {"secret": "S3CRET"})])
        report = await tower.aclose(grace=1)
        assert "S3CRET" not in f"{report} {report!r} {report.to_dict()}"
        await stage.settled(tower)

    stage.run(main())
    assert "S3CRET" not in f"{tower.dead_letters()!r} {caplog.text}"
    assert "S3CRET" in tower.dead_letters()[0].content


def test_what_is_left_over_is_told_in_names() -> None:
    """The records of what is left over are frozen, and compare by what they say."""
    assert Leftover("r", 1, 2, "", "t", 3.0) == Leftover("r", 1, 2, "", "t", 3.0)
    letter = DeadLetter("r", 1, 2, "", "t", True, "yes", 3.0, "text")
    with pytest.raises(AttributeError):
        letter.content = "other"  # type: ignore[misc]
