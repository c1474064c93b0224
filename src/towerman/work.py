"""What the runner keeps: a run, a batch on its way, a granted call, and what a batch came to.

Theory. A batch is kept as columns (tools, keywords, wants, results) so that a call that waits costs a few pointers.
Only a granted call has an object of its own, a `Job`, and few of those live at once.

House rules. State and look-ups only: nothing here starts, seals or decides.

Not here: what all loops share (core), running (runner), wording of results (sealing).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, cast, overload

from towerman.budgets import Account, Shares
from towerman.calls import Access, Applied, Arguments, Batch, Call, Hold, Outcome, Result
from towerman.errors import Code, InputError, PolicyError
from towerman.gate import Entry, Flow, Lot
from towerman.ledger import Ledger, Wants
from towerman.plan import Bound, Group, Plan, Reference, UnresolvedReference
from towerman.policy import Budget, OnResult, whole, word
from towerman.repeats import Repeats
from towerman.threads import Ticket
from towerman.tokens import Counter
from towerman.tools import Tool
from towerman.trace import UNKNOWN_TOOL, Span

if TYPE_CHECKING:
    from concurrent.futures import Future

    from towerman.approvals import Approval, ApprovalRequest, ApprovalState, Approver, Open
    from towerman.bounds import Encoded
    from towerman.engines.words import Grant
    from towerman.placeholders import Others
    from towerman.records import Answer, Deferred, Permission

DepsT = TypeVar("DepsT")

Pending = Literal["raise", "refuse"]
"""What messages do where calls wait for a person."""

NOT_STARTED: Final = -1.0
"""A job's start before its first line is reached."""

NO_PLAN: Final = Plan(0)
"""The plan of a batch that is not prepared."""


class Context(Generic[DepsT]):
    """What a handler may know of its call: annotate a parameter with this type to get it.

    Attributes:
        run_id: the run's id.
        call_id: the provider's id of the call; may be empty.
        index: the call's place in its batch.
        tenant: whom the run belongs to, or None.
        deps: what `Tower.run(deps=...)` was given.
        attempt: which start of this call it is, from 1.
        idempotency_key: the call's key, the same in each attempt: the one that it came with; else one that is made of
            its identity (its run, response and place), the same each time that response is handed in; else, for a call
            that nobody can find again, one that is new each time it is handed in. None only for a call that came
            without a key and has no effect.
        deadline: the instant, on the tower's monotonic clock in seconds (`time.monotonic`), at which the call's time
            is over.
        fence: with an engine, a number that is greater than that of every earlier grant: hand it to a resource that
            can refuse smaller ones, so that a call whose lease was lost without its knowing does no harm. None for a
            call that has nothing of the engine.
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
        self.attempt = job.attempt
        self.idempotency_key = call.idempotency_key or None
        self.deadline = job.due

    async def execute(
        self,
        calls: object,
        *,
        format: str | None = None,
        batch_id: str | None = None,
        on_result: OnResult | None = None,
    ) -> BatchResult:
        """Answer calls that this call makes itself (nested calls), in its own run: one result each, in order.

        They borrow what this call holds: its permits, one nested call at a time for each permit, and the resources
        that it has declared; further ones take what is free. What waits in a circle is refused, `would_deadlock`.
        When this call ends or is told to stop, those that are left are cancelled.

        Args:
            calls: as `Run.execute` takes them.
            format: the form they have; None: found out.
            batch_id: as `Run.execute` takes it.
            on_result: sees each result as it is sealed.

        Raises:
            InputError: it is no batch of calls in any known form; nothing was run.
            asyncio.CancelledError: this call was told to stop; the nested ones were sealed first.
        """
        return await self._execute(calls, format=format, batch_id=batch_id, on_result=on_result)

    def charge(self, **units: float) -> None:
        """Tell what this call has spent: `ctx.charge(tokens=812, cost=0.004)`. May be called from any thread.

        It counts at once in every budget that this call counts in: of its batch, its run, its tenant, the process. What
        a call charges of a unit, all told, takes the place of what its tool's `spends` says of that unit; until its
        work has ended the larger of the two counts. A charge is never refused: it may bring a budget past its limit,
        and then nothing more starts.

        Args:
            units: amounts by unit, 0 or more.

        Raises:
            PolicyError: a name of no unit, or an amount that is none. Nothing was charged.
        """
        job = self._job
        job.work.shell.core.charge(job.work.run, units, job.work, job.index)

    @property
    def remaining(self) -> dict[str, float]:
        """What is left of the budgets that this call counts in, by limited unit, and of the run's time as `seconds`:
        the least of them, never below 0. What other calls have reserved is not left. Empty without a budget.
        """
        work = self._job.work
        return work.shell.core.remaining(work.run, work)

    @property
    def fence(self) -> int | None:
        """Greater than that of every earlier grant of the engine; None for a call that has nothing of it."""
        there = self._job.entry.there
        return None if there is None else there.fence

    @property
    def cancelled(self) -> bool:
        """The call was cancelled or its time is over: a sync handler should look at this and return."""
        return self._job.why is not None

    def __repr__(self) -> str:
        return f"Context(run_id={self.run_id!r}, index={self.index})"


Owner = tuple["Work", int]
"""A call's batch and its index: what the gate knows it by."""

Slot = Entry[Owner]


class Shared(Protocol):
    """What the loops of one tower share, as far as a batch knows it (core)."""

    @property
    def generation(self) -> int:
        """How often options have changed."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Guards what loops share."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def now(self) -> Callable[[], float]:
        """Reads the tower's clock."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def secret(self) -> bytes | None:
        """What signatures rest on."""
        ...  # pragma: no cover - a protocol has no body

    def wall(self) -> float:
        """Unix time in seconds."""
        ...  # pragma: no cover - a protocol has no body

    def charge(self, run: RunState, units: Mapping[str, object], work: Work | None = None, index: int = 0) -> None:
        """So much was spent."""
        ...  # pragma: no cover - a protocol has no body

    def remaining(self, run: RunState, work: Work | None = None) -> dict[str, float]:
        """What is left."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def counter(self) -> Counter:
        """Counts tokens of contents."""
        ...  # pragma: no cover - a protocol has no body


class Loop(Protocol):
    """What a batch needs of the shell that runs it, without naming the shell."""

    @property
    def core(self) -> Shared:
        """What it shares with the other loops of its tower."""
        ...  # pragma: no cover - a protocol has no body

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
        far: what of it an engine is asked for, and by which options; None until it is known.
    """

    __slots__ = ("accesses", "far", "kind", "of", "shared")

    accesses: tuple[Access, ...]
    kind: str
    of: Tool
    shared: bool
    far: tuple[int, object] | None

    def with_limits(self, permits: tuple[tuple[str, int], ...], ledger: Ledger[Lot[Owner]], base: Want) -> Want:
        """The same with these permits more, and with the rates and breakers of another one of its tool and run."""
        other = self.with_holds(self.accesses, self.holds, self.labels)
        other.shared = self.shared
        other.permits = (*self.permits, *permits)
        other.pools = (*self.pools, *((ledger.pools[key], units) for key, units in permits))
        other.pool_states = tuple(pool for pool, _ in other.pools)
        other.rates, other.breakers = base.rates, base.breakers
        other.meters, other.fuses, other.marked = base.meters, base.fuses, base.marked
        return other

    def likeness(self, call: Call, keywords: Mapping[str, object]) -> Hashable | None:
        """What is equal for calls that one run could answer; None: this one stands for itself."""
        return self.of.likeness(keywords, self.accesses, self.holds, call.idempotency_key) if self.of.joins else None

    def patient(self, seconds: float) -> Want:
        """The same, waiting when busy, at most so long: of a call that a worker has taken from the queue."""
        other = self.with_holds(self.accesses, self.holds, self.labels)
        other.pools = (*self.pools[:0], *self.pools)  # another tuple: the gate takes equal ones for one tool's calls
        other.wait = True
        other.max_wait = seconds
        return other

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
        other.loan = self.loan
        if other.loan is not None:
            other.borrowed = self.borrowed
        other.kind = self.kind
        other.of = self.of
        other.shared = False
        other.far = None
        other.accesses = accesses
        other.holds = holds
        other.labels = labels
        other.rates = self.rates
        other.breakers = self.breakers
        other.meters = self.meters
        other.fuses = self.fuses
        other.marked = self.marked
        return other


class After:
    """A handler has returned a value that does not fit; a thread is at it.

    Args:
        value: what it returned.
        encoded: what is there of it by now.
    """

    __slots__ = ("encoded", "value")

    def __init__(self, value: object, encoded: Encoded) -> None:
        self.value = value
        self.encoded = encoded


class Filed:
    """What the journal knows a call by, and what it was told of it.

    Attributes:
        key: where the call's identity is stored; None: it has none.
        digest: of its arguments.
        token: of the start that its intent was written for.
        begun: the intent is on the disk.
        claim: the worker's claim under which it runs, or None.
        place: batch and index under which it is written down; None: its own.
        told: its outcome was handed to the journal, or came from there.
        before: it was begun before, and nobody knows what came of that; repeating it does no harm.
        riders: the calls whose intents were written with its own, since they were merged into its run.
    """

    __slots__ = ("before", "begun", "claim", "digest", "key", "place", "riders", "told", "token")

    def __init__(
        self,
        key: bytes | None,
        digest: bytes | None,
        claim: bytes | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        self.claim = claim
        self.place = place
        self.key = key
        self.digest = digest
        self.token = b""
        self.begun = False
        self.told = False
        self.before = False
        self.riders: tuple[Filed, ...] = ()


class Handing:
    """A call that is being put into the durable queue.

    Attributes:
        work, index: which call it is.
        code: what it is answered when it is there: `deferred`, or `held_behind`.
        why: what stood in its way, in a sentence.
        waited, waited_for: how long it has waited, and for what.
        due: when the journal has taken too long.
        handle: its name there, if it is put there now.
        future: the journal's answer; None while nothing is asked.
        stop: why it was cancelled meanwhile, or None.
    """

    __slots__ = ("code", "due", "future", "handle", "index", "stop", "waited", "waited_for", "why", "work")

    def __init__(
        self, work: Work, index: int, code: Code, why: str, waited: float, waited_for: tuple[str, ...], due: float
    ) -> None:
        self.work = work
        self.index = index
        self.code = code
        self.why = why
        self.waited = waited
        self.waited_for = waited_for
        self.due = due
        self.handle = ""
        self.future: Future[Deferred] | None = None
        self.stop: str | None = None


class Deferral:
    """What of a batch goes into the durable queue, or comes from there.

    Attributes:
        every: every call is to go there.
        claims: by index, calls that a worker has taken from there; the journal knows them by these.
        rows: by index, these calls as they stand there.
        patience: seconds for which such a call waits in the gate.
        handles: by index, calls that are in the queue, by their names there.
        behind: by node of the plan (calls, and from its size on junctions), the calls in the queue that come before.
        heads: by index of a call in the queue, another one that stands for the same chain.
        gates: by index, the junctions that a call waits for directly; None: not looked up.
        found: by index, calls that were put there before: name, state, and the answer that there is.
        handing: by index, calls that are being put there.
    """

    __slots__ = ("behind", "claims", "every", "found", "gates", "handing", "handles", "heads", "patience", "rows")

    def __init__(
        self,
        *,
        every: bool = False,
        claims: Mapping[int, Filed] | None = None,
        rows: Mapping[int, Deferred] | None = None,
        patience: float = 0.0,
    ) -> None:
        self.every = every
        self.claims = claims or {}
        self.rows = rows or {}
        self.patience = patience
        self.handles: dict[int, str] = {}
        self.behind: dict[int, set[int]] = {}
        self.heads: dict[int, int] = {}
        self.gates: dict[int, list[int]] | None = None
        self.found: dict[int, tuple[Deferred, Answer | None]] = {}
        self.handing: dict[int, Handing] = {}

    def head(self, index: int) -> int:
        """The call that stands for the chain of one in the queue."""
        heads = self.heads
        while (other := heads.get(index, index)) != index:
            heads[index] = heads.get(other, other)
            index = other
        return index


class Join:
    """A call that waits for the answer of the same call, which is at work elsewhere. It holds nothing.

    Attributes:
        work, index: which call it is.
        since: when it began to wait.
        due: when it waits no more.
        ready: the plan would let it start.
        stop: ends the waiting for that.
        record: of the batch that both belong to, where it is gone on with twice; None: the journal knows of the other.
    """

    __slots__ = ("due", "index", "ready", "record", "since", "stop", "work")

    def __init__(self, work: Work, index: int, since: float, due: float, record: Approval | None = None) -> None:
        self.record = record
        self.work = work
        self.index = index
        self.since = since
        self.due = due
        self.ready = False
        self.stop: Callable[[], object] = _nothing


def _nothing() -> None:
    return


class Job:
    """A granted call, from its start to its seal or, as an orphan, to its end.

    Few live at once, and most never need more than the first six fields, so the others are defaults of the class.
    """

    started = NOT_STARTED
    sealed = False
    ended = False
    orphan = 0
    after: After | None = None
    nested: dict[Work, None] | None = None
    # The task is the runner's; this room only keeps it.
    task: object = None
    ticket: Ticket | None = None
    why: Code | None = None
    reason = ""
    # Of calls whose tool has `retry`.
    attempt = 1
    again: Again | None = None
    keywords: dict[str, object] | None = None
    note = ""
    # While the journal is told of it: that it is to start, or what it came to.
    intending = False
    outcome: Result | None = None

    def __init__(self, work: Work, index: int, entry: Slot, tool: Tool, granted: float, due: float) -> None:
        self.work = work
        self.index = index
        self.entry = entry
        self.tool = tool
        self.granted = granted
        self.due = due


class Failed(NamedTuple):
    """What an attempt came to that has no ordinary answer."""

    outcome: Outcome
    code: Code
    message: str
    applied: Applied
    error: BaseException | None
    retry_after: float | None

    def __repr__(self) -> str:
        return f"Failed({self.outcome!r}, {self.code!r}, applied={self.applied!r})"


class Again:
    """A call that is tried again: what its attempts have come to so far.

    Attributes:
        work, index: whose it is.
        attempts: so many were started.
        failed: what the last of them came to.
        job: the last of them.
        applied: whether the effect took place in one of them.
        waited, ran: seconds in the queue and at work, all of them together.
        waited_for: what blocked them, first to last.
        stretches: for each of them when it was handed in, started and ended; of the last one perhaps no start.
        due: the instant of the next attempt while the call rests.
        resting: it waits for that instant, and holds nothing.
    """

    __slots__ = (
        "applied",
        "attempts",
        "due",
        "failed",
        "index",
        "job",
        "ran",
        "resting",
        "stretches",
        "waited",
        "waited_for",
        "work",
    )

    failed: Failed
    job: Job
    due: float

    def __init__(self, work: Work, index: int) -> None:
        self.work = work
        self.index = index
        self.attempts = 0
        self.applied: Applied = "no"
        self.waited = self.ran = 0.0
        self.waited_for: tuple[str, ...] = ()
        self.stretches: list[tuple[float, float | None, float]] = []
        self.resting = False

    def __lt__(self, other: Again) -> bool:
        """Who is due first is tried first; it does not matter who of two that are due at once."""
        return self.due < other.due

    def add(self, job: Job, waited: float, ran: float, now: float) -> None:
        """One more attempt has ended."""
        entry = job.entry
        self.job = job
        job.keywords = None
        self.attempts = job.attempt
        self.waited += waited
        self.ran += ran
        self.waited_for = tuple(dict.fromkeys((*self.waited_for, *entry.blocked_by)))
        self.stretches.append((now - ran - waited, now - ran, now))

    def forget(self) -> None:
        """The call is sealed: what was raised, and the frames that hang on it, need not be kept."""
        del self.job, self.failed


def callers(work: Work) -> list[Job]:
    """The calls that wait for a batch: the one that made it, the one that made that one's batch, and so on."""
    found = []
    job = work.parent
    while job is not None:
        found.append(job)
        job = job.work.parent
    return found


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
        permission: the patterns that this goes by, or None.
        until: Unix time of its deadline, once it was written down.
        approver: asks a person; None: nobody is there.
        closed: why nothing new is taken, or None.
        batches: how many came.
        works: its batches that are not done.
        own_window: it came with a max_concurrency of its own.
        gone: it was closed while something of it was still at work; its flow ends with its last batch.
        bases: by tool name, what each call of that tool wants beside its own resources.
        budget: the one that it came with, or None.
        accounts: those in which it counts, the nearest first.
        repeats: what it has repeated; None where nobody has asked.
        execute: `Run.execute` of this run.
    """

    __slots__ = (
        "approver",
        "accounts",
        "bases",
        "batches",
        "budget",
        "closed",
        "deps",
        "execute",
        "fail_fast",
        "flow",
        "gone",
        "limit",
        "may_call",
        "permission",
        "number",
        "own_window",
        "priority",
        "repeats",
        "run_id",
        "tenant",
        "until",
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
        permission: Permission | None = None,
        approver: Approver | None = None,
        own_window: bool = False,
        budget: Budget | None = None,
    ) -> None:
        self.number = number
        self.budget = budget
        self.accounts: tuple[Account, ...] = ()
        self.repeats: Repeats | None = None
        self.own_window = own_window
        self.run_id = run_id
        self.flow = flow
        self.tenant = tenant
        self.deps = deps
        self.priority = priority
        self.limit = limit
        self.fail_fast = fail_fast
        self.may_call = may_call
        self.permission = permission
        self.until: float | None = None
        self.approver = approver
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
        generation: of the core's options that its wants were made of.
        results, sealed_at, tools, keywords, wants: columns, one place for each call.
        calls: the calls; of a plan, with results filled in as soon as they are there.
        bound: of a plan, the arguments of each call with their references; empty where there are none.
        open: of a plan, by index the calls whose references are not filled in yet, and what they may touch (None:
            anything); None where no call refers to another one.
        outputs: of a plan that says what it comes to, and refers to results there.
        referred: of a plan, the calls to whose results something refers.
        filled: of a plan, the calls in whose arguments nothing is to be read any more.
        written: by index, of calls into whose arguments results were filled, those that were handed in; None where
            there are none.
        values: of a plan that is gone on with, by index, what calls came to that have run before.
        jobs: granted calls whose results are open, by index.
        waited_for: by index, the calls of the batch that it had to wait for.
        groups: by index, the calls that one run may answer together; None where there are none.
        gated: by index, the approvals of calls that need one, and the records of those that came back pending; None
            where there are none.
        asking: by index, the tasks of approvers that are asked now.
        resumed: of a batch that is gone on with, by index what was written down of calls that were open then.
        key: of the digests in what was written down then.
        origin: the id of the run that it was begun in; empty for a batch that begins here.
        decided: of a batch that is gone on with, what was decided meanwhile and is not told yet.
        closed: by name, what became of approvals of this batch that are not open any more.
        again: by index, the calls that are tried more than once; None where there are none.
        reasons: by index, why a call was cancelled by itself.
        ended: by index, when an orphan's work ended.
        filed: by index, what the journal knows calls by; None where there is no journal.
        joins: by index, calls that wait for the same call elsewhere; None where no call can or does.
        keeps: it is written down whole, so that it can be gone on with by name, though it is no plan.
        batch_key: where its identity is stored, if it is written down so; None: it is not.
        attempt: names what this process has of it in the journal until it has ended; empty: nothing.
        deferral: what of it goes into the durable queue, or comes from there; None where nothing does.
        others: the calls beside which each is looked through for placeholders; None: they are not.
        warned: calls with placeholders that run all the same.
        closing: (code, outcome, reason) once the batch is being ended early.
        error: raised to the caller after sealing.
        given_up: a call was cancelled that may still stand in the gate.
        parent: the call that waits for it; None for a batch that no call has made.
        there: by index, what calls have reserved of budgets at the engine; None for nothing.
        paused: by tool, what is told of a pause that its service has asked for; None for none.
        shares: what its calls have of budgets; None where no budget counts them.
        exhausted: a budget lets no more calls of its run start.
        salt: what the keys are made of that its handlers are given where a call has no identity; None until one is.
        tokens: of its contents, in order, once somebody has asked.
        waiters: the runner's futures, woken when all is sealed.
    """

    __slots__ = (
        "again",
        "asking",
        "attempt",
        "batch",
        "batch_key",
        "bound",
        "calls",
        "closed",
        "closing",
        "context",
        "decided",
        "deferral",
        "ended",
        "error",
        "exhausted",
        "filed",
        "filled",
        "gated",
        "generation",
        "given_up",
        "groups",
        "jobs",
        "joins",
        "keeps",
        "key",
        "keywords",
        "left",
        "notice",
        "number",
        "on_result",
        "open",
        "origin",
        "others",
        "outputs",
        "parent",
        "paused",
        "there",
        "plan",
        "reasons",
        "referred",
        "results",
        "resumed",
        "run",
        "salt",
        "sealed_at",
        "shares",
        "shell",
        "started_at",
        "tokens",
        "tools",
        "values",
        "waited_for",
        "waiters",
        "wants",
        "warned",
        "written",
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
        self.bound: Sequence[Bound | None] = ()
        self.open: dict[int, tuple[Access, ...] | None] | None = None
        self.filled: set[int] = set()
        self.written: dict[int, Arguments | str] | None = None
        self.values: dict[int, object] | None = None
        self.outputs: Bound | None = None
        self.referred: frozenset[int] = frozenset()
        self.waited_for: dict[int, tuple[str, ...]] = {}
        self.groups: dict[int, Group] | None = None
        self.gated: dict[int, Approval] | None = None
        self.asking: dict[int, object] | None = None
        self.resumed: Mapping[int, Open] | None = None
        self.key = b""
        self.origin = ""
        self.decided: list[tuple[int, Approval, str]] = []
        self.closed: dict[str, ApprovalState] = {}
        self.again: dict[int, Again] | None = None
        self.reasons: dict[int, str] = {}
        self.ended: dict[int, float] = {}
        self.filed: dict[int, Filed] | None = None
        self.joins: dict[int, Join] | None = None
        self.keeps = False
        self.batch_key: bytes | None = None
        self.attempt = b""
        self.deferral: Deferral | None = None
        self.others: Others | None = None
        self.warned = 0
        self.notice: str | None = None
        self.paused: dict[str, str] | None = None
        self.there: dict[int, Grant] | None = None
        self.closing: tuple[Code, Outcome, str] | None = None
        self.error: BaseException | None = None
        self.given_up = False
        self.parent: Job | None = None
        self.shares: Shares | None = None
        self.exhausted = False
        self.salt: bytes | None = None
        self.tokens: list[int] | None = None
        self.generation = shell.core.generation
        self.waiters: list[Callable[[], None]] = []

    def count_tokens(self) -> list[int]:
        """The tokens of its contents, counted once; of a batch that is done."""
        found = self.tokens
        if found is None:
            counter = self.shell.core.counter
            found = self.tokens = [0 if one is None else counter(one.content) for one in self.results]
        return found

    def put_call(self, index: int, call: Call) -> None:
        """The arguments of a call are known now, or frozen: from here on this is what it is."""
        if not isinstance(self.calls, list):
            self.calls = list(self.calls)
        self.calls[index] = call

    def remember_written(self, index: int, arguments: Arguments | str) -> None:
        """What a call was handed in with is to be known when results are filled in: the journal knows it by that."""
        if self.written is None:
            self.written = {}
        self.written[index] = arguments

    def as_written(self, index: int) -> Arguments | str:
        """The arguments that a call is known by: without the results that were filled in."""
        if self.written is not None and index in self.written:
            return self.written[index]
        return self.calls[index].arguments

    def value_of(self, index: int) -> object:
        """What a call came to: what its handler gave, or what was written down of that.

        Raises:
            UnresolvedReference: only a part of it was.
        """
        if self.values is not None and index in self.values:
            return self.values[index]
        result = self.results[index]
        if result is not None and result.replayed:
            raise UnresolvedReference(Reference(index), "what it came to was not kept whole")
        return None if result is None else result.value

    def owner(self, index: int) -> Owner:
        """What the gate knows a call by."""
        return (self, index)

    def place(self, index: int, result: Result) -> None:
        """Before anything starts: a call has its result already."""
        self.results[index] = result
        self.sealed_at[index] = self.started_at
        self.left -= 1


class BatchResult(Sequence[Result]):
    """The answers to one batch: a sequence of `Result` in emitted order. Empty, and false, when there were no calls.

    Attributes:
        notice: a sentence for the model about the batch as a whole ("Ran 25 of 200 calls ...", "The service behind tool
            search asked for a pause of 5 s ..."), or None. The results that it is about, or the last of them, say why,
            too, so that it reaches the model with the messages. With an engine that was not reached, also a sentence
            for the host: calls ran without it (`on_unavailable`).
        exhausted: a budget that the run counts in is used up, so that none of its calls would start any more: stop the
            loop. Also where a budget was too little for each call of this batch by itself.
    """

    __slots__ = ("_batch", "_results", "_work", "exhausted", "notice")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._batch = work.batch
        self._results = tuple(result for result in work.results if result is not None)
        told = [*([] if work.notice is None else [work.notice]), *(work.paused or {}).values()]
        self.notice = " ".join(told) or None
        self.exhausted = work.exhausted

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

    @property
    def outputs(self) -> dict[str, object] | None:
        """What a plan came to, where it says so (NESTFUL's `var_result`): by name, with references replaced by results.
        What refers to a step that has not answered, or leads nowhere in its result, is left out. None: it does not say.
        """
        work = self._work
        given = work.batch.outputs
        if given is None:
            return None
        bound = work.outputs
        if bound is None:
            return dict(given)
        found: dict[str, object] = {}
        for one in bound.parts():
            if all(self._results[reference.step].ok for reference in one.references):
                try:
                    found |= one.resolve(work.value_of)
                except UnresolvedReference:
                    continue
        return found

    @property
    def end_turn(self) -> bool:
        """A limit refused a call whose tool says `on_refusal="end_turn"`: the host is to end the turn here.

        Refused means not started, for a reason about which the model can do nothing for now: a busy limit, a full
        queue, a wait or a run that is over, a rate, an open circuit, a circle of waits. Mistakes of the model, missing
        permission, and calls that were cancelled or whose handler failed are told to the model as ever.
        """
        from towerman.sealing import ENDS_TURN

        tools = self._work.tools
        for result in self._results:
            if not result.started and result.code in ENDS_TURN:
                tool = tools[result.index]
                if tool is not None and tool.policy.on_refusal == "end_turn":
                    return True
        return False

    @property
    def pending(self) -> tuple[ApprovalRequest, ...]:
        """The calls that wait for a person's decision, in emitted order, each with a copy of its arguments.

        Calls that stand behind these are not among them, unless they need an approval of their own: that may be decided
        at the same time.
        """
        from copy import deepcopy

        from towerman.approvals import ApprovalRequest

        work, now = self._work, self._work.shell.core.now()
        found = []
        for index, approval in self._open():
            if approval.open and not approval.hidden:
                found.append(
                    ApprovalRequest(
                        approval.approval_id,
                        str(work.calls[index].tool),
                        work.run.run_id,
                        work.calls[index].id,
                        approval.digest,
                        max(0.0, approval.expires - now),
                        deepcopy(dict(approval.snapshot or {})),
                    )
                )
        return tuple(found)

    def _open(self) -> list[tuple[int, Approval]]:
        """The calls that came back pending, and their records."""
        gated = self._work.gated or {}
        return [
            (result.index, gated[result.index])
            for result in self._results
            if result.outcome == "pending" and result.handle is None and result.index in gated
        ]

    def state(self) -> str:
        """The batch as a text that `Run.resume` goes on with, here or in another process: JSON, with a version.

        It holds the calls, the results that are there, and what waits for a person: arguments and contents, so keep it
        where these may be kept. With a `secret` it is signed, and a changed one is refused; without one, whoever can
        change it can say that something was approved.

        Raises:
            InputError: a call that waits was handed in with arguments that JSON has no form for.
        """
        from towerman.adapters import plain_call, plain_message
        from towerman.approvals import Open, Suspended, binding, shape, write_state
        from towerman.records import keyed, new_secret

        work, core = self._work, self._work.shell.core
        secret = core.secret
        salt = new_secret() if secret is None else b""
        key = salt or keyed(secret or b"", "arguments of a batch state")
        now, wall = core.now(), core.wall()
        opened: dict[int, Open] = {}
        for index, approval in self._open():
            tool, call = work.tools[index], work.calls[index]
            asks = approval.needed and tool is not None
            opened[index] = Open(
                approval.approval_id,
                approval.needed,
                approval.state if approval.state == "approved" else "pending",
                binding(key, call.tool, call.arguments, approval.snapshot or {}) if asks else "",
                shape(tool.checker.schema) if asks and tool is not None else "",
                wall + approval.expires - now,
                approval.hidden,
                approval.edited,
                (work.written or {}).get(index),
            )
        calls = tuple(
            self._written(index) if index in opened else plain_call(self._written(index))
            for index in range(len(work.calls))
        )  # what has its result is not run again, so its arguments may be told more plainly
        batch = replace(self._batch, calls=calls, message=plain_message(self._batch.message))
        results = tuple(None if result.index in opened else result for result in self._results)
        number, run = work.number, work.run
        suspended = Suspended(
            batch,
            run.run_id,
            run.tenant,
            number,
            self.notice,
            salt.hex(),
            results,
            opened,
            self._closed_by_now(),
            self._values_to_come(opened),
        )
        return write_state(suspended, secret)

    def _written(self, index: int) -> Call:
        """A call as it is read again: what was filled into its arguments is no reference there."""
        work = self._work
        call = work.calls[index]
        if index not in work.filled:
            return call
        from towerman.plan import escape

        return replace(call, arguments=cast("Mapping[str, object]", escape(call.arguments)))

    def _values_to_come(self, opened: Mapping[int, object]) -> dict[int, object]:
        """What calls of a plan came to that open ones still refer to, and the plan's outputs.

        Raises:
            InputError: one of these has no JSON form.
        """
        work = self._work
        bounds = [work.bound[index] for index in opened if work.open and index in work.open]
        steps = {one.step for bound in (*bounds, work.outputs) if bound is not None for one in bound.references}
        if not steps:
            return {}
        from towerman.plan import whole_value

        found: dict[int, object] = {}
        for step in sorted(steps):
            if self._results[step].ok:
                try:
                    found[step] = whole_value(step, work.value_of)
                except UnresolvedReference:
                    raise InputError(
                        f"state: the result of call {step}, to which others refer, has no JSON form"
                    ) from None
        return found

    def _closed_by_now(self) -> dict[str, ApprovalState]:
        """What became of the approvals of this batch that are not open any more."""
        gated = self._work.gated or {}
        closed = dict(self._work.closed)
        for result in self._results:
            approval = gated.get(result.index)
            if approval is not None and approval.needed and result.outcome != "pending":
                closed[approval.approval_id] = approval.state
        return closed

    def _answers(self, pending: Pending) -> tuple[Result, ...]:
        """The results as they may go to the provider.

        Raises:
            PolicyError: some are pending, and it was not said what to do about that.
        """
        word("pending", pending, Pending)
        # What is deferred has a handle: the model is told that, and need not wait for it.
        waiting = [result for result in self._results if result.outcome == "pending" and result.handle is None]
        if not waiting:
            return self._results
        if pending == "raise":
            named = ", ".join(f"{result.index} ({result.tool}: {result.code})" for result in waiting[:5])
            more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
            raise PolicyError(
                f"pending: calls wait for a person's approval: {named}{more}; go on with run.resume(batch.state(), "
                "decisions), or say pending='refuse', which answers them approval_missing for good"
            )
        from towerman import sealing

        answers = {}
        for result in waiting:
            call = self._work.calls[result.index]
            answers[result.index] = sealing.refused(
                result.index, call, "approval_missing", sealing.UNAPPROVED, "rejected", 0.0, result.waited_for
            )
        with self._work.shell.core.lock:
            for index, approval in self._open():
                if not approval.used:  # the model is told that it has not run, so in this process it never will
                    approval.settle(answers[index])
        return tuple(answers.get(result.index, result) for result in self._results)

    def messages(self, format: str | None = None, pending: Pending = "raise") -> list[dict[str, object]]:
        """The results as the provider takes them, without the assistant message.

        Args:
            format: "openai", "anthropic" or "towerman"; None: the form that the batch came in.
            pending: what to do where calls wait for a person: "raise", or "refuse", which answers them
                `approval_missing`: they do not run any more, in this process, whatever is decided later.

        Returns:
            One message a call for OpenAI, one message for all of them for Anthropic, one record a call for "towerman".

        Raises:
            PolicyError: no such format; or calls wait for a person, and `pending` is "raise".
        """
        from towerman import adapters

        return adapters.encode(self._batch, self._answers(pending), format)

    def turn(self, format: str | None = None, pending: Pending = "raise") -> list[dict[str, object]]:
        """The assistant message and its results, ready to be appended to the conversation.

        Ids agree between the two even where the provider's were missing or repeated.

        Args:
            format: "openai", "anthropic" or "towerman"; None: the form that the batch came in.
            pending: as in `messages`.

        Returns:
            Messages as plain data. No calls: what the assistant message alone comes to.

        Raises:
            PolicyError: no such format; or calls wait for a person, and `pending` is "raise".
        """
        from towerman import adapters

        return adapters.turn(self._batch, self._answers(pending), format)

    def spans(self) -> list[Span]:
        """What each call did when, in seconds since the batch came in, and about how many tokens its result takes."""
        work = self._work
        tokens = work.count_tokens()
        spans = []
        for result in self._results:
            sealed = work.sealed_at[result.index] - work.started_at
            source = result.shared_with
            ran = result.started and source is None and not result.replayed
            started = sealed - result.ran if ran else None
            queued = (
                (started if started is not None else sealed) - result.waited
                if started is not None or result.waited
                else None
            )
            attempts: tuple[tuple[float, float | None, float], ...] = ()
            if work.again is not None and result.index in work.again:
                began = work.started_at
                attempts = tuple(
                    (came - began, start - began if start is not None else None, end - began)
                    for came, start, end in work.again[result.index].stretches
                )
                queued, started = attempts[0][:2]
            ended = work.ended.get(result.index if source is None else source)
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
                    shared_with=source,
                    tokens=tokens[result.index],
                    attempts=attempts,
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

    def timeline_svg(self) -> str:
        """The same as a picture: an SVG document that stands alone, for light and dark pages, of bounded size.

        Of more than 200 calls the first have a row that did not end ok, and those that waited or ran longest; a sum
        over all of them stands above.
        """
        from towerman import timeline

        return timeline.draw_svg(self.spans())

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for result in self._results:
            counts[result.outcome] = counts.get(result.outcome, 0) + 1
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        return f"BatchResult({len(self._results)} calls{': ' + told if told else ''})"
