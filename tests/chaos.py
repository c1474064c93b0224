"""Replicas that share an engine, killed, stopped and cancelled at random, while their server comes and goes.

Each replica is a process of its own with a tower: calls that take a permit of a pool over all, calls that write one of
two files, calls that count in a rate over all. Each handler says when it comes in and when it leaves, with its fence,
on the clock that all processes of a machine have in common. Afterwards an auditor, who knows nothing of towers, goes
through what was said: never more inside than the pool has, never two in one file, no fence smaller than one before it
in that file, no window with more starts than the rate. Each batch has one result a call.

What is done to them: SIGKILL, SIGSTOP for less than a lease, batches cancelled, the server killed and started again
with its data (an append-only file that is written before it answers). Where data are lost the promises are others; that
is tested one by one (test_engines_redis, test_engine_tower).

    python tests/chaos.py --seconds 600 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from towerman import Context, Pool, Tower

PERMITS = 3
FILES = 2
LEASE = 1.0
STARTS = 30
"""Of the rate, in a second."""

SLACK = 0.2
"""Seconds: a start counts from when the server hears of it, which is a little after it."""

EXPECTED = {"lease_lost", "cancelled", "wait_timeout", "engine_unavailable", "deadline_exceeded"}
"""Codes that calls may have here, beside none."""


# ------------------------------------------------------------------------ one replica


async def replica(url: str, seed: int) -> None:
    """Hand in batches for ever, and cancel some of them."""
    tower = Tower(
        engine={"url": url, "lease": LEASE},
        pools={"crm": Pool(PERMITS), "api": Pool(100, rate=f"{STARTS}/s")},
        max_wait=20.0,
    )

    def say(what: str, where: str, ctx: Context) -> None:
        os.write(1, f"{what} {time.monotonic():.6f} {os.getpid()} {where} {ctx.fence or 0}\n".encode())

    @tower.tool(pools=["crm"], independent=True)
    async def look(seconds: float, ctx: Context) -> str:
        """Take a permit."""
        say("+", "crm", ctx)
        try:
            await asyncio.sleep(seconds)
        finally:
            say("-", "crm", ctx)
        return "seen"

    @tower.tool(writes="file:{number}")
    async def write(number: int, seconds: float, ctx: Context) -> str:
        """Write a file."""
        say("+", f"file{number}", ctx)
        try:
            await asyncio.sleep(seconds)
        finally:
            say("-", f"file{number}", ctx)
        return "written"

    @tower.tool(pools=["api"], independent=True)
    async def fetch(ctx: Context) -> str:
        """Start by the rate."""
        say("*", "api", ctx)
        return "fetched"

    chance = random.Random(seed)
    os.write(1, f"= {os.getpid()}\n".encode())
    while True:
        calls: list[dict[str, object]] = [
            {"tool": "look", "arguments": {"seconds": chance.uniform(0.001, 0.05)}} for _ in range(4)
        ]
        calls += [
            {"tool": "write", "arguments": {"number": chance.randrange(FILES), "seconds": chance.uniform(0.001, 0.02)}}
            for _ in range(2)
        ]
        calls += [{"tool": "fetch", "arguments": {}} for _ in range(3)]
        chance.shuffle(calls)
        batch = asyncio.ensure_future(tower.execute(calls))
        if chance.random() < 0.2:
            await asyncio.sleep(chance.uniform(0, 0.05))
            batch.cancel()
        await asyncio.wait({batch})
        if not batch.cancelled():
            results = list(batch.result())
            codes = {result.code for result in results if result.code is not None}
            if len(results) != len(calls) or codes - EXPECTED:
                os.write(1, f"! {len(results)} results, {sorted(codes)}\n".encode())
        tower.validate()


# ------------------------------------------------------------------------ what is done to them


class Said(NamedTuple):
    """A line of a replica."""

    instant: float
    what: str
    process: int
    where: str
    fence: int


class Judgement(NamedTuple):
    """What came of it."""

    started: int
    most: int
    kills: int
    stops: int
    restarts: int
    faults: list[str]


def torment(seconds: float, seed: int, replicas: int = 4) -> Judgement:
    """So long; then the auditor's judgement."""
    from servers import Server  # not for replicas, which are to begin soon

    chance = random.Random(seed)
    server = Server("--appendonly", "yes", "--appendfsync", "always")
    said = server.folder / "said"
    deaths: dict[int, float] = {}
    faults: list[str] = []
    kills = stops = restarts = count = 0
    processes: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        server.start()
        with said.open("ab") as out:

            def spawn() -> subprocess.Popen[bytes]:
                nonlocal count
                count += 1
                command = [sys.executable, __file__, "--replica", server.tcp_url, "--seed", str(1_000 * seed + count)]
                return subprocess.Popen(command, stdout=out, env=environment)

            def kill(process: subprocess.Popen[bytes]) -> None:
                process.kill()
                process.wait()
                deaths[process.pid] = time.monotonic()

            processes += [spawn() for _ in range(replicas)]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(chance.uniform(0.3, 1.2))
                place = chance.randrange(replicas)
                process = processes[place]
                if process.poll() is None and f"= {process.pid}\n" not in said.read_text():
                    continue  # it has not begun yet
                if process.poll() is not None:
                    faults.append(f"a replica has ended by itself, with exit code {process.returncode}")
                    break
                what = chance.random()
                if what < 0.5:
                    kill(process)
                    processes[place] = spawn()
                    kills += 1
                elif what < 0.75:
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(chance.uniform(0.05, 0.5 * LEASE))
                    process.send_signal(signal.SIGCONT)
                    stops += 1
                elif what < 0.85:
                    server.stop()
                    time.sleep(chance.uniform(0.05, 0.3))
                    server.start()
                    restarts += 1
            for process in processes:
                if process.poll() is None:
                    kill(process)
        lines = said.read_text().splitlines()
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.remove()
    faults += [line for line in lines if line.startswith("!")]
    events = []
    for line in lines:
        words = line.split()
        if len(words) == 5 and words[0] in "+-*":
            events.append(Said(float(words[1]), words[0], int(words[2]), words[3], int(words[4])))
    most, found = audit(sorted(events), deaths)
    started = sum(one.what in "+*" for one in events)
    return Judgement(started, most, kills, stops, restarts, faults + found)


def audit(events: list[Said], deaths: dict[int, float]) -> tuple[int, list[str]]:
    """The most that were in the pool at once, and what should not have been."""
    inside: dict[tuple[str, int], int] = {}  # (where, fence): process
    fences: dict[str, int] = {}
    starts: deque[float] = deque()
    dead = deque(sorted((instant, process) for process, instant in deaths.items()))
    faults: list[str] = []
    most = 0
    for one in events:
        while dead and dead[0][0] <= one.instant:
            _, gone = dead.popleft()
            inside = {key: process for key, process in inside.items() if process != gone}
        if one.what == "*":
            starts.append(one.instant)
            while starts[0] <= one.instant - 1.0 + SLACK:
                starts.popleft()
            if len(starts) > STARTS:
                faults.append(f"{len(starts)} starts within {1 - SLACK} s at {one.instant}")
        elif one.what == "-":
            inside.pop((one.where, one.fence), None)
        else:
            inside[one.where, one.fence] = one.process
            here = sum(where == one.where for where, _ in inside)
            if one.where == "crm":
                most = max(most, here)
                if here > PERMITS:
                    faults.append(f"{here} in the pool at {one.instant}")
            else:
                if here > 1:
                    faults.append(f"{here} in {one.where} at {one.instant}")
                if one.fence <= fences.get(one.where, 0):
                    faults.append(f"fence {one.fence} in {one.where} after {fences[one.where]}")
                fences[one.where] = one.fence
    return most, faults


def main() -> int:
    """Torment them, and print what came of it."""
    parser = argparse.ArgumentParser(description="Replicas that share an engine, killed and stopped at random.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="of chance; default: another one each time")
    parser.add_argument("--replica", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    if given.replica:
        asyncio.run(replica(given.replica, seed))
    sys.path.insert(0, str(Path(__file__).parent))
    print(f"seed {seed}, {given.seconds:g} s", flush=True)
    came = torment(given.seconds, seed)
    print(
        f"{came.started:,} starts; {came.kills} kills, {came.stops} stops, {came.restarts} restarts of the server; "
        f"{came.most} of {PERMITS} in the pool at most"
    )
    for fault in came.faults[:20]:
        print(f"FAULT: {fault}")
    print("no fault" if not came.faults else f"{len(came.faults)} faults")
    return 1 if came.faults else 0


if __name__ == "__main__":
    sys.exit(main())
