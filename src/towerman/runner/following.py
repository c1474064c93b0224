"""One batch that is gone on with twice at once: whoever comes second follows each call that the first has at work.

Theory (rule S4). Every call that came back pending has a record, and whoever starts it claims that. A call whose record
somebody else has claimed does not start: it waits, holding nothing, for what comes of the other one. When that has its
result, it is this one's too; when it turned out not to start, this one is offered again. So no call runs twice, and
each of those who go on with the batch is told the same.

The wait has an end: what such a call may take, from its place in a queue to its grace. When that is over, or where the
two would wait for one another, the call comes back pending, and its batch may be gone on with later.

House rules. What a call comes to here is looked up in its record in the moment in which it is needed: whoever has
claimed it may be on another loop.

Not here: other processes (filing), which calls have a record (asking, approvals).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from towerman import sealing
from towerman.calls import Result
from towerman.runner.offering import Offering
from towerman.work import Job, Join, Work, callers

if TYPE_CHECKING:
    from towerman.approvals import Approval

SAME_CALL: Final = "the same call"
"""What a join waits for, as people are shown it."""


class Following(Offering):
    """What concerns calls that somebody else may be at work with; the runner goes on from here."""

    def _settle(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed: let the plan go on."""
        raise NotImplementedError  # pragma: no cover - of the ends

    def _leave(self, work: Work, index: int, approval: Approval, message: str) -> None:
        """A call comes back pending."""
        raise NotImplementedError  # pragma: no cover - asking's

    def _broke_down(self, work: Work, fault: Exception) -> None:
        """A fault of Towerman's own."""
        raise NotImplementedError  # pragma: no cover - asking's

    def _look_into_queue(self, work: Work, index: int) -> bool:
        """A call is in the durable queue: it is answered with what is there."""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    def _forget(self, join: Join) -> None:
        """A join waits no more."""
        raise NotImplementedError  # pragma: no cover - filing's

    # ================================================================ what is known

    @staticmethod
    def _record(work: Work, index: int) -> Approval | None:
        return work.gated.get(index) if work.gated is not None else None

    def _is_with_another(self, work: Work, index: int) -> bool:
        """Is somebody else at work with a call, who goes on with the same batch?"""
        record = self._record(work, index)
        return record is not None and record.held_beside(work)

    def _taken_before(self, work: Work, index: int) -> bool:
        """A call is not let through: if somebody else is at work with it, or was, it comes to what comes of that."""
        record = self._record(work, index)
        if record is None or work.closing is not None or not (record.held_beside(work) or record.settled):
            return False
        self._go_by(work, index, record)
        return True

    def _go_by(self, work: Work, index: int, record: Approval) -> None:
        """Somebody else has claimed the record of an open call: tell what came of it, or wait for that."""
        with self.core.lock:
            settled, result, held = record.settled, record.result, record.used
        join = work.joins.get(index) if work.joins else None
        if not settled and held:
            self._wait_along(work, index, record)
            return
        if join is not None:
            self._forget(join)
        if not settled:
            self._go_on_alone(work, index, record)
        elif result is None:
            self._refuse(work, index, "approval_missing", sealing.USED)
            self._settle(work, index, False)
        else:
            self._seal_same(work, index, result)

    def _seal_same(self, work: Work, index: int, result: Result) -> None:
        """Somebody else has the result of an open call: it is this one's too."""
        filed = work.filed.get(index) if work.filed is not None else None
        work.keywords[index] = work.wants[index] = None
        if result.outcome == "pending" and filed is not None and filed.key is not None:
            self._look_into_queue(work, index)  # which says in what chain it stands there
            return
        if filed is not None:
            filed.told = True
        self._seal(work, index, result, self.core.now())
        self._settle(work, index, result.ok)

    # ================================================================ waiting

    def _wait_along(self, work: Work, index: int, record: Approval) -> None:
        core, tool = self.core, work.tools[index]
        now = core.now()
        assert tool is not None
        if work.joins is None:
            work.joins = {}
        join = work.joins.get(index)
        if join is None:
            other = partial(_at_work_with, record, index)
            if work.parent is not None and self._in_a_circle(work, other()):
                self._leave(work, index, record, sealing.TAKEN)
                return
            most = tool.max_wait + tool.timeout + core.policy.grace
            join = work.joins[index] = Join(work, index, now, min(now + most, work.run.limit), record)
            self._joins[join] = None
            if work.parent is not None:
                with core.lock:
                    core.joined[join] = tuple(callers(work)), other
            if core.emit is not None:
                self._tell(work, index, "joined", waiting_for=SAME_CALL)
            if join.due < self._timer_at:
                self._arm(join.due)
            self._share_back(work, index)
        wake = partial(self._wake_follower, join)
        with core.lock:
            follows = record.held_beside(work)
            if follows:
                record.followers.append(wake)
                join.stop = partial(self._unfollow, record, wake)
        if not follows:
            self.loop.call_soon(self._moved, join)

    def _unfollow(self, record: Approval, wake: Callable[[], None]) -> None:
        with self.core.lock:
            if wake in record.followers:
                record.followers.remove(wake)

    def _wake_follower(self, join: Join) -> None:
        """Under the lock, from whatever loop or thread: a record has moved that a call follows."""
        try:
            self.loop.call_soon_threadsafe(self._moved, join)
        except RuntimeError:  # this loop is gone, and its call with it
            return

    def _moved(self, join: Join) -> None:
        work, index, record = join.work, join.index, join.record
        if record is None or work.results[index] is not None or (work.joins or {}).get(index) is not join:
            return
        try:
            self._go_by(work, index, record)
        except Exception as fault:
            self._broke_down(work, fault)

    def _go_on_alone(self, work: Work, index: int, record: Approval) -> None:
        """Whoever had an open call has let go of it: it is offered again."""
        if work.closing is not None:
            self._seal_closed(work, index)
            self._settle(work, index, False)
        elif self._reserve_anew(work, index):
            if record.expires < self._timer_at:
                self._arm(record.expires)
            self._offer_ready(work, [index])
        else:
            self._settle(work, index, False)

    def _followed_enough(self, join: Join) -> None:
        """A call that follows another one has waited for as long as that may take: it comes back pending."""
        work, index, record = join.work, join.index, join.record
        assert record is not None
        self._forget(join)
        self._leave(work, index, record, sealing.TAKEN)

    def _in_a_circle(self, work: Work, other: Job | None) -> bool:
        """Does whoever is at work on a call wait, directly or not, for one of those that wait for this batch?"""
        core = self.core
        waiting = set(callers(work))
        with core.lock:
            todo = [] if other is None else [other]
            seen: set[Job] = set()
            while todo:
                job = todo.pop()
                if job in waiting:
                    return True
                if job not in seen:
                    seen.add(job)
                    known = [find() for callers_, find in core.joined.values() if job in callers_]
                    todo += [one for one in known if one is not None]
        return False


def _at_work_with(record: Approval, index: int) -> Job | None:
    """The call that has claimed a record, or in whose run it is answered."""
    holder = record.holder
    if not isinstance(holder, Work):
        return None
    group = holder.groups.get(index) if holder.groups is not None else None
    inside = group is not None and index in group.inside
    return holder.jobs.get(group.source if inside and group is not None else index)
