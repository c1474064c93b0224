"""One tower, many loops and threads: towers made at import, loops one after another and side by side, plain threads,
fork.

What happens on several real threads has no virtual time; here the order of events decides, and nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from kit import Stage, on_stage, until, whole_again

from towerman import BatchResult, Call, PolicyError, Pool, Tower
from towerman.gate import Gate
from towerman.runner.sync import SyncDoor, wait

stage = pytest.fixture(on_stage)

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 30


def script(code: str, *, expect: int = 0) -> str:
    """Run a program of its own and return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


# ==================================================================== loops


def test_p94_one_tower_for_several_asyncio_runs_in_a_row() -> None:
    """P-94: a tower made outside of any loop serves one `asyncio.run` after another, with calls that have to queue in
    each, and is whole after each.
    """
    tower = Tower(max_concurrency=2, pools={"db": 1})

    @tower.tool(independent=True, pools=["db"])
    async def query(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @tower.tool(independent=True)
    def compute(n: int) -> int:
        return n

    for _ in range(5):
        calls = [Call(name, {"n": n}) for n in range(5) for name in ("query", "compute")]
        done = asyncio.run(tower.execute(calls))
        assert [one.value for one in done] == [n for n in range(5) for _ in range(2)]
        whole_again(tower)
    tower.close()


def test_p95_loops_side_by_side_share_one_limit() -> None:
    """P-95, G3: four loops on four threads use one tower at once: the limit holds over all of them, every wake-up
    comes on the loop of its call, and nobody is forgotten.
    """
    tower = Tower(max_concurrency=3, pools={"db": Pool(2)}, max_calls_per_batch=200)
    lock = threading.Lock()
    inside: Counter[str] = Counter()
    peaks: Counter[str] = Counter()

    def come(name: str) -> None:
        with lock:
            inside[name] += 1
            peaks[name] = max(peaks[name], inside[name])

    def go(name: str) -> None:
        with lock:
            inside[name] -= 1

    @tower.tool(independent=True, pools=["db"])
    async def query(thread: int) -> bool:
        come("query")
        for _ in range(3):
            await asyncio.sleep(0)
        go("query")
        return threading.get_ident() == thread

    @tower.tool(writes="k:{key}")
    async def write(thread: int, key: int) -> bool:
        come(f"k{key}")
        await asyncio.sleep(0)
        go(f"k{key}")
        return threading.get_ident() == thread

    async def main() -> list[BatchResult]:
        here = threading.get_ident()
        calls = [
            Call("query", {"thread": here}) if n % 3 else Call("write", {"thread": here, "key": n % 2})
            for n in range(60)
        ]
        async with tower.run() as run:
            return list(await asyncio.gather(*(run.execute(calls) for _ in range(3))))

    with ThreadPoolExecutor(4) as threads:
        batches = [batch for each in threads.map(lambda _: asyncio.run(main()), range(4)) for batch in each]
    assert len(batches) == 12
    assert all(batch.ok and all(one.value is True for one in batch) for batch in batches)
    assert peaks["query"] <= 2
    assert peaks["k0"] == peaks["k1"] == 1
    assert tower.statistics().pools["process"].peak <= 3
    whole_again(tower)
    tower.close()


def test_a_run_is_used_from_two_loops() -> None:
    """P-95: one run object, batches from two loops at once: each has its own results."""
    tower = Tower(run_concurrency=1)

    @tower.tool(independent=True)
    async def echo(n: int) -> int:
        await asyncio.sleep(0)
        return n

    run = tower.run()

    def batch(first: int) -> list[Any]:
        done = asyncio.run(run.execute([Call("echo", {"n": first + n}) for n in range(20)]))
        return [one.value for one in done]

    with ThreadPoolExecutor(2) as threads:
        seen = list(threads.map(batch, (0, 100)))
    assert seen == [list(range(20)), list(range(100, 120))]
    asyncio.run(run.aclose())
    whole_again(tower)
    tower.close()


def test_anyio_scopes_cancel_like_asyncio(stage: Stage) -> None:
    """P-37, S16: a level-triggered cancel scope around `execute`: the batch is sealed once, then the scope ends."""
    tower = stage.tower(grace=1.0)

    @tower.tool(independent=True)
    async def slow() -> str:
        return await stage.work("slow", 60)

    async def main() -> None:
        async with tower.run() as run:
            with anyio.move_on_after(0.5) as scope:
                await run.execute([Call("slow", {})] * 3)
            assert scope.cancelled_caught
            assert run.last_batch is not None
            assert [one.code for one in run.last_batch] == ["cancelled"] * 3
            async with anyio.create_task_group() as group:
                group.start_soon(run.execute, [Call("slow", {})])
                await asyncio.sleep(0.1)
                group.cancel_scope.cancel()

    stage.run(main(), step=0.001)


# ==================================================================== threads without a loop


def made() -> Tower:
    """A tower with an async and a sync tool."""
    tower = Tower(max_concurrency=2)

    @tower.tool(independent=True)
    async def on_loop(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @tower.tool(independent=True)
    def in_thread(n: int) -> int:
        return n

    return tower


def test_execute_sync_from_plain_threads() -> None:
    """API: `execute_sync` from many threads at once; async handlers run on one loop of the tower's own."""
    tower = made()
    loops: set[int] = set()

    @tower.tool(independent=True)
    async def where() -> None:
        loops.add(id(asyncio.get_running_loop()))

    def batch(first: int) -> list[Any]:
        calls = [Call(name, {"n": first + n}) for n in range(5) for name in ("on_loop", "in_thread")]
        return [one.value for one in tower.execute_sync([*calls, Call("where", {})])][:-1]

    with ThreadPoolExecutor(6) as threads:
        for number, seen in enumerate(threads.map(batch, range(0, 600, 100))):
            assert seen == [100 * number + n for n in range(5) for _ in range(2)]
    assert len(loops) == 1
    whole_again(tower)
    thread = tower._sync._thread
    assert thread is not None
    assert (thread.name, thread.daemon) == ("towerman-loop", True)
    tower.close()
    until(lambda: not thread.is_alive())
    assert tower.execute_sync([Call("on_loop", {"n": 1})])[0].code == "run_closed"
    tower.close()


def test_a_tower_that_nobody_closed_takes_its_loop_with_it() -> None:
    """G12: a tower that was used by `execute_sync` and dropped leaves no thread behind."""
    tower = made()
    assert tower.execute_sync([Call("on_loop", {"n": 1}), Call("in_thread", {"n": 1})]).ok
    thread = tower._sync._thread
    assert thread is not None
    del tower

    def is_gone() -> bool:
        gc.collect()  # each time: the worker's thread may just have been letting go of its last call
        return not thread.is_alive()

    until(is_gone)


def test_a_run_as_a_plain_context_manager() -> None:
    """API: `with tower.run() as run: run.execute_sync(...)`; leaving it closes it."""
    tower = made()
    with tower.run("plain") as run:
        assert run.execute_sync([Call("on_loop", {"n": 1})])[0].value == 1
        assert run.execute_sync([])[:] == ()
        assert run.last_batch is not None
        assert tower.statistics().runs == 1
    assert tower.statistics().runs == 0
    assert run.execute_sync([Call("on_loop", {"n": 1})])[0].code == "run_closed"
    tower.close()


def test_a_plain_context_manager_where_a_loop_runs(stage: Stage) -> None:
    """API, G12: `with tower.run()` in a coroutine cannot wait; it closes the run all the same and tells what is at work
    to stop, which then ends on its loop. What is raised inside comes out as it is.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def sleeps() -> str:
        return await stage.work("sleeps", 100)

    async def main() -> None:
        with tower.run() as idle:
            assert not await idle.execute([])
        assert tower.statistics().runs == 0
        with pytest.raises(LookupError, match="mine"), tower.run():
            raise LookupError("mine")
        with tower.run() as run:
            going = asyncio.ensure_future(run.execute([Call("sleeps", {})] * 2))
            await asyncio.sleep(1)
        assert not going.done()
        assert [one.code for one in await going] == ["cancelled"] * 2
        assert stage.clock.value == 1
        assert [one.code for one in await run.execute([Call("sleeps", {})])] == ["run_closed"]
        assert tower.statistics().runs == 0

    stage.run(main())


def test_execute_sync_where_a_loop_runs() -> None:
    """API: in a thread whose loop would stand still it is refused in words, and nothing is run."""
    tower = made()

    async def main() -> None:
        with pytest.raises(PolicyError, match="await execute there"):
            tower.execute_sync([Call("on_loop", {"n": 1})])
        with pytest.raises(PolicyError, match="event loop runs in this thread"):
            tower.run().execute_sync([Call("on_loop", {"n": 1})])

    asyncio.run(main())
    assert not tower.statistics().outcomes["ok"]
    tower.close()


PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE", default="nowhere")


def test_execute_sync_keeps_the_callers_context() -> None:
    """P-91: context variables of the calling thread are seen in the handlers."""
    tower = Tower()

    @tower.tool(independent=True)
    async def on_loop() -> str:
        return PLACE.get()

    @tower.tool(independent=True)
    def in_thread() -> str:
        return PLACE.get()

    PLACE.set("here")
    assert [one.value for one in tower.execute_sync([Call("on_loop", {}), Call("in_thread", {})])] == ["here", "here"]
    tower.close()


def test_errors_come_to_the_thread_that_waits() -> None:
    """API, R-84: what `execute` raises, `execute_sync` raises, exits too, and the tower's loop lives on."""
    tower = made()

    @tower.tool(independent=True)
    async def leave() -> None:
        raise SystemExit(3)

    def hook(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tower.execute_sync([Call("on_loop", {"n": 1})], on_result=hook)
    with tower.run() as run:
        with pytest.raises(SystemExit):
            run.execute_sync([Call("leave", {}), Call("on_loop", {"n": 1})])
        assert run.last_batch is not None
        assert run.last_batch[0].code == "handler_error"
    assert tower.execute_sync([Call("on_loop", {"n": 1})]).ok
    whole_again(tower)
    tower.close()


def test_ctrl_c_in_the_thread_that_waits() -> None:
    """S16: an interrupt while `execute_sync` waits: the batch is sealed, then it is raised, and results are there."""
    told = script("""
        import asyncio, os, signal, threading
        from towerman import Call, Tower
        tower = Tower(grace=1)
        @tower.tool(independent=True)
        async def press(n: int) -> str:
            if n == 0:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with tower.run() as run:
            try:
                run.execute_sync([Call("press", {"n": n}) for n in range(3)])
            except KeyboardInterrupt:
                print([one.code for one in run.last_batch], tower.statistics().running)
    """)
    assert told == "['cancelled', 'cancelled', 'cancelled'] 0\n"


def test_s16_an_interrupt_between_any_two_steps_of_the_thread_that_waits() -> None:
    """S16, G12: at whatever line an interrupt comes in `execute_sync`, up to its wait, nothing is left at work when it
    is raised: either no call has started, or the batch was sealed and its results are there.
    """
    lines = (SyncDoor.run.__code__, wait.__code__)
    tower = Tower(grace=1)
    place, waited = 0, False

    @tower.tool(independent=True)
    async def sleeps(n: int) -> None:
        started[n] += 1
        await asyncio.sleep(1e6)

    @tower.tool(independent=True, name="next")
    async def further() -> None:
        await asyncio.sleep(0)

    def look(frame: FrameType, what: str, _: object) -> Any:
        nonlocal steps, waited
        if frame.f_code not in lines or what not in ("call", "line"):
            return look
        steps += 1
        waited = frame.f_code is wait.__code__
        if steps > place or waited:
            raise KeyboardInterrupt(place)
        return look

    before = sys.gettrace()
    while not waited:
        steps = 0
        started = Counter[int]()
        with tower.run() as run:
            sys.settrace(look)
            try:
                with pytest.raises(KeyboardInterrupt):
                    run.execute_sync([Call("sleeps", {"n": n}) for n in range(3)])
            finally:
                sys.settrace(before)
            assert tower.execute_sync([Call("next", {})]).ok  # by then the loop has done what it was handed before
            assert tower.statistics().running == 0, f"after an interrupt at step {place} calls went on"
            if run.last_batch is None:
                assert not started, f"after an interrupt at step {place} nobody knows what was done"
            else:
                assert [one.code for one in run.last_batch] == ["cancelled"] * 3
        place += 1
    assert place > 10
    whole_again(tower)
    tower.close()


def test_s10_a_sync_handler_makes_calls() -> None:
    """S10, R-61: sync handlers that call `execute_sync` borrow what their calls hold; the async ones below run on the
    loop of the batch, where their clients live.
    """
    tower = Tower(max_concurrency=2)
    loops: set[int] = set()

    @tower.tool(independent=True)
    async def leaf(n: int) -> int:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return n

    @tower.tool(independent=True)
    def sync_leaf(n: int) -> int:
        return n

    @tower.tool(independent=True)
    def agent(n: int) -> list[Any]:
        done = tower.execute_sync([Call("leaf", {"n": n}), Call("sync_leaf", {"n": n}), Call("leaf", {"n": n})])
        return [one.value for one in done]

    async def main() -> None:
        loops.add(id(asyncio.get_running_loop()))
        async with asyncio.timeout(PATIENCE):
            done = await tower.execute([Call("agent", {"n": n}) for n in range(4)])
        assert [one.value for one in done] == [[n] * 3 for n in range(4)]

    asyncio.run(main())
    assert len(loops) == 1
    assert tower.statistics().pools["process"].peak <= 2
    done = tower.execute_sync([Call("agent", {"n": n}) for n in range(4)])
    assert [one.value for one in done] == [[n] * 3 for n in range(4)]
    whole_again(tower)
    tower.close()


def test_s10_a_sync_call_that_was_given_up(stage: Stage) -> None:
    """S10, P-82: a sync handler is timed out while it waits for calls of its own: they are cancelled, and it is told
    so.
    """
    tower = Tower(grace=1.0)
    told: list[Any] = []
    entered = threading.Event()

    @tower.tool(independent=True)
    async def forever() -> None:
        entered.set()
        await asyncio.Event().wait()

    @tower.tool(independent=True)
    def agent() -> None:
        told.extend(tower.execute_sync([Call("forever", {})]))

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("agent", {})]))
            assert await asyncio.to_thread(entered.wait, PATIENCE)
            run.cancel("enough", index=0)
            (result,) = await task
            assert (result.code, result.still_running) == ("cancelled", True)
            async with asyncio.timeout(PATIENCE):
                while tower.statistics().orphans:
                    await asyncio.sleep(0)

    asyncio.run(main())
    assert [one.code for one in told] == ["cancelled"]
    whole_again(tower)
    tower.close()


def test_the_loop_of_a_waiting_thread_is_closed() -> None:
    """G12: a thread waits for nested calls on a loop that is closed under it: it is told, and waits no more."""
    tower = Tower()
    entered = threading.Event()
    told: list[BaseException] = []

    @tower.tool(independent=True)
    async def forever() -> None:
        entered.set()
        await asyncio.Event().wait()

    @tower.tool(independent=True)
    def agent() -> None:
        try:
            tower.execute_sync([Call("forever", {})])
        except BaseException as error:
            told.append(error)

    loop = asyncio.new_event_loop()
    task = loop.create_task(tower.execute([Call("agent", {})]))
    while not entered.is_set():
        loop.call_soon(loop.stop)
        loop.run_forever()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    for one in asyncio.all_tasks(loop):
        one._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    del task, one
    until(lambda: told)
    assert "loop" in str(told[0])
    tower.close()


def test_thread_affine_state_is_not_the_towers_business(tmp_path: Path) -> None:
    """R-85: a sync handler opens what belongs to its thread within its call, on any thread, also below another."""
    tower = Tower()
    path = tmp_path / "x.db"

    @tower.tool(independent=True)
    def read() -> int:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return int(connection.execute("select 1").fetchone()[0])

    assert tower.execute_sync([Call("read", {})] * 5).ok
    tower.close()


def test_p95_the_gate_is_touched_under_the_lock_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """P-95: with several loops at work, whatever asks or tells the gate holds the tower's lock, or another loop could
    change what is being looked at.
    """
    tower = Tower(pools={"one": 1}, max_wait=0.05)
    unlocked: list[str] = []

    def checked(name: str) -> Any:
        inner = getattr(Gate, name)

        def outer(gate: Any, *arguments: Any, **options: Any) -> Any:
            if not tower._core.lock.locked():
                unlocked.append(name)
            return inner(gate, *arguments, **options)

        return outer

    names = [name for name in dir(Gate) if not name.startswith("_") and callable(getattr(Gate, name))]
    assert {"offer", "finish", "tick", "cancel", "statistics", "reconfigure"} <= set(names)
    for name in names:
        monkeypatch.setattr(Gate, name, checked(name))

    @tower.tool(independent=True, pools=["one"])
    async def work(seconds: float = 0.0) -> None:
        await asyncio.sleep(seconds)

    @tower.tool(independent=True)
    async def agent() -> None:
        await tower.execute([Call("work", {})])

    async def main() -> None:
        async with tower.run() as run:
            calls = [
                Call("work", {}),
                Call("agent", {}),
                Call("work", {"seconds": 0.1}),
                Call("agent", {}, needs=["a"]),
            ]
            first = asyncio.ensure_future(run.execute([*calls[:3], Call("agent", {}, "a"), calls[3]]))
            second = asyncio.ensure_future(tower.execute([Call("work", {})] * 3))
            await asyncio.sleep(0.01)
            tower.configure(pools={"one": 2})
            run.cancel("enough")
            await asyncio.gather(first, second)
        tower.statistics()

    loops = [asyncio.new_event_loop() for _ in range(2)]
    for loop in loops * 2:
        loop.run_until_complete(main())
    assert tower._core.crowded
    for loop in loops:
        loop.close()
    tower.close()
    tower.validate()
    assert unlocked == []


# ==================================================================== fork


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_tower_after_fork() -> None:
    """P-94, G3: a tower of a server that forks its workers, used before the fork by threads that are at work at that
    moment: in the child nothing is held or waits, all limits are there, and every kind of call works.
    """
    told = script("""
        import asyncio, os, sys, threading, warnings
        warnings.simplefilter("ignore")
        from towerman import Call, Pool, Tower
        tower = Tower(max_concurrency=2, pools={"db": 1, "mine": Pool(1, scope="run")}, observers=[lambda event: None])
        inside, go = threading.Event(), threading.Event()
        @tower.tool(independent=True, pools=["db", "mine"])
        def hold() -> str:
            inside.set(); go.wait(30); return "done"
        @tower.tool(independent=True, pools=["db"])
        async def quick() -> str:
            return "quick"
        @tower.tool(writes="k", max_concurrency=1)
        def write() -> str:
            return "wrote"
        run = tower.run()
        thread = threading.Thread(target=lambda: run.execute_sync([Call("hold", {})] * 2))
        thread.start()
        inside.wait(30)
        child = os.fork()
        calls = [Call("quick", {}), Call("write", {}), Call("quick", {}), Call("write", {})]
        if not child:
            seen = tower.statistics()
            held = [pool.held for pool in seen.pools.values()], seen.running, seen.waiting, seen.runs
            first = [one.content for one in tower.execute_sync(calls)]
            second = [one.content for one in asyncio.run(tower.execute(calls))]
            third = [one.code for one in run.execute_sync([Call("quick", {})])]
            tower.validate()
            tower.close()
            print(sum(held[0]), held[1:], first == second, first, third, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        go.set()
        thread.join()
        print([one.content for one in tower.execute_sync(calls)], [one.content for one in run.last_batch])
    """)
    child, parent = told.splitlines()
    assert child == "0 (0, 0, 1) True ['quick', 'wrote', 'quick', 'wrote'] [None]"
    assert parent == "['quick', 'wrote', 'quick', 'wrote'] ['done', 'done']"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_budgets_after_fork() -> None:
    """R-102, P-94: in the child of a fork what is spent is spent, what the parent's calls have set aside is not, and
    both go on by themselves.
    """
    told = script("""
        import os, threading, warnings
        warnings.simplefilter("ignore")
        from towerman import Budget, Call, Tower
        tower = Tower(pools={"db": 1}, budgets={"process": Budget(calls=7)})
        inside, go = threading.Event(), threading.Event()
        @tower.tool(independent=True, pools=["db"])
        def hold() -> str:
            inside.set(); go.wait(30); return "done"
        @tower.tool(independent=True)
        async def quick() -> str:
            return "quick"
        run = tower.run(budget=Budget(seconds=60, tokens=5))
        thread = threading.Thread(target=lambda: run.execute_sync([Call("hold", {})] * 3))
        thread.start()
        inside.wait(30)
        child = os.fork()
        if not child:
            before = run.remaining
            done = run.execute_sync([Call("quick", {})] * 9)
            tower.validate()
            print(before["calls"], before["tokens"], sum(one.ok for one in done), done.exhausted, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        go.set()
        thread.join()
        tower.validate()
        print(run.remaining["calls"], tower.statistics().budgets["process"].reserved["calls"])
    """)
    assert told.splitlines() == ["6 5 6 True", "4 0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_watched_tower_after_fork() -> None:
    """S13: in the child of a fork a tower in observe mode watches anew: its report speaks of the child alone."""
    told = script("""
        import os
        from towerman import Call, Tower
        tower = Tower(mode="observe", pools={"db": 1})
        @tower.tool(independent=True, pools=["db"])
        def work() -> str:
            return "done"
        tower.execute_sync([Call("work", {})] * 3)
        child = os.fork()
        if not child:
            tower.execute_sync([Call("work", {})] * 2)
        else:
            os.waitpid(child, 0)
        report = tower.report()
        print(report.calls, report.batches, sorted(one.name for one in report.limits), flush=True)
        if not child:
            os._exit(0)
    """)
    assert told.splitlines() == ["2 1 ['db', 'process', 'run']", "3 1 ['db', 'process', 'run']"]
