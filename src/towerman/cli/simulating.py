"""`towerman simulate`: what a workload, a plan or a trace would have cost, under these limits or others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towerman.cli.words import NOT_OK, OK, Wrong, complain
from towerman.errors import InputError, PolicyError

if TYPE_CHECKING:
    from towerman.simulate import Sweep, Workload
    from towerman.tower import Tower

_EXIT_CODES = (
    "Exit code 0: every call came to its end. 1: some did not, or lines of a trace could not be read. "
    "2: the input or the configuration is wrong. 130: interrupted."
)


def add_command(app: typer.Typer) -> None:
    """Make the command part of the command line."""
    app.command(epilog=_EXIT_CODES)(simulate)


def simulate(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD", help="A workload, a plan or batch of calls, or a trace (lines of JSON); - for stdin."
        ),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Try this limit: pools.crm=4, max_concurrency=none, ..."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=A..B",
            help="Try each of these: pools.crm=1..8, 1..32:4 (by fours), 1,2,8; at most 1,000. Said once.",
        ),
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option("--tools", metavar="MODULE:TOWER", help="Whose limits hold, and what calls of a plan touch."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="F", help="The towerman.toml whose limits hold.")
    ] = None,
    seconds: Annotated[
        list[str] | None,
        typer.Option("--seconds", metavar="TOOL=S", help="How long calls of a plan take, by tool or pattern."),
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", metavar="FORM", help="The form of a plan; found out when it is not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Say how long calls would have taken under other limits; run nothing.

    A WORKLOAD file has calls with their durations (docs: Simulating). Of a plan, or any batch that `towerman run`
    takes, the durations are told by --seconds, known to the tower of --tools, or 1 second. A trace was written by
    --trace or a JsonlObserver. The plan, gate and ledger that decide are those of a tower, on a clock that jumps.

    Printed are the makespan beside the least that any order could reach, and how long calls waited for which limit.
    With --sweep, a line and a bar for each value.
    """
    from towerman import simulate as room
    from towerman.cli.load import load_tower, shown
    from towerman.cli.show import console, print_text, stdout_for_json, takes_only_ascii, write_json
    from towerman.simulate.force import tries
    from towerman.simulate.sweep import sweeps

    with stdout_for_json() as out:
        tower = load_tower(tools, config) if tools is not None else None
        policy = tower if tower is not None else config
        read, code = _read(workload, tower, seconds or [], format)
        tried: dict[str, object] = {}
        try:
            for one in sets or ():
                key, value = tries(one)
                if key in tried:
                    raise InputError(f"{key}: told twice")
                tried[key] = value
            if not sweep:
                told: room.Report | Sweep = room.simulate(read, policy, tried=tried)
            else:
                if len(sweep) > 1:
                    raise InputError("--sweep: told twice; try one key at a time, and hold the others with --set")
                key, values = sweeps(sweep[0])
                if key in tried:
                    raise InputError(f"{key}: --set has it already")
                told = room.sweep(read, key, values, policy, tried=tried)
        except InputError as problem:
            raise Wrong(f"{shown(workload)}: {problem}") from None
        except PolicyError as wrong:
            raise Wrong(f"--config: {wrong}" if tower is None else str(wrong)) from None
        if as_json:
            write_json(told.to_dict(), out)
    if not as_json:
        screen = console()
        if isinstance(told, room.Report):
            print_text(str(told))
        else:
            print_text(told.text(screen.width if screen.is_terminal else 78, ascii_only=takes_only_ascii(screen)))
    return max(code, OK if told.ok else NOT_OK)


def _read(name: str, tower: Tower | None, lengths: list[str], format: str | None) -> tuple[Workload, int]:
    """The workload that a file holds or comes to, and the exit code so far."""
    from towerman.cli.load import read_text, shown
    from towerman.simulate import read_workload, workload_of_plan

    text = read_text(name)
    if not text.strip():
        raise Wrong(f"{shown(name)}: it is empty; give it a workload, a plan or a trace")
    seconds = _seconds(lengths)
    code = OK
    try:
        if format is not None:
            return workload_of_plan(text, tower, seconds=seconds, format=format), OK
        if _is_trace(text):
            kind = "a trace"
            read, code = _read_trace(name, text)
        else:
            value = _json(text)
            if not _is_workload(value):
                return workload_of_plan(text, tower, seconds=seconds), OK
            kind = "a workload"
            read = read_workload(value)
    except InputError as problem:
        raise Wrong(f"{shown(name)}: {problem}") from None
    except PolicyError as problem:
        raise Wrong(f"--format: {problem}") from None
    if seconds:
        raise Wrong(f"--seconds: {shown(name)} is {kind}, which says itself how long its calls take")
    return read, code


def _read_trace(name: str, text: str) -> tuple[Workload, int]:
    from towerman.cli.load import shown
    from towerman.observers import read_events
    from towerman.simulate import workload_of_trace

    events, skipped = read_events(io.BytesIO(text.encode()))
    for line in skipped[:10]:
        complain(f"{shown(name)}, line {line.line}: {line.reason}; passed over")
    if len(skipped) > 10:
        complain(f"{shown(name)}: {len(skipped) - 10} more lines passed over")
    return workload_of_trace(events), NOT_OK if skipped else OK


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # whoever reads it says what is wrong


def _is_trace(text: str) -> bool:
    """Is one of the first lines an event?"""
    for line in text.lstrip().split("\n", 8)[:8]:
        value = _json(line)
        if isinstance(value, dict) and {"time", "kind", "run_id"} <= value.keys():
            return True
    return False


def _is_workload(value: object) -> bool:
    """Has it what only a workload has: limits, or a call with a duration?"""
    if not isinstance(value, dict) or "calls" not in value:
        return False
    calls = value["calls"]
    if not calls or {"max_concurrency", "pools", "rates"} & value.keys():
        return True
    return isinstance(calls, list) and any(isinstance(one, dict) and "duration" in one for one in calls)


def _seconds(given: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in given:
        tool, equals, value = one.rpartition("=")
        try:
            found[tool] = float(value)
        except ValueError:
            equals = ""
        if not equals or not tool:
            raise Wrong(f"--seconds {one}: write it as TOOL=SECONDS, for example look=0.5 or '*=2'")
    return found
