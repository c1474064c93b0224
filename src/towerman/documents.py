"""A batch as a text that can be handed in again, by whoever knows its name.

Theory. A plan that takes hours outlives the process that began it. What its calls came to is written down one by one;
what is missing to go on are the calls themselves, those that have not begun above all. So the batch is written down as
it was handed in, once, before anything of it starts. Handed in again it is the same batch where its calls are the same
JSON: that is told by a keyed digest, so that the text itself need not be kept.

House rules. A batch of any length: it is written call by call, and whoever writes may stop in between. Everything that
is read is looked at before it is believed. No message says a value.

Not here: where the text is kept (journal), when (runner), a batch that waits for people (approvals).
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Final, Literal

from towerman.calls import Batch, Call
from towerman.records import canonical, keyed

VERSION: Final = 1
"""The form that is written, and the only one that is read."""

BatchState = Literal["at work", "cut off", "ended"]
"""Of a kept batch: somebody is at work on it; its process died over it; each of its calls has its result."""

NamedBy = Literal["batch", "response"]
"""What a batch is called by: its `batch_id`, or the provider's id of the response."""

BatchVerdict = Literal["run", "busy", "conflict"]
"""What is to be done with a batch that is handed in: it may go on; somebody is at work on it; it has other calls than
the one that was handed in before under its name."""


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """A batch that the journal knows by its name.

    Args:
        number: its number in the journal.
        run_id, named, name, tenant: whose batch it is, and what it is called by.
        plan: it is a plan.
        size: how many calls it has.
        state: at work, cut off, ended.
        stored: its calls are kept, too; else they have to be handed in again to go on.
        attempts: how often it was begun.
        begun_at, ended_at: Unix times, of the latest attempt.
        ok: of one that has ended, how many of its calls ended ok.
        host, pid: the process that has begun it last.
        digest: of its calls; None: they have no one spelling.
    """

    number: int
    run_id: str
    named: NamedBy
    name: str
    tenant: str | None
    plan: bool
    size: int
    state: BatchState
    stored: bool
    attempts: int
    begun_at: float
    ended_at: float | None
    ok: int | None
    host: str
    pid: int
    digest: bytes | None


class Writing:
    """A batch, written down call by call.

    Args:
        batch: as it was handed in.
        key: of its digest.
        kept: its text is wanted, not only the digest.
    """

    def __init__(self, batch: Batch, key: bytes, *, kept: bool = True) -> None:
        self._batch = batch
        self._parts: list[str] | None = [] if kept else None
        self._sum: hmac.HMAC | None = hmac.new(keyed(key, "batch"), digestmod=sha256)
        self._count({name: getattr(batch, name) for name in _COUNTED})

    def add(self, call: Call) -> None:
        """The next call."""
        told: dict[str, object] = {name: getattr(call, name) for name in _CALL}
        told["needs"] = [call.needs] if isinstance(call.needs, str) else list(call.needs)
        if self._parts is not None:
            text = _text(told)
            if text is None:
                self._parts = None  # what has no JSON form cannot be handed in from here
            else:
                self._parts.append(text)
        if isinstance(call.arguments, str):
            try:  # text and data that say the same are the same call
                told["arguments"] = json.loads(call.arguments)
            except (ValueError, RecursionError):
                pass
        self._count(told)

    def _count(self, part: Mapping[str, object]) -> None:
        if self._sum is None:
            return
        spelled = canonical(part)
        if spelled is None:
            self._sum = None
        else:
            raw = spelled.encode()
            self._sum.update(len(raw).to_bytes(8, "big") + raw)

    @property
    def digest(self) -> bytes | None:
        """Equal for equal calls; None: they have no one spelling, and are compared with nothing."""
        return None if self._sum is None else self._sum.digest()

    def text(self) -> bytes | None:
        """The whole batch; None: some of it has no JSON form, or it was not wanted."""
        if self._parts is None:
            return None
        batch = self._batch
        told: dict[str, object] = {name: getattr(batch, name) for name in _BATCH}
        head = _text({"towerman_batch": VERSION, "batch": told})
        if head is None:  # of the message, which is not needed to go on
            head = _text({"towerman_batch": VERSION, "batch": {**told, "message": None}})
        if head is None:
            return None
        return f'{head[:-1]},"calls":[{",".join(self._parts)}]}}'.encode("utf-8", "surrogatepass")


def batch_key(key: bytes, run_id: str, named: NamedBy, name: str, tenant: str | None) -> bytes:
    """Where the identity of a batch is stored.

    Args:
        key: of the journal's digests.
        run_id, named, name, tenant: whose batch it is, and what it is called by.
    """
    return keyed(key, f"kept {named}", "" if tenant is None else f"tenant:{tenant}", run_id, name)


def digest_of(batch: Batch, key: bytes) -> bytes | None:
    """The digest of a whole batch."""
    writing = Writing(batch, key, kept=False)
    for call in batch.calls:
        writing.add(call)
    return writing.digest


def read_document(stored: bytes) -> Batch:
    """A batch out of its text. What a later version has added is left out.

    Raises:
        ValueError: it is none.
    """
    given = json.loads(stored.decode("utf-8", "surrogatepass"))
    if not isinstance(given, dict) or given.get("towerman_batch") != VERSION:
        raise ValueError("a stored batch has another form")
    told, calls = given.get("batch"), given.get("calls")
    if not isinstance(told, dict) or not isinstance(calls, list):
        raise ValueError("a stored batch is incomplete")
    known = {name: value for name, value in told.items() if name in _BATCH}
    if not all(_KINDS[name](value) for name, value in known.items()):
        raise ValueError("a stored batch is not as it was written")
    return Batch(tuple(map(_call, calls)), **known)


def _call(given: object) -> Call:
    if not isinstance(given, dict):
        raise ValueError("a stored call is none")
    known = {name: value for name, value in given.items() if name in _CALL}
    if not known.keys() >= _NEEDED or not all(_KINDS[name](value) for name, value in known.items()):
        raise ValueError("a stored call is not as it was written")
    return Call(**{**known, "needs": tuple(known.get("needs", ()))})


def _text(value: Mapping[str, object]) -> str | None:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError):
        return None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def is_text(value: object) -> bool:
    """Is a field text?"""
    return isinstance(value, str)


def is_text_or_none(value: object) -> bool:
    """Is a field text, or nothing?"""
    return value is None or isinstance(value, str)


def is_flag(value: object) -> bool:
    """Is a field true or false?"""
    return isinstance(value, bool)


def is_object_or_none(value: object) -> bool:
    """Is a field an object, or nothing?"""
    return value is None or isinstance(value, dict)


_APART: Final = frozenset({"calls", "refused"})  # written by themselves; nothing that is refused is written at all
_BATCH: Final = tuple(one.name for one in fields(Batch) if one.name not in _APART)
_CALL: Final = tuple(one.name for one in fields(Call))
_COUNTED: Final = ("plan", "ordered", "numbered", "outputs", "refused")
"""What of a batch, beside its calls, says what it does."""

_NEEDED: Final = frozenset({"tool", "arguments"})

_KINDS: Final[Mapping[str, Callable[[object], bool]]] = {
    "format": is_text,
    "message": is_object_or_none,
    "truncated": is_flag,
    "response_id": is_text_or_none,
    "batch_id": is_text_or_none,
    "plan": is_flag,
    "ordered": is_flag,
    "numbered": is_flag,
    "outputs": is_object_or_none,
    "tool": is_text,
    "arguments": lambda value: isinstance(value, str | dict),
    "id": is_text,
    "needs": lambda value: isinstance(value, list) and all(map(is_text, value)),
    "idempotency_key": is_text_or_none,
    "if_failed": lambda value: value in ("skip", "run_anyway"),
    "caller": is_text,
}
