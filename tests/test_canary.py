"""No argument value, result value or exception text leaves by a side door (G8, R-130, P-92).

A secret stands in one place of a batch (a source); it is then looked for everywhere that anybody but the model and the
caller can look (the sinks). A new source or a new sink is one line of its table. What a call is *for* may of course
say it: the content of its own result, and a `ToolError`'s words in its own result. Ids of calls, the words of whoever
cancels, and a key that the host misspelled in a record of its own (`argumnets`) are told by design and are no secrets
here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import logging
import sqlite3
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from kit import Stage, gate_of, on_stage

from towerman import (
    Approved,
    Batch,
    BatchResult,
    Call,
    Context,
    Denied,
    Event,
    InputError,
    JsonlObserver,
    LogObserver,
    RateLimited,
    Result,
    Run,
    ToolError,
    Tower,
    read_result,
)
from towerman.cli import main as command

stage = pytest.fixture(on_stage)

SECRET = "zqxjkvbpwm"
NUMBER = 918273645546

# A part of it is a leak too, and so is another spelling.
_PARTS = [SECRET[start : start + 5] for start in range(len(SECRET) - 4)]
_SPELLINGS = [
    *_PARTS,
    SECRET[::-1],
    SECRET.encode().hex(),
    base64.b64encode(SECRET.encode()).decode().rstrip("=").casefold()[:-1],
    str(NUMBER)[:8],
]


def leaks(text: str) -> bool:
    """Does a text hold the secret, or a good part of it, in some spelling?"""
    small = text.casefold()
    return any(part in small for part in _SPELLINGS)


# --- sources: where the secret stands ---------------------------------------------------------------------------------

Allowed = Literal["nothing", "content", "words", "reason"]
"""What of a call's own result may hold the secret: nothing, its content, its content and its message (ToolError), the
same of a call that a person has denied."""


class Told:
    """An object whose every text is the secret."""

    def __repr__(self) -> str:
        return SECRET

    __str__ = __repr__


class Refusing(pydantic.BaseModel):
    """A model whose own validator says what it was given."""

    name: str
    inner: dict[str, int] = {}

    @pydantic.field_validator("name")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError(f"{value} is no name")


@dataclass
class Play:
    """What a source has to play with."""

    stage: Stage
    tower: Tower
    contexts: list[Context[Any]] = field(default_factory=list)
    approver: Any = None


Make = Callable[[Play], object]
SOURCES: dict[str, tuple[Make, Allowed, Mapping[str, Any]]] = {}


def source(name: str, allowed: Allowed = "nothing", **options: Any) -> Callable[[Make], Make]:
    """Add a source: a function that declares its tools and gives what is handed in; `options` are the tower's."""

    def add(make: Make) -> Make:
        assert name not in SOURCES, name
        SOURCES[name] = (make, allowed, options)
        return make

    return add


def echoing(name: str, value: object, allowed: Allowed = "content", annotation: Any = Any, **policy: Any) -> None:
    """A source: an argument of a call that says it back (allowed: in its content) or is refused for it."""

    @source(name, allowed)
    def make(play: Play) -> object:
        async def tool(ctx: Context[Any], value: Any, name: str = "") -> object:
            play.contexts.append(ctx)
            await asyncio.sleep(1)
            return value

        tool.__annotations__["value"] = annotation
        play.tower.add_tool(tool, **(policy or {"independent": True}))
        text = value if isinstance(value, str) and value[:1] == "{" else json.dumps({"value": value})
        return [Call("tool", text, "c1"), Call("tool", text, "c2")]


def failing(name: str, fail: Callable[[], object], allowed: Allowed = "nothing", **policy: Any) -> None:
    """Two sources: what a handler raises or returns, on the loop and on a thread."""

    def add(run_in: Any) -> None:
        @source(f"{name}, {run_in}", allowed)
        def make(play: Play) -> object:
            def tool() -> object:
                return fail()

            play.tower.add_tool(tool, run_in=run_in, independent=True, **policy)
            return [Call("tool", {}, "c1")]

    add("loop")
    add("thread")


def raising(error: Callable[[], BaseException]) -> Callable[[], object]:
    """A handler's body that raises."""

    def fail() -> object:
        raise error() from KeyError(SECRET)

    return fail


def noted(error: Exception) -> Exception:
    """With a note."""
    error.add_note(f"by the way: {SECRET}")
    return error


async def noted_later(value: object) -> object:
    """A summary that fails with what it was given."""
    raise noted(ValueError(value))


def cyclic() -> object:
    """A value inside itself."""
    value: dict[str, object] = {SECRET: 1}
    value["again"] = [value]
    return value


def schema_tool(play: Play, schema: Mapping[str, Any]) -> None:
    """A tool with a JSON schema of its own."""

    async def tool(**arguments: Any) -> str:
        return "done"

    play.tower.add_tool(tool, schema=schema, independent=True)


# Arguments that are as they should be, and resources made of them.
echoing("argument: text", SECRET)
echoing("argument: number", NUMBER)
echoing("argument: key of a free-form object", {SECRET: {SECRET: [SECRET]}})
echoing("resource: key of a read", SECRET, reads="thing:{value}")
echoing("resource: key of a write", SECRET, writes="thing:{value}")
echoing("resource: number", NUMBER, writes="thing:{value}")
echoing("resource: file", f"/srv/{SECRET}/a.txt", writes="file:{value}")
echoing("resource: file below the home folder", f"~/{SECRET}", writes="file:{value}")
echoing("resource: subtree", SECRET, writes="thing:{value}/**")
echoing("resource: list", [SECRET, f"{SECRET}2"], writes="thing:{value}")
echoing("resource: of a callable", SECRET, writes=lambda value: f"thing:{value}")
echoing("resource: long", SECRET * 100, writes="thing:{value}")

# Calls that one run answers together.
echoing("shared: argument and value", SECRET, independent=True, share_identical=True)
echoing("shared: key of a read", {SECRET: [SECRET]}, reads=lambda value: f"thing:{SECRET}", share_identical=True)
echoing("merged: argument and value", SECRET, writes="thing:{value}", merge=lambda sets: sets[0])
echoing("merged: the function raises", SECRET, writes="thing:{value}", merge=lambda sets: {}[sets[0]["value"]])
echoing("merged: no mapping", SECRET, writes="thing:{value}", merge=lambda sets: SECRET)
echoing("merged: refused", SECRET, writes="thing:{value}", merge=lambda sets: {SECRET: SECRET})
echoing("merged: touches another one", SECRET, writes="thing:{value}", merge=lambda sets: {"value": SECRET + "x"})

# Arguments that are refused.
echoing("refused: wrong type", SECRET, "nothing", int)
echoing("refused: wrong type inside", {"a": [{"b": SECRET}]}, "nothing", dict[str, list[dict[str, int]]])
echoing("refused: wrong key", {SECRET: 1}, "nothing", dict[int, int])
echoing("refused: nested key", {SECRET: {SECRET: "x"}}, "nothing", dict[str, dict[str, int]])
echoing("refused: literal", SECRET, "nothing", Literal["a", "b"])
echoing("refused: number", NUMBER, "nothing", bool)
echoing("refused: by a model's own validator", {"name": SECRET, "inner": {SECRET: 1}}, "nothing", Refusing)
echoing("refused: unknown name", json.dumps({"value": 1, SECRET: 2}), "nothing")
echoing("refused: cut off", f'{{"value": "{SECRET}', "nothing")
echoing("refused: no JSON", f"{{value: {SECRET}}}", "nothing")
echoing("refused: repeated name", f'{{"value": 1, "{SECRET}": 1, "{SECRET}": 2}}', "nothing")
echoing("refused: NaN beside it", f'{{"value": "{SECRET}", "name": NaN}}', "nothing")
echoing("refused: too deep", "{" + f'"value": {{"{SECRET}":' * 1 + "[" * 200 + "]" * 200 + "}}", "nothing")
echoing("refused: resource names nothing", {SECRET: [SECRET]}, "nothing", writes="thing:{value}")
echoing("refused: resource climbs", f"{SECRET}/../x", "nothing", writes="thing:{value}")
echoing("refused: resource callable raises", SECRET, "nothing", writes=lambda value: {}[value])
echoing("refused: resource callable names nothing", SECRET, "nothing", writes=lambda value: {value: value})
echoing("refused: resource callable climbs", SECRET, "nothing", writes=lambda value: f"thing:{value}/../b")


@source("refused: text that is no object")
def _not_an_object(play: Play) -> object:
    schema_tool(play, {})
    return [Call("tool", json.dumps(SECRET), "c1"), Call("tool", f"[{NUMBER}]", "c2")]


@source("refused: by a schema")
def _by_schema(play: Play) -> object:
    inner = {"type": "object", "patternProperties": {"^z": {"type": "integer"}}, "additionalProperties": False}
    schema_tool(play, {"type": "object", "properties": {"a": inner, "b": {"pattern": "^x"}, "c": {"enum": ["u", "v"]}}})
    wrong = [{"a": {SECRET: SECRET}}, {"a": {"y" + SECRET: 1}}, {"b": SECRET}, {"c": SECRET}, {"c": {SECRET: SECRET}}]
    return [Call("tool", json.dumps(arguments), f"c{place}") for place, arguments in enumerate(wrong)]


@source("refused: an object that JSON does not have")
def _python_object(play: Play) -> object:
    schema_tool(play, {"type": "object", "properties": {"a": {"type": "string"}}})
    return [Call("tool", {"a": Told()}, "c1"), Call("tool", {SECRET: {Told(): Told()}}, "c2")]


# What the handler answers, and how it fails.
failing("value: text", lambda: f"the answer is {SECRET}", "content")
failing("value: oversized", lambda: [SECRET] * 10_000, "content")
failing("value: oversized text", lambda: SECRET * 10_000, "content")
failing("value: cyclic", cyclic, "content")
failing("value: key of an object", lambda: {SECRET: {NUMBER: 1}}, "content")
failing("value: object without a form", lambda: object.__new__(Told), "content")
failing("value: object without a form, inside", lambda: {SECRET: [Told()]}, "content")
failing("value: encoder raises", lambda: SECRET, encode=lambda value: {}[value])
failing("value: encoder gives no form", lambda: SECRET, encode=lambda value: {SECRET: object()})
failing("value: encoder is cancelled", lambda: SECRET, encode=lambda value: raising(asyncio.CancelledError)())
failing("value: summary raises", lambda: "x" * 100_000, summarize=lambda value: {}[SECRET])
failing("value: summed up", lambda: [SECRET] * 10_000, "content", summarize=lambda value: value[0])
failing("value: async summary raises", lambda: SECRET * 10_000, "content", summarize=lambda value: noted_later(value))
failing("exception: text", raising(lambda: ValueError(SECRET)))
failing("exception: note", raising(lambda: noted(ValueError(SECRET))))
failing("exception: object inside", raising(lambda: ValueError(Told())))
failing("exception: group", raising(lambda: ExceptionGroup(SECRET, [ValueError(SECRET), KeyError(SECRET)])))
failing("exception: cancelled by itself", raising(lambda: asyncio.CancelledError(SECRET)))
failing("exception: validation of its own", lambda: Refusing(name=SECRET))
failing("exception: base", raising(lambda: GeneratorExit(SECRET)))
failing("exception: leaves the process", raising(lambda: SystemExit(SECRET)))
AGAIN: dict[str, Any] = {"read_only": True, "retry": 2}
failing("retried: exception", raising(lambda: ConnectionError(SECRET)), **AGAIN)
failing("retried: group", raising(lambda: ExceptionGroup(SECRET, [TimeoutError(SECRET), RateLimited(SECRET)])), **AGAIN)
failing("retried: what a service asks for", raising(lambda: RateLimited(SECRET)), **AGAIN)
failing("rate limited: what a service asks for", raising(lambda: RateLimited(Told())))  # type: ignore[arg-type]
failing("tool error: words", raising(lambda: ToolError(f"no such customer: {SECRET}")), "words")


def fail_to_count(text: str) -> int:
    """A counter that says what it was given."""
    raise ValueError(text)


@source("value: counted", "content", count_tokens=fail_to_count, max_batch_bytes=1_000, max_result_bytes=800)
def _counted(play: Play) -> object:
    play.tower.add_tool(lambda: SECRET * 1_000, name="tool", independent=True)
    return [Call("tool", {}, f"c{place}") for place in range(3)]


@source("argument: of the tool that reads results")
def _read(play: Play) -> object:
    play.tower.add_tool(read_result, name="tool")
    return [Call("tool", {"handle": SECRET}, "c1"), Call("tool", {"handle": "r-", "page": NUMBER}, "c2")]


@source("exception: of a merged run")
def _merged_run(play: Play) -> object:
    play.tower.add_tool(raising(lambda: ValueError(SECRET)), writes="k", merge=lambda sets: sets[0])
    return [Call("fail", {}, f"c{place}") for place in range(3)]


@source("retried: called off in its rest", grace=1)
def _rests(play: Play) -> object:
    async def tool(value: str) -> None:
        raise RateLimited(4)

    play.tower.add_tool(tool, writes="thing:{value}", idempotent=True, retry=3)
    return [Call("tool", {"value": SECRET}, "c1", idempotency_key=SECRET)]


@source("retried: arguments that cannot be copied")
def _uncopied(play: Play) -> object:
    class Odd:
        def __deepcopy__(self, memo: object) -> object:
            raise ValueError(SECRET)

    async def tool(value: Any) -> None:
        raise ConnectionError(SECRET)

    play.tower.add_tool(tool, independent=True, **AGAIN)
    return [Call("tool", {"value": Odd()}, "c1")]


@source("value: shared, that cannot be copied", "content")
def _no_copy(play: Play) -> object:
    class Odd(Told):
        def __deepcopy__(self, memo: object) -> object:
            raise ValueError(SECRET)

    async def tool() -> object:
        return Odd()

    play.tower.add_tool(tool, independent=True, share_identical=True, encode=str)
    return [Call("tool", {}, f"c{place}") for place in range(3)]


def deciding(name: str, answer: Callable[[], object], allowed: Allowed = "content", **policy: Any) -> None:
    """A source: an argument of a call that waits for a person, who answers so, or raises."""

    @source(name, allowed)
    def make(play: Play) -> object:
        async def tool(value: Any) -> object:
            await asyncio.sleep(1)
            return value

        async def approver(request: object) -> object:
            await asyncio.sleep(0.5)
            return answer()

        play.approver = approver
        play.tower.add_tool(tool, writes="thing:{value}", **{"requires_approval": True, **policy})
        return [Call("tool", {"value": SECRET}, "c1"), Call("tool", json.dumps({"value": SECRET}), "c2")]


deciding("approval: given", Approved)
deciding("approval: with other arguments", lambda: Approved({"value": SECRET}))
deciding("approval: with arguments that touch something else", lambda: Approved({"value": SECRET + "x"}))
deciding("approval: with arguments that are wrong", lambda: Approved({SECRET: SECRET}))
deciding("approval: nobody has decided", lambda: None)
deciding("approval: denied", lambda: Denied(SECRET), "reason")
deciding("approval: an answer that is none", lambda: {SECRET: SECRET})
deciding("approval: an answer that tells", Told)
deciding("approval: the approver raises", raising(lambda: ValueError(SECRET)))
deciding("approval: the rule raises", Approved, requires_approval=lambda value: {}[value])
deciding("approval: the rule answers something else", Approved, requires_approval=lambda value: value)
deciding("approval: asked again, it raises", Approved, still_valid=lambda value: {}[value])
deciding("approval: not valid any more", Approved, still_valid=lambda value: False)


@source("exception: of inner tasks")
def _inner_tasks(play: Play) -> object:
    async def fail() -> None:
        raise ValueError(SECRET)

    async def tool() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(), name="inner")

    play.tower.add_tool(tool, independent=True)
    return [Call("tool", {}, "c1")]


@source("exception: in answer to a cancel", grace=1)
def _answer_to_cancel(play: Play) -> object:
    async def tool(value: str) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            raise ValueError(value) from None

    play.tower.add_tool(tool, independent=True, timeout=1)
    return [Call("tool", {"value": SECRET}, "c1")]


def late(name: str, end: Callable[[], object]) -> None:
    """A source: what a handler brings after its result was sealed."""

    @source(name, grace=0.5)
    def make(play: Play) -> object:
        async def tool(value: str) -> object:
            await play.stage.stubborn("tool", 3)
            return end()

        play.tower.add_tool(tool, independent=True, timeout=1)
        return [Call("tool", {"value": SECRET}, "c1")]


late("late: value", lambda: SECRET)
late("late: exception", raising(lambda: ValueError(SECRET)))
late("late: cancelled by itself", raising(lambda: asyncio.CancelledError(SECRET)))


# Calls that wait for a resource, and are refused for having waited, or instead of waiting.
def waiting(name: str, tower: Mapping[str, Any], **policy: Any) -> None:
    """A source: the second run wants the resource that the first one holds."""

    @source(name, "content", **tower)
    def make(play: Play) -> object:
        async def tool(value: str) -> str:
            await asyncio.sleep(5)
            return value

        play.tower.add_tool(tool, writes="thing:{value}", **policy)
        return [Call("tool", {"value": SECRET}, f"c{place}") for place in range(4)]


waiting("waiting: in vain", {"max_wait": 1})
waiting("waiting: in a queue that is full", {"max_queued": 0})
waiting("waiting: not at all", {"when_busy": "reject"})
waiting("waiting: in vain for a pool", {"max_wait": 1, "pools": {"narrow": 1}}, pools=["narrow"])
waiting("waiting: behind one that timed out", {"max_wait": 1}, timeout=2)


# Names and keys that the model or the host made up.
@source("name: unknown tool")
def _unknown_tool(play: Play) -> object:
    schema_tool(play, {})
    return [Call(SECRET, {}, "c1"), Call(f"tool{SECRET}", {SECRET: 1}, "c2"), Call(f"{SECRET}\n\x1b[2J", "", "c3")]


@source("name: refused for all")
def _permission(play: Play) -> object:
    schema_tool(play, {})
    return [Call("tool", {SECRET: SECRET}, "c1"), Call(SECRET, {SECRET: SECRET}, "c2")]


@source("name: in a mapping of the host's")
def _mapping(play: Play) -> object:
    return [{"tool": SECRET, "arguments": [SECRET]}, {"name": SECRET, "arguments": f"[{NUMBER}]"}]


@source("idempotency key")
def _idempotency_key(play: Play) -> object:
    async def tool(ctx: Context[Any]) -> str:
        play.contexts.append(ctx)
        await asyncio.sleep(1)
        return "done"

    play.tower.add_tool(tool, independent=True)
    return [Call("tool", {}, "c1", idempotency_key=SECRET)]


@source("message: text beside the calls", "nothing")
def _message(play: Play) -> object:
    schema_tool(play, {})
    call = {"id": "c1", "type": "function", "function": {"name": "tool", "arguments": json.dumps({"a": SECRET})}}
    return {"role": "assistant", "content": SECRET, "refusal": SECRET, "tool_calls": [call], SECRET: SECRET}


@source("message: cut at the limit")
def _truncated(play: Play) -> object:
    schema_tool(play, {})
    return Batch((Call("tool", f'{{"a": "{SECRET}', "c1"),), "openai", {"content": SECRET}, truncated=True)


def malformed(name: str, given: object) -> None:
    """A source: what is handed in is no batch; the InputError must not quote it."""

    @source(f"no batch: {name}")
    def make(play: Play) -> object:
        return given


malformed("text", SECRET)
malformed("broken JSON", f'{{"role": "assistant", "tool_calls": ["{SECRET}')
malformed("number", NUMBER)
malformed("object", Told())
malformed("mapping", {SECRET: SECRET, NUMBER: SECRET})
malformed("role", {"role": SECRET, "content": SECRET, "tool_calls": []})
malformed(
    "retired form", {"role": "assistant", "content": None, "function_call": {"name": SECRET, "arguments": SECRET}}
)
malformed("list", [Told(), SECRET])
malformed("list of mappings", [{"tool": "tool", "arguments": {}, "extra": SECRET}])
malformed("list of mappings, key", [{"tool": "tool", "arguments": {}, f"{SECRET} {SECRET}": SECRET}])
malformed("needs", [{"tool": "tool", "arguments": {}, "needs": {SECRET: SECRET}}])
malformed("choices", {"choices": [{"delta": {"content": SECRET}}]})
malformed("Anthropic's blocks", {"role": "assistant", "content": [{"type": SECRET, "input": SECRET}, SECRET]})


# What others in the process raise at us.
@source("observer raises")
def _observer(play: Play) -> object:
    play.tower.add_observer(lambda event: raising(lambda: ValueError(SECRET))())
    schema_tool(play, {})
    return [Call("tool", {SECRET: SECRET}, "c1")]


# --- sinks: where it is looked for ------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Everything that can be looked at after (and while) a batch was run."""

    allowed: Allowed
    given: object
    tower: Tower
    runs: list[Run] = field(default_factory=list)
    batches: list[BatchResult] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    contexts: list[Context[Any]] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    file: str = ""
    log: str = ""
    out: str = ""
    err: str = ""
    trace: str = ""
    trace_json: str = ""
    warnings: str = ""
    written: str = ""
    listed: str = ""

    @property
    def own(self) -> list[Result]:
        """Results of the source's calls."""
        return [result for batch in self.batches for result in batch if result.tool != "bystander"]

    @property
    def others(self) -> list[Result]:
        """Results of the bystanders."""
        return [result for batch in self.batches for result in batch if result.tool == "bystander"]


def _lines(found: Iterator[object] | list[object]) -> str:
    return "\n".join(map(str, found))


def _own_content(seen: Seen) -> str:
    """Contents of the source's own results, less those that may hold it."""
    free = {"nothing": (), "content": ("ok",), "words": ("ok", "error"), "reason": ("rejected",)}[seen.allowed]
    return _lines([result.content for result in seen.own if result.outcome not in free])


def _sent(seen: Seen) -> str:
    """What a provider is sent for bystanders, in every form."""
    told = []
    for batch in seen.batches:
        for form in ("openai", "anthropic", "towerman"):
            messages = batch.messages(form, pending="refuse")
            parts = messages[0]["content"] if form == "anthropic" else messages
            assert isinstance(parts, list)
            told += [json.dumps(part) for part, result in zip(parts, batch, strict=True) if result in seen.others]
    return _lines(told)


SINKS: dict[str, Callable[[Seen], str]] = {
    "JSONL file": lambda seen: seen.file,
    "logging": lambda seen: seen.log,
    "events": lambda seen: _lines([repr(event) for event in seen.events]),
    "events as dicts": lambda seen: _lines([event.as_dict() for event in seen.events]),
    "stdout": lambda seen: seen.out,
    "stderr": lambda seen: seen.err,
    "warnings": lambda seen: seen.warnings,
    "towerman trace": lambda seen: seen.trace,
    "towerman trace --json": lambda seen: seen.trace_json,
    "journal: all but the tables of values": lambda seen: seen.written,
    "towerman journal": lambda seen: seen.listed,
    "timeline": lambda seen: _lines([batch.timeline() for batch in seen.batches]),
    "timeline as a picture": lambda seen: _lines([batch.timeline_svg() for batch in seen.batches]),
    "spans": lambda seen: _lines([repr(batch.spans()) for batch in seen.batches]),
    "message of its own result": lambda seen: _lines(
        [result.message for result in seen.own if seen.allowed not in ("words", "reason") or result.ok]
    ),
    "content of its own result": _own_content,
    "waited_for": lambda seen: _lines([result.waited_for for result in (*seen.own, *seen.others)]),
    "results of other calls": lambda seen: _lines([f"{one.message} {one.content} {one.value}" for one in seen.others]),
    "messages of other calls": _sent,
    "notice": lambda seen: _lines([batch.notice for batch in seen.batches]),
    "repr of calls and batches handed in": lambda seen: repr(
        [one for one in (seen.given if isinstance(seen.given, list) else [seen.given]) if isinstance(one, Batch | Call)]
    ),
    "repr of the tower": lambda seen: repr(seen.tower),
    "repr of runs": lambda seen: repr(seen.runs),
    "repr of batches": lambda seen: repr(seen.batches),
    "repr of results": lambda seen: repr([result for batch in seen.batches for result in batch]),
    "repr of contexts": lambda seen: repr(seen.contexts),
    "repr of statistics": lambda seen: repr(seen.tower.statistics()),
    "repr of gate and ledger": lambda seen: repr((gate_of(seen.tower), gate_of(seen.tower).ledger)),
    "explanation as text, JSON, drawing and repr": lambda seen: explained(seen),
    "check of the declarations": lambda seen: _lines([seen.tower.check(), json.dumps(seen.tower.check().to_dict())]),
    "repr of everything alive in Towerman": lambda seen: _lines(list(seen.alive)),
    "errors raised to the caller": lambda seen: _lines(
        [
            "".join(traceback.format_exception(error)) + repr(error)
            for error in seen.errors
            if not isinstance(error, SystemExit)  # the handler's own, handed on as it is
        ]
    ),
}


def explained(seen: Seen) -> str:
    """What is said of the batch before it runs."""
    try:
        told = seen.tower.explain(seen.given)
    except InputError as error:
        return _lines([error, repr(error)])
    texts = [told, told.text(80), told.text(80, ascii_only=True), told.to_svg(), repr(told), repr(told.calls)]
    return _lines([*texts, json.dumps(told.to_dict(), ensure_ascii=False)])


def living() -> list[str]:
    """What every object of Towerman's own classes that is alive says of itself."""
    found = []
    for one in gc.get_objects():
        module = getattr(type(one), "__module__", None)
        if isinstance(module, str) and (module == "towerman" or module.startswith("towerman.")):
            # The text of an exception that became a call's own result is that result's message: looked at there.
            found.append(repr(one) if not isinstance(one, ToolError | type) else "")
    found += [repr(task) for task in asyncio.all_tasks() if "execute" not in repr(task.get_coro())]
    return found


def written_down(path: Path) -> str:
    """All that stands in a journal beside the tables that values are in, also as text where it is bytes."""
    db = sqlite3.connect(path)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    values = {"answers", "arguments", "blob_parts"}
    assert values <= set(tables)
    cells = [cell for name in set(tables) - values for row in db.execute(f"SELECT * FROM {name}") for cell in row]
    db.close()
    return _lines([cell.decode("latin-1") + cell.hex() if isinstance(cell, bytes) else cell for cell in cells])


async def perform(play: Play, seen: Seen, given: object, deny: str | None) -> None:
    """Two runs want the same at once, beside bystanders; whoever looks on looks while they run."""
    named = "batch" if play.tower.options.journal is not None else None

    async def one(run: Run, what: object) -> None:
        try:
            await run.execute(what, batch_id=named)
        except (Exception, SystemExit) as error:
            seen.errors.append(error)
        if run.last_batch is not None:
            seen.batches.append(run.last_batch)

    async def look() -> None:
        for instant in (0.0, 0.75, 1.75):
            await asyncio.sleep(max(0.0, instant - play.stage.clock.now()))
            seen.alive += living()
            seen.alive.append(repr(seen.tower.statistics()))

    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0  # every callback is logged, with what asyncio shows of it
    looking = asyncio.ensure_future(look())
    people: dict[str, Any] = {"deny": deny, "approver": play.approver}
    async with play.tower.run("first", **people) as a, play.tower.run("second", **people) as b:
        seen.runs = [a, b]
        by = [Call("bystander", {}, "by0")]
        async with asyncio.TaskGroup() as group:
            group.create_task(one(a, [*given, *by] if _is_calls(given) else given))
            group.create_task(one(b, [*by, *given] if _is_calls(given) else given))
    await looking
    await play.stage.settled(play.tower)
    seen.alive += living()


def _is_calls(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(call, Call) for call in given)


CASES = [(name, False, False) for name in SOURCES]
CASES += [(name, True, False) for name in SOURCES if name.startswith("exception")]
CASES += [(name, False, True) for name in SOURCES if not name.startswith("no batch")]


@pytest.fixture(autouse=True, scope="module")
def _quick_to_look() -> Iterator[None]:
    """What is alive now need not be looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("name", "debug", "journal"), CASES)
def test_g8_r130_p92_a_secret_is_in_no_sink(
    name: str,
    debug: bool,
    journal: bool,
    stage: Stage,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A secret in this place of a batch is in no record, log, drawing, message to others, repr or output (G8, R-130,
    P-92). `debug=True` prints the handler's tracebacks to stderr, on purpose, and changes nothing else. With a journal
    it is in the tables of values at most.
    """
    make, allowed, options = SOURCES[name]
    if journal:
        options = {**options, "journal": tmp_path / "j.db"}
    path = tmp_path / "trace.jsonl"
    observer = JsonlObserver(path)
    caplog.set_level(logging.DEBUG)
    events: list[Event] = []
    given: object = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tower = stage.tower(
            observers=[observer, LogObserver(), events.append], debug=debug, max_concurrency=8, **options
        )
        play = Play(stage, tower)

        @tower.tool(name="bystander", writes="other:thing")
        async def bystander() -> str:
            await asyncio.sleep(0.5)
            return "nothing to tell"

        given = make(play)
        seen = Seen(allowed, given, tower, events=events, contexts=play.contexts)
        stage.run(perform(play, seen, given, "tool" if name == "name: refused for all" else None))
        assert tower.flush(30)
    seen.warnings = _lines([warning.message for warning in warned])
    observer.close()
    seen.file = path.read_text()
    seen.out, seen.err = capfd.readouterr()
    if debug:
        seen.err = ""
    if seen.file:
        assert command(["trace", str(path)]) == 0
        assert command(["trace", str(path), "--json"]) == 0
        seen.trace, told = capfd.readouterr()
        assert not leaks(told)
    if journal:
        play.tower._journal.counts().result()  # type: ignore[union-attr]
        seen.written = written_down(tmp_path / "j.db")
        for words in (["show"], ["show", "--json"], ["unknown"], ["unknown", "--json"]):
            assert command(["journal", *words, "--journal", str(tmp_path / "j.db")]) in (0, 1)
        seen.listed, told = capfd.readouterr()
        assert not leaks(told)
        assert seen.listed.count('"calls": [') == 2
    seen.log = "\n".join(
        f"{record.getMessage()} {record.exc_text} {record.args}"
        for record in caplog.records
        if "name='inner'" not in record.getMessage()  # asyncio, of a task of the handler's own
    )

    if name.startswith("no batch"):
        assert len(seen.errors) == 2, "it was taken for a batch"
        assert all(isinstance(error, InputError) for error in seen.errors)
    elif "leaves the process" in name:
        assert any(isinstance(error, SystemExit) for error in seen.errors)
    else:
        assert seen.errors == []
        assert seen.own, "the source was never run"
        assert seen.file.count("\n") > 3, "nothing was recorded: nothing was shown"
        assert seen.log.count("batch_finished") >= 2
    found = [sink for sink, look in SINKS.items() if leaks(look(seen))]
    assert found == [], f"{name}: leaks by {found}"


def test_the_secret_was_there_to_be_found(stage: Stage) -> None:
    """The test above can fail: the secret is where it is allowed to be, and a leak in any spelling is seen."""
    tower = stage.tower()
    play = Play(stage, tower)
    given = SOURCES["value: text, loop"][0](play)
    (result,) = stage.run(tower.execute(given))
    assert SECRET in result.content
    assert leaks(result.content)
    for spelling in (
        SECRET.upper(),
        SECRET[:6],
        SECRET.encode().hex(),
        repr(SECRET.encode()),
        str(NUMBER),
        f"x{NUMBER}",
    ):
        assert leaks(spelling), spelling
    assert leaks(base64.b64encode(SECRET.encode()).decode())
    assert not leaks(__doc__ or "")
    assert len(SOURCES) > 60
    with contextlib.suppress(KeyError):
        SINKS["no such sink"]
