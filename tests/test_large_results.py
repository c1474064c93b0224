"""Large results through a whole tower: kept, told in part, read on, summed up, trimmed with their batch, counted."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from kit import Stage, here, on_stage, run_batch, sound
from test_pages import put_together, values

import towerman.runner.oversized as oversized
from towerman import (
    BatchResult,
    Call,
    Event,
    InputError,
    JsonlObserver,
    Page,
    PolicyError,
    Result,
    Tower,
    read_result,
)
from towerman.store.keeper import UNKNOWN

stage = pytest.fixture(on_stage)

SECRET = "zqxjkvbpwm"
ROWS = {"items": [{"id": n, "name": f"row {n}"} for n in range(1000)], "next": "c2"}


def giving(tower: Tower, value: Any, name: str = "give", *, thread: bool = False, **options: Any) -> None:
    """A tool that returns this value."""

    async def on_loop() -> Any:
        return value

    def in_thread() -> Any:
        return value

    tower.add_tool(in_thread if thread else on_loop, name=name, **{"independent": True, **options})


def one(stage: Stage, tower: Tower, name: str = "give", **options: Any) -> Result:
    """The result of one call."""
    (result,) = run_batch(stage, tower, [Call(name, {})], **options)
    return result


def pages(tower: Tower, handle: str | None) -> list[Page]:
    """All pages of a stored result."""
    assert handle is not None
    found = [tower.read(handle)]
    while (following := found[-1].next) is not None:
        found.append(tower.read(handle, following))
    return found


@pytest.fixture(params=[False, True], ids=["loop", "thread"])
def thread(request: pytest.FixtureRequest) -> bool:
    """Does the handler run on a thread?"""
    return bool(request.param)


# ==================================================================== kept and read on


def test_p56_the_model_reads_on_without_a_gap(stage: Stage, thread: bool) -> None:
    """P-56, R-112: {'items': [1000 rows], 'next': 'c2'}, cap 4 KB: the output parses, keeps 'next', says how many rows
    were dropped; page 2 by the handle has the following rows, with no gap and no repeat, and so on to the last.
    """
    tower = stage.tower(max_result_bytes=4_096)
    tower.add_tool(read_result)
    giving(tower, ROWS, thread=thread)

    async def main() -> tuple[list[Any], list[int]]:
        async with tower.run() as run:
            (result,) = await run.execute([Call("give", {})])
            sizes = [len(result.content.encode())]
            told = json.loads(result.content)
            assert told["result"]["next"] == "c2"
            rows = told["result"]["items"]
            assert told["truncated"]["dropped"] == {".items": f"{1000 - len(rows)} of 1000 items"}
            assert told["truncated"]["read_with"] == "read_result"
            assert result.handle == told["truncated"]["handle"]
            page = told["truncated"]["next_page"]
            assert page == 2
            while page is not None:
                (result,) = await run.execute([Call("read_result", {"handle": told_handle(told), "page": page})])
                assert result.ok
                assert result.handle is None
                sizes.append(len(result.content.encode()))
                told = json.loads(result.content)
                assert told["result"]["next"] == "c2"
                assert (
                    told["page"]["shown"]
                    == f"items {len(rows) + 1} to {len(rows) + len(told['result']['items'])} of 1000"
                )
                rows += told["result"]["items"]
                page = told["page"].get("next_page")
            return rows, sizes

    def told_handle(told: Any) -> str:
        return str((told.get("truncated") or told["page"])["handle"])

    rows, sizes = stage.run(main())
    assert rows == ROWS["items"]
    assert max(sizes) <= 4_096
    assert len(sizes) < 15, "pages are much smaller than they could be"


def test_p55_five_dumps_and_a_small_result(stage: Stage, tmp_path: Path, thread: bool) -> None:
    """P-55, R-110 to R-112: 1.7 MB each, 20 KB a result, 50 KB a batch: every result keeps to its cap, the sum to the
    other, the small one is intact, what is cut says the original size and a handle to read more, and the full text is
    in no trace.
    """
    observer = JsonlObserver(tmp_path / "trace.jsonl")
    tower = stage.tower(max_result_bytes=20_000, max_batch_bytes=50_000, observers=[observer])
    tower.add_tool(read_result)
    text = "".join(f"{SECRET} {number:07}\n" for number in range(90_000))
    giving(tower, text, thread=thread)
    giving(tower, "small and whole", "small")
    calls = [*[Call("give", {})] * 5, Call("small", {})]
    batch = run_batch(stage, tower, calls)
    sound(batch, calls)
    sizes = [len(result.content.encode()) for result in batch]
    assert max(sizes) <= 20_000
    assert 45_000 < sum(sizes) <= 50_000
    assert batch[5].content == "small and whole"
    assert batch[5].handle is None
    for result in batch[:5]:
        assert f"of {len(text)} bytes cut" in result.content
        assert f'read_result(handle="{result.handle}", page=1) reads on' in result.content
        assert "".join(str(page.data) for page in pages(tower, result.handle)) == text
    assert len({result.handle for result in batch[:5]}) == 5
    tower.flush(30)
    observer.close()
    recorded = (tmp_path / "trace.jsonl").read_text()
    assert recorded.count("trimmed") == 5
    assert SECRET not in recorded
    assert "r-" + str(batch[0].handle)[2:] not in recorded


def test_what_fits_is_not_kept(stage: Stage, thread: bool) -> None:
    """R-110: a result within its bound is told as it is, and nothing of it is stored."""
    tower = stage.tower()
    giving(tower, ROWS["next"], thread=thread)
    result = one(stage, tower)
    assert (result.content, result.handle) == ("c2", None)
    assert tower._core.made_keeper is None
    assert tower.statistics().results_kept == 0


def test_nothing_is_kept_where_that_is_off(stage: Stage, thread: bool) -> None:
    """R-110: with results="off" values are cut as they are; reading, and the tool that reads, are refused by name."""
    tower = stage.tower(results="off", max_result_bytes=1_000)
    giving(tower, ROWS, thread=thread)
    result = one(stage, tower)
    assert result.handle is None
    assert "handle" not in result.content
    assert json.loads(result.content)["result"]["next"] == "c2"
    with pytest.raises(InputError, match="read: handle: nothing is stored"):
        tower.read("r-x")
    with pytest.raises(PolicyError, match="tool 'read_result': it reads stored results"):
        tower.add_tool(read_result)
    none = stage.tower(max_stored_bytes=0, max_result_bytes=1_000)
    giving(none, ROWS, thread=thread)
    assert one(stage, none).handle is None


def test_r112_only_runs_of_the_same_tenant_read_on(stage: Stage) -> None:
    """R-112: a handle holds within one tenant, over runs; for others, also of no tenant, it is not there; the program
    may read all.
    """
    tower = stage.tower(max_result_bytes=1_000)
    tower.add_tool(read_result)
    giving(tower, "line\n" * 1_000)
    for owner in ("a", None):
        handle = one(stage, tower, tenant=owner).handle
        for reader in ("a", "b", None):
            (read,) = run_batch(stage, tower, [Call("read_result", {"handle": handle})], tenant=reader)
            assert read.ok == (reader == owner)
            if not read.ok:
                assert (read.code, read.message, read.applied) == ("handler_error", UNKNOWN, "no")
                assert str(handle) not in read.content
        assert tower.read(str(handle)).number == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"handle": SECRET}, UNKNOWN),
        ({"handle": ""}, UNKNOWN),
        ({"page": 0}, "page: a whole number from 1 to 8, the number of its pages."),
        ({"page": 9}, "page: a whole number from 1 to 8"),
        ({"page": -5}, "page: a whole number from 1 to 8"),
        ({"page": 10**40}, "page: a whole number from 1 to 8"),
    ],
)
def test_r112_a_clear_error_for_the_model(stage: Stage, arguments: dict[str, Any], told: str) -> None:
    """R-112, R-117: what is not there is an ordinary failed call, told without what was asked for."""
    tower = stage.tower(max_result_bytes=1_000)
    tower.add_tool(read_result)
    giving(tower, "line\n" * 1_000)
    handle = one(stage, tower).handle
    (result,) = run_batch(stage, tower, [Call("read_result", {"handle": handle, "page": 1, **arguments})])
    assert result.code == "handler_error"
    assert result.message.startswith(told)
    assert SECRET not in result.content


@pytest.mark.parametrize("page", [1.5, "x", None, [1]])
def test_r112_a_page_that_is_no_number_is_refused(stage: Stage, page: Any) -> None:
    """R-112: arguments of the tool are checked as any; for the program it is an InputError that names the place."""
    tower = stage.tower(max_result_bytes=1_000)
    tower.add_tool(read_result)
    giving(tower, "line\n" * 1_000)
    handle = str(one(stage, tower).handle)
    (result,) = run_batch(stage, tower, [Call("read_result", {"handle": handle, "page": page})])
    assert result.code == "invalid_arguments"
    with pytest.raises(InputError, match="read: page: a whole number from 1 to"):
        tower.read(handle, page)
    with pytest.raises(InputError, match="read: handle: No stored result has this handle"):
        tower.read(page)


def test_the_reading_tool_is_a_tool(stage: Stage) -> None:
    """R-112: it has a schema, takes options of its own, is told under its own name, counts, and is bounded."""
    tower = stage.tower(max_result_bytes=5_000, run_concurrency=8)
    tower.add_tool(read_result, name="more", max_concurrency=1, max_result_bytes=700)
    assert tower._core.tools["more"].kind == "independent"
    assert tower._core.tools["more"].effect_free
    (schema,) = tower.schemas("openai")
    assert schema["function"]["parameters"]["required"] == ["handle"]  # type: ignore[index]
    assert set(schema["function"]["parameters"]["properties"]) == {"handle", "page"}  # type: ignore[index]
    giving(tower, ROWS)
    result = one(stage, tower)
    assert json.loads(result.content)["truncated"]["read_with"] == "more"
    batch = run_batch(stage, tower, [Call("more", {"handle": result.handle, "page": page}) for page in (1, 2, 3)])
    assert batch.ok
    assert all(len(read.content.encode()) <= 700 for read in batch)
    assert tower.statistics().pools["tool:more"].peak == 1
    small = stage.tower(max_result_bytes=64)
    small.add_tool(read_result, sequential=True)
    assert small._core.tools["read_result"].max_result_bytes == 512
    assert small._core.tools["read_result"].kind == "ordered"
    giving(small, "line\n" * 1_000)
    handle = str(one(stage, small).handle)
    assert "".join(str(page.data) for page in pages(small, handle)) == "line\n" * 1_000


def test_r112_a_smaller_bound_of_the_reader_leaves_no_gap(stage: Stage) -> None:
    """R-112: where the reader may return less than before, its pages are smaller, and together the whole still."""
    tower = stage.tower(max_result_bytes=4_000)
    tower.add_tool(read_result)
    giving(tower, ROWS)
    result = one(stage, tower)
    tower.policy("read_*", max_result_bytes=1_000)

    async def main() -> list[Any]:
        rows: list[Any] = []
        page = 1
        async with tower.run() as run:
            while page:
                (read,) = await run.execute([Call("read_result", {"handle": result.handle, "page": page})])
                assert len(read.content.encode()) <= 1_000
                told = json.loads(read.content)
                rows += told["result"]["items"]
                page = told["page"].get("next_page")
        return rows

    # What is given at the tool wins over a rule, and this one was given nothing.
    assert stage.run(main()) == ROWS["items"]


def test_r115_handles_are_the_same_on_virtual_time(stage: Stage) -> None:
    """R-115, R-112: on virtual time equal batches have equal handles, so that runs can be compared; on real time no two
    towers have one in common.
    """

    def handle(**options: Any) -> str | None:
        tower = stage.tower(max_result_bytes=1_000, **options)
        giving(tower, ROWS)
        return one(stage, tower).handle

    assert handle() == handle()
    real = [Tower(max_result_bytes=1_000) for _ in range(2)]
    for tower in real:
        giving(tower, ROWS)
    assert len({tower.execute_sync([Call("give", {})])[0].handle for tower in real}) == 2
    for tower in real:
        tower.close()


@settings(max_examples=40)
@given(value=values)
def test_r112_any_value_is_read_back_whole(value: Any) -> None:
    """R-110, R-112: whatever JSON value does not fit, its pages together are the value."""
    tower = Tower(max_result_bytes=512)
    giving(tower, [value, "x" * 600])
    (result,) = tower.execute_sync([Call("give", {})])
    assert len(result.content.encode()) <= 512
    json.loads(result.content)
    assert put_together(pages(tower, result.handle)) == [value, "x" * 600]
    tower.close()


def endless() -> Iterator[int]:
    """Numbers without an end."""
    number = 0
    while True:
        number += 1
        yield number


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = "x" * 500
    for _ in range(depth):
        value = [value, "y" * 50]
    return value


RUBBISH: dict[str, Any] = {
    "generator": lambda: (n for n in range(5_000)),
    "generator inside": lambda: {"rows": (n for n in range(5_000)), "next": "c2"},
    "endless": endless,
    "endless inside": lambda: [endless(), "x"],
    "bytes": lambda: b"\xff\xfe" * 3_000,
    "text in bytes": lambda: "é".encode() * 3_000,
    "surrogates": lambda: "\ud800x" * 3_000,
    "surrogates inside": lambda: ["\ud800x" * 300, {"\udfff": "y" * 2_000}],
    "nested": lambda: nested(90),
    "too deep": lambda: nested(300),
    "set": lambda: {f"{n}" for n in range(3_000)},
    "keys of any kind": lambda: {n: n for n in range(2_000)},
    "numbers": lambda: [10**400, float("nan"), 1e308] * 50,
    "JSON text": lambda: json.dumps(ROWS, indent=2),
    "broken JSON text": lambda: json.dumps(ROWS)[:-1],
    "one long key": lambda: {"k" * 5_000: 1},
    "exceptions": lambda: [ValueError(SECRET)] * 500,
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_r110_r112_values_of_every_kind(stage: Stage, kind: str, thread: bool) -> None:
    """R-110, R-112: whatever a handler returns, the content keeps to its bound, and what is kept can be read to its
    end.
    """
    tower = stage.tower(max_result_bytes=1_000)
    tower.add_tool(RUBBISH[kind], name="give", independent=True, schema={}, run_in="thread" if thread else None)
    if not thread:
        tower = stage.tower(max_result_bytes=1_000)

        async def give() -> Any:
            return RUBBISH[kind]()

        tower.add_tool(give, independent=True)
    result = one(stage, tower)
    assert result.ok, result.content
    assert len(result.content.encode()) <= 1_000
    read = pages(tower, result.handle)
    assert all(len(page.content.encode()) <= 1_000 for page in read)
    assert all(page.complete == (kind not in ("endless", "endless inside", "too deep")) for page in read)
    if kind == "generator":
        assert put_together(read) == list(range(5_000))
    elif kind == "generator inside":
        assert put_together(read) == {"rows": list(range(5_000)), "next": "c2"}
    elif kind == "JSON text":
        assert put_together(read) == ROWS
    elif kind == "broken JSON text":
        assert "".join(str(page.data) for page in read) == json.dumps(ROWS)[:-1]


# ==================================================================== large ones, on a thread


LARGE = {"items": [{"id": n, "text": "x" * 100} for n in range(12_000)], "next": "c2"}


def test_g12_a_value_of_megabytes_is_written_down_on_a_thread(stage: Stage) -> None:
    """R-110, R-112: more than the loop should stand still for is read on a worker thread, to its end: the size is exact
    and all of it is kept.
    """
    tower = stage.tower(max_result_bytes=4_000)
    giving(tower, LARGE)
    giving(tower, json.dumps(LARGE), "text")
    giving(tower, "line of text\n" * 400_000, "lines")
    giving(tower, [LARGE["items"][:4_000]], "middling")
    batch = run_batch(stage, tower, [Call(name, {}) for name in ("give", "text", "lines", "middling")])
    assert batch.ok
    assert batch[0].original_bytes == len(json.dumps(LARGE, separators=(",", ":")))
    assert json.loads(batch[0].content)["truncated"]["dropped"][".items"].endswith("of 12000 items")
    assert put_together(pages(tower, batch[0].handle)) == LARGE
    assert put_together(pages(tower, batch[1].handle)) == LARGE
    assert "".join(str(page.data) for page in pages(tower, batch[2].handle)) == "line of text\n" * 400_000
    assert put_together(pages(tower, batch[3].handle)) == [LARGE["items"][:4_000]]


def test_what_is_too_large_to_be_kept_is_cut(stage: Stage, thread: bool) -> None:
    """R-110: one that takes more than half of the room is cut, as without a store."""
    tower = stage.tower(max_result_bytes=4_000, max_stored_bytes=1_000_000)
    giving(tower, LARGE, thread=thread)
    giving(tower, "x" * 600_000, "text", thread=thread)
    giving(tower, dict.fromkeys(range(100_000), "x"), "set", thread=thread)
    batch = run_batch(stage, tower, [Call("give", {}), Call("text", {}), Call("set", {})])
    assert batch.ok
    assert [result.handle for result in batch] == [None, None, None]
    assert all(len(result.content.encode()) <= 4_000 for result in batch)


def test_a_value_that_changes_while_it_is_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1, R-110: where it cannot be read a second time it is told in part, without a handle; where it has no form at
    all, that is an encoding error of that call.
    """
    tower = stage.tower(max_result_bytes=4_000)
    value = dict(LARGE)
    giving(tower, value)
    real = oversized.encode
    patient: list[Any] = []

    def changed(given: object, limit: int, encoder: Any = None, keep: Any = None) -> Any:
        if keep is not None and keep.patient:
            patient.append(given)
            raise RuntimeError("dictionary changed size during iteration")
        return real(given, limit, encoder, keep)

    monkeypatch.setattr(oversized, "encode", changed)
    result = one(stage, tower)
    assert result.ok
    assert result.handle is None
    assert patient
    assert json.loads(result.content)["result"]["next"] == "c2"

    def hopeless(given: object, limit: int, encoder: Any = None, keep: Any = None) -> Any:
        value["odd"] = object()
        if keep is not None and keep.patient:
            raise RuntimeError
        return real(given, limit, encoder, keep)

    monkeypatch.setattr(oversized, "encode", hopeless)
    assert one(stage, tower).code == "encoding_error"


def test_a_fault_in_keeping_costs_the_handle_only(
    stage: Stage, thread: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """G1: whatever fails in paging or keeping, the result is there, cut; that is logged once, by type alone."""
    tower = stage.tower(max_result_bytes=1_000, max_batch_bytes=1_500)
    giving(tower, ROWS, thread=thread)
    giving(tower, "x" * 900, "whole")

    def fail(*_: object) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(tower._core.keeper, "keep", fail)
    with caplog.at_level(logging.WARNING, "towerman"):
        batch = run_batch(stage, tower, [Call("give", {}), Call("give", {}), Call("whole", {})])
    assert batch.ok
    assert [result.handle for result in batch] == [None, None, None]
    assert [record.getMessage() for record in caplog.records] == ["a large result could not be kept: ValueError"]


# ==================================================================== a summary


def test_r110_a_summary_is_told_in_place_of_a_cut(stage: Stage, thread: bool) -> None:
    """R-110, R-112: what `summarize` makes of an oversized value is told, marked as a summary with the size of the
    whole and the handle, which leads to the whole; what fits is not summed up.
    """
    tower = stage.tower(max_result_bytes=1_000)
    tower.add_tool(read_result)
    seen: list[str] = []

    def short(value: Any) -> Any:
        seen.append(threading.current_thread().name)
        return {"rows": len(value["items"])}

    giving(tower, ROWS, thread=thread, summarize=short)
    giving(tower, {"items": []}, "fits", thread=thread, summarize=short)
    batch = run_batch(stage, tower, [Call("give", {}), Call("fits", {})])
    told = json.loads(batch[0].content)
    assert told["result"] == {"rows": 1000}
    assert told["summarized"]["original_bytes"] == batch[0].original_bytes
    assert told["summarized"]["handle"] == batch[0].handle
    assert batch[1].content == '{"items":[]}'
    assert len(seen) == 1
    assert seen[0].startswith("towerman-worker"), "it was called on the loop"
    assert put_together(pages(tower, batch[0].handle)) == ROWS


@pytest.mark.parametrize("results", ["memory", "off"])
def test_r110_a_summary_may_be_a_coroutine_and_is_bounded(stage: Stage, thread: bool, results: str) -> None:
    """R-110: an async summary runs on a loop of its own; one that is too long itself is cut."""
    tower = stage.tower(max_result_bytes=1_000, results=results)

    async def short(value: Any) -> str:
        await asyncio.sleep(0)
        return "summary " * 1_000

    giving(tower, ROWS, thread=thread, summarize=short)
    result = one(stage, tower)
    assert result.ok
    assert len(result.content.encode()) <= 1_000
    assert result.content.startswith("summary summary")
    assert f"[summary of {result.original_bytes} bytes" in result.content
    assert (result.handle is None) == (results == "off")


def test_r110_a_summary_that_fails_leaves_the_cut(stage: Stage, thread: bool, caplog: pytest.LogCaptureFixture) -> None:
    """R-110, G8: the value is cut, with its handle; logged once, without what the exception says."""
    tower = stage.tower(max_result_bytes=1_000)

    def fail(value: Any) -> str:
        raise ValueError(SECRET)

    giving(tower, ROWS, thread=thread, summarize=fail)
    giving(tower, ROWS, "no_form", thread=thread, summarize=lambda value: object())
    with caplog.at_level(logging.WARNING, "towerman"):
        batch = run_batch(stage, tower, [Call("give", {}), Call("give", {}), Call("no_form", {})])
    for result in batch:
        assert json.loads(result.content)["truncated"]["handle"] == result.handle
    told = sorted(record.getMessage() for record in caplog.records)
    assert told == [
        "the summary of tool 'give' failed, its results are cut: ValueError",
        "the summary of tool 'no_form' failed, its results are cut: EncodingError",
    ]


def test_r110_a_summary_that_takes_too_long_is_not_waited_for(
    stage: Stage, thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """R-110, G12: after ten seconds, or when the call's own time is over, the value is told in part, as the success
    that it is, with its handle; nothing is held, and what the summary brings later is dropped.
    """
    tower = stage.tower(max_result_bytes=1_000, timeout=300)

    def slow(value: Any) -> str:
        stage.rest(stage.loop, 60)
        return "too late"

    giving(tower, ROWS, thread=thread, summarize=slow)
    giving(tower, ROWS, "hurried", thread=thread, summarize=slow, timeout=3)

    async def main() -> BatchResult:
        stage.loop = here()
        batch = await tower.execute([Call("give", {}), Call("hurried", {})])
        assert stage.clock.value == 10
        await asyncio.sleep(60)  # the threads that nobody waits for
        return batch

    with caplog.at_level(logging.WARNING, "towerman"):
        batch = stage.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        f"the summary of tool '{name}' took too long, its result is cut: TimeoutError" for name in ("hurried", "give")
    ]
    assert batch.ok
    assert [result.ran for result in batch] == [10.0, 3.0]
    for result in batch:
        assert json.loads(result.content)["truncated"]["handle"] == result.handle
        assert put_together(pages(tower, result.handle)) == ROWS
    assert tower.statistics().orphans == 0


@pytest.mark.parametrize("how", ["call", "run", "caller", "deadline"])
def test_r110_a_cancel_while_a_value_is_summed_up(stage: Stage, thread: bool, how: str) -> None:
    """G10, R-110: the handler has returned, so the call has succeeded: a cancel or a deadline seals the value."""
    tower = stage.tower(max_result_bytes=1_000)

    def slow(value: Any) -> str:
        stage.rest(stage.loop, 8)
        return "too late"

    giving(tower, ROWS, thread=thread, summarize=slow)

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run(deadline=2 if how == "deadline" else None) as run:
            work = asyncio.ensure_future(run.execute([Call("give", {}, "c")]))
            await asyncio.sleep(2)
            if how == "call":
                run.cancel(call_id="c")
            elif how == "run":
                run.cancel()
            elif how == "caller":
                work.cancel()
            await asyncio.wait([work])
            assert stage.clock.value == 2
            assert work.cancelled() == (how == "caller")
            assert run.last_batch is not None
        await asyncio.sleep(8)  # the thread that nobody waits for
        return run.last_batch

    (result,) = stage.run(main())
    assert (result.outcome, result.applied) == ("ok", "yes")
    assert json.loads(result.content)["truncated"]["handle"] == result.handle


def test_a_cancel_while_megabytes_are_written_down(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G10: the value is told in part, without a handle; what the thread has kept by then is forgotten."""
    tower = stage.tower(max_result_bytes=4_000)
    giving(tower, LARGE)
    giving(tower, LARGE["items"][:6_000], "middling")
    real = oversized.Oversized._written

    def slow(self: Any, job: Any, large: Any) -> Any:
        stage.rest(stage.loop, 5)
        return real(self, job, large)

    monkeypatch.setattr(oversized.Oversized, "_written", slow)

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run() as run:
            work = asyncio.ensure_future(run.execute([Call("give", {}), Call("middling", {})]))
            await asyncio.sleep(1)
            run.cancel()
            done = await work
        await asyncio.sleep(10)
        return done

    batch = stage.run(main())
    assert [result.outcome for result in batch] == ["ok", "ok"]
    assert [result.handle for result in batch] == [None, None]
    assert json.loads(batch[0].content)["result"]["next"] == "c2"
    assert json.loads(batch[1].content)["truncated"]["dropped"]
    assert tower.statistics().results_kept == 0


def test_a_cancel_while_what_has_no_form_is_written_down(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1: a value that was spoilt since, and cannot be told in part either, is an encoding error of its call."""
    tower = stage.tower(max_result_bytes=4_000)
    value: dict[str, Any] = dict(LARGE)
    giving(tower, value)

    def slow(self: Any, job: Any, large: Any) -> Any:
        stage.rest(stage.loop, 5)
        return large

    monkeypatch.setattr(oversized.Oversized, "_written", slow)

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run() as run:
            work = asyncio.ensure_future(run.execute([Call("give", {})]))
            await asyncio.sleep(1)
            value["odd"] = object()
            value["items"] = []
            run.cancel()
            done = await work
        await asyncio.sleep(10)
        return done

    assert [result.code for result in stage.run(main())] == ["encoding_error"]


def test_no_thread_for_a_summary(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1: where the system gives no thread, the value is told in part."""
    tower = stage.tower(max_result_bytes=1_000)
    giving(tower, ROWS, summarize=lambda value: "short")
    giving(tower, LARGE, "large")

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(type(tower._core.workers), "submit", refuse)
        batch = run_batch(stage, tower, [Call("give", {}), Call("large", {})])
    assert batch.ok
    assert json.loads(batch[0].content)["truncated"]["handle"] == batch[0].handle
    assert json.loads(batch[1].content)["result"]["next"] == "c2"


def test_a_late_value_is_a_dead_letter_with_its_handle(stage: Stage) -> None:
    """R-112: what a thread brings after its call was sealed is kept like any large result."""
    tower = stage.tower(max_result_bytes=1_000, timeout=1)

    def late() -> Any:
        stage.rest(stage.loop, 5)
        return ROWS

    tower.add_tool(late, independent=True)
    assert one(stage, tower, "late").code == "handler_timeout"
    (letter,) = tower.dead_letters()
    assert put_together(pages(tower, json.loads(letter.content)["truncated"]["handle"])) == ROWS


# ==================================================================== where they are kept


def test_r112_a_folder_outlives_the_tower(stage: Stage, tmp_path: Path) -> None:
    """R-112: with results=FOLDER another tower with the same folder reads on; a tower that ends waits for its files."""
    path = tmp_path / "results"
    tower = stage.tower(max_result_bytes=1_000, results=str(path))
    giving(tower, ROWS)
    handle = one(stage, tower).handle
    stage.run(tower.aclose())
    assert len(list(path.iterdir())) == 1
    assert put_together(pages(tower, handle)) == ROWS
    other = stage.tower(results=path)
    assert put_together(pages(other, handle)) == ROWS
    assert other.statistics().results_kept == 0
    with pytest.raises(PolicyError, match="results: a tower keeps its store"):
        other.configure(results="memory")


@pytest.mark.parametrize("results", ["auto", "journal"])
def test_r112_a_journal_keeps_large_results(tmp_path: Path, results: str) -> None:
    """R-112: where there is a journal, results are kept there and outlive the process, with their tenant."""
    path = str(tmp_path / "towerman.db")
    with Tower(max_result_bytes=1_000, journal=path, results=results) as tower:
        giving(tower, ROWS, read_only=True)
        giving(tower, "line\n" * 300_000, "lines", read_only=True)
        batch = tower.execute_sync([Call("give", {}), Call("lines", {})], tenant="t")
        assert batch.ok
    assert tower.statistics().results_kept == 0
    with Tower(journal=path) as other:
        other.add_tool(read_result)
        assert put_together(pages(other, batch[0].handle)) == ROWS
        assert other.read(str(batch[1].handle), 700).data
        for tenant in ("t", "u"):
            (read,) = other.execute_sync([Call("read_result", {"handle": batch[0].handle})], tenant=tenant)
            assert read.ok == (tenant == "t")
        other._core.keeper.drop(str(batch[0].handle))
        with pytest.raises(InputError, match="read: handle"):
            other.read(str(batch[0].handle))
    with pytest.raises(InputError, match="read: handle"):
        other.read(str(batch[1].handle))
    assert repr(other._core.keeper._store) == "JournalStore()"
    with Tower(max_result_bytes=1_000, journal=path, results="memory") as memory:
        giving(memory, ROWS, read_only=True)
        (result,) = memory.execute_sync([Call("give", {})])
        assert put_together(pages(memory, result.handle)) == ROWS
        assert memory.statistics().results_kept == 1


def test_r112_lifetime_and_room_change_while_calls_run(stage: Stage) -> None:
    """R-64, R-112: both are options like any other."""
    tower = stage.tower(max_result_bytes=1_000)
    giving(tower, ROWS)
    handle = str(one(stage, tower).handle)
    stage.clock.advance(1_800)
    assert tower.read(handle).number == 1
    tower.configure(result_lifetime=600)
    with pytest.raises(InputError, match="read: handle"):
        tower.read(handle)
    tower.configure(result_lifetime=3600, max_stored_bytes=10_000)
    assert one(stage, tower).handle is None
    tower.configure(max_stored_bytes=200_000)
    assert one(stage, tower).handle is not None


def test_r112_ten_thousand_large_results_keep_to_the_bound() -> None:
    """R-112: memory does not grow without bound; the newest are there."""
    tower = Tower(max_result_bytes=512, max_stored_bytes=500_000, max_calls_per_batch=10_000, max_queued=10_000)
    giving(tower, "line of text\n" * 800)
    batch = tower.execute_sync([Call("give", {})] * 10_000)
    assert batch.ok
    found = tower.statistics()
    assert found.kept_bytes <= 500_000
    assert found.results_kept + found.results_dropped == 10_000
    tower._core.keeper.validate()
    kept = [result.handle for result in batch if result.handle in tower._core.keeper._kept]
    assert len(kept) == found.results_kept > 20
    assert tower.read(str(kept[-1])).number == 1
    tower.close()


# ==================================================================== the bound of a batch


def test_r111_r113_protected_results_are_trimmed_last(stage: Stage) -> None:
    """R-111, R-113: results of `protect`ed tools, and of calls that others needed, share the room first; the order
    stays as it was emitted, the others say where they can be read, and the same batch gives the same bytes.
    """

    def run() -> BatchResult:
        tower = stage.tower(max_batch_bytes=6_000, run_concurrency=4)
        giving(tower, "a\n" * 1_500, "search")
        giving(tower, "b\n" * 1_500, "contract", protect=True)
        giving(tower, "c\n" * 1_000, "needed")
        calls = [
            Call("search", {}, "s1"),
            Call("needed", {}, "n"),
            Call("contract", {}),
            Call("search", {}, "s2", needs=["n"]),
            Call("search", {}, "s3"),
        ]
        batch = run_batch(stage, tower, calls)
        assert sum(len(result.content.encode()) for result in batch) <= 6_000
        for result in batch:
            if result.handle is not None:
                assert "".join(str(page.data) for page in pages(tower, result.handle)) == result.value
        return batch

    batch = run()
    assert [result.tool for result in batch] == ["search", "needed", "contract", "search", "search"]
    assert batch[1].content == "c\n" * 1_000
    assert batch[2].content == "b\n" * 1_500
    sizes = [len(batch[place].content.encode()) for place in (0, 3, 4)]
    assert max(sizes) - min(sizes) <= 2
    assert all(str(batch[place].handle) in batch[place].content for place in (0, 3, 4))
    assert [result.content for result in run()] == [result.content for result in batch]


def test_r111_protected_results_share_what_there_is(stage: Stage) -> None:
    """R-111: where even those that go first are too large, they share; the others say where they are."""
    tower = stage.tower(max_batch_bytes=4_000)
    giving(tower, "a\n" * 1_500, "search")
    giving(tower, "b\n" * 1_500, "contract", protect=True)
    giving(tower, "tiny", "small")
    batch = run_batch(stage, tower, [Call(name, {}) for name in ("contract", "search", "small", "contract")])
    sizes = [len(result.content.encode()) for result in batch]
    assert sum(sizes) <= 4_000
    assert sizes[2] == 4
    assert 200 <= sizes[1] <= 256
    assert str(batch[1].handle) in batch[1].content
    assert abs(sizes[0] - sizes[3]) <= 2
    assert sizes[0] > 1_800


@pytest.mark.parametrize("kind", ["text", "rows", "JSON text", "error"])
def test_r111_what_is_trimmed_has_a_handle(stage: Stage, kind: str) -> None:
    """R-111, R-112: a result that was whole and is cut by the bound of its batch can be read whole by its handle."""
    tower = stage.tower(max_batch_bytes=3_000, max_result_bytes=10_000)
    rows = [{"n": n} for n in range(400)]
    value = {"text": "line\n" * 900, "rows": rows, "JSON text": json.dumps(rows, indent=1), "error": None}[kind]

    async def fail() -> None:
        from towerman import ToolError

        raise ToolError("word " * 900)

    if kind == "error":
        tower.add_tool(fail, name="give", independent=True)
    else:
        giving(tower, value)
    batch = run_batch(stage, tower, [Call("give", {})] * 3)
    assert sum(len(result.content.encode()) for result in batch) <= 3_000
    for result in batch:
        assert result.handle is not None
        assert str(result.handle) in result.content
        found = put_together(pages(tower, result.handle))
        if kind == "error":
            assert found["error"]["code"] == "handler_error"
        else:
            assert found == (rows if kind == "JSON text" else value)


def test_r111_pages_that_are_trimmed_are_not_stored_again(stage: Stage) -> None:
    """R-111: many pages in one batch share its bound; no handle leads to a page."""
    tower = stage.tower(max_batch_bytes=3_000, max_result_bytes=2_000)
    tower.add_tool(read_result)
    giving(tower, ROWS)
    handle = one(stage, tower).handle
    batch = run_batch(stage, tower, [Call("read_result", {"handle": handle, "page": page}) for page in (1, 2, 3)])
    assert sum(len(result.content.encode()) for result in batch) <= 3_000
    assert [result.handle for result in batch] == [None, None, None]
    assert all(json.loads(result.content)["truncated"] for result in batch)
    assert tower.statistics().results_kept == 1


def test_r111_nothing_is_stored_for_what_is_trimmed_where_that_is_off(stage: Stage) -> None:
    """R-111: with results="off", or where it is too much, what is trimmed has no handle."""
    for options in ({"results": "off"}, {"max_stored_bytes": 100}):
        tower = stage.tower(max_batch_bytes=1_000, **options)
        giving(tower, "line\n" * 500)
        batch = run_batch(stage, tower, [Call("give", {})] * 2)
        assert sum(len(result.content.encode()) for result in batch) <= 1_000
        assert [result.handle for result in batch] == [None, None]


def test_shared_results_have_one_handle(stage: Stage) -> None:
    """S11, R-112: calls that one run answers share its content and its handle, trimmed or not."""
    for options in ({"max_result_bytes": 1_000}, {"max_batch_bytes": 3_000}):
        tower = stage.tower(**options)
        giving(tower, "line\n" * 500, share_identical=True)
        batch = run_batch(stage, tower, [Call("give", {})] * 3)
        assert len({result.handle for result in batch}) == 1
        assert len({result.content for result in batch}) == 1
        assert tower.statistics().results_kept == 1
        assert "".join(str(page.data) for page in pages(tower, batch[0].handle)) == "line\n" * 500


# ==================================================================== tokens


def test_r143_tokens_stand_beside_time(stage: Stage) -> None:
    """R-143: in spans, the timeline, events, the report and statistics; of what the model is sent, not of the whole."""
    events: list[Event] = []
    tower = stage.tower(max_result_bytes=1_000, mode="observe", observers=[events.append])
    giving(tower, "x" * 400)
    giving(tower, "y" * 100_000, "dump")
    batch = run_batch(stage, tower, [Call("give", {}), Call("dump", {}), Call("unknown", {})])
    expected = [-(-len(result.content.encode()) // 4) for result in batch]
    assert expected[0] == 100
    assert expected[1] == 250
    assert [span.tokens for span in batch.spans()] == expected
    drawing = batch.timeline(110)
    assert drawing.splitlines()[0].endswith(f"about {sum(expected)} tokens")
    assert " tokens" in drawing.splitlines()[2]
    assert tower.flush(30)
    told = {event.index: event.tokens for event in events if event.tokens is not None}
    assert [told[index] for index in range(3)] == expected
    report = tower.report()
    assert report.tokens == sum(expected)
    assert {one.name: one.tokens for one in report.tools} == dict(
        zip(["give", "dump", "<unknown tool>"], expected, strict=True)
    )
    assert f"results of about {sum(expected)} tokens" in str(report)
    assert report.to_dict()["tokens"] == sum(expected)
    found = tower.statistics()
    assert found.result_bytes == sum(len(result.content.encode()) for result in batch)
    assert abs(found.result_tokens - sum(expected)) <= 2


def test_r143_what_is_trimmed_is_counted_as_it_is_sent(stage: Stage) -> None:
    """R-143: the batch's own bound comes before the count, also in the report; nested calls are told to no model."""
    tower = stage.tower(max_batch_bytes=1_000, mode="observe")
    giving(tower, "x" * 3_000)
    batch = run_batch(stage, tower, [Call("give", {})] * 2)
    expected = sum(-(-len(result.content.encode()) // 4) for result in batch)
    assert tower.report().tokens == expected
    assert tower.statistics().result_bytes <= 1_000


def test_r143_a_counter_of_ones_own(stage: Stage) -> None:
    """R-143: it is called once for each result, on a thread where somebody looks on, or else when somebody asks."""
    asked: list[str] = []

    def count(text: str) -> int:
        asked.append(threading.current_thread().name)
        return len(text.split())

    quiet = stage.tower(count_tokens=count)
    giving(quiet, "one two three")
    batch = run_batch(stage, quiet, [Call("give", {})] * 2)
    assert asked == []
    assert [span.tokens for span in batch.spans()] == [3, 3]
    assert "about 6 tokens" in batch.timeline()
    assert len(asked) == 2
    assert quiet.statistics().result_tokens == 6
    asked.clear()

    events: list[Event] = []
    tower = stage.tower(count_tokens=count, mode="observe", observers=[events.append])
    giving(tower, "one two three")

    async def main() -> BatchResult:
        batch = await tower.execute([Call("give", {})] * 2)
        await asyncio.sleep(1)  # virtual time goes on when the thread has ended
        return batch

    batch = stage.run(main())
    assert tower.flush(30)
    assert [(event.index, event.tokens) for event in events if event.tokens is not None] == [(0, 3), (1, 3)]
    assert {event.kind for event in events if event.tokens is not None} == {"counted"}
    assert tower.report().tokens == 6
    assert [span.tokens for span in batch.spans()] == [3, 3]
    assert len(asked) == 2
    assert all(name.startswith("towerman-worker") for name in asked)


def test_r143_no_thread_for_counting(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-143: where the system gives no thread, nothing is told, and asking still works."""
    events: list[Event] = []
    tower = stage.tower(count_tokens=len, observers=[events.append])
    giving(tower, "text")

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(type(tower._core.workers), "submit", refuse)
        batch = run_batch(stage, tower, [Call("give", {})])
    assert [span.tokens for span in batch.spans()] == [4]
    tower.flush(30)
    assert not [event for event in events if event.kind == "counted"]


def test_r143_the_counter_can_be_changed(stage: Stage) -> None:
    """R-64: it is an option like any other."""
    tower = stage.tower()
    giving(tower, "one two three")
    tower.configure(count_tokens=lambda text: 7)
    assert run_batch(stage, tower, [Call("give", {})]).spans()[0].tokens == 7


def test_r143_nested_results_are_told_to_no_model(stage: Stage) -> None:
    """R-143: results of nested calls go to a handler; the sum of what models are told leaves them out."""
    from towerman import Context

    tower = stage.tower()
    giving(tower, "x" * 1_000)

    async def outer(ctx: Context[None]) -> str:
        await ctx.execute([Call("give", {})])
        return "done"

    tower.add_tool(outer, independent=True)
    one(stage, tower, "outer")
    assert tower.statistics().result_bytes == 4
