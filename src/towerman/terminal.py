"""`ask_terminal`: a person at the terminal decides about calls.

Theory. The terminal is one for the whole process, and its reader blocks. So one thread asks one question after another,
whichever loops they come from, and each answer goes back to the loop that waits for it. A question that nobody waits
for any more, since its time is over or its batch was cancelled, is withdrawn, also while it is on the screen.

This is the one place where Towerman shows arguments: to the person who decides. They come from a model, so whatever is
no printable character is shown as its escape: text that moves the cursor or turns letters round could make one call
look like another one.

House rules. Where there is no terminal, or the process is not in its foreground (a job in the background would be
stopped by reading), nobody is asked: the call comes back pending. Nothing waits for a person who is not there.

Not here: how long an answer is waited for (runner), what follows from it (approvals).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from towerman.adapters.writing import plain_object
from towerman.approvals import ApprovalRequest, Approved, Decision, Denied

YES: Final = frozenset({"y", "yes"})
NO: Final = frozenset({"n", "no"})
LATER: Final = frozenset({"l", "later"})

MOST_READ: Final = 4096
"""Bytes of an answer that are read."""


class Terminal:
    """A terminal that a person sits at.

    Args:
        fd: of an open terminal.
        owned: it was opened for this, and is closed afterwards.
    """

    def __init__(self, fd: int, *, owned: bool) -> None:
        self._fd = fd
        self._owned = owned

    def write(self, text: str) -> None:
        """Show text."""
        raw = text.encode(getattr(sys.stdout, "encoding", None) or "utf-8", "backslashreplace")
        fd = self._fd if self._owned else 2
        while raw:
            raw = raw[os.write(fd, raw) :]

    def read(self, wake: int) -> str | None:
        """The next line; None at the end of the input, or when something can be read from `wake`."""
        from select import select

        with suppress(OSError, ValueError):  # what cannot be waited for, as on Windows, is read all the same
            ready, _, _ = select([self._fd, wake], [], [])
            if wake in ready:
                return None
        raw = os.read(self._fd, MOST_READ)
        return raw.decode("utf-8", "replace") if raw else None

    def close(self) -> None:
        """Give it back."""
        if self._owned:
            os.close(self._fd)


def open_terminal() -> Terminal | None:
    """The terminal of this process, if there is one and the process may read from it."""
    try:
        terminal = Terminal(os.open("/dev/tty", os.O_RDWR | getattr(os, "O_NOCTTY", 0)), owned=True)
    except OSError:
        try:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                return None
            return Terminal(sys.stdin.fileno(), owned=False)
        except (AttributeError, OSError, ValueError):  # closed, or put in place by somebody
            return None
    try:
        if os.tcgetpgrp(terminal._fd) == os.getpgrp():
            return terminal
    except OSError:
        pass
    terminal.close()
    return None


class Question:
    """One question and its answer.

    Args:
        request: what is asked.
        answer: takes the answer; called on the asking thread, at most once.
    """

    def __init__(self, request: ApprovalRequest, answer: Callable[[Decision | None], None]) -> None:
        self.request = request
        self.answer = answer
        self.withdrawn = False
        self.wake, self._waker = os.pipe()
        self._lock = threading.Lock()
        self._over = False

    def withdraw(self) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:  # the pipe's numbers may be somebody else's once it is closed
            self.withdrawn = True
            if not self._over:
                os.write(self._waker, b"x")

    def close(self) -> None:
        """It is over."""
        with self._lock:
            self._over = True
            os.close(self.wake)
            os.close(self._waker)


class Clerk:
    """Asks one question after another, on a thread that is there while there are some.

    Args:
        opened: opens the terminal, or returns None.
    """

    def __init__(self, opened: Callable[[], Terminal | None]) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        self._questions: deque[Question] = deque()
        self._busy = False

    def put(self, question: Question) -> None:
        """Ask it when its turn comes.

        Raises:
            RuntimeError: the system gives no thread.
        """
        with self._lock:
            if not self._busy:
                threading.Thread(target=self._work, name="towerman-terminal", daemon=True).start()
                self._busy = True
            self._questions.append(question)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._questions:
                    self._busy = False
                    return
                question = self._questions.popleft()
            answer: Decision | None = None
            try:
                if not question.withdrawn:
                    answer = self._ask(question)
            except Exception:  # a terminal that is gone: nobody has answered
                answer = None
            question.close()
            question.answer(answer)

    def _ask(self, question: Question) -> Decision | None:
        terminal = self._opened()
        if terminal is None:
            return None
        try:
            terminal.write(told(question.request))
            while True:
                terminal.write("Run it? [y]es, [n]o, [l]ater, or say why not: ")
                line = terminal.read(question.wake)
                if line is None:
                    terminal.write("\n(not asked any more)\n" if question.withdrawn else "\n")
                    return None
                answer, heard = understood(line)
                if heard:
                    return answer
        finally:
            terminal.close()


def understood(line: str) -> tuple[Decision | None, bool]:
    """What a person has typed, and whether it was an answer at all."""
    text = " ".join(line.split())
    word = text.casefold()
    if not text:
        return None, False
    if word in YES:
        return Approved(), True
    if word in LATER:
        return None, True
    return Denied("" if word in NO else text), True


def told(request: ApprovalRequest) -> str:
    """A request for the person who decides, with its arguments."""
    arguments = json.dumps(plain_object(request.arguments), indent=2, ensure_ascii=False)
    call = f"call {request.call_id} of run {request.run_id}" if request.call_id else f"run {request.run_id}"
    return (
        f"\nA call waits for approval: {visible(request.tool)}  ({visible(call)})\n"
        f"{visible(arguments)}\n"
        f"It can be decided for another {request.expires_in:.0f} s.\n"
    )


def visible(text: str) -> str:
    """Text in which everything can be seen: what is not printable is shown as its escape, line breaks stay."""
    return "".join(one if one == "\n" or one.isprintable() else one.encode("unicode_escape").decode() for one in text)


_CLERK: Final = Clerk(open_terminal)


async def ask_terminal(request: ApprovalRequest) -> Approved | Denied | None:
    """An approver that asks the person at the terminal: `tower.run(approver=ask_terminal)`.

    It shows the tool and its arguments, and reads a line: `y` runs the call, `n` does not, anything else does not and
    is told to the model as the reason, `l` or the end of the input leaves it pending. Questions come one at a time. The
    event loop goes on meanwhile.

    Args:
        request: what is asked.

    Returns:
        The decision. None where there is no terminal, or the process does not run in its foreground.

    Raises:
        asyncio.CancelledError: nobody waits for the answer any more; the question was withdrawn.
    """
    return await ask(_CLERK, request)


async def ask(clerk: Clerk, request: ApprovalRequest) -> Approved | Denied | None:
    """Have a question asked and wait for the answer.

    Args:
        clerk: asks.
        request: what is asked.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Decision | None] = loop.create_future()

    def arrived(decision: Decision | None) -> None:
        if not answered.done():
            answered.set_result(decision)

    def answer(decision: Decision | None) -> None:
        with suppress(RuntimeError):  # the loop is gone, and nobody waits there
            loop.call_soon_threadsafe(arrived, decision)

    question = Question(request, answer)
    try:
        clerk.put(question)
    except RuntimeError:  # no thread: nobody can be asked
        question.close()
        return None
    try:
        return await answered
    except asyncio.CancelledError:
        question.withdraw()
        raise
