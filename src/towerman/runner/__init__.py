"""The corridor: performs what plan and gate decide, runs handlers, seals results. The only room that knows asyncio.

Theory. Five files, each standing on the one before it: `sealer` writes the one result of each call; `intake` looks a
batch over and offers what is ready; `shell` runs what the gate grants, on one loop, to every end that a call can come
to; `shells` keeps one runner for each loop that uses the tower; `sync` lets threads without a loop in.

House rules. Deciding happens under the tower's lock, effects outside it. Nothing awaits between a decision and its
record.

Not here: who may start (gate), in what order (plan), what a call wants (work), what results say (sealing).
"""

from towerman.runner.shell import Shell
from towerman.runner.shells import Shells
from towerman.runner.sync import SyncDoor

__all__ = ["Shell", "Shells", "SyncDoor"]
