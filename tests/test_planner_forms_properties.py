"""Any text and any data as a plan, in every form: read, refused with its place, or no plan; and what reading costs."""

from __future__ import annotations

import copy
import json
import re
import string
from collections.abc import Callable
from time import process_time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_planner_forms import KNOWN, PLANS, named

from towerman import InputError
from towerman.calls import Batch
from towerman.core import read_plan as link
from towerman.forms import FORMS, find_form, read_plan
from towerman.plan import Linked, PlanRefused

CANARY = "canary-90ad"

# ------------------------------------------------------------------------------------------------------------ the judge

CODES = {"dependency_cycle", "unknown_dependency", "bad_reference", "duplicate_call_id", "invalid_arguments"}


def judged(document: Any, form: str | None) -> Linked | None:
    """Read and link a plan; whatever it is, nothing but an InputError or a refusal with a code may come out."""
    try:
        batch = read_plan(document, form, KNOWN)
    except InputError as problem:
        told = str(problem)
        assert told
        assert len(told) < 1_500
        assert CANARY not in told
        return None
    assert isinstance(batch, Batch)
    assert batch.plan
    refusal: PlanRefused | None = None
    linked: Linked | None = None
    try:
        linked = link(batch)
    except PlanRefused as refused:
        refusal = refused
    if refusal is not None:
        assert refusal.code in CODES
        assert refusal.members or "the plan's outputs" in refusal.message  # which are no call
        assert set(refusal.members) <= set(range(len(batch.calls)))
        assert 0 < len(refusal.message) < 3_000
    if linked is not None:
        assert len(linked.needs) == len(batch.calls) + (batch.outputs is not None)
        assert all(batch.calls[need].id for wanted in linked.needs for need in wanted)
    return linked


# ------------------------------------------------------------------------------------------------------------- any text

SIGNS = {
    "llmcompiler": ["1", "2", "03", ". ", ") ", "a", "join", "(", ")", "\n", '"', "'", "$1", "${2}", "${", "$$", "$"],
    "rewoo": ["#E1", "#E2", "#e1", "#E", " = ", "A", "[", "]", "\n", "Plan:", "Plan: x ", "x", "$", "${E1}", "\t"],
    "worfbench": ["Node:", "Edges:", "Graph:", "\n", "1", "2", ": ", ". ", "x", "(", ")", ",", "START", "END", "(1,2)"],
}
MORE = ["=", ",", "[", "]", "{", "}", ":", "x=", "3", "-1.5", "None", "true", "'''", "\\", "\\x4", "<END_OF_PLAN>"]
MORE += ["Thought: ", "```", "\u2028", "\x00", "\ud800", "\u00e9", "9" * 30, " " * 5, CANARY]


@pytest.mark.parametrize("form", SIGNS)
@settings(max_examples=300)
@given(data=st.data())
def test_any_text_is_read_or_refused(form: str, data: st.DataObject) -> None:
    """G5: texts made of the form's own signs, in any order."""
    part = st.sampled_from(SIGNS[form] * 3 + MORE) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(part, max_size=25)))
    judged(text, named(form))
    judged(text, form)
    judged(text, None)


@pytest.mark.parametrize("form", SIGNS)
@settings(max_examples=300)
@given(data=st.data())
def test_a_plan_that_was_damaged_is_read_or_refused(form: str, data: st.DataObject) -> None:
    """G5: a good plan from which something is taken away, doubled, put in or moved."""
    text = damaged(PLANS[form], data)
    judged(text, named(form))
    judged(text.encode("utf-8", "surrogatepass"), None)


def damaged(text: str, data: st.DataObject) -> str:
    place = st.integers(0, len(text))
    for _ in range(data.draw(st.integers(1, 4))):
        start, stop = sorted((data.draw(place), data.draw(place)))
        stop = min(stop, start + data.draw(st.sampled_from([1, 2, 5, 1_000])))
        put = data.draw(st.sampled_from(["", "", text[start:stop] * 2, "$1", "\n", '"', ")", "]", "\x00", CANARY]))
        text = text[:start] + put + text[stop:]
    return text


# ------------------------------------------------------------------------------------------------------------- any data

REFERENCES = ["<node-0>", "<node-9>", "<node-", "<GENERATED>-0", "<GENERATED>", "$var1$", "$var1.x[0]$", "$var2", "$$"]
WORDS = ["read", "translate", "var1", "var_result", "var2", "task", "id", "${0}", CANARY, ""]
KEYS = ["task", "arguments", "args", "id", "dep", "name", "value", "label", "source", "target", "output", "task_nodes"]
KEYS += ["task_links", "x", "$ref", "$$ref"]

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-2, 12)
    | st.floats()
    | st.sampled_from(WORDS + REFERENCES)
    | st.text(max_size=4)
)
values = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)
arguments = st.dictionaries(st.sampled_from(["x", "text", *REFERENCES]), values, max_size=3)
tools = st.sampled_from(["read", "translate", "say", "a b"])

tasks = st.fixed_dictionaries(
    {"task": tools, "id": st.integers(-1, 4)}, optional={"dep": st.lists(st.integers(-1, 4)), "args": arguments}
)
nodes = st.fixed_dictionaries(
    {"task": tools},
    optional={
        "arguments": st.lists(
            st.sampled_from(REFERENCES)
            | values
            | st.fixed_dictionaries({"name": st.sampled_from(["x", "y"]), "value": values})
        )
    },
)
links = st.fixed_dictionaries({"source": tools, "target": tools})
calls = st.fixed_dictionaries(
    {"name": tools | st.just("var_result")},
    optional={"arguments": arguments, "label": st.sampled_from(["var1", "var2", "x", ""])},
)
DATA: dict[str, st.SearchStrategy[Any]] = {
    "hugginggpt": st.lists(tasks | tasks | tasks | values, max_size=6),
    "taskbench": st.fixed_dictionaries(
        {"task_nodes": st.lists(nodes, max_size=6)}, optional={"task_links": st.lists(links, max_size=4)}
    ),
    "nestful": st.lists(calls, max_size=6),
}


@pytest.mark.parametrize("form", DATA)
@settings(max_examples=250)
@given(data=st.data())
def test_any_data_is_read_or_refused(form: str, data: st.DataObject) -> None:
    """G5: data in the form's shape, with anything in it; the same as JSON text comes to the same."""
    document = data.draw(DATA[form] | values)
    before = copy.deepcopy(document)
    judged(document, form)
    judged(document, None)
    assert repr(document) == repr(before), "what is handed in is not changed"
    judged(json.dumps(document), form)


@pytest.mark.parametrize("form", DATA)
@settings(max_examples=250)
@given(data=st.data())
def test_json_text_that_was_damaged_is_read_or_refused(form: str, data: st.DataObject) -> None:
    text = damaged(json.dumps(PLANS[form]), data)
    judged(text, form)
    judged(text, None)


@given(values)
def test_whatever_it_is_its_form_is_found_or_not(document: Any) -> None:
    for one in (document, json.dumps(document)):
        try:
            form = find_form(one)
        except InputError:
            continue
        assert form is None or form in (*FORMS, "openai", "anthropic", "towerman")


# --------------------------------------------------------------------------------------------------------- good plans

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12)


@st.composite
def graphs(draw: st.DrawFn, most: int = 12) -> list[list[int]]:
    """For each step the earlier steps that it uses."""
    size = draw(st.integers(1, most))
    return [
        draw(st.lists(st.integers(0, index - 1), unique=True, max_size=4)) if index else [] for index in range(size)
    ]


@settings(max_examples=150)
@given(graphs(), st.data())
def test_r29_a_graph_is_the_same_graph_in_every_form(graph: list[list[int]], data: st.DataObject) -> None:
    """R-29, R-39: written in each form, a plan has the needs and the texts that were meant."""
    said = [data.draw(TEXT.filter(lambda text: not re.search(r"[$#<>]|^\\s|\\s$", text))) for _ in graph]
    want = [tuple(needs) for needs in graph]

    def linked(document: Any, form: str) -> Batch:
        batch = read_plan(document, form, KNOWN)
        assert batch.refused is None, batch.refused
        found = link(batch)
        got = [()] * len(graph) if found is None else found.needs[: len(graph)]
        assert [tuple(sorted(needs)) for needs in got] == [tuple(sorted(needs)) for needs in want]
        return batch

    rows = enumerate(zip(graph, said, strict=True))
    llm = "\n".join(f"{i + 1}. t({json.dumps(text)}, [{', '.join(f'${n + 1}' for n in ns)}])" for i, (ns, text) in rows)
    batch = linked(llm, "llmcompiler")
    for index, call in enumerate(batch.calls):
        assert isinstance(call.arguments, dict)
        assert call.arguments["1"] == said[index]
    rewoo = "\n".join(f"#E{i + 1} = T[{' '.join(f'#E{n + 1}' for n in ns)}]" for i, ns in enumerate(graph))
    linked(rewoo, "rewoo")
    linked({"task_nodes": [{"task": "t", "arguments": [f"<node-{n}>" for n in ns]} for ns in graph]}, "taskbench")
    numbers = data.draw(st.permutations(range(len(graph))))
    linked(
        [
            {"task": "t", "id": numbers[i], "dep": [numbers[n] for n in ns] or [-1], "args": {"x": said[i]}}
            for i, ns in enumerate(graph)
        ],
        "hugginggpt",
    )
    linked(
        [{"name": "t", "arguments": {"x": [f"$v{n}.a$" for n in ns]}, "label": f"v{i}"} for i, ns in enumerate(graph)],
        "nestful",
    )
    edges = [f"({n + 1},{i + 1})" for i, ns in enumerate(graph) for n in ns]
    nodes_ = "\n".join(f"{i + 1}: do" for i in range(len(graph)))
    linked(f"Node:\n{nodes_}\nEdges: (START,1) {' '.join(edges)} ({len(graph)},END)", "worfbench:do")


printable = st.text(string.printable.replace("$", ""), max_size=12)
literals = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | printable,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(printable, inner, max_size=4),
)  # fmt: skip


@settings(max_examples=300)
@given(literals)
@example("\\\n'\"")
def test_what_python_or_json_writes_is_read_back(value: Any) -> None:
    """A value as either of them writes it is that value, in its type."""
    for text in (repr(value), json.dumps(value)):
        [call] = read_plan(f"1. t({text}, x={text})").calls
        assert call.arguments == {"1": value, "x": value}
        assert json.dumps(call.arguments) == json.dumps({"1": value, "x": value})


# ------------------------------------------------------------------------------------------------------------ the cost


def chain(form: str, size: int) -> Any:
    """A plan of that size, each step of which uses the one before it."""
    steps = range(1, size + 1)
    if form == "llmcompiler":
        return "\n".join(f'{n}. t("step {n} of ${{{n - 1}}}", [$1])' if n > 1 else "1. t()" for n in steps)
    if form == "rewoo":
        return "\n".join(f"Plan: go on\n#E{n} = T[{f'after #E{n - 1} and #E1' if n > 1 else ''}]" for n in steps)
    if form == "taskbench":
        return {
            "task_nodes": [{"task": f"t{n}", "arguments": [f"<node-{n - 2}>"] if n > 1 else []} for n in steps],
            "task_links": [{"source": f"t{n - 1}", "target": f"t{n}"} for n in steps[1:]],
        }
    if form == "hugginggpt":
        return [
            {"task": "t", "id": n, "dep": [n - 1 or -1], "args": {"x": "<GENERATED>-1" if n > 1 else ""}} for n in steps
        ]
    if form == "nestful":
        rows = [{"name": "t", "label": f"v{n}", "arguments": {"x": f"$v{n - 1}.a$" if n > 1 else ""}} for n in steps]
        return [*rows, {"name": "var_result", "arguments": {"x": f"$v{size}$"}}]
    edges = "\n".join(f"({n - 1},{n})" for n in steps[1:])
    sentences = "\n".join(f"{n}: do it" for n in steps)
    return f"Node:\n{sentences}\nEdges: (START,1)\n{edges}\n({size},END)"


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_of_100_000_steps_is_read_at_a_flat_cost_for_each(form: str) -> None:
    """R-34: nothing is looked up step by step in all that comes before."""
    few, many = chain(form, 5_000), chain(form, 100_000)
    small = min(seconds_of(few, form) for _ in range(3))
    assert seconds_of(many, form) < 20 * 3 * small, "three times the cost for each step is no noise"


def seconds_of(plan: Any, form: str) -> float:
    """CPU seconds that it takes to read and to link a plan."""
    began = process_time()
    linked = judged(plan, named(form))
    spent = process_time() - began
    assert linked is not None
    return spent


HOSTILE: dict[str, Callable[[int], str]] = {
    "quotes": lambda n: "1. t(" + "'" * n,
    "strings that never end": lambda n: '1. t("' + "a\\" * n,
    "brackets": lambda n: "1. t(" + "[" * n,
    "bare": lambda n: "1. t(" + "a " * n,
    "bare with a quote": lambda n: "1. t(" + "a '" * n + ")",
    "blanks": lambda n: "1. t(" + " \n" * n + "x",
    "blank lines between steps": lambda n: "1. t()" + "\n" * n + "2. t()" + "\n" * n,
    "numbers": lambda n: "1. t(" + "9" * n + ")",
    "names": lambda n: "1. t(" + "a_" * n + "=",
    "dots": lambda n: "1. " + "a." * n,
    "digits": lambda n: "1" * n + ". t(",
    "thoughts": lambda n: "Thought: x\n" * n + "1. t()",
    "marks": lambda n: '1. t("' + "${" * n + '")',
    "dollars": lambda n: '1. t("' + "$1" * n + '")',
    "ends": lambda n: "1. t()" + "<END_OF_PLAN>" * n,
    "evidence": lambda n: "#E1" * n + " = ",
    "evidence with blanks": lambda n: ("#E1" + " " * 50) * (n // 50),
    "plans": lambda n: "Plan: " * n,
    "lines of plans": lambda n: "Plan: x\n" * n + "#E1 = A[]",
    "closing": lambda n: "#E1 = A[" + "]" * n,
    "lines of a text": lambda n: "#E1 = A[" + "x\n" * n + "]",
    "headings": lambda n: "Node:\n" * n,
    "lines of a node": lambda n: "Node:\n1: x\n" + "x\n" * n + "Edges: (1,END)",
    "edges": lambda n: "Node:\n1: x\nEdges: " + "(1,END) " * n + "(",
    "open edges": lambda n: "Node:\n1: x\nEdges: " + "(" * n,
    "blanks of an edge": lambda n: "Node:\n1: x\nEdges: (" + " " * n,
    "angles": lambda n: json.dumps({"task_nodes": [{"task": "t", "arguments": ["<" * n]}]}),
    "nodes": lambda n: json.dumps({"task_nodes": [{"task": "t", "arguments": ["<node-" * n + " " * n + ">"]}]}),
    "blanks of a node": lambda n: json.dumps({"task_nodes": [{"task": "t", "arguments": ["<node" + "_ -" * n + ">"]}]}),
    "generated": lambda n: json.dumps([{"task": "t", "id": 0, "args": {"x": "<GENERATED" * n + "-" * n}}]),
    "blanks of generated": lambda n: json.dumps([{"task": "t", "id": 0, "args": {"x": "<" + " generated" * n + ">"}}]),
    "labels": lambda n: json.dumps([{"name": "t", "label": "v", "arguments": {"x": "$v" * n}}]),
    "labels that close": lambda n: json.dumps([{"name": "t", "label": "v", "arguments": {"x": "$v.a." * n + "$"}}]),
    "dollars of labels": lambda n: json.dumps([{"name": "t", "label": "v", "arguments": {"x": "$ " * n}}]),
    "depth": lambda n: '[{"task": "t", "id": 0, "args": {"x": ' + "[" * n + "]" * n + "}}]",
    "JSON that does not end": lambda n: "[" * n,
    "JSON texts": lambda n: "[" + '"x",' * n,
    "blanks before": lambda n: " " * n + "x",
    "line ends": lambda n: "\r\n" * n + "1. t()",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_more_than_its_length(name: str) -> None:
    """R-34: texts that make a careless reader go back and back again: four times the length, four times the time."""
    make = HOSTILE[name]
    for form in (None, *FORMS):
        for _ in range(3):  # what else the machine does now and then is no finding
            small, large = (cost_of(make(size), form) for size in (20_000, 80_000))
            if large < 0.05 or large < 4 * 3 * small:
                break
        else:
            raise AssertionError(f"{form}: {small:.3f} s, and {large:.3f} s for four times the length")


def cost_of(text: str, form: str | None) -> float:
    began = process_time()
    judged(text, None if form is None else named(form))
    return process_time() - began


def test_deep_data_is_read_without_recursion() -> None:
    value: Any = "<GENERATED>-0"
    for _ in range(50_000):
        value = [value]
    batch = read_plan([{"task": "t", "id": 0}, {"task": "t", "id": 1, "args": {"x": value}}])
    assert batch.refused is None
    value = batch.calls[1].arguments
    assert isinstance(value, dict)
    value = value["x"]
    while isinstance(value, list):
        [value] = value
    assert value == "${0}"
    assert link(batch) is None, "arguments are not taken so deep: the call is refused for them in its turn"
