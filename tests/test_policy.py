"""Declarations: every option has one place where it is checked, and a refusal that names the option, what was given
and the fix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from towerman import PolicyError, Pool, Retry, Tower
from towerman.policy import (
    MIN_RESULT_BYTES,
    PRESETS,
    TOOL_OPTIONS,
    TOWER_OPTIONS,
    ToolPolicy,
    TowerPolicy,
    check_strict,
    flag,
    name_of,
    only_known,
    pools_of,
    seconds,
    tool_policy,
    whole,
    word,
)

POOLS = {"crm": Pool(2), "db": Pool(4, reserve=1)}


def policy(**options: Any) -> ToolPolicy:
    """A tool's policy from its options."""
    return tool_policy("tool", options, POOLS, max_concurrency=8)


def refusal(make: Callable[[], object]) -> str:
    """What is said when something is declared wrongly."""
    with pytest.raises(PolicyError) as told:
        make()
    assert isinstance(told.value, ValueError)
    return str(told.value)


# ==================================================================== numbers, words, names


@pytest.mark.parametrize("wrong", [0, -1, 1.0, 2.5, float("nan"), True, False, "2", None, [1]])
def test_r51_limits_are_positive_whole_numbers(wrong: object) -> None:
    """R-51: 0, negatives, fractions, NaN, booleans and text are no limit; the message names the option and what is
    allowed.
    """
    told = refusal(lambda: whole("pools.crm", wrong))
    assert told.startswith("pools.crm: a whole number, 1 or more; got ")


def test_whole_numbers_from_another_least() -> None:
    """R-51: where 0 is allowed it is said so."""
    assert whole("x", 0, least=0) == 0
    assert whole("x", 10**30) == 10**30
    assert "0 or more" in refusal(lambda: whole("x", -1, least=0))


@pytest.mark.parametrize("wrong", [1e15, -1e16, 10**400])
def test_seconds_have_a_limit_that_is_told(wrong: float) -> None:
    """G12: what is finite and too much is told as that."""
    assert "timeout: less than 1,000,000,000,000,000 seconds; got " in refusal(lambda: seconds("timeout", wrong))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), True, "5", None, 1j])
def test_seconds_are_finite_numbers(wrong: object) -> None:
    """G12: no wait without an end: infinite, NaN, booleans and text are refused."""
    assert "timeout: a finite number of seconds; got " in refusal(lambda: seconds("timeout", wrong))


def test_seconds_from_zero_or_above_it() -> None:
    """G12: 0 seconds only where it has a meaning."""
    assert seconds("x", 5) == 5.0
    assert isinstance(seconds("x", 5), float)
    assert seconds("x", 0, zero=True) == 0.0
    assert "more than 0" in refusal(lambda: seconds("x", 0))
    assert "0 or more" in refusal(lambda: seconds("x", -1, zero=True))
    assert "more than 0" in refusal(lambda: seconds("x", -0.5))


@pytest.mark.parametrize("wrong", [0, 1, "yes", None])
def test_flags_are_booleans(wrong: object) -> None:
    """A flag is True or False, nothing that passes for it."""
    assert flag("x", True) is True
    assert "x: True or False; got " in refusal(lambda: flag("x", wrong))


def test_words_of_a_closed_list() -> None:
    """An unknown word is told the known ones, and the near one."""
    from towerman.policy import WhenBusy

    assert word("when_busy", "wait", WhenBusy) == "wait"
    told = refusal(lambda: word("when_busy", "rejct", WhenBusy))
    assert "'wait', 'reject'" in told
    assert "did you mean 'reject'" in told
    assert "did you mean" not in refusal(lambda: word("when_busy", "zzz", WhenBusy))
    assert "got list" in refusal(lambda: word("when_busy", ["wait"], WhenBusy))


@pytest.mark.parametrize("wrong", ["", "a b", "ä", "a/b", "x" * 129, "a\n", 5, None])
def test_names_are_what_every_wire_takes(wrong: object) -> None:
    """API: a name is 1 to 128 letters, digits, _, -, ."""
    assert name_of("tool name", "files__read-1.x") == "files__read-1.x"
    assert name_of("tool name", "x" * 128)
    assert refusal(lambda: name_of("tool name", wrong)).startswith("tool name: 1 to 128 letters")


def test_messages_are_bounded() -> None:
    """A huge or strange value is not printed whole; objects by their type only."""
    assert len(refusal(lambda: whole("x", "y" * 10_000))) < 200
    assert "SECRET" not in refusal(lambda: whole("x", {"key": "SECRET"}))
    assert refusal(lambda: whole("x", -(10**30))).endswith("got a number of more than 20 digits")


def test_unknown_options_are_told_the_near_one() -> None:
    """API section 6: unknown keys are refused with the place and the nearest right key, or the known ones."""
    only_known("tool 'x'", {"reads": 1}, TOOL_OPTIONS)
    assert "tool 'x': no option 'read'; did you mean 'reads'?" in refusal(
        lambda: only_known("tool 'x'", {"read": 1}, TOOL_OPTIONS)
    )
    assert "known: " in refusal(lambda: only_known("tool 'x'", {"zzzzz": 1}, TOOL_OPTIONS))


# ==================================================================== pools


def test_pools_by_number_and_by_object() -> None:
    """API: `pools={"crm": 2}` is a pool of the process with two permits."""
    made = pools_of({"crm": 2, "db": Pool(1, max_queued=5, scope="tenant")})
    assert made == {"crm": Pool(2, None, None, 0), "db": Pool(1, 5, "tenant", 0)}
    assert pools_of(None) == {}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: pools_of({"crm": 0}), "pools.crm: a whole number, 1 or more; got 0"),
        (lambda: pools_of({"crm": True}), "pools.crm: a whole number, 1 or more; got True"),
        (lambda: pools_of({"a b": 1}), "pools: 1 to 128 letters"),
        (lambda: pools_of({"process": 1}), "pools.process: this name is taken"),
        (lambda: pools_of({"run": 1}), "pools.run: this name is taken"),
        (lambda: pools_of([("crm", 1)]), "pools: a mapping of name to permits or Pool"),
        (lambda: Pool(0), "Pool.permits: a whole number, 1 or more; got 0"),
        (lambda: Pool(2, max_queued=-1), "Pool.max_queued: a whole number, 0 or more; got -1"),
        (lambda: Pool(2, scope="all"), "Pool.scope: one of 'process', 'run', 'tenant', 'cluster'"),  # type: ignore[arg-type]
        (lambda: Pool(2, reserve=-1), "Pool.reserve: a whole number, 0 or more; got -1"),
        (lambda: Pool(2, reserve=2), "Pool.reserve: below permits (2)"),
    ],
)
def test_r51_pools_that_cannot_be(make: Callable[[], object], told: str) -> None:
    """R-51, R-06: a pool that could never serve anybody is refused when it is made, by name."""
    assert told in refusal(make)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_attempts": 0}, "Retry.max_attempts: a whole number, 1 or more; got 0"),
        ({"max_attempts": 2.0}, "Retry.max_attempts: a whole number, 1 or more; got 2.0"),
        ({"initial_delay": -1}, "Retry.initial_delay: seconds, 0 or more; got -1"),
        ({"max_delay": float("nan")}, "Retry.max_delay: a finite number of seconds; got nan"),
        ({"initial_delay": 9}, "Retry.initial_delay: at most max_delay (5 seconds); got 9"),
        (
            {"retry_on": 5},
            "Retry.retry_on: subclasses of Exception, for example (ConnectionError, TimeoutError); got 5",
        ),
        ({"retry_on": (KeyboardInterrupt,)}, "Retry.retry_on: subclasses of Exception"),
        ({"retry_on": (ValueError, "OSError")}, "Retry.retry_on: subclasses of Exception"),
        ({"retry_on": int}, "Retry.retry_on: subclasses of Exception"),
    ],
)
def test_r51_retries_that_cannot_be(options: dict[str, Any], told: str) -> None:
    """R-51, R-118: a retry that could not work is refused where it is made; an interrupt is never retried."""
    assert told in refusal(lambda: Retry(**options))


def test_r118_how_a_retry_may_be_given() -> None:
    """R-118: a number of attempts, a Retry, or the table of a file; one attempt is none more, for any tool."""
    assert policy(read_only=True, retry=4).retry == Retry(4)
    assert policy(read_only=True, retry={"max_attempts": 2, "max_delay": 9}).retry == Retry(2, max_delay=9)
    given = Retry(retry_on=[ValueError])  # type: ignore[arg-type]  # a list is taken, too
    assert policy(idempotent=True, retry=given).retry is given
    assert given.retry_on == Retry(retry_on=ValueError).retry_on == (ValueError,)  # type: ignore[arg-type]
    assert policy(writes="k", retry=1).retry == Retry(1)
    assert str(Retry()) == "3 attempts, pauses 0.2 to 5 s, on ConnectionError, TimeoutError"


# ==================================================================== tools


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"independent": 1}, "tool 'tool': independent: True or False; got 1"),
    ({"sequential": "yes"}, "tool 'tool': sequential: True or False; got 'yes'"),
    ({"only_call": 0}, "tool 'tool': only_call: True or False"),
    ({"read_only": "no"}, "tool 'tool': read_only: True or False"),
    ({"idempotent": 1}, "tool 'tool': idempotent: True or False"),
    ({"retry": 0}, "tool 'tool': retry: attempts in all (a whole number, 1 or more), or Retry(max_attempts=3, ...)"),
    ({"retry": True}, "tool 'tool': retry: attempts in all"),
    ({"retry": {"attempts": 3}}, "tool 'tool': retry: no option 'attempts'; did you mean 'max_attempts'?"),
    ({"retry": {"max_attempts": 0}}, "tool 'tool': retry.max_attempts: a whole number, 1 or more; got 0"),
    ({"retry": {"retry_on": ["OSError"]}}, "tool 'tool': retry.retry_on: exception classes, which only code can name"),
    ({"retry": 3}, "tool 'tool': retry repeats a call, and it is not said that this does no harm; say idempotent=True"),
    ({"retry": 2, "writes": "k", "idempotent": False}, "tool 'tool': retry repeats a call"),
    ({"retry": 2, "writes": "k", "read_only": False}, "tool 'tool': retry repeats a call"),
    ({"on_refusal": "stop"}, "tool 'tool': on_refusal: one of 'tell', 'end_turn'"),
    ({"own_task": 0}, "tool 'tool': own_task: True or False"),
    ({"on_duplicate": "wait"}, "tool 'tool': on_duplicate: one of 'join', 'conflict'"),
    ({"timeout": 0}, "tool 'tool': timeout: seconds, more than 0; got 0"),
    ({"timeout": float("inf")}, "tool 'tool': timeout: a finite number of seconds"),
    ({"max_wait": -1}, "tool 'tool': max_wait: seconds, more than 0"),
    ({"weight": 0}, "tool 'tool': weight: a whole number, 1 or more"),
    ({"weight": 9}, "tool 'tool': weight 9 is more than the tower's max_concurrency 8: it could never run"),
    ({"max_concurrency": 0}, "tool 'tool': max_concurrency: a whole number, 1 or more"),
    ({"max_queued": -1}, "tool 'tool': max_queued: a whole number, 0 or more"),
    ({"max_result_bytes": 10}, f"tool 'tool': max_result_bytes: a whole number, {MIN_RESULT_BYTES} or more"),
    ({"when_busy": "queue"}, "tool 'tool': when_busy: one of 'wait', 'reject'"),
    ({"run_in": "elsewhere"}, "tool 'tool': run_in: one of 'loop', 'thread', 'process'"),
    ({"preset": "raed"}, "tool 'tool': preset: one of 'read', 'write', 'background' (did you mean 'read'?)"),
    ({"encode": "json"}, "tool 'tool': encode: a function of the handler's value"),
    ({"summarize": 5}, "tool 'tool': summarize: a function of the handler's value"),
    ({"protect": 1}, "tool 'tool': protect: True or False; got 1"),
    ({"share_identical": 1}, "tool 'tool': share_identical: True or False; got 1"),
    ({"merge": "add"}, "tool 'tool': merge: a function of a list of argument mappings; got 'add'"),
    ({"merge": print}, "tool 'tool': merge joins calls on one resource, and the tool declares none; say reads= or"),
    ({"merge": print, "independent": True}, "tool 'tool': merge joins calls on one resource"),
    ({"merge": asyncio.sleep, "writes": "k"}, "tool 'tool': merge: a plain function, which is called just before"),
    ({"merge": print, "writes": "k", "share_identical": True}, "tool 'tool': share_identical=True contradicts merge"),
    ({"description": 5}, "tool 'tool': description: text"),
    ({"pools": ["crn"]}, "tool 'tool': no pool 'crn'; did you mean 'crm'?"),
    ({"pools": ["zzz"]}, "tool 'tool': no pool 'zzz'; declare it: Tower(pools={\"zzz\": 4})"),
    ({"pools": {"crm": 3}}, "tool 'tool': pools.crm: 3 permits of a pool that has 2: it could never run"),
    ({"pools": {"db": 4}}, "tool 'tool': pools.db: 4 permits of a pool that has 4 less 1 in reserve"),
    ({"pools": {"crm": 0}}, "tool 'tool': pools.crm: a whole number, 1 or more"),
    ({"pools": 5}, "tool 'tool': pools: a list of pool names or a mapping of name to permits; got 5"),
    ({"independent": True, "reads": "k"}, "tool 'tool': independent=True contradicts reads, writes and sequential"),
    ({"independent": True, "sequential": True}, "tool 'tool': independent=True contradicts"),
    ({"read_only": True, "writes": "k"}, "tool 'tool': read_only=True contradicts writes"),
    ({"read": "k"}, "tool 'tool': no option 'read'; did you mean 'reads'?"),
    ({"concurrency": 1}, "tool 'tool': no option 'concurrency'; did you mean 'max_concurrency'?"),
    ({"zzz": "10/s"}, "tool 'tool': no option 'zzz'; known: "),
    ({"rate": "10"}, 'tool \'tool\': rate: a rate such as "10/s", "100/min" or "3/5s", or limit, per (seconds)'),
    ({"spends": float("nan")}, "tool 'tool': spends: a number of calls, or units with their amounts such as"),
    ({"spends": {"token": 1}}, "tool 'tool': spends: no unit 'token'; did you mean 'tokens'?"),
    ({"spends": {"cost": -0.1}}, "tool 'tool': spends: cost: a number, 0 or more; got -0.1"),
    ({"spends": {"seconds": 1}}, "tool 'tool': spends: seconds pass by themselves; nobody can spend them"),
    ({"max_repeats": True}, "tool 'tool': max_repeats: a whole number, 1 or more, or \"any\"; got True"),
    ({"rate": {"limit": 5, "pre": 1}}, "tool 'tool': rate: no option 'pre'; did you mean 'per'?"),
    ({"rate": {"limit": 5, "reserve": 5}}, "tool 'tool': rate.reserve: below limit (5), or runs of priority 0"),
    ({"free_text": 1}, "tool 'tool': free_text: True for all arguments, a name such as 'body', a path such as"),
    ({"free_text": ["body", ""]}, "tool 'tool': free_text: True for all arguments"),
    ({"requires_approval": "yes"}, "tool 'tool': requires_approval: True, False, or a plain function of the arguments"),
    ({"still_valid": True}, "tool 'tool': still_valid: a function of the arguments; got True"),
    ({"breaker": 5}, "tool 'tool': breaker: True, or failures, window, open_for and probes as Breaker takes them"),
    ({"breaker": {"failures": 0}}, "tool 'tool': breaker.failures: a whole number, 1 or more; got 0"),
]


@pytest.mark.parametrize(("options", "told"), WRONG, ids=[told.split("'tool': ")[1][:40] for _, told in WRONG])
def test_every_wrong_option_names_itself_and_the_fix(options: dict[str, Any], told: str) -> None:
    """DESIGN style 7: a mistake in setting up is an exception, early, naming the tool, the option and the fix."""
    assert told in refusal(lambda: policy(**options))


def test_every_option_of_a_tool_is_checked() -> None:
    """No option is taken unlooked at: each has a value above that is refused (templates are checked where they are
    compiled).
    """
    checked = {key for options, _ in WRONG for key in options}
    elsewhere = {"name", "reads", "writes"}
    assert set(TOOL_OPTIONS) - checked - elsewhere == set()


def test_what_a_tool_is_by_default() -> None:
    """API: nothing given: one permit, waits as the tower does, a task of its own; None means not given."""
    made = policy(timeout=None, pools=None, read_only=None)
    assert made == ToolPolicy(name="tool")
    assert policy(encode=str, description="d") == ToolPolicy(name="tool", encode=str, description="d")
    assert (made.weight, made.own_task, made.pools, made.when_busy) == (1, True, (), None)
    assert not made.declares_access


@pytest.mark.parametrize(
    ("given", "made"),
    [("crm", (("crm", 1),)), (["crm", "db"], (("crm", 1), ("db", 1))), ({"db": 3}, (("db", 3),)), ((), ())],
)
def test_pools_of_a_tool(given: object, made: tuple[tuple[str, int], ...]) -> None:
    """R-57: one name, a list, or names with permits."""
    assert policy(pools=given).pools == made


@pytest.mark.parametrize(
    ("given", "made"),
    [("body", ("body",)), (["a", "b.c"], ("a", "b.c")), ({"a"}, ("a",)), ((), ()), (True, True), (False, False)],
)
def test_free_text_of_a_tool(given: object, made: object) -> None:
    """R-41: one name, several, or all arguments."""
    assert policy(free_text=given).free_text == made


@pytest.mark.parametrize(
    ("options", "declares", "effect_free", "repeatable"),
    [
        ({}, False, False, False),
        ({"reads": "k"}, True, True, True),
        ({"writes": "k"}, True, False, False),
        ({"reads": "k", "writes": "j"}, True, False, False),
        ({"reads": "k", "read_only": False}, True, False, False),
        ({"reads": "k", "sequential": True}, True, False, False),
        ({"sequential": True}, True, False, False),
        ({"independent": True}, True, False, False),
        ({"independent": True, "read_only": True}, True, True, True),
        ({"idempotent": True}, False, False, True),
        ({"writes": "k", "idempotent": True}, True, False, True),
        ({"idempotent": False}, False, False, False),
    ],
)
def test_g10_what_is_known_of_a_tools_effect(
    options: dict[str, Any], declares: bool, effect_free: bool, repeatable: bool
) -> None:
    """G10, R-16: only reading means no effect; independence says nothing about effects; what may be repeated is
    declared.
    """
    made = policy(**options)
    assert (made.declares_access, made.effect_free, made.repeatable) == (declares, effect_free, repeatable)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_r69_r71_presets(preset: Any) -> None:
    """R-69, R-71: short reads wait with a deadline, background work stands in a bounded queue; what is given beside a
    preset wins.
    """
    made = policy(preset=preset)
    assert made.when_busy == "wait"
    assert made.max_wait is not None
    assert (made.max_queued is not None) == (preset == "background")
    assert policy(preset=preset, max_wait=1.5).max_wait == 1.5
    assert policy(preset=preset, when_busy="reject").when_busy == "reject"


def test_r25_strict_asks_for_everything() -> None:
    """R-25: a tool without access, limit or retry class is refused, and all that is missing is named at once."""
    told = refusal(lambda: check_strict(policy()))
    assert told.startswith("tool 'tool': strict=True asks for access (")
    assert "; a limit (pools=, max_concurrency= or rate=); a retry class (" in told
    assert "access" not in refusal(lambda: check_strict(policy(reads="k")))
    check_strict(policy(reads="k", pools="crm"))
    check_strict(policy(writes="k", max_concurrency=1, idempotent=False))
    check_strict(policy(independent=True, max_concurrency=1, read_only=False))
    assert "retry class" in refusal(lambda: check_strict(policy(independent=True, pools="crm")))


# ==================================================================== the tower


TOWER_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_concurrency": 0}, "max_concurrency: a whole number, 1 or more; got 0"),
    ({"max_concurrency": True}, "max_concurrency: a whole number, 1 or more; got True"),
    ({"engine": "localhost:6379"}, "engine.url: begins with redis://, rediss:// or unix://; its value is not shown"),
    ({"run_concurrency": 1.5}, "run_concurrency: a whole number, 1 or more; got 1.5"),
    ({"max_calls_per_batch": -3}, "max_calls_per_batch: a whole number, 1 or more"),
    ({"max_queued": -1}, "max_queued: a whole number, 0 or more"),
    ({"max_wait": 0}, "max_wait: seconds, more than 0"),
    ({"timeout": float("nan")}, "timeout: a finite number of seconds"),
    ({"grace": -1}, "grace: seconds, 0 or more"),
    ({"max_result_bytes": 1}, f"max_result_bytes: a whole number, {MIN_RESULT_BYTES} or more"),
    ({"max_batch_bytes": 1}, f"max_batch_bytes: a whole number, {MIN_RESULT_BYTES} or more"),
    (
        {"results": "folder"},
        "results: 'auto', 'memory', 'journal', 'off', the path of a folder with a separator in it, such as './results'",
    ),
    ({"results": ""}, "results: 'auto', 'memory'"),
    ({"results": "./a\0b"}, "results: 'auto', 'memory'"),
    ({"results": 5}, "results: 'auto', 'memory'"),
    ({"results": dict}, "results: 'auto', 'memory'"),
    ({"results": "/nowhere/at/all/results"}, "results: the folder cannot be used: No such file or directory"),
    ({"results": "journal"}, "results: 'journal' needs one: Tower(journal='towerman.db'), or results='memory'"),
    ({"result_lifetime": 0}, "result_lifetime: seconds, more than 0"),
    ({"max_stored_bytes": -1}, "max_stored_bytes: a whole number, 0 or more"),
    ({"count_tokens": 5}, "count_tokens: a function of a text"),
    ({"on_excess": "cut"}, "on_excess: one of 'tell', 'queue'"),
    ({"undeclared": "sequential"}, "undeclared: one of 'ordered', 'exclusive', 'independent'"),
    ({"when_busy": "queue"}, "when_busy: one of 'wait', 'reject', 'defer'"),
    ({"approval_lifetime": 0}, "approval_lifetime: seconds, more than 0; got 0"),
    ({"on_orphan": "keep"}, "on_orphan: one of 'hold', 'release'"),
    ({"on_duplicate": "wait"}, "on_duplicate: one of 'join', 'conflict'"),
    ({"placeholder_guard": "on"}, "placeholder_guard: one of 'refuse', 'warn', 'off'"),
    ({"mode": "watch"}, "mode: one of 'enforce', 'observe'"),
    ({"debug": 1}, "debug: True or False; got 1"),
    ({"strict": "yes"}, "strict: True or False; got 'yes'"),
    ({"journal": 5}, "journal: the path of a file"),
    ({"journal": " "}, "journal: the path of a file"),
    ({"secret": ""}, "secret: text or bytes that nobody can guess; got an empty one"),
    ({"secret": 918273645546}, "secret: text or bytes that nobody can guess; got int"),
    ({"pools": 5}, "pools: a mapping of name to permits or Pool"),
    ({"budgets": 5}, "budgets: a mapping of whom it counts for to Budget"),
    ({"budgets": {"run": 5}}, "budgets.run: a Budget, such as Budget(calls=20, seconds=60); got 5"),
    ({"max_repeats": 0}, 'max_repeats: a whole number, 1 or more, or "any"; got 0'),
    ({"observers": [5]}, "observers: callables that take an Event; got int"),
]


@pytest.mark.parametrize(("options", "told"), TOWER_WRONG, ids=[told.split(":")[0] for _, told in TOWER_WRONG])
def test_every_wrong_option_of_a_tower(options: dict[str, Any], told: str) -> None:
    """DESIGN style 7, R-51: a tower with an option out of its range is not made; the message names it and what is
    allowed.
    """
    assert told in refusal(lambda: Tower(**options))


def test_every_option_of_a_tower_is_checked() -> None:
    """No option of the tower is taken unlooked at."""
    assert set(TOWER_OPTIONS) - {key for options, _ in TOWER_WRONG for key in options} == set()


def test_defaults_of_a_tower() -> None:
    """API section 1: the defaults are what is written there; grace may be 0."""
    made = TowerPolicy(pools={})
    assert (made.max_concurrency, made.run_concurrency, made.max_calls_per_batch) == (32, 8, 25)
    assert (made.max_wait, made.timeout, made.grace, made.max_queued) == (30.0, 300.0, 5.0, 1000)
    assert (made.on_excess, made.undeclared, made.when_busy, made.on_orphan) == ("tell", "ordered", "wait", "hold")
    assert (made.max_result_bytes, made.max_batch_bytes) == (32_768, 131_072)
    assert (made.results, made.result_lifetime, made.max_stored_bytes) == ("auto", 3600.0, 67_108_864)
    assert made.count_tokens is None
    assert made.placeholder_guard == "refuse"
    assert Tower().options == made
    assert TowerPolicy(pools={}, grace=0).grace == 0
