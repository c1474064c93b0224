"""One batch against the desk in three forms, how each of its calls must end, and the look at what came of it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final

from towerman.calls import Outcome, Result
from towerman.desk.tools import CARRIER_TAKES, MOST_SPENT
from towerman.desk.world import DATABASE, DRAFT, FILES
from towerman.errors import Code

if TYPE_CHECKING:
    from towerman.desk.tools import Desk

Arguments = dict[str, object] | str

_OLD_ORDER: Final = "We are looking into your order."
_NEW_ORDER: Final = "The shelf was charged twice, and that was our mistake."
_OLD_MONEY: Final = "We will write about the money soon."
_NEW_MONEY: Final = "42.00 EUR are on their way back to you."

# The last bracket is missing, as where a model stopped too early.
_BROKEN: Final = '{"ticket_id": 8, "status": "solved"'

CALLS: Final[tuple[tuple[str, Arguments, Outcome, Code | None], ...]] = (
    ("read_customer", {"customer_id": 1042}, "ok", None),
    ("read_customer", {"customer_id": 1017}, "ok", None),
    ("list_orders", {"customer_id": 1042}, "ok", None),
    ("list_orders", {"customer_id": 1017}, "ok", None),
    ("search_help", {"text": "refund"}, "ok", None),
    ("update_ticket", {"ticket_id": 7, "status": "open"}, "ok", None),
    ("update_ticket", {"ticket_id": 7, "priority": "high"}, "ok", None),
    ("read_ticket", {"ticket_id": 7}, "ok", None),
    ("edit_file", {"path": DRAFT, "find": _OLD_ORDER, "replace": _NEW_ORDER}, "ok", None),
    # The same file, spelled another way.
    ("edit_file", {"path": f"./{DRAFT}", "find": _OLD_MONEY, "replace": _NEW_MONEY}, "ok", None),
    ("read_file", {"path": DRAFT}, "ok", None),
    ("track_parcel", {"order_id": 5007}, "ok", None),
    ("refund_order", {"order_id": 5009}, "error", "handler_error"),
    ("read_customers", {"customer_id": 1063}, "rejected", "unknown_tool"),
    ("update_ticket", _BROKEN, "rejected", "invalid_arguments"),
    # With the one above three questions to the carrier, who takes two a second.
    ("track_parcel", {"order_id": 5004}, "ok", None),
    ("track_parcel", {"order_id": 5005}, "ok", None),
    # 42.00 and 86.50 EUR; the shift lead approves 50.00 at most.
    ("refund_order", {"order_id": 5005}, "ok", None),
    ("refund_order", {"order_id": 5007}, "rejected", "approval_denied"),
    # 0.02 EUR each, of 0.05.
    ("translate", {"text": "Good morning", "language": "da"}, "ok", None),
    ("translate", {"text": "Thank you for waiting", "language": "da"}, "ok", None),
    ("translate", {"text": "Your parcel is on its way", "language": "da"}, "rejected", "budget_exhausted"),
)
"""Tool, arguments, and how the call must end."""


def promise() -> list[tuple[str, Outcome, Code | None]]:
    """Tool, outcome and code of every call, in emitted order."""
    return [(tool, outcome, code) for tool, _, outcome, code in CALLS]


def _id(index: int) -> str:
    return f"call_{index + 1:02d}"


def as_openai() -> dict[str, object]:
    """The batch as the assistant message of an OpenAI chat completion: arguments are JSON text."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": _id(index),
                "type": "function",
                "function": {
                    "name": tool,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for index, (tool, arguments, *_) in enumerate(CALLS)
        ],
    }


def as_anthropic() -> dict[str, object]:
    """The batch as an assistant message of Anthropic's: arguments are objects, the broken ones a string."""
    return {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": _id(index), "name": tool, "input": arguments}
            for index, (tool, arguments, *_) in enumerate(CALLS)
        ],
    }


def as_towerman() -> list[dict[str, object]]:
    """The batch in Towerman's own form: a list of calls."""
    return [
        {"id": _id(index), "tool": tool, "arguments": arguments} for index, (tool, arguments, *_) in enumerate(CALLS)
    ]


FORMS: Final[dict[str, Callable[[], object]]] = {
    "openai": as_openai,
    "anthropic": as_anthropic,
    "towerman": as_towerman,
}
"""Format -> the batch in it, as plain data."""


def check(desk: Desk, results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """Look at results, database and files after the batch.

    Args:
        desk: it has answered the batch once.
        results: of the batch, in emitted order.

    Returns:
        What was found as promised, and what was not; one sentence each.
    """
    kept: list[str] = []
    broken: list[str] = []

    def look(good: bool, sentence: str) -> None:
        (kept if good else broken).append(sentence)

    endings = [(result.tool, result.outcome, result.code) for result in results]
    wanted = promise()
    for index, (tool, outcome, code) in enumerate(wanted):
        if index >= len(endings) or endings[index] != (tool, outcome, code):
            look(False, f"call {index} ({tool}) ends {outcome}{f' {code}' if code else ''}")
    look(len(results) == len(wanted), f"{len(wanted)} calls in, {len(wanted)} results out, in the same order")

    with closing(sqlite3.connect(desk.folder / DATABASE)) as database:
        tickets = database.execute("SELECT status, priority FROM tickets ORDER BY id").fetchall()
        states = dict(database.execute("SELECT id, state FROM orders").fetchall())
    look(tickets[0] == ("open", "high"), "both updates of ticket 7 are in the database")
    draft = (desk.folder / FILES / DRAFT).read_text(encoding="utf-8")
    look(_NEW_ORDER in draft and _NEW_MONEY in draft, f"both edits are in {DRAFT}")
    values = {result.index: result.value for result in results}
    ticket = values.get(7)
    seen = isinstance(ticket, dict) and (ticket.get("status"), ticket.get("priority")) == ("open", "high")
    look(seen and values.get(10) == draft, "the two reads came after the writes before them and saw them whole")
    untouched = tickets[1] == ("new", "normal") and (states[5007], states[5009]) == ("paid", "unpaid")
    look(untouched, "the refused and the failed calls changed nothing")
    refunds = [result for result in results if result.tool == "refund_order"]
    asked = all("approval" in result.waited_for for result in refunds)
    asked = asked and sorted(desk.asked) == sorted(result.call_id for result in refunds)
    paid = states[5005] == "refunded"
    look(asked and paid, "the shift lead was asked about each refund, and 42.00 EUR were paid back")
    look(desk.crm_peak <= 2, "the CRM never saw more than 2 requests at a time")
    times = sorted(desk.carrier_asked)
    spans = [later - first for first, later in zip(times, times[CARRIER_TAKES:], strict=False)]
    look(bool(spans) and min(spans) >= desk.second, "the carrier never got more than 2 requests in a second")
    look(0 < desk.spent <= MOST_SPENT, "the translator was paid no more than the budget of 0.05 EUR")
    return kept, broken
