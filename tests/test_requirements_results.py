"""Requirements R-96 to R-138, each by a whole tower: caps, results, permission, records, and the tests asked for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, on_stage, sound, whole_again

from towerman import Call, Event, JsonlObserver, Pool, Result, ToolError, Tower

stage = pytest.fixture(on_stage)


def worker(stage: Stage, name: str = "work", seconds: float = 1.0) -> Callable[..., Any]:
    """A handler that works for so long under the name it is given."""

    async def work(who: str = name) -> str:
        return await stage.work(who, seconds)

    return work


# --- H. Caps and termination ------------------------------------------------------------------------------------------


def test_r96_a_turn_has_a_hard_cap_and_the_model_is_told(stage: Stage) -> None:
    """R-96, R-97: of 30 calls the first 25 in emitted order run and the rest are `call_cap`, not started; the model
    gets one notice, which reaches it within the provider's messages. Telling is the default.
    """
    tower = stage.tower(run_concurrency=30)
    started: list[int] = []

    @tower.tool(independent=True)
    async def look(i: int) -> int:
        started.append(i)
        return i

    calls = [Call("look", {"i": i}, f"c{i}") for i in range(30)]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert [result.code for result in batch] == [None] * 25 + ["call_cap"] * 5
    assert started == list(range(25))
    assert {result.retryable for result in batch[25:]} == {"yes"}
    assert batch.notice is not None
    assert "25 of 30" in batch.notice
    assert batch[29].message == batch.notice
    for form in ("openai", "anthropic", "towerman"):
        sent = json.dumps(batch.messages(form))
        assert sent.count("25 of 30") == (2 if form == "towerman" else 1)  # our own form has message and content


def test_r97_queueing_runs_all_of_them(stage: Stage) -> None:
    """R-97: `on_excess="queue"`: all 200 calls run, slower, and nothing is noted; "tell" says "20 of 200"."""
    told = stage.tower(max_calls_per_batch=20)
    queued = stage.tower(max_calls_per_batch=20, on_excess="queue", run_concurrency=4)
    calls = [Call("work", {})] * 200
    for tower in (told, queued):
        tower.add_tool(worker(stage), name="work", independent=True)
    batch = stage.run(told.execute(calls))
    assert batch.notice is not None
    assert "20 of 200" in batch.notice
    assert sum(result.ok for result in batch) == 20
    began, stage.peak = stage.clock.now(), 0
    batch = stage.run(queued.execute(calls))
    sound(batch, calls)
    assert batch.ok
    assert batch.notice is None
    assert stage.peak == 4
    assert stage.clock.now() - began == 50


def test_r97_plans_are_not_cut(stage: Stage) -> None:
    """API, on_excess: a batch with explicit dependencies is run whole, since its rest may be what its first part is
    for.
    """
    tower = stage.tower(max_calls_per_batch=3)
    tower.add_tool(worker(stage), name="work", independent=True)
    calls = [Call("work", {}, f"c{i}", needs=[f"c{i - 1}"] if i else []) for i in range(6)]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok


class Longest:
    """How long a batch of G12 may take: along its longest chain, the sum of wait, run and grace of each call."""

    WAIT, RUN, GRACE = 4.0, 3.0, 2.0

    @classmethod
    def chain(cls, calls: int) -> float:
        return calls * (cls.WAIT + cls.RUN + cls.GRACE)


@settings(max_examples=80)
@given(data=st.data())
def test_r103_a_batch_always_ends_within_its_bound(data: st.DataObject) -> None:
    """R-103, G12: whatever handlers do (end, fail, go on for ever, ignore their cancel), each call reaches a final
    state within wait + run + grace along the longest chain, also while another run holds what they want and lets go
    never.
    """
    stage = Stage()
    tower = stage.tower(
        max_concurrency=data.draw(st.integers(1, 4), label="limit"),
        max_wait=Longest.WAIT,
        timeout=Longest.RUN,
        grace=Longest.GRACE,
        on_orphan=data.draw(st.sampled_from(["hold", "release"])),
    )

    async def work(key: str, how: str, seconds: float) -> None:
        if how == "deaf":
            await stage.stubborn("deaf", 60)
        elif how == "for ever":
            await asyncio.Event().wait()
        elif how == "fails":
            raise ValueError
        else:
            await asyncio.sleep(seconds)

    tower.add_tool(work, name="free", independent=True)
    tower.add_tool(work, name="keyed", writes="thing:{key}")
    tower.add_tool(work, name="ordered")
    call = st.builds(
        lambda tool, key, how, seconds: Call(tool, {"key": key, "how": how, "seconds": seconds}),
        st.sampled_from(["free", "keyed", "ordered"]),
        st.sampled_from(["x", "y"]),
        st.sampled_from(["ends", "ends", "fails", "for ever", "deaf"]),
        st.integers(0, 2),
    )
    runs = data.draw(st.lists(st.lists(call, min_size=1, max_size=5), min_size=1, max_size=3), label="runs")

    async def main() -> None:
        batches = await asyncio.gather(*(tower.execute(calls) for calls in runs))
        for batch, calls in zip(batches, runs, strict=True):
            sound(batch, calls)
        assert stage.clock.now() <= Longest.chain(max(map(len, runs))) + 1e-6
        await stage.settled(tower)

    stage.run(main())
    whole_again(tower)


# --- I. Results -------------------------------------------------------------------------------------------------------


def everything(tower: Tower, stage: Stage) -> list[Call]:
    """A batch in which every kind of end stands once."""

    @tower.tool(reads="customer:{customer_id}")
    async def read_customer(customer_id: int) -> dict[str, int]:
        await asyncio.sleep(3 - customer_id)
        return {"id": customer_id}

    @tower.tool(independent=True)
    async def boom() -> None:
        raise ValueError("the text of an exception")

    @tower.tool(independent=True)
    def sync_boom() -> None:
        raise LookupError("the text of an exception")

    @tower.tool(independent=True)
    async def own_cancel() -> None:
        raise asyncio.CancelledError

    @tower.tool(independent=True)
    async def strange() -> object:
        return object()

    @tower.tool(independent=True, timeout=1)
    async def long() -> None:
        await asyncio.sleep(100)

    @tower.tool(independent=True, when_busy="reject", pools=["taken"])
    async def busy() -> None:
        raise AssertionError("never started")

    @tower.tool(independent=True)
    async def told() -> None:
        raise ToolError("no such customer")

    return [
        Call("read_customer", {"customer_id": 1}, "c0"),
        Call("boom", {}, "c1"),
        Call("nope", {}, "c2"),
        Call("read_customer", '{"customer_id": "many"}', "c3"),
        Call("own_cancel", {}, "c4"),
        Call("read_customer", {"customer_id": 1}, "c5", needs=["c1"]),
        Call("strange", {}, "c6"),
        Call("long", {}, "c7"),
        Call("busy", {}, "c8"),
        Call("sync_boom", {}, "c9"),
        Call("told", {}, "c10"),
        Call("read_customer", {"customer_id": 2}, "c11"),
    ]


def perform(stage: Stage, **options: Any) -> tuple[list[Call], Any]:
    """Run it, while somebody else holds the pool that one of them wants."""
    tower = stage.tower(pools={"taken": 1}, run_concurrency=20, **options)
    tower.add_tool(worker(stage, "hold", 50), name="hold", independent=True, pools=["taken"])
    calls = everything(tower, stage)

    async def main() -> Any:
        holding = asyncio.ensure_future(tower.execute([Call("hold", {})]))
        await asyncio.sleep(0)
        batch = await tower.execute(calls)
        await holding
        return batch

    return calls, stage.run(main())


ENDS = [
    ("ok", None),
    ("error", "handler_error"),
    ("rejected", "unknown_tool"),
    ("rejected", "invalid_arguments"),
    ("error", "handler_cancelled"),
    ("skipped", "dependency_failed"),
    ("error", "encoding_error"),
    ("timed_out", "handler_timeout"),
    ("rejected", "concurrency_limit"),
    ("error", "handler_error"),
    ("error", "handler_error"),
    ("ok", None),
]


def test_r104_r105_r107_every_call_has_one_result_in_its_place(stage: Stage) -> None:
    """R-104, R-105, R-107: whatever becomes of them (answered, failed, refused, skipped, cancelled, timed out), twelve
    calls give twelve results, each in its emitted place, with the id that it answers, structured, none missing.
    """
    calls, batch = perform(stage)
    sound(batch, calls)
    assert [(result.outcome, result.code) for result in batch] == ENDS
    assert [result.call_id for result in batch] == [call.id for call in calls]
    assert [one["tool_call_id"] for one in batch.messages("openai")] == [call.id for call in calls]
    (blocks,) = batch.messages("anthropic")
    assert [block["tool_use_id"] for block in blocks["content"]] == [call.id for call in calls]


def test_r106_results_stand_in_emitted_order(stage: Stage) -> None:
    """R-106: three calls with reversed durations end last to first and stand first to last."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def wait(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    ended: list[int] = []

    async def main() -> None:
        async with tower.run() as run:
            calls = [Call("wait", {"seconds": seconds}) for seconds in (3, 2, 1)]
            batch = await run.execute(calls, on_result=lambda result: ended.append(result.index))
            assert [result.value for result in batch] == [3, 2, 1]

    stage.run(main())
    assert ended == [2, 1, 0]


def test_r108_one_failure_discards_nobody(stage: Stage) -> None:
    """R-108: ten lookups of which one fails: nine values and one error."""
    tower = stage.tower()

    @tower.tool(reads="item:{i}")
    async def lookup(i: int) -> int:
        if i == 4:
            raise LookupError(i)
        return i

    batch = stage.run(tower.execute([Call("lookup", {"i": i}) for i in range(10)]))
    assert [result.value for result in batch if result.ok] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert [result.index for result in batch if not result.ok] == [4]


class Trap:
    """A value that raises when it is looked at."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def model_dump(self, **options: object) -> object:
        raise self.error("looked at")

    def __iter__(self) -> Any:
        raise self.error("looked at")

    def __str__(self) -> str:
        raise self.error("looked at")


RAISED: list[type[BaseException]] = [ValueError, asyncio.CancelledError, GeneratorExit, TimeoutError, StopIteration]


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("run_in", ["loop", "thread"])
@pytest.mark.parametrize("where", ["handler", "call of the handler", "value", "encoder", "summary"])
def test_r109_whatever_a_handler_raises_is_contained(
    where: str, run_in: Any, error: type[BaseException], stage: Stage
) -> None:
    """R-109, G1: an exception raised at once, later, by a value that is encoded, by the tool's encoder or its summary,
    also one that Python treats apart (CancelledError, GeneratorExit, StopIteration), ends that call only and leaves no
    place taken.
    """
    tower = stage.tower(max_result_bytes=100)

    async def late() -> object:
        if where == "handler":
            raise error("text")
        return Trap(error) if where == "value" else "x" * 1000

    def at_once() -> object:
        if where == "handler":
            raise error("text")
        return Trap(error) if where == "value" else "x" * 1000

    def fail(value: object = None) -> object:
        raise error("text")

    options: dict[str, Any] = {"encoder": {"encode": fail}, "summary": {"summarize": fail}}.get(where, {})
    handler: Any = fail if where == "call of the handler" else late if run_in == "loop" else at_once
    tower.add_tool(handler, name="fails", schema={}, independent=True, run_in=run_in, **options)
    tower.add_tool(worker(stage), name="work", independent=True)
    calls = [Call("fails", {}), Call("work", {})]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch[1].ok
    if where == "summary" and issubclass(error, Exception):
        assert batch[0].ok  # what cannot be summed up is cut
    else:
        assert batch[0].outcome == "error"
        assert batch[0].started
        assert "text" not in batch[0].content


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("run_in", ["loop", "thread"])
@pytest.mark.parametrize("where", ["handler", "encoder", "summary"])
def test_r109_interrupts_leave_after_sealing(where: str, run_in: Any, error: type[BaseException], stage: Stage) -> None:
    """R-109, G1: KeyboardInterrupt and SystemExit leave, from a handler, its encoder or its summary, after every call
    of the batch has its result; no place stays taken.
    """
    tower = stage.tower(max_result_bytes=100, run_concurrency=2)

    def fail(value: object = None) -> object:
        raise error("stop")

    def value() -> str:
        return "x" * 1000

    options: dict[str, Any] = {"encoder": {"encode": fail}, "summary": {"summarize": fail}}.get(where, {})
    handler: Any = fail if where == "handler" else value
    tower.add_tool(handler, name="fails", schema={}, independent=True, run_in=run_in, **options)
    tower.add_tool(worker(stage), name="work", independent=True)
    calls = [Call("work", {}), Call("fails", {}), Call("work", {})]

    async def main() -> None:
        async with tower.run() as run:
            with pytest.raises(error):
                await run.execute(calls)
            assert run.last_batch is not None
            sound(run.last_batch, calls)
            assert [result.outcome for result in run.last_batch] == ["cancelled", "error", "cancelled"]
            assert [result.started for result in run.last_batch] == [True, True, False]

    async def whole() -> None:
        # Python's tasks let these two through to whoever runs the loop as well.
        try:
            await main()
        except (KeyboardInterrupt, SystemExit):
            raise AssertionError("it left twice") from None

    stage.run(whole())


TEXTS = {
    "text": "Zeile mit Ümlaut — und mehr. " * 3_000,
    "emoji": "👩‍👩‍👧‍👦🚀" * 5_000,
    "list": [{"name": f"Ünit {i}", "rows": list(range(20))} for i in range(2_000)],
    "object": {f"key {i}": "väl" * 50 for i in range(1_000)},
    "nested": {"items": [{"text": "x" * 5_000} for _ in range(100)], "next": "page-2"},
    "JSON text": json.dumps([{"id": i} for i in range(20_000)]),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_r110_each_result_is_bounded(kind: str, stage: Stage) -> None:
    """R-110: an oversized result is cut to its bound, which the tool may set, says so and how large it was, stays whole
    UTF-8, and stays JSON where it was JSON.
    """
    tower = stage.tower(max_result_bytes=4_000)
    tower.add_tool(lambda: TEXTS[kind], name="dump", independent=True)
    tower.add_tool(lambda: TEXTS[kind], name="less", independent=True, max_result_bytes=1_000)
    batch = stage.run(tower.execute([Call("dump", {}), Call("less", {})]))
    for result, most in zip(batch, (4_000, 1_000), strict=True):
        assert result.ok
        data = result.content.encode("utf-8")  # raises where a character was torn
        assert most * 0.5 < len(data) <= most
        assert result.original_bytes > most
        assert str(result.original_bytes) in result.content
        if kind not in ("text", "emoji"):
            told = json.loads(result.content)
            assert told["truncated"]["original_bytes"] == result.original_bytes
        else:
            assert "cut" in result.content


def test_r111_the_batch_is_bounded_too(stage: Stage) -> None:
    """R-111: 200 results of 3 KB do not push 600 KB: the whole keeps to its bound, small results stay whole, and what
    was cut says so.
    """
    tower = stage.tower(max_calls_per_batch=201, run_concurrency=50, max_batch_bytes=100_000)

    @tower.tool(independent=True)
    async def page(i: int) -> str:
        return f"page {i}: " + "y" * 3_000

    @tower.tool(independent=True)
    async def small() -> str:
        return "small and whole"

    batch = stage.run(tower.execute([*(Call("page", {"i": i}) for i in range(200)), Call("small", {})]))
    assert batch.ok
    sizes = [len(result.content.encode()) for result in batch]
    assert sum(sizes) <= 100_000
    assert sum(sizes) > 80_000
    assert batch[200].content == "small and whole"
    assert all("cut" in result.content and result.content.startswith(f"page {result.index}") for result in batch[:200])
    assert {result.original_bytes for result in batch[10:100]} == {3_009}


@pytest.mark.parametrize("form", ["openai", "anthropic", "towerman"])
def test_r114_paris_and_rome_never_swap(form: str, stage: Stage) -> None:
    """R-114: Paris and Rome in one batch, Rome ending first, with ids that are the same: each answer stands with its
    call.
    """
    tower = stage.tower()

    @tower.tool(reads="weather:{city}")
    async def weather(city: str) -> dict[str, str]:
        await asyncio.sleep(2 if city == "Paris" else 1)
        return {"city": city}

    batch = stage.run(tower.execute([Call("weather", {"city": city}, "same") for city in ("Paris", "Rome")]))
    turn = json.loads(json.dumps(batch.turn(form)))
    if form == "openai":
        asked = {call["id"]: call["function"]["arguments"] for call in turn[0]["tool_calls"]}
        answered = {one["tool_call_id"]: one["content"] for one in turn[1:]}
    elif form == "anthropic":
        asked = {block["id"]: block["input"]["city"] for block in turn[0]["content"]}
        answered = {block["tool_use_id"]: json.dumps(block["content"]) for block in turn[1]["content"]}
    else:
        asked = {call["id"]: call["arguments"]["city"] for call in turn[0]["calls"]}
        answered = {one["id"]: one["content"] for one in turn[1:]}
    assert len(asked) == 2
    assert asked.keys() == answered.keys()
    for own, question in asked.items():
        city = "Paris" if "Paris" in question else "Rome"
        assert city in answered[own]


def test_r115_the_same_inputs_and_outcomes_give_the_same_bytes(stage: Stage) -> None:
    """R-115: the same batch with the same outcomes gives the same messages to the byte in every form, also where the
    calls ended in another order or took other times.
    """

    def told(reverse: bool) -> str:
        tower = stage.tower(run_concurrency=20)

        @tower.tool(independent=True)
        async def give(i: int) -> object:
            await asyncio.sleep(10 - i if reverse else i)
            return [{"b": 1, "a": {3, 1, 2}}, "text", None, 1.5, {"k": [i]}][i % 5]

        @tower.tool(independent=True)
        async def fail(i: int) -> None:
            await asyncio.sleep(10 - i if reverse else i)
            raise ExceptionGroup("g", [ValueError(i), KeyError(i)])

        calls = [Call("give" if i % 3 else "fail", {"i": i}, ["", "a", "a", f"c{i}"][i % 4]) for i in range(10)]
        calls += [Call("unknown", {}), Call("give", "{")]
        batch = stage.run(tower.execute(calls))
        return json.dumps([batch.turn(form) for form in ("openai", "anthropic", "towerman")])

    assert told(False) == told(True) == told(False)


def test_r116_repeated_ids_are_dealt_with_before_anything_starts(stage: Stage) -> None:
    """R-116, P-05: repeated ids run, each with its own result; where a step is needed by an id that stands twice, the
    whole plan is refused `duplicate_call_id` and nothing starts.
    """
    tower = stage.tower()
    tower.add_tool(worker(stage), name="work", independent=True)
    batch = stage.run(tower.execute([Call("work", {"who": who}, "same") for who in ("a", "b")]))
    assert [result.value for result in batch] == ["a", "b"]
    stage.started.clear()
    calls = [Call("work", {}, "same"), Call("work", {}, "same"), Call("work", {}, "c", needs=["same"])]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert {result.code for result in batch} == {"duplicate_call_id"}
    assert not stage.started


def test_r117_a_structured_error_says_it_all(stage: Stage) -> None:
    """R-117, D-10: code, id, tool, whether another try helps, whether it took effect, what it waited for and how long,
    a short sentence for the model; no text of an exception and no argument; the model gets the same as JSON.
    """
    calls, batch = perform(stage)
    for call, result in zip(calls, batch, strict=True):
        if result.ok:
            continue
        assert result.code
        assert (result.call_id, result.tool) == (call.id, call.tool)
        assert result.retryable in ("yes", "no", "unknown")
        assert result.applied in ("yes", "no", "unknown")
        assert 0 < len(result.message) < 500
        assert "the text of an exception" not in result.message + result.content
        assert "many" not in result.message + result.content
        error = json.loads(result.content)["error"]
        assert error == {
            "code": result.code,
            "message": result.message,
            "outcome": result.outcome,
            "started": result.started,
            "applied": result.applied,
            "retryable": result.retryable,
        }
    busy = batch[8]
    assert busy.waited_for == ("pool taken",)
    assert "pool taken" in busy.message
    assert "no such customer" in batch[10].message
    assert [result.applied for result in batch] == [
        *("no", "unknown", "no", "no", "unknown", "no"),
        *("yes", "unknown", "no", "unknown", "unknown", "no"),
    ]


# --- K. Permission ----------------------------------------------------------------------------------------------------


def test_r128_permission_comes_before_any_capacity(stage: Stage) -> None:
    """R-128: what a run may call is checked before anything is spent: a denied call takes no place and no turn in the
    queue, does not count as a tool that excludes others, and says `permission_denied`; `deny` wins over `allow`; names
    that are not allowed are not suggested.
    """
    tower = stage.tower(max_concurrency=1, max_queued=0)
    for name in ("crm_read", "crm_write", "mail_send"):
        tower.add_tool(worker(stage, name, 10), name=name)

    async def main() -> None:
        holding = asyncio.ensure_future(tower.execute([Call("crm_read", {})]))
        await asyncio.sleep(0)
        calls = [Call("mail_send", {}), Call("crm_write", {}), Call("mail_sent", {}), Call("mail_send", "{")]
        batch = await tower.execute(calls, allow="crm_*", deny=["*_write"])
        assert [result.code for result in batch] == [
            "permission_denied",
            "permission_denied",
            "unknown_tool",
            "permission_denied",
        ]
        assert "mail_send" not in batch[2].message
        assert stage.clock.now() == 0
        assert tower.statistics().pools["process"].held == 1
        assert (await holding).ok
        assert (await tower.execute([Call("crm_read", {})], allow=["crm_read"])).ok
        assert (await tower.execute([Call("crm_read", {})], allow=[]))[0].code == "permission_denied"

    stage.run(main())
    assert stage.started == {"crm_read": 2}


# --- L. Records -------------------------------------------------------------------------------------------------------


def test_r129_r131_the_record_of_a_decision(stage: Stage, tmp_path: Path) -> None:
    """R-129, R-131: a record has run id, tool, what it waited for, how long, and why it was refused; waiting,
    admission, refusal and effect are events of different kinds, in the order in which they came, in the file too.
    """
    seen: list[Event] = []
    path = tmp_path / "trace.jsonl"
    with JsonlObserver(path) as observer:
        tower = stage.tower(pools={"crm": 1}, max_wait=1.5, observers=[seen.append, observer])
        tower.add_tool(worker(stage), name="work", independent=True, pools=["crm"])

        async def main() -> None:
            async with tower.run("run-42") as run:
                first = asyncio.ensure_future(tower.execute([Call("work", {})], run_id="other"))
                await asyncio.sleep(0)
                await run.execute([Call("work", {}, "a")])
                assert (await first).ok
                second = asyncio.ensure_future(tower.execute([Call("work", {}), Call("work", {})], run_id="other"))
                await asyncio.sleep(0)
                await run.execute([Call("work", {}, "b"), Call("nope", {}, "c")])
                await second

        stage.run(main())
        tower.flush(30)
    mine = [event for event in seen if event.run_id == "run-42"]
    kinds = [(event.batch, event.kind, event.call_id) for event in mine]
    assert kinds == [
        (1, "batch_started", None),
        (1, "waiting", "a"),
        (1, "admitted", "a"),
        (1, "started", "a"),
        (1, "finished", "a"),
        (1, "batch_finished", None),
        (2, "batch_started", None),
        (2, "rejected", "c"),
        (2, "waiting", "b"),
        *[one for one in kinds if one[0] == 2 and one[2] == "b" and one[1] != "waiting"],
        (2, "batch_finished", None),
    ]
    assert all(event.tool == "work" for event in mine if event.call_id in ("a", "b"))
    (admitted,) = [event for event in mine if event.kind == "admitted" and event.call_id == "a"]
    (waiting,) = [event for event in mine if event.kind == "waiting" and event.call_id == "a"]
    (rejected,) = [event for event in mine if event.kind == "rejected" and event.call_id == "c"]
    assert (waiting.waiting_for, admitted.waited) == ("pool crm", 1)
    assert (rejected.code, rejected.outcome) == ("unknown_tool", "rejected")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["time"]) for line in lines] == [(event.kind, event.time) for event in seen]


def test_r130_see_the_canary() -> None:
    """R-130: no record holds an argument's value: test_canary.py looks for one in every sink; it has what it needs."""
    import test_canary

    assert len(test_canary.SOURCES) > 60
    assert len(test_canary.SINKS) > 20


def test_r132_each_pool_can_be_watched(stage: Stage) -> None:
    """R-132: active count, most active, queue length, and wait time can be seen per pool, while they change."""
    tower = stage.tower(pools={"crm": 2, "idle": Pool(5)})
    tower.add_tool(worker(stage), name="work", independent=True, pools=["crm"])

    async def main() -> None:
        tasks = [asyncio.ensure_future(tower.execute([Call("work", {})])) for _ in range(5)]
        looks = []
        for _ in range(4):
            await asyncio.sleep(0.75)
            crm = tower.statistics().pools["crm"]
            looks.append((crm.limit, crm.held, crm.peak, crm.queued))
        assert looks == [(2, 2, 2, 3), (2, 2, 2, 1), (2, 1, 2, 0), (2, 0, 2, 0)]
        idle = tower.statistics().pools["idle"]
        assert (idle.limit, idle.held, idle.peak, idle.queued) == (5, 0, 0, 0)
        waits = sorted([(await task)[0].waited for task in tasks])
        assert waits == [0, 0, 1, 1, 2]

    stage.run(main())


def test_r133_parallel_traces_stay_readable(stage: Stage) -> None:
    """R-133: each call's span has its emitted index, and waiting and running are told apart, in numbers and in the
    drawing.
    """
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage, seconds=2), name="work", independent=True)

    async def main() -> None:
        holding = asyncio.ensure_future(tower.execute([Call("work", {})]))
        await asyncio.sleep(0)
        batch = await tower.execute([Call("work", {}), Call("nope", {})])
        await holding
        work, nope = batch.spans()
        assert (work.index, work.queued, work.started, work.sealed, work.waited_for) == (0, 0, 2, 4, ("pool process",))
        assert (nope.index, nope.queued, nope.started) == (1, None, None)
        assert nope.tool == "<unknown tool>"
        row, other = [line for line in batch.timeline().splitlines() if line[:2] in ("0 ", "1 ")]
        assert row.index("░") < row.index("█")
        assert abs(row.count("░") - row.count("█")) <= 1
        assert "pool process" in row
        assert "█" not in other

    stage.run(main())


# --- M. Tests asked for -----------------------------------------------------------------------------------------------


def test_r134_r135_the_circulating_tests_and_more(stage: Stage) -> None:
    """R-134, R-135: six calls of 20 ms on limit 2 have a maximum of exactly 2, counted by the handlers; two runs at
    once share it. (Cancel while queued: test_r78; a failure frees its place: test_r86.)
    """
    tower = stage.tower(max_concurrency=2)
    tower.add_tool(worker(stage, seconds=0.02), name="work", independent=True)

    async def main() -> None:
        assert (await tower.execute([Call("work", {})] * 6)).ok
        assert stage.peak == 2
        assert stage.clock.now() == pytest.approx(0.06)
        batches = await asyncio.gather(*(tower.execute([Call("work", {})] * 6) for _ in range(2)))
        assert all(batch.ok for batch in batches)
        assert stage.peak == 2
        assert stage.clock.now() == pytest.approx(0.06 + 0.12)

    stage.run(main())


def test_r136_a_semaphore_inside_the_run_is_no_pool_outside_it(stage: Stage) -> None:
    """R-136: the same two runs of six calls: a limit that each run makes for itself lets four in, a pool that stands
    outside of them lets two in.
    """
    inside = stage.tower(run_concurrency=2)
    outside = stage.tower(pools={"shared": 2})
    peaks = []
    for tower, options in ((inside, {}), (outside, {"pools": ["shared"]})):
        tower.add_tool(worker(stage), name="work", independent=True, **options)

        async def main(tower: Tower = tower) -> None:
            await asyncio.gather(*(tower.execute([Call("work", {})] * 6) for _ in range(2)))

        stage.peak = 0
        stage.run(main())
        peaks.append(stage.peak)
    assert peaks == [4, 2]


def test_r138_no_model_and_no_network(tmp_path: Path) -> None:
    """R-138: a batch runs, and `towerman demo` too, where opening any socket to the network is an error."""
    program = (
        "import socket, sys\n"
        "real = socket.socket.connect\n"
        "def refuse(self, address):\n"
        "    if self.family != getattr(socket, 'AF_UNIX', None):\n"
        "        raise SystemExit(f'a connection to {address}')\n"
        "    return real(self, address)\n"
        "socket.socket.connect = socket.socket.connect_ex = refuse\n"
        "socket.getaddrinfo = lambda *a, **k: sys.exit('a look-up of a name')\n"
        "from towerman.cli import main\n"
        "sys.exit(main(['demo', '--json']))\n"
    )
    source = Path(__file__).resolve().parent.parent / "src"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        timeout=120,
    )
    told = json.loads(done.stdout)
    assert told, done.stderr.decode()
    assert b"a connection" not in done.stderr


def test_r138_durations_are_the_tests_own(stage: Stage) -> None:
    """R-138: handlers take exactly as long as the test says, an hour in no time, and the same each time."""
    tower = stage.tower(timeout=10_000)
    tower.add_tool(worker(stage, seconds=3600), name="work", independent=True)
    seen: list[Result] = []
    for _ in range(2):
        seen += stage.run(tower.execute([Call("work", {})]))
    assert [result.ran for result in seen] == [3600, 3600]
    assert stage.clock.now() == 7200
