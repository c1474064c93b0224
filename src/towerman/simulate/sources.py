"""Workloads made of what there is: a batch or a plan that is to run, a trace of what has run.

Theory. A plan says what waits for what and not how long it takes: that is told by tool, or known to a tower by what
its tools have taken so far. A trace says when batches came in, how long each call was at work, which pools it held and
which calls of its batch it waited for; not how many permits, not which resource, and not what came of the wait for
others. What a workload does not know for that reason is told in its notes.

House rules. No argument value comes into a workload of a batch or a trace.

Not here: reading batches (adapters), events (observers) and workloads (workload).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from towerman.adapters import FORMATS, decode
from towerman.calls import Batch
from towerman.core import read_plan
from towerman.errors import InputError
from towerman.forms import find_form
from towerman.forms import read_plan as read_form
from towerman.plan import PlanRefused, resolve_needs
from towerman.policy import nearest, shown
from towerman.simulate.workload import Workload, WorkloadCall, seconds_of
from towerman.timeline import stories
from towerman.tower import Tower
from towerman.trace import Event, Span

USUAL: Final = 1.0
"""Seconds that a call of a plan takes where nobody has said."""

_LIMITS: Final = ("process", "run")
"""Limits that a call counts in beside its pools, and that a policy has anyway."""


def workload_of_plan(
    calls: object,
    tower: Tower | None = None,
    *,
    seconds: Mapping[str, float] | None = None,
    format: str | None = None,
) -> Workload:
    """A batch or a plan that is to run, as a workload.

    Args:
        calls: a plan in any form, or whatever else `Run.execute` takes.
        tower: whose tools they call: what waits for what then also comes of what they touch, and calls that it would
            refuse are left out. Hand it to `simulate` too, as its policy, for its limits. None: needs and references
            alone.
        seconds: how long calls take, by tool or pattern (`crm_*`); the longest pattern that fits holds. Who is not
            named takes as long as the tower's calls of that tool have so far, on average, else 1 second.
        format: the form of the calls or the plan; None: found out.

    Raises:
        InputError: it is no batch in any known form, or a plan that cannot be followed (G5): then nothing of it would
            run; or `seconds` has a tool that no call names, or what is no number of seconds.
        PolicyError: there is no such form.
    """
    batch = _batch(calls, format, tower)
    tools = [call.tool for call in batch.calls]
    times = _lengths(dict.fromkeys(tools), seconds or {}, tower)
    size = len(tools)
    notes: list[str] = []
    left_out: frozenset[int] = frozenset()
    try:
        needs = _needs(batch)
    except PlanRefused as refused:
        raise InputError(f"plan: {refused} ({refused.code})") from None
    if tower is not None:
        told = tower.explain(batch)
        left_out = frozenset([one.index for one in told.refused] + [one.index for one in told.deferred])
        needs = [() for _ in range(size)]
        for edge in told.edges:
            if edge.kind in ("needs", "resource", "order"):
                needs[edge.after] = (*needs[edge.after], edge.before)
        if told.refused:
            codes = Counter(one.code for one in told.refused)
            which = ", ".join(f"{count} {code}" for code, count in codes.items())
            notes.append(f"The tower would refuse {len(told.refused)} of {size} calls ({which}); they are left out.")
        if told.deferred:
            notes.append(f"{len(told.deferred)} calls would go into the durable queue; they are left out.")
        if not told.complete:
            notes.append("What waits for what is not told in full: the plan has too many edges.")
    unknown = sorted({tool for tool, known in times.items() if known is None} - {tools[one] for one in left_out})
    if unknown:
        which = ", ".join(unknown[:8]) + (" ..." if len(unknown) > 8 else "")
        notes.append(f"Nobody has said how long {which} takes: {USUAL:g} second is assumed.")
    names = _names([call.id for call in batch.calls])
    found = [
        WorkloadCall(
            names[index],
            tool,
            USUAL if (known := times[tool]) is None else known,
            needs=tuple([names[other] for other in dict.fromkeys(needs[index]) if other not in left_out]),
        )
        for index, tool in enumerate(tools)
        if index not in left_out
    ]
    return Workload(calls=tuple(found), notes=tuple(notes))


def _batch(calls: object, format: str | None, tower: Tower | None) -> Batch:
    """Calls or a plan in any form, as a batch."""
    form = format
    if form is None and isinstance(calls, str | Mapping | list):
        try:
            form = find_form(calls)
        except InputError:
            if isinstance(calls, str):
                raise
    if form is None or form in FORMATS:
        return decode(calls, format)
    return read_form(calls, form) if tower is None else read_form(calls, form, tower._core.parameters_of)


def _needs(batch: Batch) -> list[tuple[int, ...]]:
    """For each call the places of those that it needs or refers to."""
    size = len(batch.calls)
    if batch.plan:
        linked = read_plan(batch)
        found = None if linked is None else linked.needs[:size]
    else:
        found = resolve_needs([call.id for call in batch.calls], [call.needs for call in batch.calls])
    return [()] * size if found is None else [tuple(one) for one in found]


def _names(ids: Sequence[str]) -> list[str]:
    """A name of its own for each call: its id where no other call has it, else its place."""
    times = Counter(ids)
    taken = {name for name, count in times.items() if count == 1}
    found = []
    for index, name in enumerate(ids):
        own = name if name and times[name] == 1 else f"{index}"
        while own in taken and own != name:
            own = f"{own}'"
        taken.add(own)
        found.append(own)
    return found


def _lengths(tools: Iterable[str], seconds: Mapping[str, float], tower: Tower | None) -> dict[str, float | None]:
    """For each tool how long its calls take; None: it is not known."""
    found: dict[str, float | None] = {}
    known = list(tools)
    for pattern, length in seconds.items():
        seconds_of(f"seconds.{pattern}", length)
        if known and not any(fnmatchcase(tool, pattern) for tool in known):
            raise InputError(f"seconds: no call is of a tool {shown(pattern)}{nearest(pattern, known)}")
    means = {} if tower is None else tower._core.means
    for tool in known:
        fitting = [pattern for pattern in seconds if pattern == tool or fnmatchcase(tool, pattern)]
        if fitting:
            found[tool] = float(seconds[max(fitting, key=lambda one: (one == tool, len(one)))])
        else:
            found[tool] = means[tool][1] if tool in means else None
    return found


# -------------------------------------------------------------------------------------------- traces


def workload_of_trace(events: Iterable[Event]) -> Workload:
    """What a trace tells of, as a workload: batches come in when they came in, and calls take as long as they took.

    Args:
        events: in the order in which they were delivered; those of several batches may be mixed.

    A call holds one permit of each pool that it held. Pools have any number of permits, unless a policy says
    otherwise, or it is tried (`tried={"pools.crm": 4}`).
    """
    batches = _apart(events)
    wall = _by_wall([batch[0] for batch in batches])
    zero = min((_instant(batch[0], wall) for batch in batches), default=0.0)
    pools: dict[str, None] = {}
    calls: list[WorkloadCall] = []
    never = cut = again = waiting = 0
    seen: Counter[str] = Counter()
    for batch in sorted(batches, key=lambda batch: _instant(batch[0], wall)):
        (story,) = stories(batch)
        arrival = _instant(batch[0], wall) - zero
        name = f"{story.run_id}/{story.batch}"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} ({seen[name]})"
        ran = {span.index: length for span in story.spans if (length := _length(span)) is not None}
        began = {span.index: span.started for span in story.spans}
        never += story.calls - len(ran)
        held = _pools(batch)
        for span in story.spans:
            if span.index not in ran:
                continue
            again += len(span.attempts) > 1
            cut += span.outcome in ("cancelled", "timed_out", "pending")
            waiting += any(one.startswith("resource ") for one in span.waited_for)
            mine = held.get(span.index, ())
            pools.update(dict.fromkeys(mine))
            calls.append(
                WorkloadCall(
                    f"{name}/{span.index}",
                    span.tool,
                    ran[span.index],
                    arrival=arrival,
                    run=story.run_id,
                    pools=dict.fromkeys(mine, 1),
                    needs=tuple([f"{name}/{other}" for other in _waited(span, began) if other in ran]),
                )
            )
    notes = []
    if len(batches) > 1:
        notes.append("Batches come in when they came in, however soon the batch before is done.")
    for number, told in (
        (never, "did not start, and {are} left out"),
        (cut, "{were} cut short, and {take} as long as {they} ran"),
        (again, "{were} tried again, and {take} as long as all attempts together"),
        (waiting, "waited for a resource of another batch: which one is not in a trace, so {they} {do} not here"),
    ):
        if number:
            notes.append(_counted(number, told))
    return Workload(pools=MappingProxyType(dict.fromkeys(pools)), calls=tuple(calls), notes=tuple(notes))


def _apart(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each batch, as `stories` tells them apart."""
    found: list[list[Event]] = []
    current: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        key = (event.run_id, event.batch)
        if key not in current or event.kind == "batch_started":
            current[key] = []
            found.append(current[key])
        current[key].append(event)
    return found


def _by_wall(firsts: Sequence[Event]) -> bool:
    """Were these recorded on several clocks? One goes on from each batch to the next; else the calendar tells."""
    back = any(later.time < earlier.time - 1.0 for earlier, later in pairwise(firsts))
    return back and all(one.wall is not None for one in firsts)


def _instant(first: Event, wall: bool) -> float:
    return first.wall if wall and first.wall is not None else first.time


def _length(span: Span) -> float | None:
    """How long a call was at work, all attempts together; None: it never was."""
    if span.shared_with is not None:
        return None
    if span.attempts:
        return sum(end - start for _, start, end in span.attempts if start is not None)
    if span.started is None:
        return None
    return max(0.0, (span.sealed if span.ended is None else span.ended) - span.started)


def _pools(batch: Sequence[Event]) -> dict[int, tuple[str, ...]]:
    """The pools that each call held."""
    found: dict[int, tuple[str, ...]] = {}
    for event in batch:
        if event.kind == "admitted" and event.index is not None and event.scopes is not None:
            names = [name for name in event.scopes if name not in _LIMITS and not name.startswith("tool:")]
            found[event.index] = tuple(names)
    return found


def _waited(span: Span, began: Mapping[int, float | None]) -> Iterable[int]:
    """The calls of its batch that a call waited for, and that began before it."""
    for told in span.waited_for:
        kind, _, number = told.partition(" ")
        if kind == "call" and number.isdecimal():
            start, since = span.started, began.get(int(number))
            if start is not None and since is not None and since < start:
                yield int(number)


def _counted(number: int, told: str) -> str:
    one = number == 1
    words = {
        "are": "is" if one else "are",
        "were": "was" if one else "were",
        "take": "takes" if one else "take",
        "do": "does" if one else "do",
        "they": "it" if one else "they",
    }
    return f"{number:,} call{'' if one else 's'} {told.format(**words)}."
