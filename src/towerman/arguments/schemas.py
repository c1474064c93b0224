"""The checker of a JSON schema, and the one wrapper of jsonschema-rs.

Theory. The compiled validator says yes or no. Where it says no, it is asked again for one part after the other, until
the places are found that are at fault.

House rules. Equal schemas share one validator. Nothing is ever fetched: all references lead inside. jsonschema_rs is
imported on first use.

Not here: how arguments are read (loading), what a schema can cost (subschemas).
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypedDict, cast

from towerman.arguments.contract import MAX_DEPTH, MAX_SCHEMA_BYTES, MAX_SCHEMA_STEPS, ArgumentsRefused, Checker
from towerman.arguments.loading import copied, load
from towerman.arguments.subschemas import (
    REFERENCES,
    all_positions,
    as_list,
    as_mapping,
    escaped,
    followed,
    pointed_to,
    resolve,
    steps_on,
    subschemas_of,
    target_of,
    unquoted,
)
from towerman.arguments.telling import (
    MOST_COUNTED,
    TYPES,
    Problem,
    as_json,
    demand,
    place_below,
    quoted,
    refusal,
    when_empty,
    when_missing,
    when_unknown,
)
from towerman.calls import Arguments
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from jsonschema_rs import FancyRegexOptions, Registry, Validator

_Part = tuple[str, object, object, str]
"""Pointer to a schema, the schema, the value that it applies to, and the value's place."""


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


def _anchors(root: Mapping[str, object]) -> dict[str, object]:
    """The named places of a schema, after a look at all its references: none may lead out of it."""
    base = "id" if "draft-04" in str(root.get("$schema")) else "$id"
    positions = list(all_positions(root))
    anchors: dict[str, object] = {}
    for _, node in positions:
        for keyword in ("$anchor", "$dynamicAnchor", base):
            name = node.get(keyword)
            if isinstance(name, str):
                anchors["#" + name.removeprefix("#")] = node
    references = [
        (pointer, reference)
        for pointer, node in positions
        for reference in map(node.get, REFERENCES)
        if isinstance(reference, str)
    ]
    for pointer, reference in references:
        if not reference.startswith("#") or target_of(root, anchors, reference) is None:
            raise PolicyError(
                f"schema: {pointer} refers to {quoted(reference)}, which is not in this schema and is never fetched; "
                "put it under $defs and write #/$defs/NAME"
            )
    for pointer, node in positions[1:] if references else ():
        if not str(node.get(base, "#")).startswith("#"):
            raise PolicyError(f"schema: {pointer} has an {base}; remove it, and write references as #/$defs/NAME")
    return anchors


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
    from hashlib import sha256

    digest = sha256(json.dumps(schema, sort_keys=True).encode()).digest()
    found = _COMPILED.get(digest)
    if found is not None:
        return found
    try:
        steps = steps_on(schema, _anchors(schema), None)
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
        hint = f"; types are {', '.join(TYPES)}" if "type" in path[-2:] else ""
        place = "#/" + "/".join(map(escaped, path)) if path else "$schema, or a reference,"
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
        text = json.dumps(copied(schema, MAX_DEPTH)[0])
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
        pointer, top = followed(self._root, self._root, "#")
        kind = top.get("type", "object")
        if kind != "object" and "object" not in as_list(kind):
            raise PolicyError(f"schema: arguments are an object, so its type must be object, not {as_json(kind)}")
        properties = as_mapping(top.get("properties"))
        self.names = frozenset(properties)
        self.required = frozenset(map(str, as_list(top.get("required"))))
        self._empty = when_empty(self._root, self.required)
        self._defaults = [
            (name, part["default"])
            for name, part in properties.items()
            if isinstance(part, dict)
            and "default" in part
            and not self._fails(f"{pointer}/properties/{escaped(name)}", part["default"])
        ]

    @property
    def schema(self) -> Mapping[str, object]:
        """The JSON schema as it was given, with `type` and `properties` always there."""
        return copy.deepcopy({"type": "object", "properties": {}, **self._root})

    def check(self, raw: Arguments | str) -> dict[str, object]:
        """Load and validate; see `Checker.check`."""
        values = load(raw, self._empty, MAX_DEPTH)[0]
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
        found: list[Problem] = []
        self._blame("#", self._root, values, "", found, set())
        return refusal(found, "many more" if len(found) >= MOST_COUNTED else "")

    def _fails(self, pointer: str, value: object) -> bool:
        """Does a value not fit the subschema at a pointer? Each is compiled when it is first asked for."""
        validator = self._parts_of.get(pointer)
        if validator is None:
            import jsonschema_rs

            if self._registry is None:
                self._registry = jsonschema_rs.Registry([(_ITSELF, self._root)])
            from urllib.parse import quote

            reference = {"$ref": f"{_ITSELF}#{quote(pointer[1:])}"}
            validator = jsonschema_rs.validator_for(reference, registry=self._registry, **_options())
            self._parts_of[pointer] = validator
        return not validator.is_valid(value)

    # The validator's own list of errors grows exponentially with the depth of recursive unions (six seconds at
    # depth 15), while its yes or no does not. So it is only asked yes or no, place by place.

    def _blame(
        self, pointer: str, node: object, value: object, place: str, found: list[Problem], seen: set[tuple[str, str]]
    ) -> None:
        """Add what is wrong with a value that its schema refuses, as deep as plain steps lead."""
        before = len(found)
        if before >= MOST_COUNTED or (pointer, place) in seen:
            return
        seen.add((pointer, place))
        if isinstance(node, dict):
            for below, sub, part, where in self._same(pointer, node, value, place):
                if self._fails(below, part):
                    self._blame(below, sub, part, where, found, seen)
            if len(found) == before:
                found += self._names(node, value, place)
                for below, sub, part, where in self._parts(pointer, node, value, place):
                    if len(found) < MOST_COUNTED and self._fails(below, part):
                        self._blame(below, sub, part, where, found, seen)
        if len(found) == before:
            found.append((place, demand(self._root, node)))

    def _same(self, pointer: str, node: Mapping[str, object], value: object, place: str) -> Iterator[_Part]:
        """What stands in for a node: behind its reference, in allOf, or the only branch of the value's kind."""
        reference = node.get("$ref")
        if isinstance(reference, str):
            yield "#" + unquoted(reference[1:]), pointed_to(self._root, reference), value, place
        for below, sub in subschemas_of(node, ("allOf",)):
            yield pointer + below, sub, value, place
        kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
        for keyword in ("anyOf", "oneOf"):
            branches = [
                (pointer + below, sub, value, place)
                for below, sub in subschemas_of(node, (keyword,))
                if resolve(self._root, sub).get("type", kind) == kind
            ]
            if len(branches) == 1:
                yield from branches

    def _names(self, node: Mapping[str, object], value: object, place: str) -> Iterator[Problem]:
        """Names that are missing, and names that are not allowed."""
        if not isinstance(value, dict):
            return
        known = as_mapping(node.get("properties"))
        for name in map(str, as_list(node.get("required"))):
            if name not in value:
                yield place_below(place, name), when_missing(self._root, known.get(name))
        unknown = [name for name in value if name not in known]
        if unknown and node.get("additionalProperties") is False and "patternProperties" not in node:
            yield place, when_unknown(unknown, known)

    def _parts(self, pointer: str, node: Mapping[str, object], value: object, place: str) -> Iterator[_Part]:
        """What is inside a value, with the schema of each part."""
        if isinstance(value, dict):
            known = as_mapping(node.get("properties"))
            others = node.get("additionalProperties") if "patternProperties" not in node else None
            for name, part in value.items():
                if name in known:
                    yield f"{pointer}/properties/{escaped(name)}", known[name], part, place_below(place, name)
                elif isinstance(others, dict):
                    yield f"{pointer}/additionalProperties", others, part, place_below(place, "*")
        elif isinstance(value, list):
            items, first = node.get("items"), node.get("prefixItems")
            keywords = ("prefixItems", "items")
            if isinstance(items, list):  # the tuples of older drafts
                items, first, keywords = node.get("additionalItems"), items, ("items", "additionalItems")
            prefix = as_list(first)
            for index, part in enumerate(value):
                if index < len(prefix):
                    yield f"{pointer}/{keywords[0]}/{index}", prefix[index], part, f"{place}[{index}]"
                elif isinstance(items, dict):
                    yield f"{pointer}/{keywords[1]}", items, part, f"{place}[{index}]"
