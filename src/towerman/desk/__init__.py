"""The built-in support desk of `towerman demo`: a small real world, its tools, and one batch against it.

Theory. The desk is a SQLite database (customers, orders, tickets) and a folder of files, made anew each time. Its
tools are ordinary functions that know nothing of Towerman: an update reads a row, takes its time and writes the row
back, an edit does the same with a file, so that two of them at once would lose one of the changes. What keeps them
apart is only what they declare. The CRM, the carrier and the translator count what they get, and a shift lead decides
on refunds. The batch has good calls and bad ones; `promise` says how each must end and `check` looks at results,
database, files and what was counted.

House rules. No network, nothing outside the desk's folder, the same contents at every run.

Not here: showing it (cli).
"""

from towerman.desk.batch import CALLS, FORMS, as_anthropic, as_openai, as_towerman, check, promise
from towerman.desk.tools import Desk, open_tower
from towerman.desk.world import make_world

__all__ = [
    "CALLS",
    "FORMS",
    "Desk",
    "as_anthropic",
    "as_openai",
    "as_towerman",
    "check",
    "make_world",
    "open_tower",
    "promise",
]
