"""What stands on the desk before the first call: three tables and four files."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

DATABASE: Final = "desk.db"
FILES: Final = "files"
DRAFT: Final = "replies/ticket-7.md"

_SCHEMA: Final = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL, plan TEXT NOT NULL);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer_id INTEGER NOT NULL REFERENCES customers (id),
    item TEXT NOT NULL,
    cents INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('unpaid', 'paid', 'refunded')),
    parcel TEXT NOT NULL
);
CREATE TABLE tickets (
    id INTEGER PRIMARY KEY,
    customer_id INTEGER NOT NULL REFERENCES customers (id),
    subject TEXT NOT NULL,
    status TEXT NOT NULL,
    priority TEXT NOT NULL
);
"""

_CUSTOMERS: Final = (
    (1017, "Northside Bakery", "Bergen", "basic"),
    (1042, "Harbour Books", "Aarhus", "business"),
    (1063, "Lumen Cycles", "Ghent", "basic"),
)
_ORDERS: Final = (
    (5004, 1042, "oak shelf", 4200, "paid", "delivered"),
    (5005, 1042, "oak shelf", 4200, "paid", "never sent"),
    (5007, 1017, "proofing baskets", 8650, "paid", "at the depot in Bergen"),
    (5009, 1017, "dough scraper", 990, "unpaid", "never sent"),
)
_TICKETS: Final = (
    (7, 1042, "Charged twice for one shelf", "new", "normal"),
    (8, 1017, "Where is my parcel?", "new", "normal"),
)
_TEXTS: Final = {
    "help/refunds.md": "# Refunds\n\nA refund goes back the way the money came.\nIt takes three working days.\n",
    "help/shipping.md": "# Shipping\n\nParcels leave the depot at noon.\nA lost parcel is a refund or a new parcel.\n",
    "help/accounts.md": "# Accounts\n\nA customer changes the plan at any time.\n",
    DRAFT: "Hello,\n\nWe are looking into your order.\nWe will write about the money soon.\n\nYour support desk\n",
}


def make_world(folder: Path) -> None:
    """Make the database and the files in an empty folder.

    Args:
        folder: it exists and is empty.

    Raises:
        OSError: the folder cannot be written.
    """
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        database.executescript(_SCHEMA)
        database.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", _CUSTOMERS)
        database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", _ORDERS)
        database.executemany("INSERT INTO tickets VALUES (?, ?, ?, ?, ?)", _TICKETS)
        database.commit()
    for name, text in _TEXTS.items():
        path = folder / FILES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
