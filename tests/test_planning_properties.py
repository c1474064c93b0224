"""Random plans of up to 300 steps on whole towers, on virtual time, against a plain model of what must come of them.

Each plan has steps that answer, fail, are refused, wait for a person, write and read shared rows, refer to results,
need others, run anyway. The model runs the steps one by one and says for each what its code and its value are. Whatever
the timing, the tower must come to the same (G4, R-29, R-34, R-36, R-38), with one result for each step (G1), never more
at once than the limit (G3), each step after those that it needs, and no two at one row at once of which one writes.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit import run_virtual

from towerman import ApprovalRequest, Approved, BatchResult, Call, Denied, ToolError, Tower
from towerman.clock import VirtualClock
from towerman.testing.looks import assert_whole

ROWS = 5


class Case:
    """A random plan, and what must come of it.

    Attributes:
        calls: the steps.
        codes, values: for each step, by the model.
        culprits: for each step, those before it that have failed, one of whom is named where it is skipped.
    """

    def __init__(self, seed: int, size: int) -> None:
        draw = random.Random(seed)
        self.size = size
        order = list(range(size))
        if draw.random() < 0.5:
            draw.shuffle(order)  # steps may refer to later ones
        place = {step: at for at, step in enumerate(order)}
        self.needs: list[list[int]] = []
        self.referred: list[list[int]] = []
        self.tools: list[str] = []
        self.calls: list[Call] = []
        self.rows: list[int] = []
        wide = draw.choice((3, 20, size))
        for step in range(size):
            before = order[max(0, place[step] - wide) : place[step]]
            referred = draw.sample(before, min(len(before), draw.choice((0, 0, 1, 1, 2, 3))))
            needs = draw.sample(before, min(len(before), draw.choice((0, 0, 0, 1, 2))))
            tool = draw.choice(("give", "give", "give", "put", "look", "fail", "wrong", "ask", "deny"))
            arguments: dict[str, Any] = {"n": step}
            arguments["parts"] = [
                draw.choice((f"${{s{one}}}", {"$ref": f"s{one}"}, f"<${{s{one}.n}}>")) for one in referred
            ]
            self.rows.append(draw.randrange(ROWS))
            if tool in ("put", "look"):
                arguments["row"] = self.rows[step]
            if tool == "wrong":
                arguments["extra"] = 1  # no such argument
            self.needs.append(needs)
            self.referred.append(referred)
            self.tools.append(tool)
            self.calls.append(
                Call(
                    tool,
                    arguments,
                    f"s{step}",
                    tuple(f"s{one}" for one in needs),
                    if_failed=draw.choice(("skip", "skip", "run_anyway")),
                )
            )
        self.codes: list[str | None] = [None] * size
        self.values: list[Any] = [None] * size
        self.culprits: list[set[int]] = [set() for _ in range(size)]
        self.table = [0] * ROWS
        # One by one: in the order in which needs alone would allow, the smallest index first (S1).
        waits = [{*self.needs[step], *self.referred[step]} for step in range(size)]
        ready = [step for step in range(size) if not waits[step]]
        while ready:
            step = heappop(ready)
            self._run(step)
            for other in range(size):
                if step in waits[other]:
                    waits[other].discard(step)
                    if not waits[other]:
                        heappush(ready, other)

    def _run(self, step: int) -> None:
        """What a step comes to, when all before it have ended."""
        failed = {one for one in (*self.needs[step], *self.referred[step]) if self.codes[one] is not None}
        named = {one for one in self.referred[step] if self.codes[one] is not None}
        anyway = self.calls[step].if_failed == "run_anyway"
        for one in failed:
            self.culprits[step] |= {one} | self.culprits[one]
        if self.tools[step] == "wrong" and not self.referred[step]:  # refused before anything starts
            self.codes[step] = "invalid_arguments"
        elif named or (failed and not anyway):
            self.codes[step] = "dependency_failed"
        elif self.tools[step] == "wrong":
            self.codes[step] = "invalid_arguments"
        elif self.tools[step] == "fail":
            self.codes[step] = "handler_error"
        elif self.tools[step] == "deny":
            self.codes[step] = "approval_denied"
        else:
            parts = []
            for part, one in zip(self.calls[step].arguments["parts"], self.referred[step], strict=True):  # type: ignore[index]
                pasted = isinstance(part, str) and part.startswith("<")
                parts.append(f"<{self.values[one]['n']}>" if pasted else self.values[one])
            row = self.rows[step]
            if self.tools[step] == "put":
                self.table[row] = self.table[row] * 31 + step
            seen = self.table[row] if self.tools[step] in ("put", "look") else 0
            self.values[step] = {"n": step, "seen": seen, "depth": _deepest(parts)}


def _deepest(parts: list[Any]) -> str:
    """What a step makes of its inputs: short, and different for different ones."""
    return f"{hash_of(parts):08x}"


def hash_of(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


class World:
    """A tower whose tools take random times, and what is seen of them."""

    def __init__(self, case: Case, seed: int, **options: Any) -> None:
        self.case = case
        self.draw = random.Random(seed)
        self.clock = VirtualClock()
        self.started: Counter[int] = Counter()
        self.ended: set[int] = set()
        self.running: set[int] = set()
        self.peak = 0
        self.table = [0] * ROWS
        self.busy: list[Counter[str]] = [Counter() for _ in range(ROWS)]
        self.asked: Counter[str] = Counter()
        self.sealed: list[int] = []
        self.tower = tower = Tower(_clock=self.clock, **options)
        lengths = [self.draw.choice((0.0, 0.0, 0.5, 1.0, 1.0, 7.0)) for _ in range(case.size)]

        async def work(n: int, parts: list[Any], row: int | None = None, kind: str = "") -> dict[str, Any]:
            with self.on(n, row, kind):
                if kind == "put" and row is not None:
                    before = self.table[row]
                    await asyncio.sleep(lengths[n])
                    self.table[row] = before * 31 + n  # lost, if another one writes meanwhile
                else:
                    await asyncio.sleep(lengths[n])
                if kind == "fail":
                    raise ToolError("no", applied="no")
                seen = self.table[row] if row is not None else 0
                return {"n": n, "seen": seen, "depth": _deepest(parts)}

        @tower.tool(independent=True)
        async def give(n: int, parts: list[Any]) -> dict[str, Any]:
            return await work(n, parts)

        @tower.tool(independent=True)
        async def fail(n: int, parts: list[Any]) -> dict[str, Any]:
            return await work(n, parts, kind="fail")

        @tower.tool(independent=True)
        async def wrong(n: int, parts: list[Any]) -> dict[str, Any]:
            raise AssertionError("it is never run")

        @tower.tool(writes="row:{row}")
        async def put(n: int, parts: list[Any], row: int) -> dict[str, Any]:
            return await work(n, parts, row, "put")

        @tower.tool(reads="row:{row}")
        async def look(n: int, parts: list[Any], row: int) -> dict[str, Any]:
            return await work(n, parts, row, "look")

        for name in ("ask", "deny"):
            tower.add_tool(give, name=name, independent=True, requires_approval=True)

    @contextmanager
    def on(self, n: int, row: int | None, kind: str) -> Iterator[None]:
        case = self.case
        self.started[n] += 1
        for one in (*case.needs[n], *case.referred[n]):
            assert one in self.ended or case.codes[one] is not None, f"step {n} has begun before step {one} has ended"
        if row is not None:
            busy = self.busy[row]
            assert not busy["put"] and not (kind == "put" and busy["look"]), f"two at row {row}"
            busy[kind] += 1
        self.running.add(n)
        self.peak = max(self.peak, len(self.running))
        try:
            yield
        finally:
            self.running.discard(n)
            self.ended.add(n)
            if row is not None:
                self.busy[row][kind] -= 1

    async def person(self, request: ApprovalRequest) -> Approved | Denied:
        self.asked[request.call_id] += 1
        await asyncio.sleep(self.draw.choice((0.0, 1.0, 3.0)))
        return Denied("no") if request.tool == "deny" else Approved()

    async def run(self, limit: int) -> BatchResult:
        async with self.tower.run(max_concurrency=limit, approver=self.person) as run:
            self.opened = run
            return await run.execute(
                self.case.calls, plan=True, on_result=lambda result: self.sealed.append(result.index)
            )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    timing=st.integers(0, 10**9),
    size=st.integers(1, 60) | st.integers(61, 300),
    limit=st.integers(1, 40),
)
def test_g1_g3_g4_plans_come_to_the_same_under_every_timing(seed: int, timing: int, size: int, limit: int) -> None:
    """G1, G3, G4, R-29, R-34, R-36, R-38: codes and values are those of the model, at whatever speed and width."""
    case = Case(seed, size)
    for more in range(2):  # twice, with other times
        world = World(case, timing + more)
        done = run_virtual(world.run(limit), world.clock)
        assert [result.index for result in done] == list(range(size)), "R-40"
        assert [result.code for result in done] == case.codes
        assert [result.value for result in done] == case.values
        assert sorted(world.sealed) == list(range(size)), "one result for each, told once"
        assert world.table == case.table
        assert max(world.started.values(), default=0) <= 1
        assert world.peak <= limit
        runs = {step for step in range(size) if case.codes[step] in (None, "handler_error")}
        assert set(world.started) == runs
        wanted = {f"s{step}" for step in range(size) if case.tools[step] in ("ask", "deny")}
        gated = {f"s{step}" for step in range(size) if case.codes[step] in (None, "approval_denied")} & wanted
        assert set(world.asked) == gated and set(world.asked.values()) <= {1}
        for step, roots in enumerate(case.culprits):
            if case.codes[step] != "dependency_failed":
                continue
            assert any(f"call {one} (s{one})" in done[step].message for one in roots), (step, done[step].message, roots)
            assert done[step].outcome == "skipped"
        assert_whole(world.tower)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    size=st.integers(1, 40) | st.integers(41, 300),
    limit=st.integers(1, 20),
    at=st.floats(0, 30),
    how=st.sampled_from(("caller", "run", "steps")),
)
def test_g1_g12_plans_that_are_cancelled_while_they_run(seed: int, size: int, limit: int, at: float, how: str) -> None:
    """G1, G12, R-38: one result for each step; of cancelled steps the dependents say whose fault it is; the others come
    to what they would have come to.
    """
    case = Case(seed, size)
    world = World(case, seed)
    draw = random.Random(seed)
    victims = {draw.randrange(size) for _ in range(3)}

    async def main() -> BatchResult:
        task = asyncio.ensure_future(world.run(limit))
        await asyncio.sleep(at)
        if how == "caller":
            task.cancel()
        elif how == "run":
            world.opened.cancel("enough")
        else:
            for index in victims:
                world.opened.cancel("enough", index=index)
        try:
            return await task
        except asyncio.CancelledError:
            assert world.opened.last_batch is not None
            return world.opened.last_batch

    done = run_virtual(main(), world.clock)
    assert [result.index for result in done] == list(range(size))
    assert sorted(world.sealed) == list(range(size))
    assert not world.running and world.peak <= limit
    cancelled = {result.index for result in done if result.code == "cancelled"}
    if how == "steps":
        assert cancelled <= victims
    touched = set(cancelled)
    touched |= {step for step in range(size) if _leads(case, step, cancelled)}
    rows = {case.rows[step] for step in touched if case.tools[step] == "put"}
    for result in done:
        index = result.index
        if index in touched:
            continue
        assert result.code == case.codes[index], (index, result.code, case.codes[index])
        if result.ok and not _saw(case, index, rows):
            assert result.value == case.values[index]
    assert_whole(world.tower)


def _leads(case: Case, step: int, cancelled: set[int]) -> bool:
    """Does a step wait, directly or not, for the result of a cancelled one?"""
    stack, seen = [step], {step}
    while stack:
        for one in (*case.needs[stack[-1]], *case.referred[stack.pop()]):
            if one in cancelled:
                return True
            if one not in seen:
                seen.add(one)
                stack.append(one)
    return False


def _saw(case: Case, step: int, rows: set[int]) -> bool:
    """Does a step's value depend, directly or not, on a row in which a write is missing?"""
    stack, seen = [step], {step}
    while stack:
        one = stack.pop()
        if case.tools[one] in ("put", "look") and case.rows[one] in rows:
            return True
        stack += [other for other in case.referred[one] if other not in seen]
        seen.update(case.referred[one])
    return False
