"""Going on with a batch whose process has died, by its run's id: found in the journal, read, looked at.

Theory. `towerman run` with a journal gives a run an id, says it, and writes the batch down under it. The id is enough
to go on: the calls are in the journal. Where that stores no arguments, the calls are handed in again, and are compared
with what was begun by a digest.

House rules. Nothing runs here. What the journal knows of a call is told without its arguments and its answer.
"""

from __future__ import annotations

import os
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Final, TypeVar

from towerman.cli.words import Wrong, complain

if TYPE_CHECKING:
    from concurrent.futures import Future

    from towerman.calls import Batch
    from towerman.documents import KeptBatch
    from towerman.explain import Explanation
    from towerman.journal import Journal
    from towerman.records import Deferred, Record
    from towerman.tower import Tower

T = TypeVar("T")

NAME: Final = "batch"
"""What the one batch of a run on the command line is called by."""


def new_id() -> str:
    """An id for a run that nobody else has."""
    return f"run-{os.urandom(5).hex()}"


def to_resume(run_id: str) -> str:
    """The option that names a run to go on with, as a shell takes it: an id may begin with the sign of an option."""
    return f"--resume={run_id}" if run_id.startswith("-") else f"--resume {run_id}"


def journal_of(tower: Tower, tools: str) -> Journal:
    """The tower's journal.

    Raises:
        Wrong: it has none.
    """
    if tower.journal is None:
        raise Wrong(
            f"--resume: the tower in {tools} has no journal; say Tower(journal='towerman.db'), or set TOWERMAN_JOURNAL"
        )
    return tower.journal


def find(journal: Journal, run_id: str, name: str | None) -> KeptBatch:
    """The batch of a run that can be gone on with.

    Args:
        journal: where it is written down.
        run_id: of its run.
        name: what it is called by, where its run has several.

    Raises:
        Wrong: there is none, or it is not clear which one is meant; the message says what there is.
    """
    found = _ask(journal.batches(run_id=run_id))
    if name is not None:
        found = [one for one in found if one.name == name]
    if not found:
        which = f"batch {name[:80]!r} of run" if name is not None else "batch of run"
        raise Wrong(
            f"--resume: no {which} {run_id[:80]!r} is written down in {journal.path}; towerman journal show --batches "
            "lists those that are"
        )
    if len(found) > 1:
        names = ", ".join(repr(one.name[:60]) for one in found[:10])
        more = f" and {len(found) - 10} more" if len(found) > 10 else ""
        raise Wrong(f"--resume: run {run_id[:80]!r} has several batches: {names}{more}; say which: --batch-id NAME")
    return found[0]


def read(tower: Tower, journal: Journal, kept: KeptBatch, calls: Batch | None) -> Batch:
    """The calls of a kept batch: out of the journal, or as they were handed in again.

    Raises:
        Wrong: they are not in the journal and not handed in, or they are not those that were begun.
    """
    from towerman.documents import digest_of, read_document

    if calls is not None:
        digest = digest_of(calls, _key(tower, journal))
        if kept.digest is not None and digest is not None and digest != kept.digest:
            raise Wrong(
                f"--resume: these are not the calls that were begun as run {kept.run_id!r}; hand in the same ones, or "
                "leave --resume out to begin anew"
            )
        if kept.named == "batch":
            return replace(calls, batch_id=kept.name)
        return replace(calls, batch_id=None, response_id=kept.name)
    stored = _ask(journal.arguments_of("batch", str(kept.number)))
    if stored is None:
        why = "it stores no arguments" if not journal.keeps_arguments else "some have no form that can be stored"
        raise Wrong(
            f"--resume: the calls of run {kept.run_id!r} are not in the journal ({why}); hand them in again: "
            f"towerman run CALLS {to_resume(kept.run_id)}"
        )
    try:
        return read_document(stored)
    except ValueError as wrong:
        raise Wrong(
            f"--resume: the calls of run {kept.run_id!r} cannot be read ({wrong}); hand them in again"
        ) from None


def states(tower: Tower, journal: Journal, kept: KeptBatch, batch: Batch) -> dict[int, str]:
    """By index, how each call stands, in the words of `towerman.explain.parts.STANDS`."""
    from towerman.records import identity, place

    key = _key(tower, journal)
    places: dict[int, bytes] = {}
    for index, call in enumerate(batch.calls):
        found = identity(
            call.tool,
            index,
            run_id=kept.run_id,
            tenant=kept.tenant,
            idempotency_key=call.idempotency_key,
            batch_id=batch.batch_id,
            response_id=batch.response_id,
        )
        assert found is not None, "a kept batch has a name"
        places[index] = place(key, found)
    keys = list(dict.fromkeys(places.values()))
    records = _ask(journal.look_up(keys))
    queued = _ask(journal.deferred_by(keys))
    return {index: _stands(records.get(one), queued.get(one, (None,))[0]) for index, one in places.items()}


def _stands(record: Record | None, queued: Deferred | None) -> str:
    if record is None:
        if queued is not None and queued.state in ("queued", "claimed"):
            return "queued"
        return "not begun"
    if record.unknown:
        return f"unknown: call {record.number} of the journal"
    if record.state == "open" or record.running:
        return "at work"
    if record.state == "settled":
        return f"settled: {'it took effect' if record.applied == 'yes' else 'it did not take effect'}"
    return "done" if record.outcome == "ok" else f"failed: {record.code or record.outcome}"


def named(
    tower: Tower, tools: str, batch: Batch, kept: KeptBatch | None, run_id: str | None
) -> tuple[str | None, Batch]:
    """The run's id and the batch with its name, said on stderr where the id is enough to go on.

    Args:
        tower: whose journal it is.
        tools: how it is named on the command line.
        batch: as it was read.
        kept: what was found of it; None: it begins here.
        run_id: as it was asked for.
    """
    if kept is not None:
        tell_at_work(tower, kept)
        return kept.run_id, batch
    if tower.journal is None or not batch.calls:
        return run_id, batch
    run_id = run_id or new_id()
    complain(f"run {run_id}; if it is cut off: towerman run --tools {quote(tools)} {to_resume(run_id)}")
    return run_id, replace(batch, batch_id=NAME)


def meant(
    tower: Tower, tools: str, given: Batch | None, run_id: str | None, name: str | None
) -> tuple[Batch, KeptBatch | None]:
    """The batch that is meant, and what the journal knows of it where it was begun before.

    Args:
        tower: whose journal it is.
        tools: how it is named on the command line.
        given: the calls that were handed in.
        run_id: of the run that is gone on with; None: it begins here.
        name: what the batch is called by, where its run has several.

    Raises:
        Wrong: there is no such run, or its calls are not known.
    """
    if run_id is None:
        assert given is not None, "the words were looked at"
        return given, None
    journal = journal_of(tower, tools)
    kept = find(journal, run_id, name)
    return read(tower, journal, kept, given), kept


def explained(tower: Tower, batch: Batch, kept: KeptBatch | None) -> Explanation:
    """What a batch would do; of one that was begun before, also how each of its calls stands."""
    journal = tower.journal
    if kept is None or journal is None:
        return tower.explain(batch)
    known = _ask(journal.means())
    tower._core.remember(known)
    return tower.explain(batch, tenant=kept.tenant).with_states(states(tower, journal, kept, batch))


def tell_unknown(journal: Journal, run_id: str, tools: str) -> None:
    """Say which calls of a run are of unknown effect, and what is to be done about them."""
    from towerman.records import JournalUnavailable

    try:
        found = [one for one in journal.unknown().result() if one.run_id == run_id]
    except JournalUnavailable:
        return
    if not found:
        return
    numbers = " ".join(str(one.number) for one in found[:20])
    more = f" (and {len(found) - 20} more)" if len(found) > 20 else ""
    many = f"{len(found)} calls are" if len(found) > 1 else "1 call is"
    again = f"towerman run --tools {quote(tools)} {to_resume(run_id)}"
    complain(
        f"{many} of unknown effect: look what they were to change, say what came of them with towerman journal resolve "
        f"{numbers}{more} --applied or --not-applied, then go on: {again}"
    )


def tell_at_work(tower: Tower, kept: KeptBatch) -> None:
    """Say that somebody is at work on a batch, who is waited for."""
    if kept.state == "at work":
        waits = tower.options.on_duplicate == "join"
        rest = f"it is waited for, at most {tower.options.max_wait:g} s" if waits else "it is not waited for"
        complain(f"run {kept.run_id} is at work in process {kept.pid} on {kept.host}; {rest}")


def _key(tower: Tower, journal: Journal) -> bytes:
    secret = tower.options.secret
    return _ask(journal.open(secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else secret))


def _ask(future: Future[T]) -> T:
    """What a journal answers.

    Raises:
        Wrong: it cannot be read.
    """
    from towerman.records import JournalUnavailable

    try:
        return future.result()
    except JournalUnavailable as trouble:
        raise Wrong(str(trouble)) from None
