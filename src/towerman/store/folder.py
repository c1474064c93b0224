"""Whole results as files in a folder.

Theory. A file is written under a name of its own beside its place and then put there in one step, so that a reader
sees all of it or nothing. Only names of the form of a handle are ever made into a path. Files are the owner's alone.
Age is the file's; what is too old, or too much, is removed by whoever writes, now and then.

House rules. Several processes may share a folder; whoever removes first is right. Other files in it are left alone.

Not here: who may read (keeper), what is in a content (pages).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from towerman.clock import wall_time
from towerman.errors import PolicyError
from towerman.pages import is_handle, new_handle

SUFFIX: Final = ".result"
_DRAFT: Final = ".draft"
_PRIVATE_FOLDER: Final = 0o700
_PRIVATE_FILE: Final = 0o600
_SWEEP_SECONDS: Final = 60.0
_NOT_FOLLOWED: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class FolderStore:
    """Keeps contents as files of a folder.

    Args:
        path: the folder; it is made, for the owner alone, if it is not there. The folder above it must be.
        lifetime: gives the seconds that a file is kept.
        most_bytes: gives the bytes that all of them together may have; the oldest goes first.

    Raises:
        PolicyError: it cannot be made, or nothing can be written there.
    """

    def __init__(self, path: str, lifetime: Callable[[], float], most_bytes: Callable[[], int]) -> None:
        self._path = os.path.abspath(path)
        self._lifetime = lifetime
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._next_sweep = 0.0
        try:
            if not os.path.isdir(self._path):
                os.mkdir(self._path, _PRIVATE_FOLDER)
            self._write(new_handle(os.urandom(16)), b"", for_good=False)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise PolicyError(f"results: the folder cannot be used: {why}; name one that can be written") from None

    def put(self, handle: str, content: bytes, *, run_id: str, tool: str, tenant: str | None) -> None:
        """Write a file, whole or not at all.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        self._write(handle, content, for_good=True)
        with self._lock:
            due = wall_time() >= self._next_sweep
            if due:
                self._next_sweep = wall_time() + min(_SWEEP_SECONDS, self._lifetime())
        if due:
            try:
                self.sweep()
            except OSError:  # what was put is there: another time
                return

    def _write(self, handle: str, content: bytes, *, for_good: bool) -> None:
        place = self._place(handle)
        draft = f"{place}.{os.getpid()}-{threading.get_ident()}{_DRAFT}"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOT_FOLLOWED, _PRIVATE_FILE)
        try:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)
            if for_good:
                os.replace(draft, place)
        finally:
            if os.path.lexists(draft):
                os.unlink(draft)

    def read(self, handle: str, first: int = 0, size: int | None = None) -> bytes | None:
        """A slice of a file.

        Raises:
            OSError: it is there and cannot be read.
        """
        try:
            file = os.open(self._place(handle), os.O_RDONLY | _NOT_FOLLOWED)
        except FileNotFoundError:
            return None
        with open(file, "rb", buffering=0) as opened:
            opened.seek(first)
            wanted = os.fstat(file).st_size - first if size is None else size
            parts = []
            while wanted > 0 and (part := opened.read(wanted)):
                parts.append(part)
                wanted -= len(part)
            return b"".join(parts)

    def drop(self, handle: str) -> None:
        """Remove a file."""
        try:
            os.unlink(self._place(handle))
        except FileNotFoundError:
            return

    def _place(self, handle: str) -> str:
        if not is_handle(handle):
            raise ValueError("no handle")
        return os.path.join(self._path, handle + SUFFIX)

    def sweep(self) -> None:
        """Remove what is too old, and the oldest where there is too much; drafts of processes that died, too."""
        oldest = wall_time() - self._lifetime()
        found: list[tuple[float, int, str]] = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                name = entry.name
                is_draft = name.endswith(_DRAFT) and is_handle(name.partition(".")[0])
                if is_draft or (name.endswith(SUFFIX) and is_handle(name.removesuffix(SUFFIX))):
                    try:
                        known = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    found.append((known.st_mtime, known.st_size, entry.path))
        found.sort(reverse=True)
        left = self._most_bytes()
        for changed, size, path in found:
            left -= size
            if left < 0 or changed < oldest:
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    continue

    def __repr__(self) -> str:
        return f"FolderStore({self._path!r})"
