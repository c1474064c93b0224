"""Circuit breakers by whole towers: decided in the same step as everything else, never waited for.

Time is virtual. After every test `stage` asks each tower for its whole capacity again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit import Stage, codes, gate_of, on_stage, run_batch, sound

from towerman import Breaker, Call, PolicyError, Pool, RateLimited, ToolError, Tower

stage = pytest.fixture(on_stage)


class Service:
    """What is behind a tool: it fails as it is told.

    Attributes:
        wrong: what the next calls raise; None for well.
        seconds: how long a call takes.
        asked: how often it was asked.
    """

    def __init__(self) -> None:
        self.wrong: Any = None
        self.seconds = 0.0
        self.asked = 0

    async def call(self) -> str:
        self.asked += 1
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.wrong is not None:
            raise self.wrong
        return "fine"


def behind(stage: Stage, breaker: Any, **options: Any) -> tuple[Tower, Service]:
    """A tower with the tool `q` on a service, and a breaker between them."""
    tower, service = stage.tower(max_wait=1e6), Service()
    tower.add_tool(service.call, name="q", independent=True, breaker=breaker, **options)
    return tower, service


def test_it_opens_refuses_probes_and_closes(stage: Stage) -> None:
    """R-76: three failures open it; then calls are refused at once, `circuit_open` with the seconds, and the service is
    left alone; after its time one probe goes through, and when that is well all go.
    """
    tower, service = behind(stage, Breaker(failures=3, window=30, open_for=10))

    async def main() -> None:
        async with tower.run() as run:
            service.wrong = ConnectionError()
            assert codes(await run.execute([Call("q", {})] * 3)) == ["handler_error"] * 3
            assert tower.statistics().breakers["tool:q"].state == "open"
            await asyncio.sleep(4)
            [refused] = done = await run.execute([Call("q", {})])
            sound(done, [Call("q", {})])
            assert (refused.code, refused.outcome, refused.retryable) == ("circuit_open", "rejected", "yes")
            assert refused.retry_after == 6
            assert "circuit breaker of tool q is open, since calls kept failing. Try again in 6 s." in refused.message
            assert service.asked == 3
            await asyncio.sleep(6)
            service.wrong = None
            service.seconds = 1
            done = await run.execute([Call("q", {})] * 4)
            assert codes(done) == [None, "circuit_open", "circuit_open", "circuit_open"]
            assert (await run.execute([Call("q", {})] * 4)).ok
            seen = tower.statistics().breakers["tool:q"]
            assert (seen.state, seen.opened, seen.refused, seen.probing) == ("closed", 1, 4, 0)

    stage.run(main())


def test_a_probe_that_fails_opens_it_again(stage: Stage) -> None:
    """For its whole time, counted from that failure."""
    tower, service = behind(stage, Breaker(failures=1, open_for=10, probes=2))
    service.wrong = OSError()

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("q", {})])
            await asyncio.sleep(10)
            assert codes(await run.execute([Call("q", {})] * 3)).count("circuit_open") >= 1
            assert tower.statistics().breakers["tool:q"].opened == 2
            await asyncio.sleep(9.5)
            assert codes(await run.execute([Call("q", {})])) == ["circuit_open"]
            await asyncio.sleep(0.5)
            service.wrong = None
            assert (await run.execute([Call("q", {})] * 2)).ok

    stage.run(main())


def test_who_waits_is_refused_when_it_opens(stage: Stage) -> None:
    """Calls that wait for a place of the same tool are answered in the step in which it opens, and hold nothing."""
    tower, service = behind(stage, Breaker(failures=1), max_concurrency=1)
    service.wrong, service.seconds = ValueError(), 5

    async def main() -> None:
        async with tower.run() as run:
            done = await run.execute([Call("q", {})] * 20)
            assert codes(done) == ["handler_error", *["circuit_open"] * 19]
            assert stage.clock.value == 5
            assert service.asked == 1

    stage.run(main())


@pytest.mark.parametrize(
    ("wrong", "opens"),
    [
        (ValueError(), True),
        (TimeoutError(), True),
        (ExceptionGroup("g", [ToolError("no"), OSError()]), True),
        (ToolError("no such customer"), False),
        (RateLimited(1), False),
        (ExceptionGroup("g", [ToolError("a"), ToolError("b")]), False),
        (ExceptionGroup("g", [ToolError("a"), RateLimited()]), False),
        (asyncio.CancelledError(), False),
        (None, False),
    ],
)
def test_what_counts_as_a_failure(wrong: Any, opens: bool, stage: Stage) -> None:
    """Whatever a handler raises, but an answer in its own words, a request to slow down, or its own cancel; of a group
    the leaves decide.
    """
    tower, service = behind(stage, Breaker(failures=1))
    service.wrong = wrong
    run_batch(stage, tower, [Call("q", {})])
    assert (tower.statistics().breakers["tool:q"].state == "open") is opens


@pytest.mark.parametrize("thread", [False, True])
def test_a_timeout_is_a_failure_and_a_cancel_is_not(thread: bool, stage: Stage) -> None:
    """P-82: a call that runs into its timeout counts when it is sealed, also when its thread goes on; one that is
    cancelled says nothing, and as a probe it gives its place back.
    """
    tower = stage.tower()

    async def on_loop() -> None:
        await stage.work("q", 5)

    def on_thread() -> None:
        stage.sync_work(stage.loop, "q", 5)

    handler, breaker = on_thread if thread else on_loop, Breaker(failures=1, open_for=10)
    tower.add_tool(handler, name="q", independent=True, timeout=1, breaker=breaker)

    async def main() -> None:
        from kit import here

        stage.loop = here()
        async with tower.run() as run:
            assert codes(await run.execute([Call("q", {})])) == ["handler_timeout"]
            assert tower.statistics().breakers["tool:q"].state == "open"
            await stage.settled(tower)
            await asyncio.sleep(10)
            probe = asyncio.create_task(run.execute([Call("q", {})]))
            await asyncio.sleep(0.5)
            assert tower.statistics().breakers["tool:q"].probing == 1
            run.cancel("no")
            await probe
            await stage.settled(tower)
            seen = tower.statistics().breakers["tool:q"]
            assert (seen.state, seen.probing, seen.opened) == ("half_open", 0, 1)

    stage.run(main())


def test_a_breaker_on_a_pool_counts_all_its_tools(stage: Stage) -> None:
    """Two tools on one service: the failures of one keep the calls of the other away, too; other pools go on."""
    tower = stage.tower(pools={"api": Pool(9, breaker=Breaker(failures=2)), "other": Pool(9, breaker=True)})
    bad, good = Service(), Service()
    bad.wrong = OSError()
    tower.add_tool(bad.call, name="bad", independent=True, pools=["api"])
    tower.add_tool(good.call, name="good", independent=True, pools=["api"])
    tower.add_tool(good.call, name="apart", independent=True, pools=["other"])

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("bad", {})] * 2)
            assert codes(await run.execute([Call("good", {}), Call("apart", {})])) == ["circuit_open", None]
            assert {name: one.state for name, one in tower.statistics().breakers.items()} == {
                "api": "open",
                "other": "closed",
            }

    stage.run(main())


def test_all_or_nothing_with_a_breaker(stage: Stage) -> None:
    """R-58, P-43: a call that its breaker refuses takes nothing of its rate; a probe's place is taken only by a call
    that has all the rest.
    """
    tower, service = behind(stage, Breaker(failures=1, open_for=5), rate="2/100s", when_busy="reject")
    service.wrong = OSError()

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("q", {})])
            assert codes(await run.execute([Call("q", {})] * 3)) == ["circuit_open"] * 3
            assert tower.statistics().rates["tool:q"].started == 1
            await asyncio.sleep(5)
            service.wrong = None
            assert (await run.execute([Call("q", {})])).ok
            assert codes(await run.execute([Call("q", {})])) == ["rate_limited"]
            assert tower.statistics().breakers["tool:q"].probing == 0

    stage.run(main())


def test_r64_a_breaker_comes_and_goes_while_calls_run(stage: Stage) -> None:
    """R-64: one that is declared later counts calls that begin later; one that is taken away refuses nobody."""
    tower, service = behind(stage, None)
    service.wrong = OSError()

    async def main() -> None:
        async with tower.run() as run:
            await run.execute([Call("q", {})])
            changes = tower.configure(tools={"q": {"breaker": {"failures": 1, "open_for": 50}}})
            assert str(changes) == "tools.q.breaker: none -> 1 failures in 30 s, open for 50 s, 1 probes"
            assert codes(await run.execute([Call("q", {})])) == ["handler_error"]
            assert codes(await run.execute([Call("q", {})])) == ["circuit_open"]
            tower.configure(tools={"q": {"breaker": {"failures": 1, "open_for": 10}}})
            await asyncio.sleep(10)
            service.wrong = None
            assert (await run.execute([Call("q", {})])).ok

    stage.run(main())


def test_s13_a_breaker_is_no_capacity(stage: Stage) -> None:
    """S13: observe mode relaxes capacity alone; what keeps failing is left alone there, too."""
    tower, service = stage.tower(mode="observe"), Service()
    service.wrong = OSError()
    tower.add_tool(service.call, name="q", independent=True, breaker=Breaker(failures=1))
    run_batch(stage, tower, [Call("q", {})])
    assert codes(run_batch(stage, tower, [Call("q", {})])) == ["circuit_open"]


def test_a_tenants_breaker_outlives_its_runs(stage: Stage) -> None:
    """A breaker that is open stays open when the last run of its tenant ends; one that remembers nothing goes."""
    tower, service = stage.tower(pools={"api": Pool(9, scope="tenant", breaker=Breaker(failures=1))}), Service()
    tower.add_tool(service.call, name="q", independent=True, pools=["api"])
    run_batch(stage, tower, [Call("q", {})], tenant="well")
    service.wrong = OSError()
    run_batch(stage, tower, [Call("q", {})], tenant="ill")
    assert codes(run_batch(stage, tower, [Call("q", {})], tenant="ill")) == ["circuit_open"]
    assert set(gate_of(tower).ledger.fuses) == {"breaker:pool:api@tenant:ill"}


@pytest.mark.parametrize(
    "wrong",
    [False, 0, "yes", [], {"failures": 0}, {"window": 0}, {"open_for": -1}, {"probes": 0}, {"x": 1}],
)
def test_r51_a_wrong_breaker_is_refused_where_it_is_declared(wrong: Any) -> None:
    """R-51: with the place and what is allowed."""
    with pytest.raises(PolicyError, match=r"tool 'q': breaker"):
        Tower().add_tool(lambda: None, name="q", breaker=wrong)
    with pytest.raises(PolicyError, match=r"Pool\.breaker"):
        Pool(1, breaker=wrong)
