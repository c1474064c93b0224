"""What every look into the tables and every change of them needs: the connection, who asks, what time it is.

Theory. All of it happens on one thread, in a transaction that the writer has begun. Whoever is asked about often in one
transaction is asked of the system once.

House rules. Values go through `seal` on their way in and `open` on their way out, and so through the cipher where there
is one: what was stored without one can be read with one, and not the other way round.

Not here: transactions (writer), the tables (calls, approvals, deferred, blobs).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Final, Protocol, cast

from towerman.journal import owners
from towerman.journal.owners import Identity, alive, myself
from towerman.records import JournalUnavailable, keyed, new_secret

_CLEAR: Final = b"\x00"
_SEALED: Final = b"\x01"


class Cipher(Protocol):
    """What keeps values from those who read the file, for example a `cryptography.fernet.Fernet`."""

    def encrypt(self, data: bytes, /) -> bytes:
        """The data, so that nobody can read it."""
        ...  # pragma: no cover - a protocol has no body

    def decrypt(self, token: bytes, /) -> bytes:
        """What was encrypted."""
        ...  # pragma: no cover - a protocol has no body


class Session:
    """One connection and what is known about it.

    Args:
        db: the connection.
        name: of the file, for people.
        wall: Unix time in seconds.
        lease: seconds for which a sign of life counts.
        cipher: for values; None stores them as they are.

    Attributes:
        me: the row of this process; None before the first change.
        touched: keys of calls that the present transaction has changed.
        held: tokens and claims that this process has open.
        begun: tokens of intents that the present transaction has written.
        unsealed: answers that could not be stored since the cipher failed.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        name: str,
        wall: Callable[[], float],
        *,
        lease: float = owners.LEASE_SECONDS,
        cipher: Cipher | None = None,
    ) -> None:
        self.db = db
        self.name = name
        self.wall = wall
        self.lease = lease
        self.cipher = cipher
        self.here = myself()
        self.me: int | None = None
        self.touched: set[bytes] = set()
        self.held: set[bytes] = set()
        self.begun: list[bytes] = []
        self.unsealed = 0
        self._known: dict[int, bool] = {}

    # ---------------------------------------------------------------- who

    def begin(self) -> None:
        """A transaction begins: what was known of others may have changed."""
        self._known.clear()
        self.touched.clear()

    def sign(self) -> int:
        """The row of this process, made where it is not there."""
        if self.me is None:
            here, now = self.here, self.wall()
            self.me = cast(
                "int",
                self.db.execute(
                    "INSERT INTO owners (host, boot, space, pid, started, since, beat) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (here.host, here.boot, here.space, here.pid, here.started, now, now),
                ).lastrowid,
            )
        return self.me

    def beat(self) -> None:
        """Give a sign of life."""
        if self.me is not None:
            self.db.execute("UPDATE owners SET beat = ? WHERE id = ?", (self.wall(), self.me))

    def leave(self) -> None:
        """Say goodbye: what is open from now on is nobody's."""
        if self.me is not None:
            self.db.execute("UPDATE owners SET ended = ? WHERE id = ?", (self.wall(), self.me))
            self.me = None

    def lives(self, owner: int | None) -> bool:
        """Is whoever wrote this at work still?"""
        if owner is None:
            return False
        if owner == self.me:
            return True
        known = self._known.get(owner)
        if known is None:
            row = self.db.execute(
                "SELECT host, boot, space, pid, started, beat, ended FROM owners WHERE id = ?", (owner,)
            ).fetchone()
            known = (
                row is not None
                and row[6] is None
                and alive(Identity(*row[:5]), row[5], self.wall(), self.here, self.lease)
            )
            self._known[owner] = known
        return known

    # ---------------------------------------------------------------- values

    def seal(self, value: bytes) -> bytes:
        """A value as it is stored."""
        if self.cipher is None:
            return _CLEAR + value
        try:
            return _SEALED + bytes(self.cipher.encrypt(value))
        except Exception as error:
            raise JournalUnavailable(
                "sealed", f"journal {self.name}: its cipher failed with {type(error).__name__[:100]}"
            ) from None

    def open(self, stored: bytes) -> bytes:
        """A value that was stored.

        Raises:
            JournalUnavailable: it cannot be read with the cipher that there is.
        """
        if stored[:1] == _CLEAR:
            return bytes(stored[1:])
        if self.cipher is None:
            raise JournalUnavailable("sealed", f"journal {self.name}: it is encrypted; give it its cipher")
        try:
            return bytes(self.cipher.decrypt(bytes(stored[1:])))
        except Exception as error:
            raise JournalUnavailable(
                "sealed",
                f"journal {self.name}: its cipher failed with {type(error).__name__[:100]}; give it the one that it "
                "was written with",
            ) from None

    # ---------------------------------------------------------------- the key of digests

    def digest_key(self, secret: bytes | None) -> bytes:
        """The key of all digests in this file: random, made once, and with a secret readable only by who knows that.

        A file that was made without a secret takes the first one that it is opened with.

        Raises:
            JournalUnavailable: the file was made with another secret, or with one and none is given.
        """
        row = self.db.execute("SELECT value FROM facts WHERE name = 'key'").fetchone()
        stored = bytes(row[0]) if row is not None else b""
        if stored[:1] == _SEALED:
            salt, covered, proof = stored[1:17], stored[17:49], stored[49:]
            if secret is None:
                raise JournalUnavailable("secret", f"journal {self.name}: it was made with a secret; give it: secret=")
            key = _cover(covered, secret, salt)
            if keyed(key, "proof", salt) != proof:
                raise JournalUnavailable(
                    "secret", f"journal {self.name}: it was made with another secret; give that one"
                )
            return key
        key = stored[1:] if stored else new_secret()
        if secret is not None or not stored:
            if secret is None:
                fresh = _CLEAR + key
            else:
                salt = new_secret()[:16]
                fresh = _SEALED + salt + _cover(key, secret, salt) + keyed(key, "proof", salt)
            self.db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('key', ?)", (fresh,))
        return key


def _cover(key: bytes, secret: bytes, salt: bytes) -> bytes:
    """The key under the secret, or back: a one-time pad, since each salt is used for one key only."""
    pad = keyed(secret, "journal key", salt)
    return bytes(a ^ b for a, b in zip(key, pad, strict=True))
