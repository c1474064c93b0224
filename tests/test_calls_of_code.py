"""What may stand beside a provider's call: ids of calls that it needs, and the code that made it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from kit import Stage, codes, on_stage

from towerman import BatchResult, Call, Tower
from towerman.adapters import decode, turn
from towerman.calls import Batch, Result, make_result
from towerman.errors import InputError

stage = pytest.fixture(on_stage)


def openai_call(own: str, **beside: Any) -> dict[str, Any]:
    function = {"name": "step", "arguments": json.dumps({"name": own})}
    return {"id": own, "type": "function", "function": function, **beside}


def anthropic_call(own: str, **beside: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": own, "name": "step", "input": {"name": own}, **beside}


def openai_message(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def anthropic_message(*calls: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": list(calls), "stop_reason": "tool_use"}


def answers_to(batch: Batch) -> list[Result]:
    return [make_result(index, call.id, call.tool, "ok", None, "done", "x") for index, call in enumerate(batch.calls)]


FORMS = [
    pytest.param(openai_call, openai_message, id="openai"),
    pytest.param(anthropic_call, anthropic_message, id="anthropic"),
]


def tower_of(stage: Stage, failing: str = "") -> tuple[Tower, list[tuple[str, str]]]:
    """A tower with one tool that takes a second, and the story of its calls."""
    tower = stage.tower()
    story: list[tuple[str, str]] = []

    @tower.tool(independent=True)
    async def step(name: str) -> str:
        story.append(("start", name))
        await asyncio.sleep(1)
        story.append(("end", name))
        if name == failing:
            raise ValueError
        return name

    return tower, story


def run(stage: Stage, tower: Tower, given: Any, **options: Any) -> BatchResult:
    async def main() -> BatchResult:
        return await tower.execute(given, **options)

    return stage.run(main())


@pytest.mark.parametrize("word", ["needs", "depends_on"])
@pytest.mark.parametrize(("call", "message"), FORMS)
def test_p20_a_diamond_beside_a_providers_calls(call: Any, message: Any, word: str, stage: Stage) -> None:
    """P-20, R-29, R-40: a; b and c after a; d after both: b and c overlap, results come in emitted order."""
    tower, story = tower_of(stage)
    given = message(call("a"), call("b", **{word: ["a"]}), call("c", **{word: "a"}), call("d", **{word: ("b", "c")}))
    batch = run(stage, tower, given)
    assert [result.call_id for result in batch] == ["a", "b", "c", "d"]
    assert batch.ok
    assert story[:2] == [("start", "a"), ("end", "a")]
    assert {name for _, name in story[2:4]} == {"b", "c"}
    assert [what for what, _ in story[2:6]] == ["start", "start", "end", "end"]
    assert story[6:] == [("start", "d"), ("end", "d")]
    sent = json.dumps(batch.turn())
    assert word not in sent, "no provider knows it"
    assert json.loads(sent)[0]["role"] == "assistant"


@pytest.mark.parametrize(("call", "message"), FORMS)
def test_p20_a_failed_need_skips_what_hangs_on_it(call: Any, message: Any, stage: Stage) -> None:
    """P-20, R-38: a fails: b, c and d are skipped and never start."""
    tower, story = tower_of(stage, failing="a")
    given = message(call("a"), call("b", needs=["a"]), call("c", needs=["a"]), call("d", needs=["b", "c"]))
    batch = run(stage, tower, given)
    assert codes(batch) == ["handler_error", *["dependency_failed"] * 3]
    assert {name for _, name in story} == {"a"}


@pytest.mark.parametrize(
    ("needs", "code"),
    [
        (["zzz"], "unknown_dependency"),
        (["a"], "dependency_cycle"),
        (["b"], "dependency_cycle"),
        ([None], "unknown_dependency"),
        ({"a": 1}, "unknown_dependency"),
        (17, "unknown_dependency"),
    ],
)
@pytest.mark.parametrize(("call", "message"), FORMS)
def test_p20_needs_that_cannot_be_followed_run_nothing(
    call: Any, message: Any, needs: Any, code: str, stage: Stage
) -> None:
    """G5, P-20, R-30 to R-32: an unknown id, a circle, or what is no id at all refuses the whole response."""
    tower, story = tower_of(stage)
    batch = run(stage, tower, message(call("a", depends_on=needs), call("b", needs=["a"])))
    assert codes(batch) == [code, code]
    assert not story


@pytest.mark.parametrize(
    ("caller", "read"),
    [
        ({"type": "code_execution_20260120", "tool_id": "srvtoolu_1"}, "code_execution_20260120:srvtoolu_1"),
        ({"type": "code_execution_20250825", "tool_id": "srvtoolu_2"}, "code_execution_20250825:srvtoolu_2"),
        ({"type": "program", "caller_id": "call_9"}, "program:call_9"),
        ({"type": "program"}, "program"),
        ({"type": "direct"}, ""),
        ({"tool_id": "x"}, ""),
        ("program", ""),
        (None, ""),
        (SimpleNamespace(type="program", caller_id="call_9"), "program:call_9"),
    ],
)
@pytest.mark.parametrize(("call", "message"), FORMS)
def test_the_code_that_made_a_call_is_known_and_goes_back(call: Any, message: Any, caller: Any, read: str) -> None:
    batch = decode(message(call("a", caller=caller), call("b")))
    assert [one.caller for one in batch.calls] == [read, ""]
    assert decode(batch) == batch
    results = answers_to(batch)
    back, *answers = turn(batch, results)
    items: Any = back.get("tool_calls") or back["content"]
    assert items[0].get("caller") == (vars(caller) if isinstance(caller, SimpleNamespace) else caller)
    assert "caller" not in items[1]
    for answer in answers:
        content: Any = answer["content"]
        assert isinstance(content, str) or {block["type"] for block in content} == {"tool_result"}, "results only"


def test_a_custom_call_has_them_too() -> None:
    item = {"id": "a", "type": "custom", "custom": {"name": "step", "input": "x"}}
    beside = {"needs": ["b"], "caller": {"type": "program", "caller_id": "p"}}
    batch = decode(openai_message({**item, **beside}, {**item, "id": "b"}))
    assert batch.calls[0] == Call("step", {"input": "x"}, "a", ("b",), caller="program:p")
    assert batch.calls[1] == Call("step", {"input": "x"}, "b")


def test_needs_inside_the_function_count_as_well() -> None:
    function = {"name": "step", "arguments": "{}", "depends_on": ["b"]}
    batch = decode(openai_message({"id": "a", "type": "function", "function": function}, openai_call("b")))
    assert batch.calls[0].needs == ("b",)
    results = answers_to(batch)
    assert "depends_on" not in json.dumps(turn(batch, results))


def test_calls_of_code_are_admitted_like_all_others(stage: Stage) -> None:
    """G2: the limits of the tower hold for calls that code made."""
    tower = stage.tower(max_concurrency=1)
    at_work: list[int] = []

    @tower.tool(independent=True)
    async def step(name: str) -> str:
        at_work.append(1)
        assert len(at_work) == 1
        await asyncio.sleep(1)
        at_work.pop()
        return name

    caller = {"type": "code_execution_20260120", "tool_id": "srvtoolu_1"}
    batch = run(stage, tower, anthropic_message(*[anthropic_call(str(n), caller=caller) for n in range(3)]))
    assert batch.ok
    assert sum(result.ran for result in batch) == pytest.approx(3)


def test_what_code_has_put_into_a_call_is_no_reference(stage: Stage) -> None:
    """R-39: the model's code waits for values and writes them itself, whatever they look like; the model's own calls
    may refer to others."""
    tower, _ = tower_of(stage)
    calls = [Call("step", {"name": "${a} {$}"}, "a", caller="program:1"), Call("step", {"name": "so: ${a}"}, "b")]
    batch = run(stage, tower, calls, plan=True)
    assert [result.value for result in batch] == ["${a} {$}", "so: ${a} {$}"]


def test_a_caller_in_the_native_form() -> None:
    batch = decode([{"tool": "step", "arguments": {}, "caller": "program:1"}, Call("step", {}, caller="p")])
    assert [call.caller for call in batch.calls] == ["program:1", "p"]
    results = answers_to(batch)
    said: Any = turn(batch, results)[0]
    assert [call["caller"] for call in said["calls"]] == ["program:1", "p"]
    assert decode(said).calls[0].caller == "program:1"
    for wrong in (3, ["p"]):
        with pytest.raises(InputError, match=r"\[0\]\.caller: text is wanted"):
            decode([{"tool": "step", "arguments": {}, "caller": wrong}])
    hand_made = Batch((Call("step", {}, caller=3),))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"\[0\]\.caller: text is wanted"):
        decode(hand_made)


def test_a_caller_outlives_a_wait_for_a_person(stage: Stage) -> None:
    """What is written down of a batch that waits is what is gone on with."""
    from towerman.approvals import read_state

    tower = stage.tower()

    @tower.tool(independent=True, requires_approval=True)
    async def pay(amount: int) -> int:
        return amount

    batch = run(stage, tower, [Call("pay", {"amount": 1}, "a", caller="program:1")])
    assert len(batch.pending) == 1
    assert read_state(batch.state(), None).batch.calls[0].caller == "program:1"
