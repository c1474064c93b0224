"""F8, F9, F10: how near plans come to the least time they could take, and what the planning costs.

F8 and F9 are counted, not timed: the project's own plan, gate and ledger on a clock that jumps. F10 is CPU time.
"""

from __future__ import annotations

import asyncio
import graphlib
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.calls import CAP, OWN, REUSED
from benchmarks.measure import Figure, Pass, Samples, figure, interleaved, ratio
from benchmarks.report import Row, note
from benchmarks.settings import Settings
from benchmarks.systems import REF, at_once, by_semaphore, furnish
from towerman import Call
from towerman.simulate import simulate

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
"""Where real projects lie when they are there."""

TOOLS = 8
"""Of how many tools the calls of a graph are."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A random plan in layers: most calls need some of the layer before, some reach further back.

    Args:
        needs: for each call those that it needs, all before it.
        tools: the tool of each call.
        seconds: how long each call takes.
    """

    needs: Sequence[Sequence[int]]
    tools: Sequence[int]
    seconds: Sequence[float]

    @classmethod
    def made(cls, size: int, seed: int, kind: str, draw: int = 0) -> Graph:
        """The graph of that seed.

        Args:
            size: calls.
            seed: of chance.
            draw: another number gives another graph of the same tools.
            kind: `equal` lengths; `heavy`: log-normal with sigma 1.5, whatever the tool; `by tool`: each tool has a
                mean of its own, and its calls differ by a log-normal factor with sigma 0.6.
        """
        chance = random.Random(f"{size} {seed} {kind} {draw}")
        tastes = random.Random(f"tools of {seed}")
        wide = max(4, round(1.5 * math.sqrt(size)))
        layers: list[range] = []
        needs: list[list[int]] = []
        while len(needs) < size:
            layer = range(len(needs), min(size, len(needs) + chance.randint(1, 2 * wide)))
            for _ in layer:
                found: set[int] = set()
                for _ in range(chance.randint(1, 3) if layers else 0):
                    far = 1 if chance.random() < 0.8 else chance.randint(1, len(layers))
                    found.add(chance.choice(layers[-far]))
                needs.append(sorted(found))
            layers.append(layer)
        tools = [chance.randrange(TOOLS) for _ in needs]
        usual = [tastes.lognormvariate(0, 1) for _ in range(TOOLS)]
        lengths: dict[str, Callable[[int], float]] = {
            "equal": lambda tool: 1.0,
            "heavy": lambda tool: chance.lognormvariate(0, 1.5),
            "by tool": lambda tool: usual[tool] * chance.lognormvariate(0, 0.6),
        }
        return cls(needs, tools, [lengths[kind](tool) for tool in tools])

    def bound(self, cap: int) -> float:
        """No schedule takes less: the longest path, and all the work over what runs at once."""
        ends: list[float] = []
        for needed, length in zip(self.needs, self.seconds, strict=True):
            ends.append(max((ends[other] for other in needed), default=0.0) + length)
        return max(*ends, sum(self.seconds) / cap)

    def levels(self) -> list[list[int]]:
        """Calls by the number of edges that lead to them at most."""
        depth: list[int] = []
        for needed in self.needs:
            depth.append(1 + max((depth[other] for other in needed), default=-1))
        found: list[list[int]] = [[] for _ in range(max(depth) + 1)]
        for index, level in enumerate(depth):
            found[level].append(index)
        return found

    def in_chunks(self, cap: int) -> float:
        """The makespan of the usual sample: level by level, each in chunks that are awaited whole."""
        chunks = [level[at : at + cap] for level in self.levels() for at in range(0, len(level), cap)]
        return sum(max(self.seconds[index] for index in chunk) for chunk in chunks)

    def calls(self, *, known: bool, arrival: float = 0.0, prefix: str = "") -> list[dict[str, Any]]:
        """As the calls of a workload. `known`: with exact estimates."""
        return [
            {
                "id": f"{prefix}{index}",
                "tool": f"tool{self.tools[index]}",
                "duration": length,
                "needs": [f"{prefix}{other}" for other in self.needs[index]],
                "arrival": arrival,
                **({"estimate": length} if known else {}),
            }
            for index, length in enumerate(self.seconds)
        ]


def _makespan(graph: Graph, cap: int, *, known: bool) -> float:
    report = simulate({"max_concurrency": cap, "calls": graph.calls(known=known)})
    assert report.ok, "a call did not come to its end"
    return report.makespan


def _with_history(graph: Graph, before: Graph, cap: int) -> float:
    """The makespan when the tools have answered another plan before: their means are what is known."""
    arrival = 2 * sum(before.seconds)
    calls = before.calls(known=False, prefix="before ") + graph.calls(known=False, arrival=arrival)
    report = simulate({"max_concurrency": cap, "calls": calls})
    assert report.ok, "a call did not come to its end"
    return report.makespan - arrival


async def f8_makespan(settings: Settings) -> list[Row]:
    """The makespan of random plans against what no schedule could be below."""
    size, graphs = (200, 4) if settings.quick else (1_000, 20)
    rows = []
    for kind, words in (("heavy", "heavy-tailed lengths"), ("by tool", "lengths by tool"), ("equal", "equal lengths")):
        known: list[float] = []
        learned: list[float] = []
        hops: list[float] = []
        chunks: list[float] = []
        for seed in range(graphs):
            graph = Graph.made(size, seed, kind)
            least = graph.bound(CAP)
            best = _makespan(graph, CAP, known=True)
            known.append(best / least)
            learned.append(_with_history(graph, Graph.made(size, seed, kind, draw=1), CAP) / least)
            hops.append(_makespan(graph, CAP, known=False) / least)
            chunks.append(graph.in_chunks(CAP) / best)
        level = kind == "equal"  # then chunks of a level lose next to nothing, whoever starts what
        what = f"makespan of {graphs} plans of {size:,} calls, {CAP} at a time, {words}"
        rows += [
            Row("F8", f"{what}: known", figure(known), most=1.02, against="the lower bound"),
            Row(
                "F8",
                f"{what}: by what tools took before",
                figure(learned),
                most=1.10,
                against="the lower bound",
                beside={"nothing known": figure(hops)},
            ),
            Row("F8", f"chunks of levels against ours, {words}", figure(chunks), least=None if level else 2.3),
        ]
    return rows


# ---------------------------------------------------------------------------------------------- F9


def _project(row: dict[str, Any], *, exact: bool) -> dict[str, Any]:
    """A project as a workload: what it shares are pools, its activities calls."""
    needs: list[list[str]] = [[] for _ in range(row["n"])]
    for index, behind in enumerate(row["successors"]):
        for other in behind:
            needs[other].append(str(index))
    calls = [
        {
            "id": str(index),
            "tool": "work",
            "duration": length,
            "needs": needs[index],
            "pools": {f"shared{at}": units for at, units in enumerate(row["demands"][index]) if units},
            **({"estimate": length} if exact else {}),
        }
        for index, length in enumerate(row["durations"])
    ]
    return {"pools": {f"shared{at}": permits for at, permits in enumerate(row["capacity"])}, "calls": calls}


async def f9_projects(settings: Settings) -> list[Row]:
    """Real projects with four shared resources: how far above the best makespan that is known."""
    rows = []
    for name, exact, unknown in (("j30", 5.0, 6.5), ("j60", 8.0, 9.5)):
        path = DATA / f"rcpsp_{name}.jsonl"
        if not path.is_file():
            note(f"F9: left out: no {path.name} in a folder ../shared/data beside the checkout")
            continue
        projects = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for known, most, words in ((True, exact, "exact estimates"), (False, unknown, "no estimates")):
            above = [_above(project, exact=known) for project in projects]
            mean = statistics.fmean(above)
            rows.append(
                Row(
                    "F9",
                    f"PSPLIB {name}, {len(projects)} projects, {words}: mean above the best known; at most "
                    f"{max(above):.0f} %",
                    Figure(mean, mean, mean, 1),
                    most=most,
                    unit="%",
                )
            )
    return rows


def _above(project: dict[str, Any], *, exact: bool) -> float:
    report = simulate(_project(project, exact=exact))
    assert report.ok, "an activity did not come to its end"
    return 100 * (report.makespan / project["best_makespan"] - 1)


# ---------------------------------------------------------------------------------------------- F10


TASKS = "a task a node"
LIB = "graphlib"


def _by_towerman(graph: Graph, *, own_task: bool = True, plan: bool = True) -> Pass:
    tower, _ = furnish(CAP, at_once, own_task=own_task)
    calls = [
        Call("look", {"i": index}, str(index), tuple(map(str, needed)) if plan else ())
        for index, needed in enumerate(graph.needs)
    ]

    async def run() -> list[object]:
        async with tower.run() as run:
            batch = await run.execute(calls)
        return [result.value for result in batch]

    return run


def _by_tasks(graph: Graph) -> Pass:
    """What one writes by hand: a task for each node that awaits those it needs, bounded by a semaphore."""

    async def run() -> list[int]:
        semaphore = asyncio.Semaphore(CAP)
        tasks: list[asyncio.Task[int]] = []

        async def node(index: int) -> int:
            for other in graph.needs[index]:
                await tasks[other]
            async with semaphore:
                return await at_once(index)

        for index in range(len(graph.needs)):
            tasks.append(asyncio.ensure_future(node(index)))
        return await asyncio.gather(*tasks)

    return run


def _by_graphlib(graph: Graph) -> Pass:
    """The standard library's sorter, with as many tasks at a time as may run."""

    async def run() -> list[int]:
        sorter = graphlib.TopologicalSorter(dict(enumerate(graph.needs)))
        sorter.prepare()
        ready = deque(sorter.get_ready())
        found = [0] * len(graph.needs)
        going: set[asyncio.Task[int]] = set()
        while sorter.is_active():
            while ready and len(going) < CAP:
                going.add(asyncio.ensure_future(at_once(ready.popleft())))
            ended, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                index = task.result()
                found[index] = index
                sorter.done(index)
            ready.extend(sorter.get_ready())
        return found

    return run


async def f10_overhead(settings: Settings) -> list[Row]:
    """CPU time of a node that does nothing, in a plan."""
    rows = []
    each: dict[int, Samples] = {}
    plain = "towerman, no edges"
    for size in settings.sizes:
        graph = Graph.made(size, 0, "equal")
        systems: dict[str, Callable[[], Awaitable[object]]] = {
            REF: by_semaphore(size, at_once, CAP),
            TASKS: _by_tasks(graph),
            LIB: _by_graphlib(graph),
            OWN: _by_towerman(graph),
            REUSED: _by_towerman(graph, own_task=False),
            plain: _by_towerman(graph, plan=False),
        }
        for name, one in systems.items():
            assert await one() == list(range(size)), f"{name}: results are wrong or out of order"
        samples = each[size] = await interleaved(systems, settings.rounds)
        micro = {name: figure(samples[name]).median / size * 1e6 for name in systems}
        note(f"F10 microseconds a node at {size:,}: {', '.join(f'{name} {one:.1f}' for name, one in micro.items())}")
        rows.append(
            Row(
                "F10",
                f"a plan of {size:,} calls that return at once ({micro[OWN]:.0f} us a call)",
                ratio(samples, OWN, REF),
                most=1.6,
                against=REF,
                beside={name: ratio(samples, name, REF) for name in (REUSED, plain, TASKS, LIB)},
                samples=samples,
            )
        )
    few, many = settings.sizes[0], settings.sizes[-1]

    def grown(name: str) -> Figure:
        pairs = zip(each[few][name], each[many][name], strict=True)
        return figure([(large / many) / (small / few) for small, large in pairs])

    rows.append(
        Row(
            "F10",
            f"a call of a plan of {many:,} against one of {few:,}",
            grown(OWN),
            most=1.1,
            beside={name: grown(name) for name in (REF, REUSED, plain, TASKS, LIB)},
        )
    )
    return rows
