"""Towerman's own threads: tickets, ports, workers, the courier. Real threads, held and let go by events; nothing
sleeps.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import PATIENCE, until

from towerman.threads import Courier, Couriers, Port, Ticket, Workers

HERE: contextvars.ContextVar[str] = contextvars.ContextVar("HERE", default="nowhere")


class Bench:
    """A port whose deliveries the test makes itself, and threads that are let go at its end."""

    def __init__(self) -> None:
        self.wakes: list[Callable[[], None]] = []
        self.done: list[tuple[str, object, BaseException | None]] = []
        self.lost: list[str] = []
        self.came = threading.Semaphore(0)
        self.dead = False
        self.port: Port[str] = Port(self.wake, self.take, self.lose)
        self.gates: list[threading.Event] = []
        self.workers: Workers[str] = Workers("bench")

    def wake(self, deliver: Callable[[], None]) -> None:
        if self.dead:
            self.came.release()
            raise RuntimeError("the loop is closed")
        self.wakes.append(deliver)
        self.came.release()

    def take(self, job: str, value: object, error: BaseException | None) -> None:
        self.done.append((job, value, error))

    def lose(self, job: str) -> None:
        self.lost.append(job)

    def submit(self, job: str, function: Callable[[], object], ticket: Ticket | None = None) -> Ticket:
        """Hand in a job in the present context."""
        ticket = ticket or Ticket()
        self.workers.submit(self.port, job, ticket, contextvars.copy_context(), function)
        return ticket

    def hold(self, job: str) -> threading.Event:
        """Hand in a job that works until its event is set; return when it has begun."""
        gate, begun = threading.Event(), threading.Event()
        self.gates.append(gate)

        def work() -> str:
            begun.set()
            assert gate.wait(PATIENCE)
            return job

        self.submit(job, work)
        assert begun.wait(PATIENCE)
        return gate

    def wait(self, times: int = 1) -> None:
        """Until so many jobs have woken the loop."""
        for _ in range(times):
            assert self.came.acquire(timeout=PATIENCE)

    def deliver(self) -> None:
        """What the loop would do now."""
        wakes, self.wakes = self.wakes, []
        for one in wakes:
            one()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for gate in made.gates:
        gate.set()
    made.workers.close()


def threads_named(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def joined(prefix: str) -> None:
    """Every thread of that name has ended."""
    for thread in threads_named(prefix):
        thread.join(PATIENCE)
        assert not thread.is_alive()


# ==================================================================== tickets


def test_a_ticket_is_taken_once() -> None:
    """R-83: of two who want to start or give up one job, one gets it."""
    ticket = Ticket()
    assert ticket.take()
    assert not ticket.take()
    assert not ticket.take()


def test_many_threads_want_one_ticket() -> None:
    """R-49, R-83: however many ask at once, exactly one gets it."""
    for _ in range(50):
        ticket = Ticket()
        barrier = threading.Barrier(4)
        got: list[bool] = []

        def ask(ticket: Ticket = ticket, barrier: threading.Barrier = barrier, got: list[bool] = got) -> None:
            barrier.wait(PATIENCE)
            got.append(ticket.take())

        crowd = [threading.Thread(target=ask) for _ in range(4)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join(PATIENCE)
        assert sorted(got) == [False, False, False, True]


# ==================================================================== ports


def test_a_port_hands_back_in_groups() -> None:
    """F11: completions that come before the loop has had its turn cost one wake-up; their order is kept."""
    bench = Bench()
    for job in "abc":
        bench.port.put(job, job.upper(), None)
    assert len(bench.wakes) == 1
    bench.deliver()
    assert bench.done == [("a", "A", None), ("b", "B", None), ("c", "C", None)]
    bench.port.put("d", None, None)
    assert len(bench.wakes) == 1
    bench.deliver()
    bench.deliver()
    assert [job for job, _, _ in bench.done] == ["a", "b", "c", "d"]


def test_a_port_whose_loop_is_gone_loses_nothing_silently() -> None:
    """G3: a job that ends after its loop is told as lost, once; so is one that was handed back and never taken."""
    bench = Bench()
    bench.port.put("taken by nobody", 1, None)
    bench.dead = True
    bench.port.put("behind it", 2, None)  # the loop had been woken already: nothing tells that it is gone
    assert bench.lost == []
    bench.port.lose()
    assert bench.lost == ["taken by nobody", "behind it"]
    bench.port.put("after all", 3, None)
    assert bench.lost == ["taken by nobody", "behind it", "after all"]
    bench.port.lose()
    assert len(bench.lost) == 3
    assert bench.done == []


def test_the_first_job_after_the_loops_end_finds_out() -> None:
    """G3: where nothing is under way, the job itself notices that the loop is gone."""
    bench = Bench()
    bench.dead = True
    bench.port.put("a", 1, None)
    bench.port.put("b", 1, None)
    assert bench.lost == ["a", "b"]


def test_one_that_cannot_be_taken_does_not_cost_the_others() -> None:
    """G1, G3: what goes wrong with one completion (an interrupt, say) does not lose those of its group."""
    taken: list[str] = []

    def take(job: str, value: object, error: BaseException | None) -> None:
        if job == "b":
            raise KeyboardInterrupt
        taken.append(job)

    wakes: list[Callable[[], None]] = []
    port: Port[str] = Port(wakes.append, take, lambda job: None)
    for job in "abcd":
        port.put(job, None, None)
    with pytest.raises(KeyboardInterrupt):
        wakes.pop()()
    assert taken == ["a"]
    assert len(wakes) == 1, "nobody is told of the rest"
    wakes.pop()()
    assert taken == ["a", "c", "d"]
    port.put("b", None, None)
    with pytest.raises(KeyboardInterrupt):
        wakes.pop()()
    assert not wakes, "there was nobody behind it"


# ==================================================================== workers


def test_workers_are_daemons_with_telling_names(bench: Bench) -> None:
    """F11, G12: a thread of ours says whose it is and does not keep the process alive."""
    bench.hold("a")
    bench.hold("b")
    found = threads_named("bench-")
    assert sorted(thread.name for thread in found) == ["bench-1", "bench-2"]
    assert all(thread.daemon for thread in found)


def test_workers_grow_as_needed_and_are_used_again(bench: Bench) -> None:
    """F11: no job waits for another one's thread; an idle thread takes the next job."""
    gates = [bench.hold(str(n)) for n in range(3)]
    assert bench.workers.statistics() == {"threads": 3, "idle": 0, "peak": 3}
    gates[0].set()
    bench.wait()
    assert bench.workers.statistics() == {"threads": 3, "idle": 1, "peak": 3}
    bench.hold("again")
    assert bench.workers.statistics() == {"threads": 3, "idle": 0, "peak": 3}
    bench.hold("one more")
    assert bench.workers.statistics() == {"threads": 4, "idle": 0, "peak": 4}


def test_values_errors_and_context_come_through(bench: Bench) -> None:
    """P-91, R-109: the job runs in the context it was handed in with; what it returns or raises comes back, exits
    too.
    """

    def exits() -> None:
        raise SystemExit(3)

    token = HERE.set("in the batch")
    bench.submit("value", HERE.get)
    HERE.reset(token)
    bench.submit("error", lambda: 1 // 0)
    bench.submit("exit", exits)
    for _ in range(3):  # a wake-up may stand for several
        if len(bench.done) < 3:
            bench.wait()
            bench.deliver()
    found = {job: (value, type(error)) for job, value, error in bench.done}
    assert found == {
        "value": ("in the batch", type(None)),
        "error": (None, ZeroDivisionError),
        "exit": (None, SystemExit),
    }


def test_a_job_that_was_given_up_is_skipped(bench: Bench) -> None:
    """R-78: whose ticket is gone before its thread comes to it never runs and is not handed back; its thread is idle
    again.
    """
    ran: list[str] = []
    ticket = Ticket()
    assert ticket.take()
    bench.submit("given up", lambda: ran.append("given up"), ticket)
    bench.hold("next").set()
    bench.wait()
    bench.deliver()
    assert ran == []
    assert [job for job, _, _ in bench.done] == ["next"]


def test_an_idle_thread_ends_after_a_while() -> None:
    """G12: threads that nobody needs end; the next job gets a new one."""
    bench = Bench()
    bench.workers = Workers("short-lived", idle_seconds=0.0)
    bench.submit("a", lambda: "A")
    bench.wait()
    bench.deliver()
    joined("short-lived")
    assert bench.workers.statistics() == {"threads": 0, "idle": 0, "peak": 1}
    bench.submit("b", lambda: "B")
    bench.wait()
    joined("short-lived")
    bench.deliver()
    assert [job for job, _, _ in bench.done] == ["a", "b"]


def test_a_thread_that_is_counted_on_does_not_end() -> None:
    """G1: a job that was handed to an idle thread in the moment in which it gives up waiting is done all the same."""
    bench = Bench()
    bench.workers = Workers("counted-on", idle_seconds=0.0)
    for n in range(300):
        bench.submit(str(n), lambda: None)
        bench.wait()
        bench.deliver()
    joined("counted-on")
    assert len(bench.done) == 300
    assert bench.workers.statistics()["threads"] == 0


def test_close_lets_idle_threads_end_and_busy_ones_after_their_work() -> None:
    """G12: closed workers leave no thread: the idle at once, the busy when their work ends."""
    bench = Bench()
    bench.workers = Workers("closing")
    gates = [bench.hold(str(n)) for n in range(3)]
    gates[0].set()
    bench.wait()
    bench.workers.close()
    until(lambda: len(threads_named("closing")) <= 2)
    assert bench.workers.statistics()["threads"] == 2
    for gate in gates:
        gate.set()
    joined("closing")
    bench.deliver()
    assert sorted(job for job, _, _ in bench.done) == ["0", "1", "2"]
    assert bench.workers.statistics() == {"threads": 0, "idle": 0, "peak": 3}


def test_work_after_close_is_still_done() -> None:
    """G1: a tower that is closed while a call is being started still answers that call."""
    bench = Bench()
    bench.workers = Workers("after-close")
    bench.workers.close()
    bench.submit("late", lambda: "done")
    bench.wait()
    bench.deliver()
    assert bench.done == [("late", "done", None)]
    joined("after-close")


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """G3: where the system gives no thread, the submission says so, and nothing was queued or counted."""
    bench = Bench()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            bench.submit("a", lambda: None)
    assert bench.workers.statistics() == {"threads": 0, "idle": 0, "peak": 0}
    bench.submit("b", lambda: None)
    bench.wait()
    bench.deliver()
    assert [job for job, _, _ in bench.done] == ["b"]
    bench.workers.close()


def test_an_idle_thread_keeps_nothing_alive(bench: Bench) -> None:
    """R-81: the value of the last job is not kept by the thread that waits for the next one."""
    import gc
    import weakref

    class Value:
        pass

    made: list[Any] = []

    def work() -> Value:
        value = Value()
        made.append(weakref.ref(value))
        return value

    bench.submit("a", work)
    bench.wait()
    bench.deliver()
    bench.done.clear()
    bench.hold("next").set()  # the thread has come round
    bench.wait()
    gc.collect()
    assert made[0]() is None


# ==================================================================== the courier


class Mailbox:
    """A receiver that can be held."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.inside = 0
        self.most_inside = 0

    def __call__(self, item: int) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        self.got.append(item)
        self.inside -= 1


def test_items_are_delivered_in_order_to_every_receiver() -> None:
    """R-131: one thread, made when it is needed, serves all receivers in the order of sending."""
    one, two = Mailbox(), Mailbox()
    courier: Courier[int] = Courier((one, two), name="courier-a")
    assert courier.flush(0)
    assert threads_named("courier-a") == []
    for item in range(100):
        courier.send(item)
    assert courier.flush(PATIENCE)
    assert one.got == two.got == list(range(100))
    (thread,) = threads_named("courier-a")
    assert thread.daemon
    assert courier.statistics() == {"sent": 100, "pending": 0, "dropped": 0, "failed": 0}
    courier.close()
    joined("courier-a")


def test_a_slow_receiver_delays_nobody_and_what_is_too_much_is_counted() -> None:
    """R-130 to R-133, P-91: sending never blocks; a full queue drops the newest and says how many."""
    box = Mailbox()
    box.gate.clear()
    courier: Courier[int] = Courier((box,), name="courier-b", most=5)
    courier.send(0)
    assert box.entered.wait(PATIENCE)
    for item in range(1, 20):
        courier.send(item)
    assert courier.statistics() == {"sent": 6, "pending": 5, "dropped": 14, "failed": 0}
    assert not courier.flush(0)
    box.gate.set()
    assert courier.flush(PATIENCE)
    assert box.got == [0, 1, 2, 3, 4, 5]
    courier.send(99)
    assert courier.flush(PATIENCE)
    assert box.got[-1] == 99
    courier.close()
    joined("courier-b")


@pytest.mark.parametrize("failure", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_broken_receiver_breaks_nobody(failure: type[BaseException]) -> None:
    """An observer cannot break a call or another observer: what it raises is counted, whatever it is."""

    def broken(item: int) -> None:
        raise failure("no")

    box = Mailbox()
    courier: Courier[int] = Courier((broken, box), name="courier-c")
    courier.send(1)
    courier.send(2)
    assert courier.flush(PATIENCE)
    assert box.got == [1, 2]
    assert courier.statistics()["failed"] == 2
    courier.close()
    joined("courier-c")


def test_receivers_come_and_go() -> None:
    """Each receiver has a courier of its own, gets what is sent while it is one, and gets it once."""
    one, two = Mailbox(), Mailbox()
    couriers: Couriers[int] = Couriers(name="couriers-a")
    assert couriers.sender() is None
    assert couriers.flush(0)
    couriers.add(one)
    couriers.add(one)
    for item, change in ((1, lambda: couriers.add(two)), (2, lambda: couriers.remove(one, PATIENCE)), (3, None)):
        send = couriers.sender()
        assert send is not None
        send(item)
        if change is not None:
            change()
            couriers.remove(print, PATIENCE)
    assert couriers.flush(PATIENCE)
    assert (one.got, two.got) == ([1, 2], [2, 3])
    assert couriers.statistics() == {"sent": 4, "pending": 0, "dropped": 0, "failed": 0, "lost": 0}
    again = couriers.anew()
    send = again.sender()
    assert send is not None
    send(4)
    assert again.flush(PATIENCE)
    assert two.got == [2, 3, 4]
    for each in (couriers, again):
        each.close()
    joined("couriers-a")


def test_a_stuck_receiver_keeps_nothing_from_the_others() -> None:
    """A receiver that never comes back: the others get everything; its own part is dropped beyond a bound, counted,
    and told as not delivered; flushing and removing it end in their time.
    """
    stuck, quick = Mailbox(), Mailbox()
    stuck.gate.clear()
    couriers: Couriers[int] = Couriers(name="couriers-b", most=5)
    couriers.add(stuck)
    couriers.add(quick)
    for item in range(20):
        couriers.send(item)
        until(lambda item=item: item in quick.got)  # type: ignore[misc]
    until(lambda: stuck.entered.is_set())
    assert not couriers.flush(0)
    counts = couriers.statistics()
    assert counts["dropped"] in (14, 15)
    assert counts["pending"] == 20 - counts["dropped"] - 1
    couriers.remove(stuck, 0)
    couriers.send(20)
    assert couriers.flush(PATIENCE)
    assert quick.got == list(range(21))
    # What it has not got when it is removed it never gets: of 20 items one is in its hands, the others are dropped.
    assert couriers.statistics() == {"sent": 22, "pending": 0, "dropped": 19, "failed": 0, "lost": 0}
    stuck.gate.set()
    couriers.close()
    joined("couriers-b")
    assert stuck.got == [0]
    assert couriers.statistics() == {"sent": 22, "pending": 0, "dropped": 19, "failed": 0, "lost": 0}


def test_a_receiver_removes_itself() -> None:
    """A receiver that removes itself, or flushes, from within does not wait for itself."""
    seen: list[int] = []
    couriers: Couriers[int] = Couriers(name="couriers-c")

    def once(item: int) -> None:
        seen.append(item)
        assert couriers.flush(PATIENCE)
        couriers.remove(once, PATIENCE)

    couriers.add(once)
    couriers.send(1)
    until(lambda: couriers.sender() is None)
    couriers.send(2)
    joined("couriers-c")
    assert seen == [1]


def test_a_receiver_that_removes_itself_gets_nothing_more() -> None:
    """What waits for a receiver when it removes itself is dropped and counted, not delivered after all."""
    seen: list[int] = []
    start = threading.Event()
    couriers: Couriers[int] = Couriers(name="couriers-d")

    def once(item: int) -> None:
        seen.append(item)
        assert start.wait(PATIENCE)
        couriers.remove(once, PATIENCE)

    couriers.add(once)
    for item in range(5):
        couriers.send(item)
    start.set()
    until(lambda: couriers.sender() is None)
    joined("couriers-d")
    assert seen == [0]
    assert couriers.statistics() == {"sent": 1, "pending": 0, "dropped": 4, "failed": 0, "lost": 0}


def test_a_flush_that_waits_is_let_go_when_its_receiver_is_given_up() -> None:
    """G12: who waits for a receiver that somebody else removes is not left waiting."""
    box = Mailbox()
    box.gate.clear()
    courier: Courier[int] = Courier((box,), name="courier-h")
    courier.send(1)
    assert box.entered.wait(PATIENCE)
    mark = courier.mark()
    assert mark is not None
    courier.close()
    courier.give_up()
    assert mark.wait(PATIENCE)
    courier.send(2)
    assert courier.statistics() == {"sent": 1, "pending": 0, "dropped": 1, "failed": 0}
    box.gate.set()
    joined("courier-h")
    assert courier.ended
    assert box.got == [1]


def test_a_bound_method_is_one_receiver() -> None:
    """A method is a new object at each look: it is added once and can be removed. Two receivers that only compare
    equal are two.
    """

    class Alike(Mailbox):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    class Owner:
        def __init__(self) -> None:
            self.got: list[int] = []

        def take(self, item: int) -> None:
            self.got.append(item)

    owner, plain, one, two = Owner(), list[int](), Alike(), Alike()
    couriers: Couriers[int] = Couriers(name="couriers-e")
    for _ in range(2):
        couriers.add(owner.take)
        couriers.add(plain.append)
        couriers.add(one)
        couriers.add(two)
    couriers.send(1)
    assert couriers.flush(PATIENCE)
    assert owner.got == plain == one.got == two.got == [1]
    couriers.remove(owner.take, PATIENCE)
    couriers.remove(plain.append, PATIENCE)
    couriers.remove(one, PATIENCE)
    couriers.send(2)
    assert couriers.flush(PATIENCE)
    assert owner.got == plain == one.got == [1]
    assert two.got == [1, 2]
    couriers.close()
    joined("couriers-e")


def test_counts_outlive_the_receivers() -> None:
    """P-91: failures and losses stay counted when a receiver is removed, also those that come to light afterwards, and
    are counted once when it comes back.
    """

    class Loser(Mailbox):
        lost = 7  # before it came here

        def __call__(self, item: int) -> None:
            super().__call__(item)
            self.lost += 1
            raise ValueError("no")

    class Odd(Mailbox):
        @property
        def lost(self) -> int:
            raise RuntimeError("no")

    class Wordy(Mailbox):
        lost = "many"

    loser = Loser()
    couriers: Couriers[int] = Couriers(name="couriers-f")
    for receiver in (loser, Odd(), Wordy()):
        couriers.add(receiver)
    loser.gate.clear()
    couriers.send(1)
    assert loser.entered.wait(PATIENCE)
    couriers.remove(loser, 0)
    assert couriers.statistics() == {"sent": 3, "pending": 0, "dropped": 0, "failed": 0, "lost": 0}
    loser.gate.set()
    until(lambda: couriers.statistics()["failed"] == 1)
    for _ in range(2):
        assert couriers.statistics() == {"sent": 3, "pending": 0, "dropped": 0, "failed": 1, "lost": 1}
    couriers.add(loser)
    assert couriers.statistics()["lost"] == 1
    couriers.send(2)
    assert couriers.flush(PATIENCE)
    assert couriers.statistics() == {"sent": 6, "pending": 0, "dropped": 0, "failed": 2, "lost": 2}
    couriers.close()
    joined("couriers-f")


def test_a_closed_courier_delivers_what_was_sent_and_serves_again() -> None:
    """G12: after `close` no thread is left; what is sent later is delivered all the same, and one at a time."""
    box = Mailbox()
    courier: Courier[int] = Courier((box,), name="courier-e")
    courier.close()
    box.gate.clear()
    courier.send(1)
    assert box.entered.wait(PATIENCE)
    courier.send(2)
    courier.close()
    courier.send(3)  # while the thread is still busy with the first
    box.gate.set()
    assert courier.flush(PATIENCE)
    assert box.got == [1, 2, 3]
    courier.close()
    joined("courier-e")
    courier.send(4)
    assert courier.flush(PATIENCE)
    assert box.got == [1, 2, 3, 4]
    assert box.most_inside == 1
    joined("courier-e")  # though nobody closes it a second time
    courier.close()
    assert courier.ended
    assert courier.flush(0)


def test_closing_and_sending_race() -> None:
    """G12: whoever sends while the thread is going is served, by it or by another, never by two at once and never by
    none.
    """
    box = Mailbox()
    courier: Courier[int] = Courier((box,), name="courier-f")
    for item in range(300):
        courier.send(item)
        courier.close()
    assert courier.flush(PATIENCE)
    assert box.got == list(range(300))
    assert box.most_inside == 1
    courier.close()
    joined("courier-f")


def test_what_a_going_thread_left_behind_is_served_once() -> None:
    """G12: an item that was queued as the thread went is found by the next flush; of two threads that could serve it,
    one does.
    """
    box = Mailbox()
    courier: Courier[int] = Courier((box,), name="courier-g")
    courier._queue.put(1)  # queued, and its sender has not looked for a thread yet
    assert courier.flush(PATIENCE)
    assert box.got == [1]
    courier._start()
    assert len(threads_named("courier-g")) == 1
    assert not courier._serve_again()
    courier.close()
    joined("courier-g")
    assert courier._serve_again()
