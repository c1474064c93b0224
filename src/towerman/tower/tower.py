"""The public Tower: tools and limits on one side, provider responses on the other.

Theory. A tower is made once, at import if you like: it binds to no loop. What a batch comes to is a `BatchResult`: the
results in emitted order, and the messages that the provider wants next.

House rules. No rule of admission lives here; this room binds names to the rooms that have them.

Not here: how calls are decided, run and sealed (gate, plan, runner), what providers send and take (adapters).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from fnmatch import translate
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Literal, ParamSpec, Self, cast
from weakref import WeakSet

from towerman.clock import Clock, RealClock, instant_of, steady
from towerman.config import Config, Source, check_rules, settled
from towerman.core import Core
from towerman.errors import InputError, PolicyError
from towerman.gate import NEVER, Gate, Lot
from towerman.ledger import Ledger
from towerman.limits import Limits
from towerman.policy import (
    KINDS_OF_STORAGE,
    TOWER_OPTIONS,
    Budget,
    Mode,
    OnDuplicate,
    OnExcess,
    OnOrphan,
    OnResult,
    PlaceholderGuard,
    Pool,
    TowerPolicy,
    Undeclared,
    WhenBusy,
    budget_of,
    budgets_of,
    check_budget,
    flag,
    name_of,
    pools_of,
    seconds,
    shown,
    whole,
)
from towerman.threads import Couriers
from towerman.tower.declaring import Declaring, Layers
from towerman.tower.run import Run, read_calls
from towerman.trace import Event, Observer
from towerman.work import BatchResult, RunState, Work

if TYPE_CHECKING:
    from towerman.approvals import Approver
    from towerman.check import CheckReport
    from towerman.engines.redis import RedisLedger
    from towerman.explain import Explanation
    from towerman.gate import Flow
    from towerman.journal import Journal
    from towerman.leftovers import CloseReport, DeadLetter
    from towerman.pages import Page, ResultStore
    from towerman.report import ObserveReport, Tally
    from towerman.runner import Shells, SyncDoor
    from towerman.tower.statistics import Statistics
    from towerman.watched import Watched

P = ParamSpec("P")

Patterns = str | Iterable[str] | None
"""Tool names or patterns such as `crm_*`."""


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


class Tower(Declaring):
    """Clears every tool call before it runs: limits, order, access, permission, all in one step.

    Args:
        config: a `towerman.toml`, as a path or as a mapping of its keys; it gives what no argument and no variable
            `TOWERMAN_*` of the environment gives. Default: the file that `TOWERMAN_CONFIG` names, if any.
        max_concurrency: calls that may run at once in this process, over all runs.
        run_concurrency: calls of one run that may run at once.
        pools: named limits that tools share: name to permits or `Pool`. Pools of the file with other names stay.
        budgets: how much may be spent, by whom it counts for, each a `Budget` or a mapping of its arguments: "batch"
            (the calls of one response, with what their handlers call), "run" (each run that brings no budget of its
            own), "tenant" (each tenant, over its runs; those without one share one), "tenant:NAME" (that tenant, in
            place of "tenant"), "process" (all of it).
        max_calls_per_batch: calls that are run for one response.
        max_repeats: in how many turns, one after the other, a run may make the same call with nothing new in between
            (a turn with a call that has an effect and is new itself); it is answered `repeated_call` then. "any": there
            is no bound.
        on_excess: "tell" runs the first calls in emitted order and answers the rest `call_cap`; "queue" runs all,
            slower.
        undeclared: what a tool that declares no access is: "ordered" (alone, beside independent calls only, and in
            emitted order within its run), "exclusive" (alone in the process), "independent".
        when_busy: "wait" (in a bounded queue, with a deadline), "reject" (answered at once) or "defer" (put into the
            journal's queue, for a worker to run; answered `pending` with a handle).
        max_wait: seconds a call may wait. Waiting for calls of its own batch does not count.
        max_queued: calls that may wait at once.
        timeout: seconds a call may run.
        grace: seconds a call that was told to stop has for cleaning up.
        on_orphan: what a call that goes on after its result was sealed does with its permits and resources: "hold"
            until its work ends, or "release" at once.
        approval_lifetime: seconds for which a call waits for a person's approval, and a given approval holds at most.
        max_result_bytes: bound of one result's content, in UTF-8 bytes.
        max_batch_bytes: bound of all contents of one batch together; each keeps 64 bytes even so.
        results: where results that are too large are kept whole, to be read page by page: "memory", "journal", a
            folder's path, a `ResultStore`, or "off"; "auto" is the journal where there is one, else memory. See
            `read`.
        result_lifetime: seconds that they are kept.
        max_stored_bytes: bytes that all of them together may take; the oldest goes first. One that takes more than
            half of it is not kept.
        count_tokens: gives the tokens that a text takes, for timelines and reports; default: its bytes / 4. Called on
            whatever thread asks, so it must be safe there; where it fails, the default counts.
        observers: callables that take an `Event`; each is served by a thread of its own.
        placeholder_guard: what becomes of a call in which a placeholder stands in place of a value, such as
            `<from previous call>`: "refuse" (it is answered `unresolved_placeholder`, its siblings run), "warn" (it
            runs, and the batch's notice and an event say so) or "off". Plans are not looked through, nor what a tool
            declares as `free_text`.
        mode: "enforce", or "observe": pools, rates, budgets and concurrency limits hold nobody back, and `report()`
            says what they would have held back. Nothing else is relaxed: not order and resources, not permission,
            arguments, plans and the cap on calls.
        debug: print tracebacks of handlers to stderr.
        strict: refuse, when it is declared, a tool without access, limit or retry class.
        on_duplicate: with a journal, what a call does while the same call (the same key, or the same place of the same
            response) is at work elsewhere: "join" waits for its answer, at most `max_wait`; "conflict" is refused.
        engine: keeps what counts over several processes: the URL of a Redis (7 or later) or Valkey, or a mapping with
            `url`, `group`, `lease`, `on_unavailable`, `replicas`, `acks`. Named pools, limits and rates of tools,
            budgets of tenants, and what calls touch then count for all processes that share it. Needs
            `towerman[redis]`; see docs/engines.md.
        journal: the file that remembers what was begun and what came of it, a `Journal`, or ":memory:" for tests; it is
            made when it is first needed. A path in a file of options is found from the folder of that file.
        secret: what signatures and keyed digests rest on: text or bytes that nobody can guess. It is never shown.

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
        budgets: Mapping[str, Budget | Mapping[str, object] | None] | None = None,
        max_calls_per_batch: int = 25,
        max_repeats: int | Literal["any"] = "any",
        on_excess: OnExcess = "tell",
        undeclared: Undeclared = "ordered",
        when_busy: WhenBusy = "wait",
        max_wait: float = 30.0,
        max_queued: int = 1000,
        timeout: float = 300.0,
        grace: float = 5.0,
        on_orphan: OnOrphan = "hold",
        approval_lifetime: float = 3600.0,
        max_result_bytes: int = 32_768,
        max_batch_bytes: int = 131_072,
        results: str | os.PathLike[str] | ResultStore = "auto",
        result_lifetime: float = 3600.0,
        max_stored_bytes: int = 67_108_864,
        count_tokens: Callable[[str], int] | None = None,
        placeholder_guard: PlaceholderGuard = "refuse",
        observers: Iterable[Observer] = (),
        mode: Mode = "enforce",
        debug: bool = False,
        strict: bool = False,
        on_duplicate: OnDuplicate = "join",
        engine: str | Mapping[str, object] | None = None,
        journal: str | os.PathLike[str] | Journal | None = None,
        secret: str | bytes | None = None,
        _clock: Clock | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in TOWER_OPTIONS}
        kept = {name: budget for name, budget in budgets_of(budgets).items() if budget is not None}
        self.options = TowerPolicy(**{**given, "pools": pools_of(pools), "budgets": kept})
        self._layers = Layers(self.options, cast("Config", config), {}, ())  # it was read on the way in, see above
        super().__init__()
        check_rules(self._layers.config.tools, self.options)
        self._courier: Couriers[Event] = Couriers()
        self._engine = _engine_of(self.options)
        self._journal, self._own_journal = _journal_of(self.options)
        clock = steady(_clock or RealClock())
        self._born = clock.now()
        self._watched: Watched[Lot[tuple[Work, int]]] | None = None
        self._tally: Tally | None = None
        self._made: Shells | None = None
        self._door: SyncDoor | None = None
        self._prefix = os.urandom(4).hex()
        self._wire(Core(self.options, Gate(self._new_ledger(clock)), clock))
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
        if self.options.results == "journal" and self._journal is None:
            raise PolicyError("results: 'journal' needs one: Tower(journal='towerman.db'), or results='memory'")
        if self.options.results not in KINDS_OF_STORAGE:
            self._core.keeper.statistics()  # a folder that cannot be used is told now
        _TOWERS.add(self)

    def _wire(self, core: Core) -> None:
        """Stand on this core, which is new: no run is open. All that a core and its tower know of one another is said
        here, so that a rehearsal forgets nothing of it.
        """
        self._core = core
        core.journal = self._journal
        core.engine = self._engine
        if self._engine is not None:
            core.charge_there = self._charge_there
        core.any_subtree = self._engine is not None  # another process may have a tool that touches a subtree
        self._runs: dict[int, RunState] = {}
        self._run_count = 0
        core.runs = self._runs
        self._limits = Limits(core)
        core.pause = self._limits.pause

    def _charge_there(self, run: RunState, work: Work | None, index: int, amounts: Mapping[str, int]) -> None:
        """So much was spent: by a call, or by the run itself."""
        if work is not None:
            self._shells.charge_there(work, index, amounts)
        else:
            from towerman.runner.accounting import spend_run

            spend_run(self._engine, run, amounts)

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
            state.renew(core.gate.open_flow(state.number, state.flow.window, state.flow.limit, state.flow.over))
            limits.add_run(state)
        if self._follower is not None:
            self._follower = None  # its thread is the parent's, and may have held its locks
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

    # ---------------------------------------------------------------- runs

    def run(
        self,
        run_id: str | None = None,
        *,
        tenant: str | None = None,
        deps: object = None,
        priority: int = 0,
        budget: Budget | Mapping[str, object] | None = None,
        deadline: float | datetime | None = None,
        allow: Patterns = None,
        deny: Patterns = None,
        approver: Approver | None = None,
        max_concurrency: int | None = None,
        fail_fast: bool = False,
    ) -> Run:
        """A new run; use it as `async with tower.run() as run`.

        Args:
            run_id: its id in traces; made when it is not given.
            tenant: whom it belongs to, for pools of scope "tenant".
            deps: whatever its handlers need; they get it as `Context.deps`.
            priority: higher goes first; 0 is the middle.
            budget: how much it may spend, in place of the tower's budget for runs; a `Budget`, or a mapping of its
                arguments. Those of its tenant and of the process count beside it.
            deadline: seconds from now, or an aware datetime: nothing starts after it, and what runs then is stopped.
            allow: tool name patterns; only these may be called.
            deny: tool name patterns that may not be called; wins over `allow`.
            approver: asks a person about each call that needs approval: an async function that takes an
                `ApprovalRequest` and returns `Approved`, `Denied`, or None where nobody has decided; `ask_terminal` is
                one. Without one such calls come back pending. Called on the event loop, in the caller's context, at
                most once for a call; cancelled when nobody waits for its answer any more.
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
            budget=budget,
            deadline=deadline,
            allow=allow,
            deny=deny,
            approver=approver,
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

    def _open_state(
        self,
        run_id: str,
        tenant: str | None,
        priority: int,
        deps: object,
        approver: object,
        *,
        deadline: float | None,
        allow: Patterns,
        deny: Patterns,
    ) -> RunState:
        """Open a run for a worker."""
        asked = cast("Approver | None", approver)
        run = self.run(
            run_id,
            tenant=tenant,
            priority=priority,
            deps=deps,
            approver=asked,
            deadline=deadline,
            allow=allow,
            deny=deny,
        )
        return run._state

    def _checked_run(
        self,
        *,
        run_id: str | None = None,
        tenant: str | None = None,
        deps: object = None,
        priority: int = 0,
        budget: Budget | Mapping[str, object] | None = None,
        deadline: float | datetime | None = None,
        allow: Patterns = None,
        deny: Patterns = None,
        approver: Approver | None = None,
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
        if approver is not None and not callable(approver):
            raise PolicyError(
                f"approver: an async function that takes an ApprovalRequest; got {type(approver).__name__[:80]}"
            )
        if deadline is not None and not isinstance(deadline, int | float | datetime):
            raise PolicyError(
                f"deadline: seconds from now, 0 or more, or an aware datetime; got {type(deadline).__name__}"
            )
        try:
            limit = NEVER if deadline is None else instant_of(deadline, self._core.now())
        except ValueError as wrong:
            raise PolicyError(str(wrong)) from None
        window = self.options.run_concurrency if max_concurrency is None else whole("max_concurrency", max_concurrency)
        named = _listed("allow", allow), _listed("deny", deny)
        may_call = _permission(*named)
        permission = None if may_call is None else named
        own = None if budget is None else check_budget("budget", "run", budget_of("budget", budget))

        def open_run(core: Core, number: int) -> RunState:
            spends = own or core.policy.budgets.get("run")
            over = NEVER
            if spends is not None and spends.seconds is not None and core.policy.mode == "enforce":
                over = core.now() + spends.seconds
            if over < limit:
                flow = core.gate.open_flow(number, window, over, ("budget_exhausted", "budget of run (seconds)"))
            else:
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
                permission=permission,
                approver=approver,
                own_window=max_concurrency is not None,
                budget=own,
            )
            (self._limits if core is self._core else Limits(core)).add_run(state)
            return state

        return open_run

    def explain(
        self, calls: object = None, *, plan: object = None, format: str | None = None, **run_options: object
    ) -> Explanation:
        """What a batch would do: what would run together, what waits for what and why, what would be refused.

        Runs nothing and changes nothing: no permit is taken, nothing is counted, learned or traced. It goes by the
        limits as they are now and takes nothing else to be at work.

        Args:
            calls: as `Run.execute` takes them.
            plan: as `Run.execute` takes it.
            format: the form they have; None: found out.
            run_options: those of `run`.

        Returns:
            An `Explanation`: printable as text, `to_dict()` for JSON, `to_svg()` for a drawing.

        Raises:
            InputError: it is no batch of calls in any known form.
            PolicyError: an option of the run out of its range.
        """
        from towerman.explain import explain

        batch = read_calls(calls, plan, format, self._core)
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
        calls: object = None,
        *,
        plan: object = None,
        format: str | None = None,
        batch_id: str | None = None,
        on_result: OnResult | None = None,
        **run_options: object,
    ) -> BatchResult:
        """Answer one batch in a run of its own: one result a call, in emitted order, whatever happens.

        Args:
            calls: a provider's response or message (SDK object, mapping or JSON text), or a list of `Call` or mappings.
            plan: as `Run.execute` takes it.
            format: the form it has; None: found out.
            batch_id: as `Run.execute` takes it; it needs a `run_id`, too.
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
            return await run.execute(calls, plan=plan, format=format, batch_id=batch_id, on_result=on_result)

    async def submit(
        self, calls: object, *, format: str | None = None, batch_id: str | None = None, **run_options: object
    ) -> BatchResult:
        """Put every call of a batch into the journal's queue, in a run of its own; see `Run.submit`.

        Args:
            calls: as `execute` takes them.
            format: the form they have; None: found out.
            batch_id: as `execute` takes it.
            run_options: those of `run`; its id, tenant and priority go with the calls.

        Raises:
            PolicyError: the tower has no journal that stores arguments.
            InputError: it is no batch of calls in any known form; nothing was put in.
        """
        async with self.run(**run_options) as run:  # type: ignore[arg-type]  # checked by run()
            return await run.submit(calls, format=format, batch_id=batch_id)

    def execute_sync(
        self,
        calls: object = None,
        *,
        plan: object = None,
        format: str | None = None,
        batch_id: str | None = None,
        on_result: OnResult | None = None,
        **run_options: object,
    ) -> BatchResult:
        """`execute` for code without an event loop: waits in this thread until every call has its result.

        Args:
            calls: as `execute` takes them.
            plan: as `execute` takes it.
            format: the form they have; None: found out.
            batch_id: as `execute` takes it.
            on_result: sees each result as it is sealed, on the loop's thread.
            run_options: those of `run`.

        Raises:
            PolicyError: an event loop runs in this thread: await `execute` there.
            KeyboardInterrupt: this thread was interrupted; the batch was cancelled and sealed first.
        """
        return self._sync.run(
            "execute_sync",
            lambda: self.execute(
                calls, plan=plan, format=format, batch_id=batch_id, on_result=on_result, **run_options
            ),
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

    @property
    def journal(self) -> Journal | None:
        """The journal, which can also be asked; None where there is none."""
        return self._journal

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
        from towerman.tower.statistics import counted

        if self._made is not None:
            self._made.bury()  # what loops that are gone have left behind is nobody's
        with self._core.lock:
            self._limits.sweep()
        return counted(self._core, self._journal, self._courier, len(self._runs), self._shown)

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
                ledger.rates,
                ledger.waiting,
                ledger.refused,
                core.overspent,
                core.now() - self._born,
                complete=whole and not dropped,
            )

    def read(self, handle: str, page: int = 1) -> Page:
        """A page of a result that was too large for the model, by `Result.handle`.

        The program may read what any run has stored; a model reads with the tool `read_result`, and only what runs of
        its own tenant have stored. Reads a file where results are kept in a folder.

        Args:
            handle: of a result of this tower, or of another one with the same folder or store.
            page: which one, from 1.

        Returns:
            A `Page`: its data, what the model would be told, and the number of the next one. All pages together are the
            whole result, without a gap and without a repeat.

        Raises:
            InputError: no result is kept under this handle (any more), or it has no such page.
        """
        from towerman.store import NotKept

        if not self._core.keeps:
            raise InputError("read: handle: nothing is stored, since results='off'")
        try:
            return self._core.keeper.page(handle, page, every=True)
        except NotKept as missing:
            raise InputError(f"read: {missing.place}: {missing.text.removeprefix('page: ')}") from None

    def _shown(self, key: str) -> str:
        key = key.removeprefix("pool:")
        head, mark, number = key.rpartition("run:")  # names have no colon
        state = self._runs.get(int(number)) if mark else None
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

        What comes later is answered `run_closed`. Work that cannot be ended goes on, and holds what it holds, until it
        ends by itself; it is listed in what is returned.

        Args:
            grace: seconds that what is at work has for ending, handlers that clean up and threads that cannot be told
                alike, and then as many again for the observers, and for the journal; default: the tower's `grace`.

        Returns:
            What was left.

        Raises:
            asyncio.CancelledError: the caller was cancelled. Every run is closed all the same; observers may not have
                been served to the end, which closing it once more makes good.
        """
        from towerman.leftovers import CloseReport

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
        keeper = core.made_keeper
        if keeper is not None and keeper.busy:
            await self._shells.wait_flushed(partial(keeper.flush, grace))
        core.tell_means(now=True)
        if self._engine is not None:
            await self._engine.aclose()
        if self._own_journal and self._journal is not None:
            await self._shells.wait_flushed(partial(self._journal.close, grace))
        self._end_helpers()
        cancelled = core.outcomes.get("cancelled", 0) - before
        return CloseReport(orphans, cancelled, undelivered, self._unwritten())

    def close(self, grace: float | None = None) -> CloseReport:
        """End the tower from a program without a loop, as `aclose` does; what runs on other loops and threads has
        `grace` seconds.

        In a thread whose own event loop runs it does not wait for calls: they are told to stop, and listed.

        Args:
            grace: seconds for what is at work, and as many for the observers; default: the tower's `grace`.
        """
        from towerman.leftovers import CloseReport

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
        if core.made_keeper is not None:
            core.made_keeper.flush(grace)
        core.tell_means(now=True)
        if self._engine is not None:
            if self._door is not None:
                self._door.last(self._engine.aclose, grace)
            self._engine.close()
        if self._own_journal and self._journal is not None:
            self._journal.close(grace)
        self._end_helpers()
        cancelled = core.outcomes.get("cancelled", 0) - before
        return CloseReport(orphans, cancelled, undelivered, self._unwritten())

    def _end_runs(self, grace: float) -> list[RunState]:
        """Nothing new is taken; all that is at work is told to stop, before anybody is waited for."""
        with self._core.lock:  # a run that is opened at this moment is among these, or finds the tower closed
            self._closed = True
            states = list(self._runs.values())
        self.unwatch()
        self._core.most_grace = grace
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

    def _unwritten(self) -> int:
        if not self._own_journal or self._journal is None:
            return 0
        left = self._journal.statistics()
        return left["given_up"] + left["later"]

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
            self._core.purse.validate()

    def __repr__(self) -> str:
        return f"Tower({len(self._core.tools)} tools, {len(self._runs)} runs)"


def _engine_of(options: TowerPolicy) -> RedisLedger | None:
    """The engine that was asked for."""
    given = options.engine
    if given is None:
        return None
    from towerman.approvals import secret_bytes
    from towerman.engines.redis import RedisLedger

    secret = b"" if options.secret is None else secret_bytes(options.secret)
    return RedisLedger(given.url, group=given.group, lease=given.lease, secret=secret, acks=given.acks)


def _journal_of(options: TowerPolicy) -> tuple[Journal | None, bool]:
    """The journal that was asked for, and whether it ends with the tower."""
    given = options.journal
    if given is None:
        return None, False
    from towerman.journal import Journal

    if isinstance(given, Journal):
        return given, False
    return Journal(cast("str", given), secret=options.secret), True


def _permission(allow: tuple[str, ...] | None, deny: tuple[str, ...] | None) -> Callable[[str], bool] | None:
    may, may_not = _matcher(allow), _matcher(deny)
    if may is None and may_not is None:
        return None
    return lambda name: (may is None or may(name)) and (may_not is None or not may_not(name))


def _listed(where: str, patterns: Patterns) -> tuple[str, ...] | None:
    """Patterns of tool names, checked."""
    if patterns is None:
        return None
    try:
        listed = [patterns] if isinstance(patterns, str) else list(patterns)
    except Exception:
        raise PolicyError(f"{where}: tool names or patterns such as 'crm_*'; got {shown(patterns)}") from None
    for pattern in cast("list[object]", listed):
        if not isinstance(pattern, str) or not pattern:
            raise PolicyError(f"{where}: tool names or patterns such as 'crm_*'; got {type(pattern).__name__}")
    return tuple(listed)


def _matcher(listed: tuple[str, ...] | None) -> Callable[[str], bool] | None:
    if listed is None:
        return None
    if not listed:
        return lambda name: False
    found = re.compile("|".join(f"(?:{translate(pattern)})" for pattern in listed))
    return lambda name: found.match(name) is not None
