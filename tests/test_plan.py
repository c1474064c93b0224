"""The plan of one batch: edges, readiness, skipping, rank, refusals (rules S1, S6; G4, G5)."""

from __future__ import annotations

import copy
import heapq
import itertools
import json
import random
import tracemalloc
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towerman.calls import COMPATIBLE, IS, IX, Hold, S, X
from towerman.errors import CODES, TowermanError
from towerman.plan import Group, Plan, PlanRefused, graph, resolve_needs

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

Needs = Sequence[Sequence[int]]
Holds = Sequence[Sequence[Hold]]


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the published inputs are not here: {path.parent.name}/{name}")
    return [json.loads(line) for line in path.read_text().splitlines()]


# The model: what the room promises, computed pair by pair.


def one_by_one(needs: Needs) -> list[int]:
    """The order of a run one call at a time, smallest index first, by looking at all calls each time."""
    order: list[int] = []
    while len(order) < len(needs):
        order.append(min(i for i in range(len(needs)) if i not in order and set(needs[i]) <= set(order)))
    return order


def conflicts(a: Sequence[Hold], b: Sequence[Hold]) -> bool:
    return any(ka == kb and not COMPATIBLE[ma][mb] for ka, ma in a for kb, mb in b)


def conflict_pairs(needs: Needs, holds: Holds) -> set[tuple[int, int]]:
    return {(a, b) for a, b in itertools.combinations(one_by_one(needs), 2) if conflicts(holds[a], holds[b])}


def closure(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    nodes = {node for pair in pairs for node in pair}
    reached = set(pairs)
    for middle in nodes:
        into = [a for a in nodes if (a, middle) in reached]
        out = [b for b in nodes if (middle, b) in reached]
        reached |= {(a, b) for a in into for b in out}
    return reached


def drain(plan: Plan) -> list[int]:
    """Run a plan to its end, every call answering, and tell the order of starting."""
    started: list[int] = []
    ready = list(plan.start())
    while ready:
        index = ready.pop(0)
        started.append(index)
        ready += plan.seal(index, True)[0]
        ready += plan.end(index)
    return started


def waits(plan: Plan, size: int) -> set[tuple[int, int]]:
    """The `after` edges that a plan tells of, read from its blockers before anything has run."""
    return {(other, i) for i in range(size) for kind, other in plan.blockers(i, limit=2 * size) if kind == "after"}


@st.composite
def batches(draw: st.DrawFn, most: int = 9) -> tuple[list[tuple[int, ...]], list[tuple[Hold, ...]]]:
    """A random DAG whose needs point both ways, and random holds over a few keys."""
    size = draw(st.integers(1, most))
    place = draw(st.permutations(range(size))) if draw(st.booleans()) else list(range(size))
    needs: list[tuple[int, ...]] = [()] * size
    for position, index in enumerate(place):
        if position and draw(st.booleans()):
            needs[index] = tuple(draw(st.lists(st.sampled_from(place[:position]), max_size=3, unique=True)))
    keys = draw(st.integers(1, 3))
    hold = st.tuples(st.sampled_from("abc"[:keys]), st.sampled_from((IS, IX, S, X)))
    holds = [
        tuple(draw(st.lists(hold, max_size=keys, unique_by=lambda pair: pair[0]))) if draw(st.integers(0, 3)) else ()
        for _ in range(size)
    ]
    return needs, holds


# Needs by id.


def test_nothing_needed_costs_nothing() -> None:
    """A batch without needs is told apart by looking at the lists only: ids are not even read."""

    class Unread(Sequence[str]):
        def __len__(self) -> int:
            raise AssertionError("read")

        def __getitem__(self, index: object) -> str:
            raise AssertionError("read")

    assert resolve_needs(Unread(), [(), [], ()]) is None
    assert resolve_needs([], []) is None


def test_p20_needs_are_resolved_by_exact_id() -> None:
    """P-20: needs name ids exactly; repeats count once; a lone string is one id; unneeded repeats do no harm."""
    ids = ["a", "A", "call 3", "x", "x", ""]
    assert resolve_needs(ids, [(), ["a"], ["A", "a", "A"], "call 3", (), ["call 3"]]) == [
        (),
        (0,),
        (1, 0),
        (2,),
        (),
        (2,),
    ]


def test_needs_may_point_forward() -> None:
    """A call may need one that was emitted after it."""
    assert resolve_needs(["a", "b"], [["b"], ()]) == [(1,), ()]


def test_lengths_must_agree() -> None:
    """Needs for another number of calls are a mistake of the caller, told at once."""
    with pytest.raises(ValueError, match="needs: 1 entries for 2 calls"):
        resolve_needs(["a", "b"], [["a"]])
    for wrong in ({"needs": [(0,)]}, {"holds": [()]}, {"estimates": [1.0]}):
        with pytest.raises(ValueError, match="1 entries for 2 calls"):
            Plan(2, **wrong)
    for index in (-1, 2):
        with pytest.raises(ValueError, match=r"needs\[1\]: .* is no call of a batch of 2"):
            Plan(2, [(), (index,)])


def test_r30_a_cycle_is_refused_with_its_members() -> None:
    """R-30, G5: the cycle is told member by member, each needing the next, whoever else hangs on it."""
    with pytest.raises(PlanRefused) as caught:
        resolve_needs(["w", "a", "b", "c", "free"], [["c"], ["b"], ["c"], ["a", "free"], ()])
    assert caught.value.code == "dependency_cycle"
    assert caught.value.members == (1, 2, 3)
    assert "'a' needs call 'b', call 'b' needs call 'c', call 'c' needs call 'a'" in caught.value.message
    assert "'w'" not in caught.value.message


def test_r30_a_plan_made_by_indexes_refuses_a_cycle_too() -> None:
    """R-30: the graph itself refuses a cycle, also where ids were never given."""
    with pytest.raises(PlanRefused) as caught:
        Plan(3, [(2,), (), (0,)])
    assert (caught.value.code, caught.value.members) == ("dependency_cycle", (0, 2))
    assert "call 0 needs call 2, call 2 needs call 0" in str(caught.value)


def test_r31_a_call_that_needs_itself_is_a_cycle() -> None:
    """R-31: a self-dependency is a cycle of one."""
    with pytest.raises(PlanRefused) as caught:
        resolve_needs(["a", "b"], [(), ["b", "a"]])
    assert (caught.value.code, caught.value.members) == ("dependency_cycle", (1,))
    assert "call 'b' needs itself" in caught.value.message


def test_r32_an_unknown_id_is_its_own_error() -> None:
    """R-32: an unknown id is not a cycle; who needs it is named, and ids that come near."""
    with pytest.raises(PlanRefused) as caught:
        resolve_needs(["read_1", "read_2", "", ""], [(), ["READ_1"], ["zzz"], ["zzz", "read_2"]])
    assert caught.value.code == "unknown_dependency"
    assert caught.value.members == (1, 2, 3)
    message = caught.value.message
    assert "call 'read_2' needs 'READ_1', call 2 needs 'zzz', call 3 needs 'zzz'" in message
    assert "near 'READ_1' come 'read_1', 'read_2'" in message


def test_r32_an_unknown_id_near_nothing_lists_the_ids_there_are() -> None:
    """R-32: where no id comes near, the message lists what there is; an empty id is no id."""
    with pytest.raises(PlanRefused, match=r"the ids of this batch are 'a', 'b'$"):
        resolve_needs(["a", "b"], [["qqqqqqq"], ()])
    with pytest.raises(PlanRefused, match=r"the ids of this batch are 'a'$"):
        resolve_needs(["a", ""], [(), [""]])
    with pytest.raises(PlanRefused, match=r"the ids of this batch are 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h' \.\.\.$"):
        resolve_needs("abcdefghi", [["zzz"], *[()] * 8])
    with pytest.raises(PlanRefused, match="no call of this batch has an id"):
        resolve_needs(["", ""], [["a"], ()])


def test_r33_a_need_on_a_repeated_id_is_refused() -> None:
    """R-33: which of two calls of one id is meant cannot be known, so it is not guessed."""
    with pytest.raises(PlanRefused) as caught:
        resolve_needs(["a", "b", "a", "c"], [(), ["a"], (), ()])
    assert (caught.value.code, caught.value.members) == ("duplicate_call_id", (0, 2))
    assert "'a': needed by a call, but several calls have this id" in caught.value.message


@pytest.mark.parametrize(
    ("ids", "needs"),
    [
        pytest.param([f"{i:09}" * 100 for i in range(2000)], [[f"{i}" * 5000] for i in range(2000)], id="unknown"),
        pytest.param([f"{i // 2:09}" * 100 for i in range(2000)], None, id="repeated"),
        pytest.param([f"{i:09}" * 100 for i in range(2000)], None, id="cycle"),
        pytest.param(["\ud800" * 70 + str(i) for i in range(2000)], None, id="surrogates"),
    ],
)
def test_messages_are_bounded(ids: list[str], needs: list[list[str]] | None) -> None:
    """Thousands of endless ids make a short message all the same, and it can be encoded."""
    with pytest.raises(PlanRefused) as caught:
        resolve_needs(ids, needs or [[ids[i - 1]] for i in range(len(ids))])
    assert len(caught.value.message.encode()) < 8000
    assert "more" in caught.value.message
    assert len(caught.value.members) == 2000


def test_a_refusal_is_an_exception_of_the_project() -> None:
    """What is refused can be caught with the rest, copied, and shows its message; its codes are published."""
    refused = PlanRefused("dependency_cycle", (1, 2), "in a circle")
    assert isinstance(refused, TowermanError)
    assert refused.code in CODES
    twin = copy.copy(refused)
    assert (twin.code, twin.members, str(twin)) == ("dependency_cycle", (1, 2), "in a circle")


def test_plans_that_models_emitted_run_or_are_refused() -> None:
    """R-30, G5: links as models drew them are followed in order or refused whole, and nothing else happens."""
    ran = 0
    refused: list[str] = []
    for model in ("hf_codellama13b", "hf_mistral7b", "mm_codellama13b", "mm_mistral7b"):
        for row in rows(f"taskbench_pred_{model}.jsonl"):
            ids: list[str] = [node["task"] for node in row["task_nodes"]]
            needs = [[link["source"] for link in row["task_links"] if link["target"] == task] for task in ids]
            try:
                resolved = resolve_needs(ids, needs)
            except PlanRefused as refusal:
                refused.append(refusal.code)
                continue
            ran += 1
            started = drain(Plan(len(ids), resolved))
            assert sorted(started) == list(range(len(ids)))
            for index, wanted in enumerate(resolved or ()):
                assert all(started.index(other) < started.index(index) for other in wanted)
    assert ran == 116
    assert sorted(refused) == ["duplicate_call_id"] * 3 + ["unknown_dependency"]


# Readiness.


def test_r35_all_calls_without_edges_are_ready_at_once() -> None:
    """R-35: whatever waits for nothing may be admitted at once; without an edge that is a range."""
    plan = Plan(5)
    assert plan.trivial
    assert plan.start() == range(5)
    assert plan.seal(2, True) == ([], [])
    assert plan.end(2) == []
    assert list(plan.start()) == []
    assert Plan(0).start() == range(0)
    assert list(Plan(4, [(), (0,), (), ()]).start()) == [0, 2, 3]


def test_a_batch_without_edges_keeps_nothing_for_its_calls() -> None:
    """10,000 calls that never conflict leave a plan of fixed size, whatever they hold, also after they have run."""
    size = 10_000
    cases: list[Holds | None] = [
        None,
        [()] * size,
        [(("k", S),)] * size,
        [(("k", IS),)] * size,
        [(("root", IX), (f"k{i}", X)) for i in range(size)],
        [(("root", IS if i % 2 else S),) for i in range(size)],
    ]
    for holds in cases:
        tracemalloc.start()
        try:
            plan = Plan(size, [()] * size, holds, [1.0] * size)
            for index in plan.start():
                plan.seal(index, index % 3 == 0)
                plan.end(index)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert plan.trivial
        assert plan.edge_count == plan.junction_count == 0
        assert kept < size  # bytes: less than one a call


def test_r29_p20_a_diamond_runs_in_order_and_its_middle_together() -> None:
    """R-29, P-20: b and c start when a has answered, d when both have; needs settle at the seal, not at the end."""
    plan = Plan(4, [(), (0,), (0,), (1, 2)])
    assert list(plan.start()) == [0]
    assert plan.seal(0, True) == ([1, 2], [])
    assert plan.seal(0, True) == ([], [])
    assert plan.end(0) == []
    assert plan.end(1) == []
    assert plan.seal(1, True) == ([], [])
    assert plan.seal(2, True) == ([3], [])
    plan.validate()


def test_r37_no_barrier_between_levels() -> None:
    """R-37: c starts when b has answered, though a of b's level still runs."""
    plan = Plan(3, [(), (), (1,)])
    assert set(plan.start()) == {0, 1}
    assert plan.seal(1, True) == ([2], [])


def test_r38_p20_what_needs_a_failed_call_is_skipped_and_the_first_failure_named() -> None:
    """R-38, P-20: dependents are skipped all the way down, each with the call at the root; siblings go on."""
    plan = Plan(6, [(), (0,), (0,), (1, 2), (5,), ()])
    assert set(plan.start()) == {0, 5}
    assert plan.seal(0, False) == ([], [(1, 0), (2, 0), (3, 0)])
    assert plan.seal(3, True) == ([], [])
    assert plan.end(3) == []
    assert plan.seal(5, True) == ([4], [])
    assert plan.seal(4, False) == ([], [])
    plan.validate()


def test_r38_what_runs_anyway_waits_for_a_failed_call_and_is_not_skipped() -> None:
    plan = Plan(5, [(), (0,), (0, 1), (1,), (2,)], anyway=(2,))
    assert list(plan.start()) == [0]
    assert plan.seal(0, False) == ([2], [(1, 0), (3, 0)]), "2 runs anyway; what needs only what is skipped does not"
    assert plan.seal(2, True) == ([4], [])
    plan.validate()


def test_r38_what_runs_anyway_still_waits_for_the_others() -> None:
    plan = Plan(3, [(), (), (0, 1)], [(), (("k", X),), (("k", X),)], anyway=(2,))
    assert sorted(plan.start()) == [0, 1]
    assert plan.seal(0, False) == ([], [])
    assert plan.seal(1, False) == ([], []), "the work of 1, which holds the same, goes on"
    assert plan.end(1) == [2]
    plan.validate()


def test_r38_the_first_of_two_failures_is_the_culprit() -> None:
    """R-38: a call skipped once is not skipped again for a second failure."""
    plan = Plan(3, [(), (), (0, 1)])
    plan.start()
    assert plan.seal(1, False) == ([], [(2, 1)])
    assert plan.seal(0, False) == ([], [])
    assert plan.seal(0, True) == ([], [])


def test_s1_after_settles_when_the_work_has_ended() -> None:
    """S1, G7: a write behind a write waits for the end of its work, whatever its result was and when it was sealed."""
    holds = [(("k", X),), (("k", X),), (("k", X),)]
    plan = Plan(3, None, holds)
    assert list(plan.start()) == [0]
    assert plan.seal(0, False) == ([], [])
    assert plan.end(0) == [1]
    assert plan.end(0) == []
    assert plan.end(1) == [2]
    assert plan.seal(1, True) == ([], [])
    plan.validate()


def test_s1_a_call_that_needs_and_conflicts_waits_for_both() -> None:
    """S1: a read of what a needed call writes waits for its result and for the end of its work."""
    for seal_first in (True, False):
        plan = Plan(2, [(), (0,)], [(("k", X),), (("k", S),)])
        assert list(plan.start()) == [0]
        first = plan.seal(0, True)[0] if seal_first else plan.end(0)
        assert first == []
        assert plan.blockers(1) == [("after" if seal_first else "needs", 0)]
        assert (plan.end(0) if seal_first else plan.seal(0, True)[0]) == [1]
        assert list(plan.edges()) == [(0, 1, "needs"), (0, 1, "after")]
        plan.validate()


def test_s1_conflicts_follow_the_order_of_needs() -> None:
    """S1: where a call needs a later one, its conflicts are put where it can run, so that there is no cycle."""
    # 0 needs 2; all write one file: emitted order would close the circle 0 -> 2 -> 0.
    plan = Plan(4, [(2,), (), (), ()], [(("k", X),)] * 4)
    assert drain(plan) == [1, 2, 0, 3]
    # Two pairs whose declared needs each win would make the circle 0 -> 1 -> 2 -> 3 -> 0.
    holds = [(("a", X),), (("a", X), ("b", X)), (("b", X),), (("b", X), ("a", X))]
    needs = [(3,), (), (1,), (2,)]
    assert drain(Plan(4, needs, holds)) == [1, 2, 3, 0]


def test_g4_a_write_does_not_overtake_the_one_before_a_skipped_one() -> None:
    """G4: a skipped write hands on its place: the write behind it still waits for the one before it."""
    plan = Plan(4, [(), (), (0,), ()], [(), (("k", X),), (("k", X),), (("k", X),)])
    assert set(plan.start()) == {0, 1}
    assert plan.seal(0, False) == ([], [(2, 0)])
    assert plan.blockers(3) == [("after", 1)]
    plan.validate()
    assert plan.end(1) == [3]
    plan.validate()


def test_g4_a_skip_releases_what_waits_for_it_alone() -> None:
    """S1: a skipped call counts as ended: what was ordered after it becomes ready with the skip."""
    plan = Plan(3, [(), (0,), ()], [(), (("k", X),), (("k", X),)])
    assert list(plan.start()) == [0]
    assert plan.seal(0, False) == ([2], [(1, 0)])
    assert plan.end(1) == []


def test_g4_a_skip_makes_nothing_ready_that_is_skipped_too() -> None:
    """R-38: a call ordered after a skipped one and skipped itself is told as skipped only."""
    plan = Plan(3, [(), (0,), (0,)], [(), (("k", X),), (("k", X),)])
    plan.start()
    assert plan.seal(0, False) == ([], [(1, 0), (2, 0)])


def test_a_call_given_up_before_it_was_ready_keeps_the_order() -> None:
    """G4: a waiting call that its caller seals and ends is never ready, and who waits behind it goes on waiting."""
    for sealed in (True, False):
        plan = Plan(4, [(), (0,), (1,), ()], [(("k", X),), (("k", X),), (), (("k", X),)])
        plan.start()
        assert plan.end(1) == []
        assert plan.seal(1, sealed) == (([2], []) if sealed else ([], [(2, 1)]))
        assert plan.seal(0, True) == ([], [])
        plan.validate()
        assert plan.end(0) == [3]
        plan.validate()


def test_a_call_given_up_at_its_seal_only_is_waited_for() -> None:
    """S1: sealed before it was ready, but not told as ended: it holds its place until it is."""
    plan = Plan(3, None, [(("k", X),)] * 3)
    plan.start()
    plan.seal(1, False)
    assert plan.end(0) == []
    assert plan.blockers(2) == [("after", 1)]
    assert plan.end(1) == [2]


def test_a_call_given_up_while_it_waited_is_never_ready() -> None:
    """G6: a cancelled waiter never starts, though all it waited for is there."""
    plan = Plan(3, [(), (0,), (0,)])
    plan.start()
    assert plan.seal(1, False) == ([], [])
    assert plan.seal(0, True) == ([2], [])
    plan = Plan(2, None, [(("k", X),), (("k", X),)])
    plan.start()
    plan.seal(1, False)
    plan.end(1)
    assert plan.end(0) == []


def test_a_dependent_that_its_caller_gave_up_is_not_skipped_again() -> None:
    """G1: a call has one result: who was cancelled while waiting is not reported as skipped as well."""
    plan = Plan(3, [(), (0,), (1,)])
    plan.start()
    assert plan.seal(1, False) == ([], [(2, 1)])
    assert plan.seal(0, False) == ([], [])


def test_what_is_refused_before_the_start_is_left_out_of_it() -> None:
    """G1: calls answered before the start are not told as ready; what they made ready is told by the start."""
    plan = Plan(5, [(), (0,), (), (2,), ()])
    assert plan.seal(0, True) == ([], [])
    assert plan.end(0) == []
    assert plan.seal(2, False) == ([], [(3, 2)])
    assert list(plan.start()) == [1, 4]
    trivial = Plan(4)
    trivial.seal(1, False)
    trivial.end(1)
    trivial.end(3)
    assert list(trivial.start()) == [0, 2]


# Conflicts.


@given(batches())
@settings(max_examples=250, deadline=None)
def test_s1_the_order_is_the_closure_of_the_conflicts(
    batch: tuple[list[tuple[int, ...]], list[tuple[Hold, ...]]],
) -> None:
    """S1: acyclic; each edge is a conflict in the order of needs; paths exist exactly where conflicts chain up."""
    needs, holds = batch
    size = len(needs)
    plan = Plan(size, needs, holds)
    plan.validate()
    pairs = conflict_pairs(needs, holds)
    wanted = {(other, i) for i in range(size) for other in needs[i]}
    after = {(a, b) for a, b, kind in plan.edges() if kind == "after"}
    assert {(a, b) for a, b, kind in plan.edges() if kind == "needs"} == wanted
    assert after <= pairs
    assert closure(after) == closure(pairs)
    both = closure(after | wanted)
    assert both == closure(pairs | wanted)
    assert all((b, a) not in both for a, b in both)
    assert plan.trivial == (not pairs and not wanted)
    assert len(list(plan.edges())) == len(set(plan.edges()))
    assert waits(plan, size) == after


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_s1_every_row_of_modes_on_one_key(size: int) -> None:
    """S1: all rows of up to four modes on one key, and of up to three with every set of backward needs."""
    for modes in itertools.product((None, IS, IX, S, X), repeat=size):
        holds = [() if mode is None else (("k", mode),) for mode in modes]
        links = list(itertools.combinations(range(size), 2)) if size < 4 else []
        for chosen in itertools.chain.from_iterable(itertools.combinations(links, n) for n in range(len(links) + 1)):
            needs = [tuple(a for a, b in chosen if b == i) for i in range(size)]
            plan = Plan(size, needs, holds)
            after = {(a, b) for a, b, kind in plan.edges() if kind == "after"}
            assert closure(after) == closure(conflict_pairs(needs, holds))
            plan.validate()
            assert sorted(drain(plan)) == list(range(size))


def row_of(size: int, kind: str) -> list[tuple[Hold, ...]]:
    rng = random.Random(kind)
    if kind == "writes":
        return [(("k", X),)] * size
    if kind == "interleaved":
        return [(("tree", IX), (f"tree/{i}", X)) if i % 2 else (("tree", S),) for i in range(size)]
    if kind == "blocks":
        return [(("tree", IX), (f"tree/{i}", X)) if i < size // 2 else (("tree", S),) for i in range(size)]
    if kind == "barriers":
        return [(("run", X if i % 2 else IS),) for i in range(size)]
    if kind == "readers between barriers":
        return [(("run", X if i % 10 == 9 else IS),) for i in range(size)]
    return [(("run", rng.choice((IS, IX, S, X))), (f"k{rng.randrange(50)}", rng.choice((S, X)))) for _ in range(size)]


@pytest.mark.parametrize("kind", ["writes", "interleaved", "blocks", "barriers", "readers between barriers", "mixed"])
def test_edges_are_linear_in_the_calls(kind: str) -> None:
    """10,000 calls that all conflict make less than four edges each, not 25 million, and run to the end."""
    size = 10_000
    plan = Plan(size, None, row_of(size, kind))
    assert 0 < plan.edge_count < 4 * size
    assert plan.junction_count < size
    assert len(drain(plan)) == size
    plan.validate()
    assert f"{size} sealed, {size} ended" in repr(plan)


def test_a_junction_stands_for_a_group() -> None:
    """Three writes below a tree, then three reads of the tree: one junction, six edges, nine when opened."""
    plan = Plan(6, None, [(("t", IX), (f"t/{i}", X)) if i < 3 else (("t", S),) for i in range(6)])
    assert (plan.edge_count, plan.junction_count) == (6, 1)
    assert list(plan.edges()) == [(a, b, "after") for a in range(3) for b in range(3, 6)]
    assert repr(plan) == "Plan(6 calls, 6 edges, 1 junctions, 0 sealed, 0 ended)"
    assert repr(Plan(3)) == "Plan(3 calls, no edges)"
    assert list(Plan(3).edges()) == []
    plan.start()
    assert plan.end(0) == plan.end(2) == []
    assert plan.blockers(4) == [("after", 1)]
    assert plan.end(1) == [3, 4, 5]


def test_a_group_of_one_needs_no_junction() -> None:
    """Reads and writes of a tree in turn, and a writer after one reader, are joined directly."""
    plan = Plan(1000, None, row_of(1000, "interleaved"))
    assert (plan.edge_count, plan.junction_count) == (999, 0)
    plan = Plan(3, None, [(("t", IS),), (("t", S),), (("t", X),)])
    assert (plan.edge_count, plan.junction_count) == (2, 0)


def test_edges_are_told_lazily() -> None:
    """5,000 against 5,000: the first of 25 million pairs are there without the rest."""
    plan = Plan(10_000, None, row_of(10_000, "blocks"))
    edges = plan.edges()
    assert isinstance(edges, Iterator)
    assert list(itertools.islice(edges, 2)) == [(0, 5000, "after"), (0, 5001, "after")]


def test_two_calls_that_meet_on_several_keys_have_one_edge() -> None:
    """Many shared keys between two calls are one edge."""
    keys = tuple((f"k{i}", X) for i in range(5))
    plan = Plan(2, None, [keys, keys])
    assert plan.edge_count == 1
    # Joined directly and through a junction: told once, and settled all the same.
    plan = Plan(3, None, [(("a", S), ("b", X)), (("a", S),), (("b", X), ("a", X), ("c", X))])
    assert list(plan.edges()) == [(0, 2, "after"), (1, 2, "after")]
    assert drain(plan) == [0, 1, 2]


# Rank.


# ==================================================================== calls that one run may answer (S11)


def grouped(needs: Needs, holds: Holds, alike: Sequence[Hashable | None]) -> list[tuple[int, ...]]:
    """The groups, by looking at every call between two that are alike."""
    order = one_by_one(needs)
    groups: list[list[int]] = []
    for place, index in enumerate(order):
        for group in reversed(groups):
            like = alike[index] is not None and alike[group[0]] == alike[index]
            if like and set(needs[group[0]]) == set(needs[index]):
                between = order[order.index(group[-1]) + 1 : place]
                if any(conflicts(holds[other], holds[index]) for other in between):
                    groups.append([index])
                else:
                    group.append(index)
                break
        else:
            groups.append([index])
    return sorted(tuple(group) for group in groups if len(group) > 1)


@given(batches(), st.data())
def test_s11_groups_reach_across_no_conflicting_call(
    batch: tuple[list[tuple[int, ...]], list[tuple[Hold, ...]]], data: st.DataObject
) -> None:
    """S11, P-22: what is found in one pass is what is found pair by pair; members wait one for another and the order
    of the others is as it was.
    """
    needs, holds = batch
    kinds = data.draw(st.lists(st.sampled_from([None, "a", "b"]), min_size=len(needs), max_size=len(needs)))
    # Who is alike holds the same.
    alike = [None if kind is None else (kind, hold) for kind, hold in zip(kinds, holds, strict=True)]
    plan = Plan(len(needs), needs, holds, alike=alike)
    assert sorted(plan.groups) == grouped(needs, holds, alike)
    plan.validate()
    chains = {pair for members in plan.groups for pair in itertools.pairwise(members)}
    assert chains <= waits(plan, len(needs))
    conflicting = conflict_pairs(needs, holds)
    needed = {(other, index) for index, wanted in enumerate(needs) for other in wanted}
    told = {(a, b) for a, b, _ in plan.edges()}
    assert closure(told | needed) == closure(conflicting | needed | chains)
    assert sorted(drain(plan)) == list(range(len(needs)))


def test_s11_a_group_is_as_long_as_one_run_of_it() -> None:
    """S6, S11: five alike calls and what needs the last of them: a path of two calls, not of six."""
    plan = Plan(7, [(), (), (), (), (), (4,), ()], alike=["a"] * 5 + [None, None], estimates=[1.0] * 5 + [2.0, 2.5])
    assert plan.groups == [(0, 1, 2, 3, 4)]
    assert [-plan.key(index)[0] for index in range(7)] == [3, 2, 2, 2, 2, 2, 2.5]
    assert Plan(2, alike=["a", "b"]).trivial
    assert Plan(2, alike=["a", "a"]).key(0) == (-1.0, -1, 0)
    with pytest.raises(ValueError, match="alike: 1 entries for 2 calls"):
        Plan(2, alike=["a"])


def test_s11_grouping_is_linear() -> None:
    """S11, F9: twenty thousand alike calls, writes and reads by turns of one key: an edge or two for each."""
    size = 20_000
    holds: Holds = [(("k", X if index % 2 else S),) for index in range(size)]
    assert not Plan(size, holds=holds, alike=[index % 2 for index in range(size)]).groups
    reads = Plan(size, holds=[(("k", S),)] * size, alike=[0] * size)
    assert [len(members) for members in reads.groups] == [size]
    assert reads.edge_count == size - 1
    assert drain(reads) == list(range(size))
    writes = Plan(size, holds=[(("k", X),)] * size, alike=[0] * size)
    assert [len(members) for members in writes.groups] == [size]
    assert writes.edge_count == size - 1


def test_g8_a_group_tells_numbers_only() -> None:
    """G8: how a group is shown."""
    assert repr(Group((1, 2), False)) == "Group(2 calls)"
    assert repr(Group((1, 2), True)) == "Group(2 calls, merged)"


def test_s6_the_longest_remaining_path_goes_first() -> None:
    """S6: own estimate included; ties by the calls behind, then by the emitted order."""
    #  0 (1) -> 3 (5);  1 (6);  2 (2) -> 4 (2), 5 (4);  6 (6)
    needs = [(), (), (), (0,), (2,), (2,), ()]
    plan = Plan(7, needs, None, [1, 6, 2, 5, 2, 4, 6])
    assert [plan.key(i) for i in range(7)] == [
        (-6, -1, 0),
        (-6, 0, 1),
        (-6, -2, 2),
        (-5, 0, 3),
        (-2, 0, 4),
        (-4, 0, 5),
        (-6, 0, 6),
    ]
    assert list(plan.start()) == [2, 0, 1, 6]
    assert plan.seal(2, True) == ([5, 4], [])


def test_s6_without_estimates_paths_are_counted_in_calls() -> None:
    """S6: hops; junctions count nothing."""
    plan = Plan(6, None, [(("t", IX),)] * 2 + [(("t", S),)] * 2 + [(("t", IX),)] * 2)
    assert plan.junction_count == 2
    assert [plan.key(i) for i in range(6)] == [(-3 + i // 2, -4 + i // 2 * 2, i) for i in range(6)]
    assert [Plan(3, None, None, [1, 2, 3]).key(i) for i in range(3)] == [(0.0, 0, 0), (0.0, 0, 1), (0.0, 0, 2)]


@given(batches(), st.data())
@settings(max_examples=150, deadline=None)
def test_s6_rank_is_the_longest_path_and_the_count_behind(
    batch: tuple[list[tuple[int, ...]], list[tuple[Hold, ...]]], data: st.DataObject
) -> None:
    """S6: against brute force over the closure; above the limit the count is an upper estimate within the batch."""
    needs, holds = batch
    size = len(needs)
    estimates = data.draw(st.none() | st.lists(st.sampled_from((0.0, 0.5, 1.0, 4.0)), min_size=size, max_size=size))
    plan = Plan(size, needs, holds, estimates)
    if plan.trivial:
        return
    edges = {(a, b) for a, b, _ in plan.edges()}
    reach = closure(edges)

    def longest(index: int) -> float:
        own = 1.0 if estimates is None else estimates[index]
        return own + max((longest(b) for a, b in edges if a == index), default=0.0)

    behind = [sum(a == index for a, _ in reach) for index in range(size)]
    assert [plan.key(i) for i in range(size)] == [(-longest(i), -behind[i], i) for i in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "EXACT_SUCCESSORS", 0)
        rough = Plan(size, needs, holds, estimates)
        for index in range(size):
            path, count, _ = rough.key(index)
            assert path == -longest(index)
            assert behind[index] <= -count < size


def test_s6_the_count_behind_is_exact_for_trees_of_any_size() -> None:
    """S6: in a large batch the estimate is the number itself where nothing joins again, and never above the batch."""
    size = graph.EXACT_SUCCESSORS + 1000
    tree = Plan(size, [((i - 1) // 2,) if i else () for i in range(size)])
    assert tree.key(0)[1] == -(size - 1)
    assert tree.key(size - 1)[1] == 0
    ladder = Plan(size, [tuple(range(max(0, i // 2 * 2 - 2), i // 2 * 2)) for i in range(size)])
    assert ladder.key(0)[1] == -(size - 1)
    assert -ladder.key(size - 3)[1] == 2


def test_f9_rank_schedules_published_projects_near_their_optimum() -> None:
    """S6, F9: exact estimates: the rank is the critical path, and greedy starts by key come within 5 and 8 percent."""
    for name, goal, hops_goal in (("rcpsp_j30.jsonl", 5.0, 6.5), ("rcpsp_j60.jsonl", 8.0, 9.5)):
        over: dict[bool, list[float]] = {True: [], False: []}
        for row in rows(name):
            durations: list[int] = row["durations"]
            needs: list[list[int]] = [[] for _ in durations]
            for index, successors in enumerate(row["successors"]):
                for other in successors:
                    needs[other].append(index)
            exact = Plan(len(durations), needs, None, durations)
            assert -exact.key(0)[0] == row["critical_path"]
            for known in (True, False):
                plan = exact if known else Plan(len(durations), needs)
                best: int = row["best_makespan"]
                over[known].append(100 * makespan(plan, durations, row["demands"], row["capacity"]) / best - 100)
        assert sum(over[True]) / len(over[True]) <= goal
        assert sum(over[False]) / len(over[False]) <= hops_goal


def makespan(plan: Plan, durations: list[int], demands: list[list[int]], capacity: list[int]) -> int:
    """Start what fits, by key, skipping what does not; time jumps to the next end."""
    free = list(capacity)
    waiting = list(plan.start())
    running: list[tuple[int, int]] = []
    now = 0
    while waiting or running:
        for index in sorted(waiting, key=plan.key):
            if all(need <= have for need, have in zip(demands[index], free, strict=True)):
                waiting.remove(index)
                free = [have - need for have, need in zip(free, demands[index], strict=True)]
                heapq.heappush(running, (now + durations[index], index))
        now = running[0][0]
        while running and running[0][0] == now:
            _, index = heapq.heappop(running)
            free = [have + need for have, need in zip(free, demands[index], strict=True)]
            waiting += plan.seal(index, True)[0]
            plan.end(index)
    return now


# Long and wide batches.


@pytest.mark.parametrize("size", [10_000])
def test_r34_deep_chains_do_not_recurse(size: int) -> None:
    """R-34: 10,000 calls in a row run in as many starts; ranked, explained, failed and skipped without recursion."""
    needs: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(size)]
    plan = Plan(size, needs, [(("k", X),)] * size)
    assert plan.key(0) == (-size, -(size - 1), 0)
    assert drain(plan) == list(range(size))
    plan = Plan(size, needs)
    plan.start()
    ready, skipped = plan.seal(0, False)
    assert ready == []
    assert skipped == [(i, 0) for i in range(1, size)]
    plan.validate()
    forward = [f"c{i}" for i in range(size)]
    resolved = resolve_needs(forward, [[name] for name in forward[1:]] + [[]])
    assert resolved is not None
    assert drain(Plan(size, resolved, [(("k", X),)] * size)) == list(range(size))[::-1]
    with pytest.raises(PlanRefused) as caught:
        resolve_needs(forward, [[forward[i - 1]] for i in range(size)])
    assert len(caught.value.members) == size


def test_a_wide_diamond() -> None:
    """One call, 9,998 that need it, one that needs them all: three steps."""
    size = 10_000
    plan = Plan(size, [(), *[(0,)] * (size - 2), tuple(range(1, size - 1))])
    assert list(plan.start()) == [0]
    middle, _ = plan.seal(0, True)
    assert middle == list(range(1, size - 1))
    assert plan.blockers(size - 1) == [("needs", i) for i in range(1, 17)]
    last = [plan.seal(i, True)[0] for i in middle]
    assert last[-1] == [size - 1]
    assert not any(last[:-1])


def test_blockers_are_bounded_and_looked_through() -> None:
    """However many stand before a call, a bounded number is told, and asking for all of them is not quadratic."""
    size = 10_000
    plan = Plan(size, None, row_of(size, "blocks"))
    plan.start()
    assert plan.blockers(0) == []
    assert plan.blockers(9_999, limit=3) == [("after", 0), ("after", 1), ("after", 2)]
    for index in range(4_998):
        plan.end(index)
    for index in range(5_000, size):
        assert plan.blockers(index) == [("after", 4998), ("after", 4999)]
    assert plan._before is not None
    assert plan._before[size] == [4998, 4999]  # what had ended is not walked through again
    plan.end(4999)
    assert plan.blockers(5_000) == [("after", 4998)]
    assert plan.end(4998) == list(range(5_000, size))
    assert plan.blockers(5_000) == []
    assert Plan(3).blockers(1) == []


def test_blockers_are_found_behind_skipped_calls() -> None:
    """A short row of skipped calls is looked through; of a very long one the first is told in place of the rest."""
    size = 3_000
    needs = [(), (), *[(0,)] * (size - 3), ()]
    plan = Plan(size, needs, [(), *[(("k", X),)] * (size - 1)])
    plan.start()
    assert len(plan.seal(0, False)[1]) == size - 3
    ((kind, other),) = plan.blockers(size - 1)
    assert kind == "after"
    assert 1 < other < size - 1
    assert plan.end(1) == [size - 1]
    plan = Plan(100, [(), (), *[(0,)] * 97, ()], [(), *[(("k", X),)] * 99])
    plan.start()
    plan.seal(0, False)
    assert plan.blockers(99) == [("after", 1)]
    assert plan.blockers(99, limit=0) == []


def test_needed_and_earlier_calls_share_the_limit() -> None:
    """Needed calls are told first, then earlier ones; both together within the limit."""
    plan = Plan(5, [(), (), (), (), (0, 1)], [(), (), (("k", S),), (("k", S),), (("k", X),)])
    plan.start()
    assert plan.blockers(4) == [("needs", 0), ("needs", 1), ("after", 2), ("after", 3)]
    assert plan.blockers(4, limit=3) == [("needs", 0), ("needs", 1), ("after", 2)]
    assert plan.blockers(4, limit=1) == [("needs", 0)]


def test_blockers_met_twice_are_told_once() -> None:
    """A call that stands before another on several ways, some through skipped calls, is one blocker."""
    # 1 is at work; 2 to 4 are skipped: 5 waits for 3 and 4, both for 2, and that for 1.
    a, b, c = ("a", X), ("b", X), ("c", X)
    plan = Plan(6, [(), (), (0,), (0,), (0,), ()], [(), (a, b), (a, b), (a,), (b,), (a, b)])
    plan.start()
    plan.seal(0, False)
    assert plan.blockers(5) == [("after", 1)]
    assert plan.end(1) == [5]
    plan = Plan(4, [(), (), (0,), ()], [(), (a, c), (a,), (a, c)])
    plan.start()
    plan.seal(0, False)
    assert plan.blockers(3) == [("after", 1)]


def test_validate_finds_what_is_wrong() -> None:
    """A count, an order or a skip that does not fit the edges is found and named."""

    def made() -> Plan:
        plan = Plan(6, [(), (0,), (), (), (), ()], [(), (), *[(("t", S),)] * 2, *[(("t", IX),)] * 2])
        plan.start()
        plan.validate()
        return plan

    Plan(3).validate()
    plan = made()
    plan._needs_left[1] = 0
    with pytest.raises(AssertionError, match=r"node 1 counts \(0, 0\) .* \(1, 0\)"):
        plan.validate()
    plan = made()
    plan._after_left[4] = 2
    with pytest.raises(AssertionError, match="node 4"):
        plan.validate()
    plan = made()
    plan._order = [1, 0, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="the edge from 0 to 1 goes back"):
        plan.validate()
    plan = made()
    plan._order = [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="6 of 7 nodes"):
        plan.validate()
    plan = made()
    plan.seal(0, False)
    plan._flags[1] = 0
    with pytest.raises(AssertionError, match="call 1 needs call 0, which failed"):
        plan.validate()
    plan = made()
    plan._flags[6] = 0
    with pytest.raises(AssertionError, match="junction 6"):
        plan.validate()


def test_g8_no_key_is_shown() -> None:
    """G8: keys hold argument values; no text that a plan makes shows one."""
    secret = "canary-7f3a"
    plan = Plan(2, None, [((secret, X),), ((secret, X),)])
    assert secret not in repr(plan) + repr(list(plan.edges())) + repr(plan.blockers(1))


# The state machine: any batch, any interleaving.


@given(batch=batches(10), data=st.data())
@settings(max_examples=300, deadline=None)
def test_s3_who_waits_for_a_held_call_is_held_and_nobody_else(
    batch: tuple[list[tuple[int, ...]], list[tuple[Hold, ...]]], data: st.DataObject
) -> None:
    """S3: a call that is ready and does not go on holds all that wait for it, directly or not, by needs or by order;
    all others go on, and nothing that is held becomes ready.
    """
    needs, holds = batch
    size = len(needs)
    plan = Plan(size, needs, holds)
    before: list[set[int]] = [set(wanted) for wanted in needs]
    for a, b in closure(conflict_pairs(needs, holds)):
        before[b].add(a)
    fates = {index: data.draw(st.sampled_from(("ok", "ok", "failed", "held"))) for index in range(size)}
    todo = list(plan.start())
    done: dict[int, str] = {}
    held: set[int] = set()
    while todo:
        index = todo.pop(data.draw(st.integers(0, len(todo) - 1)))
        assert index not in held
        done[index] = fates[index]
        if fates[index] == "held":
            more = plan.hold(index)
            assert more == sorted(more)
            assert not held & set(more)
            held |= set(more)
            assert plan.hold(index) == []
        else:
            ready, skipped = plan.seal(index, fates[index] == "ok")
            todo += [*ready, *plan.end(index)]
            done.update((one, "skipped") for one, _ in skipped)
        plan.validate()
    assert not held & done.keys()
    assert held | done.keys() == set(range(size))
    holding = {index for index, fate in done.items() if fate == "held"}
    for index in held:
        reached, stack = set[int](), [index]
        while stack:
            for other in before[stack.pop()] - reached:
                reached.add(other)
                stack.append(other)
        assert reached & holding, f"{index} is held for nothing"
    for index in set(range(size)) - held - holding:
        if done[index] != "skipped":
            assert not any(other in held | holding for other in before[index])


def test_without_edges_nobody_is_held() -> None:
    """A plan without an edge keeps no state, and holds nobody."""
    assert Plan(3).hold(1) == []


class PlanMachine(RuleBasedStateMachine):
    """Random batches, sealed and ended in any order, with failures, calls given up while they wait, and calls that run
    whatever came of those that they need.
    """

    @initialize(batch=batches(12), anyway=st.frozensets(st.integers(0, 11)))
    def build(self, batch: tuple[list[tuple[int, ...]], list[tuple[Hold, ...]]], anyway: frozenset[int]) -> None:
        self.needs, self.holds = batch
        self.size = len(self.needs)
        self.anyway = anyway
        self.plan = Plan(self.size, self.needs, self.holds, anyway=anyway)
        self.earlier: list[set[int]] = [set() for _ in range(self.size)]
        for a, b in closure(conflict_pairs(self.needs, self.holds)):
            self.earlier[b].add(a)
        self.ready: set[int] = set()
        self.skipped: dict[int, int] = {}
        self.dropped: set[int] = set()
        self.sealed: dict[int, bool] = {}
        self.ended: set[int] = set()
        self.started = False

    def may_run(self, index: int) -> bool:
        needed = [self.sealed.get(other) for other in self.needs[index]]
        there = None not in needed if index in self.anyway else all(needed)
        return there and self.earlier[index] <= self.ended

    def told(self, ready: Sequence[int], skipped: Sequence[tuple[int, int]] = ()) -> None:
        assert not ready or self.started
        assert list(ready) == sorted(ready, key=self.plan.key)
        assert len(set(ready)) == len(ready)
        assert not self.ready & set(ready)
        for index, culprit in skipped:
            assert index not in self.ready | self.dropped | set(ready)
            assert index not in self.skipped
            assert index not in self.anyway
            assert self.sealed[culprit] is False
            assert culprit not in self.skipped
            self.skipped[index] = culprit
            self.sealed[index] = False
            self.ended.add(index)
        assert list(skipped) == sorted(skipped)
        for index in ready:
            assert index not in self.sealed
            assert index not in self.ended
        self.ready |= set(ready)

    @precondition(lambda self: not self.started)
    @rule()
    def start(self) -> None:
        ready = self.plan.start()
        self.started = True
        self.told(ready)

    def choose(self, data: st.DataObject, among: set[int]) -> int:
        return data.draw(st.sampled_from(sorted(among)))

    @precondition(lambda self: self.ready - self.sealed.keys())
    @rule(data=st.data(), ok=st.sampled_from((True, True, False)))
    def seal(self, data: st.DataObject, ok: bool) -> None:
        index = self.choose(data, self.ready - self.sealed.keys())
        self.sealed[index] = ok
        self.told(*self.plan.seal(index, ok))

    @precondition(lambda self: self.ready - self.ended)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = self.choose(data, self.ready - self.ended)
        self.ended.add(index)
        self.told(self.plan.end(index))

    @precondition(lambda self: set(range(self.size)) - self.ready - self.sealed.keys())
    @rule(data=st.data(), ok=st.booleans(), end_first=st.booleans())
    def give_up(self, data: st.DataObject, ok: bool, end_first: bool) -> None:
        index = self.choose(data, set(range(self.size)) - self.ready - self.sealed.keys())
        self.dropped.add(index)
        for end in (end_first, not end_first):
            if end:
                self.ended.add(index)
                self.told(self.plan.end(index))
            else:
                self.sealed[index] = ok
                self.told(*self.plan.seal(index, ok))

    @precondition(lambda self: self.sealed.keys() & self.ended)
    @rule(data=st.data(), ok=st.booleans())
    def repeat(self, data: st.DataObject, ok: bool) -> None:
        index = self.choose(data, self.sealed.keys() & self.ended)
        assert self.plan.seal(index, ok) == ([], [])
        assert self.plan.end(index) == []
        if self.started:
            assert list(self.plan.start()) == []

    @invariant()
    def ready_exactly_when_it_may(self) -> None:
        self.plan.validate()
        for index in range(self.size):
            waiting = index not in self.ready | self.dropped | self.skipped.keys()
            if not waiting:
                continue
            assert not (self.started and self.may_run(index)), f"call {index} was forgotten"
            failed = any(self.sealed.get(other) is False for other in self.needs[index])
            assert index in self.anyway or not failed
            blockers = self.plan.blockers(index)
            assert {other for kind, other in blockers if kind == "needs"} == set(self.needs[index]) - self.sealed.keys()
            after = {other for kind, other in blockers if kind == "after"}
            assert after <= self.earlier[index] - self.ended
            assert bool(after) == bool(self.earlier[index] - self.ended)
        for index in self.ready - self.sealed.keys() - self.ended:
            assert self.may_run(index)

    def teardown(self) -> None:
        """Whatever has happened, answering what is ready brings every call to its end, once."""
        if not hasattr(self, "plan"):
            return
        if not self.started:
            self.start()
        while open_calls := self.ready - (self.sealed.keys() & self.ended):
            index = min(open_calls)
            if index not in self.sealed:
                self.sealed[index] = True
                self.told(*self.plan.seal(index, True))
            if index not in self.ended:
                self.ended.add(index)
                self.told(self.plan.end(index))
        assert self.ready | self.skipped.keys() | self.dropped == set(range(self.size))
        assert not self.ready & self.skipped.keys()
        self.plan.validate()


PlanMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPlanMachine = PlanMachine.TestCase
