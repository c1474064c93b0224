"""OpenAI chat completions: tool calls in, `tool` messages out.

Theory. The assistant message carries `tool_calls`, each with an id, a name and the arguments as JSON text that the
model wrote. Each wants one message of role `tool` with its id, right behind the assistant message and before any
other role. The form has no error flag, so a failed call's content says by itself what happened.

House rules. The text of the arguments is not read here. A tool call that is odd (no name, no function, a kind of its
own) is still a call, so that it is answered in its place and its siblings run. Only a response without a place for
calls is refused.

A call of a custom tool carries free text: it becomes the one argument `input`. Beside a call may stand `needs` or
`depends_on`, ids of other calls, which no provider knows and none gets back, and `caller`: then code made it, not the
model, and that goes back as it came.

Not here: the legacy `function_call`, which has no id to answer, and the Responses API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import is_not
from typing import Final

from towerman.adapters.reading import (
    NEEDS,
    Fields,
    argument_value,
    beside,
    described,
    fields_of,
    identifier,
    items_of,
    opened,
    refuse,
    tool_name,
)
from towerman.adapters.writing import (
    as_text,
    check_pairing,
    clean_name,
    export_ids,
    plain,
    plain_fields,
    plain_object,
    shown,
    spoken,
)
from towerman.calls import Batch, Call, Result
from towerman.errors import InputError, PolicyError

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
LONGEST_NAME: Final = 64

CUT: Final = frozenset({"length", "content_filter"})
"""Finish reasons after which the last call may be incomplete."""

# Fields of a response that a request has no place for, or that are written anew.
_NOT_IN_A_MESSAGE: Final = frozenset(
    {"role", "content", "tool_calls", "annotations", "audio", "function_call", "parsed"}
)
_NOT_IN_A_CALL: Final = frozenset({"id", "type", "function", "custom", "index", *NEEDS})
_NOT_IN_A_FUNCTION: Final = frozenset({"name", "arguments", "parsed_arguments", *NEEDS})


def decode(data: object) -> Batch:
    """Read the tool calls of a chat completion, of its message, or of a bare list of tool calls.

    Args:
        data: an SDK object, its plain form, or JSON text.

    Raises:
        InputError: there is no place for calls in it; the message names where it was looked for.
    """
    value = opened(data)
    if isinstance(value, Batch):
        return value
    if not isinstance(value, Mapping):
        return _read({"role": "assistant", "content": None, "tool_calls": value}, "", listed=True)
    if "choices" not in value:
        return _read(value, "")
    message, finish, place = _chosen(value["choices"])
    response_id = identifier(value.get("id")) or None
    return _read(message, place, truncated=finish in CUT if isinstance(finish, str) else False, response_id=response_id)


def _chosen(choices: object) -> tuple[Fields, object, str]:
    """The message to answer, why it ended, and its place: the one choice with calls, else the first."""
    items = items_of(choices)
    if not items:
        raise InputError(f"choices: a list with at least one choice is wanted, got {described(choices)}")
    found: list[tuple[Fields, object, str]] = []
    for index, item in enumerate(items):
        choice = fields_of(item)
        if choice is None:
            raise InputError(f"choices[{index}]: an object is wanted, got {described(item)}")
        message = fields_of(choice.get("message"))
        if message is None:
            hint = "; collect a stream into one response first" if "delta" in choice else ""
            told = described(choice.get("message"))
            raise InputError(f"choices[{index}].message: an object is wanted, got {told}{hint}")
        found.append((message, choice.get("finish_reason"), f"choices[{index}].message."))
    with_calls = [index for index, (message, _, _) in enumerate(found) if message.get("tool_calls")]
    if len(with_calls) > 1:
        told = " and ".join(f"choices[{index}]" for index in with_calls)
        raise InputError(f"choices: {told} hold tool calls; hand in the message of the choice that the agent follows")
    return found[with_calls[0] if with_calls else 0]


def _read(
    message: Fields, place: str, *, truncated: bool = False, response_id: str | None = None, listed: bool = False
) -> Batch:
    """The batch of an assistant message."""
    role = message.get("role")
    if role is None and message.keys().isdisjoint(("tool_calls", "content", "function_call")):
        refuse(message, "openai", place.rstrip("."))
    if role is not None and role != "assistant":
        raise InputError(f"{place}role: 'assistant' is wanted; hand in the message that the model wrote")
    given = message.get("tool_calls")
    if not given and message.get("function_call") is not None:
        raise InputError(
            f"{place}function_call: this retired form has no id to answer; declare the tools with `tools=` "
            "instead of `functions=`, so that the model writes `tool_calls`"
        )
    if given is None:
        return Batch((), "openai", message, truncated, response_id)
    items = items_of(given)
    if items is None:
        raise InputError(f"{place}tool_calls: a list is wanted, got {described(given)}")
    opened_items = [item if type(item) is dict else fields_of(item) for item in items]
    if listed and items and not any(item and ("function" in item or "custom" in item) for item in opened_items):
        refuse(given, "openai")
    if any(map(is_not, items, opened_items)):
        message = {**message, "tool_calls": opened_items}
    return Batch(tuple(map(_call, opened_items)), "openai", message, truncated, response_id)


def _call(item: Fields | None) -> Call:
    """One call; an odd one has no name, and is answered `unknown_tool` in its place."""
    if item is None:
        return Call("", "")
    function = item.get("function")
    if type(function) is not dict:
        function = fields_of(function)
        if function is None:
            return _custom_call(item)
    name = function.get("name")
    arguments = function.get("arguments")
    own = item.get("id")
    if len(item) > 3 or len(function) > 2:
        needs, caller = beside(item, function)
        if needs or caller:
            return Call(tool_name(name), argument_value(arguments), identifier(own), needs, caller=caller)
    return Call(
        name if type(name) is str else tool_name(name),
        arguments if type(arguments) is str else argument_value(arguments),
        own if type(own) is str else identifier(own),
    )


def _custom_call(item: Fields) -> Call:
    custom = fields_of(item.get("custom"))
    if custom is None:
        return Call("", "", identifier(item.get("id")))
    needs, caller = beside(item, custom)
    arguments = {"input": custom.get("input")}
    return Call(tool_name(custom.get("name")), arguments, identifier(item.get("id")), needs, caller=caller)


def encode(batch: Batch, results: Sequence[Result]) -> list[dict[str, object]]:
    """One `tool` message for each result, in emitted order.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
    """
    check_pairing(batch, results)
    return _messages(export_ids(batch), results)


def turn(batch: Batch, results: Sequence[Result]) -> list[dict[str, object]]:
    """The assistant message as a request takes it, then one `tool` message for each result.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
    """
    check_pairing(batch, results)
    ids = export_ids(batch)
    return [_assistant(batch, results, ids), *_messages(ids, results)]


def _messages(ids: Sequence[str], results: Sequence[Result]) -> list[dict[str, object]]:
    return [
        {"role": "tool", "tool_call_id": own, "content": shown(result)}
        for own, result in zip(ids, results, strict=True)
    ]


def _assistant(batch: Batch, results: Sequence[Result], ids: Sequence[str]) -> dict[str, object]:
    message = batch.message if batch.format == "openai" else None
    out: dict[str, object] = {"role": "assistant"}
    items: Sequence[object] = ()
    if message is None:
        out["content"] = spoken(batch.message) or None
    else:
        out["content"] = plain(message.get("content"))
        out.update(plain_fields(message, _NOT_IN_A_MESSAGE))
        audio = fields_of(message.get("audio"))
        if audio is not None and "id" in audio:
            out["audio"] = {"id": plain(audio["id"])}
        given = items_of(message.get("tool_calls")) or ()
        items = given if len(given) == len(batch.calls) else ()
    if batch.calls:
        out["tool_calls"] = [
            _tool_call(call, own, fields_of(items[place]) if items else None, valid=results[place].started)
            for place, (call, own) in enumerate(zip(batch.calls, ids, strict=True))
        ]
    elif out["content"] is None:
        out["content"] = ""
    return out


def _tool_call(call: Call, own: str, item: Fields | None, *, valid: bool) -> dict[str, object]:
    name = clean_name(call.tool, NAME, LONGEST_NAME)
    if item is not None and item.get("type") == "custom" and isinstance(call.arguments, Mapping):
        text = plain(call.arguments.get("input"))
        custom = {"name": name, "input": text if isinstance(text, str) else ""}
        return {"id": own, "type": "custom", "custom": custom, **plain_fields(item, _NOT_IN_A_CALL)}
    function: dict[str, object] = {"name": name, "arguments": as_text(call.arguments, valid=valid)}
    out: dict[str, object] = {"id": own, "type": "function", "function": function}
    if item is not None:
        inner = fields_of(item.get("function"))
        if inner is not None and len(inner) > 2:
            function.update(plain_fields(inner, _NOT_IN_A_FUNCTION))
        if len(item) > 3:
            out.update(plain_fields(item, _NOT_IN_A_CALL))
    return out


def schemas(tools: Sequence[tuple[str, str, Mapping[str, object]]]) -> list[dict[str, object]]:
    """Tool definitions for `tools=`.

    Args:
        tools: (name, description, JSON schema of an object) each.

    Raises:
        PolicyError: a name that the provider cannot take.
    """
    out: list[dict[str, object]] = []
    for name, description, schema in tools:
        if not NAME.fullmatch(name):
            raise PolicyError(
                f"tool {name[:LONGEST_NAME]!r}: openai takes names of 1 to {LONGEST_NAME} letters, digits, '_' and '-' "
                "only; give it another with `name=`"
            )
        function: dict[str, object] = {"name": name}
        if description:
            function["description"] = description
        parameters = plain_object(schema)
        # An object schema without `properties` is refused.
        parameters.setdefault("type", "object")
        parameters.setdefault("properties", {})
        function["parameters"] = parameters
        out.append({"type": "function", "function": function})
    return out


def provider_options(parallel: bool) -> dict[str, object]:
    """The switch for several calls in one response."""
    return {"parallel_tool_calls": parallel}
