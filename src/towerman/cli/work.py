"""One batch run for the command line: live on a terminal, sealed first when it is interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

from towerman.cli.live import Board
from towerman.threads import Courier
from towerman.trace import Event

if TYPE_CHECKING:
    from rich.console import Console

    from towerman.calls import Batch
    from towerman.tower import BatchResult, Tower
    from towerman.trace import Observer


def live(screen: Console, board: Board) -> AbstractContextManager[object]:
    """Show the board on a terminal while the block runs, and leave nothing of it behind."""
    from rich.live import Live

    if not screen.is_terminal or screen.is_dumb_terminal:
        return nullcontext()
    # Two lines for title and headings, one for "and more", one that the cursor stands in.
    rows = max(1, screen.height - 4)
    return Live(
        get_renderable=lambda: board.table(rows), console=screen, refresh_per_second=12, transient=True, screen=False
    )


def attach(tower: Tower, observer: Observer) -> None:
    """Let an observer see a tower's events from now on, beside those that the tower was made with."""
    before, courier = tower._courier, Courier[Event]((observer,))
    core = tower._core
    if before is None:
        tower._courier, core.emit, core.gate.notes = courier, courier.send, core.gate.notes or []
    else:
        before._receivers = (*before._receivers, observer)


def perform(tower: Tower, batch: Batch, run_id: str | None) -> tuple[BatchResult | None, bool]:
    """Run one batch to its end and close the tower.

    Ctrl-C and SIGTERM cancel the run: what is running is asked to stop, everything is sealed, and the results are
    handed back. A second Ctrl-C leaves at once.

    Args:
        tower: it is closed afterwards, so that its observers have seen everything.
        batch: as an adapter read it.
        run_id: of the run.

    Returns:
        The results (None when it was interrupted before there were any), and whether it was interrupted.
    """
    return asyncio.run(_perform(tower, batch, run_id))


async def _perform(tower: Tower, batch: Batch, run_id: str | None) -> tuple[BatchResult | None, bool]:
    task = asyncio.current_task()
    assert task is not None
    with _on_sigterm(task.cancel):
        try:
            async with tower.run(run_id) as run:
                try:
                    return await run.execute(batch), False
                except asyncio.CancelledError:
                    return run.last_batch, True
        finally:
            await tower.aclose()


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
