"""Python tasks for an agent with a terminal, learned from rewards and from hindsight (on-policy distillation).

A rollout is scored by tests that the agent never sees. Then each of its turns is looked at again: what came of it (a
failing call, a failing test) becomes a hint, a teacher is told the hint before the turn and asked how likely it finds
the tokens that the policy wrote, and the trainer draws the policy towards the teacher (``distill_coef``). The teacher
is the policy itself, or its base; no other model is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from environments.agentic_opd_checks import SOLUTION, Verdict, check, efficiency, tool_use, tools_called
from environments.agentic_opd_hints import Bounds, Turn, best_hint, judge_messages, rule_hint, turns_of
from environments.agentic_opd_tasks import Task, built_in, split
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.envs import APIServerConfig, BaseEnvConfig, EvalReport, SamplingClient, Score
from hermes_rl_mcp.envs.data import held_out_apart, load_rows
from hermes_rl_mcp.envs.distillation import Teaching, with_hint
from hermes_rl_mcp.envs.hermes import AgentRollout, HermesAgentBaseEnv
from hermes_rl_mcp.envs.hermes_config import HermesAgentEnvConfig
from hermes_rl_mcp.envs.trajectory import ScoredDataItem
from hermes_rl_mcp.errors import HermesRLError

log = logging.getLogger(__name__)

SYSTEM = (
    "You are a careful Python programmer with a terminal. Write your program to solution.py and tests of your own to "
    "test_solution.py, run them, correct what fails, and stop when all is well."
)
JUDGE_PARAMS = {"temperature": 0.7, "max_tokens": 500}
NO_KEY = "none"
"""Sent to a judge that needs none: an empty one would mean the operator's own for OpenAI."""
SOLVED_FROM = 0.8
"""Correctness from which a task counts as solved."""


class AgenticOPDConfig(HermesAgentEnvConfig):
    """The built-in tasks need nothing but Python in the sandbox."""

    prompt_field: str = "task"
    """Column of dataset_name with the task."""
    test_field: str = "test_code"
    """Its column with the tests: Python statements on what solution.py defines."""
    test_timeout: float = Field(30.0, gt=0)
    """Seconds the tests of one solution may take."""
    opd_enabled: bool = True
    """Look at each turn again and give the trainer a teacher. False = rewards alone."""
    distill_topk: int = Field(50, ge=1, le=1000)
    """Candidates of the teacher for each token. A vLLM server must allow as many (--max-logprobs)."""
    teacher: Literal["policy", "base"] = "policy"
    """Who is told the hint: the policy as it is, or the model it began as (our own sampler only)."""
    judge: Literal["rules", "model"] = "rules"
    """Who writes hints. rules: no model, but the errors of calls and the failing test. model: the one at
    judge_base_url, else the trained model's base on the same endpoint."""
    judge_base_url: str = ""
    """Address of an OpenAI-compatible server, ends in /v1. It is sent tasks, turns and results of tools. Empty = the
    trained model judges itself, without its adapter."""
    judge_model: str = "default"
    """Model name there."""
    judge_api_key: str = ""
    """Its key, as $HERMES_RL_SECRET_NAME of a variable that the operator has set; empty = none."""
    prm_votes: int = Field(3, ge=1, le=16)
    """Answers of the judge for each turn; the longest hint of those that are for one counts."""
    hint_max_next_state_chars: int = Field(4000, ge=100)
    """Characters that the judge is shown of what came of a turn."""
    hint_min_chars: int = Field(10, ge=0, le=200)
    """A hint must be longer."""
    hint_max_chars: int = Field(2000, ge=201)
    """And no longer than that."""
    correctness_weight: float = Field(0.7, gt=0)
    """Weight of correctness in the reward: 1 all tests pass, 0.2 one does not hold, 0.1 the program breaks."""
    efficiency_weight: float = Field(0.15, ge=0)
    """Weight of using few turns, for rollouts that wrote a solution."""
    tool_usage_weight: float = Field(0.15, ge=0)
    """Weight of having written files and run commands, for rollouts that wrote a solution."""
    eval_size: int = Field(10, ge=1)
    """Most held-out tasks in an evaluation."""
    eval_split_ratio: float = Field(0.15, gt=0, lt=1)
    """Share of the tasks that is held out."""


class AgenticOPDEnv(HermesAgentBaseEnv):
    """Python tasks solved with terminal and files; hindsight hints teach each turn (on-policy distillation)."""

    name = "agentic-opd"
    env_config_cls = AgenticOPDConfig
    trainer_defaults: ClassVar[dict[str, JsonValue]] = {"distill_coef": 1.0}
    typical_tokens = (1500, 600)

    config: AgenticOPDConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = AgenticOPDConfig(
            group_size=4,
            batch_size=16,
            total_steps=100,
            steps_per_eval=25,
            max_agent_turns=10,
            max_token_length=1024,
            max_batches_offpolicy=1,
            worker_timeout=3600,
            enabled_toolsets=["terminal", "file"],
            system_prompt=SYSTEM,
            ensure_scores_are_not_same=False,
            use_wandb=False,
            tokenizer_name="builtin:smollm2-135m",
        )
        return config, [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self._seen: Counter[str] = Counter()
        self._judge: SamplingClient | None = None
        self._has_told_failure = False
        # Rollouts run side by side, each in a task of its own.
        self._verdict: ContextVar[Verdict | None] = ContextVar(f"verdict-{id(self)}", default=None)

    # Items.

    async def load_dataset(self) -> None:
        """Rows of ``dataset_name``, some held out by a hash of their text, else the built-in tasks."""
        share, wanted = self.config.eval_split_ratio, [self.config.prompt_field, self.config.test_field]
        if self.config.dataset_name is None:
            self.rows, self.held_out_rows = split(built_in(), share)
            return
        rows = await asyncio.to_thread(load_rows, self.config.dataset_name, self.config.dataset_split, wanted)
        tasks = [{"task": str(row[wanted[0]]), "test_code": str(row[wanted[1]])} for row in rows]
        self.rows, self.held_out_rows = held_out_apart(tasks, "task", max(2, round(1 / share)))

    def format_prompt(self, item: Task) -> str:
        return f"{item['task']}\nPut it into {SOLUTION}."

    # Reward.

    async def compute_reward(self, item: Task, result: AgentResult, ctx: ToolContext) -> Score:
        config = self.config
        backend, docker = config.terminal_backend, config.docker_options()
        verdict = await self.pool.run(
            lambda: check(ctx, item["test_code"], config.test_timeout, backend=backend, docker=docker)
        )
        self._verdict.set(verdict)
        return self.reward(verdict, result)

    def reward(self, verdict: Verdict, result: AgentResult) -> Score:
        """Between 0 and the sum of the weights. Without a solution nothing else counts: idling is not efficient."""
        config = self.config
        wrote = float(verdict.correctness > 0)
        parts = {
            "correct": float(verdict.correctness >= SOLVED_FROM),
            "correctness": verdict.correctness,
            "efficiency": wrote * efficiency(result.turns_used, config.max_agent_turns),
            "tool_use": wrote * tool_use(tools_called(result.messages)),
        }
        value = config.correctness_weight * parts["correctness"] + config.efficiency_weight * parts["efficiency"]
        return Score(value + config.tool_usage_weight * parts["tool_use"], parts)

    # Distillation.

    async def finish(self, rollout: AgentRollout, scored: ScoredDataItem) -> ScoredDataItem:
        verdict, trajectory = self._verdict.get(), rollout.trajectories[-1]
        if not self.config.opd_enabled or verdict is None or not trajectory.exact:
            return scored
        turns = turns_of(rollout.result.messages, verdict.message, SOLUTION)
        turns = turns[len(turns) - len(trajectory.completions) :]  # earlier ones are not trained on
        hints = await asyncio.gather(*(self.hint(rollout.item, turn, verdict.message) for turn in turns))
        teaching = Teaching(len(trajectory.tokens_T))
        for start, completion, hint in zip(trajectory.starts, trajectory.completions, hints, strict=True):
            if hint and completion.token_ids:
                await self._teach(teaching, trajectory.tokens_T[:start], completion.token_ids, hint)
        self._seen.update(rollouts=1, turns=len(turns), hints=sum(1 for hint in hints if hint))
        return teaching.put_into(scored)

    async def hint(self, item: Task, turn: Turn, verdict: str) -> str | None:
        """What should have been known before the turn; None = nothing."""
        bounds = Bounds(self.config.hint_min_chars, self.config.hint_max_chars)
        if self.config.judge == "rules":
            hint = rule_hint(turn, verdict)
            return hint if hint and bounds.hold(hint) else None
        asked = judge_messages(item["task"], turn, self.config.hint_max_next_state_chars)
        params: dict[str, Any] = {"n": self.config.prm_votes, **JUDGE_PARAMS}
        try:
            if self.config.judge_base_url:
                votes = await self._judge_client().chat(asked, **params)
            else:
                votes = await self.server.chat(asked, adapter=False, **params)
        except HermesRLError as error:
            self._failed("judge_failures", "the judge gave no hint", error)
            return None
        return best_hint([vote.last.text for vote in votes], bounds)

    async def _teach(self, teaching: Teaching, context_ids: list[int], token_ids: list[int], hint: str) -> None:
        hinted = with_hint(self.server.renderer, context_ids, f"\n\n[Hint: {hint}]")
        if hinted is None:
            self._seen["unplaced"] += 1
            return
        most = self.config.distill_topk
        try:
            scores = await self.server.score_tokens(
                hinted, token_ids, top=most, adapter=self.config.teacher == "policy"
            )
        except HermesRLError as error:  # a context that is full has no room for a hint
            self._failed("teacher_failures", "the teacher did not answer", error)
            return
        teaching.place(len(context_ids), scores.tokens, most)
        self._seen["taught"] += 1

    def _failed(self, kind: str, what: str, error: HermesRLError) -> None:
        self._seen[kind] += 1
        log.log(logging.DEBUG if self._has_told_failure else logging.WARNING, "%s (said once): %s", what, error)
        self._has_told_failure = True

    def _judge_client(self) -> SamplingClient:
        if self._judge is None:
            config = self.config
            server = APIServerConfig(
                base_url=config.judge_base_url,
                model_name=config.judge_model,
                api_key=config.judge_api_key or NO_KEY,
                server_type="openai",
            )
            self._judge = SamplingClient([server], lambda: self.tokenizer)
        return self._judge

    # Figures.

    async def wandb_log(self, metrics: dict[str, float] | None = None) -> None:
        """Adds ``opd/...`` of the rollouts since the last time."""
        seen, self._seen = self._seen, Counter()
        await super().wandb_log({**(metrics or {}), **opd_metrics(seen)})

    async def get_eval_items(self, count: int) -> list[Task] | None:
        return self.held_out_rows[: min(count, self.config.eval_size)] or None

    async def evaluate(self) -> EvalReport | Mapping[str, float] | None:
        """Held-out tasks with the whole loop at temperature 0."""
        report = await super().evaluate()
        if isinstance(report, EvalReport):
            found = [sample["parts"]["correctness"] for sample in report.samples]
            report.metrics["eval/mean_correctness"] = sum(found) / len(found)
            report.metrics["eval/pass_rate"] = sum(one >= SOLVED_FROM for one in found) / len(found)
        return report

    async def cleanup(self) -> None:
        if self._judge is not None:
            await self._judge.close()
        await super().cleanup()


def opd_metrics(seen: Mapping[str, int]) -> dict[str, float]:
    """Of what was counted over some rollouts: turns looked at, hints found, turns that a teacher was asked about."""
    rollouts, turns = seen.get("rollouts", 0), seen.get("turns", 0)
    if not rollouts:
        return {}
    failures = {
        name: float(seen[name]) for name in ("judge_failures", "teacher_failures", "unplaced") if seen.get(name)
    }
    return {
        "opd/mean_hints_per_rollout": seen.get("hints", 0) / rollouts,
        "opd/mean_turns_scored": seen.get("taught", 0) / rollouts,
        "opd/hint_rate": seen.get("hints", 0) / turns if turns else 0.0,
        "opd/total_hints": float(seen.get("hints", 0)),
        "opd/total_scored_turns": float(seen.get("taught", 0)),
        **{f"opd/{name}": value for name, value in failures.items()},
    }


if __name__ == "__main__":
    AgenticOPDEnv.cli()
