"""The table of means: how long calls of each tool take, over all processes.

Theory. What a process has learned since it last told is added to what is there: each mean counts as often as it has
answers, up to a weight. Above that the past gives way, so that a tool that has become faster, or slower, is known as
such after some hundred calls.

House rules. Each function is one step of a transaction that the writer has begun. Names of tools, numbers and times;
nothing of a call.

Not here: what is made of them (core, plan), when they are told (runner).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Final

from towerman.journal.session import Session

MOST_WEIGHT: Final = 1000.0
"""Answers that the past counts as at most."""

MOST_TOOLS: Final = 10_000
"""Tools that are kept; of more those go that were told of longest ago."""


def add(session: Session, learned: Mapping[str, tuple[int, float]]) -> None:
    """Add what was learned.

    Args:
        session: in whose transaction.
        learned: by tool name: answers, and their mean seconds.
    """
    now = session.wall()
    for tool, (count, seconds) in learned.items():
        if count < 1 or not (isfinite(seconds) and seconds >= 0):
            continue
        row = session.db.execute("SELECT weight, seconds FROM means WHERE tool = ?", (tool,)).fetchone()
        weight, mean = row if row is not None else (0.0, 0.0)
        total = weight + count
        session.db.execute(
            "INSERT OR REPLACE INTO means (tool, weight, seconds, told_at) VALUES (?, ?, ?, ?)",
            (tool, min(total, MOST_WEIGHT), mean + (seconds - mean) * (count / total), now),
        )
    session.db.execute(
        "DELETE FROM means WHERE tool IN (SELECT tool FROM means ORDER BY told_at DESC, tool LIMIT -1 OFFSET ?)",
        (MOST_TOOLS,),
    )


def read(session: Session) -> dict[str, tuple[int, float]]:
    """By tool name: how many answers its mean counts as, and the mean in seconds."""
    rows = session.db.execute("SELECT tool, weight, seconds FROM means").fetchall()
    return {tool: (max(1, round(weight)), seconds) for tool, weight, seconds in rows}


def prune(session: Session, before: float) -> int:
    """Forget tools that were last told of before a Unix time. Returns how many."""
    return session.db.execute("DELETE FROM means WHERE told_at < ?", (before,)).rowcount
