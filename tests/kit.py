"""What the tests of whole towers share: a loop on virtual time, a stage for scripted handlers, and the look afterwards.

Theory. Virtual time stands still while anything can go on, and jumps to the next timer when nothing can. So a test of
a thirty-second
wait takes no time, and the same test always takes the same steps. When nothing can go on and no timer is left,
somebody was forgotten: that is a `Deadlock`, told with the story, never a hanging test.

Sync handlers run on real threads. The loop knows how many of them are at work (`outside`) and does not let time jump
while one is; a thread
that waits for virtual time or for the test (`Stage.rest`, `Latch`) does not count as at work.

House rules. A test makes its towers by `stage.tower()`. When it is over, each of them must be whole again: nothing
held, nothing
waiting, and the whole capacity can be taken at once, asked of the ledger and asked by real calls.

Not here: anything that a user needs.
"""

from __future__ import annotations

import asyncio
import json
import math
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar

from towerman import CODES, BatchResult, Call, Result, Tower
from towerman.gate import Gate
from towerman.ledger import Wants
from towerman.threads import Port, Ticket, Workers
from towerman.work import Job

T = TypeVar("T")

PATIENCE = 30.0
"""Real seconds after which a thread that does not come back is a failure. Nothing waits so long that goes on at all.
"""

TURNS = 300_000
"""Turns of the loop at one instant after which it is going round in circles."""

JUMPS = 300_000
"""Jumps of time after which nothing will ever come to an end."""


WRECKS: list[object] = []
"""Loops that failed, with their tasks."""


class Deadlock(AssertionError):
    """Nothing can go on, and somebody still waits."""


class VirtualTime:
    """A clock that only the loop moves. Starts at 0, the instant at which a careless truth test goes wrong."""

    def __init__(self) -> None:
        self.value = 0.0

    def now(self) -> float:
        """The present instant in seconds."""
        return self.value


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self.loop
        found = super().select(0)
        loop._tick()
        if found or loop._ready or (timeout is not None and timeout <= 0):  # type: ignore[attr-defined]
            loop.turn()
            return found
        if loop.outside:
            found = super().select(PATIENCE)
            if not found:
                raise Deadlock(f"{loop.outside} handlers did not come back from their threads")
            return found
        for look in loop.before_jump:
            look()
        loop.jump()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps.

    Args:
        clock: the time, also for towers.
        step: seconds that pass with each turn: for code that is busy while it waits, such as anyio's cancel scopes.

    Attributes:
        outside: handlers at work on threads, for which time waits.
        before_jump: called whenever nothing can go on, before time jumps.
        turns: how often the loop went round.
        ticks: how many callbacks have run, counted while there is an `on_tick`.
        on_tick: called after each callback and each turn, with their number: between any two steps of any task.
    """

    def __init__(self, clock: VirtualTime | None = None, *, step: float = 0.0) -> None:
        self.clock = clock or VirtualTime()
        self.step = step
        self.outside = 0
        self.turns = 0
        self.ticks = 0
        self.before_jump: list[Callable[[], None]] = []
        self.on_tick: Callable[[int], None] | None = None
        self._turns_here = 0
        self._jumps = 0
        self._latches: set[Latch] = set()
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    @property
    def _clock_resolution(self) -> float:
        """The least step of time: timers of this instant fire, and none before its time."""
        return math.ulp(self.clock.value)

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """What the real clock has does not matter."""

    def time(self) -> float:
        """The present virtual instant in seconds."""
        return self.clock.value

    def call_soon(  # type: ignore[override]
        self, callback: Any, *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As usual, counted."""
        if self.on_tick is None:
            return super().call_soon(callback, *arguments, context=context)
        return super().call_soon(self._counted, callback, arguments, context=context)

    def _counted(self, callback: Any, arguments: tuple[Any, ...]) -> None:
        callback(*arguments)
        self._tick()

    def _tick(self) -> None:
        if self.on_tick is not None:
            self.ticks += 1
            self.on_tick(self.ticks)

    def turn(self) -> None:
        """One more time round while something can go on."""
        self.turns += 1
        self._turns_here += 1
        if self.step:
            self.clock.value += self.step
        elif self._turns_here > TURNS:
            raise Deadlock(f"{TURNS} turns at the instant {self.clock.value}: the loop goes round in circles")

    def jump(self) -> None:
        """To the next timer."""
        self.turns += 1
        self._turns_here = 0
        self._jumps += 1
        if self._jumps > JUMPS:
            raise Deadlock(f"after {JUMPS} jumps it is {self.clock.value}, and there is always another timer")
        instants = [timer.when() for timer in self.timers()]
        if not instants:
            raise Deadlock("nothing can go on, and no timer is left:\n" + self.who_waits())
        self.clock.value = max(self.clock.value, min(instants))

    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that would still fire."""
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    def who_waits(self) -> str:
        """Every task and what it stands at."""
        told = []
        for task in asyncio.all_tasks(self):
            stack = task.get_stack(limit=1)
            where = f"{stack[0].f_code.co_qualname}:{stack[0].f_lineno}" if stack else "nowhere"
            told.append(f"  {task.get_name()} at {where}")
        return "\n".join(told) or "  no task at all"

    def back(self) -> None:
        """From a thread: it is at work no more."""
        try:
            self.call_soon_threadsafe(self._one_back)
        except RuntimeError:  # the loop was closed meanwhile: nobody counts any more
            pass

    def _one_back(self) -> None:
        self.outside -= 1

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> Any:  # type: ignore[override]
        """As usual; time waits for it."""
        self.outside += 1
        future = super().run_in_executor(executor, function, *arguments)
        future.add_done_callback(lambda _: self._one_back())
        return future

    def close(self) -> None:
        """As usual; threads that wait for this loop's time are let go."""
        for latch in list(self._latches):
            latch.event.set()
        super().close()


class Latch:
    """Where a handler on a thread waits until the test lets it on, while time may jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.event = threading.Event()
        self.opened = False
        self.parked = False

    def wait(self) -> None:
        """On the thread: wait until it is opened."""
        try:
            self.loop.call_soon_threadsafe(self._park)
        except RuntimeError:
            return
        assert self.event.wait(PATIENCE), "nobody opened the latch"

    def _park(self) -> None:
        if self.opened:
            self.event.set()
        else:
            self.parked = True
            self.loop.outside -= 1
            self.loop._latches.add(self)

    def open(self) -> None:
        """On the loop: let the thread on."""
        self.opened = True
        if self.parked:
            self.parked = False
            self.loop.outside += 1
            self.loop._latches.discard(self)
            self.event.set()


class _CountedPort:
    def __init__(self, port: Port[Job], loop: VirtualLoop) -> None:
        self._port = port
        self._loop = loop

    def put(self, job: Job, value: object, error: BaseException | None) -> None:
        self._port.put(job, value, error)
        self._loop.back()


class _CountedTicket:
    def __init__(self, ticket: Ticket, loop: VirtualLoop) -> None:
        self._ticket = ticket
        self._loop = loop

    def take(self) -> bool:
        taken = self._ticket.take()
        if not taken:
            self._loop.back()
        return taken


class CountedWorkers(Workers[Job]):
    """Worker threads that a virtual loop waits for."""

    __slots__ = ()

    def submit(self, port: Any, job: Job, ticket: Any, context: Context, function: Callable[[], object]) -> None:
        """As usual, counted."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            loop.outside += 1
            try:
                super().submit(_CountedPort(port, loop), job, _CountedTicket(ticket, loop), context, function)  # type: ignore[arg-type]
            except RuntimeError:
                loop.outside -= 1
                raise
        else:
            super().submit(port, job, ticket, context, function)


def run_virtual(
    main: Coroutine[Any, Any, T],
    clock: VirtualTime | None = None,
    *,
    step: float = 0.0,
    before_jump: Sequence[Callable[[], None]] = (),
    leftovers: bool = False,
) -> T:
    """`asyncio.run` on virtual time.

    Args:
        main: what to run.
        clock: the time that goes on; None: a time of its own.
        step: seconds that pass with each turn of the loop.
        before_jump: called whenever nothing can go on.
        leftovers: the test leaves tasks or timers behind on purpose.
    """
    loop = VirtualLoop(clock, step=step)
    loop.before_jump += before_jump
    remaining: set[asyncio.Task[Any]] = set()
    timers: list[asyncio.TimerHandle] = []

    async def whole() -> T:
        try:
            return await main
        finally:
            remaining.update(asyncio.all_tasks(loop) - {main_task})
            timers.extend(loop.timers())

    main_task = loop.create_task(whole())
    try:
        value = loop.run_until_complete(main_task)
    except BaseException:
        _wind_up(loop, main_task)
        raise
    _wind_up(loop, main_task)
    if not leftovers:
        assert not remaining, f"tasks were left behind: {remaining}"
        assert not timers, f"timers were left behind: {timers}"
    return value


def _wind_up(loop: VirtualLoop, main_task: asyncio.Task[Any]) -> None:
    """Cancel what is left and close the loop. Where the loop itself has failed, nothing that comes after may hide
    it.
    """
    failed = not main_task.done()
    if not failed and not main_task.cancelled():
        main_task.exception()  # looked at, also where a KeyboardInterrupt went past it
    try:
        loop.before_jump.clear()
        left = asyncio.all_tasks(loop)
        if failed:
            loop.set_exception_handler(lambda *_: None)
            loop.run_until_complete(asyncio.sleep(0))
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    except BaseException:
        if not failed:
            raise
    finally:
        if failed:
            # The failure itself is told. What it left half-way is kept, or the collector would stumble over it later.
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            WRECKS.append((loop, tasks))
        loop.close()


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


def here() -> VirtualLoop:
    """The running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


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


# ==================================================================== the look afterwards


def until(holds: Callable[[], object]) -> None:
    """Wait for what another thread is about to bring about."""
    patience = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < patience, "it did not come about"


def whole_again(tower: Tower) -> None:
    """Nothing is held, nothing waits, and the ledger gives its whole capacity at once (R-48, R-137)."""
    tower.validate()
    seen = tower.statistics()
    assert (seen.running, seen.waiting, seen.behind, seen.orphans) == (0, 0, 0, 0), f"{tower!r} still works: {seen}"
    for name, pool in seen.pools.items():
        assert (pool.held, pool.queued, pool.orphaned) == (0, 0, 0), f"pool {name} is not whole: {pool}"
    ledger = tower._core.gate.ledger
    assert ledger.counts() == (0, 0), f"{ledger!r} still holds"
    everything: Wants[Any] = Wants(0, "all", tuple((key, pool.limit) for key, pool in ledger.pools.items()), priority=1)
    ledger.look_up(everything)
    blocker = ledger.claim(everything)
    assert blocker is None, f"{blocker} does not give its whole capacity"
    ledger.give(everything)
    assert tower._core.gate._queued == {}, "the bounds of queues still count somebody"
    assert tower._core.gate._claimants == [], "somebody who is gone still claims"


async def retake(tower: Tower) -> None:
    """Calls take the whole capacity at once: they meet inside, which they cannot when a permit was lost (R-48)."""
    number = len(tower.tools)
    limit = tower.options.max_concurrency
    inside = 0
    all_in = asyncio.Event()
    whole: dict[str, int] = {
        name: pool.permits - pool.reserve for name, pool in tower.options.pools.items() if pool.scope == "process"
    }

    async def probe() -> int:
        nonlocal inside
        inside += 1
        if inside == limit:
            all_in.set()
        await all_in.wait()
        return inside

    tower.add_tool(probe, name=f"probe-{number}", independent=True, read_only=True, timeout=1e9, max_wait=1e9)
    tower.add_tool(
        probe, name=f"probe-{number}-pools", independent=True, pools=whole or None, timeout=1e9, max_wait=1e9
    )
    closed = tower._closed
    tower._closed = False
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
        assert result.attempts == int(result.started and own), told
        assert own or (result.started and result.ran == 0 and result.shared_with != index), told
        assert (result.code is None) == result.ok, told
        assert result.code is None or result.code in CODES, told
        if not result.started:
            assert result.applied == "no", told
            assert result.ran == 0, told
            assert not result.still_running, told
        match result.outcome:
            case "ok":
                assert result.started, told
                assert result.exception is None, told
            case "error":
                assert result.code in ("handler_error", "handler_cancelled", "encoding_error"), told
            case "rejected" | "skipped":
                assert not result.started, told
            case "timed_out":
                assert result.started, told
                assert result.code in ("handler_timeout", "deadline_exceeded"), told
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
