"""`towerman approvals`, and decisions that go through the journal."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from kit import Stage, here, on_stage

from towerman import Approved, BatchResult, Call, Denied, Tower
from towerman.cli import main as command
from towerman.journal import Journal
from towerman.records import JournalUnavailable

stage = pytest.fixture(on_stage)


def outcomes(done: Any) -> list[str]:
    """The code of each result, or ok."""
    return [result.code or result.outcome for result in done]


def desk(stage: Stage, journal: Any, **options: Any) -> Tower:
    """A tower with a gated tool; what it runs is counted."""
    tower = stage.tower(journal=journal, **options)

    @tower.tool(writes="order:{order}", requires_approval=True)
    async def refund(order: int, note: str = "") -> str:
        return await stage.work(f"refund {order} {note}".strip(), 0.1)

    @tower.tool(writes="order:{order}")
    async def after(order: int) -> str:
        return await stage.work(f"after {order}", 0.1)

    return tower


CALLS = [
    Call("refund", {"order": 1}, "c1"),
    Call("after", {"order": 1}, "c2"),
    Call("refund", {"order": 2, "note": "\x1b[2J"}, "c3"),
]


def suspended(stage: Stage, tower: Tower) -> BatchResult:
    """A batch that waits, with its requests in the journal."""

    async def main() -> BatchResult:
        async with tower.run("r", tenant="acme") as run:
            return await run.execute(CALLS)

    done = stage.run(main())
    assert outcomes(done) == ["approval_missing", "held_behind", "approval_missing"]
    assert tower._core.journal is not None
    assert len(tower._core.journal.approvals().result()) == 2
    return done


def resumed(stage: Stage, tower: Tower, state: str, decisions: Any = None, run_id: str = "r") -> BatchResult:
    """The batch gone on with."""

    async def main() -> BatchResult:
        async with tower.run(run_id, tenant="acme") as run:
            return await run.resume(state, decisions or {})

    return stage.run(main())


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """What was printed, as JSON."""
    return json.loads(capsys.readouterr().out)


def test_the_inbox(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """API section 7: `towerman approvals list`, `approve`, `deny`; the host goes on with the batch and finds them."""
    path = tmp_path / "j.db"
    journal = Journal(path, _wall=stage.clock.now)
    tower = desk(stage, journal)
    batch = suspended(stage, tower)
    state = batch.state()
    one, two = [request.approval_id for request in batch.pending]
    # The command would have another clock: by its calendar these requests are long over.
    with Journal(path, _wall=lambda: 1.0) as rewritten:
        found = rewritten.approvals(state="pending").result()
        assert {(row.approval_id, row.tool, row.call_id, row.index, row.tenant) for row in found} == {
            (one, "refund", "c1", 0, "acme"),
            (two, "refund", "c3", 2, "acme"),
        }
        assert rewritten.decide(one, True, by="ann").result().state == "approved"
        assert rewritten.decide(two, False, reason="not now", by="ann").result().state == "denied"
    fresh = desk(stage, Journal(path, _wall=stage.clock.now))
    done = resumed(stage, fresh, state)
    assert outcomes(done) == ["ok", "ok", "approval_denied"]
    assert done[2].message == "Not run: a person denied it: not now"
    assert stage.started == {"refund 1": 1, "after 1": 1}
    # Whoever comes later finds what has run, whatever its run is called.
    third = desk(stage, Journal(path, _wall=stage.clock.now))
    again = resumed(stage, third, state, run_id="another")
    assert outcomes(again) == ["ok", "ok", "approval_denied"]
    assert [result.replayed for result in again] == [True, True, False]
    assert stage.started == {"refund 1": 1, "after 1": 1}


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three requests in a journal, on real time; their names."""
    monkeypatch.chdir(tmp_path)
    tower = Tower(journal="towerman.db")

    @tower.tool(independent=True, requires_approval=True)
    def pay(to: str) -> str:
        return to

    batch = tower.execute_sync([Call("pay", {"to": f"x\x9b{n}"}, f"c{n}") for n in range(3)], run_id="r")
    names = [request.approval_id for request in batch.pending]
    Path("state.json").write_text(batch.state())
    tower.close()
    return names


def test_a_person_lists_and_decides(inbox: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The commands by themselves: tables, JSON, exit codes; arguments only when asked for, and never raw."""
    assert command(["approvals", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in inbox)
    assert "x" + "\\x9b" not in out
    assert command(["approvals", "list", "--arguments"]) == 0
    out = capsys.readouterr().out
    assert "\x9b" not in out
    assert '{"to":"x\\x9b0"}' in out
    assert command(["approvals", "list", "--arguments", "--json"]) == 0
    found = told(capsys)["approvals"]
    assert [json.loads(one["arguments"])["to"] for one in found] == ["x\x9b0", "x\x9b1", "x\x9b2"]
    assert [one["state"] for one in found] == ["pending"] * 3

    assert command(["approvals", "approve", inbox[0], "--by", "ann"]) == 0
    assert "approved" in capsys.readouterr().out
    assert command(["approvals", "approve", inbox[0], "--json"]) == 0
    assert told(capsys)["approvals"][0]["decided_by"] == "ann"
    assert command(["approvals", "deny", inbox[1], "--reason", "no  money\n"]) == 0
    assert "no money" in capsys.readouterr().out
    assert command(["approvals", "deny", inbox[2], inbox[0]]) == 2
    err = capsys.readouterr().err
    assert f"{inbox[0]}: this approval is approved; decided before that: {inbox[2]}" in err
    assert command(["approvals", "approve", "apr_none"]) == 2
    assert "there is no such approval" in capsys.readouterr().err
    assert command(["approvals", "list"]) == 0
    assert "no call waits for approval" in capsys.readouterr().out
    assert command(["approvals", "list", "--state", "expired"]) == 0
    assert "no call is expired" in capsys.readouterr().out
    assert command(["approvals", "list", "--state", "denied", "--run", "r", "--json"]) == 0
    assert [one["approval_id"] for one in told(capsys)["approvals"]] == [inbox[1], inbox[2]]

    tower = Tower(journal="towerman.db")

    @tower.tool(independent=True, requires_approval=True)
    def pay(to: str) -> str:
        return to

    with tower.run("r") as run:
        done = run.resume_sync(Path("state.json").read_text(), {})
    assert outcomes(done) == ["ok", "approval_denied", "approval_denied"]
    tower.close()


def test_there_is_no_inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a journal, or with a file that is none: one clear line, exit 2."""
    monkeypatch.chdir(tmp_path)
    assert command(["approvals", "list"]) == 2
    assert "there is no towerman.db here" in capsys.readouterr().err
    Path("towerman.db").write_text("nothing of ours, and long enough to be looked at" * 10)
    assert command(["approvals", "approve", "apr_1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_first_decision_that_was_written_counts(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S4: a host that says otherwise than the journal is told; one that says the same, or more, goes on."""
    path = tmp_path / "j.db"
    tower = desk(stage, Journal(path, _wall=stage.clock.now))
    batch = suspended(stage, tower)
    one, two = [request.approval_id for request in batch.pending]
    other = desk(stage, Journal(path, _wall=stage.clock.now))
    first = resumed(stage, other, batch.state(), {one: Denied("no"), two: Approved({"order": 2, "note": "edited"})})
    assert outcomes(first) == ["approval_denied", "ok", "ok"]
    assert stage.started == {"after 1": 1, "refund 2 edited": 1}
    third = desk(stage, Journal(path, _wall=stage.clock.now))
    with caplog.at_level(logging.WARNING, "towerman"):
        again = resumed(stage, third, batch.state(), {one: Approved(), two: Approved()})
    assert outcomes(again) == ["approval_denied", "ok", "ok"]
    assert f"approval {one} is denied already" in caplog.text
    assert third.statistics().approvals.ignored == 1
    assert stage.started == {"after 1": 1, "refund 2 edited": 1}


def test_a_yes_in_the_journal_holds_as_long_as_it_was_given_for(stage: Stage, tmp_path: Path) -> None:
    """R-126: the end of an approval goes through the journal, too."""
    path = tmp_path / "j.db"
    tower = desk(stage, Journal(path, _wall=stage.clock.now))
    batch = suspended(stage, tower)
    state = batch.state()
    one, _ = [request.approval_id for request in batch.pending]
    assert tower._core.journal is not None
    tower._core.journal.decide(one, True, expires_at=stage.clock.now() + 5.0).result()

    async def main() -> list[str]:
        import asyncio

        await asyncio.sleep(6.0)
        other = desk(stage, Journal(path, _wall=stage.clock.now))
        async with other.run("r", tenant="acme") as run:
            assert here().time() > 5.0
            return outcomes(await run.resume(state, {}))

    assert stage.run(main()) == ["approval_missing", "held_behind", "approval_missing"]
    assert not stage.started


def test_trouble_with_the_journal_is_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S14: requests that cannot be written, and decisions that cannot be read, are told; the host's own count, and
    nothing with an effect runs.
    """
    from concurrent.futures import Future

    tower = desk(stage, ":memory:")

    def fails(*_: object, **__: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(JournalUnavailable("full", "the disk is full"))
        return future

    for name in ("ask_approval", "approval", "decide"):
        monkeypatch.setattr(Journal, name, fails)

    async def main() -> tuple[BatchResult, BatchResult]:
        async with tower.run("r") as run:
            first = await run.execute(CALLS)
            decisions = {request.approval_id: Approved() for request in first.pending}
            return first, await run.resume(first.state(), decisions)

    with caplog.at_level(logging.WARNING, "towerman"):
        first, second = stage.run(main())
    assert outcomes(first) == ["approval_missing", "held_behind", "approval_missing"]
    assert outcomes(second) == ["ok", "ok", "ok"]
    assert "could not be written down: JournalUnavailable" in caplog.text
    assert "approvals in the journal could not be looked up: the disk is full" in caplog.text


def test_requests_for_what_is_no_json_are_written_without_arguments(stage: Stage) -> None:
    """What cannot be shown is asked for all the same."""
    tower = stage.tower(journal=":memory:")

    @tower.tool(independent=True, requires_approval=True)
    async def take(what: Any) -> str:
        return "taken"

    async def main() -> BatchResult:
        async with tower.run("r") as run:
            return await run.execute([Call("take", {"what": object.__new__(type("Odd", (), {}))})])

    batch = stage.run(main())
    (request,) = batch.pending
    assert tower._core.journal is not None
    assert tower._core.journal.approval(request.approval_id).result() is not None
