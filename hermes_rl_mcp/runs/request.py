"""Makes the RunRequest: everything the launcher decides, before there are ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from hermes_rl_mcp.contracts.environments import EnvironmentInfo
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.configuration.resolve import Resolution

BUILTIN = "builtin:"
_LAUNCHER_ONLY = ("model_name", "server_type", "base_url", "api_key")
"""Server fields with places of their own in the request."""


@dataclass(frozen=True)
class RunIdentity:
    """What is decided about a run besides its configuration."""

    run_id: str
    created_at: str
    env_sha256: str
    device: Literal["cpu", "cuda"]

    def label(self, environment: str) -> str:
        """The run's name in W&B and in lists."""
        return f"{environment}-{self.run_id}"


def model_path(home: Home, model: str) -> str:
    """What to load: the folder a ``builtin:`` model is put into, else the name itself."""
    return str(home.model_dir(model)) if model.startswith(BUILTIN) else model


def tokenizer_name(resolution: Resolution, home: Home) -> str:
    """Follows the model, unless the profile or the user decided otherwise."""
    field = resolution.fields.get("tokenizer_name")
    decided = field is not None and not field.managed and (field.locked or "tokenizer_name" in resolution.edits)
    if field is not None and decided and isinstance(field.value, str) and field.value:
        return field.value
    return model_path(home, resolution.model_name)


def server_type(resolution: Resolution) -> Literal["vllm", "sglang"]:
    """The wire the environment speaks to the trainer's sampler."""
    field = resolution.fields["server_type"]
    return "sglang" if not field.managed and field.value == "sglang" else "vllm"


def env_values(resolution: Resolution, home: Home, label: str) -> dict[str, JsonValue]:
    """The ``env`` section, with the managed values that are known before the ports are."""
    values = resolution.section("env")
    if "tokenizer_name" in resolution.fields:
        values["tokenizer_name"] = tokenizer_name(resolution, home)
    name = resolution.fields.get("wandb_name")
    if name is not None and (name.managed or not name.value):
        values["wandb_name"] = label
    return values


def build_request(
    resolution: Resolution, info: EnvironmentInfo, home: Home, identity: RunIdentity, idempotency_key: str | None = None
) -> RunRequest:
    """Raises InvalidValueError if locks and defaults do not form a TrainerConfig."""
    label = identity.label(info.name)
    trainer = resolution.trainer_config()
    if not trainer.wandb_run_name:
        trainer = trainer.model_copy(update={"wandb_run_name": label})
    server = {k: v for k, v in resolution.section("openai").items() if k not in _LAUNCHER_ONLY}
    return RunRequest(
        run_id=identity.run_id,
        created_at=identity.created_at,
        environment=info.name,
        env_file=info.file_path,
        env_class=info.class_name,
        env_base=info.base,
        env_sha256=identity.env_sha256,
        profile=resolution.profile.name,
        base_model=resolution.model_name,
        model_path=model_path(home, resolution.model_name),
        tokenizer_name=tokenizer_name(resolution, home),
        server_type=server_type(resolution),
        server_values=server,
        device=identity.device,
        env=env_values(resolution, home, label),
        trainer=trainer,
        idempotency_key=idempotency_key,
    )
