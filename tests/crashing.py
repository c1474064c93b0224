"""A process that answers one batch and may be killed at any moment; `test_crash` starts it and looks at what is left.

Usage: `crashing.py SOURCE JOURNAL EFFECTS SEED`. It says `ready`, waits for a line, hands the batch in, and prints each
result as a line of JSON when it is sealed. What its tools do to the world is a line in the file EFFECTS, written in one
step, so that a kill cannot tear it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time

CALLS = 14


def main(source: str, journal: str, effects: str, seed: str) -> None:
    """Answer the batch."""
    sys.path.insert(0, source)
    from towerman import Call, Context, Result, Tower

    chance = random.Random(f"{seed} {os.getpid()}")
    world = os.open(effects, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    tower = Tower(journal=journal, run_concurrency=4)

    def effect(tool: str, n: int, key: str | None) -> str:
        os.write(world, f"{tool} {n} {key}\n".encode())
        return f"{tool} {n}"

    @tower.tool(independent=True)
    async def pay(n: int, ctx: Context) -> str:
        await asyncio.sleep(chance.random() * 0.01)
        told = effect("pay", n, ctx.idempotency_key)
        await asyncio.sleep(chance.random() * 0.01)
        return told

    @tower.tool(writes="account")
    def pay_in_thread(n: int, ctx: Context) -> str:
        time.sleep(chance.random() * 0.01)
        told = effect("pay_in_thread", n, ctx.idempotency_key)
        time.sleep(chance.random() * 0.01)
        return told

    @tower.tool(independent=True, idempotent=True)
    async def put(n: int, ctx: Context) -> str:
        await asyncio.sleep(chance.random() * 0.01)
        return effect("put", n, ctx.idempotency_key)

    @tower.tool(reads="account")
    async def look(n: int, ctx: Context) -> str:
        await asyncio.sleep(chance.random() * 0.01)
        return effect("look", n, ctx.idempotency_key)

    names = ("pay", "pay_in_thread", "put", "pay", "look", "pay", "pay_in_thread")
    calls = [Call(names[n % len(names)], {"n": n}, str(n)) for n in range(CALLS)]

    def tell(result: Result) -> None:
        told = {"index": result.index, "tool": result.tool, "outcome": result.outcome, "code": result.code}
        told |= {"started": result.started, "applied": result.applied, "content": result.content}
        print(json.dumps(told), flush=True)

    print("ready", flush=True)
    sys.stdin.readline()

    async def answer() -> None:
        async with tower, tower.run("run") as run:
            done = await run.execute(calls, batch_id="batch", on_result=tell)
            assert len(done) == CALLS

    asyncio.run(answer())
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
