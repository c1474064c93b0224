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

from towerman import sealing
from towerman.bounds import Encoded, EncodingError, encode, fit_batch, recut
from towerman.calls import Applied, Outcome, Result, Retryable, make_result, with_content
from towerman.core import Core
from towerman.errors import Code, ToolError
from towerman.leftovers import DeadLetter
from towerman.tools import Tool
from towerman.trace import ID_CHARACTERS, UNKNOWN_TOOL, Event, Kind
from towerman.work import NOT_STARTED, Job, Work

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
        """Seal a call that does not start, unless it is sealed; `never`: nor would it if it came again."""
        if work.results[index] is not None:
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
        self._seal(work, index, sealing.faulty(index, work.calls[index], False, "no"), self.core.now())

    def _seal_closed(self, work: Work, index: int, *, waited: float = 0.0, waited_for: tuple[str, ...] = ()) -> None:
        if work.closing is not None:
            code, outcome, reason = work.closing
            self._refuse(
                work, index, code, sealing.closing(code, reason), outcome, waited=waited, waited_for=waited_for
            )

    def _seal_value(self, job: Job, value: object, encoded: Encoded | EncodingError | None, now: float) -> None:
        tool = job.tool
        policy = tool.policy
        if encoded is None:
            try:
                encoded = sealing.encoded(tool, value)
            except BaseException as error:  # of the tool's own encoder: as if its handler had raised it
                self._seal_error(job, error, now)
                return
        if isinstance(encoded, EncodingError):
            applied: Applied = "no" if tool.effect_free else "yes"
            self._seal_failure(job, now, "error", "encoding_error", str(encoded), applied, "no", value=value)
            return
        work, index, entry = job.work, job.index, job.entry
        waited_for = entry.blocked_by
        if work.waited_for:
            waited_for = work.waited_for.get(index, ()) + waited_for
        message = "The call succeeded."
        if work.groups is not None:
            message += self._joint(work, index)
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
                waited=job.granted - entry.since,
                ran=now - job.started,
                waited_for=waited_for,
                attempts=1,
                original_bytes=encoded.original_bytes,
            ),
            now,
        )
        self.core.learn(policy.name, now - job.started)

    def _seal_error(self, job: Job, error: BaseException, now: float) -> None:
        tool = job.tool
        if self.core.policy.debug:
            _print_traceback(error)
        code, message, applied = self._told_of(tool, error)
        self._seal_failure(job, now, "error", code, message, applied, error=error)
        leaving = exit_in(error)
        if leaving is not None:
            self._interrupt(job.work, leaving)

    @staticmethod
    def _told_of(tool: Tool, error: BaseException) -> tuple[Code, str, Applied]:
        """What the model is told of what a handler raised."""
        applied: Applied = "no" if tool.effect_free else "unknown"
        if isinstance(error, asyncio.CancelledError):
            return "handler_cancelled", "The tool cancelled itself before it answered.", applied
        if isinstance(error, ToolError):
            given = getattr(error, "applied", None)
            applied = cast("Applied", given) if isinstance(given, str) and given in _APPLIED else applied
            return "handler_error", _text_of(error, tool.max_result_bytes // 2), applied
        return "handler_error", sealing.raised(error), applied

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
    ) -> None:
        """Seal a call that had started and has no ordinary answer."""
        work, index, entry = job.work, job.index, job.entry
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
                waited=job.granted - entry.since,
                ran=ran_for(job, now),
                waited_for=work.waited_for.get(index, ()) + entry.blocked_by,
                attempts=1,
                still_running=still_running,
                original_bytes=len(content.encode()),
            ),
            now,
        )

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
        if result.code is None:
            core.answered += 1
        else:
            core.count(result.outcome, result.code)
        if core.emit is not None:
            self._tell_sealed(work, index, result)
        if work.on_result is not None:
            try:
                work.on_result(result)
            except BaseException as broken:  # the caller's own hook: the batch is finished first, then it is told
                work.error = work.error or broken
        if work.run.fail_fast and result.outcome in ("error", "timed_out") and work.closing is None:
            culprit = f"call {index} ({result.tool}) failed with {result.code}"
            self._close(work, "sibling_failed", "cancelled", culprit)

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
        )

    @staticmethod
    def _reason(work: Work, index: int) -> str | None:
        """Why a call was cancelled: by itself, or with its batch."""
        return work.reasons.get(index) or (work.closing[2] if work.closing is not None else None)

    def _fit(self, work: Work) -> None:
        """Bring the whole batch under its bound: small results stay whole, large ones share what is left."""
        results, most = work.results, self.core.policy.max_batch_bytes
        if sum(len(result.content) for result in results if result is not None) * 4 <= most:
            return
        sizes = [len(result.content.encode()) if result is not None else 0 for result in results]
        cap = fit_batch(sizes, most)
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


def _print_traceback(error: BaseException) -> None:
    try:
        traceback.print_exception(error, file=sys.stderr)
    except Exception:  # a closed stderr must not cost a result
        return
