"""What a plan of any form is read into, and how it is refused.

Theory. A reader goes through all steps before it says no, so that a refusal names every call that could be seen. A call
whose arguments are at fault is kept without them; nothing of a refused plan runs, so that is never noticed.

House rules. A refusal names the step by its id and the place by the argument's name, if that is a plain word.

Not here: what a form looks like (a file for each).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from towerman.calls import Call, IfFailed
from towerman.errors import Code, InputError
from towerman.plan import PlanRefused, escape_text
from towerman.plan.following import copied
from towerman.plan.references import escape_key

_SHOWN: Final = 8  # faults in one message
_WORD: Final = 32  # characters of a name in a message


@dataclass(frozen=True, slots=True, repr=False)
class PlanDocument:
    """A plan as it was read: calls with references in native syntax, not linked yet.

    Args:
        form: the name of the form that it was written in.
        calls: in the order of the plan; ids as the form has them.
        ordered: the form forbids a step to use a later one.
        numbered: ids are numbers of the form, so that one which is not there is out of range.
        outputs: what the plan comes to, by name, in native syntax; None where the form does not say it.
        positional: for each call the arguments that have no name, in their order and in native syntax; empty where no
            call has any. `bind_positional` gives them names.
    """

    form: str
    calls: tuple[Call, ...]
    ordered: bool = False
    numbered: bool = False
    outputs: Mapping[str, object] | None = None
    positional: tuple[tuple[object, ...], ...] = ()

    @property
    def if_failed(self) -> tuple[IfFailed, ...]:
        """For each call what becomes of it where one that it needs came to nothing."""
        return tuple(call.if_failed for call in self.calls)

    def __repr__(self) -> str:
        return f"PlanDocument({self.form!r}, {len(self.calls)} calls)"


class RefusedPlan(PlanRefused):
    """A plan whose calls could be seen, and which is refused as a whole; nothing of it may run (G5).

    Args:
        code: `bad_reference`, `unknown_dependency` or `invalid_arguments`.
        members: indexes of the calls concerned.
        message: a sentence for the model.
        document: the plan as far as it could be read; the calls concerned may lack their arguments.
    """

    def __init__(self, code: Code, members: tuple[int, ...], message: str, document: PlanDocument) -> None:
        super().__init__(code, members, message)
        self.document = document

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.members, self.message, self.document)


class BadText(Exception):
    """A reference of a form that is malformed: what is wrong with it, and the fix."""


@dataclass(slots=True)
class Draft:
    """A plan while it is being read."""

    form: str
    ordered: bool = False
    numbered: bool = False
    calls: list[Call] = field(default_factory=list)
    positional: list[tuple[object, ...]] = field(default_factory=list)
    outputs: Mapping[str, object] | None = None
    faults: list[tuple[Code, int, str]] = field(default_factory=list)

    def add(self, call: Call, positional: tuple[object, ...] = ()) -> None:
        """The next step."""
        self.calls.append(call)
        self.positional.append(positional)

    def refuse(self, code: Code, told: str, index: int | None = None) -> None:
        """Note what is wrong with a step; None: with the next one."""
        self.faults.append((code, len(self.calls) if index is None else index, told))

    def finish(self) -> PlanDocument:
        """The document, or the refusal.

        Raises:
            RefusedPlan: something was wrong; the code is that of the first fault.
        """
        positional = tuple(self.positional) if any(self.positional) else ()
        document = PlanDocument(self.form, tuple(self.calls), self.ordered, self.numbered, self.outputs, positional)
        refuse_faults(document, self.faults)
        return document


def refuse_faults(document: PlanDocument, faults: Sequence[tuple[Code, int, str]]) -> None:
    """Raise the refusal of a plan that has faults.

    Raises:
        RefusedPlan: there are some.
    """
    if not faults:
        return
    code = faults[0][0]
    same = [(index, told) for each, index, told in faults if each == code]
    text = "; ".join(f"{_step(document, index)}: {told}" for index, told in same[:_SHOWN])
    if len(same) > _SHOWN:
        text += f"; and {len(same) - _SHOWN} more such places"
    members = tuple(dict.fromkeys(index for index, _ in same if index < len(document.calls)))
    raise RefusedPlan(code, members, text, document)


def _step(document: PlanDocument, index: int) -> str:
    if index >= len(document.calls):
        return "the end of the plan"
    own = document.calls[index].id
    return f"step {own[:64]!r}" if own else f"step {index + 1} of the plan"


def shown(name: object) -> str:
    """The name of an argument for a message: as it is when it is a plain word."""
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= _WORD else "<name>"


def native_text(text: str, split: Callable[[str], list[str | tuple[str]]]) -> str:
    """A text of a form in native syntax.

    Args:
        text: as the form has it.
        split: its parts: text that is meant as it is, and for each reference a tuple with what stands between `${`
            and `}`.

    Raises:
        BadText: a reference in it is malformed.
    """
    parts = split(text)
    if all(isinstance(part, str) for part in parts):
        return escape_text("".join([part for part in parts if isinstance(part, str)]))
    return "".join(
        escape_text(part, whole=False) if isinstance(part, str) else f"${{{part[0]}}}" for part in parts if part
    )


def native_value(value: object, split: Callable[[str], list[str | tuple[str]]]) -> object:
    """JSON data of a form in native syntax: its texts read, its keys escaped; a copy.

    Raises:
        BadText: a reference in it is malformed.
    """
    return copied(value, lambda text: native_text(text, split), escape_key, None)


def native_arguments(
    draft: Draft, given: Mapping[str, object], split: Callable[[str], list[str | tuple[str]]]
) -> dict[str, object]:
    """Named arguments of the next step in native syntax; what is wrong with one is noted."""
    found: dict[str, object] = {}
    for name, value in given.items():
        try:
            found[escape_key(name)] = native_value(value, split)
        except BadText as bad:
            draft.refuse("bad_reference", f"arguments.{shown(name)}: {bad}")
    return found


def native_items(
    draft: Draft, given: Sequence[object], split: Callable[[str], list[str | tuple[str]]]
) -> tuple[object, ...]:
    """Arguments without names of the next step in native syntax; what is wrong with one is noted."""
    found: list[object] = []
    for place, value in enumerate(given, 1):
        try:
            found.append(native_value(value, split))
        except BadText as bad:
            draft.refuse("bad_reference", f"argument {place}: {bad}")
    return tuple(found)


_NUMBERS: Final = re.compile(r"0*([0-9]{1,18})")


def number(digits: str) -> str:
    """A number of a form as an id: without zeros in front."""
    match = _NUMBERS.fullmatch(digits)
    return digits if match is None else match[1]


def bind_positional(document: PlanDocument, parameter_names: Callable[[str], Sequence[str] | None]) -> PlanDocument:
    """Give arguments without names the names of the tool's parameters, in their order.

    Args:
        document: a plan as `read_plan` returns it.
        parameter_names: the names of a tool's parameters in the order in which it declares them, or None where the tool
            is not known or takes any; then arguments are named "1", "2" and so on.

    Returns:
        The same plan; every argument has a name.

    Raises:
        RefusedPlan: `invalid_arguments`: more arguments than the tool has parameters, or one that was given by its name
            too.
    """
    if not document.positional:
        return document
    calls: list[Call] = []
    faults: list[tuple[Code, int, str]] = []
    known: dict[str, Sequence[str] | None] = {}
    for index, (call, given) in enumerate(zip(document.calls, document.positional, strict=True)):
        if not given:
            calls.append(call)
            continue
        if call.tool not in known:
            known[call.tool] = parameter_names(call.tool)
        names = known[call.tool]
        if names is None:
            names = [str(place) for place in range(1, len(given) + 1)]
        if isinstance(call.arguments, str):
            raise InputError(f"calls[{index}].arguments: an object is wanted where there are arguments without names")
        if len(given) > len(names):
            told = f"{len(given)} arguments without names, and the tool has {len(names)} parameters"
            faults.append(("invalid_arguments", index, told))
            calls.append(call)
            continue
        bound = {escape_key(name): value for name, value in zip(names, given, strict=False)}
        twice = [name for name in bound if name in call.arguments]
        if twice:
            told = f"the argument {shown(twice[0])!r} is given by its place and by its name too"
            faults.append(("invalid_arguments", index, told))
        calls.append(replace(call, arguments={**bound, **call.arguments}))
    bound_document = replace(document, calls=tuple(calls), positional=())
    refuse_faults(bound_document, faults)
    return bound_document
