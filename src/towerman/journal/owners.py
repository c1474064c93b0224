"""Who wrote an intent, and is that process at work still?

Theory. A process leaves a row in the journal before it writes anything else: its number, when it was started, the boot
and the pid namespace it lives in, and how long ago it last gave a sign. Where a reader lives in the same boot and the
same namespace the system itself says whether that process is there: the number alone is not enough, since numbers are
used again, so its start must be the same too. That answer is exact and at once. Everywhere else (another container
over the same file, a system without /proc) the lease decides: who has given no sign for so long counts as dead.

Somebody who counts as dead and is not does no harm: what he ends afterwards is refused or settles what was unknown,
and a claim that another worker took over is not his any more.

House rules. Signs are Unix times, read by the caller. Nothing here writes.

Not here: giving signs (writer), what follows from a death (records, store).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Final

LEASE_SECONDS: Final = 30.0
"""How long a process counts as alive after its last sign, where the system cannot be asked."""

BEAT_SECONDS: Final = 5.0
"""How often a process that has something open gives a sign."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, told from every other.

    Args:
        host: the machine's name, for people.
        boot: the machine's present boot; empty where it cannot be known.
        space: the pid namespace; empty where it cannot be known.
        pid: its number.
        started: when the process was started, in the system's own ticks; empty where it cannot be known.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: str


def myself() -> Identity:
    """This process."""
    pid = os.getpid()
    return Identity(socket.gethostname()[:200], _read("/proc/sys/kernel/random/boot_id"), _space(), pid, start_of(pid))


def alive(owner: Identity, beat: float, now: float, here: Identity, lease: float = LEASE_SECONDS) -> bool:
    """Is a process that has not said goodbye at work still?

    Args:
        owner: it.
        beat: Unix time of its last sign.
        now: Unix time.
        here: the process that asks.
        lease: seconds for which a sign counts.
    """
    if owner.started and owner.boot and owner.space and (owner.boot, owner.space) == (here.boot, here.space):
        return start_of(owner.pid) == owner.started
    # A sign from the future is one of a clock that was set back since: it counts for a lease, not until then.
    return abs(now - beat) <= lease


def start_of(pid: int) -> str:
    """When a process was started; empty where there is none, it has ended, or the system does not say."""
    told = _read(f"/proc/{pid}/stat")
    # The name, in brackets, may hold anything; after it come the state and 18 numbers, then the start.
    fields = told.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return ""
    return fields[19]


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
