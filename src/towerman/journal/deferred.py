"""The table of deferred calls: a queue that several workers take from, and no call goes to two of them.

Theory. A worker claims a call in one step and gets a claim, random bytes that only it knows. It shows the claim with
everything it does for the call, also when it writes the call's intent: one whose call was given to another worker
meanwhile is refused before the handler's first line. When a worker dies, its claims go back into the queue, unless an
intent was written: then the call may have taken effect, and it is unknown until a person settles it (or runs again,
where that does no harm).

Calls of one chain are given out one after another, by their places in it; behind an unknown one the chain stands
still. A call that comes behind several others joins their chains into one, in which the places stay what they were:
those of one batch are comparable. So a chain costs one row a call, however many calls wait for how many.

A call that waits for a person is in the queue like any other, with the id of its approval; only those take it who
could ask somebody. So it holds no worker, and what comes behind it in its chain waits as it does.

House rules. Each function is one step of a transaction that the writer has begun. Arguments go
when the answer comes.

Not here: running the call (worker), intents and outcomes (calls).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Literal, cast

from towerman.journal import approvals
from towerman.journal.approvals import arguments_of, forget_arguments, is_name, keep_arguments
from towerman.journal.session import Session
from towerman.records import Answer, Approval, ClaimState, Deferred, DeferredState, Due, Permission, QueueFull

_COLUMNS: Final = (
    "handle, tool, run_id, key, digest, call_id, batch, slot, tenant, priority, chain, position, needs, not_before, "
    "harmless, state, stop, outcome, code, attempts, returned, queued_at, claimed_at, ended_at, deadline, "
    "permission, approval, owner"
)

_SIZE: Final = _COLUMNS.count(",") + 1

_BEHIND: Final = (
    "EXISTS (SELECT 1 FROM deferred e WHERE e.chain = d.chain AND e.state NOT IN ('done', 'cancelled') "
    "AND (e.state = 'claimed' OR (e.position, e.id) < (d.position, d.id)))"
)
"""Something of the same chain comes before it and is not over, or is at work."""

_ASKS: Final = "EXISTS (SELECT 1 FROM approvals a WHERE a.id = d.approval AND a.state = 'pending' AND a.expires_at > ?)"
"""It waits for a person, as of a Unix time."""

_AT_ONCE: Final = 500


def _told(session: Session, row: Sequence[object], claim: bytes | None = None) -> Deferred:
    *given, deadline, permission, approval, owner = row[:_SIZE]
    told = Deferred(*given)  # type: ignore[arg-type]  # the table holds what was put in
    live = told.state == "claimed" and session.lives(cast("int | None", owner))
    about = approvals.find(session, cast("str", approval)) if approval is not None else None
    needs = tuple(cast("str", row[12]).split())
    return replace(
        told,
        harmless=bool(told.harmless),
        stop=bool(told.stop),
        key=bytes(told.key),
        needs=needs,
        live=live,
        claim=claim,
        approval=cast("str | None", approval),
        asks=None if about is None else about.state,
        asked=about if claim is not None else None,
        deadline=cast("float | None", deadline),
        permission=None if permission is None else _read(cast("str", permission)),
    )


def _read(permission: str) -> Permission:
    """What a run allows and denies, as it was written down."""
    allow, deny = json.loads(permission)
    return None if allow is None else tuple(allow), None if deny is None else tuple(deny)


def enqueue(
    session: Session,
    call: Deferred,
    arguments: bytes,
    behind: Sequence[str] = (),
    most: Sequence[tuple[str | None, int]] = (),
    asked: Approval | None = None,
    edited: bytes | None = None,
) -> Deferred:
    """Put a call into the queue; one of the same identity that is there already is not put in twice.

    Args:
        session: in whose transaction.
        call: what is put in.
        arguments: of the call, as bytes.
        behind: handles of the calls that it comes behind: it joins their chains, and makes them one.
        most: for a tool, or None for all of them, how many may wait.
        asked: what a person has said to it, or was asked.
        edited: the arguments that the person gave, as JSON.

    Raises:
        QueueFull: as many wait as may.
    """
    row = session.db.execute(
        f"SELECT {_COLUMNS} FROM deferred WHERE key = ? OR handle = ?", (call.key, call.handle)
    ).fetchone()
    if row is not None:
        return _told(session, row)
    for tool, limit in most:
        _check_room(session, tool, limit)
    if behind:
        call = replace(call, chain=_joined(session, behind))
    now = session.wall()
    session.db.execute(
        "INSERT INTO deferred (handle, tool, run_id, key, digest, call_id, batch, slot, tenant, priority, chain, "
        "position, needs, not_before, harmless, approval, deadline, permission, state, queued_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?)",
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
            " ".join(call.needs),
            call.not_before,
            call.harmless,
            None if asked is None else asked.approval_id,
            call.deadline,
            None if call.permission is None else json.dumps(call.permission),
            now,
        ),
    )
    keep_arguments(session, "queued", call.handle, arguments)
    if asked is not None:
        known = approvals.link(session, replace(asked, handle=call.handle), edited)
        call = replace(call, approval=known.approval_id, asks=known.state)
    return replace(call, state="queued", queued_at=now, attempts=0)


def _check_room(session: Session, tool: str | None, limit: int) -> None:
    wanted, given = ("", ()) if tool is None else ("AND tool = ?", (tool,))
    (waiting,) = session.db.execute(
        f"SELECT count(*) FROM (SELECT 1 FROM deferred WHERE state = 'queued' {wanted} LIMIT ?)", (*given, limit)
    ).fetchone()
    if waiting >= limit:
        raise QueueFull(f"{limit} deferred calls wait, as many as may")


def _joined(session: Session, behind: Sequence[str]) -> str:
    """One chain of those in which these calls stand."""
    chains: dict[str, None] = {}
    for first in range(0, len(behind), _AT_ONCE):
        some = behind[first : first + _AT_ONCE]
        marks = ",".join("?" * len(some))
        for handle, chain in session.db.execute(
            f"SELECT handle, chain FROM deferred WHERE handle IN ({marks}) ORDER BY id", some
        ).fetchall():
            if chain is None:
                chain = handle
                session.db.execute("UPDATE deferred SET chain = ? WHERE handle = ?", (chain, handle))
            chains[chain] = None
    if not chains:  # those that it was behind are over and forgotten
        return behind[0]
    chain, *others = chains
    for other in others:
        session.db.execute("UPDATE deferred SET chain = ? WHERE chain = ?", (chain, other))
    return chain


def _wanted(tools: Sequence[str] | None, busy: Sequence[str], foreign_before: float | None) -> tuple[str, list[object]]:
    """Which calls a worker takes, as a condition and what is put in there."""
    wanted, given = "1", list[object]()
    if tools is not None:
        wanted, given = f"d.tool IN ({','.join('?' * len(tools))})", [*tools]
        if foreign_before is not None:
            wanted, given = f"({wanted} OR d.queued_at < ?)", [*given, foreign_before]
    if busy:
        wanted, given = f"{wanted} AND d.tool NOT IN ({','.join('?' * len(busy))})", [*given, *busy]
    return wanted, given


def _asking(asks: bool, now: float) -> tuple[str, list[object]]:
    """The same of those that wait for a person: a worker that could ask one takes them, too."""
    return ("", []) if asks else (f"AND NOT {_ASKS} ", [now])


def claim_next(
    session: Session,
    tools: Sequence[str] | None = None,
    limit: int = 1,
    *,
    busy: Sequence[str] = (),
    foreign_before: float | None = None,
    asks: bool = True,
) -> list[tuple[Deferred, bytes | None]]:
    """Take the next calls of the queue for this worker: (call, its arguments), none where nothing is due.

    Args:
        session: in whose transaction.
        tools: names that this worker has; None: any.
        limit: how many at most.
        busy: names of tools of which it takes none now.
        foreign_before: Unix time; of what was queued before it, also what names a tool that this worker has not.
        asks: also calls that wait for a person, since this worker can ask one.
    """
    requeue_dead(session)
    wanted, given = _wanted(tools, busy, foreign_before)
    now = session.wall()
    person, when = _asking(asks, now)
    rows = session.db.execute(
        f"SELECT d.id, {', '.join(f'd.{name}' for name in _COLUMNS.split(', '))} FROM deferred d "
        f"WHERE d.state = 'queued' AND d.not_before <= ? AND {wanted} {person}AND (d.chain IS NULL OR NOT {_BEHIND}) "
        "ORDER BY d.priority DESC, d.id LIMIT ?",
        (now, *given, *when, limit),
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
        told = _told(session, row, claim)
        told = replace(told, state="claimed", attempts=told.attempts + 1, claimed_at=now, live=True)
        if told.needs:
            told = replace(told, lacks=_lacking(session, told.needs))
        if told.asked is not None and told.asked.edited:
            told = replace(told, edited=arguments_of(session, "approval", told.asked.approval_id))
        found.append((told, arguments_of(session, "queued", told.handle)))
    return found


def _lacking(session: Session, needs: Sequence[str]) -> str | None:
    """The first of the calls that did not answer."""
    for handle in needs:
        row = session.db.execute("SELECT state, outcome FROM deferred WHERE handle = ?", (handle,)).fetchone()
        if row != ("done", "ok"):
            return handle
    return None


def due(
    session: Session,
    tools: Sequence[str] | None = None,
    *,
    busy: Sequence[str] = (),
    foreign_before: float | None = None,
    asks: bool = True,
) -> Due:
    """What the queue has for a worker, without taking anything. The arguments are those of `claim_next`."""
    wanted, given = _wanted(tools, busy, foreign_before)
    db, now = session.db, session.wall()
    person, when = _asking(asks, now)
    ready = db.execute(
        f"SELECT 1 FROM deferred d WHERE d.state = 'queued' AND d.not_before <= ? AND {wanted} "
        f"{person}AND (d.chain IS NULL OR NOT {_BEHIND}) LIMIT 1",
        (now, *given, *when),
    ).fetchone()
    if ready is None:
        owners = db.execute("SELECT DISTINCT owner FROM deferred WHERE state = 'claimed'").fetchall()
        ready = next((True for (owner,) in owners if not session.lives(owner)), None)
    (next_at,) = db.execute(
        f"SELECT min(d.not_before) FROM deferred d WHERE d.state = 'queued' AND d.not_before > ? AND {wanted}",
        (now, *given),
    ).fetchone()
    waiting, ends_at = db.execute(
        "SELECT count(*), min(a.expires_at) FROM approvals a JOIN deferred d ON d.approval = a.id "
        "WHERE d.state = 'queued' AND a.state = 'pending' AND a.expires_at > ?",
        (now,),
    ).fetchone()
    if not asks and ends_at is not None:
        next_at = ends_at if next_at is None else min(next_at, ends_at)
    (left,) = db.execute(
        "SELECT (SELECT count(*) FROM deferred WHERE state = 'queued') "
        "+ (SELECT count(*) FROM deferred WHERE state = 'claimed')"
    ).fetchone()
    foreign: tuple[str, ...] = ()
    if tools is not None:
        rows = db.execute("SELECT DISTINCT tool FROM deferred WHERE state = 'queued'").fetchall()
        foreign = tuple(sorted({name for (name,) in rows} - set(tools)))
    return Due(ready is not None, next_at, left, foreign, waiting)


def requeue_dead(session: Session) -> tuple[int, int]:
    """Look after the claims of workers that died: (how many are in the queue again, how many are unknown)."""
    owners = session.db.execute("SELECT DISTINCT owner FROM deferred WHERE state = 'claimed'").fetchall()
    dead = [owner for (owner,) in owners if not session.lives(owner)]
    again = lost = 0
    for gone in dead:
        rows = session.db.execute(
            "SELECT d.id, d.handle, d.harmless, d.stop, c.id, c.state, c.applied, c.outcome, c.code, c.owner "
            "FROM deferred d LEFT JOIN calls c ON c.key = d.key WHERE d.state = 'claimed' AND d.owner IS ?",
            (gone,),
        ).fetchall()
        for number, handle, harmless, stop, call, state, applied, outcome, code, other in rows:
            if call is not None and state == "open" and session.lives(other):
                continue  # somebody else runs the same call: its end is this one's
            if call is not None and state == "done":
                _copy_answer(session, number, call)
                _end(session, number, handle, "done", outcome, code)
            elif state == "settled" and applied == "yes":
                _end(session, number, handle, "done", "ok", None)
            elif call is None or harmless or state == "settled":
                if stop:
                    _end(session, number, handle, "cancelled", "cancelled", "cancelled")
                    continue
                session.db.execute(
                    "UPDATE deferred SET state = 'queued', owner = NULL, claim = NULL WHERE id = ?", (number,)
                )
                again += 1
            else:
                session.db.execute(
                    "UPDATE deferred SET state = 'unknown', owner = NULL, claim = NULL WHERE id = ?", (number,)
                )
                lost += 1
    # One that was given up while its work went on, and whose end has come since.
    rows = session.db.execute(
        "SELECT d.id, d.handle, c.id, c.outcome, c.code FROM deferred d JOIN calls c ON c.key = d.key "
        "WHERE d.state = 'unknown' AND c.state = 'done'"
    ).fetchall()
    for number, handle, call, outcome, code in rows:
        _copy_answer(session, number, call)
        _end(session, number, handle, "done", outcome, code)
    return again, lost


def _copy_answer(session: Session, number: int, call: int) -> None:
    body = session.db.execute("SELECT body FROM answers WHERE kind = 'call' AND ref = ?", (call,)).fetchone()
    if body is not None:
        session.db.execute("INSERT OR REPLACE INTO answers VALUES ('queued', ?, ?)", (number, body[0]))


def _end(
    session: Session, number: int, handle: str, state: DeferredState, outcome: str | None, code: str | None
) -> None:
    session.db.execute(
        "UPDATE deferred SET state = ?, outcome = ?, code = ?, owner = NULL, claim = NULL, ended_at = ? WHERE id = ?",
        (state, outcome, code, session.wall(), number),
    )
    forget_arguments(session, "queued", handle)
    approvals.close(session, number)


def finish(
    session: Session,
    claim: bytes,
    answer: Answer,
    state: Literal["done", "cancelled", "unknown"] = "done",
    asked: Approval | None = None,
) -> bool:
    """Write what a claimed call came to; False where another worker has it by now.

    Args:
        session: in whose transaction.
        claim: the worker's.
        answer: what it came to.
        state: "cancelled": it never began; "unknown": its work was cut off, and nobody knows its effect. Such a call
            keeps its arguments, and its chain stands still, until a person has settled it.
        asked: what a person has said to it here.
    """
    session.held.discard(claim)
    row = session.db.execute(
        "SELECT id, handle FROM deferred WHERE claim = ? AND state = 'claimed'", (claim,)
    ).fetchone()
    if row is None:
        return False
    number, handle = row
    if asked is not None:
        link(session, number, replace(asked, handle=handle), None)
    session.db.execute(
        "INSERT OR REPLACE INTO answers (kind, ref, body) VALUES ('queued', ?, ?)",
        (number, session.seal(answer.to_bytes())),
    )
    if state == "unknown":
        session.db.execute(
            "UPDATE deferred SET state = 'unknown', outcome = ?, code = ?, owner = NULL, claim = NULL WHERE id = ?",
            (answer.outcome, answer.code, number),
        )
    else:
        _end(session, number, handle, state, answer.outcome, answer.code)
    return True


def link(session: Session, number: int, approval: Approval, arguments: bytes | None) -> None:
    """A claimed call has an approval from now on; it keeps the one that it has."""
    session.db.execute(
        "UPDATE deferred SET approval = ? WHERE id = ? AND approval IS NULL", (approval.approval_id, number)
    )
    approvals.link(session, approval, arguments)


def give_back(
    session: Session, claim: bytes, wait: float = 0.0, asked: Approval | None = None, arguments: bytes | None = None
) -> bool:
    """Put a claimed call back into the queue, unstarted; False where it is another worker's by now.

    Args:
        session: in whose transaction.
        claim: the worker's.
        wait: seconds for which nobody takes it; above 0 it counts as one for which there was no room.
        asked: what a person is to be asked about it, or has said.
        arguments: those that the person is shown, or gave.
    """
    session.held.discard(claim)
    row = session.db.execute(
        "SELECT id, handle, stop FROM deferred WHERE claim = ? AND state = 'claimed'", (claim,)
    ).fetchone()
    if row is None:
        return False
    number, handle, stop = row
    if stop:
        _end(session, number, handle, "cancelled", "cancelled", "cancelled")
        return True
    if asked is not None:
        link(session, number, replace(asked, handle=handle), arguments)
    session.db.execute(
        "UPDATE deferred SET state = 'queued', owner = NULL, claim = NULL, not_before = ?, attempts = attempts - 1, "
        "returned = returned + ? WHERE id = ?",
        (session.wall() + wait if wait > 0 else 0.0, wait > 0, number),
    )
    return True


def cancel(session: Session, handle: str) -> DeferredState | None:
    """Take a call back: one that waits is cancelled, one that a worker has is told to stop.

    Returns:
        Its state now: "cancelled", or "claimed" for one that was told to stop; another one could not be cancelled.
        None: there is none of this handle.
    """
    requeue_dead(session)
    row = None
    if is_name(handle):
        row = session.db.execute("SELECT id, state FROM deferred WHERE handle = ?", (handle,)).fetchone()
    if row is None:
        return None
    number, state = row
    if state == "queued":
        _end(session, number, handle, "cancelled", "cancelled", "cancelled")
        return "cancelled"
    if state == "claimed":
        session.db.execute("UPDATE deferred SET stop = 1 WHERE id = ?", (number,))
    return cast("DeferredState", state)


def claims(session: Session, held: Iterable[bytes]) -> dict[bytes, ClaimState]:
    """What has become of a worker's claims."""
    found: dict[bytes, ClaimState] = {}
    for claim in held:
        row = session.db.execute("SELECT stop FROM deferred WHERE claim = ? AND state = 'claimed'", (claim,)).fetchone()
        found[claim] = "lost" if row is None else "stop" if row[0] else "held"
    return found


def find(session: Session, handle: str) -> tuple[Deferred, Answer | None] | None:
    """One deferred call and its answer, or None."""
    if not is_name(handle):
        return None
    row = session.db.execute(f"SELECT {_COLUMNS}, id FROM deferred WHERE handle = ?", (handle,)).fetchone()
    return None if row is None else _with_answer(session, row)


def by_keys(session: Session, keys: Sequence[bytes]) -> dict[bytes, tuple[Deferred, Answer | None]]:
    """Those that have these identities, each with its answer."""
    found: dict[bytes, tuple[Deferred, Answer | None]] = {}
    for first in range(0, len(keys), _AT_ONCE):
        some = keys[first : first + _AT_ONCE]
        rows = session.db.execute(
            f"SELECT {_COLUMNS}, id FROM deferred WHERE key IN ({','.join('?' * len(some))})", some
        )
        for row in rows.fetchall():
            found[bytes(row[3])] = _with_answer(session, row)
    return found


def _with_answer(session: Session, row: Sequence[object]) -> tuple[Deferred, Answer | None]:
    body = session.db.execute("SELECT body FROM answers WHERE kind = 'queued' AND ref = ?", (row[_SIZE],)).fetchone()
    return _told(session, row), None if body is None else Answer.from_bytes(session.open(body[0]))


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
    """Forget some calls that ended before a Unix time, and whose chains are over. Returns how many."""
    rows = session.db.execute(
        "SELECT d.id, d.handle FROM deferred d WHERE d.state IN ('done', 'cancelled') AND d.ended_at < ? "
        "AND (d.chain IS NULL OR NOT EXISTS (SELECT 1 FROM deferred e WHERE e.chain = d.chain "
        "AND e.state NOT IN ('done', 'cancelled'))) LIMIT ?",
        (before, most),
    ).fetchall()
    for number, handle in rows:
        session.db.execute("DELETE FROM answers WHERE kind = 'queued' AND ref = ?", (number,))
        forget_arguments(session, "queued", handle)
        session.db.execute("DELETE FROM deferred WHERE id = ?", (number,))
    return len(rows)
