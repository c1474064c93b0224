"""Handlers in processes of their own: killed when they are given up, a crash is a result, nothing is left behind.

The processes are real; the order of events decides, and nothing here measures time. A handler says that it has begun by
making a file.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import PATIENCE, until, whole_again

from towerman import Call, Context, PolicyError, RateLimited, Result, Retry, ToolError, Tower

# ------------------------------------------------------------------ what runs in the processes


def square(n: int) -> int:
    """The square."""
    return n * n


def where(_: int = 0) -> int:
    """The process it runs in."""
    return os.getpid()


def begin_and_wait(mark: str) -> None:
    """Say so, then compute for ever."""
    Path(mark).write_text(str(os.getpid()))
    while True:
        pass


def die(how: str) -> None:
    """End the process in the middle."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def leave() -> None:
    """What a script does to end."""
    sys.exit(0)


def flaky(marks: str) -> int:
    """Lose what it talks to twice, then answer how often it was called."""
    count = len(list(Path(marks).iterdir()))
    Path(marks, str(count)).write_text(str(os.getpid()))
    if count == 0:
        raise ConnectionResetError
    if count == 1:
        raise RateLimited("0.01")
    return count + 1


def late_once(marks: str) -> int:
    """Compute for ever when it is called first."""
    count = len(list(Path(marks).iterdir()))
    Path(marks, str(count)).write_text(str(os.getpid()))
    while count == 0:
        pass
    return count + 1


class Odd(Exception):
    """An error that cannot be sent over."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)


def fail(how: str) -> Any:
    """Fail in one way or another."""
    if how == "plain":
        raise KeyError("S3CRET")
    if how == "told":
        raise ToolError("no such order", applied="no")
    if how == "odd":
        raise Odd(threading.Lock())
    return threading.Lock()


def tower_of_processes(**options: Any) -> Tower:
    """A tower with all of them."""
    tower = Tower(**options)
    for handler in (square, where, begin_and_wait, die, leave, fail):
        tower.add_tool(handler, run_in="process", independent=True)
    return tower


@pytest.fixture
def tower() -> Iterator[Tower]:
    made = tower_of_processes(max_concurrency=3, grace=PATIENCE)
    yield made
    whole_again(made)
    made.close()
    processes = made._core.processes
    until(lambda: processes.statistics() == {"busy": 0, "idle": 0})


def run(tower: Tower, *calls: Call) -> tuple[Result, ...]:
    """One batch."""
    return tower.execute_sync(list(calls))[:]


# ------------------------------------------------------------------ answers


def test_values_come_back_in_order_and_processes_are_used_again(tower: Tower) -> None:
    """R-84: values of processes are results like any other; a process serves one call after another."""
    done = run(tower, *(Call("square", {"n": n}) for n in range(10)))
    assert [one.value for one in done] == [n * n for n in range(10)]
    pids = {one.value for _ in range(2) for one in run(tower, *[Call("where", {})] * 6)}
    assert os.getpid() not in pids
    assert len(pids) <= 3


@pytest.mark.parametrize(
    ("how", "told", "applied"),
    [
        ("plain", "The tool failed with KeyError.", "unknown"),
        ("told", "no such order", "no"),
        ("odd", "The tool failed with Odd.", "unknown"),
        ("unsendable", "The tool failed with TypeError.", "unknown"),
    ],
)
def test_errors_of_processes_are_told_like_any_other(tower: Tower, how: str, told: str, applied: str) -> None:
    """R-109, G8: an error, also one that cannot be sent over, is told by its type; a ToolError by its words."""
    (result,) = run(tower, Call("fail", {"how": how}))
    assert (result.code, result.message, result.applied) == ("handler_error", told, applied)
    assert "S3CRET" not in result.content


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_a_crash_is_a_result(tower: Tower, how: str) -> None:
    """R-84: a process that dies in the middle costs its call and nobody else."""
    died, *others = run(tower, Call("die", {"how": how}), Call("square", {"n": 2}), Call("square", {"n": 3}))
    assert (died.code, died.applied, died.still_running) == ("handler_error", "unknown", False)
    assert died.message == "The tool failed with ProcessEnded."
    assert ("SIGKILL" if how == "killed" else "exit code 3") in str(died.exception)
    assert [one.value for one in others] == [4, 9]


def test_an_exit_in_a_process_ends_no_other(tower: Tower) -> None:
    """R-84: `sys.exit` in a process of its own is a failure of that call; this program goes on."""
    left, square_ = run(tower, Call("leave", {}), Call("square", {"n": 2}))
    assert (left.code, left.message) == ("handler_error", "The tool failed with SystemExit.")
    assert square_.ok


# ------------------------------------------------------------------ giving up


def alive(pid: int) -> bool:
    """Is there such a process, one that has not ended?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("how", ["cancel the run", "cancel the call", "cancel the caller"])
def test_g7_giving_up_kills_the_process(tower: Tower, tmp_path: Path, how: str) -> None:
    """G7, R-80: a cancelled call in a process has really ended when its result is sealed, and its slot is free."""
    mark = tmp_path / "begun"

    async def main() -> None:
        async with tower.run() as run:
            task = asyncio.ensure_future(run.execute([Call("begin_and_wait", {"mark": str(mark)})]))
            async with asyncio.timeout(PATIENCE):
                while not (mark.exists() and mark.read_text()):
                    await asyncio.sleep(0)
                pid = int(mark.read_text())
                assert alive(pid)
                if how == "cancel the run":
                    run.cancel("enough")
                elif how == "cancel the call":
                    run.cancel("enough", index=0)
                else:
                    task.cancel()
                await asyncio.wait([task])
            assert run.last_batch is not None
            (result,) = run.last_batch
            assert (result.code, result.still_running, result.applied) == ("cancelled", False, "unknown")
            assert tower.statistics().orphans == 0
            until(lambda: not alive(pid))
            assert (await run.execute([Call("square", {"n": 2})])).ok

    asyncio.run(main())


def test_a_timeout_kills_the_process(tmp_path: Path) -> None:
    """G7, S2: so does a timeout; the next call gets a new process."""
    tower = Tower(grace=PATIENCE)
    tower.add_tool(begin_and_wait, run_in="process", independent=True, timeout=0.5)
    tower.add_tool(square, run_in="process", independent=True)
    mark = tmp_path / "begun"
    (result,) = run(tower, Call("begin_and_wait", {"mark": str(mark)}))
    assert (result.code, result.still_running) == ("handler_timeout", False)
    assert run(tower, Call("square", {"n": 3}))[0].value == 9
    whole_again(tower)
    tower.close()


def test_a_killed_program_leaves_no_process(tmp_path: Path) -> None:
    """G7: kill -9 of the program while a process of it computes: that one ends, too."""
    mark = tmp_path / "begun"
    code = """if True:
        import sys
        from test_processes import begin_and_wait
        from towerman import Call, Tower
        if __name__ == "__main__":
            tower = Tower()
            tower.add_tool(begin_and_wait, run_in="process", independent=True)
            tower.execute_sync([Call("begin_and_wait", {"mark": sys.argv[1]})])
    """
    script = tmp_path / "program.py"
    script.write_text(code)
    here = Path(__file__).resolve().parent
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent / 'src'}"}
    program = subprocess.Popen([sys.executable, str(script), str(mark)], env=env)
    try:
        until(lambda: mark.exists() and mark.read_text())
        pid = int(mark.read_text())
        assert alive(pid)
    finally:
        program.kill()
        program.wait()
    until(lambda: not alive(pid))


# ------------------------------------------------------------------ declaring


class Methods:
    """Has one."""

    def work(self) -> int:
        """Work."""
        return 1


async def coroutine() -> int:
    """Not for a process."""
    return 1


def with_context(ctx: Context[None]) -> int:
    """Wants what no process has."""
    return 1


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (Methods().work, "top of a module"),
        (functools.partial(square, 1), "top of a module"),
        (coroutine, "coroutine function"),
        (with_context, "'ctx'"),
    ],
)
def test_what_cannot_run_in_a_process_is_told_at_its_declaration(handler: Any, told: str) -> None:
    """R-51: a handler that another process cannot import, or that wants a Context, is refused by name and with the
    fix.
    """
    with pytest.raises(PolicyError, match=f"tool 'x': run_in=\"process\": .*{told}"):
        Tower().add_tool(handler, name="x", run_in="process")

    def local() -> int:
        return 1

    with pytest.raises(PolicyError, match="top of a module"):
        Tower().add_tool(local, run_in="process")


def test_s9_attempts_in_processes(tmp_path: Path) -> None:
    """S9: what is raised in a process is judged as anywhere, retry_after included; each attempt is a new one there."""
    tower = Tower()
    tower.add_tool(
        flaky, independent=True, read_only=True, run_in="process", retry=Retry(3, initial_delay=0.01, max_delay=0.1)
    )
    (result,) = asyncio.run(tower.execute([Call("flaky", {"marks": str(tmp_path)})]))
    assert (result.value, result.attempts) == (3, 3)
    whole_again(tower)
    tower.close()


def test_s9_a_process_that_ran_out_of_time_has_ended(tmp_path: Path) -> None:
    """S9: a process is killed when its time is over, so its attempt has ended, and another one may follow."""
    tower = Tower()
    tower.add_tool(
        late_once, independent=True, read_only=True, run_in="process", timeout=2, retry=Retry(9, initial_delay=0.01)
    )
    (result,) = asyncio.run(tower.execute([Call("late_once", {"marks": str(tmp_path)})]))
    assert result.value == 2  # at the second attempt, or later where a process did not even begin in time
    assert result.attempts >= 2
    whole_again(tower)
    tower.close()
