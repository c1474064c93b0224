"""What is compared: the two references, Towerman as a user would use it, and libraries that bound concurrency.

A system is prepared once (tools, calls, limits) and then answers its batch of n calls each time its pass is awaited: n
results in emitted order. The tool is a coroutine function of one integer that gives the integer back.

The references are what a careful programmer writes by hand. `gather+Semaphore` starts a task for every call and bounds
them with a semaphore. `gather+Semaphore+json` does besides what any executor of tool calls must do: look the tool up by
its name, read JSON arguments, catch what is raised, write a JSON answer under the call's id.

Not here: agent frameworks (peers).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import json
import sys
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import Pass
from towerman import Budget, Call, Event, Rate, Tower

Handler = Callable[[int], Awaitable[int]]

REF = "gather+Semaphore"
REF_JSON = "gather+Semaphore+json"

PLENTY = 10_000_000
"""A bound that no batch here reaches."""

LONG = 3600.0
"""A wait that no call here comes to, in seconds."""

Keys = Literal["none", "flat", "nested", "nested+subtree"]
"""What a call reads: nothing (`independent`), `row:7`, `desk/rows/7`, or that beside a tool with a subtree."""

Beside = Literal["nothing", "rate", "window", "budget", "breaker", "journal"]
"""What else of admission a call goes through."""

BESIDE: dict[Beside, str] = {
    "rate": "a rate (even pace) that is never met",
    "window": "a rate (exact window) that is never met",
    "budget": "a budget of calls and cost",
    "breaker": "a circuit breaker",
    "journal": "a journal: writes, each on disk before and after",
}
"""The same in words, but for nothing."""


async def at_once(i: int) -> int:
    """A call that never waits."""
    return i


async def yields(i: int) -> int:
    """A call that gives the loop one turn, so that others queue behind it."""
    await asyncio.sleep(0)
    return i


class Sleeps:
    """A call that sleeps, and the most that were seen asleep at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = 0
        self.peak = 0

    async def call(self, i: int) -> int:
        """Sleep and answer."""
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return i


def by_semaphore(n: int, handler: Handler, cap: int) -> Pass:
    """The reference: a task for each call, bounded by a semaphore."""
    numbers = list(range(n))

    async def run() -> list[int]:
        semaphore = asyncio.Semaphore(cap)

        async def bounded(i: int) -> int:
            async with semaphore:
                return await handler(i)

        return await asyncio.gather(*[bounded(i) for i in numbers])

    return run


def by_semaphore_json(n: int, handler: Handler, cap: int) -> Pass:
    """The reference with the least that an executor of tool calls does around it."""
    registry = {"look": handler}
    emitted = [{"id": f"call_{i}", "name": "look", "arguments": json.dumps({"i": i})} for i in range(n)]

    async def answers() -> list[dict[str, str]]:
        semaphore = asyncio.Semaphore(cap)

        async def answer(call: dict[str, str]) -> dict[str, str]:
            async with semaphore:
                try:
                    value = await registry[call["name"]](**json.loads(call["arguments"]))
                    content = json.dumps(value)
                except Exception as error:
                    content = json.dumps({"error": type(error).__name__})
            return {"role": "tool", "tool_call_id": call["id"], "content": content}

        return await asyncio.gather(*[answer(call) for call in emitted])

    async def run() -> list[int]:
        return [int(message["content"]) for message in await answers()]

    return run


def make_tower(cap: int, observers: Sequence[Callable[[Event], None]] = (), **options: Any) -> Tower:
    """A tower with its default settings, but for the bounds that N calls would meet."""
    return Tower(
        max_concurrency=cap,
        run_concurrency=cap,
        max_calls_per_batch=PLENTY,
        max_queued=PLENTY,
        max_wait=LONG,
        max_batch_bytes=1 << 30,
        observers=observers,
        **options,
    )


def add_blocker(tower: Tower, **options: Any) -> None:
    """Declare `block`: a call that holds what it got for longer than any measurement lasts."""
    tower.add_tool(Sleeps(LONG).call, name="block", independent=True, timeout=LONG, **options)


def add_handler(
    tower: Tower, handler: Handler, keys: Keys, *, own_task: bool = True, name: str = "look", **more: Any
) -> None:
    """Declare the tool, and for `nested+subtree` another one that reads everything below a key."""
    declared: dict[Keys, dict[str, Any]] = {
        "none": {"independent": True},
        "flat": {"reads": "row:{i}"},
        "nested": {"reads": "desk/rows/{i}"},
        "nested+subtree": {"reads": "desk/rows/{i}"},
    }
    tower.add_tool(handler, name=name, own_task=own_task, **declared[keys], **more)
    if keys == "nested+subtree":

        async def survey(area: str) -> str:
            return area

        tower.add_tool(survey, reads="desk/{area}/**")


def message_of(n: int, name: str = "look") -> dict[str, Any]:
    """An OpenAI chat message with n tool calls."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"i": i})}}
        for i in range(n)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def calls_of(n: int, name: str = "look") -> list[Call]:
    """The same as Towerman's own calls."""
    return [Call(name, {"i": i}, f"call_{i}") for i in range(n)]


def furnish(
    cap: int,
    handler: Handler,
    keys: Keys = "none",
    *,
    own_task: bool = True,
    observers: Sequence[Callable[[Event], None]] = (),
    beside: Beside = "nothing",
) -> tuple[Tower, Budget | None]:
    """A tower with its one tool, and the budget of its runs. `beside`: what else of admission a call goes through."""
    options: dict[str, Any] = {}
    if beside == "journal":
        folder = tempfile.TemporaryDirectory(prefix="towerman-bench-")
        options["journal"] = str(Path(folder.name) / "journal.db")
    tower = make_tower(cap, observers, **options)
    if beside == "journal":
        weakref.finalize(tower, folder.cleanup)
    declared: dict[Beside, dict[str, Any]] = {
        "nothing": {},
        "rate": {"rate": Rate(PLENTY, per=1.0, burst=PLENTY)},
        "window": {"rate": Rate(100_000, per=0.001)},
        "budget": {},
        "breaker": {"breaker": True},
        "journal": {"read_only": False},
    }
    add_handler(tower, handler, keys, own_task=own_task, **declared[beside])
    return tower, Budget(calls=PLENTY, cost=1e9) if beside == "budget" else None


def by_towerman(
    n: int,
    handler: Handler,
    cap: int,
    *,
    keys: Keys = "none",
    own_task: bool = True,
    observers: Sequence[Callable[[Event], None]] = (),
    beside: Beside = "nothing",
) -> Pass:
    """Ours: calls in, results out."""
    tower, budget = furnish(cap, handler, keys, own_task=own_task, observers=observers, beside=beside)
    calls = calls_of(n)

    async def run() -> list[object]:
        async with tower.run(budget=budget) as run:
            batch = await run.execute(calls)
        return [result.value for result in batch]

    return run


def by_towerman_json(n: int, handler: Handler, cap: int, *, own_task: bool = True, beside: Beside = "nothing") -> Pass:
    """Ours: an OpenAI message in, its `tool` messages out."""
    tower, budget = furnish(cap, handler, own_task=own_task, beside=beside)
    message = message_of(n)

    async def run() -> list[int]:
        async with tower.run(budget=budget) as run:
            batch = await run.execute(message)
        return [int(str(one["content"])) for one in batch.messages("openai")]

    return run


def by_anyio(n: int, handler: Handler, cap: int) -> Pass:
    """anyio's capacity limiter around gather."""
    from anyio import CapacityLimiter

    numbers = list(range(n))

    async def run() -> list[int]:
        limiter = CapacityLimiter(cap)

        async def bounded(i: int) -> int:
            async with limiter:
                return await handler(i)

        return await asyncio.gather(*[bounded(i) for i in numbers])

    return run


def by_aiometer(n: int, handler: Handler, cap: int) -> Pass:
    """aiometer's run_all."""
    import aiometer

    calls = [functools.partial(handler, i) for i in range(n)]

    async def run() -> list[int]:
        return await aiometer.run_all(calls, max_at_once=cap)

    return run


Maker = Callable[[int, Handler, int], Pass]

_LIMITERS: dict[str, tuple[str, Maker]] = {
    "anyio limiter": ("anyio", by_anyio),
    "aiometer": ("aiometer", by_aiometer),
}


def limiters() -> tuple[dict[str, Maker], list[str]]:
    """The limiter libraries that are installed, and notes on those that are not."""
    found: dict[str, Maker] = {}
    missing: list[str] = []
    for name, (module, maker) in _LIMITERS.items():
        if importlib.util.find_spec(module) is None:
            missing.append(f"{name}: not installed, left out")
        else:
            found[name] = maker
    return found, missing


HARNESS = Path(__file__).resolve().parent.parent.parent / "shared" / "bench"
"""Where the peer benchmark lies when it is there; its prototypes are the anchors of the goals."""


def prototypes(*names: str) -> dict[str, Maker]:
    """The peer benchmark's prototypes of an admission core, where it is present."""
    if not (HARNESS / "adapters").is_dir():
        return {}
    sys.path.insert(0, str(HARNESS))
    try:
        module = importlib.import_module("adapters.admission")
    except ImportError:
        return {}
    finally:
        sys.path.remove(str(HARNESS))
    classes = {getattr(one, "name", None): one for one in vars(module).values() if isinstance(one, type)}

    def maker(kind: Any) -> Maker:
        def make(n: int, handler: Handler, cap: int) -> Pass:
            adapter = kind()
            adapter.prepare(n, handler, cap)
            run: Pass = adapter.run
            return run

        return make

    return {name: maker(classes[name]) for name in names if name in classes}


class Unfit(Exception):
    """A system gave wrong results: it is not measured."""


async def check(name: str, maker: Maker, n: int, cap: int, *, capped: bool = True) -> None:
    """Results right and in order, and exactly `cap` at once; else no time of it would mean anything.

    Raises:
        Unfit: with what was wrong.
    """
    watched = Sleeps(0.001)
    results = await maker(n, watched.call, cap)()
    if not isinstance(results, list) or results != list(range(n)):
        raise Unfit(f"{name}: results are wrong or out of order")
    if capped and watched.peak != min(cap, n):
        raise Unfit(f"{name}: {watched.peak} ran at once, not {min(cap, n)}")
