"""The `towerman` command.

Theory. A door: it reads what it is given, lets a tower do the work and shows what came of it. Exit codes: 0 all is
well, 1 it ran and something was not ok, 2 the input or the configuration is wrong (one line on stderr says what and
where), 130 it was interrupted. What goes to stdout is either for a person or for a program, never both: notes and
complaints go to stderr.

House rules. No rules of admission here. typer and rich are imported when a command runs, not with this package.

Not here: drawing a batch (timeline), the demo's world (desk).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Final

from towerman.cli.words import INTERRUPTED, NOT_OK, Wrong, complain

__all__ = ["main"]

_OUTPUT_ERRORS: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the words after `towerman`; those of the process when not given.
    """
    closed = sys.stdout is None  # started that way
    _fill_standard_files()
    try:
        from towerman.cli.app import run_app

        code = run_app(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except Wrong as problem:
        return complain(str(problem))
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except OSError as error:
        # Only what goes wrong with our own output is left to here; whoever closed a pipe needs no words about it.
        if error.errno not in _OUTPUT_ERRORS:
            raise
        if error.errno != errno.EPIPE:
            complain(f"the output cannot be written: {error.strerror}")
        _give_up_stdout()
        return NOT_OK
    if closed:
        complain("stdout is closed, so nothing was printed")
        return code or NOT_OK
    return code


def _fill_standard_files() -> None:
    """Let what was closed when the process started lead to nowhere; a closed stdin stays known as closed.

    The system gives the lowest free number to the next file that is opened. A trace, a database or a copy of stdout
    must not become what a tool's child process takes for its stdout or stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) == number:
                os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lives


def _give_up_stdout() -> None:
    """Python flushes stdout once more at exit, and would complain: let that go to nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # stdout is no file of the system's: nothing will be flushed
