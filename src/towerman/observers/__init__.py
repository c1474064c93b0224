"""Ready-made observers: events into a file, or into the standard library's logging.

Theory. An observer is a callable that takes an `Event`, on Towerman's observer thread, one at a time. These two are
sinks: what they cannot store is counted and told once, and never raised, so that a full disk breaks no call.

House rules. A line is one event, whatever the names in it hold: no name can begin a second line.

Not here: drawing (timeline), the events themselves (trace).
"""

from towerman.observers.jsonl import JsonlObserver, JsonlStatistics, Skipped, read_events
from towerman.observers.log import LogObserver

__all__ = ["JsonlObserver", "JsonlStatistics", "LogObserver", "Skipped", "read_events"]
