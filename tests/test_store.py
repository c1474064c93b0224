"""Where whole results are kept: in memory and in a folder, for how long, and for whom."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import until

from towerman.clock import VirtualClock
from towerman.errors import PolicyError
from towerman.pages import Content, ResultStore, index_of, new_handle
from towerman.store import FolderStore, Keeper, NotKept
from towerman.store.keeper import UNKNOWN

SECRET = "zqxjkvbpwm"


def handle(number: int) -> str:
    """The handle of that number."""
    return new_handle(b"key", number)


def content(
    text: str = "line\n" * 100, *, room: int = 100, tenant: str | None = None, kept_at: float | None = None
) -> Content:
    """A content of this text."""
    from towerman.clock import wall_time

    return Content.of(
        index_of(text, room, document=False),
        document=False,
        room=room,
        original_bytes=len(text),
        incomplete=False,
        run_id="run",
        tool="tool",
        tenant=tenant,
        kept_at=wall_time() if kept_at is None else kept_at,
    )


class Shelf:
    """A store that can be made to fail or to wait."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.fails: BaseException | None = None
        self.open = threading.Event()
        self.open.set()
        self.puts = 0

    def put(self, handle: str, content: bytes, *, run_id: str, tool: str, tenant: str | None) -> None:
        assert (run_id, tool) == ("run", "tool")
        self.open.wait(30)
        self.puts += 1
        if self.fails is not None:
            raise self.fails
        self.kept[handle] = content

    def read(self, handle: str, first: int = 0, size: int | None = None) -> bytes | None:
        if self.fails is not None:
            raise self.fails
        kept = self.kept.get(handle)
        return None if kept is None else kept[first : None if size is None else first + size]

    def drop(self, handle: str) -> None:
        if self.fails is not None:
            raise self.fails
        self.kept.pop(handle, None)


def made(
    store: ResultStore | None = None, *, lifetime: float = 3600, most: int = 1 << 20
) -> tuple[Keeper, VirtualClock]:
    """A keeper on virtual time."""
    clock = VirtualClock()
    return Keeper(store, lambda: lifetime, lambda: most, clock.now), clock


def whole(keeper: Keeper, name: str, **reader: Any) -> str:
    """All pages of a text."""
    page = keeper.page(name, 1, every=True, **reader)
    told = str(page.data)
    while page.next is not None:
        page = keeper.page(name, page.next, every=True, **reader)
        told += str(page.data)
    return told


def missing(keeper: Keeper, name: object, number: object = 1, **reader: Any) -> NotKept:
    """Why there is no such page."""
    with pytest.raises(NotKept) as caught:
        keeper.page(name, number, **{"every": True, **reader})
    return caught.value


# ==================================================================== memory


def test_r112_what_is_kept_is_read_page_by_page() -> None:
    """R-112: by number, from 1; digits as text do too; a reader with less room gets smaller pages and no gap."""
    keeper, _ = made()
    keeper.keep(handle(1), content())
    assert whole(keeper, handle(1)) == "line\n" * 100
    assert whole(keeper, handle(1), room=360) == "line\n" * 100
    assert keeper.page(handle(1), "2", every=True) == keeper.page(handle(1), 2, every=True)
    assert keeper.page(handle(1), 1, every=True, room=360).pages > keeper.page(handle(1), 1, every=True).pages
    assert keeper.page(handle(1), 1, every=True, room=10**9).pages == keeper.page(handle(1), 1, every=True).pages
    keeper.validate()


@pytest.mark.parametrize("number", [0, -1, 6, 10**30, 1.0, "x", "-1", "1.0", "9" * 30, None, True, [1], "²"])
def test_r112_a_page_that_is_not_there_is_told_with_how_many_there_are(number: object) -> None:
    """R-112: pages out of range, and what is no number."""
    keeper, _ = made()
    keeper.keep(handle(1), content())
    wrong = missing(keeper, handle(1), number)
    assert (wrong.place, wrong.text) == ("page", "page: a whole number from 1 to 5, the number of its pages.")


@pytest.mark.parametrize("name", [None, 5, "", SECRET, handle(7), "../" * 9, handle(1)[:-1], [], b"r-"])
def test_r112_a_handle_that_is_not_known_is_told_and_not_repeated(name: object) -> None:
    """R-112, G8: unknown handles of any form are told alike, and nothing of them is said."""
    keeper, _ = made()
    keeper.keep(handle(1), content())
    wrong = missing(keeper, name)
    assert (wrong.place, wrong.text) == ("handle", UNKNOWN)


def test_r112_one_tenant_does_not_read_what_another_has_stored() -> None:
    """R-112: to everybody else it looks as if there were no such handle; the program may read all."""
    keeper, _ = made()
    for number, tenant in enumerate(("a", "b", None)):
        keeper.keep(handle(number), content(tenant=tenant))
    for number, tenant in enumerate(("a", "b", None)):
        for reader in ("a", "b", None):
            if reader == tenant:
                assert keeper.page(handle(number), tenant=reader, every=False).pages == 5
            else:
                assert missing(keeper, handle(number), tenant=reader, every=False).text == UNKNOWN
        assert keeper.page(handle(number), every=True).pages == 5


def test_r112_results_expire() -> None:
    """R-112: after their lifetime they are gone, and their memory with them."""
    keeper, clock = made(lifetime=60)
    keeper.keep(handle(1), content())
    clock.advance(60)
    assert whole(keeper, handle(1))
    clock.advance(0.5)
    assert missing(keeper, handle(1)).text == UNKNOWN
    assert keeper.statistics() == keeper.statistics().__class__(0, 0, 0, 0)


def test_r112_memory_is_bounded() -> None:
    """R-112: of ten thousand large results the oldest go first, what is left keeps to its bound, and it is counted."""
    keeper, clock = made(most=100_000)
    text = "x" * 20_000
    for number in range(10_000):
        clock.advance(0.01)
        keeper.keep(handle(number), content(text, room=5_000))
        assert keeper._weight <= 100_000
    found = keeper.statistics()
    assert keeper.most == 50_000
    assert found.results == 4
    assert found.dropped == 9_996
    assert whole(keeper, handle(9_999)) == text
    assert missing(keeper, handle(9_995)).text == UNKNOWN
    keeper.validate()
    keeper.drop(handle(9_999))
    keeper.drop(handle(1))
    assert keeper.statistics().results == 3
    keeper.keep(handle(3), content("y" * 200_000))
    assert keeper.statistics().results == 0


def test_what_is_kept_twice_is_kept_once() -> None:
    """R-111: a result that stands for several calls is one content."""
    keeper, _ = made()
    keeper.keep(handle(1), content())
    keeper.keep(handle(1), content())
    assert keeper.statistics().results == 1
    keeper.validate()


def test_what_was_not_looked_into_is_once() -> None:
    """R-111: pages are found at the first read; their weight is counted."""
    keeper, _ = made()
    body = b'{"rows":[' + b",".join(b"%d" % n for n in range(500)) + b"]}"
    keeper.keep(handle(1), Content(None, 100, 5, False, "run", "tool", None, 1.0, len(body), (), (), body))
    before = keeper.statistics().bytes
    first = keeper.page(handle(1), every=True)
    assert (first.path, first.total) == (("rows",), 500)
    assert keeper.statistics().bytes > before
    assert keeper.page(handle(1), every=True) == first
    keeper.validate()
    keeper._renew(handle(2), content())  # dropped while somebody looked into it
    keeper.validate()


def test_a_fork_keeps_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops, fork: in a child the parent's threads are not here, and its lock may be held."""
    shelf = Shelf()
    keeper, _ = made(shelf)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda self: None)  # there is one, and it is not here
        keeper.keep(handle(1), content())
    keeper._lock.acquire()
    keeper.anew()
    assert whole(keeper, handle(1))
    keeper.validate()
    keeper.keep(handle(2), content())
    assert keeper.flush(30)
    assert list(shelf.kept) == [handle(2)]


# ==================================================================== another store


def test_r112_another_store_takes_over() -> None:
    """R-112: a thread carries contents on; memory lets go of them, and they are read from there, in slices."""
    shelf = Shelf()
    keeper, _ = made(shelf)
    for number in range(20):
        keeper.keep(handle(number), content(tenant="t"))
    assert keeper.flush(30)
    assert keeper.statistics().results == 0
    assert len(shelf.kept) == 20
    assert whole(keeper, handle(3)) == "line\n" * 100
    assert whole(keeper, handle(3), room=360) == "line\n" * 100
    assert missing(keeper, handle(3), tenant="u", every=False).text == UNKNOWN
    assert missing(keeper, handle(99)).text == UNKNOWN
    keeper.drop(handle(3))
    assert missing(keeper, handle(3)).text == UNKNOWN
    body = b"[1,2]"
    keeper.keep(handle(50), Content(None, 100, 5, False, "run", "tool", None, content().kept_at, 5, (), (), body))
    assert keeper.flush(30)
    assert keeper.page(handle(50), every=True).data == [1, 2]
    until(lambda: not [one for one in threading.enumerate() if one.name == "towerman-results"])


def test_r112_nobody_waits_for_a_slow_store() -> None:
    """R-112: while it does not come back, contents are read from memory, which keeps to its bound."""
    shelf = Shelf()
    keeper, _ = made(shelf, most=20_000)
    shelf.open.clear()
    keeper.keep(handle(1), content())
    assert whole(keeper, handle(1)) == "line\n" * 100
    assert not keeper.flush(0.01)
    for number in range(2, 30):
        keeper.keep(handle(number), content())
    keeper.validate()
    assert keeper.statistics().dropped > 10
    shelf.open.set()
    assert keeper.flush(30)
    assert handle(29) in shelf.kept
    assert shelf.puts < 20


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError(SECRET), SystemExit(SECRET)]
)
def test_r112_a_store_that_fails_is_told_once(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """R-112, G8: what it does not take stays in memory; that is logged once, without a word of what it holds."""
    shelf = Shelf()
    keeper, _ = made(shelf)
    shelf.fails = error
    with caplog.at_level(logging.WARNING, "towerman"):
        for number in range(3):
            keeper.keep(handle(number), content(SECRET * 50))
        assert keeper.flush(30)
    assert whole(keeper, handle(2)) == SECRET * 50
    (record,) = caplog.records
    told = record.getMessage()
    assert SECRET not in told
    assert handle(1) not in told
    assert ("No space left on device" in told) == isinstance(error, OSError)
    assert keeper.statistics().unwritten == 3
    if isinstance(error, Exception):
        assert missing(keeper, handle(9)).text == UNKNOWN
        keeper.drop(handle(9))
    shelf.fails = None
    keeper.keep(handle(4), content())
    assert keeper.flush(30)
    assert list(shelf.kept) == [handle(4)]


def test_r112_what_a_store_gives_is_looked_at() -> None:
    """R-112: a content that is broken, cut off, gone between two reads, or too old is not there."""
    shelf = Shelf()
    keeper, _ = made(shelf, lifetime=60)
    keeper.keep(handle(1), content())
    keeper.flush(30)
    kept = shelf.kept[handle(1)]
    for broken in (b"", b"rubbish", kept[:200], kept[:-30]):
        shelf.kept[handle(1)] = broken
        assert missing(keeper, handle(1), 5).text == UNKNOWN
    shelf.kept[handle(1)] = kept

    class Forgetful(Shelf):
        def read(self, handle: str, first: int = 0, size: int | None = None) -> bytes | None:
            return None if first else kept[: size or 0]

    assert missing(Keeper(Forgetful(), lambda: 60, lambda: 1 << 20, lambda: 0.0), handle(1)).text == UNKNOWN
    old = content(kept_at=content().kept_at - 61)
    shelf.kept[handle(2)] = old.to_bytes()
    assert missing(keeper, handle(2)).text == UNKNOWN
    assert handle(2) not in shelf.kept


def test_no_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-112: where the system gives no thread, contents stay in memory and the next one tries again."""
    shelf = Shelf()
    keeper, _ = made(shelf)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        keeper.keep(handle(1), content())
    assert whole(keeper, handle(1))
    assert not shelf.kept
    assert keeper.flush(30)
    assert list(shelf.kept) == [handle(1)]


def test_g8_repr_shows_numbers(tmp_path: Path) -> None:
    """G8: neither contents nor handles are shown."""
    keeper, _ = made()
    keeper.keep(handle(1), content(SECRET * 10))
    shown = repr((keeper, keeper.statistics(), missing(keeper, handle(2))))
    assert SECRET not in shown
    assert handle(1) not in shown
    assert repr(folder(tmp_path)).startswith("FolderStore(")


# ==================================================================== a folder


def folder(path: Path, *, lifetime: float = 3600, most: int = 1 << 20) -> FolderStore:
    """A folder as a store."""
    return FolderStore(str(path / "results"), lambda: lifetime, lambda: most)


def put(store: FolderStore, number: int, content: bytes = b"content") -> str:
    """Put one content there."""
    store.put(handle(number), content, run_id="run", tool="tool", tenant=None)
    return handle(number)


def test_r112_files_are_whole_and_the_owners_alone(tmp_path: Path) -> None:
    """R-112: folder and files are private, whatever the umask; slices are read; other files stay."""
    before = os.umask(0)
    try:
        store = folder(tmp_path)
        name = put(store, 1, b"0123456789" * 1000)
    finally:
        os.umask(before)
    place = tmp_path / "results"
    (file,) = place.iterdir()
    assert file.name == f"{name}.result"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert store.read(name) == b"0123456789" * 1000
    assert store.read(name, 9_995, 100) == b"56789"
    assert store.read(name, 20_000, 5) == b""
    assert store.read(handle(2)) is None
    store.drop(name)
    store.drop(name)
    assert store.read(name) is None


@pytest.mark.parametrize(
    "name", ["", "..", "../" + handle(1), handle(1) + "/x", "r-" + "A" * 26, "a\0b", handle(1) + "\n"]
)
def test_r112_only_handles_become_paths(tmp_path: Path, name: str) -> None:
    """R-112: no other name leads anywhere."""
    store = folder(tmp_path)
    for look in (
        lambda: store.read(name),
        lambda: store.drop(name),
        lambda: store.put(name, b"", run_id="", tool="", tenant=None),
    ):
        with pytest.raises(ValueError, match="no handle"):
            look()


def test_r112_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-112: a full disk in the middle of a file: no half file, no draft; a reader sees what was there before."""
    store = folder(tmp_path)
    put(store, 1, b"before")
    write: Callable[[int, Any], int] = os.write

    def full(file: int, data: Any) -> int:
        if len(data) < 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:400])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            put(store, 1, b"x" * 1000)
    assert store.read(handle(1)) == b"before"
    assert [one.name for one in (tmp_path / "results").iterdir()] == [f"{handle(1)}.result"]


def test_r112_old_files_and_too_many_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-112: what is older than its lifetime, the oldest beyond the bound, and drafts of the dead; nothing else."""
    store = folder(tmp_path, lifetime=100, most=25)
    place = tmp_path / "results"
    now = content().kept_at
    for number, age in enumerate((500, 50, 40, 30)):
        put(store, number, b"0123456789")
        os.utime(place / f"{handle(number)}.result", (now - age, now - age))
    (place / f"{handle(9)}.result.1-1.draft").write_bytes(b"half")
    os.utime(place / f"{handle(9)}.result.1-1.draft", (now - 500, now - 500))
    (place / "notes.result").write_text("mine")
    (place / "notes.draft").write_text("mine")
    store.sweep()
    assert sorted(one.name for one in place.iterdir()) == sorted(
        [f"{handle(2)}.result", f"{handle(3)}.result", "notes.result", "notes.draft"]
    )
    gone: Callable[[str], None] = os.unlink

    def by_another(path: str) -> None:
        gone(path)
        raise FileNotFoundError

    os.utime(place / f"{handle(2)}.result", (now - 500, now - 500))
    monkeypatch.setattr(os, "unlink", by_another)
    store.sweep()
    assert not (place / f"{handle(2)}.result").exists()


def test_r112_putting_sweeps_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-112: whoever writes sweeps, not each time; a sweep that fails costs nothing."""
    store = folder(tmp_path)
    swept: list[int] = []

    def sweep() -> None:
        swept.append(1)
        raise OSError

    monkeypatch.setattr(store, "sweep", sweep)
    for number in range(5):
        put(store, number)
    assert swept == [1]
    assert store.read(handle(4)) == b"content"


def test_a_file_that_goes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-112: several processes may sweep one folder."""
    store = folder(tmp_path, lifetime=100)
    put(store, 1)

    class Entry:
        name = f"{handle(1)}.result"

        def stat(self, *, follow_symlinks: bool) -> Any:
            raise FileNotFoundError

    class Entries(list[Any]):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", lambda path: Entries([Entry()]))
    store.sweep()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """R-112: somebody else's file is not read by the way of a link."""
    store = folder(tmp_path)
    (tmp_path / "other").write_text(SECRET)
    (tmp_path / "results" / f"{handle(1)}.result").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        store.read(handle(1))
    keeper, _ = made(store)
    assert missing(keeper, handle(1)).text == UNKNOWN


def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    """DESIGN style 7: a wrong folder is a mistake in setting up, told when the tower is made."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "no" / "such"):
        with pytest.raises(PolicyError, match="results: the folder cannot be used: "):
            FolderStore(str(path), lambda: 1, lambda: 1)
    with pytest.raises(PolicyError, match="results"):
        FolderStore("a\0b", lambda: 1, lambda: 1)


def test_r112_a_folder_behind_the_keeper(tmp_path: Path) -> None:
    """R-112: two keepers, as of two processes, share a folder."""
    one, _ = made(folder(tmp_path))
    other, _ = made(folder(tmp_path))
    one.keep(handle(1), content(tenant="t"))
    assert one.flush(30)
    assert whole(other, handle(1)) == "line\n" * 100
