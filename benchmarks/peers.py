"""Agent frameworks as systems: each answers one scripted model turn of n tool calls with its own executor of tools.

The model is a script without a network: its first turn asks for all calls, its second says that it is done, so what is
timed is what the framework itself does around the calls. The tool is the same coroutine function that the others run.

Frameworks ask for conflicting versions of what they share, so each that is not installed here can be given an
environment of its own under `.venv/peers/`, where it runs beside the references and ours: `python -m benchmarks` does
so, unless told `--no-peers`.

Not here: references, limiters and ours (systems).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import towerman
from benchmarks.measure import Pass, Samples, interleaved, ratio
from benchmarks.report import Row, note
from benchmarks.settings import Settings
from benchmarks.systems import (
    REF,
    REF_JSON,
    Handler,
    Maker,
    Sleeps,
    at_once,
    by_semaphore,
    by_semaphore_json,
    by_towerman,
    by_towerman_json,
    check,
)

ROOT = Path(__file__).resolve().parent.parent

CAP = 8
OWN = "towerman"

# ------------------------------------------------------------------------------------- the frameworks


def by_openai_agents(n: int, handler: Handler, cap: int, *, capped: bool = False) -> Pass:
    """The Runner of the OpenAI Agents SDK, without tracing; `capped`: with its own limit of running tools."""
    import agents
    from agents.run_config import ToolExecutionConfig
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    agents.set_tracing_disabled(True)

    async def look(i: int) -> int:
        return await handler(i)

    asked = [
        ResponseFunctionToolCall(
            type="function_call", id=f"item_{i}", call_id=f"call_{i}", name="look", arguments=json.dumps({"i": i})
        )
        for i in range(n)
    ]
    said = ResponseOutputMessage(
        type="message",
        id="said",
        role="assistant",
        status="completed",
        content=[ResponseOutputText(type="output_text", text="done", annotations=[])],
    )

    class Script(agents.Model):
        def __init__(self) -> None:
            self.turns = iter(([*asked], [said]))

        async def get_response(self, *args: Any, **options: Any) -> agents.ModelResponse:
            return agents.ModelResponse(output=next(self.turns), usage=agents.Usage(), response_id=None)

        def stream_response(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    tools = [agents.function_tool(look)]
    limit = ToolExecutionConfig(max_function_tool_concurrency=cap) if capped else None
    config = agents.RunConfig(tracing_disabled=True, tool_execution=limit)

    async def run() -> list[int]:
        agent = agents.Agent(name="bench", model=Script(), tools=tools)
        done = await agents.Runner.run(agent, "go", run_config=config)
        return [int(item.output) for item in done.new_items if item.type == "tool_call_output_item"]

    return run


def by_langgraph(n: int, handler: Handler, cap: int, *, capped: bool = False) -> Pass:
    """LangGraph's ToolNode in the smallest graph; `capped`: with `max_concurrency` in its configuration."""
    from langchain_core.messages import AIMessage
    from langchain_core.tools import StructuredTool
    from langgraph.graph import MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    async def look(i: int) -> int:
        """Look."""
        return await handler(i)

    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([StructuredTool.from_function(coroutine=look, name="look")]))
    graph.set_entry_point("tools")
    graph.set_finish_point("tools")
    compiled = graph.compile()
    asked = AIMessage(
        content="",
        tool_calls=[{"type": "tool_call", "id": f"call_{i}", "name": "look", "args": {"i": i}} for i in range(n)],
    )
    config: Any = {"max_concurrency": cap} if capped else {}

    async def run() -> list[int]:
        state = await compiled.ainvoke({"messages": [asked]}, config)
        return [int(message.content) for message in state["messages"] if message.type == "tool"]

    return run


def by_pydantic_ai(n: int, handler: Handler, cap: int) -> Pass:
    """An Agent of pydantic-ai with a scripted model."""
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    asked = [ToolCallPart("look", json.dumps({"i": i}), tool_call_id=f"call_{i}") for i in range(n)]

    def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return ModelResponse(parts=[*asked] if len(messages) == 1 else [TextPart("done")])

    agent = Agent(FunctionModel(script))

    async def look(i: int) -> int:
        return await handler(i)

    agent.tool_plain(look)

    async def run() -> list[int]:
        done = await agent.run("go")
        parts = [part for message in done.all_messages() for part in message.parts]
        return [int(part.model_response_str()) for part in parts if isinstance(part, ToolReturnPart)]

    return run


def by_agent_framework(n: int, handler: Handler, cap: int) -> Pass:
    """The function-calling layer of Microsoft's agent-framework over a scripted client."""
    import agent_framework
    from agent_framework._tools import FunctionInvocationLayer

    async def look(i: int) -> int:
        """Look."""
        return await handler(i)

    tools = [agent_framework.tool(look, approval_mode="never_require")]
    asked = [
        agent_framework.Content.from_function_call(call_id=f"call_{i}", name="look", arguments=json.dumps({"i": i}))
        for i in range(n)
    ]

    class Script(FunctionInvocationLayer, agent_framework.BaseChatClient):  # type: ignore[misc,unused-ignore]
        asked_for: bool = False

        def _inner_get_response(self, **options: Any) -> Any:
            async def respond() -> Any:
                contents: list[Any] = ["done"] if self.asked_for else [*asked]
                self.asked_for = True
                said = agent_framework.Message(role="assistant", contents=contents)
                return agent_framework.ChatResponse(messages=[said])

            return respond()

    async def run() -> list[int]:
        start = agent_framework.Message(role="user", contents=["go"])
        done = await Script().get_response([start], options={"tools": tools})
        contents = [one for message in done.messages for one in message.contents]
        return [int(one.result) for one in contents if one.type == "function_result"]

    return run


def by_strands(n: int, handler: Handler, cap: int) -> Pass:
    """An Agent of Strands; reading the n tool calls out of its model's stream is timed with it."""
    import strands
    from strands.models.model import Model

    @strands.tool
    async def look(i: int) -> int:
        """Look.

        Args:
            i: a number
        """
        return await handler(i)

    class Script(Model):
        asked_for = False

        def update_config(self, **options: Any) -> None:
            return None

        def get_config(self) -> dict[str, Any]:
            return {}

        def structured_output(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        async def stream(self, *args: Any, **options: Any) -> AsyncIterator[dict[str, Any]]:
            yield {"messageStart": {"role": "assistant"}}
            if self.asked_for:
                yield {"contentBlockDelta": {"delta": {"text": "done"}}}
                yield {"contentBlockStop": {}}
            else:
                for i in range(n):
                    use = {"toolUse": {"toolUseId": f"call_{i}", "name": "look"}}
                    yield {"contentBlockStart": {"start": use}}
                    yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps({"i": i})}}}}
                    yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "end_turn" if self.asked_for else "tool_use"}}
            self.asked_for = True

    async def run() -> list[int]:
        agent = strands.Agent(model=Script(), tools=[look], callback_handler=None)
        await agent.invoke_async("go")
        blocks = [block for message in agent.messages for block in message["content"]]
        return [int(block["toolResult"]["content"][0]["text"]) for block in blocks if "toolResult" in block]

    return run


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework.

    Args:
        module: what is imported.
        requirement: what is installed.
        makers: its systems by name.
    """

    module: str
    requirement: str
    makers: dict[str, Maker]


FRAMEWORKS: dict[str, Framework] = {
    "openai-agents": Framework(
        "agents",
        "openai-agents>=0.24",
        {"OpenAI Agents": by_openai_agents, "OpenAI Agents capped": partial(by_openai_agents, capped=True)},
    ),
    "langgraph": Framework(
        "langgraph.prebuilt",
        "langgraph>=1.2",
        {
            "LangGraph ToolNode": by_langgraph,
            "LangGraph ToolNode max_concurrency": partial(by_langgraph, capped=True),
        },
    ),
    "pydantic-ai": Framework("pydantic_ai", "pydantic-ai-slim>=2.68", {"pydantic-ai": by_pydantic_ai}),
    "agent-framework": Framework(
        "agent_framework", "agent-framework-core>=1.23", {"agent-framework": by_agent_framework}
    ),
    "strands": Framework("strands", "strands-agents>=1.62", {"Strands": by_strands}),
}


def _present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


def frameworks() -> dict[str, Maker]:
    """The systems of the frameworks that are installed in this environment."""
    return {name: maker for one in FRAMEWORKS.values() if _present(one.module) for name, maker in one.makers.items()}


# ------------------------------------------------------------------------ in environments of their own


async def compare(key: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """In the framework's environment: its systems beside both references and ours, as samples by system."""
    n = 100 if quick else 1000
    systems: dict[str, Pass] = {
        REF: by_semaphore(n, at_once, CAP),
        REF_JSON: by_semaphore_json(n, at_once, CAP),
        OWN: by_towerman_json(n, at_once, CAP),
    }
    sleeping: dict[str, Pass] = {}
    peaks: dict[str, int] = {}
    many, seconds = (40, 0.002) if quick else (100, 0.010)
    for name, maker in {REF: by_semaphore, OWN: by_towerman, **FRAMEWORKS[key].makers}.items():
        if name not in systems:
            await check(name, maker, n, CAP, capped=False)
            systems[name] = maker(n, at_once, CAP)
        watched = Sleeps(seconds)
        sleeping[name] = maker(many, watched.call, CAP)
        await sleeping[name]()
        peaks[name] = watched.peak
    return {
        "path": await interleaved(systems, rounds),
        "sleeps": await interleaved(sleeping, rounds, clock=time.perf_counter),
        "peaks": peaks,
    }


def _environment(key: str, seconds: float) -> Path | None:
    """The interpreter of the framework's own environment, made if need be; None with a note when it cannot be had."""
    place = ROOT / ".venv" / "peers" / f"{key}-{sys.version_info.major}.{sys.version_info.minor}"
    python, stamp = place / "bin" / "python", place / ".ready"
    wanted = [FRAMEWORKS[key].requirement, *_requirements()]
    if python.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == "\n".join(wanted):
        return python
    note(f"installing {FRAMEWORKS[key].requirement} into {place.relative_to(ROOT)}")
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", place], check=True, capture_output=True, timeout=seconds
        )
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *wanted], check=True, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        note(f"left out: {key}: not installed within {seconds:.0f} s")
        return None
    except (subprocess.CalledProcessError, OSError) as error:
        told = getattr(error, "stderr", b"") or b""
        last = told.decode(errors="replace").strip().splitlines()[-1:] or [type(error).__name__]
        note(f"left out: {key}: cannot be installed: {last[0][:200]}")
        return None
    stamp.write_text("\n".join(wanted), encoding="utf-8")
    return python


def _requirements() -> list[str]:
    declared: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    return declared


def elsewhere(settings: Settings, *, install_seconds: float = 120.0) -> list[Row]:
    """Rows for the frameworks that are not installed here, each measured in an environment of its own."""
    rows = []
    for key, one in FRAMEWORKS.items():
        if _present(one.module):
            continue  # measured in this process, beside everything else
        python = _environment(key, install_seconds)
        if python is None:
            continue
        note(f"F3, F7: {key} in its own environment")
        command = [str(python), "-m", "benchmarks.peers", key, str(min(9, settings.rounds))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(Path(towerman.__file__).parent.parent), str(ROOT))),
        }
        try:
            told = subprocess.run(
                [*command, "quick"] if settings.quick else command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=240,
            ).stdout
        except subprocess.TimeoutExpired:
            note(f"left out: {key}: it did not end within 240 s")
        except subprocess.CalledProcessError as error:
            note(f"left out: {key}: {(error.stderr.strip().splitlines() or ['failed'])[-1][:200]}")
        else:
            rows += _rows(key, json.loads(told.splitlines()[-1]))
    return rows


def _rows(key: str, measured: dict[str, Any]) -> list[Row]:
    path: Samples = measured["path"]
    sleeps: Samples = measured["sleeps"]
    peaks: dict[str, int] = measured["peaks"]
    names = list(FRAMEWORKS[key].makers)
    return [
        Row(
            "F3",
            f"ours where {key} is installed, whole path",
            ratio(path, OWN, REF_JSON),
            against=REF_JSON,
            beside={name: ratio(path, name, REF_JSON) for name in names},
            samples=path,
        ),
        Row(
            "F7",
            f"ours where {key} is installed, sleeps",
            ratio(sleeps, OWN, REF),
            against=REF,
            beside={f"{name} (peak {peaks[name]})": ratio(sleeps, name, REF) for name in names},
            samples=sleeps,
        ),
    ]


def main(arguments: list[str]) -> int:
    """`python -m benchmarks.peers NAME ROUNDS [quick]`, in the framework's environment: samples as a line of JSON."""
    key, rounds, *quick = arguments
    print(json.dumps(asyncio.run(compare(key, int(rounds), quick=bool(quick)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
