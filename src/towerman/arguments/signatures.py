"""The checker of a handler's signature: pydantic.

Theory. Pydantic checks in its lax mode, since models write "5" for 5; but true and false are no numbers wherever the
signature itself says int, float, complex, Decimal or timedelta (also inside list, dict, tuple, set, Optional and
unions). Inside a model or dataclass, its author's own rules hold. What lax mode refuses gets a second chance in
pydantic's JSON mode, because strict fields take a date or an enum member from JSON only there. Pydantic tries a
recursive union of models in every combination unless a discriminator tells them apart; a tool with such a union takes
only so many levels as are tried quickly.

Most calls bring a few short values whose types are exactly what the signature says. Where every parameter is a bare
str, int, float, bool or None, or a union of these, one pass over the parameters sees that, and nothing is left for the
loader's limits or for pydantic to find. Whatever is not plain at the first look goes the general way, with its answer.

House rules. pydantic is imported on first use. Its errors are located in the schema and told in our own words.

Not here: how arguments are read (loading), how a signature is read (functions).
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence, Set
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Final, Protocol, Union, cast, get_args, get_origin

from towerman.arguments.contract import ArgumentsRefused, Checker
from towerman.arguments.functions import Unresolved, annotated_parameters, described_parameters, first_line, name_of
from towerman.arguments.loading import FEW, SHORT, is_short, load
from towerman.arguments.subschemas import as_list, as_mapping, branches_of, depth_limit, resolve
from towerman.arguments.telling import (
    MOST_COUNTED,
    MOST_TOLD,
    Problem,
    demand,
    place_below,
    refusal,
    what_fits,
    when_empty,
    when_missing,
    when_unknown,
)
from towerman.calls import Arguments
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema


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
        annotated = list(annotated_parameters(function))
    except (TypeError, ValueError) as error:
        raise PolicyError(
            f"tool function {name_of(function)}: its signature cannot be read; wrap it in a function of your own, "
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
        if isinstance(resolved, Unresolved):
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
        raise PolicyError(f"tool function {name_of(function)}: {first_line(error)}") from error


def _wrong(function: object, parameter: inspect.Parameter, what: str, fix: str) -> PolicyError:
    return PolicyError(f"tool function {name_of(function)}: parameter {parameter.name!r} {what}; {fix}")


def _unreadable(parameter: inspect.Parameter) -> str:
    try:
        _adapter([parameter]).json_schema(schema_generator=_json_schema_generator())
    except Exception as error:
        return first_line(error)
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


_PLAIN: Final = (str, int, float, bool, type(None))
_REQUIRED: Final = object()


class _FirstLook:
    """Takes the arguments of a function whose parameters are all plain, where they are plain too."""

    __slots__ = ("_blank", "_kinds", "_required")

    def __init__(self, kinds: dict[str, frozenset[object]], blank: dict[str, object], required: frozenset[str]) -> None:
        self._kinds = kinds
        self._blank = blank  # all names in their order, with the defaults
        self._required = required

    def take(self, given: dict[str, object]) -> dict[str, object] | None:
        """The arguments, if they are few, short and exactly of the types that are asked for; None where it is not so.

        Nothing of a key's or a value's own is called before its type is known to be a plain one.
        """
        if len(given) > FEW:
            return None
        given, out, kinds = given.copy(), self._blank.copy(), self._kinds  # another thread may change what was given
        for name, value in given.items():
            if type(name) is not str or name not in kinds:
                return None
            kind = type(value)
            if not is_short(value, kind) or kind not in kinds[name]:
                return None
            out[name] = value
        return out if len(given) == len(out) or self._required.issubset(given) else None


def _first_look(parameters: Sequence[inspect.Parameter]) -> _FirstLook | None:
    """For parameters that are all plain: bare types or unions of them, and defaults that nobody can change."""
    kinds: dict[str, frozenset[object]] = {}
    blank: dict[str, object] = {}
    for parameter in parameters:
        annotation, default = parameter.annotation, parameter.default
        union = get_origin(annotation) in (Union, types.UnionType)
        members = get_args(annotation) if union else (annotation,)
        is_required = default is parameter.empty
        if (
            parameter.kind is parameter.VAR_KEYWORD
            or len(parameter.name) > SHORT
            or not all(any(member is plain for plain in _PLAIN) for member in members)
            or not (is_required or any(type(default) is plain for plain in _PLAIN))
        ):
            return None
        kinds[parameter.name] = frozenset(members)
        blank[parameter.name] = _REQUIRED if is_required else default
    return _FirstLook(kinds, blank, frozenset(name for name, default in blank.items() if default is _REQUIRED))


class _Validator(Protocol):
    def validate_python(self, value: object, /) -> dict[str, object]: ...  # pragma: no cover - a protocol has no body

    def validate_json(self, text: str, /) -> dict[str, object]: ...  # pragma: no cover - a protocol has no body


class _SignatureChecker:
    """Pydantic against a signature."""

    __slots__ = (
        "_careful",
        "_depth",
        "_empty",
        "_first_look",
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
        self.required = frozenset(map(str, as_list(self._root.get("required"))))
        self._empty = when_empty(self._root, self.required)
        self._depth = depth_limit(self._root)
        self._first_look = _first_look(parameters)
        self._guards = [p.replace(annotation=_guarded(p.annotation)) for p in parameters]
        same = all(new.annotation is old.annotation for new, old in zip(self._guards, parameters, strict=True))
        self._careful = self._plain if same else None

    @property
    def schema(self) -> Mapping[str, object]:
        """JSON schema of the arguments; the docstring describes what the annotations do not."""
        if self._schema is None:
            schema = copy.deepcopy(self._root)
            described = described_parameters(self._function)
            for name, part in as_mapping(schema["properties"]).items():
                if name in described:
                    cast(dict[str, object], part).setdefault("description", described[name])
            self._schema = schema
        return copy.deepcopy(self._schema)

    def check(self, raw: Arguments | str) -> dict[str, object]:
        """Load and validate; see `Checker.check`."""
        if type(raw) is dict and self._first_look is not None:
            plain = self._first_look.take(raw)
            if plain is not None:
                return plain
        values, bools = load(raw, self._empty, self._depth)
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
        if error.error_count() > MOST_COUNTED:  # a long list of mistakes: look at the beginnings only
            more = "many more"
            try:
                self._guard().validate_python(_beginning(values))
            except Exception as shorter:
                error = shorter if isinstance(shorter, ValidationError) else error
        errors = error.errors(include_url=False, include_context=False, include_input=False)[:MOST_COUNTED]
        return refusal(list(_located(self._root, ((item["type"], item["loc"]) for item in errors))), more)


def _beginning(value: object) -> object:
    if isinstance(value, dict):
        return {name: _beginning(part) for name, part in value.items()}
    return [_beginning(item) for item in value[:MOST_TOLD]] if isinstance(value, list) else value


@functools.cache
def _known_errors() -> frozenset[str]:
    from pydantic_core import core_schema

    return frozenset(map(str, get_args(core_schema.ErrorType))) - {"value_error", "assertion_error"}


def _located(root: Mapping[str, object], errors: Iterable[tuple[str, tuple[str | int, ...]]]) -> Iterator[Problem]:
    """Pydantic's errors in our own words."""
    unknown: dict[str, tuple[list[str], Mapping[str, object]]] = {}
    for kind, location in errors:
        if kind in ("unexpected_keyword_argument", "extra_forbidden"):
            place, node = _place(root, location[:-1])
            known = as_mapping(_entered(root, node).get("properties"))
            unknown.setdefault(place, ([], known))[0].append(str(location[-1]))
            continue
        place, node = _place(root, location)
        if kind.startswith("missing"):
            yield place, when_missing(root, node)
        elif kind in _known_errors():
            yield place, demand(root, node)
        else:
            expected = what_fits(root, node)
            yield place, "is refused by the tool's own check" + (f" ({expected})" if expected else "")
    for place, (names, known) in unknown.items():
        yield place, when_unknown(names, known)


def _entered(root: object, node: object) -> Mapping[str, object]:
    """The schema behind references and behind "or null"."""
    node = resolve(root, node)
    options = [resolve(root, option) for option in branches_of(node)]
    options = [option for option in options if option.get("type") != "null"]
    return options[0] if len(options) == 1 else node


def _place(root: Mapping[str, object], location: Iterable[str | int]) -> tuple[str, Mapping[str, object]]:
    """Where a problem is, as far as the schema names it, and the schema of that place.

    A step that the schema does not name is a key that the model made up, or a branch of a union: neither is shown.
    """
    place, node = "", root
    for step in location:
        node = _entered(root, node)
        properties, others = as_mapping(node.get("properties")), node.get("additionalProperties")
        if isinstance(step, int):
            prefix = as_list(node.get("prefixItems"))
            place, node = f"{place}[{step}]", as_mapping(prefix[step] if step < len(prefix) else node.get("items"))
        elif step in properties:
            place, node = place_below(place, step), as_mapping(properties[step])
        elif isinstance(others, dict):
            place, node = place_below(place, "*"), others
        else:
            tags = as_mapping(as_mapping(node.get("discriminator")).get("mapping"))
            titled = [option for option in branches_of(node) if resolve(root, option).get("title") == step]
            if step not in tags and not titled:
                break
            node = {"$ref": tags[step]} if step in tags else as_mapping(titled[0])
    return place, node
