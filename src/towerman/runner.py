"""The corridor: performs what plan and gate decide, runs handlers, seals results. The only room that knows asyncio.

Theory. A batch is prepared (each call looked up, permitted, checked), planned (which call waits for which) and offered to the gate as
its calls get ready. The gate's grants are started: a coroutine in a task of its own, a sync function on a worker thread. Whatever comes of
a call is sealed once, as the result at its index; what a call held goes back when its work has ended, which may be later.
The batch is done when every index is sealed; only then does the caller get it, also when the caller was cancelled meanwhile.

Three ends of a running call: it ends by itself; its time is over; it is cancelled. A coroutine is told by a cancel and has `grace` seconds to
end; a thread cannot be told. If the work goes on after its result is sealed, it is an orphan: counted, shown, and still holding.
Calls ordered after it are then offered to the gate, which parks them for what the orphan holds and clocks them from that seal.

House rules. Deciding happens under the tower's lock, effects outside it. Nothing awaits between a decision and its record. No task before
admission; no future, timer or callback for a call: one timer for each loop looks at everything that is due. What must happen at an end happens in a
synchronous function, so no cancel can come between.

Not here: who may start (gate), in what order (plan), what the words mean (policy, calls).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Generic, TypeVar

from towerman.access import AccessRefused, flat_holds
from towerman.arguments import ArgumentsRefused, near_names
from towerman.bounds import Encoded, EncodingError, encode, fit_batch, recut
from towerman.calls import (
    IX,
    Access,
    Applied,
    Batch,
    Call,
    Hold,
    Outcome,
    Result,
    Retryable,
    X,
    make_result,
    with_content,
)
from towerman.clock import Clock
from towerman.errors import Code, ToolError
from towerman.gate import GRANTED, NEVER, PARKED, Entry, Flow, Gate, Lot, Offer
from towerman.ledger import Wants
from towerman.plan import Plan, PlanRefused, resolve_needs
from towerman.policy import OnResult, TowerPolicy
from towerman.threads import Port, Ticket, Workers
from towerman.tools import Tool
from towerman.trace import ID_CHARACTERS, UNKNOWN_TOOL, Event, Kind

DepsT = TypeVar("DepsT")

SLICE: Final = 0.001
"""Seconds of preparing or sealing after which the loop gets a turn."""

NAME_CHARACTERS: Final = 128
"""Longest part of a tool name that is kept."""

REASON_CHARACTERS: Final = 200
"""Longest part of a canceller's words that is told and recorded."""

NOT_STARTED: Final = -1.0
"""A job's start before its first line is reached."""

_ORDER_OF_RUN: Final = "order of the run"
_ORDER_OF_PROCESS: Final = "exclusive tool"


class Context(Generic[DepsT]):
    """What a handler may know of its call: annotate a parameter with this type to get it.

    Attributes:
        run_id: the run's id.
        call_id: the provider's id of the call; may be empty.
        index: the call's place in its batch.
        tenant: whom the run belongs to, or None.
        deps: what `Tower.run(deps=...)` was given.
        attempt: which start of this call it is, from 1.
        idempotency_key: the call's key, if it came with one.
        deadline: the instant, on the loop-independent monotonic clock, at which the call's time is over.
    """

    __slots__ = ("_job", "attempt", "call_id", "deadline", "deps", "idempotency_key", "index", "run_id", "tenant")

    def __init__(self, job: Job, call: Call, run: RunState) -> None:
        self._job = job
        self.run_id = run.run_id
        self.call_id = call.id
        self.index = job.index
        self.tenant = run.tenant
        self.deps: DepsT = run.deps  # type: ignore[assignment]  # the handler says what its deps are
        self.attempt = 1
        self.idempotency_key = call.idempotency_key
        self.deadline = job.due

    @property
    def cancelled(self) -> bool:
        """The call was cancelled or its time is over: a sync handler should look at this and return."""
        return self._job.why is not None

    def __repr__(self) -> str:
        return f"Context(run_id={self.run_id!r}, index={self.index})"


Owner = tuple["Work", int]
"""A call's batch and its index: what the gate knows it by."""

Slot = Entry[Owner]


class Want(Wants[Lot[Owner]]):
    """What a call of one tool in one run wants; `accesses` is what its holds were made of."""

    __slots__ = ("accesses", "kind")

    accesses: tuple[Access, ...]
    kind: str


class Job:
    """A granted call, from its start to its seal or, as an orphan, to its end."""

    __slots__ = (
        "due",
        "entry",
        "granted",
        "index",
        "reason",
        "sealed",
        "started",
        "task",
        "ticket",
        "tool",
        "why",
        "work",
    )

    def __init__(self, work: Work, index: int, entry: Slot, tool: Tool, granted: float, due: float) -> None:
        self.work = work
        self.index = index
        self.entry = entry
        self.tool = tool
        self.granted = granted
        self.due = due
        self.started = NOT_STARTED
        self.sealed = False
        self.task: asyncio.Task[None] | None = None
        self.ticket: Ticket | None = None
        self.why: Code | None = None
        self.reason = ""


class RunState:
    """A run as the runner knows it.

    Attributes:
        number: of the run within its tower.
        run_id: its public id.
        flow: its calls in the gate.
        closed: nothing new is taken.
        works: its batches that are not done.
    """

    __slots__ = (
        "allow",
        "batches",
        "bases",
        "closed",
        "deny",
        "deps",
        "fail_fast",
        "flow",
        "limit",
        "number",
        "priority",
        "run_id",
        "tenant",
        "works",
    )

    def __init__(
        self,
        number: int,
        run_id: str,
        flow: Flow[Owner],
        *,
        tenant: str | None,
        deps: object,
        priority: int,
        limit: float,
        fail_fast: bool,
        allow: Callable[[str], bool] | None,
        deny: Callable[[str], bool] | None,
    ) -> None:
        self.number = number
        self.run_id = run_id
        self.flow = flow
        self.tenant = tenant
        self.deps = deps
        self.priority = priority
        self.limit = limit
        self.fail_fast = fail_fast
        self.allow = allow
        self.deny = deny
        self.closed: str | None = None
        self.batches = 0
        self.works: dict[Work, None] = {}
        self.bases: dict[str, Want] = {}

    def may_call(self, name: str) -> bool:
        """Is the tool allowed in this run?"""
        return (self.allow is None or self.allow(name)) and (self.deny is None or not self.deny(name))


class Work:
    """One batch on its way."""

    __slots__ = (
        "batch",
        "calls",
        "closing",
        "context",
        "ended",
        "error",
        "jobs",
        "keywords",
        "left",
        "notice",
        "number",
        "on_result",
        "plan",
        "results",
        "run",
        "sealed_at",
        "shell",
        "started_at",
        "stopped",
        "tools",
        "waited_for",
        "waiters",
        "wants",
    )

    def __init__(self, run: RunState, shell: Shell, batch: Batch, on_result: OnResult | None, now: float) -> None:
        size = len(batch.calls)
        run.batches += 1
        self.number = run.batches
        self.run = run
        self.shell = shell
        self.batch = batch
        self.calls: Sequence[Call] = batch.calls
        self.on_result = on_result
        self.context = contextvars.copy_context()
        self.started_at = now
        self.left = size
        self.results: list[Result | None] = [None] * size
        self.sealed_at: list[float] = [0.0] * size
        self.tools: list[Tool | None] = [None] * size
        self.keywords: list[dict[str, object] | None] = [None] * size
        self.wants: list[Want | None] = [None] * size
        self.jobs: dict[int, Job] = {}
        self.plan = Plan(0)
        self.waited_for: dict[int, tuple[str, ...]] = {}
        self.ended: dict[int, float] = {}
        self.notice: str | None = None
        self.closing: tuple[Code, Outcome, str] | None = None
        self.stopped = False
        self.error: BaseException | None = None
        self.waiters: list[asyncio.Future[None]] = []


class Core:
    """What all loops of one tower share: lock, gate, policy, threads, counters.

    Args:
        policy: the tower's own options.
        gate: the admission of this process.
        clock: where time is read.
        emit: takes an Event for the observers; None when there are none.
    """

    def __init__(
        self, policy: TowerPolicy, gate: Gate[Owner], clock: Clock, emit: Callable[[Event], None] | None
    ) -> None:
        self.policy = policy
        self.gate = gate
        self.now = clock.now
        self.lock = threading.Lock()
        self.emit = emit
        self.workers: Workers[Job] = Workers("towerman-worker")
        self.tools: dict[str, Tool] = {}
        self.any_ordered = False
        self.any_exclusive = False
        self.any_subtree = False
        self.outcomes: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.late_results = 0
        self.orphans = 0
        self.orphans_released = 0
        self.calls = 0
        if emit is not None:
            gate.notes = []

    # -------------------------------------------------------------- what a call wants

    def want(self, run: RunState, tool: Tool, accesses: tuple[Access, ...]) -> Want:
        """What a call of this tool in this run wants. Calls that touch nothing share one."""
        base = run.bases.get(tool.name)
        if base is None:
            base = run.bases[tool.name] = self._base(run, tool)
        if base.holds == () and not accesses:
            return base
        want = Want.__new__(Want)
        want.run = base.run
        want.tool = base.tool
        want.permits = base.permits
        want.priority = base.priority
        want.wait = base.wait
        want.max_wait = base.max_wait
        want.bounds = base.bounds
        want.pools = base.pools
        want.pool_states = base.pool_states
        want.kind = tool.kind
        want.accesses = accesses
        want.holds, want.labels = self.holds(run.number, tool.kind, accesses)
        return want

    def _base(self, run: RunState, tool: Tool) -> Want:
        policy, tower = tool.policy, self.policy
        permits = [("process", policy.weight), (f"run:{run.number}", 1)]
        bounds = [("process", tower.max_queued)]
        if policy.max_concurrency is not None:
            permits.append((f"tool:{tool.name}", 1))
        if policy.max_queued is not None:
            bounds.append((f"tool:{tool.name}", policy.max_queued))
        for name, units in policy.pools:
            pool = tower.pools[name]
            key = pool_key(name, pool.scope, run)
            permits.append((key, units))
            if pool.max_queued is not None:
                bounds.append((key, pool.max_queued))
        holds, labels = self.holds(run.number, tool.kind, ())
        want = Want(
            run.number,
            tool.name,
            tuple(permits),
            holds,
            priority=run.priority,
            wait=tool.wait,
            max_wait=tool.max_wait,
            bounds=tuple(bounds),
            labels=labels,
        )
        want.kind = tool.kind
        want.accesses = ()
        self.gate.ledger.look_up(want)
        return want

    def holds(self, run: int, kind: str, accesses: tuple[Access, ...]) -> tuple[tuple[Hold, ...], Mapping[str, str]]:
        """Flat locks of a call: its resources, and the roots at which calls without resources exclude it."""
        holds: tuple[Hold, ...] = ()
        labels: Mapping[str, str] = {}
        if accesses:
            holds, labels = flat_holds(accesses, subtrees=self.any_subtree)
        if kind == "independent":
            return holds, labels
        roots: tuple[Hold, ...] = ()
        names: dict[str, str] = {}
        if self.any_ordered:
            key = f"\0run:{run}"
            roots = ((key, X if kind == "ordered" else IX),)
            names[key] = _ORDER_OF_RUN
        if self.any_exclusive:
            roots = (("\0process", X if kind == "exclusive" else IX), *roots)
            names["\0process"] = _ORDER_OF_PROCESS
        if not roots:
            return holds, labels
        return roots + holds, {**labels, **names}

    def add_tool(self, tool: Tool) -> None:
        """Register a tool; locks that it makes necessary are taken for all that is in flight."""
        with self.lock:
            self.tools[tool.name] = tool
            ordered = self.any_ordered or tool.kind == "ordered"
            exclusive = self.any_exclusive or tool.kind == "exclusive"
            subtree = self.any_subtree or (tool.rule is not None and tool.rule.may_subtree)
            if (ordered, exclusive, subtree) == (self.any_ordered, self.any_exclusive, self.any_subtree):
                return
            self.any_ordered, self.any_exclusive, self.any_subtree = ordered, exclusive, subtree
            self.gate.expand(self._widen)

    def _widen(self, want: Wants[Lot[Owner]]) -> Wants[Lot[Owner]]:
        assert isinstance(want, Want)
        if want.kind == "independent":
            return want
        wider = Want.__new__(Want)
        for name in ("run", "tool", "permits", "priority", "wait", "max_wait", "bounds", "pools", "pool_states"):
            setattr(wider, name, getattr(want, name))
        wider.kind = want.kind
        wider.accesses = want.accesses
        wider.holds, wider.labels = self.holds(want.run, want.kind, want.accesses)
        return wider

    def count(self, outcome: str, code: str | None) -> None:
        """One more sealed result."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if code is not None:
            self.codes[code] = self.codes.get(code, 0) + 1


def pool_key(name: str, scope: str, run: RunState) -> str:
    """The ledger's key of a named pool, for a run."""
    if scope == "process":
        return f"pool:{name}"
    if scope == "run":
        return f"pool:{name}@run:{run.number}"
    return f"pool:{name}@tenant:{run.tenant or ''}"


class Shell:
    """The runner of one event loop."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop) -> None:
        self.core = core
        self.loop = loop
        self.port: Port[Job] = Port(loop.call_soon_threadsafe, self._thread_done, self._lost)
        self.running: dict[Job, None] = {}
        self._todo: deque[Slot] = deque()
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        self._inbox: deque[Slot] = deque()
        self._free_worker: object = None
        self._next_job: Job | None = None

    # ================================================================ a batch

    async def execute(
        self, run: RunState, batch: Batch, on_result: OnResult | None, started: Callable[[Work], None]
    ) -> Work:
        """Run a batch and return it with every result sealed; raises only after that."""
        core = self.core
        work = Work(run, self, batch, on_result, core.now())
        started(work)
        if not work.calls:
            return work
        run.works[work] = None
        if core.emit is not None:
            self._tell(work, None, "batch_started", size=len(work.calls), wall=datetime.now(UTC).timestamp())
        interrupted: asyncio.CancelledError | None = None
        try:
            await self._prepare(work)
        except asyncio.CancelledError as caught:
            interrupted = caught
            self._close(work, "cancelled", "cancelled", _reason_of(caught))
        except BaseException as fault:  # of this room or of a hook: every call gets its result before it is told
            work.error = work.error or fault
            self._close(work, "cancelled", "cancelled", f"the batch could not be prepared ({type(fault).__name__})")
        while work.left:
            waiter = self.loop.create_future()
            work.waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError as caught:
                if interrupted is None:
                    interrupted = caught
                    self._close(work, "cancelled", "cancelled", _reason_of(caught))
        run.works.pop(work, None)
        self._fit(work)
        if core.emit is not None:
            self._tell(work, None, "batch_finished", size=len(work.calls), ran=core.now() - work.started_at)
        if work.error is not None:
            raise work.error
        if interrupted is not None:
            raise interrupted
        return work

    async def _prepare(self, work: Work) -> None:
        """Look up, permit, check; plan; offer what is ready. Gives the loop a turn where it takes long."""
        core, run, calls = self.core, work.run, work.calls
        if run.closed is not None:
            self._close(work, "run_closed", "rejected", run.closed)
            return
        policy = core.policy
        size = len(calls)
        try:
            needs = resolve_needs([call.id for call in calls], [call.needs for call in calls])
        except PlanRefused as refused:
            for index in range(size):
                self._refuse(work, index, refused.code, refused.message)
            self._hand_on(work)
            return
        most = policy.max_calls_per_batch
        if size > most and needs is None and policy.on_excess == "tell":
            work.notice = (
                f"Ran {most} of {size} calls: at most {most} calls are run for one response. "
                "Narrow the request, or ask for the rest in the next turn."
            )
        else:
            most = size
        turn = core.now() + SLICE
        any_holds = False
        for index in range(size):
            if index >= most:
                self._refuse(work, index, "call_cap", f"Not run: only the first {most} of {size} calls were.")
            else:
                want = self._check(work, index, size)
                if want is not None and want.holds:
                    any_holds = True
            if not index & 15 and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + SLICE
                if work.closing is not None:
                    return
        if needs is not None or any_holds:
            holds = [want.holds if want is not None else () for want in work.wants]
            work.plan = Plan(size, needs, holds if any_holds else None)
        else:
            work.plan = Plan(size)
        if needs is not None or not work.plan.trivial:
            await self._start_plan(work)
        else:
            await self._start_all(work)

    async def _start_all(self, work: Work) -> None:
        """No edges: offer everything in emitted order, a slice at a time."""
        core = self.core
        owed: list[Offer[Owner]] = []
        now = core.now()
        turn = now + SLICE
        for index, want in enumerate(work.wants):
            if want is None:
                continue
            owed.append((want, (work, index), now))
            if len(owed) >= 64:
                self._offer(work, owed)
                owed = []
                now = core.now()
                if now > turn:
                    await asyncio.sleep(0)
                    now = core.now()
                    turn = now + SLICE
                    if work.closing is not None:
                        return
        if owed:
            self._offer(work, owed)
        self._hand_on(work)

    async def _start_plan(self, work: Work) -> None:
        """Edges: refused calls settle first, then what is ready is offered in the plan's order."""
        plan = work.plan
        for index, result in enumerate(work.results):
            if result is not None:
                self._settle_in_plan(work, index, False)
        for index in range(len(work.calls)):
            blockers = plan.blockers(index, 3)
            if blockers:
                work.waited_for[index] = tuple(f"call {other}" for _, other in blockers)
        self._offer_ready(work, plan.start())
        self._hand_on(work)

    def _check(self, work: Work, index: int, size: int) -> Want | None:
        """The want of one call, or None when it was refused and sealed."""
        core, run, call = self.core, work.run, work.calls[index]
        name = call.tool
        tool = core.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            near = near_names(
                name if isinstance(name, str) else "", [known for known in core.tools if run.may_call(known)]
            )
            hint = f" Did you mean {' or '.join(repr(one) for one in near)}?" if near else ""
            self._refuse(work, index, "unknown_tool", f"There is no tool of this name.{hint}")
            return None
        work.tools[index] = tool
        if not run.may_call(name):
            self._refuse(work, index, "permission_denied", f"The tool {name!r} is not allowed in this run.")
            return None
        if tool.policy.only_call and size > 1:
            self._refuse(
                work, index, "not_alone", f"The tool {name!r} must be the only call of a response; call it again alone."
            )
            return None
        if work.batch.truncated and (index == size - 1 or not tool.policy.effect_free):
            self._refuse(
                work,
                index,
                "truncated_response",
                "The response was cut at the token limit, so this call may be incomplete; it was not run. Send it again.",
            )
            return None
        try:
            keywords = tool.checker.check(call.arguments)
        except ArgumentsRefused as refused:
            self._refuse(work, index, "invalid_arguments", refused.message)
            return None
        accesses: tuple[Access, ...] = ()
        if tool.rule is not None:
            try:
                accesses = tool.fixed if tool.fixed is not None else tool.rule.accesses(keywords)
            except AccessRefused as unnamed:
                self._refuse(work, index, unnamed.code, str(unnamed))
                return None
        work.keywords[index] = keywords
        want = work.wants[index] = core.want(run, tool, accesses)
        return want

    # ================================================================ offers, grants, refusals

    def _offer_ready(self, work: Work, ready: Iterable[int]) -> None:
        now = self.core.now()
        offers: list[Offer[Owner]] = []
        for index in ready:
            want = work.wants[index]
            if want is not None and work.results[index] is None:
                offers.append((want, (work, index), now))
        if offers:
            self._offer(work, offers)

    def _offer(self, work: Work, offers: list[Offer[Owner]]) -> None:
        core = self.core
        with core.lock:
            decided = core.gate.offer(work.run.flow, offers, core.now())
            notes = self._notes()
        self._take(decided, notes)

    def _notes(self) -> list[tuple[str, Slot, str]]:
        notes = self.core.gate.notes
        if notes:
            self.core.gate.notes = []
            return notes
        return []

    def _take(self, decided: list[Slot], notes: Sequence[tuple[str, Slot, str]] = ()) -> None:
        """Carry out decisions: here, or on the loop that the call belongs to."""
        for kind, entry, label in notes:
            self._tell(
                entry.owner[0], entry.owner[1], "promoted" if kind == "promoted" else "waiting", waiting_for=label
            )
        for entry in decided:
            shell = entry.owner[0].shell
            if shell is self:
                self._todo.append(entry)
            else:
                shell.post(entry)
        if not self._draining:
            self._drain()
        if self.core.gate.wake_at < self._timer_at:
            self._arm(self.core.gate.wake_at)

    def _drain(self) -> None:
        self._draining = True
        todo = self._todo
        try:
            while todo:
                entry = todo.popleft()
                if entry.status == GRANTED:
                    self._start(entry)
                else:
                    self._rejected(entry)
        finally:
            self._draining = False

    def post(self, entry: Slot) -> None:
        """From another loop: a decision for a call of this one."""
        self._inbox.append(entry)
        try:
            self.loop.call_soon_threadsafe(self._receive)
        except RuntimeError:  # this loop is gone: nobody can run the call, so it gives back what it got
            core = self.core
            while self._inbox:
                stray = self._inbox.popleft()
                with core.lock:
                    decided = core.gate.finish(stray, core.now()) if stray.status == GRANTED else []
                for one in decided:
                    one.owner[0].shell.post(one)

    def _receive(self) -> None:
        decided = []
        while self._inbox:
            decided.append(self._inbox.popleft())
        self._take(decided)

    def _start(self, entry: Slot) -> None:
        """Start the handler of a granted call."""
        work, index = entry.owner
        core = self.core
        now = core.now()
        tool = work.tools[index]
        keywords = work.keywords[index]
        assert tool is not None
        if keywords is None or work.results[index] is not None or work.closing is not None:
            self._give_back(entry)
            self._seal_closed(work, index)
            return
        work.keywords[index] = None
        due = now + tool.timeout
        if work.run.limit < due:
            due = work.run.limit
        job = Job(work, index, entry, tool, now, due)
        work.jobs[index] = job
        self.running[job] = None
        if due < self._timer_at:
            self._arm(due)
        if core.emit is not None:
            scopes = {_shown_pool(pool.key): pool.scope for pool, _ in entry.wants.pools}
            self._tell(work, index, "admitted", waited=now - entry.since, scopes=scopes)
        if tool.context_parameter is not None:
            keywords[tool.context_parameter] = Context(job, work.calls[index], work.run)
        if tool.in_thread:
            job.ticket = Ticket()
            try:
                core.workers.submit(
                    self.port, job, job.ticket, work.context.copy(), lambda: self._work_in_thread(job, tool, keywords)
                )
            except RuntimeError:
                self._never_started(job, "handler_error", "Not started: the system gave no thread for it.", "error")
        elif not tool.policy.own_task and self._free_worker is work and self._next_job is None:
            self._next_job = job
            job.reason = ""
            self._next_keywords = keywords
        else:
            job.task = self.loop.create_task(self._work_in_task(job, tool, keywords), context=work.context.copy())

    async def _work_in_task(self, job: Job, tool: Tool, keywords: dict[str, object]) -> None:
        """The body of a call's task. With own_task=False it goes on with the batch's next such call."""
        core = self.core
        while True:
            job.started = core.now()
            if core.emit is not None:
                self._tell(job.work, job.index, "started", waited=job.granted - job.entry.since)
            value: object = None
            error: BaseException | None = None
            try:
                value = tool.handler(**keywords)
                if tool.is_async or inspect.isawaitable(value):
                    value = await value  # type: ignore[misc]  # whatever is awaitable
            except GeneratorExit:  # the loop is being torn down: nobody will see a result
                self._abandoned(job)
                raise
            except BaseException as caught:
                error = caught
            if tool.policy.own_task or job.why is not None or contextvars.copy_context() != job.work.context:
                self._finished(job, value, error)
                return
            self._free_worker = job.work
            task = job.task
            self._finished(job, value, error)
            self._free_worker = None
            following = self._next_job
            if following is None:
                return
            self._next_job = None
            job, tool, keywords = following, following.tool, self._next_keywords
            job.task = task
            value = error = None

    _next_keywords: dict[str, object]

    def _work_in_thread(self, job: Job, tool: Tool, keywords: dict[str, object]) -> object:
        """The body of a call on a worker thread: also waits for what a handler returns, and encodes it there."""
        core = self.core
        job.started = core.now()
        if core.emit is not None:
            self._tell(job.work, job.index, "started", waited=job.granted - job.entry.since)
        value = tool.handler(**keywords)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        try:
            return value, encode(value, tool.max_result_bytes, tool.policy.encode)
        except EncodingError as unencodable:
            return value, unencodable

    def _thread_done(self, job: Job, value: object, error: BaseException | None) -> None:
        """On the loop: a worker thread has ended its call."""
        if error is None:
            assert isinstance(value, tuple)
            self._finished(job, value[0], None, value[1])
        else:
            self._finished(job, None, error)

    def _lost(self, job: Job) -> None:
        """On a worker thread: the loop of an ended call is gone; what the call held goes back."""
        self._give_back(job.entry, elsewhere=True)

    def _abandoned(self, job: Job) -> None:
        self.running.pop(job, None)
        self._give_back(job.entry, elsewhere=True)

    def _give_back(self, entry: Slot, *, elsewhere: bool = False) -> None:
        core = self.core
        with core.lock:
            decided = core.gate.finish(entry, core.now())
            notes = self._notes()
        if elsewhere:
            for one in decided:
                one.owner[0].shell.post(one)
        else:
            self._take(decided, notes)

    # ================================================================ ends

    def _finished(
        self, job: Job, value: object, error: BaseException | None, encoded: Encoded | EncodingError | None = None
    ) -> None:
        """The work of a call has ended, one way or another; on the loop, never twice."""
        core = self.core
        now = core.now()
        work, index = job.work, job.index
        self.running.pop(job, None)
        work.jobs.pop(index, None)
        if not job.sealed:
            job.sealed = True
            if job.why is not None and not (error is not None and isinstance(error, KeyboardInterrupt | SystemExit)):
                self._seal_stopped(job, now, still_running=False)
            elif error is None:
                self._seal_value(job, value, encoded, now)
            else:
                self._seal_error(job, error, now)
        else:
            work.ended[index] = now
            core.orphans -= 1
            if error is None:
                core.late_results += 1
                if core.emit is not None:
                    self._tell(work, index, "late_result", ran=now - job.started)
            if core.emit is not None:
                self._tell(work, index, "ended", ran=now - job.started)
        with core.lock:
            decided = core.gate.finish(job.entry, now)
            notes = self._notes()
        if decided or notes:
            self._take(decided, notes)
        if not work.plan.trivial:
            result = work.results[index]
            self._settle_in_plan(work, index, result is not None and result.ok)
        if not work.left and work.waiters:
            self._hand_on(work)

    def _seal_value(self, job: Job, value: object, encoded: Encoded | EncodingError | None, now: float) -> None:
        tool = job.tool
        policy = tool.policy
        if encoded is None:
            try:
                encoded = encode(value, tool.max_result_bytes, policy.encode)
            except EncodingError as unencodable:
                encoded = unencodable
        if isinstance(encoded, EncodingError):
            applied: Applied = "no" if policy.effect_free else "yes"
            self._seal_failure(job, now, "error", "encoding_error", str(encoded), applied, "no", value=value)
            return
        if encoded.cut and policy.summarize is not None:
            encoded = _summary(policy.summarize, value, encoded, tool.max_result_bytes)
        work, index, entry = job.work, job.index, job.entry
        waited_for = entry.blocked_by
        if work.waited_for:
            waited_for = work.waited_for.get(index, ()) + waited_for
        self._seal(
            work,
            index,
            make_result(
                index,
                work.calls[index].id,
                policy.name,
                "ok",
                None,
                "The call succeeded.",
                encoded.text,
                value=value,
                started=True,
                applied="no" if policy.effect_free else "yes",
                waited=job.granted - entry.since,
                ran=now - job.started,
                waited_for=waited_for,
                attempts=1,
                original_bytes=encoded.original_bytes,
            ),
            now,
        )

    def _seal_error(self, job: Job, error: BaseException, now: float) -> None:
        policy = job.tool.policy
        applied: Applied = "no" if policy.effect_free else "unknown"
        if self.core.policy.debug:
            traceback.print_exception(error, file=sys.stderr)
        if isinstance(error, asyncio.CancelledError):
            self._seal_failure(
                job,
                now,
                "error",
                "handler_cancelled",
                "The tool cancelled itself before it answered.",
                applied,
                error=error,
            )
            return
        if isinstance(error, ToolError):
            message = (
                encode(error.text, job.tool.max_result_bytes // 2).text if error.text.strip() else "The tool failed."
            )
            if error.applied is not None:
                applied = error.applied
            self._seal_failure(job, now, "error", "handler_error", message, applied, error=error)
        else:
            self._seal_failure(job, now, "error", "handler_error", _told(error), applied, error=error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            work = job.work
            if work.error is None:
                work.error = error
            self._close(work, "cancelled", "cancelled", f"the process was interrupted ({type(error).__name__})")

    def _seal_stopped(self, job: Job, now: float, *, still_running: bool) -> None:
        """Seal a call that was told to stop, by whatever it was told."""
        policy = job.tool.policy
        applied: Applied = "no" if policy.effect_free else "unknown"
        effect = "It has no side effect." if policy.effect_free else "Whether it took effect is not known."
        goes_on = " Its work still goes on." if still_running else ""
        assert job.why is not None
        if job.why == "handler_timeout":
            message = f"The call did not end within {job.tool.timeout:g} s.{goes_on} {effect}"
            outcome: Outcome = "timed_out"
        elif job.why == "deadline_exceeded":
            message = f"The run's deadline passed while the call was running.{goes_on} {effect}"
            outcome = "timed_out"
        else:
            message = f"The call was cancelled after it had started: {job.reason}.{goes_on} {effect}"
            outcome = "cancelled"
        self._seal_failure(job, now, outcome, job.why, message, applied, still_running=still_running)

    def _seal_failure(
        self,
        job: Job,
        now: float,
        outcome: Outcome,
        code: Code,
        message: str,
        applied: Applied,
        retryable: Retryable | None = None,
        *,
        value: object = None,
        error: BaseException | None = None,
        still_running: bool = False,
        started: bool = True,
    ) -> None:
        work, index, entry = job.work, job.index, job.entry
        if retryable is None:
            retryable = "yes" if applied == "no" or job.tool.policy.repeatable else "unknown"
        content = _failure(code, message, outcome, started, applied, retryable)
        self._seal(
            work,
            index,
            make_result(
                index,
                work.calls[index].id,
                job.tool.name,
                outcome,
                code,
                message,
                content,
                value=value,
                exception=error,
                started=started,
                applied=applied,
                retryable=retryable,
                waited=job.granted - entry.since,
                ran=now - job.started if job.started else 0.0,
                waited_for=work.waited_for.get(index, ()) + entry.blocked_by,
                attempts=1 if started else 0,
                still_running=still_running,
                original_bytes=len(content.encode()),
            ),
            now,
        )

    def _refuse(
        self,
        work: Work,
        index: int,
        code: Code,
        message: str,
        outcome: Outcome = "rejected",
        *,
        waited: float = 0.0,
        waited_for: tuple[str, ...] = (),
    ) -> None:
        """Seal a call that does not start."""
        if work.results[index] is not None:
            return
        work.keywords[index] = None
        work.wants[index] = None
        call = work.calls[index]
        retryable: Retryable = "yes" if code in _WORTH_ANOTHER_TRY else "no"
        content = _failure(code, message, outcome, False, "no", retryable)
        self._seal(
            work,
            index,
            make_result(
                index,
                call.id,
                call.tool[:NAME_CHARACTERS] if isinstance(call.tool, str) else "",
                outcome,
                code,
                message,
                content,
                retryable=retryable,
                waited=waited,
                waited_for=waited_for,
                original_bytes=len(content.encode()),
            ),
            self.core.now(),
        )

    def _rejected(self, entry: Slot) -> None:
        """The gate said no to a call that waited, or could not wait."""
        work, index = entry.owner
        if work.results[index] is not None:
            return
        now = self.core.now()
        if work.closing is not None:
            self._seal_closed(work, index, waited=now - entry.since, waited_for=entry.blocked_by)
        else:
            code, blocker = entry.rejection.code, entry.rejection.blocker
            waited = now - entry.since if entry.blocked_by else 0.0
            self._refuse(
                work,
                index,
                code,
                _REFUSALS[code].format(blocker=blocker or "its turn", tool=entry.wants.tool, wait=entry.wants.max_wait),
                waited=waited,
                waited_for=work.waited_for.get(index, ()) + (entry.blocked_by or (blocker,)),
            )
        self._settle(work, index, False)

    def _seal(self, work: Work, index: int, result: Result, now: float) -> None:
        """Write the one result of a call."""
        core = self.core
        work.results[index] = result
        work.sealed_at[index] = now
        work.left -= 1
        core.count(result.outcome, result.code)
        if core.emit is not None:
            kind: Kind = "finished" if result.started else "rejected"
            reason = work.closing[2] if work.closing is not None and result.outcome == "cancelled" else None
            self._tell(
                work,
                index,
                kind,
                outcome=result.outcome,
                code=result.code,
                waited=result.waited,
                ran=result.ran,
                waited_for=result.waited_for or None,
                size=result.original_bytes,
                reason=reason,
            )
        if work.on_result is not None:
            try:
                work.on_result(result)
            except BaseException as broken:  # the caller's own hook: the batch is finished first, then it is told
                if work.error is None:
                    work.error = broken
        if work.run.fail_fast and result.outcome in ("error", "timed_out") and work.closing is None:
            name = result.tool
            self._close(
                work,
                "sibling_failed",
                "cancelled",
                f"call {index} ({name}) failed with {result.code}",
                spare_writes=True,
            )

    def _settle(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed: let the plan go on, and the caller if it was the last."""
        if not work.plan.trivial:
            self._settle_in_plan(work, index, ok)
        if not work.left:
            self._hand_on(work)

    def _settle_in_plan(self, work: Work, index: int, ok: bool) -> None:
        """Tell the plan that a call is sealed; its work counts as ended too, since the ledger keeps what an orphan holds."""
        ready, skipped = work.plan.seal(index, ok)
        for one, culprit in skipped:
            self._refuse(
                work,
                one,
                "dependency_failed",
                f"Not run: call {culprit}{_named(work.calls[culprit])}, which it needs, did not succeed.",
                "skipped",
            )
        ready = [*ready, *work.plan.end(index)]
        if ready and work.closing is None:
            self._offer_ready(work, ready)

    def _hand_on(self, work: Work) -> None:
        """Every call is sealed: wake the caller."""
        if work.left:
            return
        for waiter in work.waiters:
            if not waiter.done():
                waiter.set_result(None)
        work.waiters.clear()

    # ================================================================ cancelling, closing

    def _close(self, work: Work, code: Code, outcome: Outcome, reason: str, *, spare_writes: bool = False) -> None:
        """End a batch early: what waits is sealed in slices, what runs is told to stop and has `grace`."""
        if work.closing is not None:
            return
        reason = reason[:REASON_CHARACTERS]
        work.closing = (code, outcome, reason)
        core = self.core
        with core.lock:
            gate, flow = core.gate, work.run.flow
            gate.withdraw(flow, lambda owner: owner[0] is work)
            decided = []
            for entry in gate.parked_of(flow):
                if entry.owner[0] is work and entry.status == PARKED:
                    decided += gate.cancel(entry, core.now(), code)
            notes = self._notes()
        self._take(decided, notes)
        for job in list(work.jobs.values()):
            if not spare_writes or job.tool.policy.effect_free:
                self._stop(job, "cancelled" if code != "sibling_failed" else code, reason)
        self._seal_rest(work, 0)

    def _seal_rest(self, work: Work, start: int) -> None:
        """Seal what never started, a slice at a time."""
        core = self.core
        turn = core.now() + SLICE
        for index in range(start, len(work.calls)):
            if work.results[index] is None and index not in work.jobs:
                self._seal_closed(work, index)
            if not index & 15 and core.now() > turn:
                self.loop.call_soon(self._seal_rest, work, index + 1)
                return
        self._hand_on(work)

    def _seal_closed(self, work: Work, index: int, *, waited: float = 0.0, waited_for: tuple[str, ...] = ()) -> None:
        if work.closing is None or work.results[index] is not None:
            return
        code, outcome, reason = work.closing
        if code == "sibling_failed":
            message = f"Not started: {reason}, and this run stops at the first failure."
        elif code == "run_closed":
            message = f"Not started: the run is closed ({reason})."
        else:
            message = f"Not started: {reason}."
        self._refuse(work, index, code, message, outcome, waited=waited, waited_for=waited_for)

    def _stop(self, job: Job, why: Code, reason: str) -> None:
        """Tell a running call to stop. Seals it at once where telling is no use or it never started."""
        if job.why is not None or job.sealed:
            return
        core = self.core
        now = core.now()
        job.why = why
        job.reason = reason
        if job.ticket is not None:
            if job.ticket.take():
                self._give_up(job, why, reason)
            else:
                self._orphan(job, now)
            return
        task = job.task
        if job.started == NOT_STARTED:
            if task is not None:
                task.cancel()
            self._give_up(job, why, reason)
            return
        job.due = now + core.policy.grace
        if job.due < self._timer_at:
            self._arm(job.due)
        if task is not None:
            task.cancel()

    def _give_up(self, job: Job, why: Code, reason: str) -> None:
        """Told to stop between its grant and its first line."""
        if why in ("handler_timeout", "deadline_exceeded"):
            self._never_started(job, "deadline_exceeded", "Not started: its time was over.", "rejected")
        else:
            self._never_started(job, "cancelled", f"Not started: {reason}.", "cancelled")

    def _never_started(self, job: Job, code: Code, message: str, outcome: Outcome) -> None:
        """A granted call that has not reached its first line: it never will."""
        work, index, entry = job.work, job.index, job.entry
        self.running.pop(job, None)
        work.jobs.pop(index, None)
        job.sealed = True
        waited = job.granted - entry.since
        if work.closing is not None:
            self._seal_closed(work, index, waited=waited, waited_for=entry.blocked_by)
        self._refuse(work, index, code, message, outcome, waited=waited, waited_for=entry.blocked_by)
        self._give_back(entry)
        self._settle(work, index, False)

    def _orphan(self, job: Job, now: float) -> None:
        """Seal a call whose work goes on. It keeps what it holds, unless the operator chose otherwise."""
        core, work, index = self.core, job.work, job.index
        job.sealed = True
        core.orphans += 1
        self.running.pop(job, None)
        self._seal_stopped(job, now, still_running=True)
        with core.lock:
            if core.policy.on_orphan == "hold":
                decided = core.gate.orphan(job.entry, now)
            else:
                core.orphans_released += 1
                decided = core.gate.finish(job.entry, now)
            notes = self._notes()
        if core.emit is not None:
            self._tell(work, index, "orphaned", ran=now - job.started)
        self._take(decided, notes)
        work.jobs.pop(index, None)
        self._settle(work, index, False)

    def cancel_work(self, work: Work, reason: str) -> None:
        """Cancel a whole batch; from its own loop."""
        self._close(work, "cancelled", "cancelled", reason)

    def cancel_call(self, work: Work, index: int, reason: str) -> None:
        """Cancel one call of a batch; from its own loop. Ignored once it is sealed."""
        if work.results[index] is not None:
            return
        job = work.jobs.get(index)
        if job is not None:
            self._stop(job, "cancelled", reason[:REASON_CHARACTERS])
            return
        core = self.core
        with core.lock:
            gate, flow = core.gate, work.run.flow
            decided = []
            if not gate.withdraw(flow, lambda owner: owner[0] is work and owner[1] == index):
                for entry in gate.parked_of(flow):
                    if entry.owner[0] is work and entry.owner[1] == index:
                        decided = gate.cancel(entry, core.now())
            notes = self._notes()
        self._refuse(work, index, "cancelled", f"Not started: {reason[:REASON_CHARACTERS]}.", "cancelled")
        self._take(decided, notes)
        self._settle(work, index, False)

    # ================================================================ time

    def _arm(self, instant: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = instant
        self._timer = self.loop.call_later(max(0.0, instant - self.core.now()), self._on_time)

    def _on_time(self) -> None:
        """Something may be due: waits, run times, graces."""
        core = self.core
        now = core.now()
        self._timer = None
        self._timer_at = NEVER
        if core.gate.wake_at <= now:
            with core.lock:
                decided = core.gate.tick(now)
                notes = self._notes()
            self._take(decided, notes)
        following = NEVER
        for job in list(self.running):
            if job.sealed:
                continue
            if job.task is not None and job.task.done():
                # Somebody outside ended the task before its first step, so its body could not tell.
                self._finished(job, None, asyncio.CancelledError())
            elif job.due <= now:
                if job.why is not None:
                    self._orphan(job, now)
                else:
                    self._stop(job, "deadline_exceeded" if now >= job.work.run.limit else "handler_timeout", "")
            if not job.sealed and job.due < following:
                following = job.due
        if core.gate.wake_at < following:
            following = core.gate.wake_at
        if following < self._timer_at:
            self._arm(following)

    def rest(self) -> None:
        """A run was closed: if nothing runs and nothing waits, leave no timer behind."""
        if self._timer is not None and not self.running and not self.core.gate.statistics()["parked"]:
            self._timer.cancel()
            self._timer = None
            self._timer_at = NEVER

    # ================================================================ the end of a batch

    def _fit(self, work: Work) -> None:
        """Bring the whole batch under its bound: small results stay whole, large ones share what is left."""
        results = work.results
        if sum(len(result.content) for result in results if result is not None) * 4 <= self.core.policy.max_batch_bytes:
            return
        sizes = [len(result.content.encode()) for result in results if result is not None]
        cap = fit_batch(sizes, self.core.policy.max_batch_bytes)
        if cap is None:
            return
        for index, result in enumerate(results):
            if result is not None and sizes[index] > cap:
                tool = work.tools[index]
                encoder = tool.policy.encode if tool is not None else None
                source = result.value if result.ok else None
                results[index] = with_content(result, recut(source, result.content, cap, encoder))

    def _tell(self, work: Work, index: int | None, kind: Kind, **fields: object) -> None:
        emit = self.core.emit
        if emit is None:
            return
        call_id = tool = None
        if index is not None:
            known = work.tools[index]
            tool = known.name if known is not None else UNKNOWN_TOOL
            call_id = str(work.calls[index].id)[:ID_CHARACTERS]
        emit(Event(self.core.now(), kind, work.run.run_id, work.number, index, call_id, tool, **fields))  # type: ignore[arg-type]


# ==================================================================== words

_WORTH_ANOTHER_TRY: Final = frozenset(
    {
        "concurrency_limit",
        "wait_timeout",
        "queue_full",
        "call_cap",
        "cancelled",
        "sibling_failed",
        "not_alone",
        "truncated_response",
    }
)

_REFUSALS: Final[Mapping[str, str]] = {
    "concurrency_limit": "Not started: {blocker} is busy, and this tool does not wait. Try again later.",
    "queue_full": "Not started: too many calls already wait ({blocker}). Try again later.",
    "wait_timeout": "Not started: waited {wait:g} s for {blocker}. Try again later.",
    "deadline_exceeded": "Not started: the run's deadline has passed.",
    "cancelled": "Not started: it was cancelled.",
    "sibling_failed": "Not started: another call of the batch failed.",
}


def _failure(code: str, message: str, outcome: str, started: bool, applied: str, retryable: str) -> str:
    """What the model is sent for a call without an ordinary answer."""
    return json.dumps(
        {
            "error": {
                "code": code,
                "message": message,
                "outcome": outcome,
                "started": started,
                "applied": applied,
                "retryable": retryable,
            }
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _told(error: BaseException) -> str:
    """An exception in one plain sentence: types only, a group by its leaves."""
    if not isinstance(error, BaseExceptionGroup):
        return f"The tool failed with {type(error).__name__[:100]}."
    names: dict[str, None] = {}
    stack: list[BaseException] = [error]
    count = 0
    while stack:
        one = stack.pop()
        if isinstance(one, BaseExceptionGroup):
            stack.extend(reversed(one.exceptions))
        else:
            count += 1
            names[type(one).__name__[:100]] = None
    listed = ", ".join(list(names)[:5]) + (" and others" if len(names) > 5 else "")
    return f"The tool failed with {listed} (a group of {count} error{'s' if count != 1 else ''})."


def _summary(summarize: Callable[[object], object], value: object, cut: Encoded, limit: int) -> Encoded:
    """The tool's own shorter form of an oversized result; if that fails, the plain cut."""
    try:
        short = encode(summarize(value), limit)
    except Exception:
        return cut
    return Encoded(short.text, cut.original_bytes, True)


def _named(call: Call) -> str:
    return f" ({call.id[:ID_CHARACTERS]})" if call.id else ""


def _shown_pool(key: str) -> str:
    name = key.partition("@")[0]
    return "run" if name.startswith("run:") else name.removeprefix("pool:")


def _reason_of(error: asyncio.CancelledError) -> str:
    words = error.args[0] if error.args else None
    return words if isinstance(words, str) and words else "the caller was cancelled"


async def _awaited(value: object) -> object:
    return await value  # type: ignore[misc]  # whatever is awaitable
