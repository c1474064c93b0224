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
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple, cast

from towerman.arguments import as_mapping
from towerman.errors import PolicyError
from towerman.placeholders.judging import SOMEWHERE, Others, judge
from towerman.placeholders.patterns import CAPITALS
from towerman.placeholders.roles import STRICT, Spot, Words, spot_named, spots_of
from towerman.placeholders.words import (
    AMOUNTS,
    AWAITED,
    BEFORE,
    BLANKS,
    CALL_IDS,
    DONE,
    KINDS,
    MISSING,
    NEWEST,
    NUMBERED,
    OPEN,
    POINTERS,
    RESULTS,
    STEPS,
    TIMES,
    TYPES,
    VERBS,
    words_of,
)
from towerman.policy import nearest

MOST_TOLD: Final = 5
"""Places of one call that are told."""

MOST_LOOKED: Final = 1_000
"""Values inside lists and objects of one call that are looked through; what comes behind them is taken for values."""

_NAME: Final = 64  # characters of a name in a message
_PLACE: Final = 120  # characters of a place

_SHORT: Final = 80  # characters of a text that may be a placeholder without any such character

_PROSE_WORDS: Final = BEFORE | RESULTS | STEPS | CALL_IDS | DONE | {"here", "insert"}
_PLAIN_WORDS: Final = (
    _PROSE_WORDS
    | OPEN
    | {"changeme", "replace", "change", "fill", "enter", "put", "new", "string", "from", "use"}
    | NEWEST
)
_STRICT_WORDS: Final = (
    _PLAIN_WORDS | AWAITED | BLANKS | MISSING | TYPES | KINDS | TIMES | POINTERS | AMOUNTS | NUMBERED
) | {"of", "by", "your", "to", "see", "as", "not", "n/a", "will", "s"}
_BEFORE_NUMBER: Final = ("call", "step", "task", "node", "action", "tool", "subtask", "result", "output", "response")
_BEFORE_DOT: Final = tuple(sorted(RESULTS | BEFORE))
_MARKS: Final = frozenset(" @:|~*=&!^?\xab\u2039")


class _Look(NamedTuple):
    """How the texts of one argument are looked at first.

    Args:
        words: without one of these a text has to have something else.
        single: the same for a text of one word; the argument's own name is one.
        prose: whole sentences stand there.
        strict: only the real value is of use.
        place: a file or URL.
        known: values that the schema itself names.
        any: it stands for all looks that there are; False for that of one argument.
    """

    words: frozenset[str]
    single: frozenset[str]
    prose: bool
    strict: bool
    place: bool
    known: frozenset[object]
    any: bool = False


def _look_of(spot: Spot) -> _Look:
    strict, prose = spot.role in STRICT, spot.role in ("text", "query")
    words = _STRICT_WORDS | set(spot.own) if strict else _PROSE_WORDS if prose else _PLAIN_WORDS
    single = words | {"".join(spot.own), " ".join(spot.own)}
    return _Look(words, single, prose, strict, spot.role == "place", spot.known)


_ANY: Final = _Look(_STRICT_WORDS, _STRICT_WORDS, False, True, True, frozenset(), any=True)
"""What is not looked at by this is not by the look of any argument but for its own name."""

_PLAIN: Final = frozenset({int, float, bool, type(None), Decimal, datetime.date, datetime.datetime, datetime.timedelta})
"""Types of checked values in which no text is."""

_REFERENCES: Final = frozenset(
    {"$ref", "$from", "$result", "$output", "$step", "$call", "$var", "$prev", "from_call", "from_step", "output_of"}
    | {"result_of", "call_id", "step_id", "tool_call_id", "ref", "reference", "depends_on"}
)
_FEW: Final = 3  # fields of an object that refers

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

    __slots__ = ("_free", "_looks", "_marks", "_texts", "_top")

    def __init__(
        self, name: str, description: str, schema: Mapping[str, object], free_text: bool | Collection[str] = ()
    ) -> None:
        self._free = free_text is True
        self._top = spots_of(schema, Words(name, description))
        if not isinstance(free_text, bool):
            self._set_free(free_text)
        self._looks: dict[int, _Look] = {}  # by the identity of a spot: all of them live as long as the guard
        self._marks = _REFERENCES.difference(self._top.fields)
        # Most calls are a few texts, so these are looked at by the shortest way.
        self._texts = {str(name): self._look(spot) for name, spot in self._top.fields.items() if not spot.free}

    def _set_free(self, paths: Collection[str]) -> None:
        for path in paths:
            spot = self._top
            for step in _steps(path):
                spot = _below(spot, step)
            spot.free = True

    def _look(self, spot: Spot) -> _Look:
        """How a place that the schema names is looked at; worked out once."""
        look = self._looks.get(id(spot))
        if look is None:
            look = self._looks[id(spot)] = _look_of(spot)
        return look

    def _place(self, key: object, spot: Spot) -> tuple[Spot, _Look]:
        """The place of a name inside another one, and how it is looked at; also where no schema speaks of it."""
        known = spot.fields.get(key) if isinstance(key, str) else None
        if known is not None:
            return known, self._look(known)
        made = spot_named(key, spot)  # a name of the model's own: nothing of it is kept
        return made, _look_of(made)

    def suspects(self, keywords: Mapping[str, object], tools: Collection[str]) -> bool:
        """Could there be a placeholder among checked arguments? False: `find` finds none.

        Args:
            keywords: the arguments, as the handler would get them.
            tools: names of all tools, of which one may stand in a value.
        """
        if self._free:
            return False
        if len(keywords) <= _FEW and not self._marks.isdisjoint(keywords):
            return True
        texts = self._texts
        for name, value in keywords.items():
            if type(value) is str:
                look = texts.get(name)
                if look is not None:
                    if _may_be(value, look, tools) and value not in look.known:
                        return True
                    continue
            elif type(value) in _PLAIN:
                continue
            if self._inside(value, self._top.fields.get(name), name, tools):
                return True
        return False

    def _inside(self, value: object, spot: Spot | None, name: object, tools: Collection[str]) -> bool:
        """The same for lists and objects; what is no JSON is looked at as the model wrote it."""
        waiting = [(value, spot, name)]
        looked = 0
        while waiting:
            if len(waiting) + looked > MOST_LOOKED:  # which of them are looked through is another question
                return True
            looked += 1
            one, spot, name = waiting.pop()
            kind = type(one)
            if kind in _PLAIN or (spot is not None and spot.free):
                continue
            if kind is str:
                text = cast("str", one)
                if spot is None:
                    if _may_be(text, _ANY, tools) or _named_so(text, name):
                        return True
                elif _may_be(text, self._look(spot), tools) and text not in spot.known:
                    return True
            elif kind is dict:
                few = len(cast("dict[object, object]", one)) <= _FEW
                for key, part in cast("dict[object, object]", one).items():
                    known = None if spot is None else spot.fields.get(key)
                    if few and known is None and key in _REFERENCES:
                        return True
                    waiting.append((part, known, key))
            elif kind is list or kind is tuple:
                inside = spot if spot is None or spot.item is None else spot.item
                waiting += [(part, inside, name) for part in cast("Sequence[object]", one)]
            elif not isinstance(one, Enum):
                return True
        return False

    def find(
        self, arguments: Mapping[str, object], others: Others, index: int, tools: Collection[str] | None = None
    ) -> list[Found]:
        """The placeholders in the arguments of a call, in their order; at most a few.

        Args:
            arguments: as the model wrote them: plain JSON data of any depth.
            others: the calls of the batch.
            index: which of them it is.
            tools: names of all tools; None: those of the batch.
        """
        found: list[Found] = []
        if self._free:
            return found
        if tools is None:
            tools = others.tools
        waiting: list[tuple[object, Spot, _Look, str]] = [(arguments, self._top, self._look(self._top), "")]
        looked = 0
        while waiting and len(found) < MOST_TOLD and looked < MOST_LOOKED:
            looked += 1
            value, spot, look, place = waiting.pop()
            if spot.free:
                continue
            call = None
            if isinstance(value, str):
                if _may_be(value, look, tools):
                    call = judge(value, spot, others, index)
            elif isinstance(value, Mapping):
                call = _reference(value, spot, others, index)
                if call is None:
                    below = [
                        (part, *self._place(key, spot), _shown(key, spot, place))
                        for key, part in islice(value.items(), MOST_LOOKED)
                        if isinstance(part, str | Mapping | list | tuple)
                    ]
                    waiting += reversed(below)
            else:
                item, entries = spot.item, cast("Sequence[object]", value)[:MOST_LOOKED]
                inside = (spot, look) if item is None else (item, self._look(item))
                waiting += [
                    (part, *inside, f"{place}[{at}]")
                    for at, part in zip(range(len(entries) - 1, -1, -1), reversed(entries), strict=True)
                    if isinstance(part, str | Mapping | list | tuple)
                ]
            if call is not None:
                found.append(Found(place, None if call == SOMEWHERE else call))
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


def _shown(key: object, spot: Spot, place: str) -> str:
    """How the place of a field is told."""
    known = spot.fields.get(key) if isinstance(key, str) else None
    name = "*"
    if known is not None and known.described:
        name = str(key)
        name = name if len(name) <= _NAME else name[:_NAME] + "..."
    return f"{place}.{name}" if place else name


def _has_mark(text: str) -> bool:
    """Has a text a sign that begins most placeholders and stands in few values?"""
    # One look for each of them is quicker than one for all.
    return "<" in text or "{" in text or "$" in text or "[" in text or "%" in text or "#" in text


def _may_be(text: str, look: _Look, tools: Collection[str]) -> bool:
    """Has a text what a placeholder cannot do without?"""
    if len(text) > _SHORT:
        return _has_mark(text)
    low = text.lower()
    if low.isalnum():
        if low in look.single or text in tools:
            return True
        if low == text:
            return low[-1].isdigit() and low.startswith(_BEFORE_NUMBER)
        return text[1:] != low[1:] and text.isalpha() and not text.isupper()  # `previousResult`
    if _has_mark(text):
        return True
    if look.place and ("/" in low or "\\" in low):
        left_open = "/:" in low or "/ID" in text or CAPITALS.search(text) is not None
        if left_open or not look.any:
            return left_open
    if "_" in low:
        low = low.replace("_", " ")
    words = low.split()
    if not words:
        return False
    if not look.words.isdisjoint(words) or low in look.single:
        return True
    if look.prose and len(words) > 1:
        return low[0] == "("
    return _odd(text, low, look, tools)


def _named_so(text: str, name: object) -> bool:
    """Is a text made of words of the name of its argument?"""
    if len(text) > _SHORT or not isinstance(name, str):
        return False
    own, said = words_of(name), words_of(text)
    return not set(own).isdisjoint(said) or (bool(own) and "".join(own) == "".join(said))


def _odd(text: str, low: str, look: _Look, tools: Collection[str]) -> bool:
    """The same for a short value of more than letters and digits, without such a word."""
    if low[0] in _MARKS or "(" in low or text in tools:
        return True
    if low[-1].isdigit() and low.startswith(_BEFORE_NUMBER):
        return True
    if "@" in low:
        return False
    if "." in low:
        head, _, tail = text.partition(".")
        if head in tools or low.startswith(_BEFORE_DOT) or not RESULTS.isdisjoint(tail.split(".")):
            return True
        if low.split(" ", 1)[0] in VERBS:
            return True
    elif "::" in low or "|" in low or ">" in low:
        return True
    # Joined by something else than a blank.
    return "xxx" in low or (look.strict and not look.words.isdisjoint(words_of(text)))


def _reference(value: Mapping[object, object], spot: Spot, others: Others, index: int) -> int | None:
    """`{"$ref": "find#/path"}`: an object that refers to the result of a call."""
    if not 1 <= len(value) <= _FEW or spot.role in ("code", "form"):
        return None
    keys = [key for key in value if isinstance(key, str)]
    if len(keys) != len(value) or any(key in spot.fields for key in keys):
        return None
    marks = [key for key in keys if key in _REFERENCES]
    rest = [key for key in keys if key not in _REFERENCES]
    if not marks or any(key not in _BESIDE for key in rest):
        return None
    target = value[marks[0]]
    local = marks[0] == "$ref" and isinstance(target, str) and target.startswith(("#/", "http", "./"))
    if local and spot.own and (_SCHEMAS.intersection(spot.own) or spot.tool.codes):
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
    head = f"Not run: {told(found)} instead of a value."
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
    return (
        f"{head} Get the real value first: by another call, whose result you wait for, or from the user. Then call "
        "again."
    )


def warning(found: Sequence[Found], index: int, tool: str) -> str:
    """What the model is told of a call with placeholders that runs all the same."""
    return f"Call {index} ({tool}) was run although {told(found)} instead of a value."


def told(found: Sequence[Found]) -> str:
    """Which arguments hold placeholders, in names of the schema."""
    places = list(dict.fromkeys(one.place for one in found))
    shown = [repr(place if len(place) <= _PLACE else place[:_PLACE] + "...") for place in places if place]
    if not shown:
        return "the arguments hold a placeholder"
    if len(shown) == 1:
        return f"argument {shown[0]} holds a placeholder"
    return f"arguments {', '.join(shown[:-1])} and {shown[-1]} hold placeholders"
