"""Provider formats: a response becomes a Batch, results become the messages that the provider accepts.

Theory. Each format is two pure functions, decode and encode; `turn` adds the assistant message, so that ids agree on
both sides even where the provider's were missing or repeated. The form of the input is found by looking at it, so a
host hands over what it has.

House rules. A call is known by its place in the batch, never by its id: one result for each, in emitted order (G1).
Ids go back as they came wherever they can be told apart. What the *model* got wrong is answered for that call only;
what the *host* got wrong is an InputError with the place and the fix.

A batch read in one format can be written in another: text and calls are carried over, a provider's own fields
(thinking, signatures, audio) are not.

Not here: the content of results (sealed by the runner), and checking or mending a whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

from towerman.adapters import reading
from towerman.calls import Batch, Call, Result
from towerman.errors import InputError, PolicyError

__all__ = [
    "FORMATS",
    "decode",
    "detect",
    "encode",
    "provider_options",
    "schemas",
    "turn",
]

FORMATS: Final[tuple[str, ...]] = ("openai", "anthropic", "towerman")
"""The names of the formats."""

Messages = list[dict[str, object]]


class _Adapter(Protocol):
    """What each format's module has."""

    def decode(self, data: object) -> Batch: ...  # pragma: no cover - a protocol has no body
    def encode(self, batch: Batch, results: Sequence[Result]) -> Messages: ...  # pragma: no cover
    def turn(self, batch: Batch, results: Sequence[Result]) -> Messages: ...  # pragma: no cover
    def schemas(self, tools: Sequence[tuple[str, str, Mapping[str, object]]]) -> Messages: ...  # pragma: no cover
    def provider_options(self, parallel: bool) -> dict[str, object]: ...  # pragma: no cover


def _adapter(format: str) -> _Adapter:
    given: object = format
    if not isinstance(given, str):
        raise PolicyError(f"format: a name of a format, as text; got {type(given).__name__}")
    # Imported on first use: most programs speak one format.
    if format == "openai":
        from towerman.adapters import openai

        return cast(_Adapter, openai)
    if format == "anthropic":
        from towerman.adapters import anthropic

        return cast(_Adapter, anthropic)
    if format == "towerman":
        from towerman.adapters import native

        return cast(_Adapter, native)
    known = ", ".join(map(repr, FORMATS))
    raise PolicyError(f"format: unknown {format[:32]!r}; known are {known}")


def detect(data: object) -> str:
    """Say which format something is in: "openai", "anthropic" or "towerman".

    Args:
        data: an SDK object, a dict, a list, or JSON text (str or bytes).

    Raises:
        InputError: it has no known form; the message says what was seen (never a value) and what is accepted.
    """
    return _detected(reading.opened(data))


def _detected(value: Batch | reading.Fields | Sequence[object]) -> str:
    found = reading.detect(value)
    if found is None:
        reading.refuse(value)
    return found


def decode(data: object, format: str | None = None) -> Batch:
    """Read the calls of one model response, in emitted order.

    Args:
        data: a provider's response, its message, a bare list of tool calls or content blocks, a list of Call or dict,
            or one of these as JSON text; a Batch is looked through and returned as it is. What is given is not
            changed, and must not be changed while the batch is in use.
        format: the format to read it as; None to find out.

    Raises:
        InputError: it is no batch of calls in that form; the message names the place and the fix.
        PolicyError: an unknown format.
    """
    if format is not None:
        _adapter(format)
    try:
        value = reading.opened(data)
        adapter = _adapter(_detected(value) if format is None else format)
        if isinstance(value, Batch):
            from towerman.adapters.native import checked_batch

            return checked_batch(value)
        return adapter.decode(value)
    except (InputError, PolicyError):
        raise
    except Exception as fault:  # of an object that does not let itself be looked at
        name = type(data).__name__[:64]
        raise InputError(f"a {name} was handed in that fails when it is read ({type(fault).__name__})") from None


def encode(batch: Batch, results: Sequence[Result], format: str | None = None) -> Messages:
    """Write the messages that carry the results, one result for each call, in emitted order.

    Args:
        batch: the calls.
        results: one for each call, in the same order.
        format: the format to write; None for the batch's own.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
        PolicyError: an unknown format.
    """
    return _adapter(batch.format if format is None else format).encode(batch, results)


def turn(batch: Batch, results: Sequence[Result], format: str | None = None) -> Messages:
    """Write the assistant message as the provider wants it back, followed by its result messages.

    Ids agree between both, also where the provider's were missing or repeated. Everything returned is new and may be
    changed.

    Args:
        batch: the calls.
        results: one for each call, in the same order.
        format: the format to write; None for the batch's own.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
        PolicyError: an unknown format.
    """
    return _adapter(batch.format if format is None else format).turn(batch, results)


def plain_call(call: Call) -> Call:
    """A call whose arguments are plain JSON data or text; what JSON has no form for is written as in a result."""
    from dataclasses import replace

    from towerman.adapters.writing import plain_object

    if isinstance(call.arguments, str):
        return call
    return replace(call, arguments=plain_object(call.arguments))


def plain_message(message: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The assistant message as plain JSON data."""
    from towerman.adapters.writing import plain_object

    return None if message is None else plain_object(message)


def schemas(tools: Sequence[tuple[str, str, Mapping[str, object]]], format: str) -> Messages:
    """Write the tool definitions that a request carries.

    Args:
        tools: (name, description, JSON schema of the arguments) each.
        format: the provider's format.

    Raises:
        PolicyError: an unknown format, a name that the provider cannot take, a repeated name, or a schema that
            describes no object.
    """
    adapter = _adapter(format)
    seen: set[str] = set()
    for name, _, schema in tools:
        if name in seen:
            raise PolicyError(f"tool {name[:64]!r}: two tools have this name; give one another with `name=`")
        seen.add(name)
        if schema.get("type", "object") != "object":
            raise PolicyError(f"tool {name[:64]!r}: the schema's type must be 'object', whose properties are arguments")
    return adapter.schemas(tools)


def provider_options(format: str, parallel: bool = False) -> dict[str, object]:
    """The request options that let a model emit several calls in one response, or not, in the provider's own words.

    Towerman enforces its limits whatever this says.

    Args:
        format: the provider's format.
        parallel: several calls are wanted.

    Raises:
        PolicyError: an unknown format.
    """
    return _adapter(format).provider_options(parallel)
