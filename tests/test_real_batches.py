"""Batches that models and people really wrote, from the response to the provider's messages.

Each row's calls go in as a provider's message and come back as the messages that the provider takes: one result for
each call, in emitted order, paired with the call that it answers, whatever was first to end. The handlers are
scripted: they say what they were asked, and the first call is always the last to end.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from forms import FORMS, Wanted, openai_message, paired, schema_of
from kit import Stage, on_stage, sound

from towerman import Call, Context, Tower
from towerman.bounds import EMPTY

stage = pytest.fixture(on_stage)

Records = Callable[[str], list[dict[str, Any]]]

BFCL = ("bfcl_parallel", "bfcl_parallel_multiple", "bfcl_live_parallel")

# --- what the rows say ------------------------------------------------------------------------------------------------


def first_accepted(options: Mapping[str, Sequence[Any]], required: Sequence[str] = ()) -> dict[str, Any]:
    """The first accepted value of each argument; one that may be "" may be left out, and is."""
    found = {}
    for name, accepted in options.items():
        value = accepted[0]
        if value == "" and name not in required:
            continue
        found[name] = first_accepted(value) if isinstance(value, dict) else value
    return found


def wanted_calls(row: Mapping[str, Any]) -> Wanted:
    """(tool, arguments) of each call that answers the row's request."""
    required = {function["name"]: function["parameters"].get("required", []) for function in row["function"]}
    return [
        (name, first_accepted(options, required[name]))
        for call in row["ground_truth"]
        for name, options in call.items()
    ]


# --- the scripted side ------------------------------------------------------------------------------------------------


class Echo:
    """Tools that say what they were asked; each call that begins later ends earlier."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.ended: list[int] = []

    def forget(self) -> None:
        """Before another batch."""
        self.asked.clear()
        self.ended.clear()

    def tool(self, name: str) -> Callable[..., Any]:
        """The handler of one tool."""

        async def handler(**arguments: Any) -> dict[str, Any]:
            place = len(self.asked)
            self.asked.append((name, arguments))
            with self.stage.on(f"{name} {place}"):
                await asyncio.sleep(10.0 - 0.1 * place)
            self.ended.append(place)
            return {"tool": name, "arguments": arguments}

        return handler


def ids_for(count: int) -> Iterator[tuple[str, list[str]]]:
    """Ids as providers send them: right, missing, all the same, some the same."""
    yield "right", [f"call_{place}" for place in range(count)]
    yield "missing", [""] * count
    yield "the same", ["1"] * count
    yield "some the same", [f"call_{place // 2}" for place in range(count)]


def declare(stage: Stage, row: Mapping[str, Any]) -> tuple[Tower, Echo]:
    """A tower with the row's functions as tools."""
    tower = stage.tower(max_concurrency=8)
    echo = Echo(stage)
    for function in row["function"]:
        tower.add_tool(
            echo.tool(function["name"]),
            name=function["name"],
            description=function["description"],
            schema=schema_of(function["parameters"]),
            independent=True,
            read_only=True,
        )
    return tower, echo


# --- batches of independent calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BFCL)
def test_r104_r105_r106_r114_published_batches_are_answered_in_order(
    name: str, form: str, shared_data: Records, stage: Stage
) -> None:
    """Each call of a real batch has one result, in emitted order, which answers that call and no other (G1, R-104 to
    R-106, R-114), although the first call is the last to end; and each turn pairs by the provider's own rules.
    """
    seen = 0
    for row in shared_data(name):
        calls = wanted_calls(row)
        tower, echo = declare(stage, row)
        for told, ids in ids_for(len(calls)):
            where = f"{row['id']} with ids {told}"
            echo.forget()
            batch = stage.run(tower.execute(FORMS[form](calls, ids)))
            assert echo.ended == list(reversed(range(len(calls)))), f"{where}: the handlers did not end in reverse"
            sound(batch, calls)
            assert batch.ok, f"{where}: {[(result.code, result.message) for result in batch]}"
            assert [result.tool for result in batch] == [tool for tool, _ in calls], where
            for (tool, arguments, content), (wanted, given) in zip(paired(batch.turn(), form), calls, strict=True):
                # Providers take no "." in a name, so what they are sent back has none.
                assert tool == (wanted if form == "towerman" else wanted.replace(".", "_")), where
                assert arguments == given, where
                answer = json.loads(content)
                assert answer["tool"] == wanted, where
                # What was left out may have been filled in from the schema; what was given is as it was given.
                assert {key: answer["arguments"][key] for key in given} == given, where
            seen += 1
    assert seen >= 80


@pytest.mark.parametrize("name", BFCL)
def test_r107_r108_a_spoiled_call_is_answered_in_its_place(name: str, shared_data: Records, stage: Stage) -> None:
    """A real batch of which one call was spoiled (its text cut off, a required argument left out, its name misspelled)
    loses that call only: the others answer, and the spoiled one has its error in its own place (R-107, R-108, P-73,
    P-74).
    """

    def cut(call: dict[str, Any]) -> str | None:
        call["arguments"] = call["arguments"][:-1]
        return "invalid_arguments"

    def without(call: dict[str, Any]) -> str | None:
        arguments = json.loads(call["arguments"])
        needed = next((one for one in required[call["name"]] if one in arguments), None)
        if needed is None:
            return None
        del arguments[needed]
        call["arguments"] = json.dumps(arguments)
        return "invalid_arguments"

    def misspelled(call: dict[str, Any]) -> str | None:
        call["name"] += "x"
        return "unknown_tool"

    spoiled = Counter[str]()
    for row in shared_data(name):
        calls = wanted_calls(row)
        required = {function["name"]: function["parameters"].get("required", []) for function in row["function"]}
        tower, echo = declare(stage, row)
        for spoil in (cut, without, misspelled):
            message = openai_message(calls, [f"c{place}" for place in range(len(calls))])
            place = len(row["id"]) % len(calls)
            code = spoil(message["tool_calls"][place]["function"])
            if code is None:
                continue
            echo.forget()
            batch = stage.run(tower.execute(message))
            sound(batch, calls)
            assert [result.code for result in batch] == [code if i == place else None for i in range(len(calls))]
            assert len(echo.asked) == len(calls) - 1, "a spoiled call was started"
            assert [result["tool_call_id"] for result in batch.messages()] == [f"c{i}" for i in range(len(calls))]
            spoiled[code] += 1
    assert spoiled["invalid_arguments"] >= 20, "too little was spoiled to show anything"
    assert spoiled["unknown_tool"] >= 20, "too little was spoiled to show anything"


@pytest.mark.parametrize("form", FORMS)
def test_r104_r114_recorded_api_answers_come_back_with_their_calls(
    form: str, shared_data: Records, stage: Stage
) -> None:
    """Recorded answers of real interfaces (XML, JSON, pages of text) reach the model as they were, each with the call
    that it answers, in every provider's form (R-104, R-105, R-114).

    The data set names its tools in prose, so they are declared by a short name.
    """
    seen = 0
    for row in shared_data("trajectbench_parallel"):
        calls: Wanted = []
        outputs: list[str] = []
        for number, step in enumerate(row["tool list"]):
            given = [*step["required parameters"], *step.get("optional parameters", [])]
            short = re.sub(r"[^A-Za-z0-9_-]+", "_", step["tool name"])[:48]
            calls.append((f"{short}-{number}", {one["name"]: one["value"] for one in given}))
            output = step["executed_output"]
            outputs.append(output if isinstance(output, str) else json.dumps(output))
        tower = stage.tower(max_concurrency=8)
        started: list[str] = []

        def tool(name: str, output: str, started: list[str] = started) -> Callable[..., Any]:
            async def handler(**arguments: Any) -> str:
                started.append(name)
                await asyncio.sleep(10.0 - len(started))
                return output

            return handler

        for (name, arguments), output in zip(calls, outputs, strict=True):
            schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
            tower.add_tool(tool(name, output), name=name, schema=schema, independent=True)
        batch = stage.run(tower.execute(FORMS[form](calls, [f"call_{i}" for i in range(len(calls))])))
        sound(batch, calls)
        assert batch.ok, f"{row['query']}: {[(result.code, result.message) for result in batch]}"
        assert started == [name for name, _ in calls]
        answers = paired(batch.turn(), form)
        told = [output if output.strip() else EMPTY for output in outputs]
        assert answers == [(name, given, answer) for (name, given), answer in zip(calls, told, strict=True)]
        seen += len(calls)
    assert seen >= 75


# --- whole conversations, one call a turn -----------------------------------------------------------------------------


def test_r02_r42_recorded_conversations_pair_at_every_turn(shared_data: Records, stage: Stage) -> None:
    """Recorded conversations with one call a turn, replayed: each assistant message comes back untouched with its one
    result, so the rebuilt conversation is the recorded one (R-02, R-104, R-105; R-42: no delay is added).
    """
    turns = 0
    for record in shared_data("taubench_airline_gpt4o"):
        tower = stage.tower(max_concurrency=8)
        said: dict[str, str] = {}
        names = {call["function"]["name"] for message in record["traj"] for call in message.get("tool_calls") or ()}

        def tool(name: str, said: dict[str, str] = said) -> Callable[..., Any]:
            async def handler(**arguments: Any) -> str:
                return said[name]

            return handler

        for name in sorted(names):
            tower.add_tool(tool(name), name=name, schema={"type": "object"})

        async def main(record: dict[str, Any] = record, said: dict[str, str] = said) -> list[dict[str, Any]]:
            rebuilt: list[dict[str, Any]] = []
            async with tower.run() as run:  # noqa: B023 - awaited before the next record comes
                began = stage.clock.now()
                for place, message in enumerate(record["traj"]):
                    if message["role"] == "tool":
                        continue
                    if not message.get("tool_calls"):
                        rebuilt.append(message)
                        continue
                    for further, call in enumerate(message["tool_calls"], 1):
                        said[call["function"]["name"]] = record["traj"][place + further]["content"]
                    batch = await run.execute(message)
                    sound(batch, message["tool_calls"])
                    assert batch.ok
                    rebuilt += batch.turn()
                assert stage.clock.now() == began, "a call that met nobody had to wait"
            return rebuilt

        rebuilt = stage.run(main())
        assert len(rebuilt) == len(record["traj"])
        for ours, theirs in zip(rebuilt, record["traj"], strict=True):
            assert ours["role"] == theirs["role"]
            if theirs["role"] == "tool":
                turns += 1
                assert ours["tool_call_id"] == theirs["tool_call_id"]
                assert ours["content"] == (theirs["content"] if theirs["content"].strip() else EMPTY)
            else:
                assert ours.get("content") == theirs.get("content")
                assert ours.get("tool_calls") == theirs.get("tool_calls")
    assert turns >= 50


@pytest.mark.parametrize("form", FORMS)
def test_r02_r104_recorded_conversations_are_answered_in_every_form(
    form: str, shared_data: Records, stage: Stage
) -> None:
    """The calls of those conversations in every provider's form, and all calls of one conversation as one batch too:
    one result a call, in emitted order, with what was recorded for that call (G1, R-02, R-104 to R-106).
    """
    turns = together = 0
    for record in shared_data("taubench_airline_gpt4o"):
        calls: Wanted = []
        said: list[str] = []
        for place, message in enumerate(record["traj"]):
            for further, call in enumerate(message.get("tool_calls") or (), 1):
                calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
                said.append(record["traj"][place + further]["content"])
        tower = stage.tower(max_calls_per_batch=100)

        def tool(said: list[str] = said) -> Callable[..., Any]:
            async def handler(ctx: Context[None], **arguments: Any) -> str:
                place = int(ctx.call_id.removeprefix("call_"))
                await asyncio.sleep(len(said) - place)
                return said[place]

            return handler

        for name in sorted({name for name, _ in calls}):
            # A booking comes after the look at the seats; looks come side by side.
            reads = name.startswith(("get_", "search_", "list_", "calculate", "think"))
            tower.add_tool(tool(), name=name, schema={"type": "object"}, **{"reads" if reads else "writes": "airline"})

        async def main(calls: Wanted = calls, said: list[str] = said, tower: Tower = tower) -> None:
            nonlocal turns, together
            told = [answer if answer.strip() else EMPTY for answer in said]
            async with tower.run() as run:
                for place, call in enumerate(calls):
                    batch = await run.execute(FORMS[form]([call], [f"call_{place}"]))
                    sound(batch, [call])
                    assert paired(batch.turn(), form) == [(*call, told[place])]
                    turns += 1
                batch = await run.execute(FORMS[form](calls, [f"call_{place}" for place in range(len(calls))]))
                sound(batch, calls)
                assert batch.ok
                assert paired(batch.turn(), form) == [(*call, one) for call, one in zip(calls, told, strict=True)]
                together += len(calls)

        if calls:
            stage.run(main())
    assert turns == together >= 50


# --- batches in which order matters -----------------------------------------------------------------------------------


def test_r24_stateful_turns_run_alone_and_in_emitted_order(shared_data: Records, stage: Stage) -> None:
    """Several calls on one state in one turn (change folder, then write): their tools declare nothing, so they run
    alone and in emitted order (R-24, G4), however long each of them takes.
    """
    turns = 0
    for row in shared_data("bfcl_multi_turn_base"):
        for turn in row["ground_truth"]:
            if len(turn) < 2:
                continue
            calls = []
            for text in turn:
                node = ast.parse(text, mode="eval").body
                assert isinstance(node, ast.Call)
                name = ast.unparse(node.func)
                given = {f"arg{place}": ast.literal_eval(value) for place, value in enumerate(node.args)}
                given |= {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
                calls.append(Call(name, given, id=f"c{len(calls)}"))
            tower = stage.tower(max_concurrency=8)
            order: list[tuple[str, dict[str, Any]]] = []
            busy = Counter[str]()

            def tool(
                name: str, order: list[tuple[str, dict[str, Any]]] = order, busy: Counter[str] = busy
            ) -> Callable[..., Any]:
                async def handler(**arguments: Any) -> str:
                    busy["now"] += 1
                    busy["most"] = max(busy["most"], busy["now"])
                    order.append((name, arguments))
                    await asyncio.sleep(10.0 - len(order))
                    busy["now"] -= 1
                    return name

                return handler

            for name in sorted({call.tool for call in calls}):
                tower.add_tool(tool(name), name=name, schema={"type": "object"})
            batch = stage.run(tower.execute(calls))
            sound(batch, calls)
            assert batch.ok
            assert busy["most"] == 1, f"{row['id']}: two stateful calls overlapped"
            assert order == [(call.tool, call.arguments) for call in calls], row["id"]
            turns += 1
    assert turns >= 50
