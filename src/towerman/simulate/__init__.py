"""What a workload would have cost: plan, gate and ledger of a tower on a clock that jumps, without a single handler.

Theory. How many permits does the CRM need? Trying it takes a day and a service that bears it. Here the calls are a list
with durations, and who may start is decided by the very code that decides it in a tower: one Plan for each batch, one
Gate, one Ledger. There is no second scheduler that could differ; the tests hold the starts of a simulation to those of
a tower on virtual time. What is simulated is time alone: nothing fails, nothing is refused by a person, no budget is
spent.

Files, each standing on those before it: `workload` (what comes in), `batches` (in which batches), `force` (the limits
that hold), `world` (it happens), `report` (what came of it), `sweep` (`simulate`, and one limit at several values),
`sources` (workloads made of plans and of recorded traces).

House rules. Synchronous, no event loop, no thread, no chance: the same workload comes to the same report. Nothing of a
tower whose limits are used changes. `import towerman` does not import this.

Not here: deciding anything (plan, gate, ledger), the command line (cli).
"""

from towerman.simulate.report import Report, Waits
from towerman.simulate.sources import workload_of_plan, workload_of_trace
from towerman.simulate.sweep import Sweep, simulate, sweep
from towerman.simulate.workload import Workload, WorkloadCall, read_workload

__all__ = [
    "Report",
    "Sweep",
    "Waits",
    "Workload",
    "WorkloadCall",
    "read_workload",
    "simulate",
    "sweep",
    "workload_of_plan",
    "workload_of_trace",
]
