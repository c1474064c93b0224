"""The commands and their options."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from towerman.cli.engine import dev_server, engine_app
from towerman.cli.inbox import approvals_app
from towerman.cli.journal import journal_app
from towerman.cli.queue import add_commands
from towerman.cli.simulating import add_command as add_simulate
from towerman.cli.words import NOT_OK, OK, WRONG, Wrong, complain
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from rich.console import Console

    from towerman.calls import Batch
    from towerman.cli.work import Ending
    from towerman.observers import JsonlObserver
    from towerman.timeline import Story
    from towerman.tower import Tower
    from towerman.trace import Observer, Span


class Format(StrEnum):
    """The forms that a batch may have on the command line."""

    openai = "openai"
    anthropic = "anthropic"
    towerman = "towerman"


app = typer.Typer(
    name="towerman",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(journal_app)
app.add_typer(approvals_app)
app.add_typer(engine_app)
add_commands(app)
app.command("dev-server", epilog="Exit code 0: it was ended. 1: it has ended by itself. 2: it cannot be run.")(
    dev_server
)
add_simulate(app)

_EXIT_CODES = (
    "Exit code 0: all is well. 1: it ran and something was not ok. "
    "2: the input or the configuration is wrong. 130: interrupted."
)


_CallsOrNone = Annotated[
    str | None,
    typer.Argument(
        metavar="[CALLS]", help="A file with the calls or the plan, or - for stdin; with --resume it may be left out."
    ),
]
_Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="ID", help="The id of a run that was begun before; its calls are in the journal."),
]
_BatchName = Annotated[
    str | None,
    typer.Option("--batch-id", metavar="NAME", help="With --resume: which batch, where the run has several."),
]
_Tools = Annotated[
    str,
    typer.Option(
        "--tools",
        metavar="MODULE:TOWER",
        help="Where the tools are: an importable module (also in the current folder) and the Tower in it.",
    ),
]
_Config = Annotated[
    Path | None, typer.Option("--config", metavar="F", help="The towerman.toml that the tower reads when it is made.")
]
_Form = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORM",
        help="The form of the calls (openai, anthropic, towerman) or of the plan (llmcompiler, rewoo, taskbench, "
        "hugginggpt, nestful, worfbench:TOOL); found out when it is not given.",
    ),
]


_Timeline = Annotated[
    Path | None, typer.Option("--timeline", metavar="OUT.svg", help="Draw who ran and waited when into this file, too.")
]


def run_app(words: Sequence[str]) -> int:
    """Run one command; what typer finds wrong with the words is one line on stderr."""
    # The error's class lives in another package from one version of typer to the next.
    usage_error = cast("type[Exception]", typer.BadParameter.__mro__[1])
    try:
        return cast("int | None", app(args=list(words), prog_name="towerman", standalone_mode=False)) or OK
    except usage_error as error:
        context = getattr(error, "ctx", None)
        where = "towerman" if context is None else context.command_path
        message = error.format_message().replace("Value error, ", "").rstrip(".")  # type: ignore[attr-defined]
        return complain(f"{message} (see {where} --help)")


@app.callback(epilog=_EXIT_CODES)
def towerman(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> int:
    """Clear every tool call of an agent before it runs, and answer each one exactly once."""
    if version:
        from towerman import __version__

        print(f"towerman {__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG)
    return OK


@app.command(epilog=_EXIT_CODES)
def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the messages for the provider as JSON, and nothing else.")
    ] = False,
    format: Annotated[
        Format, typer.Option("--format", help="The form in which the batch is handed in and answered.")
    ] = Format.openai,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", help="Make database and files in DIR (new or empty) and leave them there."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="OUT", help="Append the events to this file, as lines of JSON.")
    ] = None,
    timeline: _Timeline = None,
) -> int:
    """Run 22 tool calls against the built-in support desk.

    They come in one message of a model. Needs no key and no network. The desk is a SQLite database and a few files
    in a temporary folder. Two updates go to one ticket, two edits to one file, four calls want a pool of 2; one call
    fails, one names an unknown tool and one has broken JSON, on purpose. Of three questions to a carrier that takes 2 a
    second one waits, the third of three translations is beyond the run's budget, and a shift lead, whom the desk plays,
    is asked about three refunds and denies one. The exit code is 0 when every call ends as promised and database and
    files hold what they should, else 1.
    """
    from towerman.adapters import decode
    from towerman.cli.pictures import check_place, write_timeline
    from towerman.cli.show import ForPeople, ForPrograms
    from towerman.cli.work import perform
    from towerman.desk import FORMS, Desk, check, open_tower

    with ExitStack() as stack:
        check_place("--timeline", timeline)
        folder = _folder(stack, keep)
        recorders = _recorders(stack, trace)
        batch = decode(FORMS[format.value](), format.value)
        face: ForPeople | ForPrograms = ForPrograms() if as_json else ForPeople(batch)
        stack.enter_context(face)
        if isinstance(face, ForPeople):
            face.screen.print(
                "A support desk: a database, some files, and a CRM that takes 2 requests at once.\n"
                "Its carrier takes 2 requests a second, translations may cost 0.05 EUR in all,\n"
                "and a refund needs the approval of the shift lead, whom the desk plays."
            )
            face.screen.print(
                f"A model sent {len(batch.calls)} tool calls in one message. Each is cleared before it runs:\n"
            )
        desk = Desk(folder)
        tower = open_tower(desk, observers=[*face.observers, *recorders])
        ending = perform(tower, batch, "demo", face, approver=desk.shift_lead)
        lost = max(_close_recorders(tower, recorders), write_timeline(timeline, ending.result))
        early = ending.exit_code()
        if early is not None:
            return early
        assert ending.result is not None
        kept, broken = check(desk, ending.result)
        if isinstance(face, ForPeople):
            _say_what_came_of_it(face.screen, kept, broken, keep)
        else:
            for sentence in broken:
                complain(f"not as promised: {sentence}")
        return max(lost, NOT_OK if broken else OK)


def _say_what_came_of_it(screen: Console, kept: Sequence[str], broken: Sequence[str], keep: Path | None) -> None:
    from towerman.cli.show import takes_only_ascii

    tick, cross = ("+", "-") if takes_only_ascii(screen) else ("✓", "✗")
    screen.print("\nWhat came of it, looked up in the database and the files:")
    for sentence in kept:
        screen.print(f"  {tick} {sentence}", style="green")
    for sentence in broken:
        screen.print(f"  {cross} not as promised: {sentence}", style="bold red")
    if keep is not None:
        screen.print(f"\nDatabase and files are in {keep}", soft_wrap=True)
    screen.print("\nYour own calls and tools: towerman run CALLS --tools module:tower")


@app.command(epilog=_EXIT_CODES)
def run(
    tools: _Tools,
    calls: _CallsOrNone = None,
    config: _Config = None,
    format: _Form = None,
    resume: _Resume = None,
    batch_id: _BatchName = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="ID", help="What the run is called by; made when it is not given."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="OUT", help="Append the events to this file, as lines of JSON.")
    ] = None,
    timeline: _Timeline = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="OUT", help="Where to write what is left of a batch that waits for approval."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the messages for the provider as JSON, also on a terminal.")
    ] = False,
) -> int:
    """Run a batch of your own against your own tools.

    CALLS are a provider's response, its message, a list of calls, or a plan as planners write it. On a terminal there
    is a live table, then the timeline and the results. Otherwise, and with --json, stdout gets the messages for the
    provider as JSON and nothing else; what the tools print goes to stderr. After Ctrl-C, or when a tool ends the
    program, the results so far are printed all the same: every call has one. A tool that ends the program gives the
    exit code, but never 0.

    Calls that need a person's approval are asked about on the terminal once all others are done. Where there is no
    terminal they do not run; with --state the batch is written to that file, arguments and results with it, for
    Run.resume, and stdout gets what it waits for.

    With a journal the batch is written down first, and stderr gets the id of its run. If the process dies, --resume ID
    goes on: what has finished is answered and not repeated, what had begun and is not known to have ended is held, and
    listed by towerman journal unknown, and the rest runs. Of a run that has ended it prints the results again.
    """
    from towerman.cli import resuming
    from towerman.cli.load import load_tower, read_given, shown
    from towerman.cli.pictures import check_place, write_timeline
    from towerman.cli.show import ForPeople, ForPrograms

    _check_resume(calls, resume, batch_id, run_id)
    with ExitStack() as stack:
        check_place("--timeline", timeline)
        given = None if calls is None else read_given(calls, format)
        # What tools print while they are loaded must not get among what a program reads.
        for_program = stack.enter_context(ForPrograms()) if as_json or not sys.stdout.isatty() else None
        tower = load_tower(tools, config)
        batch, kept = resuming.meant(tower, tools, None if given is None else given.for_tower(tower), resume, batch_id)
        face = ForPeople(batch) if for_program is None else for_program
        recorders = _recorders(stack, trace)
        run_id, batch = resuming.named(tower, tools, batch, kept, run_id)
        from towerman.cli.work import perform

        watching: list[Observer] = [*face.observers, *recorders]
        for observer in watching:
            tower.add_observer(observer)
            stack.callback(tower.remove_observer, observer)
        ending = perform(tower, batch, run_id, face, state, tenant=None if kept is None else kept.tenant)
        lost = max(_close_recorders(tower, recorders), write_timeline(timeline, ending.result))
        if tower.journal is not None and run_id is not None:
            resuming.tell_unknown(tower.journal, run_id, tools)
    return max(lost, _verdict("the run" if calls is None else shown(calls), batch, ending))


def _check_resume(calls: str | None, resume: str | None, batch_id: str | None, run_id: str | None = None) -> None:
    """Are the words about what is to be run, or gone on with, whole?

    Raises:
        Wrong: they are not.
    """
    from towerman.policy import name_of

    for option, name in (("--run-id", run_id), ("--resume", resume)):
        if name is not None:
            try:
                name_of(option, name)
            except PolicyError as wrong:
                raise Wrong(str(wrong)) from None
    if batch_id == "":
        raise Wrong("--batch-id: the name of a batch, which is not empty; leave it out where the run has only one")
    if calls is None and resume is None:
        raise Wrong(
            "name what is to be run: a file with calls, - for stdin, or --resume ID for a run that was begun before"
        )
    if resume is None and batch_id is not None:
        raise Wrong("--batch-id: it says which batch --resume means; give both")
    if resume is not None and run_id is not None:
        raise Wrong("--run-id: --resume names the run already; leave one of them out")


def _verdict(name: str, batch: Batch, ending: Ending) -> int:
    result = ending.result
    if result is not None and result.notice:
        complain(result.notice)
    early = ending.exit_code()
    if early is not None or result is None:
        return early or NOT_OK
    if not batch.calls:
        complain(f"{name}: there are no tool calls in it, so nothing ran")
        return OK
    bad = sum(1 for one in result if not one.ok)
    if bad:
        complain(f"{bad} of {len(result)} call{'' if len(result) == 1 else 's'} did not end ok")
        return NOT_OK
    return OK


@app.command(epilog=_EXIT_CODES)
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, as is done anyway.")] = False,
) -> int:
    """Print the JSON schema of towerman.toml, for editors."""
    from towerman.cli.show import write_json
    from towerman.config import schema as made

    write_json(made())
    return OK


@app.command(epilog=_EXIT_CODES)
def explain(
    tools: _Tools,
    calls: _CallsOrNone = None,
    config: _Config = None,
    format: _Form = None,
    resume: _Resume = None,
    batch_id: _BatchName = None,
    graph: Annotated[
        Path | None, typer.Option("--graph", metavar="OUT.svg", help="Draw groups and edges into this file, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print groups, edges and refusals as JSON.")] = False,
) -> int:
    """Say what a batch would do, and run nothing.

    CALLS are what `towerman run` takes. Printed are the groups of calls that would run together, what each call
    waits for and why, what would be refused, and the limits that count. The exit code is 1 when a call would be
    refused.

    With --resume ID it is the batch of a run that was begun before, and each call says how it stands: done, failed,
    unknown, at work, not begun.
    """
    from towerman.cli import resuming
    from towerman.cli.load import load_tower, read_given
    from towerman.cli.pictures import write_picture
    from towerman.cli.show import print_explanation, stdout_for_json, write_json

    _check_resume(calls, resume, batch_id)
    with stdout_for_json() as out:
        given = None if calls is None else read_given(calls, format)
        tower = load_tower(tools, config)
        batch, kept = resuming.meant(tower, tools, None if given is None else given.for_tower(tower), resume, batch_id)
        told = resuming.explained(tower, batch, kept)
        if graph is not None:
            write_picture("--graph", graph, told.to_svg())
        if as_json:
            write_json(told.to_dict(), out)
    if not as_json:
        print_explanation(told)
    return OK if told.ok else NOT_OK


@app.command(epilog=_EXIT_CODES)
def check(
    tools: Annotated[
        str | None,
        typer.Option(
            "--tools", metavar="MODULE:TOWER", help="Where the tools are; left out: the limits of --config alone."
        ),
    ] = None,
    config: _Config = None,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", metavar="SECONDS", help="How long a run may last; timeouts are compared with it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print answers, limits and findings as JSON.")] = False,
) -> int:
    """Answer nine questions about your tools and limits.

    They are answered from what the tower's tools and limits declare; nothing is called. With --config alone they are
    answered as far as a file can tell, which is not what tools touch. Then come the limits with the
    scope in force for each, and findings with the fix for each. The exit code is 1 when there is an error or a warning.
    """
    from towerman.cli.load import load_tower
    from towerman.cli.show import print_text, stdout_for_json, write_json

    with stdout_for_json() as out:
        tower = load_tower(tools, config) if tools is not None else _tower_of(config)
        try:
            report = tower.check(deadline=deadline)
        except PolicyError as wrong:
            raise Wrong(f"--deadline: {str(wrong).removeprefix('check: deadline: ')}") from None
        if as_json:
            write_json(report.to_dict(), out)
    if not as_json:
        print_text(str(report))
    return OK if report.ok else NOT_OK


def _tower_of(config: Path | None) -> Tower:
    """A tower with the limits of a file, and without tools."""
    from towerman.tower import Tower

    if config is None:
        raise Wrong("check: name what is to be checked: --tools MODULE:TOWER, or --config F for its limits alone")
    try:
        return Tower(config)
    except PolicyError as wrong:
        raise Wrong(f"--config: {wrong}") from None


@app.command(epilog=_EXIT_CODES)
def trace(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file of events as lines of JSON, or - for stdin.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the batches and their calls as JSON.")] = False,
) -> int:
    """Draw the timeline of each recorded batch.

    FILE was written by --trace, or by a JsonlObserver. A line that is no event is named and passed over; then the
    exit code is 1. That recorded calls failed does not change the exit code.
    """
    from towerman.cli.load import read_bytes, shown
    from towerman.observers import read_events
    from towerman.timeline import stories

    events, skipped = read_events(io.BytesIO(read_bytes(file)))
    name = shown(file)
    if skipped and not events:
        raise Wrong(f"{name}: no event in it; line {skipped[0].line}: {skipped[0].reason}")
    told = stories(events)
    if as_json:
        from towerman.cli.show import write_json

        write_json(
            {
                "batches": [_story_as_dict(story) for story in told],
                "skipped": [{"line": line.line, "reason": line.reason} for line in skipped],
            }
        )
    else:
        from towerman.cli.show import console

        screen = console()
        for number, story in enumerate(told):
            if number:
                screen.print()
            _draw_story(screen, story)
    if not told:
        complain(f"{name}: no batch in it")
    for line in skipped[:10]:
        complain(f"{name}, line {line.line}: {line.reason}; passed over")
    if len(skipped) > 10:
        complain(f"{name}: {len(skipped) - 10} more lines passed over")
    return NOT_OK if skipped else OK


def _draw_story(screen: Console, story: Story) -> None:
    from datetime import datetime

    from towerman.cli.show import has_color, print_drawing, takes_only_ascii
    from towerman.timeline import draw, printable

    ascii_only = takes_only_ascii(screen)
    heading = f"run {printable(story.run_id, ascii_only=ascii_only)}, batch {story.batch}"
    if story.wall is not None:
        try:
            heading += f", {datetime.fromtimestamp(story.wall).astimezone():%Y-%m-%d %H:%M:%S}"
        except (OverflowError, OSError, ValueError):
            pass  # an instant that no calendar has
    if not story.finished:
        heading += ", its end is not in the file"
    if len(story.spans) < story.calls:
        heading += f", {story.calls - len(story.spans)} of its {story.calls} calls are not in the file"
    screen.print(heading, style="bold", soft_wrap=True)
    print_drawing(screen, draw(story.spans, width=screen.width, color=has_color(screen), ascii_only=ascii_only))


def _story_as_dict(story: Story) -> dict[str, object]:
    return {
        "run_id": story.run_id,
        "batch": story.batch,
        "wall": story.wall,
        "finished": story.finished,
        "size": story.calls,
        "calls": [_span_as_dict(span) for span in story.spans],
    }


def _span_as_dict(span: Span) -> dict[str, object]:
    return {
        "index": span.index,
        "tool": span.tool,
        "outcome": span.outcome,
        "code": span.code,
        "queued": span.queued,
        "started": span.started,
        "sealed": span.sealed,
        "ended": span.ended,
        "waited_for": list(span.waited_for),
        "still_running": span.still_running,
        "tokens": span.tokens,
        "attempts": [list(attempt) for attempt in span.attempts],
    }


def _close_recorders(tower: Tower, recorders: Sequence[JsonlObserver]) -> int:
    """Close the trace, and say what is not in it."""
    from towerman.observers.jsonl import CLOSE_SECONDS

    code = OK
    for recorder in recorders:
        before = tower.statistics().events_dropped
        tower.remove_observer(recorder)
        missed = tower.statistics().events_dropped - before
        recorder.close(timeout=0 if missed else CLOSE_SECONDS)
        lost = recorder.lost + missed
        if lost or recorder.failure is not None:
            what = "an unknown number of events" if not lost else "1 event" if lost == 1 else f"{lost} events"
            complain(
                f"--trace {recorder.name}: {what} could not be written: {recorder.failure or 'it was too slow'}; make "
                "room or name another file; the results are complete"
            )
            code = NOT_OK
    return code


def _recorders(stack: ExitStack, path: Path | None) -> list[JsonlObserver]:
    if path is None:
        return []
    from towerman.observers import JsonlObserver

    try:
        return [stack.enter_context(JsonlObserver(path))]
    except OSError as error:
        raise Wrong(f"--trace {path}: cannot be written: {error.strerror or type(error).__name__}") from None
    except ValueError:  # a NUL in the name
        raise Wrong("--trace: this is no file name") from None


def _folder(stack: ExitStack, keep: Path | None) -> Path:
    if keep is None:
        return stack.enter_context(_temporary())
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise Wrong(f"--keep {keep}: the folder is not empty; give a new or an empty one")
    except OSError as error:
        raise Wrong(f"--keep {keep}: cannot be made: {error.strerror or type(error).__name__}") from None
    return keep


@contextmanager
def _temporary() -> Iterator[Path]:
    # A tool that outlived an interrupted batch may still hold a file open.
    with tempfile.TemporaryDirectory(prefix="towerman-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name)
