"""HuggingGPT's plans: `[{"task": ..., "id": 1, "dep": [0], "args": {"image": "<GENERATED>-0"}}]`.

Theory. Each task has a number, the numbers of the tasks that it depends on (`[-1]` for none), and named arguments, in
which `<GENERATED>-0`, also written `<GENERATED-0>`, is the result of task 0. Dependencies and references both hold.

House rules. Case and the sign before the number may differ; a `<GENERATED>` without a number is refused, since it could
mean each of them.

Not here: kinds of resources. A result is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from towerman.adapters.reading import described, fields_of, items_of, plain_text
from towerman.calls import Batch
from towerman.errors import InputError
from towerman.forms.document import BadText, Draft, Part, Tools, no_path, number

FORM: Final = "hugginggpt"

_BRACKETS: Final = re.compile(r"<([^<>]*)>(?:[ _-]?(\d{1,18})(?!\w))?", re.ASCII)
_INSIDE: Final = re.compile(r"\s*generated[\s_-]*(\d{1,18})\s*", re.IGNORECASE | re.ASCII)
_GENERATED: Final = re.compile(r"\bgenerated\b", re.IGNORECASE)


def read(items: Sequence[object], tools: Tools) -> Batch:
    """Read a plan.

    Raises:
        InputError: a part has another type than the form wants; it says which.
    """
    draft = Draft(FORM, tools, numbered=True)
    for index, item in enumerate(items):
        task = fields_of(item)
        tool = None if task is None else task.get("task")
        if task is None or not isinstance(tool, str):
            raise InputError(f"[{index}].task: the name of a tool is wanted")
        own = _number(task.get("id"), f"[{index}].id")
        dep = task.get("dep")
        numbers = () if dep is None else items_of(dep)
        if numbers is None:
            raise InputError(f"[{index}].dep: a list of numbers is wanted, got {described(dep)}")
        needs = [_number(each, f"[{index}].dep[{place}]") for place, each in enumerate(numbers)]
        named = draft.named(task.get("args"), "args")
        draft.add(plain_text(tool), own, split, (), named, tuple(need for need in needs if need != "-1"))
    return draft.finish()


def _number(value: object, place: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 10**18:
        return str(int(value))
    raise InputError(f"{place}: a whole number is wanted, got {described(value)}")


def split(text: str) -> list[Part]:
    """The parts of a text with references.

    Raises:
        BadText: one is malformed.
    """
    parts: list[Part] = []
    end = 0
    for match in _BRACKETS.finditer(text):
        inside = match[1]
        found = _INSIDE.fullmatch(inside)
        after = match.end()
        if found is not None:
            digits = found[1]
            after = match.end(1) + 1
        elif _GENERATED.search(inside):
            if inside.strip().casefold() != "generated" or match[2] is None:
                raise BadText("'<GENERATED>' without the number of one task; write '<GENERATED>-0'")
            digits = match[2]
        else:
            continue
        parts += [text[end : match.start()], (number(digits),)]
        end = after
        no_path(text, end)
    parts.append(text[end:])
    return [part for part in parts if part]
