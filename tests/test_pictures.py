"""The pictures: where cards and arrows stand, and what the drawings of batches and of runs hold."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import Stage, on_stage

from towerman import Call, Explanation, Tower
from towerman.calls import Outcome
from towerman.cli import main
from towerman.explain import Edge, PlannedCall, RefusedCall
from towerman.explain import layout as places
from towerman.explain.choosing import MAX_ARROWS, MAX_CARDS, MAX_COLUMNS
from towerman.explain.drawing import MAX_ROWS
from towerman.explain.layout import Layout, Link, Measures, arrange, spread
from towerman.explain.telling import MAX_TOLD, about
from towerman.timeline import MOST_ROWS, columns, draw_svg, svg
from towerman.trace import UNKNOWN_TOOL, Span

stage = pytest.fixture(on_stage)
SVG = "{http://www.w3.org/2000/svg}"
NASTY = "<script>&\"'\x00\x1b[31m\u202e\ufffe]]>--></svg>"
SECRET = "zqxjkvbpwm"
SIZES = Measures(28.0, 100.0, 200.0, 80.0, 10.0, {"needs": -6, "resource": 0, "order": 6, "pool": 6, "rate": 6})


def parsed(picture: str) -> ElementTree.Element:
    """The picture, which is well-formed, stands alone and says what it is."""
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert root.attrib["role"] == "img"
    assert [child.tag for child in root][:3] == [f"{SVG}title", f"{SVG}desc", f"{SVG}style"]
    assert all(child.text for child in root[:3])
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    assert "prefers-color-scheme:dark" in (root[2].text or "")
    assert not [one for one in root.iter() if one.tag.rpartition("}")[2] in ("script", "image", "foreignObject", "a")]
    without_names = picture.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|href|@import|@font-face|url\((?!#)|\bon\w+=", without_names)
    assert set(re.findall(r"url\(#([\w-]+)\)", picture)) <= {one.attrib.get("id") for one in root.iter()}
    return root


def words(root: ElementTree.Element) -> list[str]:
    """All texts of a picture as one reads them: what shows when one points at them is left out."""
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def titles(root: ElementTree.Element, tag: str) -> list[str]:
    """What shows when one points at things of a kind."""
    return ["".join(title.itertext()) for one in root.iter(f"{SVG}{tag}") for title in one.findall(f"{SVG}title")]


def inside(root: ElementTree.Element) -> None:
    """No box and no line of text begins or ends outside the picture."""
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    defs = {id(one) for one in root.iter(f"{SVG}defs") for one in one.iter()}
    for rect in root.iter(f"{SVG}rect"):
        if id(rect) in defs:
            continue
        x, y = float(rect.attrib.get("x", 0)), float(rect.attrib.get("y", 0))
        assert 0 <= x <= x + float(rect.attrib["width"]) <= width
        assert 0 <= y <= y + float(rect.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        x, long = float(text.attrib["x"]), svg.wide(text.text or "", 11)
        start, end = (x - long, x) if text.attrib.get("text-anchor") == "end" else (x, x + long)
        assert -1 <= start <= end <= width + 1, text.text
        assert 0 <= float(text.attrib["y"]) <= height


# ==================================================================== the layout


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], dict[int, float], list[Link]]:
    """Columns of nodes, and links to the right, some of them through junctions."""
    counts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=7))
    nodes = iter(range(sum(counts)))
    layers = [[next(nodes) for _ in range(count)] for count in counts]
    of = {node: number for number, layer in enumerate(layers) for node in layer}
    heights = {node: float(draw(st.sampled_from([26, 49, 120]))) for node in of}
    links: set[tuple[int, int, str]] = set()
    kinds = st.sampled_from(["needs", "resource", "order", "pool", "rate"])
    if of:
        pick = st.integers(0, len(of) - 1)
        for one, other, kind in draw(st.lists(st.tuples(pick, pick, kinds), max_size=25)):
            if of[one] < of[other]:
                links.add((one, other, kind))
        for number, (befores, afters) in enumerate(
            draw(st.lists(st.tuples(st.sets(pick, max_size=5), st.sets(pick, max_size=5)), max_size=4))
        ):
            edge = max((of[one] for one in befores), default=0)
            late = [one for one in afters if of[one] > edge]
            junction = len(of) + number
            links |= {(one, junction, "resource") for one in befores} | {(junction, one, "resource") for one in late}
    return layers, heights, [Link(one, other, kind) for one, other, kind in sorted(links)]  # type: ignore[arg-type]


def sound(layers: Sequence[Sequence[int]], links: Sequence[Link], made: Layout) -> None:
    """Nothing overlaps, arrows lead to the right, and none of them runs through a card."""
    boxes = made.boxes
    assert set(boxes) == {node for layer in layers for node in layer}
    tall = {
        x: sorted((one.y, one.y + one.height) for one in boxes.values() if one.x == x)
        for x in {one.x for one in boxes.values()}
    }
    for spans in tall.values():
        assert all(y >= SIZES.top - 0.2 for y, _ in spans)
        assert all(one[1] + SIZES.row <= other[0] + 0.2 for one, other in pairwise(spans))
    for x, y in made.lanes:
        assert not [span for span in tall.get(x, []) if span[0] - 1 < y < span[1] + 1]
        assert SIZES.top - 0.2 <= y <= made.bottom
    assert len({(x, y) for x, y in made.lanes}) == len(made.lanes)
    for stroke in made.strokes:
        (x1, _), (x2, _) = stroke.start, stroke.end
        if (stroke.start) in made.lanes:  # straight through a column, where no card is
            assert stroke.end == (x1 + SIZES.card, stroke.start[1])
        else:  # a bend stays between two columns
            assert 0 < x2 - x1 <= SIZES.gap
    drawn = {number for stroke in made.strokes for number in stroke.links}
    assert drawn | set(made.left_out) == set(range(len(links)))
    assert not drawn & set(made.left_out)
    for number in drawn:
        way = sorted((stroke for stroke in made.strokes if number in stroke.links), key=lambda stroke: stroke.start)
        for one, other in pairwise(way):
            assert one.end == other.start
        assert way[-1].arrow == (links[number].after in boxes)


@given(graphs())
def test_arrows_lead_right_and_nothing_overlaps(graph: tuple[list[list[int]], dict[int, float], list[Link]]) -> None:
    """R-140: in every layout cards keep apart, each arrow leads from column to column to the right, through lanes that
    no card stands in; and the same graph gives the same layout.
    """
    layers, heights, links = graph
    made = arrange(layers, heights, links, SIZES)
    sound(layers, links, made)
    assert set(made.left_out) == {
        number
        for number, link in enumerate(links)
        for ends in [(link.before, link.after)]
        if any(
            end not in heights
            and not ({one.after for one in links} >= {end} and {one.before for one in links} >= {end})
            for end in ends
        )
    }
    again = arrange(layers, heights, links, SIZES)
    assert (again.boxes, again.junctions, again.strokes, again.lanes) == (
        made.boxes,
        made.junctions,
        made.strokes,
        made.lanes,
    )


def test_lanes_are_bounded_and_the_longest_arrows_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """P-10: where the lanes are used up, the arrows over most columns are told as left out, and the rest is sound."""
    monkeypatch.setattr(places, "MOST_LANES", 5)
    layers = [[node] for node in range(9)]
    links = [Link(one, other, "needs") for one in range(9) for other in range(one + 1, 9)]
    links += [Link(0, 9, "resource"), Link(9, 8, "resource")]
    made = arrange(layers, dict.fromkeys(range(9), 26.0), links, SIZES)
    sound(layers, links, made)
    assert len(made.lanes) == 5
    spans = {
        number: link.after - link.before for number, link in enumerate(links) if link.after < 9 and link.before < 9
    }
    assert min(spans[number] for number in made.left_out if number in spans) >= 2
    assert 0 not in made.left_out


def test_a_few_passes_undo_crossings() -> None:
    """R-140: where columns can be ordered without a crossing, they are: two mirrored ladders come out as ladders."""
    size = 8
    layers = [list(range(size)), list(range(size, 2 * size)), list(range(2 * size, 3 * size))]
    links = [Link(node, 2 * size - 1 - node, "needs") for node in range(size)]
    links += [Link(size + node, 2 * size + (node * 3) % size, "needs") for node in range(size)]
    made = arrange(layers, dict.fromkeys(range(3 * size), 26.0), links, SIZES)
    pairs = [(made.boxes[link.before].y, made.boxes[link.after].y) for link in links]
    for half in (pairs[:size], pairs[size:]):
        assert [right for _, right in sorted(half)] == sorted(right for _, right in half)
    assert all(left == right for left, right in pairs)  # and level


@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(0, 300)), max_size=30))
@example([(0.0, 0.0), (0.0, 10.0), (0.0, 10.0)])
def test_places_keep_their_distances(wanted: list[tuple[float, float]]) -> None:
    """R-140: places are in order and as far apart as is needed; who is alone gets what it wishes; the mean is kept."""
    wishes, needed = [one for one, _ in wanted], [other for _, other in wanted]
    made = spread(wishes, needed)
    assert len(made) == len(wishes)
    for place in range(1, len(made)):
        assert made[place] - made[place - 1] >= needed[place] - 1e-6
    assert math.isclose(sum(made), sum(wishes), abs_tol=1e-5 * (1 + len(made)))
    if all(other - one >= least for one, other, least in zip(wishes, wishes[1:], needed[1:], strict=False)):
        assert made == pytest.approx(wishes)


# ==================================================================== the graph of a batch

names = st.sampled_from(["work", "a" * 70, NASTY, "größe_名前", "<unknown tool>"])


@st.composite
def explanations(draw: st.DrawFn) -> Explanation:
    """Whatever an explanation may hold: groups, edges, refusals, a path, ids and times."""
    counts = draw(st.lists(st.integers(1, 6), max_size=5))
    size = sum(counts)
    numbers = iter(range(size))
    groups = [tuple(next(numbers) for _ in range(count)) for count in counts]
    of = {index: number for number, group in enumerate(groups) for index in group}
    seconds = draw(st.none() | st.floats(0, 1e6))
    calls = tuple(
        PlannedCall(
            index,
            draw(names),
            of[index],
            tuple(draw(st.lists(st.sampled_from([NASTY, "read a:{b}", "write " + "c" * 90]), max_size=5))),
            draw(st.sampled_from([{}, {"process": 1}, {"process": 2, "crm": 3, "tool:x": 1, NASTY: 1}])),
            approval=draw(st.booleans()),
            id=draw(st.sampled_from(["", "s1", NASTY, "toolu_" + "x" * 58])),
            estimate=seconds,
        )
        for index in of
    )
    refused = tuple(
        RefusedCall(
            size + number, draw(names), "rejected", draw(st.sampled_from(["unknown_tool", "dependency_cycle"])), NASTY
        )
        for number in range(draw(st.integers(0, 4)))
    )
    pick = st.integers(0, size + len(refused) - 1) if size + len(refused) else st.nothing()
    edges = set()
    pairs = st.lists(st.tuples(pick, pick, st.sampled_from(["needs", "resource", "pool"])), max_size=20)
    for one, other, kind in draw(pairs) if size + len(refused) else ():
        if one in of and other in of and of[one] < of[other]:
            edges.add(Edge(one, other, kind, f"resource {NASTY}", "write, then read"))
        elif other not in of:
            edges.add(Edge(one, other, "needs", "needs"))
    ordered = tuple(sorted(edges, key=lambda edge: (edge.before, edge.after, edge.kind)))
    return Explanation(
        calls=calls,
        groups=tuple(groups),
        edges=tuple(edge for edge in ordered if edge.after in of),
        links=ordered,
        refused=refused,
        critical_path=tuple(group[0] for group in groups),
        critical_seconds=seconds,
        members=tuple(one.index for one in refused) if not calls else (),
    )


@settings(max_examples=80, deadline=None)
@given(explanations())
def test_every_graph_is_sound(told: Explanation) -> None:
    """R-140: whatever the names, the plan and the circles: the picture is well-formed XML, stands alone, nothing is
    outside of it or overlaps, and it is the same each time.
    """
    picture = told.to_svg()
    root = parsed(picture)
    inside(root)
    assert picture == told.to_svg()
    cards = [
        tuple(float(one.attrib[name]) for name in ("x", "y", "width", "height"))
        for one in root.iter(f"{SVG}rect")
        if {"card", "bad"} & set(one.attrib.get("class", "").split()) and one.attrib.get("rx") in ("7", "5")
    ]
    for number, (x, y, width, height) in enumerate(cards):
        for left, top, wide, high in cards[number + 1 :]:
            assert x + width <= left or left + wide <= x or y + height <= top or top + high <= y


@settings(max_examples=80, deadline=None)
@given(explanations(), st.sampled_from([40, 80, 100, None]), st.booleans())
def test_every_text_keeps_its_width(told: Explanation, width: int | None, ascii_only: bool) -> None:
    """R-140: no line is wider than asked, nothing of what came from outside moves the cursor, and ASCII is ASCII."""
    text = told.text(width, ascii_only=ascii_only)
    for line in text.split("\n"):
        assert width is None or columns(line) <= width, line
        assert line == line.rstrip()
    assert not {character for character in text if character != "\n" and not character.isprintable()}
    assert text.isascii() or not ascii_only
    assert not told.calls or str(told) == told.text(None)


def plan_tower(stage: Stage, **options: Any) -> Tower:
    """A tower with tools for plans."""
    tower = stage.tower(on_excess="queue", max_concurrency=500, run_concurrency=500, **options)

    @tower.tool(independent=True)
    async def work(text: str = "") -> None:
        await stage.work("work", 2)

    @tower.tool(independent=True)
    async def quick() -> None:
        await stage.work("quick", 0.25)

    @tower.tool(reads="doc:{name}")
    async def read(name: str) -> None: ...

    @tower.tool(writes="doc:{name}")
    async def write(name: str) -> None: ...

    @tower.tool(writes="doc:{name}/{part}")
    async def write_part(name: str, part: int) -> None: ...

    @tower.tool(reads="doc:{name}/**")
    async def read_all(name: str) -> None: ...

    return tower


def step(tool: str, id: str, *needs: str, **arguments: Any) -> Call:
    return Call(tool, arguments, id=id, needs=needs)


def test_many_that_wait_for_many_meet_in_a_junction(stage: Stage) -> None:
    """R-140, G4: nine writes below a key and seven reads of all of it are joined by 16 arrows and a dot, not by 63;
    the dot says who waits for whom and why.
    """
    tower = plan_tower(stage)
    calls = [Call("write_part", {"name": "a", "part": part}) for part in range(9)]
    calls += [Call("read_all", {"name": "a"}) for _ in range(7)]
    told = tower.explain(calls)
    assert len(told.edges) == 63
    assert len(told.links) == 16
    assert {(link.before, link.after) for link in told.links} == {(one, 16) for one in range(9)} | {
        (16, one) for one in range(9, 16)
    }
    root = parsed(told.to_svg())
    inside(root)
    why = "resource doc:{name}/{part} (write doc:{name}/{part}, then read doc:{name}/**)"
    (dot,) = titles(root, "circle")
    assert dot == f"calls 9, 10, 11 and 4 more wait for calls 0, 1, 2 and 6 more: {why}".replace(
        "resource doc:{name}/{part}", "resource doc:{name}/**"
    )
    arrows = titles(root, "path")
    assert len(arrows) == 16
    assert sum(text.startswith("calls 9, 10, 11 and 4 more wait for call ") for text in arrows) == 9
    assert sum(" waits for calls 0, 1, 2 and 6 more: " in text for text in arrows) == 7
    assert "many wait for many" in words(root)
    # The path goes through the dot: one arrow in and one out of it are on it.
    assert len([one for one in root.iter(f"{SVG}path") if "critical" in one.attrib.get("class", "")]) == 2
    few = tower.explain([calls[0], *calls[9:11]])
    assert {(link.before, link.after) for link in few.links} == {(0, 1), (0, 2)}


def test_the_kinds_of_arrows_look_different(stage: Stage) -> None:
    """R-140: needs are solid, order is dashed, limits are dotted; each says why when one points at it, and the legend
    names the kinds that are there.
    """
    tower = plan_tower(stage, pools={"p": 1})
    tower.add_tool(lambda: None, name="pooled", independent=True, pools=["p"])
    told = tower.explain(
        [
            step("write", "a", name="x"),
            step("read", "b", name="x"),
            step("work", "c", "a"),
            step("pooled", "d"),
            step("pooled", "e"),
        ]
    )
    root = parsed(told.to_svg())
    arrows = {
        one.attrib["class"].split()[1]: "".join(one.itertext())
        for one in root.iter(f"{SVG}path")
        if one.attrib.get("class", "").startswith("arrow") and one.find(f"{SVG}title") is not None
    }
    assert arrows == {
        "needs": "call 2 waits for call 0: needs",
        "resource": "call 1 waits for call 0: resource doc:{name} (write, then read)",
        "pool": "call 4 waits for call 3: pool p (limit 1)",
    }
    style = root[2].text or ""
    assert "dasharray" not in style.split(".needs{")[1].split("}")[0]
    assert "stroke-dasharray:7 4" in style.split(".resource{")[1].split("}")[0]
    assert "stroke-dasharray:1 4.5" in style.split(".pool,.rate{")[1].split("}")[0]
    assert {"needs the result", "after: same resource", "waits for a place"} <= set(words(root))
    assert {"a", "b", "c", "d", "e"} <= set(words(root))  # the steps' ids
    assert "pool p" in words(root)
    assert "limits: process 500, p 1, run 500" in words(root)


def test_the_critical_path_goes_by_what_is_known(stage: Stage) -> None:
    """S6, R-141: the path with most calls is marked; once tools have run, the one that takes longest."""
    tower = plan_tower(stage)
    calls = [
        step("work", "long"),
        step("quick", "a"),
        step("quick", "b", "a"),
        step("quick", "c", "b"),
        step("read", "end", "c", "long", name="x"),
    ]
    told = tower.explain(calls)
    assert (told.critical_path, told.critical_seconds) == ((1, 2, 3, 4), None)
    assert told.calls[0].estimate is None
    stage.run(tower.execute([Call("work", {}), Call("quick", {}), Call("read", {"name": "x"})]))
    told = tower.explain(calls)
    assert (told.critical_path, told.critical_seconds) == ((0, 4), 2.0)
    assert (told.calls[0].estimate, told.calls[1].estimate) == (2.0, 0.25)
    assert "(critical path: 0, 4, about 2 s)" in str(told)
    assert "independent, about 0.25 s" in str(told)
    root = parsed(told.to_svg())
    assert "long · about 2 s" in words(root)
    (critical,) = {
        "".join(one.itertext()) for one in root.iter(f"{SVG}path") if "critical" in one.attrib.get("class", "")
    }
    assert critical == "call 4 waits for call 0: needs"
    marked = [one for one in root.iter(f"{SVG}g") if "chain" in one.find(f"{SVG}rect").attrib["class"]]  # type: ignore[union-attr]
    assert [words(one)[0] for one in marked] == ["0", "4"]


def test_a_large_plan_has_small_cards_that_tell_the_rest(stage: Stage) -> None:
    """R-140: with more calls than fit beside their details a card is one line, and pointing at it tells the rest;
    arrows of one kind from one call share their way, and pointing at that tells of them all.
    """
    tower = plan_tower(stage)
    stage.run(tower.execute([Call("quick", {})]))
    calls = [step("quick", "s0")] + [step("quick", f"s{index}", f"s{index - 1}") for index in range(1, 8)]
    calls += [step("work", f"w{index}", "s0", "s5") for index in range(9)]
    calls += [step("read", f"r{index}", "s1", name=str(index)) for index in range(60)]
    root = parsed(tower.explain(calls).to_svg())
    inside(root)
    assert "independent" not in words(root)
    assert "call 0, step s0, quick; independent; about 0.25 s; on the critical path" in titles(root, "g")
    assert "call 20, step r3, read; read doc:{name}; about 0.25 s" in titles(root, "g")
    assert "9 arrows that follow from others, not drawn." in words(root)
    many = [f"s{index}" for index in range(8)]
    wide = [step("work", one) for one in many] + [step("work", "x", *many), step("work", "y", "x")]
    wide += [step("work", f"z{index}", "y", "s0") for index in range(5)]
    shared = titles(parsed(tower.explain(wide).to_svg()), "path")
    needs = "; ".join(f"call {index} waits for call 0: needs" for index in range(10, 13))
    assert f"{needs}; and 2 more" in shared


def test_a_junction_of_one_is_none(stage: Stage) -> None:
    """R-140: where only one call of a set would run, arrows lead from it and there is no dot."""
    tower = plan_tower(stage)
    calls = [
        step("nobody", "x"),
        step("write_part", "p", "x", name="a", part=1),
        step("write_part", "q", name="a", part=2),
    ]
    told = tower.explain([*calls, *[Call("read_all", {"name": "a"})] * 3])
    assert [(link.before, link.after) for link in told.links if link.kind == "resource"] == [(2, 3), (2, 4), (2, 5)]
    assert not titles(parsed(told.to_svg()), "circle")


def test_what_would_be_spent_is_told_once(stage: Stage) -> None:
    """R-95, R-140: below the calls stand limits, rates and what would be spent; without any of them, nothing."""
    told = Explanation(calls=(PlannedCall(0, "a", 0, (), {}),), groups=((0,),), spends={"cost": 1234.5})
    assert str(told).endswith("independent\n╵\n\nwould spend: 1,234.5 cost")
    bare = Explanation(calls=(PlannedCall(0, "a", 0, (), {}),), groups=((0,),))
    assert str(bare).endswith("independent\n╵")


def test_the_path_goes_through_what_is_skipped(stage: Stage) -> None:
    """S1, R-38: a call behind a skipped one waits for what that waited for, and the path says so."""
    tower = plan_tower(stage)
    told = tower.explain(
        [
            step("write", "a", name="x"),
            step("nobody", "b"),
            step("write", "c", "b", name="x"),
            step("write", "d", name="x"),
        ]
    )
    assert [(one.index, one.code) for one in told.refused] == [(1, "unknown_tool"), (2, "dependency_failed")]
    assert told.critical_path == (0, 3)


def test_g5_a_refused_plan_shows_its_circle(stage: Stage) -> None:
    """G5, P-19: of a plan that is refused whole the calls of the circle are marked, the arrow that closes it goes back
    below the others, and the message stands there once.
    """
    tower = plan_tower(stage)
    told = tower.explain(
        [
            step("work", "a"),
            step("work", "b", "a", "e"),
            step("read", "c", "b", name="x"),
            step("work", "d", "c"),
            step("quick", "e", "d"),
            step("work", "f", "e"),
            step("nobody", "g", "g"),
        ]
    )
    assert not told.calls
    assert sorted(told.members) == [1, 2, 3, 4]
    assert told.to_dict()["members"] == list(told.members)
    root = parsed(told.to_svg())
    inside(root)
    faulty = [one for one in root.iter(f"{SVG}g") if "fault" in one.find(f"{SVG}rect").attrib["class"]]  # type: ignore[union-attr]
    assert sorted(words(one)[0] for one in faulty) == ["1", "2", "3", "4"]
    assert words(root).count("in the circle") == 4
    assert words(root).count("dependency_cycle") == 8
    assert words(root).count("the whole plan") == 1
    back = [text for text in titles(root, "path") if text.endswith("closes a circle")]
    assert back == [
        "call 1 waits for call 4: needs; this closes a circle",
        "call 6 waits for call 6: needs; this closes a circle",
    ]
    assert "&lt;unknown tool&gt;" in told.to_svg()
    assert "nobody" not in told.to_svg() + str(told)
    text = str(told)
    assert text.count("need each other in a circle") == 1
    assert "\n× 1  b  work            in the circle\n     ╰─ needs 0, 4\n" in text
    assert "\n  5  f  work\n     ╰─ needs 4\n" in text


@pytest.mark.parametrize(
    ("calls", "mark", "members"),
    [
        ([step("work", "a"), step("work", "b", "zz")], "needs a call that is not there", (1,)),
        ([step("work", "a"), step("work", "a"), step("work", "c", "a")], "shares its id", (0, 1)),
    ],
)
def test_g5_other_faults_of_a_plan_are_marked(
    stage: Stage, calls: list[Call], mark: str, members: tuple[int, ...]
) -> None:
    """G5, P-20: the calls that name an unknown one, or share an id that another call needs, are marked as such."""
    told = plan_tower(stage).explain(calls)
    assert told.members == members
    root = parsed(told.to_svg())
    assert words(root).count(mark) == str(told).count(mark) == len(members)


def test_refused_calls_of_a_plan_stand_behind_what_they_need(stage: Stage) -> None:
    """R-38, R-140: a refused call and those that need it have cards with their codes, joined by arrows."""
    tower = plan_tower(stage)
    told = tower.explain(
        [step("work", "a"), step("nobody", "b", "a"), step("work", "c", "b"), step("work", "d", "a"), Call("nix", {})]
    )
    root = parsed(told.to_svg())
    assert "call 1 waits for call 0: needs" in titles(root, "path")
    assert "call 2 waits for call 1: needs" in titles(root, "path")
    assert words(root).count("dependency_failed") == 2  # its card, and its row below
    assert words(root).count("unknown_tool") == 3  # the one that nobody needs has its row only
    assert "  ╰─ needs 1" in str(told)


@pytest.mark.parametrize("shape", ["reads and writes", "chain", "circle", "free", "refused"])
def test_p10_ten_thousand_calls_have_a_bounded_picture(stage: Stage, shape: str) -> None:
    """P-10: of 10,000 calls the picture and the text hold some hundreds, say how many they leave out, and take no
    longer than they should.
    """
    tower = plan_tower(stage)
    size = 10_000
    calls = {
        "reads and writes": [Call("read" if index % 100 else "write", {"name": "a"}) for index in range(size)],
        "chain": [step("work", f"s{index}", *([f"s{index - 1}"] if index else [])) for index in range(size)],
        "circle": [step("work", f"s{index}", f"s{(index + 1) % size}") for index in range(size)],
        "free": [Call("work", {}) for _ in range(size)],
        "refused": [Call("nobody", {}) for _ in range(size)],
    }[shape]
    told = tower.explain(calls)
    assert len(told.links) <= 3 * size
    began = time.process_time()
    picture, text = told.to_svg(), told.text(80)
    assert time.process_time() - began < 5  # it takes a fraction of a second; pairs would take minutes
    assert len(picture) < 500_000
    assert text.count("\n") < 4 * MAX_TOLD + 100
    assert "more" in text
    root = parsed(picture)
    inside(root)
    assert any(text.endswith("more, not drawn.") for text in words(root))
    assert sum(one.attrib.get("rx") in ("5", "7") for one in root.iter(f"{SVG}rect")) <= MAX_CARDS + MAX_ROWS
    assert float(root.attrib["width"]) < (MAX_COLUMNS + 1) * 240


def test_arrows_are_bounded() -> None:
    """P-10: arrows beyond what can be read are counted, not drawn, those that follow from others first."""
    calls = tuple(PlannedCall(index, "t", int(index >= 60), (), {}) for index in range(120))
    groups = (tuple(range(60)), tuple(range(60, 120)))
    edges = tuple(Edge(one, other, "needs", "needs") for one in range(60) for other in range(60, 120))
    root = parsed(Explanation(calls=calls, groups=groups, edges=edges).to_svg())
    assert f"{3600 - MAX_ARROWS:,} more arrows, not drawn." in words(root)
    chain = tuple(PlannedCall(index, "t", index, (), {}) for index in range(50))
    steps = [(index, index + 1) for index in range(49)]
    for far, told in (((0, 2),), "1 arrow that follows"), (((0, 2), (0, 3)), "2 arrows that follow"):
        edges = tuple(Edge(*pair, "needs", "needs") for pair in [*steps, *far])
        root = parsed(Explanation(calls=chain, groups=tuple((index,) for index in range(50)), edges=edges).to_svg())
        assert f"{told} from others, not drawn." in words(root)


def test_circles_are_bounded() -> None:
    """P-10: of a plan that is nothing but circles some of the arrows that lead back are drawn, the others counted."""
    refused = tuple(RefusedCall(index, "t", "rejected", "dependency_cycle", "circles") for index in range(50))
    links = tuple(Edge(index, index, "needs", "needs") for index in range(50))
    root = parsed(Explanation(refused=refused, links=links, members=(0,)).to_svg())
    inside(root)
    assert "10 more arrows, not drawn." in words(root)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.00012, "about 0.12 ms"),
        (0.04, "about 40 ms"),
        (0.25, "about 0.25 s"),
        (2, "about 2 s"),
        (1234.5, "about 1,234 s"),
    ],
)
def test_times_that_are_only_known_from_others_are_rounded(seconds: float, told: str) -> None:
    """R-140: an estimate has two figures that mean something."""
    assert about(seconds) == told


def test_g8_no_argument_value_is_drawn(stage: Stage) -> None:
    """G8: a secret in any argument, in a resource key or as the name of an unknown tool, is in no picture."""
    tower = plan_tower(stage)
    calls = [
        Call("write", {"name": SECRET}),
        Call("read", {"name": SECRET}),
        Call("write_part", {"name": SECRET, "part": SECRET}),
        Call("work", {"text": SECRET}),
        Call(SECRET, {SECRET: SECRET}),
        Call("read", f'{{"name": "{SECRET}'),
    ]
    told = tower.explain(calls)
    done = stage.run(tower.execute(calls))
    circle = tower.explain([Call(SECRET, {"a": SECRET}, id="a", needs=["a"]), Call("work", {"text": SECRET}, id="b")])
    for sink in (
        told.to_svg(),
        told.text(80),
        done.timeline_svg(),
        circle.to_svg(),
        str(circle),
        str(circle.to_dict()),
    ):
        assert SECRET not in sink
    parsed(done.timeline_svg())


# ==================================================================== the timeline of a run

times = st.none() | st.floats(0, 20) | st.sampled_from([math.nan, math.inf, -1.0, 1e300])


@st.composite
def spans(draw: st.DrawFn) -> Span:
    queued, started, ended = draw(times), draw(times), draw(times)
    sealed = draw(st.floats(0, 20) | st.sampled_from([math.nan, math.inf]))
    attempts = tuple(
        (draw(st.floats(0, 9)), draw(st.none() | st.floats(0, 9)), draw(st.floats(0, 9)))
        for _ in range(draw(st.sampled_from([0, 0, 0, 2, 3])))
    )
    return Span(
        draw(st.integers(0, 30)),
        draw(names),
        draw(st.sampled_from(get_args(Outcome))),
        draw(st.none() | st.sampled_from(["handler_error", "unknown_tool"])),
        queued,
        started,
        sealed,
        ended,
        tuple(draw(st.lists(st.sampled_from(["pool crm", NASTY, "resource " + "x" * 80]), max_size=3))),
        draw(st.booleans()),
        draw(st.none() | st.integers(0, 9)),
        draw(st.none() | st.integers(0, 10**9)),
        attempts,
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(spans(), max_size=60, unique_by=lambda span: span.index), st.integers(1, 70))
def test_every_timeline_is_sound(batch: list[Span], most: int) -> None:
    """R-133: whatever a batch did, its picture is well-formed, stands alone, nothing is outside of it, it has a row for
    each call or says for how many it has none, and it is the same each time.
    """
    picture = draw_svg(batch, max_rows=most)
    root = parsed(picture)
    inside(root)
    assert picture == draw_svg(batch, max_rows=most)
    rows = list(root.iter(f"{SVG}g"))
    assert len(rows) == min(most, len(batch))
    assert any("calls have a row" in text for text in words(root)) == (len(batch) > most)
    indexes = [int(words(row)[0]) for row in rows]
    assert indexes == sorted(indexes)


def row_of(root: ElementTree.Element, index: int) -> tuple[str, dict[str, tuple[float, float]]]:
    """What shows for a row, and its stretches as shares of the axis, by class."""
    row = next(one for one in root.iter(f"{SVG}g") if words(one)[0] == str(index))
    rule = next(one for one in root.iter(f"{SVG}path") if one.attrib.get("class") == "rule").attrib["d"]
    left, right = map(float, re.findall(r"M([\d.]+) .*H([\d.]+)", rule)[0])
    found = {}
    for rect in row.iter(f"{SVG}rect"):
        if "class" in rect.attrib:
            x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
            found[rect.attrib["class"]] = ((x - left) / (right - left), (x + width - left) / (right - left))
    for path in row.iter(f"{SVG}path"):
        ends = re.match(r"M([\d.]+) [\d.]+H([\d.]+)$", path.attrib["d"])
        if ends:
            found[path.attrib["class"]] = tuple((float(end) - left) / (right - left) for end in ends.groups())  # type: ignore[assignment]
    return next(title.text or "" for title in row.iter(f"{SVG}title")), found


def test_r133_stretches_are_apart_and_to_scale() -> None:
    """R-133, G7: held, waiting, running, resting and work after the result are stretches of their own with a pattern of
    their own, where the times say; and pointing at a row tells it in words.
    """
    batch = [
        Span(0, "mail", "ok", None, 0.5, 1.0, 2.0, None, ("call 3", "rate of tool mail")),
        Span(1, "mail", "timed_out", "handler_timeout", 0.0, 0.0, 1.0, 4.0),
        Span(2, "mail", "ok", None, 0.0, 0.0, 3.0, None, (), False, None, 7, ((0.0, 0.0, 1.0), (2.0, 2.0, 3.0))),
        Span(3, UNKNOWN_TOOL, "rejected", "unknown_tool", None, None, 0.0),
        Span(4, "mail", "ok", None, None, None, 1.0, shared_with=0),
        Span(5, "mail", "cancelled", "cancelled", 0.0, 1.0, 2.0, None, (), True),
    ]
    root = parsed(draw_svg(batch))
    told, found = row_of(root, 0)
    assert told == (
        "call 0, mail: ok; waited in the queue for 0.50 s; ran for 1.00 s; waited for call 3, rate of tool mail"
    )
    assert {name: tuple(round(end, 1) for end in ends) for name, ends in found.items()} == {
        "line": (0.0, 0.1),
        "waiting": (0.1, 0.2),
        "running": (0.2, 0.5),
    }
    assert "call 3, own rate" in words(root)
    told, found = row_of(root, 1)
    assert told == (
        "call 1, mail: handler_timeout; waited in the queue for 0.00 s; ran for 1.00 s; at work until 4.00 s"
    )
    assert found["failed"][1] == pytest.approx(0.25, abs=0.01)
    assert found["after"] == pytest.approx((0.25, 1.0), abs=0.01)
    told, found = row_of(root, 2)
    assert "; ran for 2.00 s in 2 attempts; about 7 tokens" in told
    assert found["resting"] == pytest.approx((0.25, 0.5), abs=0.01)
    assert row_of(root, 4)[0] == "call 4, mail: ok; answered by the run of call 0"
    assert row_of(root, 5)[0].endswith("; still at work")
    legend = set(words(root))
    assert {
        "held behind a call of this batch",
        "waiting in the queue",
        "running",
        "running, and it did not end ok",
        "at work after its result",
        "did not run",
        "answered by another call's run",
        "resting before another attempt",
        "no end seen",
    } <= legend
    assert [text for text in words(root) if re.fullmatch(r"0 s|\d\.?\d*", text)][:2] == ["0 s", "0.5"]
    assert words(parsed(draw_svg([]))) == ["No calls."]


def test_p10_a_timeline_of_ten_thousand_is_bounded() -> None:
    """P-10: of 10,000 calls those have a row that tell most, and above them stands how many of all did what, when."""
    batch = [
        Span(index, "search", "ok", None, 0.0, index / 1000, index / 1000 + 1, None, ("pool p",))
        for index in range(10_000)
    ]
    batch[77] = Span(77, "search", "error", "handler_error", 0.0, 0.5, 0.6)
    batch[78] = Span(78, "search", "ok", None, 0.0, 0.0, 5.0, None, (), False, None, None)
    began = time.process_time()
    picture = draw_svg(batch)
    assert time.process_time() - began < 5  # it takes a fifth of a second
    assert len(picture) < 400_000
    root = parsed(picture)
    inside(root)
    shown = [int(words(one)[0]) for one in root.iter(f"{SVG}g")]
    assert len(shown) == MOST_ROWS
    assert {77, 78, 9_999} <= set(shown)
    assert (
        "200 of 10,000 calls have a row: the first that did not end ok, and those that waited or ran longest."
        in " ".join(words(root))
    )
    assert "all calls" in words(root)
    assert "up to 10,000 calls at a time" in words(root)
    areas = [one for one in root.iter(f"{SVG}path") if one.attrib.get("class") in ("running", "waiting")]
    assert [one.attrib["class"] for one in areas] == ["running", "waiting"]
    assert len(list(parsed(draw_svg(batch[:60])).iter(f"{SVG}g"))) == 60
    assert "all calls" in words(parsed(draw_svg([Span(index, "a", "ok", None, 0.0, 0.0, 0.0) for index in range(50)])))


# ==================================================================== the pictures of the documentation


@pytest.fixture(scope="module")
def drawer() -> ModuleType:
    """tools/pictures.py"""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_of_the_docs_are_those_that_are_made(drawer: ModuleType) -> None:
    """R-140, R-133: the pictures on the pages are what the code draws now."""
    for name, draw in drawer.PICTURES.items():
        kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert kept == draw(), f"docs/{name}: run `make pictures`"
        inside(parsed(kept))


def test_the_command_writes_and_checks(
    drawer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make pictures` writes what is missing or old, and `--check` only says so."""
    monkeypatch.setattr(drawer, "DOCS", tmp_path)
    assert drawer.main(["--check"]) == 1
    assert not list(tmp_path.iterdir())
    assert drawer.main([]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(drawer.PICTURES)
    (tmp_path / "timeline.svg").write_text("old")
    capsys.readouterr()
    assert drawer.main(["--check"]) == 1
    assert "timeline.svg: not as they would be drawn" in capsys.readouterr().err
    assert drawer.main([]) == 0
    assert drawer.main(["--check"]) == 0


# ==================================================================== on the command line


def test_g8_to_dict_stays_json(stage: Stage) -> None:
    """R-140: ids and estimates are plain data, too."""
    told = plan_tower(stage).explain([step("work", "x" * 200), step("work", "b", "x" * 200)])
    assert [one["id"] for one in json.loads(json.dumps(told.to_dict()))["calls"]] == ["x" * 64, "b"]


TOOLS = '''
from pathlib import Path

from towerman import Tower

tower = Tower()


@tower.tool(writes="file:{path}")
def write(path: str) -> str:
    """Write a file."""
    Path("ran").touch()
    return "written"
'''


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of tools and a batch, as the current folder."""
    (tmp_path / "pictured_tools.py").write_text(TOOLS)
    (tmp_path / "calls.json").write_text(
        json.dumps([{"id": name, "tool": "write", "arguments": {"path": SECRET}} for name in "ab"])
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("pictured_tools", None)


RUN = ["run", "calls.json", "--tools", "pictured_tools:tower", "--timeline"]


def test_r133_a_run_leaves_its_timeline(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-133, G8: `towerman run --timeline OUT.svg` draws what ran; stdout is what it is without."""
    assert main([*RUN, "out.svg"]) == 0
    assert [(one["id"], one["outcome"]) for one in json.loads(capsys.readouterr().out)] == [("a", "ok"), ("b", "ok")]
    picture = (desk / "out.svg").read_text(encoding="utf-8")
    assert words(parsed(picture))[0].startswith("2 calls in ")
    assert "call 0" in words(parsed(picture))  # what the second one waited for
    assert SECRET not in picture


def test_a_timeline_that_cannot_be_written_stops_before_anything_runs(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R-133: a missing folder is one line and exit code 2, and no tool has run."""
    assert main([*RUN, "no/out.svg"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "towerman: --timeline no/out.svg: cannot be written: No such file or directory\n")
    assert main(["demo", "--timeline", "no/out.svg"]) == 2
    assert "--timeline no/out.svg: cannot be written" in capsys.readouterr().err
    assert not (desk / "ran").exists()


def test_a_picture_is_kept_until_there_is_another(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-133: where nothing ran, a file that was there is as it was, and none is made."""
    (desk / "out.svg").write_text("kept")
    for name in ("out.svg", "new.svg"):
        assert main(["run", "absent.json", "--tools", "pictured_tools:tower", "--timeline", name]) == 2
    assert (desk / "out.svg").read_text() == "kept"
    assert not (desk / "new.svg").exists()
    assert "absent.json: there is no such file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_no_result(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-133, G1: where the picture cannot be written any more, the results are there, and one line says so."""
    assert main([*RUN, "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 2
    assert err == (
        "towerman: --timeline /dev/full: cannot be written: No space left on device; the results are complete\n"
    )
    assert main(["explain", "calls.json", "--tools", "pictured_tools:tower", "--graph", "/dev/full"]) == 2
    assert "--graph /dev/full: cannot be written: No space left on device" in capsys.readouterr().err
