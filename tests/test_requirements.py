"""Requirements R-01 to R-28, each by a whole tower: layers and scopes, what is independent and what conflicts.

Admission and waiting (R-45 to R-76) stand in test_requirements_admission.py, cancellation (R-77 to R-89) in
test_requirements_cancel.py, caps, results and the rest (R-96 to R-138) in test_requirements_results.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from kit import Stage, gate_of, on_stage, sound

import towerman
from towerman import Call, Context, Event, PolicyError, Pool, Run, Tower

stage = pytest.fixture(on_stage)

DOCS = Path(__file__).resolve().parent.parent / "docs"


def openai_message(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """An assistant message in OpenAI's form."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
            for i, (tool, arguments) in enumerate(calls)
        ],
    }


def worker(stage: Stage, name: str = "work", seconds: float = 1.0) -> Callable[..., Any]:
    """A handler that works for so long under the name it is given."""

    async def work(who: str = name) -> str:
        return await stage.work(who, seconds)

    return work


def overlap(stage: Stage, one: str, other: str) -> bool:
    """Were the two at work at the same time?"""
    (a,) = [(came, went) for name, came, went in stage.spans if name == one]
    (b,) = [(came, went) for name, came, went in stage.spans if name == other]
    return a[0] < b[1] and b[0] < a[1]


# --- A. Layers and scope ----------------------------------------------------------------------------------------------


def test_r01_the_limits_are_separate(stage: Stage) -> None:
    """R-01: emission, concurrency and the cap of a batch are set apart and told apart, and changing one does not change
    the verdict of another. Rate and budget do not exist yet.
    """

    def verdicts(emission: bool, concurrency: int, cap: int) -> list[str | None]:
        tower = stage.tower(max_concurrency=concurrency, max_calls_per_batch=cap, when_busy="reject")
        tower.add_tool(worker(stage), name="work", independent=True)
        assert tower.provider_options("openai", emission)["parallel_tool_calls"] is emission
        batch = stage.run(tower.execute(openai_message(*[("work", {})] * 6)))
        sound(batch, [0] * 6)
        return [result.code for result in batch]

    for emission, concurrency, cap in itertools.product((True, False), (1, 2, 9), (3, 5, 9)):
        codes = verdicts(emission, concurrency, cap)
        by_cap = [code == "call_cap" for code in codes]
        by_concurrency = [code == "concurrency_limit" for code in codes[:cap]]
        assert by_cap == [place >= cap for place in range(6)], "the cap's verdict hangs on something else"
        assert by_concurrency == [place >= concurrency for place in range(min(cap, 6))], "so does the limit's"


@pytest.mark.parametrize("parallel", [True, False])
def test_r02_limits_hold_whatever_the_provider_was_told(parallel: bool, stage: Stage) -> None:
    """R-02: a response of six calls is accepted with the provider's switch on or off, and held to the limits."""
    tower = stage.tower(max_concurrency=2)
    tower.add_tool(worker(stage), name="work", independent=True)
    assert tower.provider_options("openai", parallel=parallel) == {"parallel_tool_calls": parallel}
    batch = stage.run(tower.execute(openai_message(*[("work", {})] * 6)))
    sound(batch, [0] * 6)
    assert batch.ok
    assert stage.peak == 2


def test_r03_one_call_a_turn_still_meets_the_shared_limit(stage: Stage) -> None:
    """R-03: two runs whose models emit one call a turn are held to the shared limit of one."""
    tower = stage.tower(max_concurrency=1)
    tower.add_tool(worker(stage), name="work", independent=True)

    async def turns() -> None:
        async with tower.run() as run:
            for _ in range(5):
                assert (await run.execute(openai_message(("work", {})))).ok

    async def main() -> None:
        await asyncio.gather(turns(), turns())

    stage.run(main())
    assert stage.peak == 1
    assert stage.clock.now() == 10


DOORS: dict[str, Callable[[Tower, Run], Any]] = {
    "calls": lambda tower, run: run.execute([Call("work", {})]),
    "mappings": lambda tower, run: run.execute([{"tool": "work", "arguments": {}}]),
    "OpenAI's message": lambda tower, run: run.execute(openai_message(("work", {}))),
    "JSON text": lambda tower, run: run.execute(json.dumps(openai_message(("work", {})))),
    "Anthropic's blocks": lambda tower, run: run.execute(
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "work", "input": {}}]}
    ),
    "one batch of its own": lambda tower, run: tower.execute([Call("work", {})]),
    "a shared task": lambda tower, run: run.execute([Call("shared", {}), Call("shared", {})]),
    "a thread": lambda tower, run: run.execute([Call("sync", {})]),
    "a call behind another": lambda tower, run: run.execute([Call("free", {}, "a"), Call("work", {}, needs=["a"])]),
}


@pytest.mark.parametrize("door", DOORS)
def test_r04_no_way_to_a_handler_passes_admission(door: str, stage: Stage) -> None:
    """R-04, G2: through whatever door a call comes in, it waits while the pool is taken, and never starts when it
    waited in vain. (Retries, resumed and nested calls, workers and gateways do not exist yet; the command line is
    below.)
    """
    tower = stage.tower(pools={"crm": 1}, max_wait=5)
    started: list[str] = []

    async def work() -> str:
        started.append(door)
        return "done"

    def sync() -> str:
        started.append(door)
        return "done"

    tower.add_tool(work, independent=True, pools=["crm"])
    tower.add_tool(work, name="shared", independent=True, pools=["crm"], own_task=False)
    tower.add_tool(sync, independent=True, pools=["crm"])
    tower.add_tool(worker(stage, seconds=0.5), name="free", independent=True)
    tower.add_tool(worker(stage, seconds=20), name="hold", independent=True, pools=["crm"])

    async def main() -> None:
        async with tower.run() as run:
            holding = asyncio.ensure_future(tower.execute([Call("hold", {})]))
            await asyncio.sleep(1)
            batch = await DOORS[door](tower, run)
            assert started == []
            assert {result.code for result in batch if result.tool != "free"} == {"wait_timeout"}
            assert (await holding).ok
            assert (await DOORS[door](tower, run)).ok
            assert started

    stage.run(main())


def test_r04_the_command_line_passes_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """R-04: `towerman run` holds the pools of the tower that it is given."""
    from towerman.cli import main as command

    (tmp_path / "a_towers_tools.py").write_text(
        "import asyncio\n"
        "from towerman import Tower\n"
        "tower = Tower(pools={'crm': 2})\n"
        "inside = peak = 0\n"
        "@tower.tool(independent=True, pools=['crm'])\n"
        "async def work() -> int:\n"
        "    global inside, peak\n"
        "    inside += 1\n"
        "    peak = max(peak, inside)\n"
        "    for _ in range(5):\n"
        "        await asyncio.sleep(0)\n"
        "    inside -= 1\n"
        "    return peak\n"
    )
    (tmp_path / "calls.json").write_text(json.dumps(openai_message(*[("work", {})] * 6)))
    monkeypatch.syspath_prepend(tmp_path)
    assert command(["run", str(tmp_path / "calls.json"), "--tools", "a_towers_tools:tower", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    module = sys.modules.pop("a_towers_tools")
    assert module.peak == 2
    assert "tool" in json.dumps(told)


def test_r05_runs_share_a_pool(stage: Stage) -> None:
    """R-05: tools and runs that lean on the same client share one pool: three runs and two tools,
    never more than two.
    """
    tower = stage.tower(pools={"client": 2})
    for name in ("search", "fetch"):
        tower.add_tool(worker(stage, name), name=name, independent=True, pools=["client"])

    async def main() -> None:
        calls = [Call("search", {}), Call("fetch", {})] * 2
        batches = await asyncio.gather(*(tower.execute(calls) for _ in range(3)))
        assert all(batch.ok for batch in batches)

    stage.run(main())
    assert stage.peak == 2
    assert stage.clock.now() == 6


def test_r06_every_pool_tells_its_scope(stage: Stage) -> None:
    """R-06: the scope of each pool shows in the configuration, in the statistics, in the events of each admission and
    in the docs; a scope that does not exist is refused.
    """
    seen: list[Event] = []
    pools = {"crm": 2, "mine": Pool(1, scope="run"), "ours": Pool(3, scope="tenant")}
    tower = stage.tower(pools=pools, observers=[seen.append])
    tower.add_tool(worker(stage), name="work", independent=True, pools=list(pools), max_concurrency=4)
    assert {name: tower.options.scope_of(pool) for name, pool in tower.options.pools.items()} == {
        "crm": "process",
        "mine": "run",
        "ours": "tenant",
    }

    async def main() -> None:
        async with tower.run("r1", tenant="acme") as run:
            assert (await run.execute([Call("work", {})])).ok
            scopes = {name: pool.scope for name, pool in tower.statistics().pools.items()}
            assert scopes["process"] == scopes["crm"] == scopes["tool:work"] == "process"
            assert scopes["run:r1"] == "run"
            assert [scope for name, scope in scopes.items() if name.startswith("mine")] == ["run"]
            assert [scope for name, scope in scopes.items() if name.startswith("ours")] == ["tenant"]

    stage.run(main())
    tower.flush(30)
    (admitted,) = [event for event in seen if event.kind == "admitted"]
    assert admitted.scopes == {
        "process": "process",
        "run": "run",
        "tool:work": "process",
        "crm": "process",
        "mine": "run",
        "ours": "tenant",
    }
    assert "scope" in (DOCS / "scopes.md").read_text()
    with pytest.raises(PolicyError, match="scope"):
        Pool(1, scope="galaxy")  # type: ignore[arg-type]


@pytest.mark.parametrize("runs", [2, 100])
def test_r07_a_process_pool_holds_over_runs(runs: int, stage: Stage) -> None:
    """R-07: a process pool of three is never exceeded, by two runs or by a hundred, and it is used to the full."""
    tower = stage.tower(pools={"db": 3}, max_concurrency=1000)
    tower.add_tool(worker(stage), name="query", independent=True, pools=["db"])

    async def main() -> None:
        batches = await asyncio.gather(*(tower.execute([Call("query", {})] * 4) for _ in range(runs)))
        assert all(batch.ok for batch in batches) or runs > 20

    stage.run(main())
    assert stage.peak == 3
    assert tower.statistics().pools["db"].peak == 3


def test_r08_a_run_pool_is_no_global_protection(stage: Stage) -> None:
    """R-08: a run-scoped pool of three lets two runs reach six, and the docs say so."""
    tower = stage.tower(pools={"db": Pool(3, scope="run")})
    tower.add_tool(worker(stage), name="query", independent=True, pools=["db"])

    async def main() -> None:
        await asyncio.gather(*(tower.execute([Call("query", {})] * 5) for _ in range(2)))

    stage.run(main())
    assert stage.peak == 6
    assert "A run pool is not global protection" in (DOCS / "scopes.md").read_text()


def test_r08_a_tenant_pool_counts_for_its_tenant(stage: Stage) -> None:
    """R-06, R-08: a tenant-scoped pool of two is shared by a tenant's runs and by nobody else's."""
    tower = stage.tower(pools={"db": Pool(2, scope="tenant")})

    @tower.tool(independent=True, pools=["db"])
    async def query(ctx: Context[None]) -> None:
        await stage.work(str(ctx.tenant), 1)

    peaks: dict[str, int] = {}

    async def look() -> None:
        for name, running in stage.running.items():
            peaks[name] = max(peaks.get(name, 0), running)

    async def main() -> None:
        tasks = [
            asyncio.ensure_future(tower.execute([Call("query", {})] * 3, tenant=tenant))
            for tenant in ("a", "b", "a", None, None)
        ]
        for _ in range(8):
            await asyncio.sleep(0.5)
            await look()
        assert all(batch.ok for batch in await asyncio.gather(*tasks))

    stage.run(main())
    assert peaks == {"a": 2, "b": 2, "None": 2}


DOWNSTREAM = """
import asyncio, sys
from towerman import Call, Tower

tower = Tower(pools={"api": 4})

async def main():
    reader, writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))

    @tower.tool(independent=True, pools=["api"])
    async def call() -> None:
        mine = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
        mine[1].write(b"+")
        await mine[0].read()          # until the service lets it go
        mine[1].close()

    batch = await tower.execute([Call("call", {})] * 6)
    assert batch.ok, batch
    writer.close()

asyncio.run(main())
"""


def test_r09_two_replicas_of_four_are_eight_downstream() -> None:
    """R-09: an in-process pool claims nothing across replicas: two processes of four places each, and a service behind
    them that counts, sees eight at once; never more, and the docs name it. Steered by the service: it lets nobody go
    before eight are in.
    """
    inside = peak = 0
    processes: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": str(Path(towerman.__file__).parent.parent)}

    async def main() -> None:
        eight = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal inside, peak
            if await reader.read(1) == b"+":
                inside += 1
                peak = max(peak, inside)
                if inside == 8:
                    eight.set()
                await eight.wait()
                inside -= 1
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            command = [sys.executable, "-c", DOWNSTREAM, str(port)]
            processes.extend(subprocess.Popen(command, env=environment) for _ in range(2))
            codes = await asyncio.gather(*(asyncio.to_thread(process.wait, 60) for process in processes))
        assert codes == [0, 0]

    try:
        asyncio.run(main())
    finally:
        for process in processes:
            process.kill()
    assert peak == 8
    assert "let eight calls through" in " ".join((DOCS / "limits.md").read_text().split()).replace("lets", "let")


def test_r11_background_work_leaves_room_for_people(stage: Stage) -> None:
    """R-11: with two of four places kept for runs of priority above 0, background runs saturate the other two and an
    interactive call starts at once; with priority alone it is the next to start.
    """
    tower = stage.tower(pools={"workers": Pool(4, reserve=2), "plain": 4}, max_concurrency=100)
    tower.add_tool(worker(stage, "reserved"), name="reserved", independent=True, pools=["workers"])
    tower.add_tool(worker(stage, "ranked"), name="ranked", independent=True, pools=["plain"])

    async def interactive(tool: str) -> float:
        await asyncio.sleep(2.5)
        (result,) = await tower.execute([Call(tool, {"who": "person"})], priority=1)
        assert result.ok
        return result.waited

    async def background(tool: str) -> None:
        assert (await tower.execute([Call(tool, {})] * 12)).ok

    async def main() -> None:
        for tool, most in (("reserved", 0.0), ("ranked", 0.5)):
            stage.clock.value = 0.0 if tool == "reserved" else stage.clock.value
            *_, waited = await asyncio.gather(*(background(tool) for _ in range(3)), interactive(tool))
            assert waited == pytest.approx(most)

    stage.run(main())
    assert tower.statistics().pools["workers"].peak == 3
    assert tower.statistics().pools["plain"].peak == 4


def test_r12_the_docs_say_what_a_limit_does_not_replace() -> None:
    """R-12: rate limit, approval, idempotency, timeout and coordination of replicas are named as what a concurrency
    limit does not replace.
    """
    text = (DOCS / "limits.md").read_text()
    assert text.startswith("# What a concurrency limit does not replace")
    for word in ("rate limit", "approval", "idempoten", "timeout", "replicas"):
        assert word in text


# --- B. Classification ------------------------------------------------------------------------------------------------


def test_r13_nothing_unclassified_reaches_the_scheduler(stage: Stage) -> None:
    """R-13: whatever a tool declares, each ask that the gate is offered has its kind and, unless it is independent,
    what it excludes; this is known before the gate is asked.
    """
    tower = stage.tower()
    offered: dict[str, Any] = {}
    gate = gate_of(tower)
    offer = type(gate).offer

    finish = type(gate).finish

    def watched(self: Any, flow: Any, offers: Any, now: float) -> Any:
        offers = list(offers)
        for wants, _, _ in offers:
            offered[wants.tool] = wants
        return offer(self, flow, offers, now)

    def watched_end(self: Any, entry: Any, now: float, ready: Any = (), urgency: Any = None) -> Any:
        for wants, _, _ in ready:
            offered[wants.tool] = wants
        return finish(self, entry, now, ready, urgency)

    kinds = {"__slots__": (), "offer": watched, "finish": watched_end}
    tower._core.gate.__class__ = type("Watched", (type(gate),), kinds)
    tower.add_tool(worker(stage), name="undeclared")
    tower.add_tool(worker(stage), name="independent", independent=True)
    tower.add_tool(worker(stage), name="sequential", sequential=True)
    tower.add_tool(worker(stage), name="reads", reads="thing:{who}")
    tower.add_tool(worker(stage), name="fixed", writes="thing:one")
    batch = stage.run(tower.execute([Call(name, {}) for name in tower.tools]))
    assert batch.ok
    assert {name: wants.kind for name, wants in offered.items()} == {
        "undeclared": "ordered",
        "independent": "independent",
        "sequential": "ordered",
        "reads": "declared",
        "fixed": "declared",
    }
    assert {name for name, wants in offered.items() if not wants.holds} == {"independent"}


@pytest.mark.parametrize(
    ("needs", "same", "together"),
    [(False, False, True), (True, False, False), (False, True, False), (True, True, False)],
)
def test_r14_independent_means_neither_needs_nor_contends(
    needs: bool, same: bool, together: bool, stage: Stage
) -> None:
    """R-14: two calls overlap if and only if neither needs the other and they do not contend for one resource."""
    tower = stage.tower()

    @tower.tool(writes="thing:{name}")
    async def work(name: str, who: str) -> None:
        await stage.work(who, 1)

    calls = [
        Call("work", {"name": "x", "who": "a"}, "a"),
        Call("work", {"name": "x" if same else "y", "who": "b"}, "b", needs=["a"] if needs else []),
    ]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    assert overlap(stage, "a", "b") is together


def test_r15_emitted_together_proves_nothing(stage: Stage) -> None:
    """R-15: that a model emitted two calls in one response makes them not independent: tools of which nothing is known
    run one after the other.
    """
    tower = stage.tower()
    tower.add_tool(worker(stage), name="update")
    batch = stage.run(tower.execute(openai_message(("update", {"who": "a"}), ("update", {"who": "b"}))))
    assert batch.ok
    assert not overlap(stage, "a", "b")
    assert batch[1].waited_for == ("call 0",)


def test_r16_the_registry_knows_more_than_the_name(stage: Stage) -> None:
    """R-16: per tool it holds read or write, the shared resource and whether order matters; so one tool's calls may
    overlap while two tools' calls may not.
    """
    tower = stage.tower()

    async def one(key: str, who: str) -> None:
        await stage.work(who, 1)

    tower.add_tool(one, name="rename", writes="customer:{key}")
    tower.add_tool(one, name="delete", writes="customer:{key}")
    calls = [
        Call("rename", {"key": "1", "who": "rename 1"}),
        Call("rename", {"key": "2", "who": "rename 2"}),
        Call("delete", {"key": "1", "who": "delete 1"}),
    ]
    assert stage.run(tower.execute(calls)).ok
    assert overlap(stage, "rename 1", "rename 2")
    assert not overlap(stage, "rename 1", "delete 1")
    rename = tower._core.tools["rename"]
    assert (rename.policy.writes, rename.policy.reads, rename.kind) == ("customer:{key}", None, "declared")


def test_r17_r18_keys_come_from_arguments(stage: Stage) -> None:
    """R-17, R-18: calls of one tool are grouped by the resource that their arguments name: groups overlap, inside a
    group one runs at a time, in emitted order.
    """
    tower = stage.tower()

    @tower.tool(writes="ticket:{ticket_id}")
    async def update_ticket(ticket_id: int, step: int) -> None:
        await stage.work(f"{ticket_id}.{step}", 1)

    calls = [Call("update_ticket", {"ticket_id": i % 3, "step": i // 3}) for i in range(9)]
    batch = stage.run(tower.execute(calls))
    sound(batch, calls)
    assert batch.ok
    assert stage.peak == 3
    assert stage.clock.now() == 3
    for ticket in range(3):
        steps = [(name, came) for name, came, _ in stage.spans if name.startswith(f"{ticket}.")]
        assert steps == [(f"{ticket}.{step}", step) for step in range(3)]


def test_r19_no_update_of_a_ticket_is_lost(stage: Stage) -> None:
    """R-19: two updates of one ticket run in emitted order and both fields survive (read, wait, write)."""
    tower = stage.tower()
    tickets: dict[int, dict[str, str]] = {42: {"status": "open", "owner": "nobody"}}

    @tower.tool(writes="ticket:{ticket_id}")
    async def update_ticket(ticket_id: int, field: str, value: str) -> None:
        ticket = dict(tickets[ticket_id])
        await stage.work(field, 3 if field == "status" else 1)
        tickets[ticket_id] = {**ticket, field: value}

    calls = [
        Call("update_ticket", {"ticket_id": 42, "field": "status", "value": "closed"}),
        Call("update_ticket", {"ticket_id": 42, "field": "owner", "value": "ada"}),
    ]
    assert stage.run(tower.execute(calls)).ok
    assert tickets[42] == {"status": "closed", "owner": "ada"}
    assert [name for name, _, _ in stage.spans] == ["status", "owner"]


def test_r20_writes_to_one_file_are_serial_also_by_two_tools(stage: Stage, tmp_path: Path) -> None:
    """R-20: two writes of one file run one after the other, and so do two tools that name the same file, however each
    of them spells it, also before the file exists.
    """
    tower = stage.tower()

    async def one(path: str, who: str) -> None:
        await stage.work(who, 1)

    tower.add_tool(one, name="write_file", writes="file:{path}")
    tower.add_tool(one, name="append", writes=lambda path: f"file:{path}")
    path = str(tmp_path / "new.txt")
    calls = [
        Call("write_file", {"path": path, "who": "a"}),
        Call("write_file", {"path": f"{tmp_path}/x/../new.txt", "who": "b"}),
        Call("append", {"path": f"{tmp_path}//new.txt", "who": "c"}),
        Call("write_file", {"path": path + "2", "who": "other"}),
    ]
    assert stage.run(tower.execute(calls)).ok
    assert [(name, came) for name, came, _ in stage.spans if name != "other"] == [("a", 0), ("b", 1), ("c", 2)]
    assert overlap(stage, "a", "other")


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [("read", "read", True), ("read", "write", False), ("write", "read", False), ("write", "write", False)],
)
@pytest.mark.parametrize("runs", ["one run", "two runs"])
def test_r21_reads_may_overlap_and_writes_may_not(
    first: str, second: str, together: bool, runs: str, stage: Stage
) -> None:
    """R-21: read and read of one resource overlap; any pair with a write does not, inside a batch and between runs."""
    tower = stage.tower()
    tower.add_tool(worker(stage), name="read", reads="thing:x")
    tower.add_tool(worker(stage), name="write", writes="thing:x")
    calls = [Call(first, {"who": "a"}), Call(second, {"who": "b"})]

    async def main() -> None:
        if runs == "one run":
            assert (await tower.execute(calls)).ok
        else:
            batches = await asyncio.gather(*(tower.execute([call]) for call in calls))
            assert all(batch.ok for batch in batches)

    stage.run(main())
    assert overlap(stage, "a", "b") is together


def test_r22_reads_of_two_cities_take_the_longer_one(stage: Stage) -> None:
    """R-22: reads of one tool with different keys overlap: the whole takes the longest, not the sum."""
    tower = stage.tower()

    @tower.tool(reads="weather:{city}")
    async def weather(city: str, seconds: float) -> str:
        return await stage.work(city, seconds)

    calls = [Call("weather", {"city": city, "seconds": s}) for city, s in (("Paris", 3), ("Rome", 2), ("Oslo", 1))]
    assert stage.run(tower.execute(calls)).ok
    assert stage.clock.now() == 3


@pytest.mark.parametrize("undeclared", ["ordered", "exclusive", "independent"])
def test_r24_a_tool_that_declares_nothing(undeclared: str, stage: Stage) -> None:
    """R-24, G4: it runs alone, beside independent calls only, and in emitted order within its run (the default), alone
    in the process, or as if it were independent, as the operator says.
    """
    tower = stage.tower(undeclared=undeclared, run_concurrency=20)
    tower.add_tool(worker(stage), name="unknown")
    tower.add_tool(worker(stage), name="declared", writes="thing:{who}")
    tower.add_tool(worker(stage), name="free", independent=True)
    mine = [("declared", "d1"), ("unknown", "u1"), ("free", "f"), ("declared", "d2"), ("unknown", "u2")]
    other = [("declared", "d3"), ("unknown", "u3")]

    async def main() -> None:
        batches = await asyncio.gather(
            *(tower.execute([Call(tool, {"who": who}) for tool, who in calls]) for calls in (mine, other))
        )
        assert all(batch.ok for batch in batches)

    stage.run(main())
    came = {name: came for name, came, _ in stage.spans}
    assert came["f"] == 0
    if undeclared == "independent":
        assert set(came.values()) == {0}
        return
    assert [came[name] for name in ("d1", "u1", "d2", "u2")] == sorted(came[name] for name in ("d1", "u1", "d2", "u2"))
    for unknown, others in (("u1", ("d1", "d2", "u2")), ("u2", ("d1", "d2")), ("u3", ("d3",))):
        for name in others:
            assert not overlap(stage, unknown, name), f"{unknown} ran beside {name} of its own run"
    between = [(u, o) for u, o in itertools.product(("u1", "u2"), ("d3", "u3")) if overlap(stage, u, o)]
    if undeclared == "exclusive":
        assert between == []
        assert not overlap(stage, "u3", "d1")
    else:
        assert came["d3"] == came["d1"] == 0
        assert came["u3"] == came["u1"] == 1  # of another run: nothing excludes them
        assert ("u1", "u3") in between


def test_r24_the_first_use_is_hinted_at(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """R-24, API: the first call of a tool that declares no access is logged once with a hint, and never again."""
    tower = stage.tower()
    tower.add_tool(worker(stage), name="unknown")
    tower.add_tool(worker(stage), name="free", independent=True)
    with caplog.at_level("INFO", logger="towerman"):
        for _ in range(3):
            assert stage.run(tower.execute([Call("unknown", {}), Call("free", {})])).ok
    hints = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert len(hints) == 1, hints
    assert "reads" in hints[0]
    assert "independent" in hints[0]


def test_r25_strict_asks_for_everything_at_registration() -> None:
    """R-25: in strict mode a tool without access, limit or retry class is refused when it is declared, and told what is
    missing; one that says all three is taken.
    """
    tower = Tower(strict=True, pools={"crm": 2})

    def tool() -> None:
        raise AssertionError("never called")

    full: dict[str, Any] = {"writes": "thing:x", "pools": ["crm"], "idempotent": False}
    for missing, word in (("writes", "access"), ("pools", "limit"), ("idempotent", "retry")):
        with pytest.raises(PolicyError, match=f"'tool'.*{word}"):
            tower.add_tool(tool, **{key: value for key, value in full.items() if key != missing})
    assert tower.tools == ()
    tower.add_tool(tool, **full)
    assert tower.tools == ("tool",)


def test_r26_independent_calls_still_pass_through_pools(stage: Stage) -> None:
    """R-26: being independent is no capacity: six independent calls on a pool of two run two at a time."""
    tower = stage.tower(pools={"crm": 2})
    tower.add_tool(worker(stage), name="work", independent=True, pools=["crm"])
    assert stage.run(tower.execute([Call("work", {})] * 6)).ok
    assert stage.peak == 2


def test_r27_order_holds_when_places_are_free(stage: Stage) -> None:
    """R-27: a tool marked `sequential` keeps the emitted order of its group though every place is free, and later calls
    that take less time do not pass.
    """
    tower = stage.tower(max_concurrency=32)

    @tower.tool(sequential=True)
    async def step(i: int) -> None:
        await stage.work(f"step {i}", 5 - i)

    @tower.tool(sequential=True)
    async def other(i: int) -> None:
        await stage.work(f"step {i}", 5 - i)

    assert stage.run(tower.execute([Call("step" if i % 2 else "other", {"i": i}) for i in range(5)])).ok
    assert [name for name, _, _ in stage.spans] == [f"step {i}" for i in range(5)]
    assert stage.peak == 1


def test_r28_hints_of_harmlessness_loosen_nothing(stage: Stage) -> None:
    """R-28, decision 10: `read_only` and `idempotent` say what repeating does; by themselves they make no tool safe to
    run beside others. (A provider's hints come with MCP and can say no more than these.)
    """
    tower = stage.tower()
    tower.add_tool(worker(stage), name="look", read_only=True, idempotent=True)
    assert stage.run(tower.execute([Call("look", {"who": "a"}), Call("look", {"who": "b"})])).ok
    assert not overlap(stage, "a", "b")


def test_r04_a_closed_run_takes_nothing(stage: Stage) -> None:
    """R-04, R-89: a batch for a run that was left, or a tower that was closed, is answered `run_closed` call by call;
    no handler starts.
    """
    tower = stage.tower()
    tower.add_tool(worker(stage), name="work", independent=True)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            run = await stack.enter_async_context(tower.run())
        batch = await run.execute([Call("work", {})] * 2)
        sound(batch, [0, 0])
        assert [result.code for result in batch] == ["run_closed"] * 2
        await tower.aclose()
        assert [result.code for result in await tower.execute([Call("work", {})])] == ["run_closed"]

    stage.run(main())
    assert not stage.started
