"""Calls that wait for a person: asked when they are ready, offered to the gate when they are approved.

Theory (rules S3, S4). Approval comes before everything that is scarce. A call that needs it is looked over with its
batch; when the plan says that it is ready, the run's approver is asked, in a task of its own. While that goes on the
call is nowhere in the gate: it holds no permit, counts in no queue and no rate, and no wait is clocked; only the
approval's own time runs, on the loop's one timer. A yes offers the call like any other. A no, or no answer in time,
refuses it. Where nobody is there to ask, or nobody has decided, the call comes back pending, and so do those that the
plan puts after it; all others go on.

A call that a worker has taken out of the durable queue comes with what was said about it. Where nobody has said
anything and nobody is there to ask, it goes back with the question, which is in the journal's inbox from then on.

What was approved is looked at once more when the call is about to start, after every wait: the time is not over, the
tool's `still_valid` says yes, the arguments are those that were looked at. Only then is the approval used, once.

A batch that came back with pending calls is gone on with as a batch of its own: the results that are there are put in
their places, what was open is looked over anew, and the plan sees to the order. What somebody else who goes on with
the same batch has at work is followed (following).

House rules. An approver is somebody else's code: whatever it raises, answers or leaves undone costs at most its own
call's decision. Only one answer is heard for a call, and none once its batch has gone on without it.

Not here: what counts as decided (approvals), words (sealing), where the batch is written down (work), what goes through
the queue with a call (carrying).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast

from towerman import sealing
from towerman.access import AccessRefused, within
from towerman.arguments import ArgumentsRefused
from towerman.calls import Outcome, Result
from towerman.core import Refusal, condition
from towerman.errors import Code
from towerman.gate import NEVER
from towerman.records import Approval as Kept
from towerman.records import JournalUnavailable, Unsettled
from towerman.runner import carrying, intake
from towerman.runner.following import Following
from towerman.runner.sealer import exit_in
from towerman.trace import ID_CHARACTERS, UNKNOWN_TOOL
from towerman.work import Slot, Want, Work

if TYPE_CHECKING:
    from towerman.approvals import Approval, ApprovalRequest, Approver, Decision, Suspended
    from towerman.journal import Journal

T = TypeVar("T")

PERSON: Final = "approval"
"""What a call that was asked for has waited for, as people are shown it."""

_log: Final = logging.getLogger("towerman")


class Asking(Following):
    """Approvals of one loop's calls."""

    @staticmethod
    async def _asked(future: Future[T]) -> T:
        """What the journal answers."""
        raise NotImplementedError  # pragma: no cover - filing's

    # ================================================================ looking over

    def _approval_for(
        self, work: Work, index: int, want: Want, keywords: dict[str, object]
    ) -> tuple[Want, dict[str, object]] | None:
        """See whether a call needs approval; None: it was refused and sealed."""
        core, tool = self.core, want.of
        known = work.gated.get(index) if work.gated is not None else None
        needed: bool | Refusal = True if known is not None and known.needed else core.gated(tool, keywords)
        if isinstance(needed, Refusal):
            self._refuse(work, index, needed.code, needed.message)
            return None
        if not needed:
            return want, keywords
        from towerman.approvals import Approval, binding, new_id, shape

        call = work.calls[index]
        try:
            # Three copies, so that what a person is shown, what runs and what is compared cannot be changed through one
            # another, nor by whoever made the call: not even an object in it that is no JSON.
            snapshot = deepcopy(keywords)
            keywords = deepcopy(snapshot)
            if not isinstance(call.arguments, str):
                call = replace(call, arguments=deepcopy(call.arguments))
        except Exception:
            message = "Not run: its arguments cannot be copied, so nobody could approve exactly these."
            self._refuse(work, index, "policy_error", message)
            return None
        approval = known if known is not None else Approval(new_id())
        approval.needed = True
        work.put_call(index, call)
        written = work.resumed.get(index) if work.resumed is not None else None
        if written is not None and written.needed:
            now_is = binding(work.key, call.tool, call.arguments, snapshot), shape(tool.checker.schema)
            if now_is != (written.binding, written.shape):
                self._refuse(work, index, "approval_expired", sealing.CHANGED)
                return None
        if work.gated is None:
            work.gated = {}
        work.gated[index] = approval
        approval.digest = binding(core.digest_key, tool.name, call.arguments, snapshot)
        approval.snapshot = snapshot
        if approval.state == "approved" and approval.edited is not None:
            return self._edited(work, index, approval, want)
        return want, keywords

    def _edited(self, work: Work, index: int, approval: Approval, want: Want) -> tuple[Want, dict[str, object]] | None:
        """What an approved call with other arguments wants, and these; None: they do not do, and it was refused."""
        tool, given = want.of, approval.edited
        assert given is not None
        try:
            keywords = tool.checker.check(deepcopy(dict(given)))
            accesses = want.accesses
            if tool.rule is not None and tool.fixed is None:
                accesses = tool.rule.accesses(keywords)
        except ArgumentsRefused as refused:
            self._refuse(work, index, "invalid_arguments", sealing.edited(refused.message))
            return None
        except AccessRefused as unnamed:
            self._refuse(work, index, unnamed.code, sealing.edited(str(unnamed)))
            return None
        except Exception:  # of values that do not let themselves be copied
            self._refuse(work, index, "invalid_arguments", sealing.edited("They cannot be copied."))
            return None
        if accesses is not want.accesses:
            if not within(accesses, want.accesses):
                self._refuse(work, index, "approval_missing", sealing.OUTSIDE)
                return None
            # It holds less than the plan has taken it to hold, or the same: the order stands.
            want = self.core.want(want, work.run, accesses)
        from towerman.approvals import binding

        approval.digest = binding(self.core.digest_key, tool.name, given, keywords)
        approval.changed = True
        if work.groups is not None:  # what runs is not what the others asked for
            work.groups.pop(index, None)
        return want, keywords

    def _seal_decided(self, work: Work) -> None:
        """Of a batch that is gone on with, or a call out of the queue, before it is planned to the end: those that were
        denied, or are too late, or are not what was approved.
        """
        now = self.core.now()
        decided, work.decided = work.decided, []
        for index, approval, told in decided:
            self._tell(work, index, "approval_decided", approval=approval.approval_id, decision=told)
        for index, approval in list((work.gated or {}).items()):
            if work.results[index] is not None:
                continue
            if self._is_claimed(work, index) and not self._holds(work, index, approval, now):
                continue
            if approval.settled:
                if not self._told_before(work, index, approval):
                    self._refuse(work, index, "approval_missing", sealing.USED)
                    self._settle(work, index, False)
            elif approval.used:
                continue
            elif approval.state == "denied":
                self._say_no(work, index, approval)
            elif approval.look(now) or approval.state == "expired":
                self._too_late(work, index, approval, sealing.OVER)
            elif approval.cleared and approval.expires < self._timer_at:
                self._arm(approval.expires)

    def _told_before(self, work: Work, index: int, approval: Approval) -> bool:
        """Somebody else has gone on with this batch meanwhile, and a call has its result from that: it is the same.
        False: the result is not kept any more.
        """
        result = approval.result
        if result is None:
            return False
        if self._is_in_queue(result):  # it is answered when it is its turn: what comes behind it is to know that
            return True
        self._share_back(work, index)
        work.keywords[index] = work.wants[index] = None
        work.place(index, result)
        return True

    def _is_in_queue(self, result: Result) -> bool:
        """Does a result say that its call is in the durable queue, where it can be looked up?"""
        return result.outcome == "pending" and self.core.journal is not None

    def _is_cleared_there(self, work: Work, index: int) -> bool:
        """Is the approval of this call used in the journal, in the step in which its intent is written?"""
        return work.gated is not None and index in work.gated and self._is_claimed(work, index)

    @staticmethod
    def _is_claimed(work: Work, index: int) -> bool:
        """Has a worker taken this call out of the durable queue?"""
        return work.deferral is not None and index in work.deferral.claims

    def _holds(self, work: Work, index: int, approval: Approval, now: float) -> bool:
        """Is a call out of the queue the one that its approval came with? If not it is refused."""
        assert work.deferral is not None
        if work.filed is None or index not in work.filed:
            message = "Not started: the journal cannot be used, and its approval is there."
            self._refuse(work, index, "journal_unavailable", message)
            self._settle(work, index, False)
            return False
        row = work.deferral.rows.get(index)
        asked = row.asked if row is not None else None
        if asked is None or approval.state == "denied":
            return True
        if carrying.bound(self.core, work, index, work.calls[index].arguments, approval.snapshot) != asked.digest:
            message = sealing.CHANGED
        elif approval.state == "approved" and approval.look(now):
            message = sealing.refusal("approval_expired", "", 0.0)
        else:
            return True
        self._too_late(work, index, approval, message)
        return False

    # ================================================================ going on with a batch

    def take_up(self, work: Work, suspended: Suspended, decisions: Mapping[str, Decision]) -> None:
        """Before a batch starts: it was begun before, and people have decided meanwhile.

        Args:
            work: the batch, new.
            suspended: what was written down of it.
            decisions: by the names of approvals, all of which the batch knows.
        """
        from towerman.approvals import Approval
        from towerman.records import keyed

        core = self.core
        now, wall, lifetime = core.now(), core.wall(), core.policy.approval_lifetime
        work.notice = suspended.notice
        work.resumed = suspended.opened
        work.origin = suspended.run_id
        work.closed = dict(suspended.closed)
        work.values = dict(suspended.values) or None
        work.key = bytes.fromhex(suspended.key) or keyed(core.secret or b"", "arguments of a batch state")
        for index, result in enumerate(suspended.results):
            if result is not None:
                work.place(index, result)
        work.gated = {}
        for index, written in suspended.opened.items():
            with core.lock:
                approval = core.book.find(written.approval_id)
                if approval is None:
                    approval = Approval(written.approval_id, needed=written.needed)
                    approval.state, approval.hidden = written.state, written.hidden
                    approval.edited = written.arguments
                    # By the calendar, which may have been set back meanwhile: never longer than a new one would have.
                    approval.expires = now + min(written.expires_at - wall, lifetime)
                    core.book.keep(approval, now)
                decision = decisions.get(written.approval_id)
                heard = approval.decide(decision, now, lifetime) if decision is not None else None
                result = approval.result
            work.gated[index] = approval
            if written.written is not None:
                work.remember_written(index, written.written)
            if heard is not None and decision is not None:
                told = self._count_heard(approval, decision, heard)
                if told:
                    work.decided.append((index, approval, told))
            if approval.settled and result is not None and not self._is_in_queue(result):
                work.place(index, result)
        for name, decision in decisions.items():
            state = work.closed.get(name)
            if state is not None and state != ("denied" if _is_no(decision) else "approved"):
                self._count("ignored")
                _log.warning("approval %s is %s already; another decision is ignored", name, state)

    def _count_heard(self, approval: Approval, decision: Decision, heard: str) -> str:
        """Count what became of a decision. Returns how it is told, or nothing where it changes nothing."""
        if heard == "taken":
            no = _is_no(decision)
            self._count("denied" if no else "approved")
            return "denied" if no else "edited" if approval.edited is not None else "approved"
        if heard != "again":
            self._count("ignored")
            why = "its time is over" if heard == "late" else f"it is {approval.state} already"
            _log.warning("approval %s: a decision is ignored, %s", approval.approval_id, why)
        return ""

    async def decided(self, suspended: Suspended, given: Mapping[str, Decision]) -> dict[str, Decision]:
        """What people have decided about the open calls of a batch: what the host says, and what is in the journal. Of
        two decisions the first that was written down counts.

        Args:
            suspended: what was written down of the batch.
            given: what the host says, by the names of approvals.
        """
        found = dict(given)
        journal = self.core.journal
        if journal is None:
            return found
        for written in suspended.opened.values():
            name = written.approval_id
            if not written.needed or written.state != "pending":
                continue
            try:
                row = await self._written_down(journal, name, given.get(name))
            except JournalUnavailable as trouble:
                _log.warning("approvals in the journal could not be looked up: %s", trouble)
                return found
            if row is not None and row.state in ("approved", "denied"):
                self._prefer(found, name, row)
        return found

    async def _written_down(self, journal: Journal, name: str, decision: Decision | None) -> Kept | None:
        """The journal's row of an approval, once a decision was written there.

        A yes that brings other arguments is the host's alone: the journal does not say which these are.
        """
        from towerman.approvals import Denied

        if isinstance(decision, Denied) or (decision is not None and decision.arguments is None):
            no = isinstance(decision, Denied)
            until = None if isinstance(decision, Denied) or decision.expires_in is None else decision.expires_in
            wall = self.core.wall()
            try:
                return await self._asked(
                    journal.decide(
                        name,
                        not no,
                        reason=decision.reason if isinstance(decision, Denied) else None,
                        expires_at=None if until is None else wall + min(until, self.core.policy.approval_lifetime),
                    )
                )
            except Unsettled:  # there is no such row, it is too late, or somebody has decided otherwise
                pass
        return await self._asked(journal.approval(name))

    def _prefer(self, found: dict[str, Decision], name: str, row: Kept) -> None:
        """The journal knows a decision: it counts."""
        from towerman.approvals import Approved, Denied

        mine = found.get(name)
        if mine is not None and isinstance(mine, Denied) == (row.state == "denied"):
            return
        if mine is not None:
            self._count("ignored")
            _log.warning("approval %s is %s already; another decision is ignored", name, row.state)
        left = row.expires_at - self.core.wall()
        found[name] = Denied(row.reason or "") if row.state == "denied" else Approved(expires_in=max(left, 1e-6))

    def _note_request(self, work: Work, index: int, approval: Approval) -> None:
        """A call comes back pending: write down, where there is a journal, that a person is asked."""
        core = self.core
        journal = core.journal
        if journal is None or not approval.open or approval.hidden:
            return
        call, run = work.calls[index], work.run
        row = Kept(
            approval.approval_id,
            run.run_id,
            str(call.tool)[: sealing.NAME_CHARACTERS],
            bytes.fromhex(approval.digest),
            core.wall() + approval.expires - core.now(),
            str(call.id)[:ID_CHARACTERS],
            work.number,
            index,
            run.tenant,
        )
        shown = carrying.shown(approval)
        journal.ask_approval(row, shown).add_done_callback(partial(_not_noted, approval.approval_id))

    # ================================================================ asking

    def _ask_soon(self, work: Work, index: int) -> None:
        """A call that needs approval is ready: ask for it, in a turn of the loop of its own."""
        self.loop.call_soon(self._ask, work, index)

    def _ask(self, work: Work, index: int) -> None:
        try:
            if work.closing is None and work.results[index] is None:
                self._ask_for(work, index)
        except Exception as fault:
            self._broke_down(work, fault)

    def _broke_down(self, work: Work, fault: Exception) -> None:
        """A fault of Towerman's own: the batch is ended, sealed and told."""
        work.error = work.error or fault
        self._close(work, "cancelled", "cancelled", f"Towerman failed ({type(fault).__name__})")
        self._hand_on(work)

    def _ask_for(self, work: Work, index: int) -> None:
        """Ask the approver about a call, or let it come back pending."""
        assert work.gated is not None
        core, approval, approver = self.core, work.gated[index], work.run.approver
        now = core.now()
        if now >= work.run.limit:
            self._refuse(work, index, "deadline_exceeded", sealing.refusal("deadline_exceeded", "", 0.0))
            self._settle(work, index, False)
            return
        if approval.used:
            self._go_by(work, index, approval)
            return
        if approval.cleared:
            self._offer_ready(work, [index])
            return
        once_more = approver is not None and self._is_claimed(work, index)
        if approval.asked and not once_more:  # before; whoever goes on with it has not decided this one
            if approval.look(now) or approval.state != "pending":
                self._too_late(work, index, approval, sealing.OVER)
            else:
                self._leave(work, index, approval, sealing.UNDECIDED)
            return
        self._begin_asking(work, index, approval, now)
        if approver is None:
            self._undecided(work, index, approval)
            return
        try:
            answer = _Answer()
            body = _consult(approver, self._request(work, index, approval), answer)
            try:
                task = work.context.copy().run(self.loop.create_task, body)
            except Exception:
                body.close()
                raise
        except Exception as broken:  # arguments that cannot be copied again, a task factory that makes no task
            self._count("failed")
            told = type(broken).__name__[:100]
            _log.warning(
                "tool %r: nobody could be asked (%s); the call comes back pending", _tool_name(work, index), told
            )
            self._undecided(work, index, approval)
            return
        if work.asking is None:
            work.asking = {}
        work.asking[index] = task
        with core.lock:
            core.asking += 1
        work.waited_for[index] = (*work.waited_for.get(index, ()), PERSON)
        due = min(approval.expires, work.run.limit)
        if due < self._timer_at:
            self._arm(due)
        task.add_done_callback(partial(self._answer_came, work, index, answer))
        if work.closing is not None or work.results[index] is not None:  # an eager first step had it cancelled
            self._stop_asking(work, index)

    def _begin_asking(self, work: Work, index: int, approval: Approval, now: float) -> None:
        """The time of a request begins."""
        if not approval.asked:
            approval.ask(now, self.core.policy.approval_lifetime)
        self._share_back(work, index)
        if approval.needed and not approval.hidden:
            self._count("asked")
            self._tell(work, index, "approval_asked", approval=approval.approval_id)

    def _request(self, work: Work, index: int, approval: Approval) -> ApprovalRequest:
        from towerman.approvals import ApprovalRequest

        call = work.calls[index]
        return ApprovalRequest(
            approval.approval_id,
            str(call.tool),
            work.run.run_id,
            call.id,
            approval.digest,
            approval.expires - self.core.now(),
            deepcopy(dict(approval.snapshot or {})),
        )

    def _answer_came(self, work: Work, index: int, heard: _Answer, task: asyncio.Task[None]) -> None:
        """On the loop: an approver has ended, one way or another."""
        with self.core.lock:
            self.core.asking -= 1
        answer, error = heard.value, asyncio.CancelledError() if task.cancelled() else heard.error
        waits = work.asking is not None and work.asking.get(index) is task
        if waits and work.asking is not None:
            del work.asking[index]
        leaving = exit_in(error) if error is not None else None
        try:
            if leaving is not None and work.left:
                self._interrupt(work, leaving)
            elif not waits or work.closing is not None or work.results[index] is not None:
                if error is None and answer is not None:
                    self._count("ignored")
            else:
                self._heard(work, index, answer, error)
        except Exception as fault:
            self._broke_down(work, fault)

    def _heard(self, work: Work, index: int, answer: object, error: BaseException | None) -> None:
        """The approver's answer to a call that waits for it."""
        from towerman.approvals import Approved, Denied

        assert work.gated is not None
        approval = work.gated[index]
        if error is not None or not (answer is None or isinstance(answer, Approved | Denied)):
            self._count("failed")
            told = type(error if error is not None else answer).__name__[:100]
            what = f"failed with {told}" if error is not None else f"answered with {told}, which is no decision"
            _log.warning("tool %r: the approver %s; the call comes back pending", _tool_name(work, index), what)
        elif answer is not None:
            self._decided(work, index, approval, answer)
            return
        self._undecided(work, index, approval)

    def _decided(self, work: Work, index: int, approval: Approval, decision: Decision) -> None:
        core = self.core
        heard = approval.decide(decision, core.now(), core.policy.approval_lifetime)
        told = self._count_heard(approval, decision, heard)
        if told:
            self._tell(work, index, "approval_decided", approval=approval.approval_id, decision=told)
        if heard == "late":
            self._too_late(work, index, approval, sealing.OVER)
        elif approval.state == "denied":
            self._say_no(work, index, approval)
        else:
            want = work.wants[index]
            if approval.edited is not None and want is not None:
                found = self._edited(work, index, approval, want)
                if found is None:
                    self._settle(work, index, False)
                    return
                work.wants[index], work.keywords[index] = found
            if approval.expires < self._timer_at:
                self._arm(approval.expires)
            if work.shares is None or self._reserve_anew(work, index):
                self._offer_ready(work, [index])
            else:
                self._settle(work, index, False)

    def _stop_asking(self, work: Work, index: int | None = None) -> None:
        """Nobody waits for an answer any more: about one call, or all of a batch."""
        asking = work.asking or {}
        for one in list(asking) if index is None else [index] * (index in asking):
            cast("asyncio.Task[object]", asking.pop(one)).cancel()

    # ================================================================ what comes of it

    def _undecided(self, work: Work, index: int, approval: Approval) -> None:
        self._count("undecided")
        self._tell(work, index, "approval_decided", approval=approval.approval_id, decision="undecided")
        self._leave(work, index, approval, sealing.UNDECIDED)

    def _leave(self, work: Work, index: int, approval: Approval, message: str) -> None:
        """A call comes back pending, and with it those that stand behind it."""
        core = self.core
        if not self._is_claimed(work, index):  # else it goes back into the queue, and its worker writes that down
            with core.lock:
                core.book.keep(approval, core.now())
            self._note_request(work, index, approval)
        code: Code = "approval_missing" if approval.needed else "held_behind"
        self._refuse(work, index, code, message, "pending", waited_for=work.waited_for.get(index, ()))
        held = work.plan.hold(index)
        if held:
            self._hold_back(work, index, held, 0)
        self._hand_on(work)

    def _hold_back(self, work: Work, culprit: int, held: Sequence[int], start: int) -> None:
        """Seal those that stand behind a pending call, a slice at a time."""
        try:
            core = self.core
            turn = core.now() + intake.SLICE
            for place in range(start, len(held)):
                if work.closing is None:
                    self._put_off(work, culprit, held[place])
                if not place & 15 and core.now() > turn:
                    self.loop.call_soon(self._hold_back, work, culprit, held, place + 1)
                    return
        except Exception as fault:
            self._broke_down(work, fault)
            return
        self._hand_on(work)

    def _put_off(self, work: Work, culprit: int, index: int) -> None:
        if work.results[index] is not None:
            return
        from towerman.approvals import Approval, new_id

        core = self.core
        if work.gated is None:
            work.gated = {}
        approval = work.gated.get(index)
        if approval is None:
            approval = work.gated[index] = Approval(new_id(), needed=False)
        group = work.groups.get(index) if work.groups is not None else None
        # Identical to one that is asked for: one answer is enough, since one run is.
        approval.hidden = group is not None and not group.merged and approval.needed and group.members[0] != index
        now = core.now()
        if not approval.asked:
            self._begin_asking(work, index, approval, now)
        with core.lock:
            core.book.keep(approval, now)
        self._note_request(work, index, approval)
        message = sealing.held_behind(culprit, work.calls[culprit])
        waited_for = work.waited_for.get(index, ())
        self._refuse(work, index, "held_behind", message, "pending", waited_for=waited_for)

    def _say_no(self, work: Work, index: int, approval: Approval) -> None:
        """A person has denied a call; those that are identical to it are denied with it."""
        message = sealing.denied(approval.reason)
        for one in self._alike_with(work, index, approval):
            self._refuse(work, one, "approval_denied", message, waited_for=work.waited_for.get(one, ()))
            self._settle(work, one, False)

    def _too_late(self, work: Work, index: int, approval: Approval, message: str) -> None:
        """Nobody has decided in time."""
        self._expired(work, index)
        for one in self._alike_with(work, index, approval):
            self._refuse(work, one, "approval_expired", message, waited_for=work.waited_for.get(one, ()))
            self._settle(work, one, False)

    def _expired(self, work: Work, index: int) -> None:
        approval = (work.gated or {}).get(index)
        if approval is not None and approval.needed:
            approval.state = "expired"
            self._count("expired")
            self._tell(work, index, "approval_expired", approval=approval.approval_id)

    @staticmethod
    def _alike_with(work: Work, index: int, approval: Approval) -> list[int]:
        """A call, and those for which it was asked as well: identical ones that wait for its run."""
        group = work.groups.get(index) if work.groups is not None else None
        if group is None or group.merged or work.gated is None:
            return [index]
        gated = work.gated
        others = [
            one
            for one in group.members
            if one != index and one in gated and not gated[one].cleared and work.results[one] is None
        ]
        for one in others:
            gated[one].state = approval.state
        return [index, *others]

    # ================================================================ at the grant

    def _cleared(self, work: Work, index: int, keywords: dict[str, object], entry: Slot) -> bool:
        """Just before the handler starts: does the approval hold, and has nobody used it? If not, the call is refused
        and gives back what it was granted.
        """
        approval = (work.gated or {}).get(index)
        if approval is None:
            return True
        why = self._why_not(work, index, approval, keywords, entry)
        if why is None:
            return True
        self._split(work, index)
        if why == "taken":
            self._give_back(entry)
            if work.results[index] is None:  # else giving back has ended the batch
                self._go_by(work, index, approval)
            return False
        code, message, outcome = why
        now = self.core.now()
        if code == "approval_expired" and approval.state == "expired":
            self._expired(work, index)
        waited_for = work.waited_for.get(index, ()) + entry.blocked_by
        self._refuse(work, index, code, message, outcome, waited=now - entry.since, waited_for=waited_for)
        self._give_back(entry)
        self._settle(work, index, False)
        return False

    def _why_not(
        self, work: Work, index: int, approval: Approval, keywords: dict[str, object], entry: Slot
    ) -> tuple[Code, str, Outcome] | Literal["taken"] | None:
        core = self.core
        want = cast("Want", entry.wants)
        tool = want.of
        if approval.needed:
            if core.now() >= approval.expires:
                approval.state = "expired"
                message = sealing.refusal("approval_expired", "", 0.0)
                return "approval_expired", message, "rejected"
            if tool.still_valid is not None:
                holds = condition("still_valid", tool.still_valid, keywords)
                if work.closing is not None or work.results[index] is not None:  # it may have ended the batch
                    return "cancelled", "Not started: it was cancelled.", "cancelled"
                if holds is not True:
                    if isinstance(holds, str):
                        return "policy_error", holds, "rejected"
                    return "approval_expired", sealing.NOT_VALID, "rejected"
            from towerman.approvals import binding

            given = approval.edited if approval.changed and approval.edited is not None else work.calls[index].arguments
            if binding(core.digest_key, tool.name, given, keywords) != approval.digest:
                return "approval_expired", sealing.CHANGED, "rejected"
        with core.lock:
            return None if core.claim(approval, work) else "taken"

    # ================================================================ time

    def _look_at_approvals(self, now: float) -> float:
        """Refuse those whose time is over; returns when the next one's is."""
        due = NEVER
        for work in [work for work in self.works if work.gated]:
            for index, approval in list((work.gated or {}).items()):
                if work.results[index] is not None or index in work.jobs or approval.used:
                    continue
                at = approval.expires
                if work.asking is not None and index in work.asking:
                    at = min(at, work.run.limit)
                if at > now:
                    due = min(due, at)
                    continue
                try:
                    self._run_out(work, index, approval, now)
                except Exception as fault:
                    self._broke_down(work, fault)
        return due

    def _run_out(self, work: Work, index: int, approval: Approval, now: float) -> None:
        """The time of an approval is over, or that of the run of a call that waits for one."""
        if work.asking is not None and index in work.asking:
            self._stop_asking(work, index)
            if now < approval.expires:
                message = sealing.refusal("deadline_exceeded", "", 0.0)
                waited_for = work.waited_for.get(index, ())
                self._refuse(work, index, "deadline_exceeded", message, waited_for=waited_for)
                self._settle(work, index, False)
            else:
                approval.look(now)
                self._too_late(work, index, approval, sealing.OVER)
            return
        approval.look(now)
        self._expired(work, index)
        core = self.core
        with core.lock:
            entry = self._parked(work, index)
            decided = core.gate.cancel(entry, core.now(), "approval_expired") if entry is not None else []
            notes = self._notes()
        if entry is None:  # it stands behind others, in the gate or in the plan
            work.given_up = True
            message = sealing.refusal("approval_expired", "", 0.0)
            waited_for = work.waited_for.get(index, ())
            self._refuse(work, index, "approval_expired", message, waited_for=waited_for)
            self._settle(work, index, False)
        self._take(decided, notes)

    def _parked(self, work: Work, index: int) -> Slot | None:
        """The entry of a call that waits in the gate; under the lock."""
        for entry in self.core.gate.parked_of(work.run.flow):
            if entry.owner[0] is work and entry.owner[1] == index:
                return entry
        return None

    def _count(self, what: str) -> None:
        with self.core.lock:  # several loops count
            self.core.approvals[what] += 1


class _Answer:
    """What came of an approver. Not the result of its task, which asyncio's debug mode shows in the log."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: object = None
        self.error: BaseException | None = None


def _not_noted(name: str, done: Future[Kept]) -> None:
    """On the journal's thread: was a request written down? The host has it in any case."""
    problem = None if done.cancelled() else done.exception()
    if problem is not None:
        _log.warning("approval %s could not be written down: %s", name, type(problem).__name__)


async def _consult(approver: Approver, request: ApprovalRequest, into: _Answer) -> None:
    """Ask, and keep whatever comes: an exit that the approver raises is for the batch and not for the loop."""
    try:
        answer: object = approver(request)
        if inspect.isawaitable(answer):
            answer = await answer
        into.value = answer
    except (GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as error:
        into.error = error


def _is_no(decision: Decision) -> bool:
    from towerman.approvals import Denied

    return isinstance(decision, Denied)


def _tool_name(work: Work, index: int) -> str:
    """The name of a call's tool."""
    tool = work.tools[index]
    return tool.name if tool is not None else UNKNOWN_TOOL
