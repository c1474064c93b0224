"""Approvals: a person's yes or no to one call, and what is kept of a batch that waits for it.

Theory (rules S3, S4). An approval is for one call as it stands: it is bound to the tool and to a keyed digest of the
arguments that were looked over. It is decided once, holds for a time, and is used once. A batch some of whose calls
wait for a person can be written down whole and gone on with elsewhere.

Four files, each standing on those before it: `decisions` is what people see and say; `binding` is what an approval
holds for; `approval` is its state machine, and the book of those that this process knows; `document` is the form in
which a batch leaves the process.

House rules. Time comes in as a number. Arguments are kept for the person who decides, are never shown in a `repr`, and
appear elsewhere as a digest under a key.

Not here: asking anybody, and when (runner); what a call is told (sealing); a durable table of approvals (journal).
"""

from towerman.approvals.approval import NEVER, Approval, ApprovalState, Book, Heard, new_id
from towerman.approvals.binding import binding, shape
from towerman.approvals.decisions import ApprovalRequest, Approved, Approver, Decision, Denied
from towerman.approvals.document import Open, Suspended, read_state, secret_bytes, write_state

__all__ = [
    "NEVER",
    "Approval",
    "ApprovalRequest",
    "ApprovalState",
    "Approved",
    "Approver",
    "Book",
    "Decision",
    "Denied",
    "Heard",
    "Open",
    "Suspended",
    "binding",
    "new_id",
    "read_state",
    "secret_bytes",
    "shape",
    "write_state",
]
