"""Room 9: any value of a handler becomes text for the model: valid, within its limit, honest about what is missing."""

from __future__ import annotations

import contextlib
import gc
import io
import ipaddress
import itertools
import json
import re
import sqlite3
import sys
import threading
import traceback
import warnings
import weakref
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock
from uuid import UUID

import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from towerman.bounds import (
    EMPTY,
    MAX_DEPTH,
    MIN_BYTES,
    Encoded,
    EncodingError,
    encode,
    encoding,
    fit_batch,
    jsontext,
    reading,
    recut,
    share_room,
)

WIDE = 10_000_000
CANARY = "canary-5f1e"


def strict(text: str) -> object:
    """Parse as JSON proper: no NaN, no repeated key."""

    def refuse(name: str) -> object:
        raise AssertionError(f"{name} is no JSON")

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(pairs)) == len(pairs), "a key is repeated"
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=distinct)


def whole(value: object) -> object:
    """The value as the model gets it when there is room."""
    encoded = encode(value, WIDE)
    assert not encoded.cut
    assert encoded.original_bytes == len(encoded.text.encode())
    return strict(encoded.text)


def cut(value: object, limit: int) -> tuple[dict[str, object], object]:
    """Note and remains of a value that does not fit."""
    encoded = encode(value, limit)
    assert encoded.cut
    assert len(encoded.text.encode()) <= limit
    loaded = strict(encoded.text)
    assert isinstance(loaded, dict)
    note = loaded["truncated"]
    assert list(loaded) in (["truncated", "result"], ["truncated"])
    assert note["original_bytes"] == encoded.original_bytes
    return note, loaded.get("result")


def refusal(value: object, encoder: object = None) -> EncodingError:
    """The error of a value that has no form, checked for what must never be in it (G8)."""
    with pytest.raises(EncodingError) as caught:
        encode(value, WIDE, encoder)  # type: ignore[arg-type]
    error = caught.value
    assert error.message == str(error)
    told = "".join(traceback.format_exception(error)) + repr(error) + repr(error.args)
    assert CANARY not in told
    assert error.__context__ is None
    assert error.__cause__ is None
    return error


# ------------------------------------------------------------------------------------------- everyday values


class Color(Enum):
    RED = "red"
    NONE = None
    PAIR = (1, 2)


class Level(IntEnum):
    HIGH = 3


class Kind(StrEnum):
    A = "a"


@dataclass
class Point:
    x: int
    when: date
    tags: set[str] = field(default_factory=set, repr=False)


class Row(NamedTuple):
    id: int
    name: str


class Customer(pydantic.BaseModel):
    id: UUID
    since: datetime
    token: pydantic.SecretStr
    hidden: str = pydantic.Field(default=CANARY, exclude=True)


@pydantic.dataclasses.dataclass
class Account:
    since: date
    token: pydantic.SecretStr
    hidden: str = pydantic.Field(default=CANARY, exclude=True)


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"

    def encode(self, *_: object) -> bytes:  # type: ignore[override]
        raise RuntimeError


class Number(int):
    def __repr__(self) -> str:
        return "not a number"

    __str__ = __repr__


class Ratio(Fraction):
    pass


class Real(float):
    def __repr__(self) -> str:
        return "not a number"


class Lines(Sequence[int]):
    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if index >= 3:
            raise IndexError
        return index

    def __len__(self) -> int:
        return 3


class Bag(Set[object]):
    def __init__(self, items: object) -> None:
        self.items = items

    def __contains__(self, _: object) -> bool:
        raise NotImplementedError

    def __iter__(self) -> Iterator[object]:
        return iter(self.items)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        raise NotImplementedError


class Scalar:
    """Like a number of numpy: knows how to become a plain one."""

    dtype = SimpleNamespace(kind="f")

    def tolist(self) -> float:
        return 1.5


class Instants:
    """Like numpy's array of nanosecond instants: its plain list would be bare numbers."""

    dtype = SimpleNamespace(kind="M")

    def astype(self, kind: type) -> Instants:
        assert kind is str
        return self

    def tolist(self) -> list[str]:
        return ["2024-01-01T00:00:00"]


class OnlyItem:
    dtype = None

    def item(self) -> int:
        return 7


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


UUID_ = UUID("12345678123456781234567812345678")
NOON = datetime(2024, 5, 6, 12, 30, tzinfo=UTC)

EVERYDAY: list[tuple[object, object]] = [
    (5, 5),
    (True, True),
    (1.5, 1.5),
    (10**400, 10**400),
    (NOON, "2024-05-06T12:30:00+00:00"),
    (date(2024, 5, 6), "2024-05-06"),
    (time(12, 30), "12:30:00"),
    (timedelta(0), "PT0S"),
    (timedelta(days=1, hours=2, minutes=3, seconds=4, microseconds=500_000), "P1DT2H3M4.5S"),
    (timedelta(days=400), "P400D"),
    (timedelta(minutes=2), "PT2M"),
    (-timedelta(seconds=1), "-PT1S"),
    (timedelta(microseconds=1), "PT0.000001S"),
    (Decimal("1.10"), "1.10"),
    (Decimal("NaN"), "NaN"),
    (Fraction(1, 3), "1/3"),
    (ipaddress.ip_address("10.0.0.1"), "10.0.0.1"),
    (ipaddress.ip_network("10.0.0.0/8"), "10.0.0.0/8"),
    (UUID_, str(UUID_)),
    (PurePosixPath("/srv/a.txt"), "/srv/a.txt"),
    (1 + 2j, "1+2j"),
    (float("nan"), "NaN"),
    (float("inf"), "Infinity"),
    (float("-inf"), "-Infinity"),
    (Color.RED, "red"),
    (Color.NONE, None),
    (Color.PAIR, [1, 2]),
    (Level.HIGH, 3),
    (Number(7), 7),
    (Real(1.5), 1.5),
    (Point(1, date(2024, 5, 6), {"b", "a"}), {"x": 1, "when": "2024-05-06", "tags": ["a", "b"]}),
    (Row(1, "x"), {"id": 1, "name": "x"}),
    (namedtuple("Pair", "a b")(1, 2), {"a": 1, "b": 2}),
    (pydantic.RootModel[list[int]]([1, 2]), [1, 2]),
    (b"\xff\xfe", "data:application/octet-stream;base64,//4="),
    ([b"text", bytearray(b"text"), memoryview(b"text")], ["text", "text", "text"]),
    ((1, "a", None), [1, "a", None]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a"}), ["a", "b"]),
    (Bag(["b", "a"]), ["a", "b"]),
    (deque([1, 2]), [1, 2]),
    (range(3), [0, 1, 2]),
    (UserList([1]), [1]),
    (Lines(), [0, 1, 2]),
    (array("i", [1, 2]), [1, 2]),
    (Scalar(), 1.5),
    (Instants(), ["2024-01-01T00:00:00"]),
    (OnlyItem(), 7),
    (numbers(3), [0, 1, 2]),
    (map(str, [1, 2]), ["1", "2"]),
    (iter([]), []),
    (MappingProxyType({"a": 1}), {"a": 1}),
    (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (Counter("aab"), {"a": 2, "b": 1}),
    (UserDict(a=NOON.date()), {"a": "2024-05-06"}),
    (ChainMap({"a": 1}), {"a": 1}),
    ({"a": 1}.keys(), ["a"]),
    ({"a": 1}.values(), [1]),
    ({"a": 1}.items(), [["a", 1]]),
    (ValueError(CANARY), {"exception": "ValueError"}),
    ([1, KeyError(CANARY)], [1, {"exception": "KeyError"}]),
    (ipaddress.AddressValueError(CANARY), {"exception": "AddressValueError"}),
    (Ratio(1, 3), "1/3"),
    ([UserString("x"), Text("x"), Kind.A], ["x", "x", "a"]),
    ([], []),
    ({}, {}),
    (set(), []),
]


@pytest.mark.parametrize(("value", "expected"), EVERYDAY, ids=lambda value: type(value).__name__)
def test_p58_everyday_values_are_encoded(value: object, expected: object) -> None:
    """P-58, R-109: what Python programs return every day has one documented JSON form."""
    assert whole(value) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a", "a"),
        (1, "1"),
        (True, "true"),
        (None, "null"),
        (1.5, "1.5"),
        (float("nan"), "NaN"),
        (NOON, "2024-05-06T12:30:00+00:00"),
        (date(2024, 5, 6), "2024-05-06"),
        (Decimal("1.10"), "1.10"),
        (UUID_, str(UUID_)),
        (Color.RED, "red"),
        (Level.HIGH, "3"),
        (Text("x"), "x"),
        (b"ab", "ab"),
        (PurePosixPath("/a"), "/a"),
        ((1, "x"), '[1,"x"]'),
        (frozenset({2, 1}), "[1,2]"),
        (Row(1, "x"), '{"id":1,"name":"x"}'),
        ("\ud800", "\ufffd"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_p58_keys_of_any_everyday_type_become_text(key: object, expected: str) -> None:
    """P-58: a datetime, a tuple or None as a dict key neither breaks the result nor is lost."""
    assert whole({key: 1}) == {expected: 1}


def test_keys_that_become_the_same_text_are_all_kept() -> None:
    """R-110: 1 and "1" are two entries; the second is told apart by its position, and none is lost silently."""
    assert whole({1: "a", "x": "b", "1": "c"}) == {"1": "a", "x": "b", "1 (3)": "c"}
    assert whole({2: "a", "2": "b", "2 (2)": "c"}) == {"2": "a", "2 (2)": "b", "2 (2) (3)": "c"}
    many = {1: "a"} | {str(number): number for number in range(200)}
    assert whole(many) == {"1": "a", "0": 0, "1 (3)": 1} | {str(number): number for number in range(2, 200)}
    connection = sqlite3.connect(":memory:")
    connection.row_factory = sqlite3.Row
    rows = connection.execute("select 1 as id, 'x' as name, 2 as id").fetchall()
    connection.close()
    assert whole(rows) == [{"id": 1, "name": "x", "id (3)": 2}]


def test_the_pydantic_forms_keep_their_secrets_and_exclusions() -> None:
    """G8, P-58: SecretStr stays masked, excluded fields stay out, in models, pydantic dataclasses and plain dicts."""
    secret = pydantic.SecretStr(CANARY)
    customer = Customer(id=UUID_, since=NOON, token=secret)
    expected = {"id": str(UUID_), "since": "2024-05-06T12:30:00Z", "token": "**********"}
    assert whole(customer) == expected
    assert whole({"rows": [customer]}) == {"rows": [expected]}
    assert whole(Account(date(2024, 5, 6), secret)) == {"since": "2024-05-06", "token": "**********"}
    assert whole({"token": secret, "raw": pydantic.SecretBytes(b"x")}) == {"token": "**********", "raw": "**********"}


def test_a_pydantic_model_that_lies_about_a_type_warns_nobody() -> None:
    """G8: pydantic's warning about an unexpected value shows that value; it is not let out."""
    wrong = Customer.model_construct(id=CANARY, since=NOON, token=pydantic.SecretStr("x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "id" in whole(wrong)  # type: ignore[operator]


def test_text_passes_as_itself() -> None:
    """R-110: a str of any kind, and bytes that are UTF-8, are what the model reads, unquoted."""
    for value in ("Grüße 😀\n\x00", Text("Grüße 😀\n\x00"), UserString("Grüße 😀\n\x00"), "Grüße 😀\n\x00".encode()):
        assert encode(value, 100) == Encoded("Grüße 😀\n\x00", 14, False)
    assert encode(bytearray(b"plain"), 100).text == encode(memoryview(b"plain"), 100).text == "plain"
    assert encode(Kind.A, 100).text == "a"


@pytest.mark.parametrize(
    ("text", "clean"), [("a\ud800", "a\ufffd"), ("\ud83d\ude00", "😀"), ("\udc00\ud800", "\ufffd\ufffd")]
)
def test_lone_surrogates_are_replaced_and_pairs_joined(text: str, clean: str) -> None:
    """R-109: half of a surrogate pair cannot be sent as UTF-8; it becomes U+FFFD, and a whole pair its character."""
    assert encode(text, 100) == Encoded(clean, len(clean.encode()), False)
    assert whole([text, {text: text}]) == [clean, {clean: clean}]


@pytest.mark.parametrize("digits", [4_301, 100_000])
def test_integers_with_too_many_digits_are_written_in_hexadecimal(digits: int) -> None:
    """R-109: an integer beyond Python's digit limit is exact, quick and valid JSON: a string of hex digits."""
    for sign in (1, -1):
        value = sign * 10**digits
        assert int(whole(value), 16) == value  # type: ignore[call-overload]
        assert whole({"n": value}) == {"n": hex(value)}


@pytest.mark.parametrize("value", ["", None, b"", "   ", "\n\t ", b"  ", bytearray(), UserString(" "), "\u2003"])
def test_p59_empty_results_are_marked(value: object) -> None:
    """P-59: None, blank text and no bytes become an explicit marker; a provider refuses null or blank content."""
    encoded = encode(value, MIN_BYTES)
    assert encoded.text == EMPTY
    assert EMPTY.strip()
    assert not encoded.cut
    assert encode(1, 100, lambda _: value).text == EMPTY


@pytest.mark.parametrize(("value", "text"), [([], "[]"), ({}, "{}"), ((), "[]"), (iter(""), "[]"), ([""], '[""]')])
def test_p59_empty_collections_say_so_by_themselves(value: object, text: str) -> None:
    """P-59: an empty list or object stays the JSON that a program expects; it is never empty content."""
    assert encode(value, MIN_BYTES) == Encoded(text, len(text), False)


# ------------------------------------------------------------------------------------------- what has no form


async def _coroutine() -> None: ...


async def _async_generator():  # type: ignore[no-untyped-def]
    yield 1


class Opaque:
    def __init__(self) -> None:
        self.secret = CANARY

    def __repr__(self) -> str:
        return CANARY


class Raising:
    """Fails in whichever way a handler's object can."""

    def __init__(self, *_: object) -> None:
        pass

    def fail(self, *_: object, **__: object) -> None:
        raise ValueError(CANARY)


class RaisingIterator(Raising):
    __next__ = Raising.fail
    __iter__ = Raising.fail


class RaisingModel(Raising):
    model_dump = Raising.fail


class RaisingArray(Raising):
    tolist = Raising.fail


class RaisingPath(PurePosixPath):
    def __fspath__(self) -> str:
        raise ValueError(CANARY)


class RaisingMapping(Mapping[str, object]):
    def __getitem__(self, key: str) -> object:
        raise ValueError(CANARY)

    def __iter__(self) -> Iterator[str]:
        return iter([CANARY])

    def __len__(self) -> int:
        return 1


class OddMapping(Mapping[str, object]):
    def items(self):  # type: ignore[no-untyped-def]
        return [(1, 2, 3)]

    __getitem__ = __iter__ = __len__ = Raising.fail  # type: ignore[assignment]


class Forever:
    """Stands for another one of its kind, for ever."""

    def tolist(self) -> Forever:
        return Forever()


class ChainA:
    def tolist(self) -> ChainB:
        return ChainB()


class ChainB:
    def tolist(self) -> ChainA:
        return ChainA()


class Meta(type):
    def __getattr__(cls, name: str) -> object:
        raise ValueError(CANARY)


class RaisingType(metaclass=Meta):
    pass


class Unhashable(type):
    def __hash__(cls) -> int:
        raise OSError(CANARY)


class RaisingKind(metaclass=Unhashable):
    pass


class Liar:
    @property
    def __class__(self):  # type: ignore[no-untyped-def]
        raise ValueError(CANARY)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.Lock(), "lock object"),
        (Opaque(), "an Opaque object"),
        (object(), "an object object"),
        (len, "builtin_function_or_method"),
        (Opaque, "a type object"),
        (Mock(spec=str), "a Mock object"),
        (SimpleNamespace(a=CANARY), "a SimpleNamespace object"),
        (Liar(), "a Liar object"),
        (RaisingIterator(), "ValueError"),
        (RaisingModel(), "ValueError"),
        (RaisingArray(), "ValueError"),
        (RaisingPath("/a"), "ValueError"),
        (RaisingMapping(), "ValueError"),
        (OddMapping(), "ValueError"),
        (RaisingType(), "ValueError"),
        (RaisingKind(), "OSError"),
        (type("Long" * 1000, (), {})(), "LongLong object"),
        (Forever(), "another one of its kind"),
        (io.StringIO(CANARY), "return its content"),
        (_async_generator(), "async for"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:.*was never awaited")
def test_p58_what_has_no_form_is_refused_for_that_call_only(value: object, name: str) -> None:
    """P-58, R-109, G8: no JSON form, or failing while read, is an EncodingError that names types, never a value."""
    assert name in refusal(value).message
    nested = refusal({CANARY: 1, "k": [0, 1, 2, value]})
    assert name in nested.message
    assert "at .<key 1>[3] " in nested.message
    assert name in refusal(None, lambda _: [value]).message


def test_the_example_message() -> None:
    """P-58, R-117: the message names the type, the place and what to do."""
    assert refusal([[threading.Lock()]]).message == (
        "the value at [0][0] is a lock object, which has no JSON form: return plain data, or give the tool encode="
    )
    assert refusal(threading.Lock()).message.startswith("the result is a lock object")


def test_what_has_to_be_awaited_is_refused_with_the_hint() -> None:
    """R-109: a coroutine that the handler forgot to await is told so."""
    coroutine = _coroutine()
    assert "is a coroutine object, which has no JSON form: await it in the handler" in refusal([coroutine]).message
    coroutine.close()


def test_places_name_fields_of_dataclasses_and_hide_keys() -> None:
    """G8: a place is told by positions; only the names of a dataclass's fields, which are code, are shown."""
    holder = Point(1, Opaque())  # type: ignore[arg-type]
    assert "at .<key 0>.when is an Opaque object" in refusal({CANARY: holder}).message
    assert "at .<key 0> is an Opaque object" in refusal({Opaque(): 1}).message
    assert "at .<item of a set> is an Opaque object" in refusal({1, Opaque()}).message
    assert "at .<key 70>[130] is" in refusal({str(n): n for n in range(70)} | {CANARY: [0] * 130 + [Opaque()]}).message
    deep: object = Opaque()
    for _ in range(40):
        deep = [deep]
    assert f"at {'[0]' * 6}...{'[0]' * 6} is an Opaque" in refusal(deep).message


def test_a_field_that_is_not_there_is_refused() -> None:
    """R-109: a dataclass whose field was deleted fails for that call, by type."""
    broken = Point(1, date(2024, 5, 6))
    del broken.x
    assert (
        refusal([broken]).message
        == "the value at [0] is a Point object that failed with AttributeError while it was read"
    )


def test_the_cause_stays_in_the_process() -> None:
    """G8: the handler's own exception can be looked at by the program, and is told to nobody."""
    error = refusal([RaisingModel()])
    assert isinstance(error.cause, ValueError)
    assert error.cause.args == (CANARY,)
    assert refusal(Opaque()).cause is None


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_passes(stop: type[BaseException]) -> None:
    """G1: an interrupt of the process is not made an error of one call."""

    def stopped() -> Iterator[int]:
        yield 1
        raise stop

    with pytest.raises(stop):
        encode(stopped(), 100)
    with pytest.raises(stop):
        encode(1, 100, lambda _: list(stopped()))


def test_a_stack_that_is_nearly_full_is_an_encoding_error() -> None:
    """R-109: running out of stack while reading is that call's error, not a crash."""
    value: object = UserList([1])
    for _ in range(90):
        value = UserList([value])

    def below(frames: int) -> Encoded:
        return below(frames - 1) if frames else encode(value, 1000)

    assert not below(0).cut
    with pytest.raises(EncodingError, match="RecursionError") as caught:
        below(sys.getrecursionlimit() - len(traceback.extract_stack()) - 60)
    assert caught.value.__context__ is None


def test_a_released_buffer_is_an_encoding_error() -> None:
    """R-109: reading a value fails before its kind is known: still that call's error only."""
    view = memoryview(b"abc")
    view.release()
    assert refusal(view).message == "reading the result failed with ValueError"


# ------------------------------------------------------------------------------------------- the tool's own encoder


def test_an_encoder_replaces_the_value() -> None:
    """R-110: `encode=` takes the value and gives text or data, which is bounded in the same way."""
    assert encode(Opaque(), 100, lambda value: f"<{type(value).__name__}>").text == "<Opaque>"
    assert encode(Opaque(), 100, lambda _: {"at": NOON}).text == '{"at":"2024-05-06T12:30:00+00:00"}'
    assert encode("x", 100, lambda value: value * 1000).cut
    assert 98 <= len(encode("x", 100, lambda value: value * 1000).text) <= 100
    assert encode("x", 100, lambda _: b"\xff").text.startswith('"data:')


def test_an_encoder_that_fails_is_an_encoding_error() -> None:
    """R-109, G8: the exception's text stays in the process."""
    error = refusal(CANARY, Raising().fail)
    assert error.message == "the tool's encode= failed with ValueError"
    assert isinstance(error.cause, ValueError)


# ------------------------------------------------------------------------------------------- cutting text


def test_p55_long_text_is_cut_and_says_so() -> None:
    """P-55, R-110: 1.7 MB under 20 KB keeps head and tail, with a visible marker and the original size."""
    text = "".join(f"line {number}\n" for number in range(140_000))
    encoded = encode(text, 20_000)
    assert encoded.cut
    assert encoded.original_bytes == len(text)
    assert 19_990 <= len(encoded.text) <= 20_000
    head, _, rest = encoded.text.partition("[... ")
    told, _, tail = rest.partition(" bytes cut ...]")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) > 3 * len(tail) > 1000
    assert told == f"{len(text) - len(head) - len(tail)} of {len(text)}"


@pytest.mark.parametrize("character", ["x", "é", "€", "😀", "\x00"])
@pytest.mark.parametrize("limit", [MIN_BYTES, 65, 66, 67, 100, 1001])
def test_text_is_cut_between_characters(character: str, limit: int) -> None:
    """R-110: UTF-8 stays whole, and no room is wasted."""
    text = character * 5000
    encoded = encode(text, limit)
    size = len(encoded.text.encode())
    assert limit - 2 * len(character.encode()) - 8 < size <= limit
    assert set(encoded.text) <= set(character + "[... 0123456789 of bytes cut ...]")
    kept = (
        encoded.text.count(character) if character != "x" else len(encoded.text) - len("[...  of  bytes cut ...]") - 9
    )
    assert f"of {encoded.original_bytes} bytes cut" in encoded.text
    assert kept > 0


def test_the_failed_value_is_let_go() -> None:
    """G12: an error that was dealt with does not keep the value alive until the collector runs."""
    value = Lines()
    gone = weakref.ref(value)
    gc.disable()
    try:
        with contextlib.suppress(EncodingError):
            encode([value, Opaque()], 100)
        with contextlib.suppress(EncodingError):
            encode(value, 100, Raising().fail)
        del value
        assert gone() is None
    finally:
        gc.enable()


def test_a_limit_below_the_smallest_counts_as_the_smallest() -> None:
    """R-110: under MIN_BYTES there is no room for the note; the smallest limit is kept instead."""
    assert encode("x" * 60, 1) == Encoded("x" * 60, 60, False)
    assert len(encode("x" * 1000, 1).text) <= MIN_BYTES
    assert encode([1, 2, 3], 1).text == "[1,2,3]"
    assert encode(10**40, 1).text == str(10**40)
    assert len(recut("x" * 1000, "x" * 1000, 1)) <= MIN_BYTES


# ------------------------------------------------------------------------------------------- cutting JSON

ROWS = [{"id": number, "name": f"customer {number}", "ok": True} for number in range(1000)]


@pytest.mark.parametrize("as_text", [False, True], ids=["data", "JSON text"])
@pytest.mark.parametrize("limit", [200, 1000, 4096, 32_768])
def test_p56_json_stays_json_and_keeps_the_paging_data(limit: int, as_text: bool) -> None:
    """P-56: {'items': [1000 rows], 'next': 'c2'} parses after the cut, keeps `next` and says how many rows are gone."""
    value = {"items": ROWS, "next": "c2"}
    note, result = cut(json.dumps(value, indent=2) if as_text else value, limit)
    assert isinstance(result, dict)
    kept = len(result["items"])
    assert result == {"items": ROWS[:kept], "next": "c2"}
    assert kept >= limit // 100
    assert note["dropped"] == {".items": f"{1000 - kept} of 1000 items"}
    assert note["original_bytes"] == len(
        json.dumps(value, indent=2) if as_text else json.dumps(value, separators=(",", ":"))
    )


def test_lists_lose_items_from_the_end() -> None:
    """P-56: what is left of a list is its start, whole items, without a gap."""
    note, result = cut(list(range(100_000)), 500)
    assert isinstance(result, list)
    assert result == list(range(len(result)))
    assert len(result) > 90
    assert note["dropped"] == {".": f"{100_000 - len(result)} of 100000 items"}


def test_an_item_too_large_by_itself_is_shortened_not_dropped() -> None:
    """R-110: one huge item neither hides the small ones behind it nor disappears."""
    note, result = cut([{"id": 1}, {"id": 2, "text": "y" * 90_000}, {"id": 3}], 1000)
    assert isinstance(result, list)
    assert [item["id"] for item in result] == [1, 2, 3]
    assert result[1]["text"].startswith("yyyy")
    assert "of 90000 bytes cut" in result[1]["text"]
    dropped = note["dropped"]
    assert isinstance(dropped, dict)
    assert list(dropped) == ["[1].text"]
    assert dropped["[1].text"].endswith(" of 90000 bytes")


def test_keys_are_kept_and_share_the_room() -> None:
    """P-56: every key stays; small values stay whole, large ones share what is left, also what another left over."""
    value = {"log": "z" * 50_000, "rows": ROWS, "total": 1000, "one": ["w" * 3000], "at": NOON, "next": "c2"}
    note, result = cut(value, 3000)
    assert isinstance(result, dict)
    assert list(result) == list(value)
    assert (result["total"], result["next"], result["at"]) == (1000, "c2", NOON.isoformat())
    assert len(encode(value, 3000).text) > 2700
    dropped = note["dropped"]
    assert isinstance(dropped, dict)
    assert set(dropped) == {".log", ".rows", ".one[0]"}


def test_objects_with_too_many_keys_lose_whole_entries() -> None:
    """R-110: where not even the keys fit, entries stay whole as long as there is room, and the rest is counted."""
    value = {f"key {number}": f"value {number}" for number in range(100_000)}
    note, result = cut(value, 1000)
    assert isinstance(result, dict)
    assert list(result.items()) == list(value.items())[: len(result)]
    assert len(result) > 25
    assert note["dropped"] == {".": f"{100_000 - len(result)} of 100000 keys"}
    few = {f"key {number}": "v" * 100 for number in range(60)}
    assert isinstance(result := cut(few, 1500)[1], dict)
    assert 5 < len(result) < 60


def test_an_entry_whose_key_is_too_long_is_left_out() -> None:
    """R-110: a key is never shortened, since it would be another key; its entry goes, the others stay."""
    note, result = cut({"a": 1, "k" * 5000: 2, "b": NOON}, 300)
    assert result == {"a": 1, "b": NOON.isoformat()}
    assert note["dropped"] == {".": "1 of 3 keys"}
    note, result = cut({"k" * 5000: 2}, 300)
    assert result == "[cut]"
    assert note["dropped"] == {".": "5006 of 5006 bytes"}
    wide = {f"{number}" + "k" * 500: [1] for number in range(300)} | {"small": 1}
    assert len(encode(wide, 300).text) <= 300


def test_what_cannot_be_shown_in_part_is_replaced() -> None:
    """R-110: a long number, or a text for which there is no room, becomes the string "[cut]", and the note names it."""
    note, result = cut([10**300, 1], 200)
    assert result == ["[cut]", 1]
    assert note["dropped"] == {"[0]": "301 of 301 bytes"}
    note, result = cut(10**300, MIN_BYTES)
    assert result == "[cut]"
    assert cut(PurePosixPath("/" + "p" * 300), MIN_BYTES)[1] == "[cut]"
    assert cut({"a": "x" * 1000, "b": [[["y" * 1000]]]}, 100)[1] is not None


def test_notes_name_the_outermost_places_and_count_the_rest() -> None:
    """R-110: there is not always room to name each place; the others are counted."""
    value = {f"k{number}": ["x" * 100] * 50 for number in range(40)}
    note, result = cut(value, 4000)
    assert isinstance(result, dict)
    assert len(result) == 40
    dropped = note["dropped"]
    assert isinstance(dropped, dict)
    assert set(dropped) <= {f".k{number}" for number in range(40)} | {f".k{number}[0]" for number in range(40)}
    assert note["more_places"] > 10  # type: ignore[operator]


def test_places_that_are_no_names_are_quoted_and_short() -> None:
    """R-110: a key that is no plain name is told in quotes, its first 40 characters at most."""
    note, _ = cut({"a b": "x" * 5000, "q" * 60: "x" * 5000}, 4000)
    assert set(note["dropped"]) == {'["a b"]', f'["{"q" * 40}"]'}  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}' + " " * 300,
        '{"a": NaN}' + " " * 300,
        '{"a": 1e999}' + " " * 300,
        '{"a": 0.12345678901234567890123}' + " " * 300,
        '{"a": 1' + " " * 300,
        "[" * 100_000,
        "[INFO] " + "x" * 300,
        "[" + "1" * 5000 + "]",
    ],
    ids=["repeated key", "NaN", "overflow", "long float", "unclosed", "deep", "log", "long int"],
)
def test_text_that_json_would_change_is_cut_as_text(text: str) -> None:
    """P-56: text is cut as a JSON document only where nothing of it is lost by reading and writing it."""
    encoded = encode(text, 100)
    assert f"of {len(text)} bytes cut" in encoded.text


def test_json_text_loses_its_white_space_first() -> None:
    """P-56: an indented document that fits without its white space is not cut at all."""
    text = json.dumps({"items": ROWS[:20], "pi": 3.14, "big": 10**30}, indent=8)
    encoded = encode(text, len(text) - 1)
    assert not encoded.cut
    assert encoded.original_bytes == len(text)
    assert strict(encoded.text) == json.loads(text)
    assert encode(text, len(text)).text == text
    padded = " " * encoding.MAX_PARSED + text
    assert "bytes cut ...]" in encode(padded, 1000).text


def test_values_that_look_like_a_note_are_not_mistaken() -> None:
    """R-110: a cut value always lies below `result`, whatever keys it has itself."""
    value = {"truncated": {"original_bytes": 3}, "result": "x" * 1000}
    assert whole(value) == value
    note, result = cut(value, 300)
    assert note["original_bytes"] > 1000  # type: ignore[operator]
    assert isinstance(result, dict)
    assert result["truncated"] == {"original_bytes": 3}


# ------------------------------------------------------------------------------------------- cycles, depth, no end


def test_a_value_inside_itself_is_marked() -> None:
    """R-109: a cycle ends in a string, and the note names the place; what is merely held twice is no cycle."""
    value: dict[str, object] = {"x": 1}
    value["self"] = [value]
    note, result = cut(value, 1000)
    assert result == {"x": 1, "self": ["[cycle]"]}
    assert note["dropped"] == {".self[0]": "a value inside itself"}
    shared = [NOON.date(), {1}]
    assert whole([shared, shared]) == [["2024-05-06", [1]]] * 2

    def own() -> Iterator[object]:
        yield generator

    generator = own()
    assert cut(generator, 1000)[1] == ["[cycle]"]
    friends = [UserList() for _ in range(3)]
    for friend in friends:
        friend.extend(friends)
    assert "[cycle]" in json.dumps(cut(friends, 2000)[1])
    assert cut(value, MIN_BYTES)[0] == {"original_bytes": 26}


@pytest.mark.parametrize("kind", [list, UserList, lambda item: {"k": item[0]}, lambda item: iter(item)])
def test_what_is_nested_too_deep_is_marked(kind: type) -> None:
    """R-109: a hundred containers deep is read, more is a string and a note; no parser is broken by it."""
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = kind([value])
    if not isinstance(value, Iterator):
        assert not encode(value, WIDE).cut
    note, result = cut(kind([value]), 100_000)
    assert "[too deep]" in json.dumps(result)
    assert "nested more than 100 deep" in json.dumps(note)
    text = "[" * 200 + "]" * 200
    assert "[too deep]" in encode(text, 399).text


def test_what_stands_for_something_else_for_ever_is_marked() -> None:
    """G12: two kinds that stand for each other end at the depth limit."""
    assert cut(ChainA(), 1000)[1] == "[too deep]"


@pytest.mark.parametrize(
    "value",
    [
        lambda: itertools.count(),
        lambda: (NOON for _ in itertools.count()),
        lambda: ({"n": number} for number in itertools.count()),
        lambda: range(10**30),
        lambda: Bag(itertools.count()),
        lambda: {"a": itertools.repeat("x")},
        lambda: [itertools.count(), itertools.count(), 5],
        lambda: Endless(),
        lambda: [EndlessList()],
    ],
)
def test_what_has_no_end_is_read_to_a_bound(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """G12, R-110: reading ends; the size is then a lower bound, and the note says so."""
    monkeypatch.setattr(reading, "MAX_WORK", 100_000)
    note, result = cut(value(), 300)  # type: ignore[operator]
    assert note["at_least"] is True
    assert result
    assert "all after the first" in json.dumps(note["dropped"]) or "more_places" in note
    note, _ = cut(value(), MIN_BYTES)  # type: ignore[operator]
    assert note["at_least"] is True


class Endless(Mapping[str, int]):
    def items(self):  # type: ignore[no-untyped-def]
        return ((number, number) for number in itertools.count())

    def __getitem__(self, key: str) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class EndlessList(list[object]):
    def __iter__(self) -> Iterator[object]:
        return itertools.repeat(NOON)


def test_sizes_are_exact_where_there_is_an_end() -> None:
    """R-110: `original_bytes` is the size of the whole, also of what was never written down."""
    rows = [{**row, "tags": {"a", "b"}, "é": "ü" * 20} for row in ROWS]
    plain = [{**row, "tags": ["a", "b"]} for row in rows]
    size = len(json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode())
    for value in (rows, plain, iter(rows), tuple(plain), deque(plain)):
        assert encode(value, 1000).original_bytes == size
    assert encode({n: n for n in range(10_000)}, 100).original_bytes == len(
        json.dumps({n: n for n in range(10_000)}, separators=(",", ":"))
    )


class Seen:
    """Counts how often one of its kind is read."""

    count = 0

    def model_dump(self, **_: object) -> dict[str, int]:
        Seen.count += 1
        return {"n": 1}


@pytest.mark.parametrize(
    ("value", "dropped"),
    [
        (lambda: [Seen()] * 1_000_000, r"\d+ of 1000000 items"),
        (lambda: tuple([Seen()] * 1_000_000), r"\d+ of 1000000 items"),
        (lambda: dict.fromkeys(range(1_000_000), Seen()), r"\d+ of 1000000 keys"),
        (lambda: deque([Seen()] * 1_000_000), r"all after the first \d+ items"),
        (lambda: (Seen() for _ in range(1_000_000)), r"all after the first \d+ items"),
        (lambda: {Seen() for _ in range(1_000_000)}, r"2000001 of 2000001 bytes"),
    ],
)
def test_what_is_certain_not_to_fit_is_not_read_to_its_end(value: Callable[[], object], dropped: str) -> None:
    """R-110, G12: of a million items not one in fifty is looked at; the size is then told as a lower bound."""
    Seen.count = 0
    encoded = encode(value(), 2000)
    assert Seen.count < 20_000
    assert encoded.cut
    note = json.loads(encoded.text)["truncated"]
    assert note["at_least"] is True
    assert note["original_bytes"] == encoded.original_bytes
    assert 10_000 < encoded.original_bytes <= 8_000_001
    assert re.fullmatch(dropped, note["dropped"]["."])


def test_plain_data_that_is_certain_not_to_fit_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-110, G12: the same of numbers and words, which are measured many at a time; how many there are stays exact."""
    measured = 0
    write = reading.dumps

    def counting(value: object) -> str:
        nonlocal measured
        measured += len(value) if isinstance(value, list | dict) else 1
        return write(value)

    monkeypatch.setattr(reading, "dumps", counting)
    for value, size, told in (
        (list(range(1_000_000)), 6_888_891, "items"),
        ({str(n): n for n in range(1_000_000)}, 15_777_781, "keys"),
    ):
        measured = 0
        note, _ = cut(value, 2000)
        assert 0 < measured < 120_000
        assert note["at_least"] is True
        assert 1_000_000 < note["original_bytes"] < size
        assert re.fullmatch(rf"\d+ of 1000000 {told}", note["dropped"]["."])


def test_what_fits_is_read_to_its_end_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-110: reading stops early only where a cut is certain; what fits comes whole, what lies beside it too."""
    monkeypatch.setattr(reading, "MAX_MEASURED", 0)
    for value in ([Seen()] * 500, {n: Seen() for n in range(500)}, set(range(500)), [[n] for n in range(500)]):
        encoded = encode(value, WIDE)
        assert not encoded.cut
        assert strict(encoded.text)
    _, result = cut({"rows": ROWS, "more": ROWS, "words": set(range(500)), "next": "c2", "total": {"n": 5}}, 2000)
    assert result["next"] == "c2"
    assert result["total"] == {"n": 5}
    assert len(result["rows"]) > 5
    assert len(result["more"]) > 5
    note, _ = cut([ROWS] * 100, 2000)
    assert note["dropped"]["."].endswith(" of 100 items")


def test_json_text_keeps_its_exact_size() -> None:
    """R-110: the size of a text is known without reading what it says, so it is never a lower bound."""
    text = json.dumps(list(range(200_000)))
    note, result = cut(text, 2000)
    assert note["original_bytes"] == len(text)
    assert "at_least" not in note
    assert note["dropped"]["."] == f"{200_000 - len(result)} of 200000 items"


@pytest.mark.parametrize("leaf", [1, {1}, "x" * 5000])
def test_parts_held_many_times_cost_their_reading_once(leaf: object) -> None:
    """G12: ten levels of ten references each are 10**30 values; the size is known without visiting them."""
    value: object = [leaf] * 10
    for _ in range(30):
        value = [value] * 10
    note, result = cut(value, 300)
    assert note["original_bytes"] == 10**15 - 1
    assert note["at_least"] is True
    assert result
    value = [leaf] * 10
    for _ in range(5):
        value = [value] * 10
    size = len(json.dumps([1] if leaf == {1} else leaf)) * 10**6 + sum(11 * 10**n for n in range(6))
    assert encode(value, 300).original_bytes == size
    assert encode(value, MIN_BYTES).original_bytes == size


def test_dense_cycles_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """G12: twelve objects that all hold one another have millions of paths; reading ends all the same."""
    monkeypatch.setattr(reading, "MAX_WORK", 1 << 20)
    nodes: list[list[object]] = [[] for _ in range(12)]
    for node in nodes:
        node += nodes
        node.append("x" * 9000)
    note, result = cut(nodes, 500)
    assert result
    assert note["at_least"] is True


# ------------------------------------------------------------------------------------------- what changes meanwhile


class Meddler:
    """Changes what was already read while it is read itself."""

    def __init__(self, victim: list[object]) -> None:
        self.victim = victim

    def tolist(self) -> list[object]:
        self.victim.extend(["x" * 100] * 10)
        return []


def test_a_value_that_grows_while_it_is_read_never_breaks_the_limit() -> None:
    """R-110: the limit holds whatever happens; a value that another thread changes is an error of that call."""
    victim: list[object] = [1]
    with pytest.raises(EncodingError, match="changed while it was read"):
        encode([victim, Meddler(victim)], 500)


@pytest.mark.parametrize("value", [[object()], {"a": object()}])
def test_a_value_swapped_after_the_look_is_told_apart(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-109: what slips in between looking and writing is refused like anything else."""
    for room in (encoding, reading):
        monkeypatch.setattr(room, "room_left", lambda *_: 5)
    assert "is an object object" in refusal(value).message


def test_the_plain_writer_stands_in_for_the_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-115: without CPython's C encoder the bytes are the same."""
    monkeypatch.setattr("json.encoder.c_make_encoder", None)
    values = [5, "é\n", {"a": [1, None, 1.5], "t": NOON}, [], True]
    quick = [encode(value, 100).text for value in values]
    for room in (encoding, reading):
        monkeypatch.setattr(room, "dumps", jsontext._fast_dumps())
    assert [encode(value, 100).text for value in values] == quick


# ------------------------------------------------------------------------------------------- the batch


def test_r111_the_batch_total_is_bounded() -> None:
    """R-111, P-55: five dumps and a small result under 50 KB: the small one is intact, the others are marked."""
    values = ["d" * 1_700_000] * 5 + ["small"]
    texts = [encode(value, 20_000).text for value in values]
    cap = fit_batch([len(text) for text in texts], 50_000)
    assert cap is not None
    texts = [recut(value, text, cap) for value, text in zip(values, texts, strict=True)]
    assert sum(map(len, texts)) <= 50_000
    assert sum(map(len, texts)) > 49_900
    assert texts[-1] == "small"
    assert all("of 1700000 bytes cut" in text for text in texts[:-1])
    assert texts[:-1] == [encode(value, cap).text for value in values[:-1]]


@given(
    lengths=st.lists(st.integers(0, 2_000), max_size=12),
    first=st.sets(st.integers(0, 11)),
    total=st.integers(0, 8_000),
    least=st.integers(0, 100),
)
def test_r113_some_results_come_first(lengths: list[int], first: set[int], total: int, least: int) -> None:
    """R-111, R-113: the total is kept as far as the least of each allows; those that come first are cut only where the
    others have no more than their least; nobody gets more than it has, and large ones of one kind get the same.
    """
    caps = share_room(lengths, first, total, least)
    if caps is None:
        assert sum(lengths) <= total
        return
    assert sum(lengths) > total
    floor = sum(min(length, least) for length in lengths)
    assert sum(caps) <= max(total, floor)
    assert all(min(length, least) <= cap <= length for length, cap in zip(lengths, caps, strict=True))
    cut = {place for place, length in enumerate(lengths) if caps[place] < length}
    if cut & first:
        behind = [place for place in range(len(lengths)) if place not in first]
        more = sum(caps[place] - min(lengths[place], least) for place in behind)
        assert more < len(first), "more than what was left over by rounding"
    for kind in (cut & first, cut - first):
        assert len({max(caps[place], least) for place in kind}) <= 1


def test_r111_two_hundred_results_of_three_kilobytes() -> None:
    """R-111: 200 x 3 KB do not push 600 KB."""
    values = [[{"id": number, "text": "t" * 50} for number in range(45)]] * 200
    texts = [encode(value, 32_768).text for value in values]
    cap = fit_batch([len(text) for text in texts], 131_072)
    assert cap == 131_072 // 200
    texts = [recut(value, text, cap) for value, text in zip(values, texts, strict=True)]
    assert sum(map(len, texts)) <= 131_072
    assert all(isinstance(strict(text), dict) for text in texts)


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(-5, 2000))
def test_r111_the_cap_is_the_largest_that_fits(lengths: list[int], total: int) -> None:
    """R-111, R-115: never exceeded, never one byte too small, whatever the order of the results."""
    cap = fit_batch(lengths, total)
    if cap is None:
        assert sum(lengths) <= max(total, 0)
        return
    assert sum(min(length, cap) for length in lengths) <= max(total, 0)
    assert sum(min(length, cap + 1) for length in lengths) > max(total, 0)
    assert fit_batch(lengths[::-1], total) == cap


def test_recut_reads_the_text_not_the_value() -> None:
    """R-111: an iterator is used up and a list may have changed since; what was encoded is what is cut."""
    generator = numbers(1000)
    first = encode(generator, 32_768)
    assert not first.cut
    assert recut(generator, first.text, 200) == encode(list(range(1000)), 200).text
    grown = list(range(1000))
    text = encode(grown, 32_768).text
    grown.clear()
    assert recut(grown, text, 200) == encode(list(range(1000)), 200).text
    calls: list[object] = []

    def encoder(value: object) -> object:
        calls.append(value)
        return "e" * 5000

    text = encode(1, 1000, encoder).text
    again = recut(1, text, 100, encoder)
    assert "of 5000 bytes cut" in again
    assert len(again) == 100
    assert calls == [1]
    assert "of 5000 bytes cut" in recut(1, encode(1, 9000, encoder).text, 100, encoder)


EVERYDAY = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters(exclude_categories=()), max_size=40),
        st.sampled_from(["", "  ", "\ud800", "\ud83d\ude00", "é" * 40, "x" * 64, "[1,  2]", -0.0, 1e300, NOON]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(EVERYDAY, st.integers(0, 90))
@example(float("nan"), 90)
@example(float("-inf"), 0)
@example(True, 0)
@example(None, 0)
@example(1.7976931348623157e308, 0)
@example("é" * 40, 79)
@example("é" * 40, 80)
@example("\ud800", 90)
def test_r115_the_short_way_gives_the_same_bytes(value: object, limit: int) -> None:
    """R-115: an everyday value that is written at once comes out as it does where it is read part by part.

    An encoder of the tool's own keeps a value off the short way; this one changes nothing.
    """
    assert encode(value, limit) == encode(value, limit, lambda same: same)


def test_recut_carries_the_note_on() -> None:
    """R-110, R-111: sizes and counts stay those of the whole, however often it is cut."""
    value = {"items": iter(ROWS), "text": "x" * 50_000, "short": "y" * 300, "next": "c2"}
    text = encode(value, 2000).text
    first = json.loads(text)
    for limit in (1900, 1000, 600):
        text = recut(None, text, limit)
        assert len(text) <= limit
        loaded = json.loads(text)
        note = loaded["truncated"]
        assert note["original_bytes"] == first["truncated"]["original_bytes"]
        assert loaded["result"]["next"] == "c2"
        kept = len(loaded["result"]["items"])
        assert loaded["result"]["items"] == ROWS[:kept]
        assert note["dropped"][".items"] == f"{1000 - kept} of 1000 items"
        assert " of 50000 bytes cut ...]" in loaded["result"]["text"]
    assert recut(None, text, 600) == text


def test_recut_keeps_the_notes_of_what_it_leaves_whole() -> None:
    """R-110: a place cut before and untouched now is still named; so is what had no end."""
    endless = {"n": itertools.chain(range(3), iter(lambda: 1, 0)), "rows": ROWS}
    self_holding: dict[str, object] = {"a": ["x" * 40] * 100, "list": [{}], "k": "v"}
    self_holding["list"][0]["me"] = self_holding  # type: ignore[index]
    text = encode(self_holding, 2000).text
    again = json.loads(recut(None, text, 700))
    assert again["truncated"]["dropped"][".list[0].me"] == "a value inside itself"
    assert again["result"]["list"] == [{"me": "[cycle]"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "MAX_WORK", 20_000)
        text = encode(endless, 2000).text
    note = json.loads(text)["truncated"]
    assert note["at_least"] is True
    again = json.loads(recut(None, text, 300))
    assert again["truncated"]["at_least"] is True
    assert again["truncated"]["dropped"][".n"].startswith("all after the first ")
    many = encode({f"k{number}": ["x" * 100] * 50 for number in range(40)}, 4000).text
    more = json.loads(many)["truncated"]["more_places"]
    assert json.loads(recut(None, many, 3990))["truncated"]["more_places"] >= more


def test_recut_of_a_text_that_is_not_the_values_own() -> None:
    """R-111: a summary, or an error's content, is cut for what it is."""
    summary = "s" * 500
    assert recut("v" * 5000, summary, 100).startswith("sss")
    assert "of 500 bytes" in recut("v" * 5000, summary, 100)
    error = json.dumps({"code": "handler_error", "message": "m" * 500})
    again = json.loads(recut(None, error, 200))
    assert again["result"]["code"] == "handler_error"
    assert recut("value", "short", 100) == "short"
    assert recut(b"\xff" * 500, encode(b"\xff" * 500, WIDE).text, 200) == encode(b"\xff" * 500, 200).text
    pretty = json.dumps(ROWS[:10], indent=9)
    compact = encode(pretty, len(pretty) - 1).text
    assert json.loads(recut(pretty, compact, 300))["truncated"]["original_bytes"] == len(compact)
    forged = '{"truncated":{"original_bytes":"x"},"result":"' + "r" * 300 + '"}'
    assert json.loads(recut(None, forged, 200))["truncated"]["original_bytes"] == len(forged)
    assert "of 400 bytes" in recut("", "[... 1 of 3 bytes cut ...]" + "q" * 374, 100)
    huge = '{"truncated":{"original_bytes":1' + "0" * 100 + '},"result":"' + "r" * 300 + '"}'
    assert len(recut(None, huge, MIN_BYTES)) <= MIN_BYTES
    for limit in range(MIN_BYTES, 90):
        assert len(recut(None, forged, limit)) <= limit


def test_encoded_is_frozen_and_its_repr_shows_sizes_only() -> None:
    """G8, R-115: what crosses rooms cannot change and shows no value."""
    for value in (CANARY, [CANARY], NOON):
        encoded = encode(value, 100)
        assert isinstance(encoded, Encoded)
        assert CANARY not in repr(encoded)
        with pytest.raises(FrozenInstanceError):
            encoded.text = "x"  # type: ignore[misc]
    assert encode(CANARY, 100) == Encoded(CANARY, len(CANARY), False)
    assert repr(Encoded("abc", 5, True)) == "Encoded(3 characters, original_bytes=5, cut=True)"


# ------------------------------------------------------------------------------------------- for any value


def _text() -> st.SearchStrategy[str]:
    odd = st.sampled_from(
        ["\ud800", "\udfff\ud83d\ude00", "😀" * 30, '"\\\n\x00' * 20, " ", "[1,2]", '{"a":1}', "x" * 300]
    )
    return st.text(max_size=40) | odd


_hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**100, 10**120),
    st.floats(),
    _text(),
    st.binary(max_size=40),
    st.dates(),
    st.datetimes(timezones=st.none() | st.just(UTC)),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(version=4),
    st.fractions(max_denominator=100),
    st.complex_numbers(),
    st.sampled_from([*Color, *Level, *Kind, Path("a/b"), Text("text"), Number(3), Real(0.5), Row(1, "x")]),
    st.just(5000).map(lambda digits: 10**digits),
)
_leaf = _hashable | st.sampled_from(
    [Point(1, date(2024, 5, 6), {"b", "a"}), Customer(id=UUID_, since=NOON, token=pydantic.SecretStr("x")), KeyError(1)]
)


def _containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.lists(inner, max_size=8)
    return st.one_of(
        lists,
        lists,
        lists.map(tuple),
        lists.map(deque),
        st.lists(_leaf, max_size=4).map(lambda items: items * 30),
        st.dictionaries(_hashable, inner, max_size=8),
        st.dictionaries(_text(), inner, max_size=8),
        st.dictionaries(_text(), inner, max_size=8).map(UserDict),
        st.sets(_hashable, max_size=8),
        st.frozensets(_hashable, max_size=8),
    )


_value = st.recursive(_leaf, _containers, max_leaves=25)
_limits = st.integers(MIN_BYTES, 600)


@settings(max_examples=150)
@given(_value, _limits)
@example({"a": "x"}, MIN_BYTES)
def test_r115_any_value_under_any_limit(value: object, limit: int) -> None:
    """G1, R-110, R-115: valid UTF-8, within the limit, JSON unless text, always the same, never empty, honest."""
    encoded = encode(value, limit)
    assert encoded == encode(value, limit)
    assert encoded.text.strip()
    size = len(encoded.text.encode("utf-8", "strict"))
    assert size <= limit
    everything = encode(value, WIDE)
    assert not everything.cut
    assert encoded.original_bytes == everything.original_bytes
    if everything.text == EMPTY:
        assert encoded == everything
        return
    assert everything.original_bytes == len(everything.text.encode())
    is_text = isinstance(value, str) or (isinstance(value, bytes) and not everything.text.startswith('"data:'))
    if not is_text:
        loaded = strict(encoded.text)
        assert encoded.cut == (everything.original_bytes > limit)
        if encoded.cut:
            assert loaded["truncated"]["original_bytes"] == everything.original_bytes  # type: ignore[index, call-overload]
    if not encoded.cut and everything.original_bytes <= limit:
        assert encoded.text == everything.text
    if is_text and encoded.cut:
        assert f"of {everything.original_bytes} bytes cut ...]" in encoded.text or strict(encoded.text)


@settings(max_examples=120)
@given(_value, _limits, st.integers(MIN_BYTES, 3000))
def test_r111_any_value_cut_again(value: object, limit: int, earlier: int) -> None:
    """R-111, R-115: cut again is within the limit and valid; what was whole, or text, comes out as if cut but once."""
    first = encode(value, max(limit, earlier))
    again = recut(value, first.text, limit)
    assert again == recut(value, first.text, limit)
    assert again.strip()
    assert len(again.encode()) <= limit
    once = encode(value, limit)
    text = isinstance(value, str | bytes)
    if (not first.cut and not (text and first.text[:1] in "[{")) or (text and "bytes cut ...]" in first.text):
        assert again == once.text
    elif not text:
        loaded = strict(again)
        assert loaded["truncated"]["original_bytes"] == first.original_bytes  # type: ignore[index, call-overload]


@settings(max_examples=150)
@given(st.lists(_leaf, max_size=30), _limits)
def test_iterators_come_out_as_their_lists(items: list[object], limit: int) -> None:
    """R-110, R-115: how a sequence is handed over makes no difference."""
    expected = encode(items, limit)
    assert encode(iter(items), limit) == expected
    assert encode((item for item in items), limit) == expected
    assert encode(deque(items), limit) == expected
    assert encode(UserList(items), limit) == expected


@settings(max_examples=40)
@given(_value)
def test_g8_no_value_is_named_in_an_error(value: object) -> None:
    """G8: wherever an object without a form lies, its place is told without the keys or values around it."""
    error = refusal({CANARY: [value, {CANARY: Opaque()}]})
    assert error.message.startswith("the value at .<key 0>[1].<key 0> is an Opaque object")
