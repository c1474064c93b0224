"""Batches that can be gone on with by name: written down whole, and one attempt at work on each at a time.

Theory (rule S14). Calls are written down and found again one by one (filing). A plan that has a name is written down
whole before anything of it starts, so that whoever knows the name can go on with it, without having kept it. One
attempt is at work on it at a time, over all processes: two of them would fill in what each one's reads came to, and
want the same write with two sets of arguments. The second one waits, as a join does, holding nothing, and then goes on
from what is there; where the first one's process has died, it takes its place.

House rules. The journal answers from its own thread; what follows is done on the loop. An attempt that is not sure to
have its batch gives it back.

Not here: the text (documents), the table (journal), what was done with each call (filing).
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from typing import Final, TypeVar

from towerman.calls import Outcome
from towerman.documents import KeptBatch, NamedBy, Writing, batch_key
from towerman.errors import Code
from towerman.records import JournalUnavailable
from towerman.runner import intake
from towerman.runner.ending import Ending
from towerman.tools import Tool
from towerman.work import Work, callers

T = TypeVar("T")

_OTHER_PLAN: Final = (
    "Not started: a batch with other calls was handed in before as this one. A response, and a batch_id, stand for the "
    "same calls each time."
)


class Keeping(Ending):
    """What concerns batches that are written down; filing goes on from here."""

    def _seal_elsewhere(
        self, work: Work, index: int, tool: Tool, code: Code, message: str, outcome: Outcome, waited: float
    ) -> None:
        """Seal a call that does not start since the same call is at work elsewhere."""
        raise NotImplementedError  # pragma: no cover - filing's

    @staticmethod
    async def _asked(future: Future[T]) -> T:
        """What the journal answers."""
        raise NotImplementedError  # pragma: no cover - filing's

    @staticmethod
    def _name_of(work: Work) -> str:
        """The name by which a batch can be gone on with; empty for one that cannot be."""
        batch = work.batch
        if not (batch.plan or work.keeps) or work.resumed is not None or work.deferral is not None:
            return ""
        return batch.batch_id or batch.response_id or ""

    async def _take_over(self, work: Work, key: bytes, name: str) -> bool:
        """Write a batch down, and have it for this attempt; where it cannot be had, all of it is refused.

        Raises:
            JournalUnavailable: it could not be written down.
        """
        core, run, journal = self.core, work.run, self.core.journal
        assert journal is not None
        writing = Writing(work.batch, key, kept=journal.keeps_arguments)
        turn = core.now() + intake.SLICE
        for index, call in enumerate(work.batch.calls):
            writing.add(call)
            if not index & 7 and core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + intake.SLICE
                if intake.over(work):
                    return False
        named: NamedBy = "batch" if work.batch.batch_id else "response"
        place_of = batch_key(key, run.run_id, named, name, run.tenant)
        document, digest_of = writing.text(), writing.digest
        since = core.now()
        due = min(since + core.policy.max_wait, run.limit)
        waits = False
        while not intake.over(work):
            token = os.urandom(16)
            try:
                told, known = await self._asked(
                    journal.begin_batch(
                        place_of,
                        token,
                        run_id=run.run_id,
                        name=name,
                        named=named,
                        tenant=run.tenant,
                        plan=work.batch.plan,
                        size=len(work.calls),
                        digest=digest_of,
                        document=document,
                    )
                )
            except BaseException:  # nobody knows whether it is this attempt's by now: from here on it is not
                journal.finish_batch(token, 0)
                raise
            if told == "run":
                work.attempt, work.batch_key = token, place_of
                if not work.left:
                    self._release(work)
                return True
            if told == "conflict":
                core.count_filed("conflicts")
                for index in range(len(work.calls)):
                    self._refuse(work, index, "idempotency_conflict", _OTHER_PLAN)
                return False
            assert known is not None
            if not self._may_wait(work, place_of, due, since, known):
                return False
            if not waits:
                waits = True
                core.count_filed("joined")
            await self._until_free(work, place_of, due)
        return False

    def _may_wait(self, work: Work, key: bytes, due: float, since: float, known: KeptBatch) -> bool:
        """Somebody is at work on this very batch; False where it is refused instead of waiting for that."""
        core = self.core
        now = core.now()
        code: Code
        if any(job.work.batch_key == key for job in callers(work)):
            code, why = "would_deadlock", "it was made by a call of itself, and would wait for itself for ever"
        elif core.policy.on_duplicate == "conflict":
            code, why = "idempotency_conflict", f"{_whose(known)}, and this tower does not wait for it"
        elif now >= work.run.limit:
            code, why = "deadline_exceeded", f"{_whose(known)} until the run's time was over"
        elif now >= due:
            code, why = "wait_timeout", f"waited {now - since:g} s, and {_whose(known)}"
        else:
            return True
        if code == "idempotency_conflict":
            core.count_filed("conflicts")
        message = f"Not started: {why}. Handed in again, it is answered with what comes of it."
        for index, want in enumerate(work.wants):
            if want is not None and work.results[index] is None:
                self._seal_elsewhere(work, index, want.of, code, message, "rejected", now - since)
        return False

    async def _until_free(self, work: Work, key: bytes, due: float) -> None:
        """Wait until nobody is at work on a batch, or it is too late, or this one is being ended."""
        assert self.core.journal is not None
        waiter = self.loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def post(_: Future[None]) -> None:
            try:
                self.loop.call_soon_threadsafe(wake)
            except RuntimeError:  # what the loop was at is nobody's any more
                return

        watched = self.core.journal.watch(key)
        watched.add_done_callback(post)
        timer = self.loop.call_later(max(0.0, due - self.core.now()), wake)
        work.waiters.append(wake)
        try:
            await waiter
        finally:
            timer.cancel()
            watched.cancel()
            if wake in work.waiters:
                work.waiters.remove(wake)

    async def _learned_elsewhere(self) -> None:
        """Ask the journal, once, how long calls took in other processes: the order of plans goes by that."""
        core = self.core
        core.means_asked = True
        if core.journal is not None:
            try:
                stored = await self._asked(core.journal.means())
                core.remember(stored)
            except JournalUnavailable:  # then the order goes by what is learned here
                return

    def _release(self, work: Work) -> None:
        """A batch that is written down has ended: another one may go on with it."""
        token, work.attempt = work.attempt, b""
        if token and self.core.journal is not None:
            self.core.journal.finish_batch(token, sum(result is not None and result.ok for result in work.results))


def _whose(known: KeptBatch) -> str:
    """Who is at work on a batch, for people."""
    return f"the same batch is at work in process {known.pid}"
