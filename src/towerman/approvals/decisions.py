"""What a person is asked, and what a person may answer.

Not here: what follows from an answer (approval, runner).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from towerman.errors import PolicyError
from towerman.policy import seconds, shown


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A call that waits for a person's decision.

    Args:
        approval_id: its name; decisions are given under it.
        tool: the tool's name.
        run_id: the run's id.
        call_id: the provider's id of the call; may be empty.
        digest: keyed digest of tool and arguments: equal for the same call in this process, or under one secret.
        expires_in: seconds for which a decision is still taken.
        arguments: what the handler would be called with, defaults included: a copy, for the person who decides. No
            `repr`, event or log shows it.
    """

    approval_id: str
    tool: str
    run_id: str
    call_id: str
    digest: str
    expires_in: float
    arguments: Mapping[str, object] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Approved:
    """Yes: the call may run.

    Args:
        arguments: run it with these in place of the model's, a whole set; None: as it is. They are checked like the
            model's, and may touch nothing that the call itself does not touch.
        expires_in: seconds for which the yes holds, from the decision on and never for longer than the tower's
            `approval_lifetime`; None: as long as the request would have waited.

    Raises:
        PolicyError: no mapping of names to values, or no number of seconds above 0.
    """

    arguments: Mapping[str, object] | None = field(default=None, repr=False)
    expires_in: float | None = None

    def __post_init__(self) -> None:
        given: object = self.arguments
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
            raise PolicyError(f"Approved.arguments: a mapping of names to values; got {type(given).__name__[:80]}")
        if self.expires_in is not None:
            seconds("Approved.expires_in", self.expires_in)


@dataclass(frozen=True, slots=True)
class Denied:
    """No: the call does not run.

    Args:
        reason: why, for the model; it is told the first 200 characters. Empty: it is told that a person said no.

    Raises:
        PolicyError: the reason is no text.
    """

    reason: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise PolicyError(f"Denied.reason: text; got {shown(self.reason)}")


Decision = Approved | Denied
"""What a person may answer."""

Approver = Callable[[ApprovalRequest], Awaitable[Decision | None]]
"""Asks a person. None: nobody has decided, so the call comes back pending."""
