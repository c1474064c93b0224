"""The simulator: a workload comes to what a tower would make of it, and every schedule stands up to a judge that knows
nothing of Towerman (schedules.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import Stage, on_stage
from schedules import bound, judge, never_idle

import towerman.simulate
from towerman import Call, InputError, PolicyError, Pool, Rate, Tower
from towerman.simulate import Report, Workload, WorkloadCall, read_workload, simulate, sweep

stage = pytest.fixture(on_stage)

KEYS = ["row:1", "row:2", "row:1/a", "row:1/**", "doc:x"]


def call(name: str, duration: float = 1.0, tool: str = "look", **more: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, "duration": duration, **more}


def fair(workload: dict[str, Any], policy: object = None) -> Report:
    """Simulate; everything has come to its end, and the judge is content."""
    report = simulate(workload, policy)
    assert report.rejections == {}
    ends = judge(workload, report.starts)
    assert report.ends == ends
    assert report.makespan == max(ends.values(), default=0.0)
    assert bound(workload) <= report.lower_bound + 1e-9
    assert report.lower_bound <= report.makespan
    return report


# ------------------------------------------------------------------ random workloads


@st.composite
def workloads(draw: st.DrawFn, *, rates: bool) -> dict[str, Any]:
    pools = draw(st.dictionaries(st.sampled_from(["crm", "gpu", "disk"]), st.integers(1, 4), max_size=3))
    runs = draw(st.sampled_from([[""], ["one", "two"], ["one", "two", "three"]]))
    size = draw(st.integers(0, 14))
    calls: list[dict[str, Any]] = []
    lengths = st.integers(0, 8) | st.floats(0.01, 9.0, allow_nan=False)
    for number in range(size):
        one = call(f"c{number}", draw(lengths), draw(st.sampled_from(["look", "move", "send"])))
        one["run"] = draw(st.sampled_from(runs))
        one["arrival"] = draw(st.sampled_from([0, 0, 0, 1.5, 4]))
        if draw(st.booleans()):
            one["estimate"] = draw(lengths)
        held = {name: draw(st.integers(1, permits)) for name, permits in pools.items() if draw(st.booleans())}
        if held:
            one["pools"] = held
        for kind in ("reads", "writes"):
            if draw(st.integers(0, 3)) == 0:
                one[kind] = draw(st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
        mine = [other["id"] for other in calls if other["run"] == one["run"]]
        if mine:
            one["needs"] = draw(st.lists(st.sampled_from(mine), max_size=3, unique=True))
        calls.append(one)
    workload: dict[str, Any] = {
        "max_concurrency": draw(st.none() | st.integers(1, 5)),
        "pools": pools,
        "calls": calls,
    }
    if rates:
        given_rates = st.sampled_from(["1/s", "2/s", {"limit": 2, "per": 1.0, "burst": 3}])
        names = [*pools, *sorted({one["tool"] for one in calls})]
        if names:
            workload["rates"] = draw(st.dictionaries(st.sampled_from(names), given_rates, max_size=2))
    return workload


@given(workloads(rates=False))
def test_g3_g4_every_schedule_stands_up_to_the_judge(workload: dict[str, Any]) -> None:
    """G2, G3, G4: precedence, permits, conflicts; and whenever nothing is at work, nothing could be."""
    report = fair(workload)
    never_idle(workload, report.starts, report.ends)


@given(workloads(rates=True))
def test_s7_rates_hold_in_every_schedule(workload: dict[str, Any]) -> None:
    """S7: beside all that, no rate is passed."""
    fair(workload)


@given(workloads(rates=True), st.integers(1, 3))
def test_a_policy_holds_beside_the_workload(workload: dict[str, Any], most: int) -> None:
    """Limits of both hold: of one pool, the lower number."""
    policy = {"max_concurrency": most, "max_calls_per_batch": 100, "max_wait": 10_000, "run_concurrency": 100}
    report = fair(workload, policy)
    judge({**workload, "max_concurrency": most}, report.starts)


@given(workloads(rates=True))
def test_the_same_workload_comes_to_the_same(workload: dict[str, Any]) -> None:
    """No chance: a report is a function of the workload. And nothing of the workload is changed."""
    before = json.dumps(workload)
    assert simulate(workload).to_json() == simulate(workload).to_json()
    assert json.dumps(workload) == before


@given(workloads(rates=False))
def test_what_a_report_says_of_its_schedule_is_so(workload: dict[str, Any]) -> None:
    """Utilisation, peaks and waits, worked out anew from the starts."""
    report = simulate(workload)
    calls = workload["calls"]
    assert report.calls == len(calls)
    work = dict.fromkeys(workload["pools"], 0.0)
    for one in calls:
        for pool, units in one.get("pools", {}).items():
            work[pool] += units * one["duration"]
    for pool, permits in workload["pools"].items():
        busy = work[pool] / (permits * report.makespan) if report.makespan else 0.0
        assert report.utilisation[pool] == pytest.approx(busy)
        assert report.permits[pool] == permits
        assert report.peak[pool] <= permits
    for tool in {one["tool"] for one in calls}:
        told = report.waits["tools"][tool]
        mine = [one for one in calls if one["tool"] == tool]
        assert told.calls == len(mine)
        # Since it came in and what it needs has ended; a wait for siblings in conflict is none for a limit.
        most = [
            report.starts[one["id"]] - max([one["arrival"], *(report.ends[other] for other in one.get("needs", ()))])
            for one in mine
        ]
        assert told.total <= sum(most) + 1e-6
        if not any(other.get("reads") or other.get("writes") for other in calls):
            assert told.total == pytest.approx(sum(most), abs=1e-6)
    json.loads(report.to_json())
    assert str(report)


# ------------------------------------------------------------------ beside a tower


@given(st.data())
def test_a_simulation_starts_what_a_tower_starts_and_when(data: st.DataObject) -> None:
    """S5, S6: runs, plans, pools, conflicts: each call starts at the instant at which it starts in a tower on virtual
    time. Lengths are such that no two ends fall together, since at one instant a loop has an order of its own.
    """
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    pools = {"crm": chance.randint(1, 3), "gpu": chance.randint(1, 3)}
    held = {
        "look": {},
        "ask": {"crm": 1},
        "train": {"gpu": chance.randint(1, pools["gpu"])},
        "both": {"crm": chance.randint(1, pools["crm"]), "gpu": 1},
    }
    limits = {"max_concurrency": chance.randint(1, 6), "run_concurrency": chance.randint(1, 4)}
    calls: list[dict[str, Any]] = []
    for run in range(chance.randint(1, 4)):
        arrival = 0.0 if not run else chance.uniform(0, 6)
        for _ in range(chance.randint(1, 2)):
            mine: list[str] = []
            for _ in range(chance.randint(1, 7)):
                name = f"c{len(calls)}"
                tool = chance.choice(list(held))
                one = call(name, chance.uniform(0.1, 3), tool, run=f"r{run}", arrival=arrival, pools=held[tool])
                if chance.random() < 0.5:
                    one["needs"] = chance.sample(mine, min(len(mine), chance.randint(0, 2)))
                if chance.random() < 0.4:
                    one[chance.choice(["reads", "writes"])] = [chance.choice(["row:1", "row:2"])]
                calls.append(one)
                mine.append(name)
            arrival += chance.uniform(0.5, 6)
    workload = {"pools": pools, "calls": calls}
    report = simulate(workload, {**limits, "max_wait": 100_000, "timeout": 1000})
    judge({**workload, "max_concurrency": limits["max_concurrency"]}, report.starts)
    assert report.starts == pytest.approx(_tower_starts(workload, held, limits), abs=1e-6)


def _tower_starts(workload: dict[str, Any], held: dict[str, Any], limits: dict[str, int]) -> dict[str, float]:
    stage = Stage()
    tower = stage.tower(pools=workload["pools"], max_wait=100_000.0, timeout=1000.0, **limits)
    starts: dict[str, float] = {}

    def touched(kind: str) -> Callable[..., list[str]]:
        def keys(name: str, seconds: float, reads: list[str], writes: list[str]) -> list[str]:
            return reads if kind == "reads" else writes

        return keys

    for tool, pools in held.items():

        async def work(name: str, seconds: float, reads: list[str], writes: list[str]) -> str:
            starts[name] = stage.clock.value
            await asyncio.sleep(seconds)
            return name

        tower.add_tool(work, name=tool, pools=pools, reads=touched("reads"), writes=touched("writes"))

    async def one_run(run: str, batches: dict[float, list[Call]]) -> None:
        async with tower.run(run) as opened:
            handed: list[asyncio.Task[Any]] = []
            for arrival, calls in batches.items():
                await asyncio.sleep(arrival - stage.clock.value)
                handed.append(asyncio.ensure_future(opened.execute(calls)))
            for batch in handed:
                results = await batch
                assert [result.code for result in results] == [None] * len(results)

    async def main() -> None:
        runs: dict[str, dict[float, list[Call]]] = {}
        for one in workload["calls"]:
            arguments = {
                "name": one["id"],
                "seconds": one["duration"],
                "reads": one.get("reads", []),
                "writes": one.get("writes", []),
            }
            made = Call(one["tool"], arguments, one["id"], tuple(one.get("needs", ())))
            runs.setdefault(one["run"], {}).setdefault(one["arrival"], []).append(made)
        await asyncio.gather(*[one_run(run, batches) for run, batches in runs.items()])

    stage.run(main())
    tower.close()
    return starts


# ------------------------------------------------------------------ worked by hand


def test_a_pool_of_two_shared_by_five_equal_calls() -> None:
    """Five calls of one second through two permits: three rounds, and everything that is told of them."""
    report = fair({"pools": {"crm": 2}, "calls": [call(f"c{n}", pools={"crm": 1}) for n in range(5)]})
    assert report.starts == {"c0": 0, "c1": 0, "c2": 1, "c3": 1, "c4": 2}
    assert (report.makespan, report.lower_bound, report.bound_by) == (3.0, 2.5, "crm")
    assert report.utilisation == {"crm": pytest.approx(5 / 6)}
    assert (report.permits, report.peak["crm"]) == ({"crm": 2}, 2)
    look = report.waits["tools"]["look"]
    assert (look.calls, look.waited, look.total, look.mean, look.median, look.longest) == (5, 3, 4.0, 0.8, 1.0, 2.0)
    assert report.waits["pools"]["crm"].total == 4.0


def test_s6_the_longest_remaining_path_goes_first() -> None:
    """S6: with one permit, the head of the long chain goes before shorter calls that were emitted earlier."""
    chain = [call("a", 1), call("b", 1), call("x", 1), call("y", 5, needs=["x"])]
    report = fair({"max_concurrency": 1, "calls": [{**one, "estimate": one["duration"]} for one in chain]})
    assert sorted(report.starts, key=report.starts.__getitem__) == ["x", "y", "a", "b"]


def test_s6_no_level_barrier() -> None:
    """S6: a call starts when its own needs are done, however long others of their level go on."""
    report = fair({"calls": [call("a", 1), call("b", 9), call("c", 1, needs=["a"]), call("d", 1, needs=["c"])]})
    assert (report.starts["c"], report.starts["d"], report.makespan) == (1, 2, 9)
    assert (report.lower_bound, report.bound_by) == (9, "longest path")


def test_s1_a_write_waits_for_reads_before_it_and_makes_reads_after_it_wait() -> None:
    """G4, S1: in emitted order on one resource; others go on."""
    report = fair(
        {
            "calls": [
                call("r1", 2, reads=["row:1"]),
                call("r2", 3, reads=["row:1"]),
                call("w", 1, writes=["row:1"]),
                call("r3", 1, reads=["row:1"]),
                call("o", 1, writes=["row:2"]),
                call("tree", 1, writes=["row:/**"]),
            ]
        }
    )
    assert report.starts == {"r1": 0, "r2": 0, "w": 3, "r3": 4, "o": 0, "tree": 5}


def test_a_call_may_need_one_that_came_in_with_an_earlier_batch() -> None:
    """Whoever comes in later starts no earlier than that, and no earlier than what it needs has ended."""
    calls = [call("a", 2), call("b", 1, arrival=1, needs=["a"]), call("c", 1, arrival=5, needs=["b"])]
    report = fair({"calls": calls})
    assert report.starts == {"a": 0, "b": 2, "c": 5}
    assert report.lower_bound == report.makespan == 6


def test_needs_may_point_forward_and_to_a_later_arrival() -> None:
    report = fair({"calls": [call("a", 1, needs=["b"]), call("b", 1, arrival=3)]})
    assert report.starts == {"a": 4, "b": 3}


def test_s7_a_rate_of_the_workload_spreads_the_starts() -> None:
    report = fair({"rates": {"look": "2/s"}, "calls": [call(f"c{n}", 0.1) for n in range(5)]})
    assert list(report.starts.values()) == [0, 0, 1, 1, 2]
    assert report.waits["pools"]["rate of tool look"].waited == 3
    assert report.bound_by == "longest path"


def test_what_can_never_start_is_told_and_the_rest_goes_on() -> None:
    """A call that weighs more than its pool is refused, and what needs it is skipped: its code says which."""
    calls = [call("wide", pools={"crm": 3}), call("after", needs=["wide"]), call("other")]
    report = simulate({"pools": {"crm": 2}, "calls": calls})
    assert report.rejections == {"wide": "concurrency_limit", "after": "dependency_failed"}
    assert (dict(report.starts), report.ok, report.calls) == ({"other": 0.0}, False, 3)
    assert "concurrency_limit: wide" in str(report)


def test_an_empty_workload_takes_no_time() -> None:
    report = fair({"calls": []})
    assert (report.makespan, report.lower_bound, report.calls) == (0.0, 0.0, 0)
    assert "0 calls" in str(report)


# ------------------------------------------------------------------ policies


def test_limits_of_a_policy_hold_by_tool_and_time() -> None:
    """A tower's bounds on waiting and running: who waits too long is refused, who runs too long is stopped."""
    workload = {"calls": [call("a", 4), call("b", 1, run="other"), call("c", 50, "slow")]}
    policy = {
        "max_wait": 2,
        "tools": {"look": {"max_concurrency": 1}, "slow": {"timeout": 10}},
    }
    report = simulate(workload, policy)
    assert report.rejections == {"b": "wait_timeout", "c": "handler_timeout"}
    assert report.makespan == 10
    assert report.permits["tool:look"] == 1


def test_a_call_cap_of_a_policy_refuses_the_rest() -> None:
    report = simulate({"calls": [call(f"c{n}") for n in range(5)]}, {"max_calls_per_batch": 3})
    assert report.rejections == {"c3": "call_cap", "c4": "call_cap"}


def test_what_a_tower_declares_is_simulated_and_the_tower_stays_as_it_is() -> None:
    """A Tower as policy: its tools' pools and limits, its pools; nothing of it changes."""
    tower = Tower(pools={"crm": Pool(2)}, max_wait=100.0)

    @tower.tool(pools=["crm"], independent=True)
    async def look(n: int) -> int:
        return n

    before = tower.statistics()
    report = simulate({"calls": [call(f"c{n}") for n in range(4)]}, tower)
    assert sorted(report.starts.values()) == [0, 0, 1, 1]
    assert tower.statistics() == before


def test_a_policy_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="policy"):
        simulate({"calls": []}, 7)
    wrong = tmp_path / "towerman.toml"
    wrong.write_text("max_concurency = 3\n")
    with pytest.raises(PolicyError, match="max_concurrency"):
        simulate({"calls": []}, wrong)


def test_s2_the_wait_of_siblings_behind_their_own_run_is_no_wait_in_the_queue() -> None:
    """S2: ten calls of one run through one permit take ten times as long as `max_wait`, and none is refused."""
    report = simulate({"calls": [call(f"c{n}", 5) for n in range(10)]}, {"max_concurrency": 1, "max_wait": 5})
    assert report.ok
    assert report.makespan == 50


# ------------------------------------------------------------------ what is refused

BAD: list[tuple[object, str]] = [
    ([], "workload: a mapping with 'calls'"),
    ({}, "'calls' is missing"),
    ({"calls": {}}, "calls: a list"),
    ({"cals": []}, "did you mean 'calls'"),
    ({"calls": [7]}, r"calls\[0\]: a mapping"),
    ({"calls": [{"id": "a", "duration": 1}]}, r"calls\[0\]: 'tool' is missing"),
    ({"calls": [{"id": "a", "tool": "t"}]}, r"calls\[0\]: 'duration' is missing"),
    ({"calls": [call("a", -1)]}, r"calls\[0\].duration: seconds from 0 to 1,000,000,000,000, where"),
    ({"calls": [call("a", 1e16)]}, r"calls\[0\].duration: seconds from 0 to 1,000,000,000,000, .*; got 1e\+16"),
    ({"calls": [call("a", arrival=10**12 + 1)]}, r"calls\[0\].arrival: seconds from 0 to 1,000,000,000,000, where"),
    ({"calls": [call("a", estimate=10**400)]}, r"calls\[0\].estimate: seconds from 0 to 1,000,000,000,000, where"),
    ({"calls": [call("a", float("nan"))]}, r"calls\[0\].duration"),
    ({"calls": [call("a", float("inf"))]}, r"calls\[0\].duration"),
    ({"calls": [call("a", True)]}, r"calls\[0\].duration"),
    ({"calls": [call("a", "1")]}, r"calls\[0\].duration"),
    ({"calls": [call("a", estimate=-1)]}, r"calls\[0\].estimate"),
    ({"calls": [call("a", arrival=-1)]}, r"calls\[0\].arrival"),
    ({"calls": [call("a", run=[])]}, r"calls\[0\].run"),
    ({"calls": [call("a", 1, "")]}, r"calls\[0\].tool"),
    ({"calls": [call("a"), call("a")]}, r"calls\[1\].id: 'a' is the id of calls\[0\]"),
    ({"calls": [call("")]}, r"calls\[0\].id"),
    ({"calls": [call("a", needz=[])]}, r"calls\[0\]: there is no key 'needz'.*'needs'"),
    ({"calls": [call("a", needs=["b"])]}, r"calls\[0\].needs: .*unknown_dependency"),
    ({"calls": [call("a", needs=["a"])]}, r"calls\[0\].needs: .*needs itself.*dependency_cycle"),
    ({"calls": [call("a", needs=["b"]), call("b", needs=["a"])]}, r"calls\[0\].needs: .*circle.*dependency_cycle"),
    ({"calls": [call("a"), call("b", run="other", needs=["a"])]}, r"calls\[1\].needs: 'a' is a call of another run"),
    ({"calls": [call("a", needs=7)]}, r"calls\[0\].needs: a list"),
    ({"calls": [call("a", pools={"crm": 1})]}, r"calls\[0\].pools: there is no pool 'crm'"),
    ({"pools": {"crm": 0}, "calls": []}, r"pools.crm: a whole number"),
    ({"pools": {"crm": 1}, "calls": [call("a", pools={"crm": -1})]}, r"calls\[0\].pools.crm"),
    ({"pools": [], "calls": []}, "pools: a mapping"),
    ({"max_concurrency": 0, "calls": []}, "max_concurrency: a whole number"),
    ({"max_concurrency": 1.5, "calls": []}, "max_concurrency: a whole number"),
    ({"rates": {"look": "fast"}, "calls": [call("a")]}, "rates.look"),
    ({"rates": {"lok": "1/s"}, "calls": [call("a")]}, "rates: .*'lok'.*look"),
    ({"calls": [call("a", reads=[""])]}, r"calls\[0\].reads\[0\]"),
    ({"calls": [call("a", writes=["row:../x"])]}, r"calls\[0\].writes\[0\]"),
    ("no-such-file.json", "no-such-file.json: No such file"),
]


@pytest.mark.parametrize(("workload", "message"), BAD)
def test_a_wrong_workload_is_refused_with_its_place(workload: object, message: str) -> None:
    """The place, what is allowed there, the nearest right name."""
    with pytest.raises(InputError, match=message):
        simulate(workload)


def test_a_file_that_is_no_json_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text('{"calls": [\n}')
    with pytest.raises(InputError, match=r"not JSON \(line 2, column 1\)"):
        simulate(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not JSON"):
        simulate(str(path))


RARE = {"rates": {"t": "1/1000000d"}, "calls": [call(f"c{n}", 0.1, "t") for n in range(60)]}


@pytest.mark.parametrize(
    ("workload", "policy", "message"),
    [
        (RARE, None, "call 'c12' waits for the rate of tool t and would start after 1,000,000,000,000 seconds, where"),
        (RARE, {"max_wait": 5e13, "max_calls_per_batch": 100}, "call 'c12' waits for the rate of tool t and would"),
        (
            {
                "pools": {"crm": 1},
                "rates": {"crm": "1/1000000d"},
                "calls": [call(f"c{n}", pools=["crm"]) for n in range(99)],
            },
            None,
            "call 'c12' waits for the rate of pool crm and would start after 1,000,000,000,000 seconds",
        ),
        (
            {"max_concurrency": 1, "calls": [call("a", 10**12), call("b")]},
            None,
            "call 'b' would end after 1,000,000,000,000 seconds, where the clock of a simulation ends: let it",
        ),
    ],
)
def test_what_goes_on_past_the_end_of_the_clock_is_told(workload: object, policy: object, message: str) -> None:
    """No call waits for ever without a word: who it is, where the clock ends, and what to change."""
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        simulate(workload, policy)


def test_up_to_the_end_of_the_clock_all_is_well() -> None:
    """A rate's last start before it, a call that ends with it, and a wait for nothing that would end after it."""
    rare = {**RARE, "calls": RARE["calls"][:12]}  # type: ignore[index]
    assert simulate(rare).makespan == 11 * 86400 * 10**6 + 0.1
    assert simulate({"calls": [call("a", 10**12)]}).makespan == 10**12
    one = {"max_concurrency": 1, "calls": [call("a"), call("b")]}
    assert simulate(one, {"max_wait": 5e13}).makespan == 2


@pytest.mark.parametrize(("key", "value"), [("duration", math.inf), ("arrival", 2e12), ("estimate", math.nan)])
def test_a_length_made_by_hand_has_the_same_bound(key: str, value: float) -> None:
    """Also where no file was read."""
    made = Workload(calls=(WorkloadCall(**{"id": "a", "tool": "t", "duration": 1.0, key: value}),))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"calls\[0\].{key}: seconds from 0 to 1,000,000,000,000, where"):
        simulate(made)


def test_a_workload_made_by_hand_is_looked_at_too() -> None:
    twice = Workload(calls=(WorkloadCall("a", "t", 1.0), WorkloadCall("a", "t", 1.0)))
    with pytest.raises(InputError, match=r"calls\[1\].id"):
        simulate(twice)
    assert simulate(Workload(calls=(WorkloadCall("a", "t", 1.0),))).makespan == 1.0


def test_what_may_be_left_out_and_what_may_be_written_shorter(tmp_path: Path) -> None:
    """No id: the place is the id; numbers as ids; one need, one pool or one resource without its list."""
    given_ = {
        "pools": {"crm": 1},
        "rates": {"crm": "5/s"},
        "calls": [
            {"tool": "t", "duration": 1, "pools": ["crm"], "reads": "row:1"},
            {"tool": "t", "duration": 1, "needs": [0], "pools": {"crm": 0}},
            {"id": 7, "tool": "t", "duration": 1, "needs": "1", "run": ""},
        ],
    }
    path = tmp_path / "work.json"
    path.write_text(json.dumps(given_))
    read = read_workload(path)
    assert [one.id for one in read.calls] == ["0", "1", "7"]
    assert dict(read.calls[0].pools) == {"crm": 1}
    assert read.rates == {"crm": Rate(5, per=1.0)}
    assert simulate(read).starts == {"0": 0, "1": 1, "7": 2}


# ------------------------------------------------------------------ what if


def test_what_is_tried_stands_in_the_place_of_what_holds() -> None:
    workload = {"pools": {"crm": 1}, "calls": [call(f"c{n}", pools={"crm": 1}) for n in range(4)]}
    assert simulate(workload).makespan == 4
    assert simulate(workload, tried={"pools.crm": 4}).makespan == 1
    assert simulate(workload, tried={"pools.crm": None}).makespan == 1
    assert simulate(workload, {"max_concurrency": 8}, tried={"max_concurrency": 1, "pools.crm": 4}).makespan == 4
    assert simulate(workload, tried={"pools.crm": 4, "rates.look": "1/s"}).makespan == 4


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        ({"pools.crn": 1}, "pools.crn: there is no pool 'crn'.*crm"),
        ({"pools.crm": 0}, "pools.crm: a whole number"),
        ({"pools.crm": 1.5}, "pools.crm: a whole number"),
        ({"rates.lok": "1/s"}, "rates.lok: .*look"),
        ({"rates.look": "quick"}, "rates.look"),
        ({"max_concurency": 1}, "max_concurency.*max_concurrency"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"when_busy": "shout"}, "when_busy"),
    ],
)
def test_what_cannot_be_tried_is_told(tried: dict[str, object], message: str) -> None:
    workload = {"pools": {"crm": 1}, "calls": [call("a", pools={"crm": 1})]}
    with pytest.raises(InputError, match=message):
        simulate(workload, tried=tried)


@pytest.mark.parametrize("values", [range(1, 1002), range(10**30), [1] * 1001])
def test_a_sweep_has_its_bound(values: Sequence[int]) -> None:
    """It is refused before anything is simulated."""
    with pytest.raises(InputError, match=r"^sweep of pools.crm: [0-9,]+ values; at most 1,000"):
        sweep("no-such-file.json", "pools.crm", values)
    workload = {"pools": {"crm": 1}, "calls": []}
    assert len(sweep(workload, "pools.crm", range(1, 1001)).reports) == 1000
    assert sweep(workload, "pools.crm", range(0)).reports == ()


def test_a_sweep_tells_what_is_enough() -> None:
    """A value a row; the first that comes within five percent of the best."""
    workload = {"pools": {"crm": 1}, "calls": [call(f"c{n}", pools={"crm": 1}) for n in range(8)]}
    found = sweep(workload, "pools.crm", [1, 2, 4, 8, 16])
    assert [one.makespan for one in found.reports] == [8, 4, 2, 1, 1]
    assert (found.enough, found.ok) == (8, True)
    rows = found.to_dict()["rows"]
    assert [row["utilisation"] for row in rows] == [1, 1, 1, 1, 0.5]  # type: ignore[attr-defined]
    text = str(found)
    assert "pools.crm = 8 comes within 5% of the best makespan." in text
    assert max(map(len, found.chart(60).splitlines())) <= 90
    assert found.chart(ascii_only=True).isascii()


# ------------------------------------------------------------------ real plans: PSPLIB


def psplib(row: dict[str, Any], *, estimates: bool) -> dict[str, Any]:
    """A project of PSPLIB as a workload: renewable resources are pools, activities calls."""
    needs: list[list[str]] = [[] for _ in range(row["n"])]
    for number, successors in enumerate(row["successors"]):
        for other in successors:
            needs[other].append(str(number))
    calls = []
    for number, duration in enumerate(row["durations"]):
        held = {f"r{at}": units for at, units in enumerate(row["demands"][number]) if units}
        one = call(str(number), duration, "work", needs=needs[number], pools=held)
        calls.append({**one, "estimate": duration} if estimates else one)
    return {"pools": {f"r{at}": permits for at, permits in enumerate(row["capacity"])}, "calls": calls}


@pytest.mark.parametrize(
    ("name", "exact", "hops"), [("rcpsp_j30", 0.05, 0.065), ("rcpsp_j60", 0.08, 0.095)], ids=["j30", "j60"]
)
def test_f9_psplib_rows_come_near_the_best_known(
    name: str, exact: float, hops: float, shared_data: Callable[[str], list[dict[str, Any]]]
) -> None:
    """F9, S6: every schedule stands up to the judge; the mean above the best known makespan, with exact estimates and
    with none.
    """
    rows = shared_data(name)
    for estimates, most in ((True, exact), (False, hops)):
        over: list[float] = []
        for row in rows:
            report = fair(psplib(row, estimates=estimates))
            assert report.makespan >= row["best_makespan"] - 1e-9 or not row["proved_optimal"]
            assert report.lower_bound >= row["critical_path"]
            over.append(report.makespan / row["best_makespan"] - 1)
        assert sum(over) / len(over) <= most


# ------------------------------------------------------------------ apart


def test_importing_towerman_does_not_import_the_simulator() -> None:
    """R-04: whoever runs a tower pays nothing for it."""
    import subprocess
    import sys

    code = "import sys, towerman; towerman.Tower(); sys.exit('towerman.simulate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(towerman.simulate.__all__) >= {"simulate", "sweep", "Report", "Workload", "read_workload"}
