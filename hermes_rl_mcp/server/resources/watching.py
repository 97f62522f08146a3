"""Whether a resource has changed, by the size and age of the files behind it: cheap enough to look every second.

A stamp is compared with an earlier one of the same look and means nothing else. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hermes_rl_mcp.catalog.scan import find, python_files, scan
from hermes_rl_mcp.checkpoints import MARKER
from hermes_rl_mcp.errors import NotFoundError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.paths import RUN_ID, RunPaths, bundled_environments
from hermes_rl_mcp.server.resources import table
from hermes_rl_mcp.server.resources.kinds import Kind
from hermes_rl_mcp.server.resources.readers import known_process

Stamp = tuple[object, ...]
Look = Callable[[], Stamp]
"""Takes the stamp now. Files that are not there yet are stamped, too, so their coming is a change."""


def look_at(context: Context, kind: Kind, parameters: Mapping[str, str]) -> Look | None:
    """None for what does not change. May read environments' sources, once. Raises NotFoundError for what can never
    be there."""
    if kind in (table.SOURCE, table.SCHEMA):
        return _environment(context, kind, parameters["name"])
    if (run_id := parameters.get("run_id")) is None:
        return None
    if not RUN_ID.match(run_id):
        raise NotFoundError(f"'{run_id[:200]}' is no run id.", hint="It has 8 hex characters; rl_list_runs shows them.")
    paths = context.home.run(run_id)
    if kind is table.LOG:
        return _files(context.home.log(known_process(parameters["process"]), run_id))
    if kind is table.CHECKPOINTS:
        return lambda: _checkpoints(paths)
    files = {
        table.STATE.name: [paths.record],
        table.CONFIG.name: [paths.config, paths.request],
        table.METRICS.name: [paths.metrics],
        table.PLOT.name: [paths.metrics, paths.env_metrics, paths.evaluation],
        table.ROLLOUTS.name: [paths.rollouts],
        table.EVENTS.name: [paths.events],
    }.get(kind.name)
    return _files(*files) if files else None


def listing(context: Context) -> Stamp:
    """Of everything that ``listed`` depends on: which runs and data sets there are, and the files of environments."""
    from hermes_rl_mcp.operations.datasets import available  # the server must start fast

    return (_stamp(context.home.runs), tuple(available(context)), *_stamps(_sources(context)))


def _environment(context: Context, kind: Kind, name: str) -> Look:
    try:
        found = scan(bundled_environments(), [Path(folder) for folder in context.settings.env_dirs])
        file = Path(find(found.environments, name).file_path)
    except NotFoundError:  # whatever is put there may become it
        return lambda: _stamps(_sources(context))
    if kind is table.SOURCE:
        return _files(file)
    return lambda: _stamps(sorted({file, *file.parent.glob("*.py")}))


def _sources(context: Context) -> list[Path]:
    folders = [*map(Path, context.settings.env_dirs), bundled_environments()]
    return [path for folder in folders for path in python_files(folder)]


def _checkpoints(paths: RunPaths) -> Stamp:
    return _stamps(sorted(path / MARKER for path in paths.checkpoints.glob("step_*")))


def _files(*paths: Path) -> Look:
    return lambda: _stamps(paths)


def _stamps(paths: Iterable[Path]) -> Stamp:
    return tuple((str(path), _stamp(path)) for path in paths)


def _stamp(path: Path) -> Stamp:
    try:
        found = path.lstat()
    except OSError:
        return ()
    return (found.st_ino, found.st_size, found.st_mtime_ns)
