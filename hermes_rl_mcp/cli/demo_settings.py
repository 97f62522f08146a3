"""What the demo sets for each environment and model: the one table of its defaults, and how command-line options join.

The values are an agent's choices, not the product's defaults: everything goes through ``rl_edit_config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pydantic import JsonValue

from hermes_rl_mcp.errors import InvalidValueError

_NOTHING: Mapping[str, JsonValue] = MappingProxyType({})
TABLE: Mapping[tuple[str, str], Mapping[str, JsonValue]] = MappingProxyType(
    {
        # The environment brings group, batch and learning rate; the demo decides only how long it runs.
        ("arithmetic", "builtin:tiny"): {"total_steps": 60},
        # This model puts a number into a box in about one answer of ten, mostly in short ones: 32 answers nearly always
        # hold one, so that both steps have a signal.
        ("gsm8k", "builtin:smollm2-135m"): {
            "total_steps": 2,
            "group_size": 8,
            "batch_size": 32,
            "max_token_length": 112,
        },
    }
)
DATA_DIR_FIELDS = ("data_dir", "dataset_path", "data_path", "dataset_name")
"""Names under which environments take a local data folder; the first that the environment has is set."""


@dataclass(frozen=True)
class DemoOptions:
    """The command line of ``hermes-rl demo``."""

    environment: str = "arithmetic"
    model: str = "builtin:tiny"
    data_dir: str | None = None
    steps: int | None = None
    group_size: int | None = None
    batch_size: int | None = None
    max_tokens: int | None = None
    sets: Mapping[str, JsonValue] = field(default_factory=dict)
    keep_selection: bool = False


def parse_set(item: str) -> tuple[str, JsonValue]:
    """``field=value``; the value is JSON where it parses as such, else text."""
    name, equals, text = item.partition("=")
    if not equals or not name.strip():
        raise InvalidValueError(f"--set {item!r} is not field=value.", hint="For example: --set learning_rate=5e-4")
    try:
        value: JsonValue = json.loads(text)
    except json.JSONDecodeError:
        value = text
    return name.strip(), value


def edits(options: DemoOptions, environment: str, fields: Sequence[str]) -> dict[str, JsonValue]:
    """Field to value in the order in which they are set: model, table, named options, ``--set``."""
    values: dict[str, JsonValue] = {"model_name": options.model}
    values.update(TABLE.get((environment, options.model), _NOTHING))
    if options.data_dir is not None:
        values[_data_field(environment, fields)] = options.data_dir
    named = {
        "total_steps": options.steps,
        "group_size": options.group_size,
        "batch_size": options.batch_size,
        "max_token_length": options.max_tokens,
    }
    values.update({name: value for name, value in named.items() if value is not None})
    values.update(options.sets)
    return values


def _data_field(environment: str, fields: Sequence[str]) -> str:
    for name in DATA_DIR_FIELDS:
        if name in fields:
            return name
    raise InvalidValueError(
        f"Environment '{environment}' has no field for a data folder.",
        hint="Leave --data-dir out, or name it by --set.",
    )
