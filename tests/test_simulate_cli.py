"""Workloads made of plans and traces, and `towerman simulate` that takes all three."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kit import Stage, on_stage
from schedules import judge

from towerman import Call, Event, InputError, PolicyError, Tower
from towerman.cli import main
from towerman.observers import JsonlObserver, read_events
from towerman.simulate import simulate, workload_of_plan, workload_of_trace

stage = pytest.fixture(on_stage)

WORKLOAD = {
    "max_concurrency": 32,
    "pools": {"crm": 2},
    "calls": [
        *({"id": name, "tool": "look", "duration": 0.8, "pools": {"crm": 1}} for name in "abcd"),
        {"id": "e", "tool": "tell", "duration": 2, "needs": ["a", "b", "c", "d"]},
    ],
}

PLAN = {
    "plan": [
        {"id": "a", "tool": "geocode", "arguments": {"city": "S3CRET"}},
        {"id": "b", "tool": "forecast", "arguments": {"at": {"$ref": "a#/position"}}},
        {"id": "c", "tool": "notify", "arguments": {"text": "sent"}, "needs": ["b"]},
    ]
}

TOOLS = """
from towerman import Tower

tower = Tower(pools={"crm": 1})


@tower.tool(pools=["crm"], reads="customer:{n}")
def look(n: int) -> int:
    return n


@tower.tool(writes="customer:{n}")
def rename(n: int) -> int:
    return n
"""


def spelled(path: Path, value: object) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["simulate", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


# ------------------------------------------------------------------ plans


def test_a_plan_is_a_workload_by_its_needs_and_references() -> None:
    """R-39: a reference is an edge like a need; lengths come by tool, the longest pattern that fits holds."""
    workload = workload_of_plan(PLAN, seconds={"*": 3, "geo*": 2, "geocode": 0.5})
    assert [(one.id, one.tool, one.duration, one.needs) for one in workload.calls] == [
        ("a", "geocode", 0.5, ()),
        ("b", "forecast", 3.0, ("a",)),
        ("c", "notify", 3.0, ("b",)),
    ]
    assert workload.notes == ()
    assert "S3CRET" not in repr(workload)
    assert simulate(workload).makespan == 6.5


def test_what_nobody_has_said_of_a_plan_is_noted() -> None:
    workload = workload_of_plan(PLAN, seconds={"geocode": 2})
    assert simulate(workload).makespan == 4
    assert workload.notes == ("Nobody has said how long forecast, notify takes: 1 second is assumed.",)


def test_a_batch_without_ids_is_simulated_too() -> None:
    calls = [Call("t", {}, "x"), Call("t", {}, "x"), Call("t", {}), Call("t", {}, "1")]
    workload = workload_of_plan(calls)
    assert [one.id for one in workload.calls] == ["0", "1'", "2", "1"]
    assert simulate(workload).makespan == 1


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ([{"id": "a", "tool": "t", "needs": ["b"]}, {"id": "b", "tool": "t", "needs": ["a"]}], "dependency_cycle"),
        ([{"id": "a", "tool": "t", "needs": ["z"]}], "unknown_dependency"),
        ([{"id": "a", "tool": "t"}, {"id": "a", "tool": "t"}], "duplicate_call_id"),
    ],
)
def test_g5_a_plan_that_cannot_be_followed_is_refused(plan: list[Any], code: str) -> None:
    """G5: nothing of it would run, and nothing of it is simulated."""
    with pytest.raises(InputError, match=code):
        workload_of_plan({"plan": plan})


def test_lengths_that_are_none_are_told() -> None:
    with pytest.raises(InputError, match=r"seconds.geocode: seconds from 0 to 1,000"):
        workload_of_plan(PLAN, seconds={"geocode": -1})
    with pytest.raises(InputError, match=r"seconds: no call is of a tool 'geocod'.*'geocode'"):
        workload_of_plan(PLAN, seconds={"geocod": 1})


def test_with_a_tower_conflicts_are_edges_and_what_it_refuses_is_left_out() -> None:
    """G4: a write waits for the read before it; an unknown tool would be refused."""
    tower = Tower(pools={"crm": 1}, max_wait=100.0)

    @tower.tool(pools=["crm"], reads="row:{n}")
    async def look(n: int) -> int:
        return n

    @tower.tool(writes="row:{n}")
    async def put(n: int) -> int:
        return n

    calls = [
        Call("look", {"n": 1}, "a"),
        Call("look", {"n": 2}, "b"),
        Call("put", {"n": 1}, "c"),
        Call("put", {"n": 9}, "d"),
        Call("nope", {}, "e"),
    ]
    workload = workload_of_plan(calls, tower, seconds={"look": 2, "put": 1})
    assert workload.notes == ("The tower would refuse 1 of 5 calls (1 unknown_tool); they are left out.",)
    report = simulate(workload, tower)
    assert report.starts == {"a": 0, "b": 2, "c": 2, "d": 0}


def test_what_a_tower_has_learned_is_how_long_calls_take(stage: Stage) -> None:
    """The mean of a tool's answers so far."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def look(seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def main() -> None:
        await tower.execute([Call("look", {"seconds": 2.0}), Call("look", {"seconds": 4.0})])

    stage.run(main())
    workload = workload_of_plan([Call("look", {"seconds": 0.0}, "x")], tower)
    assert [one.duration for one in workload.calls] == [pytest.approx(3.0)]
    assert workload.notes == ()


def test_a_plan_in_a_form_of_planners_is_simulated() -> None:
    """R-29: the form is found out, or named."""
    text = '1. search("a")\n2. search("b")\n3. compare($1, $2)\n4. join()\n'
    for form in (None, "llmcompiler"):
        report = simulate(workload_of_plan(text, seconds={"search": 2, "compare": 1}, format=form))
        assert sorted(report.starts.values()) == [0, 0, 2]
    with pytest.raises(PolicyError, match="unknown 'nope'"):
        workload_of_plan(text, format="nope")
    with pytest.raises(InputError):
        workload_of_plan("neither this nor that")


# ------------------------------------------------------------------ traces


def recorded(stage: Stage, path: Path, pools: int = 1) -> bytes:
    """Two batches of a run and one of another, recorded on virtual time."""
    observer = JsonlObserver(path)
    tower = stage.tower(pools={"crm": pools}, observers=[observer], max_wait=100.0)

    @tower.tool(pools=["crm"], reads="row:{n}")
    async def look(n: int, seconds: float = 2.0) -> int:
        await asyncio.sleep(seconds)
        return n

    @tower.tool(writes="row:{n}", retry=2, idempotent=True)
    async def put(n: int, seconds: float = 1.0) -> int:
        await asyncio.sleep(seconds)
        return n

    async def main() -> None:
        async with tower.run("one") as one, tower.run("two") as two:
            first = asyncio.ensure_future(
                one.execute(
                    [
                        Call("look", {"n": 1}, "a"),
                        Call("look", {"n": 2}, "b"),
                        Call("put", {"n": 1}, "c"),
                        Call("put", {"n": 7}, "d", needs=("c",)),
                        Call("nope", {}, "e"),
                    ]
                )
            )
            await asyncio.sleep(1.5)
            await two.execute([Call("look", {"n": 3}, "a")])
            await first
            await asyncio.sleep(10 - stage.clock.value)
            await one.execute([Call("put", {"n": 1}, "a")])

    stage.run(main())
    tower.flush()
    observer.close()
    return path.read_bytes()


def test_a_trace_is_a_workload_that_comes_to_what_was_recorded(stage: Stage, tmp_path: Path) -> None:
    """Arrivals, lengths, pools and who waited for whom; under the limits that held it comes to the same starts."""
    events, skipped = read_events(io.BytesIO(recorded(stage, tmp_path / "trace.jsonl")))
    assert not skipped
    workload = workload_of_trace(events)
    told = {one.id: (one.tool, one.duration, one.arrival, dict(one.pools), one.needs) for one in workload.calls}
    close = pytest.approx
    assert told == {
        "one/1/0": ("look", close(2.0), 0.0, {"crm": 1}, ()),
        "one/1/1": ("look", close(2.0), 0.0, {"crm": 1}, ()),
        "one/1/2": ("put", close(1.0), 0.0, {}, ("one/1/0",)),
        "one/1/3": ("put", close(1.0), 0.0, {}, ("one/1/2",)),
        "two/1/0": ("look", close(2.0), close(1.5), {"crm": 1}, ()),
        "one/2/0": ("put", close(1.0), close(10.0), {}, ()),
    }
    assert workload.notes == (
        "Batches come in when they came in, however soon the batch before is done.",
        "1 call did not start, and is left out.",
    )
    starts = {f"{event.run_id}/{event.batch}/{event.index}": event.time for event in events if event.kind == "started"}
    zero = events[0].time
    report = simulate(workload, tried={"pools.crm": 1})
    assert report.starts == pytest.approx({name: instant - zero for name, instant in starts.items()}, abs=1e-6)
    assert simulate(workload).makespan == close(11.0)
    assert simulate(workload, tried={"pools.crm": 3}).waits["tools"]["look"].total == 0


def test_attempts_shared_calls_cuts_and_a_clock_that_starts_anew_are_understood() -> None:
    """R-98: a retried call takes as long as its attempts together; one that another's run answered takes no time; a
    second process is placed by the calendar.
    """
    events = [
        Event(100.0, "batch_started", "r", 1, size=4, wall=1000.0),
        Event(100.0, "started", "r", 1, 0, tool="t", waited=0.0),
        Event(101.0, "retrying", "r", 1, 0, tool="t", code="handler_error", attempt=1, pause=1.0),
        Event(102.0, "started", "r", 1, 0, tool="t", waited=0.0, attempt=2),
        Event(104.0, "finished", "r", 1, 0, tool="t", outcome="ok", ran=3.0, attempt=2),
        Event(100.0, "started", "r", 1, 1, tool="t", waited=0.0),
        Event(100.5, "finished", "r", 1, 1, tool="t", outcome="timed_out", code="handler_timeout"),
        Event(100.6, "finished", "r", 1, 2, tool="t", outcome="ok", shared_with=0),
        Event(100.0, "started", "r", 1, 3, tool="t", waited=0.0),
        Event(
            100.7, "finished", "r", 1, 3, tool="t", outcome="ok", waited_for=("resource row:{n}", "call 9", "call x")
        ),
        Event(104.0, "batch_finished", "r", 1),
        Event(3.0, "batch_started", "r", 1, size=1, wall=1050.0),
        Event(3.0, "started", "r", 1, 0, tool="t", waited=0.0),
        Event(4.0, "finished", "r", 1, 0, tool="t", outcome="ok"),
    ]
    workload = workload_of_trace(events)
    assert [(one.id, one.duration, one.arrival) for one in workload.calls] == [
        ("r/1/0", pytest.approx(3.0), 0.0),
        ("r/1/1", pytest.approx(0.5), 0.0),
        ("r/1/3", pytest.approx(0.7), 0.0),
        ("r/1 (2)/0", pytest.approx(1.0), 50.0),
    ]
    assert workload.notes[1:] == (
        "1 call did not start, and is left out.",
        "1 call was cut short, and takes as long as it ran.",
        "1 call was tried again, and takes as long as all attempts together.",
        "1 call waited for a resource of another batch: which one is not in a trace, so it does not here.",
    )
    assert workload_of_trace([]).calls == ()


# ------------------------------------------------------------------ the command


def test_a_workload_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = spelled(tmp_path / "work.json", WORKLOAD)
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [
        "5 calls, done after 3.6 s.",
        "No order could be done before 2.8 s (longest path); it took 28.6% longer.",
    ]
    code, out, _ = run(capsys, path, "--set", "pools.crm=4", "--json")
    told = json.loads(out)
    assert (code, told["makespan"]) == (0, pytest.approx(2.8))
    judge({**WORKLOAD, "pools": {"crm": 4}}, told["starts"])


def test_a_sweep_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = spelled(tmp_path / "work.json", WORKLOAD)
    code, out, err = run(capsys, path, "--sweep", "pools.crm=1..5")
    assert (code, err) == (0, "")
    rows = [line.split()[:3] for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows[:5] == [["1", "5.2", "s"], ["2", "3.6", "s"], ["3", "3.6", "s"], ["4", "2.8", "s"], ["5", "2.8", "s"]]
    assert len(rows) == 10, "a table and a chart"
    assert out.endswith("pools.crm = 4 comes within 5% of the best makespan.\n")
    for words, values in (("pools.crm=1..9:4", [1, 5, 9]), ("pools.crm=1,none", [1, None]), ("pools.crm=3", [3])):
        code, out, _ = run(capsys, path, "--sweep", words, "--json")
        assert [row["value"] for row in json.loads(out)["rows"]] == values


def test_a_plan_and_a_trace_on_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stage: Stage
) -> None:
    plan = spelled(tmp_path / "plan.json", PLAN)
    code, out, _ = run(capsys, plan, "--seconds", "geocode=2", "--seconds", "*=0.5", "--json")
    assert (code, json.loads(out)["starts"]) == (0, {"a": 0.0, "b": 2.0, "c": 2.5})
    recorded(stage, tmp_path / "trace.jsonl")
    code, out, _ = run(capsys, str(tmp_path / "trace.jsonl"), "--set", "pools.crm=1", "--json")
    assert (code, json.loads(out)["calls"]) == (0, 6)
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write('{"time": 1, "ki')
    code, out, err = run(capsys, str(tmp_path / "trace.jsonl"), "--json")
    assert (code, json.loads(out)["calls"]) == (1, 6)
    assert "passed over" in err


def test_limits_of_a_tower_and_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spelled(tmp_path / "simulated_tools.py", TOOLS)
    calls = spelled(
        tmp_path / "calls.json",
        [{"id": f"c{n}", "tool": tool, "arguments": {"n": n}} for n, tool in ((1, "look"), (2, "look"), (3, "rename"))],
    )
    code, out, _ = run(capsys, calls, "--tools", "simulated_tools:tower", "--json")
    assert (code, json.loads(out)["starts"]) == (0, {"c1": 0, "c2": 1, "c3": 0})
    file = spelled(tmp_path / "limits.toml", "max_concurrency = 1\n")
    code, out, _ = run(capsys, calls, "--config", file, "--json")
    assert sorted(json.loads(out)["starts"].values()) == [0, 1, 2]


def test_what_did_not_come_to_its_end_is_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wide = {"pools": {"crm": 1}, "calls": [{"tool": "t", "duration": 1, "pools": {"crm": 2}}]}
    code, out, _ = run(capsys, spelled(tmp_path / "wide.json", wide))
    assert code == 1
    assert "concurrency_limit: 0" in out


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("", [], "it is empty"),
        ("{", [], "no JSON"),
        ({"calls": [{"tool": "t", "duration": -1}]}, [], r"calls\[0\].duration"),
        ({"pools": {"x": 1}, "calls": 7}, [], "calls: a list"),
        ({"plan": [{"id": "a", "tool": "t", "needs": ["a"]}]}, [], "dependency_cycle"),
        ({"calls": [{"tool": "t", "arguments": {}}]}, ["--seconds", "u=1"], "no call is of a tool 'u'"),
        ({"calls": [{"tool": "t", "duration": 1}]}, ["--seconds", "t=1"], "says itself how long"),
        ({"calls": [{"tool": "t", "arguments": {}}]}, ["--seconds", "t"], "write it as TOOL=SECONDS"),
        (WORKLOAD, ["--set", "pools.crm"], "write it as KEY=VALUE"),
        (WORKLOAD, ["--set", "pools.crn=1"], "no pool 'crn'.*crm"),
        (WORKLOAD, ["--set", "pools.crm=1", "--set", "pools.crm=2"], "told twice"),
        (WORKLOAD, ["--set", "pools.crm=1", "--sweep", "pools.crm=1..2"], "--set has it already"),
        (WORKLOAD, ["--sweep", "pools.crm=2..1"], "goes upwards"),
        (WORKLOAD, ["--sweep", "pools.crm=a..b"], "FROM..TO"),
        (WORKLOAD, ["--sweep", "pools.crm=1..9999"], "at most 1,000"),
        (WORKLOAD, ["--sweep", "pools.crm=1..1000000000"], "1,000,000,000 values; at most 1,000"),
        (WORKLOAD, ["--sweep", f"pools.crm=1..{'9' * 18}"], "at most 1,000"),
        (WORKLOAD, ["--sweep", f"pools.crm=1..{'9' * 5000}"], "FROM..TO"),
        (WORKLOAD, ["--sweep", "pools.crm=1..\u0665"], "FROM..TO"),
        (WORKLOAD, ["--sweep", "pools.crm=" + "1," * 1000 + "1"], "1,001 values; at most 1,000"),
        (WORKLOAD, ["--sweep", "pools.crm=1..2", "--sweep", "max_concurrency=1..2"], "--sweep: told twice"),
        (WORKLOAD, ["--set", "rates.look=1/9999999d"], "rate of tool look and would start after 1,000,000,000,000"),
        (PLAN, ["--seconds", "notify=1e13"], "seconds.notify: seconds from 0 to 1,000,000,000,000"),
        (WORKLOAD, ["--config", "no-such.toml"], "--config: .*no-such.toml"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    content: object, words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, spelled(tmp_path / "work.json", content), *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err), err
