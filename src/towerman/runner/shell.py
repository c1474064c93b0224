"""The runner of one loop: from the grant of a call to its end.

Theory. The gate's grants are started: a coroutine in a task of its own, a sync function on a worker thread. Whatever
comes of a call is sealed once, as the result at its index; what a call held goes back when its work has ended, which
may be later. The batch is done when every index is sealed; only then does the caller get it, also when the caller was
cancelled meanwhile.

House rules. Nothing awaits between a decision and its record. No task before admission; no future, timer or callback
for a call: one timer for each loop looks at everything that is due.

Not here: what is offered (intake, offering), what ends come to (ending), what results say (sealer), who may start
(gate), in what order (plan).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from typing import Final, cast

from towerman import sealing
from towerman.bounds import Encoded, EncodingError, Large
from towerman.budgets import Lack
from towerman.calls import Batch
from towerman.clock import wall_time
from towerman.core import Core
from towerman.gate import NEVER
from towerman.policy import OnResult
from towerman.runner.leasing import Leasing
from towerman.threads import Ticket
from towerman.tools import Tool
from towerman.work import CALLER, NOT_STARTED, Context, Job, RunState, Slot, Work

LATE_SECONDS: Final = 0.05
"""Lateness of a timer from which on the loop stood still: whoever has ended meanwhile is heard before it is judged."""

LATE_TURNS: Final = 3
"""Turns of the loop after which they have been: a future is set, a task wakes, a handler returns."""


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


class Shell(Leasing):
    """The runner of one event loop."""

    def __init__(
        self, core: Core, loop: asyncio.AbstractEventLoop, look: Callable[[], None], watch: Callable[[], None]
    ) -> None:
        super().__init__(core, loop, look)
        self._watch = watch
        self.pulse: Pulse | None = None
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
        if core.budgeted:
            try:
                self._sum_up(work)
            except Exception as fault:  # every call has its result
                work.error = work.error or fault
        run.works.pop(work, None)
        self.works.pop(work, None)
        self._busy.pop(work, None)
        self._fit(work)
        if core.journal_key is not None:
            core.tell_means()
        if core.emit is not None:
            self._tell(work, None, "batch_finished", size=len(work.calls), ran=core.now() - work.started_at)
            if core.policy.count_tokens is not None:
                self._count_large(work)
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

    # ================================================================ starting

    def _start(self, entry: Slot) -> None:
        """Start the handler of a granted call."""
        work, index = entry.owner
        if self.core.engine is not None and not self._is_leased(entry):
            return
        keywords = own = work.keywords[index]
        if work.shares is not None and keywords is not None and work.closing is None:
            lack = self._pay(work, index)
            if lack is not None:
                self._give_back(entry)
                self._unpaid(entry, lack)
                return
        if work.groups is not None and keywords is not None and work.closing is None:
            keywords = self._joined(work, index, keywords)
        if keywords is None or work.closing is not None or work.results[index] is not None:
            self._give_back(entry)
            self._seal_closed(work, index)
            return
        if work.gated is not None and not self._cleared(work, index, keywords, entry):
            return
        core = self.core
        now = core.now()
        tool: Tool = entry.wants.of  # type: ignore[attr-defined]  # every ask of a runner is a Want
        work.keywords[index] = None
        due = now + tool.timeout
        if work.run.limit < due:
            due = work.run.limit
        job = work.jobs[index] = Job(work, index, entry, tool, now, due)
        self._busy[work] = None
        if due < self._timer_at:
            self._arm(due)
        if tool.retry is not None:
            keywords = self._attempt(job, keywords)
        if core.emit is not None:
            alone = entry.there is not None and entry.there.fence is None
            scopes = {
                _shown_pool(pool.key): "process" if alone and pool.scope == "cluster" else pool.scope
                for pool, _ in entry.wants.pools
            }
            attempt = job.attempt if job.attempt > 1 else None
            self._tell(work, index, "admitted", waited=now - entry.since, scopes=scopes, attempt=attempt)
        written = work.filed is not None and (not tool.effect_free or self._is_cleared_there(work, index))
        if written and self._intend(job, keywords, own or keywords):
            return
        self._launch(job, keywords)

    def _launch(self, job: Job, keywords: dict[str, object]) -> None:
        """Nothing stands between a granted call and its first line any more."""
        work, index, tool = job.work, job.index, job.tool
        if tool.context_parameter is not None:
            context: Context[object] = Context(job, work.calls[index], work.run)
            keywords[tool.context_parameter] = context
            if context.idempotency_key is None and not tool.effect_free:
                context.idempotency_key = self._effect_key(work, index, tool)
        if tool.in_thread:
            self._start_thread(job, keywords)
        elif not tool.own_task and self._free_worker is work and self._next is None:
            self._next = job, keywords
        else:
            body = self._in_task(job, keywords)
            variables = work.context.copy()
            if self.loop.get_task_factory() is None:
                job.task = asyncio.Task(body, loop=self.loop, context=variables)
            else:
                try:
                    # Not by context=, which older factories do not take.
                    task = variables.run(self.loop.create_task, body)
                    job.task = task
                    if job.why is not None and not job.sealed:  # an eager first step had itself told to stop
                        task.cancel()
                except Exception:
                    body.close()
                    message = "Not started: the loop's task factory made no task for it."
                    self._never_started(job, "handler_error", message, "error")

    def _unpaid(self, entry: Slot, lack: Lack) -> None:
        """Charges of others have used up a budget while a call waited: it does not start."""
        work, index = entry.owner
        waited = self.core.now() - entry.since if entry.blocked_by else 0.0
        waited_for = work.waited_for.get(index, ()) + entry.blocked_by
        self._refuse_lack(work, index, lack, waited=waited, waited_for=waited_for)
        self._settle(work, index, False)

    def _begin(self, job: Job, keywords: dict[str, object]) -> None:
        """The handler's first line is next: its run time counts from here."""
        tool, work = job.tool, job.work
        now = job.started = self.core.now()
        due = now + tool.timeout
        if work.run.limit < due:
            due = work.run.limit
        job.due = due
        if job.entry.wants.marked:
            self._mark_begun(job, now)
        if job.entry.there is not None:
            job.entry.there.begun()
        if tool.context_parameter is not None:
            cast("Context[object]", keywords[tool.context_parameter]).deadline = due
        if self.core.emit is not None:
            attempt = job.attempt if job.attempt > 1 else None
            self._tell(work, job.index, "started", waited=job.granted - job.entry.since, attempt=attempt)

    def _mark_begun(self, job: Job, now: float) -> None:
        """A call that counts in rates begins; whoever waits for that may be due earlier."""
        with self.core.lock:
            sooner = self.core.gate.begun(job.entry, now)
        if sooner:
            try:
                self.loop.call_soon_threadsafe(self.look)
            except RuntimeError:  # the loop is gone, and so are its timers
                return

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
        encoded = sealing.encoded(tool, value, self._kept(tool, patient=True))
        return value, self._bounded(job, encoded) if type(encoded) is Large else encoded

    def _thread_done(self, job: Job, value: object, error: BaseException | None) -> None:
        """On the loop: a worker thread has ended its call."""
        if error is None:
            value, encoded = cast("tuple[object, Encoded | EncodingError]", value)
            self._finished(job, value, None, encoded)
        else:
            self._finished(job, None, error)

    # ================================================================ time

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
        if self._resting:
            self._wake(now)
        following = NEVER
        self._busy = {work: None for work in self._busy if work.jobs}
        for job in [job for work in self._busy for job in work.jobs.values()]:
            if not job.sealed:  # by what one before it in this row has brought about
                try:
                    self._look_at(job, now)
                except Exception as fault:
                    self._faulty(job.work, job.index, job.entry, fault, job)
            if not job.sealed and job.due < following:
                following = job.due
        following = min(following, self._due(), self._next_due(), self._look_at_approvals(now))
        if self._joins:
            following = min(following, self._look_at_joins(now))
        if self._handings:
            following = min(following, self._look_at_handings(now))
        if following < self._timer_at:
            self._arm(following)

    def _look_at(self, job: Job, now: float) -> None:
        """Is a granted call due, or over without having been able to tell?"""
        if job.intending or job.outcome is not None:
            self._look_at_filing(job, now)
        elif job.task is not None and cast("asyncio.Task[None]", job.task).done():
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

    def rest(self) -> None:
        """A run was closed: if nothing runs and nothing waits, leave no timer behind."""
        core = self.core
        with core.lock:
            decided = core.gate.tick(core.now())  # which also finds out what is due next: nothing, often
            waiting = core.gate.anybody
            notes = self._notes()
        self._take(decided, notes)
        if not self.works:
            self._resting.clear()
        if self._timer is not None and not self.works and not waiting:
            self._timer.cancel()
            self._timer = None
            self._timer_at = NEVER


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
