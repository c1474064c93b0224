"""Scripts in the place of a tower's handlers, and what is seen of them.

Theory. A tower in a rehearsal keeps everything that was declared (schemas, resources, limits, order, timeouts) and gets
everything else new: a virtual clock, an empty gate, counters at zero, and for each tool a stand-in that does as its
script says and leaves a `Visit` behind. When the rehearsal is left, the tower is put back to what it was, to the last
attribute. So a tower made at import is rehearsed where it is, also by an agent loop that knows it by its global name.

A plain function's stand-in works on a thread, as the function would: a cancel cannot end it, and its work goes on after
a timeout.

House rules. Stand-ins stand where the tower compiles a tool, so no way of declaring one leads past them. A visit shows
no argument value in its `repr`.

Not here: time (loops), the look afterwards (looks).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from random import Random
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

from towerman.clock import VirtualClock
from towerman.core import Core
from towerman.errors import PolicyError
from towerman.gate import Gate
from towerman.journal import Journal
from towerman.ledger import Ledger
from towerman.policy import flag, seconds, shown
from towerman.testing.looks import assert_whole
from towerman.testing.loops import (
    CountedWorkers,
    Latch,
    Stuck,
    VirtualDoor,
    VirtualLoop,
    VirtualShells,
    count_journal,
    running,
)
from towerman.tools import Tool
from towerman.tower import Tower
from towerman.trace import Observer
from towerman.work import CALLER, BatchResult, Job

T = TypeVar("T")

Main = Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]
"""A coroutine, or the function that makes it."""

LONGEST = 1e7
"""Virtual seconds that a work which goes on after its result is waited for."""


@dataclass(slots=True, eq=False)
class Visit:
    """One stay in a handler, from its first line to its end.

    Attributes:
        tool: the tool's name.
        run_id: the run it belongs to.
        call_id: the provider's id of its call.
        index: the call's place in its batch.
        arguments: what the handler was called with, by name, without the Context.
        started: the virtual instant of its first line, in seconds.
        ended: the instant at which its work ended, which may be after its result was sealed; None: it goes on.
        outcome: `at_work`, `returned`, `raised` or `cancelled`.
    """

    tool: str
    run_id: str
    call_id: str
    index: int
    arguments: Mapping[str, object] = field(repr=False)
    started: float
    ended: float | None = None
    outcome: Literal["at_work", "returned", "raised", "cancelled"] = "at_work"


def overlapped(one: Visit, other: Visit) -> bool:
    """Were both at work at some time? One that began at the instant at which the other ended did not overlap it.

    Args:
        one: a visit.
        other: another visit; one that has not ended goes on.
    """
    return one.started < _end(other) and other.started < _end(one)


def peak(visits: Iterable[Visit]) -> int:
    """The most of these that were at work at once; at one instant an end comes before a beginning.

    Args:
        visits: which to look at.
    """
    steps = [
        step for visit in visits for step in ((visit.started, 1), (_end(visit), -1)) if visit.started < _end(visit)
    ]
    inside = most = 0
    for _, change in sorted(steps):
        inside += change
        most = max(most, inside)
    return most


def _end(visit: Visit) -> float:
    return math.inf if visit.ended is None else visit.ended


class Script:
    """What a stand-in does, made by `Rehearsal.script`: it takes its time, waits while it is held, and then ends.

    Attributes:
        visits: the stays in the handlers that this script stood for, in the order in which they began.
    """

    def __init__(
        self,
        *,
        seconds: float | Callable[..., float],
        returns: object,
        raises: BaseException | type[BaseException] | None,
        do: Callable[..., object] | None,
        hold: bool,
        stubborn: bool,
    ) -> None:
        self.visits: list[Visit] = []
        self._seconds = seconds
        self._returns = returns
        self._raises = raises
        self._do = do
        self._hold = hold
        self._stubborn = stubborn
        self._held: list[asyncio.Future[None] | Latch] = []

    @property
    def held(self) -> int:
        """Visits that are held now."""
        return len(self._held)

    def release(self, count: int | None = None) -> None:
        """Let on what is held.

        Args:
            count: so many, those that began first; None: all, and from now on nothing is held.
        """
        if count is None:
            self._hold = False
        going, self._held = self._held[:count], self._held[len(self._held) if count is None else count :]
        for one in going:
            if isinstance(one, Latch):
                one.open()
            elif not one.done():
                one.set_result(None)

    # ---------------------------------------------------------------- at work

    def _length(self, keywords: Mapping[str, object]) -> float:
        if callable(self._seconds):
            return seconds("script: seconds", self._seconds(**keywords), zero=True)
        return self._seconds

    async def _on_loop(self, keywords: Mapping[str, object]) -> object:
        """The body of a coroutine function's stand-in."""
        await self._pass(self._length(keywords))
        while self._hold:
            held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.append(held)
            try:
                await held
            except asyncio.CancelledError:
                if not self._stubborn:
                    raise
            finally:
                still = held in self._held
                if still:
                    self._held.remove(held)
            if not still:
                break
        value = self._end(keywords)
        return await value if inspect.isawaitable(value) else value

    async def _pass(self, length: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + length
        while length > 0:
            try:
                await asyncio.sleep(length)
            except asyncio.CancelledError:
                if not self._stubborn:
                    raise
            length = until - loop.time()

    def _in_thread(self, loop: VirtualLoop, keywords: Mapping[str, object]) -> object:
        """The body of a plain function's stand-in, on its thread."""
        length = self._length(keywords)
        if length > 0:
            rest(loop, length)
        if self._hold:
            latch = Latch(loop)
            loop.call_soon_threadsafe(self._hold_thread, latch)
            latch.wait()
        return self._end(keywords)

    def _hold_thread(self, latch: Latch) -> None:
        """On the loop: it may have been released meanwhile."""
        if self._hold:
            self._held.append(latch)
        else:
            latch.open()

    def _end(self, keywords: Mapping[str, object]) -> object:
        if self._raises is not None:
            raise self._raises
        return self._returns if self._do is None else self._do(**keywords)

    def __repr__(self) -> str:
        return f"Script({len(self.visits)} visits, {self.held} held)"


def rest(loop: VirtualLoop, length: float) -> None:
    """On a thread: let so many virtual seconds of a loop pass."""
    latch = Latch(loop)
    loop.call_soon_threadsafe(loop.call_later, length, latch.open)
    latch.wait()


class Rehearsal:
    """A tower on virtual time, with scripts in the place of its handlers; a context manager.

    Inside, the tower's declarations and limits are as they were, everything else is new: nothing is held, nobody waits,
    all counts are 0. Each tool has a stand-in that takes one virtual second and returns "done", unless `script` says
    otherwise. The real handlers are not called, but for those named by `real`. Leaving it puts the tower back as it
    was and, if nothing was raised, asserts that it was whole (`assert_whole`).

    Args:
        tower: a tower at rest. Runs are opened inside.
        real: names or patterns of tools that keep their real handlers; they are seen all the same, but for those that
            are at work in a process.
        clock: the time, for several towers that share it; None: a time of its own that begins at 0.

    Attributes:
        visits: every stay in a handler, in the order in which they began.

    Raises:
        PolicyError: a pattern that fits no tool; on entering, a tower that is not at rest or is rehearsed already.
    """

    def __init__(self, tower: Tower, *, real: str | Sequence[str] = (), clock: VirtualClock | None = None) -> None:
        self._tower = tower
        self._clock = clock or VirtualClock()
        self._real = [real] if isinstance(real, str) else list(real)
        for pattern in self._real:
            self._fits("real", pattern)
        self._scripts: list[tuple[str, Script]] = [("*", _script())]
        self._before: dict[str, object] | None = None
        self._at_work = False
        self.visits: list[Visit] = []

    # ---------------------------------------------------------------- scripts

    def script(
        self,
        pattern: str,
        *,
        seconds: float | Callable[..., float] = 1.0,
        returns: object = "done",
        raises: BaseException | type[BaseException] | None = None,
        do: Callable[..., object] | None = None,
        hold: bool = False,
        stubborn: bool = False,
    ) -> Script:
        """Say what the stand-ins of some tools do, from now on; of several scripts that fit, the last one holds.

        Args:
            pattern: a tool's name, or a pattern with `*`, `?` and `[...]`.
            seconds: virtual seconds it takes, 0 or more; or a function of the handler's arguments that says so.
            returns: what it returns then.
            raises: what it raises in place of that.
            do: called then as the handler would be, its value is what is returned; may be a coroutine function where
                the handler is one.
            hold: after its time it waits until `Script.release`.
            stubborn: a cancel ends it no sooner. (A plain function's stand-in, on a thread, is always so.)

        Returns:
            The script, which knows its visits and releases what it holds.

        Raises:
            PolicyError: a pattern that fits no tool, or an option out of its range.
        """
        self._fits("script", pattern)
        made = _script(seconds=seconds, returns=returns, raises=raises, do=do, hold=hold, stubborn=stubborn)
        self._scripts.append((pattern, made))
        return made

    def _fits(self, where: str, pattern: object) -> None:
        names = self._tower.tools
        if not isinstance(pattern, str):
            raise PolicyError(f"{where}: a tool's name, or a pattern such as 'crm_*'; got {shown(pattern)}")
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(repr, names))}"
            raise PolicyError(f"{where}: no tool of this tower fits {pattern!r}{hint}")

    # ---------------------------------------------------------------- running

    def run(self, main: Main[T], *, step: float = 0.0) -> T:
        """Run a coroutine on virtual time, and then wait until no handler is at work any more.

        What is held is released when `main` has ended. May be called several times; time goes on.

        Args:
            main: a coroutine function without parameters, or a coroutine.
            step: virtual seconds that pass with each turn of the loop, for code that is busy while it waits.

        Returns:
            What `main` returns.

        Raises:
            Stuck: nothing can go on, and somebody still waits.
            PolicyError: the tower is not in this rehearsal, or this rehearsal is at work already.
            BaseException: whatever `main` raises.
        """
        return _play([self], self._clock, main, step)

    async def _whole(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        finally:
            for _, script in self._scripts:
                script.release()
            await running().idle()
            await self._settled()

    async def _settled(self) -> None:
        """Wait until no work goes on after its result."""
        waited, step = 0.0, 0.1
        while self._tower.statistics().orphans:
            assert waited < LONGEST, f"handlers do not end after their results:\n{self.story()}"
            await asyncio.sleep(step)
            waited, step = waited + step, step * 2

    def execute(self, calls: object, **options: Any) -> BatchResult:
        """Answer one batch in a run of its own, on virtual time: `run` of `Tower.execute`.

        Args:
            calls: as `Run.execute` takes them.
            options: those of `Tower.execute`.
        """
        return self.run(lambda: self._tower.execute(calls, **options))

    async def idle(self) -> None:
        """Inside `run`: wait until nothing else can go on at this instant. Time does not pass meanwhile."""
        await running().idle()

    def rest(self, seconds: float) -> None:
        """Let virtual time pass, in a plain function on a thread, such as a script's `do`.

        Args:
            seconds: how much.

        Raises:
            PolicyError: this code belongs to no call, or an event loop runs in this thread and would stand still.
        """
        caller = CALLER.get()
        if caller is None or asyncio._get_running_loop() is not None:
            raise PolicyError("Rehearsal.rest: for handlers on a thread; elsewhere say `await asyncio.sleep(...)`")
        rest(_loop_of(caller), seconds)

    # ---------------------------------------------------------------- what was seen

    @property
    def now(self) -> float:
        """The present virtual instant in seconds."""
        return self._clock.now()

    @property
    def order(self) -> list[str]:
        """The names of the tools in the order in which their handlers began."""
        return [visit.tool for visit in self.visits]

    def of(self, *patterns: str) -> list[Visit]:
        """The visits of some tools, in the order in which they began.

        Args:
            patterns: names or patterns.

        Raises:
            PolicyError: a pattern that fits no tool.
        """
        for pattern in patterns:
            self._fits("of", pattern)
        return [visit for visit in self.visits if any(fnmatchcase(visit.tool, pattern) for pattern in patterns)]

    def peak(self, *patterns: str) -> int:
        """The most handlers that were at work at once.

        Args:
            patterns: names or patterns of tools; none: all of them.

        Raises:
            PolicyError: a pattern that fits no tool.
        """
        return peak(self.of(*patterns) if patterns else self.visits)

    def story(self) -> str:
        """What was seen so far, a line a visit, for people."""
        rows = [f"{'began':>9} {'ended':>9}  {'outcome':9}  handler"]
        for visit in self.visits:
            ended = "" if visit.ended is None else f"{visit.ended:.3f}"
            where = f"run {visit.run_id}, call {visit.index}"
            rows.append(f"{visit.started:9.3f} {ended:>9}  {visit.outcome:9}  {visit.tool} ({where})")
        return "\n".join(rows)

    # ---------------------------------------------------------------- on and off

    def __enter__(self) -> Self:
        tower = self._tower
        if "_compiled" in vars(tower):
            raise PolicyError("Rehearsal: this tower is in a rehearsal already")
        seen = tower.statistics()
        if seen.runs or seen.running or seen.waiting or seen.behind or seen.orphans:
            raise PolicyError(f"Rehearsal: {tower!r} is not at rest; leave its runs first")
        self._before = dict(vars(tower))
        old = tower._core
        core = Core(tower.options, Gate(Ledger()), self._clock)
        tower._wire(core)
        core.emit = old.emit
        core.random = Random(0).random  # the same pauses in every rehearsal
        compiled = tower._compiled
        vars(tower).update(
            _declared=dict(tower._declared),
            _follower=None,
            _tally=None,
            _prefix="run",
            _closed=False,
            _compiled=lambda *given, **named: self._stand_in(compiled(*given, **named)),
        )
        core.runs = tower._runs  # a pause that comes while calls wait reaches them
        for tool in old.tools.values():
            core.put_tool(self._stand_in(tool))
        # As in the child of a fork: whole, at rest, with its pools anew.
        tower._after_fork()
        watched = self._before["_tally"]
        if watched is not None and tower._tally is not None:  # what is rehearsed is in no report of the tower's own
            tower.remove_observer(cast("Observer", watched))
            tower.add_observer(tower._tally)
        tower._engine = core.engine = None  # other processes know nothing of a rehearsal, nor it of them
        if tower._journal is not None:  # what is rehearsed has not happened: a journal of its own, which is forgotten
            core.journal = tower._journal = Journal(":memory:")
            count_journal(core)
        core.workers = CountedWorkers("towerman-rehearsal")
        tower._door = VirtualDoor(core, self.run)
        tower._made = VirtualShells(core)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tower, before = self._tower, self._before
        assert before is not None
        self._before = None
        try:
            if error is None:
                assert_whole(tower)
        finally:
            tower.flush()
            tower._courier.close()
            tower._core.workers.close()
            if tower._core.journal is not None:
                tower._core.journal.close()
            vars(tower).clear()
            vars(tower).update(before)

    # ---------------------------------------------------------------- stand-ins

    def _stand_in(self, tool: Tool) -> Tool:
        """The same tool with another handler."""
        name = tool.name
        real = any(fnmatchcase(name, pattern) for pattern in self._real)
        if tool.in_thread:

            def on_thread(**keywords: object) -> object:
                job, visit = self._begin(tool, keywords)
                try:
                    value = (
                        tool.handler(**keywords)
                        if real
                        else self._script_of(name, visit)._in_thread(_loop_of(job), keywords)
                    )
                except BaseException:
                    self._end(visit, "raised")
                    raise
                self._end(visit, "returned")
                return value

            # One that has an address is at work in a process, where it is not seen.
            return tool if real and tool.address is not None else replace(tool, handler=on_thread, address=None)

        async def on_loop(**keywords: object) -> object:
            _, visit = self._begin(tool, keywords)
            try:
                if not real:
                    value = await self._script_of(name, visit)._on_loop(keywords)
                else:
                    value = tool.handler(**keywords)
                    if inspect.isawaitable(value):
                        value = await value
            except BaseException as error:
                self._end(visit, "cancelled" if isinstance(error, asyncio.CancelledError) else "raised")
                raise
            self._end(visit, "returned")
            return value

        return replace(tool, handler=on_loop, is_async=True)

    def _script_of(self, name: str, visit: Visit) -> Script:
        script = next(script for pattern, script in reversed(self._scripts) if fnmatchcase(name, pattern))
        script.visits.append(visit)
        return script

    def _begin(self, tool: Tool, keywords: Mapping[str, object]) -> tuple[Job, Visit]:
        job = cast(Job, CALLER.get())
        arguments = {name: value for name, value in keywords.items() if name != tool.context_parameter}
        call = job.work.calls[job.index]
        visit = Visit(tool.name, job.work.run.run_id, call.id, job.index, arguments, self.now)
        self.visits.append(visit)
        return job, visit

    def _end(self, visit: Visit, outcome: Literal["returned", "raised", "cancelled"]) -> None:
        visit.ended = self.now
        visit.outcome = outcome

    def __repr__(self) -> str:
        return f"Rehearsal({self._tower!r}, {len(self.visits)} visits, now={self.now})"


def _script(
    *,
    seconds: object = 1.0,
    returns: object = "done",
    raises: object = None,
    do: object = None,
    hold: object = False,
    stubborn: object = False,
) -> Script:
    """A script whose options are looked at first."""
    if not (raises is None or isinstance(raises, BaseException) or _is_error(raises)):
        raise PolicyError(f"script: raises: an exception or its class; got {shown(raises)}")
    if do is not None and not callable(do):
        raise PolicyError(f"script: do: a function, called as the handler would be; got {shown(do)}")
    if raises is not None and do is not None:
        raise PolicyError("script: raises and do say two things; let do raise")
    return Script(
        seconds=seconds if callable(seconds) else _length(seconds),
        returns=returns,
        raises=cast("BaseException | None", raises),
        do=do,
        hold=flag("script: hold", hold),
        stubborn=flag("script: stubborn", stubborn),
    )


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _length(value: object) -> float:
    return seconds("script: seconds", value, zero=True)


def _loop_of(job: Job) -> VirtualLoop:
    """The virtual loop that a call is at work for."""
    return cast(VirtualLoop, cast(Any, job.work.shell).loop)


def run(main: Main[T], *towers: Tower, step: float = 0.0) -> T:
    """Run a coroutine on virtual time, with the real handlers of some towers; then look whether these are whole.

    Args:
        main: a coroutine function without parameters, or a coroutine.
        towers: what it uses: at rest, and on virtual time meanwhile. A tower that is not named here, nor made by a
            `Rehearsal`, reads the real clock.
        step: virtual seconds that pass with each turn of the loop, for code that is busy while it waits, such as
            anyio's cancel scopes.

    Returns:
        What `main` returns.

    Raises:
        Stuck: nothing can go on, and somebody still waits.
        AssertionError: a tower was not whole at the end.
        BaseException: whatever `main` raises.
    """
    clock = VirtualClock()
    try:
        with ExitStack() as stack:
            rehearsals = [stack.enter_context(Rehearsal(tower, real="*", clock=clock)) for tower in towers]
            return _play(rehearsals, clock, main, step)
    finally:
        if not callable(main):
            main.close()  # also where it was never begun


def _play(rehearsals: Sequence[Rehearsal], clock: VirtualClock, main: Main[T], step: float) -> T:
    """Run a coroutine on a virtual loop of its own, with some rehearsals, and let their handlers come to an end."""
    coroutine = main() if callable(main) else main
    for rehearsal in rehearsals:
        if rehearsal._before is None or rehearsal._at_work:
            coroutine.close()
            told = (
                "it is at work already" if rehearsal._at_work else "enter it first: with Rehearsal(tower) as rehearsal"
            )
            raise PolicyError(f"Rehearsal.run: {told}")
    for rehearsal in rehearsals:
        rehearsal._at_work = True
        coroutine = rehearsal._whole(coroutine)
    try:
        return VirtualLoop(clock, step=step).run(coroutine)
    except Stuck as stuck:
        raise Stuck("\n".join([str(stuck), *(rehearsal.story() for rehearsal in rehearsals)])) from None
    finally:
        for rehearsal in rehearsals:
            rehearsal._at_work = False
