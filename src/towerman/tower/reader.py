"""The tool by which a model reads on in a result that was too large.

Theory. It is a tool like any other: admitted, bounded, counted. `tower.add_tool(read_result)` makes it known to the
model; from then on what is told of a large result says how to call it. Its own result is one page, and is never kept.

Not here: pages (pages), who may read what (store).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from towerman.core import Core
from towerman.errors import ToolError
from towerman.records import LATER, JournalUnavailable
from towerman.store import NotKept
from towerman.tools import READS_RESULTS
from towerman.work import Context

if TYPE_CHECKING:
    from towerman.journal import Journal

JOURNAL_SECONDS: Final = 15.0
"""How long the journal is waited for."""

OPTIONS: Final = {"independent": True, "read_only": True}
"""What holds for the tool unless it is declared otherwise."""


def read_result(handle: str, page: int = 1, *, ctx: Context[object]) -> str:
    """Read on in a result that was too large to be shown whole, or read what a deferred call came to. Pages follow one
    another without a gap.

    Args:
        handle: the handle that stands where the result was cut, or in what was told of the deferred call
        page: which page, from 1; where the result was cut it says which one comes next
        ctx: of the call; the model knows nothing of it
    """
    job = ctx._job
    core = job.work.shell.core
    assert isinstance(core, Core)
    if handle.startswith(LATER) and core.journal is not None:
        return _deferred(core.journal, handle, ctx.tenant)
    try:
        found = core.keeper.page(handle, page, room=job.tool.max_result_bytes, tenant=ctx.tenant, every=False)
    except NotKept as missing:
        raise ToolError(missing.text, applied="no") from None
    return found.content


def _deferred(journal: Journal, handle: str, tenant: str | None) -> str:
    """What a deferred call came to, or how it stands.

    Raises:
        ToolError: there is none of this tenant's, it is not over, or it did not answer; in words for the model.
    """
    try:
        found = journal.deferred(handle).result(JOURNAL_SECONDS)
    except (JournalUnavailable, TimeoutError):
        raise ToolError("The journal cannot be read now. Try again later.", applied="no") from None
    if found is None or found[0].tenant != tenant:
        raise ToolError("There is no deferred call of this handle.", applied="no")
    call, answer = found
    if call.state in ("queued", "claimed"):
        how = "It waits in the queue" if call.state == "queued" else "It is at work"
        if call.state == "queued" and call.asks == "pending":
            how = "It waits for a person's approval"
        raise ToolError(f"{how}, and has not ended yet. Ask again later; do not call it again.", applied="no")
    if answer is None or call.state == "unknown":
        words = "Nobody knows whether it took effect; somebody has to look." if call.state == "unknown" else ""
        raise ToolError(words or f"It ended as {call.state}, without an answer.", applied="no")
    return answer.content


setattr(read_result, READS_RESULTS, True)
