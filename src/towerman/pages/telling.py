"""What the model is told of a content at first, and how it reads on.

Theory. Where a content is a row of entries or text, the model is told its first pages, as many as fit, so that the
next page goes on right behind them. Where its first page would be a part of a part (two long texts side by side), an
overview says more, and pages begin at the first. Where a tool has a summary, that is told, with the same hint.

House rules. Never more bytes than the limit. The same content and limit give the same bytes but for the handle.

Not here: cutting (bounds), what is on a page (page).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from towerman.bounds import NO_HINT, Encoder, Hint, Large, recut
from towerman.bounds.cutting import marker, noted, span
from towerman.bounds.jsontext import MISSING, dumps, read_json, utf8_bytes
from towerman.pages.page import NOTE_BYTES, place_of
from towerman.pages.splitting import Frame, Index, Stretch, index_of
from towerman.tools import LEAST_PAGE

MARK_BYTES: Final = 200
"""Bytes that are kept free for saying that a summary is one."""

_MARKER_BYTES: Final = 150  # of a text that is cut, with its hint
_MANY: Final = 8  # entries of an object on its first page, from which on the page says more than an overview
_SHARE: Final = 3  # a hint takes no more than this part of a content


class Told(NamedTuple):
    """What the model is told of a content, and where its pages are.

    Args:
        text: within the limit.
        pages: of the whole.
        room: bytes that its pages were made for.
    """

    text: str
    pages: Index
    room: int

    def __repr__(self) -> str:
        return f"Told({len(self.text)} characters, {self.pages!r})"


def page_room(limit: int, reader: int, *, document: bool) -> int:
    """Bytes of a page, without what is said about it.

    Args:
        limit: the bound of the tool whose content it is.
        reader: the bound of the tool that reads pages; of the tower's results where there is none.
        document: the content is a JSON document.
    """
    bound = max(LEAST_PAGE, min(limit, reader))
    if document:
        return bound - NOTE_BYTES
    return max(LEAST_PAGE - NOTE_BYTES, min(bound - NOTE_BYTES, (limit - _MARKER_BYTES) * 4 // 5))


def hint_for(handle: str, page: int, reader: str | None, limit: int) -> Hint:
    """How to read on, as far as there is room for saying it.

    Args:
        handle: of the whole.
        page: the page to go on with.
        reader: the name of the tool that reads pages; None where there is none.
        limit: the most bytes of the content.
    """
    members = f',"handle":"{handle}","next_page":{page}'
    words = f"; handle {handle}, next page: {page}"
    if reader is not None:
        with_reader = f',"read_with":{dumps(reader)}'
        if len(members) + len(with_reader) <= limit // _SHARE:
            members += with_reader
        spoken = f'; {reader}(handle="{handle}", page={page}) reads on'
        words = spoken if len(spoken) <= limit // _SHARE else words
    most = limit // _SHARE
    return Hint(members if len(members) <= most else "", words if len(words) <= most else "")


def begun(large: Large, limit: int, room: int, handle: str, reader: str | None) -> Told:
    """What the model is told of a content whose whole is at hand.

    Args:
        large: the content.
        limit: the most bytes that the model is sent of it.
        room: of its pages, as `page_room` says.
        handle: under which the whole is kept.
        reader: the name of the tool that reads pages; None where there is none.
    """
    whole = large.whole
    assert whole is not None, "its whole is at hand"
    index = index_of(whole, room, document=large.document)
    text = None
    if not large.document:
        text = _first_lines(index, limit, handle, reader)
    elif index.text is whole and large.complete:
        text = _first_entries(large, index, limit, handle, reader)
    if text is None:
        text = large.cut_to(limit, hint_for(handle, 1, reader, limit))
    return Told(text, index, room)


def _first_lines(index: Index, limit: int, handle: str, reader: str | None) -> str | None:
    """Head, marker and tail of a text, where the head is whole pages."""
    beginning, total = index.text[:limit].encode(), index.stretches[-1].end
    for pages in range(min(len(index.stretches) - 1, limit // 64), 0, -1):
        end = index.stretches[pages - 1].end
        words = hint_for(handle, pages + 1, reader, limit).words
        room = limit - end - len(marker(total, total, words))
        if 0 <= room <= limit - limit // 3:  # less of a head says less than an overview
            head, rest = beginning[:end].decode(), index.text[-limit:]
            tail = rest[len(rest) - span(rest, room, utf8_bytes, True) :]
            return head + marker(total - end - utf8_bytes(tail), total, words) + tail
    return None


def _first_entries(large: Large, index: Index, limit: int, handle: str, reader: str | None) -> str | None:
    """The first pages of a row of entries, as many as fit."""
    stretches = index.stretches
    frame = index.frames[stretches[0].frame]
    if not _is_row(frame, stretches[0]):
        return None
    row = 0
    while row < len(stretches) and stretches[row].frame == stretches[0].frame:
        row += 1
    body = index.text.encode()
    before = _joined(body, frame.before)
    after = _joined(body, frame.after)
    place = place_of(frame.path) or "."
    around = utf8_bytes(before) + utf8_bytes(after) - stretches[0].start
    for pages in range(row, 0, -1):
        last = stretches[pages - 1]
        if around + last.end > limit:
            continue
        shown = last.first + last.units
        opening = noted(large.original_bytes, large.at_least, hint_for(handle, pages + 1, reader, limit))
        dropped = dumps({place: f"{frame.total - shown} of {frame.total} {frame.unit}"})
        opening += f',"dropped":{dropped}}},"result":'
        if around + last.end + utf8_bytes(opening) + 1 <= limit:
            return f"{opening}{before}{body[stretches[0].start : last.end].decode()}{after}}}"
    return None


def _is_row(frame: Frame, first: Stretch) -> bool:
    """Is its first page the beginning of a row, and not a part of one entry?"""
    if any(isinstance(step, int) for step in frame.path):
        return False
    return frame.unit == "items" or (frame.unit == "keys" and first.units >= _MANY)


def _joined(body: bytes, segments: tuple[str | tuple[int, int], ...]) -> str:
    return "".join([one if isinstance(one, str) else body[one[0] : one[1]].decode() for one in segments])


def again(value: object, text: str, limit: int, encoder: Encoder | None, handle: str | None, reader: str | None) -> str:
    """The same content under a smaller limit; pages then begin at the first.

    Args:
        value: what the handler returned; None for a text that was not made from a value.
        text: what the model would have been told.
        limit: the most bytes of it.
        encoder: the tool's own; it is not called again.
        handle: under which the whole is kept; None where it is not.
        reader: the name of the tool that reads pages; None where there is none.
    """
    hint = NO_HINT if handle is None else hint_for(handle, 1, reader, limit)
    return recut(value, text, limit, encoder, hint)


def summed_up(short: str, original: int, limit: int, handle: str | None, reader: str | None) -> str:
    """A summary, marked as one.

    Args:
        short: the summary as text, within `summary_room` of the limit.
        original: size of what it is a summary of.
        limit: the most bytes of both.
        handle: under which the whole is kept; None where it is not.
        reader: the name of the tool that reads pages; None where there is none.
    """
    hint = NO_HINT if handle is None else hint_for(handle, 1, reader, limit)
    is_document = short[:1] in ("{", "[") and read_json(short) is not MISSING
    for members, words in (hint, NO_HINT):
        if is_document:
            marked = f'{{"summarized":{{"original_bytes":{original}{members}}},"result":{short}}}'
        else:
            marked = f"{short}\n[summary of {original} bytes{words}]"
        if utf8_bytes(marked) <= limit:
            return marked
    return short


def summary_room(limit: int) -> int:
    """Bytes that a summary may have beside its mark."""
    return limit - min(MARK_BYTES, limit // 2)
