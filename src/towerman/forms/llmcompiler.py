"""LLMCompiler's plans: `1. search("Oslo")`, `2. math("twice $1")`, `3. join()`.

Theory. Each step is a numbered line with a call; its arguments stand in brackets, mostly without names, and `$1` or
`${1}` is the result of step 1. Lines that begin with `Thought:` are the planner's own, as is all that stands before the
first step and behind `<END_OF_PLAN>`. `join()` says that the plan is complete and that its results are to be looked at
together. It is no tool and no step here (its results come together anyway), unless a tool of this name is asked for:
then it is called when all steps before it have ended.

House rules. Numbers are ids, compared as numbers: `$1` is not `$10`. A `$` with a number is a reference, always: what
could be a price is refused where it could be both (`$3.50`), and so is what could be a path (`$1.items[0]`); in
`${1}.txt` the braces say where the reference ends; `$$` is a `$`. An argument without quotes is one text,
if it has no sign that could divide it.

Not here: replanning.
"""

from __future__ import annotations

import re
from typing import Final

from towerman.calls import Batch
from towerman.errors import InputError
from towerman.forms.document import BadText, Draft, Part, Tools, no_path, number
from towerman.forms.literals import Malformed, Reader

FORM: Final = "llmcompiler"

STEP: Final = re.compile(r"^[ \t]*(\d{1,18})[ \t]*[.)][ \t]*([A-Za-z_][\w.-]*)\(", re.ASCII | re.MULTILINE)
_NUMBERED: Final = re.compile(r"[ \t]*\d{1,18}[ \t]*[.)]", re.ASCII)
_END: Final = "<END_OF_PLAN>"
_REST: Final = re.compile(rf"[ \t]*(?:{_END}[ \t]*)?(?:#.*)?")
_BARE: Final = re.compile(r"[^,()\[\]{}\"=\n]+")
_MARK: Final = re.compile(r"\$\$|\$(\d+)|\$\{(\d+)\}|\$\{(?=\d)", re.ASCII)
_UNCLEAR: Final = re.compile(r"\w|[.,]\d|%")
_INDEXED: Final = re.compile(r"(?:\.\w+)*\[")
_ALLOWED: Final = ("thought:", "```")


def read(text: str, tools: Tools) -> Batch:
    """Read a plan.

    Args:
        text: as the planner wrote it.
        tools: the parameters of tools; `join` is a step only where there is a tool of this name.

    Raises:
        InputError: a line is no step; it says which and the fix.
    """
    draft = Draft(FORM, tools, ordered=True, numbered=True)
    place, line, joined = 0, 0, False
    since = 0  # the last join, which waits for all before it
    while place < len(text):
        end = text.find("\n", place)
        end = len(text) if end < 0 else end
        row = text[place:end]
        line += 1
        match = STEP.match(text, place, end)
        if match is None:
            _pass_over(row, line, begun=bool(draft.calls) or joined)
            place = end + 1
            if _END in row:
                place, line = _behind_the_end(text, place, line)
            continue
        if joined:
            raise InputError(f"line {line}: a step behind join(); join ends the plan, put it last")
        given, named, after = _arguments(text, match.end(), end, line)
        own, tool = number(match[1]), match[2]
        if tool == "join" and tools(tool) is None:
            joined = True
            values = {str(index): value for index, value in enumerate(given, 1)} | named
            if values:
                draft.end(values, split)
        else:
            needs: tuple[str, ...] = ()
            if tool == "join":
                needs = tuple(dict.fromkeys(call.id for call in draft.calls[since:]))
                since = len(draft.calls)
            draft.add(tool, own, split, given, named, needs)
        line += text.count("\n", place, after)
        end = text.find("\n", after)
        end = len(text) if end < 0 else end
        if _REST.fullmatch(text, after, end) is None:
            raise InputError(f"line {line}: something stands behind the call; one call a line")
        place = end + 1
        if _END in text[after:end]:
            place, line = _behind_the_end(text, place, line)
    if not draft.calls and not joined:
        raise InputError(f'no step of the form {FORM!r}: a line like 1. tool("text") is wanted')
    return draft.finish()


def _pass_over(row: str, line: int, *, begun: bool) -> None:
    """A line that is no step: may it stand there?"""
    stripped = row.strip()
    if _NUMBERED.match(row):
        raise InputError(f"line {line}: a numbered line that is no call; write it as 1. tool(arguments)")
    if begun and stripped.removesuffix(_END).strip() and not stripped.lower().startswith(_ALLOWED):
        raise InputError(f"line {line}: neither a step, nor 'Thought:', nor {_END}; number every step")


def _behind_the_end(text: str, place: int, line: int) -> tuple[int, int]:
    """What stands behind the end is not read, if no step is there."""
    match = STEP.search(text, place)
    if match is not None:
        raise InputError(f"line {line + 1 + text.count(chr(10), place, match.start())}: a step behind {_END}")
    return len(text), line


def _arguments(text: str, start: int, end: int, line: int) -> tuple[list[object], dict[str, object], int]:
    """What stands in the brackets that are open, and the place behind them; `end` is the end of the line."""
    reader = Reader(text, start)
    try:
        given, named = reader.arguments()
        return given, named, _stop(text, reader.place)
    except Malformed as malformed:
        row = text[start:end].rstrip().removesuffix(_END).rstrip()
        bare = row[:-1].strip()
        if row[-1:] == ")" and _BARE.fullmatch(bare) and bare[0] != "'":
            return [bare], {}, start + text[start:end].rindex(")") + 1
        there = line + text.count("\n", start, malformed.place)
        where = f"line {line}" if there == line else f"line {there}, in the step that begins in line {line}"
        raise InputError(
            f'{where}: {malformed.told}; write text in quotes and close what was opened: tool("text", 3, [$1])'
        ) from None


def _stop(text: str, place: int) -> int:
    """Right behind the closing bracket, of which the blanks behind were read too."""
    return text.rindex(")", 0, place) + 1


def split(text: str) -> list[Part]:
    """The parts of a text with references.

    Raises:
        BadText: one is malformed, or could be something else.
    """
    if "$" not in text:
        return [text]
    parts: list[Part] = []
    end = 0
    for match in _MARK.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end()
        digits = match[1] or match[2]
        if match[0] == "$$":
            parts.append("$")
        elif digits is None:
            raise BadText("a '${' with a number and without '}'")
        elif match[1] and _UNCLEAR.match(text, end):
            raise BadText(
                "a '$' with a number that could be a step or a price; write '${1}' for step 1, or '$$' for a '$'"
            )
        else:
            if match[1] or _INDEXED.match(text, end):
                no_path(text, end)
            parts.append((number(digits),))
    parts.append(text[end:])
    return [part for part in parts if part]
