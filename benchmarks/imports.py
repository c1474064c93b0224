"""F16: what `import towerman` costs beside `import pydantic`, which it stands on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import towerman
from benchmarks.measure import Samples, ratio, rotated
from benchmarks.report import Row, note
from benchmarks.settings import Settings

_MEASURED = {
    "import pydantic": "import pydantic",
    "import towerman": "import towerman",
    "from pydantic import BaseModel": "from pydantic import BaseModel",
    "from towerman import Tower": "from towerman import Tower",
    "a first tool": (
        "from towerman import Tower\nasync def look(i: int) -> int: return i\nTower().add_tool(look, independent=True)"
    ),
    "a first pydantic model": "from pydantic import BaseModel\nclass Look(BaseModel): i: int",
}

_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(towerman.__file__).resolve().parent.parent)}


def _spent(code: str) -> float:
    """CPU seconds of some code in a fresh interpreter, without the interpreter's own start."""
    timed = f"import time\nstart = time.process_time()\n{code}\nprint(time.process_time() - start)"
    told = subprocess.run(
        [sys.executable, "-c", timed], env=_ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout
    return float(told)


def _dearest(module: str, most: int = 12) -> str:
    """The modules whose own bodies cost most, in milliseconds."""
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"],
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    found = []
    for line in told.splitlines():
        own, _, rest = line.removeprefix("import time:").partition("|")
        if own.strip().isdigit():
            found.append((int(own), rest.rpartition("|")[2].strip()))
    found.sort(reverse=True)
    return ", ".join(f"{name} {own / 1000:.1f}" for own, name in found[:most])


async def f16_import(settings: Settings) -> list[Row]:
    """Fresh interpreters, one after another."""
    samples: Samples = {name: [] for name in _MEASURED}
    for code in _MEASURED.values():  # bytecode is compiled and files are in the system's cache
        _spent(code)
    rounds = 1 if settings.quick else settings.rounds
    for round_ in range(rounds):
        for name in rotated(list(_MEASURED), round_):
            samples[name].append(_spent(_MEASURED[name]))
    note(f"F16 own milliseconds of modules, import towerman: {_dearest('towerman')}")
    note(f"F16 own milliseconds of modules, import pydantic: {_dearest('pydantic')}")
    return [
        Row(
            "F16",
            "`import towerman`, CPU",
            ratio(samples, "import towerman", "import pydantic"),
            most=1.3,
            against="`import pydantic`",
            samples=samples,
        ),
        Row(
            "F16",
            "`from towerman import Tower`",
            ratio(samples, "from towerman import Tower", "from pydantic import BaseModel"),
            against="`from pydantic import BaseModel`",
        ),
        Row(
            "F16",
            "a tower with its first tool",
            ratio(samples, "a first tool", "a first pydantic model"),
            against="a first pydantic model",
        ),
    ]
