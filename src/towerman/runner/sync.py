"""A way in for programs without an event loop: plain threads, scripts, sync handlers.

Theory. Somebody's loop has to run the batch. A sync handler that makes calls has one: that of its own call, where the
clients of the async handlers live. Everybody else shares one loop for each tower, on a daemon thread that is made when
it is first needed: one for all, so that what async handlers keep from call to call (connections) stays on its loop.
The calling thread waits; an interrupt there cancels the batch, waits until it is sealed, and is raised then.

Not here: running a batch (shell).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar, cast

from towerman.core import Core
from towerman.errors import PolicyError
from towerman.runner.shell import Shell
from towerman.work import CALLER

T = TypeVar("T")

LOOK_SECONDS: Final = 1.0
"""How often a waiting thread looks whether the loop that works for it was closed."""


class LoopGone(RuntimeError):
    """The loop that ran a batch for a waiting thread was closed."""


class SyncDoor:
    """Runs coroutines for threads that have no loop.

    Args:
        core: of the tower.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, what: str, make: Callable[[], Coroutine[None, None, T]]) -> T:
        """Run a coroutine on a loop of another thread, in this thread's context, and wait for it.

        Args:
            what: the name of the function that was called, for the error.
            make: makes the coroutine; called on the loop.

        Raises:
            PolicyError: a loop runs in this thread.
            LoopGone: the loop was closed meanwhile.
            BaseException: whatever the coroutine raises; an interrupt of this thread, after the coroutine has ended.
        """
        if asyncio._get_running_loop() is not None:
            raise PolicyError(
                f"{what}: an event loop runs in this thread and would stand still; await {what[:-5]} there"
            )
        loop = self._home()
        done = threading.Event()
        context = contextvars.copy_context()
        task: asyncio.Task[None] | None = None
        outcome: list[tuple[bool, object]] = []

        async def guarded() -> None:
            try:
                outcome.append((True, await make()))
            except BaseException as told:  # also an exit: it is for the thread that waits, not for the loop's
                outcome.append((False, told))

        def start() -> None:
            nonlocal task
            if task is None:
                task = loop.create_task(guarded(), context=context)
                task.add_done_callback(lambda _: done.set())

        def stop() -> None:
            if task is not None:
                task.cancel()

        # An interrupt may come between any two steps of this thread. Wherever it comes once the batch may have been
        # handed over, it goes the same way; handing over or stopping a second time does nothing.
        interrupted: BaseException | None = None
        while True:
            try:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(start)
                    if interrupted is not None:
                        loop.call_soon_threadsafe(stop)
                while not done.is_set() and not loop.is_closed():
                    wait(done)
                break
            except BaseException as caught:
                interrupted = interrupted or caught
        if not done.is_set():
            raise LoopGone(f"{what}: the event loop that ran the calls was closed") from interrupted
        if interrupted is not None:
            raise interrupted
        ((good, value),) = outcome or [(False, asyncio.CancelledError("the task that ran the calls was cancelled"))]
        if good:
            return cast(T, value)
        outcome.clear()
        error = cast(BaseException, value)
        try:
            raise error
        finally:
            del value, error  # it knows this frame

    def _home(self) -> asyncio.AbstractEventLoop:
        """The loop of the call that this code runs in, or the tower's own."""
        caller = CALLER.get()
        if caller is not None and not caller.ended and caller.work.shell.core is self._core:
            loop = cast(Shell, caller.work.shell).loop
            if loop.is_running():
                return loop
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = loop = asyncio.new_event_loop()
                weakref.finalize(self, _stop, loop)  # a tower that nobody closed takes its loop with it
                self._thread = threading.Thread(target=self._serve, args=(loop,), name="towerman-loop", daemon=True)
                self._thread.start()
            return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            try:
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                asyncio.set_event_loop(None)
                loop.close()

    def last(self, make: Callable[[], Coroutine[None, None, None]], seconds: float) -> None:
        """Run something on the tower's own loop, if it has one, before that ends; wait for it so long at most."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(make(), loop).result(seconds)
        except Exception:  # it was the last of it anyway
            return

    def close(self) -> None:
        """Let the tower's own loop end; what is at work there is cancelled. Does not wait."""
        with self._lock:
            loop, self._loop, self._thread = self._loop, None, None
        if loop is not None:
            _stop(loop)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.call_soon_threadsafe(loop.stop)
    except RuntimeError:  # it is closed
        return


def wait(done: threading.Event) -> None:
    """Wait for a while."""
    done.wait(LOOK_SECONDS)
