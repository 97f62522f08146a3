"""What an environment tells people: scores by their parts, what an evaluation found, the newest rollouts as text.

The hooks have Atropos' names; an environment may override them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl_mcp.envs.rollout_table import RolloutTable
from hermes_rl_mcp.envs.sampling import SamplingClient


@dataclass(frozen=True)
class Score:
    """A reward and the named, unweighted parts it was made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalReport:
    """What ``evaluate`` found. Metric names such as ``eval/percent_correct``; samples are JSON objects."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)
    generation_parameters: dict[str, Any] = field(default_factory=dict)
    task_name: str = ""
    """In ``metrics.json``; empty = the environment's name."""
    model_name: str = ""
    """The same; empty = the first server's."""


class Telling:
    """Part of ``BaseEnv``."""

    rollout_table: RolloutTable
    server: SamplingClient
    run_dir: Path | None
    curr_step: int
    logged_evaluation: EvalReport | None = None
    """What ``evaluate_log`` was told."""

    async def add_rollouts_for_wandb(self, group: Mapping[str, Any], item: Any = None) -> None:
        """Called for each group that was sent, to keep some of its rollouts for people (``num_rollouts_to_keep``)."""
        self.rollout_table.add(
            group, self.curr_step, lambda tokens_T: self.server.renderer.decode(tokens_T, special=True)
        )

    async def create_rollout_table(self, metrics: dict[str, float]) -> dict[str, float]:
        """Called by ``wandb_log``: writes the rollouts kept to ``env_rollouts.jsonl``; metrics go on as they are."""
        self.rollout_table.write(self.run_dir)
        return metrics

    async def evaluate_log(
        self,
        metrics: Mapping[str, float],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Atropos' way to hand over what ``evaluate`` found, which then returns nothing. Times are taken anyway, and
        the table is always printed."""
        self.logged_evaluation = EvalReport(
            dict(metrics),
            [dict(one) for one in samples or []],
            dict(generation_parameters or {}),
            task_name or "",
            model_name or "",
        )
