"""Plans with a name and a journal: written down whole, gone on with, one attempt at a time (R-43, S14)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from kit import Stage, codes, on_stage

from towerman import Approved, BatchResult, Call, Journal, JournalUnavailable, Tower
from towerman.calls import Batch
from towerman.documents import KeptBatch, read_document

stage = pytest.fixture(on_stage)

CANARY = "canary-5e1c"

PLAN = [
    Call("look", {"n": 1}, "a"),
    Call("write", {"n": "${a}"}, "b"),
    Call("write", {"n": 7}, "c", needs=("b",)),
]


def rows(path: Path, sql: str, *given: object) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        return db.execute(sql, given).fetchall()
    finally:
        db.close()


def dead(path: Path) -> None:
    """Let every process that has written to a file be one that is gone."""
    rows(path, "UPDATE owners SET pid = 999999999, beat = 0")


def maker(stage: Stage, path: Path, **options: Any) -> Tower:
    """A tower with a read and a write, each of which takes a second."""
    options.setdefault("journal", str(path))
    tower = stage.tower(**options)

    @tower.tool(reads="row")
    async def look(n: int) -> int:
        with stage.on("look"):
            await asyncio.sleep(1)
            return n + len(stage.spans)  # another value each time

    @tower.tool(independent=True, read_only=False)
    async def write(n: int) -> str:
        with stage.on("write"):
            await asyncio.sleep(1)
            return f"wrote {n}"

    return tower


async def hand_in(tower: Tower, calls: list[Call] = PLAN, name: str | None = "plan", run: str = "r") -> BatchResult:
    async with tower.run(run) as opened:
        return await opened.execute(calls, plan=True, batch_id=name)


def two_on(stage: Stage, path: Path, **options: Any) -> tuple[Tower, Tower]:
    """Two towers on one journal, as two programs are on one file: opened twice, it answers in real time only."""
    journal = Journal(path)
    return maker(stage, path, journal=journal), maker(stage, path, journal=journal, **options)


def kept(tower: Tower) -> list[KeptBatch]:
    assert tower.journal is not None
    return tower.journal.batches().result()


def test_r43_a_plan_with_a_name_is_written_down_whole_before_it_starts(stage: Stage, tmp_path: Path) -> None:
    """R-43: its calls stand in the journal while it is at work, and how it ended afterwards."""
    tower = maker(stage, tmp_path / "j.db")

    async def main() -> tuple[list[KeptBatch], BatchResult]:
        task = asyncio.ensure_future(hand_in(tower))
        while not stage.started["look"]:
            await asyncio.sleep(0)
        during = await asyncio.wrap_future(tower.journal.batches(run_id="r"))  # type: ignore[union-attr]  # it has one
        return during, await task

    during, done = stage.run(main())
    assert done.ok
    assert [(one.run_id, one.name, one.plan, one.size, one.state) for one in during] == [
        ("r", "plan", True, 3, "at work")
    ]
    (after,) = kept(tower)
    assert (after.state, after.ok, after.stored, after.attempts) == ("ended", 3, True, 1)
    assert tower.journal is not None
    document = tower.journal.arguments_of("batch", str(after.number)).result()
    assert document is not None and read_document(document).calls == Batch(tuple(PLAN)).calls


@pytest.mark.parametrize(("name", "plan"), [(None, True), ("plan", False)])
def test_what_has_no_name_or_is_no_plan_is_not_written_down(
    stage: Stage, tmp_path: Path, name: str | None, plan: bool
) -> None:
    """A plain batch costs what it did; a plan without a name could not be found again."""
    tower = maker(stage, tmp_path / "j.db")

    async def main() -> None:
        async with tower.run("r") as run:
            await run.execute([Call("write", {"n": 1}, "a")], plan=plan, batch_id=name)

    stage.run(main())
    assert kept(tower) == []


def test_g5_a_plan_that_is_refused_is_not_written_down(stage: Stage, tmp_path: Path) -> None:
    """G5: there is nothing to go on with."""
    tower = maker(stage, tmp_path / "j.db")
    done = stage.run(hand_in(tower, [Call("write", {"n": "${a}"}, "a")]))
    assert codes(done) == ["dependency_cycle"]
    assert kept(tower) == []


def test_s14_a_plan_with_other_calls_under_the_same_name_runs_nothing(stage: Stage, tmp_path: Path) -> None:
    """S14: the name stands for the same calls each time; half of one plan and half of another is neither."""
    tower = maker(stage, tmp_path / "j.db")
    stage.run(hand_in(tower, PLAN[:2]))
    before = stage.started.copy()
    done = stage.run(hand_in(tower, [*PLAN[:2], Call("write", {"n": 8}, "c")]))
    assert set(codes(done)) == {"idempotency_conflict"}
    assert [result.applied for result in done] == ["no"] * 3
    assert stage.started == before
    assert stage.run(hand_in(tower, PLAN[:2])).ok, "and the first one is answered as ever"


def test_s14_two_attempts_at_once_are_one(stage: Stage, tmp_path: Path) -> None:
    """S14: the second one waits and is answered, also where what a read comes to would be another value now."""
    one, two = two_on(stage, tmp_path / "j.db")

    async def main() -> tuple[BatchResult, BatchResult, float]:
        first, second = await asyncio.gather(hand_in(one), hand_in(two))
        return first, second, stage.clock.value

    first, second, lasted = stage.run(main())
    assert first.ok and second.ok
    assert [r.content for r in first] == [r.content for r in second]
    assert sorted((any(r.replayed for r in first), any(r.replayed for r in second))) == [False, True]
    assert stage.started == {"look": 1, "write": 2}
    assert lasted == 3.0
    statistics = [tower.statistics().journal for tower in (one, two)]
    assert sum(each.joined for each in statistics if each is not None) == 1


def test_r43_a_plan_whose_process_died_is_gone_on_with(stage: Stage, tmp_path: Path) -> None:
    """R-43, S14: what has finished is answered, what had begun is unknown, its dependents are skipped and say why;
    nothing runs twice, and once a person has said what came of it the rest runs.
    """
    path = tmp_path / "j.db"
    one, two = maker(stage, path), maker(stage, path)

    async def main() -> tuple[BatchResult, BatchResult]:
        first = asyncio.ensure_future(hand_in(one))
        while not stage.started["write"]:
            await asyncio.sleep(0.1)
        dead(path)
        second = await hand_in(two)
        assert two.journal is not None
        (unknown,) = await asyncio.wrap_future(two.journal.unknown())
        await asyncio.wrap_future(two.journal.settle(unknown.number, applied=True))
        third = await hand_in(two)
        await first
        return second, third

    second, third = stage.run(main())
    assert codes(second) == [None, "effect_unknown", "dependency_failed"]
    assert "call 1 (b)" in second[2].message
    assert second[0].replayed
    assert third.ok and [result.replayed for result in third] == [True, True, False]
    assert stage.started["look"] == 1


def test_s14_on_duplicate_conflict_refuses_a_plan_that_is_at_work(stage: Stage, tmp_path: Path) -> None:
    """S14: a tower that does not join says so at once, and what may take effect elsewhere is not called unapplied."""
    one, two = two_on(stage, tmp_path / "j.db", on_duplicate="conflict")

    async def main() -> BatchResult:
        first = asyncio.ensure_future(hand_in(one))
        while not stage.started["look"]:
            await asyncio.sleep(0.1)
        second = await hand_in(two)
        await first
        return second

    done = stage.run(main())
    assert set(codes(done)) == {"idempotency_conflict"}
    assert [result.applied for result in done] == ["no", "unknown", "unknown"]
    assert "is at work in process" in done[0].message
    assert stage.started == {"look": 1, "write": 2}


@pytest.mark.parametrize(("deadline", "code"), [(None, "wait_timeout"), (0.5, "deadline_exceeded")])
def test_g12_a_plan_waits_for_itself_elsewhere_no_longer_than_max_wait(
    stage: Stage, tmp_path: Path, deadline: float | None, code: str
) -> None:
    """G12: the wait has a limit, and so has the run."""
    one, two = two_on(stage, tmp_path / "j.db", max_wait=1.5)

    async def main() -> tuple[BatchResult, float]:
        first = asyncio.ensure_future(hand_in(one))
        while not stage.started["look"]:
            await asyncio.sleep(0)
        async with two.run("r", deadline=deadline) as run:
            second = await run.execute(PLAN, plan=True, batch_id="plan")
        waited = stage.clock.value
        await first
        return second, waited

    done, waited = stage.run(main())
    assert set(codes(done)) == {code}
    assert waited == pytest.approx(deadline or 1.5)
    assert stage.started == {"look": 1, "write": 2}


@pytest.mark.parametrize("how", ["caller", "run"])
def test_g1_a_plan_that_waits_for_itself_elsewhere_can_be_cancelled(stage: Stage, tmp_path: Path, how: str) -> None:
    """G1, G12: at once, with a result for each call; nothing is left behind, and the first one goes on."""
    one, two = two_on(stage, tmp_path / "j.db")

    async def main() -> tuple[BatchResult | None, float, BatchResult]:
        first = asyncio.ensure_future(hand_in(one))
        while not stage.started["look"]:
            await asyncio.sleep(0)
        async with two.run("r") as run:
            second = asyncio.ensure_future(run.execute(PLAN, plan=True, batch_id="plan"))
            await asyncio.sleep(0.5)
            if how == "run":
                run.cancel("enough")
                await second
            else:
                second.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await second
            return run.last_batch, stage.clock.value, await first

    second, at, first = stage.run(main())
    assert second is not None and codes(second) == ["cancelled"] * 3
    assert at == 0.5
    assert first.ok


def test_s10_a_plan_that_is_made_by_a_call_of_itself_is_refused(stage: Stage, tmp_path: Path) -> None:
    """S10: it would wait for itself for ever, and is told at once."""
    tower = maker(stage, tmp_path / "j.db")

    @tower.tool(independent=True, read_only=False)
    async def again() -> list[str | None]:
        inner = await hand_in(tower, calls)
        return [result.code for result in inner]

    calls = [Call("again", {}, "x")]
    done = stage.run(hand_in(tower, calls))
    assert done[0].value == ["would_deadlock"]
    assert stage.clock.value == 0.0


@pytest.mark.parametrize("turns", range(0, 40, 3))
def test_g1_g12_cancelled_at_any_moment_the_plan_can_be_gone_on_with(stage: Stage, tmp_path: Path, turns: int) -> None:
    """G12, R-43: whenever an attempt is given up, it has nothing of the plan any more, and the next one goes on."""
    tower = maker(stage, tmp_path / "j.db")

    async def main() -> BatchResult:
        task = asyncio.ensure_future(hand_in(tower))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await hand_in(tower)

    done = stage.run(main())
    assert all(result.ok or result.code in ("effect_unknown", "dependency_failed") for result in done)
    assert stage.clock.value < 10, "nobody waited for the attempt that was given up"
    assert [one.state for one in kept(tower)] == ["ended"]


@pytest.mark.parametrize("turns", range(0, 60, 4))
def test_g12_a_long_plan_is_written_down_a_slice_at_a_time(
    stage: Stage, tmp_path: Path, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G12: the loop has its turns while a plan is written down, and may end the run in any of them."""
    from towerman.runner import intake

    monkeypatch.setattr(intake, "SLICE", -1.0)
    tower = maker(stage, tmp_path / "j.db")
    calls = [Call("write", {"n": index}, f"s{index}") for index in range(100)]

    async def main() -> tuple[BatchResult, BatchResult]:
        async with tower.run("r") as run:
            task = asyncio.ensure_future(run.execute(calls, plan=True, batch_id="plan"))
            for _ in range(turns):
                await asyncio.sleep(0)
            run.cancel("enough")
            return await task, await run.execute(calls, plan=True, batch_id="plan")

    first, second = stage.run(main())
    assert len(first) == len(second) == 100
    assert all(result.ok or result.code == "effect_unknown" for result in second)
    assert max(stage.started.values()) <= 200


def test_a_response_of_a_provider_has_a_name_too(stage: Stage, tmp_path: Path) -> None:
    """The provider's id of the response stands for the plan where its caller gave it no name, and is another name."""
    tower = maker(stage, tmp_path / "j.db")

    async def main(**names: str) -> BatchResult:
        async with tower.run("r") as run:
            return await run.execute(Batch(tuple(PLAN), plan=True, **names))

    assert stage.run(main(response_id="x")).ok
    assert all(result.replayed for result in stage.run(main(response_id="x")))
    assert not any(result.replayed for result in stage.run(main(batch_id="x")))
    assert [(one.named, one.name, one.attempts) for one in kept(tower)] == [("batch", "x", 1), ("response", "x", 2)]


def test_g8_arguments_stand_in_one_table_that_can_be_off_or_sealed(stage: Stage, tmp_path: Path) -> None:
    """G8: with a cipher nothing of a plan can be read in the file; without arguments it is not kept at all."""

    class Mask:
        def encrypt(self, data: bytes) -> bytes:
            return bytes(byte ^ 0x5A for byte in data)

        decrypt = encrypt

    plan = [Call("text", {"text": CANARY}, "a")]
    for name, journal in (
        ("sealed", Journal(tmp_path / "sealed.db", cipher=Mask())),
        ("bare", Journal(tmp_path / "bare.db", arguments=False)),
        ("plain", Journal(tmp_path / "plain.db")),
    ):
        tower = maker(stage, tmp_path / "x", journal=journal)

        @tower.tool(independent=True, read_only=False)
        async def text(text: str) -> int:
            return len(text)

        assert stage.run(hand_in(tower, plan)).ok
        (known,) = journal.batches().result()
        assert known.stored is (name != "bare")
        path = tmp_path / f"{name}.db"
        tables = [table for (table,) in rows(path, "SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {table for table in tables if CANARY in repr(rows(path, f"SELECT * FROM {table}"))}
        assert found == ({"arguments"} if name == "plain" else set())


def test_a_plan_that_cannot_be_written_down_starts_nothing_that_may_change_something(
    stage: Stage, tmp_path: Path
) -> None:
    """S14: a journal that cannot be written starts no effect; what reads goes on."""
    path = tmp_path / "j.db"
    tower = maker(stage, path)
    assert tower.journal is not None
    real = tower.journal.begin_batch

    def broken(*words: Any, **more: Any) -> Any:
        future = real(*words, **more)
        future.cancel()
        from concurrent.futures import Future

        other: Future[Any] = Future()
        other.set_exception(JournalUnavailable("full", "the disk is full"))
        return other

    tower.journal.begin_batch = broken  # type: ignore[method-assign]  # what a full disk does
    done = stage.run(hand_in(tower))
    assert codes(done) == [None, "journal_unavailable", "journal_unavailable"]
    tower.journal.begin_batch = real  # type: ignore[method-assign]
    again = stage.run(hand_in(tower))
    assert again.ok


def test_r43_what_is_known_is_answered_while_nothing_can_be_written(stage: Stage, tmp_path: Path) -> None:
    """R-43, S14: a full disk starts nothing, but finished and unknown steps are told from what is there."""
    tower = maker(stage, tmp_path / "j.db")
    assert tower.journal is not None
    plan = [
        Call("write", {"n": 1}, "a"),
        Call("stay", {}, "b"),
        Call("write", {"n": 2}, "c", needs=("a",)),
        Call("late", {}, "d", needs=("c",)),
    ]
    ready = False

    @tower.tool(independent=True, timeout=3)
    async def stay() -> str:
        await asyncio.sleep(1 if ready else 100)
        return "stayed"

    @tower.tool(independent=True)
    async def late() -> str:
        await asyncio.sleep(1 if ready else 100)
        return "late"

    async def first() -> BatchResult:
        async with tower.run("r", deadline=2.5) as run:
            return await run.execute(plan, plan=True, batch_id="plan")

    before = stage.run(first())
    assert [result.applied for result in before] == ["yes", "unknown", "yes", "unknown"]
    real = tower.journal.begin_batch

    def full(*_: Any, **__: Any) -> Any:
        from concurrent.futures import Future

        other: Future[Any] = Future()
        other.set_exception(JournalUnavailable("full", "the disk is full"))
        return other

    tower.journal.begin_batch = full  # type: ignore[method-assign]  # what a full disk does
    again = stage.run(hand_in(tower, plan))
    assert [result.replayed for result in again] == [True, True, True, True]
    assert [result.content for result in again][::2] == ["wrote 1", "wrote 2"]
    assert [result.applied for result in again] == [result.applied for result in before]
    new = stage.run(hand_in(tower, [Call("write", {"n": 4}, "a")], "new"))
    assert codes(new) == ["journal_unavailable"]
    tower.journal.begin_batch = real  # type: ignore[method-assign]
    assert stage.started["write"] == 2


def test_what_ended_in_error_is_told_again_and_the_rest_goes_on(stage: Stage, tmp_path: Path) -> None:
    """R-43: an answer is an answer; what did not start is tried again, and if_failed holds as it did."""
    tower = maker(stage, tmp_path / "j.db")
    broken = True

    @tower.tool(independent=True, read_only=True)
    async def fail() -> str:
        raise ValueError(CANARY)

    @tower.tool(independent=True, read_only=True)
    async def slow() -> str:
        await asyncio.sleep(100 if broken else 1)
        return "slow"

    plan = [
        Call("fail", {}, "a"),
        Call("slow", {}, "b"),
        Call("write", {"n": 1}, "c", needs=("a",)),
        Call("write", {"n": 2}, "d", needs=("a",), if_failed="run_anyway"),
        Call("write", {"n": 3}, "e", needs=("b",)),
    ]

    async def first() -> BatchResult:
        async with tower.run("r", deadline=5) as run:
            return await run.execute(plan, plan=True, batch_id="plan")

    assert codes(stage.run(first())) == [
        "handler_error", "deadline_exceeded", "dependency_failed", None, "dependency_failed",
    ]  # fmt: skip
    broken = False
    again = stage.run(hand_in(tower, plan))
    assert codes(again) == ["handler_error", None, "dependency_failed", None, None]
    assert [result.replayed for result in again] == [True, False, False, True, False]
    assert json.loads(json.dumps([result.content for result in again][3:])) == ["wrote 2", "wrote 3"]
    assert stage.started["write"] == 2


def test_prune_forgets_a_plan_before_its_calls(stage: Stage, tmp_path: Path) -> None:
    """Of a plan that could go on no finished step is forgotten; one with an unknown step stays; else both go."""
    path = tmp_path / "j.db"
    wall = 1_000_000.0
    tower = maker(stage, path, journal=Journal(path, _wall=lambda: wall))
    journal = Journal(path, _wall=lambda: wall)
    stage.run(hand_in(tower, name="old"))
    stage.run(hand_in(tower, name="cut"))
    stage.run(hand_in(tower, name="unknown"))

    def state(name: str) -> tuple[int, int]:
        batches = rows(path, "SELECT key FROM batches WHERE name = ?", name)
        calls = rows(path, "SELECT count(*) FROM calls WHERE of_batch = ?", batches[0][0]) if batches else [(0,)]
        return len(batches), calls[0][0]

    wall += 1_000
    rows(path, "UPDATE batches SET token = x'01', ended_at = NULL WHERE name = 'cut'")
    key = rows(path, "SELECT key FROM batches WHERE name = 'unknown'")[0][0]
    rows(path, "UPDATE calls SET state = 'unknown' WHERE slot = 2 AND of_batch = ?", key)
    rows(path, "UPDATE owners SET pid = 999999999, beat = ?", wall - 10)  # heard of a while ago
    done = journal.prune(100)
    assert (done.batches, done.calls) == (1, 3)
    assert (state("old"), state("cut"), state("unknown")) == ((0, 0), (1, 3), (1, 3))
    wall += 1_000
    done = journal.prune(100)
    assert (done.batches, done.calls) == (1, 3)
    assert (state("cut"), state("unknown")) == ((0, 0), (1, 3))
    (left,) = journal.batches().result()
    assert left.name == "unknown"
    assert rows(path, "SELECT count(*) FROM arguments WHERE kind = 'batch'") == [(1,)]
    journal.close()


# ------------------------------------------------------------------ how long tools take (S6)


# ==================================================================== one call, whichever way it comes

ASKED = [
    Call("pay", {"item": "car", "eur": "${p.n}", "note": "$${p.n}"}, "a"),
    Call("told", {"what": "${a.receipt}"}, "m"),
    Call("price", {}, "p"),
    Call("pay", {"item": "bus", "eur": 7, "note": "$$7"}, "z"),
]
"""A payment whose arguments a result is filled into, one with nothing but an escape, and a step after the first."""


def shop(stage: Stage, path: Path, **options: Any) -> Tower:
    """A tower whose payments a person is asked for; the price is another one each time."""
    tower = stage.tower(journal=str(path), **options)

    @tower.tool(reads="prices")
    async def price() -> dict[str, int]:
        with stage.on("price"):
            return {"n": 149 + stage.started["price"]}

    @tower.tool(writes="account:{item}", requires_approval=True)
    async def pay(item: str, eur: int, note: str) -> dict[str, str]:
        with stage.on("pay"):
            return {"receipt": f"{item} for {eur} {note}"}

    @tower.tool(independent=True)
    async def told(what: str) -> str:
        with stage.on("told"):
            return what

    return tower


@pytest.mark.parametrize("secret", [None, "one and the same"])
@pytest.mark.parametrize(
    ("ways", "named"),
    [(ways, True) for ways in ("rr", "rh", "hr", "rhr", "hh", "ssh", "sh", "srs")]
    + [(ways, False) for ways in ("rr", "ss", "srs")],  # what has no name is new each time that it is handed in
)
def test_s14_a_step_that_was_asked_for_is_one_call_whichever_way_it_comes(
    stage: Stage, tmp_path: Path, ways: str, named: bool, secret: str | None
) -> None:
    """S14: gone on with from its state (r), from the state of what was gone on with (s), or handed in again (h), in
    another process each time: what ran once is told again, and what refers to it gets that.
    """
    path = tmp_path / "j.db"
    options = {"secret": secret} if secret is not None else {}

    async def yes(_: object) -> Approved:
        return Approved()

    async def hand(tower: Tower, approver: Any = None) -> BatchResult:
        async with tower.run("r", approver=approver) as run:
            return await run.execute(ASKED, plan=True, batch_id="b" if named else None)

    async def go_on(tower: Tower, state: str, *names: str) -> BatchResult:
        async with tower.run("r") as run:
            return await run.resume(state, {name: Approved() for name in names})

    first = stage.run(hand(shop(stage, path, **options)))
    assert codes(first) == ["approval_missing", "held_behind", None, "approval_missing"]
    state, (one, two) = first.state(), [request.approval_id for request in first.pending]
    assert json.loads(state)["towerman_state"] == 2
    if "s" in ways:  # one of the two is decided, and what is left is written down anew
        half = stage.run(go_on(shop(stage, path, **options), state, two))
        assert codes(half) == ["approval_missing", "held_behind", None, None]
        later = half.state()
        assert json.loads(later)["towerman_state"] == 2
    for way in ways:
        tower = shop(stage, path, **options)
        if way == "h":
            done = stage.run(hand(tower, yes))
        elif way == "s":
            done = stage.run(go_on(tower, later, one))
        else:
            done = stage.run(go_on(tower, state, one, two))
        assert codes(done) == [None] * 4, way
        assert done[1].content == "car for 150 ${p.n}"
    assert stage.started == {"price": 1, "pay": 2, "told": 1}


def test_s14_a_step_with_other_arguments_is_another_call_on_a_state_too(stage: Stage, tmp_path: Path) -> None:
    """S14: what it is known by is what was handed in: a step of the same name that says something else is refused, and
    nothing of it was applied.
    """
    path = tmp_path / "j.db"

    async def hand(tower: Tower, calls: list[Call], approver: Any = None) -> BatchResult:
        async with tower.run("r", approver=approver) as run:
            return await run.execute(calls, plan=True)

    async def yes(_: object) -> Approved:
        return Approved()

    def paid(eur: object) -> list[Call]:
        given = {"item": "car", "eur": eur, "note": ""}
        return [Call("price", {}, "p"), Call("pay", given, "a", idempotency_key="k")]

    first = stage.run(hand(shop(stage, path), paid("${p.n}")))
    assert codes(stage.run(hand(shop(stage, path), paid(7), yes))) == [None, None]

    async def go_on(tower: Tower) -> BatchResult:
        async with tower.run("r") as run:
            return await run.resume(first.state(), {first.pending[0].approval_id: Approved()})

    done = stage.run(go_on(shop(stage, path)))
    assert codes(done) == [None, "idempotency_conflict"]
    assert (done[1].started, done[1].applied) == (False, "no")
    assert stage.started["pay"] == 1


def test_a_state_of_the_first_form_is_gone_on_with(stage: Stage, tmp_path: Path) -> None:
    """A state that was written before filled-in arguments were told apart is read, and its step runs once."""
    path = tmp_path / "j.db"

    async def hand() -> BatchResult:
        async with shop(stage, path).run("r") as run:
            return await run.execute(ASKED, plan=True)

    first = stage.run(hand())
    outer = json.loads(first.state())
    payload = json.loads(outer["payload"])
    for each in payload["open"]:
        del each["written"]
    old = json.dumps({"towerman_state": 1, "payload": json.dumps(payload), "signature": None})

    async def go_on() -> BatchResult:
        async with shop(stage, path).run("r") as run:
            return await run.resume(old, {one.approval_id: Approved() for one in first.pending})

    for _ in range(2):
        assert codes(stage.run(go_on())) == [None] * 4
    assert stage.started["pay"] == 2


def means(path: Path) -> dict[str, tuple[float, float]]:
    return {tool: (weight, seconds) for tool, weight, seconds in rows(path, "SELECT tool, weight, seconds FROM means")}


def timed(stage: Stage, path: Path, **options: Any) -> Tower:
    """A tower with a tool that takes long, and one that does not."""
    tower = stage.tower(journal=Journal(path), **options)  # it stays open when the tower is closed

    @tower.tool(independent=True, read_only=True)
    async def short(n: int = 0) -> int:
        with stage.on(f"short {n}"):
            await asyncio.sleep(1)
        return n

    @tower.tool(independent=True, read_only=True)
    async def long(n: int = 0) -> int:
        with stage.on(f"long {n}"):
            await asyncio.sleep(10)
        return n

    return tower


def test_s6_what_one_process_has_learned_orders_the_plans_of_the_next(stage: Stage, tmp_path: Path) -> None:
    """S6: the longest remaining path goes first, by means that are kept in the journal; by hops where none are."""
    path = tmp_path / "j.db"
    plan = [
        Call("short", {"n": 0}, "a"),
        Call("short", {"n": 1}, "b", needs=("a",)),
        Call("long", {"n": 2}, "c"),
    ]

    async def main(tower: Tower, name: str) -> float:
        before = stage.clock.value
        async with tower.run("r", max_concurrency=1) as run:
            await run.execute(plan, plan=True, batch_id=name)
        return before

    first = timed(stage, path)
    stage.run(main(first, "one"))
    assert stage.spans[0][0] == "short 0", "two hops before one"
    stage.run(first.aclose())
    kept(first)  # which comes behind what was told
    assert means(path) == {"short": (2, 1.0), "long": (1, 10.0)}
    stage.spans.clear()
    second = timed(stage, path)
    stage.run(main(second, "two"))
    assert [name for name, _, _ in stage.spans] == ["long 2", "short 0", "short 1"], "ten seconds before two"
    stage.run(second.aclose())
    kept(second)
    assert means(path) == {"short": (4, 1.0), "long": (2, 10.0)}, "told once each, not what was read again"


def test_means_are_told_now_and_then_and_at_the_end(stage: Stage, tmp_path: Path) -> None:
    """Many calls make few writes; what is not told yet is told when the tower ends."""
    path = tmp_path / "j.db"
    tower = timed(stage, path)

    async def main() -> None:
        async with tower.run("r") as run:
            await run.execute([Call("short", {})])
            await asyncio.wrap_future(tower.journal.counts())  # type: ignore[union-attr]  # it has one
            await run.execute([Call("short", {})], batch_id="x")
            assert await asyncio.wrap_future(tower.journal.means()) == {"short": (2, 1.0)}  # type: ignore[union-attr]
            for _ in range(5):
                await run.execute([Call("short", {})])
            assert await asyncio.wrap_future(tower.journal.means()) == {"short": (2, 1.0)}  # type: ignore[union-attr]
            await run.execute([Call("long", {}) for _ in range(9)])
            await asyncio.sleep(30)
            await run.execute([Call("short", {})])
            assert (await asyncio.wrap_future(tower.journal.means()))["short"] == (8, 1.0)  # type: ignore[union-attr]
            await run.execute([Call("short", {})])
        await tower.aclose()

    stage.run(main())
    kept(tower)  # which comes behind what was told
    assert means(path) == {"short": (9, 1.0), "long": (9, 10.0)}


def test_a_plain_batch_opens_no_journal_for_means(stage: Stage, tmp_path: Path) -> None:
    """Nothing is opened before something is asked: reads without a name ask nothing."""
    path = tmp_path / "j.db"
    tower = timed(stage, path)

    async def main() -> None:
        await tower.execute([Call("short", {})])
        await tower.aclose()

    stage.run(main())
    assert not path.exists()


def test_means_of_two_processes_are_taken_together(tmp_path: Path) -> None:
    """Each counts as often as it has answers; above a weight the past gives way, and what is no time is left out."""
    path = tmp_path / "j.db"
    with Journal(path) as one, Journal(path) as two:
        one.learn({"t": (3, 1.0), "u": (1, 2.0)}).result()
        two.learn({"t": (1, 5.0), "bad": (1, float("nan")), "none": (0, 1.0), "minus": (1, -1.0)}).result()
        assert one.means().result() == {"t": (4, 2.0), "u": (1, 2.0)}
        two.learn({"t": (10_000, 4.0)}).result()
        assert means(path)["t"][0] == 1000.0
        two.learn({"t": (1000, 8.0)}).result()
        assert one.means().result()["t"] == (1000, pytest.approx(6.0, abs=0.01))


def test_g8_means_are_bounded_and_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name for each call does not fill the file; what nobody has told of for long is forgotten; no value is there."""
    from towerman.journal import means as table

    monkeypatch.setattr(table, "MOST_TOOLS", 5)
    wall = 1000.0
    with Journal(tmp_path / "j.db", _wall=lambda: wall) as journal:
        for number in range(9):
            wall += 1
            journal.learn({f"t{number}": (1, 1.0)}).result()
        assert sorted(journal.means().result()) == ["t4", "t5", "t6", "t7", "t8"]
        assert journal.prune(2.5).means == 2
        assert sorted(journal.means().result()) == ["t6", "t7", "t8"]
    columns = [name for _, name, *_ in rows(tmp_path / "j.db", "PRAGMA table_info(means)")]
    assert columns == ["tool", "weight", "seconds", "told_at"]


def test_a_journal_that_cannot_say_how_long_tools_take_costs_no_plan(stage: Stage, tmp_path: Path) -> None:
    """The order goes by what is learned here then."""
    tower = timed(stage, tmp_path / "j.db")
    assert tower.journal is not None
    real = tower.journal.means

    def broken() -> Any:
        from concurrent.futures import Future

        real().result()
        future: Future[Any] = Future()
        future.set_exception(JournalUnavailable("locked", "another program holds its lock"))
        return future

    tower.journal.means = broken  # type: ignore[method-assign]  # what a lock does
    done = stage.run(hand_in(tower, [Call("short", {}, "a"), Call("short", {"n": "${a}"}, "b")]))
    assert done.ok
