"""One limit over many admission groups: chunks of it are lent to each, on a clock that jumps.

Theory. All that may be claimed together lives in one admission group, on one server. A limit that is to count over more
than one server can hold is lent out in chunks: a root keeps who has how much of it and until when, each group counts
its own share exactly, and nobody asks two servers for one call. (Doorman of Google's, 2016, does this for rates.) What
is lent is never more than there is: a group that is to have less goes down to it as its calls end, and only what it has
told to be free is lent to others. A loan ends by itself: a group that is cut off lets nobody in after that, but its
calls that run go on, and then more may run than the limit says.

Of the free, each group gets what it wants as far as all can have that, and else an equal level (max-min fairness, by
water-filling). Shares move in whole chunks, so that they do not move all the time.

What is simulated: replicas in groups, calls that come by Poisson and take exponential times, some groups that are hot
for a while; a delay of each message; a group that is cut off, and one whose root has forgotten everything. Told are how
many ran at most, how well the limit was used, how even the groups were served, and messages a second.

House rules. No clock, no threads: `Sim.run` goes from event to event. The same seed gives the same figures.

Not here: an engine that does this. It is a plan with figures, on the page docs/many-groups.md.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

DELAY = 0.002
"""Seconds that a message takes, one way."""


@dataclass(frozen=True)
class World:
    """What is simulated.

    Args:
        replicas: processes.
        groups: admission groups that they are in, evenly.
        limit: calls that may run at once, over all of them.
        load: calls that would run at once if nobody waited, over the limit.
        mean: seconds that a call takes, on average.
        hot: groups of which ten times as many calls come as of the others.
        shift: seconds after which other groups are hot.
        seconds: for how long.
        warm: seconds at the beginning that are not counted.
        patience: seconds after which whoever waits gives up.
        cut: from when to when the first hot group is cut off from the root, or None.
        forget: when the root forgets what it has lent, or None.
        seed: of chance.
    """

    replicas: int = 1_000
    groups: int = 50
    limit: int = 2_000
    load: float = 0.9
    mean: float = 1.0
    hot: int = 5
    shift: float = 60.0
    seconds: float = 300.0
    warm: float = 30.0
    patience: float = 30.0
    cut: tuple[float, float] | None = None
    forget: float | None = None
    seed: int = 1


@dataclass(frozen=True)
class Plan:
    """How the limit is shared.

    Args:
        name: what it is called.
        kind: "one" group for all; "split" into equal parts for good; "lent" in chunks.
        chunk: permits in which shares move.
        refresh: seconds between two questions of a group.
        term: seconds for which a share is lent.
        eager: a group that has run out asks at once, but not more often than ten times a second.
    """

    name: str
    kind: str
    chunk: int = 1
    refresh: float = 5.0
    term: float = 15.0
    eager: bool = True


@dataclass(frozen=True)
class Figures:
    """What came of it.

    Args:
        most: calls that ran at once at most, over the limit.
        used: calls that ran, over the least of the limit and those that wanted to, on average.
        even: Jain's index over the groups' calls that ran, over what each would have had by max-min fairness; 1: even.
        wait: seconds of waiting, the 99th of 100.
        refused: calls that gave up, of all.
        root: messages a second to and from the root, or to the one group.
    """

    most: float
    used: float
    even: float
    wait: float
    refused: float
    root: float


class Group:
    """One admission group."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.share = 0
        self.until = 0.0  # when that is over
        self.running = 0
        self.waiting: deque[float] = deque()
        self.rate = 0.0
        self.asked = -1.0
        self.ran = 0.0  # running, over time
        self.due = 0.0  # what max-min fairness would have let run, over time

    @property
    def wants(self) -> int:
        """What it could use now, and a little more, so that it need not ask for each call."""
        return self.running + len(self.waiting) + 1


class Root:
    """Who has how much of the limit."""

    def __init__(self, limit: int, groups: int, chunk: int) -> None:
        self.limit = limit
        self.chunk = chunk
        self.lent = [0] * groups
        self.until = [0.0] * groups
        self.wants = [0] * groups

    def answer(self, group: int, wants: int, running: int, now: float, term: float) -> int:
        """A group tells what it could use and how many of its calls run; it is told its share from now on."""
        self.wants[group] = wants
        for one, until in enumerate(self.until):
            if until <= now and one != group:
                self.lent[one] = self.wants[one] = 0
        level = filled(self.limit, self.wants)
        fair = min(wants, level)
        share = -(-fair // self.chunk) * self.chunk
        free = self.limit - sum(self.lent) + self.lent[group]
        share = max(0, min(share, free))
        # What still runs of a share that has become smaller is not free for others yet.
        self.lent[group] = max(share, min(running, self.lent[group]))
        self.until[group] = now + term
        return share


def filled(limit: int, wants: Sequence[int]) -> int:
    """The level up to which everybody can have what is wanted (water-filling); at least 1."""
    left, rest = limit, sorted(one for one in wants if one)
    while rest:
        level = left // len(rest)
        if rest[0] > level:
            return max(1, level)
        left -= rest.pop(0)
    return limit


class Sim:
    """One world under one plan."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.chance = random.Random(world.seed)
        self.now = 0.0
        self.number = 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        count = 1 if plan.kind == "one" else world.groups
        self.groups = [Group(number) for number in range(count)]
        self.root = Root(world.limit, count, plan.chunk)
        self.running = self.most = self.messages = self.came = self.gone = 0
        self.used = self.could = 0.0
        self.waits: list[float] = []
        self.looked = 0.0

    def at(self, instant: float, what: Callable[..., None], *given: object) -> None:
        """Something happens then."""
        self.number += 1
        heapq.heappush(self.events, (instant, self.number, what, given))

    def run(self) -> Figures:
        """From the beginning to the end."""
        world, plan = self.world, self.plan
        for group in self.groups:
            if plan.kind == "lent":
                self.at(self.chance.uniform(0, min(1.0, plan.refresh)), self.ask, group, True)
            else:
                group.share, group.until = world.limit // len(self.groups), float("inf")
        self.shift()
        for group in self.groups:
            self.next_call(group)
        self.at(world.warm, self.look)
        if world.forget is not None:
            self.at(world.forget, self.forget)
        while self.events and self.events[0][0] <= world.seconds:
            self.now, _, what, given = heapq.heappop(self.events)
            what(*given)
        counted = world.seconds - world.warm
        ratios = [group.ran / group.due for group in self.groups if group.due > 0]
        waits = sorted(self.waits) or [0.0]
        return Figures(
            self.most / world.limit,
            self.used / self.could if self.could else 1.0,
            sum(ratios) ** 2 / (len(ratios) * sum(one * one for one in ratios)) if ratios else 1.0,
            waits[min(len(waits) - 1, 99 * len(waits) // 100)],
            self.gone / max(1, self.came),
            self.messages / counted,
        )

    # ------------------------------------------------------------ calls

    def shift(self) -> None:
        """Other groups are hot from now on."""
        world = self.world
        total = world.load * world.limit / world.mean
        if len(self.groups) == 1:
            self.groups[0].rate = total
            return
        hot = set(self.chance.sample(range(len(self.groups)), min(world.hot, len(self.groups))))
        if world.cut is not None:
            hot.add(0)
        unit = total / (len(self.groups) + 9 * len(hot))
        for group in self.groups:
            group.rate = unit * (10 if group.number in hot else 1)
        self.at(self.now + world.shift, self.shift)

    def next_call(self, group: Group) -> None:
        self.at(self.now + self.chance.expovariate(max(group.rate, 1e-9)), self.call, group)

    def call(self, group: Group) -> None:
        self.came += self.now >= self.world.warm
        group.waiting.append(self.now)
        if self.plan.kind == "one" and self.now >= self.world.warm:
            self.messages += 4  # asked and answered, given back and answered
        self.start(group)
        self.next_call(group)

    def start(self, group: Group) -> None:
        """As many as its share lets run."""
        while group.waiting and self.now - group.waiting[0] > self.world.patience:
            group.waiting.popleft()
            self.gone += self.now >= self.world.warm
        while group.waiting and group.running < group.share and self.now < group.until:
            came = group.waiting.popleft()
            group.running += 1
            self.running += 1
            if self.now >= self.world.warm:
                self.waits.append(self.now - came)
                self.most = max(self.most, self.running)
            self.at(self.now + self.chance.expovariate(1 / self.world.mean), self.end, group)
        if group.waiting and self.plan.kind == "lent" and self.plan.eager and self.now - group.asked >= 0.1:
            self.ask(group, False)

    def end(self, group: Group) -> None:
        group.running -= 1
        self.running -= 1
        self.start(group)

    # ------------------------------------------------------------ shares

    def ask(self, group: Group, again: bool) -> None:
        """A group asks the root; `again`: as it does each time."""
        if again:
            self.at(self.now + self.plan.refresh, self.ask, group, True)
        group.asked = self.now
        cut = self.world.cut
        if cut is not None and group.number == 0 and cut[0] <= self.now < cut[1]:
            return
        self.messages += 2 * (self.now >= self.world.warm)
        self.at(self.now + DELAY, self.heard, group, group.wants, group.running)

    def heard(self, group: Group, wants: int, running: int) -> None:
        sent = self.now - DELAY
        share = self.root.answer(group.number, wants, running, self.now, self.plan.term)
        self.at(self.now + DELAY, self.told, group, share, sent + self.plan.term)

    def told(self, group: Group, share: int, until: float) -> None:
        group.share, group.until = share, until
        self.start(group)

    def forget(self) -> None:
        """The root begins anew: it waits for one term, in which it lends nobody more than that one says it has."""
        self.root = Learning(self.world.limit, len(self.groups), self.plan.chunk, self.now + self.plan.term)

    # ------------------------------------------------------------ looking

    def look(self) -> None:
        """A tenth of a second has passed: what was used of it, and what could have been."""
        wants = [group.running + len(group.waiting) for group in self.groups]
        level = filled(self.world.limit, wants)
        for group, want in zip(self.groups, wants, strict=True):
            group.ran += min(group.running, want)
            group.due += min(want, level)
        self.used += min(self.running, self.world.limit)
        self.could += min(self.world.limit, sum(wants))
        self.at(self.now + 0.1, self.look)


class Learning(Root):
    """A root that knows nothing yet: until it has heard of everybody it lends what they say they have."""

    def __init__(self, limit: int, groups: int, chunk: int, until: float) -> None:
        super().__init__(limit, groups, chunk)
        self.learns_until = until

    def answer(self, group: int, wants: int, running: int, now: float, term: float) -> int:
        if now >= self.learns_until:
            return super().answer(group, wants, running, now, term)
        self.wants[group] = wants
        self.lent[group] = running
        self.until[group] = now + term
        return running


PLANS = (
    Plan("one group for all", "one"),
    Plan("equal parts", "split"),
    Plan("lent, asks each 15 s", "lent", 1, 15.0, 45.0, eager=False),
    Plan("lent, asks each 5 s", "lent", 1, 5.0, 15.0, eager=False),
    Plan("lent, asks each second", "lent", 1, 1.0, 5.0, eager=False),
    Plan("lent, each second and when short", "lent", 1, 1.0, 5.0),
    Plan("the same, chunks of 10", "lent", 10, 1.0, 5.0),
)

LONG = World(mean=20.0, shift=120.0, load=1.2)

WORLDS = (
    ("calls of 1 s, load 0.6", World(load=0.6)),
    ("calls of 1 s, load 0.9", World()),
    ("calls of 1 s, load 1.2", World(load=1.2)),
    ("calls of 20 s, load 1.2, a hot group is cut off for 60 s", replace(LONG, cut=(120.0, 180.0))),
    ("calls of 20 s, load 1.2, the root forgets", replace(LONG, forget=150.0)),
)


def main() -> None:
    """Print a table for each world."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated seconds of each")
    parser.add_argument("--seeds", type=int, default=3, help="how often each, with other seeds; told is the median")
    given = parser.parse_args()
    for name, world in WORLDS:
        print(f"\n{name}: {world.replicas:,} replicas, {world.groups} groups, limit {world.limit:,}\n")
        print("| plan | most at once / limit | used | even | p99 wait | gave up | messages/s |")
        print("|---|---|---|---|---|---|---|")
        for plan in PLANS:
            if plan.kind != "lent" and (world.cut or world.forget):
                continue
            rows = [Sim(replace(world, seed=seed, seconds=given.seconds), plan).run() for seed in range(given.seeds)]
            columns = zip(*(vars(row).values() for row in rows), strict=True)
            one = Figures(*(statistics.median(values) for values in columns))
            print(
                f"| {plan.name} | {one.most:.3f} | {one.used:.3f} | {one.even:.3f} | {one.wait:.2f} s "
                f"| {one.refused:.1%} | {one.root:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
