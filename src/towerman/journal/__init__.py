"""The journal: what was begun and what came of it, in a file that outlives the process.

Theory. Ten files, each standing on those before it. `owners` tells living processes from dead ones; `file` opens the
SQLite file and brings it up to date; `session` is what every step needs; `approvals`, `batches`, `calls`, `deferred`,
`blobs` and `means` are the tables; `writer` is the one thread that works on them; `journal` is the public face. The
statements that make the tables are numbered files in `sql`.

House rules. Values (arguments, answers, large contents) are in the tables `arguments`, `answers` and `blob_parts` and
nowhere else. It stands beside the tower and reaches only pure rooms and the clock.

Not here: when something is written, and what follows from it (runner, records).
"""

from towerman.documents import KeptBatch
from towerman.journal.journal import Journal, Pruned
from towerman.journal.session import Cipher
from towerman.records import JournalUnavailable

__all__ = ["Cipher", "Journal", "JournalUnavailable", "KeptBatch", "Pruned"]
