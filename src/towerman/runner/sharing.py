"""One run that answers several calls: identical ones share it, neighbouring ones are merged into it.

Theory. The plan finds groups of calls that one run may answer (plan, rule S11); the members of a group become ready
one after another. Identical calls: when a member has answered, each of the others gets a copy of that as soon as it
is ready, and is never offered to the gate. While none has, the next one runs itself, so that a failure or a cancel is
not handed on. Merged calls: when a member is about to start, the tool's function makes one set of arguments of those
of all members that are still open. What the run comes to holds for all of them, since their arguments were in it, but
for a run that had no effect: then the others try again without the one that failed.

House rules. A merge function that fails, or whose arguments are refused or touch something else, costs nothing: the
calls run one by one, and it is told once. Where a run answers thousands, the loop gets its turns.

Not here: which calls make a group (plan), what makes two calls alike (tools, arguments), the words (sealing).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Final

from towerman import sealing
from towerman.access import AccessRefused
from towerman.arguments import ArgumentsRefused
from towerman.calls import Result
from towerman.plan import Group
from towerman.runner import intake
from towerman.runner.binding import Binding
from towerman.runner.sealer import exit_in
from towerman.tools import Tool, touched
from towerman.work import Want, Work

MOST_MERGED: Final = 1_000
"""Most calls that go into one run: their arguments are copied, and merged, in one turn of the loop."""

_FROZEN: Final = frozenset({str, int, float, bool, type(None)})

_log: Final = logging.getLogger("towerman")


class Sharing(Binding):
    """What concerns groups of calls; the runner goes on from here."""

    def _tell_plan(self, work: Work, index: int, ok: bool) -> list[int]:
        """Tell the plan that a call is sealed and ended; returns what is ready now."""
        raise NotImplementedError  # pragma: no cover - the runner's

    def _held(self, work: Work, index: int) -> bool:
        """Does an open call come behind one in the durable queue?"""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    def _seal_rest(self, work: Work, start: int) -> None:
        """Seal what never started of a batch that is being ended."""
        raise NotImplementedError  # pragma: no cover - the runner's

    def _soon(self, work: Work, ready: Iterable[int]) -> None:
        """Go on with `_go_on` when the loop has had its turn."""
        raise NotImplementedError  # pragma: no cover - the runner's

    # ================================================================ before the start

    async def _alike(self, work: Work) -> list[Hashable | None] | None:
        """For each call what is equal for calls that one run could answer; None where no two are alike."""
        core = self.core
        alike: list[Hashable | None] = [None] * len(work.calls)
        turn = core.now() + intake.SLICE
        for index, call in enumerate(work.calls):
            want, keywords = work.wants[index], work.keywords[index]
            if want is not None and keywords is not None and not _alone(work, index, want):
                alike[index] = want.likeness(call, keywords)
            if core.now() > turn:
                await asyncio.sleep(0)
                turn = core.now() + intake.SLICE
                if work.closing is not None:
                    return None
        # Some may have been cancelled meanwhile: they want nothing any more.
        known = [one if work.wants[index] is not None else None for index, one in enumerate(alike)]
        found = [one for one in known if one is not None]
        return known if len(set(found)) < len(found) else None

    def _gather_groups(self, work: Work) -> None:
        """Remember the groups that the plan has found."""
        groups: dict[int, Group] = {}
        for members in work.plan.groups:
            tool = work.tools[members[0]]
            group = Group(members, tool is not None and tool.policy.merge is not None)
            groups.update(dict.fromkeys(members, group))
        work.groups = groups or None

    # ================================================================ merging

    def _joined(self, work: Work, index: int, keywords: dict[str, object]) -> dict[str, object]:
        """What a call is run with that is about to start: its own arguments, or those of its group in one."""
        assert work.groups is not None
        group, want = work.groups.get(index), work.wants[index]
        if group is None or not group.merged or want is None:
            return keywords
        if work.again is not None and index in work.again:  # it was joined for its first attempt
            return keywords
        tool = want.of
        group.source, group.inside, group.note = -1, frozenset(), ""
        others = [one for one in _open(work, group) if one != index]
        if work.deferral is not None:
            others = [one for one in others if not self._held(work, one)]
        if not others:
            return keywords
        try:
            merged = self._merge(work, tool, want, [index, *others])
        except _Unmerged as problem:
            told = str(problem)
        except BaseException as error:
            told = f"it failed with {type(error).__name__[:100]}"
            leaving = exit_in(error)
            if leaving is not None:
                self._interrupt(work, leaving)
        else:
            if work.closing is not None:
                return keywords
            if not any(work.results[one] is not None for one in (index, *others)):
                group.source, group.inside, group.note = index, frozenset(others), sealing.merged(others)
                return merged
            told = "it ended calls that it was to merge"
        for one in group.members:
            work.groups.pop(one, None)
        if tool.name not in self.core.unmerged:
            self.core.unmerged.add(tool.name)
            _log.warning("tool %r: its merge function is not used, its calls run one by one: %s", tool.name, told)
        return keywords

    @staticmethod
    def _merge(work: Work, tool: Tool, want: Want, indexes: list[int]) -> dict[str, object]:
        """One set of arguments, checked, of those of several calls.

        Raises:
            _Unmerged: there is none that could be used.
        """
        merge = tool.policy.merge
        assert merge is not None, "a group of calls that are merged"
        try:
            given = [copy_of(work.keywords[index] or {}) for index in indexes]
        except Exception:
            raise _Unmerged("the arguments of its calls cannot be copied") from None
        made: object = merge(given)
        if inspect.iscoroutine(made):
            made.close()
        if not isinstance(made, Mapping):
            raise _Unmerged(f"it gave no mapping of arguments, but {type(made).__name__[:100]}")
        try:
            keywords = tool.checker.check(made)
            assert tool.rule is not None, "a tool that merges declares resources"
            accesses = tool.fixed if tool.fixed is not None else tool.rule.accesses(keywords)
        except (ArgumentsRefused, AccessRefused):
            raise _Unmerged("the arguments that it gave are refused") from None
        if touched(accesses) != touched(want.accesses):
            raise _Unmerged("the arguments that it gave touch something else")
        return keywords

    # ================================================================ answering

    def _source(self, work: Work, index: int) -> int | None:
        """The call whose run has answered an open one, or None."""
        assert work.groups is not None
        group = work.groups.get(index)
        if group is None or group.source < 0 or work.results[index] is not None:
            return None
        if work.deferral is not None and self._held(work, index):
            return None
        if group.merged:
            if index not in group.inside:
                return None
            result = work.results[group.source]
            return group.source if result is not None and (result.ok or result.applied != "no") else None
        return group.source

    def _answered(self, work: Work, index: int, ready: list[int]) -> list[int]:
        """A call is sealed: answer those that are ready by then and need no run of their own; the others are left."""
        assert work.groups is not None
        group, result = work.groups.get(index), work.results[index]
        if group is not None and not group.merged and result is not None and result.ok and result.shared_with is None:
            group.source = index
        if work.closing is not None:
            if group is not None and group.source == index and group.inside:
                self._seal_rest(work, 0)
            return []
        return self._answer(work, ready)

    def _answer(self, work: Work, ready: Iterable[int]) -> list[int]:
        """Answer what needs no run of its own, and what becomes ready by that; returns the rest."""
        core = self.core
        rest: list[int] = []
        todo = deque(ready)
        turn, count = core.now() + intake.SLICE, 0
        while todo:
            index = todo.popleft()
            source = self._source(work, index)
            if source is None:
                rest.append(index)
                continue
            self._share(work, index, source)
            result = work.results[index]
            todo.extend(self._tell_plan(work, index, result is not None and result.ok))
            count += 1
            if not count & 7 and todo and core.now() > turn:
                self._soon(work, todo)
                break
        if count:
            rest.sort(key=work.plan.key)
        return rest

    def _go_on(self, work: Work, ready: Iterable[int]) -> None:
        """The loop has had its turn: answer more."""
        try:
            if work.closing is None:
                rest = self._answer(work, ready)
                if work.closing is None:
                    self._offer_ready(work, rest)
        except Exception as fault:  # every call gets its result before it is told
            work.error = work.error or fault
            self._close(work, "cancelled", "cancelled", f"Towerman failed ({type(fault).__name__})")
        self._hand_on(work)

    def _share(self, work: Work, index: int, source: int) -> None:
        """Seal a call with what the run of another one came to."""
        core, result = self.core, work.results[source]
        assert result is not None
        work.keywords[index] = None
        work.wants[index] = None
        value = None
        try:
            value = deepcopy(result.value)
        except BaseException as error:  # of the value's own: it does not let itself be copied
            leaving = exit_in(error)
            if leaving is not None:
                self._interrupt(work, leaving)
        if work.results[index] is not None:  # what copies itself may do anything, also end the batch
            return
        try:
            shared = self._copied(work, index, source, result, value)
        except Exception as fault:
            work.error = work.error or fault
            shared = sealing.faulty(index, work.calls[index], True, result.applied)
        with core.lock:  # several loops count
            core.shared += 1
        if core.emit is not None:
            self._tell(work, index, "shared", shared_with=source)
        self._seal(work, index, shared, core.now())

    def _copied(self, work: Work, index: int, source: int, result: Result, value: object) -> Result:
        """The result of another call as this one's."""
        assert work.groups is not None
        group = work.groups[index]
        waited_for = work.waited_for.get(index, ())
        if source != group.members[0]:
            first = f"call {group.members[0]}"
            waited_for = tuple(label for label in waited_for if label != first)
        waited_for = tuple(dict.fromkeys((*waited_for, f"call {source}")))
        others = len(group.inside) if group.merged else 0
        message = result.message.removesuffix(self._joint(work, source))
        return sealing.shared(index, work.calls[index], result, work.calls[source], value, waited_for, message, others)

    # ================================================================ stopping

    def _rides(self, work: Work, index: int) -> bool:
        """Are the arguments of an open call in a run of another one that is under way?"""
        assert work.groups is not None
        group = work.groups.get(index)
        return group is not None and index in group.inside and work.results[group.source] is None

    def _tied(self, work: Work, index: int) -> bool:
        """Of a batch that is being ended: is an open call answered by the run of another one, now or soon?"""
        if self._rides(work, index):
            return True
        source = self._source(work, index)
        if source is not None:
            self._share(work, index, source)
        return source is not None

    def _get_off(self, work: Work, index: int, reason: str) -> None:
        """A call is cancelled by itself whose arguments are in a run of another one, which goes on for the others."""
        assert work.groups is not None
        source, tool = work.groups[index].source, work.tools[index]
        assert tool is not None
        work.keywords[index] = None
        work.wants[index] = None
        result = sealing.got_off(index, work.calls[index], source, work.calls[source], reason, tool)
        self._seal(work, index, result, self.core.now())


def _alone(work: Work, index: int, want: Want) -> bool:
    """What a person approves, or has changed, is this call's arguments: they go into no run of others."""
    approval = work.gated.get(index) if work.gated is not None else None
    return approval is not None and approval.needed and (approval.changed or want.of.policy.merge is not None)


def _open(work: Work, group: Group) -> list[int]:
    """The first of its members that have no result yet."""
    members, results = group.members, work.results
    while results[members[group.passed]] is not None:  # the one that is about to start has none
        group.passed += 1
    return [one for one in members[group.passed : group.passed + MOST_MERGED] if results[one] is None]


class _Unmerged(Exception):
    """Why a merge function is of no use; the text names no argument."""


def copy_of(keywords: Mapping[str, object]) -> dict[str, object]:
    """A copy in which a function may do what it likes."""
    return {name: value if type(value) in _FROZEN else deepcopy(value) for name, value in keywords.items()}
