"""A ledger whose limits hold nobody back: it counts what they would have held back (mode="observe").

Theory. Permits are taken and given as ever, past the limit too. Each time somebody takes of a limit that is then over,
a call would have waited, or been refused. While a limit is over, its excess is added up over time. That area is what
the calls would have waited at least, together: with the limit enforced they would have come at the same instants and
worked as long, so at no instant could fewer of them have been there, and all but `limit` of those there would wait.
(Work behind a call that waits would start later still, so it is a lower bound, in permits times seconds.)

A rate goes on as if each call started when the rate would have let it, one after the other: what this puts off is what
they would have waited for it (first in, first out, which no order of serving betters in sum).

House rules. The only ledger that knows a clock, and only for this. Numbers of limits that count for a run or a tenant
are added up over all of them.

Not here: what order and resources have held back (report), the arithmetic (ledger).
"""

from __future__ import annotations

from collections.abc import Callable

from towerman.ledger import Ledger, LotT, Marks, Pool, Wants
from towerman.policy import told_rate
from towerman.rates import MICRO


class Watch:
    """What one limit has seen.

    Attributes:
        limit: permits, as declared.
        scope: whom it counts for.
        peak: the most permits that were held at once, of one instance.
        started: calls that started although they found it full.
        seconds: for how long it was over its limit.
        waited: permits above the limit times seconds.
    """

    __slots__ = ("limit", "peak", "scope", "seconds", "started", "waited")

    def __init__(self, limit: int, scope: str) -> None:
        self.limit = limit
        self.scope = scope
        self.peak = 0
        self.started = 0
        self.seconds = 0.0
        self.waited = 0.0


class RateWatch:
    """What one rate has seen.

    Attributes:
        rate: as declared, for people.
        scope: whom it counts for.
        started: calls that started before it would have let them.
        waited: seconds that they would have waited for it together.
        longest: the longest of these waits.
    """

    __slots__ = ("longest", "rate", "scope", "started", "waited")

    def __init__(self, rate: str, scope: str) -> None:
        self.rate = rate
        self.scope = scope
        self.started = 0
        self.waited = 0.0
        self.longest = 0.0


class Watched(Ledger[LotT]):
    """A ledger that watches its limits.

    Args:
        now: tells the time.

    Attributes:
        limits: by name, what each limit has seen.
        rates: by name, what each rate has seen.
        waiting: by tool name, calls that would have waited for some limit.
        refused: by tool name, calls that would have been refused, since their tool does not wait.
    """

    __slots__ = ("_full", "_last", "_now", "_over", "limits", "rates", "refused", "waiting")

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._over: dict[Pool[LotT], float] = {}  # limits that are over, and since when they were added up
        self._last: dict[str, int] = {}  # by rate, the start that the last call would have had
        self._full = False  # the call that is let in has found a limit full
        self.limits: dict[str, Watch] = {}
        self.rates: dict[str, RateWatch] = {}
        self.waiting: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    def take(self, wants: Wants[LotT]) -> None:
        """As ever, and watched."""
        now = self._now()
        self._add_up(wants, now)
        before = [pool.held for pool, _ in wants.pools]
        super().take(wants)
        found_full = False
        for (pool, _), held in zip(wants.pools, before, strict=True):
            if pool.held == held:  # borrowed: no further permit of this limit would have been asked for
                continue
            watch = self._watch(pool)
            watch.peak = max(watch.peak, pool.held)
            if pool.held > pool.declared:
                self._over[pool] = now
            if pool.held > pool.declared - (0 if wants.priority > 0 else pool.reserve):
                watch.started += 1
                found_full = True
        if wants.meters:
            self._full = found_full
        elif found_full:
            self._count(wants)

    def let_in(self, wants: Wants[LotT]) -> Marks[LotT]:
        """As ever; of each rate it takes the start that it would have had."""
        found_full, self._full = self._full, False
        now = self.instant
        for meter in wants.meters:
            instant = max(meter.free_at(wants.priority), self._last.get(meter.key, 0))
            self._last[meter.key] = instant
            name = limit_name(meter.key.removeprefix("rate:"))
            watch = self.rates.get(name)
            if watch is None:
                watch = self.rates[name] = RateWatch("", meter.scope)
            numbers = meter.pace.numbers
            watch.rate = told_rate(*numbers) if numbers is not None else "a pause"
            meter.pace.let_in(instant)
            meter.pace.begun(instant)
            if instant > now:
                found_full = True
                watch.started += 1
                watch.waited += (instant - now) / MICRO
                watch.longest = max(watch.longest, (instant - now) / MICRO)
        if found_full and wants.meters:
            self._count(wants)
        return Marks((), tuple((fuse, fuse.circuit.go()) for fuse in wants.fuses))

    def _count(self, wants: Wants[LotT]) -> None:
        counts = self.waiting if wants.wait else self.refused
        counts[wants.tool] = counts.get(wants.tool, 0) + 1

    def give(self, wants: Wants[LotT]) -> None:
        """As ever, and watched."""
        self._add_up(wants, self._now())
        super().give(wants)
        for pool, _ in wants.pools:
            if pool.held <= pool.declared:
                self._over.pop(pool, None)

    def set_limit(self, pool: Pool[LotT], limit: int, reserve: int = 0, *, enforced: bool = True) -> None:
        """As ever; from now on the excess is counted above the new limit."""
        if pool in self._over:
            self._add(pool, self._now())
        super().set_limit(pool, limit, reserve, enforced=enforced)
        self._watch(pool).limit = limit
        self._over.pop(pool, None)
        if pool.held > limit:
            self._over[pool] = self._now()

    def count_in(self, pool: Pool[LotT], units: int) -> None:
        """As ever, and watched."""
        if pool in self._over:
            self._add(pool, self._now())
        super().count_in(pool, units)
        watch = self._watch(pool)
        watch.peak = max(watch.peak, pool.held)
        if pool.held > pool.declared:
            self._over[pool] = self._now()

    def add_up(self) -> None:
        """Bring the times up to now."""
        now = self._now()
        for pool in self._over:
            self._add(pool, now)

    def _add_up(self, wants: Wants[LotT], now: float) -> None:
        if self._over:
            for pool, _ in wants.pools:
                if pool in self._over:
                    self._add(pool, now)

    def _add(self, pool: Pool[LotT], now: float) -> None:
        watch = self._watch(pool)
        passed = now - self._over[pool]
        watch.seconds += passed
        watch.waited += passed * (pool.held - pool.declared)
        self._over[pool] = now

    def _watch(self, pool: Pool[LotT]) -> Watch:
        name = limit_name(pool.key)
        watch = self.limits.get(name)
        if watch is None:
            watch = self.limits[name] = Watch(pool.declared, pool.scope)
        return watch


def limit_name(key: str) -> str:
    """What a limit is called, of its key: `process`, `run`, `tool:NAME`, or a pool's name."""
    name = key.partition("@")[0]
    return "run" if name.startswith("run:") else name.removeprefix("pool:")
