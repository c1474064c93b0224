"""A refusal in words for the model: which argument, and what it must be.

House rules. Words are put together from the schema and from positions only: no value, no name that is not in the
schema, no text of a validator's exception. A refusal stays short: five problems, the rest counted.

Not here: what is wrong (signatures, schemas).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from towerman.arguments.subschemas import as_list, as_mapping, branches_of, resolve

MOST_TOLD: Final = 5  # problems told one by one
MOST_COUNTED: Final = 100  # problems looked for
_NAME: Final = 64  # characters of a name in a refusal

TYPES: Final[dict[str, str]] = {
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

Problem = tuple[str, str]
"""A place in the arguments ("" for the whole) and what is said of it; both made of schema text only."""


def quoted(name: str) -> str:
    return repr(name if len(name) <= _NAME else name[:_NAME] + "...")


def listed(names: Iterable[str], most: int = 10) -> str:
    ordered = list(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(map(quoted, ordered[:most])) + more


def as_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _NAME else text[:_NAME] + "..."


def what_fits(root: object, node: object, inside: int = 2) -> str:
    """What a value must be, in words, from its schema; "" when the schema says nothing."""
    node = resolve(root, node)
    if "const" in node:
        return as_json(node["const"])
    if "enum" in node:
        options = [as_json(option) for option in as_list(node["enum"])]
        more = f" and {len(options) - 12} more" if len(options) > 12 else ""
        return ("one of " if len(options) > 1 else "") + ", ".join(options[:12]) + more
    if inside and branches_of(node):
        return " or ".join(dict.fromkeys(filter(None, (what_fits(root, sub, inside - 1) for sub in branches_of(node)))))
    types = node.get("type")
    words = [TYPES.get(str(word), "") for word in (types if isinstance(types, list) else [types])]
    if words == ["an object"] and node.get("required"):
        words = ["an object with " + listed(map(str, as_list(node["required"])), 6)]
    if words == ["a list"] and inside:
        items = what_fits(root, node.get("items"), inside - 1)
        words = [f"a list, each entry {items}" if items else "a list"]
    parts = [" or ".join(filter(None, words))]
    for keyword, phrase in _BOUNDS:
        bound = node.get(keyword, False)
        if bound is not False:
            parts.append(phrase.format(bound[:_NAME] if isinstance(bound, str) else as_json(bound)))
    parts += ["within the other rules of its schema"] if any(keyword in node for keyword in _RULES) else []
    return ", ".join(filter(None, parts))


def demand(root: object, node: object) -> str:
    expected = what_fits(root, node)
    return f"must be {expected}" if expected else "does not fit its schema"


def when_missing(root: object, node: object) -> str:
    expected = what_fits(root, node)
    return f"is required ({expected})" if expected else "is required"


def when_unknown(names: Sequence[str], known: Iterable[str]) -> str:
    """What is said of names that are not in the schema: how many, and which known ones are near; never themselves."""
    known = sorted(known)
    near = list(dict.fromkeys(near for name in names[:MOST_TOLD] for near in near_names(name, known)))[:MOST_TOLD]
    count = "a name that is" if len(names) == 1 else f"{len(names)} names that are"
    hint = f" (did you mean {listed(near)}?)" if near else ""
    rest = f"the known ones are {listed(known)}" if known else "it has none"
    return f"has {count} not in its schema{hint}: {rest}"


def when_empty(root: Mapping[str, object], required: Iterable[str]) -> str:
    """The refusal of blank text, with the names that are required; "" when none are."""
    known = as_mapping(resolve(root, root).get("properties"))
    lines = [f"{quoted(name)} {when_missing(root, known.get(name))}" for name in sorted(required)]
    more = f"; and {len(lines) - MOST_TOLD} more" if len(lines) > MOST_TOLD else ""
    return (
        f"The arguments are empty: {'; '.join(lines[:MOST_TOLD])}{more}. Send them as one JSON object." if lines else ""
    )


def refusal(problems: Sequence[Problem], more: str = "") -> str:
    """The refusal: at most five problems, those of one place together."""
    places: dict[str, list[str]] = {}
    for place, said in problems:
        texts = places.setdefault(place, [])
        if said not in texts:
            texts.append(said)
    lines = []
    for place, texts in places.items():
        who = f"argument '{place if len(place) <= 120 else place[:120] + '...'}'" if place else "the object"
        lines.append(f"{who} {' or '.join(texts[:MOST_TOLD])}")
    rest = len(lines) - MOST_TOLD
    if rest > 0:
        more = more or f"{rest} more"
    return (
        f"The arguments do not fit the tool: {'; '.join(lines[:MOST_TOLD])}{f'; and {more}' if more else ''}. "
        "Nothing was run; correct them and call again."
    )


def place_below(place: str, name: str) -> str:
    name = name if len(name) <= _NAME else name[:_NAME] + "..."
    return f"{place}.{name}" if place else name


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
    from difflib import SequenceMatcher

    matcher: SequenceMatcher[str] = SequenceMatcher(autojunk=False)
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
