"""The forms told apart, and the way in.

Theory. A form shows in its structure: in JSON by its keys, in text by the shape of its lines. Where it does not show,
or where two show, nothing is guessed: the caller names it.

Not here: what a form's parts mean (a file for each).
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Final

from towerman.adapters.reading import described, fields_of, items_of, opened
from towerman.calls import Batch, Call
from towerman.errors import InputError, PolicyError
from towerman.forms import hugginggpt, llmcompiler, nestful, rewoo, taskbench, worfbench
from towerman.forms.document import PlanDocument

NATIVE: Final = "towerman"

FORMS: Final[tuple[str, ...]] = (
    NATIVE,
    llmcompiler.FORM,
    rewoo.FORM,
    taskbench.FORM,
    hugginggpt.FORM,
    nestful.FORM,
    worfbench.FORM,
)
"""The names of the forms."""

_TEXTS: Final = (llmcompiler.FORM, rewoo.FORM, worfbench.FORM)
_REWOO: Final = re.compile(r"^[ \t]*(?:Plan:.*)?#E\d{1,18}[ \t]*=", re.ASCII | re.MULTILINE)
_LISTED: Final = ", ".join(map(repr, FORMS))


def find_form(document: object) -> str:
    """Say in which form a plan is written.

    Args:
        document: text, JSON text, or the same as Python data.

    Raises:
        InputError: in none of them, or it could be several; the message lists them.
    """
    return _found(_opened(document, None))


def read_plan(
    document: object, form: str | None = None, *, tools: Container[str] = (), node_tool: str | None = None
) -> PlanDocument:
    """Read a plan that a planner wrote, whole or not at all.

    Args:
        document: text, JSON text, or the same as Python data.
        form: one of FORMS; None to find out.
        tools: names of tools that there are: LLMCompiler's `join` is a step only where a tool of this name is.
        node_tool: the tool that gets each sentence of a WorFBench plan; None: the sentence is the tool's name.

    Returns:
        Its calls, with references in native syntax; not linked, so it may still be refused by the plan room.

    Raises:
        InputError: it is no plan in that form; the message names the line or the place, and the fix.
        RefusedPlan: its calls could be seen, and something in them is malformed.
        PolicyError: an unknown form.
    """
    if form is not None and form not in FORMS:
        raise PolicyError(f"form: unknown {str(form)[:32]!r}; known are {_LISTED}")
    value = _opened(document, form)
    form = _found(value) if form is None else form
    if isinstance(value, str):
        if form == llmcompiler.FORM:
            return llmcompiler.read(value, tools)
        return rewoo.read(value) if form == rewoo.FORM else worfbench.read(value, node_tool)
    if form in _TEXTS:
        raise InputError(f"a plan of the form {form!r} is text, got {described(value)}")
    if form == taskbench.FORM:
        if not isinstance(value, Mapping):
            raise InputError(f"an object with 'task_nodes' is wanted, got {described(value)}")
        return taskbench.read(value)
    if form == nestful.FORM:
        return nestful.read(value)
    if form == hugginggpt.FORM:
        if isinstance(value, Mapping):
            raise InputError(f"a list of tasks is wanted, got {described(value)}")
        return hugginggpt.read(value)
    return _native(value)


def _native(value: Mapping[str, object] | Sequence[object]) -> PlanDocument:
    """Towerman's own form."""
    from towerman.adapters import native

    items: object = value
    place = ""
    if isinstance(value, Mapping):
        place = "plan" if "plan" in value or "calls" not in value else "calls"
        items = value.get(place)
        other = next((key for key in value if key != place), None)
        if other is not None:
            raise InputError(f"a plan has {place!r} only, and another key stands beside it; take it away")
    listed = items_of(items)
    if listed is None:
        raise InputError(f"{place or 'plan'}: a list of steps is wanted, got {described(items)}")
    return PlanDocument(NATIVE, native.read_calls(listed, place))


def _opened(document: object, form: str | None) -> str | Mapping[str, object] | Sequence[object]:
    """Text that is no JSON as text; all else as plain data."""
    if isinstance(document, bytes | bytearray | memoryview):
        try:
            document = bytes(document).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text: a wrong byte at position {error.start}") from None
    if isinstance(document, str):
        text = str.__str__(document).removeprefix("\ufeff").replace("\r\n", "\n")
        if form in _TEXTS or (form is None and text.lstrip()[:1] not in ("{", "[")):
            return text
        document = text
    if document is None:
        raise InputError(f"no plan: got None; the forms are {_LISTED}")
    try:
        value = opened(document)
    except InputError as error:
        told = str(error).split("; accepted are:")[0]
        raise InputError(f"{told}; the forms of plans are {_LISTED}") from None
    return value.calls if isinstance(value, Batch) else value


def _found(value: str | Mapping[str, object] | Sequence[object]) -> str:
    """The one form that something opened is in."""
    if isinstance(value, str):
        forms = _of_text(value)
    elif isinstance(value, Mapping):
        forms = _of_object(value)
    else:
        forms = _of_list(value)
    if len(forms) == 1:
        return forms[0]
    if forms:
        told = " and ".join(map(repr, forms))
        raise InputError(f"this could be a plan in the form {told}: say which (`--format`)")
    what = "text" if isinstance(value, str) else described(value)
    raise InputError(f"no plan in any known form: got {what}; the forms are {_LISTED}")


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
    if "plan" in fields or "calls" in fields:
        found.append(NATIVE)
    if "task_nodes" in fields:
        found.append(taskbench.FORM)
    if nestful.is_row(fields):
        found.append(nestful.FORM)
    return found


def _of_list(items: Sequence[object]) -> list[str]:
    """What the items of a list are; one form for all of them."""
    found: dict[str, None] = {}
    for item in items:
        if isinstance(item, Call):
            found[NATIVE] = None
            continue
        fields = fields_of(item)
        if fields is None:
            continue
        if "tool" in fields:
            found[NATIVE] = None
        elif "task" in fields:
            found[hugginggpt.FORM] = None
        elif "name" in fields:
            labelled = "label" in fields or fields["name"] == nestful.OUTPUTS
            found[nestful.FORM if labelled else NATIVE] = None
    # A call of NESTFUL whose answer nobody uses has no label.
    if len(found) == 2 and nestful.FORM in found and NATIVE in found and not any(_has_needs(item) for item in items):
        del found[NATIVE]
    return list(found) or ([NATIVE] if not items else [])


def _has_needs(item: object) -> bool:
    fields = fields_of(item)
    return isinstance(item, Call) or (fields is not None and not fields.keys().isdisjoint(("tool", "id", "needs")))
