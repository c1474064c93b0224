"""What the journal is told, and what it is asked: calls that were begun before, intents, outcomes.

Theory (rule S14). Before anything of a batch is offered, the identities of its calls are looked up in one step. What
was begun before is answered out of the journal, or waits for whoever is at work on it, or is refused; the rest goes the
usual way. When a call that may change something is granted, its intent is written, and its first line is reached once
that is on the disk: until then it is granted and not started, a state that every end knows. When its work has ended,
what it held goes back at once; its result is sealed once the outcome is on the disk, so that nobody is told of an
effect that a crash could make the journal forget. A call without effect is written down when it has ended, and nobody
waits for that.

A step of a plan is known by its arguments as they were handed in, also where it is gone on with after results were
filled in: so it is the same call whichever way it comes.

A call that waits for the same call elsewhere (a join) holds nothing and stands in no queue. It waits at most its
`max_wait`. Where the call that it waits for waits in turn for what this call's own caller made, it is refused at once.

House rules. The journal answers from its own thread; what follows is done on the loop. Trouble with it costs no result
that is there, and starts nothing that is not written down.

Not here: what follows from what is written down (records), how it is stored (journal), the words (sealing).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from towerman import sealing
from towerman.calls import Applied, Outcome, Result
from towerman.errors import Code
from towerman.gate import NEVER
from towerman.plan import UnresolvedReference, whole_value
from towerman.records import (
    Answer,
    Deferred,
    Identity,
    Intent,
    JournalUnavailable,
    NotBegun,
    NotCleared,
    Record,
    Unsettled,
    Verdict,
    digest,
    effect_key,
    identity,
    place,
    verdict,
)
from towerman.runner import carrying, intake
from towerman.runner.following import SAME_CALL
from towerman.runner.keeping import Keeping
from towerman.tools import Tool
from towerman.trace import ID_CHARACTERS
from towerman.work import Filed, Job, Join, Work, callers

T = TypeVar("T")

JOURNAL_SECONDS: Final = 15.0
"""How long a batch, or a granted call, waits for the journal before it counts as unavailable."""

OUTCOME_SECONDS: Final = 10.0
"""How long a result waits for its outcome to be written down."""
_FOR_GOOD: Final = frozenset({"approval_expired", "approval_denied", "policy_error"})
_BEFORE: Final = "It had begun before, when its worker died: whether it took effect then is not known."
_UNAVAILABLE: Final = "Not started: {why}. A call with side effects runs only when the journal can write it down first."


class Filing(Keeping):
    """What concerns the journal; the runner goes on from here."""

    def _put_before(
        self,
        work: Work,
        queued: Mapping[bytes, tuple[Deferred, Answer | None]],
        records: Mapping[bytes, Record],
    ) -> None:
        """Which calls of a batch were put into the durable queue before?"""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    def _look_into_queue(self, work: Work, index: int) -> bool:
        """A call was put into the durable queue since it was looked up: it is answered with what is there."""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    def _launch(self, job: Job, keywords: dict[str, object]) -> None:
        """Nothing stands between a granted call and its first line any more."""
        raise NotImplementedError  # pragma: no cover - the shell's

    def _when(
        self, future: Future[T], then: Callable[[Future[T]], None], work: Work, index: int, job: Job | None = None
    ) -> None:
        """Have a function called on this loop when the journal has answered; never, once the loop is gone.

        Args:
            future: the journal's.
            then: what is called.
            work, index: for which call.
            job: the call, where it is granted.
        """

        def on_loop(done: Future[T]) -> None:
            try:
                then(done)
            except Exception as fault:
                if job is not None:
                    self._faulty(work, index, job.entry, fault, job)
                else:
                    self._broken(work, index, fault)

        def post(done: Future[T]) -> None:
            try:
                self.loop.call_soon_threadsafe(on_loop, done)
            except RuntimeError:  # what the loop was at is nobody's any more, and is looked after as such
                return

        future.add_done_callback(post)

    @staticmethod
    async def _asked(future: Future[T]) -> T:
        """What the journal answers.

        Raises:
            JournalUnavailable: it does not, or not in time.
        """
        try:
            async with asyncio.timeout(JOURNAL_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise JournalUnavailable("failed", f"the journal did not answer within {JOURNAL_SECONDS:g} s") from None

    # ================================================================ before anything is offered

    async def _recall(self, work: Work) -> None:
        """Ask the journal which calls were begun before, and answer those that were."""
        core = self.core
        journal = core.journal
        assert journal is not None
        work.filed, work.joins = {}, {}
        found = await self._identities(work)
        claimed = work.deferral is not None and work.deferral.claims
        name = self._name_of(work)
        if intake.over(work) or not (
            found or claimed or work.gated or name
        ):  # an approval may go into the queue with a call
            return
        unwritten: JournalUnavailable | None = None
        try:
            if core.journal_key is None:
                secret = core.policy.secret
                raw = secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else secret
                core.journal_key = await self._asked(journal.open(raw))
            key = core.journal_key
            try:
                if name and not await self._take_over(work, key, name):
                    return
            except JournalUnavailable as trouble:  # what is there may be read all the same
                unwritten = trouble
            for index, one in found.items():
                tool = work.tools[index]
                assert tool is not None
                work.filed[index] = Filed(place(key, one), digest(key, tool.name, work.as_written(index)))
            if work.deferral is not None:
                work.filed.update(work.deferral.claims)
            keys = [filed.key for filed in work.filed.values() if filed.key is not None]
            asked = journal.deferred_by(keys)
            records = await self._asked(journal.look_up(keys))
            queued = await self._asked(asked)
            self._put_before(work, queued, records)
        except JournalUnavailable as trouble:
            if not intake.over(work):
                claims = work.deferral.claims if work.deferral is not None else ()
                self._all_unavailable(work, [*found, *claims], trouble)
            return
        for index in list(work.filed):
            if intake.over(work):
                return
            filed, want = work.filed[index], work.wants[index]
            if work.deferral is not None and index in work.deferral.found:
                continue
            record = records.get(filed.key) if filed.key is not None else None
            if record is not None and want is not None and work.results[index] is None:
                told = verdict(record, filed.digest, harmless=want.of.policy.repeatable)
                filed.before = told == "run" and record.state in ("open", "unknown")
                self._act(work, index, want.of, told, record)
        if unwritten is not None and not intake.over(work):
            claims = work.deferral.claims if work.deferral is not None else ()
            self._all_unavailable(work, [*found, *claims], unwritten)

    async def _identities(self, work: Work) -> dict[int, Identity]:
        """By index, what those calls are found again by that have something; the others are marked as new."""
        core = self.core
        assert work.filed is not None
        found: dict[int, Identity] = {}
        turn = core.now() + intake.SLICE
        for index, want in enumerate(work.wants):
            if want is None:
                continue
            call = work.calls[index]
            one = self._identity(work, index, want.of, call.idempotency_key)
            if one is not None:
                found[index] = one
            elif not want.of.effect_free:
                work.filed[index] = Filed(None, None)
            if not index & 7 and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + intake.SLICE
                if intake.over(work):
                    break
        return found

    @staticmethod
    def _identity(work: Work, index: int, tool: Tool, key: str | None) -> Identity | None:
        """What a call is found again by. One that came back pending has a name of its own, if nothing else: whoever
        goes on with its batch, in whatever process, finds what has run.
        """
        run, batch = work.run, work.batch
        found = identity(
            tool.name,
            index,
            run_id=work.origin or run.run_id,
            tenant=run.tenant,
            idempotency_key=key,
            batch_id=batch.batch_id,
            response_id=batch.response_id,
        )
        if found is None and work.resumed is not None and index in work.resumed:
            return Identity("batch", ("", "approval", work.resumed[index].approval_id))
        return found

    def _all_unavailable(self, work: Work, found: Sequence[int], trouble: JournalUnavailable) -> None:
        """The journal cannot say what was begun before: what may change something does not start."""
        assert work.filed is not None
        for index in found:
            work.filed.pop(index, None)
            want = work.wants[index]
            if want is not None and not want.of.effect_free and work.results[index] is None:
                self.core.count_filed("unavailable")
                self._refuse(work, index, "journal_unavailable", _UNAVAILABLE.format(why=_said(trouble)))

    def _act(
        self,
        work: Work,
        index: int,
        tool: Tool,
        told: Verdict,
        record: Record | None,
        *,
        waited: float = 0.0,
        max_wait: float | None = None,
    ) -> bool:
        """Do with a call what follows from what is written down of it; True where that seals it."""
        core = self.core
        assert work.filed is not None
        filed, call = work.filed[index], work.calls[index]
        waited_for = work.waited_for.get(index, ()) + ((SAME_CALL,) if waited else ())
        if told == "run":
            return False
        if told == "deferred":
            return self._look_into_queue(work, index)
        if told == "conflict":
            core.count_filed("conflicts")
            message = (
                "Not started: its idempotency key was used before for a call with other arguments. Use another key for "
                "another call."
                if call.idempotency_key
                else "Not started: a call with other arguments was handed in before as this one. A response, and a "
                "batch_id, stand for the same calls each time."
            )
            self._refuse(work, index, "idempotency_conflict", message, waited=waited, waited_for=waited_for)
            return True
        if told == "join":
            if self._is_with_another(work, index):  # in this process: it is followed when it is its turn
                return False
            return self._join(work, index, tool, max_wait)
        assert record is not None
        filed.told = True
        unknown = told == "unknown"
        core.count_filed("unknown" if unknown else "replayed")
        if core.emit is not None:
            self._tell(work, index, "replayed", code=record.code)
        work.keywords[index] = None
        work.wants[index] = None
        if index in work.referred and record.answer is not None:
            self._restore(work, index, record.answer)
        self._seal(work, index, sealing.replayed(index, call, tool, record, waited, waited_for), core.now())
        return True

    @staticmethod
    def _restore(work: Work, index: int, answer: Answer) -> None:
        """What a step came to, for others: what the model was shown of it does not say of which type it was."""
        if answer.value is not None:
            if work.values is None:
                work.values = {}
            work.values[index] = json.loads(answer.value)

    # ================================================================ waiting for the same call elsewhere

    def _join(self, work: Work, index: int, tool: Tool, max_wait: float | None) -> bool:
        """Let a call wait for the same call, which is at work elsewhere; True where it is refused instead."""
        core = self.core
        assert work.filed is not None and work.joins is not None and core.journal is not None
        key = work.filed[index].key
        assert key is not None
        now = core.now()
        join = work.joins.get(index)
        if join is None:
            if not tool.joins_duplicates:
                core.count_filed("conflicts")
                message = (
                    "Not started: the same call is at work elsewhere, and this tool does not wait for it. Whether it "
                    "takes effect there is not known yet."
                )
                self._seal_elsewhere(work, index, tool, "idempotency_conflict", message, "rejected", 0.0)
                return True
            if work.parent is not None and self._in_a_circle(work, core.flights.get(key)):
                message = (
                    "Not started: the same call is at work, and waits for what this call's own caller waits for: it "
                    "would wait for ever."
                )
                self._seal_elsewhere(work, index, tool, "would_deadlock", message, "rejected", 0.0)
                return True
            wait = tool.max_wait if max_wait is None else max_wait
            join = work.joins[index] = Join(work, index, now, min(now + wait, work.run.limit))
            self._joins[join] = None
            if work.parent is not None:
                with core.lock:
                    core.joined[join] = tuple(callers(work)), partial(core.flights.get, key)
            core.count_filed("joined")
            if core.emit is not None:
                self._tell(work, index, "joined", waiting_for=SAME_CALL)
            if join.due < self._timer_at:
                self._arm(join.due)
        work.wants[index] = None
        work.keywords[index] = None
        future = core.journal.watch(key)
        join.stop = future.cancel
        self._when(future, lambda _: self._look_again(join), work, index)
        return False

    def _look_again(self, join: Join) -> None:
        """Nobody is at work any more on the call that a join waits for: what came of it?"""
        work, index = join.work, join.index
        if work.results[index] is not None or work.joins is None or work.joins.get(index) is not join:
            return
        assert work.filed is not None and self.core.journal is not None
        key = work.filed[index].key
        assert key is not None
        future = self.core.journal.look_up((key,))
        join.stop = future.cancel
        self._when(future, lambda done: self._looked(join, done, key), work, index)

    def _looked(self, join: Join, done: Future[dict[bytes, Record]], key: bytes) -> None:
        work, index = join.work, join.index
        if done.cancelled() or work.results[index] is not None:
            return
        if work.joins is None or work.joins.get(index) is not join:
            return
        core, tool = self.core, work.tools[index]
        assert tool is not None and work.filed is not None
        waited = core.now() - join.since
        problem = done.exception()
        if problem is not None:
            core.count_filed("unavailable")
            self._forget(join)
            message = f"Not started: {_said(problem)}."
            self._seal_elsewhere(work, index, tool, "journal_unavailable", message, "rejected", waited)
        else:
            record = done.result().get(key)
            told = verdict(record, work.filed[index].digest, harmless=tool.policy.repeatable)
            if told != "join":
                self._forget(join)
            if told == "run":
                self._set_going(work, index, ready=join.ready)
                return
            if not self._act(work, index, tool, told, record, waited=waited):
                return
        result = work.results[index]
        self._settle(work, index, result is not None and result.ok)

    def _set_going(self, work: Work, index: int, *, ready: bool) -> None:
        """A call that waited for the same call elsewhere is to run after all: it is looked over anew."""
        if (
            work.closing is None
            and self._check(work, index, self.core.any_gated or work.resumed is not None or work.gated is not None)
            is not None
            and self._reserve_anew(work, index)
        ):
            if ready:
                self._offer_ready(work, (index,))
            return
        if work.closing is not None:
            self._seal_closed(work, index)
        self._settle(work, index, False)

    def _broken(self, work: Work, index: int, fault: Exception) -> None:
        """A fault of Towerman's own over a call that is not granted: it has its result, and the batch ends."""
        if work.results[index] is None:
            self._seal_plain(work, index, fault)
        work.error = work.error or fault
        self._close(work, "cancelled", "cancelled", f"Towerman failed ({type(fault).__name__})")
        self._hand_on(work)

    def _look_at_joins(self, now: float) -> float:
        """Refuse joins that have waited long enough; the instant at which the next one has."""
        following = NEVER
        for join in list(self._joins):
            work, index = join.work, join.index
            if join.due > now:
                following = min(following, join.due)
                continue
            tool = work.tools[index]
            if join.record is not None and now < work.run.limit and work.results[index] is None:
                try:
                    self._followed_enough(join)
                except Exception as fault:
                    self._broken(work, index, fault)
                continue
            self._forget(join)
            if work.results[index] is not None or tool is None:
                continue
            waited = now - join.since
            code: Code = "deadline_exceeded" if now >= work.run.limit else "wait_timeout"
            message = (
                f"Not started: waited {waited:g} s for the same call, which is at work elsewhere. Whether it takes "
                "effect there is not known yet; handed in again, this call is answered with what comes of it."
            )
            try:
                self._seal_elsewhere(work, index, tool, code, message, "rejected", waited)
                self._settle(work, index, False)
            except Exception as fault:
                self._broken(work, index, fault)
        return following

    def _forget(self, join: Join) -> None:
        """A join waits no more."""
        self._joins.pop(join, None)
        if join.work.joins is not None:
            join.work.joins.pop(join.index, None)
        if join in self.core.joined:
            with self.core.lock:
                self.core.joined.pop(join, None)
        join.stop()

    def _seal_elsewhere(
        self, work: Work, index: int, tool: Tool, code: Code, message: str, outcome: Outcome, waited: float
    ) -> None:
        """Seal a call that does not start since the same call is at work elsewhere."""
        work.keywords[index] = None
        work.wants[index] = None
        waited_for = (*work.waited_for.get(index, ()), SAME_CALL)
        result = sealing.elsewhere(index, work.calls[index], tool, code, message, outcome, waited, waited_for)
        self._seal(work, index, result, self.core.now())

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
        never: bool = False,
        retry_after: float | None = None,
    ) -> None:
        """As ever; but what waits for the same call elsewhere may take effect there, and what a worker died over may
        have taken effect.
        """
        join = work.joins.get(index) if work.joins else None
        tool = work.tools[index]
        if join is None and code in _FOR_GOOD and tool is not None and work.results[index] is None:
            filed = work.filed.get(index) if work.filed is not None else None
            if filed is not None and filed.before and filed.claim is not None:
                work.keywords[index] = None
                work.wants[index] = None
                message = f"{message} {_BEFORE}"
                call = work.calls[index]
                result = sealing.elsewhere(index, call, tool, code, message, outcome, waited, waited_for)
                self._seal(work, index, result, self.core.now())
                return
        if join is None and outcome != "pending" and tool is not None and self._is_with_another(work, index):
            self._seal_elsewhere(work, index, tool, code, message, outcome, waited)
            return
        if join is None or tool is None or work.results[index] is not None:
            super()._refuse(
                work,
                index,
                code,
                message,
                outcome,
                waited=waited,
                waited_for=waited_for,
                never=never,
                retry_after=retry_after,
            )
            return
        self._forget(join)
        self._seal_elsewhere(work, index, tool, code, message, outcome, self.core.now() - join.since)

    # ================================================================ intents

    def _intend(self, job: Job, keywords: dict[str, object], own: dict[str, object]) -> bool:
        """Write down that a granted call is to start. False: that is done already, at an attempt before this one.

        Args:
            job: the call.
            keywords: what it is run with: its own arguments, or those of its group in one.
            own: its own.
        """
        core, work = self.core, job.work
        assert work.filed is not None and core.journal is not None
        filed = work.filed.get(job.index)
        if filed is None or filed.begun:
            return False
        riders = self._riders(work, job.index)
        places = [job.index, *riders]
        intents = [self._intent(work, index, job.tool) for index in places]
        filed.riders = tuple(work.filed[one] for one in riders)
        job.intending = True
        now = core.now()
        job.due = min(now + JOURNAL_SECONDS, work.run.limit)
        if job.due < self._timer_at:
            self._arm(job.due)
        future = core.journal.begin_all(intents)
        self._when(future, lambda done: self._intended(job, keywords, own, places, done), work, job.index, job)
        return True

    def _riders(self, work: Work, index: int) -> list[int]:
        """Open calls whose arguments go into the run of this one."""
        group = work.groups.get(index) if work.groups is not None else None
        if group is None or not group.merged or group.source != index or work.filed is None:
            return []
        return sorted(one for one in group.inside if one in work.filed and not work.filed[one].begun)

    def _intent(self, work: Work, index: int, tool: Tool) -> Intent:
        assert work.filed is not None
        filed = work.filed[index]
        filed.token = os.urandom(16)
        approval, edited = (None, None) if filed.claim is None else carrying.used(self.core, work, index)
        return Intent(
            filed.token,
            filed.key,
            filed.digest,
            tool.name,
            work.run.run_id,
            *(filed.place or (work.number, index)),
            str(work.calls[index].id)[:ID_CHARACTERS],
            work.run.tenant,
            tool.policy.repeatable,
            tool.effect_free,
            filed.claim,
            approval,
            edited,
            work.batch_key,
        )

    def _intended(
        self,
        job: Job,
        keywords: dict[str, object],
        own: dict[str, object],
        places: list[int],
        done: Future[None],
    ) -> None:
        """On the loop: the journal has written the intents of a granted call, or it has not."""
        core, work, index = self.core, job.work, job.index
        assert work.filed is not None and core.journal is not None
        problem = done.exception()
        if job.sealed:  # given up between its grant and its first line, and the intents with it
            return
        job.intending = False
        if problem is None:
            for filed in [work.filed[one] for one in places]:
                if filed.token:  # else it was sealed meanwhile
                    filed.begun = True
                    core.count_filed("intents")
            key = work.filed[index].key
            if key is not None:
                with core.lock:
                    core.flights[key] = job
            if core.emit is not None:
                self._tell(work, index, "intended", waited=core.now() - job.granted)
            self._launch(job, keywords)
        elif isinstance(problem, NotBegun):
            self._forestalled(job, own, problem)
        elif isinstance(problem, NotCleared):
            self._not_cleared(job, problem)
        elif isinstance(problem, Unsettled):
            self._never_started(job, "lease_lost", "Not started: another worker has this call by now.", "rejected")
        else:
            core.count_filed("unavailable")
            message = _UNAVAILABLE.format(why=_said(problem))
            self._never_started(job, "journal_unavailable", message, "rejected")

    def _not_cleared(self, job: Job, problem: NotCleared) -> None:
        """When it was to be used, the approval of a deferred call turned out not to hold; or another decision was
        written down before, and the call goes back into the queue, to be run as that one says.
        """
        answer = carrying.NOT_CLEARED.get(problem.why)
        if answer is None:
            self._never_started(job, "approval_missing", sealing.UNDECIDED, "pending")
        else:
            if answer[0] == "approval_expired":
                self._expired(job.work, job.index)
            self._never_started(job, *answer, "rejected")

    def _forestalled(self, job: Job, own: dict[str, object], problem: NotBegun) -> None:
        """Somebody else has begun a granted call, or one whose arguments are in its run, since it was looked up."""
        core, work, index, entry = self.core, job.work, job.index, job.entry
        told, record = problem.told[0]
        if work.groups is not None and len(problem.told) > 1:
            group = work.groups[index]
            for one in group.members:
                work.groups.pop(one, None)
            group.source, group.inside, group.note = -1, frozenset(), ""
        if told == "run":  # it is one of the others: this one runs alone
            if not self._intend(job, own, own):
                self._launch(job, own)
            return
        job.sealed = True
        work.jobs.pop(index, None)
        self._give_back(entry)
        if work.results[index] is not None:  # by what giving back has brought about
            return
        if work.closing is not None:
            self._seal_closed(work, index)
            self._settle(work, index, False)
            return
        waited = core.now() - entry.since
        if told == "join":
            left = max(0.0, entry.wants.max_wait - (job.granted - entry.since))
            sealed = self._join(work, index, job.tool, left)
            if not sealed and work.joins is not None and index in work.joins:
                work.joins[index].ready = True
        else:
            sealed = self._act(work, index, job.tool, told, record, waited=waited)
        if sealed:
            result = work.results[index]
            self._settle(work, index, result is not None and result.ok)

    def _look_at_filing(self, job: Job, now: float) -> None:
        """A call that waits for the journal: has it waited long enough?"""
        if job.due > now:
            return
        if job.outcome is not None:
            self._concluded(job, None)
        elif now >= job.work.run.limit:
            self._never_started(job, "deadline_exceeded", "Not started: its time was over.", "rejected")
        else:
            self.core.count_filed("unavailable")
            said = f"the journal did not answer within {JOURNAL_SECONDS:g} s"
            self._never_started(job, "journal_unavailable", _UNAVAILABLE.format(why=said), "rejected")

    def _effect_key(self, work: Work, index: int, tool: Tool) -> str:
        """An idempotency key for a handler whose call came without one: the same in each attempt, and another one for
        every other call. No two calls may have the same, nor none: a handler that drops what it has seen would drop the
        second one's effect.
        """
        core = self.core
        filed = work.filed.get(index) if work.filed is not None else None
        if filed is not None:
            if filed.key is None or core.journal_key is None:
                return effect_key(filed.token, b"")
            return effect_key(core.journal_key, filed.key)
        found = self._identity(work, index, tool, None)
        if found is None:  # every hand-in is new (S14)
            if work.salt is None:
                work.salt = os.urandom(16)
            return effect_key(work.salt, index.to_bytes(8, "big"))
        secret = core.policy.secret or ""
        raw = secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else secret
        return effect_key(raw, place(raw, found))

    # ================================================================ outcomes

    def _conclude(self, job: Job, result: Result, now: float) -> bool:
        """A call has ended that the journal knows of: its outcome is written down before its result is sealed."""
        work, index, core = job.work, job.index, self.core
        filed = work.filed.get(index) if work.filed is not None else None
        if filed is None or not filed.begun or filed.told or job.why is not None or job.ended or core.journal is None:
            return False
        filed.told = True
        answer = Answer.of(result, self._value_for_others(work, index, result))
        ended = [(filed.token, answer)]
        if result.ok or result.applied != "no":
            for one in self._ridden(work, index):
                ended.append((one.token, answer))
                one.told = True
        job.outcome = result
        job.sealed = False
        work.jobs[index] = job
        self._busy[work] = None
        job.due = now + OUTCOME_SECONDS
        if job.due < self._timer_at:
            self._arm(job.due)
        self._when(core.journal.finish_all(ended), lambda done: self._concluded(job, done), work, index, job)
        return True

    @staticmethod
    def _value_for_others(work: Work, index: int, result: Result) -> str | None:
        """What a step of a plan came to, where others refer to it: whole, so that they can go on after a crash."""
        if index not in work.referred or not result.ok:
            return None
        try:
            return json.dumps(whole_value(index, lambda _: result.value), ensure_ascii=False, separators=(",", ":"))
        except (UnresolvedReference, ValueError, RecursionError):  # whoever refers to it is told in its turn
            return None

    @staticmethod
    def _ridden(work: Work, index: int) -> list[Filed]:
        """Open calls whose arguments were in the run of this one."""
        group = work.groups.get(index) if work.groups is not None else None
        if group is None or not group.merged or group.source != index or work.filed is None:
            return []
        return [
            work.filed[one]
            for one in sorted(group.inside)
            if one in work.filed and work.filed[one].begun and not work.filed[one].told
        ]

    def _concluded(self, job: Job, done: Future[None] | None) -> None:
        """On the loop: an outcome is written down, or could not be; `None`: it takes too long."""
        work, index, result = job.work, job.index, job.outcome
        if job.sealed or result is None:
            return
        job.sealed = True
        work.jobs.pop(index, None)
        if done is None or done.exception() is not None:
            self.core.count_filed("unwritten")
            result = sealing.unwritten(result)
        if work.results[index] is None:
            self._seal(work, index, result, self.core.now())
        self._settle(work, index, result.ok)

    def _file(self, work: Work, index: int, result: Result) -> None:
        """A call is sealed: tell the journal what it came to, where it is not told yet. Nobody waits for that."""
        core = self.core
        assert work.filed is not None
        filed = work.filed.get(index)
        if filed is None or core.journal is None:
            return
        if filed.key is not None and filed.key in core.flights and not result.still_running:
            with core.lock:
                core.flights.pop(filed.key, None)
        if work.joins and index in work.joins:
            self._forget(work.joins[index])
        if filed.token and not filed.begun:
            self._take_intent_back(filed)
        if filed.told:
            return
        if filed.begun:
            filed.told = True
            if result.started:
                core.journal.finish(filed.token, Answer.of(result), running=result.still_running)
            else:
                core.journal.withdraw(filed.token)
            return
        tool = work.tools[index]
        # What did not answer may run again. A call that may change something was begun, or another one answers it.
        if tool is None or filed.key is None or not result.started or result.outcome not in ("ok", "error"):
            return
        if tool.effect_free or result.shared_with is not None:
            filed.told = True
            answer = Answer.of(result, self._value_for_others(work, index, result))
            # What others were given has to be the same when the plan is gone on with.
            core.journal.note(self._intent(work, index, tool), answer, again=index in work.referred)

    def _take_intent_back(self, filed: Filed) -> None:
        """A call was given up while its intent was written, with those that were to go into its run."""
        assert self.core.journal is not None
        for one in (filed, *filed.riders):
            if one.token and not one.begun:
                self.core.journal.withdraw(one.token)
                one.token = b""
        filed.riders = ()

    def _file_ended(self, job: Job) -> None:
        """The work of a call has ended by a cancel, and says nothing more: of an orphan, that it goes on no longer."""
        core, work = self.core, job.work
        filed, result = (work.filed or {}).get(job.index), work.results[job.index]
        if filed is None or not filed.begun or core.journal is None or result is None or not result.still_running:
            return
        if filed.key is not None:
            with core.lock:
                core.flights.pop(filed.key, None)
        core.journal.finish(filed.token, Answer.of(result))

    def _file_late(self, job: Job, code: Code | None, applied: Applied, content: str) -> None:
        """What came of a call after it was sealed, or told to stop: it settles what was unknown."""
        core, work = self.core, job.work
        filed = work.filed.get(job.index) if work.filed is not None else None
        if filed is None or not filed.begun or core.journal is None:
            return
        if filed.key is not None:
            with core.lock:
                core.flights.pop(filed.key, None)
        message = "The call succeeded, after it had been given up." if code is None else "The call failed."
        outcome: Outcome = "ok" if code is None else "error"
        if code is not None:
            content = sealing.failure(code, content or message, outcome, True, applied, "unknown")
        size = len(content.encode("utf-8", "replace"))
        answer = Answer(
            outcome, code, applied, "unknown" if code else "no", message=message, content=content, original_bytes=size
        )
        core.journal.finish(filed.token, answer)


def _said(problem: BaseException) -> str:
    """What is wrong with the journal, for the model: without the name of a file."""
    trouble = problem.trouble if isinstance(problem, JournalUnavailable) else ""
    return _TOLD.get(trouble, "the journal cannot be used")


_TOLD: Final = {
    "full": "the disk of the journal is full",
    "locked": "another program keeps the journal locked",
    "read-only": "the journal cannot be written",
    "corrupt": "the journal is damaged",
    "gone": "the journal is not there any more",
    "closed": "the journal is closed",
}
