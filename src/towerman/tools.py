"""A declared tool, compiled: everything about it that depends on no call.

Theory. What can be known when a tool is declared is worked out once: its schema and validator, its resource rule, how
its handler is called and where. A call then only looks things up.

House rules. A mistake in a declaration is a `PolicyError` here, never a failed call later.

Not here: which tools a tower has, and in what order they run (tower, plan, gate).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from towerman import arguments
from towerman.access import AccessRefused, AccessRule, bound
from towerman.budgets import ONE_CALL, Asks
from towerman.calls import Access, Hold
from towerman.errors import PolicyError
from towerman.policy import Pool, Retry, ToolPolicy, TowerPolicy, asks_of, check_deferring, check_strict, tool_policy

if TYPE_CHECKING:
    from towerman.placeholders import Guard

Kind = Literal["ordered", "exclusive", "declared", "independent"]
"""How a tool's calls stand to others: alone in order, alone in the process, by its resources, free."""


Condition = Callable[[Mapping[str, object]], object]
"""A declared function of the arguments, ready to be called with all of them."""

READS_RESULTS: Final = "towerman_reads_results"
"""Attribute of a handler that reads pages of large results."""

LEAST_PAGE: Final = 512
"""Bytes that the content of such a handler may have at least."""

Address = tuple[str, str]
"""A function's module and its qualified name there."""


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """One tool, ready to be called.

    Attributes:
        policy: what was declared.
        handler: the function that does it.
        checker: turns the model's arguments into keyword arguments.
        rule: what its calls touch; None when it declares no resources.
        fixed: its accesses, when they depend on no argument.
        kind: how its calls stand to others.
        context_parameter: the handler's parameter that takes a Context, or None.
        is_async: the handler is a coroutine function.
        in_thread: it runs on one of Towerman's worker threads, or in a process for which such a thread waits.
        address: where a process of its own finds the handler; None for one that runs in this process.
        timeout: seconds one call may run.
        max_wait: seconds one call may wait.
        wait: it waits when busy.
        defer: it goes into the durable queue when busy.
        max_result_bytes: bound of its result.
        effect_free: it has no side effect.
        own_task: each call runs in a task of its own.
        requires_approval: its calls wait for a person; or a function of the arguments that says so.
        still_valid: asked again when an approved call is about to start; None: nothing is.
        reads_results: it reads pages of results that were too large; its own are never kept for that.
        retry: how its calls are tried again; None: they are not.
        joins_duplicates: its call waits for the answer of the same call that is at work elsewhere.
        asks: what each of its calls asks of budgets; None where that depends on the arguments.
        price: says it then; raises `AccessRefused` where it cannot.
        max_repeats: turns in which a run may make the same call of it; None: any number.
        guard: looks for placeholders in its arguments; None: nobody does.
        warns: a call with one runs all the same, and that is told.
    """

    policy: ToolPolicy
    handler: Callable[..., object]
    checker: arguments.Checker
    rule: AccessRule | None
    fixed: tuple[Access, ...] | None
    kind: Kind
    context_parameter: str | None
    is_async: bool
    in_thread: bool
    address: Address | None
    timeout: float
    max_wait: float
    wait: bool
    defer: bool
    max_result_bytes: int
    effect_free: bool
    own_task: bool
    reads_results: bool
    joins_duplicates: bool
    requires_approval: bool | Condition = False
    still_valid: Condition | None = None
    retry: Retry | None = None
    asks: Asks | None = ONE_CALL
    price: Callable[[Mapping[str, object]], Asks] | None = None
    max_repeats: int | None = None
    guard: Guard | None = None
    warns: bool = False

    @property
    def name(self) -> str:
        """Its declared name."""
        return self.policy.name

    @property
    def joins(self) -> bool:
        """One run may answer several of its calls."""
        return self.policy.share_identical or self.policy.merge is not None

    def likeness(
        self, keywords: Mapping[str, object], accesses: Sequence[Access], holds: Sequence[Hold], key: str | None
    ) -> Hashable | None:
        """What is equal for calls of this tool that one run could answer; None: this one stands for itself.

        Args:
            keywords: its checked arguments.
            accesses: what it touches.
            holds: the locks that stand for that.
            key: the idempotency key that it came with.
        """
        if self.policy.share_identical:
            same = arguments.identity(keywords)
            return None if same is None else (self.name, same, tuple(holds), key)
        if self.policy.merge is None or key is not None:  # a run of several calls could carry one key only
            return None
        return self.name, touched(accesses), tuple(holds)

    def __repr__(self) -> str:
        return f"Tool({self.name!r}, {self.kind})"


def touched(accesses: Sequence[Access]) -> frozenset[tuple[str, bool, bool]]:
    """What these accesses come to, however they were declared."""
    return frozenset([(access.key, access.write, access.subtree) for access in accesses])


def is_coroutine_function(handler: Callable[..., object]) -> bool:
    """Does calling it give a coroutine? Looks through partials, methods and callable objects."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def name_of_tool(handler: object, options: Mapping[str, object]) -> str:
    """The name of a tool: the one that is given, or the function's.

    Raises:
        PolicyError: it is no function, or has no name.
    """
    if not callable(handler):
        raise PolicyError(f"a tool is made of a function; got {type(handler).__name__}")
    name = options.get("name")
    if name is None:
        name = getattr(handler, "__name__", None)
    if name is None:
        inner = getattr(handler, "func", None)  # functools.partial
        name = getattr(inner, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise PolicyError("a tool made of a lambda or an object without a name needs name=")
    return name


def compile_tool(
    name: str,
    handler: Callable[..., object],
    options: Mapping[str, object],
    tower: TowerPolicy,
    context_type: type,
    pools: Mapping[str, Pool],
    known: Tool | None = None,
) -> Tool:
    """Compile a handler and its options.

    Args:
        name: the tool's name.
        handler: a function, coroutine function, method, partial or callable object.
        options: keyword options of `Tower.tool`; None means "not given".
        tower: the tower's own policy.
        context_type: the type of the parameter that takes the call's context.
        pools: the tower's pools by name.
        known: the same handler and schema, compiled with other options.

    Raises:
        PolicyError: naming the tool, the option and the fix.
    """
    given = dict(options)
    given.pop("name", None)
    schema = given.pop("schema", None)
    # Limits may be lowered below what a declared tool needs: then its calls are refused, not its declaration.
    policy = tool_policy(name, given, pools, max_concurrency=tower.max_concurrency, must_fit=known is None)
    if tower.strict:
        check_strict(policy)
    context_parameter = (
        arguments.context_parameter_of(handler, context_type) if known is None else (known.context_parameter)
    )
    if known is not None:
        checker = known.checker
    elif schema is None:
        checker = arguments.checker_from_function(handler, context_parameter=context_parameter)
    elif isinstance(schema, Mapping):
        checker = arguments.checker_from_schema(schema)
    else:
        raise PolicyError(f"tool {name!r}: schema: a JSON schema as a mapping; got {type(schema).__name__}")
    if not policy.description:
        policy = _with_description(policy, arguments.description_of(handler))
    rule = None
    if policy.reads is not None or policy.writes is not None:
        rule = AccessRule.compile(policy.reads, policy.writes, names=checker.names, tool=name)
    if policy.sequential:
        kind: Kind = "ordered"
    elif policy.declares_access:
        kind = "independent" if policy.independent else "declared"
    else:
        kind = tower.undeclared
    is_async = is_coroutine_function(handler)
    asks, price = _asks(name, policy, checker.names)
    repeats = policy.max_repeats or tower.max_repeats
    max_result_bytes = policy.max_result_bytes or tower.max_result_bytes
    reads_results = getattr(handler, READS_RESULTS, False) is True
    if reads_results and tower.results == "off":
        raise PolicyError(f"tool {name!r}: it reads stored results, and Tower(results='off') stores none")
    return Tool(
        policy=policy,
        handler=handler,
        checker=checker,
        rule=rule,
        fixed=rule.accesses({}) if rule is not None and not rule.depends_on_arguments else None,
        kind=kind,
        context_parameter=context_parameter,
        is_async=is_async,
        in_thread=policy.run_in in ("thread", "process") or (policy.run_in is None and not is_async),
        address=_address(name, handler, context_parameter) if policy.run_in == "process" else None,
        timeout=policy.timeout if policy.timeout is not None else tower.timeout,
        max_wait=policy.max_wait if policy.max_wait is not None else tower.max_wait,
        wait=(policy.when_busy or tower.when_busy) == "wait",
        defer=_defers(policy, tower),
        max_result_bytes=max(max_result_bytes, LEAST_PAGE) if reads_results else max_result_bytes,
        effect_free=policy.effect_free,
        own_task=policy.own_task,
        requires_approval=(
            policy.requires_approval
            if isinstance(policy.requires_approval, bool)
            else bound(policy.requires_approval, checker.names, f"tool {name!r}: requires_approval")
        ),
        still_valid=(
            None
            if policy.still_valid is None
            else bound(policy.still_valid, checker.names, f"tool {name!r}: still_valid")
        ),
        reads_results=reads_results,
        retry=policy.retry if policy.retry is not None and policy.retry.max_attempts > 1 else None,
        joins_duplicates=(policy.on_duplicate or tower.on_duplicate) == "join",
        asks=asks,
        price=price,
        max_repeats=None if repeats == "any" else repeats,
        guard=None if reads_results else _guard(policy, checker, tower, known),
        warns=tower.placeholder_guard == "warn",
    )


def _guard(policy: ToolPolicy, checker: arguments.Checker, tower: TowerPolicy, known: Tool | None) -> Guard | None:
    """What looks for placeholders in its arguments; made again only where something about it has changed."""
    off = tower.placeholder_guard == "off" or policy.free_text is True
    if off and not policy.free_text:
        return None
    from towerman.placeholders import Guard, check_free_text

    before = known.policy if known is not None and known.guard is not None else None
    if before is not None and (before.free_text, before.description) == (policy.free_text, policy.description):
        return None if off or known is None else known.guard
    schema = checker.schema
    if not isinstance(policy.free_text, bool):
        check_free_text(f"tool {policy.name!r}", schema, policy.free_text)
    return None if off else Guard(policy.name, policy.description, schema, policy.free_text)


def _defers(policy: ToolPolicy, tower: TowerPolicy) -> bool:
    """Does a call that cannot start at once go into the durable queue?

    Raises:
        PolicyError: there is none.
    """
    if (policy.when_busy or tower.when_busy) != "defer":
        return False
    check_deferring(f"tool {policy.name!r}: when_busy='defer': ", tower.journal)
    return True


def _asks(
    name: str, policy: ToolPolicy, names: frozenset[str] | None
) -> tuple[Asks | None, Callable[[Mapping[str, object]], Asks] | None]:
    """What calls ask of budgets: always the same, or a function of the arguments that says it."""
    spends = policy.spends
    if spends is None or isinstance(spends, Asks):
        return spends or ONE_CALL, None
    call = bound(spends, names, f"tool {name!r}: spends")

    def price(keywords: Mapping[str, object]) -> Asks:
        try:
            answer = call(keywords)
        except Exception as error:
            raise AccessRefused(f"spends raised {type(error).__name__[:64]}", "policy_error") from None
        if inspect.iscoroutine(answer):
            answer.close()
        try:
            return asks_of("spends", answer)
        except Exception:  # a mapping may fail in any way; what it holds may be made of arguments
            told = "spends gave no amounts: a number of calls, or a mapping of units to numbers of 0 or more"
            raise AccessRefused(told, "policy_error") from None

    return None, price


def _address(name: str, handler: Callable[..., object], context_parameter: str | None) -> Address:
    """The name under which another process finds a handler.

    Raises:
        PolicyError: it cannot run there, and why.
    """
    where = f'tool {name!r}: run_in="process"'
    if is_coroutine_function(handler):
        raise PolicyError(f"{where}: for plain functions, which compute; a coroutine function runs on the loop")
    module, qualified = getattr(handler, "__module__", None), getattr(handler, "__qualname__", "<")
    if not inspect.isfunction(handler) or not module or "<" in qualified:
        raise PolicyError(f"{where}: a function at the top of a module, which another process can import")
    if context_parameter is not None:
        raise PolicyError(f"{where}: no Context there; leave out the parameter {context_parameter!r}")
    return module, qualified


def _with_description(policy: ToolPolicy, description: str) -> ToolPolicy:
    from dataclasses import replace

    return replace(policy, description=description)
