"""The way in: a value, or a text that was made of one, and its limit.

Theory. Everyday small values take a short way: where the least that they can take fits the limit, they are written at
once, and are done if that fits (true, false, null and a float always do). All else is read and, where it is too large,
cut. Text that is a JSON document is cut as JSON too (its white space goes first, which may be enough).

House rules. Both ways give the same bytes. Nothing but EncodingError is raised, and it holds on to no value.

Not here: how a value is read (reading) and what is left of it (cutting).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, cast

from towerman.bounds.cutting import NO_HINT, Hint, cut_text, cut_tree, marked_sizes
from towerman.bounds.jsontext import MISSING, clean, dumps, read_json, utf8_bytes
from towerman.bounds.reading import Reader, Refused, Tree, plain_data, room_left
from towerman.bounds.values import text_of, type_name
from towerman.errors import TowermanError

MIN_BYTES: Final = 64
"""The smallest limit that can be kept: the note alone needs this much. A smaller one counts as this."""

MAX_PARSED: Final = 1 << 23
"""Bytes of text up to which a cut tries first whether the text is a JSON document."""

AT_ONCE: Final = 1 << 18
"""Bytes of a text up to which that is tried at once where somebody stands still for it and the whole is wanted."""

EMPTY: Final = "(empty result)"
"""Stands for None and for blank text, which providers refuse as content."""

Encoder: TypeAlias = Callable[[object], object]
_READ_AGAIN: Final = frozenset({dict, list, tuple, set, frozenset})  # reading them once more gives the same
_LARGEST: Final = 10**15 - 1  # the largest size that is told: with more digits, the note would not fit in MIN_BYTES


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
        original_bytes: UTF-8 bytes of the whole, before it was cut; a lower bound where it was not read to its end.
        cut: something of the value is missing from the text.
    """

    text: str
    original_bytes: int
    cut: bool

    def __repr__(self) -> str:
        return f"Encoded({len(self.text)} characters, original_bytes={self.original_bytes}, cut={self.cut})"


class Keep(NamedTuple):
    """The whole is wanted too, where it does not fit.

    Args:
        most: bytes up to which it is.
        patient: nobody stands still for it.
    """

    most: int
    patient: bool


class Large(Encoded):
    """What does not fit, whole: it is still to be cut.

    Attributes:
        whole: all of it: text, or a compact JSON document. None: it was not read to its end, since somebody stands
            still for that; `value` is to be encoded again, by one who has the time.
        document: the whole is a JSON document.
        value: what to encode.
        complete: nothing of the value is missing from the whole.
        at_least: `original_bytes` is a lower bound.
    """

    __slots__ = ("_size", "_tree", "at_least", "complete", "document", "value", "whole")

    whole: str | None
    document: bool
    value: object
    complete: bool
    at_least: bool
    _tree: Tree
    _size: int

    def cut_to(self, limit: int, hint: Hint = NO_HINT) -> str:
        """What the model is sent of it, within a limit that it does not fit.

        Args:
            limit: the most bytes of it; less than MIN_BYTES counts as MIN_BYTES.
            hint: what is said besides; it must leave room.
        """
        limit = max(limit, MIN_BYTES)
        if not self.document:
            return cut_text(cast(str, self.whole), self.original_bytes, limit, hint)
        tree, size = self._tree, self._size
        if tree is None:
            tree, size = Reader(limit).read(json.loads(cast(str, self.whole)), 0)
        return cut_tree(tree, size, limit, self.original_bytes, self.at_least, None, 0, hint)

    def __repr__(self) -> str:
        return f"Large(original_bytes={self.original_bytes}, complete={self.complete})"


def _large(
    original: int,
    whole: str | None,
    *,
    document: bool,
    tree: Tree = None,
    size: int = 0,
    complete: bool = True,
    at_least: bool = False,
    value: object = None,
) -> Large:
    made = Large.__new__(Large)
    given = {
        "text": "",
        "original_bytes": original,
        "cut": True,
        "whole": whole,
        "document": document,
        "value": value,
        "complete": complete,
        "at_least": at_least,
        "_tree": tree,
        "_size": size,
    }
    for name, one in given.items():
        object.__setattr__(made, name, one)
    return made


_NOTHING: Final = Encoded(EMPTY, 0, False)
_TRUE: Final = Encoded("true", 4, False)
_FALSE: Final = Encoded("false", 5, False)


def encode(value: object, max_bytes: int, encoder: Encoder | None = None, keep: Keep | None = None) -> Encoded:
    """Write a handler's value for the model, within its size limit.

    Iterators are consumed here, and methods of the handler's objects called, in the caller's thread.

    Args:
        value: anything that a handler returned.
        max_bytes: the limit in UTF-8 bytes; less than MIN_BYTES counts as MIN_BYTES.
        encoder: the tool's own `encode=`: takes the value, returns text or a value that is encoded in its place.
        keep: what does not fit comes as a `Large`, with the whole of it, up to so many bytes; larger still, or where
            it has no end, it is cut.

    Raises:
        EncodingError: the value, or a part of it, has no JSON form, or failed while it was read.
    """
    try:
        if encoder is None:
            kind = type(value)
            if kind is str:
                text = cast(str, value)
                if len(text) <= max_bytes and text and not text.isspace():
                    size = utf8_bytes(text)
                    if size <= max_bytes:
                        return _encoded(text, size, False)
            elif kind is dict or kind is list:
                if room_left(value, max_bytes, 0) >= 0:
                    text = dumps(value)
                    size = utf8_bytes(text)
                    if size <= max_bytes:
                        return _encoded(text, size, False)
            elif kind is int:
                text = str(value)
                if len(text) <= max_bytes:
                    return _encoded(text, len(text), False)
            elif value is None:
                return _NOTHING
            elif kind is bool:
                return _TRUE if value else _FALSE
            elif kind is float:
                text = dumps(value)
                return _encoded(text, len(text), False)
    except Exception:  # no number, many digits, a lone surrogate, changed meanwhile: found out on the long way
        pass
    failure: EncodingError
    try:
        limit = max(max_bytes, MIN_BYTES)
        if encoder is not None:
            value = _run_encoder(encoder, value)
        if value is None:
            return _NOTHING
        content = text_of(value, type(value))
        if content is not None:
            return _encode_text(content, limit, keep=keep)
        return _encode_value(value, limit, keep=keep)
    except EncodingError as error:
        failure = error
    except Refused as refused:
        failure = EncodingError(refused.message(), refused.cause)
    except Exception as error:
        failure = EncodingError(f"reading the result failed with {type_name(type(error))}", error)
    try:
        raise failure  # here, so that what the handler's object raised does not travel along as context
    finally:
        del failure  # its traceback holds this frame, and this frame the value


def recut(value: object, text: str, max_bytes: int, encoder: Encoder | None = None, hint: Hint = NO_HINT) -> str:
    """The same result again under a smaller limit.

    Cuts the text, since the value may have changed, or be used up; only text is cut anew from the value, so that it
    comes out as if the smaller limit had been the first. Where the text was cut before, its note is carried on.

    Args:
        value: what the handler returned; None for a text that was not made from a value.
        text: what `encode` made of it under a limit at least as large.
        max_bytes: the limit in UTF-8 bytes; less than MIN_BYTES counts as MIN_BYTES.
        encoder: the tool's own `encode=`; it is not called again.
        hint: what is said besides, where something is cut; it must leave room.
    """
    limit = max(max_bytes, MIN_BYTES)
    size = utf8_bytes(text)
    if size <= limit:
        return text
    markers = marked_sizes(text)
    if encoder is None and type(value) in (str, bytes) and (content := text_of(value, type(value))) is not None:
        content = clean(content)
        if text == content or utf8_bytes(content) in markers:
            return _encode_text(content, limit, hint).text
    loaded = read_json(text)
    if loaded is MISSING:
        return cut_text(text, max([size, *markers]), limit, hint)
    result, original, at_least, known, more = _unwrap(loaded, size)
    tree, tree_size = Reader(limit).read(result, 0)
    return cut_tree(tree, tree_size, limit, original, at_least, known, more, hint)


def _encoded(text: str, original_bytes: int, cut: bool) -> Encoded:
    draft = _Draft(text, original_bytes, cut)
    draft.__class__ = Encoded
    return cast(Encoded, draft)


def _run_encoder(encoder: Encoder, value: object) -> object:
    try:
        return encoder(value)
    except Exception as error:
        failure = EncodingError(f"the tool's encode= failed with {type_name(type(error))}", error)
    try:
        raise failure
    finally:
        del failure


def _encode_text(text: str, limit: int, hint: Hint = NO_HINT, keep: Keep | None = None) -> Encoded:
    if not text or text.isspace():
        return Encoded(EMPTY, utf8_bytes(text), False)  # no kind of blank is a surrogate
    text = clean(text)
    size = utf8_bytes(text)
    if size <= limit:
        return Encoded(text, size, False)
    kept = keep is not None and size <= keep.most
    loaded: object = MISSING
    if size <= MAX_PARSED and text.lstrip()[:1] in "{[":
        if kept and size > AT_ONCE and not cast(Keep, keep).patient:
            return _large(size, None, document=True, value=text)
        loaded = read_json(text)
    if loaded is MISSING:
        if kept:
            return _large(size, text, document=False)
        return Encoded(cut_text(text, size, limit, hint), size, True)
    return _encode_value(loaded, limit, size, hint, keep)


def _encode_value(
    value: object, limit: int, original: int | None = None, hint: Hint = NO_HINT, keep: Keep | None = None
) -> Encoded:
    reader = Reader(limit) if keep is None else Reader(limit, keep.most, patient=keep.patient)
    tree, size = reader.read(value, 0)
    whole = size <= limit and not reader.lossy
    at_least = reader.endless and original is None
    original = size if original is None else original
    at_least = at_least or original > _LARGEST
    original = min(original, _LARGEST)
    if keep is not None and not whole and size > limit:
        if reader.endless and not keep.patient and not reader.used_up and type(value) in _READ_AGAIN:
            return _large(original, None, document=True, value=value, at_least=at_least)
        everything = dumps(plain_data(tree)) if size <= keep.most else ""
        if 0 < utf8_bytes(everything) <= keep.most:
            if size > AT_ONCE and not (keep.patient or reader.lossy):
                tree = None  # which holds parts of the value, and the cut is made later
            return _large(
                original,
                everything,
                document=True,
                tree=tree,
                size=size,
                complete=not reader.lossy,
                at_least=at_least,
            )
    text = dumps(plain_data(tree)) if whole else cut_tree(tree, size, limit, original, at_least, None, 0, hint)
    if utf8_bytes(text) > limit:
        raise EncodingError("the result changed while it was read")
    return Encoded(text, original, not whole)


def _unwrap(loaded: object, size: int) -> tuple[object, int, bool, dict[str, str] | None, int]:
    """The value in a text that was cut before: what is left of it, and what its note says."""
    if type(loaded) is dict and loaded.keys() == {"truncated", "result"} and type(loaded["truncated"]) is dict:
        note = loaded["truncated"]
        original, dropped, more = note.get("original_bytes"), note.get("dropped", {}), note.get("more_places", 0)
        if type(original) is int and type(more) is int and type(dropped) is dict:
            known = {"" if place == "." else place: str(why) for place, why in dropped.items()}
            return loaded["result"], min(max(original, 0), _LARGEST), note.get("at_least") is True, known, more
    return loaded, size, False, None, 0
