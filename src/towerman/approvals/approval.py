"""The state machine of one approval, and the book of those that this process knows.

Theory. pending -> approved | denied | expired. The first decision counts. The same one again is heard and changes
nothing; another one is ignored, and whoever gave it is told. A decision that comes when the time is over changes
nothing either: nobody said no, nobody said yes. An approval that was given goes on having an end, and has expired when
it is over before it was used.

A call that came back pending may be taken up again: by a host that was told of a decision, twice perhaps, or by two of
its threads at once. So each such call has a record, also one that needs no approval and only stood behind one that
does. Whoever starts it claims the record, once; what then came of the call is kept for a while, so that whoever comes
later gets the same answer and nothing runs twice.

House rules. Whoever calls holds the tower's lock. No clock: instants come in.

Not here: records that outlive the process (journal).
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Final, Literal

from towerman.approvals.decisions import Approved, Decision, Denied
from towerman.calls import Result

ApprovalState = Literal["pending", "approved", "denied", "expired"]
"""Of an approval."""

Heard = Literal["taken", "again", "ignored", "late"]
"""What became of a decision: it counts; it was there before; another one was; the time was over."""

NEVER: Final = float("inf")

MOST_KEPT: Final = 10_000
"""Records of calls that came back pending, kept until their time is over; of more, the oldest go."""

MOST_RESULTS: Final = 1_000
"""Results of such calls that are kept."""

_DONE: Final = object()
"""Holds a record whose call has its result."""


def new_id() -> str:
    """A name for a request that nobody else has."""
    return f"apr_{os.urandom(12).hex()}"


class Approval:
    """One call's approval, or its record where it needs none.

    Args:
        approval_id: its name.
        needed: a person has to say yes; else it is only the record of a call that stands behind one.

    Attributes:
        state: pending, approved, denied, expired.
        digest: what it is bound to.
        snapshot: the arguments that a person is shown, kept apart from those that run.
        expires: the instant at which its time is over; NEVER until it was asked for.
        edited: the arguments that the decision brought, or None.
        changed: those arguments are the ones that run.
        reason: of a denial.
        hidden: an identical call of its batch is asked for in its place.
        kept: it is in the book.
        result: what the call came to, where that is kept.
    """

    __slots__ = (
        "approval_id",
        "changed",
        "digest",
        "edited",
        "expires",
        "hidden",
        "holder",
        "kept",
        "needed",
        "reason",
        "result",
        "snapshot",
        "state",
    )

    def __init__(self, approval_id: str, *, needed: bool = True) -> None:
        self.approval_id = approval_id
        self.needed = needed
        self.state: ApprovalState = "pending"
        self.digest = ""
        self.snapshot: Mapping[str, object] | None = None
        self.expires = NEVER
        self.edited: Mapping[str, object] | None = None
        self.changed = False
        self.reason = ""
        self.hidden = False
        self.kept = False
        self.holder: object = None
        self.result: Result | None = None

    @property
    def asked(self) -> bool:
        """Its time runs."""
        return self.expires != NEVER

    @property
    def open(self) -> bool:
        """A person may decide."""
        return self.needed and self.state == "pending"

    @property
    def cleared(self) -> bool:
        """As far as approval goes, its call may be offered."""
        return self.state == "approved" or not self.needed

    @property
    def used(self) -> bool:
        """Its call was started, or has its final result."""
        return self.holder is not None

    def ask(self, now: float, lifetime: float) -> None:
        """It is asked for: its time begins."""
        self.expires = now + lifetime

    def look(self, now: float) -> bool:
        """Is its time over, as of now, before it was used? Then it has expired."""
        if now < self.expires or self.used or self.state in ("denied", "expired"):
            return False
        self.state = "expired"
        return True

    def decide(self, decision: Decision, now: float, most: float) -> Heard:
        """A person has answered.

        Args:
            decision: the answer.
            now: the present instant.
            most: seconds for which a yes holds at most.
        """
        self.look(now)
        if self.state == "expired" and not self.used:
            return "late"
        if self.state == "pending" and not self.used:
            if isinstance(decision, Denied):
                self.state, self.reason = "denied", decision.reason
            else:
                self.state = "approved"
                self.edited = None if decision.arguments is None else _own(decision.arguments)
                if decision.expires_in is not None:
                    self.expires = now + min(decision.expires_in, most)
            return "taken"
        return "again" if self._says_the_same(decision) else "ignored"

    def _says_the_same(self, decision: Decision) -> bool:
        if isinstance(decision, Denied):
            return self.state == "denied"
        return self.state == "approved" and same_arguments(self.edited, decision)

    def claim(self, holder: object) -> bool:
        """Use it: true for the first one who asks, and for the same one again (further attempts of one call)."""
        if self.holder is None:
            self.holder = holder
        return self.holder is holder

    def settle(self, result: Result) -> None:
        """Its call has a result that stays."""
        self.holder = _DONE
        self.result = result

    @property
    def settled(self) -> bool:
        """Its call has a result that stays, whether or not it is still kept."""
        return self.holder is _DONE

    def __repr__(self) -> str:
        return f"Approval({self.approval_id!r}, {self.state}{', used' if self.used else ''})"


def _own(given: Mapping[str, object]) -> dict[str, object]:
    """A copy that nobody changes by changing what was given; what cannot be copied is refused later."""
    try:
        return deepcopy(dict(given))
    except Exception:
        return dict(given)


def same_arguments(edited: Mapping[str, object] | None, decision: Approved) -> bool:
    """Does a yes bring the same arguments as another one did?"""
    from towerman.approvals.binding import binding

    if edited is None or decision.arguments is None:
        return edited is decision.arguments
    return binding(b"", "", edited, {}) == binding(b"", "", decision.arguments, {})


class Book:
    """The records of calls that came back pending, as far as this process knows them.

    Args:
        most: records that are kept.
        results: results that are kept.
    """

    def __init__(self, most: int = MOST_KEPT, results: int = MOST_RESULTS) -> None:
        self._most = most
        self._records: OrderedDict[str, Approval] = OrderedDict()
        self._results: deque[Approval] = deque()
        self._most_results = results

    def find(self, approval_id: str) -> Approval | None:
        """The record of that name, or None."""
        return self._records.get(approval_id)

    def keep(self, approval: Approval, now: float) -> None:
        """A call comes back pending: remember it until its time is over."""
        records = self._records
        records[approval.approval_id] = approval
        records.move_to_end(approval.approval_id)
        approval.kept = True
        while records:
            oldest = next(iter(records.values()))
            if len(records) <= self._most and now < oldest.expires:
                break
            del records[oldest.approval_id]
            oldest.kept = False

    def settle(self, approval: Approval, result: Result) -> None:
        """A call that came back pending has a result that stays."""
        approval.settle(result)
        self._results.append(approval)
        if len(self._results) > self._most_results:
            self._results.popleft().result = None

    def __len__(self) -> int:
        return len(self._records)
