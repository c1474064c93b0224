"""Opening what was handed in: text, SDK objects and mappings become plain lists and dicts, and tell their form.

Theory. A host hands over what it has: the SDK's response object, its message, the same as a dict, or JSON text from a
file. All of it is opened into plain data first, so that an adapter reads one kind of thing. The form shows in the
structure that the provider made (keys and block types), never in what the model wrote.

JSON text takes one care more. A parser keeps the last of two equal keys and accepts NaN without a word, yet such
arguments are refused for their call alone. So arguments with either are put back as text, which the arguments room
reads with its own rules.

House rules. An error names the place, the type that was found and keys from a closed list: never a value, never a
key of unknown origin (G8). Whatever comes in, the only exception that goes out is `InputError`.

Not here: what a format's keys mean (openai, anthropic, native).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Final, NoReturn

from towerman.calls import Batch, Call
from towerman.errors import InputError

Fields = Mapping[str, object]

ACCEPTED: Final = (
    "accepted are: an OpenAI chat completion or its message, an Anthropic message, a list of tool calls or content "
    "blocks, a list of Call or of dicts with 'tool' and 'arguments', {'calls': [...]}, or one of these as JSON text"
)

# The keys that an error may repeat: those of the known forms and of their usual mix-ups.
KNOWN: Final = frozenset(
    {
        *("calls", "plan", "tool", "name", "arguments", "id", "needs", "depends_on", "idempotency_key"),
        *("choices", "message", "delta", "tool_calls", "function_call", "function", "custom", "finish_reason"),
        *("content", "type", "role", "input", "stop_reason", "model", "object", "error"),
        *("messages", "output", "candidates", "stopReason"),
        *("task", "args", "dep", "label", "value", "task_nodes", "task_links", "source", "target"),
    }
)

BLOCKS: Final = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})
BLOCK_ENDINGS: Final = ("_tool_use", "_tool_result")

NEEDS: Final = ("needs", "depends_on")
"""The names under which calls that come before may stand beside a provider's call."""

LONGEST_INTEGER: Final = 4_300
"""Digits from which Python itself refuses to read a number."""


class RepeatedKeys(dict[str, object]):
    """A JSON object in which a key stands more than once; the last one counts, `pairs` has them all."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def fields_of(value: object) -> Fields | None:
    """The fields of a mapping, of an SDK object as plain data, or of a namespace; None for anything else.

    Only fields that the provider sent are taken, under the provider's names: what an SDK adds by itself is refused
    when it is sent back. A `SimpleNamespace` is what tests and small clients make in place of an SDK object.
    """
    if type(value) is dict:
        return value
    try:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, SimpleNamespace):
            return dict(vars(value))
        if isinstance(value, type):
            return None
        dump = getattr(value, "model_dump", None)
        if dump is None:
            return None
        fields = dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    except Exception:
        return None
    return fields if isinstance(fields, dict) else None


def items_of(value: object) -> Sequence[object] | None:
    """A list or another sequence that is no text, or None."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return list(value)
    return None


def opened(data: object) -> Batch | Fields | Sequence[object]:
    """What was handed in, as a batch, a mapping or a sequence; what is inside may still be SDK objects.

    Raises:
        InputError: it is neither, or text that is no JSON.
    """
    if type(data) is dict or isinstance(data, Batch):
        return data
    if isinstance(data, str):
        return opened(_parsed(data))
    if isinstance(data, bytes | bytearray | memoryview):
        try:
            return opened(_parsed(bytes(data).decode("utf-8-sig")))
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text: a wrong byte at position {error.start}; {ACCEPTED}") from None
    fields = fields_of(data)
    if fields is not None:
        return fields
    items = items_of(data)
    if items is not None:
        return items
    refuse(data)


def detect(value: Batch | Fields | Sequence[object]) -> str | None:
    """The format of something opened, or None when it has no known form."""
    if isinstance(value, Batch):
        return value.format
    if not isinstance(value, Mapping):
        if not value:
            return "towerman"
        return next((form for item in value if (form := _format_of_item(item)) is not None), None)
    if "choices" in value:
        return "openai"
    if "calls" in value or "plan" in value:
        return "towerman"
    kind = value.get("type")
    if kind == "message":
        return "anthropic"
    if kind is not None:
        return None
    if "tool_calls" in value or "function_call" in value:
        return "openai"
    if "role" in value and items_of(value.get("content")) is not None:
        return "anthropic"
    return "openai" if value.get("role") == "assistant" else None


def _format_of_item(item: object) -> str | None:
    """The format that one item of a bare list belongs to."""
    if isinstance(item, Call):
        return "towerman"
    fields = fields_of(item)
    if fields is None:
        return None
    kind = fields.get("type")
    if "function" in fields or kind in ("function", "custom"):
        return "openai"
    if isinstance(kind, str) and (kind in BLOCKS or kind.endswith(BLOCK_ENDINGS)):
        return "anthropic"
    return "towerman" if "tool" in fields or ("name" in fields and kind is None) else None


def refuse(data: object, form: str = "", place: str = "") -> NoReturn:
    """Raise the InputError for something of no known form: what was seen, a hint, and what is accepted."""
    where = f"{place}: " if place else ""
    of_form = f" in the form {form!r}" if form else ""
    hint = _hint(data)
    fix = f"{hint}; {ACCEPTED}" if hint else ACCEPTED
    raise InputError(f"{where}no batch of calls{of_form}: got {described(data)}; {fix}")


def described(value: object) -> str:
    """What a thing is, in words that hold no value: its type and those of its keys that are known."""
    name = type(value).__name__[:64]
    if isinstance(value, Mapping):
        known = sorted(key for key in value if isinstance(key, str) and key in KNOWN)
        others = len(value) - len(known)
        told = ", ".join(map(repr, known)) if known else "no known key"
        return f"{name} with {told}{f' and {others} more' if others else ''}"
    if isinstance(value, list | tuple):
        return f"{name} of {len(value)}{f', the first a {type(value[0]).__name__[:64]}' if value else ''}"
    return name


def _hint(data: object) -> str:
    """The likely mistake behind something that has no known form, or ""."""
    name = type(data).__name__
    if name in ("coroutine", "Task", "Future"):
        return "await it first"
    if type(data).__module__ == "unittest.mock":
        return "a mock has no data of its own; let it return a dict or a SimpleNamespace"
    if name.endswith("Stream") or hasattr(type(data), "__anext__") or hasattr(type(data), "__next__"):
        return "collect a stream into one response first"
    if isinstance(data, Call):
        return "put a single call into a list"
    if isinstance(data, Mapping):
        if data.get("tool") or data.get("name") or "function" in data or data.get("type") == "tool_use":
            return "put a single call into a list"
        if "error" in data:
            return "this is an error response"
        if "delta" in data or str(data.get("type", "")).startswith(("message_", "content_block_")):
            return "collect a stream into one response first"
        if "messages" in data:
            return "hand in the last assistant message"
    if isinstance(data, list | tuple) and data and isinstance(data[0], Mapping) and "role" in data[0]:
        return "for a list of messages, hand in the last assistant message"
    return ""


def identifier(value: object) -> str:
    """An id as it came; a whole number as its digits; "" for what cannot be an id."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**64:
        return str(value)
    return ""


def plain_text(value: str) -> str:
    """Text of the plain type: what a subclass would do when it is compared or hashed does not matter any more."""
    return value if type(value) is str else str.__str__(value)


def tool_name(value: object) -> str:
    """A name as it came, or "" for what is no text: that call is answered `unknown_tool`, its siblings run."""
    return plain_text(value) if isinstance(value, str) else ""


def beside(*places: Fields) -> tuple[tuple[str, ...], str]:
    """What stands beside a provider's call: the ids of calls that it needs, and what made it.

    Providers know no needs; who puts `needs` or `depends_on` there means the same as in Towerman's own form. An id that
    is none becomes one that no call has, so that the calls are refused, and not run without regard to it.

    Args:
        places: the objects in which it may stand, the nearest first.

    Returns:
        The ids, and for a call of code that the provider runs its kind and id; "" for a call of the model itself.
    """
    needs: tuple[str, ...] = ()
    caller = ""
    for fields in places:
        wanted = next((fields[name] for name in NEEDS if fields.get(name) is not None), None)
        if wanted is not None and not needs:
            items = [wanted] if isinstance(wanted, str) else items_of(wanted)
            needs = ("",) if items is None else tuple(map(identifier, items))
        maker = fields_of(fields.get("caller")) if "caller" in fields else None
        if maker is not None and not caller:
            kind = tool_name(maker.get("type"))
            own = identifier(maker.get("tool_id")) or identifier(maker.get("caller_id"))
            if kind and kind != "direct":
                caller = f"{kind}:{own}" if own else kind
    return needs, caller


def argument_value(value: object) -> Mapping[str, object] | str:
    """Arguments as they came: text or a mapping; "" where there are none; other things as JSON text, to be refused
    for that call by the arguments room."""
    if isinstance(value, str):
        return plain_text(value)
    if value is None:
        return ""
    fields = fields_of(value)
    if fields is not None:
        return fields
    try:
        return json.dumps(value)
    except Exception:  # what no JSON can be made of, and what fails when it is looked at
        return "null"


def _parsed(text: str) -> object:
    """JSON text as plain data; arguments that hold a repeated key or a number that is none stay text."""
    odd: list[bool] = []

    def of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        odd.append(True)
        return RepeatedKeys(pairs)

    def of_constant(name: str) -> float:
        odd.append(True)
        return float(name)

    def of_integer(digits: str) -> float:
        if len(digits) <= LONGEST_INTEGER:
            return int(digits)
        odd.append(True)
        return math.inf

    text = text.removeprefix("\ufeff")
    try:
        try:
            value = json.loads(text, object_pairs_hook=of_pairs, parse_constant=of_constant)
        except json.JSONDecodeError:
            raise
        except ValueError:
            value = json.loads(text, object_pairs_hook=of_pairs, parse_constant=of_constant, parse_int=of_integer)
        if odd:
            _keep_text(value, "")
    except json.JSONDecodeError as error:
        raise InputError(f"no JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise InputError(f"no batch of calls: the JSON text is nested too deeply; {ACCEPTED}") from None
    if isinstance(value, str | int | float) or value is None:
        refuse(value)
    return value


def _keep_text(value: object, place: str) -> None:
    """Turn arguments that plain data would falsify back into text, in place; refuse a repeated key around them."""
    if isinstance(value, dict):
        if isinstance(value, RepeatedKeys):
            keys = [key for key, _ in value.pairs]
            twice = next((key for key in keys if key in KNOWN and keys.count(key) > 1), None)
            if twice is not None:
                raise InputError(f"{place}{'.' if place else ''}{twice}: this key stands twice; keep one")
        for key, inner in value.items():
            if key in ("arguments", "input", "args") and isinstance(inner, dict) and _falsified(inner):
                value[key] = _text(inner)
            else:
                _keep_text(inner, f"{place}{'.' if place else ''}{key if key in KNOWN else '<other>'}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _keep_text(inner, f"{place}[{index}]")


def _falsified(value: object) -> bool:
    if isinstance(value, dict):
        return isinstance(value, RepeatedKeys) or any(map(_falsified, value.values()))
    if isinstance(value, list):
        return any(map(_falsified, value))
    return isinstance(value, float) and not math.isfinite(value)


def _text(value: object) -> str:
    if isinstance(value, dict):
        pairs = value.pairs if isinstance(value, RepeatedKeys) else value.items()
        return "{" + ", ".join(f"{json.dumps(key)}: {_text(inner)}" for key, inner in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return json.dumps(value)
