"""What the tests of whole towers share: a stage for scripted handlers, and the look afterwards.

Theory. The loop is that of `towerman.testing`: time stands still while anything can go on and jumps when nothing can. A
loop on which nothing can go on is a `Deadlock`, told with the story, never a hanging test.

House rules. A test makes its towers by `stage.tower()`. When it is over, each of them must be whole again: nothing
held, nothing waiting, and the whole capacity can be taken at once, asked of the ledger and asked by real calls.

Not here: what a user needs for tests of tools (`towerman.testing`).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from towerman import CODES, BatchResult, Call, Result, Tower
from towerman.clock import VirtualClock
from towerman.gate import Gate
from towerman.testing.looks import assert_whole as whole_again
from towerman.testing.loops import PATIENCE, CountedWorkers, Latch, VirtualLoop, count_journal
from towerman.testing.loops import Stuck as Deadlock
from towerman.testing.loops import running as here

__all__ = [
    "PATIENCE",
    "CountedWorkers",
    "Deadlock",
    "Latch",
    "Stage",
    "VirtualLoop",
    "VirtualTime",
    "codes",
    "gate_of",
    "here",
    "on_stage",
    "retake",
    "run_batch",
    "run_virtual",
    "sound",
    "until",
    "whole_again",
]

T = TypeVar("T")


class VirtualTime(VirtualClock):
    """The clock of a test, which may also be set by force."""

    @property
    def value(self) -> float:
        """The present instant in seconds."""
        return self.now()

    @value.setter
    def value(self, instant: float) -> None:
        self._now = instant


def run_virtual(
    main: Coroutine[Any, Any, T],
    clock: VirtualClock | None = None,
    *,
    step: float = 0.0,
    before_jump: Sequence[Callable[[], None]] = (),
    leftovers: bool = False,
) -> T:
    """`asyncio.run` on virtual time, strict about what is left behind.

    Args:
        main: what to run.
        clock: the time that goes on; None: a time of its own.
        step: seconds that pass with each turn of the loop.
        before_jump: called whenever nothing can go on.
        leftovers: the test leaves tasks or timers behind on purpose.
    """
    loop = VirtualLoop(clock, step=step, in_turn=False)  # so that a test can force the turns of its threads
    loop.before_jump += before_jump
    return loop.run(main, leftovers=leftovers)


# ==================================================================== what handlers do, and what is seen of it


class Stage:
    """Towers, handlers and the story of one test.

    Attributes:
        clock: the virtual time of every loop of this test.
        started: how often each name came on.
        ended: how often each name went off, however.
        running: names that are on now.
        peak: the most that were on at once.
        spans: (name, came on, went off), in order of going off.
        loop: the loop on whose time sync handlers rest; set by the test.
    """

    def __init__(self) -> None:
        self.clock = VirtualTime()
        self.towers: list[Tower] = []
        self.broken: list[Tower] = []
        self.story: list[str] = []
        self.started: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.peak = 0
        self.spans: list[tuple[str, float, float]] = []
        self.loop: VirtualLoop
        self._lock = threading.Lock()

    def tower(self, **options: Any) -> Tower:
        """A tower on this test's time that must be whole at its end."""
        options.setdefault("_clock", self.clock)
        tower = Tower(**options)
        tower._core.workers = CountedWorkers("towerman-worker")
        count_journal(tower._core)
        self.towers.append(tower)
        return tower

    def run(self, main: Coroutine[Any, Any, T], **options: Any) -> T:
        """Run a coroutine on a new virtual loop; `validate` holds for every tower whenever time jumps."""
        try:
            return run_virtual(main, self.clock, before_jump=[self._validate], **options)
        except Deadlock as stuck:
            gates = "\n".join(f"  {tower._core.gate!r} {tower._core.gate.ledger!r}" for tower in self.towers)
            raise Deadlock(f"{stuck}\ntowers:\n{gates}") from None

    def _validate(self) -> None:
        for tower in self.towers:
            tower.validate()

    def tell(self, words: str) -> None:
        """A line of the story."""
        self.story.append(f"{self.clock.value:10.4f}  {words}")

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """A handler is on."""
        came = self.clock.value
        with self._lock:
            self.started[name] += 1
            self.running[name] += 1
            self.peak = max(self.peak, self.running.total())
            self.tell(f"{name} comes on")
        try:
            yield
        finally:
            with self._lock:
                self.ended[name] += 1
                self.running[name] -= 1
                self.spans.append((name, came, self.clock.value))
                self.tell(f"{name} goes off")

    async def work(self, name: str, seconds: float) -> str:
        """A handler's body: on for so many virtual seconds."""
        with self.on(name):
            await asyncio.sleep(seconds)
        return name

    async def stubborn(self, name: str, seconds: float) -> str:
        """A handler's body that no cancel ends before its time (P-83)."""
        with self.on(name):
            until = self.clock.value + seconds
            while self.clock.value < until:
                try:
                    await asyncio.sleep(until - self.clock.value)
                except asyncio.CancelledError:
                    self.tell(f"{name} ignores a cancel")
        return name

    def rest(self, loop: VirtualLoop, seconds: float) -> None:
        """On a thread: let so many virtual seconds pass."""
        latch = Latch(loop)
        try:
            loop.call_soon_threadsafe(loop.call_later, seconds, latch.open)
        except RuntimeError:
            return
        latch.wait()

    def sync_work(self, loop: VirtualLoop, name: str, seconds: float) -> str:
        """A sync handler's body: on for so many virtual seconds."""
        with self.on(name):
            self.rest(loop, seconds)
        return name

    async def settled(self, tower: Tower) -> None:
        """Wait until no work of this tower goes on after its result."""
        for _ in range(10_000):
            if not tower.statistics().orphans:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{tower.statistics().orphans} orphans do not end")


def run_batch(
    stage: Stage, tower: Tower, calls: Any, *, format: str | None = None, on_result: Any = None, **options: Any
) -> BatchResult:
    """Answer one batch in a run of its own, with these options, on virtual time."""

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run(**options) as run:
            done = await run.execute(calls, format=format, on_result=on_result)
        await stage.settled(tower)
        return done

    return stage.run(main())


def codes(done: Any) -> list[str | None]:
    """The code of each result."""
    return [result.code for result in done]


def on_stage() -> Iterator[Stage]:
    """A stage; afterwards every tower made on it must be whole again. A module says `stage =
    pytest.fixture(on_stage)`.
    """
    made = Stage()
    yield made
    print("story:", *made.story[-400:], sep="\n")  # shown when the test failed
    for tower in made.towers:
        if tower not in made.broken:
            whole_again(tower)
            made.run(retake(tower))
        tower._core.workers.close()
        tower._courier.close()
        if tower._own_journal and tower._journal is not None:
            tower._journal.close()


# ==================================================================== the look afterwards


def until(holds: Callable[[], object]) -> None:
    """Wait for what another thread is about to bring about."""
    patience = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < patience, "it did not come about"


async def retake(tower: Tower) -> None:
    """Calls take the whole capacity at once: they meet inside, which they cannot when a permit was lost (R-48)."""
    number = len(tower.tools)
    limit = tower.options.max_concurrency
    inside = 0
    all_in = asyncio.Event()
    whole: dict[str, int] = {
        name: pool.permits - pool.reserve
        for name, pool in tower.options.pools.items()
        if pool.scope == "process" and pool.breaker is None  # one that is open lets nobody through
    }

    async def probe() -> int:
        nonlocal inside
        inside += 1
        if inside == limit:
            all_in.set()
        await all_in.wait()
        return inside

    tower.add_tool(
        probe,
        name=f"probe-{number}",
        independent=True,
        read_only=True,
        timeout=1e9,
        max_wait=1e9,
        when_busy="wait",
        max_repeats="any",
    )
    tower.add_tool(
        probe,
        name=f"probe-{number}-pools",
        independent=True,
        pools=whole or None,
        timeout=1e9,
        max_wait=1e9,
        when_busy="wait",
        max_repeats="any",
    )
    closed = tower._closed
    tower._closed = False
    if tower.options.budgets:
        tower.configure(budgets=dict.fromkeys(tower.options.budgets))  # the probes are no part of what is counted
    # What has started, or paused, before bars the probes for a while, and where nobody may queue they would be refused.
    rates = tower.statistics().rates.values()
    await asyncio.sleep(max((rate.free_in for rate in rates), default=0.0))
    try:
        async with tower.run(max_concurrency=limit) as run:
            most = tower.options.max_calls_per_batch
            calls = [Call(f"probe-{number}-pools", {})] + [Call(f"probe-{number}", {})] * (limit - 1)
            batches = [calls[start : start + most] for start in range(0, limit, most)]
            done = await asyncio.gather(*(run.execute(batch) for batch in batches))
            assert all(batch.ok for batch in done), f"the probes failed: {done}"
    finally:
        tower._closed = closed


def sound(results: Sequence[Result], calls: Sequence[Any]) -> None:
    """One result a call, in emitted order, none of which contradicts itself (G1, G10, R-104 to R-107, R-117)."""
    assert len(results) == len(calls), f"{len(results)} results for {len(calls)} calls"
    for index, (result, call) in enumerate(zip(results, calls, strict=True)):
        told = f"{result!r}: {result.message}"
        assert result.index == index, told
        if isinstance(call, Call):
            assert result.call_id == call.id, told
        assert result.message, told
        assert result.content.strip(), told
        assert result.waited >= 0, told
        assert result.ran >= 0, told
        own = result.shared_with is None  # else it was the run of another call that answered it
        ran = result.started and not result.replayed  # else the journal answered it
        assert bool(result.attempts) == (ran and own), told
        assert own or (result.started and result.ran == 0 and result.shared_with != index), told
        assert (result.code is None) == result.ok, told
        assert result.code is None or result.code in CODES, told
        if not result.started:
            assert result.applied == "no" or "the same call" in result.waited_for, told
            assert result.ran == 0, told
            assert not result.still_running, told
        match result.outcome:
            case "ok":
                assert result.started, told
                assert result.exception is None, told
            case "error":
                kept = ("effect_unknown",) if result.replayed else ()
                failed = ("handler_error", "handler_cancelled", "encoding_error", "rate_limited", *kept)
                assert result.code in failed, told
            case "rejected" | "skipped":
                assert not result.started, told
            case "timed_out":
                assert result.started, told
                assert result.code in ("handler_timeout", "deadline_exceeded"), told
            case "pending":
                assert result.code in ("approval_missing", "held_behind", "deferred"), told
                assert (result.handle is not None) >= (result.code == "deferred"), told
                assert not result.started, told
            case "cancelled":
                assert result.code in ("cancelled", "sibling_failed"), told
            case other:
                raise AssertionError(f"no outcome {other!r} here: {told}")
        if result.still_running:
            assert result.outcome in ("cancelled", "timed_out"), told
        if not result.ok:
            error = json.loads(result.content)["error"]
            assert error["code"] == result.code, told
            assert (error["started"], error["applied"]) == (result.started, result.applied), told


def gate_of(tower: Tower) -> Gate[Any]:
    """The gate itself, for forced interleavings."""
    return tower._core.gate
