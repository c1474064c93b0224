"""A content that is kept: its text, its pages, and whose it is.

Theory. Wherever contents are kept, they are bytes under a handle. The bytes begin with what a reader needs to know,
the places of the pages included, so that a page of a large content costs a few short reads and not the whole. A handle
is 128 bits that nobody can work out without the tower's key: who was not told it cannot guess it.

House rules. `repr` shows sizes and no handle: a handle is the right to read.

Not here: who may read (store).
"""

from __future__ import annotations

import json
import re
from base64 import b32encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from towerman.bounds.jsontext import MISSING, dumps, read_json
from towerman.pages.splitting import Frame, Index, Segment, Stretch, Unit, index_of

_HANDLE: Final = re.compile(r"r-[a-z2-7]{26}")
_VERSION: Final = 1
_DIGITS: Final = 10  # of the length of the head
_FIRST: Final = 65_536  # bytes that are read first: the head of all but the largest

Read = Callable[[int, int], bytes]
"""Reads a slice of what is kept: from the first byte on, so many; shorter at the end."""


class ResultStore(Protocol):
    """Keeps whole results elsewhere than in memory: a folder, a database. Give one as `Tower(results=...)`.

    Its methods are called on threads, several at a time, and may take long. What `put` raises is told once in the log;
    the content then stays in memory for as long as there is room. How long contents are kept is the store's to say.
    """

    def put(self, handle: str, content: bytes, *, run_id: str, tool: str, tenant: str | None) -> None:
        """Keep a content.

        Args:
            handle: its name: `r-` and 26 characters of `a` to `z` and `2` to `7`; never used twice.
            content: all of it.
            run_id: of the run.
            tool: its name.
            tenant: whom the run belongs to, or None.
        """
        ...  # pragma: no cover - a protocol has no body

    def read(self, handle: str, first: int = 0, size: int | None = None) -> bytes | None:
        """A slice of a content, shorter at its end; None where there is none of this handle.

        Args:
            handle: its name.
            first: the first byte, from 0.
            size: how many bytes; None: to the end.
        """
        ...  # pragma: no cover - a protocol has no body

    def drop(self, handle: str) -> None:
        """Forget a content; nothing happens where there is none of this handle.

        Args:
            handle: its name.
        """
        ...  # pragma: no cover - a protocol has no body


class Unreadable(Exception):
    """What is kept there is no content of this form."""


def new_handle(key: bytes, *parts: int) -> str:
    """A handle of characters that a file's name can have; nobody can guess it who has not the key.

    Args:
        key: at most 64 bytes.
        parts: what makes it this one and no other: the same key and parts give the same handle.
    """
    from hashlib import blake2s

    mac = blake2s(":".join(map(str, parts)).encode(), digest_size=16, key=key)
    return "r-" + b32encode(mac.digest()).decode().rstrip("=").lower()


def is_handle(text: object) -> bool:
    """It has the form of a handle."""
    return isinstance(text, str) and _HANDLE.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Content:
    """A whole content, and where its pages are.

    Args:
        document: it is a JSON document; else it is text. None: that, and where its pages are, is not looked into yet.
        room: bytes of a page that its pages were made for.
        original_bytes: size of what the handler returned, as it is told in its result.
        incomplete: something of the value is not in it: what had no end, or lay too deep.
        run_id, tool, tenant: whose result it is.
        kept_at: Unix time.
        size: bytes of its text.
        frames, stretches: as in `Index`.
        body: the text in UTF-8, where it is at hand.
    """

    document: bool | None
    room: int
    original_bytes: int
    incomplete: bool
    run_id: str
    tool: str
    tenant: str | None
    kept_at: float
    size: int
    frames: tuple[Frame, ...] = field(repr=False)
    stretches: tuple[Stretch, ...] = field(repr=False)
    body: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        index: Index,
        *,
        document: bool,
        room: int,
        original_bytes: int,
        incomplete: bool,
        run_id: str,
        tool: str,
        tenant: str | None,
        kept_at: float,
    ) -> Content:
        """A content out of its index."""
        body = index.text.encode()
        return cls(
            document,
            room,
            original_bytes,
            incomplete,
            run_id,
            tool,
            tenant,
            kept_at,
            len(body),
            index.frames,
            index.stretches,
            body,
        )

    def paged(self, room: int, body: bytes) -> Content:
        """The same content with pages of so many bytes.

        Args:
            room: bytes of a page, without what is said about it.
            body: its text.
        """
        text, document = body.decode(), self.document
        if document is None:
            loaded = read_json(text) if text[:1] in ("{", "[") else MISSING
            document = loaded is not MISSING
            text = dumps(loaded) if document else text
        return Content.of(
            index_of(text, room, document=document),
            document=document,
            room=room,
            original_bytes=self.original_bytes,
            incomplete=self.incomplete,
            run_id=self.run_id,
            tool=self.tool,
            tenant=self.tenant,
            kept_at=self.kept_at,
        )

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes, about."""
        return self.size + 1000 + 120 * len(self.stretches) + 300 * len(self.frames)

    def to_bytes(self) -> bytes:
        """As it is kept elsewhere than in memory."""
        assert self.body is not None, "a content that is only read has no body"
        head = json.dumps(
            [
                _VERSION,
                self.document,
                self.room,
                self.original_bytes,
                self.incomplete,
                self.run_id,
                self.tool,
                self.tenant,
                self.kept_at,
                self.size,
                self.frames,
                self.stretches,
            ],
            separators=(",", ":"),
        ).encode()
        return b"%0*d%b%b" % (_DIGITS, len(head), head, self.body)

    @classmethod
    def from_bytes(cls, read: Read) -> tuple[Content, int]:
        """What was kept, without its body, and the byte at which the body begins.

        Raises:
            Unreadable: it is nothing of the kind, or of a later version.
        """
        try:
            opening = read(0, _FIRST)
            length = int(opening[:_DIGITS])
            head = opening[_DIGITS : _DIGITS + length]
            if len(head) < length:
                head = read(_DIGITS, length)
            version, *given, frames, stretches = cast("list[object]", json.loads(head))
            if version != _VERSION:
                raise Unreadable
            content = cls(
                *given,  # type: ignore[arg-type,call-arg]  # as they were written
                tuple([_frame(one) for one in cast("list[list[object]]", frames)]),
                tuple([Stretch(*one) for one in cast("list[list[int]]", stretches)]),
            )
        except (ValueError, TypeError, IndexError) as broken:
            raise Unreadable from broken
        return content, _DIGITS + length


def _frame(given: list[object]) -> Frame:
    before, after, path, unit, total = given
    return Frame(
        _segments(before), _segments(after), tuple(cast("list[str]", path)), cast("Unit", unit), cast("int", total)
    )


def _segments(given: object) -> tuple[Segment, ...]:
    return tuple([one if isinstance(one, str) else (one[0], one[1]) for one in cast("list[str | list[int]]", given)])
