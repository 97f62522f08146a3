"""The ten tools, first half: what can be trained and with which settings. A handler calls its operation and says the
result; it decides nothing.

Errors are raised: ``HermesServer.call_tool`` turns them into answers. No deferred annotations here: the SDK evaluates
them to build the schemas.
"""

from typing import Annotated, Any

import mcp.types as t
from mcp.server.mcpserver import Context, MCPServer
from pydantic import Field

from hermes_rl_mcp.contracts import results as r
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.server import links, run_tools
from hermes_rl_mcp.server import text as words
from hermes_rl_mcp.server.answers import ErrorPayload, success
from hermes_rl_mcp.server.arguments import Limit, Offset, Wait
from hermes_rl_mcp.server.handling import described, progress, timely
from hermes_rl_mcp.server.outline import outline, result_of
from hermes_rl_mcp.server.schemas import published_input, published_output


def register(server: MCPServer[Any], operations: Operations) -> None:
    """Adds the ten tools to ``server``."""
    _register_selection(server, operations)
    run_tools.register(server, operations)
    error = ErrorPayload.model_json_schema()
    for tool in server._tool_manager.list_tools():  # no public way to publish a schema of one's own in mcp 2.3
        tool.parameters = published_input(tool.parameters)
        result = result_of(tool.fn)
        tool.fn_metadata.output_model = result  # what every answer is checked against
        tool.fn_metadata.output_schema = published_output(outline(result), error)


def _register_selection(server: MCPServer[Any], operations: Operations) -> None:
    @server.tool(**described("rl_list_environments", read_only=True, open_world=True))
    @timely
    async def rl_list_environments(
        source: Annotated[
            str, Field(max_length=200, description="Name of an environment: show its Python source instead.")
        ] = "",
        dataset: Annotated[
            str,
            Field(max_length=400, description="Show this data set instead: local name, or owner/name of the Hub."),
        ] = "",
        split: Annotated[str, Field(max_length=200, description="Of the data set. Default: the first.")] = "",
        offset: Annotated[int, Field(ge=0, description="Rows (of a source: characters) to skip: next_offset.")] = 0,
        limit: Annotated[
            int, Field(ge=0, le=100_000, description="Rows (of a source: characters) at most. 0 = as many as fit.")
        ] = 0,
    ) -> Annotated[t.CallToolResult, r.ListEnvironments]:
        result = await operations.list_environments(limit, offset, source, dataset, split)
        return success(words.environments, result, links.environments(result))

    @server.tool(**described("rl_select_environment", idempotent=True))
    @timely
    async def rl_select_environment(
        name: Annotated[
            str, Field(min_length=1, max_length=200, description="Name or file stem, from rl_list_environments.")
        ],
    ) -> Annotated[t.CallToolResult, r.SelectEnvironment]:
        result = await operations.select_environment(name)
        return success(words.selection, result, links.source(result.environment))

    @server.tool(**described("rl_get_current_config", read_only=True))
    @timely
    async def rl_get_current_config(
        text: Annotated[str, Field(max_length=200, description="Only fields with this in name or description.")] = "",
        offset: Offset = 0,
        limit: Limit = 0,
    ) -> Annotated[t.CallToolResult, r.CurrentConfig]:
        result = await operations.get_current_config(limit, offset, text)
        return success(words.config, result, links.schema(result.environment))

    @server.tool(**described("rl_edit_config", idempotent=True))
    @timely
    async def rl_edit_config(
        field: Annotated[
            str, Field(min_length=1, max_length=200, description="Field name, from rl_get_current_config.")
        ],
        value: Annotated[Any, Field(description="New value, of the field's type.")],
        revision: Annotated[
            int | None, Field(ge=0, description="The one you last saw. Refused if it is not the newest any more.")
        ] = None,
    ) -> Annotated[t.CallToolResult, r.EditConfig]:
        result = await operations.edit_config(field, value, revision)
        return success(words.edit, result, links.schema(result.environment))

    @server.tool(**described("rl_test_inference", open_world=True))
    @timely
    async def rl_test_inference(
        ctx: Context,
        num_steps: Annotated[int, Field(ge=1, le=100, description="Groups (problems) to try per model.")] = 3,
        group_size: Annotated[int, Field(ge=1, le=64, description="Completions per group.")] = 16,
        models: Annotated[
            list[str] | None,
            Field(
                description="Models to try. Default: the configured ones.",
                max_length=8,
            ),
        ] = None,
        test_id: Annotated[
            str | None, Field(max_length=64, description="Of a test that was started: report on it, start none.")
        ] = None,
        wait_seconds: Wait = 45,
        offset: Annotated[int, Field(ge=0, description="Groups to skip in the report: next_offset.")] = 0,
    ) -> Annotated[t.CallToolResult, r.TestInference]:
        result = await operations.test_inference(
            num_steps, group_size, models, test_id, wait_seconds, progress(ctx), offset
        )
        return success(words.test, result, links.source(result.environment))
