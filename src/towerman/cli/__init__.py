"""The `towerman` command.

Theory. A door: it reads what it is given, lets a tower do the work and shows what came of it. Exit codes: 0 all is
well, 1 it ran and something was not ok, 2 the input or the configuration is wrong (one line on stderr says what and
where), 130 it was interrupted. What goes to stdout is either for a person or for a program, never both: notes and
complaints go to stderr.

House rules. No rules of admission here. typer and rich are imported when a command runs, not with this package.

Not here: drawing a batch (timeline), the demo's world (desk).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from towerman.errors import TowermanError

__all__ = ["Wrong", "main"]

OK, NOT_OK, WRONG, INTERRUPTED = 0, 1, 2, 130


class Wrong(TowermanError):
    """The input or the configuration is wrong; the text is one line that names the place and the fix."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the words after `towerman`; those of the process when not given.
    """
    try:
        from towerman.cli.app import run_app

        code = run_app(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except Wrong as problem:
        return complain(str(problem))
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has gone. Python would flush once more at exit and complain: let it write to nowhere.
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (OSError, ValueError):
            pass  # stdout is no file of the system's: nothing will be flushed
        return NOT_OK
    return code


def complain(text: str) -> int:
    """Say one line on stderr; returns the exit code for wrong input."""
    from towerman.timeline import printable

    try:
        print(f"towerman: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody listens there either
    return WRONG
