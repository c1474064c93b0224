"""The simulated world: a plan for each batch, one gate and one ledger for all, and a clock that jumps to what is next.

Theory. What the runner does for a batch on an event loop is done here without one: look what each call wants, make the
plan, offer what is ready, tell gate and plan of each end. An end is known beforehand here, so it stands in a heap. At
one instant ends come first, those that more depends on before the others; then waits that are over and rates that let
somebody in; then batches that come in.

Not here: who may start (gate), what is ready and how urgent it is (plan).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, cast

from towerman.access import flat_holds
from towerman.clock import VirtualClock
from towerman.core import Core, pool_key
from towerman.errors import Code, InputError
from towerman.estimates import estimated
from towerman.gate import GRANTED, NEVER, Flow, Gate, Lot, Offer
from towerman.ledger import UNLIMITED, Ledger, Meter, State
from towerman.limits import Limits as Pools
from towerman.plan import Plan
from towerman.policy import shown
from towerman.rates import make
from towerman.simulate.batches import Owner, SimulatedBatch, Slot, Wanted, batches_of
from towerman.simulate.force import ALWAYS, InForce
from towerman.simulate.workload import MOST_SECONDS, Workload, WorkloadCall
from towerman.watched import limit_name
from towerman.work import Owner as RealOwner
from towerman.work import RunState, Want

if TYPE_CHECKING:
    from towerman.tools import Tool

SLICE: Final = 128
"""Calls without edges that are offered in a row, as the runner does it."""

RESOURCES: Final = "resources"
"""Under which waits for resources are told, all together."""


class World:
    """Runs a workload.

    Args:
        workload: what comes in.
        force: the limits.

    Attributes:
        batches: in the order in which they come in.
        rejections: by call id, why a call was refused, skipped or stopped.
        waits: by what was waited for, how long each call did.
        ready_waits: by tool, how long each call waited that could have started but for limits.
        last: the instant of the last end.
        work: by pool key, of each call that held permits of it the arrival, and permits times seconds.
        ends: by call id, the instant at which its work has ended.
        promotions: how often one that was passed too often was promoted.
    """

    def __init__(self, workload: Workload, force: InForce) -> None:
        self.workload = workload
        self.batches = batches_of(workload.calls)
        self.rejections: dict[str, Code] = {}
        self.waits: dict[str, dict[tuple[int, int], float]] = {}
        self.ready_waits: dict[str, list[float]] = {}
        self.last = 0.0
        self.work: dict[str, list[tuple[float, float]]] = {}
        self.ends: dict[str, float] = {}
        self.promotions = 0
        self._force = force
        self._clock = VirtualClock()
        self._now = 0.0
        self._gate: Gate[Owner] = Gate(Ledger())
        self._core = Core(force.options, cast("Gate[RealOwner]", self._gate), self._clock)
        self._core.means = dict(force.means)
        self._core.any_subtree = any(one.subtree for call in workload.calls for one in call.accesses)
        self._pools = Pools(self._core)
        self._pools.add_process()
        self._gate.notes = []
        self._rates = self._own_rates()
        self._runs: dict[str, RunState] = {}
        self._run_count = 0
        self._to_come = {batch.run: 0 for batch in self.batches}
        for batch in self.batches:
            self._to_come[batch.run] += 1
        self._bases: dict[int, dict[tuple[str, tuple[tuple[str, int], ...]], Want]] = {}
        self._heap: list[tuple[float, tuple[object, ...], int, Slot, bool]] = []
        self._number = 0
        self._numbers = {id(batch): number for number, batch in enumerate(self.batches)}
        self._begun: list[Slot] = []
        self._where: dict[Owner, list[tuple[float, str]]] = {}
        self._names: dict[str, str] = {}

    # ------------------------------------------------------------------ limits

    def _own_rates(self) -> dict[str, Meter[Lot[Owner]]]:
        """The workload's own rates, beside those that tools and pools of the policy have."""
        found: dict[str, Meter[Lot[Owner]]] = {}
        enforced = self._force.options.mode == "enforce"
        for name, rate in self._force.rates.items():
            kind = "pool" if name in self._force.options.pools else "tool"
            meter: Meter[Lot[Owner]] = Meter(
                f"rate:workload:{name}", f"rate of {kind} {name}", make(rate.numbers), enforced=enforced
            )
            self._gate.ledger.add_meter(meter)
            found[name] = meter
        return found

    def _tool(self, name: str) -> Tool:
        core = self._core
        known = core.tools.get(name)
        if known is None:
            known = core.tools[name] = self._force.tool(name)
            self._pools.add_tool(known)
        return known

    def _base(self, state: RunState, call: WorkloadCall) -> Want:
        """What each call of this tool and run wants that holds these pools."""
        own = tuple(call.pools.items())
        bases = self._bases.setdefault(state.number, {})
        key = (call.tool, own)
        base = bases.get(key)
        if base is not None:
            return base
        core = self._core
        base = core.base(state, self._tool(call.tool))
        permits = dict(base.permits)
        for name, units in own:
            pool = pool_key(name, core.policy.scope_of(core.policy.pools[name]), state)
            permits[pool] = max(units, permits.get(pool, 0))
        held = {limit_name(one) for one in permits}
        rates = [meter.key for name, meter in self._rates.items() if name == call.tool or name in held]
        other = base.with_holds((), (), {})
        other.permits = tuple(permits.items())
        other.rates = (*base.rates, *rates)
        other.shared = True
        if other.max_wait >= ALWAYS:
            other.max_wait = NEVER
        core.gate.ledger.look_up(other)
        bases[key] = other
        return other

    def _want(self, state: RunState, call: WorkloadCall) -> Want:
        base = self._base(state, call)
        if not call.accesses:
            return base
        return base.with_holds(call.accesses, *flat_holds(call.accesses, subtrees=self._core.any_subtree))

    def _state(self, name: str) -> RunState:
        state = self._runs.get(name)
        if state is None:
            number = self._run_count = self._run_count + 1
            flow = cast("Flow[RealOwner]", self._gate.open_flow(number, self._core.policy.run_concurrency))
            state = self._runs[name] = RunState(number, name, flow, limit=NEVER)
            self._pools.add_run(state)
        return state

    def _leave(self, batch: SimulatedBatch) -> None:
        """A batch is done; with the last one of its run, the run."""
        if batch.done:
            return
        batch.done = True
        self._to_come[batch.run] -= 1
        if not self._to_come[batch.run]:
            state = self._runs.pop(batch.run)
            self._gate.close_flow(cast("Flow[Owner]", state.flow))
            self._bases.pop(state.number, None)
            self._pools.drop_run(state, self._runs.values())

    # ------------------------------------------------------------------ time

    def go(self) -> None:
        """Let all of it happen."""
        gate, heap = self._gate, self._heap
        instants = [
            (instant, number, at)
            for number, batch in enumerate(self.batches)
            for at, instant in enumerate((batch.arrival, *batch.instants))
        ]
        coming = deque(sorted(instants))
        while True:
            ending = heap[0][0] if heap else NEVER
            arrival = coming[0][0] if coming else NEVER
            now = min(ending, arrival, gate.wake_at)
            if now > MOST_SECONDS:
                self._check_end()
                break
            self._now = now = self._clock.set(max(now, self._now))
            if ending <= now:
                *_, entry, sealed = heappop(heap)
                self._end(entry, sealed)
            elif gate.wake_at <= now:
                self._take(gate.tick(now))
            else:
                _, number, at = coming.popleft()
                batch = self.batches[number]
                if at:  # for later calls of a batch the instant has come
                    self._offer(batch, self._follow(batch, len(batch.calls) + at - 1, ok=True))
                else:
                    self._arrive(batch)
        gate.validate()
        assert not gate.anybody, f"somebody still waits: {gate}"
        assert not gate.ledger.counts()[0], f"permits were lost: {gate.ledger}"

    def _check_end(self) -> None:
        """Nothing more happens that the clock could come to: is all over? No batch is to come, arrivals are bounded.

        Raises:
            InputError: somebody still runs, or waits for a rate; it names one.
        """
        end = f"after {MOST_SECONDS:,} seconds, where the clock of a simulation ends"
        if self._heap:
            batch, index = self._heap[0][3].owner
            told = f"call {shown(batch.calls[index].id)} would end {end}"
            raise InputError(f"{told}: let it, or what comes before it, take less time")
        for (batch, index), stretches in self._where.items():
            name = stretches[-1][1]
            if name.startswith("rate"):
                told = f"call {shown(batch.calls[index].id)} waits for the {name} and would start {end}"
                raise InputError(f"{told}: allow more starts in the period, or take a shorter one")

    def _arrive(self, batch: SimulatedBatch) -> None:
        """A batch comes in: what it wants, its plan, its first offers."""
        core, calls = self._core, batch.calls
        size = len(calls)
        state = batch.state = self._state(batch.run)
        needs = batch.needs
        most = core.most(size, planned=needs is not None)
        wants = batch.wants = [
            cast("Wanted", self._want(state, call)) if index < most else None for index, call in enumerate(calls)
        ]
        for call in calls[most:]:
            self._refuse(batch, call, "call_cap")
        instants = len(batch.instants)
        holds = [*(want.holds if want is not None else () for want in wants), *[()] * instants]
        if needs is not None or any(holds):
            given = [call.estimate for call in calls]
            estimates = estimated(core.means, [call.tool for call in calls], given)
            if estimates is not None and instants:
                estimates += [0.0] * instants
            batch.plan = Plan(size + instants, needs, holds if any(holds) else None, estimates)
        else:
            batch.plan = Plan(size)
        plan = batch.plan
        for index in range(most, size):
            if not plan.trivial:
                self._follow(batch, index, ok=False)
        ready = plan.start()
        if plan.trivial:
            for first in range(0, most, SLICE):
                row = range(first, min(first + SLICE, most))
                self._take(self._gate.offer_row(cast("Flow[Owner]", state.flow), batch, row, self._now))
                self._note_waits(batch, row)
        else:
            self._offer(batch, [index for index in ready if index < size])
        if not batch.left:
            self._leave(batch)

    # ------------------------------------------------------------------ what the gate is told, and what it says

    def _offers(self, batch: SimulatedBatch, ready: Iterable[int]) -> list[Offer[Owner]]:
        now, wants = self._now, batch.wants
        return [(want, (batch, index), now) for index in ready if (want := wants[index]) is not None]

    def _offer(self, batch: SimulatedBatch, ready: Sequence[int]) -> None:
        offers = self._offers(batch, ready)
        if offers:
            self._take(self._gate.offer(cast("Flow[Owner]", batch.state.flow), offers, self._now))
            self._note_waits(batch, ready)

    def _take(self, decided: list[Slot]) -> None:
        """Carry out decisions, and those that follow from them, in their order."""
        todo = deque(decided)
        while todo:
            entry = todo.popleft()
            if entry.status == GRANTED:
                self._start(entry)
                continue
            batch, index = entry.owner
            self._refuse(batch, batch.calls[index], entry.rejection.code)
            self._stop_waiting(entry.owner)
            if not batch.plan.trivial:
                offers = self._offers(batch, self._follow(batch, index, ok=False))
                if offers:
                    todo.extend(self._gate.offer(cast("Flow[Owner]", batch.state.flow), offers, self._now))
                    self._note_waits(batch, [one[1][1] for one in offers])
            if not batch.left:
                self._leave(batch)
        begun, self._begun = self._begun, []
        for entry in begun:
            self._gate.begun(entry, self._now)
        self._read_notes()

    def _start(self, entry: Slot) -> None:
        batch, index = entry.owner
        now, call = self._now, batch.calls[index]
        batch.started[index] = now
        self._stop_waiting(entry.owner)
        if entry.wants.marked:
            self._begun.append(entry)
        timeout = cast("Want", entry.wants).of.timeout
        self._number += 1
        heappush(self._heap, (now + min(call.duration, timeout), _urgency(entry.owner), self._number, entry, False))

    def _end(self, entry: Slot, sealed: bool) -> None:
        """The work of a call is over, or its time is."""
        batch, index = entry.owner
        call = batch.calls[index]
        started = batch.started[index]
        assert started is not None
        tool = cast("Want", entry.wants).of
        late = call.duration > tool.timeout
        if late and tool.in_thread and not sealed and self._core.policy.on_orphan == "hold":
            self._orphan(entry, started + call.duration)
            return
        ran = batch.ran[index] = self._now - started
        self.last = self._now
        self.ends[call.id] = self._now
        for pool, units in entry.wants.pools:
            if pool.limit < UNLIMITED:
                self.work.setdefault(pool.key, []).append((batch.arrival, units * ran))
        ready: list[Offer[Owner]] = []
        if not sealed:
            if late:
                self.rejections[call.id] = "handler_timeout"
            else:
                self._core.learn(call.tool, ran)
            batch.left -= 1
            if not batch.plan.trivial:
                ready = self._offers(batch, self._follow(batch, index, ok=not late))
        if batch.plan.trivial:  # as in the runner: calls without an edge go as they came
            self._take(self._gate.finish(entry, self._now))
        else:
            self._take(self._gate.finish(entry, self._now, ready, _urgency))
        if ready:
            self._note_waits(batch, [one[1][1] for one in ready])
        if not batch.left and not sealed:
            self._leave(batch)

    def _orphan(self, entry: Slot, end: float) -> None:
        """Its result is sealed, and its thread goes on: what it holds comes back when that ends."""
        batch, index = entry.owner
        self.rejections[batch.calls[index].id] = "handler_timeout"
        batch.left -= 1
        self._number += 1
        heappush(self._heap, (end, _urgency(entry.owner), self._number, entry, True))
        self._take(self._gate.orphan(entry, self._now))
        if not batch.plan.trivial:
            self._offer(batch, self._follow(batch, index, ok=False))
        if not batch.left:
            self._leave(batch)

    def _refuse(self, batch: SimulatedBatch, call: WorkloadCall, code: Code) -> None:
        self.rejections[call.id] = code
        batch.left -= 1

    def _follow(self, batch: SimulatedBatch, index: int, *, ok: bool) -> list[int]:
        """Tell the plan that a call is sealed and its work has ended; returns what is ready."""
        ready, skipped = batch.plan.seal(index, ok)
        for other, _ in skipped:
            if batch.wants[other] is not None:
                batch.wants[other] = None
                self._refuse(batch, batch.calls[other], "dependency_failed")
        return [*ready, *batch.plan.end(index)]

    # ------------------------------------------------------------------ who waits for what

    def _note_waits(self, batch: SimulatedBatch, ready: Iterable[int]) -> None:
        """Those who were ready and were not let in: from now on they wait for what is in their way."""
        ledger, known = self._gate.ledger, dict[int, str]()
        for index in ready:
            want = batch.wants[index]
            if want is None or batch.started[index] is not None or batch.calls[index].id in self.rejections:
                continue
            owner = (batch, index)
            if owner in self._where:
                continue
            label = known.get(id(want))
            if label is None:
                state = ledger.blocker(want)
                label = known[id(want)] = "claims of others" if state is None else self._name(state, want)
            self._where[owner] = [(self._now, label)]

    def _name(self, state: State[Lot[Owner]], wants: Wanted) -> str:
        return self._named(self._gate.ledger.label(state, wants))

    def _named(self, label: str) -> str:
        """What a limit is called in the report, of what people are shown of it."""
        name = self._names.get(label)
        if name is None:
            kind, _, rest = label.partition(" ")
            name = rest if kind == "pool" else RESOURCES if kind == "resource" else label
            if kind == "limit":
                name = f"tool:{label.removeprefix('limit of tool ')}"
            if kind != "resource":
                self._names[label] = name
        return name

    def _read_notes(self) -> None:
        """The gate has parked somebody for something else."""
        notes = self._gate.notes
        if not notes:
            return
        self._gate.notes = []
        for kind, entry, label in notes:
            if kind == "promoted":
                self.promotions += 1
                continue
            batch, index = entry.owner
            if batch.started[index] is not None or batch.calls[index].id in self.rejections:
                continue
            stretches = self._where.get(entry.owner)
            name = self._named(label)
            if stretches is None:
                self._where[entry.owner] = [(self._now, name)]
            elif stretches[-1][1] != name:
                stretches.append((self._now, name))

    def _stop_waiting(self, owner: Owner) -> None:
        batch, index = owner
        call = batch.calls[index]
        stretches = self._where.pop(owner, None)
        waited = 0.0 if stretches is None else self._now - stretches[0][0]
        if batch.started[index] is not None:
            self.ready_waits.setdefault(call.tool, []).append(waited)
        if stretches is None or not waited:
            return
        ends = [*(since for since, _ in stretches[1:]), self._now]
        key = (self._numbers[id(batch)], index)
        for (since, name), end in zip(stretches, ends, strict=True):
            if end > since:
                waits = self.waits.setdefault(name, {})
                waits[key] = waits.get(key, 0.0) + end - since

    # ------------------------------------------------------------------ afterwards

    def limits(self) -> Mapping[str, tuple[int | None, int]]:
        """Permits (None: no limit) and the most that were held at once, of the limits that are no run's."""
        found: dict[str, tuple[int | None, int]] = {}
        for key, pool in self._gate.ledger.pools.items():
            if "run:" not in key:
                found[limit_name(key)] = (pool.declared if pool.limit < UNLIMITED else None, pool.peak)
        return found

    @staticmethod
    def called(key: str) -> str:
        """What the limit of a pool key is called in a report."""
        return limit_name(key)

    def permits(self) -> Mapping[str, int]:
        """By pool key, the permits of each pool in which something has run."""
        options = self._core.policy
        pools = self._gate.ledger.pools
        found: dict[str, int] = {}
        for key in self.work:
            if key in pools:
                found[key] = pools[key].limit
            else:  # of a run that is over
                name = key.partition("@")[0]
                found[key] = options.run_concurrency if name.startswith("run:") else options.pools[name[5:]].permits
        return found


def _urgency(owner: Owner) -> tuple[object, ...]:
    """What orders the calls of a run, as in the runner."""
    batch, index = owner
    return batch.arrival, batch.plan.key(index)
