"""Approvals on their way through the durable queue: what goes there with a call, and what a worker makes of it.

Theory (S4). A person's word is for one call as it stands: this tool, what the model wrote, what that came to when it
was checked. In the queue that is told by a digest under the journal's own key, so that every process that shares the
file comes to the same one, and none that has only the file's rows can make one. The worker looks the call over anew;
where that comes to something else, the word was for another call.

How long it holds stands there by the calendar, the only clock that two processes have in common. It may have been set
back since: nothing holds for longer than a new approval would.

House rules. Arguments that a person gave are written only as arguments are (session): never where the journal stores
none, and encrypted where it has a cipher.

Not here: when a call is put into the queue (deferring), when a worker asks (asking), using an approval once (journal).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from towerman import sealing
from towerman.bounds import EncodingError, encode
from towerman.core import Core
from towerman.errors import Code
from towerman.records import Approval as Kept
from towerman.records import Deferred, Uncleared, keyed, unpacked
from towerman.trace import ID_CHARACTERS
from towerman.work import Work

if TYPE_CHECKING:
    from towerman.approvals import Approval

MOST_SHOWN: Final = 65_536
"""Bytes of a call's arguments that the journal keeps for the person who decides."""

NOT_CLEARED: Final[Mapping[Uncleared, tuple[Code, str]]] = {
    "denied": ("approval_denied", "Not run: a person denied it."),
    "expired": ("approval_expired", "Not started: its approval was over before its turn came."),
    "changed": ("approval_expired", sealing.CHANGED),
    "taken": ("approval_missing", "Not run: its approval was used for another call."),
    "missing": ("approval_missing", "Not run: its approval is not in the journal any more."),
}
"""What a deferred call is answered whose approval turns out not to hold when it is used. Else it goes back."""


class NotPlain(Exception):
    """What a person has approved would come out of the journal as something else."""


def bound(core: Core, work: Work, index: int, emitted: Mapping[str, object] | str, keywords: object) -> bytes:
    """What the approval of a deferred call is for, as a digest that is the same in every process with this journal.

    Args:
        core: whose journal it is; that was opened.
        work, index: the call.
        emitted: its arguments as they came.
        keywords: what they were checked to.
    """
    from towerman.approvals import binding, shape

    tool = work.tools[index]
    assert tool is not None and core.journal_key is not None and isinstance(keywords, Mapping)
    told = binding(core.journal_key, tool.name, emitted, keywords)
    return keyed(core.journal_key, "approval of a deferred call", told, shape(tool.checker.schema))


def taken_along(core: Core, work: Work, index: int, body: bytes) -> tuple[Kept | None, bytes | None]:
    """What goes into the queue with a call: the person's word, or the question; and the arguments that came with it.

    Args:
        core: whose journal it is.
        work, index: the call.
        body: its arguments, as they are to be stored.

    Raises:
        NotPlain: its arguments, or the person's, are not the same any more when they are read from there.
    """
    approval = (work.gated or {}).get(index)
    if approval is None or not approval.needed or not (approval.cleared or approval.asked):
        return None, None
    tool, call = work.tools[index], work.calls[index]
    assert tool is not None and approval.snapshot is not None
    emitted, _ = unpacked(body)
    try:
        again = tool.checker.check(emitted)
    except Exception:  # it was taken as it came, and is not as it will come
        raise NotPlain from None
    digest = bound(core, work, index, emitted, again)
    if digest != bound(core, work, index, call.arguments, approval.snapshot):
        raise NotPlain
    edited = None
    if approval.edited is not None:
        edited = plain(approval.edited)
        if edited is None:
            raise NotPlain
    return kept(core, work, index, digest), edited


def plain(arguments: Mapping[str, object]) -> bytes | None:
    """Arguments as JSON; None where they would come out of it as something else."""
    from towerman.approvals import binding

    try:
        text = json.dumps(dict(arguments), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text if binding(b"", "", text.decode(), {}) == binding(b"", "", arguments, {}) else None


def kept(core: Core, work: Work, index: int, digest: bytes) -> Kept:
    """A call's approval as it is written down."""
    assert work.gated is not None
    approval, call, run = work.gated[index], work.calls[index], work.run
    filed = work.filed.get(index) if work.filed is not None else None
    batch, slot = (filed.place if filed is not None else None) or (work.number, index)
    return Kept(
        approval.approval_id,
        run.run_id,
        str(call.tool)[: sealing.NAME_CHARACTERS],
        digest,
        core.wall() + approval.expires - core.now(),
        str(call.id)[:ID_CHARACTERS],
        batch,
        slot,
        run.tenant,
        state=approval.state,
        reason=approval.reason or None,
        edited=approval.edited is not None,
    )


def shown(approval: Approval) -> bytes | None:
    """The arguments that a person is shown who is to decide; None where JSON has no form for them."""
    try:
        return encode(dict(approval.snapshot or {}), MOST_SHOWN).text.encode()
    except EncodingError:
        return None


# -------------------------------------------------------------------------------------------- in the worker


def brought(core: Core, row: Deferred) -> Approval | None:
    """The approval that came with a deferred call; None where nobody was asked yet.

    Raises:
        ValueError: a person gave arguments, and what is stored is none.
    """
    asked = row.asked
    if asked is None:
        return None
    from towerman.approvals import Approval

    approval = Approval(asked.approval_id)
    approval.state, approval.reason = asked.state, asked.reason or ""
    if asked.edited and asked.state == "approved":
        given = json.loads(row.edited) if row.edited is not None else None
        if not isinstance(given, dict):
            raise ValueError("no arguments")
        approval.edited = given
    approval.expires = core.now() + min(asked.expires_at - core.wall(), core.policy.approval_lifetime)
    return approval


def used(core: Core, work: Work, index: int) -> tuple[Kept | None, bytes | None]:
    """What a worker shows with the intent of a call: the approval that lets it start, and the arguments it brought."""
    approval = (work.gated or {}).get(index)
    if approval is None or not approval.needed:
        return None, None
    row = work.deferral.rows.get(index) if work.deferral is not None else None
    digest = bound(core, work, index, work.calls[index].arguments, approval.snapshot)
    edited = None
    if approval.edited is not None:
        edited = row.edited if row is not None and row.edited is not None else plain(approval.edited)
    return kept(core, work, index, digest), edited


def said(core: Core, work: Work | None) -> tuple[Kept | None, bytes | None]:
    """What a worker writes down about the approval of its call when it lets go of it; nothing where all is there.

    The question, so that it is in the inbox; what was decided here, so that nobody is asked again.
    """
    approval = (work.gated or {}).get(0) if work is not None else None
    if work is None or approval is None or not approval.needed or not approval.asked or approval.snapshot is None:
        return None, None
    row = work.deferral.rows.get(0) if work.deferral is not None else None
    if core.journal_key is None or (row is not None and row.asked is not None and row.asked.state != "pending"):
        return None, None
    word = kept(core, work, 0, bound(core, work, 0, work.calls[0].arguments, approval.snapshot))
    given = plain(approval.edited) if approval.edited is not None else None
    if approval.state == "expired" or (approval.edited is not None and given is None):
        return None, None
    return word, shown(approval) if approval.state == "pending" else given
