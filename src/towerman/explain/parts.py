"""The words of an explanation."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from towerman.budgets import Asks
from towerman.calls import Call, Outcome
from towerman.errors import Code
from towerman.ledger import Wants
from towerman.lots import Lot

MAX_EDGES: Final = 10_000
"""Most edges that are told; what is left out changes no group."""

STANDS: Final = ("done", "failed", "settled", "unknown", "at work", "queued", "not begun")
"""How a call of a batch stands that was begun before: it ended ok, or otherwise; a person has said what came of it;
nobody knows whether it took effect; it runs now; a worker is to run it; none of these."""

EdgeKind = Literal["needs", "resource", "order", "pool", "rate"]
"""Asked for; two calls touch one resource; a tool that runs alone and in order; a limit is full; a rate is used up."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One call waits for another.

    Args:
        before: index of the call that goes first.
        after: index of the call that waits for it.
        kind: `needs`, `resource`, `order`, `pool` or `rate`.
        why: what joins the two: `needs`, `resource ticket:{ticket_id}`, `order of the run`, `pool crm (limit 2)`,
            `rate of tool search (10/s)`.
        detail: what the two do to the resource, for example `write, then read`; else empty.
    """

    before: int
    after: int
    kind: EdgeKind
    why: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.why} ({self.detail})" if self.detail else self.why


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call that would run.

    Args:
        index: its place in the batch, from 0.
        tool: its tool's name.
        group: the number of its group, from 0.
        touches: what it declares: `read customer:{customer_id}`, `write file:{path}`, `alone, in order`,
            `alone in the process`; empty for a call that touches nothing shared.
        permits: what it takes of each limit, by name; `process` is the tower's, `run` the run's own. Nothing, where
            the run of another call answers it.
        shared_with: index of the call whose run would answer it too, or None. It stands in the group of that call.
        merged: its arguments would go into that run; else that call is identical to it.
        approval: it waits for a person's approval first; groups and edges take it as given.
        id: its id, cut to 64 characters, where the batch is a plan; else empty.
        estimate: how long it may take, in seconds, by what its tool has taken so far; None: nothing is known.
        defers: where there is no room for it, it would be put into the durable queue and run later.
        behind: indexes of the calls that would be put there and that it comes behind, by `needs` or by what it touches:
            if one of them is, so is this one.
        state: of a batch that was begun before, how this call stands: one of `STANDS`, or one of these, a colon and
            why; empty for a batch that was not.
    """

    index: int
    tool: str
    group: int
    touches: tuple[str, ...]
    permits: Mapping[str, int]
    shared_with: int | None = None
    merged: bool = False
    approval: bool = False
    id: str = ""
    estimate: float | None = None
    defers: bool = False
    behind: tuple[int, ...] = ()
    state: str = ""

    @property
    def told(self) -> str:
        """Whose run answers it, in words; empty where it is its own."""
        if self.shared_with is None:
            return ""
        return f"{'is merged into' if self.merged else 'shares'} the run of call {self.shared_with}"


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call that would not start.

    Args:
        index: its place in the batch, from 0.
        tool: its tool's name, or `<unknown tool>`.
        outcome: `rejected`, or `skipped` when a call that it needs is refused.
        code: from `towerman.CODES`.
        message: what the model would be told.
        id: its id, cut to 64 characters, where the batch is a plan; else empty.
    """

    index: int
    tool: str
    outcome: Outcome
    code: Code
    message: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A call that would go into the durable queue, though nothing else is at work.

    Args:
        index: its place in the batch, from 0.
        tool: its tool's name.
        code: `deferred`, or `held_behind` one that is.
        message: why.
    """

    index: int
    tool: str
    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that calls of the batch take permits of.

    Args:
        name: `process`, `run`, `tool:NAME`, or a pool's name.
        permits: how many it has.
        scope: whom it counts for: `process`, `run` or `tenant`.
        enforced: False with mode="observe": it holds nobody back.
    """

    name: str
    permits: int
    scope: str
    enforced: bool


@dataclass(frozen=True, slots=True)
class RateInForce:
    """A rate limit in which calls of the batch count.

    Args:
        name: `tool:NAME`, or a pool's name.
        rate: how many starts in how long: `10/s`.
        scope: whom it counts for: `process`, `run` or `tenant`.
        enforced: False with mode="observe": it holds nobody back.
    """

    name: str
    rate: str
    scope: str
    enforced: bool


@dataclass(frozen=True, slots=True, repr=False)
class Seen:
    """One call, looked over.

    Args:
        call: as it came; only its id is told.
        tool: its tool's name, or `<unknown tool>`.
        touches: what it declares, as `PlannedCall.touches`.
        wants: what it would ask of the gate; None when it is refused.
        refusal: why it is refused, as code and message.
        likeness: what is equal for calls that one run could answer; holds argument values.
        merged: such a run would be of all their arguments.
        approval: it needs a person's approval.
        asks: what it would take of budgets; None where there are none, or it is refused.
        defers: where there is no room for it, it would be put into the durable queue.
    """

    call: Call
    tool: str
    touches: tuple[str, ...] = ()
    wants: Wants[Lot[int]] | None = None
    refusal: tuple[Code, str] | None = None
    likeness: Hashable | None = None
    merged: bool = False
    approval: bool = False
    asks: Asks | None = None
    defers: bool = False

    def __repr__(self) -> str:
        return f"Seen({self.tool!r})"
