"""Batches as providers send them and as they must go back, and tool schemas as data sets write them.

Theory. A test of real batches hands them in as a provider's message and looks at the messages that come back. Both are
written here from the providers' own rules, and know nothing of how Towerman reads and writes them.

Not here: what adapters do with odd or broken messages (test_adapters.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Wanted = list[tuple[str, dict[str, Any]]]
"""(tool, arguments) of each call of a batch."""

# The data set writes the types of Python where JSON schema has names of its own; "any" is no type at all.
DIALECT = {"dict": "object", "float": "number", "tuple": "array", "any": None}


def schema_of(node: Any) -> Any:
    """The row's schema as JSON schema."""
    if isinstance(node, list):
        return [schema_of(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        if key == "type" and isinstance(value, str):
            word = DIALECT.get(value, value)
            if word is not None:
                found[key] = word
        elif key == "properties":
            found[key] = {name: schema_of(part) for name, part in value.items()}
        elif key in ("default", "enum", "required"):
            found[key] = value
        else:
            found[key] = schema_of(value)
    return found


def openai_message(calls: Wanted, ids: Sequence[str]) -> dict[str, Any]:
    """The assistant message of a chat completion."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": own, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for own, (name, arguments) in zip(ids, calls, strict=True)
        ],
    }


def anthropic_message(calls: Wanted, ids: Sequence[str]) -> dict[str, Any]:
    """The assistant message of the messages interface."""
    blocks: list[dict[str, Any]] = [{"type": "text", "text": "I look that up."}]
    for own, (name, arguments) in zip(ids, calls, strict=True):
        blocks.append({"type": "tool_use", "id": own, "name": name, "input": arguments})
    return {"role": "assistant", "content": blocks}


def native_list(calls: Wanted, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Towerman's own form."""
    return [
        {"tool": name, "arguments": arguments, "id": own} for own, (name, arguments) in zip(ids, calls, strict=True)
    ]


FORMS: dict[str, Callable[[Wanted, Sequence[str]], Any]] = {
    "openai": openai_message,
    "anthropic": anthropic_message,
    "towerman": native_list,
}


def paired(turn: Sequence[dict[str, Any]], form: str) -> list[tuple[str, dict[str, Any], str]]:
    """(tool, arguments, content of its result) of each call of a turn, by the rules of the provider.

    Written from the providers' rules alone: it knows nothing of how the turn was made.
    """
    if form == "openai":
        assistant, *results = turn
        assert assistant["role"] == "assistant"
        calls = assistant["tool_calls"]
        assert [result["role"] for result in results] == ["tool"] * len(calls)
        given = [call["id"] for call in calls]
        assert all(given), "a call has no id"
        assert len(set(given)) == len(given), "two calls have one id"
        assert [result["tool_call_id"] for result in results] == given
        return [
            (call["function"]["name"], json.loads(call["function"]["arguments"]), result["content"])
            for call, result in zip(calls, results, strict=True)
        ]
    if form == "anthropic":
        assistant, user = turn
        assert (assistant["role"], user["role"]) == ("assistant", "user")
        calls = [block for block in assistant["content"] if block["type"] == "tool_use"]
        assert [block["type"] for block in user["content"]] == ["tool_result"] * len(calls)
        given = [block["id"] for block in calls]
        assert all(re.fullmatch(r"[A-Za-z0-9_-]+", own) for own in given), "an id that the provider refuses"
        assert len(set(given)) == len(given), "two calls have one id"
        assert [block["tool_use_id"] for block in user["content"]] == given
        return [
            (call["name"], call["input"], text_of(result["content"]))
            for call, result in zip(calls, user["content"], strict=True)
        ]
    calls, results = turn[0]["calls"], turn[1:]
    given = [call["id"] for call in calls]
    assert len(set(given)) == len(given), "two calls have one id"
    assert [result["id"] for result in results] == given
    return [(call["tool"], call["arguments"], result["content"]) for call, result in zip(calls, results, strict=True)]


def text_of(content: Any) -> str:
    """The text of an Anthropic result, which may be text or blocks."""
    return content if isinstance(content, str) else "".join(block["text"] for block in content)
