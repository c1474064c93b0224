"""The journal's file (S14, G8, G10): what was written is there whole or not at all, for all, after any end."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from towerman import Journal, JournalUnavailable, PolicyError
from towerman.journal import calls, file, owners
from towerman.journal.owners import Identity, alive, myself, start_of
from towerman.journal.writer import Asked, Writer
from towerman.records import (
    Answer,
    Approval,
    Deferred,
    Intent,
    Record,
    Unsettled,
    age,
    canonical,
    digest,
    effect_key,
    identity,
    place,
    verdict,
)

OK = Answer("ok", None, "yes", message="The call succeeded.", content='"done"')
LOST = Answer("timed_out", "handler_timeout", "unknown", message="It did not end.", content="{}")
SECRET = "zqxjkvbpwm"


class Wall:
    """A calendar that a test moves."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def intent(key: bytes | None, *, tool: str = "pay", harmless: bool = False, **more: Any) -> Intent:
    """An intent; its token is new each time."""
    return Intent(os.urandom(16), key, more.pop("digest", None), tool, "run", 1, 0, harmless=harmless, **more)


def deferred(name: str, **more: Any) -> Deferred:
    """A call for the queue."""
    return Deferred(name, more.pop("tool", "pay"), "run", key=name.encode(), digest=None, **more)


def rows(path: str | os.PathLike[str], sql: str, *given: object) -> list[Any]:
    """What another program sees in the file."""
    db = sqlite3.connect(path)
    try:
        return db.execute(sql, given).fetchall()
    finally:
        db.close()


def change(path: str | os.PathLike[str], sql: str, *given: object) -> None:
    """What another program does to the file."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute(sql, given)
    finally:
        db.close()


def dead(path: str | os.PathLike[str]) -> None:
    """Let every process that has written to a file be one that is gone."""
    change(path, "UPDATE owners SET pid = 999999999, beat = 0")


# ==================================================================== words


def test_s14_identity_is_the_key_or_run_response_and_place() -> None:
    """S14: a call is found again by its caller's key, else by run, batch or response, and place; else it is new."""
    place_of = {"run_id": "r", "tenant": "t"}
    by_key = identity("pay", 3, idempotency_key="k", batch_id="b", response_id="x", **place_of)
    assert by_key == identity("pay", 9, idempotency_key="k", run_id="other", tenant="t")
    by_batch = identity("pay", 3, batch_id="b", response_id="x", **place_of)
    assert by_batch == identity("pay", 3, batch_id="b", **place_of)
    by_response = identity("pay", 3, response_id="b", **place_of)
    assert by_response is not None and by_batch is not None and by_response.kind == "response"
    key = b"k" * 32
    every = [by_key, by_batch, by_response]
    every += [identity("pay", 4, response_id="b", **place_of), identity("mail", 3, response_id="b", **place_of)]
    every += [
        identity("pay", 3, response_id="b", run_id="r2", tenant="t"),
        identity("pay", 3, response_id="b", run_id="r"),
    ]
    every += [identity("pay", 3, idempotency_key="k", run_id="r")]
    assert len({place(key, one) for one in every if one is not None}) == len(every)
    assert identity("pay", 0, run_id="r") is None
    assert identity("pay", 0, run_id="r", idempotency_key="", batch_id="", response_id="") is None


def test_identities_do_not_run_into_one_another() -> None:
    """Parts are told apart whatever is in them, and another key gives other places."""
    one = identity("t", 0, run_id="ab", response_id="c")
    two = identity("t", 0, run_id="a", response_id="bc")
    assert one is not None and two is not None
    assert place(b"1", one) != place(b"1", two) != place(b"2", two)
    assert (
        effect_key(b"1", place(b"1", one)) == effect_key(b"1", place(b"1", one)) != effect_key(b"1", place(b"1", two))
    )
    assert effect_key(b"1", place(b"1", one)).startswith("tm-")
    assert SECRET not in repr(identity("t", 0, run_id="r", idempotency_key=SECRET))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ({"a": 1, "b": [2, {"c": 3}]}, '{"b": [2, {"c": 3}], "a": 1}', True),
        ("", {}, True),
        (" {} ", "{}", True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": None}, {}, False),
    ],
)
def test_arguments_have_one_digest_however_they_are_written(one: Any, two: Any, same: bool) -> None:
    """Order of names and blanks do not count; everything else does."""
    assert (digest(b"k", "t", one) == digest(b"k", "t", two)) is same
    assert digest(b"k", "t", one) != digest(b"other", "t", one)
    assert digest(b"k", "t", one) != digest(b"k", "other", one)


def test_values_that_json_does_not_have() -> None:
    """What has one spelling has a digest; what has none has none, and conflicts with nothing."""
    from datetime import date
    from decimal import Decimal
    from enum import Enum

    class Colour(Enum):
        RED = 1

    told = [date(2024, 1, 2), Decimal("1.0"), Decimal("1.00"), Colour.RED, b"x", {3, 1, 2}, Path("/a"), "2024-01-02"]
    spelled = [canonical({"a": value}) for value in told]
    assert None not in spelled and len(set(spelled)) == len(spelled)
    assert canonical({"a": {3, 1}}) == canonical({"a": {1, 3}})
    assert canonical({"a": object()}) is None
    assert canonical({"a": {1: 2, "b": 3}}) is None
    assert canonical("[" * 100_000) is None
    cycle: list[object] = []
    cycle.append(cycle)
    assert canonical({"a": cycle}) is None


def record(state: str, **more: Any) -> Record:
    """A record in a state."""
    told: dict[str, Any] = dict.fromkeys(Record.__dataclass_fields__)
    told |= {"number": 1, "tool": "pay", "state": state, "live": False, "running": False, "applied": "unknown", **more}
    return Record(**told)


@pytest.mark.parametrize(
    ("found", "harmless", "told"),
    [
        (None, False, "run"),
        (record("done", digest=b"1"), False, "replay"),
        (record("done", digest=b"2"), False, "conflict"),
        (record("open", digest=b"2", live=True), True, "conflict"),
        (record("done"), False, "replay"),
        (record("open", live=True), False, "join"),
        (record("open", live=True), True, "join"),
        (record("open"), False, "unknown"),
        (record("open"), True, "run"),
        (record("unknown"), False, "unknown"),
        (record("unknown"), True, "run"),
        (record("unknown", live=True, running=True), True, "join"),
        (record("unknown", live=True, running=True), False, "unknown"),
        (record("settled", applied="yes"), False, "applied"),
        (record("settled", applied="no"), False, "run"),
    ],
)
def test_g10_what_is_written_down_decides(found: Record | None, harmless: bool, told: str) -> None:
    """G10, S14: a call of unknown effect never runs again by itself, unless that does no harm or it was settled."""
    assert verdict(found, b"1", harmless=harmless) == told
    if told == "conflict":
        assert verdict(found, None, harmless=harmless) != "conflict"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2700), ("12h", 43200), ("30d", 2592000), ("1w", 604800)]
)
def test_ages(text: str, seconds: float) -> None:
    """A length of time as people write it."""
    assert age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "30", "-1d", "1.5h", "30 d", "9999999999d", "²d", "30y", "1d\n"])
def test_no_ages(text: str) -> None:
    """Whatever is none is told how one is written."""
    with pytest.raises(ValueError, match="for example 30d"):
        age(text)


# ==================================================================== intents and outcomes


def test_an_intent_then_its_outcome(tmp_path: Path) -> None:
    """S14: an intent is on the disk before its future is done, and its outcome is told to whoever hands the call in."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        first = intent(b"k", tenant="acme", digest=b"d")
        assert journal.begin(first).result() == ("run", None)
        assert rows(path, "SELECT state, tool, run_id, tenant FROM calls") == [("open", "pay", "run", "acme")]
        told, found = journal.begin(intent(b"k", digest=b"d")).result()
        assert (told, found and found.live) == ("join", True)
        assert journal.begin(intent(b"k", digest=b"e")).result()[0] == "conflict"
        assert journal.finish(first.token, OK).result() is True
        assert journal.finish(first.token, OK).result() is False
        told, found = journal.begin(intent(b"k", digest=b"d")).result()
        assert found is not None
        assert (told, found.answer, found.applied, found.attempts) == ("replay", OK, "yes", 1)
        assert journal.look_up([b"k", b"other"]).result() == {b"k": found}
        assert journal.counts().result() == {"open": 0, "done": 1, "unknown": 0, "settled": 0}


def test_calls_without_identity_are_all_new() -> None:
    """S14: where there is nothing to find a call by it is written down, and never found again."""
    with Journal(":memory:") as journal:
        assert [journal.begin(intent(None)).result()[0] for _ in range(3)] == ["run"] * 3
        assert journal.counts().result()["open"] == 3


def test_an_intent_that_is_taken_back_was_never_there() -> None:
    """A call that was granted and cancelled before its first line may run later as if nothing had been."""
    with Journal(":memory:") as journal:
        first = intent(b"k")
        journal.begin(first).result()
        assert journal.withdraw(first.token).result() == 1
        assert journal.withdraw(first.token).result() == 0
        assert journal.calls().result() == []
        second = intent(b"k", harmless=True)
        assert journal.begin(second).result()[0] == "run"
        journal.finish(second.token, LOST).result()
        third = intent(b"k", harmless=True)
        told, found = journal.begin(third).result()
        assert told == "run" and found is not None and found.state == "unknown"
        journal.withdraw(third.token).result()
        [left] = journal.unknown().result()
        assert (left.state, left.attempts) == ("unknown", 1)


def test_g10_a_dead_process_leaves_unknown_calls(tmp_path: Path) -> None:
    """G10: what a process that is gone had begun is unknown, is listed, and runs again only where that does no harm."""
    path = tmp_path / "j.db"
    with Journal(path) as before:
        for name in (b"pay", b"read"):
            before.begin(intent(name, harmless=name == b"read")).result()
        assert before.unknown().result() == []
        before._writer._session.me = None  # type: ignore[union-attr]  # it dies: it says no goodbye
    dead(path)
    with Journal(path) as after:
        assert [one.number for one in after.unknown().result()] == [1, 2]
        assert after.begin(intent(b"pay")).result()[0] == "unknown"
        again = intent(b"read", harmless=True)
        told, found = after.begin(again).result()
        assert told == "run" and found is not None and not found.live
        after.finish(again.token, OK).result()
        [left] = after.unknown().result()
        assert (left.tool, left.number, left.unknown, left.state) == ("pay", 1, True, "open")
        assert after.look_up([b"read"]).result()[b"read"].attempts == 2


def test_a_late_end_settles_what_was_unknown() -> None:
    """An orphan that ends after its result was sealed says what came of it; while it runs nobody runs it again."""
    with Journal(":memory:") as journal:
        first = intent(b"k", harmless=True)
        journal.begin(first).result()
        assert journal.finish(first.token, LOST, running=True).result()
        assert journal.begin(intent(b"k", harmless=True)).result()[0] == "join"
        assert journal.begin(intent(b"k")).result()[0] == "unknown"
        assert journal.finish(first.token, OK).result()
        told, found = journal.begin(intent(b"k")).result()
        assert told == "replay" and found is not None and found.answer == OK


def test_whoever_was_taken_over_ends_nothing() -> None:
    """A start that counts as dead, and was begun anew since, cannot write its outcome over the new one's."""
    with Journal(":memory:") as journal:
        first = intent(b"k", harmless=True)
        journal.begin(first).result()
        journal.finish(first.token, LOST).result()
        second = intent(b"k", harmless=True)
        assert journal.begin(second).result()[0] == "run"
        assert journal.finish(first.token, OK).result() is False
        assert journal.withdraw(first.token).result() == 0
        assert journal.begin(intent(b"k")).result()[0] == "join"


@pytest.mark.parametrize("applied", [True, False])
def test_settling(tmp_path: Path, applied: bool) -> None:
    """A person says what came of an unknown call: it is answered so, or it runs; only unknown calls can be settled."""
    with Journal(tmp_path / "j.db") as journal:
        first, other = intent(b"k"), intent(b"o")
        journal.begin(first).result()
        journal.begin(other).result()
        with pytest.raises(Unsettled, match=r"call 1 \(pay\) is still at work"):
            journal.settle(1, applied=applied).result()
        journal.finish(first.token, LOST).result()
        journal.finish(other.token, LOST).result()
        with pytest.raises(Unsettled, match="there is no call 99"):
            journal.settle_all([1, 2, 99], applied=applied).result()
        assert len(journal.unknown().result()) == 2
        found = journal.settle(1, applied=applied, by="ops", note="looked at the bank" * 100).result()
        assert (found.state, found.settled_by, found.applied) == ("settled", "ops", "yes" if applied else "no")
        assert found.note is not None and len(found.note) == 500
        with pytest.raises(Unsettled, match="is settled"):
            journal.settle(1, applied=applied).result()
        again = intent(b"k")
        assert journal.begin(again).result()[0] == ("applied" if applied else "run")
        if not applied:
            assert journal.withdraw(again.token).result() == 1
            assert journal.begin(intent(b"k")).result()[0] == "run"
        assert [one.number for one in journal.unknown().result()] == [2]


def test_reads_are_written_down_when_they_have_ended() -> None:
    """A call without effect needs no intent; its outcome is told again, the first one that was written."""
    with Journal(":memory:") as journal:
        assert journal.note(intent(b"k"), Answer("ok", None, "no", content="1")).result() is True
        assert journal.note(intent(b"k"), Answer("ok", None, "no", content="2")).result() is False
        told, found = journal.begin(intent(b"k")).result()
        assert told == "replay" and found is not None and found.answer is not None and found.answer.content == "1"


def test_lists_and_counts() -> None:
    """What is listed: the newest first, by run, tool and state."""
    with Journal(":memory:") as journal:
        for number in range(5):
            one = intent(bytes([number]), tool="mail" if number % 2 else "pay")
            journal.begin(one).result()
            if number < 3:
                journal.finish(one.token, OK if number else LOST).result()
        assert [one.number for one in journal.calls().result()] == [5, 4, 3, 2, 1]
        assert [one.number for one in journal.calls(limit=2).result()] == [5, 4]
        assert [one.number for one in journal.calls(tool="mail").result()] == [4, 2]
        assert [one.number for one in journal.calls(run_id="run", state="done").result()] == [3, 2]
        assert [one.number for one in journal.calls(state="unknown").result()] == [1]
        assert [one.number for one in journal.calls(state="open").result()] == [5, 4]
        assert journal.calls(run_id="no").result() == []
        assert journal.counts().result() == {"open": 2, "done": 2, "unknown": 1, "settled": 0}
        assert [one.number for one in journal.unknown(limit=1).result()] == [1]


# ==================================================================== who is alive


def test_a_process_is_told_by_its_number_and_its_start() -> None:
    """A number that another process has by now is no life; without the system's word the lease counts."""
    here = myself()
    assert here.pid == os.getpid() and (not here.started or alive(here, 0.0, 1e9, here))
    if here.started:
        assert not alive(Identity("h", here.boot, here.space, here.pid, "1"), 1e9, 1e9, here)
        assert not alive(Identity("h", here.boot, here.space, 999_999_999, "1"), 1e9, 1e9, here)
        assert start_of(999_999_999) == ""
    for other in (Identity("h", "", "", here.pid, ""), Identity("h", "boot", here.space, here.pid, here.started)):
        assert alive(other, 100.0, 129.0, here)
        assert not alive(other, 100.0, 131.0, here)
        assert not alive(other, 131.0, 100.0, here)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system tells no start of a process")
def test_a_zombie_is_dead() -> None:
    """A process that has ended and that nobody has waited for counts as gone."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    for _ in range(500):
        if start_of(process.pid) == "":
            break
        time.sleep(0.01)
    assert start_of(process.pid) == ""
    process.wait()


def test_a_goodbye_is_believed(tmp_path: Path) -> None:
    """What is open when a journal is closed is nobody's: its process may live on."""
    path = tmp_path / "j.db"
    with Journal(path) as one:
        one.begin(intent(b"k")).result()
    with Journal(path) as two:
        assert len(two.unknown().result()) == 1


def test_signs_of_life_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with something open gives a sign now and then; one that is idle writes nothing."""
    from towerman.journal import writer

    monkeypatch.setattr(writer, "BEAT_SECONDS", 0.02)
    wall = Wall()
    path = tmp_path / "j.db"
    with Journal(path, _wall=wall) as journal:
        first = intent(b"k")
        journal.begin(first).result()
        wall.now += 100
        for _ in range(500):
            if rows(path, "SELECT beat FROM owners") == [(wall.now,)]:
                break
            time.sleep(0.01)
        assert rows(path, "SELECT beat FROM owners") == [(wall.now,)]
        journal.finish(first.token, OK).result()
        time.sleep(0.05)
        before = journal.statistics()["commits"]
        time.sleep(0.1)
        assert journal.statistics()["commits"] == before


# ==================================================================== waiting for somebody else's call


def test_a_watch_ends_with_the_call(tmp_path: Path) -> None:
    """Whoever waits for a call is woken by its end, in this process and in another; who waits for nothing at once."""
    path = tmp_path / "j.db"
    with Journal(path) as one, Journal(path) as two:
        first = intent(b"k")
        one.begin(first).result()
        here, there = one.watch(b"k"), two.watch(b"k")
        two.watch(b"nobody").result(5)
        time.sleep(0.2)
        assert not here.done() and not there.done()
        given_up = two.watch(b"k")
        assert given_up.cancel()
        one.finish(first.token, OK).result()
        here.result(5)
        there.result(5)
        assert two.statistics()["watched"] == 0


def test_a_watch_ends_with_the_process(tmp_path: Path) -> None:
    """Whoever waits for a call of a process that dies is told within a second or so."""
    path = tmp_path / "j.db"
    with Journal(path) as one, Journal(path) as two:
        one.begin(intent(b"k")).result()
        waits = two.watch(b"k")
        time.sleep(0.1)
        assert not waits.done()
        dead(path)
        waits.result(10)
        one.close()


# ==================================================================== approvals


def approval(name: str = "a1", **more: Any) -> Approval:
    """An approval that is asked for."""
    return Approval(name, "run", "pay", b"digest", more.pop("expires_at", 1_003_600.0), **more)


def test_an_approval_is_decided_once_and_claimed_once() -> None:
    """S4: the same decision twice is heard once, another one is refused; two who claim it get it once."""
    wall = Wall()
    with Journal(":memory:", _wall=wall) as journal:
        asked = journal.ask_approval(approval(tenant="acme"), b'{"a": 1}').result()
        assert (asked.state, asked.asked_at) == ("pending", wall.now)
        assert journal.ask_approval(approval(expires_at=1e12)).result() == asked
        assert journal.claim_approval("a1", b"digest").result()[0] == "pending"
        assert journal.claim_approval("no", b"digest").result() == ("missing", None)
        with pytest.raises(Unsettled, match="no such approval"):
            journal.decide("no", True).result()
        wall.now += 5
        yes = journal.decide("a1", True, by="ada", reason="fine").result()
        assert (yes.state, yes.decided_by, yes.decided_at) == ("approved", "ada", wall.now)
        assert journal.decide("a1", True).result() == yes
        with pytest.raises(Unsettled, match="is approved"):
            journal.decide("a1", False).result()
        assert journal.claim_approval("a1", b"another").result()[0] == "changed"
        told, used = journal.claim_approval("a1", b"digest").result()
        assert told == "claimed" and used is not None and used.claimed_at == wall.now
        assert journal.claim_approval("a1", b"digest").result()[0] == "taken"
        wall.now += 1e6
        assert journal.approval("a1").result() == used  # what was used does not expire
        assert journal.arguments_of("approval", "a1").result() == b'{"a": 1}'


def test_approvals_expire_and_are_listed() -> None:
    """S4: an approval holds until its time, which a decision may change; lists are by state and run."""
    wall = Wall()
    with Journal(":memory:", _wall=wall) as journal:
        for name in ("a1", "a2", "a3"):
            journal.ask_approval(approval(name)).result()
        journal.decide("a1", True, expires_at=wall.now + 10).result()
        journal.decide("a2", False, reason="no").result()
        assert [one.approval_id for one in journal.approvals(state="pending").result()] == ["a3"]
        wall.now += 20
        assert journal.claim_approval("a1", b"digest").result()[0] == "expired"
        assert journal.claim_approval("a2", b"digest").result()[0] == "denied"
        wall.now += 4000
        assert journal.claim_approval("a3", b"digest").result()[0] == "expired"
        with pytest.raises(Unsettled, match="is expired"):
            journal.decide("a3", True).result()
        assert [one.approval_id for one in journal.approvals(state="expired").result()] == ["a1", "a3"]
        assert [one.approval_id for one in journal.approvals(run_id="run").result()] == ["a1", "a2", "a3"]
        assert journal.approvals(run_id="no").result() == []
        assert journal.approvals(limit=1).result()[0].approval_id == "a1"


def test_an_edited_call_has_another_digest() -> None:
    """S4: an edit replaces digest and arguments with the decision; what was asked first does not fit any more."""
    with Journal(":memory:", _wall=Wall()) as journal:
        journal.ask_approval(approval(), b"old").result()
        journal.decide("a1", True, digest=b"new", arguments=b"edited").result()
        assert journal.claim_approval("a1", b"digest").result()[0] == "changed"
        assert journal.claim_approval("a1", b"new").result()[0] == "claimed"
        assert journal.arguments_of("approval", "a1").result() == b"edited"


# ==================================================================== deferred calls


def test_r123_a_queue_that_several_take_from() -> None:
    """R-123: the highest priority first, then the oldest; each call goes to one worker; a call is queued once."""
    wall = Wall()
    with Journal(":memory:", _wall=wall) as journal:
        journal.enqueue(deferred("low"), b"1").result()
        journal.enqueue(deferred("high", priority=5), b"2").result()
        journal.enqueue(deferred("later", priority=9, not_before=wall.now + 60), b"3").result()
        journal.enqueue(deferred("mail", tool="mail"), b"4").result()
        again = journal.enqueue(deferred("low", priority=99), b"9").result()
        assert again.priority == 0
        [(first, arguments)] = journal.claim_next().result()
        assert (first.handle, arguments, first.state, first.attempts, first.live) == ("high", b"2", "claimed", 1, True)
        [(mail, _)] = journal.claim_next(tools=["mail"]).result()
        assert mail.handle == "mail"
        [(low, _)] = journal.claim_next(limit=5).result()
        assert low.handle == "low" and journal.claim_next().result() == []
        assert first.claim is not None and low.claim is not None and mail.claim is not None
        assert journal.finish_deferred(first.claim, OK).result() is True
        assert journal.finish_deferred(first.claim, OK).result() is False
        assert journal.give_back(low.claim, wait=5).result() is True
        assert journal.claim_next().result() == []
        wall.now += 60
        assert [one.handle for one, _ in journal.claim_next(limit=9).result()] == ["later", "low"]
        found = journal.deferred("high").result()
        assert found is not None and found[0].state == "done" and found[1] == OK
        assert journal.arguments_of("queued", "high").result() is None
        assert journal.deferred("no").result() is None
        assert [one.handle for one in journal.deferred_calls(state="claimed").result()] == ["low", "later", "mail"]


def test_s3_a_chain_runs_in_order() -> None:
    """S3: calls of one chain are given out one after another, in order, also when a later one is more urgent."""
    with Journal(":memory:") as journal:
        for position, priority in enumerate((0, 9, 5)):
            one = deferred(f"c{position}", chain="ticket", position=position, priority=priority)
            journal.enqueue(one, b"").result()
        journal.enqueue(deferred("free"), b"").result()
        taken = []
        for _ in range(3):
            got = journal.claim_next(limit=9).result()
            taken.append([one.handle for one, _ in got])
            for one, _ in got:
                assert one.claim is not None
                journal.finish_deferred(one.claim, OK).result()
        assert taken == [["c0", "free"], ["c1"], ["c2"]]


def test_a_queued_call_can_be_taken_back() -> None:
    """What waits in the queue is cancelled; what a worker has is told to stop, and cannot begin any more."""
    with Journal(":memory:") as journal:
        journal.enqueue(deferred("a"), b"").result()
        assert journal.cancel_deferred("a").result() == "cancelled"
        assert journal.cancel_deferred("a").result() == "cancelled"
        assert journal.cancel_deferred("no").result() is None
        journal.enqueue(deferred("b"), b"").result()
        [(b, _)] = journal.claim_next().result()
        assert b.claim is not None
        assert journal.claims([b.claim, b"?"]).result() == {b.claim: "held", b"?": "lost"}
        assert journal.cancel_deferred("b").result() == "claimed"
        assert journal.claims([b.claim]).result() == {b.claim: "stop"}
        with pytest.raises(Unsettled, match="cancelled"):
            journal.begin(intent(b"b", claim=b.claim)).result()
        assert journal.give_back(b.claim).result() is True
        found = journal.deferred("b").result()
        assert found is not None and found[0].state == "cancelled"


@pytest.mark.parametrize(
    ("begun", "harmless", "ended", "state"),
    [
        (False, False, None, "queued"),
        (True, False, None, "unknown"),
        (True, True, None, "queued"),
        (True, False, OK, "done"),
        (True, False, LOST, "unknown"),
    ],
)
def test_r123_what_a_dead_worker_leaves(
    tmp_path: Path, begun: bool, harmless: bool, ended: Answer | None, state: str
) -> None:
    """R-123: an unbegun call goes back into the queue; a begun one is unknown, unless it is harmless or has its end."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        journal.enqueue(deferred("a", harmless=harmless, chain="c"), b"x").result()
        journal.enqueue(deferred("b", chain="c", position=1), b"y").result()
        [(claimed, _)] = journal.claim_next().result()
        if begun:
            one = intent(b"a", harmless=harmless, claim=claimed.claim)
            assert journal.begin(one).result()[0] == "run"
            if ended is not None:
                journal.finish(one.token, ended).result()
        assert journal.requeue_dead().result() == (0, 0)
        journal._writer._session.me = None  # type: ignore[union-attr]  # it dies: it says no goodbye
    dead(path)
    with Journal(path) as other:
        other.requeue_dead().result()
        found = other.deferred("a").result()
        assert found is not None and found[0].state == state
        assert found[1] == (ended if state == "done" else None)
        got = [one.handle for one, _ in other.claim_next(limit=9).result()]
        assert got == {"queued": ["a"], "done": ["b"], "unknown": []}[state]
        if state == "unknown":
            [unknown] = other.unknown().result()
            other.settle(unknown.number, applied=False).result()
            assert [one.handle for one, _ in other.claim_next(limit=9).result()] == ["a"]


def test_a_claim_that_was_lost_begins_nothing(tmp_path: Path) -> None:
    """R-123: a worker that was taken for dead cannot write the intent of a call that another one has by now."""
    path = tmp_path / "j.db"
    with Journal(path) as slow:
        slow.enqueue(deferred("a"), b"").result()
        [(mine, _)] = slow.claim_next().result()
        dead(path)
        with Journal(path) as fast:
            [(theirs, _)] = fast.claim_next().result()
            with pytest.raises(Unsettled, match="another worker"):
                slow.begin(intent(b"a", claim=mine.claim)).result()
            assert slow.finish_deferred(cast("bytes", mine.claim), OK).result() is False
            assert slow.give_back(cast("bytes", mine.claim)).result() is False
            assert fast.begin(intent(b"a", claim=theirs.claim)).result()[0] == "run"


def test_nothing_is_deferred_without_arguments(tmp_path: Path) -> None:
    """A journal that stores no arguments says so when something is to be resumed from them."""
    with Journal(tmp_path / "j.db", arguments=False, _wall=Wall()) as journal:
        with pytest.raises(PolicyError, match="arguments=True"):
            journal.enqueue(deferred("a"), b"")
        journal.ask_approval(approval(), b"secret").result()
        assert journal.arguments_of("approval", "a1").result() is None


# ==================================================================== large contents


def test_contents_are_read_in_slices(tmp_path: Path) -> None:
    """A content is kept once and read in any slice, the same as it was."""
    content = bytes(range(256)) * 1000
    with Journal(tmp_path / "j.db") as journal:
        assert journal.keep_blob("h", content, run_id="r", tool="t", tenant="acme").result() is True
        assert journal.keep_blob("h", b"other", run_id="r", tool="t").result() is False
        assert journal.keep_blob("empty", b"", run_id="r", tool="t").result() is True
        found = journal.blob("h").result()
        assert found is not None and (found.size, found.tool, found.tenant) == (256_000, "t", "acme")
        for first, size in [(0, None), (0, 10), (65_530, 12), (65_536, 65_536), (255_999, 9), (256_000, 1), (1, 0)]:
            expected = content[first:] if size is None else content[first : first + size]
            assert journal.read_blob("h", first, size).result() == expected
        assert journal.read_blob("empty").result() == b""
        assert journal.read_blob("no").result() is None
        assert journal.drop_blob("h").result() is True
        assert journal.drop_blob("h").result() is False
        assert journal.blob("h").result() is None


# ==================================================================== forgetting


def test_prune_forgets_what_ended_and_nothing_else(tmp_path: Path) -> None:
    """Retention: what ended long ago goes, with its values; what is open, unknown or waits stays, however old."""
    wall = Wall()
    path = tmp_path / "j.db"
    with Journal(path, _wall=wall) as journal:
        for number in range(700):
            one = intent(number.to_bytes(2, "big"))
            journal.begin(one)
            last = journal.finish(one.token, OK)
        last.result()
        lost, still = intent(b"lost"), intent(b"open")
        journal.begin(lost).result()
        journal.finish(lost.token, LOST).result()
        journal.begin(still).result()
        journal.ask_approval(approval("old"), b"x").result()
        journal.decide("old", False).result()
        journal.ask_approval(approval("waits", expires_at=1e12), b"x").result()
        journal.enqueue(deferred("queued"), b"x").result()
        journal.enqueue(deferred("gone"), b"x").result()
        journal.cancel_deferred("gone").result()
        journal.keep_blob("h", b"x" * 100_000, run_id="r", tool="t").result()
        wall.now += 10_000
        young = intent(b"young")
        journal.begin(young).result()
        journal.finish(young.token, OK).result()
        done = journal.prune(5_000)
        assert (done.calls, done.approvals, done.deferred, done.contents) == (700, 1, 1, 1)
        assert journal.counts().result() == {"open": 1, "done": 1, "unknown": 1, "settled": 0}
        assert [one.approval_id for one in journal.approvals().result()] == ["waits"]
        assert [one.handle for one in journal.deferred_calls().result()] == ["queued"]
        assert rows(path, "SELECT count(*) FROM answers") == [(2,)]
        assert rows(path, "SELECT count(*) FROM arguments") == [(2,)]
        assert rows(path, "SELECT count(*) FROM blob_parts") == [(0,)]
        assert journal.prune(5_000).calls == 0


def test_prune_forgets_processes_that_have_nothing(tmp_path: Path) -> None:
    """Rows of processes that are gone go with the last of their calls."""
    path = tmp_path / "j.db"
    for number in range(4):
        with Journal(path) as journal:
            one = intent(bytes([number]))
            journal.begin(one).result()
            if number:
                journal.finish(one.token, OK).result()
    with Journal(path) as journal:
        journal.prune(0)
        assert rows(path, "SELECT count(*) FROM owners") == [(1,)]
        assert len(journal.unknown().result()) == 1


# ==================================================================== the file


def test_the_file_is_private_and_whole_after_each_commit(tmp_path: Path) -> None:
    """A journal holds what tools answered: a new one is its owner's alone; commits wait for the disk."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        assert not path.exists()
        journal.begin(intent(b"k")).result()
        for one in tmp_path.iterdir():
            assert one.stat().st_mode & 0o077 == 0, one
        session = journal._writer._session
        assert session is not None
        assert session.db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert session.db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]
        assert rows(path, "PRAGMA foreign_key_check") == []


def test_migrations_are_numbered_without_gaps() -> None:
    """The form of the file is made by numbered files of SQL, which are part of the package."""
    found = file.migrations()
    assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
    assert file.newest() == len(found)
    assert all(file.statements(text) for _, _, text in found)
    with pytest.raises(ValueError, match="no end"):
        file.statements("CREATE TABLE a (b);\nCREATE TABLE c")


@pytest.mark.parametrize("form", range(1, file.newest()))
def test_an_older_file_is_brought_up_to_date(tmp_path: Path, form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of an earlier version is migrated when it is opened, and what was in it is there."""
    path = tmp_path / "j.db"
    every = file.migrations()
    monkeypatch.setattr(file, "migrations", lambda: every[:form])
    with Journal(path) as journal:
        journal.migrate()
    # By hand: this version's statements know the newest form only.
    for statement in (
        "INSERT INTO owners (id, host, boot, space, pid, started, since, beat) VALUES (1, 'h', '', '', 1, '', 0, 0)",
        "INSERT INTO calls (id, key, token, owner, state, tool, run_id, batch, slot, call_id, harmless, effect_free, "
        "intended_at, ended_at, outcome, applied) VALUES (1, x'6b', x'01', 1, 'done', 't', 'r', 1, 0, '', 0, 0, 1, 2, "
        "'ok', 'yes')",
        f"INSERT INTO answers (kind, ref, body) VALUES ('call', 1, x'00{OK.to_bytes().hex()}')",
        "INSERT INTO arguments (kind, ref, body) VALUES ('approval', 'a', x'007b7d')",
    ):
        change(path, statement)
    assert rows(path, "PRAGMA user_version") == [(form,)]
    monkeypatch.undo()
    with Journal(path) as journal:
        assert journal.migrate() == (file.newest(), file.newest())
        assert journal.begin(intent(b"k")).result()[0] == "replay"
        assert journal.arguments_of("approval", "a").result() == b"{}"
        assert journal.batches().result() == [] and journal.means().result() == {}
        assert journal.approvals().result() == [] and journal.deferred_calls().result() == []


def test_two_who_migrate_at_once_do_it_once(tmp_path: Path) -> None:
    """Whoever comes to a new file at the same moment waits, and finds it made."""
    path = tmp_path / "j.db"
    journals = [Journal(path) for _ in range(8)]
    futures = [one.begin(intent(bytes([number]))) for number, one in enumerate(journals)]
    assert [one.result(30)[0] for one in futures] == ["run"] * 8
    for one in journals:
        one.close()
    assert rows(path, "SELECT count(*) FROM calls") == [(8,)]


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    """A file of a later version is left alone; the message says what to do."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        journal.begin(intent(b"k")).result()
        change(path, f"PRAGMA user_version = {file.newest() + 1}")
    with pytest.raises(PolicyError, match=r"written by a later version of Towerman .* install that version"):
        Journal(path)


def test_a_file_that_becomes_newer_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """Also where it has changed since the journal was made."""
    path = tmp_path / "j.db"
    late = Journal(path)
    with Journal(path) as journal:
        journal.begin(intent(b"k")).result()
    change(path, f"PRAGMA user_version = {file.newest() + 1}")
    with pytest.raises(JournalUnavailable, match="later version") as told:
        late.counts().result()
    assert told.value.trouble == "newer"
    late.close()


def test_wrong_places_are_refused_early(tmp_path: Path) -> None:
    """A set-up mistake is an exception where it is made, and names the fix; nothing is made or changed."""
    (tmp_path / "text").write_text("this is no database, however long it may be " * 20)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE mine (a)")
    other.commit()
    other.close()
    with pytest.raises(PolicyError, match="is a folder; name a file in it"):
        Journal(tmp_path)
    with pytest.raises(PolicyError, match="there is no folder"):
        Journal(tmp_path / "no" / "j.db")
    with pytest.raises(PolicyError, match="the file is no journal"):
        Journal(tmp_path / "text")
    with pytest.raises(PolicyError, match="a database of something else"):
        Journal(tmp_path / "other.db")
    assert rows(tmp_path / "other.db", "SELECT name FROM sqlite_master") == [("mine",)]
    for wrong in (5, None, "", b"x", "a\0b", object()):
        with pytest.raises(PolicyError, match=r"^journal: a path, ':memory:' or a Journal"):
            Journal(cast("Any", wrong))
    for wrong_option in ({"secret": 5}, {"secret": ""}, {"cipher": 5}, {"arguments": 1}, {"busy_timeout": -1}):
        with pytest.raises(PolicyError, match=r"^(journal: )?(secret|cipher|arguments|busy_timeout)"):
            Journal(":memory:", **cast("Any", wrong_option))
    assert {one.name for one in tmp_path.iterdir()} == {"text", "other.db"}


def test_another_programs_lock_is_waited_for_and_then_told(tmp_path: Path) -> None:
    """Locked: nothing is written half, who asked is told, and what must be written is tried again."""
    path = tmp_path / "j.db"
    with Journal(path, busy_timeout=0.05) as journal:
        one = intent(b"k")
        journal.begin(one).result()
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalUnavailable, match="another program holds its lock") as told:
            journal.begin(intent(b"two")).result()
        assert told.value.trouble == "locked"
        with pytest.raises(JournalUnavailable):
            journal.finish(one.token, OK).result()
        assert journal.begin(intent(b"k")).exception() is not None
        holder.execute("ROLLBACK")
        holder.close()
        journal.watch(b"k").result(10)
        assert journal.begin(intent(b"k")).result()[0] == "replay"
        assert journal.calls(state="open").result() == []
        assert journal.statistics()["failures"] >= 3


def test_a_full_disk_is_told_and_nothing_is_half(tmp_path: Path) -> None:
    """Disk full: the intent is not there and its call does not start; when there is room again all goes on."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        first = intent(b"first")
        journal.begin(first).result()
        session = journal._writer._session
        assert session is not None
        pages = session.db.execute("PRAGMA page_count").fetchone()[0]
        session.db.execute(f"PRAGMA max_page_count = {pages}")
        refused = []
        for number in range(200):
            one = intent(b"%d" % number, digest=b"d" * 1000)
            problem = journal.begin(one).exception()
            if problem is not None:
                refused.append((number, problem))
        assert refused and all(isinstance(one, JournalUnavailable) and one.trouble == "full" for _, one in refused)
        big = Answer("ok", None, "yes", content="x" * 200_000)
        assert isinstance(journal.finish(first.token, big).exception(), JournalUnavailable)
        assert journal.counts().result()["open"] == 201 - len(refused)
        session.db.execute("PRAGMA max_page_count = 1000000000")
        assert journal.begin(intent(b"%d" % refused[0][0])).result()[0] == "run"
        journal.watch(b"first").result(10)  # what could not be written is tried again
        told, found = journal.begin(intent(b"first")).result()
        assert told == "replay" and found is not None and found.answer == big
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


def test_approvals_of_one_instant_are_listed_as_they_were_asked_for(tmp_path: Path) -> None:
    """S4: the oldest first, in one order each time, whatever the names are."""
    wall = Wall()
    with Journal(tmp_path / "j.db", _wall=wall) as journal:
        names = [f"apr_{number * 7919 % 97:02}" for number in range(40)]
        for number, name in enumerate(names):
            if number == 20:
                wall.now += 1
            journal.ask_approval(Approval(name, "run", "pay", b"d", wall.now + 100), b"{}").result()
        for _ in range(2):
            assert [one.approval_id for one in journal.approvals().result()] == names
        assert [one.approval_id for one in journal.approvals(limit=3).result()] == names[:3]


def full(journal: Journal) -> sqlite3.Connection:
    """From now on there is room for a little more in this journal, and not for much."""
    session = journal._writer._session
    assert session is not None
    pages = session.db.execute("PRAGMA page_count").fetchone()[0]
    session.db.execute(f"PRAGMA max_page_count = {pages + 8}")
    return session.db


BIG = Answer("ok", None, "yes", content="x" * 200_000)


@pytest.mark.parametrize("in_the_way", [False, True])
def test_s14_closing_writes_what_can_be_written_by_then(
    tmp_path: Path, in_the_way: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """S14: an outcome that a full disk kept from being written, and for which there is room when the journal is closed,
    is there afterwards: also where other writing went on past it a moment before.
    """
    path = tmp_path / "j.db"
    journal = Journal(path)
    one, two = intent(b"one"), intent(b"two")
    journal.begin(one).result()
    db = full(journal)
    assert journal.finish(one.token, BIG).exception() is not None
    if in_the_way:
        journal.begin(two).result()
        assert journal._writer._in_the_way
    db.execute("PRAGMA max_page_count = 1000000000")
    assert journal.close()
    assert journal.statistics()["given_up"] == journal.statistics()["later"] == 0
    assert not caplog.records
    with Journal(path) as again:
        told, found = again.begin(intent(b"one")).result()
        assert told == "replay" and found is not None and found.answer == BIG


def test_s14_closing_waits_a_while_for_room(tmp_path: Path) -> None:
    """S14: room that comes while the journal is being closed is used."""
    path = tmp_path / "j.db"
    journal = Journal(path)
    one = intent(b"one")
    journal.begin(one).result()
    db = full(journal)
    assert journal.finish(one.token, BIG).exception() is not None
    tries = 0
    transact = journal._writer._transact

    def later(todo: Any) -> bool:
        nonlocal tries
        tries += 1
        if tries == 3:
            db.execute("PRAGMA max_page_count = 1000000000")
        return transact(todo)

    journal._writer._transact = later  # type: ignore[method-assign]
    assert journal.close(60.0)
    assert tries >= 3
    with Journal(path) as again:
        assert again.begin(intent(b"one")).result()[0] == "replay"


def test_s14_what_stays_unwritten_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S14, G12: what cannot be written when the journal is closed keeps nothing from being written that can be,
    ends in bounded time, is told as an error without any value, and its calls are listed as unknown.
    """
    path = tmp_path / "j.db"
    journal = Journal(path)
    names = [b"small", b"big", b"little", b"gone"]
    begun = {name: intent(name) for name in names}
    for one in begun.values():
        journal.begin(one).result()
    db = full(journal)
    with_room = Answer("ok", None, "yes", content="there is room for this")
    writer = journal._writer
    assert journal.finish(begun[b"big"].token, BIG).exception() is not None
    writer._later.extend(
        [
            Asked(lambda one: calls.finish(one, begun[b"small"].token, with_room), Future(), True, "outcome"),
            Asked(lambda one: calls.finish(one, begun[b"little"].token, with_room), Future(), True, "outcome"),
            Asked(lambda one: calls.withdraw(one, (begun[b"gone"].token,)), Future(), True, "withdrawal"),
        ]
    )
    del db
    began = time.monotonic()
    assert not journal.close(1.0)
    assert time.monotonic() - began < 10
    assert journal.statistics()["given_up"] == 1
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "full: it is closed, and this could not be written: outcome: 1." in record.getMessage()
    assert "xxx" not in record.getMessage()
    with Journal(path) as again:
        assert len(again.unknown().result()) == 1
        assert again.begin(intent(b"small")).result()[0] == "replay"
        assert again.begin(intent(b"little")).result()[0] == "replay"
        assert again.begin(intent(b"big")).result()[0] == "unknown"
        assert again.begin(intent(b"gone")).result()[0] == "run"


def test_s14_a_journal_that_does_not_end_in_time_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """G12: closing waits as long as it was told, and does not pass over that it was too short."""
    journal = Journal(tmp_path / "j.db")
    hold = threading.Event()
    journal._writer.ask(lambda _: hold.wait(30))
    assert not journal.close(0.05)
    assert "did not end within 0.05 s" in caplog.text
    hold.set()
    assert journal.close()


def test_a_commit_that_fails_leaves_no_intent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may have reached the disk of a commit that failed, what it began is taken back."""
    path = tmp_path / "j.db"

    class Failing:
        """A connection whose commit succeeds and says that it has failed."""

        def __init__(self, db: sqlite3.Connection) -> None:
            self.db = db
            self.left = 1

        def execute(self, sql: str, *given: Any) -> Any:
            found = self.db.execute(sql, *given)
            if sql == "COMMIT" and self.left:
                self.left -= 1
                raise sqlite3.OperationalError("disk I/O error")
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self.db, name)

    with Journal(path) as journal:
        journal.counts().result()
        session = journal._writer._session
        assert session is not None
        session.db = cast("Any", Failing(session.db))
        lost = intent(b"k")
        with pytest.raises(JournalUnavailable):
            journal.begin(lost).result()
        told = journal.begin(intent(b"k")).result()
        assert told == ("run", None)
        assert len(journal.calls().result()) == 1


def test_a_file_that_was_deleted_is_not_made_anew(tmp_path: Path) -> None:
    """Gone: a new file would have forgotten what was begun, so a journal in use does not make one by itself."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        journal.begin(intent(b"k")).result()
        path.unlink()
        for _ in range(2):
            with pytest.raises(JournalUnavailable, match="deleted or replaced") as told:
                journal.begin(intent(b"two")).result()
            assert told.value.trouble == "gone"
        assert not path.exists()
        path.write_bytes(b"")
        with pytest.raises(JournalUnavailable, match="deleted or replaced"):
            journal.counts().result()


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_rights(tmp_path: Path) -> None:
    """Read-only: told when the journal is made, or when it is opened."""
    tmp_path.chmod(0o500)
    with pytest.raises(PolicyError, match="nothing can be written"):
        Journal(tmp_path / "j.db")
    tmp_path.chmod(0o700)


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    """Corrupt: told as such, and nothing is written into it."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        for number in range(300):
            last = journal.begin(intent(b"%d" % number, digest=b"d" * 200))
        last.result()
    data = bytearray(path.read_bytes())
    for start in range(4096 * 2, len(data), 4096):
        data[start : start + 2000] = b"\xff" * 2000
    late = Journal(path)
    path.write_bytes(bytes(data))
    with pytest.raises(PolicyError, match="the file is damaged"):
        Journal(path)
    with pytest.raises(JournalUnavailable) as told:
        late.begin(intent(b"k" * 8)).result()
    assert told.value.trouble == "corrupt"
    late.close()


def test_a_head_that_is_no_database_is_told(tmp_path: Path) -> None:
    """Not a database: told when the journal is made, and when the file has become so meanwhile."""
    path = tmp_path / "j.db"
    late = Journal(path)
    path.write_bytes(b"no database at all, and long enough to have a head" * 100)
    with pytest.raises(JournalUnavailable) as told:
        late.counts().result()
    assert told.value.trouble == "not a journal"
    late.close()


def test_what_is_asked_of_a_closed_journal_fails() -> None:
    """Everything that is asked has an answer, also after the end; closing twice is closing once."""
    journal = Journal(":memory:")
    asked = [journal.begin(intent(b"%d" % number)) for number in range(50)]
    assert journal.close() is True
    assert all(one.result(0)[0] == "run" for one in asked)
    with pytest.raises(JournalUnavailable, match="is closed") as told:
        journal.counts().result()
    assert told.value.trouble == "closed"
    assert journal.watch(b"k").result(0) is None
    assert journal.close() is True
    assert Journal(":memory:").close() is True


def test_a_journal_that_nobody_has_any_more_ends_its_thread() -> None:
    """A journal that was never closed leaves no thread behind."""
    import gc

    journal = Journal(":memory:")
    journal.counts().result()
    thread = journal._writer._thread
    assert thread is not None and thread.daemon and thread.name == "towerman-journal"
    del journal
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_one_step_that_fails_takes_none_of_its_neighbours_along() -> None:
    """Group commit: each step is done or not by itself, and its own future says why."""
    with Journal(":memory:") as journal:
        gate = threading.Event()
        journal._writer.ask(lambda _: gate.wait(5))
        before = journal.begin(intent(b"a"))
        wrong: Future[object] = journal._writer.ask(lambda _: 1 // 0)
        twice = journal._writer.ask(
            lambda session: [session.db.execute("INSERT INTO facts VALUES ('x', 'y')") for _ in range(2)]
        )
        after = journal.begin(intent(b"b"))
        gate.set()
        assert before.result()[0] == "run" and isinstance(wrong.exception(), ZeroDivisionError)
        assert isinstance(twice.exception(), JournalUnavailable)
        assert journal._writer.ask(lambda s: s.db.execute("SELECT count(*) FROM facts").fetchone()).result() == (1,)
        assert after.result()[0] == "run"


def test_many_steps_share_a_transaction() -> None:
    """Group commit: what is asked while the disk is waited for goes into the next transaction together."""
    with Journal(":memory:") as journal:
        gate = threading.Event()
        journal._writer.ask(lambda _: gate.wait(5))
        time.sleep(0.05)
        asked = [journal.begin(intent(b"%d" % number)) for number in range(300)]
        gate.set()
        wait(asked)
        assert journal.statistics()["commits"] <= 3
        assert journal.counts().result()["open"] == 300


# ==================================================================== secrets and ciphers


class Mirror:
    """A cipher for tests: nobody finds clear text in what it gives."""

    def encrypt(self, data: bytes) -> bytes:
        return bytes(255 - one for one in reversed(data))

    def decrypt(self, token: bytes) -> bytes:
        return self.encrypt(token)


def everything(folder: Path) -> bytes:
    """All bytes of all files of a journal, its write-ahead log included."""
    return b"".join(one.read_bytes() for one in sorted(folder.iterdir()))


def filled(journal: Journal) -> None:
    """Put a secret wherever a value may go."""
    told = SECRET.encode()
    key = journal.open().result()
    found = identity("pay", 0, run_id="r", idempotency_key=SECRET)
    assert found is not None
    one = intent(place(key, found), digest=digest(key, "pay", {"a": SECRET}))
    journal.begin(one).result()
    journal.finish(one.token, Answer("ok", None, "yes", message=SECRET, content=SECRET)).result()
    journal.ask_approval(approval(), told).result()
    if journal.keeps_arguments:
        journal.enqueue(deferred("a"), told).result()
        [(claimed, arguments)] = journal.claim_next().result()
        assert claimed.claim is not None and arguments == told
    journal.keep_blob("h", told * 20_000, run_id="r", tool="t").result()
    assert journal.read_blob("h", 65_530, 20).result() == (told * 20_000)[65_530:65_550]


def test_g8_with_a_cipher_there_is_no_clear_text_in_any_file(tmp_path: Path) -> None:
    """G8: neither arguments nor answers nor contents stand in a file in clear, and all can be read back."""
    with Journal(tmp_path / "j.db", cipher=Mirror(), _wall=Wall()) as journal:
        filled(journal)
        assert SECRET.encode() not in everything(tmp_path)
    assert SECRET.encode() not in everything(tmp_path)
    with Journal(tmp_path / "j.db", cipher=Mirror(), _wall=Wall()) as journal:
        assert journal.arguments_of("approval", "a1").result() == SECRET.encode()
    with Journal(tmp_path / "j.db", _wall=Wall()) as journal:
        with pytest.raises(JournalUnavailable, match="give it its cipher") as told:
            journal.arguments_of("approval", "a1").result()
        assert told.value.trouble == "sealed"
        assert len(journal.calls().result()) == 1


def test_g8_values_stand_in_three_tables_and_nowhere_else(tmp_path: Path) -> None:
    """G8: without a cipher, values are in `answers`, `arguments` and `blob_parts`; no other column holds one."""
    path = tmp_path / "j.db"
    with Journal(path, _wall=Wall()) as journal:
        filled(journal)
    db = sqlite3.connect(path)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    holding = {
        name
        for name in tables
        for row in db.execute(f"SELECT * FROM {name}")
        for cell in row
        if SECRET.encode() in (cell if isinstance(cell, bytes) else str(cell).encode())
    }
    db.close()
    assert holding == {"answers", "arguments", "blob_parts"}


def test_g8_no_argument_is_stored_where_that_is_off(tmp_path: Path) -> None:
    """G8: with `arguments=False` no argument is in the file."""
    with Journal(tmp_path / "j.db", arguments=False, _wall=Wall()) as journal:
        key = journal.open().result()
        one = intent(b"k", digest=digest(key, "pay", {"a": SECRET}))
        journal.begin(one).result()
        journal.finish(one.token, OK).result()
        journal.ask_approval(approval(), SECRET.encode()).result()
        assert SECRET.encode() not in everything(tmp_path)


def test_what_was_pruned_is_not_left_in_the_file(tmp_path: Path) -> None:
    """What was forgotten is overwritten."""
    wall = Wall()
    with Journal(tmp_path / "j.db", _wall=wall) as journal:
        filled(journal)
        wall.now += 1e6
        journal._writer.ask(lambda s: s.db.execute("UPDATE deferred SET state = 'cancelled', ended_at = 0")).result()
        journal.prune(10)
    assert SECRET.encode() not in everything(tmp_path)


def test_a_cipher_that_fails_is_told(tmp_path: Path) -> None:
    """A cipher's own failure keeps the intent's outcome out, says its type, and nothing of its text."""

    class Broken(Mirror):
        def encrypt(self, data: bytes) -> bytes:
            raise OSError(SECRET)

    class Wrong(Mirror):
        def decrypt(self, token: bytes) -> bytes:
            raise KeyError(SECRET)

    with Journal(tmp_path / "j.db", cipher=Broken()) as journal:
        one = intent(b"k")
        journal.begin(one).result()
        with pytest.raises(JournalUnavailable, match="failed with OSError") as told:
            journal.keep_blob("h", b"x", run_id="r", tool="t").result()
        assert SECRET not in str(told.value) and told.value.trouble == "sealed"
        assert journal.finish(one.token, OK).result() is True
        told_again, found = journal.begin(intent(b"k")).result()
        assert told_again == "replay" and found is not None and (found.applied, found.answer) == ("yes", None)
        assert journal.statistics()["unsealed"] == 1
    with Journal(tmp_path / "j.db", cipher=Mirror()) as journal:
        journal.keep_blob("h", b"x", run_id="r", tool="t").result()
    with (
        Journal(tmp_path / "j.db", cipher=Wrong()) as journal,
        pytest.raises(JournalUnavailable, match="failed with KeyError"),
    ):
        journal.read_blob("h").result()


def test_the_key_of_digests(tmp_path: Path) -> None:
    """S14: one key for the life of a file: random, and readable only with the secret where there is one."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        key = journal.open().result()
        assert len(key) == 32 and journal.open().result() == key
    assert key in everything(tmp_path)
    with Journal(path, secret="first") as journal:  # a file takes the first secret that it is opened with
        assert journal.open().result() == key
    with Journal(path) as journal:
        with pytest.raises(JournalUnavailable, match="give it: secret=") as told:
            journal.open().result()
        assert told.value.trouble == "secret"
        assert journal.open(b"first").result() == key
        assert journal.counts().result()["done"] == 0
    with (
        Journal(path, secret="second") as journal,
        pytest.raises(JournalUnavailable, match="made with another secret"),
    ):
        journal.open().result()
    with Journal(tmp_path / "other.db", secret="first") as journal:
        other = journal.open().result()
        assert other != key
        assert other not in (tmp_path / "other.db").read_bytes() + (tmp_path / "other.db-wal").read_bytes()
    with Journal(":memory:") as one, Journal(":memory:") as two:
        assert one.open().result() != two.open().result()


# ==================================================================== forks


def in_child(what: Any) -> str:
    """What a function says in a forked child; the child ends without cleaning up."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = "it did not end"
        try:
            told = str(what())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, told.encode())
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(pid, 0)
    return told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_a_connection_of_its_own(tmp_path: Path) -> None:
    """A fork: both sides go on with one file, each as itself, and the parent's calls are not the child's."""
    path = tmp_path / "j.db"
    with Journal(path) as journal:
        mine = intent(b"parent")
        journal.begin(mine).result()

        def child() -> object:
            told = [journal.begin(intent(b"parent")).result(10)[0], journal.begin(intent(b"child")).result(10)[0]]
            return told, journal.close()

        assert in_child(child) == "(['join', 'run'], True)"
        assert journal.finish(mine.token, OK).result(10) is True
        assert [one.number for one in journal.unknown().result()] == [2]
        assert len(rows(path, "SELECT DISTINCT pid FROM owners")) == 2
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_memory_journal_begins_anew_in_a_child() -> None:
    """What is in this process only is not in another one."""
    with Journal(":memory:") as journal:
        journal.begin(intent(b"k")).result()
        assert in_child(lambda: journal.begin(intent(b"k")).result(10)[0]) == "run"
        assert journal.begin(intent(b"k")).result()[0] == "join"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_transaction_is_refused_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file could not be closed before the fork the child says so, and damages nothing."""
    from towerman.journal import writer

    monkeypatch.setattr(writer, "FORK_SECONDS", 0.01)
    with Journal(tmp_path / "j.db") as journal:
        journal.counts().result()
        gate = threading.Event()
        held = journal._writer.ask(lambda _: gate.wait(10))
        time.sleep(0.05)
        told = in_child(lambda: journal.counts().result(10))
        assert told.startswith("JournalUnavailable: journal ") and "forked" in told
        assert in_child(lambda: journal.watch(b"k").result(0)) == "None"
        gate.set()
        held.result()
        assert journal.begin(intent(b"k")).result()[0] == "run"


# ==================================================================== several processes


WORKER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from towerman.journal import Journal
from towerman.records import Answer, Intent

path, count = sys.argv[2], int(sys.argv[3])
OK = Answer("ok", None, "yes", content="x")
with Journal(path, busy_timeout=30) as journal:
    print("ready", flush=True)
    sys.stdin.readline()
    began, taken = [], []
    for number in range(count):
        one = Intent(os.urandom(16), b"key%d" % number, None, "pay", "run", 1, number)
        told, _ = journal.begin(one).result(60)
        if told == "run":
            began.append(number)
            journal.finish(one.token, OK).result(60)
    while True:
        got = journal.claim_next(limit=3).result(60)
        if not got:
            break
        for call, _ in got:
            taken.append(call.handle)
            journal.finish_deferred(call.claim, OK).result(60)
print(json.dumps([began, taken]))
"""


def test_several_processes_begin_each_call_once(tmp_path: Path) -> None:
    """S14, R-123: over four processes each call is begun once, and each queued call goes to one worker."""
    path = tmp_path / "j.db"
    count = 60
    with Journal(path) as journal:
        for number in range(count):
            journal.enqueue(deferred(f"d{number}"), b"")
        journal.counts().result()
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(Path(file.__file__).parents[2]), str(path), str(count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        for one in workers:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        for one in workers:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        told = [json.loads(one.communicate(timeout=120)[0]) for one in workers]
        assert sorted(number for began, _ in told for number in began) == list(range(count))
        assert sorted(name for _, taken in told for name in taken) == sorted(f"d{number}" for number in range(count))
        assert journal.counts().result() == {"open": 0, "done": count, "unknown": 0, "settled": 0}
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from towerman.journal import Journal
from towerman.records import Answer, Intent
OK = Answer("ok", None, "yes", content="x" * 3000)
journal = Journal(sys.argv[2])
number = 0
while True:
    one = Intent(os.urandom(16), b"%s-%d" % (sys.argv[3].encode(), number), None, "pay", "run", 1, number)
    journal.begin(one).result()
    print("began", number, flush=True)
    journal.finish(one.token, OK).result()
    print("ended", number, flush=True)
    number += 1
"""


def test_kill_9_loses_nothing_that_was_told(tmp_path: Path) -> None:
    """S14: after kill -9 at any point every intent and outcome that was told is there, and the file is whole."""
    path = tmp_path / "j.db"
    for attempt in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(Path(file.__file__).parents[2]), str(path), str(attempt)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(20 + 7 * attempt)]
        process.send_signal(signal.SIGKILL)
        lines += [line.split() for line in process.communicate()[0].splitlines() if len(line.split()) == 2]
        began = {int(number) for word, number in lines if word == "began"}
        ended = {int(number) for word, number in lines if word == "ended"}
        with Journal(path) as journal:
            keys = {b"%d-%d" % (attempt, number): number for number in range(len(lines) + 2)}
            found = journal.look_up(list(keys)).result()
            by_number = {keys[key]: one for key, one in found.items()}
            assert began <= set(by_number)
            assert all(by_number[number].state == "done" for number in ended)
            assert len([one for one in by_number.values() if one.unknown]) <= 1
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


# ==================================================================== everything at once


class Ledger(RuleBasedStateMachine):
    """The file against a plain dictionary, over deaths, settlings and late ends."""

    starts = Bundle("starts")

    @initialize()
    def open(self) -> None:
        self.journal = Journal(":memory:")
        self.model: dict[bytes, dict[str, Any]] = {}
        self.tokens: dict[bytes, bytes] = {}

    def verdict(self, key: bytes, harmless: bool) -> str:
        found = self.model.get(key)
        if found is None:
            return "run"
        if found["state"] == "done":
            return "replay"
        if found["state"] == "settled":
            return "applied" if found["applied"] else "run"
        if found["state"] == "open" or (found["running"] and harmless):
            return "join"
        return "run" if harmless else "unknown"

    @rule(target=starts, key=st.sampled_from([b"a", b"b", b"c"]), harmless=st.booleans())
    def begin(self, key: bytes, harmless: bool) -> bytes:
        one = intent(key, harmless=harmless)
        expected = self.verdict(key, harmless)
        told, _ = self.journal.begin(one).result()
        assert told == expected
        if told == "run":
            before = self.model.get(key)
            self.model[key] = {"state": "open", "token": one.token, "running": False, "before": before}
        return one.token

    def of(self, token: bytes) -> dict[str, Any] | None:
        return next((one for one in self.model.values() if one.get("token") == token), None)

    @rule(token=starts, running=st.booleans(), answer=st.sampled_from([OK, LOST]))
    def finish(self, token: bytes, running: bool, answer: Answer) -> None:
        found = self.of(token)
        expected = found is not None and found["state"] != "done"
        assert self.journal.finish(token, answer, running=running).result() is expected
        if expected and found is not None:
            found.update(state="done" if answer is OK else "unknown", running=running, before=None)

    @rule(token=consumes(starts))
    def withdraw(self, token: bytes) -> None:
        found = self.of(token)
        expected = found is not None and found["state"] == "open"
        assert self.journal.withdraw(token).result() == int(expected)
        if expected and found is not None:
            key = next(key for key, one in self.model.items() if one is found)
            if found["before"] is None:
                del self.model[key]
            else:
                state = found["before"]["state"]
                # Where it was: unknown stays unknown, and what was settled as not applied may run.
                found.update(
                    state="settled" if state == "settled" else "unknown", applied=False, running=False, before=None
                )

    @rule(key=st.sampled_from([b"a", b"b", b"c"]), applied=st.booleans())
    def settle(self, key: bytes, applied: bool) -> None:
        records = self.journal.look_up([key]).result()
        found = self.model.get(key)
        assert (key in records) is (found is not None)
        if found is None:
            return
        future = self.journal.settle(records[key].number, applied=applied)
        if found["state"] == "unknown":
            future.result()
            found.update(state="settled", applied=applied, running=False)
        else:
            assert isinstance(future.exception(), Unsettled)

    @invariant()
    def agrees(self) -> None:
        listed = self.journal.calls(limit=10).result()
        assert sorted(one.state for one in listed) == sorted(one["state"] for one in self.model.values())
        assert len(self.journal.unknown().result()) == sum(one["state"] == "unknown" for one in self.model.values())

    def teardown(self) -> None:
        self.journal.close()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_nothing_is_left_of_any_writer(tmp_path: Path) -> None:
    """A writer's counts add up and its repr names the file only."""
    with Journal(tmp_path / "j.db") as journal:
        journal.counts().result()
        assert repr(journal) == f"Journal({str(tmp_path / 'j.db')!r})"
        assert isinstance(journal._writer, Writer)
        assert set(journal.statistics()) == {
            "queued",
            "later",
            "watched",
            "commits",
            "steps",
            "failures",
            "given_up",
            "unsealed",
        }
        assert owners.LEASE_SECONDS > 2 * owners.BEAT_SECONDS
