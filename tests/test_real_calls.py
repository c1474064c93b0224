"""Batches that people wrote for stateful tools, run against those tools: BFCL's own file system, shop, car, tickets.

Theory. The reference is the plainest program there is: the calls of a turn one by one, in the order in which they were
written. A run under Towerman must leave every backend in the same state after every turn and give every call the same
result, however long each call takes. And it must not buy that by running one call at a time: each call starts at
the very instant at which the last one that it has to wait for is over.

A backend that answers in one step would forgive nearly every fault of order. So the ones here are as slow as real ones:
a call that writes takes the backend's state as it is when it starts, works on that, and puts it back when it ends; one
that reads looks somewhere in between, and what it found is written down only at its end. Two calls that overlap where
they must not lose an update or see half of one.

House rules. What a tool declares is written here by hand, from the source of the backends, and looked after by a test
of its own. Which calls conflict is said by those tables and by one line, not by the rooms under test.

Not here: how the backends are had (bfcl.py), provider formats as such (forms.py, test_real_batches.py).
"""

from __future__ import annotations

import ast
import asyncio
import copy
import functools
import inspect
import json
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from bfcl import Backends, NoIndex, backends, fetch, pip_install
from conftest import load_shared
from forms import FORMS, paired, schema_of
from kit import Stage, on_stage, sound

from towerman import Context, Tower

stage = pytest.fixture(on_stage)

ROWS = "bfcl_multi_turn_base"
TIMINGS = 20
CHUNKS = 9

# --- what the tools touch ---------------------------------------------------------------------------------------------

# Each class keeps its state to itself and is one resource; what is in neither table below writes it. Some that look
# like reads do: `get_flight_cost` remembers what it answered, and `get_current_speed` and the temperature draw from
# the instance's own random numbers.
READS = {
    "GorillaFileSystem": "pwd ls cat find wc sort grep du tail diff",
    "MathAPI": "",
    "MessageAPI": "list_users get_user_id message_get_login_status view_messages_sent search_messages"
    " get_message_stats",
    "TicketAPI": "get_ticket ticket_get_login_status get_user_tickets",
    "TradingBot": "get_stock_info get_order_details get_account_info trading_get_login_status get_watchlist"
    " get_order_history get_transaction_history filter_stocks_by_price notify_price_change",
    "TravelAPI": "travel_get_login_status get_credit_card_balance retrieve_invoice get_booking_history"
    " verify_traveler_information contact_customer_support get_all_credit_cards",
    "TwitterAPI": "posting_get_login_status list_all_following get_tweet get_user_tweets search_tweets"
    " get_tweet_comments get_user_stats",
    "VehicleControlAPI": "displayCarStatus check_tire_pressure estimate_drive_feasibility_by_mileage",
}

# Answers that follow from the arguments alone.
INDEPENDENT = {
    "GorillaFileSystem": "",
    "MathAPI": "mean standard_deviation si_unit_conversion imperial_si_conversion add subtract multiply divide power"
    " absolute_value round_number percentage min_value max_value sum_values",
    "MessageAPI": "",
    "TicketAPI": "",
    "TradingBot": "get_current_time get_symbol_by_name get_available_stocks",
    "TravelAPI": "get_budget_fiscal_year list_all_airports compute_exchange_rate get_nearest_airport_by_city",
    "TwitterAPI": "",
    "VehicleControlAPI": "get_outside_temperature_from_weather_com display_log liter_to_gallon gallon_to_liter"
    " estimate_distance get_zipcode_based_on_city find_nearest_tire_shop",
}

# Both set the precision of a whole library before they reckon; how many digits a logarithm shows is that library's too.
PRECISION = {"logarithm": "precision:mpmath", "square_root": "precision:decimal"}

DOCS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}


@dataclass(frozen=True)
class Method:
    """A tool: a method of a backend, and what it touches."""

    owner: str
    name: str

    @property
    def access(self) -> str:
        """`independent`, `reads` or `writes`."""
        if self.name in INDEPENDENT[self.owner].split():
            return "independent"
        return "reads" if self.name in READS[self.owner].split() else "writes"

    @property
    def resource(self) -> str:
        """The one thing that it reads or writes."""
        return PRECISION.get(self.name, f"backend:{self.owner}")

    @property
    def options(self) -> dict[str, Any]:
        """As a tool declares it."""
        return {"independent": True} if self.access == "independent" else {self.access: self.resource}

    def conflicts(self, other: Method) -> bool:
        """Must the later of the two wait for the earlier?"""
        access = {self.access, other.access}
        return self.resource == other.resource and "independent" not in access and "writes" in access


@dataclass(frozen=True)
class Asked:
    """A call as a row has it.

    Attributes:
        fits: the published schema of the tool takes these arguments. Where it does not, the call is refused.
    """

    method: Method
    arguments: Mapping[str, Any]
    fits: bool

    def waits_for(self, earlier: Asked) -> bool:
        """Must it wait for that call of its own turn?"""
        return self.fits and earlier.fits and self.method.conflicts(earlier.method)


def methods_of(known: Backends, owner: str) -> dict[str, Method]:
    """The tools of a class, by name."""
    found = inspect.getmembers(known.type(owner), predicate=inspect.isfunction)
    return {name: Method(owner, name) for name, _ in found if not name.startswith("_")}


@functools.cache
def schemas(owner: str) -> dict[str, Any]:
    """The published schemas of a class's tools, by name."""
    records = load_shared(f"bfcl_multi_turn_func_doc/{DOCS[owner]}.json")
    return {str(record["name"]): record for record in records}


def read_call(text: str, tools: Mapping[str, Method], known: Backends) -> Asked:
    """A call that stands there as Python text; its arguments by name. Nothing of the text is run."""
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call), text
    assert isinstance(node.func, ast.Name), text
    method = tools[node.func.id]
    signature = inspect.signature(getattr(known.type(method.owner), method.name))
    given = signature.bind(
        None,
        *[ast.literal_eval(value) for value in node.args],
        **{str(one.arg): ast.literal_eval(one.value) for one in node.keywords},
    ).arguments
    del given["self"]
    schema = schema_of(schemas(method.owner)[method.name]["parameters"])
    return Asked(method, given, fits=jsonschema_rs.is_valid(schema, given))


def free_pair(turn: Sequence[Asked]) -> bool:
    """Has the turn two calls of which neither waits for the other, nor for one that does?"""
    made = [asked for asked in turn if asked.fits]
    behind: list[set[int]] = []
    for place, asked in enumerate(made):
        waits = {before for before in range(place) if asked.waits_for(made[before])}
        behind.append(waits.union(*(behind[before] for before in waits)))
    return any(len(waits) < place for place, waits in enumerate(behind))


# --- one row, one by one ----------------------------------------------------------------------------------------------


def fresh(known: Backends, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's backends as the conversation finds them."""
    config = row["initial_config"]
    return {name: known.make(name, copy.deepcopy(config.get(name, {}))) for name in row["involved_classes"]}


def written(value: object) -> str:
    """A result as BFCL writes it down."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except TypeError:
            pass
    return str(value)


def inside(value: Any) -> Any:
    """All that a backend keeps, what BFCL does not compare included: random numbers, folders, the caches."""
    match type(value).__name__:
        case "Random":
            return value.getstate()
        case "File":
            return value.name, value.content
        case "Directory":
            return value.name, {name: inside(item) for name, item in value.contents.items()}
        case "GorillaFileSystem":
            return inside(value.root), value.pwd()
        case "dict" | "list" | "set" | "tuple" | "str" | "int" | "float" | "bool" | "NoneType":
            return copy.deepcopy(value)
    return {name: inside(part) for name, part in vars(value).items()}


@dataclass
class Reference:
    """What one row comes to, call by call; no text of a call that does not fit its tool."""

    row: Mapping[str, Any]
    tools: dict[str, Method] = field(default_factory=dict)
    turns: list[list[Asked]] = field(default_factory=list)
    texts: list[list[str | None]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    insides: list[dict[str, Any]] = field(default_factory=list)


def one_by_one(
    known: Backends, row: Mapping[str, Any], look: Callable[[Asked, Mapping[str, Any]], None] | None = None
) -> Reference:
    """Run a row's calls in plain Python, in order.

    Args:
        known: where backends come from.
        row: the conversation.
        look: sees each call after it was made, and the backends.
    """
    found = Reference(row)
    for owner in row["involved_classes"]:
        tools = methods_of(known, owner)
        assert not tools.keys() & found.tools.keys(), "two backends have a tool of one name"
        found.tools |= tools
    state = fresh(known, row)
    for turn in row["ground_truth"]:
        calls = [read_call(text, found.tools, known) for text in turn]
        texts: list[str | None] = []
        for asked in calls:
            if not asked.fits:
                texts.append(None)
                continue
            handler = getattr(state[asked.method.owner], asked.method.name)
            texts.append(written(handler(**copy.deepcopy(dict(asked.arguments)))))
            if look is not None:
                look(asked, state)
        found.turns.append(calls)
        found.texts.append(texts)
        found.states.append(copy.deepcopy(state))
        found.insides.append({name: inside(backend) for name, backend in state.items()})
    return found


# --- the same under a tower -------------------------------------------------------------------------------------------


class World:
    """The backends of one row as slow services, and when each call of the turn came on and went off."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.state: dict[str, Any] = {}
        self.chance = random.Random(0)
        self.came: dict[str, float] = {}
        self.went: dict[str, float] = {}
        self.inside = 0
        self.peak = 0

    def begin(self, state: dict[str, Any], seed: str) -> None:
        """A new conversation, with timings of its own."""
        self.state = state
        self.chance = random.Random(seed)

    def turn(self) -> None:
        """Before another turn."""
        self.came.clear()
        self.went.clear()
        self.peak = 0

    def tool(self, method: Method) -> Callable[..., Any]:
        """The handler of one tool."""

        async def handler(ctx: Context[None], **arguments: Any) -> str:
            self.inside += 1
            self.peak = max(self.peak, self.inside)
            self.came[ctx.call_id] = self.stage.clock.value
            writes = method.access == "writes"
            seen = self.state[method.owner]
            if writes:
                seen = copy.deepcopy(seen)
            try:
                await asyncio.sleep(self.chance.uniform(0.1, 3))
                value = getattr(seen, method.name)(**arguments)
                await asyncio.sleep(self.chance.uniform(0.1, 3))
                return written(value)
            finally:
                if writes:
                    self.state[method.owner] = seen
                self.went[ctx.call_id] = self.stage.clock.value
                self.inside -= 1

        return handler


def declare(stage: Stage, tools: Mapping[str, Method]) -> tuple[Tower, World]:
    """A tower with the row's tools, as published, and what each of them touches."""
    tower = stage.tower(run_concurrency=32)
    world = World(stage)
    for method in tools.values():
        record = schemas(method.owner)[method.name]
        tower.add_tool(
            world.tool(method),
            name=method.name,
            description=record["description"],
            schema=schema_of(record["parameters"]),
            **method.options,
        )
    return tower, world


def due(turn: Sequence[Asked], place: int, went: Mapping[str, float], ids: Sequence[str], began: float) -> float:
    """When a call can start: once every earlier call that it conflicts with is over."""
    return max([began, *(went[ids[before]] for before in range(place) if turn[place].waits_for(turn[before]))])


def chunk(number: int) -> list[dict[str, Any]]:
    """One part of the rows, spread evenly."""
    return load_shared(ROWS)[number::CHUNKS]


@pytest.mark.parametrize("number", range(CHUNKS))
def test_g4_r24_r104_real_turns_come_to_what_they_come_to_one_by_one(number: int, stage: Stage) -> None:
    """G4, G1, R-24, R-104, R-105: every turn of published conversations, as one batch against the published backends
    with twenty random timings each: the state after each turn and the result of each call are those of the calls
    made one by one, one result a call in emitted order. And each call starts as soon as the last earlier one that
    touches the same is over, so calls that do not conflict overlap.
    """
    rows, known = chunk(number), backends()
    overlapped = together = 0
    for row in rows:
        reference = one_by_one(known, row)
        tower, world = declare(stage, reference.tools)
        for timing in range(TIMINGS):
            form = list(FORMS)[timing % len(FORMS)]
            world.begin(fresh(known, row), f"{row['id']} {timing}")

            async def main(
                reference: Reference = reference, tower: Tower = tower, world: World = world, form: str = form
            ) -> int:
                peaks = 0
                async with tower.run() as run:
                    for place, turn in enumerate(reference.turns):
                        told = f"{reference.row['id']}, turn {place}, {form}"
                        ids = [f"t{place}c{index}" for index in range(len(turn))]
                        calls = [(asked.method.name, dict(asked.arguments)) for asked in turn]
                        world.turn()
                        began = stage.clock.value
                        batch = await run.execute(FORMS[form](calls, ids) if calls else [])
                        sound(batch, calls)
                        codes = [None if asked.fits else "invalid_arguments" for asked in turn]
                        assert [result.code for result in batch] == codes, told
                        assert [result.value for result in batch] == reference.texts[place], told
                        if calls:
                            contents = [result.content for result in batch]
                            answers = [(*call, content) for call, content in zip(calls, contents, strict=True)]
                            assert paired(batch.turn(), form) == answers, told
                            for asked, text, content in zip(turn, reference.texts[place], contents, strict=True):
                                assert not asked.fits or content == text, told
                        assert known.differences(world.state, reference.states[place]) == {}, told
                        found = {name: inside(backend) for name, backend in world.state.items()}
                        assert found == reference.insides[place], told
                        assert set(world.came) == {own for own, asked in zip(ids, turn, strict=True) if asked.fits}
                        for index, own in enumerate(ids):
                            if own in world.came:
                                expected = due(turn, index, world.went, ids, began)
                                assert world.came[own] == expected, f"{told}: {calls[index]}"
                        assert (world.peak > 1) == free_pair(turn), told
                        peaks += world.peak > 1
                return peaks

            overlapped += stage.run(main())
        together += sum(map(free_pair, reference.turns))
    assert overlapped == together * TIMINGS


def of_itself(method: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """The attributes of `self` that a method names, and those that it assigns to, or to a part of."""

    def attribute(node: ast.AST) -> str | None:
        while isinstance(node, ast.Subscript):
            node = node.value
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        return node.attr if own else None

    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))))
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)]
    return {found for node in nodes if (found := attribute(node))}, {
        found for node in stored if (found := attribute(node))
    }


def test_the_declarations_of_the_real_tools_are_true() -> None:
    """What the tools above declare is so: every published tool is in the tables under the right name, a call that does
    not write changes nothing at all of any backend, and one that writes changes its own backend only.
    """
    rows, known = load_shared(ROWS), backends()
    for owner in DOCS:
        tools = methods_of(known, owner)
        assert set(tools) == set(schemas(owner)), owner
        reads, pure = READS[owner].split(), INDEPENDENT[owner].split()
        assert len({*reads, *pure}) == len(reads) + len(pure), f"{owner}: a tool stands there twice"
        assert set(tools) >= {*reads, *pure}, owner
        for name in (*pure, *reads):
            kept, changed = of_itself(getattr(known.type(owner), name))
            assert not changed, f"{owner}.{name} changes {changed}"
            assert "_random" not in kept, f"{owner}.{name} draws a random number"
            assert name in reads or kept <= {"long_context"}, f"{owner}.{name} looks at {kept}"

    def look(asked: Asked, state: Mapping[str, Any]) -> None:
        nonlocal before, wrote, looked
        after = {name: inside(backend) for name, backend in state.items()}
        changed = {name for name in after if after[name] != before[name]}
        allowed = {asked.method.owner} if asked.method.access == "writes" else set()
        assert changed <= allowed, f"{asked.method} changed {changed}"
        wrote += bool(changed)
        looked += not changed
        before = after

    wrote = looked = 0
    for row in rows:
        before = {name: inside(backend) for name, backend in fresh(known, row).items()}
        one_by_one(known, row, look)
    assert wrote >= 100
    assert looked >= 80


def test_the_real_turns_have_what_is_tested_on_them() -> None:
    """There are conversations, turns of several calls, calls that must wait and calls that must not: nothing above
    passes for want of them.
    """
    rows, known = load_shared(ROWS), backends()
    turns = [turn for row in rows for turn in one_by_one(known, row).turns]
    several = [turn for turn in turns if len(turn) > 1]
    waiting = [
        turn
        for turn in several
        if any(one.method.conflicts(two.method) for place, one in enumerate(turn) for two in turn[place + 1 :])
    ]
    refused = [asked for turn in turns for asked in turn if not asked.fits]
    assert len(turns) >= 170
    assert sum(map(len, turns)) >= 260
    assert len(refused) <= 1, f"published calls that do not fit the published tools: {refused}"
    assert len(several) >= 60
    assert len(waiting) >= 45
    assert sum(map(free_pair, turns)) >= 20


# --- the cache of the backends ----------------------------------------------------------------------------------------


def test_the_backends_are_fetched_once_whoever_asks(tmp_path: Path) -> None:
    """Many ask at once for a cache that is not there: one of them makes it, and nobody sees half of it."""
    folder = tmp_path / "deep" / "cache"
    made: list[Path] = []

    def install(half: Path) -> None:
        made.append(half)
        (half / "first").touch()
        assert not folder.exists(), "a cache was there before it was whole"
        (half / "last").touch()

    def ask(_: int) -> list[str]:
        return sorted(part.name for part in fetch(folder, install).iterdir())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(32))) == [["first", "last"]] * 32
    assert len(made) == 1


def test_a_cache_that_was_not_finished_is_made_anew(tmp_path: Path) -> None:
    """What a failed or killed fetch left behind is never taken for a cache, and is gone when the next one is made."""
    folder = tmp_path / "cache"

    def fails(half: Path) -> None:
        (half / "rubbish").touch()
        raise NoIndex("nobody answers")

    for _ in range(2):
        with pytest.raises(NoIndex, match="nobody answers"):
            fetch(folder, fails)
        assert not folder.exists()
    assert [part.name for part in fetch(folder, lambda half: (half / "good").touch()).iterdir()] == ["good"]


def test_without_a_package_index_the_backends_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pip may ask no index, it is told that there are none, which skips the tests and does not fail them."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(NoIndex, match=r"bfcl-eval|pip"):
        fetch(tmp_path / "cache", pip_install)
