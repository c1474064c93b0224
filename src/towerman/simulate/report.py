"""What a simulation came to: as values, as data for a program, as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from towerman.errors import Code
from towerman.simulate.world import World
from towerman.timeline import columns, fit, printable

PATH: Final = "longest path"
"""What a lower bound is called that no limit makes: a chain of calls each of which waits for the one before."""

MOST_ROWS: Final = 12
"""Tools and refused calls that the text of a report names."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long calls waited that could have started but for a limit.

    Args:
        calls: how many there were.
        waited: how many of them had to wait.
        total: seconds, all together.
        mean: seconds of a call on average, those counted that did not wait.
        median: half of the calls waited at most so long.
        p95: 95 of 100 calls waited at most so long.
        longest: seconds of the one that waited longest.
    """

    calls: int
    waited: int
    total: float
    mean: float
    median: float
    p95: float
    longest: float

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Report:
    """What a workload came to.

    Args:
        makespan: the instant at which the last call ended, in seconds; time begins at 0.
        lower_bound: no order of starting could have been done before that.
        bound_by: what makes it so: `longest path`, or the limit that has too few permits.
        starts: the instant at which each call began, by its id; of those that did begin.
        ends: the instant at which its work ended.
        waits: under "tools" by tool, and under "pools" by limit: how long calls waited that could have started but for
            limits. A pool by its name; `process`, `run` and `tool:NAME` for the limits on calls of all, of a run, of a
            tool; `rate of tool NAME` and `rate of pool NAME` for rates; `resources` for what others touched.
        utilisation: by limit, the part of its permits that was held, averaged from 0 to the makespan.
        permits: by limit, how many there are; None: any number.
        peak: by limit, the most permits that were held at once.
        rejections: by call id, the code of one that was refused, skipped or stopped.
        calls: how many there were.
        promotions: how often a call that others had passed too often was put before them.
        notes: what is to be known of where the workload comes from.
    """

    makespan: float
    lower_bound: float
    bound_by: str
    starts: Mapping[str, float] = field(repr=False)
    ends: Mapping[str, float] = field(repr=False)
    waits: Mapping[str, Mapping[str, Waits]] = field(repr=False)
    utilisation: Mapping[str, float]
    permits: Mapping[str, int | None]
    peak: Mapping[str, int]
    rejections: Mapping[str, Code]
    calls: int
    promotions: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Every call came to its end."""
        return not self.rejections

    def to_dict(self) -> dict[str, object]:
        """All of it, ready for JSON."""
        return {
            "makespan": self.makespan,
            "lower_bound": self.lower_bound,
            "bound_by": self.bound_by,
            "calls": self.calls,
            "starts": dict(self.starts),
            "ends": dict(self.ends),
            "waits": {kind: {name: one.to_dict() for name, one in some.items()} for kind, some in self.waits.items()},
            "utilisation": dict(self.utilisation),
            "permits": dict(self.permits),
            "peak": dict(self.peak),
            "rejections": dict(self.rejections),
            "promotions": self.promotions,
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON text.

        Args:
            indent: columns of each level; None: in one line.
        """
        import json

        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return "\n".join(_text(self))


def _waits(waits: Sequence[float], calls: int) -> Waits:
    """Of so many calls, of which these waited, and the others did not."""
    some = sorted(one for one in waits if one > 0)
    total = math.fsum(some)

    def at(share: float) -> float:
        place = math.ceil(share * calls) - 1 - (calls - len(some))
        return some[place] if place >= 0 else 0.0

    return Waits(calls, len(some), total, total / calls if calls else 0.0, at(0.5), at(0.95), some[-1] if some else 0.0)


def report_of(world: World) -> Report:
    """What a world has come to.

    The lower bound is the larger one of two: the longest path of a batch behind its arrival, and, for each pool, the
    work that needs it over its permits, behind the arrival from which that work could begin.
    """
    permits = world.permits()
    bound, by = 0.0, PATH
    for batch in world.batches:
        bound = max(bound, batch.path())
    for key, work in world.work.items():
        total = 0.0
        for arrival, some in sorted(work, reverse=True):
            total += some
            if arrival + total / permits[key] > bound * (1 + 1e-12):
                bound, by = arrival + total / permits[key], world.called(key)
    limits = world.limits()
    held: dict[str, float] = {}
    places: dict[str, int] = {}
    for key, work in world.work.items():
        name = world.called(key)
        held[name] = held.get(name, 0.0) + math.fsum(some for _, some in work)
        places[name] = places.get(name, 0) + permits[key]
    for name, (most, _) in limits.items():
        if most is not None:
            held.setdefault(name, 0.0)
            places.setdefault(name, most)
    began = {
        call.id: since
        for batch in world.batches
        for call, since in zip(batch.calls, batch.started, strict=True)
        if since is not None
    }
    tools = {tool: _waits(some, len(some)) for tool, some in world.ready_waits.items()}
    pools = {name: _waits(list(some.values()), len(began)) for name, some in world.waits.items()}
    return Report(
        makespan=world.last,
        lower_bound=min(bound, world.last),  # apart from how floats are rounded, it is never above
        bound_by=by,
        starts=MappingProxyType(began),
        ends=MappingProxyType(world.ends),
        waits=MappingProxyType({"tools": MappingProxyType(tools), "pools": MappingProxyType(pools)}),
        utilisation=MappingProxyType(
            {name: some / (places[name] * world.last) if world.last else 0.0 for name, some in held.items()}
        ),
        permits=MappingProxyType({name: most for name, (most, _) in limits.items() if name != "process" or most}),
        peak=MappingProxyType({name: peak for name, (_, peak) in limits.items()}),
        rejections=MappingProxyType(world.rejections),
        calls=sum(len(batch.calls) for batch in world.batches),
        promotions=world.promotions,
        notes=world.workload.notes,
    )


# -------------------------------------------------------------------------------------------- for people


def seconds(value: float) -> str:
    """`0 s`, `310 ms`, `1.24 s`, `62 s`, `1,830 s`."""
    if not value:
        return "0 s"
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def counted(number: int, what: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Columns side by side: the first `left` of them to the left, the others to the right."""
    shown = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(columns(row[place]) for row in shown) for place in range(len(head))]
    return [
        "  ".join(fit(cell, widths[place], right=place >= left) for place, cell in enumerate(row)).rstrip()
        for row in shown
    ]


def _text(report: Report) -> list[str]:
    lines = [f"{counted(report.calls, 'call')}, done after {seconds(report.makespan)}."]
    if report.makespan:
        over = report.makespan / report.lower_bound - 1 if report.lower_bound else 0.0
        more = "which is what it took" if over < 0.0005 else f"it took {over:.1%} longer"
        why = PATH if report.bound_by == PATH else f"work for {report.bound_by}"
        lines.append(f"No order could be done before {seconds(report.lower_bound)} ({why}); {more}.")
    limits = _limits(report)
    if limits:
        lines += ["", *limits]
    tools = sorted(report.waits["tools"].items(), key=lambda one: (-one[1].total, one[0]))
    if tools:
        rows = [
            (name, f"{one.calls:,}", f"{one.waited:,}", seconds(one.mean), seconds(one.p95), seconds(one.longest))
            for name, one in tools[:MOST_ROWS]
        ]
        lines += ["", *table(("tool", "calls", "waited", "mean", "p95", "longest"), rows)]
        if len(tools) > MOST_ROWS:
            lines.append(f"... and {counted(len(tools) - MOST_ROWS, 'tool')} with shorter waits")
    if report.rejections:
        codes: dict[Code, list[str]] = {}
        for refused, code in report.rejections.items():
            codes.setdefault(code, []).append(refused)
        lines += ["", f"{counted(len(report.rejections), 'call')} did not come to an end:"]
        for code, names in sorted(codes.items()):
            some = ", ".join(printable(name) for name in names[:MOST_ROWS])
            rest = f" and {len(names) - MOST_ROWS:,} more" if len(names) > MOST_ROWS else ""
            lines.append(f"  {code}: {some}{rest}")
    if report.notes:
        lines += ["", *(f"Note: {printable(note)}" for note in report.notes)]
    return lines


def _limits(report: Report) -> list[str]:
    pools = report.waits["pools"]
    names = [*report.permits, *(name for name in pools if name not in report.permits)]
    rows = []
    for name in names:
        most, waits = report.permits.get(name), pools.get(name)
        busy = report.utilisation.get(name)
        rows.append(
            (
                name,
                "-" if most is None else f"{most:,}",
                f"{report.peak[name]:,}" if name in report.peak else "-",
                "-" if busy is None else f"{busy:.0%}",
                f"{waits.waited:,}" if waits else "0",
                seconds(waits.total / waits.waited) if waits and waits.waited else "-",
                seconds(waits.longest) if waits else "-",
            )
        )
    return table(("limit", "permits", "peak", "busy", "waited for it", "mean", "longest"), rows) if rows else []
