"""Measure the goals and print the table.

    python -m benchmarks                      # everything; `make bench` does this
    python -m benchmarks --only F1 F4         # some goals
    python -m benchmarks --quick              # a smoke run: numbers that mean little
    python -m benchmarks --out samples.jsonl  # every sample as JSON lines

The table goes to stdout as Markdown, progress and what was left out to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import calls, imports, offload, peers, plans, report, waiting
from benchmarks.report import Row
from benchmarks.settings import QUICK, Settings

Goal = Callable[[Settings], Coroutine[Any, Any, list[Row]]]

GOALS: dict[str, Goal] = {
    "F1": calls.f1_queueing,
    "F2": calls.f2_no_op,
    "F3": calls.f3_whole_path,
    "F4": calls.f4_memory,
    "F5": waiting.f5_cancel,
    "F6": waiting.f6_stall,
    "F7": waiting.f7_sleeps,
    "F8": plans.f8_makespan,
    "F9": plans.f9_projects,
    "F10": plans.f10_overhead,
    "F11": offload.f11_threads,
    "F12": waiting.f12_bystander,
    "F16": imports.f16_import,
}


def measure(goals: list[str], settings: Settings, *, with_peers: bool) -> list[Row]:
    """Measure goals, each on a fresh event loop; rows in the order of the goals."""
    rows: list[Row] = []
    for name in goals:
        started = time.perf_counter()
        found = asyncio.run(GOALS[name](settings))
        report.note(f"{name}: {time.perf_counter() - started:.0f} s")
        for row in found:
            report.keep(settings.out, "row", report.row_record(row))
            report.note(report.line(row))
        rows += found
    if with_peers and not {"F3", "F7"}.isdisjoint(goals):
        found = [row for row in peers.elsewhere(settings) if row.goal in goals]
        for row in found:
            report.keep(settings.out, "row", report.row_record(row))
        rows += found
        rows.sort(key=lambda row: list(GOALS).index(row.goal))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 when everything ran, whether or not goals are met: a timing is told, never tested."""
    parser = argparse.ArgumentParser(
        description="Measure Towerman beside gather+Semaphore and the peers that are installed.",
        epilog="Compare ratios only, and only within one run.",
    )
    parser.add_argument("--only", nargs="+", choices=list(GOALS), metavar="GOAL", help=", ".join(GOALS))
    parser.add_argument("--rounds", type=int, help="rounds of every comparison; at least 9 for numbers to be told")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small amounts, numbers that mean little")
    parser.add_argument("--no-peers", action="store_true", help="install no frameworks into environments of their own")
    parser.add_argument("--out", type=Path, help="append every sample to this file as JSON lines")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    if given.rounds is not None:
        if given.rounds < 1:
            parser.error("--rounds: 1 or more")
        settings = replace(settings, rounds=given.rounds)
    settings = replace(settings, out=given.out)
    goals = [name for name in GOALS if given.only is None or name in given.only]
    report.keep(settings.out, "machine", report.machine())
    rows = measure(goals, settings, with_peers=not given.quick and not given.no_peers)
    print(f"{report.told_machine()}\n")
    print(report.HEAD)
    for row in rows:
        print(report.line(row))
    judged = [row.met for row in rows if row.met is not None]
    print(f"\n{sum(judged)} of {len(judged)} goals met; ratios of one interleaved run, median over its rounds.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
