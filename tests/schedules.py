"""An independent judge of simulated schedules: knows the workload as data and the starts, and nothing of Towerman.

Not here: how good a schedule is; only whether it may be so.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Any

EPS = 1e-6
"""Seconds within which two instants are one: rates count whole microseconds."""


def judge(workload: Mapping[str, Any], starts: Mapping[str, float]) -> dict[str, float]:
    """Assert that every call started, once, after what it needs, within every limit, and apart from whom it conflicts
    with; returns the end of each.
    """
    calls = {call["id"]: call for call in workload["calls"]}
    assert starts.keys() == calls.keys(), "every call starts, and nothing else does"
    ends = {name: starts[name] + call["duration"] for name, call in calls.items()}
    for name, call in calls.items():
        assert starts[name] >= call.get("arrival", 0), f"{name} starts before it comes in"
        for other in call.get("needs", ()):
            assert starts[name] >= ends[other] - EPS, f"{name} starts before {other}, which it needs, has ended"
    if workload.get("max_concurrency") is not None:
        _within("all calls", workload["max_concurrency"], [(starts[name], ends[name], 1) for name in calls])
    for pool, permits in workload.get("pools", {}).items():
        held = [
            (starts[name], ends[name], call.get("pools", {}).get(pool, 0))
            for name, call in calls.items()
            if pool in call.get("pools", {})
        ]
        if permits is not None:
            _within(f"pool {pool}", permits, held)
    for key, rate in workload.get("rates", {}).items():
        under = [starts[name] for name, call in calls.items() if call["tool"] == key or key in call.get("pools", {})]
        _paced(key, rate, sorted(under))
    _apart(calls, starts, ends)
    return ends


def _within(what: str, limit: int, spans: list[tuple[float, float, int]]) -> None:
    """What is held never passes the limit; who ends at an instant has let go before others begin at it."""
    steps = [step for start, end, units in spans if end > start for step in ((start, 1, units), (end, 0, -units))]
    held = 0
    for instant, _, change in sorted(steps):
        held += change
        assert held <= limit, f"{what}: {held} of {limit} at {instant}"


def _paced(key: str, rate: Any, starts: list[float]) -> None:
    """`"N/s"`: no second holds more than N. A mapping: never more than its burst and what has come since."""
    if isinstance(rate, str):
        limit, period = int(rate.partition("/")[0]), 1.0
        for first, beyond in zip(starts, starts[limit:], strict=False):
            assert beyond - first >= period - EPS, f"rate of {key}: {limit + 1} starts from {first} to {beyond}"
        return
    limit, period, burst = rate["limit"], rate["per"], rate["burst"]
    for at, first in enumerate(starts):
        for number, last in enumerate(starts[at:], 1):
            assert number <= burst + (last - first + EPS) * limit / period, f"rate of {key}: {number} until {last}"


def _apart(calls: Mapping[str, Any], starts: Mapping[str, float], ends: Mapping[str, float]) -> None:
    """Calls that conflict are never at work together; those of one batch run in its order."""
    place = _order(calls)
    names = list(calls)
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            if not conflict(calls[one], calls[other]):
                continue
            first, second = sorted((one, other), key=lambda name: (starts[name], ends[name]))
            assert ends[first] <= starts[second] + EPS, f"{one} and {other} overlap"
            if _batch(calls[one]) == _batch(calls[other]):
                first, second = sorted((one, other), key=place.__getitem__)
                assert ends[first] <= starts[second] + EPS, f"{second} overtakes {first}, which it conflicts with"


def conflict(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Do they touch one thing, one of them writing?"""
    return any(
        _meet(mine, theirs)
        for writer, toucher in ((one, other), (other, one))
        for mine in writer.get("writes", ())
        for theirs in [*toucher.get("writes", ()), *toucher.get("reads", ())]
    )


def _meet(one: str, other: str) -> bool:
    def below(key: str, tree: str) -> bool:
        root = tree.removesuffix("/**")
        return key == root or key.startswith(f"{root}/")

    here, there = one.removesuffix("/**"), other.removesuffix("/**")
    return here == there or (one != here and below(there, one)) or (other != there and below(here, other))


def _batch(call: Mapping[str, Any]) -> tuple[str, float]:
    return call.get("run", ""), call.get("arrival", 0)


def _order(calls: Mapping[str, Any]) -> dict[str, int]:
    """The order in which `needs` alone would let the calls run one by one, the first that can run always next; first is
    who comes in first, then who stands first in the workload.
    """
    names = sorted(calls, key=lambda name: calls[name].get("arrival", 0))
    number = {name: at for at, name in enumerate(names)}
    left = {name: len(set(call.get("needs", ()))) for name, call in calls.items()}
    behind: dict[str, list[str]] = {name: [] for name in calls}
    for name, call in calls.items():
        for other in set(call.get("needs", ())):
            behind[other].append(name)
    heap = [number[name] for name in names if not left[name]]
    heapify(heap)
    order: dict[str, int] = {}
    while heap:
        name = names[heappop(heap)]
        order[name] = len(order)
        for other in behind[name]:
            left[other] -= 1
            if not left[other]:
                heappush(heap, number[other])
    return order


def never_idle(workload: Mapping[str, Any], starts: Mapping[str, float], ends: Mapping[str, float]) -> None:
    """Without rates: whenever nothing is at work, nothing that has come in is ready."""
    calls = {call["id"]: call for call in workload["calls"]}
    busy = sorted((starts[name], ends[name]) for name in calls)
    until = 0.0
    for start, end in busy:
        if start > until + EPS:  # nothing is at work from `until` to `start`
            for name, call in calls.items():
                if starts[name] >= start - EPS:
                    ready = max([call.get("arrival", 0), *(ends[other] for other in call.get("needs", ()))])
                    assert ready >= start - EPS, f"{name} could start at {max(ready, until)}, and nothing does"
        until = max(until, end)


def bound(workload: Mapping[str, Any]) -> float:
    """A makespan that no schedule can be below: the longest path of needs, and the work of each limit over its size."""
    calls = {call["id"]: call for call in workload["calls"]}
    ends: dict[str, float] = {}
    for name in _order(calls):
        call = calls[name]
        since = max([call.get("arrival", 0), *(ends[other] for other in call.get("needs", ()))])
        ends[name] = since + call["duration"]
    least = max(ends.values(), default=0.0)
    if workload.get("max_concurrency"):
        least = max(least, sum(call["duration"] for call in calls.values()) / workload["max_concurrency"])
    for pool, permits in workload.get("pools", {}).items():
        if permits is not None:
            work = sum(call["duration"] * call.get("pools", {}).get(pool, 0) for call in calls.values())
            least = max(least, work / permits)
    return least
