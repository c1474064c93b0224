"""The face of a check."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from towerman.check.answers import answers, budgets, limits
from towerman.check.findings import Declared, findings
from towerman.check.parts import SEVERITIES, Answer, BudgetInForce, Finding, LimitInForce, Severity, counted, listed
from towerman.policy import TowerPolicy
from towerman.tools import Tool

_WIDTH: Final = 110


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a tower's declarations say before concurrent tools are enabled: printable, as a mapping.

    Args:
        answers: to the nine questions, in their order.
        limits: every limit with the scope that is in force.
        budgets: every budget that the tower declares, with the scope that is in force.
        findings: the gravest first.
    """

    answers: tuple[Answer, ...]
    limits: tuple[LimitInForce, ...]
    budgets: tuple[BudgetInForce, ...]
    findings: tuple[Finding, ...]

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity.

        Args:
            severity: `error`, `warning` or `note`.
        """
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def ok(self) -> bool:
        """There is no error and no warning."""
        return not (self.of("error") or self.of("warning"))

    def to_dict(self) -> dict[str, object]:
        """All of it, ready for JSON; keys keep their names and meanings."""
        return {
            "ok": self.ok,
            "answers": [
                {"number": one.number, "question": one.question, "verdict": one.verdict, "because": one.because}
                for one in self.answers
            ],
            "limits": [
                {
                    "name": one.name,
                    "permits": one.permits,
                    "scope": one.scope,
                    "counts": one.counts,
                    "max_queued": one.max_queued,
                    "tools": list(one.tools),
                }
                for one in self.limits
            ],
            "budgets": [{"name": one.name, "says": one.says, "counts": one.counts} for one in self.budgets],
            "findings": [
                {
                    "severity": one.severity,
                    "code": one.code,
                    "where": one.where,
                    "message": one.message,
                    "fix": one.fix,
                }
                for one in self.findings
            ],
        }

    def __str__(self) -> str:
        lines = ["Nine questions before enabling concurrent tools", ""]
        for one in self.answers:
            lines.append(f"{one.number}  {one.verdict:<8} {one.question}")
            lines += textwrap.wrap(one.because, _WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 12)
        lines += ["", "Limits in force", "", *self._limits_as_text(), ""]
        if self.budgets:
            rows = [("budget", "may spend", "counts for"), *((one.name, one.says, one.counts) for one in self.budgets)]
            lines += ["Budgets in force", "", *_table(rows), ""]
        counts = [counted(len(self.of(severity)), severity) for severity in SEVERITIES]
        lines.append(f"Findings: {', '.join(counts)}")
        for (severity, code, message, fix), places in self._alike().items():
            told = f"{severity:<8} {_places(places)}: {message}"
            lines += ["", *textwrap.wrap(told, _WIDTH, subsequent_indent=" " * 9)]
            lines += textwrap.wrap(f"fix: {fix}  [{code}]", _WIDTH, initial_indent=" " * 9, subsequent_indent=" " * 14)
        return "\n".join(lines)

    def _alike(self) -> dict[tuple[str, ...], list[str]]:
        """Where what is the case: findings that differ in nothing but the place are read as one."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for one in self.findings:
            alike.setdefault((one.severity, one.code, one.message, one.fix), []).append(one.where)
        return alike

    def _limits_as_text(self) -> list[str]:
        rows = [("limit", "permits", "may queue", "counts for", "taken by")]
        for one in self.limits:
            most = "-" if one.max_queued is None else str(one.max_queued)
            takers = "every call" if one.name in ("process", "run") else listed(list(one.tools)) or "nobody"
            rows.append((one.name, str(one.permits), most, one.counts, takers))
        return _table(rows)

    def __repr__(self) -> str:
        return f"CheckReport({', '.join(counted(len(self.of(severity)), severity) for severity in SEVERITIES)})"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    return [
        "  ".join([f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)] + [row[-1]]) for row in rows
    ]


def _places(places: list[str]) -> str:
    """`tool a`, `tools a, b and c`: findings that read alike are of one kind of place."""
    if len(places) == 1:
        return places[0]
    kind = places[0].partition(" ")[0]
    return f"{kind}s {listed([place.partition(' ')[2] for place in places], 8)}"


def check(tower: TowerPolicy, tools: Sequence[Tool], *, deadline: float | None = None) -> CheckReport:
    """Read what a tower declares.

    Args:
        tower: its own options.
        tools: its tools, in the order of declaration.
        deadline: seconds that its runs may last, if that is known; timeouts are then compared with it.
    """
    declared = Declared(tower, tools, deadline)
    return CheckReport(
        tuple(answers(declared)), tuple(limits(declared)), tuple(budgets(declared)), tuple(findings(declared))
    )
