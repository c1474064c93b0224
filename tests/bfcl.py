"""The stateful backends of the Berkeley function-calling leaderboard (BFCL), as its authors published them.

Theory. Batches that models emit are published; what they were run against is published too, as plain classes in the
wheel `bfcl-eval`. Only those classes are wanted here and not the model clients that the wheel depends on, so pip
fetches it without its dependencies into the test cache. `mpmath`, which one of the classes imports, comes with it.

House rules. A cache is made aside and put in its place by one rename, under a lock: who finds it, finds it whole, and
of several test workers one fetches while the others wait. Where no package index answers, the test is skipped and says
so; a cache that is there and does not import is a failure.

Not here: what these classes touch and which of their calls may overlap (test_real_calls.py).
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

CACHE = ROOT / ".cache"
WHEELS = ("bfcl-eval==2026.3.23", "mpmath==1.3.0")
"""Known to be good together: the second is what the first asks for."""

CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"
CONSTANTS = "bfcl_eval.constants.executable_backend_config"

PATIENCE = 120
"""Real seconds for pip. A package index that takes longer for two megabytes does not answer."""


class NoIndex(Exception):
    """The wheels could not be had."""


def fetch(folder: Path, install: Callable[[Path], None]) -> Path:
    """That folder, filled once by `install`, whoever asks and however many ask at once.

    Args:
        folder: where it is to be; what is there is whole.
        install: fills a new folder, and raises where it cannot.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            half = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(half, ignore_errors=True)  # of somebody who was killed half-way
            half.mkdir()
            install(half)
            half.rename(folder)
    return folder


def pip_install(folder: Path) -> None:
    """Have pip put the wheels into this folder, and nothing else.

    Raises:
        NoIndex: pip says no.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    wanted = ["install", "--no-deps", "--no-compile", "--only-binary=:all:", "--timeout=15", "--retries=1"]
    try:
        done = subprocess.run(
            [*pip, *wanted, f"--target={folder}", *WHEELS],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoIndex(f"pip had no answer after {PATIENCE} s") from None
    if done.returncode:
        raise NoIndex(" ".join(done.stderr.split()[-40:]) or f"pip ended with {done.returncode}")


@functools.cache
def fetched() -> Path | str:
    """The folder with the wheels' contents, or why there is none; asked once by each worker."""
    try:
        return fetch(CACHE / WHEELS[0].replace("==", "-"), pip_install)
    except NoIndex as problem:
        return f"no package index gave {' and '.join(WHEELS)}: {problem}"


class Backends:
    """Instances of BFCL's classes, and BFCL's own opinion of them."""

    def __init__(self, folder: Path) -> None:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # last, so that nothing in it hides what is installed
        constants = importlib.import_module(CONSTANTS)
        self._modules: Mapping[str, str] = constants.CLASS_FILE_PATH_MAPPING
        self._stateless: list[str] = constants.STATELESS_CLASSES
        self._check = importlib.import_module(CHECKER).state_checker

    def type(self, name: str) -> Any:
        """The class of that name."""
        return getattr(importlib.import_module(self._modules[name]), name)

    def make(self, name: str, config: Mapping[str, Any]) -> Any:
        """An instance in the state in which a conversation begins.

        Args:
            name: of the class.
            config: its part of the row's `initial_config`; it becomes the instance's own, so give a copy.
        """
        instance = self.type(name)()
        if name not in self._stateless:
            instance._load_scenario(config, long_context=False)
        return instance

    def differences(self, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        """What BFCL's state checker finds different; empty where the two are in one state."""
        verdict = self._check(ours, theirs)
        return {} if verdict["valid"] else verdict["details"]["differences"]


def backends() -> Backends:
    """The backends, or skip the test where no package index answers."""
    found = fetched()
    if isinstance(found, str):
        pytest.skip(found)
    return Backends(found)
