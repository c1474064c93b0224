"""kill -9 at random points of a batch, real processes: no call is lost, none runs twice unless that is harmless, and
every one of unknown effect is listed (S14, G1, G10, R-120).
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crashing import CALLS

import towerman
from towerman import Journal

SOURCE = str(Path(towerman.__file__).resolve().parents[1])
SCRIPT = str(Path(__file__).with_name("crashing.py"))
ONCE = ("pay", "pay_in_thread")


class Process:
    """One process on its way."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.lines: list[str] = []
        words = [sys.executable, SCRIPT, SOURCE, str(folder / "j.db"), str(folder / "effects"), seed]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", line + self.process.communicate()[1]

    def go(self) -> None:
        """Let it hand its batch in."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def wait_for(self, results: int, seconds: float) -> None:
        """Let it tell so many results, and then so much more time pass; it may be over before."""
        assert self.process.stdout is not None
        while len(self.lines) < results:
            line = self.process.stdout.readline()
            if not line:
                return
            self.lines.append(line)
        time.sleep(seconds)

    def end(self, *, kill: bool) -> list[dict[str, Any]]:
        """Kill it, or wait for it; the results that it was able to tell."""
        if kill:
            self.process.send_signal(signal.SIGKILL)
        assert self.process.stdout is not None and self.process.stderr is not None and self.process.stdin is not None
        lines = [*self.lines, *self.process.stdout.readlines()]  # of what was read ahead nothing is lost
        err = self.process.stderr.read()
        self.process.wait(timeout=120)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        if not kill:
            assert self.process.returncode == 0, err
            assert lines[-1] == "done\n"
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


def effects(folder: Path) -> Counter[tuple[str, int]]:
    """How often each call did something to the world; each with one key, however often it ran."""
    found: Counter[tuple[str, int]] = Counter()
    keys: dict[tuple[str, int], str] = {}
    path = folder / "effects"
    for line in path.read_text().splitlines() if path.exists() else ():
        tool, n, key = line.split()
        found[tool, int(n)] += 1
        assert keys.setdefault((tool, int(n)), key) == key, f"{tool} {n} got two keys"
    return found


def look(folder: Path, told: list[list[dict[str, Any]]]) -> None:
    """What must hold after every death: nothing ran twice that must not, and what was told stays true."""
    done = effects(folder)
    again = {call: count for call, count in done.items() if call[0] in ONCE and count > 1}
    assert not again, f"run more than once: {again}"
    known: dict[int, dict[str, Any]] = {}
    for result in (one for results in told for one in results):
        before = known.get(result["index"])
        if before is not None and before["outcome"] == "ok":
            assert result["outcome"] == "ok" and result["content"] == before["content"], (before, result)
        known[result["index"]] = result
        if result["tool"] in ONCE:
            ran = done[result["tool"], result["index"]]
            if result["outcome"] == "ok":
                assert ran == 1, result
            elif result["applied"] == "no":
                assert ran == 0, result


def trial(folder: Path, chance: random.Random) -> int:
    """One batch: handed in, killed, handed in again, until one process comes to its end; how many were killed."""
    told: list[list[dict[str, Any]]] = []
    killed = 0
    for _ in range(chance.choice((1, 1, 2, 3))):
        two = chance.random() < 0.3  # at the same time: one joins what the other is at, and one of them dies
        processes = [Process(folder, str(chance.random())) for _ in range(1 + two)]
        for process in processes:
            process.go()
        # Before anything of it, or after so many of its results and a little more.
        processes[0].wait_for(chance.randrange(-1, CALLS - 1), chance.uniform(0.0, 0.012))
        told.append(processes[0].end(kill=True))
        killed += 1
        told += [process.end(kill=False) for process in processes[1:]]
        look(folder, told)
    last = Process(folder, str(chance.random()))
    last.go()
    results = last.end(kill=False)
    told.append(results)
    look(folder, told)
    assert sorted(one["index"] for one in results) == list(range(CALLS)), "a call was lost"
    unknown = {one["index"] for one in results if one["applied"] == "unknown"}
    assert all(one["code"] == "effect_unknown" for one in results if one["index"] in unknown), results
    assert all(one["outcome"] == "ok" for one in results if one["index"] not in unknown), results
    assert all(one["tool"] in ONCE for one in results if one["index"] in unknown), results
    with Journal(folder / "j.db") as journal:
        listed = {one.index for one in journal.unknown().result()}
        assert listed == unknown, "the list of unknown calls is not that of the results"
        counts = journal.counts().result()
        assert (counts["open"], counts["done"] + counts["unknown"]) == (0, CALLS)
        # And what a person settles is settled: what did not take effect runs, once.
        done = effects(folder)
        for record in journal.unknown().result():
            ran = done[record.tool, record.index]
            journal.settle(record.number, applied=bool(ran)).result()
    after = Process(folder, "settled")
    after.go()
    results = after.end(kill=False)
    assert all(one["outcome"] == "ok" and one["applied"] != "unknown" for one in results)
    once = {call: count for call, count in effects(folder).items() if call[0] in ONCE}
    assert set(once.values()) == {1} and len(once) == sum(one["tool"] in ONCE for one in results)
    return killed


def kills(folder: Path, most: int, seed: int) -> None:
    """Trials until so many processes were killed."""
    chance = random.Random(seed)
    killed = number = 0
    while killed < most:
        number += 1
        place = folder / str(number)
        place.mkdir()
        try:
            killed += trial(place, chance)
        except BaseException as failure:
            failure.add_note(f"seed {seed}, trial {number}, after {killed} kills; the files are in {place}")
            raise


def test_s14_kill_9_at_random_points(tmp_path: Path) -> None:
    """S14, G10: killed a dozen times at random points of batches, real processes: no call is lost, none of unknown
    effect runs twice, each of them is listed, and what was told stays true.
    """
    kills(tmp_path, 12, random.randrange(10**9))


@pytest.mark.long
def test_s14_kill_9_two_hundred_times(tmp_path: Path) -> None:
    """S14, G10: the same, more than two hundred times."""
    kills(tmp_path, 220, random.randrange(10**9))
