"""Who can never start: the wait-for graph of nested calls, reduced until nothing is left to take away.

Theory. A call that waits for nested calls of its own goes on holding, and a nested call that cannot start waits for
holders. Where each of them waits for another one, nobody ever moves. Take away, again and again, whoever can end: a
call at work that waits for nothing; one whose nested calls have all been taken away; a waiting call that could start
if those who were taken away had given back what they hold. Those who are left wait for one another for ever (graph
reduction: Coffman, Elphick and Shoshani, System Deadlocks, 1971; Holt 1972). Work that goes on after its result was
sealed is taken to end some day: whoever waits for it has a deadline.

A circle can only close when a nested call begins to wait for something, so that is when to look. If someone at work
will give back what it needs, nothing has closed yet; that is told at a glance, and is the usual case.

House rules. Looks, and changes nothing.

Not here: who is refused then (turns), what is lent (ledger).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from towerman.calls import COMPATIBLE
from towerman.ledger import Loan, Meter, Node, Pool, Wants
from towerman.lots import Entry, Lot

OwnerT = TypeVar("OwnerT")


def may_go_on(waiter: Entry[OwnerT], holders: Iterable[Entry[OwnerT]]) -> bool:
    """Will calls at work, who wait for no nested calls, give back what this parked one waits for now?

    False does not say that it is stuck, only that it takes a longer look.
    """
    state, wants = waiter.line.bay.state, waiter.wants
    if isinstance(state, Meter) or waiter.line.bay.need[3]:  # which time will give, or the engine
        return True
    chain = tuple(wants.loan.chain()) if wants.loan is not None else ()
    if isinstance(state, Node):
        mode = next(mode for key, mode in wants.holds if key == state.key)
        return all(
            _at_work(holder)
            for holder in holders
            if holder.loan is None or holder.loan not in chain
            for key, other in holder.wants.holds
            if key == state.key and not COMPATIBLE[mode][other]
        )
    assert isinstance(state, Pool)
    units = next(units for pool, units in wants.pools if pool is state)
    room = state.room(wants.priority) - state.held + (wants.loan.free(state) if wants.loan is not None else 0)
    for holder in holders:
        if room >= units:
            break
        if _at_work(holder):
            room += _given_to(holder, state, chain)
    return room >= units


def _at_work(entry: Entry[OwnerT]) -> bool:
    return entry.orphan or entry.loan is None or not entry.loan.waits


def _given_to(holder: Entry[OwnerT], pool: Pool[Lot[OwnerT]], chain: Sequence[Loan[Lot[OwnerT]]]) -> int:
    """Permits that come to a call with these lenders when that one ends."""
    wants = holder.wants
    units = sum(units for one, units in wants.pools if one is pool)
    if wants.loan is not None:
        units -= sum(part for lender, one, part in wants.borrowed if one is pool and lender not in chain)
    return units


class _Scratch:
    """What would be held if some had ended."""

    def __init__(self) -> None:
        self.back: dict[object, int] = {}  # permits given back, by pool
        self.repaid: dict[tuple[object, object], int] = {}  # and to a lender, by (lender, pool)
        self.nodes: dict[str, list[int]] = {}  # holds given back, by key and mode

    def end(self, entry: Entry[OwnerT]) -> None:
        wants = entry.wants
        parts = dict(wants.pools)
        if wants.loan is not None:
            for lender, pool, part in wants.borrowed:
                parts[pool] -= part
                place = (lender, pool)
                self.repaid[place] = self.repaid.get(place, 0) + part
        for pool, units in parts.items():
            self.back[pool] = self.back.get(pool, 0) + units
        for key, mode in wants.holds:
            self.nodes.setdefault(key, [0, 0, 0, 0])[mode] += 1

    def fits(self, wants: Wants[Lot[OwnerT]], nodes: dict[str, list[int]]) -> bool:
        """Could it start then? `nodes`: holds by key and mode as they are now."""
        chain = tuple(wants.loan.chain()) if wants.loan is not None else ()
        for pool, units in wants.pools:
            lent = sum(
                loan.units.get(pool, 0) - loan.lent.get(pool, 0) + self.repaid.get((loan, pool), 0) for loan in chain
            )
            need = max(0, units - lent)
            if need and pool.held - self.back.get(pool, 0) + need > pool.room(wants.priority):
                return False
        for key, mode in wants.holds:
            now = nodes.get(key)
            if now is None:
                continue
            gone = self.nodes.get(key, (0, 0, 0, 0))
            own = [loan.holds[key] for loan in chain if key in loan.holds]
            for other in range(4):
                if not COMPATIBLE[mode][other] and now[other] - gone[other] - own.count(other) > 0:
                    return False
        return True


def stuck(
    holders: Sequence[Entry[OwnerT]],
    waiters: Sequence[Entry[OwnerT]],
    behind: Iterable[Wants[Lot[OwnerT]]],
) -> list[Entry[OwnerT]]:
    """The waiting nested calls that can never start, as they came.

    Args:
        holders: every call at work, orphans too.
        waiters: every parked call.
        behind: what those want that stand behind parked ones.
    """
    scratch = _Scratch()
    nodes: dict[str, list[int]] = {}
    for entry in holders:
        for key, mode in entry.wants.holds:
            nodes.setdefault(key, [0, 0, 0, 0])[mode] += 1
    below: dict[object, int] = {}  # calls of each lender that have not been taken away
    for wants in (*(entry.wants for entry in (*holders, *waiters)), *behind):
        if wants.loan is not None:
            below[wants.loan] = below.get(wants.loan, 0) + 1
    holding = list(holders)
    waiting = [*((entry.wants, entry) for entry in waiters), *((wants, None) for wants in behind)]
    while True:
        ended = [entry for entry in holding if _at_work(entry) or not below.get(entry.loan)]
        for entry in ended:
            scratch.end(entry)
            if entry.wants.loan is not None:
                below[entry.wants.loan] -= 1
        started = [one for one in waiting if scratch.fits(one[0], nodes)]
        for wants, _ in started:
            if wants.loan is not None:
                below[wants.loan] -= 1
        if not ended and not started:
            return [entry for wants, entry in waiting if entry is not None and wants.loan is not None]
        gone = set(map(id, ended))
        holding = [entry for entry in holding if id(entry) not in gone]
        taken = set(map(id, started))
        waiting = [one for one in waiting if id(one) not in taken]
