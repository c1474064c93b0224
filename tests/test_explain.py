"""`tower.explain`: what a batch would do, and that it is what the batch then does."""

from __future__ import annotations

import asyncio
import json
import logging
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Stage, on_stage

from towerman import Call, Event, Explanation, InputError, PolicyError, Pool, Rate, Tower
from towerman.access import conflict
from towerman.desk import FORMS, Desk, open_tower
from towerman.explain import MAX_EDGES, Edge, Limit, PlannedCall, RefusedCall, Seen, explain
from towerman.explain.choosing import MAX_CARDS, MAX_IN_COLUMN
from towerman.explain.drawing import MAX_ROWS
from towerman.explain.telling import waits
from towerman.gate import Gate
from towerman.ledger import Ledger, Wants
from towerman.ledger import Pool as LedgerPool
from towerman.lots import Lot

stage = pytest.fixture(on_stage)
SVG = "{http://www.w3.org/2000/svg}"


def hard(explanation: Explanation) -> list[tuple[int, int, str]]:
    """The edges that hold whatever the durations are."""
    return [(edge.before, edge.after, edge.why) for edge in explanation.edges if edge.kind != "pool"]


def drawn(explanation: Explanation) -> ElementTree.Element:
    """The drawing, parsed: it is well-formed."""
    return ElementTree.fromstring(explanation.to_svg())


def words(root: ElementTree.Element) -> list[str]:
    """All texts of a drawing."""
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


# ==================================================================== what it says


def test_the_demo_batch_is_explained(tmp_path: Any) -> None:
    """R-140: what runs together, who waits for whom and why, and what is refused, of the built-in desk's batch."""
    tower = open_tower(Desk(tmp_path))
    told = tower.explain(FORMS["openai"]())
    assert told.groups == ((0, 1, 4, 5, 8, 11, 12, 15, 17, 18, 19, 20), (2, 3, 6, 9), (7, 10), (16,))
    assert told.edges == (
        Edge(0, 2, "pool", "pool crm (limit 2)"),
        Edge(1, 3, "pool", "pool crm (limit 2)"),
        Edge(5, 6, "resource", "resource ticket:{ticket_id}", "write, then write"),
        Edge(6, 7, "resource", "resource ticket:{ticket_id}", "write, then read"),
        Edge(8, 9, "resource", "resource file:{path}", "write, then write"),
        Edge(9, 10, "resource", "resource file:{path}", "write, then read"),
        Edge(11, 16, "rate", "rate of tool track_parcel (2/1.1s)"),
    )
    assert [(one.index, one.tool, one.outcome, one.code) for one in told.refused] == [
        (13, "<unknown tool>", "rejected", "unknown_tool"),
        (14, "update_ticket", "rejected", "invalid_arguments"),
        (21, "translate", "rejected", "budget_exhausted"),
    ]
    assert told.spends == {"calls": 19, "cost": 0.04}
    assert told.rate_seconds == 1.1
    assert [call.index for call in told.calls if call.approval] == [12, 17, 18]
    assert told.calls[2] == PlannedCall(
        2, "list_orders", 1, ("read orders:{customer_id}",), {"process": 1, "run": 1, "crm": 1}
    )
    assert told.limits == (
        Limit("process", 32, "process", True),
        Limit("crm", 2, "process", True),
        Limit("run", 16, "run", True),
    )
    assert told.critical_path in ((5, 6, 7), (8, 9, 10))
    assert (told.size, told.ok, told.notice, told.complete) == (22, False, told.refused[2].message, True)
    assert repr(told) == "Explanation(19 calls in 4 groups, 3 refused)"
    assert tower.statistics().runs == 0


def test_the_text_names_groups_reasons_and_limits(stage: Stage) -> None:
    """R-140: the text says everything in words: groups, what each call touches, takes and waits for."""
    tower = stage.tower(pools={"crm": 1}, mode="enforce")

    @tower.tool(reads="customer:{number}", pools=["crm"])
    async def read(number: int) -> None: ...

    @tower.tool(writes="customer:{number}", max_concurrency=1, weight=3)
    async def write(number: int) -> None: ...

    @tower.tool
    async def legacy() -> None: ...

    calls = [Call("read", {"number": 1}), Call("write", {"number": 1}), Call("read", {"number": 2}), Call("legacy", {})]
    assert str(tower.explain([*calls, Call("nobody", {})])) == (
        "4 calls would run in 3 groups (critical path: 0, 1, 3), 1 call would be refused.\n"
        "\n"
        "┌ group 1: 1 call\n"
        "│ ● 0  read            read customer:{number}, pool crm\n"
        "│\n"
        "├ group 2: 2 calls at once\n"
        "│ ● 1  write           write customer:{number}, pool process x3, own limit\n"
        "│      ╰╌ waits for 0: resource customer:{number} (read, then write)\n"
        "│   2  read            read customer:{number}, pool crm\n"
        "│      ╰┈ waits for 0: pool crm (limit 1)\n"
        "│\n"
        "├ group 3: 1 call\n"
        "│ ● 3  legacy          alone, in order\n"
        "│      ╰╌ waits for 0, 1, 2: order of the run\n"
        "╵\n"
        "\n"
        "refused: 1 call\n"
        "  4  <unknown tool>  unknown_tool: There is no tool of this name.\n"
        "\n"
        "limits: process 32, crm 1, tool:write 1, run 8\n"
        "\n"
        "● on the critical path   ╰╌ keeps the order   ╰┈ waits for a limit\n"
        "\n"
        "A group is what runs at the same time if every call lasts equally long. Where they\n"
        "do not, calls that do not wait for each other overlap more. Nothing else is taken to\n"
        "be at work."
    )
    assert str(tower.explain([calls[0]])).splitlines()[0] == "1 call would run in 1 group."
    assert str(tower.explain([Call("nobody", {})])).splitlines()[0] == "1 call would be refused."
    assert str(tower.explain([])) == "No calls: nothing would run."
    assert not tower.explain([]).refused


def test_a_limit_of_one_tool_and_many_reasons_are_told(stage: Stage) -> None:
    """R-140: a tool's own limit is named as such, and a long list of reasons is cut with a count."""
    tower = stage.tower()

    @tower.tool(independent=True, max_concurrency=1)
    async def one() -> None: ...

    @tower.tool(sequential=True)
    async def last() -> None: ...

    told = tower.explain([*[Call("one", {})] * 2, Call("last", {})])
    assert Edge(0, 1, "pool", "limit of tool one (1)") in told.edges
    assert hard(told) == []  # beside independent calls only
    edges = [Edge(index, 9, "order", "order of the run") for index in range(7)]
    assert waits(edges) == {9: [("order", "0, 1, 2 and 4 more: order of the run")]}
    assert waits(edges[:4]) == {9: [("order", "0, 1, 2, 3: order of the run")]}


def test_json_keys_are_stable(stage: Stage) -> None:
    """R-140: `to_dict` is plain JSON, and these are its keys, for programs."""
    tower = stage.tower(pools={"p": 1})

    @tower.tool(writes="k", pools=["p"])
    async def work() -> None: ...

    told = tower.explain([Call("work", {}), Call("work", {}), Call("nobody", {})])
    assert json.loads(json.dumps(told.to_dict())) == {
        "size": 3,
        "calls": [
            {
                "index": i,
                "tool": "work",
                "group": i,
                "touches": ["write k"],
                "permits": {"process": 1, "run": 1, "p": 1},
                "shared_with": None,
                "merged": False,
                "approval": False,
                "id": None,
                "estimate": None,
                "defers": False,
                "behind": [],
                "state": None,
            }
            for i in range(2)
        ],
        "groups": [[0], [1]],
        "edges": [{"before": 0, "after": 1, "kind": "resource", "why": "resource k", "detail": "write, then write"}],
        "refused": [
            {
                "index": 2,
                "tool": "<unknown tool>",
                "outcome": "rejected",
                "code": "unknown_tool",
                "message": "There is no tool of this name.",
                "id": None,
            }
        ],
        "deferred": [],
        "limits": [
            {"name": "process", "permits": 32, "scope": "process", "enforced": True},
            {"name": "p", "permits": 1, "scope": "process", "enforced": True},
            {"name": "run", "permits": 8, "scope": "run", "enforced": True},
        ],
        "rates": [],
        "rate_seconds": 0.0,
        "spends": {},
        "critical_path": [0, 1],
        "critical_seconds": None,
        "members": [],
        "notice": None,
        "complete": True,
    }
    with pytest.raises(AttributeError):
        told.notice = "changed"  # type: ignore[misc]


def test_templates_that_meet_are_both_told(stage: Stage) -> None:
    """R-16: where two calls name one resource by two templates, the reason says both."""
    tower = stage.tower()

    @tower.tool(writes="doc:{folder}/**")
    async def clear(folder: str) -> None: ...

    @tower.tool(reads="doc:{folder}/{name}")
    async def read(folder: str, name: str) -> None: ...

    told = tower.explain([Call("clear", {"folder": "a"}), Call("read", {"folder": "a", "name": "b"})])
    (edge,) = told.edges
    assert edge.why == "resource doc:{folder}/{name}"
    assert str(edge) == "resource doc:{folder}/{name} (write doc:{folder}/**, then read doc:{folder}/{name})"


def test_exclusive_tools_and_process_limits_are_told(stage: Stage) -> None:
    """R-24: an undeclared tool of an exclusive tower is alone in the process, and the reason says so."""
    tower = stage.tower(undeclared="exclusive")

    @tower.tool
    async def odd() -> None: ...

    @tower.tool(reads="k")
    async def read() -> None: ...

    told = tower.explain([Call("read", {}), Call("odd", {}), Call("read", {})])
    assert hard(told) == [(0, 1, "exclusive tool"), (1, 2, "exclusive tool")]
    assert [call.touches for call in told.calls] == [("read k",), ("alone in the process",), ("read k",)]


# ==================================================================== what is refused


def test_every_refusal_is_told_with_its_code_and_words(stage: Stage) -> None:
    """R-128, P-61, P-74: what a batch would refuse is refused here with the same code and the same words."""
    tower = stage.tower(max_calls_per_batch=6)

    @tower.tool(independent=True)
    async def work(number: int = 0) -> int:
        return number

    @tower.tool(independent=True, only_call=True)
    async def alone() -> None: ...

    @tower.tool(independent=True)
    async def secret() -> None: ...

    @tower.tool(writes="file:{path}")
    async def write(path: str) -> None: ...

    calls = [
        Call("work", {}),
        Call("alone", {}),
        Call("secret", {}),
        Call("work", {"number": "many"}),
        Call("write", {"path": ""}),
        Call("nobody", {}),
        Call("work", {}),
        Call("work", {}),
    ]
    told = tower.explain(calls, deny="sec*")
    batch = stage.run(tower.execute(calls, deny="sec*"))
    assert [(one.index, one.code, one.message) for one in told.refused] == [
        (result.index, result.code, result.message) for result in batch if not result.ok
    ]
    assert [one.code for one in told.refused] == [
        "not_alone",
        "permission_denied",
        "invalid_arguments",
        "invalid_arguments",
        "unknown_tool",
        "call_cap",
        "call_cap",
    ]
    assert told.notice == batch.notice
    assert told.notice is not None
    assert [one.tool for one in told.refused[-2:]] == ["work", "work"]


def test_a_truncated_response_is_told(stage: Stage) -> None:
    """R-140: the last call of a response that was cut, and those with effects, would not run."""
    tower = stage.tower()

    @tower.tool(reads="k")
    async def read() -> None: ...

    response = {
        "id": "x",
        "choices": [
            {
                "finish_reason": "length",
                "message": {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": str(i), "type": "function", "function": {"name": "read", "arguments": "{}"}}
                        for i in range(2)
                    ],
                },
            }
        ],
    }
    told = tower.explain(response)
    assert [(one.index, one.code) for one in told.refused] == [(1, "truncated_response")]


@pytest.mark.parametrize(
    ("needs", "code"), [((("b",), ("a",)), "dependency_cycle"), ((("z",), ()), "unknown_dependency")]
)
def test_needs_that_cannot_be_followed_refuse_all(stage: Stage, needs: Any, code: str) -> None:
    """G5, R-30, R-32: nothing of such a batch would run, and each call is told why."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> None: ...

    calls = [Call("work", {}, id="a", needs=needs[0]), Call("work", {}, id="b", needs=needs[1]), Call("odd", {})]
    told = tower.explain(calls)
    assert (told.groups, told.calls, told.edges, told.critical_path) == ((), (), (), ())
    assert [one.code for one in told.refused] == [code] * 3
    assert [one.tool for one in told.refused] == ["work", "work", "<unknown tool>"]
    batch = stage.run(tower.execute(calls))
    assert [one.message for one in told.refused] == [result.message for result in batch]


def test_what_needs_a_refused_call_is_skipped(stage: Stage) -> None:
    """R-38: a skipped call is told as skipped with the call that it needs; what only stands behind it in order runs,
    and in order.
    """
    tower = stage.tower()

    @tower.tool(writes="k")
    async def work(number: int = 0) -> int:
        return number

    calls = [
        Call("work", {}, id="first"),
        Call("work", {"number": "x"}, id="bad"),
        Call("work", {}, id="skipped", needs=["bad"]),
        Call("work", {}, id="too", needs=["skipped", "bad"]),
        Call("work", {"number": "y"}, id="bad itself", needs=["bad"]),
        Call("work", {}, id="last"),
    ]
    told = tower.explain(calls)
    batch = stage.run(tower.execute(calls))
    assert told.groups == ((0,), (5,))
    assert [(one.index, one.outcome, one.code, one.message) for one in told.refused] == [
        (result.index, result.outcome, result.code, result.message) for result in batch if not result.ok
    ]
    assert told.critical_path == (0, 5)


def test_a_busy_tool_that_does_not_wait_is_told_as_refused(stage: Stage) -> None:
    """R-67: with when_busy="reject" a full pool refuses, as it does when the batch runs; what needs it is
    skipped."""
    tower = stage.tower(pools={"p": 1})

    @tower.tool(independent=True, pools=["p"], when_busy="reject")
    async def work(seconds: float = 1) -> None:
        await asyncio.sleep(seconds)

    calls = [Call("work", {}), Call("work", {}, id="busy"), Call("work", {}, needs=["busy"])]
    told = tower.explain(calls)
    batch = stage.run(tower.execute(calls))
    assert [(one.index, one.outcome, one.code) for one in told.refused] == [
        (result.index, result.outcome, result.code) for result in batch if not result.ok
    ]
    assert "pool p" in told.refused[0].message


def test_options_of_the_run_hold(stage: Stage) -> None:
    """R-99, R-128: the run's own limit, deadline and permissions are taken into account, and checked as `run` does."""
    tower = stage.tower(pools={"each": Pool(2, scope="run"), "ours": Pool(1, scope="tenant")})

    @tower.tool(independent=True)
    async def work() -> None: ...

    @tower.tool(independent=True, pools=["each"])
    async def two() -> None: ...

    @tower.tool(independent=True, pools=["ours"])
    async def one() -> None: ...

    assert len(tower.explain([Call("work", {})] * 4, max_concurrency=2).groups) == 2
    assert len(tower.explain([Call("two", {})] * 4).groups) == 2
    assert len(tower.explain([Call("one", {})] * 4, tenant="acme").groups) == 4
    limits = {one.name: (one.permits, one.scope) for one in tower.explain([Call("two", {}), Call("one", {})]).limits}
    assert limits == {"process": (32, "process"), "run": (8, "run"), "each": (2, "run"), "ours": (1, "tenant")}
    late = tower.explain([Call("work", {})], deadline=0)
    assert [one.code for one in late.refused] == ["deadline_exceeded"]
    with pytest.raises(PolicyError, match="priority"):
        tower.explain([], priority="high")
    with pytest.raises(TypeError, match="colour"):
        tower.explain([], colour="red")
    with pytest.raises(InputError):
        tower.explain(7)


def test_observed_limits_hold_nobody_back(stage: Stage) -> None:
    """S13: with mode="observe" capacity is relaxed, order is not, and the limits say that they are only observed."""
    tower = stage.tower(mode="observe", pools={"p": 1})

    @tower.tool(writes="k:{name}", pools=["p"])
    async def work(name: str) -> None: ...

    told = tower.explain([Call("work", {"name": name}) for name in "aab"])
    assert told.groups == ((0, 2), (1,))
    assert not any(limit.enforced for limit in told.limits)
    assert "p 1 (observed only)" in str(told)


def test_gate_refusals_of_thousands_do_not_nest() -> None:
    """P-10: where each call of a long chain is refused in its turn, the chain's length is no depth of calls."""
    ledger: Ledger[Lot[int]] = Ledger()
    ledger.add_pool(LedgerPool("pool:p", "pool p", 1))
    gate: Gate[int] = Gate(ledger)
    flow = gate.open_flow(0, 8)

    def wants(index: int) -> Wants[Lot[int]]:
        return ledger.look_up(Wants(0, "work", (("pool:p", 2),), (("k", 3),), labels={"k": "k"}))

    size = 3_000
    seen = [Seen(Call("work", {}), "work", ("write k",), wants(index)) for index in range(size)]
    told = explain(seen, None, gate, flow, 0.0)
    assert len(told.refused) == size
    assert {one.code for one in told.refused} == {"concurrency_limit"}
    assert told.critical_path == ()
    assert repr(seen[0]) == "Seen('work')"


# ==================================================================== what it leaves alone


def test_nothing_changes(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """R-140: explaining takes no permit, counts, learns, logs and traces nothing, also while calls are at work."""
    events: list[Event] = []
    tower = stage.tower(pools={"p": 1, "mine": Pool(1, scope="run")}, observers=[events.append])

    @tower.tool(writes="k", pools=["p", "mine"], max_concurrency=2)
    async def work() -> str:
        return await stage.work("work", 1)

    @tower.tool
    async def legacy() -> None: ...

    async def main() -> None:
        async with tower.run() as run:
            batch = asyncio.create_task(run.execute([Call("work", {})] * 3))
            await asyncio.sleep(0.5)
            tower.flush()
            core = tower._core
            before = tower.statistics()
            seen = (len(events), dict(core.means), set(core.hinted), tower._run_count, dict(run._state.bases))
            with caplog.at_level(logging.DEBUG, logger="towerman"):
                told = tower.explain([*[Call("work", {})] * 2, Call("legacy", {}), Call("nobody", {})])
            assert len(told.groups) == 3
            tower.flush()
            assert tower.statistics() == before
            assert seen == (len(events), core.means, core.hinted, tower._run_count, run._state.bases)
            assert caplog.records == []
            assert (await batch).ok

    stage.run(main())


def test_what_was_learned_orders_the_start(stage: Stage) -> None:
    """S6: the order of starting goes by what earlier calls took, as it will when the batch runs."""
    tower = stage.tower(max_concurrency=1)

    @tower.tool(independent=True)
    async def short() -> str:
        return await stage.work("short", 1)

    @tower.tool(independent=True)
    async def long() -> str:
        return await stage.work("long", 9)

    @tower.tool(independent=True)
    async def end() -> str:
        return await stage.work("end", 1)

    calls = [
        Call("short", {}, id="a"),
        Call("long", {}, id="b"),
        Call("end", {}, needs=["a"]),
        Call("end", {}, needs=["b"]),
    ]
    assert tower.explain(calls).groups[0] == (0,)
    stage.run(tower.execute(calls))
    assert tower.explain(calls).groups[0] == (1,)
    assert tower._core.means["long"] == (1, 9.0)


def test_a_closed_tower_can_still_explain(stage: Stage) -> None:
    """R-140: whether a tower takes calls does not matter for what they would do."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> None: ...

    stage.run(tower.aclose())
    assert tower.explain([Call("work", {})]).ok


# ==================================================================== the drawing


def test_the_drawing_is_sound_and_tells_all(tmp_path: Any) -> None:
    """R-140: the SVG is well-formed, holds each call, each edge and each refusal, and follows light and dark pages."""
    told = open_tower(Desk(tmp_path)).explain(FORMS["openai"]())
    root = drawn(told)
    arrows = [
        one for one in root.iter(f"{SVG}path") if "marker-end" in one.attrib and one.find(f"{SVG}title") is not None
    ]
    assert sorted("".join(one.itertext()) for one in arrows) == sorted(
        f"call {edge.after} waits for call {edge.before}: {edge}" for edge in told.edges
    )
    texts = words(root)
    for call in told.calls:
        assert call.tool in texts
        assert str(call.index) in texts
    for one in told.refused:
        assert one.code in texts
    assert "after 5: resource ticket:{ticket_id}" in texts
    assert "prefers-color-scheme:dark" in told.to_svg()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert 28 + 8.5 * len(words(root)[0]) <= width - 28  # 15 px, bold, in a wide font
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= float(rect.attrib.get("x", 0)) + float(rect.attrib["width"]) <= width
        assert 0 <= float(rect.attrib.get("y", 0)) + float(rect.attrib["height"]) <= height


def test_a_long_headline_widens_the_drawing(stage: Stage) -> None:
    """R-140: a headline that is wider than the columns is not cut at the edge; a call without anything is called so."""
    tower = stage.tower()

    @tower.tool(independent=True, share_identical=True)
    async def work() -> str:
        return "done"

    told = tower.explain([Call("work", {}), Call("work", {}), Call("nobody", {})])
    root = drawn(told)
    head = words(root)[0]
    assert head.endswith("1 call would be answered by the run of another, 1 call would be refused.")
    assert float(root.attrib["width"]) >= 56 + 8.5 * len(head) > 2 * 260 + 92 + 56
    assert words(root).count("independent") == 2
    assert "│   0  work            independent" in str(told).splitlines()


def test_the_drawing_of_nothing_is_sound(stage: Stage) -> None:
    """R-140: an empty batch, and one that is refused whole, have a drawing too."""
    tower = stage.tower()
    assert words(drawn(tower.explain([])))[0] == "No calls."
    assert words(drawn(tower.explain([Call("nobody", {})])))[0] == "1 call would be refused."


def test_the_drawing_of_thousands_is_bounded(stage: Stage) -> None:
    """P-10: a drawing of a great batch says how much it leaves out, and stays of a size that can be opened."""
    tower = stage.tower(on_excess="queue", max_concurrency=2_000, run_concurrency=400)

    @tower.tool(independent=True)
    async def free() -> None: ...

    @tower.tool(writes="e/{number}")
    async def write(number: int) -> None: ...

    @tower.tool(reads=["a", "b", "c", "d", "e/**"])
    async def read() -> None: ...

    many = tower.explain([*[Call("free", {})] * 900, *[Call("nobody", {})] * (MAX_CARDS + 7)])
    root = drawn(many)
    assert f"{900 - 3 * MAX_IN_COLUMN} calls more, not drawn." in words(root)
    assert [text for text in words(root) if text.startswith("and ")] == ["and 340 more"] * 2 + ["and 40 more"]
    assert f"{MAX_CARDS + 7 - MAX_ROWS} calls more, not drawn." in words(root)
    assert len(many.to_svg()) < 1_000_000
    knot = tower.explain([Call("read", {})] * 60 + [Call("write", {"number": n}) for n in range(40)])
    assert len(knot.edges) == 60 * 40
    assert len(knot.links) == 60 + 40  # by a junction
    assert not [text for text in words(drawn(knot)) if "not drawn" in text]


def test_edges_are_told_up_to_a_number(stage: Stage) -> None:
    """P-10: readers against writers make millions of pairs; the groups are right and the pairs are cut with a word."""
    tower = stage.tower(on_excess="queue", run_concurrency=1_000, max_concurrency=1_000)

    @tower.tool(reads="k")
    async def read() -> None: ...

    @tower.tool(writes="k/{name}")
    async def write(name: str) -> None: ...

    @tower.tool(reads="k/**")
    async def all_of_it() -> None: ...

    calls = [*[Call("write", {"name": str(n)}) for n in range(200)], *[Call("all_of_it", {})] * 200]
    told = tower.explain(calls)
    assert not told.complete
    assert len(told.edges) == MAX_EDGES
    assert [len(group) for group in told.groups] == [200, 200]
    assert len(told.critical_path) == 2
    assert "more reasons to wait than are listed" in str(told)
    assert len(told.links) == 400
    assert not [text for text in words(drawn(told)) if "not drawn" in text]


def test_pale_arrows_follow_from_others(stage: Stage) -> None:
    """R-140: an arrow that others lead round to is pale, so that a knot stays readable; the rest is not."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def work() -> None: ...

    calls = [
        Call("work", {}, id="a"),
        Call("work", {}, id="b", needs=["a"]),
        Call("work", {}, id="c", needs=["a", "b"]),
    ]
    root = drawn(tower.explain(calls))
    pale = [one for one in root.iter(f"{SVG}path") if "implied" in one.attrib["class"]]
    assert {"".join(one.itertext()) for one in pale} == {"call 2 waits for call 0: needs"}
    assert "pale: follows from others" in words(root)


def test_what_was_declared_cannot_break_the_drawing() -> None:
    """R-140: templates and names are text in the drawing and in the text, whatever characters they hold."""
    nasty = '<script>alert("x")</script>&\x1b[31m\u202e'
    edges = (Edge(0, 1, "resource", f"resource {nasty}", nasty),)
    told = Explanation(
        calls=(PlannedCall(0, "a", 0, (nasty,) * 5, {"process": 1}), PlannedCall(1, "b" * 90, 1, (), {nasty: 1})),
        groups=((0,), (1,)),
        edges=edges,
        refused=(RefusedCall(2, "<unknown tool>", "rejected", "unknown_tool", nasty),),
        critical_path=(0, 1),
    )
    root = drawn(told)
    assert not list(root.iter(f"{SVG}script"))
    assert "\x1b" not in told.to_svg() + str(told)
    assert "\u202e" not in told.to_svg() + str(told)
    assert "and 2 more" in words(root)


def test_a_call_with_many_reasons_keeps_a_card() -> None:
    """R-140: a card lists four reasons and counts the rest."""
    edges = tuple(Edge(index, 9, "resource", f"resource r{index}") for index in range(6))
    calls = tuple(PlannedCall(index, "t", int(index == 9), (), {}) for index in (0, 1, 2, 3, 4, 5, 9))
    told = Explanation(calls=calls, groups=((0, 1, 2, 3, 4, 5), (9,)), edges=edges)
    assert "and 2 more reasons to wait" in words(drawn(told))


# ==================================================================== no argument value


SECRET = "zqxjkvbpwm"


def test_g8_no_argument_value_is_told(stage: Stage) -> None:
    """G8, R-130: a secret in any argument, in a resource key and in a broken one is in none of the three forms."""
    tower = stage.tower()

    @tower.tool(writes=["file:{path}", "doc:{path}/**"])
    async def write(path: str, body: str = "") -> None: ...

    @tower.tool(reads=lambda path: f"file:{path}")
    async def read(path: str) -> None: ...

    @tower.tool(independent=True)
    async def count(number: int) -> None: ...

    calls = [
        Call("write", {"path": f"/srv/{SECRET}", "body": SECRET}),
        Call("read", {"path": f"/srv/{SECRET}"}),
        Call("write", {"path": f"/srv/{SECRET}/x", "body": SECRET}),
        Call("count", {"number": SECRET}),
        Call("count", f'{{"number": "{SECRET}'),
        Call("write", {"path": f"{SECRET}/../x"}),
        Call(f"do_{SECRET}", {SECRET: SECRET}),
        Call("count", {"number": 1, SECRET: 2}),
    ]
    told = tower.explain(calls)
    assert len(told.groups) == 2
    for sink in (str(told), repr(told), json.dumps(told.to_dict()), told.to_svg(), repr(told.calls)):
        assert SECRET not in sink


# ==================================================================== it is what happens


Shape = tuple[str, str, tuple[int, ...]]
KINDS = ["read", "write", "tree", "ordered", "free", "both"]
shapes = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(["a", "a/b", "a/c", "d"]),
        st.lists(st.integers(0, 40), max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=14,
)


def cast_tools(stage: Stage, tower: Tower, seconds: Sequence[float]) -> None:
    """Tools of every kind; each writes down when it came on and went off."""

    async def work(index: int, name: str) -> int:
        await stage.work(str(index), seconds[index])
        return index

    tower.add_tool(work, name="read", reads="doc:{name}", pools=["p"])
    tower.add_tool(work, name="write", writes="doc:{name}")
    tower.add_tool(work, name="tree", reads="doc:{name}/**", pools={"q": 2})
    tower.add_tool(work, name="both", reads="doc:{name}", writes="log:{name}", pools=["p", "q"])
    tower.add_tool(work, name="ordered", sequential=True)
    tower.add_tool(work, name="free", independent=True, max_concurrency=3)


def written(batch: Sequence[Shape]) -> list[Call]:
    """The calls of a shape; they need earlier ones only, so that there is no circle."""
    return [
        Call(kind, {"index": index, "name": name}, id=f"c{index}", needs=[f"c{n % index}" for n in needs if index])
        for index, (kind, name, needs) in enumerate(batch)
    ]


def performed(batch: Sequence[Shape], seconds: Sequence[float], **options: Any) -> tuple[Explanation, dict[int, Any]]:
    """Explain a batch, run it, and give back the explanation and when each call came on and went off."""
    with contextmanager(on_stage)() as stage:
        tower = stage.tower(on_excess="queue", **options)
        cast_tools(stage, tower, seconds)
        calls = written(batch)
        told = tower.explain(calls)
        result = stage.run(tower.execute(calls))
        assert result.ok
        spans = {int(name): (came, went) for name, came, went in stage.spans if name.isdecimal()}
    return told, spans


def no_edge_is_violated(told: Explanation, spans: dict[int, Any]) -> None:
    """Whoever waits starts after the end of whom it waits for."""
    for edge in told.edges:
        if edge.kind != "pool":
            assert spans[edge.after][0] >= spans[edge.before][1], edge


WIDE: dict[str, Any] = {"max_concurrency": 100, "run_concurrency": 100, "pools": {"p": 100, "q": 100}}


@settings(max_examples=60)
@given(batch=shapes)
def test_g4_groups_are_what_runs_together_under_free_limits(batch: list[Shape]) -> None:
    """G4, R-141: where no limit is in the way and all calls last equally long, each group starts at once, when the one
    before has ended; what is said to overlap does overlap.
    """
    batch = [shape for shape in batch if shape[0] != "free"] or [("read", "a", ())]
    told, spans = performed(batch, [1.0] * len(batch), **WIDE)
    assert told.ok
    assert not [edge for edge in told.edges if edge.kind == "pool"]
    assert {index: float(number) for number, group in enumerate(told.groups) for index in group} == {
        index: came for index, (came, _) in spans.items()
    }
    no_edge_is_violated(told, spans)
    assert len(told.critical_path) == len(told.groups)


@settings(max_examples=60)
@given(
    batch=shapes,
    run=st.integers(1, 6),
    p=st.integers(1, 3),
    q=st.integers(2, 4),
    lengths=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=14, max_size=14),
)
def test_g4_no_edge_is_violated_whatever_the_durations(
    batch: list[Shape], run: int, p: int, q: int, lengths: list[float]
) -> None:
    """G3, G4, S1: with any limits and durations calls run in the order of the edges; the calls of a group never
    conflict, fit the limits together, and wait for no one of their own or a later group.
    """
    told, spans = performed(batch, lengths, max_concurrency=5, run_concurrency=run, pools={"p": p, "q": q})
    no_edge_is_violated(told, spans)
    assert sorted(index for group in told.groups for index in group) == list(range(len(batch)))
    group_of = {index: number for number, group in enumerate(told.groups) for index in group}
    for edge in told.edges:
        assert group_of[edge.before] < group_of[edge.after], edge
    permits = {limit.name: limit.permits for limit in told.limits}
    by_index = {call.index: call for call in told.calls}
    for group in told.groups:
        for name, most in permits.items():
            assert sum(by_index[index].permits.get(name, 0) for index in group) <= most, name
        assert not conflicts(batch, group)
    assert len(told.critical_path) == longest(told)
    assert all(
        edge in {(e.before, e.after) for e in told.edges}
        for edge in zip(told.critical_path, told.critical_path[1:], strict=False)
    )


def conflicts(batch: Sequence[Shape], group: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of a group that may not run at the same time, by the definition and not by locks."""
    with contextmanager(on_stage)() as stage:
        tower = stage.tower(**WIDE)
        cast_tools(stage, tower, [])
        rules = {name: tool.rule for name, tool in tower._core.tools.items()}
    accesses = {}
    for index in group:
        kind, name, _ = batch[index]
        rule = rules[kind]
        accesses[index] = rule.accesses({"name": name, "index": index}) if rule is not None else ()
    found = []
    for one in group:
        for other in group:
            if one < other:
                kinds = {batch[one][0], batch[other][0]}
                alone = "ordered" in kinds and "free" not in kinds
                if alone or any(conflict(a, b) for a in accesses[one] for b in accesses[other]):
                    found.append((one, other))
    return found


def longest(told: Explanation) -> int:
    """The longest chain of hard edges, counted plainly."""
    length = {call.index: 1 for call in told.calls}
    order = [index for group in told.groups for index in group]
    for index in order:
        for edge in told.edges:
            if edge.after == index and edge.kind != "pool":
                length[index] = max(length[index], length[edge.before] + 1)
    return max(length.values())


@settings(max_examples=40)
@given(batch=shapes, limit=st.integers(1, 4))
def test_g4_groups_under_one_limit_are_what_runs_together(batch: list[Shape], limit: int) -> None:
    """S6: with one limit on the whole run and equal durations, who starts when is what the explanation says."""
    batch = [shape for shape in batch if shape[0] != "free"] or [("read", "a", ())]
    told, spans = performed(batch, [1.0] * len(batch), **{**WIDE, "run_concurrency": limit})
    assert {index: float(number) for number, group in enumerate(told.groups) for index in group} == {
        index: came for index, (came, _) in spans.items()
    }


def test_r92_rates_are_explained(stage: Stage) -> None:
    """R-92, R-01: a rate puts calls into later groups, says behind whose start, and how long it alone keeps the last
    one waiting; who waits too long for it is refused; nothing of the rate is used up.
    """
    tower = stage.tower(pools={"api": Pool(9, rate=Rate(1, per=5.0, burst=2))})

    @tower.tool(independent=True, rate="2/10s", max_wait=15)
    async def search() -> None: ...

    @tower.tool(independent=True, pools=["api"])
    async def fetch() -> None: ...

    told = tower.explain([Call("search", {})] * 5 + [Call("fetch", {})] * 3)
    assert told.groups == ((0, 1, 5, 6), (7,), (2, 3))
    assert [(edge.before, edge.after, edge.kind, edge.why) for edge in told.edges] == [
        (0, 2, "rate", "rate of tool search (2/10s)"),
        (1, 3, "rate", "rate of tool search (2/10s)"),
        (6, 7, "rate", "rate of pool api (1/5s, burst 2)"),
    ]
    assert [(one.index, one.code) for one in told.refused] == [(4, "wait_timeout")]
    assert told.rate_seconds == 10
    assert [(one.name, one.rate, one.scope, one.enforced) for one in told.rates] == [
        ("tool:search", "2/10s", "process", True),
        ("api", "1/5s, burst 2", "process", True),
    ]
    assert "rates: tool:search 2/10s, api 1/5s, burst 2" in str(told)
    assert "the rates alone keep the last call waiting for 10 s" in str(told)
    assert "waits for a rate" in told.to_svg()
    assert {name: one.started for name, one in tower.statistics().rates.items()} == {"tool:search": 0, "api": 0}


# ==================================================================== what would be deferred


def boxes(journal: Path) -> Tower:
    """A tool that is deferred when its pool is busy, and one that comes behind it."""
    tower = Tower(journal=journal, pools={"crm": 1}, max_calls_per_batch=1000)

    @tower.tool(writes="box:{box}", pools=["crm"], when_busy="defer")
    async def pack(box: str, weight: object = None) -> str:
        return box

    @tower.tool(reads="box:{box}")
    async def look(box: str) -> str:
        return box

    return tower


def test_r74_what_would_be_deferred_is_told(tmp_path: Path) -> None:
    """R-74, R-140: calls that go into the durable queue when there is no room say so, what comes behind them too; what
    this very batch leaves no room for is deferred, as when it runs, and not refused.
    """
    calls = [
        Call("pack", {"box": "a"}),
        Call("look", {"box": "a"}),
        Call("look", {"box": "b"}),
        Call("pack", {"box": "c"}, "x"),
        Call("look", {"box": "d"}, "y", needs=("x",)),
        Call("look", {"box": "d"}),
    ]
    tower = boxes(tmp_path / "j.db")
    told = tower.explain(calls)
    assert [(one.index, one.defers, one.behind) for one in told.calls] == [
        (0, True, ()), (1, False, (0,)), (2, False, ()), (5, False, ()),
    ]  # fmt: skip
    assert [(one.index, one.code) for one in told.deferred] == [(3, "deferred"), (4, "held_behind")]
    assert (told.size, told.ok, told.refused) == (6, True, ())
    assert repr(told) == "Explanation(4 calls in 2 groups, 0 refused, 2 deferred)"
    text = str(told)
    assert "4 calls would run in 2 groups (critical path: 0, 1), 2 calls would be deferred." in text
    text = " ".join(text.split())
    assert "0 pack write box:{box}, pool crm, deferred when busy" in text
    assert "deferred too if call 0 is" in text
    assert "3 pack deferred: Pool crm is busy: it would run later, in a worker." in text
    assert "4 look held_behind: It comes after call 3 (x), which would be deferred." in text
    assert "deps, deadline, allow, deny" in text and "no order to calls of other batches" in text
    assert [one["code"] for one in told.to_dict()["deferred"]] == ["deferred", "held_behind"]  # type: ignore[index, attr-defined]  # as it is written
    assert "deferred" in told.to_svg()

    async def main() -> list[tuple[str, str | None]]:
        async with tower.run("r") as run:
            done = await run.execute(calls)
        await tower.aclose()
        return [(one.outcome, one.code) for one in done]

    assert asyncio.run(main()) == [("ok", None)] * 3 + [
        ("pending", "deferred"),
        ("pending", "held_behind"),
        ("ok", None),
    ]


def test_what_cannot_be_written_down_is_not_told_as_deferred(tmp_path: Path) -> None:
    """R-74: a call whose arguments are no JSON would be refused where there is no room."""
    tower = boxes(tmp_path / "j.db")
    told = tower.explain([Call("pack", {"box": "a"}), Call("pack", {"box": "b", "weight": {1, 2}})])
    assert [one.index for one in told.refused] == [1] and not told.deferred
    tower.close()


def test_a_chain_of_deferred_calls_is_followed_through(tmp_path: Path) -> None:
    """R-74: every call behind a deferred one goes there, however long the chain; others run."""
    tower = boxes(tmp_path / "j.db")
    calls = [Call("pack", {"box": box}) for _ in range(300) for box in "ab"] + [Call("look", {"box": "z"})]
    told = tower.explain(calls)
    assert [one.index for one in told.calls] == [*range(0, 600, 2), 600] and len(told.deferred) == 300
    assert {one.code for one in told.deferred[1:]} == {"held_behind"}
    tower.close()
