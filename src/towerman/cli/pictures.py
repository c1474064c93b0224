"""Pictures that a command leaves behind as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from towerman.cli.words import NOT_OK, OK, Wrong, complain

if TYPE_CHECKING:
    from towerman.work import BatchResult


def check_place(option: str, path: Path | None) -> None:
    """Find out before anything runs that a file cannot be written; what is in it stays until there is a picture.

    Raises:
        Wrong: it cannot.
    """
    if path is None:
        return
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise _cannot(option, path, error) from None


def write_picture(option: str, path: Path, text: str) -> None:
    """Write a picture in place of what the file held.

    Raises:
        Wrong: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot(option, path, error) from None


def write_timeline(path: Path | None, result: BatchResult | None) -> int:
    """Leave the timeline of a batch that has run; returns the exit code. A fault here costs nobody a result."""
    if path is None or result is None:
        return OK
    try:
        write_picture("--timeline", path, result.timeline_svg())
    except Wrong as fault:
        complain(f"{fault}; the results are complete")
        return NOT_OK
    return OK


def _cannot(option: str, path: Path, error: OSError) -> Wrong:
    return Wrong(f"{option} {path}: cannot be written: {error.strerror or type(error).__name__}")
