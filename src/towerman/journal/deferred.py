"""The table of deferred calls: a queue that several workers take from, and no call goes to two of them.

Theory. A worker claims a call in one step and gets a claim, random bytes that only it knows. It shows the claim with
everything it does for the call, also when it writes the call's intent: one whose call was given to another worker
meanwhile is refused before the handler's first line. When a worker dies, its claims go back into the queue, unless an
intent was written: then the call may have taken effect, and it is unknown until a person settles it (or runs again,
where that does no harm). Calls of one chain are given out one after another, in order; behind an unknown one the chain
stands still.

House rules. Each function is one step of a transaction that the writer has begun. Arguments go
when the answer comes.

Not here: running the call (the worker's), intents and outcomes (calls).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

from towerman.journal.approvals import arguments_of, forget_arguments, keep_arguments
from towerman.journal.session import Session
from towerman.records import Answer, Deferred, DeferredState

_COLUMNS: Final = (
    "handle, tool, run_id, key, digest, call_id, batch, slot, tenant, priority, chain, position, not_before, harmless, "
    "state, attempts, queued_at, claimed_at, ended_at, owner"
)


def _told(session: Session, row: tuple[object, ...], claim: bytes | None = None) -> Deferred:
    live = row[14] == "claimed" and session.lives(cast("int | None", row[19]))
    told = Deferred(*row[:19])  # type: ignore[arg-type]  # the table holds what was put in
    return replace(told, harmless=bool(told.harmless), key=bytes(told.key), live=live, claim=claim)


def enqueue(session: Session, call: Deferred, arguments: bytes) -> Deferred:
    """Put a call into the queue; one of the same identity that is there already is not put in twice."""
    row = session.db.execute(
        f"SELECT {_COLUMNS} FROM deferred WHERE key = ? OR handle = ?", (call.key, call.handle)
    ).fetchone()
    if row is not None:
        return _told(session, row)
    now = session.wall()
    session.db.execute(
        "INSERT INTO deferred (handle, tool, run_id, key, digest, call_id, batch, slot, tenant, priority, chain, "
        "position, not_before, harmless, state, queued_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?)",
        (
            call.handle,
            call.tool,
            call.run_id,
            call.key,
            call.digest,
            call.call_id,
            call.batch,
            call.index,
            call.tenant,
            call.priority,
            call.chain,
            call.position,
            call.not_before,
            call.harmless,
            now,
        ),
    )
    keep_arguments(session, "queued", call.handle, arguments)
    return replace(call, state="queued", queued_at=now, attempts=0)


def claim_next(
    session: Session, tools: Sequence[str] | None = None, limit: int = 1
) -> list[tuple[Deferred, bytes | None]]:
    """Take the next calls of the queue for this worker: (call, its arguments), none where nothing is due.

    Args:
        session: in whose transaction.
        tools: names that this worker has; None: any.
        limit: how many at most.
    """
    requeue_dead(session)
    wanted, given = "", []
    if tools is not None:
        wanted = f"AND d.tool IN ({','.join('?' * len(tools))})"
        given = list(tools)
    now = session.wall()
    rows = session.db.execute(
        f"SELECT d.id, {', '.join(f'd.{name}' for name in _COLUMNS.split(', '))} FROM deferred d "
        f"WHERE d.state = 'queued' AND d.not_before <= ? {wanted} AND (d.chain IS NULL OR NOT EXISTS ("
        "SELECT 1 FROM deferred e WHERE e.chain = d.chain AND (e.position, e.id) < (d.position, d.id) "
        "AND e.state NOT IN ('done', 'cancelled'))) ORDER BY d.priority DESC, d.id LIMIT ?",
        (now, *given, limit),
    ).fetchall()
    found = []
    me = session.sign() if rows else None
    for number, *row in rows:
        claim = os.urandom(16)
        session.db.execute(
            "UPDATE deferred SET state = 'claimed', owner = ?, claim = ?, attempts = attempts + 1, claimed_at = ? "
            "WHERE id = ?",
            (me, claim, now, number),
        )
        session.held.add(claim)
        told = _told(session, tuple(row), claim)
        told = replace(told, state="claimed", attempts=told.attempts + 1, claimed_at=now, live=True)
        found.append((told, arguments_of(session, "queued", told.handle)))
    return found


def requeue_dead(session: Session) -> tuple[int, int]:
    """Look after the claims of workers that died: (how many are in the queue again, how many are unknown)."""
    rows = session.db.execute(
        "SELECT d.id, d.handle, d.owner, d.harmless, c.id, c.state, c.applied, c.owner FROM deferred d "
        "LEFT JOIN calls c ON c.key = d.key WHERE d.state = 'claimed'"
    ).fetchall()
    again = lost = 0
    for number, handle, owner, harmless, call, state, applied, other in rows:
        if session.lives(owner):
            continue
        if call is not None and state == "done":
            body = session.db.execute("SELECT body FROM answers WHERE kind = 'call' AND ref = ?", (call,)).fetchone()
            if body is not None:
                session.db.execute("INSERT OR REPLACE INTO answers VALUES ('queued', ?, ?)", (number, body[0]))
            _end(session, number, handle, "done")
        elif call is None or harmless or (state == "settled" and applied == "no"):
            if call is not None and state == "open" and session.lives(other):
                continue  # somebody else runs the same call: its end is this one's
            session.db.execute(
                "UPDATE deferred SET state = 'queued', owner = NULL, claim = NULL WHERE id = ?", (number,)
            )
            again += 1
        elif state == "settled":
            _end(session, number, handle, "done")
        else:
            session.db.execute(
                "UPDATE deferred SET state = 'unknown', owner = NULL, claim = NULL WHERE id = ?", (number,)
            )
            lost += 1
    return again, lost


def _end(session: Session, number: int, handle: str, state: DeferredState) -> None:
    session.db.execute(
        "UPDATE deferred SET state = ?, owner = NULL, claim = NULL, ended_at = ? WHERE id = ?",
        (state, session.wall(), number),
    )
    forget_arguments(session, "queued", handle)


def finish(session: Session, claim: bytes, answer: Answer) -> bool:
    """Write what a claimed call came to; False where another worker has it by now."""
    session.held.discard(claim)
    row = session.db.execute(
        "SELECT id, handle, harmless FROM deferred WHERE claim = ? AND state = 'claimed'", (claim,)
    ).fetchone()
    if row is None:
        return False
    number, handle, harmless = row
    session.db.execute(
        "INSERT OR REPLACE INTO answers (kind, ref, body) VALUES ('queued', ?, ?)",
        (number, session.seal(answer.to_bytes())),
    )
    if answer.applied == "unknown" and not harmless:
        session.db.execute("UPDATE deferred SET state = 'unknown', owner = NULL, claim = NULL WHERE id = ?", (number,))
    else:
        _end(session, number, handle, "done")
    return True


def give_back(session: Session, claim: bytes, not_before: float = 0.0) -> bool:
    """Put a claimed call back into the queue, unstarted; False where it is another worker's by now."""
    session.held.discard(claim)
    done = session.db.execute(
        "UPDATE deferred SET state = 'queued', owner = NULL, claim = NULL, not_before = ?, attempts = attempts - 1 "
        "WHERE claim = ? AND state = 'claimed'",
        (not_before, claim),
    )
    return done.rowcount > 0


def cancel(session: Session, handle: str) -> bool:
    """Take a call back that waits in the queue; False where it does not wait there."""
    row = session.db.execute("SELECT id FROM deferred WHERE handle = ? AND state = 'queued'", (handle,)).fetchone()
    if row is None:
        return False
    _end(session, row[0], handle, "cancelled")
    return True


def find(session: Session, handle: str) -> tuple[Deferred, Answer | None] | None:
    """One deferred call and its answer, or None."""
    row = session.db.execute(f"SELECT {_COLUMNS}, id FROM deferred WHERE handle = ?", (handle,)).fetchone()
    if row is None:
        return None
    body = session.db.execute("SELECT body FROM answers WHERE kind = 'queued' AND ref = ?", (row[20],)).fetchone()
    return _told(session, row[:20]), None if body is None else Answer.from_bytes(session.open(body[0]))


def listed(
    session: Session, *, state: DeferredState | None = None, run_id: str | None = None, limit: int = 1000
) -> list[Deferred]:
    """Deferred calls, the oldest first."""
    wanted, given = ["1"], []
    for column, value in (("state", state), ("run_id", run_id)):
        if value is not None:
            wanted.append(f"{column} = ?")
            given.append(value)
    rows = session.db.execute(
        f"SELECT {_COLUMNS} FROM deferred WHERE {' AND '.join(wanted)} ORDER BY id LIMIT ?", (*given, limit)
    )
    return [_told(session, row) for row in rows.fetchall()]


def counts(session: Session) -> dict[str, int]:
    """How many there are of each state."""
    rows = session.db.execute("SELECT state, count(*) FROM deferred GROUP BY state")
    return dict(rows.fetchall())


def prune(session: Session, before: float, most: int) -> int:
    """Forget some calls that ended before a Unix time. Returns how many."""
    rows = session.db.execute(
        "SELECT id, handle FROM deferred WHERE state IN ('done', 'cancelled') AND ended_at < ? LIMIT ?", (before, most)
    ).fetchall()
    for number, handle in rows:
        session.db.execute("DELETE FROM answers WHERE kind = 'queued' AND ref = ?", (number,))
        forget_arguments(session, "queued", handle)
        session.db.execute("DELETE FROM deferred WHERE id = ?", (number,))
    return len(rows)
