"""Towerman's own daemon threads: workers for sync handlers, and the couriers that serve observers.

Theory. The default executor of an event loop is small, shared with everybody, and joined at exit. A handler that
blocks for a minute must take nobody else's thread and must not keep the process alive. So sync handlers run on
threads of our own: as many as admission lets run, idle ones are used again and end after a while. What has ended is
handed back to the loop in groups, so that many completions cost one wake-up.

House rules. A thread is a daemon and has a telling name. Nothing here decides anything; a job that was given up
before its thread came to it is skipped, by a ticket that can be taken once.

Not here: which call may run (gate), what its end means (runner). No asyncio: a port is given the function that wakes
its loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from queue import Empty, SimpleQueue
from types import BuiltinMethodType, MethodType
from typing import Final, Generic, TypeVar

from towerman.clock import RealClock

JobT = TypeVar("JobT")

IDLE_SECONDS: Final = 30.0
"""How long an idle worker thread is kept."""


class Ticket:
    """Taken once: by the thread that starts the work, or by whoever gives the work up before."""

    __slots__ = ("_ticket",)

    def __init__(self) -> None:
        self._ticket = [None]

    def take(self) -> bool:
        """True for the first one who asks."""
        try:
            self._ticket.pop()  # one step under the interpreter's lock: two threads cannot both succeed
        except IndexError:
            return False
        return True


class Port(Generic[JobT]):
    """Where ended work is handed back to one loop, in groups.

    Args:
        wake: called from a worker thread to have the given function called on the loop; raises RuntimeError when the
            loop is gone.
        done: called on the loop for each (job, value, error).
        lost: called on the worker thread for a job whose loop is gone.
    """

    __slots__ = ("_done", "_gone", "_lock", "_lost", "_out", "_wake")

    def __init__(
        self,
        wake: Callable[[Callable[[], None]], object],
        done: Callable[[JobT, object, BaseException | None], None],
        lost: Callable[[JobT], None],
    ) -> None:
        self._wake = wake
        self._done = done
        self._lost = lost
        self._lock = threading.Lock()
        self._gone = False
        self._out: list[tuple[JobT, object, BaseException | None]] = []

    def put(self, job: JobT, value: object, error: BaseException | None) -> None:
        """Hand back one job; called on the worker thread."""
        with self._lock:
            first = not self._out
            self._out.append((job, value, error))
        if first or self._gone:
            try:
                self._wake(self._deliver)
            except RuntimeError:
                self.lose()

    def lose(self) -> None:
        """The loop is gone: what was handed back and never taken is lost, and so is all that comes."""
        with self._lock:
            self._gone = True
            gone, self._out = self._out, []
        for job, _, _ in gone:
            self._lost(job)

    def _deliver(self) -> None:
        with self._lock:
            group, self._out = self._out, []
        for place, (job, value, error) in enumerate(group, 1):
            try:
                self._done(job, value, error)
            except BaseException:
                self._put_again(group[place:])
                raise

    def _put_again(self, rest: list[tuple[JobT, object, BaseException | None]]) -> None:
        """One could not be taken, which must not cost those behind it."""
        with self._lock:
            first = bool(rest) and not self._out
            self._out = rest + self._out
        if first:
            self._wake(self._deliver)


class Workers(Generic[JobT]):
    """Daemon threads, made when they are needed.

    Args:
        name: prefix of the threads' names.
        idle_seconds: how long an idle thread is kept.
    """

    __slots__ = ("_closed", "_count", "_idle", "_idle_seconds", "_lock", "_made", "_name", "_peak", "_queue")

    def __init__(self, name: str = "towerman", *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._name = name
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[Port[JobT], JobT, Ticket, Context, Callable[[], object]] | None] = SimpleQueue()
        self._closed = False
        self._count = 0
        self._idle = 0
        self._made = 0
        self._peak = 0

    def submit(
        self, port: Port[JobT], job: JobT, ticket: Ticket, context: Context, function: Callable[[], object]
    ) -> None:
        """Run `function` in `context` on a thread and hand what comes of it to `port`, unless the ticket was taken
        before.

        Raises:
            RuntimeError: the system gives no further thread; nothing was queued.
        """
        with self._lock:
            if self._idle:
                self._idle -= 1
                fresh = None
            else:
                self._made += 1
                fresh = threading.Thread(target=self._work, name=f"{self._name}-{self._made}", daemon=True)
                fresh.start()
                self._count += 1
                self._peak = max(self._peak, self._count)
        self._queue.put((port, job, ticket, context, function))

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._idle_seconds)
            except Empty:
                with self._lock:
                    if self._idle:  # nobody counts on this thread
                        self._idle -= 1
                        self._count -= 1
                        return
                continue
            if item is None:
                with self._lock:
                    self._count -= 1
                return
            port, job, ticket, context, function = item
            del item
            if ticket.take():
                try:
                    value, error = context.run(function), None
                except BaseException as caught:
                    value, error = None, caught
                stays = self._stays()
                port.put(job, value, error)
            else:
                stays = self._stays()
            del port, job, ticket, context, function
            value = error = None  # an idle thread keeps nobody's values alive
            if not stays:
                return

    def _stays(self) -> bool:
        """A thread has ended its work: it is idle from now on, or, after `close`, it ends."""
        with self._lock:
            if self._closed:
                self._count -= 1
            else:
                self._idle += 1
            return not self._closed

    def close(self) -> None:
        """Let idle threads end; busy ones end after their work. Does not wait. Later work gets threads of its own."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._queue.put(None)

    def statistics(self) -> dict[str, int]:
        """Threads alive, idle, and the most at once."""
        with self._lock:
            return {"threads": self._count, "idle": self._idle, "peak": self._peak}


ItemT = TypeVar("ItemT")

GATHER_SECONDS: Final = 0.002
"""How long the courier lets items gather."""


class Courier(Generic[ItemT]):
    """Delivers items in order to receivers on a daemon thread of its own; a full queue drops and counts.

    Args:
        receivers: called one after another with each item; what they raise is counted and goes no further.
        name: the thread's name.
        most: items that may wait; further ones are dropped and counted.
    """

    __slots__ = (
        "_closed",
        "_dropped",
        "_failed",
        "_given_up",
        "_hurry",
        "_lock",
        "_most",
        "_name",
        "_queue",
        "_receivers",
        "_sent",
        "_taken",
        "_thread",
    )

    def __init__(
        self, receivers: tuple[Callable[[ItemT], None], ...], *, name: str = "towerman-observers", most: int = 100_000
    ) -> None:
        self._receivers = receivers
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._queue: SimpleQueue[ItemT | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._sent = 0
        self._taken = 0
        self._dropped = 0
        self._given_up = 0
        self._failed = 0

    @property
    def ended(self) -> bool:
        """Is there neither a thread nor anything to deliver?"""
        return self._thread is None and self._queue.empty()

    @property
    def here(self) -> bool:
        """Does this code run on the courier's own thread?"""
        return self._thread is threading.current_thread()

    def send(self, item: ItemT) -> None:
        """Queue one item; never blocks, never raises for a full queue."""
        if self._sent - self._taken >= self._most:
            self._dropped += 1
            return
        self._sent += 1
        self._queue.put(item)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def _serve_again(self) -> bool:
        """Go on for what came meanwhile, unless another thread does by now."""
        with self._lock:
            if self._thread is not None:
                return False
            self._thread = threading.current_thread()
            return True

    def _work(self) -> None:
        while True:
            if self._queue.empty():
                # What comes within a moment is delivered in one go: waking this thread costs a sender more than
                # sending.
                self._hurry.wait(GATHER_SECONDS)
                self._hurry.clear()
            item = None if self._closed and self._queue.empty() else self._queue.get()
            if item is None:
                # A sender looks for a thread after it has queued; this one looks at the queue after it has gone.
                self._thread = None
                if self._queue.empty() or not self._serve_again():
                    return
            elif isinstance(item, threading.Event):
                item.set()
            else:
                self._taken += 1
                for receiver in self._receivers:
                    try:
                        receiver(item)
                    except BaseException:  # an exit too: it would leave the other receivers unserved for ever
                        self._failed += 1

    def close(self) -> None:
        """Let the thread end once it has delivered what was sent before. A later item is delivered all the same, by a
        thread that ends at once.
        """
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._hurry.set()

    def give_up(self) -> None:
        """Deliver nothing more: what waits is dropped and counted, and so is what is sent from now on."""
        self._most = 0
        try:
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, threading.Event):
                    item.set()
                elif item is not None:
                    # Counted apart: the thread, which may be at work on another item, counts what it took.
                    self._given_up += 1
        except Empty:
            self.close()

    def flush(self, timeout: float) -> bool:
        """Wait until everything sent before was delivered, at most `timeout` seconds; say whether it was."""
        mark = self.mark()
        return mark is None or mark.wait(timeout)

    def mark(self) -> threading.Event | None:
        """An event that is set when everything sent before was delivered; None when it was."""
        if self._thread is None and self._queue.empty():
            return None
        mark = threading.Event()
        self._queue.put(mark)
        self._hurry.set()
        if self._thread is None:
            self._start()
        return mark

    def statistics(self) -> dict[str, int]:
        """Items sent, those of them that wait, items dropped (a full queue, or given up), failures of receivers."""
        sent = self._sent - self._given_up
        return {
            "sent": sent,
            "pending": sent - self._taken,
            "dropped": self._dropped + self._given_up,
            "failed": self._failed,
        }


class _Served(Generic[ItemT]):
    """A receiver and the courier that serves it."""

    __slots__ = ("_lost_before", "courier", "receiver")

    def __init__(self, receiver: Callable[[ItemT], None], courier: Courier[ItemT]) -> None:
        self.receiver = receiver
        self.courier = courier
        # It may have lost something elsewhere, or here before it was removed.
        self._lost_before = self._lost()

    def _lost(self) -> int:
        try:
            lost: object = getattr(self.receiver, "lost", 0)
        except Exception:  # a property of somebody else's
            return 0
        return lost if type(lost) is int else 0

    def add_to(self, counts: dict[str, int]) -> None:
        """Add the courier's counts, and what the receiver says that it lost meanwhile."""
        for key, count in self.courier.statistics().items():
            counts[key] += count
        counts["lost"] += max(0, self._lost() - self._lost_before)


class Couriers(Generic[ItemT]):
    """A courier for each receiver, so that one that is slow, or stuck for good, keeps nothing from the others.

    Args:
        name: the first thread's name; those of further ones have a number.
        most: items that may wait for one receiver; further ones are dropped for it and counted.
    """

    __slots__ = ("_all", "_gone", "_leaving", "_lock", "_most", "_name", "_number")

    def __init__(self, *, name: str = "towerman-observers", most: int = 100_000) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._all: tuple[_Served[ItemT], ...] = ()
        # Those that were removed are counted still: each by itself while its thread lives, then as a sum.
        self._leaving: list[_Served[ItemT]] = []
        self._gone = {"sent": 0, "pending": 0, "dropped": 0, "failed": 0, "lost": 0}
        self._number = 0

    def add(self, receiver: Callable[[ItemT], None]) -> None:
        """One more receiver; it gets what is sent from now on. One that is there already gets things once."""
        with self._lock:
            if not any(_same(one.receiver, receiver) for one in self._all):
                self._number += 1
                name = self._name if self._number == 1 else f"{self._name}-{self._number}"
                self._all = (*self._all, _Served(receiver, Courier((receiver,), name=name, most=self._most)))

    def remove(self, receiver: Callable[[ItemT], None], timeout: float) -> None:
        """Forget a receiver once it has got what was sent so far; what it has not got after `timeout` seconds is
        dropped. One that is not known is ignored. A receiver that removes itself gets nothing more.
        """
        with self._lock:
            found = [one for one in self._all if _same(one.receiver, receiver)]
            self._all = tuple(one for one in self._all if one not in found)
            self._leaving.extend(found)
        for one in found:
            if not one.courier.here:
                one.courier.flush(timeout)
            one.courier.give_up()

    def sender(self) -> Callable[[ItemT], None] | None:
        """What sends to all there are now; None while there are none."""
        if len(self._all) == 1:
            return self._all[0].courier.send
        return self.send if self._all else None

    def send(self, item: ItemT) -> None:
        """Queue one item for each; never blocks."""
        for one in self._all:
            one.courier.send(item)

    def flush(self, timeout: float) -> bool:
        """Wait until all have got everything sent so far, at most `timeout` seconds; say whether they have."""
        now = RealClock().now
        limit = now() + timeout
        marks = [one.courier.mark() for one in self._all if not one.courier.here]
        return all(mark is None or mark.wait(max(0.0, limit - now())) for mark in marks)

    def close(self) -> None:
        """Let the threads end once they have delivered what was sent before."""
        for one in self._all:
            one.courier.close()

    def statistics(self) -> dict[str, int]:
        """The same counts as a courier's, over all receivers, also those that were removed; and under `lost` what
        receivers say that they lost, in an attribute of that name.
        """
        with self._lock:
            still: list[_Served[ItemT]] = []
            for one in self._leaving:
                if one.courier.ended:
                    one.add_to(self._gone)
                else:
                    still.append(one)
            self._leaving = still
            counts = dict(self._gone)
            for one in (*still, *self._all):
                one.add_to(counts)
        return counts

    def anew(self) -> Couriers[ItemT]:
        """Others with the same receivers, for a process in which these threads do not run."""
        others: Couriers[ItemT] = Couriers(name=self._name, most=self._most)
        for one in self._all:
            others.add(one.receiver)
        return others


def _same(one: object, other: object) -> bool:
    """Is it the same receiver? A bound method is a new object each time that it is looked up."""
    # Only two methods are compared: anything else could have an `__eq__` of its own.
    methods = isinstance(one, MethodType | BuiltinMethodType) and type(one) is type(other)
    return one is other or (methods and one == other)
