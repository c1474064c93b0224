"""The way in: contents are kept here, and read page by page.

Theory. Memory holds every content for a while, and for good where there is no other store. A thread carries contents
on, in order; it is made when something is there to carry and ends when nothing is. What it cannot carry stays in
memory, like everything else there for as long as there is room.

House rules. One lock, held for look-ups only; encoding, splitting and other stores are outside it.

Not here: files (folder).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from towerman.clock import wall_time
from towerman.pages import LEAST_ROOM, Content, Page, ResultStore, Unreadable, is_handle, page_of
from towerman.pages.page import NOTE_BYTES

UNKNOWN: Final = (
    "No stored result has this handle: it is not one, or it has expired, was dropped to make room, or is somebody "
    "else's. Call the tool again to get its result anew."
)
"""What a reader is told, whatever the reason: who may not read learns nothing."""


class NotKept(Exception):
    """There is no such page; the text says why, for a model, and names no handle.

    Args:
        text: in a sentence.
        place: what of the request was wrong: "handle" or "page".
    """

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.text = text
        self.place = place


@dataclass(frozen=True, slots=True)
class KeptStatistics:
    """What is kept in memory at one instant.

    Args:
        results: contents.
        bytes: what they take, about.
        dropped: contents that went before their time, since there was no room.
        unwritten: contents that another store did not take.
    """

    results: int
    bytes: int
    dropped: int
    unwritten: int


class Keeper:
    """Keeps contents.

    Args:
        store: where they are kept for good; None: in memory.
        lifetime: gives the seconds that a content is kept.
        most_bytes: gives the bytes that all contents in memory may take.
        now: the tower's clock.
    """

    def __init__(
        self,
        store: ResultStore | None,
        lifetime: Callable[[], float],
        most_bytes: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._lifetime = lifetime
        self._most_bytes = most_bytes
        self._now = now
        self._told = False
        self._dropped = 0
        self._unwritten = 0
        self._kept: dict[str, tuple[float, Content]] = {}
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._carried = threading.Condition(self._lock)
        self._to_carry: deque[str] = deque()
        self._carrier: threading.Thread | None = None
        self._weight = sum(content.weight for _, content in self._kept.values())

    def anew(self) -> None:
        """In the child of a fork: its threads are not here, and may have held the lock."""
        self._begin()

    @property
    def most(self) -> int:
        """Bytes of the largest content that is kept: half of the room, so that the last one never clears all."""
        return self._most_bytes() // 2

    def keep(self, handle: str, content: Content) -> None:
        """Keep a content. Never blocks for long, and never fails for want of room.

        Args:
            handle: a new one.
            content: with its body.
        """
        with self._lock:
            if handle in self._kept:  # another call's run stands for several
                return
            self._kept[handle] = self._now(), content
            self._weight += content.weight
            self._make_room()
            if self._store is not None:
                self._to_carry.append(handle)
                self._start()

    def _start(self) -> None:
        if self._carrier is None:
            self._carrier = threading.Thread(target=self._carry, name="towerman-results", daemon=True)
            try:
                self._carrier.start()
            except RuntimeError:  # the system gives none now: the next content tries again
                self._carrier = None

    def _make_room(self) -> None:
        """Under the lock: forget what is too old, and the oldest while there is too much."""
        oldest, most = self._now() - self._lifetime(), self._most_bytes()
        while self._kept:
            handle, (kept_at, _) = next(iter(self._kept.items()))
            too_old = kept_at < oldest
            if not too_old and self._weight <= most:
                return
            self._dropped += not too_old
            self._forget(handle)

    def _forget(self, handle: str) -> None:
        known = self._kept.pop(handle, None)
        if known is not None:
            self._weight -= known[1].weight

    def _carry(self) -> None:
        """On a thread: hand contents to the other store, until there are none."""
        store = self._store
        assert store is not None, "there is a store to carry to"
        while True:
            with self._lock:
                if not self._to_carry:
                    self._carrier = None
                    self._carried.notify_all()
                    return
                handle = self._to_carry[0]
                known = self._kept.get(handle)
            try:
                if known is not None:
                    content = known[1]
                    if content.document is None:
                        content = content.paged(content.room, content.body or b"")
                    store.put(
                        handle, content.to_bytes(), run_id=content.run_id, tool=content.tool, tenant=content.tenant
                    )
            except BaseException as error:  # an exit too: it would end this thread, and nothing else
                self._tell(error)
            else:
                with self._lock:
                    self._forget(handle)
            del known
            with self._lock:
                self._to_carry.popleft()

    def _tell(self, error: BaseException) -> None:
        self._unwritten += 1
        if not self._told:
            self._told = True
            import logging

            why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            logging.getLogger("towerman").warning(
                "results: a large result could not be stored: %s; such results stay in memory while there is room", why
            )

    def page(
        self, handle: object, number: object = 1, *, room: int | None = None, tenant: str | None = None, every: bool
    ) -> Page:
        """A page of a content.

        Args:
            handle: its name.
            number: which page, from 1; digits as text do, too.
            room: the most bytes of what a model is told of it; None: what its pages were made for.
            tenant: who reads.
            every: whoever reads may read all.

        Raises:
            NotKept: there is no such page for this reader.
        """
        if not is_handle(handle):
            raise NotKept(UNKNOWN, "handle")
        assert isinstance(handle, str)
        content, read = self._found(handle)
        if not every and content.tenant != tenant:
            raise NotKept(UNKNOWN, "handle")
        if content.document is None:
            content = content.paged(content.room, read(0, content.size))
            read = _slices(content.body or b"")
            self._renew(handle, content)
        most = content.room if room is None else max(LEAST_ROOM, min(content.room, room - NOTE_BYTES))
        if most < content.room:
            content = content.paged(most, read(0, content.size))
            read = _slices(content.body or b"")
        pages = len(content.stretches)
        place = _number(number)
        if not 1 <= place <= pages:
            raise NotKept(f"page: a whole number from 1 to {pages}, the number of its pages.", "page")
        return page_of(content, read, place, handle)

    def _renew(self, handle: str, content: Content) -> None:
        """What was found out about a content need not be found out again."""
        with self._lock:
            known = self._kept.get(handle)
            if known is not None:
                self._kept[handle] = known[0], content
                self._weight += content.weight - known[1].weight

    def _found(self, handle: str) -> tuple[Content, Callable[[int, int], bytes]]:
        with self._lock:
            self._make_room()
            known = self._kept.get(handle)
        if known is not None:
            return known[1], _slices(known[1].body or b"")
        store = self._store
        if store is None:
            raise NotKept(UNKNOWN, "handle")

        def read(first: int, size: int) -> bytes:
            try:
                part = store.read(handle, first, size)
            except Exception as error:
                raise Unreadable from error
            if part is None:
                raise Unreadable
            return bytes(part)

        def told(first: int, size: int) -> bytes:
            try:
                part = read(first, size)
            except Unreadable:
                raise NotKept(UNKNOWN, "handle") from None
            if len(part) != size:
                raise NotKept(UNKNOWN, "handle")
            return part

        try:
            content, start = Content.from_bytes(read)
        except Unreadable:
            raise NotKept(UNKNOWN, "handle") from None
        if content.kept_at < wall_time() - self._lifetime():
            self.drop(handle)
            raise NotKept(UNKNOWN, "handle")
        return content, lambda first, size: told(start + first, size)

    def drop(self, handle: str) -> None:
        """Forget a content."""
        with self._lock:
            self._forget(handle)
        if self._store is not None:
            try:
                self._store.drop(handle)
            except Exception as error:
                self._tell(error)

    @property
    def busy(self) -> bool:
        """Something is left to be carried to the other store."""
        return bool(self._to_carry)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is left to be carried to the other store, and say whether that is so.

        Args:
            seconds: the longest wait.
        """
        with self._lock:
            if self._to_carry:
                self._start()
            return self._carried.wait_for(lambda: not self._to_carry, seconds)

    def statistics(self) -> KeptStatistics:
        """Counts at this instant."""
        with self._lock:
            self._make_room()
            return KeptStatistics(len(self._kept), self._weight, self._dropped, self._unwritten)

    def validate(self) -> None:
        """Raise AssertionError when what must hold between two steps does not; for tests and doubts."""
        with self._lock:
            weight = sum(content.weight for _, content in self._kept.values())
            assert self._weight == weight, f"results: {self._weight} bytes are counted, there are {weight}"
            assert weight <= max(self._most_bytes(), 0), f"results: {weight} bytes of {self._most_bytes()}"

    def __repr__(self) -> str:
        return f"Keeper({len(self._kept)} results, {self._weight} bytes)"


def _slices(body: bytes) -> Callable[[int, int], bytes]:
    return lambda first, size: body[first : first + size]


def _number(given: object) -> int:
    """A page's number, or 0."""
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= 9:
        return int(given)
    return given if type(given) is int else 0
