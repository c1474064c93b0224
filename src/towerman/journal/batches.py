"""The table of batches: who is at work on which, and what is kept to go on with them.

Theory. Calls are found again one by one (calls). That is enough to answer a batch that is handed in again, and too
little for two who are at work on one plan at once: each of them would fill in what *its* reads came to, and the same
write could be wanted with two sets of arguments. So one attempt has a batch at a time. Its `token` names it; when it
ends, or its process dies, the next one may go on.

House rules. Each function is one step of a transaction that the writer has begun. The calls of a batch are forgotten
after it: of a plan that could still go on, no finished step may be forgotten.

Not here: what a batch is as a text (documents), who waits for one (runner).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from towerman.documents import BatchVerdict, KeptBatch, NamedBy
from towerman.journal.approvals import forget_arguments, keep_arguments
from towerman.journal.session import Session

_COLUMNS: Final = (
    "b.id, b.run_id, b.named, b.name, b.tenant, b.plan, b.size, b.token, b.owner, b.attempts, b.begun_at, b.ended_at, "
    "b.ok, b.digest, o.host, o.pid, "
    "EXISTS (SELECT 1 FROM arguments a WHERE a.kind = 'batch' AND a.ref = CAST(b.id AS TEXT))"
)
_FROM: Final = "batches b LEFT JOIN owners o ON o.id = b.owner"


def _kept(session: Session, row: tuple[object, ...]) -> KeptBatch:
    token, owner = row[7], cast("int", row[8])
    return KeptBatch(
        number=cast("int", row[0]),
        run_id=cast("str", row[1]),
        named=cast("NamedBy", row[2]),
        name=cast("str", row[3]),
        tenant=cast("str | None", row[4]),
        plan=bool(row[5]),
        size=cast("int", row[6]),
        state="ended" if token is None else "at work" if session.lives(owner) else "cut off",
        stored=bool(row[16]),
        attempts=cast("int", row[9]),
        begun_at=cast("float", row[10]),
        ended_at=cast("float | None", row[11]),
        ok=cast("int | None", row[12]),
        host=cast("str", row[14] or ""),
        pid=cast("int", row[15] or 0),
        digest=None if row[13] is None else bytes(cast("bytes", row[13])),
    )


def begin(
    session: Session,
    key: bytes,
    token: bytes,
    *,
    run_id: str,
    named: NamedBy,
    name: str,
    tenant: str | None,
    plan: bool,
    size: int,
    digest: bytes | None,
    document: bytes | None,
) -> tuple[BatchVerdict, KeptBatch | None]:
    """Take a batch up, if nobody is at work on it: "run", and it is this attempt's until it ends.

    Args:
        session: in whose transaction.
        key: where its identity is stored.
        token: of the attempt.
        run_id, named, name, tenant, plan, size: which batch it is.
        digest: of its calls; one that cannot be made conflicts with nothing.
        document: its calls, to be kept; None: they are not.

    Returns:
        What is to be done, and what was known of it before.
    """
    row = session.db.execute(f"SELECT {_COLUMNS} FROM {_FROM} WHERE b.key = ?", (key,)).fetchone()
    known = None if row is None else _kept(session, row)
    if known is not None:
        if digest is not None and known.digest is not None and digest != known.digest:
            return "conflict", known
        if known.state == "at work":
            return "busy", known
    me, now = session.sign(), session.wall()
    if known is None:
        made = session.db.execute(
            "INSERT INTO batches (key, run_id, named, name, tenant, plan, size, digest, owner, token, begun_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (key, run_id, named, name, tenant, plan, size, digest, me, token, now),
        )
        number = cast("int", made.lastrowid)
    else:
        number = known.number
        session.held.discard(bytes(cast("bytes", row[7] or b"")))
        session.db.execute(
            "UPDATE batches SET owner = ?, token = ?, attempts = attempts + 1, begun_at = ?, ended_at = NULL, "
            "ok = NULL, digest = coalesce(digest, ?) WHERE id = ?",
            (me, token, now, digest, number),
        )
    if document is not None and not (known is not None and known.stored):
        keep_arguments(session, "batch", str(number), document)
    session.held.add(token)
    session.touched.add(key)
    return "run", known


def finish(session: Session, token: bytes, ok: int) -> bool:
    """An attempt has ended: each of its calls has its result. False where it is another attempt's by now.

    Args:
        session: in whose transaction.
        token: of the attempt.
        ok: how many of its calls ended ok.
    """
    session.held.discard(token)
    row = session.db.execute("SELECT id, key FROM batches WHERE token = ?", (token,)).fetchone()
    if row is None:
        return False
    session.db.execute(
        "UPDATE batches SET token = NULL, ended_at = ?, ok = ? WHERE id = ?", (session.wall(), ok, row[0])
    )
    session.touched.add(bytes(row[1]))
    return True


def listed(session: Session, *, run_id: str | None = None, limit: int = 1000) -> list[KeptBatch]:
    """Kept batches, the newest first."""
    where, given = ("1", ()) if run_id is None else ("b.run_id = ?", (run_id,))
    rows = session.db.execute(
        f"SELECT {_COLUMNS} FROM {_FROM} WHERE {where} ORDER BY b.id DESC LIMIT ?", (*given, limit)
    ).fetchall()
    return [_kept(session, row) for row in rows]


def at_work(session: Session, keys: Sequence[bytes]) -> set[bytes]:
    """Those of the keys on whose batches somebody is at work."""
    rows = session.db.execute(
        f"SELECT key, owner FROM batches WHERE key IN ({','.join('?' * len(keys))}) AND token IS NOT NULL", tuple(keys)
    ).fetchall()
    return {bytes(key) for key, owner in rows if session.lives(owner)}


def prune(session: Session, before: float, most: int) -> int:
    """Forget some batches that ended before a Unix time, or whose process was last heard of before it; one stays while
    a call of it is open or unknown. Returns how many.
    """
    rows = session.db.execute(
        "SELECT b.id, b.owner, b.token FROM batches b LEFT JOIN owners o ON o.id = b.owner "
        "WHERE coalesce(b.ended_at, o.beat, b.begun_at) < ? AND NOT EXISTS (SELECT 1 FROM calls c "
        "WHERE c.of_batch = b.key AND c.state IN ('open', 'unknown')) ORDER BY b.id LIMIT ?",
        (before, most),
    ).fetchall()
    gone = [number for number, owner, token in rows if token is None or not session.lives(owner)]
    for number in gone:
        forget_arguments(session, "batch", str(number))
        session.db.execute("DELETE FROM batches WHERE id = ?", (number,))
    return len(gone)
