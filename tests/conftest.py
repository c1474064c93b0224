"""What every test shares: real inputs, the long tier, the Hypothesis profile, and a watch on forgotten tasks."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
LONG = os.environ.get("TOWERMAN_LONG", "") not in ("", "0")

# A deadline would make a timed test of each property. In CI the examples are the same at every run, so that a red
# run says something about the change; at a desk they are new each time; the long tier digs deeper.
_common = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("desk", **_common)
settings.register_profile("ci", derandomize=True, database=None, **_common)
settings.register_profile("long", max_examples=2_000, stateful_step_count=100, **_common)
settings.load_profile("long" if LONG else "ci" if os.environ.get("CI") else "desk")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the long tier out unless it was asked for."""
    if LONG:
        return
    skip = pytest.mark.skip(reason="long: set TOWERMAN_LONG=1, or say `make stress`")
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Towerman runs on asyncio; anyio's cancel scopes are tested on top of it."""
    return "asyncio"


def load_shared(name: str) -> list[dict[str, object]]:
    """The records of one file of real inputs, or skip the test where the folder is not there.

    Args:
        name: a file below `../shared/data`, one JSON record a line; `.jsonl` may be left off.
    """
    path = SHARED / (name if Path(name).suffix else f"{name}.jsonl")
    if not path.is_file():
        pytest.skip(f"real inputs are not here: no {path.name} in a folder ../shared/data beside the checkout")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], list[dict[str, object]]]:
    """`shared_data("bfcl_parallel")` gives that file's records; skips where the inputs are absent."""
    return load_shared


class _Complaints(logging.Handler):
    """Keeps what asyncio says about tasks and callbacks that nobody looked after."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage().splitlines()[0])


_complaints = _Complaints()
logging.getLogger("asyncio").addHandler(_complaints)


def _told() -> list[str]:
    told, _complaints.heard[:] = _complaints.heard[:], []
    return told


@pytest.fixture(autouse=True)
def _nothing_left_unretrieved() -> Iterator[None]:
    """No test may leave a task destroyed while pending, or an exception that was never retrieved."""
    _told()
    yield
    told = _told()
    assert not told, f"asyncio complained: {told}"


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_in_cycles() -> Iterator[None]:
    """The same for what only the collector finds: looked at once per file, since a collection is slow."""
    yield
    gc.collect()
    told = _told()
    assert not told, f"asyncio complained, about a task of this file that sat in a reference cycle: {told}"
