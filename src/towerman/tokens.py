"""What results cost the model to read, as an estimate.

Theory. Fast is not cheap: fifty calls at once bring fifty results into the context. Only the model's own tokenizer
knows what a text takes; without one, four bytes are taken for a token, which holds roughly for English prose and code.
A counter that is plugged in is somebody else's code: what it says is checked, and where it fails the bytes count.

House rules. Nothing is counted before somebody looks. No message holds anything of a text.

Not here: when results are counted (work, runner), how they are shown (timeline, report).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

BYTES_PER_TOKEN: Final = 4
"""What a token is taken for where nobody counts."""

_EXTRA: Final = 1000  # tokens that a counter may add to a text for what stands around it


def estimate(text: str) -> int:
    """A text's tokens without a counter: its bytes / 4, rounded up."""
    return ((len(text) if text.isascii() else len(text.encode("utf-8", "replace"))) + 3) // BYTES_PER_TOKEN


def of_bytes(size: int) -> int:
    """The same for a text of so many bytes."""
    return (size + BYTES_PER_TOKEN - 1) // BYTES_PER_TOKEN


class Counter:
    """Counts tokens.

    Args:
        count: the counter that was plugged in; None: bytes count.

    Attributes:
        counted: bytes that the counter was given, and the tokens that it found in them.
    """

    def __init__(self, count: Callable[[str], object] | None) -> None:
        self.count = count
        self.counted = 0, 0
        self._told = False

    def __call__(self, text: str) -> int:
        """The tokens of a text, 0 or more; never fails."""
        count = self.count
        if count is None:
            return estimate(text)
        size = len(text.encode("utf-8", "replace"))
        try:
            found = count(text)
        except Exception as error:
            return self._fallen_back(size, f"failed with {type(error).__name__[:100]}")
        if isinstance(found, bool) or not isinstance(found, int):
            return self._fallen_back(size, f"gave no whole number, but {type(found).__name__[:100]}")
        if not 0 <= found <= size + _EXTRA:  # no tokenizer makes two tokens of one byte
            return self._fallen_back(size, "gave a number that no text of this size can have")
        before, tokens = self.counted
        self.counted = before + size, tokens + int(found)
        return int(found)

    def _fallen_back(self, size: int, why: str) -> int:
        if not self._told:
            self._told = True
            import logging

            logging.getLogger("towerman").warning("count_tokens: it %s; bytes / 4 are shown where it does", why)
        return of_bytes(size)

    def of_total(self, size: int) -> int:
        """The tokens of texts of so many bytes together, going by those that were counted."""
        found, tokens = self.counted
        return of_bytes(size) if not found else round(size * tokens / found)

    def __repr__(self) -> str:
        return f"Counter({'bytes / 4' if self.count is None else 'plugged in'})"
