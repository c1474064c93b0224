"""The closed list of codes, and the few exceptions.

Theory. A call that cannot run, or that fails, is never an exception for the caller of a batch: it is a
`Result` with a code from this list. Exceptions are for mistakes made while setting up (a pool of 0
permits, a template that names no parameter) and for input that is no batch at all. They are raised
early and name the place and the fix.

House rules. A code, once published, never changes its meaning. New ones may be added.

Not here: the wording of results (that is said where the decision is taken).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from datetime import datetime, timedelta

Code = Literal[
    "invalid_arguments",
    "unresolved_placeholder",
    "unknown_tool",
    "duplicate_call_id",
    "bad_reference",
    "unknown_dependency",
    "dependency_cycle",
    "dependency_failed",
    "not_alone",
    "truncated_response",
    "policy_error",
    "permission_denied",
    "approval_missing",
    "approval_denied",
    "approval_expired",
    "held_behind",
    "concurrency_limit",
    "wait_timeout",
    "queue_full",
    "rate_limited",
    "budget_exhausted",
    "call_cap",
    "repeated_call",
    "deadline_exceeded",
    "circuit_open",
    "would_deadlock",
    "cancelled",
    "sibling_failed",
    "handler_error",
    "handler_timeout",
    "handler_cancelled",
    "encoding_error",
    "idempotency_conflict",
    "effect_unknown",
    "lease_lost",
    "engine_unavailable",
    "journal_unavailable",
    "run_closed",
    "deferred",
]
"""Why a call has no ordinary answer."""

CODES: Final[frozenset[str]] = frozenset(get_args(Code))
"""Every code, also those that this version does not use."""


class TowermanError(Exception):
    """Base of every exception that Towerman raises by itself."""


class PolicyError(TowermanError, ValueError):
    """Something was declared wrongly: the message names the key, what is allowed, and the fix."""


class InputError(TowermanError, ValueError):
    """What was handed in is no batch of calls in any known form; the message names the place."""


class EngineUnavailable(TowermanError):
    """The engine that processes share cannot be asked: it is not reached, does not answer in time, or refuses.

    Args:
        reason: a few words, without an address and without what a server says beyond its code.

    Attributes:
        code: that of a call which is refused for it.
    """

    code: Final[Code] = "engine_unavailable"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is not available: {reason}")
        self.reason = reason


class ToolError(Exception):
    """Raised by a handler to tell the model something in its own words.

    Args:
        text: what the model is told; capped like any result.
        applied: whether the effect took place: "no", "yes" or "unknown". None (the default) lets
            Towerman say what it knows: "no" for a tool that only reads, else "unknown".
    """

    def __init__(self, text: str, applied: Literal["no", "yes", "unknown"] | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.applied = applied


class RateLimited(Exception):
    """Raised by a handler whose service refuses further calls for now, and has done nothing of this one.

    The call is tried again where its tool has `retry`; else its result is an error with the code `rate_limited`,
    `applied` "no". Where a part was done before the service refused, raise a ToolError that says so.

    Args:
        retry_after: when the service takes calls again. Seconds, as a number, its text or a timedelta; or an instant,
            as a datetime with a time zone or a text in one of the forms of an HTTP-date: a `Retry-After` header may be
            handed on as it is. An instant that is over is 0 seconds away, more than a year counts as one. None, less
            than 0, NaN, a datetime without a time zone, and whatever else says no time: it is not known.
    """

    def __init__(self, retry_after: float | str | timedelta | datetime | None = None) -> None:
        super().__init__()  # what a service sent is in no text of it
        self.retry_after = retry_after
