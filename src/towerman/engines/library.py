"""The text of the function library and the name under which a server knows it.

Theory. Functions of a server have one name space, and several versions of Towerman may share a server. So the library
and its functions are called after its version and a digest of its text: whoever finds them finds this very text, and an
older process goes on with its own. What versions share is the layout of the data, which the text itself checks.

Not here: who loads it, and when (line).
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

VERSION: Final = 1
"""Of what may be asked and how it is answered."""

PLACEHOLDER: Final = "towerman_0"
"""What the name is in the file."""


class Library(NamedTuple):
    """A library as a server is given it.

    Args:
        name: its own.
        text: all of it.
    """

    name: str
    text: str

    @property
    def act(self) -> str:
        """The function that does what it is asked."""
        return f"{self.name}_act"

    @property
    def give(self) -> str:
        """The same for those who only give back: also when the server has no memory left."""
        return f"{self.name}_give"

    @property
    def look(self) -> str:
        """The function for whoever only looks in: it writes nothing."""
        return f"{self.name}_look"


@cache
def library() -> Library:
    """The library of this version."""
    return named(Path(__file__).with_name("claim.lua").read_text(encoding="utf-8"), VERSION)


def named(text: str, version: int) -> Library:
    """A text under the name that is made of its version and its digest."""
    name = f"towerman_{version}_{hashlib.blake2b(text.encode(), digest_size=5).hexdigest()}"
    return Library(name, text.replace(PLACEHOLDER, name))


def keys_of(group: str) -> tuple[str, ...]:
    """The keys of an admission group, in the order in which the functions take them. They share one hash tag."""
    return tuple(f"towerman:{{{group}}}:{part}" for part in ("state", "ring", "lease", "ends", "wait", "rest"))
