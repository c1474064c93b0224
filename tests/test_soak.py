"""The soak, short: what `make soak` does with a million calls, with some thousands."""

from __future__ import annotations

import json

import pytest
import soak


def test_p95_g1_g3_a_short_soak() -> None:
    """P-95, R-64, G1, G3, G4, G12: calls of every kind from three loops at once, some cancelled, failing, hanging and
    nested, while limits change: one result a call, no two writers of a resource, no limit passed, nothing left.
    """
    figures = soak.Soak(4_000, seed=7).run()
    assert figures.calls >= 4_000
    assert figures.nested > 50
    assert figures.changes > 5
    assert figures.cancelled_batches > 5
    assert {"ok", "rejected", "cancelled", "error", "timed_out"} <= set(figures.outcomes)
    assert sum(figures.outcomes.values()) == figures.calls


def test_the_soak_tells_what_it_saw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints its figures, for people and as JSON."""
    monkeypatch.setattr("sys.argv", ["soak.py", "--calls", "200", "--json"])
    soak.main()
    assert json.loads(capsys.readouterr().out)["calls"] >= 200
    monkeypatch.setattr("sys.argv", ["soak.py", "--calls", "200"])
    soak.main()
    assert "nested ones, from 3 loops" in capsys.readouterr().out


def test_a_soak_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: a code that may not be, two at one resource, and a limit that is passed are told."""
    monkeypatch.setitem(soak.MAY, "quick", {"call_cap"})
    with pytest.raises(AssertionError, match="of quick"):
        soak.Soak(50, seed=1).run()
    one = soak.Soak(50)
    with one.touching(1, True), one.touching(1, False), one.on("x", "small"):
        pass
    assert one.faults == ["resource 1 is touched by two, one of them writing"]
    one.inside["small"] = soak.HIGHEST["small"]
    with one.on("x", "small"):
        pass
    assert one.faults[1:] == ["5 inside small"]
