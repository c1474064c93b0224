"""One workload under several values of one limit: a table, and what it looks like."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from towerman.errors import InputError
from towerman.policy import shown
from towerman.simulate.force import Trial, in_force, tries
from towerman.simulate.report import Report, report_of, seconds, table
from towerman.simulate.workload import read_workload
from towerman.simulate.world import World

NEAR: Final = 0.05
"""What comes within so much of the best is as good, for whoever chooses."""

MOST_VALUES: Final = 1_000
"""Values that one sweep tries at most."""

_RANGE: Final = re.compile(r"(\d{1,18})\.\.(\d{1,18})(?::(\d{1,18}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a workload came to under several values of one limit.

    Args:
        key: what was tried, for example `pools.crm`.
        values: the values of it, in the order in which they were tried.
        reports: for each of them what the workload came to.
    """

    key: str
    values: tuple[object, ...]
    reports: tuple[Report, ...]

    @property
    def ok(self) -> bool:
        """Every call came to its end, under every value."""
        return all(one.ok for one in self.reports)

    @property
    def enough(self) -> object | None:
        """The first value that comes within five percent of the best makespan, of those that refuse the fewest calls;
        None where there is no value.
        """
        if not self.reports:
            return None
        fewest = min(len(one.rejections) for one in self.reports)
        fit = [one.makespan for one in self.reports if len(one.rejections) == fewest]
        most = min(fit) * (1 + NEAR)
        return next(
            value
            for value, one in zip(self.values, self.reports, strict=True)
            if len(one.rejections) == fewest and one.makespan <= most
        )

    def to_dict(self) -> dict[str, object]:
        """A row for each value, ready for JSON."""
        return {
            "key": self.key,
            "enough": self.enough,
            "rows": [self._row(value, one) for value, one in zip(self.values, self.reports, strict=True)],
        }

    def _row(self, value: object, report: Report) -> dict[str, object]:
        name = self._limit
        return {
            "value": value,
            "makespan": report.makespan,
            "lower_bound": report.lower_bound,
            "bound_by": report.bound_by,
            "utilisation": report.utilisation.get(name),
            "waits": {tool: waits.to_dict() for tool, waits in report.waits["tools"].items()},
            "rejections": len(report.rejections),
        }

    @property
    def _limit(self) -> str:
        """What the limit is called in a report."""
        table_name, _, name = self.key.partition(".")
        return name if table_name == "pools" else "process" if self.key == "max_concurrency" else self.key

    def table(self) -> str:
        """A line for each value."""
        rows = []
        for value, one in zip(self.values, self.reports, strict=True):
            busy = one.utilisation.get(self._limit)
            waits = list(one.waits["tools"].values())
            calls = sum(each.calls for each in waits)
            rows.append(
                (
                    _told(value),
                    seconds(one.makespan),
                    seconds(one.lower_bound),
                    one.bound_by,
                    "-" if busy is None else f"{busy:.0%}",
                    seconds(sum(each.total for each in waits) / calls if calls else 0.0),
                    seconds(max((each.longest for each in waits), default=0.0)),
                    f"{len(one.rejections):,}",
                )
            )
        head = (self.key, "makespan", "at least", "because of", "busy", "mean wait", "longest", "refused")
        return "\n".join(table(head, rows, left=0))

    def chart(self, width: int = 78, *, ascii_only: bool = False) -> str:
        """The makespan against the value, a bar for each; a mark where no order of starting could go below.

        Args:
            width: columns at most; less than 40 is taken as 40.
            ascii_only: use no character beyond ASCII.
        """
        full, mark = ("#", "|") if ascii_only else ("█", "▒")
        longest = max((one.makespan for one in self.reports), default=0.0)
        names = [_told(value) for value in self.values]
        told = [seconds(one.makespan) for one in self.reports]
        left = max([len(self.key), *map(len, names)])
        room = max(40, width) - left - 2 - max([len("makespan"), *map(len, told)]) - 2
        lines = [f"{self.key:>{left}}  makespan"]
        for name, text, one in zip(names, told, self.reports, strict=True):
            cells = round(room * one.makespan / longest) if longest else 0
            least = min(cells, round(room * one.lower_bound / longest)) if longest else 0
            bar = full * least + mark * (cells - least)
            lines.append(f"{name:>{left}}  {bar}  {text}" if bar else f"{name:>{left}}  {text}")
        beyond = any(one.makespan > one.lower_bound * (1 + 1e-9) for one in self.reports)
        if beyond:
            lines.append(f"{'':>{left}}  {full} no order of starting could be done before that  {mark} beyond it")
        return "\n".join(lines)

    def text(self, width: int = 78, *, ascii_only: bool = False) -> str:
        """Table, chart and what is enough, for a terminal.

        Args:
            width: columns of the chart at most; less than 40 is taken as 40.
            ascii_only: use no character beyond ASCII.
        """
        lines = [self.table(), "", self.chart(width, ascii_only=ascii_only)]
        enough = self.enough
        if enough is not None and len(self.values) > 1:
            lines += ["", f"{self.key} = {_told(enough)} comes within {NEAR:.0%} of the best makespan."]
        notes = self.reports[0].notes if self.reports else ()
        return "\n".join([*lines, *([""] if notes else []), *(f"Note: {note}" for note in notes)])

    def __str__(self) -> str:
        return self.text()


def _told(value: object) -> str:
    return "no limit" if value is None else str(value)


def simulate(workload: object, policy: object = None, *, tried: Mapping[str, object] | None = None) -> Report:
    """What a workload comes to, by the same plan, gate and ledger as a tower has, in no time at all.

    Args:
        workload: a mapping as docs/simulating.md describes it, the path of a file with one as JSON, or a `Workload`.
        policy: whose limits hold beside the workload's own: a Tower, the path of a `towerman.toml`, or a mapping of its
            keys. None: no limit beyond the workload's own.
        tried: values in place of those that both name, by key: `max_concurrency`, `pools.NAME`, `rates.NAME`, or an
            option of a tower such as `run_concurrency`. None as a value: no limit.

    Raises:
        InputError: something in the workload, or in what is tried, is wrong: its place, what is allowed, the nearest
            right name.
        PolicyError: something in the policy is.

    The same workload under the same limits comes to the same, to the last digit. Nothing of the tower changes.
    """
    read = read_workload(workload)
    trial = Trial.of(tried, read, policy) if tried else None
    world = World(read, in_force(read, policy, trial))
    world.go()
    return report_of(world)


def sweep(
    workload: object,
    key: str,
    values: Sequence[object],
    policy: object = None,
    *,
    tried: Mapping[str, object] | None = None,
) -> Sweep:
    """What a workload comes to under each of several values of one limit.

    Args:
        workload: as `simulate` takes it.
        key: what is tried, as a key of `tried` there.
        values: its values, in order.
        policy: as `simulate` takes it.
        tried: what else is tried all the time.

    Raises:
        InputError: as `simulate`; or there are more than 1,000 values.
        PolicyError: as `simulate`.
    """
    if isinstance(values, range):  # whose length may be beyond what len() can say
        _few(f"sweep of {key}", (values[-1] - values[0]) // values.step + 1 if values else 0)
    else:
        _few(f"sweep of {key}", len(values))
    read = read_workload(workload)
    reports = [simulate(read, policy, tried={**(tried or {}), key: value}) for value in values]
    return Sweep(key, tuple(values), tuple(reports))


def sweeps(text: str) -> tuple[str, list[object]]:
    """`pools.crm=1..8`, `pools.crm=1..32:4` (by fours) or `pools.crm=1,2,4,8` as a key and values.

    Raises:
        InputError: it is written otherwise, or comes to more than 1,000 values; nothing is made of it then.
    """
    key, value = tries(text)
    written = text.partition("=")[2].strip()
    found = _RANGE.fullmatch(written)
    if found is None:
        if ".." in written:
            raise InputError(f"{shown(text)}: write a sweep as KEY=FROM..TO, whole numbers, for example pools.crm=1..8")
        _few(shown(text), written.count(",") + 1)
        return key, [tries(f"{key}={one}")[1] for one in written.split(",")] if "," in written else [value]
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if last < first or not step:
        raise InputError(f"{shown(text)}: a sweep goes upwards, by 1 or more, for example pools.crm=1..8")
    _few(shown(text), (last - first) // step + 1)
    return key, list(range(first, last + 1, step))


def _few(where: str, count: int) -> None:
    """So many values can be tried.

    Raises:
        InputError: they cannot.
    """
    if count > MOST_VALUES:
        raise InputError(f"{where}: {count:,} values; at most {MOST_VALUES:,}, for example 1..1000:10")
