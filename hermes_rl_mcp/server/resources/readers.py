"""How each kind of resource is read: over the same operations as the tools, so that both show the same.

Without a ``limit`` a page stays small enough for a conversation; with one it grows to what a program can use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import anyio.to_thread
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hermes_rl_mcp.catalog.scan import MAX_FILE_BYTES, find
from hermes_rl_mcp.contracts.datasets import DEFAULT_ROWS
from hermes_rl_mcp.contracts.datasets import MAX_ROWS as DATASET_ROWS
from hermes_rl_mcp.contracts.results import NOTICE
from hermes_rl_mcp.contracts.sections import LogName, Page, SectionQuery
from hermes_rl_mcp.errors import InvalidValueError, NotFoundError
from hermes_rl_mcp.operations import sections
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.environments import catalog, source_of
from hermes_rl_mcp.operations.log_window import MAX_WINDOW_BYTES
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.run_files import shown_config, shown_record
from hermes_rl_mcp.server.resources.kinds import WINDOW, Content, Parameters
from hermes_rl_mcp.untrusted import shown, shown_values

MAX_ROWS = 1_000
"""Of one page."""
_LARGE_CHARS = 256_000
"""Of a page whose size the client chose."""
_LOG_BYTES = 16_384
_TAIL_BYTES = 65_536
MAX_TAIL_LINES = 1_000
_FAR = 2**53
"""Beyond any file, and the largest integer that JSON carries everywhere."""

PageReader = Callable[[Context, RunReader, SectionQuery, int], Page]


class _Query(BaseModel):
    model_config = ConfigDict(extra="ignore")  # the path's own parameters


class _PageQuery(_Query):
    offset: int = Field(-1, ge=-_FAR, le=_FAR)
    limit: int | None = Field(None, ge=1, le=MAX_ROWS)
    step: int | None = None


class _LogQuery(_Query):
    offset: int | None = Field(None, ge=-_FAR, le=_FAR)
    limit: int | None = Field(None, ge=1, le=MAX_WINDOW_BYTES)
    tail: int | None = Field(None, ge=1, le=MAX_TAIL_LINES)


class _DatasetQuery(_Query):
    split: str = Field("", max_length=200)
    limit: int = Field(DEFAULT_ROWS, ge=1, le=DATASET_ROWS)


Query = TypeVar("Query", bound=_Query)


async def environment_source(context: Context, parameters: Parameters) -> Content:
    info = find((await catalog(context)).environments, parameters["name"])
    source = await anyio.to_thread.run_sync(source_of, context, info)
    return Content(shown(source, MAX_FILE_BYTES))


async def environment_schema(context: Context, parameters: Parameters) -> Content:
    info = find((await catalog(context)).environments, parameters["name"])
    schema = await context.describer.describe(info)
    return _json(schema.model_dump(mode="json"))


async def dataset(context: Context, parameters: Parameters) -> Content:
    from hermes_rl_mcp.operations import datasets  # a child process reads it

    asked = _query(_DatasetQuery, parameters)
    found = await datasets.describe(context, parameters["id"], asked.split, asked.limit)
    return _json(found.model_dump(mode="json"))


async def run_config(context: Context, parameters: Parameters) -> Content:
    config = await shown_config(context, await _run(context, parameters))
    return Content(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


async def run_state(context: Context, parameters: Parameters) -> Content:
    return _json(await shown_record(context, await _run(context, parameters)))


async def run_plot(context: Context, parameters: Parameters) -> Content:
    from hermes_rl_mcp.operations.plots import plot_png  # a child process draws it

    return Content(await plot_png(context, await _run(context, parameters)))


async def run_metrics(context: Context, parameters: Parameters) -> Content:
    return await _page(context, parameters, sections.metrics_page)


async def run_rollouts(context: Context, parameters: Parameters) -> Content:
    return await _page(context, parameters, sections.rollouts_page, untrusted="rows")


async def run_events(context: Context, parameters: Parameters) -> Content:
    return await _page(context, parameters, sections.events_page, untrusted="rows")


async def run_checkpoints(context: Context, parameters: Parameters) -> Content:
    return await _page(context, parameters, sections.checkpoints_page)


async def run_log(context: Context, parameters: Parameters) -> Content:
    """A window in bytes, or the last lines; ``_meta`` says where to go on, also if nothing is there yet."""
    reader = await _run(context, parameters)
    process = known_process(parameters["process"])
    asked = _query(_LogQuery, parameters)
    if asked.tail is not None and asked.offset is not None:
        raise InvalidValueError("tail and offset exclude each other.", hint="tail=N alone asks for the last N lines.")
    limit = asked.limit or (_LOG_BYTES if asked.tail is None else _TAIL_BYTES)
    query = SectionQuery(offset=-1 if asked.offset is None else asked.offset, limit=limit, process=process)
    page = await anyio.to_thread.run_sync(sections.log_page, context, reader, query, MAX_WINDOW_BYTES)
    text = page.text if asked.tail is None else "".join(page.text.splitlines(keepends=True)[-asked.tail :])
    place = {"next_offset": page.total if page.next_offset is None else page.next_offset, "total": page.total}
    if asked.tail is None:  # where the last lines begin is not known in bytes of the file
        place |= {"offset": page.offset}
    return Content(text, {WINDOW: {**place, "truncated": page.truncated}})


async def _run(context: Context, parameters: Parameters) -> RunReader:
    return await RunReader.open(context, parameters["run_id"])


def known_process(name: str) -> LogName:
    """Raises NotFoundError with the names there are."""
    names: tuple[LogName, ...] = get_args(LogName)
    for known in names:
        if known == name:
            return known
    raise NotFoundError(f"No log '{name[:200]}'.", hint=f"There are: {', '.join(names)}.")


async def _page(context: Context, parameters: Parameters, read: PageReader, untrusted: str | None = None) -> Content:
    reader = await _run(context, parameters)
    asked = _query(_PageQuery, parameters)
    query = SectionQuery(offset=asked.offset, limit=asked.limit or 0, step=asked.step)
    budget = sections.BUDGET_CHARS if asked.limit is None else _LARGE_CHARS
    page = await anyio.to_thread.run_sync(read, context, reader, query, budget)
    notice = {"untrusted": f"{untrusted}: {NOTICE}"} if untrusted else {}
    return Content(json.dumps({**page.model_dump(mode="json"), **notice}, ensure_ascii=False))


def _query(model: type[Query], parameters: Parameters) -> Query:
    given = {name: value for name, value in parameters.items() if value != ""}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        said = [f"{item['loc'][0]}: {item['msg']}" for item in error.errors(include_url=False, include_input=False)]
        raise InvalidValueError(
            f"The query is not valid: {'; '.join(said)}.", hint="Without the query its defaults hold."
        ) from error


def _json(value: Any) -> Content:
    return Content(json.dumps(shown_values(value), indent=1, ensure_ascii=False))
