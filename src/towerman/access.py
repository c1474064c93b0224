"""What a call touches, and which two calls conflict, and why.

Theory. A tool declares templates (`customer:{customer_id}`, `file:{dir}/**`) or a callable of the arguments. They are
compiled once, when the tool is registered; a call's arguments then give its accesses. A key is `scheme:path` and its
path nests at "/". A plain key is that one node, `key/**` is the node and all below it. Two accesses conflict when one
names the other's node, or a node below its subtree, and at least one writes.

Ledgers know neither nesting nor subtrees, only flat keys and four modes. So every node K has two locks: the node lock
"K" and the tree lock "K/**". A read or write of the node takes S or X on its node lock and announces itself by IS or IX
on the tree locks of all nodes above; a read or write of the subtree takes S or X on the node lock and the tree lock of
K and announces itself above. (Granular locking: Gray, Lorie, Putzolu, Traiger, 1976.) Two accesses conflict if and only
if two of their locks are incompatible. A call that holds S and needs IX on one tree lock gets X, for there is no fifth
mode: this locks more than needed, never less. Where no registered tool can declare a subtree the node lock is enough.

One resource has one key, however it is spelled. Where that cannot be known, more is locked, or the call is refused:
- The scheme is the literal text before the first ":" that stands before any "/"; its case does not matter. It comes
  from the template (or from the text that a callable returns), never from a value. The root of a scheme, `ticket:`,
  stands above all its keys: `ticket:/**` is every ticket.
- A key without a scheme, `repo/x`, is the same as `/repo/x` and is written so; a ":" in it means nothing. Nothing
  stands above its first segment.
- `file`: the path as the operating system resolves it at this moment: absolute, links followed as far as they exist,
  normcase. A path that starts with `~/`, a `file:///` URL given as a value, and an absolute value where the template
  expected a relative one (`file:/srv/{name}`) can be read in two ways by a handler: both are locked. Two hard links to
  one file are two keys, a link inside a subtree does not widen it, and a link made after this moment is not seen.
- Any other scheme: "/" nests, also in a value; empty segments and "." are dropped, so `doc:/a//b` is `doc:a/b`. A
  segment ".." is refused: only the tool knows whether it climbs.
- Values: a str as it is, 42 and 42.0 and "42" are one, True is "true", an Enum is its value, an aware datetime its
  instant in UTC, anything else that is hashable and has a `__str__` of its own is that text. Each element of a list,
  tuple or set is a resource of its own. None, "" and blanks name nothing, so the call is refused. Text is compared in
  the normal form NFC; a character that UTF-8 cannot hold is written as an escape.
- "**" in a value is text: such a segment is written "***", so that no node lock looks like a tree lock.
- Keys stay short: a segment over 128 characters is replaced by its SHA-256 digest, and what lies deeper than 64
  segments is locked as its ancestor there.

House rules. A message names the template and the argument, never a value. Everything that does not depend on a value is
worked out at registration. Nothing learned from the file system is kept: links change.

Not here: the order of conflicting calls (plan), who holds what (ledger), tools that declare nothing (runner).
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
import string
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from itertools import islice, product
from typing import Final, Literal

from towerman.calls import IS, IX, Access, Arguments, Hold, Mode, S, X
from towerman.errors import PolicyError
from towerman.policy import VARIABLE, Declared, FromEnvironment

MAX_SEGMENT: Final = 128
"""Longest part of a key between two slashes, in characters; a longer one is replaced by its digest."""

MAX_DEPTH: Final = 64
"""Most segments of a key; what lies deeper is locked as its ancestor at this depth."""

MAX_PATH: Final = 4096
"""Longest path of a file, in characters: the operating system opens no longer one."""

MAX_ACCESSES: Final = 10_000
"""Most resources that one template, or one callable, may name for one call."""

_MAX_MARKS: Final = 32
"""Most combining characters in a row: normalising n of them takes n squared steps (16 seconds for 100,000)."""


class AccessRefused(Exception):
    """What this call touches cannot be told, so it must not run; says why, without any value.

    Args:
        message: names what was declared, the argument and the fix.
        code: `invalid_arguments` when other arguments would help, `policy_error` when the declaration is at fault.
    """

    def __init__(self, message: str, code: Literal["invalid_arguments", "policy_error"] = "invalid_arguments") -> None:
        super().__init__(message)
        self.code = code


_MISSING: Final = object()


class _Unnameable(Exception):
    """A value gives no text (said in words that follow its name), or a text gives no key (said in a sentence)."""


_Read = Callable[[Arguments], tuple[Access, ...]]

# An Access is frozen, and its own constructor pays twice as much to get around that as these do.
_new: Final = object.__new__
_set_key: Final = Access.__dict__["key"].__set__
_set_write: Final = Access.__dict__["write"].__set__
_set_subtree: Final = Access.__dict__["subtree"].__set__
_set_template: Final = Access.__dict__["template"].__set__


def _access(key: str, write: bool, subtree: bool, template: str) -> Access:
    access = _new(Access)
    _set_key(access, key)
    _set_write(access, write)
    _set_subtree(access, subtree)
    _set_template(access, template)
    return access


# Text that is its own canonical segment, or segments: nothing to fold, to normalise, to escape or to shorten.
_is_plain: Final = re.compile(r"[A-Za-z0-9_@+-][A-Za-z0-9_@+.:-]{0,127}").fullmatch
_is_plain_path: Final = re.compile(
    r"(?=.{1,128}\Z)[A-Za-z0-9_@+-][\w@+.: -]*(?:/[A-Za-z0-9_@+-][\w@+.: -]*)*", re.A
).fullmatch


# --- values to text ---------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    """The text that a value has in a key; equal values have equal texts."""
    while isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        text = str.__str__(value)
        if not text or text.isspace():
            raise _Unnameable("is empty")
        return text
    if value is None:
        raise _Unnameable("is None")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        try:
            return str(int(value))
        except ValueError:  # Python writes no decimal text of thousands of digits
            return hex(value)
    if isinstance(value, float):
        value = Decimal(repr(float(value)))
    if isinstance(value, Decimal):
        return _decimal_text(value)
    if isinstance(value, bytes | bytearray):
        return _text(os.fsdecode(bytes(value)))
    if isinstance(value, os.PathLike):
        return _text(os.fsdecode(value).replace(os.sep, "/"))
    kind = type(value)
    # The text that object.__str__ makes tells the address, or the fields of a record: not what the value is called.
    if getattr(kind, "__hash__", None) is None or kind.__str__ is object.__str__:
        raise _Unnameable(f"is of type {kind.__name__[:64]}, which is neither text nor a number")
    try:
        if isinstance(value, datetime):
            return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat()
        return _text(str(value))
    except _Unnameable:
        raise
    except Exception:
        raise _Unnameable(f"is of type {kind.__name__[:64]} and cannot be written as text") from None


def _decimal_text(value: Decimal) -> str:
    if not value.is_finite() or abs(value.adjusted()) > MAX_PATH:
        raise _Unnameable("is not a finite number of sensible size")
    if value == value.to_integral_value():
        return _text(int(value))
    return f"{value:f}".rstrip("0")


def _elements(value: object) -> Collection[object] | None:
    """The value itself when it is a list of some kind, each element of which is a resource; else None."""
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview):
        return value
    return None


def _texts(value: object) -> tuple[str, ...]:
    """The texts of a value: one, or one for each element of a list; a set's are sorted, so that they have an order."""
    if type(value) is str or (elements := _elements(value)) is None:
        return (_text(value),)
    if len(elements) > MAX_ACCESSES:
        raise _Unnameable(f"has more than {MAX_ACCESSES} elements")
    try:
        texts = dict.fromkeys(map(_text, elements))
    except _Unnameable as reason:
        raise _Unnameable(f"has an element that {reason}") from None
    return tuple(sorted(texts) if isinstance(elements, Set) else texts)


def _reach(value: object, steps: tuple[str, ...]) -> object:
    """Follow `.field` and `[key]` into mappings, sequences and objects; a field of a list is that of each element."""
    for place, step in enumerate(steps):
        name = step[1:]
        if value is None:
            raise _Unnameable("is None")
        if isinstance(value, Mapping):
            if name in value:
                value = value[name]
                continue
            if name.isdecimal() and int(name) in value:
                value = value[int(name)]
                continue
        elif step[0] == "[" and name.isdecimal() and isinstance(value, Sequence):
            if int(name) < len(value):
                value = value[int(name)]
                continue
        elif (elements := _elements(value)) is not None and not hasattr(value, "_fields"):  # a named tuple is a record
            inner = [_reach(element, steps[place:]) for element in elements]
            texts = [text for found in inner for text in _texts(found)]
            return set(texts) if isinstance(elements, Set) else texts
        elif step[0] == ".":
            value = getattr(value, name, _MISSING)
            if value is not _MISSING:
                continue
        raise _Unnameable("is missing")
    return value


# --- text to keys -----------------------------------------------------------------------------------------------------


def _normal(text: str) -> str:
    """The text in NFC and in characters that UTF-8 can hold."""
    if text.isascii():
        return text
    if len(text) > 8 * _MAX_MARKS:
        marks = 0
        for character in text:
            marks = marks + 1 if unicodedata.combining(character) else 0
            if marks > _MAX_MARKS:
                raise _Unnameable(f"the name has more than {_MAX_MARKS} combining characters in a row")
    return unicodedata.normalize("NFC", text).encode("utf-8", "backslashreplace").decode()


def _fold(path: str) -> str:
    """The canonical path: no empty segment, no ".", no "**", none too long, not too deep; "" is the root."""
    if _is_plain_path(path):
        return path
    if "\0" in path:
        raise _Unnameable("the name holds a null character")
    segments = []
    for segment in _normal(path).split("/"):
        if not segment or segment == ".":
            continue
        if segment == "..":
            raise _Unnameable("the name holds the segment '..'; only file: follows it, so write it without")
        if segment == "**":
            segment = "***"
        elif len(segment) > MAX_SEGMENT:
            segment = hashlib.sha256(segment.encode()).hexdigest()
        segments.append(segment)
    return "/".join(segments[:MAX_DEPTH])


def _key(scheme: str, path: str) -> str:
    """The canonical key of a path in a scheme that is no file's; scheme "" is that of keys without one."""
    folded = _fold(path)
    if scheme:
        return f"{scheme}:{folded}"
    if not folded:
        raise _Unnameable("the name is empty")
    return "/" + folded


def _file_key(path: str) -> str:
    """The canonical key of a file, there or not, as its path leads now."""
    if len(path) > MAX_PATH:
        raise _Unnameable(f"the path is longer than {MAX_PATH} characters")
    try:
        real = os.path.normcase(os.path.realpath(path))
    except (OSError, ValueError):
        raise _Unnameable("the path cannot be resolved on this machine") from None
    folded = _fold(real.replace(os.sep, "/"))
    return f"file:/{folded}" if folded else "file:"


def _url_path(rest: str) -> str | None:
    """The path of a file URL, given without its "file:"; None when it names another machine."""
    from urllib.parse import unquote

    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            return None
        rest = slash + path
    return unquote(re.split("[?#]", rest, maxsplit=1)[0])


def _home_path(path: str) -> str | None:
    """The path below the home directory that a shell would see, or None."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else None


def _split(text: str) -> tuple[str, str]:
    """Scheme, folded, and path; the scheme is "" when there is none."""
    head, colon, path = text.partition(":")
    if not colon or "/" in head:
        return "", text
    if not head or head.isspace():
        raise _Unnameable("the name has nothing before its ':'")
    if len(head) > MAX_SEGMENT or "\0" in head:
        raise _Unnameable(f"the name has a null character, or over {MAX_SEGMENT} characters, before its ':'")
    return _normal(head).casefold(), path


def _keys(text: str) -> list[str]:
    """The keys that a whole resource name can mean: mostly one, the plain reading first."""
    if not text or text.isspace():
        raise _Unnameable("the name is empty")
    scheme, path = _split(text)
    if not path or scheme != "file":
        return [_key(scheme, path)]
    readings = (path, _home_path(path), _url_path(path) if path.startswith("//") else None)
    return [_file_key(reading) for reading in readings if reading]


def canonical_key(text: str) -> str:
    """The one key of the resource that `text` names, scheme and all.

    Args:
        text: for example `file:../a.txt`, `ticket:42`, `repo/x`. It names one node: a final `/**` is text too.

    Raises:
        AccessRefused: it names nothing (empty, nothing after the scheme), or cannot be resolved.
    """
    try:
        return _keys(text)[0]
    except _Unnameable as reason:
        raise AccessRefused(f"resource: {reason}") from None


# --- compiling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """A `{name.field[key]}` of a template.

    Args:
        name: the argument.
        steps: what follows it, each with its first character: ".field", "[key".
        shown: how it is written in the template.
    """

    name: str
    steps: tuple[str, ...]
    shown: str

    def texts(self, arguments: Arguments) -> tuple[str, ...]:
        """What stands here for these arguments: one text, or one for each element of a list."""
        value = arguments.get(self.name, _MISSING)
        try:
            if value is _MISSING:
                raise _Unnameable("is missing")
            return _texts(_reach(value, self.steps) if self.steps else value)
        except _Unnameable as reason:
            told = str(reason)
        except Exception as error:  # a property, a container or a text of the user's own
            told = f"cannot be read ({type(error).__name__[:64]})"
        raise _Unnameable(f"argument {self.shown!r} {told}")


@dataclass(frozen=True, slots=True)
class _Source:
    """One compiled template or callable.

    Args:
        read: gives the accesses for arguments.
        declared: the template or callable itself.
        label: what people are shown.
        subtree: it can give a subtree.
        fixed: it gives the same accesses for every call, for ever.
    """

    read: _Read
    declared: object
    label: str
    subtree: bool
    fixed: bool


def _quoted(names: frozenset[str] | None) -> str:
    return "not known" if names is None else ", ".join(sorted(names)) or "none"


def _check_name(name: str, names: frozenset[str] | None, where: str) -> None:
    if names is None or name in names:
        return
    from difflib import get_close_matches

    near = get_close_matches(name, sorted(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise PolicyError(f"{where} names {name!r}, which is no parameter of the tool{hint} Parameters: {_quoted(names)}")


_FIELD: Final = re.compile(r"([^.\[\]{}]+)((?:\.[^\W\d_]\w*|\[[^\[\]{}]+\])*)")
_STEP: Final = re.compile(r"\.\w+|\[[^\]]+")


def _parse_place(text: str, names: frozenset[str] | None, where: str) -> _Place:
    if names is not None and text in names:  # a JSON schema may have an argument called "user.id"
        return _Place(text, (), text)
    match = _FIELD.fullmatch(text)
    if match is None or text != text.strip():
        raise PolicyError(
            f"{where}: {{{text}}} is not understood; write {{name}}, {{name.field}} or {{name[key]}}, "
            f"where name is a parameter of the tool. Parameters: {_quoted(names)}"
        )
    name, steps = match.groups()
    if names is None and name.isdecimal():
        raise PolicyError(f"{where}: {{{text}}} is a position; name a parameter of the tool")
    _check_name(name, names, where)
    return _Place(name, tuple(_STEP.findall(steps)), text)


def _parse_parts(body: str, names: frozenset[str] | None, where: str) -> list[str | _Place]:
    """Literal text and places of a template, never two literals in a row."""
    try:
        pieces = list(string.Formatter().parse(body))
    except ValueError:
        raise PolicyError(
            f"{where}: braces do not match; {{name}} stands for an argument, {{{{ and }}}} for braces themselves"
        ) from None
    parts: list[str | _Place] = []
    for literal, name, spec, conversion in pieces:
        if literal:
            if "*" in literal:
                raise PolicyError(
                    f"{where}: '*' is no pattern here; '/**' at the end is the resource and all below it, "
                    "and a callable can name a resource with a star in it"
                )
            if parts and isinstance(parts[-1], str):
                parts[-1] += literal
            else:
                parts.append(literal)
        if name is not None:
            if spec or conversion:
                raise PolicyError(f"{where}: {{{name}}} takes no conversion and no format")
            parts.append(_parse_place(name, names, where))
    return parts


def _parse_scheme(parts: list[str | _Place], where: str) -> str:
    """Take the scheme off the first part and return it, folded; "" when there is none."""
    first = parts[0] if parts and isinstance(parts[0], str) else ""
    try:
        scheme, path = _split(first)
    except _Unnameable as reason:
        raise PolicyError(f"{where}: {reason}; write for example 'ticket:{{id}}'") from None
    if scheme:
        parts[:1] = [path] if path else []
        return scheme
    for part in parts:
        if isinstance(part, str):
            head, slash, _ = part.partition("/")
            if ":" in head:
                raise PolicyError(
                    f"{where}: the scheme, the part before ':', has to be literal text; "
                    "use a callable for a tool that touches resources of several schemes"
                )
            if slash:
                break
    return ""


def _strip_url(parts: list[str | _Place], where: str) -> None:
    """Turn `file:///a%20b` as written in a template into the path it stands for."""
    if not parts or not isinstance(parts[0], str) or not parts[0].startswith("//"):
        return
    path = _url_path(parts[0])
    if path is None:
        raise PolicyError(f"{where}: a file URL names no other machine; write file:/path or file:///path")
    from urllib.parse import unquote

    parts[:] = [part for part in (path, *(unquote(p) if isinstance(p, str) else p for p in parts[1:])) if part]


def _file_paths(combination: Sequence[str], places: Sequence[bool]) -> Iterator[str]:
    """All paths that a handler can make of these parts, the plain reading first."""
    text = "".join(combination)
    yield text
    home = _home_path(text)
    if home is not None:
        yield home
    for index, part in enumerate(combination):
        if not places[index]:
            continue
        before = "".join(combination[:index])
        if before.endswith("/") and os.path.isabs(part):  # os.path.join forgets what stood before
            yield "".join(combination[index:])
        if part[:6].lower() == "file:/":
            path = _url_path(part[5:])
            if path is None:
                raise _Unnameable("the URL names a file of another machine")
            yield path + "".join(combination[index + 1 :])


def _compile_written(template: FromEnvironment, write: bool, names: frozenset[str] | None, tool: str) -> _Source:
    """A template with variables of the environment in it: what is shown of it, also in traces, is how it was written.

    What is wrong with it whatever the values are is told as of any other; else the values are the reason.
    """
    _compile_template(VARIABLE.sub(r"\1", template.told), write, names, tool)
    try:
        return _compile_template(str(template), write, names, tool, template.told)
    except PolicyError:
        where = f"tool {tool!r}: {'writes' if write else 'reads'} {template!r}"
        raise PolicyError(
            f"{where} is no template with the values of {', '.join(template.variables)}, which are not shown"
        ) from None


def _compile_template(
    template: str, write: bool, names: frozenset[str] | None, tool: str, label: str | None = None
) -> _Source:
    label = template if label is None else label
    shown = f"{'writes' if write else 'reads'} {label!r}"
    where = f"tool {tool!r}: {shown}"
    if not template or template.isspace():
        raise PolicyError(f"{where} is empty; write for example 'ticket:{{id}}'")
    if template != template.strip() or not template.isprintable():
        raise PolicyError(f"{where} begins or ends with a blank, or holds a character that cannot be printed")
    subtree = template.endswith("/**")
    parts = _parse_parts(template.removesuffix("/**"), names, where)
    scheme = _parse_scheme(parts, where)
    if scheme == "file":
        _strip_url(parts, where)
    if not parts and not (scheme and subtree):
        fix = f"everything of the scheme is '{scheme}:/**'" if scheme else "name a scheme, for example 'file:/**'"
        raise PolicyError(f"{where} names no resource; {fix}")
    is_file = scheme == "file" and bool(parts)
    flags = tuple(isinstance(part, _Place) for part in parts)

    def read(arguments: Arguments) -> tuple[Access, ...]:
        try:
            texts = [(part,) if isinstance(part, str) else part.texts(arguments) for part in parts]
            count = math.prod(map(len, texts))
            if count > MAX_ACCESSES:
                raise _Unnameable(f"the call names more than {MAX_ACCESSES} resources")
            if count == 1 and not is_file:
                return (_access(_key(scheme, "".join([text for (text,) in texts])), write, subtree, label),)
            combinations = product(*texts)
            if is_file:
                keys = [_file_key(path) for combination in combinations for path in _file_paths(combination, flags)]
            else:
                keys = [_key(scheme, "".join(combination)) for combination in combinations]
        except _Unnameable as reason:
            raise AccessRefused(f"{shown}: {reason}") from None
        return tuple(_access(key, write, subtree, label) for key in dict.fromkeys(keys))

    if is_file:
        return _Source(read, template, label, subtree, fixed=False)
    try:
        sample = _key(scheme, "".join(part if isinstance(part, str) else "x" for part in parts))
    except _Unnameable as reason:
        raise PolicyError(f"{where}: {reason}") from None
    if not any(flags):
        accesses = (_access(sample, write, subtree, label),)
        return _Source(lambda arguments: accesses, template, label, subtree, fixed=True)
    place = parts[-1]
    before = parts[0] if isinstance(parts[0], str) else ""
    starts_a_segment = not before or (before.endswith("/") and before.count("/") < MAX_DEPTH)
    if isinstance(place, _Place) and not place.steps and sum(flags) == 1 and starts_a_segment:
        quick = _quick(sample[:-1], place.name, write, subtree, label, read)
        return _Source(quick, template, label, subtree, fixed=False)
    return _Source(read, template, label, subtree, fixed=False)


def _quick(prefix: str, name: str, write: bool, subtree: bool, label: str, general: _Read) -> _Read:
    """The short way for one `{name}` that is the last segment, and a value that is a plain number or word."""

    def read(arguments: Arguments) -> tuple[Access, ...]:
        value = arguments.get(name)
        if type(value) is int and -(10**18) < value < 10**18:
            key = f"{prefix}{value}"
        elif type(value) is str and _is_plain(value):
            key = prefix + value
        else:
            return general(arguments)
        return (_access(key, write, subtree, label),)

    return read


def _bind(function: Callable[..., object], names: frozenset[str] | None, where: str) -> Callable[[Arguments], object]:
    """How to call a declared callable: by the names that it takes, or with all arguments as one mapping."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PolicyError(f"{where} is async; what a call touches has to be known at once: use a plain function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise PolicyError(f"{where} has no signature; wrap it in a function that names its arguments") from None
    takes = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(takes) == 1 and takes[0].name == "arguments" and "arguments" not in (names or ()):
        if takes[0].kind is inspect.Parameter.KEYWORD_ONLY:
            return lambda arguments: function(arguments=dict(arguments))
        return lambda arguments: function(dict(arguments))
    for parameter in takes:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise PolicyError(f"{where}: {parameter.name!r} cannot be given by name; take away the '/'")
        if parameter.default is parameter.empty:
            _check_name(parameter.name, names, f"{where} (a callable whose one parameter is `arguments` gets them all)")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return lambda arguments: function(**arguments)
    wanted = tuple(parameter.name for parameter in takes)
    return lambda arguments: function(**{name: arguments[name] for name in wanted if name in arguments})


def _compile_callable(function: Callable[..., object], write: bool, names: frozenset[str] | None, tool: str) -> _Source:
    inner = getattr(function, "func", function)  # a functools.partial has no name of its own
    label = f"callable {str(getattr(inner, '__name__', type(inner).__name__))[:64]}"
    shown = f"{'writes' if write else 'reads'} {label}"
    call = _bind(function, names, f"tool {tool!r}: {shown}")

    def refused(reason: str) -> AccessRefused:
        return AccessRefused(f"{shown}: {reason}", "policy_error")

    def read(arguments: Arguments) -> tuple[Access, ...]:
        try:
            answer = call(arguments)
            if answer is None:
                return ()
            if isinstance(answer, Iterable) and not isinstance(answer, str | bytes | bytearray | Mapping):
                texts = list(islice(answer, MAX_ACCESSES + 1))
            else:
                texts = [answer]
        except Exception as error:
            raise refused(f"raised {type(error).__name__[:64]}") from None
        if len(texts) > MAX_ACCESSES:
            raise refused(f"named more than {MAX_ACCESSES} resources")
        found: dict[tuple[str, bool], Access] = {}
        for text in texts:
            if not isinstance(text, str):
                for left in filter(inspect.iscoroutine, texts):
                    left.close()
                kind = type(text).__name__[:64]
                raise refused(f"returned a value of type {kind}, not a resource name, a list of them, or None")
            subtree = text.endswith("/**")
            try:
                name = text.removesuffix("/**")
                if not subtree and _split(name)[1] == "":
                    raise _Unnameable("the name is empty, or has nothing after its ':'")
                for key in _keys(name):
                    found[key, subtree] = _access(key, write, subtree, label)
            except _Unnameable as reason:
                raise refused(f"cannot use what it returned: {reason}") from None
        return tuple(found.values())

    return _Source(read, function, label, subtree=True, fixed=False)


def _compile(declared: Declared | None, write: bool, names: frozenset[str] | None, tool: str) -> list[_Source]:
    where = f"tool {tool!r}: {'writes' if write else 'reads'}"
    items: Sequence[object] = [declared]
    if declared is None:
        return []
    if isinstance(declared, Sequence) and not isinstance(declared, str | bytes | bytearray):
        items = declared
        if not items:
            raise PolicyError(f"{where} is an empty list; a tool that touches nothing says independent=True")
    sources = []
    for item in items:
        if isinstance(item, FromEnvironment):
            sources.append(_compile_written(item, write, names, tool))
        elif isinstance(item, str):
            sources.append(_compile_template(item, write, names, tool))
        elif callable(item):
            sources.append(_compile_callable(item, write, names, tool))
        else:
            raise PolicyError(
                f"{where} holds a value of type {type(item).__name__}; write a template such as 'ticket:{{id}}', "
                "a list of templates, or a callable of the arguments"
            )
    return sources


# --- the face ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class AccessRule:
    """What one tool's calls touch, compiled from its `reads` and `writes`.

    Attributes:
        reads: what people are shown of the declared reads: templates, `callable NAME`.
        writes: the same of the writes.
        may_subtree: some call may touch a subtree; a callable may always.
        depends_on_arguments: two calls may differ in what they touch. False also means that the accesses never change,
            so that they may be computed once; a literal `file:` template is therefore True: links move.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    may_subtree: bool
    depends_on_arguments: bool
    _sources: tuple[_Read, ...] = field(repr=False)

    @classmethod
    def compile(
        cls, reads: Declared | None, writes: Declared | None, *, names: frozenset[str] | None, tool: str
    ) -> AccessRule:
        """Check and compile what a tool declares.

        Args:
            reads: a template, a callable of the arguments, or a list of these; None for nothing. A callable is called
                with the arguments that it names as keywords (`**kwargs` takes all); one whose single parameter is
                called `arguments` gets a mapping of them all. It returns a resource name, a list of them, or None.
            writes: the same. What is written need not be declared as read.
            names: the tool's parameters, or None when they are not known.
            tool: its name, for messages.

        Raises:
            PolicyError: names the tool, the template, what is wrong with it and the fix.
        """
        read, written = _compile(reads, False, names, tool), _compile(writes, True, names, tool)
        sources = (*read, *written)
        fixed = all(source.fixed for source in sources)
        twice = [source.declared for source in written]
        steps = tuple(source.read for source in (*(one for one in read if one.declared not in twice), *written))
        rule = cls(
            reads=tuple(source.label for source in read),
            writes=tuple(source.label for source in written),
            may_subtree=any(source.subtree for source in sources),
            depends_on_arguments=not fixed,
            _sources=steps,
        )
        if not fixed or not steps:
            return rule
        accesses = rule.accesses({})
        object.__setattr__(rule, "_sources", (lambda arguments: accesses,))
        return rule

    def accesses(self, arguments: Mapping[str, object]) -> tuple[Access, ...]:
        """What a call with these arguments touches, without repeats; a read that a write covers is left out.

        Args:
            arguments: checked arguments by name, the defaults of those that were left out included.

        Raises:
            AccessRefused: the call must not run, for what it touches cannot be told.
        """
        sources = self._sources
        if len(sources) == 1:
            return sources[0](arguments)
        found = {
            (access.key, access.subtree, access.write): access for source in sources for access in source(arguments)
        }
        if self.reads and self.writes:
            return _without_covered(tuple(found.values()))
        return tuple(found.values())


def _without_covered(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
    nodes = {access.key for access in accesses if access.write and not access.subtree}
    trees = {access.key for access in accesses if access.write and access.subtree}

    def is_covered(read: Access) -> bool:
        if read.key in nodes and not read.subtree:
            return True
        return bool(trees) and not trees.isdisjoint((read.key, *_above(read.key)))

    return tuple(access for access in accesses if access.write or not is_covered(access))


def _above(key: str) -> list[str]:
    """The keys above `key`, the root of its scheme first."""
    found = []
    slash = key.find("/", 1)
    colon = key.find(":", 1, slash) if slash > 0 else key.find(":", 1)
    if key[:1] != "/" and 0 < colon < len(key) - 1 and colon + 1 != slash:
        found.append(key[: colon + 1])
    while slash > 0:
        found.append(key[:slash])
        slash = key.find("/", slash + 1)
    return found


# The weakest mode that allows what two modes of one holder allow; S and IX have no join below X.
_JOIN: Final[tuple[tuple[Mode, ...], ...]] = (
    (IS, IX, S, X),
    (IX, IX, X, X),
    (S, X, S, X),
    (X, X, X, X),
)


def _locks(access: Access, subtrees: bool) -> list[Hold]:
    """The locks of one access: no flat key twice."""
    key = access.key
    strong, weak = (X, IX) if access.write else (S, IS)
    if not subtrees:
        if access.subtree:
            raise ValueError(f"{access!r} is a subtree: flat_holds needs subtrees=True")
        return [(key, strong)]
    locks = [(above + "/**", weak) for above in _above(key)]
    locks.append((key, strong))
    if access.subtree:
        locks.append((key + "/**", strong))
    return locks


def flat_holds(accesses: Sequence[Access], *, subtrees: bool) -> tuple[tuple[Hold, ...], dict[str, str]]:
    """The locks that stand for these accesses in a ledger, and what people are shown for each.

    Args:
        accesses: what one call touches.
        subtrees: some registered tool may touch a subtree. It may change only while nothing is held: locks taken
            without it do not meet a subtree's.

    Returns:
        (flat key, mode) pairs in the order of the keys, each key once with a mode that allows all that is needed; and
        flat key -> template of the access that asked for the strongest mode on it.

    Raises:
        ValueError: an access is a subtree although `subtrees` is False.
    """
    if len(accesses) == 1:
        locks = _locks(accesses[0], subtrees)
        locks.sort()
        return tuple(locks), {lock[0]: accesses[0].template for lock in locks}
    modes: dict[str, Mode] = {}
    labels: dict[str, str] = {}
    for access in accesses:
        for flat, mode in _locks(access, subtrees):
            held = modes.get(flat)
            if held is None:
                modes[flat] = mode
                labels[flat] = access.template
            elif held != (joined := _JOIN[held][mode]):
                modes[flat] = joined
                labels[flat] = access.template
    return tuple(sorted(modes.items())), labels


def _covers(upper: Access, lower: Access) -> bool:
    """Whether the node of `lower` is the node of `upper`, or is in its subtree."""
    return upper.key == lower.key or (upper.subtree and upper.key in _above(lower.key))


def conflict(a: Access, b: Access) -> str | None:
    """Why these two may not run at the same time, told with templates only; None when they may.

    Args:
        a: an access of one call.
        b: an access of another.
    """
    if not (a.write or b.write) or not (_covers(a, b) or _covers(b, a)):
        return None
    told = [f"{'write' if access.write else 'read'} {access.template}" for access in (a, b)]
    return f"{told[0]} and {told[1]} touch the same resource"
