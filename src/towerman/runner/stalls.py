"""A loop that stands still, and the tool that holds it up.

Theory. While a handler blocks its event loop, nobody on that loop gets on: no other call, no timeout, no cancel (P-32).
The loop cannot tell, so a thread asks it: it posts a beat to each loop that has work, and a beat that is not answered
in time says that the loop stands still. Whose call it is says the task that the loop is at.

House rules. The thread is there while calls are at work and ends soon afterwards. What makes the whole process late,
such as a machine that gives it no time or a C function that keeps the interpreter's lock, cannot be told from here:
where the thread itself comes late, that time does not count. Towers on a clock of their own (tests) are not watched.

Not here: how an event reaches observers (threads), what a late timer does (shell).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from towerman.clock import RealClock
from towerman.core import Core
from towerman.runner.shell import Pulse, Shell
from towerman.work import CALLER, NOT_STARTED, Job

BEAT: Final = 0.05
"""Seconds from one look to the next."""

STALL: Final = 0.1
"""Seconds without an answer after which a loop stands still; as long as asyncio's own debug mode lets pass."""

IDLE_LOOKS: Final = 40
"""Looks at nothing after which the thread ends."""

_log: Final = logging.getLogger("towerman")


class Stalls:
    """Watches the loops of one tower.

    Args:
        core: of the tower.
        shells: the loops that use it.
        now: reads the time that really passes, in seconds; default: the machine's monotonic clock.
    """

    def __init__(
        self, core: Core, shells: Callable[[], Iterable[Shell]], now: Callable[[], float] | None = None
    ) -> None:
        self._core = core
        self._shells = shells
        self._now = now = now or RealClock().now
        self._idle = 0
        self._last = now()
        self._pause = threading.Event()
        self._logged: set[str] = set()

    def begin(self) -> None:
        """Calls are at work: watch them, if nobody does."""
        core = self._core
        with core.lock:
            if core.watching:
                return
            core.watching = True
        self._idle = 0
        self._last = self._now()
        try:
            threading.Thread(target=self._watch, name="towerman-stalls", daemon=True).start()
        except RuntimeError:  # the system gives no thread: calls go on unwatched, and the next batch asks again
            core.watching = False

    def _watch(self) -> None:
        while not self._pause.wait(BEAT):
            if not self.look():
                return

    def look(self) -> bool:
        """One look at each loop; says whether to go on looking."""
        now = self._now()
        late = max(0.0, now - self._last - BEAT)
        self._last = now
        self._idle += 1
        for shell in self._shells():
            if shell.works:
                self._idle = 0
                self._ask(shell, now, late)
            elif shell.pulse is not None:
                self._close(shell.pulse, now)
                shell.pulse = None
        if self._idle > IDLE_LOOKS:
            self._core.watching = False
            # Somebody may have begun in between and relied on this thread.
            self._core.watching = any(shell.works for shell in self._shells())
        return self._core.watching

    def _ask(self, shell: Shell, now: float, late: float) -> None:
        pulse = shell.pulse
        if pulse is not None and pulse.answered is None and shell.loop.is_running():
            pulse.posted += late
            if pulse.told is None and now - pulse.posted >= STALL:
                self._tell(shell, pulse, now - pulse.posted)
            return
        if pulse is not None:
            self._close(pulse, now)
        shell.pulse = pulse = Pulse(now)
        try:
            shell.loop.call_soon_threadsafe(self._answer, pulse)
        except RuntimeError:  # the loop is gone
            shell.pulse = None

    def _answer(self, pulse: Pulse) -> None:
        """On the loop."""
        pulse.answered = self._now()

    def _tell(self, shell: Shell, pulse: Pulse, seconds: float) -> None:
        core = self._core
        job = at_work(shell)
        tool = pulse.told = job.tool.name if job is not None else ""
        with core.lock:
            core.stalls[tool] = core.stalls.get(tool, 0) + 1
        if job is not None:
            shell.tell_stalled(job, seconds)
        if tool not in self._logged:
            self._logged.add(tool)
            _log.warning(
                "the event loop stands still in %s: no other call of it goes on, is timed out or cancelled meanwhile%s",
                f"a call of the tool {tool!r}" if tool else "code that is no call of this tower",
                "; make the handler a plain function, or declare run_in='thread'" if tool else "",
            )

    def _close(self, pulse: Pulse, now: float) -> None:
        """It was answered, or nobody waits for an answer any more: where the loop stood still, that is over."""
        if pulse.told is None:
            return
        seconds = max(0.0, (now if pulse.answered is None else pulse.answered) - pulse.posted)
        core = self._core
        with core.lock:
            core.stalled_seconds += seconds
            core.longest_stall = max(core.longest_stall, seconds)


def at_work(shell: Shell) -> Job | None:
    """The call in whose code the loop is now; from any thread. None: it is no call, or cannot be told."""
    try:
        task = asyncio.current_task(shell.loop)
        context = getattr(task, "get_context", None)
        if context is not None:  # from Python 3.12 on; knows also tasks that a handler has made
            job = context().get(CALLER)
        else:
            jobs = [job for work in list(shell.works) for job in list(work.jobs.values())]
            own = [job for job in jobs if job.task is task and job.started != NOT_STARTED]
            job = max(own, key=lambda job: job.started) if own and task is not None else None
    except RuntimeError:  # it went on at this very moment
        return None
    return job if job is not None and not job.ended and job.work.shell.core is shell.core else None
