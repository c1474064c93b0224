"""The table of calls: intents, outcomes, what is unknown, and what a person has settled.

Theory. A call's row is found by its key. Its `token` names the latest start: whoever ends a start must show it, so
that one who was taken for dead, and whose call was begun anew since, ends nothing that is not his.

House rules. Each function is one step of a transaction that the writer has begun. What follows from a row is decided by
`records.verdict` and nowhere else.

Not here: transactions (writer), waiting for somebody else's call (journal).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, cast

from towerman.journal import approvals, batches
from towerman.journal.session import Session
from towerman.records import (
    Answer,
    Intent,
    JournalUnavailable,
    NotBegun,
    NotCleared,
    Record,
    State,
    Unsettled,
    Verdict,
    verdict,
)

Row = tuple[object, ...]

_COLUMNS: Final = (
    "c.id, c.key, c.owner, c.tool, c.run_id, c.batch, c.slot, c.call_id, c.tenant, c.state, c.running, c.harmless, "
    "c.effect_free, c.applied, c.outcome, c.code, c.attempts, c.intended_at, c.ended_at, c.settled_at, c.settled_by, "
    "c.note, c.digest"
)

_NAMES: Final = (
    "tool",
    "run_id",
    "batch",
    "index",
    "call_id",
    "tenant",
    "state",
    "running",
    "harmless",
    "effect_free",
    "applied",
    "outcome",
    "code",
    "attempts",
    "intended_at",
    "ended_at",
    "settled_at",
    "settled_by",
    "note",
    "digest",
)
"""The fields of a record that stand in the columns, from the fourth one on."""

MOST_TEXT: Final = 500
"""Longest name or note of whoever settles a call."""

AT_ONCE: Final = 500
"""Rows that one statement looks up, or one transaction prunes."""


def look_up(session: Session, keys: Sequence[bytes]) -> dict[bytes, Record]:
    """What is written down under these keys, with the answers of those that have one."""
    found: dict[bytes, Record] = {}
    for first in range(0, len(keys), AT_ONCE):
        some = keys[first : first + AT_ONCE]
        marks = ",".join("?" * len(some))
        rows = session.db.execute(
            f"SELECT {_COLUMNS}, a.body FROM calls c LEFT JOIN answers a ON a.kind = 'call' AND a.ref = c.id "
            f"WHERE c.key IN ({marks})",
            some,
        )
        for row in rows.fetchall():
            found[bytes(cast("bytes", row[1]))] = _record(session, row)
    return found


def _record(session: Session, row: Row) -> Record:
    """A row as it is told. An answer stands behind the columns, where it was asked for."""
    owner, state = cast("int", row[2]), cast("State", row[9])
    running = bool(row[10])
    live = (state == "open" or running) and session.lives(owner)
    body = row[len(_COLUMNS.split(",")) :]
    answer = None
    if body and body[0] is not None and state in ("done", "unknown"):
        try:
            answer = Answer.from_bytes(session.open(cast("bytes", body[0])))
        except ValueError:
            raise JournalUnavailable("corrupt", f"journal {session.name}: a stored answer cannot be read") from None
    told: dict[str, object] = dict(zip(_NAMES, row[3:], strict=False))
    told |= {name: bool(told[name]) for name in ("running", "harmless", "effect_free")}
    return Record(number=cast("int", row[0]), live=live, answer=answer, **told)  # type: ignore[arg-type]


def at_work(session: Session, keys: Sequence[bytes]) -> set[bytes]:
    """Those of the keys on whose calls, or batches, somebody is at work."""
    found: set[bytes] = set()
    for first in range(0, len(keys), AT_ONCE):
        some = keys[first : first + AT_ONCE]
        rows = session.db.execute(
            f"SELECT key, owner FROM calls WHERE key IN ({','.join('?' * len(some))}) "
            "AND (state = 'open' OR (state = 'unknown' AND running))",
            some,
        ).fetchall()
        found.update(bytes(key) for key, owner in rows if session.lives(owner))
        found |= batches.at_work(session, some)
    return found


def begin(session: Session, intent: Intent) -> tuple[Verdict, Record | None]:
    """Write an intent, if its call may run.

    Returns:
        "run", and it is written; or what is to be done instead, and the record that says so.

    Raises:
        Unsettled: the claim that it comes under is another worker's by now, or the call was cancelled.
        NotCleared: its approval does not hold.
    """
    if intent.claim is not None:
        row = session.db.execute(
            "SELECT id, key, handle, approval FROM deferred WHERE claim = ? AND state = 'claimed' AND NOT stop",
            (intent.claim,),
        ).fetchone()
        if row is None:
            raise Unsettled("another worker has this call by now, or it was cancelled")
        _clear(session, intent, *row)
    elif intent.key is not None:
        row = session.db.execute(
            "SELECT 1 FROM deferred WHERE key = ? AND state IN ('queued', 'claimed')", (intent.key,)
        ).fetchone()
        if row is not None:
            return "deferred", None
    key = intent.key if intent.key is not None else intent.token
    record = look_up(session, [key]).get(key) if intent.key is not None else None
    told = verdict(record, intent.digest, harmless=intent.harmless)
    if told != "run":
        return told, record
    me, now = session.sign(), session.wall()
    if record is None:
        session.db.execute(
            "INSERT INTO calls (key, token, owner, state, tool, run_id, batch, slot, call_id, tenant, digest, "
            "harmless, effect_free, of_batch, intended_at) VALUES (?, ?, ?, 'open', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                key,
                intent.token,
                me,
                intent.tool,
                intent.run_id,
                intent.batch,
                intent.index,
                intent.call_id,
                intent.tenant,
                intent.digest,
                intent.harmless,
                intent.effect_free,
                intent.of_batch,
                now,
            ),
        )
    else:
        session.db.execute(
            "UPDATE calls SET earlier = state, state = 'open', token = ?, owner = ?, running = 0, harmless = ?, "
            "effect_free = ?, digest = coalesce(?, digest), attempts = attempts + 1, intended_at = ?, ended_at = NULL, "
            "outcome = NULL, code = NULL, applied = 'unknown' WHERE id = ?",
            (intent.token, me, intent.harmless, intent.effect_free, intent.digest, now, record.number),
        )
        session.db.execute("DELETE FROM answers WHERE kind = 'call' AND ref = ?", (record.number,))
    session.held.add(intent.token)
    session.begun.append(intent.token)
    session.touched.add(key)
    return "run", record


def _clear(session: Session, intent: Intent, number: int, key: bytes, handle: str, approval: str | None) -> None:
    """A deferred call is about to start: use its approval, if it needs one."""
    given = intent.approval
    if given is None and approval is None:
        return
    if given is None or approval not in (None, given.approval_id):
        raise NotCleared("missing")
    if approval is None:
        session.db.execute("UPDATE deferred SET approval = ? WHERE id = ?", (given.approval_id, number))
    else:
        known = approvals.find(session, approval)
        if known is None:
            raise NotCleared("missing")
        if known.digest != given.digest:
            raise NotCleared("changed")
    approvals.use(session, replace(given, handle=handle), intent.edited, key)


def begin_all(session: Session, intents: Sequence[Intent]) -> None:
    """Write the intents of calls that one run answers: all of them, or none.

    Raises:
        NotBegun: not all of them may run.
        Unsettled: the claim that one comes under is another worker's by now.
    """
    before = len(session.begun)
    told = [begin(session, one) for one in intents]
    if any(what != "run" for what, _ in told):
        del session.begun[before:]
        session.held.difference_update(one.token for one in intents)
        raise NotBegun(told)


def withdraw(session: Session, tokens: Iterable[bytes]) -> int:
    """Take back intents whose calls never reached their first line: it is as if they had not been written."""
    count = 0
    for token in tokens:
        session.held.discard(token)
        row = session.db.execute(
            "SELECT id, key, earlier FROM calls WHERE token = ? AND state = 'open'", (token,)
        ).fetchone()
        if row is None:
            continue
        number, key, earlier = row
        if earlier is None:
            session.db.execute("DELETE FROM calls WHERE id = ?", (number,))
        else:
            state, applied = ("settled", "no") if earlier == "settled" else ("unknown", "unknown")
            session.db.execute(
                "UPDATE calls SET state = ?, applied = ?, earlier = NULL, attempts = attempts - 1 WHERE id = ?",
                (state, applied, number),
            )
        session.touched.add(bytes(key))
        count += 1
    return count


def finish(session: Session, token: bytes, answer: Answer, *, running: bool = False) -> bool:
    """Write what a begun call came to; of an orphan first that it goes on, later how it ended.

    Args:
        session: in whose transaction.
        token: of its start.
        answer: what it came to.
        running: its work goes on.

    Returns:
        False where it is another start's by now, or has its outcome.
    """
    row = session.db.execute("SELECT id, key, state FROM calls WHERE token = ?", (token,)).fetchone()
    if not running:
        session.held.discard(token)
    if row is None or row[2] == "done":
        return False
    number, key, _ = row
    state = "unknown" if answer.applied == "unknown" else "done"
    session.db.execute(
        "UPDATE calls SET state = ?, earlier = NULL, running = ?, ended_at = ?, outcome = ?, code = ?, applied = ? "
        "WHERE id = ?",
        (state, running, session.wall(), answer.outcome, answer.code, answer.applied, number),
    )
    _keep_answer(session, number, answer)
    session.touched.add(bytes(key))
    return True


def _keep_answer(session: Session, number: int, answer: Answer) -> None:
    """Store what a call was answered. A cipher that fails costs the answer, not what is known of the effect."""
    try:
        body = session.seal(answer.to_bytes())
    except JournalUnavailable:
        session.unsealed += 1
        return
    session.db.execute("INSERT OR REPLACE INTO answers (kind, ref, body) VALUES ('call', ?, ?)", (number, body))


def note(session: Session, intent: Intent, answer: Answer) -> bool:
    """Write down a call that needed no intent, when it has ended; False where one of its identity is there.

    It has no effect, or the run of another one has answered it.
    """
    assert intent.key is not None, "what has no identity is never looked up"
    me, now = session.sign(), session.wall()
    made = session.db.execute(
        "INSERT INTO calls (key, token, owner, state, tool, run_id, batch, slot, call_id, tenant, digest, harmless, "
        "effect_free, of_batch, intended_at, ended_at, outcome, code, applied) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
        (
            intent.key,
            intent.token,
            me,
            "unknown" if answer.applied == "unknown" else "done",
            intent.tool,
            intent.run_id,
            intent.batch,
            intent.index,
            intent.call_id,
            intent.tenant,
            intent.digest,
            intent.harmless,
            intent.effect_free,
            intent.of_batch,
            now,
            now,
            answer.outcome,
            answer.code,
            answer.applied,
        ),
    )
    if made.rowcount < 1:
        return False
    _keep_answer(session, cast("int", made.lastrowid), answer)
    session.touched.add(intent.key)
    return True


# -------------------------------------------------------------------------------------------- for people


def listed(
    session: Session,
    *,
    run_id: str | None = None,
    tool: str | None = None,
    state: State | None = None,
    limit: int = 100,
) -> list[Record]:
    """The latest calls, the newest first, without their answers."""
    wanted, given = ["1"], []
    for column, value in (("run_id", run_id), ("tool", tool)):
        if value is not None:
            wanted.append(f"c.{column} = ?")
            given.append(value)
    if state in ("open", "unknown"):
        wanted.append("c.state IN ('open', 'unknown')")
    elif state is not None:
        wanted.append("c.state = ?")
        given.append(state)
    rows = session.db.execute(
        f"SELECT {_COLUMNS} FROM calls c WHERE {' AND '.join(wanted)} ORDER BY c.id DESC", tuple(given)
    )
    found: list[Record] = []
    for row in rows:
        record = _record(session, row)
        if state is None or state == ("unknown" if record.unknown else record.state):
            found.append(record)
            if len(found) >= limit:
                break
    return found


def unknown(session: Session, limit: int = 1000) -> list[Record]:
    """Calls of which nobody knows whether they took effect, oldest first: theirs is the operator's attention."""
    rows = session.db.execute(f"SELECT {_COLUMNS} FROM calls c WHERE c.state IN ('open', 'unknown') ORDER BY c.id")
    found: list[Record] = []
    for row in rows:
        record = _record(session, row)
        if record.unknown:
            found.append(record)
            if len(found) >= limit:
                break
    return found


def settle(session: Session, number: int, applied: bool, by: str | None, text: str | None) -> Record:
    """Say what came of an unknown call: it took effect, or it did not.

    Raises:
        Unsettled: there is no such call, or it is not unknown.
    """
    row = session.db.execute(f"SELECT {_COLUMNS} FROM calls c WHERE c.id = ?", (number,)).fetchone()
    if row is None:
        raise Unsettled(f"there is no call {number} in the journal")
    record = _record(session, row)
    if not record.unknown:
        what = {"open": "is still at work", "done": "has its outcome", "settled": "is settled"}[record.state]
        raise Unsettled(f"call {number} ({record.tool}) {what}; only unknown ones can be settled")
    session.db.execute(
        "UPDATE calls SET state = 'settled', running = 0, applied = ?, settled_at = ?, settled_by = ?, note = ? "
        "WHERE id = ?",
        ("yes" if applied else "no", session.wall(), _short(by), _short(text), number),
    )
    key = bytes(cast("bytes", row[1]))
    session.touched.add(key)
    now = session.wall()
    if applied:
        session.db.execute(
            "DELETE FROM arguments WHERE kind = 'queued' AND ref IN "
            "(SELECT handle FROM deferred WHERE key = ? AND state = 'unknown')",
            (key,),
        )
        its = session.db.execute("SELECT id FROM deferred WHERE key = ? AND state = 'unknown'", (key,)).fetchone()
        if its is not None:
            approvals.close(session, its[0])
        session.db.execute(
            "UPDATE deferred SET state = 'done', outcome = 'ok', code = NULL, ended_at = ? "
            "WHERE key = ? AND state = 'unknown'",
            (now, key),
        )
    else:
        session.db.execute(
            "UPDATE deferred SET state = 'queued', outcome = NULL, code = NULL, owner = NULL, claim = NULL, stop = 0 "
            "WHERE key = ? AND state = 'unknown'",
            (key,),
        )
    after = session.db.execute(f"SELECT {_COLUMNS} FROM calls c WHERE c.id = ?", (number,)).fetchone()
    return _record(session, after)


def _short(text: str | None) -> str | None:
    return text if text is None else text[:MOST_TEXT]


def counts(session: Session) -> dict[str, int]:
    """How many calls there are of each state; those whose process died count as unknown."""
    rows = session.db.execute("SELECT state, owner, running, count(*) FROM calls GROUP BY state, owner, running")
    found = {"open": 0, "done": 0, "unknown": 0, "settled": 0}
    for state, owner, _, number in rows.fetchall():
        if state == "open" and not session.lives(owner):
            state = "unknown"
        found[state] += number
    return found


def prune(session: Session, before: float) -> int:
    """Forget some calls that ended before a Unix time; what is open or unknown stays, and so do the calls of a batch
    that could be gone on with. Returns how many; 0: all are.
    """
    rows = session.db.execute(
        "SELECT id FROM calls WHERE state IN ('done', 'settled') AND coalesce(ended_at, intended_at) < ? "
        "AND coalesce(settled_at, 0) < ? AND (of_batch IS NULL OR of_batch NOT IN (SELECT key FROM batches)) "
        "ORDER BY id LIMIT ?",
        (before, before, AT_ONCE),
    ).fetchall()
    for (number,) in rows:
        session.db.execute("DELETE FROM answers WHERE kind = 'call' AND ref = ?", (number,))
        session.db.execute("DELETE FROM calls WHERE id = ?", (number,))
    return len(rows)


def prune_owners(session: Session, before: float) -> int:
    """Forget processes that are gone and have nothing here."""
    rows = session.db.execute(
        "SELECT id FROM owners WHERE beat < ? AND id NOT IN (SELECT owner FROM calls) "
        "AND id NOT IN (SELECT owner FROM deferred WHERE owner IS NOT NULL) AND id NOT IN (SELECT owner FROM batches)",
        (before,),
    ).fetchall()
    gone = [number for (number,) in rows if number != session.me and not session.lives(number)]
    for number in gone:
        session.db.execute("DELETE FROM owners WHERE id = ?", (number,))
    return len(gone)
