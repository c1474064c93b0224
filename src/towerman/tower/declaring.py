"""What is declared to a tower: tools and options, when it is made and while it works.

Theory. What holds is made of layers: arguments, the environment, the file, and rules for tools. A change makes other
layers, checks all that comes of them, and only then puts them into force in one step under the lock.

Not here: what options mean (policy, config), how limits change under calls at work (limits, gate).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast, overload

from towerman.config import Config, Rule, Source, blame, check_rules, laid_out, overlaid, rule, settled
from towerman.core import Core
from towerman.errors import PolicyError
from towerman.gate import GRANTED
from towerman.limits import Limits
from towerman.policy import (
    TOWER_OPTIONS,
    Breaker,
    Declared,
    Merge,
    OnDuplicate,
    OnRefusal,
    Pool,
    Preset,
    Rate,
    Retry,
    RunIn,
    TowerPolicy,
    WhenBusy,
    budgets_of,
    only_known,
    pools_of,
    seconds,
    shown,
)
from towerman.tools import READS_RESULTS, Tool, compile_tool, name_of_tool
from towerman.work import Context, RunState

if TYPE_CHECKING:
    from towerman.changes import Changes
    from towerman.follow import Follower, Taken
    from towerman.runner import Shells

HandlerT = TypeVar("HandlerT", bound=Callable[..., object])


class Layers(NamedTuple):
    """What a tower's options are made of.

    Args:
        options: all of it together.
        config: the file.
        given: what was given as arguments, when the tower was made or later.
        rules: for tools, as they were given in code.
    """

    options: TowerPolicy
    config: Config
    given: Mapping[str, object]
    rules: tuple[Rule, ...]


def _taken(tower: weakref.ref[Declaring], path: str) -> Taken:
    """A followed file has changed."""
    import logging

    from towerman.changes import AtWork
    from towerman.follow import Taken

    log = logging.getLogger("towerman")

    it = tower()
    if it is None or it._closed:
        return Taken.GONE
    if os.path.exists(path) and not os.path.isfile(path):  # what is no file may keep its reader for ever
        log.error("%s: not taken, what held before still holds: it is no file any more", path)
        return Taken.DONE
    try:
        changes = it.configure(path)
    except AtWork as later:
        if it._told_later != str(later):
            it._told_later = str(later)
            log.warning("%s: not taken yet: %s", path, later)
        return Taken.LATER
    except Exception as wrong:
        told = str(wrong).removeprefix(f"{path}: ")  # mistakes in the file begin with its name
        log.error("%s: not taken, what held before still holds: %s", path, told)
        return Taken.DONE
    it._told_later = ""
    for line in str(changes).splitlines():
        log.info("%s: %s", path, line)
    return Taken.DONE


def _there(tower: weakref.ref[Declaring]) -> bool:
    """Is there still a tower that follows its file?"""
    it = tower()
    return it is not None and not it._closed


class Declaring:
    """The part of a tower to which tools and options are declared."""

    options: TowerPolicy
    _layers: Layers
    _core: Core
    _limits: Limits
    _runs: dict[int, RunState]
    _closed: bool

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._declared: dict[str, tuple[Callable[..., object], Mapping[str, object]]] = {}
        self._follower: Follower | None = None
        self._watched_every = 0.0
        self._told_later = ""

    @property
    def _shells(self) -> Shells:
        """The runners of the loops that use this tower."""
        raise NotImplementedError  # pragma: no cover - the tower's

    def _shown(self, key: str) -> str:
        """How a pool is called in what people read."""
        raise NotImplementedError  # pragma: no cover - the tower's

    @overload
    def tool(self, function: HandlerT, /) -> HandlerT: ...
    @overload
    def tool(
        self,
        *,
        name: str | None = None,
        description: str | None = None,
        schema: Mapping[str, object] | None = None,
        reads: Declared | None = None,
        writes: Declared | None = None,
        independent: bool | None = None,
        sequential: bool | None = None,
        only_call: bool | None = None,
        read_only: bool | None = None,
        idempotent: bool | None = None,
        retry: int | Retry | None = None,
        pools: str | Sequence[str] | Mapping[str, int] | None = None,
        weight: int | None = None,
        max_concurrency: int | None = None,
        rate: str | Rate | Mapping[str, float] | None = None,
        breaker: bool | Breaker | Mapping[str, float] | None = None,
        spends: float | Mapping[str, float] | Callable[..., object] | None = None,
        max_repeats: int | Literal["any"] | None = None,
        timeout: float | None = None,
        max_wait: float | None = None,
        max_queued: int | None = None,
        when_busy: WhenBusy | None = None,
        on_refusal: OnRefusal | None = None,
        preset: Preset | None = None,
        max_result_bytes: int | None = None,
        encode: Callable[..., object] | None = None,
        summarize: Callable[..., object] | None = None,
        protect: bool | None = None,
        share_identical: bool | None = None,
        merge: Merge | None = None,
        run_in: RunIn | None = None,
        own_task: bool | None = None,
        on_duplicate: OnDuplicate | None = None,
        requires_approval: bool | Callable[..., bool] | None = None,
        still_valid: Callable[..., bool] | None = None,
    ) -> Callable[[HandlerT], HandlerT]: ...
    def tool(self, *functions: Callable[..., object], **options: object) -> object:
        """Declare a tool: bare (`@tower.tool`) or called with options. The function itself stays as it is: calling it
        directly is a plain call, not admitted.

        Args:
            functions: the one function, when it is used bare: a coroutine function, or a plain function, which runs on
                a worker thread.
            options: given by name, as follows.
            name: default: the function's name.
            description: default: the docstring's text.
            schema: JSON schema of the arguments; default: from the signature. With one, the handler gets keywords.
            reads: resources it reads: templates over the arguments ("file:{path}", "file:{dir}/**"), or a callable.
            writes: resources it may change.
            independent: it touches nothing that calls share (says nothing about effects).
            sequential: alone (beside independent calls only) and in emitted order within its run.
            only_call: may not share a batch with other calls.
            read_only: no side effect; default: True for a tool that only reads.
            idempotent: repeating it is harmless.
            retry: attempts in all, or a `Retry`: a call that fails for a reason that may pass is tried again, admitted
                anew each time. Only with `read_only` or `idempotent`; each attempt gets the same idempotency key.
            pools: named pools it takes permits of: names, or name to permits.
            weight: permits of the process-wide limit.
            max_concurrency: a limit of this tool's own.
            rate: how many of its calls may start in how long, in this process: "10/s", "100/min", "3/5s" (no window of
                that length holds more starts), or `Rate`.
            breaker: refuse its calls for a while when they keep failing: `Breaker`, or True for the usual numbers.
            spends: what one call takes of budgets: a number of calls, units with their amounts (`{"tokens": 500,
                "cost": 0.02}`; of "calls" it takes one unless it says otherwise), or a function of the arguments that
                gives either. A unit with 0 is one of which it takes nothing for sure, so that it runs also when that is
                used up.
            max_repeats: in how many turns, one after the other, a run may make the same call of it; or "any".
            timeout: seconds one call may run.
            max_wait: seconds one call may wait.
            max_queued: calls of this tool that may wait.
            when_busy: "wait", "reject" or "defer" (into the journal's queue).
            on_refusal: what the host does about a call of this tool that a limit refused: "tell" the model, as with any
                result, or "end_turn": `BatchResult.end_turn` is set.
            preset: "read", "write" or "background": a waiting policy in one word; options beside it win.
            max_result_bytes: bound of its results.
            encode: takes the handler's value, gives text or a value that is encoded in its place.
            summarize: takes an oversized value, gives a shorter one, which the model is told in its place. Called on a
                worker thread once the handler has returned, for at most 10 seconds of the call's time; it may be a
                coroutine function, which runs on a loop of its own there. Where it fails or takes longer, the value is
                cut.
            protect: its results are trimmed last where the results of a batch are too large together.
            share_identical: identical calls of one batch, with no conflicting call between them, run once; each gets a
                result of its own with a copy of the value (None where it cannot be copied). A failure is not shared:
                the next one runs.
            merge: for neighbouring calls on the same resources (reads= or writes=): takes the list of their keyword
                arguments, in order, and returns those of one run that does it all. What it returns is checked like a
                call's and must touch the same; where it cannot be used the calls run one by one. Called on the
                event loop: it should be quick.
            run_in: "loop", "thread" or "process" (for functions that compute: a spawned process, killed when the call
                is given up); default: loop for coroutine functions, thread for others.
            own_task: False lets several calls of one batch run in one task while its context stays unchanged.
            on_duplicate: with a journal, what a call does while the same call is at work elsewhere: "join" waits for
                its answer, "conflict" is refused; default: the tower's.
            requires_approval: its calls wait for a person's approval; or a plain function of the arguments that says
                whether one does. What it raises, or any other answer, refuses the call, `policy_error`.
            still_valid: a plain function of the arguments, asked when an approved call is about to start, after every
                wait: is what was approved still right? False refuses the call, `approval_expired`. Called on the event
                loop: it should be quick.

        Raises:
            PolicyError: naming the tool, the option and the fix; also for a name that is taken.
        """
        if functions:
            (function,) = functions
            self.add_tool(function, **options)
            return function

        def declare(handler: Callable[..., object]) -> Callable[..., object]:
            self.add_tool(handler, **options)
            return handler

        return declare

    def add_tool(self, function: Callable[..., object], /, **options: object) -> None:
        """Declare a tool without decorating it.

        Args:
            function: coroutine function, or plain function, which runs on a worker thread.
            options: those of `tool`.

        Raises:
            PolicyError: naming the tool, the option and the fix; also for a name that is taken.
        """
        core = self._core
        with self._changing:  # options that change meanwhile hold for this tool, too
            tool = self._compiled(name_of_tool(function, options), function, options, self._layers)
            if tool.name in core.tools:
                raise PolicyError(f"tool {tool.name!r}: this name is taken; give one of the two another name=")
            self._declared[tool.name] = function, options
            with core.lock:
                generation = core.generation
                self._limits.add_tool(tool)
                core.put_tool(tool)
                if generation != core.generation:
                    for state in self._runs.values():
                        state.bases.clear()

    def _compiled(
        self,
        name: str,
        function: Callable[..., object],
        options: Mapping[str, object],
        layers: Layers,
        known: Tool | None = None,
    ) -> Tool:
        merged, origins = laid_out(name, options, layers.config.tools, layers.rules)
        if getattr(function, READS_RESULTS, False) is True:
            from towerman.tower.reader import OPTIONS

            touches = any(merged.get(key) is not None for key in ("reads", "writes", "sequential", "independent"))
            merged = {**({"read_only": True} if touches else OPTIONS), **merged}
        tower = layers.options
        try:
            return compile_tool(name, function, merged, tower, Context, tower.pools, known)
        except PolicyError as wrong:
            raise blame(wrong, origins) from None

    def policy(self, pattern: str, **options: object) -> None:
        """Options for tools by pattern: `tower.policy("crm_*", pools=["crm"], timeout=5)`.

        It holds for tools declared before and after. What is given at a tool wins over it, it wins over the file. Of
        several that match a tool the most specific one wins, for each option by itself: an exact name before a pattern,
        then the pattern with more literal characters, then the later one. `independent` and what a tool touches are one
        question, which the stronger answers.

        Args:
            pattern: a tool's name, or a pattern with `*`, `?` and `[...]`.
            options: those of `tool`, without `name` and `schema`.

        It holds for calls that come afterwards, as with `configure`.

        Raises:
            PolicyError: an option that is wrong, by itself or for a tool that is declared already; or it changes what
                declared tools touch, and calls are at work. Nothing was changed.
        """
        one = rule(pattern, options)
        self._configure(f"policy {pattern!r}", None, {}, [one])

    def configure(
        self,
        config: Source | None = None,
        *,
        tools: Mapping[str, Mapping[str, object]] | None = None,
        **options: object,
    ) -> Changes:
        """Change options while calls run and wait (R-64); also from another thread. All of it, or nothing.

        A lower limit ends nobody: what is held above it comes down as calls end. A higher one wakes those who wait at
        once. A waiting call that needs more than there is now is answered `concurrency_limit`. A limit that a tool did
        not have before counts those of its calls that are at work. Times, bounds of queues and other options of tools
        hold for calls that come afterwards.

        Args:
            config: a `towerman.toml`, as a path or as a mapping, in place of the one so far: what it does not say any
                more falls back to the environment and the defaults. `tower.configure(tower.config)` reads the file
                anew.
            tools: options of tools by pattern, as `policy` takes them.
            options: those of the tower, by name; they win over file and environment from now on. Of `pools` and
                `budgets` only those that are named change; a number changes a pool's permits and leaves the rest of it
                as it is, a budget of None is taken away. Budgets of runs and batches hold for those that begin
                afterwards; of the others what is spent stays spent.

        Returns:
            What is different now; empty where nothing is.

        Raises:
            PolicyError: naming the option and the fix: it is wrong, or cannot change while the tower lives, or it
                changes what declared tools touch, and calls are at work. Nothing was changed.
        """
        given: dict[str, object] = {key: value for key, value in options.items() if value is not None}
        only_known("configure", given, (*TOWER_OPTIONS, "config", "tools"))
        if "pools" in given:
            given["pools"] = self._with_permits(given["pools"])
        if tools is not None and not isinstance(tools, Mapping):
            raise PolicyError(f'configure: tools: a mapping such as {{"crm_*": {{"timeout": 5}}}}; got {shown(tools)}')
        rules = []
        for pattern, its in cast("Mapping[object, object]", tools or {}).items():
            if not isinstance(its, Mapping) or not all(isinstance(key, str) for key in its):
                raise PolicyError(f"configure: tools.{shown(pattern)}: a mapping of options; got {shown(its)}")
            rules.append(rule(pattern, cast("Mapping[str, object]", its)))
        return self._configure("configure", config, given, rules)

    def _with_permits(self, given: object) -> dict[str, Pool]:
        """Pools as they are given; of those that exist a plain number changes the permits alone."""
        checked = pools_of(given)
        for name, value in cast("Mapping[str, object]", given).items():
            known = self.options.pools.get(name)
            if known is not None and not isinstance(value, Pool):
                checked[name] = replace(known, permits=checked[name].permits)
        return checked

    def _configure(
        self, where: str, source: Source | None, given: Mapping[str, object], rules: Sequence[Rule]
    ) -> Changes:
        """Validate first, commit second."""
        from towerman.changes import AtWork, Changes, same, too_wide, tool_changes, touches_the_same, tower_changes

        with self._changing:
            before = self._layers
            pools = {**pools_of(before.given.get("pools")), **pools_of(given.get("pools"))}
            budgets = {**budgets_of(before.given.get("budgets")), **budgets_of(given.get("budgets"))}
            arguments = {**before.given, **given, "pools": pools, "budgets": budgets}
            config, merged = settled(before.config if source is None else source, arguments)
            options = TowerPolicy(**{key: merged[key] for key in TOWER_OPTIONS if key in merged})  # type: ignore[arg-type]
            after = Layers(options, config, arguments, overlaid(before.rules, rules))
            check_rules((*config.tools, *after.rules), options)
            found = tower_changes(before.options, options)
            core = self._core
            tools: list[Tool] = []
            moved = ""
            for name, old in list(core.tools.items()):
                new = self._compiled(name, *self._declared[name], after, old)
                if not same(old, new):
                    tools.append(new)
                    found += tool_changes(old, new)
                    if not touches_the_same(old, new):
                        moved = moved or name
            with core.lock:
                if moved and self._at_work():
                    raise AtWork(
                        f"{where}: it changes what {moved!r} touches, and calls are at work; say it before the first "
                        "run, or when nothing is at work"
                    )
                decided = self._limits.change(options, tools, list(self._runs.values())) if found or tools else []
                self._layers, self.options = after, options
                over = {
                    self._shown(pool.key): pool.held - pool.limit
                    for pool in core.gate.ledger.pools.values()
                    if pool.held > pool.limit
                }
            if decided or found:
                self._shells.carry_out(decided)
            granted = sum(entry.status == GRANTED for entry in decided)
            wide = tuple(too_wide(core.tools.values(), options)) if found else ()
            return Changes(tuple(found), over, granted, len(decided) - granted, wide)

    def _at_work(self) -> bool:
        gate = self._core.gate.statistics()
        return bool(gate["running"] or gate["orphans"]) or any(state.works for state in self._runs.values())

    def watch(self, every: float = 1.0) -> None:
        """Follow the file that the tower was made with: what changes in it comes into force by itself.

        It is read again once it has stood still from one look to the next. What has changed is logged; a file that is
        wrong is logged and changes nothing. A change of what tools touch is taken once no call is at work. Ends with
        the tower, or with `unwatch`.

        Args:
            every: seconds from one look to the next.

        Raises:
            PolicyError: the tower was made without a file.
        """
        from towerman.follow import Follower

        path = self.config
        if path is None:
            raise PolicyError("watch: the tower was made without a file; name one: Tower('towerman.toml')")
        every = seconds("watch: every", every)
        self.unwatch()
        self._watched_every = every
        tower = weakref.ref(self)
        self._follower = Follower(path, partial(_taken, tower, path), every, partial(_there, tower))
        self._follower.start()

    def unwatch(self) -> None:
        """Follow the file no more."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    @property
    def config(self) -> str | None:
        """The path of the file that was read when the tower was made, or None."""
        return self._layers.config.path

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the declared tools, in the order of declaration."""
        return tuple(self._core.tools)

    def schemas(self, format: str = "openai") -> list[dict[str, object]]:
        """The declared tools as the provider's request wants them.

        Args:
            format: "openai", "anthropic" or "towerman".

        Raises:
            PolicyError: a tool's name or schema that the provider cannot take.
        """
        from towerman import adapters

        return adapters.schemas(
            [(tool.name, tool.policy.description, tool.checker.schema) for tool in self._core.tools.values()], format
        )

    @staticmethod
    def provider_options(format: str, parallel: bool = False) -> dict[str, object]:
        """The provider's own switch for several calls in one response, as request options.

        Towerman's limits hold whatever it says; it only changes what the model emits.

        Args:
            format: "openai", "anthropic" or "towerman".
            parallel: True lets the model emit several calls at once.
        """
        from towerman import adapters

        return adapters.provider_options(format, parallel)
