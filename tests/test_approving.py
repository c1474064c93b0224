"""Approvals on whole towers: asked, decided, expired, resumed; on virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kit import Stage, codes, here, on_stage, run_batch, sound

from towerman import (
    ApprovalRequest,
    Approved,
    BatchResult,
    Budget,
    Call,
    Context,
    Denied,
    Event,
    InputError,
    PolicyError,
    Pool,
    Retry,
    Tower,
)

stage = pytest.fixture(on_stage)

Answer = Approved | Denied | None


def answering(answer: Answer, seconds: float = 0.0) -> Callable[[ApprovalRequest], Awaitable[Answer]]:
    """An approver that answers so after so many seconds."""

    async def approver(request: ApprovalRequest) -> Answer:
        if seconds:
            await asyncio.sleep(seconds)
        return answer

    return approver


def by_call(**answers: Answer) -> Callable[[ApprovalRequest], Awaitable[Answer]]:
    """An approver that answers by the id of the call."""

    async def approver(request: ApprovalRequest) -> Answer:
        return answers.get(request.call_id)

    return approver


def outcomes(done: Any) -> list[str]:
    """The code of each result, or ok."""
    return [result.code or result.outcome for result in done]


def decide(batch: BatchResult, *answers: Answer) -> dict[str, Answer]:
    """Decisions for the open requests of a batch, in their order."""
    return dict(zip([one.approval_id for one in batch.pending], answers, strict=True))


def shop(stage: Stage, **options: Any) -> Tower:
    """A tower with a free tool and a gated one; each visit is counted under its name."""
    tower = stage.tower(**options)

    @tower.tool(reads="log", read_only=True)
    async def diag() -> str:
        return await stage.work("diag", 0.1)

    @tower.tool(writes="volume:{name}", requires_approval=True)
    async def cleanup(name: str) -> str:
        return await stage.work(f"cleanup {name}", 0.1)

    return tower


# ==================================================================== an approver in the process


def test_r125_approval_is_decided_before_the_handler(stage: Stage) -> None:
    """R-125: a yes runs the call, a no is a structured result with the reason for the model, and neither touches a
    sibling.
    """
    tower = shop(stage)
    approver = by_call(a=Approved(), b=Denied("not  on a\nFriday"))
    calls = [Call("cleanup", {"name": "x"}, "a"), Call("cleanup", {"name": "y"}, "b"), Call("diag", {}, "c")]
    done = run_batch(stage, tower, calls, approver=approver)
    sound(done, calls)
    assert outcomes(done) == ["ok", "approval_denied", "ok"]
    assert done[1].message == "Not run: a person denied it: not on a Friday"
    assert (done[1].outcome, done[1].started, done[1].applied, done[1].retryable) == ("rejected", False, "no", "no")
    assert stage.started == {"cleanup x": 1, "diag": 1}
    seen = tower.statistics().approvals
    assert (seen.asked, seen.approved, seen.denied, seen.expired, seen.open) == (2, 1, 1, 0, 0)


def test_the_request_says_what_would_run(stage: Stage) -> None:
    """API section 2: the person sees the checked arguments, defaults included: a copy, which changes nothing."""
    tower = stage.tower()
    ran: list[dict[str, Any]] = []

    @tower.tool(independent=True, requires_approval=True)
    async def send(to: list[str], urgent: bool = False) -> str:
        ran.append({"to": to, "urgent": urgent})
        return "sent"

    seen: list[ApprovalRequest] = []

    async def approver(request: ApprovalRequest) -> Answer:
        seen.append(request)
        assert isinstance(request.arguments, dict)
        request.arguments["to"].append("mallory")
        request.arguments["urgent"] = True
        return Approved()

    calls = [Call("send", '{"to": ["ann"]}', "c1"), Call("send", {"to": ["ann"]}, "c2")]
    done = run_batch(stage, tower, calls, approver=approver, run_id="r")
    assert done.ok
    assert ran == [{"to": ["ann"], "urgent": False}] * 2
    assert [(one.tool, one.run_id, one.call_id, one.expires_in) for one in seen] == [
        ("send", "r", "c1", 3600.0),
        ("send", "r", "c2", 3600.0),
    ]
    assert len({one.approval_id for one in seen}) == 2
    assert seen[0].digest == seen[1].digest, "the same call, however it was written"


def test_p68_waiting_for_a_person_eats_no_other_time(stage: Stage) -> None:
    """P-68: run timeout 0.5 s, queue timeout 5 s, approval 60 s; the person answers after 30 s, the tool needs 0.3 s:
    success. While pending it holds no slot, no rate and no budget of time, others run; afterwards it goes through
    every limit.
    """
    tower = stage.tower(max_concurrency=1, max_wait=5.0, approval_lifetime=60.0, pools={"db": Pool(1, rate="1/min")})

    @tower.tool(writes="k", requires_approval=True, timeout=0.5, pools=["db"])
    async def gated() -> str:
        return await stage.work("gated", 0.3)

    @tower.tool(independent=True, pools=["db"])
    async def other() -> str:
        return await stage.work("other", 0.1)

    async def main() -> None:
        async with tower.run(approver=answering(Approved(), 30.0)) as run:
            batch = asyncio.ensure_future(run.execute([Call("gated", {})]))
            await asyncio.sleep(1)
            seen = tower.statistics()
            assert (seen.running, seen.waiting, seen.behind, seen.approvals.open) == (0, 0, 0, 1)
            assert all(pool.held == pool.queued == 0 for pool in seen.pools.values())
            assert seen.rates["db"].started == 0
            assert (await run.execute([Call("other", {})])).ok, "the only slot and the only start were free"
            assert here().time() == pytest.approx(1.1)
            done = await batch
            # The other call took the rate's start: the approved one is refused by the same limit as any other.
            assert outcomes(done) == ["rate_limited"]
            assert stage.started["gated"] == 0

        async with tower.run(approver=answering(Approved(), 30.0)) as run:
            await asyncio.sleep(60)
            began = here().time()
            done = await run.execute([Call("gated", {})])
            assert done.ok
            assert here().time() - began == pytest.approx(30.3)
            assert (done[0].waited, done[0].ran) == (0.0, pytest.approx(0.3))
            assert done[0].waited_for == ("approval",)

    stage.run(main())


def test_r63_waiting_for_a_human_never_holds_a_slot(stage: Stage) -> None:
    """R-63, G2: a hundred calls wait for a person on a tower with one place, and another run goes on at once."""
    tower = stage.tower(max_concurrency=1, max_calls_per_batch=100, max_queued=0)

    @tower.tool(independent=True, requires_approval=True)
    async def gated(n: int) -> str:
        return await stage.work("gated", 0.1)

    @tower.tool(independent=True)
    async def free() -> str:
        return await stage.work("free", 0.1)

    async def main() -> None:
        async with tower.run(approver=answering(None, 50.0)) as run:
            batch = asyncio.ensure_future(run.execute([Call("gated", {"n": n}) for n in range(100)]))
            await asyncio.sleep(1)
            assert tower.statistics().approvals.open == 100
            assert (await tower.execute([Call("free", {})])).ok
            assert here().time() == pytest.approx(1.1)
            assert set(codes(await batch)) == {"approval_missing"}

    stage.run(main())
    assert stage.started == {"free": 1}


def test_r127_calls_without_approval_go_on(stage: Stage) -> None:
    """R-127: what needs no approval runs while one waits; results stand in emitted order."""
    tower = shop(stage)
    sealed: list[tuple[int, float]] = []

    def hook(result: Any) -> None:
        sealed.append((result.index, stage.clock.value))

    calls = [Call("cleanup", {"name": "x"}), Call("diag", {}), Call("cleanup", {"name": "y"}), Call("diag", {})]
    done = run_batch(stage, tower, calls, approver=answering(Approved(), 9.0), on_result=hook)
    assert [result.index for result in done] == [0, 1, 2, 3]
    assert done.ok
    assert sorted(sealed) == [(0, 9.1), (1, 0.1), (2, 9.1), (3, 0.1)]


def test_calls_behind_an_approval_come_in_order(stage: Stage) -> None:
    """G4: a gated write keeps its place: the read behind it waits for the person, and sees what was written."""
    tower = stage.tower()
    text = ["old"]

    @tower.tool(writes="doc", requires_approval=True)
    async def write(new: str) -> str:
        text[0] = new
        return "written"

    @tower.tool(reads="doc")
    async def read() -> str:
        return text[0]

    calls = [Call("read", {}), Call("write", {"new": "new"}), Call("read", {})]
    done = run_batch(stage, tower, calls, approver=answering(Approved(), 5.0))
    assert [result.value for result in done] == ["old", "written", "new"]
    assert done[2].waited_for == ("call 1",)
    done = run_batch(stage, tower, calls, approver=answering(Denied(), 5.0))
    assert outcomes(done) == ["ok", "approval_denied", "ok"], "an order does not skip (S1)"


def test_what_needs_a_denied_call_is_skipped(stage: Stage) -> None:
    """S1: a need of a denied call fails like the need of any call that did not succeed."""
    tower = shop(stage)
    calls = [Call("cleanup", {"name": "x"}, "a"), Call("diag", {}, "b", ["a"])]
    done = run_batch(stage, tower, calls, approver=answering(Denied()))
    assert outcomes(done) == ["approval_denied", "dependency_failed"]


def test_p67_expired_is_not_denied(stage: Stage) -> None:
    """P-67: no answer until the lifetime of 10 s: the status is expired, not rejected by a human; the counters for
    denials stay as they were. The approver is told to stop.
    """
    tower = shop(stage, approval_lifetime=10.0)
    told: list[str] = []

    async def never(request: ApprovalRequest) -> Answer:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            told.append("stop")
            raise
        return Approved()

    done = run_batch(stage, tower, [Call("cleanup", {"name": "x"}), Call("diag", {})], approver=never)
    assert outcomes(done) == ["approval_expired", "ok"]
    assert done[0].message == "Not run: nobody approved it in time."
    assert done[0].retryable == "yes"
    assert stage.clock.value == pytest.approx(10.0)
    assert told == ["stop"]
    seen = tower.statistics().approvals
    assert (seen.asked, seen.expired, seen.denied, seen.approved, seen.open) == (1, 1, 0, 0, 0)
    assert tower.statistics().rejections == {"approval_expired": 1}


def test_p67_a_short_wait_leaves_the_request_open(stage: Stage) -> None:
    """P-67: lifetime 10 s; whoever waits 0.2 s and leaves finds it pending; a person approves at 1 s, and at 2 s it
    runs. After 10 s it has expired.
    """
    tower = shop(stage, approval_lifetime=10.0)

    async def impatient(request: ApprovalRequest) -> Answer:
        await asyncio.sleep(0.2)
        return None

    async def main() -> None:
        async with tower.run(approver=impatient) as run:
            first = await run.execute([Call("cleanup", {"name": "x"})])
            assert here().time() == pytest.approx(0.2)
            assert outcomes(first) == ["approval_missing"]
            assert [one.expires_in for one in first.pending] == [pytest.approx(9.8)]
            await asyncio.sleep(1.8)
            second = await run.resume(first.state(), decide(first, Approved()))
            assert outcomes(second) == ["ok"]

            other = await run.execute([Call("cleanup", {"name": "y"})])
            await asyncio.sleep(9.9)
            late = await run.resume(other.state(), decide(other, Approved()))
            assert outcomes(late) == ["approval_expired"]

    stage.run(main())
    seen = tower.statistics().approvals
    assert (seen.undecided, seen.approved, seen.expired, seen.denied, seen.ignored) == (2, 1, 1, 0, 1)
    assert stage.started == {"cleanup x": 1}


# ==================================================================== at the grant


def test_r70_an_expired_approval_never_executes(stage: Stage) -> None:
    """R-70: an approval is looked at again at the moment of admission, after any wait. One that is over while its call
    waits is refused at that instant, and gives nothing away; one that is not runs.
    """
    tower = stage.tower(pools={"db": 1})

    @tower.tool(independent=True, pools=["db"])
    async def busy() -> str:
        return await stage.work("busy", 8.0)

    @tower.tool(independent=True, pools=["db"], preset="write", requires_approval=True)
    async def change(n: int) -> str:
        return await stage.work(f"change {n}", 0.1)

    async def main() -> None:
        async with (
            tower.run() as other,
            tower.run(approver=by_call(short=Approved(expires_in=3.0), long=Approved(expires_in=9.0))) as run,
        ):
            holding = asyncio.ensure_future(other.execute([Call("busy", {})]))
            await asyncio.sleep(0)
            short = asyncio.ensure_future(run.execute([Call("change", {"n": 1}, "short")]))
            long = asyncio.ensure_future(run.execute([Call("change", {"n": 2}, "long")]))
            done = await short
            assert here().time() == pytest.approx(3.0), "fail fast: not when its turn comes"
            assert outcomes(done) == ["approval_expired"]
            assert done[0].message == "Not started: its approval was over before its turn came."
            assert done[0].waited == pytest.approx(3.0)
            assert done[0].waited_for == ("approval", "pool db")
            assert (await long).ok
            await holding

    stage.run(main())
    assert stage.started == {"busy": 1, "change 2": 1}
    assert tower.statistics().approvals.expired == 1


def test_r70_looked_at_in_the_step_of_the_grant(stage: Stage) -> None:
    """R-70: the place becomes free at the very instant at which the approval is over: it is over."""
    tower = stage.tower(pools={"db": 1})

    @tower.tool(independent=True, pools=["db"])
    async def busy() -> str:
        return await stage.work("busy", 3.0)

    @tower.tool(independent=True, pools=["db"], requires_approval=True)
    async def change() -> str:
        return await stage.work("change", 0.1)

    async def main() -> None:
        async with tower.run(approver=answering(Approved(expires_in=3.0))) as run:
            done = await run.execute([Call("busy", {}), Call("change", {})])
            assert outcomes(done) == ["ok", "approval_expired"]

    stage.run(main())


def test_r70_expired_behind_its_own_siblings(stage: Stage) -> None:
    """R-70: also calls that stand in the backlog of their run are refused when their approval is over."""
    tower = stage.tower(run_concurrency=1)

    @tower.tool(independent=True)
    async def busy() -> str:
        return await stage.work("busy", 2.0)

    @tower.tool(independent=True, requires_approval=True)
    async def change(n: int) -> str:
        return await stage.work(f"change {n}", 2.0)

    calls = [Call("busy", {}), *[Call("change", {"n": n}) for n in range(4)]]
    done = run_batch(stage, tower, calls, approver=answering(Approved(expires_in=3.0)))
    sound(done, calls)
    assert outcomes(done) == ["ok", "ok", *["approval_expired"] * 3]
    assert stage.started.total() == 2


def test_r126_still_valid_is_asked_after_every_wait(stage: Stage) -> None:
    """R-126: an approval does not authorise a later state: `still_valid` is asked when the call is about to start, and
    False refuses it with everything given back.
    """
    tower = stage.tower(pools={"db": 1})
    balance = [100]
    asked: list[float] = []

    def enough(amount: int) -> bool:
        asked.append(stage.clock.value)
        return balance[0] >= amount

    @tower.tool(writes="account", pools=["db"], requires_approval=True, still_valid=enough)
    async def pay(amount: int) -> int:
        balance[0] -= amount
        return await asyncio.sleep(1.0, balance[0])

    calls = [Call("pay", {"amount": 60}), Call("pay", {"amount": 60}), Call("pay", {"amount": 30})]
    done = run_batch(stage, tower, calls, approver=answering(Approved(), 2.0))
    assert outcomes(done) == ["ok", "approval_expired", "ok"]
    assert done[1].message == "Not run: what was approved does not hold any more."
    assert (balance[0], asked) == (10, [2.0, 5.0, 7.0])


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda: 1 / 0, "still_valid of this tool failed with ZeroDivisionError"),
        (lambda: None, "still_valid of this tool answered neither True nor False, but with NoneType"),
        (lambda: asyncio.sleep(0), "but with coroutine"),
        (lambda: 1, "but with int"),
    ],
)
def test_a_rule_that_fails_lets_nobody_through(stage: Stage, rule: Callable[[], Any], told: str) -> None:
    """S4: a rule that raises, or answers something else than True or False, refuses; nothing of it leaks."""
    tower = stage.tower()

    @tower.tool(independent=True, requires_approval=True, still_valid=rule)
    async def change() -> str:
        return await stage.work("change", 0.1)

    @tower.tool(independent=True, requires_approval=rule)
    async def perhaps() -> str:
        return await stage.work("perhaps", 0.1)

    done = run_batch(stage, tower, [Call("change", {}), Call("perhaps", {})], approver=answering(Approved()))
    assert outcomes(done) == ["policy_error", "policy_error"]
    assert told in done[0].message
    assert told.replace("still_valid", "requires_approval") in done[1].message
    assert not stage.started


def test_a_rule_decides_call_by_call(stage: Stage) -> None:
    """API section 1: `requires_approval` as a function of the arguments, by name, all of them, or with defaults."""
    tower = stage.tower()
    asked: list[Any] = []

    async def approver(request: ApprovalRequest) -> Answer:
        asked.append((request.tool, dict(request.arguments)))
        return Approved()

    @tower.tool(independent=True, requires_approval=lambda amount: amount > 100)
    async def pay(amount: int, to: str = "x") -> int:
        return amount

    @tower.tool(independent=True, requires_approval=lambda arguments: "prod" in arguments.values())
    async def deploy(where: str) -> str:
        return where

    calls = [
        Call("pay", {"amount": 100}),
        Call("pay", {"amount": 101}),
        Call("deploy", {"where": "prod"}),
        Call("deploy", {"where": "test"}),
    ]
    assert run_batch(stage, tower, calls, approver=approver).ok
    assert asked == [("pay", {"amount": 101, "to": "x"}), ("deploy", {"where": "prod"})]


def test_rules_are_looked_at_when_they_are_declared() -> None:
    """DESIGN style 7: an async rule, or one that wants an argument the tool does not have, is a mistake of set-up."""
    tower = Tower()

    async def later(a: int) -> bool:
        return True

    class Later:
        async def __call__(self, a: int) -> bool:
            return True

    for rule in (later, Later()):
        for option in ("requires_approval", "still_valid"):
            with pytest.raises(PolicyError, match=f"{option} is async; its answer has to be there at once"):
                tower.add_tool(lambda a: a, name="t", independent=True, **{option: rule})
    with pytest.raises(PolicyError, match=r"requires_approval.*'b'"):
        tower.add_tool(lambda a: a, name="t", independent=True, requires_approval=lambda b: True)
    assert tower.tools == ()


def test_r126_changed_arguments_are_another_call(stage: Stage) -> None:
    """R-126, S4: arguments that are changed in place after they were approved do not run: a declared function that has
    kept them reaches only a copy, and what the last one to look changes is another call.
    """
    tower = stage.tower()
    kept: list[Any] = []
    bought: list[list[str]] = []

    def notes(items: list[str]) -> bool:
        kept.append(items)
        return True

    def adds(items: list[str]) -> bool:
        items.append("a yacht")
        return True

    @tower.tool(independent=True, requires_approval=notes)
    async def buy(items: list[str]) -> None:
        bought.append(items)

    @tower.tool(independent=True, requires_approval=True, still_valid=adds)
    async def order(items: list[str]) -> None:
        bought.append(items)

    async def approver(request: ApprovalRequest) -> Answer:
        kept[0].append("a yacht")
        return Approved()

    calls = [Call("buy", {"items": ["a pen"]}), Call("order", {"items": ["a pen"]})]
    done = run_batch(stage, tower, calls, approver=approver)
    assert outcomes(done) == ["ok", "approval_expired"]
    assert bought == [["a pen"]]
    assert "has not" not in done[1].message
    assert "Call it again" in done[1].message


# ==================================================================== edited


def files(stage: Stage) -> tuple[Tower, list[Any]]:
    """A tower with a gated tool on files, and what ran."""
    tower = stage.tower()
    ran: list[Any] = []

    @tower.tool(reads="doc:{source}", writes="doc:{folder}/**", requires_approval=True)
    async def copy(source: str, folder: str, note: str = "") -> str:
        ran.append((source, folder, note))
        return "copied"

    return tower, ran


@pytest.mark.parametrize(
    ("arguments", "code", "ran"),
    [
        ({"source": "a", "folder": "x/y", "note": "ok"}, None, ("a", "x/y", "ok")),
        ({"source": "a", "folder": "x/y/z"}, None, ("a", "x/y/z", "")),
        ({"source": "x/y/b", "folder": "x/y"}, None, ("x/y/b", "x/y", "")),
        ({"source": "b", "folder": "x/y"}, "approval_missing", None),
        ({"source": "a", "folder": "x"}, "approval_missing", None),
        ({"source": "a", "folder": "a"}, "approval_missing", None),
        ({"source": "a"}, "invalid_arguments", None),
        ({"source": "a", "folder": ""}, "invalid_arguments", None),
        ({"source": 5, "folder": "x/y"}, "invalid_arguments", None),
    ],
)
def test_s4_an_edited_call_is_looked_over_again(stage: Stage, arguments: Any, code: str | None, ran: Any) -> None:
    """S4: edited arguments are checked and digested again; where they touch something outside of the original, or write
    what that only reads, nothing runs.
    """
    tower, seen = files(stage)
    call = Call("copy", {"source": "a", "folder": "x/y"})
    done = run_batch(stage, tower, [call], approver=answering(Approved(arguments)))
    assert codes(done) == [code]
    assert seen == ([ran] if ran else [])
    if code is None:
        assert done[0].message == "The call succeeded. It was run with the arguments that came with its approval."
    else:
        assert "arguments that came with its approval" in done[0].message


def test_an_edited_call_holds_what_it_touches_now(stage: Stage) -> None:
    """S4, G4: the edited call is admitted with the resources of its new arguments."""
    tower = stage.tower()

    @tower.tool(writes="doc:{path}/**", requires_approval=True)
    async def change(path: str) -> str:
        return await stage.work(f"change {path}", 1.0)

    async def main() -> None:
        async with (
            tower.run(approver=answering(Approved({"path": "a/b"}))) as run,
            tower.run(approver=answering(Approved())) as other,
        ):
            first = asyncio.ensure_future(run.execute([Call("change", {"path": "a"})]))
            await asyncio.sleep(0.1)
            second = asyncio.ensure_future(other.execute([Call("change", {"path": "a/c"})]))
            third = asyncio.ensure_future(other.execute([Call("change", {"path": "a/b"})]))
            assert (await first).ok
            assert (await second).ok
            assert here().time() == pytest.approx(1.1)
            assert (await third)[0].waited == pytest.approx(0.9)

    stage.run(main())


def test_arguments_that_cannot_be_copied_are_approved_by_nobody(stage: Stage) -> None:
    """S4: without a snapshot nobody could say what was approved."""
    tower = stage.tower()

    class Single:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is only one")

    @tower.tool(independent=True, requires_approval=True)
    async def take(what: Any) -> str:
        return "taken"

    done = run_batch(stage, tower, [Call("take", {"what": Single()})], approver=answering(Approved()))
    assert outcomes(done) == ["policy_error"]
    done = run_batch(stage, tower, [Call("take", {"what": 1})], approver=answering(Approved({"what": Single()})))
    assert outcomes(done) == ["invalid_arguments"]


# ==================================================================== approvers that do not behave


@pytest.mark.parametrize("answer", [True, "yes", 1, object(), Approved, ["Approved"]])
def test_an_answer_that_is_none_leaves_the_call_pending(
    stage: Stage, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A rubbish answer is no yes and no no: the call comes back pending, and it is told in the log."""
    tower = shop(stage)
    with caplog.at_level(logging.WARNING, "towerman"):
        done = run_batch(stage, tower, [Call("cleanup", {"name": "x"})], approver=answering(answer))
    assert outcomes(done) == ["approval_missing"]
    assert "the approver answered with" in caplog.text
    assert tower.statistics().approvals.failed == 1


def test_an_approver_that_raises_leaves_the_call_pending(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever an approver raises is contained; its text is not told."""
    tower = shop(stage)

    async def broken(request: ApprovalRequest) -> Answer:
        if request.call_id == "a":
            raise LookupError("zqxj")
        if request.call_id == "b":
            raise asyncio.CancelledError
        raise BaseExceptionGroup("several", [ValueError(), asyncio.CancelledError()])

    calls = [Call("cleanup", {"name": name}, name) for name in "abc"]
    with caplog.at_level(logging.WARNING, "towerman"):
        done = run_batch(stage, tower, [*calls, Call("diag", {})], approver=broken)
    assert outcomes(done) == ["approval_missing"] * 3 + ["ok"]
    assert len(done.pending) == 3
    assert "LookupError" in caplog.text
    assert "zqxj" not in caplog.text


def test_an_approver_that_wants_the_process_to_end(stage: Stage) -> None:
    """G1: an exit raised by an approver is raised to the caller, after every call has its result."""
    tower = shop(stage)

    async def leaving(request: ApprovalRequest) -> Answer:
        raise SystemExit(3)

    async def main() -> None:
        async with tower.run(approver=leaving) as run:
            with pytest.raises(SystemExit):
                await run.execute([Call("cleanup", {"name": "x"}), Call("diag", {})])
            assert run.last_batch is not None
            assert outcomes(run.last_batch) == ["cancelled", "cancelled"]

    stage.run(main())


def test_an_approver_may_be_a_plain_function(stage: Stage) -> None:
    """A function that answers at once, a partial, an object: whatever can be called with a request."""
    tower = shop(stage)

    class Policy:
        async def __call__(self, request: ApprovalRequest) -> Answer:
            return Approved()

    for approver in (lambda request: Approved(), Policy(), lambda request: answering(Approved())(request)):
        assert run_batch(stage, tower, [Call("cleanup", {"name": "x"})], approver=approver).ok
    with pytest.raises(PolicyError, match=r"^approver: an async function that takes an ApprovalRequest; got int"):
        tower.run(approver=5)  # type: ignore[arg-type]


def test_an_approver_runs_in_the_callers_context(stage: Stage) -> None:
    """The approver sees the context variables of whoever handed the batch in."""
    tower = shop(stage)
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")
    seen: list[str] = []

    async def approver(request: ApprovalRequest) -> Answer:
        seen.append(user.get())
        user.set("changed")
        return Approved()

    async def main() -> None:
        user.set("ann")
        await tower.execute([Call("cleanup", {"name": name}) for name in "ab"], approver=approver)

    stage.run(main())
    assert seen == ["ann", "ann"]


def test_an_answer_after_the_batch_has_ended_is_not_heard(stage: Stage) -> None:
    """G12: an approver that ignores its cancel and answers later changes nothing; it is counted."""
    tower = shop(stage, approval_lifetime=2.0)

    async def stubborn(request: ApprovalRequest) -> Answer:
        until = here().time() + 5.0
        while here().time() < until:
            try:
                await asyncio.sleep(until - here().time())
            except asyncio.CancelledError:
                continue
        return Approved()

    async def main() -> None:
        async with tower.run(approver=stubborn) as run:
            done = await run.execute([Call("cleanup", {"name": "x"})])
            assert outcomes(done) == ["approval_expired"]
            assert tower.statistics().approvals.open == 1, "it is seen that somebody is still at work"
        await asyncio.sleep(10)

    stage.run(main())
    seen = tower.statistics().approvals
    assert (seen.open, seen.ignored, seen.approved) == (0, 1, 0)
    assert not stage.started


# ==================================================================== ends while approvals are open


@pytest.mark.parametrize("way", ["caller", "run", "call", "close", "deadline", "fail_fast", "tower"])
def test_s16_ends_while_a_person_thinks(stage: Stage, way: str) -> None:
    """S16, G12: the caller's cancel, run.cancel, one call's cancel, closing the run or the tower, the deadline, a
    sibling's failure: the call that waits for a person is answered at once, and the approver told to stop.
    """
    tower = shop(stage)
    stopped: list[str] = []

    @tower.tool(independent=True)
    async def fails() -> str:
        await asyncio.sleep(1.0)
        raise LookupError

    async def never(request: ApprovalRequest) -> Answer:
        try:
            await asyncio.sleep(1e6)
        finally:
            stopped.append(request.call_id)
        return Approved()

    options: dict[str, Any] = {"approver": never, "fail_fast": way == "fail_fast"}
    if way == "deadline":
        options["deadline"] = 1.0
    calls = [Call("cleanup", {"name": "x"}, "a"), Call("cleanup", {"name": "x"}, "b")]
    if way == "fail_fast":
        calls.append(Call("fails", {}))

    async def main() -> list[str]:
        async with tower.run(**options) as run:
            batch = asyncio.ensure_future(run.execute(calls))
            await asyncio.sleep(1.0)
            match way:
                case "caller":
                    batch.cancel()
                case "run":
                    run.cancel("enough")
                case "call":
                    run.cancel("enough", call_id="a")
                    await asyncio.sleep(1.0)
                    assert stopped == ["a"]
                    run.cancel("enough")
                case "close":
                    await run.aclose()
                case "tower":
                    await tower.aclose()
            await asyncio.wait([batch])
            assert here().time() <= 2.0
            assert run.last_batch is not None
            sound(run.last_batch, calls)
            return outcomes(run.last_batch)[:2]

    found = stage.run(main())
    expected = {"deadline": "deadline_exceeded", "fail_fast": "sibling_failed"}.get(way, "cancelled")
    assert found == [expected, expected]
    assert stopped == (["a", "b"] if way == "call" else ["a"])
    assert not stage.started
    assert tower.statistics().approvals.open == 0


def test_a_closed_run_asks_nobody(stage: Stage) -> None:
    """What comes after the end of its run is refused before anybody is asked."""
    tower = shop(stage)

    async def main() -> None:
        async with tower.run(approver=answering(Approved())) as run:
            first = await run.execute([Call("diag", {})])
            state = first.state()
        assert outcomes(await run.execute([Call("cleanup", {"name": "x"})])) == ["run_closed"]
        assert outcomes(await run.resume(state, {})) == ["ok"]

    stage.run(main())
    assert tower.statistics().approvals.asked == 0


def test_permission_comes_first(stage: Stage) -> None:
    """Nobody is asked about a call that may not run anyway: not allowed, wrong arguments, over the cap."""
    tower = shop(stage, max_calls_per_batch=3)
    calls = [Call("cleanup", {}), Call("nothing", {}), Call("cleanup", "{"), Call("cleanup", {"name": "x"})]
    done = run_batch(stage, tower, calls, approver=answering(Approved()))
    assert outcomes(done) == ["invalid_arguments", "unknown_tool", "invalid_arguments", "call_cap"]
    done = run_batch(stage, tower, [Call("cleanup", {"name": "x"})], approver=answering(Approved()), deny="cleanup")
    assert outcomes(done) == ["permission_denied"]
    assert tower.statistics().approvals.asked == 0


# ==================================================================== pending, and held behind


def test_s3_what_stands_behind_a_pending_call_is_held(stage: Stage) -> None:
    """S3: calls ordered after a pending one, by needs or by a conflict, directly or not, come back `held_behind`; all
    others run.
    """
    tower = shop(stage)

    @tower.tool(reads="volume:{name}")
    async def look(name: str) -> str:
        return await stage.work(f"look {name}", 0.1)

    @tower.tool(independent=True)
    async def free() -> str:
        return await stage.work("free", 0.1)

    calls = [
        Call("look", {"name": "x"}),
        Call("cleanup", {"name": "x"}, "a"),
        Call("look", {"name": "x"}, "b"),
        Call("look", {"name": "y"}),
        Call("free", {}, "c", ["b"]),
        Call("free", {}),
        Call("cleanup", {"name": "x"}),
    ]
    done = run_batch(stage, tower, calls)
    sound(done, calls)
    assert outcomes(done) == ["ok", "approval_missing", "held_behind", "ok", "held_behind", "ok", "held_behind"]
    assert [result.outcome for result in done if result.code == "held_behind"] == ["pending"] * 3
    assert done[2].message == "Not run yet: call 1 (a), after which it comes, waits for a person's approval."
    assert [one.call_id for one in done.pending] == ["a", ""], "the gated call behind it may be decided as well"
    assert tower.statistics().outcomes == {"ok": 3, "pending": 4}
    assert not done.ok
    assert "4 pending" in repr(done)


def test_what_was_skipped_holds_nobody_more_than_what_it_stood_behind(stage: Stage) -> None:
    """S1, S3: a call that was skipped passes on whom it waited for: who comes behind it is held too."""
    tower = shop(stage)

    @tower.tool(writes="volume:{name}")
    async def write(name: str) -> str:
        return await stage.work(f"write {name}", 0.1)

    @tower.tool(independent=True)
    async def fails() -> str:
        raise LookupError

    calls = [
        Call("fails", {}, "f"),
        Call("cleanup", {"name": "x"}),
        Call("write", {"name": "x"}, "w", ["f"]),
        Call("write", {"name": "x"}),
    ]

    async def slow(request: ApprovalRequest) -> Answer:
        await asyncio.sleep(5)
        return None

    done = run_batch(stage, tower, calls, approver=slow)
    assert outcomes(done) == ["handler_error", "approval_missing", "dependency_failed", "held_behind"]


def test_many_calls_are_held_a_slice_at_a_time(stage: Stage) -> None:
    """A thousand calls behind one: each has its result, and the loop its turns."""
    tower = shop(stage, max_calls_per_batch=2000)
    calls = [Call("cleanup", {"name": "x"}) for _ in range(1000)]
    done = run_batch(stage, tower, calls)
    assert outcomes(done) == ["approval_missing", *["held_behind"] * 999]
    assert len(done.pending) == 1000
    assert {result.handle for result in done} == {None}, "also where a batch is too large"
    with pytest.raises(PolicyError, match="and 995 more"):
        done.messages()


def test_provider_messages_are_not_made_while_something_is_pending(stage: Stage) -> None:
    """S3: messages and turn raise and name the calls; `pending="refuse"` closes them as approval_missing, for good."""
    tower = shop(stage)

    async def main() -> None:
        async with tower.run() as run:
            calls = [Call("cleanup", {"name": "x"}, "a"), Call("diag", {}, "b"), Call("cleanup", {"name": "x"}, "c")]
            done = await run.execute(calls)
            for way in (done.messages, done.turn):
                with pytest.raises(PolicyError, match=r"calls wait .*: 0 \(cleanup: approval_missing\), 2 \(cleanup:"):
                    way()
                with pytest.raises(PolicyError, match=r"^pending: one of 'raise', 'refuse'; got 'yes'"):
                    way(pending="yes")  # type: ignore[arg-type]
            decisions = decide(done, Approved(), Approved())
            state = done.state()
            for form in ("openai", "anthropic", "towerman"):
                assert json.dumps(done.turn(form, pending="refuse"))
            told = done.messages("towerman", pending="refuse")
            assert [one["code"] for one in told] == ["approval_missing", None, "approval_missing"]
            assert [one["outcome"] for one in told] == ["rejected", "ok", "rejected"]
            assert told[0]["message"] == "Not run: nobody has approved it."
            # The model was told that they have not run; so they do not.
            late = await run.resume(state, decisions)
            assert outcomes(late) == ["approval_missing", "ok", "approval_missing"]

    stage.run(main())
    assert stage.started == {"diag": 1}


def test_a_batch_without_pending_calls_has_no_requests(stage: Stage) -> None:
    """`pending` is empty, and messages are made, where nothing waits."""
    tower = shop(stage)
    done = run_batch(stage, tower, [Call("diag", {}, "a")])
    assert done.pending == ()
    assert done.messages("towerman", pending="refuse") == done.messages("towerman")


# ==================================================================== resumed


SECRET = "a secret of the tests"


def test_p64_the_same_results_after_a_trip_through_json(stage: Stage) -> None:
    """P-64: diag is free, cleanup is gated: cleanup a, diag, cleanup b. The first approved, the third rejected, resumed
    in another tower after the state was written as JSON: success, the SAME diag result (it ran once), rejected.
    """
    first, second = shop(stage, secret=SECRET), shop(stage, secret=SECRET)
    calls = [Call("cleanup", {"name": "a"}, "1"), Call("diag", {}, "2"), Call("cleanup", {"name": "b"}, "3")]
    message = {"role": "assistant", "content": None, "tool_calls": []}
    for call in calls:
        function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
        message["tool_calls"].append({"id": call.id, "type": "function", "function": function})  # type: ignore[union-attr]

    async def main() -> None:
        async with first.run("r") as run:
            before = await run.execute(message)
            assert outcomes(before) == ["approval_missing", "ok", "approval_missing"]
            state = json.loads(json.dumps({"kept": before.state()}))["kept"]
            decisions = decide(before, Approved(), Denied("keep b"))
        async with second.run("r") as run:
            after = await run.resume(state, decisions)
        assert outcomes(after) == ["ok", "ok", "approval_denied"]
        assert after[1].content == before[1].content
        assert (after[1].ran, after[1].attempts) == (before[1].ran, 1)
        assert [one["tool_call_id"] for one in after.messages()] == ["1", "2", "3"]
        turn = after.turn()
        assert turn[0]["tool_calls"] == message["tool_calls"]
        assert len(turn) == 4

    stage.run(main())
    assert stage.started == {"diag": 1, "cleanup a": 1}


FOUR = [Approved(), Denied("no"), Approved(), None]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
@pytest.mark.parametrize("declared", ["independent", "one resource", "nothing"])
def test_p65_each_decision_stands_for_itself(stage: Stage, order: tuple[int, ...], declared: str) -> None:
    """P-65: four gated calls; approve, reject, approve, no answer: two run, one is rejected, one stays pending and is
    decided later; in whatever order decisions come, one by one or together.
    """
    access: dict[str, Any] = {"independent": {"independent": True}, "one resource": {"writes": "k"}, "nothing": {}}
    tower = stage.tower()

    @tower.tool(requires_approval=True, **access[declared])
    async def act(n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    async def main() -> None:
        async with tower.run() as run:
            batch = await run.execute([Call("act", {"n": n}) for n in range(4)])
            ids = [one.approval_id for one in batch.pending]
            assert len(ids) == 4
            for place in order:
                batch = await run.resume(batch.state(), {ids[place]: FOUR[place]})
            assert outcomes(batch) == ["ok", "approval_denied", "ok", "approval_missing"]
            assert [one.approval_id for one in batch.pending] == [ids[3]]
            batch = await run.resume(batch.state(), {ids[3]: Approved()})
            assert outcomes(batch) == ["ok", "approval_denied", "ok", "ok"]

            together = await run.execute([Call("act", {"n": 10 + n}) for n in range(4)])
            done = await run.resume(together.state(), decide(together, *FOUR))
            assert outcomes(done) == ["ok", "approval_denied", "ok", "approval_missing"]

    stage.run(main())
    assert stage.started == dict.fromkeys(("0", "2", "3", "10", "12"), 1)


def test_s3_a_held_chain_runs_in_emitted_order(stage: Stage) -> None:
    """S3: resuming runs what was held, in emitted order and after what it waits for; what is still behind an open
    approval stays held.
    """
    tower = stage.tower()
    ran: list[int] = []

    @tower.tool(writes="k", requires_approval=lambda n: n in (1, 4))
    async def act(n: int) -> int:
        ran.append(n)
        await asyncio.sleep(0.1)
        return n

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute([Call("act", {"n": n}) for n in range(6)])
            assert outcomes(first) == ["ok", "approval_missing", *["held_behind"] * 4]
            ids = [one.approval_id for one in first.pending]
            second = await run.resume(first.state(), {ids[0]: Approved()})
            assert outcomes(second) == ["ok", "ok", "ok", "ok", "approval_missing", "held_behind"]
            assert [one.approval_id for one in second.pending] == ids[1:]
            third = await run.resume(second.state(), {ids[1]: Denied()})
            assert outcomes(third) == ["ok", "ok", "ok", "ok", "approval_denied", "ok"]

    stage.run(main())
    assert ran == [0, 1, 2, 3, 5]


def test_a_decision_for_a_held_call_is_kept(stage: Stage) -> None:
    """S3: what is approved before its turn stays held, is not asked for again, and runs when its turn comes; also with
    edited arguments, and through another process.
    """
    towers = [stage.tower(secret=SECRET) for _ in range(3)]
    ran: list[Any] = []
    for tower in towers:

        @tower.tool(writes="k", requires_approval=True)
        async def act(n: int, note: str = "") -> int:
            ran.append((n, note))
            return n

    async def main() -> None:
        async with towers[0].run() as run:
            first = await run.execute([Call("act", {"n": n}) for n in range(3)])
        ids = [one.approval_id for one in first.pending]
        async with towers[1].run() as run:
            second = await run.resume(first.state(), {ids[1]: Approved({"n": 1, "note": "edited"})})
            assert outcomes(second) == ["approval_missing", "held_behind", "held_behind"]
            assert [one.approval_id for one in second.pending] == [ids[0], ids[2]]
        async with towers[2].run() as run:
            third = await run.resume(second.state(), {ids[0]: Approved()})
            assert outcomes(third) == ["ok", "ok", "approval_missing"]

    stage.run(main())
    assert ran == [(0, ""), (1, "edited")]


def test_a_need_that_failed_before_skips_when_it_is_resumed(stage: Stage) -> None:
    """S1, S3: a held call whose other need has failed meanwhile is skipped; one whose needs are there runs."""
    tower = shop(stage)

    @tower.tool(independent=True)
    async def fails() -> str:
        await asyncio.sleep(3)
        raise LookupError

    calls = [
        Call("fails", {}, "f"),
        Call("diag", {}, "d"),
        Call("cleanup", {"name": "x"}, "a"),
        Call("diag", {}, "1", ["a", "f"]),
        Call("diag", {}, "2", ["a", "d"]),
    ]

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute(calls)
            assert outcomes(first) == ["handler_error", "ok", "approval_missing", "held_behind", "held_behind"]
            second = await run.resume(first.state(), decide(first, Approved()))
            assert outcomes(second) == ["handler_error", "ok", "ok", "dependency_failed", "ok"]

    stage.run(main())


def test_s4_a_state_that_is_resumed_twice_runs_once(stage: Stage) -> None:
    """S4, P-64: in one process a state may be resumed again, one after the other or at once: each call runs once, also
    those that only stood behind; whoever comes later gets the same results, or finds them at work.
    """
    tower = shop(stage)

    @tower.tool(independent=True, requires_approval=True)
    async def gated(name: str) -> str:
        return await stage.work(f"gated {name}", 0.1)

    @tower.tool(independent=True)
    async def after(name: str) -> str:
        return await stage.work(f"after {name}", 0.1)

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            calls = [Call("gated", {"name": "x"}, "g"), Call("after", {"name": "x"}, "a", ["g"])]
            first = await run.execute(calls)
            state, decisions = first.state(), decide(first, Approved())
            one = asyncio.ensure_future(run.resume(state, decisions))
            two = asyncio.ensure_future(other.resume(state, decisions))
            done, busy = await asyncio.gather(one, two)
            assert outcomes(done) == ["ok", "ok"]
            assert outcomes(busy) == ["approval_missing", "held_behind"]
            assert busy[0].message == "Not run again: whoever went on with this batch before is at work with it."
            assert busy.pending == ()
            for run_ in (run, other):
                again = await run_.resume(state, decisions)
                assert [(one.outcome, one.content) for one in again] == [(one.outcome, one.content) for one in done]
            late = await other.resume(busy.state(), {})
            assert outcomes(late) == ["ok", "ok"]

    stage.run(main())
    assert stage.started == {"gated x": 1, "after x": 1}


def test_s4_whoever_comes_second_waits_for_what_both_touch(stage: Stage) -> None:
    """S4: where the second one has to wait for the resource anyway, it finds the result of the first and tells it."""
    tower = shop(stage)

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute([Call("cleanup", {"name": "x"}), Call("cleanup", {"name": "x"})])
            state, decisions = first.state(), decide(first, Approved(), Approved())
            both = await asyncio.gather(run.resume(state, decisions), other.resume(state, decisions))
            assert [outcomes(done) for done in both] == [["ok", "ok"]] * 2
            assert [one.content for one in both[0]] == [one.content for one in both[1]]

    stage.run(main())
    assert stage.started == {"cleanup x": 2}


def test_s4_an_old_state_with_other_decisions(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """P-65, S4: a decision that was given before is heard and changes nothing; one that contradicts it is ignored, and
    that is told; in the old state and in the new one.
    """
    tower = shop(stage)

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute([Call("cleanup", {"name": "x"}), Call("cleanup", {"name": "y"})])
            old = first.state()
            x, y = [one.approval_id for one in first.pending]
            second = await run.resume(old, {x: Approved()})
            assert outcomes(second) == ["ok", "approval_missing"]
            assert outcomes(await run.resume(second.state(), {x: Approved()})) == ["ok", "approval_missing"]
            assert tower.statistics().approvals.ignored == 0
            with caplog.at_level(logging.WARNING, "towerman"):
                assert outcomes(await run.resume(second.state(), {x: Denied()})) == ["ok", "approval_missing"]
                assert outcomes(await run.resume(old, {x: Denied()})) == ["ok", "approval_missing"]
            assert tower.statistics().approvals.ignored == 2
            assert caplog.text.count(x) == 2
            third = await run.resume(old, {y: Denied("no")})
            assert outcomes(third) == ["ok", "approval_denied"]
            assert outcomes(await run.resume(old, {y: Approved()})) == ["ok", "approval_denied"]

    stage.run(main())
    assert stage.started == {"cleanup x": 1}


def test_an_approved_call_that_was_refused_for_a_limit_may_be_resumed_again(stage: Stage) -> None:
    """S4: an approval is used when its call starts. One that was refused by a limit, or cancelled before its first
    line, is not used up by that.
    """
    tower = stage.tower(pools={"db": 1})

    @tower.tool(independent=True, pools=["db"])
    async def busy() -> str:
        return await stage.work("busy", 5.0)

    @tower.tool(independent=True, pools=["db"], requires_approval=True, when_busy="reject")
    async def change() -> str:
        return await stage.work("change", 0.1)

    async def main() -> None:
        async with tower.run() as run, tower.run() as other:
            first = await run.execute([Call("change", {})])
            state, decisions = first.state(), decide(first, Approved())
            holding = asyncio.ensure_future(other.execute([Call("busy", {})]))
            await asyncio.sleep(1)
            assert outcomes(await run.resume(state, decisions)) == ["concurrency_limit"]
            await holding
            assert outcomes(await run.resume(state, decisions)) == ["ok"]
            assert outcomes(await run.resume(state, decisions)) == ["ok"]

    stage.run(main())
    assert stage.started["change"] == 1


@pytest.mark.parametrize("change", ["gone", "schema", "default", "narrower", "ungated", "words"])
def test_a_tool_that_has_changed_since(stage: Stage, change: str) -> None:
    """R-126: a tool that is gone or renamed, has another schema, or whose arguments come to something else now: that
    call is refused and not the batch. New words in its description are no change.
    """
    first, second = stage.tower(secret=SECRET), stage.tower(secret=SECRET)

    @first.tool(independent=True, requires_approval=True)
    async def act(n: int, how: str = "gently") -> str:
        """Act."""
        return await stage.work(f"{n}", 0.1)

    @second.tool(independent=True, requires_approval=True)
    async def other(n: int) -> str:
        return await stage.work(f"{n}", 0.1)

    first.add_tool(other, independent=True, requires_approval=True)

    match change:
        case "schema":

            async def changed(n: int, how: str = "gently", more: int = 0) -> str:
                return "ran"

        case "default":

            async def changed(n: int, how: str = "roughly") -> str:  # type: ignore[misc]
                return "ran"

        case "narrower":

            async def changed(n: str, how: str = "gently") -> str:  # type: ignore[misc]
                return "ran"

        case _:

            async def changed(n: int, how: str = "gently") -> str:  # type: ignore[misc]
                """Act, and say so."""
                return "ran"

    if change != "gone":
        second.add_tool(changed, name="act", independent=True, requires_approval=change != "ungated")

    async def main() -> list[str]:
        async with first.run() as run:
            before = await run.execute([Call("act", {"n": 1}), Call("other", {"n": 2})])
        async with second.run() as run:
            return outcomes(await run.resume(before.state(), decide(before, Approved(), Approved())))

    expected = {"gone": "unknown_tool", "narrower": "invalid_arguments", "words": "ok", "ungated": "ok"}
    assert stage.run(main()) == [expected.get(change, "approval_expired"), "ok"]


def test_a_tool_that_no_longer_asks_still_waits_for_what_was_asked(stage: Stage) -> None:
    """S4: an open request stays open, though the tool would not ask any more; and a held call that asks now is asked
    for.
    """
    first, second = stage.tower(), stage.tower()
    for tower, gated in ((first, ["a"]), (second, ["b"])):
        for name in "ab":

            async def act() -> str:
                return "ran"

            tower.add_tool(act, name=name, writes="k", requires_approval=name in gated)

    async def main() -> None:
        async with first.run() as run:
            before = await run.execute([Call("a", {}), Call("b", {})])
            assert outcomes(before) == ["approval_missing", "held_behind"]
            assert len(before.pending) == 1
        async with second.run() as run:
            again = await run.resume(before.state(), {})
            assert outcomes(again) == ["approval_missing", "held_behind"]
            assert len(again.pending) == 2
            after = await run.resume(before.state(), decide(before, Approved()))
            assert outcomes(after) == ["ok", "approval_missing"]

    stage.run(main())


@pytest.mark.parametrize("wrong", ["tampered", "secret", "none", "version", "rubbish", "tenant", "unknown", "type"])
def test_s14_a_state_that_cannot_be_trusted_runs_nothing(stage: Stage, wrong: str) -> None:
    """S14: a tampered state, another secret, version or tenant, rubbish, unknown ids, no decisions: one clear error,
    and nothing runs.
    """
    first = shop(stage, secret=SECRET)
    second = shop(stage, secret={"secret": "another", "none": None}.get(wrong, SECRET))

    async def main() -> None:
        async with first.run(tenant="acme") as run:
            before = await run.execute([Call("cleanup", {"name": "x"})])
        state: Any = before.state()
        decisions: Any = decide(before, Approved())
        told: str = {
            "tampered": "state: its signature does not fit",
            "secret": "state: its signature does not fit",
            "none": "state: it is signed, and this tower has no secret",
            "version": "state: it has version 7",
            "rubbish": "state: ",
            "tenant": "state: it belongs to another tenant",
            "unknown": "decisions: the batch has no approval 'apr_x'",
            "type": "decisions: ",
        }[wrong]
        if wrong == "tampered":
            state = state.replace("cleanup", "diag")
        elif wrong == "version":
            state = state.replace('"towerman_state": 1', '"towerman_state": 7')
        elif wrong == "unknown":
            decisions["apr_x"] = Approved()
        async with second.run(tenant="other" if wrong == "tenant" else "acme") as run:
            if wrong == "rubbish":
                for one in (None, 5, "", "{}", b"\xff", [], {"towerman_state": 1}, "x" * 100_000, object()):
                    with pytest.raises(InputError, match=r"^state: "):
                        await run.resume(one, decisions)  # type: ignore[arg-type]
            elif wrong == "type":
                for bad in (None, [], "x", {5: Approved()}, {"a": True}, {"a": "yes"}, {"a": Approved}):
                    with pytest.raises(PolicyError, match=r"^decisions: "):
                        await run.resume(state, bad)  # type: ignore[arg-type]
            else:
                with pytest.raises(InputError) as caught:
                    await run.resume(state, decisions)
                assert str(caught.value).startswith(told)
                assert "cleanup" not in str(caught.value)
            assert run.last_batch is None

    stage.run(main())
    assert not stage.started


def test_resumed_results_are_told_once(stage: Stage) -> None:
    """`on_result` sees what is new; statistics count it once; events of the resumed batch are whole."""
    events: list[Event] = []
    tower = shop(stage)
    tower.add_observer(events.append)
    seen: list[int] = []

    async def main() -> None:
        async with tower.run() as run:
            calls = [Call("cleanup", {"name": "x"}), Call("diag", {}), Call("cleanup", {"name": "x"})]
            first = await run.execute(calls)
            await run.resume(
                first.state(), decide(first, Approved(), Denied()), on_result=lambda result: seen.append(result.index)
            )

    stage.run(main())
    assert sorted(seen) == [0, 2]
    assert tower.statistics().outcomes == {"ok": 2, "pending": 2, "rejected": 1}
    tower.flush()
    told = [(event.kind, event.decision) for event in events if event.kind.startswith("approval")]
    assert told == [
        ("approval_asked", None),
        ("approval_decided", "undecided"),
        ("approval_asked", None),
        ("approval_decided", "approved"),
        ("approval_decided", "denied"),
    ]
    second = [event.kind for event in events if event.batch == 2]
    assert (second[0], second[-1]) == ("batch_started", "batch_finished")
    assert {event.approval for event in events if event.kind.startswith("approval")} == {
        event.approval for event in events if event.approval is not None
    }


def test_a_resumed_batch_of_another_process_is_not_bound_by_its_run(stage: Stage) -> None:
    """S14: a run of another process has an id of its own; permissions and limits are those of the run that resumes."""
    first, second = shop(stage), shop(stage)

    async def main() -> None:
        async with first.run("one") as run:
            before = await run.execute([Call("cleanup", {"name": name}) for name in "xy"])
        decisions = decide(before, Approved(), Approved())
        async with second.run("two", deny="cleanup") as run:
            assert outcomes(await run.resume(before.state(), decisions)) == ["permission_denied"] * 2
        async with second.run("three", max_concurrency=1) as run:
            begun = here().time()
            assert outcomes(await run.resume(before.state(), decisions)) == ["ok", "ok"]
            assert here().time() - begun == pytest.approx(0.2)

    stage.run(main())


def test_a_state_keeps_what_a_message_holds(stage: Stage) -> None:
    """A batch with refused calls of every kind, whose arguments are no JSON, is written and read all the same."""
    tower = shop(stage)
    strange = Call("cleanup", {"name": object()}, "b")
    calls = [Call("cleanup", {"name": "x"}, "a"), strange, Call("none", '{"a":', "a"), Call("diag", {}, "\ud800")]

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute(calls)
            second = await run.resume(first.state(), decide(first, Approved()))
            assert outcomes(second) == ["ok", "invalid_arguments", "unknown_tool", "ok"]
            assert [one.call_id for one in second] == ["a", "b", "a", "\ud800"]
            json.dumps(second.turn("openai"))

            odd = await run.execute([Call("cleanup", {"name": Name("x")})])
            if odd.pending:
                odd.state()

    class Name(str):
        pass

    stage.run(main())


def test_open_arguments_that_are_no_json_cannot_be_written(stage: Stage) -> None:
    """A host may hand in Python objects; a call with some can be approved in the process, and not written down."""
    tower = stage.tower()

    @tower.tool(independent=True, requires_approval=True)
    async def take(what: Any) -> str:
        return "taken"

    done = run_batch(stage, tower, [Call("take", {"what": {1, 2}})])
    assert len(done.pending) == 1
    with pytest.raises(InputError, match=r"^state: an open call has arguments that JSON has no form for"):
        done.state()
    assert run_batch(stage, tower, [Call("take", {"what": {1, 2}})], approver=answering(Approved())).ok


# ==================================================================== nested, threads, loops


def test_nested_calls_ask_too(stage: Stage) -> None:
    """S10, G2: a nested call that needs approval is asked for like any; its caller sees it pending where nobody is
    there.
    """
    tower = shop(stage)

    @tower.tool(independent=True)
    async def agent(ctx: Context) -> list[str]:
        inner = await ctx.execute([Call("cleanup", {"name": "x"}), Call("diag", {})])
        return outcomes(inner)

    done = run_batch(stage, tower, [Call("agent", {})], approver=answering(Approved(), 5.0))
    assert done[0].value == ["ok", "ok"]
    done = run_batch(stage, tower, [Call("agent", {})])
    assert done[0].value == ["approval_missing", "ok"]


def test_the_end_of_a_caller_ends_what_it_asks_for(stage: Stage) -> None:
    """S10: when the caller runs out of time, its nested call that waits for a person is cancelled."""
    tower = shop(stage, timeout=3.0)

    @tower.tool(independent=True)
    async def agent(ctx: Context) -> str:
        await ctx.execute([Call("cleanup", {"name": "x"})])
        return "never"

    done = run_batch(stage, tower, [Call("agent", {})], approver=answering(Approved(), 50.0))
    assert outcomes(done) == ["handler_timeout"]
    assert tower.statistics().approvals.open == 0


def test_without_a_loop() -> None:
    """`execute_sync` and `resume_sync`: for plain threads, with the same promises."""
    tower = Tower()
    ran: list[str] = []

    @tower.tool(independent=True, requires_approval=True)
    def act(name: str) -> str:
        ran.append(name)
        return name

    with tower.run() as run:
        first = run.execute_sync([Call("act", {"name": "x"})])
        assert outcomes(first) == ["approval_missing"]
        second = run.resume_sync(first.state(), decide(first, Approved()))
        assert outcomes(second) == ["ok"]
    done = tower.execute_sync([Call("act", {"name": "y"})], approver=answering(Approved()))
    assert done.ok
    assert ran == ["x", "y"]
    tower.close()


def test_several_loops_resume_one_state() -> None:
    """S4: two threads with loops of their own resume one state at the same time: it runs once."""
    import threading

    tower = Tower()
    ran: list[str] = []

    @tower.tool(independent=True, requires_approval=True)
    def act(name: str) -> str:
        ran.append(name)
        return name

    first = asyncio.run(tower.execute([Call("act", {"name": f"{n}"}) for n in range(20)]))
    state, decisions = first.state(), decide(first, *[Approved()] * 20)
    found: list[list[str]] = []
    gate = threading.Barrier(4)

    def resume() -> None:
        async def main() -> None:
            async with tower.run() as run:
                gate.wait()
                found.append(outcomes(await run.resume(state, decisions)))

        asyncio.run(main())

    threads = [threading.Thread(target=resume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == sorted(f"{n}" for n in range(20))
    for index in range(20):
        assert {codes_[index] for codes_ in found} <= {"ok", "approval_missing"}
        assert any(codes_[index] == "ok" for codes_ in found)
    last = asyncio.run(tower.run().resume(state, decisions))
    assert last.ok
    tower.close()


def test_a_loop_that_is_closed_over_an_approver() -> None:
    """G12: a loop that is closed while an approver is at work leaves nothing behind."""
    tower = Tower()

    @tower.tool(independent=True, requires_approval=True)
    async def act() -> str:
        return "ran"

    loop = asyncio.new_event_loop()
    task = loop.create_task(tower.execute([Call("act", {})], approver=answering(Approved(), 1e6)))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert tower.statistics().approvals.open == 1
    loop.close()
    assert tower.statistics().approvals.open == 0
    assert tower.statistics().running == 0
    tower.close()
    task.get_coro().close()
    del task
    gc.collect()
    logging.getLogger("asyncio").handlers[0].heard.clear()  # type: ignore[attr-defined]  # it says what we did


# ==================================================================== sharing and merging


def test_identical_gated_calls_are_one_request(stage: Stage) -> None:
    """S11: identical calls that share a run share its approval: one request, one run, a result each. A no, or no answer
    in time, holds for all of them; where one comes back pending, the others are held behind it without a request.
    """
    tower = stage.tower(approval_lifetime=5.0)
    asked: list[str] = []

    @tower.tool(writes="k", share_identical=True, requires_approval=True)
    async def act(a: int) -> str:
        return await stage.work("act", 0.1)

    def approver(answer: Answer, seconds: float = 0.0) -> Any:
        async def one(request: ApprovalRequest) -> Answer:
            asked.append(request.call_id)
            await asyncio.sleep(seconds)
            return answer

        return one

    calls = [Call("act", {"a": 1}, f"{n}") for n in range(3)]
    done = run_batch(stage, tower, calls, approver=approver(Approved()))
    assert outcomes(done) == ["ok"] * 3
    assert [one.shared_with for one in done] == [None, 0, 0]
    assert outcomes(run_batch(stage, tower, calls, approver=approver(Denied("no")))) == ["approval_denied"] * 3
    assert outcomes(run_batch(stage, tower, calls, approver=approver(Approved(), 9.0))) == ["approval_expired"] * 3
    assert asked == ["0", "0", "0"]
    seen = tower.statistics().approvals
    assert (seen.asked, seen.approved, seen.denied, seen.expired) == (3, 1, 1, 1)

    async def main() -> None:
        async with tower.run() as run:
            for answer, expected in ((Approved(), ["ok"] * 3), (Denied(), ["approval_denied"] * 3)):
                first = await run.execute(calls)
                assert outcomes(first) == ["approval_missing", "held_behind", "held_behind"]
                assert len(first.pending) == 1
                assert outcomes(await run.resume(first.state(), decide(first, answer))) == expected

    stage.run(main())
    assert stage.started == {"act": 2}


def test_an_edited_call_answers_for_nobody_else(stage: Stage) -> None:
    """S4, S11: what runs with other arguments is not what the identical calls asked for: they are asked for too."""
    tower = stage.tower()

    @tower.tool(writes="k", share_identical=True, requires_approval=True)
    async def act(a: int) -> int:
        return a

    calls = [Call("act", {"a": 1}, f"{n}") for n in range(3)]
    approver = by_call(**{"0": Approved({"a": 2}), "1": Approved(), "2": Denied()})
    done = run_batch(stage, tower, calls, approver=approver)
    assert [one.value for one in done] == [2, 1, 1]
    assert [one.shared_with for one in done] == [None, None, 1]


def test_gated_calls_are_not_merged(stage: Stage) -> None:
    """S4: an approval is for the arguments of one call, so a merged run has none of a gated call in it."""
    tower = stage.tower()
    ran: list[Any] = []

    @tower.tool(
        writes="list",
        requires_approval=lambda n: max(n) > 5,
        merge=lambda sets: {"n": [n for one in sets for n in one["n"]]},
    )
    async def add(n: list[int]) -> str:
        ran.append(n)
        return "added"

    calls = [Call("add", {"n": [n]}) for n in (1, 2, 6, 7, 3, 4)]
    done = run_batch(stage, tower, calls, approver=answering(Approved()))
    assert done.ok
    assert ran == [[1, 2], [6], [7], [3, 4]]


# ==================================================================== looking in


def test_s13_observe_mode_does_not_relax_approval(stage: Stage) -> None:
    """S13: with mode="observe" a gated call waits for a person as ever."""
    tower = shop(stage, mode="observe")
    assert outcomes(run_batch(stage, tower, [Call("cleanup", {"name": "x"})])) == ["approval_missing"]
    done = run_batch(stage, tower, [Call("cleanup", {"name": "x"})], approver=answering(Denied()))
    assert outcomes(done) == ["approval_denied"]
    assert not stage.started


def test_events_tell_asked_decided_and_expired_apart(stage: Stage) -> None:
    """R-128: the story of a call says when a person was asked, what was decided, and what was not in time."""
    events: list[Event] = []
    tower = shop(stage, approval_lifetime=5.0)
    tower.add_observer(events.append)
    answers = by_call(a=Approved(), b=Approved({"name": "b"}), c=Denied("zqxj"), d=None)

    async def approver(request: ApprovalRequest) -> Answer:
        if request.call_id == "e":
            await asyncio.sleep(9)
        return await answers(request)

    run_batch(stage, tower, [Call("cleanup", {"name": name}, name) for name in "abcde"], approver=approver)
    tower.flush()
    told = [(event.call_id, event.kind, event.decision) for event in events if event.kind.startswith("approval")]
    assert sorted(told[:5]) == [(name, "approval_asked", None) for name in "abcde"]
    assert sorted(told[5:]) == [
        ("a", "approval_decided", "approved"),
        ("b", "approval_decided", "edited"),
        ("c", "approval_decided", "denied"),
        ("d", "approval_decided", "undecided"),
        ("e", "approval_expired", None),
    ]
    assert all("zqxj" not in repr(event.as_dict()) for event in events)
    names = {event.approval for event in events if event.call_id == "a" and event.approval}
    assert len(names) == 1
    order = [event.kind for event in events if event.call_id == "a"]
    assert order == ["approval_asked", "approval_decided", "admitted", "started", "finished"]


def test_explain_and_check_name_what_needs_approval() -> None:
    """R-140: an explanation says which calls would wait for a person, a check which tools do."""
    tower = Tower()

    @tower.tool(writes="account:{to}", requires_approval=lambda amount: amount > 100)
    async def pay(to: str, amount: int) -> str:
        return "paid"

    @tower.tool(independent=True, read_only=True, requires_approval=lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    async def broken() -> str:
        return "never"

    calls = [Call("pay", {"to": "a", "amount": 1}), Call("pay", {"to": "b", "amount": 101}), Call("broken", {})]
    told = tower.explain(calls)
    assert [call.approval for call in told.calls] == [False, True]
    assert [(one.index, one.code) for one in told.refused] == [(2, "policy_error")]
    assert "write account:{to}, needs approval" in str(told)
    found = {finding.code: finding for finding in tower.check().findings}
    assert "pay" in found["needs_approval"].message
    assert found["approval_without_secret"].severity == "note"
    signed = Tower(secret="x")

    @signed.tool(independent=True, read_only=True, still_valid=lambda: True)
    async def idle() -> str:
        return ""

    codes_ = {finding.code for finding in signed.check().findings}
    assert "still_valid_without_effect" in codes_
    assert "needs_approval" not in codes_


def test_secrets_are_not_shown() -> None:
    """G8: neither `repr` nor a change shows the secret."""
    tower = Tower(secret="zqxjkv")
    assert "zqxjkv" not in repr(tower.options)
    with pytest.raises(PolicyError) as told:
        tower.configure(secret="other zqxjkv")
    assert "zqxjkv" not in str(told.value)


def test_lifetimes_may_change_while_calls_run(stage: Stage) -> None:
    """R-64: another `approval_lifetime` holds for requests that come afterwards."""
    tower = shop(stage, approval_lifetime=5.0)

    async def main() -> None:
        async with tower.run(approver=answering(Approved(), 6.0)) as run:
            first = asyncio.ensure_future(run.execute([Call("cleanup", {"name": "x"})]))
            await asyncio.sleep(1)
            assert str(tower.configure(approval_lifetime=9.0)) == "approval_lifetime: 5 -> 9"
            assert outcomes(await run.execute([Call("cleanup", {"name": "y"})])) == ["ok"]
            assert outcomes(await first) == ["approval_expired"]

    stage.run(main())


def test_no_timer_is_left(stage: Stage) -> None:
    """G12: when a batch is answered, no timer and no task of an approval is left on the loop (the kit looks)."""
    tower = shop(stage)
    for answer in (Approved(expires_in=100.0), Denied(), None):
        run_batch(stage, tower, [Call("cleanup", {"name": "x"})], approver=answering(answer, 1.0))
    assert stage.clock.value < 10


# ==================================================================== beside what else admission has


def test_s9_each_attempt_is_covered_by_the_one_approval(stage: Stage) -> None:
    """S4, S9: a call that is tried again was approved once: nobody is asked anew, and an attempt after the approval is
    over is refused with what the last attempt came to.
    """
    tower = stage.tower()
    tower._core.random = lambda: 1.0
    left = [2, 9]
    valid: list[float] = []

    @tower.tool(
        independent=True,
        idempotent=True,
        retry=Retry(4, initial_delay=1.0, max_delay=8.0),
        requires_approval=True,
        still_valid=lambda: valid.append(stage.clock.value) or True,
    )
    async def act(n: int) -> str:
        left[n] -= 1
        with stage.on(f"act {n}"):
            if left[n] >= 0:
                raise ConnectionError
        return "done"

    calls = [Call("act", {"n": 0}, "long"), Call("act", {"n": 1}, "short")]
    done = run_batch(stage, tower, calls, approver=by_call(long=Approved(), short=Approved(expires_in=2.0)))
    assert done[0].ok
    assert done[0].attempts == 3
    assert (done[1].code, done[1].outcome, done[1].started) == ("handler_error", "error", True)
    assert stage.started == {"act 0": 3, "act 1": 2}
    seen = tower.statistics().approvals
    assert (seen.asked, seen.approved) == (2, 2)
    assert valid == [0.0, 0.0, 1.0, 1.0, 3.0]


def test_s8_a_call_that_waits_for_a_person_holds_no_share(stage: Stage) -> None:
    """S8: it gives its share of the budget back while it waits, and reserves again when it is approved; where nothing
    is left by then it is refused.
    """
    tower = shop(stage)

    async def main() -> None:
        async with tower.run(budget=Budget(calls=2), approver=answering(Approved(), 5.0)) as run:
            waiting = asyncio.ensure_future(run.execute([Call("cleanup", {"name": "x"})]))
            await asyncio.sleep(1)
            assert outcomes(await run.execute([Call("diag", {}), Call("diag", {})])) == ["ok", "ok"]
            assert outcomes(await waiting) == ["budget_exhausted"]

        async with tower.run(budget=Budget(calls=2)) as run:
            first = await run.execute([Call("cleanup", {"name": name}) for name in "abc"])
            assert outcomes(first) == ["approval_missing", "approval_missing", "budget_exhausted"]
            state = first.state()
            a, b = [one.approval_id for one in first.pending]
            assert outcomes(await run.execute([Call("diag", {})])) == ["ok"]
            # One is left: whoever is approved takes it, and who is not decided asks for nothing.
            second = await run.resume(state, {b: Approved()})
            assert outcomes(second) == ["approval_missing", "ok", "budget_exhausted"]
            third = await run.resume(second.state(), {a: Approved()})
            assert outcomes(third) == ["budget_exhausted", "ok", "budget_exhausted"]

    stage.run(main())


def test_going_on_with_a_batch_is_no_repeat(stage: Stage) -> None:
    """R-102: a batch that is gone on with, however often, is one turn of its run."""
    tower = stage.tower()

    @tower.tool(independent=True, requires_approval=True, max_repeats=2)
    async def act(n: int) -> str:
        return await stage.work("act", 0.1)

    async def main() -> None:
        async with tower.run() as run:
            batch = await run.execute([Call("act", {"n": 1})])
            decisions = decide(batch, Approved())
            for _ in range(5):
                batch = await run.resume(batch.state(), {})
                assert outcomes(batch) == ["approval_missing"]
            assert outcomes(await run.resume(batch.state(), decisions)) == ["ok"]

    stage.run(main())


def test_s3_deferred_and_pending_calls_in_one_batch(stage: Stage) -> None:
    """S3: what is in the durable queue has its answer, and stays as it is when the rest of its batch is gone on with;
    an approved call for which there is no room goes into the queue once, however often its batch is gone on with.
    """
    tower = stage.tower(journal=":memory:", pools={"db": 1})

    @tower.tool(independent=True, pools=["db"])
    async def busy() -> str:
        return await stage.work("busy", 5.0)

    @tower.tool(independent=True, pools=["db"], when_busy="defer")
    async def later(n: int) -> str:
        return "later"

    @tower.tool(independent=True, pools=["db"], when_busy="defer", requires_approval=True)
    async def gated() -> str:
        return "gated"

    async def main() -> None:
        async with tower.run("r") as run, tower.run("other") as other:
            holding = asyncio.ensure_future(other.execute([Call("busy", {})]))
            await asyncio.sleep(1)
            first = await run.execute([Call("later", {"n": 1}), Call("gated", {})])
            assert outcomes(first) == ["deferred", "approval_missing"]
            assert len(first.pending) == 1
            with pytest.raises(PolicyError, match=r"calls wait .*: 1 \(gated: approval_missing\);"):
                first.messages()
            state, decisions = first.state(), decide(first, Approved())
            done = [await run.resume(state, decisions) for _ in range(3)]
            assert [outcomes(one) for one in done] == [["deferred", "deferred"]] * 3
            assert done[0][0].handle == first[0].handle
            assert {one[1].handle for one in done} == {done[0][1].handle}
            assert done[0].pending == ()
            assert done[0].messages()
            assert outcomes(await run.resume(done[0].state(), {})) == ["deferred", "deferred"]
            await holding

    stage.run(main())


def test_s14_with_a_journal_another_process_finds_what_has_run(stage: Stage, tmp_path: Path) -> None:
    """S4, S14: two towers on one journal go on with one state: the calls are found by run, response and place, so what
    has run in one of them is answered in the other.
    """
    towers = [shop(stage, journal=str(tmp_path / "j.db"), secret=SECRET) for _ in range(2)]

    async def main() -> None:
        async with towers[0].run("r") as run:
            first = await run.execute([Call("cleanup", {"name": "x"})], batch_id="b1")
            state, decisions = first.state(), decide(first, Approved())
            assert outcomes(await run.resume(state, decisions)) == ["ok"]
        async with towers[1].run("r") as run:
            again = await run.resume(state, decisions)
            assert outcomes(again) == ["ok"]
            assert again[0].replayed

    stage.run(main())
    assert stage.started == {"cleanup x": 1}


# ==================================================================== the call stands still


class Parcel:
    """An argument that is no JSON."""

    def __init__(self, weight: int) -> None:
        self.weight = weight


@pytest.mark.parametrize("where", ["here", "elsewhere", "in the journal"])
def test_s4_a_call_is_what_it_was_when_it_was_looked_over(stage: Stage, where: str) -> None:
    """S4, R-126: whoever made the calls changes its objects while a person decides; what is compared, kept in
    `state()`, written down and run is the call that was handed in, and so is one that stands behind it.
    """
    options: dict[str, Any] = {"secret": "s", "journal": ":memory:" if where == "in the journal" else None}
    ran: list[tuple[str, object]] = []

    def declare(tower: Tower) -> None:
        @tower.tool(writes="account", requires_approval=True)
        async def pay(to: list[str], amount: int) -> None:
            ran.append(("pay", (tuple(to), amount)))

        @tower.tool(writes="account")
        async def note(text: dict[str, str]) -> None:
            ran.append(("note", dict(text)))

    tower = stage.tower(**options)
    declare(tower)
    other = tower
    if where == "elsewhere":
        other = stage.tower(**options)
        declare(other)
    given: dict[str, Any] = {"to": ["ann"], "amount": 1}
    behind: dict[str, Any] = {"text": {"a": "b"}}

    async def main() -> tuple[BatchResult, BatchResult]:
        stage.loop = here()
        async with tower.run("r") as run, other.run("r") as again:
            first = await run.execute([Call("pay", given, "p"), Call("note", behind, "n")], batch_id="b")
            digest = first.pending[0].digest
            given["to"].append("mallory")
            given["amount"] = 1_000_000
            behind["text"]["a"] = "c"
            assert first.pending[0].digest == digest and first.pending[0].arguments == {"to": ["ann"], "amount": 1}
            state = first.state()
            assert "mallory" not in state and "1000000" not in state
            given.clear()
            assert json.loads(first.state().partition("\n")[0]) is not None
            done = await (run if again is run or where != "elsewhere" else again).resume(
                state, decide(first, Approved())
            )
            await stage.settled(tower)
            return first, done

    first, done = stage.run(main())
    assert outcomes(first) == ["approval_missing", "held_behind"]
    assert outcomes(done) == ["ok", "ok"]
    assert ran == [("pay", (("ann",), 1)), ("note", {"a": "b"})]


def test_s4_what_waits_here_is_frozen_too(stage: Stage) -> None:
    """S4: the same while an approver in the process thinks, for JSON and for an object that is none; the decision's own
    arguments stand still as well. What needs no approval gets the object itself.
    """
    tower = stage.tower(max_concurrency=1)
    ran: list[int] = []
    mine = Parcel(3)
    seen: list[object] = []

    @tower.tool(independent=True, requires_approval=True)
    async def send(parcel: object, to: list[str]) -> None:
        assert isinstance(parcel, Parcel)
        await asyncio.sleep(1)
        ran.append(parcel.weight)
        seen.append(tuple(to))

    @tower.tool(independent=True)
    async def weigh(parcel: object) -> None:
        seen.append(parcel)

    given: dict[str, Any] = {"parcel": mine, "to": ["ann"]}
    edit: dict[str, Any] = {"parcel": Parcel(3), "to": ["bob"]}

    async def approver(request: ApprovalRequest) -> Answer:
        await asyncio.sleep(1)
        mine.weight = 9
        given["to"].append("mallory")
        if request.call_id == "edit":
            asyncio.get_running_loop().call_later(0.5, edit["to"].append, "mallory")  # while it waits for its slot
            return Approved(arguments=edit)
        return Approved()

    calls = [Call("send", given, "plain"), Call("send", {"parcel": Parcel(3), "to": ["x"]}, "edit")]
    done = run_batch(stage, tower, [*calls, Call("weigh", {"parcel": mine})], approver=approver)
    assert outcomes(done) == ["ok", "ok", "ok"]
    assert ran == [3, 3] and seen[0] is mine and seen[1:] == [("ann",), ("bob",)]


def test_s4_a_deferred_call_is_what_it_was(stage: Stage) -> None:
    """S4, R-74: what is put into the durable queue is the call that was looked over."""
    tower = stage.tower(journal=":memory:", pools={"p": 1})

    @tower.tool(independent=True, pools=["p"])
    async def hog() -> None:
        await asyncio.sleep(5)

    @tower.tool(independent=True, pools=["p"], when_busy="defer", max_wait=1.0)
    async def pay(amounts: list[int]) -> None: ...

    given = {"amounts": [1]}

    async def main() -> BatchResult:
        stage.loop = here()
        async with tower.run("a") as one, tower.run("b") as two:
            first = asyncio.ensure_future(one.execute([Call("hog", {})]))
            await asyncio.sleep(0.5)
            second = asyncio.ensure_future(two.execute([Call("pay", given)], batch_id="b"))
            await asyncio.sleep(0)  # it was looked over, and the journal is being asked
            given["amounts"].append(1_000_000)
            done = await second
            await first
            await stage.settled(tower)
            return done

    done = stage.run(main())
    assert outcomes(done) == ["deferred"]
    assert tower._journal is not None
    written = tower._journal.arguments_of("queued", str(done[0].handle)).result(10)
    assert written is not None and b"[1]" in written and b"1000000" not in written


def test_s4_who_comes_second_gets_the_result_that_came_while_it_was_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: a batch is gone on with twice at once, and the first one has its result when the second has been taken up and
    not been looked over: both have the same result, and the call ran once.
    """
    from towerman.approvals import Approval
    from towerman.runner.shell import Shell

    tower = stage.tower()

    @tower.tool(independent=True, read_only=False, requires_approval=True)
    async def pay() -> str:
        with stage.on("pay"):
            return "paid"

    take_up = Shell.take_up

    def unaware(self: Any, *given: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Approval, "settled", property(lambda approval: False))
            take_up(self, *given)

    async def main() -> None:
        async with tower.run() as run:
            first = await run.execute([Call("pay", {})])
            state, name = first.state(), first.pending[0].approval_id
            done = await run.resume(state, {name: Approved()})
            monkeypatch.setattr(Shell, "take_up", unaware)
            again = await run.resume(state, {name: Approved()})
        assert [one.content for one in again] == [one.content for one in done] == ["paid"]

    stage.run(main())
    assert stage.started["pay"] == 1
