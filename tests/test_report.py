"""`tower.report`: what a tower in observe mode has seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, on_stage

from towerman import Call, Event, ObserveReport, PolicyError, Pool, Tower
from towerman.ledger import Pool as LedgerPool
from towerman.ledger import Wants
from towerman.report import MOST_BATCHES, LimitReport, OrderReport, Tally, ToolReport, reported
from towerman.watched import Watch, Watched, limit_name

stage = pytest.fixture(on_stage)


def limit(report: ObserveReport, name: str) -> LimitReport:
    """What one limit has seen."""
    (found,) = [one for one in report.limits if one.name == name]
    return found


def tool(report: ObserveReport, name: str) -> ToolReport:
    """What became of one tool's calls."""
    (found,) = [one for one in report.tools if one.name == name]
    return found


# ==================================================================== limits


def test_s13_a_full_limit_is_counted_with_a_bound_on_the_waits(stage: Stage) -> None:
    """S13, R-132: five calls of two seconds on two places all run at once; three found it full, and would have waited
    two seconds for the first two places and four for the fifth: the bound says six of these eight.
    """
    tower = stage.tower(mode="observe", pools={"crm": 2})

    @tower.tool(independent=True, pools=["crm"])
    async def fetch() -> str:
        return await stage.work("fetch", 2)

    stage.run(tower.execute([Call("fetch", {})] * 5))
    assert stage.peak == 5
    report = tower.report()
    assert limit(report, "crm") == LimitReport("crm", 2, "process", 5, 3, 2.0, 6.0)
    assert limit(report, "process") == LimitReport("process", 32, "process", 5, 0, 0.0, 0.0)
    assert tool(report, "fetch") == ToolReport("fetch", 5, 3, 0, 0, 0.0, {}, tokens=10)
    assert (report.batches, report.calls, report.seconds, report.complete) == (1, 5, 2.0, True)
    assert repr(report) == "ObserveReport(5 calls, 1 of 3 limits were over)"
    assert report.limits[0].name == "crm"


def test_a_tool_that_does_not_wait_would_have_been_refused(stage: Stage) -> None:
    """S13, R-67: with when_busy="reject" the calls that found a limit full are told as refused, not as waiting."""
    tower = stage.tower(mode="observe")

    @tower.tool(independent=True, max_concurrency=1, when_busy="reject")
    async def fetch() -> str:
        return await stage.work("fetch", 1)

    assert stage.run(tower.execute([Call("fetch", {})] * 3)).ok
    report = tower.report()
    assert (tool(report, "fetch").would_have_waited, tool(report, "fetch").would_have_been_refused) == (0, 2)
    assert limit(report, "tool:fetch").found_full == 2


def test_limits_of_runs_are_added_up(stage: Stage) -> None:
    """S13: limits that count for a run are one line, whose peak is that of the fullest run."""
    tower = stage.tower(
        mode="observe", run_concurrency=2, pools={"mine": Pool(1, scope="run"), "ours": Pool(2, scope="tenant")}
    )

    @tower.tool(independent=True, pools=["mine", "ours"])
    async def fetch() -> str:
        return await stage.work("fetch", 1)

    async def main() -> None:
        await asyncio.gather(
            tower.execute([Call("fetch", {})] * 3, tenant="a"), tower.execute([Call("fetch", {})], tenant="b")
        )

    stage.run(main())
    report = tower.report()
    assert limit(report, "run") == LimitReport("run", 2, "run", 3, 1, 1.0, 1.0)
    assert limit(report, "mine") == LimitReport("mine", 1, "run", 3, 2, 1.0, 2.0)
    assert limit(report, "ours") == LimitReport("ours", 2, "tenant", 3, 1, 1.0, 1.0)


def test_a_report_can_be_asked_for_while_calls_run(stage: Stage) -> None:
    """S13: what is over now counts up to now, and asking twice counts nothing twice."""
    tower = stage.tower(mode="observe", pools={"crm": 1})

    @tower.tool(independent=True, pools=["crm"])
    async def fetch() -> str:
        return await stage.work("fetch", 4)

    async def main() -> None:
        running = asyncio.create_task(tower.execute([Call("fetch", {})] * 2))
        await asyncio.sleep(1)
        assert limit(tower.report(), "crm").over_seconds == 1.0
        assert limit(tower.report(), "crm").over_seconds == 1.0
        await asyncio.sleep(2)
        assert limit(tower.report(), "crm").waited_at_least == 3.0
        await running
        await asyncio.sleep(5)
        assert limit(tower.report(), "crm").waited_at_least == 4.0

    stage.run(main())


def test_places_in_reserve_are_full_for_others_only() -> None:
    """S13, R-11: a place kept for urgent runs is full for the rest before the limit is over."""
    clock = [0.0]
    ledger: Watched[Any] = Watched(lambda: clock[0])
    ledger.add_pool(LedgerPool("pool:p", "pool p", 2, reserve=1, enforced=False))

    def wants(priority: int) -> Wants[Any]:
        return ledger.look_up(Wants(0, "t", (("pool:p", 1),), priority=priority))

    low, high = wants(0), wants(1)
    ledger.take(low)
    ledger.take(low)
    assert (ledger.limits["p"].started, ledger.limits["p"].seconds) == (1, 0.0)
    clock[0] = 1.0
    ledger.take(high)
    clock[0] = 3.0
    ledger.give(high)
    clock[0] = 9.0
    ledger.give(low)
    ledger.give(low)
    ledger.add_up()
    watch = ledger.limits["p"]
    assert (watch.started, watch.seconds, watch.waited, watch.peak) == (2, 2.0, 2.0, 3)
    assert ledger.waiting == {"t": 2}


def test_a_borrowed_permit_finds_no_limit_full(stage: Stage) -> None:
    """S10, S13: a nested call that borrows its caller's permit would not have waited for that limit, and is not said to
    have found it full; one that goes beyond what its caller holds would.
    """
    tower = stage.tower(mode="observe", pools={"crm": 1})

    @tower.tool(independent=True, pools=["crm"])
    async def leaf() -> None:
        await asyncio.sleep(1)

    @tower.tool(independent=True, pools=["crm"])
    async def agent(children: int) -> None:
        assert (await tower.execute([Call("leaf", {})] * children)).ok

    stage.run(tower.execute([Call("agent", {"children": 1})]))
    assert limit(tower.report(), "crm") == LimitReport("crm", 1, "process", 1, 0, 0.0, 0.0)
    stage.run(tower.execute([Call("agent", {"children": 2})]))
    assert limit(tower.report(), "crm") == LimitReport("crm", 1, "process", 2, 1, 1.0, 1.0)


def test_names_of_limits() -> None:
    """R-132: limits are called as in statistics, those of all runs together by the name that they share."""
    keys = ["process", "run:7", "tool:fetch", "pool:crm", "pool:crm@run:7", "pool:crm@tenant:acme"]
    assert [limit_name(key) for key in keys] == ["process", "run", "tool:fetch", "crm", "crm", "crm"]


arrivals = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=6)
    ),
    min_size=1,
    max_size=5,
)


def delays(batches: Sequence[tuple[float, list[float]]], permits: int, mode: str) -> tuple[float, Tower]:
    """Run batches that come at some instants; how long their calls waited together for a place."""
    with contextmanager(on_stage)() as stage:
        tower = stage.tower(
            mode=mode, pools={"p": permits}, max_concurrency=100, run_concurrency=100, max_wait=1e6, max_queued=1000
        )
        came: dict[str, float] = {}

        @tower.tool(independent=True, pools=["p"])
        async def work(name: str, seconds: float) -> str:
            return await stage.work(name, seconds)

        async def one(number: int, after: float, lengths: list[float]) -> None:
            await asyncio.sleep(after)
            calls = []
            for place, seconds in enumerate(lengths):
                came[f"{number}.{place}"] = stage.clock.value
                calls.append(Call("work", {"name": f"{number}.{place}", "seconds": seconds}))
            assert (await tower.execute(calls)).ok

        async def main() -> None:
            await asyncio.gather(*(one(number, *batch) for number, batch in enumerate(batches)))

        stage.run(main())
        spans = [(name, start) for name, start, _ in stage.spans if name in came]
        return sum(start - came[name] for name, start in spans), tower


@settings(max_examples=60)
@given(batches=arrivals, permits=st.integers(1, 4))
def test_the_bound_on_waits_is_one(batches: list[tuple[float, list[float]]], permits: int) -> None:
    """S13: the same calls with the limit enforced wait at least as long as the report says, and not at all where it
    says that none found the limit full.
    """
    none, observed = delays(batches, permits, "observe")
    real, _ = delays(batches, permits, "enforce")
    assert none == 0
    assert observed._watched is not None
    seen = observed._watched.limits["p"]
    assert seen.waited <= real + 1e-9
    assert seen.started > 0 or real == 0


# ==================================================================== order, resources, refusals


def test_s13_what_order_holds_back_is_told_with_its_time(stage: Stage) -> None:
    """S13, R-131: calls that stood behind siblings, and behind a resource that another run held, are told apart, each
    with how long; so are those that were refused or cut.
    """
    tower = stage.tower(mode="observe", max_calls_per_batch=5)

    @tower.tool(writes="ticket:{number}")
    async def update(number: int) -> str:
        return await stage.work("update", 2)

    @tower.tool
    async def legacy() -> str:
        return await stage.work("legacy", 1)

    async def main() -> None:
        first = asyncio.create_task(
            tower.execute(
                [
                    Call("update", {"number": 1}),
                    Call("update", {"number": 1}),
                    Call("legacy", {}),
                    Call("nobody", {}),
                    Call("update", {"number": "x"}),
                    Call("legacy", {}),
                ]
            )
        )
        await asyncio.sleep(1)
        await tower.execute([Call("update", {"number": 1})])
        await first

    stage.run(main())
    report = tower.report()
    assert report.order == (
        OrderReport("legacy", "call of update", 1, 6.0),
        OrderReport("update", "resource ticket:{number}", 2, 3.0),  # the other run's, and the second after that
        OrderReport("update", "call of update", 1, 2.0),
    )
    assert dict(report.refused) == {"unknown_tool": 1, "invalid_arguments": 1, "call_cap": 1}
    assert tool(report, "update").refused == {"invalid_arguments": 1}
    unknown = tool(report, "<unknown tool>")
    assert unknown == ToolReport("<unknown tool>", 0, 0, 0, 0, 0.0, {"unknown_tool": 1}, tokens=unknown.tokens)
    assert unknown.tokens > 20  # what the model is told of it
    assert tool(report, "update").serialised == 1
    assert tool(report, "legacy").refused == {"call_cap": 1}


def test_times_held_behind_siblings(stage: Stage) -> None:
    """S13: how long a call stood behind its siblings is from the batch's coming to its own turn."""
    tower = stage.tower(mode="observe")

    @tower.tool(writes="k")
    async def work() -> str:
        return await stage.work("work", 2)

    stage.run(tower.execute([Call("work", {})] * 3))
    report = tower.report()
    assert report.order == (OrderReport("work", "call of work", 2, 6.0),)
    assert (tool(report, "work").serialised, tool(report, "work").held_seconds) == (2, 6.0)


def test_a_tower_that_enforces_has_no_report(stage: Stage) -> None:
    """S13: where limits are enforced there is nothing to report that did not happen; the error says where to look."""
    with pytest.raises(PolicyError, match=r"report: only with Tower\(mode='observe'\).*statistics"):
        stage.tower().report()


def test_observers_of_the_user_see_events_as_ever(stage: Stage) -> None:
    """S13, R-131: the report's own observer takes nothing from others, and one more can be taken away again."""
    events: list[Event] = []
    tower = stage.tower(mode="observe", observers=[events.append])

    @tower.tool(independent=True)
    async def work() -> None: ...

    stage.run(tower.execute([Call("work", {})]))
    tower.remove_observer(events.append)
    assert tower.report().calls == 1
    assert [event.kind for event in events] == ["batch_started", "admitted", "started", "finished", "batch_finished"]


def test_a_closed_tower_still_reports(stage: Stage) -> None:
    """S13: what was seen is kept when the tower is closed."""
    tower = stage.tower(mode="observe", max_concurrency=1)

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        await tower.execute([Call("work", {})] * 2)
        await tower.aclose()

    stage.run(main())
    assert limit(tower.report(), "process").found_full == 1
    assert tower.report().complete


# ==================================================================== the tally, event by event


def at(time: float, kind: Any, index: int | None = None, tool: str | None = None, **fields: Any) -> Event:
    """An event of one batch."""
    return Event(time, kind, "run", fields.pop("batch", 1), index, "", tool, **fields)


def test_the_tally_passes_over_what_it_does_not_know() -> None:
    """R-130: events of a batch whose beginning was not seen, and of no call, are passed over; a sibling that was never
    seen is told as another tool.
    """
    tally = Tally()
    for event in (
        at(0, "finished", 0, "a", waited_for=("call 1",)),
        at(1, "batch_started"),
        at(1, "promoted"),
        at(1, "rejected", 2, "a"),
        at(2, "started", 0, "a"),
        at(3, "finished", 0, "a", waited_for=("call 1", "resource x", "resource y"), waited=0.5),
        at(4, "finished", 1, "b", waited_for=("pool p",)),
        at(5, "ended", 1, "b"),
        at(6, "batch_finished"),
        at(7, "started", 0, "a"),
    ):
        tally(event)
    assert tally.order == {("a", "call of another tool"): (1, 0.0), ("a", "resource x"): (1, 0.5)}
    assert tally.calls == {"a": 1}
    assert tally.refused == {}


def test_the_tally_is_bounded() -> None:
    """P-62: batches whose ends are never told are forgotten in time."""
    tally = Tally()
    for number in range(MOST_BATCHES + 5):
        tally(at(0, "batch_started", batch=number))
    assert len(tally._open) == MOST_BATCHES
    assert ("run", 0) not in tally._open


def test_the_text_and_the_json() -> None:
    """R-140: a report as text has a table for limits, order and tools; as JSON it has these keys."""
    tally = Tally()
    tally.batches, tally.calls, tally.order = 2, {"a": 3, "b": 1}, {("a", "call of b"): (2, 0.25)}
    tally.serialised, tally.refused = {"a": (2, 0.25)}, {("a", "call_cap"): 4, ("b", "call_cap"): 1}
    tally.tokens = {"a": 1234}
    watch = Watch(2, "process")
    watch.peak, watch.started, watch.seconds, watch.waited = 4, 2, 1.5, 2.5
    report = reported(
        tally, {"idle": Watch(1, "process"), "crm": watch}, {}, {"a": 2}, {"b": 1}, {}, 61.0, complete=False
    )
    assert str(report) == (
        "Observed for 61.0 s: 4 calls in 2 batches, results of about 1,234 tokens\n"
        "\n"
        "What the limits would have held back\n"
        "\n"
        "  limit  permits  peak  calls found it full  over for  waits of at least\n"
        "  crm    2        4     2                    1.5 s     2.5 s\n"
        "  idle   1        0     0                    -         -\n"
        "\n"
        "What order and resources have held back\n"
        "\n"
        "  tool  behind     calls  together\n"
        "  a     call of b  2      250 ms\n"
        "\n"
        "Tools\n"
        "\n"
        "  tool  calls  would have waited  would have been refused  serialised  refused     tokens\n"
        "  a     3      2                  0                        2           4 call_cap  1,234\n"
        "  b     1      0                  1                        0           1 call_cap  0\n"
        "\n"
        "Events were dropped: the last two tables count too little."
    )
    assert json.loads(json.dumps(report.to_dict())) == {
        "seconds": 61.0,
        "batches": 2,
        "calls": 4,
        "limits": [
            {
                "name": "crm",
                "limit": 2,
                "scope": "process",
                "peak": 4,
                "found_full": 2,
                "over_seconds": 1.5,
                "waited_at_least": 2.5,
            },
            {
                "name": "idle",
                "limit": 1,
                "scope": "process",
                "peak": 0,
                "found_full": 0,
                "over_seconds": 0.0,
                "waited_at_least": 0.0,
            },
        ],
        "rates": [],
        "budgets": [],
        "tools": [
            {
                "name": "a",
                "calls": 3,
                "would_have_waited": 2,
                "would_have_been_refused": 0,
                "serialised": 2,
                "held_seconds": 0.25,
                "refused": {"call_cap": 4},
                "tokens": 1234,
            },
            {
                "name": "b",
                "calls": 1,
                "would_have_waited": 0,
                "would_have_been_refused": 1,
                "serialised": 0,
                "held_seconds": 0.0,
                "refused": {"call_cap": 1},
                "tokens": 0,
            },
        ],
        "order": [{"tool": "a", "behind": "call of b", "calls": 2, "seconds": 0.25}],
        "refused": {"call_cap": 5},
        "tokens": 1234,
        "complete": False,
    }
    empty = reported(Tally(), {}, {}, {}, {}, {}, 0.0, complete=True)
    assert "  nothing\n" in str(empty)
    assert "0 calls in 0 batches" in str(empty)


SECRET = "zqxjkvbpwm"


def test_g8_a_report_holds_no_argument_value(stage: Stage) -> None:
    """G8, R-130: neither resource keys nor broken arguments nor invented names are in a report."""
    tower = stage.tower(mode="observe")

    @tower.tool(writes="file:{path}")
    async def write(path: str) -> None: ...

    calls = [
        Call("write", {"path": SECRET}),
        Call("write", {"path": SECRET}),
        Call("write", f'"{SECRET}'),
        Call(SECRET, {}),
    ]
    stage.run(tower.execute(calls))
    report = tower.report()
    for sink in (str(report), repr(report), json.dumps(report.to_dict()), repr(report.tools)):
        assert SECRET not in sink
