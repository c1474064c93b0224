"""From events to spans: each batch apart, in the order in which they began."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from towerman.calls import Outcome
from towerman.errors import Code
from towerman.trace import UNKNOWN_TOOL, Event, Span


@dataclass(frozen=True, slots=True)
class Story:
    """One batch as its events told it.

    Args:
        run_id: the run's id.
        batch: number of the batch within its run, from 1.
        wall: Unix time in seconds at which the batch came in, or None when no event said so.
        calls: how many calls the batch had; at least as many as were seen.
        spans: the calls that were seen, in emitted order. One without a result is `pending` with no code.
        finished: the end of the batch was seen.
    """

    run_id: str
    batch: int
    wall: float | None
    calls: int
    spans: tuple[Span, ...]
    finished: bool


@dataclass(slots=True)
class _Told:
    """A call while its events are read; the times are seconds since its batch came in."""

    tool: str = UNKNOWN_TOOL
    outcome: Outcome | None = None
    code: Code | None = None
    queued: float | None = None
    waited: float | None = None
    started: float | None = None
    sealed: float = 0.0
    ended: float | None = None
    waited_for: tuple[str, ...] = ()
    orphan: bool = False
    shared_with: int | None = None
    tokens: int | None = None
    attempts: list[tuple[float, float | None, float]] = field(default_factory=list)

    def handed_in(self, end: float) -> float | None:
        """When it was handed to the gate, this attempt or its only one; None: it was not."""
        # The time in the queue that the gate itself counted is the truth; when it was first seen waiting is a guess.
        if self.waited is not None and (self.started is not None or self.waited > 0):
            return max(0.0, (end if self.started is None else self.started) - self.waited)
        return self.started if self.queued is None else self.queued

    def attempt_ends(self, at: float) -> None:
        """An attempt has ended, and another one may come."""
        queued = self.handed_in(at)
        if queued is not None:
            self.attempts.append((queued, self.started, at))
        self.queued = self.waited = self.started = None


@dataclass(slots=True)
class _Telling:
    """A batch while its events are read."""

    run_id: str
    batch: int
    began: float
    wall: float | None
    calls: int = 0
    last: float = 0.0
    finished: bool = False
    told: dict[int, _Told] = field(default_factory=dict)


def stories(events: Iterable[Event]) -> list[Story]:
    """Put the events of one or many batches together, each batch apart, in the order in which they began.

    Events of several batches may be mixed. A batch whose beginning is missing is told from the first event that was
    seen of it; a call whose end is missing is told as still running or still waiting.

    Args:
        events: in the order in which they were delivered.
    """
    tellings: list[_Telling] = []
    current: dict[tuple[str, int], _Telling] = {}
    for event in events:
        key = (event.run_id, event.batch)
        telling = current.get(key)
        # Run ids may come again in one file: a second beginning is another batch.
        if telling is None or event.kind == "batch_started":
            telling = _Telling(event.run_id, event.batch, event.time, event.wall)
            current[key] = telling
            tellings.append(telling)
        _take(telling, event)
    return [_story(telling) for telling in tellings]


def _take(telling: _Telling, event: Event) -> None:
    at = max(0.0, event.time - telling.began)
    # What outlives its batch must not make a batch look longer for calls whose end was lost.
    if not telling.finished:
        telling.last = max(telling.last, at)
    if event.kind == "batch_started":
        telling.calls = event.size or 0
    elif event.kind == "batch_finished":
        telling.finished = True
    if event.index is None:
        return
    call = telling.told.setdefault(event.index, _Told())
    call.tool = event.tool or call.tool
    if event.waited is not None and not (call.attempts and event.kind == "finished"):  # which tells of all together
        call.waited = event.waited
    if event.tokens is not None:
        call.tokens = event.tokens
    if event.kind == "waiting":
        # Behind a call of its own batch a call waits in the plan: it is not in the queue yet.
        if call.queued is None and not (event.waiting_for or "").startswith("call "):
            call.queued = at
        if event.waiting_for and event.waiting_for not in call.waited_for:
            call.waited_for = (*call.waited_for, event.waiting_for)
    elif event.kind == "started":
        call.started = at
    elif event.kind == "retrying":
        call.attempt_ends(at)
    elif event.kind in ("finished", "rejected"):
        call.outcome, call.code, call.sealed = event.outcome or "rejected", event.code, at
        call.shared_with = event.shared_with
        if event.waited_for is not None:
            call.waited_for = event.waited_for
    elif event.kind == "orphaned":
        call.orphan = True
    elif event.kind == "ended":
        call.ended = at


def _story(telling: _Telling) -> Story:
    spans = tuple(_span(index, call, telling.last) for index, call in sorted(telling.told.items()))
    calls = max(telling.calls, len(spans))
    return Story(telling.run_id, telling.batch, telling.wall, calls, spans, telling.finished)


def _span(index: int, call: _Told, last: float) -> Span:
    sealed = last if call.outcome is None else call.sealed
    queued, started = call.handed_in(sealed), call.started
    if call.attempts:
        call.attempt_ends(sealed)
        queued, started, _ = call.attempts[0]
    return Span(
        index,
        call.tool,
        call.outcome or "pending",
        call.code,
        queued,
        started,
        sealed,
        call.ended,
        call.waited_for,
        call.ended is None and (call.orphan or call.outcome is None),
        call.shared_with,
        call.tokens,
        tuple(call.attempts),
    )
