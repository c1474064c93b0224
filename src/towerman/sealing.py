"""The words of results: what the model is told when a call has no ordinary answer, and what is known of its effect.

Theory. A result without an answer is data, not prose: code, outcome, whether it started, whether it took effect,
whether trying again helps. The model gets the same as compact JSON, since not every provider has a flag for errors.
Nothing of an exception's text, of an argument or of a resource key goes in; types, numbers and declared names do.

House rules. Pure functions. The same inputs give the same bytes.

Not here: when a result is sealed (runner), how its size is bounded (bounds).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final

from towerman.bounds import Encoded, EncodingError, Keep, encode
from towerman.budgets import SECONDS, Lack, number
from towerman.calls import Applied, Call, Outcome, Result, Retryable, make_result, with_words
from towerman.errors import Code
from towerman.records import Answer, Record
from towerman.tools import Tool
from towerman.trace import ID_CHARACTERS

NAME_CHARACTERS: Final = 128
"""Longest part of a tool name that is kept in a result."""

REASON_CHARACTERS: Final = 200
"""Longest part of a canceller's words that is told and recorded."""

WORTH_ANOTHER_TRY: Final = frozenset(
    {
        "approval_expired",
        "circuit_open",
        "concurrency_limit",
        "rate_limited",
        "wait_timeout",
        "queue_full",
        "call_cap",
        "cancelled",
        "sibling_failed",
        "not_alone",
        "truncated_response",
        "would_deadlock",
        "journal_unavailable",
        "engine_unavailable",
        "lease_lost",
    }
)
"""Refusals after which the same call can succeed."""

ENDS_TURN: Final = frozenset(
    {
        "concurrency_limit",
        "wait_timeout",
        "queue_full",
        "rate_limited",
        "circuit_open",
        "budget_exhausted",
        "journal_unavailable",
        "engine_unavailable",
        "deadline_exceeded",
        "would_deadlock",
    }
)
"""Refusals about which a model can do nothing for now; with `on_refusal="end_turn"` the host is to stop."""

TOO_LONG: Final = "the service asks for a longer pause than this tool makes."
TOO_LATE: Final = "the run's deadline comes first."
AT_WORK: Final = "calls that it has made were still at work."
"""Why a call is not tried again."""

_REFUSALS: Final[Mapping[str, str]] = {
    "concurrency_limit": "Not started: {blocker} is busy, and this tool does not wait. Try again later.",
    "queue_full": "Not started: too many calls already wait ({blocker}). Try again later.",
    "wait_timeout": "Not started: waited {wait:g} s for {blocker}. Try again later.",
    "rate_limited": "Not started: the {blocker} lets no more calls start now.{later}",
    "circuit_open": "Not started: the {blocker} is open, since calls kept failing.{later}",
    "deadline_exceeded": "Not started: the run's deadline has passed.",
    "approval_expired": "Not started: its approval was over before its turn came.",
    "budget_exhausted": "Not started: the seconds of this run's budget are over.",
    "engine_unavailable": (
        "Not started: the engine that processes share cannot be asked, and this call counts in its limits. Try again "
        "later."
    ),
    "would_deadlock": (
        "Not started: it would wait for {blocker} for ever, since whoever holds that waits for calls that wait in turn "
        "for what this call's own caller holds."
    ),
}


DEFERRED_FOR: Final[Mapping[Code, str]] = {
    "concurrency_limit": "{blocker} is busy",
    "queue_full": "too many calls wait ({blocker})",
    "wait_timeout": "it waited in vain for {blocker}",
    "rate_limited": "the {blocker} lets no more calls start now",
    "engine_unavailable": "the engine that processes share cannot be asked",
}
"""Refusals of the gate for which a call may go into the durable queue, and why in words."""


def put_off(code: Code, why: str, handle: str, reader: str | None = None) -> str:
    """What the model is told of a call that has gone into the durable queue; `reader`: the tool that reads handles."""
    head = f"Deferred: {why}" if code == "deferred" else f"Held back: {why}"
    return (
        f"{head}. It will run later; this is not its answer. Do not call it again. "
        f"What comes of it is kept under the handle {handle}{f'; read that with {reader}' if reader else ''}."
    )


def queued(
    index: int,
    call: Call,
    code: Code,
    why: str,
    handle: str,
    waited: float,
    waited_for: tuple[str, ...],
    reader: str | None = None,
) -> Result:
    """The result of a call that has gone into the durable queue."""
    message = clean(put_off(code, why, handle, reader))
    content = failure(code, message, "pending", False, "no", "no", handle=handle)
    return make_result(
        index,
        call.id,
        str(call.tool)[:NAME_CHARACTERS],
        "pending",
        code,
        message,
        content,
        waited=waited,
        waited_for=waited_for,
        original_bytes=len(content.encode()),
        handle=handle,
    )


def answered_later(index: int, call: Call, answer: Answer, waited: float, waited_for: tuple[str, ...]) -> Result:
    """The result of a call that was deferred before, and has its answer by now."""
    started = answer.attempts > 0
    message = clean(f"{answer.message} {KEPT if started else DECIDED}")
    content = answer.content
    if answer.code is not None:
        content = failure(
            answer.code, message, answer.outcome, started, answer.applied, answer.retryable, answer.retry_after
        )
    return make_result(
        index,
        call.id,
        str(call.tool)[:NAME_CHARACTERS],
        answer.outcome,
        answer.code,
        message,
        content,
        started=started,
        applied=answer.applied,
        retryable=answer.retryable,
        retry_after=answer.retry_after,
        waited=waited,
        waited_for=waited_for,
        attempts=0,
        original_bytes=answer.original_bytes if answer.code is None else len(content.encode()),
        handle=answer.handle,
        replayed=True,
    )


DECIDED: Final = "That was decided before, when it came out of the durable queue; it is not tried again."


def refusal(code: Code, blocker: str, wait: float, *, never: bool = False, retry_after: float | None = None) -> str:
    """Why the gate refused, in a sentence.

    Args:
        code: the gate's code.
        blocker: what was in the way, as people are shown it.
        wait: the longest wait in seconds.
        never: it has less than the call takes, also when nothing is at work.
        retry_after: seconds after which trying again can help, where that is known.
    """
    if never:
        return f"Not started: it takes more of {blocker} than there is for it, even when nothing else is at work."
    later = " Try again later." if retry_after is None else f" Try again in {_rounded(retry_after):g} s."
    return _REFUSALS.get(code, "Not started.").format(blocker=blocker or "its turn", wait=wait, later=later)


def _rounded(seconds: float) -> float:
    """A wait for a person or a model: never too short, and with no more digits than help."""
    if seconds >= 10:
        return float(ceil(seconds))
    return ceil(seconds * 100) / 100


def notice(most: int, size: int) -> str:
    """What the model is told of a batch that was cut."""
    return (
        f"Ran {most} of {size} calls: at most {most} calls are run for one response. "
        "Narrow the request, or ask for the rest in the next turn."
    )


def capped(most: int, index: int, size: int) -> str:
    """Why a call beyond the cap does not start. The notice has no place of its own in a conversation: the last call
    carries it.
    """
    return notice(most, size) if index == size - 1 else f"Not run: at most {most} calls are run for one response."


def budget_of(lack: Lack) -> str:
    """A budget as people are shown it: `budget of run (calls)`; no tenant, no amount that was spent."""
    return f"budget of {lack.account.scope} ({lack.unit})"


def too_little(lack: Lack, left: float | None) -> str:
    """Why a call is refused for a budget. What it asked, and what others have spent, may be made of arguments: only
    limits are told.

    Args:
        lack: what there is too little of.
        left: seconds until it renews, or None.
    """
    account, unit = lack.account, lack.unit
    if unit == SECONDS:
        return f"Not started: the {number(account.lasts):g} seconds of this {account.scope}'s budget are over."
    limit = f"{number(account.limits[unit])} {unit}"
    whose = f"this {account.scope}'s budget of {limit}"
    later = "" if left is None else f" It renews in {_rounded(left):g} s."
    if lack.whole:
        return f"Not started: this response takes more than is left of {whose}, and is not run in part.{later}"
    if account.left(unit) > 0:
        return f"Not started: what is left of {whose} is not enough.{later}"
    return f"Not started: {whose} is used up.{later}"


def cut_short(lack: Lack, runs: int, size: int, left: float | None) -> str:
    """What the model is told of a batch of which a budget has refused some calls.

    Args:
        lack: what there was too little of.
        runs: calls that it has not refused.
        size: calls of the batch.
        left: seconds until it renews, or None.
    """
    told = too_little(lack, left)
    if lack.whole:
        return f"{_ran(told, runs, size)} Send fewer calls at once, or answer with what you have."
    if not lack.account.stops(lack.unit):
        return f"{_ran(told, runs, size)} Do without more of these calls."
    return stopped_short(told, runs, size)


def stopped_short(why: str, runs: int, size: int) -> str:
    """The same, where a budget was used up while calls waited; `why` is what the last of them was told."""
    return f"{_ran(why, runs, size)} Do not call more tools now; answer with what you have."


def _ran(why: str, runs: int, size: int) -> str:
    return f"Ran {runs or 'none'} of {size} call{'' if size == 1 else 's'}: {why.removeprefix('Not started: ')}"


def repeated(turns: int) -> str:
    """Why a call is refused that came before, again and again."""
    return (
        f"Not run: you have made this very call in {turns} turn{'' if turns == 1 else 's'} already, with nothing new "
        "in between. Use what it answered then, do something else, or answer with what you have."
    )


def unneeded(culprit: int, call: Call) -> str:
    """Why a call is skipped: the one that it needs has failed."""
    return f"Not run: call {culprit}{named(call)}, which it needs, did not succeed."


def unresolved(step: int, call: Call, reason: str) -> str:
    """Why a call is refused: a result that it refers to is not as its reference takes it to be."""
    return f"Not run: its reference to the result of call {step}{named(call)} leads nowhere: {reason}."


ELSEWHERE: Final = (
    "Not run: with the results that were filled in, it touches other resources than its arguments said before. Write "
    "those that name resources in their usual form, without '..' and in the type that the tool takes."
)
"""Why a call is refused whose siblings were ordered by less than it touches."""


def closing(code: Code, reason: str) -> str:
    """Why a call of a batch that is ended early does not start."""
    if code == "sibling_failed":
        return f"Not started: {reason}, and this run stops at the first failure."
    if code == "run_closed":
        return f"Not started: the run is closed ({reason})."
    return f"Not started: {reason}."


def stopped(why: Code, timeout: float, reason: str, *, effect_free: bool, still_running: bool) -> tuple[Outcome, str]:
    """Outcome and message of a call that was told to stop while it ran."""
    effect = "It has no side effect." if effect_free else "Whether it took effect is not known."
    goes_on = " Its work still goes on." if still_running else ""
    if why == "handler_timeout":
        return "timed_out", f"The call did not end within {timeout:g} s.{goes_on} {effect}"
    if why == "deadline_exceeded":
        return "timed_out", f"The run's deadline passed while the call was running.{goes_on} {effect}"
    if why == "lease_lost":
        return "cancelled", (
            "The call was told to stop: what it had of limits that processes share was lost, and may be another "
            f"call's by now.{goes_on} {effect}"
        )
    return "cancelled", f"The call was cancelled after it had started: {reason}.{goes_on} {effect}"


WITH_OTHERS: Final = " It was run with the arguments that came with its approval."
UNDECIDED: Final = "Not run yet: it waits for a person's approval."
TAKEN: Final = "Not run again: whoever went on with this batch before is at work with it."
USED: Final = "Not run again: it has its result from when this batch was gone on with before."
UNAPPROVED: Final = "Not run: nobody has approved it."
OVER: Final = "Not run: nobody approved it in time."
NOT_VALID: Final = "Not run: what was approved does not hold any more."
CHANGED: Final = (
    "Not run: the tool, or what its arguments come to, is not any more what its approval was asked for. Call it again."
)
OUTSIDE: Final = "Not run: the arguments that came with its approval touch something that the call does not touch."


def held_behind(culprit: int, call: Call) -> str:
    """Why a call is put off: another one, after which it comes, waits for a person."""
    return f"Not run yet: call {culprit}{named(call)}, after which it comes, waits for a person's approval."


def denied(reason: str) -> str:
    """Why a call does not run: a person said no."""
    told = " ".join(reason[:REASON_CHARACTERS].split())
    return f"Not run: a person denied it{': ' + told if told else '.'}"


def edited(message: str) -> str:
    """Why a call does not run: the arguments that a person gave in place of the model's do not fit."""
    return f"Not run: the arguments that came with its approval do not fit. {message}"


def merged(calls: Sequence[int]) -> str:
    """What is added to the message of a call in whose run others were merged."""
    listed = ", ".join(map(str, calls[:8])) + (f" and {len(calls) - 8} more" if len(calls) > 8 else "")
    return f" It was merged with call{'' if len(calls) == 1 else 's'} {listed}."


def shared(
    index: int,
    call: Call,
    result: Result,
    source: Call,
    value: object,
    waited_for: tuple[str, ...],
    message: str,
    others: int,
) -> Result:
    """The result of a call that the run of another one answered.

    Args:
        index: the call's.
        call: itself.
        result: of the call that ran.
        source: that call.
        value: a copy of the value of that result.
        waited_for: what it had to wait for.
        message: of that result, as if nothing had been merged.
        others: how many calls were merged into that run; 0: the two are identical.
    """
    run = f"call {result.index}{named(source)}"
    if others:
        message = clean(
            f"{message} It was merged with {'another call' if others == 1 else f'{others} other calls'}: {run} has run."
        )
    else:
        message = clean(f"This is the result of {run}, which is identical and has run.")
    content = result.content
    if result.code is not None:
        content = failure(result.code, message, result.outcome, True, result.applied, result.retryable)
    return make_result(
        index,
        call.id,
        result.tool,
        result.outcome,
        result.code,
        message,
        content,
        value=value,
        exception=result.exception,
        started=result.started,
        applied=result.applied,
        retryable=result.retryable,
        retry_after=result.retry_after,
        waited_for=waited_for,
        still_running=result.still_running,
        original_bytes=result.original_bytes if result.code is None else len(content.encode()),
        handle=result.handle,
        shared_with=result.index,
    )


def got_off(index: int, call: Call, run: int, source: Call, reason: str, tool: Tool) -> Result:
    """The result of a call that is cancelled while its arguments are in the run of another one, which goes on."""
    applied: Applied = "no" if tool.effect_free else "unknown"
    retryable: Retryable = "yes" if tool.policy.repeatable else "unknown"
    effect = "It has no side effect." if tool.effect_free else "Whether it took effect is not known."
    message = clean(
        f"The call was cancelled when its arguments had gone into the run of call {run}{named(source)}: {reason}. "
        f"{effect}"
    )
    content = failure("cancelled", message, "cancelled", True, applied, retryable)
    return make_result(
        index,
        call.id,
        tool.name,
        "cancelled",
        "cancelled",
        message,
        content,
        started=True,
        applied=applied,
        retryable=retryable,
        waited_for=(f"call {run}",),
        original_bytes=len(content.encode()),
        shared_with=run,
    )


def replayed(
    index: int, call: Call, tool: Tool, record: Record, waited: float = 0.0, waited_for: tuple[str, ...] = ()
) -> Result:
    """The result of a call that was begun before, out of the journal.

    Args:
        index: the call's.
        call: itself.
        tool: which it calls.
        record: what is written down of it.
        waited: seconds for which it waited for that.
        waited_for: what it had to wait for.
    """
    answer = record.answer
    if answer is None:
        return _recorded(index, call, tool, record, waited, waited_for)
    if answer.code is None:
        message = f"{answer.message} {KEPT}"
    else:
        message = f"{answer.message} {UNSETTLED if record.unknown else KEPT}"
    content = answer.content
    if answer.code is not None:
        told = answer.retryable
        content = failure(answer.code, message, answer.outcome, True, answer.applied, told, answer.retry_after)
    return make_result(
        index,
        call.id,
        tool.name,
        answer.outcome,
        answer.code,
        clean(message),
        content,
        started=True,
        applied=answer.applied,
        retryable=answer.retryable,
        retry_after=answer.retry_after,
        waited=waited,
        waited_for=waited_for,
        original_bytes=answer.original_bytes if answer.code is None else len(content.encode()),
        handle=answer.handle,
        replayed=True,
    )


KEPT: Final = "It did not run again: it has run before, and this is what came of it, out of the journal."

UNSETTLED: Final = "It is not run again, since it may have taken effect: somebody has to look, and to settle it."


def _recorded(index: int, call: Call, tool: Tool, record: Record, waited: float, waited_for: tuple[str, ...]) -> Result:
    """The same for a call whose answer is not there: it never came, or was not kept."""
    done = record.state == "done"
    known = done or record.state == "settled"
    code: Code | None = None if known else "effect_unknown"
    outcome: Outcome = "ok" if known else "error"
    if done and record.outcome is not None:
        code, outcome = record.code, record.outcome
    if record.state == "settled":
        message = "The call took effect, as somebody has looked up; what it answered is lost. It did not run again."
    elif done:
        message = f"What it answered was not kept. {KEPT}"
    else:
        message = f"The call was begun before, and what came of it is not known. {UNSETTLED}"
    applied: Applied = record.applied if known else "unknown"
    told = {"note": message} if code is None else None
    content = (
        json.dumps(told, separators=(",", ":"))
        if code is None
        else failure(code, message, outcome, True, applied, "no")
    )
    return make_result(
        index,
        call.id,
        tool.name,
        outcome,
        code,
        message,
        content,
        started=True,
        applied=applied,
        waited=waited,
        waited_for=waited_for,
        original_bytes=len(content.encode()),
        replayed=True,
    )


def elsewhere(
    index: int,
    call: Call,
    tool: Tool,
    code: Code,
    message: str,
    outcome: Outcome,
    waited: float,
    waited_for: tuple[str, ...] = (),
) -> Result:
    """The result of a call that did not start since the same call is at work elsewhere, and may take effect there."""
    applied: Applied = "no" if tool.effect_free else "unknown"
    retryable: Retryable = "yes" if tool.policy.repeatable else "unknown"
    message = clean(message)
    content = failure(code, message, outcome, False, applied, retryable)
    return make_result(
        index,
        call.id,
        tool.name,
        outcome,
        code,
        message,
        content,
        applied=applied,
        retryable=retryable,
        waited=waited,
        waited_for=waited_for,
        original_bytes=len(content.encode()),
    )


def abandoned() -> Answer:
    """What is written down of a call whose event loop was closed over it."""
    message = "The program's event loop was closed while the call ran. Whether it took effect is not known."
    content = failure("cancelled", message, "cancelled", True, "unknown", "unknown")
    return Answer("cancelled", "cancelled", "unknown", "unknown", message=message, content=content)


def forsaken(index: int, call: Call, tool: Tool) -> Result:
    """What whoever goes on with a batch is told of a call that ran when an event loop was closed over it."""
    applied: Applied = "no" if tool.effect_free else "unknown"
    retryable: Retryable = "yes" if tool.policy.repeatable else "unknown"
    effect = "It has no side effect." if tool.effect_free else "Whether it took effect is not known."
    message = f"The program's event loop was closed while the call ran. {effect}"
    content = failure("cancelled", message, "cancelled", True, applied, retryable)
    return make_result(
        index,
        call.id,
        tool.name,
        "cancelled",
        "cancelled",
        message,
        content,
        started=True,
        applied=applied,
        retryable=retryable,
        original_bytes=len(content.encode()),
    )


def unwritten(result: Result) -> Result:
    """The same result, which says that the journal could not take it down in time."""
    message = f"{result.message} The journal could not write this down in time."
    if result.code is None:
        return with_words(result, message, result.content)
    told = failure(result.code, message, result.outcome, True, result.applied, result.retryable, result.retry_after)
    return with_words(result, message, told)


def raised(error: BaseException) -> str:
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


def rate_limited(after: float | None) -> str:
    """What is told of a call whose service takes no more for now."""
    when = "later" if after is None else f"in {after:g} s"
    return f"The service behind this tool takes no more calls for now; it did nothing. Try again {when}."


def unleased(share: bool) -> str:
    """What is told of a batch of which calls ran without the engine that processes share.

    Args:
        share: within this process's share of the limits; else by all of them, as if it were alone.
    """
    what = "within this process's share of the limits" if share else "by the limits of this process alone"
    return f"The engine that processes share was not reached: calls of this batch ran {what}."


def paused(tool: str, seconds: float, *, alone: bool) -> str:
    """What is told of a batch in which a service has said that it takes no more calls for so long.

    Args:
        tool: whose service that is.
        seconds: how long nothing starts.
        alone: only this tool pauses, and no other one that shares a rate with it.
    """
    whom = "its calls" if alone else "its calls, and those of tools that share its rate,"
    return (
        f"The service behind tool {tool} asked for a pause of {_rounded(seconds):g} s: "
        f"{whom} wait until it is over, or are refused."
    )


def tried(attempts: int) -> str:
    """What is added of a call that was tried more than once."""
    return f" It was tried {attempts} times." if attempts > 1 else ""


def not_again(reason: str) -> str:
    """What is added of a call that is not tried again, though it was to be: why not."""
    return f" It was not tried again: {reason.removeprefix('Not started: ')}"


def clean(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def failure(
    code: Code,
    message: str,
    outcome: Outcome,
    started: bool,
    applied: str,
    retryable: str,
    retry_after: float | None = None,
    *,
    handle: str | None = None,
) -> str:
    """The content of a result without an ordinary answer: compact JSON."""
    told: dict[str, object] = {
        "code": code,
        "message": clean(message),
        "outcome": outcome,
        "started": started,
        "applied": applied,
        "retryable": retryable,
    }
    if retry_after is not None:
        told["retry_after"] = _rounded(retry_after)
    if handle is not None:
        told["handle"] = handle
    return json.dumps({"error": told}, ensure_ascii=False, separators=(",", ":"))


def refused(
    index: int,
    call: Call,
    code: Code,
    message: str,
    outcome: Outcome,
    waited: float,
    waited_for: tuple[str, ...],
    *,
    never: bool = False,
    retry_after: float | None = None,
) -> Result:
    """The result of a call that does not start; `never`: nor would it if it came again."""
    worth = code in WORTH_ANOTHER_TRY or retry_after is not None
    retryable: Retryable = "yes" if worth and not never else "no"
    message = clean(message)
    content = failure(code, message, outcome, False, "no", retryable, retry_after)
    return make_result(
        index,
        call.id,
        str(call.tool)[:NAME_CHARACTERS],
        outcome,
        code,
        message,
        content,
        retryable=retryable,
        retry_after=retry_after,
        waited=waited,
        waited_for=waited_for,
        original_bytes=len(content.encode()),
    )


def faulty(
    index: int, call: Call, started: bool, applied: Applied, *, still_running: bool = False, attempts: int = 1
) -> Result:
    """The result of a call that Towerman itself failed to deal with: as plain as can be, so that this cannot fail."""
    message = "Towerman failed in dealing with this call."
    outcome: Outcome = "cancelled" if still_running else "error"
    code: Code = "cancelled" if still_running else "handler_error"
    content = (
        f'{{"error":{{"code":"{code}","message":"{message}","outcome":"{outcome}",'
        f'"started":{"true" if started else "false"},"applied":"{applied}","retryable":"unknown"}}}}'
    )
    return make_result(
        index,
        call.id,
        call.tool[:NAME_CHARACTERS],
        outcome,
        code,
        message,
        content,
        started=started,
        applied=applied,
        retryable="unknown",
        attempts=attempts if started else 0,
        still_running=still_running,
        original_bytes=len(content),
    )


def encoded(tool: Tool, value: object, keep: Keep | None = None) -> Encoded | EncodingError:
    """What a handler returned as the model is sent it, or why that cannot be done.

    Args:
        tool: whose handler it was.
        value: what it returned.
        keep: what does not fit comes as a `Large`, as `bounds.encode` says; None: it is cut.
    """
    try:
        return encode(value, tool.max_result_bytes, tool.policy.encode, keep)
    except EncodingError as unencodable:
        return unencodable


class Bounded(Encoded):
    """What the model is sent of a value that did not fit.

    Attributes:
        handle: under which the whole is kept, or None.
    """

    __slots__ = ("handle",)

    handle: str | None

    def __init__(self, text: str, original_bytes: int, handle: str | None) -> None:
        super().__init__(text, original_bytes, True)
        object.__setattr__(self, "handle", handle)


def named(call: Call) -> str:
    """A call's id in brackets, if it has one."""
    return f" ({call.id[:ID_CHARACTERS]})" if call.id else ""
