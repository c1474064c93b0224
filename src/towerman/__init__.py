"""Towerman clears every tool call of an agent before it runs: one batch in, one result per call out."""

from typing import TYPE_CHECKING

from towerman.calls import Batch, Call, Result
from towerman.errors import CODES, Code, InputError, PolicyError, RateLimited, ToolError, TowermanError
from towerman.policy import Breaker, Budget, Pool, Rate, Retry
from towerman.tower import Run, Tower
from towerman.trace import Event, Observer, Span
from towerman.work import BatchResult, Context

if TYPE_CHECKING:
    from towerman.approvals import ApprovalRequest, Approved, Denied
    from towerman.changes import Change, Changes
    from towerman.check import CheckReport
    from towerman.explain import Explanation
    from towerman.journal import Journal, JournalUnavailable
    from towerman.leftovers import CloseReport, DeadLetter, Leftover
    from towerman.observers import JsonlObserver, LogObserver
    from towerman.pages import Page, ResultStore
    from towerman.report import ObserveReport
    from towerman.runner import Worker, WorkerReport
    from towerman.terminal import ask_terminal
    from towerman.tower.reader import read_result
    from towerman.tower.statistics import (
        ApprovalStatistics,
        BreakerStatistics,
        BudgetStatistics,
        EngineStatistics,
        JournalStatistics,
        PoolStatistics,
        RateStatistics,
        Statistics,
    )

__version__ = "0.1.0"

__all__ = [
    "CODES",
    "ApprovalRequest",
    "ApprovalStatistics",
    "Approved",
    "Batch",
    "BatchResult",
    "Breaker",
    "BreakerStatistics",
    "Budget",
    "BudgetStatistics",
    "Call",
    "Change",
    "Changes",
    "CheckReport",
    "CloseReport",
    "Code",
    "Context",
    "DeadLetter",
    "Denied",
    "Event",
    "Explanation",
    "InputError",
    "Journal",
    "EngineStatistics",
    "JournalStatistics",
    "JournalUnavailable",
    "JsonlObserver",
    "Leftover",
    "LogObserver",
    "ObserveReport",
    "Observer",
    "Page",
    "PolicyError",
    "Pool",
    "PoolStatistics",
    "Rate",
    "RateLimited",
    "RateStatistics",
    "Result",
    "ResultStore",
    "Retry",
    "Run",
    "Span",
    "Statistics",
    "ToolError",
    "Tower",
    "TowermanError",
    "Worker",
    "WorkerReport",
    "__version__",
    "ask_terminal",
    "read_result",
]


_LATER = {
    "ApprovalRequest": "approvals",
    "Approved": "approvals",
    "Change": "changes",
    "Changes": "changes",
    "CheckReport": "check",
    "CloseReport": "leftovers",
    "DeadLetter": "leftovers",
    "Denied": "approvals",
    "Explanation": "explain",
    "Journal": "journal",
    "JournalUnavailable": "journal",
    "JsonlObserver": "observers",
    "Leftover": "leftovers",
    "LogObserver": "observers",
    "ObserveReport": "report",
    "Worker": "runner",
    "WorkerReport": "runner",
    "ask_terminal": "terminal",
    "ApprovalStatistics": "tower.statistics",
    "BreakerStatistics": "tower.statistics",
    "BudgetStatistics": "tower.statistics",
    "EngineStatistics": "tower.statistics",
    "JournalStatistics": "tower.statistics",
    "PoolStatistics": "tower.statistics",
    "RateStatistics": "tower.statistics",
    "Statistics": "tower.statistics",
    "Page": "pages",
    "ResultStore": "pages",
    "read_result": "tower.reader",
}


def __getattr__(name: str) -> object:
    """What brings further modules with it is imported when it is first asked for."""
    if name in _LATER:
        from importlib import import_module

        value: object = getattr(import_module(f"towerman.{_LATER[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
