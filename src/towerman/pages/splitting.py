"""Where the pages of a text begin and end.

Theory. Text is split into lines, as many as fit; a line that does not fit is split between characters. A document is
split where it is large: of an object in which one value outweighs the rest, that value is split and the rest stays
around it on each page; of any other object and of a list as many entries as fit make a page, and one that does not fit
is split in turn, alone; a long string is split like text. A document that cannot be split so (a key longer than a
page, a number of a thousand digits) is split as one long string that holds it.

House rules. One pass, in which the parser's own scanner skips what need not be looked into. Equal text and room give
equal pages.

Not here: the text around a stretch as people read it (page).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

from towerman.bounds.jsontext import quoted, utf8_bytes

LEAST_ROOM: Final = 24
"""Bytes below which nothing is split further: two brackets around a few characters."""

Unit = Literal["lines", "items", "keys", "characters"]

Segment = str | tuple[int, int]
"""A bracket, or a slice of the text."""

_skip: Final = json.JSONDecoder().raw_decode


class Frame(NamedTuple):
    """What stands around the stretches of some pages.

    Args:
        before: put in front of the stretch, in order.
        after: put behind it.
        path: keys and indexes that lead to what is split.
        unit: what it is split into.
        total: how many of these it has.
    """

    before: tuple[Segment, ...]
    after: tuple[Segment, ...]
    path: tuple[str | int, ...]
    unit: Unit
    total: int

    def __repr__(self) -> str:
        return f"Frame({self.unit}, total={self.total}, {len(self.path)} deep)"


class Stretch(NamedTuple):
    """One page: what of the text is new on it.

    Args:
        frame: the place of its frame.
        start: the first byte.
        end: the byte behind it.
        first: the first unit on it, from 0.
        units: how many.
    """

    frame: int
    start: int
    end: int
    first: int
    units: int


class Index(NamedTuple):
    """The pages of one text.

    Args:
        text: what the offsets count in: the content's own text, or one long string that holds it.
        frames: what stands around the stretches.
        stretches: one a page, in order, without a gap.
    """

    text: str
    frames: tuple[Frame, ...]
    stretches: tuple[Stretch, ...]

    def __repr__(self) -> str:
        return f"Index({len(self.text)} characters, {len(self.stretches)} pages)"


class _Unsplittable(Exception):
    """There is a part that is too large and has no parts."""


def index_of(text: str, room: int, *, document: bool) -> Index:
    """Split a text into pages.

    Args:
        text: not empty; valid UTF-8. A document is compact: no white space between its parts.
        room: the most bytes of a page, with what stands around its stretch; at least LEAST_ROOM.
        document: it is a JSON document, and so is to be each page.
    """
    if not document:
        return _in_bytes(text, [Frame((), (), (), "lines", text.count("\n") + (text[-1:] != "\n"))], _lines(text, room))
    if utf8_bytes(text) <= room:
        return _in_bytes(text, [Frame((), (), (), "items", 1)], [Stretch(0, 0, len(text), 0, 1)])
    splitter = _Splitter(text)
    try:
        stretches = list(splitter.split(0, len(text), (), (), room, ()))
    except (_Unsplittable, RecursionError):
        text = quoted(text)
        splitter = _Splitter(text)
        stretches = list(splitter.split(0, len(text), (), (), room, ()))
    return _in_bytes(text, splitter.frames, stretches)


def _fitting(text: str, start: int, room: int) -> int:
    """The place behind the last character from `start` on of those that take at most `room` bytes."""
    piece = text[start : start + room]
    return start + (len(piece) if piece.isascii() else len(piece.encode()[:room].decode("utf-8", "ignore")))


def _lines(text: str, room: int) -> Iterator[Stretch]:
    start = line = 0
    while start < len(text):
        end = _fitting(text, start, room)
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        ended = text.count("\n", start, end)
        whole = text[end - 1] == "\n"
        yield Stretch(0, start, end, line, ended if whole else ended + 1)
        line += ended
        start = end


class _Splitter:
    """Splits one document; places are counted in characters."""

    __slots__ = ("ascii", "frames", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.ascii = text.isascii()
        self.frames: list[Frame] = []

    def size(self, start: int, end: int) -> int:
        return end - start if self.ascii else utf8_bytes(self.text[start:end])

    def split(
        self,
        start: int,
        end: int,
        before: tuple[Segment, ...],
        after: tuple[Segment, ...],
        room: int,
        path: tuple[str | int, ...],
    ) -> Iterator[Stretch]:
        """Split the value that stands there, which is larger than `room`."""
        if room < LEAST_ROOM:
            raise _Unsplittable
        opening = self.text[start]
        if opening == "[":
            items = self._items(start)
            yield from self._entries(items, (*before, "["), ("]", *after), room - 2, path, "items")
        elif opening == "{":
            pairs = list(self._pairs(start))
            largest = max(pairs, key=lambda pair: pair[3] - pair[2])
            rest = self.size(start, end) - self.size(largest[2], largest[3])
            if rest <= room // 2 and rest + self.size(largest[2], largest[3]) > room:
                around = (*before, (start, largest[2])), ((largest[3], end), *after)
                yield from self.split(largest[2], largest[3], *around, room - rest, (*path, largest[4]))
            else:
                yield from self._entries(pairs, (*before, "{"), ("}", *after), room - 2, path, "keys")
        elif opening == '"':
            yield from self._string(start, end, (*before, '"'), ('"', *after), room - 2, path)
        else:
            raise _Unsplittable

    def _items(self, start: int) -> Iterator[tuple[int, int, int, int, str | int]]:
        text, place, at = self.text, 0, start + 1
        while text[at - 1] != "]":
            end = _skip(text, at)[1]
            yield at, end, at, end, place
            place += 1
            at = end + 1

    def _pairs(self, start: int) -> Iterator[tuple[int, int, int, int, str | int]]:
        text, at = self.text, start + 1
        while text[at - 1] != "}":
            key, colon = _skip(text, at)
            end = _skip(text, colon + 1)[1]
            yield at, end, colon + 1, end, key
            at = end + 1

    def _entries(
        self,
        entries: Iterable[tuple[int, int, int, int, str | int]],
        before: tuple[Segment, ...],
        after: tuple[Segment, ...],
        room: int,
        path: tuple[str | int, ...],
        unit: Unit,
    ) -> Iterator[Stretch]:
        """Entries of a list or an object, as many at a time as fit; one that does not is split alone."""
        mine = len(self.frames)
        self.frames.append(Frame(before, after, path, unit, 0))
        first = count = taken = begun = ended = total = 0
        for start, end, value, value_end, name in entries:
            length = self.size(start, end)
            if count and (length > room or taken + 1 + length > room):
                yield Stretch(mine, begun, ended, first, count)
                count = 0
            if length > room:
                lead = room - self.size(start, value)
                around = (*before, (start, value)) if value > start else before
                yield from self.split(value, value_end, around, after, lead, (*path, name))
            else:
                if not count:
                    first, begun, taken = total, start, -1
                taken += length + 1
                ended = end
                count += 1
            total += 1
        if count:
            yield Stretch(mine, begun, ended, first, count)
        self.frames[mine] = self.frames[mine]._replace(total=total)

    def _string(
        self,
        start: int,
        end: int,
        before: tuple[Segment, ...],
        after: tuple[Segment, ...],
        room: int,
        path: tuple[str | int, ...],
    ) -> Iterator[Stretch]:
        text = self.text
        mine = len(self.frames)
        whole: str = json.loads(text[start:end])
        self.frames.append(Frame(before, after, path, "characters", len(whole)))
        at, last, first = start + 1, end - 1, 0
        while at < last:
            stop = min(_fitting(text, at, room), last)
            if stop < last:
                stop = _whole_escapes(text, at, stop)
                stop = _after_line(text, at, stop) or stop
            count = len(json.loads(f'"{text[at:stop]}"'))
            yield Stretch(mine, at, stop, first, count)
            at, first = stop, first + count


def _whole_escapes(text: str, start: int, stop: int) -> int:
    """The last place up to `stop` that is in no escape sequence (`\\n`, `\\u001f`)."""
    for place in range(max(start, stop - 5), stop):
        if text[place] == "\\" and _escapes(text, start, place):
            length = 6 if text[place + 1] == "u" else 2
            if place + length > stop:
                return place
    return stop


def _escapes(text: str, start: int, place: int) -> bool:
    """Does the backslash there begin an escape sequence, or is it the second one of another?"""
    first = place
    while first > start and text[first - 1] == "\\":
        first -= 1
    return (place - first) % 2 == 0


def _after_line(text: str, start: int, stop: int) -> int:
    """The place behind the last end of a line in a string, or 0."""
    while (found := text.rfind("\\n", start, stop)) >= 0:
        if _escapes(text, start, found):
            return found + 2
        stop = found
    return 0


def _in_bytes(text: str, frames: list[Frame], stretches: Iterable[Stretch]) -> Index:
    """The same with places that count bytes."""
    listed = tuple(stretches)
    if text.isascii():
        return Index(text, tuple(frames), listed)
    places = {0, *(place for one in listed for place in (one.start, one.end))}
    for frame in frames:
        for segment in (*frame.before, *frame.after):
            if type(segment) is tuple:
                places.update(segment)
    at, counted = {}, 0
    ordered = sorted(places)
    for place, behind in zip(ordered, [*ordered[1:], len(text)], strict=True):
        at[place] = counted
        counted += utf8_bytes(text[place:behind])

    def moved(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple([one if type(one) is str else (at[one[0]], at[one[1]]) for one in segments])  # type: ignore[index]

    return Index(
        text,
        tuple([frame._replace(before=moved(frame.before), after=moved(frame.after)) for frame in frames]),
        tuple([one._replace(start=at[one.start], end=at[one.end]) for one in listed]),
    )
