"""What an environment with tools can be told besides every environment's fields: the original's names and defaults."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from hermes_rl_mcp.agent.budget import DEFAULT_RESULT_CHARS, BudgetConfig
from hermes_rl_mcp.agent.distributions import DISTRIBUTIONS
from hermes_rl_mcp.agent.loop import MAX_TURNS
from hermes_rl_mcp.agent.mcp_tools import mcp_servers
from hermes_rl_mcp.agent.parsers import get_parser
from hermes_rl_mcp.agent.pool import DEFAULT_SIZE
from hermes_rl_mcp.agent.sandbox.docker import DEFAULT_IMAGE, DockerOptions
from hermes_rl_mcp.agent.toolsets import BUILTIN
from hermes_rl_mcp.envs.config import BaseEnvConfig

AUTO = "auto"


class HermesAgentEnvConfig(BaseEnvConfig):
    """Fields of an environment whose policy calls tools."""

    enabled_toolsets: list[str] | None = None
    """Toolsets the policy has; null = every one that can be had here. Not used where distribution is set."""
    disabled_toolsets: list[str] | None = None
    """Toolsets taken away from those."""
    distribution: str | None = None
    """Draws the toolsets of each group from a named distribution (default, research, terminal_only, ...)."""
    toolset_seed: int = 0
    """Seed of those draws."""
    max_agent_turns: int = Field(MAX_TURNS, ge=1, le=1000)
    """Most answers of the policy in one rollout."""
    max_rollout_tokens: int | None = Field(None, ge=16)
    """Tokens of a whole rollout, prompt and tool results included; a conversation that has no room for another answer
    ends there and is scored as it is. Null = what the trainer takes (max_token_trainer_length)."""
    system_prompt: str | None = None
    """Stands before the task."""
    agent_temperature: float = Field(1.0, ge=0, le=10)
    """Sampling temperature in training."""
    terminal_backend: Literal["local", "docker"] = "local"
    """Where a rollout's commands run: in a process group and folder of its own on this machine, or in a container."""
    terminal_timeout: int = Field(120, ge=1)
    """Seconds one command may take where the policy names none."""
    terminal_lifetime: int = Field(3600, ge=1)
    """Seconds one rollout may take in all; what it has by then is scored."""
    docker_image: str = DEFAULT_IMAGE
    """Image of the docker backend; needs sh and coreutils."""
    docker_network: str = "none"
    """Network of the container: none, bridge or a network's name."""
    dataset_name: str | None = None
    """Items to ask: a file or folder (jsonl, json, csv, parquet) or a Hub id. Null = the environment's own."""
    dataset_split: str = "train"
    """Split of it."""
    prompt_field: str = "prompt"
    """Its column with the task."""
    tool_pool_size: int = Field(DEFAULT_SIZE, ge=1, le=4096)
    """Threads for tools, reward functions and sandboxes; each rollout needs one at a time."""
    tool_call_parser: str = AUTO
    """How the policy writes calls in its text: hermes, qwen, llama3_json, mistral, ... auto = by tokenizer_name, hermes
    if that tells nothing. Endpoints of type openai take calls apart themselves."""
    default_result_size_chars: int = Field(DEFAULT_RESULT_CHARS, ge=1)
    """Longer results of a tool are kept in the sandbox, and the policy sees the beginning."""
    turn_budget_chars: int = Field(200_000, ge=1)
    """The same for all results of one turn together."""
    preview_size_chars: int = Field(1_500, ge=0)
    """How much of such a result is shown."""
    tool_result_overrides: dict[str, PositiveInt] | None = None
    """Tool name to its own limit in characters."""
    extra_body: dict[str, Any] | None = None
    """Further fields of each request to an endpoint of type openai (a broker's provider options)."""
    mcp_servers: dict[str, dict[str, Any]] | None = None
    """Further toolsets: MCP servers in the form of clients' files, {name: {command, args, env} or {url, headers}}."""
    discount_factor: float = Field(1.0, ge=0, le=1)
    """A turn's advantage is the rollout's times this for each turn that came after it. 1 = all turns count alike."""
    explore_temperature_share: float = Field(0.0, ge=0, le=1)
    """Share of training rollouts sampled at explore_temperature. They are trained on with the logprobs of the
    distribution they were sampled from."""
    explore_temperature: float = Field(1.5, gt=0, le=10)
    """Their temperature."""

    @field_validator("terminal_backend", mode="before")
    @classmethod
    def _known_backend(cls, value: Any) -> Any:
        if value in ("modal", "daytona", "ssh", "singularity"):
            raise ValueError(f"{value} is not supported here; use local, or docker where an engine runs")
        return value

    @field_validator("tool_call_parser")
    @classmethod
    def _known_parser(cls, value: str) -> str:
        if value != AUTO:
            get_parser(value)
        return value

    @field_validator("distribution")
    @classmethod
    def _known_distribution(cls, value: str | None) -> str | None:
        if value is not None and value not in DISTRIBUTIONS:
            raise ValueError(f"there is no distribution {value!r}; there are: {', '.join(DISTRIBUTIONS)}")
        return value

    @model_validator(mode="after")
    def _known_toolsets(self) -> Self:
        servers = self.mcp_servers or {}
        mcp_servers(servers)
        named = [*(self.enabled_toolsets or ()), *(self.disabled_toolsets or ())]
        BUILTIN.require(name for name in named if name not in servers)
        return self

    def build_budget_config(self) -> BudgetConfig:
        """The original's name for the four size fields together."""
        return BudgetConfig(
            self.default_result_size_chars,
            self.turn_budget_chars,
            self.preview_size_chars,
            dict(self.tool_result_overrides or {}),
        )

    def docker_options(self) -> DockerOptions:
        return DockerOptions(self.docker_image, self.docker_network, lifetime_s=self.terminal_lifetime)
