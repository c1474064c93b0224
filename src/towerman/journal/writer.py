"""The thread that reads and writes an open journal, and nobody else does.

Theory. A commit waits for the disk, and while it waits others come. So all that is asked meanwhile goes into the next
transaction together: the disk is waited for once, however many calls start at that moment (group commit). Each step has
a savepoint, so that one that fails takes nothing of its neighbours with it. Where the whole transaction fails nothing
of it is there, and everybody who asked is told so. What must get there sooner or later (the outcome of a call that ran,
the withdrawal of an intent) is kept and tried again; when the journal is closed, once more and for as long as closing
may take, one by one where not all of it can be written. What stays unwritten then is told in the log.

A file is closed before a fork and opened anew by each side: SQLite's locks do not survive one, and neither child nor
parent could see that theirs are gone.

House rules. Nothing waits here for anybody who waits for this thread. Whatever is asked is answered by a future that
ends: with a value, or with an exception that says why.

Not here: what the steps are (calls, approvals, deferred, blobs), the file (file).
"""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final, TypeVar, cast
from weakref import WeakSet

from towerman.clock import RealClock
from towerman.journal import calls
from towerman.journal.file import MEMORY, connect, trouble
from towerman.journal.owners import BEAT_SECONDS
from towerman.journal.session import Session
from towerman.records import JournalUnavailable

T = TypeVar("T")

Step = Callable[[Session], object]

MOST_TOGETHER: Final = 512
"""Steps of one transaction."""

MOST_LATER: Final = 10_000
"""Steps that are kept to be tried again; of more the oldest are given up, and counted."""

WATCH_SECONDS: Final = 0.05
"""How often it is looked whether another process has ended a call that somebody waits for."""

LOOK_SECONDS: Final = 1.0
"""How often it is looked whether such a process is there still, and whether kept steps go through by now."""

CLOSE_SECONDS: Final = 10.0
"""How long the end of a program waits for what is to be written."""

CLOSE_PAUSE: Final = 0.1
"""Between two tries to write what was kept, while the journal is being closed."""

FORK_SECONDS: Final = 2.0
"""How long a fork waits for the transaction that is under way."""

_BROKEN: Final = frozenset({"corrupt", "not a journal", "gone", "failed", "read-only", "newer"})
"""Troubles after which the file is opened anew."""

_log: Final = logging.getLogger("towerman")


class Asked:
    """One step that somebody has asked for; `again`: what it is that is tried until it is written, or nothing."""

    __slots__ = ("again", "future", "step", "writes")

    def __init__(self, step: Step, future: Future[object], writes: bool = False, again: str = "") -> None:
        self.step = step
        self.future = future
        self.writes = writes
        self.again = again


def _kept(one: Asked) -> Asked:
    """The same step, with a future of its own: whoever asked has been told that it is not written."""
    kept = Asked(one.step, Future(), True, one.again)
    kept.future.set_running_or_notify_cancel()
    return kept


def _done(future: Future[None]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(None)


_WRITERS: WeakSet[Writer] = WeakSet()


class Writer:
    """One file, one connection, one thread.

    Args:
        path: of the file, or `:memory:`.
        busy_seconds: how long another program's lock is waited for.
        made: makes the session of a connection.
    """

    def __init__(self, path: str, busy_seconds: float, made: Callable[[sqlite3.Connection], Session]) -> None:
        self.path = path
        self._busy_seconds = busy_seconds
        self._made = made
        self.futures: Callable[[], Future[object]] = Future  # a test may want to know of them
        self._now = RealClock().now
        self._renew()
        _WRITERS.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._working = threading.Lock()
        self._queue: deque[Asked] = deque()
        self._later: deque[Asked] = deque()
        self._watched: dict[bytes, list[Future[None]]] = {}
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        self._mark: tuple[int, int] | None = None
        self._named: bytes | None = None
        self._open = False
        self._closing = False
        self._close_by = 0.0
        self._trouble = ""
        self._pid = os.getpid()
        self._useless = False
        self._me_before: int | None = None
        self._seen_version = -1
        self._beat_at = 0.0
        self._looked_at = 0.0
        self._later_at = 0.0
        self._forking = False
        self._locked = False
        self._in_the_way = False
        self.commits = 0
        self.steps = 0
        self.failures = 0
        self.given_up = 0

    # ---------------------------------------------------------------- asking

    def ask(self, step: Callable[[Session], T], *, writes: bool = True, again: str = "") -> Future[T]:
        """Have a step done in the next transaction; returns at once.

        Args:
            step: takes the session.
            writes: False for one that changes nothing.
            again: if the transaction fails the step is tried again later, though its future has failed: what it is, as
                people are told where it cannot be written in the end.

        Returns:
            A future with what the step returns; `JournalUnavailable` where it was not done.
        """
        future = cast("Future[T]", self.futures())
        asked = Asked(step, cast("Future[object]", future), writes, again)
        with self._lock:
            if self._useless or self._pid != os.getpid():
                refusal = JournalUnavailable(
                    "forked", f"journal {self.path}: it was open when this process was forked; open it anew here"
                )
            elif self._closing:
                refusal = JournalUnavailable("closed", f"journal {self.path}: it is closed")
            else:
                self._queue.append(asked)
                try:
                    self._wake()
                    return future
                except RuntimeError:
                    self._queue.remove(asked)
                    refusal = JournalUnavailable("failed", f"journal {self.path}: the system gave no thread for it")
        future.set_exception(refusal)
        return future

    def watch(self, key: bytes) -> Future[None]:
        """A future that is done once nobody is at work on a call any more; at once where nobody is, or nobody can say.

        Whoever cancels it waits no more.
        """
        future: Future[None] = Future()

        def begin(session: Session) -> None:
            if calls.at_work(session, (key,)):
                self._watched.setdefault(key, []).append(future)
            else:
                _done(future)

        def failed(asked: Future[None]) -> None:
            if asked.exception() is not None:  # who looks again is told what is wrong
                _done(future)

        self.ask(begin, writes=False).add_done_callback(failed)
        return future

    def _wake(self) -> None:
        """Under the lock: let the thread go on, or make it."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="towerman-journal", daemon=True)
            thread.start()
            self._thread = thread
        self._ready.notify()

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue and not self._closing:
                    self._ready.wait(self._pause())
                group = [self._queue.popleft() for _ in range(min(len(self._queue), MOST_TOGETHER))]
                over = self._closing and not group
            with self._working:
                if over:
                    self._leave()
                    return
                if group:
                    self._do(group)
                self._look()
            del group  # whose futures and steps know calls

    def _pause(self) -> float | None:
        """How long nothing needs to be done."""
        if self._watched:
            return WATCH_SECONDS
        if self._later:
            return LOOK_SECONDS
        if self._session is not None and self._session.held:
            return BEAT_SECONDS
        return None

    def _do(self, group: list[Asked]) -> None:
        """What was asked, in one transaction; before it, in one of its own, what could not be written earlier."""
        todo = [one for one in group if one.future.set_running_or_notify_cancel()]
        if not todo:
            return
        if not self._later or (self._in_the_way and self._now() - self._later_at < LOOK_SECONDS):
            self._transact(todo)
            return
        kept, self._later = [_kept(one) for one in self._later], deque()
        self._transact(kept)
        if self._later and self._locked:  # it was waited for long enough
            self._failed(todo, JournalUnavailable("locked", f"journal {self.path}: another program holds its lock"))
            return
        stuck = bool(self._later)
        self._in_the_way = self._transact(todo) and stuck

    def _transact(self, todo: list[Asked]) -> bool:
        """One transaction; True where it is there."""
        self._locked = False
        answered: list[tuple[Asked, object, BaseException | None]] = []
        try:
            session = self._opened()
            writes = any(one.writes for one in todo)
            db = session.db
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            session.begin()
            if writes and self._now() - self._beat_at > BEAT_SECONDS:
                session.beat()
            for one in todo:
                answered.append((one, *self._do_one(session, one.step)))
            db.execute("COMMIT")
        except (sqlite3.Error, JournalUnavailable) as error:
            self._failed(todo, error)
            return False
        except BaseException as fault:  # a fault of ours: nobody may wait for ever
            self._failed(todo, fault)
            return False
        self.commits += writes
        self.steps += len(answered)
        session.begun.clear()
        if writes:
            self._beat_at = self._now()
            keys = self._watched.keys() & session.touched
            if keys:
                try:
                    self._let_go(session, keys)
                except sqlite3.Error:
                    self._looked_at = 0.0  # and is looked at soon
        for one, value, problem in answered:
            if problem is None:
                one.future.set_result(value)
            else:
                one.future.set_exception(problem)
        return True

    def _do_one(self, session: Session, step: Step) -> tuple[object, BaseException | None]:
        """One step: what it returns, or why it was not done; only what concerns the whole file is raised."""
        db, me = session.db, session.me
        db.execute("SAVEPOINT step")
        try:
            value = step(session)
        except sqlite3.Error as error:
            if not isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.DataError):
                raise
            problem: BaseException = trouble(self.path, error)
        except Exception as error:
            problem = error
        else:
            db.execute("RELEASE step")
            return value, None
        db.execute("ROLLBACK TO step")
        db.execute("RELEASE step")
        session.me = me
        return None, problem

    def _failed(self, todo: list[Asked], error: BaseException) -> None:
        """Nothing of a transaction is there."""
        self.failures += 1
        told = trouble(self.path, error) if isinstance(error, sqlite3.Error) else error
        self._trouble = told.trouble if isinstance(told, JournalUnavailable) else "failed"
        self._locked = self._trouble == "locked"
        session = self._session
        if session is not None:
            session.me = self._me_before
            try:
                if session.db.in_transaction:
                    session.db.execute("ROLLBACK")
            except sqlite3.Error:
                self._shut()
            if session.begun:
                # A commit that failed may have reached the disk: what it began is taken back all the same.
                tokens = tuple(session.begun)
                session.begun.clear()
                self._later.append(Asked(lambda one: calls.withdraw(one, tokens), Future(), True, "withdrawal"))
        if isinstance(told, JournalUnavailable) and told.trouble in _BROKEN:
            self._shut()
        self._later.extend(one for one in todo if one.again)
        if len(self._later) > MOST_LATER:
            if not self.given_up:
                _log.error(
                    "journal %s: %s: more than %d outcomes wait to be written, so the oldest are given up; their calls "
                    "will be unknown (towerman journal unknown)",
                    self.path,
                    self._trouble,
                    MOST_LATER,
                )
            while len(self._later) > MOST_LATER:
                self._later.popleft()
                self.given_up += 1
        self._later_at = self._now()
        for one in todo:
            one.future.set_exception(told)

    # ---------------------------------------------------------------- the file

    def _opened(self) -> Session:
        """The session, on a connection to the file that was opened first."""
        if self._open and self._marked() != self._mark:
            self._shut()  # deleted, or another one is in its place: only the same one is opened
        session = self._session
        if session is None or not self._open:
            db, self._named = connect(self.path, self._busy_seconds, self._named)
            if session is None:
                session = self._session = self._made(db)
            else:
                session.db = db
            self._open = True
            self._seen_version = -1
            self._mark = self._marked()
        self._me_before = session.me
        return session

    def _marked(self) -> tuple[int, int] | None:
        if self.path == MEMORY:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return (0, 0)
        return found.st_dev, found.st_ino

    def _shut(self) -> None:
        """Close the connection; the next transaction opens another one."""
        session = self._session
        if session is not None and self._open and self.path != MEMORY:
            self._open = False
            try:
                session.db.close()
            except sqlite3.Error:
                pass  # it is closed as far as it can be

    # ---------------------------------------------------------------- what comes by time

    def _look(self) -> None:
        """Kept steps, signs of life, and calls of other processes that somebody waits for."""
        now = self._now()
        if self._later and not self._queue and now - self._later_at >= LOOK_SECONDS:
            self._do([Asked(lambda _: None, Future())])
        session = self._session
        if session is None:
            return
        if session.held and now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self._do([Asked(lambda one: one.beat(), Future(), True)])
        if self._watched:
            self._look_at_watched(now, session)

    def _look_at_watched(self, now: float, session: Session) -> None:
        """Calls of other processes that somebody waits for: has one ended, or its process?"""
        for key, futures in list(self._watched.items()):
            futures[:] = [one for one in futures if not one.done()]
            if not futures:
                del self._watched[key]
        if not self._watched or not self._open:
            return
        try:
            version = session.db.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error:
            version = -1
        if version == self._seen_version and now - self._looked_at < LOOK_SECONDS:
            return
        self._seen_version, self._looked_at = version, now
        keys = tuple(self._watched)
        self._transact([Asked(lambda one: self._let_go(one, keys), Future())])

    def _let_go(self, session: Session, keys: Iterable[bytes]) -> None:
        """Tell those who wait for calls on which nobody is at work."""
        keys = tuple(keys)
        busy = calls.at_work(session, keys)
        for key in keys:
            if key not in busy:
                for future in self._watched.pop(key, ()):
                    _done(future)

    # ---------------------------------------------------------------- ending

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Write all that was asked for, and end; True where that was done in time, and all of it is written."""
        with self._lock:
            if self._pid != os.getpid():
                return True
            self._closing = True
            self._close_by = max(self._close_by, self._now() + timeout / 2)  # so that what is left is told in time
            thread = self._thread
            self._ready.notify_all()
        if thread is None:
            return True
        if thread is not threading.current_thread():
            thread.join(timeout)
        if not thread.is_alive():
            return not self.given_up
        if timeout:
            _log.error(
                "journal %s: it did not end within %g s: what it was to write may not be there", self.path, timeout
            )
        return False

    def _leave(self) -> None:
        session = self._session
        if self._later:
            self._try_once_more()
        if session is not None and session.me is not None:
            self._transact([Asked(lambda one: one.leave(), Future(), True)])
        if self._later:
            self.given_up += len(self._later)
            counts = Counter(one.again for one in self._later)
            _log.error(
                "journal %s: %s: it is closed, and this could not be written: %s. The calls are unknown from now on "
                "(towerman journal unknown)",
                self.path,
                self._trouble,
                ", ".join(f"{what}: {count}" for what, count in counts.items()),
            )
            self._later.clear()
        for futures in self._watched.values():
            for future in futures:
                _done(future)
        self._watched.clear()
        if session is not None and self._open:
            self._open = False
            try:
                session.db.close()
            except sqlite3.Error:
                pass  # it is closed as far as it can be

    def _try_once_more(self) -> None:
        """It is being closed: write what was kept, all at once or, where there is no room for all, what fits."""
        while True:
            kept, self._later = [_kept(one) for one in self._later], deque()
            self._transact(kept)
            if len(self._later) > 1 and not self._locked:
                kept, self._later = [_kept(one) for one in self._later], deque()
                for number, one in enumerate(kept):
                    self._transact([one])
                    if self._now() > self._close_by:
                        self._later.extend(kept[number + 1 :])
                        break
            left = self._close_by - self._now()
            if not self._later or left <= 0:
                return
            threading.Event().wait(min(CLOSE_PAUSE, left))

    # ---------------------------------------------------------------- fork

    def before_fork(self) -> None:
        """Let the transaction that is under way end, and close the file."""
        self._forking = self._working.acquire(timeout=FORK_SECONDS)
        if self._forking:
            self._shut()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._forking:
            self._forking = False
            self._working.release()

    def after_fork_in_child(self) -> None:
        """Begin anew: who waits, and what is open, is the parent's."""
        unheld = self._session is not None and not self._forking and self.path != MEMORY
        if self._session is not None:
            _LEFT.append(self._session)  # closing it here could release what the parent has locked
        closing = self._closing
        self._renew()
        self._closing = closing
        self._useless = unheld

    def statistics(self) -> dict[str, int]:
        """Counts."""
        return {
            "queued": len(self._queue),
            "later": len(self._later),
            "watched": len(self._watched),
            "commits": self.commits,
            "steps": self.steps,
            "failures": self.failures,
            "given_up": self.given_up,
            "unsealed": self._session.unsealed if self._session is not None else 0,
        }


_LEFT: Final[list[Session]] = []
"""Sessions of a parent process, never closed here."""


def _before_fork() -> None:
    for writer in list(_WRITERS):
        writer.before_fork()


def _after_fork_in_parent() -> None:
    for writer in list(_WRITERS):
        writer.after_fork_in_parent()


def _after_fork_in_child() -> None:
    for writer in list(_WRITERS):
        writer.after_fork_in_child()


def _at_exit() -> None:
    for writer in list(_WRITERS):
        writer.close(CLOSE_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
