"""Completes arguments of resource templates and prompts: names of environments, models and local data sets,
ids of runs, names of logs.

What begins with what was typed comes first, then what contains it. Runs come with the latest change first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import anyio.to_thread
import mcp.types as t
from mcp.server.mcpserver import MCPServer

from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.environments import catalog
from hermes_rl_mcp.paths import PROCESS_LOGS

MAX_VALUES = 100
"""The protocol's own limit of one answer."""
_ENVIRONMENTS = ("name", "environment")
_DATASETS = ("id", "dataset")


def register(server: MCPServer[Any], context: Context) -> None:
    """Adds the one handler that completes everything."""

    @server.completion()  # type: ignore[no-untyped-call, untyped-decorator]  # the SDK's decorator has no types
    async def complete_argument(
        ref: t.PromptReference | t.ResourceTemplateReference, argument: t.CompletionArgument, _: Any
    ) -> t.Completion:
        found = await complete(context, argument.name, argument.value)
        return t.Completion(values=found[:MAX_VALUES], total=len(found), has_more=len(found) > MAX_VALUES)


async def complete(context: Context, argument_name: str, prefix: str) -> list[str]:
    """Every value that fits, best first; none for an argument that may be anything."""
    if argument_name in _ENVIRONMENTS:
        names: Iterable[str] = [info.name for info in (await catalog(context)).environments]
    elif argument_name == "run_id":
        names = await anyio.to_thread.run_sync(_run_ids, context)
    elif argument_name == "run_ids":
        return await _further_runs(context, prefix)
    elif argument_name == "model":
        names = await anyio.to_thread.run_sync(_models, context)
    elif argument_name in _DATASETS:
        from hermes_rl_mcp.operations.datasets import available  # the server must start fast

        names = await anyio.to_thread.run_sync(available, context)
    elif argument_name == "process":
        names = PROCESS_LOGS
    else:
        return []
    return _fitting(list(names), prefix)


def _fitting(names: Sequence[str], typed: str) -> list[str]:
    wanted = typed.casefold()
    begin = [name for name in names if name.casefold().startswith(wanted)]
    return begin + [name for name in names if wanted in name.casefold() and name not in begin]


async def _further_runs(context: Context, typed: str) -> list[str]:
    """The last of several ids, behind the ones that stand there already."""
    *before, last = (part.strip() for part in typed.split(","))
    ids = await complete(context, "run_id", last)
    return [",".join([*before, run_id]) for run_id in ids if run_id not in before]


def _models(context: Context) -> list[str]:
    """Embedded ones and names that the operator allows, then those of earlier runs."""
    from hermes_rl_mcp.runs.forecast.modelfiles import SMOLLM2, TINY  # not before it is asked for

    patterns = context.settings.profile.allowed_models
    embedded = [name for name in (TINY, SMOLLM2) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    named = [name for name in patterns if not set(name) & set("*?[")]
    used = [run.base_model for run in context.runs.list() if isinstance(run, RunRecord)]
    return list(dict.fromkeys([*embedded, *named, *used]))


def _run_ids(context: Context) -> list[str]:
    def changed(run_id: str) -> float:
        try:
            return os.stat(context.home.run(run_id).dir).st_mtime
        except OSError:
            return 0.0

    return sorted(context.runs.ids(), key=changed, reverse=True)
