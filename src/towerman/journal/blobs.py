"""Large contents, kept under a handle and read in slices.

Theory. A content is stored in parts of one size, each sealed by itself, so that a slice costs only the parts that it
lies in. A content is put once and never changes.

House rules. Each function is one step of a transaction that the writer has begun.

Not here: what is large, what a page is (bounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from towerman.journal.session import Session

PART_BYTES: Final = 65_536
"""Bytes of one part."""


@dataclass(frozen=True, slots=True)
class Blob:
    """What is kept under a handle.

    Args:
        handle: its name.
        size: bytes.
        run_id, tool, tenant: whose result it is.
        kept_at: Unix time.
    """

    handle: str
    size: int
    run_id: str
    tool: str
    tenant: str | None
    kept_at: float


def put(session: Session, handle: str, content: bytes, *, run_id: str, tool: str, tenant: str | None = None) -> bool:
    """Keep a content; False where there is one of this handle, which then stays as it is."""
    made = session.db.execute(
        "INSERT INTO blobs (handle, size, part_size, run_id, tenant, tool, kept_at) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (handle) DO NOTHING",
        (handle, len(content), PART_BYTES, run_id, tenant, tool, session.wall()),
    )
    if made.rowcount < 1:
        return False
    session.db.executemany(
        "INSERT INTO blob_parts (handle, number, body) VALUES (?, ?, ?)",
        (
            (handle, number, session.seal(content[first : first + PART_BYTES]))
            for number, first in enumerate(range(0, len(content), PART_BYTES))
        ),
    )
    return True


def find(session: Session, handle: str) -> Blob | None:
    """What is kept under a handle, or None."""
    row = session.db.execute(
        "SELECT handle, size, run_id, tool, tenant, kept_at FROM blobs WHERE handle = ?", (handle,)
    ).fetchone()
    return None if row is None else Blob(*row)


def read(session: Session, handle: str, first: int = 0, size: int | None = None) -> bytes | None:
    """A slice of a content, shorter at its end; None where there is none of this handle.

    Args:
        session: in whose transaction.
        handle: its name.
        first: the first byte, from 0.
        size: how many bytes; None: to the end.
    """
    row = session.db.execute("SELECT size, part_size FROM blobs WHERE handle = ?", (handle,)).fetchone()
    if row is None:
        return None
    whole, part = row
    last = whole if size is None else min(whole, first + size)
    if first >= last:
        return b""
    rows = session.db.execute(
        "SELECT body FROM blob_parts WHERE handle = ? AND number BETWEEN ? AND ? ORDER BY number",
        (handle, first // part, (last - 1) // part),
    ).fetchall()
    joined = b"".join(session.open(body) for (body,) in rows)
    skip = first - first // part * part
    return joined[skip : skip + last - first]


def drop(session: Session, handle: str) -> bool:
    """Forget a content; False where there is none."""
    session.db.execute("DELETE FROM blob_parts WHERE handle = ?", (handle,))
    return session.db.execute("DELETE FROM blobs WHERE handle = ?", (handle,)).rowcount > 0


def prune(session: Session, before: float, most: int) -> int:
    """Forget some contents that were kept before a Unix time. Returns how many."""
    rows = session.db.execute("SELECT handle FROM blobs WHERE kept_at < ? LIMIT ?", (before, most)).fetchall()
    for (handle,) in rows:
        drop(session, handle)
    return len(rows)
