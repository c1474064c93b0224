"""Reports of what went wrong elsewhere when agents ran tool calls, each re-created (P-nn).

Every test is the scenario of one report, with its numbers, on virtual time or steered by events. A line of a scenario
that names what does not exist yet (approvals, handles, retries, spans of our own) is held as far as it goes; the
docstring says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import enum
import gc
import itertools
import json
import os
import random
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import Stage, VirtualLoop, gate_of, on_stage, sound

from towerman import Call, Context, Event, JsonlObserver, Result, Run, ToolError, Tower
from towerman.testing import assert_whole

stage = pytest.fixture(on_stage)


def pairing_holds(turn: list[dict[str, Any]]) -> bool:
    """Does a conversation in OpenAI's form answer each of its calls once, in order?"""
    assistant, *results = turn
    return [call["id"] for call in assistant["tool_calls"]] == [result["tool_call_id"] for result in results]


def message(*calls: tuple[str, str, str]) -> dict[str, Any]:
    """An assistant message in OpenAI's form of (id, tool, arguments as JSON text)."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": own, "type": "function", "function": {"name": tool, "arguments": text}} for own, tool, text in calls
        ],
    }


# --- A. Missing or orphaned results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["the run", "the caller"])
def test_p01_a_cancelled_batch_still_answers_every_call(way: str, stage: Stage) -> None:
    """Three calls of five seconds, cancelled after 0.1 s: three results in order, all cancelled, started and not
    started told apart; the export pairs; no task is left alive (P-01, G1, R-87, R-89).
    """
    tower = stage.tower(max_concurrency=2)

    @tower.tool(independent=True)
    async def slow(s: float) -> str:
        return await stage.work("slow", s)

    calls = message(*((f"c{i}", "slow", '{"s": 5}') for i in (1, 2, 3)))

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(0.1)
            if way == "the run":
                run.cancel("the user pressed stop")
                batch = await task
            else:
                task.cancel("the user pressed stop")
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert run.last_batch is not None
                batch = run.last_batch
            sound(batch, calls["tool_calls"])
            assert [result.call_id for result in batch] == ["c1", "c2", "c3"]
            assert [result.outcome for result in batch] == ["cancelled"] * 3
            assert [result.started for result in batch] == [True, True, False]
            assert all("the user pressed stop" in result.message for result in batch)
            assert pairing_holds(batch.turn())
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert stage.clock.now() == pytest.approx(0.1)

    stage.run(main())
    assert stage.ended["slow"] == stage.started["slow"] == 2


@pytest.mark.parametrize("kind", ["raised by itself", "of an inner task"])
def test_p02_a_tools_own_cancelled_error_is_a_result(kind: str, stage: Stage) -> None:
    """A CancelledError that a handler raises is an error of that call; its sibling answers and the caller is not
    cancelled (P-02).
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def inner_cancel() -> None:
        if kind == "raised by itself":
            raise asyncio.CancelledError
        inner = asyncio.ensure_future(asyncio.sleep(10))
        inner.cancel()
        await inner

    @tower.tool(independent=True)
    async def ok() -> str:
        await asyncio.sleep(0.05)
        return "fine"

    async def main() -> None:
        async with tower.run() as run:
            batch = await run.execute([Call("inner_cancel", {}), Call("ok", {})])
        sound(batch, [0, 0])
        assert [(result.outcome, result.code) for result in batch] == [("error", "handler_cancelled"), ("ok", None)]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    stage.run(main())


def test_p02_a_real_cancel_reaches_the_caller_after_sealing(stage: Stage) -> None:
    """The caller's own cancel, at 50 ms, reaches it once, after every call has its result (P-02, S16)."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def inner_cancel() -> None:
        raise asyncio.CancelledError

    @tower.tool(independent=True)
    async def ok() -> str:
        return await stage.work("ok", 5)

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("inner_cancel", {}), Call("ok", {})]))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert run.last_batch is not None
            sound(run.last_batch, [0, 0])
            assert [result.code for result in run.last_batch] == ["handler_cancelled", "cancelled"]

    stage.run(main())


# --- B. Duplicate results, duplicate or empty call ids ----------------------------------------------------------------


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_p04_the_first_terminal_outcome_wins(end: str, stage: Stage) -> None:
    """A call whose result is sealed (its time was over) and that then returns, or raises, keeps its one result; what
    comes later is dropped, and counted where it is a value; nothing crashes (P-04, G1).

    A handler has no result callback here; the second outcome comes from its own end.
    """
    seen: list[Event] = []
    tower = stage.tower(grace=0.5, observers=[seen.append])
    sealed: list[Result] = []

    @tower.tool(independent=True, timeout=1)
    async def bad() -> str:
        await stage.stubborn("bad", 5)
        if end == "raises":
            raise ValueError("after the result")
        return "second result"

    async def main() -> None:
        async with tower.run() as run:
            batch = await run.execute([Call("bad", {}, "c1")], on_result=sealed.append)
            first = batch[0]
            await stage.settled(tower)
            assert batch[0] is first
            assert run.last_batch is not None
            assert list(run.last_batch) == [first]
            assert (first.outcome, first.code, first.still_running) == ("timed_out", "handler_timeout", True)
            assert len(batch.messages("openai")) == 1

    stage.run(main())
    tower.flush(30)
    assert len(sealed) == 1
    assert tower.statistics().late_results == (1 if end == "returns" else 0)
    kinds = [event.kind for event in seen]
    assert kinds.count("finished") == 1
    assert kinds.count("late_result") == (1 if end == "returns" else 0)
    assert kinds[-1] == "ended"


def test_p05_missing_and_repeated_ids_lose_no_call(stage: Stage) -> None:
    """Ids '', '', 'a', 'a': four runs, four results in order, each with its own slot; the export keeps the provider's
    ids where they are unique and fills in the others, the same way every time (P-05, R-116).
    """
    tower = stage.tower()
    runs: list[int] = []

    @tower.tool(independent=True)
    async def echo(x: int) -> int:
        runs.append(x)
        await asyncio.sleep(5 - x)
        return x

    calls = message(*((own, "echo", f'{{"x": {x}}}') for x, own in enumerate(["", "", "a", "a", "b"], 1)))

    async def main() -> list[dict[str, Any]]:
        batch = await tower.execute(calls)
        sound(batch, calls["tool_calls"])
        assert [result.value for result in batch] == [1, 2, 3, 4, 5]
        assert [result.call_id for result in batch] == ["", "", "a", "a", "b"]
        return batch.turn()

    first, second = stage.run(main()), stage.run(main())
    assert sorted(runs) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert first == second
    assert pairing_holds(first)
    ids = [call["id"] for call in first[0]["tool_calls"]]
    assert len(set(ids)) == 5
    assert all(ids)
    assert ids[4] == "b"
    assert "a" in ids
    assert [result["content"] for result in first[1:]] == ["1", "2", "3", "4", "5"]


# --- C. Results in the wrong order or mapped to the wrong call --------------------------------------------------------


def test_p07_results_come_in_emitted_order(stage: Stage) -> None:
    """Three calls of 0.3, 0.2 and 0 seconds: whoever looks on sees them end in the other order, the sealed list has the
    emitted one (P-07, R-106).
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def sleep_echo(t: float, x: str) -> str:
        await asyncio.sleep(t)
        return x

    calls = [Call("sleep_echo", {"t": t, "x": x}) for t, x in ((0.3, "a"), (0.2, "b"), (0.0, "c"))]
    streamed: list[Result] = []

    async def main() -> None:
        async with tower.run() as run:
            batch = await run.execute(calls, on_result=streamed.append)
            sound(batch, calls)
            assert [result.value for result in batch] == ["a", "b", "c"]

    stage.run(main())
    assert [result.value for result in streamed] == ["c", "b", "a"]


def test_p08_random_delays_never_change_the_order(stage: Stage) -> None:
    """33 random batches of two to eight calls with random delays: the exported order is the emitted order each time,
    though not the order in which they ended (P-08, R-106, R-114).
    """
    tower = stage.tower()
    random_ = random.Random(11179)
    mixed = 0

    @tower.tool(independent=True)
    async def sleep_echo(t: float, x: str) -> str:
        await asyncio.sleep(t)
        return x

    for _ in range(33):
        size = random_.randint(2, 8)
        calls = message(
            *((f"id{i}", "sleep_echo", json.dumps({"t": random_.random(), "x": f"answer {i}"})) for i in range(size))
        )
        streamed: list[int] = []

        async def main(calls: dict[str, Any] = calls, streamed: list[int] = streamed) -> list[dict[str, Any]]:
            async with tower.run() as run:
                batch = await run.execute(calls, on_result=lambda result: streamed.append(result.index))
                sound(batch, calls["tool_calls"])
                return batch.messages()

        sent = stage.run(main())
        assert [one["tool_call_id"] for one in sent] == [f"id{i}" for i in range(size)]
        assert [one["content"] for one in sent] == [f"answer {i}" for i in range(size)]
        mixed += streamed != list(range(size))
    assert mixed > 20, "the batches ended in emitted order by themselves: nothing was shown"


@given(delays=st.lists(st.floats(0, 3), min_size=2, max_size=8), limit=st.integers(1, 8))
def test_p08_order_holds_for_any_delays_and_limits(delays: list[float], limit: int) -> None:
    """Whatever the calls take and however many may run at once, results stand in emitted order (P-08, R-106, R-115)."""
    stage = Stage()
    tower = stage.tower(max_concurrency=limit)

    @tower.tool(independent=True)
    async def sleep_echo(t: float, x: int) -> int:
        await asyncio.sleep(t)
        return x

    batch = stage.run(tower.execute([Call("sleep_echo", {"t": t, "x": x}) for x, t in enumerate(delays)]))
    sound(batch, delays)
    assert [result.value for result in batch] == list(range(len(delays)))


# --- D. Unbounded parallel calls --------------------------------------------------------------------------------------


def test_p10_800_calls_run_eight_at_a_time(stage: Stage) -> None:
    """800 calls of 10 ms in one turn on a limit of 8: the peak is 8 exactly, all 800 results are there in order, the
    whole takes 800 / 8 * 10 ms, and hardly any of them waits in the gate meanwhile (P-10, R-46, R-141).
    """
    tower = stage.tower(max_concurrency=8, run_concurrency=800, max_calls_per_batch=800)
    waiting: list[int] = []

    @tower.tool(independent=True)
    async def q(i: int) -> int:
        waiting.append(tower.statistics().waiting)
        await stage.work("q", 0.01)
        return i

    calls = [Call("q", {"i": i}) for i in range(800)]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.value for result in batch] == list(range(800))
    assert stage.peak == 8
    assert tower.statistics().pools["process"].peak == 8
    assert stage.clock.now() == pytest.approx(1.0)
    # Its own siblings do not queue: the rest of the batch stays in the plan, where a call costs a few pointers.
    assert max(waiting) <= 8
    assert gate_of(tower).statistics()["peak_parked"] <= 8


def test_p10_waiters_of_other_runs_are_bounded(stage: Stage) -> None:
    """Many runs at once cannot pile up waiters without end: with a queue of 10, the rest is refused `queue_full`
    (P-10).
    """
    tower = stage.tower(max_concurrency=1, max_queued=10)

    @tower.tool(independent=True)
    async def q() -> None:
        await stage.work("q", 1)

    async def main() -> None:
        batches = await asyncio.gather(*(tower.execute([Call("q", {})]) for _ in range(100)))
        codes = Counter(batch[0].code for batch in batches)
        assert codes == {None: 11, "queue_full": 89}

    stage.run(main())


def test_p11_a_tool_has_a_limit_of_its_own(stage: Stage) -> None:
    """Six `api` and six `db` calls interleaved, limits 2 and 3 and 4 for both: the peaks keep to them, and an `api`
    call that waits for its tool's limit blocks no `db` call that could run (P-11, R-55, R-58).
    """
    tower = stage.tower(max_concurrency=4, run_concurrency=12)
    peaks = {"api": 0, "db": 0}

    async def work(name: str, seconds: float) -> str:
        with stage.on(name):
            peaks[name] = max(peaks[name], stage.running[name])
            await asyncio.sleep(seconds)
        return name

    @tower.tool(independent=True, max_concurrency=2)
    async def api() -> str:
        return await work("api", 10)

    @tower.tool(independent=True, max_concurrency=3)
    async def db() -> str:
        return await work("db", 1)

    calls = [Call("api" if i % 2 == 0 else "db", {}) for i in range(12)]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    assert peaks["api"] == 2
    assert peaks["db"] == 2  # the two places that the api calls leave
    assert stage.peak == 4
    # The db calls are through in threes of one second beside the first two api calls: none waited for an api call.
    assert sorted(end for name, _, end in stage.spans if name == "db") == pytest.approx([1, 1, 2, 2, 3, 3])
    assert stage.clock.now() == pytest.approx(30)


# --- E. Lost updates and shared-state races ---------------------------------------------------------------------------


def test_p13_parallel_edits_of_one_file_all_survive(stage: Stage, tmp_path: Path) -> None:
    """Six edits of six lines of one file and two of another in one batch: all eight are there afterwards, edits of one
    file ran in emitted order, and the two files were worked on at the same time (P-13, R-19, R-20). The file is spelled
    in several ways.
    """
    tower = stage.tower()
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("\n".join(f"old {i}" for i in range(6)))
    two.write_text("\n".join(f"old {i}" for i in range(2)))
    (tmp_path / "link.txt").symlink_to(one)
    (tmp_path / "folder").mkdir()
    spellings = [
        str(one),
        f"{tmp_path}/./one.txt",
        f"{tmp_path}//one.txt",
        f"{tmp_path}/folder/../one.txt",
        str(tmp_path / "link.txt"),
        str(one),
    ]

    @tower.tool(writes="file:{path}")
    async def edit(path: str, old: str, new: str) -> str:
        text = Path(path).read_text()
        with stage.on(f"{Path(path).resolve().name} {old}"):
            await asyncio.sleep(0.02)
        Path(path).write_text(text.replace(old, new))
        return "edited"

    calls = [Call("edit", {"path": path, "old": f"old {i}", "new": f"new {i}"}) for i, path in enumerate(spellings)]
    calls += [Call("edit", {"path": str(two), "old": f"old {i}", "new": f"new {i}"}) for i in range(2)]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    assert one.read_text().split("\n") == [f"new {i}" for i in range(6)]
    assert two.read_text().split("\n") == [f"new {i}" for i in range(2)]
    of_one = [(name, came) for name, came, _ in stage.spans if name.startswith("one.txt")]
    assert [name for name, _ in of_one] == [f"one.txt old {i}" for i in range(6)]
    assert [came for _, came in of_one] == pytest.approx([0.02 * i for i in range(6)])
    assert [came for name, came, _ in stage.spans if name.startswith("two.txt")] == pytest.approx([0, 0.02])


def test_p14_sync_tools_on_one_key_lose_no_increment(stage: Stage) -> None:
    """Twenty calls of a sync tool that reads, waits 5 ms and writes one key, on real threads: the value is 20. On
    twenty keys they overlap (P-14).
    """
    tower = stage.tower(run_concurrency=20)
    store: Counter[str] = Counter()
    loops: list[VirtualLoop] = []

    @tower.tool(writes="state:{key}")
    def inc(key: str) -> int:
        value = store[key]
        stage.sync_work(loops[-1], "inc", 0.005)
        store[key] = value + 1
        return value + 1

    async def main(keys: list[str]) -> None:
        loops.append(asyncio.get_running_loop())  # type: ignore[arg-type]
        batch = await tower.execute([Call("inc", {"key": key}) for key in keys])
        sound(batch, keys)
        assert batch.ok

    stage.run(main(["x"] * 20))
    assert store["x"] == 20
    assert stage.peak == 1
    stage.run(main([f"key {i}" for i in range(20)]))
    assert [store[f"key {i}"] for i in range(20)] == [1] * 20
    assert stage.peak == 20


# --- F. Serialising some tools; read/write order inside a batch -------------------------------------------------------


@pytest.mark.parametrize("declared", [{"sequential": True}, {"writes": "repo:main"}])
def test_p16_sequential_tools_keep_the_emitted_order(declared: dict[str, Any], stage: Stage) -> None:
    """read1, git add, git commit, read2, git push: the git calls run strictly in emitted order, each alone among its
    kind, while the independent reads overlap; in 200 of 200 runs (P-16, R-27).
    """
    tower = stage.tower()
    random_ = random.Random(2628)
    overlapped = 0

    @tower.tool(**declared)
    async def git(cmd: str, seconds: float) -> str:
        return await stage.work(f"git {cmd}", seconds)

    @tower.tool(independent=True, read_only=True)
    async def read(name: str, seconds: float) -> str:
        return await stage.work(f"read {name}", seconds)

    for _ in range(200):
        stage.spans.clear()
        calls = [
            Call(tool, {("cmd" if tool == "git" else "name"): word, "seconds": random_.random()})
            for tool, word in (("read", "1"), ("git", "add"), ("git", "commit"), ("read", "2"), ("git", "push"))
        ]
        batch = stage.run(tower.execute(calls))
        sound(batch, calls)
        assert batch.ok
        spans = {name: (came, went) for name, came, went in stage.spans}
        assert spans["git add"][1] <= spans["git commit"][0]
        assert spans["git commit"][1] <= spans["git push"][0]
        assert spans["read 1"][0] == spans["read 2"][0] == spans["git add"][0], "a read waited for a git call"
        overlapped += spans["read 2"][1] > spans["git add"][0]
    assert overlapped == 200


def test_p17_a_search_waits_for_the_write_in_its_folder(stage: Stage) -> None:
    """write src/a.py, search src, search src, write docs/b: both searches start after the first write has ended and
    overlap each other; the other folder's write overlaps freely (P-17, S1).
    """
    tower = stage.tower()

    @tower.tool(writes="file:{path}")
    async def write(path: str) -> None:
        await stage.work(f"write {path}", 1)

    @tower.tool(reads="file:{folder}/**")
    async def search(folder: str) -> None:
        await stage.work("search", 1)

    calls = [
        Call("write", {"path": "src/a.py"}),
        Call("search", {"folder": "src"}),
        Call("search", {"folder": "src"}),
        Call("write", {"path": "docs/b"}),
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    assert sorted(stage.spans) == [
        ("search", 1, 2),
        ("search", 1, 2),
        ("write docs/b", 0, 1),
        ("write src/a.py", 0, 1),
    ]
    assert batch[1].waited_for == ("call 0",)


# --- I. One failing call discards the rest ----------------------------------------------------------------------------


def test_p25_a_failing_sibling_cancels_nobody(stage: Stage) -> None:
    """ok1 (10 ms), boom (raises at 5 ms), ok2 (50 ms): success, error, success, each started once (P-25, R-108)."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def ok(name: str, seconds: float) -> str:
        return await stage.work(name, seconds)

    @tower.tool(independent=True)
    async def boom() -> None:
        with stage.on("boom"):
            await asyncio.sleep(0.005)
            raise RuntimeError("boom")

    calls = [
        Call("ok", {"name": "ok1", "seconds": 0.01}),
        Call("boom", {}),
        Call("ok", {"name": "ok2", "seconds": 0.05}),
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.outcome for result in batch] == ["ok", "error", "ok"]
    assert stage.started == {"ok1": 1, "boom": 1, "ok2": 1}
    assert [result.value for result in batch if result.ok] == ["ok1", "ok2"]


def exits(tower: Tower, stage: Stage) -> None:
    """Tools of P-26: a command that exits with 1 at once, readers and writers of 20 ms."""

    @tower.tool(independent=True)
    async def shell() -> str:
        raise ToolError("exit status 1: no files match")

    @tower.tool(independent=True, read_only=True)
    async def look(i: int) -> int:
        await stage.work("look", 0.02)
        return i

    @tower.tool(independent=True)
    async def store(i: int) -> int:
        await stage.work("store", 0.02)
        return i


def test_p26_one_benign_error_leaves_26_siblings_alone(stage: Stage) -> None:
    """27 calls, one of which fails at once: 26 successes and one error, in its place (P-26)."""
    tower = stage.tower(max_calls_per_batch=27, run_concurrency=27)
    exits(tower, stage)
    calls = [Call("look", {"i": 0}), Call("shell", {}), *(Call("look", {"i": i}) for i in range(2, 27))]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.outcome for result in batch] == ["ok", "error", *["ok"] * 25]
    assert "exit status 1" in batch[1].content
    assert stage.started == {"look": 26}


def test_p26_fail_fast_names_the_culprit(stage: Stage) -> None:
    """With fail_fast, what has not started is told that a sibling failed, and which; running calls without side effects
    are cancelled, a running write goes on to its end (P-26).
    """
    tower = stage.tower(max_calls_per_batch=27, run_concurrency=6)
    exits(tower, stage)
    calls = [
        Call("look", {"i": 0}),
        Call("store", {"i": 1}),
        Call("look", {"i": 2}),
        Call("shell", {}, "the-culprit"),
        *(Call("look", {"i": i}) for i in range(4, 27)),
    ]
    batch = stage.run(tower.execute(calls, fail_fast=True))
    sound(batch, calls)
    assert (batch[3].outcome, batch[3].code) == ("error", "handler_error")
    assert batch[1].ok
    assert stage.ended["store"] == 1
    for place, result in enumerate(batch):
        if place in (1, 3):
            continue
        assert (result.outcome, result.code) == ("cancelled", "sibling_failed"), f"call {place}: {result!r}"
        assert "call 3" in result.message
        assert "shell" in result.message
    assert [result.started for result in batch[4:]] == [False] * 23
    assert batch[0].started
    assert batch[0].applied == "no"
    assert stage.started == {"look": 2, "store": 1}


# --- J. Cancel not propagating; orphan tasks and processes ------------------------------------------------------------


def test_p28_a_broken_hook_waits_for_the_siblings(stage: Stage) -> None:
    """An error of the caller's own result hook, at 10 ms, reaches the caller after both calls of a second have ended;
    no task is left, and asyncio has nothing to complain about (P-28).
    """
    tower = stage.tower()
    flags: list[str] = []

    @tower.tool(independent=True)
    async def slow(name: str) -> str:
        await stage.work(name, 1)
        flags.append(name)
        return name

    @tower.tool(independent=True)
    async def x() -> str:
        await asyncio.sleep(0.01)
        return "x"

    def broken(result: Result) -> None:
        if result.tool == "x":
            raise OSError("the hook's own fault")

    calls = [Call("slow", {"name": "a"}), Call("slow", {"name": "b"}), Call("x", {})]

    async def main() -> None:
        async with tower.run() as run:
            with pytest.raises(OSError, match="the hook's own fault"):
                await run.execute(calls, on_result=broken)
            assert sorted(flags) == ["a", "b"]
            assert stage.clock.now() == pytest.approx(1)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert run.last_batch is not None
            sound(run.last_batch, calls)
            assert run.last_batch.ok

    stage.run(main())
    gc.collect()  # "exception was never retrieved" is told by the collector; conftest fails on it


def test_p28_a_fault_of_the_runtime_leaves_no_work_behind(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault inside Towerman, while two calls run, reaches the caller after these have ended or were cancelled, with a
    result for each (P-28, G1).
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def slow() -> str:
        return await stage.work("slow", 1)

    @tower.tool(reads="thing:{name}")
    async def x(name: str) -> str:
        return name

    shell_of: list[Any] = []

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([])
            shell_of.append(tower._shells.here())
            original = shell_of[0]._offer_row

            def broken(work: Any, calls: Any) -> None:
                original(work, calls)
                raise ZeroDivisionError("a fault of ours")

            monkeypatch.setattr(shell_of[0], "_offer_row", broken)
            calls = [Call("slow", {}), Call("slow", {}), Call("x", {"name": "n"})]
            with pytest.raises(ZeroDivisionError):
                await run.execute(calls)
            monkeypatch.undo()
            await asyncio.sleep(0)  # the task of a call that was granted and never began has its last turn
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert run.last_batch is not None
            sound(run.last_batch, calls)
            assert stage.running.total() == 0

    stage.run(main())


def processes_of(group: int) -> list[str]:
    """Living processes of a process group (those that only wait to be collected are not alive)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _parent, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    found.append(entry.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes through /proc")
def test_p29_a_cancelled_shell_tool_leaves_no_process() -> None:
    """A tool with a child process in a group of its own is cancelled: its cleanup is waited for, the group is gone, and
    the result says cancelled and started (P-29, R-80). Real processes; the cancel comes when the child is up.
    """
    tower = Tower(grace=60)
    up: list[int] = []
    cleaned: list[str] = []

    async def main() -> None:
        ready = asyncio.Event()

        @tower.tool(independent=True)
        async def sh() -> int:
            child = await asyncio.create_subprocess_exec(
                "sh", "-c", "sleep 60 & echo up; wait", stdout=asyncio.subprocess.PIPE, start_new_session=True
            )
            up.append(child.pid)
            assert child.stdout is not None
            try:
                await child.stdout.readline()
                ready.set()
                return await child.wait()
            except asyncio.CancelledError:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
                while processes_of(child.pid):  # the group's other members die at the system's leisure
                    await asyncio.sleep(0.001)
                cleaned.append("cleaned")
                raise

        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("sh", {})]))
            await ready.wait()
            assert len(processes_of(up[0])) == 2
            run.cancel("enough")
            (result,) = await task
            assert cleaned == ["cleaned"]
            assert processes_of(up[0]) == []
            assert (result.outcome, result.started, result.still_running) == ("cancelled", True, False)
            assert result.applied == "unknown"

    asyncio.run(main())


def test_p29_a_cleanup_that_overruns_is_told(stage: Stage) -> None:
    """A cleanup that takes longer than the grace is not waited for: the result says that the work still goes on, at the
    end of the grace (P-29, G7).
    """
    tower = stage.tower(grace=2)

    @tower.tool(independent=True)
    async def sh() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await stage.work("cleanup", 10)
            raise

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("sh", {})]))
            await asyncio.sleep(0.2)
            run.cancel("enough")
            (result,) = await task
            assert stage.clock.now() == pytest.approx(2.2)
            assert (result.outcome, result.started, result.still_running) == ("cancelled", True, True)
            assert tower.statistics().orphans == 1
            await stage.settled(tower)
            assert stage.ended["cleanup"] == 1

    stage.run(main())


# --- K. Sync tools, blocked event loop, thread exhaustion -------------------------------------------------------------


def test_p31_sync_tools_run_in_parallel_beside_the_loop(stage: Stage) -> None:
    """Five sync calls of 0.2 s on a limit of five take 0.2 s, a heartbeat of 10 ms is never late meanwhile, and context
    variables are visible inside (P-31).
    """
    tower = stage.tower(run_concurrency=5)
    user = contextvars.ContextVar("user", default="nobody")
    seen: list[str] = []

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        beats: list[float] = []

        @tower.tool(independent=True)
        def t() -> None:
            seen.append(user.get())
            stage.sync_work(loop, "t", 0.2)

        async def heart() -> None:
            while True:
                beats.append(stage.clock.now())
                await asyncio.sleep(0.01)

        user.set("somebody")
        beating = asyncio.ensure_future(heart())
        batch = await tower.execute([Call("t", {})] * 5)
        beating.cancel()
        await asyncio.wait([beating])
        assert batch.ok
        assert stage.clock.now() == pytest.approx(0.2)
        gaps = [later - earlier for earlier, later in itertools.pairwise(beats)]
        assert len(gaps) >= 19
        assert max(gaps) < 0.011

    stage.run(main())
    assert seen == ["somebody"] * 5
    assert stage.peak == 5


def test_p31_blocking_threads_meet_while_the_loop_goes_on() -> None:
    """The same by events on a real loop: five handlers that block can all be inside at once, and what lets them go is a
    task on the loop, which a blocked loop could not run; none of them is on the loop's own thread or on its default
    executor (P-31).
    """
    tower = Tower(run_concurrency=5)
    inside = threading.Barrier(6)
    go = threading.Event()
    names: list[str] = []

    @tower.tool(independent=True)
    def t() -> str:
        names.append(threading.current_thread().name)
        inside.wait(30)
        assert go.wait(30)
        return "done"

    async def main() -> None:
        task = asyncio.ensure_future(tower.execute([Call("t", {})] * 5))
        await asyncio.to_thread(inside.wait, 30)
        assert not task.done()
        go.set()
        batch = await task
        assert batch.ok
        assert asyncio.get_running_loop()._default_executor is not None  # type: ignore[attr-defined]  # ours, above
        assert len(set(names)) == 5
        assert not any(name.startswith(("asyncio", "MainThread", "ThreadPool")) for name in names)

    asyncio.run(main())
    tower.close()


def test_p32_falsely_async_tools_on_threads_leave_the_loop_alone(stage: Stage) -> None:
    """Ten calls of a coroutine function that blocks for 0.1 s, declared with run_in="thread": all ten are through in
    0.1 s, a heartbeat of 10 ms is never 50 ms late meanwhile, and no stall is told of (P-32).
    """
    seen: list[Event] = []
    tower = stage.tower(run_concurrency=10, observers=[seen.append])

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        beats: list[float] = []

        @tower.tool(independent=True, run_in="thread")
        async def fake_async() -> str:
            return stage.sync_work(loop, "fake_async", 0.1)

        async def heart() -> None:
            while True:
                beats.append(stage.clock.now())
                await asyncio.sleep(0.01)

        beating = asyncio.ensure_future(heart())
        calls = [Call("fake_async", {})] * 10
        batch = await tower.execute(calls)
        beating.cancel()
        await asyncio.wait([beating])
        sound(batch, calls)
        assert batch.ok
        assert stage.clock.now() == pytest.approx(0.1)
        assert len(beats) >= 10
        assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 0.05

    stage.run(main())
    assert stage.peak == 10
    assert tower.flush(30)
    assert not [event for event in seen if event.kind == "stalled"]


@pytest.mark.parametrize("way", ["on the loop", "on threads", "on threads, undeclared"])
def test_p32_no_count_of_calls_is_a_cliff(way: str) -> None:
    """A service of three sessions that is asked for one by a blocking call, in coroutine functions that await while
    they have it: on the loop the fourth would block the only thread that could give one back. With a pool of three, and
    on threads also without, all calls are through, one session each, for every count up to beyond three times the pool
    (P-32).
    """
    sessions = threading.Semaphore(3)
    tower = Tower(pools={"db": 3}, run_concurrency=12)

    async def query() -> str:
        assert sessions.acquire(timeout=30), "all sessions are taken, and nobody can give one back"
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            sessions.release()
        return "done"

    declared = {"pools": ["db"]} if way != "on threads, undeclared" else {}
    tower.add_tool(query, independent=True, run_in="loop" if way == "on the loop" else "thread", **declared)
    for count in range(1, 13):
        batch = asyncio.run(tower.execute([Call("query", {})] * count))
        assert [result.value for result in batch] == ["done"] * count
    pool = tower.statistics().pools["db"]
    assert (pool.held, pool.peak) == (0, 3 if declared else 0)
    tower.close()


# --- L. Deadlock by nested calls sharing a limiter --------------------------------------------------------------------

SHARED_LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of the process": ({"max_concurrency": 3}, {}),
    "of the run": ({"run_concurrency": 3}, {}),
    "of a pool": ({"pools": {"llm": 3}}, {"pools": ["llm"]}),
}


@pytest.mark.parametrize("ways", ["one batch", "three runs"])
@pytest.mark.parametrize("limit", SHARED_LIMITS)
def test_p34_three_agents_hold_all_three_places(limit: str, ways: str, stage: Stage) -> None:
    """Three agents hold the three places that two leaves of each need as well, each until the others hold theirs: all
    end, no more than three leaves ever work, and no leaf waits longer than the places ask for: two seconds for six
    leaves of one (P-34, R-61). On virtual time a hang fails at once; nothing has to be switched on or off for it.
    """
    options, taken = SHARED_LIMITS[limit]
    tower = stage.tower(**options)
    entered = 0
    all_in = asyncio.Event()

    @tower.tool(independent=True, **taken)
    async def leaf() -> str:
        return await stage.work("leaf", 1)

    @tower.tool(independent=True, **taken)
    async def agent(ctx: Context[None], n: int) -> list[object]:
        nonlocal entered
        entered += 1
        if entered == 3:
            all_in.set()
        await all_in.wait()
        calls = [Call("leaf", {})] * n
        batch = await ctx.execute(calls)
        sound(batch, calls)
        return [result.value for result in batch]

    async def main() -> list[object]:
        call = Call("agent", {"n": 2})
        if ways == "one batch":
            return [result.value for result in await tower.execute([call] * 3)]
        return [batch[0].value for batch in await asyncio.gather(*(tower.execute([call]) for _ in range(3)))]

    assert stage.run(main()) == [["leaf", "leaf"]] * 3
    assert stage.started["leaf"] == 6
    if ways == "one batch" or limit != "of the run":
        assert stage.peak == 3
        assert stage.clock.now() == pytest.approx(2)
    assert all(pool.peak <= 3 for pool in tower.statistics().pools.values() if pool.limit == 3)


def test_p35_a_permit_kept_while_tools_run_is_enough_for_them(stage: Stage) -> None:
    """Four requests of four runs hold all four permits of `model`, a fifth run waits for one, and then each request
    runs a tool that needs a permit: all four tools run at once on their callers' permits, the fifth comes after them,
    and never are five taken. There is no flag to leave the limit out (P-35).
    """
    tower = stage.tower(pools={"model": 4})
    go = asyncio.Event()

    @tower.tool(independent=True, pools=["model"])
    async def tool(name: str) -> str:
        return await stage.work(name, 1)

    @tower.tool(independent=True, pools=["model"])
    async def request(ctx: Context[None], name: str) -> str:
        await go.wait()
        (result,) = await ctx.execute([Call("tool", {"name": name})])
        return result.content

    async def main() -> list[str]:
        names = ["a", "b", "c", "d"]
        asked = [asyncio.ensure_future(tower.execute([Call("request", {"name": name})])) for name in names]
        await turns(10)
        asked.append(asyncio.ensure_future(tower.execute([Call("tool", {"name": "fifth"})])))
        await turns(10)
        pool = tower.statistics().pools["model"]
        assert (pool.held, pool.queued) == (4, 1)
        go.set()
        return [batch[0].content for batch in await asyncio.gather(*asked)]

    assert stage.run(main()) == ["a", "b", "c", "d", "fifth"]
    assert sorted(stage.spans) == [(name, 0.0, 1.0) for name in "abcd"] + [("fifth", 1.0, 2.0)]
    pool = tower.statistics().pools["model"]
    assert (pool.held, pool.peak) == (0, 4)


# --- M. Semaphore or limiter leaks on cancel --------------------------------------------------------------------------

WAYS: dict[str, Callable[[Run, asyncio.Task[Any]], object]] = {
    "the caller's task": lambda run, task: task.cancel(),
    "the run": lambda run, task: run.cancel("no longer wanted"),
    "the one call": lambda run, task: run.cancel("no longer wanted", index=0),
    "its id": lambda run, task: run.cancel("no longer wanted", call_id="b"),
}


async def turns(number: int) -> None:
    """Let the loop go round so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("way", WAYS)
def test_p37_a_cancel_at_the_hand_over_loses_nothing(way: str, stage: Stage) -> None:
    """Limit 1: the holder lets go, the waiter behind it is cancelled some turns of the loop before, at or after that, a
    third stands behind. In 256 interleavings for each way to cancel, the third always runs, nobody runs who was told
    that it did not, and the permit is there at the end (P-37, R-77, R-78, R-83).
    """
    tower = stage.tower(max_concurrency=1)
    seen: Counter[tuple[str, bool]] = Counter()
    go = asyncio.Event()
    holds = 0

    @tower.tool(independent=True)
    async def hold() -> None:
        with stage.on("hold"):
            await go.wait()
            await turns(holds)

    @tower.tool(independent=True)
    async def wait(name: str) -> str:
        with stage.on(name):
            await turns(2)
        return name

    async def round_(before: int) -> None:
        go.clear()
        stage.started.clear()
        async with tower.run() as a, tower.run() as b, tower.run() as c:
            first = asyncio.ensure_future(a.execute([Call("hold", {})]))
            await turns(3)
            second = asyncio.ensure_future(b.execute([Call("wait", {"name": "second"}, "b")]))
            await turns(3)
            third = asyncio.ensure_future(c.execute([Call("wait", {"name": "third"})]))
            await turns(3)
            assert tower.statistics().waiting == 2
            go.set()
            await turns(before)
            WAYS[way](b, second)
            done = await asyncio.gather(first, second, third, return_exceptions=True)
            assert isinstance(done[1], asyncio.CancelledError) <= (way == "the caller's task")
            assert b.last_batch is not None
            (result,) = b.last_batch
            assert result.outcome in ("ok", "cancelled")
            assert result.started == (stage.started["second"] == 1)
            assert stage.started["third"] == 1
            assert done[2].ok  # type: ignore[union-attr]
            seen[result.outcome, result.started] += 1
        assert tower.statistics().pools["process"].held == 0
        tower.validate()

    async def main() -> None:
        nonlocal holds
        for holds, before in itertools.product(range(16), range(16)):  # noqa: B007 - the handler reads `holds`
            await round_(before)

    stage.run(main())
    assert set(seen) >= {("cancelled", False), ("cancelled", True), ("ok", True)}, f"some cases never came: {seen}"
    assert stage.peak == 1


def test_p38_random_cancels_never_shrink_the_limit(stage: Stage) -> None:
    """Limit 2, 500 rounds of five calls of which two random ones are cancelled at random turns of the loop: after each
    round both permits are there, and at the end 50 plain calls run with a peak of 2 (P-38, R-82).
    """
    tower = stage.tower(max_concurrency=2, max_calls_per_batch=50)
    random_ = random.Random(947)
    outcomes: Counter[tuple[str, bool]] = Counter()

    @tower.tool(independent=True)
    async def call(steps: int) -> None:
        with stage.on("call"):
            await turns(steps)

    async def one(run: Run) -> None:
        try:
            await run.execute([Call("call", {"steps": random_.randint(0, 4)})])
        except asyncio.CancelledError:
            pass
        assert run.last_batch is not None
        outcomes[run.last_batch[0].outcome, run.last_batch[0].started] += 1

    async def main() -> None:
        for _ in range(500):
            async with contextlib.AsyncExitStack() as stack:
                runs = [await stack.enter_async_context(tower.run()) for _ in range(5)]
                tasks = [asyncio.ensure_future(one(run)) for run in runs]
                for place in random_.sample(range(5), 2):
                    await turns(random_.randint(0, 6))
                    if random_.random() < 0.5:
                        tasks[place].cancel()
                    else:
                        runs[place].cancel()
                await asyncio.wait(tasks)
            pool = tower.statistics().pools["process"]
            assert (pool.limit, pool.held, pool.queued) == (2, 0, 0)
        stage.peak = 0
        batch = await tower.execute([Call("call", {"steps": 3})] * 50)
        assert batch.ok
        assert stage.peak == 2

    stage.run(main())
    assert len(outcomes) == 3, f"some cases never came: {outcomes}"


# --- P. Starving waiters, fairness, bounded queues --------------------------------------------------------------------


def test_p46_aggressive_callers_do_not_starve_a_slow_one(stage: Stage) -> None:
    """Limit 1, five callers that submit again at once for 100 rounds and one that comes now and then: whoever waits
    first is served within its turn, and nobody waits longer than the queue is long times one service (P-46, R-53).
    """
    tower = stage.tower(max_concurrency=1)
    waits: dict[str, list[float]] = {"slow": [], "fast": []}

    @tower.tool(independent=True)
    async def work(who: str) -> None:
        await stage.work(who, 1)

    async def caller(who: str, rounds: int, pause: float) -> None:
        async with tower.run() as run:
            for _ in range(rounds):
                batch = await run.execute([Call("work", {"who": who})])
                assert batch.ok
                waits[who].append(batch[0].waited)
                if pause:
                    await asyncio.sleep(pause)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(caller("fast", 100, 0))
            group.create_task(caller("slow", 20, 7.3))

    stage.run(main())
    assert len(waits["slow"]) == 20
    assert max(waits["slow"]) <= 6 + 1e-9
    assert max(waits["fast"]) <= 6 + 1e-9
    assert stage.clock.now() == pytest.approx(520)  # the one place was never idle


def test_p46_the_queue_timeout_is_honoured(stage: Stage) -> None:
    """A call behind a busy place is told `wait_timeout` when its two seconds are over, and never starts (P-46,
    R-66).
    """
    tower = stage.tower(max_concurrency=1, max_wait=2)

    @tower.tool(independent=True)
    async def work(who: str) -> None:
        await stage.work(who, 10)

    async def main() -> None:
        first = asyncio.ensure_future(tower.execute([Call("work", {"who": "first"})]))
        await asyncio.sleep(1)
        (late,) = await tower.execute([Call("work", {"who": "second"})])
        assert stage.clock.now() == pytest.approx(3)
        assert (late.code, late.started, late.waited) == ("wait_timeout", False, pytest.approx(2))
        assert (await first).ok

    stage.run(main())
    assert stage.started == {"first": 1}


def test_p47_a_holder_that_takes_again_at_once_lets_others_in(stage: Stage) -> None:
    """Limit 1: one task makes 400 calls of 5 ms with no pause, another submits one at 10 ms: it starts after the
    current call, not after two seconds (P-47, R-53).
    """
    tower = stage.tower(max_concurrency=1)

    @tower.tool(independent=True)
    async def work(who: str) -> None:
        await stage.work(who, 0.005)

    async def loop_() -> None:
        async with tower.run() as run:
            for _ in range(400):
                assert (await run.execute([Call("work", {"who": "a"})])).ok

    async def once() -> None:
        await asyncio.sleep(0.01)
        assert (await tower.execute([Call("work", {"who": "b"})])).ok

    async def main() -> None:
        await asyncio.gather(loop_(), once())

    stage.run(main())
    (came,) = [came for name, came, _ in stage.spans if name == "b"]
    assert came < 0.02
    assert stage.clock.now() == pytest.approx(401 * 0.005)


# --- S. Huge results --------------------------------------------------------------------------------------------------


def test_p55_oversized_results_keep_to_their_bounds(stage: Stage, tmp_path: Path) -> None:
    """Five results of 1.7 MB and a small one, bounds of 20 KB for each and 50 KB for all: each keeps to its bound and
    the sum to the other, the small one is whole, what was cut says so and how large it was, and the trace holds none of
    the text (P-55, R-110, R-111). Reading more by a handle is not part of this.
    """
    trace = tmp_path / "trace.jsonl"
    observer = JsonlObserver(trace)
    tower = stage.tower(max_result_bytes=20_000, max_batch_bytes=50_000, observers=[observer])
    text = "".join(f"line {i:07} of the dump\n" for i in range(70_834))
    size = len(text.encode())
    assert size >= 1_700_000

    @tower.tool(independent=True, read_only=True)
    async def dump() -> str:
        return text

    @tower.tool(independent=True, read_only=True)
    async def small() -> str:
        return "small and whole"

    calls = [*[Call("dump", {})] * 5, Call("small", {})]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    sizes = [len(result.content.encode()) for result in batch]
    assert max(sizes) <= 20_000
    assert sum(sizes) <= 50_000
    assert sum(sizes) > 40_000, "the bound was not used"
    assert batch[5].content == "small and whole"
    for result in batch[:5]:
        assert result.original_bytes == size
        assert str(size) in result.content
        assert result.content.startswith("line 0000000")
        assert result.value == text
    sent = "".join(one["content"] for one in batch.messages("openai"))  # type: ignore[misc]
    assert len(sent.encode()) <= 50_000
    tower.flush(30)
    observer.close()
    recorded = trace.read_text()
    assert recorded.count("\n") > 10
    assert len(recorded) < 10_000
    assert "of the dump" not in recorded


# --- T. Result encoding -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: int
    when: datetime


class Model(pydantic.BaseModel):
    name: str
    price: Decimal


class Colour(enum.Enum):
    RED = "red"


DAY = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)

EVERYDAY: dict[str, tuple[object, object]] = {
    "datetime": (DAY, "2024-02-29T12:30:00+00:00"),
    "datetime key": ({DAY: 1}, {"2024-02-29T12:30:00+00:00": 1}),
    "Decimal": ({"price": Decimal("10.50")}, {"price": "10.50"}),
    "UUID": ([uuid.UUID(int=5)], ["00000000-0000-0000-0000-000000000005"]),
    "dataclass": (Point(1, DAY), {"x": 1, "when": "2024-02-29T12:30:00+00:00"}),
    "pydantic": (Model(name="a", price=Decimal("2.5")), {"name": "a", "price": "2.5"}),
    "bytes": (b"plain text", "plain text"),
    "Path": ({"path": Path("/srv/a")}, {"path": "/srv/a"}),
    "Enum": ([Colour.RED], ["red"]),
    "NaN": ({"ratio": float("nan")}, {"ratio": "NaN"}),
    "set": ({3, 1, 2}, [1, 2, 3]),
    "generator": ((i for i in range(3)), [0, 1, 2]),
}


def test_p58_everyday_values_are_encoded(stage: Stage) -> None:
    """Values that plain JSON does not have (a datetime, also as a key, Decimal, UUID, dataclass, pydantic model, bytes,
    Path, Enum, NaN, set, generator) each give valid content; what has no form fails for its own call only (P-58,
    R-109).
    """
    tower = stage.tower(run_concurrency=20)

    class Strange:
        """Has no form that a model could read."""

    for name, (value, _) in EVERYDAY.items():
        tower.add_tool(lambda value=value: value, name=name.replace(" ", "-"), independent=True, schema={})
    tower.add_tool(lambda: Strange(), name="strange", independent=True)
    calls = [*(Call(name.replace(" ", "-"), {}) for name in EVERYDAY), Call("strange", {}), Call("Enum", {})]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    for (name, (_, wanted)), result in zip(EVERYDAY.items(), batch, strict=False):
        assert result.ok, f"{name}: {result.message}"
        got: object = result.content
        try:
            got = json.loads(result.content, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        except ValueError:
            pass
        assert got == wanted, name
    strange = batch[len(EVERYDAY)]
    assert (strange.outcome, strange.code, strange.started) == ("error", "encoding_error", True)
    assert "Strange" in strange.message
    assert batch[-1].ok


@pytest.mark.parametrize("form", ["openai", "anthropic", "towerman"])
def test_p59_empty_results_have_content(form: str, stage: Stage) -> None:
    """'', None, [], b'' and blanks are successes, and no provider is sent null or empty content for them (P-59)."""
    tower = stage.tower()
    values: list[object] = ["", None, [], b"", "   "]

    @tower.tool(independent=True, read_only=True)
    async def give(i: int) -> object:
        return values[i]

    batch = stage.run(tower.execute([Call("give", {"i": i}, f"c{i}") for i in range(5)]))
    sound(batch, values)
    assert batch.ok
    sent = batch.messages(form)
    blocks = sent[0]["content"] if form == "anthropic" else sent
    assert isinstance(blocks, list)
    assert len(blocks) == 5
    for place, block in enumerate(blocks):
        content = block["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        assert text.strip(), f"{values[place]!r} is sent as {content!r}"
        assert ("empty" in text) == (place != 2)
    assert batch[2].content == "[]"


# --- Y. Malformed arguments, unknown tools ----------------------------------------------------------------------------


def test_p73_empty_and_broken_arguments_are_told_apart(stage: Stage) -> None:
    """'' and blanks run a tool that needs no argument; 'null', broken text, and nothing at all where something is
    required, are `invalid_arguments` with a hint, not started, never taken for {}; siblings run (P-73, R-63).
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def no_argument() -> str:
        stage.started["no_argument"] += 1
        return "ran"

    @tower.tool(independent=True)
    async def weather(city: str) -> str:
        stage.started["weather"] += 1
        return city

    texts = ["", "  ", "null", "{}", '{"city": "San Fra']
    calls = [Call("no_argument", text) for text in texts] + [Call("weather", text) for text in texts]
    calls.append(Call("weather", '{"city": "Oslo"}'))
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.code for result in batch[:5]] == [None, None, "invalid_arguments", None, "invalid_arguments"]
    assert [result.code for result in batch[5:10]] == ["invalid_arguments"] * 5
    assert batch[10].ok
    for result in batch[5:10]:
        assert not result.started
        assert "San Fra" not in result.message
    assert all("city" in batch[place].message for place in (5, 6, 8)), "the hint does not name what is required"
    assert stage.started == {"no_argument": 3, "weather": 1}


def test_p74_unknown_names_cost_nobody_else(stage: Stage) -> None:
    """[ok, Ok, missing, ''] give one success and three `unknown_tool` that list close names; nothing is raised, and a
    name of 10,000 characters is cut in the error and not recorded at all (P-74).
    """
    seen: list[Event] = []
    tower = stage.tower(observers=[seen.append])

    @tower.tool(independent=True)
    async def ok() -> str:
        return "fine"

    calls = [Call("ok", {}), Call("Ok", {}), Call("missing", {}), Call("", {}), Call("ok" * 5000, {})]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.code for result in batch] == [None, *["unknown_tool"] * 4]
    assert "'ok'" in batch[1].message
    assert len(batch[4].tool) <= 128
    assert len(batch[4].message) < 1000
    assert len(batch[4].content) < 1000
    tower.flush(30)
    assert not any("okok" in repr(event) for event in seen)
    for form in ("openai", "anthropic", "towerman"):
        assert len(batch.messages(form)) == (1 if form == "anthropic" else 5)


# --- Z. Exceptions ----------------------------------------------------------------------------------------------------


class Unprintable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


@pytest.mark.parametrize("run_in", ["loop", "thread"])
def test_p76_exceptions_without_text_are_told(run_in: Any, stage: Stage) -> None:
    """ValueError(), TimeoutError(), KeyError('x'), an exception whose text raises, one with 1 MB of text: the type is
    told each time, the message is never empty and capped, and neither a traceback nor the text goes to the model
    (P-76).
    """
    tower = stage.tower()
    errors: list[Exception] = [ValueError(), TimeoutError(), KeyError("x-ray"), Unprintable(), OSError("y" * 1_000_000)]

    @tower.tool(independent=True, run_in=run_in)
    def fail(i: int) -> None:
        local = "a local value"
        raise errors[i] from ValueError(local)

    @tower.tool(independent=True, run_in=run_in)
    def silent() -> None:
        raise ToolError("  ")

    calls = [*(Call("fail", {"i": i}) for i in range(5)), Call("silent", {})]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    for error, result in zip(errors, batch, strict=False):
        assert (result.outcome, result.code, result.started) == ("error", "handler_error", True)
        assert type(error).__name__ in result.message
        assert type(error).__name__ in result.content
        assert len(result.content) < 500
        assert result.exception is error
        for secret in ("x-ray", "yyy", "Traceback", "test_pains", "a local value", "no text"):
            assert secret not in result.content
            assert secret not in result.message
    assert batch[5].message.strip()


def test_p77_groups_are_told_by_their_leaves(stage: Stage) -> None:
    """A group inside a group shows the leaf's type and that it was a group; two leaves are both listed (P-77). Which
    leaf a retry looks at comes with retries.
    """
    tower = stage.tower()

    @tower.tool(independent=True)
    async def one() -> None:
        raise ExceptionGroup("g", [ExceptionGroup("h", [PermissionError("no")])])

    @tower.tool(independent=True)
    async def two() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_(PermissionError("no")))
            group.create_task(raise_(LookupError("no")))

    async def raise_(error: Exception) -> None:
        raise error

    calls = [Call("one", {}), Call("two", {})]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert "PermissionError" in batch[0].message
    assert "group" in batch[0].message
    assert "PermissionError" in batch[1].message
    assert "LookupError" in batch[1].message
    assert "TaskGroup" not in batch[1].message


# --- AB. Timeouts that leave work running -----------------------------------------------------------------------------


def test_p82_a_timed_out_thread_keeps_its_place(stage: Stage) -> None:
    """A sync tool of 8 s with a timeout of 1 s: its result comes at 1 s and says that it still runs; its place stays
    taken until the thread has ended, so limit 1 is still true; the loop is never blocked; shutting down waits no longer
    than the grace (P-82, G7, R-84).
    """
    tower = stage.tower(max_concurrency=1, grace=3, max_wait=60)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()

        @tower.tool(independent=True, timeout=1)
        def slow(name: str, seconds: float) -> str:
            return stage.sync_work(loop, name, seconds)

        (first,) = await tower.execute([Call("slow", {"name": "first", "seconds": 8})])
        assert stage.clock.now() == pytest.approx(1)
        assert (first.outcome, first.code, first.still_running) == ("timed_out", "handler_timeout", True)
        assert first.applied == "unknown"
        pool = tower.statistics().pools["process"]
        assert (pool.held, pool.orphaned) == (1, 1)
        (second,) = await tower.execute([Call("slow", {"name": "second", "seconds": 0.5})])
        assert second.ok
        assert second.waited == pytest.approx(7)
        assert ("second", 8.0, 8.5) in stage.spans
        assert tower.statistics().pools["process"].held == 0

        (third,) = await tower.execute([Call("slow", {"name": "third", "seconds": 100})])
        assert third.still_running
        closing = stage.clock.now()
        await tower.aclose()
        assert stage.clock.now() - closing <= 3
        await stage.settled(tower)

    stage.run(main())
    assert stage.peak == 1


def test_p83_a_late_answer_is_no_second_result(stage: Stage) -> None:
    """A tool that ignores its cancel and answers at 2 s, with a timeout of 0.5 s and a grace of 0.2 s: one result,
    timed out, at 0.7 s; the late value is dropped and counted, and the trace shows both moments (P-83, G1).
    """
    seen: list[Event] = []
    tower = stage.tower(grace=0.2, observers=[seen.append])
    results: list[Result] = []

    @tower.tool(independent=True, timeout=0.5)
    async def deaf() -> str:
        await stage.stubborn("deaf", 2)
        return "done"

    async def main() -> None:
        async with tower.run() as run:
            batch = await run.execute([Call("deaf", {}, "c1")], on_result=results.append)
            assert stage.clock.now() == pytest.approx(0.7)
            await stage.settled(tower)
            assert [result.code for result in batch] == ["handler_timeout"]
            assert "done" not in json.dumps(batch.turn("openai"))
            assert "done" not in json.dumps(run.last_batch.turn("openai"))  # type: ignore[union-attr]
            drawn = batch.timeline()
            assert "handler_timeout" in drawn

    stage.run(main())
    tower.flush(30)
    assert len(results) == 1
    assert tower.statistics().late_results == 1
    moments = {event.kind: event.time for event in seen}
    assert moments["finished"] == pytest.approx(0.7)
    assert moments["late_result"] == moments["ended"] == pytest.approx(2)
    assert all(event.call_id == "c1" for event in seen if event.kind in ("finished", "late_result"))


# --- AE. Context, tracing, leaking arguments --------------------------------------------------------------------------


def test_p91_context_and_span_reach_every_handler(stage: Stage) -> None:
    """Four async and four sync calls, some of which wait for a place: each sees the caller's context variable and its
    active span, so that eight spans have the batch's as their parent; what one sets is not seen by another; queueing
    and running are told apart (P-91). The handlers make the spans themselves here.
    """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class Kept(SpanExporter):
        def __init__(self) -> None:
            self.spans: list[ReadableSpan] = []

        def export(self, spans: Any) -> SpanExportResult:
            self.spans += spans
            return SpanExportResult.SUCCESS

    kept = Kept()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    tower = stage.tower(pools={"narrow": 1}, run_concurrency=8)
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")
    seen: list[str] = []

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()

        @tower.tool(independent=True, pools=["narrow"])
        async def quick(i: int) -> None:
            with tracer.start_as_current_span(f"async {i}"):
                seen.append(user.get())
                user.set(f"changed by {i}")
                await stage.work("quick", 1)
                assert user.get() == f"changed by {i}"

        @tower.tool(independent=True)
        def blocking(i: int) -> None:
            with tracer.start_as_current_span(f"sync {i}"):
                seen.append(user.get())
                user.set(f"changed by {i}")
                stage.sync_work(loop, "blocking", 1)
                assert user.get() == f"changed by {i}"

        user.set("somebody")
        calls = [Call("quick" if i % 2 else "blocking", {"i": i}) for i in range(8)]
        with tracer.start_as_current_span("batch") as parent:
            batch = await tower.execute(calls)
            assert trace.get_current_span() is parent
        assert batch.ok
        assert user.get() == "somebody"
        assert seen == ["somebody"] * 8
        children = [span for span in kept.spans if span.name != "batch"]
        assert len(children) == 8
        for span in children:
            assert span.parent is not None
            assert span.parent.span_id == parent.get_span_context().span_id
        assert [result.waited for result in batch] == pytest.approx([0, 0, 0, 1, 0, 1, 0, 1])
        assert [result.ran for result in batch] == pytest.approx([1] * 8)

    stage.run(main())
    provider.shutdown()


def test_p92_a_secret_argument_is_in_no_record(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """login(token='S3CRET-123') succeeds: the secret is in no trace file, log, drawing or command line output at
    default settings; sizes are (P-92, R-130). Every other place and sink: test_canary.py.
    """
    from towerman import LogObserver
    from towerman.cli import main as command

    trace = tmp_path / "trace.jsonl"
    observer = JsonlObserver(trace)
    caplog.set_level("DEBUG")
    tower = stage.tower(observers=[observer, LogObserver()])

    @tower.tool(writes="session:{token}")
    async def login(token: str) -> str:
        return f"welcome, {token}"

    batch = stage.run(tower.execute([Call("login", '{"token": "S3CRET-123"}')]))
    assert batch.ok
    tower.flush(30)
    observer.close()
    assert command(["trace", str(trace)]) == 0
    out, err = capfd.readouterr()
    recorded = trace.read_text()
    assert "login" in out
    assert f'"size":{len("welcome, S3CRET-123")}' in recorded
    for sink in (recorded, caplog.text, out, err, batch.timeline(), repr(batch), repr(tower.statistics())):
        assert "S3CRET-123" not in sink
    assert "login" in caplog.text


# --- AF. Several event loops ------------------------------------------------------------------------------------------


def test_p94_one_tower_for_three_loops_in_a_row_and_then_three_at_once() -> None:
    """A tower made outside of any loop: three `asyncio.run` in a row, then three threads with a loop each, all with
    calls that have to wait. Everything is answered, on the loop that asked; and the limit counts over all loops: two
    runs hold its two places at one instant while the third, on its own loop, waits for one (P-94).
    """
    tower = Tower(max_concurrency=2, run_concurrency=1)
    lock = threading.Lock()
    met = threading.Event()
    inside: list[int] = []
    peak = 0

    @tower.tool(independent=True)
    async def work(n: int, meet: bool) -> tuple[int, int]:
        nonlocal peak
        thread = threading.get_ident()
        with lock:
            inside.append(thread)
            peak = max(peak, len(inside))
        while meet and not met.is_set():
            with lock:
                if len(set(inside)) == 2 and tower.statistics().waiting:
                    met.set()
            await asyncio.sleep(0)
        with lock:
            inside.remove(thread)
        return n, thread

    def batch(meet: bool) -> tuple[int, list[object]]:
        async def main() -> list[object]:
            async with asyncio.timeout(30):
                return [one.value for one in await tower.execute([Call("work", {"n": n, "meet": meet})] * 4)]

        return threading.get_ident(), asyncio.run(main())

    n = 7
    for _ in range(3):
        here, values = batch(False)
        assert values == [(n, here)] * 4
    with ThreadPoolExecutor(3) as threads:
        for there, values in threads.map(batch, [True] * 3):
            assert values == [(n, there)] * 4
    assert met.is_set()
    assert peak == 2
    assert tower.statistics().pools["process"].peak == 2
    assert_whole(tower)
    tower.close()
