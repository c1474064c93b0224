"""A short torment of replicas; the whole is `make chaos`."""

from __future__ import annotations

import pytest
from chaos import LEASE, PERMITS, Said, audit, torment

pytest.importorskip("redis", reason="no redis-py: pip install 'towerman[redis]'")


def test_r_10_r_102_p_49_replicas_that_are_killed_and_stopped_exceed_nothing() -> None:
    """R-10, R-102, R-139, P-49, G3: a few seconds of it."""
    came = torment(15 * LEASE, seed=3)
    assert came.faults == []
    assert came.most == PERMITS and came.started > 50 and came.kills + came.stops > 2


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([Said(1.0 + place / 10, "+", place, "crm", place + 1) for place in range(4)], "4 in the pool"),
        ([Said(1.0, "+", 1, "file0", 5), Said(1.1, "+", 2, "file0", 6)], "2 in file0"),
        ([Said(1.0, "+", 1, "file0", 5), Said(1.1, "-", 1, "file0", 5), Said(1.2, "+", 2, "file0", 4)], "fence 4"),
        ([Said(1.0 + place / 100, "*", 1, "api", 0) for place in range(31)], "31 starts"),
    ],
)
def test_the_auditor_notices(events: list[Said], told: str) -> None:
    """The test of the test: each thing that should not be is a fault; a holder that died is none."""
    (fault,) = audit(events, {})[1]
    assert told in fault
    assert audit(events[:1], {})[1] == []
    if told == "2 in file0":
        assert audit(events, {1: 1.05})[1] == []
