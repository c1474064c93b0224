"""One batch run for the command line: watched while it runs, sealed first when it is interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from towerman.cli.words import complain
from towerman.clock import RealClock

if TYPE_CHECKING:
    from towerman.calls import Batch
    from towerman.cli.show import ForPeople, ForPrograms
    from towerman.tower import BatchResult, Tower


def perform(
    tower: Tower, batch: Batch, run_id: str | None, face: ForPeople | ForPrograms
) -> tuple[BatchResult | None, bool]:
    """Run one batch to its end and show what came of it.

    Ctrl-C and SIGTERM cancel the run: what is running is asked to stop, everything is sealed, and the results are
    shown. Work that goes on after its result then gets the tower's `grace` to end; another Ctrl-C leaves at once.

    Args:
        tower: whose tools they are; it stays open, and its observers have seen everything.
        batch: as an adapter read it.
        run_id: of the run.
        face: shows it.

    Returns:
        The results (None when it was interrupted before there were any), and whether it was interrupted.
    """
    return asyncio.run(_perform(tower, batch, run_id, face))


async def _perform(
    tower: Tower, batch: Batch, run_id: str | None, face: ForPeople | ForPrograms
) -> tuple[BatchResult | None, bool]:
    task = asyncio.current_task()
    assert task is not None
    with _on_sigterm(task.cancel):
        result: BatchResult | None
        interrupted = False
        try:
            async with tower.run(run_id) as run:
                with face.live():
                    try:
                        result = await run.execute(batch)
                    except asyncio.CancelledError:
                        result, interrupted = run.last_batch, True
            if result is not None:
                face.show(result)
            await _linger(tower)
        finally:
            tower.flush()
    return result, interrupted


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
