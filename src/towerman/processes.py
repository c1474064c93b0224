"""Worker processes for handlers that compute: spawned when needed, used again, killed when told to stop.

Theory. A handler that computes holds the interpreter's lock and cannot be stopped. In a process of its own it does
neither: the worker thread that stands for the call waits on a pipe, and whoever gives the call up kills the process,
so its work has really ended. A process that dies in the middle is a failure of that call, not of this program.

A process gets the handler by its name (module and qualified name) and the arguments by pickling; it sends back the
value or the error, pickled. Processes are spawned, never forked: a fork would copy locks that other threads hold.

House rules. Nothing here decides anything. Every process is a daemon: it ends with this program, also when this
program is killed.

Not here: which call may run (gate), what its end means (runner).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Hashable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

from towerman.tools import Address

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

MOST_IDLE: Final = max(4, os.cpu_count() or 1)
"""Idle processes that are kept."""


class ProcessEnded(Exception):
    """The process of a call has ended before it answered."""


class RemoteError(Exception):
    """Stands for an error of a process that could not be sent over: its class is named like that error's."""


class _Worker:
    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs,), name=name, daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.pipe.close()  # which ends it


class Processes:
    """Spawned processes, one for each call at work, and some idle ones.

    Args:
        name: prefix of the processes' names.
    """

    __slots__ = ("_busy", "_closed", "_idle", "_lock", "_made", "_name")

    def __init__(self, name: str = "towerman-process") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: dict[Hashable, _Worker] = {}
        self._made = 0
        self._closed = False

    def call(
        self, job: Hashable, handler: Address, keywords: Mapping[str, object], given_up: Callable[[], bool]
    ) -> object:
        """Run a handler in a process and wait for it; on a worker thread.

        Args:
            job: by which `kill` knows it.
            handler: its module and qualified name.
            keywords: its arguments.
            given_up: was the call given up before there was a process to kill?

        Raises:
            ProcessEnded: the process was killed, or died.
            BaseException: what the handler raised; a RemoteError named like it where that cannot be sent.
        """
        request = pickle.dumps((handler, dict(keywords)))
        worker = self._take()
        with self._lock:
            self._busy[job] = worker
        good = False
        try:
            if given_up():
                raise ProcessEnded("it was given up")
            try:
                worker.pipe.send_bytes(request)
                answer = worker.pipe.recv_bytes()
            except (EOFError, OSError):
                worker.process.join(1)
                raise ProcessEnded(_how(worker.process.exitcode)) from None
            good = True
        finally:
            with self._lock:
                del self._busy[job]
                keep = good and not self._closed and len(self._idle) < MOST_IDLE
                if keep:
                    self._idle.append(worker)
            if not keep:
                if not good:
                    worker.kill()
                worker.close()
        return _opened(answer)

    def _take(self) -> _Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
                self._made += worker is None
                number = self._made
            if worker is None:
                return _Worker(f"{self._name}-{number}")
            if worker.process.is_alive():
                return worker
            worker.close()

    def kill(self, job: Hashable) -> None:
        """End the process that works for a job, if there is one."""
        with self._lock:
            worker = self._busy.get(job)
            if worker is not None:
                worker.kill()

    def close(self) -> None:
        """End idle processes; busy ones end after their work. Does not wait."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    def statistics(self) -> dict[str, int]:
        """Processes at work, and idle."""
        with self._lock:
            return {"busy": len(self._busy), "idle": len(self._idle)}


def _how(code: int | None) -> str:
    if code is None:
        return "it did not answer"
    if code < 0:
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"
    return f"it ended with exit code {code}"


def _opened(answer: bytes) -> object:
    good, name, load = pickle.loads(answer)
    try:
        value = pickle.loads(load) if load is not None else None
    except Exception:
        value = None if good else RemoteError
        if good:
            raise type("UnpicklingError", (RemoteError,), {})() from None
    if good:
        return value
    if isinstance(value, Exception):  # an exit there ends nothing here
        raise value
    raise type(name, (RemoteError,), {})()


# ------------------------------------------------------------------ in the process


def _serve(pipe: Connection) -> None:
    """Answer requests until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that waits
    threading.Thread(target=_end_with_parent, name="towerman-parent", daemon=True).start()
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(_answer(request))


def _end_with_parent() -> None:
    """A program that was killed cannot end its processes, and one that computes does not look at its pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(request: bytes) -> bytes:
    try:
        (module, name), keywords = pickle.loads(request)
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)
        value = found(**keywords)
        return pickle.dumps((True, "", pickle.dumps(value)))
    except BaseException as error:  # an exit too: it is an answer, and the process can be used again
        name = type(error).__name__
        try:
            load = pickle.dumps(error)
        except Exception:
            load = None
        return pickle.dumps((False, name, load))
