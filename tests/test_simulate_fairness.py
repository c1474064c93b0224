"""Nobody starves (G6, S5): streams of narrow calls beside wide ones, simulated, beside the two simple orders.

The simple orders are worked out here, for one pool: first come first served, and whoever fits goes.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import pytest
from schedules import judge

from towerman.simulate import Report, simulate

PASSES = 16
"""Times that later calls may go before one that waits (S5)."""


def stream(load: float, seed: int, count: int = 6_000, permits: int = 8) -> dict[str, Any]:
    """A pool of 8; calls come in at random instants, each a run of its own; one in a hundred takes the whole pool; the
    work takes 1 on average.
    """
    chance = random.Random(f"{load} {seed}")
    rate = load * permits / (0.99 + 0.01 * permits)
    calls: list[dict[str, Any]] = []
    instant = 0.0
    for number in range(count):
        instant += chance.expovariate(rate)
        wide = chance.random() < 0.01
        calls.append(
            {
                "id": str(number),
                "tool": "wide" if wide else "narrow",
                "duration": chance.expovariate(1.0),
                "arrival": instant,
                "run": str(number),
                "pools": {"all": permits if wide else 1},
            }
        )
    return {"pools": {"all": permits}, "calls": calls}


def simple(workload: dict[str, Any], *, strict: bool) -> dict[str, float]:
    """When the calls start that come one by one to one pool: in strict order, or whoever fits."""
    free = workload["pools"]["all"]
    ends: list[tuple[float, int]] = []
    waiting: list[dict[str, Any]] = []
    starts: dict[str, float] = {}

    def start(now: float) -> None:
        nonlocal free
        for one in list(waiting):
            if one["pools"]["all"] <= free:
                free -= one["pools"]["all"]
                starts[one["id"]] = now
                heappush(ends, (now + one["duration"], one["pools"]["all"]))
                waiting.remove(one)
            elif strict:
                return

    for one in workload["calls"]:
        while ends and ends[0][0] <= one["arrival"]:
            now, units = heappop(ends)
            free += units
            start(now)
        waiting.append(one)
        start(one["arrival"])
    while ends:
        now, units = heappop(ends)
        free += units
        start(now)
    return starts


def waits(workload: dict[str, Any], starts: Any, tool: str) -> list[float]:
    return sorted(starts[one["id"]] - one["arrival"] for one in workload["calls"] if one["tool"] == tool)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def overtaken(workload: dict[str, Any], report: Report) -> int:
    """The most calls that came in after one and started before it."""
    calls = workload["calls"]
    most = 0
    for at, one in enumerate(calls):
        start = report.starts[one["id"]]
        passed = 0
        for later in calls[at + 1 :]:
            if later["arrival"] >= start:
                break
            passed += report.starts[later["id"]] < start
        most = max(most, passed)
    return most


@pytest.mark.parametrize("load", [0.6, 0.8])
def test_s5_whole_pool_calls_wait_no_longer_than_in_strict_order_nearly(load: float) -> None:
    """G6, S5, P-46: whoever fits goes, but nobody is passed more than 16 times. A call that takes the whole pool waits
    a fraction of what it would if whoever fits always went, and the others wait less than in strict order.
    """
    workload = stream(load, 1)
    report = simulate(workload)
    assert report.ok
    judge_one_pool(workload, report)
    assert overtaken(workload, report) <= PASSES
    assert report.promotions > 0
    skip, strict = simple(workload, strict=False), simple(workload, strict=True)
    wide, narrow = waits(workload, report.starts, "wide"), waits(workload, report.starts, "narrow")
    assert mean(wide) < mean(waits(workload, skip, "wide")) / 2.5
    assert wide[-1] < waits(workload, skip, "wide")[-1] / 3
    assert wide[-1] <= 36, "strict order and holding back after 5 units were at 36 at the most (FIELD, B4)"
    assert mean(wide) <= 8.5
    assert mean(narrow) < mean(waits(workload, strict, "narrow"))


def judge_one_pool(workload: dict[str, Any], report: Report) -> None:
    """The judge looks at pairs that conflict, of which there are none here: leave it the pool alone."""
    judge({**workload, "calls": workload["calls"][:0]}, {})
    steps = sorted(
        step
        for one in workload["calls"]
        for start in (report.starts[one["id"]],)
        for step in ((start, 1, one["pools"]["all"]), (start + one["duration"], 0, -one["pools"]["all"]))
    )
    held = 0
    for _, _, change in steps:
        held += change
        assert held <= workload["pools"]["all"]


def service(small: float, seed: int, seconds: float = 400.0) -> dict[str, Any]:
    """Four pools of 8 below a limit of 24: small calls all the time, middle ones, and every 10 seconds a wide one that
    takes 16 permits of all and 6 of each pool. The small ones are of eight runs, the others of one each.
    """
    chance = random.Random(f"{small} {seed}")
    names = ["a", "b", "c", "d"]
    calls: list[dict[str, Any]] = []

    def come(instant: float, tool: str, pools: dict[str, int], length: float) -> None:
        calls.append({"tool": tool, "duration": length, "arrival": instant, "run": "", "pools": pools})

    instant = 0.0
    while (instant := instant + chance.expovariate(small)) < seconds:
        come(instant, "small", {"all": 1, chance.choice(names): 1}, chance.expovariate(1.0))
    instant = 0.0
    while (instant := instant + chance.expovariate(0.25)) < seconds:
        come(instant, "middle", {"all": 3, **dict.fromkeys(chance.sample(names, 2), 2)}, chance.expovariate(1.0))
    for number in range(int(seconds / 10)):
        come(10.0 * number + 5.0, "wide", {"all": 16, **dict.fromkeys(names, 6)}, 1.0)
    calls.sort(key=lambda one: one["arrival"])
    for number, one in enumerate(calls):
        one["id"] = str(number)
        one["run"] = f"small {number % 8}" if one["tool"] == "small" else one["tool"]
    return {"pools": {"all": 24, **dict.fromkeys(names, 8)}, "calls": calls}


@pytest.mark.parametrize("small", [14.0, 18.0, 27.0])
def test_s5_a_wide_call_in_many_pools_is_served_at_every_load(small: float) -> None:
    """G6, S5, P-47: every wide call is served, and soon, also where more small ones come than can be served: whoever
    goes first where it fits would not serve one of them at 18 and 27 a second.
    """
    workload = service(small, 1)
    report = simulate(workload)
    assert report.ok
    wide = waits(workload, report.starts, "wide")
    assert len(wide) == 40
    assert max(wide) <= 6.4, "what strict order came to at 18 a second (FIELD, 1.3)"
    assert mean(wide) <= 3.0
    if small < 20:  # not overloaded
        assert waits(workload, report.starts, "small")[-1] <= 8.0
    for pool, permits in workload["pools"].items():
        assert report.peak[pool] <= permits


def test_s5_in_overload_bounded_waits_refuse_and_the_rest_waits_no_longer() -> None:
    """G6, G12: more comes than can be served, each small call a run of its own. A bound on waiting refuses some rather
    than keep all for minutes.
    """
    workload = service(27.0, 2, seconds=150.0)
    for one in workload["calls"]:
        if one["tool"] == "small":
            one["run"] = one["id"]
    report = simulate(workload, {"max_queued": 10_000, "max_wait": 10})
    assert set(report.rejections.values()) == {"wait_timeout"}
    assert len(report.rejections) < report.calls / 6
    assert report.utilisation["all"] > 0.9
    arrivals = {one["id"]: one["arrival"] for one in workload["calls"] if one["run"] == one["id"]}
    for name in arrivals.keys() & report.starts.keys():
        assert report.starts[name] - arrivals[name] <= 10.0 + 1e-9


def test_s5_an_old_run_is_not_passed_for_ever_by_new_ones() -> None:
    """G6, S5: ten calls of one run behind a full stream of new runs of one call each: fair share serves both, and each
    of the ten is passed 16 times at the most while it is the next of its run.
    """
    new = [
        {"id": f"n{number}", "tool": "new", "duration": 1.0, "arrival": 1.0 * number, "run": f"n{number}"}
        for number in range(150)
    ]
    old = [{"id": f"o{number}", "tool": "old", "duration": 1.0, "run": "old"} for number in range(10)]
    report = simulate({"max_concurrency": 1, "calls": [*old, *new]})
    assert report.ok
    starts = sorted(report.starts[one["id"]] for one in old)
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert max(gaps) <= PASSES + len(old), "those who are there already, and 16 who pass"
    assert max(report.starts[one["id"]] - one["arrival"] for one in new) <= len(old)
    spread = simulate(
        {"max_concurrency": 1, "calls": [*old, *({**one, "arrival": 1.25 * at} for at, one in enumerate(new))]}
    )
    assert max(spread.starts[f"o{number}"] for number in range(10)) <= 50.0, "a fifth is free, and goes to the old run"


def test_s6_many_runs_share_evenly() -> None:
    """S5, S6: plans of several runs that come in together take turns: none is done much before the others."""
    chance = random.Random(7)
    calls: list[dict[str, Any]] = []
    for run in range(6):
        for number in range(40):
            needs = [f"{run}.{other}" for other in chance.sample(range(number), min(number, 2))] if number > 4 else []
            calls.append(
                {
                    "id": f"{run}.{number}",
                    "tool": "t",
                    "duration": 1.0,
                    "run": str(run),
                    "needs": needs,
                    "pools": {"p": 1},
                }
            )
    report = simulate({"pools": {"p": 4}, "calls": calls})
    assert report.ok
    done = [max(report.ends[f"{run}.{number}"] for number in range(40)) for run in range(6)]
    assert report.makespan == pytest.approx(60.0, abs=4)
    assert max(done) - min(done) <= 12.0
