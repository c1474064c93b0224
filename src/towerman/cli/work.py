"""One batch run for the command line: watched while it runs, sealed first when it is interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from towerman.cli.words import INTERRUPTED, NOT_OK, complain
from towerman.clock import RealClock

if TYPE_CHECKING:
    from pathlib import Path

    from towerman.approvals import Approved, Approver, Denied
    from towerman.calls import Batch
    from towerman.cli.show import ForPeople, ForPrograms
    from towerman.tower import Tower
    from towerman.work import BatchResult


@dataclass(frozen=True, slots=True)
class Ending:
    """How a batch on the command line ended.

    Args:
        result: what came of it; None when it was interrupted before there was anything.
        interrupted: Ctrl-C or SIGTERM.
        left: the exit or interrupt that a tool raised, or None.
    """

    result: BatchResult | None
    interrupted: bool
    left: BaseException | None = None

    def exit_code(self) -> int | None:
        """The exit code of an end before its time, said on stderr; None when it ended in its time.

        A tool that ends the program never makes it look as if all were well.
        """
        if self.left is None:
            if self.interrupted or self.result is None:
                complain("interrupted")
                return INTERRUPTED
            return None
        who = next((repr(one.tool) for one in self.result or () if holds_exit(one.exception)), "a tool")
        if isinstance(self.left, KeyboardInterrupt):
            complain(f"the tool {who} interrupted the program (KeyboardInterrupt); what had not ended was cancelled")
            return INTERRUPTED
        complain(f"the tool {who} ended the program (SystemExit); what had not ended was cancelled")
        code = getattr(self.left, "code", None)
        return code if type(code) is int and 0 < code < 256 else NOT_OK


def holds_exit(error: BaseException | None) -> bool:
    """Is it, or does a group of it hold, a wish to end the program?"""
    from towerman.runner.sealer import exit_in

    return error is not None and exit_in(error) is not None


def perform(
    tower: Tower,
    batch: Batch,
    run_id: str | None,
    face: ForPeople | ForPrograms,
    state: Path | None = None,
    approver: Approver | None = None,
    tenant: str | None = None,
) -> Ending:
    """Run one batch to its end and show what came of it.

    Calls that need approval are asked about at the terminal, once everything else is done.

    Ctrl-C and SIGTERM cancel the run: what is running is asked to stop, everything is sealed, and the results are
    shown. Work that goes on after its result then gets the tower's `grace` to end; another Ctrl-C leaves at once.

    Args:
        tower: whose tools they are; it stays open, and its observers have seen everything.
        batch: as an adapter read it.
        run_id: of the run.
        face: shows it.
        state: a file for what is left of the batch where calls still wait for a person.
        approver: is asked in the place of whoever sits at the terminal.
        tenant: whom the run belongs to.

    A tool that raises SystemExit or KeyboardInterrupt ends the batch: it is sealed and shown, then that is told.
    """
    return asyncio.run(_perform(tower, batch, run_id, face, state, approver, tenant))


async def _perform(
    tower: Tower,
    batch: Batch,
    run_id: str | None,
    face: ForPeople | ForPrograms,
    state: Path | None,
    approver: Approver | None,
    tenant: str | None,
) -> Ending:
    task = asyncio.current_task()
    assert task is not None
    with _on_sigterm(task.cancel):
        result: BatchResult | None
        interrupted = False
        left: BaseException | None = None
        later: set[str] = set()
        try:
            async with tower.run(run_id, tenant=tenant, approver=approver) as run:
                try:
                    with face.live():
                        result = await run._execute_by_name(batch)
                    while decisions := await _decisions(result, later):
                        with face.live():
                            result = await run.resume(result.state(), decisions)
                except asyncio.CancelledError:
                    result, interrupted = run.last_batch, True
                except (KeyboardInterrupt, SystemExit) as caught:
                    result, left = run.last_batch, caught
            if result is not None:
                if result.pending:
                    _leave(result, state)
                face.show(result, kept=state is not None)
            await _linger(tower)
        finally:
            tower.flush()
    return Ending(result, interrupted, left)


async def _decisions(batch: BatchResult, later: set[str]) -> dict[str, Approved | Denied | None]:
    """What the person at the terminal decides about calls that wait for one; nothing where nobody is there.

    Args:
        batch: whose calls they are.
        later: those about which nothing was said, and which are not asked about again.
    """
    from towerman.terminal import ask_terminal

    found: dict[str, Approved | Denied | None] = {}
    for request in batch.pending:
        if request.approval_id in later:
            continue
        later.add(request.approval_id)
        try:
            async with asyncio.timeout(max(request.expires_in, 0.001)):
                decision = await ask_terminal(request)
        except TimeoutError:
            continue
        if decision is not None:
            found[request.approval_id] = decision
    return found


def _leave(batch: BatchResult, state: Path | None) -> None:
    """Calls still wait for a person when the command ends: say so, and keep what is left."""
    told = ", ".join(f"{request.tool} ({request.approval_id})" for request in batch.pending)
    if state is None:
        complain(f"nobody has approved {told}: not run; --state FILE keeps such a batch, to be gone on with")
        return
    try:
        state.write_text(batch.state(), encoding="utf-8")
    except OSError as problem:
        complain(f"--state {state}: cannot be written: {problem.strerror or type(problem).__name__}")
    else:
        complain(f"waiting for approval: {told}; what is left of the batch is in {state}")


async def _linger(tower: Tower) -> None:
    """A process that ends takes its threads with it, in the middle of a write if need be: let them come to an end."""
    going_on = tower.statistics().orphans
    if not going_on:
        return
    grace = tower.options.grace
    work = "1 call is" if going_on == 1 else f"{going_on} calls are"
    complain(f"{work} still at work; waiting up to {grace:g} s for the end (Ctrl-C leaves at once)")
    now = RealClock().now
    limit = now() + grace
    while tower.statistics().orphans and now() < limit:  # noqa: ASYNC110 - threads end without an event
        await asyncio.sleep(0.02)


class _on_sigterm:
    """Call something when the process is asked to end, where the system can tell."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._callback)

    def __exit__(self, *_: object) -> None:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
