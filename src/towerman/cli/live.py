"""The live table: every call of a batch while it runs, and what it waits for.

Theory. A board is an observer. It keeps one line per call, as the events tell it; a terminal looks at it ten times
a second. Before a call's first event it is held back in the plan.

House rules. The board only listens: it knows no tower. Names are shown escaped.

Not here: what is printed afterwards (show).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from towerman.clock import RealClock
from towerman.timeline import printable
from towerman.trace import Event

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_STYLES: Final = {"held": "dim", "waiting": "yellow", "running": "bold cyan"}


@dataclass(slots=True)
class Line:
    """A call on the board.

    Args:
        tool: the tool's name, printable.
        state: "held", "waiting", "running" or "done".
        since: the instant of the last change of state.
        blocker: what it waits for now.
        ending: its outcome, or code, when it is done.
        good: it ended ok.
        seconds: how long it ran, when it is done.
        orphan: its work goes on after its result.
    """

    tool: str
    state: str = "held"
    since: float | None = None
    blocker: str = ""
    ending: str = ""
    good: bool = False
    seconds: float | None = None
    orphan: bool = False


class Board:
    """An observer that keeps the state of each call of one batch.

    Args:
        tools: the tools' names as the model wrote them, in emitted order.
    """

    def __init__(self, tools: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._now = RealClock().now
        self._began: float | None = None
        self._lines = [Line(printable(tool)) for tool in tools]

    def __call__(self, event: Event) -> None:
        """Take one event; one that belongs to no call of this batch changes nothing."""
        if event.kind == "batch_started":
            self._began = event.time
        if event.index is None or not 0 <= event.index < len(self._lines):
            return
        with self._lock:
            line = self._lines[event.index]
            if event.kind == "waiting":
                line.state, line.since = "waiting", event.time
                line.blocker = printable((event.waiting_for or "").removeprefix("resource "))
            elif event.kind == "approval_asked":
                line.state, line.since, line.blocker = "waiting", event.time, "a person's approval"
            elif event.kind == "started":
                line.state, line.since, line.blocker = "running", event.time, ""
            elif event.kind == "retrying":
                line.state, line.since = "waiting", event.time
                line.blocker = printable(f"its next attempt, after {event.code}")
            elif event.kind in ("finished", "rejected"):
                line.state, line.since, line.blocker = "done", event.time, ""
                line.ending = printable(event.code or event.outcome or "")
                line.good = event.outcome == "ok"
                line.seconds = event.ran if event.kind == "finished" else None
            elif event.kind == "orphaned":
                line.orphan = True
            elif event.kind == "ended":
                line.orphan = False

    def lines(self) -> list[Line]:
        """A copy of the lines, in emitted order."""
        with self._lock:
            return [
                Line(
                    line.tool,
                    line.state,
                    line.since,
                    line.blocker,
                    line.ending,
                    line.good,
                    line.seconds,
                    line.orphan,
                )
                for line in self._lines
            ]

    def table(self, rows: int) -> Table:
        """The board as a table of at most `rows` calls: those at work first, then those that wait, then the rest."""
        from rich.table import Table
        from rich.text import Text

        now = self._now()
        lines = self.lines()
        counts = Counter(line.state for line in lines)
        title = Text.assemble(
            (f"{_seconds(0.0 if self._began is None else now - self._began):>4} s  ", "dim"),
            (f"{counts['running']} running", _STYLES["running"]),
            "  ",
            (f"{counts['waiting'] + counts['held']} waiting", _STYLES["waiting"]),
            "  ",
            (f"{counts['done']} done", "green"),
            f"  of {len(lines)} calls",
        )
        shown = list(enumerate(lines))
        if len(shown) > rows:
            order = {"running": 0, "waiting": 1, "held": 2, "done": 3}
            shown = sorted(sorted(shown, key=lambda item: order[item[1].state])[:rows])
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("#", justify="right", style="dim")
        table.add_column("tool", no_wrap=True, overflow="ellipsis", max_width=28)
        table.add_column("state", no_wrap=True, width=7)
        table.add_column("for what, or how it ended", no_wrap=True, overflow="ellipsis", min_width=26)
        table.add_column("s", justify="right", no_wrap=True, width=5)
        for index, line in shown:
            table.add_row(str(index), Text(line.tool), *_cells(line, now))
        if len(lines) > len(shown):
            table.add_row("", Text(f"and {len(lines) - len(shown)} more", style="dim"))
        return table


def _cells(line: Line, now: float) -> tuple[Text, Text, Text]:
    from rich.text import Text

    if line.state == "done":
        style = "green" if line.good else "red"
        what = line.ending + (" (still at work)" if line.orphan else "")
        return Text("done", style=style), Text(what, style=style), Text(_seconds(line.seconds))
    style = _STYLES[line.state]
    since = None if line.since is None else now - line.since
    # A call that is held back has no event until its turn comes, unless the plan said whom it waits for.
    what = line.blocker or ("calls before it" if line.state == "held" else "")
    return (
        Text("waiting" if line.state == "held" else line.state, style=style),
        Text(what, style=style),
        Text(_seconds(since)),
    )


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{max(0.0, seconds):.1f}"
