"""What a plan of any form is read into, and how it is refused.

Theory. A reader hands its steps to a draft, one after another, as the form has them. The draft writes their texts in
native syntax, gives arguments without names the names of the tool's parameters, and notes what is wrong. It goes on
after a fault, so that a refusal knows every call that could be seen, and each of them is answered. A call whose
arguments are at fault is kept without them; nothing of a refused plan runs, so that is never noticed.

House rules. Planners call tools by names that no tool can have here, such as `Image Editing`; each sign that a tool's
name cannot hold is read as `_`, so that the tool is `Image_Editing`. A refusal names the step by its id and the place
by the argument's name, if that is a plain word.

Not here: what a form looks like (a file for each), linking the steps (plan).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from towerman.adapters.reading import RepeatedKeys, described, fields_of, items_of, plain_text
from towerman.calls import Batch, Call
from towerman.errors import Code, InputError
from towerman.plan import copied, escape_key, escape_text

Tools: TypeAlias = Callable[[str], Mapping[str, bool] | None]
"""The names of a tool's parameters, in the order in which it declares them, and whether each takes a list; no names
for a tool that takes any, None where there is no such tool."""

Part: TypeAlias = str | tuple[str]
"""Text that is meant as it is; or, in a tuple, what stands between `${` and `}` for a reference."""

Split: TypeAlias = Callable[[str], list[Part]]
"""Takes the parts of a form's text apart; raises `BadText`."""

_PATH: Final = re.compile(r"\.\w|\[\s*[\w\"'*=-]")
_SHOWN: Final = 8  # faults in one message
_WORD: Final = 32  # characters of a name in a message
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_.-]")
_NO_NAMES: Final[Mapping[str, object]] = {}


class BadText(Exception):
    """What stands in an argument cannot be read.

    Args:
        told: what is wrong with it, and the fix.
        code: `bad_reference` for a malformed reference, `invalid_arguments` for what is no JSON data.
    """

    def __init__(self, told: str, code: Code = "bad_reference") -> None:
        super().__init__(told)
        self.told = told
        self.code: Code = code


def no_path(text: str, end: int) -> None:
    """Nothing that looks like a path stands right behind a reference; a `.` that ends a sentence does not.

    Args:
        text: of a form in which a reference means the whole result.
        end: the place behind the reference.

    Raises:
        BadText: the text goes on with `.name` or `[0]`, which nobody could tell from a part of the result.
    """
    if _PATH.match(text, end):
        raise BadText(
            "right behind a reference '.name' or '[0]', which could be text or a part of the result; in this form a "
            "reference is the whole result: take it alone, or put a blank behind it"
        )


def nothing_known(tool: str) -> Mapping[str, bool] | None:
    """No tool is known."""
    return None


@dataclass(slots=True)
class Draft:
    """A plan while it is being read.

    Args:
        form: the name of the form that it is written in.
        tools: the parameters of tools.
        ordered: the form forbids a step to use a later one.
        numbered: ids are numbers of the form, so that one which is not there is out of range.
        calls: in the order of the plan; ids as the form has them.
        outputs: what the plan comes to, by name, in native syntax; None where it does not say that.
    """

    form: str
    tools: Tools
    ordered: bool = False
    numbered: bool = False
    calls: list[Call] = field(default_factory=list)
    outputs: Mapping[str, object] | None = None
    faults: list[tuple[Code, int | None, str]] = field(default_factory=list)
    _parameters: dict[str, Mapping[str, bool] | None] = field(default_factory=dict)

    def add(
        self,
        tool: str,
        own: str,
        split: Split,
        given: Sequence[object] = (),
        named: Mapping[str, object] = _NO_NAMES,
        needs: tuple[str, ...] = (),
        lists: Split | None = None,
    ) -> None:
        """The next step.

        Args:
            tool: its tool, as the form calls it.
            own: its id.
            split: takes its texts apart.
            given: arguments without names, as the form has them.
            named: arguments with names.
            needs: ids of the steps that it names as needed.
            lists: takes the texts of arguments apart that take a list; None: like all others.
        """
        tool = _NOT_IN_A_NAME.sub("_", tool)
        parameters = self._of(tool) if given or lists is not None else None
        arguments: dict[str, object] = {}
        if given:
            names = list(parameters or ()) or [str(place) for place in range(1, len(given) + 1)]
            if len(given) > len(names):
                told = f"{len(given)} arguments without names, and the tool has {len(names)} parameters"
                self.refuse("invalid_arguments", told)
            for place, (name, value) in enumerate(zip(names, given, strict=False), 1):
                self._put(arguments, name, value, split, f"argument {place}")
        for name, value in named.items():
            if escape_key(name) in arguments:
                told = f"the argument {shown(name)} is given by its place and by its name too"
                self.refuse("invalid_arguments", told)
            takes_list = lists is not None and parameters is not None and parameters.get(name, False)
            self._put(arguments, name, value, lists if lists is not None and takes_list else split)
        self.calls.append(Call(tool, arguments, own, needs))

    def named(self, value: object, place: str) -> dict[str, object]:
        """The arguments of the next step where they are an object, or None; what is wrong with it is noted.

        Args:
            value: as the form has it.
            place: how the form calls it.
        """
        fields = fields_of({} if value is None else value)
        if fields is None:
            self.refuse("invalid_arguments", f"{place}: an object is wanted, got {described(value)}")
            return {}
        if not all(isinstance(name, str) for name in fields):
            self.refuse("invalid_arguments", f"{place}: a name that is no text")
            return {}
        return {plain_text(name): inner for name, inner in fields.items()}

    def end(self, outputs: Mapping[str, object], split: Split) -> None:
        """What the plan comes to, by name."""
        found: dict[str, object] = {}
        for name, value in outputs.items():
            self._put(found, name, value, split, f"outputs.{shown(name)}", whole=True)
        self.outputs = found

    def refuse(self, code: Code, told: str, index: int | None = -1) -> None:
        """Note what is wrong with a step.

        Args:
            code: of the refusal.
            told: what is wrong, and the fix.
            index: of the step; -1 for the next one, None for the plan as a whole.
        """
        self.faults.append((code, len(self.calls) if index == -1 else index, told))

    def finish(self) -> Batch:
        """The plan as a batch, which says so where it is refused.

        Raises:
            InputError: it is refused and has no call that could be answered.
        """
        refused = self._refusal() if self.faults else None
        if refused is not None and not self.calls:
            raise InputError(f"plan in the form {self.form!r}: {refused[2]}")
        return Batch(
            tuple(self.calls),
            plan=True,
            ordered=self.ordered,
            numbered=self.numbered,
            outputs=self.outputs,
            refused=refused,
        )

    def _refusal(self) -> tuple[Code, tuple[int, ...], str]:
        """The refusal of a plan that has faults: the first one's code, and all faults of that code."""
        code = self.faults[0][0]
        same = [(index, told) for each, index, told in self.faults if each == code]
        text = "; ".join(f"{self._step(index)}{told}" for index, told in same[:_SHOWN])
        if len(same) > _SHOWN:
            text += f"; and {len(same) - _SHOWN} more such places"
        size = len(self.calls)
        members = dict.fromkeys(index for index, _ in same if index is not None and index < size)
        return code, tuple(members or range(size)), text

    def _step(self, index: int | None) -> str:
        if index is None or index >= len(self.calls):
            return ""
        own = self.calls[index].id
        return f"step {own[:64]!r}: " if own else f"step {index + 1} of the plan: "

    def _of(self, tool: str) -> Mapping[str, bool] | None:
        if tool not in self._parameters:
            self._parameters[tool] = self.tools(tool)
        return self._parameters[tool]

    def _put(
        self,
        into: dict[str, object],
        name: str,
        value: object,
        split: Split,
        place: str = "",
        *,
        whole: bool = False,
    ) -> None:
        """One argument in native syntax; what is wrong with it is noted, for the plan as a `whole` or the next step."""
        try:
            into[native_key(name, split)] = native_value(value, split)
        except BadText as bad:
            self.refuse(bad.code, f"{place or f'arguments.{shown(name)}'}: {bad.told}", None if whole else -1)


def shown(name: str) -> str:
    """The name of an argument for a message: as it is when it is a plain word."""
    return name if name.isidentifier() and len(name) <= _WORD else "<name>"


def native_text(text: str, split: Split) -> str:
    """A text of a form in native syntax.

    Args:
        text: as the form has it.
        split: takes its parts apart.

    Raises:
        BadText: a reference in it is malformed.
    """
    parts = split(text)
    plain = [part for part in parts if isinstance(part, str)]
    if len(plain) == len(parts):
        return escape_text("".join(plain))
    return "".join(escape_text(part, whole=False) if isinstance(part, str) else f"${{{part[0]}}}" for part in parts)


def native_value(value: object, split: Split) -> object:
    """JSON data of a form in native syntax: its texts read, its keys escaped; a copy.

    Raises:
        BadText: a reference in it is malformed or stands as a key, or a part of it is no JSON data.
    """
    if type(value) is str:
        return native_text(value, split)
    return copied(value, lambda text: native_text(text, split), lambda key: native_key(key, split), _plain)


def native_key(key: str, split: Split) -> str:
    """A key, or the name of an argument, in native syntax.

    Raises:
        BadText: it is a reference, which can stand for a value only.
    """
    if key.isidentifier():  # no form has a reference without another sign
        return key
    if all(isinstance(part, str) for part in split(key)):
        return escape_key(key)
    raise BadText("a reference in the place of a name; it can stand for a value only")


def _plain(value: object) -> object:
    """A part of an argument that is no plain data, as plain data: one level of it.

    Raises:
        BadText: it is none.
    """
    if isinstance(value, RepeatedKeys):
        raise BadText("a key stands twice in an object; keep one", "invalid_arguments")
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {plain_text(key): inner for key, inner in value.items()}
    items = None if isinstance(value, list | tuple) else items_of(value)
    if items is not None:
        return list(items)
    if isinstance(value, list):
        return list(value)
    raise BadText(f"JSON data is wanted, got {described(value)}", "invalid_arguments")


def number(digits: str) -> str:
    """A number of a form as an id: without zeros in front."""
    return digits.lstrip("0") or "0"
