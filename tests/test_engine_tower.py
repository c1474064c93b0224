"""Towers of several processes that share an engine, with real servers: limits that hold over all of them.

A `Street` is a downstream service that counts who is in it: it is the judge, and knows nothing of towers. Two towers of
one process stand for two replicas, as they share nothing but the server; where a process has to die, it is a real one.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Direct, named_values
from servers import PATIENCE, Server

from towerman import Breaker, Context, Pool, RateLimited, Result, Tower
from towerman.errors import PolicyError

redis = pytest.importorskip("redis", reason="no redis-py: pip install 'towerman[redis]'")

LEASE = 0.6
"""Seconds: short, so that the tests of deaths take no longer."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for tests that leave it as it was."""
    one = Server()
    try:
        yield one.start()
    finally:
        one.remove()


@pytest.fixture
def server(shared: Server) -> Server:
    """The same, empty."""
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    return shared


@pytest.fixture
def own() -> Iterator[Server]:
    """A server that a test may stop."""
    one = Server()
    try:
        yield one.start()
    finally:
        one.remove()


class Street:
    """Counts who is in it."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.entered = 0
        self.lock = threading.Lock()
        self.fences: list[int | None] = []

    def enter(self, fence: int | None = None) -> None:
        with self.lock:
            self.inside += 1
            self.entered += 1
            self.most = max(self.most, self.inside)
            self.fences.append(fence)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1


def replica(server: Server, street: Street, *, engine: dict[str, Any] | None = None, **options: Any) -> Tower:
    """A tower with tools that go through the street."""
    more = {"url": server.url, "lease": LEASE, **(engine or {})}
    options.setdefault("pools", {"crm": 2})
    options.setdefault("max_wait", 20.0)
    tower = Tower(engine=more, **options)

    @tower.tool(pools=["crm"], independent=True)
    async def look(seconds: float, ctx: Context) -> str:
        """Look something up."""
        street.enter(ctx.fence)
        try:
            await asyncio.sleep(seconds)
        finally:
            street.leave()
        return "seen"

    @tower.tool(writes="file:{path}")
    async def write(path: str, seconds: float, ctx: Context) -> str:
        """Write a file."""
        street.enter(ctx.fence)
        try:
            await asyncio.sleep(seconds)
        finally:
            street.leave()
        return "written"

    return tower


def looks(count: int, seconds: float = 0.01) -> list[dict[str, Any]]:
    return [{"tool": "look", "arguments": {"seconds": seconds}} for _ in range(count)]


def writes(count: int, path: str = "a", seconds: float = 0.01) -> list[dict[str, Any]]:
    return [{"tool": "write", "arguments": {"path": path, "seconds": seconds}} for _ in range(count)]


async def hand_in(tower: Tower, calls: list[dict[str, Any]], **more: Any) -> list[Result]:
    async with tower.run(**more) as run:
        return list(await run.execute(calls))


def told(results: list[Result]) -> list[str]:
    return [result.code or result.outcome for result in results]


def held(server: Server, group: str = "default") -> dict[str, int]:
    """How many records the group has: leases, offers, waiters, shares."""
    with redis.Redis.from_url(server.url) as client:
        meta = named_values(Direct(client, group, timed=False).look("#")[0])
        return {key: int(meta[key]) for key in ("records", "waiting", "promoted")}


def go(main: Coroutine[Any, Any, None]) -> None:
    """Run a test; one that hangs is a failure, with a story."""
    asyncio.run(_bounded(main))


async def _bounded(main: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(60):
        await main


async def closed(*towers: Tower) -> None:
    for tower in towers:
        tower.validate()
        await tower.aclose()


# ------------------------------------------------------------------------ limits over all


def test_r_10_p_49_replicas_together_never_exceed_a_pool(server: Server) -> None:
    """R-10, R-139, P-49: with a pool of 2 over all, three replicas have two calls in the street, and use both."""

    async def main() -> None:
        street = Street()
        towers = [replica(server, street) for _ in range(3)]
        answers = await asyncio.gather(*(hand_in(tower, looks(12)) for tower in towers for _ in range(2)))
        assert [told(one) for one in answers] == [["ok"] * 12] * 6
        assert (street.most, street.entered, street.inside) == (2, 72, 0)
        await closed(*towers)
        assert held(server) == {"records": 0, "waiting": 0, "promoted": 0}

    go(main())


def test_g2_s12_a_write_excludes_others_over_all_and_fences_grow(server: Server) -> None:
    """G2, S12: two replicas write one file one after the other; each has a greater fence than the one before."""

    async def main() -> None:
        street = Street()
        towers = [replica(server, street) for _ in range(2)]
        answers = await asyncio.gather(*(hand_in(tower, writes(6)) for tower in towers))
        assert [told(one) for one in answers] == [["ok"] * 6] * 2
        assert street.most == 1
        fences = [fence for fence in street.fences if fence is not None]
        assert len(fences) == 12 and fences == sorted(set(fences))
        await closed(*towers)

    go(main())


def test_r_13_a_subtree_excludes_a_file_in_it_also_where_that_replica_knows_no_subtree(server: Server) -> None:
    """G2: one replica has a tool that touches a folder, the other one only tools that touch files."""

    async def main() -> None:
        street = Street()
        one, other = replica(server, street), replica(server, street)

        @one.tool(writes="file:{folder}/**")
        async def move(folder: str) -> str:
            """Move a folder."""
            street.enter()
            await asyncio.sleep(0.05)
            street.leave()
            return "moved"

        calls = [{"tool": "move", "arguments": {"folder": "/x"}}] * 3
        await asyncio.gather(hand_in(one, calls), hand_in(other, writes(6, "/x/a")))
        assert street.most == 1 and street.entered == 9
        await closed(one, other)

    go(main())


def test_s12_what_counts_for_the_process_is_not_asked_about(server: Server) -> None:
    """DESIGN 12: `scope="process"` and the tower's own limits stay in the process: nothing is asked for them."""

    async def main() -> None:
        street = Street()
        tower = replica(server, street, pools={"crm": Pool(2, scope="process")})
        assert told(await hand_in(tower, looks(4))) == ["ok"] * 4
        engine = tower.statistics().engine
        assert engine is not None and engine.asked == 0
        await closed(tower)

    go(main())


def test_s7_a_rate_counts_over_all_replicas(server: Server) -> None:
    """S7, P-40: 4 a minute over all: of 8 calls of two replicas that do not wait, 4 start; the others are told when."""

    async def main() -> None:
        street = Street()
        towers = [
            replica(server, street, pools={"crm": Pool(8, rate="4/min")}, when_busy="reject", run_concurrency=8)
            for _ in range(2)
        ]
        answers = [result for tower in towers for result in await hand_in(tower, looks(4))]
        assert sorted(told(answers)) == ["ok"] * 4 + ["rate_limited"] * 4
        waits = [result.retry_after for result in answers if result.code == "rate_limited"]
        assert all(wait is not None and 0 < wait <= 60 for wait in waits)
        await closed(*towers)

    go(main())


def test_s7_a_start_that_is_refused_there_is_not_spent_here(server: Server) -> None:
    """S7, R-94: a rate that others have used up lets nobody in; when it is free again, all of it is."""

    async def main() -> None:
        street = Street()
        one, other = (replica(server, street, pools={"crm": Pool(8, rate="2/s")}, max_wait=5.0) for _ in range(2))
        began = time.monotonic()
        answers = await asyncio.gather(hand_in(one, looks(3)), hand_in(other, looks(3)))
        assert [told(one) for one in answers] == [["ok"] * 3] * 2
        assert time.monotonic() - began >= 2.0  # 6 starts at 2 a second: the last two come after two whole windows
        await closed(one, other)

    go(main())


def test_r_122_a_service_that_asks_for_a_pause_pauses_all_replicas(server: Server) -> None:
    """R-122: what one replica is told by the service slows down the others, too."""

    async def main() -> None:
        tired = True
        towers = []
        for _ in range(2):
            tower = Tower(engine={"url": server.url, "lease": LEASE}, when_busy="reject")

            @tower.tool(rate="100/s", independent=True, read_only=True)
            async def search(query: str) -> str:
                """Search."""
                if tired:
                    raise RateLimited(30.0)
                return "found"

            towers.append(tower)
        call = [{"tool": "search", "arguments": {"query": "a"}}]
        assert told(await hand_in(towers[0], call)) == ["rate_limited"]
        tired = False
        (answer,) = await hand_in(towers[1], call)
        assert answer.code == "rate_limited" and answer.retry_after is not None and answer.retry_after > 20
        await closed(*towers)

    go(main())


def test_s7_a_breaker_opens_for_all_replicas(server: Server) -> None:
    """Issue 4, 5 over all: what fails for one replica is not called by the others."""

    async def main() -> None:
        started = 0
        towers = []
        for _ in range(2):
            tower = Tower(engine={"url": server.url, "lease": LEASE})

            @tower.tool(breaker=Breaker(failures=2, window=30.0, open_for=30.0), independent=True, read_only=True)
            async def ask(question: str) -> str:
                """Ask."""
                nonlocal started
                started += 1
                raise OSError("down")

            towers.append(tower)
        call = [{"tool": "ask", "arguments": {"question": "a"}}]
        for _ in range(2):
            assert told(await hand_in(towers[0], call)) == ["handler_error"]
        (answer,) = await hand_in(towers[1], call)
        assert answer.code == "circuit_open" and answer.retry_after is not None and started == 2
        await closed(*towers)

    go(main())


def test_s3_a_nested_call_lives_on_what_its_caller_has_over_all(server: Server) -> None:
    """S10: with a pool of 1 and a file of its own, a call's nested calls run on what it has there."""

    async def main() -> None:
        street = Street()
        tower = replica(server, street, pools={"crm": 1})

        @tower.tool(pools=["crm"], writes="file:{path}")
        async def outer(path: str, ctx: Context) -> str:
            """Do all of it."""
            answer = await ctx.execute([*looks(2), *writes(1, path)])
            return ",".join(told(list(answer)))

        (answer,) = await hand_in(tower, [{"tool": "outer", "arguments": {"path": "a"}}])
        assert answer.content == "ok,ok,ok"
        await closed(tower)
        assert held(server)["records"] == 0

    go(main())


def test_s10_a_nested_call_that_would_write_what_its_caller_reads_is_refused_plainly(server: Server) -> None:
    """Over several processes a call may not take more of a resource than its caller has: it is told so at once."""

    async def main() -> None:
        street = Street()
        tower = replica(server, street)

        @tower.tool(reads="file:{path}")
        async def outer(path: str, ctx: Context) -> str:
            """Read, then write."""
            (answer,) = await ctx.execute(writes(1, path))
            return f"{answer.code}: {answer.message}"

        (answer,) = await hand_in(tower, [{"tool": "outer", "arguments": {"path": "a"}}])
        assert answer.content.startswith("policy_error: ") and "declare that it writes it" in answer.content
        await closed(tower)

    go(main())


def test_r_52_sync_handlers_hold_their_leases_too(server: Server) -> None:
    """G3: handlers in threads, on two loops of one tower."""

    street = Street()
    tower = replica(server, street)

    @tower.tool(pools=["crm"], independent=True)
    def slow(seconds: float) -> str:
        """Take a while."""
        street.enter()
        time.sleep(seconds)
        street.leave()
        return "done"

    calls = [{"tool": "slow", "arguments": {"seconds": 0.02}}] * 6
    answers: list[list[str]] = []

    def work() -> None:
        async def main() -> None:
            answers.append(told(await hand_in(tower, calls)))

        go(main())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [["ok"] * 6] * 3 and street.most <= 2
    tower.validate()
    tower.close()
    end = time.monotonic() + 2 * LEASE + 1
    while held(server)["records"] and time.monotonic() < end:
        time.sleep(0.02)
    assert held(server)["records"] == 0


# ------------------------------------------------------------------------ budgets


def spender(server: Server, limit: dict[str, Any], **options: Any) -> Tower:
    """A tower with a tool that spends of its tenant's budget."""
    engine = {"url": server.url, "lease": LEASE, **options.pop("engine", {})}
    tower = Tower(engine=engine, budgets={"tenant": limit}, max_wait=2.0, **options)

    @tower.tool(independent=True, spends={"tokens": 10})
    async def ask(tokens: int, ctx: Context) -> str:
        """Ask a model."""
        ctx.charge(tokens=tokens)
        return "said"

    @tower.tool(independent=True, spends={"tokens": 10}, read_only=True, retry=3)
    async def flaky(times: int, ctx: Context) -> str:
        """Fail some times."""
        if ctx.attempt <= times:
            raise ConnectionError("again")
        return "done"

    return tower


def asks(count: int, tokens: int = 10) -> list[dict[str, Any]]:
    return [{"tool": "ask", "arguments": {"tokens": tokens}} for _ in range(count)]


def account(server: Server, key: str) -> dict[str, list[int]]:
    """By unit what is spent and reserved, in millionths."""
    with redis.Redis.from_url(server.url) as client:
        state = named_values(Direct(client, "default", timed=False).look(f"a{key}")[0])
        units = named_values(state["u"]) if state.get("u") else {}
        return {
            unit: [high * 10**15 + low for high, low in zip(row[::2], row[1::2], strict=True)]
            for unit, row in units.items()
        }


def test_g9_r_102_a_tenants_budget_is_exact_over_replicas(server: Server) -> None:
    """G9, R-102, P-61: of a budget of 100 tokens ten calls of 10 run over three replicas, whoever comes first."""

    async def main() -> None:
        towers = [spender(server, {"tokens": 100}) for _ in range(3)]
        answers = await asyncio.gather(*(hand_in(tower, asks(6), tenant="acme") for tower in towers))
        codes = [code for one in answers for code in told(one)]
        assert codes.count("ok") == 10 and codes.count("budget_exhausted") == 8
        assert account(server, "tenant:acme")["tokens"] == [100_000_000, 0]
        assert told(await hand_in(towers[0], asks(1), tenant="other")) == ["ok"]
        await closed(*towers)

    go(main())


def test_g9_what_is_charged_takes_the_place_of_what_was_asked_over_all(server: Server) -> None:
    """S8: less is given back, more counts; and what a run charges by itself counts, too."""

    async def main() -> None:
        one, other = spender(server, {"tokens": 100}), spender(server, {"tokens": 100})
        assert told(await hand_in(one, asks(2, tokens=3), tenant="acme")) == ["ok", "ok"]
        async with one.run(tenant="acme") as run:
            run.charge(tokens=44)
        end = time.monotonic() + PATIENCE
        while account(server, "tenant:acme")["tokens"] != [50_000_000, 0]:
            assert time.monotonic() < end, account(server, "tenant:acme")
            await asyncio.sleep(0.02)
        codes = told(await hand_in(other, asks(6), tenant="acme"))
        assert codes == ["ok"] * 5 + ["budget_exhausted"]
        await closed(one, other)

    go(main())


def test_g9_each_attempt_is_paid_over_all_and_what_never_starts_is_given_back(server: Server) -> None:
    """S8, S9: three attempts cost three times; a call that is cancelled while it waits costs nothing."""

    async def main() -> None:
        tower = spender(server, {"tokens": 100}, pools={"one": 1})

        @tower.tool(pools=["one"], independent=True, spends={"tokens": 10})
        async def wait(ctx: Context) -> str:
            """Wait."""
            await asyncio.sleep(30)
            return ""

        (answer,) = await hand_in(tower, [{"tool": "flaky", "arguments": {"times": 2}}], tenant="acme")
        assert answer.outcome == "ok" and answer.attempts == 3
        assert account(server, "tenant:acme")["tokens"] == [30_000_000, 0]
        task = asyncio.ensure_future(hand_in(tower, [{"tool": "wait", "arguments": {}}] * 3, tenant="acme"))
        while account(server, "tenant:acme")["tokens"] != [40_000_000, 20_000_000]:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        await tower._core.engine.wait_idle()  # type: ignore[union-attr]
        assert account(server, "tenant:acme")["tokens"] == [40_000_000, 0]
        await closed(tower)

    go(main())


def test_g9_a_batch_that_is_not_run_in_part_is_not_over_all_either(server: Server) -> None:
    """R-99: with `partial=False` a batch of which one call lacks is refused whole, and nothing is reserved."""

    async def main() -> None:
        one, other = (spender(server, {"tokens": 100, "partial": False}) for _ in range(2))
        assert told(await hand_in(one, asks(6), tenant="acme")) == ["ok"] * 6
        assert told(await hand_in(other, asks(5), tenant="acme")) == ["budget_exhausted"] * 5
        assert account(server, "tenant:acme")["tokens"] == [60_000_000, 0]
        assert told(await hand_in(other, asks(4), tenant="acme")) == ["ok"] * 4
        await closed(one, other)

    go(main())


@pytest.mark.parametrize("mode", ["closed", "open", "local"])
def test_g9_budgets_while_the_engine_is_away(own: Server, mode: str) -> None:
    """on_unavailable: refused; by this process alone; by its half."""

    async def main() -> None:
        engine = {"on_unavailable": mode, **({"replicas": 2} if mode == "local" else {})}
        tower = spender(own, {"tokens": 100}, engine=engine)
        own.stop()
        answers = await hand_in(tower, asks(5), tenant="acme")
        if mode == "closed":
            assert told(answers) == ["engine_unavailable"] * 5
        else:
            assert told(answers) == ["ok"] * 5
            more = told(await hand_in(tower, asks(1), tenant="acme"))
            assert more == (["ok"] if mode == "open" else ["engine_unavailable"])
        own.start()
        assert told(await hand_in(tower, asks(1), tenant="else")) == ["ok"]
        await closed(tower)

    go(main())


def test_a_program_without_a_loop_shares_the_engine_too(server: Server) -> None:
    """A script with `run_sync` and threads: the tower's own loop asks; closing leaves nothing there."""
    street = Street()
    with replica(server, street) as tower:

        @tower.tool(pools=["crm"], independent=True)
        def slow(seconds: float) -> str:
            """Take a while."""
            street.enter()
            time.sleep(seconds)
            street.leave()
            return "done"

        with tower.run() as run:
            answers = run.execute_sync([{"tool": "slow", "arguments": {"seconds": 0.02}}] * 6)
        assert told(list(answers)) == ["ok"] * 6 and street.most == 2
    assert held(server) == {"records": 0, "waiting": 0, "promoted": 0}


# ------------------------------------------------------------------------ waiting


def test_s2_a_wait_for_others_is_bounded_and_says_what_for(server: Server) -> None:
    """S2, G6: whoever waits for what another process has is refused when its wait is over, and leaves nothing there."""

    async def main() -> None:
        street = Street()
        one, other = replica(server, street, pools={"crm": 1}), replica(server, street, pools={"crm": 1}, max_wait=0.3)
        async with one.run() as run:
            long = asyncio.ensure_future(run.execute(looks(1, 1.5)))
            while not street.inside:
                await asyncio.sleep(0.01)
            (answer,) = await hand_in(other, looks(1))
            assert answer.code == "wait_timeout" and answer.waited_for == ("pool crm",)
            assert 0.25 <= answer.waited < 1.0
            other.validate()
            long.cancel()
            await asyncio.wait({long})
        await closed(one, other)
        assert held(server) == {"records": 0, "waiting": 0, "promoted": 0}

    go(main())


def test_s12_who_does_not_wait_is_refused_at_once(server: Server) -> None:
    """`when_busy="reject"`: what other processes have is as busy as what this one has."""

    async def main() -> None:
        street = Street()
        one, other = replica(server, street, pools={"crm": 1}), replica(server, street, when_busy="reject")
        async with one.run() as run:
            long = asyncio.ensure_future(run.execute([*looks(1, 5.0), *writes(1, "a", 5.0)]))
            while street.inside < 2:
                await asyncio.sleep(0.01)
            other.configure(pools={"crm": 1})
            answers = await hand_in(other, [*looks(1), *writes(1, "a"), *writes(1, "b")])
            assert told(answers) == ["concurrency_limit", "concurrency_limit", "ok"]
            assert "pool crm" in answers[0].message and "file:{path}" in answers[1].message
            long.cancel()
            await asyncio.wait({long})
        await closed(one, other)

    go(main())


def test_s12_what_waits_there_holds_nothing_here(server: Server) -> None:
    """S12: with one place in this process, a call that waits for others does not keep its siblings from that place."""

    async def main() -> None:
        street = Street()
        one = replica(server, street, pools={"crm": 1})
        other = replica(server, street, pools={"crm": 1}, max_concurrency=1, run_concurrency=1)
        async with one.run() as run:
            long = asyncio.ensure_future(run.execute(looks(1, 30.0)))
            while not street.inside:
                await asyncio.sleep(0.01)
            async with other.run() as mine:
                seen: list[int] = []
                both = asyncio.ensure_future(
                    mine.execute([*looks(1), *writes(2, "b")], on_result=lambda result: seen.append(result.index))
                )
                while len(seen) < 2:
                    await asyncio.sleep(0.01)
                assert seen == [1, 2]
                long.cancel()
                assert told(list(await both)) == ["ok", "ok", "ok"]
                await asyncio.wait({long})
        await closed(one, other)

    go(main())


@pytest.mark.parametrize("whole", [True, False])
def test_g7_1000_calls_cancelled_at_any_moment_leave_nothing(server: Server, whole: bool) -> None:
    """G3, G7: batches cancelled before, in and after the question, the wait, the offer: capacity is whole at once."""

    async def main() -> None:
        street = Street()
        towers = [replica(server, street, max_calls_per_batch=100) for _ in range(2)]
        for turn in range(10):
            tasks = [asyncio.ensure_future(hand_in(tower, looks(50, 0.004))) for tower in towers]
            await asyncio.sleep(0.003 * turn)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for tower in towers:
                tower.validate()
        assert street.most <= 2 and street.inside == 0
        if whole:  # at once, not when leases run out
            answers = await asyncio.gather(*(hand_in(tower, looks(2)) for tower in towers))
            assert [told(one) for one in answers] == [["ok", "ok"]] * 2
        await closed(*towers)
        assert held(server) == {"records": 0, "waiting": 0, "promoted": 0}

    go(main())


def test_s12_of_10000_calls_only_a_few_wait_at_the_engine(own: Server) -> None:
    """S12: the best of a process are known to the engine, not all: 10,000 calls that wait are not 10,000 questions."""

    async def main() -> None:
        street = Street()
        one = replica(own, street, pools={"crm": 1})
        other = replica(own, street, pools={"crm": 1}, max_calls_per_batch=10_000)
        async with one.run() as run:
            long = asyncio.ensure_future(run.execute(looks(1, 30.0)))
            while not street.inside:
                await asyncio.sleep(0.01)
            crowd = asyncio.ensure_future(hand_in(other, looks(10_000)))
            await asyncio.sleep(0.5)
            assert 1 <= held(own)["waiting"] <= 2 * other.options.run_concurrency + 1
            other.validate()
            crowd.cancel()
            long.cancel()
            await asyncio.wait({crowd, long})
        await closed(one, other)
        assert held(own) == {"records": 0, "waiting": 0, "promoted": 0}

    go(main())


# ------------------------------------------------------------------------ what breaks


def test_r_102_p_50_a_replica_that_dies_gives_back_within_its_lease(server: Server) -> None:
    """R-102, P-50: kill -9 while it holds: whoever waits has it within lease + 1 s."""

    street = Street()
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("engine_replica.py")), server.url, str(LEASE)],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert json.loads(other.stdout.readline()) == {"in": "look"}

        async def main() -> None:
            tower = replica(server, street, pools={"crm": 1})
            waiting = asyncio.ensure_future(hand_in(tower, looks(1)))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            other.send_signal(signal.SIGKILL)
            began = time.monotonic()
            assert told(await waiting) == ["ok"]
            assert time.monotonic() - began < LEASE + 1
            await closed(tower)

        try:
            go(main())
        finally:
            other.kill()


def test_s12_a_call_whose_lease_is_lost_is_told_to_stop(server: Server) -> None:
    """Issue 6, 2: what it held may be another one's: it is stopped, its result says so, and a thread is an orphan."""

    async def main() -> None:
        street = Street()
        tower = replica(server, street)
        async with tower.run() as run:
            batch = asyncio.ensure_future(run.execute([*looks(1, 30.0), *writes(1, "a", 30.0)]))
            while street.inside < 2:
                await asyncio.sleep(0.01)
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
            answers = list(await batch)
        assert told(answers) == ["lease_lost", "lease_lost"]
        assert [answer.applied for answer in answers] == ["unknown", "unknown"] or answers[0].applied in (
            "no",
            "unknown",
        )
        assert street.inside == 0
        engine = tower.statistics().engine
        assert engine is not None and engine.lost == 2
        assert told(await hand_in(tower, looks(1))) == ["ok"]
        await closed(tower)

    go(main())


def test_s12_an_outage_shorter_than_the_wait_is_only_a_wait(own: Server) -> None:
    """on_unavailable="closed": a call that comes while the server is away starts when it is back."""

    async def main() -> None:
        street = Street()
        tower = replica(own, street)
        assert told(await hand_in(tower, looks(1))) == ["ok"]
        own.stop()
        waiting = asyncio.ensure_future(hand_in(tower, looks(3)))
        await asyncio.sleep(0.5)
        assert not waiting.done() and street.entered == 1
        tower.validate()
        assert tower.statistics().running == 0
        own.start()
        assert told(await waiting) == ["ok"] * 3
        await closed(tower)

    go(main())


def test_s12_a_longer_outage_refuses(own: Server) -> None:
    """on_unavailable="closed": the code is `engine_unavailable`; who does not wait is told at once; others are not."""

    async def main() -> None:
        street = Street()
        tower = replica(own, street, max_wait=0.4)
        impatient = replica(own, street, when_busy="reject")
        own.stop()
        (answer,) = await hand_in(tower, looks(1))
        assert answer.code == "engine_unavailable" and answer.waited_for == ("engine",)
        assert answer.applied == "no" and answer.retryable != "no"
        assert told(await hand_in(impatient, looks(1))) == ["engine_unavailable"]
        assert street.entered == 0
        await closed(tower, impatient)

    go(main())


def test_s12_open_runs_by_the_limits_of_this_process_and_says_so(own: Server) -> None:
    """on_unavailable="open": nothing waits for the server; the batch is told; what runs is not stopped."""

    async def main() -> None:
        street = Street()
        tower = replica(own, street, engine={"on_unavailable": "open"})
        long = asyncio.ensure_future(hand_in(tower, looks(1, 3 * LEASE)))
        while not street.inside:
            await asyncio.sleep(0.01)
        own.stop()
        async with tower.run() as run:
            answer = await run.execute(looks(6))
        assert told(list(answer)) == ["ok"] * 6 and street.most <= 2
        assert answer.notice is not None and "this process alone" in answer.notice
        assert told(await long) == ["ok"]
        engine = tower.statistics().engine
        assert engine is not None and engine.alone >= 6
        await closed(tower)

    go(main())


def test_s12_local_runs_within_a_share_and_never_what_is_exclusive(own: Server) -> None:
    """on_unavailable="local": of a pool of 4 over two replicas each has 2; a write waits for the server."""

    async def main() -> None:
        street = Street()
        more = {"on_unavailable": "local", "replicas": 2}
        pools = {"crm": Pool(4, rate="12/min")}
        towers = [replica(own, street, engine=more, pools=pools, max_wait=1.5) for _ in range(2)]
        own.stop()
        answers = await asyncio.gather(*(hand_in(tower, [*looks(6, 0.05), *writes(1)]) for tower in towers))
        for one in answers:
            assert told(one) == ["ok"] * 6 + ["engine_unavailable"]
        assert street.most == 4
        assert told(await hand_in(towers[0], looks(1))) == ["engine_unavailable"]  # its share of the rate is used up
        await closed(*towers)

    go(main())


def test_s12_a_restart_without_data_stops_what_ran_and_nothing_else(own: Server) -> None:
    """Issue 6, 2: the server comes back empty: leases are lost and told, fences do not go back, calls go on."""

    async def main() -> None:
        street = Street()
        tower = replica(own, street)
        assert told(await hand_in(tower, writes(1))) == ["ok"]
        running = asyncio.ensure_future(hand_in(tower, looks(1, 30.0)))
        while not street.inside:
            await asyncio.sleep(0.01)
        own.restart()
        assert told(await running) == ["lease_lost"]
        assert told(await hand_in(tower, writes(1))) == ["ok"]
        fences = [fence for fence in street.fences if fence is not None]
        assert fences == sorted(fences)
        await closed(tower)

    go(main())


def test_s12_a_write_may_ask_replicas_of_the_server_to_have_heard_of_it(own: Server) -> None:
    """Issue 6, 2: with `acks` a write starts once so many replicas know of it; reads and pools do not wait for that."""

    async def main() -> None:
        street = Street()
        tower = replica(own, street, engine={"acks": 1, "lease": 1.5}, max_wait=1.0)
        answers = await hand_in(tower, [*looks(1), *writes(1)])
        assert told(answers) == ["ok", "engine_unavailable"] and street.entered == 1
        copy = Server("--replicaof", f"127.0.0.1 {own.port}")
        try:
            copy.start()
            with redis.Redis.from_url(copy.url) as client:
                while client.info("replication")["master_link_status"] != "up":
                    await asyncio.sleep(0.02)
            assert told(await hand_in(tower, writes(2))) == ["ok", "ok"]
            await closed(tower)
            assert held(own)["records"] == 0
        finally:
            copy.remove()

    go(main())


# ------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("http://localhost", "engine.url: begins with redis://"),
        ({"group": "a"}, "engine: url is missing"),
        ({"url": "redis://localhost", "lease": 0.01}, "engine.lease: from 0.1 to 3,600 seconds"),
        ({"url": "redis://localhost", "lease": "long"}, "engine.lease: a finite number of seconds"),
        ({"url": "redis://localhost", "group": "a b"}, "engine.group: 1 to 128 letters"),
        ({"url": "redis://localhost", "on_unavailable": "maybe"}, "engine.on_unavailable: one of"),
        ({"url": "redis://localhost", "on_unavailable": "local"}, "engine.replicas: with on_unavailable='local'"),
        ({"url": "redis://localhost", "ulr": "x"}, "engine: no option 'ulr'; did you mean 'url'?"),
        ({"url": 7}, "engine.url: text; got int"),
        (7, "engine: the URL of a Redis or Valkey"),
    ],
)
def test_a_wrong_engine_is_told_with_its_place(engine: Any, told: str) -> None:
    """Bad input gets a clear error that names the place."""
    with pytest.raises(PolicyError) as wrong:
        Tower(engine=engine)
    assert told in str(wrong.value)


def test_r_130_no_message_shows_the_url(own: Server) -> None:
    """R-130: a password in the URL is in no message, repr or statistics."""

    async def main() -> None:
        street = Street()
        url = f"redis://user:canary-7d1@127.0.0.1:{own.port}/0"
        tower = replica(own, street, engine={"url": url}, max_wait=0.2)
        (answer,) = await hand_in(tower, looks(1))
        assert answer.code == "engine_unavailable"
        seen = [repr(tower), repr(tower.options), repr(tower.statistics()), repr(answer), str(answer.content)]
        assert not any("canary-7d1" in text for text in seen)
        with pytest.raises(PolicyError) as wrong:
            Tower(engine=url.replace("redis://", "redsi://"))
        assert "canary-7d1" not in str(wrong.value)
        await closed(tower)

    go(main())


def test_a_pool_over_all_needs_an_engine() -> None:
    """A limit that each replica counts alone is not a limit: who asks for one over all is told what that takes."""
    with pytest.raises(PolicyError, match="scope='cluster' counts over all processes"):
        Tower(pools={"crm": Pool(2, scope="cluster")})


def test_a_file_gives_the_engine(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`[engine]` of towerman.toml, with variables of the environment, and its mistakes with their keys."""
    monkeypatch.setenv("WHERE", server.url)
    path = tmp_path / "towerman.toml"
    path.write_text('[engine]\nurl = "${WHERE}"\ngroup = "a"\nlease = 2.5\n[pools.crm]\npermits = 2\n')
    tower = Tower(path)
    assert tower.options.engine is not None
    assert (tower.options.engine.group, tower.options.engine.lease) == ("a", 2.5)
    assert tower.options.scope_of(tower.options.pools["crm"]) == "cluster"
    path.write_text('[engine]\nurl = "${WHERE}"\nlaese = 2.5\n')
    with pytest.raises(PolicyError, match=r"engine.laese: no such key; did you mean 'lease'\?"):
        Tower(path)
    monkeypatch.setenv("TOWERMAN_ENGINE", server.url)
    assert Tower().options.engine is not None
