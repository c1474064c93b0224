"""The `after` edges: calls whose holds conflict are put in order.

Theory. Edges are made in one pass per key. Since the last X, a key has a row of groups, S and IX in
turn, each in conflict with the next, and beside them the IS holders, which mind an X only. A member of
a group waits for the group before it, an X for the last group and the IS holders. Where a whole group
is waited for, a junction stands between: a node that is no call, and whose work has ended from the
start, so that it passes the word on as soon as nothing is open before it. The edges are thus at most
about three for each hold, and two calls are joined by a path exactly when a chain of conflicts joins them.

Not here: which holds conflict with those of other batches (ledger).
"""

from __future__ import annotations

from collections.abc import Sequence

from towerman.calls import IS, Hold, X


class _Row:
    """The holders of one key, as far as a later holder must know them."""

    __slots__ = ("barrier", "intents", "members", "mode", "writer")

    def __init__(self, index: int, mode: int) -> None:
        self.writer = -1  # the last X
        self.barrier = -1  # what the members of the present group wait for: a writer, or the group before
        self.mode = mode  # of the present group
        self.members: list[int] = []  # of the present group
        self.intents: list[int] = []  # IS since the last X
        if mode == X:
            self.writer = self.barrier = index
        elif mode == IS:
            self.intents.append(index)
        else:
            self.members.append(index)


def link_conflicts(
    size: int, order: Sequence[int], holds: Sequence[Sequence[Hold]]
) -> tuple[list[list[int] | None], list[int], list[int]] | None:
    """Make the `after` edges.

    Returns:
        For each node those that wait for it, for each node the number that it waits for, and for
        each junction the call that it was made for; None when nothing conflicts.
    """
    after: list[list[int] | None] = [None] * size
    left = [0] * size
    made_at: list[int] = []
    # Most keys have one holder: it is kept as a number until a second one comes.
    rows: dict[str, int | _Row] = {}

    def link(earlier: int, later: int) -> None:
        followers = after[earlier]
        if followers is None:
            after[earlier] = [later]
        elif followers[-1] == later:
            return  # the two meet on several keys
        else:
            followers.append(later)
        left[later] += 1

    def gather(members: list[int], maker: int) -> int:
        if len(members) == 1:
            return members[0]
        junction = len(after)
        after.append(None)
        left.append(0)
        made_at.append(maker)
        for member in members:
            link(member, junction)
        return junction

    for index in order:
        for key, mode in holds[index]:
            row = rows.get(key)
            if row is None:
                rows[key] = index << 2 | mode
                continue
            if isinstance(row, int):
                row = rows[key] = _Row(row >> 2, row & 3)
            if mode == X:
                if row.members:
                    link(gather(row.members, index), index)
                    row.members = []
                elif not row.intents:
                    link(row.barrier, index)
                if row.intents:
                    link(gather(row.intents, index), index)
                    row.intents = []
                row.writer = row.barrier = index
            elif mode == IS:
                row.intents.append(index)
                if row.writer >= 0:
                    link(row.writer, index)
            else:
                if row.mode != mode:
                    row.mode = mode
                    if row.members:
                        row.barrier = gather(row.members, index)
                        row.members = []
                row.members.append(index)
                if row.barrier >= 0:
                    link(row.barrier, index)
    # Without an edge nothing was gathered either: a junction has members that are linked to it.
    return (after, left, made_at) if any(left) else None
