"""The corridor: performs what plan and gate decide, runs handlers, seals results. The only room that knows asyncio.

Theory. Seventeen files, each standing on those before it. `sealer` writes the one result of each call; `intake` looks a
batch over; `spending` keeps what it has of budgets; `sharing` lets one run answer several calls; `offering` tells the
gate what is ready and passes its decisions on; `asking` has people decide about calls first; `repeating` has calls
tried again; `oversized` deals with values that do not fit; `ending` is every end that a call can come to; `keeping`
writes down plans that can be gone on with by name; `filing` asks and tells the journal of calls; `deferring` puts calls
into its queue, and `carrying` what people have said to them; `shell` runs batches and what the gate grants, on one
loop; `binding` fills the results of others into steps of a plan. `stalls` tells when a loop stands still; `shells`
keeps one shell for each loop that uses the tower; `sync` lets threads without a loop in; `worker` takes calls out of
the queue.

House rules. Deciding happens under the tower's lock, effects outside it. Nothing awaits between a decision and its
record.

Not here: who may start (gate), in what order (plan), what a call wants (work), what results say (sealing).
"""

from towerman.runner.shell import Shell
from towerman.runner.shells import Shells
from towerman.runner.sync import SyncDoor
from towerman.runner.worker import Worker, WorkerReport

__all__ = ["Shell", "Shells", "SyncDoor", "Worker", "WorkerReport"]
