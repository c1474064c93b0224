"""An explanation as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from towerman.explain.parts import DeferredCall, Edge, EdgeKind, Limit, PlannedCall, RateInForce, RefusedCall
from towerman.timeline import printable

INDEPENDENT: Final = "independent"
"""What is told of a call that touches nothing and takes no place of its own: nothing at all reads like a gap."""

DEFERRED: Final = (
    "A call that is deferred runs later, in a worker, behind those of its batch that it",
    "comes behind. The queue does not keep its run's deps, deadline, allow, deny and own",
    "budget, and no order to calls of other batches.",
)
"""What is told where calls may go into the durable queue: what does not go there with them."""

_NAMED: Final = 4  # calls that are listed one by one in a reason


def tell(
    calls: Sequence[PlannedCall],
    groups: Sequence[Sequence[int]],
    edges: Sequence[Edge],
    refused: Sequence[RefusedCall],
    limits: Sequence[Limit],
    rates: Sequence[RateInForce],
    rate_seconds: float,
    spends: Mapping[str, float],
    chain: Sequence[int],
    complete: bool,
    deferred: Sequence[DeferredCall] = (),
) -> str:
    """Groups with their calls, and under each call what it waits for; then what is refused, then the limits."""
    size = len(calls) + len(refused) + len(deferred)
    if not size:
        return "No calls: nothing would run."
    lines = [headline(calls, len(groups), len(refused), chain, len(deferred))]
    width = len(str(size - 1))
    names = [call.tool for call in calls] + [one.tool for one in refused] + [one.tool for one in deferred]
    widest = max(len(name) for name in names)
    by_index = {call.index: call for call in calls}
    reasons = waits(edges)
    for number, group in enumerate(groups, 1):
        runs = sum(by_index[index].shared_with is None for index in group)
        lines += ["", f"group {number}: {counted(len(group))}{' at once' if runs > 1 else ''}"]
        for index in group:
            call = by_index[index]
            asks = [*["needs approval"] * call.approval, *["deferred when busy"] * call.defers]
            told = printable(", ".join((*call.touches, *pools(call), *asks))) or INDEPENDENT
            lines.append(f"  {index:>{width}}  {call.tool:<{widest}}  {told}")
            if call.behind:
                which = (
                    f"call {listed(call.behind)} is" if len(call.behind) == 1 else f"calls {listed(call.behind)} are"
                )
                lines.append(f"  {'':{width}}    deferred too if {which}")
            if call.told:
                lines.append(f"  {'':{width}}    {call.told}")
            lines += [f"  {'':{width}}    waits for {printable(reason)}" for _, reason in reasons.get(index, ())]
    others: Sequence[tuple[str, Sequence[RefusedCall | DeferredCall]]] = (("refused", refused), ("deferred", deferred))
    for what, rest in others:
        lines += ["", f"{what}: {counted(len(rest))}"] if rest else []
        for one in rest:
            told = printable(" ".join(one.message.split()))
            lines.append(f"  {one.index:>{width}}  {one.tool:<{widest}}  {one.code}: {told}")
    if limits:
        told = ", ".join(f"{one.name} {one.permits}{'' if one.enforced else ' (observed only)'}" for one in limits)
        lines += ["", f"limits: {told}"]
    if rates:
        told = ", ".join(f"{one.name} {one.rate}{'' if one.enforced else ' (observed only)'}" for one in rates)
        lines.append(f"rates: {told}")
        if rate_seconds:
            lines.append(f"the rates alone keep the last call waiting for {rate_seconds:g} s")
    if spends:
        lines.append(f"would spend: {', '.join(f'{amount:,g} {unit}' for unit, amount in spends.items())}")
    if not complete:
        lines += ["", "There are more reasons to wait than are listed here; the groups take all of them into account."]
    if deferred or any(call.defers for call in calls):
        lines += ["", *DEFERRED]
    if len(groups) > 1:
        lines += [
            "",
            "A group is what runs at the same time if every call lasts equally long. Where they",
            "do not, calls that do not wait for each other overlap more. Nothing else is taken",
            "to be at work.",
        ]
    return "\n".join(lines)


def headline(calls: Sequence[PlannedCall], groups: int, refused: int, chain: Sequence[int], deferred: int = 0) -> str:
    """The whole in one line."""
    parts = []
    running = sum(call.shared_with is None for call in calls)
    if running:
        told = f"{counted(running)} would run in {groups} group{'' if groups == 1 else 's'}"
        if len(chain) > 1:
            told += f" (longest chain: {', '.join(map(str, chain)) if len(chain) <= 8 else counted(len(chain))})"
        parts.append(told)
    if running < len(calls):
        parts.append(f"{counted(len(calls) - running)} would be answered by the run of another")
    if refused:
        parts.append(f"{counted(refused)} would be refused")
    if deferred:
        parts.append(f"{counted(deferred)} would be deferred")
    return ", ".join(parts) + "."


def counted(number: int) -> str:
    """`1 call`, `2 calls`."""
    return f"{number} call{'' if number == 1 else 's'}"


def pools(call: PlannedCall) -> list[str]:
    """What a call takes of limits other than those that every call has."""
    told = []
    for name, units in call.permits.items():
        if name == "run" or (name == "process" and units == 1):
            continue
        head, colon, _ = name.partition(":")
        what = "own limit" if colon and head == "tool" else f"pool {name}"
        told.append(what if units == 1 else f"{what} x{units}")
    return told


def waits(edges: Iterable[Edge], *, details: bool = True) -> dict[int, list[tuple[EdgeKind, str]]]:
    """What each call waits for: `5: resource ticket:{ticket_id} (write, then read)`, calls of one reason together."""
    gathered: dict[int, dict[tuple[EdgeKind, str], list[int]]] = {}
    for edge in edges:
        gathered.setdefault(edge.after, {}).setdefault((edge.kind, str(edge) if details else edge.why), []).append(
            edge.before
        )
    return {
        after: [(kind, f"{listed(before)}: {reason}") for (kind, reason), before in reasons.items()]
        for after, reasons in gathered.items()
    }


def listed(numbers: Sequence[int]) -> str:
    """`1, 2, 3 and 4 more`."""
    if len(numbers) <= _NAMED:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: _NAMED - 1]))} and {len(numbers) - _NAMED + 1} more"
