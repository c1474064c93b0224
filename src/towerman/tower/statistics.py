"""What a tower looks like at one instant, in numbers.

Imported when somebody first asks for it. Not here: counting (work, gate, ledger).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from towerman.budgets import number
from towerman.policy import told_rate
from towerman.rates import MICRO, NEVER, micros

if TYPE_CHECKING:
    from towerman.core import Core
    from towerman.journal import Journal
    from towerman.threads import Couriers
    from towerman.trace import Event


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One pool at one instant.

    Args:
        limit: permits it has, as declared.
        held: permits taken now.
        peak: the most that were ever taken at once; with mode="observe" it may be more than the limit.
        queued: calls that wait and want some of it.
        scope: whom it counts for.
        orphaned: permits of `held` that orphans hold.
    """

    limit: int
    held: int
    peak: int
    queued: int
    scope: str
    orphaned: int


@dataclass(frozen=True, slots=True)
class RateStatistics:
    """One rate limit at one instant.

    Args:
        rate: as declared, for example `10/s`; None where there is only a pause that its service asked for.
        started: calls that it has let start, all told.
        queued: calls that wait for it and have everything else that they want.
        scope: whom it counts for.
        free_in: seconds until it lets the next call start, at least; 0 now.
    """

    rate: str | None
    started: int
    queued: int
    scope: str
    free_in: float


@dataclass(frozen=True, slots=True)
class BreakerStatistics:
    """One circuit breaker at one instant.

    Args:
        state: `closed`, `open` or `half_open`.
        opened: how often it has opened.
        refused: calls that it has not let through.
        probing: calls on trial that have not come back.
        scope: whom it counts for.
    """

    state: str
    opened: int
    refused: int
    probing: int
    scope: str


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """What came of the journal since the tower was made.

    Args:
        intents: calls that were written down before they started.
        replayed: calls that were answered from the journal, and did not run.
        joined: calls that waited for the same call elsewhere.
        conflicts: calls that were refused `idempotency_conflict`.
        unknown: calls that were answered that nobody knows whether they took effect.
        unavailable: calls that did not start since the journal could not be used.
        unwritten: results that were sealed before their outcomes could be written; these are tried again.
        waiting: what is still to be written, or read.
        commits: transactions.
        failures: transactions that failed, of which nothing is there.
        lost: outcomes that were given up, and answers that could not be encrypted.
    """

    intents: int
    replayed: int
    joined: int
    conflicts: int
    unknown: int
    unavailable: int
    unwritten: int
    waiting: int
    commits: int
    failures: int
    lost: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What this process has asked of the engine since the tower was made.

    Args:
        trips: round trips, less those of the heartbeats.
        asked: questions in them.
        held: grants that it holds, and amounts that it has reserved.
        beats: renewals that were answered.
        missed: renewals that were not.
        lost: leases that were lost before they were given back.
        reaped: leases of the whole group that ran out without being given back (a process died, or was away for
            longer), whoever held them, as the server told last.
        clock_offset: seconds that the server's clock is ahead of this machine's. Leases do not depend on it.
        alone: calls that ran without a lease, since the engine was not reached (`on_unavailable`).
    """

    trips: int
    asked: int
    held: int
    beats: int
    missed: int
    lost: int
    reaped: int
    clock_offset: float
    alone: int


@dataclass(frozen=True, slots=True)
class ApprovalStatistics:
    """Approvals of one tower, from its beginning to one instant.

    Args:
        asked: calls for which a person was asked.
        approved: requests that were answered yes.
        denied: requests that were answered no.
        expired: requests and approvals whose time was over before their calls could start.
        undecided: calls that came back pending: nobody was there to ask, or nobody had decided.
        ignored: decisions that came when there was another one already, or too late.
        failed: approvers that raised, or answered something else than a decision or None.
        open: approvers that are at work now.
    """

    asked: int = 0
    approved: int = 0
    denied: int = 0
    expired: int = 0
    undecided: int = 0
    ignored: int = 0
    failed: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """One budget at one instant. Amounts are by unit.

    Args:
        limits: what may be spent.
        spent: what is spent, in the present window of a budget that renews; also of units without a limit. Charges may
            bring it past the limit.
        reserved: what calls that have not started have set aside.
        refused: calls that it has refused; none with mode="observe".
        scope: whom it counts for.
        per: the window in which it renews, a name or seconds; None: never.
        renews_in: seconds until then, or None.
        seconds_left: seconds of the run's time that are left; None where that has no limit.
    """

    limits: Mapping[str, float]
    spent: Mapping[str, float]
    reserved: Mapping[str, float]
    refused: int
    scope: str
    per: str | float | None
    renews_in: float | None
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """The tower at one instant.

    Args:
        pools: by name; `process` is the tower's max_concurrency, `run:ID` a run's, `tool:NAME` a tool's own limit.
        rates: rate limits by name: `tool:NAME`, or a pool's name.
        breakers: circuit breakers by name, in the same way.
        budgets: by name: `run:ID` of an open run, `tenant:NAME` (`tenant:` of runs without one), `process`.
        runs: runs that are open.
        running: calls whose handlers are at work and whose results are open.
        waiting: calls in the gate's queue.
        behind: calls that wait behind those, uncounted by any bound.
        outcomes: sealed results by outcome.
        rejections: sealed results by code.
        orphans: works that go on after their results were sealed.
        orphans_released: orphans whose holds were given to others (`on_orphan="release"`).
        approvals: what people were asked, and what they said.
        shared: calls that the run of another call answered, identical to it or merged with it.
        retries: attempts after the first, of calls that were tried again.
        backing_off: calls that wait to be tried again, and hold nothing meanwhile.
        late_results: values that came after their results were sealed, and were dropped; see `Tower.dead_letters`.
        stalls: how often an event loop stood still, by the tool that held it up; under "" for other code.
        stalled_seconds: for how long loops stood still, all told.
        longest_stall: the longest of these times in seconds.
        promotions: waiters that were promoted for having been passed.
        late_events: events that came for calls already decided, and were ignored.
        threads: worker threads alive.
        result_bytes: bytes of the results that batches came to, as the model is sent them.
        result_tokens: what these take of the model's context, about.
        results_kept: results that are kept whole in memory, since they were too large.
        kept_bytes: bytes that these take, about.
        results_dropped: those that went before their time, since there was no room.
        results_unwritten: those that a folder or another store did not take.
        events_sent: events handed to observers, counted for each of them.
        events_pending: those that have not been delivered yet.
        events_dropped: events that an observer did not get: too many waited for it, or it was removed before.
        events_lost: events that observers got and could not keep, as far as they say so (attribute `lost`).
        observer_failures: exceptions raised by observers.
        journal: what came of the journal; None where there is none.
        engine: what was asked of the engine; None where there is none.
    """

    pools: Mapping[str, PoolStatistics]
    rates: Mapping[str, RateStatistics]
    breakers: Mapping[str, BreakerStatistics]
    budgets: Mapping[str, BudgetStatistics]
    runs: int
    running: int
    waiting: int
    behind: int
    outcomes: Mapping[str, int]
    rejections: Mapping[str, int]
    orphans: int
    orphans_released: int
    approvals: ApprovalStatistics
    shared: int
    retries: int
    backing_off: int
    late_results: int
    stalls: Mapping[str, int]
    stalled_seconds: float
    longest_stall: float
    promotions: int
    late_events: int
    threads: int
    result_bytes: int
    result_tokens: int
    results_kept: int
    kept_bytes: int
    results_dropped: int
    results_unwritten: int
    events_sent: int
    events_pending: int
    events_dropped: int
    events_lost: int
    observer_failures: int
    journal: JournalStatistics | None
    engine: EngineStatistics | None


def counted(
    core: Core, journal: Journal | None, couriers: Couriers[Event], runs: int, shown: Callable[[str], str]
) -> Statistics:
    """What a core and those beside it have counted so far, at one instant.

    Args:
        core: whose gate, ledger and counters are read under its lock.
        journal: where there is one.
        couriers: who carries events to observers.
        runs: how many are open.
        shown: the name by which people know what the ledger knows by a key.
    """
    with core.lock:
        queued = core.gate.queue_lengths()
        gate = core.gate.statistics()
        pools: dict[str, PoolStatistics] = {}
        for key, pool in core.gate.ledger.pools.items():
            name = _own(shown(key), key, pools)
            pools[name] = PoolStatistics(
                pool.declared, pool.held, pool.peak, queued.get(key, 0), pool.scope, pool.orphaned
            )
        rates, breakers = _timed(core, shown)
        approvals = ApprovalStatistics(**core.approvals, open=core.asking)
        budgets = _budgets(core, shown)
        outcomes, codes = {"ok": core.answered, **core.outcomes}, dict(core.codes)
        stalls = dict(core.stalls)
    kept = core.made_keeper.statistics() if core.made_keeper is not None else None
    sent = couriers.statistics()
    return Statistics(
        pools=pools,
        rates=rates,
        breakers=breakers,
        budgets=budgets,
        runs=runs,
        running=gate["running"],
        waiting=gate["parked"],
        behind=gate["behind"],
        outcomes=outcomes,
        rejections=codes,
        orphans=core.orphans,
        orphans_released=core.orphans_released,
        approvals=approvals,
        shared=core.shared,
        retries=core.retries,
        backing_off=core.backing_off,
        late_results=core.late_results,
        stalls=stalls,
        stalled_seconds=core.stalled_seconds,
        longest_stall=core.longest_stall,
        promotions=gate["promotions"],
        late_events=gate["late_events"],
        threads=core.workers.statistics()["threads"],
        result_bytes=core.told_bytes,
        result_tokens=core.counter.of_total(core.told_bytes),
        results_kept=kept.results if kept is not None else 0,
        kept_bytes=kept.bytes if kept is not None else 0,
        results_dropped=kept.dropped if kept is not None else 0,
        results_unwritten=kept.unwritten if kept is not None else 0,
        events_sent=sent["sent"],
        events_pending=sent["pending"],
        events_dropped=sent["dropped"],
        events_lost=sent["lost"],
        observer_failures=sent["failed"],
        journal=None if journal is None else _journal(core, journal),
        engine=_engine(core),
    )


def _own(name: str, key: str, others: Mapping[str, object]) -> str:
    """A name that no other has: open runs may share an id."""
    return f"{name} ({key.rpartition(':')[2]})" if name in others else name


def _engine(core: Core) -> EngineStatistics | None:
    if core.engine is None:
        return None
    told = core.engine.statistics()
    return EngineStatistics(
        told["trips"],
        told["asked"],
        told["held"],
        told["beats"],
        told["missed"],
        told["lost"],
        told["reaped"],
        told["offset_us"] / 1e6,
        core.leases["alone"],
    )


def _journal(core: Core, journal: Journal) -> JournalStatistics:
    written = journal.statistics()
    return JournalStatistics(
        **core.filed,
        waiting=written["queued"] + written["later"],
        commits=written["commits"],
        failures=written["failures"],
        lost=written["given_up"] + written["unsealed"],
    )


def _timed(core: Core, shown: Callable[[str], str]) -> tuple[dict[str, RateStatistics], dict[str, BreakerStatistics]]:
    gate, ledger = core.gate, core.gate.ledger
    if not ledger.timed:
        return {}, {}
    now = max(micros(core.now()), ledger.instant)
    rates = {}
    for key, meter in ledger.meters.items():
        numbers = meter.pace.numbers
        told = None if numbers is None else told_rate(*numbers)
        left = meter.pace.free_in(now, high=False) / MICRO if meter.enforced else 0.0
        name = shown(key.removeprefix("rate:"))
        rates[name] = RateStatistics(told, meter.pace.started, gate.waiting_for(meter), meter.scope, left)
    breakers = {}
    for key, fuse in ledger.fuses.items():
        circuit, name = fuse.circuit, shown(key.removeprefix("breaker:"))
        state = circuit.state(now)
        breakers[name] = BreakerStatistics(state, circuit.opened, circuit.refused, circuit.probing, fuse.scope)
    return rates, breakers


def _budgets(core: Core, shown: Callable[[str], str]) -> dict[str, BudgetStatistics]:
    book = core.purse
    if not core.budgeted:
        return {}
    book.at(micros(core.now()))
    us = book.roll(book.accounts.values())
    budgets: dict[str, BudgetStatistics] = {}
    for key, account in book.accounts.items():
        name = _own(shown(key) if account.scope == "run" else key, key, budgets)
        per = account.per
        budgets[name] = BudgetStatistics(
            {unit: number(amount) for unit, amount in account.limits.items()},
            {unit: number(amount) for unit, amount in account.spent.items()},
            {unit: number(amount) for unit, amount in account.reserved.items()},
            account.refused,
            account.scope,
            number(per) if isinstance(per, int) else per,
            number(account.ends - us) if account.ends < NEVER else None,
            max(0.0, number(account.until - us)) if account.until < NEVER else None,
        )
    return budgets
