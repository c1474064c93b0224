"""The public test kit: virtual time, threads that take turns, rehearsals of towers, and the look afterwards."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import anyio
import pytest

from towerman import Call, Context, Event, PolicyError, RateLimited, Tower
from towerman.testing import (
    Rehearsal,
    Stuck,
    VirtualClock,
    VirtualLoop,
    Visit,
    assert_whole,
    loops,
    overlapped,
    peak,
    run,
)
from towerman.testing.loops import Latch, running

Make = Callable[..., Tower]


def desk(**options: Any) -> Tower:
    """A tower with a bit of everything; its real handlers must not be called."""
    tower = Tower(pools={"crm": 2}, **options)

    @tower.tool(reads="customer:{customer}", pools=["crm"])
    def read(customer: int) -> str:
        raise AssertionError("the real handler was called")

    @tower.tool(writes="customer:{customer}")
    async def rename(customer: int, name: str = "") -> str:
        raise AssertionError("the real handler was called")

    @tower.tool(independent=True)
    async def search(ctx: Context[Any], text: str = "") -> str:
        raise AssertionError("the real handler was called")

    @tower.tool
    def undeclared() -> str:
        raise AssertionError("the real handler was called")

    return tower


def read(customer: int, number: int = 1) -> list[Call]:
    """Some reads of one customer."""
    return [Call("read", {"customer": customer})] * number


# ==================================================================== scripts, and what is seen


def test_declarations_can_be_tested_without_handlers_and_without_time() -> None:
    """G2, G4: in a rehearsal all that was declared holds: reads overlap, a pool lets two in, a write waits its turn."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        done = rehearsal.execute([*read(1, 3), Call("rename", {"customer": 1}), *read(2), Call("search", {})])
        assert done.ok
        assert [result.value for result in done] == ["done"] * 6
        one, two, three = rehearsal.of("read")[:3]
        (rename,) = rehearsal.of("rename")
        assert overlapped(one, two)
        assert not overlapped(one, three)
        assert rename.started >= three.ended == 2.0
        assert rehearsal.peak("read") == 2
        assert rehearsal.peak() == 3
        assert rehearsal.order == ["search", "read", "read", "read", "read", "rename"]
        assert done[2].waited_for == ("pool crm",)
        assert done[3].waited_for[0] == "call 0"
        assert rehearsal.now == 3.0


def test_a_visit_tells_what_its_handler_was_called_with() -> None:
    """A visit has the run, the call, the arguments without the Context, both instants and how it ended."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        script = rehearsal.script("search", seconds=2.5)

        async def main() -> None:
            async with tower.run("run-7") as one:
                await one.execute([Call("search", {"text": "secret"}, id="call_9")])

        rehearsal.run(main)
        (visit,) = rehearsal.visits
        assert script.visits == [visit]
        assert (visit.tool, visit.run_id, visit.call_id, visit.index) == ("search", "run-7", "call_9", 0)
        assert visit.arguments == {"text": "secret"}
        assert (visit.started, visit.ended, visit.outcome) == (0.0, 2.5, "returned")
        for told in (repr(visit), repr(script), repr(rehearsal), rehearsal.story()):  # G8
            assert "secret" not in told
        assert "search (run run-7, call 0)" in rehearsal.story()


@pytest.mark.parametrize("tool", ["read", "search"])
def test_what_a_script_can_do(tool: str) -> None:
    """On the loop and on a thread: its own time, a value, an error, a function in place of the handler."""
    tower = desk()
    call = Call(tool, {"customer": 3} if tool == "read" else {"text": "x"})
    with Rehearsal(tower) as rehearsal:
        rehearsal.script(tool, returns=None, seconds=0)
        assert rehearsal.execute([call])[0].value is None
        assert rehearsal.now == 0
        rehearsal.script(tool, raises=ValueError)
        failed = rehearsal.execute([call])[0]
        assert (failed.code, type(failed.exception)) == ("handler_error", ValueError)
        rehearsal.script(tool, raises=KeyError("k"), seconds=lambda **_: 2)
        assert isinstance(rehearsal.execute([call])[0].exception, KeyError)
        assert rehearsal.now == 3
        rehearsal.script(tool, do=lambda **keywords: sorted(keywords))
        expected = ["customer"] if tool == "read" else ["ctx", "text"]
        assert rehearsal.execute([call])[0].value == expected
        assert [visit.outcome for visit in rehearsal.visits] == ["returned", "raised", "raised", "returned"]


def test_a_script_may_do_as_a_coroutine_function() -> None:
    """`do` may be a coroutine function: it has the Context, waits on virtual time, and makes nested calls (S10)."""
    tower = desk()

    async def agent(ctx: Context[Any], text: str) -> str:
        await asyncio.sleep(5)
        found = await ctx.execute(read(1, 2))
        return f"{text} {len(found)} {found.ok}"

    with Rehearsal(tower) as rehearsal:
        rehearsal.script("search", seconds=0, do=agent)
        assert rehearsal.execute([Call("search", {"text": "a"})])[0].value == "a 2 True"
        assert rehearsal.now == 6
        outer, *inner = rehearsal.visits
        assert all(overlapped(outer, one) for one in inner)


def test_the_last_script_that_fits_holds() -> None:
    """Patterns name several tools at once; a later script goes before an earlier one."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        every = rehearsal.script("re*", returns="a")
        rename = rehearsal.script("rename", returns="b")
        calls = [*read(1), Call("rename", {"customer": 2}), Call("undeclared", {})]
        assert [result.value for result in rehearsal.execute(calls)] == ["a", "b", "done"]
        assert (len(every.visits), len(rename.visits), len(rehearsal.visits)) == (1, 1, 3)


@pytest.mark.parametrize("tool", ["read", "rename"])
def test_what_is_held_goes_on_when_it_is_released(tool: str) -> None:
    """On the loop and on a thread: a held handler waits for the test, which can let one on, or all."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        script = rehearsal.script(tool, hold=True)

        async def main() -> None:
            calls = [Call(tool, {"customer": number}) for number in (1, 2)]
            async with tower.run() as one:
                batch = asyncio.create_task(one.execute(calls))
                await rehearsal.idle()
                assert (rehearsal.now, script.held, len(script.visits)) == (0, 0, 2)
                await asyncio.sleep(10)
                assert script.held == 2
                script.release(1)
                await rehearsal.idle()
                assert (script.held, [visit.ended for visit in script.visits]) == (1, [10, None])
                script.release()
                assert (await batch).ok
                assert (await one.execute(calls)).ok  # nothing is held from now on

        rehearsal.run(main)
        assert [visit.ended for visit in script.visits] == [10, 10, 11, 11]


@pytest.mark.parametrize("tool", ["read", "rename"])
def test_a_release_before_its_time(tool: str) -> None:
    """Who is released while it still takes its time goes on afterwards and is not held."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        script = rehearsal.script(tool, seconds=2, hold=True)

        async def main() -> None:
            task = asyncio.create_task(tower.execute([Call(tool, {"customer": 1})]))
            await asyncio.sleep(1)
            script.release()
            assert (await task).ok

        rehearsal.run(main)
        assert rehearsal.now == 2


def test_a_held_thread_that_is_released_at_the_same_instant() -> None:
    """A thread that comes to be held just when nothing is held any more goes on."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        script = rehearsal.script("read", seconds=lambda customer: customer, hold=True)
        latch: list[Latch] = []

        async def main() -> None:
            task = asyncio.create_task(tower.execute(read(0)))
            await rehearsal.idle()
            script.release(0)
            assert script.held == 1
            script.release()
            late = Latch(running())
            script._hold_thread(late)
            latch.append(late)
            assert (await task).ok

        rehearsal.run(main)
        assert latch[0].opened


def test_what_is_still_held_at_the_end_is_released() -> None:
    """A test that forgets to release leaves no thread and no tower behind: orphans come to their end (G7)."""
    tower = desk(timeout=3, grace=1)
    with Rehearsal(tower) as rehearsal:
        rehearsal.script("*", hold=True)
        done = rehearsal.execute([*read(1), Call("rename", {"customer": 2})])
        assert [result.code for result in done] == ["handler_timeout"] * 2
        assert [result.still_running for result in done] == [True, False]
        assert [visit.outcome for visit in rehearsal.visits] == ["cancelled", "returned"]
        assert tower.statistics().late_results == 1


@pytest.mark.parametrize("hold", [False, True])
def test_a_stubborn_handler_outlives_its_timeout(hold: bool) -> None:
    """G7, P-83: one that no cancel ends is an orphan and keeps its resource until its work has ended."""
    tower = desk(timeout=2, grace=1, max_wait=60)
    with Rehearsal(tower) as rehearsal:
        script = rehearsal.script("rename", seconds=1 if hold else 10, hold=hold, stubborn=True)

        async def main() -> None:
            running().call_later(10, script.release)
            done = await tower.execute([Call("rename", {"customer": 1}), *read(1)])
            assert [(result.code, result.still_running) for result in done] == [
                ("handler_timeout", True),
                (None, False),
            ]

        rehearsal.run(main)
        rename, later = rehearsal.visits
        assert (rename.ended, later.started) == (10, 10)


def test_a_cancelled_handler_is_seen_as_cancelled() -> None:
    """S16: a cancel ends a script on the loop, held or not; the visit says so."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        held = rehearsal.script("rename", hold=True, seconds=0)

        async def main() -> None:
            async with tower.run() as one:
                batch = asyncio.create_task(one.execute([Call("search", {}), Call("rename", {"customer": 1})]))
                await rehearsal.idle()
                one.cancel("the test says so")
                assert [result.outcome for result in await batch] == ["cancelled"] * 2

        rehearsal.run(main)
        assert held.held == 0
        assert [visit.outcome for visit in rehearsal.visits] == ["cancelled"] * 2


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("count", [None, 1])
def test_a_cancel_and_a_release_in_one_step(stubborn: bool, count: int | None) -> None:
    """Who is released in the very step in which it is cancelled is not held again; a stubborn one answers."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        script = rehearsal.script("rename", hold=True, stubborn=stubborn)

        async def main() -> None:
            async with tower.run() as one:
                batch = asyncio.create_task(one.execute([Call("rename", {"customer": 1})]))
                await asyncio.sleep(2)
                one.cancel()
                script.release(count)
                await batch
                assert rehearsal.now == 2

        rehearsal.run(main)
        assert [visit.outcome for visit in script.visits] == ["returned" if stubborn else "cancelled"]


def test_real_handlers_are_seen_too() -> None:
    """`real` leaves handlers as they are, sync and async, with their Context and their errors, and sees them."""
    tower = Tower()

    @tower.tool(independent=True)
    async def slow(ctx: Context[Any], text: str) -> str:
        await asyncio.sleep(7)
        return f"{text} {ctx.index}"

    @tower.tool(independent=True)
    def quick(text: str) -> str:
        raise LookupError(text)

    @tower.tool(independent=True, run_in="loop")
    def inline() -> int:
        return 5

    @tower.tool(independent=True)
    async def other() -> str:
        raise AssertionError("the real handler was called")

    with Rehearsal(tower, real=["slow", "quick", "inl*"]) as rehearsal:
        calls = [Call("slow", {"text": "a"}), Call("quick", {"text": "b"}), Call("inline", {}), Call("other", {})]
        done = rehearsal.execute(calls)
        assert [result.value for result in done] == ["a 0", None, 5, "done"]
        assert isinstance(done[1].exception, LookupError)
        seen = {visit.tool: (visit.ended, visit.outcome) for visit in rehearsal.visits}
        assert seen == {
            "slow": (7, "returned"),
            "quick": (0, "raised"),
            "inline": (0, "returned"),
            "other": (1, "returned"),
        }


def compute(number: int) -> int:
    """For a process, which imports it from here."""
    return number + 1


def test_a_handler_for_a_process_has_a_stand_in_on_a_thread() -> None:
    """`run_in="process"`: the script stands for it here; a real one is at work where it is."""
    tower = Tower(grace=30)
    tower.add_tool(compute, independent=True, run_in="process")
    with Rehearsal(tower) as rehearsal:
        rehearsal.script("compute", returns=0)
        assert rehearsal.execute([Call("compute", {"number": 1})])[0].value == 0
        assert len(rehearsal.visits) == 1
    with Rehearsal(tower, real="compute") as rehearsal:
        assert rehearsal.execute([Call("compute", {"number": 1})])[0].value == 2
        assert rehearsal.now == 0
        tower._core.processes.close()


# ==================================================================== the tower on and off the stage


def test_a_tower_is_put_back_as_it_was() -> None:
    """Afterwards nothing of the rehearsal is left: counts, tools, rules, clock and handlers are what they were."""
    tower = desk()
    before = dict(vars(tower))
    tools = dict(tower._core.tools)
    with Rehearsal(tower) as rehearsal:
        tower.policy("search", max_concurrency=1)
        tower.add_tool(compute, independent=True)
        assert rehearsal.execute([Call("search", {}), Call("search", {}), Call("compute", {"number": 1})]).ok
        assert rehearsal.peak("search") == 1
        assert rehearsal.of("compute")[0].outcome == "returned"
        assert tower.statistics().outcomes["ok"] == 3
    assert vars(tower) == before
    assert tower._core.tools == tools
    assert tower.statistics().outcomes == {"ok": 0}
    assert asyncio.run(tower.execute([Call("search", {})]))[0].code == "handler_error"
    with Rehearsal(tower) as rehearsal:  # and again
        assert rehearsal.execute([Call("search", {})]).ok
        assert rehearsal.visits[0].started == 0


def test_a_tower_may_be_closed_in_a_rehearsal() -> None:
    """An agent loop that ends its tower can be rehearsed; the tower itself is not ended."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:

        async def main() -> None:
            async with tower:
                await tower.execute(read(1))
            assert (await tower.execute(read(1)))[0].code == "run_closed"

        rehearsal.run(main)
    assert asyncio.run(tower.execute(read(1)))[0].code == "handler_error"


def test_observers_see_a_rehearsal() -> None:
    """Who observes the tower observes its rehearsal, to the end."""
    seen: list[str] = []

    def observer(event: Event) -> None:
        seen.append(event.kind)

    tower = desk(observers=[observer])
    with Rehearsal(tower) as rehearsal:
        rehearsal.execute(read(1))
    assert seen[0] == "batch_started"
    assert "batch_finished" in seen


def test_a_rehearsal_that_leaves_something_fails() -> None:
    """G3, R-48: what is lost in a rehearsal is told when it is left; an error inside goes before it."""
    tower = desk()

    def lose(tower: Tower) -> None:
        tower._core.gate.ledger.pools["pool:crm"].held += 1

    with pytest.raises(AssertionError, match="pool:crm"), Rehearsal(tower):
        lose(tower)

    def fail() -> None:
        with Rehearsal(tower):
            lose(tower)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_whole(tower)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (
            lambda tower: Rehearsal(tower, real="serach"),
            "real: no tool of this tower fits 'serach'; did you mean 'search'",
        ),
        (lambda tower: Rehearsal(tower).script("zzz"), "there are 'read', 'rename', 'search', 'undeclared'"),
        (lambda tower: Rehearsal(tower).script(5), "a tool's name, or a pattern"),
        (lambda tower: Rehearsal(tower).of("nix"), "of: no tool"),
        (lambda tower: Rehearsal(tower).script("read", seconds=-1), "script: seconds"),
        (lambda tower: Rehearsal(tower).script("read", raises="no"), "script: raises: an exception or its class"),
        (lambda tower: Rehearsal(tower).script("read", raises=int), "script: raises: an exception or its class"),
        (lambda tower: Rehearsal(tower).script("read", do="no"), "script: do: a function"),
        (lambda tower: Rehearsal(tower).script("read", do=print, raises=KeyError), "two things"),
        (lambda tower: Rehearsal(tower).script("read", hold=1), "script: hold"),
        (lambda tower: Rehearsal(tower).script("read", stubborn=1), "script: stubborn"),
        (lambda tower: Rehearsal(tower).execute(read(1)), "enter it first"),
        (lambda tower: Rehearsal(tower).rest(1), "Rehearsal.rest: for handlers on a thread"),
    ],
)
def test_a_mistake_in_a_test_is_told(use: Callable[[Tower], object], told: str) -> None:
    """A mistake in setting up a rehearsal is a PolicyError that names the place and the fix."""
    with pytest.raises(PolicyError) as caught:
        use(desk())
    assert told in str(caught.value)


def test_a_rest_on_the_loop_is_refused() -> None:
    """`rest` on the loop's own thread would stop time itself: told, not hung."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        rehearsal.script("search", do=lambda ctx, text: rehearsal.rest(1))
        failed = rehearsal.execute([Call("search", {})])[0]
        assert "await asyncio.sleep" in str(failed.exception)


def test_a_rehearsal_needs_a_tower_at_rest() -> None:
    """A tower with open runs, or in a rehearsal already, is not rehearsed; nothing of it is changed."""
    tower = desk()
    one = tower.run()
    with pytest.raises(PolicyError, match="not at rest"), Rehearsal(tower):
        pass
    asyncio.run(one.aclose())
    with Rehearsal(tower) as rehearsal:
        with pytest.raises(PolicyError, match="in a rehearsal already"), Rehearsal(tower):
            pass
        assert rehearsal.execute(read(1)).ok


def test_a_real_loop_is_refused_in_a_rehearsal() -> None:
    """On a real loop virtual time would never come: that is told at once, with the way to do it."""
    tower = desk()
    with Rehearsal(tower), pytest.raises(PolicyError, match=r"run the coroutine by Rehearsal\.run"):
        asyncio.run(tower.execute(read(1)))
    with Rehearsal(tower) as rehearsal:

        async def main() -> None:
            with pytest.raises(PolicyError, match="it is at work already"):
                rehearsal.execute([])
            with pytest.raises(PolicyError, match="await execute"):
                tower.execute_sync([])

        rehearsal.run(main())
    with pytest.raises(RuntimeError, match="not on virtual time"):
        asyncio.run(_running())


async def _running() -> None:
    running()


def test_two_towers_share_a_clock() -> None:
    """Programs with several towers: one clock for all, each with its own scripts; one waits while the other works."""
    one, two = desk(), desk()
    clock = VirtualClock(start=100)
    with Rehearsal(one, clock=clock) as first, Rehearsal(two, clock=clock) as second:
        first.script("search", do=lambda ctx, text: two.execute(read(1)), seconds=0)
        done = first.execute([Call("search", {})])
        assert done[0].value.ok
        assert first.now == second.now == 101
        assert second.order == ["read"]


# ==================================================================== code without a loop


def test_execute_sync_is_on_virtual_time() -> None:
    """A program without an event loop is rehearsed as it is: runs, batches and waits take no real time."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        rehearsal.script("read", seconds=200)
        with tower.run() as one:
            assert one.execute_sync(read(1, 3)).ok
        assert rehearsal.now == 400


def test_a_sync_handler_may_make_calls() -> None:
    """S10: a thread that waits for its own calls holds no time still; it borrows as ever, and goes on afterwards."""
    tower = desk()

    def agent(customer: int) -> str:
        rehearsal.rest(3)
        found = tower.execute_sync(read(1, 2))
        rehearsal.rest(3)
        return str(found.ok)

    with Rehearsal(tower) as rehearsal:
        rehearsal.script("read", seconds=lambda customer: 1 if customer == 1 else 0)
        rehearsal.script("undeclared", seconds=0, do=lambda: agent(5))
        assert rehearsal.execute([Call("undeclared", {}), Call("undeclared", {})])[0].value == "True"
        assert [(visit.tool, visit.started, visit.ended) for visit in rehearsal.visits] == [
            ("undeclared", 0, 7),
            ("read", 3, 4),
            ("read", 3, 4),
            ("undeclared", 7, 14),
            ("read", 10, 11),
            ("read", 10, 11),
        ]


def test_a_thread_of_the_tests_own_is_refused_while_the_loop_runs() -> None:
    """`execute_sync` from a thread that no call owns would need a second clock: told, not hung."""
    tower = desk()
    told: list[BaseException] = []

    def elsewhere() -> None:
        try:
            tower.execute_sync(read(1))
        except PolicyError as error:
            told.append(error)

    with Rehearsal(tower) as rehearsal:

        async def main() -> None:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(loops.PATIENCE)

        rehearsal.run(main)
    assert "at work already" in str(told[0])


# ==================================================================== threads take turns


def story_of_threads() -> str:
    """Twenty-four calls on threads that end and begin at the same instants."""
    tower = desk(max_concurrency=5, run_concurrency=4)
    with Rehearsal(tower) as rehearsal:
        rehearsal.script("read", seconds=lambda customer: customer % 2)
        rehearsal.execute([*(call for number in range(8) for call in read(number, 2)), Call("undeclared", {})] * 1)
        return rehearsal.story()


def test_the_same_test_takes_the_same_steps() -> None:
    """Threads take turns: which of two handlers begins or ends first is not chance."""
    assert len({story_of_threads() for _ in range(5)}) == 1


def test_threads_of_to_thread_take_turns_and_time_waits_for_them() -> None:
    """`asyncio.to_thread` counts: one at a time, in order, and no time passes meanwhile; also one that is cancelled."""
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> int:
        inside.append(number)
        most.append(len(inside))
        inside.pop()
        return number

    async def main() -> list[int]:
        last = asyncio.create_task(asyncio.to_thread(work, 9))
        first = [asyncio.create_task(asyncio.to_thread(work, number)) for number in range(40)]
        await asyncio.sleep(0)
        last.cancel()
        async with asyncio.timeout(1):
            values = [await task for task in first]
        assert last.cancelled()
        assert running().time() == 0
        with ThreadPoolExecutor(1) as own:
            assert await running().run_in_executor(own, work, 5) == 5
        return values

    assert run(main) == list(range(40))
    assert most == [1] * len(most)


def test_another_process_is_waited_for() -> None:
    """An executor of processes cannot be told to take turns; time waits for it all the same."""

    async def main() -> int:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            async with asyncio.timeout(0.5):
                return await running().run_in_executor(pool, compute, 4)

    assert run(main) == 5


def test_a_call_that_is_given_up_before_its_turn() -> None:
    """A thread that comes to its turn when its call was cancelled does nothing, and gives the turn back."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:
        rehearsal.script("read", seconds=0)

        async def main() -> None:
            async with tower.run() as one:
                batch = asyncio.create_task(one.execute(read(1, 2)))
                await asyncio.sleep(0)
                one.cancel()
                assert [result.started for result in await batch] == [False, False]

        rehearsal.run(main)
        assert rehearsal.visits == []


def test_threads_on_a_real_loop_are_as_ever() -> None:
    """Counted workers on a loop of the real kind are plain workers."""
    tower = Tower()
    tower.add_tool(compute, independent=True)
    tower._core.workers = loops.CountedWorkers("towerman-worker")
    assert asyncio.run(tower.execute([Call("compute", {"number": 1})]))[0].value == 2
    tower.close()


def test_a_latch_on_a_closed_loop_holds_nobody() -> None:
    """A thread that is left over when its loop is closed is let go, and so is one that comes later."""
    loop = VirtualLoop()
    latch = Latch(loop)
    waiting = threading.Thread(target=latch.wait)
    loop.outside = 1
    waiting.start()
    while not latch.parked:
        loop.run_until_complete(asyncio.sleep(0))
    queued = threading.Event()
    loop.queue_up(queued)
    loop.queue_up(loop.create_future())
    loop.close()
    waiting.join(loops.PATIENCE)
    assert not waiting.is_alive()
    assert queued.is_set()
    Latch(loop).wait()
    loop.back()


def test_a_latch_that_is_open_holds_nobody() -> None:
    """Opened before the thread comes to it: the thread goes on, without another turn."""

    def work(latch: Latch) -> int:
        latch.wait()
        return running_elsewhere.outside

    async def main() -> int:
        latch = Latch(running())
        latch.open()
        return await asyncio.to_thread(work, latch)

    running_elsewhere = VirtualLoop()
    assert running_elsewhere.run(main()) == 1


def test_turns_at_once_where_that_is_wanted() -> None:
    """`in_turn=False`: threads begin when they are started; a turn whose waiter was cancelled is passed over."""
    loop = VirtualLoop(in_turn=False)
    gone = loop.create_future()
    gone.cancel()
    loop.queue_up(gone)
    assert loop.outside == 0
    event = threading.Event()
    loop.queue_up(event)
    assert (event.is_set(), loop.outside) == (True, 1)
    loop.close()


# ==================================================================== time


def test_time_jumps() -> None:
    """A day passes at once, in the order of its timers, and what is busy at an instant does not move the clock."""
    seen: list[tuple[float, str]] = []

    async def at(when: float, name: str) -> None:
        await asyncio.sleep(when)
        seen.append((running().time(), name))

    async def main() -> float:
        await asyncio.gather(at(86_400, "b"), at(0.1, "a"), at(86_400, "c"))
        for _ in range(1000):
            await asyncio.sleep(0)
        return running().time()

    assert run(main()) == 86_400
    assert seen == [(0.1, "a"), (86_400, "b"), (86_400, "c")]


def test_a_virtual_clock_goes_forward_only() -> None:
    """It stands at exactly the instant that it was set to, and refuses to go back."""
    clock = VirtualClock(0.1)
    assert clock.advance(0.2) == clock.now()
    assert clock.set(12.3) == clock.now() == 12.3
    with pytest.raises(ValueError, match="cannot go back"):
        clock.set(12.2)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
    assert clock.now() == 12.3


def test_what_can_never_end_is_told() -> None:
    """G12: where nothing can go on, the test fails at once and is told who waits and what was seen; it never hangs."""
    tower = desk()

    async def forget() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match=r"no timer is left:\n.*forget"):
        run(forget)
    with Rehearsal(tower) as rehearsal, pytest.raises(Stuck, match="returned   search"):
        rehearsal.run(waits_after(rehearsal))


async def waits_after(rehearsal: Rehearsal) -> None:
    """Somebody who waits for what nobody brings, after a call."""
    await rehearsal._tower.execute([Call("search", {})])
    await asyncio.Event().wait()


def test_a_loop_that_goes_round_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is busy for ever at one instant, or for ever sets another timer, is stopped."""
    monkeypatch.setattr(loops, "TURNS", 50)
    monkeypatch.setattr(loops, "JUMPS", 50)

    async def busy(length: float) -> None:
        while True:
            await asyncio.sleep(length)

    with pytest.raises(Stuck, match="round in circles"):
        run(busy(0))
    with pytest.raises(Stuck, match="always another timer"):
        run(busy(1))


def test_a_thread_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that blocks for real is a failure that says so, after a real while."""
    monkeypatch.setattr(loops, "PATIENCE", 0.01)
    let_go = threading.Event()

    async def main() -> None:
        await asyncio.to_thread(let_go.wait)

    with pytest.raises(Stuck, match="did not come back"):
        run(main)
    let_go.set()


def test_step_moves_time_for_who_is_busy_while_it_waits() -> None:
    """anyio's cancel scopes turn the loop while they wait: with a step their time passes."""

    async def main() -> bool:
        with anyio.move_on_after(0.5) as scope:
            while True:
                await asyncio.sleep(0)
        return scope.cancelled_caught

    assert run(main, step=0.01)


def test_idle_waits_for_all_that_can_go_on() -> None:
    """`idle` returns when everybody else waits, at the same instant; one that was cancelled keeps nobody."""

    async def main() -> None:
        seen: list[int] = []

        async def busy() -> None:
            for number in range(20):
                await asyncio.sleep(0)
                seen.append(number)

        task = asyncio.create_task(busy())
        gone = asyncio.create_task(running().idle())
        await asyncio.sleep(0)
        gone.cancel()
        await running().idle()
        assert len(seen) == 20
        assert running().time() == 0
        await task

    run(main)


def test_one_can_look_before_time_jumps() -> None:
    """`before_jump` is called whenever nothing can go on, before the clock moves: the place for an invariant."""
    seen: list[float] = []
    loop = VirtualLoop()
    loop.before_jump.append(lambda: seen.append(loop.time()))

    async def main() -> None:
        await asyncio.sleep(1)
        await asyncio.sleep(2)

    loop.run(main())
    assert seen == [0, 1]


def test_an_interrupt_goes_through() -> None:
    """What ends a program ends the run of a test, after its leftovers were cancelled."""
    ended: list[str] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("left")

    async def main() -> None:
        task = asyncio.create_task(left())
        await asyncio.sleep(1)
        assert not task.done()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert ended == ["left"]


def test_a_strict_loop_tells_what_is_left() -> None:
    """`leftovers=False`: tasks and timers that outlive the program are a failure."""

    async def leave_a_task() -> None:
        task = asyncio.create_task(asyncio.sleep(9))
        await asyncio.sleep(0)
        assert not task.done()

    async def leave_a_timer() -> None:
        running().call_later(5, print)

    assert VirtualLoop().run(leave_a_task()) is None
    with pytest.raises(AssertionError, match="tasks were left behind"):
        VirtualLoop().run(leave_a_task(), leftovers=False)
    with pytest.raises(AssertionError, match="timers were left behind"):
        VirtualLoop().run(leave_a_timer(), leftovers=False)


def test_a_fault_while_winding_up_is_told() -> None:
    """A leftover that fails the loop at its end is not passed over in silence."""

    async def stubborn() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        assert not task.done()

    with pytest.raises(Stuck):
        run(main)


def test_steps_are_counted_for_who_asks() -> None:
    """`on_tick` is called between any two steps, which is how a test cancels everywhere."""
    seen: list[int] = []

    async def main() -> None:
        running().on_tick = seen.append
        await asyncio.sleep(1)
        await asyncio.sleep(0)

    run(main)
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > 3


# ==================================================================== run, and the looks


def test_run_takes_the_real_handlers() -> None:
    """`run(main, tower)`: the tower's own handlers on virtual time; afterwards it is looked at and put back."""
    tower = Tower(pools={"api": 1})

    @tower.tool(independent=True, pools=["api"])
    async def fetch(page: int) -> int:
        await asyncio.sleep(60)
        return page

    async def main() -> tuple[list[object], float]:
        done = await tower.execute([Call("fetch", {"page": number}) for number in range(3)], deadline=1000)
        return [result.value for result in done], running().time()

    assert run(main, tower) == ([0, 1, 2], 180)
    assert tower.statistics().outcomes == {"ok": 0}

    async def lose() -> None:
        tower._core.gate.ledger.pools["pool:api"].held += 1

    with pytest.raises(AssertionError, match="pool:api"):
        run(lose, tower)
    one = tower.run()
    with pytest.raises(PolicyError, match="not at rest"):
        run(lose(), tower)  # the coroutine is closed, not forgotten
    asyncio.run(one.aclose())


def test_overlap_and_peak() -> None:
    """Half-open: who begins when the other ends did not overlap it; who has not ended overlaps all that comes later."""

    def visit(start: float, end: float | None) -> Visit:
        return Visit("t", "r", "", 0, {}, start, end)

    one, two, three, never, point = visit(0, 2), visit(2, 3), visit(1, 4), visit(3.5, None), visit(1, 1)
    assert not overlapped(one, two)
    assert not overlapped(two, one)
    assert overlapped(one, three)
    assert overlapped(three, two)
    assert overlapped(never, three)
    assert not overlapped(never, one)
    assert overlapped(one, point)
    assert peak([]) == 0
    assert peak([one, two]) == 1
    assert peak([one, two, three, never]) == 2
    assert peak([point]) == 0


def test_assert_whole_tells_what_is_left() -> None:
    """G3, R-48: a tower at work is not whole, one at rest is; looking changes nothing, not even a peak."""
    tower = desk()
    with Rehearsal(tower) as rehearsal:

        async def main() -> None:
            task = asyncio.create_task(tower.execute(read(1)))
            await rehearsal.idle()
            with pytest.raises(AssertionError, match=r"is still at work: .'running': 1"):
                assert_whole(tower)
            await task

        rehearsal.run(main)
        assert_whole(tower)
        assert tower.statistics().pools["crm"].peak == 1
        ledger = tower._core.gate.ledger
        ledger.pools["pool:crm"].held = -1  # the counts agree with nothing
        with pytest.raises(AssertionError):
            assert_whole(tower)
        ledger.pools["pool:crm"].held = 0


def test_orphans_that_never_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """G12: a handler that goes on for ever after its result does not keep the test for ever."""
    monkeypatch.setattr("towerman.testing.rehearsal.LONGEST", 100)
    tower = desk(timeout=1, grace=0)

    async def forever(**_: object) -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                if running().time() > 100:
                    raise

    rehearsal = Rehearsal(tower)
    rehearsal.__enter__()
    rehearsal.script("rename", seconds=0, do=forever)
    with pytest.raises(AssertionError, match="do not end after their results"):
        rehearsal.execute([Call("rename", {"customer": 1})])
    rehearsal.__exit__(AssertionError, None, None)


def test_a_watched_tower_is_rehearsed_apart() -> None:
    """S13, R-64: in a rehearsal a tower in observe mode has a report of its own, limits may change, and neither is left
    behind; nor is what was rehearsed in the tower's own report.
    """
    tower = Tower(mode="observe", pools={"crm": 1})
    tower.add_tool(lambda: "done", name="work", pools=["crm"], independent=True)
    assert tower.execute_sync([Call("work", {})]).ok
    with Rehearsal(tower) as rehearsal:
        rehearsal.execute([Call("work", {})] * 3)
        assert (tower.report().calls, tower.report().limits[0].peak) == (3, 3)
        tower.configure(pools={"crm": 2})
        assert tower.statistics().pools["crm"].limit == 2
    assert tower.options.pools["crm"].permits == 1
    assert tower.report().calls == 1
    assert tower.statistics().pools["crm"].limit == 1
    tower.close()


@pytest.mark.parametrize("way", ["rehearsal", "run"])
def test_r122_a_service_is_heard_in_a_rehearsal(way: str) -> None:
    """R-122: in the test kit, as on the tower itself, a tool without a rate pauses when its service asks for it: for
    calls of its run that wait, and for those that come later.
    """
    tower = Tower(run_concurrency=2)

    @tower.tool(independent=True)
    async def ask() -> None:
        await asyncio.sleep(1)
        raise RateLimited(60)

    async def main() -> list[bool]:
        async with tower.run() as one:
            done = [*await one.execute([Call("ask", {})] * 5), *await one.execute([Call("ask", {})])]
        assert [result.code for result in done] == ["rate_limited"] * 6
        assert asyncio.get_running_loop().time() == 1
        assert tower.statistics().rates["tool:ask"].free_in == 60
        return [result.started for result in done]

    if way == "run":
        started = run(main, tower)
    else:
        with Rehearsal(tower, real="*") as rehearsal:
            started = rehearsal.run(main)
    assert started == [True, True, False, False, False, False]
    assert not tower.statistics().rates, "what is rehearsed has not happened"


def test_a_rehearsal_wires_what_a_tower_wires() -> None:
    """All that a core knows of its tower, and a tower of its core, is of the same pair in a rehearsal; and whatever a
    new core has besides is what the tower's own has.
    """
    tower = desk(journal=":memory:", budgets={"run": {"calls": 5}}, mode="observe")
    before = dict(vars(tower))

    def wired() -> set[str]:
        core = tower._core
        assert core.runs is tower._runs and core.journal is tower._journal
        assert core.pause.__self__ is tower._limits  # type: ignore[attr-defined]
        assert tower._limits._core is core and core.policy is tower.options and core.reader is None
        assert tower._run_count == 0 and not tower._closed
        return {name for name, value in vars(core).items() if value}

    own = wired()
    with Rehearsal(tower):
        assert tower._core is not before["_core"] and tower._limits is not before["_limits"]
        assert wired() - {"random", "watching", "means_asked"} == own - {"watching"}
    assert vars(tower) == before
    tower.close()
