"""The resource that goes on where an answer ends, for clients that read resources."""

from __future__ import annotations

from urllib.parse import quote

import mcp.types as t

from hermes_rl_mcp.contracts.results import ListEnvironments, ListRuns, StartTraining
from hermes_rl_mcp.untrusted import shown

_PYTHON, _JSON = "text/x-python", "application/json"
_NAME_CHARS = 80

Links = list[t.ResourceLink]


def environments(result: ListEnvironments) -> Links:
    """The source of the first on the page: the others have the same form of address. Or the data set that is shown."""
    if result.dataset is not None:
        return [_link(f"rl://datasets/{_part(result.dataset.id)}", f"Data set {result.dataset.id}", _JSON)]
    return source(result.environments[0].name) if result.environments else []


def source(environment: str) -> Links:
    return [_link(f"rl://environments/{_part(environment)}/source", f"Source of {environment}", _PYTHON)]


def schema(environment: str) -> Links:
    return [_link(f"rl://environments/{_part(environment)}/schema", f"Settings of {environment}", _JSON)]


def started(result: StartTraining) -> Links:
    """A dry run has no run; what it would have run has a source."""
    return state(result.run_id) if result.run_id else source(result.environment)


def state(run_id: str) -> Links:
    return [_link(f"rl://runs/{run_id}/state", f"State of run {run_id}", _JSON)]


def metrics(run_id: str) -> Links:
    return [_link(f"rl://runs/{run_id}/metrics", f"Metrics of run {run_id}", _JSON)]


def runs(result: ListRuns) -> Links:
    """The newest; of a comparison all."""
    if result.comparison is not None:
        return [link for run_id in result.comparison.run_ids for link in metrics(run_id)]
    return state(result.runs[0].run_id) if result.runs else []


def _link(uri: str, title: str, mime_type: str) -> t.ResourceLink:
    return t.ResourceLink(uri=uri, name=shown(title, _NAME_CHARS), mime_type=mime_type)


def _part(name: str) -> str:
    return quote(name, safe="")
