"""An explanation as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from towerman.explain.parts import STANDS, DeferredCall, Edge, EdgeKind, Limit, PlannedCall, RateInForce, RefusedCall
from towerman.timeline import columns, fit, printable

INDEPENDENT: Final = "independent"
"""What is told of a call that touches nothing and takes no place of its own: nothing at all reads like a gap."""

AT_FAULT: Final[Mapping[str, str]] = {
    "dependency_cycle": "in the circle",
    "unknown_dependency": "needs a call that is not there",
    "duplicate_call_id": "shares its id",
}
"""Why a call is named where a plan is refused whole."""

MAX_TOLD: Final = 400
"""Most calls that the text lists, and most that it lists as refused."""

DEFERRED: Final = (
    "A call that is deferred runs later, in a worker, behind those of its batch that it comes behind. The queue does "
    "not keep its run's deps, deadline, allow, deny and own budget, and no order to calls of other batches."
)
"""What is told where calls may go into the durable queue: what does not go there with them."""

_NAMED: Final = 4  # calls that are listed one by one in a reason
_LEAST: Final = 24  # columns for the words behind a tool's name
_NOTE_WIDTH: Final = 84  # a sentence of two lines is none that one looks for
_ID: Final = 16  # columns of a step's id

# Signs, and what stands for them where only ASCII can be written.
_SIGNS: Final[dict[str, tuple[str, str]]] = {
    "first": ("┌", "+"),
    "next": ("├", "+"),
    "side": ("│", "|"),
    "last": ("╵", "'"),
    "path": ("●", "*"),
    "fault": ("×", "x"),  # noqa: RUF001 - it is a cross, and meant
    "needs": ("╰─", "`-"),
    "after": ("╰╌", "`="),
    "limit": ("╰┈", "`."),
}
DRAWN: Final = "".join(sign for sign, _ in _SIGNS.values()) + "…·"
"""Every character beyond ASCII of the text's own."""

_MEANS: Final[dict[str, str]] = {
    "path": "on the critical path",
    "fault": "what the plan is refused for",
    "needs": "needs the result",
    "after": "keeps the order",
    "limit": "waits for a limit",
}
_SIGN_OF: Final[dict[EdgeKind, str]] = {
    "needs": "needs",
    "resource": "after",
    "order": "after",
    "pool": "limit",
    "rate": "limit",
}
_NOTE: Final = (
    "A group is what runs at the same time if every call lasts equally long. Where they do not, calls that do not wait "
    "for each other overlap more. Nothing else is taken to be at work."
)


@dataclass(frozen=True, slots=True)
class Told:
    """What a text is made of: the fields of an explanation."""

    calls: Sequence[PlannedCall]
    groups: Sequence[Sequence[int]]
    edges: Sequence[Edge]
    links: Sequence[Edge]
    refused: Sequence[RefusedCall]
    limits: Sequence[Limit]
    rates: Sequence[RateInForce]
    rate_seconds: float
    spends: Mapping[str, float]
    chain: Sequence[int]
    seconds: float | None
    members: Sequence[int]
    complete: bool
    deferred: Sequence[DeferredCall] = ()


def tell(told: Told, width: int | None = 100, *, ascii_only: bool = False) -> str:
    """Groups with their calls, and under each call what it waits for; then what is refused, then the limits.

    Args:
        told: the explanation.
        width: columns; None: lines are as long as they are.
        ascii_only: use no character beyond ASCII.
    """
    if not (told.calls or told.refused or told.deferred):
        return "No calls: nothing would run."
    return _Text(told, width, ascii_only).done()


class _Text:
    def __init__(self, told: Told, width: int | None, ascii_only: bool) -> None:
        self.told = told
        self.width = width
        self.ascii_only = ascii_only
        self.used: set[str] = set()
        self.lines: list[str] = []
        everyone: list[PlannedCall | RefusedCall | DeferredCall] = [*told.calls, *told.refused, *told.deferred]
        self.number = len(str(max(one.index for one in everyone)))
        self.id = min(_ID, max(0 if isinstance(one, DeferredCall) else columns(self.safe(one.id)) for one in everyone))
        room = 28 if width is None else max(8, min(40, width // 3))
        tools = max(columns(self.safe(one.tool)) for one in everyone)
        self.tool = tools if width is None else min(tools, room)
        self.path = set(on_path(told.calls, told.chain, told.seconds))

    def safe(self, words: str) -> str:
        return printable(words, ascii_only=self.ascii_only)

    def sign(self, name: str) -> str:
        self.used.add(name)
        return _SIGNS[name][self.ascii_only]

    def add(self, start: str, words: str, hang: int | None = None) -> None:
        """A line, or as many as it takes; those after the first begin below the words."""
        if self.width is None:
            self.lines.append(f"{start}{words}".rstrip())
            return
        side = start[0] if start[:1] == _SIGNS["side"][self.ascii_only] else " "
        indent = columns(start) if hang is None else hang
        if self.width - indent < _LEAST:
            indent = min(indent, 8)
        following = (side + " " * (indent - 1)) if indent else ""
        line, empty = start, True
        for word in words.split(" "):
            if not empty and columns(line) + 1 + columns(word) > self.width:
                self.lines.append(self.cut(line))
                line, empty = following, True
            line += word if empty else f" {word}"
            empty = False
        self.lines.append(self.cut(line))

    def cut(self, line: str) -> str:
        """The line without blanks at its end; a word that is longer than a line is cut."""
        return line.rstrip() if self.width is None else fit(line, self.width, ascii_only=self.ascii_only).rstrip()

    def done(self) -> str:
        told = self.told
        heads = len(told.groups), len(told.refused), told.chain, told.seconds, len(told.deferred)
        self.add("", headline(told.calls, *heads))
        stands = standing(told.calls)
        if stands:
            self.add("", stands)
        self.groups()
        self.refusals()
        self.deferrals()
        self.lasting()
        legend = [f"{_SIGNS[name][self.ascii_only]} {words}" for name, words in _MEANS.items() if name in self.used]
        if legend:
            self.lines.append("")
            self.add("", "   ".join(part.replace(" ", "\0") for part in legend))
            self.lines[-1] = self.lines[-1].replace("\0", " ")
        if not told.complete:
            self.lines.append("")
            self.add(
                "", "There are more reasons to wait than are listed here; the groups take all of them into account."
            )
        if told.deferred or any(call.defers for call in told.calls):
            self.lines.append("")
            self.add("", DEFERRED)
        if len(told.groups) > 1:
            self.lines.append("")
            self.width = min(self.width or _NOTE_WIDTH, _NOTE_WIDTH)
            self.add("", _NOTE)
        return "\n".join(line.replace("\0", " ") for line in self.lines)

    def row(self, mark: str, side: str, index: int, id: str, tool: str, words: str) -> None:
        blanks = "  "
        start = f"{side}{mark} {index:>{self.number}}{blanks}"
        if self.id:
            start += fit(self.safe(id), self.id, ascii_only=self.ascii_only) + blanks
        start += fit(self.safe(tool), self.tool, ascii_only=self.ascii_only) + blanks
        self.add(start, self.safe(words))

    def reason(self, side: str, kind: EdgeKind, words: str) -> None:
        self.add(f"{side}  {'':{self.number}}  {self.sign(_SIGN_OF[kind])} ", self.safe(words))

    def groups(self) -> None:
        told = self.told
        by_index = {call.index: call for call in told.calls}
        reasons = waits(told.edges)
        side = f"{_SIGNS['side'][self.ascii_only]} "
        room = MAX_TOLD
        for number, group in enumerate(told.groups, 1):
            runs = sum(by_index[index].shared_with is None for index in group)
            corner = _SIGNS["first" if number == 1 else "next"][self.ascii_only]
            self.lines.append("" if number == 1 else side.rstrip())
            if room <= 0:
                rest = sum(map(len, told.groups[number - 1 :]))
                self.add(f"{corner} ", f"and {len(told.groups) - number + 1} more groups with {counted(rest)}")
                break
            self.add(f"{corner} ", f"group {number}: {counted(len(group))}{' at once' if runs > 1 else ''}")
            for index in group[:room]:
                call = by_index[index]
                asks = (*["needs approval"] * call.approval, *["deferred when busy"] * call.defers)
                lasts = () if call.estimate is None else (about(call.estimate),)
                words = ", ".join((*call.touches, *pools(call), *asks, *lasts))
                if not (call.touches or pools(call)):
                    words = ", ".join((INDEPENDENT, *asks, *lasts))
                if call.state:
                    words = f"{call.state}; {words}"
                mark = self.sign("path") if index in self.path else " "
                self.row(mark, side, index, call.id, call.tool, words)
                if call.behind:
                    which = (
                        f"call {listed(call.behind)} is"
                        if len(call.behind) == 1
                        else f"calls {listed(call.behind)} are"
                    )
                    self.add(f"{side}  {'':{self.number}}  ", f"deferred too if {which}")
                if call.told:
                    self.add(f"{side}  {'':{self.number}}  ", call.told)
                for kind, reason in reasons.get(index, ()):
                    self.reason(side, kind, f"waits for {reason}")
            if len(group) > room:
                self.add(side, f"  and {counted(len(group) - room)} more")
            room -= len(group)
        if told.groups:
            self.lines.append(_SIGNS["last"][self.ascii_only])

    def refusals(self) -> None:
        told = self.told
        if not told.refused:
            return
        self.lines.append("")
        if told.members:  # one message for all
            first = told.refused[0]
            self.add("refused: ", f"the whole plan, {first.code}: {self.safe(' '.join(first.message.split()))}", 2)
        else:
            self.lines.append(f"refused: {counted(len(told.refused))}")
        needs: dict[int, list[int]] = {}
        known = {one.index for one in told.refused}
        for link in told.links:
            if link.after in known:
                needs.setdefault(link.after, []).append(link.before)
        for one in told.refused[:MAX_TOLD]:
            words = f"{one.code}: {' '.join(one.message.split())}"
            if told.members:
                words = AT_FAULT.get(one.code, "at fault") if one.index in told.members else ""
            self.row(self.sign("fault") if one.index in told.members else " ", "", one.index, one.id, one.tool, words)
            if one.index in needs:
                self.reason("", "needs", f"needs {listed(needs[one.index])}")
        if len(told.refused) > MAX_TOLD:
            self.lines.append(f"  and {counted(len(told.refused) - MAX_TOLD)} more")

    def deferrals(self) -> None:
        told = self.told
        if not told.deferred:
            return
        self.lines += ["", f"deferred: {counted(len(told.deferred))}"]
        for one in told.deferred[:MAX_TOLD]:
            self.row(" ", "", one.index, "", one.tool, f"{one.code}: {' '.join(one.message.split())}")
        if len(told.deferred) > MAX_TOLD:
            self.lines.append(f"  and {counted(len(told.deferred) - MAX_TOLD)} more")

    def lasting(self) -> None:
        told = self.told
        lines = [*limits_told(told.limits), *rates_told(told.rates)]
        if told.rate_seconds:
            lines.append(f"the rates alone keep the last call waiting for {told.rate_seconds:g} s")
        if told.spends:
            lines.append(f"would spend: {', '.join(f'{amount:,g} {unit}' for unit, amount in told.spends.items())}")
        if lines:
            self.lines.append("")
        for line in lines:
            self.add("", self.safe(line), 2)


def headline(
    calls: Sequence[PlannedCall],
    groups: int,
    refused: int,
    chain: Sequence[int],
    seconds: float | None = None,
    deferred: int = 0,
) -> str:
    """The whole in one line."""
    parts = []
    running = sum(call.shared_with is None for call in calls)
    if running:
        told = f"{counted(running)} would run in {groups:,} group{'' if groups == 1 else 's'}"
        if on_path(calls, chain, seconds):
            lasts = "" if seconds is None else f", {about(seconds)}"
            told += f" (critical path: {', '.join(map(str, chain)) if len(chain) <= 8 else counted(len(chain))}{lasts})"
        parts.append(told)
    if running < len(calls):
        parts.append(f"{counted(len(calls) - running)} would be answered by the run of another")
    if refused:
        parts.append(f"{counted(refused)} would be refused")
    if deferred:
        parts.append(f"{counted(deferred)} would be deferred")
    return ", ".join(parts) + "."


def standing(calls: Sequence[PlannedCall]) -> str:
    """How many calls of a batch that was begun before stand how; empty for one that was not."""
    counts = dict.fromkeys(STANDS, 0)
    for call in calls:
        if call.state:
            counts[stand_of(call.state)] += 1
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def stand_of(state: str) -> str:
    """The word of a state, without the reason."""
    return state.partition(":")[0]


def on_path(calls: Sequence[PlannedCall], chain: Sequence[int], seconds: float | None) -> Sequence[int]:
    """The calls that are marked as the critical path: one alone says something only where times are known."""
    return chain if len(chain) > 1 or (seconds is not None and len(calls) > 1) else ()


def counted(number: int) -> str:
    """`1 call`, `2 calls`."""
    return f"{number:,} call{'' if number == 1 else 's'}"


def about(seconds: float) -> str:
    """A length of time that is only known from others: `about 0.3 s`."""
    return (
        f"about {seconds * 1000:.2g} ms"
        if seconds < 0.0995
        else f"about {seconds:,.2g} s"
        if seconds < 99
        else (f"about {seconds:,.0f} s")
    )


def limits_told(limits: Sequence[Limit]) -> list[str]:
    """A line with the limits that calls take permits of; none where there are none."""
    return [f"limits: {', '.join(f'{one.name} {one.permits}{_observed(one)}' for one in limits)}"] if limits else []


def rates_told(rates: Sequence[RateInForce]) -> list[str]:
    """A line with the rates in which calls count; none where there are none."""
    return [f"rates: {', '.join(f'{one.name} {one.rate}{_observed(one)}' for one in rates)}"] if rates else []


def _observed(one: Limit | RateInForce) -> str:
    return "" if one.enforced else " (observed only)"


def pools(call: PlannedCall) -> list[str]:
    """What a call takes of limits other than those that every call has."""
    told = []
    for name, units in call.permits.items():
        if name == "run" or (name == "process" and units == 1):
            continue
        head, colon, _ = name.partition(":")
        what = "own limit" if colon and head == "tool" else f"pool {name}"
        told.append(what if units == 1 else f"{what} x{units}")
    return told


def waits(edges: Iterable[Edge], *, details: bool = True) -> dict[int, list[tuple[EdgeKind, str]]]:
    """What each call waits for: `5: resource ticket:{ticket_id} (write, then read)`, calls of one reason together."""
    gathered: dict[int, dict[tuple[EdgeKind, str], list[int]]] = {}
    for edge in edges:
        gathered.setdefault(edge.after, {}).setdefault((edge.kind, str(edge) if details else edge.why), []).append(
            edge.before
        )
    return {
        after: [(kind, f"{listed(before)}: {reason}") for (kind, reason), before in reasons.items()]
        for after, reasons in gathered.items()
    }


def listed(numbers: Sequence[int]) -> str:
    """`1, 2`, or the first of them and how many more there are."""
    if len(numbers) <= _NAMED:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: _NAMED - 1]))} and {len(numbers) - _NAMED + 1} more"
