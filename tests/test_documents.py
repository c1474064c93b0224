"""A batch as a text that can be handed in again: whole, compared by its calls, and looked at before it is believed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import date
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerman import documents
from towerman.calls import Batch, Call
from towerman.documents import Writing, batch_key, digest_of, read_document

KEY = b"key of the digests"
CANARY = "canary-9d02"

texts = st.text(max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, plain, max_size=4)
calls = st.builds(
    Call,
    tool=texts,
    arguments=objects | texts,
    id=texts,
    needs=st.lists(texts, max_size=3).map(tuple),
    idempotency_key=st.none() | texts,
    if_failed=st.sampled_from(("skip", "run_anyway")),
    caller=texts,
)
batches = st.builds(
    Batch,
    calls=st.lists(calls, max_size=6).map(tuple),
    format=st.sampled_from(("openai", "anthropic", "towerman")),
    message=st.none() | objects,
    truncated=st.booleans(),
    response_id=st.none() | texts,
    batch_id=st.none() | texts,
    plan=st.booleans(),
    ordered=st.booleans(),
    numbered=st.booleans(),
    outputs=st.none() | objects,
)


def text_of(batch: Batch) -> bytes | None:
    writing = Writing(batch, KEY)
    for call in batch.calls:
        writing.add(call)
    return writing.text()


@given(batches)
@settings(max_examples=200, deadline=None)
def test_r43_what_is_written_is_read_as_it_was(batch: Batch) -> None:
    """R-43: every field of every call and of the batch is there again, and it is the same batch by its digest."""
    stored = text_of(batch)
    assert stored is not None
    again = read_document(stored)
    assert again == batch
    assert digest_of(again, KEY) == digest_of(batch, KEY) is not None
    assert text_of(again) == stored


def test_a_call_says_the_same_as_text_and_as_data() -> None:
    """Text is compared by what it says; text that says nothing by itself."""
    data = Batch((Call("t", {"a": 1, "b": [2]}, "x"),), plan=True)
    text = Batch((Call("t", ' {"b":[2], "a":1} ', "x"),), "openai", {"role": "assistant"}, plan=True)
    broken = Batch((Call("t", '{"b":[2], "a":', "x"),), plan=True)
    assert digest_of(data, KEY) == digest_of(text, KEY)
    assert digest_of(data, KEY) != digest_of(broken, KEY)
    assert digest_of(data, KEY) != digest_of(data, b"another key")


@pytest.mark.parametrize(
    "other",
    [
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y"), Call("u", {}, "z")), plan=True),
        Batch((Call("u", {}, "y"), Call("t", {"a": 1}, "x")), plan=True),
        Batch((Call("t", {"a": 2}, "x"), Call("u", {}, "y")), plan=True),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y", ("x",))), plan=True),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y", (), "key")), plan=True),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y", if_failed="run_anyway")), plan=True),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y"))),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y")), plan=True, ordered=True),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y")), plan=True, outputs={"n": 1}),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y")), plan=True, refused=("bad_reference", (0,), "no")),
        Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y", caller="program:1")), plan=True),
    ],
)
def test_another_plan_has_another_digest(other: Batch) -> None:
    """Whatever says what a plan does counts: calls, their order, what they need, what is done when these fail."""
    assert digest_of(other, KEY) != digest_of(Batch((Call("t", {"a": 1}, "x"), Call("u", {}, "y")), plan=True), KEY)


def test_where_it_came_from_does_not_count() -> None:
    """A plan that is read from a file is the one that a provider's response held, if its calls are the same."""
    one = Batch((Call("t", {}, "x", "y"),), plan=True)  # a single text is one id
    two = Batch((Call("t", {}, "x", ("y",)),), "openai", {"id": 1}, True, "r", "b", plan=True)
    assert digest_of(one, KEY) == digest_of(two, KEY)


def test_every_field_is_written_and_looked_at() -> None:
    """A field that is added to a call or a batch is not forgotten here."""
    assert {one.name for one in (*fields(Batch), *fields(Call))} - documents._APART <= documents._KINDS.keys()


def test_any_mapping_is_an_object() -> None:
    """Arguments that were frozen are written as what they hold."""
    frozen = Batch((Call("t", MappingProxyType({"a": MappingProxyType({"b": 1})})),), plan=True)
    stored = text_of(frozen)
    assert stored is not None and read_document(stored).calls[0].arguments == {"a": {"b": 1}}


def test_what_has_no_json_form_is_not_kept_and_what_has_no_spelling_is_compared_with_nothing() -> None:
    """Nothing is guessed: such a batch is to be handed in again."""
    spelled = Batch((Call("t", {"day": date(2026, 1, 2)}), Call("t", {})), plan=True)
    unspelled = Batch((Call("t", {"thing": object()}), Call("t", {})), plan=True)
    assert text_of(spelled) is None and digest_of(spelled, KEY) is not None
    assert text_of(unspelled) is None and digest_of(unspelled, KEY) is None
    assert text_of(Batch((), outputs={"day": date(2026, 1, 2)})) is None


def test_a_message_that_has_no_json_form_is_left_out() -> None:
    """It is needed to write the turn again, not to go on."""
    batch = Batch((Call("t", {}),), "openai", {"thing": object()}, plan=True)
    stored = text_of(batch)
    assert stored is not None
    assert read_document(stored) == replace(batch, message=None)


def _changed(change: Any) -> bytes:
    stored = text_of(Batch((Call("t", {"a": CANARY}, "x"),), plan=True))
    assert stored is not None
    given = json.loads(stored)
    change(given)
    return json.dumps(given).encode()


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"{",
        b"[]",
        b'{"towerman_batch": 2, "batch": {}, "calls": []}',
        b'{"towerman_batch": 1, "batch": [], "calls": []}',
        b'{"towerman_batch": 1, "batch": {}}',
        _changed(lambda one: one["batch"].update(plan=1)),
        _changed(lambda one: one["batch"].update(outputs=[])),
        _changed(lambda one: one["calls"].append(3)),
        _changed(lambda one: one["calls"].append({"tool": "t"})),
        _changed(lambda one: one["calls"].append({"tool": "t", "arguments": 3})),
        _changed(lambda one: one["calls"].append({"tool": "t", "arguments": {}, "needs": "x"})),
        _changed(lambda one: one["calls"].append({"tool": "t", "arguments": {}, "if_failed": "never"})),
    ],
)
def test_what_is_no_batch_is_refused_without_a_value(stored: bytes) -> None:
    """Everything that is read is looked at before it is believed."""
    with pytest.raises(ValueError) as told:
        read_document(stored)
    assert CANARY not in str(told.value)


def test_what_a_later_version_has_added_is_left_out() -> None:
    """So that a plan that was begun by a newer process can be gone on with where that is possible."""
    stored = _changed(lambda one: (one["batch"].update(new=1), one["calls"][0].update(newer=2)))
    assert read_document(stored) == Batch((Call("t", {"a": CANARY}, "x"),), plan=True)


def test_a_batch_is_found_by_run_name_and_tenant() -> None:
    """None of them runs into the next one."""
    whose = (("r", "b", None), ("r", "b", ""), ("rb", "", None), ("", "rb", None))
    keys = {batch_key(KEY, run, "batch", name, tenant) for run, name, tenant in whose}
    keys.add(batch_key(KEY, "r", "response", "b", None))
    assert len(keys) == 5
