"""The pure room of approvals: decisions, what they are bound to, the state machine, the book, the written batch."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from towerman.approvals import (
    NEVER,
    Approval,
    ApprovalRequest,
    Approved,
    Book,
    Denied,
    Open,
    Suspended,
    binding,
    new_id,
    read_state,
    secret_bytes,
    shape,
    write_state,
)
from towerman.calls import Batch, Call, make_result
from towerman.errors import InputError, PolicyError

# ==================================================================== decisions


def test_decisions_are_looked_at_when_they_are_made() -> None:
    """A decision that could not be used is told where it is made, with the field and what is allowed."""
    assert Approved().arguments is None
    assert Approved({"a": 1}, expires_in=2).expires_in == 2
    for wrong in ([1], "x", {1: 2}):
        with pytest.raises(PolicyError, match=r"^Approved\.arguments: a mapping of names to values"):
            Approved(wrong)  # type: ignore[arg-type]
    for late in (0, -1, True, "1", float("nan")):
        with pytest.raises(PolicyError, match=r"^Approved\.expires_in: "):
            Approved(expires_in=late)  # type: ignore[arg-type]
    assert Denied().reason == ""
    with pytest.raises(PolicyError, match=r"^Denied\.reason: text; got 5"):
        Denied(5)  # type: ignore[arg-type]


def test_g8_no_repr_shows_arguments_or_reasons() -> None:
    """G8: requests and decisions show no argument and no words of a person in their repr."""
    request = ApprovalRequest("apr_1", "t", "run", "c", "d" * 32, 5.0, {"a": "zqxj"})
    for one in (request, Approved({"a": "zqxj"}), Denied("zqxj"), Approval("apr_1")):
        assert "zqxj" not in repr(one)
    assert "apr_1" in repr(request)


def test_names_differ() -> None:
    """Nobody can guess the name of a request, and no two have the same."""
    assert len({new_id() for _ in range(1000)}) == 1000
    assert all(len(new_id()) == 28 for _ in range(3))


# ==================================================================== binding

KEY = b"k" * 32


class Size(Enum):
    """Of the tests."""

    SMALL = 1
    LARGE = 2


class Point(NamedTuple):
    """Of the tests."""

    x: int
    y: int


@dataclasses.dataclass
class Place:
    """Of the tests."""

    name: str


class Model(pydantic.BaseModel):
    """Of the tests."""

    model_config = pydantic.ConfigDict(extra="allow")
    name: str
    size: Size = Size.SMALL


class Hostile:
    """Whatever is asked of it, it fails."""

    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __hash__ = __eq__ = __str__  # type: ignore[assignment]


class Word(str):
    """A text with a class of its own."""


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

DIFFERENT: list[Any] = [
    None,
    True,
    1,
    1.0,
    "1",
    "",
    [],
    [1],
    [[1]],
    ["float", "1.0"],
    {},
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {"a": {"b": 1}},
    {1},
    {1, 2},
    b"1",
    Size.SMALL,
    Size.LARGE,
    Point(1, 2),
    Point(2, 1),
    Place("a"),
    Place("b"),
    Model(name="a"),
    Model(name="b"),
    Model(name="a", size=Size.LARGE),
    Model(name="a", more=1),  # type: ignore[call-arg]
    NOON,
    NOON.replace(hour=13),
    NOON.date(),
    Decimal("1.0"),
    Decimal("1.00"),
    PurePosixPath("a"),
    Word("1"),
    float("nan"),
    float("inf"),
    10**400,
]


def bound(value: Any, emitted: Any = "{}") -> str:
    """The binding of one argument."""
    return binding(KEY, "t", emitted, {"a": value})


def test_s4_whatever_a_handler_could_tell_apart_is_another_call() -> None:
    """S4: values of other types, or with anything else in them, give another digest; the same ones the same."""
    found = [bound(value) for value in DIFFERENT]
    assert len(set(found)) == len(found)
    assert found == [bound(value) for value in DIFFERENT]
    assert {len(one) for one in found} == {32}
    assert binding(KEY, "t", "{}", {}) != binding(KEY, "u", "{}", {})
    assert binding(KEY, "t", "{}", {}) != binding(b"other", "t", "{}", {})
    assert binding(KEY, "t", '{"a":1}', {}) != binding(KEY, "t", '{"a":2}', {})


def test_order_and_spacing_are_no_difference() -> None:
    """The order of names, of a set, and the spaces of JSON text say nothing."""
    assert bound({"a": 1, "b": 2}) == bound({"b": 2, "a": 1})
    assert bound({"x", "y", "z"}) == bound({"z", "y", "x"})
    assert bound((1, 2)) == bound([1, 2])
    assert binding(KEY, "t", '{"a": 1, "b": 2}', {}) == binding(KEY, "t", '{"b":2,"a":1}', {})
    assert binding(KEY, "t", {"b": 2, "a": 1}, {}) == binding(KEY, "t", '{"b":2,"a":1}', {})
    assert binding(KEY, "t", "  ", {}) == binding(KEY, "t", "{}", {})


def test_what_has_no_one_spelling_counts_by_what_the_model_wrote() -> None:
    """Objects that cannot be spelled out, text that is no JSON, deep and knotted values: a digest all the same."""
    assert bound(object()) == bound(object())
    assert bound(object(), "1") != bound(object(), "2")
    assert bound(Hostile()) == bound(Hostile())
    assert bound("x", "{not json") != bound("x", "{not JSON")
    knot: list[Any] = []
    knot.append(knot)
    assert len(bound(knot)) == 32
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert len(bound(deep)) == 32
    assert len(binding(KEY, "t", "[" * 100_000, {})) == 32
    assert len(bound(10**5000)) == 32
    assert len(bound("\ud800")) == 32


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_json_text_and_its_value_are_the_same_call(value: Any) -> None:
    """What the model wrote as text and the same as a mapping are bound alike."""
    text = json.dumps({"a": value})
    assert binding(KEY, "t", text, {}) == binding(KEY, "t", json.loads(text), {})


def test_words_of_a_schema_are_no_change_of_it() -> None:
    """A new description is the same tool; another type, bound or property is not. A property may be called `title`."""
    schema: dict[str, Any] = {"type": "object", "properties": {"title": {"type": "string", "description": "a"}}}
    other = {"type": "object", "description": "b", "properties": {"title": {"type": "string", "title": "c"}}}
    assert shape(schema) == shape(other)
    assert shape(schema) != shape({"type": "object", "properties": {"title": {"type": "integer"}}})
    assert shape(schema) != shape({"type": "object", "properties": {}})
    assert shape({"enum": ["a", "b"]}) != shape({"enum": ["a"]})


# ==================================================================== the state machine


def asked(lifetime: float = 10.0) -> Approval:
    """A request made at 0."""
    approval = Approval("apr_1")
    approval.ask(0.0, lifetime)
    return approval


def test_the_first_decision_counts() -> None:
    """S4: approved once; the same again changes nothing, another one is ignored."""
    approval = asked()
    assert (approval.open, approval.cleared) == (True, False)
    assert approval.decide(Approved(), 1.0, 10.0) == "taken"
    assert (approval.state, approval.cleared, approval.open) == ("approved", True, False)
    assert approval.decide(Approved(), 2.0, 10.0) == "again"
    assert approval.decide(Approved({"a": 1}), 2.0, 10.0) == "ignored"
    assert approval.decide(Denied("no"), 2.0, 10.0) == "ignored"
    assert approval.state == "approved"


def test_a_denial_stays() -> None:
    """S4: denied once; a yes that comes later is ignored."""
    approval = asked()
    assert approval.decide(Denied("no"), 1.0, 10.0) == "taken"
    assert approval.decide(Denied("other words"), 1.0, 10.0) == "again"
    assert approval.decide(Approved(), 1.0, 10.0) == "ignored"
    assert (approval.state, approval.reason, approval.cleared) == ("denied", "no", False)
    assert not approval.look(100.0), "what was denied does not expire"


def test_edited_arguments_are_part_of_the_decision() -> None:
    """Two edits are the same decision only where they bring the same."""
    approval = asked()
    assert approval.decide(Approved({"a": 1, "b": 2}), 1.0, 10.0) == "taken"
    assert approval.edited == {"a": 1, "b": 2}
    assert approval.decide(Approved({"b": 2, "a": 1}), 1.0, 10.0) == "again"
    assert approval.decide(Approved({"b": 2, "a": 1.0}), 1.0, 10.0) == "ignored"
    assert approval.decide(Approved(), 1.0, 10.0) == "ignored"


def test_r126_an_approval_has_a_lifetime() -> None:
    """R-126: no decision in time, and a decision that is not used in time: expired, at the very instant."""
    approval = asked()
    assert not approval.look(9.999)
    assert approval.look(10.0)
    assert approval.state == "expired"
    assert not approval.look(11.0), "once"
    assert approval.decide(Approved(), 11.0, 10.0) == "late"
    late = asked()
    assert late.decide(Denied(), 10.0, 10.0) == "late", "expired, not denied"
    assert late.state == "expired"
    given_up = asked()
    assert given_up.decide(Approved(), 1.0, 10.0) == "taken"
    assert given_up.look(10.0)
    assert (given_up.state, given_up.cleared) == ("expired", False)


def test_a_yes_may_hold_for_another_time() -> None:
    """`expires_in` counts from the decision, and is bounded by the tower's lifetime."""
    short = asked()
    short.decide(Approved(expires_in=2.0), 5.0, 10.0)
    assert short.expires == 7.0
    longer = asked()
    longer.decide(Approved(expires_in=8.0), 5.0, 10.0)
    assert longer.expires == 13.0
    longest = asked()
    longest.decide(Approved(expires_in=1e9), 5.0, 10.0)
    assert longest.expires == 15.0


def test_it_is_claimed_once() -> None:
    """S4: the first who asks has it, and has it again (attempts of one call); nobody else does."""
    approval = asked()
    approval.decide(Approved(), 1.0, 10.0)
    one, other = object(), object()
    assert approval.claim(one)
    assert not approval.claim(other)
    assert approval.claim(one)
    assert (approval.used, approval.settled) == (True, False)
    assert not approval.look(100.0), "what was used in time does not expire"
    approval.settle(make_result(0, "", "t", "ok", None, "m", "c"))
    assert approval.settled
    assert not approval.claim(one)
    assert approval.decide(Approved(), 100.0, 10.0) == "again"
    assert approval.decide(Denied(), 100.0, 10.0) == "ignored"
    assert repr(approval) == "Approval('apr_1', approved, used)"


def test_a_record_that_needs_nobody() -> None:
    """The record of a call that only stands behind another one: nobody decides it, and it is claimed all the same."""
    record = Approval("apr_2", needed=False)
    assert (record.open, record.cleared, record.asked, record.expires) == (False, True, False, NEVER)
    assert record.claim(1)
    assert not record.claim(2)


class Life(RuleBasedStateMachine):
    """One approval under any events, against a plain account of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.approval = Approval("apr_1")
        self.approval.ask(0.0, 10.0)
        self.first: str | None = None
        self.holder: int | None = None
        self.claims = 0

    @rule(step=st.floats(0.0, 6.0))
    def time_passes(self, step: float) -> None:
        """It is looked at, as on a timer."""
        self.now += step
        self.approval.look(self.now)

    @rule(yes=st.booleans(), expires_in=st.none() | st.floats(0.1, 20.0))
    def a_decision(self, yes: bool, expires_in: float | None) -> None:
        """A person answers."""
        before = self.approval.state
        heard = self.approval.decide(Approved(expires_in=expires_in) if yes else Denied(), self.now, 10.0)
        if heard == "taken":
            assert self.first is None
            self.first = "approved" if yes else "denied"
        elif before != "pending":
            assert self.approval.state in (before, "expired")

    @rule(who=st.integers(1, 3))
    def a_claim(self, who: int) -> None:
        """Somebody wants to start the call, as the runner does: cleared, and in time."""
        self.approval.look(self.now)
        if not self.approval.cleared:
            return
        if self.approval.claim(who):
            assert self.holder in (None, who)
            self.holder = who

    @invariant()
    def what_must_hold(self) -> None:
        """No yes without a decision, no use without a yes, one holder."""
        state = self.approval.state
        assert state in ("pending", "approved", "denied", "expired")
        if state in ("approved", "denied"):
            assert self.first == state
        if self.first == "denied":
            assert state == "denied"
        if self.holder is not None:
            assert self.first == "approved"
            assert state == "approved"
        assert self.approval.expires <= self.now + 10.0 or self.approval.expires == 10.0


TestLife = Life.TestCase


# ==================================================================== the book


def test_g12_the_book_forgets_what_is_over() -> None:
    """G12: records are kept as long as their time lasts, and no more than a bound of them; results fewer."""
    book = Book(most=3, results=2)
    records = []
    for number in range(4):
        record = Approval(f"apr_{number}")
        record.ask(float(number), 10.0)
        records.append(record)
        book.keep(record, float(number))
    assert len(book) == 3
    assert book.find("apr_0") is None
    assert [record.kept for record in records] == [False, True, True, True]
    last = Approval("apr_9")
    last.ask(12.0, 10.0)
    book.keep(last, 12.0)
    assert [book.find(f"apr_{number}") is not None for number in (1, 2, 3)] == [False, False, True]
    for number in (1, 2, 3):
        book.settle(records[number], make_result(0, "", "t", "ok", None, "m", f"{number}"))
    assert [record.result is not None for record in records] == [False, False, True, True]
    assert all(record.settled for record in records[1:])


def test_a_book_of_nothing_but_what_is_over() -> None:
    """A record that is over when it comes is not kept."""
    book = Book()
    record = Approval("apr_1")
    record.ask(0.0, 1.0)
    book.keep(record, 5.0)
    assert len(book) == 0


# ==================================================================== the written batch

SECRET = b"not to be guessed"
RESULT = make_result(
    1,
    "c1",
    "diag",
    "ok",
    None,
    "The call succeeded.",
    "content",
    value=object(),
    started=True,
    ran=0.5,
    waited_for=("call 0", "pool x"),
    attempts=1,
    original_bytes=7,
)
BATCH = Batch(
    (
        Call("cleanup", '{"a": 1}', "c0"),
        Call("diag", {"b": [1, {"c": "\ud800ü"}]}, "c1", ("c0",), "key"),
        Call("cleanup", {}, "c2"),
    ),
    "openai",
    {"role": "assistant", "content": "x"},
    response_id="r1",
)
SUSPENDED = Suspended(
    BATCH,
    "run-1",
    "acme",
    3,
    "a notice",
    "00ff",
    (None, RESULT, None),
    {
        0: Open("apr_0", True, "pending", "b0", "s0", 1e9),
        2: Open("apr_2", True, "approved", "b2", "s2", 1e9 + 0.5, True, {"x": 1}),
    },
    {"apr_9": "denied"},
)


FILLED = dataclasses.replace(
    SUSPENDED,
    opened={
        0: dataclasses.replace(SUSPENDED.opened[0], written={"a": "${c1.b}"}),
        2: dataclasses.replace(SUSPENDED.opened[2], written='{"x": "${c1}"}'),
    },
)
"""Results were filled into the arguments of its open calls."""


def same_batch(one: Suspended, other: Suspended) -> bool:
    """Equal but for what stays in its process."""
    plain = [dataclasses.replace(each, results=()) for each in (one, other)]
    contents = [
        [None if r is None else (r.index, r.content, r.waited_for) for r in each.results] for each in (one, other)
    ]
    return plain[0] == plain[1] and contents[0] == contents[1]


@pytest.mark.parametrize(("batch", "version"), [(SUSPENDED, 1), (FILLED, 2)], ids=["plain", "filled"])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_was_written_is_read(secret: bytes | None, batch: Suspended, version: int) -> None:
    """A batch comes back whole, out of the text, its bytes, or its object in another spelling. Its form is the oldest
    that holds it.
    """
    text = write_state(batch, secret)
    outer = json.loads(text)
    assert outer["towerman_state"] == version
    respelled = json.dumps(outer, indent=3, sort_keys=True)
    for given_ in (text, text.encode(), bytearray(text.encode()), outer, respelled):
        found = read_state(given_, secret)
        assert same_batch(found, batch)
        assert found.results[1] is not None
        assert found.results[1].value is None
    assert (outer["signature"] is None) == (secret is None)


def test_mappings_that_are_no_dicts_are_written() -> None:
    """Arguments in a mapping of another class come back as an object."""
    batch = dataclasses.replace(BATCH, calls=(Call("t", {"a": MappingProxyType({"b": 1})}),))
    one = Suspended(batch, "r", None, 1, None, "", (None,), {0: Open("apr_0", False, "pending", "", "", 1.0)})
    assert read_state(write_state(one, None), None).batch.calls[0].arguments == {"a": {"b": 1}}


def test_what_json_has_no_form_for_is_told() -> None:
    """An open call with arguments that are no JSON: a clear error, without a value."""
    for wrong in (object(), float("nan"), {1, 2}):
        batch = dataclasses.replace(BATCH, calls=(Call("t", {"a": wrong}),))
        with pytest.raises(InputError, match=r"^state: an open call has arguments that JSON") as told:
            write_state(dataclasses.replace(SUSPENDED, batch=batch), None)
        assert told.value.__cause__ is None


TEXT = write_state(SUSPENDED, SECRET)
UNSIGNED = write_state(SUSPENDED, None)


def with_outer(**fields: Any) -> str:
    """The signed text with other fields outside."""
    return json.dumps({**json.loads(TEXT), **fields})


WRONG_TEXTS: list[tuple[Any, bytes | None, str]] = [
    ("", SECRET, "no JSON text"),
    (b"\xff\xfe\x00", SECRET, "no JSON text"),
    (TEXT[:-9], SECRET, "no JSON text"),
    ("[" * 100_000, SECRET, "no JSON text"),
    (5, SECRET, "the text that state() gave is wanted; got int"),
    (None, SECRET, "the text that state() gave is wanted; got NoneType"),
    ("[]", SECRET, "the text that state() gave is wanted"),
    ({}, SECRET, "it is no state of a batch"),
    ({"towerman_state": True, "payload": "{}"}, None, "it is no state of a batch"),
    (with_outer(towerman_state=3), SECRET, "it has version 3, and this Towerman reads versions 1 to 2"),
    (with_outer(towerman_state=0), SECRET, "it has version 0, and this Towerman reads versions 1 to 2"),
    (with_outer(towerman_state=2), SECRET, "its signature does not fit"),
    (with_outer(towerman_state=10**30), SECRET, "it has version another one"),
    (with_outer(signature=None), SECRET, "it is not signed, and this tower has a secret"),
    (with_outer(signature=5), SECRET, "its signature does not fit"),
    (with_outer(signature="\ud800"), SECRET, "its signature does not fit"),
    (with_outer(payload="{}"), SECRET, "its signature does not fit"),
    (TEXT, b"another", "its signature does not fit: it was changed, or made with another secret"),
    (TEXT, None, "it is signed, and this tower has no secret"),
    (UNSIGNED, SECRET, "it is not signed"),
    ({**json.loads(UNSIGNED), "payload": "{"}, None, "its payload is no JSON"),
]


@pytest.mark.parametrize(("given_", "secret", "told"), WRONG_TEXTS, ids=[told[:30] for _, _, told in WRONG_TEXTS])
def test_s14_a_text_that_is_not_ours_is_refused(given_: Any, secret: bytes | None, told: str) -> None:
    """S14: rubbish, another version, a wrong or missing signature: one clear error each."""
    with pytest.raises(InputError) as caught:
        read_state(given_, secret)
    assert str(caught.value).startswith(f"state: {told}")
    assert len(str(caught.value)) < 300


@given(place=st.integers(0, len(TEXT) - 1), character=st.characters(codec="utf-8"))
def test_s14_a_changed_character_is_noticed(place: int, character: str) -> None:
    """S14: whatever single character of a signed text is changed, it is refused, or says the same as before."""
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    try:
        found = read_state(changed, SECRET)
    except InputError:
        return
    assert same_batch(found, SUSPENDED)


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in plain data."""
    found = [above]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths(inner, (*above, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            found += paths(inner, (*above, place))
    return found


PAYLOAD = json.loads(json.loads(UNSIGNED)["payload"])
FILLED_PAYLOAD = json.loads(json.loads(write_state(FILLED, None))["payload"])
FREE = {"arguments", "message", "closed", "written"}
"""Places whose inside may be anything, or any name."""


def put(where: tuple[Any, ...], value: Any, version: int = 1) -> str:
    """The unsigned text with another value at a place of its payload."""
    payload = json.loads(json.dumps(PAYLOAD if version == 1 else FILLED_PAYLOAD))
    if not where:
        payload = value
    else:
        inner = payload
        for step in where[:-1]:
            inner = inner[step]
        inner[where[-1]] = value
    return json.dumps({"towerman_state": version, "payload": json.dumps(payload), "signature": None})


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rubbish", [None, True, -1, 1.5, "x", [], [1], {}, {"a": 1}, 10**30], ids=repr)
def test_every_part_of_a_text_is_looked_at(rubbish: Any, version: int) -> None:
    """G1: rubbish at any place of an unsigned text is refused with that place, or is a batch that could have been
    written; never an error of Python's own.
    """
    refused = 0
    for where in paths(PAYLOAD if version == 1 else FILLED_PAYLOAD):
        try:
            found = read_state(put(where, rubbish, version), None)
        except InputError:
            refused += 1
            continue
        assert len(found.results) == len(found.batch.calls)
        assert all((result is None) == (index in found.opened) for index, result in enumerate(found.results))
        write_state(found, None)
    assert refused > 40


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("open", 0, "index"), 1),
        (("open", 0, "index"), 7),
        (("open", 1, "index"), 0),
        (("open", 1, "approval_id"), "apr_0"),
        (("open",), []),
        (("closed",), {"apr_0": "approved"}),
        (("closed",), {"apr_9": "eaten"}),
        (("results",), [None]),
        (("results", 1, "index"), 0),
        (("results", 1, "outcome"), "pending"),
        (("results", 1, "outcome"), "error"),
        (("results", 1, "code"), "no_such_code"),
        (("open", 0, "state"), "denied"),
        (("open", 0, "expires_at"), 1e300),
        (("key",), "xyz"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(where: tuple[Any, ...], value: Any) -> None:
    """A text whose parts contradict one another is no batch."""
    with pytest.raises(InputError, match=r"^state: .* is not as it was written"):
        read_state(put(where, value), None)


def test_secrets_are_text_or_bytes() -> None:
    """A secret as text and as bytes of it are the same."""
    assert secret_bytes("ü") == "ü".encode() == secret_bytes("ü".encode())
