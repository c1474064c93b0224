"""What is recorded of a batch, and who may see it.

Theory. A batch tells its story as events: it came in, a person is asked about a call and has answered, a call waits
and for what, it was admitted, its handler started, it was refused, it runs although something about it is odd, an
attempt has failed and another one is to come, its service has asked for a pause, its result was sealed, or trimmed with
its batch, work that outlived its result has ended, a call holds up its loop. An event carries names, sizes, times and
codes. It has no field for an argument, a result's value or the text of an exception, so no observer can leak one. A
name that the model invented (an unknown tool) is not recorded either.

An observer is any callable that takes an `Event`. Each is served by a thread of its own, in order: a slow one delays
no call and no other observer, a broken one breaks none. What could not be delivered is counted in
`Tower.statistics()`.

House rules. Records are cheap tuples inside; they become Events only when somebody looks.

Not here: drawing (timeline), files and loggers (observers/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, Literal

from towerman.calls import Outcome
from towerman.errors import Code

Kind = Literal[
    "batch_started",
    "waiting",
    "admitted",
    "started",
    "rejected",
    "warned",
    "shared",
    "retrying",
    "retry_refused",
    "paused",
    "intended",
    "joined",
    "replayed",
    "deferred",
    "finished",
    "orphaned",
    "ended",
    "late_result",
    "promoted",
    "approval_asked",
    "approval_decided",
    "approval_expired",
    "stalled",
    "trimmed",
    "counted",
    "batch_finished",
]
"""What happened."""

UNKNOWN_TOOL: Final = "<unknown tool>"
"""Stands in records for a tool name that is not registered."""

ID_CHARACTERS: Final = 64
"""Longest part of a provider's call id that is recorded."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a batch.

    Args:
        time: seconds on the tower's monotonic clock.
        kind: what happened.
        run_id: the run's id.
        batch: number of the batch within its run, from 1.
        index: the call's place in the batch; None for events of the whole batch.
        call_id: the provider's id, cut to 64 characters.
        tool: the registered name, or `<unknown tool>`.
        outcome: of a finished call.
        code: why it has no ordinary answer.
        waited: seconds in the queue so far.
        ran: seconds of work so far.
        waiting_for: what blocks it now, for example `pool crm` or `resource file:{path}`.
        waited_for: all that blocked it, first to last.
        size: bytes of the finished content; calls of a started batch.
        wall: Unix time in seconds, told once per batch so that monotonic times can be placed.
        scopes: scope of each pool that the call takes permits of, told at admission: {"crm": "process"}.
        reason: why a call or run was cancelled, in the canceller's words; of `warned`, what is odd.
        shared_with: index of the call whose run answers this one too; of a shared call, and when it is finished.
        tokens: what the result's content takes of the model's context, about: of a finished call; again of one that is
            trimmed with its batch; with a counter of one's own only after the batch, when it is counted.
        attempt: which attempt of its call it is about, from 1; told of `retrying` (the one that has failed, by `code`)
            and `retry_refused` (the one that does not start), and of all later ones. Of a finished call: how many
            there were, where it was more than one.
        pause: seconds until the next attempt is offered; of `paused`, for how long nothing starts that counts in
            `waiting_for`, since the service behind this call has said that it takes no more.
        approval: the name of the approval that a person is asked for, has decided, or has not decided in time.
        decision: `approved`, `edited` (approved with other arguments), `denied`, or `undecided` (the call comes back
            pending).
    """

    time: float
    kind: Kind
    run_id: str
    batch: int
    index: int | None = None
    call_id: str | None = None
    tool: str | None = None
    outcome: Outcome | None = None
    code: Code | None = None
    waited: float | None = None
    ran: float | None = None
    waiting_for: str | None = None
    waited_for: tuple[str, ...] | None = None
    size: int | None = None
    wall: float | None = None
    scopes: dict[str, str] | None = None
    reason: str | None = None
    shared_with: int | None = None
    tokens: int | None = None
    attempt: int | None = None
    pause: float | None = None
    approval: str | None = None
    decision: str | None = None

    def as_dict(self) -> dict[str, object]:
        """The fields that are set, ready for JSON."""
        out: dict[str, object] = {}
        for name in _FIELDS:
            value = getattr(self, name)
            if value is not None:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out


_FIELDS: Final = tuple(field.name for field in fields(Event))

Observer = Callable[[Event], None]
"""Receives events, one at a time, on a thread of its own."""


@dataclass(frozen=True, slots=True)
class Span:
    """One call on the timeline; times are seconds since its batch came in.

    Args:
        index: the call's place in the batch.
        tool: the registered name, or `<unknown tool>`.
        outcome: how it ended.
        code: why it has no ordinary answer, or None.
        queued: when it was handed to the gate; None when it never was (refused before).
        started: when its handler started; None when it never did.
        sealed: when its result was sealed.
        ended: when its work ended, if later than the seal; None while it goes on or when it was never later.
        waited_for: what blocked it, first to last.
        still_running: its work went on after the seal.
        shared_with: index of the call whose run answered it; then it has no stretch of its own.
        tokens: what its result takes of the model's context, about; None where nobody counted.
        attempts: of a call that was tried again: for each attempt when it was handed to the gate, started (None: it did
            not) and ended. `queued` and `started` are the first one's then. Empty for all others.
    """

    index: int
    tool: str
    outcome: Outcome
    code: Code | None
    queued: float | None
    started: float | None
    sealed: float
    ended: float | None = None
    waited_for: tuple[str, ...] = ()
    still_running: bool = False
    shared_with: int | None = None
    tokens: int | None = None
    attempts: tuple[tuple[float, float | None, float], ...] = ()
