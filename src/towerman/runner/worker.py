"""The worker: takes deferred calls out of the journal's queue and has the tower run them.

Theory. A worker claims a few calls at a time and hands each to the gate as a batch of one call, in a run of the same
id, tenant and priority: nothing is let through that would not be let through otherwise. A claimed call waits in the
gate for a few seconds at most (its patience), holding nothing but its claim; where there is still no room it goes back
into the queue, for others or for later, and is put off for longer each time. Of a tool of which some wait here already
no more are taken, so that one busy service does not keep the others.

What came of a call is written down twice: as its outcome, by the runner, before anybody is told; and as the answer of
the deferred call, here. A worker may die between any two steps. Without an intent nothing has happened, and the call
goes back to the queue. With an outcome, whoever looks next takes that for the answer. In between nobody knows, and the
call is unknown until a person has settled it, unless repeating it does no harm.

A call whose result was sealed while its work goes on keeps its claim until the work has ended: what comes behind it in
its chain waits for that, as it would in a batch.

A call that waits for a person is put back with the question and holds nothing here; when a decision is in the journal
it is taken like any other, by whichever worker comes first. The decision is used in the step in which the call's intent
is written.

Stopping. Nothing new is taken; what waits goes back; what runs has `grace` seconds, then it is told to stop as by any
cancel. What cannot be told, and a harmful effect may have come of it, is left unknown.

House rules. A claim is given back, finished, or left to a death: an await that is cancelled leaves none behind.

Not here: the queue and who gets what (journal), whether a call may start (gate), running it (shell).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from towerman import sealing
from towerman.calls import Batch, Call, Result
from towerman.clock import wall_time
from towerman.core import Core
from towerman.errors import Code, PolicyError
from towerman.policy import seconds, whole
from towerman.records import Answer, Deferred, Due, JournalUnavailable, Permission, unpacked
from towerman.runner import carrying
from towerman.work import NOT_STARTED, Deferral, Filed, RunState, Work

if TYPE_CHECKING:
    from towerman.journal import Journal
    from towerman.runner.shell import Shell
    from towerman.runner.shells import Shells

T = TypeVar("T")

AT_ONCE: Final = 8
"""Calls that are claimed in one step at most."""

AHEAD: Final = 4
"""Calls of one tool that wait here, from which on no more of it are taken."""

FIRST_BACK_OFF: Final = 0.5
"""Seconds for which a call is put off that comes back for the first time; twice as long each further time."""

MOST_BACK_OFF: Final = 30.0
"""Seconds for which it is put off at most, unless a rate limit says when there is room."""

APPROVAL_SECONDS: Final = 120.0
"""Seconds for which a call is put off about which an approver decided nothing, unless somebody decides elsewhere."""

ONCE_SECONDS: Final = 60.0
"""Seconds for which a worker that is to leave when all is done waits for a call that is put off."""

TROUBLE_SECONDS: Final = 1.0
"""Seconds between two tries while the journal cannot be used."""

MOST_KNOWN: Final = 10_000
"""Approvals of which it is remembered here when they end."""

LOOK_SECONDS: Final = 1.0
"""How often, however much there is to do, it is looked whether somebody has cancelled a call that is at work here."""

STEP: Final = 0.05
"""How often it is looked whether work that goes on after its result has ended."""

_NO_ROOM: Final = frozenset(
    {"concurrency_limit", "queue_full", "rate_limited", "wait_timeout", "circuit_open", "engine_unavailable"}
)
"""Refusals for which a claimed call goes back into the queue."""

_log: Final = logging.getLogger("towerman")


class Host(Protocol):
    """What a worker needs of its tower."""

    _core: Core

    @property
    def _shells(self) -> Shells:
        """The runners of its loops."""
        ...  # pragma: no cover - a protocol has no body

    def _open_state(
        self,
        run_id: str,
        tenant: str | None,
        priority: int,
        deps: object,
        approver: object,
        *,
        deadline: float | None,
        allow: tuple[str, ...] | None,
        deny: tuple[str, ...] | None,
    ) -> RunState:
        """Open a run."""
        ...  # pragma: no cover - a protocol has no body

    def _close_run(self, state: RunState) -> None:
        """Forget a run."""
        ...  # pragma: no cover - a protocol has no body


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker has done.

    Args:
        done: calls that answered.
        failed: calls that ended otherwise: refused for good, failed, skipped, cancelled.
        returned: times that a call went back into the queue.
        unknown: calls of which nobody knows whether they took effect.
        lost: calls that another worker took over.
        left: of a worker that left when nothing could run: calls that are not over, those of other workers included.
        waiting: of these, how many wait for a person.
    """

    done: int = 0
    failed: int = 0
    returned: int = 0
    unknown: int = 0
    lost: int = 0
    left: int = 0
    waiting: int = 0


@dataclass(slots=True, eq=False)
class _Item:
    """A call that this worker has.

    Args:
        row: what stands in the queue.
        claim: the worker's.
        body: its arguments, as they are stored.
        work: the batch in which it runs; None before that.
        told: why it was told to stop: somebody cancelled it, the worker stops, another worker has it.
    """

    row: Deferred
    claim: bytes = field(repr=False)
    body: bytes | None = field(repr=False)
    work: Work | None = None
    told: Literal["stop", "leave", "lost"] | None = None

    @property
    def started(self) -> bool:
        """Its handler's first line was reached."""
        work = self.work
        if work is None:
            return False
        job = work.jobs.get(0)
        result = work.results[0]
        return (job is not None and job.started != NOT_STARTED) or (result is not None and result.started)


class Worker:
    """Runs the deferred calls of a tower's journal through the tower's own limits; several may work on one journal.

    Args:
        tower: whose tools and limits they are; it has a journal.
        concurrency: calls that it runs at once at most; default: the tower's `max_concurrency`, which counts anyway.
        patience: seconds for which a call waits here for room before it goes back into the queue.
        poll: seconds between two looks into an idle queue.
        grace: seconds that what runs has for ending when the worker is stopped.
        foreign_after: seconds after which a queued call of a tool that this tower has not is answered `unknown_tool`;
            until then it is left to other workers.
        approver: asks a person about calls that need that, as `Tower.run` takes it; without one such a call waits in
            the queue, and in the journal's inbox, until somebody decides there or its time is over.
        deps: what handlers get as `Context.deps`; a callable is called with each call's `run_id`.
        on_end: called with the handle of each call that has ended here, and its state in the queue.

    Raises:
        PolicyError: the tower has no journal that stores arguments, or an option is out of its range.
    """

    def __init__(
        self,
        tower: Host,
        *,
        concurrency: int | None = None,
        patience: float = 5.0,
        poll: float = 0.25,
        grace: float = 30.0,
        foreign_after: float = 600.0,
        approver: object = None,
        deps: object = None,
        on_end: Callable[[str, str], object] | None = None,
    ) -> None:
        core = getattr(tower, "_core", None)
        if not isinstance(core, Core):
            raise PolicyError(f"Worker: a Tower; got {type(tower).__name__[:80]}")
        if core.journal is None or not core.journal.keeps_arguments:
            raise PolicyError(
                "Worker: the tower has no journal that stores arguments; say Tower(journal='towerman.db')"
            )
        self._tower = tower
        self._core = core
        self._journal: Journal = core.journal
        self._concurrency = None if concurrency is None else whole("Worker: concurrency", concurrency)
        self._patience = seconds("Worker: patience", patience)
        self._poll = seconds("Worker: poll", poll)
        self._grace = seconds("Worker: grace", grace, zero=True)
        self._foreign_after = seconds("Worker: foreign_after", foreign_after, zero=True)
        if on_end is not None and not callable(on_end):
            raise PolicyError(f"Worker: on_end: a function; got {type(on_end).__name__[:80]}")
        self._approver = approver
        self._deps = deps
        self._on_end = on_end
        self._hand: dict[_Item, asyncio.Task[None]] = {}
        self._states: dict[_RunOf, tuple[RunState, int]] = {}
        self._counts = dict.fromkeys(("done", "failed", "returned", "unknown", "lost"), 0)
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._cut = False
        self._looked_at = self._core.now()
        self._told: set[str] = set()
        self._open = self._waiting = 0
        self._until: dict[str, float] = {}

    # ================================================================ the loop

    async def run(self, *, once: bool = False) -> WorkerReport:
        """Take and run deferred calls until it is stopped.

        Args:
            once: leave when nothing is left that could run now, or within a minute.

        Returns:
            What it has done.

        Raises:
            PolicyError: it runs already.
            asyncio.CancelledError: its caller was cancelled. What ran was told to stop, as by `stop(grace=0)`, and has
                ended, or is an orphan; no call is left claimed.
        """
        if self._loop is not None:
            raise PolicyError("Worker.run: it runs already")
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        interrupted: asyncio.CancelledError | None = None
        try:
            try:
                await self._work(once)
            except asyncio.CancelledError as caught:
                interrupted, self._grace = caught, 0.0
            self._stopping = True
            ending = self._loop.create_task(self._wind_down())
            while not ending.done():
                try:
                    await asyncio.shield(ending)
                except asyncio.CancelledError as caught:
                    interrupted, self._grace = interrupted or caught, 0.0
                    self._wake.set()
            ending.result()
        finally:
            self._loop = self._wake = None
            self._stopping = self._cut = False
        if interrupted is not None:
            raise interrupted
        return self.report()

    def stop(self, grace: float | None = None) -> None:
        """Take nothing new; let what runs end within `grace` seconds; then `run` returns. From any thread.

        Args:
            grace: seconds; default: as the worker was made.

        Raises:
            PolicyError: it is no length of time.
        """
        if grace is not None:
            self._grace = seconds("stop: grace", grace, zero=True)
        self._stopping = True
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:  # the loop is gone
                return

    def report(self) -> WorkerReport:
        """What it has done so far."""
        return WorkerReport(**self._counts, left=self._open, waiting=self._waiting)

    async def _work(self, once: bool) -> None:
        asks = self._approver is not None
        self._open = self._waiting = 0
        while not self._stopping:
            due: Due | None = None
            idle = not self._hand  # what ends from now on may make something due that is not told yet
            try:
                room = self._room()
                if room > 0:
                    tools, busy = self._tools(), self._busy()
                    before = wall_time() - self._foreign_after
                    due = await self._asked(self._journal.due(tools, busy=busy, foreign_before=before, asks=asks))
                    self._tell_foreign(due)
                    took = due.now and await self._take(tools, busy, before, min(room, AT_ONCE))
                    if took and self._core.now() - self._looked_at < LOOK_SECONDS:
                        continue
                await self._look_at_claims()
            except JournalUnavailable as trouble:
                if trouble.trouble == "closed":
                    return
                self._tell("journal", "worker: %s", trouble)
                await self._rest(TROUBLE_SECONDS)
                continue
            self._told.discard("journal")
            if once and idle and not self._hand and due is not None and not self._coming(due):
                self._open, self._waiting = due.left, due.waiting
                return
            pause = self._poll
            if due is not None and due.next_at is not None:
                pause = min(pause, max(0.01, due.next_at - wall_time()))
            await self._rest(pause)

    @staticmethod
    def _coming(due: Due) -> bool:
        """Is something there that could run soon?"""
        return due.now or (due.next_at is not None and due.next_at - wall_time() <= ONCE_SECONDS)

    async def _rest(self, pause: float) -> None:
        """Until something has ended here, the worker is stopped, or so many seconds have passed."""
        assert self._wake is not None
        if self._stopping:
            return
        try:
            async with asyncio.timeout(pause):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _room(self) -> int:
        """How many more calls may be at work here."""
        most = self._concurrency or self._core.policy.max_concurrency
        return most - sum(item.started for item in self._hand)

    def _tools(self) -> list[str]:
        return list(self._core.tools)

    def _busy(self) -> list[str]:
        """Tools of which enough calls wait here."""
        waiting: dict[str, int] = {}
        for item in self._hand:
            if not item.started:
                waiting[item.row.tool] = waiting.get(item.row.tool, 0) + 1
        return [tool for tool, count in waiting.items() if count >= AHEAD]

    def _tell_foreign(self, due: Due) -> None:
        for name in due.foreign:
            self._tell(
                f"tool {name}",
                "worker: calls of %r wait, and this tower has no such tool; they are left to other workers for %g s",
                name,
                self._foreign_after,
            )

    def _tell(self, what: str, text: str, *values: object) -> None:
        """Say something once."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *values)

    @staticmethod
    async def _asked(future: Future[T]) -> T:
        return await asyncio.wrap_future(future)

    async def _take(self, tools: list[str], busy: list[str], before: float, limit: int) -> bool:
        """Claim calls and set them going; False where there was none."""
        future = self._journal.claim_next(
            tools, limit, busy=busy, foreign_before=before, asks=self._approver is not None
        )
        try:
            found = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._unclaim)
            raise
        assert self._loop is not None
        for row, body in found:
            assert row.claim is not None
            item = _Item(row, row.claim, body)
            self._hand[item] = self._loop.create_task(self._carry_out(item))
        return bool(found)

    def _unclaim(self, future: Future[list[tuple[Deferred, bytes | None]]]) -> None:
        """Nobody is there any more for what was claimed."""
        if not future.cancelled() and future.exception() is None:
            for row, _ in future.result():
                if row.claim is not None:
                    self._journal.give_back(row.claim)

    async def _look_at_claims(self) -> None:
        """Has somebody cancelled a call that is at work here, or taken it over?"""
        by_claim = {item.claim: item for item in self._hand}
        if not by_claim:
            return
        self._looked_at = self._core.now()
        for claim, state in (await self._asked(self._journal.claims(list(by_claim)))).items():
            item = by_claim[claim]
            if state != "held" and item.told is None and item in self._hand:
                self._tell_to_stop(item, "stop" if state == "stop" else "lost")

    def _tell_to_stop(self, item: _Item, why: Literal["stop", "leave", "lost"]) -> None:
        item.told = item.told or why
        work = item.work
        if work is not None:
            words = {"stop": "it was cancelled", "leave": "the worker stops", "lost": "another worker has it by now"}
            shell: Shell = work.shell  # type: ignore[assignment]  # every batch's loop is a shell
            shell.cancel_call(work, 0, words[why])

    async def _wind_down(self) -> None:
        """Let go of everything: what waits at once, what runs when its time is over."""
        assert self._wake is not None
        now = self._core.now
        began = now()
        while self._hand:
            over = now() >= began + self._grace
            for item in list(self._hand):
                if item.told is None and (over or not item.started):
                    self._tell_to_stop(item, "leave")
            if now() >= began + self._grace + self._core.policy.grace + 2 * STEP:
                self._cut = True
            self._wake.clear()
            try:
                async with asyncio.timeout(STEP):
                    await self._wake.wait()
            except TimeoutError:
                continue

    # ================================================================ one call

    async def _carry_out(self, item: _Item) -> None:
        try:
            await self._settle(item, await self._result(item))
        except Exception as fault:  # of this room: the call is not lost, and it is not run again at once
            _log.exception("worker: %s", type(fault).__name__)
            self._journal.give_back(item.claim, wait=MOST_BACK_OFF)
            self._counts["returned"] += 1
        finally:
            self._hand.pop(item, None)
            if self._wake is not None:
                self._wake.set()

    async def _result(self, item: _Item) -> Result | Answer:
        """What the tower makes of a call."""
        row = item.row
        if item.told is not None:
            return _refusal("cancelled", "Not started: it was cancelled.", "cancelled")
        if row.lacks is not None:
            return _refusal(
                "dependency_failed",
                f"Not run: the deferred call {row.lacks}, which it needs, did not succeed.",
                "skipped",
            )
        try:
            if item.body is None:
                raise ValueError("no arguments")
            arguments, key = unpacked(item.body)
            approval = carrying.brought(self._core, row)
        except (ValueError, RecursionError):
            return _refusal("invalid_arguments", "Not started: its arguments are not in the journal.", "rejected")
        batch = Batch((Call(row.tool, arguments, row.call_id, (), key),))
        filed = Filed(row.key, row.digest, item.claim, (row.batch, row.index))
        state = self._opened(row)
        try:

            def begun(work: Work) -> None:
                work.deferral = Deferral(claims={0: filed}, rows={0: row}, patience=self._patience)
                if approval is not None:
                    approval.expires = self._at_most(row.handle, approval.expires)
                    work.gated = {0: approval}
                item.work = work

            await self._tower._shells.here().execute(state, batch, None, begun)
            assert item.work is not None
            result = item.work.results[0]
            assert result is not None
            if result.still_running:
                return await self._ended(item, item.work, result)
            return result
        finally:
            self._left(row)

    def _at_most(self, handle: str, until: float) -> float:
        """The instant at which an approval ends: never later than it was found to be before, whatever the calendar."""
        now, known = self._core.now(), self._until
        until = min(until, known.get(handle, until))
        if len(known) >= MOST_KNOWN:
            for one in [one for one, at in known.items() if at < now] or list(known)[: MOST_KNOWN // 2]:
                del known[one]
        known[handle] = until
        return until

    def _opened(self, row: Deferred) -> RunState:
        """The run of a call, the same for all calls of its run that are at work here."""
        key = _run_of(row)
        state, users = self._states.get(key, (None, 0))
        if state is None:
            deps = self._deps(row.run_id) if callable(self._deps) else self._deps
            left = None if row.deadline is None else max(0.0, row.deadline - self._core.wall())
            allow, deny = row.permission or (None, None)
            state = self._tower._open_state(
                row.run_id, row.tenant, row.priority, deps, self._approver, deadline=left, allow=allow, deny=deny
            )
        self._states[key] = state, users + 1
        return state

    def _left(self, row: Deferred) -> None:
        key = _run_of(row)
        state, users = self._states[key]
        if users > 1:
            self._states[key] = state, users - 1
        else:
            del self._states[key]
            self._tower._close_run(state)

    async def _ended(self, item: _Item, work: Work, result: Result) -> Result | Answer:
        """A result was sealed while the work goes on: wait for its end, and for what the journal says of it."""
        while 0 not in work.ended and not self._cut:  # noqa: ASYNC110 - threads end without an event
            await asyncio.sleep(STEP)
        if 0 not in work.ended or work.filed is None:
            return result
        try:
            records = await self._asked(self._journal.look_up((item.row.key,)))
        except JournalUnavailable:
            return result
        record = records.get(item.row.key)
        return record.answer if record is not None and record.state == "done" and record.answer is not None else result

    async def _settle(self, item: _Item, result: Result | Answer) -> None:
        """Write what came of it, or put it back."""
        journal, claim, row = self._journal, item.claim, item.row
        if item.told == "lost" or (result.code == "lease_lost" and not _has_begun(result)):
            # Another worker has it; or it was cancelled just before it began, and is over when it is given back.
            await self._written(journal.give_back(claim))
            return
        said, given = carrying.said(self._core, item.work)
        wait = self._put_off_for(item, result)
        if wait is not None:
            self._counts["returned"] += 1
            await self._written(journal.give_back(claim, wait=wait, asked=said, arguments=given))
            return
        answer = result if isinstance(result, Answer) else Answer.of(result)
        state = _state_of(item, result, answer)
        self._counts["unknown" if state == "unknown" else "done" if answer.outcome == "ok" else "failed"] += 1
        await self._written(journal.finish_deferred(claim, answer, state, asked=said))
        self._until.pop(row.handle, None)
        if self._on_end is not None:
            try:
                self._on_end(row.handle, state)
            except Exception as wrong:
                self._tell("on_end", "worker: on_end failed with %s", type(wrong).__name__)

    async def _written(self, future: Future[bool]) -> None:
        """What cannot be written now is tried again by the journal."""
        try:
            if not await self._asked(future):
                self._counts["lost"] += 1
        except JournalUnavailable as trouble:
            self._tell("journal", "worker: %s", trouble)

    @staticmethod
    def _is_decided(item: _Item) -> bool:
        """Has somebody decided here? Then another decision was written down before, and the call is to go by that."""
        approval = (item.work.gated or {}).get(0) if item.work is not None else None
        return approval is not None and approval.state in ("approved", "denied")

    def _put_off_for(self, item: _Item, result: Result | Answer) -> float | None:
        """For how many seconds a call is put off that goes back into the queue; None: it has its answer."""
        if isinstance(result, Answer):
            return 0.0 if item.told == "leave" else None
        if _left(item, result):
            return (0.0 if item.told else FIRST_BACK_OFF) if item.row.harmless or not result.started else None
        if result.started or (result.code == "concurrency_limit" and result.retryable == "no"):
            return None
        if item.told == "leave" and result.outcome == "rejected":
            return 0.0
        if result.outcome == "pending":
            return 0.0 if self._approver is None or self._is_decided(item) else APPROVAL_SECONDS
        if result.code in _NO_ROOM or result.code == "journal_unavailable":
            usual = min(MOST_BACK_OFF, FIRST_BACK_OFF * 2.0 ** min(item.row.returned, 10))
            usual *= 0.5 + random.random() / 2
            return max(usual, result.retry_after or 0.0)
        if result.code == "budget_exhausted" and result.retry_after is not None:
            return result.retry_after
        if result.code == "deadline_exceeded" and item.row.deadline is not None:
            return None if self._core.wall() >= item.row.deadline - STEP else FIRST_BACK_OFF
        if result.code in ("run_closed", "deadline_exceeded"):  # the tower is closed, or gave it no thread in time
            return FIRST_BACK_OFF
        return None


_RunOf = tuple[str, str | None, int, float | None, Permission | None]


def _run_of(row: Deferred) -> _RunOf:
    """What calls of one run have in common: they run in one here, too."""
    return row.run_id, row.tenant, row.priority, row.deadline, row.permission


def _has_begun(result: Result | Answer) -> bool:
    return isinstance(result, Result) and result.started


def _left(item: _Item, result: Result) -> bool:
    """It was cancelled, and not since somebody wanted it cancelled: the worker leaves, or the tower was closed."""
    return result.outcome == "cancelled" and item.told != "stop"


def _state_of(item: _Item, result: Result | Answer, answer: Answer) -> Literal["done", "cancelled", "unknown"]:
    """What a call that has ended here is in the queue.

    One that has failed is done, as it would be in a batch, also where its effect is unknown: it is listed as such, and
    what comes behind it goes on. One that was cut off, because the worker had to leave, waits for a person.
    """
    if answer.code == "effect_unknown":
        return "unknown"
    cut_off = isinstance(result, Result) and (result.still_running or _left(item, result))
    if cut_off and answer.applied == "unknown" and not item.row.harmless:
        return "unknown"
    if answer.outcome == "cancelled" and answer.attempts == 0:
        return "cancelled"
    return "done"


def _refusal(code: Code, message: str, outcome: Literal["rejected", "skipped", "cancelled"]) -> Answer:
    """What a call comes to that is not even handed to the tower."""
    content = sealing.failure(code, message, outcome, False, "no", "no")
    return Answer(outcome, code, "no", attempts=0, message=message, content=content)
