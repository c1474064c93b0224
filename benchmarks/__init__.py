"""What Towerman costs beside `asyncio.gather` with a semaphore and beside its peers: `python -m benchmarks`."""
