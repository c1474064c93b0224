"""Random stress of whole towers on virtual time.

Each seed makes a small world: a tower with limits, tools of every kind, runs, batches, and what goes wrong with them.
Handlers look, from inside,
whether they may be at work at this instant, by rules that are written here anew and far more simply than in the rooms
under test. Whenever nothing can go
on, what the tower says it holds must be exactly what is at work. At the end everything has one result and everything
is there again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import pytest
from kit import Stage, VirtualLoop, retake, sound, whole_again

from towerman import (
    ApprovalRequest,
    Approved,
    Budget,
    Call,
    Denied,
    Event,
    Pool,
    Rate,
    Result,
    Run,
    ToolError,
    Tower,
)

CI_WORLDS = 400
CHUNKS = 10


STEPS = ("admitted", "started", "finished", "rejected", "orphaned", "late_result", "ended")
"""Steps of a call in the order in which they may come."""

# ==================================================================== the rules, said simply


@dataclass(frozen=True)
class Touch:
    """A resource path that is touched."""

    path: str
    write: bool
    subtree: bool

    def meets(self, other: Touch) -> bool:
        """Do the two overlap, one of them writing?"""
        if not (self.write or other.write):
            return False
        return (
            self.path == other.path
            or (self.subtree and other.path.startswith(self.path + "/"))
            or (other.subtree and self.path.startswith(other.path + "/"))
        )


@dataclass(frozen=True)
class Spec:
    """What a tool of this world declares."""

    name: str
    kind: str  # independent, ordered, exclusive, declared
    touches: tuple[tuple[str, bool, bool], ...] = ()  # (argument, write, subtree)
    weight: int = 1
    pools: tuple[tuple[str, int], ...] = ()
    limit: int | None = None
    effect_free: bool = False
    only_call: bool = False
    late: bool = False
    sync: bool = False
    rate: Rate | None = None
    gated: bool = False


@dataclass(eq=False)
class Job:
    """A call of this world: what its handler is to do, and what became of it."""

    number: int
    spec: Spec
    run: int
    tenant: str
    run_limit: int
    batch: int
    index: int
    script: str
    seconds: float
    touches: tuple[Touch, ...] = ()
    needs: tuple[int, ...] = ()
    entered: float | None = None
    left: float | None = None
    returned: bool = False
    result: Result | None = None
    released: bool = False

    def conflicts(self, other: Job) -> bool:
        """May the two not be at work together?"""
        one, two = self.spec.kind, other.spec.kind
        if "independent" in (one, two):
            return False
        if "exclusive" in (one, two):
            return True
        if "ordered" in (one, two) and self.run == other.run:
            return True
        return any(mine.meets(theirs) for mine in self.touches for theirs in other.touches)


@dataclass(eq=False)
class World:
    """One seed's tower and all that happens in it."""

    seed: int
    stage: Stage
    patient: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)
    working: dict[Job, None] = field(default_factory=dict)
    specs: list[Spec] = field(default_factory=list)
    batches: list[list[Job | None]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    late_tools: list[Callable[[], None]] = field(default_factory=list)
    orphans: int = 0
    starts: dict[str, list[float]] = field(default_factory=dict)
    budgets: dict[int, int] = field(default_factory=dict)
    spent: Counter[int] = field(default_factory=Counter)
    approved: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tower = self._tower()
        for _ in range(self.random.randint(3, 9)):
            self._tool()

    # ---------------------------------------------------------------- making it

    def chance(self, share: float) -> bool:
        """True so often."""
        return self.random.random() < share

    def _tower(self) -> Tower:
        pick = self.random
        self.patient = self.chance(0.4)
        self.max_concurrency = pick.choice([1, 2, 3, 4, 6, 12])
        self.pools: dict[str, Pool] = {}
        for name in ("crm", "db", "web")[: pick.randint(0, 3)]:
            permits = pick.randint(1, 4)
            self.pools[name] = Pool(
                permits,
                scope=pick.choice(["process", "process", "run", "tenant"]),
                reserve=pick.randint(0, permits - 1) if self.chance(0.3) else 0,
                max_queued=None if self.patient or self.chance(0.7) else pick.randint(0, 5),
                rate=self._rate() if self.chance(0.3) else None,
            )
        self.undeclared = pick.choice(["ordered", "ordered", "independent", "exclusive"])
        self.on_orphan = pick.choice(["hold", "hold", "release"])
        self.on_excess = pick.choice(["tell", "queue"])
        self.most = pick.choice([5, 25, 100])
        self.grace = pick.choice([0.0, 0.5, 2.0])
        return self.stage.tower(
            max_concurrency=self.max_concurrency,
            run_concurrency=pick.choice([1, 2, 3, 8]),
            pools=self.pools,
            max_calls_per_batch=self.most,
            on_excess=self.on_excess,
            undeclared=self.undeclared,
            when_busy="wait" if self.patient or self.chance(0.8) else "reject",
            max_wait=1e9 if self.patient else pick.choice([0.5, 3.0, 30.0]),
            max_queued=10**6 if self.patient or self.chance(0.7) else pick.randint(0, 10),
            timeout=1e9 if self.patient else pick.choice([0.7, 3.0, 300.0]),
            grace=self.grace,
            on_orphan=self.on_orphan,
            observers=[self.events.append] if self.chance(0.3) else [],
        )

    def _rate(self) -> Rate:
        """Any rate that lets a world end some day."""
        pick = self.random
        limit = pick.randint(1, 6)
        return Rate(limit, pick.choice([0.1, 0.5, 2.0]), pick.choice([None, None, 1, 4]), 0)

    def _tool(self) -> None:
        pick = self.random
        name = f"tool{len(self.specs)}"
        options: dict[str, Any] = {}
        kind = pick.choice(["independent", "undeclared", "sequential", "read", "write", "both", "tree", "callable"])
        touches: tuple[tuple[str, bool, bool], ...] = ()
        match kind:
            case "independent":
                options["independent"] = True
            case "sequential":
                options["sequential"] = True
            case "read":
                options["reads"] = "r:{a}"
                touches = (("a", False, False),)
            case "write":
                options["writes"] = "r:{a}"
                touches = (("a", True, False),)
            case "both":
                options |= {"reads": "r:{b}", "writes": ["r:{a}"]}
                touches = (("b", False, False), ("a", True, False))
            case "tree":
                write = self.chance(0.5)
                options["writes" if write else "reads"] = "r:{a}/**"
                touches = (("a", write, True),)
            case "callable":
                options["writes"] = lambda a, b: [f"r:{a}", f"r:{b}"] if a != b else []
                touches = (("a", True, False), ("b", True, False))
        if kind in ("read", "tree") and self.chance(0.2):
            options["sequential"] = True
        pools = {
            key: pick.randint(1, pool.permits - pool.reserve) for key, pool in self.pools.items() if pick.random() < 0.4
        }
        sync = self.chance(0.15)
        spec = Spec(
            name=name,
            kind="ordered"
            if options.get("sequential")
            else "independent"
            if kind == "independent"
            else self.undeclared
            if kind == "undeclared"
            else "declared",
            touches=touches,
            weight=pick.randint(1, min(3, self.max_concurrency)) if self.chance(0.3) else 1,
            pools=tuple(pools.items()),
            limit=pick.randint(1, 3) if self.chance(0.3) else None,
            effect_free=kind in ("read", "tree") and "reads" in options and not options.get("sequential"),
            only_call=self.chance(0.05),
            late=self.chance(0.2),
            sync=sync,
            rate=self._rate() if self.chance(0.15) else None,
            gated=self.chance(0.12),
        )
        options["rate"] = spec.rate
        options["requires_approval"] = spec.gated
        options |= {"pools": pools or None, "weight": spec.weight, "max_concurrency": spec.limit}
        options["only_call"] = spec.only_call
        if kind in ("independent", "undeclared") and self.chance(0.3):
            options["read_only"] = True
            spec = Spec(**{**spec.__dict__, "effect_free": True})
        if not self.patient:
            options["timeout"] = pick.choice([None, None, 0.4, 2.0])
            options["max_wait"] = pick.choice([None, None, 0.3, 5.0])
            options["when_busy"] = pick.choice([None, None, None, "reject", "wait"])
            options["max_queued"] = pick.choice([None, None, None, 0, 3])
        if self.chance(0.3):
            options["own_task"] = False
        self.specs.append(spec)
        handler = self._sync_handler(spec) if sync else self._async_handler(spec)
        declare: Callable[[], None] = lambda: self.tower.add_tool(handler, name=name, **options)  # noqa: E731
        if spec.late:
            self.late_tools.append(declare)
        else:
            declare()

    def _async_handler(self, spec: Spec) -> Callable[..., Any]:
        async def handler(n: int, a: str, b: str) -> str:
            job = self.jobs[n]
            self.enter(job, spec)
            try:
                match job.script:
                    case "ok" | "now":
                        if job.script == "ok":
                            await asyncio.sleep(job.seconds)
                    case "fail":
                        await asyncio.sleep(job.seconds)
                        raise ToolError("it did not work")
                    case "break":
                        raise ValueError("broken")
                    case "cancel itself":
                        await asyncio.sleep(job.seconds)
                        raise asyncio.CancelledError
                    case "cancel its task":
                        task = asyncio.current_task()
                        assert task is not None
                        task.cancel()
                    case "ignore":
                        await self._ignore_cancel(job.seconds)
                    case "clean up":
                        try:
                            await asyncio.sleep(job.seconds)
                        finally:
                            await self._ignore_cancel(job.seconds)
                    case "swallow":
                        try:
                            await asyncio.sleep(job.seconds)
                        except asyncio.CancelledError:
                            pass
                job.returned = True
                return f"value of {n}"
            finally:
                self.leave(job)

        return handler

    async def _ignore_cancel(self, seconds: float) -> None:
        clock = self.stage.clock
        until = clock.value + seconds
        while clock.value < until:
            try:
                await asyncio.sleep(until - clock.value)
            except asyncio.CancelledError:
                pass

    def _sync_handler(self, spec: Spec) -> Callable[..., Any]:
        def handler(n: int, a: str, b: str) -> str:
            job = self.jobs[n]
            self.enter(job, spec)
            try:
                if job.script not in ("now", "break"):
                    self.stage.rest(self.loop, job.seconds)
                if job.script in ("fail", "break"):
                    raise ValueError("broken")
                job.returned = True
                return f"value of {n}"
            finally:
                self.leave(job)

        return handler

    # ---------------------------------------------------------------- looking, from inside the handlers

    def enter(self, job: Job, spec: Spec) -> None:
        """The handler's first line, on the loop or on a thread."""
        with self.stage._lock:
            self._enter(job, spec)

    def _enter(self, job: Job, spec: Spec) -> None:
        told = f"seed {self.seed}: call {job.number} ({spec}) at {self.stage.clock.value}"
        self.must(job.entered is None, f"{told} starts twice")
        self.must(job.spec is spec, f"{told} is run by the wrong handler")
        # A thread that has only just taken its call may be given up before its first line, which it then reaches.
        late = job.result is not None and not (spec.sync and job.result.still_running)
        self.must(not late, f"{told} starts after its result {job.result!r}")
        job.entered = self.stage.clock.value
        self.stage.tell(f"+ call {job.number} {spec.name} of run {job.run} batch {job.batch} index {job.index}")
        for other in self.working:
            clash = not other.released and job.conflicts(other)
            self.must(not clash, f"{told} overlaps call {other.number} ({other.spec}) of run {other.run}")
        batch = self.batches[job.batch]
        for index in job.needs:
            needed = batch[index]
            open_need = needed is None or needed.result is None or not needed.result.ok
            self.must(not open_need, f"{told}: need {index} is open")
        self.working[job] = None
        self.limits(told)
        self.rates(job, told)
        self.spent[job.run] += 1
        most = self.budgets.get(job.run)
        self.must(most is None or self.spent[job.run] <= most, f"{told}: {self.spent[job.run]} starts of {most}")
        asked = (job.run, f"{job.batch}/{job.number}")
        self.must(not spec.gated or asked in self.approved, f"{told}: nobody has approved it")

    def leave(self, job: Job) -> None:
        """The handler's last line."""
        with self.stage._lock:
            job.left = self.stage.clock.value
            self.stage.tell(f"- call {job.number}")
            del self.working[job]

    def must(self, holds: bool, told: str) -> None:
        """Inside a handler: what does not hold is kept, since a handler's exception is only its call's result."""
        if not holds:
            self.failures.append(told)
            raise AssertionError(told)

    def limits(self, told: str) -> None:
        """No limit is exceeded at this instant (G3, R-46)."""
        at_work = [job for job in self.working if not job.released]
        used: Counter[str] = Counter()
        most: dict[str, int] = {"process": self.max_concurrency}
        for job in at_work:
            used["process"] += job.spec.weight
            used[f"run {job.run}"] += 1
            most[f"run {job.run}"] = job.run_limit
            if job.spec.limit is not None:
                used[job.spec.name] += 1
                most[job.spec.name] = job.spec.limit
            for name, permits in job.spec.pools:
                pool = self.pools[name]
                key = {"process": name, "run": f"{name} of run {job.run}", "tenant": f"{name} of {job.tenant}"}[
                    pool.scope
                ]
                used[key] += permits
                most[key] = pool.permits
        for key, units in used.items():
            self.must(units <= most[key], f"{told}: {units} of {most[key]} {key}")

    def rates(self, job: Job, told: str) -> None:
        """No window holds more starts than it may, and no burst is larger (S7, R-91)."""
        counted = [] if job.spec.rate is None else [(job.spec.name, job.spec.rate)]
        for name, _ in job.spec.pools:
            pool = self.pools[name]
            whose = {"process": "", "run": f" of run {job.run}", "tenant": f" of {job.tenant}"}[pool.scope]
            if pool.rate is not None:
                counted.append((name + whose, pool.rate))
        now = self.stage.clock.value
        for key, rate in counted:
            starts = self.starts.setdefault(key, [])
            starts.append(now)
            if rate.burst is None:
                inside = sum(start > now - rate.per + 1e-6 for start in starts)
                self.must(inside <= rate.limit, f"{told}: {inside} starts of {rate} of {key}")
            for number, start in enumerate(reversed(starts), 1):
                most = (rate.burst or rate.limit) + (now - start + 1e-6) * rate.limit / rate.per
                # Whoever waits to begin on a thread begins a moment after it was let in.
                self.must(rate.burst is None or number <= most + 1, f"{told}: {number} starts of {rate} of {key}")

    def before_jump(self) -> None:
        """Nothing can go on: what the tower says is held must be what is at work, and every granted call has
        started.
        """
        at_work = [job for job in self.working if not job.released]
        seen = self.tower.statistics()
        told = f"seed {self.seed} at {self.stage.clock.value}: {seen}"
        assert seen.pools["process"].held == sum(job.spec.weight for job in at_work), told
        assert seen.running == sum(job.result is None for job in at_work), told
        assert seen.orphans == sum(job.result is not None for job in self.working), told

    # ---------------------------------------------------------------- what happens

    async def decide(self, run: int, request: ApprovalRequest) -> Approved | Denied | None:
        """A person: takes their time, and says anything."""
        pick = self.random
        n = request.arguments["n"]
        assert isinstance(n, int)
        await asyncio.sleep(pick.choice([0.0, 0.1, 0.4, 2.0]))
        word = pick.choice(["yes", "yes", "yes", "no", "later", "raise"])
        if word == "raise":
            raise ValueError
        if word == "yes":
            self.approved.add((run, f"{self.jobs[n].batch}/{n}"))
            return Approved()
        return Denied("no") if word == "no" else None

    def path(self) -> str:
        """A resource path, few of them, some above others."""
        return self.random.choice(["x", "y", "x/1", "x/2", "x/1/p", "y/1"])

    def call(self, run: int, tenant: str, run_limit: int, batch: int, index: int) -> tuple[Call, Job | None]:
        """A random call; no Job for one that cannot be run."""
        if self.chance(0.04):
            bad = self.random.choice(["unknown", "broken", "missing"])
            if bad == "unknown":
                return Call("nobody", {"n": 1}, f"c{index}"), None
            return Call(self.specs[0].name, "{" if bad == "broken" else {"n": 1}, f"c{index}"), None
        spec = self.random.choice(self.specs)
        number = len(self.jobs)
        a, b = self.path(), self.path()
        scripts = ["ok"] * 12 + ["now"] * 3 + ["fail", "break", "cancel itself", "cancel its task"]
        scripts += ["ignore", "clean up", "swallow"]
        touches = tuple(Touch({"a": a, "b": b}[name], write, tree) for name, write, tree in spec.touches)
        if spec.touches == (("a", True, False), ("b", True, False)) and a == b:
            touches = ()
        job = Job(
            number=number,
            spec=spec,
            run=run,
            tenant=tenant,
            run_limit=run_limit,
            batch=batch,
            index=index,
            script=self.random.choice(scripts),
            seconds=self.random.choice([0.1, 0.2, 0.5, 1.0, 1.0, 3.0]),
            touches=touches,
        )
        self.jobs[number] = job
        arguments: Any = {"n": number, "a": a, "b": b}
        return Call(spec.name, json.dumps(arguments) if self.chance(0.5) else arguments, f"c{index}"), job

    async def one_batch(self, run: Run, number: int, tenant: str, run_limit: int, *, allowed: bool) -> None:
        """Hand in one random batch, perhaps give up waiting for it, and look at what it came to."""
        pick = self.random
        size = pick.choice([0, 1, 1, 2, 3, 5, 8, 8, 20, 40])
        batch = len(self.batches)
        jobs: list[Job | None] = []
        self.batches.append(jobs)
        calls: list[Call] = []
        with_needs = self.chance(0.3)
        for index in range(size):
            call, job = self.call(number, tenant, run_limit, batch, index)
            if with_needs and size > 1 and self.chance(0.4):
                # Needs may point ahead too, in an order that is drawn once for the batch and has no circle.
                places = random.Random(f"{self.seed}-{batch}").sample(range(size), size)
                lower = [other for other in range(size) if places[other] < places[index]]
                needs = tuple(pick.sample(lower, min(len(lower), pick.randint(1, 2))))
                call = Call(call.tool, call.arguments, call.id, [f"c{other}" for other in needs])
                if job is not None:
                    job.needs = needs
            calls.append(call)
            jobs.append(job)
        sealed: dict[int, Result] = {}

        def seen(result: Result) -> None:
            assert result.index not in sealed, f"seed {self.seed}: two results for call {result.index}"
            sealed[result.index] = result
            job = jobs[result.index]
            if job is not None:
                job.result = result
                if result.still_running:
                    self.orphans += 1
                    job.released = self.on_orphan == "release"

        gives_up = None if self.chance(0.75) else pick.choice([0.0, 0.05, 0.3, 1.0, 4.0])
        came = self.stage.clock.value
        task = asyncio.ensure_future(run.execute(calls, on_result=seen))
        if gives_up is not None:
            await asyncio.wait([task], timeout=gives_up)
            if not task.done():
                for _ in range(pick.randint(1, 3)):
                    task.cancel()
                    for _ in range(pick.randint(0, 2)):
                        await asyncio.sleep(0)
                gave_up = self.stage.clock.value
                await asyncio.wait([task])
                late = self.stage.clock.value - gave_up - self.grace
                assert late <= 1e-6, f"seed {self.seed}: the caller waited {late} s too long after giving up"
        try:
            done = await task
            assert [result.index for result in done] == list(range(size))
            if size:
                assert all(one is sealed[one.index] or one.content != sealed[one.index].content for one in done)
        except asyncio.CancelledError:
            assert gives_up is not None, f"seed {self.seed}: a cancel that nobody sent reached the caller"
        results = [sealed[index] for index in range(size)]
        sound(results, calls)
        for job, result in zip(jobs, results, strict=True):
            if job is not None and job.entered is not None and not result.still_running:
                assert job.left is not None, f"seed {self.seed}: {result!r} was sealed as ended and goes on"
        self.story_of(jobs, results, came, with_needs, allowed)

    def story_of(
        self, jobs: list[Job | None], results: list[Result], came: float, with_needs: bool, allowed: bool
    ) -> None:
        """What the batch came to makes sense."""
        told = f"seed {self.seed}"
        codes = {result.code for result in results}
        if self.patient:
            assert not codes & {"wait_timeout", "queue_full", "concurrency_limit", "rate_limited", "handler_timeout"}, (
                f"{told}: {codes}"
            )
        if allowed:
            assert "permission_denied" not in codes, told
        for job, result in zip(jobs, results, strict=True):
            if job is None:
                assert result.code in (
                    "unknown_tool", "invalid_arguments", "call_cap", "cancelled", "sibling_failed", "run_closed",
                    "permission_denied", "not_alone", "budget_exhausted",
                ), f"{told}: {result!r}"  # fmt: skip
                continue
            if result.ok:
                assert result.value == f"value of {job.number}", f"{told}: the answer of another call"
                assert result.applied == ("no" if job.spec.effect_free else "yes"), told
            elif result.started and job.script != "fail":
                assert result.applied == ("no" if job.spec.effect_free else "unknown"), f"{told}: {result!r}"
            if result.code == "handler_cancelled":
                assert "cancel" in job.script, f"{told}: {result!r} was cancelled by another's handler"
            if result.outcome == "error":
                assert job.script in ("fail", "break", "cancel itself", "cancel its task"), f"{told}: {result!r}"
            if result.outcome == "skipped":
                assert any(not results[need].ok for need in job.needs), f"{told}: {result!r} skipped for nothing"
            if result.code == "not_alone":
                assert job.spec.only_call and len(results) > 1, told
        self.order(jobs, told)

    def order(self, jobs: list[Job | None], told: str) -> None:
        """Conflicting calls of one batch started in emitted order, or in that which `needs` asks for (G4, S1)."""
        size = len(jobs)
        needs = [set(job.needs) if job is not None else set() for job in jobs]
        left = [len(wanted) for wanted in needs]
        ready = [index for index in range(size) if not left[index]]
        heapify(ready)
        place: dict[int, int] = {}
        while ready:
            index = heappop(ready)
            place[index] = len(place)
            for other in range(size):
                if index in needs[other]:
                    left[other] -= 1
                    if not left[other]:
                        heappush(ready, other)
        began = [job for job in jobs if job is not None and job.entered is not None]
        for one in began:
            for two in began:
                if one is not two and place[one.index] < place[two.index] and one.conflicts(two):
                    assert one.entered is not None and two.entered is not None
                    assert one.entered <= two.entered, f"{told}: call {two.number} passed call {one.number}"
                    if not one.released:
                        assert one.left is not None and one.left <= two.entered, f"{told}: {one} and {two} overlap"

    async def one_run(self, number: int) -> None:
        """A run with its batches, one after another and side by side."""
        pick = self.random
        await asyncio.sleep(pick.choice([0.0, 0.0, 0.1, 1.0]))
        tenant = pick.choice(["ann", "bob"])
        limit = pick.choice([1, 2, 4, 16])
        deny = ["tool1"] if self.chance(0.1) else None
        most = pick.randint(0, 30) if self.chance(0.25) else None
        asks = self.chance(0.7)

        async def approver(request: ApprovalRequest) -> Approved | Denied | None:
            return await self.decide(number, request)

        run = self.tower.run(
            f"run{number}",
            budget=None if most is None else Budget(calls=most, partial=self.chance(0.8)),
            approver=approver if asks else None,
            tenant=tenant,
            priority=pick.choice([0, 0, 0, 1, -1]),
            max_concurrency=limit,
            fail_fast=self.chance(0.15),
            deadline=None if self.patient or self.chance(0.8) else pick.choice([0.0, 0.5, 3.0]),
            deny=deny,
        )
        closes_early = self.chance(0.1)
        if most is not None:
            self.budgets[number] = most
        async with run:
            batches = []
            for _ in range(pick.randint(1, 3)):
                task = asyncio.ensure_future(self.one_batch(run, number, tenant, limit, allowed=deny is None))
                batches.append(task)
                if self.chance(0.5):
                    await asyncio.wait([task])
                if self.chance(0.15):
                    await asyncio.sleep(pick.choice([0.0, 0.2, 1.0]))
                    run.cancel("enough")
                if self.chance(0.2):
                    await asyncio.sleep(pick.choice([0.0, 0.2, 1.0]))
                    run.cancel("not this one", index=pick.randint(0, 5))
            if not closes_early:
                await asyncio.gather(*batches)
        await asyncio.gather(*batches)

    async def disturb(self) -> None:
        """Tools are declared while calls run, and somebody looks in."""
        for declare in self.late_tools:
            await asyncio.sleep(self.random.choice([0.0, 0.15, 0.6]))
            declare()
            self.tower.validate()

    async def live(self) -> None:
        """All of it, until nothing goes on any more."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        loop.before_jump.append(self.before_jump)
        runs = [asyncio.ensure_future(self.one_run(number)) for number in range(self.random.randint(1, 4))]
        await asyncio.gather(self.disturb(), *runs)
        await self.stage.settled(self.tower)
        await asyncio.sleep(0)

    def afterwards(self) -> None:
        """Nothing was forgotten, everything is counted, everything is there again."""
        told = f"seed {self.seed}"
        assert not self.failures, self.failures
        assert not self.working, told
        for job in self.jobs.values():
            assert job.result is not None, f"{told}: {job} has no result"
            assert job.result.started == (job.entered is not None), f"{told}: {job.result!r}, entered {job.entered}"
        seen = self.tower.statistics()
        late = sum(job.returned and job.result is not None and job.result.still_running for job in self.jobs.values())
        assert seen.late_results == late, told
        assert seen.orphans == 0, told
        assert seen.orphans_released == (self.orphans if self.on_orphan == "release" else 0), told
        assert sum(seen.outcomes.values()) == sum(len(jobs) for jobs in self.batches), told
        assert seen.runs == 0, told
        assert self.tower.flush(30), told
        if self.events:
            self.stories(told)
        assert not self.tower._core.gate._flows, f"{told}: a run that was closed is still known to the gate"

    def stories(self, told: str) -> None:
        """Each call's events tell what became of it, each step once (R-131)."""
        kinds: dict[tuple[str, int, int], list[str]] = {}
        sync = {spec.name for spec in self.specs if spec.sync}
        on_threads = {(one.run_id, one.batch, one.index) for one in self.events if one.tool in sync}
        batches: Counter[str] = Counter()
        for event in self.events:
            if event.index is None:
                batches[event.kind] += 1
            else:
                kinds.setdefault((event.run_id, event.batch, event.index), []).append(event.kind)
        filled = sum(bool(jobs) for jobs in self.batches)
        assert batches["batch_started"] == batches["batch_finished"] == filled, told
        assert len(kinds) == sum(len(jobs) for jobs in self.batches), told
        for call, story in kinds.items():
            counts = Counter(story)
            assert counts["finished"] + counts["rejected"] == 1, f"{told}: {call}: {story}"
            assert counts["started"] == counts["finished"] <= counts["admitted"] <= 1, f"{told}: {call}: {story}"
            assert counts["orphaned"] == counts["ended"] >= counts["late_result"], f"{told}: {call}: {story}"
            # A thread that has taken its call may be given up before its first line, which it reaches all the same.
            free = ("waiting", "promoted", "approval_asked", "approval_decided", "approval_expired")
            free = (*free, "started") if call in on_threads else free
            steps = [step for step in story if step not in free]
            assert steps == sorted(steps, key=STEPS.index), f"{told}: {call}: {story}"
        counts = Counter(event.kind for event in self.events)
        assert counts["orphaned"] == self.orphans, told
        assert counts["late_result"] == self.tower.statistics().late_results, told


def live(seed: int) -> World:
    """One world from its seed to its end."""
    stage = Stage()
    world = World(seed, stage)
    try:
        stage.run(world.live())
        world.afterwards()
        whole_again(world.tower)
        stage.run(retake(world.tower))
        left = [name for name in world.tower.statistics().pools if "run" in name]
        assert not left, f"seed {seed}: pools of closed runs are kept: {left}"
        left = [name for name in world.tower.statistics().rates if "run" in name]
        assert not left, f"seed {seed}: rates of closed runs are kept: {left}"
    except BaseException as failure:
        failure.add_note(
            f"seed {seed}; seen in handlers: {world.failures}; the story:\n" + "\n".join(stage.story[-200:])
        )
        raise
    finally:
        world.tower._core.workers.close()
        world.tower._courier.close()
    return world


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_towers_keep_every_promise(chunk: int) -> None:
    """G1 to G4, G6, G7, G12, R-46 to R-60, R-77 to R-89, R-103 to R-107: whatever is mixed, nothing hangs, exceeds,
    overlaps or is forgotten.
    """
    for seed in range(chunk * CI_WORLDS // CHUNKS, (chunk + 1) * CI_WORLDS // CHUNKS):
        live(seed)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(40))
def test_many_random_towers_keep_every_promise(chunk: int) -> None:
    """G1 to G4, G6, G7, G12: the same for thousands of worlds; TOWERMAN_SEED moves on to others."""
    first = int(os.environ.get("TOWERMAN_SEED", "1000000")) + chunk * 250
    for seed in range(first, first + 250):
        live(seed)
