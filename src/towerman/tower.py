"""The public Tower and Run: tools and limits on one side, provider responses on the other.

Theory. A tower is made once, at import if you like: it binds to no loop. A run is one agent's work; it takes the
model's responses one after another and answers each call of each. What a batch comes to is a `BatchResult`: the
results in emitted order, and the messages that the provider wants next.

House rules. No rule of admission lives here; this room binds names to the rooms that have them.

Not here: how calls are decided, run and sealed (gate, plan, runner), what providers send and take (adapters).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import translate
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, ParamSpec, Self, TypeVar, cast, overload
from weakref import WeakSet

from towerman.calls import Batch, Call
from towerman.changes import AtWork, Changes, same, too_wide, tool_changes, touches_the_same, tower_changes
from towerman.clock import Clock, RealClock, instant_of
from towerman.config import Config, Rule, Source, blame, check_rules, laid_out, rule, settled
from towerman.errors import PolicyError
from towerman.gate import GRANTED, NEVER, Gate, Lot
from towerman.ledger import Ledger
from towerman.leftovers import CloseReport, DeadLetter
from towerman.limits import Limits
from towerman.policy import (
    TOWER_OPTIONS,
    Declared,
    Merge,
    Mode,
    OnExcess,
    OnOrphan,
    OnResult,
    Pool,
    Preset,
    RunIn,
    TowerPolicy,
    Undeclared,
    WhenBusy,
    flag,
    name_of,
    only_known,
    pools_of,
    seconds,
    shown,
    whole,
)
from towerman.threads import Couriers
from towerman.tools import Tool, compile_tool, is_coroutine_function, name_of_tool
from towerman.trace import Event, Observer
from towerman.work import BatchResult, Context, Core, RunState, Work

if TYPE_CHECKING:
    from towerman.check import CheckReport
    from towerman.explain import Explanation
    from towerman.follow import Follower, Taken
    from towerman.gate import Flow
    from towerman.report import ObserveReport, Tally
    from towerman.runner import Shells, SyncDoor
    from towerman.watched import Watched

HandlerT = TypeVar("HandlerT", bound=Callable[..., object])
P = ParamSpec("P")

_log: Final = logging.getLogger("towerman")

Patterns = str | Iterable[str] | None
"""Tool names or patterns such as `crm_*`."""


# -------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One pool at one instant.

    Args:
        limit: permits it has, as declared.
        held: permits taken now.
        peak: the most that were ever taken at once; with mode="observe" it may be more than the limit.
        queued: calls that wait and want some of it.
        scope: whom it counts for.
        orphaned: permits of `held` that orphans hold.
    """

    limit: int
    held: int
    peak: int
    queued: int
    scope: str
    orphaned: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """The tower at one instant.

    Args:
        pools: by name; `process` is the tower's max_concurrency, `run:ID` a run's, `tool:NAME` a tool's own limit.
        runs: runs that are open.
        running: calls whose handlers are at work and whose results are open.
        waiting: calls in the gate's queue.
        behind: calls that wait behind those, uncounted by any bound.
        outcomes: sealed results by outcome.
        rejections: sealed results by code.
        orphans: works that go on after their results were sealed.
        orphans_released: orphans whose holds were given to others (`on_orphan="release"`).
        shared: calls that the run of another call answered, identical to it or merged with it.
        late_results: values that came after their results were sealed, and were dropped; see `Tower.dead_letters`.
        stalls: how often an event loop stood still, by the tool that held it up; under "" for other code.
        stalled_seconds: for how long loops stood still, all told.
        longest_stall: the longest of these times in seconds.
        promotions: waiters that were promoted for having been passed.
        late_events: events that came for calls already decided, and were ignored.
        threads: worker threads alive.
        events_sent: events handed to observers, counted for each of them.
        events_pending: those that have not been delivered yet.
        events_dropped: events that an observer did not get: too many waited for it, or it was removed before.
        events_lost: events that observers got and could not keep, as far as they say so (attribute `lost`).
        observer_failures: exceptions raised by observers.
    """

    pools: Mapping[str, PoolStatistics]
    runs: int
    running: int
    waiting: int
    behind: int
    outcomes: Mapping[str, int]
    rejections: Mapping[str, int]
    orphans: int
    orphans_released: int
    shared: int
    late_results: int
    stalls: Mapping[str, int]
    stalled_seconds: float
    longest_stall: float
    promotions: int
    late_events: int
    threads: int
    events_sent: int
    events_pending: int
    events_dropped: int
    events_lost: int
    observer_failures: int


# -------------------------------------------------------------------------------------------- runs


class Run:
    """One agent run: an async and a plain context manager, made by `Tower.run`. Leaving it cancels what is at work.

    Attributes:
        run_id: its id.
        last_batch: what the last finished batch came to, also when the caller was cancelled; None before the first.
    """

    def __init__(self, tower: Tower, state: RunState) -> None:
        self._tower = tower
        self._state = state
        self.last_batch: BatchResult | None = None

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._state.run_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def execute(
        self, calls: object, *, format: str | None = None, on_result: OnResult | None = None
    ) -> BatchResult:
        """Answer every call of one model response: one result a call, in emitted order, whatever happens.

        Args:
            calls: a provider's response or message (SDK object, mapping or JSON text), or a list of `Call` or mappings.
            format: the form it has; None: found out.
            on_result: sees each result as it is sealed; its content may be cut further when the whole batch is too
                large. If it raises, the batch is finished first and then the error is raised.

        Returns:
            The results. No calls: an empty batch.

        Raises:
            InputError: it is no batch of calls in any known form; nothing was run.
            PolicyError: `on_result` is no plain function; nothing was run.
            asyncio.CancelledError: the caller was cancelled. The batch was sealed first, which takes at most the
                tower's `grace`; its results are in `last_batch`.
            KeyboardInterrupt, SystemExit: raised by a handler; the batch was sealed first.
        """
        if on_result is not None:
            _check_hook(on_result)
        batch = self._decode(calls, format)
        shell = self._tower._shells.here()
        work: Work | None = None

        def begun(one: Work) -> None:
            nonlocal work
            work = one

        done: BatchResult | None = None
        try:
            await shell.execute(self._state, batch, on_result, begun)
        finally:
            if work is not None and not work.left:
                done = BatchResult(work)
                if work.parent is None:
                    self.last_batch = done
        assert done is not None
        return done

    def execute_sync(
        self, calls: object, *, format: str | None = None, on_result: OnResult | None = None
    ) -> BatchResult:
        """`execute` for code without an event loop: waits in this thread until every call has its result.

        Async handlers run on a loop that the tower keeps on a thread of its own; from within a sync handler, on the
        loop of its call. An interrupt of this thread cancels the batch and is raised once it is sealed.

        Args:
            calls: as `execute` takes them.
            format: the form they have; None: found out.
            on_result: sees each result as it is sealed, on the loop's thread.

        Raises:
            PolicyError: an event loop runs in this thread: await `execute` there.
        """
        return self._tower._sync.run("execute_sync", lambda: self.execute(calls, format=format, on_result=on_result))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.number in self._tower._runs:
            self._tower._sync.run("aclose_sync", self.aclose)

    @staticmethod
    def _decode(calls: object, format: str | None) -> Batch:
        if format is None and isinstance(calls, list) and all(type(call) is Call and _is_plain(call) for call in calls):
            return Batch(tuple(calls))
        from towerman import adapters

        return adapters.decode(calls, format)

    def cancel(
        self, reason: str = "the run was cancelled", *, call_id: str | None = None, index: int | None = None
    ) -> None:
        """Cancel what this run has at work: all of it, or one call. May be called from any thread.

        What waits never starts; what runs is told to stop and has the tower's `grace` seconds. Every call still gets
        its result. The run stays open.

        Args:
            reason: told in the results and the trace.
            call_id: cancel only calls with this provider id.
            index: cancel only the call at this place of its batch, from 0; a place that no batch has cancels nothing.

        Raises:
            PolicyError: an argument of another type; nothing was cancelled.
        """
        texts: dict[str, object] = {"reason": reason, "call_id": "" if call_id is None else call_id}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise PolicyError(f"cancel: {name}: text; got {type(text).__name__}")
        if index is not None:
            whole("cancel: index", index, least=0)
        self._tower._shells.cancel(self._state, reason, call_id, index)

    async def aclose(self) -> None:
        """Close the run: nothing new is taken, what is at work is cancelled and sealed (at most `grace` seconds)."""
        state = self._state
        if state.number not in self._tower._runs:
            return
        state.closed = state.closed or "it was left"
        self.cancel("the run was closed")
        try:
            await self._tower._shells.wait_sealed(state)
        finally:
            self._tower._close_run(state)

    def __repr__(self) -> str:
        state = "closed" if self._state.closed is not None else "open"
        return f"Run({self.run_id!r}, {state}, {len(self._state.works)} batches at work)"


# -------------------------------------------------------------------------------------------- the tower


_TOWERS: WeakSet[Tower] = WeakSet()


def _after_fork() -> None:
    for tower in _TOWERS:
        tower._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _from_all_places(init: Callable[P, None]) -> Callable[P, None]:
    """Fill in, from the environment and the file, the options that were not given as arguments.

    The signature keeps the defaults that hold where no place gives an option; only out here can be seen whether an
    argument was given that equals its default.
    """

    @wraps(init)
    def filled(self: object, config: Source | None = None, **given: object) -> None:
        read, options = settled(config, given)
        cast("Callable[..., None]", init)(self, read, **options)
        tower = cast("Tower", self)
        tower._layers = tower._layers._replace(given={key: given[key] for key in TOWER_OPTIONS if key in given})

    return cast("Callable[P, None]", filled)


class Layers(NamedTuple):
    """What a tower's options are made of.

    Args:
        options: all of it together.
        config: the file.
        given: what was given as arguments, when the tower was made or later.
        rules: for tools, as they were given in code.
    """

    options: TowerPolicy
    config: Config
    given: Mapping[str, object]
    rules: tuple[Rule, ...]


def _taken(tower: weakref.ref[Tower], path: str) -> Taken:
    """A followed file has changed."""
    from towerman.follow import Taken

    it = tower()
    if it is None or it._closed:
        return Taken.GONE
    try:
        changes = it.configure(path)
    except AtWork as later:
        if it._told_later != str(later):
            it._told_later = str(later)
            _log.warning("%s: not taken yet: %s", path, later)
        return Taken.LATER
    except Exception as wrong:
        _log.error("%s: not taken, what held before still holds: %s", path, wrong)
        return Taken.DONE
    it._told_later = ""
    for line in str(changes).splitlines():
        _log.info("%s: %s", path, line)
    return Taken.DONE


class Tower:
    """Clears every tool call before it runs: limits, order, access, permission, all in one step.

    Args:
        config: a `towerman.toml`, as a path or as a mapping of its keys; it gives what no argument and no variable
            `TOWERMAN_*` of the environment gives. Default: the file that `TOWERMAN_CONFIG` names, if any.
        max_concurrency: calls that may run at once in this process, over all runs.
        run_concurrency: calls of one run that may run at once.
        pools: named limits that tools share: name to permits or `Pool`. Pools of the file with other names stay.
        max_calls_per_batch: calls that are run for one response.
        on_excess: "tell" runs the first calls in emitted order and answers the rest `call_cap`; "queue" runs all,
            slower.
        undeclared: what a tool that declares no access is: "ordered" (alone, beside independent calls only, and in
            emitted order within its run), "exclusive" (alone in the process), "independent".
        when_busy: "wait" (in a bounded queue, with a deadline) or "reject" (answered at once).
        max_wait: seconds a call may wait. Waiting for calls of its own batch does not count.
        max_queued: calls that may wait at once.
        timeout: seconds a call may run.
        grace: seconds a call that was told to stop has for cleaning up.
        on_orphan: what a call that goes on after its result was sealed does with its permits and resources: "hold"
            until its work ends, or "release" at once.
        max_result_bytes: bound of one result's content, in UTF-8 bytes.
        max_batch_bytes: bound of all contents of one batch together.
        observers: callables that take an `Event`; each is served by a thread of its own.
        mode: "enforce", or "observe": pools and concurrency limits hold nobody back, and `report()` says what they
            would have held back. Nothing else is relaxed: not order and resources, not permission,
            arguments, plans and the cap on calls.
        debug: print tracebacks of handlers to stderr.
        strict: refuse, when it is declared, a tool without access, limit or retry class.

    Raises:
        PolicyError: an option out of its range, naming it and the fix; a file that cannot be read or has a mistake.

    Attributes:
        options: what holds for this tower, whichever place gave it.

    A tower belongs to no event loop and may be made at import. It is a plain and an async context manager; `aclose`
    ends it.
    """

    @_from_all_places
    def __init__(
        self,
        config: Source | None = None,
        *,
        max_concurrency: int = 32,
        run_concurrency: int = 8,
        pools: Mapping[str, int | Pool] | None = None,
        max_calls_per_batch: int = 25,
        on_excess: OnExcess = "tell",
        undeclared: Undeclared = "ordered",
        when_busy: WhenBusy = "wait",
        max_wait: float = 30.0,
        max_queued: int = 1000,
        timeout: float = 300.0,
        grace: float = 5.0,
        on_orphan: OnOrphan = "hold",
        max_result_bytes: int = 32_768,
        max_batch_bytes: int = 131_072,
        observers: Iterable[Observer] = (),
        mode: Mode = "enforce",
        debug: bool = False,
        strict: bool = False,
        _clock: Clock | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in TOWER_OPTIONS}
        self.options = TowerPolicy(**{**given, "pools": pools_of(pools)})
        self._layers = Layers(self.options, cast("Config", config), {}, ())  # it was read on the way in, see above
        self._changing = threading.Lock()
        self._declared: dict[str, tuple[Callable[..., object], Mapping[str, object]]] = {}
        check_rules(self._layers.config.tools, self.options)
        self._courier: Couriers[Event] = Couriers()
        clock = _clock or RealClock()
        self._born = clock.now()
        self._watched: Watched[Lot[tuple[Work, int]]] | None = None
        self._tally: Tally | None = None
        self._core = Core(self.options, Gate(self._new_ledger(clock)), clock)
        self._made: Shells | None = None
        self._door: SyncDoor | None = None
        self._runs: dict[int, RunState] = {}
        self._run_count = 0
        self._prefix = os.urandom(4).hex()
        self._limits = Limits(self._core)
        self._follower: Follower | None = None
        self._watched_every = 0.0
        self._told_later = ""
        self._closed = False
        try:
            listed = tuple(observers)
        except Exception:
            raise PolicyError(f"observers: a list of callables; got {shown(observers)}") from None
        for observer in listed:
            self.add_observer(observer)
        tally = cast("Tally | None", self._tally)
        if tally is not None:
            self.add_observer(tally)
        self._limits.add_process()
        _TOWERS.add(self)

    def _new_ledger(self, clock: Clock) -> Ledger[Lot[tuple[Work, int]]]:
        if self.options.mode == "enforce":
            return Ledger()
        from towerman.report import Tally
        from towerman.watched import Watched

        if self._tally is None:
            self._tally = Tally()
        self._watched = Watched(clock.now)
        return self._watched

    def _after_fork(self) -> None:
        """In the child of a fork: what was at work belongs to the parent, and its threads and loops are not here."""
        core = self._core
        core.reset(Gate(self._new_ledger(core.clock)))
        self._born = core.now()
        if self._tally is not None:
            self._tally.clear()
        self._made = self._door = None
        self._limits.forget()
        self._changing = threading.Lock()
        self._courier = self._courier.anew()
        if core.emit is not None:
            core.emit = self._courier.sender()
            core.gate.notes = []
        limits = self._limits
        limits.add_process()
        for tool in core.tools.values():
            limits.add_tool(tool)
        for state in self._runs.values():
            state.renew(core.gate.open_flow(state.number, state.flow.window, state.limit))
            limits.add_run(state)
        if self._follower is not None:
            self.watch(self._watched_every)

    @property
    def _sync(self) -> SyncDoor:
        """The way in for threads without a loop."""
        if self._door is None:
            from towerman.runner import SyncDoor

            with self._core.lock:
                if self._door is None:
                    self._door = SyncDoor(self._core)
        return self._door

    @property
    def _shells(self) -> Shells:
        """The runners of the loops that use this tower; asyncio is imported with the first of them."""
        if self._made is None:
            from towerman.runner import Shells

            with self._core.lock:
                if self._made is None:
                    self._made = Shells(self._core)
        return self._made

    # ---------------------------------------------------------------- tools

    @overload
    def tool(self, function: HandlerT, /) -> HandlerT: ...
    @overload
    def tool(
        self,
        *,
        name: str | None = None,
        description: str | None = None,
        schema: Mapping[str, object] | None = None,
        reads: Declared | None = None,
        writes: Declared | None = None,
        independent: bool | None = None,
        sequential: bool | None = None,
        only_call: bool | None = None,
        read_only: bool | None = None,
        idempotent: bool | None = None,
        pools: str | Sequence[str] | Mapping[str, int] | None = None,
        weight: int | None = None,
        max_concurrency: int | None = None,
        timeout: float | None = None,
        max_wait: float | None = None,
        max_queued: int | None = None,
        when_busy: WhenBusy | None = None,
        preset: Preset | None = None,
        max_result_bytes: int | None = None,
        encode: Callable[..., object] | None = None,
        summarize: Callable[..., object] | None = None,
        share_identical: bool | None = None,
        merge: Merge | None = None,
        run_in: RunIn | None = None,
        own_task: bool | None = None,
    ) -> Callable[[HandlerT], HandlerT]: ...
    def tool(self, *functions: Callable[..., object], **options: object) -> object:
        """Declare a tool: bare (`@tower.tool`) or called with options. The function itself stays as it is: calling it
        directly is a plain call, not admitted.

        Args:
            function: coroutine function, or plain function, which runs on a worker thread.
            name: default: the function's name.
            description: default: the docstring's text.
            schema: JSON schema of the arguments; default: from the signature. With one, the handler gets keywords.
            reads: resources it reads: templates over the arguments ("file:{path}", "file:{dir}/**"), or a callable.
            writes: resources it may change.
            independent: it touches nothing that calls share (says nothing about effects).
            sequential: alone (beside independent calls only) and in emitted order within its run.
            only_call: may not share a batch with other calls.
            read_only: no side effect; default: True for a tool that only reads.
            idempotent: repeating it is harmless.
            pools: named pools it takes permits of: names, or name to permits.
            weight: permits of the process-wide limit.
            max_concurrency: a limit of this tool's own.
            timeout: seconds one call may run.
            max_wait: seconds one call may wait.
            max_queued: calls of this tool that may wait.
            when_busy: "wait" or "reject".
            preset: "read" or "background": a waiting policy in one word; options beside it win.
            max_result_bytes: bound of its results.
            encode: takes the handler's value, gives text or a value that is encoded in its place.
            summarize: takes an oversized value, gives a shorter one.
            share_identical: identical calls of one batch, with no conflicting call between them, run once; each gets a
                result of its own with a copy of the value (None where it cannot be copied). A failure is not shared:
                the next one runs.
            merge: for neighbouring calls on the same resources (reads= or writes=): takes the list of their keyword
                arguments, in order, and returns those of one run that does it all. What it returns is checked like a
                call's and must touch the same; where it cannot be used the calls run one by one. Called on the
                event loop: it should be quick.
            run_in: "loop", "thread" or "process" (for functions that compute: a spawned process, killed when the call
                is given up); default: loop for coroutine functions, thread for others.
            own_task: False lets several calls of one batch run in one task while its context stays unchanged.

        Raises:
            PolicyError: naming the tool, the option and the fix; also for a name that is taken.
        """
        if functions:
            (function,) = functions
            self.add_tool(function, **options)
            return function

        def declare(handler: Callable[..., object]) -> Callable[..., object]:
            self.add_tool(handler, **options)
            return handler

        return declare

    def add_tool(self, function: Callable[..., object], /, **options: object) -> None:
        """Declare a tool without decorating; the options are those of `tool`."""
        core = self._core
        tool = self._compiled(name_of_tool(function, options), function, options, self._layers)
        if tool.name in core.tools:
            raise PolicyError(f"tool {tool.name!r}: this name is taken; give one of the two another name=")
        self._declared[tool.name] = function, options
        with core.lock:
            self._limits.add_tool(tool)
            core.put_tool(tool)
        for state in list(self._runs.values()):
            core.widen(state)

    def _compiled(
        self,
        name: str,
        function: Callable[..., object],
        options: Mapping[str, object],
        layers: Layers,
        known: Tool | None = None,
    ) -> Tool:
        merged, origins = laid_out(name, options, layers.config.tools, layers.rules)
        tower = layers.options
        try:
            return compile_tool(name, function, merged, tower, Context, tower.pools, known)
        except PolicyError as wrong:
            raise blame(wrong, origins) from None

    def policy(self, pattern: str, **options: object) -> None:
        """Options for tools by pattern: `tower.policy("crm_*", pools=["crm"], timeout=5)`.

        It holds for tools declared before and after. What is given at a tool wins over it, it wins over the file. Of
        several that match a tool the most specific one wins, for each option by itself: an exact name before a pattern,
        then the pattern with more literal characters, then the later one. `independent` and what a tool touches are one
        question, which the stronger answers.

        Args:
            pattern: a tool's name, or a pattern with `*`, `?` and `[...]`.
            options: those of `tool`, without `name` and `schema`.

        It holds for calls that come afterwards, as with `configure`.

        Raises:
            PolicyError: an option that is wrong, by itself or for a tool that is declared already; or it changes what
                declared tools touch, and calls are at work. Nothing was changed.
        """
        one = rule(pattern, options)
        self._configure(f"policy {pattern!r}", None, {}, [one])

    def configure(
        self,
        config: Source | None = None,
        *,
        tools: Mapping[str, Mapping[str, object]] | None = None,
        **options: object,
    ) -> Changes:
        """Change options while calls run and wait (R-64); also from another thread. All of it, or nothing.

        A lower limit ends nobody: what is held above it comes down as calls end. A higher one wakes those who wait at
        once. A waiting call that needs more than there is now is answered `concurrency_limit`. A limit that a tool did
        not have before counts those of its calls that are at work. Times, bounds of queues and other options of tools
        hold for calls that come afterwards.

        Args:
            config: a `towerman.toml`, as a path or as a mapping, in place of the one so far: what it does not say any
                more falls back to the environment and the defaults. `tower.configure(tower.config)` reads the file
                anew.
            tools: options of tools by pattern, as `policy` takes them.
            options: those of the tower, by name; they win over file and environment from now on. Of `pools` only those
                that are named change; a number changes a pool's permits and leaves the rest of it as it is.

        Returns:
            What is different now; empty where nothing is.

        Raises:
            PolicyError: naming the option and the fix: it is wrong, or cannot change while the tower lives, or it
                changes what declared tools touch, and calls are at work. Nothing was changed.
        """
        given: dict[str, object] = {key: value for key, value in options.items() if value is not None}
        only_known("configure", given, (*TOWER_OPTIONS, "config", "tools"))
        if "pools" in given:
            given["pools"] = self._with_permits(given["pools"])
        if tools is not None and not isinstance(tools, Mapping):
            raise PolicyError(f'configure: tools: a mapping such as {{"crm_*": {{"timeout": 5}}}}; got {shown(tools)}')
        rules = []
        for pattern, its in cast("Mapping[object, object]", tools or {}).items():
            if not isinstance(its, Mapping) or not all(isinstance(key, str) for key in its):
                raise PolicyError(f"configure: tools.{shown(pattern)}: a mapping of options; got {shown(its)}")
            rules.append(rule(pattern, cast("Mapping[str, object]", its)))
        return self._configure("configure", config, given, rules)

    def _with_permits(self, given: object) -> dict[str, Pool]:
        """Pools as they are given; of those that exist a plain number changes the permits alone."""
        checked = pools_of(given)
        for name, value in cast("Mapping[str, object]", given).items():
            known = self.options.pools.get(name)
            if known is not None and not isinstance(value, Pool):
                checked[name] = replace(known, permits=checked[name].permits)
        return checked

    def _configure(
        self, where: str, source: Source | None, given: Mapping[str, object], rules: Sequence[Rule]
    ) -> Changes:
        """Validate first, commit second."""
        with self._changing:
            before = self._layers
            pools = {**pools_of(before.given.get("pools")), **pools_of(given.get("pools"))}
            arguments = {**before.given, **given, "pools": pools}
            config, merged = settled(before.config if source is None else source, arguments)
            options = TowerPolicy(**{key: merged[key] for key in TOWER_OPTIONS if key in merged})  # type: ignore[arg-type]
            after = Layers(options, config, arguments, (*before.rules, *rules))
            check_rules((*config.tools, *after.rules), options)
            found = tower_changes(before.options, options)
            core = self._core
            tools: list[Tool] = []
            moved = ""
            for name, old in list(core.tools.items()):
                new = self._compiled(name, *self._declared[name], after, old)
                if not same(old, new):
                    tools.append(new)
                    found += tool_changes(old, new)
                    if not touches_the_same(old, new):
                        moved = moved or name
            with core.lock:
                if moved and self._at_work():
                    raise AtWork(
                        f"{where}: it changes what {moved!r} touches, and calls are at work; say it before the first "
                        "run, or when nothing is at work"
                    )
                decided = self._limits.change(options, tools, list(self._runs.values())) if found or tools else []
                self._layers, self.options = after, options
                over = {
                    self._shown(pool.key): pool.held - pool.limit
                    for pool in core.gate.ledger.pools.values()
                    if pool.held > pool.limit
                }
            if decided or found:
                self._shells.carry_out(decided)
            granted = sum(entry.status == GRANTED for entry in decided)
            wide = tuple(too_wide(core.tools.values(), options)) if found else ()
            return Changes(tuple(found), over, granted, len(decided) - granted, wide)

    def _at_work(self) -> bool:
        gate = self._core.gate.statistics()
        return bool(gate["running"] or gate["orphans"]) or any(state.works for state in self._runs.values())

    def watch(self, every: float = 1.0) -> None:
        """Follow the file that the tower was made with: what changes in it comes into force by itself.

        It is read again once it has stood still from one look to the next. What has changed is logged; a file that is
        wrong is logged and changes nothing. A change of what tools touch is taken once no call is at work. Ends with
        the tower, or with `unwatch`.

        Args:
            every: seconds from one look to the next.

        Raises:
            PolicyError: the tower was made without a file.
        """
        from towerman.follow import Follower

        path = self.config
        if path is None:
            raise PolicyError("watch: the tower was made without a file; name one: Tower('towerman.toml')")
        every = seconds("watch: every", every)
        self.unwatch()
        self._watched_every = every
        self._follower = Follower(path, partial(_taken, weakref.ref(self), path), every)
        self._follower.start()

    def unwatch(self) -> None:
        """Follow the file no more."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    @property
    def config(self) -> str | None:
        """The path of the file that was read when the tower was made, or None."""
        return self._layers.config.path

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the declared tools, in the order of declaration."""
        return tuple(self._core.tools)

    def schemas(self, format: str = "openai") -> list[dict[str, object]]:
        """The declared tools as the provider's request wants them.

        Args:
            format: "openai", "anthropic" or "towerman".

        Raises:
            PolicyError: a tool's name or schema that the provider cannot take.
        """
        from towerman import adapters

        return adapters.schemas(
            [(tool.name, tool.policy.description, tool.checker.schema) for tool in self._core.tools.values()], format
        )

    @staticmethod
    def provider_options(format: str, parallel: bool = False) -> dict[str, object]:
        """The provider's own switch for several calls in one response, as request options.

        Towerman's limits hold whatever it says; it only changes what the model emits.

        Args:
            format: "openai", "anthropic" or "towerman".
            parallel: True lets the model emit several calls at once.
        """
        from towerman import adapters

        return adapters.provider_options(format, parallel)

    # ---------------------------------------------------------------- runs

    def run(
        self,
        run_id: str | None = None,
        *,
        tenant: str | None = None,
        deps: object = None,
        priority: int = 0,
        deadline: float | datetime | None = None,
        allow: Patterns = None,
        deny: Patterns = None,
        max_concurrency: int | None = None,
        fail_fast: bool = False,
    ) -> Run:
        """A new run; use it as `async with tower.run() as run`.

        Args:
            run_id: its id in traces; made when it is not given.
            tenant: whom it belongs to, for pools of scope "tenant".
            deps: whatever its handlers need; they get it as `Context.deps`.
            priority: higher goes first; 0 is the middle.
            deadline: seconds from now, or an aware datetime: nothing starts after it, and what runs then is stopped.
            allow: tool name patterns; only these may be called.
            deny: tool name patterns that may not be called; wins over `allow`.
            max_concurrency: calls of this run that may run at once; default: the tower's run_concurrency.
            fail_fast: after the first failure of a batch nothing more of it starts, and what runs without side effects
                is
                cancelled.

        Raises:
            PolicyError: an option out of its range.
        """
        open_run = self._checked_run(
            run_id=run_id,
            tenant=tenant,
            deps=deps,
            priority=priority,
            deadline=deadline,
            allow=allow,
            deny=deny,
            max_concurrency=max_concurrency,
            fail_fast=fail_fast,
        )
        core = self._core
        with core.lock:
            self._run_count += 1
            state = open_run(core, self._run_count)
            if self._closed:
                state.closed = "the tower is closed"
            self._runs[state.number] = state
        run = Run(self, state)
        state.execute = run.execute
        return run

    def _checked_run(
        self,
        *,
        run_id: str | None = None,
        tenant: str | None = None,
        deps: object = None,
        priority: int = 0,
        deadline: float | datetime | None = None,
        allow: Patterns = None,
        deny: Patterns = None,
        max_concurrency: int | None = None,
        fail_fast: bool = False,
    ) -> Callable[[Core, int], RunState]:
        """The options of `run`, checked: what opens such a run of that number in a core, under its lock."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise PolicyError(f"priority: a whole number, higher goes first; got {shown(priority)}")
        if run_id is not None:
            name_of("run_id", run_id)
        if tenant is not None:
            name_of("tenant", tenant)
        flag("fail_fast", fail_fast)
        if deadline is not None and not isinstance(deadline, int | float | datetime):
            raise PolicyError(
                f"deadline: seconds from now, 0 or more, or an aware datetime; got {type(deadline).__name__}"
            )
        try:
            limit = NEVER if deadline is None else instant_of(deadline, self._core.now())
        except ValueError as wrong:
            raise PolicyError(str(wrong)) from None
        window = self.options.run_concurrency if max_concurrency is None else whole("max_concurrency", max_concurrency)
        may_call = _permission(allow, deny)

        def open_run(core: Core, number: int) -> RunState:
            flow = core.gate.open_flow(number, window, limit)
            state = RunState(
                number,
                run_id or f"{self._prefix}-{number}",
                flow,
                tenant=tenant,
                deps=deps,
                priority=priority,
                limit=limit,
                fail_fast=fail_fast,
                may_call=may_call,
                own_window=max_concurrency is not None,
            )
            (self._limits if core is self._core else Limits(core)).add_run(state)
            return state

        return open_run

    def explain(self, calls: object, *, format: str | None = None, **run_options: object) -> Explanation:
        """What a batch would do: what would run together, what waits for what and why, what would be refused.

        Runs nothing and changes nothing: no permit is taken, nothing is counted, learned or traced. It goes by the
        limits as they are now and takes nothing else to be at work.

        Args:
            calls: as `Run.execute` takes them.
            format: the form they have; None: found out.
            run_options: those of `run`.

        Returns:
            An `Explanation`: printable as text, `to_dict()` for JSON, `to_svg()` for a drawing.

        Raises:
            InputError: it is no batch of calls in any known form.
            PolicyError: an option of the run out of its range.
        """
        from towerman.explain import explain

        batch = Run._decode(calls, format)
        open_run = self._checked_run(**run_options)  # type: ignore[arg-type]  # checked there
        core = self._core.rehearsal()
        run = open_run(core, 0)
        seen, needs, notice = core.look_over(run, batch)
        estimates = core.estimates([core.tools.get(one.tool) for one in seen])
        gate, flow = cast(
            "tuple[Gate[int], Flow[int]]", (core.gate, run.flow)
        )  # who owns a call is the caller's to say
        return explain(seen, needs, gate, flow, core.now(), estimates=estimates, notice=notice)

    def check(self, *, deadline: float | None = None) -> CheckReport:
        """Is this tower ready for tools that run at the same time? Nine questions answered, scopes, and findings.

        Reads declarations only: nothing is called.

        Args:
            deadline: seconds that its runs may last; timeouts and waits above it are then findings.

        Returns:
            A `CheckReport`: printable as text, `to_dict()` for JSON, `ok` where there is no error and no warning.

        Raises:
            PolicyError: a deadline that is no number of seconds above 0.
        """
        from towerman.check import check

        core = self._core
        most = None if deadline is None else seconds("check: deadline", deadline)
        return check(core.policy, list(core.tools.values()), deadline=most)

    async def execute(
        self,
        calls: object,
        *,
        format: str | None = None,
        on_result: OnResult | None = None,
        **run_options: object,
    ) -> BatchResult:
        """Answer one batch in a run of its own: `Run.execute` with the options of `run`."""
        async with self.run(**run_options) as run:  # type: ignore[arg-type]  # checked by run()
            return await run.execute(calls, format=format, on_result=on_result)

    def execute_sync(
        self,
        calls: object,
        *,
        format: str | None = None,
        on_result: OnResult | None = None,
        **run_options: object,
    ) -> BatchResult:
        """One batch in a run of its own, for code without an event loop: `Run.execute_sync`."""
        return self._sync.run(
            "execute_sync", lambda: self.execute(calls, format=format, on_result=on_result, **run_options)
        )

    def _close_run(self, state: RunState) -> None:
        core = self._core
        with core.lock:
            if self._runs.pop(state.number, None) is None:
                return
            if state.works:
                state.gone = True
            else:
                core.gate.close_flow(state.flow)
            self._limits.drop_run(state, self._runs.values())
        self._shells.rest()

    # ---------------------------------------------------------------- looking in, ending

    def add_observer(self, observer: Observer) -> None:
        """Let one more observer see the events from now on.

        Each observer has a thread of its own: one that is slow, or never comes back, keeps nothing from the others and
        holds up no call. Of its events at most 100,000 wait; further ones are dropped for it and counted.

        Args:
            observer: a callable that takes an `Event`. What it raises is counted and goes no further.

        Raises:
            PolicyError: it is not callable.
        """
        if not callable(observer):
            raise PolicyError(f"observers: callables that take an Event; got {type(observer).__name__}")
        self._courier.add(observer)
        core = self._core
        with core.lock:
            core.emit = self._courier.sender()
            if core.gate.notes is None:
                core.gate.notes = []

    def remove_observer(self, observer: Observer) -> None:
        """Let an observer see nothing more, once it has seen all events so far.

        The wait lasts at most `grace` seconds; what it has not seen by then is dropped and counted. An observer that
        removes itself sees nothing more at once. One that is not known is ignored.
        """
        self._courier.remove(observer, self.options.grace)
        with self._core.lock:
            self._core.emit = self._courier.sender()

    def statistics(self) -> Statistics:
        """Counts at this instant: pools, runs, orphans, outcomes, rejections by code."""
        core = self._core
        if self._made is not None:
            self._made.bury()  # what loops that are gone have left behind is nobody's
        with core.lock:
            self._limits.sweep()
            queued = core.gate.queue_lengths()
            gate = core.gate.statistics()
            pools: dict[str, PoolStatistics] = {}
            for key, pool in core.gate.ledger.pools.items():
                name = self._shown(key)
                if name in pools:  # open runs may share an id
                    name = f"{name} ({key.rpartition(':')[2]})"
                pools[name] = PoolStatistics(
                    pool.declared, pool.held, pool.peak, queued.get(key, 0), pool.scope, pool.orphaned
                )
            outcomes, codes = {"ok": core.answered, **core.outcomes}, dict(core.codes)
            stalls = dict(core.stalls)
        sent = self._courier.statistics()
        return Statistics(
            pools=pools,
            runs=len(self._runs),
            running=gate["running"],
            waiting=gate["parked"],
            behind=gate["behind"],
            outcomes=outcomes,
            rejections=codes,
            orphans=core.orphans,
            orphans_released=core.orphans_released,
            shared=core.shared,
            late_results=core.late_results,
            stalls=stalls,
            stalled_seconds=core.stalled_seconds,
            longest_stall=core.longest_stall,
            promotions=gate["promotions"],
            late_events=gate["late_events"],
            threads=core.workers.statistics()["threads"],
            events_sent=sent["sent"],
            events_pending=sent["pending"],
            events_dropped=sent["dropped"],
            events_lost=sent["lost"],
            observer_failures=sent["failed"],
        )

    def report(self) -> ObserveReport:
        """What a tower with mode="observe" has seen: what was held back, and what its limits would have held back.

        What was serialised, refused or cut really happened; of the limits it says how many calls would have waited or
        been refused, and how long at least. Waits until its own observer has seen every event so far, at most the
        tower's `grace` seconds.

        Raises:
            PolicyError: the tower enforces its limits; what they do then is told by `statistics` and by each result.
        """
        from towerman.report import reported

        ledger, tally = self._watched, self._tally
        if ledger is None or tally is None:
            raise PolicyError("report: only with Tower(mode='observe'); where limits are enforced, see statistics()")
        whole = self.flush()
        core = self._core
        with core.lock:
            ledger.add_up()
            dropped = self._courier.statistics()["dropped"]
            return reported(
                tally,
                ledger.limits,
                ledger.waiting,
                ledger.refused,
                core.now() - self._born,
                complete=whole and not dropped,
            )

    def _shown(self, key: str) -> str:
        key = key.removeprefix("pool:")
        head, _, number = key.rpartition("run:")
        state = self._runs.get(int(number)) if head in ("", key[: -len("run:" + number)]) and number.isdigit() else None
        return f"{head}run:{state.run_id}" if state is not None else key

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until observers have seen every event so far, and say whether they have.

        Args:
            timeout: the longest wait in seconds; default: the tower's `grace`.
        """
        return self._courier.flush(self.options.grace if timeout is None else seconds("timeout", timeout, zero=True))

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """What came of calls after their results had been sealed: the last 100, oldest first.

        A call that timed out or was cancelled has its result, `applied` "unknown". If its handler does return later,
        the model is not told any more; here the host sees that it did, and what it brought.
        """
        with self._core.lock:
            return tuple(self._core.letters)

    async def aclose(self, grace: float | None = None) -> CloseReport:
        """End the tower: nothing new is taken, what waits or runs is cancelled and sealed, observers are served.

        Work that cannot be ended goes on, and holds what it holds, until it ends by itself; it is listed in what is
        returned. A cancel ends the waiting and not the closing.

        Args:
            grace: seconds that what is at work has for ending, handlers that clean up and threads that cannot be told
                alike, and then as many again for the observers; default: the tower's `grace`.

        Returns:
            What was left.
        """
        grace = self.options.grace if grace is None else seconds("aclose: grace", grace, zero=True)
        core = self._core
        end = core.now() + grace
        before = core.outcomes.get("cancelled", 0)
        states = self._end_runs(grace)
        undelivered = 0
        try:
            for state in states:
                await Run(self, state).aclose()
            if core.orphans:
                await self._shells.wait_alone(max(0.0, end - core.now()))
        finally:
            for state in states:
                self._close_run(state)
            with core.lock:
                orphans = core.leftovers()
        if core.emit is not None:
            await self._shells.wait_flushed(lambda: self.flush(grace))
            undelivered = self._undelivered()
            self._courier.close()
        self._end_helpers()
        return CloseReport(orphans, core.outcomes.get("cancelled", 0) - before, undelivered)

    def close(self, grace: float | None = None) -> CloseReport:
        """End the tower from a program without a loop, as `aclose` does; what runs on other loops and threads has
        `grace` seconds.

        In a thread whose own event loop runs it does not wait for calls: they are told to stop, and listed.

        Args:
            grace: seconds for what is at work, and as many for the observers; default: the tower's `grace`.
        """
        grace = self.options.grace if grace is None else seconds("close: grace", grace, zero=True)
        core = self._core
        before = core.outcomes.get("cancelled", 0)
        states = self._end_runs(grace)
        if self._made is not None:
            self._shells.wait_in_thread(lambda: bool(core.orphans) or any(state.works for state in states), grace)
        for state in states:
            if not state.works:
                self._close_run(state)
        with core.lock:
            orphans = core.leftovers()
        self.flush(grace)
        undelivered = self._undelivered()
        self._courier.close()
        self._end_helpers()
        return CloseReport(orphans, core.outcomes.get("cancelled", 0) - before, undelivered)

    def _end_runs(self, grace: float) -> list[RunState]:
        """Nothing new is taken; all that is at work is told to stop, before anybody is waited for."""
        self._closed = True
        self.unwatch()
        self._core.most_grace = grace
        states = list(self._runs.values())
        for state in states:
            state.closed = state.closed or "the tower is closed"
            if state.works:
                self._shells.cancel(state, "the tower was closed", None, None)
        return states

    def _end_helpers(self) -> None:
        if self._door is not None:
            self._door.close()
        self._core.workers.close()
        if self._core.made_processes is not None:
            self._core.made_processes.close()

    def _undelivered(self) -> int:
        sent = self._courier.statistics()
        return sent["pending"] + sent["dropped"]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def validate(self) -> None:
        """Raise AssertionError when what must hold between two steps does not; for tests and doubts."""
        with self._core.lock:
            self._core.gate.validate()

    def __repr__(self) -> str:
        return f"Tower({len(self._core.tools)} tools, {len(self._runs)} runs)"


def _is_plain(call: Call) -> bool:
    """A call whose fields have the types they are declared with, and that needs no other: the usual one."""
    fields: tuple[object, ...] = (call.tool, call.id, "" if call.idempotency_key is None else call.idempotency_key)
    return (
        type(call.needs) is tuple
        and not call.needs
        and type(call.arguments) in (dict, str)
        and all(type(one) is str for one in fields)
    )


def _check_hook(hook: object) -> None:
    if not callable(hook) or is_coroutine_function(hook):
        raise PolicyError(f"on_result: a plain function that takes a Result; got {type(hook).__name__}")


def _permission(allow: Patterns, deny: Patterns) -> Callable[[str], bool] | None:
    may, may_not = _matcher("allow", allow), _matcher("deny", deny)
    if may is None and may_not is None:
        return None
    return lambda name: (may is None or may(name)) and (may_not is None or not may_not(name))


def _matcher(where: str, patterns: Patterns) -> Callable[[str], bool] | None:
    if patterns is None:
        return None
    try:
        listed = [patterns] if isinstance(patterns, str) else list(patterns)
    except Exception:
        raise PolicyError(f"{where}: tool names or patterns such as 'crm_*'; got {shown(patterns)}") from None
    for pattern in cast("list[object]", listed):
        if not isinstance(pattern, str) or not pattern:
            raise PolicyError(f"{where}: tool names or patterns such as 'crm_*'; got {type(pattern).__name__}")
    if not listed:
        return lambda name: False
    found = re.compile("|".join(f"(?:{translate(pattern)})" for pattern in listed))
    return lambda name: found.match(name) is not None
