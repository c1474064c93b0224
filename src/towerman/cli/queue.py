"""`towerman worker`, `submit`, `status`, `result`, `cancel`: deferred calls, run and followed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from towerman.cli.journal import find_journal, moment, opened
from towerman.cli.words import NOT_OK, OK, Wrong, complain
from towerman.errors import PolicyError, TowermanError

if TYPE_CHECKING:
    from towerman.calls import Batch
    from towerman.journal import Journal
    from towerman.records import Answer, Deferred
    from towerman.runner import WorkerReport
    from towerman.tower import Tower
    from towerman.work import BatchResult

T = TypeVar("T")

_EXIT_CODES: Final = "Exit code 0: all is well. 1: {}. 2: the input or the configuration is wrong. 130: interrupted."

_Tools = Annotated[
    str,
    typer.Option(
        "--tools",
        metavar="MODULE:TOWER",
        help="Where the tools are: an importable module (also in the current folder) and the Tower in it.",
    ),
]
_Whose = Annotated[
    str | None,
    typer.Option("--tools", metavar="MODULE:TOWER", help="The Tower whose journal it is, where that has a cipher."),
]
_Config = Annotated[Path | None, typer.Option("--config", metavar="F", help="The towerman.toml that the tower reads.")]
_Path = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        metavar="FILE",
        help="The journal; default: TOWERMAN_JOURNAL, the one that the configuration names, or towerman.db here.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
_Handle = Annotated[str, typer.Argument(metavar="HANDLE", help="The name of a deferred call.")]


def add_commands(app: typer.Typer) -> None:
    """Make the commands part of the command line."""
    app.command(epilog=_EXIT_CODES.format("with --once: a call failed or is unknown"))(worker)
    app.command(epilog=_EXIT_CODES.format("a call was refused"))(submit)
    app.command(epilog=_EXIT_CODES.format("the call failed or is unknown, or the journal cannot be read now"))(status)
    app.command(epilog=_EXIT_CODES.format("there is no result, or the call did not end ok"))(result)
    app.command(epilog=_EXIT_CODES.format("a call could not be cancelled"))(cancel)


# -------------------------------------------------------------------------------------------- running


def worker(
    tools: _Tools,
    config: _Config = None,
    once: Annotated[bool, typer.Option("--once", help="Leave when nothing is left that could run now.")] = False,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Calls at once; default: the tower's max_concurrency.")
    ] = None,
    patience: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", help="How long a call waits here for room.")
    ] = 5.0,
    poll: Annotated[
        float, typer.Option("--poll", metavar="SECONDS", help="How often an idle queue is looked at.")
    ] = 0.25,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", help="How long what runs may go on once it is to stop.")
    ] = 30.0,
    foreign_after: Annotated[
        float,
        typer.Option(
            "--foreign-after", metavar="SECONDS", help="When a call of a tool that is not here is answered so."
        ),
    ] = 600.0,
    as_json: _Json = False,
) -> int:
    """Run deferred calls, through the tower's own limits.

    Several workers may work on one journal: no call is run twice. SIGTERM and Ctrl-C end it: nothing new is taken,
    what runs has --grace seconds, what has not begun goes back into the queue. A second signal does not wait.

    A call that needs a person's approval waits in towerman approvals list, and holds nothing. With --once the last
    lines say what is left open.
    """
    from towerman.cli.load import load_tower
    from towerman.cli.show import print_text, stdout_for_json, write_json
    from towerman.runner import Worker
    from towerman.timeline import printable

    with stdout_for_json() as out:
        tower = load_tower(tools, config)

        def said(handle: str, state: str) -> None:
            if not as_json:
                print(printable(f"{handle} {state}"), file=out, flush=True)

        try:
            made = Worker(
                tower,
                concurrency=concurrency,
                patience=patience,
                poll=poll,
                grace=grace,
                foreign_after=foreign_after,
                on_end=said,
            )
        except PolicyError as wrong:
            raise Wrong(str(wrong)) from None
        report, waiting = asyncio.run(_work(tower, made, once))
        told: dict[str, object] = {
            "done": report.done,
            "failed": report.failed,
            "returned": report.returned,
            "unknown": report.unknown,
            "lost": report.lost,
        }
        if as_json:
            if once:
                told |= {"left": report.left, "waiting_for_approval": report.waiting}
            write_json(told, out)
    if not as_json:
        print_text(", ".join(f"{count} {name}" for name, count in told.items()))
        for line in _left_open(report, waiting):
            print_text(printable(line))
    return NOT_OK if once and (report.failed or report.unknown) else OK


MOST_NAMED: Final = 20
"""Calls that are named one by one when a worker leaves."""


def _left_open(report: WorkerReport, waiting: Sequence[Deferred]) -> Iterator[str]:
    """What a worker leaves open that was to leave when nothing could run."""
    if not report.left:
        return
    later = report.left - report.waiting
    told = [f"{report.waiting} wait for a person's approval"] if report.waiting else []
    if later:
        told.append(f"{later} wait for these, for another worker or for later" if told else f"{later} not over")
    yield f"left open: {', '.join(told)}"
    for call in waiting[:MOST_NAMED]:
        yield f"{call.handle} ({call.tool}) waits: towerman approvals approve {call.approval}"
    if len(waiting) > MOST_NAMED:
        yield f"and {len(waiting) - MOST_NAMED} more: towerman approvals list"


async def _work(tower: Tower, made: object, once: bool) -> tuple[WorkerReport, list[Deferred]]:
    """Let a worker work; what it has done, and of what it leaves open the calls that wait for a person."""
    from towerman.records import JournalUnavailable
    from towerman.runner import Worker

    assert isinstance(made, Worker)
    asked = 0

    def end() -> None:
        nonlocal asked
        asked += 1
        made.stop(grace=None if asked == 1 else 0.0)

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, end)
    try:
        report = await made.run(once=once)
        waiting: list[Deferred] = []
        if report.waiting and tower.journal is not None:
            with suppress(JournalUnavailable):
                queued = await asyncio.wrap_future(tower.journal.deferred_calls(state="queued", limit=1_000_000))
                waiting = [call for call in queued if call.asks == "pending"]
        return report, waiting
    finally:
        for number in numbers:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(number)
        await tower.aclose()


def submit(
    calls: Annotated[str, typer.Argument(metavar="CALLS", help="A file with the calls as JSON, or - for stdin.")],
    tools: _Tools,
    config: _Config = None,
    form: Annotated[
        str | None, typer.Option("--format", help="The form of the calls; found out when it is not given.")
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="The run they belong to.")] = None,
    batch_id: Annotated[
        str | None, typer.Option("--batch-id", metavar="ID", help="With --run-id: what is put in once only.")
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whom the run belongs to.")] = None,
    priority: Annotated[int, typer.Option("--priority", help="Higher goes first.")] = 0,
    as_json: _Json = False,
) -> int:
    """Put calls into the queue, for workers to run.

    CALLS are what `towerman run` takes. Each call is looked over first: what is refused is told, and costs the others
    nothing. Calls that depend on each other, or touch the same, run in the order in which they stand.
    """
    from towerman.cli.load import load_tower, read_batch
    from towerman.cli.show import print_text, stdout_for_json, write_json
    from towerman.timeline import printable

    with stdout_for_json() as out:
        batch = read_batch(calls, form)
        tower = load_tower(tools, config)
        try:
            done = asyncio.run(_submit(tower, batch, run_id, batch_id, tenant, priority))
        except TowermanError as wrong:
            raise Wrong(f"submit: {str(wrong).removeprefix('submit: ')}") from None
        told = [
            {"index": one.index, "call_id": one.call_id, "tool": one.tool, "handle": one.handle,
             "outcome": one.outcome, "code": one.code, "message": one.message}
            for one in done
        ]  # fmt: skip
        if as_json:
            write_json({"calls": told}, out)
    if not as_json:
        for one in done:
            handle = one.handle if one.outcome == "pending" else f"{one.outcome} {one.code or ''}: {one.message}"
            print_text(printable(f"{one.index} {one.tool} {handle}"))
    return OK if all(one.ok or one.outcome == "pending" for one in done) else NOT_OK


async def _submit(
    tower: Tower, batch: Batch, run_id: str | None, batch_id: str | None, tenant: str | None, priority: int
) -> BatchResult:
    try:
        async with tower.run(run_id, tenant=tenant, priority=priority) as run:
            return await run.submit(batch, batch_id=batch_id)
    finally:
        await tower.aclose()


# -------------------------------------------------------------------------------------------- following


@contextmanager
def _journal(path: Path | None, config: Path | None, tools: str | None = None) -> Iterator[Journal]:
    """The journal that is meant: the file, or that of a tower.

    Raises:
        Wrong: there is none.
    """
    from towerman.cli.load import load_tower

    if tools is None:
        with opened(find_journal(path, config)) as journal:
            yield journal
        return
    tower = load_tower(tools, config)
    if tower.journal is None:
        raise Wrong(f"--tools {tools}: this tower has no journal")
    try:
        yield tower.journal
    finally:
        tower.close()


def _ask(journal: Journal, what: Callable[[Journal], T]) -> T | None:
    """Ask a journal; None, and a complaint, where it cannot be read or written now.

    Raises:
        Wrong: it is no journal.
    """
    from towerman.records import JournalUnavailable

    try:
        return what(journal)
    except JournalUnavailable as trouble:
        if trouble.trouble in ("not a journal", "newer", "secret", "sealed"):
            raise Wrong(str(trouble)) from None
        complain(str(trouble))
        return None


def _found(journal: Journal, handle: str) -> tuple[Deferred, Answer | None] | None:
    """A deferred call; None where the journal cannot be read now.

    Raises:
        Wrong: there is none of this handle.
    """

    def look(one: Journal) -> list[tuple[Deferred, Answer | None] | None]:
        with suppress(Exception):  # what a dead worker has left is put in order, if that can be
            one.requeue_dead().result()
        return [one.deferred(handle).result()]

    told = _ask(journal, look)
    if told is None:
        return None
    if told[0] is None:
        raise Wrong(f"there is no deferred call {handle[:80]!r} in {journal.path}")
    return told[0]


def status(
    handle: Annotated[
        str | None, typer.Argument(metavar="[HANDLE]", help="The name of a deferred call; left out: the whole queue.")
    ] = None,
    journal: _Path = None,
    config: _Config = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="How many at most.")] = 1000,
    as_json: _Json = False,
) -> int:
    """How a deferred call stands: queued (also one that waits for a person), claimed by a worker, done, unknown,
    cancelled.

    Without a handle: how many there are of each, and those that are not over. Nothing of arguments and answers is
    shown.
    """
    with _journal(journal, config) as one:
        if handle is None:
            return _whole_queue(one, limit, as_json)
        found = _found(one, handle)
    if found is None:
        return NOT_OK
    call, _ = found
    if as_json:
        _write(told(call))
    else:
        _print([call])
    ended_well = call.state in ("queued", "claimed") or (call.state == "done" and call.outcome == "ok")
    return OK if ended_well else NOT_OK


def _whole_queue(journal: Journal, limit: int, as_json: bool) -> int:
    def look(one: Journal) -> tuple[dict[str, int], list[Deferred]]:
        with suppress(Exception):
            one.requeue_dead().result()
        listed = []
        for state in ("unknown", "claimed", "queued"):
            listed += one.deferred_calls(state=state, limit=limit).result()
        return one.deferred_counts().result(), listed[:limit]

    found = _ask(journal, look)
    if found is None:
        return NOT_OK
    counts, calls = found
    if as_json:
        _write({"counts": counts, "calls": [told(call) for call in calls]})
    else:
        if calls:
            _print(calls)
        _say(", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing was deferred")
    return NOT_OK if counts.get("unknown") else OK


def result(
    handle: _Handle,
    journal: _Path = None,
    config: _Config = None,
    tools: _Whose = None,
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="Wait so long for the end.")] = 0.0,
    as_json: _Json = False,
) -> int:
    """Print what a deferred call came to.

    On stdout comes what the model would be sent, with --json beside it how the call ended. Where there is no result
    yet the exit code is 1.
    """
    from towerman.cli.show import print_text
    from towerman.clock import RealClock

    now = RealClock().now
    end = now() + wait
    with _journal(journal, config, tools) as one:
        while True:
            found = _found(one, handle)
            if found is None:
                return NOT_OK
            call, answer = found
            if call.state not in ("queued", "claimed") or now() >= end:
                break
            _sleep(min(0.2, max(0.0, end - now())))
    if as_json:
        content = None if answer is None else answer.content
        message = None if answer is None else answer.message
        _write({**told(call), "message": message, "content": content})
    elif answer is not None and answer.content:
        print_text(answer.content)
    if call.state == "done" and call.outcome == "ok":
        return OK
    complain(f"{call.handle}: {_words(call)}")
    return NOT_OK


def _sleep(pause: float) -> None:
    import threading

    threading.Event().wait(pause)


def cancel(
    handles: Annotated[list[str], typer.Argument(metavar="HANDLE...", help="Names of deferred calls.")],
    journal: _Path = None,
    config: _Config = None,
    as_json: _Json = False,
) -> int:
    """Take deferred calls back.

    One that waits in the queue is cancelled at once. One that a worker has is told to stop: if it has not begun it
    never will, else it ends as a cancelled call does, and whether it took effect may be unknown. What needs a cancelled
    call is skipped; what only comes after it goes on.
    """
    with _journal(journal, config) as one:
        states = _ask(one, lambda there: [there.cancel_deferred(handle).result() for handle in handles])
    if states is None:
        return NOT_OK
    missing = [handle for handle, state in zip(handles, states, strict=True) if state is None]
    if as_json:
        _write({"calls": [{"handle": handle, "state": state} for handle, state in zip(handles, states, strict=True)]})
    else:
        words = {"cancelled": "cancelled", "claimed": "a worker has it, and is told to stop it"}
        for handle, state in zip(handles, states, strict=True):
            if state is not None:
                _say(f"{handle}: {words.get(state, f'not cancelled, it is {state}')}")
    if missing:
        raise Wrong(f"there is no deferred call {missing[0][:80]!r} in {one.path}")
    return OK if all(state in words_ok for state in states) else NOT_OK


words_ok: Final = frozenset({"cancelled", "claimed"})
"""States after which a call does not run, or is told to stop."""


def told(call: Deferred) -> dict[str, object]:
    """A deferred call for JSON; its arguments and its answer are not in it."""
    return {
        "handle": call.handle,
        "state": call.state,
        "tool": call.tool,
        "run_id": call.run_id,
        "batch": call.batch,
        "index": call.index,
        "call_id": call.call_id,
        "tenant": call.tenant,
        "priority": call.priority,
        "chain": call.chain,
        "position": call.position,
        "needs": list(call.needs),
        "outcome": call.outcome,
        "code": call.code,
        "cancel_asked": call.stop,
        "approval": call.approval,
        "waits_for_approval": call.state == "queued" and call.asks == "pending",
        "attempts": call.attempts,
        "returned": call.returned,
        "worker_alive": call.live,
        "not_before": call.not_before or None,
        "queued_at": call.queued_at,
        "claimed_at": call.claimed_at,
        "ended_at": call.ended_at,
    }


def _words(call: Deferred) -> str:
    if call.state == "claimed":
        return "a worker has it" + (", and is told to stop it" if call.stop else "")
    if call.state == "queued" and call.asks == "pending":
        return f"it waits for a person's approval ({call.approval})"
    if call.state == "queued":
        return "it waits in the queue"
    if call.state == "unknown":
        return "nobody knows whether it took effect; see towerman journal unknown"
    if call.state == "cancelled":
        return "it was cancelled before it began"
    return f"it ended {call.outcome}" + (f" ({call.code})" if call.code else "")


_HEADS: Final = ("handle", "queued", "state", "tool", "run", "call", "how it stands")


def _print(calls: Sequence[Deferred]) -> None:
    """A table, one line a call."""
    from towerman.cli.show import print_text
    from towerman.timeline import columns, printable

    rows = [_HEADS]
    for call in calls:
        place = f"{call.batch}.{call.index}{f' {call.call_id}' if call.call_id else ''}"
        rows.append((call.handle, moment(call.queued_at), call.state, call.tool, call.run_id, place, _words(call)))
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(columns(row[place]) for row in shown) for place in range(len(_HEADS))]
    for row in shown:
        cells = [cell + " " * (widths[place] - columns(cell)) for place, cell in enumerate(row)]
        print_text("  ".join(cells).rstrip())


def _write(value: object) -> None:
    from towerman.cli.show import write_json

    write_json(value)


def _say(line: str) -> None:
    from towerman.cli.show import print_text
    from towerman.timeline import printable

    print_text(printable(line))
