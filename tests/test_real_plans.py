"""Plans that models and people really wrote: each runs against scripted handlers or is refused for what is wrong.

What a plan should come to is worked out here from its raw form, with code of its own: who refers to whom, which
references cannot be followed and why, and which arguments each handler must get. A table says for every file how many
of its plans run and how many are refused with which code.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from kit import Stage, on_stage, sound

from towerman import BatchResult, Context, Tower
from towerman.forms import find_form, read_plan

stage = pytest.fixture(on_stage)

Records = Callable[[str], list[dict[str, Any]]]

TABLE: dict[str, dict[str, int]] = {
    # Example plans of prompts: all of them run.
    "llmcompiler_prompt_plans": {"ok": 6},
    # Gold plans. One row lacks the closing `$` of a reference.
    "nestful_executable": {"ok": 29, "bad_reference": 1},
    "nestful_glaive": {"ok": 40},
    "nestful_sgd": {"ok": 10},
    "nestful_complexfuncbench": {"ok": 40},
    "worfbench_seal_tools": {"ok": 20},
    "worfbench_toolalpaca": {"ok": 10},
    "worfbench_toolbench": {"ok": 20},
    # Plans that models wrote. Steps that refer to themselves are circles (off by one: the usual mistake); references
    # past the end, to later steps or in the place of a name, and links by the name of a tool that several nodes have,
    # cannot be followed.
    "taskbench_pred_hf_codellama13b": {"ok": 19, "dependency_cycle": 8, "bad_reference": 3},
    # One row has, besides its circle, `<node-0>.text`: a path, which the form does not have. That is seen first, when
    # the text is read.
    "taskbench_pred_hf_mistral7b": {"ok": 9, "dependency_cycle": 11, "bad_reference": 10},
    # Arguments with a name and no value, or of one name.
    "taskbench_pred_mm_codellama13b": {"ok": 26, "invalid_arguments": 4},
    # Links by names that no node has (`Text_Extractor` for `Text Extractor`).
    "taskbench_pred_mm_mistral7b": {"ok": 26, "unknown_dependency": 4},
}

# ----------------------------------------------------------------------------------------------- what a row should be


LETTERS = list("abcdefgh")


def tool_of(name: str) -> str:
    """How a tool is called here that a planner calls so."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)


class Row:
    """A plan as its source has it.

    Attributes:
        document: what is handed in.
        form: the format that is named; None: it is found out.
        steps: (tool, id) of each step.
        needs: for each step the indexes of those that it must wait for.
        code: that of the refusal, or "ok".
        expected: for each step its arguments by name, given the values of all steps.
        answers: what each step's handler answers.
        positional: arguments have no names; tools take `a`, `b`, `c` and so on.
    """

    def __init__(self) -> None:
        self.document: Any = None
        self.form: str | None = None
        self.steps: list[tuple[str, str]] = []
        self.needs: list[set[int]] = []
        self.code = "ok"
        self.expected: list[Any] = []
        self.answers: list[Any] = []
        self.names: dict[str, list[str]] = {}


def cyclic(needs: Sequence[set[int]]) -> bool:
    """Whether somebody waits for itself in the end."""
    done: set[int] = set()
    while len(done) < len(needs):
        free = {index for index, wanted in enumerate(needs) if index not in done and wanted <= done}
        if not free:
            return True
        done |= free
    return False


def texts(value: Any) -> Iterator[str]:
    """Every text in some data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


def changed(value: Any, change: Callable[[str], Any]) -> Any:
    """The same data with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [changed(inner, change) for inner in value]
    return value


def pasted(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def filled(text: str, pattern: str, value_of: Callable[[re.Match[str]], Any]) -> Any:
    """A text with what its references come to: the value itself where it is nothing but one."""
    whole = re.fullmatch(pattern, text)
    if whole is not None:
        return value_of(whole)
    return re.sub(pattern, lambda match: pasted(value_of(match)), text)


def of_taskbench(given: Mapping[str, Any]) -> Row:
    row = Row()
    row.document = {"task_nodes": given["task_nodes"], "task_links": given["task_links"]}
    nodes = given["task_nodes"]
    row.steps = [(tool_of(one["task"]), str(index)) for index, one in enumerate(nodes)]
    tools = [one["task"] for one in nodes]
    given_arguments = [one.get("arguments", []) for one in nodes]
    pattern = r"<node-(\d+)>"
    row.needs = [{int(n) for text in texts(one) for n in re.findall(pattern, text)} for one in given_arguments]
    malformed = any(isinstance(a, dict) and set(a) != {"name", "value"} for one in given_arguments for a in one)
    unclear = any(
        re.search(r"<[^<>]*node[\s_-]*\d[^<>]*>", re.sub(pattern, "", text), re.I)
        or re.search(pattern + r"(\.\w|\[)", text)
        for one in given_arguments
        for text in texts(one)
    )
    names = [[a["name"] for a in one if isinstance(a, dict) and "name" in a] for one in given_arguments]
    twice = any(len(set(each)) < len(each) for each in names)
    unclear = unclear or any(re.search(pattern, name) for each in names for name in each)
    ends = [link[end] for link in given["task_links"] for end in ("source", "target")]
    if malformed or twice:
        row.code = "invalid_arguments"
    elif unclear:
        row.code = "bad_reference"
    elif wrong := [end for end in ends if tools.count(end) != 1]:
        row.code = "bad_reference" if wrong[0] in tools else "unknown_dependency"
    else:
        for link in given["task_links"]:
            row.needs[tools.index(link["target"])].add(tools.index(link["source"]))
        outside = any(need >= len(nodes) for wanted in row.needs for need in wanted)
        forward = any(need > index for index, wanted in enumerate(row.needs) for need in wanted)
        if outside or forward:
            row.code = "bad_reference"
        elif cyclic(row.needs):
            row.code = "dependency_cycle"
    row.answers = [{"made by": index, "file": f"{index}.jpg"} for index in range(len(nodes))]

    def value_of(match: re.Match[str]) -> Any:
        return row.answers[int(match[1])]

    for (tool, _), arguments in zip(row.steps, given_arguments, strict=True):
        names = row.names.setdefault(tool, [])
        unnamed = sum(1 for a in arguments if not isinstance(a, dict))
        names[:0] = [letter for letter in LETTERS[:unnamed] if letter not in names]
        names += [a["name"] for a in arguments if isinstance(a, dict) and a["name"] not in names]
    for arguments in given_arguments if row.code == "ok" else ():
        expected = dict(zip(LETTERS, [a for a in arguments if not isinstance(a, dict)], strict=False))
        expected |= {a["name"]: a["value"] for a in arguments if isinstance(a, dict)}
        row.expected.append(changed(expected, lambda text: filled(text, pattern, value_of)))
    return row


VAR = r"\$(var\d+)((?:\.[^.$\[\]]+|\[\d+\])*)\$"


def leading(value: Any, path: Sequence[str]) -> Any:
    """What a path of NESTFUL leads to: on a list all members have to agree, as they do in these rows."""
    for name in path:
        if name.startswith("["):
            value = value[int(name[1:-1])]
            continue
        if isinstance(value, list):
            assert len({json.dumps(member[name[1:]]) for member in value}) == 1
            value = value[0]
        value = value[name[1:]]
    return value


def of_nestful(given: Mapping[str, Any]) -> Row:
    row = Row()
    row.document = given
    calls = [call for call in given["output"] if call["name"] != "var_result"]
    row.steps = [(tool_of(call["name"]), call.get("label", "")) for call in calls]
    where = {label: index for index, (_, label) in enumerate(row.steps) if label}
    asked: dict[str, dict[str, Any]] = defaultdict(dict)
    for call in given["output"]:
        for text in texts(call["arguments"]):
            for label, path in re.findall(VAR, text):
                inner = asked[label]
                for name in re.findall(r"\.([^.\[]+)", path):
                    inner = inner.setdefault(name, {})
    for label in where:
        made(asked[label], label)
    row.answers = [call.get("response", asked.get(call.get("label", ""), {})) for call in calls]
    if any(re.search(r"^\$var\d+[^$]*$", text) for call in calls for text in texts(call["arguments"])):
        row.code = "bad_reference"
    for call in calls:
        found = [label for text in texts(call["arguments"]) for label, _ in re.findall(VAR, text)]
        row.needs.append({where[label] for label in found})

    def value_of(match: re.Match[str]) -> Any:
        return leading(row.answers[where[match[1]]], re.findall(r"\.[^.\[]+|\[\d+\]", match[2]))

    for call in calls:
        row.names.setdefault(tool_of(call["name"]), []).extend(call["arguments"])
        row.expected.append(changed(call["arguments"], lambda text: filled(text, VAR, value_of)))
    return row


def made(fields: dict[str, Any], place: str) -> None:
    """Give every field that somebody asks for a value."""
    for name, inner in fields.items():
        if inner:
            made(inner, f"{place}.{name}")
        else:
            fields[name] = f"{place}.{name}"


def of_worfbench(given: Mapping[str, Any]) -> Row:
    row = Row()
    row.document = given["conversations"][-1]["content"]
    row.form = "worfbench:do"
    sentences = re.findall(r"^(\d+)\s*:\s*(.*)$", row.document, re.MULTILINE)
    row.steps = [("do", own) for own, _ in sentences]
    where = {own: index for index, (_, own) in enumerate(row.steps)}
    row.needs = [set() for _ in sentences]
    for source, target in re.findall(r"\((\w+),\s*(\w+)\)", row.document):
        if source != "START" and target != "END":
            row.needs[where[target]].add(where[source])
    row.expected = [{"what": said} for _, said in sentences]
    row.names = {"do": ["what"]}
    row.answers = [f"did {own}" for own, _ in sentences]
    return row


def of_llmcompiler(given: Mapping[str, Any]) -> Row:
    row = Row()
    row.document = given["text"]
    calls = re.findall(r"^(\d+)\. (search|math)\((.*)\)$", row.document, re.MULTILINE)
    row.steps = [(tool, own) for own, tool, _ in calls]
    row.needs = [{int(n) - 1 for n in re.findall(r"\$(\d)", text)} for _, _, text in calls]
    row.names = {"search": ["a"], "math": ["a", "b"]}
    row.answers = [1000 + index for index in range(len(calls))]
    for _, _, text in calls:
        problem, _, rest = text.partition(", [")
        said = re.sub(r"\$(\d)", lambda match: str(row.answers[int(match[1]) - 1]), problem.strip("'\""))
        context = [row.answers[int(n) - 1] for n in re.findall(r"\$(\d)", rest)]
        row.expected.append({"a": said, "b": context} if rest else {"a": said})
    return row


def rows_of(name: str, records: Sequence[Mapping[str, Any]]) -> list[Row]:
    kinds = {"taskbench": of_taskbench, "nestful": of_nestful, "worfbench": of_worfbench, "llmcompiler": of_llmcompiler}
    return [kinds[name.partition("_")[0]](record) for record in records]


# --------------------------------------------------------------------------------------------------- the scripted side


class Script:
    """A tower with the tools of one row; a handler answers what the row says, and earlier steps are slower."""

    def __init__(self, stage: Stage, row: Row) -> None:
        self.tower: Tower = stage.tower()
        self.row = row
        self.got: list[Any] = [None] * len(row.steps)
        self.times: list[tuple[float, float]] = [(0.0, 0.0)] * len(row.steps)
        self.stage = stage
        for tool in dict.fromkeys(tool for tool, _ in row.steps):
            self.add(tool)

    def add(self, tool: str) -> None:
        left = [index for index, (name, _) in enumerate(self.row.steps) if name == tool]

        async def handler(ctx: Context, **given: Any) -> Any:
            index = next(i for i in left if self.row.steps[i][1] == ctx.call_id)
            left.remove(index)
            began = self.stage.clock.value
            await asyncio.sleep(len(self.got) - index)
            self.got[index] = given
            self.times[index] = began, self.stage.clock.value
            return self.row.answers[index]

        properties = {name: {} for name in self.row.names.get(tool, ())}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        self.tower.add_tool(handler, name=tool, description="scripted", schema=schema, independent=True)


def run(stage: Stage, script: Script) -> BatchResult:
    async def main() -> BatchResult:
        return await script.tower.execute(script.row.document, plan=True, format=script.row.form)

    return stage.run(main())


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.parametrize("name", TABLE)
def test_p19_p20_every_published_plan_runs_or_is_refused_for_what_is_wrong(
    name: str, stage: Stage, shared_data: Records
) -> None:
    """G5, P-19, P-20, R-29 to R-40: steps run in an order that their plan allows, at once where it allows that, each
    with what it names and nothing else; a plan that cannot be followed runs nothing, and every step is told why."""
    told: Counter[str] = Counter()
    for number, row in enumerate(rows_of(name, shared_data(name))):
        script = Script(stage, row)
        batch = run(stage, script)
        sound(batch, read_plan(row.document, row.form).calls)
        assert [(result.tool, result.call_id) for result in batch] == row.steps, number
        codes = {result.code for result in batch}
        if row.code == "ok":
            assert codes == {None}, (number, [result.message for result in batch if not result.ok])
            assert script.got == row.expected, number
            assert [result.value for result in batch] == row.answers, number
            for index, needs in enumerate(row.needs):
                ready = max([script.times[need][1] for need in needs], default=script.times[0][0])
                began = script.times[index][0]
                assert began >= ready, number
                assert began == pytest.approx(ready) or len(row.steps) > 8, f"{number}: nothing else holds a step up"
        else:
            assert codes == {row.code}, (number, row.code, batch[0].message)
            assert not any(result.started for result in batch), number
            assert script.got == [None] * len(row.steps), number
        told[row.code] += 1
    assert told == TABLE[name]


def test_complexfuncbench_rows_end_in_their_recorded_values(stage: Stage, shared_data: Records) -> None:
    """R-39: each call gets the very value (a number stays one, and no list is made of it) that stands in the recorded
    answer, so the same calls are made, and each ends in its own recorded answer."""
    references = 0
    for row in rows_of("nestful", shared_data("nestful_complexfuncbench")):
        script = Script(stage, row)
        batch = run(stage, script)
        assert batch.ok
        for result, call, got in zip(batch, row.document["output"], script.got, strict=True):
            assert result.value == call["response"]
            for argument, value in call["arguments"].items():
                if isinstance(value, str) and re.fullmatch(VAR, value):
                    references += 1
                    assert not isinstance(got[argument], list)
                    assert pasted(got[argument]) in json.dumps(row.answers, ensure_ascii=False)
    assert references == 81


@pytest.mark.parametrize("name", TABLE)
def test_the_form_of_every_published_plan_is_found(name: str, shared_data: Records) -> None:
    """Also where it comes as text."""
    form = name.partition("_")[0]
    for row in rows_of(name, shared_data(name)):
        document = row.document
        assert find_form(document) == form
        assert find_form(document if isinstance(document, str) else json.dumps(document)) == form


@pytest.mark.parametrize("name", ["bfcl_parallel", "trajectbench_parallel", "taubench_airline_gpt4o"])
def test_rows_that_are_no_plans_are_not_taken_for_one(name: str, shared_data: Records) -> None:
    """What other data sets call a row has no form of a plan."""
    for record in shared_data(name):
        assert find_form(record) in (None, "openai")
