"""The desk's tools: plain functions over the database and the files, and what each declares to a tower."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towerman.approvals import ApprovalRequest, Approved, Denied
from towerman.desk.world import DATABASE, FILES, make_world
from towerman.errors import ToolError

if TYPE_CHECKING:
    from towerman.tower import Tower
    from towerman.trace import Observer

CARRIER_TAKES: Final = 2
"""Requests that the carrier takes in a second."""

# The carrier counts arrivals and a tower counts starts: a request that is held up on its way comes closer to the next.
_ON_THE_WAY: Final = 0.1
"""How long a request may be on its way to the carrier, in seconds."""

PRICE: Final = 2
"""What the translator is paid for a phrase, in cents."""

MOST_SPENT: Final = 5
"""What a run may spend, in cents."""

_MOST_REFUND: Final = 5000
"""The most that the shift lead pays back, in cents."""

_PHRASES: Final = {
    "good morning": {"da": "godmorgen", "nl": "goedemorgen"},
    "thank you for waiting": {"da": "tak for ventetiden", "nl": "bedankt voor het wachten"},
    "your parcel is on its way": {"da": "din pakke er på vej", "nl": "uw pakket is onderweg"},
}


class Desk:
    """A support desk in a folder of its own. Its public methods are the tools, and the shift lead who approves.

    Args:
        folder: an empty folder; the database and the files are made in it.
        pace: how slow the desk's systems are; 1 is like remote ones (the slowest answers after 0.6 s), 0 answers
            at once. The carrier's second is as slow, but never shorter than a twentieth of a real one.
    """

    def __init__(self, folder: Path, *, pace: float = 1.0) -> None:
        make_world(folder)
        self.folder = folder
        self._pace = pace
        self._crm_now = 0
        self.crm_peak = 0
        """The most requests that the CRM has seen at one time, as counted by the CRM."""
        self.second = max(pace, 0.05)
        """How long the carrier's second is, in real ones."""
        self.carrier_asked: list[float] = []
        """The instants of the carrier's requests, as noted by the carrier."""
        self.spent = 0
        """What the translator was paid, in cents, as counted by the translator."""
        self.asked: list[str] = []
        """The calls that the shift lead was asked about, by their ids."""
        self._lead_is_free = asyncio.Lock()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.folder / DATABASE, timeout=10)) as database:
            database.row_factory = sqlite3.Row
            with database:
                yield database

    def _row(self, query: str, number: int, missing: str) -> dict[str, object]:
        with self._database() as database:
            row = database.execute(query, (number,)).fetchone()
        if row is None:
            raise ToolError(missing, applied="no")
        return dict(row)

    def _path(self, path: str) -> Path:
        root = (self.folder / FILES).resolve()
        found = (root / path).resolve()
        if Path(path).is_absolute() or not found.is_relative_to(root):
            raise ToolError("give a path below the desk's folder, for example help/refunds.md", applied="no")
        if not found.is_file():
            raise ToolError("there is no such file on the desk", applied="no")
        return found

    @contextmanager
    def _crm(self) -> Iterator[None]:
        self._crm_now += 1
        self.crm_peak = max(self.crm_peak, self._crm_now)
        try:
            yield
        finally:
            self._crm_now -= 1

    async def read_customer(self, customer_id: int) -> dict[str, object]:
        """Read one customer from the CRM.

        Args:
            customer_id: the number on the invoice
        """
        with self._crm():
            await asyncio.sleep(0.3 * self._pace)
            return self._row("SELECT * FROM customers WHERE id = ?", customer_id, "there is no such customer")

    async def list_orders(self, customer_id: int) -> list[dict[str, object]]:
        """List a customer's orders from the CRM. It does not know what became of the money.

        Args:
            customer_id: the number on the invoice
        """
        with self._crm():
            await asyncio.sleep(0.3 * self._pace)
            with self._database() as database:
                rows = database.execute(
                    "SELECT id, item, cents FROM orders WHERE customer_id = ? ORDER BY id", (customer_id,)
                )
                return [dict(row) for row in rows]

    def search_help(self, text: str) -> list[dict[str, object]]:
        """Search the help pages and return the lines that hold a text.

        Args:
            text: what to look for; small and capital letters are the same
        """
        found: list[dict[str, object]] = []
        for page in sorted((self.folder / FILES / "help").glob("*.md")):
            time.sleep(0.05 * self._pace)
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
                if text.casefold() in line.casefold():
                    found.append({"file": f"help/{page.name}", "line": number, "text": line})
        return found

    def read_ticket(self, ticket_id: int) -> dict[str, object]:
        """Read one ticket.

        Args:
            ticket_id: the ticket's number
        """
        time.sleep(0.1 * self._pace)
        return self._row("SELECT * FROM tickets WHERE id = ?", ticket_id, "there is no such ticket")

    def update_ticket(self, ticket_id: int, status: str | None = None, priority: str | None = None) -> str:
        """Change a ticket's status, its priority, or both.

        Args:
            ticket_id: the ticket's number
            status: new, open or solved
            priority: low, normal or high
        """
        # Read, think, write the whole row back: two of these at once would lose one of the changes.
        row = self._row("SELECT * FROM tickets WHERE id = ?", ticket_id, "there is no such ticket")
        time.sleep(0.2 * self._pace)
        status = status or str(row["status"])
        priority = priority or str(row["priority"])
        with self._database() as database:
            database.execute(
                "UPDATE tickets SET subject = ?, status = ?, priority = ? WHERE id = ?",
                (row["subject"], status, priority, ticket_id),
            )
        return f"ticket {ticket_id}: status {status}, priority {priority}"

    def read_file(self, path: str) -> str:
        """Read a file of the desk.

        Args:
            path: below the desk's folder, for example help/refunds.md
        """
        found = self._path(path)
        time.sleep(0.1 * self._pace)
        return found.read_text(encoding="utf-8")

    def edit_file(self, path: str, find: str, replace: str) -> str:
        """Replace a passage of a file that occurs exactly once.

        Args:
            path: below the desk's folder, for example replies/ticket-7.md
            find: the passage as it stands
            replace: what shall stand there
        """
        found = self._path(path)
        text = found.read_text(encoding="utf-8")
        if text.count(find) != 1 or not find:
            raise ToolError("the passage to replace must occur exactly once", applied="no")
        time.sleep(0.2 * self._pace)
        found.write_text(text.replace(find, replace), encoding="utf-8", newline="\n")
        return "1 passage replaced"

    async def track_parcel(self, order_id: int) -> str:
        """Ask the carrier where an order's parcel is. The carrier is slow, and takes 2 requests a second.

        Args:
            order_id: the order's number
        """
        self.carrier_asked.append(time.monotonic())
        await asyncio.sleep(0.6 * self._pace)
        row = self._row("SELECT parcel FROM orders WHERE id = ?", order_id, "there is no such order")
        return str(row["parcel"])

    def refund_order(self, order_id: int) -> str:
        """Pay an order back. Only a paid order can be paid back, and the shift lead is asked first.

        Args:
            order_id: the order's number
        """
        time.sleep(0.3 * self._pace)
        row = self._row("SELECT state FROM orders WHERE id = ?", order_id, "there is no such order")
        if row["state"] != "paid":
            raise ToolError(f"an order that is {row['state']} cannot be paid back", applied="no")
        with self._database() as database:
            database.execute("UPDATE orders SET state = 'refunded' WHERE id = ?", (order_id,))
        return "paid back"

    async def translate(self, text: str, language: str) -> str:
        """Translate a phrase of the phrase book. The translator is paid 0.02 EUR for each.

        Args:
            text: the phrase in English, for example good morning
            language: da or nl
        """
        phrase = _PHRASES.get(text.casefold(), {}).get(language)
        if phrase is None:
            raise ToolError("the phrase book does not have this phrase in this language", applied="no")
        self.spent += PRICE
        await asyncio.sleep(0.25 * self._pace)
        return phrase

    async def shift_lead(self, request: ApprovalRequest) -> Approved | Denied:
        """Who approves refunds at this desk: a person on a phone, who takes one question at a time.

        Args:
            request: a refund; the order is looked up before the answer.
        """
        self.asked.append(request.call_id)
        async with self._lead_is_free:
            await asyncio.sleep(0.15 * self._pace)
            with self._database() as database:
                order = database.execute("SELECT cents FROM orders WHERE id = ?", (request.arguments["order_id"],))
                row = order.fetchone()
        if row is None:
            return Denied("there is no such order")
        if row["cents"] > _MOST_REFUND:
            return Denied("refunds above 50.00 EUR are not the shift lead's to approve")
        return Approved()


def open_tower(desk: Desk, *, observers: Sequence[Observer] = ()) -> Tower:
    """A tower with the desk's tools: a pool of 2 for the CRM, a rate for the carrier, a budget for each run, and what
    each tool reads and writes.

    Args:
        desk: whose tools they are.
        observers: receive the tower's events.
    """
    from towerman.policy import Budget, Rate
    from towerman.tower import Tower

    carrier = Rate(CARRIER_TAKES, per=desk.second + _ON_THE_WAY)
    tower = Tower(
        run_concurrency=16, pools={"crm": 2}, budgets={"run": Budget(cost=MOST_SPENT / 100)}, observers=observers
    )
    tower.add_tool(desk.read_customer, reads="customer:{customer_id}", pools=["crm"])
    tower.add_tool(desk.list_orders, reads="orders:{customer_id}", pools=["crm"])
    tower.add_tool(desk.search_help, reads="file:help/**")
    tower.add_tool(desk.read_ticket, reads="ticket:{ticket_id}")
    tower.add_tool(desk.update_ticket, writes="ticket:{ticket_id}")
    tower.add_tool(desk.read_file, reads="file:{path}")
    tower.add_tool(desk.edit_file, writes="file:{path}")
    tower.add_tool(desk.track_parcel, reads="parcel:{order_id}", rate=carrier)
    tower.add_tool(desk.refund_order, writes="payment:{order_id}", requires_approval=True)
    tower.add_tool(desk.translate, independent=True, read_only=True, spends={"cost": PRICE / 100})
    return tower
