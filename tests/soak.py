"""The soak: very many calls of every kind on real time, from three loops at once, while limits change (`make soak`).

    python tests/soak.py [--calls 1000000] [--seed 1] [--json]

Theory. What goes wrong once in a hundred thousand calls, or leaks a few bytes with each, no test of a few thousand
shows. So here are three threads, each with an event loop and runs of its own, that hand batches of random calls to one
tower: coroutines, threads, writes of few resources, nested calls, calls that fail, are tried again, hang until their
time is over, share a run, wait for small pools and for rates, are kept away by a breaker or by a service that asks for
a pause. Batches are cancelled at random moments, by their run, by their caller, by a deadline. A fourth thread changes
limits all the while.

House rules. Everything is looked at as it comes: one result a call, in order, with a code that this call may have; no
two writers of a resource inside at once; never more inside than the highest limit that was ever in force. In between
and at the end: the tower's own `validate`, and at the end nothing held, nobody waiting, every handler that began has
ended, and the memory of the process is what it was after the first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from towerman import (
    ApprovalRequest,
    Approved,
    BatchResult,
    Breaker,
    Budget,
    Call,
    Context,
    Denied,
    Journal,
    Pool,
    Rate,
    RateLimited,
    Retry,
    ToolError,
    Tower,
)

LOOPS = 3
KEYS = 7
WINDOW = 60
"""The most starts of `rated` in a tenth of a second that are ever allowed."""

HIGHEST = {"process": 24, "small": 4, "wide": 8}
"""The highest limits that are ever in force."""

MAY: dict[str, set[str | None]] = {
    "quick": {None},
    "read": {None},
    "write": {None},
    "undeclared": {None},
    "plain": {None},
    "fails": {"handler_error"},
    "hangs": {"handler_timeout"},
    "deaf": {None, "handler_timeout"},  # a loop that is slow hears its end before its timer
    "agent": {None},
    "sync_agent": {None},
    "wide": {None, "concurrency_limit"},
    "impatient": {None, "concurrency_limit", "wait_timeout", "queue_full"},
    "shared": {None},
    "merged": {None},
    "rated": {None},
    "flaky": {None, "handler_error", "circuit_open"},
    "repeated": {None},
    "polite": {None, "rate_limited"},
    "asked": {None, "approval_denied", "approval_missing"},
    "charging": {None, "budget_exhausted"},
    "nobody": {"unknown_tool"},
    "broken": {"invalid_arguments"},
}
"""The codes that a call of each tool may have, where its batch was not cancelled."""

SHARES = {
    "quick": 40,
    "read": 12,
    "write": 12,
    "undeclared": 3,
    "plain": 6,
    "fails": 4,
    "hangs": 0.4,
    "deaf": 0.1,
    "agent": 2,
    "sync_agent": 0.3,
    "wide": 3,
    "impatient": 4,
    "shared": 6,
    "merged": 4,
    "rated": 4,
    "flaky": 3,
    "repeated": 3,
    "polite": 1,
    "asked": 2,
    "charging": 2,
    "nobody": 1,
    "broken": 1,
}

ENDED: set[str | None] = {"cancelled", "deadline_exceeded", "run_closed", "sibling_failed", "wait_timeout"}
"""Codes of calls whose batch was ended early, or whose run had a deadline."""

MEMORY_SLACK = 24
"""Megabytes that the process may grow by after the first tenth: arenas of the allocator, not objects."""


async def approver(request: ApprovalRequest) -> Approved | Denied | None:
    """A person who decides by the number."""
    n = request.arguments["n"]
    await asyncio.sleep(0)
    return Approved() if n % 3 == 0 else Denied("no") if n % 3 == 1 else None  # type: ignore[operator]  # it is a number


@dataclass
class Figures:
    """What a soak has seen.

    Attributes:
        calls: handed in by the loops.
        nested: handed in by handlers.
        megabytes: resident memory after each tenth.
    """

    calls: int = 0
    nested: int = 0
    batches: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    cancelled_batches: int = 0
    changes: int = 0
    peak_inside: int = 0
    shared: int = 0
    orphans: int = 0
    promotions: int = 0
    stalls: int = 0
    late_results: int = 0
    rated: int = 0
    retries: int = 0
    opened: int = 0
    asked: int = 0
    intents: int = 0
    unknown: int = 0
    megabytes: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        rate = self.calls / self.seconds if self.seconds else 0.0
        outcomes = ", ".join(f"{count:,} {name}" for name, count in self.outcomes.most_common())
        return [
            f"{self.calls:,} calls in {self.batches:,} batches, and {self.nested:,} nested ones, from {LOOPS} loops",
            f"{self.seconds:,.0f} s, {rate:,.0f} calls a second; at most {self.peak_inside} inside at once",
            outcomes,
            f"{self.cancelled_batches:,} batches ended early; limits changed {self.changes:,} times",
            f"{self.shared:,} calls answered by the run of another one; {self.promotions:,} waiters promoted",
            f"{self.rated:,} starts by rates, {self.retries:,} further attempts, breakers opened {self.opened:,} times",
            f"{self.asked:,} calls asked a person for approval; {self.outcomes['pending']:,} came back undecided",
            f"{self.intents:,} intents written to the journal before the calls began",
            f"{self.orphans:,} orphans, {self.late_results:,} late results; all ended",
            f"memory after each tenth, in MB: {' '.join(f'{size:.0f}' for size in self.megabytes)}",
        ]


class Soak:
    """One soak.

    Args:
        calls: how many in all.
        seed: of what is drawn. The interleaving is the machine's own.
    """

    def __init__(self, calls: int, seed: int = 1) -> None:
        self.most = calls
        self.seed = seed
        self.figures = Figures()
        self.lock = threading.Lock()
        self.writers: Counter[int] = Counter()
        self.readers: Counter[int] = Counter()
        self.inside: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.over: Counter[str] = Counter()
        self.faults: list[str] = []
        self.stop = threading.Event()
        self.folder = tempfile.mkdtemp(prefix="towerman-soak-")
        self.journal = Journal(Path(self.folder) / "journal.db")
        self.tower = Tower(
            journal=self.journal,
            max_concurrency=16,
            run_concurrency=12,
            max_calls_per_batch=1_000,
            max_wait=600,
            grace=0.01,
            pools={
                "small": 4,
                "wide": Pool(6, reserve=1),
                "even": Pool(20, rate=Rate(400, per=0.1, burst=50)),
                "tenants": Pool(20, rate="300/100ms", scope="tenant"),
            },
        )
        self.windows: list[float] = []
        self.declare()

    # ------------------------------------------------------------------ tools

    @contextlib.contextmanager
    def on(self, name: str, *pools: str) -> Any:
        """A handler is inside."""
        with self.lock:
            self.begun[name] += 1
            for pool in pools:
                self.inside[pool] += 1
                if self.inside[pool] > HIGHEST[pool]:
                    self.faults.append(f"{self.inside[pool]} inside {pool}")
        try:
            yield
        finally:
            with self.lock:
                self.over[name] += 1
                for pool in pools:
                    self.inside[pool] -= 1

    @contextlib.contextmanager
    def touching(self, key: int, write: bool) -> Any:
        """A handler touches a resource."""
        with self.lock:
            if self.writers[key] or (write and self.readers[key]):
                self.faults.append(f"resource {key} is touched by two, one of them writing")
            (self.writers if write else self.readers)[key] += 1
        try:
            yield
        finally:
            with self.lock:
                (self.writers if write else self.readers)[key] -= 1

    def declare(self) -> None:
        """Tools of every kind."""
        tower, on, touching = self.tower, self.on, self.touching

        @tower.tool(independent=True, read_only=True)
        async def quick(n: int) -> int:
            with on("quick"):
                if n % 4 == 0:
                    await asyncio.sleep(0)
                return n

        @tower.tool(reads="thing:{key}")
        async def read(key: int) -> int:
            with on("read"), touching(key, False):
                await asyncio.sleep(0)
                return key

        @tower.tool(writes="thing:{key}", pools=["wide"])
        async def write(key: int) -> int:
            with on("write", "wide"), touching(key, True):
                await asyncio.sleep(0)
                return key

        @tower.tool
        async def undeclared() -> str:
            with on("undeclared"):
                await asyncio.sleep(0)
                return "done"

        @tower.tool(independent=True, pools=["small"])
        def plain(n: int) -> int:
            with on("plain", "small"):
                return n

        @tower.tool(independent=True, read_only=True)
        async def fails(kind: int) -> None:
            with on("fails"):
                if kind == 0:
                    raise ToolError("no", applied="no")
                raise ValueError("S3CRET")

        @tower.tool(independent=True, read_only=True, timeout=0.01)
        async def hangs() -> None:
            with on("hangs"):
                await asyncio.sleep(600)

        @tower.tool(independent=True, timeout=0.005)
        async def deaf() -> str:
            with on("deaf"):
                end = asyncio.get_running_loop().time() + 0.03
                while asyncio.get_running_loop().time() < end:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.005)
                return "late"

        @tower.tool(independent=True, pools=["wide"])
        async def agent(key: int, ctx: Context) -> int:
            with on("agent"):
                done = await ctx.execute(
                    [Call("write", {"key": key}), Call("quick", {"n": 4}), Call("quick", {"n": 1})]
                )
                self.nested(done, 3)
                return len(done)

        @tower.tool(independent=True)
        def sync_agent(key: int) -> int:
            with on("sync_agent"):
                done = tower.execute_sync([Call("read", {"key": key})])
                self.nested(done, 1)
                return len(done)

        @tower.tool(independent=True, pools={"small": 3}, weight=2)
        async def wide(n: int) -> int:
            with on("wide"):
                await asyncio.sleep(0)
                return n

        @tower.tool(independent=True, pools=["small"], max_wait=0.05, max_queued=20, when_busy="wait")
        async def impatient(n: int) -> int:
            with on("impatient", "small"):
                await asyncio.sleep(0)
                return n

        @tower.tool(independent=True, read_only=True, share_identical=True)
        async def shared(n: int) -> list[int]:
            with on("shared"):
                await asyncio.sleep(0)
                return [n]

        def together(several: list[dict[str, Any]]) -> dict[str, Any]:
            return {"key": several[0]["key"], "values": [value for one in several for value in one["values"]]}

        @tower.tool(writes="thing:{key}", merge=together)
        async def merged(key: int, values: list[int]) -> int:
            with on("merged"), touching(key, True):
                await asyncio.sleep(0)
                return len(values)

        @tower.tool(independent=True, pools=["even", "tenants"], rate=Rate(WINDOW, per=0.1))
        async def rated() -> None:
            with on("rated"):
                now = time.monotonic()
                with self.lock:
                    windows = self.windows
                    windows.append(now)
                    # A handler may be held up between its first line and this one, so there is some slack.
                    if len(windows) > WINDOW and now - windows[-1 - WINDOW] < 0.06:
                        self.faults.append(f"{WINDOW + 1} starts in {now - windows[-1 - WINDOW]:.3f} s")
                    del windows[: -2 * WINDOW]

        @tower.tool(independent=True, read_only=True, breaker=Breaker(failures=5, window=1.0, open_for=0.02, probes=2))
        async def flaky(n: int) -> int:
            with on("flaky"):
                if n % 3 == 0:
                    raise ConnectionError
                return n

        @tower.tool(independent=True, read_only=True, retry=Retry(4, initial_delay=0.001, max_delay=0.01))
        async def repeated(ctx: Context) -> int:
            with on("repeated"):
                if ctx.attempt < 1 + hash(ctx.call_id) % 3:
                    raise ConnectionError
                return ctx.attempt

        @tower.tool(independent=True, pools=["small"])
        async def polite(n: int) -> int:
            with on("polite", "small"):
                if n == 0:
                    raise RateLimited(0.005)
                return n

        @tower.tool(independent=True, requires_approval=True)
        async def asked(n: int) -> int:
            with on("asked"):
                if n % 3:
                    self.fault("a call ran that nobody has approved")
                return n

        @tower.tool(independent=True, spends={"tokens": 5})
        async def charging(n: int, ctx: Context) -> int:
            with on("charging"):
                ctx.charge(tokens=n)
                return n

    def nested(self, done: BatchResult, size: int) -> None:
        """What came of a batch that a handler made."""
        with self.lock:
            self.figures.nested += size
            self.figures.unknown += sum(result.applied == "unknown" for result in done)
        if len(done) != size or any(result.index != index for index, result in enumerate(done)):
            self.fault(f"{done!r} for {size} nested calls")

    def fault(self, words: str) -> None:
        """Something that must not be."""
        with self.lock:
            self.faults.append(words)

    # ------------------------------------------------------------------ batches

    def call(self, draw: random.Random) -> Call:
        """Any call."""
        name = draw.choices(list(SHARES), list(SHARES.values()))[0]
        ident = f"c{draw.randrange(10**6)}"
        arguments: dict[str, Any] | str
        if name in ("quick", "plain", "wide", "impatient", "flaky", "polite", "asked", "charging"):
            arguments = {"n": draw.randrange(100)}
        elif name in ("read", "write", "agent", "sync_agent"):
            arguments = {"key": draw.randrange(KEYS)}
        elif name == "shared":
            arguments = {"n": draw.randrange(3)}
        elif name == "merged":
            arguments = {"key": draw.randrange(KEYS), "values": [1]}
        elif name == "fails":
            arguments = {"kind": draw.randrange(2)}
        elif name == "broken":
            return Call("quick", '{"n": ', ident)
        else:
            arguments = {}
        return Call(name, arguments, ident)

    async def batch(self, draw: random.Random) -> int:
        """One batch, perhaps ended early; returns its size."""
        tower = self.tower
        size = draw.choice((1, 2, 5, 10, 20, 60))
        calls = [self.call(draw) for _ in range(size)]
        how = draw.random()
        deadline = 0.005 if how < 0.03 else None
        early = deadline is not None
        most = draw.randrange(1, 30) if draw.random() < 0.1 else None
        async with tower.run(
            budget=None if most is None else Budget(calls=most, tokens=10**6),
            approver=approver,
            priority=draw.choice((0, 0, 0, 1)),
            deadline=deadline,
            fail_fast=how > 0.97,
            tenant=draw.choice("ab"),
        ) as run:
            early = early or how > 0.97
            going = asyncio.ensure_future(run.execute(calls))
            if 0.03 <= how < 0.09:
                early = True
                for _ in range(draw.randrange(6)):
                    await asyncio.sleep(0)
                if how < 0.05:
                    run.cancel("enough")
                elif how < 0.07:
                    going.cancel()
                else:
                    run.cancel("one", index=draw.randrange(size))
            with contextlib.suppress(asyncio.CancelledError):
                await going
            done = run.last_batch
        if done is None:
            if how < 0.03 or how >= 0.09:
                self.fault("a batch has no results")
            return 0  # cancelled before it was handed over
        if most is not None and sum(result.attempts for result in done) > most + len(done):
            self.fault(f"{done!r} of a budget of {most}")
        self.look(calls, done, early, most is not None)
        return size

    def look(self, calls: list[Call], done: BatchResult, early: bool, bounded: bool) -> None:
        """One result a call, in order, with a code that it may have."""
        if len(done) != len(calls):
            self.fault(f"{len(done)} results for {len(calls)} calls")
        for index, (call, result) in enumerate(zip(calls, done, strict=False)):
            name = "broken" if isinstance(call.arguments, str) else call.tool
            may = MAY[name] | (ENDED if early else set())
            if bounded:
                may = {*may, "budget_exhausted"}
            if (early or bounded) and name == "repeated":  # it comes to what its last attempt came to
                may = {*may, "handler_error"}
            if result.index != index or result.call_id != call.id or result.code not in may:
                self.fault(f"{result!r} for call {index} of {name}: {result.exception!r} {result.message}")
            if "S3CRET" in result.content or not result.content:
                self.fault(f"content of {result!r}")
        with self.lock:
            self.figures.batches += 1
            self.figures.cancelled_batches += early
            self.figures.outcomes.update(result.outcome for result in done)
            self.figures.unknown += sum(result.applied == "unknown" for result in done)

    def loop(self, number: int) -> None:
        """One thread with its loop."""
        draw = random.Random(f"{self.seed}-{number}")

        async def stream() -> None:
            while not self.stop.is_set():
                size = await self.batch(draw)
                with self.lock:
                    self.figures.calls += size
                    if self.figures.calls >= self.most or self.faults:
                        self.stop.set()

        async def streams() -> None:
            await asyncio.gather(*(stream() for _ in range(4)))

        try:
            while not self.stop.is_set():
                asyncio.run(streams())
        except BaseException as error:
            self.fault(f"loop {number}: {type(error).__name__}: {error}")
            self.stop.set()
            raise

    def change(self, draw: random.Random) -> None:
        """Other limits."""
        self.tower.configure(
            max_concurrency=draw.randint(6, HIGHEST["process"]),
            run_concurrency=draw.randint(2, 12),
            pools={"small": draw.randint(1, HIGHEST["small"]), "wide": draw.randint(2, HIGHEST["wide"])},
            max_wait=draw.choice((500, 600)),
            tools={
                "quick": {"max_concurrency": draw.randint(2, 20)},
                "read": {"max_concurrency": draw.randint(1, 20)},
                "rated": {"rate": Rate(draw.randint(WINDOW // 2, WINDOW), per=0.1)},
                "flaky": {"breaker": Breaker(draw.randint(3, 6), 1.0, 0.02, draw.randint(1, 3))},
            },
        )
        self.figures.changes += 1
        if self.figures.changes % 50 == 0:
            self.journal.prune(older_than=0.5)

    # ------------------------------------------------------------------ the whole

    def run(self, tell: Any = None) -> Figures:
        """Run it.

        Raises:
            AssertionError: something was not as promised.
        """
        try:
            return self._run(tell)
        finally:
            self.journal.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, tell: Any) -> Figures:
        figures, tower = self.figures, self.tower
        draw = random.Random(self.seed)
        begin = time.monotonic()
        threads = [threading.Thread(target=self.loop, args=(number,), daemon=True) for number in range(LOOPS)]
        for thread in threads:
            thread.start()
        marks = 1
        while any(thread.is_alive() for thread in threads):
            self.stop.wait(0.02)
            self.change(draw)
            tower.validate()
            if figures.calls * 10 >= marks * self.most and marks <= 10:
                gc.collect()
                figures.megabytes.append(megabytes())
                marks += 1
                if tell is not None:
                    tell(f"{figures.calls:,} calls, {figures.megabytes[-1]:.0f} MB, {time.monotonic() - begin:,.0f} s")
        for thread in threads:
            thread.join()
        figures.seconds = time.monotonic() - begin
        patience = time.monotonic() + 30
        while tower.statistics().orphans and time.monotonic() < patience:
            time.sleep(0.01)
        seen = tower.statistics()
        figures.shared = seen.shared
        figures.promotions = seen.promotions
        figures.late_results = seen.late_results
        figures.rated = sum(rate.started for rate in seen.rates.values())
        figures.retries = seen.retries
        figures.asked = seen.approvals.asked
        figures.opened = sum(breaker.opened for breaker in seen.breakers.values())
        figures.stalls = sum(seen.stalls.values())
        figures.orphans = self.begun["deaf"]
        figures.peak_inside = max(pool.peak for pool in seen.pools.values())
        assert not self.faults, "\n".join(self.faults[:20])
        tower.validate()
        assert (seen.running, seen.waiting, seen.behind, seen.orphans, seen.runs) == (0, 0, 0, 0, 0), f"left: {seen}"
        assert all(pool.held == 0 for pool in seen.pools.values()), f"held: {seen.pools}"
        assert self.begun == self.over, f"begun and not ended: {self.begun - self.over}"
        self.whole()
        report = tower.close()
        assert report.clean, str(report)
        assert seen.journal is not None
        figures.intents = seen.journal.intents
        left = self.journal.unknown(10**6).result()
        assert len(left) <= figures.unknown, (
            f"{len(left)} effects are unknown, and results said so of {figures.unknown}"
        )
        if len(figures.megabytes) > 2:
            grown = figures.megabytes[-1] - figures.megabytes[0]
            assert grown < MEMORY_SLACK, f"the process has grown by {grown:.0f} MB: {figures.megabytes}"
        return figures

    def whole(self) -> None:
        """The whole capacity can be taken at once: a barrier that opens only when as many are inside."""
        self.tower.configure(
            max_concurrency=16,
            run_concurrency=16,
            pools={"small": 4, "wide": 7},
            tools={"quick": {"max_concurrency": 20}},
        )
        full = threading.Barrier(4)

        @self.tower.tool(independent=True, pools=["small"])
        def probe() -> int:
            return full.wait(30)

        done = self.tower.execute_sync([Call("probe", {})] * 4)
        assert done.ok, f"the small pool is not whole: {done!r}"


def megabytes() -> float:
    """Resident memory of this process now; where the system does not tell, the most that it ever was."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    figures = Soak(given.calls, given.seed).run(tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(vars(figures), indent=2) if given.json else "\n".join(figures.lines()))


if __name__ == "__main__":
    main()
