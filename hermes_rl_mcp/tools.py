"""The ten tools as Python functions: same names and arguments as over MCP; each returns JSON text.

::

    from hermes_rl_mcp.tools import rl_list_environments
    print(await rl_list_environments())

Settings come from the process's environment variables and ``$HERMES_HOME/.env`` at each call. Whatever a user can mend
comes back as the text of ``{"error": ...}``; an exception is a defect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence

from pydantic import BaseModel, JsonValue, ValidationError

from hermes_rl_mcp.contracts.exports import ExportFormat
from hermes_rl_mcp.contracts.sections import LogName, SectionName, SectionQuery
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations.fitting import content
from hermes_rl_mcp.operations.listing import RunFilter
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.redact import redact, secret_values
from hermes_rl_mcp.untrusted import shown_error

__all__ = [
    "rl_check_status",
    "rl_edit_config",
    "rl_get_current_config",
    "rl_get_results",
    "rl_list_environments",
    "rl_list_runs",
    "rl_select_environment",
    "rl_start_training",
    "rl_stop_training",
    "rl_test_inference",
]


async def rl_list_environments(
    source: str = "", dataset: str = "", split: str = "", offset: int = 0, limit: int = 0
) -> str:
    """Which environments there are; with ``source`` the Python source of one, with ``dataset`` a data set."""
    return await _text(lambda ops: ops.list_environments(limit, offset, source, dataset, split))


async def rl_select_environment(name: str) -> str:
    """Choose an environment by name or file stem; earlier edits are dropped."""
    return await _text(lambda ops: ops.select_environment(name))


async def rl_get_current_config(text: str = "", offset: int = 0, limit: int = 0) -> str:
    """The selected environment's fields, with current and locked values; ``text`` finds some of them."""
    return await _text(lambda ops: ops.get_current_config(limit, offset, text))


async def rl_edit_config(field: str, value: JsonValue, revision: int | None = None) -> str:
    """Set one field; the value is validated. With ``revision``, refused if the session has moved past it: nothing is
    remembered between two calls, so only that protects from writing over somebody else's edit."""
    return await _text(lambda ops: ops.edit_config(field, value, revision))


async def rl_start_training(
    idempotency_key: str | None = None,
    resume_from: str | None = None,
    dry_run: bool = False,
    export_of: str | None = None,
    export_format: ExportFormat = "adapter",
    confirm: bool = False,
) -> str:
    """Start a run in the background, or continue one that has ended; or export the weights of one. The same key gives
    the same run. With ``confirm`` a person has agreed to what an error asked for."""
    return await _text(
        lambda ops: ops.start_training(
            idempotency_key,
            resume_from,
            dry_run,
            export_of=export_of,
            export_format=export_format,
            confirm=confirm,
        )
    )


async def rl_check_status(
    run_id: str,
    wait_seconds: float = 0.0,
    include: Sequence[SectionName] = (),
    process: LogName = "trainer",
    step: int | None = None,
    offset: int = -1,
    limit: int = 0,
) -> str:
    """A run's state and latest metrics; waits up to 50 s for news if asked to. ``include`` adds parts of the run; of
    ``plot`` the text says where it is."""

    async def ask(ops: Operations) -> BaseModel:
        query = SectionQuery(offset=offset, limit=limit, step=step, process=process)
        return await ops.check_status(run_id, wait_seconds, include=include, query=query)

    return await _text(ask)


async def rl_stop_training(run_id: str, confirm: bool = False) -> str:
    """Ask a run to stop; of one that has ended, its export. Nobody is asked: who calls from Python answers for it."""
    return await _text(lambda ops: ops.stop_training(run_id, confirm=confirm))


async def rl_get_results(
    run_id: str,
    max_points: int = 10,
    metrics: Sequence[str] = (),
    include: Sequence[SectionName] = (),
    process: LogName = "trainer",
    step: int | None = None,
    offset: int = -1,
    limit: int = 0,
) -> str:
    """A run's metrics, checkpoints and adapter; ``metrics`` chooses columns, ``include`` adds parts of the run."""

    async def ask(ops: Operations) -> BaseModel:
        query = SectionQuery(offset=offset, limit=limit, step=step, process=process)
        return await ops.get_results(run_id, max_points, metrics, include=include, query=query)

    return await _text(ask)


async def rl_list_runs(
    limit: int = 50,
    offset: int = 0,
    environment: str = "",
    status: str = "",
    model: str = "",
    text: str = "",
    compare: Sequence[str] = (),
    plot: bool = False,
) -> str:
    """Runs that fit the filters, newest first; or those of ``compare`` side by side. A text holds no picture: ``plot``
    is there so that both forms of the tool take the same arguments."""
    wanted = RunFilter(environment, status, model, text)
    return await _text(lambda ops: ops.list_runs(limit, offset, wanted=wanted, compare=compare, plot=plot))


async def rl_test_inference(
    num_steps: int = 3,
    group_size: int = 16,
    models: Sequence[str] | None = None,
    test_id: str | None = None,
    wait_seconds: float = 45.0,
    offset: int = 0,
) -> str:
    """Try the selected environment on real models; with ``test_id``, report on a test that was started."""
    return await _text(
        lambda ops: ops.test_inference(num_steps, group_size, models, test_id, wait_seconds, offset=offset)
    )


async def _text(call: Callable[[Operations], Awaitable[BaseModel]]) -> str:
    secrets = secret_values(os.environ)
    try:
        operations = Operations.from_environ(os.environ)
        secrets = secret_values(operations.context.operator.environ)
        answer = content(await call(operations))
    except HermesRLError as error:
        answer = shown_error(error)
    except ValidationError as error:
        answer = {"error": f"Arguments are not valid: {error.errors(include_url=False)[0]['msg']}."}
    return json.dumps(redact(answer, secrets), indent=2, ensure_ascii=False, default=str)
