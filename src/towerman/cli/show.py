"""What is printed: for a person the timeline and the results, for a program JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import IO, TYPE_CHECKING, Final, Literal

from towerman.timeline import printable

if TYPE_CHECKING:
    from rich.console import Console

    from towerman.calls import Result

_DRAWN: Final = "·░█▒×→…┬─µ"  # noqa: RUF001 - the signs of the drawing


def console() -> Console:
    """A rich console on the present stdout, without guesses about numbers and paths in what it prints."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def has_color(screen: Console) -> bool:
    """Colours are wanted here (a terminal, or asked for; `NO_COLOR` is obeyed)."""
    return screen.color_system is not None and not screen.no_color


def takes_only_ascii(screen: Console) -> bool:
    """The signs of the drawing cannot be written there."""
    try:
        _DRAWN.encode(screen.encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def print_drawing(screen: Console, drawing: str) -> None:
    """Print a drawing that brings its own colours, as it is."""
    screen.file.write(drawing + "\n")


def results_table(screen: Console, results: Sequence[Result]) -> None:
    """Print one line per result: index, tool, outcome, code, and what the model is told."""
    from rich.table import Table
    from rich.text import Text

    ascii_only = takes_only_ascii(screen)

    def text(value: str, style: str = "") -> Text:
        return Text(printable(value, ascii_only=ascii_only), style=style)

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=False)
    overflow: Literal["crop", "ellipsis"] = "crop" if ascii_only else "ellipsis"
    table.add_column("#", justify="right", style="dim", no_wrap=True)
    table.add_column("tool", no_wrap=True, overflow=overflow, max_width=28)
    table.add_column("outcome", no_wrap=True)
    table.add_column("code", no_wrap=True)
    table.add_column("what the model is told", no_wrap=True, overflow=overflow, ratio=1)
    for result in results:
        style = "green" if result.ok else "red"
        told = result.content if result.ok else result.message
        table.add_row(
            str(result.index),
            text(result.tool[:128]),
            text(result.outcome, style),
            text(result.code or "", style),
            text(" ".join(told[:2000].split())),
        )
    screen.print(table)


def write_json(value: object) -> None:
    """Print a value as JSON that any program can read, whatever the encoding of stdout is."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def stdout_for_json() -> Iterator[IO[str]]:
    """Keep stdout for our own JSON: what tools and their child processes print meanwhile goes to stderr."""
    out = sys.stdout
    try:
        real = out.fileno() == 1
    except (OSError, ValueError, AttributeError):
        real = False
    if not real:
        with redirect_stdout(sys.stderr):
            yield out
        return
    out.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)
