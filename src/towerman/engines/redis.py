"""The ledger of many processes on Redis or Valkey: claims, waits, releases of one process.

Theory. `claim` asks once and, where something is in the way and the caller may wait, is a waiter on the server from
then on. It hears of an offer by a message (a hint: it may be lost) or by asking again each second, which also keeps the
waiter alive. An offer is confirmed after what the caller takes locally, or declined; whoever declines keeps its place.

While the server is not there a claim goes on asking, under the same id, until its time is over: an outage that is
shorter than the wait is only a wait. Whoever is cancelled, or gives up, leaves a release by id behind it, whether or
not the claim was answered: it is asked for as long as a lease lasts, and after that the lease has run out.

House rules. Nobody but the line touches a connection. A release is a plain call that never waits: it can stand in a
`finally` that is cancelled again.

Not here: one round trip (line), renewals (heart), the rules (claim.lua), what a lost lease means for a call.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from typing import Any, Final

from towerman.breaker import Verdict
from towerman.calls import X
from towerman.clock import Clock, RealClock
from towerman.engines.heart import Heart
from towerman.engines.line import TOGETHER, Known, Line, options
from towerman.engines.words import KINDS, MICROS, EngineUnavailable, Grant, Limits, Refusal, Wanted, chain_text
from towerman.errors import PolicyError

LONGEST_LEASE: Final = 3_600.0
SHORTEST_LEASE: Final = 0.1
POLL: Final = 1.0
"""Seconds after which a waiter asks again, at most."""

LIGHT: Final = 8
"""Amounts that are looked at in accounts for one call of a batch, and weigh no more than any question."""

OUTAGE_POLL: Final = 0.25
"""Seconds between attempts while the server is not there."""


class RedisLedger:
    """What one process holds of an admission group.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with user, password and database as redis-py reads them.
        group: the admission group: all that may be claimed together. Letters, digits, `-`, `_`, `.`, `:`.
        lease: seconds after which what a dead process held is free again, 0.1 to 3600.
        secret: the key of the digests of resource keys; the same for all replicas.
        timeout: seconds for a connection, and for an answer; None: a third of the lease, at most 5.
        acks: replicas of the server that must have heard of the grant of a write before it counts (WAIT): a replica
            that is promoted then knows of it, if it is one of these.
        clock: monotonic.

    Raises:
        PolicyError: a value is not allowed, or redis-py is not there.

    Attributes:
        lost: grants that were lost before they were released.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str = "default",
        lease: float = 15.0,
        secret: bytes = b"",
        timeout: float | None = None,
        acks: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
            raise PolicyError(f"engine.lease: from {SHORTEST_LEASE} to {LONGEST_LEASE:,.0f} seconds")
        if not group or not all(letter.isalnum() or letter in "-_.:" for letter in group) or len(group) > 128:
            raise PolicyError("engine.group: 1 to 128 letters, digits, '-', '_', '.' or ':'")
        self._url = url
        self._group = group
        self._lease = lease
        self._lease_us = round(lease * MICROS)
        self._secret = secret
        self._acks = acks
        self._timeout = min(5.0, lease / 3) if timeout is None else timeout
        self._clock = clock or RealClock()
        self._poll = min(POLL, lease / 3)
        check = blake2b(b"towerman engine", digest_size=8, key=secret[:64]).hexdigest()
        self._hello = f'["hello","{check}"]'
        self._known = Known(self._lease_us)
        options(url, self._timeout, True)  # a mistake is told now
        self._begin()

    def _begin(self) -> None:
        """Nothing is held; also after a fork, since what the parent holds is the parent's."""
        self._pid = os.getpid()
        self._prefix = secrets.token_hex(8)
        self._numbers = count(1)
        self._lines: dict[asyncio.AbstractEventLoop, tuple[Line, _Ear]] = {}
        self._heart = Heart(self._url, self._group, self._lease, self._timeout, self._known, self._clock)

    # ------------------------------------------------------------------ claims

    async def claim(
        self,
        wanted: Wanted,
        *,
        wait: float = 0.0,
        holding: bool = True,
        take: Callable[[], bool] | None = None,
        on_wait: Callable[[Refusal], object] | None = None,
        on_unreached: Callable[[], bool] | None = None,
        on_lost: Callable[[Grant], object] | None = None,
        nudge: asyncio.Event | None = None,
    ) -> Grant | Refusal:
        """All that is wanted at once, or nothing of it.

        Args:
            wanted: the ask.
            wait: seconds to wait for it, `inf` for as long as it takes; 0: it is had now or refused.
            holding: what is local is held already; else `take` is asked before the grant counts.
            take: called when something is offered to a waiter, to take what is local; False declines the offer.
            on_wait: called when it has to wait, or still has to, with what is in the way: from then on until `take`
                says True nothing local need be held.
            on_unreached: the same, each time that the server is not reached; True gives up.
            on_lost: called if the grant is lost, from the thread of the heartbeats.
            nudge: set when `take` might say True now where it did not before: then the server is asked at once.

        Returns:
            The grant, renewed until it is released; or why there is none.

        Raises:
            EngineUnavailable: the server was not there as long as the wait lasted.
            PolicyError: another secret is used in this group.

        On cancel nothing stays held: what the claim may have got goes back by its id.
        """
        line, ear = self._line()
        id = self._new_id()
        now = self._clock.now
        until = now() + wait
        event: asyncio.Event | None = None
        ttl, offer = round(3 * self._poll * MICROS), round(2 * self._poll * MICROS)
        rest = f'{self._lease_us},{wanted.text},{ttl},{offer},"{ear.channel}"]'
        rest = rest if wait > 0 else f"{self._lease_us},{wanted.text},0]"
        text = f'["claim","{id}",{rest}'
        acks = self._acks if any(mode == X for _, mode in wanted.holds) else 0
        taken, waited, last = holding, False, Refusal("pool")
        ear.begin()
        try:
            while True:
                sent = now()
                try:
                    answer = await line.ask(text, acks=acks)
                except EngineUnavailable:
                    taken = False
                    if (on_unreached is not None and on_unreached()) or now() >= until:
                        raise
                    await asyncio.sleep(min(OUTAGE_POLL, max(0.0, until - now())))
                    text = f'["claim","{id}",{rest}'  # under the same id: what was granted meanwhile is told again
                    continue
                kind = answer[0]
                if kind == 1:
                    if taken or take is None or take():
                        grant = Grant(id, answer[1] << 32 | answer[2], sent + self._lease, on_lost)
                        self._heart.keep(grant)
                        return grant
                    self._forget(line, id)  # what is local is not to be had: it waits anew
                    if event is not None:
                        ear.forget(id)
                    id = self._new_id()
                    event = ear.listen(id, event or nudge)
                    text = f'["claim","{id}",{rest}'
                elif kind == 0:
                    return _refusal(answer, waited)
                elif kind == 3:
                    taken = take is None or take()
                    if taken:
                        text = f'["confirm","{id}",{self._lease_us}]'
                        continue
                    await line.ask(f'["decline","{id}",{ttl}]')
                    text = f'["poll","{id}",{ttl}]'
                elif kind == -1:  # it was forgotten: the wait begins again
                    text = f'["claim","{id}",{rest}'
                    if now() < until:
                        continue
                else:
                    taken, waited, last = False, True, _refusal(answer, True)
                    if on_wait is not None:
                        on_wait(last)
                    text = f'["poll","{id}",{ttl}]'
                left = until - now()
                if left <= 0:
                    self._forget(line, id)
                    return last
                if event is None:
                    event = ear.listen(id, nudge)
                pause = min(self._poll, left)
                if last.retry_after:
                    pause = min(pause, last.retry_after)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await event.wait()
                event.clear()
        except BaseException:
            self._forget(line, id)
            raise
        finally:
            if event is not None:
                ear.forget(id)
            ear.end()

    def _new_id(self) -> str:
        return f"{self._prefix}{next(self._numbers):x}"

    def _forget(self, line: Line, id: str) -> None:
        """Whatever it got goes back by its id; asked for as long as a lease lasts."""
        text = f'["release","{id}",0,"nothing"]'
        try:
            line.post(text, gives=True, until=self._clock.now() + self._lease)
        except EngineUnavailable:  # it was closed meanwhile
            self._heart.post([text])

    def abandon(self, grant: Grant, *, begun: bool = True) -> None:
        """Give all of it back for a loop that is gone: from any thread, at the next beat of the heart."""
        self._heart.drop(grant)
        self._heart.post([f'["release","{grant.id}",{int(begun)},"nothing"]'])

    def release(self, grant: Grant, *, begun: bool = True, verdict: Verdict = "well") -> asyncio.Future[Any]:
        """Give all of it back. A plain call: it is done whether or not somebody waits for the answer.

        Args:
            grant: once for each.
            begun: its first line was reached; False refunds what the rules allow.
            verdict: how the call came back, for its breakers.

        Returns:
            [1], or [0]: it was over already, and nothing was given back.
        """
        self._heart.drop(grant)
        line, _ = self._line()
        text = f'["release","{grant.id}",{int(begun)},"{verdict if begun else "nothing"}"]'
        return line.post(text, gives=True, until=self._clock.now() + self._lease)

    def begun(self, grant: Grant) -> asyncio.Future[Any]:
        """Its first line was reached: its starts count from now on."""
        return self._post(f'["begun","{grant.id}"]')

    def orphan(self, grant: Grant, step: int) -> asyncio.Future[Any]:
        """Its work goes on after its result was sealed (1), or no longer (-1)."""
        return self._post(f'["orphan","{grant.id}",{step}]')

    def verdict(self, grant: Grant, verdict: Verdict) -> asyncio.Future[Any]:
        """How it came back, for its breakers, before it is released."""
        return self._post(f'["verdict","{grant.id}","{verdict}"]')

    def pause(self, rate: str, seconds: float) -> asyncio.Future[Any]:
        """Nothing starts by a rate for so long: whoever is behind it has said so."""
        return self._post(json.dumps(["pause", rate, round(seconds * MICROS)]))

    def _post(self, text: str) -> asyncio.Future[Any]:
        return self._line()[0].post(text, gives=True, until=self._clock.now() + self._lease)

    # ------------------------------------------------------------------ budgets

    async def reserve(
        self,
        chain: Sequence[Limits],
        calls: Sequence[Mapping[str, int] | None],
        needs: Sequence[Sequence[int]] = (),
    ) -> tuple[list[Grant | None], dict[int, Refusal]]:
        """Reserve what the calls of a batch ask, in emitted order, each of them whole or not at all.

        Args:
            chain: the accounts on which the batch is.
            calls: by unit in millionths, `calls` included; None for a call that will not start.
            needs: for each call those before it without which it does not start.

        Returns:
            The share of each call that got one, renewed until `settle` or `refund`; and by index why not.

        A batch of very many calls is reserved in parts, in order, so that no call of the server takes long: others may
        reserve in between. On cancel, and when the server is not there, what it may have reserved goes back.
        """
        line, _ = self._line()
        ids = [self._new_id() for _ in calls]
        parts = _parts(calls, len(chain))
        accounts = chain_text(chain)
        shares: list[Grant | None] = []
        lacks: dict[int, Refusal] = {}
        closed: list[str] = []
        try:
            for first, last, weight in parts:
                rows = _rows(ids, calls, needs, shares, range(first, last))
                sent = self._clock.now()
                if len(parts) == 1:
                    answer = await line.ask(f'["reserve",{accounts},{self._lease_us}{rows}]', weight=weight)
                else:
                    text = f'["part",{accounts},{self._lease_us},{json.dumps(closed)}{rows}]'
                    answer, names = await line.ask(text, weight=weight)
                    closed = [name.decode() for name in names]
                for place, account, unit, _ in answer:
                    lacks[first + place - 1] = Refusal("budget", account - 1, unit=unit.decode())
                for index in range(first, last):
                    vain = calls[index] is None or any(shares[need] is None for need in _before(needs, index))
                    share = None if index in lacks or vain else Grant(ids[index], 0, sent + self._lease)
                    shares.append(share)
                    if share is not None:
                        self._heart.keep(share)
        except BaseException:
            self._drop(line, ids, shares)
            raise
        if lacks and len(parts) > 1 and not all(one.partial for one in chain):
            told = lacks[min(lacks)]
            lacks |= {index: told for index, share in enumerate(shares) if share is not None}
            self._drop(line, [share.id for share in shares if share is not None], shares)
            shares = [None] * len(calls)
        return shares, dict(sorted(lacks.items()))

    def _drop(self, line: Line, ids: Sequence[str], shares: Sequence[Grant | None]) -> None:
        """What was reserved, or may have been, goes back by its id."""
        for share in shares:
            if share is not None:
                self._heart.drop(share)
        until = self._clock.now() + self._lease
        for id in ids:
            with suppress(EngineUnavailable):
                line.post(f'["drop","{id}"]', gives=True, until=until)

    def refund(self, share: Grant) -> asyncio.Future[Any]:
        """The call does not start: what it has reserved or spent goes back."""
        return self._end(share, "refund")

    def begin(self, share: Grant, chain: Sequence[Limits]) -> asyncio.Future[Any]:
        """What it has reserved is spent, for a call that is answered by the run of another one."""
        return self._post(f'["begin","{share.id}",{chain_text(chain)}]')

    def settle(self, share: Grant) -> asyncio.Future[Any]:
        """The work of the call has ended: of what it has charged, only that much is spent."""
        return self._end(share, "settle")

    def _end(self, share: Grant, what: str) -> asyncio.Future[Any]:
        self._heart.drop(share)
        return self._post(f'["{what}","{share.id}"]')

    def charge(self, share: Grant, amounts: Mapping[str, int]) -> asyncio.Future[Any]:
        """The handler of the call has spent so much, by unit in millionths."""
        listed = [[unit, str(amount)] for unit, amount in amounts.items()]
        return self._post(json.dumps(["charge", share.id, listed, next(self._numbers)]))

    def spend(self, chain: Sequence[Limits], amounts: Mapping[str, int]) -> None:
        """So much was spent, by no call: from any thread, at the next beat of the heart."""
        id, accounts = self._new_id(), chain_text(chain)
        listed = json.dumps([[unit, str(amount)] for unit, amount in amounts.items()])
        self._heart.post(
            [
                f'["reserve",{accounts},{self._lease_us},["{id}",[],[]]]',
                f'["begin","{id}",{accounts}]',
                f'["charge","{id}",{listed},1]',
                f'["settle","{id}"]',
            ]
        )

    def forsake(self, shares: Sequence[Grant]) -> None:
        """What was reserved goes back, for a loop that is gone: from any thread, at the next beat of the heart."""
        for share in shares:
            self._heart.drop(share)
        self._heart.post([f'["drop","{share.id}"]' for share in shares])

    # ------------------------------------------------------------------ lines

    def _line(self) -> tuple[Line, _Ear]:
        if self._pid != os.getpid():
            self._begin()
        loop = asyncio.get_running_loop()
        found = self._lines.get(loop)
        if found is None:
            for old in [old for old in self._lines if old.is_closed()]:
                del self._lines[old]
            line = Line(self._url, self._group, self._timeout, self._hello, self._known, self._clock, self._heart.post)
            ear = _Ear(self._url, f"towerman:{{{self._group}}}:hint:{self._prefix}", self._timeout)
            found = self._lines[loop] = (line, ear)
        return found

    async def wait_idle(self) -> None:
        """Until all that was posted from this loop has its answer."""
        await self._line()[0].wait_idle()

    async def aclose(self) -> None:
        """The connections of this loop are closed, after what was posted; with the last loop the heartbeats end.

        Claims that were cancelled just before are waited for, as long as an answer may take.
        """
        found = self._lines.get(asyncio.get_running_loop())
        if found is not None:
            await found[1].quiet(self._timeout)
        line, ear = self._lines.pop(asyncio.get_running_loop(), (None, None))
        if ear is not None:
            await ear.close()
        if line is not None:
            await line.close()
        if not self._lines:
            await asyncio.to_thread(self._heart.close)
            self._heart = Heart(self._url, self._group, self._lease, self._timeout, self._known, self._clock)

    def close(self) -> None:
        """The heartbeats end, from any thread, after what is left to give back; what loops still hold runs out."""
        self._heart.close()
        self._heart = Heart(self._url, self._group, self._lease, self._timeout, self._known, self._clock)

    @property
    def secret(self) -> bytes:
        """The key of the digests of resource keys."""
        return self._secret

    @property
    def lost(self) -> int:
        """Grants that were lost before they were released."""
        return self._heart.lost

    def statistics(self) -> dict[str, int]:
        """What was asked, and what was heard.

        `trips` and `asked`: round trips, less those of the heartbeats, and questions in them. `held`: grants and
        shares. `beats` and `missed`: renewals answered or not. `lost`: grants. `reaped`: leases of the whole group that
        ran out without being given back, whoever held them, as the server told last. `offset_us`: microseconds that its
        clock is ahead of this machine's.
        """
        lines = [line for line, _ in self._lines.values()]
        return {
            "trips": sum(line.trips for line in lines),
            "asked": sum(line.asked for line in lines),
            "held": self._heart.held(),
            "beats": self._heart.beats,
            "missed": self._heart.missed,
            "lost": self._heart.lost,
            "reaped": self._known.reaped,
            "offset_us": self._known.offset,
        }

    def __repr__(self) -> str:
        return f"RedisLedger(group={self._group!r}, {self._heart.held()} held)"


def _parts(calls: Sequence[Mapping[str, int] | None], accounts: int) -> list[tuple[int, int, int]]:
    """Which calls of a batch reserve together: first, last and one, and what that weighs on a line."""
    parts, first, weight = [], 0, 0
    for index, one in enumerate(calls):
        own = max(1, accounts * len(one or ()) // LIGHT)
        if index > first and weight + own > TOGETHER:
            parts.append((first, index, weight))
            first, weight = index, 0
        weight += own
    return [*parts, (first, len(calls), weight)]


def _before(needs: Sequence[Sequence[int]], index: int) -> list[int]:
    return [need for need in needs[index] if need < index] if needs else []


def _rows(
    ids: Sequence[str],
    calls: Sequence[Mapping[str, int] | None],
    needs: Sequence[Sequence[int]],
    shares: Sequence[Grant | None],
    part: range,
) -> str:
    """Calls of a batch as the functions take them; shares of those before them are known."""
    rows = []
    for index in part:
        one, before = calls[index], _before(needs, index)
        vain = one is None or any(need < part.start and shares[need] is None for need in before)
        asks = False if vain else [[unit, str(amount)] for unit, amount in (one or {}).items()]
        rows.append([ids[index], asks, [need - part.start + 1 for need in before if need >= part.start]])
    return "".join("," + json.dumps(row) for row in rows)


def _refusal(answer: Any, waited: bool) -> Refusal:
    _, kind, place, detail = answer
    name = KINDS[kind.decode()]
    if name == "budget":
        return Refusal(name, place - 1, unit=detail.decode(), waited=waited)
    return Refusal(name, max(0, place - 1), detail / MICROS if detail else None, waited=waited)


class _Ear:
    """Hears hints: ids of waiters for whom something is new. They may be lost; whoever waits asks again anyway."""

    __slots__ = ("_asking", "_events", "_maker", "_quiet", "_task", "_timeout", "channel")

    def __init__(self, url: str, channel: str, timeout: float) -> None:
        self.channel = channel
        self._maker = options(url, timeout, True)
        self._timeout = timeout
        self._events: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None
        self._asking = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def begin(self) -> None:
        """A claim is under way."""
        self._asking += 1
        self._quiet.clear()

    def end(self) -> None:
        """It has its answer, or was given up."""
        self._asking -= 1
        if not self._asking:
            self._quiet.set()

    async def quiet(self, seconds: float) -> None:
        """Until no claim is under way, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()

    def listen(self, id: str, event: asyncio.Event | None = None) -> asyncio.Event:
        """Set when there is something new for this waiter."""
        event = self._events[id] = event or asyncio.Event()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._hear(), name="towerman engine ear")
        return event

    def forget(self, id: str) -> None:
        """Nobody waits by that id any more."""
        self._events.pop(id, None)

    async def _hear(self) -> None:
        while True:
            connection = self._maker.make_connection()
            try:
                await connection.connect()
                await connection.send_command("SUBSCRIBE", self.channel)
                while True:
                    message = await connection.read_response()
                    event = self._events.get(message[2].decode()) if message[0] == b"message" else None
                    if event is not None:
                        event.set()
            except Exception:  # whatever it is: it is only a hint
                await asyncio.sleep(POLL)
            finally:
                await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """It hears no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._maker.disconnect()
