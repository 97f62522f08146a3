"""rl_start_training(resume_from=...): the configuration of a run that continues another.

It is the old run's own, with the edits made since if the same environment is selected; the operator's locks of today
win over both. Everything else is checked as for any start.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from pydantic import JsonValue

from hermes_rl_mcp.contracts.results import StartTraining
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.environments import Selected, catalog, located
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.redact import redact_field
from hermes_rl_mcp.runs.configuration.resolve import resolve
from hermes_rl_mcp.runs.configuration.session import Session
from hermes_rl_mcp.runs.resume import Source, carry_over, changed, continue_from, find_source, told, warnings


@dataclass(frozen=True)
class Continuation:
    """An ended run, and what its continuation would be told."""

    source: Source
    selected: Selected
    warnings: list[str]

    def continued(self, request: RunRequest) -> RunRequest:
        """``request`` with its origin. Raises ResumeError if it does not fit the checkpoint."""
        return continue_from(self.source, request)

    def prepare(self, request: RunRequest, draft: RunPaths) -> None:
        """For ``launch.start``."""
        carry_over(self.source, request, draft)

    def explained(self, request: RunRequest, answer: StartTraining) -> StartTraining:
        """``answer`` with where the run goes on, what it is told otherwise than the old one, and the warnings."""
        text = f"It continues run {self.source.run_id} after step {self.source.step}."
        differences = changed(self.source, self.selected.resolution.values)
        if differences:
            shown = [
                f"{name} {redact_field(name, before)!r} -> {redact_field(name, now)!r}"
                for name, (before, now) in differences.items()
            ]
            text += f" Changed: {', '.join(shown)}."
        found = [*answer.warnings, *self.warnings, *warnings(self.source, request)]
        return answer.model_copy(update={"message": f"{answer.message} {text}", "warnings": found})


async def continuation(context: Context, run_id: str) -> Continuation:
    """Raises UnknownRunError, UnreadableRunError, ResumeError, or what loading the environment raises."""
    source = await anyio.to_thread.run_sync(find_source, context.home, run_id)
    old = source.request
    found = (await catalog(context)).environments
    info = located(found, old.environment, old.env_file, old.env_class)
    schema = await context.describer.describe(info)
    session = _session(context)
    same = session is not None and (session.environment, session.class_name) == (info.name, info.class_name)
    edits: dict[str, JsonValue] = {**told(old), **(session.edits if session is not None and same else {})}
    known = resolve(schema, context.settings.profile, {}).fields
    gone = sorted(name for name in edits if name not in known)
    resolution = resolve(schema, context.settings.profile, {k: v for k, v in edits.items() if k in known})
    lost = [f"The environment no longer has the field '{name}'; its old value is left out." for name in gone]
    return Continuation(source, Selected(session or Session(), info, resolution), lost)


def _session(context: Context) -> Session | None:
    """A damaged selection does not keep a run from going on: it needs none."""
    try:
        return context.sessions.read()
    except HermesRLError:
        return None
