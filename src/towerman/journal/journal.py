"""The public Journal: a file that remembers what was begun and what came of it.

Theory. What is asked is done by the journal's own thread, many things in one transaction, and answered by a future:
nobody who runs an event loop waits here. Code without a loop says `.result()`.

House rules. Nothing is opened, and no file is made, before something is asked: a tower with a journal may be made at
import, and its process may fork.

Not here: what is done with it (runner), the words (records), the tables (calls, approvals, deferred, blobs).
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

from towerman.clock import wall_time
from towerman.documents import BatchVerdict, KeptBatch, NamedBy
from towerman.errors import PolicyError
from towerman.journal import approvals, batches, blobs, calls, deferred, file, means, owners
from towerman.journal.approvals import Claim
from towerman.journal.blobs import Blob
from towerman.journal.session import Cipher, Session
from towerman.journal.writer import CLOSE_SECONDS, Writer
from towerman.policy import flag, seconds, shown
from towerman.records import (
    Answer,
    Approval,
    ApprovalState,
    ClaimState,
    Deferred,
    DeferredState,
    Due,
    Intent,
    JournalUnavailable,
    Record,
    State,
    Verdict,
)

T = TypeVar("T")

BUSY_SECONDS: Final = 5.0
"""How long another program's lock on the file is waited for."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was forgotten.

    Args:
        calls, approvals, deferred, contents, batches, means: how many of each; `means` are tools whose times were kept.
    """

    calls: int = 0
    approvals: int = 0
    deferred: int = 0
    contents: int = 0
    batches: int = 0
    means: int = 0


class Journal:
    """The durable record of intents, outcomes, approvals and deferred calls: one SQLite file for many processes.

    Args:
        path: of the file, made when it is first needed; ":memory:" keeps it in this process only.
        secret: what keyed digests in the file rest on; without one, a random key that stands in the file.
        cipher: encrypts every value that is stored, arguments, answers and large contents: an object with
            `encrypt(bytes)` and `decrypt(bytes)`, for example a `cryptography.fernet.Fernet`.
        arguments: False stores no arguments: calls that wait for approval or for a worker are then resumed with a state
            that the caller has kept, nothing can be deferred, and a plan that was cut off has to be handed in again.
        busy_timeout: seconds for which another program's lock on the file is waited for.

    Raises:
        PolicyError: an option out of its range, or a path where no journal can be.

    It is opened when it is first used. Everything that is asked returns a `concurrent.futures.Future`: a loop awaits it
    with `asyncio.wrap_future`, other code says `.result()`. A future fails with `JournalUnavailable` where nothing was
    read or written. A plain context manager; `close` writes what was asked for and ends its thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "towerman.db",
        *,
        secret: str | bytes | None = None,
        cipher: Cipher | None = None,
        arguments: bool = True,
        busy_timeout: float = BUSY_SECONDS,
        _wall: Callable[[], float] = wall_time,
        _lease: float = owners.LEASE_SECONDS,
    ) -> None:
        self.path: Final = path_of(path)
        self._secret = secret_of(secret)
        if cipher is not None and not (callable(_part(cipher, "encrypt")) and callable(_part(cipher, "decrypt"))):
            raise PolicyError(f"journal: cipher: an object with encrypt and decrypt, got {shown(cipher)}")
        self.keeps_arguments: Final = flag("journal: arguments", arguments)
        busy = seconds("journal: busy_timeout", busy_timeout, zero=True)
        file.look(self.path)
        name = self.path

        def made(db: sqlite3.Connection) -> Session:
            return Session(db, name, _wall, lease=_lease, cipher=cipher)

        self._writer = Writer(self.path, busy, made)
        self._key: bytes | None = None
        self._pid = os.getpid()
        weakref.finalize(self, self._writer.close, 0.0)

    # ---------------------------------------------------------------- the key

    def open(self, secret: bytes | None = None) -> Future[bytes]:
        """Open the file, bring it up to date, and get the key of its digests.

        Args:
            secret: of the tower, where the journal has none of its own.
        """
        known = self._secret if self._secret is not None else secret
        return self._writer.ask(lambda session: session.digest_key(known))

    # ---------------------------------------------------------------- calls

    def look_up(self, keys: Sequence[bytes]) -> Future[dict[bytes, Record]]:
        """What is written down under these keys, with answers.

        Args:
            keys: where identities are stored (`records.place`).
        """
        return self._writer.ask(lambda session: calls.look_up(session, keys), writes=False)

    def begin(self, intent: Intent) -> Future[tuple[Verdict, Record | None]]:
        """Write an intent: "run", and it is on the disk; or what is to be done instead, and the record that says so.

        Args:
            intent: the call that is about to start.

        The future fails with `Unsettled` where the claim that it comes under is another worker's by now.
        """
        return self._writer.ask(lambda session: calls.begin(session, intent))

    def begin_all(self, intents: Sequence[Intent]) -> Future[None]:
        """Write the intents of calls that one run answers: they are on the disk when the future is done, all or none.

        Args:
            intents: the calls that are about to start.

        The future fails with `NotBegun` where something else is to be done with one of them.
        """
        return self._writer.ask(lambda session: calls.begin_all(session, intents))

    def withdraw(self, token: bytes) -> Future[int]:
        """Take an intent back whose call never reached its first line; tried again until it is done.

        Args:
            token: of its start.
        """
        return self._writer.ask(lambda session: calls.withdraw(session, (token,)), again="withdrawal")

    def finish(self, token: bytes, answer: Answer, *, running: bool = False) -> Future[bool]:
        """Write what a begun call came to; tried again until it is done. False: it is another start's by now.

        Args:
            token: of its start.
            answer: what it came to.
            running: its work goes on; how it ends is written later.
        """
        return self._writer.ask(lambda session: calls.finish(session, token, answer, running=running), again="outcome")

    def finish_all(self, ended: Sequence[tuple[bytes, Answer]]) -> Future[None]:
        """The same for calls that one run has answered, in one step.

        Args:
            ended: the tokens of their starts, and what each came to.
        """

        def step(session: Session) -> None:
            for token, answer in ended:
                calls.finish(session, token, answer)

        return self._writer.ask(step, again="outcome")

    def note(self, intent: Intent, answer: Answer, *, again: bool = False) -> Future[bool]:
        """Write down a call without effect that has ended; False where one of its identity is there.

        Args:
            intent: the call.
            answer: what it came to.
            again: where that cannot be written now it is tried again.
        """
        return self._writer.ask(lambda session: calls.note(session, intent, answer), again="outcome" if again else "")

    def watch(self, key: bytes) -> Future[None]:
        """Done once nobody is at work on this call any more, in whatever process. Cancel it to wait no more.

        Args:
            key: where its identity is stored.
        """
        return self._writer.watch(key)

    def calls(
        self,
        *,
        run_id: str | None = None,
        tool: str | None = None,
        state: State | None = None,
        limit: int = 100,
    ) -> Future[list[Record]]:
        """The latest calls, the newest first, without their answers.

        Args:
            run_id: only those of this run.
            tool: only those of this tool.
            state: only those in this state; one whose process died is unknown.
            limit: how many at most.
        """
        return self._writer.ask(
            lambda session: calls.listed(session, run_id=run_id, tool=tool, state=state, limit=limit), writes=False
        )

    def unknown(self, limit: int = 1000) -> Future[list[Record]]:
        """Calls of which nobody knows whether they took effect, the oldest first.

        Args:
            limit: how many at most.
        """
        return self._writer.ask(lambda session: calls.unknown(session, limit), writes=False)

    def settle(self, number: int, *, applied: bool, by: str | None = None, note: str | None = None) -> Future[Record]:
        """Say what came of an unknown call. Handed in again, it is answered so (applied), or runs (not applied).

        Args:
            number: the call's, as it is listed.
            applied: it took effect.
            by: who says so.
            note: why.

        The future fails with `Unsettled` where there is no such call, or it is not unknown.
        """
        return self._writer.ask(lambda session: calls.settle(session, number, applied, by, note))

    def settle_all(
        self, numbers: Sequence[int], *, applied: bool, by: str | None = None, note: str | None = None
    ) -> Future[list[Record]]:
        """The same for several calls: all of them are settled, or none.

        Args:
            numbers: the calls', as they are listed.
            applied: they took effect.
            by: who says so.
            note: why.
        """
        return self._writer.ask(
            lambda session: [calls.settle(session, number, applied, by, note) for number in dict.fromkeys(numbers)]
        )

    def counts(self) -> Future[dict[str, int]]:
        """How many calls there are of each state."""
        return self._writer.ask(calls.counts, writes=False)

    def prune(self, older_than: float) -> Pruned:
        """Forget what ended more than so many seconds ago; waits until it is done.

        What is open, unknown or waits stays, however old it is. A plan that was cut off counts as ended when its
        process was last heard of; until it is forgotten its finished calls are not.

        Args:
            older_than: seconds since they ended.

        Raises:
            JournalUnavailable: the file cannot be written; some may be forgotten by then.
        """
        age = seconds("journal: prune: older_than", older_than, zero=True)
        before = self._writer.ask(lambda session: session.wall() - age, writes=False).result()

        def all_of(some: Callable[[Session], int]) -> int:
            found = 0
            while count := self._writer.ask(some).result():
                found += count
            return found

        kept = all_of(
            lambda session: batches.prune(session, before, calls.AT_ONCE)
        )  # before the calls, which they hold
        done = Pruned(
            all_of(lambda session: calls.prune(session, before)),
            all_of(lambda session: approvals.prune(session, before, calls.AT_ONCE)),
            all_of(lambda session: deferred.prune(session, before, calls.AT_ONCE)),
            all_of(lambda session: blobs.prune(session, before, calls.AT_ONCE)),
            kept,
            all_of(lambda session: means.prune(session, before)),
        )
        self._writer.ask(lambda session: calls.prune_owners(session, before)).result()
        self._writer.ask(_shrink).result()
        return done

    # ---------------------------------------------------------------- batches

    def begin_batch(
        self,
        key: bytes,
        token: bytes,
        *,
        run_id: str,
        name: str,
        named: NamedBy = "batch",
        tenant: str | None = None,
        plan: bool = True,
        size: int = 0,
        digest: bytes | None = None,
        document: bytes | None = None,
    ) -> Future[tuple[BatchVerdict, KeptBatch | None]]:
        """Take up a batch that can be gone on with: "run", and it is on the disk and this attempt's; or what is to be
        done instead; and what was known of it before.

        Args:
            key: where its identity is stored.
            token: names this attempt and no other: whoever ends it must show it.
            run_id: of its run.
            name: what it is called by.
            named: by its caller ("batch"), or by the provider ("response").
            tenant: whom its run belongs to.
            plan: it is a plan.
            size: how many calls it has.
            digest: of its calls.
            document: its calls; not kept where the journal stores no arguments.
        """
        kept = document if self.keeps_arguments else None
        return self._writer.ask(
            lambda session: batches.begin(
                session,
                key,
                token,
                run_id=run_id,
                named=named,
                name=name,
                tenant=tenant,
                plan=plan,
                size=size,
                digest=digest,
                document=kept,
            )
        )

    def finish_batch(self, token: bytes, ok: int) -> Future[bool]:
        """Write that an attempt has ended; tried again until it is done. False: it is another attempt's by now.

        Args:
            token: of the attempt.
            ok: how many of its calls ended ok.
        """
        return self._writer.ask(lambda session: batches.finish(session, token, ok), again="end of a batch")

    def batches(self, *, run_id: str | None = None, limit: int = 1000) -> Future[list[KeptBatch]]:
        """Batches that can be gone on with, the newest first.

        Args:
            run_id: only those of this run.
            limit: how many at most.
        """
        return self._writer.ask(lambda session: batches.listed(session, run_id=run_id, limit=limit), writes=False)

    # ---------------------------------------------------------------- how long tools take

    def learn(self, learned: Mapping[str, tuple[int, float]]) -> Future[None]:
        """Add to what is known of how long calls take; what other processes have told is kept.

        Args:
            learned: by tool name: how many answers, and their mean seconds.
        """
        told = dict(learned)
        return self._writer.ask(lambda session: means.add(session, told))

    def means(self) -> Future[dict[str, tuple[int, float]]]:
        """By tool name, how many answers its mean counts as (at most 1,000), and the mean seconds."""
        return self._writer.ask(means.read, writes=False)

    # ---------------------------------------------------------------- approvals

    def ask_approval(self, approval: Approval, arguments: bytes | None = None) -> Future[Approval]:
        """Write down that a person is asked; asked again with the same id it is as it was.

        Args:
            approval: what is asked.
            arguments: of the call, for the person who decides.
        """
        kept = arguments if self.keeps_arguments else None
        return self._writer.ask(lambda session: approvals.ask(session, approval, kept))

    def approval(self, approval_id: str) -> Future[Approval | None]:
        """One approval, or None.

        Args:
            approval_id: which one.
        """
        return self._writer.ask(lambda session: approvals.find(session, approval_id), writes=False)

    def approvals(
        self, *, state: ApprovalState | None = None, run_id: str | None = None, limit: int = 1000
    ) -> Future[list[Approval]]:
        """Approvals, the oldest first.

        Args:
            state: only those in this state.
            run_id: only those of this run.
            limit: how many at most.
        """
        return self._writer.ask(
            lambda session: approvals.listed(session, state=state, run_id=run_id, limit=limit), writes=False
        )

    def decide(
        self,
        approval_id: str,
        approved: bool,
        *,
        by: str | None = None,
        reason: str | None = None,
        expires_at: float | None = None,
        digest: bytes | None = None,
        arguments: bytes | None = None,
    ) -> Future[Approval]:
        """Write down a decision; the same one twice is heard once.

        Args:
            approval_id: which one.
            approved: yes or no.
            by: who decided.
            reason: why.
            expires_at: Unix time until which it holds; None: as it was asked.
            digest: of the arguments of an edited call.
            arguments: the whole set of arguments that the call is to run with in place of its own, as JSON. A deferred
                call is run with them; for a batch that is gone on with, give them to `Run.resume`.

        A deferred call that waits for this may be taken at once. The future fails with `Unsettled` where there is none,
        it has expired, or it was decided otherwise.

        Raises:
            PolicyError: an argument of another kind; or arguments, and the journal stores none.
        """
        flag("journal: decide: approved", approved)
        for name, given, kind, wanted in (
            ("by", by, str, "text"), ("reason", reason, str, "text"),
            ("digest", digest, bytes, "bytes"), ("arguments", arguments, bytes, "bytes"),
        ):  # fmt: skip
            if given is not None and not isinstance(given, kind):
                raise PolicyError(f"journal: decide: {name}: {wanted}; got {type(given).__name__[:80]}")
        if expires_at is not None:
            seconds("journal: decide: expires_at", expires_at, zero=True)
        if arguments is not None and not self.keeps_arguments:
            raise PolicyError("journal: decide: it stores no arguments, so a decision can bring none")
        return self._writer.ask(
            lambda session: approvals.decide(
                session,
                approval_id,
                approved,
                by=by,
                reason=reason,
                expires_at=expires_at,
                digest=digest,
                arguments=arguments,
            )
        )

    def claim_approval(self, approval_id: str, digest: bytes) -> Future[tuple[Claim, Approval | None]]:
        """Use an approval for a call with these arguments: once, whoever else tries.

        Args:
            approval_id: which one.
            digest: of the arguments.
        """
        return self._writer.ask(lambda session: approvals.claim(session, approval_id, digest))

    def arguments_of(self, kind: Literal["approval", "queued", "batch"], ref: str) -> Future[bytes | None]:
        """Stored arguments, or None where there are none.

        Args:
            kind: of an approval, of a call in the queue, or of a batch.
            ref: its id, its handle, or its number as text.
        """
        return self._writer.ask(lambda session: approvals.arguments_of(session, kind, ref), writes=False)

    # ---------------------------------------------------------------- deferred calls

    def enqueue(
        self,
        call: Deferred,
        arguments: bytes,
        *,
        behind: Sequence[str] = (),
        most: Sequence[tuple[str | None, int]] = (),
        asked: Approval | None = None,
        edited: bytes | None = None,
    ) -> Future[Deferred]:
        """Put a call into the queue; one of its identity that is there already is returned in its place.

        Args:
            call: what is put in.
            arguments: of the call.
            behind: handles of the calls that it comes behind: it joins their chains, and makes them one.
            most: (a tool's name, or None for all, how many may wait) pairs.
            asked: what a person has said to it, or was asked: it goes with the call.
            edited: the arguments that the person gave, as JSON.

        The future fails with `QueueFull` where as many wait as may.

        Raises:
            PolicyError: the journal stores no arguments.
        """
        if not self.keeps_arguments:
            raise PolicyError("journal: it stores no arguments, so nothing can be deferred; say arguments=True")
        return self._writer.ask(lambda session: deferred.enqueue(session, call, arguments, behind, most, asked, edited))

    def claim_next(
        self,
        tools: Sequence[str] | None = None,
        limit: int = 1,
        *,
        busy: Sequence[str] = (),
        foreign_before: float | None = None,
        asks: bool = True,
    ) -> Future[list[tuple[Deferred, bytes | None]]]:
        """Take the next calls of the queue: (call, arguments). No call goes to two who ask.

        Args:
            tools: names that this worker has; None: any.
            limit: how many at most.
            busy: names of tools of which it takes none now.
            foreign_before: Unix time; of what was queued before it, also what names a tool that this worker has not.
            asks: also calls that wait for a person, since this worker can ask one.
        """
        return self._writer.ask(
            lambda session: deferred.claim_next(
                session, tools, limit, busy=busy, foreign_before=foreign_before, asks=asks
            )
        )

    def due(
        self,
        tools: Sequence[str] | None = None,
        *,
        busy: Sequence[str] = (),
        foreign_before: float | None = None,
        asks: bool = True,
    ) -> Future[Due]:
        """What the queue has for a worker; takes nothing.

        Args:
            tools: as `claim_next` takes them.
            busy: as there.
            foreign_before: as there.
            asks: as there.
        """
        return self._writer.ask(
            lambda session: deferred.due(session, tools, busy=busy, foreign_before=foreign_before, asks=asks),
            writes=False,
        )

    def claims(self, held: Sequence[bytes]) -> Future[dict[bytes, ClaimState]]:
        """What has become of a worker's claims.

        Args:
            held: the claims.
        """
        return self._writer.ask(lambda session: deferred.claims(session, held), writes=False)

    def requeue_dead(self) -> Future[tuple[int, int]]:
        """Look after the claims of dead workers: (how many wait again, how many are unknown)."""
        return self._writer.ask(deferred.requeue_dead)

    def finish_deferred(
        self,
        claim: bytes,
        answer: Answer,
        state: Literal["done", "cancelled", "unknown"] = "done",
        *,
        asked: Approval | None = None,
    ) -> Future[bool]:
        """Write what a claimed call came to; tried again until it is done. False: it is another worker's by now.

        Args:
            claim: the worker's.
            answer: what it came to.
            state: "cancelled" for one that never began; "unknown" for one whose work was cut off.
            asked: what a person has said to it.
        """
        return self._writer.ask(lambda session: deferred.finish(session, claim, answer, state, asked), again="outcome")

    def give_back(
        self, claim: bytes, *, wait: float = 0.0, asked: Approval | None = None, arguments: bytes | None = None
    ) -> Future[bool]:
        """Put a claimed call back, unstarted.

        Args:
            claim: the worker's.
            wait: seconds for which nobody takes it, since there was no room for it.
            asked: what a person is to be asked about it, or has said: it goes with the call.
            arguments: those that the person is shown, or gave.
        """
        kept = arguments if self.keeps_arguments else None
        return self._writer.ask(
            lambda session: deferred.give_back(session, claim, wait, asked, kept), again="return to the queue"
        )

    def cancel_deferred(self, handle: str) -> Future[DeferredState | None]:
        """Take a call back: "cancelled"; or it is with a worker, which is told to stop: "claimed".

        Args:
            handle: its name.

        Another state: it could not be cancelled. None: there is no call of this handle.
        """
        return self._writer.ask(lambda session: deferred.cancel(session, handle))

    def deferred_by(self, keys: Sequence[bytes]) -> Future[dict[bytes, tuple[Deferred, Answer | None]]]:
        """Deferred calls by their identities, each with its answer.

        Args:
            keys: where identities are stored (`records.place`).
        """
        return self._writer.ask(lambda session: deferred.by_keys(session, keys), writes=False)

    def deferred_counts(self) -> Future[dict[str, int]]:
        """How many deferred calls there are of each state."""
        return self._writer.ask(deferred.counts, writes=False)

    def deferred(self, handle: str) -> Future[tuple[Deferred, Answer | None] | None]:
        """One deferred call and its answer, or None.

        Args:
            handle: its name.
        """
        return self._writer.ask(lambda session: deferred.find(session, handle), writes=False)

    def deferred_calls(
        self, *, state: DeferredState | None = None, run_id: str | None = None, limit: int = 1000
    ) -> Future[list[Deferred]]:
        """Deferred calls, the oldest first.

        Args:
            state: only those in this state.
            run_id: only those of this run.
            limit: how many at most.
        """
        return self._writer.ask(
            lambda session: deferred.listed(session, state=state, run_id=run_id, limit=limit), writes=False
        )

    # ---------------------------------------------------------------- large contents

    def keep_blob(
        self, handle: str, content: bytes, *, run_id: str, tool: str, tenant: str | None = None
    ) -> Future[bool]:
        """Keep a content under a handle; False where there is one of this handle, which then stays.

        Args:
            handle: its name.
            content: its bytes.
            run_id: whose result it is.
            tool: whose result it is.
            tenant: whose result it is.
        """
        return self._writer.ask(
            lambda session: blobs.put(session, handle, content, run_id=run_id, tool=tool, tenant=tenant)
        )

    def blob(self, handle: str) -> Future[Blob | None]:
        """What is kept under a handle, or None.

        Args:
            handle: its name.
        """
        return self._writer.ask(lambda session: blobs.find(session, handle), writes=False)

    def read_blob(self, handle: str, first: int = 0, size: int | None = None) -> Future[bytes | None]:
        """A slice of a content, shorter at its end; None where there is none of this handle.

        Args:
            handle: its name.
            first: the first byte, from 0.
            size: how many bytes; None: to the end.
        """
        return self._writer.ask(lambda session: blobs.read(session, handle, first, size), writes=False)

    def drop_blob(self, handle: str) -> Future[bool]:
        """Forget a content; False where there is none.

        Args:
            handle: its name.
        """
        return self._writer.ask(lambda session: blobs.drop(session, handle))

    # ---------------------------------------------------------------- the whole

    def migrate(self) -> tuple[int, int]:
        """Open the file and bring it up to date: (its form now, the newest that there is)."""
        version = self._writer.ask(lambda session: file.version_of(session.db), writes=False).result()
        return version, file.newest()

    def statistics(self) -> dict[str, int]:
        """Counts: steps that wait, kept ones, commits, failures, and kept ones that were given up."""
        return self._writer.statistics()

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Write what was asked for, and end; True where that was done in so many seconds, and all of it is written.

        Outcomes that could not be written before (a full disk) are tried once more, for half of that time. Those that
        cannot be written are told in the log, as an error; their calls are unknown from then on.

        Args:
            timeout: seconds.
        """
        return self._writer.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Journal({self.path!r})"


def _part(given: object, name: str) -> object:
    return getattr(given, name, None)


def _shrink(session: Session) -> int:
    """Give back to the system what is free in the file, some of it at a time."""
    session.db.execute("PRAGMA incremental_vacuum(1000)").fetchall()
    return 0


def path_of(given: object) -> str:
    """A path as it is kept: whole, so that changing the folder later changes nothing.

    Raises:
        PolicyError: it is none.
    """
    try:
        path = os.fspath(given)  # type: ignore[call-overload]  # what is none is told
    except Exception:
        raise PolicyError(f"journal: a path, ':memory:' or a Journal; got {shown(given)}") from None
    if not isinstance(path, str) or not path or "\0" in path:
        raise PolicyError(f"journal: a path, ':memory:' or a Journal; got {shown(given)}")
    return path if path == file.MEMORY else os.path.abspath(path)


def secret_of(given: object) -> bytes | None:
    """A secret as bytes.

    Raises:
        PolicyError: it is none; its value is not shown.
    """
    if given is None:
        return None
    raw = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
    if not isinstance(raw, bytes) or not raw:
        kind = "an empty text" if raw in ("", b"") else type(given).__name__[:80]
        raise PolicyError(f"secret: text or bytes that nobody can guess; got {kind}")
    return raw


__all__ = ["BUSY_SECONDS", "Journal", "JournalUnavailable", "Pruned", "path_of", "secret_of"]
