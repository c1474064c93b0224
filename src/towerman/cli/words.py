"""How the command line ends and complains: exit codes, and one line on stderr."""

from __future__ import annotations

import sys
from typing import Final

from towerman.errors import TowermanError
from towerman.timeline import printable

OK: Final = 0
NOT_OK: Final = 1
WRONG: Final = 2
INTERRUPTED: Final = 130


class Wrong(TowermanError):
    """The input or the configuration is wrong; the text is one line that names the place and the fix."""


def complain(text: str) -> int:
    """Say one line on stderr; returns the exit code for wrong input."""
    if sys.stderr is not None:
        try:
            print(f"towerman: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
        except OSError:
            pass  # nobody listens there either
    return WRONG
