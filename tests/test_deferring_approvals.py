"""Approvals and the durable queue (S3, S4, R-125 to R-127): a person's word goes with its call, is used once, and what
waits for a person holds nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_deferring import CANARY, play, told
from test_journal_store import OK, Wall, dead, deferred, rows

from towerman import (
    ApprovalRequest,
    Approved,
    Call,
    Denied,
    Event,
    Journal,
    JournalUnavailable,
    PolicyError,
    Tower,
    Worker,
    WorkerReport,
    read_result,
)  # fmt: skip
from towerman.cli import main as command
from towerman.clock import wall_time
from towerman.records import Approval, Deferred, Intent, NotCleared, Unsettled
from towerman.runner import worker as worker_room

Answer = Approved | Denied | None


class Size(IntEnum):
    """JSON has it as a number."""

    LARGE = 3


class Till:
    """A tower with a printer of one place, and tools that are deferred for it and want a person's yes."""

    def __init__(self, journal: Any, **options: Any) -> None:
        self.did: list[str] = []
        self.asked: list[ApprovalRequest] = []
        self.valid = True
        self.fails = 0
        self.door = asyncio.Event()
        self.inside = asyncio.Event()
        self.events: list[Event] = []
        tower = self.tower = Tower(journal=journal, pools={"crm": 1}, observers=[self.events.append], **options)

        @tower.tool(independent=True, read_only=True, pools=["crm"])
        async def hold() -> str:
            self.inside.set()
            await self.door.wait()
            return "held"

        @tower.tool(
            writes="account:{account}",
            pools=["crm"],
            idempotent=False,
            when_busy="defer",
            requires_approval=lambda amount: amount > 100,
            still_valid=lambda amount: self.valid,
        )
        async def pay(account: str, amount: int) -> str:
            self.did.append(f"pay {account} {amount}")
            return f"paid {amount}"

        @tower.tool(reads="account:{account}", pools=["crm"], when_busy="defer", requires_approval=True)
        async def peek(account: str) -> str:
            self.did.append(f"peek {account}")
            return f"seen {account}"

        @tower.tool(reads="account:{account}")
        async def look(account: str) -> str:
            self.did.append(f"look {account}")
            return f"looked {account}"

        tower.add_tool(read_result)

    def answering(self, answer: Answer) -> Callable[[ApprovalRequest], Awaitable[Answer]]:
        async def ask(request: ApprovalRequest) -> Answer:
            self.asked.append(request)
            return answer

        return ask

    @asynccontextmanager
    async def busy(self) -> Any:
        """The printer is in use."""
        async with self.tower.run("holder") as holder:
            held = asyncio.create_task(holder.execute([Call("hold", {})]))
            await self.inside.wait()
            try:
                yield
            finally:
                self.door.set()
                await held
                self.door.clear()
                self.inside.clear()

    async def defer(self, *calls: Call, answer: Answer = None, run_id: str | None = "run") -> Any:
        """Answer a batch while the printer is in use; asked meanwhile, the person answers so."""
        async with self.busy(), self.tower.run(run_id, approver=self.answering(answer)) as run:
            return await run.execute(list(calls))

    async def submit(self, *calls: Call, **options: Any) -> list[str]:
        async with self.tower.run(options.pop("run_id", "run"), **options) as run:
            found = [one.handle for one in await run.submit(list(calls))]
        assert None not in found
        return found  # type: ignore[return-value]  # looked at just now

    async def work(self, **options: Any) -> WorkerReport:
        return await Worker(self.tower, poll=0.01, **options).run(once=True)

    @property
    def journal(self) -> Journal:
        assert self.tower.journal is not None
        return self.tower.journal

    def row(self, handle: str) -> Deferred:
        found = self.journal.deferred(handle).result()
        assert found is not None
        return found[0]

    def answer(self, handle: str) -> str:
        found = self.journal.deferred(handle).result()
        assert found is not None and found[1] is not None
        return found[1].content

    def question(self, handle: str) -> Approval:
        [found] = [one for one in self.journal.approvals().result() if one.handle == handle]
        return found


def pay(amount: int = 500, account: str = "a", **more: Any) -> Call:
    return Call("pay", {"account": account, "amount": amount}, **more)


# ==================================================================== a word that was given before


def test_s4_what_was_approved_before_is_not_asked_again(tmp_path: Path) -> None:
    """S4: a yes that was given before the call was deferred goes with it: the worker asks nobody, and the approval is
    used up.
    """

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.defer(pay(), answer=Approved())
        assert (one.outcome, one.code, len(till.asked), till.did) == ("pending", "deferred", 1, [])
        question = till.question(one.handle)
        assert (question.state, question.approval_id) == ("approved", till.asked[0].approval_id)
        assert till.row(one.handle).asks == "approved"
        report = await till.work(approver=till.answering(Denied("asked again")))
        assert (report.done, till.did, len(till.asked)) == (1, ["pay a 500"], 1)
        used = till.question(one.handle)
        assert used.claimed_at is not None and used.claimed_for == till.row(one.handle).key
        assert "paid 500" in till.answer(one.handle)
        await till.tower.aclose()

    play(main)


def test_s4_another_process_with_the_journal_holds_to_it_too(tmp_path: Path) -> None:
    """S4: what is approved is told by a digest under the journal's key: a tower of another process, which has a random
    key of its own, finds that it is the same call; so it does with a secret.
    """
    for secret in (None, "one that nobody can guess"):

        async def main(secret: str | None = secret) -> None:
            path = tmp_path / f"{secret is None}.db"
            first, second = Till(path, secret=secret), Till(path, secret=secret)
            assert first.tower._core.digest_key != second.tower._core.digest_key or secret is not None
            [one] = await first.defer(pay(), answer=Approved())
            await first.tower.aclose()
            report = await second.work()
            assert (report.done, second.did, second.asked) == (1, ["pay a 500"], [])
            assert "paid" in second.answer(one.handle)
            await second.tower.aclose()

        play(main)


@pytest.mark.parametrize("cipher", [False, True])
def test_s4_edited_arguments_go_with_their_approval(tmp_path: Path, cipher: bool) -> None:
    """S4, G8: arguments that a person gave go with the call, are run, and are gone when it has its answer; a cipher
    covers them.
    """

    class Cipher:
        def encrypt(self, data: bytes) -> bytes:
            return bytes(one ^ 255 for one in data)

        decrypt = encrypt

    async def main() -> None:
        till = Till(Journal(tmp_path / "j.db", cipher=Cipher() if cipher else None))
        [one] = await till.defer(pay(), answer=Approved({"account": "a", "amount": 7}))
        assert one.code == "deferred"
        stored = dict(rows(tmp_path / "j.db", "SELECT kind, body FROM arguments"))
        assert set(stored) == {"queued", "approval"}
        assert (b'"amount":7' in stored["approval"]) is not cipher
        await till.work()
        assert till.did == ["pay a 7"] and "paid 7" in till.answer(one.handle)
        assert rows(tmp_path / "j.db", "SELECT * FROM arguments") == []
        await till.tower.aclose()

    play(main)


def test_edited_arguments_that_reach_further_run_nothing(tmp_path: Path) -> None:
    """S4: what comes out of the journal is looked over like any edited call."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        await till.work()
        name = till.question(one).approval_id
        till.journal.decide(name, True, arguments=b'{"account":"b","amount":7}').result()
        report = await till.work()
        assert (report.failed, till.did) == (1, [])
        assert "approval_missing" in till.answer(one)
        await till.tower.aclose()

    play(main)


def test_arguments_that_json_would_change_are_not_deferred(tmp_path: Path) -> None:
    """S4: what a person has approved must come out of the journal as it went in, or the call does not go there."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")

        @till.tower.tool(independent=True, pools=["crm"], when_busy="defer", requires_approval=True)
        async def send(what: object) -> str:
            return "sent"

        done = await till.defer(Call("send", {"what": Size.LARGE}), answer=Approved())
        assert told(done) == [("rejected", "concurrency_limit")]
        done = await till.defer(Call("send", {"what": 1}), answer=Approved({"what": Size.LARGE}))
        assert told(done) == [("rejected", "concurrency_limit")]
        done = await till.defer(Call("send", {"what": [1, "x"]}), answer=Approved())
        assert told(done) == [("pending", "deferred")]
        await till.tower.aclose()

    play(main)


@pytest.mark.parametrize("how", ["in the queue", "at the grant", "in the journal"])
def test_r70_an_approval_that_is_over_runs_nothing(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-70, P-67: what was approved and waited too long is `approval_expired`: before it is taken, while it waits for
    its place in the worker, and in the step in which its intent is written.
    """

    async def main() -> None:
        wall = Wall()
        till = Till(Journal(tmp_path / "j.db", _wall=wall))
        till.tower._core.wall = wall
        [one] = await till.defer(pay(), answer=Approved(expires_in=60 if how == "in the queue" else 0.3))
        assert one.code == "deferred"
        if how == "in the queue":
            wall.now += 61
            report = await till.work()
        elif how == "at the grant":
            async with till.busy():
                report = await till.work(patience=20.0)
        else:
            begin = till.journal.begin_all

            def late(intents: Any) -> Any:
                wall.now += 1
                return begin(intents)

            monkeypatch.setattr(till.journal, "begin_all", late)
            report = await till.work()
        assert (report.failed, till.did) == (1, [])
        assert "approval_expired" in till.answer(one.handle)
        assert till.row(one.handle).state == "done"
        till.tower.flush()
        assert [event.kind for event in till.events].count("approval_expired") == 1
        await till.tower.aclose()

    play(main)


def test_r126_still_valid_is_asked_in_the_worker(tmp_path: Path) -> None:
    """R-126: the state of the world is looked at again where the call starts."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.defer(pay(), answer=Approved())
        till.valid = False
        report = await till.work()
        assert (report.failed, till.did) == (1, [])
        assert "approval_expired" in till.answer(one.handle)
        assert till.question(one.handle).claimed_at is None
        await till.tower.aclose()

    play(main)


def test_r126_a_tool_that_has_changed_is_another_call(tmp_path: Path) -> None:
    """R-126, S4: another default, or another schema, and what was approved is not what would run."""

    async def main(change: str) -> None:
        path = tmp_path / f"{change}.db"
        till = Till(path)

        @till.tower.tool(independent=True, pools=["crm"], when_busy="defer", requires_approval=True)
        async def send(to: str, copies: int = 1) -> str:
            return "sent"

        [one] = await till.defer(Call("send", {"to": "x"}), answer=Approved())
        await till.tower.aclose()
        other, did = Tower(journal=path), []
        if change == "default":

            @other.tool(name="send", independent=True, requires_approval=True)
            async def changed(to: str, copies: int = 1000) -> str:
                did.append(to)
                return "sent"
        else:

            @other.tool(name="send", independent=True, requires_approval=True)
            async def wider(to: str | int, copies: int = 1) -> str:
                did.append(to)
                return "sent"

        report = await Worker(other, poll=0.01).run(once=True)
        assert report.failed == 1 and did == []
        assert other.journal is not None
        assert "approval_expired" in other.journal.deferred(one.handle).result()[1].content  # type: ignore[index, union-attr]  # it is there
        await other.aclose()

    play(lambda: main("default"))
    play(lambda: main("schema"))


def test_a_tool_that_no_longer_asks_still_holds_to_what_was_said(tmp_path: Path) -> None:
    """S4: an approval that is there is used, though the tool of the worker asks for none; a question stays one."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        await till.work()
        name = till.question(one).approval_id
        await till.tower.aclose()
        other, did = Tower(journal=tmp_path / "j.db"), []

        @other.tool(name="pay", writes="account:{account}", idempotent=False)
        async def free(account: str, amount: int) -> None:
            did.append(amount)

        worker = Worker(other, poll=0.01)
        assert (await worker.run(once=True)).waiting == 1 and did == []
        other.journal.decide(name, True).result()  # type: ignore[union-attr]  # it has one
        assert (await worker.run(once=True)).done == 1 and did == [500]
        await other.aclose()

    play(main)


def test_s3_a_decision_for_a_held_call_travels_with_it(tmp_path: Path) -> None:
    """S3, S4: a batch that is gone on with: a decided call that comes behind a deferred one goes into the queue with
    its decision, an undecided one with its question, which can be decided there.
    """

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        async with till.tower.run("run") as run:
            first = await run.execute([pay(500), pay(600), pay(700)])
            assert [one.code for one in first] == ["approval_missing", "held_behind", "held_behind"]
            names = [one.approval_id for one in first.pending]
            state = first.state()
        async with till.busy(), till.tower.run("run") as run:
            done = await run.resume(state, {names[0]: Approved(), names[1]: Approved()})
        assert [one.code for one in done] == ["deferred", "held_behind", "held_behind"]
        handles = [one.handle for one in done]
        assert [till.row(one).asks for one in handles] == ["approved", "approved", "pending"]
        report = await till.work()
        assert (report.done, report.waiting, till.did) == (2, 1, ["pay a 500", "pay a 600"])
        assert till.question(handles[2]).approval_id == names[2]
        till.journal.decide(names[2], True).result()
        assert (await till.work()).done == 1 and till.did[2:] == ["pay a 700"]
        await till.tower.aclose()

    play(main)


def test_s4_a_batch_gone_on_with_twice_at_once_puts_its_call_in_once(tmp_path: Path) -> None:
    """S4: two who go on with one state while the tool is busy: one row, one approval, one run."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        async with till.tower.run("run") as run:
            first = await run.execute([pay()])
        state, name = first.state(), first.pending[0].approval_id
        async with till.busy(), till.tower.run("run") as one, till.tower.run("run") as two:
            both = await asyncio.gather(*(run.resume(state, {name: Approved()}) for run in (one, two)))
        assert {done[0].outcome for done in both} == {"pending"}
        assert len(till.journal.deferred_calls().result()) == 1
        await till.work()
        assert till.did == ["pay a 500"]
        await till.tower.aclose()

    play(main)


# ==================================================================== a question that comes up there


def test_r127_the_worker_puts_the_question_into_the_inbox_and_goes_on(tmp_path: Path) -> None:
    """R-127, S3: nobody is there to ask: the question is in the inbox with the call's handle and its arguments, the
    worker holds nothing and runs what has nothing to do with it; what comes behind it waits; a yes of another process
    lets both run while the worker is at work.
    """

    async def main() -> None:
        till, other = Till(tmp_path / "j.db"), Journal(tmp_path / "j.db")
        gated, behind, _ = await till.submit(pay(), Call("look", {"account": "a"}), Call("look", {"account": "b"}))
        worker = Worker(till.tower, poll=0.01)
        working = asyncio.create_task(worker.run())
        while "look b" not in till.did or not other.approvals(state="pending").result():
            await asyncio.sleep(0.01)
        [question] = other.approvals(state="pending").result()
        assert (question.handle, question.tool, question.run_id) == (gated, "pay", "run")
        shown = other.arguments_of("approval", question.approval_id).result()
        assert shown is not None and json.loads(shown) == {"account": "a", "amount": 500}
        assert (till.row(gated).state, till.row(gated).asks) == ("queued", "pending")
        assert till.did == ["look b"] and worker._hand == {}
        returned = worker.report().returned
        await asyncio.sleep(0.1)
        assert worker.report().returned == returned == 1  # it is not taken again and again
        assert till.row(behind).state == "queued" and till.row(gated).attempts == 0
        other.decide(question.approval_id, True, by="ann").result()
        while till.row(behind).state != "done":
            await asyncio.sleep(0.01)
        assert till.did == ["look b", "pay a 500", "look a"]
        worker.stop()
        await working
        other.close()
        await till.tower.aclose()

    play(main)


def test_denied_and_expired_are_answered_so(tmp_path: Path) -> None:
    """P-67: a no is `approval_denied`, with the reason for the model, no answer in time `approval_expired`; what needs
    such a call is skipped, what only comes after it goes on.
    """

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        gated, needs, after = await till.submit(
            pay(id="g"), Call("look", {"account": "z"}, "n", needs=("g",)), Call("look", {"account": "a"}, "l")
        )
        assert (await till.work()).waiting == 1
        till.journal.decide(till.question(gated).approval_id, False, by="bob", reason="not on a Friday").result()
        await till.work()
        assert "approval_denied" in till.answer(gated) and "not on a Friday" in till.answer(gated)
        assert "dependency_failed" in till.answer(needs) and till.did == ["look a"]
        assert till.row(gated).code == "approval_denied" and "looked a" in till.answer(after)
        await till.tower.aclose()
        late = Till(tmp_path / "late.db", approval_lifetime=0.2)
        [one] = await late.submit(pay())
        report = await late.work()
        assert (report.failed, report.left, late.did) == (1, 0, [])
        assert "approval_expired" in late.answer(one) and late.question(one).state == "expired"
        await late.tower.aclose()

    play(main)


def test_a_worker_that_can_ask_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: a worker with an approver takes also what waits in the inbox, under the same name; its decision stands there.
    Where its approver says nothing the call waits, and a decision from elsewhere counts at once.
    """

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        one, two, three = await till.submit(pay(101, "a"), pay(102, "b"), pay(103, "c"))
        await till.work()
        names = [till.question(handle).approval_id for handle in (one, two, three)]

        async def person(request: ApprovalRequest) -> Answer:
            till.asked.append(request)
            return {101: Approved({"account": "a", "amount": 1}), 102: Denied("no")}.get(request.arguments["amount"])

        report = await till.work(approver=person)
        assert {request.approval_id for request in till.asked} == set(names)
        assert (report.done, report.failed, report.left, report.waiting) == (1, 1, 1, 1)
        assert till.did == ["pay a 1"]
        assert [till.question(handle).state for handle in (one, two, three)] == ["approved", "denied", "pending"]
        assert till.question(two).reason == "no" and till.question(one).edited
        till.journal.decide(names[2], True).result()
        assert (await till.work(approver=till.answering(None))).done == 1
        assert till.did == ["pay a 1", "pay c 103"] and len(till.asked) == 3
        await till.tower.aclose()

    play(main)


@pytest.mark.parametrize("edit", [None, {"account": "a", "amount": 3}])
def test_a_decision_in_the_worker_outlives_a_wait_for_room(tmp_path: Path, edit: Any) -> None:
    """S4: what the worker's approver said stays said when there is no room and the call goes back into the queue."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        async with till.busy():
            worker = Worker(till.tower, poll=0.01, patience=0.05, approver=till.answering(Approved(edit)))
            working = asyncio.create_task(worker.run(once=True))
            while worker.report().returned < 2:
                await asyncio.sleep(0.01)
            assert len(till.asked) == 1 and till.row(one).asks == "approved"
        assert (await working).done == 1
        assert len(till.asked) == 1 and till.did == ["pay a 3" if edit else "pay a 500"]
        await till.tower.aclose()

    play(main)


@pytest.mark.parametrize("decision", ["no", "edited", "yes"])
def test_the_first_decision_that_was_written_counts(tmp_path: Path, decision: str) -> None:
    """S4: while the worker's approver thinks, somebody decides elsewhere: that stands, and the call goes by it."""

    async def main() -> None:
        till, other = Till(tmp_path / "j.db"), Journal(tmp_path / "j.db")
        [one] = await till.submit(pay())
        await till.work()
        name = till.question(one).approval_id

        async def slow(request: ApprovalRequest) -> Answer:
            brought = b'{"account":"a","amount":9}' if decision == "edited" else None
            other.decide(request.approval_id, decision != "no", reason="first", arguments=brought).result()
            return Approved()

        report = await till.work(approver=slow)
        want = {"no": [], "edited": ["pay a 9"], "yes": ["pay a 500"]}[decision]
        assert (till.did, report.done) == (want, len(want))
        assert till.question(one).approval_id == name
        if decision == "no":
            assert "approval_denied" in till.answer(one)
        other.close()
        await till.tower.aclose()

    play(main)


def test_r125_a_read_that_needs_approval_uses_it_once(tmp_path: Path) -> None:
    """S4: a tool without effect writes no intent of its own; the approval of a deferred call is used all the same."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.defer(Call("peek", {"account": "a"}), answer=Approved())
        await till.work()
        assert till.did == ["peek a"] and till.question(one.handle).claimed_at is not None
        await till.tower.aclose()

    play(main)


def test_the_question_ends_with_its_call(tmp_path: Path) -> None:
    """A call that is cancelled while it waits takes its question out of the inbox; a decision is too late then."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        await till.work()
        question = till.question(one)
        assert till.journal.cancel_deferred(one).result() == "cancelled"
        assert till.journal.approvals(state="pending").result() == []
        with pytest.raises(Unsettled, match="expired"):
            till.journal.decide(question.approval_id, True).result()
        await till.work()
        assert till.did == [] and rows(tmp_path / "j.db", "SELECT * FROM arguments") == []
        await till.tower.aclose()

    play(main)


def test_a_call_that_is_cancelled_while_somebody_is_asked_never_runs(tmp_path: Path) -> None:
    """A cancel that comes while a worker's approver thinks ends the question; a late yes runs nothing."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        asked = asyncio.Event()

        async def slow(request: ApprovalRequest) -> Answer:
            asked.set()
            try:
                await asyncio.sleep(60)
            finally:
                asked.set()
            return Approved()

        worker = Worker(till.tower, poll=0.01, approver=slow)
        working = asyncio.create_task(worker.run(once=True))
        await asked.wait()
        assert till.journal.cancel_deferred(one).result() == "claimed"
        await working
        assert (till.did, till.row(one).state) == ([], "cancelled")
        assert till.journal.approvals(state="pending").result() == []
        await till.tower.aclose()

    play(main)


def test_a_worker_that_leaves_while_it_asks_leaves_the_question(tmp_path: Path) -> None:
    """G12: a worker that is stopped while somebody is asked: the call is in the queue, the question in the inbox."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        asked = asyncio.Event()

        async def slow(request: ApprovalRequest) -> Answer:
            asked.set()
            await asyncio.sleep(60)
            return None

        worker = Worker(till.tower, poll=0.01, approver=slow)
        working = asyncio.create_task(worker.run())
        await asked.wait()
        worker.stop(grace=0)
        await working
        assert (till.row(one).state, till.row(one).asks) == ("queued", "pending")
        assert till.question(one).state == "pending"
        till.journal.decide(till.question(one).approval_id, True).result()
        assert (await till.work()).done == 1 and till.did == ["pay a 500"]
        await till.tower.aclose()

    play(main)


def test_it_is_told_that_a_call_waits_for_a_person(tmp_path: Path) -> None:
    """The tool `read_result` and the report of a worker say so; handed in again the batch is answered as before."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        report = await till.work()
        assert (report.left, report.waiting, report.done, report.failed) == (1, 1, 0, 0)
        [read] = await till.tower.execute([Call("read_result", {"handle": one})])
        assert "waits for a person's approval" in read.message
        await till.tower.aclose()

    play(main)


def test_people_follow_it_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R-127: `towerman worker --once` says what it leaves open and how to decide it; approvals, status and result name
    the call by its handle; approved there, the next worker runs it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "till_tools.py").write_text(
        "from towerman import Tower\n"
        "tower = Tower(journal='j.db')\n"
        "@tower.tool(writes='account:{account}', idempotent=False, requires_approval=True)\n"
        "async def pay(account: str) -> str:\n"
        "    return 'paid'\n"
    )
    monkeypatch.delitem(sys.modules, "till_tools", raising=False)
    calls = [{"tool": "pay", "arguments": {"account": name}} for name in ("a", "a", CANARY)]
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    tools = ("--tools", "till_tools.py:tower")

    def say(*words: str) -> tuple[int, str, str]:
        code = command([*words])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    assert say("submit", "calls.json", *tools)[0] == 0
    code, out, _ = say("worker", *tools, "--once")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "0 done, 0 failed, 2 returned, 0 unknown, 0 lost"
    assert lines[1] == "left open: 2 wait for a person's approval, 1 wait for these, for another worker or for later"
    said = [
        re.fullmatch(r"(later-\w+) \(pay\) waits: towerman approvals approve (apr_\w+)", line) for line in lines[2:]
    ]
    assert len(said) == 2 and None not in said
    handle, name = said[0].groups()  # type: ignore[union-attr]  # looked at just now
    code, out, _ = say("worker", *tools, "--once", "--json")
    assert json.loads(out)["left"] == 3 and json.loads(out)["waiting_for_approval"] == 2
    assert handle in say("approvals", "list", "--journal", "j.db")[1]
    listed = json.loads(say("approvals", "list", "--journal", "j.db", "--json")[1])["approvals"]
    assert {one["handle"] for one in listed} == {one.group(1) for one in said if one is not None}
    assert f"it waits for a person's approval ({name})" in say("status", handle, "--journal", "j.db")[1]
    told_ = json.loads(say("status", handle, "--journal", "j.db", "--json")[1])
    assert (told_["approval"], told_["waits_for_approval"], told_["state"]) == (name, True, "queued")
    code, out, err = say("result", handle, "--journal", "j.db")
    assert code == 1 and out == "" and f"it waits for a person's approval ({name})" in err
    assert say("approvals", "approve", name, "--by", "ann", "--journal", "j.db")[0] == 0
    assert say("approvals", "approve", name, "--journal", "j.db")[0] == 0  # heard once more, nothing changes
    assert say("approvals", "deny", name, "--journal", "j.db")[0] == 2
    assert say("approvals", "approve", "apr_\udcff", "--journal", "j.db")[0] == 2
    code, out, _ = say("worker", *tools, "--once")
    assert out.splitlines()[:2] == [f"{handle} done", "1 done, 0 failed, 1 returned, 0 unknown, 0 lost"]
    assert say("result", handle, "--journal", "j.db") == (0, "paid\n", "")
    everything = "".join(map(str, [say("status", "--journal", "j.db"), say("approvals", "list", "--journal", "j.db")]))
    assert CANARY not in everything
    assert CANARY in say("approvals", "list", "--journal", "j.db", "--arguments")[1]


# ==================================================================== breaking it


def test_g8_nothing_of_a_deferred_approval_leaves_by_a_side_door(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """G8: the model's arguments, those that a person gave and the reason of a no are in the table of arguments, in the
    decision (the reason) and in the call's own answer, and nowhere else: no log, event, repr, message, other table.
    """
    secret = "zqxjkvbpwm"

    async def main() -> None:
        path = tmp_path / "j.db"
        till = Till(path)
        caplog.set_level(logging.DEBUG)
        edited = Approved({"account": secret, "amount": 7})
        done = await till.defer(pay(account=secret), answer=edited)
        waits, denied = await till.submit(pay(account=f"{secret}2"), pay(account=f"{secret}3"))
        report = await till.work()
        assert (report.done, report.waiting) == (1, 2) and till.did == [f"pay {secret} 7"]
        name = till.question(waits).approval_id
        brought = json.dumps({"account": f"{secret}2", "amount": 8}).encode()
        till.journal.decide(name, True, arguments=brought).result()
        till.journal.decide(till.question(denied).approval_id, False, reason="no").result()
        told_ = [repr(till.row(one)) for one in (done[0].handle, waits, denied)]
        told_ += [repr(till.question(one)) for one in (done[0].handle, waits, denied)]
        with pytest.raises(Unsettled) as no:
            till.journal.decide(name, True, arguments=b'{"account":"zqxjkvbpwm"}').result()
        told_.append(str(no.value) + repr(done) + done[0].message + done[0].content)
        for table in ("deferred", "calls", "approvals", "blobs", "facts", "owners"):
            told_ += [repr(row) for row in rows(path, f"SELECT * FROM {table}")]
        await till.work()
        till.tower.flush()
        told_ += [repr(event) + str(event) for event in till.events]
        told_.append(caplog.text + repr(till.tower.statistics()))
        for table in ("deferred", "calls", "approvals", "blobs", "facts", "owners", "arguments"):
            told_ += [repr(row) for row in rows(path, f"SELECT * FROM {table}")]
        assert [one for one in told_ if secret in one] == []
        await till.tower.aclose()

    play(main)


@pytest.mark.parametrize(
    "arguments",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"account":1}', b'{"account":"a","amount":"x","zqx":1}', b"[" * 100_000],
    ids=range(8),
)
def test_rubbish_that_a_person_gives_runs_nothing(tmp_path: Path, arguments: bytes) -> None:
    """Arguments that are none, or not those of the tool, are the call's refusal; nothing runs and nobody breaks."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.submit(pay())
        await till.work()
        till.journal.decide(till.question(one).approval_id, True, arguments=arguments).result()
        report = await till.work()
        assert (report.failed, report.left, till.did) == (1, 0, [])
        assert "invalid_arguments" in till.answer(one)
        await till.tower.aclose()

    play(main)


@pytest.mark.parametrize(
    "given",
    [
        {"approved": 1}, {"approved": "yes"}, {"approved": None}, {"by": 5}, {"reason": b"x"}, {"expires_at": "soon"},
        {"expires_at": float("nan")}, {"expires_at": float("inf")}, {"digest": "x"}, {"arguments": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_a_decision_that_is_none_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    """What is no decision decides nothing, and says what it should be."""
    with Journal(tmp_path / "j.db") as journal:
        journal.ask_approval(Approval("apr_1", "run", "pay", b"d", 4e9)).result()
        with pytest.raises(PolicyError, match="journal: decide"):
            journal.decide("apr_1", **{"approved": True, **given})
        found = journal.approval("apr_1").result()
        assert found is not None and found.state == "pending"


@pytest.mark.parametrize("name", ["", "x" * 10_000, "apr_\udcff", "a\0b", "apr_'; DROP TABLE approvals", None, 5, b"a"])
def test_names_that_nobody_has_name_nothing(tmp_path: Path, name: Any) -> None:
    """Anything may be asked for as an approval: there is none of that name."""
    with Journal(tmp_path / "j.db") as journal:
        assert journal.approval(name).result() is None
        with pytest.raises(Unsettled, match="no such approval"):
            journal.decide(name, True).result()
        assert journal.claim_approval(name, b"d").result() == ("missing", None)


def test_words_that_cannot_be_written_are_written_as_well_as_they_can(tmp_path: Path) -> None:
    """A name or a reason from a shell may hold bytes that are no text: the decision counts all the same."""
    with Journal(tmp_path / "j.db") as journal:
        journal.ask_approval(Approval("apr_1", "run", "pay", b"d", 4e9)).result()
        found = journal.decide("apr_1", False, by="ann\udcff", reason="no\udcff" * 1000).result()
        assert found.state == "denied" and found.decided_by == "ann?" and len(found.reason or "") <= 500


def test_a_journal_without_arguments_takes_no_edited_decision(tmp_path: Path) -> None:
    """A yes with other arguments is not made a plain yes where the journal stores none."""
    with Journal(tmp_path / "j.db", arguments=False) as journal:
        journal.ask_approval(Approval("apr_1", "run", "pay", b"d", 4e9)).result()
        with pytest.raises(PolicyError, match="stores no arguments"):
            journal.decide("apr_1", True, arguments=b"{}")
        found = journal.approval("apr_1").result()
        assert found is not None and found.state == "pending"


def test_s4_another_yes_with_other_arguments_is_another_decision(tmp_path: Path) -> None:
    """S4: the first decision counts, also of two that say yes to different things."""
    with Journal(tmp_path / "j.db") as journal:
        for name, first, second in (("a", b"1", b"2"), ("b", None, b"2"), ("c", b"1", None)):
            journal.ask_approval(Approval(name, "run", "pay", b"d", 4e9), b"0").result()
            journal.decide(name, True, arguments=first).result()
            if second is None:  # it changes nothing, and says less
                assert journal.decide(name, True, arguments=second).result().edited
            else:
                with pytest.raises(Unsettled, match="approved"):
                    journal.decide(name, True, arguments=second).result()
            assert journal.decide(name, True, arguments=first).result().state == "approved"


@pytest.mark.parametrize("said", ["by the journal", "with the call"])
def test_s4_an_edited_yes_that_comes_again_when_its_call_is_over(tmp_path: Path, said: str) -> None:
    """S4: the same decision changes nothing, also when its arguments are not stored any more; another is refused."""

    async def main() -> None:
        till = Till(str(tmp_path / "j.db"))
        if said == "by the journal":
            [one] = await till.submit(pay())
            await till.work()
            name = till.question(one).approval_id
            till.journal.decide(name, True, arguments=b'{"account":"a","amount":7}').result()
        else:
            [done] = await till.defer(pay(), answer=Approved({"account": "a", "amount": 7}))
            name = till.question(done.handle).approval_id
        await till.work()
        assert till.did == ["pay a 7"] and rows(tmp_path / "j.db", "SELECT * FROM arguments") == []
        again = till.journal.decide(name, True, arguments=b'{"account":"a","amount":7}').result()
        assert again.state == "approved" and again.claimed_at is not None
        with pytest.raises(Unsettled, match="approved and used"):
            till.journal.decide(name, True, arguments=b'{"account":"a","amount":8}').result()
        await till.tower.aclose()

    play(main)


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0])
def test_steps_of_the_clock_let_nothing_run_too_late(
    tmp_path: Path, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: a calendar that is set forward ends an approval early; one that is set back makes none hold for longer than
    a new one would, as far as one process can tell.
    """

    async def main() -> None:
        stepped = 0.0

        def wall() -> float:
            return wall_time() + stepped

        monkeypatch.setattr(worker_room, "wall_time", wall)
        till = Till(Journal(tmp_path / "j.db", _wall=wall), approval_lifetime=0.5)
        till.tower._core.wall = wall
        [one] = await till.defer(pay(), answer=Approved())
        stepped = step
        async with till.busy():
            worker = Worker(till.tower, poll=0.01, patience=0.05)
            working = asyncio.create_task(worker.run())
            while till.row(one.handle).state != "done":
                await asyncio.sleep(0.01)
            worker.stop()
            await working
        assert till.did == [] and "approval_expired" in till.answer(one.handle)
        await till.tower.aclose()

    play(main)


def test_an_approval_that_ended_since_its_worker_died_says_what_is_not_known(tmp_path: Path) -> None:
    """G10: a harmless call whose worker died over it and whose approval has ended since: it does not run again, and it
    is not told that nothing took effect.
    """

    async def main() -> None:
        path, wall = tmp_path / "j.db", Wall()
        till = Till(Journal(path, _wall=wall))
        till.tower._core.wall = wall

        @till.tower.tool(independent=True, idempotent=True, pools=["crm"], when_busy="defer", requires_approval=True)
        async def put(n: int) -> int:
            till.did.append(f"put {n}")
            return n

        [one] = await till.defer(Call("put", {"n": 1}), answer=Approved())
        with Journal(path, _wall=wall) as other:
            [(row, _)] = other.claim_next().result()
            assert row.asked is not None
            intent = Intent(
                b"t" * 16, row.key, row.digest, "put", "run", 1, 0, harmless=True, claim=row.claim, approval=row.asked
            )
            assert other.begin(intent).result()[0] == "run"
        dead(path)
        wall.now += 7200
        await till.work()
        assert till.did == []
        answer = till.answer(one.handle)
        assert "approval_expired" in answer and "had begun before" in answer
        found = till.journal.deferred(one.handle).result()
        assert found is not None and found[1] is not None and found[1].applied == "unknown"
        await till.tower.aclose()

    play(main)


@pytest.mark.parametrize("wrong", ["missing", "other id", "denied", "expired", "changed", "taken", "other", "pending"])
def test_s4_the_step_that_writes_the_intent_looks_at_the_approval(tmp_path: Path, wrong: str) -> None:
    """S4: whatever a worker believes, the step in which it begins a call uses the approval, or begins nothing."""
    wall, path = Wall(), tmp_path / "j.db"
    asked = Approval("apr_1", "run", "pay", b"d", wall.now + 60, state="approved")
    with Journal(path, _wall=wall) as journal:
        if wrong == "denied":
            asked = replace(asked, state="denied")
        elif wrong == "pending":
            asked = replace(asked, state="pending")
        journal.enqueue(deferred("h"), b"[{},null]", asked=asked).result()
        [(row, _)] = journal.claim_next().result()
        given: Approval | None = replace(asked, state="approved")
        edited, why = None, wrong
        assert given is not None
        if wrong == "missing":
            given = None
        elif wrong == "other id":
            given, why = replace(given, approval_id="apr_2"), "missing"
        elif wrong == "expired":
            wall.now += 61
        elif wrong == "changed":
            given = replace(given, digest=b"e")
        elif wrong == "taken":
            assert journal.claim_approval("apr_1", b"d").result()[0] == "claimed"
        elif wrong == "other":
            given, edited = replace(given, edited=True), b"{}"
        elif wrong == "pending":
            wall.now += 61
            why = "expired"
        intent = Intent(b"t" * 16, row.key, None, "pay", "run", 1, 0, claim=row.claim, approval=given, edited=edited)
        with pytest.raises(NotCleared) as told_:
            journal.begin(intent).result()
        assert told_.value.why == why
        assert journal.calls().result() == []
        if wrong not in ("taken",):
            found = journal.approval("apr_1").result()
            assert found is not None and found.claimed_at is None


def test_what_waits_is_not_pruned(tmp_path: Path) -> None:
    """The approval of a call that is not over stays, however old it is; with the call it may go."""
    wall, path = Wall(), tmp_path / "j.db"
    with Journal(path, _wall=wall) as journal:
        asked = Approval("apr_1", "run", "pay", b"d", wall.now + 60)
        journal.enqueue(deferred("h"), b"[{},null]", asked=asked).result()
        wall.now += 1000
        assert journal.prune(10).approvals == 0
        [(row, _)] = journal.claim_next(asks=False).result()
        assert row.claim is not None
        journal.finish_deferred(row.claim, OK).result()
        wall.now += 1000
        pruned = journal.prune(10)
        assert (pruned.approvals, pruned.deferred) == (1, 1)


def test_a_journal_that_is_gone_starts_nothing_that_was_approved(tmp_path: Path) -> None:
    """S14: an approval cannot be used where the journal cannot be written: not even a read begins."""

    async def main() -> None:
        till = Till(tmp_path / "j.db")
        [one] = await till.defer(Call("peek", {"account": "a"}), answer=Approved())
        begin = till.journal.begin_all
        look_up = till.journal.look_up

        def broken(*_: Any) -> Any:
            future: Future[Any] = Future()
            future.set_exception(JournalUnavailable("full", "full"))
            return future

        worker = Worker(till.tower, poll=0.01)
        for name in ("begin_all", "look_up"):
            setattr(till.journal, name, broken)
            working = asyncio.create_task(worker.run())
            before = worker.report().returned
            while worker.report().returned == before:
                await asyncio.sleep(0.01)
            worker.stop()
            await working
            assert till.did == []
            till.journal.begin_all, till.journal.look_up = begin, look_up  # type: ignore[method-assign]  # back to it
        assert (await till.work()).done == 1 and till.did == ["peek a"]
        assert till.row(one.handle).outcome == "ok"
        await till.tower.aclose()

    play(main)


class Inbox(RuleBasedStateMachine):
    """Deferred calls that are asked for, decided, taken, begun, given back, ended, cancelled, in any order, by workers
    that die: compared with a plain list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.wall = Wall()
        self.path = Path(self.folder.name) / "j.db"
        self.journal = Journal(self.path, _wall=self.wall)
        self.number = 0
        self.held: dict[str, bytes] = {}
        self.word: dict[str, str] = {}
        self.until: dict[str, float] = {}
        self.begun: dict[str, int] = {}
        self.over: set[str] = set()

    def teardown(self) -> None:
        self.journal.close()
        self.folder.cleanup()

    @rule(word=st.sampled_from(["none", "pending", "approved"]), life=st.integers(5, 50))
    def put_in(self, word: str, life: int) -> None:
        self.number += 1
        handle = f"h{self.number}"
        asked = None
        if word != "none":
            state: Any = word
            asked = Approval(f"apr_{handle}", "run", "pay", b"d", self.wall.now + life, state=state)
            self.until[handle] = self.wall.now + life
        self.word[handle] = word
        one = replace(deferred(handle), key=handle.encode())
        self.journal.enqueue(one, b"[{},null]", asked=asked).result()

    def open_ones(self) -> list[str]:
        return [handle for handle in self.word if handle not in self.over]

    @rule(data=st.data(), yes=st.booleans())
    def decide(self, data: st.DataObject, yes: bool) -> None:
        asked = [handle for handle, word in self.word.items() if word != "none"]
        if not asked:
            return
        handle = data.draw(st.sampled_from(asked))
        known, wanted = self.word[handle], "approved" if yes else "denied"
        late = self.wall.now >= self.until[handle] and handle not in self.begun
        future = self.journal.decide(f"apr_{handle}", yes)
        if known == "pending" and not late and handle not in self.over:
            future.result()
            self.word[handle] = wanted
        elif known == wanted and not (late and wanted == "approved"):
            future.result()
        else:
            with pytest.raises(Unsettled):
                future.result()

    @rule(asks=st.booleans())
    def take(self, asks: bool) -> None:
        for row, _ in self.journal.claim_next(limit=3, asks=asks).result():
            handle = row.handle
            assert handle not in self.over and handle not in self.held
            if not asks and self.word[handle] == "pending":
                assert self.wall.now >= self.until[handle], "a question holds no worker"
            assert row.claim is not None
            self.held[handle] = row.claim

    @rule(data=st.data(), said=st.booleans())
    def begin(self, data: st.DataObject, said: bool) -> None:
        if not self.held:
            return
        handle = data.draw(st.sampled_from(sorted(self.held)))
        if handle in self.begun:
            return
        word, until = self.word[handle], self.until.get(handle, self.wall.now + 60)
        given = Approval(f"apr_{handle}", "run", "pay", b"d", until, state="approved")
        intent = Intent(
            os.urandom(16), handle.encode(), None, "pay", "run", 1, 0,
            claim=self.held[handle], approval=given if word != "none" or said else None,
        )  # fmt: skip
        future = self.journal.begin(intent)
        if word == "denied" or self.wall.now >= until:
            with pytest.raises(NotCleared):
                future.result()
            return
        assert future.result()[0] == "run"
        self.begun[handle] = self.begun.get(handle, 0) + 1
        assert self.begun[handle] == 1
        if word != "none" or said:
            self.word[handle], self.until[handle] = "approved", until

    @rule(data=st.data(), ask=st.booleans())
    def give_back(self, data: st.DataObject, ask: bool) -> None:
        waiting = sorted(handle for handle in self.held if handle not in self.begun)
        if not waiting:
            return
        handle = data.draw(st.sampled_from(waiting))
        asked = None
        if ask and self.word[handle] == "none":
            asked = Approval(f"apr_{handle}", "run", "pay", b"d", self.wall.now + 20)
            self.word[handle], self.until[handle] = "pending", self.wall.now + 20
        assert self.journal.give_back(self.held.pop(handle), asked=asked, arguments=b"{}").result() is True

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if not self.held:
            return
        handle = data.draw(st.sampled_from(sorted(self.held)))
        assert self.journal.finish_deferred(self.held.pop(handle), OK).result() is True
        self.end(handle)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [handle for handle in self.open_ones() if handle not in self.held and handle not in self.begun]
        if waiting:
            handle = data.draw(st.sampled_from(waiting))
            assert self.journal.cancel_deferred(handle).result() == "cancelled"
            self.end(handle)

    def end(self, handle: str) -> None:
        self.over.add(handle)
        if handle in self.until and handle not in self.begun and self.word[handle] != "denied":
            self.until[handle] = min(self.until[handle], self.wall.now)

    @rule()
    def the_process_dies(self) -> None:
        self.journal.close()
        dead(self.path)
        self.journal = Journal(self.path, _wall=self.wall)
        self.journal.requeue_dead().result()
        for handle in list(self.held):
            del self.held[handle]
            if handle in self.begun:
                self.over.add(handle)  # it is unknown

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.wall.now += seconds

    @invariant()
    def as_it_should_be(self) -> None:
        for handle in self.word:
            found = self.journal.deferred(handle).result()
            assert found is not None
            word = self.word[handle]
            late = word != "none" and self.wall.now >= self.until[handle] and handle not in self.begun
            expected = None if word == "none" else "expired" if late and word in ("pending", "approved") else word
            assert found[0].asks == expected, (handle, word)
        due = self.journal.due(asks=False).result()
        waits = [
            handle
            for handle in self.open_ones()
            if handle not in self.held and self.word[handle] == "pending" and self.wall.now < self.until[handle]
        ]
        assert due.waiting == len(waits)
        stored = {row[0] for row in rows(self.path, "SELECT ref FROM arguments WHERE kind = 'approval'")}
        assert not stored & {f"apr_{handle}" for handle in self.over - self.begun.keys()}


TestInbox = Inbox.TestCase
TestInbox.settings = settings(stateful_step_count=40, deadline=None)
