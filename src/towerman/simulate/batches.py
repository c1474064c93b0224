"""The calls of a workload as the batches that a tower would be handed.

Theory. Calls of one run that come in at one instant are one batch, and so are calls of one run that need one another,
whenever they come in: `needs` are edges of one plan. A call that comes in later than its batch waits in that plan for a
node of its own that stands for that instant: it is sealed when the instant has come.

Not here: what may start (plan, gate).
"""

from __future__ import annotations

from collections.abc import Sequence

from towerman.errors import InputError
from towerman.gate import Entry, Lot
from towerman.ledger import Wants
from towerman.plan import Plan, PlanRefused, resolve_needs
from towerman.policy import shown
from towerman.simulate.workload import WorkloadCall, seconds_of
from towerman.work import RunState

Owner = tuple["SimulatedBatch", int]
"""A call of a batch."""

Slot = Entry[Owner]

Wanted = Wants[Lot[Owner]]
"""What a call wants; always a `Want`."""


class SimulatedBatch:
    """One batch: what the runner's Work is.

    Args:
        run: its run's name.
        calls: in the order in which they come in, those of one instant as the workload has them.
        needs: for each call the places of those that it needs.

    Attributes:
        arrival: the instant at which the first of them comes in.
        instants: later ones at which others of them do; in the plan the nodes behind the calls.
        needs: for each node of the plan those that it needs; None where nobody needs anything.
        plan: what waits for what.
        wants: what each call wants; None for one that is not to start.
        left: calls that have no result yet.
        done: the run knows that it is.
        started: the instant at which each call has begun, or None.
        ran: seconds that each call was at work, or None.
    """

    __slots__ = (
        "arrival",
        "calls",
        "done",
        "instants",
        "left",
        "needs",
        "plan",
        "ran",
        "run",
        "started",
        "state",
        "wants",
    )

    def __init__(self, run: str, calls: Sequence[WorkloadCall], needs: Sequence[tuple[int, ...]]) -> None:
        self.run = run
        self.calls = calls
        self.arrival = calls[0].arrival
        self.instants: list[float] = []
        self.needs: list[tuple[int, ...]] | None = None
        self.left = size = len(calls)
        self.plan = Plan(0)
        self.wants: list[Wanted | None] = []
        self.started: list[float | None] = [None] * size
        self.ran: list[float | None] = [None] * size
        self.done = False
        if calls[-1].arrival > self.arrival:
            found: list[tuple[int, ...]] = []
            for call, wanted in zip(calls, needs, strict=True):
                if call.arrival > self.arrival:
                    if not self.instants or self.instants[-1] != call.arrival:
                        self.instants.append(call.arrival)
                    wanted = (*wanted, size + len(self.instants) - 1)
                found.append(wanted)
            self.needs = [*found, *[()] * len(self.instants)]
        elif any(needs):
            self.needs = list(needs)

    state: RunState

    def owner(self, index: int) -> Owner:
        """Whatever the gate knows a call by."""
        return self, index

    def path(self) -> float:
        """The instant before which no order of starting could have been done with those that have run."""
        if not any(one is not None for one in self.ran):
            return 0.0
        lengths = [one or 0.0 for one in self.ran]
        if self.instants:
            late = {call.arrival for call, ran in zip(self.calls, self.ran, strict=True) if ran is not None}
            lengths += [instant - self.arrival if instant in late else 0.0 for instant in self.instants]
        return self.arrival + self.plan.longest(lengths)


def batches_of(calls: Sequence[WorkloadCall]) -> list[SimulatedBatch]:
    """The batches of a workload, in the order in which they come in.

    Raises:
        InputError: a length or an instant is none that the clock can come to, two calls have one id, a call needs one
            that is not there, or is of another run, or calls need each other in a circle.
    """
    for index, call in enumerate(calls):
        seconds_of(f"calls[{index}].duration", call.duration)
        seconds_of(f"calls[{index}].arrival", call.arrival)
        if call.estimate is not None:
            seconds_of(f"calls[{index}].estimate", call.estimate)
    ids = [call.id for call in calls]
    if len(set(ids)) != len(ids):
        seen: dict[str, int] = {}
        for index, name in enumerate(ids):
            if seen.setdefault(name, index) != index:
                raise InputError(f"calls[{index}].id: {shown(name)} is the id of calls[{seen[name]}] already")
    try:
        needs = resolve_needs(ids, [call.needs for call in calls])
    except PlanRefused as refused:
        raise InputError(f"calls[{refused.members[0]}].needs: {refused} ({refused.code})") from None
    groups: dict[tuple[str, float], int] = {}
    group = [groups.setdefault((call.run, call.arrival), len(groups)) for call in calls]
    joins = list(range(len(groups)))

    def root(one: int) -> int:
        while joins[one] != one:
            joins[one] = one = joins[joins[one]]
        return one

    for index, wanted in enumerate(needs or ()):
        for other in wanted:
            if calls[other].run != calls[index].run:
                raise InputError(
                    f"calls[{index}].needs: {shown(ids[other])} is a call of another run; calls need only those of "
                    "their own run"
                )
            one, two = root(group[index]), root(group[other])
            if one != two:
                joins[two] = one
    members: dict[int, list[int]] = {}
    for index in sorted(range(len(calls)), key=lambda index: calls[index].arrival):
        members.setdefault(root(group[index]), []).append(index)
    found: list[SimulatedBatch] = []
    for some in members.values():
        place = {index: at for at, index in enumerate(some)}
        own = [tuple([place[other] for other in needs[index]]) if needs else () for index in some]
        found.append(SimulatedBatch(calls[some[0]].run, [calls[index] for index in some], own))
    return found
