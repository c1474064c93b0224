"""The placeholder guard (R-41): what it finds, what it leaves alone, and what becomes of a call with a placeholder."""

from __future__ import annotations

import ast
import asyncio
import datetime
import enum
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from re import _constants as opcodes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import placeholder_held_out as held_out
import pytest
from bfcl import fetched
from forms import schema_of
from hypothesis import given
from hypothesis import strategies as st
from kit import Stage, codes, on_stage
from placeholder_rows import LOOK_ALIKES, PLACEHOLDERS, Row

from towerman import Call, Context, Event, PolicyError, Tower, Worker
from towerman.calls import Batch
from towerman.placeholders import Found, Guard, Others, patterns, refusal, told, warning
from towerman.placeholders.guard import MOST_LOOKED
from towerman.placeholders.words import words_of

Records = Callable[[str], list[dict[str, Any]]]

CANARY = "canary-7f3e91"

stage = pytest.fixture(on_stage)


# ==================================================================== how much is found


def found(
    tool: str,
    arguments: Mapping[str, Any],
    properties: Mapping[str, Any],
    beside: Sequence[str] = (),
    description: str = "",
) -> list[Found]:
    """What the guard finds; its first look may not miss it."""
    guard = Guard(tool, description, {"type": "object", "properties": properties})
    calls = [*(Call(name, {}) for name in beside), Call(tool, arguments)]
    tools = {*beside, tool}
    places = guard.find(arguments, Others(calls), len(calls) - 1, tools)
    assert guard.suspects(arguments, tools) or not places
    return places


def judged(row: Row) -> bool:
    """Is this row's value taken for a placeholder?"""
    properties = {row.argument: row.schema or {}}
    return bool(found(row.tool, {row.argument: row.value}, properties, row.beside, row.description))


@pytest.mark.parametrize("row", PLACEHOLDERS, ids=lambda row: f"{row.tool}-{row.argument}-{str(row.value)[:30]!a}")
def test_r41_a_placeholder_is_found(row: Row) -> None:
    """R-41: what stands in place of a value, in all the ways in which models were seen to write it."""
    assert judged(row)


@pytest.mark.parametrize("row", LOOK_ALIKES, ids=lambda row: f"{row.tool}-{row.argument}-{str(row.value)[:30]!a}")
def test_r41_a_value_is_left_alone(row: Row) -> None:
    """R-41: what looks like a placeholder and is a value where it stands."""
    assert not judged(row)


@pytest.mark.parametrize("kind", ["OPEN", "SEALED"])
def test_r41_rows_that_were_held_back(kind: str) -> None:
    """R-41: of rows that no rule was written for at least 90 % are found, and at most 5 % are false alarms."""
    placeholders: list[Row] = getattr(held_out, f"{kind}_PLACEHOLDERS")
    values: list[Row] = getattr(held_out, f"{kind}_LOOK_ALIKES")
    assert len(placeholders) == len(values) == 60
    assert sum(map(judged, placeholders)) >= 0.9 * len(placeholders)
    assert sum(map(judged, values)) <= 0.05 * len(values)


def test_r41_the_published_rows(shared_data: Records) -> None:
    """R-41: the same for the rows of placeholders.jsonl, which say nothing of schemas or siblings."""
    rows = shared_data("placeholders")
    hits = {True: 0, False: 0}
    for row in rows:
        hits[row["is_placeholder"]] += bool(found(row["tool"], {row["arg"]: row["value"]}, {row["arg"]: {}}))
    right = sum(row["is_placeholder"] for row in rows)
    assert hits[True] >= 0.9 * right
    assert hits[False] <= 0.05 * (len(rows) - right)


# ==================================================================== no false alarm where people wrote the values


def wheel() -> Path:
    """The folder of BFCL's files, or skip where no package index gives them."""
    folder = fetched()
    if isinstance(folder, str):
        pytest.skip(folder)
    return folder / "bfcl_eval" / "data"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def by_name(functions: Any) -> dict[str, Any]:
    return {one["name"]: one for one in functions} if isinstance(functions, list) else {}


def alternatives(wanted: Sequence[Any]) -> Iterator[list[Call]]:
    """Batches in which each right value of each argument stands once."""
    calls = [next(iter(one.items())) for one in wanted]
    listed = [(name, {key: one if isinstance(one, list) else [one] for key, one in its.items()}) for name, its in calls]
    most = max((len(values) for _, its in listed for values in its.values()), default=1)
    for turn in range(most):
        yield [
            Call(name, {key: values[min(turn, len(values) - 1)] for key, values in its.items() if values})
            for name, its in listed
        ]


def written_as_python(texts: Sequence[str], functions: Mapping[str, Any]) -> list[Call]:
    """Calls that are written as `mv(source='a', destination='b')`."""
    calls = []
    for text in texts:
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:  # a text with an apostrophe between apostrophes
            continue
        assert isinstance(tree, ast.Call)
        name = ast.unparse(tree.func).rpartition(".")[2]
        names = [*functions.get(name, {}).get("parameters", {}).get("properties", {}), *map(str, range(9))]
        given = [*zip(names, tree.args, strict=False), *((str(one.arg), one.value) for one in tree.keywords)]
        # Sums are numbers, whatever they come to.
        arguments = {key: 0 if isinstance(one, ast.BinOp) else ast.literal_eval(one) for key, one in given}
        calls.append(Call(name, arguments))
    return calls


def batches(data: Path) -> Iterator[tuple[str, list[Call], Mapping[str, Any]]]:
    """Every batch of right calls of the wheel: its file, its calls, and what is said of their tools."""
    stateful = {one["name"]: one for path in (data / "multi_turn_func_doc").glob("*.json") for one in lines(path)}
    files = [*(data / "possible_answer").glob("*.json"), *(data / "unused_datasets/possible_answer").glob("*.json")]
    for path in sorted(files):
        questions = path.parent.parent / path.name
        if not questions.is_file():
            questions = path.parent.parent / "question" / path.name
        asked = {row["id"]: by_name(row.get("function")) for row in lines(questions)} if questions.is_file() else {}
        for row in lines(path):
            truth, tools = row["ground_truth"], asked.get(row.get("id"), {}) or stateful
            for turn in truth if truth and isinstance(truth[0], list) else [truth]:
                if turn and all(isinstance(one, Mapping) for one in turn):
                    for calls in alternatives(turn):
                        yield path.name, calls, tools
                elif turn and all(isinstance(one, str) and one.strip().endswith(")") for one in turn):
                    yield path.name, written_as_python(turn, tools), tools


def test_r41_no_alarm_on_the_right_arguments_of_bfcl() -> None:
    """R-41: in every file of the wheel, on each right value of each argument: none."""
    guards: dict[tuple[str, int], Guard] = {}
    files: set[str] = set()
    count, alarms = 0, []
    for file, calls, tools in batches(wheel()):
        others, names = Others(calls), {call.tool for call in calls}
        for index, call in enumerate(calls):
            one = tools.get(call.tool, {})
            guard = guards.get((call.tool, id(one)))
            if guard is None:
                schema = schema_of(one.get("parameters", {}))
                guard = guards[call.tool, id(one)] = Guard(call.tool, one.get("description", ""), schema)
            assert isinstance(call.arguments, Mapping)
            places = guard.find(call.arguments, others, index, names)
            assert guard.suspects(call.arguments, names) or not places
            alarms += [(file, call.tool, place) for place in places]
            count += 1
            files.add(file)
    assert alarms == []
    assert count > 10_000
    assert len(files) > 15


@pytest.mark.parametrize("name", ["bfcl_parallel", "bfcl_parallel_multiple", "bfcl_live_parallel"])
def test_r41_no_alarm_on_published_batches(name: str, shared_data: Records) -> None:
    """R-41: the same for the rows that lie beside the checkout."""
    count = 0
    for row in shared_data(name):
        tools = by_name(row["function"])
        for calls in alternatives(row["ground_truth"]):
            others = Others(calls)
            for index, call in enumerate(calls):
                one = tools[call.tool]
                guard = Guard(call.tool, one["description"], schema_of(one["parameters"]))
                assert isinstance(call.arguments, Mapping)
                assert not guard.find(call.arguments, others, index), row["id"]
                count += 1
    assert count > 20


def test_r41_what_two_models_wrote_where_they_had_no_value(shared_data: Records) -> None:
    """R-41, FIELD 13: plans of models that knew no syntax for references. What they wrote in place of results is
    found; whoever needs no result is left alone but for the plain references among them.
    """
    missed, count = 0, 0
    for row in shared_data("taskbench_pred_mm_mistral7b"):
        nodes, links = row["task_nodes"], row["task_links"]
        listed = [one for node in nodes for one in node.get("arguments", [None])]
        if not all(isinstance(one, dict) for one in [*listed, *links]):
            continue  # it is of no form that the data set knows
        calls = [Call(node["task"], {one["name"]: one["value"] for one in node["arguments"]}) for node in nodes]
        needing = {link["target"] for link in links}
        others = Others(calls)
        for index, call in enumerate(calls):
            assert isinstance(call.arguments, Mapping)
            if call.tool in needing and any(call.arguments.values()):
                count += 1
                missed += not Guard(call.tool, "", {"type": "object"}).find(call.arguments, others, index)
    assert count > 40
    assert missed <= 0.2 * count  # the others guessed the name of a file


@pytest.mark.parametrize(
    ("tool", "argument", "value", "beside", "is_one"),
    [
        # Between marks that hold nothing.
        ("pay", "order_id", "()", (), False),
        ("pay", "order_id", "< order id >", (), True),
        # Sums and code.
        ("calculator", "expression", "$1 + $2", (), True),
        ("calculator", "expression", "$3 * 2", (), False),
        ("calculator", "expression", "#E1 * 3", (), True),
        ("run_python", "code", "output_of_step_1", (), True),
        ("run_python", "code", "model_output", (), False),
        # Variables, by what they are called and where they stand.
        ("say", "text", "$PREV_RESULT", (), True),
        ("say", "text", "${steps.lookup.id}", (), True),
        ("get_weather", "city", "$city", (), True),
        ("sort", "column", "{{column}}", (), True),
        ("sort", "column", "<name>", (), True),
        ("write_file", "content", "{{content}}", (), False),
        ("login", "api_key", "abc-{user}-x", (), False),
        ("pay", "order_id", "abc-{user}-x", (), True),
        # What is left open between square brackets.
        ("find", "city", "[all of those places that nobody has been to]", (), False),
        ("post_message", "text", "[Insert Topic]", (), True),
        ("send_email", "body", "[customer_id]", (), True),
        # Words in place of any value.
        ("greet", "user_name", "user_name", (), True),
        ("greet", "user_name", "UserName", (), False),
        ("get_weather", "city", "city", (), True),
        ("get_weather", "season", "season", (), False),
        ("greet", "user_name", "string", (), True),
        ("greet", "user_name", "UNKNOWN_UNTIL_LOGIN", (), True),
        ("greet", "user_name", "use the output", (), True),
        ("greet", "user_name", "ENTER USER NAME", (), True),
        ("greet", "user_name", "latest_user_id", (), True),
        ("greet", "user_name", "a b c d e f g h i j k l m n result o", (), False),
        ("greet", "user_name", "user name", (), False),
        ("get_order", "order_id", "N/A", (), True),
        ("forward", "to", "n/a", (), False),
        # Steps that are there, and steps that are not.
        ("greet", "user_name", "step_9", (), False),
        ("greet", "user_name", "step-1", ("log_in",), True),
        ("get_item", "item_id", "result_2", (), True),
        ("get_item", "item_id", "callback.value", (), False),
        ("get_item", "item_id", "@result", (), True),
        ("greet", "user_name", "city_geo_code_result", ("geo_code",), True),
        ("greet", "user_name", "city_geo_code_result", (), False),
        # Prose that says nothing else, and titles.
        ("create_note", "text", "Output of step 1 please", (), True),
        ("create_note", "title", "Result of step 1 please", (), False),
        ("add_review", "text", "I liked <the output of the previous call> most", (), True),
    ],
)
def test_r41_fine_points(tool: str, argument: str, value: str, beside: tuple[str, ...], is_one: bool) -> None:
    """R-41: where the same words, in another argument or beside other calls, are something else."""
    assert bool(found(tool, {argument: value}, {argument: {}}, beside)) is is_one


SAID = """
The result of the previous call was wrong
The output of the first call is empty
The response of the last call had no rows
Output of step 2 should be reviewed by Anna
Result of the first step looks fine
The content returned by the first call was cut
Response from step 1 took 3 seconds
The result of step 3 must be signed
Result of call 1 is 42
The report from the previous step needs work
Details of the first call were lost
The message from the last call has a typo
#E1 is the room
#E1 and #E2 are both free today
"""
NAMED = """
The result of the previous call
the output of the first call
Output of step 2
The content returned by the first call
Response from step 1
The report from the previous step
Details of the first call
#E1
#E1 and #E2
Ask for #E1
"""


@pytest.mark.parametrize(("tool", "argument"), [("add_note", "note"), ("send_message", "text"), ("update", "comment")])
def test_r41_what_is_said_of_a_result_is_no_name_of_one(tool: str, argument: str) -> None:
    """R-41: a sentence about a result is prose, by the word that says something; the same without it stands for one.
    In an identifier it is of no use either way.
    """
    for text in SAID.strip().splitlines():
        assert not found(tool, {argument: text}, {argument: {}}, ()), text
        assert text[0] == "#" or found("pay", {"order_id": text}, {"order_id": {}}, ()), text
    for text in NAMED.strip().splitlines():
        assert found(tool, {argument: text}, {argument: {}}, ()), text


# ==================================================================== the first look, and texts of any kind

NAMES = ["id", "order_id", "path", "url", "body", "query", "code", "template", "amount", "city", "date", "user", "to"]
PIECES = [
    *("<", ">", "{{", "}}", "${", "}", "{", "[", "]", "$", "%", "#E1", "@", "(", ")", ":", "->", "::", "|", "/", "\\"),
    *(" ", " ", "_", "_", "-", ".", "'s ", "[0]", "=", "&", "*", "~", "?", "xxx", "XXXX", "\u00ab", "\u00bb", "..."),
    *("output", "result", "results", "response", "previous", "prev", "step", "call", "task", "of", "from", "the", "by"),
    *("1", "2", "0", "id", "ID", "uuid", "order", "Order", "orderId", "find_order", "findOrder", "email", "name"),
    *("unknown", "TBD", "placeholder", "your", "here", "insert", "generated", "image", "until", "pending", "first"),
    *("last", "new", "value", "amount", "total", "string", "use", "see", "same", "as", "above", "N/A", "/path/to/x"),
    *("https://example.org", "call_1", "var1", "csv", ".json", "body", "city", "query", "user", "path", "to", "x"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=7).map("".join) | st.text(max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | TEXTS, inner, max_size=3),
    max_leaves=8,
)
SCHEMAS = st.sampled_from(
    [{}, {"type": "string"}, {"type": "number"}, {"type": "string", "format": "uuid"}, {"enum": ["unknown", "call_1"]}]
)


@given(
    arguments=st.dictionaries(st.sampled_from(NAMES) | TEXTS, VALUES, max_size=4),
    properties=st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=5),
    tool=st.sampled_from(["find_order", "send_mail", "run_sql", "calculate", "render_template", "read_json", "write"]),
    beside=st.lists(st.sampled_from(["find_order", "get_city", "create_order", "order"]), max_size=2),
    free=st.lists(st.sampled_from(NAMES), max_size=1),
)
def test_r41_g8_the_first_look_misses_nothing_and_no_value_is_told(
    arguments: dict[str, Any], properties: dict[str, Any], tool: str, beside: list[str], free: list[str]
) -> None:
    """R-41, G8: whatever is found was suspected; any arguments are looked through; what is told has only names of the
    schema in it.
    """
    guard = Guard(tool, "", {"type": "object", "properties": properties}, free)
    calls = [*(Call(name, {}, "call_1") for name in beside), Call(tool, arguments)]
    others, tools = Others(calls), {*beside, tool}
    places = guard.find(arguments, others, len(calls) - 1, tools)
    assert guard.suspects(arguments, tools) or not places
    assert places == guard.find(arguments, others, len(calls) - 1, tools)
    for place in places:
        names = re.sub(r"\[\d+\]", "", place.place).split(".")
        assert all(name in properties or name in ("*", "") for name in names)
        assert names[0] not in free
        assert place.call is None or 0 <= place.call < len(calls) - 1


@given(text=TEXTS, name=st.sampled_from(NAMES), schema=SCHEMAS)
def test_r41_calls_that_are_not_named_change_nothing(text: str, name: str, schema: dict[str, Any]) -> None:
    """R-41: a value is no placeholder for what stands beside it unless it names that."""
    alone = found("tool", {name: text}, {name: schema})
    if not {"zebra", "quagga"}.intersection(words_of(text)) and not re.search(r"\d", text):
        beside = found("tool", {name: text}, {name: schema}, ["zebra_quagga", "quagga_zebra"])
        assert [one.place for one in beside] == [one.place for one in alone]


def repeats(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every repeat of a parsed pattern that may give back what it took, with what comes behind it."""
    for place, (opcode, argument) in enumerate(node):
        if opcode in (opcodes.MAX_REPEAT, opcodes.MIN_REPEAT) and argument[0] != argument[1]:
            yield argument, list(node)[place + 1 :]
        for part in argument if isinstance(argument, tuple | list) else ():
            if isinstance(part, parser.SubPattern):
                yield from repeats(part)
            elif isinstance(part, list):
                for inner in part:
                    if isinstance(inner, parser.SubPattern):
                        yield from repeats(inner)


@pytest.mark.parametrize("name", [name for name in vars(patterns) if name.isupper()])
def test_every_pattern_takes_no_step_back(name: str) -> None:
    """The house rule of the patterns: each repeat is possessive, so that no text makes one slow. An optional sign of
    one character may be given back.
    """
    pattern: re.Pattern[str] = getattr(patterns, name)
    parsed = parser.parse(pattern.pattern, pattern.flags)
    assert [argument for argument, _ in repeats(parsed) if argument[1] > 1] == []


@pytest.mark.parametrize("piece", ["<", "{{", "<a ", "[a", "$a.", "${", "a_", "call_1.", "f(", "%(", "__A", "##a "])
def test_long_texts_are_looked_through(piece: str) -> None:
    """A text of a megabyte is gone through; what is found depends on its beginning."""
    text = piece * (1_000_000 // len(piece))
    for name in ("order_id", "body", "url", "query", "city", "amount"):
        found("send_mail", {name: text}, {name: {}})
    assert found("send_mail", {"body": "Dear [Customer Name], " + piece * 1000}, {"body": {}})


def test_many_values_are_looked_through_up_to_a_bound() -> None:
    """Of very many values the first some thousand are looked at, wherever they are, and no more."""
    guard = Guard("book", "", {"type": "object", "properties": {"item_ids": {"type": "array"}}})
    others = Others([Call("book", {})])

    def places(value: Any) -> list[str]:
        arguments = {"item_ids": value}
        seen = [one.place for one in guard.find(arguments, others, 0)]
        assert guard.suspects(arguments, ()) or not seen
        return seen

    plain = [f"A-{number}" for number in range(MOST_LOOKED)]
    assert places([*plain[: MOST_LOOKED - 3], "<item id>"]) == [f"item_ids[{MOST_LOOKED - 3}]"]
    assert places([*plain, "<item id>"]) == places({**dict.fromkeys(plain, "A"), "id": "<item id>"}) == []
    assert not guard.suspects({"item_ids": plain[:100]}, ())
    assert places(["<b> or <i>"] * 200_000) == []


@pytest.mark.parametrize(("levels", "places"), [(MOST_LOOKED - 10, 1), (50_000, 0)])
def test_deep_values_do_not_recurse(levels: int, places: int) -> None:
    """Lists and objects of any depth are gone through, as far as values are looked at."""
    deep: Any = "<result of step 1>"
    named: Any = "<result of step 1>"
    for _ in range(levels):
        deep, named = [deep], {"inner": named}
    guard = Guard("look", "", {"type": "object", "properties": {"id": {}}})
    others = Others([Call("look", {})])
    for arguments in ({"id": deep}, {"id": named}, {"other": deep}, {"other": named}):
        assert guard.suspects(arguments, ())
        assert len(guard.find(arguments, others, 0)) == places


# ==================================================================== schemas


def test_r41_places_are_named_as_the_schema_names_them() -> None:
    """R-41, G8: the path of an argument in names of the schema; what a model has named itself is a star."""
    line = {"type": "object", "properties": {"sku": {"type": "string"}}}
    properties = {"order": {"type": "object", "properties": {"lines": {"type": "array", "items": line}}}}
    arguments = {"order": {"lines": [{"sku": "A-1"}, {"sku": "<sku>", CANARY: "<name of it>"}]}, CANARY: ["<x_id>"]}
    assert [one.place for one in found("book", arguments, properties)] == [
        "order.lines[1].sku",
        "order.lines[1].*",
        "*[0]",
    ]
    long = "n" * 100
    (place,) = found("book", {long: "<the id>"}, {long: {}})
    assert place.place == "n" * 64 + "..."
    assert len(found("book", {"order": {"lines": [{"sku": "<sku>"}] * 9}}, properties)) == 5  # told are some


def test_r41_schemas_that_refer_to_themselves() -> None:
    """R-41: a tree of any depth is judged by what its schema says."""
    node = {"type": "object", "properties": {"item_id": {"type": "string"}, "next": {"$ref": "#/$defs/node"}}}
    schema = {"type": "object", "properties": {"first": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    guard = Guard("link", "", schema)
    arguments = {"first": {"item_id": "a", "next": {"next": {"item_id": "TBD"}}}}
    assert guard.suspects(arguments, ())
    assert [one.place for one in guard.find(arguments, Others([Call("link", {})]), 0)] == ["first.next.next.item_id"]


def test_r41_schemas_of_alternatives() -> None:
    """R-41: what one alternative says of a field holds where another one says nothing, or the same again."""
    node = {"type": "object", "properties": {"item_id": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {
            "item": {"anyOf": [{"$ref": "#/$defs/node"}, {"allOf": [{"$ref": "#/$defs/node"}]}, dict(node)]}
        },
        "$defs": {"node": node},
    }
    guard = Guard("link", "", schema)
    (place,) = guard.find({"item": {"item_id": "TBD"}}, Others([Call("link", {})]), 0)
    assert place.place == "item.item_id"


def test_r41_what_the_schema_itself_names_is_a_value() -> None:
    """R-41: enum, examples, const and default are no placeholders, whatever they look like."""
    for schema in ({"enum": ["<all>"]}, {"examples": ["<all>"]}, {"const": "<all>"}, {"default": "<all>"}):
        assert not found("list_items", {"item_id": "<all>"}, {"item_id": schema})
        assert found("list_items", {"item_id": "<one>"}, {"item_id": schema})
    either = {"anyOf": [{"type": "null"}, {"enum": ["<all>"]}]}
    assert not found("list_items", {"item_id": "<all>"}, {"item_id": either})
    several = {"type": "array", "items": {"enum": ["<all>", "<none>"]}}
    assert not found("list_items", {"item_ids": ["<all>", "<none>"]}, {"item_ids": several})


@pytest.mark.parametrize(
    ("schema", "value", "is_one"),
    [
        ({"type": "integer"}, "the number of items", True),
        ({"type": ["number", "null"]}, "price from lookup", True),
        ({"type": "string", "format": "email"}, "customer's email", True),
        ({"type": "string", "format": "date"}, "the last day of the month", False),
        ({"type": "string", "format": "regex"}, "<[a-z_]+>", False),
        ({"type": "string", "format": "uri"}, "link from step 2", True),
        ({"type": "string", "description": "a template with placeholders"}, "{{name}}", False),
        ({"type": "string", "description": "a regex"}, "${name}", False),
        ({"type": "string", "description": "which one"}, "{{name}}", True),
        ({"allOf": [{"type": "string"}, {"format": "uuid"}]}, "some uuid", True),
    ],
)
def test_r41_a_schema_says_what_an_argument_is_for(schema: dict[str, Any], value: str, is_one: bool) -> None:
    """R-41: types, formats and descriptions weigh."""
    assert bool(found("do", {"thing": value}, {"thing": schema})) is is_one


def test_r41_the_tools_own_words_weigh() -> None:
    """R-41: the same value in the same argument, for a tool that stores templates and one that does not."""
    assert found("do", {"text": "{{name}}"}, {"text": {}})
    assert not found("do", {"text": "{{name}}"}, {"text": {}}, description="Stores a mustache template.")


# ==================================================================== other calls of the batch


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("<order id from find_order>", 0),
        ("{{find_order.id}}", 0),
        ("$find_order", 0),
        ("toolu_9x", 1),
        ("<toolu_9x>", 1),
        ("{{toolu_9x.id}}", 1),
        ("toolu_9x.id", 1),
        ("result_of_get_city", 1),
        ("$1", 0),
        ("${2}", None),
        ("<the id>", None),
    ],
)
def test_r41_the_call_that_is_named_is_told(value: str, names: int | None) -> None:
    """R-41: by the name of its tool, its id or its number."""
    calls = [Call("find_order", {}, "call_a"), Call("get_city", {}, "toolu_9x"), Call("pay", {"order_id": value}, "p")]
    guard = Guard("pay", "", {"type": "object", "properties": {"order_id": {"type": "string"}}})
    assert guard.suspects({"order_id": value}, ())
    places = guard.find({"order_id": value}, Others(calls), 2)
    assert [one.call for one in places] == [names]


def test_r41_objects_that_refer() -> None:
    """R-41: an object that can only be a reference is one; another one where it names a call of the batch."""
    calls = [Call("find_file", {}, "c1"), Call("move", {}, "c2")]
    guard = Guard("move", "", {"type": "object", "properties": {"source": {}, "schema": {}}})

    def names(value: Any, argument: str = "source") -> list[int | None]:
        arguments = {argument: value}
        places = [one.call for one in guard.find(arguments, Others(calls), 1)]
        assert guard.suspects(arguments, ()) or not places
        return places

    assert names({"$ref": "c1#/path"}) == names({"ref": "c1"}) == names({"call_id": "c1", "path": "a"}) == [0]
    assert names({"$ref": "elsewhere"}) == names({"output_of": 5}) == [None]
    assert names({"ref": "elsewhere"}) == names({"call_id": 5}) == names({"$ref": "c1", "color": "red"}) == []
    assert names({"$ref": "#/$defs/a"}, "schema") == []
    assert names({"a": 1, "b": 2, "c": 3, "ref": "c1"}) == names({}) == names({5: "x", "ref": "c1"}) == []
    whole = {"$ref": "c1"}
    assert guard.suspects(whole, ())
    assert guard.find(whole, Others(calls), 1) == [Found("", 0)]
    own = Guard("pay", "", {"type": "object", "properties": {"reference": {"type": "object"}}})
    assert not own.suspects({"reference": {"a": 1, "b": 2, "c": 3, "ref": "x"}}, ())
    assert not guard.suspects({"else": "some words " * 20, "more": "a/b"}, ())


def test_calls_without_names_are_no_trouble() -> None:
    """G1: whatever stands where a name or an id belongs."""
    calls: list[Any] = [Call(5, {}, None), Call("", {}, ""), Call("pay", {}, "x")]  # type: ignore[arg-type]
    others = Others(calls)
    assert others.tools == {"", "pay"}
    assert len(others) == 3
    assert others.tool([], 0) is None
    guard = Guard("pay", "", {"type": "object", "properties": {"order_id": {}}})
    assert guard.find({"order_id": "<id from pay>"}, others, 2) == [Found("order_id", None)]


# ==================================================================== what is left alone by declaration


def test_r41_what_is_declared_as_free_text_is_left_alone() -> None:
    """R-41, API: `free_text` by name, by path, inside lists, and all of it."""
    line = {"type": "object", "properties": {"text": {"type": "string"}, "sku": {"type": "string"}}}
    properties = {"order_id": {}, "lines": {"type": "array", "items": line}, "mail": {"type": "object"}}
    schema = {"type": "object", "properties": properties}
    arguments = {
        "order_id": "<order id>",
        "lines": [{"text": "<name of it>", "sku": "<sku>"}],
        "mail": {"body": "<result of step 1>"},
        "more": "<id of it>",
    }
    others = Others([Call("pay", arguments)])
    every = ["order_id", "lines[0].text", "lines[0].sku", "mail.*", "*"]

    def left(free: Any) -> list[str]:
        guard = Guard("pay", "", schema, free)
        places = [one.place for one in guard.find(arguments, others, 0)]
        assert guard.suspects(arguments, ()) is bool(places)
        return places

    assert left(()) == left(False) == every
    assert left(["order_id"]) == every[1:]
    for path in ("lines[].text", "lines.text", "lines[*].text"):
        assert left([path]) == [every[0], *every[2:]]
    assert left(["lines"]) == ["order_id", "mail.*", "*"]
    assert left(["mail.body"]) == [*every[:3], "*"]
    assert left(["more"]) == every[:4]
    assert left([*arguments]) == left(True) == []


def test_r41_values_that_are_no_json_are_looked_at_as_they_came() -> None:
    """R-41: where a checked argument is an object of the handler's own type, the first look cannot tell."""

    class Color(enum.Enum):
        RED = "unknown"

    guard = Guard("paint", "", {"type": "object", "properties": {"color_id": {}, "names": {}}})
    assert not guard.suspects({"color_id": Color.RED, "at": datetime.date(2026, 1, 2), "n": 5, "x": None}, ())
    assert not guard.suspects({"names": ["a", 5, None, ("b", 1.5), Color.RED], "color_id": {}}, ())
    assert guard.suspects({"color_id": Path("a")}, ())
    assert guard.suspects({"names": [uuid.UUID(int=1)]}, ())
    assert guard.suspects({"color_id": b"x"}, ())


# ==================================================================== what is said


def test_r41_what_is_told_says_what_to_do() -> None:
    """R-41, R-95: which argument, and to wait for whose result."""
    one, other = Found("order_id", None), Found("lines[0].sku", 1)
    assert refusal([one], 2) == (
        "Not run: argument 'order_id' holds a placeholder instead of a value. Calls of one response do not see each "
        "other's results. Wait for the first result, then call again with the real value."
    )
    assert refusal([one, other], 2, "find_item") == (
        "Not run: arguments 'order_id' and 'lines[0].sku' hold placeholders instead of a value. Calls of one response "
        "do not see each other's results. Wait for the result of call 1 (find_item), then call again with the real "
        "value."
    )
    assert "the result of call 1, then" in refusal([other], 2)
    assert refusal([one], 1).endswith("or from the user. Then call again.")
    assert told([Found("", None)]) == "the arguments hold a placeholder"
    assert told([one, one]) == "argument 'order_id' holds a placeholder"
    assert len(told([Found("a" * 500, None)])) < 200
    assert warning([one], 3, "pay") == (
        "Call 3 (pay) was run although argument 'order_id' holds a placeholder instead of a value."
    )


# ==================================================================== in a tower


class Shop:
    """A tower with two tools, and what they were called with."""

    def __init__(self, stage: Stage, **options: Any) -> None:
        self.stage = stage
        self.did: list[tuple[str, Any]] = []
        self.events: list[Event] = []
        tower = self.tower = stage.tower(observers=[self.events.append], **options)

        @tower.tool(independent=True)
        async def find_order(customer: str) -> str:
            self.did.append(("find_order", customer))
            return "A-17"

        @tower.tool(independent=True)
        async def pay_order(order_id: str, note: str = "", amount: float = 0.0) -> str:
            self.did.append(("pay_order", order_id))
            return "paid"

    def run(self, *calls: Call, **options: Any) -> Any:
        """One batch."""
        done = self.stage.run(self.tower.execute(calls, **options) if not options else self._run(calls, **options))
        assert self.tower.flush(30)
        return done

    async def _run(self, calls: Any, **options: Any) -> Any:
        async with self.tower.run() as run:
            return await run.execute(calls, **options)

    def told(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if event.kind == kind]


FIND = Call("find_order", {"customer": "Ada"}, "c1")
PAY = Call("pay_order", {"order_id": "<from previous call>"}, "c2")


@pytest.mark.parametrize("as_text", [False, True])
def test_r41_only_that_call_is_refused(as_text: bool, stage: Stage) -> None:
    """R-41, P-19: a placeholder refuses its call before its handler starts, and says to wait; its siblings run."""
    shop = Shop(stage)
    pay = Call("pay_order", json.dumps(PAY.arguments), "c2") if as_text else PAY
    done = shop.run(FIND, pay, Call("pay_order", {"order_id": "A-16"}, "c3"))
    assert codes(done) == [None, "unresolved_placeholder", None]
    assert shop.did == [("find_order", "Ada"), ("pay_order", "A-16")]
    refused = done[1]
    assert (refused.outcome, refused.started, refused.applied) == ("rejected", False, "no")
    assert "'order_id'" in refused.message
    assert "Wait for the first result" in refused.message
    assert "previous" not in refused.message
    assert [event.code for event in shop.told("rejected")] == ["unresolved_placeholder"]
    assert shop.tower.statistics().rejections["unresolved_placeholder"] == 1


def test_r41_the_call_to_wait_for_is_named(stage: Stage) -> None:
    """R-41: where the value names it."""
    done = Shop(stage).run(FIND, Call("pay_order", {"order_id": "{{find_order.id}}"}))
    assert "Wait for the result of call 0 (find_order)" in done[1].message
    unknown = Shop(stage).run(Call("look_up", {}), Call("pay_order", {"order_id": "<id from look_up>"}))
    assert codes(unknown) == ["unknown_tool", "unresolved_placeholder"]
    assert "Wait for the result of call 0, then" in unknown[1].message  # a name that a model invented is not repeated


def test_r41_where_a_number_is_wanted(stage: Stage) -> None:
    """R-41: a placeholder is told as one also where it would not have passed the schema."""
    shop = Shop(stage)
    pays = [{"amount": "<total from find_order>"}, {"amount": "much"}, {"amount": "<total>", "order_id": {}}]
    done = shop.run(FIND, *(Call("pay_order", {"order_id": "A-1", **its}) for its in pays))
    assert codes(done) == [None, "unresolved_placeholder", "invalid_arguments", "unresolved_placeholder"]
    broken = shop.run(Call("pay_order", '{"order_id": "<id>"'), Call("pay_order", {"order_id": "<id>"}))
    assert codes(broken) == ["invalid_arguments", "unresolved_placeholder"]
    assert len(shop.did) == 1


def test_r41_one_call_alone(stage: Stage) -> None:
    """R-41: there is no other result to wait for, so the message says where a value comes from."""
    done = Shop(stage).run(PAY)
    assert codes(done) == ["unresolved_placeholder"]
    assert "by another call, whose result you wait for, or from the user" in done[0].message


def test_r41_warn_runs_it_and_says_so(stage: Stage) -> None:
    """API: "warn" runs the call; the model is told in the batch's notice, observers by an event."""
    shop = Shop(stage, placeholder_guard="warn")
    done = shop.run(FIND, PAY, Call("pay_order", {"order_id": "A-1"}))
    assert done.ok
    assert shop.did[1] == ("pay_order", "<from previous call>")
    assert (
        done.notice == "Call 1 (pay_order) was run although argument 'order_id' holds a placeholder instead of a value."
    )
    (event,) = shop.told("warned")
    assert (event.index, event.tool, event.code) == (1, "pay_order", "unresolved_placeholder")
    assert event.reason == "argument 'order_id' holds a placeholder"
    many = shop.run(*[PAY] * 9)
    assert many.ok
    assert many.notice.count("was run although") == 5  # told are some
    assert len(shop.told("warned")) == 10
    wrong = shop.run(Call("pay_order", {"order_id": "A-1", "amount": "<total>"}))
    assert codes(wrong) == ["invalid_arguments"]  # it cannot be run


def test_r41_warn_beside_another_notice(stage: Stage) -> None:
    """A notice about a cut batch is kept, and one that nobody observes is told all the same."""
    tower = stage.tower(placeholder_guard="warn", max_calls_per_batch=1)
    tower.add_tool(lambda order_id: order_id, name="pay", independent=True)
    done = stage.run(tower.execute([Call("pay", {"order_id": "<id>"}), Call("pay", {"order_id": "1"})]))
    assert done.notice is not None
    assert done.notice.startswith("Ran 1 of 2 calls")
    assert done.notice.endswith(
        "Call 0 (pay) was run although argument 'order_id' holds a placeholder instead of a value."
    )


def test_r41_off_looks_at_nothing(stage: Stage) -> None:
    """API: "off" hands every value on."""
    shop = Shop(stage, placeholder_guard="off")
    assert shop.run(FIND, PAY).ok
    assert shop.tower._core.tools["pay_order"].guard is None
    assert shop.told("warned") == []


@pytest.mark.parametrize("mode", ["refuse", "warn"])
def test_r39_results_in_a_plan_are_no_placeholders(mode: Any, stage: Stage) -> None:
    """R-39, R-41: what references come to is never taken for a placeholder, nor is a text that stands in a plan."""
    tower = stage.tower(placeholder_guard=mode)
    tower.add_tool(lambda: "<from previous call>", name="find", independent=True)
    tower.add_tool(lambda order_id: order_id, name="pay", independent=True)

    async def main() -> Any:
        async with tower.run() as run:
            calls = [
                Call("find", {}, "a"),
                Call("pay", {"order_id": {"$ref": "a"}}, "b"),
                Call("pay", {"order_id": "<id>"}, "c"),
            ]
            return await run.execute(calls, plan=True)

    done = stage.run(main())
    assert [one.value for one in done] == ["<from previous call>", "<from previous call>", "<id>"]
    assert done.notice is None


def test_r41_calls_of_code_have_results_in_them(stage: Stage) -> None:
    """FIELD 13: a call with a programmatic caller comes from code that waits for results."""
    shop = Shop(stage)
    by_code = Call("pay_order", PAY.arguments, "c2", caller="program:p1")
    wrong = Call("pay_order", {"order_id": "A-1", "amount": "<total>"}, "c3", caller="program:p1")
    assert codes(shop.run(FIND, by_code, PAY, wrong)) == [None, None, "unresolved_placeholder", "invalid_arguments"]


def test_r41_a_providers_caller_says_who_wrote_it(stage: Stage) -> None:
    """FIELD 13: the same block, of the model itself and of code that it wrote."""
    shop = Shop(stage)
    block = {"type": "tool_use", "name": "pay_order", "input": PAY.arguments}
    by_code = {"type": "code_execution_20260120", "tool_id": "srvtoolu_1"}
    blocks = [
        {**block, "id": "toolu_1"},
        {**block, "id": "toolu_2", "caller": {"type": "direct"}},
        {**block, "id": "toolu_3", "caller": by_code},
    ]
    done = stage.run(shop.tower.execute({"role": "assistant", "content": blocks}))
    assert codes(done) == ["unresolved_placeholder", "unresolved_placeholder", None]


def test_r41_nested_calls_are_looked_at_too(stage: Stage) -> None:
    """G2: a handler may hand on what a model of its own has written."""
    shop = Shop(stage)

    @shop.tower.tool(independent=True)
    async def agent(ctx: Context) -> list[str | None]:
        return codes(await ctx.execute([FIND, PAY]))

    assert shop.run(Call("agent", {}))[0].value == [None, "unresolved_placeholder"]


def test_r41_needs_without_a_plan(stage: Stage) -> None:
    """R-41: a declared order hands no results on, so a placeholder is one."""
    shop = Shop(stage)
    done = shop.run(
        FIND, Call("pay_order", PAY.arguments, "c2", ["c1"]), Call("pay_order", {"order_id": "A"}, "c3", ["c2"])
    )
    assert codes(done) == [None, "unresolved_placeholder", "dependency_failed"]


def test_r41_s13_observe_mode_refuses_it_too(stage: Stage) -> None:
    """S13: observe mode relaxes capacity and nothing else."""
    shop = Shop(stage, mode="observe")
    assert codes(shop.run(FIND, PAY)) == [None, "unresolved_placeholder"]


def test_r41_free_text_of_tools(stage: Stage, tmp_path: Path) -> None:
    """API: at the tool, by pattern, and in a file; also while the tower lives."""
    file = tmp_path / "towerman.toml"
    file.write_text('[tools."save_*"]\nfree_text = ["order_id"]\n')
    tower = stage.tower(config=file)

    def tool(order_id: str) -> str:
        return order_id

    for name, options in {"save_a": {}, "pay": {}, "note": {"free_text": True}, "mail": {}}.items():
        tower.add_tool(tool, name=name, independent=True, **options)
    call = {"order_id": "<from previous call>"}

    def refused() -> list[str]:
        done = stage.run(tower.execute([Call(name, call) for name in tower.tools]))
        return [one.tool for one in done if one.code == "unresolved_placeholder"]

    assert refused() == ["pay", "mail"]
    tower.policy("mail", free_text="order_id")
    assert refused() == ["pay"]
    changes = tower.configure(tools={"note": {"timeout": 5}}, placeholder_guard="off")
    assert sorted(one.name for one in changes) == ["placeholder_guard", "tools.note.timeout"]
    assert refused() == []
    kept = tower._core.tools["pay"].guard
    assert kept is None
    tower.configure(placeholder_guard="warn")
    assert refused() == []
    guard = tower._core.tools["pay"].guard
    assert guard is not None
    tower.configure(placeholder_guard="refuse")
    assert refused() == ["pay"]
    assert tower._core.tools["pay"].guard is guard  # made once
    tower.configure(tools={"pay": {"free_text": ["order_id"]}})
    assert refused() == []


def test_r41_a_name_that_is_no_argument(stage: Stage) -> None:
    """DESIGN style 7: a mistake in `free_text` is told when the tool is declared, whatever the guard does."""

    def tool(order_id: str, **more: str) -> str:
        return order_id

    def strict(order_id: str) -> str:
        return order_id

    for mode in ("refuse", "off"):
        tower = stage.tower(placeholder_guard=mode)
        with pytest.raises(PolicyError) as wrong:
            tower.add_tool(strict, free_text=["order"])
        assert str(wrong.value) == "tool 'strict': free_text: no argument 'order'; did you mean 'order_id'?"
        tower.add_tool(tool, free_text=["order", "order_id.x"])
        tower.add_tool(strict, free_text=["order_id"])


def test_r41_what_a_worker_runs_was_looked_through(tmp_path: Path) -> None:
    """R-41: a call goes into the queue looked through; its worker takes its arguments as they are, since they may be
    results of a plan.
    """
    tower = Tower(journal=tmp_path / "j.db")
    did: list[str] = []

    @tower.tool(writes="order:{order_id}", idempotent=True)
    async def pay(order_id: str) -> str:
        did.append(order_id)
        return "paid"

    async def main() -> None:
        async with tower.run() as run:
            done = await run.submit([Call("pay", {"order_id": "<from previous call>"}), Call("pay", {"order_id": "A"})])
            assert codes(done) == ["unresolved_placeholder", "deferred"]
            tower.configure(placeholder_guard="off")
            await run.submit([Call("pay", {"order_id": "<id>"})])
            tower.configure(placeholder_guard="refuse")
        await Worker(tower).run(once=True)
        await tower.aclose()

    asyncio.run(main())
    assert sorted(did) == ["<id>", "A"]


def test_r41_explain_says_what_would_be_refused(stage: Stage) -> None:
    """API: `tower.explain` looks a batch over by the same rules."""
    shop = Shop(stage)
    explained = shop.tower.explain([FIND, PAY, Call("pay_order", PAY.arguments, caller="program:p")])
    assert [(one.index, one.code) for one in explained.refused] == [(1, "unresolved_placeholder")]
    assert explained.notice is None
    assert shop.did == []
    warned = Shop(stage, placeholder_guard="warn").tower.explain([FIND, *[PAY] * 7])
    assert warned.notice is not None
    assert warned.notice.count("was run although") == 5
    assert warned.refused == ()
    plan = shop.tower.explain(plan={"plan": [{"id": "a", "tool": "pay_order", "arguments": {"order_id": "<id>"}}]})
    assert plan.refused == ()


def test_g8_neither_value_nor_name_of_the_models_own_is_told(stage: Stage) -> None:
    """G8: of arguments with a secret everywhere, nothing of it is in messages, notices or events."""
    for mode in ("refuse", "warn"):
        events: list[Event] = []
        tower = stage.tower(placeholder_guard=mode, observers=[events.append])
        tower.add_tool(lambda order_id, **more: "done", name="pay", independent=True)
        calls = [
            Call("pay", {"order_id": f"<id of {CANARY}>"}),
            Call("pay", {"order_id": f"<{CANARY} from previous call>", CANARY: f"<result of {CANARY}>"}),
            Call("pay", {"order_id": {CANARY: f"{{{{{CANARY}_id}}}}"}}),
        ]
        done = stage.run(tower.execute(calls))
        assert tower.flush(30)
        assert done[0].ok == done[1].ok == (mode == "warn")
        told = [*(one.message for one in done), str(done.notice), *map(repr, events), repr(vars(tower).keys())]
        told += [repr(one) for one in tower._core.tools.values()]
        assert not [line for line in told if CANARY in line]


def test_a_batch_without_a_model(stage: Stage) -> None:
    """A `Batch` made by hand is looked through like any other."""
    shop = Shop(stage)
    done = shop.stage.run(shop.tower.execute(Batch((FIND, PAY))))
    assert codes(done) == [None, "unresolved_placeholder"]
