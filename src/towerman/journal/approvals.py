"""The table of approvals: asked, decided, claimed once.

Theory. An approval is bound to a call and the digest of its arguments. It is decided once: the same decision that
comes again is heard and changes nothing, another one is refused. It is claimed once, in the same step that checks it:
two processes that resume one batch cannot both run the call. It expires by its time, whatever its row says.

That of a deferred call goes with it: whoever is to run the call finds what was said, uses it in the same step in
which the call's intent is written, and only for this call. Then it may use it again: a call whose worker died before
its first line, or that may be repeated, is the same call.

House rules. Each function is one step of a transaction that the writer has begun.

Not here: asking people, and what an approval is for (the runner's).
"""

from __future__ import annotations

import os
from dataclasses import replace
from hashlib import sha256
from typing import Final, Literal

from towerman.journal.session import Session
from towerman.records import Approval, ApprovalState, NotCleared, Unsettled

MOST_TEXT: Final = 500
"""Longest name or reason of whoever decides."""

MOST_NAME: Final = 200
"""Bytes of a name; a longer one names nothing."""

Claim = Literal["claimed", "pending", "denied", "expired", "taken", "changed", "missing"]
"""What comes of claiming an approval: it is this call's now, or why not."""

_COLUMNS: Final = (
    "id, run_id, tool, digest, expires_at, call_id, batch, slot, tenant, state, asked_at, decided_at, decided_by, "
    "reason, claimed_at, handle, edited, claimed_for"
)


def ask(session: Session, approval: Approval, arguments: bytes | None) -> Approval:
    """Write down that a person is asked; asked again with the same id it is as it was."""
    known = find(session, approval.approval_id)
    if known is not None:
        return known
    return _put_in(session, replace(approval, state="pending"), arguments)


def _put_in(session: Session, approval: Approval, arguments: bytes | None) -> Approval:
    now = session.wall()
    decided_at = None if approval.state == "pending" else now
    session.db.execute(
        "INSERT INTO approvals (id, run_id, tool, digest, expires_at, call_id, batch, slot, tenant, state, asked_at, "
        "decided_at, decided_by, reason, handle, edited) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            approval.approval_id,
            approval.run_id,
            approval.tool,
            approval.digest,
            approval.expires_at,
            approval.call_id,
            approval.batch,
            approval.index,
            approval.tenant,
            approval.state,
            now,
            decided_at,
            _short(approval.decided_by),
            _short(approval.reason),
            approval.handle,
            approval.edited,
        ),
    )
    if arguments is not None:
        _keep(session, approval, arguments)
    return replace(approval, asked_at=now, decided_at=decided_at)


def link(session: Session, approval: Approval, arguments: bytes | None) -> Approval:
    """Write down what was said, or asked, about a deferred call; the first decision that was written down counts.

    Args:
        session: in whose transaction.
        approval: with the handle of the call, and what it is bound to there.
        arguments: those that the person is shown, or gave.
    """
    name = approval.approval_id
    known = _row(session, name)
    if known is None:
        return _put_in(session, approval, arguments)
    session.db.execute(
        "UPDATE approvals SET handle = ?, digest = ? WHERE id = ?", (approval.handle, approval.digest, name)
    )
    if known.state == "pending" and approval.state != "pending" and session.wall() < known.expires_at:
        session.db.execute(
            "UPDATE approvals SET state = ?, decided_at = ?, decided_by = ?, reason = ?, expires_at = ?, edited = ? "
            "WHERE id = ?",
            (
                approval.state,
                session.wall(),
                _short(approval.decided_by),
                _short(approval.reason),
                approval.expires_at,
                approval.edited,
                name,
            ),
        )
        if arguments is not None:
            _keep(session, approval, arguments)
    after = _row(session, name)
    assert after is not None
    return after


def use(session: Session, given: Approval, edited: bytes | None, key: bytes) -> None:
    """A worker is about to start a deferred call: use its approval, for this call and no other.

    Args:
        session: in whose transaction.
        given: the approval as the worker knows it, approved.
        edited: the arguments that the call is to run with in place of its own.
        key: of the call.

    Raises:
        NotCleared: it does not hold.
    """
    known = link(session, given, edited)
    if known.claimed_at is not None and known.claimed_for != key:
        raise NotCleared("taken")
    if known.state == "denied":
        raise NotCleared("denied")
    if session.wall() >= known.expires_at:
        raise NotCleared("expired")
    if known.state != "approved":
        raise NotCleared("pending")
    if known.edited != given.edited:
        raise NotCleared("other")
    if known.edited and edited is not None:
        stored = arguments_of(session, "approval", known.approval_id)
        if stored is not None and stored != edited:
            raise NotCleared("other")
    if known.claimed_at is None:
        session.db.execute(
            "UPDATE approvals SET claimed_at = ?, claimed_by = ?, claimed_for = ? WHERE id = ?",
            (session.wall(), session.sign(), key, known.approval_id),
        )


def close(session: Session, number: int) -> None:
    """A deferred call is over: nobody needs to decide about it any more, and its approval is good for nothing else.

    Args:
        session: in whose transaction.
        number: of its row.
    """
    now, its = session.wall(), "(SELECT approval FROM deferred WHERE id = ?)"
    session.db.execute(
        f"UPDATE approvals SET expires_at = ? WHERE id = {its} AND claimed_at IS NULL AND state <> 'denied' "
        "AND expires_at > ?",
        (now, number, now),
    )
    session.db.execute(f"DELETE FROM arguments WHERE kind = 'approval' AND ref = {its}", (number,))


def _keep(session: Session, approval: Approval, arguments: bytes) -> None:
    """Store the arguments that a person is shown, or gave."""
    if approval.edited:
        _keep_edit(session, approval.approval_id, arguments)
    else:
        keep_arguments(session, "approval", approval.approval_id, arguments)


def _keep_edit(session: Session, approval_id: str, arguments: bytes) -> None:
    """Store a person's arguments, and what they are known again by when they are dropped."""
    keep_arguments(session, "approval", approval_id, arguments)
    salt = os.urandom(16)
    edit = session.seal(salt + sha256(salt + arguments).digest())
    session.db.execute("UPDATE approvals SET edit = ? WHERE id = ?", (edit, approval_id))


def _is_edit(session: Session, approval_id: str, arguments: bytes) -> bool:
    """Are these the arguments that a person gave?"""
    row = session.db.execute("SELECT edit FROM approvals WHERE id = ?", (approval_id,)).fetchone()
    if row is None or row[0] is None:  # decided before this was kept
        return arguments_of(session, "approval", approval_id) == arguments
    edit = session.open(row[0])
    return sha256(edit[:16] + arguments).digest() == edit[16:]


def _short(text: str | None) -> str | None:
    """A person's words as they are kept: not too long, and such as can be written."""
    return None if text is None else text[:MOST_TEXT].encode("utf-8", "replace").decode()


def is_name(given: object) -> bool:
    """Could something in the journal have this name? People and models write all sorts of things."""
    try:
        return isinstance(given, str) and len(given.encode()) <= MOST_NAME
    except UnicodeEncodeError:
        return False


def find(session: Session, approval_id: str) -> Approval | None:
    """One approval, or None."""
    known = _row(session, approval_id)
    return None if known is None else _by_now(session, known)


def _row(session: Session, approval_id: str) -> Approval | None:
    """One approval as it was last written, whatever time it is."""
    if not is_name(approval_id):
        return None
    row = session.db.execute(f"SELECT {_COLUMNS} FROM approvals WHERE id = ?", (approval_id,)).fetchone()
    return None if row is None else _told(row)


def listed(
    session: Session, *, state: ApprovalState | None = None, run_id: str | None = None, limit: int = 1000
) -> list[Approval]:
    """Approvals, the oldest first; of those of one instant, as they were asked for."""
    wanted: list[str] = ["1"]
    given: list[str] = []
    if state is not None:
        # What has expired was pending or approved when it was last written.
        wanted.append("state IN ('pending', 'approved')" if state == "expired" else "state = ?")
        given += [] if state == "expired" else [state]
    if run_id is not None:
        wanted.append("run_id = ?")
        given.append(run_id)
    rows = session.db.execute(
        f"SELECT {_COLUMNS} FROM approvals WHERE {' AND '.join(wanted)} ORDER BY asked_at, rowid", tuple(given)
    )
    found: list[Approval] = []
    for row in rows:
        approval = _by_now(session, _told(row))
        if state is None or approval.state == state:
            found.append(approval)
            if len(found) >= limit:
                break
    return found


def _told(row: tuple[object, ...]) -> Approval:
    approval = Approval(*row)  # type: ignore[arg-type]  # the table holds what was put in
    return replace(approval, edited=bool(approval.edited))


def _by_now(session: Session, approval: Approval) -> Approval:
    late = session.wall() >= approval.expires_at and approval.claimed_at is None
    return replace(approval, state="expired") if late and approval.state in ("pending", "approved") else approval


def decide(
    session: Session,
    approval_id: str,
    approved: bool,
    *,
    by: str | None = None,
    reason: str | None = None,
    expires_at: float | None = None,
    digest: bytes | None = None,
    arguments: bytes | None = None,
) -> Approval:
    """Write down a decision.

    Args:
        session: in whose transaction.
        approval_id: which one.
        approved: yes or no.
        by: who.
        reason: why.
        expires_at: Unix time until which it holds; None: as it was asked.
        digest, arguments: of an edited call.

    A deferred call that waits for it may be taken at once.

    Raises:
        Unsettled: there is none, it has expired, or it was decided otherwise.
    """
    known = find(session, approval_id)
    if known is None:
        raise Unsettled("there is no such approval")
    wanted: ApprovalState = "approved" if approved else "denied"
    same = (digest is None or digest == known.digest) and (
        arguments is None or (known.edited and _is_edit(session, approval_id, arguments))
    )
    if known.state == wanted and same:
        return known
    if known.state != "pending":
        raise Unsettled(f"this approval is {known.state}{' and used' if known.claimed_at is not None else ''}")
    session.db.execute(
        "UPDATE approvals SET state = ?, decided_at = ?, decided_by = ?, reason = ?, expires_at = coalesce(?, "
        "expires_at), digest = coalesce(?, digest), edited = ? WHERE id = ?",
        (
            wanted,
            session.wall(),
            _short(by),
            _short(reason),
            expires_at,
            digest,
            arguments is not None,
            approval_id,
        ),
    )
    if arguments is not None:
        _keep_edit(session, approval_id, arguments)
    if known.handle is not None:
        session.db.execute("UPDATE deferred SET not_before = 0 WHERE handle = ? AND state = 'queued'", (known.handle,))
    after = find(session, approval_id)
    assert after is not None
    return after


def claim(session: Session, approval_id: str, digest: bytes) -> tuple[Claim, Approval | None]:
    """Use an approval for a call with these arguments: once, and only if it holds now."""
    known = find(session, approval_id)
    if known is None:
        return "missing", None
    if known.claimed_at is not None:
        return "taken", known
    if known.state != "approved":
        return known.state, known
    if known.digest != digest:
        return "changed", known
    me, now = session.sign(), session.wall()
    session.db.execute("UPDATE approvals SET claimed_at = ?, claimed_by = ? WHERE id = ?", (now, me, approval_id))
    return "claimed", replace(known, claimed_at=now)


def prune(session: Session, before: float, most: int) -> int:
    """Forget some approvals that were decided, or expired, before a Unix time. Returns how many.

    That of a deferred call stays as long as the call is not over.
    """
    rows = session.db.execute(
        "SELECT id FROM approvals a WHERE ((state <> 'pending' AND decided_at < ?) OR expires_at < ?) AND NOT EXISTS "
        "(SELECT 1 FROM deferred d WHERE d.approval = a.id AND d.state NOT IN ('done', 'cancelled')) LIMIT ?",
        (before, before, most),
    ).fetchall()
    for (approval_id,) in rows:
        session.db.execute("DELETE FROM arguments WHERE kind = 'approval' AND ref = ?", (approval_id,))
        session.db.execute("DELETE FROM approvals WHERE id = ?", (approval_id,))
    return len(rows)


# -------------------------------------------------------------------------------------------- arguments


def keep_arguments(session: Session, kind: Literal["approval", "queued", "batch"], ref: str, arguments: bytes) -> None:
    """Store the arguments of what goes on later."""
    session.db.execute(
        "INSERT OR REPLACE INTO arguments (kind, ref, body) VALUES (?, ?, ?)", (kind, ref, session.seal(arguments))
    )


def arguments_of(session: Session, kind: Literal["approval", "queued", "batch"], ref: str) -> bytes | None:
    """Stored arguments, or None where there are none."""
    row = session.db.execute("SELECT body FROM arguments WHERE kind = ? AND ref = ?", (kind, ref)).fetchone()
    return None if row is None else session.open(row[0])


def forget_arguments(session: Session, kind: Literal["approval", "queued", "batch"], ref: str) -> None:
    """Drop stored arguments that nobody needs any more."""
    session.db.execute("DELETE FROM arguments WHERE kind = ? AND ref = ?", (kind, ref))
