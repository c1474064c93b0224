"""`towerman journal`: what happened to which call, and the settling of unknown effects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from towerman.cli.words import NOT_OK, OK, WRONG, Wrong, complain
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from towerman.documents import KeptBatch
    from towerman.journal import Journal
    from towerman.records import Record

T = TypeVar("T")

_EXIT_CODES: Final = (
    "Exit code 0: all is well. 1: {}. 2: the input is wrong, or the file is no journal. 130: interrupted."
)

_Path = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        metavar="FILE",
        help="The journal; default: TOWERMAN_JOURNAL, the one that the configuration names, or towerman.db here.",
    ),
]
_Config = Annotated[
    Path | None, typer.Option("--config", metavar="F", help="The towerman.toml that names the journal.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


class States(StrEnum):
    """States of calls, as they are asked for."""

    open = "open"
    done = "done"
    unknown = "unknown"
    settled = "settled"


journal_app = typer.Typer(
    name="journal",
    help="What happened to which call; settle unknown effects.",
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def help_alone(context: typer.Context) -> None:
    """Without a command of its own, a group of commands shows what it has, as `towerman` alone does."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG)


journal_app.callback()(help_alone)


def find_journal(given: Path | None, config: Path | None, environ: Mapping[str, str] | None = None) -> Path:
    """The file that is meant: named, or found where towers find it.

    Raises:
        Wrong: there is none.
    """
    from towerman.config import FILE_VARIABLE, load

    environ = os.environ if environ is None else environ
    path = given
    if path is None and environ.get("TOWERMAN_JOURNAL"):
        path = Path(environ["TOWERMAN_JOURNAL"])
    if path is None:
        source = config if config is not None else environ.get(FILE_VARIABLE)
        if source:
            try:
                named = load(source).options.get("journal")
            except PolicyError as wrong:
                raise Wrong(f"--config: {wrong}") from None
            if isinstance(named, str):
                path = Path(named)
            elif config is not None:
                raise Wrong(f'--config {config}: it names no journal; add journal = "towerman.db", or say --journal')
    if path is None:
        path = Path("towerman.db")
        if not path.exists():
            raise Wrong("there is no towerman.db here; name the journal: --journal FILE, or --config F")
    if not path.exists():
        raise Wrong(f"--journal {path}: there is no such file")
    return path


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    """The journal, closed at the end.

    Raises:
        Wrong: it is none.
    """
    from towerman.journal import Journal

    try:
        journal = Journal(path)
    except PolicyError as wrong:
        raise Wrong(f"--{wrong}".replace("journal: ", "journal ", 1)) from None
    try:
        yield journal
    finally:
        journal.close()


def asked(path: Path, what: Callable[[Journal], T]) -> T | None:
    """Ask a journal; None, and a complaint, where it cannot be read or written now.

    Raises:
        Wrong: it is no journal.
    """
    from towerman.records import JournalUnavailable

    with opened(path) as journal:
        try:
            return what(journal)
        except JournalUnavailable as trouble:
            if trouble.trouble in ("not a journal", "newer", "secret", "sealed"):
                raise Wrong(str(trouble)) from None
            complain(str(trouble))
            return None


@journal_app.command(epilog=_EXIT_CODES.format("the journal cannot be read now"))
def show(
    journal: _Path = None,
    config: _Config = None,
    run_id: Annotated[str | None, typer.Option("--run", metavar="ID", help="Only calls of this run.")] = None,
    tool: Annotated[str | None, typer.Option("--tool", metavar="NAME", help="Only calls of this tool.")] = None,
    state: Annotated[States | None, typer.Option("--state", help="Only calls in this state.")] = None,
    batches: Annotated[
        bool, typer.Option("--batches", help="List batches that can be gone on with in place of calls.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="How many at most.")] = 50,
    as_json: _Json = False,
) -> int:
    """List the latest calls, the newest first.

    A call is open while it runs, done when it has its outcome, unknown when nobody knows whether it took effect, and
    settled when a person has said so.

    With --batches: plans that have a name, and what `towerman run` was given. A batch is at work, cut off when its
    process died over it, or ended; towerman run --resume ID goes on with it.
    """
    path = find_journal(journal, config)
    if batches:
        if tool is not None or state is not None:
            raise Wrong("--batches: --tool and --state are of calls; leave them out")
        return _show_batches(path, run_id, limit, as_json)
    wanted = None if state is None else state.value
    found = asked(
        path,
        lambda one: (
            one.calls(run_id=run_id, tool=tool, state=wanted, limit=limit).result(),  # type: ignore[arg-type]
            one.counts().result(),
        ),
    )
    if found is None:
        return NOT_OK
    records, counts = found
    if as_json:
        _write({"journal": str(path), "counts": counts, "calls": [told(record) for record in records]})
    else:
        _print(records, "no calls are written down" if not sum(counts.values()) else "none of the calls is like that")
        _say(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    return OK


def _show_batches(path: Path, run_id: str | None, limit: int, as_json: bool) -> int:
    found = asked(path, lambda one: one.batches(run_id=run_id, limit=limit).result())
    if found is None:
        return NOT_OK
    if as_json:
        _write({"journal": str(path), "batches": [told_of(batch) for batch in found]})
    elif not found:
        _say("no batch is written down")
    else:
        rows = [("begun", "state", "run", "batch", "calls", "ok", "attempts", "process")]
        for one in found:
            ok = "" if one.ok is None else str(one.ok)
            process = "" if one.state == "ended" else f"{one.pid} on {one.host}"
            kind = "plan" if one.plan else "batch"
            calls = f"{one.size}, not kept" if not one.stored else str(one.size)
            whose = one.run_id if one.tenant is None else f"{one.run_id} of {one.tenant}"
            rows.append(
                (moment(one.begun_at), one.state, whose, f"{kind} {one.name}", calls, ok, str(one.attempts), process)
            )
        _columns(rows)
    return OK


def told_of(batch: KeptBatch) -> dict[str, object]:
    """A batch for JSON; its calls are not in it."""
    return {
        "run_id": batch.run_id,
        "batch_id": batch.name if batch.named == "batch" else None,
        "response_id": batch.name if batch.named == "response" else None,
        "tenant": batch.tenant,
        "plan": batch.plan,
        "size": batch.size,
        "state": batch.state,
        "stored": batch.stored,
        "attempts": batch.attempts,
        "begun_at": batch.begun_at,
        "ended_at": batch.ended_at,
        "ok": batch.ok,
        "host": batch.host,
        "pid": batch.pid,
    }


@journal_app.command(epilog=_EXIT_CODES.format("some calls are unknown, or the journal cannot be read now"))
def unknown(
    journal: _Path = None,
    config: _Config = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="How many at most.")] = 1000,
    as_json: _Json = False,
) -> int:
    """List the calls of which nobody knows whether they took effect, the oldest first.

    Their process died after they had begun, or they were given up while they ran. They are not run again by
    themselves, unless they are harmless. Look at what they were to change, then say what came of it: towerman journal
    resolve.
    """
    path = find_journal(journal, config)
    records = asked(path, lambda one: one.unknown(limit).result())
    if records is None:
        return NOT_OK
    if as_json:
        _write({"journal": str(path), "calls": [told(record) for record in records]})
    else:
        _print(records, "no call is unknown")
    return NOT_OK if records else OK


@journal_app.command(epilog=_EXIT_CODES.format("the journal cannot be written now"))
def resolve(
    numbers: Annotated[list[int], typer.Argument(metavar="NUMBER...", help="Numbers of calls, as they are listed.")],
    applied: Annotated[bool, typer.Option("--applied", help="They took effect.")] = False,
    not_applied: Annotated[bool, typer.Option("--not-applied", help="They did not.")] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who says so.")] = None,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help="Why, for those who read it.")] = None,
    journal: _Path = None,
    config: _Config = None,
    as_json: _Json = False,
) -> int:
    """Say what came of unknown calls.

    Handed in again, a call that took effect is answered so, and one that did not take effect runs. All of the numbers
    are settled, or none.
    """
    from towerman.records import Unsettled

    if applied == not_applied:
        both = ", not both" if applied else ""
        raise Wrong(f"resolve: say --applied or --not-applied{both}")
    path = find_journal(journal, config)
    try:
        records = asked(path, lambda one: one.settle_all(numbers, applied=applied, by=by, note=note).result())
    except Unsettled as wrong:
        raise Wrong(f"resolve: {wrong}; nothing was changed") from None
    if records is None:
        return NOT_OK
    if as_json:
        _write({"journal": str(path), "calls": [told(record) for record in records]})
    else:
        _print(records, "")
    return OK


@journal_app.command(epilog=_EXIT_CODES.format("the journal cannot be written now"))
def prune(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="How old: a number and s, m, h, d or w, such as 30d.")
    ],
    journal: _Path = None,
    config: _Config = None,
    as_json: _Json = False,
) -> int:
    """Forget what ended long ago.

    What is open, unknown or waits stays, however old it is. A call that was forgotten runs again when it is handed in
    again.
    """
    from towerman.records import age

    try:
        seconds = age(older_than)
    except ValueError as wrong:
        raise Wrong(f"--older-than {older_than}: {wrong}") from None
    path = find_journal(journal, config)
    done = asked(path, lambda one: one.prune(seconds))
    if done is None:
        return NOT_OK
    counts = {
        "calls": done.calls,
        "approvals": done.approvals,
        "deferred calls": done.deferred,
        "contents": done.contents,
        "batches": done.batches,
        "times of tools": done.means,
    }
    if as_json:
        _write({"journal": str(path), "forgotten": counts})
    else:
        _say("forgotten: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return OK


@journal_app.command(epilog=_EXIT_CODES.format("the journal cannot be written now"))
def migrate(journal: _Path = None, config: _Config = None, as_json: _Json = False) -> int:
    """Bring the file to the form of this version of Towerman.

    A tower does so by itself when it opens the file. A file of a later version is refused.
    """
    path = find_journal(journal, config)
    found = asked(path, lambda one: one.migrate())
    if found is None:
        return NOT_OK
    if as_json:
        _write({"journal": str(path), "form": found[0], "newest": found[1]})
    else:
        _say(f"{path} has form {found[0]}, the newest")
    return OK


def told(record: Record) -> dict[str, object]:
    """A call for JSON; its arguments and its answer are not in it."""
    return {
        "number": record.number,
        "state": "unknown" if record.unknown else record.state,
        "tool": record.tool,
        "run_id": record.run_id,
        "batch": record.batch,
        "index": record.index,
        "call_id": record.call_id,
        "tenant": record.tenant,
        "applied": record.applied,
        "outcome": record.outcome,
        "code": record.code,
        "attempts": record.attempts,
        "harmless": record.harmless,
        "running": record.running,
        "owner_alive": record.live,
        "intended_at": record.intended_at,
        "ended_at": record.ended_at,
        "settled_at": record.settled_at,
        "settled_by": record.settled_by,
        "note": record.note,
    }


def _write(value: object) -> None:
    from towerman.cli.show import write_json

    write_json(value)


def _say(line: str) -> None:
    from towerman.cli.show import print_text
    from towerman.timeline import printable

    if line:
        print_text(printable(line))


_HEADS: Final = ("number", "begun", "state", "tool", "run", "call", "applied", "came to", "note")


def _print(records: Sequence[Record], none: str) -> None:
    """A table, one line a call."""
    if not records:
        _say(none)
        return
    rows = [_HEADS]
    for record in records:
        state = "unknown" if record.unknown else record.state
        came_to = record.code or record.outcome or ("its process is gone" if record.unknown else "")
        told_by = ": ".join(part for part in (record.settled_by, record.note) if part)
        rows.append(
            (
                str(record.number),
                moment(record.intended_at),
                f"{state}, harmless" if state == "unknown" and record.harmless else state,
                record.tool,
                record.run_id,
                f"{record.batch}.{record.index}{f' {record.call_id}' if record.call_id else ''}",
                record.applied,
                came_to,
                " ".join(told_by.split()),
            )
        )
    _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> None:
    """A table, the headings first."""
    from towerman.cli.show import print_text
    from towerman.timeline import columns, printable

    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(columns(row[place]) for row in shown) for place in range(len(rows[0]))]
    for row in shown:
        cells = [cell + " " * (widths[place] - columns(cell)) for place, cell in enumerate(row)]
        print_text("  ".join(cells).rstrip())


def moment(instant: float) -> str:
    try:
        return f"{datetime.fromtimestamp(instant).astimezone():%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):
        return "?"  # an instant that no calendar has
