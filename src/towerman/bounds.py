"""A handler's value becomes text for the model, never longer than its limit and never broken.

Theory. Text (a str, bytes that are UTF-8) passes as itself. Everything else becomes compact JSON. A value is read
once, into a tree whose parts know their size, so that the size of the whole is known without writing the whole down.
Then at most `limit` bytes are written. What is larger is cut:

- Text keeps its head (four fifths of the room) and its tail, around `[... 950 of 1000 bytes cut ...]`.
- JSON stays JSON, the value below `result`, what is missing from it told beside it:
  `{"truncated": {"original_bytes": 61234, "dropped": {".items": "958 of 1000 items"}}, "result": {...}}`.
  Places are named as far as there is room, the outermost first; `more_places` counts the rest. Keys of objects are
  kept in preference and share the room, small values staying whole (water filling); lists lose items from the end;
  long strings inside are shortened like text; what cannot be shown in part is the string "[cut]".
- Text that is a JSON document is cut as JSON too (its white space goes first, which may be enough).
- What has no end is read up to MAX_WORK. Then the size is a lower bound and the note says `"at_least": true`.
  A value inside itself, or nested too deep, becomes a string and is named in the note.

A result is never empty: None, blank text and no bytes become EMPTY; `[]` and `{}` say by themselves that they are.

House rules. `encode` raises nothing but EncodingError. Its message names types and positions, never a value: keys of
the handler's own dicts are values too, so a place in a dict is told as `<key 2>`. Equal input gives equal bytes: sets
are ordered by their encoded text. A handler's objects are told apart by their type, never by what they claim to be.

Not here: paging and spilling (they need a store), content blocks of a protocol, the wording of failures.
"""

from __future__ import annotations

import io
import json
import json.encoder
import os
import re
from base64 import b64encode
from collections import UserString
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import accumulate, islice
from math import isfinite
from pathlib import PurePath
from typing import Final, NoReturn, TypeAlias, cast
from uuid import UUID

from towerman.errors import TowermanError

MIN_BYTES: Final = 64
"""The smallest limit that can be kept: the note alone needs this much. A smaller one counts as this."""

MAX_DEPTH: Final = 100
"""Containers inside containers that are read; what is deeper is replaced by the string "[too deep]"."""

MAX_WORK: Final = 1 << 28
"""Work spent on reading one value before the rest of it is left out: a byte of a long string is one unit, of small
plain data four, an item of a list 16 more; a value that must be converted, or that an iterator makes, is 256 (so about
64 MB of plain data, or a million of the others)."""

MAX_PARSED: Final = 1 << 23
"""Bytes of text up to which a cut tries first whether the text is a JSON document."""

EMPTY: Final = "(empty result)"
"""Stands for None and for blank text, which providers refuse as content."""

Encoder: TypeAlias = Callable[[object], object]

_CUT: Final = "[cut]"
_CONVERTED: Final = 256  # work for a value that is not plain data, or that an iterator had to make
_LISTED: Final = 16  # work for an item of a list, beside its bytes
_SIMPLE: Final = 8192  # bytes of plain data that are measured in one go
_CHUNK: Final = 64  # items that are measured in one go
_PART: Final = 32  # bytes that each value of an object must get, or else whole entries are dropped
_MISSES: Final = 100  # entries that are looked at, in vain, after the first one that did not fit
_NOT_PLAIN: Final = -1
_TOO_LARGE: Final = -2
_ATOMS: Final = frozenset({int, float, bool, type(None)})
_CONTAINERS: Final = frozenset({dict, list, tuple})
_TEXTUAL: Final = frozenset({datetime, date, time, timedelta, Decimal, UUID})  # plain data too: each one short text
_TOLD_BY_STR: Final = frozenset({"fractions", "ipaddress"})  # modules whose values are text, so as not to load them
_LARGEST: Final = 10**15 - 1  # the largest size that is told: with more digits, the note would not fit in MIN_BYTES
_MISSING: Final = object()
_COUNTED: Final = re.compile(r"(\d{1,15}) of (\d{1,15}) (items|keys|bytes)")
_MARKER: Final = re.compile(r"\[\.\.\. \d{1,15} of (\d{1,15}) bytes cut \.\.\.\]")
_own_name: Final = type.__dict__["__name__"].__get__  # a metaclass cannot talk its way around this one


class EncodingError(TowermanError):
    """A value has no form that the model could be sent.

    Args:
        message: for the model: names a type and a place, never a value and never another exception's text.
        cause: what the handler's object or the tool's encoder raised, for use in this process only.
    """

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause


class _Draft:
    """The slots of an Encoded, writable only while it is being made (a third of a frozen one's own time)."""

    __slots__ = ("cut", "original_bytes", "text")

    def __init__(self, text: str, original_bytes: int, cut: bool) -> None:
        self.text = text
        self.original_bytes = original_bytes
        self.cut = cut


@dataclass(frozen=True, slots=True, repr=False)
class Encoded(_Draft):
    """What the model is sent.

    Args:
        text: never empty, valid UTF-8, JSON unless the value was text.
        original_bytes: UTF-8 bytes of the whole, before it was cut; a lower bound where the value has no end in sight.
        cut: something of the value is missing from the text.
    """

    text: str
    original_bytes: int
    cut: bool

    def __repr__(self) -> str:
        return f"Encoded({len(self.text)} characters, original_bytes={self.original_bytes}, cut={self.cut})"


def encode(value: object, max_bytes: int, encoder: Encoder | None = None) -> Encoded:
    """Write a handler's value for the model, within its size limit.

    Iterators are consumed here, and methods of the handler's objects called, in the caller's thread.

    Args:
        value: anything that a handler returned.
        max_bytes: the limit in UTF-8 bytes; less than MIN_BYTES counts as MIN_BYTES.
        encoder: the tool's own `encode=`: takes the value, returns text or a value that is encoded in its place.

    Raises:
        EncodingError: the value, or a part of it, has no JSON form, or failed while it was read.
    """
    try:
        if encoder is None:
            kind = type(value)
            if kind is str:
                text = cast(str, value)
                if text.isascii() and len(text) <= max_bytes and text and not text.isspace():
                    return _encoded(text, len(text), False)
            elif kind is dict or kind is list:
                if _least(value, max_bytes, 0) >= 0:
                    text = _dumps(value)
                    size = _bytes(text)
                    if size <= max_bytes:
                        return _encoded(text, size, False)
            elif kind is int:
                text = str(value)
                if len(text) <= max_bytes:
                    return _encoded(text, len(text), False)
    except Exception:  # no number, many digits, a lone surrogate, changed meanwhile: found out on the long way
        pass
    failure: EncodingError
    try:
        limit = max(max_bytes, MIN_BYTES)
        if encoder is not None:
            value = _run_encoder(encoder, value)
        if value is None:
            return Encoded(EMPTY, 0, False)
        content = _text_of(value, type(value))
        return _encode_value(value, limit) if content is None else _encode_text(content, limit)
    except EncodingError as error:
        failure = error
    except _Refused as refused:
        failure = EncodingError(refused.message(), refused.cause)
    except Exception as error:
        failure = EncodingError(f"reading the result failed with {_type_name(type(error))}", error)
    try:
        raise failure  # here, so that what the handler's object raised does not travel along as context
    finally:
        del failure  # its traceback holds this frame, and this frame the value


def recut(value: object, text: str, max_bytes: int, encoder: Encoder | None = None) -> str:
    """The same result again under a smaller limit.

    Cuts the text, since the value may have changed, or be used up; only text is cut anew from the value, so that it
    comes out as if the smaller limit had been the first. Where the text was cut before, its note is carried on.

    Args:
        value: what the handler returned; None for a text that was not made from a value.
        text: what `encode` made of it under a limit at least as large.
        max_bytes: the limit in UTF-8 bytes; less than MIN_BYTES counts as MIN_BYTES.
        encoder: the tool's own `encode=`; it is not called again.
    """
    limit = max(max_bytes, MIN_BYTES)
    size = _bytes(text)
    if size <= limit:
        return text
    markers = _marked(text)
    if encoder is None and type(value) in (str, bytes) and (content := _text_of(value, type(value))) is not None:
        content = _clean(content)
        if text == content or _bytes(content) in markers:
            return _encode_text(content, limit).text
    loaded = _load(text)
    if loaded is _MISSING:
        return _cut_text(text, max([size, *markers]), limit)
    result, original, at_least, known, more = _unwrap(loaded, size)
    tree, tree_size = _Reader(limit).read(result, 0)
    return _cut_tree(tree, tree_size, limit, original, at_least, known, more)


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


# ---------------------------------------------------------------------------------------------- small tools


def _textual(value: object) -> str:
    text = _scalar_of(value, type(value))
    if text is None:  # an object that slipped in after the value was looked at
        raise TypeError("not plain data")
    return text


_encoder: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"), default=_textual
)
_quote: Final = _encoder.encode


def _fast_dumps() -> Callable[[object], str]:
    """`_quote` without its set-up on each call (two thirds of its time for a small dict), where that can be had."""
    make = getattr(json.encoder, "c_make_encoder", None)
    quote = getattr(json.encoder, "encode_basestring", None)
    if make is None or quote is None:
        return _quote
    chunks = make(None, _textual, quote, None, ":", ",", False, False, False)
    join = "".join
    return lambda value: join(chunks(value, 0))


_dumps: Final = _fast_dumps()


def _encoded(text: str, original_bytes: int, cut: bool) -> Encoded:
    draft = _Draft(text, original_bytes, cut)
    draft.__class__ = Encoded
    return cast(Encoded, draft)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _quoted_bytes(text: str) -> int:
    return _bytes(_quote(text)) - 2


def _clean(text: str) -> str:
    """Valid UTF-8: surrogate pairs become the character that they stand for, lone ones U+FFFD."""
    try:
        _bytes(text)
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _least(value: object, left: int, depth: int) -> int:
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
                left = _least(item, left - len(key) - 3, depth + 1)
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
            left = _least(item, left, depth + 1)
        elif kind in _TEXTUAL:
            left -= 3
        else:
            return _NOT_PLAIN
        if left < 0:
            return left if left == _NOT_PLAIN else _TOO_LARGE
    return left


def _run_encoder(encoder: Encoder, value: object) -> object:
    try:
        return encoder(value)
    except Exception as error:
        failure = EncodingError(f"the tool's encode= failed with {_type_name(type(error))}", error)
    try:
        raise failure
    finally:
        del failure


def _encode_text(text: str, limit: int) -> Encoded:
    if not text or text.isspace():
        return Encoded(EMPTY, _bytes(text), False)  # no kind of blank is a surrogate
    text = _clean(text)
    size = _bytes(text)
    if size <= limit:
        return Encoded(text, size, False)
    loaded = _load(text) if size <= MAX_PARSED and text.lstrip()[:1] in "{[" else _MISSING
    if loaded is _MISSING:
        return Encoded(_cut_text(text, size, limit), size, True)
    return _encode_value(loaded, limit, size)


def _encode_value(value: object, limit: int, original: int | None = None) -> Encoded:
    reader = _Reader(limit)
    tree, size = reader.read(value, 0)
    whole = size <= limit and not reader.lossy
    original = size if original is None else original
    endless = reader.endless or original > _LARGEST
    original = min(original, _LARGEST)
    text = _dumps(_plain(tree)) if whole else _cut_tree(tree, size, limit, original, endless, None)
    if _bytes(text) > limit:
        raise EncodingError("the result changed while it was read")
    return Encoded(text, original, not whole)


# ---------------------------------------------------------------------------------------------- reading


class _Array:
    """A list that was read: as many items as could be shown, the bytes and number of all of them."""

    __slots__ = ("count", "items", "more", "size")

    def __init__(self, items: list[Tree], size: int, count: int, more: bool) -> None:
        self.items = items
        self.size = size
        self.count = count
        self.more = more


class _Object:
    """An object that was read: its values by name, and the bytes of all of it."""

    __slots__ = ("entries", "more", "size")

    def __init__(self, entries: dict[str, Tree], size: int, more: bool) -> None:
        self.entries = entries
        self.size = size
        self.more = more


class _Lost:
    """A part that is not there: the string in its place and why."""

    __slots__ = ("mark", "why")

    def __init__(self, mark: str, why: str) -> None:
        self.mark = mark
        self.why = why


Tree: TypeAlias = object
"""What was read: _Array, _Object, _Lost, or plain JSON data as it was handed in."""

_CYCLE: Final = _Lost("[cycle]", "a value inside itself")
_DEEP: Final = _Lost("[too deep]", f"nested more than {MAX_DEPTH} deep")


class _Refused(Exception):
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


class _Reader:
    """Reads one value into a tree. Keeps of a list no more than `limit` bytes, and counts the rest."""

    __slots__ = ("cycles", "endless", "limit", "lossy", "open", "seen", "work")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.work = MAX_WORK
        self.lossy = False
        self.endless = False
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
        except (_Refused, RecursionError):
            raise
        except Exception as error:
            what = f"is {_named(kind)} that failed with {_type_name(type(error))} while it was read"
            raise _Refused(what, error) from None
        finally:
            self.open.discard(id(value))
        if plain and size > _SIMPLE and self.cycles == cycles:  # what a cycle is depends on the way here
            self.seen[here] = value, tree, size  # the value itself, so that its id is not used again
        return tree, size

    def _measured(self, value: object, depth: int) -> int:
        """Bytes of small plain data, or a negative number if it is not that."""
        try:
            if (least := _least(value, _SIMPLE, depth)) < 0:
                if least == _TOO_LARGE:
                    self.work -= _SIMPLE // 4
                return least
            size = _bytes(_dumps(value))
        except Exception:  # no number, many digits, a lone surrogate, changed meanwhile
            return _NOT_PLAIN
        self.work -= 4 * size
        return size

    def _string(self, text: str) -> tuple[str, int]:
        try:
            size = _bytes(_quote(text))
        except UnicodeEncodeError:
            text = _clean(text)
            size = _bytes(_quote(text))
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
        return value, len(_dumps(value))

    def _lost(self, lost: _Lost) -> tuple[Tree, int]:
        self.lossy = True
        return lost, len(lost.mark) + 2

    def _convert(self, value: object, kind: type, depth: int) -> tuple[Tree, int]:
        if issubclass(kind, Enum):
            return self._again(value.value, kind, depth)  # type: ignore[attr-defined]
        if issubclass(kind, BaseException):
            told = {"exception": _type_name(kind)}
            return told, _bytes(_dumps(told))
        text = _text_of(value, kind)
        if text is None:
            text = _scalar_of(value, kind)
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
            return self._object(list(cast("dict[object, object]", value).items()), depth, plain=True)
        if kind is list or kind is tuple:
            return self._array(iter(cast("list[object]", value)), depth, _LISTED)
        return self._everyday(value, kind, depth)

    def _everyday(self, value: object, kind: type, depth: int) -> tuple[Tree, int]:
        if hasattr(kind, "model_dump"):  # without warnings: pydantic's show the value
            return self._again(_call(value, "model_dump", mode="json", warnings=False), kind, depth)
        if hasattr(kind, "__dataclass_fields__"):
            serializer = getattr(kind, "__pydantic_serializer__", None)
            if serializer is not None:
                return self._again(_call(serializer, "to_python", value, mode="json", warnings=False), kind, depth)
            names = [field.name for field in fields(kind)]
            return self._object(((name, getattr(value, name)) for name in names), depth, names)
        if issubclass(kind, Mapping):
            return self._object(cast("Mapping[object, object]", value).items(), depth)
        if issubclass(kind, Sequence):
            items = cast("Sequence[object]", value)
            if hasattr(kind, "_asdict"):
                return self._object(cast("Mapping[object, object]", _call(value, "_asdict")).items(), depth)
            if hasattr(kind, "keys"):  # a database row, whose items are the values of its keys
                keys = cast("Iterable[object]", _call(value, "keys"))
                return self._object(zip(keys, items, strict=True), depth)
            return self._array(iter(items), depth, _LISTED if issubclass(kind, (list, tuple)) else _CONVERTED)
        if issubclass(kind, MappingView):
            return self._array(iter(cast("Iterable[object]", value)), depth, _CONVERTED)
        if issubclass(kind, AbstractSet):
            return self._set(cast("AbstractSet[object]", value), issubclass(kind, (set, frozenset)), depth)
        if hasattr(kind, "tolist"):
            if getattr(getattr(value, "dtype", None), "kind", "") == "M":  # its own list would be bare nanoseconds
                value = _call(value, "astype", str)
            return self._again(_call(value, "tolist"), kind, depth)
        if hasattr(kind, "item") and hasattr(kind, "dtype"):
            return self._again(_call(value, "item"), kind, depth)
        if hasattr(kind, "__next__"):
            return self._array(cast("Iterator[object]", value), depth, _CONVERTED)
        raise _Refused(f"is {_named(kind)}, which has no JSON form: return plain data, or give the tool encode=")

    def _again(self, value: object, kind: type, depth: int) -> tuple[Tree, int]:
        if type(value) is kind:
            raise _Refused(f"is {_named(kind)} that stands for another one of its kind")
        return self.read(value, depth + 1)

    def _array(self, iterator: Iterator[object], depth: int, cost: int) -> tuple[Tree, int]:
        kept: list[Tree] = []
        size, count, more = 1, 0, False  # a comma an item is one too many, the brackets are two
        while chunk := list(islice(iterator, _CHUNK)):
            if self.work < 0:
                self.lossy = self.endless = more = True
                break
            self.work -= cost * len(chunk)
            room = size <= self.limit
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
                except _Refused as refused:
                    refused.steps.append(f"[{count}]")
                    raise
                size += length + 1
                count += 1
                if room:
                    kept.append(tree)
        return _Array(kept, max(size, 2), count, more), max(size, 2)

    def _object(
        self,
        pairs: Iterable[tuple[object, object]],
        depth: int,
        names: Sequence[str] | None = None,
        plain: bool = False,
    ) -> tuple[Tree, int]:
        """Read pairs; those of a `plain` dict are known to be distinct."""
        entries: dict[str, Tree] = {}
        size, count, more = 1, 0, False
        iterator = iter(pairs)
        while chunk := list(islice(iterator, _CHUNK)):
            if self.work < 0:
                self.lossy = self.endless = more = True
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
                except _Refused as refused:
                    refused.steps.append(f".{names[count]}" if names else f".<key {count}>")
                    raise
                size += name_size + length + 2
                count += 1
        return _Object(entries, max(size, 2), more), max(size, 2)

    def _name(self, key: object, depth: int) -> tuple[str, int]:
        tree, size = self.read(key, depth + 1)
        return (tree, size) if type(tree) is str else self._string(_dumps(_plain(tree)))

    def _set(self, value: AbstractSet[object], finite: bool, depth: int) -> tuple[Tree, int]:
        listed: list[tuple[str, Tree]] = []
        size, more = 1, False
        for item in value:
            if self.work < 0 and not finite:
                self.lossy = self.endless = more = True
                break
            self.work -= _LISTED if finite else _CONVERTED
            try:
                tree, length = self.read(item, depth + 1)
            except _Refused as refused:
                refused.steps.append(".<item of a set>")  # its position would differ from run to run
                raise
            size += length + 1
            listed.append((_dumps(_plain(tree)), tree))
        listed.sort(key=lambda pair: pair[0])
        return _Array([tree for _, tree in listed], max(size, 2), len(listed), more), max(size, 2)


def _plain(tree: Tree) -> object:
    """The whole tree as JSON data."""
    if type(tree) is _Array:
        return [_plain(item) for item in tree.items]
    if type(tree) is _Object:
        return {name: _plain(value) for name, value in tree.entries.items()}
    return tree.mark if type(tree) is _Lost else tree


def _size_of(tree: Tree) -> int:
    if type(tree) is _Array or type(tree) is _Object:
        return tree.size
    return _bytes(_dumps(tree.mark if type(tree) is _Lost else tree))


def _another(name: str, place: int, taken: Collection[str]) -> str:
    """A free name for a second key that became the same text, so that neither is lost: 1 and "1" -> "1" and "1 (2)"."""
    while name in taken:
        name = f"{name} ({place + 1})"
    return name


def _call(value: object, method: str, *arguments: object, **options: object) -> object:
    return cast(object, getattr(value, method)(*arguments, **options))


def _type_name(kind: type) -> str:
    return str(_own_name(kind))[:100]


def _named(kind: type) -> str:
    name = _type_name(kind)
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name} object"


def _text_of(value: object, kind: type) -> str | None:
    """The text that a str or UTF-8 bytes of any kind are; None for everything else."""
    if issubclass(kind, str):
        return str.__str__(cast(str, value))
    if issubclass(kind, (bytes, bytearray, memoryview)):
        try:
            return bytes(cast(bytes, value)).decode()
        except UnicodeDecodeError:
            return None
    return UserString.__str__(cast(UserString, value)) if issubclass(kind, UserString) else None


def _scalar_of(value: object, kind: type) -> str | None:
    """The text of a value that is one thing; None for numbers, containers and what is not known."""
    if issubclass(kind, (date, time)):  # a datetime is a date
        return cast(datetime, value).isoformat()
    if issubclass(kind, (Decimal, UUID)) or any(base.__module__ in _TOLD_BY_STR for base in kind.__mro__):
        return str(value)
    if issubclass(kind, (PurePath, os.DirEntry)):
        return os.fsdecode(cast("os.PathLike[str]", value))
    if issubclass(kind, timedelta):
        return _duration(cast(timedelta, value))
    if issubclass(kind, (bytes, bytearray, memoryview)):
        return "data:application/octet-stream;base64," + b64encode(bytes(cast(bytes, value))).decode()
    if issubclass(kind, complex):
        return str(complex(cast(complex, value))).strip("()")
    return "**********" if hasattr(kind, "get_secret_value") else None


def _duration(value: timedelta) -> str:
    """A duration of ISO 8601, without years and months: P1DT2H, PT1.5S, -PT1S."""
    sign = "-" if value < timedelta(0) else ""
    value = abs(value)
    hours, seconds = divmod(value.seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    fraction = f".{value.microseconds:06}".rstrip("0") if value.microseconds else ""
    day = f"{value.days}D" if value.days else ""
    clock = (f"{hours}H" if hours else "") + (f"{minutes}M" if minutes else "")
    clock += f"{seconds}{fraction}S" if seconds or fraction or not (day or clock) else ""
    return f"{sign}P{day}" + (f"T{clock}" if clock else "")


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
        raise _Refused(f"is {_named(kind)}, which has no JSON form: {hint}")


# ---------------------------------------------------------------------------------------------- cutting


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
        if type(tree) is _Array:
            shown = self._list(tree.items, tree.count, tree.more, size, room, path)
        elif type(tree) is _Object:
            shown = self._object(tree.entries, tree.more, room, path)
        elif type(tree) is _Lost and size <= room:
            self.notes[path] = tree.why
            return tree.mark, size
        elif size <= room:
            return tree, size
        elif kind is list or kind is tuple:
            items = cast("list[Tree]", tree)
            shown = self._list(items, len(items), False, size, room, path)
        elif type(tree) is dict:
            shown = self._object(tree, False, room, path)
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
            share, length = left - comma, _size_of(item)
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

    def _object(self, entries: dict[str, Tree], more: bool, room: int, path: str) -> tuple[object, int] | None:
        """All keys if each value can have _PART bytes, the small values staying whole; else the entries that fit."""
        shown: dict[str, object] = {}
        lengths: list[int] = []
        cap: int | None = None
        values_room = room - 1 - len(entries)
        if values_room >= 4 * len(entries):  # else there is no need to look at all of them
            values_room -= sum(_bytes(_quote(name)) + 1 for name in entries)
            lengths = [_size_of(item) for item in entries.values()]
            if sum(min(length, _PART) for length in lengths) <= values_room:
                cap = fit_batch(lengths, values_room)
                cap = values_room if cap is None else cap
        left, spare, misses = room - 2, 0, 0
        for place, (name, item) in enumerate(entries.items()):
            key = _bytes(_quote(name)) + (2 if shown else 1)
            length = lengths[place] if lengths else _size_of(item)
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
        count, more = self._whole(path, "keys", len(entries)), more or self._was_endless(path)
        if not shown and (count or more):
            return None
        self._note(path, len(shown), count, "keys", more)
        return shown, room - left

    def _string(self, text: str, room: int, path: str) -> tuple[object, int] | None:
        total = self._whole(path, "bytes", _bytes(text))
        if self.again:
            total = max([total, *_marked(text)])
        short = _shorten(text, total, room - 2, _quoted_bytes)
        if short is None:
            return None
        self._note(path, short[1], total, "bytes", False)
        return short[0], _quoted_bytes(short[0]) + 2

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
        entries = [f"{_quote(path or '.')}:{_quote(self.notes[path])}" for path in places]
        told = _dropped(entries, self.more)
        if _bytes(told) > room:
            left = room - len(_dropped([""], self.more + len(entries)))
            sizes = accumulate(_bytes(entry) + 1 for entry in entries)
            fitting = sum(size - 1 <= left for size in sizes)
            told = _dropped(entries[:fitting], self.more + len(entries) - fitting)
        return told if _bytes(told) <= room else ""


def _dropped(entries: list[str], more: int) -> str:
    named = f',"dropped":{{{",".join(entries)}}}' if entries else ""
    return f'{named},"more_places":{more}' if more else named


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() and len(name) <= 40 else f"[{_quote(name[:40])}]"


def _marker(cut: int, total: int) -> str:
    return f"[... {cut} of {total} bytes cut ...]"


def _marked(text: str) -> list[int]:
    """The whole sizes that the markers in a text tell."""
    return [int(total) for total in _MARKER.findall(text)]


def _shorten(text: str, total: int, room: int, cost: Callable[[str], int]) -> tuple[str, int] | None:
    """Head, marker and tail of a text that costs more than `room`, and the bytes that were kept of it."""
    room -= len(_marker(total, total))
    if room < 0:
        return None
    tail_room = room // 5
    head = text[: _span(text, room - tail_room, cost, False)]
    tail = text[len(text) - _span(text, tail_room, cost, True) :]
    kept = _bytes(head) + _bytes(tail)
    return head + _marker(total - kept, total) + tail, kept


def _span(text: str, room: int, cost: Callable[[str], int], from_end: bool) -> int:
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


def _cut_text(text: str, total: int, limit: int) -> str:
    short = _shorten(text, total, limit, _bytes)
    return short[0] if short else _CUT


def _cut_tree(
    tree: Tree, size: int, limit: int, original: int, at_least: bool, known: Mapping[str, str] | None, more: int = 0
) -> str:
    opening = f'{{"truncated":{{"original_bytes":{original}' + (',"at_least":true' if at_least else "")
    room = limit - len(opening) - len('},"result":}')
    cutter = _Cutter(known, more)
    notes_room = min(limit // 4, 72 + limit // 64)  # one place at least, where the limit allows it
    part = cutter.fit(tree, size, room - notes_room, "") or cutter.fit(tree, size, room, "")
    if part is None:
        return opening + "}}"
    cutter.carry(part[0], "")
    return f'{opening}{cutter.told(room - part[1])}}},"result":{_dumps(part[0])}}}'


# ---------------------------------------------------------------------------------------------- JSON text


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _float(digits: str) -> float:
    number = float(digits)
    if Decimal(digits) != Decimal(repr(number)):
        raise ValueError("a number that a float cannot hold")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError("not a number")


_decode: Final = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_float, parse_constant=_constant).decode


def _load(text: str) -> object:
    """The data of a JSON document that nothing would be lost of by writing it anew; else _MISSING."""
    try:
        return _decode(text)
    except (ValueError, ArithmeticError, RecursionError):
        return _MISSING


def _unwrap(loaded: object, size: int) -> tuple[object, int, bool, dict[str, str] | None, int]:
    """The value in a text that was cut before: what is left of it, and what its note says."""
    if type(loaded) is dict and loaded.keys() == {"truncated", "result"} and type(loaded["truncated"]) is dict:
        note = loaded["truncated"]
        original, dropped, more = note.get("original_bytes"), note.get("dropped", {}), note.get("more_places", 0)
        if type(original) is int and type(more) is int and type(dropped) is dict:
            known = {"" if place == "." else place: str(why) for place, why in dropped.items()}
            return loaded["result"], min(max(original, 0), _LARGEST), note.get("at_least") is True, known, more
    return loaded, size, False, None, 0
