"""Towerman's own form: calls as plain dicts or `Call` objects, results as plain dicts.

Theory. A call is `{"tool": ..., "arguments": {...}, "id": ..., "needs": [ids], "if_failed": ..., "idempotency_key":
...}`; a batch is a list of them, or `{"calls": [...]}`. `name` and `depends_on` are read for `tool` and `needs`. The
form is written by people and programs more than by models, so a wrong key is a mistake to be told at once: it is
refused with its path and the nearest right key.

A result has the fixed keys of `RESULT_KEYS`. No times are among them: the same inputs and outcomes give the same bytes.

`{"plan": [...]}` is the same list as a plan: references in the arguments are read when it is run.

Not here: what a reference is (plan).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Final

from towerman.adapters.reading import (
    Fields,
    argument_value,
    described,
    fields_of,
    identifier,
    items_of,
    opened,
    plain_text,
    refuse,
    tool_name,
)
from towerman.adapters.writing import check_pairing, clean_text, export_ids, plain_object, shown
from towerman.calls import Batch, Call, IfFailed, Result
from towerman.errors import InputError, PolicyError

CALL_KEYS: Final = ("tool", "name", "arguments", "id", "needs", "depends_on", "idempotency_key", "if_failed", "caller")
"""The keys of a call; `name` says the same as `tool`, and `depends_on` the same as `needs`."""

RESULT_KEYS: Final = (
    "index",
    "id",
    "tool",
    "outcome",
    "code",
    "message",
    "content",
    "started",
    "applied",
    "retryable",
    "retry_after",
    "attempts",
    "still_running",
    "original_bytes",
    "handle",
    "shared_with",
)
"""The keys of a written result, in this order."""

_ALLOWED: Final = frozenset(CALL_KEYS)


def decode(data: object) -> Batch:
    """Read a list of calls, `{"calls": [...]}`, or a plan, `{"plan": [...]}`.

    Args:
        data: a list of `Call` or dicts, `{"calls": [...]}`, `{"plan": [...]}`, or JSON text of one of these.

    Raises:
        InputError: the form is not this one; the message names the place and the fix.
    """
    value = opened(data)
    if isinstance(value, Batch):
        return value
    place = ""
    if isinstance(value, Mapping):
        place = "plan" if "plan" in value else "calls"
        if place not in value:
            refuse(value, "towerman")
        for key in value:
            if key != place:
                what = "a plan" if place == "plan" else "a batch"
                raise InputError(f"{_shown_key(key)}: unknown key beside {place!r}; {what} has {place!r} only")
        items = items_of(value[place])
        if items is None:
            raise InputError(f"{place}: a list is wanted, got {described(value[place])}")
    else:
        items = value
    return Batch(read_calls(items, place), "towerman", plan=place == "plan")


def read_calls(items: Sequence[object], place: str) -> tuple[Call, ...]:
    """The calls of a list.

    Args:
        items: `Call` objects or dicts.
        place: where the list stands, for messages.

    Raises:
        InputError: one of them is neither; the message names the place and the fix.
    """
    return tuple(
        item if type(item) is Call and _is_sound(item) else _call(item, f"{place}[{index}]")
        for index, item in enumerate(items)
    )


def checked_batch(batch: Batch) -> Batch:
    """A batch that was made by hand: its calls are looked at like those of a list.

    Raises:
        InputError: what it holds is no tuple of calls; the message names the place and the fix.
    """
    calls: object = batch.calls
    if not isinstance(calls, tuple | list):
        raise InputError(f"calls: a tuple of Call is wanted, got {described(calls)}")
    if isinstance(calls, tuple) and all(type(call) is Call and _is_sound(call) for call in calls):
        return batch
    return replace(batch, calls=decode(list(calls)).calls)


def _is_sound(call: Call) -> bool:
    """The fields of a Call have the types that they are declared with (a dataclass does not look)."""
    tool: object = call.tool
    own: object = call.id
    key: object = call.idempotency_key
    return (
        type(tool) is str
        and type(own) is str
        and type(call.arguments) in (dict, str)
        and type(call.needs) is tuple
        and not call.needs
        and not call.caller
        and (key is None or type(key) is str)
    )


def _call(item: object, place: str) -> Call:
    if isinstance(item, Call):
        one = _checked(item.tool, item.arguments, item.id, item.needs, item.idempotency_key, item.if_failed, place)
        return replace(one, caller=_key(item.caller, f"{place}.caller") or "") if item.caller else one
    fields = fields_of(item)
    if fields is None:
        raise InputError(f"{place}: a Call or a dict is wanted, got {described(item)}")
    if not _ALLOWED.issuperset(fields):
        _refuse_key(fields, place)
    if "tool" not in fields and "name" not in fields:
        raise InputError(f"{place}.tool: missing; name the tool to call")
    one = _checked(
        _either(fields, "tool", "name", place),
        fields.get("arguments"),
        fields.get("id"),
        _either(fields, "needs", "depends_on", place),
        fields.get("idempotency_key"),
        fields.get("if_failed"),
        place,
    )
    caller = fields.get("caller")
    return replace(one, caller=_key(caller, f"{place}.caller") or "") if caller else one


def _checked(
    tool: object, arguments: object, own: object, needs: object, key: object, if_failed: object, place: str
) -> Call:
    return Call(
        tool if type(tool) is str else tool_name(tool),
        arguments if type(arguments) is dict else {} if arguments is None else argument_value(arguments),
        own if type(own) is str else _id(own, f"{place}.id"),
        () if needs is None else _needs(needs, f"{place}.needs"),
        None if key is None else _key(key, f"{place}.idempotency_key"),
        "skip" if if_failed is None else _if_failed(if_failed, f"{place}.if_failed"),
    )


def _refuse_key(fields: Fields, place: str) -> None:
    wrong: object = next(key for key in fields if key not in _ALLOWED)
    near = get_close_matches(wrong, CALL_KEYS, 1, 0.5) if isinstance(wrong, str) else []
    fix = f"did you mean {near[0]!r}?" if near else f"a call has {', '.join(map(repr, CALL_KEYS))}"
    raise InputError(f"{place}.{_shown_key(wrong)}: unknown key; {fix}")


def _shown_key(key: object) -> str:
    """A key for a message: as it is when it is a short word, else only its kind."""
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 32 else f"<{type(key).__name__}>"


def _either(fields: Fields, first: str, second: str, place: str) -> object:
    """The value of a key that has two names, given under one of them."""
    if fields.get(second) is None:
        return fields.get(first)
    if fields.get(first) is not None:
        raise InputError(f"{place}: has both {first!r} and {second!r}; keep {first!r}")
    return fields[second]


def _id(value: object, place: str) -> str:
    if value is None:
        return ""
    own = identifier(value)
    if not own and not isinstance(value, str):
        raise InputError(f"{place}: text is wanted, got {described(value)}")
    return own


def _needs(value: object, place: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else items_of(value)
    if items is None:
        raise InputError(f"{place}: a list of ids is wanted, got {described(value)}")
    needs = tuple(map(identifier, items))
    if not all(needs):
        wrong = needs.index("")
        raise InputError(f"{place}[{wrong}]: the id of a call is wanted, got {described(items[wrong])}")
    return needs


def _key(value: object, place: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return plain_text(value)
    raise InputError(f"{place}: text is wanted, got {described(value)}")


def _if_failed(value: object, place: str) -> IfFailed:
    if value == "skip":
        return "skip"
    if value == "run_anyway":
        return "run_anyway"
    raise InputError(f"{place}: 'skip' or 'run_anyway' is wanted, got {described(value)}")


def encode(batch: Batch, results: Sequence[Result]) -> list[dict[str, object]]:
    """One dict for each result, in emitted order, with the keys of RESULT_KEYS.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
    """
    check_pairing(batch, results)
    return _results(export_ids(batch), results)


def turn(batch: Batch, results: Sequence[Result]) -> list[dict[str, object]]:
    """`{"calls": [...]}`, or `{"plan": [...]}`, as it can be read again, then one dict for each result.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
    """
    check_pairing(batch, results)
    ids = export_ids(batch)
    calls = [_written(call, own) for call, own in zip(batch.calls, ids, strict=True)]
    return [{"plan" if batch.plan else "calls": calls}, *_results(ids, results)]


def _results(ids: Sequence[str], results: Sequence[Result]) -> list[dict[str, object]]:
    return [
        {
            "index": result.index,
            "id": own,
            "tool": clean_text(result.tool),
            "outcome": result.outcome,
            "code": result.code,
            "message": clean_text(result.message),
            "content": shown(result),
            "started": result.started,
            "applied": result.applied,
            "retryable": result.retryable,
            "retry_after": result.retry_after,
            "attempts": result.attempts,
            "still_running": result.still_running,
            "original_bytes": result.original_bytes,
            "handle": result.handle,
            "shared_with": result.shared_with,
        }
        for own, result in zip(ids, results, strict=True)
    ]


def _written(call: Call, own: str) -> dict[str, object]:
    arguments = call.arguments
    out: dict[str, object] = {
        "id": own,
        "tool": clean_text(call.tool),
        "arguments": clean_text(arguments) if isinstance(arguments, str) else plain_object(arguments),
    }
    if call.needs:
        out["needs"] = [clean_text(need) for need in call.needs]
    if call.if_failed != "skip":
        out["if_failed"] = call.if_failed
    if call.caller:
        out["caller"] = clean_text(call.caller)
    if call.idempotency_key is not None:
        out["idempotency_key"] = clean_text(call.idempotency_key)
    return out


def schemas(tools: Sequence[tuple[str, str, Mapping[str, object]]]) -> list[dict[str, object]]:
    """Tool definitions in Towerman's own words: `name`, `description`, `schema`.

    Args:
        tools: (name, description, JSON schema of an object) each.

    Raises:
        PolicyError: a tool without a name.
    """
    out: list[dict[str, object]] = []
    for name, description, schema in tools:
        if not name:
            raise PolicyError("a tool without a name cannot be called; give it one with `name=`")
        out.append({"name": name, "description": description, "schema": {"type": "object", **plain_object(schema)}})
    return out


def provider_options(parallel: bool) -> dict[str, object]:
    """Nothing: whoever writes this form decides by itself."""
    return {}
