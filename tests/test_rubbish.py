"""Rubbish in every public place: a clear error of ours that names the place, or it is taken; nothing else.

Theory. What a person, a config file or a model hands in is not always of the type that is written down. The answer is
a PolicyError or an InputError with the place in it, before anything ran. Never an error of Python's own from somewhere
deep, never a hang, never a call without its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from towerman import (
    Approved,
    Budget,
    Call,
    Denied,
    InputError,
    PolicyError,
    Pool,
    RateLimited,
    Retry,
    ToolError,
    Tower,
    Worker,
)


class Hostile:
    """Whatever is asked of it, it fails."""

    def _fail(self, *_: object) -> Any:
        raise ZeroDivisionError

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __str__ = __repr__ = __contains__ = _fail  # type: ignore[assignment]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
KNOT: dict[str, Any] = {}
KNOT["a"] = KNOT

RUBBISH: dict[str, Any] = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "fraction": 1.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "huge": 10**30,
    "monstrous": 10**5000,
    "empty text": "",
    "nul": "\x00",
    "lone surrogate": "\ud800",
    "long text": "x" * 30_000,
    "bytes": b"x",
    "list": [1],
    "list of None": [None],
    "cycle": CYCLE,
    "dict": {"a": 1},
    "dict by number": {1: 2},
    "knot": KNOT,
    "object": object(),
    "hostile": Hostile(),
    "type": type,
    "deep text": "[" * 5000 + "]" * 5000,
}

each = pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)


def taken(what: Callable[[], object], place: str) -> bool:
    """Is it taken? If not, the error is ours and names the place."""
    try:
        what()
    except (PolicyError, InputError) as caught:
        told = str(caught)
    else:
        return True
    assert place in told, told
    assert len(told) < 1_000, "a message that nobody reads"
    return False


def made() -> Tower:
    """A tower with two tools."""
    tower = Tower(pools={"a": 1})

    @tower.tool(independent=True)
    async def ping(a: int = 1) -> int:
        return a

    @tower.tool(writes="k:{a}")
    async def put(a: object) -> str:
        return "done"

    return tower


def one_batch(tower: Tower, calls: object, **options: Any) -> Any:
    """Run it; everything that can be asked of the results is asked."""
    done = asyncio.run(tower.execute(calls, **options))
    for form in ("openai", "anthropic", "towerman"):
        json.dumps(done.turn(form, pending="refuse")).encode()
    done.timeline()
    repr(list(done))
    tower.validate()
    return done


@each
@pytest.mark.parametrize("option", sorted(set(inspect.signature(Tower).parameters) - {"_clock"}))
def test_options_of_a_tower(option: str, rubbish: Any) -> None:
    """R-51: each option of a tower is checked, or it is one that works."""
    if taken(lambda: Tower(**{option: rubbish}), option):
        tower = Tower(**{option: rubbish})

        @tower.tool(independent=True, max_concurrency=1, read_only=True)
        async def ping() -> int:
            return 1

        assert len(one_batch(tower, [Call("ping", {})])) == 1
        tower.close()


TOOL_OPTIONS = [
    "name",
    "description",
    "schema",
    "reads",
    "writes",
    "independent",
    "sequential",
    "only_call",
    "read_only",
    "idempotent",
    "retry",
    "on_refusal",
    "pools",
    "weight",
    "max_concurrency",
    "spends",
    "max_repeats",
    "timeout",
    "max_wait",
    "max_queued",
    "when_busy",
    "preset",
    "max_result_bytes",
    "encode",
    "summarize",
    "protect",
    "share_identical",
    "merge",
    "run_in",
    "own_task",
    "requires_approval",
    "still_valid",
]


@each
def test_rules_of_a_tower(rubbish: Any) -> None:
    """R-51: what stands in a mapping in a file's place, and what is said by pattern, is checked."""
    for key in ("timeout", "pools", "tools", rubbish if isinstance(rubbish, str) else "x"):
        taken(lambda key=key: Tower({key: rubbish}), "config")  # type: ignore[misc]
        taken(lambda key=key: Tower({"pools": {"a": 1}, "tools": {"x*": {key: rubbish}}}), "config")  # type: ignore[misc]
        taken(lambda key=key: Tower({"pools": {"a": {key: rubbish}}}), "config")  # type: ignore[misc]
    taken(lambda: Tower({"pools": {"a": rubbish}}), "pools.a")
    taken(lambda: Tower().policy(rubbish), "policy")
    for option in [*TOOL_OPTIONS, "x"]:
        taken(lambda option=option: made().policy("p*", **{option: rubbish}), option)  # type: ignore[misc]


@each
@pytest.mark.parametrize("option", TOOL_OPTIONS)
def test_options_of_a_tool(option: str, rubbish: Any) -> None:
    """R-51: each option of a tool is checked, or the tool can be described, called and answered."""
    tower = Tower(pools={"a": 1})

    async def ping(a: int = 1) -> int:
        return a

    if taken(lambda: tower.add_tool(ping, **{option: rubbish}), option):
        tower.schemas("towerman")
        assert len(one_batch(tower, [Call(tower.tools[0], {})])) == 1


@each
@pytest.mark.parametrize("option", ["permits", "max_queued", "scope", "reserve"])
def test_options_of_a_pool(option: str, rubbish: Any) -> None:
    """R-51: each option of a pool."""
    taken(lambda: Pool(**{"permits": 1, option: rubbish}), option)


@each
@pytest.mark.parametrize(
    "option",
    [
        "run_id",
        "tenant",
        "deps",
        "priority",
        "budget",
        "deadline",
        "allow",
        "deny",
        "max_concurrency",
        "fail_fast",
        "approver",
    ],
)
def test_options_of_a_run(option: str, rubbish: Any) -> None:
    """R-51, R-52: each option of a run is checked, or the run works."""
    tower = made()
    if taken(lambda: tower.run(**{option: rubbish}), option):
        assert len(one_batch(tower, [Call("ping", {})], **{option: rubbish})) == 1


@each
@pytest.mark.parametrize("field", ["tool", "arguments", "id", "needs", "idempotency_key"])
@pytest.mark.parametrize("plain", [False, True])
def test_g1_fields_of_a_call(field: str, plain: bool, rubbish: Any) -> None:
    """G1: a field that is nothing of what it should be is refused by name before anything runs, or its call is
    answered like its siblings.
    """
    tower = made()
    fields: dict[str, Any] = {"tool": "put", "arguments": {"a": 1}, field: rubbish}
    odd: Any = fields if plain else Call(**fields)
    if taken(lambda: one_batch(tower, [Call("ping", {}, "0"), odd, Call("ping", {})]), "[1]"):
        done = one_batch(made(), [Call("ping", {}, "0"), odd, Call("ping", {})])
        assert (done[0].ok, len(done), done[2].ok) == (True, 3, True) or field == "needs"


@each
def test_g1_values_of_arguments(rubbish: Any) -> None:
    """G1: whatever stands in an argument, the call has its one result."""
    assert len(one_batch(made(), [Call("put", {"a": rubbish}), Call("ping", {"a": rubbish})])) == 2


WORKER_OPTIONS = ("concurrency", "patience", "poll", "grace", "foreign_after", "on_end")


@pytest.mark.parametrize("option", WORKER_OPTIONS)
@each
def test_options_of_a_worker(option: str, rubbish: Any) -> None:
    """A worker is made with the option, or it is refused by name."""
    tower = Tower(journal=":memory:")
    taken(lambda: Worker(tower, **{option: rubbish}), option)


@each
def test_what_is_submitted(rubbish: Any) -> None:
    """Whatever is handed in to run later is a batch, or refused; a batch_id of any kind, too."""

    async def main() -> None:
        async with Tower(journal=":memory:") as tower:
            for given in ({"calls": rubbish}, {"calls": [], "batch_id": rubbish}):
                with contextlib.suppress(PolicyError, InputError):
                    await tower.submit(**given)

    asyncio.run(main())


@each
def test_everything_else(rubbish: Any) -> None:
    """Formats, hooks, observers, reasons, widths, handlers: refused in words, or taken."""
    tower = made()
    done = one_batch(tower, [Call("ping", {})])
    if isinstance(rubbish, dict | list | tuple | str | bytes):
        taken(lambda: one_batch(tower, rubbish), "")
    for name in ("openai", "anthropic", "towerman"):
        taken(lambda name=name: one_batch(tower, rubbish, format=name), "")  # type: ignore[misc]
    taken(lambda: one_batch(tower, [Call("ping", {})], format=rubbish), "format")
    taken(lambda: one_batch(tower, [Call("ping", {})], on_result=rubbish), "on_result")
    taken(lambda: tower.schemas(rubbish), "format")
    taken(lambda: tower.provider_options(rubbish), "format")
    taken(lambda: done.messages(rubbish), "format")
    taken(lambda: done.turn(rubbish), "format")
    taken(lambda: done.timeline(rubbish), "width")
    taken(lambda: done.messages(pending=rubbish), "pending")
    taken(lambda: done.turn(pending=rubbish), "pending")
    taken(lambda: Denied(rubbish), "Denied.reason")
    taken(lambda: Approved(rubbish), "Approved.arguments")
    taken(lambda: Approved(expires_in=rubbish), "Approved.expires_in")
    state = done.state()
    taken(lambda: asyncio.run(tower.run().resume(rubbish, {})), "state")
    taken(lambda: asyncio.run(tower.run().resume(state, rubbish)), "decisions")
    taken(lambda: asyncio.run(tower.run().resume(state, {"x": rubbish})), "decisions")
    taken(lambda: asyncio.run(tower.run().resume(state, {}, on_result=rubbish)), "on_result")
    taken(lambda: tower.flush(rubbish), "timeout")
    taken(lambda: tower.read(rubbish), "handle")
    large = Tower(max_result_bytes=512)
    large.add_tool(lambda: "line\n" * 1_000, name="dump", independent=True)
    (dump,) = large.execute_sync([Call("dump", {})])
    taken(lambda: large.read(str(dump.handle), rubbish), "page")
    large.close()
    taken(lambda: tower.add_observer(rubbish), "observers")
    tower.remove_observer(rubbish)
    taken(lambda: Tower().add_tool(rubbish), "tool")
    run = tower.run()
    taken(lambda: run.charge(tokens=rubbish), "charge: tokens")
    taken(lambda: Budget(calls=rubbish), "Budget")
    taken(lambda: Budget(mails=rubbish), "Budget")
    taken(lambda: Budget(calls=1, seconds=rubbish), "Budget.seconds")
    taken(lambda: Budget(calls=1, per=rubbish), "Budget.per")
    taken(lambda: Budget(calls=1, partial=rubbish), "Budget.partial")
    taken(lambda: tower.configure(budgets=rubbish), "budgets")
    for option in ("reason", "call_id", "index"):
        taken(lambda option=option: run.cancel(**{option: rubbish}), option)  # type: ignore[misc]
    tower.close()


@each
def test_g1_what_an_approver_answers(rubbish: Any) -> None:
    """G1, S4: an approver that answers anything, and edited arguments that are anything: one result, and nothing runs
    that was not approved.
    """
    tower = Tower()
    ran: list[int] = []

    @tower.tool(independent=True, requires_approval=True)
    async def act(a: int = 1) -> int:
        ran.append(a)
        return a

    async def answers(request: object) -> Any:
        return rubbish

    async def edits(request: object) -> Any:
        return Approved({"a": rubbish})

    (result,) = one_batch(tower, [Call("act", {})], approver=answers)
    assert result.code == "approval_missing"
    assert not ran
    (result,) = one_batch(tower, [Call("act", {})], approver=edits)
    assert result.code in (None, "invalid_arguments")
    assert all(type(one) is int for one in ran)


@each
@pytest.mark.parametrize("field", ["text", "applied"])
def test_g1_what_a_handler_tells(field: str, rubbish: Any) -> None:
    """G1, G10: a ToolError made of anything ends in one result whose words are of the closed lists."""
    tower = Tower()

    @tower.tool(independent=True)
    async def fail() -> None:
        raise ToolError(**{"text": "told", field: rubbish})

    (result,) = one_batch(tower, [Call("fail", {})])
    assert result.code == "handler_error"
    assert result.applied in ("no", "yes", "unknown")


@each
@pytest.mark.parametrize("option", ["max_attempts", "initial_delay", "max_delay", "retry_on"])
def test_options_of_a_retry(option: str, rubbish: Any) -> None:
    """R-51: each option of a retry is checked, in code and as a table, or it is one that works."""
    if taken(lambda: Retry(**{option: rubbish}), option):
        assert "attempts" in str(Retry(**{option: rubbish}))
    taken(lambda: Tower({"tools": {"x*": {"retry": {option: rubbish}}}}), "config")


@each
def test_g1_whatever_a_service_asks_for(rubbish: Any) -> None:
    """G1, R-122: a RateLimited made of anything, and a foreign exception with a retry_after of anything, end in one
    result; what is no length of time is not told as one.
    """
    tower = Tower()

    class Foreign(ConnectionError):
        retry_after = rubbish
        applied = rubbish

    @tower.tool(independent=True, read_only=True, retry=Retry(2, initial_delay=0, max_delay=0))
    async def ask(which: int) -> None:
        raise Foreign if which else RateLimited(rubbish)

    limited, foreign = one_batch(tower, [Call("ask", {"which": 0}), Call("ask", {"which": 1})])
    assert (limited.code, foreign.code) == ("rate_limited", "handler_error")
    for result in (limited, foreign):
        assert result.retry_after is None or 0 <= result.retry_after < 1e15
