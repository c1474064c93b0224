"""What is told: one row a goal as a Markdown table, the machine, and JSON lines with every sample.

House rules. A row says what was measured, against what, and whether the goal is met; nothing is left out because it
looks bad.

Not here: measuring (measure), goals (calls, waiting, offload, imports).
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.measure import Figure, Samples


@dataclass(frozen=True, slots=True)
class Row:
    """One measured thing.

    Args:
        goal: its number, `F1` to `F16`.
        what: what was done.
        ours: the figure of ours.
        most: what it may be at most; None where no goal is set, and the row is there to be seen.
        least: what it must be at least.
        unit: `x` for a ratio, else the unit's name.
        against: what the ratio is to.
        beside: figures of others on the same scale, by name.
        exact: what must hold beside the number, as (what, whether it does).
        samples: every sample of every round, by system.
    """

    goal: str
    what: str
    ours: Figure
    most: float | None = None
    least: float | None = None
    unit: str = "x"
    against: str = ""
    beside: Mapping[str, Figure] = field(default_factory=dict)
    exact: tuple[str, bool] | None = None
    samples: Samples = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Is the goal met? None: no goal is set."""
        if self.most is None and self.least is None:
            return None
        within = (self.most is None or self.ours.median <= self.most) and (
            self.least is None or self.ours.median >= self.least
        )
        return within and (self.exact is None or self.exact[1])


def number(value: float, unit: str = "") -> str:
    """Three digits, and no more than needed."""
    if abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:.0f}"
    elif abs(value) >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"
    return f"{text}{unit}" if unit in ("", "x") else f"{text} {unit}"


def _goal(row: Row) -> str:
    told = []
    if row.most is not None:
        told.append(f"<= {number(row.most, row.unit)}")
    if row.least is not None:
        told.append(f">= {number(row.least, row.unit)}")
    if row.exact is not None:
        told.append(row.exact[0])
    return ", ".join(told) or "-"


HEAD = "| # | what | goal | ours | middle half | beside | met |\n|---|---|---|---|---|---|---|"


def line(row: Row) -> str:
    """The row in the Markdown table."""
    ours = number(row.ours.median, row.unit) + (f" of {row.against}" if row.against else "")
    middle = f"{number(row.ours.low)} to {number(row.ours.high)}" if row.ours.rounds > 1 else "counted"
    beside = "; ".join(f"{name} {number(one.median)}" for name, one in row.beside.items()) or "-"
    met = {True: "yes", False: "**no**", None: "-"}[row.met]
    return f"| {row.goal} | {row.what} | {_goal(row)} | {ours} | {middle} | {beside} | {met} |"


def machine() -> dict[str, object]:
    """What the numbers were taken on."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": [round(one, 2) for one in os.getloadavg()],
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(one.partition(":")[2].strip() for one in lines if one.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def told_machine() -> str:
    """The same in one line."""
    here = machine()
    load = here["load"]
    busy = f"; load {load[0]} at the end" if isinstance(load, list) else ""
    return (
        f"{here['cores']} cores ({here['processor']}), {here['system']}, "
        f"{here['implementation']} {here['python']}, stock event loop; {here['date']}{busy}"
    )


def keep(path: Path | None, kind: str, record: Mapping[str, object]) -> None:
    """Append one record as a JSON line, where a file was asked for."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **record}, default=str) + "\n")


def row_record(row: Row) -> dict[str, object]:
    """A row with its verdict and samples."""
    return {**asdict(row), "met": row.met}


def note(text: str) -> None:
    """Progress and what was skipped go to stderr; the table alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)
