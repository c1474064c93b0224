"""Results that are too large for the model: kept whole, told in part, summed up.

Theory. A value that does not fit is written down whole and kept under a handle; the model is told its first page or an
overview, or the tool's own summary. What takes long of that is done on a worker thread, after the handler has returned
and before the result is sealed. The call is still at work meanwhile, but nothing of what follows can spoil it: at any
moment there is something to seal. So a cancel, or a time that is over, seals the value in its cut form at once, as the
success that it is, and the thread's work is for nothing.

House rules. What fits costs nothing here. A fault in keeping or paging costs the handle, never the result. A summary is
somebody else's code: bounded in time and size, and where it fails the value is cut.

Not here: how a value is read and cut (bounds), pages (pages), keeping (store), the batch's own bound (sealer).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from typing import Final, cast

from towerman.bounds import MIN_BYTES, Encoded, EncodingError, Keep, Large, encode, share_room
from towerman.bounds.encoding import AT_ONCE
from towerman.calls import Result, with_content
from towerman.clock import wall_time
from towerman.core import Core
from towerman.policy import TowerPolicy
from towerman.runner.repeating import Repeating
from towerman.sealing import Bounded
from towerman.threads import Port, Ticket, Workers
from towerman.tools import Tool
from towerman.work import After, Job, Work

FINISH_SECONDS: Final = 10.0
"""The longest time after a handler's return for writing its value down and summing it up; never beyond the call's own
time."""


TEXT_AT_ONCE: Final = 1 << 22
"""Characters of text, which costs little, up to which it is split where the loop stands still for it."""

NOTE_BYTES: Final = 256
"""Bytes that a result has at least where others go first: enough to say where the whole is."""


class Oversized(Repeating):
    """What becomes of one loop's values that do not fit."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> None:
        super().__init__(core, loop, look)
        self._kept_for: TowerPolicy | None = None
        self._at_once: Keep | None = None
        self._patiently: Keep | None = None

    def _kept(self, tool: Tool, *, patient: bool) -> Keep | None:
        """Whether, and up to which size, the whole of a value is wanted; `patient`: nobody stands still for it."""
        policy = self.core.policy
        if self._kept_for is not policy:
            most = policy.max_stored_bytes // 2 if self.core.keeps else 0
            self._at_once, self._patiently = (Keep(most, False), Keep(most, True)) if most else (None, None)
            self._kept_for = policy
        if tool.reads_results:
            return None
        return self._patiently if patient else self._at_once

    def _too_large(self, job: Job, value: object, encoded: Encoded | EncodingError) -> Encoded | EncodingError | None:
        """On the loop: a value did not fit. What to seal, or None: a thread goes on with it."""
        if isinstance(encoded, EncodingError) or job.after is not None:
            return encoded
        if type(encoded) is Large:
            whole = encoded.whole
            if whole is None or len(whole) > (AT_ONCE if encoded.document else TEXT_AT_ONCE):
                return self._hand_over(job, value, encoded)
            encoded = self._bounded(job, encoded)
        return encoded if job.tool.policy.summarize is None else self._hand_over(job, value, encoded)

    def _hand_over(self, job: Job, value: object, encoded: Encoded) -> Encoded | EncodingError | None:
        """Let a thread do the rest; without one, what there is is sealed."""
        core = self.core
        job.after = After(value, encoded)
        job.task, job.ticket = None, Ticket()
        due = core.now() + FINISH_SECONDS
        if due < job.due:
            job.due = due
            if due < self._timer_at:
                self._arm(due)
        try:
            core.workers.submit(self.port, job, job.ticket, job.work.context.copy(), lambda: self._finish(job, value))
        except RuntimeError:
            return self._cut_short(job)
        return None

    def _finish(self, job: Job, value: object) -> tuple[object, Encoded | EncodingError]:
        """On a worker thread: what takes long."""
        after = cast(After, job.after)
        encoded = after.encoded
        if type(encoded) is Large:
            try:
                after.encoded = encoded = self._written(job, encoded)
            except EncodingError as unencodable:
                return value, unencodable
        return value, encoded if job.tool.policy.summarize is None else self._summed_up(job.tool, value, encoded)

    def _written(self, job: Job, large: Large) -> Encoded:
        """The content of a large value, read to its end, and kept."""
        if large.whole is None:
            limit = job.tool.max_result_bytes
            try:
                again = encode(large.value, limit, None, self._kept(job.tool, patient=True))
            except Exception:  # it was changed meanwhile
                again = encode(large.value, limit)
            if type(again) is not Large:
                return again
            large = again
        return self._bounded(job, large)

    def _bounded(self, job: Job, large: Large) -> Encoded:
        """What the model is told of a value whose whole is at hand; from now on it is kept."""
        try:
            return self._begun(job.work, job.index, job.tool, large)
        except Exception as fault:
            self.core.tell_fault("a large result could not be kept", fault)
            return Encoded(large.cut_to(job.tool.max_result_bytes), large.original_bytes, True)

    def _begun(self, work: Work, index: int, tool: Tool, large: Large) -> Encoded:
        from towerman.pages import Content, begun, new_handle, page_room

        core = self.core
        reader = core.reader
        run, limit = work.run, tool.max_result_bytes
        handle = new_handle(core.handle_key, run.number, work.number, index)
        room = page_room(
            limit,
            core.policy.max_result_bytes if reader is None else reader.max_result_bytes,
            document=large.document,
        )
        told = begun(large, limit, room, handle, None if reader is None else reader.name)
        content = Content.of(
            told.pages,
            document=large.document,
            room=room,
            original_bytes=large.original_bytes,
            incomplete=not large.complete,
            run_id=run.run_id,
            tool=tool.name,
            tenant=run.tenant,
            kept_at=wall_time(),
        )
        core.keeper.keep(handle, content)
        return Bounded(told.text, large.original_bytes, handle)

    def _summed_up(self, tool: Tool, value: object, encoded: Encoded) -> Encoded:
        """The tool's own shorter form of a value; if that fails, what there is."""
        from towerman.pages import summary_room, summed_up

        summarize, limit = tool.policy.summarize, tool.max_result_bytes
        assert summarize is not None, "a tool that sums up"
        handle = encoded.handle if isinstance(encoded, Bounded) else None
        reader = self.core.reader
        try:
            made = summarize(value)
            if inspect.isawaitable(made):
                made = asyncio.run(_awaited(made))
            short = encode(made, summary_room(limit)).text
            told = summed_up(short, encoded.original_bytes, limit, handle, None if reader is None else reader.name)
        except Exception as fault:
            self.core.tell_fault(f"the summary of tool {tool.name!r} failed, its results are cut", fault)
            return encoded
        return Bounded(told, encoded.original_bytes, handle)

    # ================================================================ the bound of a batch

    def _fit(self, work: Work) -> None:
        """Bring a whole batch under its bound: small results stay whole, large ones share what is left."""
        core, results = self.core, work.results
        sizes = [
            0 if one is None else len(one.content) if one.content.isascii() else len(one.content.encode())
            for one in results
        ]
        total = sum(sizes)
        if total > core.policy.max_batch_bytes:
            most = core.policy.max_batch_bytes
            least = max(MIN_BYTES, min(NOTE_BYTES, most // (2 * len(sizes))))
            caps = share_room(sizes, self._first(work), most, least)
            for index, cap in enumerate(caps or ()):
                result = results[index]
                if result is not None and sizes[index] > cap:
                    results[index] = trimmed = self._trimmed(work, index, result, cap)
                    size = len(trimmed.content.encode())
                    total += size - sizes[index]
                    if core.emit is not None:
                        self._tell(work, index, "trimmed", size=size, tokens=self._estimated(trimmed))
        if work.parent is None:  # else it is told to a handler, not to a model
            core.told_bytes += total

    @staticmethod
    def _first(work: Work) -> set[int]:
        """The calls whose results are trimmed last: those of protected tools, and those that others needed."""
        first = {index for index, tool in enumerate(work.tools) if tool is not None and tool.policy.protect}
        if not work.plan.trivial:
            first.update(index for index, _, kind in work.plan.edges() if kind == "needs")
        return first

    def _trimmed(self, work: Work, index: int, result: Result, cap: int) -> Result:
        """A result under a smaller bound; the whole of it is kept from now on, if it was not before."""
        from towerman.pages import again

        core, tool, handle = self.core, work.tools[index], result.handle
        keeps = core.keeps and result.outcome != "pending"  # the handle of such a call is its place in the queue
        if handle is None and tool is not None and not tool.reads_results and keeps:
            try:
                handle = self._kept_whole(work, tool, result)
            except Exception as fault:
                core.tell_fault("a large result could not be kept", fault)
        encoder = tool.policy.encode if tool is not None else None
        source = result.value if result.ok else None
        reader = None if core.reader is None else core.reader.name
        return with_content(result, again(source, result.content, cap, encoder, handle, reader), handle)

    def _kept_whole(self, work: Work, tool: Tool, result: Result) -> str | None:
        """Keep a content that was whole; where its pages begin is found out when somebody reads one."""
        from towerman.pages import Content, new_handle, page_room

        core, run = self.core, work.run
        same = result.shared_with if result.ok else None  # as what another call's run came to
        handle = new_handle(core.handle_key, run.number, work.number, result.index if same is None else same)
        body = result.content.encode()
        if len(body) > core.keeper.most:
            return None
        reader = core.policy.max_result_bytes if core.reader is None else core.reader.max_result_bytes
        content = Content(
            None,
            page_room(tool.max_result_bytes, reader, document=True),
            result.original_bytes,
            result.original_bytes > len(body),
            run.run_id,
            tool.name,
            run.tenant,
            wall_time(),
            len(body),
            (),
            (),
            body,
        )
        core.keeper.keep(handle, content)
        return handle

    def _count_large(self, work: Work) -> None:
        """Somebody looks on: let a thread count a batch's tokens, and tell."""

        def count() -> None:
            for index, tokens in enumerate(work.count_tokens()):
                self._tell(work, index, "counted", tokens=tokens)

        port: Port[None] = Port(self.loop.call_soon_threadsafe, lambda *_: None, lambda _: None)
        try:
            workers = cast("Workers[None]", self.core.workers)
            workers.submit(port, None, Ticket(), contextvars.Context(), count)
        except RuntimeError:  # no thread for it: then it is not told
            return

    # ================================================================ giving up

    def _cut_short(self, job: Job) -> Encoded | EncodingError:
        """What is sealed of a value whose call may not go on: what is there by now."""
        after = cast(After, job.after)
        encoded = after.encoded
        if type(encoded) is not Large:
            core, name = self.core, job.tool.name
            if core.now() >= job.due:
                core.tell_fault(f"the summary of tool {name!r} took too long, its result is cut", TimeoutError())
            return encoded
        if encoded.whole is None:
            try:
                return encode(encoded.value, job.tool.max_result_bytes)
            except EncodingError as unencodable:
                return unencodable
        return Encoded(encoded.cut_to(job.tool.max_result_bytes), encoded.original_bytes, True)

    def _form_too_late(self, job: Job, encoded: Encoded | EncodingError | None) -> None:
        """A thread has ended whose call was sealed without it: nobody was told of what it kept."""
        result = job.work.results[job.index] or job.outcome
        if (
            isinstance(encoded, Bounded)
            and encoded.handle is not None
            and (result is None or result.handle != encoded.handle)
        ):
            self.core.keeper.drop(encoded.handle)


async def _awaited(value: object) -> object:
    return await value  # type: ignore[misc]  # whatever is awaitable
