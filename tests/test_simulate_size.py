"""Plans of 100,000 calls: parsed, checked and simulated, each call at the price of one of a small plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from towerman import Tower
from towerman.adapters import decode
from towerman.core import read_plan
from towerman.simulate import simulate, workload_of_plan

LARGE = 100_000

Shape = Callable[[int], list[int]]

SHAPES: dict[str, Shape] = {
    "chain": lambda index: [index - 1] if index else [],
    "star": lambda index: [0] if index else [],
    "fan in and out": lambda index: [index - index % 100 - 1] if index % 100 and index >= 100 else [],
    "layers": lambda index: [index - 50, index - 50 - index % 7] if index >= 60 else [],
}


def document(size: int, shape: Shape) -> str:
    """A plan in the native form, its references inside the arguments."""
    steps = [
        {
            "id": f"s{index}",
            "tool": f"tool{index % 5}",
            "arguments": {"of": [{"$ref": f"s{other}"} for other in shape(index)]},
        }
        for index in range(size)
    ]
    return json.dumps({"plan": steps})


def lines_run(work: Callable[[], Any]) -> int:
    """Lines of Towerman that run: what a machine's mood does not change. C code (sorting, JSON) is not in it."""
    count = 0

    def local(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return local if "towerman" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("shape", ["chain", "layers"])
def test_r43_a_plan_of_100_000_calls_is_read_checked_and_simulated(shape: str) -> None:
    """R-43, F8: it comes to its end in the order of its references."""
    workload = workload_of_plan(document(LARGE, SHAPES[shape]), seconds={"*": 1})
    report = simulate(workload, tried={"max_concurrency": 1000})
    assert report.ok
    assert len(report.starts) == LARGE
    for index in range(0, LARGE, 97):
        for other in SHAPES[shape](index):
            assert report.starts[f"s{index}"] >= report.ends[f"s{other}"]
    assert report.lower_bound <= report.makespan <= 1.5 * report.lower_bound + 2


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cost_of_a_call_does_not_grow_with_its_plan(shape: str) -> None:
    """F10: reading, checking and simulating a plan take as many lines a call whatever its size; counted, not timed."""
    small, large = 400, 4_000

    def read(size: int) -> Callable[[], Any]:
        text = document(size, SHAPES[shape])
        return lambda: read_plan(decode(text))

    def simulated(size: int) -> Callable[[], Any]:
        workload = workload_of_plan(document(size, SHAPES[shape]), seconds={"*": 1})
        return lambda: simulate(workload, tried={"max_concurrency": 16})

    for work in (read, simulated):
        work(10)()  # what is imported on first use
        few, many = lines_run(work(small)) / small, lines_run(work(large)) / large
        assert many <= 1.25 * few + 5, f"{work.__name__}: {few:.0f} lines a call at {small}, {many:.0f} at {large}"


def test_explaining_knows_a_large_plan() -> None:
    """R-45: what a tower says of a plan of many calls without running it."""
    tower = Tower()

    @tower.tool(name="tool0", independent=True)
    async def tool0(of: list[object]) -> int:
        return 1

    text = document(2_000, SHAPES["layers"]).replace("tool1", "tool0").replace("tool2", "tool0")
    text = text.replace("tool3", "tool0").replace("tool4", "tool0")
    workload = workload_of_plan(text, tower)
    assert len(workload.calls) == 2_000
    assert simulate(workload, tower).ok
