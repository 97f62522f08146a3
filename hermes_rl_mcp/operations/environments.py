"""The first four tools: what there is, which one is meant, what it can be told, and telling it.

The selection and the edits live in the session file; an edit that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from pydantic import JsonValue

from hermes_rl_mcp.catalog.scan import MAX_FILE_BYTES, find, scan
from hermes_rl_mcp.contracts.config import ServerEntry, TrainerConfig
from hermes_rl_mcp.contracts.environments import EnvironmentInfo, ScanResult
from hermes_rl_mcp.contracts.results import (
    ConfigField,
    CurrentConfig,
    EditConfig,
    ListEnvironments,
    LockedConfigField,
    SelectEnvironment,
    SourcePage,
)
from hermes_rl_mcp.errors import EnvironmentFileError, NotSelectedError
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.fitting import PAGE_CHARS, size, sliced
from hermes_rl_mcp.operations.sections import text_page
from hermes_rl_mcp.paths import bundled_environments
from hermes_rl_mcp.redact import is_reference, redact, redact_field
from hermes_rl_mcp.runs.configuration.checks import check_edit, check_value, problems
from hermes_rl_mcp.runs.configuration.fields import coerce_library_value, invalid
from hermes_rl_mcp.runs.configuration.resolve import Resolution, ResolvedField, resolve
from hermes_rl_mcp.runs.configuration.session import Edit, Session

TIPS = [
    "Use rl_select_environment(name) to choose one; the file's stem works as well.",
    "Read the source with rl_list_environments(source=name), as rl://environments/{name}/source, or at file_path.",
    "Data for a new one: rl_list_environments(dataset='owner/name of the Hub, or a local name') shows it.",
    "Try it with rl_test_inference before training, then change its settings with rl_edit_config.",
]


_PROBLEMS = 20
"""Of files that cannot be read, in one answer."""
_CONFIG_CHARS = 18_500
"""Of the fields in one answer, which has little besides; those of the environments here fit at once."""


@dataclass(frozen=True)
class Selected:
    """The selected environment, and everything it would be told now."""

    session: Session
    info: EnvironmentInfo
    resolution: Resolution


async def catalog(context: Context) -> ScanResult:
    """All environments, read from source text."""
    folders = [Path(folder) for folder in context.settings.env_dirs]
    return await anyio.to_thread.run_sync(scan, bundled_environments(), folders)


def source_of(context: Context, info: EnvironmentInfo) -> str:
    """Its file, if it still lies in one of the folders that the operator named. Raises EnvironmentFileError."""
    file = Path(info.file_path)
    for folder in (*map(Path, context.settings.env_dirs), bundled_environments()):
        if file.is_relative_to(folder):
            try:
                return read_file(file, MAX_FILE_BYTES, inside=folder).decode(errors="replace")
            except OSError as error:
                raise EnvironmentFileError(
                    f"{file} cannot be read: {error.strerror}.", hint="rl_list_environments has those that can."
                ) from error
    raise EnvironmentFileError(
        f"{file} lies in no folder of environments.", hint="rl_list_environments has those that do."
    )


async def list_environments(
    context: Context, limit: int = 0, offset: int = 0, source: str = "", page_chars: int = PAGE_CHARS
) -> ListEnvironments:
    """rl_list_environments: a page of them (``limit`` 0 is as many as fit), or of the source text of one."""
    found = await catalog(context)
    if source:
        return await _source(context, find(found.environments, source), limit, offset)
    page = sliced([size(info.model_dump(mode="json")) for info in found.environments], offset, limit, page_chars)
    problems = found.problems[:_PROBLEMS]
    return ListEnvironments(
        environments=found.environments[page.first : page.last],
        count=len(found.environments),
        tips=TIPS,
        problems=problems,
        truncated=page.next_offset is not None or len(problems) < len(found.problems),
        next_offset=page.next_offset,
    )


async def _source(context: Context, info: EnvironmentInfo, limit: int, offset: int) -> ListEnvironments:
    text = await anyio.to_thread.run_sync(source_of, context, info)
    page = text_page(text, offset, limit)
    return ListEnvironments(
        environments=[info],
        count=1,
        tips=[],
        source=SourcePage(name=info.name, file_path=info.file_path, **page.model_dump()),
        truncated=page.truncated,
        next_offset=page.next_offset,
    )


async def select_environment(context: Context, name: str) -> SelectEnvironment:
    """rl_select_environment. Loads the environment's fields first, so one that cannot be loaded is not selected."""
    info = find((await catalog(context)).environments, name)
    schema = await context.describer.describe(info)
    wandb_name = f"{info.name}-{context.now():%Y%m%d-%H%M%S}"
    chosen = Session(
        environment=info.name,
        file_path=info.file_path,
        class_name=info.class_name,
        wandb_name=wandb_name,
        selected_by=context.viewer.name,
    )
    session = await anyio.to_thread.run_sync(context.sessions.select, chosen)
    context.viewer.revision = session.revision
    return SelectEnvironment(
        message=f"Selected environment '{info.name}' with {len(schema.fields)} fields of its own; edits start afresh.",
        environment=info.name,
        file_path=info.file_path,
        revision=session.revision,
    )


async def selected(context: Context) -> Selected:
    """Raises NotSelectedError, EnvironmentFileError or UnknownEnvironmentError."""
    session = context.sessions.read()
    if session.environment is None or session.file_path is None:
        raise NotSelectedError()
    found = (await catalog(context)).environments
    info = located(found, session.environment, session.file_path, session.class_name)
    schema = await context.describer.describe(info)
    return Selected(session, info, resolve(schema, context.settings.profile, session.edits))


def located(found: Sequence[EnvironmentInfo], name: str, file_path: str, class_name: str | None) -> EnvironmentInfo:
    """A class that was chosen earlier, as it is on disk now."""
    for info in found:
        if info.file_path == file_path and info.class_name == class_name:
            return info
    if not Path(file_path).is_file():
        raise EnvironmentFileError(
            f"Environment file not found for '{name}': {file_path}.",
            hint="Call rl_list_environments and select again.",
            details={"available": [info.name for info in found]},
        )
    return find(found, name)  # the class was renamed within its file, or this server searches other folders


async def get_current_config(context: Context, limit: int = 0, offset: int = 0, text: str = "") -> CurrentConfig:
    """rl_get_current_config: a page of the fields, those that can be changed first; ``limit`` 0 is as many as fit.

    ``text`` leaves those that have it in name or description, without regard to case.
    """
    now = await selected(context)
    fields = [_shown(now, field) for field in now.resolution.fields.values()]
    wanted = text.lower()
    fields = [field for field in fields if wanted in f"{field.name} {field.description}".lower()]
    fields.sort(key=lambda field: isinstance(field, LockedConfigField))
    page = sliced([size(field.model_dump(mode="json")) for field in fields], offset, limit, _CONFIG_CHARS)
    rows = fields[page.first : page.last]
    context.viewer.revision = now.session.revision
    return CurrentConfig(
        environment=now.info.name,
        count=len(fields),
        configurable_fields=[field for field in rows if not isinstance(field, LockedConfigField)],
        locked_fields=[field for field in rows if isinstance(field, LockedConfigField)],
        tip=_tip(now.resolution),
        profile=context.settings.profile.name,
        revision=now.session.revision,
        run_limits=context.settings.limits.model_dump(exclude_none=True),
        truncated=page.next_offset is not None,
        next_offset=page.next_offset,
    )


def _shown(now: Selected, field: ResolvedField) -> ConfigField:
    value = now.session.wandb_name if field.name == "wandb_name" and field.managed else field.shown
    rest = {
        "name": field.name,
        "type": field.info.type,
        "default": redact_field(field.name, field.default),
        "description": field.info.description,
        "current_value": value,
    }
    if field.locked:
        return LockedConfigField.model_validate({**rest, "locked_value": value})
    return ConfigField.model_validate({**rest, "ceiling": field.ceiling})


async def edit_config(context: Context, field: str, value: JsonValue, revision: int | None = None) -> EditConfig:
    """rl_edit_config. The value is judged and coerced before anything is written.

    Raises RevisionConflictError if somebody else changed the session since ``revision``, or without one since this
    server last showed it.
    """
    now = await selected(context)
    coerced = await _coerced(context, now, field, value)
    edit = Edit(field, coerced, context.viewer.name, now.session.selection, revision, context.viewer.revision)
    session = await anyio.to_thread.run_sync(context.sessions.edit, edit)
    context.viewer.revision = session.revision
    after = resolve(now.resolution.schema, context.settings.profile, session.edits)
    warnings = [str(problem) for problem in problems(after)]
    shown = redact_field(field, coerced)
    message = f"Updated {field} = {shown!r}."
    if warnings:
        message += " A run cannot start yet: " + " ".join(warnings)
    return EditConfig(
        message=message,
        field=field,
        value=shown,
        config=redact(session.edits),
        revision=session.revision,
        environment=now.info.name,
    )


async def _coerced(context: Context, now: Selected, field: str, value: JsonValue) -> JsonValue:
    """As every section that has the field takes it. Raises InvalidValueError or UnknownFieldError."""
    target = now.resolution.editable(field)
    check_edit(now.resolution, context.home, field, value)
    coerced = value
    if "env" in target.sections:
        # Beside what was set before: a value may only make sense together with it.
        others = {name: one for name, one in now.session.edits.items() if name != field and _is_env(now, name)}
        reply = await context.describer.validate(now.info, {**others, field: value})
        if set(reply.errors) - set(others):
            raise invalid(field, value, reply.errors.get(field) or "; ".join(reply.errors.values()))
        coerced = reply.values.get(field, value)
    if "openai" in target.sections and field in ServerEntry.model_fields:
        coerced = coerce_library_value(ServerEntry, field, coerced)
    if "trainer" in target.sections:
        coerced = coerce_library_value(TrainerConfig, field, coerced)
    check_value(now.resolution, field, coerced)
    return value if is_reference(value) else coerced  # a secret's own type would show stars


def _is_env(now: Selected, name: str) -> bool:
    found = now.resolution.fields.get(name)
    return found is not None and "env" in found.sections


def _tip(resolution: Resolution) -> str:
    found = problems(resolution)
    if found:
        return "A run cannot start yet: " + " ".join(str(problem) for problem in found)
    return (
        "Change a field with rl_edit_config(field, value). Locked fields are the operator's. "
        "Then rl_test_inference, then rl_start_training."
    )
