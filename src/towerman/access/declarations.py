"""What a tool declares, compiled: a template or a callable becomes a function from arguments to accesses.

Theory. A template is literal text and places, `{name.field[key]}`. Its scheme and its literal text are checked and
folded once; a call fills in the places. The usual template, with one name as its last segment, has a short way of its
own for values that are plain numbers or words.

House rules. What is wrong with a declaration is told when the tool is registered, with the tool, the template and the
fix; what is wrong with a call's arguments refuses that call, without any value in the words.

Not here: how a text becomes a key (keys), the reads and writes of a tool together (rules).
"""

from __future__ import annotations

import inspect
import math
import os
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Final

from towerman.access.keys import (
    MAX_ACCESSES,
    MISSING,
    AccessRefused,
    Unnameable,
    file_key,
    home_path,
    is_plain,
    key_of,
    keys_of,
    reached,
    split_scheme,
    texts_of,
    url_path,
)
from towerman.calls import Access, Arguments
from towerman.errors import PolicyError
from towerman.policy import VARIABLE, Declared, FromEnvironment

_MARK: Final = "\1"  # stands for a value; a template cannot hold it

Read = Callable[[Arguments], tuple[Access, ...]]
Foresee = Callable[[Arguments, Collection[str]], tuple[Access, ...] | None]

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
        value = arguments.get(self.name, MISSING)
        try:
            if value is MISSING:
                raise Unnameable("is missing")
            return texts_of(reached(value, self.steps) if self.steps else value)
        except Unnameable as reason:
            told = str(reason)
        except Exception as error:  # a property, a container or a text of the user's own
            told = f"cannot be read ({type(error).__name__[:64]})"
        raise Unnameable(f"argument {self.shown!r} {told}")


@dataclass(frozen=True, slots=True)
class _Source:
    """One compiled template or callable.

    Args:
        read: gives the accesses for arguments.
        foresee: the same while the values of some arguments are not there yet: nodes above, with all below them, where
            the rest cannot be told; None where that could be anything.
        declared: the template or callable itself.
        label: what people are shown.
        subtree: it can give a subtree.
        fixed: it gives the same accesses for every call, for ever.
    """

    read: Read
    foresee: Foresee
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
        scheme, path = split_scheme(first)
    except Unnameable as reason:
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
    path = url_path(parts[0])
    if path is None:
        raise PolicyError(f"{where}: a file URL names no other machine; write file:/path or file:///path")
    from urllib.parse import unquote

    parts[:] = [part for part in (path, *(unquote(p) if isinstance(p, str) else p for p in parts[1:])) if part]


def _file_paths(combination: Sequence[str], places: Sequence[bool]) -> Iterator[str]:
    """All paths that a handler can make of these parts, the plain reading first."""
    text = "".join(combination)
    yield text
    home = home_path(text)
    if home is not None:
        yield home
    for index, part in enumerate(combination):
        if not places[index]:
            continue
        before = "".join(combination[:index])
        if before.endswith("/") and os.path.isabs(part):  # os.path.join forgets what stood before
            yield "".join(combination[index:])
        if part[:6].lower() == "file:/":
            path = url_path(part[5:])
            if path is None:
                raise Unnameable("the URL names a file of another machine")
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
                raise Unnameable(f"the call names more than {MAX_ACCESSES} resources")
            if count == 1 and not is_file:
                return (_access(key_of(scheme, "".join([text for (text,) in texts])), write, subtree, label),)
            combinations = product(*texts)
            if is_file:
                keys = [file_key(path) for combination in combinations for path in _file_paths(combination, flags)]
            else:
                keys = [key_of(scheme, "".join(combination)) for combination in combinations]
        except Unnameable as reason:
            raise AccessRefused(f"{shown}: {reason}") from None
        return tuple(_access(key, write, subtree, label) for key in dict.fromkeys(keys))

    def foresee(arguments: Arguments, unknown: Collection[str]) -> tuple[Access, ...] | None:
        known = ""
        for part in parts:
            if isinstance(part, str):
                known += part
                continue
            try:
                if part.name in unknown:
                    break
                (text,) = part.texts(arguments)
            except (Unnameable, ValueError):  # it is not there, or is several
                break
            known += text
        else:
            try:
                return read(arguments)
            except AccessRefused:  # what is wrong is told when all is there
                pass
        known = known[: max(known.rfind("/"), 0)]
        try:
            if is_file:
                key = file_key(known) if known and not known.startswith("~") else "file:"
            else:
                key = key_of(scheme, known)
        except Unnameable:
            return (_access("file:", write, True, label),) if is_file else None
        return (_access(key, write, True, label),)

    if is_file:
        return _Source(read, foresee, template, label, subtree, fixed=False)
    try:
        sample = key_of(scheme, "".join(part if isinstance(part, str) else "x" for part in parts))
    except Unnameable as reason:
        raise PolicyError(f"{where}: {reason}") from None
    if not any(flags):
        accesses = (_access(sample, write, subtree, label),)
        return _Source(lambda arguments: accesses, foresee, template, label, subtree, fixed=True)
    places = [part for part in parts if isinstance(part, _Place)]
    body = "".join(part if isinstance(part, str) else _MARK for part in parts)
    whole_segments = all(segment in (_MARK, segment.replace(_MARK, "")) for segment in body.split("/"))
    form = key_of(scheme, body)
    if whole_segments and form.count(_MARK) == len(places) and not any(place.steps for place in places):
        quick = _quick(form, [place.name for place in places], write, subtree, label, read)
        return _Source(quick, foresee, template, label, subtree, fixed=False)
    return _Source(read, foresee, template, label, subtree, fixed=False)


def _quick(form: str, names: Sequence[str], write: bool, subtree: bool, label: str, general: Read) -> Read:
    """The short way for places that are whole segments, and values that are plain numbers or words."""
    first, (before, after, *_) = names[0], form.split(_MARK)
    percent = form.replace("%", "%%").replace(_MARK, "%s")

    def one(arguments: Arguments) -> tuple[Access, ...]:
        value = arguments.get(first)
        if (type(value) is int and -(10**18) < value < 10**18) or (type(value) is str and is_plain(value)):
            return (_access(f"{before}{value}{after}", write, subtree, label),)
        return general(arguments)

    def several(arguments: Arguments) -> tuple[Access, ...]:
        values = tuple(map(arguments.get, names))
        for value in values:
            if not ((type(value) is int and -(10**18) < value < 10**18) or (type(value) is str and is_plain(value))):
                return general(arguments)
        return (_access(percent % values, write, subtree, label),)

    return one if len(names) == 1 else several


def bound(function: Callable[..., object], names: frozenset[str] | None, where: str) -> Callable[[Arguments], object]:
    """How to call a declared callable: by the names that it takes, or with all arguments as one mapping.

    Args:
        function: as it was declared.
        names: the tool's parameters, or None when they are not known.
        where: begins the messages.

    Raises:
        PolicyError: it is async, or wants a name that the tool does not have.
    """
    called = type(function).__call__
    if any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in (function, called)):
        raise PolicyError(f"{where} is async; its answer has to be there at once: use a plain function")
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
    call = bound(function, names, f"tool {tool!r}: {shown}")

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
                if not subtree and split_scheme(name)[1] == "":
                    raise Unnameable("the name is empty, or has nothing after its ':'")
                for key in keys_of(name):
                    found[key, subtree] = _access(key, write, subtree, label)
            except Unnameable as reason:
                raise refused(f"cannot use what it returned: {reason}") from None
        return tuple(found.values())

    return _Source(read, lambda arguments, unknown: None, function, label, subtree=True, fixed=False)


def compiled(declared: Declared | None, write: bool, names: frozenset[str] | None, tool: str) -> list[_Source]:
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
