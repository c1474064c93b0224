"""The forms told apart, and the way in.

Theory. A form shows in its structure: in JSON by its keys, in text by the shape of its lines. Where it does not show,
or where two show, nothing is guessed: the caller names it. What a provider sent, or Towerman's own form, is a plan,
too, where it is handed in as one; the adapters read that.

Not here: what a form's parts mean (a file for each).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn, TypeAlias

from towerman import adapters
from towerman.adapters.reading import described, detect, fields_of, opened
from towerman.calls import Batch, Call
from towerman.errors import InputError, PolicyError
from towerman.forms import hugginggpt, llmcompiler, nestful, rewoo, taskbench, worfbench
from towerman.forms.document import Tools, nothing_known

NATIVE: Final = "towerman"

FORMS: Final[tuple[str, ...]] = (
    llmcompiler.FORM,
    rewoo.FORM,
    taskbench.FORM,
    hugginggpt.FORM,
    nestful.FORM,
    worfbench.FORM,
)
"""The names of the forms that planners write."""

_Opened: TypeAlias = str | Batch | Mapping[str, object] | Sequence[object]

_TEXTS: Final = (llmcompiler.FORM, rewoo.FORM, worfbench.FORM)
_REWOO: Final = re.compile(r"^[ \t]*(?:Plan:.*)?#E\d{1,18}[ \t]*=", re.ASCII | re.MULTILINE)
_LISTED: Final = ", ".join(map(repr, (NATIVE, *FORMS)))
_NATIVE_KEYS: Final = ("tool", "needs", "depends_on", "function")
_FENCE: Final = "```"


def find_form(document: object) -> str | None:
    """Say in which form a plan is written.

    Args:
        document: text, JSON text, or the same as Python data.

    Returns:
        One of FORMS, or a format of the adapters; None: in none of them.

    Raises:
        InputError: it is no text and no data that could be a plan, or it could be in several forms; the message lists
            them.
    """
    return _found(_opened(document, None))


def read_plan(document: object, form: str | None = None, tools: Tools = nothing_known) -> Batch:
    """Read a plan that a planner wrote, whole or not at all.

    Args:
        document: text, JSON text, or the same as Python data.
        form: one of FORMS, or a format of the adapters; `worfbench:tool` names the tool that gets each node's text;
            None to find out.
        tools: the parameters of the tools that there are. LLMCompiler's `join` is a step only where there is a tool of
            this name.

    Returns:
        Its calls, with references in native syntax; not linked, so the plan room may still refuse them. Where the calls
        could be seen and something in them is malformed, it says that they are refused.

    Raises:
        InputError: it is no plan in that form; the message names the line or the place, and the fix.
        PolicyError: an unknown form.
    """
    try:
        return _read(document, form, tools)
    except (InputError, PolicyError):
        raise
    except Exception as fault:  # of an object that does not let itself be looked at
        name = type(document).__name__[:64]
        raise InputError(f"a {name} was handed in that fails when it is read ({type(fault).__name__})") from None


def is_form(name: str) -> bool:
    """Whether this names a form that planners write."""
    return name.partition(":")[0] == worfbench.FORM or name in FORMS


def _read(document: object, form: str | None, tools: Tools) -> Batch:
    name, _, node_tool = (form or "").partition(":")
    if form is not None and not is_form(form) and form not in adapters.FORMATS:
        known = ", ".join(map(repr, (*adapters.FORMATS, *FORMS)))
        raise PolicyError(f"format: unknown {form[:32]!r}; known are {known}")
    value = _opened(document, name or None)
    if form is None:
        name = _found(value) or _refuse(value)
    if name in adapters.FORMATS:
        return replace(adapters.decode(value, name), plan=True)
    if isinstance(value, str):
        if name == llmcompiler.FORM:
            return llmcompiler.read(value, tools)
        return rewoo.read(value, tools) if name == rewoo.FORM else worfbench.read(value, tools, node_tool)
    if name in _TEXTS:
        raise InputError(f"a plan of the form {name!r} is text, got {described(value)}")
    if name == nestful.FORM:
        return nestful.read(value, tools)
    if name == taskbench.FORM:
        if isinstance(value, Mapping):
            return taskbench.read(value, tools)
    elif not isinstance(value, Batch | Mapping):
        return hugginggpt.read(value, tools)
    wanted = "an object with 'task_nodes'" if name == taskbench.FORM else "a list of tasks"
    raise InputError(f"{wanted} is wanted in the form {name!r}, got {described(value)}")


def _opened(document: object, form: str | None) -> _Opened:
    """Text that is no JSON as text; all else as plain data."""
    if isinstance(document, bytes | bytearray | memoryview):
        try:
            document = bytes(document).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text: a wrong byte at position {error.start}") from None
    if isinstance(document, str):
        text = str.__str__(document).removeprefix("\ufeff")
        if form in _TEXTS or (form is None and text.lstrip()[:1] not in ("{", "[")):
            return text.replace("\r\n", "\n")
        document = text
    try:
        return opened(document)
    except InputError as error:
        told, accepted, _ = str(error).partition("; accepted are:")
        raise InputError(f"{told}; the forms of plans are {_LISTED}" if accepted else told) from None


def _found(value: _Opened) -> str | None:
    """The form that something opened is in."""
    if isinstance(value, Batch):
        return value.format
    if isinstance(value, str):
        forms = _of_text(value)
    else:
        forms = _of_object(value) if isinstance(value, Mapping) else _of_list(value)
        if not forms:
            return detect(value)
    if len(forms) > 1:
        told = " and ".join(map(repr, forms))
        raise InputError(f"this could be a plan in the form {told}: say which one it is (`format=`, `--format`)")
    return forms[0] if forms else None


def _refuse(value: _Opened) -> NoReturn:
    """Raise the InputError for what is in none of the forms."""
    if not isinstance(value, str):
        raise InputError(f"no plan in any known form: got {described(value)}; the forms are {_LISTED}")
    if value.lstrip().startswith(_FENCE):
        raise InputError(f"no plan in any known form: text in a code block; hand in what is between the {_FENCE} lines")
    raise InputError(f"no plan in any known form: got text; the forms are {_LISTED}")


def _of_text(text: str) -> list[str]:
    found = []
    if llmcompiler.STEP.search(text):
        found.append(llmcompiler.FORM)
    if _REWOO.search(text):
        found.append(rewoo.FORM)
    if {match[1].lower() for match in worfbench.HEADING.finditer(text)} >= {"node", "edge"}:
        found.append(worfbench.FORM)
    return found


def _of_object(fields: Mapping[str, object]) -> list[str]:
    found = []
    if "task_nodes" in fields:
        found.append(taskbench.FORM)
    if nestful.is_row(fields):
        found.append(nestful.FORM)
    other = detect(fields) if found else None
    return found if other is None else [*found, other]


def _of_list(items: Sequence[object]) -> list[str]:
    """What the items of a list are; one form for all of them."""
    found: dict[str, None] = {}
    for item in items:
        fields = None if isinstance(item, Call) else fields_of(item)
        if fields is None or "type" in fields or not fields.keys().isdisjoint(_NATIVE_KEYS):
            return []  # no planner's; whoever reads it says what is wrong with it
        if "task" in fields:
            found[hugginggpt.FORM] = None
        elif "label" in fields or fields.get("name") == nestful.OUTPUTS:
            if "id" in fields:
                return []
            found[nestful.FORM] = None
    return list(found)
