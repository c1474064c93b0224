"""The public Tower and Run: declaring tools, schemas, runs, batch results, statistics, ends."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import pickle
import threading
import weakref
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kit import Stage, here, on_stage, run_batch

from towerman import BatchResult, Call, Context, Event, InputError, PolicyError, Pool, Result, Tower

stage = pytest.fixture(on_stage)


# ==================================================================== declaring tools


def test_tools_are_declared_in_three_ways(stage: Stage) -> None:
    """API: bare, called, and without decorating; the function stays what it was."""
    tower = stage.tower()

    @tower.tool
    async def bare(x: int) -> int:
        return x

    @tower.tool(name="named", description="Does it.", independent=True)
    def called(x: int) -> int:
        return x + 1

    async def added(x: int) -> int:
        return x + 2

    tower.add_tool(added, independent=True)
    assert tower.tools == ("bare", "named", "added")
    assert called(1) == 2
    assert asyncio.iscoroutinefunction(bare)
    done = run_batch(stage, tower, [Call(name, {"x": 10}) for name in tower.tools])
    assert [result.value for result in done] == [10, 11, 12]


def test_a_name_is_taken_once() -> None:
    """A second tool of one name is refused, with the fix; the first stays."""
    tower = Tower()

    @tower.tool
    def work() -> str:
        return "first"

    with pytest.raises(PolicyError, match=r"tool 'work': this name is taken; give one of the two another name="):
        tower.add_tool(work)
    assert tower.tools == ("work",)


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda tower: tower.add_tool(5), "a tool is made of a function; got int"),
        (lambda tower: tower.add_tool(lambda: 1), "needs name="),
        (lambda tower: tower.add_tool(print, name="a b"), "tool name: 1 to 128 letters"),
        (lambda tower: tower.add_tool(work, reads="k:{nobody}"), "nobody"),
        (lambda tower: tower.add_tool(work, pools=["nobody"]), "no pool 'nobody'"),
        (lambda tower: tower.add_tool(work, timout=5), "no option 'timout'; did you mean 'timeout'?"),
        (lambda tower: tower.add_tool(work, schema=5), "schema: a JSON schema as a mapping; got int"),
        (lambda tower: tower.add_tool(work, weight=33), "weight 33 is more than the tower's max_concurrency 32"),
    ],
)
def test_a_wrong_declaration_comes_early(declare: Any, told: str) -> None:
    """DESIGN style 7: a mistake in a declaration is an exception at once, naming the tool, the option and the fix."""
    tower = Tower()
    with pytest.raises(PolicyError) as caught:
        declare(tower)
    assert told in str(caught.value)
    assert tower.tools == ()
    assert "tool:work" not in tower.statistics().pools


def work(x: int = 1) -> int:
    """Do some work.

    Args:
        x: how much of it.
    """
    return x


def test_r25_a_strict_tower_refuses_what_says_too_little() -> None:
    """R-25: strict=True: a tool without access, limit or retry class is refused when it is declared, not when it is
    called.
    """
    tower = Tower(strict=True, pools={"crm": 1})
    with pytest.raises(PolicyError, match="strict=True asks for access"):
        tower.add_tool(work)
    tower.add_tool(work, reads="k:{x}", pools="crm")
    assert tower.tools == ("work",)


def test_a_tools_own_limit_is_a_pool_of_the_process() -> None:
    """R-55, R-62: `max_concurrency` of a tool is seen under the tool's name."""
    tower = Tower()
    tower.add_tool(work, max_concurrency=3)
    assert tower.statistics().pools["tool:work"].limit == 3


def test_an_undeclared_tool_logs_a_hint_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """API, `undeclared`: the first use of a tool that declares no access logs one hint that names it and the fix."""
    caplog.set_level(logging.INFO, logger="towerman")
    tower = stage.tower()

    @tower.tool
    async def vague(secret: str) -> str:
        return secret

    @tower.tool(independent=True)
    async def clear() -> str:
        return "done"

    for _ in range(3):
        assert run_batch(stage, tower, [Call("vague", {"secret": "S3CRET"})] * 2 + [Call("clear", {})]).ok
    (hint,) = [record.getMessage() for record in caplog.records if record.name == "towerman"]
    assert "'vague'" in hint
    assert "reads=" in hint
    assert "S3CRET" not in hint


# ==================================================================== schemas


def test_schemas_from_signatures() -> None:
    """Issue item 7: name, description and arguments of each tool in the provider's form; a Context is not an
    argument.
    """
    tower = Tower()

    @tower.tool(reads="customer:{customer_id}")
    async def read_customer(customer_id: int, ctx: Context[None], fields: list[str] | None = None) -> dict[str, int]:
        """Read one customer.

        Args:
            customer_id: number on the invoice
        """
        return {}

    (openai,) = tower.schemas("openai")
    function: Any = openai["function"]
    assert (function["name"], function["description"]) == ("read_customer", "Read one customer.")
    assert function["parameters"]["required"] == ["customer_id"]
    assert set(function["parameters"]["properties"]) == {"customer_id", "fields"}
    assert function["parameters"]["properties"]["customer_id"]["description"] == "number on the invoice"
    (anthropic,) = tower.schemas("anthropic")
    assert anthropic["name"] == "read_customer"
    assert anthropic["input_schema"]["required"] == ["customer_id"]  # type: ignore[index]
    assert tower.schemas() == tower.schemas("openai")
    json.dumps(tower.schemas("towerman"))
    with pytest.raises(Exception, match="openai"):
        tower.schemas("nobody")


def test_a_schema_of_ones_own(stage: Stage) -> None:
    """API: with a JSON schema of its own the handler gets the arguments as keywords, and the schema is what providers
    see.
    """
    tower = stage.tower()
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }

    @tower.tool(schema=schema, independent=True)
    async def handler(**arguments: object) -> object:
        return arguments

    assert tower.schemas("anthropic")[0]["input_schema"] == schema
    done = run_batch(
        stage, tower, [Call("handler", '{"a": 1}'), Call("handler", '{"a": "x"}'), Call("handler", '{"b": 1}')]
    )
    assert done[0].value == {"a": 1}
    assert [result.code for result in done][1:] == ["invalid_arguments"] * 2


def test_provider_options() -> None:
    """API: the provider's own switch for several calls in one response; the tower's limits do not depend on it."""
    assert Tower.provider_options("openai") == {"parallel_tool_calls": False}
    assert Tower().provider_options("openai", parallel=True) == {"parallel_tool_calls": True}
    assert "disable_parallel_tool_use" in json.dumps(Tower.provider_options("anthropic"))


# ==================================================================== runs


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"priority": 1.5}, "priority: a whole number"),
        ({"priority": True}, "priority: a whole number"),
        ({"run_id": "a b"}, "run_id: 1 to 128 letters"),
        ({"run_id": ""}, "run_id: 1 to 128 letters"),
        ({"tenant": "a:b"}, "tenant: 1 to 128 letters"),
        ({"deadline": -1}, "deadline: seconds from now, 0 or more, or an aware datetime; got -1"),
        ({"deadline": True}, "deadline: seconds from now"),
        ({"deadline": float("nan")}, "deadline: seconds from now"),
        ({"deadline": "soon"}, "deadline: seconds from now, 0 or more, or an aware datetime; got str"),
        ({"deadline": datetime(2030, 1, 1)}, "deadline: a datetime needs a time zone"),  # noqa: DTZ001
        ({"max_concurrency": 0}, "max_concurrency: a whole number, 1 or more"),
        ({"fail_fast": 1}, "fail_fast: True or False"),
        ({"allow": 5}, "allow: tool names or patterns such as 'crm_*'; got 5"),
        ({"deny": [None]}, "deny: tool names or patterns such as 'crm_*'; got NoneType"),
        ({"allow": ""}, "allow: tool names or patterns"),
    ],
)
def test_every_wrong_option_of_a_run(options: dict[str, Any], told: str) -> None:
    """DESIGN style 7: a wrong option of a run is told at once, and no run was made."""
    tower = Tower()
    with pytest.raises(PolicyError) as caught:
        tower.run(**options)
    assert told in str(caught.value)
    assert tower.statistics().runs == 0
    with pytest.raises(PolicyError):
        asyncio.run(tower.execute([], **options))


def test_runs_have_ids(stage: Stage) -> None:
    """R-129: a run that is given no id gets one that no other has, over towers too."""
    towers = [stage.tower(), stage.tower()]

    async def main() -> None:
        ids = set()
        for tower in towers:
            for _ in range(3):
                async with tower.run() as run:
                    ids.add(run.run_id)
        assert len(ids) == 6
        async with towers[0].run("mine") as run:
            assert run.run_id == "mine"

    stage.run(main())


def test_several_batches_of_one_run(stage: Stage) -> None:
    """API: a run takes many batches, one after another or side by side; `last_batch` is the one that ended last."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work(n: int, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return n

    async def main() -> None:
        async with tower.run() as run:
            assert run.last_batch is None
            slow = asyncio.ensure_future(run.execute([Call("work", {"n": 1, "seconds": 2})]))
            await asyncio.sleep(0.1)
            quick = await run.execute([Call("work", {"n": 2, "seconds": 1})])
            assert [result.value for result in quick] == [2]
            assert run.last_batch is not None
            assert [result.value for result in run.last_batch] == [2]
            done = await slow
            assert [result.value for result in done] == [1]
            assert [result.value for result in run.last_batch] == [1]

    stage.run(main())


def test_calls_come_in_many_shapes(stage: Stage) -> None:
    """API: Call objects, mappings, JSON text, a provider's message; a tuple as well as a list."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def echo(x: int) -> int:
        return x

    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "echo", "arguments": '{"x": 1}'}}],
    }
    for calls in (
        [Call("echo", {"x": 1}, "c")],
        (Call("echo", {"x": 1}, "c"),),
        [{"tool": "echo", "arguments": {"x": 1}, "id": "c"}],
        message,
        json.dumps(message),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "echo", "input": {"x": 1}}]},
    ):
        done = run_batch(stage, tower, calls)
        assert [(result.call_id, result.value) for result in done] == [("c", 1)], calls


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (Call("echo", {"x": 1}, ["a"]), r"\[0\].id: text is wanted"),  # type: ignore[arg-type]
        (Call("echo", {"x": 1}, "a", 5), r"\[0\].needs: a list of ids is wanted"),  # type: ignore[arg-type]
        (Call("echo", {"x": 1}, "a", [None]), r"\[0\].needs\[0\]: the id of a call is wanted"),  # type: ignore[list-item]
        (Call("echo", {"x": 1}, idempotency_key=["k"]), r"\[0\].idempotency_key"),  # type: ignore[arg-type]
    ],
)
def test_calls_with_fields_of_a_wrong_type_are_told(stage: Stage, call: Call, told: str) -> None:
    """DESIGN style 7: a Call of our own making is checked like any other input: the message names the place."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def echo(x: int) -> int:
        return x

    with pytest.raises(InputError, match=told):
        run_batch(stage, tower, [call])


def test_calls_with_odd_fields_still_get_their_results(stage: Stage) -> None:
    """G1: no id, no arguments, arguments or a name that are no text: one result each, in every form."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def echo(x: int = 1) -> int:
        return x

    odd: Any = [
        Call("echo", {"x": 1}, None),
        Call("echo", None, "a"),
        Call(["echo"], {}, "b"),
        Call("echo", b"{}", "c"),
    ]  # type: ignore[arg-type]
    done = run_batch(stage, tower, odd)
    assert [result.code for result in done] == [None, None, "unknown_tool", "invalid_arguments"]
    for form in ("openai", "anthropic", "towerman"):
        assert len(done.turn(form)) >= 2
    assert repr(done._batch.calls).count("Call(") == 4


def test_execute_in_a_run_of_its_own(stage: Stage) -> None:
    """API: `tower.execute` is one batch in a run of its own, which is closed afterwards, also after a failure."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work(ctx: Context[str]) -> str:
        return f"{ctx.run_id} {ctx.deps}"

    done = run_batch(stage, tower, [Call("work", {})], run_id="mine", deps="mine too")
    assert done[0].content == "mine mine too"
    assert tower.statistics().runs == 0
    with pytest.raises(ValueError):
        run_batch(stage, tower, "no batch at all")
    assert tower.statistics().runs == 0


# ==================================================================== batch results


def two_results(stage: Stage) -> BatchResult:
    """An answer and a refusal, from an OpenAI message."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def echo(x: str) -> str:
        return x

    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": '{"x": "S3CRET"}'}}
        for n, name in enumerate(("echo", "nobody"))
    ]
    return run_batch(stage, tower, {"role": "assistant", "content": "I look.", "tool_calls": calls})


def test_a_batch_result_is_a_sequence(stage: Stage) -> None:
    """API: length, index, slice, iteration, membership, truth."""
    done = two_results(stage)
    assert len(done) == 2
    assert done
    assert done[0].ok
    assert done[-1].code == "unknown_tool"
    assert done[:1] == (done[0],)
    assert list(done) == [done[0], done[1]]
    assert [result.index for result in reversed(done)] == [1, 0]
    assert done[1] in done
    assert done.index(done[1]) == 1
    assert not done.ok
    with pytest.raises(IndexError):
        done[2]


def test_messages_and_turn(stage: Stage) -> None:
    """API: `messages` are the results, `turn` has the assistant message before them; the form is that of the input,
    or as asked.
    """
    done = two_results(stage)
    messages = done.messages()
    assert [(message["role"], message["tool_call_id"]) for message in messages] == [("tool", "c0"), ("tool", "c1")]
    turn = done.turn()
    assert turn[0]["content"] == "I look."
    assert turn[1:] == messages
    (blocks,) = done.messages("anthropic")
    assert [block["tool_use_id"] for block in blocks["content"]] == ["c0", "c1"]  # type: ignore[attr-defined]
    assert blocks["content"][1]["is_error"] is True  # type: ignore[index]
    assert len(done.messages("towerman")) == 2


def test_r97_the_notice_reaches_the_model(stage: Stage) -> None:
    """R-96, R-97: what was not run for the cap is told in the messages too, where the model reads it."""
    tower = stage.tower(max_calls_per_batch=2)

    @tower.tool(independent=True)
    async def fetch(n: int) -> int:
        return n

    done = run_batch(stage, tower, [Call("fetch", {"n": n}, f"c{n}") for n in range(5)])
    assert done.notice == done.notice or ""
    assert done.notice is not None
    assert "2 of 5" in done.notice
    assert "2 of 5" in json.dumps(done.messages("openai"))


def test_g8_nothing_shows_values(stage: Stage) -> None:
    """G8: reprs of calls, results, batches, runs, towers and statistics show names, sizes and codes."""
    done = two_results(stage)
    tower = stage.towers[0]
    shown = [
        repr(done),
        repr(list(done)),
        repr(tower),
        repr(tower.statistics()),
        repr(tower.run("r")),
        repr(done._batch),
    ]
    assert "S3CRET" not in "".join([*shown, repr(done._batch.calls)])
    assert shown[0] == "BatchResult(2 calls: 1 ok, 1 rejected)"
    assert (
        shown[1] == "[Result(0, 'echo', 'ok', 6 characters), "
        "Result(1, <unknown tool>, 'rejected', code='unknown_tool', 145 characters)]"
    )
    assert shown[2] == "Tower(1 tools, 0 runs)"
    assert shown[4] == "Run('r', open, 0 batches at work)"
    asyncio.run(tower._runs.popitem() and asyncio.sleep(0))
    tower._core.gate.close_flow(next(iter(tower._core.gate._flows.values())))


def test_results_are_frozen_and_travel(stage: Stage) -> None:
    """API: a Result cannot be changed; copies and pickles are equal to it."""
    done = two_results(stage)
    with pytest.raises(AttributeError, match="frozen"):
        done[0].outcome = "error"
    with pytest.raises(AttributeError, match="frozen"):
        del done[0].outcome
    assert copy.copy(done[0]) is done[0]
    again = pickle.loads(pickle.dumps(done[0]))
    assert again == done[0]
    assert again != done[1]
    assert again != "something else"
    assert isinstance(again, Result)


def test_timeline_and_spans(stage: Stage) -> None:
    """R-133: each call's span has its index, its wait and its run apart; the drawing names tools and codes, never
    values.
    """
    tower = stage.tower(max_concurrency=1, timeout=2.0, grace=0.5)

    @tower.tool(independent=True)
    async def work(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "S3CRET"

    @tower.tool(independent=True)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 4)

    async def main() -> BatchResult:
        async with tower.run() as other, tower.run() as run:
            first = asyncio.ensure_future(other.execute([Call("work", {"seconds": 1})]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            done = await run.execute([Call("work", {"seconds": 1.5}), Call("nobody", {}), Call("deaf", {})])
            before = done.spans()
            assert (before[2].ended, before[2].still_running) == (None, True)
            await first
        await stage.settled(tower)
        return done

    done = stage.run(main())
    one, two, three = done.spans()
    assert (one.queued, one.started, one.sealed) == (0.0, pytest.approx(1.0), pytest.approx(2.5))
    assert (two.queued, two.started, two.tool, two.code) == (None, None, "<unknown tool>", "unknown_tool")
    assert (three.started, three.sealed) == (pytest.approx(2.5), pytest.approx(5.0))
    assert (three.ended, three.still_running) == (pytest.approx(6.5), False)
    drawn = done.timeline(width=80)
    assert "S3CRET" not in drawn
    assert "handler_timeout" in drawn
    assert max(map(len, drawn.splitlines())) <= 80


# ==================================================================== statistics


def test_statistics_name_pools_as_people_do(stage: Stage) -> None:
    """R-06, R-132: the process, named pools, a tool's own limit, a run by its id, pools of runs and tenants, each
    with its scope.
    """
    tower = stage.tower(
        max_concurrency=5,
        run_concurrency=3,
        pools={"crm": 2, "own": Pool(1, scope="run"), "theirs": Pool(4, scope="tenant", reserve=1)},
    )

    @tower.tool(independent=True, pools=["crm", "own", "theirs"], max_concurrency=1)
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run("one", tenant="ann") as one, tower.run("two") as two:
            tasks = [asyncio.ensure_future(run.execute([Call("work", {})])) for run in (one, two)]
            await asyncio.sleep(0.5)
            pools = tower.statistics().pools
            assert {name: (pool.scope, pool.limit, pool.held) for name, pool in pools.items()} == {
                "process": ("process", 5, 1),
                "crm": ("process", 2, 1),
                "tool:work": ("process", 1, 1),
                "run:one": ("run", 3, 1),
                "own@run:one": ("run", 1, 1),
                "theirs@tenant:ann": ("tenant", 4, 1),
                "run:two": ("run", 3, 0),
                "own@run:two": ("run", 1, 0),
                "theirs@tenant:": ("tenant", 4, 0),
            }
            assert pools["tool:work"].queued == 1
            await asyncio.gather(*tasks)
        assert set(tower.statistics().pools) == {"process", "crm", "tool:work"}

    stage.run(main())


def test_runs_that_share_an_id_are_both_seen(stage: Stage) -> None:
    """R-132: two open runs of one id are two lines in the statistics."""
    tower = stage.tower()

    async def main() -> None:
        async with tower.run("same"), tower.run("same"):
            assert set(tower.statistics().pools) == {"process", "run:same", "run:same (2)"}

    stage.run(main())


def test_statistics_are_a_frozen_snapshot(stage: Stage) -> None:
    """API: what was seen does not change afterwards."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return "done"

    before = tower.statistics()
    run_batch(stage, tower, [Call("work", {}), Call("nobody", {})])
    after = tower.statistics()
    assert before.outcomes.get("ok", 0) == 0
    assert (after.outcomes["ok"], after.outcomes["rejected"], after.rejections) == (1, 1, {"unknown_tool": 1})
    with pytest.raises(AttributeError):
        after.runs = 5  # type: ignore[misc]


def test_tenant_pools_go_with_their_last_run(stage: Stage) -> None:
    """R-81: pools of runs and tenants are forgotten with the last who could use them, not before, also when an orphan
    still holds one.
    """
    tower = stage.tower(pools={"theirs": Pool(1, scope="tenant")}, timeout=1.0, grace=0.1)

    @tower.tool(independent=True, pools=["theirs"])
    async def deaf() -> str:
        return await stage.stubborn("deaf", 5)

    @tower.tool(independent=True, pools=["theirs"])
    async def quick() -> str:
        return "done"

    async def main() -> None:
        async with tower.run(tenant="ann") as one:
            await one.execute([Call("deaf", {})])
        assert tower.statistics().pools["theirs@tenant:ann"].orphaned == 1
        async with tower.run(tenant="ann") as two:
            task = asyncio.ensure_future(two.execute([Call("deaf", {})]))
            await asyncio.sleep(1)
            assert tower.statistics().pools["theirs@tenant:ann"].queued == 1
            await task
            await stage.settled(tower)
            async with tower.run(tenant="bob"):
                pass  # its end forgets what nobody can use any more: not the pool of a tenant with an open run
            assert (await two.execute([Call("quick", {})])).ok
        async with tower.run(tenant="bob"):
            pass
        assert set(tower.statistics().pools) == {"process"}

    stage.run(main())


# ==================================================================== ends


def test_a_tower_is_an_async_and_a_plain_context_manager(stage: Stage) -> None:
    """API: `async with Tower()` and `with Tower()`; afterwards it takes nothing new and says so."""
    made: list[Event] = []
    tower = stage.tower(observers=[made.append])

    @tower.tool(independent=True)
    async def work() -> str:
        return "done"

    async def main() -> None:
        async with tower as same:
            assert same is tower
            assert (await tower.execute([Call("work", {})])).ok
        assert [result.code for result in await tower.execute([Call("work", {})])] == ["run_closed"]

    stage.run(main())
    assert {event.kind for event in made} >= {"batch_started", "finished", "batch_finished"}
    with stage.tower() as plain:
        plain.add_tool(work, independent=True)
        assert run_batch(stage, plain, [Call("work", {})]).ok
    assert [result.code for result in run_batch(stage, plain, [Call("work", {})])] == ["run_closed"]
    for one in (tower, plain):
        one._closed = False  # so that the look afterwards can ask for its capacity


def test_closing_a_tower_does_not_add_up_graces(stage: Stage) -> None:
    """G12: five runs with handlers that ignore every cancel: the tower is closed after one grace, not five."""
    tower = stage.tower(grace=2.0)

    @tower.tool(independent=True)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 100)

    async def main() -> None:
        runs = [tower.run() for _ in range(5)]
        tasks = [asyncio.ensure_future(run.execute([Call("deaf", {})])) for run in runs]
        await asyncio.sleep(1)
        await tower.aclose()
        assert here().time() == pytest.approx(3.0)
        for task in tasks:
            assert [result.code for result in await task] == ["cancelled"]
        assert tower.statistics().runs == 0
        await stage.settled(tower)

    stage.run(main())
    tower._closed = False


def test_closing_a_tower_is_cancelled(stage: Stage) -> None:
    """S16: whoever closes the tower gives up: every run is closed all the same, then the cancel goes on."""
    tower = stage.tower(grace=2.0)

    @tower.tool(independent=True)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 10)

    async def main() -> None:
        runs = [tower.run() for _ in range(3)]
        tasks = [asyncio.ensure_future(run.execute([Call("deaf", {})])) for run in runs]
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await tower.aclose()
        assert tower.statistics().runs == 0
        await asyncio.gather(*tasks)
        await stage.settled(tower)
        assert not tower._core.gate._flows

    stage.run(main())
    tower._closed = False


def test_closing_twice_is_nothing(stage: Stage) -> None:
    """API: a run and a tower may be closed again."""
    tower = stage.tower()

    async def main() -> None:
        run = tower.run()
        await run.aclose()
        await run.aclose()
        await tower.aclose()
        await tower.aclose(grace=0)

    stage.run(main())
    tower.close()
    tower._closed = False


def test_closed_towers_leave_no_thread(stage: Stage) -> None:
    """G12: worker threads and the observers' thread end with the tower, on both ways to close it."""
    for how in ("async", "plain"):
        before = set(threading.enumerate())
        tower = stage.tower(observers=[lambda event: None])

        @tower.tool(independent=True)
        def in_thread() -> str:
            return "done"

        async def main(tower: Tower = tower, how: str = how) -> None:
            async with tower.run() as run:
                assert (await run.execute([Call("in_thread", {})] * 4)).ok
            if how == "async":
                await tower.aclose()

        stage.run(main())
        if how == "plain":
            tower.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(30)
            assert not thread.is_alive(), thread.name
        tower._closed = False


def test_a_tower_that_is_dropped_goes(stage: Stage) -> None:
    """R-81: nothing keeps a tower that nobody uses: no loop, timer, thread or registry."""

    async def main() -> weakref.ref[Tower]:
        tower = Tower()

        @tower.tool(independent=True)
        async def work() -> str:
            return "done"

        assert (await tower.execute([Call("work", {})])).ok
        return weakref.ref(tower)

    gone = asyncio.run(main())
    gc.collect()
    assert gone() is None


def test_observers_come_and_go(stage: Stage) -> None:
    """API: an observer may be added and removed while the tower is used; what is no callable is refused."""
    tower = stage.tower()
    seen: list[Event] = []

    @tower.tool(independent=True)
    async def work() -> str:
        return "done"

    run_batch(stage, tower, [Call("work", {})])
    tower.add_observer(seen.append)
    run_batch(stage, tower, [Call("work", {})], run_id="seen")
    tower.flush()
    count = len(seen)
    assert {event.run_id for event in seen} == {"seen"}
    tower.remove_observer(seen.append)
    with pytest.raises(PolicyError, match="observers"):
        tower.add_observer(5)  # type: ignore[arg-type]
    assert count >= 4
    tower.close()
    tower._closed = False


@pytest.mark.parametrize("wrong", [-1, float("nan"), "5"])
def test_flush_waits_so_many_seconds(wrong: Any) -> None:
    """A wait without sense is refused; without observers there is nothing to wait for."""
    tower = Tower(observers=[lambda event: None])
    with pytest.raises(PolicyError, match="timeout"):
        tower.flush(wrong)
    assert tower.flush(0)
    assert Tower().flush()


def test_deadlines_are_instants_or_seconds(stage: Stage) -> None:
    """API: an aware datetime and seconds mean the same; one in the past is over."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return "done"

    calls = [Call("work", {})]
    assert run_batch(stage, tower, calls, deadline=datetime.now(UTC) + timedelta(hours=1)).ok
    past = run_batch(stage, tower, calls, deadline=datetime.now(UTC) - timedelta(hours=1))
    assert [result.code for result in past] == ["deadline_exceeded"]
    assert run_batch(stage, tower, calls, deadline=float("inf")).ok


@pytest.mark.parametrize(
    "given", [{"reason": 3}, {"reason": None}, {"call_id": 3}, {"index": 1.0}, {"index": -1}, {"index": "0"}]
)
def test_a_cancel_of_the_wrong_type_is_refused_and_cancels_nothing(stage: Stage, given: dict[str, Any]) -> None:
    """A wrong argument of `Run.cancel` is told to whoever gave it, by its name, and the batch goes on."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run() as run:
            batch = asyncio.ensure_future(run.execute([Call("work", {})]))
            await asyncio.sleep(0.5)
            with pytest.raises(PolicyError, match=next(iter(given))):
                run.cancel(**given)
            assert (await batch).ok

    stage.run(main())


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("one", [True, False])
def test_g1_a_reason_that_utf8_cannot_hold_hangs_nobody(stage: Stage, steps: int, one: bool) -> None:
    """G1, R-87: a lone surrogate in a cancel's reason, whatever the calls are at, costs no result and hangs nobody."""
    tower = stage.tower(pools={"p": 1})

    @tower.tool(independent=True, pools=["p"])
    async def work() -> str:
        return await stage.work("work", 1)

    async def main() -> None:
        async with tower.run() as run:
            batch = asyncio.ensure_future(run.execute([Call("work", {}), Call("work", {}), Call("work", {})]))
            for _ in range(steps):
                await asyncio.sleep(0)
            run.cancel("a \ud800 reason", index=1 if one else None)
            results = await batch
            assert len(results) == 3
            for result in results:
                result.content.encode()
                result.message.encode()

    stage.run(main())


def test_the_pool_of_a_closed_run_goes_with_its_last_orphan(stage: Stage) -> None:
    """G12: a run is closed over work that goes on: its pools are shown while they are held, and not a moment longer,
    with no other run to come by.
    """
    tower = stage.tower(pools={"own": Pool(1, scope="run")}, grace=0.5)

    @tower.tool(independent=True, pools=["own"], timeout=0.5)
    async def deaf() -> str:
        return await stage.stubborn("deaf", 5)

    async def main() -> None:
        async with tower.run(run_id="r") as run:
            assert (await run.execute([Call("deaf", {})]))[0].still_running
        assert {"run:r", "run:1"} & set(tower.statistics().pools)
        await stage.settled(tower)
        assert set(tower.statistics().pools) == {"process"}

    stage.run(main())


def test_a_pool_is_called_by_its_name_in_statistics() -> None:
    """R-117: a pool whose name is a number is not taken for the run of that number."""
    tower = Tower(pools={"1": 2, "mine": Pool(3, scope="run")})
    tower.run("first")
    tower.run("second")
    limits = {name: pool.limit for name, pool in tower.statistics().pools.items()}
    assert limits == {
        "process": 32,
        "1": 2,
        "run:first": 8,
        "mine@run:first": 3,
        "run:second": 8,
        "mine@run:second": 3,
    }
