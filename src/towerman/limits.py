"""The pools, rates, breakers and budgets that a tower's options come to: made, changed while calls run, dropped.

Theory. Each concurrency limit that is declared is a pool in the ledger: one for the process, one for each run, one for
a tool that has a limit of its own, and for each named pool as many as its scope asks for. A rate and a breaker stand
beside their tool or pool, under its key, and are forgotten only when they remember nothing: else a tenant whose last
run has ended would come back with its rate whole. When options change, limits
change where they are: what is held stays held, and the gate looks at everybody who waits (R-64). A limit that a tool
did not have before counts at once also those of its calls that are at work. A limit that is gone holds nobody back,
and its pool is forgotten with the last call that has some of it.

A budget of the process or of a tenant is an account that stays, with what was spent of it, when the last run has ended,
until it renews. That of a run is made when the run is opened and holds for it as it is; so does that of a batch.

House rules. Whoever calls this holds the lock of the core. What comes in was checked before: nothing here can fail
half-way.

Not here: what may be declared (policy), what changed and how it is told (changes), who waits (gate).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from towerman.breaker import Circuit
from towerman.budgets import Account
from towerman.core import Core, Made, pool_key
from towerman.ledger import Fuse, Meter, Pool, Wants
from towerman.rates import NEVER, Numbers, make, micros
from towerman.work import Owner, RunState, Slot, Want

if TYPE_CHECKING:
    from towerman.gate import Flow, Lot
    from towerman.policy import Breaker, Budget, Rate, TowerPolicy
    from towerman.policy import Pool as PoolPolicy
    from towerman.tools import Tool


SWEPT: Final = 16
"""Rates, breakers and accounts out of use that are looked at each time."""


def _timed(pool: PoolPolicy) -> tuple[bool, bool]:
    """Has a pool a rate, and a breaker?"""
    return pool.rate is not None, pool.breaker is not None


class Limits:
    """The pools of one core.

    Args:
        core: whose ledger they are in; its policy says how large they are.
    """

    __slots__ = ("_changes", "_core", "_fuses", "_idle", "_paces", "_retired", "_stale", "_stale_timed")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._stale: set[str] = set()
        self._retired: set[str] = set()
        self._changes: list[tuple[Pool[Lot[Owner]], int, int, bool]] = []
        self._paces: list[tuple[Meter[Lot[Owner]], Numbers | None, bool]] = []
        self._fuses: list[tuple[Fuse, tuple[int, int, int, int]]] = []
        self._idle: dict[str, None] = {}  # accounts of tenants without a run, in a ring
        self._stale_timed: dict[str, None] = {}  # of rates and breakers that nobody can use any more, in a ring

    def _set_timed(
        self, key: str, name: str, rate: Rate | None, breaker: Breaker | None, *, scope: str = "process"
    ) -> None:
        """The rate and the breaker of a tool or pool: they are made, or their change is noted.

        Args:
            key: of the tool or pool.
            name: what people are shown, `tool search` or `pool crm`.
            rate: None for none; an old one then holds nobody back.
            breaker: None for none.
            scope: whom they count for.
        """
        ledger = self._core.gate.ledger
        enforced = self._core.policy.mode == "enforce"
        meter = ledger.meters.get(f"rate:{key}")
        numbers = None if rate is None else rate.numbers
        if meter is None:
            if rate is not None:
                made: Meter[Lot[Owner]] = Meter(
                    f"rate:{key}", f"rate of {name}", make(numbers), scope=scope, enforced=enforced
                )
                ledger.add_meter(made)
        elif meter.pace.numbers != numbers:
            self._paces.append((meter, numbers, enforced))
            meter.label = f"rate of {name}" if rate is not None else f"pause of {name}"
        fuse = ledger.fuses.get(f"breaker:{key}")
        if breaker is not None:
            if fuse is None:
                circuit = Circuit(*breaker.numbers)
                ledger.add_fuse(Fuse(f"breaker:{key}", f"circuit breaker of {name}", circuit, scope))
            elif fuse.circuit.numbers != breaker.numbers:
                self._fuses.append((fuse, breaker.numbers))
        for one, there in ((f"rate:{key}", rate), (f"breaker:{key}", breaker)):
            if there is not None:
                self._stale_timed.pop(one, None)
            elif one in ledger.meters or one in ledger.fuses:
                self._stale_timed[one] = None

    def _set(self, key: str, label: str, permits: int, *, reserve: int = 0, scope: str = "process") -> None:
        """A pool of that key has this limit: it is made, or its change is noted."""
        enforced = self._core.policy.mode == "enforce"
        ledger = self._core.gate.ledger
        pool = ledger.pools.get(key)
        known = ledger.bring_back(key) if pool is None else None
        if known is not None:
            ledger.set_limit(known, permits, reserve, enforced=enforced)
        elif pool is None:
            ledger.add_pool(Pool(key, label, permits, reserve=reserve, scope=scope, enforced=enforced))
        elif (pool.declared, pool.reserve) != (permits, reserve) or key in self._retired:
            self._changes.append((pool, permits, reserve, enforced))
        self._stale.discard(key)
        self._retired.discard(key)

    def _set_named(self, scope: str, state: RunState | None) -> None:
        """The named pools of a scope: for the process, or as far as they count for a run."""
        policy = self._core.policy
        for name, pool in policy.pools.items():
            if policy.scope_of(pool) == scope:
                key = pool_key(name, scope, state) if state is not None else f"pool:{name}"
                self._set(key, f"pool {name}", pool.permits, reserve=pool.reserve, scope=scope)
                self._set_timed(key, f"pool {name}", pool.rate, pool.breaker, scope=scope)

    def add_process(self) -> None:
        """Those that count for the process."""
        self._set("process", "pool process", self._core.policy.max_concurrency)
        self._set_named("process", None)
        self._set_named("cluster", None)
        core = self._core
        core.purse.at(micros(core.now()))
        core.budgeted = core.budgeted or bool(core.policy.budgets)
        core.sparing = core.sparing or core.budgeted
        self._set_account("process", "process", core.policy.budgets.get("process"))

    def _set_account(self, key: str, scope: str, budget: Budget | None) -> tuple[Account, ...]:
        """The account of that key has this budget: it is made, changed or dropped. Returns it, if there is one."""
        book = self._core.purse
        known = book.accounts.get(key)
        if budget is None:
            book.drop(key)
            return ()
        if known is None:
            made = Account(key, scope, budget.limits, per=budget.window, partial=budget.partial)
            return (book.open(made),)
        book.change(known, budget.limits, per=budget.window, partial=budget.partial)
        return (known,)

    def _tenants(self, tenant: str | None) -> Budget | None:
        """The budget of a tenant: its own, or the one that each has."""
        budgets = self._core.policy.budgets
        return budgets.get(f"tenant:{tenant}") or budgets.get("tenant")

    def _set_accounts(self, state: RunState) -> None:
        """The accounts in which a run counts."""
        book = self._core.purse
        own = book.accounts.get(f"run:{state.number}")
        key = f"tenant:{state.tenant or ''}"
        self._idle.pop(key, None)
        tenants = self._set_account(key, "tenant", self._tenants(state.tenant))
        process = book.accounts.get("process")
        state.accounts = (*(() if own is None else (own,)), *tenants, *(() if process is None else (process,)))

    def _open_account(self, state: RunState, budget: Budget) -> None:
        """A run begins that has a budget of its own."""
        core = self._core
        core.budgeted = core.sparing = True
        lasts = budget.seconds
        self._core.purse.open(
            Account(
                f"run:{state.number}",
                "run",
                budget.limits,
                per=budget.window,
                partial=budget.partial,
                until=NEVER if lasts is None else micros(core.now() + lasts),
                lasts=micros(lasts or 0.0),
            )
        )

    def add_tool(self, tool: Tool) -> None:
        """A tool's own limit, if it has one."""
        scope = self._core.policy.usual_scope
        if tool.policy.max_concurrency is not None:
            self._set(f"tool:{tool.name}", f"limit of tool {tool.name}", tool.policy.max_concurrency, scope=scope)
        policy = tool.policy
        if policy.rate is None and tool.name in self._core.paused:  # what was asked to pause goes on pausing
            self._set_timed(f"tool:{tool.name}", f"tool {tool.name}", None, policy.breaker, scope=scope)
            self._stale_timed.pop(f"rate:tool:{tool.name}", None)
        else:
            self._set_timed(f"tool:{tool.name}", f"tool {tool.name}", policy.rate, policy.breaker, scope=scope)

    def pause(self, tool: str) -> None:
        """Whoever is behind a tool that has no rate wants it to pause: from now on it has one without a limit."""
        core = self._core
        if tool in core.paused:
            return
        core.paused.add(tool)
        enforced = core.policy.mode == "enforce"
        core.gate.ledger.add_meter(
            Meter(
                f"rate:tool:{tool}",
                f"pause of tool {tool}",
                make(None),
                scope=core.policy.usual_scope,
                enforced=enforced,
            )
        )
        core.generation += 1
        runs = list(core.runs.values())
        for state in runs:
            state.bases.clear()
        self._count_in({tool}, runs)

    def add_run(self, state: RunState) -> None:
        """Those that count for a run, or for its tenant."""
        self._set(f"run:{state.number}", "pool run", state.flow.window, scope="run")
        self._set_named("run", state)
        self._set_named("tenant", state)
        core = self._core
        budget = state.budget or core.policy.budgets.get("run")
        if core.budgeted or budget is not None:
            core.purse.at(micros(core.now()))
            if budget is not None:
                self._open_account(state, budget)
            self._set_accounts(state)

    def drop_run(self, state: RunState, left: Iterable[RunState]) -> None:
        """A run was closed: its pools go once nobody holds or wants them, those of its tenant with its last run."""
        self._stale.add(f"run:{state.number}")
        self._core.purse.drop(f"run:{state.number}")
        key = f"tenant:{state.tenant or ''}"
        last = False  # of its tenant; looked up where that matters, since runs may be thousands
        if key in self._core.purse.accounts or any(pool.scope == "tenant" for pool in self._core.policy.pools.values()):
            last = all(other.tenant != state.tenant for other in left)
        if last and key in self._core.purse.accounts:
            self._idle[key] = None
        for name, pool in self._core.policy.pools.items():
            if pool.scope == "run" or (pool.scope == "tenant" and last):
                key = pool_key(name, pool.scope, state)
                self._stale.add(key)
                if pool.rate is not None:
                    self._stale_timed[f"rate:{key}"] = None
                if pool.breaker is not None:
                    self._stale_timed[f"breaker:{key}"] = None
        self.sweep()

    def sweep(self) -> None:
        """Forget pools that nobody can use any more, once their last orphan has ended."""
        self._stale = {key for key in self._stale if not self._core.gate.ledger.drop_pool(key)}
        self._retired &= self._stale
        ledger = self._core.gate.ledger
        for _ in range(min(SWEPT, len(self._stale_timed))):  # some at a time: those of tenants may remember for a day
            key = next(iter(self._stale_timed))
            del self._stale_timed[key]
            for_good = "@run:" in key  # that run is over
            drop = ledger.drop_meter if key.startswith("rate:") else ledger.drop_fuse
            gone = drop(key, for_good=for_good)
            if not gone:
                self._stale_timed[key] = None
        book = self._core.purse
        if self._idle:
            book.at(micros(self._core.now()))
        for _ in range(min(SWEPT, len(self._idle))):
            key = next(iter(self._idle))
            del self._idle[key]
            if not book.drop(key, unused=True):
                self._idle[key] = None

    def forget(self) -> None:
        """In another process: nothing of it is here."""
        self._stale.clear()
        self._stale_timed.clear()
        self._retired.clear()

    # ------------------------------------------------------------------ changes

    def change(self, policy: TowerPolicy, tools: Sequence[Tool], runs: Sequence[RunState]) -> list[Slot]:
        """Other options come into force.

        Args:
            policy: the tower's options from now on.
            tools: those that are declared otherwise now.
            runs: the runs that are open.

        Returns:
            Whoever is granted or rejected because of it.
        """
        core = self._core
        before, core.policy = core.policy, policy
        ledger = core.gate.ledger
        self.add_process()
        gone = {f"pool:{name}" for name in before.pools if name not in policy.pools}
        self._retire(key for key in list(ledger.pools) if key.partition("@")[0] in gone)
        for key in [*ledger.meters, *ledger.fuses]:
            if key.partition("@")[0].partition(":")[2] in gone:
                self._stale_timed[key] = None
                if key in ledger.meters:
                    self._paces.append((ledger.meters[key], None, False))
        timed = {
            name
            for name, pool in policy.pools.items()
            if name in before.pools and _timed(pool) != _timed(before.pools[name])
        }
        names = {tool.name for tool in tools}
        names.update(name for name, tool in core.tools.items() if timed.intersection(dict(tool.policy.pools)))
        windows: list[tuple[Flow[Owner], int]] = []
        for state in runs:
            if not state.own_window and state.flow.window != policy.run_concurrency:
                windows.append((state.flow, policy.run_concurrency))
                self._set(f"run:{state.number}", "pool run", policy.run_concurrency, scope="run")
            self._set_named("run", state)
            self._set_named("tenant", state)
        for key, account in list(core.purse.accounts.items()):
            if account.scope == "tenant":
                self._set_account(key, "tenant", self._tenants(key.partition(":")[2] or None))
        for state in runs if core.budgeted else ():
            self._set_accounts(state)
        for tool in tools:
            self.add_tool(tool)
            if tool.policy.max_concurrency is None:
                self._retire(key for key in [f"tool:{tool.name}"] if key in ledger.pools)
            core.put_tool(tool)
        core.generation += 1
        for state in runs:
            state.bases.clear()
        if names:
            self._count_in(names, runs)
        changes, self._changes = self._changes, []
        paces, self._paces = self._paces, []
        fuses, self._fuses = self._fuses, []
        decided = core.gate.reconfigure(changes, windows, core.now(), paces, fuses)
        self.sweep()
        return decided

    def _retire(self, keys: Iterable[str]) -> None:
        """These limits are gone: they hold nobody back, and go with the last who has some of them."""
        for key in keys:
            pool = self._core.gate.ledger.pools[key]
            self._changes.append((pool, pool.declared, 0, False))
            self._stale.add(key)
            self._retired.add(key)

    def _count_in(self, names: set[str], runs: Sequence[RunState]) -> None:
        """Calls in flight of these tools count in limits that they did not have when they came."""
        core, by_number = self._core, {state.number: state for state in runs}
        made: Made = {}

        def more(wants: Wants[Lot[Owner]]) -> Want:
            assert isinstance(wants, Want)
            state = by_number.get(wants.run)
            if wants.tool not in names or state is None:
                return wants
            return core.counted_in(wants, state, made)

        core.gate.expand(more)
