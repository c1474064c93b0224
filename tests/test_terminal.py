"""`ask_terminal`, and `towerman run` at a terminal: real pseudo-terminals, and none at all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import towerman.terminal
from towerman import ApprovalRequest, Approved, Call, Denied, Tower, ask_terminal
from towerman.cli import main as command
from towerman.terminal import Clerk, Terminal, ask, open_terminal, told, understood, visible

pty = pytest.importorskip("pty")

SECONDS = 20.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(towerman.terminal.__file__).parent.parent)}


def request(name: str = "apr_1", **arguments: Any) -> ApprovalRequest:
    """A call that waits."""
    return ApprovalRequest(name, "refund", "run-1", "c1", "d" * 32, 60.0, arguments or {"order": 5})


class Person:
    """Sits at a pseudo-terminal.

    Attributes:
        screen: what was shown.
        opened: opens the terminal for a clerk.
    """

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.screen = ""
        self._there = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                raw = os.read(self.master, 4096)
            except OSError:
                return
            if not raw:
                return
            with self._there:
                self.screen += raw.decode()
                self._there.notify_all()

    def sees(self, text: str, count: int = 1) -> None:
        """Wait until a text is there so often."""
        with self._there:
            assert self._there.wait_for(lambda: self.screen.count(text) >= count, SECONDS), self.screen

    def types(self, text: str) -> None:
        """Type a line."""
        os.write(self.master, text.encode() + b"\n")

    def opened(self) -> Terminal:
        """The terminal, as a clerk is given it."""
        return Terminal(os.dup(self.slave), owned=True)

    def leave(self) -> None:
        """The terminal is gone."""
        os.close(self.slave)
        os.close(self.master)


@pytest.fixture
def person() -> Iterator[Person]:
    made = Person()
    yield made
    made.leave()


def answered(person: Person, *lines: str) -> Approved | Denied | None:
    """What comes of a question when these lines are typed, one for each prompt."""

    async def main() -> Approved | Denied | None:
        asking = asyncio.ensure_future(ask(Clerk(person.opened), request()))
        for number, line in enumerate(lines, 1):
            await asyncio.to_thread(person.sees, "or say why not: ", number)
            person.types(line)
        return await asyncio.wait_for(asking, SECONDS)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("lines", "decision"),
    [
        (["y"], Approved()),
        (["  YES "], Approved()),
        (["n"], Denied()),
        (["no"], Denied()),
        (["not on  a Friday"], Denied("not on a Friday")),
        (["", "  ", "y"], Approved()),
        (["l"], None),
        (["later"], None),
    ],
)
def test_a_person_answers(person: Person, lines: list[str], decision: Any) -> None:
    """API section 2: yes, no, a reason, later; a blank line is no answer, and it is asked again."""
    assert answered(person, *lines) == decision
    assert "A call waits for approval: refund  (call c1 of run run-1)" in person.screen
    assert '"order": 5' in person.screen
    assert "for another 60 s" in person.screen


def test_the_end_of_the_input_is_no_answer(person: Person) -> None:
    """Ctrl-D leaves the call pending."""

    async def main() -> Any:
        asking = asyncio.ensure_future(ask(Clerk(person.opened), request()))
        await asyncio.to_thread(person.sees, "or say why not: ")
        os.write(person.master, b"\x04")
        return await asyncio.wait_for(asking, SECONDS)

    assert asyncio.run(main()) is None


def test_questions_come_one_at_a_time_and_the_loop_goes_on(person: Person) -> None:
    """One question is on the screen at a time, in order, and the loop has its turns meanwhile."""

    async def main() -> list[Any]:
        clerk = Clerk(person.opened)
        asking = [asyncio.ensure_future(ask(clerk, request(f"apr_{n}", n=n))) for n in range(3)]
        turns = 0
        for n in range(3):
            await asyncio.to_thread(person.sees, "or say why not: ", n + 1)
            for _ in range(10):
                await asyncio.sleep(0)
                turns += 1
            assert person.screen.count("A call waits") == n + 1
            assert f'"n": {n}' in person.screen
            person.types("y" if n != 1 else "no thanks")
        assert turns == 30
        return await asyncio.gather(*asking)

    assert asyncio.run(main()) == [Approved(), Denied("no thanks"), Approved()]


def test_a_question_that_is_cancelled_is_withdrawn(person: Person) -> None:
    """S16: on the screen or waiting for its turn: the next question comes, and gets its own answer."""

    async def main() -> Any:
        clerk = Clerk(person.opened)
        first, second, third = [asyncio.ensure_future(ask(clerk, request(f"apr_{n}", n=n))) for n in range(3)]
        await asyncio.to_thread(person.sees, "or say why not: ")
        second.cancel()
        first.cancel()
        for one in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await one
        await asyncio.to_thread(person.sees, "(not asked any more)")
        await asyncio.to_thread(person.sees, "or say why not: ", 2)
        assert '"n": 1' not in person.screen
        person.types("y")
        return await asyncio.wait_for(third, SECONDS)

    assert asyncio.run(main()) == Approved()


def test_a_terminal_that_is_gone_answers_nothing() -> None:
    """A terminal that closes, or cannot be opened, leaves calls pending; the clerk goes on."""
    answers: list[Any] = []

    def broken() -> Terminal:
        raise OSError

    made = Person()

    def closed() -> Terminal:
        fd = os.dup(made.slave)
        os.close(fd)
        return Terminal(fd, owned=False)

    for opened in (broken, closed, lambda: None):
        answers.append(asyncio.run(asyncio.wait_for(ask(Clerk(opened), request()), SECONDS)))
    made.leave()
    assert answers == [None, None, None]


def test_no_thread_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no thread nobody is asked."""

    class NoThread:
        def __init__(self, **_: object) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(towerman.terminal.threading, "Thread", NoThread)
    assert asyncio.run(ask(Clerk(lambda: None), request())) is None


def test_a_loop_that_is_gone_is_not_answered(person: Person) -> None:
    """The loop that asked was closed over its question: nothing fails."""
    loop = asyncio.new_event_loop()
    clerk = Clerk(person.opened)
    asking = ask(clerk, request())
    task = loop.create_task(asking)
    loop.run_until_complete(asyncio.sleep(0))
    person.sees("or say why not: ")
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    person.sees("(not asked any more)")


def test_what_a_model_wrote_is_shown_as_it_is() -> None:
    """A person sees what would run: escapes, control characters and turned letters are shown, not obeyed."""
    shown = told(request(path="\x1b[2J\x9b1A‮txt.exe​", text="zwei\nZeilen, für Ænne"))
    assert "\x1b" not in shown
    assert not any(one in shown for one in "\x9b‮​")
    assert "\\u001b[2J" in shown
    assert "\\x9b1A\\u202etxt.exe\\u200b" in shown
    assert "zwei\\nZeilen, für Ænne" in shown
    assert visible("a\tb\r\n") == "a\\tb\\r\n"
    odd = ApprovalRequest("apr_1", "t", "r", "", "", 1.0, {"a": {1, 2}, "b": object()})
    assert "(run r)" in told(odd)


def test_words_are_understood() -> None:
    """Nothing that is not a yes is one."""
    assert understood("y") == (Approved(), True)
    for line in ("ye", "yes please", "ja", "Y.", "n", "0"):
        decision, heard = understood(line)
        assert heard
        assert isinstance(decision, Denied)
    assert understood(" \n") == (None, False)


RUN = """
import asyncio, sys
from towerman import Call, Tower, ask_terminal
tower = Tower()

@tower.tool(independent=True, requires_approval=True)
async def refund(order: int) -> str:
    return "paid back"

batch = asyncio.run(tower.execute([Call("refund", {"order": 5})], approver=ask_terminal))
print(batch[0].code or batch[0].outcome)
"""


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE, None])
def test_g12_without_a_terminal_nothing_hangs(stdin: Any) -> None:
    """G12: in CI, in a service, with stdin closed, empty or a pipe: the call comes back pending at once."""
    code = RUN if stdin is not None else "import sys; sys.stdin = None\n" + RUN
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=True,
        env=ENVIRONMENT,
    )
    assert done.stdout.strip() == "approval_missing"


def test_at_a_real_terminal(tmp_path: Path) -> None:
    """A process with a terminal of its own asks there, whatever its stdin and stdout are."""
    script = tmp_path / "script.py"
    script.write_text(RUN)
    pid, master = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        out = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execve(sys.executable, [sys.executable, str(script)], ENVIRONMENT)
    screen = b""
    while b"or say why not: " not in screen:
        screen += os.read(master, 4096)
    os.write(master, b"y\n")
    _, status = os.waitpid(pid, 0)
    os.close(master)
    assert status == 0
    assert (tmp_path / "out").read_text().strip() == "ok"


def test_a_job_in_the_background_asks_nobody(monkeypatch: pytest.MonkeyPatch, person: Person) -> None:
    """A process that does not run in the foreground of its terminal would be stopped by reading: it does not read."""
    monkeypatch.setattr(os, "open", lambda *_: os.dup(person.slave))
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
    assert open_terminal() is None
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
    terminal = open_terminal()
    assert terminal is not None
    terminal.close()

    def fails(fd: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "tcgetpgrp", fails)
    assert open_terminal() is None


def test_stdin_stands_in_for_a_terminal_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, person: Person) -> None:
    """Where there is no /dev/tty, stdin is asked if it is a terminal."""

    def none(*_: object) -> int:
        raise OSError

    monkeypatch.setattr(os, "open", none)
    with open(person.slave, closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stderr", stdin)
        terminal = open_terminal()
        assert terminal is not None
        terminal.close()
    assert open_terminal() is None, "it is closed"


# ==================================================================== the command line


TOOLS = """
from towerman import Tower
tower = Tower()

@tower.tool(independent=True, requires_approval=True)
async def refund(order: int) -> str:
    return f"paid back {order}"

@tower.tool(independent=True)
async def look() -> str:
    return "seen"
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tools and calls."""
    (tmp_path / "my_tools.py").write_text(TOOLS)
    calls = [{"tool": "refund", "arguments": {"order": n}, "id": f"c{n}"} for n in (1, 2)]
    (tmp_path / "calls.json").write_text(json.dumps([*calls, {"tool": "look"}]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    monkeypatch.setattr(towerman.terminal, "_CLERK", Clerk(lambda: None))
    return tmp_path


RUN_IT = ["run", "calls.json", "--tools", "my_tools.py"]


def test_run_without_a_terminal(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`towerman run`: nobody is there to ask: the calls are answered approval_missing, and that is said."""
    assert command(RUN_IT) == 1
    out, err = capsys.readouterr()
    assert [one["code"] for one in json.loads(out)] == ["approval_missing", "approval_missing", None]
    assert "nobody has approved refund" in err
    assert "--state FILE" in err


def test_run_keeps_what_is_left(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--state` writes the batch, which another process goes on with; stdout says what it waits for."""
    assert command([*RUN_IT, "--state", "kept.json"]) == 1
    out, err = capsys.readouterr()
    waiting = json.loads(out)["pending"]
    assert [(one["tool"], one["call_id"]) for one in waiting] == [("refund", "c1"), ("refund", "c2")]
    assert "kept.json" in err
    tower = Tower()

    @tower.tool(independent=True, requires_approval=True)
    async def refund(order: int) -> str:
        return f"paid back {order}"

    decisions = {waiting[0]["approval_id"]: Approved(), waiting[1]["approval_id"]: Denied("no")}
    done = asyncio.run(tower.run().resume((desk / "kept.json").read_text(), decisions))
    assert [one.code for one in done] == [None, "approval_denied", None]
    assert command([*RUN_IT, "--state", str(desk / "none" / "kept.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_run_asks_at_the_terminal(
    desk: Path, person: Person, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal each call is asked about once, when the others are done."""
    monkeypatch.setattr(towerman.terminal, "_CLERK", Clerk(person.opened))

    def sit() -> None:
        for number, line in enumerate(("y", "later"), 1):
            person.sees("or say why not: ", number)
            person.types(line)

    sitting = threading.Thread(target=sit)
    sitting.start()
    assert command(RUN_IT) == 1
    sitting.join()
    out = json.loads(capsys.readouterr().out)
    assert [one["code"] for one in out] == [None, "approval_missing", None]
    assert out[0]["content"] == "paid back 1"
    assert person.screen.count("A call waits for approval") == 2


def test_ask_terminal_is_public() -> None:
    """API section 2: `towerman.ask_terminal` is an approver."""
    assert ask_terminal is towerman.terminal.ask_terminal
    done = asyncio.run(_nobody())
    assert done == "approval_missing"


async def _nobody() -> str | None:
    tower = Tower()
    tower.add_tool(lambda: "ran", name="act", independent=True, requires_approval=True)
    clerk = Clerk(lambda: None)
    batch = await tower.execute([Call("act", {})], approver=lambda one: ask(clerk, one))
    return batch[0].code
