"""Calls that go into the durable queue, and what comes behind them.

Theory. A call of a tool with `when_busy="defer"` for which the gate has no room is written into the journal's queue,
and answered `pending` once it is on the disk. To the plan it has answered and ended, so that what comes behind it
becomes ready in its turn; but each call that comes behind one in the queue, directly or not, goes there as well when it
is ready, behind that one (rule S3). So whatever else such a call had to wait for is over by then, what it needs and
did not get skips it here, and the order of a batch stays what it was. A call that comes behind a queued one and is
sealed otherwise (skipped, cancelled) hands on what it came behind.

A batch that is handed in again finds its calls in the queue: they are answered as they stand there, and nothing is put
in twice. A call that a worker has taken from there runs as any other, but it is not put back by itself: its worker
hears that there was no room.

A cancel that comes while a call is being written calls that off, where it has not begun; where it has, the call is
taken back when it is there. Only if a worker was faster is it answered that it is in the queue, which is the truth.

What a person has said to a call goes there with it, and so does the question that somebody was asked (carrying).

House rules. What the journal answers is heard on the loop, one call after another: nothing recurses over a chain.

Not here: the queue (journal), running what is in it (worker), the words (sealing).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from towerman import sealing
from towerman.errors import Code
from towerman.gate import NEVER
from towerman.records import (
    Answer,
    Deferred,
    DeferredState,
    JournalUnavailable,
    QueueFull,
    Record,
    new_handle,
    packed,
)
from towerman.runner import carrying
from towerman.runner.filing import JOURNAL_SECONDS, Filing, _said
from towerman.trace import ID_CHARACTERS
from towerman.work import Deferral, Handing, RunState, Slot, Work

SUBMITTED: Final = "it was handed in to run later"
"""Why a call goes into the queue that nobody wanted to start."""


class Deferring(Filing):
    """What concerns the durable queue; the runner goes on from here."""

    # ================================================================ what goes there

    def _defer(self, work: Work, index: int, entry: Slot, waited: float, waited_for: tuple[str, ...]) -> bool:
        """A call for which there is no room now: does it go into the durable queue?"""
        code, blocker = entry.rejection.code, entry.rejection.blocker
        deferral = work.deferral
        if code not in sealing.DEFERRED_FOR or self.core.journal is None or work.closing is not None:
            return False
        if deferral is not None and index in deferral.claims:
            return False
        if work.again is not None and index in work.again:  # it has begun before: it comes to what came of that
            return False
        if code == "concurrency_limit" and self.core.gate.ledger.hopeless(entry.wants) is not None:
            return False
        why = sealing.DEFERRED_FOR[code].format(blocker=blocker or "its turn")
        return self._hand_in(work, index, "deferred", why, waited, waited_for, ())

    def _diverted(self, work: Work, index: int) -> bool:
        """A call is ready: does it go into the durable queue, or was it put there before?"""
        deferral = work.deferral
        assert deferral is not None
        if index in deferral.handing:
            return True
        if index in deferral.found:
            self._soon_handed(self._handing(work, index, "deferred", "it was deferred before"), self._as_it_stands)
            return True
        if index in deferral.claims:
            return False
        behind = self._behind(work, index)
        waited_for = work.waited_for.get(index, ())
        if behind:
            first = min(behind)
            why = f"it comes after call {first}{sealing.named(work.calls[first])}, which was deferred"
            if not self._hand_in(work, index, "held_behind", why, 0.0, waited_for, sorted(behind)):
                hand = self._handing(work, index, "held_behind", why)
                self._soon_handed(hand, self._unwritable)
            return True
        if deferral.every:
            if not self._hand_in(work, index, "deferred", SUBMITTED, 0.0, waited_for, ()):
                self._soon_handed(self._handing(work, index, "deferred", SUBMITTED), self._unwritable)
            return True
        return False

    def _hand_in(
        self,
        work: Work,
        index: int,
        code: Code,
        why: str,
        waited: float,
        waited_for: tuple[str, ...],
        behind: Sequence[int],
    ) -> bool:
        """Have a call written into the queue; False where its arguments cannot be written down."""
        core, call, tool = self.core, work.calls[index], work.tools[index]
        assert core.journal is not None and tool is not None
        body = packed(call.arguments, call.idempotency_key)
        approval = (work.gated or {}).get(index)
        asked = edited = None
        if body is not None and approval is not None and approval.needed and (approval.cleared or approval.asked):
            if core.journal_key is None:
                problem = JournalUnavailable("failed", "the journal could not be used when the batch came in")
                hand = self._handing(work, index, code, why, waited, waited_for)
                self._soon_handed(hand, lambda one: self._not_handed(one, problem))
                return True
            with core.lock:  # else whoever goes on with the same batch has it: the two are one call in the queue
                mine = not approval.cleared or core.claim(approval, work)
            try:
                asked, edited = carrying.taken_along(core, work, index, body) if mine else (None, None)
            except carrying.NotPlain:
                body = None
        if body is None:
            return False
        hand = self._handing(work, index, code, why, waited, waited_for)
        deferral = work.deferral
        assert deferral is not None
        filed = work.filed.get(index) if work.filed is not None else None
        key = filed.key if filed is not None else None
        hand.handle = new_handle()
        needs = [deferral.handles[one] for one in work.plan.needed(index) if one in deferral.handles]
        one = Deferred(
            hand.handle,
            tool.name,
            work.run.run_id,
            os.urandom(32) if key is None else key,
            filed.digest if filed is not None else None,
            str(call.id)[:ID_CHARACTERS],
            work.number,
            index,
            work.run.tenant,
            work.run.priority,
            position=work.plan.place(index),
            needs=tuple(dict.fromkeys(needs)),
            harmless=tool.policy.repeatable,
            deadline=self._until(work.run),
            permission=work.run.permission,
        )
        most: list[tuple[str | None, int]] = [(None, core.policy.max_queued)]
        if tool.policy.max_queued is not None:
            most.append((tool.name, tool.policy.max_queued))
        hand.future = core.journal.enqueue(
            one, body, behind=[deferral.handles[other] for other in behind], most=most, asked=asked, edited=edited
        )
        self._when(hand.future, partial(self._handed, hand), work, index)
        return True

    def _until(self, run: RunState) -> float | None:
        """The Unix time of a run's deadline, the same for all of its calls; None: it has none."""
        if run.until is None and run.limit != NEVER:
            run.until = self.core.wall() + run.limit - self.core.now()
        return run.until

    def _handing(
        self,
        work: Work,
        index: int,
        code: Code,
        why: str,
        waited: float = 0.0,
        waited_for: tuple[str, ...] | None = None,
    ) -> Handing:
        """An open call is in the journal's hands: neither the gate nor the plan knows of it."""
        if work.deferral is None:
            work.deferral = Deferral()
        if waited_for is None:
            waited_for = work.waited_for.get(index, ())
        due = self.core.now() + JOURNAL_SECONDS
        hand = work.deferral.handing[index] = Handing(work, index, code, why, waited, waited_for, due)
        self._handings[hand] = None
        work.keywords[index] = None
        work.wants[index] = None
        if due < self._timer_at:
            self._arm(due)
        return hand

    def _soon_handed(self, hand: Handing, then: Callable[[Handing], None]) -> None:
        """Go on when the loop has had its turn."""

        def go_on() -> None:
            if self._is_open(hand):
                try:
                    then(hand)
                except Exception as fault:
                    self._broken(hand.work, hand.index, fault)

        self.loop.call_soon(go_on)

    @staticmethod
    def _is_open(hand: Handing) -> bool:
        deferral, index = hand.work.deferral, hand.index
        return deferral is not None and deferral.handing.get(index) is hand and hand.work.results[index] is None

    def _let_go_of(self, hand: Handing) -> None:
        """It is sealed now."""
        self._handings.pop(hand, None)
        if hand.work.deferral is not None:
            hand.work.deferral.handing.pop(hand.index, None)

    # ================================================================ what the journal says

    def _handed(self, hand: Handing, done: Future[Deferred]) -> None:
        """On the loop: a call is in the queue, or could not be put there."""
        core = self.core
        journal = core.journal
        assert journal is not None
        problem = None if done.cancelled() else done.exception()
        row = done.result() if not done.cancelled() and problem is None else None
        if not self._is_open(hand):  # called off, or it took too long
            if row is not None and row.handle == hand.handle:
                journal.cancel_deferred(row.handle)
            return
        try:
            self._hear(hand, row, problem)
        except Exception:  # of ours: the call is answered so, and is not to run all the same
            if row is not None and row.handle == hand.handle:
                journal.cancel_deferred(row.handle)
            raise

    def _hear(self, hand: Handing, row: Deferred | None, problem: BaseException | None) -> None:
        journal, work, index = self.core.journal, hand.work, hand.index
        assert journal is not None
        if row is None:
            self._not_handed(hand, problem)
        elif row.handle != hand.handle:  # the same call was put there, since it was looked up
            self._ask_queue(hand, row.key)
        elif hand.stop is not None or work.closing is not None:
            taken = journal.cancel_deferred(row.handle)
            self._when(taken, partial(self._taken_back, hand, row), work, index)
        else:
            self._seal_row(hand, row, None)

    def _not_handed(self, hand: Handing, problem: BaseException | None) -> None:
        code: Code = "journal_unavailable"
        if isinstance(problem, QueueFull):
            code = "queue_full"
            message = f"Not started: {hand.why}, and the durable queue is full. Try again later."
        else:
            self.core.count_filed("unavailable")
            why = "the journal failed" if problem is None else _said(problem)
            message = f"Not started, and not deferred: {hand.why}, and {why}."
        self._end_handing(hand, code, message)

    def _end_handing(self, hand: Handing, code: Code, message: str) -> None:
        """It is not in the queue, and does not start."""
        work, index = hand.work, hand.index
        self._let_go_of(hand)
        if work.closing is not None:
            self._seal_closed(work, index, waited=hand.waited, waited_for=hand.waited_for)
        elif hand.stop is not None:
            message = f"Not started: {hand.stop}."
            self._refuse(work, index, "cancelled", message, "cancelled", waited=hand.waited, waited_for=hand.waited_for)
        else:
            self._refuse(work, index, code, message, waited=hand.waited, waited_for=hand.waited_for)
        self._settle(work, index, False)

    def _unwritable(self, hand: Handing) -> None:
        """Its arguments are no JSON, so it cannot go where it would have to go."""
        message = f"Not started: {hand.why}, and its arguments cannot be written down, for they are no JSON."
        self._end_handing(hand, hand.code, message)

    def _taken_back(self, hand: Handing, row: Deferred, done: Future[DeferredState | None]) -> None:
        """On the loop: a call that was cancelled while it was written has been taken back, or a worker was faster."""
        if not self._is_open(hand):
            return
        if not done.cancelled() and done.exception() is None and done.result() == "cancelled":
            self._end_handing(hand, "cancelled", "")
        else:
            self._seal_row(hand, row, None)

    # ================================================================ what was put there before

    def _put_before(
        self,
        work: Work,
        queued: Mapping[bytes, tuple[Deferred, Answer | None]],
        records: Mapping[bytes, Record],
    ) -> None:
        """Which calls of a batch were put into the durable queue before?

        They are answered when it is their turn: what comes behind them is to know that.
        """
        assert work.filed is not None
        for index, filed in work.filed.items():
            row = queued.get(filed.key) if filed.key is not None and filed.claim is None else None
            if row is None or work.results[index] is not None:
                continue
            if row[0].state in ("queued", "claimed") or filed.key not in records:
                if work.deferral is None:
                    work.deferral = Deferral()
                work.deferral.found[index] = row

    def _look_into_queue(self, work: Work, index: int) -> bool:
        """A call was put into the durable queue since it was looked up: it is answered with what is there."""
        assert work.filed is not None
        key = work.filed[index].key
        assert key is not None
        self._ask_queue(self._handing(work, index, "deferred", "it was deferred before"), key)
        return False

    def _ask_queue(self, hand: Handing, key: bytes) -> None:
        journal = self.core.journal
        assert journal is not None

        def heard(done: Future[dict[bytes, tuple[Deferred, Answer | None]]]) -> None:
            if not self._is_open(hand):
                return
            problem = done.exception()
            row = None if problem is not None else done.result().get(key)
            if row is None:
                self._not_handed(hand, problem)
            else:
                self._seal_row(hand, *row)

        hand.future = None
        self._when(journal.deferred_by((key,)), heard, hand.work, hand.index)

    def _as_it_stands(self, hand: Handing) -> None:
        assert hand.work.deferral is not None
        self._seal_row(hand, *hand.work.deferral.found[hand.index])

    def _seal_row(self, hand: Handing, row: Deferred, answer: Answer | None) -> None:
        """Answer a call with what stands in the queue."""
        core, work, index = self.core, hand.work, hand.index
        deferral = work.deferral
        assert deferral is not None
        filed = work.filed.get(index) if work.filed is not None else None
        if filed is not None and None not in (filed.digest, row.digest) and filed.digest != row.digest:
            core.count_filed("conflicts")
            message = "Not started: a call with other arguments was deferred before as this one. Use another key."
            self._end_handing(hand, "idempotency_conflict", message)
            return
        waited, waited_for = hand.waited, hand.waited_for
        if row.state == "cancelled" or (row.state == "done" and answer is None):
            what = "cancelled there" if row.state == "cancelled" else "settled by hand"
            self._let_go_of(hand)
            message = f"Not started: it was deferred before, and {what}."
            self._refuse(work, index, "cancelled", message, "cancelled", waited=waited, waited_for=waited_for)
            self._settle(work, index, False)
            return
        self._let_go_of(hand)
        call = work.calls[index]
        if row.state == "done" and answer is not None:
            core.count_filed("replayed")
            result = sealing.answered_later(index, call, answer, waited, waited_for)
            if core.emit is not None:
                self._tell(work, index, "replayed", code=result.code)
        else:
            self._join_chain(work, index, row, hand)
            if row.handle != hand.handle and row.chain not in (None, row.handle):
                hand.code = "held_behind"
            reader = None if core.reader is None else core.reader.name
            result = sealing.queued(index, call, hand.code, hand.why, row.handle, waited, waited_for, reader)
            if core.emit is not None:
                self._tell(work, index, "deferred", code=hand.code, waited=waited, waiting_for=_last(waited_for))
        if filed is not None:
            filed.told = True
        self._seal(work, index, result, core.now())
        self._settle(work, index, result.ok or result.outcome == "pending")

    def _join_chain(self, work: Work, index: int, row: Deferred, hand: Handing) -> None:
        """A call is in the queue: it stands for its chain."""
        deferral = work.deferral
        assert deferral is not None
        if row.handle == hand.handle:  # those that it comes behind are of one chain with it now
            for one in self._behind(work, index):
                deferral.heads[one] = index
        deferral.handles[index] = row.handle

    # ================================================================ what comes behind

    def _behind(self, work: Work, index: int) -> set[int]:
        """The calls in the queue that an open call comes behind, one for each chain."""
        deferral = work.deferral
        assert deferral is not None
        known = deferral.behind
        if not known:
            return set()
        found = set(known.get(index, ()))
        plan = work.plan
        if plan.junction_count:
            gates = deferral.gates
            if gates is None:
                gates = deferral.gates = {}
                for node in range(plan.size, plan.size + plan.junction_count):
                    for other in plan.nexts(node):
                        gates.setdefault(other, []).append(node)
            for node in gates.get(index, ()):
                if node in known:
                    known[node] = {deferral.head(one) for one in known[node]}
                    found |= known[node]
        return {deferral.head(one) for one in found}

    def _held(self, work: Work, index: int) -> bool:
        """Does an open call come behind one in the durable queue?"""
        return bool(self._behind(work, index))

    def _hand_down(self, work: Work, sealed: Iterable[int]) -> None:
        """Calls are sealed: what comes behind those in the durable queue knows that."""
        deferral, plan, results = work.deferral, work.plan, work.results
        assert deferral is not None
        if not deferral.handles:
            return
        for index in sealed:
            before = {index} if index in deferral.handles else self._behind(work, index)
            if not before:
                continue
            todo, seen = [index], {index}
            while todo:
                for node in plan.nexts(todo.pop()):
                    if node in seen:
                        continue
                    seen.add(node)
                    if node >= plan.size:
                        deferral.behind.setdefault(node, set()).update(before)
                        for other in plan.nexts(node):  # sealed before it was their turn: looked through
                            if results[other] is not None and other not in deferral.handles and other not in seen:
                                seen.add(other)
                                todo.append(other)
                    elif results[node] is None:
                        deferral.behind.setdefault(node, set()).update(before)
                    elif node not in deferral.handles:
                        todo.append(node)

    # ================================================================ stopping, time

    def _is_handed(self, work: Work, index: int, reason: str | None = None) -> bool:
        """Is a call being put into the durable queue, and can that not be called off any more?"""
        deferral = work.deferral
        assert deferral is not None
        hand = deferral.handing.get(index)
        if hand is None:
            return False
        if hand.future is not None and hand.future.cancel():
            self._let_go_of(hand)
            return False
        if reason is not None and hand.stop is None:
            hand.stop = reason
        return True

    def _look_at_handings(self, now: float) -> float:
        """Refuse what the journal takes too long for; the instant at which the next one has taken too long."""
        following = NEVER
        for hand in list(self._handings):
            if hand.due > now:
                following = min(following, hand.due)
                continue
            work, index, tool = hand.work, hand.index, hand.work.tools[hand.index]
            sure = hand.future is None or hand.future.cancel()
            self._let_go_of(hand)
            if work.results[index] is not None or tool is None:
                continue
            try:
                self.core.count_filed("unavailable")
                message = f"Not started: {hand.why}, and the journal did not answer within {JOURNAL_SECONDS:g} s."
                if sure:
                    self._refuse(
                        work, index, "journal_unavailable", message, waited=hand.waited, waited_for=hand.waited_for
                    )
                else:
                    message += " Whether it was deferred is not known yet; it is taken back, if no worker is faster."
                    result = sealing.elsewhere(
                        index,
                        work.calls[index],
                        tool,
                        "journal_unavailable",
                        message,
                        "rejected",
                        hand.waited,
                        hand.waited_for,
                    )
                    self._seal(work, index, result, self.core.now())
                self._settle(work, index, False)
            except Exception as fault:
                self._broken(work, index, fault)
        return following


def _last(labels: tuple[str, ...]) -> str | None:
    return labels[-1] if labels else None
