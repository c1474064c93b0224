"""The layer contract: which file may import what, checked over every import, also those inside functions.

The table is the order of the rooms. A room imports only rooms above it, never a sibling of its own row; the pure
ones neither wait, nor read time, nor know a third party, apart from those named here. The sides (adapters,
journal, observers) reach pure rooms only; the doors (command line, demo, simulator, test kit) may import anything,
and nothing imports them. The test kit is for programs of users: it knows no third party either.
A file without a place in the table fails, so that a new room is placed on purpose.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "towerman"

PURE = (
    "errors clock calls rates+breaker+repeats+estimates budgets policy config retrying arguments+access placeholders "
    "tools changes bounds plan ledger watched lots waiting deadlock turns elsewhere gate pages tokens leftovers "
    "records documents approvals trace timeline+sealing explain+check+report"
)
ROWS = [
    row.split("+")
    for row in [*PURE.split(), "threads+processes+follow+store", "work", "core", "limits", "runner", "tower"]
]
ABOVE = {room: {above for row in ROWS[:index] for above in row} for index, row in enumerate(ROWS) for room in row}
SIDES = {
    "adapters": ABOVE["timeline"],
    "forms": ABOVE["timeline"] | {"adapters"},
    "engines": ABOVE["timeline"],
    "journal": ABOVE["timeline"],
    "observers": ABOVE["timeline"],
}
LAZY = {
    "work": {"adapters", "engines"},
    "core": {"engines", "journal"},
    "runner": {"engines", "journal"},
    "tower": {"adapters", "engines", "forms", "journal"},
}  # inside functions only, or for the type checker
DOORS = {"__init__", "__main__", "cli", "desk", "simulate", "terminal", "testing"}
# Loaded on first use, so inside functions only; griffe reads the docstrings of handlers.
THIRD_PARTY = {
    "policy": {"pydantic"},
    "arguments": {"griffe", "jsonschema_rs", "pydantic", "pydantic_core"},
    "engines": {"redis"},
}
LOOPS = {"runner", "engines"}  # rooms that know asyncio

WAITING = {"_thread", "anyio", "asyncio", "concurrent", "multiprocessing", "queue", "sched", "select", "selectors"}
OUTSIDE = {"importlib", "signal", "socket", "ssl", "subprocess"}
NOT_IN_PURE = WAITING | OUTSIDE | {"threading"}


class Import(NamedTuple):
    """One import statement's target."""

    module: str
    line: int
    lazy: bool


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every module that a file imports; `from package import submodule` counts as the submodule."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    inside = {id(node) for block in later for node in ast.walk(block)}
    package = ["towerman", *path.relative_to(root).parent.parts]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                below = root.joinpath(*base[1:], alias.name)
                deeper = base[0] == "towerman" and (below.with_suffix(".py").is_file() or below.is_dir())
                names.append(".".join([*base, alias.name] if deeper else base))
        for name in names:
            yield Import(name, node.lineno, id(node) in inside)


def violations(root: Path) -> list[str]:
    """What in a package breaks the contract, one line each."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        room = where.parts[0].removesuffix(".py")
        if room not in ABOVE and room not in SIDES and room not in DOORS:
            found.append(f"{where}: has no place in the table")
            continue
        node = ".".join(["towerman", *where.with_suffix("").parts]).removesuffix(".__init__")
        graph[node] = set()
        for module, line, lazy in imports(path, root):
            top, *rest = module.split(".")
            if top == "towerman":
                graph[node].add(module)
                target = rest[0] if rest else "__init__"
                allowed = ABOVE.get(room, SIDES.get(room, set())) | LAZY.get(room, set())
                if room not in DOORS and target != room and target not in allowed:
                    found.append(f"{where}:{line}: {room} may not import {target}")
                elif target in LAZY.get(room, ()) and not lazy:
                    found.append(f"{where}:{line}: {room} may import {target} inside functions only")
            elif room == "testing" and top not in sys.stdlib_module_names:
                found.append(f"{where}:{line}: {room} may not import the package {top}")
            elif room in DOORS:
                continue
            elif top == "time" and room != "clock":
                found.append(f"{where}:{line}: only clock reads time")
            elif top == "asyncio" and room not in LOOPS:
                found.append(f"{where}:{line}: only runner and engines know asyncio")
            elif top in NOT_IN_PURE and (room in ABOVE["threads"] or room in ("adapters", "forms")):
                found.append(f"{where}:{line}: {room} is pure: no {top}")
            elif top not in sys.stdlib_module_names and top not in THIRD_PARTY.get(room, ()):
                found.append(f"{where}:{line}: {room} may not import the package {top}")
            elif top not in sys.stdlib_module_names and not lazy:
                found.append(f"{where}:{line}: {room} may import {top} inside functions only")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"circle: {' -> '.join(error.args[1])}")
    return found


def test_every_import_follows_the_table() -> None:
    """G2, R-04: the rooms that decide are pure and nobody goes round them; DESIGN's table holds, without circles."""
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("gate.py", "from towerman.runner import x", "gate may not import runner"),
        ("gate.py", "def f():\n    from towerman import tower", "gate may not import tower"),
        ("gate.py", "from . import tower", "gate may not import tower"),
        ("bounds.py", "from .gate import x", "bounds may not import gate"),
        ("gate.py", "import towerman", "gate may not import __init__"),
        ("access.py", "from towerman.arguments import x", "access may not import arguments"),
        ("calls.py", "async def f():\n    import asyncio", "only runner and engines know asyncio"),
        ("tower.py", "import asyncio.events", "only runner and engines know asyncio"),
        ("ledger.py", "import threading", "ledger is pure: no threading"),
        ("timeline.py", "import subprocess", "timeline is pure: no subprocess"),
        ("runner.py", "from time import monotonic", "only clock reads time"),
        ("adapters/openai.py", "import openai", "adapters may not import the package openai"),
        ("adapters/openai.py", "from ..tower import Tower", "adapters may not import tower"),
        ("observers/jsonl.py", "from towerman.adapters import openai", "observers may not import adapters"),
        ("engines/redis.py", "import redis", "engines may import redis inside functions only"),
        ("engines/redis.py", "from towerman.runner import x", "engines may not import runner"),
        ("engines/redis.py", "from time import monotonic", "only clock reads time"),
        ("limits.py", "def f():\n    from towerman.engines import redis", "limits may not import engines"),
        ("policy.py", "import jsonschema_rs", "policy may not import the package jsonschema_rs"),
        ("runner.py", "import pydantic", "runner may not import the package pydantic"),
        ("arguments.py", "import jsonschema_rs", "arguments may import jsonschema_rs inside functions only"),
        ("tower.py", "from towerman.adapters import openai", "tower may import adapters inside functions only"),
        ("tower.py", "def f():\n    from towerman import cli", "tower may not import cli"),
        ("tower.py", "def f():\n    from towerman.testing import x", "tower may not import testing"),
        ("testing/loops.py", "def f():\n    import pytest", "testing may not import the package pytest"),
        ("utils.py", "", "utils.py: has no place in the table"),
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    """The test of the test: one wrong import in an otherwise right tree gives one complaint, which names it."""
    for name in ("tower.py", "runner.py", "bounds.py", "cli/__init__.py", "adapters/__init__.py", "adapters/openai.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("from towerman.errors import Code\n")
    assert violations(tmp_path) == []
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    [found] = violations(tmp_path)
    assert found.startswith(file)
    assert found.endswith(complaint)


def test_what_the_table_allows_is_let_through(tmp_path: Path) -> None:
    """No false alarm: downward imports, the named third parties, lazy adapters, and doors that import anything."""
    for file, source in {
        "clock.py": "import time",
        "arguments.py": "from towerman.policy import x\ndef f():\n    import jsonschema_rs, pydantic",
        "gate.py": "from collections import deque",
        "threads.py": "import threading, queue",
        "policy.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pydantic import BaseModel",
        "runner.py": "import asyncio, threading\nfrom towerman import gate, threads",
        "tower.py": "from towerman.runner import x\ndef f():\n    from towerman.adapters import openai",
        "adapters/__init__.py": "",
        "engines/redis.py": "import asyncio, threading\nfrom towerman.rates import x\ndef f():\n    import redis",
        "adapters/openai.py": "import json\nfrom towerman.adapters.common import x\nfrom towerman.calls import Call",
        "testing/loops.py": "import asyncio, time\nfrom towerman.tower import Tower",
        "cli/__init__.py": "import time, typer\nfrom towerman import Tower\nfrom towerman.tower import Run",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("body", ["from towerman.adapters import {0}", "def f():\n    import towerman.adapters.{0}"])
def test_a_circle_is_caught(tmp_path: Path, body: str) -> None:
    """No circles, not even between two files of one package, nor through a function."""
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "a.py").write_text(body.format("b"))
    (tmp_path / "adapters" / "b.py").write_text(body.format("a"))
    [found] = violations(tmp_path)
    assert found.startswith("circle: towerman.adapters.")


def test_import_towerman_is_light() -> None:
    """`import towerman` loads none of the packages that only one command, one provider or one schema needs, nor
    the test kit."""
    heavy = ["anthropic", "griffe", "jsonschema_rs", "openai", "opentelemetry", "pydantic", "redis", "rich", "typer"]
    heavy += ["asyncio", "concurrent.futures", "logging", "multiprocessing", "pathlib", "sqlite3", "subprocess", "uuid"]
    rooms = [
        "adapters",
        "changes",
        "check",
        "engines",
        "explain",
        "follow",
        "forms",
        "journal",
        "leftovers",
        "processes",
        "records",
        "report",
        "runner",
        "simulate",
        "testing",
    ]
    heavy += [f"towerman.{room}" for room in rooms]
    code = f"import sys, towerman; print(towerman.__file__, [name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{PACKAGE / '__init__.py'} []"
