"""A tree is fitted into less room than it takes, and what is missing is told beside it.

Theory.
- Text keeps its head (four fifths of the room) and its tail, around `[... 950 of 1000 bytes cut ...]`.
- JSON stays JSON, the value below `result`, what is missing from it told beside it:
  `{"truncated": {"original_bytes": 61234, "dropped": {".items": "958 of 1000 items"}}, "result": {...}}`.
  Places are named as far as there is room, the outermost first; `more_places` counts the rest. Keys of objects are
  kept in preference and share the room, small values staying whole (water filling); lists lose items from the end;
  long strings inside are shortened like text; what cannot be shown in part is the string "[cut]".
- Where the size is a lower bound, the note says `"at_least": true`.

Not here: how the tree is made (reading).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, cast

from towerman.bounds.jsontext import dumps, quoted, quoted_bytes, utf8_bytes
from towerman.bounds.reading import Array, Lost, Object, Tree, size_of

_CUT: Final = "[cut]"
_PART: Final = 32  # bytes that each value of an object must get, or else whole entries are dropped
_MISSES: Final = 100  # entries that are looked at, in vain, after the first one that did not fit
_COUNTED: Final = re.compile(r"(\d{1,15}) of (\d{1,15}) (items|keys|bytes)")
_MARKER: Final = re.compile(r"\[\.\.\. \d{1,15} of (\d{1,15}) bytes cut(?:; [^\[\]\n]{1,300})? \.\.\.\]")


class Hint(NamedTuple):
    """What a cut says besides: where the rest can be had.

    Args:
        members: members of the note of a document, each after a comma.
        words: words of the marker of a text, after a semicolon.
    """

    members: str = ""
    words: str = ""


NO_HINT: Final = Hint()


def fit_batch(lengths: Sequence[int], max_total: int) -> int | None:
    """The cap that brings many results under one total: small ones stay whole, large ones share what is left.

    Args:
        lengths: sizes in bytes, in any order.
        max_total: the limit in bytes of all of them together; below 0 counts as 0.

    Returns:
        None when all fit; else the largest c with sum(min(length, c)) <= max_total: max-min fair shares by water
        filling (Bertsekas and Gallager, Data Networks, section 6.5.2). `recut` cannot keep a cap under MIN_BYTES.
    """
    left = max(max_total, 0)
    if sum(lengths) <= left:
        return None
    ordered = sorted(lengths)
    place = 0
    while ordered[place] <= left // (len(ordered) - place):
        left -= ordered[place]
        place += 1
    return left // (len(ordered) - place)


def share_room(lengths: Sequence[int], first: Collection[int], max_total: int, least: int) -> list[int] | None:
    """How many bytes each of many results may have, so that they keep to one total.

    Args:
        lengths: sizes in bytes.
        first: places of those that come first: they share all the room but `least` bytes for each of the others.
        max_total: the limit in bytes of all of them together.
        least: what the others have at least, or their size if that is less.

    Returns:
        None when all fit; else a cap for each: max-min fair shares among those that come first, and of what they
        leave among the others.
    """
    if sum(lengths) <= max_total:
        return None
    caps = list(lengths)
    behind = [place for place in range(len(lengths)) if place not in first]
    left = max_total - sum(min(lengths[place], least) for place in behind)
    for places in ([place for place in range(len(lengths)) if place in first], behind):
        cap = fit_batch([lengths[place] for place in places], left)
        if cap is not None:
            for place in places:
                caps[place] = min(lengths[place], max(cap, least))
        if places is not behind:
            left = max_total - sum(caps[place] for place in places)
    return caps


class _Cutter:
    """Fits a tree into less room than it takes, and notes at each place what is missing.

    Args:
        known: what an earlier cut of the same value noted, by place, the root being ""; None at the first cut.
        more: how many places it did not name.
    """

    __slots__ = ("again", "known", "more", "notes")

    def __init__(self, known: Mapping[str, str] | None, more: int) -> None:
        self.known = known or {}
        self.again = known is not None
        self.more = more
        self.notes: dict[str, str] = {}

    def fit(self, tree: Tree, size: int, room: int, path: str) -> tuple[object, int] | None:
        """The part of the tree that takes at most `room` bytes, and how many it takes; None if nothing can be shown."""
        kind = type(tree)
        if size > room and room < len(_CUT) + 2:
            return None
        shown: tuple[object, int] | None = None
        if type(tree) is Array:
            shown = self._list(tree.items, tree.count, tree.more, size, room, path)
        elif type(tree) is Object:
            shown = self._object(tree.entries, tree.count, tree.more, room, path)
        elif type(tree) is Lost and size <= room:
            self.notes[path] = tree.why
            return tree.mark, size
        elif size <= room:
            return tree, size
        elif kind is list or kind is tuple:
            items = cast("list[Tree]", tree)
            shown = self._list(items, len(items), False, size, room, path)
        elif type(tree) is dict:
            shown = self._object(tree, len(tree), False, room, path)
        elif type(tree) is str:
            shown = self._string(tree, room, path)
        if shown is None:
            self.notes[path] = f"{size} of {size} bytes"
            return _CUT, len(_CUT) + 2
        return shown

    def _list(
        self, items: Sequence[Tree], count: int, more: bool, size: int, room: int, path: str
    ) -> tuple[object, int] | None:
        """Items from the start, as many as fit; one that does not is shortened while a quarter of the room is left."""
        shown: list[object] = []
        left, rest = room - 2, size - 2
        for place, item in enumerate(items):
            comma = 1 if shown else 0
            share, length = left - comma, size_of(item)
            rest -= length + comma
            if length > share:
                if shown and left <= room // 4:
                    break
                share = max(share - rest, share // 2)
            part = self.fit(item, length, min(length, share), f"{path}[{place}]")
            if part is None:
                break
            shown.append(part[0])
            left -= part[1] + comma
        count, more = self._whole(path, "items", count), more or self._was_endless(path)
        if not shown and (count or more):
            return None
        self._note(path, len(shown), count, "items", more)
        return shown, room - left

    def _object(
        self, entries: dict[str, Tree], count: int, more: bool, room: int, path: str
    ) -> tuple[object, int] | None:
        """All keys if each value can have _PART bytes, the small values staying whole; else the entries that fit."""
        shown: dict[str, object] = {}
        lengths: list[int] = []
        cap: int | None = None
        values_room = room - 1 - len(entries)
        if values_room >= 4 * len(entries):  # else there is no need to look at all of them
            values_room -= sum(utf8_bytes(quoted(name)) + 1 for name in entries)
            lengths = [size_of(item) for item in entries.values()]
            if sum(min(length, _PART) for length in lengths) <= values_room:
                cap = fit_batch(lengths, values_room)
                cap = values_room if cap is None else cap
        left, spare, misses = room - 2, 0, 0
        for place, (name, item) in enumerate(entries.items()):
            key = utf8_bytes(quoted(name)) + (2 if shown else 1)
            length = lengths[place] if lengths else size_of(item)
            share = min(length, left - key if cap is None else cap + spare)
            part = None
            if share == length or not shown or cap is not None or left > room // 4:
                part = self.fit(item, length, share, path + _step(name))
            if part is None:
                misses += 1
                if misses > _MISSES:
                    break
                continue
            if cap is not None and length > cap:
                spare += cap - part[1]
            shown[name] = part[0]
            left -= part[1] + key
        count, more = self._whole(path, "keys", count), more or self._was_endless(path)
        if not shown and (count or more):
            return None
        self._note(path, len(shown), count, "keys", more)
        return shown, room - left

    def _string(self, text: str, room: int, path: str) -> tuple[object, int] | None:
        total = self._whole(path, "bytes", utf8_bytes(text))
        if self.again:
            total = max([total, *marked_sizes(text)])
        short = _shorten(text, total, room - 2, quoted_bytes)
        if short is None:
            return None
        self._note(path, short[1], total, "bytes", False)
        return short[0], quoted_bytes(short[0]) + 2

    def _whole(self, path: str, unit: str, count: int) -> int:
        """How many there were before the earlier cut."""
        known = _COUNTED.fullmatch(self.known.get(path, ""))
        return max(count, int(known[2])) if known and known[3] == unit else count

    def _was_endless(self, path: str) -> bool:
        return self.known.get(path, "").startswith("all after ")

    def _note(self, path: str, kept: int, count: int, unit: str, more: bool) -> None:
        if more:
            self.notes[path] = f"all after the first {kept} {unit}"
        elif kept < count:
            self.notes[path] = f"{count - kept} of {count} {unit}"

    def carry(self, shown: object, path: str) -> None:
        """Keep the earlier notes of places that are still there and were not cut again."""
        if path in self.known:
            self.notes.setdefault(path, self.known[path])
        if type(shown) is dict:
            for name, item in shown.items():
                self.carry(item, path + _step(name))
        elif type(shown) is list:
            for place, item in enumerate(shown):
                self.carry(item, f"{path}[{place}]")

    def told(self, room: int) -> str:
        """The notes as members of a JSON object, the outermost first, as many as fit."""
        places = sorted(self.notes, key=lambda path: path.count(".") + path.count("["))
        entries = [f"{quoted(path or '.')}:{quoted(self.notes[path])}" for path in places]
        told = _dropped(entries, self.more)
        if utf8_bytes(told) > room:
            left = room - len(_dropped([""], self.more + len(entries)))
            sizes = accumulate(utf8_bytes(entry) + 1 for entry in entries)
            fitting = sum(size - 1 <= left for size in sizes)
            told = _dropped(entries[:fitting], self.more + len(entries) - fitting)
        return told if utf8_bytes(told) <= room else ""


def _dropped(entries: list[str], more: int) -> str:
    named = f',"dropped":{{{",".join(entries)}}}' if entries else ""
    return f'{named},"more_places":{more}' if more else named


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() and len(name) <= 40 else f"[{quoted(name[:40])}]"


def marker(cut: int, total: int, words: str = "") -> str:
    """What stands in a text where something is missing."""
    return f"[... {cut} of {total} bytes cut{words} ...]"


def marked_sizes(text: str) -> list[int]:
    """The whole sizes that the markers in a text tell."""
    return [int(total) for total in _MARKER.findall(text)]


def _shorten(text: str, total: int, room: int, cost: Callable[[str], int], words: str = "") -> tuple[str, int] | None:
    """Head, marker and tail of a text that costs more than `room`, and the bytes that were kept of it."""
    room -= len(marker(total, total, words))
    if room < 0:
        return None
    tail_room = room // 5
    head = text[: span(text, room - tail_room, cost, False)]
    tail = text[len(text) - span(text, tail_room, cost, True) :]
    kept = utf8_bytes(head) + utf8_bytes(tail)
    return head + marker(total - kept, total, words) + tail, kept


def span(text: str, room: int, cost: Callable[[str], int], from_end: bool) -> int:
    """How many characters from one end cost at most `room`; looks at each of them a few times, at others not."""
    taken, step, length = 0, room, len(text)
    while (step := min(step, room, length - taken)) > 0:
        piece = text[length - taken - step : length - taken] if from_end else text[taken : taken + step]
        spent = cost(piece)
        if spent <= room:
            taken += step
            room -= spent
        else:
            step //= 2
    return taken


def cut_text(text: str, total: int, limit: int, hint: Hint = NO_HINT) -> str:
    short = _shorten(text, total, limit, utf8_bytes, hint.words)
    return short[0] if short else _CUT


def cut_tree(
    tree: Tree,
    size: int,
    limit: int,
    original: int,
    at_least: bool,
    known: Mapping[str, str] | None,
    more: int = 0,
    hint: Hint = NO_HINT,
) -> str:
    opening = noted(original, at_least, hint)
    room = limit - len(opening) - len('},"result":}')
    cutter = _Cutter(known, more)
    notes_room = min(limit // 4, 72 + limit // 64)  # one place at least, where the limit allows it
    part = cutter.fit(tree, size, room - notes_room, "") or cutter.fit(tree, size, room, "")
    if part is None:
        return opening + "}}"
    cutter.carry(part[0], "")
    return f'{opening}{cutter.told(room - part[1])}}},"result":{dumps(part[0])}}}'


def noted(original: int, at_least: bool, hint: Hint = NO_HINT) -> str:
    """The beginning of what stands around a document that was cut."""
    return f'{{"truncated":{{"original_bytes":{original}' + (',"at_least":true' if at_least else "") + hint.members
