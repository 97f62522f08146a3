"""What is in a data set: columns, sizes, first rows, of a local one or one of the Hub. A child process reads it.

Local paths are read only below folders that the operator named (``--data-dir``, ``--env-dir``) or that come with the
installation. No code of a data set is run, and nothing that it says can take longer or more room than is allowed here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread
from pydantic import ValidationError

from hermes_rl_mcp.contracts.datasets import (
    DEFAULT_ROWS,
    MAX_OFFSET,
    MAX_ROWS,
    DatasetInfo,
    ViewFailure,
    ViewReply,
    ViewRequest,
)
from hermes_rl_mcp.contracts.results import ListEnvironments
from hermes_rl_mcp.dataset_viewer.splits import data_files, format_of
from hermes_rl_mcp.errors import EndpointError, HermesRLError, InvalidValueError, MissingExtraError, NotFoundError
from hermes_rl_mcp.files import make_private_dir
from hermes_rl_mcp.operations.children import program_environ, run_helper, turn
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.paths import bundled_environments
from hermes_rl_mcp.redact import redact, redact_text, secret_values

BUDGET_CHARS = 14_000
"""As JSON: under 8,000 tokens with all else that an answer says."""
VIEW_S = 45.0
"""From the call to the answer. The Hub may have to be asked a dozen times, each time within a second or not at all."""
_AT_ONCE = 3
_MAX_REPLY_BYTES = 4 * 2**20
_MAX_LISTED = 50
_ID_CHARS = 400
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95})(?:/(?P<config>[\w.\-]{1,200}))?")
_QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    **dict.fromkeys(("USE_TORCH", "USE_TF", "USE_JAX"), "0"),
}


@dataclass(frozen=True)
class Place:
    """A local data set."""

    path: Path
    root: Path

    @property
    def name(self) -> str:
        """That it can be asked for by, also in an address, where an absolute path cannot stand."""
        return self.root.name if self.path == self.root else str(self.path.relative_to(self.root))


async def describe(
    context: Context,
    id: str,
    split: str | None = None,
    limit: int = DEFAULT_ROWS,
    offset: int = 0,
    budget_chars: int = BUDGET_CHARS,
) -> DatasetInfo:
    """``id``: a name below one of the allowed folders (``gsm8k_sample``, ``my/data.jsonl``), an absolute path in one,
    or a Hub id (``owner/name``, ``owner/name/config``). An empty split is the first one. ``limit`` and
    ``offset`` in rows.

    Raises InvalidValueError, NotFoundError, EndpointError (the Hub cannot be reached), or MissingExtraError.
    """
    if not 1 <= limit <= MAX_ROWS:
        raise InvalidValueError(
            f"limit {limit} is not 1 to {MAX_ROWS} rows.", hint="Ask for fewer; next_offset leads to the rest."
        )
    if not 0 <= offset <= MAX_OFFSET:
        raise InvalidValueError(f"offset {offset} is not 0 to {MAX_OFFSET}.", hint="Rows beyond are not shown.")
    asked = {"split": split or None, "limit": limit, "offset": offset, "budget_chars": budget_chars}
    request = (await to_thread.run_sync(_request, context, id)).model_copy(update=asked)
    with anyio.move_on_after(VIEW_S):
        async with turn(context.home.turns, "dataset", _AT_ONCE):
            reply = await _ask(context, request)
        if reply.failure is not None:
            raise _error(id, reply.failure)
        assert reply.found is not None
        secrets = secret_values(context.operator.environ)
        return DatasetInfo.model_validate(redact(reply.found.model_dump(mode="json"), secrets))
    raise EndpointError(
        f"The data set '{id}' could not be read within {VIEW_S:g} s.",
        hint="Try again: what was fetched is kept. Or give a local folder.",
    )


async def list_environments(
    context: Context, dataset: str, split: str, limit: int, offset: int, source: str
) -> ListEnvironments:
    """rl_list_environments(dataset=...): that alone. ``limit`` 0 is the usual number of rows."""
    if source:
        raise InvalidValueError("source and dataset exclude each other.", hint="Ask for one after the other.")
    found = await describe(context, dataset, split, limit or DEFAULT_ROWS, offset)
    return ListEnvironments(
        environments=[], count=0, tips=[], dataset=found, truncated=found.truncated, next_offset=found.next_offset
    )


def available(context: Context) -> list[str]:
    """Local data sets that can be named, at most _MAX_LISTED."""
    found: dict[str, None] = {}
    for root in _roots(context):
        for name in _names(root):
            found.setdefault(name)
            if len(found) == _MAX_LISTED:
                return list(found)
    return list(found)


def _request(context: Context, id: str) -> ViewRequest:
    name = id.strip()
    if not name or len(name) > _ID_CHARS or "\0" in name:
        raise InvalidValueError(
            f"A data set is named by 1 to {_ID_CHARS} characters.",
            hint="Name one of these, or a Hub data set (owner/name).",
            details={"available": available(context)},
        )
    if place := local_place(context, name):
        return ViewRequest(id=place.name, path=str(place.path), root=str(place.root), budget_chars=BUDGET_CHARS)
    hub = _HUB_ID.fullmatch(name)
    if hub and not format_of(Path(name)) and ".." not in name and "--" not in name:
        return ViewRequest(id=hub["id"], config=hub["config"], budget_chars=BUDGET_CHARS)
    raise NotFoundError(
        f"There is no local data set '{name}', and it is no Hub id (owner/name).",
        hint="Name one of these, or a Hub data set. Further folders are the operator's to allow (--data-dir).",
        details={"available": available(context)},
    )


def local_place(context: Context, name: str) -> Place | None:
    """Where a local data set of this name lies. Raises InvalidValueError for an absolute path that lies in no allowed
    folder, whether it exists or not."""
    roots = _roots(context)
    if name.startswith(("/", "~")):
        real = Path(os.path.realpath(os.path.expanduser(name)))
        for root in roots:
            if real.is_relative_to(root) and _may_be_shown(real.relative_to(root)):
                return Place(real, root) if real.exists() else None
        raise InvalidValueError(
            f"{name} lies in no folder whose data may be read.",
            hint="The person who starts the server allows folders with --data-dir (HERMES_RL_DATA_DIRS).",
            details={"available": available(context)},
        )
    relative = Path(name.rstrip("/"))
    if not _may_be_shown(relative):
        return None
    for root in roots:
        for path in (root / relative, *([root] if relative == Path(root.name) else [])):
            real = Path(os.path.realpath(path))
            if real.is_relative_to(root) and real.exists():
                return Place(real, root)
    return None


def _may_be_shown(relative: Path) -> bool:
    """Nothing hidden, and no way up."""
    return not any(part.startswith(".") for part in relative.parts)


def _roots(context: Context) -> list[Path]:
    """Links resolved. Folders that do not exist are none."""
    named = [*context.settings.data_dirs, *context.settings.env_dirs, str(bundled_environments())]
    found = [Path(os.path.realpath(folder)) for folder in named]
    return [root for root in dict.fromkeys(found) if root.is_dir()]


def _names(root: Path) -> Iterator[str]:
    """A folder below ``root`` that holds data files is a data set; so is a data file that lies in ``root`` itself, and
    ``root`` if its files are splits."""
    folders: set[str] = set()
    alone = []
    for file in data_files(root):
        relative = file.relative_to(root)
        if len(relative.parts) == 1:
            alone.append(relative.name)
        else:
            folders.add(_data_set_of(relative))
    if len(alone) > 1 and not folders:
        yield root.name
    yield from sorted(folders)
    yield from alone


def _data_set_of(relative: Path) -> str:
    """The folder that a file belongs to; ``data`` and splits are no data sets of their own."""
    parts = list(relative.parts[:-1])
    while len(parts) > 1 and parts[-1].lower() in {"data", "train", "test", "validation", "val", "dev"}:
        parts.pop()
    return "/".join(parts)


async def _ask(context: Context, request: ViewRequest) -> ViewReply:
    cwd = context.home.turns  # has nothing in it that could be taken for a data set
    environ = {**program_environ(context.home, context.operator.environ), **_QUIET, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.dataset_viewer", request.model_dump_json()]
    try:
        await to_thread.run_sync(make_private_dir, cwd)
        done = await run_helper(command, environ, cwd=cwd, max_bytes=_MAX_REPLY_BYTES)
    except OSError as error:
        raise HermesRLError(f"The data set '{request.id}' cannot be read now: {error}.", hint="Try again.") from error
    try:
        return ViewReply.model_validate_json(done.stdout)
    except ValidationError as error:
        said = redact_text(done.last_line, secret_values(context.operator.environ))[:300] or "it said nothing"
        raise HermesRLError(
            f"The process that reads the data set '{request.id}' ended with code {done.code}: {said}",
            hint="It may be damaged, or too large to be looked into.",
        ) from error


def _error(id: str, failure: ViewFailure) -> HermesRLError:
    if failure.kind == "extra":
        return MissingExtraError(failure.error, "train")  # its sentence is what needs the packages
    details = {} if failure.available is None else {"available": failure.available}
    kinds = {"not_found": NotFoundError, "invalid": InvalidValueError, "unreachable": EndpointError}
    return kinds[failure.kind](f"Data set '{id}': {failure.error}", hint=failure.hint, details=details)
