"""Plans as planners write them: each form is read, told apart from the others, refused with its place, and run."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
from kit import Stage, codes, on_stage

from towerman import BatchResult, Call, Context, InputError, PolicyError, Tower
from towerman.arguments import parameters_of
from towerman.calls import Batch
from towerman.core import read_plan as link
from towerman.forms import FORMS, find_form, read_plan
from towerman.forms.literals import Malformed, Reader
from towerman.plan import PlanRefused

stage = pytest.fixture(on_stage)

CANARY = "canary-51ce"


def tools(**known: Any) -> Any:
    """The parameters of these tools: names, with a `*` behind one that takes a list."""
    table = {name: {each.rstrip("*"): each.endswith("*") for each in names.split()} for name, names in known.items()}
    return table.get


def steps(batch: Batch) -> list[tuple[str, str, Any, tuple[str, ...]]]:
    """Tool, id, arguments and needs of each step."""
    assert batch.plan
    assert batch.refused is None, batch.refused
    return [(call.tool, call.id, call.arguments, tuple(call.needs)) for call in batch.calls]


def only(batch: Batch) -> Any:
    """The arguments of the only step."""
    [(_, _, arguments, _)] = steps(batch)
    return arguments


def refused(document: Any, form: str | None = None, known: Any = None) -> tuple[str, tuple[int, ...], str]:
    """Why a plan is refused: while it is read, or when it is linked."""
    batch = read_plan(document, form, known or tools())
    try:
        link(batch)
    except PlanRefused as fault:
        return fault.code, fault.members, fault.message
    raise AssertionError("it is not refused")


def recorder(stage: Stage, *names: str, **options: Any) -> tuple[Tower, list[tuple[str, Any]]]:
    """A tower whose tools take anything in up to two parameters, and what they were called with."""
    tower = stage.tower(**options)
    seen: list[tuple[str, Any]] = []

    def add(name: str) -> None:
        async def handler(first: Any = None, second: Any = None) -> Any:
            with stage.on(name):
                await asyncio.sleep(1)
                seen.append((name, [first, second]))
                return {"of": name, "rows": [{"id": 7}], "n": 3}

        tower.add_tool(handler, name=name, description="records", independent=True)

    for name in names:
        add(name)
    return tower, seen


def run(stage: Stage, tower: Tower, document: Any, **options: Any) -> BatchResult:
    async def main() -> BatchResult:
        return await tower.execute(document, plan=True, **options)

    return stage.run(main())


# ---------------------------------------------------------------------------------------------------- one plan each

LLMCOMPILER = """Thought: two look-ups, then a sum.
1. search("Oslo")
2. search('Bergen', limit=3)
3. math("${1} and $2", [$1, '$2', {"k": "$1"}])
Thought: that is all.
4. join()<END_OF_PLAN>
What comes here is the planner's own.
"""

REWOO = """I will look twice.
Plan: look. #E1 = Search[Oslo]
Plan: compare what was found
with what is known.
#E2 = Compare[#E1 and
[the] rest of #E1]
Plan: end
#E12 = Search[#E2]
"""

TASKBENCH = {
    "task_nodes": [
        {"task": "read", "arguments": ["example.jpg"]},
        {"task": "translate", "arguments": [{"name": "text", "value": "<node-0>"}, "to no"]},
        {"task": "say", "arguments": {"what": ["about <Node_1>"]}},
        {"task": "bow", "arguments": None},
    ],
    "task_links": [{"source": "read", "target": "say"}, {"source": "say", "target": "bow"}],
    "task_steps": ["unread"],
}

HUGGINGGPT = [
    {"task": "caption", "id": 0, "dep": [-1], "args": {"image": "a.jpg"}},
    {"task": "pose", "id": 4, "dep": [0], "args": {"image": "<GENERATED>-0", "text": "like <GENERATED-0>"}},
    {"task": "say", "id": 2, "dep": [0, 4]},
]

NESTFUL = [
    {"name": "find", "arguments": {"q": "Oslo"}, "label": "var1"},
    {"name": "route", "arguments": {"to": "$var1.pos.lat$", "text": "$5 to $var1.rows[0].id$"}, "label": "var2"},
    {"name": "log", "arguments": {"all": "$var1.rows$"}},
    {"name": "var_result", "arguments": {"names": "$var2.rows.id$", "whole": "$var2$"}},
]

WORFBENCH = """Here is the plan.
Node:
1: Find the place
with care.
2. Find the road
3) Go
Graph:
Edges: (START,1) (START, 2)
(1,3), (2,3) (3,END)
"""

PLANS: dict[str, Any] = {
    "llmcompiler": LLMCOMPILER,
    "rewoo": REWOO,
    "taskbench": TASKBENCH,
    "hugginggpt": HUGGINGGPT,
    "nestful": NESTFUL,
    "worfbench": WORFBENCH,
}

READ: dict[str, list[tuple[str, str, Any, tuple[str, ...]]]] = {
    "llmcompiler": [
        ("search", "1", {"q": "Oslo"}, ()),
        ("search", "2", {"q": "Bergen", "limit": 3}, ()),
        ("math", "3", {"problem": "${1} and ${2}", "context": ["${1}", "${2}", {"k": "${1}"}]}, ()),
    ],
    "rewoo": [
        ("Search", "E1", {"1": "Oslo"}, ()),
        ("Compare", "E2", {"1": "${E1} and\n[the] rest of ${E1}"}, ()),
        ("Search", "E12", {"1": "${E2}"}, ()),
    ],
    "taskbench": [
        ("read", "0", {"1": "example.jpg"}, ()),
        ("translate", "1", {"lang": "to no", "text": "${0}"}, ()),
        ("say", "2", {"what": ["about ${1}"]}, ("0",)),
        ("bow", "3", {}, ("2",)),
    ],
    "hugginggpt": [
        ("caption", "0", {"image": "a.jpg"}, ()),
        ("pose", "4", {"image": "${0}", "text": "like ${0}"}, ("0",)),
        ("say", "2", {}, ("0", "4")),
    ],
    "nestful": [
        ("find", "var1", {"q": "Oslo"}, ()),
        ("route", "var2", {"to": "${var1[=].pos[=].lat}", "text": "$$5 to ${var1[=].rows[0][=].id}"}, ()),
        ("log", "", {"all": "${var1[*].rows}"}, ()),
    ],
    "worfbench": [
        ("do", "1", {"what": "Find the place\nwith care."}, ()),
        ("do", "2", {"what": "Find the road"}, ()),
        ("do", "3", {"what": "Go"}, ("1", "2")),
    ],
}

KNOWN = tools(search="q limit", math="problem context*", translate="lang text", log="all*", do="what how")


def named(form: str) -> str:
    return "worfbench:do" if form == "worfbench" else form


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_found_and_read(form: str) -> None:
    """G5, R-29, R-39: steps, ids, arguments and what they need, as they were written; whatever carries the document."""
    plan = PLANS[form]
    assert find_form(plan) == form
    read = read_plan(plan, named(form), KNOWN)
    assert steps(read) == READ[form]
    assert link(read) is not None
    text = plan if isinstance(plan, str) else json.dumps(plan)
    for same in (text, text.encode(), bytearray(b"\xef\xbb\xbf" + text.encode()), text.replace("\n", "\r\n")):
        assert find_form(same) == form
        assert steps(read_plan(same, named(form), KNOWN)) == READ[form]
    if form != "worfbench":
        assert steps(read_plan(text, None, KNOWN)) == READ[form]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_form_promises_is_kept(form: str) -> None:
    """G5: some forms forbid a step to use a later one; in some the ids are numbers; one says what the plan comes to."""
    batch = read_plan(PLANS[form], named(form), KNOWN)
    assert batch.ordered == (form not in ("hugginggpt", "worfbench"))
    assert batch.numbered == (form != "nestful")
    assert batch.outputs == ({"names": "${var2[*].rows[*].id}", "whole": "${var2}"} if form == "nestful" else None)
    assert batch.format == "towerman"


@pytest.mark.parametrize("form", FORMS)
def test_each_form_runs(form: str, stage: Stage) -> None:
    """R-29, R-35, R-39, R-40: a plan of each form runs as far as its graph allows, with results in the plan's order."""
    names = {tool for tool, *_ in READ[form]}
    tower = stage.tower()
    seen: list[tuple[str, Any]] = []

    def add(name: str) -> None:
        known = KNOWN(name)

        async def handler(**given: Any) -> Any:
            await asyncio.sleep(1)
            seen.append((name, given))
            return {"pos": {"lat": 59.9}, "rows": [{"id": 7}]}

        properties = {each: {"type": "array"} if many else {} for each, many in (known or {}).items()}
        tower.add_tool(handler, name=name, independent=True, schema={"type": "object", "properties": properties})

    for name in names:
        add(name)
    began = stage.clock.value
    batch = run(stage, tower, PLANS[form], format=named(form))
    assert batch.ok, [(result.code, result.message) for result in batch]
    assert [result.call_id for result in batch] == [own for _, own, _, _ in READ[form]]
    assert len(seen) == len(batch)
    deepest = {"llmcompiler": 2, "rewoo": 3, "taskbench": 4, "hugginggpt": 3, "nestful": 2, "worfbench": 2}[form]
    assert stage.clock.value - began == pytest.approx(deepest)
    value = {"pos": {"lat": 59.9}, "rows": [{"id": 7}]}
    got = [given for name, given in seen if name == READ[form][-1][0]][-1]
    last = {
        "rewoo": {"1": value},
        "taskbench": {},
        "hugginggpt": {},
        "nestful": {"all": value["rows"]},
        "worfbench": {"what": "Go"},
        "llmcompiler": {"problem": f"{json.dumps(value, separators=(',', ':'))} and {{}}"},
    }[form]
    if form == "llmcompiler":
        assert got["context"] == [value, value, {"k": value}]
    else:
        assert got == last
    assert batch.outputs == ({"names": [7], "whole": value} if form == "nestful" else None)


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_that_was_read_is_written_in_the_native_form(form: str) -> None:
    """What goes back to a planner can be read again, and means the same."""
    from towerman.adapters import decode, turn
    from towerman.calls import make_result

    batch = read_plan(PLANS[form], named(form), KNOWN)
    results = [
        make_result(index, call.id, call.tool, "ok", None, "done", "x") for index, call in enumerate(batch.calls)
    ]
    again = decode(json.dumps(turn(batch, results)[0]))
    assert again.plan
    one, two = link(batch), link(again)
    assert one is not None
    assert two is not None
    assert two.needs == one.needs[: len(batch.calls)]


# ------------------------------------------------------------------------------------------------------- told apart


@pytest.mark.parametrize(
    ("document", "form"),
    [
        ({"plan": []}, "towerman"),
        ({"calls": []}, "towerman"),
        ([], "towerman"),
        ([{"tool": "a", "arguments": {"label": 1}}], "towerman"),
        ([{"name": "a", "arguments": {}}], "towerman"),
        ([{"name": "a", "arguments": {}, "label": "x", "id": "1"}], "towerman"),
        ([Call("a", {})], "towerman"),
        (Batch((), "openai"), "openai"),
        ({"role": "assistant", "content": LLMCOMPILER}, "openai"),
        ([{"type": "function", "function": {"name": "a", "arguments": "{}"}, "label": "x"}], "openai"),
        ([{"type": "text", "text": LLMCOMPILER}], "anthropic"),
        ({"type": "message", "role": "assistant", "content": []}, "anthropic"),
        ([{"task": "a", "id": 0}], "hugginggpt"),
        ([{"name": "a", "arguments": {}, "label": "x"}, {"name": "b", "arguments": {}}], "nestful"),
        ([{"name": "var_result", "arguments": {}}], "nestful"),
        ({"input": "x", "output": json.dumps(NESTFUL)}, "nestful"),
        ({"output": NESTFUL}, "nestful"),
        ({"output": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, None),
        ({"output": "x"}, None),
        ({"output": 3}, None),
        ({"output": [3]}, None),
        ({"task_nodes": []}, "taskbench"),
        ("1. a()", "llmcompiler"),
        ("  12 ) a(", "llmcompiler"),
        ("1. a (see there)", None),
        ("#E1 = A[x]", "rewoo"),
        ("Plan: x #E1=A[x]", "rewoo"),
        ("Node:\n1: a\nEdges: (START,1)", "worfbench"),
        ("Edges: none", None),
        ("", None),
        ("Plan: nothing", None),
        ("1. Buy milk", None),
        ({}, None),
        ([3], None),
    ],
)
def test_the_form_shows_in_the_structure(document: Any, form: str | None) -> None:
    assert find_form(document) == form
    if form is None:
        with pytest.raises(InputError, match="the forms are 'towerman', 'llmcompiler', 'rewoo'"):
            read_plan(document)


@pytest.mark.parametrize(
    "document",
    [
        "1. a()\n#E1 = A[x]",
        LLMCOMPILER + WORFBENCH,
        {"task_nodes": [], "output": NESTFUL},
        {"task_nodes": [], "plan": []},
        {"task_nodes": [], "choices": []},
        [{"task": "a", "id": 0}, {"name": "var_result"}],
    ],
)
def test_what_could_be_several_forms_is_not_guessed(document: Any) -> None:
    with pytest.raises(InputError, match=r"could be a plan in the form '\w+' and '\w+': say which one it is"):
        read_plan(document)


def test_named_the_form_needs_not_be_found() -> None:
    batch = read_plan("1. a()\n#E1 = A[x]", "rewoo")
    assert only(batch) == {"1": "x"}


@pytest.mark.parametrize(
    ("document", "form", "message"),
    [
        ("```json\n[]\n```", None, "code block; hand in what is between"),
        (b"\xff", None, "not UTF-8 text: a wrong byte at position 0"),
        ('{"task_nodes": [', None, "no JSON: Expecting value at line 1, column 17"),
        (None, None, "got NoneType"),
        (3, None, "got int"),
        ([], "llmcompiler", "a plan of the form 'llmcompiler' is text, got list"),
        ({}, "worfbench", "a plan of the form 'worfbench' is text, got dict"),
        ([], "taskbench", "an object with 'task_nodes' is wanted in the form 'taskbench', got list"),
        ({"task": 1}, "hugginggpt", "a list of tasks is wanted in the form 'hugginggpt', got dict"),
        (Batch(()), "hugginggpt", "a list of tasks is wanted in the form 'hugginggpt', got Batch"),
        (Batch(()), "nestful", "a list of calls is wanted, got Batch"),
        ("#E1 = A[x]", "towerman", "no JSON"),
        ("", "llmcompiler", "no step of the form 'llmcompiler'"),
        ("Thought: no", "llmcompiler", "no step of the form 'llmcompiler'"),
        ("", "rewoo", "no step of the form 'rewoo'"),
        ("", "worfbench", "no plan of the form 'worfbench'"),
        # LLMCompiler
        ("1. a()\n2. b(", "llmcompiler", "line 2: a value is wanted"),
        ('1. a("x', "llmcompiler", "line 1: a text without its closing quote"),
        ('1. a("x\n2. b("y")', "llmcompiler", r"line 2, in the step that begins in line 1: ',' or '\)' is wanted"),
        ("1. a() b()", "llmcompiler", "line 1: something stands behind the call"),
        ("1. a()\nsome words", "llmcompiler", "line 2: neither a step, nor 'Thought:'"),
        ("1. a()\n2. some words", "llmcompiler", "line 2: a numbered line that is no call"),
        ("1. join()\n2. a()", "llmcompiler", r"line 2: a step behind join\(\)"),
        ("1. a()<END_OF_PLAN>\nx\n2. b()", "llmcompiler", "line 3: a step behind <END_OF_PLAN>"),
        ("1. a()\n<END_OF_PLAN>\nx\n2. b()", "llmcompiler", "line 4: a step behind <END_OF_PLAN>"),
        ("1. a(x=1, x=2)", "llmcompiler", "line 1: a name stands twice"),
        ("1. a(x=1, 2)", "llmcompiler", "line 1: an argument without a name behind one with a name"),
        # ReWOO
        ("#E1 = no brackets", "rewoo", r"line 1: a step is written as #E1 = Tool\[text\]"),
        ("#E1 = A[x\nPlan: y", "rewoo", "line 1: the text of this step does not end with"),
        ("Plan: x #E1 = A[#E2 = B[y]]", "rewoo", "line 1: two steps in one line"),
        # TaskBench
        ({"task_nodes": 3}, None, "task_nodes: a list is wanted, got int"),
        ({"task_nodes": [3]}, None, r"task_nodes\[0\].task: the name of a tool is wanted"),
        ({"task_nodes": [{"task": 3}]}, None, r"task_nodes\[0\].task: the name of a tool is wanted"),
        ({"task_nodes": [], "task_links": 3}, None, "task_links: a list is wanted, got int"),
        ({"task_nodes": [], "task_links": [3]}, None, r"task_links\[0\]: an object with the texts"),
        ({"task_nodes": [], "task_links": [{"source": "a"}]}, None, r"task_links\[0\]: an object with the texts"),
        (
            {"task_nodes": [], "task_links": [{"source": "a", "target": "b"}]},
            None,
            "plan in the form 'taskbench': task",
        ),
        # HuggingGPT
        ([3], "hugginggpt", r"\[0\].task: the name of a tool is wanted"),
        ([{"task": 3}], None, r"\[0\].task: the name of a tool is wanted"),
        ([{"task": "a"}], None, r"\[0\].id: a whole number is wanted, got NoneType"),
        ([{"task": "a", "id": True}], None, r"\[0\].id: a whole number is wanted, got bool"),
        ([{"task": "a", "id": 0, "dep": 0}], None, r"\[0\].dep: a list of numbers is wanted, got int"),
        ([{"task": "a", "id": 0, "dep": ["0"]}], None, r"\[0\].dep\[0\]: a whole number is wanted, got str"),
        # NESTFUL
        ({"output": "3", "input": ""}, "nestful", "no batch of calls"),
        ({"output": 3}, "nestful", "output: a list of calls is wanted, got int"),
        ([3], "nestful", r"\[0\].name: the name of a tool is wanted"),
        ([{"name": 3}], "nestful", r"\[0\].name: the name of a tool is wanted"),
        ([{"name": "a", "label": 3}], None, r"\[0\].label: text is wanted, got int"),
        ([{"name": "a", "label": "a.b"}], None, r"\[0\].label: none of the signs"),
        ([{"name": "var_result"}, {"name": "var_result"}], None, r"\[1\]: a second var_result"),
        # WorFBench
        ("Node:\nx\nEdges: (START,1)", None, "line 2: a node is written as 1: text"),
        ("Node:\n1: a\nGraph:\n(1,2)\nEdges: (1,END)", None, "line 4: 'Edges:' is wanted before the edges"),
        ("Node:\n1: a\nEdges: (1,2", None, "line 3: edges are pairs"),
        ("Node:\n1: a\nEdges: (END,1)", None, "line 3: edges are pairs"),
        ("Node:\n1:\nEdges: (1,END)", None, "node 1: its text is missing"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(document: Any, form: str | None, message: str) -> None:
    """Input that is no plan runs nothing: the error names the line or the place, and the fix."""
    with pytest.raises(InputError, match=message):
        read_plan(document, form)


def test_a_form_that_is_none(stage: Stage) -> None:
    tower = stage.tower()
    for options in ({"plan": True}, {}):
        with pytest.raises(PolicyError, match=r"format: unknown 'graphviz'; known are 'openai', .*'worfbench'"):
            stage.run(tower.execute("1. a()", format="graphviz", **options))  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="plan: False, and no batch is written in the format 'rewoo'"):
        stage.run(tower.execute("#E1 = A[x]", format="rewoo", plan=False))


class Broken(Mapping[str, Any]):
    """A mapping that does not let itself be looked at."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(CANARY)

    def __iter__(self) -> Any:
        raise RuntimeError(CANARY)

    def __len__(self) -> int:
        return 1


def test_g8_whatever_is_handed_in_only_input_errors_come_out() -> None:
    document = {"task_nodes": [{"task": "a", "arguments": Broken()}]}
    with pytest.raises(InputError) as caught:
        read_plan(document)
    assert CANARY not in str(caught.value)
    assert "RuntimeError" in str(caught.value)
    with pytest.raises(InputError, match="fails when it is read"):
        find_form(Broken())


# --------------------------------------------------------------------------------------------------------- refusals


def node(tool: str, *arguments: Any) -> dict[str, Any]:
    return {"task": tool, "arguments": list(arguments)}


def task(own: int, dep: list[int] | None = None, **args: Any) -> dict[str, Any]:
    return {"task": f"t{own}", "id": own, "dep": dep or [-1], "args": args}


def entry(own: str, **arguments: Any) -> dict[str, Any]:
    return {"name": "t", "arguments": arguments, "label": own}


REFUSED: list[tuple[Any, str, tuple[int, ...], str]] = [
    # R-30, R-31: circles, also of one.
    ('1. a("$1")', "dependency_cycle", (0,), "call '1' needs itself"),
    ("#E1 = A[#E1]", "dependency_cycle", (0,), "call 'E1' needs itself"),
    ({"task_nodes": [node("a", "<node-0>")]}, "dependency_cycle", (0,), "call '0' needs itself"),
    ([task(0, [1]), task(1, x="<GENERATED>-0")], "dependency_cycle", (0, 1), "'0' needs call '1', call '1' needs"),
    ([entry("var1", x="$var1$")], "dependency_cycle", (0,), "call 'var1' needs itself"),
    ("Node:\n1: a\n2: b\n3: c\nEdges: (1,2) (2,3) (3,1)", "dependency_cycle", (0, 2, 1), "in a circle"),
    # Forward, where the form forbids it.
    ('1. a("$2")\n2. b()', "bad_reference", (0,), "can use only the results of steps before it"),
    ("#E1 = A[#E2]\n#E2 = B[x]", "bad_reference", (0,), "can use only the results of steps before it"),
    ({"task_nodes": [node("a", "<node-1>"), node("b")]}, "bad_reference", (0,), "call '0' waits for call '1'"),
    (
        {"task_nodes": [node("a"), node("b")], "task_links": [{"source": "b", "target": "a"}]},
        "bad_reference",
        (0,),
        "call '0' waits for call '1'",
    ),
    ([entry("var1", x="$var2$"), entry("var2")], "bad_reference", (0,), "call 'var1' waits for call 'var2'"),
    # R-32: not there; out of range where ids are numbers.
    ('1. a("$7")', "bad_reference", (0,), "out of range, there is no such step; the numbers of this plan go from '1'"),
    ('2. a()\n10. b("$7")', "bad_reference", (1,), "no such step; the numbers of this plan are '2', '10'"),
    ('1. a("$2")\n3. b()', "bad_reference", (0,), "no such step; the numbers of this plan are '1', '3'"),
    (
        '1. a("$4")\n2. b()\n3. a()\n9. a()\n8. a()',
        "bad_reference",
        (0,),
        "the numbers of this plan are '1' to '3', '8' to '9'",
    ),
    (
        "\n".join(f'{n}. a("$2")' for n in range(1, 30, 2)),
        "bad_reference",
        tuple(range(15)),
        "are '1', '3', '5', '7', '9', '11', '13', '15' ...",
    ),
    ('1. a()\n2. join("$7")', "bad_reference", (0,), '"the plan\'s outputs" refers to a step at arguments.<key>: out'),
    ("#E1 = A[#E9]", "bad_reference", (0,), "out of range"),
    ({"task_nodes": [node("a", "<node-1>")]}, "bad_reference", (0,), "out of range"),
    ([task(0, [3])], "bad_reference", (0,), "call '0' needs '3': out of range"),
    ([task(0, x="<GENERATED>-3")], "bad_reference", (0,), "call '0' refers to a step at arguments.x: out of range"),
    ([entry("var1", x="$var2$")], "unknown_dependency", (0,), "no call of this batch has that id"),
    ([entry("var1", x="$HOME$")], "unknown_dependency", (0,), "no call of this batch has that id"),
    ("Node:\n1: a\nEdges: (1,2)", "bad_reference", (0,), "line 3: an edge at a node 2, and there is none"),
    ("Node:\n1: a\nEdges: (7,END) (START,8)", "bad_reference", (0,), "node 7, and there is none; line 3: an edge at a"),
    # R-33: ids that come twice.
    ("1. a()\n1. b()", "duplicate_call_id", (0, 1), "'1': several steps of this plan have this id"),
    ("01. a()\n1. b()", "duplicate_call_id", (0, 1), "'1': several steps of this plan have this id"),
    ("#E1 = A[]\n#E1 = A[]", "duplicate_call_id", (0, 1), "'E1'"),
    ([task(0), task(0)], "duplicate_call_id", (0, 1), "'0'"),
    ([entry("var1"), entry("var1")], "duplicate_call_id", (0, 1), "'var1'"),
    ("Node:\n1: a\n1: b\nEdges: (START,1) (1,END)", "duplicate_call_id", (0, 1), "'1'"),
    # References that are malformed, or could mean something else.
    ('1. a()\n2. b("costs $1.50")', "bad_reference", (1,), "step '2': argument 1: a '$' with a number that could be"),
    ('1. a()\n2. b(x="$1%")', "bad_reference", (1,), "step '2': arguments.x: a '$' with a number"),
    # A path, where a reference is the whole result.
    *[
        (plan, "bad_reference", (1,), "right behind a reference '.name' or '[0]', which could be text or a part")
        for path in (".items[0].id", "[0]", ".page", "[ 'page' ]", '["page"]', ".größe", "[-1]", "[*].id", "[key]")
        for plan in (
            f"1. a()\n2. b({json.dumps(f'of $1{path}')})",
            f"#E1 = A[]\n#E2 = B[of #E1{path}]",
            {"task_nodes": [node("a"), node("b", f"<node-0>{path}")]},
            [task(0), task(1, x=f"<GENERATED>-0{path}")],
            [task(0), task(1, x=[f"<GENERATED-0>{path} <GENERATED>-0"])],
        )
    ],
    ('1. a()\n2. b("${1}[0]")', "bad_reference", (1,), "right behind a reference '.name' or '[0]'"),
    ('1. a()\n2. b("${1}.items[0].id")', "bad_reference", (1,), "right behind a reference '.name' or '[0]'"),
    ('1. a("${1")', "bad_reference", (0,), "without '}'"),
    ("#E1 = A[#e1]", "bad_reference", (0,), "step 'E1': argument 1: '#e' with a number; write '#E'"),
    ({"task_nodes": [node("a", "<the node-0>")]}, "bad_reference", (0,), "write '<node-0>'"),
    ([task(0), task(1, x="<GENERATED>")], "bad_reference", (1,), "without the number of one task"),
    ([task(0), task(1, x="<GENERATED text>-0")], "bad_reference", (1,), "without the number of one task"),
    ([task(0, x={"<GENERATED>-0": 1})], "bad_reference", (0,), "arguments.x: a reference in the place of a name"),
    ([task(0, **{"<GENERATED>-0": 1})], "bad_reference", (0,), "arguments.<name>: a reference in the place of a name"),
    ([entry("var1"), entry("var2", x="$var1.a")], "bad_reference", (1,), "no closing '$'"),
    ([entry("var1"), entry("var2", x="$var1[x]$")], "bad_reference", (1,), "a path of '.name' and '[0]' is wanted"),
    (
        [entry("var1"), {"name": "var_result", "arguments": {"x": "$var1!$"}}],
        "bad_reference",
        (0,),
        "outputs.x: behind",
    ),
    (
        [{"name": "t", "arguments": {"<&>": "$var1"}, "label": ""}],
        "bad_reference",
        (0,),
        "1 of the plan: arguments.<na",
    ),
    # Links by the name of a tool.
    (
        {"task_nodes": [node("a"), node("a"), node("b")], "task_links": [{"source": "a", "target": "b"}]},
        "bad_reference",
        (0,),
        "task_links[0].source names its tool, and so do 2 nodes: which one is meant is not known",
    ),
    (
        {"task_nodes": [node("a"), node("b")], "task_links": [{"source": "A", "target": "b"}]},
        "unknown_dependency",
        (0, 1),
        "task_links[0].source names a tool that no node has",
    ),
    # Arguments that are none.
    (
        {"task_nodes": [{"task": "a", "arguments": "x"}]},
        "invalid_arguments",
        (0,),
        "arguments: a list is wanted, got str",
    ),
    ({"task_nodes": [node("a", {"name": "x"})]}, "invalid_arguments", (0,), "an object with 'name' and 'value'"),
    (
        {"task_nodes": [node("a", {"name": 3, "value": 3})]},
        "invalid_arguments",
        (0,),
        "an object with 'name' and 'valu",
    ),
    (
        {"task_nodes": [node("a", *[{"name": "x", "value": 3}] * 2)]},
        "invalid_arguments",
        (0,),
        "argument 2: its name stands twice",
    ),
    ([{"task": "a", "id": 0, "args": [1]}], "invalid_arguments", (0,), "args: an object is wanted, got list"),
    ([entry("var1"), {"name": "a", "arguments": "x", "label": "b"}], "invalid_arguments", (1,), "an object is wanted"),
    ([{"task": "a", "id": 0, "args": {1: "a"}}], "invalid_arguments", (0,), "args: a name that is no text"),
    ([task(0, x={1: "a"})], "invalid_arguments", (0,), "arguments.x: JSON data is wanted, got dict"),
    ([task(0, x=[{3}])], "invalid_arguments", (0,), "arguments.x: JSON data is wanted, got set"),
    ('[{"task": "a", "id": 0, "args": {"x": {"k": 1, "k": 2}}}]', "invalid_arguments", (0,), "an object is wanted"),
    (
        '{"task_nodes": [{"task": "a", "arguments": [[{"k": 1, "k": 2}]]}]}',
        "invalid_arguments",
        (0,),
        "a key stands twi",
    ),
    ('1. two("a", "b", "c")', "invalid_arguments", (0,), "3 arguments without names, and the tool has 2 parameters"),
    ('1. two("a", x=1)', "invalid_arguments", (0,), "the argument x is given by its place and by its name too"),
]


@pytest.mark.parametrize(("document", "code", "members", "message"), REFUSED)
def test_r30_to_r33_a_plan_that_cannot_be_followed_is_refused_whole(
    document: Any, code: str, members: tuple[int, ...], message: str, stage: Stage
) -> None:
    """G5, R-30 to R-34, P-19: the code, the steps at fault and the place are told; no handler starts, each step has
    its result, in the plan's order."""
    tower, seen = recorder(stage, "a", "b", "t", "t0", "t1", "A", "B")

    @tower.tool(independent=True)
    async def two(x: Any, y: Any = 0) -> None:
        seen.append(("two", x))

    known = tower._core.parameters_of
    found = refused(document, None, known)
    assert found[:2] == (code, members)
    assert message in found[2]
    batch = run(stage, tower, document)
    assert codes(batch) == [code] * len(batch)
    assert [result.call_id for result in batch] == [call.id for call in read_plan(document, None, known).calls]
    assert {result.message for result in batch} == {found[2]}
    assert not any(result.started for result in batch)
    assert not seen
    told = tower.explain(document, plan=True)
    assert not told.ok
    assert told.members == members
    assert found[2].split("\n")[0][:40] in " ".join(str(told).split())


@pytest.mark.parametrize(
    "behind", ["", ".", ". Then", "... ", ".\n", ", x", "; [0]", " .x", " [0]", "/x", "-x", "'s", ")."]
)
def test_what_is_no_path_may_stand_behind_a_reference(behind: str) -> None:
    """A sentence may end with a reference, and whoever needs a `.name` as text has a form of it."""
    for plan, own in (
        (f"1. a()\n2. b({json.dumps(f'of $1{behind}')})", "1"),
        (f"#E1 = A[]\n#E2 = B[of #E1{behind}]", "E1"),
        ({"task_nodes": [node("a"), node("b", f"of <node-0>{behind}")]}, "0"),
        ([task(0), task(1, x=f"of <GENERATED>-0{behind}")], "0"),
    ):
        batch = read_plan(plan)
        assert batch.refused is None
        assert list(batch.calls[1].arguments.values()) == [f"of ${{{own}}}{behind}"]
    assert read_plan('1. a()\n2. b("${1}.txt")').calls[1].arguments == {"1": "${1}.txt"}


def test_many_faults_are_told_in_one_message() -> None:
    """All of the first one's kind, up to eight of them."""
    code, members, message = refused([task(own, x="<GENERATED>") for own in range(10)] + [task(10, x={3})])
    assert (code, members) == ("bad_reference", tuple(range(10)))
    assert message.count("without the number") == 8
    assert message.endswith("; and 2 more such places")


def test_g8_a_refusal_shows_no_value() -> None:
    """G8: neither a text nor a name of an argument that is no plain word stands in it."""
    for document in (
        [task(0, **{CANARY: f"<GENERATED> {CANARY}"})],
        [entry("var1", **{CANARY: f"$var1.{CANARY}"})],
        {"task_nodes": [node("a", f"<{CANARY} node-0>", {"name": CANARY})]},
        f'1. a("{CANARY} ${{1", "{CANARY}")',
        f"#E1 = A[{CANARY} #e1]",
    ):
        assert CANARY not in refused(document)[2]
    for text in (f'1. a("{CANARY}', f"1. a()\n{CANARY}", f"#E1 = {CANARY}", f"Node:\n1: a\nEdges: {CANARY}"):
        with pytest.raises(InputError) as caught:
            read_plan(text)
        assert CANARY not in str(caught.value)


def test_nothing_of_a_refused_plan_is_asked_about_or_counted(stage: Stage) -> None:
    """G5, G9: a refused plan asks nobody and spends nothing; what its run does next is as if it had not been."""
    from towerman import Budget

    tower, seen = recorder(stage, "a", "b")

    async def main() -> tuple[BatchResult, dict[str, float], BatchResult]:
        async with tower.run("r", budget=Budget(calls=2)) as run:
            first = await run.execute('1. a("$3")\n2. b()', plan=True)
            left = dict(run.remaining)
            return first, left, await run.execute("1. a()\n2. b($1)", plan=True)

    first, left, second = stage.run(main())
    assert codes(first) == ["bad_reference"] * 2
    assert left["calls"] == 2
    assert second.ok
    assert len(seen) == 2


# ---------------------------------------------------------------------------------------------------- their own ways


def text_of(value: str, form: str) -> Any:
    """What a text comes to, as the only argument of a second step in this form."""
    document: Any
    if form == "llmcompiler":
        document = f"1. a()\n2. b({json.dumps(value, ensure_ascii=False)})"
    elif form == "rewoo":
        document = f"#E1 = A[]\n#E2 = B[{value}]"
    elif form == "taskbench":
        document = {"task_nodes": [node("a"), node("b", value)]}
    elif form == "hugginggpt":
        document = [task(0), {"task": "b", "id": 1, "args": {"1": value}}]
    else:
        document = [entry("var1"), {"name": "b", "arguments": {"1": value}}]
    batch = read_plan(document, form)
    assert batch.refused is None, batch.refused
    arguments = batch.calls[1].arguments
    assert isinstance(arguments, dict)
    return arguments["1"]


@pytest.mark.parametrize(
    ("form", "text", "native"),
    [
        ("llmcompiler", "$1", "${1}"),
        ("llmcompiler", "${1}", "${1}"),
        ("llmcompiler", "$01", "${1}"),
        ("llmcompiler", "min($1, $1)", "min(${1}, ${1})"),
        ("llmcompiler", "$1 and $$5 and 10$", "${1} and $$5 and 10$$"),
        ("llmcompiler", "$$5", "$5"),
        ("llmcompiler", "$ {x} $x ${x}", "$ {x} $x $${x}"),
        ("llmcompiler", "10$", "10$"),
        ("llmcompiler", "", ""),
        ("llmcompiler", "$1's $1.", "${1}'s ${1}."),
        ("rewoo", "#E1", "${E1}"),
        ("rewoo", "#E1, #E01!", "${E1}, ${E1}!"),
        ("rewoo", "#E1F #E #Ex #1 ${E1} 5$", "#E1F #E #Ex #1 $${E1} 5$"),
        ("rewoo", "costs 5$ #E1", "costs 5$$ ${E1}"),
        ("taskbench", "<node-0>", "${0}"),
        ("taskbench", "< NODE 0 > <node_0><node0>", "${0} ${0}${0}"),
        ("taskbench", "<b>node</b> <generated image> node-0", "<b>node</b> <generated image> node-0"),
        ("taskbench", "5$<node-0>", "5$$${0}"),
        ("taskbench", "${0} <", "$${0} <"),
        ("hugginggpt", "<GENERATED>-0", "${0}"),
        ("hugginggpt", "<generated_0>/<GENERATED> 0", "${0}/${0}"),
        ("hugginggpt", "<b>x</b>-0 <generate>-0", "<b>x</b>-0 <generate>-0"),
        ("hugginggpt", "<GENERATED-0>-1", "${0}-1"),
        ("hugginggpt", "a$<GENERATED>-0", "a$$${0}"),
        ("nestful", "$var1$", "${var1}"),
        ("nestful", "$var1.a.b[3].c$", "${var1[=].a[=].b[3][=].c}"),
        ("nestful", "10 * $var1.Exchange Rate$", "10 * ${var1[=].Exchange Rate}"),
        ("nestful", "$5, $6 and $var1$$var1$", "$$5, $$6 and ${var1}${var1}"),
        ("nestful", "$$var1$ costs 5$", "$var1$ costs 5$"),
        ("nestful", "$x and $y", "$x and $y"),
        ("nestful", "$.x$", "$.x$"),
        ("nestful", "${var1}", "$${var1}"),
    ],
)
def test_r39_references_and_what_only_looks_like_one(form: str, text: str, native: str) -> None:
    """R-39: ids are compared whole; what is no reference of the form stays as it is, also where it is one in native
    syntax."""
    assert text_of(text, form) == native


def test_r39_nested_references_and_keys() -> None:
    """R-39: references work inside lists and objects; a key that looks like a reference of the native form is none."""
    args = {"a": [{"$ref": "x", "$$ref": ["<GENERATED>-0"]}], "$ref": 1}
    document = [task(0), {"task": "b", "id": 1, "args": args}]
    assert read_plan(document).calls[1].arguments == {"a": [{"$$ref": "x", "$$$ref": ["${0}"]}], "$$ref": 1}


def test_python_data_of_any_kind_is_read_as_json() -> None:
    """Mappings, sequences and texts of other types are what they are as JSON: nothing in them is passed over."""

    class Text(str):
        pass

    class Items(list[Any]):
        pass

    args = {Text("x"): OrderedDict(a=(Text("<GENERATED>-0"), Items(["<GENERATED-0>", 1.5, None]), range(2)))}
    document = (task(0), {"task": Text("b"), "id": 1, "args": args})
    call = read_plan(document).calls[1]
    assert call.arguments == {"x": {"a": ["${0}", ["${0}", 1.5, None], [0, 1]]}}
    assert type(call.tool) is str


def test_a_step_of_rewoo_without_a_text_has_no_argument(stage: Stage) -> None:
    tower = stage.tower()

    @tower.tool(independent=True)
    async def clock() -> str:
        return "noon"

    assert run(stage, tower, "#E1 = clock[]\n#E2 = clock[ ]").ok


def test_multi_digit_ids(stage: Stage) -> None:
    """R-39: `#E1` is not the beginning of `#E12`, and `$1` is not `$12`."""
    tower, _ = recorder(stage, "A")
    text = "\n".join(f"#E{n} = A[{n}]" for n in range(1, 13)) + "\n#E13 = A[#E12 not #E1]"
    batch = run(stage, tower, text)
    assert batch.ok
    assert read_plan(text).calls[12].arguments == {"1": "${E12} not ${E1}"}
    assert [call.id for call in read_plan("\n".join(f"{n}. a()" for n in range(9, 12))).calls] == ["9", "10", "11"]


def test_a_join_is_no_step_unless_it_is_a_tool(stage: Stage) -> None:
    """`join` waits for all before it where there is a tool of that name; else its arguments are what the plan comes
    to."""
    tower, _ = recorder(stage, "a")
    batch = run(stage, tower, '1. a(1)\n2. a(2)\n3. join($1, "so: ${2}", last=$2)')
    assert [result.tool for result in batch] == ["a", "a"]
    value = {"of": "a", "rows": [{"id": 7}], "n": 3}
    assert batch.outputs == {"1": value, "2": f"so: {json.dumps(value, separators=(',', ':'))}", "last": value}
    assert run(stage, tower, "1. join()").outputs is None

    tower, seen = recorder(stage, "a", "join")
    batch = run(stage, tower, "1. a(1)\n2. join()\n3. a(2)\n4. join($2)")
    assert batch.ok
    assert [name for name, _ in seen][-1] == "join"
    assert [call.needs for call in read_plan("1. a()\n2. join()\n3. a()\n4. join()", None, tools(join="")).calls] == [
        (),
        ("1",),
        (),
        ("2", "3"),
    ]


def test_llmcompiler_arguments_without_quotes() -> None:
    """A text that nobody put into quotes is one text, where nothing in it could divide it."""
    batch = read_plan("1. search(Austin Powers: The Man's Mystery 2)\n2. search(In Cold Blood $1)<END_OF_PLAN>")
    assert [call.arguments for call in batch.calls] == [
        {"1": "Austin Powers: The Man's Mystery 2"},
        {"1": "In Cold Blood ${1}"},
    ]
    for text in ("a, b", "x = y", "'a b", "f(x)", "[1", 'say "x"'):
        with pytest.raises(InputError, match=r"line 1"):
            read_plan(f"1. search({text})")


def test_tools_by_names_that_no_tool_can_have(stage: Stage) -> None:
    """Each sign that the name of a tool cannot hold is read as `_`; links still go by the planner's own names."""
    tower, seen = recorder(stage, "Image_Editing", "Get_Reviews_Tips_", "Image-to-Text.2")
    nodes = [node("Image Editing", "a.jpg"), node("Get Reviews(Tips)", "<node-0>"), node("Image-to-Text.2")]
    links = [{"source": "Get Reviews(Tips)", "target": "Image-to-Text.2"}]
    batch = run(stage, tower, {"task_nodes": nodes, "task_links": links})
    assert batch.ok
    assert [name for name, _ in seen] == ["Image_Editing", "Get_Reviews_Tips_", "Image-to-Text.2"]
    links = [{"source": "Get_Reviews_Tips_", "target": "Image-to-Text.2"}]
    assert refused({"task_nodes": nodes, "task_links": links})[0] == "unknown_dependency"


def test_arguments_without_names_are_those_that_the_tool_declares(stage: Stage) -> None:
    """In the order of its signature, without the context; a tool that takes any gets numbers."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def one(ctx: Context, first: str, second: int = 2) -> list[Any]:
        return [first, second]

    async def anything(**given: Any) -> Any:
        return given

    tower.add_tool(anything, name="any", independent=True, schema={"type": "object"})
    batch = run(stage, tower, "1. one('a', 3)  # with a word about it\n2. one('b')\n3. any('x', y='z')")
    assert [result.value for result in batch] == [["a", 3], ["b", 2], {"1": "x", "y": "z"}]


def test_a_plan_in_a_code_block() -> None:
    assert len(read_plan("```\n1. a()\n2. b()\n```").calls) == 2


def test_nestful_says_what_it_means_by_a_name_on_a_list(stage: Stage) -> None:
    """Every member where the tool takes a list; one value, on which all agree, where it takes one; else the plan stops
    there and chooses nothing."""
    tower = stage.tower()
    got: list[Any] = []

    @tower.tool(independent=True)
    async def rooms(city: str) -> list[dict[str, Any]]:
        return [{"id": 7, "city": city, "beds": beds} for beds in (1, 2)]

    @tower.tool(independent=True)
    async def book(id: int, beds: list[int]) -> str:
        got.append((id, beds))
        return "booked"

    @tower.tool(independent=True)
    async def pay(beds: int) -> str:
        got.append(beds)
        return "paid"

    plan = [
        {"name": "rooms", "arguments": {"city": "Oslo"}, "label": "var1"},
        {"name": "book", "arguments": {"id": "$var1.id$", "beds": "$var1.beds$"}, "label": "var2"},
        {"name": "pay", "arguments": {"beds": "$var1.beds$"}, "label": "var3"},
        {"name": "var_result", "arguments": {"beds": "$var1.beds$", "said": "$var3$"}},
    ]
    batch = run(stage, tower, plan)
    assert codes(batch) == [None, None, "bad_reference"]
    assert "they differ; name one by its index" in batch[2].message
    assert got == [(7, [1, 2])]
    assert batch.outputs == {"beds": [1, 2]}


def test_worfbench_nodes_are_tools_or_texts_for_one(stage: Stage) -> None:
    text = "Node:\n1: a\n2: b\nEdges: (START,1) (1,2) (2,END)"
    tower, seen = recorder(stage, "a", "b", "do")
    assert run(stage, tower, text).ok
    assert [name for name, _ in seen] == ["a", "b"]
    seen.clear()
    assert run(stage, tower, text, format="worfbench:do").ok
    assert seen == [("do", ["a", None]), ("do", ["b", None])]
    tower, _ = recorder(stage, "do")
    with pytest.raises(InputError, match="name the tool that is to get the texts, in the format: worfbench:TOOL"):
        run(stage, tower, text)


def test_r38_a_failed_step_skips_what_hangs_on_it(stage: Stage) -> None:
    """R-38: in a planner's form, too; others go on."""
    tower, _ = recorder(stage, "a", "b")

    @tower.tool(independent=True)
    async def fail() -> None:
        raise ValueError(CANARY)

    batch = run(stage, tower, '1. fail()\n2. a("$1")\n3. b("$2")\n4. b()')
    assert codes(batch) == ["handler_error", "dependency_failed", "dependency_failed", None]


def test_r37_no_level_barrier(stage: Stage) -> None:
    """R-37: a = 300 ms, b = 10 ms, c after b = 300 ms: the whole takes 310 ms."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work(seconds: float, after: Any = None) -> int:
        await asyncio.sleep(seconds)
        return 1

    began = stage.clock.value
    assert run(stage, tower, "1. work(0.3)\n2. work(0.01)\n3. work(0.3, $2)").ok
    assert stage.clock.value - began == pytest.approx(0.31)


def test_r36_the_limit_holds_inside_a_plan(stage: Stage) -> None:
    """R-35, R-36: all first steps may be admitted at once, up to the limit."""
    tower, _ = recorder(stage, "a", max_concurrency=3)
    batch = run(stage, tower, "\n".join(f"{n}. a({n})" for n in range(1, 31)))
    assert batch.ok
    assert stage.peak == 3


def test_r44_edges_of_resources_and_of_the_plan_are_one_graph(stage: Stage) -> None:
    """R-44, S1: the plan lets the first node wait for the last, and all of them write one file: nothing hangs."""
    tower = stage.tower()
    order: list[str] = []

    def add(name: str) -> None:
        async def handler(x: Any = None) -> str:
            order.append(name)
            await asyncio.sleep(1)
            return name

        tower.add_tool(handler, name=name, description="writes", writes="file")

    for name in ("t0", "t1", "t2"):
        add(name)
    batch = run(stage, tower, [task(0, [2]), task(1), task(2)])
    assert batch.ok
    assert order == ["t1", "t2", "t0"]


def test_r43_a_planners_plan_goes_on_from_the_journal(stage: Stage, tmp_path: Any) -> None:
    """R-43: handed in again under its id, what is finished is answered and not run again."""
    tower, seen = recorder(stage, "search", "math", journal=tmp_path / "j.db")

    async def main() -> list[BatchResult]:
        found = []
        for _ in range(2):
            async with tower.run("r") as run:
                found.append(await run.execute("1. search(1)\n2. math($1)\n3. math($2)", plan=True, batch_id="b"))
        return found

    first, second = stage.run(main())
    assert first.ok
    assert second.ok
    assert len(seen) == 3


def test_a_plan_in_a_providers_form_reads_references(stage: Stage) -> None:
    tower, seen = recorder(stage, "a", "b")
    arguments = json.dumps({"first": "${x.n}"})
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "a", "arguments": "{}"}},
            {"id": "y", "type": "function", "function": {"name": "b", "arguments": arguments}},
        ],
    }
    for options in ({}, {"format": "openai"}):
        batch = run(stage, tower, message, **options)
        assert batch.ok
        assert seen[-1] == ("b", [3, None])
        assert batch.turn()[0]["tool_calls"] == message["tool_calls"]  # type: ignore[index]


def test_without_plan_a_text_is_no_plan(stage: Stage) -> None:
    """Only who says so gets a plan: a text, or a message that holds one, is read as a batch as ever."""
    tower = stage.tower()
    for form in FORMS:
        with pytest.raises(InputError, match=rf"a plan in the form '{form}': hand it in with plan=True"):
            stage.run(tower.execute(PLANS[form]))
    for document in ("hello", {"x": 1}, "1. a()\n#E1 = A[]"):
        with pytest.raises(InputError, match=r"no JSON|no batch of calls: got dict"):
            stage.run(tower.execute(document))
    assert len(stage.run(tower.execute({"plan": []}))) == 0
    assert len(stage.run(tower.execute({"role": "assistant", "content": LLMCOMPILER}))) == 0
    batch = stage.run(tower.execute('[{"name": "a", "arguments": {"x": "$1 #E1 <node-0>"}}]'))
    assert codes(batch) == ["unknown_tool"]


# --------------------------------------------------------------------------------------------------------- literals


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a'", "a"),
        ('"a\'b"', "a'b"),
        (r"'a\'b'", "a'b"),
        (r'"\n\t\\\x41\u00e9\U0001F600\101"', "\n\t\\A\u00e9\U0001f600A"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r"'\d+ \w'", r"\d+ \w"),
        ("'a\\\nb'", "ab"),
        ("'a\nb'", "a\nb"),
        ("'''a\n'b' c'''", "a\n'b' c"),
        ('""', ""),
        ('""""""', ""),
        ("3", 3),
        ("-3", -3),
        ("+0", 0),
        ("1.50", 1.5),
        (".5e-3", 0.0005),
        ("1e3", 1000.0),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("$1", "$1"),
        ("${12}", "${12}"),
        ("[1, [2,], ()]", [1, [2], []]),
        ("(1, 2)", [1, 2]),
        ("(1,)", [1]),
        ('{"a": {\'b\': $1,}, "c": []}', {"a": {"b": "$1"}, "c": []}),
        ("{}", {}),
        ("9" * 4_000, int("9" * 4_000)),
    ],
)
def test_values_are_written_as_in_python_and_json(text: str, value: Any) -> None:
    given, named = Reader(f"{text} , x = {text} , )", 0).arguments()
    assert given == [value]
    assert named == {"x": value}
    assert type(given[0]) is type(value)
    assert Reader(")", 0).arguments() == ([], {})


@pytest.mark.parametrize(
    ("text", "told", "place"),
    [
        ("'a", "a text without its closing quote", 0),
        ("'''a", "a text without its closing quotes", 0),
        ("'''a\\n'''", "a text in three quotes", 0),
        (r"'\x4'", "means nothing", 0),
        (r"'\N{BULLET}'", "means nothing", 0),
        (r"'\ud83d'", "means nothing", 0),
        (r"'\U00110000'", "means nothing", 0),
        ("007", "a value is wanted", 0),
        ("1_000", "a value is wanted", 0),
        ("1e999", "a number that is too large", 0),
        ("9" * 5_000, "a number that is too large", 0),
        ("$1x", "a value is wanted", 0),
        ("name", "a value is wanted", 0),
        ("x == 1", "a value is wanted", 0),
        ("[1 2]", "',' or ']' is wanted", 3),
        ("[1,, 2]", "a value is wanted", 3),
        ("(1)", "a value in brackets of its own", 0),
        ("{1: 2}", "a key is text in quotes", 1),
        ("{'a' 1}", "':' is wanted", 5),
        ("{'a': 1 'b': 2}", "',' or '}' is wanted", 8),
        ("{'a': 1, 'a': 2}", "a key stands twice", 9),
        ("{", "a key is text in quotes", 1),
        ("", "a value is wanted", 0),
        ("1 2", "',' or ')' is wanted", 2),
        ("1,, 2", "a value is wanted", 2),
        ("[" * 100, "nested more than 64 deep", 65),
    ],
)
def test_what_is_no_value_is_told_with_its_place(text: str, told: str, place: int) -> None:
    with pytest.raises(Malformed) as caught:
        Reader(text, 0).arguments()
    assert told in caught.value.told
    assert caught.value.place == place


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "array"}, True),
        ({"type": ["array", "null"]}, True),
        ({"type": ["array", "string"]}, False),
        ({"type": "string"}, False),
        ({}, False),
        ({"$ref": "#/$defs/list"}, True),
        ({"$ref": "#/$defs/loop"}, False),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, True),
        ({"oneOf": [{"type": "array"}, {"type": "integer"}]}, False),
        ({"anyOf": [{"type": "null"}]}, False),
        (True, False),
    ],
)
def test_whether_an_argument_takes_a_list(schema: Any, found: bool) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}]}
    whole = {"properties": {"x": schema, "y": {}}, "$defs": {"list": {"type": "array"}, "loop": loop}}
    assert parameters_of(whole) == {"x": found, "y": False}
    assert parameters_of({}) == {}
