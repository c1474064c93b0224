"""The provider formats under any input: rubbish is refused or answered, and what is written always pairs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_adapters import PAIR, THREE, Dumped, claude, completion, openai_call, openai_message, refused, tool_use

from towerman.adapters import FORMATS, decode, detect, encode, turn
from towerman.calls import Batch, Call, Result, make_result
from towerman.errors import InputError

LONG = settings.get_current_profile_name() == "long"

# Every character, halves of surrogate pairs too: models and broken streams do give them.
texts = st.text(st.characters(), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
KEYS = """
    choices message tool_calls function name arguments id type role content input calls tool needs custom function_call
    finish_reason stop_reason depends_on idempotency_key plan text toolset_name audio
"""
WORDS = "assistant user function custom tool_use text thinking message length max_tokens"
keys = st.sampled_from(KEYS.split())
words = st.sampled_from(WORDS.split())
rubbish = st.recursive(
    scalars | words,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys | texts, inner, max_size=5)
        | st.builds(Dumped, inner)
        | st.tuples(inner)
    ),
    max_leaves=25,
)

# Rubbish in the places where calls are looked for.
items = (
    st.fixed_dictionaries(
        {"type": words}, optional={"id": rubbish, "name": rubbish, "input": rubbish, "function": rubbish}
    )
    | st.fixed_dictionaries({"tool": rubbish}, optional={"id": texts, "arguments": rubbish, "needs": st.lists(texts)})
    | rubbish
)
shaped = st.lists(items, max_size=4).flatmap(
    lambda found: st.sampled_from(
        [
            found,
            {"calls": found},
            {"plan": found},
            openai_message(*found),
            completion(openai_message(*found)),
            claude(*found),
            Dumped(found),
        ]
    )
)

# Ids that repeat, are missing, cannot be ids, or look like the fallbacks.
ids = (
    st.sampled_from(["", "a", "b", "call_0", "call_1", "call_2", "call_1_2", "call_2_2", None, 0, 1, "x" * 5000])
    | texts
    | st.integers()
)
names = st.sampled_from(["read", "a.b", "", "read file", None, 5]) | texts
written = st.dictionaries(texts, st.recursive(scalars, lambda inner: st.lists(inner, max_size=3)), max_size=3)
arguments = (
    written | texts | written.map(json.dumps) | st.sampled_from(["", "{", "[1]", "null", None, [1], 5, '{"a": NaN}'])
)
entries = st.lists(st.tuples(names, arguments, ids), max_size=8)
outcomes = st.sampled_from(["ok", "error", "rejected", "skipped", "cancelled", "timed_out", "pending"])


def results_of(batch: Batch, data: st.DataObject) -> list[Result]:
    """Results with random outcomes, each with a content of its own; none was started."""
    drawn: list[Any] = data.draw(st.lists(outcomes, min_size=len(batch.calls), max_size=len(batch.calls)))
    return [
        make_result(
            index, call.id, call.tool[:128], outcome, None if outcome == "ok" else "cancelled", "m", f"c{index}"
        )
        for index, (call, outcome) in enumerate(zip(batch.calls, drawn, strict=True))
    ]


def contents(messages: list[dict[str, Any]], form: str) -> list[str]:
    """The contents of result messages, in the order in which the provider reads them."""
    if form == "anthropic":
        messages = messages[0]["content"] if messages else []
    return [message["content"] for message in messages]


def pairs_everywhere(batch: Batch, results: list[Result]) -> None:
    """The batch is written in each form: unique ids, in order, acceptable, and the same at the second writing."""
    wanted = [f"c{index}" for index in range(len(results))]
    for form in FORMATS:
        messages = turn(batch, results, form)
        PAIR[form](messages, len(batch.calls))
        assert contents(encode(batch, results, form), form) == wanted
        assert messages == turn(batch, results, form)
        again = decode(messages[0], form) if messages else Batch(())
        assert len(again.calls) == len(batch.calls)
        assert form != "towerman" or again.plan == batch.plan


@given(entries, st.data())
@settings(max_examples=2_000 if LONG else 120)
@example([("t", {}, "call_1"), ("t", {}, ""), ("t", {}, "call_1"), ("t", {}, "call_2")], None)
def test_p05_p08_any_ids_pair_uniquely_and_in_order(
    calls: list[tuple[Any, Any, Any]], data: st.DataObject | None
) -> None:
    """P-05, P-07, P-08, R-104 to R-106, R-116: whatever ids, names and arguments came, every export pairs in order."""
    for given_data in (
        completion(openai_message(*(openai_call(name, value, own) for name, value, own in calls))),
        claude(*({**tool_use(name, None, own), "input": value} for name, value, own in calls)),
        [Call(name or "", {} if value is None else value, str(own)) for name, value, own in calls],  # type: ignore[arg-type]
    ):
        before = copy.deepcopy(given_data)
        batch = decode(given_data)
        assert len(batch.calls) == len(calls)
        results = [make_result(index, "", "", "ok", None, "m", f"c{index}") for index in range(len(calls))]
        pairs_everywhere(batch, results if data is None else results_of(batch, data))
        assert repr(given_data) == repr(before)


@given(entries)
@settings(max_examples=500 if LONG else 60)
def test_the_first_of_a_repeated_id_keeps_it(calls: list[tuple[Any, Any, Any]]) -> None:
    """P-05: an id that can be told apart is the provider's own, in the assistant message and in the result."""
    batch = decode(openai_message(*(openai_call(name, value, own) for name, value, own in calls)))
    exported = [message["tool_call_id"] for message in encode(batch, refused(batch))]
    seen: set[str] = set()
    for call, own in zip(batch.calls, exported, strict=True):
        usable = 0 < len(call.id) <= 4096 and not any("\ud800" <= letter <= "\udfff" for letter in call.id)
        assert (own == call.id) == (usable and call.id not in seen)
        seen.add(call.id)


@given(rubbish | shaped)
@settings(max_examples=5_000 if LONG else 400)
@example({"plan": []})
@example({"plan": [{"tool": "read"}]})
def test_rubbish_is_refused_or_is_a_batch(value: Any) -> None:
    """G1: anything at all is InputError or a Batch, never another exception; a batch can always be answered."""
    for form in (None, *FORMATS):
        try:
            batch = decode(value, form)
        except InputError:
            continue
        assert isinstance(batch, Batch)
        assert all(isinstance(call.tool, str) and isinstance(call.id, str) for call in batch.calls)
        assert all(isinstance(call.arguments, str | dict) for call in batch.calls)
        answers = [
            make_result(index, "", "", "rejected", "cancelled", "m", f"c{index}") for index in range(len(batch.calls))
        ]
        pairs_everywhere(batch, answers)


@given(texts | st.binary(max_size=40) | (rubbish | shaped).map(lambda value: json.dumps(value, default=lambda _: None)))
@settings(max_examples=3_000 if LONG else 200)
def test_any_text_is_refused_or_is_a_batch(text: str | bytes) -> None:
    """G1: the same for text: detect and decode agree on what has a form."""
    try:
        form = detect(text)
    except InputError:
        with pytest.raises(InputError):
            decode(text)
        return
    try:
        assert decode(text).format == form
    except InputError:
        pass


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every node."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


@given(st.sampled_from(FORMATS), st.data(), rubbish)
@settings(max_examples=3_000 if LONG else 300)
def test_one_broken_place_is_refused_or_answered(form: str, data: st.DataObject, broken: Any) -> None:
    """G1: a good response with one node replaced by anything is InputError, or a batch that pairs everywhere."""
    response: Any = copy.deepcopy(THREE[form])
    path = data.draw(st.sampled_from(places(response)))
    node = response
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = broken
    try:
        batch = decode(response)
    except InputError:
        return
    pairs_everywhere(batch, results_of(batch, data))


@given(
    st.sampled_from(["openai", "anthropic"]),
    st.sampled_from(["id", "name", "arguments"]),
    st.integers(0, 2),
    scalars | st.lists(scalars, max_size=2) | st.dictionaries(texts, scalars, max_size=2),
)
@settings(max_examples=1_000 if LONG else 150)
def test_what_the_model_wrote_never_loses_the_batch(form: str, field: str, index: int, value: Any) -> None:
    """G1: an odd id, name or argument of one call is that call's own matter; its siblings are read as they were."""
    response: Any = copy.deepcopy(THREE[form])
    if form == "openai":
        call = response["choices"][0]["message"]["tool_calls"][index]
        (call if field == "id" else call["function"])[field] = value
    else:
        blocks = [block for block in response["content"] if block["type"] == "tool_use"]
        blocks[index]["input" if field == "arguments" else field] = value
    good, batch = decode(THREE[form]), decode(response)
    assert len(batch.calls) == 3
    assert [call for place, call in enumerate(batch.calls) if place != index] == [
        call for place, call in enumerate(good.calls) if place != index
    ]


finite = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(texts, finite, max_size=3), min_size=1, max_size=4))
@settings(max_examples=500 if LONG else 80)
def test_sound_arguments_survive_json_text(values: list[dict[str, Any]]) -> None:
    """R-115: arguments in JSON text are the same data; with a repeated key they they stay text."""
    calls = [{"tool": "t", "arguments": value} for value in values]
    assert [call.arguments for call in decode(json.dumps(calls)).calls] == values
    twice = json.dumps({"tool": "t", "arguments": {"again": 1}}).replace('"again": 1', '"again": 1, "again": 2')
    mixed = "[" + ", ".join([twice, *map(json.dumps, calls), twice]) + "]"
    read = [call.arguments for call in decode(mixed).calls]
    assert read == ['{"again": 1, "again": 2}', *values, '{"again": 1, "again": 2}']
