"""Emitted-order serializability (G4) on generated tools: a batch comes to what its calls come to one by one.

Theory. Hypothesis makes tools that declare this and that of a small forest of cells, or nothing, and batches of their
calls with random times. What a call does is written once, as a generator that says where it pauses: the reference
plays it without any pause, one call after another in emitted order; the tower plays it in virtual time. A call looks
at all that it declares when it starts and again before it writes, and writes in two halves with a pause between, so an
overlap that must not be shows in the cells, in a result, or in both.

A call may fail, before it wrote or half-way, for good or only in its first attempt, after which it rests; its time may
be over, and then it stops, cleans up, or is deaf and goes on until its own end; and it may make calls of its own on
what it declares.

House rules. Which calls conflict is said here in a few lines that share nothing with the rooms under test.

Not here: handlers on threads, `needs`, limits and cancel by the caller (test_stress.py), a fixed small world by hand
(test_rules.py).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kit import Stage, on_stage, retake, sound, whole_again

from towerman import Call, Context, Retry, ToolError, Tower

stage = pytest.fixture(on_stage)

CELLS = ("a", "a/p", "a/p/u", "a/p/v", "a/q", "b", "b/p")
TIMEOUT, GRACE = 4.0, 3.0
CLEANING, DEAF = 0.5, 10.0
"""How long a call cleans up once its time is over, so that it ends within grace, pauses and all; how long a deaf one
goes on, far beyond."""

Cells = dict[str, int]
Answer = tuple[str | None, int | None]
"""(code, value) of a result."""


# --- what is generated ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Touch:
    """What a tool declares of one place: a cell of its own, or one that an argument names."""

    place: str
    write: bool
    subtree: bool

    @property
    def template(self) -> str:
        """As a tool declares it."""
        return f"cell:{self.place}{'/**' if self.subtree else ''}"

    def of(self, one: str, two: str) -> Touch:
        """The same for a call with these arguments."""
        return Touch(self.place.format(one=one, two=two), self.write, self.subtree)

    def cells(self) -> Iterator[str]:
        """The cells that it reaches."""
        return (cell for cell in CELLS if cell == self.place or (self.subtree and cell.startswith(f"{self.place}/")))

    def meets(self, other: Touch) -> bool:
        """Do the two share a cell that one of them writes?"""
        return (self.write or other.write) and not set(self.cells()).isdisjoint(other.cells())


@dataclass(frozen=True)
class Spec:
    """A tool.

    Attributes:
        kind: `declared`, `independent`, `undeclared` or `sequential`.
        touches: what it declares. What declares nothing may touch anything, and touches these too, undeclared.
        timed: its time is over after `TIMEOUT`; the others have all the time there is, and may make calls.
        own_task: the option of that name.
        retry: its calls are tried twice, if they lose what they talk to.
    """

    kind: str
    touches: tuple[Touch, ...]
    timed: bool
    own_task: bool
    retry: bool = False

    def options(self) -> dict[str, Any]:
        """As the tool is declared."""
        options: dict[str, Any] = {"timeout": TIMEOUT if self.timed else 1e9, "own_task": self.own_task}
        if self.retry:
            options |= {"idempotent": True, "retry": Retry(2, initial_delay=2.0, retry_on=(ConnectionError,))}
        match self.kind:
            case "declared":
                options["reads"] = [touch.template for touch in self.touches if not touch.write] or None
                options["writes"] = [touch.template for touch in self.touches if touch.write] or None
            case "independent" | "sequential":
                options[self.kind] = True
        return options


@dataclass(frozen=True)
class Step:
    """A call, and what it is to do."""

    number: int
    tool: int
    spec: Spec
    one: str
    two: str
    script: str
    pauses: tuple[float, float, float]
    inner: tuple[Step, ...] = ()

    @property
    def touches(self) -> tuple[Touch, ...]:
        """The places that this call touches."""
        return tuple(touch.of(self.one, self.two) for touch in self.spec.touches)

    def reads(self) -> list[str]:
        """The cells that it looks at: those that it writes, too."""
        if self.spec.kind in ("undeclared", "sequential"):
            return list(CELLS)
        return sorted({cell for touch in self.touches for cell in touch.cells()})

    def writes(self) -> list[str]:
        """The cells that it writes."""
        return sorted({cell for touch in self.touches if touch.write for cell in touch.cells()})

    def conflicts(self, other: Step, *, coarse: bool = False) -> bool:
        """Must the later of the two wait for the earlier?

        Args:
            other: another call of its run.
            coarse: as it is for a tower, for which who reads a subtree and writes within it has all of it.
        """
        kinds = {self.spec.kind, other.spec.kind}
        if "independent" in kinds:
            return False
        if kinds != {"declared"}:
            return True
        ours, theirs = (self.coarse(), other.coarse()) if coarse else (self.touches, other.touches)
        return any(mine.meets(its) for mine in ours for its in theirs)

    def coarse(self) -> list[Touch]:
        """What it touches; a subtree that it reads is written where it writes something below."""
        written = [f"{touch.place}/" for touch in self.touches if touch.write]
        return [
            replace(
                touch,
                write=touch.write or (touch.subtree and any(one.startswith(f"{touch.place}/") for one in written)),
            )
            for touch in self.touches
        ]

    def covers(self, inner: Step) -> bool:
        """Is all that such a call touches declared by this one, as its caller?"""
        if inner.spec.kind == "independent" or self.spec.kind in ("undeclared", "sequential"):
            return True
        return (
            inner.spec.kind == "declared"
            and set(inner.reads()) <= set(self.reads())
            and (set(inner.writes()) <= set(self.writes()))
        )

    def whole(self) -> Iterator[Step]:
        """This one and all below it."""
        yield self
        for one in self.inner:
            yield from one.whole()


PLACES = st.sampled_from(["{one}", "{one}", "{two}", *CELLS])
TOUCHES = st.builds(Touch, PLACES, st.booleans(), st.booleans())


def specs(kinds: Sequence[str]) -> st.SearchStrategy[Spec]:
    """Tools of these kinds."""
    return st.sampled_from(kinds).flatmap(
        lambda kind: st.builds(
            Spec,
            st.just(kind),
            st.just(()) if kind == "independent" else st.lists(TOUCHES, min_size=1, max_size=3).map(tuple),
            st.booleans(),
            st.booleans(),
            st.booleans(),
        )
    )


@dataclass(frozen=True)
class Case:
    """A tower's tools, its limits, and the batches of one run, handed in one after another."""

    tools: tuple[Spec, ...]
    batches: tuple[tuple[Step, ...], ...]
    max_concurrency: int
    run_concurrency: int

    def steps(self) -> list[Step]:
        """The calls of all batches, those below others left out."""
        return [step for batch in self.batches for step in batch]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A case; what a call calls is declared by its caller."""
    tools = (
        *draw(st.lists(specs(["declared"] * 5 + ["undeclared", "sequential", "independent"]), min_size=2, max_size=6)),
        Spec("independent", (), timed=False, own_task=True),
    )
    count = 0

    def step(caller: Step | None, depth: int) -> Step:
        nonlocal count
        count += 1
        tool = draw(st.integers(0, len(tools) - 1))
        spec = tools[tool]
        places = st.sampled_from(CELLS if caller is None else caller.reads() or CELLS)
        scripts = ["works"] * 6 + ["breaks", "breaks half-way"]
        if spec.timed:
            scripts += ["stops", "cleans up"]
            if caller is None:
                scripts.append("is deaf")
        if spec.retry:
            scripts += ["flaky", "flaky half-way"] * 2
        pauses = draw(st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 3))
        made = Step(count, tool, spec, draw(places), draw(places), draw(st.sampled_from(scripts)), pauses)
        if caller is not None and not caller.covers(made):
            made = Step(count, len(tools) - 1, tools[-1], made.one, made.two, "works", pauses)
        if made.spec.timed or made.script == "flaky half-way" or not depth or draw(st.integers(0, 2)):
            return made
        inner = tuple(step(made, depth - 1) for _ in range(draw(st.integers(1, 3))))
        return Step(made.number, made.tool, made.spec, made.one, made.two, made.script, pauses, inner)

    batches = tuple(
        tuple(step(None, 2) for _ in range(draw(st.integers(2, 7)))) for _ in range(draw(st.integers(1, 2)))
    )
    limits = st.sampled_from([1, 2, 3, 100])
    return Case(tools, batches, draw(limits), draw(limits))


# --- what a call does, played twice -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pause:
    """It takes so long."""

    seconds: float


@dataclass(frozen=True)
class Overdue:
    """It takes longer than its time."""

    how: str


@dataclass(frozen=True)
class Inner:
    """It makes these calls, and goes on with their answers."""

    steps: tuple[Step, ...]


Play = Generator[Pause | Overdue | Inner, Any, int]


class Stopped(Exception):
    """Its time is over, and it stops where it is."""


def digest(*parts: object) -> int:
    """A number that stands for all of these."""
    return zlib.crc32(repr(parts).encode())


def play(step: Step, cells: Cells, attempt: int) -> Play:
    """What an attempt of a call does, from its start to its end."""
    first, second, third = step.pauses
    reads, writes = step.reads(), step.writes()
    seen = [cells[cell] for cell in reads]
    yield Pause(first)
    if step.script == "flaky" and attempt == 1:
        raise ConnectionError
    if step.script == "breaks":
        raise ToolError("it broke")
    answers = (yield Inner(step.inner)) if step.inner else []
    if step.script in ("stops", "cleans up", "is deaf"):
        yield Overdue(step.script)
    yield Pause(second)
    value = digest(step.number, seen, [cells[cell] for cell in reads], answers)
    half = len(writes) // 2
    for cell in writes[:half]:
        cells[cell] = digest(cell, value)
    yield Pause(third)
    if step.script == "flaky half-way" and attempt == 1:
        raise ConnectionError
    if step.script == "breaks half-way":
        raise ToolError("it broke half-way")
    for cell in writes[half:]:
        cells[cell] = digest(cell, value)
    return value


def one_by_one(step: Step, cells: Cells, attempt: int = 1) -> Answer:
    """Play a call without any pause, one attempt after the other, and those that it makes in emitted order."""
    told = play(step, cells, attempt)
    answers: Any = None
    late = False
    try:
        while True:
            doing = told.send(answers)
            answers = None
            match doing:
                case Inner(steps):
                    answers = [one_by_one(inner, cells) for inner in steps]
                case Overdue(how):
                    late = True
                    if how == "stops":
                        told.throw(Stopped)
    except ConnectionError:
        return one_by_one(step, cells, attempt + 1)
    except ToolError:
        return "handler_error", None
    except Stopped:
        return "handler_timeout", None
    except StopIteration as end:
        return ("handler_timeout", None) if late else (None, end.value)


@dataclass
class World:
    """The cells under a tower, and when each call came on and went off."""

    stage: Stage
    tower: Tower
    cells: Cells
    steps: dict[int, Step]
    came: dict[int, float] = field(default_factory=dict)
    went: dict[int, float] = field(default_factory=dict)

    def handler(self) -> Callable[..., Any]:
        """The handler of every tool."""

        async def handler(ctx: Context[None], number: int, one: str, two: str) -> int:
            step = self.steps[number]
            assert number not in self.came or ctx.attempt > 1, "a call was made twice"
            self.came.setdefault(number, self.stage.clock.value)
            self.stage.tell(f"{number} comes on")
            try:
                return await self.in_time(step, ctx)
            finally:
                self.went[number] = self.stage.clock.value
                self.stage.tell(f"{number} goes off")

        return handler

    async def in_time(self, step: Step, ctx: Context[None]) -> int:
        """Play a call in virtual time."""
        told = play(step, self.cells, ctx.attempt)
        answers: Any = None
        while True:
            try:
                doing = told.send(answers)
            except StopIteration as end:
                return int(end.value)
            answers = None
            match doing:
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case Overdue("is deaf"):
                    await self.stage.stubborn(f"{step.number}", DEAF)
                case Overdue(how):
                    try:
                        await asyncio.sleep(DEAF)
                    except asyncio.CancelledError:
                        if how == "stops":
                            raise
                        await asyncio.sleep(CLEANING)
                case Inner(steps):
                    calls = calls_of(steps)
                    done = await ctx.execute(calls)
                    sound(done, calls)
                    answers = [(result.code, result.value) for result in done]


def calls_of(steps: Sequence[Step]) -> list[Call]:
    """The batch of these calls."""
    return [
        Call(f"tool{step.tool}", {"number": step.number, "one": step.one, "two": step.two}, f"c{step.number}")
        for step in steps
    ]


def due(case: Case, step: Step, world: World, began: float, *, coarse: bool = False) -> float:
    """When a call can start: once every earlier call of its run that it conflicts with is over, orphans too."""
    earlier = [one for one in case.steps() if one.number < step.number and step.conflicts(one, coarse=coarse)]
    return max([began, *(world.went[one.number] for one in earlier)])


# --- the promise ------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(case=cases())
def test_g4_any_batch_comes_to_what_its_calls_come_to_one_by_one(case: Case) -> None:
    """G4, G1, G7, S1, S9, S10: whatever tools declare of keys and subtrees, or do not declare, and however long
    their calls take, fail, are tried again, run out of time or call one another: each result and the state at the
    end are those of the calls made one by one in emitted order. And nobody waits who need not: where the limits are
    wide, each call starts as soon as the last earlier one that it conflicts with is over.
    """
    cells = {cell: place for place, cell in enumerate(CELLS)}
    expected_cells = dict(cells)
    expected = [[one_by_one(step, expected_cells) for step in batch] for batch in case.batches]

    stage = Stage()
    tower = stage.tower(
        max_concurrency=case.max_concurrency, run_concurrency=case.run_concurrency, max_wait=1e9, grace=GRACE
    )
    everyone = [step for top in case.steps() for step in top.whole()]
    world = World(stage, tower, cells, {step.number: step for step in everyone})
    for place, spec in enumerate(case.tools):
        tower.add_tool(world.handler(), name=f"tool{place}", **spec.options())
    began: dict[int, float] = {}

    async def main() -> None:
        async with tower.run() as run:
            for batch, answers in zip(case.batches, expected, strict=True):
                began.update((step.number, stage.clock.value) for step in batch)
                calls = calls_of(batch)
                done = await run.execute(calls)
                sound(done, calls)
                assert [(result.code, result.value) for result in done] == answers
        await stage.settled(tower)

    try:
        stage.run(main())
        assert cells == expected_cells
        for step in case.steps():
            came = world.came[step.number]
            assert came >= due(case, step, world, began[step.number]), f"call {step.number} was early"
            if min(case.max_concurrency, case.run_concurrency) >= 100:
                assert came <= due(case, step, world, began[step.number], coarse=True), f"call {step.number} was late"
        whole_again(tower)
        stage.run(retake(tower))
    except BaseException as failure:
        failure.add_note("the story:\n" + "\n".join(stage.story))
        raise
    finally:
        tower._core.workers.close()
        tower._courier.close()
    for script in {step.script for step in everyone}:
        event(f"a call {script}")
    for kind in {step.spec.kind for step in everyone}:
        event(f"a call is {kind}")
    if any(step.inner for step in everyone):
        event("a call makes calls")
    spans = [(world.came[step.number], world.went[step.number]) for step in case.steps()]
    if any(one[0] < two[1] and two[0] < one[1] for place, one in enumerate(spans) for two in spans[:place]):
        event("calls overlap")


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("limit", [1, 8])
def test_g4_s10_nobody_passes_what_a_nested_call_left_at_work(stage: Stage, limit: int, declared: bool) -> None:
    """G4, G7, S10: a call ends while one that it made goes on, deaf, after its result: the next call on what that one
    writes starts when it has really ended, in the same batch and in the next, so nothing is written over.
    """
    tower = stage.tower(max_concurrency=limit, max_wait=1e9, grace=GRACE)
    written: list[tuple[str, float]] = []
    writes = {"writes": "cell:a/p"} if declared else {}

    @tower.tool(**writes, timeout=TIMEOUT)
    async def deaf() -> None:
        await stage.stubborn("deaf", DEAF)
        written.append(("deaf", stage.clock.value))

    @tower.tool(**({"writes": "cell:a/**"} if declared else {}))
    async def caller(ctx: Context[None]) -> str | None:
        (inner,) = await ctx.execute([Call("deaf", {})])
        assert inner.still_running
        return inner.code

    @tower.tool(**writes)
    async def after(name: str) -> None:
        written.append((name, stage.clock.value))

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute([Call("caller", {}), Call("after", {"name": "sibling"})])
            second = await run.execute([Call("after", {"name": "next batch"})])
            assert [result.value for result in (*first, *second)] == ["handler_timeout", None, None]
            assert first.ok and second.ok

    stage.run(main())
    assert written == [("deaf", DEAF), ("sibling", DEAF), ("next batch", DEAF)]


def test_g4_s10_the_next_batch_waits_too(stage: Stage) -> None:
    """G4, G7, S10: the same where no sibling stands between: the batch itself is over long before."""
    tower = stage.tower(max_wait=1e9, grace=GRACE)
    written: list[str] = []

    @tower.tool(writes="cell:a/p", timeout=TIMEOUT)
    async def deaf() -> None:
        await stage.stubborn("deaf", DEAF)
        written.append("deaf")

    @tower.tool(writes="cell:a/**")
    async def caller(ctx: Context[None]) -> None:
        await ctx.execute([Call("deaf", {})])

    @tower.tool(writes="cell:a/p")
    async def after() -> None:
        written.append("after")

    async def main() -> None:
        async with tower.run() as run:
            assert (await run.execute([Call("caller", {})])).ok
            assert stage.clock.value == TIMEOUT + GRACE
            assert (await run.execute([Call("after", {})])).ok

    stage.run(main())
    assert written == ["deaf", "after"]
    assert stage.clock.value == DEAF
