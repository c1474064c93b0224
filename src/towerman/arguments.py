"""From what the model wrote to checked keyword arguments; and the one wrapper of the schema validator.

Theory. Arguments come as JSON text or as a mapping. First they are loaded: size, depth, names and
numbers are bounded, and anything that is not exactly one JSON object is refused, never repaired. Then they are
checked, by pydantic against the handler's signature or by jsonschema-rs against a JSON schema. What comes out is a
fresh dictionary of keyword arguments with the defaults filled in.

Pydantic checks in its lax mode, since models write "5" for 5; but true and false are no numbers wherever the
signature itself says int, float, complex, Decimal or timedelta (also inside list, dict, tuple, set, Optional and
unions). Inside a model or dataclass, its author's own rules hold. What lax mode refuses gets a second chance in
pydantic's JSON mode, because strict fields take a date or an enum member from JSON only there. Pydantic tries a
recursive union of models in every combination unless a discriminator tells them apart; a tool with such a union takes
only so many levels as are tried quickly.

House rules. A refusal is written for the model: it names the argument and what it must be. It is put together from
the schema and from positions only. No value, no name that is not in the schema and no text of a validator's
exception goes into it, so there is nothing to leak. Validators are compiled once. pydantic, jsonschema_rs and
griffe are imported on first use.

Not here: placeholders and references (plan), what a call touches (access), the codes of results (runner).
"""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import inspect
import json
import re
import sys
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence, Set
from datetime import timedelta
from decimal import Decimal
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Final, Protocol, TypedDict, Union, cast, get_args, get_origin
from urllib.parse import quote, unquote

from towerman.calls import Arguments
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from griffe import DocstringSection
    from jsonschema_rs import FancyRegexOptions, Registry, Validator
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

MAX_ARGUMENT_BYTES: Final = 1_000_000
"""Longest argument text in UTF-8 bytes; of a mapping, texts and names count in bytes and every entry as one."""

MAX_DEPTH: Final = 64
"""Most objects and lists inside each other, the outermost one included."""

MAX_DIGITS: Final = 4300
"""Most digits of a whole number: what Python itself reads and prints by default."""

MAX_SCHEMA_BYTES: Final = 262_144
"""Largest JSON schema, as compact JSON."""

MAX_SCHEMA_STEPS: Final = 10_000
"""Most subschemas that a schema may have tried on one value: references to references grow exponentially."""

_MESSAGE: Final = 1000  # characters of a refusal
_TOLD: Final = 5  # problems told one by one
_COUNTED: Final = 100  # problems looked for
_NAME: Final = 64  # characters of a name in a refusal
_WHITESPACE: Final = " \t\n\r"

_Part = tuple[str, object, object, str]
"""Pointer to a schema, the schema, the value that it applies to, and the value's place."""


class ArgumentsRefused(Exception):
    """The arguments of one call cannot be used; becomes that call's result and is never shown to a caller.

    Args:
        message: a short text for the model: the place and the fix, never a value that was given.
    """

    def __init__(self, message: str) -> None:
        self.message = message if len(message) <= _MESSAGE else message[: _MESSAGE - 4] + " ..."
        super().__init__(self.message)


class Checker(Protocol):
    """Turns what the model wrote into keyword arguments for one tool. Made at registration, safe in threads."""

    @property
    def schema(self) -> Mapping[str, object]:
        """JSON schema of the arguments for providers; each access gives a copy of its own."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def names(self) -> frozenset[str]:
        """Names of the arguments that access templates may use."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def required(self) -> frozenset[str]:
        """Names that the model has to give."""
        ...  # pragma: no cover - a protocol has no body

    def check(self, raw: Arguments | str) -> dict[str, object]:
        """Load and validate; the result is fresh, with defaults filled in.

        Raises:
            ArgumentsRefused: with a message for the model. Nothing else is raised, whatever was given.
        """
        ...  # pragma: no cover - a protocol has no body


# --- loading -----------------------------------------------------------------------------------------


_TOO_LONG: Final = f"The arguments are longer than {MAX_ARGUMENT_BYTES:,} bytes: send less, or split the call."
_TOO_DEEP: Final = "The arguments are nested too deep: send a flatter value, of at most {} levels."
_BIG_NUMBER: Final = f"The arguments hold a whole number of more than {MAX_DIGITS} digits: send a smaller one, or text."
_NO_NUMBER: Final = "The arguments hold a number that is not finite or too large: send a finite number, null or text."
_HALF_CHARACTER: Final = (
    "The arguments hold half of a surrogate pair, which is no character: send the whole character, "
    "or both halves of its escape."
)
_EMPTY: Final = "The arguments are empty, but the tool has required arguments: send them as one JSON object."
_UNREADABLE: Final = "The arguments could not be read: send one plain JSON object."

# What the parser of the standard library reports -> what the model is told. The original texts may
# quote the input, so only these go out.
_SYNTAX: Final[tuple[tuple[str, str], ...]] = (
    ("Expecting property name", "expected a name in double quotes"),
    ("Illegal trailing comma", "a comma stands before the end of an object or list"),
    ("Expecting ':'", "expected ':' after a name"),
    ("Expecting ','", "expected ',' or the end of the object or list"),
    ("Expecting value", "expected a value"),
    ("Unterminated string", "a string does not end; it starts"),
    ("Invalid control", "a raw control character in a string (write a line break as \\n)"),
    ("Invalid \\", "a wrong escape in a string"),
    ("Unexpected UTF-8 BOM", "a byte order mark, which JSON does not have,"),
    ("Extra data", "text after the end of the value"),
)
_INT64: Final = 1 << 63
_HUGE: Final = 10**MAX_DIGITS


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ArgumentsRefused("The arguments give one name twice in the same object: give each name once.")
    return out


def _float(text: str) -> float:
    value = float(text)
    if isfinite(value):
        return value
    raise ArgumentsRefused(_NO_NUMBER)


def _constant(_: str) -> float:
    raise ArgumentsRefused(_NO_NUMBER)


def _int(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ArgumentsRefused(_BIG_NUMBER)
    return int(text)


_Scan = Callable[[str, int], tuple[object, int]]


def _scanner(parse_int: Callable[[str], int] | None) -> _Scan:
    decoder = json.JSONDecoder(
        object_pairs_hook=_unique, parse_float=_float, parse_constant=_constant, parse_int=parse_int
    )
    return cast(_Scan, decoder.scan_once)  # type: ignore[attr-defined]


# A text of MAX_DIGITS characters cannot hold too long a number, so the usual text is read without a call per number.
_scan_short: Final = _scanner(None)
_scan_long: Final = _scanner(_int)

# Possessive, and with an end for the open string too: it never steps back, so it is linear on any text.
_STRINGS: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS: Final = re.compile(r"[^\[\]]+")
_ONE_KIND: Final = {ord("{"): "[", ord("}"): "]"}


def load_arguments(raw: object, *, any_required: bool) -> dict[str, object]:
    """Read arguments as they came into a fresh dictionary, or refuse them.

    Args:
        raw: JSON text, UTF-8 bytes of it, or a mapping.
        any_required: the tool has required arguments, so empty text is refused instead of meaning {}.

    Returns:
        Names to values. Objects and lists in it are fresh; other Python objects of a mapping are passed on.

    Raises:
        ArgumentsRefused: what was given is not one JSON object within the limits.
    """
    return _load(raw, _EMPTY if any_required else "", MAX_DEPTH)[0]


def _load(raw: object, empty: str, depth: int) -> tuple[dict[str, object], bool]:
    """The loaded arguments, and whether there may be a bool among them."""
    if isinstance(raw, str):
        return _from_text(raw, empty, depth), "true" in raw or "false" in raw
    if type(raw) is dict or isinstance(raw, Mapping):  # the check of the abstract class is slow
        return _from_mapping(raw, depth)
    if isinstance(raw, bytes | bytearray):
        if len(raw) > MAX_ARGUMENT_BYTES:
            raise ArgumentsRefused(_TOO_LONG)
        text = raw.decode("utf-8", "replace")
        if text.encode() != raw:
            raise ArgumentsRefused("The arguments are not UTF-8 text: send one JSON object in UTF-8.")
        return _load(text, empty, depth)
    raise ArgumentsRefused(_not_an_object(raw))


def _from_text(text: str, empty: str, depth: int) -> dict[str, object]:
    """Parse JSON text. `empty` is the refusal of blank text, or "" where blank means {}."""
    if len(text) > MAX_ARGUMENT_BYTES or (not text.isascii() and _utf8_bytes(text) > MAX_ARGUMENT_BYTES):
        raise ArgumentsRefused(_TOO_LONG)
    start = 0
    if not text.startswith("{"):
        if not text or text.isspace():
            if empty:
                raise ArgumentsRefused(empty)
            return {}
        if text.startswith("\ufeff"):
            raise ArgumentsRefused(_syntax(text, "Unexpected UTF-8 BOM", 0))
        start = len(text) - len(text.lstrip(_WHITESPACE))
    if len(text) > depth and text.count("{") + text.count("[") > depth and _deep(text, depth):
        raise ArgumentsRefused(_TOO_DEEP.format(depth))
    try:
        value, end = (_scan_short if len(text) <= MAX_DIGITS else _scan_long)(text, start)
        if end == len(text) or not text[end:].strip(_WHITESPACE):
            if type(value) is dict:
                if "\\u" in text and _halved(value):
                    raise ArgumentsRefused(_HALF_CHARACTER)
                return value
            told = _not_an_object(value)
        else:
            told = _syntax(text, "Extra data", end + len(text[end:]) - len(text[end:].lstrip(_WHITESPACE)))
    except StopIteration as stop:
        told = _syntax(text, "Expecting value", cast(int, stop.value))
    except json.JSONDecodeError as error:
        told = _syntax(text, error.msg, error.pos)
    except ValueError:  # the interpreter was told to read fewer digits than we would
        told = _BIG_NUMBER
    except RecursionError:  # little stack was left where we were called
        told = _TOO_DEEP.format(depth)
    # Raised out here so that no exception that holds the text hangs on to it.
    raise ArgumentsRefused(told)


def _utf8_bytes(text: str) -> int:
    size = len(text.encode("utf-8", "replace"))
    if size < len(text) or _halved(text):
        raise ArgumentsRefused(_HALF_CHARACTER)
    return size


def _halved(value: object) -> bool:
    """Is there a lone surrogate anywhere in a JSON value?"""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        return True
    return False


def _deep(text: str, depth: int) -> bool:
    """Is the text nested too deep? Decided before parsing, since deep recursion ends differently on every Python."""
    brackets = _NO_BRACKETS.sub("", _STRINGS.sub("", text).translate(_ONE_KIND))
    for _ in range(depth):
        if "[]" not in brackets:
            break
        brackets = brackets.replace("[]", "")
    return "[]" in brackets or brackets.count("[") > depth


def _syntax(text: str, report: str, position: int) -> str:
    found = next((said for start, said in _SYNTAX if report.startswith(start)), "something unexpected")
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    early = "" if position < len(text.rstrip()) else ", where the text ends: it may have been cut off"
    return (
        f"The arguments are not valid JSON: {found} at line {line}, column {column}{early}. Send one whole JSON object."
    )


_KINDS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "a string (send the object itself, not JSON inside a string)"),
    ((list, tuple), "a list"),
    (type(None), "null"),
)


def _not_an_object(value: object) -> str:
    kind = next((word for kinds, word in _KINDS if isinstance(value, kinds)), "something else")
    return f'The arguments must be one JSON object, such as {{"name": "value"}}: got {kind}.'


class _Left:
    """What a mapping may still hold; it also ends cycles and shared bulk."""

    __slots__ = ("bools", "depth", "size")

    def __init__(self, depth: int) -> None:
        self.size = MAX_ARGUMENT_BYTES
        self.depth = depth
        self.bools = False

    def take(self, size: int) -> None:
        self.size -= size
        if self.size < 0:
            raise ArgumentsRefused(_TOO_LONG)


def _from_mapping(given: Mapping[object, object], depth: int) -> tuple[dict[str, object], bool]:
    left = _Left(depth)
    try:
        return _object(given, 1, left), left.bools
    except ArgumentsRefused:
        raise
    except Exception as error:  # a mapping of somebody's own, or one that changes while it is read
        told = _TOO_DEEP.format(depth) if isinstance(error, RecursionError) else _UNREADABLE
    raise ArgumentsRefused(told)


def _object(given: Mapping[object, object], depth: int, left: _Left) -> dict[str, object]:
    """A fresh copy within the limits."""
    if depth > left.depth:
        raise ArgumentsRefused(_TOO_DEEP.format(left.depth))
    size = len(given)
    left.take(size)
    out: dict[str, object] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise ArgumentsRefused("The arguments hold a name that is not text: all names must be strings.")
        size = len(name) if name.isascii() else _utf8_bytes(name)
        if type(value) is str and value.isascii():
            size += len(value)
        elif type(value) is not int or not -_INT64 <= value < _INT64:
            value = _value(value, depth, left)
        left.take(size)
        out[name] = value
    return out


def _value(value: object, depth: int, left: _Left) -> object:
    kind = type(value)
    if kind is dict:
        return _object(cast(dict[object, object], value), depth + 1, left)
    if kind is list or kind is tuple:
        return _list(cast(Sequence[object], value), depth + 1, left)
    if isinstance(value, str):
        left.take(len(value) if value.isascii() else _utf8_bytes(value))
    elif isinstance(value, float):
        if not isfinite(value):
            raise ArgumentsRefused(_NO_NUMBER)
    elif isinstance(value, int):
        left.bools = left.bools or kind is bool
        if not -_HUGE < value < _HUGE:
            raise ArgumentsRefused(_BIG_NUMBER)
    elif isinstance(value, Mapping):
        return _object(value, depth + 1, left)
    elif value is not None:  # a Python object of a native call is passed on as it is
        left.bools = True
        left.take(len(value) if isinstance(value, bytes | bytearray) else 0)
    return value


def _list(given: Sequence[object], depth: int, left: _Left) -> object:
    if depth > left.depth:
        raise ArgumentsRefused(_TOO_DEEP.format(left.depth))
    left.take(len(given))
    items = [_value(item, depth, left) for item in given]
    return items if type(given) is list else tuple(items)


# --- telling the model ----------------------------------------------------------------------------------


_TYPES: Final[dict[str, str]] = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_BOUNDS: Final[tuple[tuple[str, str], ...]] = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "above {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "below {}"),
    ("multipleOf", "a multiple of {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("pattern", "matching the pattern {}"),
    ("format", "in the format {}"),
    ("minItems", "at least {} entries"),
    ("maxItems", "at most {} entries"),
    ("minProperties", "at least {} names"),
    ("maxProperties", "at most {} names"),
    ("uniqueItems", "without repeats"),
)
_RULES: Final = (
    *("not", "if", "dependentSchemas", "dependentRequired", "dependencies", "patternProperties", "propertyNames"),
    *("contains", "unevaluatedItems", "unevaluatedProperties"),
)

_Problem = tuple[str, str]
"""A place in the arguments ("" for the whole) and what is said of it; both made of schema text only."""


def _quoted(name: str) -> str:
    return repr(name if len(name) <= _NAME else name[:_NAME] + "...")


def _listed(names: Iterable[str], most: int = 10) -> str:
    ordered = list(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(map(_quoted, ordered[:most])) + more


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _NAME else text[:_NAME] + "..."


def _mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, dict) else {}


def _sequence(value: object) -> Sequence[object]:
    return cast(Sequence[object], value) if isinstance(value, list) else ()


def _pointed(root: object, reference: str) -> object:
    """What a reference of the form #/a/b points to; None when there is nothing."""
    node = root if reference[1:2] in ("", "/") else None
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and step.isdecimal() and int(step[:9]) < len(node):
            node = node[int(step[:9])]
        else:
            return None
    return node


def _followed(root: object, node: object, pointer: str) -> tuple[str, Mapping[str, object]]:
    """The schema that stands behind the references of a node, and the pointer to it."""
    for _ in range(MAX_DEPTH):
        found = _mapping(node)
        reference = found.get("$ref")
        only = _sequence(found.get("allOf"))
        if isinstance(reference, str):
            pointer, node = "#" + unquote(reference[1:]), _pointed(root, reference)
        elif len(only) == 1 and "type" not in found:
            pointer, node = f"{pointer}/allOf/0", only[0]
        else:
            return pointer, found
    return pointer, {}


def _resolved(root: object, node: object) -> Mapping[str, object]:
    return _followed(root, node, "")[1]


def _branches(node: Mapping[str, object]) -> Sequence[object]:
    return _sequence(node.get("anyOf")) or _sequence(node.get("oneOf"))


def _expected(root: object, node: object, inside: int = 2) -> str:
    """What a value must be, in words, from its schema; "" when the schema says nothing."""
    node = _resolved(root, node)
    if "const" in node:
        return _shown(node["const"])
    if "enum" in node:
        options = [_shown(option) for option in _sequence(node["enum"])]
        more = f" and {len(options) - 12} more" if len(options) > 12 else ""
        return ("one of " if len(options) > 1 else "") + ", ".join(options[:12]) + more
    if inside and _branches(node):
        return " or ".join(dict.fromkeys(filter(None, (_expected(root, sub, inside - 1) for sub in _branches(node)))))
    types = node.get("type")
    words = [_TYPES.get(str(word), "") for word in (types if isinstance(types, list) else [types])]
    if words == ["an object"] and node.get("required"):
        words = ["an object with " + _listed(map(str, _sequence(node["required"])), 6)]
    if words == ["a list"] and inside:
        items = _expected(root, node.get("items"), inside - 1)
        words = [f"a list, each entry {items}" if items else "a list"]
    parts = [" or ".join(filter(None, words))]
    for keyword, phrase in _BOUNDS:
        bound = node.get(keyword, False)
        if bound is not False:
            parts.append(phrase.format(bound[:_NAME] if isinstance(bound, str) else _shown(bound)))
    parts += ["within the other rules of its schema"] if any(keyword in node for keyword in _RULES) else []
    return ", ".join(filter(None, parts))


def _demand(root: object, node: object) -> str:
    expected = _expected(root, node)
    return f"must be {expected}" if expected else "does not fit its schema"


def _missing(root: object, node: object) -> str:
    expected = _expected(root, node)
    return f"is required ({expected})" if expected else "is required"


def _unknown(names: Sequence[str], known: Iterable[str]) -> str:
    """What is said of names that are not in the schema: how many, and which known ones are near; never themselves."""
    known = sorted(known)
    near = list(dict.fromkeys(near for name in names[:_TOLD] for near in near_names(name, known)))[:_TOLD]
    count = "a name that is" if len(names) == 1 else f"{len(names)} names that are"
    hint = f" (did you mean {_listed(near)}?)" if near else ""
    rest = f"the known ones are {_listed(known)}" if known else "it has none"
    return f"has {count} not in its schema{hint}: {rest}"


def _nothing_given(root: Mapping[str, object], required: Iterable[str]) -> str:
    """The refusal of blank text, with the names that are required; "" when none are."""
    known = _mapping(_resolved(root, root).get("properties"))
    lines = [f"{_quoted(name)} {_missing(root, known.get(name))}" for name in sorted(required)]
    more = f"; and {len(lines) - _TOLD} more" if len(lines) > _TOLD else ""
    return f"The arguments are empty: {'; '.join(lines[:_TOLD])}{more}. Send them as one JSON object." if lines else ""


def _told(problems: Sequence[_Problem], more: str = "") -> str:
    """The refusal: at most five problems, those of one place together."""
    places: dict[str, list[str]] = {}
    for place, said in problems:
        texts = places.setdefault(place, [])
        if said not in texts:
            texts.append(said)
    lines = []
    for place, texts in places.items():
        who = f"argument '{place if len(place) <= 120 else place[:120] + '...'}'" if place else "the object"
        lines.append(f"{who} {' or '.join(texts[:_TOLD])}")
    rest = len(lines) - _TOLD
    if rest > 0:
        more = more or f"{rest} more"
    return (
        f"The arguments do not fit the tool: {'; '.join(lines[:_TOLD])}{f'; and {more}' if more else ''}. "
        "Nothing was run; correct them and call again."
    )


def _below(place: str, name: str) -> str:
    name = name if len(name) <= _NAME else name[:_NAME] + "..."
    return f"{place}.{name}" if place else name


# --- names ------------------------------------------------------------------------------------------------


def _key(name: str) -> str:
    return "".join(filter(str.isalnum, name[:128].casefold()))


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that somebody may have meant, nearest first.

    Case and punctuation do not count ("Ok" is "ok", "readCustomer" is "read_customer"). Only the first 128
    characters are compared, so that a name of any length is cheap.

    Args:
        name: the name that is not known.
        known: the names to choose from.
        most: most names to return.
    """
    wanted = _key(name)
    if not wanted:
        return []
    scores: list[tuple[float, str]] = []
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    for count, candidate in enumerate(sorted(set(known))):
        key = _key(candidate)
        if key == wanted:
            scores.append((-2.0, candidate))
        elif len(key) > 2 and len(wanted) > 2 and (key in wanted or wanted in key):
            scores.append((-1.0, candidate))
        elif count < 1000:
            matcher.set_seq1(key)
            if matcher.real_quick_ratio() >= 0.6 and matcher.quick_ratio() >= 0.6 and matcher.ratio() >= 0.6:
                scores.append((-matcher.ratio(), candidate))
    return [candidate for _, candidate in sorted(scores)[:most]]


# --- signatures -----------------------------------------------------------------------------------------------


def checker_from_function(function: Callable[..., object], *, context_parameter: str | None) -> Checker:
    """A checker from a handler's signature: annotations are the types, defaults make arguments optional.

    Args:
        function: a function, bound method, functools.partial or object with `__call__`. What a partial has
            bound by keyword is fixed: the model neither sees nor gives it.
        context_parameter: the parameter that gets the Context; it is left out of schema and validation.

    Raises:
        PolicyError: a parameter cannot be given by name, or its type cannot be read from JSON.
    """
    try:
        annotated = list(_annotated(function))
    except (TypeError, ValueError) as error:
        raise PolicyError(
            f"tool function {_called(function)}: its signature cannot be read; wrap it in a function of your own, "
            "or register the tool with schema=..."
        ) from error
    parameters = []
    for parameter, resolved in annotated:
        if parameter.name == context_parameter and parameter.kind is not parameter.POSITIONAL_ONLY:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise _wrong(function, parameter, "is positional-only, but arguments come by name", "remove the '/'")
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise _wrong(function, parameter, "takes arguments without a name", "make it one list parameter")
        if get_origin(resolved) is typing.Unpack:
            raise _wrong(function, parameter, "unpacks a TypedDict", "write its names as keyword parameters")
        if isinstance(resolved, _Unresolved):
            fix = "import or define it before the tool is registered, also at run time (not only under TYPE_CHECKING)"
            raise _wrong(function, parameter, f"has an annotation that cannot be resolved ({resolved.told})", fix)
        parameters.append(parameter.replace(annotation=resolved))
    try:
        return _SignatureChecker(function, parameters)
    except Exception as error:
        for parameter in parameters:
            if reason := _unreadable(parameter):
                fix = "annotate it with a type that pydantic reads from JSON, or register the tool with schema=..."
                raise _wrong(function, parameter, f"cannot be read from JSON: {reason}", fix) from error
        raise PolicyError(f"tool function {_called(function)}: {_first_line(error)}") from error


def context_parameter_of(function: Callable[..., object], context_type: type) -> str | None:
    """Name of the parameter annotated with `context_type` (a subclass, or optional, too), or None.

    Raises:
        PolicyError: more than one parameter is.
    """
    try:
        annotated = list(_annotated(function))
    except (TypeError, ValueError):  # a built-in without a signature takes no context
        return None
    found = [
        parameter.name
        for parameter, annotation in annotated
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and _is_context(annotation, context_type)
    ]
    if len(found) > 1:
        raise PolicyError(
            f"tool function {_called(function)}: parameters {_listed(found)} are all {context_type.__name__}: keep one"
        )
    return found[0] if found else None


def _is_context(annotation: object, context_type: type) -> bool:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_context(get_args(annotation)[0], context_type)
    if origin is Union or origin is types.UnionType:
        return any(_is_context(member, context_type) for member in get_args(annotation))
    annotation = origin or annotation
    return isinstance(annotation, type) and issubclass(annotation, context_type)


class _Unresolved:
    """Stands for an annotation whose names are not to be found."""

    __slots__ = ("told",)

    def __init__(self, told: str) -> None:
        self.told = told


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _called(function: object) -> str:
    named = function if hasattr(function, "__qualname__") else _plain(function)
    return repr(getattr(named, "__qualname__", type(function).__qualname__))


def _wrong(function: object, parameter: inspect.Parameter, what: str, fix: str) -> PolicyError:
    return PolicyError(f"tool function {_called(function)}: parameter {parameter.name!r} {what}; {fix}")


def _plain(function: object) -> object:
    """The Python function behind partials, methods, decorators, classes and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, type):
            return function.__init__  # type: ignore[misc]  # only looked at
        elif not hasattr(function, "__globals__") and hasattr(type(function).__call__, "__globals__"):
            function = type(function).__call__
        else:
            return function


def _annotated(function: Callable[..., object]) -> Iterator[tuple[inspect.Parameter, object]]:
    """The parameters that the model could give, each with its annotation, names resolved where they can be."""
    signature = inspect.signature(function)
    bound: set[str] = set()
    layer: object = function
    while isinstance(layer, functools.partial):
        bound.update(layer.keywords)
        layer = layer.func
    plain = _plain(function)
    module, local = cast(dict[str, object], getattr(plain, "__globals__", {})), _enclosing(plain)
    for parameter in signature.parameters.values():
        if parameter.name in bound:
            continue
        resolved: object = parameter.annotation
        if resolved is not parameter.empty:
            holder = types.SimpleNamespace(__annotations__={"it": resolved})
            try:
                resolved = typing.get_type_hints(holder, module, local, include_extras=True)["it"]
            except Exception as error:
                resolved = _Unresolved(_first_line(error))
        yield parameter, resolved


def _enclosing(plain: object) -> dict[str, object]:
    """What the functions around a function have as local names: its closure, and those that are running now."""
    names: dict[str, object] = {kind.__name__: kind for kind in getattr(plain, "__type_params__", ())}
    code = getattr(plain, "__code__", None)
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(plain, "__closure__", None) or (), strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # assigned later
            continue
    outer = str(getattr(plain, "__qualname__", "")).split(".<locals>.")[:-1]
    around = {".<locals>.".join(outer[: count + 1]) for count in range(len(outer))}
    frame: types.FrameType | None = sys._getframe()
    while frame and around:
        if frame.f_code.co_qualname in around and frame.f_globals is getattr(plain, "__globals__", None):
            names = {**frame.f_locals, **names}
        frame = frame.f_back
    return names


def _unreadable(parameter: inspect.Parameter) -> str:
    try:
        _adapter([parameter]).json_schema(schema_generator=_json_schema_generator())
    except Exception as error:
        return _first_line(error)
    return ""


def _adapter(parameters: Iterable[inspect.Parameter]) -> TypeAdapter[dict[str, object]]:
    """Pydantic's view of a function that takes all parameters by keyword and returns them."""
    from pydantic import TypeAdapter

    def collect(**given: object) -> dict[str, object]:
        return given

    by_name = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    collect.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    collect.__annotations__ = {p.name: p.annotation for p in by_name if p.annotation is not p.empty}
    return TypeAdapter(cast("type[dict[str, object]]", collect))


@functools.cache
def _json_schema_generator() -> type[GenerateJsonSchema]:
    from pydantic.json_schema import GenerateJsonSchema

    class Quiet(GenerateJsonSchema):
        """Without made-up titles, and without warnings, which print defaults."""

        def emit_warning(self, kind: object, detail: object) -> None:
            pass

        def field_title_should_be_set(self, schema: object) -> bool:
            return False

    return Quiet


_NUMBERS: Final[tuple[object, ...]] = (int, float, complex, Decimal, timedelta)
_CONTAINERS: Final[tuple[object, ...]] = (
    *(list, set, frozenset, tuple, dict, deque, Sequence, MutableSequence, Iterable, Set, Mapping),
    *(Union, types.UnionType),
)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        from pydantic_core import PydanticKnownError

        raise PydanticKnownError("int_type")
    return value


def _guarded(annotation: object) -> object:
    """The annotation with its numbers refusing true and false; the same object when there are none."""
    from pydantic import BeforeValidator

    if any(annotation is number for number in _NUMBERS):
        return Annotated[annotation, BeforeValidator(_no_bool)]
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bare, *constraints = members
        if any(bare is number for number in _NUMBERS):
            # Last means outermost: the guard runs first, and the constraints still meet the bare number.
            return Annotated[(bare, *constraints, BeforeValidator(_no_bool))]
        guarded = _guarded(bare)
        return annotation if guarded is bare else Annotated[(guarded, *constraints)]
    if not any(origin is container for container in _CONTAINERS):
        return annotation
    inner = tuple(member if member is ... else _guarded(member) for member in members)
    if all(new is old for new, old in zip(inner, members, strict=True)):
        return annotation
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007  # made at run time
    return cast(types.GenericAlias, origin)[inner]


class _Validator(Protocol):
    def validate_python(self, value: object, /) -> dict[str, object]: ...  # pragma: no cover - a protocol has no body

    def validate_json(self, text: str, /) -> dict[str, object]: ...  # pragma: no cover - a protocol has no body


class _SignatureChecker:
    """Pydantic against a signature."""

    __slots__ = (
        "_careful",
        "_depth",
        "_empty",
        "_function",
        "_guards",
        "_plain",
        "_root",
        "_schema",
        "names",
        "required",
    )

    def __init__(self, function: Callable[..., object], parameters: Sequence[inspect.Parameter]) -> None:
        adapter = _adapter(parameters)
        generated = adapter.json_schema(schema_generator=_json_schema_generator())
        self._root: dict[str, object] = {"type": "object", "properties": {}, **generated}
        self._schema: dict[str, object] | None = None
        self._function = function
        self._plain = cast(_Validator, adapter.validator)
        self.names = frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
        self.required = frozenset(map(str, _sequence(self._root.get("required"))))
        self._empty = _nothing_given(self._root, self.required)
        self._depth = _depth_limit(self._root)
        self._guards = [p.replace(annotation=_guarded(p.annotation)) for p in parameters]
        same = all(new.annotation is old.annotation for new, old in zip(self._guards, parameters, strict=True))
        self._careful = self._plain if same else None

    @property
    def schema(self) -> Mapping[str, object]:
        """JSON schema of the arguments; the docstring describes what the annotations do not."""
        if self._schema is None:
            schema = copy.deepcopy(self._root)
            described = _described(self._function)
            for name, part in _mapping(schema["properties"]).items():
                if name in described:
                    cast(dict[str, object], part).setdefault("description", described[name])
            self._schema = schema
        return copy.deepcopy(self._schema)

    def check(self, raw: Arguments | str) -> dict[str, object]:
        """Load and validate; see `Checker.check`."""
        values, bools = _load(raw, self._empty, self._depth)
        # Where there is no bool at all, the usual call is spared the look at every number.
        validator = self._guard() if bools else self._plain
        try:
            return validator.validate_python(values)
        except Exception as error:  # a validator of the handler's author may raise anything
            problem = error
        try:
            text = json.dumps(values)
        except (TypeError, ValueError, RecursionError):  # Python objects of a native call: the first answer stands
            text = ""
        if text:
            try:
                return validator.validate_json(text)
            except Exception as error:
                problem = error
        told = self._explain(problem, values)
        del problem  # it holds the values, and a reference to this frame
        raise ArgumentsRefused(told)

    def _guard(self) -> _Validator:
        if self._careful is None:
            self._careful = cast(_Validator, _adapter(self._guards).validator)
        return self._careful

    def _explain(self, error: Exception, values: dict[str, object]) -> str:
        from pydantic import ValidationError

        if not isinstance(error, ValidationError):
            return f"The tool's own check of its arguments failed ({type(error).__name__}). Nothing was run."
        more = ""
        if error.error_count() > _COUNTED:  # a long list of mistakes: look at the beginnings only
            more = "many more"
            try:
                self._guard().validate_python(_beginning(values))
            except Exception as shorter:
                error = shorter if isinstance(shorter, ValidationError) else error
        errors = error.errors(include_url=False, include_context=False, include_input=False)[:_COUNTED]
        return _told(list(_located(self._root, ((item["type"], item["loc"]) for item in errors))), more)


def _beginning(value: object) -> object:
    if isinstance(value, dict):
        return {name: _beginning(part) for name, part in value.items()}
    return [_beginning(item) for item in value[:_TOLD]] if isinstance(value, list) else value


@functools.cache
def _known_errors() -> frozenset[str]:
    from pydantic_core import core_schema

    return frozenset(map(str, get_args(core_schema.ErrorType))) - {"value_error", "assertion_error"}


def _located(root: Mapping[str, object], errors: Iterable[tuple[str, tuple[str | int, ...]]]) -> Iterator[_Problem]:
    """Pydantic's errors in our own words."""
    unknown: dict[str, tuple[list[str], Mapping[str, object]]] = {}
    for kind, location in errors:
        if kind in ("unexpected_keyword_argument", "extra_forbidden"):
            place, node = _place(root, location[:-1])
            known = _mapping(_entered(root, node).get("properties"))
            unknown.setdefault(place, ([], known))[0].append(str(location[-1]))
            continue
        place, node = _place(root, location)
        if kind.startswith("missing"):
            yield place, _missing(root, node)
        elif kind in _known_errors():
            yield place, _demand(root, node)
        else:
            expected = _expected(root, node)
            yield place, "is refused by the tool's own check" + (f" ({expected})" if expected else "")
    for place, (names, known) in unknown.items():
        yield place, _unknown(names, known)


def _entered(root: object, node: object) -> Mapping[str, object]:
    """The schema behind references and behind "or null"."""
    node = _resolved(root, node)
    options = [_resolved(root, option) for option in _branches(node)]
    options = [option for option in options if option.get("type") != "null"]
    return options[0] if len(options) == 1 else node


def _place(root: Mapping[str, object], location: Iterable[str | int]) -> tuple[str, Mapping[str, object]]:
    """Where a problem is, as far as the schema names it, and the schema of that place.

    A step that the schema does not name is a key that the model made up, or a branch of a union: neither is shown.
    """
    place, node = "", root
    for step in location:
        node = _entered(root, node)
        properties, others = _mapping(node.get("properties")), node.get("additionalProperties")
        if isinstance(step, int):
            prefix = _sequence(node.get("prefixItems"))
            place, node = f"{place}[{step}]", _mapping(prefix[step] if step < len(prefix) else node.get("items"))
        elif step in properties:
            place, node = _below(place, step), _mapping(properties[step])
        elif isinstance(others, dict):
            place, node = _below(place, "*"), others
        else:
            tags = _mapping(_mapping(node.get("discriminator")).get("mapping"))
            titled = [option for option in _branches(node) if _resolved(root, option).get("title") == step]
            if step not in tags and not titled:
                break
            node = {"$ref": tags[step]} if step in tags else _mapping(titled[0])
    return place, node


# --- JSON schemas -----------------------------------------------------------------------------------------------


_HERE: Final = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_INSIDE: Final = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("prefixItems", "items", "additionalItems", "contains", "unevaluatedItems"),
)
_STORED: Final = ("$defs", "definitions")
_MAPS: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies", *_STORED})
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")


def checker_from_schema(schema: Mapping[str, object]) -> Checker:
    """A checker from a JSON schema of an object, as MCP servers and provider tool lists give it.

    The draft is what `$schema` says, else 2020-12. What the schema does not forbid passes, further names too.
    Defaults of the properties are filled in where they fit their own schema.

    Args:
        schema: plain JSON data, at most MAX_SCHEMA_BYTES large and MAX_DEPTH deep.

    Raises:
        PolicyError: the schema is not valid, not of an object, or too large; it refers to something outside itself
            (nothing is ever fetched); or it could try more than MAX_SCHEMA_STEPS subschemas on one value.
    """
    return _SchemaChecker(schema)


def _subschemas(node: Mapping[str, object], keywords: Iterable[str]) -> Iterator[tuple[str, object]]:
    """(pointer below the node, subschema) of the given keywords."""
    for keyword in keywords:
        part = node.get(keyword)
        if isinstance(part, list):
            yield from ((f"/{keyword}/{index}", sub) for index, sub in enumerate(part))
        elif keyword in _MAPS:
            yield from ((f"/{keyword}/{_escaped(name)}", sub) for name, sub in _mapping(part).items())
        elif part is not None:
            yield f"/{keyword}", part


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _positions(node: object, pointer: str = "#") -> Iterator[tuple[str, Mapping[str, object]]]:
    """Every subschema with its pointer."""
    if isinstance(node, dict):
        yield pointer, node
        for below, sub in _subschemas(node, (*_HERE, *_INSIDE, *_STORED)):
            yield from _positions(sub, pointer + below)


def _anchors(root: Mapping[str, object]) -> dict[str, object]:
    """The named places of a schema, after a look at all its references: none may lead out of it."""
    base = "id" if "draft-04" in str(root.get("$schema")) else "$id"
    positions = list(_positions(root))
    anchors: dict[str, object] = {}
    for _, node in positions:
        for keyword in ("$anchor", "$dynamicAnchor", base):
            name = node.get(keyword)
            if isinstance(name, str):
                anchors["#" + name.removeprefix("#")] = node
    references = [
        (pointer, reference)
        for pointer, node in positions
        for reference in map(node.get, _REFERENCES)
        if isinstance(reference, str)
    ]
    for pointer, reference in references:
        if not reference.startswith("#") or _target(root, anchors, reference) is None:
            raise PolicyError(
                f"schema: {pointer} refers to {_quoted(reference)}, which is not in this schema and is never fetched; "
                "put it under $defs and write #/$defs/NAME"
            )
    for pointer, node in positions[1:] if references else ():
        if not str(node.get(base, "#")).startswith("#"):
            raise PolicyError(f"schema: {pointer} has an {base}; remove it, and write references as #/$defs/NAME")
    return anchors


def _target(root: object, anchors: Mapping[str, object], reference: str) -> object:
    return anchors.get(reference, _pointed(root, reference))


def _steps(root: object, anchors: Mapping[str, object], depth: int | None) -> int:
    """How many subschemas a validator may try on one value, and on the worst path of parts below it, at most.

    All that applies to one value adds up, and multiplies from level to level: three alternatives that each look into
    `left` look 3^n times at a value n levels below. Recursion goes on for `depth` levels; None: for a validator that
    remembers its answers, and so pays for each recursive place once.
    """
    known: dict[tuple[int, int | None], int] = {}

    def steps(node: object, depth: int | None) -> int:
        key = (id(node), depth)
        if key in known or depth == 0:
            return known.get(key, 1)
        known[key] = 0
        here, waiting = 0, [(node, 0)]
        parts: dict[str, list[object]] = {}
        chosen: list[object] = []  # a discriminator says which one of these is tried
        while waiting and here <= MAX_SCHEMA_STEPS:
            part, hops = waiting.pop()
            if hops > MAX_DEPTH:  # each hop takes stack in the validator, and again on every level of the value
                return MAX_SCHEMA_STEPS + 1
            one = _mapping(part)
            here += 1
            targets = [_target(root, anchors, to) for to in map(one.get, _REFERENCES) if isinstance(to, str)]
            tried = [sub for _, sub in _subschemas(one, _HERE)]
            if depth is not None and "discriminator" in one:
                chosen += tried
            else:
                targets += tried
            waiting += [(sub, hops + 1) for sub in targets]
            for below, sub in _subschemas(one, _INSIDE):
                parts.setdefault(below, []).append(sub)
        # Plain loops: calls from sum or max would take stack of the machine, of which a thread may have little.
        below_that = None if depth is None else depth - 1
        most_chosen = most_below = 0
        for sub in chosen:
            most_chosen = max(most_chosen, steps(sub, depth))
        for subs in parts.values() if here <= MAX_SCHEMA_STEPS else ():
            total = 0
            for sub in subs:
                total += steps(sub, below_that)
            most_below = max(most_below, total)
        known[key] = min(here + most_chosen + most_below, MAX_SCHEMA_STEPS + 1)
        return known[key]

    return steps(root, depth)


def _depth_limit(root: Mapping[str, object]) -> int:
    """The levels that pydantic checks quickly: fewer than MAX_DEPTH only where recursion makes more of them costly."""
    if _steps(root, {}, MAX_DEPTH) <= MAX_SCHEMA_STEPS or _steps(root, {}, None) > MAX_SCHEMA_STEPS:
        return MAX_DEPTH
    return next(depth for depth in range(1, MAX_DEPTH) if _steps(root, {}, depth + 1) > MAX_SCHEMA_STEPS)


_ITSELF: Final = "urn:towerman:schema"


class _Options(TypedDict):
    offline: bool
    mask: str
    pattern_options: FancyRegexOptions


@functools.cache
def _options() -> _Options:
    from jsonschema_rs import FancyRegexOptions

    # Patterns without look-around run in linear time; the others may step back only so often on one text.
    return {"offline": True, "mask": "...", "pattern_options": FancyRegexOptions(backtrack_limit=100_000)}


_COMPILED: Final[dict[bytes, Validator]] = {}


def _compiled(schema: dict[str, object]) -> Validator:
    """The validator of a schema in plain JSON data; the same one for equal schemas."""
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).digest()
    found = _COMPILED.get(digest)
    if found is not None:
        return found
    try:
        steps = _steps(schema, _anchors(schema), None)
    except RecursionError:
        raise PolicyError("schema: its references go too deep; write the subschemas in place") from None
    if steps > MAX_SCHEMA_STEPS:
        raise PolicyError(
            f"schema: it could try more than {MAX_SCHEMA_STEPS:,} subschemas on one value, or follow more than "
            f"{MAX_DEPTH} references in a row; use fewer alternatives and references inside each other"
        )
    import jsonschema_rs

    try:
        found = jsonschema_rs.validator_for(schema, **_options())
    except Exception as error:
        path = [str(step) for step in getattr(error, "instance_path", ())]
        hint = f"; types are {', '.join(_TYPES)}" if "type" in path[-2:] else ""
        place = "#/" + "/".join(map(_escaped, path)) if path else "$schema, or a reference,"
        raise PolicyError(f"schema: {place} is not valid JSON Schema{hint}") from error
    if len(_COMPILED) >= 1000:
        _COMPILED.clear()
    _COMPILED[digest] = found
    return found


def _plain_json(schema: object) -> dict[str, object]:
    """A copy of a schema as plain JSON data, within the limits."""
    if not isinstance(schema, Mapping):
        raise PolicyError(f"schema: it must be a mapping, the JSON schema of an object, not {type(schema).__name__}")
    limits = f"at most {MAX_SCHEMA_BYTES:,} bytes of JSON and {MAX_DEPTH} levels"
    try:
        text = json.dumps(_from_mapping(schema, MAX_DEPTH)[0])
    except (ArgumentsRefused, TypeError, ValueError) as error:
        raise PolicyError(f"schema: it must be plain JSON data, {limits}") from error
    if len(text) > MAX_SCHEMA_BYTES:
        raise PolicyError(f"schema: it is larger than {limits}; shorten descriptions or split the tool")
    return cast(dict[str, object], json.loads(text))


class _SchemaChecker:
    """jsonschema-rs against a JSON schema."""

    __slots__ = ("_defaults", "_empty", "_parts_of", "_registry", "_root", "_validator", "names", "required")

    def __init__(self, schema: Mapping[str, object]) -> None:
        self._root = _plain_json(schema)
        self._root.pop("$id", None)  # all references are inside, so a name of its own would only get in their way
        self._validator = _compiled(self._root)
        self._registry: Registry | None = None
        self._parts_of: dict[str, Validator] = {}
        pointer, top = _followed(self._root, self._root, "#")
        kind = top.get("type", "object")
        if kind != "object" and "object" not in _sequence(kind):
            raise PolicyError(f"schema: arguments are an object, so its type must be object, not {_shown(kind)}")
        properties = _mapping(top.get("properties"))
        self.names = frozenset(properties)
        self.required = frozenset(map(str, _sequence(top.get("required"))))
        self._empty = _nothing_given(self._root, self.required)
        self._defaults = [
            (name, part["default"])
            for name, part in properties.items()
            if isinstance(part, dict)
            and "default" in part
            and not self._fails(f"{pointer}/properties/{_escaped(name)}", part["default"])
        ]

    @property
    def schema(self) -> Mapping[str, object]:
        """The JSON schema as it was given, with `type` and `properties` always there."""
        return copy.deepcopy({"type": "object", "properties": {}, **self._root})

    def check(self, raw: Arguments | str) -> dict[str, object]:
        """Load and validate; see `Checker.check`."""
        values = _load(raw, self._empty, MAX_DEPTH)[0]
        told = ""
        try:
            if not self._validator.is_valid(values):
                told = self._explain(values)
        except Exception:  # a Python object of a native call that JSON does not have
            told = "The arguments hold a value of a type that JSON does not have: send plain JSON data."
        if told:
            raise ArgumentsRefused(told)
        for name, default in self._defaults:
            if name not in values:
                values[name] = copy.deepcopy(default)
        return values

    def _explain(self, values: dict[str, object]) -> str:
        found: list[_Problem] = []
        self._blame("#", self._root, values, "", found, set())
        return _told(found, "many more" if len(found) >= _COUNTED else "")

    def _fails(self, pointer: str, value: object) -> bool:
        """Does a value not fit the subschema at a pointer? Each is compiled when it is first asked for."""
        validator = self._parts_of.get(pointer)
        if validator is None:
            import jsonschema_rs

            if self._registry is None:
                self._registry = jsonschema_rs.Registry([(_ITSELF, self._root)])
            reference = {"$ref": f"{_ITSELF}#{quote(pointer[1:])}"}
            validator = jsonschema_rs.validator_for(reference, registry=self._registry, **_options())
            self._parts_of[pointer] = validator
        return not validator.is_valid(value)

    # The validator's own list of errors grows exponentially with the depth of recursive unions (six seconds at
    # depth 15), while its yes or no does not. So it is only asked yes or no, place by place.

    def _blame(
        self, pointer: str, node: object, value: object, place: str, found: list[_Problem], seen: set[tuple[str, str]]
    ) -> None:
        """Add what is wrong with a value that its schema refuses, as deep as plain steps lead."""
        before = len(found)
        if before >= _COUNTED or (pointer, place) in seen:
            return
        seen.add((pointer, place))
        if isinstance(node, dict):
            for below, sub, part, where in self._same(pointer, node, value, place):
                if self._fails(below, part):
                    self._blame(below, sub, part, where, found, seen)
            if len(found) == before:
                found += self._names(node, value, place)
                for below, sub, part, where in self._parts(pointer, node, value, place):
                    if len(found) < _COUNTED and self._fails(below, part):
                        self._blame(below, sub, part, where, found, seen)
        if len(found) == before:
            found.append((place, _demand(self._root, node)))

    def _same(self, pointer: str, node: Mapping[str, object], value: object, place: str) -> Iterator[_Part]:
        """What stands in for a node: behind its reference, in allOf, or the only branch of the value's kind."""
        reference = node.get("$ref")
        if isinstance(reference, str):
            yield "#" + unquote(reference[1:]), _pointed(self._root, reference), value, place
        for below, sub in _subschemas(node, ("allOf",)):
            yield pointer + below, sub, value, place
        kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
        for keyword in ("anyOf", "oneOf"):
            branches = [
                (pointer + below, sub, value, place)
                for below, sub in _subschemas(node, (keyword,))
                if _resolved(self._root, sub).get("type", kind) == kind
            ]
            if len(branches) == 1:
                yield from branches

    def _names(self, node: Mapping[str, object], value: object, place: str) -> Iterator[_Problem]:
        """Names that are missing, and names that are not allowed."""
        if not isinstance(value, dict):
            return
        known = _mapping(node.get("properties"))
        for name in map(str, _sequence(node.get("required"))):
            if name not in value:
                yield _below(place, name), _missing(self._root, known.get(name))
        unknown = [name for name in value if name not in known]
        if unknown and node.get("additionalProperties") is False and "patternProperties" not in node:
            yield place, _unknown(unknown, known)

    def _parts(self, pointer: str, node: Mapping[str, object], value: object, place: str) -> Iterator[_Part]:
        """What is inside a value, with the schema of each part."""
        if isinstance(value, dict):
            known = _mapping(node.get("properties"))
            others = node.get("additionalProperties") if "patternProperties" not in node else None
            for name, part in value.items():
                if name in known:
                    yield f"{pointer}/properties/{_escaped(name)}", known[name], part, _below(place, name)
                elif isinstance(others, dict):
                    yield f"{pointer}/additionalProperties", others, part, _below(place, "*")
        elif isinstance(value, list):
            items, first = node.get("items"), node.get("prefixItems")
            keywords = ("prefixItems", "items")
            if isinstance(items, list):  # the tuples of older drafts
                items, first, keywords = node.get("additionalItems"), items, ("items", "additionalItems")
            prefix = _sequence(first)
            for index, part in enumerate(value):
                if index < len(prefix):
                    yield f"{pointer}/{keywords[0]}/{index}", prefix[index], part, f"{place}[{index}]"
                elif isinstance(items, dict):
                    yield f"{pointer}/{keywords[1]}", items, part, f"{place}[{index}]"


# --- docstrings ---------------------------------------------------------------------------------------------------

# Only a docstring with a line like "Args:", ":param x:" or "-----" is worth the import of a parser.
_SECTIONS: Final = re.compile(r"^\s*(?::\w|-{3,}\s*$)|:[ \t]*$", re.MULTILINE)


def description_of(function: Callable[..., object]) -> str:
    """The text of a handler's docstring without its sections on parameters, results and errors; "" if there is none."""
    text = _docstring(function)
    if not _SECTIONS.search(text):
        return text
    parts = []
    for section in _parsed(text):
        if section.kind.value == "text":
            parts.append(str(section.value).strip())
        elif section.kind.value == "admonition":  # a note, a warning: for the model too
            kind = str(section.value.annotation).replace("-", " ").capitalize()
            title = section.title or ""
            heading = f"{title}:" if title.casefold() == kind.casefold() else f"{kind}: {title}"
            parts.append(f"{heading}\n{section.value.description}")
    return "\n\n".join(filter(None, parts))


def _described(function: Callable[..., object]) -> dict[str, str]:
    """Parameter names to their descriptions in the docstring (Google, NumPy or Sphinx style)."""
    text = _docstring(function)
    out: dict[str, str] = {}
    for section in _parsed(text) if _SECTIONS.search(text) else ():
        if section.kind.value in ("parameters", "other parameters"):
            for item in section.value:
                out.setdefault(item.name.lstrip("*"), " ".join(item.description.split()))
    return out


def _docstring(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    plain = function if isinstance(function, type) else _plain(function)
    # An object that is called: what its call says, else what its class says.
    text = plain.__doc__ or ("" if inspect.isroutine(function) else type(function).__doc__)
    return inspect.cleandoc(text or "").strip()


def _parsed(text: str) -> list[DocstringSection]:
    from griffe import Docstring, parse_auto

    docstring = Docstring(text)
    # The style is guessed from whole lines: without a line break around them, the first and the last are not seen.
    docstring.value = f"\n{docstring.value}\n"
    return parse_auto(
        docstring,
        per_style_options={"google": {"warnings": False}, "numpy": {"warnings": False}, "sphinx": {"warnings": False}},
    )
