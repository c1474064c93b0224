"""The tool by which a model reads on in a result that was too large.

Theory. It is a tool like any other: admitted, bounded, counted. `tower.add_tool(read_result)` makes it known to the
model; from then on what is told of a large result says how to call it. Its own result is one page, and is never kept.

Not here: pages (pages), who may read what (store).
"""

from __future__ import annotations

from typing import Final

from towerman.core import Core
from towerman.errors import ToolError
from towerman.store import NotKept
from towerman.tools import READS_RESULTS
from towerman.work import Context

OPTIONS: Final = {"independent": True, "read_only": True}
"""What holds for the tool unless it is declared otherwise."""


def read_result(handle: str, page: int = 1, *, ctx: Context[object]) -> str:
    """Read on in a result that was too large to be shown whole. Pages follow one another without a gap.

    Args:
        handle: the handle that stands where the result was cut
        page: which page, from 1; where the result was cut it says which one comes next
        ctx: of the call; the model knows nothing of it
    """
    job = ctx._job
    core = job.work.shell.core
    assert isinstance(core, Core)
    try:
        found = core.keeper.page(handle, page, room=job.tool.max_result_bytes, tenant=ctx.tenant, every=False)
    except NotKept as missing:
        raise ToolError(missing.text, applied="no") from None
    return found.content


setattr(read_result, READS_RESULTS, True)
