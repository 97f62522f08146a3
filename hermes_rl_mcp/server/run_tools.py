"""The ten tools, second half: runs. See ``tools``."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import mcp.types as t
from mcp.server.mcpserver import Context, MCPServer
from pydantic import Field

from hermes_rl_mcp.contracts import results as r
from hermes_rl_mcp.contracts.exports import ExportFormat
from hermes_rl_mcp.contracts.sections import SectionQuery
from hermes_rl_mcp.operations.listing import DEFAULT_LIMIT, RunFilter
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.server import links
from hermes_rl_mcp.server import text as words
from hermes_rl_mcp.server.answers import success
from hermes_rl_mcp.server.arguments import (
    Include,
    Offset,
    PartLimit,
    PartOffset,
    Process,
    RunId,
    RunIdOrLatest,
    Step,
    Wait,
)
from hermes_rl_mcp.server.asking import Confirm, asks, caller
from hermes_rl_mcp.server.handling import described, picture, progress, timely


def register(server: MCPServer[Any], operations: Operations) -> None:
    """Adds the five tools to ``server``."""
    _register_acting(server, operations)
    _register_reading(server, operations)


def _register_acting(server: MCPServer[Any], operations: Operations) -> None:
    @server.tool(**described("rl_start_training", open_world=True))
    @asks
    @timely
    async def rl_start_training(
        ctx: Context,
        idempotency_key: Annotated[
            str | None,
            Field(
                max_length=200, description="Any text of yours. A repeated call with it gives the same run, no second."
            ),
        ] = None,
        resume_from: Annotated[
            str | None,
            Field(
                max_length=64,
                description="Id of a run that has ended: the new run goes on from its last complete checkpoint, with "
                "its configuration and the edits made since.",
            ),
        ] = None,
        dry_run: Annotated[
            bool, Field(description="Check everything and estimate memory, disk, time and tokens; start nothing.")
        ] = False,
        export_of: Annotated[
            str | None,
            Field(
                max_length=64, description="Id of a run: start no run, but export the weights of its last checkpoint."
            ),
        ] = None,
        export_format: Annotated[
            ExportFormat, Field(description="adapter: PEFT folder; safetensors: merged model; gguf: for llama.cpp.")
        ] = "adapter",
        confirm: Confirm = False,
    ) -> Annotated[t.CallToolResult, r.StartTraining]:
        result = await operations.start_training(
            idempotency_key,
            resume_from,
            dry_run,
            export_of=export_of,
            export_format=export_format,
            caller=caller(ctx),
            confirm=confirm,
        )
        return success(words.started, result, links.started(result))

    @server.tool(**described("rl_stop_training", destructive=True, idempotent=True))
    @asks
    @timely
    async def rl_stop_training(
        run_id: RunId, ctx: Context, confirm: Confirm = False
    ) -> Annotated[t.CallToolResult, r.StopTraining]:
        result = await operations.stop_training(run_id, caller=caller(ctx), confirm=confirm)
        is_run = operations.context.home.run(result.run_id).dir.is_dir()
        return success(words.stopped, result, links.state(result.run_id) if is_run else [])


def _register_reading(server: MCPServer[Any], operations: Operations) -> None:
    @server.tool(**described("rl_check_status", read_only=True))
    @timely
    async def rl_check_status(
        run_id: RunIdOrLatest,
        ctx: Context,
        wait_seconds: Wait = 0,
        include: Include = [],  # noqa: B006  (never changed; a schema needs a concrete default)
        process: Process = "trainer",
        step: Step = None,
        offset: PartOffset = -1,
        limit: PartLimit = 0,
    ) -> Annotated[t.CallToolResult, r.CheckStatus]:
        began = time.monotonic()
        query = SectionQuery(offset=offset, limit=limit, step=step, process=process)
        result = await operations.check_status(run_id, wait_seconds, progress(ctx), include=include, query=query)
        drawn = await _drawn(operations, result, began)
        return success(words.status, result, links.metrics(result.run_id), drawn)

    @server.tool(**described("rl_get_results", read_only=True))
    @timely
    async def rl_get_results(
        run_id: RunIdOrLatest,
        max_points: Annotated[int, Field(ge=1, le=500, description="Steps of history, evenly spaced.")] = 10,
        metrics: Annotated[
            list[str],
            Field(max_length=40, description="Names for the history, 'reward/' = all of that group. Default: all."),
        ] = [],  # noqa: B006  (as above)
        include: Include = [],  # noqa: B006  (as above)
        process: Process = "trainer",
        step: Step = None,
        offset: PartOffset = -1,
        limit: PartLimit = 0,
    ) -> Annotated[t.CallToolResult, r.GetResults]:
        began = time.monotonic()
        query = SectionQuery(offset=offset, limit=limit, step=step, process=process)
        result = await operations.get_results(run_id, max_points, metrics, include=include, query=query)
        drawn = await _drawn(operations, result, began)
        return success(words.results, result, links.metrics(result.run_id), drawn)

    @server.tool(**described("rl_list_runs", read_only=True))
    @timely
    async def rl_list_runs(
        limit: Annotated[int, Field(ge=1, le=500, description="At most this many, newest first.")] = DEFAULT_LIMIT,
        offset: Offset = 0,
        environment: Annotated[str, Field(max_length=200, description="Only runs of this environment.")] = "",
        status: Annotated[
            str, Field(max_length=50, description="Only 'active', 'ended', or one state: queued, running, failed, ...")
        ] = "",
        model: Annotated[str, Field(max_length=200, description="Only base models with this in their name.")] = "",
        text: Annotated[
            str, Field(max_length=200, description="Only runs with this in id, W&B name, error or detail.")
        ] = "",
        compare: Annotated[
            list[str], Field(max_length=6, description="Two to six run ids: show these side by side.")
        ] = [],  # noqa: B006  (as above)
        plot: Annotated[bool, Field(description="With compare: a PNG of their curves besides.")] = False,
    ) -> Annotated[t.CallToolResult, r.ListRuns]:
        began = time.monotonic()
        wanted = RunFilter(environment, status, model, text)
        result = await operations.list_runs(limit, offset, wanted=wanted, compare=compare, plot=plot)
        ids = [row.run_id for row in result.runs] if plot and result.comparison is not None else []
        drawn = await picture(operations, ids, began)
        return success(words.runs, result, links.runs(result), [one for one in (drawn.image,) if one], drawn.error)


async def _drawn(
    operations: Operations, result: r.CheckStatus | r.GetResults, began: float
) -> Sequence[t.ImageContent]:
    """The picture, if it was asked for; if there is none, the answer says why."""
    if result.sections is None or result.sections.plot is None:
        return []
    drawn = await picture(operations, [result.run_id], began)
    result.sections.plot.error = drawn.error
    return [drawn.image] if drawn.image else []
