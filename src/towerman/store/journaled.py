"""Whole results in the journal.

Theory. Where there is a journal, what a model was told outlives the process, and so does what it may read on in. The
journal answers from its own thread; whoever asks here waits for that, on a thread.

Not here: the journal's tables.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final, Protocol

ANSWER_SECONDS: Final = 15.0
"""How long a content waits for the journal."""


class Blobs(Protocol):
    """What is asked of a journal."""

    def keep_blob(
        self, handle: str, content: bytes, *, run_id: str, tool: str, tenant: str | None = None
    ) -> Future[bool]:
        """Keep a content."""
        ...  # pragma: no cover - a protocol has no body

    def read_blob(self, handle: str, first: int = 0, size: int | None = None) -> Future[bytes | None]:
        """A slice of a content."""
        ...  # pragma: no cover - a protocol has no body

    def drop_blob(self, handle: str) -> Future[bool]:
        """Forget a content."""
        ...  # pragma: no cover - a protocol has no body


class JournalStore:
    """Keeps contents in a journal. What goes wrong there is raised.

    Args:
        journal: where.
    """

    def __init__(self, journal: Blobs) -> None:
        self._journal = journal

    def put(self, handle: str, content: bytes, *, run_id: str, tool: str, tenant: str | None) -> None:
        """Keep a content."""
        self._journal.keep_blob(handle, content, run_id=run_id, tool=tool, tenant=tenant).result(ANSWER_SECONDS)

    def read(self, handle: str, first: int = 0, size: int | None = None) -> bytes | None:
        """A slice of a content; None where there is none."""
        return self._journal.read_blob(handle, first, size).result(ANSWER_SECONDS)

    def drop(self, handle: str) -> None:
        """Forget a content."""
        self._journal.drop_blob(handle).result(ANSWER_SECONDS)

    def __repr__(self) -> str:
        return "JournalStore()"
