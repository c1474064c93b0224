"""References in the arguments of a plan: read, linked or refused, followed and filled in (G5, R-29 to R-39)."""

from __future__ import annotations

import copy
import json
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from towerman.errors import CODES
from towerman.plan import (
    AGREED,
    EACH,
    Bound,
    Plan,
    PlanRefused,
    Reference,
    UnresolvedReference,
    escape,
    escape_text,
    following,
    read_references,
    written,
)

Arguments = Mapping[str, Any]


def link(arguments: Arguments, ids: Sequence[str] = ("a", "b"), **options: Any) -> Bound | None:
    """The arguments of a last step that stands behind steps with these ids."""
    size = len(ids)
    linked = read_references([*ids, "last"], [*[None] * size, arguments], [()] * (size + 1), **options)
    return None if linked is None else linked.bound[-1]


def fill(arguments: Arguments, *values: Any, ids: Sequence[str] = ("a", "b")) -> dict[str, Any]:
    """What the arguments become when the steps before them have these values."""
    bound = link(arguments, ids)
    assert bound is not None
    return bound.resolve(lambda step: values[step])


def refused(
    arguments: Arguments, ids: Sequence[str] = ("a", "b"), needs: Sequence[str] = (), **options: Any
) -> PlanRefused:
    with pytest.raises(PlanRefused) as caught:
        read_references([*ids, "last"], [*[None] * len(ids), arguments], [*[()] * len(ids), needs], **options)
    assert caught.value.code in CODES
    return caught.value


# Reading.


@pytest.mark.parametrize(
    ("text", "step", "path"),
    [
        ("a", 0, ()),
        ("b", 1, ()),
        ("a#", 0, ()),
        ("a#/", 0, ("",)),
        ("a#/items/0/id", 0, ("items", "0", "id")),
        ("a#/x~1y/~0/~01", 0, ("x/y", "~", "~1")),
        ("a#/ a.b[0]", 0, (" a.b[0]",)),
        ("a.items[0].id", 0, ("items", 0, "id")),
        ("a[0][12]", 0, (0, 12)),
        ("a.Exchange Rate", 0, ("Exchange Rate",)),
        ("a.0", 0, ("0",)),
        ("a[*].name", 0, (EACH, "name")),
        ("a[=].name[0]", 0, (AGREED, "name", 0)),
        ("a.*", 0, ("*",)),
        ('a["x.y"].z', 0, ("x.y", "z")),
        ('a["\\u007d\\"]"][0]', 0, ('}"]', 0)),
    ],
)
def test_a_reference_names_a_step_and_a_path(text: str, step: int, path: tuple[str | int, ...]) -> None:
    """R-39: a reference names one step and where in its result; both syntaxes say the same."""
    bound = link({"x": {"$ref": text}, "y": f"${{{text}}}", "z": f"- ${{{text}}}"})
    assert bound is not None
    assert bound.references == (Reference(step, path),)
    assert bound.paths == dict.fromkeys("xyz", (Reference(step, path),))
    again = link({"x": {"$ref": written("ab"[step], path)}, "y": f"${{{written('ab'[step], path)}}}"})
    assert again is not None
    assert again.references == bound.references


def test_ids_are_compared_exactly_and_the_longest_that_fits_is_meant() -> None:
    """R-32: `s1` is not `s10`, and an id with dots is an id before it is a path."""
    ids = ["s1", "s10", "s1.x", "s1.x.y", "s1[0]", "s1#/x"]
    for text, reference in {
        "s1": Reference(0),
        "s10": Reference(1),
        "s10.x": Reference(1, ("x",)),
        "s1.x": Reference(2),
        "s1.x.y": Reference(3),
        "s1.x.z": Reference(2, ("z",)),
        "s1.xy": Reference(0, ("xy",)),
        "s1[0]": Reference(4),
        "s1[0][0]": Reference(4, (0,)),
        "s1[1]": Reference(0, (1,)),
        "s1#/x": Reference(5),
        "s1#/x#/y": Reference(5, ("y",)),
        "s1#/y": Reference(0, ("y",)),
    }.items():
        bound = link({"v": f"${{{text}}}"}, ids)
        assert bound is not None, text
        assert bound.references == (reference,), text
    for text in ("s", "s100", "S1", " s1", "s1 ", "s11.x"):
        assert refused({"v": f"${{{text}}}"}, ids).code == "unknown_dependency", text


@pytest.mark.parametrize("value", ["$5", "$", "a $ b", "US$ 3.50", "{a}", "$a", "$ {a}", "a}", "", "$ref"])
def test_a_dollar_before_anything_else_is_itself(value: str) -> None:
    """Prices and shell words stay as they are: without a reference or an escape there is nothing to bind."""
    assert link({"x": value, "y": [value, {"z": value}], "n": 3}) is None
    assert escape(value) == value


def test_escapes() -> None:
    """`$$` is a `$`, and a key loses one of its dollars before `ref`, at the top and inside."""
    given = {
        "x": "$${a} $$5 $$$$ $$",
        "$$ref": {"$$ref": "a", "$$$ref": 1},
        "y": ["$${a}"],
        "$$$ref": 2,
        "$refs": 3,
        "k": {"${a}": "$$x", "$$x": "$"},
    }
    bound = link(given)
    assert bound is not None
    assert bound.references == ()
    assert bound.open == frozenset()
    wanted = {
        "x": "${a} $5 $$ $",
        "$ref": {"$ref": "a", "$$ref": 1},
        "y": ["${a}"],
        "$$ref": 2,
        "$refs": 3,
        "k": {"${a}": "$x", "$$x": "$"},
    }
    assert bound.resolve(lambda step: pytest.fail("nothing is asked for")) == bound.known() == wanted
    assert list(bound.resolve(lambda step: None)) == list(wanted)


@pytest.mark.parametrize(
    ("value", "place", "fix"),
    [
        ("${a", "arguments.x:", "write '$$'"),
        ("text ${a} ${", "arguments.x:", "without a '}'"),
        ("${}", "arguments.x:", "without the id"),
        ("${.id}", "arguments.x:", "without the id"),
        ({"$ref": 3}, "arguments.x:", "wants text"),
        ({"$ref": None}, "arguments.x:", "wants text"),
        ({"$ref": ["a"]}, "arguments.x:", "wants text"),
        ({"$ref": ""}, "arguments.x:", "without the id"),
        ({"$ref": "a", "other": 1}, "arguments.x:", "no other key"),
        ("${a#items}", "arguments.x:", "begins with '/'"),
        ("${a#/~2}", "arguments.x:", "'~0'"),
        ("${a#/x~}", "arguments.x:", "'~0'"),
        ("${a..b}", "arguments.x:", "a path is made of"),
        ("${a.}", "arguments.x:", "a path is made of"),
        ("${a[}", "arguments.x:", "a path is made of"),
        ("${a[-1]}", "arguments.x:", "a path is made of"),
        ("${a[01]}", "arguments.x:", "a path is made of"),
        ("${a[0}", "arguments.x:", "a path is made of"),
        ("${a[0]x}", "arguments.x:", "a path is made of"),
        ("${a.b#/c}", "arguments.x:", "a path is made of"),
        ('${a["b}', "arguments.x:", "a JSON string"),
        ('${a["b"}', "arguments.x:", "without a ']'"),
        ([1, {"deep": ["${a"]}], "arguments.x[1].deep[0]:", "without a '}'"),
        ({"s3cr3t value": "${a"}, "arguments.x.<key>:", "without a '}'"),
    ],
)
def test_a_malformed_reference_refuses_the_plan(value: Any, place: str, fix: str) -> None:
    """G5, G8: `bad_reference` names the step, the place in its arguments and the fix, and never what stands there."""
    fault = refused({"ok": "${b}", "x": value})
    assert fault.code == "bad_reference"
    assert fault.members == (2,)
    assert str(fault).startswith(f"call 'last': {place}")
    assert fix in str(fault)
    assert "s3cr3t" not in str(fault)


def test_places_are_cut_and_counted() -> None:
    """G8: a deep place is told in part, and of many places the first are named and the rest counted."""
    value: Any = "${a"
    for _ in range(30):
        value = [value]
    assert "arguments.x[0][0][0][0]...[0]" in str(refused({"x": value}))
    fault = refused({"x": ["${a"] * 20})
    assert str(fault).count("arguments.x[") == 8
    assert "and 12 more such places" in str(fault)
    assert "arguments: a reference stands for one argument" in str(refused({"$ref": "a"}))


def test_a_reference_in_a_key_is_not_read() -> None:
    """Keys are what the tool's schema names."""
    assert link({"${a}": 1, "x": {"${zzz}": 2}}) is None


# Linking.


def test_references_become_needs() -> None:
    """R-29, R-39: a step waits for the steps that it names, then for those that it refers to, each once."""
    linked = read_references(
        ["a", "b", "c", "d"],
        [{"x": 1}, None, {"x": "${b} ${a}", "y": {"$ref": "b"}}, {}],
        [(), (), ["a"], "c"],
    )
    assert linked is not None
    assert linked.needs == [(), (), (0, 1), (2,)]
    assert [each is not None for each in linked.bound] == [False, False, True, False]
    Plan(4, linked.needs).validate()
    assert repr(linked) == "Linked(4 steps, 1 with references)"
    assert read_references(["a", ""], [{"x": "$5"}, None], [(), ()]) is None
    assert read_references([], [], []) is None


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="arguments: 1 entries, needs: 2 entries, for 2 steps"):
        read_references(["a", "b"], [None], [(), ()])


def test_r33_repeated_ids_are_refused_needed_or_not() -> None:
    """R-33: and before anything else that is wrong with the plan."""
    with pytest.raises(PlanRefused) as caught:
        read_references(["a", "", "a", ""], [{"x": "${a"}, None, {"x": "${zzz}"}, None], [(), (), ["q"], ()])
    assert caught.value.code == "duplicate_call_id"
    assert caught.value.members == (0, 2)
    assert "several steps of this plan have this id" in str(caught.value)
    assert read_references(["", "", "a"], [None] * 3, [(), (), ()]) is None


def test_r32_an_unknown_step_has_its_own_code() -> None:
    """R-32, G8: needs are named as they were given; a reference is told by its place, with ids that come near."""
    fault = refused({"x": ["${lookup_2.y}"]}, ["lookup_1", "b"])
    assert (fault.code, fault.members) == ("unknown_dependency", (2,))
    assert str(fault).startswith("call 'last' refers to a step at arguments.x[0]: no call of this batch has that id")
    assert "near it come 'lookup_1'" in str(fault)
    assert "lookup_2" not in str(fault)
    assert "write '$$'" in str(fault)
    fault = refused({"x": "${q}"}, needs=["zzz"])
    assert "call 'last' refers to a step at arguments.x, call 'last' needs 'zzz'" in str(fault)
    fault = refused({}, needs=["B"])
    assert "near 'B' come 'b'" in str(fault)
    assert "$" not in str(fault)


def test_an_id_out_of_range_where_ids_are_numbers() -> None:
    """G5: in a form with numbered steps an id that is not there is `bad_reference`."""
    fault = refused({"x": "${7}"}, ["1", "2"], needs=["9"], numbered=True)
    assert (fault.code, fault.members) == ("bad_reference", (2,))
    assert "out of range" in str(fault)
    assert "from '1' to '2'" in str(fault)
    with pytest.raises(PlanRefused, match="no call of this batch has an id"):
        read_references([""], [{"x": "${7}"}], [()], numbered=True)


def test_forward_references_where_the_form_forbids_them() -> None:
    """G5: `bad_reference`, by reference or by need; allowed elsewhere."""
    arguments: list[Arguments | None] = [{"x": "${c}"}, None, None]
    linked = read_references(["a", "b", "c"], arguments, [(), (), ()])
    assert linked is not None
    assert linked.needs == [(2,), (), ()]
    for needs in ([(), (), ()], [(), ["c"], ()]):
        with pytest.raises(PlanRefused) as caught:
            read_references(["a", "b", "c"], arguments, needs, ordered=True)
        assert caught.value.code == "bad_reference"
        assert caught.value.members == ((0, 1) if needs[1] else (0,))
        assert "call 'a' waits for call 'c'" in str(caught.value)
    many = read_references  # the rest is counted
    with pytest.raises(PlanRefused, match="and 2 more such steps"):
        many([f"s{i}" for i in range(11)], [{"x": "${s10}"}] * 10 + [None], [()] * 11, ordered=True)


def test_r31_self_and_r30_circles() -> None:
    """R-30, R-31: a step that refers to itself is a cycle, also where steps are in order; its members are named."""
    for options in ({}, {"ordered": True, "numbered": True}):
        fault = refused({"x": "${last.y}"}, **options)
        assert (fault.code, fault.members) == ("dependency_cycle", (2,))
        assert "call 'last' needs itself" in str(fault)
    with pytest.raises(PlanRefused) as caught:
        read_references(["a", "b", "c"], [{"x": "${b}"}, {"x": "${c}"}, None], [(), (), ["a"]])
    assert (caught.value.code, caught.value.members) == ("dependency_cycle", (0, 1, 2))
    assert "call 'a' needs call 'b', call 'b' needs call 'c', call 'c' needs call 'a'" in str(caught.value)


def test_the_order_of_checks() -> None:
    """G5: repeated ids, then malformed, unknown, forward, circular: the first that is found is told."""
    faults: list[tuple[str, str, Arguments]] = [
        ("bad_reference", "without a '}'", {"x": "${a"}),
        ("unknown_dependency", "no call", {"x": "${zzz}"}),
        ("bad_reference", "waits for", {"x": "${end}"}),
        ("dependency_cycle", "needs itself", {"x": "${s3}"}),
    ]
    for first in range(4):
        arguments = [{}] * first + [each for _, _, each in faults[first:]] + [{}]
        with pytest.raises(PlanRefused) as caught:
            read_references(["s0", "s1", "s2", "s3", "end"], arguments, [()] * 5, ordered=True)
        code, told, _ = faults[first]
        assert caught.value.code == code
        assert told in str(caught.value)


# Filling in.


def test_a_whole_value_keeps_its_type_and_text_is_pasted() -> None:
    """Each JSON type; text as it is, everything else as compact JSON."""
    for value, text in [
        ('é " ${a}', 'é " ${a}'),
        ("", ""),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        (None, "null"),
        ([1, "é"], '[1,"é"]'),
        ({"k": [None]}, '{"k":[null]}'),
        ([], "[]"),
    ]:
        found = fill({"w": {"$ref": "a"}, "t": "${a}", "p": "<${a}>", "q": "${a}${a} $$"}, value)
        assert found == {"w": value, "t": value, "p": f"<{text}>", "q": f"{text}{text} $"}
        assert type(found["w"]) is type(value)


def test_what_is_pasted_in_is_never_read_again() -> None:
    """A result that looks like a reference or an escape stays what it is."""
    evil = {"$ref": "b", "t": "${b} $$"}
    found = fill({"x": {"$ref": "a"}, "y": "${a.t}", "z": "<${a.t}${a#/$ref}>"}, evil, "secret of b")
    assert found == {"x": evil, "y": "${b} $$", "z": "<${b} $$b>"}


def test_inside_lists_and_objects() -> None:
    """At any depth, beside what is no reference; order of keys and items is kept."""
    given = {
        "q": [1, {"deep": ["${a.x}", {"$ref": "b"}, "t ${b}"], "n": 0}, [[]]],
        "r": {"s": {"$ref": "a"}},
        "u": 1,
    }
    found = fill(given, {"x": [7]}, 8)
    assert found == {"q": [1, {"deep": [[7], 8, "t 8"], "n": 0}, [[]]], "r": {"s": {"x": [7]}}, "u": 1}
    assert list(found) == ["q", "r", "u"]
    assert list(found["q"][1]) == ["deep", "n"]


def test_a_tuple_or_a_mapping_of_another_kind_is_read_too() -> None:
    """Arguments that a program wrote need not be plain dicts and lists."""
    given = {"x": ("${a}", 1), "y": MappingProxyType({"k": "${a}", 3: 4}), "z": MappingProxyType({"k": "v"})}
    assert fill(given, 5) == {"x": [5, 1], "y": {"k": 5, 3: 4}, "z": {"k": "v"}}


def test_which_arguments_are_open() -> None:
    """S1: `open` are the arguments whose value other steps decide; `known` are the rest, as they will be."""
    bound = link({"x": "${a.k} ${b}", "y": {"z": [{"$ref": "b"}]}, "p": "$$5", "l": [1]})
    assert bound is not None
    assert bound.open == {"x", "y"}
    assert bound.paths == {"x": (Reference(0, ("k",)), Reference(1)), "y": (Reference(1),)}
    assert bound.references == (Reference(0, ("k",)), Reference(1))
    assert bound.known() == {"p": "$5", "l": [1]}
    assert repr(bound) == "Bound(2 references, 2 of 4 arguments open)"
    assert repr(bound.references[0]) == "Reference(step=0, path=1)"


def test_a_value_is_asked_for_once_for_each_step() -> None:
    """However many references lead to it; and an error of the caller's passes."""
    bound = link({"x": "${a} ${a} ${b}", "y": ["${a}"]})
    assert bound is not None
    asked: list[int] = []
    bound.resolve(lambda step: asked.append(step))
    assert sorted(asked) == [0, 1]

    def fails(step: int) -> object:
        raise KeyError(step)

    with pytest.raises(KeyError):
        bound.resolve(fails)


def test_what_is_handed_on_is_a_copy() -> None:
    """R-39: whoever gets a result cannot change it, nor what another reader gets, nor the plan's own arguments."""
    value = {"k": [1, {"z": 2}]}
    given = {"x": {"$ref": "a"}, "y": {"$ref": "a.k"}, "own": [{"m": [3]}, "$$"], "plain": {"n": [4]}}
    before = copy.deepcopy(given)
    bound = link(given)
    assert bound is not None
    first = bound.resolve(lambda step: value)
    first["x"]["k"][1]["z"] = first["y"][0] = 99
    first["own"][0]["m"].append(99)
    first["plain"]["n"].append(99)
    assert value == {"k": [1, {"z": 2}]}
    assert given == before
    assert bound.resolve(lambda step: value) == {
        "x": value,
        "y": value["k"],
        "own": [{"m": [3]}, "$"],
        "plain": {"n": [4]},
    }


class Position(NamedTuple):
    lat: float
    lon: float


class Place(BaseModel):
    name: str
    at: list[float]


@dataclass
class Shop:
    place: Place
    opened: date


Row = namedtuple("Row", "id tags")


@pytest.mark.parametrize(
    ("value", "path", "found"),
    [
        (Place(name="n", at=[1.0, 2.0]), ".at[1]", 2.0),
        (Place(name="n", at=[1.0]), "", {"name": "n", "at": [1.0]}),
        (Shop(Place(name="n", at=[]), date(2026, 1, 2)), ".opened", "2026-01-02"),
        (Shop(Place(name="n", at=[]), date(2026, 1, 2)), "#/place/name", "n"),
        ({"p": Position(1.5, 2.5)}, ".p.lon", 2.5),
        ({"p": Position(1.5, 2.5)}, ".p[0]", 1.5),
        ({"p": Position(1.5, 2.5)}, "#/p/1", 2.5),
        ({"p": Position(1.5, 2.5)}, "", {"p": [1.5, 2.5]}),
        ([Row(1, ["t"]), Row(2, [])], "[*].id", [1, 2]),
        (OrderedDict(k=[1]), ".k[0]", 1),
        ({1: "one", "x": date(2026, 1, 2)}, "#/1", "one"),
        ({1: "one", "x": date(2026, 1, 2)}, "", {"1": "one", "x": "2026-01-02"}),
        ((1, (2, 3)), "[1]", [2, 3]),
        ({"s": {3}}, ".s[0]", 3),
        (date(2026, 1, 2), "", "2026-01-02"),
    ],
)
def test_models_and_other_objects_are_read_by_their_json_form(value: Any, path: str, found: Any) -> None:
    """What a handler may return is followed as the model is shown it; named tuples are lists with names."""
    filled = fill({"x": {"$ref": f"a{path}"}, "t": f"- ${{a{path}}}"}, value)
    assert filled["x"] == found
    assert filled["t"] == f"- {found}" if isinstance(found, str) else json.loads(filled["t"][2:]) == found


def test_text_that_is_a_json_document_is_looked_into() -> None:
    """Many tools return JSON as text: a path leads into it, and handed on whole it stays text."""
    text = ' {"items": [{"id": 7}], "inner": "[1, 2]"}'
    found = fill({"x": "${a.items[0].id}", "y": "${a.inner[1]}", "z": {"$ref": "a"}, "e": "${a.items[*].id}"}, text)
    assert found == {"x": 7, "y": 2, "z": text, "e": [7]}


def test_projection_over_a_list() -> None:
    """`[*]` is every member of a list, nested lists stay nested; of what is no list it is that itself."""
    albums = [{"name": "x", "songs": [{"t": 1}, {"t": 2}]}, {"name": "y", "songs": []}]
    assert fill({"x": "${a[*].name}", "y": "${a[*].songs[*].t}", "z": "${b[*].name}"}, albums, {"name": "one"}) == {
        "x": ["x", "y"],
        "y": [[1, 2], []],
        "z": "one",
    }
    assert fill({"x": "${a[*]}", "y": "${b[*][*]}", "z": "${b[*].n}"}, [1, [2]], []) == {
        "x": [1, [2]],
        "y": [],
        "z": [],
    }
    assert fill({"x": "${a[*]}", "y": "${b[*]}"}, "text", Place(name="n", at=[])) == {
        "x": "text",
        "y": {"name": "n", "at": []},
    }
    assert fill({"x": "${a[*].t}"}, '[{"t": 1}]') == {"x": [1]}


def test_what_all_members_of_a_list_agree_on() -> None:
    """`[=]` is the one value that every member of a list has, in its own type; of what is no list, that itself."""
    rows = [{"id": 7, "at": {"x": [1]}}, {"id": 7, "at": {"x": [1]}}]
    assert fill({"x": "${a[=].id}", "y": "${a[=].at[=].x[=]}", "z": "${b[=].id}"}, rows, {"id": "one"}) == {
        "x": 7,
        "y": 1,
        "z": "one",
    }
    assert fill({"x": "${a[=]}", "y": "${b[*].t[=]}"}, '[{"t": 1}]', [{"t": [2]}, {"t": 3}]) == {
        "x": {"t": 1},
        "y": [2, 3],
    }


class Hostile(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("s3cr3t")


class HostileModel:
    def model_dump(self, **options: Any) -> Any:
        raise RuntimeError("s3cr3t")


def deep(levels: int, core: Any) -> Any:
    for _ in range(levels):
        core = [core]
    return core


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        ({"x": 1}, ".y", "part 1 of its path is a name that the result does not have there"),
        ({"x": {}}, ".x.y", "part 2 of its path is a name"),
        ({"0": 1}, "[0]", "is an index, and the result has an object there"),
        ([1], ".name", "is a name, and the result has a list there"),
        ([1], "[1]", "past the end of the list"),
        ([1], "#/00", "is a name, and the result has a list"),
        ([1], "#/-", "is a name, and the result has a list"),
        ([1], f"#/{'9' * 19}", "is a name, and the result has a list"),
        (3, ".x", "something that is no list and no object"),
        (None, "[0]", "something that is no list and no object"),
        ("text", ".x", "something that is no list and no object"),
        ('{"x": 1, "x": 2}', ".x", "no list and no object"),
        ('{"x": NaN}', ".x", "no list and no object"),
        ('{"x": 1', ".x", "no list and no object"),
        ("[" * 200_000, "[0]", "no list and no object"),
        ([{"x": 1}, {}], "[*].x", "part 2 of its path is a name"),
        ([], "[=].x", "part 1 of its path is to be the same of every member, and the result has an empty list there"),
        ({"x": [1, 2]}, ".x[=]", "part 2 of its path is to be the same of every member of a list, and they differ"),
        ([1, True], "[=]", "they differ"),
        ([{"x": 1}, {"x": 2}], "[=]", "they differ"),
        ([{"x": 1}, {"x": 1}, {}], "[=].x", "part 2 of its path is a name"),
        ([[object()], [object()]], "[=]", "has no JSON form"),
        (object(), "", "has no JSON form"),
        ({"x": object()}, "", "has no JSON form"),
        (object(), ".x", "has no JSON form"),
        (HostileModel(), ".x", "failed while it was read"),
        (Hostile(), "", "failed while it was read"),
        ({1: deep(200, 0)}, "", "nested too deep"),
        ({1: deep(200, 0)}, "#/1", "nested too deep"),
    ],
)
def test_a_path_that_leads_nowhere(value: Any, path: str, reason: str) -> None:
    """G8: UnresolvedReference says which reference and why, by positions and kinds: no name, no value."""
    bound = link({"x": {"$ref": f"a{path}"}})
    assert bound is not None
    with pytest.raises(UnresolvedReference) as caught:
        bound.resolve(lambda step: value)
    assert caught.value.reference == bound.references[0]
    assert reason in caught.value.reason
    assert str(caught.value) == caught.value.reason
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "s3cr3t" not in repr(caught.value)


def test_what_cannot_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no JSON form, is inside itself or is too large for a text is told; a whole value may be large."""
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), loop, deep(200, 0)):
        bound = link({"x": "- ${a}"})
        assert bound is not None
        with pytest.raises(UnresolvedReference):
            bound.resolve(lambda step, value=value: value)
    monkeypatch.setattr(following, "MAX_PASTED", 100)
    with pytest.raises(UnresolvedReference, match="too large"):
        fill({"x": "- ${a}"}, ["y" * 100])
    assert fill({"x": "${a}"}, ["y" * 100]) == {"x": ["y" * 100]}
    copied = fill({"x": "${a}"}, loop)["x"]
    assert copied[0] is copied


# Deep, wide, and shared.


def test_deep_arguments_and_results_do_not_recurse() -> None:
    """Whatever depth: reading, linking, filling in, escaping."""
    for bottom, wanted in (("${a.x}", 5), ("$$", "$")):
        found = fill({"v": deep(20_000, bottom), "w": deep(20_000, "plain")}, {"x": 5})
        value = found["v"]
        for _ in range(20_000):
            value = value[0]
        assert value == wanted
    assert fill({"v": {"$ref": "a" + "[0]" * 20_000}}, deep(20_000, 3)) == {"v": 3}
    assert fill({"v": {"$ref": "a" + "[*]" * 20_000}}, 3) == {"v": 3}
    deepest = escape(deep(20_000, "${a}"))
    for _ in range(20_000):
        deepest = deepest[0]  # type: ignore[index]
    assert deepest == "$${a}"
    assert refused({"v": deep(20_000, "${zzz}")}).code == "unknown_dependency"


def test_shared_and_circular_parts_of_arguments() -> None:
    """A part that arguments hold many times is read once; one inside itself is left to whoever checks arguments."""
    shared: Any = ["${a}", "$"]
    for _ in range(60):
        shared = [shared, shared]
    bound = link({"v": shared})
    assert bound is not None
    assert bound.references == (Reference(0),)
    plain: Any = ["x"]
    for _ in range(60):
        plain = [plain, plain]
    assert link({"v": plain}) is None
    loop: list[Any] = ["${a}"]
    loop.append(loop)
    bound = link({"v": loop})
    assert bound is not None
    assert bound.references == (Reference(0),)


def test_a_value_that_fails_deep_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while a result is read is told without its text, also where the stack is nearly used up."""

    def read(self: object, value: object, depth: int) -> object:
        raise RecursionError("s3cr3t")

    monkeypatch.setattr("towerman.bounds.reading.Reader.read", read)
    with pytest.raises(UnresolvedReference, match="failed while it was read"):
        fill({"x": "${a}"}, date(2026, 1, 2))


def test_the_plans_own_values_are_left_as_they_are() -> None:
    """What a program put into the arguments is not turned into JSON."""
    day = date(2026, 1, 2)
    assert fill({"x": [day, {1: "one"}], "y": "${a}", "z": day}, 1) == {"x": [day, {1: "one"}], "y": 1, "z": day}


def per_step(size: int, make: Callable[[int], Arguments]) -> float:
    ids = [f"s{i}" for i in range(size)]
    arguments = [make(i) for i in range(size)]
    begun = time.process_time()
    linked = read_references(ids, arguments, [()] * size)
    assert linked is not None
    Plan(size, linked.needs)
    return (time.process_time() - begun) / size


def test_a_hundred_thousand_steps_cost_as_much_each_as_a_thousand() -> None:
    """Reading and checking a plan is linear: a chain, a star, and steps that refer to ten others."""
    for size, make in (
        (100_000, lambda i: {"x": f"${{s{i - 1}.y}}" if i else 1}),
        (100_000, lambda i: {"x": [{"$ref": "s0#/y"}] if i else 1}),
        (20_000, lambda i: {"x": " ".join(f"${{s{j}}}" for j in range(max(0, i - 10), i)), "y": "$$"}),
    ):
        small = min(per_step(1_000, make) for _ in range(5))
        assert per_step(size, make) < 8 * small


def test_hostile_text_is_read_in_linear_time() -> None:
    """Many openings, many separators, many ids that fit in part."""
    size = 200_000
    begun = time.process_time()
    assert refused({"x": "${" * size}).code == "bad_reference"
    assert refused({"x": "${a" + ".a" * size + "."}).code == "bad_reference"
    assert refused({"x": "${z" + ".a" * size + "}"}, [".".join("a" * n) for n in range(1, 300)]).code.startswith("unk")
    assert fill({"x": "$" * size}) == {"x": "$" * (size // 2)}
    assert time.process_time() - begun < 20


# Properties.

keys = st.sampled_from(["$ref", "$$ref", "$$$ref", "a", "$x", "${a}"]) | st.text(max_size=4)
texts = st.text(alphabet="$ref{}a.#[]0 é", max_size=12)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(plain_json)
def test_escaped_data_comes_back_as_it_was(value: Any) -> None:
    """resolve(read(escape(x))) == x for all JSON data; nothing in it is a reference."""
    written_down = escape(value)
    linked = read_references(["a"], [{"x": written_down}], [()])
    if linked is None:
        assert written_down == value
        return
    [bound] = linked.bound
    assert bound is not None
    assert bound.references == ()
    assert bound.resolve(lambda step: None) == {"x": value}


@given(st.text(alphabet="${}ref", max_size=30))
def test_escaped_text_inside_text(text: str) -> None:
    """The same for a text that stands beside a reference."""
    piece = escape_text(text, whole=False)
    assert fill({"x": f"{piece}${{a}}{piece}${{a}}"}, 1) == {"x": f"{text}1{text}1"}


@given(st.text(max_size=20), st.lists(st.text(max_size=6) | st.integers(AGREED, 10**17), max_size=5))
def test_a_written_reference_is_read_back(name: str, path: list[str | int]) -> None:
    """Any path, also with names that hold the signs of the syntax."""
    text = written("step", tuple(path))
    bound = link({"x": {"$ref": text}, "y": f"${{{text}}} "}, ["step", name + "_"])
    assert bound is not None
    assert bound.references == (Reference(0, tuple(path)),)


@given(st.text(alphabet='${}[]#/.~*="ab01\\ ', max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever is written: references, or a PlanRefused that does not repeat it."""
    for value in (text, {"$ref": text}, "${" + text + "}"):
        code: str | None = None
        steps: set[int] = set()
        try:
            bound = link({"x": value})
            steps = {each.step for each in bound.references} if bound else set()
        except PlanRefused as fault:
            code = fault.code
        assert code in (None, "bad_reference", "unknown_dependency")
        assert steps <= {0, 1}


def walk(draw: Any, value: Any) -> tuple[list[str | int], Any]:
    """A path into a value, and what is there."""
    path: list[str | int] = []
    while isinstance(value, dict | list) and value and draw(st.booleans()):
        if isinstance(value, dict):
            key = draw(st.sampled_from(sorted(value)))
            path.append(key)
        else:
            key = draw(st.integers(0, len(value) - 1))
            path.append(key if draw(st.booleans()) else str(key))
        value = value[key]
    return path, value


def pointer(path: Sequence[str | int]) -> str:
    return "".join("/" + str(each).replace("~", "~0").replace("/", "~1") for each in path)


@given(st.data())
def test_a_plan_gives_the_values_of_its_steps_run_one_by_one(data: st.DataObject) -> None:
    """R-29, R-39: a random plan, interpreted step by step while it is being written, gives every step the same
    arguments as the references that were read from it, in any order that its needs allow."""
    draw = data.draw
    size = draw(st.integers(1, 6))
    ids = draw(
        st.lists(st.text(alphabet="ab.[#0 é", min_size=1, max_size=4), min_size=size, max_size=size, unique=True)
    )
    plan: list[dict[str, Any]] = []
    meant: list[dict[str, Any]] = []
    values: list[Any] = []

    def one(depth: int) -> tuple[Any, Any]:
        """An argument as it is written, and what it means."""
        kind = draw(st.sampled_from(["plain", "ref", "text", "list", "object"] if depth else ["plain", "ref", "text"]))
        if kind == "list":
            pairs = [one(depth - 1) for _ in range(draw(st.integers(0, 3)))]
            return [given for given, _ in pairs], [value for _, value in pairs]
        if kind == "object":
            names = draw(st.lists(st.sampled_from(["a", "b", "$refs", "é"]), unique=True))
            entries = {name: one(depth - 1) for name in names}
            return {k: v[0] for k, v in entries.items()}, {k: v[1] for k, v in entries.items()}
        if kind == "plain" or not values:
            value = draw(plain_json)
            return escape(value), value
        step = draw(st.integers(0, len(values) - 1))
        path, value = walk(draw, values[step])
        reference = f"{ids[step]}#{pointer(path)}"
        if kind == "text" and "}" not in reference:
            before = draw(st.text(alphabet="$ {}x", max_size=4))
            pasted = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            return f"{escape_text(before, whole=False)}${{{reference}}}", before + pasted if before else value
        return {"$ref": reference}, value

    for index in range(size):
        made = {name: one(2) for name in draw(st.lists(st.sampled_from("xyz"), unique=True))}
        plan.append({name: given for name, (given, _) in made.items()})
        meant.append({name: value for name, (_, value) in made.items()})
        values.append({"of": index, "got": meant[-1], "again": [meant[-1]]})
    try:
        linked = read_references(ids, plan, [()] * size)
    except PlanRefused:
        # Only where an id looks like another one with a path, which then is meant.
        assert any(a != b and b.startswith(a) for a in ids for b in ids)
        return
    if any(a != b and b.startswith(a) for a in ids for b in ids):
        return
    for index in range(size):
        bound = None if linked is None else linked.bound[index]
        assert (plan[index] if bound is None else bound.resolve(lambda step: values[step])) == meant[index]
        if linked is not None:
            assert ({each.step for each in bound.references} if bound else set()) == set(linked.needs[index])
