"""kill -9 at random points of a plan, real processes and the command line: `--resume ID` goes on, nothing that must not
run twice does, what is unknown is listed, and the end is that of a run that nobody has disturbed (R-43, S14, G10).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crashing_plan import ONCE, STEPS, plan

import towerman
from towerman import Journal

SOURCE = str(Path(towerman.__file__).resolve().parents[1])
TOOLS = f"{Path(__file__).with_name('crashing_plan.py')}:tower"


class Trial:
    """One plan on its way, in a folder of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.plan = folder / "plan.json"
        self.plan.write_text(json.dumps(plan(seed)))
        self.journal = folder / "j.db"
        self.environ = {
            **os.environ,
            "PYTHONPATH": SOURCE,
            "EFFECTS": str(folder / "effects"),
            "JOURNAL": str(self.journal),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `towerman run`."""
        return subprocess.Popen(
            [sys.executable, "-m", "towerman", "run", "--tools", TOOLS, *words],
            env=self.environ, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def begin(self) -> subprocess.Popen[str]:
        return self.start(str(self.plan), "--run-id", "r")

    def resume(self) -> subprocess.Popen[str]:
        return self.start("--resume", "r")

    def end(self, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
        """Wait for its end; its results."""
        out, err = process.communicate(timeout=180)
        assert process.returncode in (0, 1), err
        results: list[dict[str, Any]] = json.loads(out)
        assert len(results) == STEPS, err
        assert (process.returncode == 0) == all(one["outcome"] == "ok" for one in results)
        return results

    def effects(self) -> list[tuple[str, int, str, str]]:
        path = self.folder / "effects"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(tool, int(n), key, told) for tool, n, key, told in map(str.split, lines)]

    def kill_at(self, process: subprocess.Popen[str], effects: int, seconds: float) -> bool:
        """Kill it once so many more effects are there and a little more time has passed; False: it was over before."""
        wanted = len(self.effects()) + effects
        while len(self.effects()) < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(seconds)
        alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        return alive and process.returncode == -signal.SIGKILL

    def look(self) -> None:
        """What must hold after every death: nothing ran twice that must not; one key, one set of values for each."""
        seen = self.effects()
        counts = Counter((tool, n) for tool, n, _, _ in seen)
        again = {call: count for call, count in counts.items() if call[0] in ONCE and count > 1}
        assert not again, f"run more than once: {again}"
        for kind in (2, 3):
            told: dict[tuple[str, int], str] = {}
            for one in seen:
                assert told.setdefault(one[:2], str(one[kind])) == one[kind], f"{one[:2]} got two keys or two values"

    def batches(self) -> list[Any]:
        with Journal(self.journal) as journal:
            return journal.batches().result()


def undisturbed(folder: Path, seed: int) -> tuple[list[dict[str, Any]], dict[tuple[str, int], str]]:
    """The results of the same plan where nobody kills anybody, and what each step was given."""
    trial = Trial(folder, seed)
    results = trial.end(trial.begin())
    assert all(one["outcome"] == "ok" for one in results)
    return results, {(tool, n): told for tool, n, _, told in trial.effects()}


def go(folder: Path, seed: int, chance: random.Random) -> int:
    """One plan: begun, killed, gone on with, killed again, until it ends; how many processes were killed."""
    expected, given = undisturbed(folder.with_name(f"{folder.name}-whole"), seed)
    trial = Trial(folder, seed)
    killed = 0
    for attempt in range(chance.choice((1, 2, 2, 3))):
        begun = [one for one in trial.batches() if one.run_id == "r"] if attempt else []
        first = trial.resume() if begun else trial.begin()  # killed before it was written down: handed in again
        second = trial.resume() if begun and chance.random() < 0.4 else None  # waits, and takes the place of the first
        killed += trial.kill_at(first, chance.randrange(0, STEPS // 2), chance.uniform(0.0, 0.02))
        if second is not None:
            if chance.random() < 0.5:
                killed += trial.kill_at(second, chance.randrange(0, STEPS // 2), chance.uniform(0.0, 0.02))
            else:
                trial.end(second)
        trial.look()
    results = trial.end(trial.resume() if trial.batches() else trial.begin())
    trial.look()
    unknown = {index for index, one in enumerate(results) if one["code"] == "effect_unknown"}
    assert all(expected[index]["tool"] in ONCE for index in unknown)
    # What waits for an unknown one is skipped and names a culprit; all else has ended as ever.
    for index, one in enumerate(results):
        assert one["outcome"] == "ok" or index in unknown or one["code"] == "dependency_failed", one
    with Journal(trial.journal) as journal:
        listed = journal.unknown().result()
        assert {one.index for one in listed} == unknown, "the list of unknown calls is not that of the results"
        done = Counter((tool, n) for tool, n, _, _ in trial.effects())
        settled = {one.index for one in listed if done[one.tool, one.index]}
        for one in listed:
            journal.settle(one.number, applied=one.index in settled).result()
    after = trial.end(trial.resume())
    trial.look()
    for index, one in enumerate(after):
        assert one["outcome"] == "ok", one
        assert one["content"] == expected[index]["content"] or index in settled, (one, expected[index])
    assert {(tool, n): told for tool, n, _, told in trial.effects()} == given
    assert {call for call, count in Counter(one[:2] for one in trial.effects()).items() if call[0] in ONCE} == {
        call for call in given if call[0] in ONCE
    }
    before = trial.effects()
    assert [one["content"] for one in trial.end(trial.resume())] == [one["content"] for one in after]
    assert trial.effects() == before, "a plan that has ended runs nothing"
    (kept,) = trial.batches()
    assert (kept.state, kept.ok, kept.size) == ("ended", STEPS, STEPS)
    return killed


def kills(folder: Path, most: int, seed: int) -> None:
    """Plans until so many processes were killed."""
    chance = random.Random(seed)
    killed = number = 0
    while killed < most:
        number += 1
        try:
            killed += go(folder / str(number), chance.randrange(10**9), chance)
        except BaseException as failure:
            failure.add_note(
                f"seed {seed}, plan {number}, after {killed} kills; the files are in {folder / str(number)}"
            )
            raise


def test_r43_kill_9_at_random_points_of_a_plan(tmp_path: Path) -> None:
    """R-43, S14, G10: killed some times at random points, `--resume ID` goes on: no effect twice, what is unknown is
    listed, and once that is settled the plan ends as if nobody had disturbed it.
    """
    kills(tmp_path, 4, random.randrange(10**9))


@pytest.mark.long
def test_r43_kill_9_fifty_times(tmp_path: Path) -> None:
    """R-43, S14, G10: the same, more than fifty times."""
    kills(tmp_path, 55, random.randrange(10**9))
