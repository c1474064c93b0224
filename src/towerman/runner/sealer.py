"""The sealer: writes the one result of each call, and tells the observers.

Theory. However a call ends, what it comes to is decided here from what is known at that moment: the outcome, whether
it took effect, whether another try helps, how long it waited and ran. A result is written once, at its index; whoever
comes later is not heard. Where the words for a result cannot be made, a plain one is written in its place: no fault of
ours may cost a call its answer.

House rules. Synchronous, so that no cancel can come between. What a batch does beyond its results (going on, ending
early) is the runner's: it is named here and done there.

Not here: the words themselves (sealing), when a call is sealed and what follows (runner).
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from typing import Final, cast

from towerman import retrying, sealing
from towerman.bounds import Encoded, EncodingError, encode
from towerman.calls import Applied, Outcome, Result, Retryable, make_result
from towerman.core import Core
from towerman.errors import Code, ToolError
from towerman.leftovers import DeadLetter
from towerman.tokens import estimate
from towerman.tools import Tool
from towerman.trace import ID_CHARACTERS, UNKNOWN_TOOL, Event, Kind
from towerman.work import NOT_STARTED, Again, Failed, Job, Work

_APPLIED: Final = ("no", "yes", "unknown")


class Sealer:
    """Results of one loop's calls; the runner goes on from here.

    Args:
        core: what all loops of the tower share.
    """

    def __init__(self, core: Core) -> None:
        self.core = core

    def _file(self, work: Work, index: int, result: Result) -> None:
        """A call is sealed: tell the journal what it came to."""
        raise NotImplementedError  # pragma: no cover - filing's

    def _conclude(self, job: Job, result: Result, now: float) -> bool:
        """A call has ended that the journal knows of: its outcome is written down before its result is."""
        raise NotImplementedError  # pragma: no cover - filing's

    def _file_ended(self, job: Job) -> None:
        """The work of a call has ended by a cancel, and says nothing more."""
        raise NotImplementedError  # pragma: no cover - filing's

    def _file_late(self, job: Job, code: Code | None, applied: Applied, content: str) -> None:
        """What came of a call after it was sealed, or told to stop."""
        raise NotImplementedError  # pragma: no cover - filing's

    def _close(self, work: Work, code: Code, outcome: Outcome, reason: str) -> None:
        """End a batch early."""
        raise NotImplementedError  # pragma: no cover - the runner's

    def _close_share(self, work: Work, index: int, result: Result) -> None:
        """A call is sealed that budgets may count."""
        raise NotImplementedError  # pragma: no cover - that of spending

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
        """Seal a call that does not start, unless it is sealed; `never`: nor would it if it came again.

        One that has started before, and is not tried again, keeps what came of that.
        """
        if work.results[index] is not None:
            return
        if work.again is not None and index in work.again:
            self._seal_as_it_was(work.again[index], code, message, outcome, waited, waited_for)
            return
        work.keywords[index] = None
        work.wants[index] = None
        try:
            result = sealing.refused(
                index,
                work.calls[index],
                code,
                message,
                outcome,
                waited,
                waited_for,
                never=never,
                retry_after=retry_after,
            )
        except Exception as fault:
            self._seal_plain(work, index, fault)
            return
        self._seal(work, index, result, self.core.now())

    def _seal_plain(self, work: Work, index: int, fault: Exception) -> None:
        """Seal a call that does not start where the words for it could not be made."""
        work.error = work.error or fault
        again = work.again.get(index) if work.again is not None else None
        if again is None:
            result = sealing.faulty(index, work.calls[index], False, "no")
        else:
            self._up(again)
            result = sealing.faulty(index, work.calls[index], True, again.applied, attempts=again.attempts)
        self._seal(work, index, result, self.core.now())

    def _seal_closed(self, work: Work, index: int, *, waited: float = 0.0, waited_for: tuple[str, ...] = ()) -> None:
        if work.closing is not None:
            code, outcome, reason = work.closing
            self._refuse(
                work, index, code, sealing.closing(code, reason), outcome, waited=waited, waited_for=waited_for
            )

    def _up(self, again: Again) -> None:
        """A call rests no more: it is offered again, or sealed."""
        if again.resting:
            again.resting = False
            with self.core.lock:  # several loops count
                self.core.backing_off -= 1

    def _seal_as_it_was(
        self, again: Again, code: Code, message: str, outcome: Outcome, waited: float, waited_for: tuple[str, ...]
    ) -> None:
        """Seal a call whose further attempt is refused, or called off: it comes to what its last one came to (S8)."""
        work, index, failed = again.work, again.index, again.failed
        now = self.core.now()
        self._up(again)
        again.waited += waited
        again.waited_for = tuple(dict.fromkeys((*again.waited_for, *waited_for)))
        if waited:
            again.stretches.append((now - waited, None, now))
        work.keywords[index] = None
        work.wants[index] = None
        try:
            if outcome == "cancelled":
                failed = failed._replace(outcome=outcome, code=code)
            elif self.core.emit is not None:
                self._tell(work, index, "retry_refused", code=code, attempt=again.attempts + 1)
            again.job.note = sealing.not_again(message)
            self._seal_failed(again.job, failed, now, over=True)
        except Exception as fault:
            self._seal_plain(work, index, fault)

    def _seal_value(self, job: Job, value: object, encoded: Encoded | EncodingError, now: float) -> None:
        tool = job.tool
        policy = tool.policy
        if isinstance(encoded, EncodingError):
            applied: Applied = "no" if tool.effect_free else "yes"
            self._seal_failure(job, now, "error", "encoding_error", str(encoded), applied, "no", value=value)
            return
        work, index, entry = job.work, job.index, job.entry
        waited, ran, attempts = job.granted - entry.since, now - job.started, 1
        waited_for = entry.blocked_by
        message = "The call succeeded."
        again = job.again
        if again is not None:
            again.add(job, waited, ran, now)
            waited, ran, waited_for, attempts = again.waited, again.ran, again.waited_for, again.attempts
            message = f"The call succeeded at attempt {attempts}."
        if work.waited_for:
            waited_for = work.waited_for.get(index, ()) + waited_for
        if work.groups is not None:
            message += self._joint(work, index)
        if work.gated is not None and index in work.gated and work.gated[index].changed:
            message += sealing.WITH_OTHERS
        self._seal_job(
            job,
            make_result(
                index,
                work.calls[index].id,
                policy.name,
                "ok",
                None,
                message,
                encoded.text,
                value=value,
                started=True,
                applied="no" if tool.effect_free else "yes",
                waited=waited,
                ran=ran,
                waited_for=waited_for,
                attempts=attempts,
                original_bytes=encoded.original_bytes,
                handle=encoded.handle if type(encoded) is sealing.Bounded else None,
            ),
            now,
        )
        self.core.learn(policy.name, now - job.started)
        if again is not None:
            again.forget()

    def _seal_error(self, job: Job, error: BaseException, now: float) -> None:
        if self.core.policy.debug:
            print_traceback(error)
        self._seal_failed(job, self._failed(job, error), now)
        leaving = exit_in(error)
        if leaving is not None:
            self._interrupt(job.work, leaving)

    def _told_of(self, tool: Tool, error: BaseException) -> tuple[Code, str, Applied]:
        """What the model is told of what a handler raised."""
        applied: Applied = "no" if tool.effect_free else "unknown"
        if isinstance(error, asyncio.CancelledError):
            return "handler_cancelled", "The tool cancelled itself before it answered.", applied
        if retrying.rate_limited(error):
            return "rate_limited", sealing.rate_limited(retrying.asked_for(error, self.core.wall())), "no"
        if isinstance(error, ToolError):
            given = getattr(error, "applied", None)
            applied = cast("Applied", given) if isinstance(given, str) and given in _APPLIED else applied
            return "handler_error", _text_of(error, tool.max_result_bytes // 2), applied
        return "handler_error", sealing.raised(error), applied

    def _failed(self, job: Job, error: BaseException | None) -> Failed:
        """What an attempt came to that raised, or was told to stop and has ended."""
        tool, why = job.tool, job.why
        if why is not None and (error is None or exit_in(error) is None):
            outcome, message = sealing.stopped(
                why, tool.timeout, job.reason, effect_free=tool.effect_free, still_running=False
            )
            return Failed(outcome, why, message, "no" if tool.effect_free else "unknown", None, None)
        assert error is not None
        code, message, applied = self._told_of(tool, error)
        return Failed("error", code, message, applied, error, retrying.asked_for(error, self.core.wall()))

    def _interrupt(self, work: Work, error: KeyboardInterrupt | SystemExit) -> None:
        """A handler wants the process to end: the batch is sealed, then the caller gets it."""
        if not isinstance(work.error, KeyboardInterrupt | SystemExit):
            work.error = error
        self._close(work, "cancelled", "cancelled", f"the process was interrupted ({type(error).__name__})")

    def _seal_stopped(self, job: Job, now: float, *, still_running: bool) -> None:
        """Seal a call that was told to stop while it ran."""
        tool, why = job.tool, job.why
        assert why is not None
        outcome, message = sealing.stopped(
            why, tool.timeout, job.reason, effect_free=tool.effect_free, still_running=still_running
        )
        applied: Applied = "no" if tool.effect_free else "unknown"
        self._seal_failure(job, now, outcome, why, message, applied, still_running=still_running)

    def _keep_letter(
        self, job: Job, value: object, error: BaseException | None, encoded: Encoded | EncodingError | None, now: float
    ) -> None:
        """What a call brings after it was sealed, or was told to stop: no result any more, but kept for a while."""
        work, index, tool = job.work, job.index, job.tool
        if isinstance(error, asyncio.CancelledError):
            if work.filed is not None:
                self._file_ended(job)
            return
        applied: Applied = "no" if tool.effect_free else "yes"
        code: Code | None = None
        if error is None:
            if encoded is None:
                try:
                    encoded = sealing.encoded(tool, value)
                except BaseException as wrong:  # of the tool's own encoder
                    encoded = EncodingError(sealing.raised(wrong))
            content = encoded.text if isinstance(encoded, Encoded) else str(encoded)
            code = None if isinstance(encoded, Encoded) else "encoding_error"
        else:
            code, content, applied = self._told_of(tool, error)
        if work.filed is not None:
            self._file_late(job, code, applied, content)
        result = work.results[index]
        letter = DeadLetter(
            work.run.run_id,
            work.number,
            index,
            str(work.calls[index].id)[:ID_CHARACTERS],
            tool.name,
            error is None,
            applied,
            now - work.sealed_at[index] if result is not None else 0.0,
            content,
        )
        self.core.letters.append(letter)

    def _seal_failed(self, job: Job, failed: Failed, now: float, *, over: bool = False) -> None:
        """Seal a call with what an attempt came to; `over`: its last one, which ended before and is counted in."""
        outcome, code, message, applied, error, after = failed
        self._seal_failure(job, now, outcome, code, message, applied, error=error, retry_after=after, over=over)

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
        retry_after: float | None = None,
        still_running: bool = False,
        over: bool = False,
    ) -> None:
        """Seal a call that had started and has no ordinary answer."""
        work, index, entry = job.work, job.index, job.entry
        waited, ran, waited_for, attempts = job.granted - entry.since, ran_for(job, now), entry.blocked_by, 1
        again = job.again
        if again is not None:
            if not over:
                again.add(job, waited, ran, now)
            waited, ran, waited_for, attempts = again.waited, again.ran, again.waited_for, again.attempts
            applied = retrying.applied_in_all(again.applied, applied)
            message += sealing.tried(attempts)
        message += job.note
        if retryable is None:
            retryable = "yes" if applied == "no" or job.tool.policy.repeatable else "unknown"
        message = sealing.clean(message)
        if work.groups is not None:
            message += self._joint(work, index)
        content = sealing.failure(code, message, outcome, True, applied, retryable)
        self._seal_job(
            job,
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
                started=True,
                applied=applied,
                retryable=retryable,
                retry_after=retry_after,
                waited=waited,
                ran=ran,
                waited_for=work.waited_for.get(index, ()) + waited_for,
                attempts=attempts,
                still_running=still_running,
                original_bytes=len(content.encode()),
            ),
            now,
        )
        if again is not None:
            again.forget()

    @staticmethod
    def _joint(work: Work, index: int) -> str:
        """What is said of a call in whose run others were merged; nothing of any other."""
        group = work.groups.get(index) if work.groups is not None else None
        return group.note if group is not None and group.source == index else ""

    def _seal_job(self, job: Job, result: Result, now: float) -> None:
        """Write the result of a call that has run, or let the journal have it first."""
        if job.work.filed is None or not self._conclude(job, result, now):
            self._seal(job.work, job.index, result, now)

    def _seal(self, work: Work, index: int, result: Result, now: float) -> None:
        """Write the one result of a call."""
        core = self.core
        if work.filed is not None:
            try:
                self._file(work, index, result)
            except Exception as fault:  # whatever the journal is not told, the caller is
                work.error = work.error or fault
        work.results[index] = result
        work.sealed_at[index] = now
        work.left -= 1
        if work.shares is not None:
            try:
                self._close_share(work, index, result)
            except Exception as fault:  # its share goes back with the batch
                work.error = work.error or fault
        if result.code is None:
            core.answered += 1
        else:
            core.count(result.outcome, result.code)
        if core.emit is not None:
            self._tell_sealed(work, index, result)
        if work.gated is not None:
            self._keep_result(work, index, result)
        if work.on_result is not None:
            try:
                work.on_result(result)
            except BaseException as broken:  # the caller's own hook: the batch is finished first, then it is told
                work.error = work.error or broken
        if work.run.fail_fast and result.outcome in ("error", "timed_out") and work.closing is None:
            culprit = f"call {index} ({result.tool}) failed with {result.code}"
            self._close(work, "sibling_failed", "cancelled", culprit)

    def _keep_result(self, work: Work, index: int, result: Result) -> None:
        """A call that came back pending before has its result: whoever goes on with its batch again gets the same."""
        approval = work.gated.get(index) if work.gated is not None else None
        if approval is None or not approval.kept or approval.settled:
            return
        with self.core.lock:
            if result.outcome == "pending" and result.handle is not None:  # in the durable queue, and once is enough
                self.core.book.settle(approval, result)
            elif approval.holder is work and not result.started:
                approval.release()
            elif result.outcome == "pending":
                return
            elif approval.holder is work or (approval.needed and approval.state in ("denied", "expired")):
                self.core.book.settle(approval, result)

    def _tell_sealed(self, work: Work, index: int, result: Result) -> None:
        self._tell(
            work,
            index,
            "finished" if result.started else "rejected",
            outcome=result.outcome,
            code=result.code,
            waited=result.waited,
            ran=result.ran,
            waited_for=result.waited_for or None,
            size=result.original_bytes,
            reason=self._reason(work, index) if result.outcome == "cancelled" else None,
            shared_with=result.shared_with,
            tokens=self._estimated(result),
            attempt=result.attempts if result.attempts > 1 else None,
        )

    def _estimated(self, result: Result) -> int | None:
        """The tokens of a content, where nobody's own counter is to be asked."""
        return estimate(result.content) if self.core.policy.count_tokens is None else None

    @staticmethod
    def _reason(work: Work, index: int) -> str | None:
        """Why a call was cancelled: by itself, or with its batch."""
        return work.reasons.get(index) or (work.closing[2] if work.closing is not None else None)

    def _tell(self, work: Work, index: int | None, kind: Kind, **fields: object) -> None:
        emit = self.core.emit
        if emit is None:
            return
        call_id = tool = None
        if index is not None:
            known = work.tools[index]
            tool = known.name if known is not None else UNKNOWN_TOOL
            call_id = str(work.calls[index].id)[:ID_CHARACTERS]
        step = (self.core.now(), kind, work.run.run_id, work.number, index, call_id, tool)
        emit(Event(*step, **fields))  # type: ignore[arg-type]  # the callers name the fields


def ran_for(job: Job, now: float) -> float:
    """Seconds since the first line; a thread that has only just taken the call may not have reached it."""
    return now - job.started if job.started != NOT_STARTED else 0.0


def _text_of(error: ToolError, limit: int) -> str:
    """What a handler tells the model, bounded; a subclass may have left it out, or made it something else."""
    text = getattr(error, "text", None)
    return encode(text, limit).text if isinstance(text, str) and text.strip() else "The tool failed."


def exit_in(error: BaseException) -> KeyboardInterrupt | SystemExit | None:
    """The wish to end the process that an exception is, or that a group holds; an interrupt goes first."""
    found: KeyboardInterrupt | SystemExit | None = None
    stack = [error]
    while stack:
        one = stack.pop()
        if isinstance(one, KeyboardInterrupt):
            return one
        if isinstance(one, SystemExit):
            found = one
        elif isinstance(one, BaseExceptionGroup) and not isinstance(one, ExceptionGroup):
            stack.extend(one.exceptions)
    return found


def print_traceback(error: BaseException) -> None:
    try:
        traceback.print_exception(error, file=sys.stderr)
    except Exception:  # a closed stderr must not cost a result
        return
