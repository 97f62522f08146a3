"""What a run will take, asked before it starts; and whether operator and machine have that much.

Every way to a start goes through ``forecast``: what it refuses is never started, and nothing is created here but a kept
measurement of the machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import anyio

from hermes_rl_mcp.contracts.environments import EnvironmentSchema
from hermes_rl_mcp.contracts.estimates import Estimate, Speed, SpeedRequest
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.operations.children import helper_environ
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.paths import claims_dir
from hermes_rl_mcp.runs.claims import in_line
from hermes_rl_mcp.runs.forecast import speed
from hermes_rl_mcp.runs.forecast.ceilings import check_limits, check_memory
from hermes_rl_mcp.runs.forecast.device import gpu_memory, host_memory
from hermes_rl_mcp.runs.forecast.earlier import Earlier, find_earlier
from hermes_rl_mcp.runs.forecast.estimate import Measured, estimate
from hermes_rl_mcp.runs.forecast.footprint import Work, work_of
from hermes_rl_mcp.runs.forecast.modelcheck import check_model
from hermes_rl_mcp.runs.forecast.modelfiles import ModelFiles
from hermes_rl_mcp.runs.specs import ChildCommands

_WORTH_TRYING_S = 2.0
"""Torch alone takes longer than this to load."""
_ROUGH = "rough: typical speeds of such a device, not measured here (rl_start_training(dry_run=true) measures)"


@dataclass(frozen=True)
class Forecast:
    """An estimate that nothing forbids."""

    estimate: Estimate
    warnings: list[str]
    ahead: list[str]
    """Runs that have or wait for the device."""


async def forecast(context: Context, request: RunRequest, schema: EnvironmentSchema, *, until: float) -> Forecast:
    """Measures the machine if that is done by ``until`` (monotonic) and no earlier run says more.

    Raises PreflightError (model not to be had, more than the machine has) or CeilingError.
    """
    environ = context.operator.environ
    model = await anyio.to_thread.run_sync(check_model, request.base_model, request.model_path, environ)
    earlier = await anyio.to_thread.run_sync(find_earlier, context.home, request)
    ahead = await anyio.to_thread.run_sync(in_line, claims_dir(environ), request.device)
    work = _work(schema, request)
    measured = await _measured(context, request, model, work, earlier, busy=bool(ahead), until=until)

    def again(changed: RunRequest) -> Estimate:
        return estimate(changed, model, _work(schema, changed), measured=measured, earlier=earlier)

    made = again(request)
    check_limits(context.settings.limits, request, made, again)
    gpu = await anyio.to_thread.run_sync(gpu_memory, environ) if request.device == "cuda" else None
    warnings = check_memory(request, made, again, host=host_memory(), gpu=gpu)
    if model.fetch_bytes:
        warnings.append(f"The model is fetched at the start of the run: about {model.fetch_bytes / 1e6:.0f} MB.")
    return Forecast(made, warnings, ahead)


def _work(schema: EnvironmentSchema, request: RunRequest) -> Work:
    return work_of(request, typical_prompt=schema.typical_prompt_tokens, typical_answer=schema.typical_answer_tokens)


async def _measured(
    context: Context,
    request: RunRequest,
    model: ModelFiles,
    work: Work,
    earlier: Earlier | None,
    *,
    busy: bool,
    until: float,
) -> Measured:
    wanted = speed.speed_request(request, model.shape, work)
    if earlier is not None:
        return Measured(speed.typical(wanted), _ROUGH)  # the earlier run knows better
    kept = await anyio.to_thread.run_sync(partial(_kept, context, wanted))
    if kept is not None and kept[1] < speed.FRESH_S:
        return Measured(kept[0].speed, kept[0].basis)
    wait_s = until - time.monotonic()
    replaced = "trainer" in ChildCommands.from_environ(context.operator.environ).commands
    if wait_s > _WORTH_TRYING_S and not busy and not replaced:
        environ = {**helper_environ(context.home, context.operator.environ)}
        environ.pop("OMP_NUM_THREADS", None)  # the trainer takes all cores unless it is told otherwise
        found = await speed.measure(context.home.speed_cache, wanted, environ, wait_s=wait_s)
        if found is not None:
            return Measured(found, _basis(found))
    return kept[0] if kept is not None else Measured(speed.typical(wanted), _ROUGH)


def _kept(context: Context, wanted: SpeedRequest) -> tuple[Measured, float] | None:
    found = speed.kept(context.home.speed_cache, wanted)
    if found is None:
        return None
    age_s = abs(speed.age_s(context.home.speed_cache, wanted))
    return Measured(found, _basis(found)), age_s


def _basis(found: Speed) -> str:
    return f"a measurement of this machine at {found.measured_at}"
