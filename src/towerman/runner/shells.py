"""One tower, many loops: a runner for each event loop that uses it.

Theory. A tower belongs to no loop. Each loop that uses it gets a runner of its own; what all of them share is decided
under one lock, and what follows from a decision is carried out on the loop whose call it is. A loop may be closed over
what is at work on it: what its calls held is given back by whoever notices.

Not here: running (runner).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

from towerman.core import Core
from towerman.runner.offering import gather
from towerman.runner.shell import Shell
from towerman.runner.stalls import Stalls
from towerman.threads import Port, Ticket
from towerman.work import RunState, Slot, Work

LOOK_SECONDS: Final = 0.005
"""How often a thread that ends a tower looks whether calls have ended."""


class Shells:
    """The shells of one tower, one for each event loop that used it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._stalls = Stalls(core, self._all)
        self._shells: dict[asyncio.AbstractEventLoop, Shell] = {}

    def here(self) -> Shell:
        """The shell of the running loop."""
        loop = asyncio.get_running_loop()
        shell = self._shells.get(loop)
        if shell is None or self._core.crowded:
            self.bury()
        if shell is None:
            with self._core.lock:
                shell = self._shells[loop] = Shell(self._core, loop, self.bury, self._stalls.begin)
                self._core.crowded = len(self._shells) > 1
        return shell

    def _all(self) -> list[Shell]:
        with self._core.lock:
            return list(self._shells.values())

    def bury(self) -> None:
        """Forget loops that were closed; what they held or waited for is free."""
        with self._core.lock:
            gone = [loop for loop in self._shells if loop.is_closed()]
            shells = [self._shells.pop(loop) for loop in gone]
            self._core.crowded = len(self._shells) > 1
        for shell in shells:
            shell.bury()
        if self._core.strays:  # what nobody could give back at the time
            with self._core.lock:
                decided = gather(self._core)
            for entry in decided:
                entry.owner[0].shell.post(entry)

    def call(self, shell: Shell, function: Callable[..., None], *args: object) -> None:
        """Call a shell's function on its own loop: at once from there, soon from elsewhere, never once it is gone."""
        if asyncio._get_running_loop() is shell.loop:
            function(*args)
            return
        try:
            shell.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # nobody is left there to be told
            return

    @staticmethod
    def charge_there(work: Work, index: int, amounts: Mapping[str, int]) -> None:
        """A call has spent so much of budgets that an engine keeps; from any thread."""
        cast("Shell", work.shell).charge_there(work, index, amounts)

    def cancel(self, run: RunState, reason: str, call_id: str | None, index: int | None) -> None:
        """Cancel a run's batches, or the calls in them that are named; from any thread."""
        self.bury()
        for work in list(run.works):
            shell = cast(Shell, work.shell)
            if call_id is None and index is None:
                self.call(shell, shell.cancel_work, work, reason)
                continue
            places = range(len(work.calls)) if index is None else range(index, index + 1)
            for place in places:
                if 0 <= place < len(work.calls) and (call_id is None or work.calls[place].id == call_id):
                    self.call(shell, shell.cancel_call, work, place, reason)

    async def wait_sealed(self, run: RunState) -> None:
        """Wait until the run's batches of this loop are sealed; a cancel that comes meanwhile is raised afterwards."""
        if (
            asyncio._get_running_loop() is None
        ):  # a coroutine that is thrown away leaves its run: nothing can be waited for
            return
        here = self.here()
        interrupted: asyncio.CancelledError | None = None
        for work in [work for work in run.works if work.shell is here]:
            while work.left:
                try:
                    await here.sealed(work)
                except asyncio.CancelledError as caught:
                    interrupted = caught
        if interrupted is not None:
            raise interrupted

    async def wait_alone(self, seconds: float) -> None:
        """Wait until no work goes on after its result, at most so long."""
        loop = asyncio.get_running_loop()
        alone = loop.create_future()

        def tell() -> None:
            if not alone.done():
                alone.set_result(None)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(tell)
            except RuntimeError:  # nobody waits there any more
                return

        core = self._core
        with core.lock:
            if not core.orphans:
                return
            core.when_alone.append(wake)
        timer = loop.call_later(seconds, tell)
        try:
            await alone
        finally:
            timer.cancel()
            with core.lock:
                if wake in core.when_alone:
                    core.when_alone.remove(wake)

    @property
    def looping(self) -> bool:
        """A loop runs in this thread, which would stand still if the thread waited."""
        return asyncio._get_running_loop() is not None

    def wait_in_thread(self, busy: Callable[[], bool], seconds: float) -> None:
        """In a thread without a running loop: wait while something is at work, at most so long."""
        if self.looping:
            return
        now = self._core.now
        end = now() + seconds
        pause = threading.Event()
        while busy() and now() < end:
            pause.wait(LOOK_SECONDS)
            self.bury()

    async def wait_flushed(self, flush: Callable[[], object]) -> None:
        """Run a blocking flush on a thread of its own and wait for it."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def finished(_job: None, _value: object, _error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None)

        port: Port[None] = Port(loop.call_soon_threadsafe, finished, lambda _job: None)
        workers = type(self._core.workers)("towerman-flush", idle_seconds=0.1)
        workers.submit(port, None, Ticket(), contextvars.copy_context(), flush)  # type: ignore[arg-type]
        await done

    def carry_out(self, decided: Iterable[Slot]) -> None:
        """Decisions that were made on no loop: each goes to the loop of its call."""
        for entry in decided:
            entry.owner[0].shell.post(entry)
        for shell in self._all():
            self.call(shell, shell.look)

    def rest(self) -> None:
        """Let every loop that has nothing to do drop its timer."""
        for shell in self._all():
            self.call(shell, shell.rest)
