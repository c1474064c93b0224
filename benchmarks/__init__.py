"""What Towerman costs beside `asyncio.gather` with a semaphore and beside its peers: `python -m benchmarks`."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("towerman") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
