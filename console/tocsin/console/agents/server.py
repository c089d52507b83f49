"""The tools on stdin and stdout, by the Model Context Protocol."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any, Final

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from tocsin.console.agents.marking import NOTICE, fenced, marked
from tocsin.console.agents.tools import INSTRUCTIONS, TOOLS, ToolAnswer
from tocsin.console.api.bus_source import BusSource
from tocsin.console.api.problems import ProblemError
from tocsin.console.api.source import DataSource
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.monotonic_clock import unix_ms

OUTPUT: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["notice", "tocsin", "untrusted_data"],
    "properties": {
        "notice": {"type": "string", "description": "how untrusted_data is to be read"},
        "tocsin": {"type": "object", "description": "what tocsin itself says"},
        "untrusted_data": {"type": "object", "description": NOTICE},
    },
}
"""What each answer looks like."""


def server_of(
    opened: Callable[[], Any], *, now_ms: Callable[[], int] = unix_ms
) -> Server[dict[str, Any]]:
    """A server whose tools read the source that `await opened()` returns; it may raise
    TocsinError."""
    tools = {tool.name: tool for tool in TOOLS}
    listed = [
        types.Tool(
            name=tool.name,
            title=tool.title,
            description=tool.about,
            input_schema=tool.input_schema,
            output_schema=OUTPUT,
            annotations=types.ToolAnnotations(
                read_only_hint=True,
                destructive_hint=False,
                idempotent_hint=True,
                open_world_hint=False,
            ),
        )
        for tool in TOOLS
    ]

    async def list_tools(context: Any, parameters: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def call_tool(
        context: Any, parameters: types.CallToolRequestParams
    ) -> types.CallToolResult:
        tool = tools.get(parameters.name)
        if tool is None:
            return _refused(f"there is no such tool; there are {', '.join(tools)}")
        try:
            source: DataSource = await opened()
            return _result(await tool(source, parameters.arguments or {}, now_ms()))
        except ProblemError as error:
            return _refused(error.problem.detail)
        except TocsinError as error:
            return _refused(str(error))

    return Server(
        "tocsin",
        version=version("tocsin"),
        title="tocsin: what goes wrong in machine-learning trainings",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve(source: BusSource) -> None:
    """Serve until stdin ends. A bus that is not there yet is tried with each question."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            turn, ready = asyncio.Lock(), asyncio.Event()

            async def opened() -> DataSource:
                async with turn:
                    if not ready.is_set():
                        await stack.enter_async_context(source)
                        ready.set()
                return source

            server = server_of(opened)
            print("tocsin: answering on stdin and stdout; Ctrl-D ends", file=sys.stderr)
            async with stdio_server() as (reader, writer):
                await server.run(reader, writer, server.create_initialization_options())

    asyncio.run(run())


def _result(answer: ToolAnswer, *, failed: bool = False) -> types.CallToolResult:
    content = marked(answer.data, answer.own)
    text = fenced(content, f"tocsin-{secrets.token_hex(8)}")
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)],
        structured_content=content,
        is_error=failed,
    )


def _refused(why: str) -> types.CallToolResult:
    # The message may repeat a name of a training.
    return _result(ToolAnswer({"problem": why}, {"answered": False}), failed=True)
