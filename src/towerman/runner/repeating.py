"""Attempts after the first: a call that has failed rests, and is offered to the gate again.

Theory (rule S9). The end of an attempt that is to be followed by another one is an end like any: what it held goes
back, and those who wait for it go on. Only its call is not sealed, and the plan is not told, so whoever stands behind
it in its batch stands there still. While it rests, the call holds nothing, stands in no queue and has no timer of its
own: the loop's one timer looks at it when its pause is over. Then it is offered like a first call: its wait is clocked
anew, and the bounds of queues, deadlines and `when_busy` hold for it as for any. If the gate refuses it, it comes to
what its last attempt came to; a refusal is never a reason to try again.

Only an attempt that has really ended is followed by another one. A thread that ran out of time, and a handler that
outlived its grace, were sealed then and are not heard here any more.

House rules. Whether and when is asked of `retrying`. Every attempt gets the arguments as they were for the first one,
whatever that one's handler did to them; calls that were merged stay merged, since an attempt with other arguments would
be another call.

Not here: what the last attempt comes to (sealer), whose turn it is (gate).
"""

from __future__ import annotations

import logging
from heapq import heappop, heappush
from typing import Final

from towerman import retrying, sealing
from towerman.errors import RateLimited
from towerman.gate import NEVER
from towerman.runner.asking import Asking
from towerman.runner.sealer import exit_in, print_traceback, ran_for
from towerman.runner.sharing import copy_of
from towerman.work import Again, Job, Slot, Work

_log: Final = logging.getLogger("towerman")


class Repeating(Asking):
    """What concerns attempts; the runner goes on from here."""

    _resting: list[Again]

    def _end_nested(self, job: Job) -> None:
        """A call has ended: so do the calls that it has made."""
        raise NotImplementedError  # pragma: no cover - the shell's

    def _settle(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed: let the plan go on."""
        raise NotImplementedError  # pragma: no cover - of the ends

    def _attempt(self, job: Job, keywords: dict[str, object]) -> dict[str, object]:
        """A call whose tool has `retry` is about to start: the arguments for this attempt."""
        work, core = job.work, self.core
        again = work.again.get(job.index) if work.again is not None else None
        if again is not None:
            job.again = again
            job.attempt = again.attempts + 1
            with core.lock:  # several loops count
                core.retries += 1
        try:
            mine = copy_of(keywords)
        except Exception as uncopyable:
            if job.tool.name not in core.uncopied:
                core.uncopied.add(job.tool.name)
                _log.warning(
                    "tool %r: its calls are not tried again where their arguments cannot be copied (%s)",
                    job.tool.name,
                    type(uncopyable).__name__[:100],
                )
            return keywords
        job.keywords = keywords
        return mine

    def _try_again(self, job: Job, error: BaseException | None, now: float) -> bool:
        """An attempt has failed and ended. If there is to be another one, all it held goes back and its call rests.

        Args:
            job: the attempt.
            error: what it raised; None: it was told to stop, and returned.
            now: the present instant.

        Returns:
            False: there is none, so this is what the call comes to.
        """
        core, work, retry, keywords = self.core, job.work, job.tool.retry, job.keywords
        late = job.why == "handler_timeout"
        if retry is None or keywords is None or work.closing is not None or not (late or job.why is None):
            return False
        if error is not None and exit_in(error) is not None:
            return False
        due = retrying.decide(
            retry, job.attempt, None if late else error, now, work.run.limit, core.chance, core.wall()
        )
        if isinstance(due, str):
            if due in ("retry_after", "deadline"):
                job.note = sealing.not_again(sealing.TOO_LONG if due == "retry_after" else sealing.TOO_LATE)
            return False
        loan = job.entry.loan
        if loan is not None and loan.out:  # and so is it
            job.note = sealing.not_again(sealing.AT_WORK)
            return False
        if error is not None and core.policy.debug:
            print_traceback(error)
        self._rest(job, keywords, error, due, now)
        return True

    def _rest(self, job: Job, keywords: dict[str, object], error: BaseException | None, due: float, now: float) -> None:
        """Give back what an attempt held, and let its call rest until it is due."""
        core, work, index = self.core, job.work, job.index
        failed = self._failed(job, error)
        again = job.again
        if again is None:
            again = job.again = Again(work, index)
            if work.again is None:
                work.again = {}
            work.again[index] = again
        ran = ran_for(job, now)
        again.add(job, job.granted - job.entry.since, ran, now)
        again.failed = failed
        again.applied = retrying.applied_in_all(again.applied, failed.applied)
        work.keywords[index] = keywords
        again.due = due
        with core.lock:
            job.ended = again.resting = True
            core.backing_off += 1
            decided = core.gate.finish(job.entry, now)
            notes = self._notes()
        heappush(self._resting, again)
        if core.emit is not None:
            step = {"code": failed.code, "ran": ran, "attempt": job.attempt, "pause": due - now}
            self._tell(work, index, "retrying", **step)
        if job.nested:
            self._end_nested(job)
        job.task = None  # whose context knows the job: no cycle is left for the collector
        if due < self._timer_at:
            self._arm(due)
        self._take(decided, notes)

    def _wake(self, now: float) -> None:
        """Offer those again whose pause is over."""
        due: dict[Work, list[tuple[int, Slot]]] = {}
        resting = self._resting
        while resting and (resting[0].due <= now or not resting[0].resting):
            again = heappop(resting)
            if again.resting:  # else it was sealed meanwhile
                self._up(again)
                due.setdefault(again.work, []).append((again.index, again.job.entry))
        for work, calls in due.items():
            try:
                self._offer_again(work, [index for index, _ in calls])
            except Exception as fault:
                for index, entry in calls:
                    self._faulty(work, index, entry, fault)

    def _offer_again(self, work: Work, indexes: list[int]) -> None:
        """Hand calls of one batch to the gate once more. What an attempt costs beyond permits is reserved before."""
        ready = indexes
        if work.shares is not None:
            ready = [index for index in indexes if self._reserve_again(work, index)]
            for index in indexes:
                if index not in ready:  # it keeps what its last attempt came to
                    self._settle(work, index, False)
        self._offer_ready(work, ready)

    def _next_due(self) -> float:
        """When the next call that rests is due."""
        return self._resting[0].due if self._resting else NEVER

    def _hear_limit(self, job: Job, error: RateLimited | ExceptionGroup[Exception]) -> None:
        """An attempt has raised this: if one in it says that a service refuses further calls, that is told on."""
        if any(isinstance(leaf, RateLimited) for leaf in retrying.leaves(error)):
            self._rate_limited(job, retrying.asked_for(error, self.core.wall()))

    def _rate_limited(self, job: Job, seconds: float | None) -> None:
        """The service behind a call refuses further ones for so long, as it says, or for a time that is not known.

        Told once for each attempt that ended so, before what the attempt held goes to others.
        """
        raise NotImplementedError  # pragma: no cover - of the ends
