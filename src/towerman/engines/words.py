"""What is asked of an engine and what it answers: asks, grants, refusals.

Theory. An ask names everything that one call wants with the numbers that are in force: an engine keeps counts, and no
settings, so that replicas with old and new settings work side by side. A grant is a lease: it is held until it is
released or its time is over, and its fence is greater than that of every grant before it.

House rules. Keys of resources hold argument values (G8): they are digested here, before anything leaves the process.
Amounts are millionths, instants and lengths whole microseconds.

Not here: how it travels (line), who decides (claim.lua).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

from towerman.calls import Hold, Mode
from towerman.errors import EngineUnavailable, PolicyError
from towerman.rates import Numbers

MOST: Final = 1 << 52
"""Numbers of an ask stay below it: a server counts exactly up to twice as much."""

HIGHEST: Final = 49_998
"""The highest priority that an engine knows, and less than nothing of it the lowest."""

Kind = Literal["pool", "resource", "rate", "breaker", "budget", "reservation", "quarantine", "too_much", "unavailable"]
"""What is in the way. `too_much`: more than the pool ever gives; `reservation`: what was reserved has expired."""


class Pool(NamedTuple):
    """Permits of a pool.

    Args:
        key: unique in the group, for example `pool:crm`.
        units: wanted, 1 or more.
        limit: of the pool.
        reserve: permits of it for asks of a priority above 0.
    """

    key: str
    units: int
    limit: int
    reserve: int = 0


class Rate(NamedTuple):
    """A start of a rate limit.

    Args:
        key: unique in the group.
        numbers: limit, period in microseconds, burst or None for an exact window, reserve; None: there is no limit,
            but it can be paused.
        enforced: False: it is counted only.
    """

    key: str
    numbers: Numbers | None
    enforced: bool = True


class Breaker(NamedTuple):
    """A circuit breaker that is gone through.

    Args:
        key: unique in the group.
        numbers: failures, window, time open, probes; lengths in microseconds.
    """

    key: str
    numbers: tuple[int, int, int, int]


class Limits(NamedTuple):
    """What an account may spend.

    Args:
        key: unique in the group, for example `tenant:billing`.
        limits: by unit, in millionths.
        window: microseconds after which it renews; 0 for never, `MONTHS`, `WEEKS`.
        partial: a batch may be run in part.
    """

    key: str
    limits: tuple[tuple[str, int], ...]
    window: int = 0
    partial: bool = True


MONTHS: Final = -1
WEEKS: Final = -2


_UNPAID: Final = '"s":"","c":[]}'
"""How the text of an ask ends that counts in no account."""


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def chain_text(chain: Sequence[Limits]) -> str:
    """A chain of accounts as the functions take it."""
    return _text(
        [[one.key, one.window, int(one.partial), *[[unit, str(limit)] for unit, limit in one.limits]] for one in chain]
    )


class Wanted:
    """An ask as the functions take it, checked and written once, to be claimed as often as needed.

    Args:
        pools: permits, no key twice.
        holds: (flat resource key, mode) pairs, no key twice; keys are digested.
        rates: starts, no key twice.
        breakers: no key twice.
        priority: class; higher goes first.
        share: the name of what a call has reserved of its budgets, or empty.
        chain: its accounts, as limited now.
        secret: the key of the digests: replicas exclude each other only if they have the same.

    Raises:
        PolicyError: a number or key that an engine cannot take; the message names it and what is allowed.

    Attributes:
        text: what is sent.
    """

    __slots__ = ("breakers", "chain", "holds", "pools", "rates", "text")

    def __init__(
        self,
        pools: Sequence[Pool] = (),
        holds: Sequence[Hold] = (),
        rates: Sequence[Rate] = (),
        breakers: Sequence[Breaker] = (),
        *,
        priority: int = 0,
        share: str = "",
        chain: Sequence[Limits] = (),
        secret: bytes = b"",
    ) -> None:
        self.pools = tuple(pools)
        self.holds = tuple(holds)
        self.rates = tuple(rates)
        self.breakers = tuple(breakers)
        self.chain = tuple(chain)
        keys = [[one.key for one in row] for row in (pools, rates, breakers, chain)]
        for key in [key for row in keys for key in row]:
            if "\0" in key or not key.isprintable():
                raise PolicyError(f"engine: the name {key!r} of a pool, rate, breaker or budget has odd characters")
        for pool in pools:
            _whole(pool.key, "permits", pool.units, 1)
            _whole(pool.key, "limit", pool.limit, 1)
        for rate in rates:
            if rate.numbers is None:
                continue
            limit, period, burst, _ = rate.numbers
            _whole(rate.key, "limit", limit, 1, 10**7)
            _whole(rate.key, "period in microseconds", period, 1)
            if burst is not None:
                _whole(rate.key, "burst", burst, 1, 10**7)
                _whole(rate.key, "burst * period / limit in microseconds", burst * period // limit, 0)
        for breaker in breakers:
            for number in breaker.numbers:
                _whole(breaker.key, "numbers", number, 1)
        _whole("priority", "size", abs(priority), 0, 49_999)
        self.text = _text(
            {
                "p": [[one.key, one.units, one.limit, one.reserve] for one in pools],
                "h": [[digest(key, secret), mode] for key, mode in holds],
                "r": [[one.key, *_numbers(one.numbers), int(one.enforced)] for one in rates],
                "b": [[one.key, *one.numbers] for one in breakers],
                "y": priority,
                "s": share,
                "c": json.loads(chain_text(chain)),
            }
        )

    def paid(self, share: str, chain: Sequence[Limits]) -> Wanted:
        """The same, for a call that has reserved something of these accounts."""
        other = Wanted.__new__(Wanted)
        other.pools, other.holds, other.rates, other.breakers = self.pools, self.holds, self.rates, self.breakers
        other.chain = tuple(chain)
        assert self.text.endswith(_UNPAID), "it is paid already"
        other.text = f'{self.text[: -len(_UNPAID)]}"s":{_text(share)},"c":{chain_text(chain)}}}'
        return other

    def __repr__(self) -> str:
        return f"Wanted({len(self.pools)} pools, {len(self.holds)} holds, {len(self.rates)} rates)"


def _whole(key: str, what: str, number: int, least: int, most: int = MOST) -> None:
    if not least <= number < most:
        raise PolicyError(f"engine: {key}: {what} must be from {least} to {most - 1:,}, an engine counts no further")


def _numbers(numbers: Numbers | None) -> tuple[int, int, int, int]:
    if numbers is None:
        return 0, 0, -1, 0
    limit, period, burst, reserve = numbers
    return limit, period, -1 if burst is None else burst, reserve


def digest(key: str, secret: bytes) -> str:
    """What stands for a resource key outside of the process."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16, key=secret[:64]).hexdigest()


class Grant:
    """What was granted, as long as it lasts.

    Args:
        id: the name of the lease.
        fence: greater than that of every earlier grant of the group.
        deadline: the instant, on this process's clock, at which it is over unless it is renewed.
        on_lost: called once, from the thread of the heartbeats, when it is lost.

    Attributes:
        lost: it is over although nobody has released it: others may have what it held.
        told: the engine has said so; else it could not be asked in time.
    """

    __slots__ = ("deadline", "fence", "id", "lost", "on_lost", "told")

    def __init__(self, id: str, fence: int, deadline: float, on_lost: Callable[[Grant], object] | None = None) -> None:
        self.id = id
        self.fence = fence
        self.deadline = deadline
        self.lost = False
        self.told = False
        self.on_lost = on_lost

    def __repr__(self) -> str:
        return f"Grant(fence={self.fence}{', lost' if self.lost else ''})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no grant.

    Args:
        kind: what is in the way.
        place: which of its kind in the ask, from 0: a pool, a hold, a rate, a breaker, an account.
        retry_after: seconds after which trying again can help, where that is known.
        unit: of the account, that lacks.
        waited: it was waited for, in vain.
    """

    kind: Kind
    place: int = 0
    retry_after: float | None = None
    unit: str = ""
    waited: bool = False


KINDS: Final[dict[str, Kind]] = {
    "p": "pool",
    "n": "resource",
    "m": "rate",
    "b": "breaker",
    "a": "budget",
    "l": "reservation",
    "q": "quarantine",
    "h": "too_much",
    "w": "pool",
}

MICROS: Final = 1_000_000

__all__ = [
    "KINDS",
    "MICROS",
    "MONTHS",
    "WEEKS",
    "Breaker",
    "EngineUnavailable",
    "Grant",
    "Kind",
    "Limits",
    "Mode",
    "Pool",
    "Rate",
    "Refusal",
    "Wanted",
    "chain_text",
    "digest",
]
