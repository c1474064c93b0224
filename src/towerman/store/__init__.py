"""Where whole results are kept that were too large for the model, how long, and for whom.

Theory. A result that is sealed must not wait for a disk. So a content goes into memory first, always, and a thread
carries it on to a folder, the journal or another store where there is one; only then does memory let go of it. Memory
is bounded by bytes and age: the oldest goes first, and what was dropped is counted. A handle is unguessable and holds
within one tenant: a run reads what runs of its own tenant have stored, runs without a tenant what runs without a tenant
have stored. For everybody else there is no such handle. The program itself may read all.

Three files: `folder` keeps contents as files; `journaled` keeps them in a journal; `keeper` is the way in.

House rules. Nothing here blocks whoever keeps a content, and nothing but NotKept is raised to whoever reads one. No
message, log, `repr` or count holds anything of a content, or a handle.

Not here: pages (pages), when a content is kept (runner).
"""

from towerman.store.folder import FolderStore
from towerman.store.journaled import JournalStore
from towerman.store.keeper import Keeper, KeptStatistics, NotKept

__all__ = ["FolderStore", "JournalStore", "Keeper", "KeptStatistics", "NotKept"]
