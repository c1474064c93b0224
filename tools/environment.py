"""Make `.venv` and install into it what a target of the Makefile needs.

    python3 tools/environment.py run              # Towerman and its run-time dependencies
    python3 tools/environment.py dev              # and what tests, checks and docs need
    python3 tools/environment.py bench            # and what the benchmarks compare with

Standard library only, since nothing else is there yet. uv does the installing where it is on the PATH or can be
had from pip; where it cannot install (it reads no pip configuration, for one), pip does. A stamp in `.venv`
records what was installed from which `pyproject.toml`, so that a second call returns at once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LEVELS = {"run": (), "dev": ("dev",), "bench": ("dev", "bench")}


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


def requirements(groups: tuple[str, ...]) -> list[str]:
    """The requirements of dependency groups, read here because older pips do not know groups."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    found: list[str] = []
    for group in groups:
        for entry in declared[group]:
            found += requirements((entry["include-group"],)) if isinstance(entry, dict) else [entry]
    return list(dict.fromkeys(found))


def succeeds(*command: str | Path, show: bool = False) -> bool:
    """Run a command, silently; what it printed is shown when it failed and `show` is set."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        if show:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return False
    if show and done.returncode != 0:
        print(done.stdout.rstrip(), file=sys.stderr)
    return done.returncode == 0


def present_version() -> str | None:
    """Version of the interpreter in `.venv`, or None when there is none that works."""
    probe = "import platform; print(platform.python_version())"
    try:
        answer = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def uv_on_path() -> str | None:
    """The uv command, if there is one and it runs (a shim may stand for a uv that is not installed)."""
    uv = shutil.which("uv")
    return uv if uv and succeeds(uv, "--version") else None


def make_venv(uv: str | None) -> None:
    """A new `.venv` with the interpreter that runs this file."""
    if uv and succeeds(uv, "venv", "--clear", "--python", sys.executable, VENV):
        return
    if importlib.util.find_spec("ensurepip") is None:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment, the module ensurepip is missing "
            f"(on Debian and Ubuntu: apt-get install {name})"
        )
    if not succeeds(sys.executable, "-m", "venv", "--clear", VENV, show=True):
        raise SetupError(f"{sys.executable} -m venv {VENV.name} failed: see above")


def tell(words: str) -> None:
    """What is being done, on stderr: stdout belongs to the command that the environment is made for."""
    print(words, file=sys.stderr, flush=True)


def install(uv: str | None, what: list[str]) -> None:
    """Install with uv, else with pip."""
    pip = (PYTHON, "-m", "pip")
    if uv is None and succeeds(*pip, "install", "uv"):
        uv = str(VENV / "bin" / "uv")
    if uv:
        if succeeds(uv, "pip", "install", "--python", PYTHON, *what):
            return
        tell("uv could not install it; trying pip")
    if not succeeds(*pip, "--version") and not succeeds(PYTHON, "-m", "ensurepip"):
        raise SetupError(
            "neither uv nor pip can install into .venv: remove .venv and try again with a Python that has pip"
        )
    if not succeeds(*pip, "install", "--quiet", *what, show=True):
        raise SetupError("the packages could not be installed: see above (is the package index reachable?)")


def ensure(level: str, *, this_python: bool) -> None:
    """Bring `.venv` to a level, or do nothing when its stamp says that it is there.

    Args:
        level: "run", "dev" or "bench"; each has the ones before it.
        this_python: make `.venv` anew when it has another version than the interpreter that runs this file.
    """
    groups = LEVELS[level]
    version = present_version()
    wanted = "{}.{}.{}".format(*sys.version_info[:3])
    old = version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < (3, 11)
    uv = uv_on_path()
    if version is None or old or (this_python and version != wanted):
        tell(f"making .venv with Python {wanted}")
        make_venv(uv)
        version = wanted
    declared = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    # An editable install points at its checkout: a .venv that was copied along with one is not ready.
    stamp = f"{declared}\n{version}\n{ROOT}\n"
    stamps = {name: VENV / f".ready-{name}" for name in LEVELS}
    if stamps[level].is_file() and stamps[level].read_text(encoding="utf-8") == stamp:
        return
    tell(f"installing into .venv: towerman {' '.join(f'+ {group}' for group in groups)}".rstrip())
    install(uv, ["--editable", ".", *requirements(groups)])
    for name, its_groups in LEVELS.items():
        if set(its_groups) <= set(groups):
            stamps[name].write_text(stamp, encoding="utf-8")


def main() -> int:
    """Read the command line; two calls at once wait for each other."""
    parser = argparse.ArgumentParser(description="Make .venv and install what a target needs.")
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--this-python", action="store_true", help="insist on the interpreter that runs this")
    arguments = parser.parse_args()
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        ensure(arguments.level, this_python=arguments.this_python)
    except SetupError as error:
        print(f"towerman: {error}", file=sys.stderr)
        return 1
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
