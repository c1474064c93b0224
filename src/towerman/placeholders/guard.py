"""The guard of one tool: which values are looked at, and what is said of those that are placeholders.

Theory. Nearly every call is plain, so the way of a call goes through `suspects`, which only asks whether any text has
a character or a word that a placeholder could not do without. Where one has, `find` goes through the arguments as
the model wrote them, with the schema beside them, and judges each text for itself.

House rules. Everything that depends on the tool alone is worked out when it is declared. Nothing recurs: arguments of
any depth are gone through with a list of what is left. Neither a value nor a name that the model made up is in what
is told: an unknown name is shown as `*`.

Not here: when a text is a placeholder (judging), what becomes of a call (core).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Final, Literal, NamedTuple

from towerman.arguments import as_mapping
from towerman.errors import PolicyError
from towerman.placeholders.judging import SOMEWHERE, Others, judge
from towerman.placeholders.patterns import HINT
from towerman.placeholders.roles import Spot, Words, spot_named, spots_of
from towerman.placeholders.words import (
    AWAITED,
    BEFORE,
    BLANKS,
    DONE,
    KINDS,
    MISSING,
    NUMBERED,
    RESULTS,
    STEPS,
    TYPES,
    words_of,
)
from towerman.policy import nearest

MOST_TOLD: Final = 5
"""Places of one call that are told."""

_NAME: Final = 64  # characters of a name in a message
_PLACE: Final = 120  # characters of a place

_hint: Final = HINT.search

_SHORT: Final = 80  # characters of a text that may be a placeholder without any such character
_TELLING: Final = (
    AWAITED | BEFORE | RESULTS | STEPS | NUMBERED | DONE | BLANKS | {"your", "insert", "replace", "fill", "from"}
)
_SINGLE: Final = AWAITED | MISSING | TYPES | KINDS | {"n/a", "none"}
_BEFORE_DOT: Final = tuple(sorted(RESULTS | BEFORE))
_BEFORE_NUMBER: Final = ("call", "step", "task", "node", "action", "tool", "subtask", "result", "output", "response")
_MARKS: Final = frozenset("@:|~*=&!^«\u2039")
_EXACT: Final = 2
_STRICTNESS: Final = {"exact": _EXACT, "number": 1, "place": 1}

_PLAIN: Final = frozenset({int, float, bool, type(None), bytes, Decimal, datetime.date, datetime.datetime})

_REFERENCES: Final = frozenset(
    {"$ref", "$from", "$result", "$output", "$step", "$call", "$var", "$prev", "from_call", "from_step", "output_of"}
    | {"result_of", "call_id", "step_id", "tool_call_id", "ref", "reference", "depends_on"}
)
_OUTRIGHT: Final = frozenset(
    {"$ref", "$from", "$result", "$output", "$step", "$call", "$var", "$prev", "from_call", "from_step"}
    | {"output_of", "result_of"}
)
_BESIDE: Final = frozenset({"path", "field", "key", "index", "output", "pointer", "select", "property", "value"})


class Found(NamedTuple):
    """A placeholder.

    Args:
        place: of the argument, in names of the schema: `order.lines[0].sku`; what the schema does not name is `*`.
        call: index of the call of the batch that it names; None: it names none.
    """

    place: str
    call: int | None


class Guard:
    """Looks for placeholders in the arguments of one tool.

    Args:
        name: of the tool.
        description: of the tool.
        schema: JSON schema of its arguments.
        free_text: places that are left alone, names or paths such as `message.body`; True: all of them.
    """

    __slots__ = ("_free", "_looks", "_top")

    def __init__(
        self, name: str, description: str, schema: Mapping[str, object], free_text: bool | Collection[str] = ()
    ) -> None:
        self._free = free_text is True
        self._top = spots_of(schema, Words(name, description))
        if not isinstance(free_text, bool):
            self._set_free(free_text)
        # Whatever the schema does not name is looked at like any short value.
        self._looks: dict[str, Spot | None] = {
            field: None if spot.free else spot for field, spot in self._top.fields.items()
        }

    def _set_free(self, paths: Collection[str]) -> None:
        for path in paths:
            spot = self._top
            for step in _steps(path):
                spot = _below(spot, step)
            spot.free = True

    def suspects(self, keywords: Mapping[str, object], tools: Collection[str]) -> bool:
        """Could there be a placeholder among checked arguments? False: there is none.

        Args:
            keywords: the arguments, as the handler would get them.
            tools: names of all tools, of which one may stand in a value.
        """
        if self._free:
            return False
        looks = self._looks
        for name, value in keywords.items():
            kind = type(value)
            if kind is str:
                if name in looks:
                    spot = looks[name]
                    if spot is not None and _may_be(value, _STRICTNESS.get(spot.role, 0), spot.own, tools):  # type: ignore[arg-type]
                        return True
                elif _may_be(value, _EXACT, (), tools):  # type: ignore[arg-type]
                    return True
            elif kind not in _PLAIN and (name not in looks or looks[name] is not None) and _inside(value, tools):
                return True
        return False

    def find(self, arguments: Mapping[str, object], others: Others, index: int) -> list[Found]:
        """The placeholders in the arguments of a call, in their order; at most a few.

        Args:
            arguments: as the model wrote them: plain JSON data of any depth.
            others: the calls of the batch.
            index: which of them it is.
        """
        found: list[Found] = []
        if self._free:
            return found
        waiting: list[tuple[object, Spot, str]] = [(arguments, self._top, "")]
        while waiting and len(found) < MOST_TOLD:
            value, spot, place = waiting.pop()
            if spot.free:
                continue
            if isinstance(value, str):
                call = judge(value, spot, others, index)
                if call is not None:
                    found.append(Found(place, None if call == SOMEWHERE else call))
            elif isinstance(value, Mapping):
                call = _reference(value, spot, others, index)
                if call is not None:
                    found.append(Found(place, None if call == SOMEWHERE else call))
                    continue
                below = [
                    (part, *_named(spot, key, place))
                    for key, part in value.items()
                    if isinstance(part, str | Mapping | list | tuple)
                ]
                waiting += reversed(below)
            elif isinstance(value, list | tuple):
                inside = spot.item or spot
                waiting += [
                    (part, inside, f"{place}[{at}]")
                    for at, part in zip(range(len(value) - 1, -1, -1), reversed(value), strict=True)
                    if isinstance(part, str | Mapping | list | tuple)
                ]
        return found


def check_free_text(where: str, schema: Mapping[str, object], paths: Collection[str]) -> None:
    """Refuse names that are no arguments, where a schema says which there are.

    Args:
        where: begins the message.
        schema: JSON schema of the arguments.
        paths: what was declared as free text.

    Raises:
        PolicyError: naming the path and the nearest right name.
    """
    known = [str(name) for name in as_mapping(schema.get("properties"))]
    if schema.get("additionalProperties") or not known:
        return
    for path in paths:
        first = _steps(path)[0]
        if first not in known:
            raise PolicyError(f"{where}: free_text: no argument {first[:80]!r}{nearest(first, known)}")


def _steps(path: str) -> list[str]:
    """`lines[].text` and `lines.text` are the same."""
    return [step for step in path.replace("[]", "").replace("[*]", "").split(".") if step] or [path]


def _below(spot: Spot, step: str) -> Spot:
    """The place of this name, inside the entries of a list too; made where the schema is silent."""
    while spot.item is not None and step not in spot.fields:
        spot = spot.item
    if step not in spot.fields:
        spot.fields[step] = spot_named(step, spot)
    return spot.fields[step]


def _named(spot: Spot, key: object, place: str) -> tuple[Spot, str]:
    """The place of a field, and how it is shown."""
    known = spot.fields.get(key) if isinstance(key, str) else None
    if known is not None and known.described:
        name = str(key)
        name = name if len(name) <= _NAME else name[:_NAME] + "..."
        return known, f"{place}.{name}" if place else name
    if known is None:
        known = spot_named(key, spot)
    return known, f"{place}.*" if place else "*"


def _may_be(text: str, strict: int, own: tuple[str, ...], tools: Collection[str]) -> bool:
    """Has a text what a placeholder cannot do without?"""
    if _hint(text) is not None:
        return True
    if len(text) > _SHORT or not text:
        return False
    low = text.lower()
    if "::" in low or (strict == 1 and ("/:" in low or "/id" in low)):
        return True
    if " " in low:
        words = low.split()
        return not _TELLING.isdisjoint(words) or (strict and len(words) > 1)
    if low in _SINGLE or low in BLANKS or (own and low in own):
        return True
    if "." in low:
        head, _, tail = text.partition(".")
        if strict == _EXACT and "@" not in low:
            return True
        return head in tools or any(part in RESULTS for part in tail.split(".")) or low.startswith(_BEFORE_DOT)
    if low[-1].isdigit() and low.startswith(_BEFORE_NUMBER):
        return True
    if not strict:
        return text in tools or low[0] in _MARKS
    # A mark in front of it, words joined by hyphens or by their case, the way to a file that is meant to be any.
    return text in tools or "-" in low or (low != text and text.isalpha()) or low[0] in _MARKS


def _inside(value: object, tools: Collection[str]) -> bool:
    """The same for lists and objects; what is no JSON is looked at as the model wrote it."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind is str:
            if _may_be(one, _EXACT, (), tools):  # type: ignore[arg-type]
                return True
        elif kind is dict:
            for key, part in one.items():  # type: ignore[attr-defined]
                if key in _REFERENCES or key == part:
                    return True
                waiting.append(part)
        elif kind is list or kind is tuple:
            waiting += one  # type: ignore[arg-type]
        elif kind not in _PLAIN:
            return True
    return False


def _reference(value: Mapping[object, object], spot: Spot, others: Others, index: int) -> int | None:
    """`{"$ref": "find#/path"}`: an object that refers to the result of a call."""
    if not 1 <= len(value) <= 3 or spot.role in ("code", "form"):
        return None
    keys = [key for key in value if isinstance(key, str)]
    if len(keys) != len(value) or any(key in spot.fields for key in keys):
        return None
    marks = [key for key in keys if key in _REFERENCES]
    rest = [key for key in keys if key not in _REFERENCES]
    if not marks or any(key not in _BESIDE for key in rest):
        return None
    target = value[marks[0]]
    if marks[0] == "$ref" and isinstance(target, str) and target.startswith(("#/", "http", "./")) and spot.own:
        if _SCHEMAS.intersection(spot.own) or spot.tool.codes:
            return None
    named = _target(target, others, index)
    if any(mark in _OUTRIGHT for mark in marks):
        return SOMEWHERE if named is None else named
    return named


_SCHEMAS: Final = frozenset(
    {"schema", "schemas", "spec", "openapi", "definition", "definitions", "properties", "components", "items"}
)


def _target(target: object, others: Others, index: int) -> int | None:
    if not isinstance(target, str):
        return None
    head = re.split(r"[#./\[]", target[:160], maxsplit=1)[0]
    found = others.id(head, index)
    return found if found is not None else others.tool(words_of(head), index)


def refusal(found: Sequence[Found], calls: int, tool: str | None = None) -> str:
    """Why a call with placeholders is not run, and what to do, for the model.

    Args:
        found: the placeholders, one or more.
        calls: how many calls the batch has.
        tool: whose result one of them names, or None.
    """
    head = f"Not run: {_told(found)} instead of a value."
    source = next((one.call for one in found if one.call is not None), None)
    if source is not None:
        which = f"call {source}" if tool is None else f"call {source} ({tool})"
        return (
            f"{head} Calls of one response do not see each other's results. Wait for the result of {which}, then call "
            "again with the real value."
        )
    if calls > 1:
        return (
            f"{head} Calls of one response do not see each other's results. Wait for the first result, then call again "
            "with the real value."
        )
    return f"{head} Get the real value first: by another call, whose result you wait for, or from the user. Then call again."


def warning(found: Sequence[Found], index: int, tool: str) -> str:
    """What the model is told of a call with placeholders that runs all the same."""
    return f"Call {index} ({tool}) was run although {_told(found)} instead of a value."


def _told(found: Sequence[Found]) -> str:
    places = list(dict.fromkeys(one.place for one in found))
    shown = [repr(place if len(place) <= _PLACE else place[:_PLACE] + "...") for place in places if place]
    if not shown:
        return "the arguments hold a placeholder"
    if len(shown) == 1:
        return f"argument {shown[0]} holds a placeholder"
    return f"arguments {', '.join(shown[:-1])} and {shown[-1]} hold placeholders"


GuardMode = Literal["refuse", "warn", "off"]
"""What becomes of a call with a placeholder: it is refused, it runs and that is told, nobody looks."""
