"""Small tasks for an agent with a terminal: the file that a task names is there afterwards, and right.

Tasks are made from a seed, of five kinds: a greeting, a range of numbers, a sum, counting lines, sorting lines.
Invariant: an evaluation runs the same loop and the same reward as the training, on tasks that were never trained on.
"""

from __future__ import annotations

import random
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, JsonValue, field_validator

from environments.terminal_test_tasks import MAKERS, TASKS, TerminalTask, grade
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.envs import APIServerConfig, BaseEnvConfig, Score, ScoredDataItem
from hermes_rl_mcp.envs.data import held_out_apart, load_rows
from hermes_rl_mcp.envs.hermes import AgentRollout, HermesAgentBaseEnv
from hermes_rl_mcp.envs.hermes_config import HermesAgentEnvConfig
from hermes_rl_mcp.errors import PreflightError

SYSTEM = (
    "You do small jobs on a computer, exactly as asked. Use the terminal and the file tools, look at what you made, "
    "and stop when it is right."
)
READ_BYTES, READ_S = 100_000, 60.0
COLUMNS = ("path", "expected")


class TerminalTestConfig(HermesAgentEnvConfig):
    """Tasks come from a seed, or from a data set with a path and an expected text for each prompt."""

    enabled_toolsets: list[str] | None = Field(["terminal", "file"])
    """Toolsets the policy has."""
    max_agent_turns: int = Field(10, ge=1, le=1000)
    """Most answers of the policy in one rollout."""
    system_prompt: str | None = SYSTEM
    """Stands before the task."""
    dataset_name: str | None = None
    """Tasks to ask: a file or folder (jsonl, json, csv, parquet) or a Hub id whose rows have prompt_field, path and
    expected. Null = tasks made from the seed."""
    task_kinds: list[str] = Field(list(MAKERS), min_length=1)
    """Kinds of tasks that are made: greeting, count, answer, result, sorted."""
    seed: int = Field(0, ge=0)
    """Order of the training tasks."""
    call_weight: float = Field(0.0, ge=0, lt=1)
    """Share of the reward for calling a tool at all, right or wrong. It teaches small models the form of a call."""

    @field_validator("task_kinds")
    @classmethod
    def _known_kinds(cls, value: list[str]) -> list[str]:
        unknown = [one for one in value if one not in MAKERS]
        if unknown:
            raise ValueError(f"there is no kind of task {unknown[0]!r}; there are: {', '.join(MAKERS)}")
        return value


class TerminalTestEnv(HermesAgentBaseEnv):
    """Small jobs in a terminal, from writing a file to sorting one: 1.0 for the exact file, 0.5 for nearly."""

    name = "terminal-test"
    env_config_cls = TerminalTestConfig
    trainer_defaults: ClassVar[dict[str, JsonValue]] = {"max_token_trainer_length": 4096}
    typical_tokens = (1500, 300)

    config: TerminalTestConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = TerminalTestConfig(
            group_size=8,
            batch_size=32,
            max_token_length=512,
            total_steps=100,
            steps_per_eval=25,
            max_batches_offpolicy=2,
            worker_timeout=3600,  # on a CPU ten turns take minutes
            ensure_scores_are_not_same=False,
            use_wandb=False,
            tokenizer_name="builtin:smollm2-135m",
        )
        return config, [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    async def setup(self) -> None:
        self._rng = random.Random(self.config.seed)
        self._drawn = 0
        self._rewards: list[Score] = []
        self._tasks: list[TerminalTask] = []
        self._held_out: list[TerminalTask] | None = None
        if self.config.dataset_name is not None:
            asked = self.config.prompt_field
            rows = load_rows(self.config.dataset_name, self.config.dataset_split, [asked, *COLUMNS])
            trained, kept = held_out_apart(rows, asked)
            self._tasks, self._held_out = ([_task(row, asked) for row in one] for one in (trained, kept))
            if not self._tasks:
                raise PreflightError(
                    f"All rows of {self.config.dataset_name} are held out: they have too few different tasks.",
                    hint="Add rows with other tasks.",
                )

    async def get_next_item(self) -> TerminalTask:
        self._drawn += 1
        if self._tasks:
            return self._tasks[(self._drawn - 1) % len(self._tasks)]
        return TASKS.draw(self._rng, self.config.task_kinds)

    def item_key(self, item: TerminalTask) -> str:
        return item.text

    def format_prompt(self, item: TerminalTask) -> str:
        return item.text

    def prepare(self, item: TerminalTask, ctx: ToolContext) -> None:
        with tempfile.TemporaryDirectory(prefix="hermes-rl-task-") as folder:
            for path, content in item.files.items():
                local = Path(folder, "file")
                local.write_text(content, encoding="utf-8")
                _require(ctx.upload_file(local, path))

    def compute_reward(self, item: TerminalTask, result: AgentResult, ctx: ToolContext) -> Score:
        # The whole file may be of any size, or a pipe that nobody writes to.
        answer = ctx.terminal(f"head -c {READ_BYTES} -- {_in_shell(item.path)}", timeout=READ_S)
        found = answer["output"] if answer["exit_code"] == 0 else None
        return grade(item, found, _has_called(result), self.config.call_weight)

    async def get_eval_items(self, count: int) -> Sequence[TerminalTask]:
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
            values |= {
                "train/avg_reward": fmean(one.value for one in rewards),
                "train/accuracy": fmean(one.parts["correct"] for one in rewards),
                "train/partial_match_rate": fmean(one.parts["partial"] for one in rewards),
                "train/total_rollouts": float(len(rewards)),
            }
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


def _task(row: Mapping[str, Any], asked: str) -> TerminalTask:
    return TerminalTask(str(row[asked]), str(row["path"]), str(row["expected"]))


def _require(answer: Mapping[str, Any]) -> None:
    if answer["exit_code"] != 0:
        raise OSError(str(answer["error"]))


def _in_shell(path: str) -> str:
    """Quoted, but for the home folder, which the sandbox's shell knows."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def _has_called(result: AgentResult) -> bool:
    """Whether one of its calls reached a tool and was carried out."""
    calls = sum(len(one.get("tool_calls") or ()) for one in result.messages)
    return calls > len(result.tool_errors)


if __name__ == "__main__":
    TerminalTestEnv.cli()
