"""One page of a content, as a reader gets it.

Theory. A program gets the data; a model gets it with a line, or a member, that says which page this is, what is on it
and which one comes next. A page names its handle, so that a model which has forgotten it can read on.

Not here: where a page begins (splitting), who may read it (store).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from towerman.bounds.jsontext import dumps
from towerman.pages.content import Content, Read
from towerman.pages.splitting import Stretch, Unit

NOTE_BYTES: Final = 320
"""Bytes that are kept free on a page for what is said about it."""

_PLACE_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a result that was too large to be told whole.

    Args:
        number: which page, from 1.
        pages: how many there are.
        content: what the model is told: the data, and which page it is.
        data: what is on it: a part of the text; or of the value, nested as in the whole, with small values beside it
            kept (a cursor, totals).
        path: keys and indexes that lead to the list, object or string that is split there; empty for the outermost.
        unit: what it is split into: "lines" of text, "items" of a list, "keys" of an object, "characters" of a string.
        first: the first of these on this page, from 0.
        count: how many are on it; a line that goes on, on the next page, is on both.
        total: how many there are in all.
        next: the number of the next page; None on the last.
        original_bytes: size of the whole result.
        complete: False where the whole that was kept lacks something: what had no end, or lay too deep.
    """

    number: int
    pages: int
    content: str = field(repr=False)
    data: object = field(repr=False)
    path: tuple[str | int, ...] = field(repr=False)
    unit: Unit
    first: int
    count: int
    total: int
    next: int | None
    original_bytes: int
    complete: bool


def page_of(content: Content, read: Read, number: int, handle: str) -> Page:
    """A page, which must be there.

    Args:
        content: whose; its own places are counted in what `read` reads.
        read: reads a slice of its text.
        number: from 1.
        handle: told to the model.
    """
    stretch = content.stretches[number - 1]
    frame = content.frames[stretch.frame]
    parts = [
        one if isinstance(one, str) else read(one[0], one[1] - one[0]).decode()
        for one in (*frame.before, (stretch.start, stretch.end), *frame.after)
    ]
    text = "".join(parts)
    pages = len(content.stretches)
    following = number + 1 if number < pages else None
    shown = _shown(stretch, frame.unit, frame.total)
    if content.document:
        data = json.loads(text)
        told: dict[str, object] = {"number": number, "pages": pages, "shown": shown}
        if frame.path:
            told["in"] = place_of(frame.path)
        if following is not None:
            told["next_page"] = following
        told["handle"] = handle
        said = f'{{"page":{dumps(told)},"result":{text}}}'
    else:
        data = text
        reads_on = f"; next page: {following}" if following is not None else "; the last page"
        said = f"[page {number} of {pages} of {handle}: {shown}{reads_on}]\n{text}"
    return Page(
        number,
        pages,
        said,
        data,
        frame.path,
        frame.unit,
        stretch.first,
        stretch.units,
        frame.total,
        following,
        content.original_bytes,
        not content.incomplete,
    )


def _shown(stretch: Stretch, unit: Unit, total: int) -> str:
    last = stretch.first + stretch.units
    return f"{unit} {stretch.first + 1} to {last} of {total}"


def place_of(path: tuple[str | int, ...]) -> str:
    """How a place is told: `.items[7].text`, as in the notes of what was cut."""
    told = ""
    for step in path:
        if isinstance(step, int):
            told += f"[{step}]"
        elif step.isidentifier() and len(step) <= 40:
            told += f".{step}"
        else:
            told += f"[{dumps(step[:40])}]"
    if len(told.encode()) <= _PLACE_CHARACTERS:
        return told
    return told.encode()[: _PLACE_CHARACTERS - 3].decode("utf-8", "ignore") + "..."
