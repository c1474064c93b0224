"""What every checker promises: the limits that it keeps, the refusal that it raises, and its face.

Not here: how a checker is made (signatures, schemas).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from towerman.calls import Arguments

MAX_ARGUMENT_BYTES: Final = 1_000_000
"""Longest argument text in UTF-8 bytes; of a mapping, texts and names count in bytes and every entry as one."""

MAX_DEPTH: Final = 64
"""Most objects and lists inside each other, the outermost one included."""

MAX_DIGITS: Final = 4300
"""Most digits of a whole number: what Python itself reads and prints by default."""

MAX_SCHEMA_BYTES: Final = 262_144
"""Largest JSON schema, as compact JSON."""

MAX_SCHEMA_STEPS: Final = 10_000
"""Most subschemas that a schema may have tried on one value: references to references grow exponentially."""

_MESSAGE: Final = 1000  # characters of a refusal


class ArgumentsRefused(Exception):
    """The arguments of one call cannot be used; becomes that call's result and is never shown to a caller.

    Args:
        message: a short text for the model: the place and the fix, never a value that was given.
    """

    def __init__(self, message: str) -> None:
        self.message = message if len(message) <= _MESSAGE else message[: _MESSAGE - 4] + " ..."
        super().__init__(self.message)


class Checker(Protocol):
    """Turns what the model wrote into keyword arguments for one tool. Made at registration, safe in threads."""

    @property
    def schema(self) -> Mapping[str, object]:
        """JSON schema of the arguments for providers; each access gives a copy of its own."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def names(self) -> frozenset[str]:
        """Names of the arguments that access templates may use."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def required(self) -> frozenset[str]:
        """Names that the model has to give."""
        ...  # pragma: no cover - a protocol has no body

    def check(self, raw: Arguments | str) -> dict[str, object]:
        """Load and validate; the result is fresh, with defaults filled in.

        Raises:
            ArgumentsRefused: with a message for the model. Nothing else is raised, whatever was given.
        """
        ...  # pragma: no cover - a protocol has no body
