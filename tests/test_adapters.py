"""The provider formats: what is read, what is written, and what the providers' rules say about it.

`pair_openai` and `pair_anthropic` are the providers' rules on an assistant message and its results, as strict as the
strictest report: every call answered once, in order, in one block right behind it, never empty, ids unique, names and
arguments as the form wants them. They are used by the property tests too.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest

from towerman import adapters
from towerman.adapters import FORMATS, decode, detect, encode, provider_options, schemas, turn
from towerman.adapters.native import RESULT_KEYS
from towerman.adapters.writing import INVALID
from towerman.bounds import EMPTY
from towerman.calls import Batch, Call, Result, make_result
from towerman.errors import InputError, PolicyError

SRC = Path(__file__).resolve().parent.parent / "src"
CANARY = "canary_5e1d_secret"
Records = Callable[[str], list[dict[str, Any]]]


# The providers' rules.


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as they arrive: strict JSON in UTF-8, as the SDKs write it."""
    text = json.dumps(messages, ensure_ascii=False, allow_nan=False).encode("utf-8")
    arrived: list[dict[str, Any]] = json.loads(text)
    return arrived


def pair_openai(messages: list[dict[str, Any]], count: int) -> None:
    """The chat completions rules for an assistant message with `count` tool calls and its results."""
    assistant, *tools = as_sent(messages)
    assert assistant["role"] == "assistant"
    assert "content" in assistant
    assert all(value is not None for key, value in assistant.items() if key != "content")
    calls = assistant.get("tool_calls", [])
    assert len(calls) == count
    assert "tool_calls" not in assistant or calls, "an empty list is refused"
    assert assistant["content"] is not None or calls
    for call in calls:
        assert isinstance(call["id"], str)
        assert call["id"]
        assert "index" not in call
        assert all(value is not None for value in call.values())
        if call["type"] == "custom":
            assert isinstance(call["custom"]["input"], str)
            name = call["custom"]["name"]
        else:
            assert call["type"] == "function"
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            name = call["function"]["name"]
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    assert [message["tool_call_id"] for message in tools] == ids
    for message in tools:
        assert set(message) == {"role", "tool_call_id", "content"}
        assert message["role"] == "tool"
        assert isinstance(message["content"], str)
        assert message["content"].strip()


def pair_anthropic(messages: list[dict[str, Any]], count: int) -> None:
    """The messages rules for an assistant message with `count` tool_use blocks and its results."""
    arrived = as_sent(messages)
    if count == 0:
        assert [message["role"] for message in arrived] in ([], ["assistant"])
        assert all(message["content"] for message in arrived)
        return
    assistant, user = arrived
    assert set(assistant) == {"role", "content"} == set(user)
    assert (assistant["role"], user["role"]) == ("assistant", "user")
    used = [block for block in assistant["content"] if block["type"] == "tool_use"]
    assert len(used) == count
    for block in assistant["content"]:
        assert block["type"] != "text" or block["text"].strip(), "a text block must not be blank"
    for block in used:
        assert isinstance(block["input"], dict)
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", block["name"])
    ids = [block["id"] for block in used]
    assert all(isinstance(own, str) and own for own in ids)
    assert len(set(ids)) == len(ids)
    assert [block["tool_use_id"] for block in user["content"]] == ids
    for block in user["content"]:
        assert block["type"] == "tool_result"
        assert set(block) <= {"type", "tool_use_id", "content", "is_error", "toolset_name"}
        assert isinstance(block["content"], str)
        assert block["content"].strip()
        assert block.get("is_error", True) is True


def pair_towerman(messages: list[dict[str, Any]], count: int) -> None:
    """The same for Towerman's own form."""
    first, *results = as_sent(messages)
    ((kind, calls),) = first.items()
    assert kind in ("calls", "plan")
    ids = [call["id"] for call in calls]
    assert len(ids) == len(set(ids)) == len(results) == count
    assert [result["id"] for result in results] == ids
    assert [result["index"] for result in results] == list(range(count))
    for result in results:
        assert tuple(result) == RESULT_KEYS
        assert result["content"].strip()


PAIR = {"openai": pair_openai, "anthropic": pair_anthropic, "towerman": pair_towerman}


def answered(batch: Batch, content: str = '{"done": true}', **options: Any) -> list[Result]:
    """An ordinary result for each call."""
    return [
        make_result(index, call.id, call.tool[:128], "ok", None, "done", content, started=True, **options)
        for index, call in enumerate(batch.calls)
    ]


def refused(batch: Batch, code: Any = "invalid_arguments") -> list[Result]:
    """A refusal for each call, as the runner seals it."""
    content = json.dumps({"error": {"code": code, "message": "no", "outcome": "rejected", "started": False}})
    return [
        make_result(index, call.id, call.tool[:128], "rejected", code, "no", content)
        for index, call in enumerate(batch.calls)
    ]


def pairs(batch: Batch, results: list[Result] | None = None) -> None:
    """The batch can be written in each format, and each provider takes it."""
    for form, rules in PAIR.items():
        for chosen in [results] if results else [answered(batch), refused(batch)]:
            if all(isinstance(readable(call.arguments), dict) for call in batch.calls) or not chosen[0].started:
                messages = turn(batch, chosen, form)
                rules(messages, len(batch.calls))
                assert encode(batch, chosen, form) == messages[-len(encode(batch, chosen, form)) :]


def readable(arguments: Any) -> Any:
    """Arguments as the arguments room sees them; None for broken text."""
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None


# Inputs.


def openai_call(name: Any = "read", arguments: Any = '{"x": 1}', own: Any = "call_a", **more: Any) -> dict[str, Any]:
    """One tool call."""
    return {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def openai_message(*calls: Any, **more: Any) -> dict[str, Any]:
    """An assistant message as the API gives it."""
    return {"role": "assistant", "content": None, "refusal": None, "tool_calls": list(calls), **more}


def completion(*messages: dict[str, Any], finish: str = "tool_calls", **more: Any) -> dict[str, Any]:
    """A chat completion with one choice per message."""
    choices = [
        {"index": index, "message": message, "finish_reason": finish, "logprobs": None}
        for index, message in enumerate(messages)
    ]
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, **more}


def tool_use(name: Any = "read", arguments: Any = None, own: Any = "toolu_a", **more: Any) -> dict[str, Any]:
    """One tool_use block."""
    return {"type": "tool_use", "id": own, "name": name, "input": {"x": 1} if arguments is None else arguments, **more}


def claude(*blocks: Any, stop: str = "tool_use", **more: Any) -> dict[str, Any]:
    """A message as the API gives it."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
    return {**head, "content": list(blocks), "stop_reason": stop, "stop_sequence": None, "usage": usage, **more}


class Dumped:
    """An SDK object: attributes, and `model_dump` as pydantic has it."""

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    def model_dump(self, *, mode: str, by_alias: bool, exclude_unset: bool, warnings: bool) -> Any:
        assert (mode, by_alias, exclude_unset, warnings) == ("json", True, True, False)
        return self.fields


def namespaces(value: Any) -> Any:
    """The same with a namespace for each object, as tests make them."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: namespaces(inner) for key, inner in value.items()})
    return [namespaces(inner) for inner in value] if isinstance(value, list) else value


# One batch in three forms.

THREE = {
    "openai": completion(
        openai_message(
            openai_call("read", '{"path": "a.txt"}', "call_1"),
            openai_call("edit", '{"path": "a.txt", "text": "b"', "call_2"),
            openai_call("nothing_like_it", "{}", "call_3"),
        )
    ),
    "anthropic": claude(
        {"type": "text", "text": "I look."},
        tool_use("read", {"path": "a.txt"}, "call_1"),
        tool_use("edit", '{"path": "a.txt", "text": "b"', "call_2"),
        tool_use("nothing_like_it", {}, "call_3"),
    ),
    "towerman": {
        "calls": [
            {"tool": "read", "arguments": {"path": "a.txt"}, "id": "call_1"},
            {"tool": "edit", "arguments": '{"path": "a.txt", "text": "b"', "id": "call_2"},
            {"tool": "nothing_like_it", "id": "call_3"},
        ]
    },
}


@pytest.mark.parametrize("form", FORMATS)
def test_one_batch_reads_alike_in_every_form(form: str) -> None:
    """G1: the same calls come out of each form, found by looking, given as object, text, bytes or SDK object."""
    data = THREE[form]
    text = json.dumps(data)
    for given in (data, text, text.encode(), bytearray(text.encode()), "\ufeff" + text, Dumped(data)):
        assert detect(given) == form
        batch = decode(given)
        assert batch == decode(given, form)
        assert (batch.format, batch.truncated) == (form, False)
        assert [(call.tool, call.id) for call in batch.calls] == [
            ("read", "call_1"),
            ("edit", "call_2"),
            ("nothing_like_it", "call_3"),
        ]
        assert [readable(call.arguments) for call in batch.calls] == [{"path": "a.txt"}, None, {}]
        assert batch.calls[1].arguments == '{"path": "a.txt", "text": "b"'
        assert decode(batch) is batch
        assert detect(batch) == form
    pairs(batch, refused(batch))


@pytest.mark.parametrize("form", FORMATS)
def test_namespaces_stand_for_sdk_objects(form: str) -> None:
    """G1: a response made of namespaces, as tests make them in place of SDK objects, reads and goes back alike."""
    plain, given = decode(THREE[form]), decode(namespaces(THREE[form]))
    assert [(call.tool, call.id, readable(call.arguments)) for call in given.calls] == [
        (call.tool, call.id, readable(call.arguments)) for call in plain.calls
    ]
    assert json.dumps(turn(given, refused(given))) == json.dumps(turn(plain, refused(plain)))


@pytest.mark.parametrize("form", FORMATS)
def test_r104_to_r107_every_outcome_has_its_slot(form: str) -> None:
    """R-104 to R-107: failed, rejected, skipped, cancelled, timed out, pending: each in its slot, told as such."""
    outcomes: list[Any] = ["ok", "error", "rejected", "skipped", "cancelled", "timed_out", "pending"]
    batch = decode([Call("t", {}, f"call_{index}") for index in range(len(outcomes))])
    results = [
        make_result(index, call.id, "t", outcome, None if outcome == "ok" else "cancelled", "words", f'"{outcome}"')
        for index, (call, outcome) in enumerate(zip(batch.calls, outcomes, strict=True))
    ]
    messages = turn(batch, results, form)
    PAIR[form](messages, len(outcomes))
    if form == "anthropic":
        blocks: Any = messages[1]["content"]
        assert [block["content"] for block in blocks] == [f'"{outcome}"' for outcome in outcomes]
        assert [block.get("is_error", False) for block in blocks] == [outcome != "ok" for outcome in outcomes]
    else:
        assert [message["content"] for message in messages[1:]] == [f'"{outcome}"' for outcome in outcomes]
    if form == "towerman":
        assert [message["outcome"] for message in messages[1:]] == outcomes


@pytest.mark.parametrize("form", FORMATS)
def test_p05_r116_missing_and_repeated_ids_pair(form: str) -> None:
    """P-05, R-116: ids '', '', 'a', 'a' go back unique, the provider's where it can be told apart."""
    batch = decode([Call("echo", {"x": x}, own) for x, own in enumerate(["", "", "a", "a"], 1)])
    messages = turn(batch, answered(batch), form)
    PAIR[form](messages, 4)
    first: Any = messages[0]
    if form == "anthropic":
        assert [block["id"] for block in first["content"]] == ["call_0", "call_1", "a", "call_3"]
        assert [block["input"]["x"] for block in first["content"]] == [1, 2, 3, 4]
    else:
        written = first["tool_calls"] if form == "openai" else first["calls"]
        assert [call["id"] for call in written] == ["call_0", "call_1", "a", "call_3"]


def test_p05_fallbacks_never_meet_an_id_that_comes_later() -> None:
    """P-05: a fallback differs from every id of the batch, and from other fallbacks."""
    batch = decode([Call("t", {}, own) for own in ["", "call_0", "call_0", "call_2", "call_0_2", ""]])
    for form in FORMATS:
        PAIR[form](turn(batch, answered(batch), form), 6)
    written: Any = turn(batch, answered(batch), "openai")[0]
    ids = [call["id"] for call in written["tool_calls"]]
    assert ids == ["call_0_3", "call_0", "call_2_2", "call_2", "call_0_2", "call_5"]


def test_p05_fallbacks_differ_between_responses() -> None:
    """P-05: ids missing in two turns of one conversation do not repeat each other, and are the same at each writing."""
    both = []
    for own in ("chatcmpl-1", "chatcmpl-2"):
        batch = decode({**completion(openai_message(openai_call(own=None), openai_call(own=""))), "id": own})
        assert batch.response_id == own
        messages = turn(batch, answered(batch))
        assert messages == turn(batch, answered(batch))
        pair_openai(messages, 2)
        both += [message["tool_call_id"] for message in messages[1:]]
    assert len(set(both)) == 4
    assert all(isinstance(own, str) and len(own) <= 40 for own in both)


@pytest.mark.parametrize(
    ("given", "kept"),
    [(7, "7"), (True, ""), (None, ""), (1.5, ""), ([], ""), ({}, ""), ("", ""), (10**80, ""), ("x" * 90, "x" * 90)],
)
def test_odd_ids_are_read_as_text_or_missing(given: Any, kept: str) -> None:
    """R-105: a number is its digits; what cannot be an id is missing; a long one of the provider's own goes back."""
    for batch in (
        decode(openai_message(openai_call(own=given), openai_call(own="z"))),
        decode(claude(tool_use(own=given), tool_use(own="z"))),
    ):
        assert [call.id for call in batch.calls] == [kept, "z"]
        PAIR[batch.format](turn(batch, answered(batch)), 2)
        if kept:
            assert kept in json.dumps(encode(batch, answered(batch)))


def test_endless_and_unsendable_ids_get_fallbacks() -> None:
    """R-105: an id of a megabyte, or with half a surrogate pair, cannot go back; both sides get another."""
    for own in ("x" * 1_000_000, "a\udc00b"):
        for batch in (decode(openai_message(openai_call(own=own))), decode(claude(tool_use(own=own)))):
            assert batch.calls[0].id == own
            messages = turn(batch, answered(batch))
            PAIR[batch.format](messages, 1)
            assert len(json.dumps(messages)) < 1_000


def test_p07_p08_results_are_in_emitted_order_or_refused() -> None:
    """P-07, P-08, R-106: results are written in emitted order; results in another order are not written at all."""
    batch = decode([Call("t", {}, own) for own in "abc"])
    results = answered(batch)
    for form in FORMATS:
        for wrong in ([results[1], results[0], results[2]], results[:2], [*results, results[0]], []):
            for write in (encode, turn):
                with pytest.raises(InputError, match=r"in emitted order"):
                    write(batch, wrong, form)


@pytest.mark.parametrize("content", ["", "   ", "\n\t"])
@pytest.mark.parametrize("form", FORMATS)
def test_p59_empty_content_is_marked(form: str, content: str) -> None:
    """P-59: an empty or blank result is exported as a marker, with status success and never null."""
    batch = decode(THREE[form])
    results = [
        make_result(index, call.id, call.tool, "ok", None, "done", content) for index, call in enumerate(batch.calls)
    ]
    messages = turn(batch, results)
    PAIR[form](messages, 3)
    assert json.dumps(messages).count(EMPTY) == 3
    assert "is_error" not in json.dumps(messages)


@pytest.mark.parametrize("form", FORMATS)
def test_content_is_passed_through(form: str) -> None:
    """R-115: the sealed content is what the model is sent, unchanged, at every writing."""
    batch = decode(THREE[form])
    results = answered(batch, ' {"a": "æ\u2028"} ')
    assert json.dumps(turn(batch, results)) == json.dumps(turn(batch, results))
    assert json.dumps(turn(batch, results), ensure_ascii=False).count(r" {\"a\": \"æ") == 3


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_a_batch_of_one_form_is_written_in_another(form: str, to: str) -> None:
    """API section 2: `turn(format=...)` and `messages(format=...)` work for a batch that was read in any form."""
    batch = decode(THREE[form])
    results = refused(batch)
    messages = turn(batch, results, to)
    PAIR[to](messages, 3)
    assert encode(batch, results, to) == messages[1:]
    again = decode(messages[0], to)
    assert [(call.tool, call.id) for call in again.calls] == [(call.tool, call.id) for call in batch.calls]
    assert readable(again.calls[0].arguments) == {"path": "a.txt"}


def test_text_beside_the_calls_is_carried_over() -> None:
    """Cross-format: what the model said stands in the other form's assistant message; its thinking does not."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    batch = decode(claude(thinking, {"type": "text", "text": "I "}, {"type": "text", "text": "look."}, tool_use()))
    assert turn(batch, answered(batch), "openai")[0]["content"] == "I look."
    batch = decode(openai_message(openai_call(), content="I look."))
    content: Any = turn(batch, answered(batch), "anthropic")[0]["content"]
    assert content[0] == {"type": "text", "text": "I look."}
    batch = decode(openai_message(openai_call(), content=" "))
    assert len(turn(batch, answered(batch), "anthropic")[0]["content"]) == 1  # type: ignore[arg-type]
    parts = [{"type": "text", "text": "I look."}, {"type": "text", "text": 1}, "?"]
    batch = decode(openai_message(openai_call(), content=parts))
    content = turn(batch, answered(batch), "anthropic")[0]["content"]
    assert content[0] == {"type": "text", "text": "I look."}


def test_an_id_of_another_provider_is_mapped_where_anthropic_would_refuse_it() -> None:
    """R-105: Anthropic takes ids of its alphabet only; an id of another form is replaced on both sides."""
    batch = decode(openai_message(openai_call(own="functions.read:0"), openai_call(own="call_b")))
    messages = turn(batch, answered(batch), "anthropic")
    pair_anthropic(messages, 2)
    used: Any = messages[0]["content"]
    assert [block["id"] for block in used] == ["call_0", "call_b"]
    own = decode(claude(tool_use(own="functions.read:0")))
    assert encode(own, answered(own))[0]["content"][0]["tool_use_id"] == "functions.read:0"  # type: ignore[index]


# What goes back as the assistant message.


def test_nothing_handed_in_is_changed() -> None:
    """The caller's object stays as it was, also where ids are rewritten, and what is written shares none of it."""
    for data in (
        completion(openai_message(openai_call(own=""), openai_call(own="a"), openai_call(own="a"), extra={"a": [1]})),
        claude({"type": "thinking", "thinking": "t", "signature": "s"}, tool_use(own=""), tool_use(own="")),
        {"calls": [{"tool": "t", "arguments": {"a": [1]}}, {"tool": "t"}]},
    ):
        before = copy.deepcopy(data)
        batch = decode(data)
        messages = turn(batch, answered(batch))
        assert data == before

        def spoil(value: Any) -> None:
            if isinstance(value, dict):
                for inner in value.values():
                    spoil(inner)
                value["spoilt"] = True
            elif isinstance(value, list):
                for inner in value:
                    spoil(inner)
                value.append("spoilt")

        spoil(messages)
        assert data == before
        with pytest.raises(FrozenInstanceError):
            batch.truncated = True  # type: ignore[misc]


def test_openai_message_goes_back_as_a_request_takes_it() -> None:
    """R-105: what the model said and its reasoning stay; nulls and what only a response has are left out."""
    call = openai_call(index=0, extra_content={"google": {"thought_signature": "s"}}, nothing=None)
    call["function"]["parsed_arguments"] = {"x": 1}
    call["function"]["provider_specific_fields"] = {"kept": 1}
    message = openai_message(
        call,
        refusal="no",
        reasoning_content="hm",
        reasoning_details=[{"type": "reasoning.text", "text": "hm", "signature": None}],
        annotations=[],
        function_call=None,
        parsed=None,
        audio={"id": "audio_1", "data": "QUJD", "expires_at": 1, "transcript": "hm"},
    )
    batch = decode(completion(message))
    assert turn(batch, answered(batch))[0] == {
        "role": "assistant",
        "content": None,
        "refusal": "no",
        "reasoning_content": "hm",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": None}],
        "audio": {"id": "audio_1"},
        "tool_calls": [
            {
                "id": "call_a",
                "type": "function",
                "function": {
                    "name": "read",
                    "arguments": '{"x": 1}',
                    "provider_specific_fields": {"kept": 1},
                },
                "extra_content": {"google": {"thought_signature": "s"}},
            }
        ],
    }


def test_openai_response_without_calls_is_an_empty_batch() -> None:
    """API section 2: no calls, an empty batch; its turn is the message alone, in an acceptable form."""
    for message in (
        {"role": "assistant", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": None, "function_call": None},
        {"role": "assistant", "content": "hello", "tool_calls": []},
        {"role": "assistant"},
    ):
        batch = decode(completion(message, finish="stop"))
        assert (batch.calls, batch.format) == ((), "openai")
        assert encode(batch, []) == []
        assert turn(batch, []) == [{"role": "assistant", "content": message.get("content") or ""}]
        pair_anthropic(turn(batch, [], "anthropic"), 0)


@pytest.mark.parametrize(
    ("item", "call"),
    [
        (None, Call("", "")),
        ("read", Call("", "")),
        ({}, Call("", "")),
        ({"id": "c", "type": "function"}, Call("", "", "c")),
        ({"id": "c", "type": "function", "function": None}, Call("", "", "c")),
        ({"id": "c", "type": "web_search", "query": "x"}, Call("", "", "c")),
        ({"id": "c", "function": {"name": "read", "arguments": "{}"}}, Call("read", "{}", "c")),
        (openai_call(name=None), Call("", '{"x": 1}', "call_a")),
        (openai_call(name=5), Call("", '{"x": 1}', "call_a")),
        (openai_call(name=""), Call("", '{"x": 1}', "call_a")),
        (openai_call(arguments=None), Call("read", "", "call_a")),
        (openai_call(arguments={"x": 1}), Call("read", {"x": 1}, "call_a")),
        (openai_call(arguments=[1]), Call("read", "[1]", "call_a")),
        (openai_call(arguments=False), Call("read", "false", "call_a")),
        (openai_call(arguments=[object()]), Call("read", "null", "call_a")),
        ({"id": "c", "type": "function", "function": {}}, Call("", "", "c")),
        (Dumped(openai_call()), Call("read", '{"x": 1}', "call_a")),
        (openai_call() | {"function": Dumped({"name": "read", "arguments": "{}"})}, Call("read", "{}", "call_a")),
        ({"id": "c", "custom": {"name": "sql", "input": "select 1"}}, Call("sql", {"input": "select 1"}, "c")),
        ({"id": "c", "type": "custom", "custom": {}}, Call("", {"input": None}, "c")),
        ({"id": "c", "type": "custom", "custom": "?"}, Call("", "", "c")),
    ],
)  # fmt: skip
def test_g1_an_odd_tool_call_does_not_lose_its_siblings(item: Any, call: Call) -> None:
    """G1: whatever stands in one place of `tool_calls`, there is a call in that place, and all pair on export."""
    batch = decode(completion(openai_message(openai_call("one", own="one"), item, openai_call("two", own="two"))))
    assert batch.calls == (Call("one", '{"x": 1}', "one"), call, Call("two", '{"x": 1}', "two"))
    pairs(batch, refused(batch))


def test_openai_custom_call_goes_back_as_such() -> None:
    """G1: a call of a custom tool keeps its kind and its free text on the way back."""
    call = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    batch = decode(openai_message(call))
    assert turn(batch, answered(batch))[0]["tool_calls"] == [call]
    empty = {"id": "c", "type": "custom", "custom": {"name": "sql"}}
    batch = decode(openai_message(empty))
    written: Any = turn(batch, refused(batch))[0]["tool_calls"]
    assert written == [{"id": "c", "type": "custom", "custom": {"name": "sql", "input": ""}}]


def test_arguments_that_are_no_object_go_back_inside_one() -> None:
    """R-105: broken arguments would make every later request fail; they go back whole, in a JSON object."""
    broken = '{"a": "' + CANARY
    batch = decode(openai_message(openai_call(arguments=broken), openai_call(arguments="[1]", own="b")))
    written: Any = turn(batch, refused(batch))[0]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in written] == [{INVALID: broken}, {INVALID: "[1]"}]
    for arguments, back in (
        (broken, {INVALID: broken}),
        ('{"x": 2}', {"x": 2}),
        ("[1]", {INVALID: "[1]"}),
        ("", {}),
        (" ", {}),
        ([1], {INVALID: "[1]"}),
        ("[" * 100_000, {INVALID: "[" * 100_000}),
    ):
        batch = decode(claude(tool_use(arguments=arguments)))
        used: Any = turn(batch, refused(batch))[0]["content"]
        assert used[0]["input"] == back
    batch = decode(claude({"type": "tool_use", "id": "a", "name": "read"}))
    assert batch.calls == (Call("read", "", "a"),)


def test_arguments_that_ran_go_back_as_the_model_wrote_them() -> None:
    """R-115: spacing, order and numbers of valid arguments are the model's own on the way back."""
    text = '{ "b" : 1.00, "a": 12345678901234567890 }'
    batch = decode(openai_message(openai_call(arguments=text)))
    for results in (answered(batch), refused(batch)):
        written: Any = turn(batch, results)[0]["tool_calls"]
        assert written[0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("name", "back"),
    [
        ("functions.read", "functions_read"),
        ("", "unnamed"),
        ("a" * 65, "a" * 64),
        ("lire le café", "lire_le_caf_"),
        ("read", "read"),
        ("\udc00", "_"),
    ],
)
def test_names_that_are_refused_go_back_in_the_providers_alphabet(name: str, back: str) -> None:
    """P-02's kind: a name that the model invented must not make every later request fail."""
    batch = decode(openai_message(openai_call(name)))
    written: Any = turn(batch, refused(batch, "unknown_tool"))[0]["tool_calls"]
    assert written[0]["function"]["name"] == back
    batch = decode(claude(tool_use(name)))
    used: Any = turn(batch, refused(batch, "unknown_tool"))[0]["content"]
    assert used[0]["name"] == (name if len(name) == 65 else back)
    pairs(batch, refused(batch))


def test_half_surrogates_do_not_stop_the_next_request() -> None:
    """R-105: text that cannot be written as UTF-8 is mended, wherever it stands."""
    message = openai_message(
        openai_call(arguments='{"a": "\ud83d"}'),
        openai_call(arguments='{"a": "\ud83d', own="b"),
        content="\ud83d\ude00 and \udc00",
        reasoning_content="\udc00",
    )
    batch = decode(completion(message))
    first, *_ = as_sent(turn(batch, refused(batch)))
    assert first["content"] == "😀 and \ufffd"
    pairs(batch, refused(batch))
    batch = decode(claude({"type": "text", "text": "\udc00"}, tool_use(arguments={"\udc00": "\udc00"})))
    pairs(batch, refused(batch))
    batch = decode([Call("t\udc00", {"\udc00": "\udc00"}, "\udc00", ("\udc00",), "\udc00"), Call("t", "\udc00")])
    pairs(batch, refused(batch))


# Anthropic.


def test_anthropic_blocks_go_back_as_they_came() -> None:
    """R-105: thinking, its signature and the provider's own calls are echoed unchanged, in their order."""
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "", "signature": "c2ln", "odd": None},
        {"type": "redacted_thinking", "data": "eHg="},
        {"type": "text", "text": "I look.", "citations": None, "parsed_output": {"a": 1}},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        tool_use("one", {"a": 1}, "toolu_1", caller={"type": "direct"}),
        {"type": "text", "text": " \n"},
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "x", "server_name": "y", "input": {}},
        tool_use("two", {"a": 2}, "toolu_2", caller=None, toolset_name="browser"),
    ]
    batch = decode(claude(*blocks))
    assert batch.calls == (Call("one", {"a": 1}, "toolu_1"), Call("two", {"a": 2}, "toolu_2"))
    messages = turn(batch, [*answered(batch)[:1], refused(batch)[1]])
    pair_anthropic(messages, 2)
    assert messages[0]["content"] == [
        *blocks[:2],
        {"type": "text", "text": "I look."},
        *blocks[3:6],
        blocks[7],
        {key: value for key, value in blocks[8].items() if value is not None},
    ]
    first, second = messages[1]["content"]  # type: ignore[misc]
    assert "toolset_name" not in first  # type: ignore[has-type]
    assert "is_error" not in first  # type: ignore[has-type]
    assert (second["toolset_name"], second["is_error"]) == ("browser", True)  # type: ignore[has-type]


@pytest.mark.parametrize("content", ["hello", [], "", " ", [{"type": "text", "text": ""}], [{"type": "text"}]])
def test_anthropic_message_without_calls(content: Any) -> None:
    """API section 2: no calls, an empty batch; nothing goes back where nothing was said."""
    batch = decode({**claude(), "content": content, "stop_reason": "end_turn"})
    assert (batch.calls, batch.format) == ((), "anthropic")
    said = content if content == "hello" else None
    assert turn(batch, []) == ([{"role": "assistant", "content": said}] if said else [])
    assert encode(batch, []) == []
    pair_openai(turn(batch, [], "openai"), 0)


def test_a_hand_made_batch_is_written_from_its_calls() -> None:
    """G1: where the message does not hold the calls, they are written from the batch: one block or item each."""
    calls = (Call("a", {"x": 1}, "1"), Call("b", "{}", "2"))
    messages: list[Mapping[str, object] | None] = [
        None,
        {"content": "hi"},
        {"role": "assistant", "content": "hi", "tool_calls": [openai_call()]},
        {"role": "assistant", "content": [tool_use(), "?"]},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": 5, "content": 5},
    ]
    for message in messages:
        for form in FORMATS:
            pairs(Batch(calls, form, message))
    stray = Batch((), "anthropic", {"role": "assistant", "content": ["?", {"type": "text", "text": "hi"}]})
    assert turn(stray, []) == [{"role": "assistant", "content": [{"type": "text", "text": "hi"}]}]


# Cut responses.


@pytest.mark.parametrize(
    ("data", "truncated"),
    [
        (completion(openai_message(openai_call()), finish="length"), True),
        (completion(openai_message(openai_call()), finish="content_filter"), True),
        (completion(openai_message(openai_call()), finish="tool_calls"), False),
        (completion(openai_message(openai_call()), finish="stop"), False),
        (completion(openai_message(openai_call()), finish=5), False),  # type: ignore[arg-type]
        (claude(tool_use(), stop="max_tokens"), True),
        (claude(tool_use(), stop="model_context_window_exceeded"), True),
        (claude(tool_use(), stop="refusal"), True),
        (claude(tool_use(), stop="tool_use"), False),
        (claude(tool_use(), stop="pause_turn"), False),
        (claude(tool_use(), stop=None), False),  # type: ignore[arg-type]
        (openai_message(openai_call()), False),
        ([tool_use()], False),
    ],
)
def test_a_cut_response_is_marked(data: Any, truncated: bool) -> None:
    """Issue item 6: a response that ended at a limit, or that a filter broke off, says so."""
    assert decode(data).truncated is truncated


@pytest.mark.parametrize("own", [None, "", "resp", 7, True, []])
def test_the_response_id_is_text_or_none(own: Any) -> None:
    """S14: a response's id is kept as text, by which a response handed in again is known; else it is None."""
    for data in (completion(openai_message(openai_call())), claude(tool_use())):
        assert decode({**data, "id": own}).response_id == {"resp": "resp", 7: "7"}.get(own if own != [] else None)
    assert decode(openai_message(openai_call())).response_id is None
    assert decode([{"tool": "t"}]).response_id is None


# Choices.


def test_the_one_choice_with_calls_is_read() -> None:
    """A response with several choices has one that is followed; two with calls are refused, by name."""
    said = {"role": "assistant", "content": "hm"}
    batch = decode(completion(said, openai_message(openai_call())))
    assert batch.calls == (Call("read", '{"x": 1}', "call_a"),)
    assert decode(completion(said, said)).calls == ()
    with pytest.raises(InputError, match=r"choices\[0\] and choices\[2\] hold tool calls"):
        decode(completion(openai_message(openai_call()), said, openai_message(openai_call())))


# What is refused, and how.

BAD: list[tuple[Any, str | None, str]] = [
    (completion(), None, "choices: a list with at least one choice"),
    ({"choices": 5}, None, "choices: a list .* got int"),
    ({"choices": [5]}, None, r"choices\[0\]: an object is wanted, got int"),
    ({"choices": [{"message": None}]}, None, r"choices\[0\]\.message: an object is wanted, got NoneType$"),
    ({"choices": [{"delta": {}}]}, None, r"choices\[0\]\.message: .* collect a stream into one response first"),
    (completion({"role": "user", "content": "x"}), None, r"choices\[0\]\.message\.role: 'assistant'"),
    (completion({"x": 1}), None, r"choices\[0\]\.message: no batch of calls in the form 'openai'"),
    (completion({"role": "assistant", "tool_calls": 5}), None, r"choices\[0\]\.message\.tool_calls: a list .* got int"),
    ({"role": "assistant", "tool_calls": {}}, None, r"^tool_calls: a list is wanted, got dict"),
    (
        {"role": "assistant", "function_call": {"name": "x", "arguments": "{}"}},
        None,
        r"function_call: this retired form",
    ),
    ({"role": "assistant", "function_call": {"name": "x"}, "tool_calls": []}, None, "function_call: this retired form"),
    ({}, "openai", "no batch of calls in the form 'openai': got dict with no known key"),
    ([{"tool": "x"}], "openai", "no batch of calls in the form 'openai': got list of 1"),
    (claude(5), None, r"content\[0\]: a content block is wanted, got int"),
    (claude({"text": "x"}), None, r"content\[0\]\.type: the block's type is wanted, got NoneType"),
    ([tool_use(), {}], None, r"^\[1\]\.type"),
    ({**claude(), "content": 5}, None, "content: a list of blocks is wanted, got int"),
    ({**claude(), "role": "user"}, None, "role: 'assistant' is wanted"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}]}, None, "role: 'assistant' is wanted"),
    ({"type": "message"}, None, "no batch of calls in the form 'anthropic'"),
    (completion(), "anthropic", "in the form 'anthropic': got dict with 'choices', 'id', 'model', 'object' and 1 more"),
    ({"plan": 3}, None, "plan: a list is wanted"),
    ({"plan": [], "calls": []}, None, "calls: unknown key beside 'plan'; a plan has 'plan' only"),
    ({"calls": 5}, None, "calls: a list is wanted, got int"),
    ({"calls": [], "limit": 1}, None, "limit: unknown key beside 'calls'"),
    ({"calls": [5]}, None, r"calls\[0\]: a Call or a dict is wanted, got int"),
    ({"calls": [{}]}, None, r"calls\[0\]\.tool: missing"),
    ([{"tool": "x", "argumnets": {}}], None, r"\[0\]\.argumnets: unknown key; did you mean 'arguments'\?"),
    ([{"tool": "x", "args": {}}], None, r"\[0\]\.args: unknown key; did you mean 'arguments'\?"),
    ([{"tool": "x", "dependson": {}}], None, r"did you mean 'depends_on'\?"),
    ([{"tool": "x", "zzz": {}}], None, r"\[0\]\.zzz: unknown key; a call has 'tool', 'name', 'arguments', 'id'"),
    ([{"tool": "x", 5: {}}], None, r"\[0\]\.<int>: unknown key; a call has"),
    ([{"tool": "x", "a b": {}}], None, r"\[0\]\.<str>: unknown key; a call has"),
    ([{"tool": "x", "name": "y"}], None, r"\[0\]: has both 'tool' and 'name'; keep 'tool'"),
    ([{"tool": "x", "needs": ["a"], "depends_on": ["a"]}], None, r"has both 'needs' and 'depends_on'"),
    ([{"tool": "x", "id": []}], None, r"\[0\]\.id: text is wanted, got list of 0"),
    ([{"tool": "x"}, {"tool": "x", "needs": 5}], None, r"\[1\]\.needs: a list of ids is wanted, got int"),
    ([{"tool": "x", "needs": ["a", None]}], None, r"\[0\]\.needs\[1\]: the id of a call is wanted, got NoneType"),
    ([{"tool": "x", "needs": ""}], None, r"\[0\]\.needs\[0\]: the id of a call"),
    ([{"tool": "x", "idempotency_key": 5}], None, r"\[0\]\.idempotency_key: text is wanted, got int"),
    ([Call("x", {}, needs=5)], None, r"\[0\]\.needs: a list"),  # type: ignore[arg-type]
    ([openai_call(), {"tool": "x"}], "towerman", r"\[0\]\.type: unknown key; a call has"),
    ({"role": "user"}, "towerman", "in the form 'towerman'"),
    (5, None, "got int; accepted are"),
    (None, None, "got NoneType"),
    (True, None, "got bool"),
    ("5", None, "got int"),
    ('"' + "x" * 20 + '"', None, "got str"),
    ("null", None, "got NoneType"),
    ("", None, "no JSON: Expecting value at line 1, column 1"),
    ('{"calls": [\n  {"tool": }]}', None, "no JSON: .* at line 2, column 12"),
    (b"\xff\xfe", None, "not UTF-8 text: a wrong byte at position 0"),
    ("[" * 200_000, None, "nested too deeply"),
    ('{"calls": [], "calls": []}', None, "^calls: this key stands twice"),
    ('[{"tool": "a"}, {"tool": "b", "tool": "c"}]', None, r"^\[1\]\.tool: this key stands twice"),
    ('{"choices": [{"message": {"x": {"id": 1, "id": 2}}}]}', None, r"^choices\[0\]\.message\.<other>\.id: this key"),
    (Call("x", {}), None, "got Call; put a single call into a list"),
    (openai_call(), None, "put a single call into a list"),
    (tool_use(), None, "put a single call into a list"),
    ({"tool": "x", "arguments": {}}, None, "put a single call into a list"),
    ([{"role": "user", "content": "x"}], None, "for a list of messages, hand in the last assistant message"),
    ({"messages": []}, None, "hand in the last assistant message"),
    ({"error": {"message": CANARY}}, None, "this is an error response"),
    ({"type": "content_block_delta", "delta": {}}, None, "collect a stream into one response first"),
    ({"type": "message_start", "message": {}}, None, "collect a stream into one response first"),
    (Mock(), None, "got Mock; a mock has no data of its own; let it return a dict or a SimpleNamespace"),
    ((item for item in ()), None, "got generator; collect a stream into one response first"),
    ({"candidates": []}, None, "got dict with 'candidates'"),
    ({CANARY: 1}, None, "got dict with no known key and 1 more"),
    ([5], None, "got list of 1, the first a int"),
    ({"type": "ai", "content": "", "tool_calls": []}, None, "got dict with 'content', 'tool_calls', 'type'"),
    (Dumped(5), None, "got Dumped"),
    (Dumped, None, "got type"),
]


@pytest.mark.parametrize(("data", "form", "message"), BAD)
def test_what_is_no_batch_is_refused_with_its_place(data: Any, form: str | None, message: str) -> None:
    """Brief: bad input gets a clear error that names the place and the fix, as one line without a value."""
    with pytest.raises(InputError, match=message) as caught:
        decode(data, form)
    assert CANARY not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_g8_no_value_stands_in_an_error() -> None:
    """G8: whatever is refused, the error holds types, places and known keys only."""
    secret = {CANARY: CANARY}
    for data in (
        {"choices": secret},
        {"choices": [{"message": CANARY}]},
        {"role": CANARY, "content": CANARY, "tool_calls": CANARY},
        {"role": CANARY, "content": [secret]},
        {"calls": [{"tool": CANARY, "id": [CANARY]}]},
        {"calls": [{"tool": CANARY, CANARY * 3: CANARY}]},
        {"calls": [{"tool": CANARY, "needs": secret}]},
        {"calls": [{"tool": CANARY, "needs": [secret]}]},
        {"calls": CANARY},
        secret,
        [secret],
        [CANARY],
        CANARY,
        f'{{"calls": "{CANARY}',
        f'{{"{CANARY}": {{"id": "{CANARY}", "id": "{CANARY}"}}}}',
        CANARY.encode() + b"\xff",
        {"error": CANARY},
    ):
        with pytest.raises(InputError) as caught:
            decode(data)
        assert CANARY not in str(caught.value)
    batch = decode([Call(CANARY, {"a": CANARY}, CANARY)])
    with pytest.raises(InputError) as caught:
        encode(batch, [])
    assert CANARY not in str(caught.value)


async def _never() -> None: ...


def test_hints_for_what_was_not_awaited_or_collected() -> None:
    """Brief: an error names the fix, also for a coroutine and for a stream object."""
    waiting = _never()
    with pytest.raises(InputError, match="got coroutine; await it first"):
        decode(waiting)
    waiting.close()

    class AsyncStream:
        pass

    with pytest.raises(InputError, match="got AsyncStream; collect a stream"):
        detect(AsyncStream())


def test_an_object_that_breaks_when_dumped_is_refused() -> None:
    """An SDK object that cannot be dumped is InputError, whatever it raises; its text stays inside."""

    class Broken:
        def model_dump(self, **options: object) -> object:
            raise RuntimeError(CANARY)

    with pytest.raises(InputError, match="got Broken") as caught:
        decode(Broken())
    assert CANARY not in str(caught.value)
    batch = decode(openai_message(openai_call(), Broken()))
    assert batch.calls[1] == Call("", "")


@pytest.mark.parametrize("use", [encode, turn])
def test_unknown_formats_are_refused(use: Any) -> None:
    """A wrong format is a set-up mistake: PolicyError with what is known."""
    for attempt in (
        lambda: use(decode([]), [], "gemini"),
        lambda: decode([], "open-ai"),
        lambda: schemas([], "x"),
        lambda: provider_options("x", False),
    ):
        with pytest.raises(PolicyError, match="known are 'openai', 'anthropic', 'towerman'"):
            attempt()


# JSON text whose arguments plain data would falsify.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": [{"b": 1, "b": [true]}]}', '{"a": [{"b": 1, "b": [true]}]}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": -Infinity, "b": "x"}', '{"a": -Infinity, "b": "x"}'),
        ('{"a": ' + "9" * 5000 + "}", '{"a": Infinity}'),
    ],
)
def test_p73_odd_arguments_in_json_text_stay_text_for_their_call(arguments: str, text: str) -> None:
    """P-73's kind: repeated keys and numbers that are none reach the arguments room as text; siblings are data."""
    native = '{"calls": [{"tool": "a", "arguments": {"x": 1}}, {"tool": "b", "arguments": HERE}]}'
    native = native.replace("HERE", arguments)
    assert [call.arguments for call in decode(native).calls] == [{"x": 1}, text]
    blocks = json.dumps(claude(tool_use(arguments={"x": 1}), tool_use(arguments={"here": 1}, own="b")))
    batch = decode(blocks.replace('{"here": 1}', arguments))
    assert [call.arguments for call in batch.calls] == [{"x": 1}, text]
    pairs(batch, refused(batch))


def test_repeated_keys_that_decide_nothing_are_let_through() -> None:
    """G1: a provider's slip beside the calls does not lose them."""
    text = json.dumps(completion(openai_message(openai_call()))).replace('"created": 1', '"created": 1, "created": 2')
    assert len(decode(text).calls) == 1


# Towerman's own form.


def test_native_calls_in_every_spelling() -> None:
    """Issue item 7: Call or dict, `name` for `tool`, `depends_on` for `needs`, numbers as ids, no arguments at all."""
    sound = Call("a", {"x": 1}, "1")
    batch = decode(
        [
            sound,
            {"name": "b", "arguments": '{"x": 1}', "id": 2, "depends_on": ["1"], "idempotency_key": "k"},
            {"tool": "c", "needs": "2"},
            {"tool": "d", "arguments": None, "id": None, "needs": (1, "2"), "idempotency_key": None},
            Call("e", MappingProxyType({"x": 1}), needs=["1"]),
            Dumped({"tool": "f", "arguments": {}}),
            {"tool": 5, "arguments": [1]},
            Call(None, None, None, None),  # type: ignore[arg-type]
        ]
    )
    assert batch == Batch(
        (
            sound,
            Call("b", '{"x": 1}', "2", ("1",), "k"),
            Call("c", {}, "", ("2",)),
            Call("d", {}, "", ("1", "2")),
            Call("e", {"x": 1}, "", ("1",)),
            Call("f", {}),
            Call("", "[1]"),
            Call("", {}),
        )
    )
    assert batch.calls[0] is sound
    assert decode([]) == decode(()) == decode({"calls": []}) == Batch(())
    assert decode({"calls": (sound,)}).calls == decode(deque([sound])).calls == (sound,)
    (named,) = decode([Call("t", {}, Word("w"))]).calls
    assert type(named.id) is str


def test_native_turn_can_be_read_again() -> None:
    """R-115: what is written of the calls reads as the same calls."""
    calls = (
        Call("a", {"x": [1, {"y": None}]}, "1"),
        Call("b", '{"broken', "2", ("1",), "key"),
        Call("", "", "3"),
    )
    batch = decode(list(calls))
    messages = turn(batch, refused(batch))
    assert decode(json.dumps(messages[0])).calls == calls
    assert turn(decode([]), []) == [{"calls": []}]


def test_r115_native_results_are_the_same_bytes() -> None:
    """R-115: the written results hold no times: the same outcomes give the same bytes."""
    batch = decode([Call("a", {}, "1")])
    options: dict[str, Any] = {"retry_after": 2.0, "attempts": 1, "original_bytes": 9, "handle": "h", "started": True}
    first = make_result(0, "1", "a", "error", "handler_error", "no", "c", waited=1.0, ran=2.0, **options)
    second = make_result(0, "1", "a", "error", "handler_error", "no", "c", waited=7.0, ran=8.0, **options)
    assert encode(batch, [first]) == encode(batch, [second])
    assert encode(batch, [first])[0] == {
        "index": 0,
        "id": "1",
        "tool": "a",
        "outcome": "error",
        "code": "handler_error",
        "message": "no",
        "content": "c",
        "started": True,
        "applied": "no",
        "retryable": "no",
        "retry_after": 2.0,
        "attempts": 1,
        "still_running": False,
        "original_bytes": 9,
        "handle": "h",
        "shared_with": None,
    }


class Colour(Enum):
    """For the test below."""

    RED = "red"


class Word(str):
    """For the test below."""


def test_python_values_in_arguments_are_written() -> None:
    """P-58's kind: a host's own calls may hold any Python value; what is sent is JSON, whatever they hold."""
    circle: dict[str, Any] = {"again": []}
    circle["again"].append(circle)
    circle["twice"] = [circle, circle]
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    arguments = {
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "price": Decimal("1.20"),
        "id": UUID(int=1),
        "path": PurePosixPath("/a"),
        "colour": Colour.RED,
        "word": Word("w"),
        "flag": True,
        "tags": {"b", "a"},
        "raw": b"\xff a",
        "long": b"\xff" * 2_000_000,
        "pair": (1, 2.5),
        "nan": float("nan"),
        "huge": 10**5000,
        "odd": object(),
        "dumped": Dumped({"a": 1}),
        "circle": circle,
        5: {None: 1},
    }
    batch = decode([Call("t", arguments), Call("t", {"deep": deep})])  # type: ignore[dict-item]
    pairs(batch, answered(batch))
    written: Any = turn(batch, answered(batch), "anthropic")[0]["content"]
    assert written[0]["input"].pop("huge").startswith("0x")
    assert len(json.dumps(written[0]["input"].pop("long"))) <= 1_000_000
    assert written[0]["input"] == {
        "when": "2026-01-02T00:00:00+00:00",
        "price": "1.20",
        "id": "00000000-0000-0000-0000-000000000001",
        "path": "/a",
        "colour": "red",
        "word": "w",
        "flag": True,
        "tags": ["a", "b"],
        "raw": "data:application/octet-stream;base64,/yBh",
        "pair": [1, 2.5],
        "nan": "NaN",
        "odd": "<object>",
        "dumped": {"a": 1},
        "circle": {"again": ["<dict>"], "twice": ["<dict>", "<dict>"]},
        "5": {"None": 1},
    }


# Schemas and options.

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def test_schemas_in_each_format() -> None:
    """API section 4: `tower.schemas(format)` gives what a request's `tools` takes."""
    before = copy.deepcopy(SCHEMA)
    tools = [("read", "Read.", SCHEMA), ("ping", "", {})]
    empty = {"type": "object", "properties": {}}
    assert schemas(tools, "openai") == [
        {"type": "function", "function": {"name": "read", "description": "Read.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "ping", "parameters": empty}},
    ]
    assert schemas(tools, "anthropic") == [
        {"name": "read", "description": "Read.", "input_schema": SCHEMA},
        {"name": "ping", "input_schema": {"type": "object"}},
    ]
    assert schemas(tools, "towerman") == [
        {"name": "read", "description": "Read.", "schema": SCHEMA},
        {"name": "ping", "description": "", "schema": {"type": "object"}},
    ]
    for form in FORMATS:
        written: Any = schemas(tools, form)[0]
        inner = written.get("function", written)
        inner.get("parameters", inner.get("input_schema", inner.get("schema")))["properties"]["x"]["type"] = "spoilt"
    assert before == SCHEMA


@pytest.mark.parametrize(
    ("name", "refused_by"),
    [
        ("files.read", ["openai", "anthropic"]),
        ("read file", ["openai", "anthropic"]),
        ("läs", ["openai", "anthropic"]),
        ("read\n", ["openai", "anthropic"]),
        ("", ["openai", "anthropic", "towerman"]),
        ("a" * 65, ["openai"]),
        ("a" * 129, ["openai", "anthropic"]),
        ("a" * 64, []),
        ("files__read-1", []),
    ],
)
def test_names_that_a_provider_refuses_are_told_early(name: str, refused_by: list[str]) -> None:
    """A name that the provider cannot take is a set-up mistake, told with the rule and the fix."""
    for form in FORMATS:
        if form in refused_by:
            with pytest.raises(PolicyError, match="`name=`"):
                schemas([(name, "", {})], form)
        else:
            assert len(schemas([(name, "", {})], form)) == 1


def test_schemas_refuse_repeats_and_what_is_no_object() -> None:
    """Two tools of one name, or a schema whose type is not object, are told before a provider does."""
    for form in FORMATS:
        with pytest.raises(PolicyError, match="two tools have this name"):
            schemas([("a", "", {}), ("a", "", {})], form)
        with pytest.raises(PolicyError, match="must be 'object'"):
            schemas([("a", "", {"type": "array"})], form)


def test_r02_the_emission_switch() -> None:
    """R-02: the provider's own words for several calls in one response, on and off."""
    assert provider_options("openai", False) == {"parallel_tool_calls": False}
    assert provider_options("openai", True) == {"parallel_tool_calls": True}
    off = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert provider_options("anthropic") == off
    assert provider_options("anthropic", True) == {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}
    assert provider_options("towerman", False) == provider_options("towerman", True) == {}


def test_adapters_are_loaded_on_first_use() -> None:
    """`towerman.adapters` is light: a format's module is loaded when that format is spoken, and no SDK ever."""
    code = (
        "import sys, towerman.adapters as a; mods = ['openai', 'anthropic', 'native'];"
        "seen = lambda: [m for m in mods if 'towerman.adapters.' + m in sys.modules];"
        "print(seen()); a.decode({'role': 'assistant', 'content': 'x'}); print(seen());"
        "print([m for m in ('openai', 'anthropic', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SRC, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "['openai']"]
    assert "openai" not in done.stdout.split("\n")[2]
    assert adapters.__all__ == ["FORMATS", "decode", "detect", "encode", "provider_options", "schemas", "turn"]


# The providers' own types.


def test_openai_sdk_objects_round_trip() -> None:
    """R-105: a ChatCompletion is read as its dict is, and what goes back is a message of the SDK's own type."""
    chat = pytest.importorskip("openai.types.chat", reason="the openai package is not installed")
    data = completion(
        openai_message(
            openai_call("read", '{"x": 1}', "call_1"),
            {"id": "call_2", "type": "custom", "custom": {"name": "sql", "input": "select 1"}},
            openai_call("read", "{", "call_3"),
            reasoning_content="hm",
        )
    )
    response = chat.ChatCompletion.model_validate(data)
    plain = decode(data)
    message = response.choices[0].message
    for given in (response, message, message.tool_calls, {"role": "assistant", "tool_calls": message.tool_calls}):
        assert detect(given) == "openai"
        batch = decode(given)
        assert batch.calls == plain.calls
        messages = turn(batch, refused(batch))
        pair_openai(messages, 3)
        again = chat.ChatCompletionMessage.model_validate(messages[0])
        assert [call.id for call in again.tool_calls] == ["call_1", "call_2", "call_3"]
        assert decode(again).calls[:2] == plain.calls[:2]
    assert decode(response).response_id == "chatcmpl-1"
    assert turn(decode(response), refused(plain))[0]["reasoning_content"] == "hm"
    broken = chat.ChatCompletion.construct(choices=[{"message": {"role": "assistant", "tool_calls": [None, 5]}}])
    assert [call.tool for call in decode(broken).calls] == ["", ""]


def test_openai_parsed_sdk_objects_leave_out_what_the_sdk_added() -> None:
    """R-105: fields that an SDK's parser adds are refused by the API, so they do not go back."""
    chat = pytest.importorskip("openai.types.chat", reason="the openai package is not installed")
    call = openai_call()
    call["function"]["parsed_arguments"] = {"x": 1}
    message = chat.ParsedChatCompletionMessage.model_validate({**openai_message(call), "parsed": {"a": 1}})
    batch = decode(message)
    assert "parsed" not in json.dumps(turn(batch, answered(batch)))
    pair_openai(turn(batch, answered(batch)), 1)


def test_anthropic_sdk_objects_round_trip() -> None:
    """R-105: a Message is read as its dict is, and what goes back are blocks of the SDK's own types."""
    types = pytest.importorskip("anthropic.types", reason="the anthropic package is not installed")
    from pydantic import TypeAdapter

    data = claude(
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "text", "text": "I look.", "citations": None},
        tool_use("read", {"x": 1}, "toolu_1", caller={"type": "direct"}),
        tool_use("read", {}, "toolu_2"),
    )
    message = types.Message.model_validate(data)
    plain = decode(data)
    for given in (message, message.content, {"role": "assistant", "content": message.content}, message.to_param()):
        assert detect(given) == "anthropic"
        batch = decode(given)
        assert batch.calls == plain.calls
        messages = turn(batch, refused(batch))
        pair_anthropic(messages, 2)
        again = types.Message.model_validate({**data, "content": messages[0]["content"]})
        assert decode(again).calls == plain.calls
        assert again.content[0] == message.content[0]
        blocks: Any = messages[1]["content"]
        for block in blocks:
            assert TypeAdapter(types.ToolResultBlockParam).validate_python(block, strict=True) == block
    assert decode(message).response_id == "msg_1"
    broken = types.Message.construct(**{**data, "content": [tool_use(arguments='{"x": '), tool_use(None, {}, None)]})
    batch = decode(broken)
    assert batch.calls == (Call("read", '{"x": ', "toolu_a"), Call("", {}))
    pair_anthropic(turn(batch, refused(batch)), 2)


def test_schemas_are_of_the_sdks_own_types() -> None:
    """API section 4: the definitions validate as the SDKs' request types."""
    openai_types = pytest.importorskip("openai.types.chat", reason="the openai package is not installed")
    anthropic_types = pytest.importorskip("anthropic.types", reason="the anthropic package is not installed")
    from pydantic import TypeAdapter

    tools = [("read", "Read.", SCHEMA)]
    for adapter, form in (
        (TypeAdapter(openai_types.ChatCompletionFunctionToolParam), "openai"),
        (TypeAdapter(anthropic_types.ToolParam), "anthropic"),
    ):
        (tool,) = schemas(tools, form)
        assert adapter.validate_python(tool) == tool


# Real inputs.


def test_recorded_runs_are_read_and_answered(shared_data: Records) -> None:
    """R-104: every assistant message of recorded gpt-4o runs is read; its recorded results are what we write."""
    read = 0
    for record in shared_data("taubench_airline_gpt4o"):
        messages = record["traj"]
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            batch = decode(message)
            wanted = message.get("tool_calls") or []
            assert [(call.tool, call.arguments, call.id) for call in batch.calls] == [
                (call["function"]["name"], call["function"]["arguments"], call["id"]) for call in wanted
            ]
            results = answered(batch)
            if wanted:
                read += 1
                recorded = messages[index + 1]
                results = answered(batch, recorded["content"])
                (written,) = encode(batch, results)
                assert written == {key: recorded[key] or EMPTY for key in written}
            echoed = turn(batch, results)[0]
            assert {**message, "tool_calls": wanted} == {"tool_calls": [], **echoed}
            pairs(batch) if wanted else None
    assert read > 50


@pytest.mark.parametrize("name", ["bfcl_parallel", "bfcl_parallel_multiple", "bfcl_live_parallel"])
def test_published_parallel_calls_survive_every_form(name: str, shared_data: Records) -> None:
    """R-104, R-106: real parallel batches keep their calls, in order, through each form and back."""
    for record in shared_data(name):
        wanted = [
            (tool, {key: values[0] for key, values in arguments.items()})
            for entry in record["ground_truth"]
            for tool, arguments in entry.items()
        ]
        batch = decode([{"name": tool, "arguments": arguments} for tool, arguments in wanted])
        assert [(call.tool, call.arguments) for call in batch.calls] == wanted
        pairs(batch)
        for form in FORMATS:
            again = decode(json.dumps(turn(batch, answered(batch), form)[0]))
            assert again.format == form
            names = [re.sub(r"[^\w-]", "_", tool) if form != "towerman" else tool for tool, _ in wanted]
            assert [call.tool for call in again.calls] == names
            assert [readable(call.arguments) for call in again.calls] == [arguments for _, arguments in wanted]
        for function in record["function"]:
            tool = [(re.sub(r"[^\w-]", "_", function["name"]), function["description"], {"type": "object"})]
            assert all(len(schemas(tool, form)) == 1 for form in FORMATS)


def test_published_trajectories_survive_every_form(shared_data: Records) -> None:
    """R-104: names with spaces and colons, long outputs and odd values: each batch pairs for each provider."""
    for record in shared_data("trajectbench_parallel"):
        calls = [
            openai_call(
                tool["tool name"],
                json.dumps({item["name"]: item["value"] for item in tool["required parameters"]}),
                f"call_{index}",
            )
            for index, tool in enumerate(record["tool list"])
        ]
        batch = decode(completion(openai_message(*calls)))
        assert [call.tool for call in batch.calls] == [tool["tool name"] for tool in record["tool list"]]
        results = [
            make_result(index, call.id, call.tool[:128], "ok", None, "done", str(tool["executed_output"]), started=True)
            for index, (call, tool) in enumerate(zip(batch.calls, record["tool list"], strict=True))
        ]
        pairs(batch, results)
