"""Heartbeats: a thread of its own renews what this process holds.

Theory. A lease is renewed when a third of it has passed, so that one renewal may be lost without harm. That is done by
a thread with a connection of its own: an event loop that is blocked by a sync handler does not lose what its calls
hold. Whether a lease still stands is judged here by this machine's monotonic clock: it is over `lease` after the
instant at which its last renewal was *sent*, which is never later than what the server thinks. A process that was
stopped and goes on looks at that first.

The thread begins with the first grant and ends when nothing was held for one lease.

House rules. `on_lost` is called once for each grant, outside of the lock. It must not raise and must not wait.

Not here: what a lost lease means for a call (whoever holds it).
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final

from towerman.clock import wall_time
from towerman.engines.library import keys_of, library
from towerman.engines.line import Known, is_missing, options
from towerman.engines.words import MICROS, Grant

if TYPE_CHECKING:
    from towerman.clock import Clock

TOGETHER: Final = 512
"""Leases renewed in one call."""


class Heart:
    """Renews leases.

    Args:
        url: of the server.
        group: the admission group.
        lease: seconds.
        timeout: seconds for a connection, and for an answer.
        known: what this process knows of the group.
        clock: monotonic.

    Attributes:
        beats: renewals that were answered.
        missed: renewals that were not.
        lost: grants that were lost.
    """

    __slots__ = (
        "_clock", "_closed", "_connection", "_given", "_held", "_keys", "_known", "_lease", "_maker", "_thread",
        "_timeout", "_url", "_wake", "beats", "lost", "missed",
    )  # fmt: skip

    def __init__(self, url: str, group: str, lease: float, timeout: float, known: Known, clock: Clock) -> None:
        self._url = url
        self._keys = keys_of(group)
        self._lease = lease
        self._timeout = timeout
        self._known = known
        self._clock = clock
        self._maker: Any = None
        self._connection: Any = None
        self._held: dict[str, Grant] = {}
        self._given: list[tuple[float, str]] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.beats = 0
        self.missed = 0
        self.lost = 0

    def keep(self, grant: Grant) -> None:
        """It is renewed from now on."""
        with self._wake:
            self._held[grant.id] = grant
            self._begin()

    def _begin(self) -> None:
        """The thread runs; the lock is held."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._beat, name="towerman engine heart", daemon=True)
            self._thread.start()

    def post(self, texts: list[str]) -> None:
        """What gives back, of a loop that is at its end: it is asked soon, and again for as long as a lease lasts."""
        with self._wake:
            until = self._clock.now() + self._lease
            self._given += [(until, text) for text in texts]
            self._begin()
            self._wake.notify_all()

    def drop(self, grant: Grant) -> bool:
        """It is not renewed any more. Says whether it was still held."""
        with self._wake:
            return self._held.pop(grant.id, None) is not None

    def held(self) -> int:
        """Grants that are renewed."""
        with self._wake:
            return len(self._held)

    def close(self) -> None:
        """The thread ends, within `timeout`. What it held runs out."""
        with self._wake:
            self._closed = True
            thread = self._thread
            self._wake.notify_all()
        if thread is not None:
            thread.join(2 * self._timeout)

    def _beat(self) -> None:
        third = self._lease / 3
        empty_since: float | None = None
        pause = third
        while True:
            with self._wake:
                if not (self._closed or (self._given and pause == third)):
                    self._wake.wait(pause)
                now = self._clock.now()
                given = [(until, text) for until, text in self._given if now < until]
                self._given = []
                empty_since = None if self._held or given else (now if empty_since is None else empty_since)
                if (self._closed and not given) or (empty_since is not None and now - empty_since >= self._lease):
                    self._thread = None
                    self._hang_up()  # before another thread may begin
                    return
                late = self._let_go([grant for grant in self._held.values() if now >= grant.deadline])
                ids = list(self._held)
            self._tell(late)
            if not (ids or given):
                pause = third
                continue
            try:
                for first in range(0, len(given), TOGETHER):
                    self._connect()
                    self._call(f"[{','.join(text for _, text in given[first : first + TOGETHER])}]")
                given = []
                for first in range(0, len(ids), TOGETHER):
                    self._renew(ids[first : first + TOGETHER])
                pause = third
            except Exception:  # whatever it is: the server is asked again soon, and leases run out meanwhile
                self.missed += bool(ids)
                self._hang_up()
                pause = third / 4
                with self._wake:
                    self._given = given + self._given if not self._closed else []

    def _let_go(self, grants: list[Grant]) -> list[Grant]:
        """They are lost; the lock is held."""
        for grant in grants:
            del self._held[grant.id]
            grant.lost = True
            self.lost += 1
        return grants

    @staticmethod
    def _tell(grants: list[Grant]) -> None:
        for grant in grants:
            if grant.on_lost is not None:
                grant.on_lost(grant)

    def _renew(self, ids: list[str]) -> None:
        text = json.dumps([["renew", round(self._lease * MICROS), ids]])
        self._connect()
        sent = self._clock.now()
        wall = wall_time()
        head, lost = self._call(text)
        self._known.heard(head, wall, wall_time())
        self.beats += 1
        with self._wake:
            gone = {ids[place - 1] for place in lost}
            for id in ids:
                grant = self._held.get(id)
                if grant is not None and id not in gone:
                    grant.deadline = sent + self._lease
            known = [self._held[id] for id in gone if id in self._held]
            for grant in known:
                grant.told = True
            late = self._let_go(known)
        self._tell(late)

    def _connect(self) -> None:
        if self._connection is None:
            if self._maker is None:
                self._maker = options(self._url, self._timeout, False)
            self._connection = self._maker.make_connection()
            self._connection.connect()

    def _call(self, text: str) -> list[Any]:
        import redis

        command = ("FCALL", library().give, len(self._keys), *self._keys, text, self._known.epoch, self._known.lease)
        for attempt in range(3):
            try:
                self._connection.send_command(*command)
                answer: list[Any] = self._connection.read_response()
                return answer
            except redis.exceptions.MovedError as moved:
                if attempt == 2:
                    raise
                self._connection.disconnect()
                self._connection.host, self._connection.port = str(moved.host), int(moved.port)
                self._connection.connect()
            except redis.ResponseError as error:
                if attempt == 2 or not is_missing(error):
                    raise
                self._connection.send_command("FUNCTION", "LOAD", "REPLACE", library().text)
                self._connection.read_response()
        raise AssertionError("unreachable")  # pragma: no cover - the last attempt raises

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def __repr__(self) -> str:
        return f"Heart({self.held()} held, {self.beats} beats, {self.missed} missed, {self.lost} lost)"
