"""A tower with a journal (S14, G2, G8, G10, R-121): no effect is unwritten, made twice, or guessed about."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from kit import Stage, codes, here, on_stage, sound, whole_again
from test_journal_store import Mirror, dead, rows

from towerman import BatchResult, Call, Context, Event, Journal, PolicyError, Result, Retry, Run, ToolError, Tower
from towerman.journal import calls
from towerman.records import Answer, Intent, JournalUnavailable, Unsettled, digest, identity, place
from towerman.runner import filing

stage = pytest.fixture(on_stage)

PATHS = ("memory", "file")


@pytest.fixture(params=PATHS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A journal in memory, and one in a file."""
    return ":memory:" if request.param == "memory" else str(tmp_path / "j.db")


@pytest.fixture
def kept() -> Iterator[list[Journal]]:
    """Journals of a test's own, closed when its towers are done with."""
    made: list[Journal] = []
    yield made
    for one in made:
        one.close()


class Desk:
    """A tower whose handlers note what they did, in the order in which they did it."""

    def __init__(self, stage: Stage, journal: Any, **options: Any) -> None:
        self.stage = stage
        self.did: list[tuple[str, int]] = []
        self.keys: list[str | None] = []
        self.tower = stage.tower(journal=journal, **options)
        self.events: list[Event] = []
        tower = self.tower

        @tower.tool(independent=True)
        async def pay(n: int, ctx: Context) -> str:
            return await self.do("pay", n, ctx)

        @tower.tool(independent=True, idempotent=True)
        async def put(n: int, ctx: Context) -> str:
            return await self.do("put", n, ctx)

        @tower.tool(independent=True, read_only=True)
        async def look(n: int, ctx: Context) -> str:
            return await self.do("look", n, ctx)

        @tower.tool(independent=True)
        def pay_in_thread(n: int, ctx: Context) -> str:
            self.did.append(("thread", n))
            self.keys.append(ctx.idempotency_key)
            return f"thread {n}"

    async def do(self, what: str, n: int, ctx: Context) -> str:
        """A handler's body: n below 0 fails, at once; else it takes a moment."""
        self.keys.append(ctx.idempotency_key)
        self.did.append((what, n))
        await asyncio.sleep(0.1)
        if n == -1:
            raise ValueError
        if n == -2:
            raise ToolError("no such account", applied="no")
        return f"{what} {n}"

    @property
    def journal(self) -> Journal:
        """Its journal."""
        assert self.tower._journal is not None
        return self.tower._journal

    def batch(
        self, *calls: Call, run_id: str | None = "run", batch_id: str | None = "b", **options: Any
    ) -> BatchResult:
        """Answer one batch in a run of this id."""

        async def main() -> BatchResult:
            self.stage.loop = here()
            async with self.tower.run(run_id, **options) as run:
                done = await run.execute(list(calls), batch_id=batch_id)
            await self.stage.settled(self.tower)
            return done

        done = self.stage.run(main())
        sound(done, calls)
        return done


def told(done: BatchResult) -> list[tuple[str, str | None, str, bool]]:
    """What is known of each call."""
    return [(one.outcome, one.code, one.applied, one.replayed) for one in done]


def hold(journal: Journal) -> Callable[[], None]:
    """Let a journal answer nothing until what is returned is called."""
    gate, at_it = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        at_it.set()
        assert gate.wait(30)

    counted, journal._writer.futures = journal._writer.futures, Future  # virtual time does not wait for this one
    journal._writer.ask(wait)
    journal._writer.futures = counted
    assert at_it.wait(30)
    return gate.set


CALLS = [
    Call("pay", {"n": 1}, "a"),
    Call("look", {"n": 2}, "b"),
    Call("put", {"n": 3}, "c"),
    Call("pay", {"n": -1}, "d"),
]


# ==================================================================== handed in again


def test_s14_a_batch_that_comes_again_is_answered_and_not_run(stage: Stage, where: str) -> None:
    """S14: the same calls in a run of the same id, under the same batch_id, get the same answers, and nothing runs."""
    desk = Desk(stage, where)
    first = desk.batch(*CALLS)
    assert [one.replayed for one in first] == [False] * 4
    did = list(desk.did)
    second = desk.batch(*CALLS)
    assert desk.did == did
    for one, other in zip(first, second, strict=True):
        assert other.replayed and other.started and other.attempts == 0 and other.ran == 0
        assert (one.outcome, one.code, one.applied) == (other.outcome, other.code, other.applied)
        assert one.content == other.content if one.ok else "not run again" in other.message
        assert other.call_id == one.call_id and other.value is None
        if one.ok:
            assert "out of the journal" in other.message
    statistics = desk.tower.statistics().journal
    assert statistics is not None
    assert (statistics.intents, statistics.replayed, statistics.unknown) == (3, 3, 1)


def test_s14_another_process_answers_too(stage: Stage, tmp_path: Path) -> None:
    """S14: what one tower has done, another one over the same file knows, in whatever process it is."""
    path = tmp_path / "j.db"
    one = Desk(stage, path)
    first = one.batch(*CALLS[:3])
    two = Desk(stage, str(path))
    second = two.batch(*CALLS[:3])
    assert two.did == [] and [one.content for one in first] == [one.content for one in second]
    assert all(one.replayed for one in second)


def test_s14_a_provider_s_response_is_known_by_its_id(stage: Stage, where: str) -> None:
    """S14: a response that is handed in again in its run is answered by the provider's own id; in another run it is
    another one.
    """
    desk = Desk(stage, where)

    def response(identifier: str) -> dict[str, Any]:
        calls = [{"id": "1", "type": "function", "function": {"name": "pay", "arguments": '{"n": 5}'}}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"id": identifier, "object": "chat.completion", "choices": [{"index": 0, "message": message}]}

    async def main() -> list[bool]:
        found = []
        for run_id, name in (("r", "x"), ("r", "x"), ("r", "y"), ("other", "x")):
            async with desk.tower.run(run_id) as run:
                found.append((await run.execute(response(name)))[0].replayed)
        return found

    assert stage.run(main()) == [False, True, False, False]
    assert len(desk.did) == 3


def test_s14_ids_that_come_back_each_turn_are_no_identity(stage: Stage, where: str) -> None:
    """S14: without key, response id and batch_id every hand-in is new, whatever the ids of the calls are."""
    desk = Desk(stage, where)
    for _ in range(3):
        done = desk.batch(Call("pay", {"n": 1}, "1"), Call("look", {"n": 1}, "2"), batch_id=None)
        assert not any(one.replayed for one in done)
    assert len(desk.did) == 6
    assert desk.journal.counts().result()["done"] == 3  # the writes, so that a crash over one is known


def test_s14_a_key_holds_over_runs_and_batches_and_not_over_tenants(stage: Stage, where: str) -> None:
    """S14: the caller's own key names a call wherever it comes; another tool or another tenant has another call."""
    desk = Desk(stage, where)
    call = Call("pay", {"n": 1}, "a", idempotency_key="order-1")
    assert not desk.batch(call, run_id="one", batch_id=None)[0].replayed
    assert desk.batch(call, run_id="two", batch_id="x")[0].replayed
    assert not desk.batch(Call("put", {"n": 1}, idempotency_key="order-1"), run_id="two")[0].replayed
    assert not desk.batch(call, run_id="three", tenant="acme")[0].replayed
    assert desk.batch(call, run_id="four", tenant="acme")[0].replayed
    assert len(desk.did) == 3


def test_a_key_for_other_arguments_is_a_conflict(stage: Stage, where: str) -> None:
    """S14: the same key, or the same place of the same batch, with other arguments: refused, nothing is applied."""
    desk = Desk(stage, where)
    desk.batch(Call("pay", {"n": 1}, idempotency_key="k"), Call("put", {"n": 1}))
    done = desk.batch(Call("pay", {"n": 2}, idempotency_key="k"), Call("put", {"n": 2}))
    assert told(done) == [("rejected", "idempotency_conflict", "no", False)] * 2
    assert "Use another key" in done[0].message and "batch_id" in done[1].message
    assert desk.did == [("pay", 1), ("put", 1)]
    assert desk.batch(Call("pay", '{ "n": 1 }', idempotency_key="k"), batch_id=None)[0].replayed


def test_what_never_started_is_not_written_down(stage: Stage, where: str) -> None:
    """Refused calls (unknown tool, arguments, permission) leave nothing behind, and may run later."""
    desk = Desk(stage, where)
    calls = [Call("no", {}), Call("pay", {"n": "x"}), Call("put", {"n": 1})]
    done = desk.batch(*calls, deny="put")
    assert codes(done) == ["unknown_tool", "invalid_arguments", "permission_denied"]
    assert desk.journal.calls().result() == []
    again = desk.batch(*calls)
    assert again[2].ok and not again[2].replayed


def test_a_failure_that_applied_nothing_is_told_again(stage: Stage, where: str) -> None:
    """An answer is an answer: a ToolError with applied="no" is what the call came to, also the second time."""
    desk = Desk(stage, where)
    first = desk.batch(Call("pay", {"n": -2}))
    second = desk.batch(Call("pay", {"n": -2}))
    assert told(first) == [("error", "handler_error", "no", False)]
    assert told(second) == [("error", "handler_error", "no", True)]
    assert second[0].message.startswith("no such account") and len(desk.did) == 1


def test_g10_a_failed_write_runs_again_only_where_that_is_harmless(stage: Stage, where: str) -> None:
    """G10, R-120: after an error of unknown effect the call is not run again, unless the tool is idempotent; then it
    carries the same key.
    """
    desk = Desk(stage, where)
    for _ in range(2):
        done = desk.batch(Call("pay", {"n": -1}), Call("put", {"n": -1}))
    assert told(done) == [("error", "handler_error", "unknown", True), ("error", "handler_error", "unknown", False)]
    assert desk.did == [("pay", -1), ("put", -1), ("put", -1)]
    assert desk.keys[1] == desk.keys[2] != desk.keys[0]
    assert [one.tool for one in desk.journal.unknown().result()] == ["pay", "put"]


def test_replayed_calls_let_go_on_what_needs_them(stage: Stage, where: str) -> None:
    """A call that needs one that was answered from the journal runs, and one that needs a failed one is skipped."""
    desk = Desk(stage, where)
    calls = [Call("pay", {"n": 1}, "a"), Call("pay", {"n": -2}, "b")]
    desk.batch(*calls)
    more = [*calls, Call("put", {"n": 5}, "c", needs=["a"]), Call("put", {"n": 6}, "d", needs=["b"])]
    done = desk.batch(*more)
    assert [one.outcome for one in done] == ["ok", "error", "ok", "skipped"]
    assert desk.did[2:] == [("put", 5)]


def test_a_large_batch_is_looked_up_in_one_step(stage: Stage, where: str) -> None:
    """Many calls with identities cost one look-up, and the loop gets its turns."""
    desk = Desk(stage, where, max_calls_per_batch=2000, on_excess="queue")
    calls = [Call("look", {"n": n}) for n in range(1200)]
    desk.batch(*calls)
    desk.journal.counts().result()
    before = desk.journal.statistics()["steps"]
    done = desk.batch(*calls)
    assert all(one.replayed for one in done)
    assert desk.journal.statistics()["steps"] - before <= 2


# ==================================================================== before the first line, before the result


def test_g2_the_intent_is_on_the_disk_before_the_first_line(stage: Stage, tmp_path: Path) -> None:
    """S14, G2: when a handler's first line is reached, whoever reads the file sees its intent; and when its result is
    sealed, its outcome.
    """
    path = tmp_path / "j.db"
    seen: list[Any] = []
    tower = stage.tower(journal=path)

    @tower.tool(independent=True)
    async def pay() -> str:
        seen.append(rows(path, "SELECT state, tool, run_id FROM calls"))
        return "paid"

    @tower.tool(independent=True)
    def pay_in_thread() -> str:
        seen.append(rows(path, "SELECT state FROM calls WHERE tool = 'pay_in_thread'"))
        return "paid"

    sealed: list[Any] = []

    def on_result(result: Result) -> None:
        sealed.append(rows(path, "SELECT state, applied FROM calls WHERE slot = ?", result.index))

    async def main() -> BatchResult:
        stage.loop = here()
        return await tower.execute(
            [Call("pay", {}), Call("pay_in_thread", {})], run_id="run", max_concurrency=1, on_result=on_result
        )

    assert stage.run(main()).ok
    assert seen == [[("open", "pay", "run")], [("open",)]]
    assert sealed == [[("done", "yes")], [("done", "yes")]]


def test_a_call_without_effect_waits_for_nothing(stage: Stage, tmp_path: Path) -> None:
    """A read starts and ends while the journal is at something else; it is written down later."""
    desk = Desk(stage, tmp_path / "j.db")
    desk.batch(Call("look", {"n": 0}), batch_id="warm")

    async def main() -> BatchResult:
        async with desk.tower.run("run") as run:
            let_go = hold(desk.journal)
            try:
                return await run.execute([Call("look", {"n": 1})])
            finally:
                let_go()

    assert stage.run(main()).ok


def test_what_a_call_held_is_free_before_its_outcome_is_written(stage: Stage, where: str) -> None:
    """G7: permits are free when the work has ended, not when its outcome is on the disk."""
    tower = stage.tower(journal=where, max_concurrency=1)
    order: list[str] = []

    @tower.tool(independent=True)
    async def pay(n: int) -> str:
        order.append(f"begins {n}")
        return "paid"

    journal = tower._journal
    assert journal is not None
    real = journal.finish_all

    def finish_all(ended: Any) -> Any:
        order.append(f"outcome of {len(ended)}")
        return real(ended)

    journal.finish_all = finish_all  # type: ignore[method-assign]

    def on_result(result: Result) -> None:
        order.append(f"sealed {result.index} with {tower.statistics().pools['process'].held} held")

    async def main() -> None:
        await tower.execute([Call("pay", {"n": n}) for n in range(2)], on_result=on_result)

    stage.run(main())
    assert order[:3] == ["begins 0", "outcome of 1", "begins 1"] or order[2] == "sealed 0 with 1 held"


def test_r121_a_handler_gets_the_same_key_each_time(stage: Stage, where: str) -> None:
    """R-121, S9: a call with an effect has a key, its caller's own or one of its identity, the same on every resume; a
    read has none, and a call that nobody can find again has one that is new each time.
    """
    desk = Desk(stage, where)
    for _ in range(2):
        desk.batch(Call("put", {"n": -1}), Call("put", {"n": -1}, idempotency_key="mine"), Call("look", {"n": 1}))
    given = [key for key in desk.keys if key is not None]
    assert given[:2] == given[2:] and given[1] == "mine" and given[0].startswith("tm-")
    assert desk.keys.count(None) == 1  # the read's, which was answered the second time
    desk.keys.clear()
    for _ in range(2):
        desk.batch(Call("put", {"n": 1}), Call("pay_in_thread", {"n": 1}), batch_id=None)
    assert None not in desk.keys and len(set(desk.keys)) == 4


def test_a_key_is_made_without_a_journal_too(stage: Stage) -> None:
    """R-121, S14: where a call can be found again its key is made of that, also where nothing is written down; else it
    is new at each hand-in.
    """
    desk = Desk(stage, None, secret="shhh")
    for _ in range(2):
        desk.batch(Call("pay", {"n": 1}))
    for _ in range(2):
        desk.batch(Call("pay", {"n": 1}), Call("pay_in_thread", {"n": 1}), batch_id=None)
    desk.batch(Call("pay", {"n": 1}, idempotency_key=""), Call("look", {"n": 1}), batch_id=None)
    assert desk.keys[0] == desk.keys[1] is not None
    new = desk.keys[2:7]
    assert len({desk.keys[0], *new}) == 6 and all(key is not None and key.startswith("tm-") for key in new)
    assert desk.keys[7:] == [None]  # a read's
    assert desk.tower.statistics().journal is None


@pytest.mark.parametrize("way", ["journal", "batch_id", "neither"])
def test_r121_p70_a_made_key_is_the_same_in_each_attempt(stage: Stage, way: str) -> None:
    """R-121, P-70, G10: calls that came without a key have one each, the same in each attempt, so that a handler which
    drops what it has seen pays each of them, and pays it once.
    """
    tower = stage.tower(journal=":memory:" if way == "journal" else None)
    paid: dict[str | None, int] = {}
    seen: list[tuple[int, str | None]] = []

    @tower.tool(independent=True, idempotent=True, retry=Retry(3, initial_delay=0.01, max_delay=0.01))
    async def pay(n: int, ctx: Context) -> str:
        seen.append((n, ctx.idempotency_key))
        paid.setdefault(ctx.idempotency_key, n)
        if ctx.attempt < 3:
            raise ConnectionError
        return f"paid {n}"

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run("run") as run:
            calls = [Call("pay", {"n": n}) for n in (1, 1, 2)]
            done = await run.execute(calls, batch_id="b" if way == "batch_id" else None)
        await stage.settled(tower)
        return done

    done = stage.run(main())
    assert [one.attempts for one in done] == [3, 3, 3] and done.ok
    assert len(seen) == 9 and sorted(paid.values()) == [1, 1, 2] and None not in paid


def test_r121_one_run_that_answers_many_has_one_key(stage: Stage) -> None:
    """R-121, S11: calls that are shared or merged into one run have that run's key, the same in each of its attempts;
    what is handed in again has another.
    """
    tower = stage.tower()
    seen: list[str | None] = []

    @tower.tool(writes="desk", idempotent=True, share_identical=True, retry=Retry(2, initial_delay=0.01))
    async def tidy(ctx: Context) -> None:
        seen.append(ctx.idempotency_key)
        if ctx.attempt == 1:
            raise ConnectionError

    @tower.tool(
        idempotent=True,
        writes="box",
        merge=lambda many: {"n": [n for one in many for n in one["n"]]},
        retry=Retry(2, initial_delay=0.01),
    )
    async def post(n: list[int], ctx: Context) -> list[int]:
        seen.append(ctx.idempotency_key)
        if ctx.attempt == 1:
            raise ConnectionError
        return n

    async def main() -> None:
        stage.loop = here()
        for row in ([Call("tidy", {})] * 2, [Call("post", {"n": [n]}) for n in range(3)]):
            for _ in range(2):
                assert (await tower.execute(row)).ok
        await stage.settled(tower)

    stage.run(main())
    assert None not in seen and len(seen) == 8
    assert seen[::2] == seen[1::2] and len(set(seen)) == 4


# ==================================================================== at work elsewhere


def test_s14_a_call_at_work_is_joined(stage: Stage, where: str) -> None:
    """S14: the same call of another run waits for the first one's answer; it runs once, and holds nothing meanwhile."""
    desk = Desk(stage, where, max_concurrency=1)
    call = Call("pay", {"n": 1}, idempotency_key="k")

    async def main() -> list[Result]:
        async with desk.tower.run() as one, desk.tower.run() as two:
            first = asyncio.ensure_future(one.execute([call]))
            await asyncio.sleep(0.05)
            second = asyncio.ensure_future(two.execute([call, Call("look", {"n": 9})]))
            await asyncio.sleep(0.01)
            assert desk.tower.statistics().pools["process"].held == 1
            return [*await first, *await second]

    first, second, beside = stage.run(main())
    assert first.ok and second.ok and beside.ok and second.replayed
    assert second.waited > 0 and "the same call" in second.waited_for and second.content == first.content
    assert [what for what, _ in desk.did] == ["pay", "look"]
    assert desk.tower.statistics().journal.joined == 1  # type: ignore[union-attr]


def test_s14_two_that_come_at_the_same_moment_run_once(stage: Stage, where: str) -> None:
    """S14: where both have been looked up before either was begun, the one that is granted later joins the other."""
    desk = Desk(stage, where)
    call = Call("pay", {"n": 1}, idempotency_key="k")

    async def main() -> list[Result]:
        async with desk.tower.run() as one, desk.tower.run() as two:
            return [done[0] for done in await asyncio.gather(one.execute([call]), two.execute([call]))]

    results = stage.run(main())
    assert all(one.ok for one in results) and sorted(one.replayed for one in results) == [False, True]
    assert desk.did == [("pay", 1)]


def test_s14_the_same_key_twice_in_one_batch_runs_once(stage: Stage, where: str) -> None:
    """S14: a batch that holds one call twice, by its caller's key, has two results of one run."""
    desk = Desk(stage, where)
    call = Call("pay", {"n": 1}, idempotency_key="k")
    done = desk.batch(call, call, call, batch_id=None)
    assert [one.ok for one in done] == [True] * 3 and desk.did == [("pay", 1)]
    assert sorted(one.replayed for one in done) == [False, True, True]


# Another process is played by another journal object over the same file, which lives as long as it is open.


def begun_elsewhere(other: Journal, *calls: Call, batch_id: str = "b", **more: Any) -> list[bytes]:
    """Let another process begin calls of a batch in the run "run"; returns the tokens of their starts."""
    key = other.open().result()
    tokens = []
    for index, call in enumerate(calls):
        one = identity(call.tool, index, run_id="run", batch_id=batch_id, idempotency_key=call.idempotency_key)
        assert one is not None
        token, stored = bytes([index]) * 16, place(key, one)
        told = digest(key, call.tool, call.arguments)
        assert other.begin(Intent(token, stored, told, call.tool, "run", 1, index, **more)).result()[0] == "run"
        tokens.append(token)
    return tokens


class Shop:
    """A tower on real time; its handlers note what they did and do not wait."""

    def __init__(self, journal: Any, **options: Any) -> None:
        self.did: list[tuple[str, int]] = []
        self.tower = tower = Tower(journal=journal, **options)

        @tower.tool(independent=True)
        async def pay(n: int) -> str:
            self.did.append(("pay", n))
            return f"paid {n}"

        @tower.tool(independent=True, idempotent=True)
        async def put(n: int) -> str:
            self.did.append(("put", n))
            return f"put {n}"

    async def meanwhile(self, calls: list[Call], act: Callable[[Run, asyncio.Task[Any]], object]) -> BatchResult:
        """Hand a batch in, do something once it waits for another process, and give what came of it."""
        journal = self.tower._journal
        assert journal is not None
        async with self.tower.run("run") as run:
            task = asyncio.ensure_future(run.execute(calls, batch_id="b"))
            while not journal.statistics()["watched"]:
                await asyncio.sleep(0.001)
            told = act(run, task)
            if isinstance(told, Coroutine):
                await told
            await asyncio.wait([task])
            assert run.last_batch is not None
            sound(run.last_batch, calls)
            return run.last_batch

    def run(self, calls: list[Call], act: Callable[[Run, asyncio.Task[Any]], object]) -> BatchResult:
        """The same on a loop of its own; afterwards the tower is whole, and closed."""

        async def main() -> BatchResult:
            try:
                return await self.meanwhile(calls, act)
            finally:
                core = self.tower._core
                assert not core.joined and not core.flights
                assert not any(shell._joins for shell in self.tower._shells._all())
                whole_again(self.tower)
                await self.tower.aclose()

        return asyncio.run(main())


def test_s14_what_a_living_process_is_at_is_waited_for(tmp_path: Path) -> None:
    """S14: a call whose intent a living process has written waits, and gets that one's answer."""
    with Journal(tmp_path / "j.db") as other:
        [token] = begun_elsewhere(other, CALLS[0])
        theirs = Answer("ok", None, "yes", content="theirs", message="Done.")
        shop = Shop(tmp_path / "j.db")
        [result] = shop.run(CALLS[:1], lambda *_: other.finish(token, theirs))
    assert result.ok and result.replayed and result.content == "theirs" and shop.did == []
    assert result.waited > 0 and result.waited_for == ("the same call",)


@pytest.mark.parametrize("ending", ["withdrawn", "unknown", "died", "settled as applied", "settled as not applied"])
def test_what_follows_a_join(tmp_path: Path, ending: str) -> None:
    """S14: when the other one has not begun after all the call runs itself; when it has died the effect is unknown."""
    path = tmp_path / "j.db"
    other = Journal(path)
    [token] = begun_elsewhere(other, CALLS[0])
    lost = Answer("timed_out", "handler_timeout", "unknown", message="Late.", content="{}")

    def end(*_: object) -> object:
        if ending == "withdrawn":
            return other.withdraw(token)
        if ending == "unknown":
            return other.finish(token, lost)
        if ending == "died":
            return dead(path)
        other._writer.ask(lambda s: (calls.finish(s, token, lost), calls.settle(s, 1, "not" not in ending, None, None)))
        return None

    shop = Shop(path, max_wait=60)
    [result, beside] = shop.run([CALLS[0], Call("put", {"n": 7}, needs=["a"])], end)
    other.close()
    if ending in ("withdrawn", "settled as not applied"):
        assert result.ok and not result.replayed and shop.did == [("pay", 1), ("put", 7)]
    elif ending == "unknown":
        assert (result.code, result.applied, result.replayed) == ("handler_timeout", "unknown", True)
    elif ending == "died":
        assert (result.code, result.applied, result.started) == ("effect_unknown", "unknown", True)
        assert result.retryable == "no" and "somebody has to look" in result.message
    else:
        assert result.ok and result.applied == "yes" and "as somebody has looked up" in result.message
        assert shop.did == [("put", 7)]
    assert beside.ok is result.ok


def test_a_join_of_something_harmless_runs_when_the_other_has_died(tmp_path: Path) -> None:
    """S14: a call whose process has died runs again where that does no harm."""
    path = tmp_path / "j.db"
    with Journal(path) as other:
        begun_elsewhere(other, CALLS[2], harmless=True)
        shop = Shop(path, max_wait=60)
        [result] = shop.run([CALLS[2]], lambda *_: dead(path))
    assert result.ok and not result.replayed and shop.did == [("put", 3)]


def test_a_conflict_by_policy(tmp_path: Path) -> None:
    """`on_duplicate="conflict"`: a call that is at work elsewhere is refused at once, and its effect is not guessed."""
    with Journal(tmp_path / "j.db") as other:
        begun_elsewhere(other, CALLS[0])
        shop = Shop(tmp_path / "j.db", on_duplicate="conflict")

        async def main() -> Result:
            async with shop.tower:
                return (await shop.tower.execute(CALLS[:1], run_id="run", batch_id="b"))[0]

        result = asyncio.run(main())
    assert (result.outcome, result.code, result.applied) == ("rejected", "idempotency_conflict", "unknown")
    assert shop.did == [] and not result.started


def test_a_join_waits_no_longer_than_max_wait(stage: Stage, tmp_path: Path) -> None:
    """G12: whoever waits for the same call elsewhere is told after `max_wait`, or at the run's deadline."""
    desk = Desk(stage, tmp_path / "j.db", max_wait=3.0)
    with Journal(tmp_path / "j.db") as other:
        begun_elsewhere(other, CALLS[0])
        [result] = desk.batch(CALLS[0])
        assert (result.outcome, result.code, result.applied) == ("rejected", "wait_timeout", "unknown")
        assert result.waited == pytest.approx(3.0) and "handed in again" in result.message
        [result] = desk.batch(CALLS[0], deadline=1.0)
        assert (result.code, result.waited) == ("deadline_exceeded", pytest.approx(1.0))


@pytest.mark.parametrize("way", ["run", "call", "caller", "close", "tower"])
def test_a_join_can_be_given_up(tmp_path: Path, way: str) -> None:
    """S16, R-77: a call that waits for the same call elsewhere ends with its batch, its run or by itself."""

    def act(run: Run, task: asyncio.Task[Any]) -> object:
        if way == "run":
            return run.cancel("enough")
        if way == "call":
            return run.cancel("enough", index=0)
        if way == "caller":
            return task.cancel()
        return run.aclose() if way == "close" else shop.tower.aclose()

    with Journal(tmp_path / "j.db") as other:
        begun_elsewhere(other, CALLS[0])
        shop = Shop(tmp_path / "j.db", max_wait=60)
        [result] = shop.run(CALLS[:1], act)
    assert (result.outcome, result.code, result.applied) == ("cancelled", "cancelled", "unknown")
    assert shop.did == []


def test_nested_calls_do_not_join_their_own_caller(stage: Stage, where: str) -> None:
    """S10: a call that makes the same call again would wait for itself; it is refused at once."""
    tower = stage.tower(journal=where)
    found: list[Result] = []

    @tower.tool(independent=True)
    async def outer(ctx: Context) -> str:
        found.extend(await ctx.execute([Call("outer", {}, idempotency_key="k")]))
        return "done"

    async def main() -> BatchResult:
        return await tower.execute([Call("outer", {}, idempotency_key="k")])

    assert stage.run(main()).ok
    assert [(one.code, one.waited) for one in found] == [("would_deadlock", 0.0)]


def test_nested_calls_that_join_in_a_circle_are_told(stage: Stage, where: str) -> None:
    """S10: two calls, each of which makes the other one again: the one that closes the circle is refused at once."""
    tower = stage.tower(journal=where, max_wait=1e6)
    found: list[Result] = []

    @tower.tool(independent=True)
    async def outer(name: str, other: str, ctx: Context) -> str:
        await asyncio.sleep(1.0 if name == "a" else 2.0)
        arguments = {"name": other, "other": name}
        found.extend(await ctx.execute([Call("outer", arguments, idempotency_key=other)]))
        return name

    async def main() -> list[BatchResult]:
        calls = [Call("outer", {"name": a, "other": b}, idempotency_key=a) for a, b in ("ab", "ba")]
        async with tower.run() as one, tower.run() as two:
            return await asyncio.gather(one.execute(calls[:1]), two.execute(calls[1:]))

    assert all(done.ok for done in stage.run(main()))
    assert [(one.code, one.ok, one.replayed) for one in found] == [("would_deadlock", False, False), (None, True, True)]
    assert stage.clock.value < 10


# ==================================================================== unknown effects


def test_g10_what_died_is_never_silently_run_again(stage: Stage, tmp_path: Path) -> None:
    """G10, R-120, S14: of a batch over which a process died, the write is unknown and listed; what is harmless runs."""
    path = tmp_path / "j.db"
    with Journal(path) as other:
        begun_elsewhere(other, CALLS[0], CALLS[0], CALLS[2])
        dead(path)
        desk = Desk(stage, path)
        done = desk.batch(CALLS[0], CALLS[0], CALLS[2])
        assert told(done) == [("error", "effect_unknown", "unknown", True)] * 2 + [("ok", None, "yes", False)]
        assert desk.did == [("put", 3)]
        assert [(one.number, one.tool) for one in desk.journal.unknown().result()] == [(1, "pay"), (2, "pay")]
        desk.journal.settle(1, applied=True, by="ada").result()
        desk.journal.settle(2, applied=False, by="ada").result()
        done = desk.batch(CALLS[0], CALLS[0], CALLS[2])
        assert told(done) == [("ok", None, "yes", True), ("ok", None, "yes", False), ("ok", None, "yes", True)]
        assert desk.did == [("put", 3), ("pay", 1)]
        assert desk.journal.unknown().result() == []


def test_g10_a_write_that_timed_out_is_unknown_until_it_ends(stage: Stage, where: str) -> None:
    """G10: a timed-out write is written down as unknown; when its orphan ends the journal knows, and says so."""
    tower = stage.tower(journal=where, timeout=1.0, grace=0.5)
    journal = tower._journal
    assert journal is not None

    @tower.tool(independent=True)
    async def slow() -> str:
        return await stage.stubborn("slow", 5.0)

    async def main() -> list[Result]:
        found = []
        async with tower.run("run") as run:
            found += await run.execute([Call("slow", {})], batch_id="b")
            [record] = await asyncio.wrap_future(journal.calls())
            assert (record.state, record.running, record.applied) == ("unknown", True, "unknown")
            found += await run.execute([Call("slow", {})], batch_id="b")
            await stage.settled(tower)
            found += await run.execute([Call("slow", {})], batch_id="b")
        return found

    first, second, third = stage.run(main())
    assert (first.code, first.applied, first.still_running) == ("handler_timeout", "unknown", True)
    assert (second.code, second.applied, second.replayed) == ("handler_timeout", "unknown", True)
    assert (third.code, third.applied, third.replayed, third.content) == (None, "yes", True, "slow")
    assert stage.started["slow"] == 1 and journal.unknown().result() == []


def test_g10_a_cancelled_write_is_unknown(stage: Stage, where: str) -> None:
    """G10: a write that was cancelled while it ran is unknown; a read that was, may run again."""
    desk = Desk(stage, where)

    async def main() -> None:
        async with desk.tower.run("run") as run:
            task = asyncio.ensure_future(run.execute([CALLS[0], CALLS[1]], batch_id="b"))
            await asyncio.sleep(0.05)
            run.cancel("enough")
            assert codes(await task) == ["cancelled", "cancelled"]

    stage.run(main())
    done = desk.batch(CALLS[0], CALLS[1])
    assert told(done) == [("cancelled", "cancelled", "unknown", True), ("ok", None, "no", False)]
    assert [one.tool for one in desk.journal.unknown().result()] == ["pay"]


def test_a_handler_that_ends_well_after_it_was_cancelled_is_known(stage: Stage, where: str) -> None:
    """G10: a write that answers while it has time to clean up took effect: its result says unknown, the journal yes."""
    tower = stage.tower(journal=where, timeout=1.0)

    @tower.tool(independent=True)
    async def careful() -> str:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            pass
        return "all done"

    async def main() -> list[Result]:
        async with tower.run("run") as run:
            return [
                (await run.execute([Call("careful", {})], batch_id="b"))[0],
                (await run.execute([Call("careful", {})], batch_id="b"))[0],
            ]

    first, second = stage.run(main())
    assert (first.code, first.applied) == ("handler_timeout", "unknown")
    assert (second.ok, second.applied, second.replayed, second.content) == (True, "yes", True, "all done")


# ==================================================================== the window between grant and first line


@pytest.mark.parametrize("way", ["run", "call", "caller", "close"])
def test_r77_a_call_that_is_granted_and_not_begun_can_be_cancelled(stage: Stage, where: str, way: str) -> None:
    """R-77, G2: cancelled while its intent is written, a call never starts, all it held is free, and the intent is
    taken back: it may run later.
    """
    desk = Desk(stage, where)
    desk.batch(Call("look", {"n": 0}), batch_id="warm")
    desk.did.clear()
    calls = [Call("pay", {"n": 1}), Call("pay_in_thread", {"n": 2})]

    async def main() -> BatchResult | None:
        stage.loop = here()
        journal = desk.journal
        real = journal.begin_all
        let_go: list[Callable[[], None]] = []

        def begin_all(intents: Any) -> Any:
            if not let_go:
                let_go.append(hold(journal))
            return real(intents)

        journal.begin_all = begin_all  # type: ignore[method-assign]
        async with desk.tower.run("run") as run:
            task = asyncio.ensure_future(run.execute(calls, batch_id="b"))
            while desk.tower.statistics().pools["process"].held < 2:
                await asyncio.sleep(0)
            if way == "run":
                run.cancel("enough")
            elif way == "call":
                run.cancel("enough", index=0)
                run.cancel("enough", index=1)
            elif way == "caller":
                task.cancel()
            else:
                closing = asyncio.ensure_future(run.aclose())
            for _ in range(20):
                await asyncio.sleep(0)
            assert desk.tower.statistics().pools["process"].held == 0
            let_go[0]()
            await asyncio.wait([task])
            if way == "close":
                await closing
        journal.begin_all = real  # type: ignore[method-assign]
        return run.last_batch

    done = stage.run(main())
    assert done is not None
    assert told(done) == [("cancelled", "cancelled", "no", False)] * 2
    assert [one.tool for one in desk.journal.calls().result()] == ["look"] and desk.did == []
    again = desk.batch(*calls)
    assert again.ok and sorted(desk.did) == [("pay", 1), ("thread", 2)]


def test_g12_a_journal_that_never_answers_is_given_up(stage: Stage, where: str, monkeypatch: Any) -> None:
    """G12: a granted call waits for its intent a bounded time, then it is refused and holds nothing."""
    desk = Desk(stage, where)
    desk.batch(Call("look", {"n": 0}), batch_id="warm")
    silent: list[Future[None]] = []

    def begin_all(_: object) -> Future[None]:
        silent.append(Future())
        return silent[-1]

    monkeypatch.setattr(desk.journal, "begin_all", begin_all)
    done = desk.batch(Call("pay", {"n": 1}), Call("look", {"n": 1}))
    assert told(done) == [("rejected", "journal_unavailable", "no", False), ("ok", None, "no", False)]
    assert "did not answer" in done[0].message and done[0].retryable == "yes"
    done = desk.batch(Call("pay", {"n": 1}), deadline=2.0, batch_id="c")
    assert codes(done) == ["deadline_exceeded"]
    for one in silent:
        one.set_result(None)


def test_g12_an_outcome_that_is_never_written_costs_no_result(stage: Stage, where: str, monkeypatch: Any) -> None:
    """G12: a result waits for its outcome to be written a bounded time; then it is sealed as it is, and says so."""
    desk = Desk(stage, where)
    monkeypatch.setattr(desk.journal, "finish_all", lambda _: Future())
    done = desk.batch(Call("pay", {"n": 1}), Call("pay", {"n": -1}))
    assert done[0].ok and done[0].content == "pay 1"
    assert all("could not write this down" in one.message for one in done)
    assert "could not write this down" in done[1].content
    assert desk.tower.statistics().journal.unwritten == 2  # type: ignore[union-attr]


# ==================================================================== trouble


def trouble(kind: Any = "full") -> Future[Any]:
    """What a journal answers that cannot be used."""
    future: Future[Any] = Future()
    future.set_exception(JournalUnavailable(kind, f"journal /secret/place: {kind}"))
    return future


def test_s14_trouble_at_the_look_up_refuses_what_has_an_effect(stage: Stage, where: str, monkeypatch: Any) -> None:
    """S14: where it cannot be said what was begun before, nothing with an effect starts; reads do."""
    desk = Desk(stage, where)
    monkeypatch.setattr(desk.journal, "look_up", lambda _: trouble())
    done = desk.batch(*CALLS[:3])
    assert codes(done) == ["journal_unavailable", None, "journal_unavailable"]
    assert [one.applied for one in done] == ["no"] * 3 and desk.did == [("look", 2)]
    assert "/secret" not in done[0].message and "the disk of the journal is full" in done[0].message
    assert desk.tower.statistics().journal.unavailable == 2  # type: ignore[union-attr]


def test_s14_trouble_at_the_grant_starts_nothing(stage: Stage, where: str, monkeypatch: Any) -> None:
    """S14, G3: no side effect without its intent written: refused, permits back, siblings go on."""
    desk = Desk(stage, where)
    monkeypatch.setattr(desk.journal, "begin_all", lambda _: trouble("locked"))
    done = desk.batch(*CALLS[:3])
    assert codes(done) == ["journal_unavailable", None, "journal_unavailable"]
    assert desk.did == [("look", 2)] and done[0].retryable == "yes"
    monkeypatch.undo()
    assert desk.batch(*CALLS[:3]).ok


@pytest.mark.parametrize("error", [RuntimeError("secret"), Unsettled("taken")])
def test_other_trouble_at_the_grant(stage: Stage, where: str, monkeypatch: Any, error: Exception) -> None:
    """A fault of the journal's own starts nothing either; a claim that another worker has is told as such."""
    desk = Desk(stage, where)
    future: Future[Any] = Future()
    future.set_exception(error)
    monkeypatch.setattr(desk.journal, "begin_all", lambda _: future)
    [result] = desk.batch(CALLS[0])
    assert result.code == ("lease_lost" if isinstance(error, Unsettled) else "journal_unavailable")
    assert "secret" not in result.message and not result.started


def test_an_outcome_that_cannot_be_written_loses_no_result(tmp_path: Path) -> None:
    """The real result is returned and says that it could not be written down; the outcome is written when it can be."""
    path = tmp_path / "j.db"
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    shop = Shop(Journal(path, busy_timeout=0.05))
    journal = shop.tower._journal
    assert journal is not None

    @shop.tower.tool(independent=True)
    async def lock() -> str:
        holder.execute("BEGIN IMMEDIATE")
        return "locked"

    async def main() -> tuple[Result, Result]:
        async with shop.tower:
            first = (await shop.tower.execute([Call("lock", {})], run_id="run", batch_id="b"))[0]
            holder.execute("ROLLBACK")
            while journal.statistics()["later"]:
                await asyncio.sleep(0.01)
            return first, (await shop.tower.execute([Call("lock", {})], run_id="run", batch_id="b"))[0]

    first, second = asyncio.run(main())
    assert first.ok and first.applied == "yes" and "could not write this down" in first.message
    assert second.ok and second.replayed and second.content == "locked"
    assert shop.tower.statistics().journal.unwritten == 1  # type: ignore[union-attr]
    journal.close()
    holder.close()


def test_a_locked_file_starts_nothing_with_an_effect(tmp_path: Path) -> None:
    """S14: a file that another program keeps locked: reads run, writes are refused, and run when it is free again."""
    path = tmp_path / "j.db"
    shop = Shop(Journal(path, busy_timeout=0.05))
    journal = shop.tower._journal
    assert journal is not None

    async def main() -> tuple[BatchResult, BatchResult]:
        async with shop.tower:
            await asyncio.wrap_future(journal.counts())
            holder = sqlite3.connect(path, isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
            first = await shop.tower.execute(CALLS[:1], run_id="run", batch_id="b")
            holder.close()
            return first, await shop.tower.execute(CALLS[:1], run_id="run", batch_id="b")

    first, second = asyncio.run(main())
    assert codes(first) == ["journal_unavailable"] and "keeps the journal locked" in first[0].message
    assert second.ok and shop.did == [("pay", 1)]
    journal.close()


def test_a_journal_of_another_secret_is_refused_call_by_call(stage: Stage, tmp_path: Path) -> None:
    """S14: with a wrong secret no identity can be made: nothing with an effect starts."""
    path = tmp_path / "j.db"
    assert Desk(stage, path, secret="first").batch(CALLS[0]).ok
    done = Desk(stage, path, secret="second").batch(*CALLS[:2])
    assert codes(done) == ["journal_unavailable", None]
    assert Desk(stage, path, secret="first").batch(CALLS[0])[0].replayed


# ==================================================================== one run that answers several calls


def test_s11_shared_runs_are_remembered(stage: Stage, where: str) -> None:
    """S11, S14: identical calls share one run; each of them is answered when the batch comes again, also where only the
    first of them was written down.
    """
    tower = stage.tower(journal=where)
    did: list[int] = []

    @tower.tool(independent=True, share_identical=True)
    async def mail(n: int) -> str:
        did.append(n)
        return f"sent {n}"

    calls = [Call("mail", {"n": 1}, str(n)) for n in range(3)]

    async def main() -> list[BatchResult]:
        journal = tower._journal
        assert journal is not None
        found = []
        for _ in range(2):
            async with tower.run("run") as run:
                found.append(await run.execute(calls, batch_id="b"))
        # As if the process had died between the end of the run and those that it answers.
        await asyncio.wrap_future(
            journal._writer.ask(lambda session: session.db.execute("DELETE FROM calls WHERE slot > 0"))
        )
        async with tower.run("run") as run:
            found.append(await run.execute(calls, batch_id="b"))
        return found

    first, second, third = stage.run(main())
    assert did == [1]
    assert [one.shared_with for one in first] == [None, 0, 0]
    assert all(one.ok and one.replayed for one in second)
    assert [one.ok for one in third] == [True] * 3 and [one.shared_with for one in third] == [None, 0, 0]


def merging(stage: Stage, journal: Any) -> tuple[Tower, list[list[int]]]:
    """A tower whose writes of one list are merged."""
    tower = stage.tower(journal=journal)
    did: list[list[int]] = []

    @tower.tool(writes="list", merge=lambda sets: {"n": [n for one in sets for n in one["n"]]})
    async def add(n: list[int]) -> str:
        did.append(n)
        await asyncio.sleep(0.1)
        if 13 in n and len(n) > 1:
            raise ToolError("an unlucky number", applied="no")
        return f"added {n}"

    return tower, did


def test_s11_merged_runs_are_written_down_for_every_call(stage: Stage, where: str) -> None:
    """S11, S14: the intents of all calls that go into one run are written together, and so is what it came to."""
    tower, did = merging(stage, where)
    calls = [Call("add", {"n": [n]}, str(n)) for n in range(3)]

    async def main() -> list[BatchResult]:
        found = []
        for _ in range(2):
            async with tower.run("run") as run:
                found.append(await run.execute(calls, batch_id="b"))
        return found

    first, second = stage.run(main())
    assert did == [[0, 1, 2]] and first.ok
    assert all(one.replayed and one.ok for one in second)
    assert tower._journal is not None and tower._journal.counts().result()["done"] == 3


def test_s11_a_merged_run_without_effect_leaves_the_others_their_turn(stage: Stage, where: str) -> None:
    """S11: when the merged run applied nothing the others run without the one that failed, under the same intents."""
    tower, did = merging(stage, where)
    calls = [Call("add", {"n": [n]}, str(n)) for n in (13, 1, 2)]

    async def main() -> BatchResult:
        async with tower.run("run") as run:
            return await run.execute(calls, batch_id="b")

    done = stage.run(main())
    assert [one.ok for one in done] == [False, True, True] and did == [[13, 1, 2], [1, 2]]
    assert tower._journal is not None and tower._journal.counts().result() == {
        "open": 0,
        "done": 3,
        "unknown": 0,
        "settled": 0,
    }


def test_s11_a_call_that_was_begun_elsewhere_is_merged_with_none(stage: Stage, tmp_path: Path) -> None:
    """S11, S14: where one of the calls was begun by somebody else meanwhile, its arguments go into no other run."""
    path = tmp_path / "j.db"
    tower, did = merging(stage, path)
    calls = [Call("add", {"n": [n]}, str(n)) for n in range(3)]
    assert tower._journal is not None
    journal = tower._journal
    real = journal.begin_all
    with Journal(path) as other:

        def begin_all(intents: Any) -> Any:
            if len(intents) == 3:
                key = other.open().result()
                one = identity("add", 1, run_id="run", batch_id="b")
                assert one is not None
                theirs = Intent(b"t" * 16, place(key, one), None, "add", "run", 1, 1)
                other.begin(theirs).result()
                other.finish(theirs.token, Answer("ok", None, "yes", content="theirs", message="Done.")).result()
            return real(intents)

        journal.begin_all = begin_all  # type: ignore[method-assign]

        async def main() -> BatchResult:
            async with tower.run("run") as run:
                return await run.execute(calls, batch_id="b")

        done = stage.run(main())
    assert done.ok and did == [[0], [2]]
    assert [(one.replayed, one.content) for one in done][1] == (True, "theirs")


# ==================================================================== what can be seen


def test_events_tell_the_story(stage: Stage, where: str) -> None:
    """Intents, answers from the journal and joins are events; none of them holds a value."""
    desk = Desk(stage, where)
    seen: list[Event] = []
    desk.tower.add_observer(seen.append)
    desk.batch(CALLS[0])
    desk.batch(CALLS[0])
    call = Call("pay", {"n": 4}, idempotency_key="k")

    async def main() -> None:
        async with desk.tower.run() as one, desk.tower.run() as two:
            await asyncio.gather(one.execute([call]), two.execute([call]))

    stage.run(main())
    assert desk.tower.flush()
    kinds = [event.kind for event in seen]
    assert kinds[:7] == [
        "batch_started",
        "admitted",
        "intended",
        "started",
        "finished",
        "batch_finished",
        "batch_started",
    ]
    assert kinds[7:10] == ["replayed", "finished", "batch_finished"]
    assert kinds.count("intended") == 2 and kinds.count("joined") == 1
    [joined] = [event for event in seen if event.kind == "joined"]
    assert joined.waiting_for == "the same call"


def test_a_replayed_call_has_no_stretch_on_the_timeline(stage: Stage, where: str) -> None:
    """R-143: what did not run is not drawn as if it had."""
    desk = Desk(stage, where)
    assert desk.batch(CALLS[0]).spans()[0].started is not None
    again = desk.batch(CALLS[0])
    assert again.spans()[0].started is None
    assert "pay" in again.timeline()


def test_a_batch_id_is_a_short_text(stage: Stage) -> None:
    """What is no name of a batch is refused before anything runs."""
    desk = Desk(stage, ":memory:")

    async def main(batch_id: Any) -> None:
        async with desk.tower.run() as run:
            await run.execute([CALLS[0]], batch_id=batch_id)

    for wrong in ("", "x" * 257, 5, b"x"):
        with pytest.raises(PolicyError, match="batch_id: text of 1 to 256 characters"):
            stage.run(main(wrong))
    assert desk.did == []


def test_a_tower_says_what_it_cannot_use_when_it_is_made(tmp_path: Path) -> None:
    """A set-up mistake is told where it is made; a journal of one's own is used as it is, and left open."""
    with pytest.raises(PolicyError, match="there is no folder"):
        Tower(journal=tmp_path / "no" / "j.db")
    assert not (tmp_path / "j.db").exists()
    tower = Tower(journal=tmp_path / "j.db")
    assert not (tmp_path / "j.db").exists()
    tower.close()
    with Journal(":memory:") as mine:
        tower = Tower(journal=mine)
        tower.close()
        assert mine.counts().result()["open"] == 0
    with pytest.raises(PolicyError, match="a tower keeps its journal for life"):
        Tower().configure(journal=":memory:")
    with pytest.raises(PolicyError, match="a tower keeps its secret for life") as wrong:
        Tower(secret="zqxjkvbpwm").configure(secret="another")
    assert "zqxjkvbpwm" not in str(wrong.value) + repr(Tower(secret="zqxjkvbpwm").options)


def test_g8_values_stand_nowhere_in_clear(kept: list[Journal], stage: Stage, tmp_path: Path) -> None:
    """G8: with a cipher, neither arguments, keys nor results of a whole batch stand in any file of the journal."""
    secret = "zqxjkvbpwm"
    journal = Journal(tmp_path / "j.db", cipher=Mirror())
    kept.append(journal)
    tower = stage.tower(journal=journal)

    @tower.tool(independent=True)
    async def pay(to: str) -> str:
        if to.endswith("!"):
            raise ToolError(f"no {to}")
        return to

    calls = [Call("pay", {"to": to}, idempotency_key=f"{secret}-{n}") for n, to in enumerate((secret, f"{secret}!"))]

    async def main() -> BatchResult:
        return await tower.execute(calls)

    assert stage.run(main())[0].content == secret
    journal.counts().result()
    for one in tmp_path.iterdir():
        assert secret.encode() not in one.read_bytes(), one
    assert stage.run(main())[0].replayed


def test_a_tower_without_a_journal_pays_nothing(stage: Stage) -> None:
    """The hot path of those who have none: no module of the journal is in the way, and nothing is filed."""
    desk = Desk(stage, None)
    done = desk.batch(*CALLS)
    assert done._work.filed is None and done._work.joins is None
    assert not any(one.replayed for one in done)
    assert filing.JOURNAL_SECONDS > 0
