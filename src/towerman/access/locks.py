"""Accesses as flat locks, and which two accesses conflict.

Theory. Ledgers know neither nesting nor subtrees, only flat keys and four modes. So every node K has two locks: the
node lock "K" and the tree lock "K/**". A read or write of the node takes S or X on its node lock and announces itself
by IS or IX on the tree locks of all nodes above; a read or write of the subtree takes S or X on the node lock and the
tree lock of K and announces itself above. (Granular locking: Gray, Lorie, Putzolu, Traiger, 1976.) Two accesses
conflict if and only if two of their locks are incompatible. A call that holds S and needs IX on one tree lock gets X,
for there is no fifth mode: this locks more than needed, never less. Where no registered tool can declare a subtree the
node lock is enough.

Not here: who holds what (ledger), the order of conflicting calls (plan).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from towerman.calls import IS, IX, Access, Hold, Mode, S, X


def keys_above(key: str) -> list[str]:
    """The keys above `key`, the root of its scheme first."""
    found = []
    slash = key.find("/", 1)
    colon = key.find(":", 1, slash) if slash > 0 else key.find(":", 1)
    if key[:1] != "/" and 0 < colon < len(key) - 1 and colon + 1 != slash:
        found.append(key[: colon + 1])
    while slash > 0:
        found.append(key[:slash])
        slash = key.find("/", slash + 1)
    return found


@lru_cache(maxsize=1024)
def _trees(parent: str, weak: Mode) -> tuple[Hold, ...]:
    """The announcements on a node and on all above it; siblings, of which there are many, share them."""
    return tuple((above + "/**", weak) for above in (*keys_above(parent), parent))


# The weakest mode that allows what two modes of one holder allow; S and IX have no join below X.
_JOIN: Final[tuple[tuple[Mode, ...], ...]] = (
    (IS, IX, S, X),
    (IX, IX, X, X),
    (S, X, S, X),
    (X, X, X, X),
)


def _locks(access: Access, subtrees: bool) -> list[Hold]:
    """The locks of one access: no flat key twice."""
    key = access.key
    strong, weak = (X, IX) if access.write else (S, IS)
    if not subtrees:
        if access.subtree:
            raise ValueError(f"{access!r} is a subtree: flat_holds needs subtrees=True")
        return [(key, strong)]
    slash = key.rfind("/")
    above = _trees(key[:slash], weak) if slash > 0 else [(root + "/**", weak) for root in keys_above(key)]
    locks = [*above, (key, strong)]
    if access.subtree:
        locks.append((key + "/**", strong))
    return locks


def flat_holds(accesses: Sequence[Access], *, subtrees: bool) -> tuple[tuple[Hold, ...], dict[str, str]]:
    """The locks that stand for these accesses in a ledger, and what people are shown for each.

    Args:
        accesses: what one call touches.
        subtrees: some registered tool may touch a subtree. It may change only while nothing is held: locks taken
            without it do not meet a subtree's.

    Returns:
        (flat key, mode) pairs in the order of the keys, each key once with a mode that allows all that is needed; and
        flat key -> template of the access that asked for the strongest mode on it.

    Raises:
        ValueError: an access is a subtree although `subtrees` is False.
    """
    if len(accesses) == 1:
        locks = _locks(accesses[0], subtrees)
        locks.sort()
        return tuple(locks), {lock[0]: accesses[0].template for lock in locks}
    modes: dict[str, Mode] = {}
    labels: dict[str, str] = {}
    for access in accesses:
        for flat, mode in _locks(access, subtrees):
            held = modes.get(flat)
            if held is None:
                modes[flat] = mode
                labels[flat] = access.template
            elif held != (joined := _JOIN[held][mode]):
                modes[flat] = joined
                labels[flat] = access.template
    return tuple(sorted(modes.items())), labels


def _covers(upper: Access, lower: Access) -> bool:
    """Whether the node of `lower` is the node of `upper`, or is in its subtree."""
    return upper.key == lower.key or (upper.subtree and upper.key in keys_above(lower.key))


def within(inner: Sequence[Access], outer: Sequence[Access]) -> bool:
    """Whether all that some accesses touch is touched by others too, and written only where these write.

    Args:
        inner: those that are looked at.
        outer: those that may not be exceeded.
    """
    return all(
        any(
            _covers(whole, one) and (whole.subtree or not one.subtree) and (whole.write or not one.write)
            for whole in outer
        )
        for one in inner
    )


def conflict(a: Access, b: Access) -> str | None:
    """Why these two may not run at the same time, told with templates only; None when they may.

    Args:
        a: an access of one call.
        b: an access of another.
    """
    if not (a.write or b.write) or not (_covers(a, b) or _covers(b, a)):
        return None
    told = [f"{'write' if access.write else 'read'} {access.template}" for access in (a, b)]
    return f"{told[0]} and {told[1]} touch the same resource"
