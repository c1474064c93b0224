"""A file that is followed: whoever uses it is told when it has changed.

Theory. A thread looks at the file's time, size and identity. Editors and copying programs write in steps, and half a
file may say something that nobody meant, so a change counts once the file has stood still from one look to the next.

House rules. The thread is a daemon and keeps nothing alive: what it calls says whether there is still anybody to tell.

Not here: what the file says (config).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import Final

Mark = tuple[int, int, int] | None
"""Time of the last change in nanoseconds, size, identity; None where there is no such file."""


class Taken(Enum):
    """What came of telling that a file has changed."""

    DONE = 1
    """It is settled, or the file is wrong: wait for the next change."""

    LATER = 2
    """It could not be taken now: tell it again at the next look."""

    GONE = 3
    """Nobody is there any more."""


class Follower:
    """Looks at a file again and again.

    Args:
        path: of the file. It counts as known the way it is now.
        changed: called on the follower's thread.
        every: seconds from one look to the next.
        there: is there still somebody to be told? Asked before each look.
    """

    def __init__(self, path: str, changed: Callable[[], Taken], every: float, there: Callable[[], bool]) -> None:
        self._path = path
        self._changed = changed
        self._every: Final = every
        self._there = there
        self._known = self._last = _mark(path)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="towerman-follow", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. What is being told now is told to its end."""
        self._end.set()

    @property
    def alive(self) -> bool:
        """It still looks."""
        return self._thread.is_alive()

    def look(self) -> Taken:
        """One look."""
        mark = _mark(self._path)
        if mark == self._known:
            self._last = mark
            return Taken.DONE
        if mark != self._last:
            self._last = mark
            return Taken.DONE
        taken = self._changed()
        if taken is Taken.DONE:
            self._known = mark
        return taken

    def _follow(self) -> None:
        while not self._end.wait(self._every):
            if not self._there() or self.look() is Taken.GONE:
                return


def _mark(path: str) -> Mark:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
