"""The built-in support desk: its tools alone, and its batch in three forms through a tower."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from test_cli import on_a_terminal, towerman

from towerman import BatchResult, ToolError, adapters
from towerman.cli import main
from towerman.desk import CALLS, FORMS, Desk, check, make_world, open_tower, promise
from towerman.desk.tools import MOST_SPENT, PRICE
from towerman.desk.world import DATABASE, DRAFT, FILES
from towerman.timeline import stories
from towerman.trace import Event, Span

REPLY = (
    "Hello,\n\nThe shelf was charged twice, and that was our mistake.\n"
    "42.00 EUR are on their way back to you.\n\nYour support desk\n"
)  # fmt: skip


def run_batch(desk: Desk, form: str, **options: object) -> BatchResult:
    """The demo's batch in one form, through the desk's tower."""

    async def work() -> BatchResult:
        async with open_tower(desk, **options) as tower, tower.run("demo", approver=desk.shift_lead) as run:  # type: ignore[arg-type]
            return await run.execute(FORMS[form]())

    return asyncio.run(work())


def ticket(folder: Path, number: int) -> tuple[str, str]:
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        row: tuple[str, str] = database.execute(
            "SELECT status, priority FROM tickets WHERE id = ?", (number,)
        ).fetchone()
    return row


# The tools alone.


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A desk that answers at once."""
    return Desk(tmp_path, pace=0)


def test_s15_the_tools_are_plain_functions(desk: Desk, tmp_path: Path) -> None:
    """S15: called directly, the desk's tools do their work on the database and the files, with no tower at all."""
    assert asyncio.run(desk.read_customer(1042)) == {
        "id": 1042,
        "name": "Harbour Books",
        "city": "Aarhus",
        "plan": "business",
    }
    assert [order["id"] for order in asyncio.run(desk.list_orders(1017))] == [5007, 5009]
    assert asyncio.run(desk.list_orders(1)) == []
    assert asyncio.run(desk.track_parcel(5007)) == "at the depot in Bergen"
    assert [(line["file"], line["line"]) for line in desk.search_help("REFUND")] == [
        ("help/refunds.md", 1),
        ("help/refunds.md", 3),
        ("help/shipping.md", 4),
    ]
    assert desk.update_ticket(8, priority="high") == "ticket 8: status new, priority high"
    assert desk.read_ticket(8)["priority"] == "high"
    assert desk.edit_file("help/accounts.md", "at any time", "once a month") == "1 passage replaced"
    assert "once a month" in desk.read_file("help/accounts.md")
    assert desk.refund_order(5005) == "paid back"
    with pytest.raises(ToolError, match="refunded cannot be paid back"):
        desk.refund_order(5005)
    assert asyncio.run(desk.translate("Good morning", "nl")) == "goedemorgen"
    for text, language in (("good evening", "nl"), ("good morning", "la")):
        with pytest.raises(ToolError, match="phrase book"):
            asyncio.run(desk.translate(text, language))
    assert desk.spent == PRICE  # only what was translated is paid for


@pytest.mark.parametrize("path", ["/etc/passwd", "../desk.db", "help/../../desk.db", "help", "no.md", ""])
def test_file_tools_stay_on_the_desk(path: str, desk: Desk) -> None:
    """A path that leads off the desk, or nowhere, is refused in words that help, and nothing is read or written."""
    with pytest.raises(ToolError, match="desk") as caught:
        desk.read_file(path)
    assert caught.value.applied == "no"
    with pytest.raises(ToolError, match="desk"):
        desk.edit_file(path, "a", "b")


def test_a_link_does_not_lead_off_the_desk(desk: Desk, tmp_path: Path) -> None:
    """A symbolic link to something outside is outside."""
    (tmp_path / FILES / "link.md").symlink_to(tmp_path / DATABASE)
    with pytest.raises(ToolError, match="below the desk"):
        desk.read_file("link.md")


@pytest.mark.parametrize("passage", ["e", "nowhere in it", ""])
def test_an_edit_is_exact_or_not_at_all(passage: str, desk: Desk) -> None:
    """A passage that is not there exactly once changes nothing."""
    before = desk.read_file(DRAFT)
    with pytest.raises(ToolError, match="exactly once"):
        desk.edit_file(DRAFT, passage, "x")
    assert desk.read_file(DRAFT) == before


@pytest.mark.parametrize("tool", ["read_customer", "track_parcel", "read_ticket", "update_ticket", "refund_order"])
def test_numbers_that_nobody_has_are_told(tool: str, desk: Desk) -> None:
    """A number that the database does not have is an error in the tool's own words."""

    async def ask() -> None:
        found = getattr(desk, tool)(1)
        await found

    with pytest.raises(ToolError, match="there is no such"):
        asyncio.run(ask())


def test_p13_the_desk_loses_updates_when_nobody_keeps_them_apart(tmp_path: Path) -> None:
    """P-13: the tools read, think and write back; two updates at once lose one, so the demo shows something real."""
    desk = Desk(tmp_path, pace=0.5)

    async def both() -> None:
        await asyncio.gather(
            asyncio.to_thread(desk.update_ticket, 7, status="open"),
            asyncio.to_thread(desk.update_ticket, 7, priority="high"),
        )

    asyncio.run(both())
    assert ticket(tmp_path, 7) in (("open", "normal"), ("new", "high"))


def test_the_world_is_made_in_an_existing_folder_only(tmp_path: Path) -> None:
    """A folder that is not there is an error, not a surprise."""
    with pytest.raises((OSError, sqlite3.Error)):
        make_world(tmp_path / "absent")


# The batch.


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, BatchResult]]:
    """The batch in each form, each on a fresh desk that answers at once."""
    done = {}
    for form in FORMS:
        folder = tmp_path_factory.mktemp(form)
        done[form] = (folder, run_batch(Desk(folder, pace=0), form))
    return done


def test_the_batch_is_what_the_demo_says_it_is() -> None:
    """At least ten calls: two updates of one ticket, two edits of one file, broken JSON, four that want the CRM."""
    tools = [tool for tool, *_ in CALLS]
    assert len(CALLS) >= 10
    assert sum(tool in ("read_customer", "list_orders") for tool in tools) == 4
    updates = [arguments for tool, arguments, *_ in CALLS if tool == "update_ticket" and isinstance(arguments, dict)]
    assert updates == [{"ticket_id": 7, "status": "open"}, {"ticket_id": 7, "priority": "high"}]
    assert tools.count("edit_file") == 2
    broken = [arguments for _, arguments, *_ in CALLS if isinstance(arguments, str)]
    assert len(broken) == 1
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken[0])
    message = FORMS["openai"]()
    assert isinstance(message, dict)
    assert all(isinstance(call["function"]["arguments"], str) and call["id"] for call in message["tool_calls"])
    blocks = FORMS["anthropic"]()
    assert isinstance(blocks, dict)
    assert [type(block["input"]) for block in blocks["content"]].count(str) == 1


@pytest.mark.parametrize("form", list(FORMS))
def test_g1_every_call_ends_as_promised(form: str, answered: dict[str, tuple[Path, BatchResult]]) -> None:
    """G1: one result per call, in emitted order, each with the outcome that the demo promises."""
    _, batch = answered[form]
    assert [(result.tool, result.outcome, result.code) for result in batch] == promise()
    assert [result.index for result in batch] == list(range(len(CALLS)))


@pytest.mark.parametrize("form", list(FORMS))
def test_r19_r20_both_updates_and_both_edits_survive(form: str, answered: dict[str, tuple[Path, BatchResult]]) -> None:
    """R-19, R-20, G4: the ticket has both fields, the file both edits, and the reads saw them."""
    folder, batch = answered[form]
    assert ticket(folder, 7) == ("open", "high")
    assert ticket(folder, 8) == ("new", "normal")
    assert (folder / FILES / DRAFT).read_text(encoding="utf-8") == REPLY
    assert batch[10].value == REPLY
    assert isinstance(batch[7].value, dict)
    assert (batch[7].value["status"], batch[7].value["priority"]) == ("open", "high")


def test_r115_the_three_forms_end_in_the_same_outcomes_and_contents(
    answered: dict[str, tuple[Path, BatchResult]],
) -> None:
    """R-115: the same calls in another form have the same outcomes, the same contents and the same messages."""
    told = {
        form: [(result.call_id, result.outcome, result.code, result.content, result.message) for result in batch]
        for form, (_, batch) in answered.items()
    }
    assert told["openai"] == told["anthropic"] == told["towerman"]
    for form, (_, batch) in answered.items():
        for other, (_, same) in answered.items():
            assert batch.messages(other) == same.messages(other), (form, other)


def test_the_messages_pair_with_the_calls(answered: dict[str, tuple[Path, BatchResult]]) -> None:
    """R-105: each form's messages name each call once, in order."""
    ids = [f"call_{number:02d}" for number in range(1, len(CALLS) + 1)]
    assert [message["tool_call_id"] for message in answered["openai"][1].messages()] == ids
    (message,) = answered["anthropic"][1].messages()
    assert isinstance(message["content"], list)
    assert [block["tool_use_id"] for block in message["content"]] == ids
    assert [message["id"] for message in answered["towerman"][1].messages()] == ids


def test_p74_the_near_miss_is_named(answered: dict[str, tuple[Path, BatchResult]]) -> None:
    """P-74: the unknown tool's answer names the tool that was meant."""
    assert "read_customer" in answered["openai"][1][13].message


def test_the_pool_of_two_makes_two_of_four_wait(tmp_path: Path) -> None:
    """R-07, R-73: of the four calls that want the CRM two wait for `pool crm`, and the CRM sees two at a time."""
    events: list[Event] = []
    desk = Desk(tmp_path, pace=0.2)
    batch = run_batch(desk, "openai", observers=[events.append])
    assert desk.crm_peak == 2
    assert [index for index in range(4) if "pool crm" in batch[index].waited_for] == [2, 3]
    assert any(event.kind == "waiting" and event.waiting_for == "pool crm" for event in events)
    assert batch[6].waited_for == ("call 5",)
    drawing = batch.timeline()
    assert "pool crm" in drawing
    assert "call 5" in drawing
    kept, broken = check(desk, batch)
    assert (len(kept), broken) == (9, [])


def test_p40_the_rate_makes_one_of_three_wait(tmp_path: Path) -> None:
    """P-40, R-92: of three questions to the carrier one waits for the rate; the carrier, who notes when it is asked,
    never gets more than two in its second; the wait is in the events, the results and the drawing.
    """
    events: list[Event] = []
    desk = Desk(tmp_path, pace=0.3)
    batch = run_batch(desk, "towerman", observers=[events.append])
    late = "rate of tool track_parcel"
    assert [result.index for result in batch if late in result.waited_for] == [16]
    assert [event.index for event in events if event.kind == "waiting" and event.waiting_for == late] == [16]
    assert "own rate" in batch.timeline()
    times = sorted(desk.carrier_asked)
    assert len(times) == 3
    assert times[2] - times[0] >= desk.second == 0.3
    assert "the carrier never got more than 2 requests in a second" in check(desk, batch)[0]


def test_r95_two_of_three_translations_are_within_the_budget(tmp_path: Path) -> None:
    """R-95: of 0.05 a translation takes 0.02: the third never reaches the translator, nothing else is
    kept back, and the model is told why; another run has a budget of its own.
    """
    desk = Desk(tmp_path, pace=0)

    async def work() -> tuple[BatchResult, BatchResult, float]:
        async with open_tower(desk) as tower:
            async with tower.run("demo", approver=desk.shift_lead) as run:
                first = await run.execute(FORMS["openai"]())
                left = run.remaining["cost"]
            async with tower.run("another") as run:
                call = {"id": "a", "tool": "translate", "arguments": {"text": "good morning", "language": "da"}}
                return first, await run.execute([call]), left

    first, second, left = asyncio.run(work())
    assert [result.code for result in first if result.tool == "translate"] == [None, None, "budget_exhausted"]
    assert first[21].waited_for == ("budget of run (cost)",)
    assert (first.exhausted, first.notice) == (False, first[21].message)
    assert (left, desk.spent) == ((MOST_SPENT - 2 * PRICE) / 100, 3 * PRICE)
    assert 2 * PRICE <= MOST_SPENT < 3 * PRICE
    assert second.ok


def test_r70_the_shift_lead_decides_on_each_refund(tmp_path: Path) -> None:
    """R-70, R-125: each refund waits for the shift lead, who is asked once about each and takes one question at a time;
    what is approved runs, and may fail; what is denied never runs, and the model is told why.
    """
    events: list[Event] = []
    desk = Desk(tmp_path, pace=0.2)
    batch = run_batch(desk, "anthropic", observers=[events.append])
    assert desk.asked == ["call_13", "call_18", "call_19"]
    assert [event.index for event in events if event.kind == "approval_asked"] == [12, 17, 18]
    decided = [(event.index, event.decision) for event in events if event.kind == "approval_decided"]
    assert decided == [(12, "approved"), (17, "approved"), (18, "denied")]
    assert [batch[index].waited_for for index in (12, 17, 18)] == [("approval",)] * 3
    assert "above 50.00 EUR" in batch[18].message
    assert 18 not in [event.index for event in events if event.kind == "started"]
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        states = dict(database.execute("SELECT id, state FROM orders").fetchall())
    assert states == {5004: "paid", 5005: "refunded", 5007: "paid", 5009: "unpaid"}


def test_the_shift_lead_denies_an_order_that_nobody_has(desk: Desk) -> None:
    """A refund of an order that is not there is denied, in words that help, and the handler never runs."""

    async def work() -> BatchResult:
        async with open_tower(desk) as tower, tower.run(approver=desk.shift_lead) as run:
            return await run.execute([{"id": "a", "tool": "refund_order", "arguments": {"order_id": 1}}])

    (result,) = asyncio.run(work())
    assert (result.outcome, result.code) == ("rejected", "approval_denied")
    assert "no such order" in result.message


def test_r131_the_events_tell_the_same_story_as_the_results(tmp_path: Path) -> None:
    """R-131: a timeline drawn of the recorded events shows what the one of the results shows."""
    events: list[Event] = []
    batch = run_batch(Desk(tmp_path, pace=0.1), "anthropic", observers=[events.append])
    (story,) = stories(events)
    assert (story.run_id, story.batch, story.calls, story.finished) == ("demo", 1, len(CALLS), True)

    def outline(span: Span) -> tuple[object, ...]:
        never = span.queued is None, span.started is None
        return span.index, span.tool, span.outcome, span.code, never, span.waited_for, span.still_running

    assert [outline(span) for span in story.spans] == [outline(span) for span in batch.spans()]
    for span in story.spans:
        assert 0 <= (span.queued or 0) <= (span.started or span.sealed) <= span.sealed


def test_check_tells_what_is_not_as_promised(tmp_path: Path) -> None:
    """The demo's own check fails when the world is not what was promised: nothing about it is taken on trust."""
    desk = Desk(tmp_path, pace=0)
    batch = run_batch(desk, "towerman")
    assert check(desk, batch)[1] == []
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("UPDATE tickets SET priority = 'normal'")
        database.execute("UPDATE orders SET state = 'refunded'")
        database.commit()
    (tmp_path / FILES / DRAFT).write_text("nothing of it")
    desk.crm_peak = 3
    desk.carrier_asked[2] = desk.carrier_asked[0] + desk.second - 0.001
    desk.spent = 6
    kept, broken = check(desk, batch[:3])
    assert kept == []
    assert len(broken) == 9 + len(CALLS) - 3
    assert "call 14 (update_ticket) ends rejected invalid_arguments" in broken


# The command.


@pytest.mark.parametrize("form", list(FORMS))
def test_demo_json_is_the_messages_and_nothing_else(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`towerman demo --json` prints the provider's messages as JSON on stdout, and exits 0 when all is as promised."""
    assert main(["demo", "--json", "--format", form]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    messages = json.loads(out)
    if form == "anthropic":
        assert [block["type"] for block in messages[0]["content"]] == ["tool_result"] * len(CALLS)
        assert sum(bool(block.get("is_error")) for block in messages[0]["content"]) == 5
    else:
        assert len(messages) == len(CALLS)


def test_demo_leaves_nothing_behind_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the demo writes lives in a temporary folder that is removed; with --keep it stays where one wants it."""
    import tempfile

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--json", "--keep", "kept/here"]) == 0
    assert ticket(tmp_path / "kept" / "here", 7) == ("open", "high")
    assert main(["demo", "--json"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "temporary"]
    assert list((tmp_path / "temporary").iterdir()) == []
    capsys.readouterr()
    assert main(["demo", "--keep", "kept/here"]) == 2
    assert capsys.readouterr() == (
        "",
        "towerman: --keep kept/here: the folder is not empty; give a new or an empty one\n",
    )
    (tmp_path / "file").write_text("")
    assert main(["demo", "--keep", "file"]) == 2
    assert capsys.readouterr().err == "towerman: --keep file: cannot be made: File exists\n"


def test_demo_exits_1_when_something_is_not_as_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 only when the outcomes are exactly those that the demo promises."""
    monkeypatch.setattr("towerman.desk.check", lambda desk, results: (["this"], ["that"]))
    assert main(["demo", "--json"]) == 1
    assert capsys.readouterr().err == "towerman: not as promised: that\n"
    assert main(["demo"]) == 1
    assert "not as promised: that" in capsys.readouterr().out


def test_demo_without_a_terminal_is_plain_text(tmp_path: Path) -> None:
    """Piped into a file or another program, the demo prints the timeline and the results, without colours."""
    done = towerman("demo", "--trace", "demo.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert "\x1b" not in text
    assert "22 calls in " in text
    assert "17 ok, 1 error, 4 rejected" in text
    assert "both updates of ticket 7 are in the database" in text
    assert max(map(len, text.splitlines())) <= 80
    again = towerman("trace", "demo.jsonl", cwd=tmp_path)
    assert again.returncode == 0
    assert "17 ok, 1 error, 4 rejected" in again.stdout.decode()


def test_demo_on_a_terminal_shows_live_then_timeline_then_results(tmp_path: Path) -> None:
    """A person sees a live table (running, waiting and for what, done), then the timeline, then the results."""
    code, screen = on_a_terminal("demo", cwd=tmp_path)
    assert code == 0
    live, _, rest = screen.partition("22 calls in ")
    for word in (
        "running",
        "waiting",
        "pool crm",
        "rate of tool track_parcel",
        "a person's approval",
        "budget_exhausted",
        "done",
        "of 22 calls",
        "read_customers",
    ):
        assert word in live
    places = [rest.index(text) for text in ("17 ok, 1 error", "░", "what the model is told", "What came of it")]
    assert places == sorted(places)
    assert "Traceback" not in screen


def test_formats_of_the_demo_are_those_of_the_adapters() -> None:
    """Every format that the adapters know has its form of the batch."""
    assert tuple(FORMS) == adapters.FORMATS
