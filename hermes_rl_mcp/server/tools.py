"""The ten tools. A handler calls its operation and says the result; it decides nothing.

Errors are raised: ``HermesServer.call_tool`` turns them into answers. No deferred annotations here: the SDK evaluates
them to build the schemas.
"""

from typing import Annotated, Any

import mcp.types as t
from mcp.server.mcpserver import Context, MCPServer
from pydantic import Field

from hermes_rl_mcp.contracts import results as r
from hermes_rl_mcp.contracts.exports import ExportFormat
from hermes_rl_mcp.operations.context import MAX_WAIT_S, Progress
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.server import text
from hermes_rl_mcp.server.answers import ErrorPayload, admit_errors, success
from hermes_rl_mcp.server.asking import Confirm, asks, caller

RunId = Annotated[str, Field(description="8 hex characters, from rl_start_training or rl_list_runs.")]
Wait = Annotated[
    float,
    Field(ge=0, le=MAX_WAIT_S, description="Wait up to this many seconds for news, then answer. 0 = answer at once."),
]


def _hints(
    *, read_only: bool = False, destructive: bool = False, idempotent: bool = False, open_world: bool = False
) -> t.ToolAnnotations:
    return t.ToolAnnotations(
        read_only_hint=read_only,
        destructive_hint=destructive,
        idempotent_hint=idempotent or read_only,
        open_world_hint=open_world,
    )


def register(server: MCPServer[Any], operations: Operations) -> None:
    """Adds the ten tools to ``server``."""
    _register_selection(server, operations)
    _register_runs(server, operations)
    payload = ErrorPayload.model_json_schema()
    for tool in server._tool_manager.list_tools():  # no public way to publish a schema of one's own in mcp 2.3
        schema = tool.fn_metadata.output_schema
        if schema is not None:
            tool.fn_metadata.output_schema = admit_errors(schema, payload)


def _register_selection(server: MCPServer[Any], operations: Operations) -> None:
    @server.tool(title="List environments", annotations=_hints(read_only=True))
    async def rl_list_environments() -> Annotated[t.CallToolResult, r.ListEnvironments]:
        """List the RL environments that can be trained on, with file paths and one-line descriptions.

        Start here. Files that could not be read as environments are listed with the reason.
        Next: rl_select_environment."""
        result = await operations.list_environments()
        return success(text.environments, result)

    @server.tool(title="Select environment", annotations=_hints(idempotent=True))
    async def rl_select_environment(
        name: Annotated[str, Field(min_length=1, description="Name or file stem, from rl_list_environments.")],
    ) -> Annotated[t.CallToolResult, r.SelectEnvironment]:
        """Choose the environment to train on. Drops earlier edits of the configuration.

        The choice is kept on disk and survives a restart of the server.
        Next: rl_get_current_config, then rl_edit_config or rl_test_inference."""
        result = await operations.select_environment(name)
        return success(text.selection, result)

    @server.tool(title="Show configuration", annotations=_hints(read_only=True))
    async def rl_get_current_config() -> Annotated[t.CallToolResult, r.CurrentConfig]:
        """Show every field of the selected environment and of the trainer: type, meaning, default, current value.

        Locked fields were fixed by the person who runs this server and cannot be changed by you.
        The tip says if a run could not start with these values. Next: rl_edit_config."""
        result = await operations.get_current_config()
        return success(text.config, result)

    @server.tool(title="Edit configuration", annotations=_hints(idempotent=True))
    async def rl_edit_config(
        field: Annotated[str, Field(min_length=1, description="Field name, from rl_get_current_config.")],
        value: Annotated[Any, Field(description="New value, of the field's type.")],
        revision: Annotated[
            int | None, Field(description="The one you last saw. Refused if it is not the newest any more.")
        ] = None,
    ) -> Annotated[t.CallToolResult, r.EditConfig]:
        """Set one field for the next run. The value is checked; a refused edit changes nothing.

        Refused, too, if another server changed the configuration since this one showed it; among several clients of
        one HTTP server only revision protects from that.

        batch_size counts sequences and must be a multiple of group_size. Running runs are not affected.
        Next: rl_test_inference or rl_start_training."""
        result = await operations.edit_config(field, value, revision)
        return success(text.edit, result)

    @server.tool(title="Test inference", annotations=_hints(open_world=True))
    async def rl_test_inference(
        ctx: Context,
        num_steps: Annotated[int, Field(ge=1, le=100, description="Groups (problems) to try per model.")] = 3,
        group_size: Annotated[int, Field(ge=1, le=64, description="Completions per group.")] = 16,
        models: Annotated[
            list[str] | None, Field(description="Models to try. Default: the configured one.", max_length=8)
        ] = None,
        test_id: Annotated[
            str | None, Field(description="Of a test that is still running: go on waiting for it.")
        ] = None,
        wait_seconds: Wait = 45,
    ) -> Annotated[t.CallToolResult, r.TestInference]:
        """Try the selected environment on real models before training: sample completions and score them.

        Default 3 groups x 16 = 48 completions per model. Uses compute (or the operator's inference endpoint).
        If status is 'running', call again with the test_id. Look for environment_working and an accuracy between 0
        and 1: all right or all wrong gives training no signal. Next: rl_start_training."""
        result = await operations.test_inference(num_steps, group_size, models, test_id, wait_seconds, _progress(ctx))
        return success(text.test, result)


def _register_runs(server: MCPServer[Any], operations: Operations) -> None:
    @server.tool(title="Start training", annotations=_hints(open_world=True))
    @asks
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
        """Start a training run (GRPO with LoRA) with the current configuration, in the background.

        Answers within seconds with a run_id; the run takes minutes to hours and goes on if this client leaves.
        If the device is busy the run is queued. Do not start it twice: rl_list_runs shows what runs.
        Next: rl_check_status(run_id, wait_seconds=50)."""
        result = await operations.start_training(
            idempotency_key,
            resume_from,
            dry_run,
            export_of=export_of,
            export_format=export_format,
            caller=caller(ctx),
            confirm=confirm,
        )
        return success(text.started, result)

    @server.tool(title="Check status", annotations=_hints(read_only=True))
    async def rl_check_status(
        run_id: RunId, ctx: Context, wait_seconds: Wait = 0
    ) -> Annotated[t.CallToolResult, r.CheckStatus]:
        """Show a run's state, latest metrics and time left. With wait_seconds it waits for the next step or change.

        flags say what is wrong with a run that still goes on, with the evidence and the setting to change.
        Fresh metrics are limited in frequency (rate_limited, next_check_in_seconds); a change of state or a new flag
        is always shown at once. Prefer waiting over calling often. When completed: rl_get_results."""
        result = await operations.check_status(run_id, wait_seconds, _progress(ctx))
        return success(text.status, result)

    @server.tool(title="Stop training", annotations=_hints(destructive=True, idempotent=True))
    @asks
    async def rl_stop_training(
        run_id: RunId, ctx: Context, confirm: Confirm = False
    ) -> Annotated[t.CallToolResult, r.StopTraining]:
        """Stop a run. The trainer writes a checkpoint first: rl_start_training(resume_from=run_id) goes on from it.

        Answers at once while the stop goes on: follow it with rl_check_status. Stopping twice does no harm. Of a run
        that has ended it stops an export that is under way. For a run of another client a person is asked."""
        result = await operations.stop_training(run_id, caller=caller(ctx), confirm=confirm)
        return success(text.stopped, result)

    @server.tool(title="Get results", annotations=_hints(read_only=True))
    async def rl_get_results(
        run_id: RunId,
        max_points: Annotated[int, Field(ge=1, le=500, description="Rows of history, evenly spaced.")] = 10,
    ) -> Annotated[t.CallToolResult, r.GetResults]:
        """Show a run's metrics over time, its checkpoints, and the path of the trained LoRA adapter (PEFT format).

        Works while a run goes on, too. reward_first5 and reward_last5 say whether it learned."""
        result = await operations.get_results(run_id, max_points)
        return success(text.results, result)

    @server.tool(title="List runs", annotations=_hints(read_only=True))
    async def rl_list_runs(
        limit: Annotated[int, Field(ge=1, le=500, description="At most this many, newest first.")] = 50,
    ) -> Annotated[t.CallToolResult, r.ListRuns]:
        """List training runs, newest first, with state, step and latest reward. Use it to find a run_id again."""
        result = await operations.list_runs(limit)
        return success(text.runs, result)


def _progress(ctx: Context[Any, Any]) -> Progress:
    """The protocol wants each note's number above the last, so notes are counted and the figures go into the text."""
    count = 0

    async def report(done: float, total: float | None, message: str) -> None:
        nonlocal count
        count += 1
        of_total = f"{done:g}/{total:g} " if total else ""
        await ctx.report_progress(count, message=f"{of_total}{message}"[:200])

    return report
