"""The public Tower and Run: tools and limits on one side, provider responses on the other.

Theory. A tower is made once, at import if you like: it binds to no loop. A run is one agent's work; it takes the
model's responses one after another and answers each call of each. What a batch comes to is a `BatchResult`: the
results in emitted order, and the messages that the provider wants next.

House rules. No rule of admission lives here; this room binds names to the rooms that have them.

Not here: how calls are decided, run and sealed (gate, plan, runner), what providers send and take (adapters).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import translate
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar, cast, overload
from weakref import WeakSet

from towerman.calls import Batch, Call
from towerman.clock import Clock, RealClock, instant_of
from towerman.config import Config, Rule, Source, blame, check_rules, laid_out, rule, settled
from towerman.errors import PolicyError
from towerman.gate import NEVER, Gate, Lot
from towerman.ledger import Ledger
from towerman.ledger import Pool as LedgerPool
from towerman.policy import (
    TOWER_OPTIONS,
    Declared,
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
    pools_of,
    seconds,
    shown,
    whole,
)
from towerman.threads import Couriers
from towerman.tools import Tool, compile_tool, is_coroutine_function, name_of_tool
from towerman.trace import Event, Observer
from towerman.work import BatchResult, Context, Core, RunState, Work, pool_key

if TYPE_CHECKING:
    from towerman.runner import Shells, SyncDoor

HandlerT = TypeVar("HandlerT", bound=Callable[..., object])
P = ParamSpec("P")

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
        late_results: values that came after their results were sealed, and were dropped.
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
    late_results: int
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

    It takes batches one after another or at the same time, from any loop. All of them share its limits, deadline and
    permissions.

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
        """Close the run: nothing new is taken, what is at work is cancelled and sealed (at most `grace` seconds).

        Raises:
            asyncio.CancelledError: the caller was cancelled. The batches of this loop were sealed first and the run is
                closed all the same.
        """
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

    return cast("Callable[P, None]", filled)


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
        mode: "enforce", or "observe": pools and concurrency limits hold nobody back, and `statistics()` shows by their
            peaks what they would have held back. Nothing else is relaxed: not order and resources, not permission,
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
        self._config = cast("Config", config)  # it was read on the way in, see below
        self._rules: tuple[Rule, ...] = ()
        self._declared: dict[str, tuple[Callable[..., object], Mapping[str, object]]] = {}
        check_rules(self._config.tools, self.options)
        self._courier: Couriers[Event] = Couriers()
        self._core = Core(self.options, Gate(Ledger()), _clock or RealClock())
        self._made: Shells | None = None
        self._door: SyncDoor | None = None
        self._runs: dict[int, RunState] = {}
        self._run_count = 0
        self._prefix = os.urandom(4).hex()
        self._stale: set[str] = set()
        self._closed = False
        try:
            listed = tuple(observers)
        except Exception:
            raise PolicyError(f"observers: a list of callables; got {shown(observers)}") from None
        for observer in listed:
            self.add_observer(observer)
        self._add_pool("process", "pool process", max_concurrency)
        self._add_named_pools("process", None)
        _TOWERS.add(self)

    def _add_pool(self, key: str, label: str, permits: int, *, reserve: int = 0, scope: str = "process") -> None:
        enforced = self.options.mode == "enforce"
        pool: LedgerPool[Lot[tuple[Work, int]]] = LedgerPool(
            key, label, permits, reserve=reserve, scope=scope, enforced=enforced
        )
        self._core.gate.ledger.add_pool(pool)

    def _add_named_pools(self, scope: str, state: RunState | None) -> None:
        """The named pools of a scope: for the process, or as far as they count for a run."""
        for name, pool in self.options.pools.items():
            if pool.scope == scope:
                key = pool_key(name, scope, state) if state is not None else f"pool:{name}"
                self._add_pool(key, f"pool {name}", pool.permits, reserve=pool.reserve, scope=scope)
                self._stale.discard(key)

    def _add_tool_pool(self, tool: Tool) -> None:
        if tool.policy.max_concurrency is not None:
            self._add_pool(f"tool:{tool.name}", f"limit of tool {tool.name}", tool.policy.max_concurrency)

    def _add_run_pools(self, state: RunState) -> None:
        self._add_pool(f"run:{state.number}", "pool run", state.flow.window, scope="run")
        self._add_named_pools("run", state)
        self._add_named_pools("tenant", state)

    def _after_fork(self) -> None:
        """In the child of a fork: what was at work belongs to the parent, and its threads and loops are not here."""
        core = self._core
        core.reset(Gate(Ledger()))
        self._made = self._door = None
        self._stale.clear()
        self._courier = self._courier.anew()
        if core.emit is not None:
            core.emit = self._courier.sender()
            core.gate.notes = []
        self._add_pool("process", "pool process", self.options.max_concurrency)
        self._add_named_pools("process", None)
        for tool in core.tools.values():
            self._add_tool_pool(tool)
        for state in self._runs.values():
            state.renew(core.gate.open_flow(state.number, state.flow.window, state.limit))
            self._add_run_pools(state)

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
        run_in: RunIn | None = None,
        own_task: bool | None = None,
    ) -> Callable[[HandlerT], HandlerT]: ...
    def tool(self, *functions: Callable[..., object], **options: object) -> object:
        """Declare a tool: bare (`@tower.tool`) or called with options. The function itself stays as it is: calling it
        directly is a plain call, not admitted.

        Args:
            functions: the one function, when it is used bare: a coroutine function, or a plain function, which runs on
                a worker thread.
            options: given by name, as follows.
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
        """Declare a tool without decorating it.

        Args:
            function: coroutine function, or plain function, which runs on a worker thread.
            options: those of `tool`.

        Raises:
            PolicyError: naming the tool, the option and the fix; also for a name that is taken.
        """
        core = self._core
        tool = self._compiled(name_of_tool(function, options), function, options, self._rules)
        if tool.name in core.tools:
            raise PolicyError(f"tool {tool.name!r}: this name is taken; give one of the two another name=")
        self._declared[tool.name] = function, options
        self._add_tool_pool(tool)
        core.add_tool(tool)
        for state in list(self._runs.values()):
            core.widen(state)

    def _compiled(
        self, name: str, function: Callable[..., object], options: Mapping[str, object], rules: Sequence[Rule]
    ) -> Tool:
        merged, origins = laid_out(name, options, self._config.tools, rules)
        try:
            return compile_tool(name, function, merged, self.options, Context, self.options.pools)
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

        Raises:
            PolicyError: an option that is wrong, by itself or for a tool that is declared already; or one of these
                tools may be at work: runs are open. Nothing was changed.
        """
        rules = (*self._rules, rule(pattern, options))
        check_rules(rules[-1:], self.options)
        core = self._core
        changed = [self._compiled(name, *self._declared[name], rules) for name in core.tools if rules[-1].fits(name)]
        with core.lock:
            ledger = core.gate.ledger
            if changed and (self._runs or ledger.pools["process"].held):
                raise PolicyError(
                    f"policy {pattern!r}: runs are open, and {changed[0].name!r} is declared already; "
                    "say it before the first run"
                )
            for tool in changed:
                ledger.drop_pool(f"tool:{tool.name}")
                self._add_tool_pool(tool)
                core.put_tool(tool)
            self._rules = rules

    @property
    def config(self) -> str | None:
        """The path of the file that was read when the tower was made, or None."""
        return self._config.path

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
        core = self._core
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
            limit = NEVER if deadline is None else instant_of(deadline, core.now())
        except ValueError as wrong:
            raise PolicyError(str(wrong)) from None
        window = self.options.run_concurrency if max_concurrency is None else whole("max_concurrency", max_concurrency)
        may_call = _permission(allow, deny)
        with core.lock:
            self._run_count += 1
            number = self._run_count
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
            )
            if self._closed:
                state.closed = "the tower is closed"
            self._runs[number] = state
            self._add_run_pools(state)
        run = Run(self, state)
        state.execute = run.execute
        return run

    async def execute(
        self,
        calls: object,
        *,
        format: str | None = None,
        on_result: OnResult | None = None,
        **run_options: object,
    ) -> BatchResult:
        """Answer one batch in a run of its own: one result a call, in emitted order, whatever happens.

        Args:
            calls: a provider's response or message (SDK object, mapping or JSON text), or a list of `Call` or mappings.
            format: the form it has; None: found out.
            on_result: sees each result as it is sealed.
            run_options: those of `run`.

        Returns:
            The results. No calls: an empty batch.

        Raises:
            InputError: it is no batch of calls in any known form; nothing was run.
            PolicyError: an option that is wrong; nothing was run.
            asyncio.CancelledError: the caller was cancelled. The batch was sealed first, which takes at most the
                tower's `grace`; who wants its results then opens a run and looks at `Run.last_batch`.
            KeyboardInterrupt, SystemExit: raised by a handler; the batch was sealed first.
        """
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
        """`execute` for code without an event loop: waits in this thread until every call has its result.

        Args:
            calls: as `execute` takes them.
            format: the form they have; None: found out.
            on_result: sees each result as it is sealed, on the loop's thread.
            run_options: those of `run`.

        Raises:
            PolicyError: an event loop runs in this thread: await `execute` there.
            KeyboardInterrupt: this thread was interrupted; the batch was cancelled and sealed first.
        """
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
            self._stale.add(f"run:{state.number}")
            tenants = {other.tenant for other in self._runs.values()}
            for name, pool in self.options.pools.items():
                if pool.scope == "run" or (pool.scope == "tenant" and state.tenant not in tenants):
                    self._stale.add(pool_key(name, pool.scope, state))
            self._sweep()
        self._shells.rest()

    def _sweep(self) -> None:
        """Forget pools that nobody can use any more, once their last orphan has ended; under the lock."""
        self._stale = {key for key in self._stale if not self._core.gate.ledger.drop_pool(key)}

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
        removes itself sees nothing more at once.

        Args:
            observer: one that was added; one that is not known is ignored.
        """
        self._courier.remove(observer, self.options.grace)
        with self._core.lock:
            self._core.emit = self._courier.sender()

    def statistics(self) -> Statistics:
        """Counts at this instant: pools, runs, orphans, outcomes, rejections by code."""
        core = self._core
        with core.lock:
            self._sweep()
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
            late_results=core.late_results,
            promotions=gate["promotions"],
            late_events=gate["late_events"],
            threads=core.workers.statistics()["threads"],
            events_sent=sent["sent"],
            events_pending=sent["pending"],
            events_dropped=sent["dropped"],
            events_lost=sent["lost"],
            observer_failures=sent["failed"],
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

    async def aclose(self, grace: float | None = None) -> None:
        """End the tower: runs are closed, what is at work is cancelled, observers are served to the end.

        What comes later is answered `run_closed`. Work that cannot be stopped goes on and holds what it holds.

        Args:
            grace: seconds to wait for the observers; default: the tower's `grace`.

        Raises:
            asyncio.CancelledError: the caller was cancelled. Every run is closed all the same; observers may not have
                been served to the end, which closing it once more makes good.
        """
        self._closed = True
        states = list(self._runs.values())
        for state in states:  # all are told before one is waited for: their graces do not add up
            state.closed = state.closed or "the tower is closed"
            self._shells.cancel(state, "the tower was closed", None, None)
        try:
            for state in states:
                await Run(self, state).aclose()
        finally:
            for state in states:
                self._close_run(state)
        if self._core.emit is not None:
            await self._shells.wait_flushed(lambda: self.flush(grace))
            self._courier.close()
        if self._door is not None:
            self._door.close()
        self._core.workers.close()
        if self._core.made_processes is not None:
            self._core.made_processes.close()

    def close(self) -> None:
        """End the tower from a program without a loop: nothing new is taken, observers are served to the end.

        What is at work is not told to stop; that takes a loop (`aclose`). Waits for observers at most `grace` seconds.
        """
        self._closed = True
        for state in list(self._runs.values()):
            state.closed = state.closed or "the tower is closed"
        self.flush()
        self._courier.close()
        if self._door is not None:
            self._door.close()
        self._core.workers.close()
        if self._core.made_processes is not None:
            self._core.made_processes.close()

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
