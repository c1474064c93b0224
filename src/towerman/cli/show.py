"""What is printed: for a person the timeline and the results, for a program JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from typing import IO, TYPE_CHECKING, Final, Self

from towerman.timeline import columns, fit, printable

if TYPE_CHECKING:
    from rich.console import Console

    from towerman.calls import Batch, Result
    from towerman.explain import Explanation
    from towerman.trace import Observer
    from towerman.work import BatchResult

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
    """Print something that brings its own width and colours, as it is."""
    screen.file.write(drawing + "\n")


def results_table(results: Sequence[Result], *, width: int, color: bool = False, ascii_only: bool = False) -> str:
    """One line per result: index, tool, outcome, code, and what the model is told; none wider than `width`.

    Args:
        results: in emitted order.
        width: columns; less than 40 is taken as 40. Below 100, outcome and code share the column
            "status", as on the timeline: the code, or the outcome where there is none.
        color: add ANSI colour sequences.
        ascii_only: use no character beyond ASCII.
    """
    width = max(width, 40)
    apart = width >= 100
    heads = ("outcome", "code") if apart else ("status",)
    rows: list[tuple[str, ...]] = [("#", "tool", *heads, "what the model is told")]
    for result in results:
        told = result.content if result.ok else result.message
        ending = (result.outcome, result.code or "") if apart else (result.code or result.outcome,)
        cells = (result.tool[:128], *ending, " ".join(told[: 4 * width].split()))
        rows.append((str(result.index), *(printable(cell, ascii_only=ascii_only) for cell in cells)))
    gap = 2 if width >= 90 else 1
    widths = [max(columns(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    # What the model is told is what one looks for: it keeps 24 columns, and the longest of the others gives way.
    while sum(widths) + len(widths) * gap + 24 > width and max(widths) > 7:
        widths[widths.index(max(widths))] -= 1
    widths.append(max(1, width - sum(widths) - len(widths) * gap))
    lines = []
    for number, row in enumerate(rows):
        shown = [fit(cell, widths[place], right=place == 0, ascii_only=ascii_only) for place, cell in enumerate(row)]
        if color:
            tint = "32" if number and results[number - 1].ok else "31"
            styles = ("2", "", *(tint,) * (len(row) - 3), "") if number else ("1",) * len(row)
            pairs = zip(styles, shown, strict=True)
            shown = [f"\x1b[{style}m{cell}\x1b[0m" if style else cell for style, cell in pairs]
        lines.append((" " * gap).join(shown).rstrip())
    return "\n".join(lines)


def write_json(value: object, out: IO[str] | None = None) -> None:
    """Print a value as JSON that any program can read, whatever the encoding of stdout is."""
    (out or sys.stdout).write(json.dumps(value, indent=2) + "\n")


def print_text(text: str) -> None:
    """Print lines of text to stdout, which may take ASCII only."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        text = "\n".join(printable(line, ascii_only=True) for line in text.split("\n"))
    sys.stdout.write(text + "\n")


def print_explanation(told: Explanation) -> None:
    """Print what a batch would do: as wide as the terminal is, and with unbroken lines where there is none."""
    from towerman.explain import DRAWN

    screen = console()
    width = screen.width if screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal() else None
    try:
        DRAWN.encode(screen.encoding)
        ascii_only = False
    except (UnicodeEncodeError, LookupError):
        ascii_only = True
    print_text(told.text(width, ascii_only=ascii_only))


@contextmanager
def stdout_for_json() -> Iterator[IO[str]]:
    """Keep stdout for what is written to the file that is handed out.

    What tools and their child processes print meanwhile goes to stderr.
    """
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
        with redirect_stdout(sys.stderr), open(kept, "w", encoding="ascii", closefd=False) as file:
            yield file
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


class ForPrograms:
    """Shows a batch to a program: its messages as JSON, and nothing else on stdout while the block runs."""

    observers: tuple[Observer, ...] = ()

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._out = self._stack.enter_context(stdout_for_json())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def live(self) -> AbstractContextManager[object]:
        """Nothing is shown while the batch runs."""
        return nullcontext()

    def show(self, result: BatchResult, *, kept: bool = False) -> None:
        """Print the messages for the provider; where the batch is `kept` to be gone on with, what it waits for."""
        told: object = None
        if kept and result.pending:
            told = {
                "pending": [
                    {
                        "approval_id": request.approval_id,
                        "tool": request.tool,
                        "call_id": request.call_id,
                        "expires_in": request.expires_in,
                    }
                    for request in result.pending
                ]
            }
        write_json(told or result.messages(pending="refuse"), self._out)
        self._out.flush()


class ForPeople:
    """Shows a batch to a person: live on a terminal, then the timeline, then the results.

    Args:
        batch: what will be run.
    """

    def __init__(self, batch: Batch) -> None:
        from towerman.cli.live import Board

        self.screen = console()
        self._board = Board([call.tool for call in batch.calls])
        self.observers: tuple[Observer, ...] = (self._board,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def live(self) -> AbstractContextManager[object]:
        """The live table, which leaves nothing of itself behind; no table where there is no terminal."""
        screen = self.screen
        if not screen.is_terminal or screen.is_dumb_terminal:
            return nullcontext()
        from rich.live import Live

        # Title and headings, "and more", and the line that the cursor stands in.
        rows = max(1, screen.height - 4)
        return Live(
            get_renderable=lambda: self._board.table(rows), console=screen, refresh_per_second=12, transient=True
        )

    def show(self, result: BatchResult, *, kept: bool = False) -> None:
        """Print the timeline and the results."""
        from towerman.timeline import draw

        if not result:
            return
        screen = self.screen
        width, color, ascii_only = screen.width, has_color(screen), takes_only_ascii(screen)
        print_drawing(screen, draw(result.spans(), width=width, color=color, ascii_only=ascii_only))
        print_drawing(screen, "")
        print_drawing(screen, results_table(result, width=width, color=color, ascii_only=ascii_only))
        screen.file.flush()
