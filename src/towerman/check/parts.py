"""The words of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["error", "warning", "note"]
"""Protection that is declared is not there; an operator should decide; something has no effect."""

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")

Verdict = Literal["yes", "partly", "no", "unknown"]
"""The answer to a question; `unknown` where declarations cannot tell."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that an operator should know.

    Args:
        severity: `error`, `warning` or `note`.
        code: a short name that stays the same, for example `undeclared_access`.
        where: `tower`, `tool NAME` or `pool NAME`.
        message: what is the case, in a sentence.
        fix: what to write instead.
    """

    severity: Severity
    code: str
    where: str
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one of the nine questions.

    Args:
        number: of the question, from 1.
        question: as one would ask it.
        verdict: `yes`, `partly`, `no` or `unknown`.
        because: the figures or names that it rests on.
    """

    number: int
    question: str
    verdict: Verdict
    because: str


@dataclass(frozen=True, slots=True)
class LimitInForce:
    """A limit, and for whom it counts.

    Args:
        name: `process`, `run`, `tool:NAME`, or a pool's name.
        permits: how many it has.
        scope: `process`, `run` or `tenant`.
        counts: the scope in words.
        max_queued: how many calls may wait for it; None: only the tower's bound counts.
        tools: names of the tools that take permits of it; empty for `process` and `run`, which every call takes.
    """

    name: str
    permits: int
    scope: str
    counts: str
    max_queued: int | None
    tools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BudgetInForce:
    """A budget, and for whom it counts.

    Args:
        name: `batch`, `run`, `tenant`, `tenant:NAME` or `process`.
        says: its amounts: `200 calls, 600 seconds`, `25 cost per day`.
        counts: the scope in words.
    """

    name: str
    says: str
    counts: str


def listed(names: list[str], most: int = 5) -> str:
    """`a, b and 3 more`."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


def counted(number: int, what: str) -> str:
    """`1 tool`, `2 tools`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
