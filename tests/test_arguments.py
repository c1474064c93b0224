"""Room 5a: what the model wrote becomes checked keyword arguments, or a refusal that helps and tells nothing."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import json
import math
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar, Unpack

import pytest
from conftest import SHARED
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict, field_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic takes typing's own from 3.12 on

from towerman import arguments
from towerman.arguments import (
    MAX_ARGUMENT_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_SCHEMA_BYTES,
    ArgumentsRefused,
    Checker,
    checker_from_function,
    checker_from_schema,
    context_parameter_of,
    description_of,
    load_arguments,
    loading,
    near_names,
    schemas,
    signatures,
    subschemas,
)
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from typing import Never as OnlyForTypes

CANARY = "S3CRET-c4n4ry"


class Context:
    """Stands in for towerman.Context: the room is handed the type."""


def checker(function: Callable[..., object], context_parameter: str | None = None) -> Checker:
    return checker_from_function(function, context_parameter=context_parameter)


def refusal(subject: Checker | Callable[..., object], raw: object) -> str:
    """The message of the refusal; the exception must hang on to nothing else."""
    if not hasattr(subject, "check"):
        subject = checker(subject)  # type: ignore[arg-type]
    with pytest.raises(ArgumentsRefused) as caught:
        subject.check(raw)  # type: ignore[union-attr, arg-type]
    return told(caught.value)


def outcome(subject: Checker, raw: object) -> dict[str, object] | str:
    """The checked arguments, or the message of the refusal."""
    try:
        return subject.check(raw)  # type: ignore[arg-type]
    except ArgumentsRefused as refused:
        return told(refused)


def unloadable(raw: object, *, any_required: bool = False) -> str:
    with pytest.raises(ArgumentsRefused) as caught:
        load_arguments(raw, any_required=any_required)
    return told(caught.value)


def told(refused: ArgumentsRefused) -> str:
    assert refused.__cause__ is None
    assert refused.__context__ is None, "an exception that holds the values hangs on"
    assert refused.message == str(refused)
    assert 0 < len(refused.message) <= 1000
    return refused.message


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


# --- loading -------------------------------------------------------------------------------------------


def nothing() -> None:
    """A tool without arguments."""


def city(city: str) -> None:
    """A tool with a required argument."""


@pytest.mark.parametrize("text", ["", "  ", "\n\t ", "\u2003", "{}", " {} ", "\n{\n}\n"])
def test_p73_blank_text_is_an_empty_object_where_nothing_is_required(text: str) -> None:
    """P-73: a tool without required arguments runs for empty and blank text as it does for {}."""
    assert checker(nothing).check(text) == {}
    assert load_arguments(text, any_required=False) == {}


@pytest.mark.parametrize("text", ["", "  ", "\n\t "])
def test_p73_blank_text_never_becomes_an_empty_object_where_something_is_required(text: str) -> None:
    """P-73: for a tool with required arguments blank text is refused, naming them and what they must be."""
    assert refusal(city, text) == "The arguments are empty: 'city' is required (text). Send them as one JSON object."
    assert "required" in unloadable(text, any_required=True)
    schema = checker_from_schema({"properties": {"b": {}}, "required": ["b", "a"]})
    assert "'a' is required; 'b' is required" in refusal(schema, text)
    many = checker_from_schema({"required": [f"name{number}" for number in range(9)]})
    assert "'name4' is required; and 4 more." in refusal(many, text)


@pytest.mark.parametrize("function", [nothing, city])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("null", "null"),
        ("[]", "a list"),
        ('[{"city": "x"}]', "a list"),
        ('"x"', "a string (send the object itself"),
        ('"{\\"city\\": \\"x\\"}"', "a string (send the object itself"),
        ("12", "a number"),
        ("-1.5", "a number"),
        ("true", "true or false"),
    ],
)
def test_p73_a_value_that_is_no_object_is_refused(function: Callable[..., object], text: str, kind: str) -> None:
    """P-73: null, lists, strings, numbers and booleans are no arguments, also where nothing is required."""
    message = refusal(function, text)
    assert "one JSON object" in message
    assert f"got {kind}" in message


@pytest.mark.parametrize("value", [None, 5, 1.5, True, [], ["a"], object(), {1, 2}, iter(())])
def test_p73_python_objects_that_are_no_mapping_are_refused(value: object) -> None:
    """Only text, UTF-8 bytes and mappings are arguments; everything else is refused for that call."""
    assert "must be one JSON object" in refusal(nothing, value)
    assert "got something else" in unloadable(object())


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"city": "San Fra', "a string does not end; it starts at line 1, column 10"),
        ('{"city": "x"', "line 1, column 13, where the text ends: it may have been cut off"),
        ('{"city":', "expected a value at line 1, column 9, where the text ends"),
        ("{", "expected a name in double quotes at line 1, column 2, where the text ends"),
        ("{'city': 'x'}", "expected a name in double quotes at line 1, column 2"),
        ('{"city" "x"}', "expected ':' after a name at line 1, column 9"),
        ('{"city": "x" "y": 1}', "expected ',' or the end of the object or list at line 1, column 14"),
        ('{"city": "x"} and more', "text after the end of the value at line 1, column 15"),
        ('{"city": "x"}{"city": "x"}', "text after the end of the value at line 1, column 14"),
        ('{\n  "city": nope\n}', "expected a value at line 2, column 11"),
        ('```json\n{"city": "x"}\n```', "expected a value at line 1, column 1"),
        ('{"city": "a\nb"}', "a raw control character in a string (write a line break as \\n) at line 1, column 12"),
        ('{"city": "\\x"}', "a wrong escape in a string"),
        ('{"city": "\\u12"}', "a wrong escape in a string"),
        ('{"n": 01}', "expected ',' or the end"),
        ('\ufeff{"city": "x"}', "a byte order mark, which JSON does not have, at line 1, column 1"),
        ("San Francisco", "expected a value at line 1, column 1"),
        ('{"city": "x",}', "line 1, column 1"),
    ],
)
def test_p73_malformed_text_is_refused_with_what_was_expected_and_where(text: str, hint: str) -> None:
    """P-73: broken JSON is refused for its call with line, column and what was expected, and never repaired."""
    message = refusal(city, text)
    assert hint in message
    assert message.endswith("Send one whole JSON object.")
    assert "San Fra" not in message


def test_p73_a_report_of_the_parser_that_is_not_known_still_gives_the_place() -> None:
    """A parser of a later Python may say new things: the position is told and its text is not passed on."""
    assert "something unexpected at line 2, column 1." in loading._syntax("a\nb", f"new {CANARY}", 2)
    assert CANARY not in loading._syntax("a\nb", f"new {CANARY}", 2)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '{"a": 1, "b": {"x": 1, "y": 2, "x": 3}}', '{"\\u0061": 1, "a": 2}']
)
def test_duplicate_names_are_refused(text: str) -> None:
    """One name twice in an object, at any level and however it is escaped, is refused: which one was meant?"""
    assert "one name twice" in unloadable(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400 + ".0"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    """NaN and the infinities are not JSON, and a number that would become one of them is refused too."""
    assert "not finite or too large" in unloadable(f'{{"a": [{number}]}}')
    assert "not finite or too large" in unloadable({"a": [float(number)]})
    assert "not finite or too large" in unloadable({"a": float(number)})


def test_long_whole_numbers_are_read_exactly_up_to_the_limit() -> None:
    """A whole number of up to 4,300 digits arrives exactly; a longer one is refused, in text and in mappings."""
    for text in ("9" * MAX_DIGITS, "-" + "9" * MAX_DIGITS):
        assert load_arguments(f'{{"a": {text}}}', any_required=False) == {"a": int(text)}
        assert load_arguments({"a": int(text)}, any_required=False) == {"a": int(text)}
    for text in ("1" + "0" * MAX_DIGITS, "9" * 100_000):
        assert "more than 4300 digits" in unloadable(f'{{"a": {text}}}')
    assert "more than 4300 digits" in unloadable({"a": 10 ** (MAX_DIGITS + 1)})
    assert "more than 4300 digits" in unloadable({"a": [-(10 ** (MAX_DIGITS + 1))]})


def test_a_lower_limit_of_the_interpreter_is_a_refusal_too() -> None:
    """Where Python was told to read fewer digits than 4,300, the call is refused and nothing else breaks."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert "digits" in unloadable(f'{{"a": {"9" * 700}}}')
        assert "must be text" in refusal(city, {"city": 10**700})
    finally:
        sys.set_int_max_str_digits(before)


def test_no_limit_of_the_interpreter_does_not_lift_ours() -> None:
    """Where Python reads any number of digits, which takes quadratic time, ours still ends it."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert "more than 4300 digits" in unloadable(f'{{"a": {"9" * 900_000}}}')
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 5_000, 100_000])
@pytest.mark.parametrize("shape", ["object", "list", "mixed", "open", "in a string too"])
def test_over_deep_arguments_are_refused_without_a_recursion_error(depth: int, shape: str) -> None:
    """More than 64 levels are refused, also where the parser would raise RecursionError, also unclosed."""
    inner = depth - 1
    text = {
        "object": nested(depth),
        "list": '{"a":' + "[" * inner + "]" * inner + "}",
        "mixed": '{"a":' + "[{}," * (inner - 1) + "[1]" + "]" * (inner - 1) + "}",
        "open": '{"a":' + "[" * inner,
        "in a string too": '{"\\"]": "]]}}\\\\","a":' + "[" * inner + '"[]"' + "]" * inner + "}",
    }[shape]
    assert "nested too deep: send a flatter value, of at most 64 levels" in unloadable(text)


def test_arguments_at_the_depth_limit_are_read() -> None:
    """64 levels pass, in text and in mappings alike, and brackets inside strings are no levels."""
    text = nested(MAX_DEPTH)
    assert load_arguments(text, any_required=False) == json.loads(text)
    assert load_arguments(json.loads(text), any_required=False) == json.loads(text)
    wide = {"a": [[] for _ in range(500)], "code": "{[" * 500 + '\\"' * 70, "b": {}}
    assert load_arguments(json.dumps(wide), any_required=False) == wide


@pytest.mark.parametrize("tail", ["", "\\", '"', '"]', "]" * 200])
def test_many_brackets_in_broken_text_are_still_only_broken_text(tail: str) -> None:
    """A long unfinished string of brackets and escaped quotes is judged in linear time as what it is."""
    assert "not valid JSON" in unloadable('{"a": "' + '\\"[{' * 100_000 + tail)


def test_deep_mappings_and_cycles_are_refused() -> None:
    """A mapping nested deeper than 64 levels, or one that holds itself, is refused."""
    deep: dict[str, object] = {}
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    cycle: dict[str, object] = {}
    cycle["me"] = cycle
    loop: list[object] = []
    loop.append(loop)
    deep_list: list[object] = []
    for _ in range(MAX_DEPTH):
        deep_list = [deep_list]
    for value in (deep, cycle, {"a": loop}, {"a": deep_list}, {"a": types.MappingProxyType(deep)}):
        assert "nested too deep" in unloadable(value)


def test_shared_bulk_in_a_mapping_is_counted_where_it_is_met() -> None:
    """A small object that unfolds to billions of entries ends at the size limit."""
    bulk: object = "x" * 1000
    for _ in range(40):
        bulk = [bulk, bulk]
    assert "longer than" in unloadable({"a": bulk})


def test_little_stack_is_a_refusal_for_that_call() -> None:
    """Called where hardly any stack is left, loading refuses the call instead of raising RecursionError."""

    def at_the_edge(raw: object, left: int) -> str:
        return unloadable(raw) if left == 0 else at_the_edge(raw, left - 1)

    def refused_somewhere(raw: object) -> bool:
        depth = len(inspect.stack())
        for left in range(sys.getrecursionlimit() - depth, 0, -1):
            try:
                message = at_the_edge(raw, left)
            except (RecursionError, pytest.fail.Exception):
                continue
            return "nested too deep" in message
        return False

    assert refused_somewhere({"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {}}}}}}}}}}})


def test_a_parser_without_stack_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """RecursionError of the parser itself, whenever a Python raises it, is a refusal of that call."""

    def no_stack(text: str, start: int) -> tuple[object, int]:
        raise RecursionError

    monkeypatch.setattr(loading, "_scan_short", no_stack)
    assert "nested too deep" in unloadable('{"a": 1}')


def test_the_byte_limit_comes_first_and_counts_utf8() -> None:
    """More than 1,000,000 bytes are refused unread; the bytes are those of UTF-8, not characters."""
    frame = len('{"a": ""}')
    fits = '{"a": "' + "x" * (MAX_ARGUMENT_BYTES - frame) + '"}'
    assert load_arguments(fits, any_required=False) == json.loads(fits)
    assert load_arguments(fits.encode(), any_required=False) == json.loads(fits)
    for raw in (fits + " ", (fits + " ").encode(), bytearray((fits + " ").encode()), "[" * 2_000_000):
        assert "longer than 1,000,000 bytes" in unloadable(raw)
    euros = '{"a": "' + "€" * 333_330 + '"}'
    assert len(euros.encode()) <= MAX_ARGUMENT_BYTES
    assert load_arguments(euros, any_required=False) == json.loads(euros)
    assert "longer than" in unloadable('{"a": "' + "€" * 333_331 + '"}')


@pytest.mark.parametrize(
    "mapping",
    [
        {"a": "x" * (MAX_ARGUMENT_BYTES + 1)},
        {"a": "€" * 400_000},
        {"x" * (MAX_ARGUMENT_BYTES + 1): 1},
        {"a": [0] * (MAX_ARGUMENT_BYTES + 1)},
        {"a": ["€" * 200_000, "€" * 200_000]},
        {"a": {str(number): None for number in range(400_000)}},
        {"a": b"x" * (MAX_ARGUMENT_BYTES + 1)},
        {"a": tuple("x" * 1000 for _ in range(1000))},
    ],
    ids=["text", "euros", "name", "list", "euros in a list", "names", "bytes", "tuple"],
)
def test_mappings_have_the_size_limit_too(mapping: dict[str, object]) -> None:
    """What a mapping holds in texts, names, bytes and entries is bounded like JSON text."""
    assert "longer than 1,000,000 bytes" in unloadable(mapping)


@pytest.mark.parametrize(
    "raw",
    [
        '{"a": "\\ud800"}',
        '{"a": "\\uDFFF tail"}',
        '{"a": ["\\ud83d\\u0041"]}',
        '{"\\udc00": 1}',
        '{"a": "\ud800"}',
        '{"a": "é \udfff"}',
        {"a": "\ud800"},
        {"\udc00": 1},
        {"a": ["\ud83d"]},
    ],
)
def test_half_characters_are_refused(raw: object) -> None:
    """A lone surrogate is no character and could be written nowhere later, so it is refused at the door."""
    assert "half of a surrogate pair" in unloadable(raw)


def test_whole_characters_beyond_the_basic_plane_are_read() -> None:
    """Both halves of an escape make a character, and a backslash before \\ud800 makes it plain text."""
    text = '{"a": "\\ud83d\\ude00 \\\\ud800 \\u00e9 😀"}'
    assert load_arguments(text, any_required=False) == {"a": "😀 \\ud800 é 😀"}


@pytest.mark.parametrize("raw", [b"\xff\xfe{}", b'{"a": "\xe9"}', b"\xed\xa0\x80", '{"a": 1}'.encode("utf-16")])
def test_bytes_that_are_not_utf8_are_refused(raw: bytes) -> None:
    """Bytes are read as UTF-8 and nothing else is guessed."""
    assert "UTF-8" in unloadable(raw) or "byte order mark" in unloadable(raw)


def test_utf8_bytes_are_read_like_text() -> None:
    """Bytes and bytearrays of UTF-8 JSON are read; a byte order mark is refused as in text."""
    assert load_arguments('{"a": "é"}'.encode(), any_required=False) == {"a": "é"}
    assert load_arguments(bytearray(b'{"a": true}'), any_required=False) == {"a": True}
    assert load_arguments(b"  ", any_required=False) == {}
    assert "byte order mark" in unloadable(b"\xef\xbb\xbf{}")


def test_a_text_of_a_subclass_is_text() -> None:
    """A str of somebody's own class is read like any other."""

    class Text(str):
        __slots__ = ()

    assert checker(city).check(Text('{"city": "Oslo"}')) == {"city": "Oslo"}


@pytest.mark.parametrize("name", [1, None, 1.5, ("a",), b"a"])
def test_names_of_a_mapping_are_text(name: object) -> None:
    """A mapping with a name that is no text, at any level, is refused."""
    for mapping in ({name: 1}, {"a": {name: 1}}, {"a": [{name: 1}]}):
        assert "name that is not text" in unloadable(mapping)


class Odd(Mapping[str, object]):
    """A mapping of somebody's own, in working order or not."""

    def __init__(self, data: dict[str, object], error: Exception | None = None) -> None:
        self.data = data
        self.error = error

    def __getitem__(self, name: str) -> object:
        if self.error:
            raise self.error
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def test_mappings_of_other_classes_are_read_or_refused() -> None:
    """Any Mapping is read, at any level; one that fails while it is read is a refusal without the text of its error."""
    odd = Odd({"city": "Oslo"})
    assert checker(city).check(odd) == {"city": "Oslo"}
    inner = load_arguments({"a": odd, "b": collections.OrderedDict(c=[1])}, any_required=False)
    assert inner == {"a": {"city": "Oslo"}, "b": {"c": [1]}}
    assert type(inner["a"]) is dict
    for error in (ValueError(CANARY), KeyError(CANARY), RecursionError()):
        message = unloadable(Odd({"city": "Oslo"}, error))
        assert "could not be read" in message or "nested too deep" in message
        assert CANARY not in message


def test_the_given_mapping_is_never_shared() -> None:
    """What a handler gets is fresh: changing it changes nothing of what the caller still holds."""

    def take(anything: Any, listed: list, named: dict, pair: tuple) -> None: ...  # type: ignore[type-arg]

    given_: dict[str, object] = {
        "anything": {"a": [1, {"b": 2}]},
        "listed": [[1]],
        "named": {"x": [1]},
        "pair": ([1], 2),
    }
    before = copy.deepcopy(given_)
    for subject in (checker(take), checker_from_schema({})):
        got: Any = subject.check(given_)
        got["anything"]["a"][1]["b"] = "changed"
        got["anything"]["a"].append("changed")
        got["listed"][0].append("changed")
        got["named"]["x"].append("changed")
        got["pair"][0].append("changed")
        got["new"] = 1
        assert given_ == before


def test_python_objects_of_a_native_call_are_passed_on() -> None:
    """A native call may hold Python objects that the signature accepts: dates, paths, models."""
    moment = dt.datetime(2026, 1, 31, tzinfo=dt.UTC)

    def take(when: dt.datetime, raw: bytes, amount: decimal.Decimal, tags: set[str], none: None = None) -> None: ...

    given_ = {"when": moment, "raw": b"x", "amount": decimal.Decimal("1.5"), "tags": {"a"}, "none": None}
    assert checker(take).check(given_) == given_


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), json_values, max_size=5)


@given(json_objects, st.booleans(), st.sampled_from([None, 1]), st.sampled_from(["", " ", "\n\t\r "]))
@settings(max_examples=200)
def test_what_is_accepted_is_what_json_says(
    value: dict[str, object], ascii_: bool, indent: int | None, pad: str
) -> None:
    """Duplicate-free, finite JSON within the limits is read exactly as the standard library reads it."""
    text = pad + json.dumps(value, ensure_ascii=ascii_, indent=indent) + pad
    got = load_arguments(text, any_required=False)
    assert got == json.loads(text)
    assert json.dumps(got) == json.dumps(json.loads(text)), "true is not 1, and 1.0 is not 1"
    assert load_arguments(text.encode(), any_required=False) == got
    again = load_arguments(value, any_required=False)
    assert json.dumps(again) == json.dumps(value)


def everything(number: int = 0, text: str = "", flag: bool = False, listed: list[int] = [], **more: Any) -> None:  # noqa: B006
    """Takes whatever comes."""


EVERY_SCHEMA: dict[str, object] = {
    "properties": {
        "number": {"type": "integer"},
        "listed": {"type": "array", "items": {"$ref": "#/$defs/thing"}},
        "thing": {"$ref": "#/$defs/thing"},
    },
    "additionalProperties": {"type": ["object", "string", "null"]},
    "$defs": {
        "thing": {
            "anyOf": [
                {"type": "object", "properties": {"a": {"$ref": "#/$defs/thing"}}, "additionalProperties": False},
                {"type": "integer"},
                {"type": "null"},
            ]
        }
    },
}
SUBJECTS = [checker(everything), checker(nothing), checker(city), checker_from_schema(EVERY_SCHEMA)]

broken_texts = (
    st.text(max_size=30)
    | st.text(alphabet='{}[]",:\\ ntrue0129.eE-+\ud800\ufeff\x00u', max_size=40)
    | st.builds(lambda value, cut: json.dumps(value)[:cut], json_objects, st.integers(0, 60))
    | st.builds(
        lambda value, at, junk: json.dumps(value)[:at] + junk + json.dumps(value)[at:],
        json_objects,
        st.integers(0, 40),
        st.text(max_size=3),
    )
)
# What a key can be found at: bytes, texts of all kinds, values of all kinds, and mappings of the worst kinds.
raws = (
    broken_texts
    | st.binary(max_size=40)
    | json_values
    | json_objects
    | st.dictionaries(st.text(max_size=4) | st.integers() | st.none(), st.floats() | st.text(max_size=4), max_size=3)
    | st.builds(lambda value: json.dumps(value), json_values)
    | st.dates()
    | st.just({"number": object(), "thing": {1}})
)


@given(raws)
@settings(max_examples=400)
@example("{" * 1000)
@example('{"number": 1' + "0" * 5000 + "}")
@example('{"thing": {"a": {"a": {"b": 1}}}}')
@example({"listed": [dt.date(2026, 1, 1)]})
def test_nothing_but_a_refusal_is_ever_raised(raw: object) -> None:
    """P-73: any text, bytes or value gives a fresh dict or an ArgumentsRefused with a message; nothing else."""
    for subject in SUBJECTS:
        answer = outcome(subject, raw)
        if not isinstance(answer, str):
            assert type(answer) is dict
            assert answer is not raw
            assert all(type(name) is str for name in answer)


def planted(value: object) -> object:
    """The same value with the canary in every text, name and number."""
    if isinstance(value, dict):
        return {f"{name}{CANARY}": planted(part) for name, part in value.items()}
    if isinstance(value, list):
        return [planted(part) for part in value]
    return f"{value}{CANARY}"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["a", "b"]
    amount: int = Field(gt=3)
    when: dt.date | None = None
    table: dict[str, int] = {}
    names: list[Annotated[str, Field(pattern="^x+$")]] = []

    @field_validator("kind", mode="before")
    @classmethod
    def own(cls, value: object) -> object:
        if value == "raise":
            raise ValueError(f"bad {value} {CANARY}")
        return value


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool


class Shade(enum.Enum):
    DARK = "dark"


def guarded_tool(
    inner: Inner,
    pet: Annotated[Cat | Dog, Field(discriminator="kind")],
    either: Cat | Dog | list[int] | None = None,
    shade: Shade = Shade.DARK,
    scores: dict[str, int] = {},  # noqa: B006
    pairs: list[tuple[int, str]] = [],  # noqa: B006
) -> None: ...


STRICT_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "const": {"const": 5},
        "inner": {
            "type": "object",
            "properties": {"when": {"type": "string", "pattern": "^x+$"}},
            "required": ["when"],
            "patternProperties": {"^q": {"type": "integer"}},
            "additionalProperties": False,
        },
        "pairs": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"maximum": 3}},
        "scores": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        "names": {"type": "array", "uniqueItems": True, "contains": {"const": 1}},
        "either": {"oneOf": [{"type": "object", "required": ["x"]}, {"type": "array", "items": {"type": "integer"}}]},
        "odd": {"not": {"type": "string"}},
        "never": False,
    },
    "additionalProperties": False,
    "required": ["kind"],
}

SECRET_VALUES: list[dict[str, object]] = [
    {"inner": CANARY, "pet": CANARY},
    {CANARY: CANARY, "inner": {}, "pet": {}},
    {"inner": {"kind": CANARY, "amount": CANARY, CANARY: 1, "when": CANARY, "table": {CANARY: CANARY}}, "pet": {}},
    {"inner": {"kind": "raise", "amount": 1, "names": [CANARY]}, "pet": {"kind": CANARY}},
    {"inner": {"kind": "a", "amount": 5, "table": {CANARY: 1.5}}, "pet": {"kind": "cat", "lives": CANARY}},
    {"inner": {"kind": ["a", {CANARY: 1}]}, "pet": {"kind": "dog", CANARY: 1}, "either": {CANARY: 1}},
    {"either": [CANARY], "shade": CANARY, "scores": {CANARY: CANARY}, "pairs": [[CANARY], [1, 2, CANARY], {CANARY: 1}]},
    {"kind": CANARY, "const": CANARY, "inner": {CANARY: CANARY, "when": CANARY, f"q{CANARY}": CANARY}, "never": CANARY},
    {"pairs": [CANARY, 5, 9], "scores": {CANARY: CANARY, "b": 1, "c": 2}, "names": [CANARY, CANARY], "odd": CANARY},
    {"kind": "a", "either": {CANARY: CANARY}, "inner": {"when": "x", CANARY: 1}},
    {"kind": "a", "either": CANARY, "names": {CANARY: CANARY}},
]


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_g8_no_value_and_no_made_up_name_is_in_a_refusal(value: dict[str, object]) -> None:
    """G8: values, names that are not in the schema and texts of validators are not in the message of a refusal."""
    for subject in (checker(guarded_tool), checker_from_schema(STRICT_SCHEMA), checker(nothing)):
        for raw in (value, json.dumps(value), json.dumps(value).encode(), json.dumps(value)[:-1], {"a": {1: CANARY}}):
            assert CANARY not in refusal(subject, raw)


@given(json_objects, broken_texts)
@settings(max_examples=40)
def test_g8_a_canary_in_any_place_is_never_told(value: dict[str, object], text: str) -> None:
    """G8: whatever is wrong, and wherever the secret stands, the refusal does not repeat it."""
    secret = planted(value)
    assert isinstance(secret, dict)
    raws = [
        secret,
        json.dumps(secret),
        {**secret, "inner": secret, "pet": secret, "kind": secret, "either": [secret], "pairs": [[secret]]},
        json.dumps(secret)[:-1],
        f"{text}{CANARY}",
        f"{CANARY}{text}",
        f'{{"{CANARY}": {text}',
        [secret],
    ]
    for subject in (checker(guarded_tool), checker_from_schema(STRICT_SCHEMA)):
        for raw in raws:
            answer = outcome(subject, raw)
            assert isinstance(answer, dict) or CANARY not in answer


def test_a_message_is_short() -> None:
    """A refusal is cut at 1,000 characters, and names in it at 64, however long those of the schema are."""
    assert len(ArgumentsRefused("x" * 5000).message) == 1000
    assert ArgumentsRefused("x" * 5000).message.endswith(" ...")
    long = {name * 300: {"type": "object", "properties": {"i" * 300: {"type": "integer"}}} for name in "abcdefg"}
    subject = checker_from_schema({"properties": long, "required": list(long)})
    assert len(refusal(subject, "{}")) <= 1000
    assert len(refusal(subject, "")) <= 1000
    message = refusal(subject, {name: {"i" * 300: "x"} for name in long})
    assert f"'{'a' * 64}....iii" in message
    assert "a" * 65 not in message


# --- the first look ---------------------------------------------------------------------------------------


def plain_tool(
    name: str,
    count: int = 1,
    ratio: float = 0.5,
    on: bool = False,
    note: str | None = None,
    either: int | str = 0,
    amount: Optional[float] = None,  # noqa: UP045  # both ways to write it
    mixed: bool | int | float | None = None,
    nothing: None = None,
) -> None:
    """Every parameter is plain, alone or in a union."""


def mixed_tool(name: str, size: Literal["s", "m"] = "s", tags: list[str] = [], **rest: int) -> None:  # noqa: B006
    """No first look at the types: some parameters are not plain."""


FLAT_SCHEMA = {"properties": {"name": {"type": "string"}, "count": {"type": "integer", "default": 3}, "x": {}}}
NAMES = [*inspect.signature(plain_tool).parameters, "size", "tags", "x", "é", "n" * 5000, "\ud800"]
EDGES = [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**4300, math.inf, -math.inf, math.nan, -0.0, 1e308]
TEXTS = ["", "5", "true", "é", "\ud800", "x" * 4096, "x" * 4097, "s", "1.5"]
FLAT_VALUES = st.one_of(
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([*EDGES, *TEXTS]),
    st.sampled_from([[], ["a"], {}, {"a": True}, (), b"b", decimal.Decimal(1), object]),
)


def said(found: dict[str, object] | str) -> object:
    """An outcome so that 1, 1.0 and True, -0.0 and 0.0, and other orders of names are told apart."""
    return found if isinstance(found, str) else [(name, type(value), repr(value)) for name, value in found.items()]


def load_or_refuse(raw: object) -> dict[str, object] | str:
    """The loaded arguments, or the message of the refusal."""
    try:
        return load_arguments(raw, any_required=False)
    except ArgumentsRefused as refused:
        return told(refused)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), FLAT_VALUES, max_size=6))
@example({"name": "Ada"})
@example({"count": 2, "name": "Ada"})
@example({"name": "Ada", "count": True})
@example({"name": "Ada", "ratio": 1})
@example({"name": "Ada", "either": True})
@example({"name": "Ada", "mixed": 1.0, "nothing": None})
@example({"name": "x" * 4096, "count": 2**63 - 1, "ratio": -0.0, "on": True})
@example({"name": "x" * 4097})
@example({"name": "\ud800"})
@example({"name": "Ada", "ratio": math.nan})
@example({"name": "Ada", "ratio": -math.inf})
@example({"name": "Ada", "x": math.inf})
@example({"name": "Ada", "count": 2**63})
@example({"name": "Ada", "count": 10**4300})
@example({f"n{index}": index for index in range(33)})
def test_the_first_look_and_the_general_way_agree(given_arguments: dict[str, object]) -> None:
    """R-117: whichever way a dict is taken, the outcome is the same: values, their types and order, and refusals.

    Any other mapping goes the general way, so a read-only view of the same dict tells what that answers.
    """
    for subject in (checker(plain_tool), checker(mixed_tool), checker_from_schema(FLAT_SCHEMA)):
        general = outcome(subject, types.MappingProxyType(given_arguments))
        assert said(outcome(subject, given_arguments)) == said(general)
    read_only = types.MappingProxyType(given_arguments)
    assert said(load_or_refuse(given_arguments)) == said(load_or_refuse(read_only))


def test_what_is_plain_is_taken_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: neither the loader nor pydantic is asked about a few short values of exactly the right types."""
    subject = checker(plain_tool)

    def fail(*_: object) -> None:
        raise AssertionError("the general way was taken")

    monkeypatch.setattr(signatures, "load", fail)
    monkeypatch.setattr(loading, "copied", fail)
    found = subject.check({"count": 2, "name": "Ada"})
    assert list(found.items())[:4] == [("name", "Ada"), ("count", 2), ("ratio", 0.5), ("on", False)]
    assert checker_from_schema(FLAT_SCHEMA).check({"name": "Ada"}) == {"name": "Ada", "count": 3}
    with pytest.raises(AssertionError, match="the general way"):
        subject.check({"name": "Ada", "ratio": 1})


def test_what_is_taken_at_the_first_look_is_fresh() -> None:
    """G8: a handler that changes its arguments changes neither what was handed in nor the next call's defaults."""
    for subject in (checker(plain_tool), checker_from_schema(FLAT_SCHEMA)):
        raw: dict[str, object] = {"name": "Ada"}
        first = subject.check(raw)
        whole = list(first.items())
        first.clear()
        assert raw == {"name": "Ada"}
        assert list(subject.check(raw).items()) == whole


def test_a_first_look_asks_no_key_and_no_value_of_a_strangers_type() -> None:
    """G1: keys and types that lie about equality, or fail when they are compared, are refused like any other."""

    class Posing:
        def __hash__(self) -> int:
            return hash("name")

        def __eq__(self, other: object) -> bool:
            return True

    class Failing(type):
        def __hash__(cls) -> int:
            raise ZeroDivisionError

        def __eq__(cls, other: object) -> bool:
            raise ZeroDivisionError

    class Odd(metaclass=Failing):
        pass

    for subject in (checker(plain_tool), checker_from_schema(FLAT_SCHEMA)):
        assert "a name that is not text" in refusal(subject, {Posing(): "Ada"})
        assert isinstance(outcome(subject, {"name": Odd()}), str)


@pytest.mark.parametrize("default", [[], decimal.Decimal(1), "é"])
def test_only_plain_defaults_are_handed_on_as_they_are(default: object) -> None:
    """R-117: a default that a handler could change is pydantic's to copy; each call gets one of its own."""

    def tool(name: str, rest: str = default) -> None:  # type: ignore[assignment]
        pass

    subject = checker(tool)
    first, second = subject.check({"name": "Ada"}), subject.check({"name": "Ada"})
    assert first == second == {"name": "Ada", "rest": default}
    assert not isinstance(default, list) or first["rest"] is not second["rest"]


# --- signatures -------------------------------------------------------------------------------------------


def test_lax_mode_takes_what_models_write() -> None:
    """Text that is a number, a date, an enum value or a duration becomes what the signature says."""

    class Color(enum.StrEnum):
        RED = "red"

    def take(number: int, real: float, flag: bool, day: dt.date, color: Color, amount: decimal.Decimal) -> None: ...

    raw = '{"number": "5", "real": "1.5", "flag": "true", "day": "2026-01-31", "color": "red", "amount": 1.5}'
    assert checker(take).check(raw) == {
        "number": 5,
        "real": 1.5,
        "flag": True,
        "day": dt.date(2026, 1, 31),
        "color": Color.RED,
        "amount": decimal.Decimal("1.5"),
    }


NUMBER_TYPES: list[Any] = [
    int,
    float,
    complex,
    dt.timedelta,
    Annotated[int, Field(ge=0)],
    Annotated[float, Field(description="x"), Field(le=5)],
    int | None,
    Optional[float],  # noqa: UP045
    int | str,
]


@pytest.mark.parametrize("annotation", NUMBER_TYPES, ids=repr)
@pytest.mark.parametrize("shape", [lambda t: t, lambda t: list[t], lambda t: dict[str, t], lambda t: tuple[t, ...]])
@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_no_numbers(annotation: Any, shape: Callable[[Any], Any], value: bool) -> None:
    """A bool is refused wherever the signature says a number, alone or in containers, from text and from a mapping."""

    def take(x: Any) -> None: ...

    take.__annotations__["x"] = shape(annotation)
    origin = getattr(shape(annotation), "__origin__", None)
    given_: object = value
    if shape(annotation) is not annotation:
        given_ = {"k": value} if origin is dict else [value]
    subject = checker(take)
    assert "'x" in refusal(subject, {"x": given_})
    assert "'x" in refusal(subject, json.dumps({"x": given_}))


@pytest.mark.parametrize(
    "annotation", [int, float, Annotated[int, Field(ge=0)], int | None, int | str, bool | int, Any]
)
@pytest.mark.parametrize("value", [0, 5, "5", 5.0, "x", None, 1.5, "true", [], {}])
def test_the_guard_against_bools_changes_nothing_else(annotation: Any, value: object) -> None:
    """With or without a bool elsewhere in the call, every other value gives the same result or refusal."""

    def take(x: Any, other: Any = 0) -> None: ...

    take.__annotations__["x"] = annotation
    subject = checker(take)

    plain, careful = (outcome(subject, json.dumps({"x": value, "other": other})) for other in (1, True))
    if isinstance(plain, dict) and isinstance(careful, dict):
        assert (type(plain["x"]), plain["x"]) == (type(careful["x"]), careful["x"])
    else:
        assert plain == careful


def test_bools_are_bools_where_they_may_be() -> None:
    """bool, bool | int, Any and models keep true and false as their authors say."""

    class Own(BaseModel):
        n: int

    def take(a: bool, b: bool | int, c: Any, d: list[Any], own: Own, e: dict[str, bool] = {}) -> None: ...  # noqa: B006

    got = checker(take).check('{"a": true, "b": false, "c": true, "d": [true], "own": {"n": true}, "e": {"x": false}}')
    assert (got["a"], got["b"], got["c"], got["d"], got["own"]) == (True, False, True, [True], Own(n=1))
    assert got["b"] is False
    assert "'a' must be true or false" in refusal(checker(take), '{"a": 5}')


def test_strict_types_take_dates_and_members_from_json() -> None:
    """Strict fields refuse text for a date in Python values but not in JSON: arguments are JSON, in any form."""

    class Sort(enum.Enum):
        UP = "up"

    class Own(BaseModel):
        model_config = ConfigDict(strict=True)
        when: dt.datetime
        sort: Sort
        pair: tuple[int, int]

    def take(own: Own, day: Annotated[dt.date, Strict()], number: Annotated[int, Strict()] = 0) -> None: ...

    raw = {"own": {"when": "2026-01-31T00:00:00Z", "sort": "up", "pair": [1, 2]}, "day": "2026-01-31"}
    for form in (raw, json.dumps(raw)):
        got = checker(take).check(form)  # type: ignore[arg-type]
        assert got["own"] == Own(when=dt.datetime(2026, 1, 31, tzinfo=dt.UTC), sort=Sort.UP, pair=(1, 2))
        assert got["day"] == dt.date(2026, 1, 31)
    assert "'number' must be a whole number" in refusal(checker(take), {**raw, "number": "5"})


def test_defaults_are_filled_in_fresh_for_each_call() -> None:
    """Defaults are there for the access templates, and a mutable one is a copy of its own each time."""
    limits = {"a": [1]}

    def take(a: int, b: str = "x", c: list[int] = [], d: dict = limits, e: Any = None, f=7) -> None: ...  # type: ignore  # noqa: B006, PGH003

    subject = checker(take)
    first: Any = subject.check('{"a": 1}')
    assert first == {"a": 1, "b": "x", "c": [], "d": {"a": [1]}, "e": None, "f": 7}
    first["c"].append(1)
    first["d"]["a"].append(2)
    assert subject.check('{"a": 1}') == {"a": 1, "b": "x", "c": [], "d": {"a": [1]}, "e": None, "f": 7}
    assert limits == {"a": [1]}
    assert subject.names == {"a", "b", "c", "d", "e", "f"}
    assert subject.required == {"a"}


def test_field_defaults_of_pydantic_are_read() -> None:
    """A parameter may be declared with pydantic's Field as its default: bounds, factory, alias, description."""

    def take(
        a: int = Field(ge=1, description="how many"),
        b: list[int] = Field(default_factory=list),  # noqa: B008
        c: str = Field("x", alias="theC"),
    ) -> None: ...

    subject = checker(take)
    assert subject.required == {"a"}
    assert subject.names == {"a", "b", "c"}
    assert subject.check('{"a": 2, "theC": "y"}') == {"a": 2, "b": [], "c": "y"}
    assert "'a' must be a whole number, at least 1" in refusal(subject, '{"a": 0}')
    assert "'theC' must be text" in refusal(subject, '{"a": 1, "theC": 5}')
    assert subject.schema["properties"]["a"]["description"] == "how many"  # type: ignore[index]


def test_unknown_arguments_are_refused_with_near_names() -> None:
    """A name that the signature does not have is refused; near known names are told, the unknown one is not."""

    def read_customer(customer_id: int, include_orders: bool = False) -> None: ...

    message = refusal(read_customer, '{"customerID": 5}')
    assert "argument 'customer_id' is required (a whole number)" in message
    assert "the object has a name that is not in its schema (did you mean 'customer_id'?)" in message
    assert "the known ones are 'customer_id', 'include_orders'" in message
    assert "customerID" not in message
    two = refusal(read_customer, '{"customer_id": 5, "zzz": 1, "orders": 2}')
    assert "2 names that are not in its schema (did you mean 'include_orders'?)" in two
    assert refusal(nothing, '{"zzz": 1}').count("it has none") == 1


def test_keyword_parameters_let_further_names_pass() -> None:
    """With **kwargs further names pass, checked against its annotation where there is one."""

    def free(a: int, **more) -> None: ...  # type: ignore[no-untyped-def]

    def typed(a: int, **more: int) -> None: ...

    assert checker(free).check('{"a": 1, "x": {"y": 1}}') == {"a": 1, "x": {"y": 1}}
    assert checker(typed).check('{"a": 1, "x": "5"}') == {"a": 1, "x": 5}
    assert checker(typed).names == {"a"}
    assert "argument '*' must be a whole number" in refusal(typed, '{"a": 1, "secret": "z"}')
    assert "argument '*' must be a whole number" in refusal(typed, '{"a": 1, "secret": true}')


class Service:
    """Answers."""

    def method(self, x: int, ctx: Context) -> int:
        """A method."""
        return x

    @classmethod
    def of_class(cls, x: int) -> int:
        """A class method."""
        return x

    @staticmethod
    def static(x: int) -> int:
        """A static method."""
        return x

    def __call__(self, x: int, *, y: Shade = Shade.DARK) -> int:
        """A call."""
        return x


class Quiet:
    """What the class says."""

    def __call__(self, x: int) -> int:
        return x


@dataclasses.dataclass
class Made:
    """A class is a callable too."""

    x: int


def decorated(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return wrapper


def base(x: int, secret: str = "", y: int = 2) -> int:
    """A function."""
    return x


@pytest.mark.parametrize(
    ("handler", "described"),
    [
        (Service().method, "A method."),
        (Service.of_class, "A class method."),
        (Service.static, "A static method."),
        (Service(), "A call."),
        (Quiet(), "What the class says."),
        (Made, "A class is a callable too."),
        (decorated(base), "A function."),
        (functools.partial(base, secret=CANARY), "A function."),
        (functools.partial(functools.partial(base, secret="a"), y=5), "A function."),
        (functools.partial(Service(), y=Shade.DARK), "A call."),
        (functools.partial(decorated(base), secret="a"), "A function."),
        (lambda x: x, ""),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_every_kind_of_callable_has_its_signature_read(handler: Callable[..., object], described: str) -> None:
    """Methods, partials, callable objects, classes and decorated functions work like functions, docstring included."""
    context = context_parameter_of(handler, Context)
    subject = checker(handler, context)
    got = subject.check('{"x": "4"}')
    assert got["x"] in (4, "4")
    assert "ctx" not in subject.names
    assert CANARY not in json.dumps(subject.schema)
    assert "secret" not in subject.names or handler is not base
    assert description_of(handler) == described
    handler(**got, **({context: Context()} if context else {}))


def test_what_a_partial_binds_is_fixed() -> None:
    """An argument bound by keyword is not the model's: it is in no schema, and giving it is refused."""
    subject = checker(functools.partial(base, secret=CANARY))
    assert subject.names == {"x", "y"}
    assert subject.check('{"x": 1}') == {"x": 1, "y": 2}
    assert CANARY not in json.dumps(subject.schema)
    assert "not in its schema" in refusal(subject, '{"x": 1, "secret": "mine"}')
    assert checker(functools.partial(base, 1)).names == {"secret", "y"}


def test_the_context_parameter_is_left_out() -> None:
    """The parameter for the Context is in no schema, is not filled in, and cannot be given by the model."""

    def plain(x: int, ctx: Context) -> None: ...

    def optional(ctx: Context | None = None, *, x: int) -> None: ...

    def annotated(x: int, ctx: Annotated[Context, "the context"]) -> None: ...

    class Special(Context): ...

    def subclass(x: int, ctx: Special) -> None: ...

    for function in (plain, optional, annotated, subclass):
        assert context_parameter_of(function, Context) == "ctx"
        subject = checker(function, "ctx")
        assert subject.names == {"x"}
        assert list(subject.schema["properties"]) == ["x"]  # type: ignore[call-overload]
        assert subject.check('{"x": 1}') == {"x": 1}
        assert "not in its schema" in refusal(subject, '{"x": 1, "ctx": {}}')


def test_functions_without_a_context_have_none() -> None:
    """Other annotations, none at all, ones that cannot be resolved and built-ins are not the Context."""

    def take(a, b: int, c: list[Context], d: OnlyForTypes, *rest: Context, **more: Context) -> None: ...  # type: ignore[no-untyped-def]

    class Holds(Generic[TypeVar("T")]): ...  # type: ignore[misc]

    def generic(ctx: Holds[int]) -> None: ...

    assert context_parameter_of(take, Context) is None
    assert context_parameter_of(generic, Holds) == "ctx"
    assert context_parameter_of(dict, Context) is None
    assert context_parameter_of(nothing, Context) is None


def test_two_contexts_are_a_mistake() -> None:
    """Two parameters of the Context type are refused at registration, naming both."""

    def take(a: Context, b: Context) -> None: ...

    with pytest.raises(PolicyError, match=r"'a', 'b' are all Context: keep one"):
        context_parameter_of(take, Context)


def test_names_of_enclosing_functions_are_resolved() -> None:
    """String annotations may name classes that are local to running functions, or kept in a closure."""

    class Inner(BaseModel):  # shadows the module's Inner on purpose
        deep: int

    def inside() -> Checker:
        class Own(enum.Enum):
            A = "a"

        def take(inner: Inner, own: Own, many: list[Own]) -> None: ...

        return checker(take)

    def make() -> Callable[..., object]:
        class Own(enum.Enum):
            A = "a"

        def take(inner: Inner, own: Own) -> object:
            return Own, later

        return take

    got = inside().check('{"inner": {"deep": 1}, "own": "a", "many": ["a"]}')
    assert got["inner"] == Inner(deep=1)
    # make() has returned: what its function refers to is left of its locals. `later` has no value yet.
    assert checker(make()).check('{"inner": {"deep": 1}, "own": "a"}')["inner"] == Inner(deep=1)
    later = True


def test_p73_annotations_that_cannot_be_resolved_are_named() -> None:
    """A type that exists only for type checkers is refused at registration with parameter, name and fix."""

    def take(a: int, b: OnlyForTypes) -> None: ...

    with pytest.raises(PolicyError, match=r"take'.*parameter 'b'.*OnlyForTypes.*TYPE_CHECKING"):
        checker(take)


def positional(a: int, b: int, /, c: int) -> None: ...


def starred(a: int, *rest: int) -> None: ...


class Options(TypedDict, total=False):
    depth: int


def unpacking(a: int, **more: Unpack[Options]) -> None: ...


def with_file(a: int, stream: threading.Lock) -> None: ...


def with_callback(done: Callable[[int], str]) -> None: ...


def with_nonsense(a: "not a type at all", b: int) -> None: ...  # noqa: F722


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (positional, ["'positional'", "'a'", "positional-only", "remove the '/'"]),
        (starred, ["'starred'", "'rest'", "without a name", "one list parameter"]),
        (unpacking, ["'unpacking'", "'more'", "unpacks a TypedDict", "keyword parameters"]),
        (with_file, ["'with_file'", "'stream'", "cannot be read from JSON", "schema="]),
        (with_callback, ["'with_callback'", "'done'", "cannot be read from JSON"]),
        (with_nonsense, ["'with_nonsense'", "'a'", "cannot be resolved"]),
        (dict, ["'dict'", "signature cannot be read", "schema="]),
    ],
)
def test_a_parameter_that_cannot_be_given_is_a_policy_error(function: Callable[..., object], words: list[str]) -> None:
    """What the model cannot give is refused at registration, naming function, parameter and the fix."""
    with pytest.raises(PolicyError) as caught:
        checker(function)
    for word in words:
        assert word in str(caught.value)


def test_a_positional_only_context_is_refused_too() -> None:
    """The context is handed over by name as well."""

    def take(ctx: Context, /, x: int) -> None: ...

    with pytest.raises(PolicyError, match="positional-only"):
        checker(take, "ctx")


def test_a_signature_that_fails_as_a_whole_is_a_policy_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each parameter is fine alone but pydantic refuses all together, the function is still named."""

    def take(a: int) -> None: ...

    def fail(root: object) -> int:
        raise TypeError("cannot be put together")

    monkeypatch.setattr(signatures, "depth_limit", fail)
    with pytest.raises(PolicyError, match=r"take': TypeError: cannot be put together"):
        checker(take)


def test_many_kinds_of_types_are_read() -> None:
    """Models, dataclasses, named tuples, typed dicts, literals and unions come out as their own types."""

    @dataclasses.dataclass
    class Point:
        x: float
        y: float = 0.0

    class Pair(NamedTuple):
        a: int
        b: int

    class Config(TypedDict):
        name: str

    def take(
        point: Point,
        pair: Pair,
        config: Config,
        mode: Literal["r", "w"],
        either: int | str,
        maybe: Optional[int] = None,  # noqa: UP045
    ) -> None: ...

    raw = '{"point": {"x": 1}, "pair": [1, 2], "config": {"name": "n"}, "mode": "r", "either": "5"}'
    assert checker(take).check(raw) == {
        "point": Point(1.0),
        "pair": Pair(1, 2),
        "config": {"name": "n"},
        "mode": "r",
        "either": "5",
        "maybe": None,
    }


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"inner": {"kind": "c", "amount": 5}}, """argument 'inner.kind' must be one of "a", "b\""""),
        ({"inner": {"kind": "a", "amount": 1}}, "argument 'inner.amount' must be a whole number, above 3"),
        ({"inner": {"kind": "a"}}, "argument 'inner.amount' is required (a whole number, above 3)"),
        ({"inner": {"kind": "a", "amount": 4, "when": "x"}}, "'inner.when' must be text, in the format date"),
        (
            {"inner": {"kind": "a", "amount": 4, "names": ["x", "y"]}},
            "'inner.names[1]' must be text, matching the pattern",
        ),
        ({"inner": {"kind": "a", "amount": 4, "table": {"q": "z"}}}, "'inner.table.*' must be a whole number"),
        ({"inner": {"kind": "a", "amount": 4, "kinds": 1}}, "argument 'inner' has a name that is not in its schema"),
        ({"inner": {"kind": "raise", "amount": 4}}, "argument 'inner.kind' is refused by the tool's own check (one of"),
        ({"inner": 5}, "argument 'inner' must be an object with 'kind', 'amount'"),
        ({"pet": {"kind": "cat"}}, "argument 'pet.lives' is required (a whole number)"),
        ({"pet": {"kind": "cow"}}, "argument 'pet' must be an object with 'kind', 'lives' or an object with"),
        ({"either": {"kind": "cat", "lives": "x"}}, "argument 'either.lives' must be a whole number"),
        ({"shade": "light"}, """argument 'shade' must be "dark\""""),
        ({"scores": []}, "argument 'scores' must be an object"),
        ({"pairs": [[1, "a"], [1]]}, "argument 'pairs[1][1]' is required (text)"),
        ({"pairs": [["x", "a"]]}, "argument 'pairs[0][0]' must be a whole number"),
        ({"pairs": "x"}, "argument 'pairs' must be a list, each entry a list"),
    ],
)
def test_a_refusal_names_the_place_and_what_it_must_be(raw: dict[str, object], said: str) -> None:
    """The model is told which argument, where inside it, and what it must be there."""
    whole = {"inner": {"kind": "a", "amount": 5}, "pet": {"kind": "dog", "barks": True}, **raw}
    for form in (whole, json.dumps(whole)):
        assert said in refusal(checker(guarded_tool), form)


def test_at_most_five_problems_are_told() -> None:
    """Five problems are told one by one, then how many more there are."""

    def take(a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None: ...

    message = refusal(take, '{"a": "x", "b": "x"}')
    assert message.count("argument '") == 5
    assert "; and 2 more. Nothing was run; correct them and call again." in message


def test_a_long_list_of_mistakes_is_not_told_one_by_one() -> None:
    """A list of 100,000 wrong entries gives a short refusal that names the first places."""

    def take(numbers: list[int], names: list[str] = []) -> None: ...  # noqa: B006

    message = refusal(take, {"numbers": ["x"] * 100_000})
    assert "'numbers[0]' must be a whole number; argument 'numbers[1]'" in message
    assert "and many more" in message
    schema = checker_from_schema({"properties": {"numbers": {"items": {"type": "integer"}}}})
    message = refusal(schema, {"numbers": ["x"] * 100_000})
    assert "'numbers[0]' must be a whole number" in message
    assert "and many more" in message

    def fussy(value: object) -> object:
        """Raises what pydantic does not expect, for short lists only."""
        assert isinstance(value, list)
        if len(value) < 10:
            raise ZeroDivisionError(CANARY)
        return value

    def careful(numbers: Annotated[list[int], BeforeValidator(fussy)]) -> None: ...

    assert "'numbers[0]' must be a whole number" in refusal(careful, {"numbers": ["x"] * 200})
    late = refusal(take, {"numbers": [1] * 5 + ["x"] * 200})
    assert "'numbers[5]' must be a whole number" in late


def test_problems_of_an_unknown_kind_are_told_plainly() -> None:
    """An own error type, an own exception and an own refusal are told by place and type name, never by their text."""

    def own_type(value: object) -> object:
        raise PydanticCustomError("own_type", f"no {CANARY}")

    def broken(value: object) -> object:
        raise ZeroDivisionError(CANARY)

    def typed(
        x: Annotated[int, BeforeValidator(own_type)], y: Annotated[Any, BeforeValidator(own_type)] = 0
    ) -> None: ...

    def failing(x: Annotated[int, BeforeValidator(broken)]) -> None: ...

    class Nothing(BaseModel):
        @field_validator("*")
        @classmethod
        def no(cls, value: object) -> object:
            raise ValueError(CANARY)

        free: Any

    def modelled(x: Nothing) -> None: ...

    assert "argument 'x' is refused by the tool's own check (a whole number)" in refusal(typed, '{"x": 1}')
    assert "argument 'y' is refused by the tool's own check." in refusal(typed, '{"x": 1, "y": 1}') + "."
    assert (
        refusal(failing, '{"x": 1}')
        == "The tool's own check of its arguments failed (ZeroDivisionError). Nothing was run."
    )
    assert "argument 'x.free' is refused by the tool's own check" in refusal(modelled, '{"x": {"free": 1}}')
    for function in (typed, failing, modelled):
        assert CANARY not in refusal(function, json.dumps({"x": {"free": CANARY}}))


class Add(BaseModel):
    op: Literal["+"]
    left: Add | Sub | int
    right: Add | Sub | int


class Sub(BaseModel):
    op: Literal["-"]
    left: Add | Sub | int
    right: Add | Sub | int


class AddTold(BaseModel):
    op: Literal["+"]
    left: Annotated[AddTold | SubTold, Field(discriminator="op")] | int


class SubTold(BaseModel):
    op: Literal["-"]
    left: Annotated[AddTold | SubTold, Field(discriminator="op")] | int


class Tree(BaseModel):
    value: int
    left: Tree | None = None
    right: Tree | None = None


for _model in (Add, Sub, AddTold, SubTold, Tree):
    _model.model_rebuild()


def chain(depth: int) -> dict[str, object]:
    value: dict[str, object] = {"op": "+", "left": 1, "right": 1, "value": 1}
    for _ in range(depth):
        value = {"op": "+", "left": value, "right": 1, "value": 1}
    return value


def test_g12_unions_that_are_tried_in_every_combination_are_bounded() -> None:
    """G12: a recursive union without a discriminator takes few levels, since each doubles the work; others take 64."""

    def either(e: Add | Sub) -> None: ...

    def told_apart(e: Annotated[AddTold | SubTold, Field(discriminator="op")]) -> None: ...

    def tree(e: Tree) -> None: ...

    def anything(e: JsonValue) -> None: ...

    assert checker(either).check({"e": chain(5)})
    assert "nested too deep" in refusal(either, {"e": chain(40)})
    assert "nested too deep" in refusal(either, json.dumps({"e": chain(40)}))
    deep = {name: value for name, value in chain(60).items() if name != "right"}
    assert checker(told_apart).check({"e": deep})
    assert checker(tree).check({"e": {"value": 1, "left": {"value": 2, "right": {"value": 3}}}})
    for function in (told_apart, tree, anything):
        assert checker(function)._depth == MAX_DEPTH  # type: ignore[attr-defined]


def test_a_wide_union_that_is_not_recursive_keeps_its_levels() -> None:
    """Many alternatives without recursion are as costly as their author made them; depth is not cut for it."""
    schema: dict[str, object] = {
        "properties": {"a": {"anyOf": [{"properties": {"b": {"anyOf": [{}] * 200}}}] * 200}},
    }
    assert subschemas.depth_limit(schema) == MAX_DEPTH


# --- JSON schemas --------------------------------------------------------------------------------------------


def test_a_schema_tool_is_checked_and_gets_its_defaults() -> None:
    """Arguments are checked against the schema; defaults that fit their own schema are filled in, fresh each time."""
    subject = checker_from_schema(
        {
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "default": 3},
                "tags": {"type": "array", "default": ["a"]},
                "odd/n~me": {"type": "string", "default": "x"},
                "sloppy": {"type": "string", "default": None},
                "free": True,
            },
            "required": ["city"],
        }
    )
    assert subject.names == {"city", "days", "tags", "odd/n~me", "sloppy", "free"}
    assert subject.required == {"city"}
    first: Any = subject.check('{"city": "Oslo"}')
    assert first == {"city": "Oslo", "days": 3, "tags": ["a"], "odd/n~me": "x"}
    first["tags"].append("changed")
    assert subject.check({"city": "Oslo", "days": 4, "extra": 1}) == {
        "city": "Oslo",
        "days": 4,
        "extra": 1,
        "tags": ["a"],
        "odd/n~me": "x",
    }


def test_the_schema_is_given_out_as_a_copy() -> None:
    """The schema given to providers is a copy each time; changing it changes no checker, and the source is not kept."""
    source: dict[str, object] = {
        "$id": "https://example.com/x",
        "properties": {"a": {"type": "integer"}},
        "required": ("a",),
    }
    subject = checker_from_schema(source)
    assert subject.schema == {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    source["properties"]["a"]["type"] = "string"  # type: ignore[index]
    subject.schema["properties"]["a"]["type"] = "string"  # type: ignore[index]
    assert subject.schema["properties"]["a"]["type"] == "integer"  # type: ignore[index]
    assert subject.check('{"a": 1}') == {"a": 1}
    function = checker(city)
    function.schema["properties"].clear()  # type: ignore[attr-defined]
    assert function.schema["properties"] == {"city": {"type": "string"}}
    assert checker(nothing).schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_validators_are_compiled_once_for_equal_schemas() -> None:
    """Two tools with the same schema share one compiled validator, whatever the order of its names."""
    one = checker_from_schema({"properties": {"a": {"type": "integer"}, "b": {}}})
    two = checker_from_schema({"properties": {"b": {}, "a": {"type": "integer"}}})
    assert one._validator is two._validator  # type: ignore[attr-defined]
    assert list(two.schema["properties"]) == ["b", "a"]  # type: ignore[call-overload]


def test_the_store_of_validators_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of different schemas do not pile up for ever."""
    store: dict[bytes, object] = {}
    monkeypatch.setattr(schemas, "_COMPILED", store)
    for number in range(1002):
        checker_from_schema({"description": str(number)})
    assert 0 < len(store) < 1000


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "http://example.com/x"}, ["'http://example.com/x'", "never fetched", "#/$defs/NAME"]),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, ["#/properties/a", "'file:///etc/passwd'"]),
        ({"properties": {"a": {"items": {"$ref": "other.json"}}}}, ["#/properties/a/items", "'other.json'"]),
        ({"properties": {"a/b": {"$ref": "https://x/y#/z"}}}, ["#/properties/a~1b"]),
        ({"$dynamicRef": "https://example.com/x"}, ["never fetched"]),
        ({"$defs": {"x": {"$ref": "http://example.com"}}}, ["#/$defs/x"]),
        ({"$ref": "#/$defs/nope"}, ["'#/$defs/nope'", "not in this schema"]),
        ({"$ref": "#/properties/a/5", "properties": {"a": []}}, ["not in this schema"]),
        ({"$ref": "#name"}, ["'#name'"]),
        ({"allOf": [{"$ref": "#/x"}], "x": {"$ref": "http://example.com"}}, ["not valid JSON Schema"]),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$id": "http://example.com/x"}}},
            ["#/$defs/x has an $id"],
        ),
        ({"type": "dict"}, ["#/type is not valid", "types are", "object"]),
        ({"properties": {"a": {"type": "float"}}}, ["#/properties/a/type is not valid", "types are"]),
        ({"properties": {"a": {"type": ["integer", "any"]}}}, ["#/properties/a/type", "types are"]),
        ({"properties": {"a": {"minimum": "x"}}}, ["#/properties/a/minimum is not valid JSON Schema"]),
        ({"properties": {"a": {"pattern": "(("}}}, ["#/properties/a/pattern is not valid"]),
        ({"properties": {"a": {"pattern": "(a{1000}){1000}"}}}, ["#/properties/a/pattern is not valid"]),
        ({"$schema": "http://example.com/own"}, ["$schema"]),
        ({"type": "array"}, ['must be object, not "array"']),
        ({"type": ["array", "null"]}, ["must be object"]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}}, ['must be object, not "string"']),
        ([], ["must be a mapping", "list"]),
        (True, ["must be a mapping", "bool"]),
        ({"default": dt.date(2026, 1, 1)}, ["plain JSON data"]),
        ({"maximum": math.inf}, ["plain JSON data"]),
        ({1: 2}, ["plain JSON data"]),
        ({"description": "x" * MAX_SCHEMA_BYTES}, ["larger than", "262,144"]),
        ({"description": "x" * (MAX_ARGUMENT_BYTES + 1)}, ["plain JSON data"]),
        (json.loads(nested(MAX_DEPTH + 1)), ["64 levels"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_a_schema_that_cannot_be_used_is_a_policy_error(schema: Any, words: list[str]) -> None:
    """A schema that is wrong, too large, or refers outside itself is refused at set-up, naming place and fix."""
    with pytest.raises(PolicyError) as caught:
        checker_from_schema(schema)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).startswith("schema: ")


def bomb(size: int, keyword: str) -> dict[str, object]:
    last = f"d{size}"
    ref = "#/$defs/d{}".format
    if keyword == "properties":
        made = {f"d{n}": {"allOf": [{"properties": {"a": {"$ref": ref(n + 1)}}}] * 2} for n in range(size)}
    else:
        made = {f"d{n}": {keyword: [{"$ref": ref(n + 1)}, {"$ref": ref(n + 1)}]} for n in range(size)}
    return {"$ref": ref(0), "$defs": {**made, last: {"type": "object"}}}


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf", "properties"])
def test_g12_schemas_that_grow_exponentially_are_refused(keyword: str) -> None:
    """G12: references that double at each step would keep the validator busy for years: refused before compiling."""
    with pytest.raises(PolicyError, match=r"more than 10,000 subschemas"):
        checker_from_schema(bomb(40, keyword))
    small = checker_from_schema(bomb(6, keyword))
    assert keyword == "oneOf" or small.check("{}") == {}


@pytest.mark.parametrize(
    ("link", "count"),
    [
        (lambda to: {"$ref": to}, 5000),
        (lambda to: {"$ref": to}, 50),
        (lambda to: {"allOf": [{"$ref": to}]}, 4000),
        (lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]}, 25),
        (lambda to: {"properties": {"a": {"$ref": to}}}, 4000),
        (lambda to: {"properties": {"a": {"$ref": to}}}, 200),
    ],
)
def test_g12_a_very_long_chain_of_references_ends(link: Callable[[str], object], count: int) -> None:
    """A chain of references as long as the size limit allows is used or refused, and overflows no stack."""
    chained = {f"d{n}": link(f"#/$defs/d{n + 1}") for n in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chained, f"d{count}": {"type": "object", "required": ["z"]}}}
    try:
        subject = checker_from_schema(schema)
    except PolicyError as wrong:
        assert re.search("go too deep|references in a row", str(wrong))  # noqa: PT017  # either end is fine
    else:
        assert isinstance(outcome(subject, chain(60)), dict | str)


def test_shared_and_recursive_schemas_are_fine() -> None:
    """One definition used many times, deep sharing through parts, recursion and anchors are all ordinary."""
    shared = {f"d{n}": {"properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "abcdefgh"}} for n in range(12)}
    assert checker_from_schema({"$ref": "#/$defs/d0", "$defs": {**shared, "d12": {"type": "object"}}}).check("{}") == {}
    recursive = checker_from_schema(
        {
            "properties": {"tree": {"$ref": "#tree"}},
            "$defs": {
                "t": {
                    "$anchor": "tree",
                    "properties": {
                        "value": {"type": "integer"},
                        "left": {"$ref": "#/$defs/t"},
                        "right": {"$ref": "#tree"},
                    },
                }
            },
        }
    )
    assert recursive.check('{"tree": {"value": 1, "left": {"right": {"value": 2}}}}')
    assert "argument 'tree' must be" in refusal(recursive, '{"tree": {"left": {"value": "x"}}}') or "schema" in refusal(
        recursive, '{"tree": {"left": {"value": "x"}}}'
    )
    itself = checker_from_schema({"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}})
    assert "argument 'next.next.n' must be a whole number" in refusal(itself, '{"next": {"next": {"n": "x"}}}')
    looped = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}
    with pytest.raises(PolicyError, match="more than 10,000"):
        checker_from_schema(looped)


def test_g12_a_refusal_of_a_recursive_union_is_quick() -> None:
    """G12: at 60 levels of a union of alike branches the validator's own errors would take ages; ours do not."""
    branch = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["k"]}
    branches = [{**branch, "properties": {**branch["properties"], "k": {"const": n}}} for n in range(3)]  # type: ignore[dict-item]
    subject = checker_from_schema({"properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"anyOf": branches}}})
    value: dict[str, object] = {"k": 9}
    for _ in range(60):
        value = {"k": 1, "x": value}
    assert "argument 'n' must be an object with 'k'" in refusal(subject, {"n": value})


@pytest.mark.parametrize(
    "pattern", [r"^(a+)+$", r"(?=a)(a+)+$", r"^(a|a?)+$(?!b)", r"^(\w+\s?)*$(?<!x)", r"(x+x+)+y"], ids=lambda p: p
)
def test_g12_a_pattern_cannot_keep_the_validator_busy(pattern: str) -> None:
    """G12: patterns that double their work with each character are cut off; the value is refused."""
    subject = checker_from_schema({"properties": {"a": {"type": "string", "pattern": pattern}}})
    for text in ("a" * 60 + "!", "x" * 60, "a" * 5000 + "!"):
        answer = outcome(subject, {"a": text})
        assert answer == {"a": text} or "argument 'a' must be text, matching the pattern" in answer


def test_patterns_with_look_around_work() -> None:
    """Look-ahead, as in password rules, is ordinary and works on ordinary text."""
    subject = checker_from_schema({"properties": {"a": {"pattern": r"^(?=.*[A-Z])(?=.*\d).{8,}$"}}})
    assert subject.check({"a": "Abcdefg1"})
    assert subject.check({"a": "A1" + "x" * 2000})
    assert "matching the pattern" in refusal(subject, {"a": "abcdefgh"})


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ({"type": "string"}, 5, "argument 'a' must be text"),
        ({"type": ["integer", "null"]}, "x", "argument 'a' must be a whole number or null"),
        ({"type": "integer", "minimum": 1, "maximum": 9}, 10, "'a' must be a whole number, at least 1, at most 9"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, 1, "'a' must be above 0, below 1"),
        ({"multipleOf": 5}, 7, "'a' must be a multiple of 5"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "x", "text, at least 2 characters, at most 3 characters"),
        ({"enum": list(range(20))}, 99, "'a' must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 8 more"),
        ({"const": "x" * 100}, 1, "'a' must be \"" + "x" * 63 + "..."),
        ({"type": "array", "minItems": 2, "uniqueItems": True}, [1], "a list, at least 2 entries, without repeats"),
        ({"type": "array", "uniqueItems": False, "maxItems": 1}, [1, 1], "'a' must be a list, at most 1 entries."),
        ({"type": "object", "minProperties": 1}, {}, "'a' must be an object, at least 1 names"),
        ({"type": "object", "required": ["x", "y"]}, {"x": 1}, "argument 'a.y' is required."),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, None, "'a' must be text or a whole number"),
        ({"oneOf": [{"type": "string"}, {"minLength": 0}]}, "x", "'a' must be text or at least 0 characters"),
        ({"not": {"type": "string"}}, "x", "'a' must be within the other rules of its schema"),
        ({"type": "string", "not": {"const": "x"}}, "x", "'a' must be text, within the other rules of its schema"),
        ({"allOf": [{"type": "string"}, {"minLength": 3}]}, "x", "'a' must be at least 3 characters"),
        ({"allOf": [{"$ref": "#/$defs/n"}], "description": "x"}, "x", "'a' must be a whole number"),
        ({"$ref": "#/$defs/n"}, "x", "argument 'a' must be a whole number"),
        ({"$ref": "#/$defs/n", "maximum": 3}, 5, "argument 'a' must be a whole number"),
        ({"anyOf": [{"$ref": "#/$defs/o"}, {"type": "null"}]}, {"k": "x"}, "argument 'a.k' must be a whole number"),
        ({"oneOf": [{"$ref": "#/$defs/o"}, {"type": "string"}]}, {"z": 1}, "'a' has a name that is not in its schema"),
        ({"items": [{"type": "integer"}], "additionalItems": {"type": "string"}}, [1, 2], "'a' must be"),
        (
            {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
            ["x", 2],
            "argument 'a[0]' must be a whole",
        ),
        ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [1, 2], "argument 'a[1]' must be text"),
        ({"prefixItems": [{"type": "integer"}], "items": False}, [1, 2], "'a' does not fit its schema"),
        ({"additionalProperties": {"type": "integer"}}, {"zz": "x"}, "argument 'a.*' must be a whole number"),
        ({"patternProperties": {"^z": {"type": "integer"}}}, {"zz": "x"}, "'a' must be within the other rules"),
        (
            {"patternProperties": {"^z": {}}, "additionalProperties": False, "type": "object"},
            {"y": "x"},
            "'a' must be an object, within the other rules",
        ),
        (
            {"type": "object", "additionalProperties": False},
            {"x": 1},
            "'a' has a name that is not in its schema: it has none",
        ),
        (False, 1, "argument 'a' does not fit its schema"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "x", "'a' must be within the other rules of its schema"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "array"}}}, 1, "a list, each entry a list"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_schema_refusals_say_what_a_value_must_be(part: Any, value: object, said: str) -> None:
    """For every common keyword the refusal names the place and what the schema says of it."""
    schema = {
        "properties": {"a": part},
        "$defs": {
            "n": {"type": "integer"},
            "o": {"type": "object", "properties": {"k": {"type": "integer"}}, "additionalProperties": False},
        },
    }
    if isinstance(part, dict) and "additionalItems" in part:
        schema["$schema"] = "http://json-schema.org/draft-07/schema#"  # type: ignore[assignment]
        said = "argument 'a[1]' must be text"
    assert said in refusal(checker_from_schema(schema), {"a": value})


def test_older_drafts_are_read_as_what_they_are() -> None:
    """`$schema` decides: in draft 7 a list of items is a tuple, and what stands beside $ref is ignored."""
    subject = checker_from_schema(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {
                "pair": {"items": [{"type": "integer"}, {"type": "string"}]},
                "n": {"$ref": "#/definitions/n", "type": "string"},
                "k": {"$ref": "#k"},
            },
            "definitions": {"n": {"type": "integer"}, "k": {"$id": "#k", "type": "integer"}},
        }
    )
    assert subject.check({"pair": [1, "x"], "n": 5, "k": 1})
    assert "argument 'pair[0]' must be a whole number" in refusal(subject, {"pair": ["x"]})
    assert "argument 'n' must be a whole number" in refusal(subject, {"n": "x"})
    assert "argument 'k'" in refusal(subject, {"k": "x"})
    old = checker_from_schema(
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "properties": {"a": {"minimum": 1, "exclusiveMinimum": True}},
        }
    )
    assert old.check({"a": 2})
    assert "at least 1" in refusal(old, {"a": 1})


def test_unions_of_alike_branches_end_at_the_union() -> None:
    """Where several branches could be meant, the union is told as a whole; seen places are not looked at twice."""
    schema = {
        "properties": {"a": {"$ref": "#/$defs/u"}, "b": {"$ref": "#/$defs/u"}},
        "$defs": {
            "u": {"anyOf": [{"type": "object", "required": ["x"]}, {"type": "object", "required": ["y"]}]},
            "w": {"allOf": [{"type": "object"}, {"type": "object"}]},
        },
    }
    message = refusal(checker_from_schema(schema), {"a": {}, "b": 5})
    assert "argument 'a' must be an object with 'x' or an object with 'y'" in message
    assert "argument 'b' must be an object with 'x' or an object with 'y'" in message
    twice = checker_from_schema(
        {"properties": {"a": {"allOf": [{"$ref": "#/$defs/n"}] * 2}}, "$defs": {"n": {"type": "null"}}}
    )
    assert refusal(twice, {"a": 1}).count("must be null") == 1


def test_a_python_object_is_no_json_for_a_schema_tool() -> None:
    """A native call with a date for a schema tool is refused; tuples pass as lists."""
    subject = checker_from_schema({"properties": {"a": {"type": "array", "items": {"type": "integer"}}}})
    for value in (dt.date(2026, 1, 1), b"x", {1}, object()):
        assert "a type that JSON does not have" in refusal(subject, {"a": value})
        assert "a type that JSON does not have" in refusal(subject, {"a": [value]})
    assert subject.check({"a": (1, 2)}) == {"a": (1, 2)}


def test_the_root_may_be_a_reference() -> None:
    """Schema generators put the object behind a reference at the root: names, defaults and hints still work."""
    for top in ({"$ref": "#/$defs/Args"}, {"allOf": [{"$ref": "#/$defs/Args"}]}):
        subject = checker_from_schema(
            {
                **top,
                "$defs": {
                    "Args": {
                        "type": "object",
                        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
                        "required": ["a"],
                    }
                },
            }
        )
        assert (subject.names, subject.required) == ({"a", "b"}, {"a"})
        assert subject.check('{"a": 1}') == {"a": 1, "b": 2}
        assert "argument 'a' is required (a whole number)" in refusal(subject, "{}")
        assert "'a' is required (a whole number)" in refusal(subject, "")


def test_references_to_odd_places_are_followed() -> None:
    """Pointers into lists, escaped names and places that are no subschemas work; bad steps point nowhere."""
    schema: dict[str, object] = {
        "properties": {
            "a": {"$ref": "#/components/schemas/x%20y~1z"},
            "b": {"$ref": "#/properties/c/anyOf/1"},
            "c": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
        "components": {"schemas": {"x y/z": {"type": "integer"}}},
    }
    subject = checker_from_schema(schema)
    assert subject.check({"a": 1, "b": 2, "c": "x"})
    assert "argument 'a' must be a whole number" in refusal(subject, {"a": "x"})
    assert "argument 'b' must be a whole number" in refusal(subject, {"b": "x"})
    assert subschemas.pointed_to(schema, "#/properties/c/anyOf/9") is None
    assert subschemas.pointed_to(schema, "#/properties/c/anyOf/x") is None
    assert subschemas.pointed_to(schema, "#/properties/c/anyOf/0/type/deeper") is None
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert subschemas.resolve(loop, loop) == {}


def test_checkers_are_used_from_several_threads() -> None:
    """A checker made in one thread checks in any other."""
    subjects = [checker(guarded_tool), checker_from_schema(STRICT_SCHEMA)]
    fine = ['{"inner": {"kind": "a", "amount": 4}, "pet": {"kind": "dog", "barks": true}}', '{"kind": "a"}']
    seen: list[object] = []

    def work() -> None:
        for subject, text in zip(subjects, fine, strict=True):
            seen.append(subject.check(text))
            seen.append(refusal(subject, '{"kind": 5}'))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 16


# --- docstrings -------------------------------------------------------------------------------------------------


def google(a: int, b: str = "") -> None:
    """Read one customer.

    More text: with a colon.

    Note:
        Only for staff.

    Warning: Careful
        It bites.

    Args:
        a: number on the invoice
            over two lines
        b (str): the name

    Returns:
        the customer

    Raises:
        KeyError: never
    """


def numpy(a: int, b: str = "") -> None:
    """Read one customer.

    Parameters
    ----------
    a : int
        number on the invoice over two lines
    b : str, optional
        the name

    Returns
    -------
    dict
        the customer
    """


def sphinx(a: int, b: str = "") -> None:
    """Read one customer.

    :param a: number on the invoice
        over two lines
    :param str b: the name
    :returns: the customer"""


@pytest.mark.parametrize("function", [google, numpy, sphinx], ids=lambda f: f.__name__)
def test_docstrings_of_any_style_describe_the_arguments(function: Callable[..., object], caplog: Any) -> None:
    """Google, NumPy and Sphinx docstrings give the arguments their descriptions; the rest is the tool's description."""
    properties: Any = checker(function).schema["properties"]
    assert properties["a"]["description"] == "number on the invoice over two lines"
    assert properties["b"]["description"] == "the name"
    text = description_of(function)
    assert text.startswith("Read one customer.")
    for word in ("invoice", "the name", "the customer", "KeyError", "param", "----"):
        assert word not in text
    assert not caplog.records


def test_notes_stay_in_the_description() -> None:
    """Notes and warnings are for the model too."""
    text = description_of(google)
    assert "More text: with a colon." in text
    assert "Note:\nOnly for staff." in text
    assert "Warning: Careful\nIt bites." in text


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (None, ""),
        ("", ""),
        ("  One line. ", "One line."),
        ("Two.\n\n    Paragraphs: here.\n    ", "Two.\n\nParagraphs: here."),
        ("Do it.\n\n    :param a: only one", "Do it."),
        (":param a: only one", ""),
    ],
)
def test_short_docstrings(docstring: str | None, expected: str) -> None:
    """No docstring, one line, plain paragraphs and a lone parameter line are read as they look."""

    def take(a: int) -> None: ...

    take.__doc__ = docstring
    assert description_of(take) == expected
    described = checker(take).schema["properties"]["a"].get("description")  # type: ignore[index]
    assert described == ("only one" if docstring and "param" in docstring else None)


def test_an_annotation_describes_before_the_docstring() -> None:
    """A description in the annotation is not overwritten by the docstring."""

    def take(a: Annotated[int, Field(description="from the annotation")], b: Inner) -> None:
        """Do it.

        Args:
            a: from the docstring
            b: the inner thing
            gone: no such parameter
        """

    properties: Any = checker(take).schema["properties"]
    assert properties["a"]["description"] == "from the annotation"
    assert properties["b"] == {"$ref": "#/$defs/Inner", "description": "the inner thing"}


def test_schemas_have_no_made_up_titles_and_give_no_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """Titles made from parameter names are left out, and a default that is no JSON is left out silently."""

    def take(a: int, b: Any = nothing, c: dt.datetime = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)) -> None: ...

    schema = checker(take).schema
    assert "title" not in json.dumps(schema)
    assert schema["properties"]["b"] == {}  # type: ignore[index]
    assert not recwarn.list


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("Ok", ["ok", "no"], ["ok"]),
        ("readCustomer", ["read_customer", "zzz", "rename_customer"], ["read_customer", "rename_customer"]),
        ("read-customer", ["readCustomer"], ["readCustomer"]),
        ("customer", ["read_customer", "x"], ["read_customer"]),
        ("cuty", ["city", "days"], ["city"]),
        ("zzz", ["city", "days"], []),
        ("", ["city"], []),
        ("!?", ["city"], []),
        ("city", [], []),
        ("ab", ["abc", "x"], ["abc"]),
        ("straße", ["STRASSE"], ["STRASSE"]),
        ("aaaa", ["aaab", "aaac", "aaad", "aaae"], ["aaab", "aaac", "aaad"]),
    ],
)
def test_p74_near_names_are_found(name: str, known: list[str], expected: list[str]) -> None:
    """P-74: case, punctuation, parts and small slips find the name that was meant, nearest first."""
    assert near_names(name, known) == expected
    assert near_names(name, frozenset(known)) == near_names(name, list(reversed(known)))


def test_p74_a_huge_name_is_cheap_and_harmless() -> None:
    """P-74: names of 10,000 characters, on both sides and many of them, are compared by their beginnings only."""
    huge = "ok" * 5_000
    assert near_names(huge, ["okok", "x" * 10_000, huge + "!"]) == [huge + "!", "okok"]
    assert near_names("tool_7", [f"tool_{number}" for number in range(5_000)], 1) == ["tool_7"]
    assert len(near_names("tool", [f"tool_{number}" for number in range(5_000)])) == 3
    assert near_names("order_0003", [f"ordre_{number:04}" for number in range(5_000)], most=1) == ["ordre_0003"]


@given(st.text(max_size=300), st.lists(st.text(max_size=30), max_size=8), st.integers(0, 4))
@settings(max_examples=100)
def test_p74_near_names_are_always_known_ones(name: str, known: list[str], most: int) -> None:
    """Whatever was written, only known names come back, without repeats and no more than asked for."""
    near = near_names(name, known, most)
    assert set(near) <= set(known)
    assert len(near) == len(set(near)) <= most
    for candidate in known:
        if most and candidate and near_names(candidate, [candidate]):
            assert near_names(candidate.upper(), [candidate]) in ([candidate], [])


# --- real inputs and the house -----------------------------------------------------------------------------------

DIALECT = {"dict": "object", "float": "number", "tuple": "array", "any": None, "String": "string", "Boolean": "boolean"}


def plain_schema(node: Any) -> Any:
    """The benchmark's own dialect of schemas as JSON Schema (what a user of such a file has to do)."""
    if isinstance(node, list):
        return [plain_schema(part) for part in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, part in node.items():
        if key == "type" and isinstance(part, str):
            if DIALECT.get(part, part) is not None:
                out[key] = DIALECT.get(part, part)
        elif key == "properties":
            out[key] = {name: plain_schema(sub) for name, sub in part.items()}
        elif key in ("items", "additionalProperties"):
            out[key] = plain_schema(part)
        elif key not in ("default", "optional"):
            out[key] = part
    return out


def first_accepted(value: Any) -> Any:
    """A truth lists the accepted values of each argument; "" stands for leaving it out."""
    if isinstance(value, dict):
        return {
            name: first_accepted(options[0])
            for name, options in value.items()
            if isinstance(options, list) and options[0] != ""
        }
    if isinstance(value, list):
        return [first_accepted(part) for part in value]
    return value


@pytest.mark.parametrize("name", ["bfcl_parallel", "bfcl_parallel_multiple", "bfcl_live_parallel"])
def test_the_calls_of_a_public_benchmark_are_accepted(shared_data: Any, name: str) -> None:
    """Every accepted argument set of the recorded batches passes the tool's own schema, as text and as mapping."""
    calls = 0
    for record in shared_data(name):
        tools = {tool["name"]: checker_from_schema(plain_schema(tool["parameters"])) for tool in record["function"]}
        for call in record["ground_truth"]:
            for tool, options in call.items():
                given_ = first_accepted(options)
                expected = {**tools[tool].check(json.dumps(given_))}
                assert tools[tool].check(given_) == expected
                assert expected.items() >= given_.items()
                assert tools[tool].required <= set(given_)
                calls += 1
    assert calls > 40


def test_the_calls_of_a_public_multi_turn_benchmark_are_accepted(shared_data: Any) -> None:
    """The stateful tools of the benchmark take the calls of its truths, which are written as Python."""
    records = shared_data("bfcl_multi_turn_base")
    tools: dict[str, tuple[Checker, list[str]]] = {}
    for path in sorted((SHARED / "bfcl_multi_turn_func_doc").glob("*.json")):
        for tool in shared_data(f"bfcl_multi_turn_func_doc/{path.name}"):
            schema = plain_schema(tool["parameters"])
            tools[tool["name"]] = checker_from_schema(schema), list(schema["properties"])
    assert len(tools) >= 100
    calls, wrong = 0, []
    for record in records:
        for text in (text for turn in record["ground_truth"] for text in turn):
            node = ast.parse(text, mode="eval").body
            assert isinstance(node, ast.Call)
            assert isinstance(node.func, ast.Name)
            subject, order = tools[node.func.id]
            given_ = {order[place]: ast.literal_eval(value) for place, value in enumerate(node.args)}
            given_ |= {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
            answer = outcome(subject, json.dumps(given_))
            assert outcome(subject, given_) == answer
            if isinstance(answer, str):
                wrong.append((text, answer))
            else:
                assert answer.items() >= given_.items()
                calls += 1
    assert calls > 200
    # One truth contradicts the schema of its own tool, which says integer.
    assert [text for text, _ in wrong] == ["close_ticket(ticket_id='ticket_001')"]
    assert "argument 'ticket_id' must be a whole number" in wrong[0][1]


def test_importing_the_room_imports_no_validator() -> None:
    """pydantic, jsonschema_rs and griffe come with their first use, not with the import."""
    heavy = ("pydantic", "pydantic_core", "jsonschema_rs", "griffe")
    code = f"import sys, towerman.arguments as a; print([name for name in {heavy} if name in sys.modules])"
    source = str(inspect.getfile(arguments)).removesuffix("towerman/arguments/__init__.py")
    # Through the package's own door other rooms may come in, so the package is stood in for.
    stand_in = f"import sys, types; p = types.ModuleType('towerman'); p.__path__ = [{source + 'towerman'!r}]; "
    code = f"{stand_in}sys.modules['towerman'] = p; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
