"""Does a run with these values make sense? Ceilings, the allow-list of models, and values that must fit each other."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path

from pydantic import JsonValue

from hermes_rl_mcp.contracts.profiles import Profile
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.redact import SECRET_PREFIX, holds_secret
from hermes_rl_mcp.runs.configuration.addresses import hosts_of, is_metadata_service, needs_permission
from hermes_rl_mcp.runs.configuration.fields import as_int, is_int
from hermes_rl_mcp.runs.configuration.resolve import Resolution
from hermes_rl_mcp.runs.forecast.modelfiles import SMOLLM2, TINY
from hermes_rl_mcp.untrusted import HIDDEN

_NAMES = ("model_name", "tokenizer_name", "wandb_name", "wandb_project", "wandb_group", "wandb_run_name")
"""They become arguments, labels and file names of other programs."""
_WRITTEN = ("data_path_to_save_groups", "data_dir_to_save_evals")
"""Where an environment writes to."""
_RELATIVE = "Give a relative path such as 'saved/groups.jsonl': it counts from the run's own folder."
_BUILTIN_OR_HUB = re.compile(r"(builtin:)?[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")
_MAX_NAME = 300


def check_value(resolution: Resolution, name: str, value: JsonValue) -> None:
    """Ceiling and allow-list for one coerced value. Raises InvalidValueError."""
    field = resolution.editable(name)
    if field.ceiling is not None and isinstance(value, int | float) and value > field.ceiling:
        raise InvalidValueError(
            f"{name} = {value} is above the operator's ceiling of {field.ceiling:g}.",
            hint=f"Choose at most {field.ceiling:g}.",
            details={"field": name, "ceiling": field.ceiling},
        )
    if name in _NAMES:
        check_name(name, value)
    if name == "model_name":
        check_model(resolution.profile, value)
    for host in hosts_of(value):
        check_host(name, host)
    if name == "group_size" and is_int(value) and as_int(value) < 2:
        raise InvalidValueError(
            f"group_size = {value} gives no signal: GRPO compares the answers of a group with each other.",
            hint="Choose at least 2, usually 4 to 16.",
            details={"field": name},
        )
    if name in ("total_steps", "batch_size") and is_int(value) and as_int(value) < 1:
        if name == "batch_size" and value == -1:
            return
        raise InvalidValueError(f"{name} = {value} is too small.", hint="Choose at least 1.", details={"field": name})


def check_model(profile: Profile, model: JsonValue) -> None:
    """Raises InvalidValueError if the operator's allow-list has no pattern for this model."""
    if isinstance(model, str) and not (_BUILTIN_OR_HUB.match(model) or _is_plain_path(model)):
        raise InvalidValueError(
            f"model_name {model!r} is neither a Hub id nor the absolute path of a folder.",
            hint="For example builtin:tiny, Qwen/Qwen3-0.6B or /models/mine.",
            details={"field": "model_name"},
        )
    if isinstance(model, str) and model.startswith("builtin:") and model not in (TINY, SMOLLM2):
        raise InvalidValueError(
            f"model_name '{model}' is no model that comes with this package.",
            hint=f"These do: {TINY}, {SMOLLM2}.",
            details={"field": "model_name"},
        )
    if not isinstance(model, str) or not any(fnmatch.fnmatchcase(model, pattern) for pattern in profile.allowed_models):
        raise InvalidValueError(
            f"model_name '{model}' is not on the operator's allow-list.",
            hint="Choose one that matches allowed_models; the person who starts the server can add more "
            "(HERMES_RL_ALLOW_MODELS).",
            details={"field": "model_name", "allowed_models": list(profile.allowed_models)},
        )


def check_edit(resolution: Resolution, home: Home, name: str, value: JsonValue) -> None:
    """What an agent may not put into a configuration, whatever its type: keys, addresses of the local network, files
    outside of the home. Raises InvalidValueError."""
    if holds_secret(name, value):
        raise InvalidValueError(
            f"{name} would put a secret into the configuration, which is kept and shown.",
            hint=f"The person who runs the server sets it: hermes-rl config set {SECRET_PREFIX}NAME - ; then set the "
            f"field to ${SECRET_PREFIX}NAME, which only the environment's process replaces.",
            details={"field": name},
        )
    for host in hosts_of(value):
        if needs_permission(host, resolution.profile.allowed_hosts):
            raise InvalidValueError(
                f"{name} names {host}, a host of the local network.",
                hint="The person who runs the server can allow it: HERMES_RL_ALLOW_HOSTS.",
                details={"field": name, "host": host},
            )
    if name in _WRITTEN and isinstance(value, str) and value:
        _check_written(home, name, value)


def _check_written(home: Home, name: str, value: str) -> None:
    """An environment may write into its run's folder and elsewhere in the home, but not where others have the word."""
    if "\0" in value:
        raise InvalidValueError(f"{name} = {value!r} is no path.", hint=_RELATIVE, details={"field": name})
    own = RunPaths(Path(os.path.realpath(home.runs)) / "any")
    target = Path(os.path.realpath(own.dir / Path(value).expanduser()))
    if not target.is_relative_to(os.path.realpath(home.root)):
        raise InvalidValueError(
            f"{name} = {value!r} lies outside of {home.root}.", hint=_RELATIVE, details={"field": name}
        )
    taken = target.is_relative_to(own.checkpoints) or target == Path(os.path.realpath(home.env_file))
    state = target.is_relative_to(os.path.realpath(home.rl)) and (own.dir not in target.parents)
    if taken or state:
        raise InvalidValueError(
            f"{name} = {value!r} lies where only this program itself writes.", hint=_RELATIVE, details={"field": name}
        )


def check_name(name: str, value: JsonValue) -> None:
    """Raises InvalidValueError for a text that another program could take for an option or for several lines."""
    if isinstance(value, str) and (value.startswith("-") or HIDDEN.search(value) or "\n" in value or "\t" in value):
        raise InvalidValueError(
            f"{name} = {value!r} cannot be a name.",
            hint="It must not begin with '-' nor hold line breaks, tabs or invisible characters.",
            details={"field": name},
        )
    if isinstance(value, str) and len(value) > _MAX_NAME:
        raise InvalidValueError(
            f"{name} is longer than {_MAX_NAME} characters.", hint="Choose a shorter one.", details={"field": name}
        )


def check_host(name: str, host: str) -> None:
    """Raises InvalidValueError for the address of a machine's metadata service. Nobody can allow it."""
    if is_metadata_service(host):
        raise InvalidValueError(
            f"{name} names {host}, an address of the machine's own link or of its cloud's metadata service.",
            hint="Give the address of a model server or judge.",
            details={"field": name, "host": host},
        )


def _is_plain_path(model: str) -> bool:
    return os.path.isabs(model) and os.path.normpath(model) == model.rstrip("/") and not model.startswith("//")


def problems(resolution: Resolution) -> list[InvalidValueError]:
    """Why a run with these values could not start; empty if it could."""
    found: list[InvalidValueError] = []
    for name, field in resolution.fields.items():
        if not field.locked:
            try:
                check_value(resolution, name, field.value)
            except InvalidValueError as error:
                found.append(error)
    try:
        resolution.trainer_config()
    except InvalidValueError as error:
        found.append(error)
    if resolution.fields["model_name"].locked:
        try:
            check_model(resolution.profile, resolution.model_name)
        except InvalidValueError as error:
            found.append(error)
    found.extend(_shape_problems(resolution))
    return found


def _shape_problems(resolution: Resolution) -> list[InvalidValueError]:
    found: list[InvalidValueError] = []
    numbers: dict[str, int] = {}
    for name in ("group_size", "batch_size", "total_steps", "max_token_length"):
        value = resolution.fields[name].value if name in resolution.fields else None
        if not is_int(value):
            found.append(
                InvalidValueError(
                    f"{name} must be a whole number, not {value!r}.",
                    hint=f"Set it with rl_edit_config(field='{name}').",
                    details={"field": name},
                )
            )
        else:
            numbers[name] = as_int(value)
    group, batch = numbers.get("group_size", 0), numbers.get("batch_size", 0)
    if group >= 2 and batch >= 1:
        if batch < group:
            found.append(
                InvalidValueError(
                    f"batch_size = {batch} is smaller than group_size = {group}: no group fits into a batch.",
                    hint=f"Set batch_size to {group} or a multiple of it; it counts sequences, not groups.",
                    details={"field": "batch_size", "valid_values": [group, 2 * group]},
                )
            )
        elif batch % group:
            below, above = batch - batch % group, batch - batch % group + group
            found.append(
                InvalidValueError(
                    f"batch_size = {batch} is not divisible by group_size = {group}.",
                    hint=f"Set batch_size to {below} or {above} (it counts sequences), or change group_size.",
                    details={"field": "batch_size", "valid_values": [below, above]},
                )
            )
    longest = resolution.fields["max_token_trainer_length"].value
    tokens = numbers.get("max_token_length", 0)
    if is_int(longest) and tokens > as_int(longest):
        found.append(
            InvalidValueError(
                f"max_token_length = {tokens} is above max_token_trainer_length = {longest}: the trainer would cut "
                "every full-length answer.",
                hint="Lower max_token_length or raise max_token_trainer_length.",
                details={"field": "max_token_length"},
            )
        )
    return found
