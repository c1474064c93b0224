"""For tests of your own tools and agent loop: virtual time, scripted handlers, and the look afterwards.

Theory. What one wants to know of a set of declarations is: do these two calls overlap, does this write wait, what does
the model get when that one fails? None of it needs the real handlers, and none of it needs time to pass. A `Rehearsal`
puts scripts in the place of a tower's handlers, leaves all that was declared as it is, and lets the tower work on a
clock that jumps. The same test takes the same steps each time, and what can never end is told, not waited for.

Files, each standing on those before it: `loops` (the virtual event loop, threads that take turns), `looks` (is a tower
whole?), `rehearsal` (scripts, visits, `Rehearsal`, `run`).

House rules. `import towerman` does not import this. Nothing but the standard library and Towerman itself is needed.

Not here: a stand-in for the model; a response is a list of `Call`, or the provider's own as plain data.
"""

from towerman.clock import VirtualClock
from towerman.testing.looks import assert_whole
from towerman.testing.loops import Stuck, VirtualLoop
from towerman.testing.rehearsal import Rehearsal, Script, Visit, overlapped, peak, run

__all__ = [
    "Rehearsal",
    "Script",
    "Stuck",
    "VirtualClock",
    "VirtualLoop",
    "Visit",
    "assert_whole",
    "overlapped",
    "peak",
    "run",
]
