"""Draw the pictures of the documentation.

    python tools/pictures.py            # write them anew
    python tools/pictures.py --check    # only say whether they are up to date

What they show is explained or rehearsed on virtual time, so that each run draws the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from towerman import Call, Pool, Rate, RateLimited, Retry, Tower
from towerman.desk import FORMS, Desk, open_tower
from towerman.testing import Rehearsal

DOCS = Path(__file__).resolve().parent.parent / "docs"


def explained() -> str:
    """The demo's batch."""
    with tempfile.TemporaryDirectory() as folder:
        return open_tower(Desk(Path(folder))).explain(FORMS["openai"]()).to_svg()


def shop() -> Tower:
    """A tower for a plan and for a batch in which everything happens that a timeline can show."""
    tower = Tower(pools={"crm": Pool(2, max_queued=20)}, grace=1.0)

    @tower.tool(reads="customer:{customer}", pools=["crm"])
    async def read_customer(customer: int) -> str:
        """Read one customer."""
        return "read"

    @tower.tool(writes="customer:{customer}", pools=["crm"])
    async def rename_customer(customer: int) -> str:
        """Change a customer."""
        return "renamed"

    @tower.tool(read_only=True, independent=True, timeout=0.5)
    def search(query: str) -> str:
        """Look something up, in a thread."""
        return "found"

    @tower.tool(read_only=True, independent=True, retry=Retry(max_attempts=2))
    async def fetch(page: int) -> str:
        """Fetch a page."""
        return "page"

    @tower.tool(independent=True, rate=Rate(1, per=0.8))
    async def track(parcel: int) -> str:
        """Ask a carrier."""
        return "on its way"

    @tower.tool(writes="mail:{customer}")
    async def send_mail(customer: int) -> str:
        """Send a mail."""
        return "sent"

    return tower


def planned() -> str:
    """A plan: both kinds of edges, a junction's work done by resources, a path, and a call that is refused."""
    calls = [
        Call("search", {"query": "who"}, id="find"),
        Call("read_customer", {"customer": 1}, id="one", needs=["find"]),
        Call("read_customer", {"customer": 2}, id="two", needs=["find"]),
        Call("rename_customer", {"customer": 1}, id="name", needs=["two"]),
        Call("read_customer", {"customer": 1}, id="again"),
        Call("send_mail", {"customer": 1}, id="mail", needs=["name", "one"]),
        Call("send_letter", {"customer": 1}, id="post", needs=["find"]),
        Call("fetch", {"page": 1}, id="proof", needs=["post"]),
    ]
    return shop().explain(calls).to_svg()


def timeline() -> str:
    """A batch on virtual time."""
    tower = shop()
    with Rehearsal(tower) as rehearsal:
        busy = iter([RateLimited(retry_after=0.4)])  # the service says so once

        def page(page: int) -> str:
            for answer in busy:
                raise answer
            return "page"

        rehearsal.script("read_customer", seconds=0.4)
        rehearsal.script("rename_customer", seconds=0.5)
        rehearsal.script("search", seconds=1.1, stubborn=True)
        rehearsal.script("fetch", seconds=0.3, do=page)
        rehearsal.script("track", seconds=0.3)
        rehearsal.script("send_mail", seconds=0.2)
        calls = [
            Call("read_customer", {"customer": 1}),
            Call("read_customer", {"customer": 2}),
            Call("read_customer", {"customer": 3}),
            Call("rename_customer", {"customer": 1}),
            Call("search", {"query": "x"}),
            Call("fetch", {"page": 1}),
            Call("track", {"parcel": 1}),
            Call("track", {"parcel": 2}),
            Call("send_letter", {"customer": 1}),
            Call("send_mail", {"customer": "one"}),
            Call("send_mail", {"customer": 1}),
        ]

        async def main() -> str:
            batch = await tower.execute(calls)
            await rehearsal.idle()  # what outlived its result has ended
            return batch.timeline_svg()

        return rehearsal.run(main())


PICTURES = {"explained.svg": explained, "plan.svg": planned, "timeline.svg": timeline}


def main(words: list[str]) -> int:
    """Draw them, or compare them with what is there."""
    stale = []
    for name, draw in PICTURES.items():
        path, made = DOCS / name, draw()
        if path.is_file() and path.read_text(encoding="utf-8") == made:
            continue
        stale.append(name)
        if "--check" not in words:
            path.write_text(made, encoding="utf-8")
    if stale and "--check" in words:
        print(f"docs: {', '.join(stale)}: not as they would be drawn; run `make pictures`", file=sys.stderr)
        return 1
    print(f"docs: {', '.join(stale) or 'nothing'} drawn anew")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
