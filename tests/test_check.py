"""`tower.check`: the nine questions of R-140, the scopes in force, and what an operator should know."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from towerman import Budget, CheckReport, PolicyError, Pool, Retry, Tower
from towerman.check.findings import family_of
from towerman.desk import Desk, open_tower


async def handler(number: int = 0) -> int:
    """A handler for every tool."""
    return number


def plain(number: int = 0) -> int:
    """A handler that is no coroutine function."""
    return number


def codes(report: CheckReport) -> list[tuple[str, str, str]]:
    """Severity, code and place of each finding."""
    return [(one.severity, one.code, one.where) for one in report.findings]


def verdicts(report: CheckReport) -> str:
    """The first letters of the nine answers."""
    return "".join(one.verdict[0] for one in report.answers)


def well_declared(**options: Any) -> Tower:
    """A tower about which there is nothing to say."""
    tower = Tower(pools={"crm": Pool(2, max_queued=50)}, **options)
    tower.add_tool(handler, name="read", reads="customer:{number}", pools=["crm"])
    tower.add_tool(handler, name="write", writes="customer:{number}", pools=["crm"], idempotent=True)
    return tower


def test_r140_a_tower_that_says_everything_has_no_finding() -> None:
    """R-140: of declarations that leave nothing open the check says yes, and finds nothing, not even a note."""
    report = well_declared().check(deadline=3_000)
    assert report.ok
    assert report.findings == ()
    assert verdicts(report) == "yyyyyyyuy"
    assert [one.number for one in report.answers] == list(range(1, 10))
    assert repr(report) == "CheckReport(0 errors, 0 warnings, 0 notes)"
    with pytest.raises(AttributeError):
        report.answers = ()  # type: ignore[misc]


def test_r140_the_built_in_desk_is_looked_at(tmp_path: Any) -> None:
    """R-140: the nine questions and the findings of the demo's own tools."""
    report = open_tower(Desk(tmp_path)).check()
    assert verdicts(report) == "yypyyypuy"
    assert codes(report) == [
        ("warning", "write_without_identity", "tool update_ticket"),
        ("warning", "write_without_identity", "tool edit_file"),
        ("warning", "write_without_identity", "tool refund_order"),
        ("note", "needs_approval", "tool refund_order"),
        ("note", "approval_without_secret", "tower"),
        ("note", "no_journal", "tower"),
        ("note", "limit_without_queue_bound", "pool crm"),
    ]
    assert not report.ok


def test_r140_the_nine_questions_are_asked_in_their_order() -> None:
    """R-140: classified, a global limit, small pools, reserved before and released after, waiters removed, wait
    deadline and policy, rate and budget and idempotency apart, tests, traces without arguments: each is asked, in this
    order, and has an answer in words, also of a tower in which nothing is declared.
    """
    about = (
        ("tool", "touches"),
        ("limit", "all runs"),
        ("services", "small limits"),
        ("before the handler starts", "given back"),
        ("waiter", "leave the queue", "never start"),
        ("wait", "deadline", "rule"),
        ("rate", "budget", "idempotency"),
        ("tested", "cancel in the queue", "two runs"),
        ("traces", "argument values"),
    )
    for tower in (Tower(), well_declared()):
        answers = tower.check().answers
        for answer, words in zip(answers, about, strict=True):
            assert all(word in answer.question for word in words), answer.question
            assert answer.verdict in ("yes", "partly", "no", "unknown")
            assert answer.because
        tower.close()


Declare = Callable[[], Tower]


def case(declare: Callable[..., Tower], *found: tuple[str, str, str], verdict: str = "") -> Any:
    """One way to declare things, and what must be found."""
    return pytest.param(declare, list(found), verdict, id=declare.__name__)


def tools(tower: Tower, *several: dict[str, Any], function: Callable[..., Any] = handler) -> Tower:
    """Declare tools that say everything but for what is asked."""
    for number, options in enumerate(several):
        given = {"name": f"t{number}", "independent": True, "read_only": True, "max_concurrency": 2, "max_queued": 5}
        given |= options
        tower.add_tool(function, **{key: value for key, value in given.items() if value is not None})
    return tower


def nothing() -> Tower:
    return Tower()


def silent_ordered() -> Tower:
    return tools(Tower(), {"independent": None})


def silent_exclusive() -> Tower:
    return tools(Tower(undeclared="exclusive"), {"independent": None})


def silent_independent() -> Tower:
    return tools(Tower(undeclared="independent"), {"independent": None}, {})


def observing() -> Tower:
    return tools(Tower(mode="observe"), {})


def debugging() -> Tower:
    return tools(Tower(debug=True), {})


def running_placeholders() -> Tower:
    return tools(Tower(placeholder_guard="off"), {})


def warning_of_placeholders() -> Tower:
    return tools(Tower(placeholder_guard="warn"), {})


def releasing_threads() -> Tower:
    return tools(Tower(on_orphan="release"), {}, function=plain)


def releasing_coroutines() -> Tower:
    return tools(Tower(on_orphan="release"), {})


def queueing_all() -> Tower:
    return tools(Tower(on_excess="queue"), {})


def run_above_process() -> Tower:
    return tools(Tower(max_concurrency=4, run_concurrency=5), {})


def result_above_batch() -> Tower:
    return tools(Tower(max_result_bytes=4000, max_batch_bytes=2000), {})


def bound_below_what_is_told() -> Tower:
    return tools(Tower(max_result_bytes=100, max_batch_bytes=639, max_calls_per_batch=10), {})


def bound_of_what_is_told() -> Tower:
    return tools(Tower(max_result_bytes=100, max_batch_bytes=640, max_calls_per_batch=10), {})


def write_of_unknown_repeat() -> Tower:
    return tools(Tower(), {"read_only": None})


def write_that_says_no() -> Tower:
    return tools(Tower(), {"read_only": None, "idempotent": False})


def retried_on_a_thread() -> Tower:
    return tools(Tower(), {"retry": 3}, function=plain)


def retried_on_the_loop() -> Tower:
    return tools(Tower(), {"retry": 3})


def retried_but_for_timeouts() -> Tower:
    return tools(Tower(), {"retry": Retry(retry_on=ConnectionError)}, function=plain)


def pool_without_bound() -> Tower:
    return tools(Tower(pools={"p": 2}), {"pools": ["p"], "max_queued": None, "max_concurrency": None})


def pool_bounded_by_its_tools() -> Tower:
    return tools(Tower(pools={"p": 2}), {"pools": ["p"]})


def pool_for_which_nobody_waits() -> Tower:
    return tools(Tower(pools={"p": 2}), {"pools": ["p"], "when_busy": "reject", "max_queued": None})


def own_limit_without_bound() -> Tower:
    return tools(Tower(), {"max_queued": None})


def own_limit_that_refuses() -> Tower:
    return tools(Tower(), {"max_queued": None, "when_busy": "reject"})


def deferring_without_bounds() -> Tower:
    return tools(
        Tower(journal=":memory:"),
        {"max_concurrency": None, "max_queued": None, "when_busy": "defer"},
        {"max_queued": 5, "when_busy": "defer", "independent": None, "read_only": None, "writes": "a:{number}",
         "idempotent": False},
    )  # fmt: skip


def pool_unused() -> Tower:
    return tools(Tower(pools={"p": Pool(2, max_queued=1)}), {})


def pool_of_each_run() -> Tower:
    return tools(Tower(pools={"p": Pool(3, max_queued=1, scope="run")}), {"pools": ["p"], "max_concurrency": None})


def pool_of_each_run_above_it() -> Tower:
    return tools(Tower(pools={"p": Pool(8, max_queued=1, scope="run")}), {"pools": ["p"]})


def pool_of_tenants() -> Tower:
    return tools(Tower(pools={"p": Pool(2, max_queued=1, scope="tenant")}), {"pools": ["p"]})


def pool_above_process() -> Tower:
    return tools(Tower(pools={"p": Pool(32, max_queued=1)}), {"pools": ["p"]})


def own_limit_above_process() -> Tower:
    return tools(Tower(), {"max_concurrency": 32})


def no_limits_at_all() -> Tower:
    return tools(Tower(), {"max_concurrency": None})


def blocking() -> Tower:
    return tools(Tower(), {"run_in": "loop"}, function=plain)


def family_half_pooled() -> Tower:
    touching = {"independent": None, "max_concurrency": None}
    return tools(
        Tower(pools={"p": Pool(2, max_queued=1)}),
        {**touching, "reads": "crm:{number}", "pools": ["p"]},
        {**touching, "reads": "crm:{number}/x", "pools": ["p"]},
        {**touching, "reads": ["CRM:all", "repo/x"]},
    )


def family_of_two_pools() -> Tower:
    touching = {"independent": None, "max_concurrency": None}
    return tools(
        Tower(pools={"p": Pool(2, max_queued=1), "q": Pool(2, max_queued=1)}),
        {**touching, "reads": "crm:{number}", "pools": ["p"]},
        {**touching, "reads": "crm:{number}", "pools": ["q"]},
    )


def family_without_pools() -> Tower:
    touching = {"independent": None}
    return tools(Tower(), {**touching, "reads": "crm:{number}"}, {**touching, "reads": lambda number: "crm:1"})


def schemes_that_look_alike() -> Tower:
    return tools(
        Tower(),
        {"independent": None, "reads": "ticket:{number}"},
        {"independent": None, "read_only": None, "idempotent": True, "writes": "tickets:{number}"},
    )


def write_of_a_whole_tree() -> Tower:
    return tools(
        Tower(),
        {"independent": None, "read_only": None, "idempotent": True, "writes": ["log:/**", "file:{number}/**"]},
    )


def sharing(**more: Any) -> Tower:
    """A tower that shares an engine, which nobody asks here."""
    engine = {"url": "redis://localhost:1/0", **more}
    return well_declared(engine=engine, secret="x" * 32)


def engine_without_secret() -> Tower:
    return well_declared(engine="redis://localhost:1/0")


def engine_open() -> Tower:
    return sharing(on_unavailable="open")


def engine_local() -> Tower:
    return sharing(on_unavailable="local", replicas=4)


def test_r06_r140_with_an_engine_the_scope_in_force_is_told() -> None:
    """R-06, DESIGN 12: what counts over all processes is told so: pools, limits of tools, budgets of tenants."""
    tower = Tower(
        engine="redis://localhost:1/0",
        secret="x" * 32,
        pools={"crm": Pool(2, max_queued=5), "own": Pool(2, scope="process"), "each": Pool(2, scope="tenant")},
        budgets={"tenant": {"calls": 5}, "tenant:a": {"calls": 6}, "run": {"calls": 3}},
    )
    tower.add_tool(handler, name="read", reads="customer:{number}", pools=["crm", "own", "each"], max_concurrency=3)
    report = tower.check()
    shared = "all processes that share the engine"
    assert {one.name: (one.scope, shared in one.counts) for one in report.limits} == {
        "process": ("process", False),
        "run": ("run", False),
        "crm": ("cluster", True),
        "own": ("process", False),
        "each": ("tenant", True),
        "tool:read": ("cluster", True),
    }
    assert [(one.name, shared in one.counts) for one in report.budgets] == [
        ("tenant", True),
        ("tenant:a", True),
        ("run", False),
    ]
    assert "share the engine" in report.answers[1].because


@pytest.mark.parametrize(
    ("declare", "found", "verdict"),
    [
        case(sharing),
        case(engine_without_secret, ("note", "engine_without_secret", "tower")),
        case(engine_open, ("warning", "open_without_engine", "tower")),
        case(engine_local, ("note", "no_share_of_a_pool", "tower")),
        case(nothing, ("error", "no_tools", "tower"), verdict="nynyyyyuy"),
        case(silent_ordered, ("warning", "undeclared_access", "tool t0"), verdict="pyyyyyyuy"),
        case(silent_exclusive, ("warning", "undeclared_access", "tool t0"), verdict="pyyyyyyuy"),
        case(silent_independent, ("error", "undeclared_access", "tool t0"), verdict="nyyyyyyuy"),
        case(observing, ("warning", "limits_not_enforced", "tower"), verdict="ynyyyyyuy"),
        case(debugging, ("warning", "debug_tracebacks", "tower"), verdict="yyyyyyyup"),
        case(running_placeholders, ("warning", "placeholders_run", "tower")),
        case(warning_of_placeholders, ("warning", "placeholders_run", "tower")),
        case(releasing_threads, ("error", "orphans_give_places_away", "tower"), verdict="yyypyyyuy"),
        case(releasing_coroutines, ("warning", "orphans_give_places_away", "tower"), verdict="yyypyyyuy"),
        case(queueing_all, ("warning", "no_call_cap", "tower")),
        case(run_above_process, ("note", "limit_without_effect", "tower")),
        case(result_above_batch, ("note", "limit_without_effect", "tower")),
        case(bound_below_what_is_told, ("note", "batch_bound_exceeded", "tower")),
        case(bound_of_what_is_told),
        case(
            write_of_unknown_repeat,
            ("warning", "write_without_identity", "tool t0"),
            ("note", "no_journal", "tower"),
            verdict="yyyyyypuy",
        ),
        case(write_that_says_no, ("note", "no_journal", "tower"), verdict="yyyyyyyuy"),
        case(pool_without_bound, ("note", "limit_without_queue_bound", "pool p")),
        case(pool_bounded_by_its_tools),
        case(pool_for_which_nobody_waits),
        case(own_limit_without_bound, ("note", "limit_without_queue_bound", "tool t0")),
        case(own_limit_that_refuses),
        case(
            deferring_without_bounds,
            ("warning", "journal_in_memory", "tower"),
            ("warning", "deferred_in_memory", "tool t0"),
            ("warning", "deferred_in_memory", "tool t1"),
            ("note", "deferred_without_queue_bound", "tool t0"),
            ("note", "deferring_without_limit", "tool t0"),
            ("note", "deferred_write_may_need_a_person", "tool t1"),
        ),
        case(pool_unused, ("warning", "unused_pool", "pool p")),
        case(pool_of_each_run, ("warning", "run_scope_protects_nothing", "pool p"), verdict="yynyyyyuy"),
        case(
            pool_of_each_run_above_it,
            ("warning", "run_scope_protects_nothing", "pool p"),
            ("note", "limit_without_effect", "pool p"),
        ),
        case(pool_of_tenants, ("note", "tenant_scope", "pool p"), verdict="yyyyyyyuy"),
        case(pool_above_process, ("note", "limit_without_effect", "pool p")),
        case(own_limit_above_process, ("note", "limit_without_effect", "tool t0")),
        case(no_limits_at_all, ("note", "no_small_pools", "tower"), verdict="yynyyyyuy"),
        case(retried_on_a_thread, ("note", "timeout_not_retried", "tool t0")),
        case(retried_on_the_loop),
        case(retried_but_for_timeouts),
        case(blocking, ("warning", "blocks_the_loop", "tool t0")),
        case(family_half_pooled, ("warning", "family_without_common_pool", "tool t2"), verdict="yypyyyyuy"),
        case(family_of_two_pools, ("warning", "family_without_common_pool", "tools t0, t1")),
        case(family_without_pools),
        case(schemes_that_look_alike, ("warning", "similar_resources", "tools t0, t1")),
        case(write_of_a_whole_tree, ("note", "broad_write", "tool t0")),
    ],
)
def test_r140_every_finding(declare: Declare, found: list[tuple[str, str, str]], verdict: str) -> None:
    """R-140, R-136: each declaration that an operator should know of is found, at its place, and nothing else is."""
    report = declare().check()
    assert codes(report) == found
    if verdict:
        assert verdicts(report) == verdict
    assert report.ok == (not any(severity != "note" for severity, _, _ in found))
    for finding in report.findings:
        assert finding.message.endswith(".")
        assert finding.fix


def test_r12_r118_attempts_are_told_apart_from_limits() -> None:
    """R-12, R-118: what is tried again is told beside rates and budgets, not among the limits; a run that is too short
    for all attempts is found.
    """
    tower = tools(Tower(), {"retry": 3, "timeout": 10, "max_wait": 5}, {"timeout": 10, "max_wait": 5})
    answer = tower.check().answers[6]
    assert answer.question == "Are rate, budget and idempotency kept apart from concurrency?"
    assert answer.because.endswith("No tool has an effect. Attempts: t0 3.")
    assert codes(tower.check(deadline=30)) == []
    assert codes(tower.check(deadline=29)) == [("note", "attempts_above_deadline", "tool t0")]
    assert codes(tower.check(deadline=9)) == [
        ("warning", "timeout_above_deadline", "tool t0"),
        ("warning", "timeout_above_deadline", "tool t1"),
    ]


def test_times_above_a_runs_deadline_are_found() -> None:
    """R-99: where the operator says how long a run may last, timeouts and waits above that are findings."""
    tower = tools(
        Tower(max_wait=20, timeout=40),
        {},
        {"timeout": 10, "max_wait": 5},
        {"timeout": 10, "when_busy": "reject"},
    )
    assert codes(tower.check(deadline=15)) == [
        ("warning", "timeout_above_deadline", "tool t0"),
        ("warning", "wait_above_deadline", "tool t0"),
    ]
    assert codes(tower.check(deadline=40)) == []
    assert codes(tower.check()) == []
    with pytest.raises(PolicyError, match="check: deadline"):
        tower.check(deadline=0)


def test_the_gravest_come_first_and_alike_ones_are_read_together() -> None:
    """R-140: errors before warnings before notes; in the text, what differs in the place only is said once."""
    tower = tools(
        Tower(undeclared="independent", max_result_bytes=4000, max_batch_bytes=2000),
        {"read_only": None},
        {"read_only": None},
        {"independent": None},
        {"independent": None},
    )
    report = tower.check()
    assert [one.severity for one in report.findings] == ["error"] * 2 + ["warning"] * 2 + ["note"] * 2
    assert (len(report.of("error")), len(report.of("warning")), len(report.of("note"))) == (2, 2, 2)
    text = str(report)
    assert text.count("[undeclared_access]") == text.count("[write_without_identity]") == 1
    assert "tools t0, t1: It may have an effect" in text
    assert "Findings: 2 errors, 2 warnings, 2 notes" in text


def test_the_text_shows_answers_scopes_and_fixes() -> None:
    """R-140, R-01: the text has the nine questions, each limit with its scope in force, and a fix for each finding."""
    tower = tools(
        Tower(pools={"each": Pool(2, max_queued=3, scope="run"), "idle": Pool(1, scope="tenant")}),
        {"pools": ["each"]},
        {"max_wait": 2, "when_busy": "wait", "max_concurrency": None, "max_queued": None},
        {"when_busy": "reject"},
    )
    text = str(tower.check())
    lines = text.splitlines()
    assert lines[0] == "Nine questions before enabling concurrent tools"
    assert "6  yes      Has every wait a deadline and a rule?" in lines
    assert "            At most 2 to 30 s, 1000 calls in all queues; t2: refused at once." in lines
    table = [line.split("  ") for line in lines if line.startswith(("process ", "run ", "each ", "idle ", "tool:"))]
    assert [[cell.strip() for cell in row if cell.strip()] for row in table] == [
        ["process", "32", "1000", "all runs of this process together; another process counts for itself", "every call"],
        ["run", "8", "-", "each run alone", "every call"],
        ["each", "2", "3", "each run alone", "t0"],
        ["idle", "1", "-", "the runs of one tenant together, in this process", "nobody"],
        ["tool:t0", "2", "5", "all runs of this process together; another process counts for itself", "t0"],
        ["tool:t2", "2", "5", "all runs of this process together; another process counts for itself", "t2"],
    ]
    assert "fix: scope='process'" in text
    assert max(map(len, lines)) <= 120


def test_r1_budgets_are_told_apart_from_limits_and_rates() -> None:
    """R-01, R-12, R-140: budgets stand in a table of their own with whom each counts for, and in the answer that keeps
    rate, budget and concurrency apart.
    """
    tower = well_declared(
        budgets={"run": Budget(calls=20, seconds=60), "tenant:a": Budget(cost=5, per="day"), "batch": Budget(calls=9)}
    )
    report = tower.check()
    assert report.ok
    assert "budgets: run 20 calls, 60 seconds; tenant:a 5 cost per day; batch 9 calls" in report.answers[6].because
    assert [(one.name, one.says) for one in report.budgets] == [
        ("run", "20 calls, 60 seconds"),
        ("tenant:a", "5 cost per day"),
        ("batch", "9 calls"),
    ]
    assert report.budgets[1].counts == "the runs of a, in this process"
    text = str(report)
    assert "Budgets in force" in text
    assert "tenant:a  5 cost per day        the runs of a, in this process" in text
    assert "Budgets in force" not in str(well_declared().check())
    assert report.to_dict()["budgets"][0]["name"] == "run"  # type: ignore[index]


def test_units_that_lead_nowhere_are_found() -> None:
    """R-140: a budget of a unit that no tool spends is a warning, a unit that no budget limits a note; where a handler
    may charge anything, nobody can tell.
    """
    tower = well_declared(budgets={"run": Budget(mails=3, calls=9)})
    assert codes(tower.check()) == [("warning", "unit_that_nobody_spends", "budget run")]
    tower.add_tool(handler, name="mail", writes="mail", pools=["crm"], idempotent=True)
    tower.policy("mail", spends={"letters": 1})
    assert codes(tower.check())[1] == ("note", "unit_without_budget", "tool mail")
    tower.policy("mail", spends={"mails": 1})
    assert tower.check().findings == ()
    tower.policy("mail", spends=lambda number: number)
    assert tower.check().findings == ()


def test_json_keys_are_stable() -> None:
    """R-140: `to_dict` is plain JSON, and these are its keys, for programs."""
    told = json.loads(json.dumps(tools(Tower(pools={"p": Pool(2)}), {}).check().to_dict()))
    assert set(told) == {"ok", "answers", "limits", "budgets", "findings"}
    assert told["budgets"] == []
    assert told["ok"] is False
    assert set(told["answers"][0]) == {"number", "question", "verdict", "because"}
    assert told["limits"][2] == {
        "name": "p",
        "permits": 2,
        "scope": "process",
        "counts": "all runs of this process together; another process counts for itself",
        "max_queued": None,
        "tools": [],
    }
    assert told["findings"] == [
        {
            "severity": "warning",
            "code": "unused_pool",
            "where": "pool p",
            "message": "No tool takes permits of it.",
            "fix": "pools=['p'] on the tools",
        }
    ]


def test_long_lists_are_cut() -> None:
    """R-140: a tower of hundreds of tools has a text that can be read; the JSON has them all."""
    tower = tools(Tower(), *[{"independent": None, "max_concurrency": None} for _ in range(200)])
    report = tower.check()
    assert len(report.of("warning")) == 200
    assert "and 193 more: It does not say what it touches" in " ".join(str(report).split())
    assert len(str(report)) < 5_000


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("ticket:{id}", "ticket"),
        ("CRM:all", "crm"),
        ("repo/x:y", ""),
        ("plain", ""),
        ("callable pick", ""),
        ("callable a:b", ""),
    ],
)
def test_the_family_of_a_template(template: str, family: str) -> None:
    """R-16: a family is what stands before the first colon, as for keys; a callable has none."""
    assert family_of(template) == family


def test_a_check_calls_nothing() -> None:
    """R-140: neither handlers nor callables of resources are called, and the tower is as before."""

    def never(number: int = 0) -> str:
        raise AssertionError("called")

    tower = Tower()
    tower.add_tool(never, name="never", reads=never)
    before = tower.statistics()
    tower.check()
    assert tower.statistics() == before
