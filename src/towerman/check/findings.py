"""What is wrong, or odd, with the declarations of a tower: one function for each thing to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from towerman.check.parts import SEVERITIES, Finding, listed
from towerman.policy import MIN_RESULT_BYTES, UNITS, Pool, TowerPolicy, shown
from towerman.tools import Tool

_SIMILAR: Final = 0.85
"""How near two schemes are that may be one, misspelled."""


@dataclass(frozen=True, slots=True)
class Declared:
    """All that a tower declares.

    Args:
        tower: its own options.
        tools: its tools, in the order of declaration.
        deadline: seconds that a run may last, where the operator has said so.
    """

    tower: TowerPolicy
    tools: Sequence[Tool]
    deadline: float | None = None

    def users(self, pool: str) -> list[Tool]:
        """The tools that take permits of a named pool."""
        return [tool for tool in self.tools if any(name == pool for name, _ in tool.policy.pools)]


def findings(declared: Declared) -> list[Finding]:
    """Everything that an operator should know, the gravest first, then in the order of declaration."""
    found = [finding for look in _LOOKS for finding in look(declared)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _tower(declared: Declared) -> Iterator[Finding]:
    tower = declared.tower
    if not declared.tools:
        yield Finding(
            "error",
            "no_tools",
            "tower",
            "It has no tools, so nothing could be checked.",
            "name the tower that your tools are declared on, and import the modules that declare them",
        )
    if tower.mode == "observe":
        yield Finding(
            "warning",
            "limits_not_enforced",
            "tower",
            "mode='observe': no pool, no concurrency limit and no budget holds anybody back.",
            "read tower.report(), then take mode='enforce'",
        )
    if tower.placeholder_guard != "refuse":
        what = "off" if tower.placeholder_guard == "off" else "warn"
        effect = "goes to its handler" if what == "off" else "goes to its handler, and is told afterwards"
        yield Finding(
            "warning",
            "placeholders_run",
            "tower",
            f"placeholder_guard={what!r}: a call in which '<from previous call>' stands in place of a value {effect}.",
            "placeholder_guard='refuse', with free_text= at tools whose arguments hold such texts by right",
        )
    if tower.debug:
        yield Finding(
            "warning",
            "debug_tracebacks",
            "tower",
            "debug=True prints tracebacks of handlers to stderr; an exception's text may hold argument values.",
            "debug=False outside your own machine",
        )
    if tower.on_orphan == "release" and any(tool.in_thread for tool in declared.tools):
        yield Finding(
            "error",
            "orphans_give_places_away",
            "tower",
            "on_orphan='release' gives the place of a timed-out thread to the next call while its work goes on, so "
            "that more are inside than the limit says.",
            "on_orphan='hold', with a timeout inside the handlers themselves",
        )
    elif tower.on_orphan == "release":
        yield Finding(
            "warning",
            "orphans_give_places_away",
            "tower",
            "on_orphan='release': a handler that ignores its cancel goes on without its place, beside the next call.",
            "on_orphan='hold'",
        )
    if tower.on_excess == "queue":
        yield Finding(
            "warning",
            "no_call_cap",
            "tower",
            "on_excess='queue': all calls of a response are run, however many the model writes.",
            "on_excess='tell', which runs max_calls_per_batch of them and tells the model",
        )
    if tower.run_concurrency > tower.max_concurrency:
        yield Finding(
            "note",
            "limit_without_effect",
            "tower",
            f"run_concurrency={tower.run_concurrency} is above max_concurrency={tower.max_concurrency} and never met.",
            f"run_concurrency={tower.max_concurrency} or less, so that one run cannot take every place",
        )
    if tower.max_result_bytes > tower.max_batch_bytes:
        yield Finding(
            "note",
            "limit_without_effect",
            "tower",
            f"max_result_bytes={tower.max_result_bytes} is above max_batch_bytes={tower.max_batch_bytes}, which cuts "
            "first.",
            "max_result_bytes below max_batch_bytes",
        )
    calls = max(1, tower.max_batch_bytes // MIN_RESULT_BYTES)
    told = tower.max_calls_per_batch * MIN_RESULT_BYTES
    if told > tower.max_batch_bytes:
        yield Finding(
            "note",
            "batch_bound_exceeded",
            "tower",
            f"Each result keeps {MIN_RESULT_BYTES} bytes at least, so a batch of {tower.max_calls_per_batch} calls may "
            f"take {told:,}, which is more than max_batch_bytes={tower.max_batch_bytes:,}.",
            f"max_batch_bytes={told} or more, or max_calls_per_batch={calls} or less",
        )


def _access(declared: Declared) -> Iterator[Finding]:
    undeclared = declared.tower.undeclared
    effect = {
        "ordered": "its calls run alone and in order within their run, and beside those of other runs",
        "exclusive": "its calls run alone in the whole process",
        "independent": "undeclared='independent' lets its calls run beside everything, unseen",
    }[undeclared]
    for tool in declared.tools:
        if not tool.policy.declares_access:
            yield Finding(
                "error" if undeclared == "independent" else "warning",
                "undeclared_access",
                f"tool {tool.name}",
                f"It does not say what it touches: {effect}.",
                "reads= and writes= with the resources, or sequential=True, or independent=True if it shares nothing",
            )


def _identity(declared: Declared) -> Iterator[Finding]:
    for tool in declared.tools:
        if not tool.effect_free and tool.policy.idempotent is None:
            yield Finding(
                "warning",
                "write_without_identity",
                f"tool {tool.name}",
                "It may have an effect and does not say whether a repeat does harm; after a timeout nobody can tell "
                "whether to call it again.",
                "idempotent=True or idempotent=False, or read_only=True if it has no effect; pass idempotency_key on "
                "where the service takes one",
            )


def _approvals(declared: Declared) -> Iterator[Finding]:
    asking = [tool for tool in declared.tools if tool.requires_approval is not False]
    if asking:
        some = [f"{tool.name}{'' if tool.requires_approval is True else ' (some calls)'}" for tool in asking]
        yield Finding(
            "note",
            "needs_approval",
            f"tool {asking[0].name}" if len(asking) == 1 else f"tools {listed([tool.name for tool in asking])}",
            f"Calls of {listed(some)} wait for a person: without an approver they come back pending, and so do those "
            "that are ordered after them.",
            "tower.run(approver=...), or state() and resume() in the host",
        )
        if declared.tower.secret is None:
            yield Finding(
                "note",
                "approval_without_secret",
                "tower",
                "It has no secret, so a batch that waits for approval is written down unsigned: whoever can change the "
                "text can approve.",
                "secret='${TOWERMAN_SECRET}' or the like, where states leave the process",
            )
    for tool in declared.tools:
        where = f"tool {tool.name}"
        if tool.still_valid is not None and tool.requires_approval is False:
            yield Finding(
                "note",
                "still_valid_without_effect",
                where,
                "still_valid is asked of approved calls only, and its calls need no approval.",
                "requires_approval=True, or leave still_valid out",
            )
        if tool.requires_approval is not False and tool.policy.merge is not None:
            yield Finding(
                "note",
                "merging_without_effect",
                where,
                "A call that needs approval is never merged: what is approved are its own arguments.",
                "leave merge out, or requires_approval= a function that lets most calls through",
            )


def _journal(declared: Declared) -> Iterator[Finding]:
    risky = [tool.name for tool in declared.tools if not tool.policy.repeatable]
    journal = declared.tower.journal
    if journal is None and risky:
        yield Finding(
            "note",
            "no_journal",
            "tower",
            f"Nothing is written down of calls that change something ({listed(risky)}): after a crash nobody knows "
            "which of them took effect, and a batch that is handed in again runs again.",
            'journal="towerman.db", and a run_id for each run',
        )
    if _in_memory(journal):
        yield Finding(
            "warning",
            "journal_in_memory",
            "tower",
            "journal=':memory:' forgets everything when the process ends.",
            'journal="towerman.db"',
        )


def _engine(declared: Declared) -> Iterator[Finding]:
    tower = declared.tower
    engine = tower.engine
    if engine is None:
        return
    if tower.secret is None:
        yield Finding(
            "note",
            "engine_without_secret",
            "tower",
            "What calls touch is known to the engine by digests; without a secret, whoever can read there can find out "
            "which resources they stand for by trying.",
            'secret="${TOWERMAN_SECRET}", the same for all processes that share the engine',
        )
    if engine.on_unavailable == "open":
        yield Finding(
            "warning",
            "open_without_engine",
            "tower",
            "on_unavailable='open': while the engine is not reached each process goes by its limits alone, so what is "
            "behind them may see as many times the limit as there are processes, and writes are not exclusive.",
            "on_unavailable='closed', or 'local' with replicas",
        )
    if engine.on_unavailable == "local":
        short = [name for name, pool in tower.pools.items() if pool.permits < (engine.replicas or 1)]
        if short:
            yield Finding(
                "note",
                "no_share_of_a_pool",
                "tower",
                f"on_unavailable='local': a process's share of {listed(short)} is none ({engine.replicas} processes), "
                "so their calls wait while the engine is not reached.",
                f"at least {engine.replicas} permits, if they are to go on",
            )


def _in_memory(journal: object) -> bool:
    """Does a journal forget everything when the process ends? It is the tower's own word, or a Journal."""
    return getattr(journal, "path", journal) == ":memory:"


def _sharing(declared: Declared) -> Iterator[Finding]:
    alone = declared.tower.max_calls_per_batch == 1 and declared.tower.on_excess == "tell"
    for tool in declared.tools:
        policy, where = tool.policy, f"tool {tool.name}"
        option = "share_identical=True" if policy.share_identical else "merge"
        if tool.joins and (policy.only_call or alone):
            why = "only_call=True" if policy.only_call else "max_calls_per_batch=1"
            yield Finding(
                "note",
                "sharing_without_effect",
                where,
                f"{option} has nothing to do: with {why} no two of its calls run in one batch.",
                f"leave {option} out, or {why}",
            )
        elif policy.share_identical and not policy.repeatable:
            yield Finding(
                "note",
                "sharing_an_effect",
                where,
                "share_identical=True, and it may have an effect that repeating adds to: where the model means to do "
                "the same thing several times, such as two equal orders, it is done once.",
                "leave share_identical out if such repeats are meant; idempotent=True if a repeat changes nothing",
            )
        elif policy.merge is not None and policy.writes is None:
            yield Finding(
                "note",
                "merging_reads",
                where,
                "merge joins calls that read only: they are put in a row for it, while they could overlap.",
                "leave merge out, unless one large read is quicker than several at the same time",
            )


def _queues(declared: Declared) -> Iterator[Finding]:
    most = declared.tower.max_queued
    bound = f"only the tower's own bound of {most} counts, which all tools share"
    for name, pool in declared.tower.pools.items():
        waiting = [tool.name for tool in declared.users(name) if tool.wait and tool.policy.max_queued is None]
        if pool.max_queued is None and waiting:
            yield Finding(
                "note",
                "limit_without_queue_bound",
                f"pool {name}",
                f"Calls of {listed(waiting)} may queue for it without a bound of its own: {bound}.",
                f"Pool({pool.permits}, max_queued=...), or max_queued= on the tools",
            )
    for tool in declared.tools:
        if tool.policy.max_concurrency is not None and tool.policy.max_queued is None and tool.wait:
            yield Finding(
                "note",
                "limit_without_queue_bound",
                f"tool {tool.name}",
                f"Calls may queue for its own limit without a bound: {bound}.",
                "max_queued=... on the tool, or when_busy='reject'",
            )


def _deferring(declared: Declared) -> Iterator[Finding]:
    most = declared.tower.max_queued
    for tool in declared.tools:
        policy, where = tool.policy, f"tool {tool.name}"
        if not tool.defer:
            continue
        if _in_memory(declared.tower.journal):
            yield Finding(
                "warning",
                "deferred_in_memory",
                where,
                "when_busy='defer', and the journal is in memory: its deferred calls are lost when the process ends, "
                "and no worker of another process can run them.",
                'journal="towerman.db"',
            )
        if policy.max_queued is None:
            yield Finding(
                "note",
                "deferred_without_queue_bound",
                where,
                f"Its deferred calls fill the durable queue without a bound of their own: only the tower's of {most} "
                "counts, which all tools share.",
                "max_queued=... on the tool",
            )
        if not policy.pools and policy.max_concurrency is None and policy.rate is None:
            yield Finding(
                "note",
                "deferring_without_limit",
                where,
                "when_busy='defer', and it has no limit of its own: it is busy only when what it touches is in use, or "
                f"when the whole process runs {declared.tower.max_concurrency} calls.",
                "pools=, max_concurrency= or rate= for what is behind it, or when_busy='wait'",
            )
        if not tool.effect_free and policy.idempotent is not True:
            yield Finding(
                "note",
                "deferred_write_may_need_a_person",
                where,
                "A worker that dies while it runs leaves it unknown: it is not run again, and what comes behind it "
                "waits, until somebody says what came of it.",
                "idempotent=True if a repeat does no harm (pass Context.idempotency_key on); else look at towerman "
                "journal unknown",
            )


def _pools(declared: Declared) -> Iterator[Finding]:
    tower = declared.tower
    for name, pool in tower.pools.items():
        where = f"pool {name}"
        if not declared.users(name):
            yield Finding(
                "warning", "unused_pool", where, "No tool takes permits of it.", f"pools=[{name!r}] on the tools"
            )
        if pool.scope == "run":
            yield Finding(
                "warning",
                "run_scope_protects_nothing",
                where,
                f"scope='run': each run has {pool.permits} of its own, so ten runs bring {10 * pool.permits} calls to "
                "whatever is behind it. It keeps a run modest and protects nothing that runs share.",
                "scope='process', and run_concurrency or a run's max_concurrency for the rest",
            )
        elif pool.scope == "tenant":
            yield Finding(
                "note",
                "tenant_scope",
                where,
                f"scope='tenant': each tenant has {pool.permits} of its own; runs without a tenant share one set.",
                "a further pool of scope 'process' where tenants share a service",
            )
        yield from _pool_of_no_effect(pool, where, tower)
    for tool in declared.tools:
        limit = tool.policy.max_concurrency
        if limit is not None and limit >= tower.max_concurrency and tower.engine is None:
            yield Finding(
                "note",
                "limit_without_effect",
                f"tool {tool.name}",
                f"Its max_concurrency={limit} is never met: the whole process runs {tower.max_concurrency}.",
                f"a limit below {tower.max_concurrency}, or none",
            )
    if tower.pools or any(tool.policy.max_concurrency is not None for tool in declared.tools):
        return
    if declared.tools:
        yield Finding(
            "note",
            "no_small_pools",
            "tower",
            f"The only limits are those of the process ({tower.max_concurrency}) and of a run "
            f"({tower.run_concurrency}): one slow service can take every place.",
            "a pool for each service that takes few requests at a time",
        )


def _pool_of_no_effect(pool: Pool, where: str, tower: TowerPolicy) -> Iterator[Finding]:
    if tower.scope_of(pool) == "process" and pool.permits >= tower.max_concurrency:
        yield Finding(
            "note",
            "limit_without_effect",
            where,
            f"{pool.permits} permits are never met: the whole process runs {tower.max_concurrency} calls.",
            f"fewer than {tower.max_concurrency} permits",
        )
    if pool.scope == "run" and pool.permits >= tower.run_concurrency:
        yield Finding(
            "note",
            "limit_without_effect",
            where,
            f"{pool.permits} permits are never met: a run has {tower.run_concurrency} places.",
            f"fewer than {tower.run_concurrency} permits",
        )


def _threads(declared: Declared) -> Iterator[Finding]:
    for tool in declared.tools:
        if not tool.is_async and tool.policy.run_in == "loop":
            yield Finding(
                "warning",
                "blocks_the_loop",
                f"tool {tool.name}",
                "It is a plain function with run_in='loop': while it works, no other call of that loop goes on, and "
                "nothing is timed out or cancelled.",
                "leave run_in= out, so that it runs on a thread, or make it async",
            )


def _retries(declared: Declared) -> Iterator[Finding]:
    for tool in declared.tools:
        retry = tool.retry
        if retry is None:
            continue
        if tool.in_thread and tool.address is None and issubclass(TimeoutError, retry.retry_on):
            yield Finding(
                "note",
                "timeout_not_retried",
                f"tool {tool.name}",
                "It runs on a thread, which cannot be stopped: a call of it that runs out of time goes on after its "
                "result, so it is not tried again. What it raises itself is.",
                "a timeout inside the handler, or run_in='process' where it computes",
            )
        most = declared.deadline
        if most is not None and tool.timeout <= most < tool.timeout * retry.max_attempts:
            yield Finding(
                "note",
                "attempts_above_deadline",
                f"tool {tool.name}",
                f"It may be tried {shown(retry.max_attempts)} times for {tool.timeout:g} s each, and a run lasts "
                f"{most:g} s: there may be no time for the last attempts.",
                "a shorter timeout=, or fewer attempts",
            )


def _times(declared: Declared) -> Iterator[Finding]:
    deadline = declared.deadline
    if deadline is None:
        return
    for tool in declared.tools:
        if tool.timeout > deadline:
            yield Finding(
                "warning",
                "timeout_above_deadline",
                f"tool {tool.name}",
                f"It may run {tool.timeout:g} s, and a run lasts {deadline:g} s: the deadline stops it, and with it "
                "the whole run.",
                f"timeout= well below {deadline:g}",
            )
        if tool.wait and tool.max_wait > deadline:
            yield Finding(
                "warning",
                "wait_above_deadline",
                f"tool {tool.name}",
                f"It may wait {tool.max_wait:g} s, and a run lasts {deadline:g} s.",
                f"max_wait= well below {deadline:g}",
            )


def _families(declared: Declared) -> Iterator[Finding]:
    """Tools that touch resources of one kind and share no pool; kinds that may be one, misspelled."""
    families: dict[str, list[Tool]] = {}
    for tool in declared.tools:
        for family in dict.fromkeys(map(family_of, templates(tool))):
            if family:
                families.setdefault(family, []).append(tool)
    for family, tools in families.items():
        pools = [{name for name, _ in tool.policy.pools} for tool in tools]
        apart = [
            tool.name
            for number, tool in enumerate(tools)
            if not any(pools[number] & others for place, others in enumerate(pools) if place != number)
        ]
        if len(tools) > 1 and apart and any(pools):
            taken = listed([f"{tool.name} ({_pools_of(tool)})" for tool in tools])
            yield Finding(
                "warning",
                "family_without_common_pool",
                f"tool {apart[0]}" if len(apart) == 1 else f"tools {listed(apart)}",
                f"These tools touch resources {family}:... and do not all share a pool: {taken}. A pool that stands "
                "for what is behind them does not count all of their calls.",
                "the same pool on each of them",
            )
    names = sorted(families)
    for number, family in enumerate(names):
        for other in get_close_matches(family, names[number + 1 :], 1, _SIMILAR):
            yield Finding(
                "warning",
                "similar_resources",
                f"tools {listed([tool.name for tool in (families[family][0], families[other][0])])}",
                f"Resources {family}:... and {other}:... have nothing to do with each other: calls on one do not wait "
                "for calls on the other.",
                "one spelling, if they are the same thing",
            )


def _pools_of(tool: Tool) -> str:
    return ", ".join(name for name, _ in tool.policy.pools) or "no pool"


def _broad(declared: Declared) -> Iterator[Finding]:
    for tool in declared.tools:
        for template in tool.rule.writes if tool.rule is not None else ():
            if template.endswith("/**") and "{" not in template:
                yield Finding(
                    "note",
                    "broad_write",
                    f"tool {tool.name}",
                    f"It writes {template}: every call of it waits for all others below, and they for it.",
                    "a template with arguments, where it writes only a part",
                )


def templates(tool: Tool) -> list[str]:
    """What a tool declares to touch, as people are shown it."""
    return [*tool.rule.reads, *tool.rule.writes] if tool.rule is not None else []


def family_of(template: str) -> str:
    """The scheme of a template; empty where there is none, or where a callable says what is touched."""
    head, colon, _ = template.partition(":")
    if not colon or "/" in head or head.startswith("callable "):
        return ""
    return head.casefold()


def _budgets(declared: Declared) -> Iterator[Finding]:
    """Units of one's own that nobody is declared to spend, or that no budget of the tower limits."""
    tower = declared.tower
    asked: dict[str, str] = {}
    for tool in declared.tools:
        for unit in tool.asks.amounts if tool.asks is not None else ():
            asked.setdefault(unit, tool.name)
    told = any(tool.price is not None or tool.context_parameter is not None for tool in declared.tools)
    for name, budget in tower.budgets.items():
        idle = [unit for unit in budget.limits if unit not in (*UNITS, *asked)]
        if idle and not told:
            yield Finding(
                "warning",
                "unit_that_nobody_spends",
                f"budget {name}",
                f"No tool says that it spends {listed(idle)}, and no handler takes a Context to charge it with.",
                f"spends={{{idle[0]!r}: 1}} on the tools, or the name that they have for it",
            )
    limited = {unit for budget in tower.budgets.values() for unit in budget.limits}
    free = [unit for unit in asked if unit not in (*UNITS, *limited)]
    if free and tower.budgets:
        yield Finding(
            "note",
            "unit_without_budget",
            f"tool {asked[free[0]]}",
            f"No budget of the tower limits {listed(free)}: it is counted and holds nobody back, unless a run brings a "
            "budget of it.",
            f"budgets={{'run': Budget({free[0]}=...)}}, or leave it out of spends",
        )


_LOOKS: Final = (
    _tower,
    _access,
    _identity,
    _approvals,
    _journal,
    _engine,
    _sharing,
    _threads,
    _pools,
    _queues,
    _deferring,
    _times,
    _retries,
    _families,
    _broad,
    _budgets,
)
