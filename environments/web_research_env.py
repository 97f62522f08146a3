"""Questions that take looking up: search, read pages, answer with sources.

Without further settings everything is here: a small invented world of pages, searched offline. With ``search =
operator`` the search is the one that the operator has set up, and with ``dataset_name`` the questions are others, such
as google/frames-benchmark. Reward: correctness + having looked something up + few calls + several sources, by weights,
at most 1. Invariant: nothing counts that the policy only says, and the judge is never the model that is trained.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from environments.web_research_judge import Judge, JudgeError
from environments.web_research_scoring import (
    calls_made,
    cited_domains,
    efficiency,
    final_answer,
    keyword_correctness,
    web_results,
)
from environments.web_research_world import make_world
from hermes_rl_mcp.agent import settings as names
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.envs import APIServerConfig, BaseEnvConfig, EvalReport, Score
from hermes_rl_mcp.envs.data import held_out_apart, load_rows
from hermes_rl_mcp.envs.hermes import AgentRollout, HermesAgentBaseEnv
from hermes_rl_mcp.envs.hermes_config import HermesAgentEnvConfig
from hermes_rl_mcp.envs.trajectory import ScoredDataItem
from hermes_rl_mcp.errors import InvalidValueError, PreflightError

log = logging.getLogger(__name__)

CORPUS = Path(__file__).parent / "web_research" / "pages.jsonl"
CORRECT_FROM = 0.7
SYSTEM = (
    "You are a careful researcher. You know nothing by heart: search, open the pages that matter, and check what you "
    "find on a second page. Then answer the question in two to four sentences, and name the addresses of the pages "
    "that you rely on."
)


class WebResearchConfig(HermesAgentEnvConfig):
    """The defaults need no network."""

    search: Literal["corpus", "operator"] = "corpus"
    """corpus: the pages of ``corpus``, offline. operator: what the operator has set up (SEARXNG_URL, TAVILY_API_KEY,
    BRAVE_API_KEY or HERMES_RL_SEARCH_CORPUS)."""
    corpus: str | None = None
    """JSON lines file of pages (url, title, text). Null = the invented world that comes with this environment."""
    dataset_split: str = "test"
    """Split of dataset_name."""
    prompt_field: str = "Prompt"
    """Its column with the question."""
    answer_field: str = "Answer"
    """Its column with the answer."""
    seed: int = Field(0, ge=0)
    """Order of the training questions."""
    correctness_weight: float = Field(0.6, ge=0)
    """Of the answer's correctness, 0 to 1."""
    tool_usage_weight: float = Field(0.2, ge=0)
    """Of having found something with a web tool."""
    efficiency_weight: float = Field(0.2, ge=0)
    """Of an answer with few tool calls."""
    diversity_bonus: float = Field(0.1, ge=0)
    """For an answer that names two sites or more that the tools showed."""
    efficient_max_calls: int = Field(5, ge=0)
    """Tool calls that cost nothing; each one more costs 0.08 of the efficiency."""
    heavy_penalty_calls: int = Field(10, ge=0)
    """With more calls than this, if it is the larger number, each one above efficient_max_calls costs 0.12."""
    eval_size: int = Field(20, ge=1)
    """Most held-out questions in an evaluation."""
    eval_split_ratio: float = Field(0.1, gt=0, le=0.5)
    """Share of the questions that is held out, chosen by a hash of the question."""
    judge_base_url: str = ""
    """Endpoint in the form of OpenAI, of another model than the trained one, that judges correctness; it is sent
    questions, right answers and answers. Empty = the words of the right answer decide."""
    judge_model: str = "default"
    """Its model."""
    judge_api_key: str = ""
    """Its key, as $HERMES_RL_SECRET_NAME of a variable that the operator has set."""
    judge_timeout: float = Field(60.0, gt=0)
    """Seconds one verdict may take; then the words decide."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.corpus is not None and not Path(self.corpus).expanduser().is_file():
            raise ValueError(f"corpus: there is no file {self.corpus}")
        if not self.correctness_weight + self.tool_usage_weight + self.efficiency_weight:
            raise ValueError("one of correctness_weight, tool_usage_weight and efficiency_weight must be above 0")
        return self


@dataclass
class _Seen:
    """Training rollouts since the last line of metrics."""

    scores: list[Score] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        if not self.scores:
            return {}
        return {
            "train/mean_reward": fmean(one.value for one in self.scores),
            **{f"train/mean_{part}": _mean_part(self.scores, part) for part in PARTS},
            "train/correct_rate": _mean_part(self.scores, "correct"),
            "train/tool_usage_rate": fmean(one.parts["tool_usage"] > 0 for one in self.scores),
        }


PARTS = ("correctness", "tool_usage", "efficiency", "diversity")


class WebResearchEnv(HermesAgentBaseEnv):
    """Questions to be looked up on the web (offline by default), scored by answer, search, economy and sources."""

    name = "web-research"
    env_config_cls = WebResearchConfig
    typical_tokens = (1500, 400)

    config: WebResearchConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = WebResearchConfig(
            group_size=4,
            batch_size=16,
            total_steps=200,
            steps_per_eval=50,
            max_agent_turns=15,
            max_token_length=512,
            max_batches_offpolicy=1,
            worker_timeout=3600,
            enabled_toolsets=["web", "file"],
            system_prompt=SYSTEM,
            ensure_scores_are_not_same=False,
            use_wandb=False,
            tokenizer_name="builtin:smollm2-135m",
        )
        return config, [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self._seen = _Seen()
        self._total_rollouts = 0
        self._judge_failures = 0
        self._judge: Judge | None = None
        if self.config.judge_base_url:
            if any(_place(one.base_url) == _place(self.config.judge_base_url) for one in self.server_configs):
                raise InvalidValueError(
                    "judge_base_url is the endpoint of the model that is trained.",
                    hint="Name another one, or leave it empty: then the answer's words decide.",
                )
            self._judge = Judge(
                self.config.judge_base_url,
                self.config.judge_model,
                self.config.judge_api_key,
                timeout_s=self.config.judge_timeout,
            )

    async def load_dataset(self) -> None:
        """Rows of question and answer; ``eval_split_ratio`` of them apart."""
        config = self.config
        if config.dataset_name is None:
            rows = [{"question": one.text, "answer": one.answer} for one in make_world().questions]
        elif config.search == "corpus" and config.corpus is None:
            raise PreflightError(
                "The invented pages do not answer the questions of dataset_name.",
                hint="Set search to operator, for the real web, or corpus to a file of pages that do.",
            )
        else:
            columns = [config.prompt_field, config.answer_field]
            found = await asyncio.to_thread(load_rows, config.dataset_name, config.dataset_split, columns)
            rows = [{"question": str(row[columns[0]]), "answer": str(row[columns[1]])} for row in found]
        self.rows, self.held_out_rows = held_out_apart(rows, "question", round(1 / config.eval_split_ratio))
        random.Random(f"order:{config.seed}").shuffle(self.rows)

    def settings(self) -> dict[str, str]:
        """Searches offline unless the operator's search is wanted."""
        found = super().settings()
        if self.config.search == "operator":
            return found
        corpus = Path(self.config.corpus).expanduser() if self.config.corpus else CORPUS
        return {**found, names.SEARCH_BACKEND: "corpus", names.SEARCH_CORPUS: str(corpus)}

    def format_prompt(self, item: Any) -> str:
        return str(item["question"])

    async def get_eval_items(self, count: int) -> Sequence[Any] | None:
        return self.held_out_rows[: min(count, self.config.eval_size)] or None

    async def compute_reward(self, item: Any, result: AgentResult, ctx: ToolContext) -> Score:
        """``correctness`` by the judge or by words; ``tool_usage`` 1 if a web tool found something; ``efficiency`` of
        the calls that were made, 0 without an answer; ``diversity`` 1 if two sites are named that a tool showed."""
        config, messages = self.config, result.messages
        answer, found = final_answer(messages), web_results(messages)
        correctness = await self._correctness(item["question"], item["answer"], answer)
        parts = {
            "correct": float(correctness >= CORRECT_FROM),
            "correctness": correctness,
            "tool_usage": float(bool(found)),
            "efficiency": efficiency(
                calls_made(messages),
                free=config.efficient_max_calls,
                heavy=max(config.efficient_max_calls, config.heavy_penalty_calls),
            )
            if answer
            else 0.0,
            "diversity": float(len(cited_domains(answer, found)) >= 2),
        }
        value = (
            config.correctness_weight * parts["correctness"]
            + config.tool_usage_weight * parts["tool_usage"]
            + config.efficiency_weight * parts["efficiency"]
            + config.diversity_bonus * parts["diversity"]
        )
        return Score(min(1.0, value), parts)

    async def _correctness(self, question: str, expected: str, answer: str) -> float:
        if not answer:
            return 0.0
        if self._judge is not None:
            try:
                return await self._judge.verdict(question, expected, answer)
            except JudgeError as error:
                self._judge_failures += 1
                if self._judge_failures == 1:
                    log.warning("the judge gave no verdict, so the answer's words decide (said once): %s", error)
        return keyword_correctness(expected, answer)

    async def finish(self, rollout: AgentRollout, scored: ScoredDataItem) -> ScoredDataItem:
        assert rollout.reward is not None  # it is scored
        self._seen.scores.append(rollout.reward)
        self._total_rollouts += 1
        return scored

    async def wandb_log(self, metrics: dict[str, float] | None = None) -> None:
        """Adds the parts of the training rewards since the last time."""
        seen, self._seen = self._seen, _Seen()
        mine = seen.metrics()
        if mine:
            mine["train/total_rollouts"] = float(self._total_rollouts)
            if self._judge is not None:
                mine["train/judge_failures"] = float(self._judge_failures)
        await super().wandb_log({**(metrics or {}), **mine})

    async def evaluate(self) -> EvalReport | None:
        """The held-out questions with the whole loop at temperature 0."""
        report = await super().evaluate()
        if not isinstance(report, EvalReport):
            return None
        parts = [sample["parts"] for sample in report.samples if sample["parts"]]
        if parts:
            report.metrics["eval/mean_correctness"] = fmean(one["correctness"] for one in parts)
            report.metrics["eval/tool_usage_rate"] = fmean(one["tool_usage"] > 0 for one in parts)
        return report

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._judge is not None:
            await self._judge.close()


def _place(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def _mean_part(scores: Sequence[Score], part: str) -> float:
    return fmean(one.parts[part] for one in scores)


if __name__ == "__main__":
    WebResearchEnv.cli()
