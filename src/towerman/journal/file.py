"""The file itself: opened, checked, brought up to date; and what is told when that cannot be done.

Theory. SQLite keeps the promise that a transaction is there whole or not at all, also over a crash. `synchronous=FULL`
in write-ahead mode makes each commit wait for the disk: what was committed is there after a power cut. The shape of
the file is made by numbered files of SQL, in order, each in a transaction of its own; the number of the last one is
`user_version`. Whoever comes at the same time waits and then finds it done.

House rules. One kind of exception leaves here, `JournalUnavailable`, and no text of SQLite's or of a value in it. The
file is never opened but by SQLite: a process that closes any other file on it loses the locks of all its connections.

Not here: what is in the tables (calls, approvals, deferred, blobs), who may use a connection when (writer).
"""

from __future__ import annotations

import os
import sqlite3
from functools import cache
from importlib.resources import files
from typing import Final

from towerman.errors import PolicyError
from towerman.records import JournalUnavailable, Trouble

APPLICATION: Final = 0x546F776D
"""What says in a file's head that it is a journal ("Towm")."""

MEMORY: Final = ":memory:"
"""The name of a journal that is nowhere but in this process."""

_TROUBLES: Final[dict[int, tuple[Trouble, str]]] = {
    sqlite3.SQLITE_FULL: ("full", "the disk is full; make room"),
    sqlite3.SQLITE_BUSY: ("locked", "another program holds its lock for too long"),
    sqlite3.SQLITE_LOCKED: ("locked", "another program holds its lock for too long"),
    sqlite3.SQLITE_READONLY: ("read-only", "it cannot be written; look at the rights of file and folder"),
    sqlite3.SQLITE_PERM: ("read-only", "it cannot be written; look at the rights of file and folder"),
    sqlite3.SQLITE_CORRUPT: ("corrupt", "the file is damaged; put a copy in its place"),
    sqlite3.SQLITE_NOTADB: ("not a journal", "the file is no journal; name another one"),
    sqlite3.SQLITE_CANTOPEN: ("gone", "it cannot be opened; look at the rights of file and folder"),
}


def trouble(name: str, error: sqlite3.Error) -> JournalUnavailable:
    """What an error of SQLite's comes to.

    Args:
        name: of the file, for people.
        error: the error; its text is not shown.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    kind, told = _TROUBLES.get(code, ("failed", ""))
    if not told:
        told = f"the system failed ({getattr(error, 'sqlite_errorname', type(error).__name__)})"
    return JournalUnavailable(kind, f"journal {name}: {told}")


@cache
def migrations() -> tuple[tuple[int, str, str], ...]:
    """The numbered files of SQL: (number, name, text), in order."""
    found = []
    for file in files("towerman.journal").joinpath("sql").iterdir():
        number, _, _ = file.name.partition("_")
        if file.name.endswith(".sql"):
            found.append((int(number), file.name, file.read_text(encoding="utf-8")))
    return tuple(sorted(found))


def newest() -> int:
    """The number that a file has when it is up to date."""
    return migrations()[-1][0]


def look(path: str) -> None:
    """See, without making or changing anything, whether a journal could be there.

    Raises:
        PolicyError: it could not; the message names the fix.
    """
    if path == MEMORY:
        return
    if os.path.isdir(path):
        raise PolicyError(f"journal: {path} is a folder; name a file in it, for example {path.rstrip('/')}/towerman.db")
    folder = os.path.dirname(path)
    if not os.path.exists(path):
        if not os.path.isdir(folder):
            raise PolicyError(f"journal: there is no folder {folder}; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PolicyError(f"journal: nothing can be written in {folder}; name a file in another folder")
        return
    try:
        db = sqlite3.connect(f"file:{_uri(path)}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
        try:
            _check(db, path)
        finally:
            db.close()
    except sqlite3.Error as error:
        found = trouble(path, error)
        if found.trouble in ("not a journal", "corrupt"):
            raise PolicyError(str(found)) from None
    except JournalUnavailable as wrong:
        raise PolicyError(str(wrong)) from None


def _uri(path: str) -> str:
    from urllib.parse import quote

    return quote(path)


def _check(db: sqlite3.Connection, name: str) -> int:
    """The number of a file's shape.

    Raises:
        JournalUnavailable: it is a database of something else, or of a later version.
    """
    alone = not db.in_transaction
    if alone:  # these belong together, and another process may be making the file
        db.execute("BEGIN")
    try:
        used = int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        application = int(db.execute("PRAGMA application_id").fetchone()[0])
    finally:
        if alone and db.in_transaction:
            db.execute("ROLLBACK")
    if application != APPLICATION and (used or version or application):
        raise JournalUnavailable(
            "not a journal", f"journal {name}: it is a database of something else; name another file"
        )
    if version > newest():
        raise JournalUnavailable(
            "newer",
            f"journal {name}: it was written by a later version of Towerman (its form is {version}, this one knows "
            f"{newest()}); install that version",
        )
    return version


def connect(path: str, busy_seconds: float, known: bytes | None = None) -> tuple[sqlite3.Connection, bytes]:
    """Open a journal, made or brought up to date where that is needed.

    Args:
        path: of the file.
        busy_seconds: how long another program's lock is waited for.
        known: the name that the file gave itself when it was opened before: another file is refused, and none is made.

    Returns:
        A connection, and the name that the file has given itself.

    Raises:
        JournalUnavailable: it cannot be used; nothing was changed.
    """
    name = path
    try:
        if known is not None and not os.path.exists(path):
            raise gone(name)
        if path != MEMORY and known is None:
            _make_private(path)
        db = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise trouble(name, error) from None
    except OSError as error:
        kind: Trouble = "gone" if isinstance(error, FileNotFoundError | NotADirectoryError) else "read-only"
        raise JournalUnavailable(
            kind, f"journal {name}: it cannot be made ({error.strerror or type(error).__name__})"
        ) from None
    try:
        if known is not None and (_check(db, name) == 0 or _name_of(db) != known):
            raise gone(name)
        _settle(db, path)
        return db, _name_of(db)
    except BaseException as error:
        db.close()
        if isinstance(error, sqlite3.Error):
            raise trouble(name, error) from None
        raise


def gone(name: str) -> JournalUnavailable:
    """A journal that is in use is not there any more. A new one would have forgotten what was begun."""
    return JournalUnavailable(
        "gone", f"journal {name}: the file was deleted or replaced while it was in use; put it back, or start anew"
    )


def _name_of(db: sqlite3.Connection) -> bytes:
    """The name that a file has given itself when it was made."""
    row = db.execute("SELECT value FROM facts WHERE name = 'file'").fetchone()
    if row is None:
        db.execute("INSERT OR IGNORE INTO facts (name, value) VALUES ('file', ?)", (os.urandom(16),))
        row = db.execute("SELECT value FROM facts WHERE name = 'file'").fetchone()
    return bytes(row[0])


def _make_private(path: str) -> None:
    """A journal holds what tools answered: a new one is for its owner only. SQLite gives its other files the same."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o600))
    except FileExistsError:
        return


def _settle(db: sqlite3.Connection, path: str) -> None:
    version = _check(db, path)
    if version == 0:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only before the first table
    mode = str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0]).lower()
    if mode != "wal" and path != MEMORY:
        raise JournalUnavailable(
            "failed",
            f"journal {path}: its file system cannot share memory between programs, as SQLite's write-ahead log needs; "
            "put it on a local disk",
        )
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = ON")  # what was pruned is not left in free pages
    migrate(db, path)


def migrate(db: sqlite3.Connection, name: str) -> list[str]:
    """Bring a file up to date; returns the names of what was done."""
    done: list[str] = []
    if _check(db, name) == newest():
        return done
    for number, file, text in migrations():
        db.execute("BEGIN IMMEDIATE")
        try:
            if _check(db, name) < number:
                for statement in statements(text):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {number}")
                done.append(file)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    return done


def statements(text: str) -> list[str]:
    """The statements of a file of SQL, one by one: SQLite's own way of running many of them would commit before."""
    found: list[str] = []
    held = ""
    for line in text.splitlines(keepends=True):
        held += line
        if sqlite3.complete_statement(held):
            found.append(held.strip())
            held = ""
    if any(line.strip() and not line.strip().startswith("--") for line in held.splitlines()):
        raise ValueError("a statement has no end")
    return found


def version_of(db: sqlite3.Connection) -> int:
    """The number of the last file of SQL that was run."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])
