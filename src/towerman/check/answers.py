"""The nine questions, answered."""

from __future__ import annotations

from towerman.check.findings import Declared
from towerman.check.parts import Answer, BudgetInForce, LimitInForce, Verdict, counted, listed
from towerman.policy import shown

_COUNTS = {
    "process": "all runs of this process together; another process counts for itself",
    "run": "each run alone",
    "tenant": "the runs of one tenant together, in this process",
    "cluster": "all processes that share the engine",
}


def limits(declared: Declared) -> list[LimitInForce]:
    """Every limit with the scope that is in force."""
    tower = declared.tower
    found = [
        LimitInForce("process", tower.max_concurrency, "process", _COUNTS["process"], tower.max_queued, ()),
        LimitInForce("run", tower.run_concurrency, "run", _COUNTS["run"], None, ()),
    ]
    for name, pool in tower.pools.items():
        users = tuple(tool.name for tool in declared.users(name))
        scope = tower.scope_of(pool)
        if scope == "tenant" and tower.engine is not None:
            counts = "the runs of one tenant together, in all processes that share the engine"
        else:
            counts = _COUNTS[scope]
        found.append(LimitInForce(name, pool.permits, scope, counts, pool.max_queued, users))
    for tool in declared.tools:
        policy = tool.policy
        if policy.max_concurrency is not None:
            most = policy.max_queued
            name = f"tool:{tool.name}"
            scope = tower.usual_scope
            found.append(LimitInForce(name, policy.max_concurrency, scope, _COUNTS[scope], most, (tool.name,)))
    return found


_SPENT_BY = {
    "batch": "the calls of one response, with those that their handlers make",
    "run": "each run that brings no budget of its own",
    "tenant": "the runs of one tenant together, in this process",
    "process": "all runs of this process together; another process counts for itself",
}


def budgets(declared: Declared) -> list[BudgetInForce]:
    """Every budget that the tower declares; a run may bring its own."""
    found = []
    for name, budget in declared.tower.budgets.items():
        scope, _, tenant = name.partition(":")
        counts = f"the runs of {tenant}, in this process" if tenant else _SPENT_BY[scope]
        if scope == "tenant" and declared.tower.engine is not None:
            counts = counts.replace("in this process", "in all processes that share the engine")
        found.append(BudgetInForce(name, str(budget), counts))
    return found


def answers(declared: Declared) -> list[Answer]:
    """The nine questions in their order."""
    looked = (_classified, _global, _pools, _reserved, _removed, _waits, _apart, _tested, _traced)
    return [Answer(number, *answer(declared)) for number, answer in enumerate(looked, 1)]


_Said = tuple[str, Verdict, str]


def _classified(declared: Declared) -> _Said:
    question = "Does every tool say what it touches?"
    silent = [tool.name for tool in declared.tools if not tool.policy.declares_access]
    if not declared.tools:
        return question, "no", "There are no tools."
    if not silent:
        return question, "yes", f"All {counted(len(declared.tools), 'tool')} do."
    verdict: Verdict = "no" if declared.tower.undeclared == "independent" else "partly"
    effect = {
        "ordered": "they run alone and in order within a run",
        "exclusive": "they run alone in the process",
        "independent": "they run beside everything",
    }[declared.tower.undeclared]
    return question, verdict, f"{len(silent)} of {len(declared.tools)} do not ({listed(silent)}): {effect}."


def _global(declared: Declared) -> _Said:
    tower = declared.tower
    told = f"{tower.max_concurrency} calls over all runs of this process, {tower.run_concurrency} of one run"
    if tower.mode == "observe":
        return "Is there a limit over all runs?", "no", f"mode='observe' only watches: {told}."
    others = "Each further process counts for itself."
    if tower.engine is not None:
        others = "Named pools, limits and rates of tools count over all processes that share the engine."
    return "Is there a limit over all runs?", "yes", f"{told}. {others}"


def _pools(declared: Declared) -> _Said:
    question = "Do services that take few requests have small limits of their own?"
    named = [f"{name} {pool.permits}" for name, pool in declared.tower.pools.items() if pool.scope != "run"]
    own = [tool for tool in declared.tools if tool.policy.max_concurrency is not None]
    named += [f"tool {tool.name} {tool.policy.max_concurrency}" for tool in own]
    bare = [tool.name for tool in declared.tools if not tool.policy.pools and tool.policy.max_concurrency is None]
    if not named:
        runs = " Pools of scope 'run' protect nothing that runs share." if declared.tower.pools else ""
        return question, "no", f"There is no such limit.{runs}"
    told = f"{listed(named)}."
    if bare:
        told += f" {counted(len(bare), 'tool')} with none: {listed(bare)}."
    return question, "partly" if bare else "yes", told


def _reserved(declared: Declared) -> _Said:
    question = "Is a place taken before the handler starts, and given back when its work has ended?"
    if declared.tower.on_orphan == "release":
        told = "Taken before, always. But on_orphan='release' gives it back when the result is sealed, which may be "
        return question, "partly", f"{told}before the work has ended."
    return question, "yes", "Always, all at once, also on failure, timeout and cancel."


def _removed(declared: Declared) -> _Said:
    return (
        "Does a waiter that gives up leave the queue, and never start?",
        "yes",
        "Always; a call whose wait is over, or that is cancelled, is answered and never started.",
    )


def _waits(declared: Declared) -> _Said:
    tower = declared.tower
    waits = sorted({tool.max_wait for tool in declared.tools if tool.wait} or {tower.max_wait})
    refusing = [tool.name for tool in declared.tools if not tool.wait]
    span = f"{waits[0]:g} s" if len(waits) == 1 else f"{waits[0]:g} to {waits[-1]:g} s"
    told = f"At most {span}, {tower.max_queued} calls in all queues"
    if refusing:
        told += f"; {listed(refusing)}: refused at once"
    return "Has every wait a deadline and a rule?", "yes", f"{told}."


def _apart(declared: Declared) -> _Said:
    question = "Are rate, budget and idempotency kept apart from concurrency?"
    tower = declared.tower
    writes = [tool for tool in declared.tools if not tool.effect_free]
    unsaid = [tool.name for tool in writes if tool.policy.idempotent is None]
    cap = f"{tower.max_calls_per_batch} calls of a response" if tower.on_excess == "tell" else "no cap on a response"
    rates = [f"tool {tool.name} {tool.policy.rate}" for tool in declared.tools if tool.policy.rate is not None]
    rates += [f"pool {name} {pool.rate}" for name, pool in tower.pools.items() if pool.rate is not None]
    starts = f"rates: {listed(rates)}" if rates else "no rate is declared"
    spent = [f"{name} {budget}" for name, budget in tower.budgets.items()]
    amounts = f"budgets: {'; '.join(spent)}" if spent else "no budget is declared, and a run may bring one"
    told = f"No concurrency limit here stands for a rate or a budget; {starts}; {amounts}; {cap}"
    if tower.journal is not None:
        told += "; what is begun is written down in a journal"
    again = [f"{tool.name} {shown(tool.retry.max_attempts)}" for tool in declared.tools if tool.retry is not None]
    tried = f" Attempts: {listed(again)}." if again else ""
    if unsaid:
        return question, "partly", f"{told}. Whether a repeat does harm is not said of {listed(unsaid)}.{tried}"
    if not writes:
        return question, "yes", f"{told}. No tool has an effect.{tried}"
    return question, "yes", f"{told}. Each tool with an effect says whether a repeat does harm.{tried}"


def _tested(declared: Declared) -> _Said:
    return (
        "Is it tested under load: the most at once, a cancel in the queue, two runs at a time?",
        "unknown",
        "Declarations cannot tell. Towerman's own tests hold its part; yours are to show that what is behind your "
        "tools sees no more than the limit.",
    )


def _traced(declared: Declared) -> _Said:
    question = "Are traces free of argument values?"
    if declared.tower.debug:
        return question, "partly", "Events are; debug=True prints tracebacks to stderr, which may hold some."
    return question, "yes", "Events have no field for arguments, values or exception texts."
