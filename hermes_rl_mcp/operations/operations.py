"""The ten operations behind one object. Servers, the command line and ``hermes_rl_mcp.tools`` call these and no other.

Each is a thin delegation. Apart from the revision it showed last, everything lives on disk. Failures that a user is
meant to see are HermesRLError.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from hermes_rl_mcp.contracts.exports import ExportFormat
from hermes_rl_mcp.contracts.results import (
    CheckStatus,
    CurrentConfig,
    EditConfig,
    GetResults,
    ListEnvironments,
    ListRuns,
    SelectEnvironment,
    StartTraining,
    StopTraining,
    TestInference,
)
from hermes_rl_mcp.contracts.sections import SectionName, SectionQuery
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.operations import environments, listing, starting, status, training
from hermes_rl_mcp.operations.asking import Caller
from hermes_rl_mcp.operations.context import Context, Progress, no_progress
from hermes_rl_mcp.operations.listing import RunFilter
from hermes_rl_mcp.operations.options import Flags
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.settings import Operator, load_settings


class Operations:
    """``Operations(load_settings(os.environ))``."""

    def __init__(self, operator: Operator, *, clock: Callable[[], float] = time.time) -> None:
        self.context = Context(operator, clock)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], flags: Flags = Flags()) -> Operations:
        """With settings from flags, variables and ``$HERMES_HOME/.env``. Raises InvalidValueError."""
        return cls(load_settings(environ, flags))

    async def list_environments(
        self, limit: int = 0, offset: int = 0, source: str = "", dataset: str = "", split: str = ""
    ) -> ListEnvironments:
        if not dataset:
            return await environments.list_environments(self.context, limit, offset, source)
        from hermes_rl_mcp.operations import datasets  # seldom used, and the server must start fast

        return await datasets.list_environments(self.context, dataset, split, limit, offset, source)

    async def select_environment(self, name: str) -> SelectEnvironment:
        return await environments.select_environment(self.context, name)

    async def get_current_config(self, limit: int = 0, offset: int = 0, text: str = "") -> CurrentConfig:
        return await environments.get_current_config(self.context, limit, offset, text)

    async def edit_config(self, field: str, value: JsonValue, revision: int | None = None) -> EditConfig:
        return await environments.edit_config(self.context, field, value, revision)

    async def start_training(
        self,
        idempotency_key: str | None = None,
        resume_from: str | None = None,
        dry_run: bool = False,
        *,
        export_of: str | None = None,
        export_format: ExportFormat = "adapter",
        caller: Caller | None = None,
        confirm: bool = False,
    ) -> StartTraining:
        """``caller``: the MCP client; none is a program, or a person who answers for themselves. With ``confirm`` a
        person has agreed to what ConfirmationError asks for."""
        if export_of is None:
            return await starting.start_training(self.context, idempotency_key, resume_from, dry_run, caller, confirm)
        if idempotency_key or resume_from or dry_run:
            raise InvalidValueError(
                "export_of starts no run, so it goes with export_format and confirm alone.",
                hint="Leave out idempotency_key, resume_from and dry_run: an export that is under way is never begun "
                "twice.",
            )
        return await starting.start_export(self.context, export_of, export_format, caller, confirm)

    async def check_status(
        self,
        run_id: str,
        wait_seconds: float = 0.0,
        progress: Progress = no_progress,
        *,
        include: Sequence[SectionName] = (),
        query: SectionQuery = SectionQuery(),
    ) -> CheckStatus:
        return await status.check_status(self.context, run_id, wait_seconds, progress, include, query)

    async def stop_training(self, run_id: str, *, caller: Caller | None = None, confirm: bool = False) -> StopTraining:
        return await training.stop_training(self.context, run_id, caller, confirm)

    async def get_results(
        self,
        run_id: str,
        max_points: int = 10,
        metrics: Sequence[str] = (),
        *,
        include: Sequence[SectionName] = (),
        query: SectionQuery = SectionQuery(),
    ) -> GetResults:
        return await training.get_results(
            self.context, run_id, max_points, metrics, include, query, training.HISTORY_CHARS
        )

    async def list_runs(
        self,
        limit: int = listing.DEFAULT_LIMIT,
        offset: int = 0,
        *,
        wanted: RunFilter = RunFilter(),
        compare: Sequence[str] = (),
        plot: bool = False,
    ) -> ListRuns:
        """``plot`` says that a picture is wanted besides, which is drawn by ``plot`` below."""
        if plot and not compare:
            raise InvalidValueError(
                "A plot is of runs side by side, and compare names none.",
                hint="Name two to six run ids in compare; of one run: rl_get_results(run_id, include=['plot']).",
            )
        return await listing.list_runs(self.context, limit, offset, wanted, compare)

    async def plot(self, run_ids: Sequence[str]) -> bytes:
        """A PNG of the curves of one run, or of several side by side. Raises HermesRLError."""
        from hermes_rl_mcp.operations.plots import plot_png  # seldom used, and the server must start fast

        return await plot_png(self.context, *[await RunReader.open(self.context, run_id) for run_id in run_ids])

    async def test_inference(
        self,
        num_steps: int = 3,
        group_size: int = 16,
        models: Sequence[str] | None = None,
        test_id: str | None = None,
        wait_seconds: float = 45.0,
        progress: Progress = no_progress,
        offset: int = 0,
    ) -> TestInference:
        from hermes_rl_mcp.operations import inference  # seldom used, and the server must start fast

        return await inference.test_inference(
            self.context, num_steps, group_size, models, test_id, wait_seconds, progress, offset
        )
