"""Intake: looks a batch over, call by call, and hands to the gate what may go there.

Theory. Each call is looked up, permitted and checked before anything of its batch starts; what is refused is sealed at
once and costs its siblings nothing. What is left is planned: which call waits for which. What waits for nothing is
offered to the gate, in emitted order or in the plan's.

House rules. A batch of any length: the loop gets a turn after each half millisecond of this, and whatever was ended
meanwhile is not offered. The graph of a long plan is made in one piece, so that is done on a thread: there it holds up
the loop for no longer than the interpreter takes to change threads.

Not here: how a call is answered (sealer), what follows from its end (runner), who may start (gate).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar, cast

from towerman import sealing
from towerman.arguments import frozen
from towerman.calls import Arguments, Hold
from towerman.core import MOST_WARNED, Refusal, filled, read_plan
from towerman.placeholders import Found, Others, told, warning
from towerman.plan import Bound, Group, Plan, PlanRefused, resolve_needs
from towerman.runner.sealer import Sealer
from towerman.work import Want, Work

T = TypeVar("T")

LONG: Final = 1_000
"""Calls from which on a plan is read and linked on a thread."""

SLICE: Final = 0.0005
"""Seconds of preparing or sealing after which the loop gets a turn."""


class Intake(Sealer):
    """Batches of one loop, up to their first offers; the runner goes on from here."""

    def _offer_row(self, work: Work, calls: range) -> None:
        """Offer calls that nothing orders to the gate and carry out what it decides."""
        raise NotImplementedError  # pragma: no cover - the runner's

    def _offer_ready(self, work: Work, ready: Iterable[int]) -> None:
        """Offer those that are ready."""
        raise NotImplementedError  # pragma: no cover - the runner's

    def _settle_in_plan(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed: let the plan go on."""
        raise NotImplementedError  # pragma: no cover - the runner's

    def _hand_on(self, work: Work) -> None:
        """If every call is sealed, wake whoever waits for that."""
        raise NotImplementedError  # pragma: no cover - the runner's

    async def _recall(self, work: Work) -> None:
        """Ask the journal which calls were begun before, and answer those that were."""
        raise NotImplementedError  # pragma: no cover - filing's

    async def _learned_elsewhere(self) -> None:
        """Ask the journal how long calls took in other processes."""
        raise NotImplementedError  # pragma: no cover - keeping's

    def _approval_for(
        self, work: Work, index: int, want: Want, keywords: dict[str, object]
    ) -> tuple[Want, dict[str, object]] | None:
        """See whether a call needs a person's approval."""
        raise NotImplementedError  # pragma: no cover - asking's

    def _diverted(self, work: Work, index: int) -> bool:
        """A call is ready: does it go into the durable queue, or was it put there before?"""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    def _ask_soon(self, work: Work, index: int) -> None:
        """A call that needs approval is ready: ask for it."""
        raise NotImplementedError  # pragma: no cover - asking's

    def _seal_decided(self, work: Work) -> None:
        """Seal what was denied before."""
        raise NotImplementedError  # pragma: no cover - asking's

    async def _spare(self, work: Work, needs: Sequence[Sequence[int]] | None) -> None:
        """Refuse what repeats itself, and what no budget has enough for."""
        raise NotImplementedError  # pragma: no cover - that of spending

    async def _alike(self, work: Work) -> list[Hashable | None] | None:
        """For each call what is equal for calls that one run could answer."""
        raise NotImplementedError  # pragma: no cover - sharing's

    def _check_open(self, work: Work, index: int, bound: Bound) -> Want | None:
        """Look over, as far as it can be, a call that waits for results of others."""
        raise NotImplementedError  # pragma: no cover - binding's

    def _answer(self, work: Work, ready: Iterable[int]) -> list[int]:
        """Answer what needs no run of its own; returns the rest."""
        raise NotImplementedError  # pragma: no cover - sharing's

    def _gather_groups(self, work: Work) -> None:
        """Remember the groups that the plan has found."""
        raise NotImplementedError  # pragma: no cover - sharing's

    async def _prepare(self, work: Work) -> None:
        """Look up, permit, check; plan; offer what is ready. Gives the loop a turn where it takes long."""
        core, run, calls = self.core, work.run, work.calls
        if work.parent is not None and work.parent.sealed:
            self._close(work, "cancelled", "cancelled", "the call that made it was given up")
            return
        if run.closed is not None:
            self._close(work, "run_closed", "rejected", run.closed)
            return
        size = len(calls)
        try:
            needs = None
            if work.batch.plan:
                needs = await _aside(size, partial(self._link, work))
            elif any(call.needs for call in calls):
                ids, wanted = [call.id for call in calls], [call.needs for call in calls]
                needs = await _aside(size, partial(resolve_needs, ids, wanted))
        except PlanRefused as refused:
            for index in range(size):
                work.tools[index] = core.tool_of(calls[index])
                self._refuse(work, index, refused.code, refused.message)
            self._hand_on(work)
            return
        if over(work):
            return
        most = core.most(size, planned=work.batch.plan or needs is not None)
        if most < size:
            work.notice = sealing.notice(most, size)
        if not (work.batch.plan or work.resumed or (work.deferral is not None and work.deferral.claims)):
            work.others = Others(calls)  # else results stand in the arguments, or they were looked through before
        turn = core.now() + SLICE
        any_holds = False
        asks = core.any_gated or work.resumed is not None or work.gated is not None
        # What is looked over now is looked at later too, and is the same call then.
        freezes = asks or core.journal is not None or work.open is not None
        for index in range(size):
            if work.results[index] is not None:  # from before, or cancelled meanwhile
                work.tools[index] = core.tool_of(calls[index])
            elif index < most or work.resumed is not None:
                if freezes and not isinstance(work.calls[index].arguments, str):
                    given = cast("Arguments", frozen(work.calls[index].arguments))
                    work.put_call(index, filled(work.calls[index], given))
                want = self._check(work, index, asks)
                if want is not None and want.holds:
                    any_holds = True
            else:
                work.tools[index] = core.tool_of(calls[index])
                self._refuse(work, index, "call_cap", sealing.capped(most, index, size))
            if not index & 7 and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + SLICE
                if over(work):
                    return
        alike = None
        if core.any_joined:
            alike = await self._alike(work)
            if over(work):
                return
        if core.journal is not None:
            await self._recall(work)
            if over(work):
                return
        if core.sparing:  # what the journal has answered costs nothing
            await self._spare(work, needs)
            if over(work):
                return
            if alike is not None:
                gone = (result is not None and not result.ok for result in work.results)
                alike = [None if no else one for no, one in zip(gone, alike, strict=True)]
        ordered = needs is not None or any_holds or alike is not None
        asked = core.journal_key is not None or (needs is not None and core.journal is not None)
        if ordered and size > 1 and asked and not core.means_asked:  # one call alone has no order to choose
            await self._learned_elsewhere()
            if over(work):
                return
        if ordered:
            work.plan = await _aside(size, partial(self._graph, work, needs, any_holds, alike))
            if over(work):
                return
            if work.plan.groups:
                self._gather_groups(work)
        if work.resumed is not None or (work.gated is not None and work.deferral is not None):
            self._seal_decided(work)
        if not work.plan.trivial:
            await self._start_plan(work)
            return
        await self._start_all(work)

    def _graph(
        self,
        work: Work,
        needs: Sequence[Sequence[int]] | None,
        any_holds: bool,
        alike: Sequence[Hashable | None] | None,
    ) -> Plan:
        """The plan of a batch, with the order of starting; nothing is changed that the loop looks at."""
        core, wants = self.core, list(work.wants)
        holds: Sequence[Sequence[Hold]] | None = None
        if work.open:
            holds = [held for held, _ in core.order_of(work.run, wants, dict(work.open))]
        elif any_holds:
            holds = [want.holds if want is not None else () for want in wants]
        anyway = [] if needs is None else [i for i, call in enumerate(work.calls) if call.if_failed == "run_anyway"]
        plan = Plan(len(wants), needs, holds, core.estimates(work.tools), alike, anyway)
        if len(wants) >= LONG:
            plan.key(0)  # which is worked out for the whole plan when it is first asked for
        return plan

    @staticmethod
    def _link(work: Work) -> list[tuple[int, ...]] | None:
        """Read the references of a plan; what each call needs, or None where no call needs any.

        Raises:
            PlanRefused: it cannot be followed.
        """
        linked = read_plan(work.batch)
        if linked is None:
            return None
        size = len(work.calls)
        work.bound, work.open = linked.bound[:size], {}
        work.referred = frozenset(one.step for bound in linked.bound if bound is not None for one in bound.references)
        if work.batch.outputs is not None:
            work.outputs = linked.bound[size]
        needs = linked.needs[:size]
        return needs if any(needs) else None

    async def _start_all(self, work: Work) -> None:
        """No edges: offer everything in emitted order, a slice at a time."""
        core, size = self.core, len(work.calls)
        turn = core.now() + SLICE
        for first in range(0, size, 128):
            if first and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + SLICE
                if work.closing is not None:
                    return
            self._offer_slice(work, first, min(first + 128, size))
        self._hand_on(work)

    def _offer_slice(self, work: Work, first: int, stop: int) -> None:
        """Offer calls in a row; those among them that wait for a person are asked for."""
        if work.gated is not None:
            for index in range(first, stop):
                waits = index in work.gated and not work.gated[index].cleared
                if waits and work.wants[index] is not None:
                    if first < index:
                        self._offer_row(work, range(first, index))
                    if work.deferral is None or not self._diverted(work, index):
                        self._ask_soon(work, index)
                    first = index + 1
        if first < stop:
            self._offer_row(work, range(first, stop))

    async def _start_plan(self, work: Work) -> None:
        """Edges: refused calls settle first, then what is ready is offered in the plan's order."""
        plan, core = work.plan, self.core
        turn = core.now() + SLICE
        for index in range(len(work.calls)):
            if not index & 15 and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + SLICE
                if work.closing is not None:
                    return
            blockers = plan.blockers(index, 3)
            if blockers:
                calls = list(dict.fromkeys(other for _, other in blockers))
                if work.groups is not None and index in work.groups:
                    calls = _behind(work.groups, index, calls)
                waits = work.waited_for[index] = tuple([f"call {other}" for other in calls])
                if self.core.emit is not None and work.results[index] is None:
                    self._tell(work, index, "waiting", waiting_for=waits[0])
        for index, result in enumerate(work.results):
            if result is not None:
                self._settle_in_plan(work, index, result.ok)
        ready: Iterable[int] = plan.start()
        if work.groups is not None:  # what the journal has answered may answer others
            ready = self._answer(work, ready)
        if work.closing is None:
            self._offer_ready(work, ready)
        self._hand_on(work)

    def _warn(self, work: Work, index: int, tool: str, placeholders: Sequence[Found]) -> None:
        """A call with placeholders runs all the same: say so, to the observers and with the batch."""
        if work.warned < MOST_WARNED:
            said = warning(placeholders, index, tool)
            work.notice = said if work.notice is None else f"{work.notice} {said}"
        work.warned += 1
        if self.core.emit is not None:
            self._tell(work, index, "warned", code="unresolved_placeholder", reason=told(placeholders))

    def _check(self, work: Work, index: int, asks: bool) -> Want | None:
        """What one call wants, or None when it was refused and sealed; `asks`: some calls need approval."""
        if work.open is not None:
            bound = work.bound[index]
            if bound is not None and index not in work.filled:
                if bound.references:
                    return self._check_open(work, index, bound)
                work.put_call(index, filled(work.calls[index], bound.known()))
                work.filled.add(index)
        core, others = self.core, work.others
        found = core.check(work.run, work.batch, index, work.calls[index], others)
        if isinstance(found, Refusal):
            work.tools[index] = found.tool
            self._refuse(work, index, found.code, found.message)
            return None
        want, keywords = found
        work.tools[index] = want.of
        if want.of.warns and others is not None:
            placeholders = core.doubted(want.of, work.calls[index], keywords, others, index)
            if placeholders:
                self._warn(work, index, want.tool, placeholders)
        if asks:
            cleared = self._approval_for(work, index, want, keywords)
            if cleared is None:
                return None
            want, keywords = cleared
        if work.parent is not None:
            want = core.nested_want(want, work.parent)
        if work.deferral is not None and index in work.deferral.claims:
            want = want.patient(min(work.deferral.patience, want.max_wait))
        work.keywords[index] = keywords
        work.wants[index] = want
        return want


def over(work: Work) -> bool:
    """Is a batch being ended? It may have been, whenever the loop had its turn."""
    return work.closing is not None


async def _aside(size: int, made: Callable[[], T]) -> T:
    """What takes long for a batch of this size, made on a thread."""
    if size < LONG:
        return made()
    try:
        # A thread of its own: those that the loop lends may all be taken by somebody else.
        threads = ThreadPoolExecutor(1, "towerman-plan")
        future = asyncio.get_running_loop().run_in_executor(threads, made)
    except RuntimeError:  # the system gives no thread
        return made()
    try:
        return await future
    finally:
        threads.shutdown(wait=False)


def _behind(groups: Mapping[int, Group], index: int, calls: list[int]) -> list[int]:
    """Whom a member of a group waits for: not for the one before it, but for the first of them, which is to run."""
    group = groups[index]
    return list(dict.fromkeys(group.members[0] if groups.get(other) is group else other for other in calls))
