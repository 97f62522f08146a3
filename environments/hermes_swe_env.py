"""Programming tasks for an agent with a terminal: the program it leaves behind is tested where it has never been.

When the agent is done, its Python files are copied into a second sandbox, and the tests run there against
``solution.py`` (``hermes_swe_checker``). Invariant: the agent sees no test, and nothing that it changes outside its
Python files (interpreter, site packages, start-up files, processes) exists where they run.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, JsonValue, field_validator

from environments.hermes_swe_tasks import MAKERS, TASKS, SweTask, tasks_of
from environments.hermes_swe_verdict import failure_of
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.agent.sandbox.factory import task_sandbox
from hermes_rl_mcp.envs import APIServerConfig, BaseEnvConfig, Score, ScoredDataItem
from hermes_rl_mcp.envs.data import held_out_apart, load_rows
from hermes_rl_mcp.envs.hermes import AgentRollout, HermesAgentBaseEnv
from hermes_rl_mcp.envs.hermes_config import HermesAgentEnvConfig
from hermes_rl_mcp.errors import PreflightError

SYSTEM = "You are a careful programmer with a terminal. Try your program out before you stop."
SOLUTION = "solution.py"
PROMPT = "{task}\n\nSave the whole program as solution.py in the current folder; others will import it."
MOST_FILES = 50
MOST_NAMES_BYTES = 50_000
LOOK_S = 60.0
OUTPUT_BYTES = 200_000
"""Kept of what the tests print; the verdict comes last."""


class HermesSweConfig(HermesAgentEnvConfig):
    """Tasks come from a seed, or from a data set with tests, such as bigcode/humanevalpack/python (split test)."""

    enabled_toolsets: list[str] | None = Field(["terminal", "file", "web"])
    """Toolsets the policy has; those that cannot be had here are left out."""
    system_prompt: str | None = SYSTEM
    """Stands before the task."""
    dataset_name: str | None = None
    """Tasks: a file or folder (jsonl, json, csv, parquet) or a Hub id (bigcode/humanevalpack/python). Null = tasks made
    from the seed."""
    dataset_split: str = "test"
    """Split of it."""
    test_field: str | None = None
    """Its column with the tests: asserts, functions test_..., or HumanEval's check(candidate). Null = test, test_code
    or tests."""
    test_timeout: float = Field(60.0, gt=0)
    """Seconds the tests of one solution may take."""
    partial_credit: float = Field(0.1, ge=0, lt=1)
    """Reward for a Python file that does not pass."""
    task_kinds: list[str] = Field(list(MAKERS), min_length=1)
    """Kinds of tasks that are made: scaled, clamp, above, every, swap, digits, longer."""
    seed: int = Field(0, ge=0)
    """Order of the training tasks."""

    @field_validator("task_kinds")
    @classmethod
    def _known_kinds(cls, value: list[str]) -> list[str]:
        unknown = [one for one in value if one not in MAKERS]
        if unknown:
            raise ValueError(f"there is no kind of task {unknown[0]!r}; there are: {', '.join(MAKERS)}")
        return value


class HermesSweEnv(HermesAgentBaseEnv):
    """Programming tasks solved with tools: 1.0 when hidden tests pass, 0.1 for a Python file that does not, else 0."""

    name = "hermes-swe"
    env_config_cls = HermesSweConfig
    trainer_defaults: ClassVar[dict[str, JsonValue]] = {"max_token_trainer_length": 8192}
    typical_tokens = (2000, 600)

    config: HermesSweConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = HermesSweConfig(
            group_size=8,
            batch_size=32,
            max_token_length=1024,
            total_steps=200,
            steps_per_eval=50,
            max_batches_offpolicy=2,
            worker_timeout=3600,  # on a CPU thirty turns take minutes
            ensure_scores_are_not_same=False,
            use_wandb=False,
            tokenizer_name="builtin:smollm2-135m",
        )
        return config, [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    async def setup(self) -> None:
        self._rng = random.Random(self.config.seed)
        self._drawn = 0
        self._rewards: list[Score] = []
        self._tasks: list[SweTask] = []
        self._held_out: list[SweTask] | None = None
        if self.config.dataset_name is not None:
            asked = self.config.prompt_field
            rows = load_rows(self.config.dataset_name, self.config.dataset_split, [asked])
            tasks = [{"task": one, "text": one.text} for one in tasks_of(rows, asked, self.config.test_field)]
            trained, kept = held_out_apart(tasks, "text")
            self._tasks, self._held_out = ([row["task"] for row in one] for one in (trained, kept))
            if not self._tasks:
                raise PreflightError(
                    f"All rows of {self.config.dataset_name} are held out: they have too few different tasks.",
                    hint="Add rows with other tasks.",
                )

    async def get_next_item(self) -> SweTask:
        self._drawn += 1
        if self._tasks:
            return self._tasks[(self._drawn - 1) % len(self._tasks)]
        return TASKS.draw(self._rng, self.config.task_kinds)

    def item_key(self, item: SweTask) -> str:
        return item.text

    def format_prompt(self, item: SweTask) -> str:
        return PROMPT.format(task=item.text.rstrip())

    def compute_reward(self, item: SweTask, result: AgentResult, ctx: ToolContext) -> Score:
        with tempfile.TemporaryDirectory(prefix="hermes-rl-swe-") as folder:
            files = _copied(ctx, Path(folder))
            failure = self._failure(item, files, ctx.task_id) if SOLUTION in files else f"there is no {SOLUTION}"
        has_written = any(files.values())
        value = 1.0 if not failure else self.config.partial_credit * has_written
        return Score(value, {"correct": float(not failure), "wrote_program": float(has_written)})

    async def get_eval_items(self, count: int) -> Sequence[SweTask]:
        if self._held_out is not None:
            return self._held_out[:count]
        return TASKS.for_evaluation(self.config.task_kinds, count)

    async def finish(self, rollout: AgentRollout, scored: ScoredDataItem) -> ScoredDataItem:
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        return scored

    async def wandb_log(self, metrics: dict[str, float] | None = None) -> None:
        values = dict(metrics or {})
        if rewards := self._rewards:
            self._rewards = []
            values["train/avg_reward"] = fmean(one.value for one in rewards)
            values["train/pass_rate"] = fmean(one.parts["correct"] for one in rewards)
        await super().wandb_log(values)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "_drawn": self._drawn})

    def load_checkpoint(self) -> None:
        """Goes on in the order of tasks where the interrupted run was."""
        super().load_checkpoint()
        self._rng = random.Random(self.config.seed)
        if not self._tasks:
            for _ in range(self._drawn):
                TASKS.draw(self._rng, self.config.task_kinds)

    def _failure(self, item: SweTask, files: Mapping[str, bytes], task_id: str) -> str:
        """Why the tests do not pass; empty if they do. In a sandbox that the agent never had."""
        sandbox = task_sandbox(self.config.terminal_backend, f"{task_id}-tests", self.config.docker_options())
        return failure_of(
            files,
            item.tests,
            sandbox,
            backend=self.config.terminal_backend,
            timeout_s=self.config.test_timeout,
            limit_bytes=OUTPUT_BYTES,
            entry_point=item.entry_point,
        )


def _copied(ctx: ToolContext, folder: Path) -> dict[str, bytes]:
    """The agent's Python files by name, as far as they are of a size that people write."""
    listed = ctx.terminal(
        f"find . -type f -name '*.py' -size -200k -print0 | head -c {MOST_NAMES_BYTES}", timeout=LOOK_S
    )
    names = [name.removeprefix("./") for name in str(listed["output"]).split("\0")[:-1]]
    names.sort(key=lambda name: (name != SOLUTION, name))
    found: dict[str, bytes] = {}
    for name in names[:MOST_FILES]:
        local = folder / "file"
        if ".." not in PurePosixPath(name).parts and ctx.download_file(name, local)["success"]:
            found[name] = local.read_bytes()
    return found


if __name__ == "__main__":
    HermesSweEnv.cli()
