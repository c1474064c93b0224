"""One batch as a graph: what waits for what, what is ready, what is skipped.

Theory. An edge says that a call waits for an earlier one. There are two kinds (rule S1). `needs` was
asked for: it settles when the needed call's result is sealed, and when that call failed, the dependent
is skipped. `after` is made here, of holds that conflict: it settles when the earlier call's *work* has
ended, and it never skips. Two conflicting calls are put in the order in which `needs` alone would let
the batch run one call at a time, the smallest index first; that order is total, so both kinds of edges
together have no cycle. (Choosing pair by pair, with a declared need winning, makes cycles.)

Six files: `needs` reads what was asked for, or refuses it; `following` follows a path into a result; `references` reads
the references in arguments, and fills in results; `conflicts` makes the other edges; `groups` finds calls that one run
can answer; `graph` keeps them all and is told how the calls go.

House rules. Node numbers: calls are 0 to size - 1, junctions (conflicts) follow. No recursion: chains are long. A
batch without an edge keeps no state for its calls. Nothing here knows a clock or a limit; only `references` sees
arguments, and shows none; keys are compared and never shown.

Not here: which holds a call has (access), what may run now of that which is ready (gate), what planners write (forms).
"""

from towerman.plan.following import AGREED, EACH, copied
from towerman.plan.graph import Plan
from towerman.plan.groups import Group
from towerman.plan.needs import PlanRefused, resolve_needs
from towerman.plan.references import (
    Bound,
    Linked,
    Reference,
    UnresolvedReference,
    escape,
    escape_key,
    escape_text,
    read_references,
    whole_value,
    written,
)

__all__ = [
    "AGREED",
    "EACH",
    "Bound",
    "Group",
    "Linked",
    "Plan",
    "PlanRefused",
    "Reference",
    "UnresolvedReference",
    "copied",
    "escape",
    "escape_key",
    "escape_text",
    "read_references",
    "resolve_needs",
    "whole_value",
    "written",
]
