"""What a handler's function says of itself: its parameters with their types, its context parameter, its docstring.

House rules. Partials, methods, decorators, classes and callable objects are looked through. griffe is imported only for
a docstring that has sections.

Not here: which parameters can be read from JSON (signatures).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Final, Union, cast, get_args, get_origin

from towerman.arguments.telling import listed
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from griffe import DocstringSection


def context_parameter_of(function: Callable[..., object], context_type: type) -> str | None:
    """Name of the parameter annotated with `context_type` (a subclass, or optional, too), or None.

    Raises:
        PolicyError: more than one parameter is.
    """
    try:
        annotated = list(annotated_parameters(function))
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
            f"tool function {name_of(function)}: parameters {listed(found)} are all {context_type.__name__}: keep one"
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


class Unresolved:
    """Stands for an annotation whose names are not to be found."""

    __slots__ = ("told",)

    def __init__(self, told: str) -> None:
        self.told = told


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def name_of(function: object) -> str:
    named = function if hasattr(function, "__qualname__") else _plain(function)
    return repr(getattr(named, "__qualname__", type(function).__qualname__))


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


def annotated_parameters(function: Callable[..., object]) -> Iterator[tuple[inspect.Parameter, object]]:
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
                resolved = Unresolved(first_line(error))
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


def described_parameters(function: Callable[..., object]) -> dict[str, str]:
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
