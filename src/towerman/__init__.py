"""Towerman clears every tool call of an agent before it runs: one batch in, one result per call out."""

from typing import TYPE_CHECKING

from towerman.calls import Batch, Call, Result
from towerman.errors import CODES, Code, InputError, PolicyError, ToolError, TowermanError
from towerman.policy import Pool
from towerman.tower import BatchResult, PoolStatistics, Run, Statistics, Tower
from towerman.trace import Event, Observer, Span
from towerman.work import Context

if TYPE_CHECKING:
    from towerman.explain import Explanation
    from towerman.observers import JsonlObserver, LogObserver

__version__ = "0.1.0"

__all__ = [
    "CODES",
    "Batch",
    "BatchResult",
    "Call",
    "Code",
    "Context",
    "Event",
    "Explanation",
    "InputError",
    "JsonlObserver",
    "LogObserver",
    "Observer",
    "PolicyError",
    "Pool",
    "PoolStatistics",
    "Result",
    "Run",
    "Span",
    "Statistics",
    "ToolError",
    "Tower",
    "TowermanError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """What brings further modules with it is imported when it is first asked for."""
    if name in ("JsonlObserver", "LogObserver"):
        from towerman import observers

        return getattr(observers, name)
    if name == "Explanation":
        from towerman import explain

        return explain.Explanation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
