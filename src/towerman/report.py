"""What a tower in observe mode has seen: what order and resources held back, what its limits would have.

Theory. With mode="observe" capacity is watched and nothing else is relaxed (S13). So there are two stories. What was
serialised or cut really happened: calls stood behind others of their batch, waited for a resource that another run
held, or were refused; the events tell it. What the limits would have done did not happen; the ledger counts how many
calls found a limit full, and adds up for how long and by how much it was over.

House rules. Pure. Nothing is guessed: where a number is a bound, it says so. Names, labels and codes only.

Not here: counting permits (watched), what is true at this instant (`Tower.statistics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from towerman.errors import Code
from towerman.trace import Event
from towerman.watched import RateWatch, Watch

KeyT = TypeVar("KeyT")

MOST_BATCHES: Final = 10_000
"""Batches at work that are followed; of one whose end is never told nothing must be kept for ever."""


@dataclass(frozen=True, slots=True)
class LimitReport:
    """What one limit would have held back.

    Args:
        name: `process`, `run`, `tool:NAME`, or a pool's name. Limits of runs and tenants are added up.
        limit: permits, as declared.
        scope: whom it counts for.
        peak: the most permits that were held at once.
        found_full: calls that started although it was full: they would have waited, or been refused.
        over_seconds: for how long it was over its limit.
        waited_at_least: what these calls would have waited together, at least, in seconds (permits above the limit
            times seconds, so a call of two permits counts twice).
    """

    name: str
    limit: int
    scope: str
    peak: int
    found_full: int
    over_seconds: float
    waited_at_least: float


@dataclass(frozen=True, slots=True)
class RateReport:
    """What one rate limit would have held back.

    Args:
        name: `tool:NAME`, or a pool's name. Rates of runs and tenants are added up.
        rate: as declared: `10/s`.
        scope: whom it counts for.
        too_early: calls that started before it would have let them: they would have waited, or been refused.
        waited: what they would have waited for it together, in seconds, had they come at the same instants.
        longest: the longest of these waits.
    """

    name: str
    rate: str
    scope: str
    too_early: int
    waited: float
    longest: float


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What one unit of a budget would have refused.

    Args:
        name: `budget of run (calls)`: whom it counts for, and the unit. Budgets of runs, batches and tenants are added
            up.
        refused: calls that would have been refused. What such a call would have spent is not counted in its budget.
    """

    name: str
    refused: int


@dataclass(frozen=True, slots=True)
class ToolReport:
    """What became of one tool's calls.

    Args:
        name: the tool.
        calls: calls that started.
        would_have_waited: of these, how many found some limit full.
        would_have_been_refused: the same for a tool that does not wait.
        serialised: calls that stood behind others of their own batch.
        held_seconds: for how long, together.
        refused: calls that were really refused or skipped, by code.
        tokens: what their results took of the model's context, about.
    """

    name: str
    calls: int
    would_have_waited: int
    would_have_been_refused: int
    serialised: int
    held_seconds: float
    refused: Mapping[Code, int]
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class OrderReport:
    """What order and resources held back, really.

    Args:
        tool: whose calls stood behind.
        behind: `call of TOOL`, the first that it stood behind in its batch (needs, resources, or the order of the
            run), or `resource TEMPLATE` that another run held.
        calls: how many.
        seconds: for how long, together.
    """

    tool: str
    behind: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ObserveReport:
    """What a tower in observe mode has seen since it was made: printable, as a mapping.

    Args:
        seconds: since the tower was made.
        batches: that came in.
        calls: that started.
        limits: what each limit would have held back, the most first.
        rates: what each rate would have held back, the most first.
        budgets: what each budget would have refused, the most first.
        tools: what became of each tool's calls, in order of their names.
        order: what order and resources held back, the longest first.
        refused: calls that were really refused, skipped or cut, by code.
        complete: False where events were dropped, so that `tools` and `order` count too little.
        tokens: what all results took of the model's context, about.
    """

    seconds: float
    batches: int
    calls: int
    limits: tuple[LimitReport, ...]
    rates: tuple[RateReport, ...]
    budgets: tuple[BudgetReport, ...]
    tools: tuple[ToolReport, ...]
    order: tuple[OrderReport, ...]
    refused: Mapping[Code, int]
    complete: bool
    tokens: int = 0

    def to_dict(self) -> dict[str, object]:
        """All of it, ready for JSON; keys keep their names and meanings."""
        return {
            "seconds": self.seconds,
            "batches": self.batches,
            "calls": self.calls,
            "limits": [
                {
                    "name": one.name,
                    "limit": one.limit,
                    "scope": one.scope,
                    "peak": one.peak,
                    "found_full": one.found_full,
                    "over_seconds": one.over_seconds,
                    "waited_at_least": one.waited_at_least,
                }
                for one in self.limits
            ],
            "rates": [
                {
                    "name": one.name,
                    "rate": one.rate,
                    "scope": one.scope,
                    "too_early": one.too_early,
                    "waited": one.waited,
                    "longest": one.longest,
                }
                for one in self.rates
            ],
            "budgets": [{"name": one.name, "refused": one.refused} for one in self.budgets],
            "tools": [
                {
                    "name": one.name,
                    "calls": one.calls,
                    "would_have_waited": one.would_have_waited,
                    "would_have_been_refused": one.would_have_been_refused,
                    "serialised": one.serialised,
                    "held_seconds": one.held_seconds,
                    "refused": dict(one.refused),
                    "tokens": one.tokens,
                }
                for one in self.tools
            ],
            "order": [
                {"tool": one.tool, "behind": one.behind, "calls": one.calls, "seconds": one.seconds}
                for one in self.order
            ],
            "refused": dict(self.refused),
            "complete": self.complete,
            "tokens": self.tokens,
        }

    def __str__(self) -> str:
        lines = [
            f"Observed for {_time(self.seconds)}: {_counted(self.calls, 'call')} in "
            f"{self.batches} batch{'' if self.batches == 1 else 'es'}"
            + (f", results of about {_counted(self.tokens, 'token')}" if self.tokens else ""),
            "",
            "What the limits would have held back",
            "",
            *_table(
                ("limit", "permits", "peak", "calls found it full", "over for", "waits of at least"),
                [
                    (
                        one.name,
                        str(one.limit),
                        str(one.peak),
                        str(one.found_full),
                        _time(one.over_seconds),
                        _time(one.waited_at_least),
                    )
                    for one in self.limits
                ],
            ),
            *self._rate_lines(),
            *self._budget_lines(),
            "",
            "What order and resources have held back",
            "",
            *_table(
                ("tool", "behind", "calls", "together"),
                [(one.tool, one.behind, str(one.calls), _time(one.seconds)) for one in self.order],
            ),
            "",
            "Tools",
            "",
            *_table(
                ("tool", "calls", "would have waited", "would have been refused", "serialised", "refused")
                + (("tokens",) if self.tokens else ()),
                [
                    (
                        one.name,
                        str(one.calls),
                        str(one.would_have_waited),
                        str(one.would_have_been_refused),
                        str(one.serialised),
                        ", ".join(f"{count} {code}" for code, count in one.refused.items()),
                        *((f"{one.tokens:,}",) if self.tokens else ()),
                    )
                    for one in self.tools
                ],
            ),
        ]
        if not self.complete:
            lines += ["", "Events were dropped: the last two tables count too little."]
        return "\n".join(lines)

    def _rate_lines(self) -> list[str]:
        if not self.rates:
            return []
        rows = [(one.name, one.rate, str(one.too_early), _time(one.waited), _time(one.longest)) for one in self.rates]
        head = ("rate", "starts", "calls came too early", "waits of together", "longest")
        return ["", "What the rates would have held back", "", *_table(head, rows)]

    def _budget_lines(self) -> list[str]:
        if not self.budgets:
            return []
        rows = [(one.name, str(one.refused)) for one in self.budgets]
        return ["", "What the budgets would have refused", "", *_table(("budget", "calls"), rows)]

    def __repr__(self) -> str:
        full = sum(one.found_full > 0 for one in self.limits)
        return f"ObserveReport({self.calls} calls, {full} of {len(self.limits)} limits were over)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["  nothing"]
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _time(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class _Batch:
    """What is known of a batch that is at work."""

    __slots__ = ("held", "since", "tokens", "tools")

    def __init__(self, since: float) -> None:
        self.since = since
        self.tools: dict[int, str] = {}
        self.held: dict[int, float] = {}
        self.tokens: dict[int, tuple[str, int]] = {}


class Tally:
    """An observer that adds up what order and resources have held back. One thread tells it, any may read it.

    Attributes:
        batches: that came in.
        calls: that started, by tool.
        order: by (tool, behind), how many calls and seconds.
        serialised: by tool, how many calls stood behind others of their batch, and for how many seconds.
        refused: by (tool, code).
        tokens: of results, by tool.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew, as in the child of a fork."""
        self.batches = 0
        self.calls: dict[str, int] = {}
        self.order: dict[tuple[str, str], tuple[int, float]] = {}
        self.serialised: dict[str, tuple[int, float]] = {}
        self.refused: dict[tuple[str, Code], int] = {}
        self.tokens: dict[str, int] = {}
        self._open: dict[tuple[str, int], _Batch] = {}

    def __call__(self, event: Event) -> None:
        """One more event."""
        where = (event.run_id, event.batch)
        if event.kind == "batch_started":
            self.batches += 1
            self._open[where] = _Batch(event.time)
            if len(self._open) > MOST_BATCHES:
                del self._open[next(iter(self._open))]
            return
        if event.kind == "batch_finished":
            done = self._open.pop(where, None)
            for name, tokens in done.tokens.values() if done is not None else ():
                self.tokens[name] = self.tokens.get(name, 0) + tokens
            return
        batch, index, tool = self._open.get(where), event.index, event.tool
        if index is not None and tool is not None and event.tokens is not None:
            if event.kind == "counted":  # after the batch
                self.tokens[tool] = self.tokens.get(tool, 0) + event.tokens
            elif batch is not None:  # a result that is trimmed with its batch is told once more
                batch.tokens[index] = tool, event.tokens
        if batch is None or index is None or tool is None:
            return
        batch.tools[index] = tool
        if event.kind == "admitted":
            # It was handed to the gate when its siblings let it.
            batch.held[index] = event.time - (event.waited or 0.0) - batch.since
        elif event.kind == "started":
            self.calls[tool] = self.calls.get(tool, 0) + 1
        elif event.kind == "rejected" and event.code is not None:
            key = (tool, event.code)
            self.refused[key] = self.refused.get(key, 0) + 1
        elif event.kind == "finished" and event.shared_with is None:  # what did not run was not held back
            self._waited(batch, index, tool, event)

    def _waited(self, batch: _Batch, index: int, tool: str, event: Event) -> None:
        """A call has ended that ran: what had it waited for?"""
        behind = event.waited_for or ()
        siblings = [label.removeprefix("call ") for label in behind if label.startswith("call ")]
        if siblings:
            held = batch.held.get(index, 0.0)
            _add(self.serialised, tool, held)
            _add(self.order, (tool, f"call of {batch.tools.get(int(siblings[0]), 'another tool')}"), held)
        resource = next((label for label in behind if label.startswith("resource ")), None)
        if resource is not None:
            _add(self.order, (tool, resource), event.waited or 0.0)


def _add(sums: dict[KeyT, tuple[int, float]], key: KeyT, seconds: float) -> None:
    count, total = sums.get(key, (0, 0.0))
    sums[key] = count + 1, total + seconds


def reported(
    tally: Tally,
    limits: Mapping[str, Watch],
    rates: Mapping[str, RateWatch],
    waiting: Mapping[str, int],
    refused: Mapping[str, int],
    overspent: Mapping[str, int],
    seconds: float,
    *,
    complete: bool,
) -> ObserveReport:
    """Put a report together.

    Args:
        tally: what order and resources have held back.
        limits: what each limit has seen, up to now.
        rates: what each rate has seen.
        waiting: calls that would have waited, by tool.
        refused: calls that would have been refused, by tool.
        overspent: calls that budgets would have refused, by budget.
        seconds: since the tower was made.
        complete: the tally has seen every event.
    """
    calls, order, serialised = dict(tally.calls), dict(tally.order), dict(tally.serialised)
    codes, tokens = dict(tally.refused), dict(tally.tokens)
    names = sorted({*calls, *waiting, *refused, *serialised, *(tool for tool, _ in codes)})
    by_code: dict[Code, int] = {}
    for (_, code), count in codes.items():
        by_code[code] = by_code.get(code, 0) + count
    return ObserveReport(
        seconds=seconds,
        batches=tally.batches,
        calls=sum(calls.values()),
        limits=tuple(
            LimitReport(name, one.limit, one.scope, one.peak, one.started, one.seconds, one.waited)
            for name, one in sorted(limits.items(), key=lambda item: (-item[1].waited, -item[1].started, item[0]))
        ),
        rates=tuple(
            RateReport(name, one.rate, one.scope, one.started, one.waited, one.longest)
            for name, one in sorted(rates.items(), key=lambda item: (-item[1].waited, item[0]))
        ),
        budgets=tuple(
            BudgetReport(name, count) for name, count in sorted(overspent.items(), key=lambda item: (-item[1], item[0]))
        ),
        tools=tuple(
            ToolReport(
                name=name,
                calls=calls.get(name, 0),
                would_have_waited=waiting.get(name, 0),
                would_have_been_refused=refused.get(name, 0),
                serialised=serialised.get(name, (0, 0.0))[0],
                held_seconds=serialised.get(name, (0, 0.0))[1],
                refused={code: count for (tool, code), count in codes.items() if tool == name},
                tokens=tokens.get(name, 0),
            )
            for name in names
        ),
        order=tuple(
            OrderReport(tool, behind, count, total)
            for (tool, behind), (count, total) in sorted(order.items(), key=lambda item: (-item[1][1], item[0]))
        ),
        refused=by_code,
        complete=complete,
        tokens=sum(tokens.values()),
    )
