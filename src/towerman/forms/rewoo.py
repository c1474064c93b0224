"""ReWOO's plans: `Plan: ...` and `#E2 = Summarize[the text of #E1]`.

Theory. Each step is an evidence with a number, a tool and one text in square brackets; `#E1` in that text is the result
of step 1. What stands before the first step, and from `Plan:` to the next one, is the planner's own; the step may
stand at the end of such a line.

House rules. Ids may have any number of digits, and are compared whole: `#E1` is not `#E12`. The text ends with the last
`]` before the next step; without any, the tool gets no argument.

Not here: the solver, which reads the results.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from towerman.calls import Batch
from towerman.errors import InputError
from towerman.forms.document import BadText, Draft, Part, Tools, no_path, number

FORM: Final = "rewoo"

STEP: Final = re.compile(r"#E(\d{1,18})[ \t]*=[ \t]*", re.ASCII)
_TOOL: Final = re.compile(r"([A-Za-z_][\w.-]*)[ \t]*\[", re.ASCII)
_MARK: Final = re.compile(r"#([Ee])(\d{1,18})(?!\w)", re.ASCII)

_Step: TypeAlias = tuple[str, str, list[str], int]
"""A step that goes on: its number, its tool, the lines of its text, and the line in which it began."""


def read(text: str, tools: Tools) -> Batch:
    """Read a plan.

    Raises:
        InputError: a line is no step; it says which and the fix.
    """
    draft = Draft(FORM, tools, ordered=True, numbered=True)
    open_step: _Step | None = None
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
    _close(draft, open_step)
    if not draft.calls:
        raise InputError(f"no step of the form {FORM!r}: a line like #E1 = Tool[text] is wanted")
    return draft.finish()


def _close(draft: Draft, step: _Step | None) -> None:
    """The step that was open is complete."""
    if step is None:
        return
    own, tool, rows, line = step
    text = "\n".join(rows).rstrip()
    if not text.endswith("]"):
        raise InputError(f"line {line}: the text of this step does not end with ']'")
    draft.add(tool, f"E{own}", split, [text[:-1]] if text[:-1].strip() else [])


def split(text: str) -> list[Part]:
    """The parts of a text with references.

    Raises:
        BadText: one is malformed.
    """
    parts: list[Part] = []
    end = 0
    for match in _MARK.finditer(text):
        if match[1] == "e":
            raise BadText("'#e' with a number; write '#E' for a reference")
        parts += [text[end : match.start()], (f"E{number(match[2])}",)]
        end = match.end()
        no_path(text, end)
    parts.append(text[end:])
    return [part for part in parts if part]
