"""From what the launcher decided to what the processes read: ``request.json`` plus ports makes ``config.yaml``."""

from __future__ import annotations

import secrets

import yaml
from pydantic import JsonValue

from hermes_rl_mcp import __version__
from hermes_rl_mcp.contracts.config import Ports, RunConfig, RunSection, ServerEntry
from hermes_rl_mcp.contracts.runs import START_ORDER, ProcessRecord, RunRecord, RunRequest, RunStatus
from hermes_rl_mcp.paths import Home


def run_name(request: RunRequest) -> str:
    """Label of the run, here and in W&B."""
    return request.trainer.wandb_run_name or f"{request.environment}-{request.run_id}"


def first_record(home: Home, request: RunRequest) -> RunRecord:
    """The record of a run that nobody has begun to carry out."""
    return RunRecord(
        run_id=request.run_id,
        environment=request.environment,
        base_model=request.base_model,
        profile=request.profile,
        status=RunStatus.QUEUED,
        detail="its supervisor is being started",
        created_at=request.created_at,
        total_steps=_int(request.env, "total_steps"),
        group_size=_int(request.env, "group_size"),
        batch_size=_int(request.env, "batch_size"),
        wandb_project=request.trainer.wandb_project,
        wandb_run_name=run_name(request),
        processes={name: ProcessRecord(log=str(home.log(name, request.run_id))) for name in START_ORDER},
        device=request.device,
        versions={"hermes_rl_mcp": __version__},
        resumed_from=request.resume_from,
        resumed_step=request.resume_step,
    )


def make_config(request: RunRequest, ports: Ports) -> RunConfig:
    """The whole configuration, with a fresh nonce and path prefix."""
    # Never begins with "v1": Atropos' clients take every "/v1" out of base_url.
    prefix = "r" + secrets.token_hex(16)
    api = f"http://127.0.0.1:{ports.rollout_api}/{prefix}"
    name = run_name(request)
    return RunConfig(
        run=RunSection(
            run_id=request.run_id,
            environment=request.environment,
            env_file=request.env_file,
            env_class=request.env_class,
            env_base=request.env_base,
            env_sha256=request.env_sha256,
            profile=request.profile,
            base_model=request.base_model,
            model_path=request.model_path,
            nonce=secrets.token_hex(16),
            path_prefix=prefix,
        ),
        ports=ports,
        env={
            **request.env,
            "rollout_server_url": api,
            "tokenizer_name": request.tokenizer_name,
            "wandb_name": request.env.get("wandb_name") or name,
        },
        openai=[
            ServerEntry.model_validate(
                {
                    **request.server_values,
                    # Atropos' clients load the tokenizer by this name, so it is the loadable one.
                    "model_name": request.model_path,
                    "base_url": f"http://127.0.0.1:{ports.trainer}/{prefix}/v1",
                    "api_key": "x",
                    "server_type": request.server_type,
                }
            )
        ],
        trainer=request.trainer.model_copy(update={"wandb_run_name": name, "device": _device(request)}),
    )


def to_yaml(config: RunConfig) -> str:
    """The text of ``config.yaml``."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _device(request: RunRequest) -> str:
    """A run that claimed the CPU must not take a GPU because torch sees one."""
    return "cpu" if request.device == "cpu" else request.trainer.device


def _int(values: dict[str, JsonValue], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int):
        raise ValueError(f"request.env lacks a whole number for {name!r}; found {value!r}")
    return value
