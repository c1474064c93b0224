"""A replica in a process of its own: takes the pool of one permit, and says when it is in. For tests that kill it."""

from __future__ import annotations

import asyncio
import json
import sys

from towerman import Tower


async def main() -> None:
    """Hold the permit for as long as the process lives."""
    url, lease = sys.argv[1], float(sys.argv[2])
    tower = Tower(engine={"url": url, "lease": lease}, pools={"crm": 1})

    @tower.tool(pools=["crm"], independent=True)
    async def look() -> str:
        """Stay."""
        print(json.dumps({"in": "look"}), flush=True)
        await asyncio.sleep(600)
        return "seen"

    async with tower.run() as run:
        await run.execute([{"tool": "look", "arguments": {}}])


if __name__ == "__main__":
    asyncio.run(main())
