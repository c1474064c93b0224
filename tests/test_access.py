"""What a call touches: templates and callables, canonical keys, conflicts, and the locks that stand for them."""

from __future__ import annotations

import functools
import os
import pickle
import traceback
import unicodedata
from collections import deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import product
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from towerman.access import (
    MAX_ACCESSES,
    MAX_DEPTH,
    MAX_SEGMENT,
    AccessRefused,
    AccessRule,
    canonical_key,
    conflict,
    flat_holds,
    locks,
    within,
)
from towerman.calls import COMPATIBLE, IS, IX, Access, Hold, S, X
from towerman.errors import PolicyError

CANARY = "canary-5e3f"


def rule(reads: object = None, writes: object = None, names: str | None = None, tool: str = "tool") -> AccessRule:
    """A compiled rule; `names` are the tool's parameters, parted by blanks."""
    known = None if names is None else frozenset(names.split())
    return AccessRule.compile(reads, writes, names=known, tool=tool)  # type: ignore[arg-type]


def told(access: Access) -> str:
    """One access in short: `r t:1`, `w t:a/**`."""
    return f"{'w' if access.write else 'r'} {access.key}{'/**' if access.subtree else ''}"


def touched(declared: object, /, **arguments: object) -> list[str]:
    """What a tool that reads `declared` touches, in short and without the leading `r `."""
    return [told(access)[2:] for access in rule(declared).accesses(arguments)]


def refusal(declared: object, /, **arguments: object) -> AccessRefused:
    with pytest.raises(AccessRefused) as caught:
        rule(declared).accesses(arguments)
    return caught.value


def clash(a: Sequence[Hold], b: Sequence[Hold]) -> bool:
    """Whether two calls' locks can not be held at the same time."""
    other = dict(b)
    return any(key in other and not COMPATIBLE[mode][other[key]] for key, mode in a)


# --- templates --------------------------------------------------------------------------------------------------------


def test_r17_the_key_comes_from_the_arguments() -> None:
    """R-17, R-22: two calls of one tool touch one resource or two, as their arguments say."""
    read = rule("customer:{customer_id}", names="customer_id").accesses
    assert read({"customer_id": 42}) == (Access("customer:42", False, False, "customer:{customer_id}"),)
    assert conflict(read({"customer_id": 42})[0], read({"customer_id": 42})[0]) is None
    write = rule(None, "customer:{customer_id}", names="customer_id").accesses
    assert conflict(write({"customer_id": 42})[0], write({"customer_id": 43})[0]) is None
    assert conflict(write({"customer_id": 42})[0], write({"customer_id": 42})[0]) is not None


def test_r16_r20_tools_that_name_one_resource_meet_whatever_their_names() -> None:
    """R-16, R-20: the resource decides, not the tool's name, nor how the template is spelled."""
    one = rule(None, "Ticket:{ticket}", tool="update").accesses({"ticket": "007"})
    two = rule(None, "ticket:/{id}/", tool="close").accesses({"id": "007"})
    assert one[0].key == two[0].key
    assert conflict(one[0], two[0]) == "write Ticket:{ticket} and write ticket:/{id}/ touch the same resource"


def test_r21_reads_overlap_and_writes_do_not() -> None:
    """R-21: of two accesses to one resource only two reads may overlap."""
    read, write = Access("a:1", False, False, "a:{x}"), Access("a:1", True, False, "a:{y}")
    assert conflict(read, read) is None
    assert conflict(read, write) == "read a:{x} and write a:{y} touch the same resource"
    assert conflict(write, read) == "write a:{y} and read a:{x} touch the same resource"
    assert conflict(write, write) == "write a:{y} and write a:{y} touch the same resource"


@pytest.mark.usefixtures("here")
def test_p17_a_search_meets_a_write_below_its_folder() -> None:
    """P-17: search('src') meets write('src/a.py'), not another search, and not write('docs/b')."""
    write, search = rule(None, "file:{path}").accesses, rule("file:{dir}/**").accesses
    inside, outside = write({"path": "src/a.py"})[0], write({"path": "docs/b"})[0]
    src = search({"dir": "src"})[0]
    assert conflict(inside, src) == "write file:{path} and read file:{dir}/** touch the same resource"
    assert conflict(src, src) is None
    assert conflict(outside, src) is None
    assert conflict(write({"path": "srcs"})[0], src) is None
    assert conflict(write({"path": "src"})[0], src) is not None


@pytest.mark.usefixtures("here")
def test_p13_edits_of_one_file_meet_however_the_model_spells_it(here: Path) -> None:
    """P-13: the spellings that one batch mixes are one file; another file is another resource."""
    edit = rule(None, "file:{path}").accesses
    keys = {
        edit({"path": path})[0].key
        for path in ("a.py", "./a.py", str(here / "a.py"), "x/../a.py", "/" + str(here / "a.py"))
    }
    assert keys == {f"file:{here}/a.py"}
    assert edit({"path": "b.py"})[0].key not in keys


def test_p14_a_key_may_be_any_state() -> None:
    """P-14: `state:{key}` gives one resource a key, and different keys do not meet."""
    inc = rule(None, "state:{key}").accesses
    accesses = [inc({"key": f"k{n % 20}"})[0] for n in range(40)]
    assert len({access.key for access in accesses}) == 20
    assert all(
        (conflict(a, b) is None) == (m % 20 != n % 20) for m, a in enumerate(accesses) for n, b in enumerate(accesses)
    )


def test_a_template_takes_lists_literals_and_several_arguments() -> None:
    """A tool may declare several templates, literal ones too; each is shown as it was written."""
    compiled = rule(["config:main", "doc:{a}/v{b}"], ["log"], names="a b")
    assert [told(access) for access in compiled.accesses({"a": "x y", "b": 2})] == [
        "r config:main",
        "r doc:x y/v2",
        "w /log",
    ]
    assert (compiled.reads, compiled.writes) == (("config:main", "doc:{a}/v{b}"), ("log",))
    assert repr(compiled) == (
        "AccessRule(reads=('config:main', 'doc:{a}/v{b}'), writes=('log',), may_subtree=False, "
        "depends_on_arguments=True)"
    )


def test_a_rule_is_frozen() -> None:
    """A rule is compiled once and cannot be changed."""
    compiled = rule("a:b")
    with pytest.raises(AttributeError):
        compiled.may_subtree = True  # type: ignore[misc]
    assert not hasattr(compiled, "__dict__")


def test_an_access_made_here_is_an_access_like_any_other() -> None:
    """The short constructor leaves nothing out: equal, hashable, frozen, and its repr has no key (G8)."""
    access = rule("t:{x}").accesses({"x": CANARY})[0]
    assert access == Access(f"t:{CANARY}", False, False, "t:{x}")
    assert hash(access) == hash(Access(f"t:{CANARY}", False, False, "t:{x}"))
    assert pickle.loads(pickle.dumps(access)) == access
    assert repr(access) == "Access(read 't:{x}')"
    with pytest.raises(AttributeError):
        access.key = "t:1"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("declared", "subtree", "depends"),
    [
        (None, False, False),
        ("a:b", False, False),
        ("a:b/**", True, False),
        (["a:b", "c/**"], True, False),
        ("a:{x}", False, True),
        ("a:{x}/**", True, True),
        ("file:/**", True, False),
        ("file:/etc/hosts", False, True),
        (lambda: "a:b", True, True),
    ],
)
def test_a_rule_says_whether_it_can_declare_subtrees_and_whether_calls_differ(
    declared: object, subtree: bool, depends: bool
) -> None:
    """`may_subtree` and `depends_on_arguments` hold for every call; a literal file depends on its links."""
    for compiled in (rule(declared), rule(None, declared), rule("z", declared)):
        assert compiled.may_subtree is subtree
        assert compiled.depends_on_arguments is depends


def test_what_depends_on_nothing_is_computed_once() -> None:
    """A rule without arguments gives the same object each time; one that declares nothing gives no access."""
    compiled = rule(["a:b", "a:c"], "a:b")
    assert [told(access) for access in compiled.accesses({})] == ["r a:c", "w a:b"]
    assert compiled.accesses({}) is compiled.accesses({"x": 1})
    assert rule().accesses({"x": 1}) == ()


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        (" a:b", "begins or ends with a blank"),
        ("a:b\n", "begins or ends with a blank"),
        ("a:\0", "cannot be printed"),
        ("a:\ud800", "cannot be printed"),
        ("a:{x", "braces do not match"),
        ("a:x}", "braces do not match"),
        ("a:{x}}", "braces do not match"),
        ("a:{{x}", "braces do not match"),
        ("a:{x{y}}", "braces do not match"),
        ("a:{}", "{} is not understood"),
        ("a:{ x }", "{ x } is not understood"),
        ("a:{x.}", "is not understood"),
        ("a:{x._private}", "is not understood"),
        ("a:{x.__class__}", "is not understood"),
        ("a:{x[0]y}", "is not understood"),
        ("a:{x[0}", "braces do not match"),
        ("a:{x]}", "is not understood"),
        ("a:{0}", "names '0', which is no parameter"),
        ("a:{x!r}", "takes no conversion and no format"),
        ("a:{x:>3}", "takes no conversion and no format"),
        ("a:{x}**", "'*' is no pattern here"),
        ("a:**", "'*' is no pattern here"),
        ("a:{x}/**/b", "'*' is no pattern here"),
        ("a:/**/**", "'*' is no pattern here"),
        ("a:*", "'*' is no pattern here"),
        ("a:{x}/*", "'*' is no pattern here"),
        ("file:/srv/*.txt", "'*' is no pattern here"),
        ("/**", "names no resource; name a scheme"),
        ("/", "the name is empty"),
        ("./.", "the name is empty"),
        ("a:", "names no resource; everything of the scheme is 'a:/**'"),
        ("file:", "names no resource; everything of the scheme is 'file:/**'"),
        (":b", "the name has nothing before its ':'"),
        (" :b", "begins or ends with a blank"),
        ("x" * 129 + ":b", "over 128 characters"),
        ("a:b/../c", "the name holds the segment '..'"),
        ("a:{x}/..", "the name holds the segment '..'"),
        ("{x}:{y}", "the scheme, the part before ':', has to be literal text"),
        ("a{x}:{y}", "the scheme, the part before ':', has to be literal text"),
        ("{x}{y}z:1", "the scheme, the part before ':', has to be literal text"),
        ("file://host/{x}", "a file URL names no other machine"),
    ],
)
def test_a_wrong_template_is_refused_when_the_tool_is_set_up(template: str, complaint: str) -> None:
    """R-17: a template that cannot mean what its writer meant is refused early; tool, option and template are named."""
    for reads, writes, option in ((template, None, "reads"), (None, ["a:b", template], "writes")):
        with pytest.raises(PolicyError) as caught:
            rule(reads, writes, names="x y", tool="crm_read")
        assert str(caught.value).startswith(f"tool 'crm_read': {option} {template!r}")
        assert complaint in str(caught.value)


def test_an_unknown_parameter_is_told_with_the_nearest_right_one() -> None:
    """A mistyped parameter is found when the tool is set up, and the right one is named."""
    with pytest.raises(PolicyError) as caught:
        rule("customer:{customerid}", names="customer_id name", tool="read_customer")
    assert str(caught.value) == (
        "tool 'read_customer': reads 'customer:{customerid}' names 'customerid', which is no parameter of the tool; "
        "did you mean 'customer_id'? Parameters: customer_id, name"
    )
    with pytest.raises(PolicyError, match=r"no parameter of the tool\. Parameters: none$"):
        rule("a:{x}", names="")
    with pytest.raises(PolicyError, match=r"\{\} is not understood.*Parameters: not known$"):
        rule("a:{}")
    with pytest.raises(PolicyError, match=r"names 'y', which is no parameter"):
        rule("a:{y.x}", names="x")


def test_parameters_that_are_not_known_are_looked_for_in_each_call() -> None:
    """A tool that takes `**kwargs` may name any argument; a position is no name; a missing one refuses the call."""
    assert touched("a:{whatever}", whatever=1) == ["a:1"]
    assert str(refusal("a:{whatever}", other=1)) == "reads 'a:{whatever}': argument 'whatever' is missing"
    with pytest.raises(PolicyError, match="is a position"):
        rule("a:{0}")


def test_a_json_schema_may_have_names_that_are_no_identifiers() -> None:
    """An argument called `user.id`, `file-path` or `0` is found by its whole name."""
    compiled = rule("a:{user.id}/{file-path}/{0}", names="user.id file-path 0")
    assert [told(a) for a in compiled.accesses({"user.id": 1, "file-path": "b", "0": "c"})] == ["r a:1/b/c"]


@pytest.mark.parametrize("declared", [42, b"a:b", {"a:b"}, {"a": 1}, ["a:b", 3], [["a:b"]], 1.5])
def test_what_is_no_declaration_is_refused(declared: object) -> None:
    """Anything but a template, a callable or a list of these is a mistake, told with its type."""
    with pytest.raises(PolicyError, match=r"^tool 'tool': writes holds a value of type \w+; write a template such as"):
        rule(None, declared)


def test_an_empty_list_is_not_taken_for_a_tool_that_touches_nothing() -> None:
    """`reads=[]` says nothing; the message names the option that says it."""
    with pytest.raises(PolicyError, match=r"reads is an empty list; .* independent=True"):
        rule([])


def test_doubled_braces_stand_for_themselves() -> None:
    """`{{` and `}}` are literal braces."""
    assert touched("a:{{x}}{x}/{{{x}}}", x=1) == ["a:{x}1/{1}"]
    assert touched("a:{{x}}") == ["a:{x}"]
    assert touched("{{s}}:{x}", x=1) == ["{s}:1"]


class Colour(Enum):
    RED = "red"
    NESTED = 7


@dataclass(frozen=True)
class Point:
    x: int
    y: object = None


Pair = namedtuple("Pair", "x count")


class Model(BaseModel):
    x: int
    inner: dict[str, object] = {}


class Odd:
    """An object whose parts cannot be read."""

    @property
    def x(self) -> int:
        raise RuntimeError(CANARY)

    def __str__(self) -> str:
        raise RuntimeError(CANARY)


class Named:
    """An object that says what it is called."""

    def __str__(self) -> str:
        return "its name"


class Blank(Named):
    def __str__(self) -> str:
        return " "


@pytest.mark.parametrize(
    ("template", "value", "keys"),
    [
        ("a:{v.x}", {"x": 1}, ["a:1"]),
        ("a:{v[x]}", {"x": 1}, ["a:1"]),
        ("a:{v[0]}", {0: 1}, ["a:1"]),
        ("a:{v[0]}", {"0": 1}, ["a:1"]),
        ("a:{v[0]}", ["p", "q"], ["a:p"]),
        ("a:{v[1]}", Pair(1, 2), ["a:2"]),
        ("a:{v.x}", Point(3), ["a:3"]),
        ("a:{v.x}", Model(x=4), ["a:4"]),
        ("a:{v.inner.k[0].x}", Model(x=4, inner={"k": [Point(5)]}), ["a:5"]),
        ("a:{v.count}", Pair(1, 2), ["a:2"]),
        ("a:{v.count}", [{"count": 1}, {"count": 2}, {"count": 1}], ["a:1", "a:2"]),
        ("a:{v.ids}", [{"ids": [1, 2]}, {"ids": []}, {"ids": [3]}], ["a:1", "a:2", "a:3"]),
        ("a:{v[path.to]}", {"path.to": "z"}, ["a:z"]),
        ("a:{v.x}", {Point(2), Point(1)}, ["a:1", "a:2"]),
        ("a:{v.x}", [], []),
        ("a:{v.x}/b", {"x": "q/r"}, ["a:q/r/b"]),
    ],
)
def test_fields_and_items_are_reached(template: str, value: object, keys: list[str]) -> None:
    """`{name.field}` and `{name[key]}` reach into mappings and records; a field of a list is that of each element."""
    assert touched(template, v=value) == keys


@pytest.mark.parametrize(
    ("template", "value", "reason"),
    [
        ("a:{v.x}", {}, "is missing"),
        ("a:{v.x}", None, "is None"),
        ("a:{v.x}", {"x": None}, "is None"),
        ("a:{v.x.y}", {"x": None}, "is None"),
        ("a:{v[3]}", [1], "is missing"),
        ("a:{v[3]}", {"x": 1}, "is missing"),
        ("a:{v[x]}", Point(1), "is missing"),
        ("a:{v.z}", Point(1), "is missing"),
        ("a:{v.x}", [{"x": 1}, {}], "is missing"),
        ("a:{v.x}", [{"x": 1}, {"x": ""}], "is empty"),
        ("a:{v.x}", Odd(), "cannot be read (RuntimeError)"),
        ("a:{v.upper}", "text", "is of type builtin_function_or_method, which is neither text nor a number"),
    ],
)
def test_a_field_that_is_not_there_refuses_the_call(template: str, value: object, reason: str) -> None:
    """A part that cannot be reached refuses this call, and names the part as the template does."""
    place = template.removeprefix("a:{").removesuffix("}")
    error = refusal(template, v=value)
    assert str(error) == f"reads {template!r}: argument {place!r} {reason}"
    assert error.code == "invalid_arguments"


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("t:42", [42, "42", 42.0, Decimal("42.00"), Decimal("4.2E+1"), Fraction(42), b"42", bytearray(b"42"), [42]]),
        ("t:0", [0, 0.0, -0.0, "0", Decimal("-0")]),
        ("t:1.5", [1.5, Decimal("1.50"), "1.5"]),
        ("t:0.0000001", [1e-7, Decimal("1E-7")]),
        ("t:-3", [-3, -3.0, "-3"]),
        ("t:" + str(10**30), [10**30, 1e30, Decimal("1E+30")]),
        ("t:true", [True, "true"]),
        ("t:false", [False, "false"]),
        ("t:red", [Colour.RED, "red"]),
        ("t:7", [Colour.NESTED, 7]),
        ("t:12345678-1234-5678-1234-567812345678", [UUID("12345678-1234-5678-1234-567812345678")]),
        ("t:2024-05-06", [date(2024, 5, 6), "2024-05-06"]),
        ("t:2024-05-06T07:08:00", [datetime(2024, 5, 6, 7, 8)]),  # noqa: DTZ001 - a naive one is what is tested
        (
            "t:2024-05-06T07:08:00+00:00",
            [
                datetime(2024, 5, 6, 7, 8, tzinfo=UTC),
                datetime(2024, 5, 6, 9, 8, tzinfo=timezone(timedelta(hours=2))),
            ],
        ),
        ("t:its name", [Named(), "its name"]),
        ("t:caf\u00e9", ["caf\u00e9", "cafe\u0301", "cafe\u0301".encode()]),
        ("t:a/b", [Path("a/b"), "a/b", "/a//./b/", Path("/a/b")]),
    ],
)
def test_equal_values_are_one_key_whatever_their_type(key: str, values: list[object]) -> None:
    """A resource has one key, however a tool types the argument that names it."""
    for value in values:
        assert touched("t:{v}", v=value) == [key]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is None"),
        ("", "is empty"),
        (" \t\n", "is empty"),
        (b"", "is empty"),
        (Blank(), "is empty"),
        (float("nan"), "is not a finite number of sensible size"),
        (float("-inf"), "is not a finite number of sensible size"),
        (Decimal("sNaN"), "is not a finite number of sensible size"),
        (Decimal("1E+999999"), "is not a finite number of sensible size"),
        (Decimal("1E-999999"), "is not a finite number of sensible size"),
        ({"a": 1}, "is of type dict, which is neither text nor a number"),
        (object(), "is of type object, which is neither text nor a number"),
        (Point(1), "is of type Point, which is neither text nor a number"),
        (Model(x=1), "is of type Model, which is neither text nor a number"),
        (print, "is of type builtin_function_or_method, which is neither text nor a number"),
        (memoryview(b"a"), "is of type memoryview, which is neither text nor a number"),
        (Odd(), "is of type Odd and cannot be written as text"),
        (
            datetime.min.replace(tzinfo=timezone(timedelta(hours=2))),
            "is of type datetime and cannot be written as text",
        ),
        ([1, None], "has an element that is None"),
        ([1, [2]], "has an element that is of type list, which is neither text nor a number"),
        ([""], "has an element that is empty"),
        ([1] * (MAX_ACCESSES + 1), f"has more than {MAX_ACCESSES} elements"),
    ],
)
def test_a_value_that_names_nothing_refuses_the_call(value: object, reason: str) -> None:
    """What is empty, None or no name refuses this call only, before it runs; the reason has no value in it (G8)."""
    error = refusal("t:{v}", v=value)
    assert str(error) == f"reads 't:{{v}}': argument 'v' {reason}"
    assert error.code == "invalid_arguments"


def test_none_matters_only_where_the_template_uses_it() -> None:
    """An optional argument that no template names may be None."""
    assert touched("t:{a}", a=1, b=None) == ["t:1"]


@pytest.mark.parametrize(
    "value", [[1, "2", 2, 1.0], (1, 2), deque([1, 2]), range(1, 3), {2, 1}, frozenset("12"), {1: 0, 2: 0}.keys()]
)
def test_each_element_of_a_list_is_a_resource(value: object) -> None:
    """A list, tuple or set gives one access for each element, without repeats; a set's are in order of their text."""
    assert touched("t:{v}", v=value) == ["t:1", "t:2"]
    assert touched("t:{v}", v={9, 10, 8}) == ["t:10", "t:8", "t:9"]


def test_an_empty_list_touches_nothing() -> None:
    """No element, no access: whatever else the template names."""
    assert touched("t:{v}", v=[]) == []
    assert touched("t:{v}/{w}", v=[], w=1) == []


def test_lists_multiply_up_to_a_bound() -> None:
    """Several lists in one template give every pair; more than the bound refuses the call before they are made."""
    assert touched("t:{v}/{w}", v=[1, 2], w=["a", "b"]) == ["t:1/a", "t:1/b", "t:2/a", "t:2/b"]
    assert len(touched("t:{v}", v=list(range(MAX_ACCESSES)))) == MAX_ACCESSES
    assert str(refusal("t:{v}/{v}", v=list(range(101)))).endswith(f"the call names more than {MAX_ACCESSES} resources")


def test_values_that_are_short_and_plain_and_the_others_get_keys_by_one_rule() -> None:
    """The short way and the general way agree; `x{v}` never takes the short way, so its tail is compared."""
    for value in ("a", "A-1", "a.b", ".a", "a:b", "é", "a b", "a/b", "***", -5, 10**18, 10**19, "x" * 127, "~", "a*"):
        [short], [general] = touched("t:s/{v}", v=value), touched("t:s/{v}{w}", v=value, w="w")
        assert short == general[:-1], value


class Word(str):
    """Text of a kind of its own: it always goes the general way."""


class Number(int):
    """A number of a kind of its own: it always goes the general way."""


DEEP = "/".join("abcdefgh" * 8)
TEMPLATES = (
    *(
        "t:{v}",
        "{v}",
        "{v}/b",
        "a/{v}/b",
        "t:a//{v}/./b/**",
        "t:{v}/{w}",
        "{v}/{w}",
        "{v}/x/{v}",
        "t:{v}{w}",
        "t:{v}-{w}",
    ),
    *("T:%s/{v}/%d", "t:e/{v}/\u0338e", "t:e\u0301/{v}", f"t:{'s' * 200}/{{v}}", f"t:{DEEP}/{{v}}", f"t:{{v}}/{DEEP}"),
    *("t:x{v}", "t:{v}x", "/{v}", "//{v}//", "t:{v.real}/{w}", "{v}/t:{w}"),
)
words = (
    st.text(max_size=4) | st.text("ab.:*/~%s", max_size=6) | st.sampled_from(["a" * 128, "a" * 129, "e\u0301", "%s"])
)
numbers = st.integers() | st.sampled_from([10**18, 10**18 - 1, -(10**18), 1 - 10**18])


@given(st.sampled_from(TEMPLATES), words | numbers, words | numbers)
@settings(max_examples=500)
def test_the_short_way_of_a_template_agrees_with_the_general_one(
    template: str, first: str | int, second: str | int
) -> None:
    """R-17: plain words and numbers as whole segments take a short way, to the same keys and the same refusals."""

    def answer(v: object, w: object) -> object:
        try:
            return rule(template, names="v w").accesses({"v": v, "w": w})
        except AccessRefused as refused:
            return str(refused)

    general = [Word(value) if isinstance(value, str) else Number(value) for value in (first, second)]
    assert answer(first, second) == answer(*general)


def test_numbers_of_any_size_have_a_key() -> None:
    """An integer of thousands of digits, which Python does not write in decimal, has a key and crashes nothing."""
    [one], [two] = touched("t:{v}", v=10**5000), touched("t:{v}", v=10**5000 + 1)
    assert one != two
    assert len(one) < 80


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("ticket:42", "ticket:42"),
        ("TICKET:42", "ticket:42"),
        ("ticket:/42", "ticket:42"),
        ("ticket:/", "ticket:"),
        ("ticket:", "ticket:"),
        ("repo/x", "/repo/x"),
        ("/repo/x/", "/repo/x"),
        ("repo", "/repo"),
        ("repo/a:b", "/repo/a:b"),
        ("./a:b", "/a:b"),
        ("a:b:c", "a:b:c"),
        ("https://h.example/a//b", "https:h.example/a/b"),
        ("doc:a/**", "doc:a/***"),
        ("doc:**", "doc:***"),
        ("file:/", "file:"),
        ("file://", "file:"),
        ("file:///", "file:"),
        ("file:/no-such/../other/./x//y/", "file:/other/x/y"),
        ("file:///no-such/x", "file:/no-such/x"),
        ("FILE:/no-such/x", "file:/no-such/x"),
    ],
)
def test_the_rule_of_keys(text: str, key: str) -> None:
    """The rule of keys, with and without a scheme; a canonical key is its own canonical key."""
    assert canonical_key(text) == key
    assert canonical_key(key) == key


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the name is empty"),
        ("  ", "the name is empty"),
        ("/", "the name is empty"),
        (":x", "the name has nothing before its ':'"),
        (" :x", "the name has nothing before its ':'"),
        ("a\0:x", "the name has a null character, or over 128 characters, before its ':'"),
        ("a:\0", "the name holds a null character"),
        ("a:..", "the name holds the segment '..'; only file: follows it, so write it without"),
        ("file:a\0", "the path cannot be resolved on this machine"),
        ("file:a\ud800", "the path cannot be resolved on this machine"),
        ("file:" + "a" * 5000, "the path is longer than 4096 characters"),
    ],
)
def test_a_text_that_is_no_name_is_refused(text: str, reason: str) -> None:
    """What cannot be a key is refused, and the message does not repeat it (G8)."""
    with pytest.raises(AccessRefused) as caught:
        canonical_key(text)
    assert str(caught.value) == f"resource: {reason}"


@given(
    st.one_of(
        st.text(max_size=40),
        st.builds(
            lambda scheme, parts: scheme + "/".join(parts),
            st.sampled_from(["t:", "", "/", "t:/", "./"]),
            st.lists(
                st.one_of(st.sampled_from(["", ".", "**", "***", "a", "é", "e\u0301", "a:b"]), st.text(max_size=5))
            ),
        ),
    )
)
@example("t:" + "a" * 300 + "/" + "b/" * 100)
@example("t:\ud800\udcff")
def test_any_text_gives_a_canonical_key_or_a_refusal(text: str) -> None:
    """Whatever the text: no crash; a key that is its own canonical key, valid UTF-8, and looks like no tree lock."""
    assume(not text.lower().startswith("file:"))
    try:
        key = canonical_key(text)
    except AccessRefused:
        return
    key.encode()
    assert not key.endswith("/**")
    assert "\0" not in key
    if key.startswith("/") or key.partition(":")[0].isascii():
        assert canonical_key(key) == key


@given(
    st.lists(st.sampled_from(["a", "b", "é"]), min_size=1, max_size=4),
    st.lists(st.sampled_from(["/", "/./", "//", "/.//./"]), min_size=5, max_size=5),
    st.sampled_from(["", "/", "./", "//"]),
    st.booleans(),
)
def test_every_spelling_of_a_nested_name_is_one_key(
    segments: list[str], joints: list[str], start: str, nfd: bool
) -> None:
    """Two spellings of one file-like name in any scheme meet: slashes, dots and normal forms do not part them."""
    spelled = start + "".join(s + j for s, j in zip(segments, joints, strict=False))
    if nfd:
        spelled = unicodedata.normalize("NFD", spelled)
    assert touched("doc:{v}", v=spelled) == ["doc:" + "/".join(segments)]
    assert touched("{v}", v=spelled) == ["/" + "/".join(segments)]


@pytest.mark.parametrize("value", ["..", "../b", "a/..", "a/../../b", "/..", Path("../b")])
def test_a_value_cannot_climb_out_of_its_place(value: object) -> None:
    """A '..' in another scheme than file refuses the call: it may mean another resource, and only the tool knows."""
    assert "the name holds the segment '..'" in str(refusal("doc:alice/{v}", v=value))
    assert "the name holds the segment '..'" in str(refusal("{v}", v=value))
    assert touched("doc:{v}", v="a..b/...") == ["doc:a..b/..."]


@pytest.mark.parametrize("value", ["**", "/**", "a/**", "a/**/", "**/**"])
def test_a_value_cannot_smuggle_a_subtree(value: str) -> None:
    """'**' in a value is text: the access is one node, and its node lock is nobody's tree lock."""
    for declared in ("t:{v}", "{v}", "t:a/{v}", "file:/no-such/{v}", "file:/no-such/a{v}"):
        for access in rule(declared).accesses({"v": value}):
            assert not access.subtree
            [(node, mode)], _ = flat_holds([access], subtrees=False)
            assert (node, mode) == (access.key, S)
            assert "**" not in node.split("/")


@pytest.mark.parametrize("value", ["file:/etc/hosts", "ticket:42", "ticket:/**", "file:///**"])
def test_a_value_cannot_smuggle_a_scheme(value: str) -> None:
    """A value with a colon stays in the scheme that the template gives, also where it gives none."""
    for declared, start in (("t:{v}", "t:"), ("{v}", "/"), ("t:{w}{v}", "t:")):
        [access] = rule(declared).accesses({"v": value, "w": "a/"})
        assert access.key.startswith(start)
        assert not access.subtree
        for other in ("file:/**", "ticket:/**", "file:/etc/hosts", "ticket:42"):
            assert conflict(access, rule(None, other).accesses({})[0]) is None


def test_long_and_deep_names_are_bounded_without_losing_a_conflict() -> None:
    """A long segment becomes its digest wherever it stands; what is too deep is locked as its ancestor."""
    long, other = "x" * 100_000, "x" * 99_999 + "y"
    [file], [twin] = touched("t:{v}/a", v=long), touched("t:{v}/a", v=other)
    assert file != twin
    assert len(file) < 80
    [folder] = rule(None, "t:{v}/**").accesses({"v": long})
    assert conflict(folder, rule("t:{v}/a").accesses({"v": long})[0]) is not None
    assert conflict(folder, rule("t:{v}/a").accesses({"v": other})[0]) is None
    edge = "x" * MAX_SEGMENT
    assert touched("t:{v}", v=edge) == ["t:" + edge]

    deep = "a/" * MAX_DEPTH
    [at], [below] = rule("t:{v}").accesses({"v": deep}), rule(None, "t:{v}").accesses({"v": deep + "b/c"})
    assert at.key == below.key
    assert at.key.count("/") == MAX_DEPTH - 1
    tree = rule(None, "t:{v}/**").accesses({"v": deep + "b"})[0]
    assert conflict(tree, below) is not None
    assert touched("t:{v}", v="a/" * 50_000) == [at.key]
    assert touched(f"t:{'a/' * (MAX_DEPTH - 1)}{{v}}", v="a") == [at.key]
    assert touched(f"t:{'a/' * MAX_DEPTH}{{v}}", v="b") == [at.key]


def test_text_that_is_costly_to_normalise_is_refused() -> None:
    """A run of combining characters takes quadratic time and refuses the call; other long text does not."""
    zalgo = "a" + "\u0345" * 50_000 + "\u0316" * 50_000
    assert str(refusal("t:{v}", v=zalgo)).endswith("the name has more than 32 combining characters in a row")
    one, two = "é" * 100_000, "e\u0301" * 100_000
    assert touched("t:{v}", v=one) == touched("t:{v}", v=two)


def test_lone_surrogates_become_escapes() -> None:
    """A character that UTF-8 cannot hold is kept apart from others and cannot break an encoder later."""
    assert touched("t:{v}", v="a\ud800") == ["t:a\\ud800"]
    assert touched("t:{v}", v=b"\xff") == ["t:\\udcff"]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of our own, without links above it, as the current directory."""
    place = Path(os.path.realpath(tmp_path))
    monkeypatch.chdir(place)
    return place


def test_a_file_has_one_key_however_it_is_spelled(here: Path) -> None:
    """G4, P-13: absolute, relative, dots, doubled or trailing slashes, links, Path, bytes: one key, there or not."""
    (here / "real").mkdir()
    (here / "link").symlink_to("real")
    (here / "chain").symlink_to(here / "link")
    spellings: list[object] = [
        "real/a.txt",
        "./real//a.txt",
        "link/a.txt",
        "chain/../real/a.txt",
        "no-such/../link/a.txt",
        "real/a.txt/",
        f"{here}/link/./a.txt",
        f"//{here}/real/a.txt",
        Path("real/a.txt"),
        b"real/a.txt",
        here / "chain" / "a.txt",
    ]
    for exists in (False, True):
        if exists:
            (here / "real" / "a.txt").touch()
        for spelling in spellings:
            assert touched("file:{p}", p=spelling) == [f"file:{here}/real/a.txt"], (spelling, exists)
            assert canonical_key(f"file:{os.fsdecode(spelling)}") == f"file:{here}/real/a.txt"  # type: ignore[arg-type]
    (here / "b.txt").symlink_to("real/a.txt")
    assert touched("file:{p}", p="b.txt") == [f"file:{here}/real/a.txt"]


def test_links_are_followed_again_for_each_call(here: Path) -> None:
    """Nothing about the file system is kept: a link that was moved leads elsewhere, in a literal template too."""
    (here / "now").symlink_to("one")
    placed, literal = rule("file:{p}"), rule(f"file:{here}/now/x")
    assert placed.accesses({"p": "now/x"})[0].key == literal.accesses({})[0].key == f"file:{here}/one/x"
    (here / "now").unlink()
    (here / "now").symlink_to("two")
    assert placed.accesses({"p": "now/x"})[0].key == literal.accesses({})[0].key == f"file:{here}/two/x"


def test_a_loop_of_links_has_a_key(here: Path) -> None:
    """Links that lead to each other crash nothing."""
    (here / "a").symlink_to("b")
    (here / "b").symlink_to("a")
    [key] = touched("file:{p}", p="a")
    assert key.startswith(f"file:{here}/")


@given(
    st.lists(st.sampled_from(["a", "b", "link"]), min_size=1, max_size=4),
    st.lists(st.sampled_from(["/", "//", "/./", "/zz/../", "/b/../"]), min_size=4, max_size=4),
    st.sampled_from(["", "./", "ABS/", "b/../", "//ABS/"]),
)
@settings(max_examples=60)
def test_every_spelling_of_a_file_leads_to_what_the_system_opens(
    tmp_path_factory: pytest.TempPathFactory, segments: list[str], joints: list[str], start: str
) -> None:
    """A key is the path that the operating system itself resolves, on a tree with links to folders above and beside."""
    place = Path(os.path.realpath(tmp_path_factory.getbasetemp())) / "spelled"
    if not place.exists():
        for folder in ("a/a", "a/b", "b/a", "b/b"):
            (place / folder).mkdir(parents=True)
        for link, target in (("link", "a"), ("a/link", "../b"), ("b/link", "../a"), ("a/a/link", "../..")):
            (place / link).symlink_to(target)
    spelled = start.replace("ABS", str(place)) + "".join(s + j for s, j in zip(segments, joints, strict=False))
    path = spelled if spelled.startswith("/") else f"{place}/{spelled}"
    [key] = touched("file:{p}", p=path)
    assert key == f"file:{Path(path).resolve()}"
    if Path(path).exists():
        assert Path(key.removeprefix("file:")).samefile(path)


def test_file_urls_fold(here: Path) -> None:
    """A file URL in a template is the path it stands for; in a value it is read as URL and as path: both are locked."""
    plain = f"file:{here}/a b"
    for template in (f"file://{here}/a b", f"file://{here}/a%20b", f"file://localhost{here}/a%20b", f"FILE:{here}/a b"):
        assert touched(template) == [plain]
    assert touched(f"file://{here}/{{p}}%20b", p="a") == [plain]
    assert touched("file://{p}", p="a b") == [plain]
    assert touched("file:///{p}", p=f"{here}/a b") == [plain]
    assert touched("file:///**") == touched("file://localhost/**") == ["file:/**"]
    for url in (f"file://{here}/a%20b", f"file:{here}/a%20b?x#y", f"FILE://LOCALHOST{here}/a%20b"):
        keys = touched("file:{p}", p=url)
        assert keys[1:] == [plain]
        assert keys[0].startswith(f"file:{here}/")
    assert touched("file:/no-such/{p}", p=f"file://{here}/a%20b")[1:] == [plain]
    assert str(refusal("file:{p}", p="file://host/a")).endswith("the URL names a file of another machine")


def test_a_path_that_can_be_read_in_two_ways_locks_both(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~/x` is a folder called ~ or the home; an absolute value is also what os.path.join makes of it."""
    monkeypatch.setenv("HOME", "/no-such-home")
    assert touched("file:{p}", p="~/x") == [f"file:{here}/~/x", "file:/no-such-home/x"]
    assert touched("file:~/{p}", p="x") == [f"file:{here}/~/x", "file:/no-such-home/x"]
    assert touched("file:{p}/**", p="~") == [f"file:{here}/~/**", "file:/no-such-home/**"]
    assert touched("file:{p}", p="~x") == [f"file:{here}/~x"]
    assert touched("file:/no-such/{p}", p="/etc/x") == ["file:/no-such/etc/x", "file:/etc/x"]
    assert touched("file:{d}/{p}", d="/no-such", p="/x") == ["file:/no-such/x", "file:/x"]
    assert touched("file:/no-such/a{p}", p="/x") == ["file:/no-such/a/x"]
    assert touched(lambda: "file:~/x") == [f"file:{here}/~/x", "file:/no-such-home/x"]
    assert touched(lambda: "file://localhost/no-such/a%20b") == ["file:/localhost/no-such/a%20b", "file:/no-such/a b"]
    assert touched(lambda: "file://host/x") == ["file:/host/x"]


def test_a_file_value_that_is_no_path_refuses_the_call(here: Path) -> None:
    """Empty, null, a lone surrogate, or longer than any path: this call is refused, and nothing crashes."""
    for value in ("", " ", None, "\0", "a\0", "\ud800", "a" * 5000, "a/" * 50_000, ["a", ""]):
        for declared in ("file:{p}", "file:/srv/{p}", "file:{p}/**", "file://{p}"):
            assert refusal(declared, p=value).code == "invalid_arguments"
    assert touched("file:{p}", p="a" * 200)[0].startswith(f"file:{here}/")
    assert touched("file:{p}", p=b"\xff") == [f"file:{here}/\\udcff"]


def test_a_current_directory_that_is_gone_refuses_relative_paths(here: Path) -> None:
    """Where "here" is nowhere a relative path names nothing, and an absolute one still does."""
    gone = here / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert str(refusal("file:{p}", p="x")).endswith("the path cannot be resolved on this machine")
    assert touched("file:{p}", p="/no-such/x") == ["file:/no-such/x"]


def test_a_listing_of_paths_is_one_access_each(here: Path) -> None:
    """A list of edits gives one access for each file, and none twice."""
    edits = [{"path": "a"}, {"path": "./a"}, {"path": "b"}]
    assert touched("file:{edits.path}", edits=edits) == [f"file:{here}/a", f"file:{here}/b"]


# --- callables --------------------------------------------------------------------------------------------------------


def by_name(customer_id: int, *, mode: str = "r") -> str:
    return f"customer:{customer_id}/{mode}"


def tuple_of_none() -> tuple[str, ...]:
    return ()


class Caller:
    def __call__(self, arguments: Mapping[str, object]) -> str:
        return f"n:{len(arguments)}"


@pytest.mark.parametrize(
    ("function", "keys", "label"),
    [
        (by_name, ["customer:7/w"], "callable by_name"),
        (lambda arguments: f"n:{sorted(arguments)}", ["n:['customer_id', 'mode', 'x']"], "callable <lambda>"),
        (lambda arguments, /: "a:b", ["a:b"], "callable <lambda>"),
        (lambda *, arguments: f"n:{len(arguments)}", ["n:3"], "callable <lambda>"),
        (lambda **rest: f"n:{len(rest)}", ["n:3"], "callable <lambda>"),
        (lambda x, **rest: f"n:{x}{len(rest)}", ["n:12"], "callable <lambda>"),
        (lambda *ignored: f"n:{len(ignored)}", ["n:0"], "callable <lambda>"),
        (lambda other=3: f"n:{other}", ["n:3"], "callable <lambda>"),
        (
            lambda: ["a:1", "A:1", "b/**", "file:/**", "a:{x}"],
            ["a:1", "/b/**", "file:/**", "a:{x}"],
            "callable <lambda>",
        ),
        (lambda: (name for name in ("a:1", "a:2")), ["a:1", "a:2"], "callable <lambda>"),
        (lambda: None, [], "callable <lambda>"),
        (tuple_of_none, [], "callable tuple_of_none"),
        (lambda: "doc:/", ["doc:"], "callable <lambda>"),
        (lambda: "doc:a/**/b", ["doc:a/***/b"], "callable <lambda>"),
        (lambda: "doc:/**", ["doc:/**"], "callable <lambda>"),
        (functools.partial(by_name, mode="q"), ["customer:7/w"], "callable by_name"),
        (Caller(), ["n:3"], "callable Caller"),
    ],
)
def test_a_callable_of_the_arguments(function: Callable[..., object], keys: list[str], label: str) -> None:
    """A callable gets the arguments it names, or all of them as `arguments`; people see its name, never a key (G8)."""
    compiled = rule(function, names="customer_id mode x")
    accesses = compiled.accesses({"customer_id": 7, "mode": "w", "x": 1})
    assert [told(access)[2:] for access in accesses] == keys
    assert {access.template for access in accesses} <= {label}
    assert compiled.reads == (label,)
    assert compiled.may_subtree
    assert compiled.depends_on_arguments


def test_a_tool_with_a_parameter_called_arguments_hands_over_that_one() -> None:
    """Where the tool itself has a parameter `arguments`, the callable gets its value like any other."""
    assert [
        told(a) for a in rule(lambda arguments: f"t:{arguments}", names="arguments").accesses({"arguments": 5})
    ] == ["r t:5"]


def test_a_callable_cannot_change_the_arguments() -> None:
    """The mapping is a copy: what a callable does to it does not reach the handler."""
    arguments = {"x": 1}
    rule(lambda arguments: arguments.clear()).accesses(arguments)
    assert arguments == {"x": 1}


def test_what_is_declared_for_both_is_asked_once() -> None:
    """One callable for reads and writes is called once a call: the write says it all."""
    asked = []

    def key(x: int) -> str:
        asked.append(x)
        return f"a:{x}"

    assert [told(access) for access in rule(key, [key]).accesses({"x": 1})] == ["w a:1"]
    assert asked == [1]


def test_callables_and_templates_may_be_mixed() -> None:
    """A list may hold both, in the order in which they are declared."""
    compiled = rule(["a:{x}", lambda x: f"b:{x}"], lambda x: [f"c:{x}", f"a:{x}"])
    assert [told(access) for access in compiled.accesses({"x": 1})] == ["r b:1", "w c:1", "w a:1"]
    assert compiled.reads == ("a:{x}", "callable <lambda>")


async def as_coroutine(x: int) -> str:
    return "a:b"


async def as_generator(x: int) -> object:
    yield "a:b"


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda y: "a:b", "names 'y', which is no parameter of the tool. Parameters: customer, x"),
        (lambda custmer: "a:b", "names 'custmer', which is no parameter of the tool; did you mean 'customer'?"),
        (lambda x, /: "a:b", "'x' cannot be given by name; take away the '/'"),
        (lambda arguments, x, /: "a:b", "'arguments', which is no parameter"),
        (as_coroutine, "is async"),
        (as_generator, "is async"),
        (functools.partial(as_coroutine, x=1), "is async"),
        (dict, "has no signature"),
    ],
)
def test_a_callable_that_cannot_be_called_is_refused_when_the_tool_is_set_up(
    function: Callable[..., object], complaint: str
) -> None:
    """A callable whose parameters cannot be filled, or that cannot answer at once, is found early."""
    if complaint.startswith("'arguments'"):
        complaint = "'arguments' cannot be given by name; take away the '/'"
    with pytest.raises(PolicyError) as caught:
        rule(None, function, names="x customer", tool="t")
    assert str(caught.value).startswith("tool 't': writes callable ")
    assert complaint in str(caught.value)


def failing(x: object) -> str:
    raise KeyError(x)


def slowly_failing(x: object) -> Iterator[str]:
    yield "a:b"
    raise KeyError(x)


def endless() -> Iterator[str]:
    while True:
        yield "a:b"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (failing, "raised KeyError"),
        (slowly_failing, "raised KeyError"),
        (lambda needed: "a:b", "raised TypeError"),
        (endless, f"named more than {MAX_ACCESSES} resources"),
        (lambda: 42, "returned a value of type int, not a resource name, a list of them, or None"),
        (lambda: b"a:b", "returned a value of type bytes, not a resource name, a list of them, or None"),
        (lambda: {"a:b": 1}, "returned a value of type dict, not a resource name, a list of them, or None"),
        (lambda: ["a:b", None], "returned a value of type NoneType, not a resource name, a list of them, or None"),
        (lambda: Path("a"), "returned a value of type PosixPath, not a resource name, a list of them, or None"),
        (lambda: as_coroutine(1), "returned a value of type coroutine, not a resource name, a list of them, or None"),
        (
            lambda: [as_coroutine(1), as_coroutine(2)],
            "returned a value of type coroutine, not a resource name, a list of them, or None",
        ),
        (lambda: "", "cannot use what it returned: the name is empty, or has nothing after its ':'"),
        (lambda: " ", "cannot use what it returned: the name is empty"),
        (lambda: "doc:", "cannot use what it returned: the name is empty, or has nothing after its ':'"),
        (lambda: "file:", "cannot use what it returned: the name is empty, or has nothing after its ':'"),
        (lambda: "/**", "cannot use what it returned: the name is empty"),
        (lambda: ":x", "cannot use what it returned: the name has nothing before its ':'"),
        (
            lambda: "a:../b",
            "cannot use what it returned: the name holds the segment '..'; only file: follows it, so write it without",
        ),
    ],
)
def test_a_callable_that_fails_refuses_this_call_only(function: Callable[..., object], reason: str) -> None:
    """A callable that raises, or returns no names, is a fault of the policy, told without exception text (G8)."""
    error = refusal(function, x=CANARY)
    assert str(error) == f"reads callable {function.__name__}: {reason}"
    assert error.code == "policy_error"


def test_an_interrupt_in_a_callable_is_not_swallowed() -> None:
    """KeyboardInterrupt leaves: only ordinary exceptions are answers."""

    def interrupted() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rule(interrupted).accesses({})


# --- G8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", ["t:{v}", "file:{v}", "{v}", "t:{v.x}", "t:{v[x]}", "t:{v}/{w}", failing])
@pytest.mark.parametrize(
    "value",
    [
        CANARY,
        f"{CANARY}/../x",
        f"{CANARY}\0",
        f"file://{CANARY}/x",
        CANARY * 1000,
        CANARY + "\u0345" * 300,
        {CANARY: CANARY},
        {"x": {CANARY: 1}},
        {"x": f"{CANARY}/.."},
        [CANARY, None],
        Odd(),
        None,
    ],
)
def test_g8_no_value_leaves_by_message_label_or_repr(declared: object, value: object) -> None:
    """G8: refusals, labels, conflicts and reprs show templates and argument names, never a value or a key."""
    compiled = rule(declared, "t:{w}" if isinstance(declared, str) else None)
    seen = [repr(compiled)]
    try:
        accesses = compiled.accesses({"v": value, "w": CANARY, "x": value})
    except AccessRefused as error:
        seen += traceback.format_exception(error)
        seen += [str(error), repr(error)]
    else:
        holds, labels = flat_holds(accesses, subtrees=True)
        assert set(labels) == {key for key, _ in holds}
        seen += [repr(accesses), *labels.values(), *(str(conflict(a, b)) for a, b in product(accesses, accesses))]
    assert CANARY not in "".join(seen)


# --- reads and writes of one call -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "writes", "left"),
    [
        ("a:{x}", "a:{x}", ["w a:1"]),
        ("a:{x}", "a:{y}", ["w a:1"]),
        ("a:{x}", "a:/**", ["w a:/**"]),
        ("a:{x}/b", "a:{x}/**", ["w a:1/**"]),
        ("a:{x}/**", "a:{x}/**", ["w a:1/**"]),
        ("a:{x}/b/**", "a:{y}/**", ["w a:1/**"]),
        ("a:{x}/**", "a:{x}", ["r a:1/**", "w a:1"]),
        ("a:{x}", "a:{x}/b", ["r a:1", "w a:1/b"]),
        ("a:{x}", "a:{x}0/**", ["r a:1", "w a:10/**"]),
        (["a:{x}", "b:{x}"], ["a:{x}", "c:{x}"], ["r b:1", "w a:1", "w c:1"]),
        (None, ["a:{x}", "a:{y}", "a:{x}"], ["w a:1"]),
        (["a:{x}", "a:{y}"], None, ["r a:1"]),
    ],
)
def test_a_read_that_a_write_of_the_same_call_covers_is_left_out(
    reads: object, writes: object, left: list[str]
) -> None:
    """A write of a node or subtree says all that a read of it, or of a node below, would say."""
    assert [told(access) for access in rule(reads, writes).accesses({"x": 1, "y": "1"})] == left


# --- locks ------------------------------------------------------------------------------------------------------------


def test_flat_holds_of_each_kind_of_access() -> None:
    """S and X on the node, for a subtree on its tree too, IS and IX above; without subtrees only the node; labels are
    templates.
    """
    key, template = "file:/srv/a/b.txt", "file:{path}"
    above = ("file:/**", "file:/srv/**", "file:/srv/a/**")
    for write, strong, weak in ((False, S, IS), (True, X, IX)):
        node, tree = Access(key, write, False, template), Access(key, write, True, template + "/**")
        assert flat_holds([node], subtrees=False) == (((key, strong),), {key: template})
        holds, labels = flat_holds([node], subtrees=True)
        assert dict(holds) == {key: strong} | dict.fromkeys(above, weak)
        assert labels == dict.fromkeys((key, *above), template)
        holds, labels = flat_holds([tree], subtrees=True)
        assert dict(holds) == {key: strong, key + "/**": strong} | dict.fromkeys(above, weak)
        assert set(labels.values()) == {"file:{path}/**"}
    assert flat_holds([], subtrees=True) == ((), {})


@pytest.mark.parametrize(
    ("key", "trees"),
    [
        ("ticket:42", ["ticket:/**"]),
        ("ticket:a/b", ["ticket:/**", "ticket:a/**"]),
        ("ticket:a:", ["ticket:/**"]),
        ("ticket:", []),
        ("file:", []),
        ("file:/a", ["file:/**"]),
        ("/repo/x", ["/repo/**"]),
        ("/repo", []),
        ("/a:b/c", ["/a:b/**"]),
    ],
)
def test_the_nodes_above_a_key(key: str, trees: list[str]) -> None:
    """The scheme's root stands above all its keys; a key without a scheme has nothing above its first segment."""
    holds, _ = flat_holds([Access(key, False, False, "t")], subtrees=True)
    assert [flat for flat, mode in holds if mode == IS] == sorted(trees)


@given(st.text("a:/*é", max_size=12), st.booleans())
@example("/a", False)
@example("a:/b", True)
def test_siblings_share_their_announcements_and_nothing_else(key: str, write: bool) -> None:
    """G4: what is remembered of a parent is what its child would work out, whether the one before it read or wrote."""
    for writes in (write, not write):
        holds, labels = flat_holds([Access(key, writes, False, "t")], subtrees=True)
        weak, strong = (IX, X) if writes else (IS, S)
        assert sorted(holds) == sorted([*((above + "/**", weak) for above in locks.keys_above(key)), (key, strong)])
        assert labels == {flat: "t" for flat, _ in holds}


def test_what_is_remembered_of_parents_is_bounded() -> None:
    """G12: a long-lived tower that sees ever new folders does not grow with them."""
    for number in range(3000):
        flat_holds([Access(f"/folder{number}/x", False, False, "t")], subtrees=True)
    assert locks._trees.cache_info().currsize <= 1024


def test_holds_of_several_accesses_are_joined_and_sorted() -> None:
    """No key twice; the stronger mode and its template win; S and IX on one tree lock make X."""
    accesses = [
        Access("t:a", False, True, "read tree"),
        Access("t:a/x", True, False, "write node"),
        Access("t:a/x", False, False, "read node"),
        Access("t:b", False, False, "read other"),
    ]
    holds, labels = flat_holds(accesses, subtrees=True)
    assert holds == tuple(sorted(holds))
    assert dict(holds) == {
        "t:/**": IX,
        "t:a": S,
        "t:a/**": X,
        "t:a/x": X,
        "t:b": S,
    }
    assert labels == {
        "t:/**": "write node",
        "t:a": "read tree",
        "t:a/**": "write node",
        "t:a/x": "write node",
        "t:b": "read other",
    }
    assert flat_holds(accesses[1:], subtrees=False)[0] == (("t:a/x", X), ("t:b", S))


def test_a_subtree_needs_the_tree_locks() -> None:
    """To hold a subtree without tree locks would exclude nobody: that is refused, not done."""
    tree, node = Access("t:secret", False, True, "t:{x}/**"), Access("t:a", False, False, "t:{x}")
    for accesses in ([tree], [node, tree]):
        with pytest.raises(ValueError, match="subtrees=True") as caught:
            flat_holds(accesses, subtrees=False)
        assert "secret" not in str(caught.value)


def overlap(a: Access, b: Access) -> bool:
    """The rule of conflicts, told by segments and nothing else."""

    def path(access: Access) -> tuple[str, ...]:
        scheme, colon, rest = access.key.partition(":") if not access.key.startswith("/") else ("", "", access.key)
        return (scheme + colon, *(part for part in rest.split("/") if part))

    one, two = path(a), path(b)
    below = (a.subtree and two[: len(one)] == one) or (b.subtree and one[: len(two)] == two)
    return (a.write or b.write) and (one == two or below)


KEYS = [
    scheme + "/".join(parts)
    for scheme in ("t:", "file:/", "/", "ta:")
    for depth in range(4)
    for parts in product(("a", "ab"), repeat=depth)
    if depth or scheme in ("t:", "ta:")
] + ["file:", "t:a:", "t:a:/b", "/t:", "/t:/a"]
ACCESSES = [
    Access(key, write, subtree, f"template {number}")
    for number, (key, write, subtree) in enumerate(product(KEYS, (False, True), (False, True)))
]


def test_two_accesses_conflict_exactly_when_two_of_their_locks_do() -> None:
    """G4: for every pair of accesses to a small forest, `conflict`, the locks and the plain rule say the same."""
    locks = [flat_holds([access], subtrees=True)[0] for access in ACCESSES]
    for (m, a), (n, b) in product(enumerate(ACCESSES), repeat=2):
        why = conflict(a, b)
        assert (why is not None) == overlap(a, b) == clash(locks[m], locks[n]), (a.key, b.key)
        assert why is None or (a.template in why and b.template in why and a.key not in why)


@given(st.lists(st.sampled_from(ACCESSES), max_size=4), st.lists(st.sampled_from(ACCESSES), max_size=4))
@settings(max_examples=300)
def test_two_calls_conflict_exactly_when_two_of_their_locks_do(one: list[Access], two: list[Access]) -> None:
    """G4: calls conflict if and only if locks clash; where S and IX were joined to X more is locked, never less."""
    conflicts = any(conflict(a, b) for a, b in product(one, two))
    held = [flat_holds(accesses, subtrees=True)[0] for accesses in (one, two)]
    separate = [[hold for a in accesses for hold in flat_holds([a], subtrees=True)[0]] for accesses in (one, two)]
    assert conflicts == any(a == b and not COMPATIBLE[m][n] for (a, m), (b, n) in product(separate[0], separate[1]))
    for flat, apart in zip(held, separate, strict=True):
        assert [key for key, _ in flat] == sorted({key for key, _ in apart})
        modes = {key: {m for k, m in apart if k == key} for key, _ in flat}
        for key, mode in flat:
            assert mode == (X if {S, IX} <= modes[key] else max(modes[key]))
    joined = any({S, IX} <= {m for k, m in apart if k == key} for apart in separate for key, _ in apart)
    if clash(*held) != conflicts:
        assert clash(*held)
        assert joined


@given(
    st.lists(st.sampled_from([a for a in ACCESSES if not a.subtree]), max_size=3),
    st.lists(st.sampled_from([a for a in ACCESSES if not a.subtree]), max_size=3),
)
def test_without_subtrees_node_locks_are_enough(one: list[Access], two: list[Access]) -> None:
    """F1: where no tool declares a subtree, one lock an access excludes exactly what conflicts."""
    held = [flat_holds(accesses, subtrees=False)[0] for accesses in (one, two)]
    assert clash(*held) == any(conflict(a, b) for a, b in product(one, two))
    assert sum(map(len, held)) <= len(one) + len(two)


@given(one=st.lists(st.sampled_from(ACCESSES), max_size=3), two=st.lists(st.sampled_from(ACCESSES), max_size=3))
def test_s4_within_means_that_nothing_is_touched_beside(one: list[Access], two: list[Access]) -> None:
    """S4: where one set of accesses is within another, whoever conflicts with it conflicts with the other too."""
    assert within(one, one)
    assert within([], two)
    assert within(one, []) == (not one)
    if within(one, two):
        for third in [*one, *two]:
            for write in (False, True):
                probe = Access(third.key, write, third.subtree, "probe")
                if any(conflict(probe, mine) for mine in one):
                    assert any(conflict(probe, theirs) for theirs in two)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (("a/b", True, False), ("a", True, True), True),
        (("a/b", True, True), ("a", True, True), True),
        (("a/b", False, False), ("a", True, True), True),
        (("a/b", True, False), ("a", False, True), False),
        (("a", True, True), ("a", True, False), False),
        (("a", True, False), ("a/b", True, True), False),
        (("ab", False, False), ("a", False, True), False),
    ],
)
def test_s4_what_is_within_what(inner: tuple[str, bool, bool], outer: tuple[str, bool, bool], expected: bool) -> None:
    """S4: a node in a subtree, never a subtree in a node, never a write in a read."""
    made = [Access(canonical_key(f"k:{key}"), write, subtree, "t") for key, write, subtree in (inner, outer)]
    assert within(made[:1], made[1:]) == expected


# --- real inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfcl_parallel", "bfcl_live_parallel"])
def test_r22_real_parallel_calls_meet_only_on_equal_arguments(
    shared_data: Callable[[str], list[dict[str, object]]], name: str
) -> None:
    """R-17, R-22: batches that models emitted: calls of one tool meet if and only if the keyed argument is the same."""
    pairs = 0
    for record in shared_data(name):
        calls = [(tool, given) for call in record["ground_truth"] for tool, given in call.items()]  # type: ignore[attr-defined]
        keyed = []
        for tool, accepted in calls:
            values = {key: options[0] for key, options in accepted.items() if options}
            scalar = [k for k, v in values.items() if isinstance(v, str | int | float) and v != ""]
            if scalar:
                [access] = rule(None, f"{tool}:{{{scalar[0]}}}", names=" ".join(values)).accesses(values)
                keyed.append((tool, scalar[0], values[scalar[0]], access))
        for (tool, key, value, access), (tool2, key2, value2, access2) in product(keyed, repeat=2):
            if (tool, key) == (tool2, key2) and type(value) is type(value2):
                assert (conflict(access, access2) is not None) == (value == value2)
                pairs += 1
    assert pairs > 50


@pytest.mark.parametrize(
    ("declared", "known", "unknown", "expected"),
    [
        ("ticket:{id}", {"id": 7}, (), ["ticket:7"]),
        ("ticket:{id}", {"id": 7}, ("note",), ["ticket:7"]),
        ("ticket:{id}", {}, ("id",), ["ticket:/**"]),
        ("ticket:{id}", {}, (), ["ticket:/**"]),  # a default, which is filled in later
        ("ticket:t{id}", {}, ("id",), ["ticket:/**"]),
        ("desk/{area}/row{id}", {"area": "north"}, ("id",), ["/desk/north/**"]),
        ("desk/{area}/{id}", {"id": 1}, ("area",), ["/desk/**"]),
        ("desk/{areas}/{id}", {"areas": ["n", "s"]}, ("id",), ["/desk/**"]),
        ("desk/{area}/**", {}, ("area",), ["/desk/**"]),
        ("config:main", {}, ("id",), ["config:main"]),
        ("file:{path}", {}, ("path",), ["file:/**"]),
        ("file:~/{path}", {}, ("path",), ["file:/**"]),
        ("file:/no/such/{name}", {}, ("name",), ["file:/no/such/**"]),
        ("file:/{area}/{name}", {"area": "n\0"}, ("name",), ["file:/**"]),
        ("ticket:{area}/{name}", {"area": ".."}, ("name",), None),
        ("ticket:{area}/{name}", {"area": "n", "name": ".."}, (), ["ticket:n/**"]),
        ("log", {}, ("x",), ["/log"]),
        ("{name}", {}, ("name",), None),
        (lambda id: f"ticket:{id}", {"id": 1}, ("other",), None),
    ],
)
def test_s1_while_a_value_is_not_there_the_text_before_it_is_locked_with_all_below(
    declared: object, known: dict[str, object], unknown: tuple[str, ...], expected: list[str] | None
) -> None:
    found = rule(declared).foreseen(known, unknown)
    assert (found if found is None else [told(access)[2:] for access in found]) == expected


def test_s1_a_read_that_a_foreseen_write_covers_is_left_out() -> None:
    found = rule("ticket:{id}", "ticket:{id}").foreseen({}, ("id",))
    assert found is not None
    assert [told(access) for access in found] == ["w ticket:/**"]


@given(
    template=st.sampled_from(("t:{a}", "t:x/{a}/{b}", "d/{a}", "d/{a}/e/{b}", "d/{b}/**", "t:{a}{b}", "u:fixed")),
    values=st.fixed_dictionaries({name: st.one_of(st.integers(0, 3), st.sampled_from("xyz")) for name in "ab"}),
    unknown=st.sets(st.sampled_from("ab")),
)
def test_s1_what_is_touched_is_within_what_was_foreseen(
    template: str, values: dict[str, object], unknown: set[str]
) -> None:
    compiled = rule(None, template)
    foreseen = compiled.foreseen({name: value for name, value in values.items() if name not in unknown}, unknown)
    assert foreseen is not None
    assert within(compiled.accesses(values), foreseen)
    if not unknown:
        assert list(map(told, foreseen)) == list(map(told, compiled.accesses(values)))
