"""Faults of Towerman's own, made everywhere: whatever room fails, every call still has its result.

Theory. Nobody can promise that a runtime has no fault. What can be promised is what a fault costs: the batch in which
it happened, told to its caller as an error after every call has a result. It must not cost a hanging agent, another
batch, or permits. So each step of the runner, and of the rooms that it asks, is made to fail once, at each time that it
is taken.

The scenes are those in which everything is cancelled everywhere (test_cancel).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit import Stage, on_stage, sound, whole_again
from test_cancel import SCENES, Scene

import towerman.runner.sealer
import towerman.sealing
from towerman import Call, Run
from towerman.budgets import Shares
from towerman.gate import Gate
from towerman.plan import Plan
from towerman.runner import Shell

stage = pytest.fixture(on_stage)


def failing(stage: Stage) -> Scene:
    """Handlers that raise, on the loop and on threads, beside one that answers."""
    tower = stage.tower()

    @tower.tool(independent=True)
    async def raises(n: int) -> str:
        with stage.on(f"{n}"):
            await asyncio.sleep(0.1)
            raise ValueError

    @tower.tool(independent=True)
    def raises_in_thread(n: int) -> str:
        with stage.on(f"{n}"):
            raise ExceptionGroup("several", [ValueError(), KeyError()])

    @tower.tool(independent=True)
    async def answers(n: int) -> str:
        return await stage.work(f"{n}", 0.2)

    names = ("raises", "raises_in_thread", "answers")
    return Scene(stage, tower, [Call(name, {"n": n}, id=f"c{n}") for n, name in enumerate(names)])


class Fault(Exception):
    """What the tests make."""


class Faulty:
    """A function that fails when it is called for the n-th time, or from then on; with n = 0 it only counts."""

    def __init__(self, function: Any, fails_at: int, *, lasting: bool = False) -> None:
        self.function = function
        self.fails_at = fails_at
        self.lasting = lasting
        self.count = 0

    def __get__(self, instance: Any, owner: Any) -> Any:
        return lambda *args, **named: self(instance, *args, **named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.count += 1
        if self.count == self.fails_at or (self.lasting and 0 < self.fails_at < self.count):
            raise Fault
        return self.function(*args, **named)


MADE = {**SCENES, "failing": failing}

PLACES: list[tuple[Any, str]] = [
    *(
        (Shell, name)
        for name in (
            "_check",
            "_approval_for",
            "_edited",
            "_seal_decided",
            "_ask_for",
            "_heard",
            "_decided",
            "_leave",
            "_put_off",
            "_say_no",
            "_too_late",
            "_cleared",
            "_run_out",
            "_start_plan",
            "_ready",
            "_offer",
            "_offer_row",
            "_start",
            "_start_thread",
            "_begin",
            "_end",
            "_late",
            "_seal_value",
            "_seal_error",
            "_seal_stopped",
            "_seal_failure",
            "_rejected",
            "_follow",
            "_take_back",
            "_tell_to_stop",
            "_give_up",
            "_orphan",
            "_look_at",
            "_alike",
            "_gather_groups",
            "_joined",
            "_answered",
            "_answer",
            "_share",
            "_copied",
            "_tied",
            "_too_large",
            "_hand_over",
            "_finish",
            "_bounded",
            "_begun",
            "_summed_up",
            "_fit",
            "_trimmed",
            "_kept_whole",
            "_attempt",
            "_try_again",
            "_rest",
            "_offer_again",
            "_failed",
            "_seal_as_it_was",
            "_mark_begun",
            "_tell_fuses",
            "_rate_limited",
            "_recall",
            "_act",
            "_join",
            "_look_again",
            "_looked",
            "_intend",
            "_intended",
            "_launch",
            "_forestalled",
            "_conclude",
            "_concluded",
            "_defer",
            "_diverted",
            "_hand_in",
            "_handed",
            "_hear",
            "_seal_row",
            "_hand_down",
            "_behind",
            "_file",
            "_spare",
            "_reserve",
            "_refuse_short",
            "_refuse_lack",
            "_pay",
            "_unpaid",
            "_late_for",
            "_settle_share",
            "_close_share",
            "_sum_up",
        )
    ),
    *((Shares, name) for name in ("reserve", "begin", "settle", "charge")),
    *(
        (Gate, name)
        for name in ("offer", "offer_row", "finish", "orphan", "cancel", "withdraw", "begun", "verdict", "pause")
    ),
    *((Plan, name) for name in ("start", "seal", "end", "key")),
    *(
        (towerman.sealing, name)
        for name in (
            "refused",
            "refusal",
            "closing",
            "stopped",
            "failure",
            "raised",
            "encoded",
            "shared",
            "merged",
        )
    ),
    (towerman.runner.sealer, "make_result"),
]


async def play(scene: Any, run: Run, cancels: bool) -> BaseException | None:
    """Run the scene's batch, perhaps cancelled half-way; what it raised."""
    task = asyncio.ensure_future(scene.hand_in(run))
    if cancels:
        for _ in range(6):
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)
        run.cancel("enough")
    try:
        await task
    except scene.may_raise:
        return None
    except Exception as told:
        return told
    return None


def trial(name: str, place: tuple[Any, str], fails_at: int, cancels: bool, *, lasting: bool = False) -> int:
    """One run of a scene with one fault; returns how often the place was taken."""
    stage = Stage()
    scene = MADE[name](stage)
    room, what = place
    patched = pytest.MonkeyPatch()
    faulty = Faulty(getattr(room, what), fails_at, lasting=lasting)
    told: list[BaseException | None] = []

    async def main() -> None:
        scene.stage.loop = asyncio.get_running_loop()
        beside = asyncio.ensure_future(scene.beside()) if scene.beside is not None else None
        if beside is not None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        async with scene.tower.run(**scene.options) as run:
            scene.run = run
            patched.setattr(room, what, faulty)
            told.append(await play(scene, run, cancels))
            assert run.last_batch is not None
            sound(run.last_batch, scene.calls)
        if beside is not None:
            await asyncio.wait([beside])
            if beside.exception() is not None:
                assert isinstance(beside.exception(), Fault)
        await stage.settled(scene.tower)
        patched.undo()

    try:
        stage.run(main())
        whole_again(scene.tower)
        assert not stage.running.total()
        assert told[0] is None or isinstance(told[0], Fault), repr(told[0])
    except BaseException as failure:
        failure.add_note(f"{name}, {what} fails at {fails_at}, cancelled: {cancels}; the story:")
        failure.add_note("\n".join(stage.story[-60:]))
        raise
    finally:
        patched.undo()
        scene.tower._core.workers.close()
        if scene.tower._journal is not None:
            scene.tower._journal.close()
    return faulty.count


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_g1_every_step_fails_once(place: tuple[Any, str]) -> None:
    """G1, G3, P-28: a fault at any step of any room, at any time it is taken: one result a call, nobody hangs, no
    permit is lost, other batches go on.
    """
    taken = 0
    for name in MADE:
        for cancels in (False, True):
            count = trial(name, place, 0, cancels)
            taken += count
            for fails_at in range(1, min(count, 6) + 1):
                trial(name, place, fails_at, cancels)
    assert taken, "no scene comes by here"


# The books of what is held and of what needs what must be in order again: nothing can stand in for them.
WITHOUT_BOOKS = [one for one in PLACES if one[0] not in (Gate, Plan) and one[1] != "_take_back"]


@pytest.mark.parametrize("place", WITHOUT_BOOKS, ids=lambda place: place[1])
def test_g1_a_step_fails_from_then_on(place: tuple[Any, str]) -> None:
    """G1, G3: a fault that stays, such as a broken installation: still one result a call, and nobody hangs."""
    for name in MADE:
        for cancels in (False, True):
            for fails_at in range(1, min(trial(name, place, 0, cancels), 3) + 1):
                trial(name, place, fails_at, cancels, lasting=True)
