"""The words that every room passes on: Call, Batch, Ask, Decision, Result.

Theory. A batch is the calls of one model response in emitted order. The identity of a call is its
index in the batch, never the provider's id, which may be missing or repeated. What a ready call wants
is an `Ask`: permits, access and how long it may wait. An Ask has no field for arguments, so the rooms
that decide cannot leak them. The answer to a call is a `Result`, written once.

House rules. Everything here is frozen and slotted. `repr` shows names, sizes and codes, never an
argument and never a value.

Not here: how a call is decided (gate, ledger), run (runner) or written for a provider (adapters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from towerman.errors import Code

Outcome = Literal["ok", "error", "rejected", "skipped", "cancelled", "timed_out", "pending"]
"""How a call ended: it answered, its handler failed, it was refused, a call it needs failed, ..."""

Applied = Literal["no", "yes", "unknown"]
"""Whether the effect of a call took place."""

Retryable = Literal["yes", "no", "unknown"]
"""Whether trying again can help and can do no harm."""

IfFailed = Literal["skip", "run_anyway"]
"""What becomes of a call where one that it needs came to nothing."""

Arguments = Mapping[str, object]

# Lock modes of a resource, as in granular locking: the intention modes stand on the nodes above.
IS: Final = 0
IX: Final = 1
S: Final = 2
X: Final = 3
Mode = int

# COMPATIBLE[a][b]: may a and b be held on one node by two calls at once?
COMPATIBLE: Final[tuple[tuple[bool, ...], ...]] = (
    (True, True, True, False),  # IS
    (True, True, False, False),  # IX
    (True, False, True, False),  # S
    (False, False, False, False),  # X
)


def _size(arguments: object) -> str:
    if isinstance(arguments, str | bytes):
        return f"<{len(arguments)} characters>"
    if isinstance(arguments, Mapping):
        return f"<{len(arguments)} names>"
    return f"<{type(arguments).__name__}>"


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """One requested invocation.

    Args:
        tool: the tool's declared name.
        arguments: a mapping of argument names to values, or the JSON text as the model wrote it.
        id: the provider's id; may be empty or repeated.
        needs: ids of calls of the same batch whose results must be there first.
        idempotency_key: handed to the handler as it is (`Context.idempotency_key`); None or empty: the call comes
            without one, and where it may have an effect one is made for it.
        if_failed: what to do where a call that it needs came to nothing: `skip` it too, or `run_anyway`.
        caller: what made the call, where that was not the model itself but code that it wrote and the provider runs:
            the kind of that code and its id, `program:call_1`. Its arguments are results already.
    """

    tool: str
    arguments: Arguments | str
    id: str = ""
    needs: Sequence[str] = ()
    idempotency_key: str | None = None
    if_failed: IfFailed = "skip"
    caller: str = ""

    def __repr__(self) -> str:
        return f"Call(id={self.id[:64]!r}, arguments={_size(self.arguments)}, needs={len(self.needs)})"


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """The calls of one model response, and what is needed to answer them in the same form.

    Args:
        calls: in emitted order.
        format: the adapter that read it: "openai", "anthropic" or "towerman".
        message: the assistant message the calls came in, as plain data, or None when only calls were given.
        truncated: the response was cut at the token limit, so its last call may be incomplete.
        response_id: the provider's id of the response, or None.
        batch_id: what the caller calls the batch by, or None; with a journal, a batch that is handed in again under
            the same id in a run of the same id is answered, not run again.
        plan: it is a plan: references to results in the arguments are read, and repeated ids are refused.
        ordered: it is a plan in whose form a step may only refer to steps before it.
        numbered: it is a plan whose ids are numbers of its form.
        outputs: of a plan that names what it comes to: values with references, by name; or None.
        refused: of a plan that could be read in part only, so that nothing of it may run: the code, the indexes of the
            calls concerned, and a sentence for the model; or None.
    """

    calls: tuple[Call, ...]
    format: str = "towerman"
    message: Mapping[str, object] | None = None
    truncated: bool = False
    response_id: str | None = None
    batch_id: str | None = None
    plan: bool = False
    ordered: bool = False
    numbered: bool = False
    outputs: Mapping[str, object] | None = None
    refused: tuple[Code, tuple[int, ...], str] | None = None

    def __repr__(self) -> str:
        return f"Batch({len(self.calls)} calls, format={self.format!r}, truncated={self.truncated})"


@dataclass(frozen=True, slots=True, repr=False)
class Access:
    """A call touches a resource.

    Args:
        key: the canonical key, for example `file:/srv/a.txt`. Holds argument values: never shown.
        write: it may change the resource.
        subtree: the key and everything below it.
        template: what was declared, for example `file:{path}`: this is what people see.
    """

    key: str
    write: bool
    subtree: bool
    template: str

    def __repr__(self) -> str:
        return f"Access({'write' if self.write else 'read'} {self.template!r})"


Hold = tuple[str, Mode]
"""A flat key and the mode in which it is held."""

ROOT: Final = "\0"
"""What a flat key begins with at which tools without resources exclude others; no resource's key does."""


class Ask:
    """What a ready call wants, in one step: all of it or nothing.

    Calls of one run and one tool that touch nothing share one Ask, so that the gate can see by
    identity that two of them want the same.

    Args:
        run: the run's number; the flow for fair share.
        tool: the tool's declared name.
        permits: (pool key, permits) pairs, all above 0, no key twice.
        holds: (flat resource key, mode) pairs, no key twice.
        priority: class of the run; higher goes first.
        wait: wait when busy (True) or be refused at once (False).
        max_wait: the longest wait in seconds.
        bounds: (queue key, most waiting) pairs.
        labels: flat key -> what people are shown for it (a template, never a key).
        rates: keys of the rate limits in which its start counts, no key twice.
        breakers: keys of the circuit breakers that it goes through, no key twice.
    """

    __slots__ = (
        "bounds",
        "breakers",
        "holds",
        "labels",
        "max_wait",
        "permits",
        "priority",
        "rates",
        "run",
        "tool",
        "wait",
    )

    def __init__(
        self,
        run: int,
        tool: str,
        permits: tuple[tuple[str, int], ...],
        holds: tuple[Hold, ...] = (),
        *,
        priority: int = 0,
        wait: bool = True,
        max_wait: float = 30.0,
        bounds: tuple[tuple[str, int], ...] = (),
        labels: Mapping[str, str] | None = None,
        rates: tuple[str, ...] = (),
        breakers: tuple[str, ...] = (),
    ) -> None:
        self.run = run
        self.tool = tool
        self.permits = permits
        self.holds = holds
        self.priority = priority
        self.wait = wait
        self.max_wait = max_wait
        self.bounds = bounds
        self.labels = labels or {}
        self.rates = rates
        self.breakers = breakers

    def __repr__(self) -> str:
        return f"Ask(run={self.run}, tool={self.tool!r}, permits={dict(self.permits)}, holds={len(self.holds)})"


@dataclass(frozen=True, slots=True)
class Rejection:
    """The gate's no to an entry.

    Args:
        code: `concurrency_limit`, `queue_full`, `wait_timeout`, `deadline_exceeded`, ...
        blocker: what it waited for or met, as people are shown it: `pool crm`, `resource file:{path}`.
        retry_after: seconds after which trying again can help, where that is known.
    """

    code: Code
    blocker: str
    retry_after: float | None = None


class _Slots:
    """The slots of a Result, writable only while it is being made."""

    __slots__ = (
        "applied",
        "attempts",
        "call_id",
        "code",
        "content",
        "exception",
        "handle",
        "index",
        "message",
        "original_bytes",
        "outcome",
        "ran",
        "replayed",
        "retry_after",
        "retryable",
        "shared_with",
        "started",
        "still_running",
        "tool",
        "value",
        "waited",
        "waited_for",
    )

    index: int
    call_id: str
    tool: str
    outcome: Outcome
    code: Code | None
    message: str
    content: str
    value: object
    exception: BaseException | None
    started: bool
    applied: Applied
    retryable: Retryable
    retry_after: float | None
    waited: float
    ran: float
    waited_for: tuple[str, ...]
    attempts: int
    still_running: bool
    original_bytes: int
    handle: str | None
    shared_with: int | None
    replayed: bool


class Result(_Slots):
    """The one answer to a call. Frozen.

    Attributes:
        index: place in the batch, from 0: the call's identity.
        call_id: the provider's id as it came; may be empty or repeated.
        tool: the tool's name as the model wrote it, cut to 128 characters.
        outcome: `ok error rejected skipped cancelled timed_out pending`.
        code: from `towerman.errors.CODES`; None when the outcome is ok.
        message: a short sentence for the model; never empty, never with an argument value.
        content: what the model is sent, bounded in size.
        value: what the handler returned (this process only).
        exception: what the handler raised (this process only).
        started: the handler's first line was reached.
        applied: whether the effect took place, in any of its attempts.
        retryable: whether trying again can help and can do no harm.
        retry_after: seconds after which trying again can help, as the service behind the tool says, or None.
        waited: seconds in the gate's queue, of all attempts together.
        ran: seconds from the start of the handler to the seal of this result; of a call that was tried again, seconds
            at work, of all attempts together, the pauses between them left out.
        waited_for: what blocked it, first to last: pools, resource templates.
        attempts: how often the handler was started.
        still_running: the work goes on after this result was sealed, and holds what it held.
        original_bytes: size of the whole content in UTF-8 bytes, before it was bounded; of much more than fits, or of
            what has no end, a lower bound (the content says so).
        handle: name under which the whole content can be read, or None.
        shared_with: index of the call whose run stands for this one too, since the two are identical or were merged;
            None for a call that ran itself or did not run.
        replayed: it was begun before, and the journal says what came of it: it did not run now. `started` and
            `applied` are those of that time.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Result is frozen: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Result is frozen: cannot delete {name!r}")

    @property
    def ok(self) -> bool:
        """The handler answered."""
        return self.outcome == "ok"

    def __repr__(self) -> str:
        name = "<unknown tool>" if self.code == "unknown_tool" else repr(self.tool)
        code = f", code={self.code!r}" if self.code else ""
        return f"Result({self.index}, {name}, {self.outcome!r}{code}, {len(self.content)} characters)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Result):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _Slots.__slots__)

    __hash__ = None  # type: ignore[assignment]  # equal results may hold unhashable values

    def __copy__(self) -> Result:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, tuple(getattr(self, name) for name in _Slots.__slots__)


def make_result(
    index: int,
    call_id: str,
    tool: str,
    outcome: Outcome,
    code: Code | None,
    message: str,
    content: str,
    *,
    value: object = None,
    exception: BaseException | None = None,
    started: bool = False,
    applied: Applied = "no",
    retryable: Retryable = "no",
    retry_after: float | None = None,
    waited: float = 0.0,
    ran: float = 0.0,
    waited_for: tuple[str, ...] = (),
    attempts: int = 0,
    still_running: bool = False,
    original_bytes: int = 0,
    handle: str | None = None,
    shared_with: int | None = None,
    replayed: bool = False,
) -> Result:
    """Make a Result: filled while its class is still the writable one, then frozen by changing it."""
    result = _Slots()
    result.index = index
    result.call_id = call_id
    result.tool = tool
    result.outcome = outcome
    result.code = code
    result.message = message
    result.content = content
    result.value = value
    result.exception = exception
    result.started = started
    result.applied = applied
    result.retryable = retryable
    result.retry_after = retry_after
    result.waited = waited
    result.ran = ran
    result.waited_for = waited_for
    result.attempts = attempts
    result.still_running = still_running
    result.original_bytes = original_bytes
    result.handle = handle
    result.shared_with = shared_with
    result.replayed = replayed
    result.__class__ = Result
    return result  # type: ignore[return-value]


def with_content(result: Result, content: str, handle: str | None) -> Result:
    """The same result with another content (a batch's total bound cuts after the fact), and where the whole is."""
    values = {name: getattr(result, name) for name in _Slots.__slots__}
    values["content"] = content
    values["handle"] = handle
    return make_result(**values)


def with_words(result: Result, message: str, content: str) -> Result:
    """The same result with another message and content."""
    values = {name: getattr(result, name) for name in _Slots.__slots__}
    values |= {"message": message, "content": content}
    return make_result(**values)


def _unpickle(*values: object) -> Result:
    return make_result(**dict(zip(_Slots.__slots__, values, strict=True)))  # type: ignore[arg-type]
