"""The limits of a simulation: the workload's own, those of a policy, and what somebody wants to try instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, cast

from towerman.config import Config, laid_out, load, settled
from towerman.errors import InputError, PolicyError
from towerman.estimates import Means
from towerman.ledger import UNLIMITED
from towerman.policy import TOWER, Pool, Rate, TowerPolicy, nearest, rate_of, shown
from towerman.simulate.workload import Workload, told
from towerman.tools import Tool, compile_tool
from towerman.tower import Tower
from towerman.work import Context

ALWAYS: Final = 1e14
"""Seconds that stand for no limit of time."""

_LIMITING: Final = frozenset(
    {"preset", "pools", "weight", "max_concurrency", "rate", "timeout", "max_wait", "max_queued", "when_busy"}
)
"""The options of a tool that say when its calls may start, and for how long they may run."""

SETTABLE: Final = (
    "max_concurrency",
    "run_concurrency",
    "max_wait",
    "max_queued",
    "timeout",
    "max_calls_per_batch",
    "on_excess",
    "when_busy",
)
"""The options of a tower that may be tried, besides `pools.NAME` and `rates.NAME`."""


def _nobody() -> None:
    """Stands for the handlers of a simulation: they are never called."""


def _options(**others: object) -> TowerPolicy:
    return TowerPolicy(**{"pools": {}, **others})  # type: ignore[arg-type]  # checked there


_OPEN: Final = _options(
    max_concurrency=UNLIMITED,
    run_concurrency=UNLIMITED,
    max_calls_per_batch=UNLIMITED,
    max_queued=UNLIMITED,
    max_wait=ALWAYS,
    timeout=ALWAYS,
    undeclared="independent",
)
"""No limit at all."""

_TEMPLATE: Final = compile_tool("nobody", _nobody, {"independent": True, "run_in": "loop"}, _OPEN, Context, {})


@dataclass(frozen=True, slots=True)
class InForce:
    """What holds in a simulation.

    Args:
        options: the tower's, with all pools.
        rates: those of the workload, by tool or pool.
        tool: gives a tool by its name.
        means: what is known of how long tools take.
    """

    options: TowerPolicy
    rates: Mapping[str, Rate]
    tool: Callable[[str], Tool]
    means: Means = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trial:
    """What somebody wants to try: values in place of others, by key.

    Args:
        options: of the tower.
        pools: permits by name.
        rates: by tool or pool.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    pools: Mapping[str, int | None] = field(default_factory=dict)
    rates: Mapping[str, Rate] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, object], workload: Workload, policy: object = None) -> Trial:
        """Read what is to be tried.

        Args:
            values: by key: `max_concurrency`, `pools.NAME`, `rates.NAME`, or another one of `SETTABLE`.
            workload: whose pools and tools the names are.
            policy: may have pools more.

        Raises:
            InputError: there is nothing of that name, or no such value for it.
        """
        options: dict[str, object] = {}
        pools: dict[str, int | None] = {}
        rates: dict[str, Rate] = {}
        known = {**dict.fromkeys(_pools_of(policy)), **workload.pools}
        tools = {call.tool for call in workload.calls}
        for key, value in values.items():
            table, dot, name = key.partition(".")
            if table == "pools" and dot:
                if name not in known:
                    raise InputError(f"{key}: there is no pool {shown(name)}{nearest(name, list(known))}")
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                    raise InputError(f"{key}: a whole number from 1 on; got {shown(value)}")
                pools[name] = value
            elif table == "rates" and dot:
                if name not in known and name not in tools:
                    hint = nearest(name, [*known, *tools])
                    raise InputError(f"{key}: there is no tool and no pool {shown(name)}{hint}")
                rates[name] = told(lambda key=key, value=value: rate_of(key, value))  # type: ignore[misc]
            elif key in SETTABLE:
                checked = value
                if value is not None or key != "max_concurrency":
                    checked = told(lambda key=key, value=value: TOWER[key].kind.check(key, value))  # type: ignore[misc]
                options[key] = UNLIMITED if checked is None else checked
            else:
                keys = [*SETTABLE, *(f"pools.{one}" for one in known), *(f"rates.{one}" for one in sorted(tools))]
                raise InputError(f"{shown(key)}: nothing of that name can be tried{nearest(key, keys)}")
        return cls(options, pools, rates)


def _pools_of(policy: object) -> Mapping[str, Pool]:
    if policy is None:
        return {}
    if isinstance(policy, Tower):
        return policy.options.pools
    return _read(policy).pools


def _read(policy: object) -> Config:
    if isinstance(policy, Config):
        return policy
    if isinstance(policy, Mapping | str | os.PathLike):
        return load(policy)
    raise PolicyError(
        f"policy: a Tower, the path of a towerman.toml, a mapping of its keys, or None; got {shown(policy)}"
    )


def in_force(workload: Workload, policy: object = None, trial: Trial | None = None) -> InForce:
    """All limits together. Those of the workload and of the policy both hold: of one pool, the lower number. What is
    tried stands in the place of both.

    Args:
        workload: with limits of its own.
        policy: a Tower, the path of a `towerman.toml`, a mapping of its keys, or None for no further limit.
        trial: what is tried.

    Raises:
        PolicyError: the policy is none, or has a mistake.
    """
    config = Config()
    tower: Tower | None = None
    if policy is None:
        options = _OPEN
    elif isinstance(policy, Tower):
        tower, options = policy, policy.options
    else:
        config = _read(policy)
        _, given = settled(config, {})
        options = _options(**given)
    trial = trial or Trial()
    pools = dict(options.pools)
    for name, permits in workload.pools.items():
        most = UNLIMITED if permits is None else permits
        pools[name] = _lowered(pools[name], most) if name in pools else Pool(most)
    for name, permits in trial.pools.items():
        most = UNLIMITED if permits is None else permits
        known = pools.get(name, Pool(most))
        pools[name] = replace(known, permits=most, reserve=min(known.reserve, most - 1))
    for name in trial.rates.keys() & pools.keys():
        pools[name] = replace(pools[name], rate=None)
    most = min(options.max_concurrency, workload.max_concurrency or UNLIMITED)
    changed: dict[str, object] = {"max_concurrency": most, **trial.options, "pools": pools, "strict": False}
    options = replace(options, **changed)  # type: ignore[arg-type]  # checked there

    def tool(name: str) -> Tool:
        known = tower._core.tools.get(name) if tower is not None else None
        if known is not None:
            return known
        rules = (config.tools,) if tower is None else (tower._layers.config.tools, tower._layers.rules)
        said, _ = laid_out(name, {}, *rules)
        kept = {key: value for key, value in said.items() if key in _LIMITING}
        if kept.get("when_busy") == "defer" or options.when_busy == "defer":
            kept["when_busy"] = "reject"  # what is not let in at once goes away from here
        given = {**kept, "independent": True, "run_in": "loop"}
        return compile_tool("nobody", _nobody, given, options, Context, pools, _TEMPLATE)

    def named(name: str) -> Tool:
        found = tool(name)
        if name in trial.rates or found.name != name:
            rate = None if name in trial.rates else found.policy.rate
            found = replace(found, policy=replace(found.policy, name=name, rate=rate))
        return found

    means = dict(tower._core.means) if tower is not None else {}
    return InForce(options, {**workload.rates, **trial.rates}, named, means)


def _lowered(pool: Pool, permits: int) -> Pool:
    least = min(pool.permits, permits)
    return replace(pool, permits=least, reserve=min(pool.reserve, least - 1))


def tries(text: str) -> tuple[str, object]:
    """`pools.crm=4` as a key and its value.

    Raises:
        InputError: it is written otherwise.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise InputError(f"{shown(text)}: write it as KEY=VALUE, for example pools.crm=4")
    return key.strip(), value_of(value.strip())


def value_of(text: str) -> object:
    """A number where it is one, None for `none`, else the text."""
    if text.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return cast("object", kind(text))
        except ValueError:
            continue
    return text
