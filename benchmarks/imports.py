"""F16: what `import towerman` costs beside `import pydantic`, which it stands on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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


def _environment(cache: str) -> dict[str, str]:
    """Bytecode is kept, as after an installation, whatever this environment says: in a folder of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(Path(towerman.__file__).resolve().parent.parent), "PYTHONPYCACHEPREFIX": cache}


def _spent(code: str, environment: dict[str, str]) -> float:
    """CPU seconds of some code in a fresh interpreter, without the interpreter's own start."""
    timed = f"import time\nstart = time.process_time()\n{code}\nprint(time.process_time() - start)"
    told = subprocess.run(
        [sys.executable, "-c", timed], env=environment, capture_output=True, text=True, check=True
    ).stdout
    return float(told)


def _dearest(module: str, environment: dict[str, str], most: int = 12) -> str:
    """The modules whose own bodies cost most, in milliseconds."""
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"],
        env=environment,
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
    with tempfile.TemporaryDirectory() as cache:
        environment = _environment(cache)
        for code in _MEASURED.values():  # bytecode is written and files are in the system's cache
            _spent(code, environment)
        for round_ in range(1 if settings.quick else settings.rounds):
            for name in rotated(list(_MEASURED), round_):
                samples[name].append(_spent(_MEASURED[name], environment))
        for module in ("towerman", "pydantic"):
            note(f"F16 own milliseconds of modules, import {module}: {_dearest(module, environment)}")
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
