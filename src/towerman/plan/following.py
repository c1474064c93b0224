"""A path is followed into a result, and what is found there becomes data of the reader's own.

Theory. A reference means a result as JSON shows it: lists, objects, text and numbers. Plain data is looked into where
it lies; a model, a dataclass or anything else that a handler may return is turned into its JSON form first (bounds). A
named tuple is a list whose members have names too. Text that is itself a whole JSON document, as many tools return it,
is looked into as that document, but only where a path leads on from it: handed on whole, it stays the text that it was.

House rules. What is handed on is a copy: nothing that its reader does changes the result it came from, nor what another
reader gets. No recursion: data and paths may be deep. A reason tells kinds and positions, never a name or a value.

Not here: how references are written (references).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeAlias, cast

EACH: Final = -1
"""The segment of a path that stands for every member of a list; an index is never below 0. Of what is no list it is
that thing itself."""

AGREED: Final = -2
"""The segment that stands for what all members of a list lead to, where that is the same; of what is no list it is that
thing itself."""

MAX_PASTED: Final = 1 << 24
"""Most bytes of one result that are pasted into a text."""

Path: TypeAlias = tuple[str | int, ...]
"""Names, indexes, `EACH` and `AGREED`, from the outside in."""

_ATOMS: Final = frozenset({str, int, float, bool, type(None)})
_LARGEST: Final = 1 << 40  # no bound in practice: what is handed on whole is bounded where results are made
_NOTHING: Final = object()


class CannotFollow(Exception):
    """A path that does not lead through a result, or a part of it that has no JSON form."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Follower:
    """Follows paths into the results that one call refers to; what had to be read for one path is kept for the next."""

    __slots__ = ("_kept", "_read")

    def __init__(self) -> None:
        self._read: dict[int, object] = {}
        self._kept: list[object] = []  # so that no id is used again while this lives

    def follow(self, value: object, path: Path) -> object:
        """What the path leads to; still the producer's own, to be copied.

        Raises:
            CannotFollow: it leads nowhere.
        """
        # Behind an EACH there are many ends. `shapes` says for each of them how many came of it (-1: it was no list),
        # and at which place of the path they have to agree (0: they need not).
        ends = [value]
        shapes: list[tuple[list[int], int]] = []
        for place, segment in enumerate(path, 1):
            if type(segment) is int and segment < 0:
                shape: list[int] = []
                inner: list[object] = []
                for end in ends:
                    members = self._members(end)
                    if members is None:
                        shape.append(-1)
                        inner.append(end)
                    else:
                        shape.append(len(members))
                        inner += members
                shapes.append((shape, place if segment == AGREED else 0))
                ends = inner
            else:
                ends = [self._step(end, segment, place) for end in ends]
        for shape, agreed in reversed(shapes):
            left = iter(ends)
            ends = [
                next(left) if count < 0 else _members([next(left) for _ in range(count)], agreed) for count in shape
            ]
        return ends[0]

    def _step(self, value: object, segment: str | int, place: int) -> object:
        """One segment further."""
        if type(value) is dict and type(segment) is str and segment in value:
            return value[segment]
        opened = self._opened(value)
        if type(opened) is dict:
            if type(segment) is str:
                if segment in opened:
                    return opened[segment]
                _lost(place, "is a name that the result does not have there")
            _lost(place, "is an index, and the result has an object there")
        if isinstance(opened, list | tuple):
            if type(segment) is str and segment in getattr(opened, "_fields", ()):
                return cast(object, getattr(opened, segment))
            index = _index(segment)
            if index is None:
                _lost(place, "is a name, and the result has a list there")
            if index >= len(opened):
                _lost(place, "is an index past the end of the list that the result has there")
            return cast(object, opened[index])
        _lost(place, "leads on from something that is no list and no object")

    def _members(self, value: object) -> Sequence[object] | None:
        """The members of a list; None for what is none."""
        if type(value) is dict:
            return None
        opened = self._opened(value)
        return opened if isinstance(opened, list | tuple) else None

    def _opened(self, value: object) -> object:
        """A value as something that a path can lead through."""
        kind = type(value)
        if kind is list or _is_tuple(value, kind) or (kind is dict and _named(value)):
            return value
        found = self._read.get(id(value), _NOTHING)
        if found is _NOTHING:
            self._kept.append(value)
            found = value
            if kind not in _ATOMS:
                found = json_form(value)
            if type(found) is str:
                found = _document(found)
            self._read[id(value)] = found
        return found


def _members(found: list[object], agreed: int) -> object:
    """What the members of a list lead to: all of it, or, where they have to agree, that of one of them."""
    if not agreed:
        return found
    if not found:
        _lost(agreed, "is to be the same of every member, and the result has an empty list there")
    first = found[0]
    kind = type(first)
    known = first if kind in _ATOMS else pasted(first)
    for other in found[1:]:
        if type(other) is not kind or (other if kind in _ATOMS else pasted(other)) != known:
            _lost(agreed, "is to be the same of every member of a list, and they differ; name one by its index")
    return first


def _index(segment: str | int) -> int | None:
    """The index that a segment is on a list: a number, or its digits in a pointer."""
    if type(segment) is int:
        return segment
    text = cast(str, segment)
    if text.isascii() and text.isdigit() and len(text) <= 18 and (text == "0" or text[0] != "0"):
        return int(text)
    return None


def _lost(place: int, why: str) -> NoReturn:
    raise CannotFollow(f"part {place} of its path {why}")


def _document(text: str) -> object:
    """The list or object that a text is as JSON, else the text."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        found = json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text
    return found if type(found) is dict or type(found) is list else text


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")  # which of the two is meant is not known
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError("not a number of JSON")


def json_form(value: object, limit: int = _LARGEST) -> object:
    """The JSON form of a value: as the model is shown it.

    Raises:
        CannotFollow: it has none, or not a whole one.
    """
    from towerman.bounds.reading import Lost, Reader, Refused, plain_data  # `import towerman` does without

    try:
        reader = Reader(limit, patient=True)
        tree, size = reader.read(value, 0)
        if not reader.lossy and size <= limit and type(tree) is not Lost:
            return plain_data(tree)
        reason = "a part of the result is nested too deep, stands inside itself or is too large"
    except Refused as refused:
        failed = refused.cause is not None
        reason = "a part of the result failed while it was read" if failed else "a part of the result has no JSON form"
    except Exception:  # of an object that does not let itself be looked at
        reason = "a part of the result failed while it was read"
    raise CannotFollow(reason)


def copied(
    value: object,
    text: Callable[[str], str] | None = None,
    key: Callable[[str], str] | None = None,
    foreign: Callable[[object], object] | None = json_form,
) -> object:
    """A copy as plain JSON data: dicts with text for keys, lists, text, numbers, True, False and None.

    Args:
        value: any value; tuples become lists.
        text: what to make of each text.
        key: what to make of each key.
        foreign: what to make of a thing that is no plain data; None leaves it as it is.

    Raises:
        CannotFollow: a part of it has no JSON form.
    """
    root: list[object] = [None]
    made: dict[int, object] = {}
    kept: list[object] = []  # so that no id is used again while `made` knows it
    stack: list[tuple[object, dict[str, object] | list[object], str | int]] = [(value, root, 0)]
    while stack:
        source, into, place = stack.pop()
        kind = type(source)
        new: object
        if kind is str:
            new = source if text is None else text(cast(str, source))
        elif kind in _ATOMS:
            new = source
        elif id(source) in made:
            new = made[id(source)]
        elif kind is dict and _named(source):
            pairs = list(cast("dict[str, object]", source).items())
            if key is not None:
                pairs = [(key(name), inner) for name, inner in pairs]
            new = entries = cast("dict[str, object]", dict.fromkeys(name for name, _ in pairs))
            stack += [(inner, entries, name) for name, inner in pairs]
        elif kind is list or _is_tuple(source, kind):
            inside = list(cast("Sequence[object]", source))
            new = items = cast("list[object]", [None] * len(inside))
            stack += [(inner, items, index) for index, inner in enumerate(inside)]
        elif foreign is None:
            new = source
        else:
            kept.append(source)
            stack.append((foreign(source), into, place))
            continue
        if kind not in _ATOMS:
            made[id(source)] = new
            kept.append(source)
        into[place] = new  # type: ignore[index]
    return root[0]


def _named(value: object) -> bool:
    """Whether all keys of a dict are text."""
    return all(type(key) is str for key in cast("dict[object, object]", value))


def _is_tuple(value: object, kind: type) -> bool:
    """Whether it is a tuple, plain or with names for its members."""
    return kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields"))


def pasted(value: object) -> str:
    """A value as a part of a text: text as it is, everything else as compact JSON.

    Raises:
        CannotFollow: it has no JSON form, or takes more than MAX_PASTED bytes.
    """
    if type(value) is str:
        return value
    from towerman.bounds.jsontext import dumps

    plain = json_form(copied(value), MAX_PASTED)
    return plain if type(plain) is str else dumps(plain)
