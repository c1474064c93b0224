"""A value is read once, into a tree whose parts know their size.

Theory. Small plain data is measured in one go and stays as it is; the rest is converted, part by part. What
will be cut whatever else it holds is read on only as long as that is quick, up to MAX_MEASURED, and what has no end up
to MAX_WORK; then the size is a lower bound, while the number of items of a list and of keys of a dict is exact. A value
inside itself, or nested too deep, becomes a string and is named in the note.

House rules. Of a list no more is kept than could be shown; the rest is counted. A part that a value holds many times
costs its reading once.

Not here: what is left out to keep a limit (cutting).
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import islice
from math import isfinite
from typing import Final, TypeAlias, cast
from uuid import UUID

from towerman.bounds.jsontext import clean, dumps, quoted, utf8_bytes
from towerman.bounds.values import call_method, named_kind, scalar_of, text_of, type_name

MAX_DEPTH: Final = 100
"""Containers inside containers that are read; what is deeper is replaced by the string "[too deep]"."""

MAX_WORK: Final = 1 << 28
"""Work spent on reading one value before the rest of it is left out: a byte of a long string is one unit, of small
plain data four, an item of a list 16 more; a value that must be converted, or that an iterator makes, is 256 (so about
64 MB of plain data, or a million of the others)."""

MAX_MEASURED: Final = 1 << 22
"""Work after which a container that alone is larger than the limit is read no further: it will be cut whatever else it
holds, and only the exact size of the whole would be learned, at the price of the loop standing still. About 1 MB of
plain data is measured exactly; of more, a lower bound is told, and how many items or keys there are."""

_CONVERTED: Final = 256  # work for a value that is not plain data, or that an iterator had to make
_LISTED: Final = 16  # work for an item of a list, beside its bytes
_SORTED: Final = 64  # work for an item of a set
_SIMPLE: Final = 8192  # bytes of plain data that are measured in one go
_CHUNK: Final = 64  # items that are measured in one go
_NOT_PLAIN: Final = -1
_TOO_LARGE: Final = -2
_ATOMS: Final = frozenset({int, float, bool, type(None)})
_CONTAINERS: Final = frozenset({dict, list, tuple})
_TEXTUAL: Final = frozenset({datetime, date, time, timedelta, Decimal, UUID})  # plain data too: each one short text


def room_left(value: object, left: int, depth: int) -> int:
    """What remains of `left` bytes after the least that this plain data can take; else _NOT_PLAIN or _TOO_LARGE."""
    left -= 2
    if depth >= MAX_DEPTH:
        return _NOT_PLAIN
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                return _NOT_PLAIN
            kind = type(item)
            if kind is str:
                left -= len(key) + len(item) + 5
            elif kind in _ATOMS:
                left -= len(key) + 4
            elif kind in _CONTAINERS:
                left = room_left(item, left - len(key) - 3, depth + 1)
            elif kind in _TEXTUAL:
                left -= len(key) + 6
            else:
                return _NOT_PLAIN
            if left < 0:
                return left if left == _NOT_PLAIN else _TOO_LARGE
        return left
    for item in cast("list[object]", value):
        kind = type(item)
        if kind is str:
            left -= len(cast(str, item)) + 2
        elif kind in _ATOMS:
            left -= 1
        elif kind in _CONTAINERS:
            left = room_left(item, left, depth + 1)
        elif kind in _TEXTUAL:
            left -= 3
        else:
            return _NOT_PLAIN
        if left < 0:
            return left if left == _NOT_PLAIN else _TOO_LARGE
    return left


class Array:
    """A list that was read: as many items as could be shown, the bytes and number of all of them."""

    __slots__ = ("count", "items", "more", "size")

    def __init__(self, items: list[Tree], size: int, count: int, more: bool) -> None:
        self.items = items
        self.size = size
        self.count = count
        self.more = more


class Object:
    """An object that was read: its values by name, the bytes and number of all of them."""

    __slots__ = ("count", "entries", "more", "size")

    def __init__(self, entries: dict[str, Tree], size: int, count: int, more: bool) -> None:
        self.entries = entries
        self.size = size
        self.count = count
        self.more = more


class Lost:
    """A part that is not there: the string in its place and why."""

    __slots__ = ("mark", "why")

    def __init__(self, mark: str, why: str) -> None:
        self.mark = mark
        self.why = why


Tree: TypeAlias = object
"""What was read: _Array, _Object, _Lost, or plain JSON data as it was handed in."""

_CYCLE: Final = Lost("[cycle]", "a value inside itself")
_DEEP: Final = Lost("[too deep]", f"nested more than {MAX_DEPTH} deep")


class Refused(Exception):
    """A part of the value has no JSON form; its place is put together on the way out."""

    def __init__(self, what: str, cause: Exception | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.steps: list[str] = []

    def message(self) -> str:
        steps = self.steps[::-1]
        if len(steps) > 12:
            steps[6:-6] = ["..."]
        return f"the value at {''.join(steps)} {self.what}" if steps else f"the result {self.what}"


class Reader:
    """Reads one value into a tree. Keeps of a list no more than `limit` bytes, and counts the rest.

    Args:
        limit: what will be shown.
        keep: bytes of the whole that are wanted all the same: where it is larger, it need not be complete.
        patient: nobody stands still for it: what is wanted is read to its end, also where that takes long.
    """

    __slots__ = ("cycles", "endless", "enough", "kept", "limit", "lossy", "open", "seen", "used_up", "work")

    def __init__(self, limit: int, keep: int = 0, *, patient: bool = False) -> None:
        self.kept = max(limit, keep)
        self.limit = self.kept if patient else limit
        self.work = MAX_WORK
        self.enough = MAX_WORK - MAX_MEASURED
        self.lossy = False
        self.endless = False
        self.used_up = False
        self.cycles = 0
        self.open: set[int] = set()
        self.seen: dict[tuple[int, int], tuple[object, Tree, int]] = {}

    def read(self, value: object, depth: int) -> tuple[Tree, int]:
        kind = type(value)
        if kind is str:
            return self._string(cast(str, value))
        if value is None or kind is int or kind is float or kind is bool:  # not by hash: a metaclass may have its own
            return self._atom(value)
        here = (id(value), depth)
        plain = kind is dict or kind is list or kind is tuple
        if plain:
            if here in self.seen:  # a large part that the value holds many times
                self.work -= _LISTED
                return self.seen[here][1:]
            if (size := self._measured(value, depth)) >= 0:
                return value, size
        if id(value) in self.open:
            self.cycles += 1
            return self._lost(_CYCLE)
        self.work -= _CONVERTED
        cycles = self.cycles
        self.open.add(id(value))
        try:
            tree, size = self._convert(value, kind, depth)
        except (Refused, RecursionError):
            raise
        except Exception as error:
            what = f"is {named_kind(kind)} that failed with {type_name(type(error))} while it was read"
            raise Refused(what, error) from None
        finally:
            self.open.discard(id(value))
        if plain and size > _SIMPLE and self.cycles == cycles:  # what a cycle is depends on the way here
            self.seen[here] = value, tree, size  # the value itself, so that its id is not used again
        return tree, size

    def _measured(self, value: object, depth: int) -> int:
        """Bytes of small plain data, or a negative number if it is not that."""
        try:
            if (least := room_left(value, _SIMPLE, depth)) < 0:
                if least == _TOO_LARGE:
                    self.work -= _SIMPLE // 4
                return least
            size = utf8_bytes(dumps(value))
        except Exception:  # no number, many digits, a lone surrogate, changed meanwhile
            return _NOT_PLAIN
        self.work -= 4 * size
        return size

    def _string(self, text: str) -> tuple[str, int]:
        try:
            size = utf8_bytes(quoted(text))
        except UnicodeEncodeError:
            text = clean(text)
            size = utf8_bytes(quoted(text))
        self.work -= size
        return text, size

    def _atom(self, value: object) -> tuple[Tree, int]:
        if type(value) is int:
            try:
                return value, len(str(value))
            except ValueError:  # more digits than the interpreter writes
                return self._string(hex(value))
        if type(value) is float and not isfinite(value):
            return self._string("NaN" if value != value else "Infinity" if value > 0 else "-Infinity")
        return value, len(dumps(value))

    def _lost(self, lost: Lost) -> tuple[Tree, int]:
        self.lossy = True
        return lost, len(lost.mark) + 2

    def _convert(self, value: object, kind: type, depth: int) -> tuple[Tree, int]:
        if issubclass(kind, Enum):
            return self._again(value.value, kind, depth)  # type: ignore[attr-defined]
        if issubclass(kind, BaseException):
            told = {"exception": type_name(kind)}
            return told, utf8_bytes(dumps(told))
        text = text_of(value, kind)
        if text is None:
            text = scalar_of(value, kind)
        if text is not None:
            return self._string(str.__str__(text))  # exactly a str, whatever a subclass's method returned
        if issubclass(kind, int):
            return self._atom(int.__index__(cast(int, value)))
        if issubclass(kind, float):
            return self._atom(float.__float__(cast(float, value)))
        _refuse_unread(kind)
        if depth >= MAX_DEPTH:
            return self._lost(_DEEP)
        if kind is dict:
            pairs = cast("dict[object, object]", value)
            return self._object(pairs.copy().items(), depth, plain=True, total=len(pairs))
        if kind is list or kind is tuple:
            items = cast("list[object]", value)
            return self._array(iter(items), depth, _LISTED, len(items))
        return self._everyday(value, kind, depth)

    def _everyday(self, value: object, kind: type, depth: int) -> tuple[Tree, int]:
        if hasattr(kind, "model_dump"):  # without warnings: pydantic's show the value
            return self._again(call_method(value, "model_dump", mode="json", warnings=False), kind, depth)
        if hasattr(kind, "__dataclass_fields__"):
            serializer = getattr(kind, "__pydantic_serializer__", None)
            if serializer is not None:
                return self._again(
                    call_method(serializer, "to_python", value, mode="json", warnings=False), kind, depth
                )
            names = [field.name for field in fields(kind)]
            return self._object(((name, getattr(value, name)) for name in names), depth, names)
        if issubclass(kind, Mapping):
            return self._object(cast("Mapping[object, object]", value).items(), depth)
        if issubclass(kind, Sequence):
            items = cast("Sequence[object]", value)
            if hasattr(kind, "_asdict"):
                return self._object(cast("Mapping[object, object]", call_method(value, "_asdict")).items(), depth)
            if hasattr(kind, "keys"):  # a database row, whose items are the values of its keys
                keys = cast("Iterable[object]", call_method(value, "keys"))
                return self._object(zip(keys, items, strict=True), depth)
            return self._array(iter(items), depth, _LISTED if issubclass(kind, (list, tuple)) else _CONVERTED)
        if issubclass(kind, MappingView):
            return self._array(iter(cast("Iterable[object]", value)), depth, _CONVERTED)
        if issubclass(kind, AbstractSet):
            return self._set(cast("AbstractSet[object]", value), issubclass(kind, (set, frozenset)), depth)
        if hasattr(kind, "tolist"):
            if getattr(getattr(value, "dtype", None), "kind", "") == "M":  # its own list would be bare nanoseconds
                value = call_method(value, "astype", str)
            return self._again(call_method(value, "tolist"), kind, depth)
        if hasattr(kind, "item") and hasattr(kind, "dtype"):
            return self._again(call_method(value, "item"), kind, depth)
        if hasattr(kind, "__next__"):
            self.used_up = True
            return self._array(cast("Iterator[object]", value), depth, _CONVERTED)
        raise Refused(f"is {named_kind(kind)}, which has no JSON form: return plain data, or give the tool encode=")

    def _again(self, value: object, kind: type, depth: int) -> tuple[Tree, int]:
        if type(value) is kind:
            raise Refused(f"is {named_kind(kind)} that stands for another one of its kind")
        return self.read(value, depth + 1)

    def _stops(self, size: int) -> bool:
        """Is a container of this size so far to be read no further?"""
        if self.work >= 0 and (size <= self.limit or self.work >= self.enough):
            return False
        self.lossy = self.endless = True
        return True

    def _array(self, iterator: Iterator[object], depth: int, cost: int, total: int = 0) -> tuple[Tree, int]:
        """Read items; `total` is how many there are, 0 where that is not certain."""
        kept: list[Tree] = []
        size, count, more = 1, 0, False  # a comma an item is one too many, the brackets are two
        while chunk := list(islice(iterator, _CHUNK if self.work >= self.enough else 1)):
            if self._stops(size):
                rest = max(0, total - count)
                size += 2 * rest  # a digit and a comma
                count += rest
                more = not total
                break
            self.work -= cost * len(chunk)
            room = size <= self.kept
            measured = self._measured(chunk, depth)
            if measured >= 0:
                size += measured - 1
                if room:
                    kept += chunk
                count += len(chunk)
                continue
            for item in chunk:
                try:
                    tree, length = self.read(item, depth + 1)
                except Refused as refused:
                    refused.steps.append(f"[{count}]")
                    raise
                size += length + 1
                count += 1
                if room:
                    kept.append(tree)
        return Array(kept, max(size, 2), count, more), max(size, 2)

    def _object(
        self,
        pairs: Iterable[tuple[object, object]],
        depth: int,
        names: Sequence[str] | None = None,
        plain: bool = False,
        total: int = 0,
    ) -> tuple[Tree, int]:
        """Read pairs; those of a `plain` dict are known to be distinct, and `total` is how many there are."""
        entries: dict[str, Tree] = {}
        size, count, more = 1, 0, False
        iterator = iter(pairs)
        while chunk := list(islice(iterator, _CHUNK)):
            if self._stops(size):
                rest = max(0, total - count)
                size += 5 * rest  # two quotes, a colon, a digit and a comma
                count += rest
                more = not total
                break
            if (
                plain
                and entries.keys().isdisjoint(data := dict(chunk))
                and (measured := self._measured(data, depth)) >= 0
            ):
                self.work -= _LISTED * len(chunk)
                size += measured - 1
                count += len(chunk)
                entries.update(cast("dict[str, Tree]", data))
                continue
            self.work -= _CONVERTED * len(chunk)
            for key, value in chunk:
                try:
                    name, name_size = self._name(key, depth)
                    if name in entries:
                        name, name_size = self._string(_another(name, count, entries))
                    entries[name], length = self.read(value, depth + 1)
                except Refused as refused:
                    refused.steps.append(f".{names[count]}" if names else f".<key {count}>")
                    raise
                size += name_size + length + 2
                count += 1
        return Object(entries, max(size, 2), count, more), max(size, 2)

    def _name(self, key: object, depth: int) -> tuple[str, int]:
        tree, size = self.read(key, depth + 1)
        return (tree, size) if type(tree) is str else self._string(dumps(plain_data(tree)))

    def _set(self, value: AbstractSet[object], finite: bool, depth: int) -> tuple[Tree, int]:
        listed: list[tuple[str, Tree]] = []
        size, more = 1, False
        if finite and 2 * len(value) > self.limit and len(value) * _SORTED > MAX_MEASURED:
            # The first ones in order are only known when all have been read, and others would differ from run to run.
            self.lossy = self.endless = True
            return Array([], 2 * len(value) + 1, len(value), False), 2 * len(value) + 1
        for item in value:
            if self.work < 0 and not finite:
                self.lossy = self.endless = more = True
                break
            self.work -= _SORTED if finite else _CONVERTED
            try:
                tree, length = self.read(item, depth + 1)
            except Refused as refused:
                refused.steps.append(".<item of a set>")  # its position would differ from run to run
                raise
            size += length + 1
            listed.append((dumps(plain_data(tree)), tree))
        listed.sort(key=lambda pair: pair[0])
        return Array([tree for _, tree in listed], max(size, 2), len(listed), more), max(size, 2)


def plain_data(tree: Tree) -> object:
    """The whole tree as JSON data."""
    if type(tree) is Array:
        return [plain_data(item) for item in tree.items]
    if type(tree) is Object:
        return {name: plain_data(value) for name, value in tree.entries.items()}
    return tree.mark if type(tree) is Lost else tree


def size_of(tree: Tree) -> int:
    if type(tree) is Array or type(tree) is Object:
        return tree.size
    return utf8_bytes(dumps(tree.mark if type(tree) is Lost else tree))


def _another(name: str, place: int, taken: Collection[str]) -> str:
    """A free name for a second key that became the same text, so that neither is lost: 1 and "1" -> "1" and "1 (2)"."""
    while name in taken:
        name = f"{name} ({place + 1})"
    return name


def _refuse_unread(kind: type) -> None:
    """Refuse what could be read only by waiting for it."""
    hint = ""
    if hasattr(kind, "__await__"):
        hint = "await it in the handler"
    elif hasattr(kind, "__aiter__") or hasattr(kind, "__anext__"):
        hint = "collect it in the handler with async for"
    elif issubclass(kind, io.IOBase):
        hint = "return its content, not the file"
    if hint:
        raise Refused(f"is {named_kind(kind)}, which has no JSON form: {hint}")
