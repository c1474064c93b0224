"""`towerman engine` and `towerman dev-server`, with real servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import PATIENCE, Server

from towerman import Context, Pool, Tower
from towerman.cli import main
from towerman.engines.looking import Looker
from towerman.errors import EngineUnavailable

redis = pytest.importorskip("redis", reason="no redis-py: pip install 'towerman[redis]'")

RIGHTS = [
    *("+@connection", "+@hash", "+@sortedset", "+fcall", "+function", "+publish", "+subscribe", "+unsubscribe"),
    *("+unlink", "+time", "+info", "+wait"),
]
"""What an engine's user needs; the doctor says the same."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for tests that leave it as it was."""
    one = Server()
    try:
        yield one.start()
    finally:
        one.remove()


@pytest.fixture
def server(shared: Server) -> Server:
    """The same, empty."""
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    return shared


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = main(["engine", *words])
    out, err = capsys.readouterr()
    return code, out, err


class Busy:
    """A tower on a loop of its own, one of whose calls holds, while a call of another one waits."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.tower = Tower(
            engine={"url": url, "lease": 0.9},
            pools={"crm": Pool(1, rate="100/s")},
            budgets={"tenant": {"tokens": 50}},
            max_wait=30.0,
        )
        self.told: list[str] = []
        self.inside = threading.Event()
        self.stop = threading.Event()

        @self.tower.tool(pools=["crm"], writes="file:{path}", breaker=True, spends={"tokens": 5})
        async def write(path: str, ctx: Context) -> str:
            """Write."""
            self.inside.set()
            while not self.stop.is_set():
                await asyncio.sleep(0.01)
            return "written"

        self.thread = threading.Thread(target=lambda: asyncio.run(self.main()))
        self.thread.start()
        assert self.inside.wait(PATIENCE)

    async def main(self) -> None:
        other = Tower(engine={"url": self.url}, pools={"crm": 1}, max_wait=30.0)

        @other.tool(pools=["crm"], independent=True)
        async def look() -> str:
            """Look."""
            return "seen"

        async with self.tower.run(tenant="acme") as run:
            mine = asyncio.ensure_future(run.execute([{"tool": "write", "arguments": {"path": "secret-canary"}}]))
            while not (self.inside.is_set() or mine.done()):
                await asyncio.sleep(0.01)
            theirs = asyncio.ensure_future(other.execute([{"tool": "look", "arguments": {}}]))
            for batch in (mine, theirs):
                self.told += [result.code or result.outcome for result in await batch]
        await self.tower.aclose()
        await other.aclose()

    def end(self) -> list[str]:
        self.stop.set()
        self.thread.join(PATIENCE)
        return self.told


def until(check: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_held_and_who_waits(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 6, 6: `status`, `holders` and `waiters` tell it by name, with fences; resource keys only as digests."""
    busy = Busy(server.url)
    try:
        until(lambda: json.loads(said(capsys, "waiters", "--url", server.url, "--json")[1]))
        code, out, _ = said(capsys, "status", "--url", server.url)
        assert code == 0
        assert "1 held, 1 waiting, 0 offered, 1 reserved of budgets" in out
        assert "pool:crm: 1 held" in out and "rate:pool:crm: 1 started" in out
        assert "budget tenant:acme: " in out and "tokens 5 spent, 0 reserved" in out
        code, out, _ = said(capsys, "holders", "--url", server.url)
        share, grant = out.strip().splitlines()
        assert "reserved, " in share and "budget tenant:acme" in share
        assert "held, " in grant and ", fence " in grant and "pool:crm 1" in grant and "breaker:tool:write" in grant
        (waiter,) = json.loads(said(capsys, "waiters", "--url", server.url, "--json")[1])
        assert (waiter["state"], waiter["pools"], waiter["fence"]) == ("waiting", {"pool:crm": 1}, None)
        assert json.loads(said(capsys, "status", "--url", server.url, "--json")[1])["pools"] == {"pool:crm": 1}
        code, out, err = said(capsys, "holders", "--url", server.url, "--most", "1")
        assert len(out.strip().splitlines()) == 1 and "only 1 are shown" in err
        for word in ("status", "holders", "waiters"):
            assert "canary" not in said(capsys, word, "--url", server.url, "--json")[1]
    finally:
        told = busy.end()
    assert told == ["ok", "ok"]
    assert said(capsys, "holders", "--url", server.url)[1] == "nothing is held\n"
    assert said(capsys, "waiters", "--url", server.url)[1] == "nobody waits\n"


def test_what_is_given_back_by_hand_is_lost_to_its_holder(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 6, 6: `release ID` lets the next one in; the call that held it is told at the next heartbeat."""
    busy = Busy(server.url)
    try:
        until(lambda: json.loads(said(capsys, "waiters", "--url", server.url, "--json")[1]))
        held = json.loads(said(capsys, "holders", "--url", server.url, "--json")[1])
        (id,) = [one["id"] for one in held if one["state"] == "held"]
        code, _, err = said(capsys, "release", id, "--url", server.url)
        assert code == 2 and "say --yes" in err
        code, out, _ = said(capsys, "release", id, "--url", server.url, "--yes")
        assert code == 0 and out.startswith(f"given back: {id}  held")
        busy.thread.join(PATIENCE)
        assert busy.told == ["lease_lost", "ok"]
    finally:
        busy.end()
    code, _, err = said(capsys, "release", "none", "--url", server.url, "--yes")
    assert code == 1 and "nothing has the id none" in err


def test_the_rights_that_are_told_are_enough_and_needed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 6, 6: a user with exactly the rights that the doctor names can be an engine's user; with less the doctor
    says which is missing.
    """
    with redis.Redis.from_url(server.url) as client:

        def user(name: str, *rights: str) -> str:
            client.execute_command(
                "ACL", "SETUSER", name, "reset", "on", ">word", "~towerman:*", "&towerman:*", "-@all", *rights
            )
            return f"redis://{name}:word@127.0.0.1:{server.port}/0"

        try:
            url = user("whole", *RIGHTS)
            code, out, _ = said(capsys, "doctor", "--url", url)
            assert code == 0, out
            assert "fail" not in out and "ok    rights" in out
            busy = Busy(url)
            time.sleep(0.5)  # heartbeats, too
            assert busy.end() == ["ok", "ok"]
            assert said(capsys, "status", "--url", url)[0] == 0
            for missing, told in (("+function", "FUNCTION LOAD"), ("+fcall", "FCALL"), ("+publish", "PUBLISH")):
                url = user("less", *[one for one in RIGHTS if one != missing])
                code, out, _ = said(capsys, "doctor", "--url", url, "--json")
                (rights,) = [one for one in json.loads(out) if one["what"] == "rights"]
                assert code == 1 and rights["verdict"] == "fail" and told in rights["found"]
                assert all(one in rights["fix"] for one in RIGHTS)
            assert said(capsys, "doctor", "--url", user("nothing"))[0] == 1
        finally:
            client.execute_command("ACL", "DELUSER", "whole", "less", "nothing")


def test_what_is_not_fit_is_told_with_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 6, 6: a server that evicts, one that keeps nothing, a replica, and none at all."""
    primary = Server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    copy = Server("--replicaof", f"127.0.0.1 {primary.port}")
    try:
        primary.start()
        copy.start()
        code, out, _ = said(capsys, "doctor", "--url", primary.url)
        assert code == 1 and "fail  memory: maxmemory-policy allkeys-lru" in out
        assert "fix: CONFIG SET maxmemory-policy noeviction" in out and "warn  persistence" in out
        code, out, _ = said(capsys, "doctor", "--url", copy.url)
        assert code == 1 and "fail  role: a replica" in out
        until(lambda: "warn  replicas: 1" in said(capsys, "doctor", "--url", primary.url)[1])
    finally:
        copy.remove()
        primary.remove()
    code, out, _ = said(capsys, "doctor", "--url", primary.url)
    assert code == 1 and out.startswith("fail  reached")
    code, _, err = said(capsys, "status", "--url", primary.url)
    assert code == 1 and "the engine is not available: the server is not reached" in err
    with pytest.raises(EngineUnavailable):
        Looker(primary.url).records()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["status"], "no engine is named"),
        (["status", "--url", "http://canary"], "begins with redis://"),
        (["status", "--config", "nowhere.toml"], "there is no such file"),
        (["doctor", "--url", "redis://:canary@127.0.0.1:1/0"], "not reached"),
    ],
)
def test_wrong_words(words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Bad input is one line that names the place; no URL is shown."""
    monkeypatch.delenv("TOWERMAN_ENGINE", raising=False)
    code, out, err = said(capsys, *words)
    assert code in (1, 2) and told in out + err and "canary" not in out + err


def test_the_engine_is_found_where_towers_find_it(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    """API 6: the file, then the environment."""
    path = tmp_path / "towerman.toml"
    path.write_text(f'[engine]\nurl = "{server.url}"\ngroup = "mine"\n')
    assert said(capsys, "status", "--config", str(path))[0] == 0
    monkeypatch.setenv("TOWERMAN_ENGINE", server.url)
    assert said(capsys, "status")[0] == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_server_for_a_trial(how: signal.Signals, tmp_path: Path) -> None:
    """Issue 6, 6: `towerman dev-server` tells its URL, serves a tower, and ends when it is told to."""
    command = [sys.executable, "-m", "towerman", "dev-server", "--dir", str(tmp_path / "kept")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            tower = Tower(engine=url, pools={"crm": 1})

            @tower.tool(pools=["crm"], independent=True)
            def look() -> str:
                """Look."""
                return "seen"

            with tower, tower.run() as run:
                assert run.execute_sync([{"tool": "look", "arguments": {}}]).ok
            looker = Looker(url)
            overview = looker.overview()
            looker.close()
            assert overview.held == 0 and overview.server.startswith("Valkey ")
            process.send_signal(how)
            assert process.wait(PATIENCE) in (0, 130)
        finally:
            process.kill()
    with pytest.raises(EngineUnavailable):
        Looker(url).overview()
    assert any((tmp_path / "kept").iterdir())
