"""A process that claims, for the tests that kill or stop it: says what it got, one line each, and holds it."""

from __future__ import annotations

import asyncio
import sys

from towerman.engines.redis import RedisLedger
from towerman.engines.words import Grant, Pool, Wanted


async def main(url: str, lease: float, wait: float, units: int, limit: int) -> None:
    ledger = RedisLedger(url, lease=lease)

    def say(word: str) -> None:
        sys.stdout.write(f"{word}\n")
        sys.stdout.flush()

    wanted = Wanted([Pool("P", units, limit)])
    claim = asyncio.ensure_future(ledger.claim(wanted, wait=wait, on_lost=lambda _: say("lost")))
    if wait:
        while not ledger.statistics()["asked"]:
            await asyncio.sleep(0.01)
        say("waits")
    got = await claim
    if not isinstance(got, Grant):
        say("refused")
        return
    say(f"granted {got.fence}")
    await asyncio.to_thread(sys.stdin.readline)  # until it is told to go on, or killed
    say(f"released {(await ledger.release(got))[0]}")
    await ledger.aclose()


asyncio.run(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
