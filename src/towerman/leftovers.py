"""What is left over: results that came too late, and work that goes on when a tower ends.

Theory. A result is sealed once. Work that cannot be stopped goes on after that (an orphan), and what it brings in the
end changes nothing any more: the model has its answer. But a late answer may be the only sign that a payment was made,
so it is kept for a while as a dead letter. And whoever ends a tower is told what could not be ended.

Not here: counting and holding of orphans (gate), their events (trace).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from towerman.calls import Applied


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What came of a call after its result had been sealed.

    Args:
        run_id: the run's id.
        batch: number of the batch within its run, from 1.
        index: the call's place in the batch.
        call_id: the provider's id.
        tool: the tool's name.
        ok: the handler returned; False: it raised.
        applied: "yes" or "no" where it returned, by what its tool declares; as the handler said where it raised.
        late: seconds since the result was sealed.
        content: what the model would have been told, bounded as any result; not shown by `repr`.
    """

    run_id: str
    batch: int
    index: int
    call_id: str
    tool: str
    ok: bool
    applied: Applied
    late: float
    content: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Work that goes on although its result was sealed.

    Args:
        run_id: the run's id.
        batch: number of the batch within its run, from 1.
        index: the call's place in the batch.
        call_id: the provider's id.
        tool: the tool's name.
        ran: seconds since its first line.
    """

    run_id: str
    batch: int
    index: int
    call_id: str
    tool: str
    ran: float


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What was left when a tower was closed.

    Args:
        orphans: work that could not be ended in time.
        cancelled: calls that were at work or waited, and were answered `cancelled`.
        undelivered: events that observers had not seen in the end.
        unwritten: outcomes that the tower's own journal could not write in time; their calls are unknown there.
    """

    orphans: tuple[Leftover, ...] = ()
    cancelled: int = 0
    undelivered: int = 0
    unwritten: int = 0

    @property
    def clean(self) -> bool:
        """Nothing goes on, observers have seen everything, and the journal has written everything."""
        return not (self.orphans or self.undelivered or self.unwritten)

    def to_dict(self) -> dict[str, object]:
        """The same for JSON."""
        orphans = [
            {
                "run_id": one.run_id,
                "batch": one.batch,
                "index": one.index,
                "call_id": one.call_id,
                "tool": one.tool,
                "ran": one.ran,
            }
            for one in self.orphans
        ]
        return {
            "orphans": orphans,
            "cancelled": self.cancelled,
            "undelivered": self.undelivered,
            "unwritten": self.unwritten,
        }

    def __str__(self) -> str:
        lines = [f"cancelled: {self.cancelled} calls"] if self.cancelled else []
        lines += [
            f"still running: {one.tool}, call {one.index} of batch {one.batch} of run {one.run_id}, for {one.ran:.1f} s"
            for one in self.orphans
        ]
        if self.undelivered:
            lines.append(f"not seen by observers: {self.undelivered} events")
        if self.unwritten:
            lines.append(f"not written by the journal: {self.unwritten} outcomes")
        return "\n".join(lines) or "nothing was left"
