"""The drawing of one batch, and the way from events to a drawing."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from towerman.timeline import LEAST_WIDTH, Story, columns, draw, fit, printable, stories
from towerman.trace import UNKNOWN_TOOL, Event, Span

DESK = [
    Span(0, "read_customer", "ok", None, 0.0, 0.0, 0.25),
    Span(1, "list_orders", "ok", None, 0.0, 0.25, 0.5, None, ("pool crm",)),
    Span(2, "update_ticket", "ok", None, 0.25, 0.25, 0.75, None, ("resource ticket:{ticket_id}",)),
    Span(3, "track_parcel", "timed_out", "handler_timeout", 0.0, 0.0, 0.5, 1.0),
    Span(4, UNKNOWN_TOOL, "rejected", "unknown_tool", None, None, 0.0),
    Span(5, "refund_order", "rejected", "wait_timeout", 0.0, None, 0.5, None, ("pool crm",)),
    Span(6, "mail", "timed_out", "handler_timeout", 0.0, 0.5, 0.75, None, (), True),
]


def rows_of(drawing: str) -> list[str]:
    """The lines of the calls: those below the ruler, up to the next empty one."""
    lines = drawing.split("\n")
    below = next(place for place, line in enumerate(lines) if line.lstrip().startswith(("┬", "+"))) + 1
    return [line for line in lines[below : lines.index("", below)] if not line.startswith("...")]


def bars(drawing: str) -> dict[int, str]:
    """The bar of each row of a drawing, by the call's index (from the ruler's first to its last column)."""
    lines = drawing.split("\n")
    ruler = next(line for line in lines if line.lstrip().startswith(("┬", "+")))
    start = len(ruler) - len(ruler.lstrip())
    return {int(line.split()[0]): line[start : len(ruler)].ljust(len(ruler) - start) for line in rows_of(drawing)}


def share(bar: str, sign: str) -> float:
    return bar.count(sign) / len(bar)


def test_r133_each_row_has_index_tool_code_and_a_wait_and_run_split() -> None:
    """R-133: parallel traces stay readable: each call's row has its emitted index and waiting and running apart."""
    drawing = draw(DESK, width=120)
    rows = [line.split() for line in rows_of(drawing)]
    assert [(row[0], row[1]) for row in rows[:4]] == [
        ("0", "read_customer"),
        ("1", "list_orders"),
        ("2", "update_ticket"),
        ("3", "track_parcel"),
    ]
    assert rows[1][2] == "ok"
    assert rows[3][2] == "handler_timeout"
    assert rows[1][-2:] == ["pool", "crm"]
    assert rows[2][-1] == "ticket:{ticket_id}"
    bar = bars(drawing)
    assert bar[0].strip() == bar[0].rstrip()
    assert set(bar[0].strip()) == {"█"}
    assert share(bar[0], "█") == pytest.approx(0.25, abs=0.03)
    assert share(bar[1], "░") == pytest.approx(0.25, abs=0.03)
    assert share(bar[1], "█") == pytest.approx(0.25, abs=0.03)
    assert bar[1].index("░") == 0
    assert bar[1].index("█") > bar[1].rindex("░")


def test_held_waiting_running_and_later_work_look_different() -> None:
    """A call held behind its own batch, one in the queue, one at work and one at work after its result differ."""
    bar = bars(draw(DESK, width=120))
    assert share(bar[2], "·") == pytest.approx(0.25, abs=0.03)
    assert share(bar[2], "█") == pytest.approx(0.5, abs=0.03)
    assert share(bar[3], "▒") == pytest.approx(0.5, abs=0.05)
    assert bar[3].startswith("█")
    assert bar[3].endswith("▒")
    assert bar[6].endswith("→")
    assert "▒" in bar[6]


def test_refused_calls_are_crosses_at_the_moment_of_the_refusal() -> None:
    """A call that was refused before the queue is one cross; one that waited in vain shows its waiting first."""
    bar = bars(draw(DESK, width=120))
    assert bar[4].rstrip() == "×"
    assert bar[5].rstrip().endswith("×")
    assert share(bar[5], "░") == pytest.approx(0.5, abs=0.03)


def test_head_says_how_many_how_long_and_how_they_ended() -> None:
    """The first line counts the calls, the time to the last result, and the outcomes."""
    head = draw(DESK, width=120).split("\n")[0]
    assert head == "7 calls in 0.75 s: 3 ok, 2 rejected, 2 timed_out; 1 still at work"
    assert draw(DESK[:1]).split("\n")[0] == "1 call in 250 ms: 1 ok"


def test_seconds_are_written_in_the_unit_of_the_whole() -> None:
    """Waiting and running are told in one unit per drawing: seconds, milliseconds or microseconds."""
    row = rows_of(draw(DESK, width=120))[1]
    assert row.split()[-4:-2] == ["0.25", "0.25"]
    assert "in ms" in draw([Span(0, "t", "ok", None, 0.0, 0.002, 0.0215)])
    assert "in µs" in draw([Span(0, "t", "ok", None, 0.0, 0.0, 0.0004)])
    assert "in us" in draw([Span(0, "t", "ok", None, 0.0, 0.0, 0.0004)], ascii_only=True)
    assert "120.0" in draw([Span(0, "t", "ok", None, 0.0, 0.0, 120.0)])
    assert "7200" in draw([Span(0, "t", "ok", None, 0.0, 0.0, 7200.0)])


def test_scale_has_round_steps_that_fit() -> None:
    """The axis is labelled in steps of 1, 2 or 5 times a power of ten, each over its own mark."""
    lines = draw(DESK, width=120).split("\n")
    labels, ruler = lines[2], lines[3]
    marks = [place for place, sign in enumerate(ruler) if sign == "┬"]
    assert labels[marks[0] :].startswith("0 s")
    assert [labels[mark:].split()[0] for mark in marks[1:6]] == ["0.1", "0.2", "0.3", "0.4", "0.5"]
    assert all(labels[mark - 1] == " " for mark in marks[1:])
    for longest in (0.00002, 0.0037, 0.9, 1.0, 7.0, 33.0, 250.0, 86_400.0):
        labels, ruler = draw([Span(0, "t", "ok", None, 0.0, 0.0, longest)], width=90).split("\n")[2:4]
        marks = [place for place, sign in enumerate(ruler) if sign == "┬"]
        numbers = [float(labels[mark:].split()[0]) for mark in marks[:-1]]
        assert len(numbers) >= 3
        step = numbers[1]
        assert numbers == pytest.approx([step * number for number in range(len(numbers))])
        assert f"{step:e}"[0] in "125"


def test_legend_names_the_signs_in_use_and_no_others() -> None:
    """The legend explains what is on the picture, so that it can be read without a manual."""
    calm = draw(DESK[:1]).split("\n")[-1]
    assert "█ running" in calm
    assert "░" not in calm
    full = draw(DESK, width=120)
    for text in (
        "· held behind a call of this batch",
        "░ waiting in the queue",
        "▒ at work after its result",
        "× did not run",
    ):
        assert text in full


def test_no_calls_is_said() -> None:
    """An empty batch has a drawing too."""
    assert draw([]) == "no calls"


def test_rows_stand_in_emitted_order() -> None:
    """R-133: the rows follow the emitted index, whatever order the spans are given in."""
    assert list(bars(draw(list(reversed(DESK))))) == [0, 1, 2, 3, 4, 5, 6]


def test_many_calls_are_cut_with_a_note() -> None:
    """Of 10,000 calls the first rows are drawn, the rest is counted, and the axis covers all of them."""
    spans = [Span(index, "t", "ok" if index % 2 else "error", None, 0.0, 0.0, 1.0) for index in range(9_999)]
    spans.append(Span(9_999, "late", "ok", None, 0.0, 1.0, 2.0))
    drawing = draw(spans, width=80, max_rows=10)
    assert drawing.startswith("10,000 calls in 2.00 s: 5,000 ok, 5,000 error")
    assert "... and 9,990 more: 4,995 ok, 4,995 error" in drawing
    assert list(bars(drawing)) == list(range(10))
    assert share(bars(drawing)[0], "█") == pytest.approx(0.5, abs=0.03)
    assert len(draw(spans).split("\n")) < 220


def test_zero_durations_are_drawn_at_the_start() -> None:
    """Calls that took no time at all have one column, and nothing is divided by zero."""
    drawing = draw([Span(0, "t", "ok", None, 0.0, 0.0, 0.0), Span(1, "t", "rejected", "queue_full", 0.0, None, 0.0)])
    assert bars(drawing)[0].rstrip() == "█"
    assert bars(drawing)[1].rstrip() == "×"
    assert drawing.startswith("2 calls in 0 µs")


def test_a_call_without_a_result_is_told_as_that() -> None:
    """A call whose end was never seen runs to the edge of the picture and has no result."""
    spans = [
        Span(0, "t", "pending", None, 0.0, 0.5, 1.0, None, (), True),
        Span(1, "t", "pending", None, 0.0, None, 1.0, None, (), True),
        Span(2, "t", "pending", "approval_missing", None, None, 0.0),
    ]
    drawing = draw(spans, width=100)
    assert drawing.startswith("3 calls in 1.00 s: 1 pending, 2 without a result")
    assert "still at work" not in drawing
    assert drawing.count("no result") == 2
    assert bars(drawing)[0].endswith("█→")
    assert bars(drawing)[1].endswith("░→")
    assert "approval_missing" in drawing


def test_narrow_drawings_leave_out_seconds_then_blockers_then_codes() -> None:
    """At every width the bars remain; what is left out goes in a fixed order."""
    assert "pool crm" in draw(DESK, width=72)
    assert " wait " in draw(DESK, width=72)
    assert "pool crm" in draw(DESK, width=60)
    assert " wait " not in draw(DESK, width=60)
    assert "pool crm" not in draw(DESK, width=44)
    assert "unknown_tool" in draw(DESK, width=44)
    assert "unknown_tool" not in draw(DESK, width=30)
    assert "█" in draw(DESK, width=30)
    assert draw(DESK, width=-5) == draw(DESK, width=LEAST_WIDTH)


def test_plain_ascii_has_no_other_character() -> None:
    """A terminal without Unicode gets the same picture in ASCII."""
    spans = [*DESK, Span(7, "日本語", "ok", None, 0.0, 0.1, 0.2)]
    drawing = draw(spans, width=64, ascii_only=True)
    assert drawing.isascii()
    assert "\\u65e5" in drawing
    bar = bars(draw(DESK, width=120, ascii_only=True))
    assert "-" in bar[1]
    assert "#" in bar[1]
    assert "." in bar[2]
    assert "=" in bar[3]
    assert bar[4][0] == "x"
    assert bar[6].endswith(">")


def test_colors_change_nothing_but_the_colors() -> None:
    """Without its ANSI sequences a coloured drawing is the plain one."""
    import re

    colored = draw(DESK, width=90, color=True)
    assert "\x1b[32m" in colored
    assert "\x1b[31m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == draw(DESK, width=90)
    assert "\x1b" not in draw(DESK, width=90)


def test_names_cannot_drive_the_terminal() -> None:
    """Control, direction and other invisible characters of a name are written as numbers."""
    wicked = "a\x1b[2J\nb\u202ec\u2028\x7f\ud800\ufe0f"
    drawing = draw([Span(0, wicked, "ok", None, 0.0, 0.0, 1.0, None, ("resource \x1b[31m",))], width=200)
    assert r"a\x1b[2J\nb".replace(r"\n", r"\x0a") in drawing
    assert "\\u202e" in drawing
    assert not any(character in drawing for character in "\x1b\u202e\u2028\x7f\ud800\ufe0f")
    assert len(drawing.split("\n")) == len(draw([Span(0, "a", "ok", None, 0.0, 0.0, 1.0)]).split("\n"))


def test_wide_characters_keep_the_columns_straight() -> None:
    """A name of wide characters takes two columns each, and the bars stay under each other."""
    drawing = draw(
        [Span(0, "日本語ツール", "ok", None, 0.0, 0.0, 1.0), Span(1, "tool", "ok", None, 0.0, 0.0, 1.0)], width=60
    )
    first, second = rows_of(drawing)
    assert columns(first[: first.index("█")]) == columns(second[: second.index("█")])


def test_fit_cuts_and_fills_to_the_column() -> None:
    """A text is exactly as wide as asked, also where a wide character does not fit any more."""
    assert fit("abc", 5) == "abc  "
    assert fit("abc", 5, right=True) == "  abc"
    assert fit("abcdef", 4) == "abc…"
    assert fit("abcdef", 4, ascii_only=True) == "abc~"
    assert fit("abc", 0) == ""
    assert fit("日本語", 4) == "日… "
    assert fit("e\u0301a", 2) == "e\u0301a"


def test_printable_keeps_what_can_be_shown() -> None:
    """Ordinary text of any language stays; only what a terminal would obey, or cannot show, is escaped."""
    assert printable("plain text") == "plain text"
    assert printable("Ærø 日本 é") == "Ærø 日本 é"
    assert printable("Ærø", ascii_only=True) == "\\xc6r\\xf8"
    assert printable("\U000e0101\U0001f600", ascii_only=True) == "\\U000e0101\\U0001f600"


_times = st.one_of(st.just(0.0), st.floats(0, 2), st.floats(allow_nan=True, allow_infinity=True))
_spans = st.builds(
    Span,
    index=st.integers(0, 10_000),
    tool=st.text(max_size=40),
    outcome=st.sampled_from(["ok", "error", "rejected", "skipped", "cancelled", "timed_out", "pending"]),
    code=st.sampled_from([None, "handler_error", "unresolved_placeholder"]),
    queued=st.none() | _times,
    started=st.none() | _times,
    sealed=_times,
    ended=st.none() | _times,
    waited_for=st.lists(st.text(max_size=30), max_size=3).map(tuple),
    still_running=st.booleans(),
)


@settings(max_examples=150)
@given(st.lists(_spans, max_size=8), st.integers(-3, 200), st.booleans())
@example([Span(0, "t", "ok", None, 0.0, 1e308, 1e308)], 80, False)
@example([Span(0, "t", "ok", None, 5e-324, 5e-324, 5e-324)], 80, False)
@example([Span(0, "t", "ok", None, -1.0, math.nan, math.inf)], 80, True)
def test_every_line_fits_and_is_clean_whatever_comes(spans: list[Span], width: int, ascii_only: bool) -> None:
    """No line is wider than asked, no row is missing, and no character of a name drives the terminal."""
    drawing = draw(spans, width=width, ascii_only=ascii_only)
    lines = drawing.split("\n")
    assert all(columns(line) <= max(width, LEAST_WIDTH) for line in lines)
    obeyed = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not [character for character in drawing if character != "\n" and unicodedata.category(character) in obeyed]
    assert drawing.isascii() or not ascii_only
    if spans:
        assert len(rows_of(drawing)) == len(spans)


# From events to stories.


def _event(time: float, kind: str, index: int | None = None, **fields: object) -> Event:
    return Event(time, kind, "r", 1, index, **fields)  # type: ignore[arg-type]


def test_r131_events_become_the_same_spans() -> None:
    """R-131: admission, waiting, refusal and effect are told apart by the events, and the timeline shows them."""
    events = [
        _event(10.0, "batch_started", size=4, wall=1_700_000_000.0),
        _event(10.0, "admitted", 0, tool="read", waited=0.0),
        _event(10.0, "started", 0, tool="read", waited=0.0),
        _event(10.0, "waiting", 1, tool="list", waiting_for="pool crm"),
        _event(10.1, "rejected", 2, tool=UNKNOWN_TOOL, code="unknown_tool"),
        _event(10.1, "finished", 2, tool=UNKNOWN_TOOL, outcome="rejected", code="unknown_tool", waited=0.0),
        _event(10.25, "finished", 0, tool="read", outcome="ok", waited=0.0, ran=0.25),
        _event(10.25, "admitted", 1, tool="list", waited=0.25),
        _event(10.25, "started", 1, tool="list", waited=0.25),
        _event(10.5, "orphaned", 1, tool="list"),
        _event(10.5, "finished", 1, tool="list", outcome="timed_out", code="handler_timeout", waited_for=("pool crm",)),
        _event(10.5, "started", 3, tool="late"),
        _event(10.75, "finished", 3, tool="late", outcome="ok", waited=0.0),
        _event(10.75, "batch_finished"),
        _event(11.0, "ended", 1, tool="list"),
    ]
    (story,) = stories(events)
    assert (story.run_id, story.batch, story.wall, story.calls, story.finished) == ("r", 1, 1_700_000_000.0, 4, True)
    assert list(story.spans) == [
        Span(0, "read", "ok", None, 0.0, 0.0, 0.25),
        Span(1, "list", "timed_out", "handler_timeout", 0.0, 0.25, 0.5, 1.0, ("pool crm",), False),
        Span(2, UNKNOWN_TOOL, "rejected", "unknown_tool", None, None, pytest.approx(0.1)),
        Span(3, "late", "ok", None, 0.5, 0.5, 0.75),
    ]


def test_stories_of_several_batches_are_told_apart() -> None:
    """Batches may be mixed in one file, and a run id that comes again begins another batch."""
    first = Event(1.0, "batch_started", "a", 1, size=1)
    other = Event(1.5, "batch_started", "b", 1, size=1)
    events = [
        first,
        other,
        Event(2.0, "finished", "a", 1, 0, None, "t", "ok", waited=0.0),
        Event(2.5, "finished", "b", 1, 0, None, "u", "error", "handler_error", waited=0.0),
        Event(9.0, "batch_started", "a", 1, size=2),
        Event(9.5, "finished", "a", 1, 1, None, "v", "ok", waited=0.0),
    ]
    told = stories(events)
    assert [(story.run_id, [span.tool for span in story.spans]) for story in told] == [
        ("a", ["t"]),
        ("b", ["u"]),
        ("a", ["v"]),
    ]
    assert told[2].calls == 2
    assert told[0].spans[0].sealed == 1.0


def test_a_story_without_its_end_has_calls_without_results() -> None:
    """A file that was cut off shows what was going on when it was."""
    (story,) = stories(
        [
            _event(5.0, "batch_started", size=3),
            _event(5.0, "started", 0, tool="a"),
            _event(5.5, "waiting", 1, tool="b", waiting_for="pool crm"),
            _event(5.6, "waiting", 1, tool="b", waiting_for="pool crm"),
            _event(5.7, "waiting", 1, tool="b", waiting_for="resource x"),
            _event(6.0, "rejected", 2, tool="c", code="queue_full"),
        ]
    )
    assert not story.finished
    assert story.spans == (
        Span(0, "a", "pending", None, 0.0, 0.0, 1.0, None, (), True),
        Span(1, "b", "pending", None, 0.5, None, 1.0, None, ("pool crm", "resource x"), True),
        Span(2, "c", "rejected", "queue_full", None, None, 1.0),
    )
    assert "2 without a result" in draw(story.spans)


def test_a_story_without_its_beginning_is_told_from_what_is_there() -> None:
    """A file that was cut at the front still gives its calls."""
    (story,) = stories([_event(3.0, "started", 7, tool="a"), _event(4.0, "finished", 7, outcome="ok", waited=0.5)])
    assert story == Story("r", 1, None, 1, (Span(7, "a", "ok", None, 0.0, 0.0, 1.0),), False)


def test_a_call_refused_after_waiting_shows_how_long() -> None:
    """The queue time that the gate counted is what is drawn, also for a call that never started."""
    (story,) = stories(
        [
            _event(0.0, "batch_started", size=1),
            _event(2.0, "finished", 0, tool="a", outcome="rejected", code="wait_timeout", waited=1.5),
            _event(2.0, "late_result", 0, tool="a"),
            _event(2.0, "promoted"),
        ]
    )
    assert story.spans == (Span(0, "a", "rejected", "wait_timeout", 0.5, None, 2.0),)


def test_r133_a_blank_gives_way_before_a_word() -> None:
    """R-133: at 100 columns long codes and what was waited for stand there whole; where all fits, two blanks stand
    between columns. What a call waited for of its own tool is told without the tool's name, of another's with it.
    """
    late = ("rate of tool track_parcel",)
    spans = [
        Span(10, "track_parcel", "ok", None, 0.0, 1.1, 1.7, None, late, tokens=6),
        Span(11, UNKNOWN_TOOL, "rejected", "invalid_arguments", None, None, 0.0, tokens=120),
        Span(12, "translate", "rejected", "budget_exhausted", None, None, 0.0, None, ("budget of run (cost)",)),
        Span(13, "track_parcel", "ok", None, 0.0, 1.1, 1.7, None, ("limit of tool track_parcel", "pool p")),
        Span(14, "other", "ok", None, 0.0, 1.1, 1.7, None, ("limit of tool a",)),
    ]
    drawing = draw(spans, width=100)
    assert "…" not in drawing
    for words in ("invalid_arguments", "budget of run (cost)", "own rate", "own limit, pool p", "limit of tool a"):
        assert words in drawing
    assert max(map(len, drawing.split("\n"))) <= 100
    assert min(map(len, bars(drawing).values())) >= 24
    assert drawing.split("\n")[2].startswith(" # tool           status ")
    assert draw(spans, width=120).split("\n")[2].startswith(" #  tool            status ")
    assert "own rate" in draw(spans[:1], width=70)
