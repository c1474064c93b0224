"""Workers that are killed while people decide: a decision is used once, whoever runs its call, and nothing runs without
one.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from test_deferring_kill import SOURCE, effects, load, start, stop

from towerman import Call, Journal, Worker
from towerman.records import Approval, Deferred, Unsettled

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

@tower.tool(writes="account:{account}", pools=["crm"], idempotent=False, requires_approval=True)
async def pay(account: int, number: int) -> int:
    return await work("pay", number)

@tower.tool(writes="account:{account}", idempotent=True, requires_approval=True)
async def put(account: int, number: int) -> int:
    return await work("put", number)

@tower.tool(reads="account:{account}", requires_approval=True)
async def peek(account: int, number: int) -> int:
    return await work("peek", number)

@tower.tool(reads="account:{account}")
async def look(account: int, number: int) -> int:
    return await work("look", number)
"""

DYING = """
import os, signal, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import asyncio
from queue_tools import tower
from towerman import Worker

journal = tower.journal
begin = journal.begin_all

def dies(intents):
    if sys.argv[3] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    begin(intents).result()
    os.kill(os.getpid(), signal.SIGKILL)

journal.begin_all = dies
asyncio.run(Worker(tower, poll=0.01).run(once=True))
"""

EDITED = 1_000_000
"""Added to the number of a call that a person has changed."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tools of all workers."""
    (tmp_path / "queue_tools.py").write_text(TOOLS)
    monkeypatch.setenv("WORK_HERE", str(tmp_path))
    monkeypatch.setattr("test_deferring_kill.TOOLS", TOOLS)
    return tmp_path


def fill(here: Path, batches: int, size: int, seed: int) -> dict[str, tuple[str, int, int]]:
    """Put calls into the queue: by handle, tool, account and number."""
    tower, draw = load(here), random.Random(seed)
    found: dict[str, tuple[str, int, int]] = {}

    async def main() -> None:
        number = 0
        async with tower.run("filled") as run:
            for _ in range(batches):
                drawn = []
                for _ in range(size):
                    drawn.append((draw.choice(("pay", "pay", "put", "peek", "look")), draw.randrange(6), number))
                    number += 1
                calls = [Call(tool, {"account": account, "number": one}) for tool, account, one in drawn]
                for result in await run.submit(calls):
                    assert result.handle is not None
                    found[result.handle] = drawn[result.index]
        await tower.aclose()

    asyncio.run(main())
    return found


class People:
    """They decide whatever is in the inbox, at random, some of it twice, and say rubbish besides."""

    def __init__(self, here: Path, calls: dict[str, tuple[str, int, int]], seed: int) -> None:
        self.journal = Journal(here / "j.db")
        self.calls = calls
        self.draw = random.Random(seed)
        self.said: dict[str, str] = {}

    def decide(self, most: int = 100_000) -> None:
        waiting: list[Approval] = self.journal.approvals(state="pending", limit=most).result()
        for one in waiting:
            assert one.handle is not None and one.handle in self.calls
            _, account, number = self.calls[one.handle]
            word = self.draw.choice(("yes", "yes", "yes", "edited", "no"))
            brought = None
            if word == "edited":
                brought = f'{{"account":{account},"number":{number + EDITED}}}'.encode()
            for _ in range(self.draw.choice((1, 2))):
                self.said[one.handle] = word  # before it is written: a worker may be faster than this test
                self.journal.decide(one.approval_id, word != "no", arguments=brought).result()
            for name in (one.approval_id, "apr_unknown", "\udcff", "x" * 5000):
                with pytest.raises(Unsettled):
                    self.journal.decide(name, word == "no").result()

    def calls_now(self) -> dict[str, Deferred]:
        self.journal.requeue_dead().result()
        return {one.handle: one for one in self.journal.deferred_calls(limit=100_000).result()}


def check(here: Path, people: People) -> dict[str, Deferred]:
    """What must hold at any moment, whoever was killed when."""
    calls = people.calls_now()
    assert set(calls) == set(people.calls)
    begun = Counter((tool, number) for what, tool, number in effects(here) if what == "begin")
    wanted: dict[tuple[str, int], str] = {}
    for handle, (tool, _, number) in people.calls.items():
        word = "yes" if tool == "look" else people.said.get(handle)
        if word in ("yes", "edited"):
            wanted[tool, number + (EDITED if word == "edited" else 0)] = handle
    for (tool, number), count in begun.items():
        assert (tool, number) in wanted, f"{tool} {number} ran without a yes for it"
        assert count == 1 or tool != "pay", f"pay {number} began {count} times"
    for handle, one in calls.items():
        word = people.said.get(handle)
        if one.state == "unknown":
            assert one.tool == "pay" and word in ("yes", "edited")
        elif one.state == "done":
            expected = ("rejected", "approval_denied") if word == "no" else ("ok", None)
            assert (one.outcome, one.code) == expected, one
    for one in people.journal.approvals(limit=100_000).result():
        assert one.handle is not None
        key = calls[one.handle].key
        assert one.claimed_for in (None, key)
        if calls[one.handle].outcome == "ok" and calls[one.handle].state == "done":
            assert one.claimed_for == key
    return calls


def drain(here: Path, people: People) -> None:
    """Decide, run and settle until nothing is left."""
    for _ in range(len(people.calls)):
        people.decide()
        done = start(here, "once")
        assert "WorkerReport" in done.communicate("go\n", timeout=240)[0]
        calls = check(here, people)
        for one in people.journal.unknown(100_000).result():
            people.journal.settle(one.number, applied=True, by="test").result()
        if all(one.state == "done" for one in calls.values()):
            break
    calls = check(here, people)
    assert {one.state for one in calls.values()} == {"done"}
    assert people.journal.approvals(state="pending").result() == []
    people.journal.close()


def kill_some(here: Path, kills: int, seed: int) -> None:
    people = People(here, fill(here, batches=max(4, kills // 2), size=20, seed=seed), seed)
    draw = random.Random(seed)
    running = [start(here) for _ in range(2)]
    try:
        for number in range(kills):
            which = number % 2
            assert running[which].stdout.readline() == "ready\n"  # type: ignore[union-attr]  # it is a pipe
            end = time.monotonic() + draw.random() * 0.3
            while time.monotonic() < end:
                people.decide(draw.randrange(1, 5))
                time.sleep(0.01)
            stop(running[which])
            check(here, people)
            running[which] = start(here)
    finally:
        for one in running:
            stop(one)
    drain(here, people)


def test_s4_kill_9_of_workers_uses_no_decision_twice(here: Path) -> None:
    """S4, G10: workers killed at random while people decide, change arguments and deny: nothing runs without a yes for
    exactly that, no payment is made twice, none that was denied is made, and all is answered in the end.
    """
    kill_some(here, 8, seed=5)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_s4_kill_9_of_workers_many_times(here: Path, seed: int) -> None:
    """S4: the same, a hundred kills in all."""
    kill_some(here, 25, seed=seed)


@pytest.mark.parametrize("when", ["before", "after"])
def test_s4_kill_9_between_a_decision_and_the_start(here: Path, when: str) -> None:
    """S4, S14: a worker dies with the yes in its hand: before the intent is on the disk nothing has happened, and the
    next one uses the yes; after it the call is unknown, nobody else uses it, and somebody's word that it did not take
    effect lets it run under the same yes.
    """
    people = People(here, {}, 0)
    tower = load(here)

    async def submit() -> str:
        async with tower.run("filled") as run:
            [one] = await run.submit([Call("pay", {"account": 1, "number": 7})])
        await Worker(tower, poll=0.01).run(once=True)
        assert one.handle is not None
        return one.handle

    handle = asyncio.run(submit())
    [question] = people.journal.approvals(state="pending").result()
    people.journal.decide(question.approval_id, True).result()
    command = [sys.executable, "-c", DYING, SOURCE, str(here), when]
    died = subprocess.run(command, cwd=here, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL and effects(here) == []
    state = people.calls_now()[handle].state
    used = people.journal.approval(question.approval_id).result()
    assert used is not None
    asyncio.run(Worker(tower, poll=0.01).run(once=True))
    if when == "before":
        assert (state, used.claimed_at) == ("queued", None)
    else:
        assert state == "unknown" and used.claimed_at is not None and effects(here) == []
        assert people.calls_now()[handle].state == "unknown"
        [lost] = people.journal.unknown().result()
        people.journal.settle(lost.number, applied=False).result()
        asyncio.run(Worker(tower, poll=0.01).run(once=True))
    assert effects(here) == [("begin", "pay", 7), ("end", "pay", 7)]
    assert people.calls_now()[handle].outcome == "ok"
    tower.close()
    people.journal.close()


def test_s4_several_workers_share_what_was_approved(here: Path) -> None:
    """S4: three workers on one file, decisions while they work: each call runs once."""
    people = People(here, fill(here, batches=10, size=10, seed=9), 9)
    running = [start(here) for _ in range(3)]
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            people.decide()
            if all(one.state == "done" for one in people.calls_now().values()):
                break
            time.sleep(0.02)
    finally:
        for one in running:
            stop(one)
    drain(here, people)
    begun = Counter((tool, number) for what, tool, number in effects(here) if what == "begin")
    assert set(begun.values()) == {1}
    assert len({line.split()[3] for line in (here / "effects").read_text().splitlines()}) >= 2
