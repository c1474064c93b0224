"""ReWOO's plans: `Plan: ...` and `#E2 = Summarize[the text of #E1]`.

Theory. Each step is an evidence with a number, a tool and one text in square brackets; `#E1` in that text is the result
of step 1. Lines that begin with `Plan:` are the planner's own; the step may stand at the end of such a line.

House rules. Ids may have any number of digits, and are compared whole: `#E1` is not `#E12`. The text ends with the last
`]` before the next step.

Not here: the solver, which reads the results.
"""

from __future__ import annotations

import re
from typing import Final

from towerman.calls import Call
from towerman.errors import InputError
from towerman.forms.document import BadText, Draft, PlanDocument, native_items, number

FORM: Final = "rewoo"

STEP: Final = re.compile(r"#E(\d{1,18})[ \t]*=[ \t]*", re.ASCII)
_TOOL: Final = re.compile(r"([A-Za-z_][\w.-]*)[ \t]*\[", re.ASCII)
_MARK: Final = re.compile(r"#([Ee])(\d{1,18})(?!\w)", re.ASCII)


def read(text: str) -> PlanDocument:
    """Read a plan.

    Raises:
        InputError: a line is no step; it says which and the fix.
        RefusedPlan: a reference is malformed.
    """
    draft = Draft(FORM, ordered=True, numbered=True)
    open_step: tuple[str, str, list[str], int] | None = None
    for line, row in enumerate(text.split("\n"), 1):
        stripped = row.strip()
        step = STEP.match(stripped)
        if stripped.startswith("Plan:"):
            found = list(STEP.finditer(stripped))
            if len(found) > 1:
                raise InputError(f"line {line}: two steps in one line; write each in a line of its own")
            step = found[0] if found else None
            if step is None:
                _close(draft, open_step)
                open_step = None
                continue
        if step is not None:
            _close(draft, open_step)
            rest = stripped[step.end() :]
            tool = _TOOL.match(rest)
            if tool is None:
                raise InputError(f"line {line}: a step is written as #E1 = Tool[text]")
            open_step = number(step[1]), tool[1], [rest[tool.end() :]], line
        elif open_step is not None:
            open_step[2].append(row)
        elif stripped and draft.calls:
            raise InputError(f"line {line}: neither 'Plan:' nor a step like #E1 = Tool[text]")
    _close(draft, open_step)
    if not draft.calls:
        raise InputError(f"no step of the form {FORM!r}: a line like #E1 = Tool[text] is wanted")
    return draft.finish()


def _close(draft: Draft, step: tuple[str, str, list[str], int] | None) -> None:
    """The step that was open is complete."""
    if step is None:
        return
    own, tool, rows, line = step
    text = "\n".join(rows).rstrip()
    if not text.endswith("]"):
        raise InputError(f"line {line}: the text of this step does not end with ']'")
    draft.add(Call(tool, {}, f"E{own}"), native_items(draft, [text[:-1]], split))


def split(text: str) -> list[str | tuple[str]]:
    """The parts of a text with references."""
    parts: list[str | tuple[str]] = []
    end = 0
    for match in _MARK.finditer(text):
        if match[1] == "e":
            raise BadText("'#e' with a number; write '#E' for a reference")
        parts += [text[end : match.start()], (f"E{number(match[2])}",)]
        end = match.end()
    parts.append(text[end:])
    return [part for part in parts if part]
