"""NESTFUL's plans: `[{"name": ..., "arguments": {"from": "$var1.pos.lat$"}, "label": "var2"}]`.

Theory. Each call may have a label, and `$var1$`, `$var1.a.b$` or `$var1.items[0].id$` is what it answered, or a part
of it. The form itself does not say which results are lists, and a name on a list can mean two things. Where the
tool's argument takes a list, as in `$var1.name$` where `var1` lists albums, it is that name of every member. Else one
value is wanted, as in `$var1.hotel_id$` where `var1` is a list of one: all members must agree on it, and nothing is
chosen. The entry `var_result` is no call: it says what the plan comes to, and there a list stays a list.

House rules. A step uses the steps before it only. A `$` that opens no label of the plan is itself, so prices stay;
where a text is nothing but `$name...$`, or the name looks like `var` and a number, a label was meant. `$$` is a `$`.

Not here: whether the outputs came about (tower).
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Final

from towerman.adapters.reading import described, fields_of, items_of, opened, plain_text
from towerman.calls import Batch
from towerman.errors import InputError
from towerman.forms.document import BadText, Draft, Part, Split, Tools
from towerman.plan import AGREED, EACH, written

FORM: Final = "nestful"

OUTPUTS: Final = "var_result"

_HEAD: Final = re.compile(r"[^.\[$]+")
_WORD: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LABEL: Final = re.compile(r"var\d+", re.ASCII)
_NOT_IN_A_LABEL: Final = re.compile(r"[.\[\]$}]")
_SEGMENT: Final = re.compile(r"\.([^.$\[\]]+)|\[(\d{1,18})\]", re.ASCII)


def read(given: object, tools: Tools) -> Batch:
    """Read a plan.

    Args:
        given: the list of calls, or a row of the data set, whose `output` is that list or its JSON text.
        tools: the parameters of tools.

    Raises:
        InputError: a part has another type than the form wants; it says which.
    """
    place = ""
    if isinstance(given, Mapping):
        place = "output"
        given = given.get("output")
        if isinstance(given, str):
            given = opened(given)
    items = items_of(given)
    if items is None:
        raise InputError(f"{place or 'plan'}: a list of calls is wanted, got {described(given)}")
    rows = [_row(item, f"{place}[{index}]") for index, item in enumerate(items)]
    labels = {label for _, label, _ in rows if label}
    agreed, each = splitter(labels, AGREED), splitter(labels, EACH)
    draft = Draft(FORM, tools, ordered=True)
    for index, (name, label, arguments) in enumerate(rows):
        named = draft.named(arguments, "arguments")
        if name != OUTPUTS:
            draft.add(name, label, agreed, (), named, lists=each)
        elif draft.outputs is not None:
            raise InputError(f"{place}[{index}]: a second {OUTPUTS}; a plan has one")
        else:
            draft.end(named, each)
    return draft.finish()


def _row(item: object, place: str) -> tuple[str, str, object]:
    """The tool, the label and the arguments of one entry."""
    fields = fields_of(item)
    name = None if fields is None else fields.get("name")
    if fields is None or not isinstance(name, str):
        raise InputError(f"{place}.name: the name of a tool is wanted")
    label = fields.get("label")
    if label is None:
        label = ""
    if not isinstance(label, str):
        raise InputError(f"{place}.label: text is wanted, got {described(label)}")
    if _NOT_IN_A_LABEL.search(label):
        raise InputError(f"{place}.label: none of the signs . [ ] $ }} may stand in a label; it is written as var1")
    return plain_text(name), plain_text(label), fields.get("arguments")


def splitter(labels: Container[str], members: int) -> Split:
    """What takes the parts of a text apart.

    Args:
        labels: those of the plan.
        members: what a name on a list means: EACH or AGREED.
    """

    def split(text: str) -> list[Part]:
        parts: list[Part] = []
        end = at = 0
        while (at := text.find("$", at)) >= 0:
            if text.startswith("$$", at):
                parts += [text[end:at], "$"]
                end = at = at + 2
                continue
            close = text.find("$", at + 1)
            inner = text[at + 1 : close] if close >= 0 else text[at + 1 :]
            whole = at == 0 and close == len(text) - 1
            head = _meant(inner, labels, whole=whole)
            if head is None:
                at += 1
                continue
            if close < 0:
                raise BadText("a '$' with a label and no closing '$'; write '$$' for a '$'")
            parts += [text[end:at], (_written(head, inner, members),)]
            end = at = close + 1
        parts.append(text[end:])
        return [part for part in parts if part]

    return split


def _meant(inner: str, labels: Container[str], *, whole: bool) -> str | None:
    """The label that stands behind a `$`, or None where none is meant."""
    match = _HEAD.match(inner)
    if match is None:
        return None
    head = match[0]
    word = _WORD.match(head)
    if head in labels:
        return head
    if word is not None and (word[0] in labels or _LABEL.fullmatch(word[0])):
        return word[0]
    return head if whole and word is not None and word[0] == head else None


def _written(head: str, inner: str, members: int) -> str:
    """The reference in native syntax."""
    path: list[str | int] = []
    place = len(head)
    while place < len(inner):
        match = _SEGMENT.match(inner, place)
        if match is None:
            raise BadText("behind a label a path of '.name' and '[0]' is wanted, and then '$'")
        place = match.end()
        path += [members, match[1]] if match[1] is not None else [int(match[2])]
    return written(head, tuple(path))


def is_row(fields: Mapping[str, object]) -> bool:
    """Whether it is a row of the data set: calls, or their text, under `output`."""
    output = fields.get("output")
    if isinstance(output, str):
        return "input" in fields
    items = items_of(output)
    if items is None:
        return False
    rows = [fields_of(item) for item in items]
    return all(row is not None and "name" in row and "type" not in row for row in rows)
