"""Anthropic messages: `tool_use` blocks in, one user message of `tool_result` blocks out.

Theory. The assistant message is a list of blocks. A `tool_use` block is a call, with its input as an object; text and
thinking stand among them, and thinking goes back exactly as it came. All results go into the one next user message,
before any text, with `is_error` on every one that is no ordinary answer.

House rules. Blocks that the provider runs itself (`server_tool_use`, `mcp_tool_use`) are no calls of ours. An input
that came as text (a stream without validation gives that) stays text: the arguments room reads or refuses it, and what
goes back is an object, as the form wants.

A block with a `caller` other than `direct` is a call of code that the model wrote and that waits for the answer: its
arguments are values already. The answer to such calls may hold results only, and that is all that is ever written here.
That goes back as it came. `needs` or `depends_on` beside a call are ids of other calls, which the provider does not
know and does not get back.

Not here: how a refused argument is worded (arguments).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    ANY_ID,
    as_object,
    check_pairing,
    clean_name,
    export_ids,
    plain_fields,
    plain_object,
    shown,
    spoken,
)
from towerman.calls import Batch, Call, Result
from towerman.errors import InputError, PolicyError

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
LONGEST_NAME: Final = 128

FOREIGN_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,4096}")
"""What an id must be when another provider or the host made it."""

CUT: Final = frozenset({"max_tokens", "model_context_window_exceeded", "refusal"})
"""Stop reasons after which the last call may be incomplete."""

_WRITTEN_ANEW: Final = frozenset({"type", "id", "name", "input", *NEEDS})
_NOT_IN_A_TEXT: Final = frozenset({"parsed_output"})


def decode(data: object) -> Batch:
    """Read the `tool_use` blocks of a message, or of a bare list of content blocks.

    Args:
        data: an SDK object, its plain form, or JSON text.

    Raises:
        InputError: there is no place for calls in it; the message names where it was looked for.
    """
    value = opened(data)
    if isinstance(value, Batch):
        return value
    if not isinstance(value, Mapping):
        return _read(value, "")
    if "content" not in value:
        refuse(value, "anthropic")
    role = value.get("role")
    if role is not None and role != "assistant":
        raise InputError("role: 'assistant' is wanted; hand in the message that the model wrote")
    content = value["content"]
    stop = value.get("stop_reason")
    truncated = isinstance(stop, str) and stop in CUT
    response_id = identifier(value.get("id")) or None
    if isinstance(content, str):
        return Batch((), "anthropic", {"role": "assistant", "content": content}, truncated, response_id)
    blocks = items_of(content)
    if blocks is None:
        raise InputError(f"content: a list of blocks is wanted, got {described(content)}")
    return _read(blocks, "content", truncated, response_id)


def _read(blocks: Sequence[object], place: str, truncated: bool = False, response_id: str | None = None) -> Batch:
    calls: list[Call] = []
    plain_blocks: list[Fields] = []
    for index, given in enumerate(blocks):
        block = given if type(given) is dict else fields_of(given)
        if block is None:
            raise InputError(f"{place}[{index}]: a content block is wanted, got {described(given)}")
        kind = block.get("type")
        if kind == "tool_use":
            name = block.get("name")
            arguments = block.get("input")
            own = block.get("id")
            needs, caller = beside(block) if len(block) > 4 else ((), "")
            calls.append(
                Call(
                    name if type(name) is str else tool_name(name),
                    arguments if type(arguments) is dict else argument_value(arguments),
                    own if type(own) is str else identifier(own),
                    needs,
                    caller=caller,
                )
            )
        elif not isinstance(kind, str):
            raise InputError(f"{place}[{index}].type: the block's type is wanted, got {described(kind)}")
        plain_blocks.append(block)
    message = {"role": "assistant", "content": plain_blocks}
    return Batch(tuple(calls), "anthropic", message, truncated, response_id)


def encode(batch: Batch, results: Sequence[Result]) -> list[dict[str, object]]:
    """One user message with a `tool_result` block for each result, in emitted order; none when there are no calls.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
    """
    check_pairing(batch, results)
    return _answer(batch, results, _ids(batch))


def turn(batch: Batch, results: Sequence[Result]) -> list[dict[str, object]]:
    """The assistant message as a request takes it, then the user message with all results.

    Raises:
        InputError: not exactly one result for each call, in emitted order.
    """
    check_pairing(batch, results)
    ids = _ids(batch)
    content = _assistant_content(batch, ids)
    # A message without content is refused, and says nothing.
    said: list[dict[str, object]] = [{"role": "assistant", "content": content}] if content else []
    return said + _answer(batch, results, ids)


def _ids(batch: Batch) -> list[str]:
    return export_ids(batch, ANY_ID if batch.format == "anthropic" else FOREIGN_ID)


def _own_blocks(batch: Batch) -> list[Fields | None]:
    """The `tool_use` block behind each call, or None for each when the calls came in another form."""
    if batch.format == "anthropic" and batch.message is not None:
        content = items_of(batch.message.get("content")) or ()
        found = [block for block in content if isinstance(block, Mapping) and block.get("type") == "tool_use"]
        if len(found) == len(batch.calls):
            return [*found]
    return [None] * len(batch.calls)


def _answer(batch: Batch, results: Sequence[Result], ids: Sequence[str]) -> list[dict[str, object]]:
    if not results:
        return []
    content: list[dict[str, object]] = []
    for own, result, used in zip(ids, results, _own_blocks(batch), strict=True):
        block: dict[str, object] = {"type": "tool_result", "tool_use_id": own, "content": shown(result)}
        if result.outcome != "ok":
            block["is_error"] = True
        if used is not None and isinstance(used.get("toolset_name"), str):
            block["toolset_name"] = used["toolset_name"]
        content.append(block)
    return [{"role": "user", "content": content}]


def _assistant_content(batch: Batch, ids: Sequence[str]) -> str | list[dict[str, object]]:
    message = batch.message if batch.format == "anthropic" else None
    own_blocks = _own_blocks(batch)
    if message is None or (batch.calls and own_blocks[0] is None):
        text = spoken(batch.message)
        out: list[dict[str, object]] = [{"type": "text", "text": text}] if text.strip() else []
        out += [_tool_use(call, own, None) for call, own in zip(batch.calls, ids, strict=True)]
        return out
    content = message.get("content")
    if isinstance(content, str):
        return spoken(message) if content.strip() else ""
    used = zip(batch.calls, ids, strict=True)
    out = []
    for block in items_of(content) or ():
        fields = fields_of(block)
        if fields is None:
            continue
        kind = fields.get("type")
        if kind == "tool_use":
            call, own = next(used)
            out.append(_tool_use(call, own, fields))
        elif kind != "text":
            out.append(plain_object(fields))
        elif isinstance(fields.get("text"), str) and str(fields["text"]).strip():
            # The model does write blocks of blanks, and the provider refuses them.
            out.append(plain_fields(fields, _NOT_IN_A_TEXT))
    return out


def _tool_use(call: Call, own: str, block: Fields | None) -> dict[str, object]:
    name = clean_name(call.tool, NAME, LONGEST_NAME)
    out: dict[str, object] = {"type": "tool_use", "id": own, "name": name, "input": as_object(call.arguments)}
    if block is not None and len(block) > 4:
        out.update(plain_fields(block, _WRITTEN_ANEW))
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
                f"tool {name[:64]!r}: anthropic takes names of 1 to {LONGEST_NAME} letters, digits, '_' and '-' only; "
                "give it another with `name=`"
            )
        tool: dict[str, object] = {"name": name}
        if description:
            tool["description"] = description
        tool["input_schema"] = {"type": "object", **plain_object(schema)}
        out.append(tool)
    return out


def provider_options(parallel: bool) -> dict[str, object]:
    """The switch for several calls in one response; it belongs to the tool choice."""
    return {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not parallel}}
