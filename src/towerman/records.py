"""What is written down of a call, so that it can be told from another one after a crash.

Theory. A call that may change something is written down before it starts (its intent) and when it has ended (its
outcome). Between the two the process may die, and then nobody knows whether the effect took place: such a call is
*unknown*, and never run again by itself. A call is found again by its identity: the key that its caller gave it, or
the run, the response and the place there. Where it has neither there is nothing to find it by, and every time it is
handed in is a new call.

What follows from what was written down is one table, `verdict`. Whoever looks a call up before it is offered and
whoever writes its intent ask the same table, so that two processes that come at the same moment agree.

House rules. Arguments appear as a keyed digest only. Pure functions and frozen data; the names of states are the words
that people see.

Not here: how it is stored (journal), when it is written and waited for (runner).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from towerman.calls import Applied, Arguments, Outcome, Result, Retryable
from towerman.errors import Code, TowermanError

State = Literal["open", "done", "unknown", "settled"]
"""Of a call: its intent is written; it has its outcome; it ended and nobody knows its effect; a person has said what
came of it."""

Verdict = Literal["run", "replay", "join", "conflict", "unknown", "applied", "deferred"]
"""What is to be done with a call that is handed in; `deferred`: it is in the queue, and a worker runs it."""

ApprovalState = Literal["pending", "approved", "denied", "expired"]
"""Of an approval."""

DeferredState = Literal["queued", "claimed", "done", "unknown", "cancelled"]
"""Of a deferred call: it waits for a worker, one has it, it has its answer, its worker died and nobody knows its
effect, it was taken back."""

Trouble = Literal[
    "full", "locked", "read-only", "corrupt", "not a journal", "newer", "gone", "secret", "sealed", "closed", "forked",
    "failed",
]  # fmt: skip
"""Why a journal cannot be used."""

STATES: Final[tuple[State, ...]] = get_args(State)

SECONDS_OF: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class JournalUnavailable(TowermanError):
    """The journal cannot be read or written now; nothing was written half.

    Args:
        trouble: why, in a word.
        text: what is wrong and the fix, without a value.
    """

    def __init__(self, trouble: Trouble, text: str) -> None:
        super().__init__(text)
        self.trouble = trouble


class Unsettled(TowermanError):
    """What was to be settled, decided or claimed is not there, or not in that state; the text says which."""


Uncleared = Literal["pending", "denied", "expired", "taken", "changed", "missing", "other"]
"""Why an approval does not let a call start: nobody has decided; a no; its time is over; it was used for another call;
it is for other arguments; there is none; another decision was written down first."""


class NotCleared(Unsettled):
    """A deferred call's approval does not hold, so its intent was not written.

    Args:
        why: what is wrong with it.
    """

    def __init__(self, why: Uncleared) -> None:
        super().__init__(f"the approval of this call does not hold: {why}")
        self.why = why


class QueueFull(TowermanError):
    """As many deferred calls wait as may wait; nothing was put in."""


class NotBegun(TowermanError):
    """Calls that were to be begun together were not, since something else is to be done with some of them.

    Args:
        told: for each of them what is to be done, and the record that says so.
    """

    def __init__(self, told: Sequence[tuple[Verdict, Record | None]]) -> None:
        super().__init__("some of the calls were begun before")
        self.told = told


# -------------------------------------------------------------------------------------------- identity


@dataclass(frozen=True, slots=True)
class Identity:
    """What a call is found again by.

    Args:
        kind: what it rests on: the caller's key, the provider's response, the caller's name for the batch.
        parts: what makes it this call and no other. May hold values (a caller's key): never shown and never stored.
    """

    kind: Literal["key", "response", "batch"]
    parts: tuple[str, ...] = field(repr=False)


def identity(
    tool: str,
    index: int,
    *,
    run_id: str,
    tenant: str | None = None,
    idempotency_key: str | None = None,
    batch_id: str | None = None,
    response_id: str | None = None,
) -> Identity | None:
    """The identity of a call, or None where every hand-in is a new one.

    Args:
        tool: its registered name.
        index: its place in the batch.
        run_id: of its run.
        tenant: whom the run belongs to; calls of two tenants are never the same.
        idempotency_key: what the caller calls it by; wins over the rest, and holds over runs.
        batch_id: what the caller calls the batch by; wins over the response's id.
        response_id: the provider's.
    """
    whose = "" if tenant is None else f"tenant:{tenant}"
    if idempotency_key:
        return Identity("key", (whose, tool, idempotency_key))
    if batch_id:
        return Identity("batch", (whose, tool, run_id, batch_id, str(index)))
    if response_id:
        return Identity("response", (whose, tool, run_id, response_id, str(index)))
    return None


def new_secret() -> bytes:
    """A random key for digests."""
    return os.urandom(32)


def keyed(key: bytes, what: str, *parts: str | bytes) -> bytes:
    """HMAC-SHA256 over parts that cannot run into one another."""
    mac = hmac.new(key, what.encode(), hashlib.sha256)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        mac.update(len(raw).to_bytes(8, "big"))
        mac.update(raw)
    return mac.digest()


def place(key: bytes, found: Identity) -> bytes:
    """What an identity is stored as: nobody can tell from it what a caller's key was."""
    return keyed(key, f"identity {found.kind}", *found.parts)


def effect_key(key: bytes, stored: bytes) -> str:
    """An idempotency key for a handler that was given none: the same each time the call runs, in every process."""
    return f"tm-{keyed(key, 'effect', stored).hex()[:40]}"


def digest(key: bytes, tool: str, arguments: Arguments | str) -> bytes | None:
    """A keyed digest of a call's arguments: equal for equal JSON, in whatever order its names stand.

    Args:
        key: of the journal.
        tool: the registered name.
        arguments: as the model wrote them: a mapping, or JSON text.

    Returns:
        32 bytes, or None for values that have no one spelling.
    """
    told = canonical(arguments)
    return None if told is None else keyed(key, "arguments", tool, told)


def canonical(arguments: Arguments | str) -> str | None:
    """Arguments as one text: names in order, no spaces; None where they hold a value that has no one spelling."""
    try:
        if isinstance(arguments, str):
            given = json.loads(arguments) if arguments.strip() else {}
        else:
            given = arguments
        return json.dumps(given, sort_keys=True, separators=(",", ":"), default=_spelled)
    except (TypeError, ValueError, RecursionError):
        return None


def _spelled(value: object) -> object:
    """Values that JSON does not have, by the name of their type and their one spelling."""
    from datetime import date, time, timedelta
    from decimal import Decimal
    from enum import Enum
    from pathlib import PurePath
    from uuid import UUID

    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Enum):
        return [kind, value.name]
    if isinstance(value, bytes | bytearray):
        return [kind, value.hex()]
    if isinstance(value, date | time | timedelta | Decimal | UUID | PurePath):
        return [kind, str(value)]
    if isinstance(value, set | frozenset):
        return [kind, sorted(json.dumps(one, sort_keys=True, default=_spelled) for one in value)]
    raise TypeError("no one spelling")


# -------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to, as far as it can be told again.

    Args:
        outcome, code, applied, retryable, retry_after, ran, attempts, original_bytes, handle: as in `Result`.
        message, content: what the model was told; they may hold values.
        value: of a step of a plan to which others refer, what it came to, whole, as JSON text; else None.
    """

    outcome: Outcome
    code: Code | None
    applied: Applied
    retryable: Retryable = "no"
    retry_after: float | None = None
    ran: float = 0.0
    attempts: int = 1
    original_bytes: int = 0
    handle: str | None = None
    message: str = field(default="", repr=False)
    content: str = field(default="", repr=False)
    value: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, result: Result, value: str | None = None) -> Answer:
        """What is written down of a result."""
        return cls(
            result.outcome,
            result.code,
            result.applied,
            result.retryable,
            result.retry_after,
            result.ran,
            result.attempts,
            result.original_bytes,
            result.handle,
            result.message,
            result.content,
            value,
        )

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return json.dumps([getattr(self, name) for name in _ANSWER], separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, stored: bytes) -> Answer:
        """As it was stored.

        Raises:
            ValueError: it is no answer.
        """
        given = json.loads(stored)
        if not isinstance(given, list) or len(given) < _LEAST:
            raise ValueError("a stored answer is incomplete")
        return cls(*given[: len(_ANSWER)])


_ANSWER: Final = tuple(Answer.__dataclass_fields__)
_LEAST: Final = _ANSWER.index("value")  # fields that every answer was stored with


@dataclass(frozen=True, slots=True)
class Intent:
    """A call that is about to start.

    Args:
        token: names this start and no other: whoever ends it must show it.
        key: where its identity is stored; None: it has none, and is found by its number only.
        digest: of its arguments.
        tool, run_id, batch, index, call_id, tenant: which call it is.
        harmless: repeating it does no harm.
        effect_free: it has no effect.
        claim: the claim under which a worker runs it; the intent is refused when another one has it by now.
        approval: what a person has said to it, as the worker knows it; None: it needs nobody's word.
        edited: the arguments that the person gave, as JSON, or None.
        of_batch: where the identity of its batch is stored, if that is kept to be gone on with.
    """

    token: bytes = field(repr=False)
    key: bytes | None = field(repr=False)
    digest: bytes | None = field(repr=False)
    tool: str
    run_id: str
    batch: int
    index: int
    call_id: str = ""
    tenant: str | None = None
    harmless: bool = False
    effect_free: bool = False
    claim: bytes | None = field(default=None, repr=False)
    approval: Approval | None = None
    edited: bytes | None = field(default=None, repr=False)
    of_batch: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Record:
    """What is written down of a call.

    Args:
        number: its number in the journal.
        tool, run_id, batch, index, call_id, tenant: which call it is.
        state: open, done, unknown, settled.
        live: whoever wrote the intent is at work still.
        running: of an unknown one: its work went on after its result was sealed.
        harmless: repeating it does no harm, as it was declared then.
        effect_free: it has no effect.
        applied: whether its effect took place, as far as it is written down.
        outcome, code: how it ended.
        attempts: how often it was begun.
        intended_at, ended_at, settled_at: Unix times.
        settled_by, note: who settled it, and what that person wrote.
        digest: of its arguments.
        answer: what it came to; None where there is none, or it was not asked for.
    """

    number: int
    tool: str
    run_id: str
    batch: int
    index: int
    call_id: str
    tenant: str | None
    state: State
    live: bool
    running: bool
    harmless: bool
    effect_free: bool
    applied: Applied
    outcome: Outcome | None
    code: Code | None
    attempts: int
    intended_at: float
    ended_at: float | None
    settled_at: float | None
    settled_by: str | None
    note: str | None
    digest: bytes | None = field(default=None, repr=False)
    answer: Answer | None = field(default=None, repr=False)

    @property
    def unknown(self) -> bool:
        """Nobody knows whether its effect took place: it ended so, or its process died over it."""
        return self.state == "unknown" or (self.state == "open" and not self.live)


def verdict(record: Record | None, digest: bytes | None, *, harmless: bool) -> Verdict:
    """What is to be done with a call that is handed in.

    Args:
        record: what is written down under its identity.
        digest: of its arguments now; one that cannot be made conflicts with nothing.
        harmless: repeating it does no harm.
    """
    if record is None:
        return "run"
    if digest is not None and record.digest is not None and digest != record.digest:
        return "conflict"
    if record.state == "done":
        return "replay"
    if record.state == "settled":
        return "applied" if record.applied == "yes" else "run"
    if record.live and (record.state == "open" or (record.running and harmless)):
        return "join"
    return "run" if harmless else "unknown"


# -------------------------------------------------------------------------------------------- approvals


@dataclass(frozen=True, slots=True)
class Approval:
    """A person's decision about one call.

    Args:
        approval_id: its public id.
        run_id, tool, call_id, batch, index, tenant: which call it is for.
        digest: of the frozen arguments.
        state: pending, approved, denied, expired.
        asked_at, expires_at, decided_at, claimed_at: Unix times.
        decided_by, reason: who decided, and why.
        handle: of the deferred call that it is for, or None.
        edited: the person gave arguments of its own.
        claimed_for: the key of the deferred call that has used it.
    """

    approval_id: str
    run_id: str
    tool: str
    digest: bytes = field(repr=False)
    expires_at: float
    call_id: str = ""
    batch: int = 0
    index: int = 0
    tenant: str | None = None
    state: ApprovalState = "pending"
    asked_at: float = 0.0
    decided_at: float | None = None
    decided_by: str | None = None
    reason: str | None = None
    claimed_at: float | None = None
    handle: str | None = None
    edited: bool = False
    claimed_for: bytes | None = field(default=None, repr=False)


# -------------------------------------------------------------------------------------------- deferred calls


Permission = tuple[tuple[str, ...] | None, tuple[str, ...] | None]
"""Patterns of the names of tools that a run allows, and of those that it denies; None for none."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A call that a worker runs later.

    Args:
        handle: its public name.
        tool, run_id, call_id, batch, index, tenant: which call it is.
        key: where its identity is stored; one that is queued already is not queued twice.
        digest: of its arguments.
        priority: higher goes first.
        chain: calls of one chain run one after another, in the order of `position`; None: it stands alone.
        position: its place in the chain: the one that it has in its batch.
        needs: handles of those whose answers it needs: it is skipped where one of them has none.
        not_before: Unix time before which nobody takes it.
        harmless: repeating it does no harm.
        state: queued, claimed, done, unknown, cancelled.
        stop: somebody has cancelled it while a worker had it.
        outcome, code: how it ended.
        attempts: how often a worker took it.
        returned: how often it was given back, since there was no room for it.
        queued_at, claimed_at, ended_at: Unix times.
        live: whoever has it is at work still.
        claim: what a worker shows that has it; known to that worker only.
        lacks: of one that was just claimed: the handle of a call that it needs and that did not answer.
        approval: the id of its approval, once there is one.
        asks: how that stands; "pending": it waits for a person, and no worker takes it that could not ask one.
        asked: of one that was just claimed: that approval.
        edited: of one that was just claimed: the arguments that the person gave, as JSON.
        deadline: Unix time of the end of its run, after which it does not start; None: it has none.
        permission: the patterns of tool names that its run allows, and those that it denies, None for none; or None.
    """

    handle: str
    tool: str
    run_id: str
    key: bytes = field(repr=False)
    digest: bytes | None = field(repr=False)
    call_id: str = ""
    batch: int = 0
    index: int = 0
    tenant: str | None = None
    priority: int = 0
    chain: str | None = None
    position: int = 0
    needs: tuple[str, ...] = ()
    not_before: float = 0.0
    harmless: bool = False
    state: DeferredState = "queued"
    stop: bool = False
    outcome: Outcome | None = None
    code: Code | None = None
    attempts: int = 0
    returned: int = 0
    queued_at: float = 0.0
    claimed_at: float | None = None
    ended_at: float | None = None
    live: bool = False
    claim: bytes | None = field(default=None, repr=False)
    lacks: str | None = None
    approval: str | None = None
    asks: ApprovalState | None = None
    asked: Approval | None = field(default=None, repr=False)
    edited: bytes | None = field(default=None, repr=False)
    deadline: float | None = None
    permission: Permission | None = None


LATER: Final = "later-"
"""What the handle of a deferred call begins with."""


def new_handle() -> str:
    """A name for a deferred call that nobody can guess."""
    return f"{LATER}{os.urandom(10).hex()}"


def packed(arguments: Arguments | str, idempotency_key: str | None) -> bytes | None:
    """What is stored of a call that is to run later; None where its arguments are no JSON."""
    try:
        return json.dumps([arguments, idempotency_key], separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None


def unpacked(stored: bytes) -> tuple[Arguments | str, str | None]:
    """The arguments and the idempotency key of such a call.

    Raises:
        ValueError: it is none.
    """
    given = json.loads(stored)
    if not (isinstance(given, list) and len(given) == 2 and isinstance(given[0], dict | str)):
        raise ValueError("stored arguments are incomplete")
    arguments, key = given
    if not (key is None or isinstance(key, str)):
        raise ValueError("stored arguments are incomplete")
    return arguments, key


@dataclass(frozen=True, slots=True)
class Due:
    """What the queue has for a worker.

    Args:
        now: something could be taken now.
        next_at: Unix time at which something that is put off comes, or None.
        left: calls that are not over: queued or claimed.
        foreign: names of tools that queued calls are for and that this worker has not.
        waiting: of those that are left, how many wait for a person.
    """

    now: bool
    next_at: float | None
    left: int
    foreign: tuple[str, ...] = ()
    waiting: int = 0


ClaimState = Literal["held", "stop", "lost"]
"""Of a worker's claim: it is its own; it is, and somebody has cancelled the call; another worker has the call."""


# -------------------------------------------------------------------------------------------- what people write


def age(text: str) -> float:
    """Seconds of a length of time such as `30d`, `12h`, `45m`, `90s`, `2w`.

    Raises:
        ValueError: it is none; the message says how one is written.
    """
    unit = text[-1:]
    if unit in SECONDS_OF and text[:-1].isascii() and text[:-1].isdigit() and len(text) <= 10:
        return float(int(text[:-1]) * SECONDS_OF[unit])
    raise ValueError("a whole number and a unit, s, m, h, d or w, for example 30d")
