"""Tools of a plan whose process may be killed at any moment, for `towerman run --tools crashing_plan.py:tower`.

What they do to the world is a line in the file that the variable EFFECTS names, written in one step, so that a kill
cannot tear it: the tool, the step, the call's key, and a digest of what it was given. JOURNAL names the journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from typing import Any

from towerman import Context, Tower

STEPS = 80
ONCE = ("pay", "pay_in_thread")

chance = random.Random(os.getpid())
world = os.open(os.environ.get("EFFECTS", os.devnull), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
tower = Tower(journal=os.environ.get("JOURNAL", ":memory:"))


def plan(seed: int) -> dict[str, Any]:
    """A plan of reads and writes. Values flow through what may run again; what may not is needed, and referred to by
    nobody.
    """
    draw = random.Random(seed)
    steps: list[dict[str, Any]] = []
    flowing: list[int] = []
    for n in range(STEPS):
        tool = draw.choice(("look", "look", "put", "pay", "pay_in_thread"))
        near = flowing[-12:]
        parts = [
            draw.choice((f"${{s{one}}}", {"$ref": f"s{one}#/parts"}, f"<${{s{one}.n}}>"))
            for one in draw.sample(near, min(len(near), draw.randint(0, 2)))
        ]
        needs = [f"s{one}" for one in draw.sample(range(max(0, n - 10), n), min(n, draw.choice((0, 0, 1))))]
        step: dict[str, Any] = {"id": f"s{n}", "tool": tool, "arguments": {"n": n, "parts": parts}, "needs": needs}
        if tool == "put":
            step["arguments"]["row"] = draw.randrange(4)
        steps.append(step)
        if tool not in ONCE:
            flowing.append(n)
    return {"plan": steps}


def effect(tool: str, n: int, parts: list[Any], key: str | None) -> dict[str, Any]:
    told = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    os.write(world, f"{tool} {n} {key} {told}\n".encode())
    return {"n": n, "parts": [told]}


@tower.tool(independent=True)
async def pay(n: int, parts: list[Any], ctx: Context) -> dict[str, Any]:
    """An effect that must not come twice."""
    await asyncio.sleep(chance.random() * 0.008)
    told = effect("pay", n, parts, ctx.idempotency_key)
    await asyncio.sleep(chance.random() * 0.008)
    return told


@tower.tool(writes="account")
def pay_in_thread(n: int, parts: list[Any], ctx: Context) -> dict[str, Any]:
    """The same on a thread, one after another."""
    time.sleep(chance.random() * 0.004)
    told = effect("pay_in_thread", n, parts, ctx.idempotency_key)
    time.sleep(chance.random() * 0.004)
    return told


@tower.tool(writes="row:{row}", idempotent=True)
async def put(n: int, parts: list[Any], row: int, ctx: Context) -> dict[str, Any]:
    """An effect that may come again."""
    await asyncio.sleep(chance.random() * 0.008)
    return effect("put", n, parts, ctx.idempotency_key)


@tower.tool(reads="account")
async def look(n: int, parts: list[Any], ctx: Context) -> dict[str, Any]:
    """A read."""
    await asyncio.sleep(chance.random() * 0.008)
    return effect("look", n, parts, ctx.idempotency_key)
