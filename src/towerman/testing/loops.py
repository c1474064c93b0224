"""The virtual event loop: time stands still while anything can go on, and jumps to the next timer when nothing can.

Theory. A test of a thirty-second wait takes no time, and the same test takes the same steps each time. When nothing
can go on and no timer is left, somebody was forgotten: that is `Stuck`, told with the tasks that wait, and never a
test that hangs.

Threads. What the loop has started on a thread (a sync handler, `asyncio.to_thread`) holds time still while it is at
work (`outside`). Threads take turns, one at a time and only when the loop has nothing else to do at this instant:
else it would be chance which of two ends first. A thread that waits for virtual time (`Latch`), or for calls that it
has made (`VirtualDoor`), has given its turn back.

House rules. `outside` and the turns belong to the loop's own thread; others go by `call_soon_threadsafe`.

Not here: scripts and what is seen of handlers (rehearsal). Not at all: real sockets and processes, for which time
does not wait.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context
from typing import Any, Final, TypeVar, cast

from towerman.clock import VirtualClock
from towerman.core import Core
from towerman.errors import PolicyError
from towerman.runner import Shells, SyncDoor
from towerman.runner.shell import Shell
from towerman.threads import Port, Ticket, Workers
from towerman.work import CALLER, Job

T = TypeVar("T")

PATIENCE: Final = 30.0
"""Real seconds after which a thread that does not come back is a failure. Nothing that goes on at all takes so long."""

TURNS: Final = 300_000
"""Turns of the loop at one instant after which it is going round in circles."""

JUMPS: Final = 300_000
"""Jumps of time after which nothing will ever come to an end."""

_WRECKS: list[object] = []
"""Loops that failed, with their tasks."""


class Stuck(AssertionError):
    """Nothing can go on, and somebody still waits; or it goes on for ever. The message tells who waits where."""


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self.loop
        found = super().select(0)
        loop._tick()
        if found or loop._ready or (timeout is not None and timeout <= 0):  # type: ignore[attr-defined]
            loop._went_on()
            return found
        if not loop.outside:
            loop._next_turn()
        if loop._ready:  # type: ignore[attr-defined]
            return []
        if loop.outside:
            found = super().select(PATIENCE)
            if not found:
                raise Stuck(f"{loop.outside} handlers did not come back from their threads:\n{loop.who_waits()}")
            return found
        if loop._idlers:
            loop._wake_idlers()
            return []
        for look in loop.before_jump:
            look()
        loop._jump()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps: `run` takes the place of `asyncio.run`.

    Args:
        clock: the time, which several loops may share one after another; None: a time of its own that begins at 0.
        step: seconds that pass with each turn of the loop in which nothing is at work on a thread, for code that is
            busy while it waits, such as anyio's cancel scopes.
        in_turn: threads take turns; False lets them begin at once, in an order that is chance.

    Attributes:
        outside: functions at work on threads, for which time stands still.
        before_jump: called whenever nothing can go on, before time jumps.
        turns: how often the loop went round.
        ticks: how many callbacks have run, counted while there is an `on_tick`.
        on_tick: called after each callback and each turn with their number, that is between any two steps of tasks.
    """

    def __init__(self, clock: VirtualClock | None = None, *, step: float = 0.0, in_turn: bool = True) -> None:
        self.clock = clock or VirtualClock()
        self.step = step
        self.in_turn = in_turn
        self.outside = 0
        self.turns = 0
        self.ticks = 0
        self.before_jump: list[Callable[[], None]] = []
        self.on_tick: Callable[[int], None] | None = None
        self._turns_here = 0
        self._jumps = 0
        self._in_line: deque[threading.Event | asyncio.Future[None]] = deque()
        self._idlers: list[asyncio.Future[None]] = []
        self._latches: set[Latch] = set()
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    # ---------------------------------------------------------------- time

    @property
    def _clock_resolution(self) -> float:
        """The least step of time: timers of this instant fire, and none before its time."""
        return math.ulp(self.clock.now())

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """What the real clock has does not matter."""

    def time(self) -> float:
        """The present virtual instant in seconds."""
        return self.clock.now()

    async def idle(self) -> None:
        """Wait until nothing else can go on at this instant; time does not pass meanwhile."""
        idler = self.create_future()
        self._idlers.append(idler)
        await idler

    def _wake_idlers(self) -> None:
        idlers, self._idlers = self._idlers, []
        for idler in idlers:
            if not idler.done():
                idler.set_result(None)

    def _went_on(self) -> None:
        """One more time round while something can go on."""
        self.turns += 1
        self._turns_here += 1
        if self.step:
            if not self.outside:  # a thread is not overtaken by a loop that is kept busy
                self.clock.advance(self.step)
        elif self._turns_here > TURNS:
            raise Stuck(f"{TURNS} turns at the instant {self.time()}: the loop goes round in circles")

    def _jump(self) -> None:
        """To the next timer."""
        self.turns += 1
        self._turns_here = 0
        self._jumps += 1
        if self._jumps > JUMPS:
            raise Stuck(f"after {JUMPS} jumps it is {self.time()}, and there is always another timer")
        instants = [timer.when() for timer in self.timers()]
        if not instants:
            raise Stuck("nothing can go on, and no timer is left:\n" + self.who_waits())
        self.clock.set(max(self.time(), min(instants)))

    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that would still fire."""
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    def who_waits(self) -> str:
        """Every task and where it stands, from its own coroutine to the innermost that it awaits; a line each."""
        told = []
        for task in asyncio.all_tasks(self):
            where = []
            awaited: object = task.get_coro()
            while inspect.iscoroutine(awaited):
                line = f":{awaited.cr_frame.f_lineno}" if awaited.cr_frame is not None else ""
                where.append(f"{awaited.__qualname__}{line}")
                awaited = awaited.cr_await
            told.append(f"  {task.get_name()} at {' > '.join(where)}")
        return "\n".join(sorted(told)) or "  no task at all"

    # ---------------------------------------------------------------- steps

    def call_soon(  # type: ignore[override]
        self, callback: Any, *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As usual, counted while there is an `on_tick`."""
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

    # ---------------------------------------------------------------- threads

    def queue_up(self, turn: threading.Event | asyncio.Future[None]) -> None:
        """On the loop: something wants to be at work on a thread, and is told by `turn` when it may."""
        self._in_line.append(turn)
        if not self.in_turn:
            self._next_turn()

    def _next_turn(self) -> None:
        while self._in_line:
            turn = self._in_line.popleft()
            if isinstance(turn, threading.Event):
                self.outside += 1
                turn.set()
                return
            if not turn.done():
                self.outside += 1
                turn.set_result(None)
                return

    def back(self) -> None:
        """From a thread: it is at work no more."""
        try:
            self.call_soon_threadsafe(self._one_back)
        except RuntimeError:  # the loop was closed meanwhile: nobody counts any more
            pass

    def _one_back(self) -> None:
        self.outside -= 1

    async def instead(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a coroutine for which a thread at work waits; the thread has its turn again when it has ended."""
        self.outside -= 1
        try:
            return await coroutine
        finally:
            turn = self.create_future()
            self.queue_up(turn)
            await turn

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, function: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """As usual; time waits for it, and threads take turns."""
        if executor is None:
            executor = cast("Executor | None", vars(self)["_default_executor"])
            if executor is None:
                executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
                self.set_default_executor(executor)
        turn = threading.Event()

        def in_turn() -> T:
            turn.wait()
            return function(*arguments)

        inner: Future[T]
        if isinstance(executor, ThreadPoolExecutor):
            inner = executor.submit(in_turn)
            self.queue_up(turn)
        else:  # another process cannot be told when it may
            inner = executor.submit(function, *arguments)
            self.outside += 1
            turn.set()
        outer = asyncio.wrap_future(inner, loop=self)
        # Behind the callback of `wrap_future`: the outcome is on the loop before time may go on.
        inner.add_done_callback(lambda _: self.back() if turn.is_set() else self._in_line.remove(turn))
        return outer

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        """As usual; time waits for it."""
        self.outside += 1
        try:
            await super().shutdown_default_executor(*timeout)
        finally:
            self.outside -= 1

    def close(self) -> None:
        """As usual; threads that wait for this loop are let go."""
        for turn in self._in_line:
            if isinstance(turn, threading.Event):
                turn.set()
        for latch in list(self._latches):
            latch.event.set()
        super().close()

    # ---------------------------------------------------------------- a whole program

    def run(self, main: Coroutine[Any, Any, T], *, leftovers: bool = True) -> T:
        """Run a coroutine to its end, cancel what is left, and close the loop; as `asyncio.run` does.

        Args:
            main: what to run.
            leftovers: it may leave tasks and timers behind; False: that is an AssertionError.

        Raises:
            Stuck: nothing can go on.
            BaseException: whatever `main` raises.
        """
        remaining: set[asyncio.Task[Any]] = set()
        timers: list[asyncio.TimerHandle] = []

        async def whole() -> T:
            try:
                return await main
            finally:
                remaining.update(asyncio.all_tasks(self) - {main_task})
                timers.extend(self.timers())

        main_task = self.create_task(whole())
        try:
            value = self.run_until_complete(main_task)
        except BaseException:
            self._wind_up(main_task)
            raise
        self._wind_up(main_task)
        if not leftovers:
            assert not remaining, f"tasks were left behind: {remaining}"
            assert not timers, f"timers were left behind: {timers}"
        return value

    def _wind_up(self, main_task: asyncio.Task[Any]) -> None:
        """Cancel what is left and close. Where the loop itself has failed, nothing that comes after may hide it."""
        failed = not main_task.done()
        if not failed and not main_task.cancelled():
            main_task.exception()  # looked at, also where a KeyboardInterrupt went past it
        try:
            self.before_jump.clear()
            left = asyncio.all_tasks(self)
            if failed:
                self.set_exception_handler(lambda *_: None)
                self.run_until_complete(asyncio.sleep(0))
            for task in left:
                task.cancel()
            if left:
                self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.run_until_complete(self.shutdown_asyncgens())
            self.run_until_complete(self.shutdown_default_executor())
        except BaseException:
            if not failed:
                failed = True
                raise
        finally:
            if failed:
                # The failure itself is told. What it left half-way is kept, or the collector would stumble over it.
                tasks = asyncio.all_tasks(self)
                for task in tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                _WRECKS.append((self, tasks))
            self.close()


def running() -> VirtualLoop:
    """The running virtual loop.

    Raises:
        RuntimeError: none is running in this thread.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("the running event loop is not on virtual time")
    return loop


class Latch:
    """Where a function on a thread waits until the loop lets it on, while time may jump.

    Args:
        loop: the virtual loop that the thread works for.
    """

    __slots__ = ("event", "loop", "opened", "parked")

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.event = threading.Event()
        self.opened = False
        self.parked = False

    def wait(self) -> None:
        """On the thread: wait until it is opened, or the loop is closed."""
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
            self.loop._latches.discard(self)
            self.loop.queue_up(self.event)


# -------------------------------------------------------------------------------------------- a tower on such a loop


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
        self.turn = threading.Event()

    def take(self) -> bool:
        """On the thread, before it begins."""
        self.turn.wait()
        taken = self._ticket.take()
        if not taken:
            self._loop.back()
        return taken


class CountedWorkers(Workers[Job]):
    """Worker threads that a virtual loop waits for, and that take turns there."""

    __slots__ = ()

    def submit(self, port: Any, job: Job, ticket: Any, context: Context, function: Callable[[], object]) -> None:
        """As usual; on a virtual loop counted, and begun when it is its turn."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            counted = _CountedTicket(ticket, loop)
            super().submit(_CountedPort(port, loop), job, counted, context, function)  # type: ignore[arg-type]
            loop.queue_up(counted.turn)
        else:
            super().submit(port, job, ticket, context, function)


class CountedFuture(Future[object]):
    """What a journal answers: a virtual loop on which it was asked for waits for it."""

    def __init__(self) -> None:
        super().__init__()
        loop = asyncio._get_running_loop()
        self._loop = loop if isinstance(loop, VirtualLoop) else None
        if self._loop is not None:
            self._loop.outside += 1

    def _tell(self) -> None:
        # Behind all that is called when it is done: what follows is on the loop before time may go on.
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.back()

    def set_result(self, result: object) -> None:
        """As usual."""
        super().set_result(result)
        self._tell()

    def set_exception(self, exception: BaseException | None) -> None:
        """As usual."""
        super().set_exception(exception)
        self._tell()

    def cancel(self) -> bool:
        """As usual."""
        cancelled = super().cancel()
        if cancelled:
            self._tell()
        return cancelled


def count_journal(tower: Core) -> None:
    """Let virtual loops wait for the journal of a tower, which answers from a thread of its own.

    Args:
        tower: its core.
    """
    if tower.journal is not None:
        tower.journal._writer.futures = CountedFuture


class VirtualDoor(SyncDoor):
    """`execute_sync` on virtual time: from a sync handler on the loop of its call, else on a loop made for it.

    Args:
        core: of the tower.
        run: runs a coroutine on a virtual loop in this thread.
    """

    def __init__(self, core: Core, run: Callable[[Coroutine[None, None, Any]], Any]) -> None:
        super().__init__(core)
        self._run = run

    def run(self, what: str, make: Callable[[], Coroutine[None, None, T]]) -> T:
        """Run a coroutine and wait for it; a thread that waits is not at work."""
        if asyncio._get_running_loop() is not None:
            return super().run(what, make)  # which refuses it
        caller = CALLER.get()
        if caller is not None and not caller.ended and caller.work.shell.core is self._core:
            loop = cast(VirtualLoop, cast(Shell, caller.work.shell).loop)  # no other serves a tower in a rehearsal
            return super().run(what, lambda: loop.instead(make()))
        return cast(T, self._run(make()))


class VirtualShells(Shells):
    """The shells of a tower on virtual time, which no real loop can serve."""

    def here(self) -> Shell:
        """The shell of the running loop.

        Raises:
            PolicyError: it is no virtual loop.
        """
        if not isinstance(asyncio.get_running_loop(), VirtualLoop):
            raise PolicyError("this tower is in a rehearsal, on virtual time; run the coroutine by Rehearsal.run")
        return super().here()
