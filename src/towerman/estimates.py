"""How long calls may take: what the order of starting inside a plan goes by (S6).

Theory. Of each tool the running mean of its answers is kept. A call is taken to last as long as its tool's calls have
on average; one whose tool has answered nothing yet, as long as the median of the tools that have. Where nothing is
known at all every call counts 1, so that paths are counted in calls: estimates that are far off are worth less.

House rules. By tool alone: no argument has a part in it. Told by the second, in whatever order answers come.

Not here: where means are kept from one process to the next (journal), what paths they make (plan).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

Means = dict[str, tuple[int, float]]
"""By tool name: answers so far, and their mean seconds."""


def estimated(
    means: Mapping[str, tuple[int, float]],
    tools: Sequence[str | None],
    given: Sequence[float | None] | None = None,
) -> list[float] | None:
    """How long each call of a batch may take.

    Args:
        means: what was learned.
        tools: the tool of each call; None where there is no such tool.
        given: for some calls, what is known of them beforehand, in seconds; it goes before the mean of their tool.

    Returns:
        Seconds for each call; None: nothing is known of any of them.
    """
    named = [None if tool is None else means.get(tool) for tool in tools]
    found = [None if one is None else one[1] for one in named]
    if given is not None:
        found = [known if told is None else told for told, known in zip(given, found, strict=True)]
    some = [one for one in found if one is not None]
    if not some:
        return None
    if len(some) == len(found):
        return some
    tools_known = [mean for _, mean in means.values()]
    usual = median(tools_known or some)
    return [usual if one is None else one for one in found]
