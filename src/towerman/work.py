"""What the runner keeps: a run, a batch on its way, a granted call, and what all loops of a tower share.

Theory. A batch is kept as columns (tools, keywords, wants, results) so that a call that waits costs a few pointers.
Only a granted call has an object of its own, a `Job`, and few of those live at once. What a call wants of the gate is
worked out here, once for each tool and run where it touches nothing.

House rules. State and look-ups only: nothing here starts, seals or decides.

Not here: running (runner), wording of results (sealing).
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar, overload

from towerman.access import flat_holds
from towerman.calls import IX, Access, Batch, Call, Hold, Outcome, Result, X
from towerman.clock import Clock
from towerman.errors import Code
from towerman.gate import Entry, Flow, Gate, Lot
from towerman.ledger import Wants
from towerman.plan import Plan
from towerman.policy import OnResult, TowerPolicy, whole
from towerman.threads import Ticket, Workers
from towerman.tools import Tool
from towerman.trace import UNKNOWN_TOOL, Event, Span

if TYPE_CHECKING:
    from towerman.processes import Processes

DepsT = TypeVar("DepsT")

NOT_STARTED: Final = -1.0
"""A job's start before its first line is reached."""

NO_PLAN: Final = Plan(0)
"""The plan of a batch that is not prepared."""

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
        deadline: the instant, on the tower's monotonic clock in seconds (`time.monotonic`), at which the call's time
            is over.
    """

    __slots__ = (
        "_execute",
        "_job",
        "attempt",
        "call_id",
        "deadline",
        "deps",
        "idempotency_key",
        "index",
        "run_id",
        "tenant",
    )

    def __init__(self, job: Job, call: Call, run: RunState) -> None:
        self._job = job
        self._execute = run.execute
        self.run_id = run.run_id
        self.call_id = call.id
        self.index = job.index
        self.tenant = run.tenant
        self.deps: DepsT = run.deps  # type: ignore[assignment]  # the handler says what its deps are
        self.attempt = 1
        self.idempotency_key = call.idempotency_key
        self.deadline = job.due

    async def execute(
        self, calls: object, *, format: str | None = None, on_result: OnResult | None = None
    ) -> BatchResult:
        """Answer calls that this call makes itself (nested calls), in its own run: one result each, in order.

        They borrow what this call holds: its permits, one nested call at a time for each permit, and the resources
        that it has declared; further ones take what is free. What waits in a circle is refused, `would_deadlock`.
        When this call ends or is told to stop, those that are left are cancelled.

        Args:
            calls: as `Run.execute` takes them.
            format: the form they have; None: found out.
            on_result: sees each result as it is sealed.

        Raises:
            InputError: it is no batch of calls in any known form; nothing was run.
            asyncio.CancelledError: this call was told to stop; the nested ones were sealed first.
        """
        return await self._execute(calls, format=format, on_result=on_result)

    @property
    def cancelled(self) -> bool:
        """The call was cancelled or its time is over: a sync handler should look at this and return."""
        return self._job.why is not None

    def __repr__(self) -> str:
        return f"Context(run_id={self.run_id!r}, index={self.index})"


Owner = tuple["Work", int]
"""A call's batch and its index: what the gate knows it by."""

Slot = Entry[Owner]


class Loop(Protocol):
    """What a batch needs of the shell that runs it, without naming the shell.

    Attributes:
        core: what it shares with the other loops of its tower.
    """

    core: Core

    def end_soon(self, work: Work, reason: str) -> None:
        """Cancel a whole batch; from any loop or thread."""
        ...  # pragma: no cover - a protocol has no body

    def post(self, entry: Slot) -> None:
        """Take a decision that was made on another loop."""
        ...  # pragma: no cover - a protocol has no body


LoopT = TypeVar("LoopT", bound=Loop)


class Want(Wants[Lot[Owner]]):
    """What a call of one tool in one run wants.

    Attributes:
        kind: how the tool's calls stand to others.
        accesses: what its holds were made of.
        shared: every call of the tool in this run wants exactly this.
        of: the tool.
    """

    __slots__ = ("accesses", "kind", "of", "shared")

    accesses: tuple[Access, ...]
    kind: str
    of: Tool
    shared: bool

    def with_holds(self, accesses: tuple[Access, ...], holds: tuple[Hold, ...], labels: Mapping[str, str]) -> Want:
        """The same permits with other holds."""
        other = Want.__new__(Want)
        other.run = self.run
        other.tool = self.tool
        other.permits = self.permits
        other.priority = self.priority
        other.wait = self.wait
        other.max_wait = self.max_wait
        other.bounds = self.bounds
        other.pools = self.pools
        other.pool_states = self.pool_states
        other.weight = self.weight
        other.hopeless = self.hopeless
        other.loan = self.loan
        if other.loan is not None:
            other.borrowed = self.borrowed
        other.kind = self.kind
        other.of = self.of
        other.shared = False
        other.accesses = accesses
        other.holds = holds
        other.labels = labels
        return other


class Job:
    """A granted call, from its start to its seal or, as an orphan, to its end.

    Few live at once, and most never need more than the first six fields, so the others are defaults of the class.
    """

    started = NOT_STARTED
    sealed = False
    ended = False
    orphan = 0
    nested: dict[Work, None] | None = None
    # The task is the runner's; this room only keeps it.
    task: object = None
    ticket: Ticket | None = None
    why: Code | None = None
    reason = ""

    def __init__(self, work: Work, index: int, entry: Slot, tool: Tool, granted: float, due: float) -> None:
        self.work = work
        self.index = index
        self.entry = entry
        self.tool = tool
        self.granted = granted
        self.due = due


CALLER: Final[contextvars.ContextVar[Job | None]] = contextvars.ContextVar("towerman_caller", default=None)
"""The call whose handler this code runs in, on whichever task or thread."""


class RunState:
    """A run as the runner knows it.

    Attributes:
        number: of the run within its tower.
        run_id: its public id.
        flow: its calls in the gate.
        limit: the instant of its deadline, or infinity.
        may_call: is a tool allowed? None: all are.
        closed: why nothing new is taken, or None.
        batches: how many came.
        works: its batches that are not done.
        gone: it was closed while something of it was still at work; its flow ends with its last batch.
        bases: by tool name, what each call of that tool wants beside its own resources.
        execute: `Run.execute` of this run.
    """

    __slots__ = (
        "bases",
        "batches",
        "closed",
        "deps",
        "execute",
        "fail_fast",
        "flow",
        "gone",
        "limit",
        "may_call",
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
        tenant: str | None = None,
        deps: object = None,
        priority: int = 0,
        limit: float,
        fail_fast: bool = False,
        may_call: Callable[[str], bool] | None = None,
    ) -> None:
        self.number = number
        self.run_id = run_id
        self.flow = flow
        self.tenant = tenant
        self.deps = deps
        self.priority = priority
        self.limit = limit
        self.fail_fast = fail_fast
        self.may_call = may_call
        self.closed: str | None = None
        self.gone = False
        self.batches = 0
        self.works: dict[Work, None] = {}
        self.bases: dict[str, Want] = {}

    execute: Callable[..., Coroutine[None, None, BatchResult]]

    def renew(self, flow: Flow[Owner]) -> None:
        """In another process: nothing of it is at work here."""
        self.flow = flow
        self.works = {}
        self.bases = {}


class Work:
    """One batch on its way.

    Attributes:
        left: calls without a result.
        results, sealed_at, tools, keywords, wants: columns, one place for each call.
        jobs: granted calls whose results are open, by index.
        waited_for: by index, the calls of the batch that it had to wait for.
        reasons: by index, why a call was cancelled by itself.
        ended: by index, when an orphan's work ended.
        closing: (code, outcome, reason) once the batch is being ended early.
        error: raised to the caller after sealing.
        given_up: a call was cancelled that may still stand in the gate.
        parent: the call that waits for it; None for a batch that no call has made.
        waiters: the runner's futures, woken when all is sealed.
    """

    __slots__ = (
        "batch",
        "calls",
        "closing",
        "context",
        "ended",
        "error",
        "given_up",
        "jobs",
        "keywords",
        "left",
        "notice",
        "number",
        "on_result",
        "parent",
        "plan",
        "reasons",
        "results",
        "run",
        "sealed_at",
        "shell",
        "started_at",
        "tools",
        "waited_for",
        "waiters",
        "wants",
    )

    def __init__(self, run: RunState, shell: Loop, batch: Batch, on_result: OnResult | None, now: float) -> None:
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
        self.plan = NO_PLAN
        self.waited_for: dict[int, tuple[str, ...]] = {}
        self.reasons: dict[int, str] = {}
        self.ended: dict[int, float] = {}
        self.notice: str | None = None
        self.closing: tuple[Code, Outcome, str] | None = None
        self.error: BaseException | None = None
        self.given_up = False
        self.parent: Job | None = None
        self.waiters: list[Callable[[], None]] = []

    def owner(self, index: int) -> Owner:
        """What the gate knows a call by."""
        return (self, index)


class BatchResult(Sequence[Result]):
    """The answers to one batch: a sequence of `Result` in emitted order. Empty, and false, when there were no calls.

    Attributes:
        notice: a sentence for the model about the batch as a whole ("Ran 25 of 200 calls ..."), or None. The last
            result says it too, so that it reaches the model with the messages.
    """

    __slots__ = ("_batch", "_results", "_work", "notice")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._batch = work.batch
        self._results = tuple(result for result in work.results if result is not None)
        self.notice = work.notice

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Result, ...]: ...
    def __getitem__(self, index: int | slice) -> Result | tuple[Result, ...]:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results)

    @property
    def ok(self) -> bool:
        """Every call answered."""
        return all(result.ok for result in self._results)

    def messages(self, format: str | None = None) -> list[dict[str, object]]:
        """The results as the provider takes them, without the assistant message.

        Args:
            format: "openai", "anthropic" or "towerman"; None: the form that the batch came in.

        Returns:
            One message a call for OpenAI, one message for all of them for Anthropic, one record a call for "towerman".

        Raises:
            PolicyError: no such format.
        """
        from towerman import adapters

        return adapters.encode(self._batch, self._results, format)

    def turn(self, format: str | None = None) -> list[dict[str, object]]:
        """The assistant message and its results, ready to be appended to the conversation.

        Ids agree between the two even where the provider's were missing or repeated.

        Args:
            format: "openai", "anthropic" or "towerman"; None: the form that the batch came in.

        Returns:
            Messages as plain data. No calls: what the assistant message alone comes to.

        Raises:
            PolicyError: no such format.
        """
        from towerman import adapters

        return adapters.turn(self._batch, self._results, format)

    def spans(self) -> list[Span]:
        """What each call did when, in seconds since the batch came in."""
        work = self._work
        spans = []
        for result in self._results:
            sealed = work.sealed_at[result.index] - work.started_at
            started = sealed - result.ran if result.started else None
            queued = (
                (started if started is not None else sealed) - result.waited
                if started is not None or result.waited
                else None
            )
            ended = work.ended.get(result.index)
            spans.append(
                Span(
                    index=result.index,
                    tool=result.tool if work.tools[result.index] is not None else UNKNOWN_TOOL,
                    outcome=result.outcome,
                    code=result.code,
                    queued=queued,
                    started=started,
                    sealed=sealed,
                    ended=ended - work.started_at if ended is not None else None,
                    waited_for=result.waited_for,
                    still_running=result.still_running and ended is None,
                )
            )
        return spans

    def timeline(self, width: int = 100) -> str:
        """A drawing of the batch for people: one line a call, waiting and running apart.

        Args:
            width: columns.

        Raises:
            PolicyError: a width that is no whole number above 0.
        """
        from towerman import timeline

        return timeline.draw(self.spans(), width=min(whole("width", width), 10_000))

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for result in self._results:
            counts[result.outcome] = counts.get(result.outcome, 0) + 1
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        return f"BatchResult({len(self._results)} calls{': ' + told if told else ''})"


class Core:
    """What all loops of one tower share: lock, gate, policy, tools, threads, counters.

    Args:
        policy: the tower's own options.
        gate: the admission of this process.
        clock: where time is read.

    Attributes:
        emit: takes an Event for the observers; None while there are none.
        crowded: more than one loop uses the tower.
    """

    def __init__(self, policy: TowerPolicy, gate: Gate[Owner], clock: Clock) -> None:
        self.policy = policy
        self.gate = gate
        self.now = clock.now
        self.lock = threading.Lock()
        self.emit: Callable[[Event], None] | None = None
        self.workers: Workers[Job] = Workers("towerman-worker")
        self.made_processes: Processes | None = None
        self.tools: dict[str, Tool] = {}
        self.any_ordered = False
        self.any_exclusive = False
        self.any_subtree = False
        self.crowded = False
        self.answered = 0
        self.outcomes: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.late_results = 0
        self.orphans = 0
        self.orphans_released = 0
        self.strays: deque[Job | Work] = deque()
        self.hinted: set[str] = set()  # tools whose missing declaration was told
        self.means: dict[str, tuple[int, float]] = {}  # by tool name: answers so far, and their mean seconds

    @property
    def processes(self) -> Processes:
        """Worker processes; what they need is imported with the first of them."""
        made = self.made_processes
        if made is None:
            from towerman.processes import Processes

            with self.lock:
                made = self.made_processes = self.made_processes or Processes()
        return made

    def reset(self, gate: Gate[Owner]) -> None:
        """In another process: nothing is at work here, and whoever held the lock is not here."""
        self.gate = gate
        self.lock = threading.Lock()
        self.workers = Workers("towerman-worker")
        self.made_processes = None
        self.strays.clear()
        self.orphans = 0
        self.crowded = False

    def base(self, run: RunState, tool: Tool) -> Want:
        """What each call of this tool in this run wants, beside resources that depend on its arguments."""
        base = run.bases.get(tool.name)
        if base is not None:
            return base
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
        base = Want(
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
        base.kind = tool.kind
        base.of = tool
        base.accesses = ()
        base.shared = tool.rule is None
        self.gate.ledger.look_up(base)
        run.bases[tool.name] = base
        return base

    def want(self, base: Want, run: RunState, accesses: tuple[Access, ...]) -> Want:
        """The base with the holds that these accesses need."""
        return base.with_holds(accesses, *self.holds(run.number, base.kind, accesses))

    def nested_want(self, want: Want, parent: Job) -> Want:
        """The same for a nested call, which has wants of its own, since each borrows for itself."""
        nested = want.with_holds(want.accesses, want.holds, want.labels)
        nested.pools = (*want.pools[:0], *want.pools)  # another tuple: the gate takes equal ones for one tool's calls
        nested.loan = parent.entry.loan
        nested.borrowed = []
        return nested

    def holds(self, run: int, kind: str, accesses: tuple[Access, ...]) -> tuple[tuple[Hold, ...], Mapping[str, str]]:
        """Flat locks of a call: its resources, and the roots at which tools without resources exclude others."""
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
            self.put_tool(tool)

    def put_tool(self, tool: Tool) -> None:
        """The same, under the lock."""
        self.tools[tool.name] = tool
        ordered = self.any_ordered or tool.kind == "ordered"
        exclusive = self.any_exclusive or tool.kind == "exclusive"
        subtree = self.any_subtree or (tool.rule is not None and tool.rule.may_subtree)
        if (ordered, exclusive, subtree) != (self.any_ordered, self.any_exclusive, self.any_subtree):
            self.any_ordered, self.any_exclusive, self.any_subtree = ordered, exclusive, subtree
            self.gate.expand(self._widen)

    def widen(self, run: RunState) -> None:
        """The same for what is prepared and not yet offered."""
        for name, base in list(run.bases.items()):
            wider = self._widen(base)
            if wider is not base:
                run.bases[name] = wider
        for work in run.works:
            work.wants = [want and self._widen(want) for want in work.wants]

    def _widen(self, want: Wants[Lot[Owner]]) -> Want:
        assert isinstance(want, Want)
        holds, labels = self.holds(want.run, want.kind, want.accesses)
        if holds == want.holds:
            return want
        wider = want.with_holds(want.accesses, holds, labels)
        wider.shared = want.shared
        return wider

    def learn(self, tool: str, ran: float) -> None:
        """A call of this tool has answered after so many seconds."""
        count, mean = self.means.get(tool, (0, 0.0))
        count += 1
        self.means[tool] = count, mean + (ran - mean) / count

    def estimates(self, tools: Sequence[Tool | None]) -> list[float] | None:
        """How long each call may take: its tool's mean so far, or the mean of the others. None: nothing is known."""
        means = self.means
        known = [means[tool.name][1] for tool in tools if tool is not None and tool.name in means]
        if not known:
            return None
        usual = sum(known) / len(known)
        return [usual if tool is None or tool.name not in means else means[tool.name][1] for tool in tools]

    def count(self, outcome: Outcome, code: Code) -> None:
        """One more sealed result without an ordinary answer."""
        with self.lock:  # several loops count
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            self.codes[code] = self.codes.get(code, 0) + 1


def pool_key(name: str, scope: str, run: RunState) -> str:
    """The ledger's key of a named pool, for a run."""
    if scope == "process":
        return f"pool:{name}"
    if scope == "run":
        return f"pool:{name}@run:{run.number}"
    return f"pool:{name}@tenant:{run.tenant or ''}"
