"""A batch that waits for people, as a text that another process can go on with.

Theory. The text is JSON: a version, a payload that is itself JSON text, and a signature over exactly that text. So
whatever a store does to the outer object (order of keys, spaces), the signature stands for what was written. The
payload has the calls as they came, the results that are sealed, and for each open call its record: name, what it is
bound to, its state, and when its time is over by the calendar, since the clocks of two processes have nothing else in
common.

A step of a plan into whose arguments results were filled is asked for, and goes on, with these. What the journal knows
it by are the arguments as they were handed in, so that it is one call whichever way it comes: the record has both.

Without a secret nothing is signed: whoever can change the text can say that a call was approved. What it is bound to
is then a digest under a key that stands in the text, which guards against mistakes (other tools, other defaults) and
not against anybody.

House rules. Everything that is read is looked at before it is believed, signed or not. No message says a value.

Not here: whether what was open may go on (runner).
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast, get_args

from towerman.approvals.approval import ApprovalState
from towerman.calls import Applied, Arguments, Batch, Call, Outcome, Result, Retryable, make_result
from towerman.documents import is_flag, is_object_or_none, is_text, is_text_or_none
from towerman.errors import Code, InputError
from towerman.records import keyed

VERSION: Final = 2
"""The newest form. The first one does not know of arguments that were filled in, and is written where none were."""

Field = Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Open:
    """A call that has no final result.

    Args:
        approval_id: the name of its record.
        needed: a person has to say yes; else it only stands behind such a call.
        state: pending, or approved and not run yet.
        binding: what the approval holds for, under the key of the document.
        shape: digest of the schema of its tool.
        expires_at: Unix time at which its time is over.
        hidden: an identical call is asked for in its place.
        arguments: those that the approval brought, or None.
        written: of a call into whose arguments results were filled, those that were handed in; else None.
    """

    approval_id: str
    needed: bool
    state: ApprovalState
    binding: str
    shape: str
    expires_at: float
    hidden: bool = False
    arguments: Arguments | None = field(default=None, repr=False)
    written: Arguments | str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Suspended:
    """A batch that is not done.

    Args:
        batch: the calls as they came.
        run_id, tenant, number: whose batch it is, and the how-manieth of its run.
        notice: what the model is told about the batch as a whole.
        key: what bindings were made with: hexadecimal, empty where that is derived from the secret.
        results: one for each call; None for an open one.
        opened: by index, the open calls.
        closed: by name, what became of approvals that are not open any more.
        values: of a plan, by index, what calls came to that open ones refer to.
    """

    batch: Batch
    run_id: str
    tenant: str | None
    number: int
    notice: str | None
    key: str = field(repr=False)
    results: tuple[Result | None, ...] = ()
    opened: Mapping[int, Open] = field(default_factory=dict)
    closed: Mapping[str, ApprovalState] = field(default_factory=dict)
    values: Mapping[int, object] = field(default_factory=dict, repr=False)


def secret_bytes(secret: str | bytes) -> bytes:
    """A secret as bytes."""
    return secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else secret


# -------------------------------------------------------------------------------------------- writing


_RESULT: Final = (
    "index",
    "call_id",
    "tool",
    "outcome",
    "code",
    "message",
    "content",
    "started",
    "applied",
    "retryable",
    "retry_after",
    "waited",
    "ran",
    "waited_for",
    "attempts",
    "still_running",
    "original_bytes",
    "handle",
    "shared_with",
    "replayed",
)
"""What is kept of a result: all but what lives in one process only, its value and its exception."""


def write_state(one: Suspended, secret: bytes | None) -> str:
    """The text of a batch.

    Args:
        one: what is to be kept. Its calls and its message are plain JSON data.
        secret: signs it; None: nothing does.

    Raises:
        InputError: something in it is no JSON.
    """
    batch = one.batch
    version = 1 if all(each.written is None for each in one.opened.values()) else VERSION
    payload = {
        "run_id": one.run_id,
        "tenant": one.tenant,
        "batch": one.number,
        "notice": one.notice,
        "key": one.key,
        "format": batch.format,
        "message": batch.message,
        "truncated": batch.truncated,
        "response_id": batch.response_id,
        "batch_id": batch.batch_id,
        "plan": batch.plan,
        "ordered": batch.ordered,
        "numbered": batch.numbered,
        "outputs": batch.outputs,
        "calls": [
            {
                "tool": call.tool,
                "arguments": call.arguments,
                "id": call.id,
                "needs": list(call.needs),
                "idempotency_key": call.idempotency_key,
                "if_failed": call.if_failed,
                "caller": call.caller,
            }
            for call in batch.calls
        ],
        "results": [
            None if result is None else {name: getattr(result, name) for name in _RESULT} for result in one.results
        ],
        "open": [
            {
                "index": index,
                "approval_id": each.approval_id,
                "needed": each.needed,
                "state": each.state,
                "binding": each.binding,
                "shape": each.shape,
                "expires_at": each.expires_at,
                "hidden": each.hidden,
                "arguments": each.arguments,
                **({} if version == 1 else {"written": each.written}),
            }
            for index, each in one.opened.items()
        ],
        "closed": dict(one.closed),
        "values": [[index, value] for index, value in one.values.items()],
    }
    try:
        text = json.dumps(payload, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        raise InputError("state: an open call has arguments that JSON has no form for; hand them in as JSON") from None
    signature = None if secret is None else _sign(secret, text, version)
    return json.dumps({"towerman_state": version, "payload": text, "signature": signature})


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _sign(secret: bytes, payload: str, version: int) -> str:
    return keyed(secret, f"batch state {version}", payload).hex()


# -------------------------------------------------------------------------------------------- reading


class _Wrong(Exception):
    """A part that is not what was written; the text is its place."""


def read_state(given: object, secret: bytes | None) -> Suspended:
    """A batch out of its text.

    Args:
        given: the text, its bytes, or the object that it is the JSON of.
        secret: of the tower.

    Raises:
        InputError: it is no such text, has another version, or its signature does not fit. Nothing was run.
    """
    version, payload = _payload(given, secret)
    try:
        return _suspended(payload, _OPEN if version == 1 else _OPEN_NOW)
    except _Wrong as wrong:
        raise InputError(f"state: {wrong} is not as it was written; hand in what state() gave, unchanged") from None


def _payload(given: object, secret: bytes | None) -> tuple[int, object]:
    """Its version, and what it says."""
    outer = given
    if isinstance(given, str | bytes | bytearray):
        try:
            outer = json.loads(given)
        except (ValueError, RecursionError):
            raise InputError("state: no JSON text; hand in what state() gave, whole") from None
    if not isinstance(outer, Mapping):
        raise InputError(f"state: the text that state() gave is wanted; got {type(given).__name__[:80]}")
    version, payload, signature = outer.get("towerman_state"), outer.get("payload"), outer.get("signature")
    if not isinstance(version, int) or isinstance(version, bool) or not isinstance(payload, str):
        raise InputError("state: it is no state of a batch; hand in what state() gave, unchanged")
    if not 1 <= version <= VERSION:
        told = version if abs(version) < 10**6 else "another one"
        raise InputError(f"state: it has version {told}, and this Towerman reads versions 1 to {VERSION}")
    if secret is None and signature is not None:
        raise InputError("state: it is signed, and this tower has no secret to look at that with; say Tower(secret=)")
    if secret is not None:
        if signature is None:
            raise InputError("state: it is not signed, and this tower has a secret; make it with the same secret")
        if not isinstance(signature, str) or not hmac.compare_digest(
            signature.encode("utf-8", "replace"), _sign(secret, payload, version).encode()
        ):
            raise InputError("state: its signature does not fit: it was changed, or made with another secret")
    try:
        return version, json.loads(payload)
    except (ValueError, RecursionError):
        raise InputError("state: its payload is no JSON; hand in what state() gave, unchanged") from None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e15 < value < 1e15


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_value(value: object) -> bool:
    """An index and what the call of that index came to."""
    return isinstance(value, list) and len(value) == 2 and _is_count(value[0])


def _one_of(words: object, *more: object) -> Field:
    known = {*cast("tuple[object, ...]", get_args(words)), *more}
    return lambda value: (value is None or isinstance(value, str)) and value in known


_PAYLOAD: Final[Mapping[str, Field]] = {
    "run_id": is_text,
    "tenant": is_text_or_none,
    "batch": _is_count,
    "notice": is_text_or_none,
    "key": is_text,
    "format": is_text,
    "message": is_object_or_none,
    "truncated": is_flag,
    "response_id": is_text_or_none,
    "batch_id": is_text_or_none,
    "plan": is_flag,
    "ordered": is_flag,
    "numbered": is_flag,
    "outputs": is_object_or_none,
    "calls": lambda value: isinstance(value, list),
    "results": lambda value: isinstance(value, list),
    "open": lambda value: isinstance(value, list),
    "closed": lambda value: isinstance(value, dict) and all(map(_one_of(ApprovalState), value.values())),
    "values": lambda value: isinstance(value, list) and all(map(_is_value, value)),
}

_CALL: Final[Mapping[str, Field]] = {
    "tool": is_text,
    "arguments": lambda value: isinstance(value, str | dict),
    "id": is_text,
    "needs": _is_texts,
    "idempotency_key": is_text_or_none,
    "if_failed": lambda value: value in ("skip", "run_anyway"),
    "caller": is_text,
}

_RESULT_FIELDS: Final[Mapping[str, Field]] = {
    "index": _is_count,
    "call_id": is_text,
    "tool": is_text,
    "outcome": lambda value: value is not None and _one_of(Outcome)(value),
    "code": _one_of(Code, None),
    "message": is_text,
    "content": is_text,
    "started": is_flag,
    "applied": lambda value: value is not None and _one_of(Applied)(value),
    "retryable": lambda value: value is not None and _one_of(Retryable)(value),
    "retry_after": lambda value: value is None or _is_seconds(value),
    "waited": _is_seconds,
    "ran": _is_seconds,
    "waited_for": _is_texts,
    "attempts": _is_count,
    "still_running": is_flag,
    "original_bytes": _is_count,
    "handle": is_text_or_none,
    "shared_with": lambda value: value is None or _is_count(value),
    "replayed": is_flag,
}

_OPEN: Final[Mapping[str, Field]] = {
    "index": _is_count,
    "approval_id": lambda value: isinstance(value, str) and bool(value),
    "needed": is_flag,
    "state": lambda value: value in ("pending", "approved"),
    "binding": is_text,
    "shape": is_text,
    "expires_at": lambda value: _is_seconds(value) and math.isfinite(cast("float", value)),
    "hidden": is_flag,
    "arguments": is_object_or_none,
}

_OPEN_NOW: Final[Mapping[str, Field]] = {
    **_OPEN,
    "written": lambda value: value is None or isinstance(value, str | dict),
}
"""Since version 2."""


def _checked(value: object, wanted: Mapping[str, Field], place: str) -> dict[str, object]:
    if not isinstance(value, dict) or value.keys() != wanted.keys():
        raise _Wrong(place or "its payload")
    for name, fits in wanted.items():
        if not fits(value[name]):
            raise _Wrong(f"{place}.{name}" if place else name)
    return value


def _suspended(payload: object, wanted: Mapping[str, Field]) -> Suspended:
    given = _checked(payload, _PAYLOAD, "")
    calls = tuple(
        _call(_checked(one, _CALL, f"calls[{place}]")) for place, one in enumerate(cast("list[object]", given["calls"]))
    )
    results = _results(cast("list[object]", given["results"]), len(calls))
    opened: dict[int, Open] = {}
    names: set[str] = set()
    for place, one in enumerate(cast("list[object]", given["open"])):
        fields = _checked(one, wanted, f"open[{place}]")
        index, name = cast("int", fields.pop("index")), cast("str", fields["approval_id"])
        if index >= len(calls) or results[index] is not None or index in opened or name in names:
            raise _Wrong(f"open[{place}].index")
        names.add(name)
        opened[index] = Open(**fields)  # type: ignore[arg-type]  # every field was looked at
    closed = cast("dict[str, ApprovalState]", given["closed"])
    if [index for index, result in enumerate(results) if result is None] != sorted(opened) or names & closed.keys():
        raise _Wrong("open")
    key = cast("str", given["key"])
    try:
        bytes.fromhex(key)
    except ValueError:
        raise _Wrong("key") from None
    batch = Batch(
        calls,
        cast("str", given["format"]),
        cast("dict[str, object] | None", given["message"]),
        cast("bool", given["truncated"]),
        cast("str | None", given["response_id"]),
        cast("str | None", given["batch_id"]),
        cast("bool", given["plan"]),
        cast("bool", given["ordered"]),
        cast("bool", given["numbered"]),
        cast("dict[str, object] | None", given["outputs"]),
    )
    values: dict[int, object] = dict(cast("list[tuple[int, object]]", given["values"]))
    if any(index >= len(calls) or results[index] is None for index in values):
        raise _Wrong("values")
    return Suspended(
        batch,
        cast("str", given["run_id"]),
        cast("str | None", given["tenant"]),
        cast("int", given["batch"]),
        cast("str | None", given["notice"]),
        key,
        results,
        opened,
        closed,
        values,
    )


def _call(fields: Mapping[str, object]) -> Call:
    needs = tuple(cast("Sequence[str]", fields["needs"]))
    return Call(**{**fields, "needs": needs})  # type: ignore[arg-type]  # every field was looked at


def _results(given: Sequence[object], size: int) -> tuple[Result | None, ...]:
    if len(given) != size:
        raise _Wrong("results")
    found: list[Result | None] = []
    for place, one in enumerate(given):
        if one is None:
            found.append(None)
            continue
        fields = _checked(one, _RESULT_FIELDS, f"results[{place}]")
        # What is in a durable queue has an answer that stays, and the handle under which it is looked after.
        queued = fields["outcome"] != "pending" or fields["handle"] is not None
        if fields["index"] != place or (fields["code"] is None) != (fields["outcome"] == "ok") or not queued:
            raise _Wrong(f"results[{place}]")
        fields["waited_for"] = tuple(cast("list[str]", fields["waited_for"]))
        found.append(make_result(**fields))  # type: ignore[arg-type]  # every field was looked at
    return tuple(found)
