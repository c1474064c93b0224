"""The ledger on Redis or Valkey, with real servers and real processes: what breaks, and what holds all the same."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Direct, ask, named_values, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import PATIENCE, Server, free_port

from towerman.calls import COMPATIBLE, IS, IX, S, X
from towerman.clock import RealClock
from towerman.engines import line as line_room
from towerman.engines import redis as redis_room
from towerman.engines.library import keys_of, library, named
from towerman.engines.line import Known
from towerman.engines.redis import RedisLedger
from towerman.engines.words import Breaker, EngineUnavailable, Grant, Limits, Pool, Rate, Refusal, Wanted
from towerman.errors import PolicyError
from towerman.rates import MICRO

redis = pytest.importorskip("redis", reason="no redis-py: pip install 'towerman[redis]'")

LEASE = 60 * MICRO
ONE = Wanted([Pool("P", 1, 1)])


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


@asynccontextmanager
async def ledgers(count: int, url: str, **options: Any) -> AsyncIterator[list[RedisLedger]]:
    """Ledgers as so many processes would have them; closed at the end."""
    options = {"lease": 5.0, **options}
    made = [RedisLedger(url, **options) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            await one.aclose()


def go(main: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own."""
    asyncio.run(asyncio.wait_for(main, 60))


async def granted(ledger: RedisLedger, wanted: Wanted = ONE, **options: Any) -> Grant:
    """A claim that gets it."""
    got = await ledger.claim(wanted, **options)
    assert isinstance(got, Grant), got
    return got


async def refused(ledger: RedisLedger, wanted: Wanted = ONE, **options: Any) -> Refusal:
    """A claim that does not get it."""
    got = await ledger.claim(wanted, **options)
    assert isinstance(got, Refusal), got
    return got


def nothing_is_left(url: str, group: str = "default") -> None:
    """No lease, no waiter, no permit."""
    with redis.Redis.from_url(url) as client:
        direct = Direct(client, group, timed=False)
        meta = named_values(direct.look("#")[0])
        assert (meta["records"], meta["waiting"]) == (0, 0)
        keys = keys_of(group)
        assert [client.exists(key) for key in keys[2:5]] == [0, 0, 0]
        assert direct.look("pP") == [[]]


class Holder:
    """A process that claims, holds and is killed.

    Args:
        url: of the server.
        lease: seconds.
        wait: seconds.
        units: of the pool P.
        limit: of it.
    """

    def __init__(self, url: str, lease: float, wait: float = 0, units: int = 1, limit: int = 1) -> None:
        command = [sys.executable, str(Path(__file__).with_name("engine_holder.py")), url]
        self.process = subprocess.Popen(
            [*command, str(lease), str(wait), str(units), str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def says(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, how: int = signal.SIGKILL) -> None:
        """By its pid."""
        if self.process.poll() is None:
            os.kill(self.process.pid, how)
        self.process.wait(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


# ==================================================================== one limit for all


def test_r10_a_limit_counts_for_all_replicas(server: Server) -> None:
    """R-10, P-52, G3: with a pool of 4 and a rate of 10, three replicas together hold 4 and start 10, exactly."""

    async def main() -> None:
        async with ledgers(3, server.url) as replicas:
            four = Wanted([Pool("P", 1, 4)])
            answers = await asyncio.gather(*[one.claim(four) for one in replicas for _ in range(10)])
            held = [one for one in answers if isinstance(one, Grant)]
            assert len(held) == 4
            assert len({one.fence for one in held}) == 4
            for one in held:
                assert (await replicas[0].release(one)) == [1]  # whoever knows the name can give it back
            ten = Wanted(rates=[Rate("R", (10, 60 * MICRO, None, 0))])
            answers = await asyncio.gather(*[one.claim(ten) for one in replicas for _ in range(10)])
            starts = [one for one in answers if isinstance(one, Grant)]
            assert len(starts) == 10
            late = await refused(replicas[0], ten)
            assert late.kind == "rate" and late.retry_after == pytest.approx(60, abs=1)
            for one in starts:
                replicas[0].release(one)
            for ledger in replicas:
                await ledger.wait_idle()

    go(main())
    nothing_is_left(server.url)


def test_all_or_nothing_of_every_kind(server: Server) -> None:
    """G2, G9: what is in the way is named by its kind and place, and nothing of the rest is taken."""

    async def main() -> None:
        async with ledgers(1, server.url) as [ledger]:
            chain = [Limits("tenant:a", (("calls", 2 * MICRO), ("tokens", 10)))]
            shares, lacks = await ledger.reserve(chain, [{"calls": MICRO, "tokens": 6}] * 2, [(), ()])
            assert [share is not None for share in shares] == [True, False]
            assert lacks == {1: Refusal("budget", 0, unit="tokens")}
            share = shares[0]
            assert share is not None

            def wanted(**more: Any) -> Wanted:
                return Wanted(
                    [Pool("P", 1, 1)],
                    [("file:/a", X)],
                    [Rate("R", (2, 60 * MICRO, 2, 0))],
                    [Breaker("B", (1, 60 * MICRO, 60 * MICRO, 1))],
                    **more,
                )

            first = await granted(ledger, wanted(share=share.id, chain=chain))
            assert (await refused(ledger, wanted())).kind == "pool"
            assert (await refused(ledger, Wanted(holds=[("x", S), ("file:/a", S)]))) == Refusal("resource", 1)
            assert (await refused(ledger, Wanted([Pool("P", 2, 1)]))).kind == "too_much"
            await ledger.begun(first)
            assert await ledger.release(first, verdict="failed") == [1]
            ledger.charge(share, {"tokens": 4})
            assert (await ledger.settle(share))[0] == 1
            open_now = await refused(ledger, wanted())
            assert open_now.kind == "breaker" and open_now.retry_after == pytest.approx(60, abs=1)
            [more], _ = await ledger.reserve(chain, [{"calls": MICRO, "tokens": 6}])
            assert more is not None  # what was not spent of the first can be had again
            assert (await ledger.refund(more))[0] == 1

    go(main())


def test_what_is_told_of_a_running_call(server: Server) -> None:
    """S5, G7: orphans, verdicts and pauses reach the server, each a call that nobody has to wait for."""

    async def main() -> None:
        async with ledgers(1, server.url) as [ledger]:
            wanted = Wanted(
                [Pool("P", 1, 2)], rates=[Rate("R", (5, MICRO, 5, 0))], breakers=[Breaker("B", (1, MICRO, MICRO, 1))]
            )
            first = await granted(ledger, wanted)
            assert await ledger.begun(first) == [1]
            assert await ledger.orphan(first, 1) == [1]
            with redis.Redis.from_url(server.url) as client:
                assert Direct(client, "default", timed=False).look("pP") == [[1, 1]]
            assert await ledger.pause("R", 30.0) == [1]
            paused = await refused(ledger, wanted)
            assert paused.kind == "rate" and paused.retry_after == pytest.approx(30, abs=1)
            bare = Wanted(rates=[Rate("N", None)])  # no limit, but whoever is behind it can be busy
            assert await ledger.release(await granted(ledger, bare)) == [1]
            assert await ledger.pause("N", 30.0) == [1]
            assert (await refused(ledger, bare)).retry_after == pytest.approx(30, abs=1)
            assert await ledger.verdict(first, "failed") == [1, [1]]
            assert (await refused(ledger, wanted)).kind == "breaker"
            assert await ledger.release(first) == [1]
            assert repr(ledger) == "RedisLedger(group='default', 0 held)"

    go(main())
    nothing_is_left(server.url)


def test_r102_a_reservation_of_whoever_dies_goes_back(server: Server) -> None:
    """R-102, G11: what a batch has reserved is renewed while its process lives, and refunded once it does not."""

    async def main() -> None:
        chain = [Limits("tenant:a", (("calls", MICRO),))]
        async with ledgers(2, server.url, lease=0.9) as [one, other]:
            [share], _ = await one.reserve(chain, [{"calls": MICRO}])
            assert share is not None
            await asyncio.sleep(1.5)
            assert await other.reserve(chain, [{"calls": MICRO}]) == ([None], {0: Refusal("budget", 0, unit="calls")})
            one._heart.drop(share)  # as if its process were gone
            await asyncio.sleep(1.2)
            gone = await refused(one, Wanted(share=share.id, chain=chain))
            assert gone.kind == "reservation"
            [again], _ = await other.reserve(chain, [{"calls": MICRO}])
            assert again is not None
            await other.refund(again)
            cancelled = asyncio.create_task(one.reserve(chain, [{"calls": MICRO}]))
            await asyncio.sleep(0)  # it has asked, and has no answer yet: the server grants what nobody waits for
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert cancelled.cancelled()
            await one.wait_idle()
            [last], _ = await other.reserve(chain, [{"calls": MICRO}])
            assert last is not None
            await other.settle(last)

    go(main())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def rows_of(text: str) -> int:
    """Calls of batches in what is sent in one call of the server."""
    return sum(len(op) - {"reserve": 3, "part": 4}.get(op[0], len(op)) for op in json.loads(text))


def test_g11_a_very_long_batch_keeps_nobody_waiting(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """G9, G11: 3,000 calls reserve in parts, in order, so that no call of the server does more work than any other."""
    sent: list[int] = []
    real = line_room.Line._call

    async def call(self: Any, function: str, texts: list[str]) -> list[Any]:
        sent.append(rows_of(f"[{','.join(texts)}]"))
        return await real(self, function, texts)

    monkeypatch.setattr(line_room.Line, "_call", call)

    async def main() -> None:
        chain = [Limits("tenant:a", (("calls", 2_500 * MICRO),))]
        async with ledgers(1, server.url, lease=30.0) as [ledger]:
            shares, lacks = await ledger.reserve(chain, [{"calls": MICRO}] * 3_000)
            assert [share is not None for share in shares] == [True] * 2_500 + [False] * 500
            assert lacks == dict.fromkeys(range(2_500, 3_000), Refusal("budget", 0, unit="calls"))
            assert ledger.statistics()["held"] == 2_500
            assert sum(sent) == 3_000 and max(sent) <= line_room.TOGETHER
            for share in shares:
                if share is not None:
                    ledger.refund(share)
            sent.clear()
            answers = await asyncio.gather(*(ledger.reserve(chain, [{"calls": MICRO}] * 100) for _ in range(20)))
            assert not any(lack for _, lack in answers)
            assert sum(sent) == 2_000 and max(sent) <= line_room.TOGETHER

            # What is not run in part goes back, all of it.
            whole = [Limits("tenant:b", (("calls", 2_500 * MICRO),), partial=False)]
            shares, lacks = await ledger.reserve(whole, [{"calls": MICRO}] * 3_000)
            assert shares == [None] * 3_000
            assert lacks == dict.fromkeys(range(3_000), Refusal("budget", 0, unit="calls"))
            shares, lacks = await ledger.reserve(whole, [{"calls": MICRO}] * 2_500)
            assert not lacks and None not in shares

            # Who is cancelled in the middle has nothing.
            cut = [Limits("tenant:c", (("calls", 3_000 * MICRO),))]
            sent.clear()
            task = asyncio.create_task(ledger.reserve(cut, [{"calls": MICRO}] * 3_000))
            while len(sent) < 3:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            shares, lacks = await ledger.reserve(cut, [{"calls": MICRO}] * 3_000)
            assert not lacks and None not in shares

    go(main())


UNITS = ("calls", "tokens")
batches = st.lists(
    st.tuples(
        st.one_of(st.none(), st.dictionaries(st.sampled_from(UNITS), st.integers(0, 4), min_size=1)),
        st.lists(st.integers(0, 11), max_size=2),
    ),
    min_size=2,
    max_size=12,
)


@given(
    batch=batches,
    limits=st.lists(
        st.tuples(st.dictionaries(st.sampled_from(UNITS), st.integers(0, 12), min_size=1), st.booleans()),
        min_size=1,
        max_size=2,
    ),
)
@settings(max_examples=60)
def test_g9_a_batch_in_parts_gets_what_it_would_get_at_once(shared: Server, batch: Any, limits: Any) -> None:
    """G9, S8: who gets a share, who does not, and why, does not depend on how a batch is sent."""
    calls = [one for one, _ in batch]
    needs = [[need for need in one if need < index] for index, (_, one) in enumerate(batch)]
    chain = [
        Limits(f"tenant:{place}", tuple(limit.items()), partial=partial)
        for place, (limit, partial) in enumerate(limits)
    ]

    async def main() -> list[Any]:
        found = []
        for most in (128, 3):
            with redis.Redis.from_url(shared.url) as client, pytest.MonkeyPatch.context() as patch:
                client.flushall()
                patch.setattr(redis_room, "TOGETHER", most)
                async with ledgers(1, shared.url) as [ledger]:
                    shares, lacks = await ledger.reserve(chain, calls, needs)
                    await ledger.wait_idle()
                    left = Direct(client, "default", timed=False).look(*[f"a{one.key}" for one in chain])
                    reserved = [{**named_values(one), "e": 0, "w": 0} if one else {} for one in left]
                    found.append(([share is None for share in shares], lacks, reserved, ledger.statistics()["held"]))
        return found

    at_once, in_parts = asyncio.run(asyncio.wait_for(main(), 60))
    assert in_parts == at_once


def test_after_a_fork_what_the_parent_holds_is_the_parents(server: Server) -> None:
    """G3: a forked child holds nothing, renews nothing and has a connection and names of its own."""

    async def child(ledger: RedisLedger) -> bool:
        right = isinstance(await ledger.claim(ONE), Refusal)
        other = await ledger.claim(Wanted([Pool("Q", 1, 1)]))
        right = right and isinstance(other, Grant) and ledger.statistics()["held"] == 1
        await ledger.aclose()  # what it holds it leaves to its lease
        return right

    async def main() -> None:
        async with ledgers(1, server.url, lease=1.5) as [ledger]:
            first = await granted(ledger)
            pid = os.fork()
            if not pid:
                code = 2
                try:
                    code = 0 if asyncio.run(child(ledger)) else 1
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            await asyncio.sleep(2.0)
            assert not first.lost
            assert await ledger.release(first) == [1]
            await ledger.release(await granted(ledger, Wanted([Pool("Q", 1, 1)])))

    go(main())


def test_a_handed_over_permit_comes_at_once(server: Server) -> None:
    """S12: whoever waits on another replica is offered what is given back, without asking again."""

    async def main() -> None:
        async with ledgers(2, server.url, lease=30.0) as [one, other]:
            first = await granted(one)
            waiting = asyncio.create_task(granted(other, wait=20))
            await asyncio.sleep(0.3)
            before = time.monotonic()
            await one.release(first)
            second = await waiting
            assert time.monotonic() - before < 0.5  # it asks by itself each second
            assert second.fence > first.fence
            assert (await refused(one, wait=0.1)) == Refusal("pool", 0, waited=True)
            await other.release(second)

    go(main())
    nothing_is_left(server.url)


def test_s12_who_declines_keeps_its_place(server: Server) -> None:
    """S12: an offer that is declined goes to the next; its waiter is offered the next one before those behind it."""

    async def main() -> None:
        async with ledgers(3, server.url, lease=1.2) as [one, other, third]:
            first = await granted(one)
            declined = []

            def take() -> bool:
                declined.append(len(declined) > 0)
                return declined[-1]

            slow = asyncio.create_task(granted(other, wait=20, take=take))
            await asyncio.sleep(0.1)
            quick = asyncio.create_task(granted(third, wait=20))
            await asyncio.sleep(0.1)
            await one.release(first)
            second = await quick
            assert not slow.done() and declined == [False]
            await third.release(second)
            await other.release(await slow)
            assert declined == [False, True]

    go(main())
    nothing_is_left(server.url)


# ==================================================================== who dies


def test_p49_a_killed_holder_gives_back_within_its_lease(server: Server) -> None:
    """P-49, G11: limit 2, both held by a process that is killed; the whole is free within lease + 1 s, not before."""
    holder = Holder(server.url, 1.5, units=2, limit=2)
    try:
        first = holder.says()
        assert first.startswith("granted")

        async def main() -> None:
            async with ledgers(1, server.url) as [ledger]:
                both = Wanted([Pool("P", 2, 2)])
                await asyncio.sleep(2.0)  # it lives, and renews
                assert (await refused(ledger, both)).kind == "pool"
                holder.end()
                before = time.monotonic()
                second = await granted(ledger, both, wait=10)
                assert time.monotonic() - before <= 2.5
                assert second.fence > int(first.split()[1])
                await ledger.release(second)

        go(main())
    finally:
        holder.end()
    nothing_is_left(server.url)


def test_g11_a_killed_waiter_takes_nothing_with_it(server: Server) -> None:
    """G11: a process that is killed while it waits first in line delays those behind it by less than lease + 1 s."""

    async def main() -> None:
        async with ledgers(2, server.url, lease=1.5) as [one, other]:
            first = await granted(one)
            waiter = Holder(server.url, 1.5, wait=30)
            try:
                assert waiter.says() == "waits"
                behind = asyncio.create_task(granted(other, wait=20))
                await asyncio.sleep(0.2)
                waiter.end()
                before = time.monotonic()
                await one.release(first)
                await other.release(await behind)
                assert time.monotonic() - before <= 2.5
            finally:
                waiter.end()

    go(main())
    nothing_is_left(server.url)


def test_g11_a_holder_that_was_stopped_past_its_lease_is_told(server: Server) -> None:
    """G11: stopped, overtaken, and going on: it is told that it is lost, and its late release frees nobody else's."""
    holder = Holder(server.url, 0.9)
    try:
        first = int(holder.says().split()[1])
        os.kill(holder.process.pid, signal.SIGSTOP)

        async def main() -> None:
            async with ledgers(1, server.url) as [ledger]:
                second = await granted(ledger, wait=10)
                assert second.fence > first
                os.kill(holder.process.pid, signal.SIGCONT)
                assert await asyncio.to_thread(holder.says) == "lost"
                assert holder.process.stdin is not None
                holder.process.stdin.write("\n")
                holder.process.stdin.flush()
                assert await asyncio.to_thread(holder.says) == "released 0"
                assert (await refused(ledger)).kind == "pool"
                await ledger.release(second)

        go(main())
    finally:
        holder.end()
    nothing_is_left(server.url)


def test_p50_a_blocked_loop_loses_nothing(server: Server) -> None:
    """P-50: renewals have a thread of their own, so a sync tool on the loop, longer than a lease, costs no lease."""

    async def main() -> None:
        async with ledgers(2, server.url, lease=0.6) as [ledger, other]:
            grant = await granted(ledger)
            time.sleep(1.5)
            assert (await refused(other)).kind == "pool"
            assert not grant.lost and ledger.lost == 0
            assert await ledger.release(grant) == [1]

    go(main())


def test_one_lost_renewal_costs_nothing(server: Server) -> None:
    """G11: the server answers nothing for longer than one renewal takes to come: the lease still stands."""

    async def main() -> None:
        async with ledgers(2, server.url, lease=1.8, timeout=0.2) as [ledger, other]:
            grant = await granted(ledger)
            await asyncio.sleep(0.5)
            with redis.Redis.from_url(server.url) as client:
                client.client_pause(600, all=True)
            await asyncio.sleep(2.5)
            statistics = ledger.statistics()
            assert statistics["missed"] >= 1 and statistics["beats"] >= 1
            assert not grant.lost
            assert (await refused(other)).kind == "pool"
            assert await ledger.release(grant) == [1]

    go(main())


# ==================================================================== what happens to the server


def test_a_server_that_comes_back_without_its_data(own: Server) -> None:
    """G11: fences go on rising, who held something is told, and exclusive grants wait until all must have been told."""

    async def main() -> None:
        async with ledgers(2, own.tcp_url, lease=1.5) as [ledger, other]:
            wanted = Wanted(holds=[("file:/a", X)])
            lost = []
            first = await granted(ledger, wanted, on_lost=lost.append)
            own.restart()
            quarantined = await refused(ledger, wanted)
            assert quarantined.kind == "quarantine" and quarantined.retry_after is not None
            assert 0 < quarantined.retry_after <= 1.5
            shared = await granted(ledger, Wanted(holds=[("file:/b", S)]))
            second = await granted(other, wanted, wait=10)
            assert first.lost and lost == [first]
            assert second.fence > first.fence and shared.fence > first.fence
            assert await ledger.release(first) == [0]
            await ledger.release(shared)
            await other.release(second)

    go(main())


def test_a_restart_with_its_data_is_another_epoch() -> None:
    """G11: a server that comes back with its file has the leases that it knew, and greater fences."""
    server = Server("--appendonly", "yes", "--appendfsync", "always").start()

    async def main() -> None:
        async with ledgers(1, server.url, lease=10.0) as [ledger]:
            first = await granted(ledger)
            server.restart()
            assert (await refused(ledger)).kind == "pool"
            assert await ledger.release(first) == [1]
            second = await granted(ledger)
            assert second.fence >> 32 > first.fence >> 32
            await ledger.release(second)

    try:
        go(main())
    finally:
        server.remove()


def test_an_outage_shorter_than_the_wait_is_only_a_wait(own: Server) -> None:
    """R-139: who waits longer than the server is away gets its grant; who does not is told `engine_unavailable`."""

    async def main() -> None:
        async with ledgers(1, own.url, lease=5.0) as [ledger]:
            await ledger.release(await granted(ledger))
            own.stop()
            with pytest.raises(EngineUnavailable, match="the server is not reached") as told:
                await ledger.claim(ONE, wait=0.3)
            assert told.value.code == "engine_unavailable"
            waiting = asyncio.create_task(granted(ledger, wait=30))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(own.start)
            await ledger.release(await waiting)
            await ledger.wait_idle()

    go(main())
    nothing_is_left(own.url)


def test_the_library_is_loaded_again_by_itself(server: Server) -> None:
    """FIELD 10: FUNCTION FLUSH in the middle of it costs no claim and no renewal."""

    async def main() -> None:
        async with ledgers(1, server.url, lease=0.9) as [ledger]:
            grant = await granted(ledger)
            with redis.Redis.from_url(server.url) as client:
                for _ in range(3):
                    client.function_flush()
                    await asyncio.sleep(0.5)
                client.function_flush()
            assert not grant.lost
            assert (await refused(ledger)).kind == "pool"
            assert await ledger.release(grant) == [1]

    go(main())


def test_two_versions_side_by_side(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rolling upgrade: another text under another name counts in the same counts."""
    old, newer = library(), named(library().text.replace(library().name, "towerman_0") + "\n-- newer\n", 2)
    assert old.name != newer.name

    async def main() -> None:
        async with ledgers(2, server.url) as [ledger, other]:
            first = await granted(ledger)
            monkeypatch.setattr(line_room, "library", lambda: newer)
            assert (await refused(other)).kind == "pool"
            waiting = asyncio.create_task(granted(other, wait=10))
            await asyncio.sleep(0.1)
            monkeypatch.setattr(line_room, "library", lambda: old)
            await ledger.release(first)
            monkeypatch.setattr(line_room, "library", lambda: newer)
            second = await waiting
            assert second.fence > first.fence
            await other.release(second)

    go(main())
    with redis.Redis.from_url(server.url) as client:
        names = {entry[1].decode() for entry in client.function_list()}
        assert {old.name, newer.name} <= names
    nothing_is_left(server.url)


def test_a_part_of_the_data_that_is_gone_is_noticed(server: Server) -> None:
    """G3: where a key was evicted or deleted, counts that nobody could ever give back do not stay."""
    for place, part in enumerate(keys_of("default")):
        if place in (1, 4, 5):  # starts, the places of waiters and what is to be swept mend themselves
            continue

        async def main(part: str = part) -> None:
            async with ledgers(1, server.url, lease=3.0) as [ledger]:
                first = await granted(ledger)
                with redis.Redis.from_url(server.url) as client:
                    client.delete(part)
                second = await granted(ledger)
                assert second.fence > first.fence
                assert await ledger.release(first) == [0]
                assert await ledger.release(second) == [1]

        go(main())
        nothing_is_left(server.url)


def test_a_full_server_still_takes_back() -> None:
    """G3: without memory left nothing is granted, and what was granted goes back."""
    server = Server("--maxmemory-policy", "noeviction").start()

    async def main() -> None:
        async with ledgers(1, server.url) as [ledger]:
            grant = await granted(ledger)
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory", "1mb")
                with pytest.raises(EngineUnavailable, match="no memory left"):
                    await ledger.claim(ONE)
                both = await asyncio.gather(ledger.claim(ONE), ledger.release(grant), return_exceptions=True)
                assert isinstance(both[0], EngineUnavailable) and both[1] == [1]
                client.config_set("maxmemory", "0")
            await ledger.release(await granted(ledger))

    try:
        go(main())
    finally:
        server.remove()


def test_a_server_runs_for_whoever_has_no_rights() -> None:
    """The tests need no rights: as root the server runs as somebody who has none."""
    if os.geteuid() != 0:
        pytest.skip("whoever runs this has no rights: every other test shows it")
    try:
        pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("this machine has no user without rights")
    server = Server(user="nobody").start()
    try:
        assert os.stat(f"/proc/{server.pid}").st_uid == pwd.getpwnam("nobody").pw_uid
        go(_one_pair(server.tcp_url))
    finally:
        server.remove()


async def _one_pair(url: str) -> None:
    async with ledgers(1, url) as [ledger]:
        await ledger.release(await granted(ledger))


def replica_of(primary: Server) -> Server:
    """A replica that has all that the primary has."""
    replica = Server("--replicaof", f"127.0.0.1 {primary.port}").start()
    end = time.monotonic() + PATIENCE
    with redis.Redis.from_url(replica.url) as client:
        while client.info("replication")["master_link_status"] != "up":
            assert time.monotonic() < end, "the replica does not follow"
            time.sleep(0.02)
    return replica


def test_a_promoted_replica_has_another_epoch(own: Server) -> None:
    """G11: it may have missed grants: its fences are greater than all that were, and exclusive grants are held back for
    one lease; permits that it knows of stay held.
    """
    replica = replica_of(own)

    async def main() -> None:
        async with ledgers(1, own.url, lease=2.0) as [before]:
            wanted = Wanted([Pool("P", 1, 2)], [("file:/a", S)])
            first = await granted(before, wanted)
            with redis.Redis.from_url(own.url) as client:
                assert client.wait(1, 5_000) == 1
            own.stop()
            with redis.Redis.from_url(replica.url) as client:
                client.execute_command("REPLICAOF", "NO", "ONE")
            async with ledgers(1, replica.url, lease=2.0) as [after]:
                exclusive = Wanted(holds=[("file:/b", X)])
                assert (await refused(after, exclusive)).kind == "quarantine"
                assert (await refused(after, Wanted([Pool("P", 2, 2)]))).kind == "pool"
                second = await granted(after, Wanted([Pool("P", 1, 2)]))
                assert second.fence >> 32 > first.fence >> 32
                third = await granted(after, exclusive, wait=10)
                whole = await granted(after, Wanted([Pool("P", 1, 2)]), wait=10)  # the first could not be renewed
                for one in (second, third, whole):
                    assert await after.release(one) == [1]

    try:
        go(main())
    finally:
        replica.remove()


@pytest.fixture
def nodes() -> Iterator[list[Server]]:
    """Two primaries of a cluster, with half of the slots each."""
    made: list[Server] = []
    try:
        for first, last in ((0, 8191), (8192, 16383)):
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--appendonly", "no")
            made.append(Server(*options))
            with redis.Redis.from_url(made[-1].start().url) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        with redis.Redis.from_url(made[0].url) as client:
            bus = made[1].options[3]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", made[1].port, bus)
        end = time.monotonic() + PATIENCE
        for node in made:
            with redis.Redis.from_url(node.url) as client:
                while client.cluster("INFO")["cluster_state"] != "ok" or len(client.cluster("NODES")) < 2:
                    assert time.monotonic() < end, "the cluster does not come together"
                    time.sleep(0.05)
        yield made
    finally:
        for node in made:
            node.remove()


def test_a_cluster_keeps_a_group_on_one_node(nodes: list[Server]) -> None:
    """FIELD 10: whichever node is named, claims, renewals and hints find the node of the group, which gets the library
    when it is asked first.
    """

    async def main() -> None:
        for group in ("a", "b", "c", "d"):  # some of them are on the other node
            async with (
                ledgers(1, nodes[0].tcp_url, group=group, lease=0.9) as [one],
                ledgers(1, nodes[1].tcp_url, group=group, lease=0.9) as [other],
            ):
                first = await granted(one)
                waits = asyncio.create_task(granted(other, wait=20))
                await asyncio.sleep(1.2)
                assert not first.lost and not waits.done()
                assert await one.release(first) == [1]
                assert await other.release(await waits) == [1]

    go(main())
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            assert client.function_list() and client.keys("towerman:*"), "both nodes keep some group"


# ==================================================================== cancel


def test_a_thousand_claims_cancelled_in_flight_leave_nothing(server: Server) -> None:
    """FIELD 10, G3: whenever a claim is cancelled, what it may have got goes back by its id."""

    async def main() -> None:
        async with ledgers(2, server.url) as [ledger, other]:
            wanted = Wanted([Pool("P", 1, 300)], [("k", S)])
            tasks = []
            for number in range(1_000):
                tasks.append(asyncio.create_task(ledger.claim(wanted, wait=float(number % 2) * 20)))
                if number % 7 == 0:
                    await asyncio.sleep(0)
                if number % 50 == 49:
                    await asyncio.sleep(0.002 * (number % 3))
                    for task in tasks[-50:]:
                        task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            kept = [one for one in ended if isinstance(one, Grant)]
            for one in kept:
                ledger.release(one)
            await ledger.wait_idle()
            assert sum(isinstance(one, asyncio.CancelledError) for one in ended) > 300
            assert ledger.statistics()["held"] == 0
            whole = await granted(other, Wanted([Pool("P", 300, 300)], [("k", X)]))
            await other.release(whole)

    go(main())
    nothing_is_left(server.url)


def test_a_cancelled_waiter_is_gone_at_once(server: Server) -> None:
    """G6: it is offered nothing, and those behind it do not wait for it."""

    async def main() -> None:
        async with ledgers(3, server.url, lease=30.0) as [one, other, third]:
            first = await granted(one)
            gone = asyncio.create_task(other.claim(ONE, wait=20))
            await asyncio.sleep(0.1)
            behind = asyncio.create_task(granted(third, wait=20))
            await asyncio.sleep(0.1)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            await other.wait_idle()
            before = time.monotonic()
            await one.release(first)
            await third.release(await behind)
            assert time.monotonic() - before < 0.5

    go(main())
    nothing_is_left(server.url)


# ==================================================================== clocks and settings


class Off(RealClock):
    """A clock that is so far off."""

    __slots__ = ()

    def __init__(self, seconds: float) -> None:
        super().__init__()
        real = self.now
        self.now = lambda: real() + seconds


@pytest.mark.parametrize("off", [3_600.0, -3_600.0])
def test_a_client_clock_an_hour_off_changes_nothing(server: Server, off: float) -> None:
    """R-139: clients send lengths, never instants: rates and leases go by the server's time alone."""

    async def main() -> None:
        right, wrong = RedisLedger(server.url, lease=0.9), RedisLedger(server.url, lease=0.9, clock=Off(off))
        wanted = Wanted([Pool("P", 1, 1)], rates=[Rate("R", (1, 2 * MICRO, None, 0))])
        first = await granted(wrong, wanted)
        await wrong.begun(first)
        await asyncio.sleep(1.2)
        assert (await refused(right, wanted)).kind == "pool" and not first.lost
        await wrong.release(first)
        assert (await refused(right, wanted)).kind == "rate"
        second = await granted(right, wanted, wait=5)
        await right.release(second)
        await right.aclose()
        await wrong.aclose()

    go(main())


@pytest.mark.parametrize("off", [3_600.0, -3_600.0, 0.0])
def test_r139_how_far_the_clocks_are_apart_is_told(server: Server, monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    """Issue 6, 6: the offset between the server's clock and this machine's is a metric; claims and beats tell it."""
    for room in ("line", "heart"):
        monkeypatch.setattr(f"towerman.engines.{room}.wall_time", lambda: time.time() + off)

    async def main() -> None:
        async with ledgers(1, server.url, lease=0.6) as (ledger,):
            assert ledger.statistics()["offset_us"] == 0, "nothing is known yet"
            grant = await granted(ledger)
            while ledger.statistics()["beats"] < 2:
                await asyncio.sleep(0.02)
            assert abs(ledger.statistics()["offset_us"] / MICRO + off) < 1.0
            await ledger.release(grant)

    go(main())


def test_a_quick_answer_tells_the_offset_better_than_a_slow_one() -> None:
    """An answer tells the offset to within half of its time, and an old one is not believed for ever."""
    known = Known(LEASE)
    head = [str(100 * MICRO), 7, 0, 3]
    known.heard(head, 89.0, 91.0)
    assert (known.epoch, known.reaped, known.offset) == (7, 3, 10 * MICRO)
    known.heard(head, 60.0, 100.0)
    assert known.offset == 10 * MICRO, "that one was on its way for long"
    known.heard(head, 79.5, 80.5)
    assert known.offset == 20 * MICRO
    known.heard(head, 75.0, 65.0)
    assert known.offset == 20 * MICRO, "this machine's clock was set meanwhile"
    for _ in range(40):
        known.heard(head, 68.0, 72.0)
    assert known.offset == 30 * MICRO, "the clocks may have been set since"


def test_p49_what_ran_out_is_counted(server: Server) -> None:
    """Issue 6, 6: whoever asks next hears how many leases of the group ran out; what was given back is none of them,
    and neither is a waiter that died.
    """
    holder = Holder(server.url, lease=0.6)
    try:
        assert holder.says().startswith("granted")
        waiter = Holder(server.url, lease=0.6, wait=30)
        assert waiter.says() == "waits"
        waiter.end()
    finally:
        holder.end()

    async def main() -> None:
        async with ledgers(1, server.url) as (ledger,):
            for _ in range(2):
                grant = await granted(ledger, wait=5)
                assert ledger.statistics()["reaped"] == 1
                await ledger.release(grant)

    go(main())


# ==================================================================== whoever only looks in


def looked(client: Any, *questions: Any, group: str = "default") -> list[Any]:
    """What the function for those who only look says: now, the group, answers."""
    now, *answers = client.fcall(library().look, len(keys_of(group)), *keys_of(group), json.dumps(questions))
    return [int(now[0]), named_values(plain(now[1])), *map(plain, answers)]


def everything(client: Any) -> dict[bytes, bytes]:
    """All that a server holds."""
    return {key: client.dump(key) for key in client.keys("*")}


def test_whoever_looks_leaves_nothing_behind(server: Server) -> None:
    """Issue 6, 6: no group is made, nothing is reaped, and no epoch rises because somebody looked."""
    with redis.Redis.from_url(server.url) as client:
        direct = Direct(client, "default", timed=False)
        assert looked(client, ["records", 0, 10], ["states", "0", 10], ["record", "none"])[1:] == [
            {},
            ["0"],
            ["0"],
            ["none", [], ""],
        ]
        assert client.keys("*") == []
        assert direct.one("claim", "short", 1, ask([["P", 1, 2, 0]]), 0)[0] == 1  # over a microsecond later
        assert direct.act(
            ["claim", "long", LEASE, ask([["P", 1, 2, 0]]), 0], ["claim", "w", LEASE, ask([["P", 2, 2, 0]]), LEASE]
        )
        before = everything(client)
        now, group, records, states = looked(client, ["records", 0, 10], ["states", 0, 10])
        assert everything(client) == before
        assert group["layout"] == "1" and now >= int(group["last"])
        assert {row[0] for row in records[1:]} == {"long", "w"}
        (waiter,) = [named_values(row[1]) for row in records[1:] if row[0] == "w"]
        assert waiter["k"] == "w" and waiter["f"] == "pP" and int(waiter["j"]) <= now
        assert {row[0] for row in states[1:]} == {"#", "pP"}


def test_a_page_has_an_end(server: Server) -> None:
    """Every call of the server is bounded: many records are told some at a time, each at least once."""
    client = redis.Redis.from_url(server.url)
    direct = Direct(client, "default", timed=False)
    for first in range(0, 3_000, 100):
        direct.act(*[["claim", f"i{first + one}", LEASE, ask([["P", 1, 9_999, 0]]), 0] for one in range(100)])
    seen: list[str] = []
    cursor, pages = "0", 0
    while True:
        (page,) = looked(client, ["records", cursor, 10_000])[2:]
        cursor, pages = page[0], pages + 1
        assert len(page) - 1 < 1_000, "a cursor may tell somewhat more than was asked"
        seen += [row[0] for row in page[1:]]
        if cursor == "0":
            break
    client.close()
    assert pages > 3 and set(seen) == {f"i{number}" for number in range(3_000)}


def test_another_secret_is_refused(server: Server) -> None:
    """G4: replicas whose digests differ would not exclude each other, so the second secret of a group is refused."""

    async def main() -> None:
        async with ledgers(1, server.url, secret=b"one") as [ledger]:
            await ledger.release(await granted(ledger))
            async with ledgers(1, server.url, secret=b"another") as [other]:
                with pytest.raises(PolicyError, match="secret: another one is used in this group"):
                    await other.claim(ONE)

    go(main())


def test_g8_no_resource_key_leaves_the_process(server: Server) -> None:
    """G8: what is held on the server is named by digests; no error tells an address or a password."""

    async def main() -> None:
        async with ledgers(1, server.url, secret=b"s") as [ledger]:
            grant = await granted(ledger, Wanted(holds=[("file:/home/canary", X)], secret=b"s"))
            with redis.Redis.from_url(server.url) as client:
                kept = [client.dump(key) for key in client.scan_iter()]
                assert kept and not any(b"canary" in (one or b"") for one in kept)
            await ledger.release(grant)
        canary = RedisLedger("redis://user:canary@127.0.0.1:1/0", timeout=0.5)
        with pytest.raises(EngineUnavailable) as told:
            await canary.claim(ONE)
        assert "canary" not in f"{told.value!r} {told.value.__cause__!r} {canary!r}"
        await canary.aclose()

    go(main())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": "http://canary"}, "engine.url"),
        ({"lease": 0.01}, "engine.lease"),
        ({"lease": float("nan")}, "engine.lease"),
        ({"group": "{a}"}, "engine.group"),
        ({"group": ""}, "engine.group"),
    ],
)
def test_a_wrong_setting_is_told_at_once(options: dict[str, Any], named: str) -> None:
    """DESIGN style 7: a mistake is told early, with its key, and without the URL."""
    with pytest.raises(PolicyError, match=named) as told:
        RedisLedger(**{"url": "redis://127.0.0.1:1", **options})
    assert "canary" not in str(told.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Wanted([Pool("P", 0, 1)]),
        lambda: Wanted([Pool("P\0", 1, 1)]),
        lambda: Wanted(rates=[Rate("R", (1, 1 << 53, None, 0))]),
        lambda: Wanted(rates=[Rate("R", (1, 86_400 * MICRO, 10**6, 0))]),
        lambda: Wanted(breakers=[Breaker("B", (0, 1, 1, 1))]),
        lambda: Wanted(priority=10**6),
    ],
)
def test_numbers_that_a_server_cannot_count_are_refused(wrong: Any) -> None:
    """G3: nothing is rounded: what is beyond exact arithmetic is refused when it is declared."""
    with pytest.raises(PolicyError, match="engine: "):
        wrong()


# ==================================================================== waiting, asked of the functions directly


@pytest.fixture
def direct(server: Server) -> Iterator[Direct]:
    """The functions, on a clock of the test's own."""
    with redis.Redis.from_url(server.url) as client:
        yield Direct(client, "direct")


@pytest.fixture(scope="module")
def waiting(shared: Server) -> Iterator[Direct]:
    """The same for many histories."""
    with redis.Redis.from_url(shared.url) as client:
        yield Direct(client, "waiting")


def wait_for(direct: Direct, id: str, asked: Any) -> Any:
    """Claim, and wait where it is not had."""
    return direct.one("claim", id, LEASE, asked, 10 * MICRO, MICRO, "")


def test_s5_a_wide_waiter_is_promoted_and_served(direct: Direct) -> None:
    """S5, G6: passed 16 times by narrow calls, a wide one is promoted: what it needs is hidden from then on."""
    narrow, wide = ask([["P", 1, 4, 0]]), ask([["P", 4, 4, 0]])
    assert direct.one("claim", "n0", LEASE, narrow, 0)[0] == 1
    assert wait_for(direct, "wide", wide)[0] == 2
    passed = 0
    for number in range(1, 40):
        if direct.one("claim", f"n{number}", LEASE, narrow, 0)[0] == 0:
            break
        passed += 1
        direct.one("release", f"n{number - 1}", 1, "well")
    assert passed == 16
    assert direct.one("release", "n16", 1, "well") == [1]
    assert direct.one("poll", "wide", 10 * MICRO)[0] == 3
    assert direct.one("confirm", "wide", LEASE)[0] == 1
    assert direct.one("release", "wide", 1, "well") == [1]
    assert direct.one("claim", "after", LEASE, narrow, 0)[0] == 1


def test_a_promoted_waiter_that_is_cancelled_hides_nothing(direct: Direct) -> None:
    """G6: with it go its claims, and those who stood behind them are looked at in the same step."""
    narrow, wide = ask([["P", 1, 4, 0]]), ask([["P", 4, 4, 0]])
    direct.one("claim", "n0", LEASE, narrow, 0)
    wait_for(direct, "wide", wide)
    for number in range(1, 17):
        direct.one("claim", f"n{number}", LEASE, narrow, 0)
        direct.one("release", f"n{number - 1}", 1, "well")
    assert wait_for(direct, "behind", narrow)[0] == 2
    assert direct.one("release", "wide", 0, "nothing") == [1]
    assert direct.one("poll", "behind", 10 * MICRO)[0] == 3


def test_an_offer_that_is_not_confirmed_goes_to_the_next(direct: Direct) -> None:
    """S12: an offer expires, its waiter keeps its place, and the next one is offered what it did not take."""
    one = ask([["P", 1, 1, 0]])
    direct.one("claim", "a", LEASE, one, 0)
    wait_for(direct, "b", one)
    wait_for(direct, "c", one)
    direct.one("release", "a", 1, "well")
    assert direct.one("claim", "d", LEASE, one, 0)[0] == 0
    direct.at(direct.now + MICRO)
    assert direct.one("poll", "c", 10 * MICRO)[0] == 3
    assert direct.one("confirm", "c", LEASE)[0] == 1
    assert direct.one("confirm", "b", LEASE) == [-1]
    assert direct.one("poll", "b", 10 * MICRO)[0] == 2
    direct.one("release", "c", 1, "well")
    assert direct.one("poll", "b", 10 * MICRO)[0] == 3


def test_priority_goes_first_and_a_rate_is_waited_for(direct: Direct) -> None:
    """S5, S7: the higher class first; a waiter for a rate is told how long it lasts, and has it at that instant."""
    one = ask([["P", 1, 1, 0]])
    direct.one("claim", "a", LEASE, one, 0)
    wait_for(direct, "low", one)
    wait_for(direct, "high", ask([["P", 1, 1, 0]], priority=1))
    direct.one("release", "a", 1, "well")
    assert [direct.one("poll", name, 10 * MICRO)[0] for name in ("low", "high")] == [2, 3]
    timed = ask(rates=[["R", 1, 5 * MICRO, -1, 0, 1]])
    direct.one("claim", "x", LEASE, timed, 0)
    direct.one("begun", "x")
    assert wait_for(direct, "y", timed) == [2, "m", 1, 5 * MICRO]
    direct.at(direct.now + 5 * MICRO - 1)
    assert direct.one("poll", "y", 10 * MICRO) == [2, "m", 1, 1]
    direct.at(direct.now + 1)
    assert direct.one("poll", "y", 10 * MICRO)[0] == 3


steps = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "wait", "wait", "poll", "poll", "confirm", "decline", "release", "time"]),
        st.integers(0, 11),
        st.dictionaries(st.sampled_from("PQ"), st.integers(1, 3), max_size=2),
        st.dictionaries(st.sampled_from("ab"), st.sampled_from([IS, IX, S, X]), max_size=2),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(steps=steps)
@settings(max_examples=150)
def test_g3_whoever_waits_declines_or_dies_no_permit_is_lost(waiting: Direct, steps: list[Any]) -> None:
    """G3, G6: over any history of claims, waits, offers and ends, no limit is exceeded, each count is the sum of its
    records, nobody who has asked again goes on waiting for what is free, and in the end all of it is free.
    """
    waiting.forget()
    waiting.at(waiting.now + MICRO)
    limits = {"P": 3, "Q": 2}
    used = 0
    for kind, number, permits, holds, priority in steps:
        id = f"i{number}"
        asked = ask(
            [[key, units, limits[key], 0] for key, units in permits.items()],
            [[key, mode] for key, mode in sorted(holds.items())],
            priority=priority,
        )
        if kind in ("claim", "wait"):
            used += 1
            waiting.one("claim", id, 4 * MICRO, asked, 3 * MICRO if kind == "wait" else 0, MICRO, "")
        elif kind == "poll":
            waiting.one("poll", id, 3 * MICRO)
        elif kind == "confirm":
            waiting.one("confirm", id, 4 * MICRO)
        elif kind == "decline":
            waiting.one("decline", id, 3 * MICRO)
        elif kind == "release":
            waiting.one("release", id, number % 2, "well")
        else:
            waiting.at(waiting.now + number * MICRO // 5)
        sums_are_right(waiting, limits)
    for _ in range(12):  # each round somebody has what it waits for and gives it back
        for number in range(12):
            answer = waiting.one("poll", f"i{number}", 3 * MICRO)
            if answer[0] == 3:
                assert waiting.one("confirm", f"i{number}", 4 * MICRO)[0] == 1
        records = sums_are_right(waiting, limits)
        states = [record["k"] for record in records.values()]
        assert "w" not in states or "h" in states, "all is free, and somebody waits"
        for id, record in records.items():
            if record["k"] == "h":
                assert waiting.one("release", id, 1, "well") == [1]
    assert sums_are_right(waiting, limits) == {}
    assert waiting.look("pP", "pQ", "na", "nb", "!") == [[], [], [], [], []]


def sums_are_right(direct: Direct, limits: dict[str, int]) -> dict[str, dict[str, Any]]:
    """What is counted is what the records hold, and within its limit. Returns the records."""
    records: dict[str, dict[str, Any]] = {}
    for number in range(12):
        found = direct.look(f"=i{number}")[0]
        if found:
            records[f"i{number}"] = named_values(found)
    sums: dict[str, list[int]] = {"pP": [0], "pQ": [0], "na": [0] * 4, "nb": [0] * 4}
    for record in records.values():
        if record["k"] in ("h", "o"):
            for key, units, *_ in record["p"]:
                sums[f"p{key}"][0] += units
            for key, mode in record["h"]:
                sums[f"n{key}"][mode] += 1
    for field, there in zip(sums, direct.look(*sums), strict=True):
        size = len(sums[field])
        assert (there or [0] * size)[:size] == sums[field]
    assert all(sums[f"p{key}"][0] <= limit for key, limit in limits.items())
    for node in (sums["na"], sums["nb"]):
        assert node[X] <= 1
        for one, other in combinations([mode for mode in range(4) if node[mode]], 2):
            assert COMPATIBLE[one][other]
    meta = named_values(direct.look("#")[0])
    states = [record["k"] for record in records.values()]
    assert (meta["records"], meta["waiting"]) == (len(records), states.count("w"))
    return records


def test_work_is_bounded_and_goes_on_in_the_next_call(direct: Direct) -> None:
    """G11: a call reaps 128 leases and says that there are more; nothing that is over is ever renewed."""
    one = ask([["P", 1, 1_000, 0]])
    direct.act(*[["claim", f"l{number}", MICRO, one, 0] for number in range(300)])
    direct.at(direct.now + MICRO)
    assert direct.one("renew", LEASE, ["l299"]) == [1]
    assert direct.more == 1
    assert direct.look("pP")[0][0] == 300 - 2 * 128
    assert direct.look("pP") == [[]]
    assert named_values(direct.look("#")[0])["records"] == 0


def test_a_rate_that_is_only_watched_never_counts_further_than_a_server_can(direct: Direct) -> None:
    """G3: starts far beyond a rate, and a pause for ever, leave an instant that is still a whole number."""
    long = 1 << 51
    watched, enforced = (ask(rates=[["R", 1, long, 1, 0, number]]) for number in (0, 1))
    for number in range(10):
        assert direct.one("claim", f"l{number}", LEASE, watched, 0)[0] == 1
        assert direct.one("release", f"l{number}", 1, "well") == [1]
    assert direct.look("mR")[0][8:10] == [1 << 53, 0]
    assert direct.one("claim", "l", LEASE, enforced, 0) == [0, "m", 1, 1 << 52]
    assert direct.one("pause", "R", 1 << 52) == [1]
    assert direct.look("mR")[0][4] == 1 << 52
    assert direct.one("claim", "l", LEASE, enforced, 0) == [0, "m", 1, 1 << 52]


def test_a_claim_that_is_asked_twice_is_had_once(direct: Direct) -> None:
    """G3: whoever did not get its answer asks again under the same id and is told the same."""
    one = ask([["P", 1, 2, 0]], rates=[["R", 5, MICRO, -1, 0, 1]])
    first = direct.one("claim", "a", LEASE, one, 0)
    assert direct.one("claim", "a", LEASE, one, 0) == first
    assert direct.look("pP") == [[1, 0]]
    assert direct.one("release", "a", 0, "nothing") == [1]
    assert direct.look("pP", "mR") == [[], []] or direct.look("pP")[0] == []
