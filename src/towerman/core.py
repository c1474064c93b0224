"""What all loops of a tower share, and how a call is looked over before anything starts.

Theory. One lock, one gate, the tools, the counters. What a call wants of the gate is worked out here, once for each
tool and run where it touches nothing. How a call is looked over is here too, since it is the same for a batch that
runs and for one that is only explained.

House rules. State and look-ups only: nothing here starts, seals or admits.

Not here: running (runner), wording of results (sealing), what a batch would do (explain).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from towerman.access import AccessRefused, flat_holds
from towerman.arguments import ArgumentsRefused, load_arguments, near_names, parameters_of
from towerman.budgets import Account, Asks, Shares, number
from towerman.budgets import Book as Purse
from towerman.calls import IS, IX, ROOT, Access, Batch, Call, Hold, Outcome, S, X
from towerman.clock import Clock, RealClock, VirtualClock, calendar, wall_time
from towerman.errors import Code
from towerman.estimates import Means, estimated
from towerman.gate import NEVER, Gate, Lot
from towerman.ledger import Ledger, Wants
from towerman.plan import Bound, Linked, PlanRefused, read_references, resolve_needs
from towerman.policy import KINDS_OF_STORAGE, TowerPolicy, amounts_of
from towerman.rates import micros
from towerman.threads import Workers
from towerman.tokens import Counter
from towerman.tools import Condition, Tool
from towerman.trace import ID_CHARACTERS, UNKNOWN_TOOL, Event
from towerman.work import Job, Join, Owner, RunState, Want, Work

if TYPE_CHECKING:
    from towerman.approvals import Approval, Book
    from towerman.engines.redis import RedisLedger
    from towerman.explain import Seen
    from towerman.journal import Journal
    from towerman.leftovers import DeadLetter, Leftover
    from towerman.pages import ResultStore
    from towerman.placeholders import Found, Others
    from towerman.processes import Processes
    from towerman.store import Keeper

_ORDER_OF_RUN: Final = "order of the run"
_ORDER_OF_PROCESS: Final = "exclusive tool"
_OUTPUTS: Final = "the plan's outputs"
"""How a message calls what a plan comes to."""

_ORDER_OF_PLAN: Final = "what is not known yet"

_PLAN: Final = f"{ROOT}plan"
"""The key at which calls of a plan that may touch anything exclude those that touch something."""

_UNDECLARED: Final = {
    "ordered": "its calls run alone and in emitted order within their run",
    "exclusive": "its calls run alone in the process",
    "independent": "its calls run beside all others",
}

_ALONE: Final = {"ordered": "alone, in order", "exclusive": "alone in the process"}
"""What people are shown of a tool's calls that touch no resource of their own."""

FILED: Final = ("intents", "replayed", "joined", "conflicts", "unknown", "unavailable", "unwritten")
"""What is counted of a journal: intents that were written; calls that were answered from it, waited for the same call
elsewhere, were refused for another one's key, are of unknown effect, were refused since it could not be used; outcomes
that could not be written in time."""

LEASES: Final = ("alone", "lost")
"""What is counted of an engine: calls that ran without it, since it was not reached; leases that were lost."""

MOST_WARNED: Final = 5
"""Calls with placeholders of which the notice of one batch tells."""

MEANS_SECONDS: Final = 30.0
"""How often the journal is told how long calls took, at most."""

MOST_LETTERS: Final = 100
"""Dead letters that a tower keeps; the oldest goes first."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call may not even be offered to the gate.

    Args:
        code: from `towerman.errors.CODES`.
        message: a sentence for the model.
        tool: whose call it is; None when there is no such tool.
    """

    code: Code
    message: str
    tool: Tool | None


Made = dict[int, tuple[object, Want]]
"""What was made in place of others: by the identity of these, which it keeps alive for as long as it is looked up."""


class Core:
    """What all loops of one tower share: lock, gate, policy, tools, threads, counters.

    Args:
        policy: the tower's own options.
        gate: the admission of this process.
        clock: where time is read.

    Attributes:
        emit: takes an Event for the observers; None while there are none.
        crowded: more than one loop uses the tower.
        watching: a thread watches for loops that stand still, or nobody is to.
        most_grace: seconds for cleaning up at most, whatever the policy says, once the tower is being closed.
        when_alone: called, and forgotten, when the last orphan has ended; under the lock.
        letters: what came of calls after their results were sealed.
        generation: how often options, or the locks that calls take, have changed.
        widened: the generation since which calls take the locks that they take now.
        any_joined: some tool lets one run answer several calls.
        any_gated: some tool's calls may need a person's approval.
        shared: calls that the run of another one answered.
        approvals: counts of what people were asked, and what they said.
        asking: approvers at work.
        claim: uses the record of a call for whoever holds the batch; the first one has it. A durable table of
            approvals takes its place.
        reader: the tool that reads pages of large results for the model, or None.
        handle_key: what handles of large results are made with.
        told_bytes: bytes of contents that batches came to.
        retries: attempts after the first that were started.
        backing_off: calls that wait to be tried again, and hold nothing.
        random: gives a number from 0 up to 1 for the pauses between attempts; None: the machine's own chance.
        journal: remembers what was begun and what came of it; None: nobody does.
        journal_key: of its digests; None until it was opened.
        engine: keeps what counts over several processes; None: this one is alone.
        charge_there: tells it what was spent.
        leases: what came of it, by what it was.
        filed: what came of the journal, by what it was.
        flights: calls of this tower that are at work and have an identity, by where that is stored.
        joined: calls that calls at work have made and that wait for the same call elsewhere: who waits, and a function
            that gives whom they wait for, if it is at work.
        purse: what may be spent, and is.
        budgeted: there is, or was, a budget that calls count in.
        sparing: there is, or some tool bounds its repeats: batches are looked over for that before they are offered.
        overspent: with mode="observe", by whom a budget counts for, the calls that it would have refused.
        means: how long calls of each tool have taken.
    """

    def __init__(self, policy: TowerPolicy, gate: Gate[Owner], clock: Clock) -> None:
        self.policy = policy
        self.gate = gate
        self.clock = clock
        self.now = clock.now
        self.lock = threading.Lock()
        self.emit: Callable[[Event], None] | None = None
        self.workers: Workers[Job] = Workers("towerman-worker")
        self.made_processes: Processes | None = None
        self.made_keeper: Keeper | None = None
        self.reader: Tool | None = None
        self.handle_key = self._new_key()
        self.told_bytes = 0
        self._counter = Counter(policy.count_tokens)
        self.tools: dict[str, Tool] = {}
        self.any_ordered = False
        self.any_exclusive = False
        self.any_subtree = False
        self.any_joined = False
        self.any_gated = False
        self.crowded = False
        self.generation = 0
        self.widened = 0
        self.answered = 0
        self.shared = 0
        self.approvals = dict.fromkeys(("asked", "approved", "denied", "expired", "undecided", "ignored", "failed"), 0)
        self.asking = 0
        self.claim: Callable[[Approval, object], bool] = lambda approval, holder: approval.claim(holder)
        self._book: Book | None = None
        self._digest_key: bytes | None = None
        self.retries = 0
        self.backing_off = 0
        self.random: Callable[[], float] | None = None
        self.outcomes: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.late_results = 0
        self.letters: deque[DeadLetter] = deque(maxlen=MOST_LETTERS)
        self.watching = not isinstance(clock, RealClock)  # a time that does not pass by itself stands still by right
        self.stalls: dict[str, int] = {}
        self.stalled_seconds = 0.0
        self.longest_stall = 0.0
        self.most_grace = NEVER
        self.when_alone: list[Callable[[], None]] = []
        self.orphans = 0
        self.orphans_released = 0
        self.strays: deque[Job | Work] = deque()
        self.paused: set[str] = set()  # tools without a rate of their own that were asked to pause
        self.pause: Callable[[str], None] = self.paused.add  # makes such a tool have one; under the lock
        self.runs: Mapping[int, RunState] = {}  # those that are open
        self.hinted: set[str] = set()  # tools whose missing declaration was told
        self.told_faults: set[str] = set()
        self.uncopied: set[str] = set()  # tools of which it was told that arguments of theirs cannot be copied
        self.unmerged: set[str] = set()  # tools of whose merge function it was told that it failed
        self.journal: Journal | None = None
        self.journal_key: bytes | None = None
        self.engine: RedisLedger | None = None
        self.charge_there: Callable[[RunState, Work | None, int, Mapping[str, int]], None] = _nothing
        self.leases: dict[str, int] = dict.fromkeys(LEASES, 0)
        self.filed: dict[str, int] = dict.fromkeys(FILED, 0)
        self.flights: dict[bytes, Job] = {}
        self.joined: dict[Join, tuple[tuple[Job, ...], Callable[[], Job | None]]] = {}
        self.purse = Purse(micros(calendar(clock)))
        self.budgeted = False
        self.sparing = False
        self.overspent: dict[str, int] = {}
        self.seed = os.urandom(32)  # of the digests by which repeated calls are known
        self.means: Means = {}  # by tool name: answers so far, and their mean seconds
        self.means_told: dict[str, tuple[int, float]] = {}  # how much of that the journal knows
        self.means_due = -NEVER  # when it is told next
        self.means_asked = False  # it was asked what other processes have learned

    @property
    def processes(self) -> Processes:
        """Worker processes; what they need is imported with the first of them."""
        made = self.made_processes
        if made is None:
            from towerman.processes import Processes

            with self.lock:
                made = self.made_processes = self.made_processes or Processes()
        return made

    def _new_key(self) -> bytes:
        """A secret; on a time of its own, where all is to be the same at every run, it is none."""
        return os.urandom(32) if isinstance(self.clock, RealClock) else b"virtual time"

    @property
    def keeps(self) -> bool:
        """Results that are too large are kept whole."""
        return self.policy.results != "off"

    @property
    def keeper(self) -> Keeper:
        """Where they are kept; what that needs is imported with the first of them.

        Raises:
            PolicyError: their folder cannot be used.
        """
        made = self.made_keeper
        if made is None:
            from towerman.store import FolderStore, JournalStore, Keeper

            with self.lock:
                made = self.made_keeper
                if made is None:
                    store = self.policy.results
                    lifetime, most = lambda: self.policy.result_lifetime, lambda: self.policy.max_stored_bytes
                    if store in ("auto", "journal") and self.journal is not None:
                        store = JournalStore(self.journal)
                    elif store in KINDS_OF_STORAGE:
                        store = None
                    elif isinstance(store, str | os.PathLike):
                        store = FolderStore(os.fspath(store), lifetime, most)
                    made = self.made_keeper = Keeper(cast("ResultStore | None", store), lifetime, most, self.now)
        return made

    @property
    def counter(self) -> Counter:
        """Counts tokens of contents."""
        if self._counter.count is not self.policy.count_tokens:
            self._counter = Counter(self.policy.count_tokens)
        return self._counter

    def chance(self) -> float:
        """A random number from 0 up to 1."""
        if self.random is None:
            from random import random

            self.random = random
        return self.random()

    def reset(self, gate: Gate[Owner]) -> None:
        """In another process: nothing is at work here, and whoever held the lock is not here."""
        if self.made_keeper is not None:
            self.made_keeper.anew()
        self.handle_key = self._new_key()
        self.gate = gate
        self.lock = threading.Lock()
        self.workers = Workers("towerman-worker")
        self.made_processes = None
        self.strays.clear()
        self.when_alone.clear()
        self.watching = not isinstance(self.clock, RealClock)
        self.orphans = 0
        self.backing_off = 0
        self.crowded = False
        self.journal_key = None
        self.flights.clear()
        self.joined.clear()
        self.paused.clear()  # their pauses were in the other gate
        self.asking = 0
        self._digest_key = None
        self.means_told, self.means_asked = dict(self.means), True  # what is not told yet is the parent's to tell
        self.purse.reset()
        self.overspent = {}

    @property
    def book(self) -> Book:
        """What is known of calls that came back pending; under the lock."""
        if self._book is None:
            from towerman.approvals import Book

            self._book = Book()
        return self._book

    @property
    def secret(self) -> bytes | None:
        """What signatures rest on, or None."""
        from towerman.approvals import secret_bytes

        return None if self.policy.secret is None else secret_bytes(self.policy.secret)

    @property
    def digest_key(self) -> bytes:
        """The key of digests of arguments: made of the secret, or a random one of this process."""
        if self._digest_key is None:
            from towerman.records import keyed, new_secret

            secret = self.secret
            self._digest_key = new_secret() if secret is None else keyed(secret, "arguments of approvals")
        return self._digest_key

    def wall(self) -> float:
        """Unix time in seconds; on a clock of a test, its own."""
        return wall_time() if isinstance(self.clock, RealClock) else self.now()

    def gated(self, tool: Tool, keywords: Mapping[str, object]) -> bool | Refusal:
        """Does a call of this tool with these arguments need a person's approval, or why can that not be told?"""
        rule = tool.requires_approval
        if isinstance(rule, bool):
            return rule
        answer = condition("requires_approval", rule, keywords)
        return answer if isinstance(answer, bool) else Refusal("policy_error", answer, tool)

    def chain(self, run: RunState, above: Shares | None = None) -> tuple[Account, ...]:
        """The accounts in which the calls of a batch count, the nearest first; under the lock.

        Args:
            run: whose batch it is.
            above: of the batch whose call makes it: what a handler makes counts where its own call does, too, whatever
                run it belongs to.
        """
        self.purse.at(micros(self.now()))
        chain = run.accounts
        if above is not None:
            return (*chain, *(account for account in above.chain if account not in chain))
        budget = self.policy.budgets.get("batch")
        if budget is None:
            return chain
        return (Account("batch", "batch", budget.limits, partial=budget.partial), *chain)

    def charge(self, run: RunState, units: Mapping[str, object], work: Work | None = None, index: int = 0) -> None:
        """So much was spent: by a call of a batch, or else by the run itself.

        Raises:
            PolicyError: no unit, or no amount.
        """
        amounts = amounts_of("charge", units)
        with self.lock:
            self.purse.at(micros(self.now()))
            if work is None:
                self.purse.charge(run.accounts, amounts)
            elif work.shares is not None:
                work.shares.charge(index, amounts)
        if self.engine is not None:
            self.charge_there(run, work, index, amounts)

    def remaining(self, run: RunState, work: Work | None = None) -> dict[str, float]:
        """What is left, by limited unit, on the accounts in which a run counts, or a batch of it."""
        with self.lock:
            self.purse.at(micros(self.now()))
            chain = run.accounts if work is None or work.shares is None else work.shares.chain
            return {unit: number(amount) for unit, amount in self.purse.remaining(chain).items()}

    def base(self, run: RunState, tool: Tool) -> Want:
        """What each call of this tool in this run wants, beside what depends on its arguments; under the lock."""
        base = run.bases.get(tool.name)
        if base is not None:
            return base
        tool = self.tools.get(tool.name, tool)
        policy, tower = tool.policy, self.policy
        permits = [("process", policy.weight), (f"run:{run.number}", 1)]
        bounds = [("process", tower.max_queued)]
        if policy.max_concurrency is not None:
            permits.append((f"tool:{tool.name}", 1))
        if policy.max_queued is not None:
            bounds.append((f"tool:{tool.name}", policy.max_queued))
        rates: list[str] = []
        breakers: list[str] = []
        if policy.rate is not None or tool.name in self.paused:
            rates.append(f"rate:tool:{tool.name}")
        if policy.breaker is not None:
            breakers.append(f"breaker:tool:{tool.name}")
        for name, units in policy.pools:
            pool = tower.pools[name]
            key = pool_key(name, tower.scope_of(pool), run)
            permits.append((key, units))
            if pool.max_queued is not None:
                bounds.append((key, pool.max_queued))
            if pool.rate is not None:
                rates.append(f"rate:{key}")
            if pool.breaker is not None:
                breakers.append(f"breaker:{key}")
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
            rates=tuple(rates),
            breakers=tuple(breakers),
        )
        base.kind = tool.kind
        base.of = tool
        base.accesses = ()
        base.shared = tool.rule is None
        base.far = None
        self.gate.ledger.look_up(base)
        run.bases[tool.name] = base
        return base

    def renew(self, work: Work) -> None:
        """Options have changed since a batch was begun: its calls count in limits, and take locks, that are new. Under
        the lock, and on the batch's own loop, which may be putting in what its calls want.
        """
        if work.generation < self.widened:
            work.wants = [want and self._widen(want) for want in work.wants]
        work.generation = self.generation
        made: Made = {}
        work.wants = [want and self.counted_in(want, work.run, made) for want in work.wants]

    def counted_in(self, want: Want, run: RunState, made: Made) -> Want:
        """The want, in all limits that its tool has now.

        Args:
            want: of a call of that run.
            run: the run.
            made: what was answered for others; calls that shared what they want go on sharing it.
        """
        known = made.get(id(want))
        if known is not None:
            return known[1]
        if run.gone:  # its own limits may be gone, too, and nothing more of it starts
            return want
        had = {key for key, _ in want.permits}
        base = self.base(run, want.of)
        missing = tuple(one for one in base.permits if one[0] not in had)
        other = missing or (want.rates, want.breakers) != (base.rates, base.breakers)
        found = want.with_limits(missing, self.gate.ledger, base) if other else want
        made[id(want)] = want, found
        if other:  # those of one tool and one run share their pools, which is how the gate knows that they are alike
            _, alike = made.setdefault(id(want.pools), (want.pools, found))
            if found is not alike:
                found.pools, found.pool_states = alike.pools, alike.pool_states
        return found

    def rehearsal(self) -> Core:
        """A core with the same tools and limits and nothing at work: what is tried on it changes nothing here.

        Its time stands still. Limits that count for a run or a tenant are not there yet.
        """
        with self.lock:
            other = Core(self.policy, Gate(Ledger()), VirtualClock(self.now()))
            other.tools = dict(self.tools)
            other.any_ordered, other.any_exclusive = self.any_ordered, self.any_exclusive
            other.any_subtree = self.any_subtree
            other.any_joined = self.any_joined
            other.any_gated = self.any_gated
            other.hinted = set(self.tools)
            other.means = dict(self.means)
            other.budgeted, other.sparing = self.budgeted, self.sparing
            self.purse.at(micros(self.now()))
            other.purse = self.purse.anew()
            for pool in self.gate.ledger.pools.values():
                if pool.scope in ("process", "cluster"):
                    other.gate.ledger.add_pool(pool.anew())
            other.paused = set(self.paused)
            for meter in self.gate.ledger.meters.values():
                if meter.scope in ("process", "cluster"):
                    other.gate.ledger.add_meter(meter.anew())
            for fuse in self.gate.ledger.fuses.values():
                if fuse.scope in ("process", "cluster"):
                    other.gate.ledger.add_fuse(fuse.anew())
        return other

    def most(self, size: int, *, planned: bool) -> int:
        """How many of a response's calls are run; a batch with needs is not cut, since half a plan is none."""
        policy = self.policy
        if size > policy.max_calls_per_batch and not planned and policy.on_excess == "tell":
            return policy.max_calls_per_batch
        return size

    def check(
        self, run: RunState, batch: Batch, index: int, call: Call, others: Others | None = None
    ) -> tuple[Want, dict[str, object]] | Refusal:
        """Look up one call, permit it and check its arguments: what it wants and its keyword arguments, or why not.

        Args:
            run: whose it is.
            batch: where it came.
            index: its place there.
            call: the call, with its arguments as they are known now.
            others: the calls beside which it is looked through for placeholders; None: it is not.
        """
        base = self._permitted(run, batch, index, call)
        if isinstance(base, Refusal):
            return base
        tool = base.of
        try:
            keywords = tool.checker.check(call.arguments)
        except ArgumentsRefused as refused:
            if others is not None and tool.guard is not None and not tool.warns:
                # What stands where a number is wanted fits no schema; what it stands for is the better answer.
                found = self.placeholders(tool, call, others, index)
                if found:
                    return self._unresolved(tool, others, found)
            return Refusal("invalid_arguments", refused.message, tool)
        guard = tool.guard
        if guard is not None and others is not None and not tool.warns and guard.suspects(keywords, self.tools):
            found = self.placeholders(tool, call, others, index)
            if found:
                return self._unresolved(tool, others, found)
        if not base.shared:
            assert tool.rule is not None
            try:
                accesses = tool.fixed if tool.fixed is not None else tool.rule.accesses(keywords)
            except AccessRefused as unnamed:
                return Refusal(unnamed.code, str(unnamed), tool)
            base = self.want(base, run, accesses)
        return base, keywords

    def placeholders(self, tool: Tool, call: Call, others: Others, index: int) -> list[Found]:
        """The placeholders in the arguments of a call that the model itself has written; in those of code there are
        none, since it waits for results.
        """
        if tool.guard is None or call.caller:
            return []
        try:
            given = load_arguments(call.arguments, any_required=False)
        except ArgumentsRefused:
            return []
        return tool.guard.find(given, others, index, self.tools)

    def doubted(
        self, tool: Tool, call: Call, keywords: Mapping[str, object], others: Others, index: int
    ) -> list[Found]:
        """The same for a checked call that runs all the same."""
        if tool.guard is None or not tool.guard.suspects(keywords, self.tools):
            return []
        return self.placeholders(tool, call, others, index)

    def _unresolved(self, tool: Tool, others: Others, found: Sequence[Found]) -> Refusal:
        from towerman.placeholders import refusal

        source = next((one.call for one in found if one.call is not None), None)
        named = self.tool_of(others.calls[source]) if source is not None else None
        message = refusal(found, len(others), None if named is None else named.name)
        return Refusal("unresolved_placeholder", message, tool)

    def foresee(
        self, run: RunState, batch: Batch, index: int, call: Call, bound: Bound
    ) -> tuple[Want, tuple[Access, ...] | None] | Refusal:
        """The same for a call whose arguments hold references to results that are not there yet: whose it is, and what
        it may touch (None: anything); or why it will not run whatever these come to.
        """
        base = self._permitted(run, batch, index, call)
        if isinstance(base, Refusal):
            return base
        tool = base.of
        if base.shared:
            return base, base.accesses
        assert tool.rule is not None
        return base, tool.fixed if tool.fixed is not None else tool.rule.foreseen(bound.known(), bound.open)

    def _permitted(self, run: RunState, batch: Batch, index: int, call: Call) -> Want | Refusal:
        """Look up one call, and see whether it may be made at all."""
        name = _name(call.tool)
        base = run.bases.get(name)
        if base is None:
            known = self.tools.get(name)
            if known is None:
                return Refusal("unknown_tool", self._unknown(run, name), None)
            with self.lock:  # limits that change meanwhile, on another thread, are there whole or not at all
                if run.gone:
                    from towerman import sealing

                    return Refusal("run_closed", sealing.closing("run_closed", run.closed or ""), known)
                base = self.base(run, known)
            self._hint(known)
        tool = base.of
        if run.may_call is not None and not run.may_call(name):
            return Refusal("permission_denied", f"The tool {name!r} is not allowed in this run.", tool)
        size = len(batch.calls)
        if size > 1 and tool.policy.only_call:
            message = f"The tool {name!r} must be the only call of a response; call it again alone."
            return Refusal("not_alone", message, tool)
        if batch.truncated and (index == size - 1 or not tool.effect_free):
            return Refusal(
                "truncated_response",
                "The response was cut at the token limit: this call may be incomplete and was not run. Send it again.",
                tool,
            )
        return base

    def order_of(
        self, run: RunState, wants: Sequence[Want | None], foreseen: Mapping[int, tuple[Access, ...] | None]
    ) -> list[tuple[tuple[Hold, ...], Mapping[str, str]]]:
        """What the calls of a plan are taken to hold for its order, while it is not known of all of them (rule S1), and
        what people are shown for it.

        Args:
            run: whose plan it is.
            wants: of each call; None: it does not run.
            foreseen: by index, what those may touch whose arguments are open; None: anything.
        """
        subtrees = self.any_subtree or any(one.subtree for each in foreseen.values() for one in each or ())
        anything = None in foreseen.values()
        found: list[tuple[tuple[Hold, ...], Mapping[str, str]]] = []
        for index, want in enumerate(wants):
            if want is None:
                found.append(((), {}))
                continue
            accesses = foreseen.get(index, want.accesses)
            held, labels = self.holds(run.number, want.kind, accesses or (), subtrees=subtrees)
            if anything:
                rule = want.of.rule
                labels = {**labels, _PLAN: _ORDER_OF_PLAN}
                if accesses is None:
                    held = (*held, (_PLAN, X if rule is None or rule.writes else S))
                elif held:
                    writes = not accesses or any(access.write for access in accesses)
                    held = (*held, (_PLAN, IX if writes else IS))
            found.append((held, labels))
        return found

    def look_over(
        self, run: RunState, batch: Batch
    ) -> tuple[list[Seen], list[tuple[int, ...]] | PlanRefused | None, str | None]:
        """A whole batch for an explanation: its calls, what they need of each other (or why that cannot be followed),
        and what the model would be told about the batch.
        """
        from dataclasses import replace

        from towerman import sealing
        from towerman.explain import Seen
        from towerman.placeholders import Others

        calls = batch.calls
        size = len(calls)
        bound: Sequence[Bound | None] = ()
        try:
            if batch.plan:
                linked = read_plan(batch)
                needs, bound = (linked.needs[:size], linked.bound) if linked is not None else (None, ())
            else:
                needs = resolve_needs([call.id for call in calls], [call.needs for call in calls])
        except PlanRefused as refused:
            return [Seen(call, self._known(call)) for call in calls], refused, None
        most = self.most(size, planned=batch.plan or needs is not None)
        foreseen: dict[int, tuple[Access, ...] | None] = {}
        others = Others(calls) if not batch.plan else None
        doubts: list[str] = []
        seen = [
            self._seen(run, batch, index, bound[index] if bound else None, foreseen, others, doubts)
            for index in range(most)
        ]
        if foreseen:
            wants = [cast("Want | None", one.wants) for one in seen]
            for index, (holds, labels) in enumerate(self.order_of(run, wants, foreseen)):
                want = wants[index]
                if want is not None:
                    ordered = want.with_holds(want.accesses, holds, labels)
                    seen[index] = replace(seen[index], wants=cast("Wants[Lot[int]]", ordered))
        for index in range(most, size):
            capped: tuple[Code, str] = ("call_cap", sealing.capped(most, index, size))
            seen.append(Seen(calls[index], self._known(calls[index]), refusal=capped))
        notice = sealing.notice(most, size) if most < size else None
        if self.budgeted:
            notice = self._reserve(run, seen, needs, notice)
        notice = " ".join([*([] if notice is None else [notice]), *doubts]) or None
        return seen, needs, notice

    def _reserve(
        self, run: RunState, seen: list[Seen], needs: Sequence[Sequence[int]] | None, notice: str | None
    ) -> str | None:
        """What of a batch that is only explained the budgets would refuse; returns what the model would be told."""
        from dataclasses import replace

        from towerman import sealing

        shares = Shares(self.purse, self.chain(run), len(seen))
        shares.asks[:] = [one.asks if one.refusal is None else None for one in seen]
        short = shares.reserve(needs)
        if not short or self.policy.mode == "observe":
            return notice
        last, lack = next(reversed(short.items()))
        cut = sealing.cut_short(lack, shares.open, len(seen), self.purse.renews(lack))
        for index, lack in short.items():
            told = cut if index == last else sealing.too_little(lack, self.purse.renews(lack))
            seen[index] = replace(seen[index], wants=None, asks=None, likeness=None, refusal=("budget_exhausted", told))
        return cut if notice is None else f"{notice} {cut}"

    def _seen(
        self,
        run: RunState,
        batch: Batch,
        index: int,
        bound: Bound | None,
        foreseen: dict[int, tuple[Access, ...] | None],
        others: Others | None,
        doubts: list[str],
    ) -> Seen:
        from towerman.explain import Seen
        from towerman.placeholders import warning
        from towerman.records import packed

        call = batch.calls[index]
        if bound is not None:
            if bound.references:
                return self._foreseen(run, batch, index, bound, foreseen)
            call = filled(call, bound.known())
        found = self.check(run, batch, index, call, others)
        if isinstance(found, Refusal):
            return Seen(call, self._known(call), refusal=(found.code, found.message))
        want = found[0]
        if want.of.warns and others is not None and len(doubts) < MOST_WARNED:
            placeholders = self.doubted(want.of, call, found[1], others, index)
            if placeholders:
                doubts.append(warning(placeholders, index, want.tool))
        gated = self.gated(want.of, found[1])
        if isinstance(gated, Refusal):
            return Seen(call, self._known(call), refusal=(gated.code, gated.message))
        asks = None
        if self.budgeted:
            try:
                asks = self.asks(want.of, found[1])
            except AccessRefused as untold:
                return Seen(call, self._known(call), refusal=(untold.code, str(untold)))
        touches = [_ALONE[want.kind]] if want.kind in _ALONE else []
        touches += [f"{'write' if access.write else 'read'} {access.template}" for access in want.accesses]
        likeness = want.likeness(call, found[1])
        return Seen(
            call,
            want.tool,
            tuple(dict.fromkeys(touches)),
            cast("Wants[Lot[int]]", want),
            likeness=None if gated and want.of.policy.merge is not None else likeness,
            merged=not gated and likeness is not None and want.of.policy.merge is not None,
            approval=gated,
            asks=asks,
            defers=want.of.defer and packed(call.arguments, call.idempotency_key) is not None,
        )

    def _foreseen(
        self,
        run: RunState,
        batch: Batch,
        index: int,
        bound: Bound,
        foreseen: dict[int, tuple[Access, ...] | None],
    ) -> Seen:
        """A call whose arguments are open until others have answered."""
        from towerman.explain import Seen

        call = batch.calls[index]
        found = self.foresee(run, batch, index, call, bound)
        if isinstance(found, Refusal):
            return Seen(call, self._known(call), refusal=(found.code, found.message))
        want, accesses = found
        foreseen[index] = accesses
        touches = [_ALONE[want.kind]] if want.kind in _ALONE else []
        if accesses is None:
            touches.append(_ORDER_OF_PLAN)
        for one in accesses or ():
            touches.append(f"{'write' if one.write else 'read'} {one.template}")
        tool = want.of
        return Seen(
            call,
            want.tool,
            tuple(dict.fromkeys(touches)),
            cast("Wants[Lot[int]]", want),
            approval=tool.requires_approval is True,
            asks=tool.asks if self.budgeted and tool.price is None else None,
        )

    @staticmethod
    def asks(tool: Tool, keywords: Mapping[str, object]) -> Asks | None:
        """What a call asks of budgets.

        Raises:
            AccessRefused: nobody can tell.
        """
        return tool.asks if tool.price is None else tool.price(keywords)

    def parameters_of(self, name: str) -> Mapping[str, bool] | None:
        """The names of a tool's parameters as it declares them, and whether each takes a list; None: no such tool."""
        tool = self.tools.get(name)
        return None if tool is None else parameters_of(tool.checker.schema)

    def tool_of(self, call: Call) -> Tool | None:
        """The tool that a call names, if there is one."""
        return self.tools.get(_name(call.tool))

    def _known(self, call: Call) -> str:
        """The name under which a call is recorded."""
        tool = self.tool_of(call)
        return UNKNOWN_TOOL if tool is None else tool.name

    def _unknown(self, run: RunState, name: str) -> str:
        known = [one for one in self.tools if run.may_call is None or run.may_call(one)]
        near = near_names(name, known)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"There is no tool of this name.{hint}"

    def _hint(self, tool: Tool) -> None:
        """Say once, with its first call, that a tool's declaration is missing."""
        if not tool.policy.declares_access and tool.name not in self.hinted:
            import logging

            self.hinted.add(tool.name)
            logging.getLogger("towerman").info(
                "tool %r declares no access, so %s; declare reads=, writes=, sequential=True or independent=True",
                tool.name,
                _UNDECLARED[tool.kind],
            )

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

    def holds(
        self, run: int, kind: str, accesses: tuple[Access, ...], *, subtrees: bool | None = None
    ) -> tuple[tuple[Hold, ...], Mapping[str, str]]:
        """Flat locks of a call: its resources, and the roots at which tools without resources exclude others.

        Args:
            run: number of its run.
            kind: of its tool.
            accesses: its resources.
            subtrees: some call may touch a subtree; None: as the tools say.
        """
        holds: tuple[Hold, ...] = ()
        labels: Mapping[str, str] = {}
        if accesses:
            holds, labels = flat_holds(accesses, subtrees=self.any_subtree if subtrees is None else subtrees)
        if kind == "independent":
            return holds, labels
        roots: tuple[Hold, ...] = ()
        names: dict[str, str] = {}
        if self.any_ordered:
            key = f"{ROOT}run:{run}"
            roots = ((key, X if kind == "ordered" else IX),)
            names[key] = _ORDER_OF_RUN
        if self.any_exclusive:
            roots = ((f"{ROOT}process", X if kind == "exclusive" else IX), *roots)
            names[f"{ROOT}process"] = _ORDER_OF_PROCESS
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
        self.any_joined = self.any_joined or tool.joins
        self.any_gated = self.any_gated or tool.requires_approval is not False
        self.sparing = self.sparing or tool.max_repeats is not None
        if tool.reads_results and (self.reader is None or self.reader.name == tool.name):
            self.reader = tool
        ordered = self.any_ordered or tool.kind == "ordered"
        exclusive = self.any_exclusive or tool.kind == "exclusive"
        subtree = self.any_subtree or (tool.rule is not None and tool.rule.may_subtree)
        if (ordered, exclusive, subtree) != (self.any_ordered, self.any_exclusive, self.any_subtree):
            self.any_ordered, self.any_exclusive, self.any_subtree = ordered, exclusive, subtree
            self.generation += 1  # what is prepared and not yet offered is widened when it is
            self.widened = self.generation
            self.gate.expand(self._widen)

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

    def remember(self, stored: Mapping[str, tuple[int, float]]) -> None:
        """What other processes have learned is learned here, too; it counts as often as it has answers."""
        with self.lock:
            for tool, (count, mean) in stored.items():
                own, own_mean = self.means.get(tool, (0, 0.0))
                told, _ = self.means_told.get(tool, (0, 0.0))
                if not told:
                    self.means_told[tool] = count, mean
                    self.means[tool] = count + own, mean + (own_mean - mean) * (own / (count + own))

    def tell_means(self, *, now: bool = False) -> None:
        """Tell the journal what was learned since it was told last, once it is in use; nobody waits for that.

        Args:
            now: also where it was told a moment ago.
        """
        if self.journal is None or self.journal_key is None or not (now or self.now() >= self.means_due):
            return
        with self.lock:
            self.means_due = self.now() + MEANS_SECONDS
            learned: dict[str, tuple[int, float]] = {}
            for tool, (count, mean) in list(self.means.items()):
                told, told_mean = self.means_told.get(tool, (0, 0.0))
                if count > told:
                    learned[tool] = count - told, max(0.0, mean + (mean - told_mean) * (told / (count - told)))
                    self.means_told[tool] = count, mean
        if learned:
            self.journal.learn(learned)

    def estimates(self, tools: Sequence[Tool | None]) -> list[float] | None:
        """How long each call may take: its tool's mean so far, or the median of those. None: nothing is known."""
        if not self.means:
            return None
        return estimated(self.means, [None if tool is None else tool.name for tool in tools])

    def tell_fault(self, what: str, fault: Exception) -> None:
        """Log, once, what does not work and costs no call its result; nothing of what went wrong but its type."""
        if what not in self.told_faults:
            import logging

            self.told_faults.add(what)
            logging.getLogger("towerman").warning("%s: %s", what, type(fault).__name__)

    def leftovers(self) -> tuple[Leftover, ...]:
        """The orphans; under the lock. Who has ended and only waits for what it lent is none."""
        from towerman.leftovers import Leftover

        now = self.now()
        found = []
        for entry in self.gate.orphans():
            if entry.loan is not None and entry.loan.gone:
                continue
            work, index = entry.owner
            result, tool = work.results[index], work.tools[index]
            if result is not None and tool is not None:
                ran = result.ran + now - work.sealed_at[index]
                call_id = str(work.calls[index].id)[:ID_CHARACTERS]
                found.append(Leftover(work.run.run_id, work.number, index, call_id, tool.name, ran))
        return tuple(found)

    def count_filed(self, what: str) -> None:
        """One more of what came of the journal."""
        with self.lock:  # several loops count
            self.filed[what] += 1

    def count(self, outcome: Outcome, code: Code) -> None:
        """One more sealed result without an ordinary answer."""
        with self.lock:  # several loops count
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            self.codes[code] = self.codes.get(code, 0) + 1


def condition(name: str, rule: Condition, keywords: Mapping[str, object]) -> bool | str:
    """What a declared function of the arguments says, or why it cannot be used, in a sentence for the model."""
    try:
        answer = rule(keywords)
    except Exception as error:
        return f"Not run: {name} of this tool failed with {type(error).__name__[:64]}."
    if isinstance(answer, bool):
        return answer
    close = getattr(answer, "close", None)
    if isinstance(answer, Coroutine) and close is not None:
        close()
    return f"Not run: {name} of this tool answered neither True nor False, but with {type(answer).__name__[:64]}."


def read_plan(batch: Batch) -> Linked | None:
    """Read the references of a plan and link its steps; None where nothing needs anything and nothing is escaped. What
    the plan comes to, where it says that, is linked like one step more, the last one.

    Raises:
        PlanRefused: it cannot be read or followed; nothing of it may run (G5).
    """
    if batch.refused is not None:
        raise PlanRefused(*batch.refused)
    calls = batch.calls
    ids = [call.id for call in calls]
    # Code that made a call has waited for the values that stand in it: nothing there is a reference.
    arguments = [None if call.caller else _loaded(call) for call in calls]
    needs = [call.needs for call in calls]
    if batch.outputs is not None:
        ids.append(_OUTPUTS)
        arguments.append(batch.outputs)
        needs.append(())
    try:
        return read_references(ids, arguments, needs, ordered=batch.ordered, numbered=batch.numbered)
    except PlanRefused as refused:
        size = len(calls)
        members = tuple(index for index in refused.members if index < size)
        raise PlanRefused(refused.code, members or tuple(range(size)), refused.message) from None


def _loaded(call: Call) -> Mapping[str, object] | None:
    try:
        return load_arguments(call.arguments, any_required=False)
    except ArgumentsRefused:  # the call is refused for it in its turn
        return None


def filled(call: Call, arguments: Mapping[str, object]) -> Call:
    """The same call with these arguments."""
    return Call(call.tool, arguments, call.id, call.needs, call.idempotency_key, call.if_failed, call.caller)


def _nothing(run: RunState, work: Work | None, index: int, amounts: Mapping[str, int]) -> None:
    """There is no engine."""


def pool_key(name: str, scope: str, run: RunState) -> str:
    """The ledger's key of a named pool, for a run."""
    if scope in ("process", "cluster"):
        return f"pool:{name}"
    if scope == "run":
        return f"pool:{name}@run:{run.number}"
    return f"pool:{name}@tenant:{run.tenant or ''}"


def _name(given: object) -> str:
    """A tool name as it came; what is no text names no tool."""
    return given if isinstance(given, str) else ""
