"""What a call touches, and which two calls conflict, and why.

Theory. A tool declares templates (`customer:{customer_id}`, `file:{dir}/**`) or a callable of the arguments. They are
compiled once, when the tool is registered; a call's arguments then give its accesses. A key is `scheme:path` and its
path nests at "/". A plain key is that one node, `key/**` is the node and all below it. Two accesses conflict when one
names the other's node, or a node below its subtree, and at least one writes.

Four files, each standing on those before it: `keys` writes the one key of a resource; `declarations` compiles a
template or a callable; `locks` turns accesses into the flat keys that ledgers know, and says which two conflict;
`rules` is all that one tool's calls touch.

House rules. A message names the template and the argument, never a value. Everything that does not depend on a value is
worked out at registration. Nothing learned from the file system is kept: links change.

Not here: the order of conflicting calls (plan), who holds what (ledger), tools that declare nothing (runner).
"""

from towerman.access.declarations import bound
from towerman.access.keys import MAX_ACCESSES, MAX_DEPTH, MAX_SEGMENT, AccessRefused, canonical_key
from towerman.access.locks import conflict, flat_holds, within
from towerman.access.rules import AccessRule

__all__ = [
    "MAX_ACCESSES",
    "MAX_DEPTH",
    "MAX_SEGMENT",
    "AccessRefused",
    "AccessRule",
    "bound",
    "canonical_key",
    "conflict",
    "flat_holds",
    "within",
]
