"""What the calls of a batch asked for: ids become indexes, and what cannot be followed is refused (G5).

Theory. Without a cycle the calls can run one by one; of all such orders the one is taken in which the smallest index
that can run is always next (Kahn's algorithm with a heap). It is total, and edges of every kind follow it.

House rules. A refusal names ids as they were given, each cut to 64 characters, and the fix.

Not here: how references are read (references), the order of conflicting calls (conflicts), what happens when a needed
call fails (graph).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from towerman.errors import Code, TowermanError

ID_CHARACTERS: Final = 64
"""Longest part of an id that a message shows."""

_SHOWN: Final = 8  # ids, or links of a cycle, in one message
_DIGITS: Final = re.compile(r"[0-9]{1,18}$")
_NEAR: Final = 100  # ids that are compared with an unknown one


class PlanRefused(TowermanError):
    """A batch whose dependencies cannot be followed; nothing of it may run (G5).

    Args:
        code: `unknown_dependency`, `duplicate_call_id`, `bad_reference`, `invalid_arguments` or `dependency_cycle`.
        members: indexes of the calls concerned: those with the unknown need, those that share the id, those with
            the reference that cannot be followed, or the cycle, in which each call needs the next and the last one
            needs the first.
        message: a sentence for the model, with ids as they were given, each cut to 64 characters.
    """

    def __init__(self, code: Code, members: tuple[int, ...], message: str) -> None:
        super().__init__(code, members, message)
        self.code: Code = code
        self.members = members
        self.message = message

    def __str__(self) -> str:
        return self.message


def resolve_needs(ids: Sequence[str], needs: Sequence[Sequence[str]]) -> list[tuple[int, ...]] | None:
    """Turn the needed ids of each call into indexes, or refuse the batch.

    Args:
        ids: the id of each call, in emitted order; an empty one cannot be needed.
        needs: for each call the ids that it needs, compared exactly; a single string is one id.

    Returns:
        The indexes that each call needs, without repeats; None when no call needs anything.

    Raises:
        PlanRefused: an id that no call has, one that several calls have, or a cycle, in this order.
    """
    if not any(needs):
        return None
    size = len(ids)
    if len(needs) != size:
        raise ValueError(f"needs: {len(needs)} entries for {size} calls")
    where = dict(zip(ids, range(size), strict=True))
    repeated = _repeated(ids) if len(where) != size else frozenset()
    where.pop("", None)
    resolved: list[tuple[int, ...]] = []
    unknown: list[tuple[int, str]] = []
    doubled: dict[str, None] = {}
    ahead = False
    for index, wanted in enumerate(needs):
        if not wanted:
            resolved.append(())
            continue
        found: dict[int, None] = {}
        for name in (wanted,) if isinstance(wanted, str) else wanted:
            other = where.get(name)
            if other is None:
                unknown.append((index, name))
                continue
            if name in repeated:
                doubled[name] = None
            if other >= index:
                ahead = True
            found[other] = None
        resolved.append(tuple(found))
    if unknown:
        raise _unknown(ids, [Miss(index, f"needs {_quoted(name)}", name, True) for index, name in unknown])
    if doubled:
        raise _doubled(ids, doubled, "needed by a call, but several calls have this id")
    # Needs that point back only cannot close a circle.
    if ahead:
        _topological(resolved, ids)
    return resolved


class Miss(NamedTuple):
    """A need or a reference that meets no call.

    Attributes:
        who: index of the call that has it.
        told: what the call does, in words: "needs 'zzz'".
        wanted: the id that is not there.
        shown: whether a message may repeat that id; one that stood in an argument is never shown.
    """

    who: int
    told: str
    wanted: str
    shown: bool


def index_ids(ids: Sequence[str]) -> dict[str, int]:
    """Where each id of a plan stands; an empty one cannot be needed.

    Raises:
        PlanRefused: `duplicate_call_id`: an id that several steps have, needed or not (R-33).
    """
    where = dict(zip(ids, range(len(ids)), strict=True))
    if len(where) != len(ids):
        repeated = _repeated(ids)
        doubled = dict.fromkeys(name for name in ids if name and name in repeated)
        if doubled:
            raise _doubled(ids, doubled, "several steps of this plan have this id")
    where.pop("", None)
    return where


def merge_needs(
    ids: Sequence[str],
    where: Mapping[str, int],
    needs: Sequence[Sequence[str]],
    referred: Sequence[Sequence[int]],
    missing: Sequence[Miss],
    *,
    ordered: bool = False,
    numbered: bool = False,
) -> list[tuple[int, ...]]:
    """The steps that each step of a plan waits for: those that it names, then those that it refers to.

    Args:
        ids: the id of each step, in the plan's order.
        where: the same ids to their indexes (as `index_ids` returns them).
        needs: for each step the ids that it needs; a single string is one id.
        referred: for each step the indexes of those whose results it refers to.
        missing: references that meet no step.
        ordered: the form forbids to name a later step.
        numbered: ids are numbers of the form, so that one which is not there is out of range.

    Raises:
        PlanRefused: an id that is not there (`unknown_dependency`, or `bad_reference` where they are numbers), a later
            step where the form forbids it (`bad_reference`), or a cycle (`dependency_cycle`), in this order.
    """
    misses = list(missing)
    merged: list[tuple[int, ...]] = []
    forward: dict[int, int] = {}
    ahead = False
    for index, (wanted, implied) in enumerate(zip(needs, referred, strict=True)):
        if not wanted and not implied:
            merged.append(())
            continue
        found: dict[int, None] = {}
        for name in (wanted,) if isinstance(wanted, str) else wanted:
            other = where.get(name)
            if other is None:
                misses.append(Miss(index, f"needs {_quoted(name)}", name, True))
            else:
                found[other] = None
        found.update(dict.fromkeys(implied))
        for other in found:
            if other >= index:
                ahead = True
                if other > index:
                    forward.setdefault(index, other)
        merged.append(tuple(found))
    if misses:
        misses.sort(key=lambda miss: miss.who)
        raise _unknown(ids, misses, numbered=numbered)
    if ordered and forward:
        raise _forward(ids, forward)
    if ahead:
        _topological(merged, ids)
    return merged


def link_needs(needs: Sequence[Sequence[int]], dependents: list[list[int] | None]) -> Sequence[int]:
    """Fill in who needs each call, and return the order in which the calls could run one by one."""
    size = len(needs)
    ahead = False
    for index, wanted in enumerate(needs):
        for other in wanted:
            if not 0 <= other < index:
                if not 0 <= other < size:
                    raise ValueError(f"needs[{index}]: {other} is no call of a batch of {size}")
                ahead = True
            needing = dependents[other]
            if needing is None:
                dependents[other] = [index]
            else:
                needing.append(index)
    # Where every need points back, the smallest index that can run next is always the next one.
    return _topological(needs) if ahead else range(size)


def _topological(needs: Sequence[Sequence[int]], ids: Sequence[str] | None = None) -> list[int]:
    """The order of a run one by one, the smallest index first (Kahn's algorithm with a heap).

    Raises:
        PlanRefused: there is a cycle; `ids` name its members, else their indexes do.
    """
    left = [len(wanted) for wanted in needs]
    dependents: list[list[int]] = [[] for _ in needs]
    for index, wanted in enumerate(needs):
        for other in wanted:
            dependents[other].append(index)
    heap = [index for index, count in enumerate(left) if not count]
    order: list[int] = []
    while heap:
        index = heappop(heap)
        order.append(index)
        for other in dependents[index]:
            left[other] -= 1
            if not left[other]:
                heappush(heap, other)
    if len(order) < len(needs):
        raise _cyclic(needs, left, ids)
    return order


def _cyclic(needs: Sequence[Sequence[int]], left: list[int], ids: Sequence[str] | None) -> PlanRefused:
    """Name one cycle. What is left after Kahn's algorithm needs something left, so walking back must meet itself."""
    index = next(node for node, count in enumerate(left) if count)
    place: dict[int, int] = {}
    while index not in place:
        place[index] = len(place)
        index = next(other for other in needs[index] if left[other])
    cycle = list(place)[place[index] :]
    first = cycle.index(min(cycle))
    members = (*cycle[first:], *cycle[:first])
    names = [named(ids, member) for member in members[: _SHOWN + 1]]
    if len(members) == 1:
        text = f"{names[0]} needs itself; take this need away"
    else:
        more = len(members) - _SHOWN
        names.append(names[0])
        links = [f"{names[i]} needs {names[i + 1]}" for i in range(min(len(members), _SHOWN))]
        tail = f", and so on over {more} more, back to the first" if more > 0 else ""
        text = f"these calls need each other in a circle: {', '.join(links)}{tail}; take one of these needs away"
    return PlanRefused("dependency_cycle", members, text)


def _unknown(ids: Sequence[str], misses: Sequence[Miss], *, numbered: bool = False) -> PlanRefused:
    """Name the needs that meet no call, and ids that come near the first of them."""
    from difflib import get_close_matches  # only on this path, and it is slow to import

    index, _, wanted, shown = misses[0]
    start = max(0, index - _NEAR // 2)
    folded = {name[:ID_CHARACTERS].casefold(): name for name in reversed(ids[start : start + _NEAR]) if name}
    near = [folded[match] for match in get_close_matches(wanted[:ID_CHARACTERS].casefold(), folded)]
    known = list(dict.fromkeys(name for name in ids if name))
    numbers = [name for name in known if name[-1].isdigit()] if numbered else []
    if numbers:
        hint = f"the numbers of this plan {_numbers(numbers)}"
    elif near:
        hint = f"near {_quoted(wanted) if shown else 'it'} come {_listed(near)}"
    elif known:
        hint = f"the ids of this batch are {_listed(known[:_SHOWN])}{' ...' if len(known) > _SHOWN else ''}"
    else:
        hint = "no call of this batch has an id"
    if not numbered and any(not miss.shown for miss in misses):
        hint += "; for a '$' that is no reference write '$$'"
    told = ", ".join(f"{named(ids, miss.who)} {miss.told}" for miss in misses[:_SHOWN])
    more = len(misses) - _SHOWN
    told += f" and {more} more such needs" if more > 0 else ""
    members = tuple(dict.fromkeys(miss.who for miss in misses))
    if numbered:
        return PlanRefused("bad_reference", members, f"{told}: out of range, there is no such step; {hint}")
    return PlanRefused("unknown_dependency", members, f"{told}: no call of this batch has that id; {hint}")


def _numbers(names: Sequence[str]) -> str:
    """Which numbers there are: where they begin and end, or, if some between are not there, each stretch of them."""
    stretches: list[tuple[str, str]] = []
    for name in sorted(names, key=_in_order):
        if stretches and _follows(stretches[-1][1], name):
            stretches[-1] = stretches[-1][0], name
        else:
            stretches.append((name, name))
    told = [_quoted(a) if a == b else f"{_quoted(a)} to {_quoted(b)}" for a, b in stretches[:_SHOWN]]
    if len(stretches) == 1:
        first, last = stretches[0]
        return f"go from {_quoted(first)} to {_quoted(last)}"
    return f"are {', '.join(told)}{' ...' if len(stretches) > _SHOWN else ''}"


def _follows(one: str, other: str) -> bool:
    """Is the other id's number the next one?"""
    before, after = _DIGITS.search(one), _DIGITS.search(other)
    return before is not None and after is not None and int(before[0]) + 1 == int(after[0])


def _in_order(name: str) -> tuple[int, str]:
    return len(name), name


def _forward(ids: Sequence[str], forward: Mapping[int, int]) -> PlanRefused:
    """Name the steps that wait for a later one, in a form that does not allow it."""
    told = ", ".join(f"{named(ids, who)} waits for {named(ids, what)}" for who, what in [*forward.items()][:_SHOWN])
    more = len(forward) - _SHOWN
    text = (
        f"{told}{f' and {more} more such steps' if more > 0 else ''}: in this form of plan a step can use only the "
        "results of steps before it; put the needed step first"
    )
    return PlanRefused("bad_reference", tuple(forward), text)


def _doubled(ids: Sequence[str], doubled: dict[str, None], why: str) -> PlanRefused:
    """Name the ids that several calls have."""
    members = tuple(index for index, name in enumerate(ids) if name in doubled)
    more = len(doubled) - _SHOWN
    text = (
        f"{_listed(list(doubled)[:_SHOWN])}{f' and {more} more' if more > 0 else ''}: {why}; "
        "give every call an id of its own"
    )
    return PlanRefused("duplicate_call_id", members, text)


def _repeated(ids: Sequence[str]) -> frozenset[str]:
    once: set[str] = set()
    repeated: set[str] = set()
    for name in ids:
        (repeated if name in once else once).add(name)
    return frozenset(repeated)


def named(ids: Sequence[str] | None, index: int) -> str:
    return f"call {_quoted(ids[index])}" if ids is not None and ids[index] else f"call {index}"


def _quoted(name: str) -> str:
    return repr(name[:ID_CHARACTERS])


def _listed(names: list[str]) -> str:
    return ", ".join(map(_quoted, names))
