"""The look afterwards: is a tower whole again?

Theory. A permit that is lost shows nowhere until the last one is gone. So the counts are looked at, and then the whole
capacity is claimed at once, of the ledger itself.

Not here: anything that runs.
"""

from __future__ import annotations

from typing import Any

from towerman.ledger import Wants
from towerman.tower import Tower


def assert_whole(tower: Tower) -> None:
    """Nothing is at work, nothing waits, nothing is held, and the whole capacity can be taken at once.

    May be asked at any time, of any tower; it changes nothing. An open run is no harm.

    Args:
        tower: one that should be at rest.

    Raises:
        AssertionError: it is not, and what is left.
    """
    tower.validate()
    seen = tower.statistics()
    left = {
        "running": seen.running,
        "waiting": seen.waiting,
        "behind": seen.behind,
        "orphans": seen.orphans,
        "backing off": seen.backing_off,
    }
    assert not any(left.values()), f"{tower!r} is still at work: {left}"
    assert tower._core.purse.live == {}, "budgets have something set aside for calls that are gone"
    for name, pool in seen.pools.items():
        assert (pool.held, pool.queued, pool.orphaned) == (0, 0, 0), f"pool {name} is not whole: {pool}"
    gate = tower._core.gate
    with tower._core.lock:
        ledger = gate.ledger
        assert ledger.counts() == (0, 0), f"{ledger!r} still holds"
        limits = tuple((key, kept.limit) for key, kept in ledger.pools.items())
        everything: Wants[Any] = Wants(0, "all", limits, priority=1)
        ledger.look_up(everything)
        peaks = [(kept, kept.peak) for kept in ledger.pools.values()]
        blocker = ledger.claim(everything)
        assert blocker is None, f"{blocker} does not give its whole capacity"
        ledger.give(everything)
        for kept, peak in peaks:  # what was only looked at is no peak
            kept.peak = peak
        assert gate._queued == {}, "the bounds of queues still count somebody"
        assert gate._claimants == [], "somebody who is gone still claims"
