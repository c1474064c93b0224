"""Events as lines of the standard library's logging.

Theory. One record per event, its message made of `key=value` words. A value that holds a blank, a quote, an equals
sign or anything that is not printable ASCII is written as a JSON string, so that a line break or a terminal sequence
in a name cannot begin a record of its own.

House rules. The library says nothing unless the application configured logging: the logger `towerman` has a
NullHandler. A handler that raises is counted, not fatal.

Not here: what is recorded (trace).
"""

from __future__ import annotations

import json
import logging
import re
from typing import Final

from towerman.errors import PolicyError
from towerman.trace import Event

_root = logging.getLogger("towerman")
_root.addHandler(logging.NullHandler())

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:/@+<>*{}#,-]+").fullmatch

# Where the log's word differs from the event's: shorter, and as the result calls it.
_WORDS: Final = {"run_id": "run", "call_id": "call"}


class LogObserver:
    """Log each event as one line of `key=value` words.

    Args:
        logger: a logger, an adapter, or a logger's name; `towerman` when it is not given.
        level: of every record: a number such as `logging.INFO`, or its name.

    Raises:
        PolicyError: the level is none, or the logger is none.
    """

    def __init__(
        self,
        logger: logging.Logger | logging.LoggerAdapter[logging.Logger] | str | None = None,
        level: int | str = logging.INFO,
    ) -> None:
        if logger is None:
            logger = _root
        elif isinstance(logger, str):
            logger = logging.getLogger(logger)
        elif not isinstance(logger, logging.Logger | logging.LoggerAdapter):
            raise PolicyError(f"logger: a logging.Logger or its name; got {type(logger).__name__}")
        names = logging.getLevelNamesMapping()
        if isinstance(level, str):
            if level.upper() not in names:
                raise PolicyError(f"level: one of {', '.join(names)}, or a number; got {level!r}")
            level = names[level.upper()]
        elif isinstance(level, bool) or not isinstance(level, int):
            raise PolicyError(f"level: a number such as logging.INFO, or its name; got {level!r}")
        self._logger = logger
        self._level = level
        self._lost = 0

    def __call__(self, event: Event) -> None:
        """Log one event; never raises."""
        try:
            if self._logger.isEnabledFor(self._level):
                self._logger.log(self._level, "%s", line_of(event))
        except Exception:
            self._lost += 1

    @property
    def lost(self) -> int:
        """Events that a handler failed to take."""
        return self._lost

    def __repr__(self) -> str:
        name = getattr(self._logger, "name", type(self._logger).__name__)
        return f"LogObserver({name!r}, level={logging.getLevelName(self._level)!r}, lost={self._lost})"


def line_of(event: Event) -> str:
    """The event as `kind key=value ...` on one line."""
    words: list[str] = [event.kind]
    for name, value in event.as_dict().items():
        if name != "kind":
            words.append(f"{_WORDS.get(name, name)}={_word(value)}")
    return " ".join(words)


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".")
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    elif isinstance(value, dict):
        value = ", ".join(f"{key}:{item}" for key, item in value.items())
    text = str(value)
    return text if _PLAIN(text) else json.dumps(text)
