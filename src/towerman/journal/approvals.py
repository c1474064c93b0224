"""The table of approvals: asked, decided, claimed once.

Theory. An approval is bound to a call and the digest of its arguments. It is decided once: the same decision that
comes again is heard and changes nothing, another one is refused. It is claimed once, in the same step that checks it:
two processes that resume one batch cannot both run the call. It expires by its time, whatever its row says.

House rules. Each function is one step of a transaction that the writer has begun.

Not here: asking people, and what an approval is for (the runner's).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from towerman.journal.calls import MOST_TEXT
from towerman.journal.session import Session
from towerman.records import Approval, ApprovalState, Unsettled

Claim = Literal["claimed", "pending", "denied", "expired", "taken", "changed", "missing"]
"""What comes of claiming an approval: it is this call's now, or why not."""

_COLUMNS: Final = (
    "id, run_id, tool, digest, expires_at, call_id, batch, slot, tenant, state, asked_at, decided_at, decided_by, "
    "reason, claimed_at"
)


def ask(session: Session, approval: Approval, arguments: bytes | None) -> Approval:
    """Write down that a person is asked; asked again with the same id it is as it was."""
    known = find(session, approval.approval_id)
    if known is not None:
        return known
    now = session.wall()
    session.db.execute(
        "INSERT INTO approvals (id, run_id, tool, digest, expires_at, call_id, batch, slot, tenant, state, asked_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', ?)",
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
            now,
        ),
    )
    if arguments is not None:
        keep_arguments(session, "approval", approval.approval_id, arguments)
    return replace(approval, state="pending", asked_at=now)


def find(session: Session, approval_id: str) -> Approval | None:
    """One approval, or None."""
    row = session.db.execute(f"SELECT {_COLUMNS} FROM approvals WHERE id = ?", (approval_id,)).fetchone()
    return None if row is None else _told(session, row)


def listed(
    session: Session, *, state: ApprovalState | None = None, run_id: str | None = None, limit: int = 1000
) -> list[Approval]:
    """Approvals, the oldest first."""
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
        f"SELECT {_COLUMNS} FROM approvals WHERE {' AND '.join(wanted)} ORDER BY asked_at, id", tuple(given)
    )
    found: list[Approval] = []
    for row in rows:
        approval = _told(session, row)
        if state is None or approval.state == state:
            found.append(approval)
            if len(found) >= limit:
                break
    return found


def _told(session: Session, row: tuple[object, ...]) -> Approval:
    approval = Approval(*row)  # type: ignore[arg-type]  # the table holds what was put in
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

    Raises:
        Unsettled: there is none, it has expired, or it was decided otherwise.
    """
    known = find(session, approval_id)
    if known is None:
        raise Unsettled("there is no such approval")
    wanted: ApprovalState = "approved" if approved else "denied"
    if known.state == wanted and (digest is None or digest == known.digest):
        return known
    if known.state != "pending":
        raise Unsettled(f"this approval is {known.state}{' and used' if known.claimed_at is not None else ''}")
    session.db.execute(
        "UPDATE approvals SET state = ?, decided_at = ?, decided_by = ?, reason = ?, expires_at = coalesce(?, "
        "expires_at), digest = coalesce(?, digest) WHERE id = ?",
        (
            wanted,
            session.wall(),
            None if by is None else by[:MOST_TEXT],
            None if reason is None else reason[:MOST_TEXT],
            expires_at,
            digest,
            approval_id,
        ),
    )
    if arguments is not None:
        keep_arguments(session, "approval", approval_id, arguments)
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
    """Forget some approvals that were decided, or expired, before a Unix time. Returns how many."""
    rows = session.db.execute(
        "SELECT id FROM approvals WHERE (state <> 'pending' AND decided_at < ?) OR expires_at < ? LIMIT ?",
        (before, before, most),
    ).fetchall()
    for (approval_id,) in rows:
        session.db.execute("DELETE FROM arguments WHERE kind = 'approval' AND ref = ?", (approval_id,))
        session.db.execute("DELETE FROM approvals WHERE id = ?", (approval_id,))
    return len(rows)


# -------------------------------------------------------------------------------------------- arguments


def keep_arguments(session: Session, kind: Literal["approval", "queued"], ref: str, arguments: bytes) -> None:
    """Store the arguments of what goes on later."""
    session.db.execute(
        "INSERT OR REPLACE INTO arguments (kind, ref, body) VALUES (?, ?, ?)", (kind, ref, session.seal(arguments))
    )


def arguments_of(session: Session, kind: Literal["approval", "queued"], ref: str) -> bytes | None:
    """Stored arguments, or None where there are none."""
    row = session.db.execute("SELECT body FROM arguments WHERE kind = ? AND ref = ?", (kind, ref)).fetchone()
    return None if row is None else session.open(row[0])


def forget_arguments(session: Session, kind: Literal["approval", "queued"], ref: str) -> None:
    """Drop stored arguments that nobody needs any more."""
    session.db.execute("DELETE FROM arguments WHERE kind = ? AND ref = ?", (kind, ref))
