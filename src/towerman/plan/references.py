"""References in the arguments of a plan: read once, linked to steps, and later replaced by results.

Theory. A reference names a step and a path into its result. As a value of its own, `{"$ref": "a#/items/0"}` or a text
that is nothing but `${a.items[0]}`, it is replaced by what is found there, which keeps its type. Inside longer text it
is pasted. All of a plan's references are read and linked before anything runs, so a plan that cannot be followed is
refused whole (G5); when a step starts, only the places that were found then are filled in. What is filled in is never
read again, so nothing that a tool returns can become a reference.

The syntax. `a` is a step's id, compared exactly; of several that fit, the longest is meant.

    a                     the whole result
    a#/items/0/id         a JSON pointer (RFC 6901; `~1` is a `/`, `~0` a `~`)
    a.items[0].id         names and indexes; `["a.b"]`, a JSON string, for a name with other characters
    a[*].id               of every member of a list; of what is no list, of that itself
    a[=].id               the same, where all members have to agree: that one value, and no list

`$$` is a `$`. A key of two or more `$` and `ref` loses one of them, so `$$ref` is a key `$ref`. A `$` before anything
else is itself: prices stay prices. Keys are not searched for references.

House rules. No recursion: arguments may be nested as deep as the text could hold. A message names the place of a
reference by its argument and the keys that are plain words; it never repeats what stands there. `repr` shows counts.

Not here: what the ids of needs come to (needs), how a path is followed into a result (following), planners' own syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from towerman.errors import TowermanError
from towerman.plan.following import AGREED, EACH, CannotFollow, Follower, Path, copied, pasted
from towerman.plan.needs import Miss, PlanRefused, index_ids, merge_needs, named

_MARK: Final = re.compile(r"\$\$|\$\{([^}]*)\}|\$\{")
_MEANT: Final = re.compile(r"\$(?=[${])")
_KEY: Final = re.compile(r"\$+ref")
_HEAD: Final = re.compile(r"[^.\[#]*")
_SEPARATOR: Final = re.compile(r"[.\[#]")
_SEGMENT: Final = re.compile(r'\.([^.\[\]#]+)|\[(0|[1-9][0-9]{0,17})\]|\[([*=])\]|\[(?=")')
_SIGNS: Final = {EACH: "[*]", AGREED: "[=]"}
_NOT_BARE: Final = re.compile(r"[.\[\]#{}$]")
_TILDE: Final = re.compile(r"~(?![01])")
_STRING: Final = json.JSONDecoder().raw_decode
_WORD: Final = 32  # characters of a key that a message shows
_SHOWN: Final = 8  # places in one message
_ATOMS: Final = frozenset({int, float, bool, type(None)})


@dataclass(frozen=True, slots=True, repr=False)
class Reference:
    """What stands in an argument in place of a value.

    Args:
        step: index of the step whose result is meant.
        path: where in that result: names, indexes, `EACH` for every member of a list, `AGREED` for what is the same of
            all of them; empty for the whole.
    """

    step: int
    path: Path = ()

    def __repr__(self) -> str:
        return f"Reference(step={self.step}, path={len(self.path)})"


class UnresolvedReference(TowermanError):
    """A reference whose path does not lead through the result that came.

    Args:
        reference: the one that failed.
        reason: why, as the end of a sentence; holds no value and no name.
    """

    def __init__(self, reference: Reference, reason: str) -> None:
        super().__init__(reference, reason)
        self.reference = reference
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _Text:
    """Longer text with references in it."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[str | Reference, ...]) -> None:
        self.parts = parts


class _Object:
    """An object with something to fill in, or to take away, inside."""

    __slots__ = ("entries",)

    def __init__(self, entries: tuple[tuple[str, Template], ...]) -> None:
        self.entries = entries


class _List:
    """A list with something to fill in inside."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[Template, ...]) -> None:
        self.items = items


Template: TypeAlias = object
"""A Reference, _Text, _Object or _List; anything else stands for itself."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Bound:
    """The arguments of one step, with the places where results are filled in.

    Attributes:
        references: every reference, each once, in the order in which they stand there.
        paths: name of an argument -> the references inside it; only arguments that have some.
        arguments: name of an argument -> what is filled in for it; not for reading.
    """

    references: tuple[Reference, ...]
    paths: Mapping[str, tuple[Reference, ...]]
    arguments: Mapping[str, Template]

    @property
    def open(self) -> frozenset[str]:
        """Names of the arguments whose value is not known before other steps have run."""
        return frozenset(self.paths)

    def parts(self) -> Iterator[Bound]:
        """Each argument by itself."""
        for name, each in self.arguments.items():
            references = self.paths.get(name, ())
            yield Bound(references, {name: references} if references else {}, {name: each})

    def known(self) -> dict[str, object]:
        """The arguments that hold no reference, as they will be: a copy, escapes taken away."""
        filler = _Filler(_never)
        return {name: filler.fill(each) for name, each in self.arguments.items() if name not in self.paths}

    def resolve(self, value_of: Callable[[int], object]) -> dict[str, object]:
        """The arguments with every reference replaced. All of it is new: nothing is shared with results or the plan.

        Args:
            value_of: the value of a step's result, asked for once for each step that is referred to.

        Raises:
            UnresolvedReference: a path does not lead through a result, or what is found has no JSON form.
        """
        filler = _Filler(value_of)
        return {name: filler.fill(each) for name, each in self.arguments.items()}

    def __repr__(self) -> str:
        return f"Bound({len(self.references)} references, {len(self.paths)} of {len(self.arguments)} arguments open)"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Linked:
    """A whole plan, read and found good.

    Attributes:
        needs: for each step the indexes that it waits for: those that it names, then those that it refers to.
        bound: for each step its arguments, None where there is nothing to fill in and no escape to take away.
    """

    needs: list[tuple[int, ...]]
    bound: list[Bound | None]

    def __repr__(self) -> str:
        return f"Linked({len(self.needs)} steps, {sum(each is not None for each in self.bound)} with references)"


def read_references(
    ids: Sequence[str],
    arguments: Sequence[Mapping[str, object] | None],
    needs: Sequence[Sequence[str]],
    *,
    ordered: bool = False,
    numbered: bool = False,
) -> Linked | None:
    """Read the references of a whole plan and link its steps, or refuse it before anything runs (G5).

    Args:
        ids: the id of each step, in the plan's order; one without (`""`) cannot be named.
        arguments: for each step its arguments as JSON data, or None where they could not be read.
        needs: for each step the ids that it names as needed; a single string is one id.
        ordered: the form of the plan forbids to name a later step.
        numbered: ids are numbers of the form, so that one which is not there is out of range.

    Returns:
        The links; None when no step needs or refers to anything and there is no escape.

    Raises:
        PlanRefused: `duplicate_call_id` for a repeated id; then `bad_reference` for a malformed reference; then
            `unknown_dependency`, or `bad_reference` where ids are numbers, for an id that is not there; then
            `bad_reference` for a later step where that is forbidden; then `dependency_cycle`.
        ValueError: lengths that differ.
    """
    size = len(ids)
    if len(arguments) != size or len(needs) != size:
        raise ValueError(f"arguments: {len(arguments)} entries, needs: {len(needs)} entries, for {size} steps")
    where = index_ids(ids)
    reading = _Reading(where)
    bound: list[Bound | None] = []
    referred: list[Sequence[int]] = []
    for index, given in enumerate(arguments):
        found = reading.read(index, given) if given else None
        bound.append(found)
        referred.append(() if found is None else tuple(dict.fromkeys(each.step for each in found.references)))
    if reading.malformed:
        raise _malformed(ids, reading.malformed)
    linked = merge_needs(ids, where, needs, referred, reading.missing, ordered=ordered, numbered=numbered)
    return Linked(linked, bound) if any(linked) or any(each is not None for each in bound) else None


def whole_value(step: int, value_of: Callable[[int], object]) -> object:
    """The result of a step as plain JSON data: a copy, as a reference to the whole of it gives.

    Raises:
        UnresolvedReference: it has no JSON form.
    """
    return _Filler(value_of).fill(Reference(step))


def escape(value: object) -> object:
    """Write JSON data so that nothing in it is read as a reference: `resolve` gives it back as it was.

    Args:
        value: plain JSON data; a copy is returned.
    """
    return copied(value, escape_text, escape_key)


def escape_text(text: str, *, whole: bool = True) -> str:
    """Write a text so that nothing in it is read as a reference.

    Args:
        text: what is meant.
        whole: it stands alone; False for a piece beside which references are written, which could meet its last `$`.
    """
    if "$" not in text:
        return text
    return _MEANT.sub("$$", text) if whole else text.replace("$", "$$")


def escape_key(key: str) -> str:
    """Write a key so that it is read as it is."""
    return f"${key}" if _KEY.fullmatch(key) else key


def written(step: str, path: Path) -> str:
    """A reference in this syntax, for `{"$ref": ...}` and between `${` and `}`.

    Args:
        step: the step's id.
        path: names, indexes, `EACH` and `AGREED`.
    """
    parts = [step]
    for segment in path:
        if type(segment) is int:
            parts.append(_SIGNS.get(segment) or f"[{segment}]")
        else:
            name = cast(str, segment)
            if name and not _NOT_BARE.search(name):
                parts.append(f".{name}")
            else:
                quoted = json.dumps(name).replace("}", "\\u007d")
                parts.append(f"[{quoted}]")
    return "".join(parts)


class _Bad(Exception):
    """A reference that is malformed: what is wrong with it."""


class _Reading:
    """Reads the arguments of one step after another, and keeps what is wrong."""

    __slots__ = ("_index", "_keys", "_lengths", "_where", "malformed", "missing", "references")

    def __init__(self, where: Mapping[str, int]) -> None:
        self._where = where
        self._lengths = {len(name) for name in where}
        self._index = 0
        self._keys: list[str | int] = []
        self.references: list[Reference] = []
        self.missing: list[Miss] = []
        self.malformed: list[tuple[int, str]] = []

    def read(self, index: int, arguments: Mapping[str, object]) -> Bound | None:
        """The arguments of one step; None where there is nothing to do in them."""
        if "$ref" in arguments:
            self.malformed.append((index, "arguments: a reference stands for one argument, not for all of them"))
            return None
        if not any(map(_marked, arguments.values())) and not any(map(_is_key, arguments)):
            return None
        self._index = index
        paths: dict[str, tuple[Reference, ...]] = {}
        templates: dict[str, Template] = {}
        every: dict[Reference, None] = {}
        changed = False
        for name, value in arguments.items():
            self.references = []
            self._keys = [name]
            template, touched = (value, False) if type(value) in _ATOMS else self._template(value)
            if _is_key(name):
                name, touched = name[1:], True
            templates[name] = template
            changed = changed or touched
            if self.references:
                paths[name] = tuple(dict.fromkeys(self.references))
                every.update(dict.fromkeys(self.references))
        return Bound(tuple(every), paths, templates) if changed else None

    def _template(self, root: object) -> tuple[Template, bool]:
        """A value with its references read, and whether it differs from what was given. Without recursion."""
        frames: list[_Frame] = []
        keys = self._keys
        seen: dict[int, tuple[Template, bool]] = {}
        kept: list[object] = []  # so that no id is used again while `seen` knows it
        value = root
        while True:
            done: tuple[Template, bool] | None
            if isinstance(value, str):
                done = self._text(value)
            elif type(value) in _ATOMS or not isinstance(value, dict | list | tuple | Mapping):
                done = value, False
            elif isinstance(value, Mapping) and "$ref" in value:
                done = self._whole(value), True
            else:
                # What is met again is as it was; inside itself it stands for itself, and is refused with the call.
                done = seen.get(id(value))
                if done is None:
                    seen[id(value)] = value, False
                    kept.append(value)
                    frames.append(_Frame(value))
                    keys.append("")
            while True:
                if done is not None:
                    if not frames:
                        return done
                    frames[-1].add(*done)
                frame = frames[-1]
                following = next(frame.left, None)
                if following is not None:
                    keys[-1], value = following
                    break
                done = frame.close()
                seen[id(frame.source)] = done
                frames.pop()
                keys.pop()

    def _whole(self, value: Mapping[object, object]) -> Template:
        """An object that is a reference."""
        wanted = value["$ref"]
        if len(value) != 1:
            self._wrong("an object with '$ref' has no other key (write '$$ref' for a key '$ref')")
        elif not isinstance(wanted, str):
            self._wrong("'$ref' wants text: the id of a step, and a path")
        else:
            return self._linked(wanted)
        return None

    def _text(self, text: str) -> tuple[Template, bool]:
        """A text with its references read."""
        if "$" not in text:
            return text, False
        parts: list[str | Reference] = []
        end = 0
        for match in _MARK.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            end = match.end()
            if match[0] == "$$":
                parts.append("$")
            elif match[1] is None:
                self._wrong("'${' without a '}' (write '$$' for a '$')")
                return None, True
            else:
                reference = self._linked(match[1])
                if reference is None:
                    return None, True
                parts.append(reference)
        if not parts:
            return text, False
        if end < len(text):
            parts.append(text[end:])
        if len(parts) == 1 and not isinstance(parts[0], str):
            return parts[0], True
        if all(isinstance(part, str) for part in parts):
            return "".join(cast("list[str]", parts)), True
        return _Text(tuple(parts)), True

    def _linked(self, text: str) -> Reference | None:
        """The reference that a text is: the longest id of the plan that fits, and the path behind it."""
        place = -1
        if len(text) in self._lengths and text in self._where:
            place = len(text)
        else:
            for match in _SEPARATOR.finditer(text):
                cut = match.start()
                if cut in self._lengths and text[:cut] in self._where:
                    place = cut
        if place < 0:
            head = cast("re.Match[str]", _HEAD.match(text))[0]
            if head:
                self.missing.append(Miss(self._index, f"refers to a step at {self._place()}", head, False))
                return None
            self._wrong("a reference without the id of a step")
            return None
        try:
            path = tuple(_pointer(text, place) if text[place : place + 1] == "#" else _segments(text, place))
        except _Bad as bad:
            self._wrong(str(bad))
            return None
        reference = Reference(self._where[text[:place]], path)
        self.references.append(reference)
        return reference

    def _wrong(self, why: str) -> None:
        self.malformed.append((self._index, f"{self._place()}: {why}"))

    def _place(self) -> str:
        """Where in the arguments: keys that are plain words, and positions."""
        parts = ["arguments"]
        for key in self._keys:
            if isinstance(key, int):
                parts.append(f"[{key}]")
            else:
                parts.append(f".{key}" if key.isidentifier() and len(key) <= _WORD else ".<key>")
        if len(parts) > 12:
            parts[6:-6] = ["..."]
        return "".join(parts)


class _Frame:
    """A list or an object that is being read."""

    __slots__ = ("items", "left", "names", "source", "touched")

    def __init__(self, source: Mapping[object, object] | Sequence[object]) -> None:
        self.source = source
        self.items: list[Template] = []
        self.names: list[str] | None = None
        self.touched = False
        self.left: Iterator[tuple[str | int, object]]
        if isinstance(source, Mapping):
            self.names = []
            self.left = self._entries(source)
        else:
            self.left = enumerate(source)

    def _entries(self, source: Mapping[object, object]) -> Iterator[tuple[str | int, object]]:
        names = cast("list[str]", self.names)
        for name, value in source.items():
            if _is_key(name):
                self.touched = True
                name = cast(str, name)[1:]
            names.append(cast(str, name))
            yield name if isinstance(name, str) else "", value

    def add(self, template: Template, touched: bool) -> None:
        self.items.append(template)
        self.touched = self.touched or touched

    def close(self) -> tuple[Template, bool]:
        if not self.touched:
            return self.source, False
        if self.names is None:
            return _List(tuple(self.items)), True
        return _Object(tuple(zip(self.names, self.items, strict=True))), True


class _Filler:
    """Fills in the templates of one step."""

    __slots__ = ("_follower", "_value_of", "_values")

    def __init__(self, value_of: Callable[[int], object]) -> None:
        self._value_of = value_of
        self._values: dict[int, object] = {}
        self._follower = Follower()

    def fill(self, template: Template) -> object:
        """The value that a template stands for, all of it new. Without recursion."""
        root: list[object] = [None]
        stack: list[tuple[Template, dict[str, object] | list[object], str | int]] = [(template, root, 0)]
        while stack:
            each, into, place = stack.pop()
            made: object
            if isinstance(each, Reference):
                made = self._copied(each)
            elif isinstance(each, _Text):
                made = "".join([part if isinstance(part, str) else self._pasted(part) for part in each.parts])
            elif isinstance(each, _Object):
                made = entries = cast("dict[str, object]", dict.fromkeys(name for name, _ in each.entries))
                stack += [(inner, entries, name) for name, inner in each.entries]
            elif isinstance(each, _List):
                made = items = cast("list[object]", [None] * len(each.items))
                stack += [(inner, items, index) for index, inner in enumerate(each.items)]
            else:
                made = _own(each)
            into[place] = made  # type: ignore[index]
        return root[0]

    def _found(self, reference: Reference) -> object:
        step = reference.step
        if step not in self._values:
            self._values[step] = self._value_of(step)
        return self._follower.follow(self._values[step], reference.path)

    def _copied(self, reference: Reference) -> object:
        try:
            return copied(self._found(reference))
        except CannotFollow as fault:
            reason = fault.reason
        raise UnresolvedReference(reference, reason)

    def _pasted(self, reference: Reference) -> str:
        try:
            return pasted(self._found(reference))
        except CannotFollow as fault:
            reason = fault.reason
        raise UnresolvedReference(reference, reason)


def _own(value: object) -> object:
    """A part of the plan's own arguments: its lists and objects anew, so that a handler cannot change the plan."""
    return copied(value, foreign=None) if isinstance(value, dict | list | tuple) else value


def _never(step: int) -> object:
    raise AssertionError(f"step {step} was asked for an argument that refers to nothing")  # pragma: no cover


def _is_key(name: object) -> bool:
    """A key that loses a `$` when it is read."""
    return isinstance(name, str) and name[:2] == "$$" and _KEY.fullmatch(name) is not None


def _marked(value: object) -> bool:
    """Whether a value holds anything that could be a reference or an escape. Without recursion."""
    if isinstance(value, str):
        return "$" in value
    if type(value) in _ATOMS:
        return False
    stack = [value]
    seen: dict[int, object] = {}
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            if "$" in each:
                return True
        elif isinstance(each, Mapping | list | tuple) and id(each) not in seen:
            seen[id(each)] = each
            if isinstance(each, Mapping):
                stack += each.keys()
                stack += each.values()
            else:
                stack += each
    return False


def _pointer(text: str, place: int) -> list[str | int]:
    """The path of a JSON pointer that begins behind the `#` at a place."""
    pointer = text[place + 1 :]
    if not pointer:
        return []
    if pointer[0] != "/":
        raise _Bad("a JSON pointer begins with '/' behind the '#'")
    if _TILDE.search(pointer):
        raise _Bad("in a JSON pointer '~' is written '~0' and '/' inside a name '~1'")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/")]


def _segments(text: str, place: int) -> list[str | int]:
    """The path of names and indexes that begins at a place."""
    found: list[str | int] = []
    while place < len(text):
        match = _SEGMENT.match(text, place)
        if match is None:
            raise _Bad(
                "a path is made of '.name', '[0]', '[*]', '[=]' and '[\"name\"]', or is a JSON pointer behind '#'"
            )
        place = match.end()
        if match[1] is not None:
            found.append(match[1])
        elif match[2] is not None:
            found.append(int(match[2]))
        elif match[3] is not None:
            found.append(EACH if match[3] == "*" else AGREED)
        else:
            try:
                name, place = _STRING(text, place)
            except ValueError:
                raise _Bad("a name in '[\"...\"]' is a JSON string") from None
            if text[place : place + 1] != "]":
                raise _Bad("a '[' without a ']'")
            place += 1
            found.append(name)
    return found


def _malformed(ids: Sequence[str], malformed: Sequence[tuple[int, str]]) -> PlanRefused:
    """Name the references that are malformed, by their places."""
    told = "; ".join(f"{named(ids, index)}: {why}" for index, why in malformed[:_SHOWN])
    more = len(malformed) - _SHOWN
    text = f"{told}{f'; and {more} more such places' if more > 0 else ''}"
    return PlanRefused("bad_reference", tuple(dict.fromkeys(index for index, _ in malformed)), text)
