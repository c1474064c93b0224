"""Budgets of one loop's batches: reserved when they come in, spent when calls start, settled when they end.

Theory. Whatever a batch may have of budgets is decided in one step, under the lock, before anything of it is offered
(rule S8): the first calls that find enough are eligible, the rest are told at once. From there on a share has three
ways. Its call starts: it is spent in the step in which that is decided, or the call is refused, if charges of others
have used the budget up meanwhile. Its call is sealed without having started: it is refunded. The work of its call
ends: what was charged takes the place of what was asked.

The run of one call may answer others. What is identical has happened once, and costs once; what was merged into a
run has happened in it, and costs what it said.

Who gives his share back, since he waits for a person or rests between two attempts, reserves again before he is offered
once more: `_share_back` and `_reserve_again`.

With mode="observe" nobody is refused. A call that would have been has no share and is not counted in any budget, so
that those behind it find what they would have found.

House rules. Synchronous from the decision to its record. Amounts come from tools and handlers and may be made of
arguments: no message has one.

Not here: the arithmetic (budgets), what a call asks (tools), the words (sealing).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from towerman import sealing
from towerman.access import AccessRefused
from towerman.arguments import mark
from towerman.budgets import RESERVED, SPENT, Lack, Shares
from towerman.calls import Result
from towerman.rates import micros
from towerman.repeats import Repeats
from towerman.runner import intake
from towerman.runner.intake import Intake
from towerman.work import Job, Work


class Spending(Intake):
    """What concerns budgets and repeats; the runner goes on from here."""

    async def _spare(self, work: Work, needs: Sequence[Sequence[int]] | None) -> None:
        """Refuse what repeats itself and what is not paid for; gives the loop its turns. Returns early where the batch
        was ended meanwhile.
        """
        await self._refuse_repeats(work)
        if self.core.budgeted and work.closing is None:
            await self._reserve(work, needs)

    # ================================================================ repeats

    async def _refuse_repeats(self, work: Work) -> None:
        """Count the turns in which a call comes; what a handler makes is no turn."""
        core, run = self.core, work.run
        if work.parent is not None or work.resumed is not None or (work.deferral is not None and work.deferral.claims):
            return  # what a worker runs, or a batch that is gone on with holds, was counted when it came in
        marks: list[tuple[int, bytes, bool, int]] = []
        turn = core.now() + intake.SLICE
        for index, tool in enumerate(work.tools):
            keywords: Mapping[str, object] | None = work.keywords[index]
            if work.open and index in work.open:  # a plan that comes again is known by how it is written
                given = work.calls[index].arguments
                keywords = given if isinstance(given, Mapping) else {"": given}
            if tool is None or keywords is None or (tool.max_repeats is None and run.repeats is None):
                continue
            known = mark(core.seed, tool.name, keywords)
            if known is not None:
                marks.append((index, known, not tool.effect_free, tool.max_repeats or 0))
            if core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + intake.SLICE
                if work.closing is not None:
                    return
        if not marks:
            return
        if run.repeats is None:
            run.repeats = Repeats()
        with core.lock:
            counts = run.repeats.turn([(known, effect) for _, known, effect, _ in marks])
        for index, known, _, most in marks:
            if 0 < most < counts[known]:
                self._refuse(work, index, "repeated_call", sealing.repeated(most))

    # ================================================================ shares

    async def _reserve(self, work: Work, needs: Sequence[Sequence[int]] | None) -> None:
        """Reserve what the calls of a batch ask, and refuse those for which there is not enough."""
        core = self.core
        with core.lock:
            chain = core.chain(work.run, work.parent.work.shares if work.parent is not None else None)
        if not chain:
            return
        shares = Shares(core.purse, chain, len(work.calls))
        turn = core.now() + intake.SLICE
        for index, tool in enumerate(work.tools):
            keywords = work.keywords[index]
            if tool is not None and work.open and index in work.open:
                shares.asks[index] = tool.asks if tool.price is None else None  # else it asks when it is ready
            if tool is None or keywords is None or self._undecided_before(work, index):
                continue
            try:
                shares.asks[index] = core.asks(tool, keywords)
            except AccessRefused as untold:
                self._refuse(work, index, untold.code, str(untold))
            if not index & 7 and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + intake.SLICE
                if work.closing is not None:
                    return
        for index, wants in enumerate(work.wants):  # what was ended meanwhile asks nothing
            if wants is None:
                shares.asks[index] = None
        work.shares = shares
        with core.lock:
            core.purse.at(micros(core.now()))
            short = shares.reserve(needs)
            alone = [index for index in short if shares.alone(index)]
            some = len(short) < sum(asks is not None for asks in shares.asks)
        if short:
            stop = not (alone or some) and all(
                lack.account.scope != "batch" and lack.account.stops(lack.unit) for lack in short.values()
            )
            await self._refuse_short(work, short, stop=stop)
        if core.engine is not None and work.closing is None:
            await self._reserve_there(work, needs)

    async def _reserve_there(self, work: Work, needs: Sequence[Sequence[int]] | None) -> None:
        """Reserve of the budgets that count over all processes, too."""
        raise NotImplementedError  # pragma: no cover - of accounts

    def _end_there(self, work: Work, index: int, end: Literal["refund", "settle", "spend"]) -> None:
        """What a call has of those comes to an end."""
        raise NotImplementedError  # pragma: no cover - of accounts

    @staticmethod
    def _undecided_before(work: Work, index: int) -> bool:
        """Of a batch that is gone on with: does a call still wait for a person? It asks for nothing until then."""
        return (
            work.resumed is not None
            and work.gated is not None
            and not (index not in work.gated or work.gated[index].cleared)
        )

    async def _refuse_short(self, work: Work, short: dict[int, Lack], *, stop: bool) -> None:
        """Tell those at once for which there is not enough.

        Args:
            work: the batch.
            short: by index, why.
            stop: none of its calls would have had enough by itself.
        """
        core = self.core
        if core.policy.mode == "observe":
            self._tally(short.values())
            return
        work.exhausted = stop
        last, lack = next(reversed(short.items()))
        runs = work.shares.open if work.shares is not None else 0
        told = sealing.cut_short(lack, runs, len(work.calls), core.purse.renews(lack))
        work.notice = told if work.notice is None else f"{work.notice} {told}"
        turn = core.now() + intake.SLICE
        for index, lack in short.items():
            self._refuse_lack(work, index, lack, told if index == last else None)
            if not index & 7 and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + intake.SLICE
                if work.closing is not None:
                    return

    def _refuse_lack(
        self,
        work: Work,
        index: int,
        lack: Lack,
        message: str | None = None,
        *,
        waited: float = 0.0,
        waited_for: tuple[str, ...] = (),
    ) -> None:
        """Seal a call for which there is not enough."""
        left = self.core.purse.renews(lack)
        message = message or sealing.too_little(lack, left)
        blockers = (*waited_for, sealing.budget_of(lack))
        self._refuse(work, index, "budget_exhausted", message, waited=waited, waited_for=blockers, retry_after=left)

    def _tally(self, short: Iterable[Lack]) -> None:
        """With mode="observe": so many calls would have been refused."""
        core = self.core
        with core.lock:
            for lack in short:
                name = sealing.budget_of(lack)
                core.overspent[name] = core.overspent.get(name, 0) + 1

    def _pay(self, work: Work, index: int) -> Lack | None:
        """A call is about to start: spend its share. Returns why it may not start after all."""
        core, shares = self.core, work.shares
        assert shares is not None
        with core.lock:
            core.purse.at(micros(core.now()))
            lack = shares.begin(index)
            if lack is not None and core.policy.mode == "observe":
                shares.refund(index)
        if lack is not None and core.policy.mode == "observe":
            self._tally([lack])
            return None
        return lack

    def _late_for(self, work: Work) -> str:
        """The gate has refused a call, since the seconds of its run's budget are over; says whose they were."""
        with self.core.lock:
            for account in work.run.accounts:
                account.refused += account.scope == "run"
        return work.run.flow.over[1]

    def _settle_share(self, job: Job) -> None:
        """The work of a call has ended."""
        shares = job.work.shares
        if shares is not None and shares.state[job.index] == SPENT:
            with self.core.lock:
                shares.settle(job.index)
            if job.work.there:
                self._end_there(job.work, job.index, "settle")

    def _close_share(self, work: Work, index: int, result: Result) -> None:
        """A call is sealed: if it never started it gets back what it had."""
        shares, core = work.shares, self.core
        assert shares is not None
        state = shares.state[index]
        if state == RESERVED:
            rode = result.shared_with is not None and work.groups is not None and work.groups[index].merged
            with core.lock:
                core.purse.at(micros(core.now()))
                if rode:
                    shares.spend(index)
                    shares.settle(index)
                else:
                    shares.refund(index)
            if work.there:
                self._end_there(work, index, "spend" if rode else "refund")
        elif state == SPENT and not result.started:
            with core.lock:
                shares.refund(index)
            if work.there:
                self._end_there(work, index, "refund")

    def _share_back(self, work: Work, index: int) -> None:
        """A call that has not started waits for something that may take long: it gives back what it has reserved."""
        if work.shares is not None:
            with self.core.lock:
                work.shares.refund(index)
            if work.there:
                self._end_there(work, index, "refund")

    def _reserve_again(self, work: Work, index: int) -> bool:
        """A call is about to be offered once more: reserve for it. Where there is not enough it is refused, and False
        is returned; one that has been tried before then keeps what came of that (`_refuse`).
        """
        core, shares = self.core, work.shares
        if shares is None:
            return True
        with core.lock:
            core.purse.at(micros(core.now()))
            lack = shares.again(index)
        if lack is None:
            return True
        if core.policy.mode == "observe":
            self._tally([lack])
            return True
        self._refuse_lack(work, index, lack)
        return False

    def _reserve_anew(self, work: Work, index: int) -> bool:
        """The same for a call that asked nothing until now, or whose arguments are others by now."""
        tool, keywords = work.tools[index], work.keywords[index]
        if work.shares is None or tool is None or keywords is None:
            return True
        try:
            work.shares.asks[index] = self.core.asks(tool, keywords)
        except AccessRefused as untold:
            self._refuse(work, index, untold.code, str(untold))
            return False
        return self._reserve_again(work, index)

    def _sum_up(self, work: Work) -> None:
        """A batch is sealed: is a budget used up, so that no further call of its run would start?"""
        core = self.core
        with core.lock:
            if work.shares is not None:
                work.shares.forsake()  # nothing, but for a fault of ours
            if core.policy.mode == "observe":
                return
            core.purse.at(micros(core.now()))
            chain = work.run.accounts if work.shares is None else work.shares.chain
            us = core.purse.roll(chain)
            work.exhausted = work.exhausted or any(
                account.used_up(us) is not None for account in chain if account.scope != "batch"
            )
        if work.notice is None and work.shares is not None:  # budgets that were used up while calls waited
            short = [one for one in work.results if one is not None and one.code == "budget_exhausted"]
            if short:
                ran = sum(one is not None and one.started for one in work.results)
                work.notice = sealing.stopped_short(short[-1].message, ran, len(work.results))
