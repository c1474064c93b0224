"""Budgets that count over all processes: those of tenants, at the engine.

Theory. As with limits, they are kept here too, as if this process were alone; what finds enough here is asked there. A
batch reserves there in one step, after it has reserved here and before anything of it is offered, so that of two
batches in two processes each call is eligible or told at once. What a call has reserved is spent by the very step that
lets it in there (leasing). A call that asks anew, for another attempt or after a person was asked, reserves in that
moment by itself.

While the engine is not reached: "closed", a batch waits for it as long as a call of the tower may, and what counts in
such a budget is refused then; "open", the account of this process alone decides; "local", a part of each limit.

House rules. What was reserved goes back in the step in which the share here ends.

Not here: the arithmetic (budgets, engines), who is told what (spending).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from towerman import sealing
from towerman.budgets import PERIODS, RESERVED, Account, Lack, Shares
from towerman.errors import EngineUnavailable
from towerman.runner.deferring import Deferring
from towerman.work import RunState, Work

if TYPE_CHECKING:
    from towerman.engines.words import Grant, Limits

AGAIN: Final = 0.25
"""Seconds until the engine is asked again that is not reached."""


class Accounting(Deferring):
    """Reserves, spends and charges at the engine, on one loop."""

    # ================================================================ a batch

    async def _reserve_there(self, work: Work, needs: Sequence[Sequence[int]] | None) -> None:
        """Reserve what the calls of a batch ask of the budgets that count over all processes, and refuse those for
        which there is not enough.
        """
        core, shares = self.core, work.shares
        engine = core.engine
        accounts = accounts_there(shares)
        if engine is None or shares is None or not accounts or core.policy.mode == "observe":
            return
        limits = limits_of(accounts)
        asked = [
            None if one is None or shares.state[index] != RESERVED else one.amounts
            for index, one in enumerate(shares.asks)
        ]
        if not any(asked):
            return
        end = core.now() + core.policy.max_wait
        while True:
            try:
                granted, lacks = await engine.reserve(limits, asked, needs or ())
                break
            except EngineUnavailable:
                if work.closing is not None or self._without(work, accounts, asked):
                    return
                if core.now() >= end:
                    self._refuse_unreached(work, asked)
                    return
            await asyncio.sleep(AGAIN)
        work.there = {index: share for index, share in enumerate(granted) if share is not None}
        for index in list(work.there):
            if shares.state[index] != RESERVED:  # it was sealed meanwhile
                self._end_there(work, index, "refund")
        short: dict[int, Lack] = {}
        for index, refusal in lacks.items():
            account = accounts[refusal.place]
            whole = not account.partial and shares.alone(index)
            short[index] = Lack(account, refusal.unit, whole)
            with core.lock:
                account.refused += 1
                shares.refund(index)
        if short and work.closing is None:
            stop = not work.there and all(lack.account.stops(lack.unit) for lack in short.values())
            await self._refuse_short(work, short, stop=stop)

    def _without(self, work: Work, accounts: Sequence[Account], asked: Sequence[Mapping[str, int] | None]) -> bool:
        """Does a batch go on without the engine, which is not reached?"""
        engine = self.core.policy.engine
        if engine is None or engine.on_unavailable == "closed":
            return False
        if engine.on_unavailable == "local":
            units = {unit for one in asked for unit in one or ()}
            if not has_share(accounts, units, engine.replicas or 1):
                return False
        work.paused = {**(work.paused or {}), "": sealing.unleased(engine.on_unavailable == "local")}
        return True

    def _refuse_unreached(self, work: Work, asked: Sequence[Mapping[str, int] | None]) -> None:
        for index, one in enumerate(asked):
            if one is not None:
                message = sealing.refusal("engine_unavailable", "engine", self.core.policy.max_wait)
                self._refuse(work, index, "engine_unavailable", message, waited_for=("engine",))

    # ================================================================ a call

    def _counts_there(self, work: Work, index: int) -> bool:
        """Does a call that is about to start spend of a budget that counts over all processes?"""
        shares = work.shares
        if shares is None or shares.state[index] != RESERVED or self.core.policy.mode == "observe":
            return False
        return any(account.scope == "tenant" for account in shares.chain)

    async def _share_there(self, work: Work, index: int) -> Grant | Lack:
        """What a call has reserved there, or reserves now.

        Raises:
            EngineUnavailable: the engine is not reached.
        """
        engine, shares = self.core.engine, work.shares
        assert engine is not None and shares is not None
        known = work.there.get(index) if work.there is not None else None
        if known is not None and not known.lost:
            return known
        accounts = accounts_there(shares)
        asks = shares.asks[index]
        granted, lacks = await engine.reserve(limits_of(accounts), [asks.amounts if asks is not None else {}])
        if lacks:
            return Lack(accounts[lacks[0].place], lacks[0].unit)
        (share,) = granted
        assert share is not None
        work.there = work.there or {}
        work.there[index] = share
        return share

    def _end_there(self, work: Work, index: int, end: Literal["refund", "settle", "spend"]) -> None:
        """What a call has of those budgets comes to an end."""
        engine = self.core.engine
        share = work.there.pop(index, None) if work.there is not None else None
        if share is None or engine is None:
            return
        try:
            if end == "spend":
                engine.begin(share, limits_of(accounts_there(work.shares)))
            if end == "refund":
                engine.refund(share)
            else:
                engine.settle(share)
        except EngineUnavailable:  # it was closed before
            engine.forsake([share])

    def charge_there(self, work: Work, index: int, amounts: Mapping[str, int]) -> None:
        """A call has spent so much; from any thread."""
        if not accounts_there(work.shares):
            return
        if asyncio._get_running_loop() is self.loop:  # at once: the call may end in this very step
            self._charge(work, index, amounts)
        else:
            try:
                self.loop.call_soon_threadsafe(self._charge, work, index, amounts)
            except RuntimeError:  # the loop is gone
                spend_there(self.core.engine, accounts_there(work.shares), amounts)

    def _charge(self, work: Work, index: int, amounts: Mapping[str, int]) -> None:
        engine = self.core.engine
        share = work.there.get(index) if work.there is not None else None
        if share is not None and engine is not None:
            engine.charge(share, amounts)
        else:  # it has ended, and what it has left behind goes on
            spend_there(engine, accounts_there(work.shares), amounts)


def accounts_there(shares: Shares | None) -> list[Account]:
    """Those that count over all processes."""
    return [] if shares is None else [account for account in shares.chain if account.scope == "tenant"]


def limits_of(accounts: Sequence[Account]) -> list[Limits]:
    """The same as the engine takes them."""
    from towerman.engines.words import Limits

    return [
        Limits(_plain(account.key), tuple(account.limits.items()), _window(account.per), account.partial)
        for account in accounts
    ]


def has_share(accounts: Sequence[Account], units: set[str], replicas: int) -> bool:
    """Is what this process has spent and reserved of these units within its share?"""
    return all(
        account.spent.get(unit, 0) + account.reserved.get(unit, 0) <= limit // replicas
        for account in accounts
        for unit, limit in account.limits.items()
        if unit in units
    )


def spend_run(engine: object, run: RunState, amounts: Mapping[str, int]) -> None:
    """A run has spent so much, by no call; from any thread."""
    spend_there(engine, [account for account in run.accounts if account.scope == "tenant"], amounts)


def spend_there(engine: object, accounts: Sequence[Account], amounts: Mapping[str, int]) -> None:
    """So much was spent; from any thread."""
    if accounts and engine is not None:
        engine.spend(limits_of(accounts), amounts)  # type: ignore[attr-defined]  # an engine, which is imported late


def _window(per: str | int | None) -> int:
    from towerman.engines.words import MONTHS, WEEKS

    if per is None:
        return 0
    if isinstance(per, int):
        return per
    return MONTHS if per == "month" else WEEKS if per == "week" else PERIODS[per]


def _plain(key: str) -> str:
    return key if key.isprintable() else ascii(key)
