"""Workers that are killed at any point: no deferred call is lost, no effect is repeated, each chain keeps its order."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from towerman import Call, Journal, Tower

SOURCE = str(Path(__file__).resolve().parent.parent / "src")

TOOLS = """
import asyncio, os, random
from towerman import Tower

HERE = os.environ["WORK_HERE"]
tower = Tower(journal=os.path.join(HERE, "j.db"), pools={"crm": 3}, max_concurrency=8, max_queued=100_000,
              max_calls_per_batch=1000)

def note(line):
    file = os.open(os.path.join(HERE, "effects"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, (line + "\\n").encode())
    finally:
        os.close(file)

async def work(kind, number):
    note(f"begin {kind} {number} {os.getpid()}")
    await asyncio.sleep(random.random() / 100)
    note(f"end {kind} {number} {os.getpid()}")
    return number

@tower.tool(writes="account:{account}", pools=["crm"], idempotent=False, when_busy="defer")
async def pay(account: int, number: int) -> int:
    return await work("pay", number)

@tower.tool(writes="account:{account}", idempotent=True, when_busy="defer")
async def put(account: int, number: int) -> int:
    return await work("put", number)

@tower.tool(reads="account:{account}", when_busy="defer")
async def look(account: int, number: int) -> int:
    return await work("look", number)
"""

WORKER = """
import asyncio, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from queue_tools import tower
from towerman import Worker

async def main():
    worker = Worker(tower, poll=0.05, patience=1.0)
    print("ready", flush=True)
    if sys.argv[3] == "once":
        sys.stdin.readline()
    print(await worker.run(once=sys.argv[3] == "once"))
    await tower.aclose()

asyncio.run(main())
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tools of all workers."""
    (tmp_path / "queue_tools.py").write_text(TOOLS)
    monkeypatch.setenv("WORK_HERE", str(tmp_path))
    return tmp_path


def start(here: Path, mode: str = "on") -> subprocess.Popen[str]:
    """A worker process; one that is to leave when all is done waits for a line before it begins."""
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, SOURCE, str(here), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=here,
    )


def stop(worker: subprocess.Popen[str]) -> None:
    """Kill -9."""
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.close()
    worker.stdout.close()


def load(here: Path) -> Tower:
    """The tools, in this process."""
    found: dict[str, Any] = {}
    exec(compile(TOOLS, "queue_tools.py", "exec"), found)
    return found["tower"]  # type: ignore[no-any-return]


def fill(here: Path, batches: int, size: int, seed: int) -> dict[str, tuple[str, int]]:
    """Put calls into the queue, in batches in which some come behind others: by handle, tool and number."""
    tower = load(here)
    draw = random.Random(seed)
    found: dict[str, tuple[str, int]] = {}

    async def main() -> None:
        number = 0
        async with tower.run("filled") as run:
            for _ in range(batches):
                calls = []
                for _ in range(size):
                    tool = draw.choice(("pay", "pay", "put", "look"))
                    calls.append(Call(tool, {"account": draw.randrange(4), "number": number}))
                    number += 1
                for result in await run.submit(calls):
                    assert result.outcome == "pending" and result.handle is not None
                    found[result.handle] = result.tool, json.loads(calls_of(calls, result.index))["number"]
        await tower.aclose()

    def calls_of(calls: list[Call], index: int) -> str:
        return json.dumps(calls[index].arguments)

    asyncio.run(main())
    return found


def effects(here: Path) -> list[tuple[str, str, int]]:
    """What took effect, in the order in which it did: begin or end, tool, number."""
    path = here / "effects"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(what, tool, int(number)) for what, tool, number, _ in (line.split() for line in lines)]


@contextmanager
def workers(here: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Several at work; those that are left are killed."""
    running = [start(here) for _ in range(count)]
    try:
        yield running
    finally:
        for one in running:
            stop(one)


def check(here: Path, queued: dict[str, tuple[str, int]], *, over: bool) -> None:
    """What must hold whoever was killed when."""
    with Journal(here / "j.db") as journal:
        journal.requeue_dead().result()
        calls = {one.handle: one for one in journal.deferred_calls(limit=100_000).result()}
        answers = {handle: journal.deferred(handle).result() for handle in calls}
        unknown = journal.unknown(100_000).result()
    seen = effects(here)  # after the journal: some may be at work still
    begun: dict[tuple[str, int], int] = defaultdict(int)
    ended: dict[tuple[str, int], int] = defaultdict(int)
    for what, tool, number in seen:
        (begun if what == "begin" else ended)[tool, number] += 1
    assert set(calls) == set(queued), "a call was lost, or came from nowhere"
    open_ones = 0
    for handle, (tool, number) in queued.items():
        one = calls[handle]
        count = begun[tool, number]
        if tool == "pay":
            assert count <= 1, f"pay {number} was begun {count} times"
        if one.state == "done" and one.outcome == "ok":
            found = answers[handle]
            assert found is not None
            if found[1] is not None:  # it was not settled by hand
                assert ended[tool, number] >= 1 and found[1].content == str(number), (tool, number, found)
        elif one.state == "unknown":
            open_ones += 1
            assert tool == "pay", "what does no harm is run again"
        elif over:
            raise AssertionError(f"{tool} {number} is {one.state} ({one.outcome}, {one.code})")
    of_queue = [one for one in unknown if one.run_id == "filled" and one.tool == "pay"]
    assert len(of_queue) == open_ones, "each unknown effect is listed, once"
    # In a chain the next one begins when the one before has ended, or was cut off for good.
    chains: dict[str | None, list[Any]] = defaultdict(list)
    for one in calls.values():
        chains[one.chain].append(one)
    place = {(tool, number): at for at, (what, tool, number) in reversed(list(enumerate(seen))) if what == "begin"}
    last = {(tool, number): at for at, (what, tool, number) in enumerate(seen)}
    for chain, members in chains.items():
        if chain is None:
            continue
        members.sort(key=lambda one: one.position)
        ran = [queued[one.handle] for one in members if queued[one.handle] in place]
        for before, after in pairwise(ran):
            assert last[before] < place[after], f"{after} began before {before} had ended"


def settle(here: Path) -> int:
    """A person says of every unknown call that it took effect."""
    with Journal(here / "j.db") as journal:
        journal.requeue_dead().result()
        found = journal.unknown(100_000).result()
        for one in found:
            if not one.harmless:
                journal.settle(one.number, applied=True, by="test").result()
        return len(found)


def kill_some(here: Path, kills: int, seed: int) -> None:
    queued = fill(here, batches=max(6, kills), size=20, seed=seed)
    draw = random.Random(seed)
    with workers(here, 2) as running:
        for number in range(kills):
            which = number % len(running)
            assert running[which].stdout.readline() == "ready\n"  # type: ignore[union-attr]
            time.sleep(draw.random() * 0.25)
            stop(running[which])
            check(here, queued, over=False)
            running[which] = start(here)
    # Behind an unknown call its chain stands still, so draining and settling take turns.
    for _ in range(len(queued)):
        done = start(here, "once")
        assert "WorkerReport" in done.communicate("go\n", timeout=240)[0]
        check(here, queued, over=False)
        if not settle(here):
            break
    check(here, queued, over=True)


def test_r123_kill_9_of_workers_repeats_no_effect_and_loses_no_call(here: Path) -> None:
    """R-123, S14, G10: workers killed at ten random points: no effect takes place twice, each unknown one is listed,
    all others are done once, and every chain kept its order.
    """
    kill_some(here, 10, seed=20)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_r123_kill_9_of_workers_many_times(here: Path, seed: int) -> None:
    """R-123: the same, over a hundred kills in all."""
    kill_some(here, 30, seed=seed)


def test_r123_three_workers_run_two_hundred_calls_once(here: Path) -> None:
    """R-123: three workers on one file run each of 200 calls exactly once, and share the work."""
    queued = fill(here, batches=20, size=10, seed=3)
    running = [start(here, "once") for _ in range(3)]
    for one in running:
        assert one.stdin is not None and one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in running:
        one.stdin.write("go\n")  # type: ignore[union-attr]  # looked at just now
        one.stdin.flush()  # type: ignore[union-attr]
    told = [one.communicate(timeout=240)[0] for one in running]
    assert all("WorkerReport" in one for one in told)
    start(here, "once").communicate("go\n", timeout=240)  # what stood behind a call of a worker, when the others left
    check(here, queued, over=True)
    begun = [(tool, number) for what, tool, number in effects(here) if what == "begin"]
    assert len(begun) == len(set(begun)) == 200
    pids = {line.split()[3] for line in (here / "effects").read_text().splitlines()}
    assert len(pids) >= 2
