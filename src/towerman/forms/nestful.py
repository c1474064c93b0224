"""NESTFUL's plans: `[{"name": ..., "arguments": {"from": "$var1.pos.lat$"}, "label": "var2"}]`.

Theory. Each call may have a label, and `$var1$`, `$var1.a.b$` or `$var1.items[0].id$` is what it answered, or a part of
it. A name on a list means that name of every member, as in `$var1.name$` where `var1` lists albums; the form itself
does not say which results are lists, so every name is read as "of each member, where it is a list". The entry
`var_result` is no call: it says what the plan comes to.

House rules. A step uses the steps before it only. A `$` that opens no label of the plan is itself, so prices stay;
where a text is nothing but `$name...$`, or the name looks like `var` and a number, a label was meant. `$$` is a `$`.

Not here: whether the outputs came about (tower).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final

from towerman.adapters.reading import described, fields_of, items_of, opened
from towerman.calls import Call
from towerman.errors import InputError
from towerman.forms.document import BadText, Draft, PlanDocument, native_arguments
from towerman.plan import EACH, written

FORM: Final = "nestful"

OUTPUTS: Final = "var_result"

_HEAD: Final = re.compile(r"[^.\[$]+")
_WORD: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LABEL: Final = re.compile(r"var\d+", re.ASCII)
_SEGMENT: Final = re.compile(r"\.([^.$\[\]]+)|\[(\d{1,18})\]", re.ASCII)


def read(given: object) -> PlanDocument:
    """Read a plan.

    Args:
        given: the list of calls, or a row of the data set, whose `output` is that list or its JSON text.

    Raises:
        InputError: a part has another type than the form wants; it says which.
        RefusedPlan: a reference is malformed, or arguments cannot be read.
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
    rows: list[Mapping[str, object]] = []
    for index, item in enumerate(items):
        fields = fields_of(item)
        if fields is None or not isinstance(fields.get("name"), str):
            raise InputError(f"{place}[{index}].name: the name of a tool is wanted")
        label = fields.get("label")
        if label is not None and not isinstance(label, str):
            raise InputError(f"{place}[{index}].label: text is wanted, got {described(label)}")
        rows.append(fields)
    labels = {str(row["label"]) for row in rows if row.get("label")}
    split = splitter(labels)
    draft = Draft(FORM, ordered=True)
    for index, row in enumerate(rows):
        arguments = row.get("arguments")
        fields = fields_of({} if arguments is None else arguments)
        if fields is None:
            draft.refuse("invalid_arguments", f"arguments: an object is wanted, got {described(arguments)}")
            fields = {}
        found = native_arguments(draft, {str(name): value for name, value in fields.items()}, split)
        if row["name"] != OUTPUTS:
            draft.add(Call(str(row["name"]), found, str(row.get("label") or "")))
        elif draft.outputs is not None:
            raise InputError(f"{place}[{index}]: a second {OUTPUTS}; a plan has one")
        else:
            draft.outputs = found
    return draft.finish()


def splitter(labels: Container[str]) -> Callable[[str], list[str | tuple[str]]]:
    """What takes the parts of a text apart, in a plan with these labels."""

    def split(text: str) -> list[str | tuple[str]]:
        parts: list[str | tuple[str]] = []
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
            parts += [text[end:at], (_written(head, inner),)]
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


def _written(head: str, inner: str) -> str:
    """The reference in native syntax."""
    if "}" in head:
        raise BadText("a label with a '}' in it")
    path: list[str | int] = []
    place = len(head)
    while place < len(inner):
        match = _SEGMENT.match(inner, place)
        if match is None:
            raise BadText("behind a label a path of '.name' and '[0]' is wanted, and then '$'")
        place = match.end()
        path += [EACH, match[1]] if match[1] is not None else [int(match[2])]
    return written(head, tuple(path))


def is_row(fields: Mapping[str, object]) -> bool:
    """Whether it is a row of the data set."""
    return "output" in fields and ("input" in fields or isinstance(fields["output"], Sequence))
