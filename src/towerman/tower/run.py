"""A run: one agent's work, batch after batch.

Theory. A run takes the model's responses one after another and answers each call of each. It has no state of its own
beyond the last batch: what counts for it is kept where it is decided.

Not here: making one and its options (tower), running a batch (runner).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from towerman.calls import Batch, Call
from towerman.errors import InputError, PolicyError
from towerman.policy import OnResult, check_deferring, whole
from towerman.tools import is_coroutine_function
from towerman.work import BatchResult, Deferral, RunState, Work

if TYPE_CHECKING:
    from towerman.approvals import Approved, Decision, Denied
    from towerman.core import Core
    from towerman.runner import Shells, SyncDoor

    Decisions = Mapping[str, Approved | Denied | None]


MOST_ID: Final = 256
"""Longest name of a batch."""


class Host(Protocol):
    """What a run needs of its tower, without naming the tower."""

    _runs: dict[int, RunState]

    @property
    def _shells(self) -> Shells:
        """The runners of its loops."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def _sync(self) -> SyncDoor:
        """The way in for threads without a loop."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def _core(self) -> Core:
        """What its loops share."""
        ...  # pragma: no cover - a protocol has no body

    def _close_run(self, state: RunState) -> None:
        """Forget a run."""
        ...  # pragma: no cover - a protocol has no body


class Run:
    """One agent run: an async and a plain context manager, made by `Tower.run`. Leaving it cancels what is at work, and
    waits for that to end; only a plain `with` in a thread whose own event loop runs does not wait.

    It takes batches one after another or at the same time, from any loop. All of them share its limits, deadline and
    permissions.

    Attributes:
        run_id: its id.
        last_batch: what the last finished batch came to, also when the caller was cancelled; None before the first.
    """

    def __init__(self, tower: Host, state: RunState) -> None:
        self._tower = tower
        self._state = state
        self.last_batch: BatchResult | None = None

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._state.run_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def execute(
        self,
        calls: object = None,
        *,
        plan: object = None,
        format: str | None = None,
        batch_id: str | None = None,
        on_result: OnResult | None = None,
    ) -> BatchResult:
        """Answer every call of one model response: one result a call, in emitted order, whatever happens.

        Args:
            calls: a provider's response or message (SDK object, mapping or JSON text), or a list of `Call` or mappings.
            plan: True: the calls are a plan, in whose arguments references to results of others are read
                (`{"$ref": "a#/path"}`, `${a.path}`), or the text or data of a planner; or such a plan itself, without
                `calls`. A document `{"plan": [...]}` is a plan by itself. A plan that cannot be followed runs nothing:
                each of its calls is answered with the reason. A plan is not cut at `max_calls_per_batch`.
            format: the form it has: a provider's format, or a planner's form, which is always a plan (`llmcompiler`,
                `rewoo`, `taskbench`, `hugginggpt`, `nestful`, `worfbench`, `worfbench:tool`); None: found out.
            batch_id: what you call the batch by. With a journal, a batch that is handed in again under the same id, in
                a run of the same id, is answered and not run again; not given: the provider's id of the response
                counts.
            on_result: sees each result as it is sealed; its content may be cut further when the whole batch is too
                large. If it raises, the batch is finished first and then the error is raised.

        Returns:
            The results. No calls: an empty batch.

        Raises:
            InputError: it is no batch of calls or plan in any known form, with the line or the place; nothing was run.
            PolicyError: `on_result` is no plain function, or `batch_id` no short text; nothing was run.
            asyncio.CancelledError: the caller was cancelled. The batch was sealed first, which takes at most the
                tower's `grace`; its results are in `last_batch`.
            KeyboardInterrupt, SystemExit: raised by a handler; the batch was sealed first.
        """
        if on_result is not None:
            _check_hook(on_result)
        if batch_id is not None:
            _check_batch_id(batch_id)
        batch = read_calls(calls, plan, format, self._tower._core)
        if batch_id is not None:
            batch = replace(batch, batch_id=batch_id)
        return await self._answer(batch, on_result, None)

    async def _execute_by_name(self, batch: Batch) -> BatchResult:
        """Answer a batch that has a name and, with a journal, is written down whole though it be no plan: for the
        command line, where whoever knows the run's id goes on with it.
        """

        def keep(work: Work) -> None:
            work.keeps = True

        return await self._answer(batch, None, keep)

    async def submit(self, calls: object, *, format: str | None = None, batch_id: str | None = None) -> BatchResult:
        """Put every call of a batch into the journal's queue, looked over as by `execute`: a worker runs them.

        What is refused is answered at once and costs its siblings nothing. The others are `pending`, with a handle:
        `deferred`, or `held_behind` one of the same batch that comes before, and then they run in that order.

        Args:
            calls: as `execute` takes them.
            format: the form they have; None: found out.
            batch_id: as `execute` takes it: what was put in under it is not put in twice.

        Raises:
            PolicyError: the tower has no journal that stores arguments, or `batch_id` is no short text.
            InputError: it is no batch of calls in any known form; nothing was put in.
        """
        check_deferring("submit: ", self._tower._core.journal)
        if batch_id is not None:
            _check_batch_id(batch_id)
        batch = replace(read_calls(calls, None, format, self._tower._core), batch_id=batch_id)

        def every(work: Work) -> None:
            work.deferral = Deferral(every=True)

        return await self._answer(batch, None, every)

    async def _answer(
        self, batch: Batch, on_result: OnResult | None, prepare: Callable[[Work], None] | None
    ) -> BatchResult:
        """Run a batch that was read; `prepare` puts in place what is known of it from before."""
        shell = self._tower._shells.here()
        work: Work | None = None

        def begun(one: Work) -> None:
            nonlocal work
            if prepare is not None:
                prepare(one)
            work = one

        done: BatchResult | None = None
        try:
            await shell.execute(self._state, batch, on_result, begun)
        finally:
            if work is not None and not work.left:
                done = BatchResult(work)
                if work.parent is None:
                    self.last_batch = done
        assert done is not None
        return done

    async def resume(
        self, state: str | bytes | Mapping[str, object], decisions: Decisions, *, on_result: OnResult | None = None
    ) -> BatchResult:
        """Go on with a batch some of whose calls waited for a person, here or in another process.

        Results that were there are kept as they are and nothing of them runs again. Calls that are approved go through
        the whole of admission again; what stood behind them follows in emitted order. Calls about which nothing is said
        stay pending: `state` of what is returned goes on from there. A decision that was given before changes nothing;
        one that contradicts it is ignored, counted and logged.

        In one process a batch may be gone on with by several hosts, or twice: each of its calls runs once, and whoever
        comes later gets the same results. It waits for a call that is at work for as long as one may take (`max_wait`,
        `timeout`, `grace`), and has it pending after that. With a journal each call runs once in all processes that
        share it, and decisions that were written there count as well (`towerman approvals`). Without one, processes
        know nothing of one another: see to it that one state is gone on with in one of them.

        Args:
            state: what `BatchResult.state` gave.
            decisions: by approval id, `Approved`, `Denied`, or None for no decision yet.
            on_result: sees each result that was not there before, as it is sealed.

        Returns:
            All results of the batch, in emitted order. Results that were there have no `value` any more.

        Raises:
            InputError: it is no such state, it was changed, its version or signature does not fit, it belongs to
                another tenant, or a decision is for an approval that it does not have; nothing was run.
            PolicyError: decisions are no mapping of ids to `Approved` or `Denied`; nothing was run.
            asyncio.CancelledError: as with `execute`.
        """
        if on_result is not None:
            _check_hook(on_result)
        from towerman.approvals import read_state

        shell = self._tower._shells.here()
        suspended = read_state(state, shell.core.secret)
        given = _checked_decisions(decisions)
        if suspended.tenant != self._state.tenant:
            raise InputError("state: it belongs to another tenant than this run; open the run for that tenant")
        known = {one.approval_id for one in suspended.opened.values() if one.needed} | suspended.closed.keys()
        unknown = [name for name in given if name not in known]
        if unknown:
            raise InputError(
                f"decisions: the batch has no approval {unknown[0][:64]!r}; known are those of its `pending`"
            )
        found = await shell.decided(suspended, given)
        return await self._answer(suspended.batch, on_result, lambda work: shell.take_up(work, suspended, found))

    def resume_sync(
        self, state: str | bytes | Mapping[str, object], decisions: Decisions, *, on_result: OnResult | None = None
    ) -> BatchResult:
        """`resume` for code without an event loop, as `execute_sync` is for `execute`.

        Args:
            state: what `BatchResult.state` gave.
            decisions: by approval id.
            on_result: sees each result that was not there before, on the loop's thread.

        Raises:
            PolicyError: an event loop runs in this thread: await `resume` there.
        """
        return self._tower._sync.run("resume_sync", lambda: self.resume(state, decisions, on_result=on_result))

    def execute_sync(
        self,
        calls: object = None,
        *,
        plan: object = None,
        format: str | None = None,
        batch_id: str | None = None,
        on_result: OnResult | None = None,
    ) -> BatchResult:
        """`execute` for code without an event loop: waits in this thread until every call has its result.

        Async handlers run on a loop that the tower keeps on a thread of its own; from within a sync handler, on the
        loop of its call. An interrupt of this thread cancels the batch and is raised once it is sealed.

        Args:
            calls: as `execute` takes them.
            plan: as `execute` takes it.
            format: the form they have; None: found out.
            batch_id: as `execute` takes it.
            on_result: sees each result as it is sealed, on the loop's thread.

        Raises:
            PolicyError: an event loop runs in this thread: await `execute` there.
        """
        return self._tower._sync.run(
            "execute_sync",
            lambda: self.execute(calls, plan=plan, format=format, batch_id=batch_id, on_result=on_result),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.number not in self._tower._runs:
            return
        if self._tower._shells.looping:
            self._end()
            self._tower._close_run(self._state)
        else:
            self._tower._sync.run("leaving a run", self.aclose)

    def cancel(
        self, reason: str = "the run was cancelled", *, call_id: str | None = None, index: int | None = None
    ) -> None:
        """Cancel what this run has at work: all of it, or one call. May be called from any thread.

        What waits never starts; what runs is told to stop and has the tower's `grace` seconds. Every call still gets
        its result. The run stays open.

        Args:
            reason: told in the results and the trace.
            call_id: cancel only calls with this provider id.
            index: cancel only the call at this place of its batch, from 0; a place that no batch has cancels nothing.

        Raises:
            PolicyError: an argument of another type; nothing was cancelled.
        """
        texts: dict[str, object] = {"reason": reason, "call_id": "" if call_id is None else call_id}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise PolicyError(f"cancel: {name}: text; got {type(text).__name__}")
        if index is not None:
            whole("cancel: index", index, least=0)
        self._tower._shells.cancel(self._state, reason, call_id, index)

    def charge(self, **units: float) -> None:
        """Tell what the run has spent beside its calls: `run.charge(tokens=response.usage.total_tokens)`.

        It counts at once in the budgets of the run, its tenant and the process. A charge is never refused: it may bring
        a budget past its limit, and then nothing more starts. May be called from any thread.

        Args:
            units: amounts by unit, 0 or more.

        Raises:
            PolicyError: a name of no unit, or an amount that is none. Nothing was charged.
        """
        self._tower._core.charge(self._state, units)

    @property
    def remaining(self) -> dict[str, float]:
        """What is left of the budgets that the run counts in, by limited unit, and of its time as `seconds`: the least
        of them, never below 0. What waiting calls have reserved is not left. Empty without a budget.
        """
        return self._tower._core.remaining(self._state)

    async def aclose(self) -> None:
        """Close the run: nothing new is taken, what is at work is cancelled and sealed (at most `grace` seconds).

        Raises:
            asyncio.CancelledError: the caller was cancelled. The batches of this loop were sealed first and the run is
                closed all the same.
        """
        state = self._state
        if state.number not in self._tower._runs:
            return
        self._end()
        try:
            await self._tower._shells.wait_sealed(state)
        finally:
            self._tower._close_run(state)

    def _end(self) -> None:
        """Nothing new is taken; what is at work is told to stop."""
        self._state.closed = self._state.closed or "it was left"
        self.cancel("the run was closed")

    def __repr__(self) -> str:
        state = "closed" if self._state.closed is not None else "open"
        return f"Run({self.run_id!r}, {state}, {len(self._state.works)} batches at work)"


def read_calls(calls: object, plan: object, format: str | None, core: Core) -> Batch:
    """What was handed in, as a batch.

    Args:
        calls: in any known form.
        plan: None or False; True: the calls are a plan; or a plan.
        format: the form; None: found out.
        core: knows the tools.

    Raises:
        PolicyError: calls and another plan were given, or an unknown format.
        InputError: it has no known form; the message names the line or the place, and the fix.
    """
    if plan is None or plan is False:
        if format is None and isinstance(calls, list) and _are_plain(calls):
            return Batch(tuple(calls))
        from towerman import adapters

        given: object = format
        if not isinstance(given, str):
            try:
                return adapters.decode(calls, format)
            except InputError as problem:
                raise _or_a_plan(problem, calls) from None
        if given in adapters.FORMATS:
            return adapters.decode(calls, format)
        if plan is False:
            raise PolicyError(f"plan: False, and no batch is written in the format {given[:32]!r}")
    elif plan is not True and calls is not None:
        raise PolicyError("plan: True for calls that are a plan, or the plan itself and no calls; both were given")
    from towerman.forms import read_plan

    return read_plan(calls if plan is None or plan is True else plan, format, core.parameters_of)


def _or_a_plan(problem: InputError, calls: object) -> InputError:
    """What to say of something that is no batch: where it is a plan, that."""
    from towerman.forms import FORMS, find_form

    try:
        form = find_form(calls)
    except InputError:
        return problem
    if form not in FORMS:
        return problem
    return InputError(f"no batch of calls, but a plan in the form {form!r}: hand it in with plan=True")


def _are_plain(calls: list[Call]) -> bool:
    """Calls whose fields have the types they are declared with, and that need no other: the usual ones."""
    for call in calls:  # a batch may have 10,000: neither a function nor a generator for each
        if (
            type(call) is not Call
            or type(call.tool) is not str
            or type(call.id) is not str
            or type(call.arguments) not in (dict, str)
            or type(call.needs) is not tuple
            or call.needs
            or call.caller
            or not (call.idempotency_key is None or type(call.idempotency_key) is str)
        ):
            return False
    return True


def _check_batch_id(batch_id: object) -> None:
    if not isinstance(batch_id, str) or not 0 < len(batch_id) <= MOST_ID:
        raise PolicyError(f"batch_id: text of 1 to {MOST_ID} characters; got {type(batch_id).__name__}")


def _checked_decisions(given: object) -> dict[str, Decision]:
    """Decisions by approval id, without those that are none yet.

    Raises:
        PolicyError: they are none.
    """
    from towerman.approvals import Approved, Denied

    if not isinstance(given, Mapping):
        raise PolicyError(
            f"decisions: a mapping of approval ids to Approved(...) or Denied(...); got {type(given).__name__[:80]}"
        )
    found: dict[str, Decision] = {}
    for name, decision in given.items():
        if not isinstance(name, str):
            raise PolicyError(f"decisions: approval ids are text; got {type(name).__name__[:80]}")
        if decision is None:
            continue
        if not isinstance(decision, Approved | Denied):
            raise PolicyError(
                f"decisions: Approved(...), Denied(...) or None for each id; got {type(decision).__name__[:80]}"
            )
        found[name] = decision
    return found


def _check_hook(hook: object) -> None:
    if not callable(hook) or is_coroutine_function(hook):
        raise PolicyError(f"on_result: a plain function that takes a Result; got {type(hook).__name__}")
