"""`towerman approvals`: the calls that wait for a person, and the person's word."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from towerman.cli.journal import asked, find_journal, moment
from towerman.cli.words import NOT_OK, OK, Wrong

if TYPE_CHECKING:
    from towerman.journal import Journal
    from towerman.records import Approval

_EXIT_CODES: Final = "Exit code 0: all is well. 1: the journal cannot be used now. 2: the input is wrong."

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
_Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Names of approvals, as they are listed.")]
_By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who says so.")]

WAITING: Final = "pending"


class ApprovalStates(StrEnum):
    """States of approvals, as they are asked for."""

    pending = "pending"
    approved = "approved"
    denied = "denied"
    expired = "expired"


approvals_app = typer.Typer(
    name="approvals",
    help="The calls that wait for a person's approval; approve and deny them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@approvals_app.command("list", epilog=_EXIT_CODES)
def listed(
    journal: _Path = None,
    config: _Config = None,
    state: Annotated[ApprovalStates, typer.Option("--state", help="Those in this state.")] = ApprovalStates.pending,
    run_id: Annotated[str | None, typer.Option("--run", metavar="ID", help="Only those of this run.")] = None,
    arguments: Annotated[
        bool, typer.Option("--arguments", help="Show what the calls would be run with, for whoever decides.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="How many at most.")] = 1000,
    as_json: _Json = False,
) -> int:
    """List calls that wait for a person, the oldest first.

    A deferred call has a handle, under which towerman status and result follow it. Arguments are shown only when they
    are asked for.
    """
    wanted = state.value
    path = find_journal(journal, config)

    def look(one: Journal) -> list[tuple[Approval, str | None]]:
        rows = one.approvals(state=wanted, run_id=run_id, limit=limit).result()  # type: ignore[arg-type]  # its words
        return [(row, _arguments(one, row) if arguments else None) for row in rows]

    found = asked(path, look)
    if found is None:
        return NOT_OK
    if as_json:
        _write({"journal": str(path), "approvals": [_told(row, shown) for row, shown in found]})
    else:
        _print(found, f"no call is {wanted}" if wanted != WAITING else "no call waits for approval")
    return OK


def _arguments(journal: Journal, row: Approval) -> str | None:
    body = journal.arguments_of("approval", row.approval_id).result()
    return None if body is None else body.decode("utf-8", "replace")


@approvals_app.command(epilog=_EXIT_CODES)
def approve(names: _Ids, by: _By = None, journal: _Path = None, config: _Config = None, as_json: _Json = False) -> int:
    """Say yes: deferred calls are run by a worker, the others when their batches are gone on with.

    The host does that with Run.resume, which looks here. One decision stands: a second one that says the same changes
    nothing, and one that says otherwise is refused.
    """
    return _decide(names, True, by, None, journal, config, as_json=as_json)


@approvals_app.command(epilog=_EXIT_CODES)
def deny(
    names: _Ids,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why; the model is told.")] = None,
    by: _By = None,
    journal: _Path = None,
    config: _Config = None,
    as_json: _Json = False,
) -> int:
    """Say no: the calls are answered approval_denied, by a worker or when their batches are gone on with."""
    return _decide(names, False, by, reason, journal, config, as_json=as_json)


def _decide(
    names: Sequence[str],
    yes: bool,
    by: str | None,
    reason: str | None,
    journal: Path | None,
    config: Path | None,
    *,
    as_json: bool,
) -> int:
    from towerman.records import Unsettled

    path = find_journal(journal, config)
    done: list[Approval] = []

    def write(one: Journal) -> str | None:
        for name in names:
            try:
                done.append(one.decide(name, yes, by=by, reason=reason).result())
            except Unsettled as wrong:
                return f"{name}: {wrong}"
        return ""

    problem = asked(path, write)
    if problem is None:
        return NOT_OK
    if problem:
        before = f"; decided before that: {', '.join(row.approval_id for row in done)}" if done else ""
        raise Wrong(f"{problem}{before}")
    if as_json:
        _write({"journal": str(path), "approvals": [_told(row, None) for row in done]})
    else:
        _print([(row, None) for row in done], "")
    return OK


def _told(row: Approval, arguments: str | None) -> dict[str, object]:
    told: dict[str, object] = {
        "approval_id": row.approval_id,
        "state": row.state,
        "tool": row.tool,
        "run_id": row.run_id,
        "batch": row.batch,
        "index": row.index,
        "call_id": row.call_id,
        "handle": row.handle,
        "tenant": row.tenant,
        "asked_at": row.asked_at,
        "expires_at": row.expires_at,
        "decided_at": row.decided_at,
        "decided_by": row.decided_by,
        "reason": row.reason,
    }
    if arguments is not None:
        told["arguments"] = arguments
    return told


def _write(value: object) -> None:
    from towerman.cli.show import write_json

    write_json(value)


_HEADS: Final = ("id", "state", "tool", "run", "call", "handle", "until", "by", "why")


def _print(found: Sequence[tuple[Approval, str | None]], none: str) -> None:
    """A table, one line a call, with its arguments below it where they are wanted."""
    from towerman.cli.show import print_text
    from towerman.terminal import visible
    from towerman.timeline import columns, printable

    if not found:
        print_text(none)
        return
    rows = [_HEADS]
    for row, _ in found:
        rows.append(
            (
                row.approval_id,
                row.state,
                row.tool,
                row.run_id,
                f"{row.batch}.{row.index}{f' {row.call_id}' if row.call_id else ''}",
                row.handle or "",
                moment(row.expires_at),
                row.decided_by or "",
                " ".join((row.reason or "").split()),
            )
        )
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(columns(row[place]) for row in shown) for place in range(len(_HEADS))]
    for number, line in enumerate(shown):
        cells = [cell + " " * (widths[place] - columns(cell)) for place, cell in enumerate(line)]
        print_text("  ".join(cells).rstrip())
        arguments = found[number - 1][1] if number else None
        if arguments is not None:
            print_text(f"    {visible(arguments)}")
