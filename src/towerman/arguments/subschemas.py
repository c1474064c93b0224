"""The parts of a JSON schema: how to get to them, and how many of them one value can have tried.

Theory. A validator tries every part that applies to a value, and recursion multiplies them from level to level. How
many those can be is counted here, before the validator meets a value.

House rules. Whatever a schema holds in place of what is expected counts as nothing: nothing here raises on odd schemas.

Not here: which schemas are refused (schemas), what is said of their parts (telling).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, cast

from towerman.arguments.contract import MAX_DEPTH, MAX_SCHEMA_STEPS


def as_mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, dict) else {}


def as_list(value: object) -> Sequence[object]:
    return cast(Sequence[object], value) if isinstance(value, list) else ()


def unquoted(pointer: str) -> str:
    """A pointer in a URI fragment without its percent signs."""
    if "%" not in pointer:
        return pointer
    from urllib.parse import unquote

    return unquote(pointer)


def pointed_to(root: object, reference: str) -> object:
    """What a reference of the form #/a/b points to; None when there is nothing."""
    node = root if reference[1:2] in ("", "/") else None
    for step in unquoted(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and step.isdecimal() and int(step[:9]) < len(node):
            node = node[int(step[:9])]
        else:
            return None
    return node


def followed(root: object, node: object, pointer: str) -> tuple[str, Mapping[str, object]]:
    """The schema that stands behind the references of a node, and the pointer to it."""
    for _ in range(MAX_DEPTH):
        found = as_mapping(node)
        reference = found.get("$ref")
        only = as_list(found.get("allOf"))
        if isinstance(reference, str):
            pointer, node = "#" + unquoted(reference[1:]), pointed_to(root, reference)
        elif len(only) == 1 and "type" not in found:
            pointer, node = f"{pointer}/allOf/0", only[0]
        else:
            return pointer, found
    return pointer, {}


def resolve(root: object, node: object) -> Mapping[str, object]:
    return followed(root, node, "")[1]


def branches_of(node: Mapping[str, object]) -> Sequence[object]:
    return as_list(node.get("anyOf")) or as_list(node.get("oneOf"))


_HERE: Final = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_INSIDE: Final = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("prefixItems", "items", "additionalItems", "contains", "unevaluatedItems"),
)
_STORED: Final = ("$defs", "definitions")
_MAPS: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies", *_STORED})
REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")


def subschemas_of(node: Mapping[str, object], keywords: Iterable[str]) -> Iterator[tuple[str, object]]:
    """(pointer below the node, subschema) of the given keywords."""
    for keyword in keywords:
        part = node.get(keyword)
        if isinstance(part, list):
            yield from ((f"/{keyword}/{index}", sub) for index, sub in enumerate(part))
        elif keyword in _MAPS:
            yield from ((f"/{keyword}/{escaped(name)}", sub) for name, sub in as_mapping(part).items())
        elif part is not None:
            yield f"/{keyword}", part


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def all_positions(node: object, pointer: str = "#") -> Iterator[tuple[str, Mapping[str, object]]]:
    """Every subschema with its pointer."""
    if isinstance(node, dict):
        yield pointer, node
        for below, sub in subschemas_of(node, (*_HERE, *_INSIDE, *_STORED)):
            yield from all_positions(sub, pointer + below)


def target_of(root: object, anchors: Mapping[str, object], reference: str) -> object:
    return anchors.get(reference, pointed_to(root, reference))


def steps_on(root: object, anchors: Mapping[str, object], depth: int | None) -> int:
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
            one = as_mapping(part)
            here += 1
            targets = [target_of(root, anchors, to) for to in map(one.get, REFERENCES) if isinstance(to, str)]
            tried = [sub for _, sub in subschemas_of(one, _HERE)]
            if depth is not None and "discriminator" in one:
                chosen += tried
            else:
                targets += tried
            waiting += [(sub, hops + 1) for sub in targets]
            for below, sub in subschemas_of(one, _INSIDE):
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


def depth_limit(root: Mapping[str, object]) -> int:
    """The levels that pydantic checks quickly: fewer than MAX_DEPTH only where recursion makes more of them costly."""
    if steps_on(root, {}, MAX_DEPTH) <= MAX_SCHEMA_STEPS or steps_on(root, {}, None) > MAX_SCHEMA_STEPS:
        return MAX_DEPTH
    return next(depth for depth in range(1, MAX_DEPTH) if steps_on(root, {}, depth + 1) > MAX_SCHEMA_STEPS)


def parameters_of(schema: Mapping[str, object]) -> dict[str, bool]:
    """The names of the arguments in the order of the schema, and whether each takes a list and nothing else.

    Args:
        schema: of an object.
    """
    properties = as_mapping(schema.get("properties"))
    return {name: _is_list(schema, part, MAX_DEPTH) for name, part in properties.items()}


def _is_list(root: object, node: object, levels: int) -> bool:
    """Whether a part of a schema describes lists only; it may allow null besides."""
    part = resolve(root, node)
    if "type" in part:
        kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
        return "array" in kinds and all(kind in ("array", "null") for kind in kinds)
    options = [
        each for each in as_list(part.get("anyOf") or part.get("oneOf")) if as_mapping(each).get("type") != "null"
    ]
    return bool(options) and levels > 0 and all(_is_list(root, each, levels - 1) for each in options)
