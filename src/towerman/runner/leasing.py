"""What calls of one loop have, or ask for, of the engine that processes share: their leases.

Theory (rule S12). A granted call of which a part counts over many processes is asked about before anything else of it
happens, so no approval is used and no intent written for one that has to wait there. It holds what is local for that
one question. Where the engine lets it wait it gives that back (elsewhere) and the question stays open: the engine keeps
its place, and offers what it wants when there is some. A lease ends where the gate is told that the call has ended, or
does not start: there is no other way out, so none is forgotten.

A lease that is lost (it was not renewed in time, or the engine has forgotten it) may be another one's by now: the call
is told to stop, and its result says so. One that has not begun is asked about again.

While the engine is not reached: "closed", calls wait, and those whose wait is over are refused; "open", calls run by
the limits of this process alone; "local", by this process's share of the limits, and what is exclusive waits.

House rules. One task for each question that is open; it is over when the question is. What a gate calls (`Lease`)
neither waits nor raises.

Not here: what an engine promises (engines), who may go on here (gate).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from towerman import sealing
from towerman.breaker import Verdict
from towerman.budgets import Lack
from towerman.calls import IS, IX, ROOT, S, X
from towerman.core import Core
from towerman.errors import EngineUnavailable, PolicyError
from towerman.gate import GRANTED, NEVER, PARKED
from towerman.ledger import UNLIMITED, Fuse, Meter, Pool, State
from towerman.lots import ENGINE, Lot
from towerman.rates import Pace, make, micros
from towerman.runner.accounting import AGAIN, Accounting, accounts_there, has_share, limits_of
from towerman.work import NOT_STARTED, Job, Owner, Slot, Want

if TYPE_CHECKING:
    from towerman.engines.words import Grant, Refusal, Wanted

SHARED: Final = frozenset({"cluster", "tenant"})
"""Scopes of limits that an engine keeps, where there is one."""

_COVERS: Final = {X: {X, S, IX, IS}, S: {S, IS}, IX: {IX, IS}, IS: {IS}}
"""By the mode in which a call holds something: those in which its nested calls need not ask for it."""

_log: Final = logging.getLogger("towerman")


class Far(NamedTuple):
    """What a call wants of the engine.

    Args:
        wanted: as the engine takes it.
        pools, nodes, meters, fuses: the same things here, in the same order; nodes by key.
    """

    wanted: Wanted
    pools: tuple[Pool[Lot[Owner]], ...]
    nodes: tuple[str, ...]
    meters: tuple[Meter[Lot[Owner]], ...]
    fuses: tuple[Fuse, ...]


class Lease:
    """What one call has, or asks for, at the engine.

    Attributes:
        entry: what the gate knows the call by.
        far: what it wants there.
        wake: set when what is local is had again.
        task: asks.
        grant: what it has, or None.
        alone: it runs without a grant, since the engine is not reached.
        lost: the grant was lost.
        unreached: the engine did not answer when it was asked last.
    """

    __slots__ = (
        "_began", "_ended", "_shell", "_verdict", "alone", "entry", "far", "grant", "lost", "task", "unreached", "wake",
    )  # fmt: skip

    def __init__(self, shell: Leasing, entry: Slot, far: Far) -> None:
        self._shell = shell
        self._began = False
        self._ended = False
        self._verdict: Verdict = "well"
        self.entry = entry
        self.far = far
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.grant: Grant | None = None
        self.alone = False
        self.lost = False
        self.unreached = False

    @property
    def ended(self) -> bool:
        """The call is over, or does not start."""
        return self._ended

    @property
    def fence(self) -> int | None:
        """Greater than that of every earlier grant; None without one."""
        return None if self.grant is None else self.grant.fence

    def over(self) -> None:
        """What it has there goes back; from any thread, any number of times."""
        if not self._ended:
            self._ended = True
            self._there(self.give)

    def begun(self) -> None:
        """The call's first line is next; from any thread."""
        self._began = True
        if self.far.meters and self.grant is not None:
            self._there(self._tell_begun)

    def orphaned(self) -> None:
        """Its work goes on after its result was sealed."""
        if self.grant is not None:
            self._there(self._tell_orphaned)

    def told(self, verdict: Verdict) -> None:
        """How it came back."""
        self._verdict = verdict

    def _there(self, what: object) -> None:
        """On the loop of the call; where that is gone, what it has is given back by whoever is left."""
        loop = self._shell.loop
        if asyncio._get_running_loop() is loop:
            what()  # type: ignore[operator]  # one of its own methods
            return
        try:
            loop.call_soon_threadsafe(what)  # type: ignore[arg-type]  # the same
        except RuntimeError:
            engine, grant = self._shell.core.engine, self.grant
            if self._ended and grant is not None and engine is not None:
                engine.abandon(grant, begun=self._began)

    def give(self) -> None:
        """On the loop: give it back, or stop asking for it."""
        engine, grant, task = self._shell.core.engine, self.grant, self.task
        if grant is not None and engine is not None:
            try:
                engine.release(grant, begun=self._began, verdict=self._verdict)
            except EngineUnavailable:  # it was closed before
                engine.abandon(grant, begun=self._began)
        elif task is not None and not task.done():
            task.cancel()

    def _tell_begun(self) -> None:
        engine, grant = self._shell.core.engine, self.grant
        if not self._ended and engine is not None and grant is not None:
            engine.begun(grant)

    def _tell_orphaned(self) -> None:
        engine, grant = self._shell.core.engine, self.grant
        if not self._ended and engine is not None and grant is not None:
            engine.orphan(grant, 1)
            if self.far.fuses:
                engine.verdict(grant, self._verdict)

    def __repr__(self) -> str:
        return f"Lease({self.entry.wants.tool!r}, {self.grant!r})"


class Leasing(Accounting):
    """Asks the engine, on one loop."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> None:
        super().__init__(core, loop, look)
        self._paces: dict[str, Pace] = {}  # of this process's share of rates, while the engine is not reached

    # ================================================================ asking

    def _is_leased(self, entry: Slot) -> bool:
        """Has a granted call what it wants of the engine? Else it is asked for, and the call starts when it is had."""
        lease = cast("Lease | None", entry.there)
        if lease is not None and lease.lost and not lease.alone:
            lease.over()
            entry.there = lease = None
        if lease is None:
            work, index = entry.owner
            if work.closing is not None or work.results[index] is not None:
                return True  # it is given back in the next step
            try:
                far = self._far(entry)
            except PolicyError as wrong:
                self._give_back(entry)
                waited = self.core.now() - entry.since if entry.blocked_by else 0.0
                self._refuse(work, index, "policy_error", str(wrong), waited=waited, waited_for=entry.blocked_by)
                self._settle(work, index, False)
                return False
            if far is None:
                if not self._counts_there(work, index):
                    return True
                far = self._nothing_but_budgets()
            lease = Lease(self, entry, far)
            entry.there = lease
            lease.task = self.loop.create_task(self._claim_there(lease), name="towerman engine claim")
            return False
        if lease.grant is not None or lease.alone:
            return True
        lease.wake.set()
        return False

    def _far(self, entry: Slot) -> Far | None:
        """What a call wants of the engine; None for nothing."""
        want, core = cast("Want", entry.wants), self.core
        known = want.far
        if known is not None and known[0] == core.generation:
            return cast("Far | None", known[1])
        with core.lock:
            made = self._made_far(want)
        if want.loan is None:
            want.far = core.generation, made
        return made

    def _made_far(self, want: Want) -> Far | None:
        from towerman.engines import words

        engine = self.core.engine
        assert engine is not None
        ledger = self.core.gate.ledger
        pools = [
            (pool, units)
            for pool, units in ledger.own(want)
            if units > 0 and pool.scope in SHARED and pool.limit != UNLIMITED
        ]
        holds = [hold for hold in want.holds if not hold[0].startswith(ROOT)]
        if want.loan is not None:
            holds = [hold for hold in holds if not self._covered(want, *hold)]
        meters = [meter for meter in want.meters if meter.scope in SHARED]
        fuses = [fuse for fuse in want.fuses if fuse.scope in SHARED]
        if not (pools or holds or meters or fuses):
            return None
        wanted = words.Wanted(
            [
                words.Pool(_name(pool.key), units, min(pool.limit, words.MOST - 1), min(pool.reserve, words.MOST - 1))
                for pool, units in pools
            ],
            holds,
            [words.Rate(_name(meter.key), meter.pace.numbers, meter.enforced) for meter in meters],
            [words.Breaker(_name(fuse.key), fuse.circuit.numbers) for fuse in fuses],
            priority=max(-words.HIGHEST, min(words.HIGHEST, want.priority)),
            secret=engine.secret,
        )
        return Far(
            wanted,
            tuple(pool for pool, _ in pools),
            tuple(key for key, _ in holds),
            tuple(meters),
            tuple(fuses),
        )

    def _nothing_but_budgets(self) -> Far:
        from towerman.engines.words import Wanted

        return Far(Wanted(), (), (), (), ())

    @staticmethod
    def _covered(want: Want, key: str, mode: int) -> bool:
        """Does a call that waits for this nested one hold it there already, in a mode that is enough?

        Raises:
            PolicyError: it holds it in a mode that is not: then it is in its own way, and there alone.
        """
        assert want.loan is not None
        held = [loan.holds[key] for loan in want.loan.chain() if key in loan.holds]
        if held and not any(mode in _COVERS[one] for one in held):
            label = want.labels.get(key, "shared by others")
            raise PolicyError(
                f"Not started: the call that made it reads resource {label}, which it would write; over several "
                "processes the outer call has to declare that it writes it"
            )
        return bool(held)

    async def _claim_there(self, lease: Lease) -> None:
        """Ask the engine until there is an answer for good."""
        from towerman.engines.words import Grant

        core, entry = self.core, lease.entry
        engine = core.engine
        assert engine is not None
        try:
            answer: Grant | Refusal | Lack | None
            work, index = entry.owner
            while True:
                wanted, short = await self._paid(lease)
                if wanted is None:
                    answer = short
                    break
                answer = await engine.claim(
                    wanted,
                    wait=NEVER if entry.wants.wait else 0.0,
                    holding=entry.status == GRANTED,
                    take=lambda: self._offered(lease),
                    on_wait=lambda refusal: self._waits(lease, refusal),
                    on_unreached=lambda: self._unreached(lease),
                    on_lost=lambda grant: self._hear_lost(lease),
                    nudge=lease.wake,
                )
                if isinstance(answer, Grant) or answer.kind != "reservation" or lease.ended:
                    break
                if work.there is not None:  # it was not renewed in time, and is forgotten there: it reserves anew
                    work.there.pop(index, None)
        except asyncio.CancelledError:
            if not lease.ended:  # by whoever ends the loop
                self._turn_down(entry, "engine_unavailable", ENGINE)
        except EngineUnavailable:
            if lease.alone:
                self._take([entry])
            elif not lease.ended:
                self._turn_down(entry, "engine_unavailable", ENGINE)
        except PolicyError as wrong:
            _log.error("engine: %s", wrong)
            if not lease.ended:
                self._turn_down(entry, "engine_unavailable", ENGINE)
        except Exception as fault:
            self._faulty(*entry.owner, entry, fault)
        else:
            if not isinstance(answer, Grant):
                if not lease.ended and answer is not None:
                    self._refused_there(lease, answer)
                elif lease.alone:
                    self._take([entry])
                return
            lease.grant = answer
            lease.unreached = False
            if lease.ended:
                lease.give()
            else:
                self._take([entry])

    async def _paid(self, lease: Lease) -> tuple[Wanted | None, Lack | None]:
        """What a call wants, with what it has reserved of budgets there. Where that is nothing: what it lacks, or
        nothing if it is over, or goes on without the engine.
        """
        work, index = lease.entry.owner
        wanted = lease.far.wanted
        while self._counts_there(work, index):
            try:
                share = await self._share_there(work, index)
            except EngineUnavailable:
                if self._unreached(lease):
                    if not lease.alone:
                        raise
                    return None, None
                if lease.ended:
                    return None, None
                await asyncio.sleep(AGAIN)
                continue
            if isinstance(share, Lack):
                return None, share
            return wanted.paid(share.id, limits_of(accounts_there(work.shares))), None
        return wanted, None

    def _offered(self, lease: Lease) -> bool:
        """The engine has what a call wants: is what is local to be had, too?"""
        core = self.core
        with core.lock:
            granted, decided = core.gate.let_in(lease.entry, core.now())
            notes = self._notes()
        self._take(decided, notes)
        return granted

    def _waits(self, lease: Lease, refusal: Refusal) -> None:
        """It has to wait there: what is local goes back."""
        entry, core = lease.entry, self.core
        lease.unreached = False
        if entry.status not in (GRANTED, PARKED) or lease.ended or self._is_unwanted(entry):
            return
        now = core.now()
        left, wants = refusal.retry_after, entry.wants
        if refusal.kind == "rate" and left is not None and now + left > entry.since + wants.max_wait:
            self._refused_there(lease, refusal)
            return
        self._turn_away(lease, self._what(lease, refusal))

    def _unreached(self, lease: Lease) -> bool:
        """The engine does not answer. Says whether the call goes on without it, or is not to wait."""
        entry, policy = lease.entry, self.core.policy.engine
        lease.unreached = True
        if lease.ended or policy is None or self._is_unwanted(entry):
            return False
        open_, local = policy.on_unavailable == "open", policy.on_unavailable == "local"
        if (open_ or local) and self._offered(lease) and (open_ or self._has_share(lease, policy.replicas or 1)):
            self._go_alone(lease, local)
            return True
        if entry.status == GRANTED and not entry.wants.wait:
            return True
        self._turn_away(lease, self._any(lease), unreached=True)
        return False

    def _is_unwanted(self, entry: Slot) -> bool:
        """Was the call sealed while it was asked about? Then it gives back what it has, and is asked about no more."""
        work, index = entry.owner
        if entry.status != GRANTED or not (work.closing is not None or work.results[index] is not None):
            return False
        self._give_back(entry)
        self._seal_closed(work, index)
        return True

    def _go_alone(self, lease: Lease, share: bool) -> None:
        """A call runs without the engine; whoever made it is told."""
        lease.alone = True
        self.core.leases["alone"] += 1
        work = lease.entry.owner[0]
        work.paused = {**(work.paused or {}), "": sealing.unleased(share)}

    def _has_share(self, lease: Lease, replicas: int) -> bool:
        """Is what a call has here within this process's share of all limits? Nobody has one of what is exclusive."""
        far = lease.far
        if far.nodes or any(pool.held > pool.limit // replicas for pool in far.pools):
            return False
        work, index = lease.entry.owner
        asks = work.shares.asks[index] if work.shares is not None else None
        if asks is not None and not has_share(accounts_there(work.shares), set(asks.amounts), replicas):
            return False
        now = micros(self.core.now())
        paces = []
        for meter in far.meters:
            numbers = meter.pace.numbers
            if numbers is not None and meter.enforced:
                limit, period, burst, _ = numbers
                share = limit // replicas, period, None if burst is None else burst // replicas, 0
                if not share[0] or share[2] == 0:
                    return False
                pace = self._paces.get(meter.key)
                if pace is None or pace.numbers != share:
                    pace = self._paces[meter.key] = make(share)
                if pace.free_at(now, high=False) > now:
                    return False
                paces.append(pace)
        for pace in paces:
            pace.let_in(now)
            pace.begun(now)
        return True

    # ================================================================ answers

    def _turn_away(self, lease: Lease, what: State[Lot[Owner]] | str, *, unreached: bool = False) -> None:
        core = self.core
        with core.lock:
            decided = core.gate.turned_away(lease.entry, what, core.now(), unreached=unreached)
            notes = self._notes()
        self._take(decided, notes)

    def _turn_down(self, entry: Slot, code: object, label: str, retry_after: float | None = None) -> None:
        core = self.core
        with core.lock:
            decided = core.gate.turned_down(entry, code, label, core.now(), retry_after)  # type: ignore[arg-type]
            notes = self._notes()
        self._take(decided, notes)

    def _refused_there(self, lease: Lease, refusal: Refusal | Lack) -> None:
        """The engine says no, and waiting is no use or not wanted."""
        if isinstance(refusal, Lack):
            self._too_little(lease, refusal)
            return
        if refusal.kind == "budget":
            account = accounts_there(lease.entry.owner[0].shares)[refusal.place]
            self._too_little(lease, Lack(account, refusal.unit))
            return
        code, left = "concurrency_limit", None
        if refusal.kind == "rate":
            code, left = "rate_limited", refusal.retry_after
        elif refusal.kind == "breaker":
            code, left = "circuit_open", refusal.retry_after
        if refusal.kind == "breaker":
            label = lease.far.fuses[refusal.place].label
        else:
            label = self.core.gate.shown(self._what(lease, refusal), lease.entry.wants)
        self._turn_down(lease.entry, code, label, left)

    def _too_little(self, lease: Lease, lack: Lack) -> None:
        """A budget that counts over all processes is used up: the call does not start."""
        core, entry = self.core, lease.entry
        with core.lock:
            lack.account.refused += 1
            decided = core.gate.turned_down(entry, "budget_exhausted", "", core.now())
            notes = self._notes()
        self._take([one for one in decided if one is not entry], notes)
        if entry in decided:
            self._unpaid(entry, lack)

    def _unpaid(self, entry: Slot, lack: Lack) -> None:
        """There is too little for a call that was granted."""
        raise NotImplementedError  # pragma: no cover - the shell's

    def _what(self, lease: Lease, refusal: Refusal) -> State[Lot[Owner]] | str:
        """What is in the way there, as it is known here: a pool, a rate, the key of a resource."""
        far, place = lease.far, refusal.place
        if refusal.kind in ("pool", "too_much") and place < len(far.pools):
            return far.pools[place]
        if refusal.kind == "rate" and place < len(far.meters):
            return far.meters[place]
        if refusal.kind in ("resource", "quarantine") and place < len(far.nodes):
            return far.nodes[place]
        return self._any(lease)

    def _any(self, lease: Lease) -> State[Lot[Owner]] | str:
        far = lease.far
        if far.pools or far.meters:
            return (*far.pools, *far.meters)[0]
        return far.nodes[0] if far.nodes else lease.entry.wants.pools[0][0]

    # ================================================================ leases that are lost

    def _hear_lost(self, lease: Lease) -> None:
        """From the thread of the heartbeats."""
        try:
            self.loop.call_soon_threadsafe(self._lose, lease)
        except RuntimeError:  # the loop is gone, and so are its calls
            return

    def _lose(self, lease: Lease) -> None:
        """What a call held over all processes may be another one's by now: it is told to stop."""
        if lease.ended:
            return
        core, policy = self.core, self.core.policy.engine
        lease.lost = True
        if (
            lease.grant is not None
            and not lease.grant.told
            and policy is not None
            and policy.on_unavailable != "closed"
        ):
            # Nobody has said that it is lost: the engine is not reached, and calls run without it.
            self._go_alone(lease, policy.on_unavailable == "local")
            return
        core.leases["lost"] += 1
        work, index = lease.entry.owner
        job = work.jobs.get(index)
        if job is not None and job.entry is lease.entry:
            self._stop(job, "lease_lost", "its lease was lost")

    def _give_up(self, job: Job) -> None:
        """Told to stop between its grant and its first line."""
        if job.why == "lease_lost" and job.started == NOT_STARTED:
            message = "Not started: what it had of limits that processes share was lost."
            self._never_started(job, "lease_lost", message, "rejected")
        else:
            super()._give_up(job)

    def _pause_there(self, meters: tuple[Meter[Lot[Owner]], ...], seconds: float) -> None:
        """Whoever is behind these rates wants to be left alone for so long, by all processes."""
        engine = self.core.engine
        if engine is not None:
            for meter in meters:
                if meter.scope in SHARED:
                    engine.pause(_name(meter.key), seconds)


def _name(key: str) -> str:
    """A key as the engine takes it: what cannot be printed is written out."""
    return key if key.isprintable() else json.dumps(key)
