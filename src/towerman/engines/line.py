"""One connection of one event loop to the server: what many ask at once travels together.

Theory. Whoever asks puts its question into a queue and waits for a future of its own. One task carries the queue: all
that stands in it goes in one call of one function, and while that is on its way the next ones gather. So the more ask
at once the more travel together, and a single one does not wait for others. Nobody who asks ever touches the
connection: a caller that is cancelled in the middle leaves nothing out of step.

A function that the server does not know (a new server, FUNCTION FLUSH, another primary of a cluster) is loaded, and the
call is made again. A connection that fails in the middle is closed, and whoever asked is told `EngineUnavailable`: it
is not known whether the server has done it. All questions can be asked again: leases and shares have names that the
asker made.

House rules. `post` is for what must arrive: it is tried again until its time is over. No error text of a server goes
further than its first word, which is a code.

Not here: what is asked (redis), what answers mean (redis), renewals (heart).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from towerman.clock import wall_time
from towerman.engines.library import keys_of, library
from towerman.engines.words import MICROS, EngineUnavailable
from towerman.errors import PolicyError

if TYPE_CHECKING:
    from towerman.clock import Clock

TOGETHER: Final = 128
"""Questions in one call, or as much work as so many: whoever else asks the server waits as long as one call takes."""

GIVING: Final = ('["release"', '["settle"', '["refund"')
"""Questions that may be asked twice, and by whoever is left."""

PAUSE: Final = 0.05
"""Seconds between two attempts of what must arrive, at first."""

LONGEST_PAUSE: Final = 1.0

AGING: Final = 1.05
"""By so much the quickest answer fades with each later one: clocks drift, and are set."""


def options(url: str, timeout: float, asynchronous: bool) -> Any:
    """A maker of connections to a server.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as redis-py reads it.
        timeout: seconds for a connection, and for an answer.
        asynchronous: for an event loop, or for a thread.

    Raises:
        PolicyError: redis-py is not there, or the URL is none; the message does not repeat it (it may hold a password).
    """
    try:
        import redis
        import redis.asyncio
        from redis.backoff import NoBackoff
    except ImportError:
        raise PolicyError("engine: redis-py 8 or later is needed: pip install 'towerman[redis]'") from None
    arguments: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": timeout,
        "socket_timeout": None if asynchronous else timeout,  # the line has one limit for each trip
        "health_check_interval": 0,
        "retry_on_error": [],
    }
    try:
        if asynchronous:
            from redis.asyncio.retry import Retry as Again

            return redis.asyncio.ConnectionPool.from_url(url, retry=Again(NoBackoff(), 0), **arguments)
        from redis.retry import Retry

        return redis.ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **arguments)
    except ValueError:
        raise PolicyError("engine.url: must begin with redis://, rediss:// or unix:// and be a URL") from None


def told(error: BaseException) -> EngineUnavailable:
    """What went wrong, without an address and without what a server says."""
    import redis

    if isinstance(error, EngineUnavailable):
        return error
    if isinstance(error, redis.AuthenticationError):
        return EngineUnavailable("the server does not take the user or the password")
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return EngineUnavailable("the server does not answer in time")
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return EngineUnavailable("the server has no memory left")
    if isinstance(error, redis.ReadOnlyError):
        return EngineUnavailable("a replica answers, which may not be written to")
    if isinstance(error, redis.exceptions.NoPermissionError):
        return EngineUnavailable(
            "the user may not do this: `towerman engine doctor` says which commands, keys and channels are missing"
        )
    if isinstance(error, redis.ResponseError):
        words = str(error).split()
        code = words[0] if words and words[0].isupper() else "ERR"
        if "unknown command" in str(error):
            return EngineUnavailable("the server knows no functions: Redis 7, Valkey 7.2 or later is needed")
        if "TOWERMAN_LAYOUT" in str(error):
            return EngineUnavailable("its data were laid out by another version of Towerman")
        return EngineUnavailable(f"the server refuses with {code}")
    return EngineUnavailable("the server is not reached")


def is_missing(error: Exception) -> bool:
    """The server does not know the function."""
    return "Function not found" in str(error)


def is_broken(error: Exception) -> bool:
    """The connection is gone."""
    import redis

    return isinstance(error, redis.ConnectionError | OSError) and not isinstance(
        error, redis.TimeoutError | TimeoutError
    )


def is_full(error: Exception) -> bool:
    """The server has no memory left for those who take."""
    import redis

    return isinstance(error, redis.exceptions.OutOfMemoryError) or str(error).startswith("OOM")


class Known:
    """What a process knows of its admission group.

    Args:
        lease: microseconds.

    Attributes:
        epoch: the highest that was seen: data that know less have forgotten something.
        reaped: leases of the group that ran out, whoever held them, as the server told last.
        offset: microseconds that the server's clock is ahead of this machine's, as far as is known: an answer tells it
            to within half of the time that it took, so the quickest of late is believed.
    """

    __slots__ = ("_quickest", "epoch", "lease", "offset", "reaped")

    def __init__(self, lease: int) -> None:
        self.lease = lease
        self.epoch = 0
        self.reaped = 0
        self.offset = 0
        self._quickest = float("inf")

    def heard(self, head: Sequence[Any], before: float, after: float) -> None:
        """An answer began with that; it was asked for and had at these instants of this machine's wall clock."""
        self.epoch = max(self.epoch, head[1])
        self.reaped = head[3]
        took = after - before
        if 0 <= took <= self._quickest:
            self._quickest = took
            self.offset = int(head[0]) - round((before + after) / 2 * MICROS)
        else:
            self._quickest *= AGING

    @staticmethod
    def greeted(answer: Any) -> None:
        """A connection has begun, with this answer."""
        if answer[0] == -2:
            raise PolicyError("secret: another one is used in this group; all replicas need the same")


class Question:
    """Something asked, and where its answer goes.

    Args:
        text: JSON.
        answer: of the loop of the line.
        gives: it only gives back.
        until: it is tried again until that instant; None: not at all.
        weight: how many plain questions are as much work.
        acks: replicas of the server that must have heard of it before the answer counts.
    """

    __slots__ = ("acks", "answer", "gives", "text", "until", "weight")

    def __init__(
        self, text: str, answer: asyncio.Future[Any], gives: bool, until: float | None, weight: int = 1, acks: int = 0
    ) -> None:
        self.text = text
        self.answer = answer
        self.gives = gives
        self.until = until
        self.weight = weight
        self.acks = acks


class Line:
    """The connection of one loop. It is made when the first one asks.

    Args:
        url: of the server.
        group: the admission group.
        timeout: seconds for a connection, and for an answer.
        hello: the question that a new connection begins with.
        known: what this process knows of the group.
        clock: for what is tried again.
        leave: takes over what gives back and was not answered when the loop ends.

    Attributes:
        trips: calls made, all told.
        asked: questions in them.
    """

    __slots__ = (
        "_clock", "_closed", "_connection", "_elsewhere", "_hello", "_keys", "_known", "_leave", "_loop", "_maker",
        "_pause", "_queue", "_task", "_timeout", "_url", "asked", "trips",
    )  # fmt: skip

    def __init__(
        self,
        url: str,
        group: str,
        timeout: float,
        hello: str,
        known: Known,
        clock: Clock,
        leave: Callable[[list[str]], object] | None = None,
    ) -> None:
        self._leave = leave
        self._url = url
        self._keys = keys_of(group)
        self._timeout = timeout
        self._hello = hello
        self._known = known
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._maker = options(url, timeout, True)
        self._connection: Any = None
        self._elsewhere: tuple[str, int] | None = None  # where the keys are, in a cluster
        self._queue: deque[Question] = deque()
        self._task: asyncio.Task[None] | None = None
        self._pause = PAUSE
        self._closed = False
        self.trips = 0
        self.asked = 0

    # ------------------------------------------------------------------ asking

    def post(
        self, text: str, *, gives: bool = False, until: float | None = None, weight: int = 1, acks: int = 0
    ) -> asyncio.Future[Any]:
        """Ask without waiting; the answer comes in the future, whoever waits for it or not.

        Args:
            text: the question.
            gives: it only gives back, which is possible when the server has no memory left.
            until: an instant up to which it is asked again while the server is not there.
            weight: how many plain questions are as much work; one that is heavier than `TOGETHER` travels alone.
            acks: replicas of the server that must have heard of it; where they have not in time, there is no answer,
                though it was done.
        """
        if self._closed:
            raise EngineUnavailable("it has been closed")
        answer: asyncio.Future[Any] = self._loop.create_future()
        answer.add_done_callback(_heard)
        self._queue.append(Question(text, answer, gives, until, weight, acks))
        if self._task is None:
            self._task = self._loop.create_task(self._carry(), name="towerman engine line")
        return answer

    async def ask(self, text: str, *, weight: int = 1, acks: int = 0) -> Any:
        """Ask and wait for the answer.

        Raises:
            EngineUnavailable: there is none; whether it was done is not known.
        """
        return await self.post(text, weight=weight, acks=acks)

    async def wait_idle(self) -> None:
        """Until all that was asked so far has its answer, or will have none."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """What is in the queue is still asked, once; then the connection is closed."""
        for question in self._queue:
            question.until = None
        self._closed = True
        await self.wait_idle()
        await self._hang_up()
        await self._maker.disconnect()

    # ------------------------------------------------------------------ carrying

    async def _carry(self) -> None:
        questions: list[Question] = []
        try:
            while self._queue:
                questions = self._next()
                try:
                    answers = await self._trip(questions)
                except Exception as error:
                    await self._hang_up()
                    await self._failed(questions, error)
                else:
                    self._pause = PAUSE
                    for question, answer in zip(questions, answers, strict=True):
                        if not question.answer.done():
                            question.answer.set_result(answer)
                questions = []
        finally:
            self._task = None
            unanswered = [*questions, *self._queue]  # the loop is at its end
            self._queue.clear()
            left = [one.text for one in unanswered if one.until is not None and one.text.startswith(GIVING)]
            if left and self._leave is not None:
                self._leave(left)
            for question in unanswered:
                question.answer.cancel()

    def _next(self) -> list[Question]:
        """The questions of one call, at least one."""
        questions, weight = [self._queue.popleft()], 0
        weight += questions[0].weight
        while self._queue and (weight := weight + self._queue[0].weight) <= TOGETHER:
            questions.append(self._queue.popleft())
        return questions

    async def _failed(self, questions: list[Question], error: Exception) -> None:
        """Whoever asked is told; what must arrive is asked again after a pause."""
        reason = error if isinstance(error, PolicyError) else told(error)
        now = self._clock.now()
        again = []
        for question in questions:
            if not self._closed and question.until is not None and now < question.until:
                again.append(question)
            elif not question.answer.done():
                question.answer.set_exception(reason)
        if again:
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._queue.extendleft(reversed(again))

    async def _trip(self, questions: list[Question]) -> list[Any]:
        fresh = self._connection is None
        texts = [question.text for question in questions]
        if fresh:
            texts.insert(0, self._hello)
        self.trips += 1
        self.asked += len(questions)
        try:
            answers = await self._call(library().act, texts)
        except Exception as error:
            if is_full(error):
                return await self._give_alone(questions, error)
            if not fresh and is_broken(error):  # perhaps it broke long ago; each question may be asked twice
                await self._hang_up()
                return await self._trip(questions)
            raise
        if fresh:
            self._known.greeted(answers.pop(0))
        await self._acknowledged(questions)
        return answers

    async def _acknowledged(self, questions: list[Question]) -> None:
        """Where some ask for it: until so many replicas have heard of all that this connection has brought about."""
        wanted = max(question.acks for question in questions)
        if not wanted:
            return
        heard = await self._send("WAIT", wanted, max(1, round(500 * self._timeout)))
        for question in questions:
            if question.acks > heard and not question.answer.done():
                question.answer.set_exception(EngineUnavailable("its replicas have not acknowledged a grant in time"))

    async def _give_alone(self, questions: list[Question], error: Exception) -> list[Any]:
        """The server takes nothing more in: what gives back is done, the rest is told."""
        giving = [question for question in questions if question.gives]
        answers = iter(await self._call(library().give, [question.text for question in giving]) if giving else ())
        for question in questions:
            if not question.gives and not question.answer.done():
                question.answer.set_exception(told(error))
        return [next(answers) if question.gives else None for question in questions]

    async def _call(self, function: str, texts: list[str]) -> list[Any]:
        import redis

        known = self._known
        text = f"[{','.join(texts)}]"
        command = ("FCALL", function, len(self._keys), *self._keys, text, known.epoch, known.lease)
        for attempt in range(4):
            before = wall_time()
            try:
                answers: list[Any] = await self._send(*command)
            except redis.exceptions.MovedError as moved:
                if attempt == 3:
                    raise
                await self._hang_up()
                self._elsewhere = (str(moved.host), int(moved.port))
            except redis.ResponseError as error:
                if attempt == 3 or not is_missing(error):
                    raise
                await self._load()
            else:
                known.heard(answers[0], before, wall_time())
                return answers[1:]
        raise AssertionError("unreachable")  # pragma: no cover - the last attempt raises

    async def _load(self) -> None:
        import redis

        try:
            await self._send("FUNCTION", "LOAD", library().text)
        except redis.ResponseError as error:
            if "already exists" not in str(error):  # another process was faster
                raise

    async def _send(self, *command: Any) -> Any:
        async with asyncio.timeout(self._timeout):
            connection = self._connection
            if connection is None:
                connection = self._connection = self._maker.make_connection()
                if self._elsewhere is not None:
                    connection.host, connection.port = self._elsewhere
                await connection.connect()
            await connection.send_packed_command(connection.pack_command(*command), check_health=False)
            return await connection.read_response()

    async def _hang_up(self) -> None:
        connection, self._connection, self._elsewhere = self._connection, None, None
        if connection is not None:
            try:
                await connection.disconnect(nowait=True)
            except Exception:  # it was broken anyway
                pass

    def __repr__(self) -> str:
        return f"Line({len(self._queue)} in the queue, {self.asked} questions in {self.trips} trips)"


def _heard(answer: asyncio.Future[Any]) -> None:
    """Somebody may have stopped waiting: an exception that nobody fetches is no news."""
    if not answer.cancelled():
        answer.exception()
