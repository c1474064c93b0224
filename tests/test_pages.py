"""Pages: a content that is too large, told in part and read on page by page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towerman.bounds import MIN_BYTES, Hint, Keep, Large, encode, recut
from towerman.bounds.jsontext import dumps
from towerman.pages import (
    LEAST_ROOM,
    Content,
    Index,
    Page,
    Told,
    Unreadable,
    again,
    begun,
    index_of,
    is_handle,
    new_handle,
    page_of,
    page_room,
    summary_room,
    summed_up,
)
from towerman.pages.page import NOTE_BYTES, place_of
from towerman.pages.telling import hint_for

HANDLE = new_handle(b"key", 1)
SECRET = "zqxjkvbpwm"


def content_of(index: Index, *, document: bool = True, room: int = 100, **more: Any) -> Content:
    """A content of this index."""
    given = {"original_bytes": 1, "incomplete": False, "run_id": "run", "tool": "tool", "tenant": None, "kept_at": 1.0}
    return Content.of(index, document=document, room=room, **{**given, **more})


def pages_of(text: str, room: int, *, document: bool = True) -> list[Page]:
    """All pages of a text."""
    content = content_of(index_of(text, room, document=document), document=document, room=room)
    body = content.body or b""
    return [
        page_of(content, lambda first, size: body[first : first + size], number + 1, HANDLE)
        for number in range(len(content.stretches))
    ]


def put_together(pages: list[Page]) -> Any:
    """The whole, out of what its pages hold: lists and strings joined at their places, objects filled in."""
    whole: Any = None

    def at(value: Any, path: tuple[str | int, ...]) -> Any:
        for step in path:
            value = value[step]
        return value

    def nested(page: Page) -> Any:
        """What is at the page's own place on it: there, every list on the way has one entry."""
        value = page.data
        for step in page.path:
            value = value[0] if isinstance(step, int) else value[step]
        return value

    def grown(value: Any, data: Any, path: tuple[str | int, ...], page: Page) -> Any:
        if not path:
            piece = nested(page)
            if value is None:
                assert page.first == 0
                return piece
            if isinstance(piece, dict):
                assert not piece.keys() & value.keys()
                return {**value, **piece}
            assert len(value) == page.first, "a gap, or a repeat"
            return value + piece
        step = path[0]
        if isinstance(step, int):
            value = [] if value is None else value
            assert len(data) == 1
            if len(value) == step:
                return [*value, grown(None, data[0], path[1:], page)]
            assert len(value) == step + 1
            return [*value[:-1], grown(value[-1], data[0], path[1:], page)]
        value = {} if value is None else dict(value)
        for key in data:
            if key != step:
                assert value.setdefault(key, data[key]) == data[key], "what stands beside it is the same on each page"
        value[step] = grown(value.get(step), data[step], path[1:], page)
        return value

    for page in pages:
        whole = grown(whole, page.data, page.path, page)
    return whole


texts = st.text(st.characters(codec="utf-8"), max_size=60)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), texts, st.text('\\"\n\x00é😀ab', max_size=80)),
    lambda inner: st.one_of(st.lists(inner, max_size=12), st.dictionaries(st.text(max_size=8), inner, max_size=8)),
    max_leaves=60,
)


# ==================================================================== splitting


@given(value=values, room=st.integers(LEAST_ROOM, 400))
@example(value={"items": [{"id": n} for n in range(100)], "next": "c2", "total": 100}, room=80)
@example(value=["x" * 500, "y", "\\" * 300, "\n" * 90, "é" * 200, "😀" * 99], room=LEAST_ROOM)
@example(value={"a": {"b": [[1] * 40, [2] * 40]}, "c": "d"}, room=60)
@example(value={"k" * 90: [1, 2, 3] * 30}, room=40)
@example(value=[10**11] * 3 + [int("1" * 100)], room=30)
@example(value={"": "", "a": "x" * 200, "b": "y" * 200}, room=50)
def test_r112_all_pages_together_are_the_whole(value: Any, room: int) -> None:
    """R-112, P-56: whatever a value is and however small its pages, put together they are the whole, without a gap and
    without a repeat; each is valid JSON and none is larger than its room.
    """
    text = dumps(value)
    index = index_of(text, room, document=True)
    pages = pages_of(text, room)
    whole = put_together(pages)
    assert (whole if index.text is text else json.loads(whole)) == value
    assert len(pages) == pages[0].pages
    for number, page in enumerate(pages, 1):
        assert page.number == number
        assert page.next == (number + 1 if number < len(pages) else None)
        assert len(dumps(page.data).encode()) <= room
        told = json.loads(page.content)
        assert told["result"] == page.data
        assert len(page.content.encode()) <= room + NOTE_BYTES
        assert page.count > 0 or not page.data
        assert 0 <= page.first <= page.first + page.count <= page.total


@given(text=st.text(st.characters(codec="utf-8"), min_size=1), room=st.integers(LEAST_ROOM, 60))
@example(text="é" * 100 + "\n" + "x" * 100 + "\n\n", room=30)
@example(text="a\r\nb\n" * 50, room=LEAST_ROOM)
def test_r112_pages_of_text_are_the_text(text: str, room: int) -> None:
    """R-112: pages of a text, one after another, are the text; they end at ends of lines where they can."""
    pages = pages_of(text, room, document=False)
    assert "".join(str(page.data) for page in pages) == text
    lines = text.split("\n")
    total = len(lines) - (lines[-1] == "")
    for page in pages:
        data = str(page.data)
        assert 0 < len(data.encode()) <= room
        assert page.unit == "lines"
        assert page.total == total
        assert page.content.endswith("\n" + data)
        assert page.first + page.count <= total
        if page.next is not None and not data.endswith("\n"):
            assert "\n" not in data, "it could have ended at the end of a line"
        assert (lines[page.first] + "\n").find(data.split("\n")[0]) >= 0


def test_p56_what_stands_beside_the_rows_is_on_every_page() -> None:
    """P-56: next-page data of the value's own is kept on every page, inside nested objects too."""
    value = {"data": {"items": [{"n": n} for n in range(300)], "next": "c2", "total": 300}, "took": 5}
    pages = pages_of(dumps(value), 200)
    assert len(pages) > 10
    rows = []
    for page in pages:
        data: Any = page.data
        assert (data["data"]["next"], data["data"]["total"], data["took"]) == ("c2", 300, 5)
        assert page.path == ("data", "items")
        assert (page.unit, page.total) == ("items", 300)
        assert page.first == len(rows)
        rows += data["data"]["items"]
    assert rows == value["data"]["items"]


def test_what_does_not_fit_a_page_is_split_in_turn() -> None:
    """R-112: a row larger than a page has pages of its own, between those of its neighbours."""
    value = [1, 2, {"id": 7, "text": "line\n" * 100, "rows": [3] * 5}, 4]
    pages = pages_of(dumps(value), 120)
    assert [page.path for page in pages[:1] + pages[-1:]] == [(), ()]
    assert {page.path for page in pages[1:-1]} == {(2, "text")}
    assert all(str(page.data[0]["text"]).endswith("\n") for page in pages[1:-1])  # type: ignore[index]
    assert put_together(pages) == value
    wide = {f"key {n}": n for n in range(100)}
    pages = pages_of(dumps(wide), 120)
    assert {page.unit for page in pages} == {"keys"}
    assert put_together(pages) == wide


def test_what_cannot_be_split_is_paged_as_the_text_that_it_is() -> None:
    """R-112: a key or a number longer than a page: pages are strings, which together are the document."""
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    for value in ({"k" * 100: 1}, [10**100], {"a": [1] * 50, "b" * 60: [2] * 50}, deep):
        text = dumps(value)
        pages = pages_of(text, 50)
        assert all(type(page.data) is str for page in pages)
        assert json.loads(put_together(pages)) == value


def test_what_fits_is_one_page() -> None:
    """A document within the room has one page, with nothing behind it."""
    (page,) = pages_of('{"a":[1,2]}', 100)
    assert (page.number, page.pages, page.next, page.data) == (1, 1, None, {"a": [1, 2]})


def test_r115_equal_texts_have_equal_pages() -> None:
    """R-115: the same text and room give the same pages, to the byte."""
    text = dumps([{"n": n, "é": "ü" * n} for n in range(50)])
    assert index_of(text, 90, document=True) == index_of(text, 90, document=True)


# ==================================================================== as it is kept


@given(value=values, room=st.integers(LEAST_ROOM, 200), incomplete=st.booleans())
def test_a_content_survives_being_kept(value: Any, room: int, incomplete: bool) -> None:
    """R-112: what was kept as bytes gives the same pages, by reading slices only."""
    content = content_of(index_of(dumps(value), room, document=True), room=room, incomplete=incomplete, tenant="t")
    body, kept = content.body or b"", content.to_bytes()
    found, start = Content.from_bytes(lambda first, size: kept[first : first + size])
    assert found.body is None
    assert (found.tenant, found.incomplete, found.room, found.size) == ("t", incomplete, room, len(body))
    for number in range(1, len(content.stretches) + 1):
        again = page_of(found, lambda first, size: kept[start + first : start + first + size], number, HANDLE)
        assert again == page_of(content, lambda first, size: body[first : first + size], number, HANDLE)


def test_a_large_head_is_read_in_a_second_step() -> None:
    """R-112: thousands of pages make a head that no first read holds."""
    content = content_of(index_of("x\n" * 40_000, LEAST_ROOM, document=False), document=False)
    kept = content.to_bytes()
    reads: list[int] = []

    def read(first: int, size: int) -> bytes:
        reads.append(size)
        return kept[first : first + size]

    found, start = Content.from_bytes(read)
    assert len(reads) == 2
    assert found.stretches == content.stretches
    assert kept[start:] == content.body


@pytest.mark.parametrize(
    "kept",
    [
        b"",
        b"0000000002{}",
        b"0000000003[2]",
        b"rubbish of some length",
        b'0000000003"a"',
        b"0000000001[",
        b"00000000050000",
    ],
)
def test_what_is_no_content_is_told_apart(kept: bytes) -> None:
    """Whatever stands in a file, it is a content or Unreadable."""
    with pytest.raises(Unreadable):
        Content.from_bytes(lambda first, size: kept[first : first + size])
    newer = b'[2,1,1,1,1,"r","t",null,1,1,[],[]]'
    with pytest.raises(Unreadable):
        Content.from_bytes(lambda first, size: (b"%010d" % len(newer) + newer)[first : first + size])


@pytest.mark.parametrize(
    ("body", "document", "text"),
    [('{"a": [1,  2]}', True, '{"a":[1,2]}'), ("{no json", False, "{no json"), ("text", False, "text")],
)
def test_what_is_not_looked_into_yet_is_when_it_is_read(body: str, document: bool, text: str) -> None:
    """R-112: a content that was kept in a hurry has its pages found when somebody reads it."""
    waiting = Content(None, 100, 5, False, "r", "t", None, 1.0, len(body), (), (), body.encode())
    found = waiting.paged(100, body.encode())
    assert (found.document, (found.body or b"").decode()) == (document, text)
    assert found.paged(LEAST_ROOM, found.body or b"").document is document


def test_handles_cannot_be_guessed_and_are_file_names() -> None:
    """R-112: a handle depends on the key and on what it is for, and has a form that can be checked."""
    made = {new_handle(key, *parts) for key in (b"a", b"b") for parts in ((1,), (2,), (1, 2), (12,), ())}
    assert len(made) == 10
    assert all(is_handle(one) for one in made)
    assert new_handle(b"a", 1) == new_handle(b"a", 1)
    for wrong in (None, 5, "", "r-", "r-" + "a" * 25, "r-" + "a" * 27, HANDLE.upper(), HANDLE + "\n", "../" + HANDLE):
        assert not is_handle(wrong)


def test_g8_nothing_here_shows_what_it_holds() -> None:
    """G8: `repr` of pages, indexes and contents shows sizes."""
    value = {SECRET: [SECRET * 9] * 20}
    text = dumps(value)
    index = index_of(text, 60, document=True)
    content = content_of(index)
    shown = [repr(one) for one in (*pages_of(text, 60), index, content, *index.frames, Told(text, index, 5))]
    large = encode(value, 64, None, Keep(10_000, True))
    assert not any(SECRET[:5] in one or HANDLE in one for one in [*shown, repr(large)])
    assert content.weight > content.size


# ==================================================================== what the model is told


def told(
    value: Any, limit: int, *, reader: str | None = "read_result", reader_limit: int = 32_768
) -> tuple[Large, Told]:
    """What is told of a value that does not fit."""
    large = encode(value, limit, None, Keep(1 << 24, True))
    assert isinstance(large, Large)
    room = page_room(limit, reader_limit, document=large.document)
    return large, begun(large, limit, room, HANDLE, reader)


def pages_after(large: Large, found: Told) -> list[Page]:
    """The pages of what was told in part."""
    content = content_of(found.pages, document=large.document, room=found.room)
    body = content.body or b""
    return [
        page_of(content, lambda first, size: body[first : first + size], number, HANDLE)
        for number in range(1, len(content.stretches) + 1)
    ]


def test_p56_the_next_page_goes_on_behind_what_was_shown() -> None:
    """P-56: {'items': [1000 rows], 'next': 'c2'} under 4 KB: what is told parses, keeps 'next', says how many rows are
    missing; page 2 has the following rows, without a gap or a repeat.
    """
    value = {"items": [{"id": n, "name": f"row {n}"} for n in range(1000)], "next": "c2"}
    large, found = told(value, 4096)
    assert 3000 < len(found.text.encode()) <= 4096
    shown = json.loads(found.text)
    note, rows = shown["truncated"], shown["result"]["items"]
    assert shown["result"]["next"] == "c2"
    assert note["dropped"] == {".items": f"{1000 - len(rows)} of 1000 items"}
    assert (note["handle"], note["next_page"], note["read_with"]) == (HANDLE, 2, "read_result")
    for page in pages_after(large, found)[1:]:
        assert page.data["next"] == "c2"  # type: ignore[index]
        assert len(page.content.encode()) <= 4096
        rows += page.data["items"]  # type: ignore[index]
    assert rows == value["items"]


@pytest.mark.parametrize("value", ["line of text\n" * 2_000, [{"n": n} for n in range(5_000)]], ids=["text", "rows"])
def test_several_pages_are_shown_where_the_reader_gives_less_at_a_time(value: Any) -> None:
    """R-112: a tool may return more than the reader's bound: then its first pages are shown, and the next goes on."""
    large, found = told(value, 8_000, reader_limit=2_000)
    pages = pages_after(large, found)
    words = found.text.partition("page=")[2] or found.text.partition('"next_page":')[2]
    assert all(len(page.content.encode()) <= 2_000 for page in pages)
    following = int(words[: next(place for place, one in enumerate(words) if not one.isdigit())])
    assert following > 2
    before = pages[: following - 1]
    if isinstance(value, str):
        head = "".join(str(page.data) for page in before)
        assert found.text.startswith(head + "[... ")
    else:
        assert json.loads(found.text)["result"] == [row for page in before for row in page.data]  # type: ignore[attr-defined]


@given(
    value=st.one_of(values, st.text(st.characters(codec="utf-8"), max_size=3000), st.lists(values, max_size=40)),
    limit=st.integers(MIN_BYTES, 1500),
    reader=st.sampled_from([None, "read_result", "x" * 128]),
)
def test_r110_what_is_told_keeps_to_its_limit(value: Any, limit: int, reader: str | None) -> None:
    """R-110: any value under any limit: within it, valid JSON where the value is no text, and honest about the size."""
    large = encode(value, limit, None, Keep(1 << 24, True))
    if not isinstance(large, Large):
        return
    room = page_room(limit, 1_000, document=large.document)
    found = begun(large, limit, room, HANDLE, reader)
    assert 0 < len(found.text.encode()) <= limit
    if large.document:
        assert json.loads(found.text)["truncated"]["original_bytes"] == large.original_bytes
        assert put_together(pages_after(large, found)) is not None
    for smaller in (limit // 2, MIN_BYTES):
        shorter = again(value, found.text, max(smaller, MIN_BYTES), None, HANDLE, reader)
        assert len(shorter.encode()) <= max(smaller, MIN_BYTES)
        if large.document:
            json.loads(shorter)


def test_an_overview_where_a_page_says_less() -> None:
    """R-110: two long texts side by side are shown in part both; pages then begin at the first."""
    large, found = told({"a": "x" * 5_000, "b": "y" * 5_000}, 2_000)
    shown = json.loads(found.text)
    assert shown["truncated"]["next_page"] == 1
    assert shown["result"].keys() == {"a", "b"}
    wide = {f"key number {n}": "x" * 30 for n in range(500)}
    large, found = told(wide, 2_000)
    shown = json.loads(found.text)
    assert shown["truncated"]["next_page"] == 2
    assert {**shown["result"], **dict.fromkeys(pages_after(large, found)[1].data)}.keys() < wide.keys()  # type: ignore[call-overload]
    assert put_together(pages_after(large, found)) == wide
    large, found = told([{"a": "x" * 9_000}, 1], 2_000)
    assert json.loads(found.text)["truncated"]["next_page"] == 1
    short_first = "x\n" + "y" * 9_000
    assert told(short_first, 2_000)[1].text.startswith("x\nyyy")
    assert "page=3" in told(short_first, 2_000)[1].text
    assert told("y" * 300, 80)[1].text.startswith("yy")


def test_what_was_not_read_to_its_end_is_kept_as_far_as_it_was() -> None:
    """G12, R-112: of what has no end, or lies inside itself, what was read is there, and is said to be a part."""
    knot: list[Any] = ["x" * 100] * 50
    knot.append(knot)
    large, found = told(knot, 1_000)
    assert not large.complete
    assert json.loads(found.text)["truncated"]["next_page"] == 1
    assert put_together(pages_after(large, found)) == ["x" * 100] * 50 + ["[cycle]"]


def test_the_hint_gives_way_where_there_is_no_room() -> None:
    """R-110: under a small bound the name of the reader goes first, then all of the hint."""
    assert hint_for(HANDLE, 2, "read_result", 1_000).members.endswith('"read_with":"read_result"')
    assert hint_for(HANDLE, 2, None, 1_000) == Hint(
        f',"handle":"{HANDLE}","next_page":2', f"; handle {HANDLE}, next page: 2"
    )
    assert "read_with" not in hint_for(HANDLE, 2, "r" * 100, 300).members
    assert HANDLE in hint_for(HANDLE, 2, "r" * 100, 300).words
    assert hint_for(HANDLE, 2, "read_result", 64) == Hint()


def test_a_hint_survives_a_second_cut() -> None:
    """R-111: what is cut again says the first size, and carries the hint that it is given, once."""
    text = "line of text\n" * 500
    first = told(text, 2_000)[1].text
    second = again(text, first, 500, None, HANDLE, "read_result")
    assert second.count(HANDLE) == 1
    assert "of 6500 bytes cut; " in second
    bare = again(None, first, 500, None, None, None)
    assert "of 6500 bytes cut" in bare
    rows = [{"n": n} for n in range(500)]
    first = told(rows, 2_000)[1].text
    second = again(rows, first, 500, None, HANDLE, None)
    assert json.loads(second)["truncated"]["next_page"] == 1
    assert json.loads(second)["truncated"]["dropped"]["."].endswith("of 500 items")
    assert recut(rows, first, 500) != second


def test_a_summary_says_that_it_is_one() -> None:
    """R-110: a summary has a visible marker, the original size and the handle; JSON stays JSON."""
    assert summed_up("short", 600, 200, HANDLE, None) == f"short\n[summary of 600 bytes; handle {HANDLE}, next page: 1]"
    assert json.loads(summed_up('{"n":1}', 600, 200, HANDLE, None)) == {
        "summarized": {"original_bytes": 600, "handle": HANDLE, "next_page": 1},
        "result": {"n": 1},
    }
    assert summed_up("[no json", 600, 200, None, None) == "[no json\n[summary of 600 bytes]"
    assert summed_up("x" * 100, 600, 130, HANDLE, None) == "x" * 100 + "\n[summary of 600 bytes]"
    assert summed_up("x" * 100, 600, 110, HANDLE, None) == "x" * 100
    assert summary_room(1_000) == 800
    assert summary_room(100) == 50


def test_places_are_told_shortly() -> None:
    """R-110: keys that are no names are quoted, long places are cut."""
    assert place_of(("items", 3, "a b")) == '.items[3]["a b"]'
    assert place_of(()) == ""
    assert len(place_of(("é" * 39,) * 9).encode()) <= 80
    assert place_of(("x" * 41,)) == f'["{"x" * 40}"]'


@pytest.mark.parametrize(("limit", "reader", "document"), [(64, 64, True), (64, 10**6, False), (10**6, 600, True)])
def test_a_page_has_room_at_least(limit: int, reader: int, document: bool) -> None:
    """R-112: however small the bounds, a page has more room than the least that can be split."""
    room = page_room(limit, reader, document=document)
    assert LEAST_ROOM < room <= max(512, min(limit, reader)) - NOTE_BYTES
