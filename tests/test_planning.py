"""Plans on whole towers: references filled in, order foreseen, failures handed down, gone on with; on virtual time."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, codes, on_stage, run_virtual

from towerman import Approved, BatchResult, Budget, Call, Denied, PolicyError, Tower
from towerman.calls import Batch
from towerman.clock import VirtualClock
from towerman.testing import Rehearsal

stage = pytest.fixture(on_stage)

CANARY = "canary-7b21"


def outcomes(batch: Any) -> list[str]:
    """The code of each result, or ok."""
    return [result.code or "ok" for result in batch]


def planner(stage: Stage, **options: Any) -> Tower:
    """A tower with tools for plans: `give` hands a value on, `take` tells what it got, `fail` fails."""
    tower = stage.tower(**options)

    @tower.tool(independent=True)
    async def give(value: Any, seconds: float = 0.0) -> Any:
        with stage.on("give"):
            await asyncio.sleep(seconds)
            return value

    @tower.tool(independent=True)
    async def take(got: Any = None, more: Any = None, seconds: float = 0.0) -> str:
        with stage.on("take"):
            await asyncio.sleep(seconds)
            return json.dumps([got, more])

    @tower.tool(independent=True)
    async def fail(seconds: float = 0.0) -> str:
        with stage.on("fail"):
            await asyncio.sleep(seconds)
            raise ValueError(CANARY)

    return tower


def run_plan(stage: Stage, tower: Tower, *calls: Call, **options: Any) -> BatchResult:
    async def main() -> BatchResult:
        async with tower.run(**options) as run:
            return await run.execute(list(calls), plan=True)

    return stage.run(main())


# ------------------------------------------------------------------ values


def test_r39_a_whole_reference_keeps_its_type_and_inside_text_it_is_pasted(stage: Stage) -> None:
    value = {"position": [59.9, 10.7], "tags": {"a/b": None, "n": True}}
    batch = run_plan(
        stage,
        planner(stage),
        Call("give", {"value": value}, "a"),
        Call("take", {"got": {"$ref": "a#/position"}, "more": [{"x": "${a.tags.n}"}, "$$ and ${a.position[0]}"]}, "b"),
        Call("take", {"got": {"$ref": "a#/tags/a~1b"}, "more": "all: ${a}"}, "c"),
    )
    assert [json.loads(result.content) for result in batch[1:]] == [
        [[59.9, 10.7], [{"x": True}, "$ and 59.9"]],
        [None, 'all: {"position":[59.9,10.7],"tags":{"a/b":null,"n":true}}'],
    ]


def test_what_is_filled_in_is_never_read_for_references(stage: Stage) -> None:
    batch = run_plan(
        stage,
        planner(stage),
        Call("give", {"value": "$${b} $$$$ {x}"}, "a"),
        Call("give", {"value": {"$$ref": "a"}}, "b"),
        Call("take", {"got": {"$ref": "a"}, "more": {"$ref": "b"}}, "c"),
        Call("take", {"got": "so: ${a} ${b}"}, "d"),
    )
    assert json.loads(batch[2].content) == ["${b} $$ {x}", {"$ref": "a"}]
    assert json.loads(batch[3].content)[0] == 'so: ${b} $$ {x} {"$ref":"a"}'


def test_r39_a_step_gets_copies_of_what_it_names(stage: Stage) -> None:
    tower = planner(stage)

    @tower.tool(independent=True)
    async def spoil(things: list[Any]) -> int:
        things.append("spoilt")
        things[0]["x"] = "spoilt"
        return len(things)

    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": [{"x": 1}]}, "a"),
        Call("spoil", {"things": "${a}"}, "b"),
        Call("take", {"got": "${a}", "more": "${b}"}, "c"),
    )
    assert batch[0].value == [{"x": 1}]
    assert json.loads(batch[2].content) == [[{"x": 1}], 2]


def test_without_plan_nothing_is_read_as_a_reference(stage: Stage) -> None:
    tower = planner(stage)

    async def main() -> BatchResult:
        return await tower.execute([Call("give", {"value": 1}, "a"), Call("give", {"value": "costs $${5}"}, "b")])

    assert stage.run(main())[1].value == "costs $${5}"


def test_arguments_as_text_are_a_plan_too(stage: Stage) -> None:
    batch = run_plan(
        stage,
        planner(stage),
        Call("give", '{"value": 7}', "a"),
        Call("take", '{"got": "${a}"}', "b"),
        Call("take", '{"got": ', "c"),
    )
    assert outcomes(batch) == ["ok", "ok", "invalid_arguments"]
    assert json.loads(batch[1].content) == [7, None]


def test_a_reference_that_leads_nowhere_refuses_its_call_and_names_the_step(stage: Stage) -> None:
    batch = run_plan(
        stage,
        planner(stage),
        Call("give", {"value": {"x": CANARY}}, "a"),
        Call("take", {"got": "${a.y}"}, "b"),
        Call("take", {"got": "${b}"}, "c"),
        Call("take", {"got": "${a.x}"}, "d"),
    )
    assert outcomes(batch) == ["ok", "bad_reference", "dependency_failed", "ok"]
    assert "call 0 (a)" in batch[1].message
    assert not batch[1].started
    assert CANARY not in batch[1].message + batch[1].content + batch[2].content


def test_what_is_filled_in_is_checked_like_any_argument(stage: Stage) -> None:
    tower = planner(stage)

    @tower.tool(independent=True)
    async def count(number: int) -> int:
        return number + 1

    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": CANARY}, "a"),
        Call("give", {"value": 4}, "b"),
        Call("count", {"number": "${a}"}, "c"),
        Call("count", {"number": "${b}"}, "d"),
    )
    assert outcomes(batch) == ["ok", "ok", "invalid_arguments", "ok"]
    assert batch[3].value == 5
    assert CANARY not in batch[2].message


# ------------------------------------------------------------------ refused whole (G5)


@pytest.mark.parametrize(
    ("calls", "code"),
    [
        ([Call("give", {"value": "${a}"}, "a")], "dependency_cycle"),
        ([Call("give", {"value": "${b}"}, "a"), Call("give", {"value": "${a}"}, "b")], "dependency_cycle"),
        ([Call("give", {"value": "${b}"}, "a"), Call("give", {"value": 1}, "b", needs=("a",))], "dependency_cycle"),
        ([Call("give", {"value": 1}, "a", needs=("zzz",))], "unknown_dependency"),
        ([Call("give", {"value": "${zzz}"}, "a")], "unknown_dependency"),
        ([Call("give", {"value": 1}, "a"), Call("give", {"value": 2}, "a")], "duplicate_call_id"),
        ([Call("give", {"value": "${a"}, "a")], "bad_reference"),
        ([Call("give", {"value": {"$ref": 3}}, "a")], "bad_reference"),
    ],
)
@pytest.mark.parametrize("more", [0, 3])
def test_g5_r30_to_r33_a_bad_plan_runs_nothing(stage: Stage, calls: list[Call], code: str, more: int) -> None:
    others = [Call("give", {"value": index}, f"other-{index}") for index in range(more)]
    batch = run_plan(stage, planner(stage), *others, *calls)
    assert codes(batch) == [code] * (more + len(calls))
    assert not stage.started
    assert all(result.message for result in batch)


def test_p20_a_diamond_overlaps_in_the_middle_and_comes_back_in_order(stage: Stage) -> None:
    tower = planner(stage)
    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": 1, "seconds": 1}, "a"),
        Call("give", {"value": 2, "seconds": 3}, "b", needs=("a",)),
        Call("give", {"value": "${a}", "seconds": 1}, "c"),
        Call("take", {"got": "${b}", "more": "${c}"}, "d"),
    )
    assert [result.index for result in batch] == [0, 1, 2, 3], "R-40"
    assert json.loads(batch[3].content) == [2, 1]
    assert stage.peak == 2
    assert stage.clock.value == 4.0


def test_p20_when_the_first_fails_the_others_are_skipped_and_name_it(stage: Stage) -> None:
    batch = run_plan(
        stage,
        planner(stage),
        Call("fail", {}, "a"),
        Call("give", {"value": 1}, "b", needs=("a",)),
        Call("give", {"value": "${a}"}, "c"),
        Call("take", {"got": "${b}", "more": "${c}"}, "d"),
        Call("give", {"value": 1}, "e"),
    )
    assert outcomes(batch) == ["handler_error", *["dependency_failed"] * 3, "ok"]
    assert [result.outcome for result in batch[1:4]] == ["skipped"] * 3
    assert all("call 0 (a)" in result.message for result in batch[1:4]), "R-38"
    assert not stage.started["take"]


def test_r38_if_failed_run_anyway_runs_and_a_step_that_names_the_result_does_not(stage: Stage) -> None:
    batch = run_plan(
        stage,
        planner(stage),
        Call("fail", {"seconds": 2}, "a"),
        Call("take", {"got": "sorry"}, "b", needs=("a",), if_failed="run_anyway"),
        Call("take", {"got": "${a}"}, "c", if_failed="run_anyway"),
        Call("take", {"got": "${c}"}, "d", if_failed="run_anyway"),
        Call("take", {"got": "${b}"}, "e"),
    )
    assert outcomes(batch) == ["handler_error", "ok", "dependency_failed", "dependency_failed", "ok"]
    assert stage.clock.value == 2.0


def test_a_long_chain_that_runs_anyway_and_names_what_failed_does_not_recurse(stage: Stage) -> None:
    chain = [Call("take", {"got": f"${{s{index}}}"}, f"s{index + 1}", if_failed="run_anyway") for index in range(5_000)]
    batch = run_plan(stage, planner(stage), Call("fail", {}, "s0"), *chain)
    assert outcomes(batch) == ["handler_error", *["dependency_failed"] * 5_000]


@pytest.mark.parametrize("bad", [False, True])
def test_a_long_plan_is_read_and_linked_beside_the_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    """A plan of thousands of steps does not hold up the loop, which others share; what comes of it is the same."""
    from towerman.runner import intake

    threads: list[bool] = []
    real, graph = intake.read_plan, intake.Plan

    def reading(batch: Batch) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return real(batch)

    def linking(*words: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return graph(*words)

    monkeypatch.setattr(intake, "read_plan", reading)
    monkeypatch.setattr(intake, "Plan", linking)
    size = intake.LONG
    calls = [Call("give", {"value": 1}, "s0")]
    calls += [Call("give", {"value": f"${{s{index // 2}}}"}, f"s{index}") for index in range(1, size)]
    if bad:
        calls[0] = Call("give", {"value": f"${{s{size - 1}}}"}, "s0")
    tower = planner(stage)
    batch = run_plan(stage, tower, *calls)
    assert threads == ([False] if bad else [False, False])
    assert codes(batch) == ["dependency_cycle" if bad else None] * size
    if not bad:
        assert {result.value for result in batch} == {1}
    threads.clear()
    run_plan(stage, tower, *calls[: size - 1])
    assert threads[0], "a short one is not worth a thread"


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16, 64, 256])
def test_g1_a_long_plan_that_is_cancelled_while_it_is_read(stage: Stage, turns: int) -> None:
    """G1, G12: also while a thread is at it each step has its result, and nothing is left behind."""
    from towerman.runner import intake

    tower = planner(stage)
    calls = [Call("give", {"value": 1, "seconds": 1}, "s0")]
    calls += [Call("give", {"value": f"${{s{index // 2}}}"}, f"s{index}") for index in range(1, 2 * intake.LONG)]

    async def main() -> BatchResult | None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute(calls, plan=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            run.cancel("enough")
            await task
            return run.last_batch

    batch = stage.run(main())
    assert batch is not None and set(codes(batch)) <= {None, "cancelled", "dependency_failed"}
    assert len(batch) == len(calls)


def test_r37_no_barrier_between_levels(stage: Stage) -> None:
    for limit in (2, 3, 4):
        before = stage.clock.value
        run_plan(
            stage,
            planner(stage),
            Call("give", {"value": 1, "seconds": 0.3}, "a"),
            Call("give", {"value": 2, "seconds": 0.01}, "b"),
            Call("give", {"value": "${b}", "seconds": 0.3}, "c"),
            max_concurrency=limit,
        )
        assert stage.clock.value - before == pytest.approx(0.31)


@pytest.mark.parametrize("most", [4, 5, 6])
def test_s2_calls_of_a_plan_that_stand_behind_siblings_at_a_rate_are_not_timed(stage: Stage, most: int) -> None:
    """S2: whoever waits for its own siblings only, by a limit or by a rate, is not refused for having waited long."""
    tower = stage.tower()

    @tower.tool(independent=True, rate="5/10s")
    async def fast() -> None:
        await asyncio.sleep(1)

    @tower.tool(independent=True)
    async def slow() -> None:
        await asyncio.sleep(8)

    some = [Call("fast", {}, f"c{index}") for index in range(60)]
    batch = run_plan(
        stage, tower, Call("slow", {}, "s"), *some, Call("fast", {}, "last", ("c0",)), max_concurrency=most
    )
    assert outcomes(batch) == ["ok"] * 62


def test_a_plan_is_not_cut(stage: Stage) -> None:
    batch = run_plan(
        stage, planner(stage, max_calls_per_batch=2), *[Call("give", {"value": n}, f"s{n}") for n in range(6)]
    )
    assert batch.ok


# ------------------------------------------------------------------ order by what may be touched (S1)


def shelf(stage: Stage) -> tuple[Tower, list[str]]:
    tower = planner(stage)
    story: list[str] = []

    @tower.tool(writes="row:{row}")
    async def put(row: str, seconds: float = 1.0) -> str:
        story.append(f"put {row}")
        await asyncio.sleep(seconds)
        story.append(f"put {row} ended")
        return row

    @tower.tool(reads="row:{row}")
    async def look(row: str) -> str:
        story.append(f"look {row}")
        return row

    @tower.tool(writes="other:{name}")
    async def note(name: str) -> str:
        story.append(f"note {name}")
        return name

    @tower.tool(writes=lambda row: f"row:{row}")
    async def anywhere(row: str) -> str:
        story.append(f"anywhere {row}")
        return row

    return tower, story


def test_s1_an_open_key_locks_its_prefix_until_it_is_known(stage: Stage) -> None:
    tower, story = shelf(stage)
    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": "7", "seconds": 5}, "a"),
        Call("put", {"row": "${a}"}, "b"),
        Call("look", {"row": "9"}, "c"),
        Call("note", {"name": "9"}, "d"),
    )
    assert batch.ok
    assert story == ["note 9", "put 7", "put 7 ended", "look 9"], "row 9 could have been what b puts"
    assert batch[2].waited_for == ("call 1",)


def test_s1_two_steps_with_known_keys_overlap_whatever_else_is_open(stage: Stage) -> None:
    tower, story = shelf(stage)
    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": 2}, "a"),
        Call("put", {"row": "1", "seconds": "${a}"}, "b"),
        Call("put", {"row": "2", "seconds": "${a}"}, "c"),
    )
    assert batch.ok
    assert story == ["put 1", "put 2", "put 1 ended", "put 2 ended"]


def test_s1_what_a_callable_says_of_open_arguments_may_be_anything(stage: Stage) -> None:
    tower, story = shelf(stage)
    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": "7", "seconds": 5}, "a"),
        Call("put", {"row": "1"}, "b"),
        Call("anywhere", {"row": "${a}"}, "c"),
        Call("note", {"name": "x"}, "d"),
        Call("take", {"got": 1}, "e"),
    )
    assert batch.ok
    assert story == ["put 1", "put 1 ended", "anywhere 7", "note x"]
    assert batch[3].waited_for[:1] == ("call 2",)
    assert batch[4].waited_for == ()


def test_s1_what_touches_more_than_was_foreseen_is_refused(stage: Stage, tmp_path: Path) -> None:
    tower = planner(stage)
    (tmp_path / "in").mkdir()

    @tower.tool(writes=f"file:{tmp_path}/in/{{name}}")
    async def save(name: str) -> str:
        with stage.on("save"):
            return name

    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": "../out"}, "a"),
        Call("give", {"value": "good"}, "b"),
        Call("save", {"name": "${a}"}, "c"),
        Call("save", {"name": "${b}"}, "d"),
    )
    assert outcomes(batch) == ["ok", "ok", "invalid_arguments", "ok"]
    assert stage.started["save"] == 1


def test_r44_a_conflict_that_contradicts_a_reference_does_not_deadlock(stage: Stage) -> None:
    tower, story = shelf(stage)
    batch = run_plan(
        stage,
        tower,
        Call("put", {"row": "${b}"}, "a"),
        Call("put", {"row": "1"}, "b"),
        Call("put", {"row": "1"}, "c", needs=("a",)),
    )
    assert batch.ok
    assert story[::2] == ["put 1", "put 1", "put 1"]


# ------------------------------------------------------------------ with the rest of admission


def test_an_open_step_is_asked_for_when_it_is_known_and_goes_on_elsewhere(stage: Stage) -> None:
    def make() -> Tower:
        tower = planner(stage, secret="one and the same")

        @tower.tool(independent=True, read_only=False, requires_approval=lambda text: "Oslo" in text)
        async def send(text: str) -> str:
            with stage.on("send"):
                return text

        return tower

    calls = [
        Call("give", {"value": {"city": "Oslo ${x}", "list": [1, "$$"]}}, "a"),
        Call("send", {"text": "to ${a.city}"}, "b"),
        Call("take", {"got": "${a.list}", "more": "${b}"}, "c"),
        Call("take", {"got": "$$", "more": "${a.city}"}, "d"),
    ]
    calls[0] = Call("give", {"value": {"city": "Oslo $${x}", "list": [1, "$$$$"]}}, "a")
    first = run_plan(stage, make(), *calls)
    assert outcomes(first) == ["ok", "approval_missing", "held_behind", "ok"]
    (request,) = first.pending
    assert request.arguments == {"text": "to Oslo ${x}"}
    state = first.state()

    async def on(answer: Approved | Denied) -> BatchResult:
        async with make().run() as run:
            return await run.resume(state, {request.approval_id: answer})

    done = stage.run(on(Approved()))
    assert outcomes(done) == ["ok"] * 4
    assert done[1].content == "to Oslo ${x}"
    assert json.loads(done[2].content) == [[1, "$$"], "to Oslo ${x}"]
    assert stage.started == {"give": 1, "send": 1, "take": 2}
    denied = stage.run(on(Denied("no")))
    assert outcomes(denied) == ["ok", "approval_denied", "dependency_failed", "ok"]


def test_s8_open_steps_ask_budgets_when_their_price_is_known(stage: Stage) -> None:
    tower = planner(stage)

    @tower.tool(independent=True, spends=lambda pages: {"cost": pages})
    async def print_(pages: float) -> float:
        with stage.on("print"):
            return pages

    @tower.tool(independent=True, spends={"cost": 3})
    async def bind(pages: float) -> float:
        with stage.on("bind"):
            return pages

    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": 4}, "a"),
        Call("print_", {"pages": "${a}"}, "b"),
        Call("bind", {"pages": "${a}"}, "c"),
        Call("bind", {"pages": "${b}"}, "d"),
        budget=Budget(cost=6),
    )
    # c and d tell their price at once, so the 6 are theirs when b asks.
    assert outcomes(batch) == ["ok", "budget_exhausted", "ok", "dependency_failed"]
    assert stage.started["print"] == 0


def test_g1_a_plan_that_is_cancelled_seals_each_step_once(stage: Stage) -> None:
    tower = planner(stage)
    seen: list[int] = []

    async def main() -> BatchResult:
        async with tower.run() as run:
            task = asyncio.ensure_future(
                run.execute(
                    [
                        Call("give", {"value": 1, "seconds": 5}, "a"),
                        Call("take", {"got": "${a}"}, "b"),
                        Call("take", {"got": "${b}"}, "c", if_failed="run_anyway"),
                    ],
                    plan=True,
                    on_result=lambda result: seen.append(result.index),
                )
            )
            await asyncio.sleep(1)
            run.cancel("enough")
            return await task

    batch = stage.run(main())
    assert outcomes(batch) == ["cancelled"] * 3
    assert sorted(seen) == [0, 1, 2]
    assert stage.started == {"give": 1}


def test_a_step_cannot_refer_to_what_was_deferred(stage: Stage, tmp_path: Path) -> None:
    tower = planner(stage, journal=str(tmp_path / "j.db"), pools={"slow": 1})

    @tower.tool(independent=True, read_only=False, pools=["slow"], when_busy="defer")
    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    batch = run_plan(
        stage,
        tower,
        Call("slow", {"seconds": 5}, "a"),
        Call("slow", {"seconds": 5}, "b"),
        Call("take", {"got": "${b}"}, "c"),
        Call("take", {"got": "${a}"}, "d"),
    )
    assert outcomes(batch) == ["ok", "deferred", "dependency_failed", "ok"]
    assert "call 1 (b)" in batch[2].message


def test_r43_a_plan_that_is_handed_in_again_goes_on_from_the_journal(stage: Stage, tmp_path: Path) -> None:
    broken = True

    def make() -> Tower:
        tower = planner(stage, journal=str(tmp_path / "j.db"), max_result_bytes=400)

        @tower.tool(independent=True, read_only=False)
        async def write(text: str) -> str:
            with stage.on("write"):
                return text

        @tower.tool(independent=True, read_only=True)
        async def check(text: str) -> str:
            if broken:
                await asyncio.sleep(1_000)
            return text

        return tower

    calls = [
        Call("give", {"value": {"text": "123", "long": ["x" * 900]}}, "a"),
        Call("write", {"text": "${a.text}"}, "b"),
        Call("check", {"text": "${b}"}, "c"),
        Call("write", {"text": "${a.long[0]} ${c}"}, "d"),
    ]

    async def hand_in() -> BatchResult:
        async with make().run("r", deadline=5) as run:
            return await run.execute(calls, plan=True, batch_id="plan")

    first = stage.run(hand_in())
    assert outcomes(first) == ["ok", "ok", "deadline_exceeded", "dependency_failed"]
    broken = False
    second = stage.run(hand_in())
    assert outcomes(second) == ["ok"] * 4
    assert [result.replayed for result in second] == [True, True, False, False]
    assert second[3].value == "x" * 900 + " 123", "whole, though the result of a was cut"
    assert stage.started == {"give": 1, "write": 2}


def test_g8_no_event_and_no_repr_shows_what_was_filled_in(stage: Stage) -> None:
    events: list[str] = []
    tower = planner(stage, observers=[lambda event: events.append(repr(event))])
    batch = run_plan(
        stage,
        tower,
        Call("give", {"value": {"x": CANARY}}, "a"),
        Call("take", {"got": "${a.x}"}, "b"),
        Call("take", {"got": "${a.x.y}"}, "c"),
    )
    stage.run(tower.aclose())
    assert events
    assert CANARY not in "".join(events) + repr(batch) + batch.timeline() + batch[2].message


def test_plan_and_calls_exclude_each_other(stage: Stage) -> None:
    tower = planner(stage)

    async def main() -> None:
        async with tower.run() as run:
            with pytest.raises(PolicyError, match="both were given"):
                await run.execute([Call("give", {"value": 1})], plan={"plan": []})

    stage.run(main())


def test_explain_tells_the_order_of_a_plan_and_runs_nothing(stage: Stage) -> None:
    tower, story = shelf(stage)
    told = tower.explain(
        [
            Call("give", {"value": "7"}, "a"),
            Call("put", {"row": "${a}"}, "b"),
            Call("look", {"row": "9"}, "c"),
            Call("anywhere", {"row": "${a}"}, "d"),
        ],
        plan=True,
    )
    pairs = {(edge.before, edge.after) for edge in told.edges}
    assert {(0, 1), (1, 2), (0, 3)} <= pairs
    assert story == []
    refused = tower.explain([Call("give", {"value": "${a}"}, "a")], plan=True)
    assert "dependency_cycle" in str(refused)


def test_what_a_plan_comes_to_is_told_by_name_and_kept_while_it_waits(stage: Stage) -> None:
    """A plan that names its outputs: references in them are filled in; what has not answered, or leads nowhere, is left
    out, and after a person has decided the rest is there, too.
    """
    tower = planner(stage, secret="one and the same")

    @tower.tool(independent=True, read_only=False, requires_approval=True)
    async def send(text: str) -> str:
        return text

    calls = (Call("give", {"value": {"x": [1, 2]}}, "a"), Call("send", {"text": "hello"}, "b"))
    named = {"all": "${a.x}", "sent": "got ${b}", "lost": "${a.y}", "plain": "costs $$5", "more": [{"$ref": "a#/x/1"}]}

    async def main() -> tuple[Any, Any, Any]:
        async with tower.run() as run:
            first = await run.execute(Batch(calls, plan=True, outputs=named))
            done = await run.resume(first.state(), {first.pending[0].approval_id: Approved()})
            plain = await run.execute(Batch(calls[:1], plan=True, outputs={"fixed": 1}))
        return first.outputs, done.outputs, plain.outputs

    first, done, plain = stage.run(main())
    assert first == {"all": [1, 2], "plain": "costs $5", "more": [2]}
    assert done == {**first, "sent": "got hello"}
    assert plain == {"fixed": 1}
    assert run_plan(stage, tower, calls[0]).outputs is None


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (
            Batch((Call("give", {"value": "${2}"}, "1"), Call("give", {}, "2")), plan=True, ordered=True),
            "bad_reference",
        ),
        (Batch((Call("give", {"value": "${9}"}, "1"),), plan=True, numbered=True), "bad_reference"),
        (Batch((Call("give", {}, "1"),), plan=True, outputs={"x": "${9}"}), "unknown_dependency"),
    ],
)
def test_g5_what_the_form_of_a_plan_forbids_runs_nothing(stage: Stage, batch: Batch, code: str) -> None:
    tower = planner(stage)
    done = stage.run(tower.execute(batch))
    assert set(codes(done)) == {code}
    assert not stage.started


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("where", ["calls", "plan", "both"])
def test_a_plan_document_is_a_plan_wherever_it_stands(stage: Stage, where: str, as_text: bool) -> None:
    """API section 5: the native form, as data or as text; `turn` writes it so that it can be read again."""
    steps = [
        {"id": "a", "tool": "give", "arguments": {"value": {"x": 1}}},
        {"id": "b", "tool": "take", "arguments": {"got": {"$ref": "a#/x"}}},
        {"id": "c", "tool": "fail"},
        {"id": "d", "tool": "take", "arguments": {"got": "${b}"}, "needs": ["c"], "if_failed": "run_anyway"},
    ]
    document: Any = {"plan": steps}
    given: Any = json.dumps(document) if as_text else document
    tower = planner(stage)

    async def main() -> BatchResult:
        if where == "calls":
            return await tower.execute(given)
        return await (tower.execute(plan=given) if where == "plan" else tower.execute(given, plan=True))

    batch = stage.run(main())
    assert outcomes(batch) == ["ok", "ok", "handler_error", "ok"]
    assert json.loads(batch[3].content) == ["[1, null]", None]
    written = batch.turn()[0]
    assert [step["id"] for step in written["plan"]] == ["a", "b", "c", "d"]  # type: ignore[attr-defined]  # plain data
    again = stage.run(tower.execute(written))
    assert [one.content for one in again] == [one.content for one in batch]


def test_a_value_that_was_not_kept_whole_refuses_who_refers_to_it(stage: Stage, tmp_path: Path) -> None:
    """What the model was shown of a result does not say of which type it was: nothing is guessed from it."""
    tower = planner(stage, journal=str(tmp_path / "j.db"))
    plain = [Call("give", {"value": "123"}, "a"), Call("take", {}, "b")]
    plan = [Call("give", {"value": "123"}, "a"), Call("take", {}, "b"), Call("take", {"got": "${a}"}, "c")]

    async def main() -> BatchResult:
        async with tower.run("r") as run:
            await run.execute(plain, batch_id="plan")
            return await run.execute(plan, plan=True, batch_id="plan")

    batch = stage.run(main())
    assert outcomes(batch) == ["ok", "ok", "bad_reference"]
    assert "not kept whole" in batch[2].message


# ------------------------------------------------------------------ random plans


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), size=st.integers(1, 40), limit=st.integers(1, 6))
def test_random_plans_give_the_values_of_a_run_one_by_one(seed: int, size: int, limit: int) -> None:
    """G4, R-29, R-34, R-36: whatever the timing, each step starts after what it needs and sees the same values."""
    draw = random.Random(seed)
    order = list(range(size))
    draw.shuffle(order)
    place = {step: at for at, step in enumerate(order)}
    arguments: list[dict[str, Any]] = []
    expected: dict[int, Any] = {}
    for step in range(size):
        before = [other for other in range(size) if place[other] < place[step]]
        chosen = draw.sample(before, min(len(before), draw.randint(0, 3)))
        arguments.append(
            {"parts": [draw.choice((f"${{s{one}}}", {"$ref": f"s{one}"}, f"<${{s{one}.n}}>")) for one in chosen]}
        )
    for step in order:
        parts: list[Any] = []
        for part in arguments[step]["parts"]:
            written = part["$ref"] if isinstance(part, dict) else part.strip("<>${}")
            other = int(written.partition(".")[0][1:])
            parts.append(f"<{expected[other]['n']}>" if str(part).startswith("<") else expected[other])
        expected[step] = {"n": step, "parts": parts}
    lengths = [draw.choice((0.0, 0.5, 1.0, 3.0)) for _ in range(size)]
    started: list[int] = []
    running = peak = 0
    clock = VirtualClock()
    tower = Tower(_clock=clock)

    @tower.tool(independent=True)
    async def step(n: int, parts: list[Any]) -> dict[str, Any]:
        nonlocal running, peak
        started.append(n)
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(lengths[n])
        running -= 1
        return {"n": n, "parts": parts}

    async def main() -> BatchResult:
        async with tower.run(max_concurrency=limit) as run:
            calls = [Call("step", {"n": n, **arguments[n]}, f"s{n}") for n in range(size)]
            return await run.execute(calls, plan=True)

    batch = run_virtual(main(), clock)
    assert [result.value for result in batch] == [expected[step] for step in range(size)]
    assert sorted(started) == list(range(size))
    assert peak <= limit


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), turns=st.integers(0, 60), how=st.sampled_from(("caller", "run", "call")))
def test_g1_g3_random_plans_that_are_cancelled_anywhere(seed: int, turns: int, how: str) -> None:
    """G1, G3, G12: whenever a plan is cancelled, each step has one result, and nothing is held or left waiting."""
    draw = random.Random(seed)
    clock = VirtualClock()
    tower = Tower(_clock=clock, undeclared="independent")

    @tower.tool(independent=True)
    async def give(value: Any = None) -> Any:
        await asyncio.sleep(draw.choice((0.0, 0.0, 1.0)))
        return value

    @tower.tool(writes="row:{row}")
    async def put(row: int, value: Any = None) -> dict[str, int]:
        await asyncio.sleep(0)
        return {"row": row}

    @tower.tool(independent=True)
    async def fail(value: Any = None) -> None:
        raise ValueError

    calls = []
    for step in range(draw.randint(1, 25)):
        before = draw.randrange(step) if step else None
        arguments: dict[str, Any] = {} if before is None else {"value": [f"${{s{before}}}"]}
        tool = draw.choice(("give", "give", "put", "fail"))
        if tool == "put":
            arguments["row"] = (
                f"${{s{before}.row}}" if before is not None and draw.random() < 0.3 else draw.randrange(3)
            )
        calls.append(Call(tool, arguments, f"s{step}", if_failed=draw.choice(("skip", "run_anyway"))))

    async def main() -> BatchResult | None:
        async with tower.run(max_concurrency=3) as run:
            task = asyncio.ensure_future(run.execute(calls, plan=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            if how == "caller":
                task.cancel()
            else:
                run.cancel(index=draw.randrange(25) if how == "call" else None)
            try:
                return await task
            except asyncio.CancelledError:
                return run.last_batch

    batch = run_virtual(main(), clock)
    if batch is not None:  # else it was cancelled before it was handed in
        assert [result.index for result in batch] == list(range(len(calls)))
    tower.validate()
    seen = tower.statistics()
    assert not (seen.running or seen.waiting or seen.behind or seen.orphans)


def starts_of(tower: Tower, calls: list[Call], seconds: dict[str, float], beside: int = 0) -> list[int]:
    """In which order the calls of a plan that take permits start, by their argument; `beside`: calls of another run."""
    with Rehearsal(tower) as rehearsal:
        for name, length in seconds.items():
            rehearsal.script(name, seconds=length)

        async def main() -> None:
            async with tower.run() as mine, tower.run() as theirs, asyncio.TaskGroup() as group:
                group.create_task(theirs.execute([Call("z", {"i": 0}) for _ in range(beside)]))
                await asyncio.sleep(0.001)
                assert (await mine.execute(Batch(calls=tuple(calls), plan=True))).ok

        rehearsal.run(main())
        started = [one for name in seconds if name not in ("free", "z") for one in rehearsal.of(name)]
        return [int(str(one.arguments["i"])) for one in sorted(started, key=lambda one: one.started)]


def plan_of(*chains: tuple[str, str, list[str], int]) -> list[Call]:
    """Calls with their tools and needs, each with so many further ones behind it, which take nothing."""
    calls: list[Call] = []
    for id, tool, needs, length in chains:
        calls.append(Call(tool, {"i": len(calls)}, id=id, needs=tuple(needs)))
        for number in range(length):
            before = f"{id}.{number - 1}" if number else id
            calls.append(Call("free", {"i": len(calls)}, id=f"{id}.{number}", needs=(before,)))
    return calls


@pytest.mark.parametrize("beside", [0, 2])
def test_s6_a_plan_keeps_its_order_where_others_wait_for_something_else(beside: int) -> None:
    """S6: what is behind the longest remaining path goes first, whoever waits for what this plan does not touch."""
    tower = Tower(pools={"q": 1, "z": 1}, max_wait=1e6)
    for name, pools in (("q", ["q"]), ("z", ["z"]), ("free", [])):
        tower.add_tool(number_of, name=name, pools=pools, independent=True)
    calls = plan_of(("zero", "q", [], 0), ("short", "q", [], 0), ("long", "q", ["zero"], 9))
    assert starts_of(tower, calls, {"q": 10.0, "z": 100.0, "free": 10.0}, beside) == [0, 2, 1]


def test_s6_what_comes_later_and_is_less_urgent_does_not_pass_those_who_stand_behind_another() -> None:
    """S6: those who stood behind one that moves on to what blocks it now go by urgency beside those who come then."""
    tower = Tower(pools={"q": 1, "p": 1})
    for name, pools in (("a", ["q"]), ("long", ["p"]), ("both", ["q", "p"]), ("c", ["q"]), ("free", [])):
        tower.add_tool(number_of, name=name, pools=pools, independent=True)
    calls = plan_of(
        ("zero", "a", [], 40), ("long", "long", [], 39), ("one", "both", [], 30), ("two", "c", [], 8),
        ("three", "c", [], 6), ("six", "c", ["zero"], 17), ("five", "c", ["zero"], 0),
    )  # fmt: skip
    ids = {call.arguments["i"]: call.id for call in calls}  # type: ignore[index, call-overload]  # as they were made
    order = starts_of(tower, calls, {"a": 1.0, "long": 50.0, "both": 1.0, "c": 1.0, "free": 0.01})
    assert [ids[number] for number in order] == ["zero", "long", "six", "two", "three", "five", "one"]


async def number_of(i: int) -> str:
    """Does nothing."""
    return str(i)
