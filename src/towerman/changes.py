"""What is different between two states of a tower's options, and how it is told.

Theory. Options change by being declared anew: the tower's, its pools', those of tools by pattern. Both states were
checked as a whole; here they are compared, field by field, so that an operator sees what an edit came to.

House rules. What is shown of a value is what messages show: no text out of the environment, no long text.

Not here: checking (policy, config), putting it into force (limits, tower).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, overload

from towerman.budgets import Asks
from towerman.errors import PolicyError
from towerman.policy import POOL, TOWER, Breaker, Pool, Rate, Retry, TowerPolicy, check_limits, shown
from towerman.tools import Tool

FIXED: Final[Mapping[str, str]] = {
    "mode": "a tower keeps its mode for life; make another tower",
    "results": "a tower keeps its store of results for life; make another tower",
    "engine": "a tower keeps its engine for life; make another tower",
    "journal": "a tower keeps its journal for life; make another tower",
    "secret": "a tower keeps its secret for life; make another tower",
}
"""Options of a tower that cannot change, and why."""

_UNSEEN: Final = ("name", "description")


class AtWork(PolicyError):
    """A change has to wait until no call is at work: what tools touch would be read half one way, half the other."""


@dataclass(frozen=True, slots=True)
class Change:
    """One option that is different now.

    Args:
        name: as in `towerman.toml`: `max_concurrency`, `pools.crm.permits`, `tools.read_customer.timeout`.
        before: how the old value is shown; None for none.
        after: how the new value is shown; None for none.
    """

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.before or 'none'} -> {self.after or 'none'}"


@dataclass(frozen=True, slots=True)
class Changes(Sequence[Change]):
    """What a call of `Tower.configure` has changed: a sequence of `Change`. Empty, and false, where nothing was.

    Args:
        changes: one for each option that is different now.
        over: permits that are held above a lower limit now, by pool; they come down as calls end.
        granted: waiting calls that could start at once.
        rejected: waiting calls that need more than there is now, and were answered `concurrency_limit`.
        too_wide: tools that need more than a limit has now: each of their calls is refused.
    """

    changes: tuple[Change, ...]
    over: Mapping[str, int] = field(default_factory=dict)
    granted: int = 0
    rejected: int = 0
    too_wide: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Change: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Change, ...]: ...
    def __getitem__(self, index: int | slice) -> Change | tuple[Change, ...]:
        return self.changes[index]

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def to_dict(self) -> dict[str, object]:
        """The same for JSON."""
        return {
            "changes": [{"name": one.name, "before": one.before, "after": one.after} for one in self.changes],
            "over": dict(self.over),
            "granted": self.granted,
            "rejected": self.rejected,
            "too_wide": list(self.too_wide),
        }

    def __str__(self) -> str:
        lines = [str(one) for one in self.changes] or ["nothing has changed"]
        lines += [f"{name} is held {units} above its new limit, until calls end" for name, units in self.over.items()]
        if self.granted:
            lines.append(f"waiting calls that start now: {self.granted}")
        if self.rejected:
            lines.append(f"waiting calls that need more than there is now, refused: {self.rejected}")
        if self.too_wide:
            lines.append(
                f"tools that need more than a limit has now, whose calls are refused: {', '.join(self.too_wide)}"
            )
        return "\n".join(lines)


def too_wide(tools: Iterable[Tool], tower: TowerPolicy) -> Iterator[str]:
    """The names of tools that need more than the limits have."""
    for tool in tools:
        try:
            check_limits(
                "", {"weight": tool.policy.weight, "pools": dict(tool.policy.pools)}, tower.pools, tower.max_concurrency
            )
        except PolicyError:
            yield tool.name


def tower_changes(before: TowerPolicy, after: TowerPolicy) -> list[Change]:
    """What is different between a tower's options.

    Raises:
        PolicyError: one of them cannot change.
    """
    found = []
    for key in TOWER:
        old, new = getattr(before, key), getattr(after, key)
        if old != new:
            if key in FIXED:
                raise PolicyError(f"{key}: {FIXED[key]}")
            found.append(Change(key, _shown(old), _shown(new)))
    for name, pool in before.pools.items():
        found += _pool_changes(name, pool, after.pools.get(name), before)
    for name, pool in after.pools.items():
        if name not in before.pools:
            found.append(Change(f"pools.{name}", None, _told(pool)))
    for name in {**before.budgets, **after.budgets}:
        had, has = before.budgets.get(name), after.budgets.get(name)
        if had != has:
            found.append(
                Change(f"budgets.{name}", None if had is None else str(had), None if has is None else str(has))
            )
    return found


def _pool_changes(name: str, before: Pool, after: Pool | None, tower: TowerPolicy) -> Iterator[Change]:
    if after is None:
        yield Change(f"pools.{name}", _told(before), None)
        return
    if tower.scope_of(before) != tower.scope_of(after):
        raise PolicyError(
            f"pools.{name}.scope: a pool keeps the scope {tower.scope_of(before)!r} for life; give the other one "
            "another name"
        )
    for key in POOL:
        old, new = getattr(before, key), getattr(after, key)
        if old != new:
            yield Change(f"pools.{name}.{key}", _shown(old), _shown(new))


def _told(pool: Pool) -> str:
    given = [(key, getattr(pool, key)) for key in POOL]
    kept = [
        f"{key}={_part(value) if isinstance(value, Rate | Breaker) else repr(value)}"
        for key, value in given
        if value not in (None, 0, "process")
    ]
    return f"Pool({', '.join(kept)})"


def tool_changes(before: Tool, after: Tool) -> list[Change]:
    """What is different between two declarations of one tool."""
    old, new = before.policy, after.policy
    found = []
    for one in fields(new):
        key = one.name
        if key not in _UNSEEN and getattr(old, key) != getattr(new, key):
            found.append(Change(f"tools.{new.name}.{key}", _shown(getattr(old, key)), _shown(getattr(new, key))))
    if old.description != new.description:
        found.append(Change(f"tools.{new.name}.description", "a text", "another text"))
    return found


def same(before: Tool, after: Tool) -> bool:
    """Do two declarations come to the same for a call?"""
    return (
        before.policy == after.policy
        and before.kind == after.kind
        and (before.guard is None, before.warns) == (after.guard is None, after.warns)
        and (before.timeout, before.max_wait, before.wait, before.max_result_bytes, before.max_repeats)
        == (after.timeout, after.max_wait, after.wait, after.max_result_bytes, after.max_repeats)
    )


def touches_the_same(before: Tool, after: Tool) -> bool:
    """Do its calls stand to others as they did?"""
    return (before.kind, before.policy.reads, before.policy.writes) == (
        after.kind,
        after.policy.reads,
        after.policy.writes,
    )


def _shown(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, tuple):  # templates, or pools with their permits
        return ", ".join(_part(one) for one in value) or None
    return _part(value)


def _part(value: object) -> str:
    if isinstance(value, Rate | Breaker | Retry | Asks):
        return str(value)
    if isinstance(value, tuple) and len(value) == 2:
        return f"{shown(value[0])}: {value[1]}"
    return f"{value:g}" if isinstance(value, float) else shown(value)
