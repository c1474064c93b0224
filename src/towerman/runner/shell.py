"""The runner of one loop: from the grant of a call to its end.

Theory. The gate's grants are started: a coroutine in a task of its own, a sync function on a worker thread. Whatever
comes of a call is sealed once, as the result at its index; what a call held goes back when its work has ended, which
may be later. The batch is done when every index is sealed; only then does the caller get it, also when the caller was
cancelled meanwhile.

Three ends of a running call: it ends by itself; its time is over; it is cancelled. A coroutine is told by a cancel
and has `grace` seconds to end; a thread cannot be told. If the work goes on after its result is sealed, it is an
orphan: counted, shown, and still holding. Calls ordered after it are then offered to the gate, which parks them for
what the orphan holds and clocks them from that seal.

House rules. Deciding happens under the tower's lock, effects outside it. Nothing awaits between a decision and its
record. No task before admission; no future, timer or callback for a call: one timer for each loop looks at everything
that is due. What must happen at an end happens in a synchronous function, so no cancel can come between.

Not here: what is offered (intake), what results come to (sealer), who may start (gate), in what order (plan).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, cast

from towerman import sealing
from towerman.bounds import Encoded, EncodingError
from towerman.calls import Applied, Batch, Outcome
from towerman.clock import wall_time
from towerman.errors import Code
from towerman.gate import GRANTED, NEVER, Entry, Offer
from towerman.policy import OnResult
from towerman.runner import intake
from towerman.runner.sealer import exit_in, ran_for
from towerman.runner.sharing import Sharing
from towerman.sealing import REASON_CHARACTERS
from towerman.threads import Port, Ticket
from towerman.tools import Tool
from towerman.work import CALLER, NOT_STARTED, Context, Core, Job, Owner, RunState, Slot, Work

LATE_SECONDS: Final = 0.05
"""Lateness of a timer from which on the loop stood still: whoever has ended meanwhile is heard before it is judged."""

LATE_TURNS: Final = 3
"""Turns of the loop after which they have been: a future is set, a task wakes, a handler returns."""

LOOK_SECONDS: Final = 1.0
"""How often a loop on which calls wait looks whether another loop of the tower was closed over what it held."""

NESTED_GRACE: Final = 0.8
"""The part of its caller's time for cleaning up that a nested call has."""


class Pulse:
    """A question to a loop whether it goes on.

    Attributes:
        posted: when it was asked.
        answered: when it answered, or None.
        told: the tool that was told to hold it up ("" for other code), or None.
    """

    __slots__ = ("answered", "posted", "told")

    def __init__(self, posted: float) -> None:
        self.posted = posted
        self.answered: float | None = None
        self.told: str | None = None


Notes = Sequence[tuple[str, Entry[Owner], str]]


class Shell(Sharing):
    """The runner of one event loop."""

    def __init__(
        self, core: Core, loop: asyncio.AbstractEventLoop, look: Callable[[], None], watch: Callable[[], None]
    ) -> None:
        super().__init__(core)
        self.loop = loop
        self._look_at_loops = look
        self._watch = watch
        self.pulse: Pulse | None = None
        self.port: Port[Job] = Port(loop.call_soon_threadsafe, self._thread_done, self._lost)
        self.works: dict[Work, None] = {}
        self._todo: deque[Slot] = deque()
        self._inbox: deque[Slot] = deque()
        self._draining = False
        self._passing = False
        self._timer: asyncio.Handle | None = None
        self._timer_at = NEVER
        self._free_worker: Work | None = None
        self._next: tuple[Job, dict[str, object]] | None = None

    # ================================================================ a batch

    async def execute(
        self, run: RunState, batch: Batch, on_result: OnResult | None, begun: Callable[[Work], None]
    ) -> None:
        """Run a batch; returns, or raises, only when every call has its result."""
        core = self.core
        work = Work(run, self, batch, on_result, core.now())
        caller = CALLER.get()
        if caller is not None and caller.work.shell.core is core:
            self._below(work, caller)
        begun(work)
        if not work.calls:
            return
        run.works[work] = None
        self.works[work] = None
        if not core.watching:
            self._watch()
        if core.emit is not None:
            self._tell(work, None, "batch_started", size=len(work.calls), wall=wall_time())
        interrupted: asyncio.CancelledError | None = None
        try:
            if getattr(asyncio.current_task(), "_must_cancel", False):
                await asyncio.sleep(0)  # cancelled already: told here, before anything starts
            await self._prepare(work)
        except GeneratorExit:
            self._forsake(work)
            raise
        except asyncio.CancelledError as caught:
            interrupted = caught
            self._close(work, "cancelled", "cancelled", _reason_of(caught))
        except BaseException as fault:  # of this room: every call gets its result before it is told
            work.error = work.error or fault
            self._close(work, "cancelled", "cancelled", f"the batch could not be prepared ({type(fault).__name__})")
        while work.left:
            try:
                await self.sealed(work)
            except GeneratorExit:
                self._forsake(work)
                raise
            except asyncio.CancelledError as caught:
                if interrupted is None:
                    interrupted = caught
                    self._close(work, "cancelled", "cancelled", _reason_of(caught))
        if work.given_up:
            self._take_back(work)
        run.works.pop(work, None)
        self.works.pop(work, None)
        self._fit(work)
        if core.emit is not None:
            self._tell(work, None, "batch_finished", size=len(work.calls), ran=core.now() - work.started_at)
        if work.error is not None and (interrupted is None or not isinstance(work.error, Exception)):
            raise work.error
        if interrupted is not None:
            raise interrupted from work.error

    def _below(self, work: Work, caller: Job) -> None:
        """A call at work makes a batch of its own, and waits for it."""
        core = self.core
        with core.lock:
            if caller.ended:  # what it has left behind, such as a task of its own, calls for itself
                return
            work.parent = caller
            if work.calls and not caller.sealed:
                core.gate.lend(caller.entry)
                if caller.nested is None:
                    caller.nested = {}
                caller.nested[work] = None

    def end_soon(self, work: Work, reason: str) -> None:
        """Cancel a whole batch; from any loop or thread."""
        if asyncio._get_running_loop() is self.loop:
            self.cancel_work(work, reason)
            return
        try:
            self.loop.call_soon_threadsafe(self.cancel_work, work, reason)
        except RuntimeError:  # the loop is gone
            self._stray(work)

    def _end_nested(self, job: Job) -> None:
        """A call has ended, or nobody waits for it any more: so it is with the calls that it has made."""
        for work in list(job.nested or ()):
            work.shell.end_soon(work, "the call that made it has ended")

    def _forsake(self, work: Work) -> None:
        """The caller's coroutine is thrown away, perhaps by the collector: nobody waits for the batch any more."""
        reason = "nobody waits for it any more"
        try:
            self.loop.call_soon_threadsafe(self._close, work, "cancelled", "cancelled", reason)
        except RuntimeError:  # the loop is gone too
            self._stray(work)

    async def sealed(self, work: Work) -> None:
        """Wait until every call of a batch of this loop has its result. A cancel only ends the waiting."""
        if not work.left:
            return
        waiter = self.loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        work.waiters.append(wake)
        await waiter

    # ================================================================ offers, grants, refusals

    def _ready(self, work: Work, ready: Iterable[int]) -> list[Offer[Owner]]:
        """The offers of calls that are ready."""
        now = self.core.now()
        offers: list[Offer[Owner]] = []
        for index in ready:
            want = work.wants[index]
            if want is not None and work.results[index] is None:
                offers.append((want, (work, index), now))
        return offers

    def _offer_ready(self, work: Work, ready: Iterable[int]) -> None:
        offers = self._ready(work, ready)
        if offers:
            self._offer(work, offers)

    def _offer(self, work: Work, offers: list[Offer[Owner]]) -> None:
        core = self.core
        with core.lock:
            decided = gather(core) if core.strays else []
            if work.generation != core.generation:
                offers = self._renewed(work, offers)
            decided += core.gate.offer(work.run.flow, offers, core.now())
            notes = self._notes()
        self._take(decided, notes)

    def _renewed(self, work: Work, offers: list[Offer[Owner]]) -> list[Offer[Owner]]:
        """The same offers with what they want since options have changed; under the lock."""
        self.core.renew(work)
        wants = work.wants
        return [(wants[owner[1]] or want, owner, ready) for want, owner, ready in offers]

    def _offer_row(self, work: Work, calls: range) -> None:
        core = self.core
        with core.lock:
            decided = gather(core) if core.strays else []
            if work.generation != core.generation:
                core.renew(work)
            decided += core.gate.offer_row(work.run.flow, work, calls, core.now())
            notes = self._notes()
        self._take(decided, notes)

    def _notes(self) -> Notes:
        """What the gate noted for the trace; under the lock."""
        gate = self.core.gate
        notes = gate.notes
        if not notes:
            return ()
        gate.notes = []
        return notes

    def _take(self, decided: list[Slot], notes: Notes = ()) -> None:
        """Carry out decisions: here, or on the loop that the call belongs to."""
        for kind, entry, label in notes:
            work, index = entry.owner
            self._tell(work, index, "promoted" if kind == "promoted" else "waiting", waiting_for=label)
        for entry in decided:
            shell = entry.owner[0].shell
            if shell is self:
                self._todo.append(entry)
            else:
                shell.post(entry)
        if not self._draining:
            self._drain()
        due = self._due() if self.core.crowded else self.core.gate.wake_at
        if due < self._timer_at:
            self._arm(due)

    def _drain(self) -> None:
        todo = self._todo
        self._draining = True
        try:
            while todo:
                self._carry_out(todo.popleft())
        finally:
            self._draining = False

    def _carry_out(self, entry: Slot) -> None:
        """One decision of the gate: start the call, or seal it."""
        try:
            if entry.status == GRANTED:
                self._start(entry)
            else:
                self._rejected(entry)
        except Exception as fault:
            self._faulty(*entry.owner, entry, fault)

    def post(self, entry: Slot) -> None:
        """From another loop: a decision for a call of this one."""
        self._inbox.append(entry)
        try:
            self.loop.call_soon_threadsafe(self._receive)
        except RuntimeError:
            self._pass_on()

    def _pass_on(self) -> None:
        """This loop is gone: nobody can run its calls, so they give back what they got."""
        # What one gives back may be granted to the next call of this very loop, which comes here again: no recursion.
        while self._inbox and not self._passing:
            self._passing = True
            try:
                while self._inbox:
                    self._give_back(self._inbox.popleft(), here=False)
            finally:
                self._passing = False

    def _receive(self) -> None:
        decided = []
        while self._inbox:
            decided.append(self._inbox.popleft())
        self._take(decided)

    def _start(self, entry: Slot) -> None:
        """Start the handler of a granted call."""
        work, index = entry.owner
        keywords = work.keywords[index]
        if work.groups is not None and keywords is not None and work.closing is None:
            keywords = self._joined(work, index, keywords)
        if keywords is None or work.closing is not None or work.results[index] is not None:
            self._give_back(entry)
            self._seal_closed(work, index)
            return
        core = self.core
        now = core.now()
        tool: Tool = entry.wants.of  # type: ignore[attr-defined]  # every ask of a runner is a Want
        work.keywords[index] = None
        due = now + tool.timeout
        if work.run.limit < due:
            due = work.run.limit
        job = work.jobs[index] = Job(work, index, entry, tool, now, due)
        if due < self._timer_at:
            self._arm(due)
        if core.emit is not None:
            scopes = {_shown_pool(pool.key): pool.scope for pool, _ in entry.wants.pools}
            self._tell(work, index, "admitted", waited=now - entry.since, scopes=scopes)
        if tool.context_parameter is not None:
            keywords[tool.context_parameter] = Context(job, work.calls[index], work.run)
        if tool.in_thread:
            self._start_thread(job, keywords)
        elif not tool.own_task and self._free_worker is work and self._next is None:
            self._next = job, keywords
        else:
            body = self._in_task(job, keywords)
            context = work.context.copy()
            if self.loop.get_task_factory() is None:
                job.task = asyncio.Task(body, loop=self.loop, context=context)
            else:
                try:
                    # Not by context=, which older factories do not take.
                    task = context.run(self.loop.create_task, body)
                    job.task = task
                    if job.why is not None and not job.sealed:  # an eager first step had itself told to stop
                        task.cancel()
                except Exception:
                    body.close()
                    message = "Not started: the loop's task factory made no task for it."
                    self._never_started(job, "handler_error", message, "error")

    def _begin(self, job: Job, keywords: dict[str, object]) -> None:
        """The handler's first line is next: its run time counts from here."""
        tool, work = job.tool, job.work
        now = job.started = self.core.now()
        due = now + tool.timeout
        if work.run.limit < due:
            due = work.run.limit
        job.due = due
        if tool.context_parameter is not None:
            cast("Context[object]", keywords[tool.context_parameter]).deadline = due
        if self.core.emit is not None:
            self._tell(work, job.index, "started", waited=job.granted - job.entry.since)

    async def _in_task(self, job: Job, keywords: dict[str, object]) -> None:
        """The body of a call's task. With own_task=False it goes on with the batch's next such call."""
        while True:
            tool = job.tool
            mark = CALLER.set(job)
            try:
                self._begin(job, keywords)
                value = tool.handler(**keywords)
                if tool.is_async or inspect.isawaitable(value):
                    value = await value  # type: ignore[misc]  # whatever is awaitable
            except BaseException as error:
                if isinstance(error, GeneratorExit) and not _at_work(job):  # the loop is gone: nobody will see a result
                    self._stray(job)
                    raise
                self._finished(job, None, error)
                return
            if not tool.own_task:
                CALLER.reset(mark)
            if tool.own_task or not _reusable(job):
                self._finished(job, value, None)
                return
            self._free_worker = job.work
            task = job.task
            self._finished(job, value, None)
            self._free_worker = None
            following = self._next
            if following is None:
                return
            self._next = None
            job, keywords = following
            if job.sealed:  # given up before its first line, by a hook
                return
            job.task = task

    def _start_thread(self, job: Job, keywords: dict[str, object]) -> None:
        job.ticket = Ticket()
        try:
            self.core.workers.submit(
                self.port, job, job.ticket, job.work.context.copy(), lambda: self._in_thread(job, keywords)
            )
        except RuntimeError:
            self._never_started(job, "handler_error", "Not started: the system gave no thread for it.", "error")

    def _in_thread(self, job: Job, keywords: dict[str, object]) -> tuple[object, Encoded | EncodingError]:
        """The body of a call on a worker thread: also waits for what a handler returns, and encodes it there."""
        tool = job.tool
        CALLER.set(job)
        self._begin(job, keywords)
        if tool.address is not None:
            processes = self.core.processes
            value = processes.call(job, tool.address, keywords, lambda: job.why is not None)
        else:
            value = tool.handler(**keywords)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return value, sealing.encoded(tool, value)

    def _thread_done(self, job: Job, value: object, error: BaseException | None) -> None:
        """On the loop: a worker thread has ended its call."""
        if error is None:
            value, encoded = cast("tuple[object, Encoded | EncodingError]", value)
            self._finished(job, value, None, encoded)
        else:
            self._finished(job, None, error)

    def _lost(self, job: Job) -> None:
        """On a worker thread: the loop of an ended call is gone; what the call held goes back."""
        self._stray(job)

    def _stray(self, lost: Job | Work) -> None:
        """What belonged to a coroutine that was thrown away, or to a loop that is gone, is free again.

        The collector throws away at any moment, also while this thread holds the lock: then whoever comes next does it.
        """
        core = self.core
        core.strays.append(lost)
        if core.lock.acquire(blocking=False):
            try:
                decided = gather(core)
            finally:
                core.lock.release()
            for entry in decided:
                entry.owner[0].shell.post(entry)

    def bury(self) -> None:
        """The loop is closed: nothing of it goes on but what its threads are at."""
        for work in list(self.works):
            self._stray(work)
        self.works.clear()
        self.port.lose()
        self._pass_on()

    def _give_back(self, entry: Slot, *, here: bool = True) -> None:
        """What an entry was granted is free again; `here`: on this shell's own loop."""
        core = self.core
        if entry.status != GRANTED:
            return
        with core.lock:
            decided = core.gate.finish(entry, core.now())
            notes = self._notes()
        if here:
            self._take(decided, notes)
        else:
            for one in decided:
                one.owner[0].shell.post(one)

    # ================================================================ ends

    def _finished(
        self, job: Job, value: object, error: BaseException | None, encoded: Encoded | EncodingError | None = None
    ) -> None:
        """The work of a call has ended, one way or another; on the loop, once."""
        try:
            self._end(job, value, error, encoded)
        except Exception as fault:
            self._faulty(job.work, job.index, job.entry, fault, job, ended=True)

    def _faulty(
        self, work: Work, index: int, entry: Slot, fault: Exception, job: Job | None = None, *, ended: bool = False
    ) -> None:
        """A fault of Towerman's own in dealing with a call: the batch is ended, sealed and told; nobody waits on.

        Args:
            entry: what the gate knows the call by.
            job: the call, if it was granted.
            ended: its work is over.
        """
        core = self.core
        work.error = work.error or fault
        job = work.jobs.pop(index, job)
        goes_on = False
        if job is not None:
            job.sealed = True
            goes_on = not ended and not self._called_off(job)
        if work.results[index] is None:
            tool, started = work.tools[index], ended or goes_on
            applied: Applied = "unknown" if started and (tool is None or not tool.effect_free) else "no"
            result = sealing.faulty(index, work.calls[index], started, applied, still_running=goes_on)
            self._seal(work, index, result, core.now())
        try:
            if goes_on:
                with core.lock:
                    decided = []
                    if entry.status == GRANTED and not entry.orphan:  # or it was one before the fault
                        decided = core.gate.orphan(entry, core.now())
                    if job is not None:
                        _count_orphan(core, job, 1)
                self._take(decided)
            else:
                if job is not None:
                    with core.lock:
                        job.ended = True
                        _count_orphan(core, job, 0)
                self._give_back(entry)
            if job is not None and job.nested:
                self._end_nested(job)
        except Exception as another:  # of the gate: those who wait for their results come first
            work.error.add_note(f"and then: {type(another).__name__}")
        self._close(work, "cancelled", "cancelled", f"Towerman failed ({type(fault).__name__})")
        if work.groups is not None:  # if the batch was being ended before, calls may still hang on this one's run
            self._seal_rest(work, 0)
        self._hand_on(work)

    @staticmethod
    def _called_off(job: Job) -> bool:
        """Keep a granted call from its first line, or tell it to stop if it is past it; was it before?"""
        if job.ticket is not None:
            return job.ticket.take()
        if job.task is not None:
            cast("asyncio.Task[None]", job.task).cancel()
        return job.started == NOT_STARTED

    def _end(
        self, job: Job, value: object, error: BaseException | None, encoded: Encoded | EncodingError | None
    ) -> None:
        core = self.core
        now = core.now()
        work, index = job.work, job.index
        if job.sealed:
            self._late(job, error, now)
            self._keep_letter(job, value, error, encoded, now)
        else:
            job.sealed = True
            del work.jobs[index]
            if job.why is not None and (error is None or exit_in(error) is None):
                self._seal_stopped(job, now, still_running=False)
                self._keep_letter(job, value, error, encoded, now)
            elif error is None:
                self._seal_value(job, value, encoded, now)
            else:
                self._seal_error(job, error, now)
        gate = core.gate
        if work.plan.trivial:
            with core.lock:
                job.ended = True
                decided = gate.finish(job.entry, now)
                notes = self._notes() if gate.notes else ()
        else:
            result = work.results[index]
            ready = self._ready(work, self._follow(work, index, result is not None and result.ok))
            with core.lock:
                job.ended = True
                if work.generation != core.generation:
                    ready = self._renewed(work, ready)
                decided = gate.finish(job.entry, now, ready, _urgency)
                notes = self._notes() if gate.notes else ()
        if job.nested:
            self._end_nested(job)
        job.task = None  # whose context knows the job: no cycle is left for the collector
        if len(decided) == 1 and not (self._draining or notes) and decided[0].owner[0].shell is self:
            # The usual case, a call that hands over to the next one, without a detour over the queue.
            entry = decided[0]
            self._draining = True  # an eager task may end while it is made: what that decides stands behind it
            try:
                self._carry_out(entry)
            finally:
                self._draining = False
            if self._todo:
                self._drain()
            due = self._due() if core.crowded else gate.wake_at
            if due < self._timer_at:
                self._arm(due)
        elif decided or notes:
            self._take(decided, notes)
        if not work.left and work.waiters:
            self._hand_on(work)

    def _late(self, job: Job, error: BaseException | None, now: float) -> None:
        """An orphan has ended: what it brings is dropped and counted."""
        core, work, index = self.core, job.work, job.index
        work.ended[index] = now
        with core.lock:
            _count_orphan(core, job, 0)
            core.late_results += error is None
        leaving = exit_in(error) if error is not None else None
        if leaving is not None and work.left:
            self._interrupt(work, leaving)
        if core.emit is not None:
            if error is None:
                self._tell(work, index, "late_result", ran=now - job.started)
            self._tell(work, index, "ended", ran=now - job.started)

    def _rejected(self, entry: Slot) -> None:
        """The gate said no to a call that waited, or could not wait."""
        work, index = entry.owner
        if work.results[index] is not None:
            return
        waited = self.core.now() - entry.since if entry.blocked_by else 0.0
        if work.closing is not None:
            self._seal_closed(work, index, waited=waited, waited_for=entry.blocked_by)
        else:
            code, blocker = entry.rejection.code, entry.rejection.blocker
            waited_for = work.waited_for.get(index, ()) + (entry.blocked_by or (blocker,))
            message = sealing.refusal(code, blocker, entry.wants.max_wait)
            self._refuse(work, index, code, message, waited=waited, waited_for=waited_for)
        self._settle(work, index, False)

    def _settle(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed: let the plan go on, and the caller if it was the last."""
        if not work.plan.trivial:
            self._settle_in_plan(work, index, ok)
        if not work.left:
            self._hand_on(work)

    def _settle_in_plan(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed that gives nothing back now: offer what is ready because of that."""
        ready = self._follow(work, index, ok)
        if ready:
            self._offer_ready(work, ready)

    def _follow(self, work: Work, index: int, ok: bool) -> list[int]:
        """Tell the plan that a call is sealed, and seal what is skipped for it; returns what is ready now.

        Its work counts as ended: what an orphan holds is kept by the ledger.
        """
        ready = self._tell_plan(work, index, ok)
        if work.groups is not None:
            ready = self._answered(work, index, ready)
        return ready if work.closing is None else []

    def _tell_plan(self, work: Work, index: int, ok: bool) -> list[int]:
        ready, skipped = work.plan.seal(index, ok)
        for one, culprit in skipped:
            message = sealing.unneeded(culprit, work.calls[culprit])
            self._refuse(work, one, "dependency_failed", message, "skipped", waited_for=work.waited_for.get(one, ()))
        return [*ready, *work.plan.end(index)]

    def _soon(self, work: Work, ready: Iterable[int]) -> None:
        self.loop.call_soon(self._go_on, work, ready)

    def _hand_on(self, work: Work) -> None:
        """If every call is sealed, the batch is at work no more: wake whoever waits for that."""
        if not work.left:
            # Here and not when the caller wakes: whoever closes the run may wake first.
            run, parent = work.run, work.parent
            run.works.pop(work, None)
            self.works.pop(work, None)
            if parent is not None and parent.nested is not None and work in parent.nested:
                with self.core.lock:
                    del parent.nested[work]
                    decided = self.core.gate.lent_back(parent.entry, self.core.now())
                self._take(decided)
            if run.gone and not run.works:
                with self.core.lock:
                    self.core.gate.close_flow(run.flow)
            for wake in work.waiters:
                wake()
            work.waiters.clear()

    # ================================================================ stopping

    def _close(self, work: Work, code: Code, outcome: Outcome, reason: str) -> None:
        """End a batch early: what waits is sealed in slices, what runs is told to stop and has `grace` seconds.

        After a sibling's failure only what has no side effect is told to stop; what writes goes on to its end.
        """
        reason = sealing.clean(reason[:REASON_CHARACTERS])
        if work.closing is not None:
            if code != "sibling_failed":  # what a failure has spared does not keep a caller who gives up
                for job in list(work.jobs.values()):
                    self._stop(job, "cancelled", reason)
            return
        work.closing = (code, outcome, reason)
        try:
            self._take_back(work, code)
        except Exception as fault:  # what is left in the gate is taken out at the end
            work.error = work.error or fault
            work.given_up = True
        for job in list(work.jobs.values()):
            if code != "sibling_failed":
                self._stop(job, "cancelled", reason)
            elif job.tool.effect_free:
                self._stop(job, code, reason)
        self._seal_rest(work, 0)

    def _seal_rest(self, work: Work, start: int) -> None:
        """Seal what never started, a slice at a time."""
        core = self.core
        turn = core.now() + intake.SLICE
        for index in range(start, len(work.calls)):
            if work.results[index] is None and index not in work.jobs:
                try:
                    if work.groups is None or not self._tied(work, index):
                        self._seal_closed(work, index)
                except Exception as fault:
                    self._seal_plain(work, index, fault)
            if not index & 15 and core.now() > turn:
                self.loop.call_soon(self._seal_rest, work, index + 1)
                return
        self._hand_on(work)

    def _stop(self, job: Job, why: Code, reason: str) -> None:
        """Tell a granted call to stop. It is sealed at once where telling is no use, or where it never started."""
        if job.why is not None or job.sealed:
            return
        try:
            self._tell_to_stop(job, why, reason)
        except Exception as fault:
            self._faulty(job.work, job.index, job.entry, fault, job)

    def _tell_to_stop(self, job: Job, why: Code, reason: str) -> None:
        core = self.core
        now = core.now()
        job.why = why
        job.reason = reason
        if job.ticket is not None:
            if job.ticket.take():
                self._give_up(job)
                return
            if job.tool.address is None:
                self._orphan(job, now)
                return
            core.processes.kill(job)
        task = cast("asyncio.Task[None] | None", job.task)
        if job.started == NOT_STARTED and job.ticket is None:
            if task is not None:
                task.cancel()
            self._give_up(job)
            return
        job.due = now + min(core.policy.grace, core.most_grace)
        parent = job.work.parent
        if parent is not None and parent.why is not None:
            # Its caller was told to stop, too: it is to have its answer while it still has time itself.
            job.due = min(job.due, now + NESTED_GRACE * max(0.0, parent.due - now))
        if job.due < self._timer_at:
            self._arm(job.due)
        if task is not None:
            task.cancel()

    def _give_up(self, job: Job) -> None:
        """Told to stop between its grant and its first line."""
        if job.why in ("handler_timeout", "deadline_exceeded"):
            self._never_started(job, "deadline_exceeded", "Not started: its time was over.", "rejected")
        else:
            self._never_started(job, "cancelled", f"Not started: {job.reason}.", "cancelled")

    def _never_started(self, job: Job, code: Code, message: str, outcome: Outcome) -> None:
        """A granted call that has not reached its first line: it never will."""
        work, index, entry = job.work, job.index, job.entry
        job.sealed = True
        work.jobs.pop(index, None)
        waited = job.granted - entry.since
        if work.closing is not None:
            self._seal_closed(work, index, waited=waited, waited_for=entry.blocked_by)
        self._refuse(work, index, code, message, outcome, waited=waited, waited_for=entry.blocked_by)
        self._give_back(entry)
        self._settle(work, index, False)

    def _orphan(self, job: Job, now: float) -> None:
        """Seal a call whose work goes on. It keeps what it holds, unless the operator chose otherwise."""
        core, work, index = self.core, job.work, job.index
        job.sealed = True
        work.jobs.pop(index, None)
        self._seal_stopped(job, now, still_running=True)
        with core.lock:
            if core.policy.on_orphan == "hold":
                decided = core.gate.orphan(job.entry, now)
            else:
                decided = core.gate.finish(job.entry, now)
                core.orphans_released += 1
            _count_orphan(core, job, 1)
            notes = self._notes()
        if core.emit is not None:
            self._tell(work, index, "orphaned", ran=ran_for(job, now))
        self._take(decided, notes)
        if job.nested:
            self._end_nested(job)
        self._settle(work, index, False)

    def cancel_work(self, work: Work, reason: str) -> None:
        """Cancel a whole batch; on its own loop."""
        if work.left:
            self._close(work, "cancelled", "cancelled", reason)

    def _take_back(self, work: Work, code: Code = "cancelled") -> None:
        """Take out of the gate what is left there of a batch that starts nothing more."""
        core = self.core
        with core.lock:
            gate, flow = core.gate, work.run.flow
            gate.withdraw(flow, partial(_belongs, work))
            decided: list[Slot] = []
            for entry in gate.parked_of(flow):
                if entry.owner[0] is work:
                    decided += gate.cancel(entry, core.now(), code)
            notes = self._notes()
        self._take(decided, notes)

    def cancel_call(self, work: Work, index: int, reason: str) -> None:
        """Cancel one call of a batch; on its own loop. Ignored once it is sealed."""
        if work.results[index] is not None:
            return
        reason = sealing.clean(reason[:REASON_CHARACTERS])
        job = work.jobs.get(index)
        if job is None or job.why is None:
            work.reasons[index] = reason
        if job is not None:
            self._stop(job, "cancelled", reason)
            return
        if work.groups is not None and self._rides(work, index):
            self._get_off(work, index, reason)
            self._settle(work, index, False)
            return
        core = self.core
        now = core.now()
        waited, waited_for = 0.0, work.waited_for.get(index, ())
        with core.lock:
            gate, flow = core.gate, work.run.flow
            decided: list[Slot] = []
            for entry in gate.parked_of(flow):
                if entry.owner[0] is work and entry.owner[1] == index:
                    waited = now - entry.since
                    waited_for += entry.blocked_by
                    decided = gate.cancel(entry, now)
                    break
            else:  # looking for it in a long backlog would take long: what it is granted it gives back unused
                work.given_up = True
            notes = self._notes()
        message = f"Not started: {reason}."
        self._refuse(work, index, "cancelled", message, "cancelled", waited=waited, waited_for=waited_for)
        self._take(decided, notes)
        self._settle(work, index, False)

    # ================================================================ time

    def _arm(self, instant: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = instant
        self._timer = self.loop.call_later(max(0.0, instant - self.core.now()), self._on_timer)

    def _due(self) -> float:
        """When the gate is due, or other loops are to be looked at."""
        core = self.core
        due = core.gate.wake_at
        if core.crowded and core.gate.anybody:
            due = min(due, core.now() + LOOK_SECONDS)
        return due

    def _on_timer(self) -> None:
        """The timer has fired; where the loop stood still before, not at once."""
        self._after(LATE_TURNS if self.core.now() - self._timer_at > LATE_SECONDS else 0)

    def _after(self, turns: int) -> None:
        if turns:
            self._timer = self.loop.call_soon(self._after, turns - 1)
        else:
            self._on_time()

    def _on_time(self) -> None:
        """Something may be due: waits, run times, graces."""
        core = self.core
        self._timer = None
        self._timer_at = NEVER
        if core.crowded:
            self._look_at_loops()
        now = core.now()
        if core.gate.wake_at <= now:
            with core.lock:
                decided = core.gate.tick(now)
                notes = self._notes()
            self._take(decided, notes)
        following = NEVER
        for job in [job for work in self.works for job in work.jobs.values()]:
            if not job.sealed:  # by what one before it in this row has brought about
                try:
                    self._look_at(job, now)
                except Exception as fault:
                    self._faulty(job.work, job.index, job.entry, fault, job)
            if not job.sealed and job.due < following:
                following = job.due
        following = min(following, self._due())
        if following < self._timer_at:
            self._arm(following)

    def _look_at(self, job: Job, now: float) -> None:
        """Is a granted call due, or over without having been able to tell?"""
        if job.task is not None and cast("asyncio.Task[None]", job.task).done():
            # Somebody else ended the task before its first step, so its body could not tell.
            self._never_started(job, "cancelled", "Not started: its task was cancelled by somebody else.", "cancelled")
        elif job.due <= now:
            if job.why is not None:
                self._orphan(job, now)
            elif job.started == NOT_STARTED and now < job.work.run.limit:
                job.due = min(now + job.tool.timeout, job.work.run.limit)  # its run time has not begun
            else:
                self._stop(job, "deadline_exceeded" if now >= job.work.run.limit else "handler_timeout", "")

    def tell_stalled(self, job: Job, seconds: float) -> None:
        """From another thread: the loop has stood still for so long in this call's code."""
        self._tell(job.work, job.index, "stalled", ran=seconds)

    def look(self) -> None:
        """Limits have changed: something may be due earlier, and the gate may have noted something."""
        with self.core.lock:
            notes = self._notes()
        self._take([], notes)

    def rest(self) -> None:
        """A run was closed: if nothing runs and nothing waits, leave no timer behind."""
        core = self.core
        with core.lock:
            decided = core.gate.tick(core.now())  # which also finds out what is due next: nothing, often
            waiting = core.gate.anybody
            notes = self._notes()
        self._take(decided, notes)
        if self._timer is not None and not self.works and not waiting:
            self._timer.cancel()
            self._timer = None
            self._timer_at = NEVER

    # ================================================================ the end of a batch


def gather(core: Core) -> list[Slot]:
    """Under the lock: give back what strays held, withdraw what waited. Returns the entries decided."""
    gate = core.gate
    now = core.now()
    decided: list[Slot] = []
    while core.strays:
        lost = core.strays.popleft()
        if isinstance(lost, Work):
            run = lost.run
            gate.withdraw(run.flow, partial(_belongs, lost))
            for entry in gate.parked_of(run.flow):
                if entry.owner[0] is lost:
                    decided += gate.cancel(entry, now)
            # A thread goes on, and hands back what it held when it ends.
            jobs = [job for job in lost.jobs.values() if job.ticket is None or job.ticket.take()]
            run.works.pop(lost, None)
            parent = lost.parent
            if parent is not None and parent.nested is not None and lost in parent.nested:
                del parent.nested[lost]
                decided += gate.lent_back(parent.entry, now)
            if run.gone and not run.works:
                gate.close_flow(run.flow)
        else:
            jobs = [lost]
        for job in jobs:
            if job.entry.status == GRANTED:
                _count_orphan(core, job, 0)
                job.sealed = job.ended = True
                decided += gate.finish(job.entry, now)
    return decided


def _count_orphan(core: Core, job: Job, goes_on: int) -> None:
    """Count an orphan, or count it out, once; under the lock."""
    core.orphans += goes_on - job.orphan
    job.orphan = goes_on
    if not core.orphans and core.when_alone:
        for wake in core.when_alone:
            wake()
        core.when_alone.clear()


def _belongs(work: Work, owner: Owner) -> bool:
    return owner[0] is work


def _reusable(job: Job) -> bool:
    """May another call go on in this call's task: no cancel is under way in it, and the context is as it was?"""
    task = cast("asyncio.Task[None] | None", job.task)
    if job.why is not None or task is None or task.cancelling():
        return False
    try:
        return contextvars.copy_context() == job.work.context
    except Exception:  # a handler's value that does not let itself be compared
        return False


def _at_work(job: Job) -> bool:
    """Does the job's own task run now? What closes a coroutine from outside, such as the collector, is not its task."""
    return asyncio._get_running_loop() is not None and job.task in (None, asyncio.current_task())


def _urgency(owner: Owner) -> tuple[float, int, int]:
    """What orders the calls of a run (S6): the plan's own order."""
    return owner[0].plan.key(owner[1])


def _shown_pool(key: str) -> str:
    name = key.partition("@")[0]
    return "run" if name.startswith("run:") else name.removeprefix("pool:")


def _reason_of(error: asyncio.CancelledError) -> str:
    words = error.args[0] if error.args else None
    if isinstance(words, str) and words.startswith("Cancelled via cancel scope "):
        words = words.partition("; reason: ")[2]  # anyio tells addresses, tasks and paths before it
    return words if isinstance(words, str) and words else "the caller was cancelled"


async def _awaited(value: object) -> object:
    return await value  # type: ignore[misc]  # whatever is awaitable
