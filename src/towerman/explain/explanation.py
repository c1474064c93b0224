"""The face of an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from towerman.explain.drawing import draw
from towerman.explain.parts import DeferredCall, Edge, Limit, PlannedCall, RateInForce, RefusedCall
from towerman.explain.telling import Told, tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a batch would do in a tower in which nothing else is at work: printable, as a mapping, as a drawing.

    Args:
        calls: those that would run, in emitted order.
        groups: indexes of calls that run at the same time if every call lasts equally long; a group starts when the
            one before has ended. With other durations calls of different groups overlap too, where no edge joins them.
            A call that the run of another one would answer stands in the group of that one.
        edges: who waits for whom and why. `needs`, `resource` and `order` hold whatever the durations are; `pool` says
            whose place a call gets when all last equally long, `rate` whose start must be so long ago.
        refused: those that would not start, in emitted order.
        deferred: those that would go into the durable queue, since calls of this very batch leave no room for them, or
            since they come behind such a call; in emitted order.
        limits: what the calls take permits of.
        rates: rate limits in which they count. A call that a rate holds back stands in a later group; how long it waits
            is told by `rate_seconds`.
        rate_seconds: for how long rates alone would keep the last of the calls waiting, in seconds, if calls took no
            time.
        spends: what the calls would take of budgets together, by unit; empty where there are no budgets.
        critical_path: the longest chain of calls each of which waits for the one before, whatever the limits: by what
            their tools have taken so far, or, where nothing is known, by their number. No batch is done before these
            have run one after another.
        critical_seconds: how long these may take together; None: nothing is known.
        links: the edges as they are drawn: where many calls wait for many, a junction, numbered from `size` up, stands
            between them, so that there are never more than a few for each call. Also what refused calls need.
        members: of a plan that is refused whole, the calls at fault: those of the circle, for example.
        notice: what the model would be told about the batch as a whole, or None.
        complete: False where there are more edges than are told (`MAX_EDGES`, 10,000); groups and chain are right
            all the same.
    """

    calls: tuple[PlannedCall, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    edges: tuple[Edge, ...] = ()
    refused: tuple[RefusedCall, ...] = ()
    deferred: tuple[DeferredCall, ...] = ()
    limits: tuple[Limit, ...] = ()
    rates: tuple[RateInForce, ...] = ()
    rate_seconds: float = 0.0
    spends: Mapping[str, float] = field(default_factory=dict)
    critical_path: tuple[int, ...] = ()
    critical_seconds: float | None = None
    links: tuple[Edge, ...] = ()
    members: tuple[int, ...] = ()
    notice: str | None = None
    complete: bool = True

    @property
    def size(self) -> int:
        """Calls of the batch."""
        return len(self.calls) + len(self.refused) + len(self.deferred)

    @property
    def ok(self) -> bool:
        """No call is refused."""
        return not self.refused

    def with_states(self, states: Mapping[int, str]) -> Explanation:
        """The same, with how each call stands of a batch that was begun before.

        Args:
            states: by index, as `PlannedCall.state` has them.
        """
        return replace(self, calls=tuple(replace(call, state=states.get(call.index, "")) for call in self.calls))

    def to_dict(self) -> dict[str, object]:
        """All of it, ready for JSON; keys keep their names and meanings."""
        return {
            "size": self.size,
            "calls": [
                {
                    "index": call.index,
                    "tool": call.tool,
                    "group": call.group,
                    "touches": list(call.touches),
                    "permits": dict(call.permits),
                    "shared_with": call.shared_with,
                    "merged": call.merged,
                    "approval": call.approval,
                    "id": call.id or None,
                    "estimate": call.estimate,
                    "defers": call.defers,
                    "behind": list(call.behind),
                    "state": call.state or None,
                }
                for call in self.calls
            ],
            "groups": [list(group) for group in self.groups],
            "edges": [
                {
                    "before": edge.before,
                    "after": edge.after,
                    "kind": edge.kind,
                    "why": edge.why,
                    "detail": edge.detail or None,
                }
                for edge in self.edges
            ],
            "refused": [
                {
                    "index": one.index,
                    "tool": one.tool,
                    "outcome": one.outcome,
                    "code": one.code,
                    "message": one.message,
                    "id": one.id or None,
                }
                for one in self.refused
            ],
            "deferred": [
                {"index": one.index, "tool": one.tool, "code": one.code, "message": one.message}
                for one in self.deferred
            ],
            "limits": [
                {"name": one.name, "permits": one.permits, "scope": one.scope, "enforced": one.enforced}
                for one in self.limits
            ],
            "rates": [
                {"name": one.name, "rate": one.rate, "scope": one.scope, "enforced": one.enforced} for one in self.rates
            ],
            "rate_seconds": self.rate_seconds,
            "spends": dict(self.spends),
            "critical_path": list(self.critical_path),
            "critical_seconds": self.critical_seconds,
            "members": list(self.members),
            "notice": self.notice,
            "complete": self.complete,
        }

    def to_svg(self) -> str:
        """A drawing of the groups from left to right, with arrows for what waits for what; for light and dark pages.

        It stands alone: no script, no font, no address. Of a batch of more than 400 calls as many are drawn,
        at most 60 of a group, and it says how many are not.
        """
        return draw(
            self.calls,
            self.groups,
            self.edges,
            self.links or self.edges,
            self.refused,
            self.critical_path,
            self.members,
            self.limits,
            self.rates,
            self.critical_seconds,
            self.deferred,
        )

    def text(self, width: int | None = 100, *, ascii_only: bool = False) -> str:
        """The same as text for a terminal; `str()` gives it with unbroken lines.

        Args:
            width: columns, 40 or more; None: no line is broken.
            ascii_only: use no character beyond ASCII.
        """
        told = Told(
            self.calls,
            self.groups,
            self.edges,
            self.links,
            self.refused,
            self.limits,
            self.rates,
            self.rate_seconds,
            self.spends,
            self.critical_path,
            self.critical_seconds,
            self.members,
            self.complete,
            self.deferred,
        )
        return tell(told, None if width is None else max(width, 40), ascii_only=ascii_only)

    def __str__(self) -> str:
        return self.text(None)

    def __repr__(self) -> str:
        later = f", {len(self.deferred)} deferred" if self.deferred else ""
        return f"Explanation({len(self.calls)} calls in {len(self.groups)} groups, {len(self.refused)} refused{later})"
