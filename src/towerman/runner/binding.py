"""Steps of a plan whose arguments are open until others have answered: ordered before, filled in when they are ready.

Theory (rule S1). The references of a plan are read and linked before anything of it runs. A call with some is looked
over twice. At first as far as it can be: whose it is, whether it may be made, what it may touch; that puts it in its
place among its siblings. When all that it waits for has answered, the results are filled in, and it is looked over like
any other call: its arguments are checked, what it touches is computed, a person may be asked, budgets are asked for
what only its arguments tell. What it touches then has to lie within what was foreseen, since its siblings were ordered
by that.

A call that is refused here is settled in a row, one after another: a chain of steps that run whatever came before them
does not recurse.

House rules. What was filled in is never read for references again. A call sees the results that it names, and copies
of these.

Not here: reading and filling in (plan), what is foreseen (access), who is ready (plan), budgets (spending).
"""

from __future__ import annotations

from collections import deque

from towerman import sealing
from towerman.access import within
from towerman.calls import Access
from towerman.core import Core, Refusal, filled
from towerman.plan import Bound, UnresolvedReference
from towerman.runner.spending import Spending
from towerman.work import Want, Work


class Binding(Spending):
    """What concerns open arguments; the runner goes on from here."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._refused: deque[tuple[Work, int]] = deque()
        self._settling = False

    def _settle(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed: let the plan go on."""
        raise NotImplementedError  # pragma: no cover - of the ends

    def _check_open(self, work: Work, index: int, bound: Bound) -> Want | None:
        """Look over, as far as it can be, a call that waits for results of others; None: it was refused and sealed."""
        found = self.core.foresee(work.run, work.batch, index, work.calls[index], bound)
        if isinstance(found, Refusal):
            work.tools[index] = found.tool
            self._refuse(work, index, found.code, found.message)
            return None
        want, foreseen = found
        assert work.open is not None
        work.open[index] = foreseen
        work.tools[index] = want.of
        work.wants[index] = want
        return want

    def _bind(self, work: Work, index: int) -> bool:
        """Fill in what a call that is ready waited for, and look it over; False: it is refused, and is settled soon."""
        assert work.open is not None
        foreseen = work.open.pop(index)
        if self._fill(work, index) and self._look_again_at(work, index, foreseen):
            return True
        self._refused.append((work, index))
        return False

    def _fill(self, work: Work, index: int) -> bool:
        """Put results in the place of references."""
        bound = work.bound[index]
        assert bound is not None
        for reference in bound.references:
            result = work.results[reference.step]
            if result is None or not result.ok:  # it runs whatever came of those that it needs, but it names this one
                message = sealing.unneeded(reference.step, work.calls[reference.step])
                self._refuse(
                    work, index, "dependency_failed", message, "skipped", waited_for=self._behind_whom(work, index)
                )
                return False
        try:
            arguments = bound.resolve(work.value_of)
        except UnresolvedReference as lost:
            step = lost.reference.step
            message = sealing.unresolved(step, work.calls[step], lost.reason)
            self._refuse(work, index, "bad_reference", message, waited_for=self._behind_whom(work, index))
            return False
        work.remember_written(index, work.calls[index].arguments)
        work.put_call(index, filled(work.calls[index], arguments))
        work.filled.add(index)
        return True

    def _look_again_at(self, work: Work, index: int, foreseen: tuple[Access, ...] | None) -> bool:
        """A call whose arguments are all there now is looked over like any other."""
        want = self._check(work, index, self.core.any_gated or work.resumed is not None)
        if want is None:
            return False
        if foreseen is not None and not within(want.accesses, foreseen):
            self._refuse(work, index, "invalid_arguments", sealing.ELSEWHERE, waited_for=self._behind_whom(work, index))
            return False
        if work.shares is not None and work.shares.asks[index] is None:
            return self._reserve_anew(work, index)
        return True

    @staticmethod
    def _behind_whom(work: Work, index: int) -> tuple[str, ...]:
        return work.waited_for.get(index, ())

    def _settle_refused(self) -> None:
        """Let plans go on behind those that were refused when they were ready."""
        if self._settling:
            return
        self._settling = True
        try:
            while self._refused:
                work, index = self._refused.popleft()
                result = work.results[index]
                self._settle(work, index, result is not None and result.ok)
        finally:
            self._settling = False
