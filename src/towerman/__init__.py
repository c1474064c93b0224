"""Towerman clears every tool call of an agent before it runs: one batch in, one result per call out."""

from towerman.calls import Batch, Call, Result
from towerman.errors import CODES, Code, InputError, PolicyError, ToolError, TowermanError
from towerman.observers import JsonlObserver, LogObserver
from towerman.policy import Pool
from towerman.tower import BatchResult, PoolStatistics, Run, Statistics, Tower
from towerman.trace import Event, Observer, Span
from towerman.work import Context

__version__ = "0.1.0"

__all__ = [
    "CODES",
    "Batch",
    "BatchResult",
    "Call",
    "Code",
    "Context",
    "Event",
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
