"""What a batch would do, without doing it: what runs together, what waits for what and why, what is refused.

Theory. A batch is looked over, planned and admitted by the rooms that do it for a batch that runs, on a gate of its
own in which nobody else holds anything; only the handlers are left out. Every call is taken to last equally long. So
the calls fall into groups: a group starts when the one before it has ended, and its calls hold what they hold at the
same time. With other durations calls of neighbouring groups overlap too, but never two that an edge of kind `needs`,
`resource` or `order` joins: these edges hold whatever the durations are. An edge of kind `pool` says whose place a
call gets when all last equally long.

The parts are files: `parts` are the words of an explanation, `rehearsal` works it out, `telling` writes it as text,
`drawing` as SVG, for which `choosing` says what is drawn and `layout` where, `explanation` is the face.

House rules. Pure: nothing here touches a tower. Resources are told by what was declared, never by key; no argument
value can get in, for none comes here.

Not here: how a call is checked (work), what is wrong with the declarations (check), what really ran (timeline).
"""

from towerman.explain.explanation import Explanation
from towerman.explain.parts import (
    MAX_EDGES,
    DeferredCall,
    Edge,
    EdgeKind,
    Limit,
    PlannedCall,
    RateInForce,
    RefusedCall,
    Seen,
)
from towerman.explain.rehearsal import explain
from towerman.explain.telling import DRAWN

__all__ = [
    "DRAWN",
    "MAX_EDGES",
    "DeferredCall",
    "Edge",
    "EdgeKind",
    "Explanation",
    "Limit",
    "PlannedCall",
    "RateInForce",
    "RefusedCall",
    "Seen",
    "explain",
]
