"""The base class of environments whose policy calls tools: one agent loop and one sandbox per rollout.

Invariant: a rollout's sandbox, processes and browser end with it, however it ends. Only tokens that the policy sampled
are trained on. A rollout that failed for the world's reasons (sampler gone, reward function raised) is no score of 0:
it is replaced or left out like any other failed rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.interfaces import Tool
from hermes_rl_mcp.agent.loop import HermesAgentLoop
from hermes_rl_mcp.agent.mcp_tools import McpToolset, mcp_servers, mcp_tools
from hermes_rl_mcp.agent.parsers import get_parser, parser_for_model
from hermes_rl_mcp.agent.pool import ToolPool
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.agent.sandbox.factory import task_sandbox
from hermes_rl_mcp.agent.settings import TERMINAL_TIMEOUT
from hermes_rl_mcp.agent.toolbox import Selection, sample_tools, select_tools
from hermes_rl_mcp.agent.transcript import readable
from hermes_rl_mcp.envs.agent_server import AgentServer
from hermes_rl_mcp.envs.base import BaseEnv, EvalReport, Groups, RolloutsFailedError, Score
from hermes_rl_mcp.envs.data import held_out_apart, load_rows
from hermes_rl_mcp.envs.hermes_config import AUTO, HermesAgentEnvConfig
from hermes_rl_mcp.envs.hook_rules import missing_error, must_define, prompt_of, score_of
from hermes_rl_mcp.envs.openai_agent import OpenAIAgentServer
from hermes_rl_mcp.envs.sampling import ConversationFullError
from hermes_rl_mcp.envs.trajectory import Message, ScoredDataItem, Trajectory
from hermes_rl_mcp.envs.turns import discounted_advantages

log = logging.getLogger(__name__)

EVAL_ITEMS = 32
TOOL_ERRORS_SHOWN = 5
"""Lines in the log for each line of metrics."""


@dataclass(frozen=True)
class Place:
    """How one rollout of a group is sampled."""

    selection: Selection
    """The group's tools."""
    temperature: float
    training: bool = True
    """False: its numbers are not those of the training."""


@dataclass
class AgentRollout:
    """One conversation of the policy with its tools, and what it was worth."""

    item: Any
    result: AgentResult
    trajectories: list[Trajectory]
    """What was sampled; more than one where the chat template rewrote earlier turns. The last is trained on."""
    parse_errors: list[str]
    """One line for each block that looked like a call and was none."""
    temperature: float
    toolsets: list[str]
    reward: Score | None = None

    @property
    def tool_calls(self) -> Counter[str]:
        """Names of tools to how often the policy called them."""
        asked = (call for one in self.result.messages for call in one.get("tool_calls") or ())
        return Counter(str(call["function"]["name"]) for call in asked)


@dataclass
class _Interval:
    """What was seen since the last line of metrics."""

    rollouts: list[AgentRollout] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        seen = self.rollouts
        if not seen:
            return {}
        return {
            "train/turns": _mean([one.result.turns_used for one in seen]),
            "train/tool_calls": _mean([one.tool_calls.total() for one in seen]),
            "train/finished_naturally": _mean([one.result.finished_naturally for one in seen]),
            "train/tool_errors_count": float(sum(len(one.result.tool_errors) for one in seen)),
            "train/call_parse_errors": float(sum(len(one.parse_errors) for one in seen)),
        }


class HermesAgentBaseEnv(BaseEnv):
    """Subclass it, set ``name`` and ``env_config_cls``, and write ``format_prompt`` and ``compute_reward``, and
    ``get_next_item`` unless items come from ``dataset_name``.

    Two kinds of endpoints: with type openai the endpoint takes calls apart and nothing can be trained (phase 1, for
    process and evaluate); with any other the policy's own tokens are kept and its calls read out of its text (phase 2).
    """

    name = "hermes-agent"
    env_config_cls = HermesAgentEnvConfig
    config: HermesAgentEnvConfig
    hook_arguments: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "async": {"finish": 2},
        "plain": {"format_prompt": 1, "prepare": 2, "own_tools": 0},
        "either": {"compute_reward": 3},
    }
    """What hooks besides BaseEnv's are given, in addition to ``self``; checked before anything runs."""

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.rows: list[dict[str, Any]] = []
        """Of ``dataset_name``, without those held out."""
        self.held_out_rows: list[dict[str, Any]] = []
        self.position = 0
        """Items handed out so far."""
        self.groups_begun = 0
        self.pool = ToolPool(self.config.tool_pool_size)
        self._servers: list[McpToolset] = []
        self._connecting = asyncio.Lock()
        self._explore_due = 0.0
        self._has_told = False
        self._interval = _Interval()
        # Groups run side by side, each with its own tools: nothing of one may be an attribute of the environment.
        self._place: ContextVar[Place | None] = ContextVar(f"place-{id(self)}", default=None)

    # What subclasses write.

    @must_define
    def format_prompt(self, item: Any) -> str:
        """The user's message that asks ``item``."""
        raise missing_error(type(self), ["format_prompt"])

    @must_define
    def compute_reward(
        self, item: Any, result: AgentResult, ctx: ToolContext
    ) -> float | Score | Awaitable[float | Score]:
        """Reward of one conversation; ``ctx`` works in its sandbox. A plain function runs in a thread and may block; an
        async one calls ``ctx`` by ``asyncio.to_thread``."""
        raise missing_error(type(self), ["compute_reward"])

    def prepare(self, item: Any, ctx: ToolContext) -> None:
        """What has to be in the sandbox before the policy begins; runs in a thread. Nothing by default."""

    def own_tools(self) -> Sequence[Tool]:
        """Tools of the environment itself; the policy always has them."""
        return ()

    async def finish(self, rollout: AgentRollout, scored: ScoredDataItem) -> ScoredDataItem:
        """The last word on a scored rollout of the training."""
        return scored

    # What every environment has.

    async def load_dataset(self) -> None:
        """Rows of ``dataset_name``, if it is set; about one in ten is held out."""
        if self.config.dataset_name is None:
            return
        field_ = self.config.prompt_field
        rows = await asyncio.to_thread(load_rows, self.config.dataset_name, self.config.dataset_split, [field_])
        self.rows, self.held_out_rows = held_out_apart(rows, field_)

    async def get_next_item(self) -> Any:
        """The next row of ``dataset_name``, from the first again after the last."""
        if not self.rows:
            raise missing_error(type(self), ["get_next_item"])
        self.position += 1
        return self.rows[(self.position - 1) % len(self.rows)]

    async def get_eval_items(self, count: int) -> Sequence[Any] | None:
        return self.held_out_rows[:count] or None

    async def evaluate(self) -> EvalReport | Mapping[str, float] | None:
        """The held-out items, each once with the whole loop at temperature 0; those that fail are counted and left
        out."""
        items = await self.get_eval_items(EVAL_ITEMS)
        if not items:
            return None
        await self.connect()
        workers = asyncio.Semaphore(self.config.max_eval_workers)
        place = Place(self.select_tools(), 0.0, training=False)

        async def one(item: Any) -> AgentRollout:
            async with workers:
                return await self.rollout(item, place, split="eval")

        found = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
        rollouts = [one for one in found if isinstance(one, AgentRollout)]
        failures = [one for one in found if isinstance(one, BaseException)]
        for failure in failures:
            log.warning("an item of the evaluation failed: %s: %s", type(failure).__name__, failure)
        if not rollouts:
            raise failures[0]
        metrics = {**self._eval_metrics(rollouts), "eval/failed_items": float(len(failures))}
        return EvalReport(metrics, [_sample(one) for one in rollouts], {"temperature": 0.0})

    async def collect_trajectory(self, item: Any) -> tuple[ScoredDataItem | None, list[Any]]:
        """One rollout, scored: the sequence of its last turns, which are all of them unless the template rewrites."""
        await self.connect()
        place = self._place.get() or Place(self.select_tools(), self.config.agent_temperature, training=False)
        rollout = await self.rollout(item, place)
        if rollout.reward is None or not rollout.trajectories:
            return None, []
        scored = rollout.trajectories[-1].item(
            rollout.reward.value, rollout.reward.parts, parse_failed=bool(rollout.parse_errors)
        )
        scored["messages"] = rollout.result.messages
        if place.training:
            scored = await self.finish(rollout, scored)
            self._interval.rollouts.append(rollout)
        return scored, []

    async def collect_trajectories(self, item: Any) -> tuple[Groups, list[Any]]:
        """A group whose rollouts all have the same tools."""
        await self.connect()
        selection = self.group_tools()
        warm = self._explorers()

        def before(place: int) -> None:
            config = self.config
            temperature = config.explore_temperature if place < warm else config.agent_temperature
            self._place.set(Place(selection, temperature))

        group, more = await self._collect_singly(item, before)
        if self.config.discount_factor < 1 and "advantages" not in group:
            group["advantages"] = discounted_advantages(group["scores"], group["masks"], self.config.discount_factor)
        return group, more

    @property
    def recent_rollouts(self) -> Sequence[AgentRollout]:
        """Those of the training since the last line of metrics."""
        return self._interval.rollouts

    async def wandb_log(self, metrics: dict[str, float] | None = None) -> None:
        """Adds turns, calls and errors of the rollouts since the last time; what tools said goes to the log."""
        interval, self._interval = self._interval, _Interval()
        errors = [error for one in interval.rollouts for error in one.result.tool_errors]
        for error in errors[:TOOL_ERRORS_SHOWN]:
            log.info("tool error, turn %d: %s(%s): %s", error.turn, error.tool_name, error.arguments, error.error[:300])
        await super().wandb_log({**(metrics or {}), **interval.metrics()})

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        mine = {"position": self.position, "groups_begun": self.groups_begun}
        super().save_checkpoint(step, {**mine, **(data or {})})

    async def cleanup(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            await asyncio.to_thread(server.close)
        self.pool.close()

    # The rollout.

    def select_tools(self) -> Selection:
        """Tools by ``enabled_toolsets`` and ``disabled_toolsets``; what cannot be had here is logged once."""
        named = self.config.enabled_toolsets
        extra = self._extra_tools()
        if named is not None:
            named = [*named, *sorted({tool.toolset for tool in extra} - set(named))]
        return self._told(select_tools(named, self.config.disabled_toolsets, settings=self.settings(), extra=extra))

    def group_tools(self) -> Selection:
        """Those of the next group: drawn where there is a distribution."""
        self.groups_begun += 1
        if self.config.distribution is None:
            return self.select_tools()
        seed = f"{self.config.toolset_seed}:{self.groups_begun}"
        return self._told(
            sample_tools(
                self.config.distribution,
                self.config.disabled_toolsets,
                seed=seed,
                settings=self.settings(),
                extra=self._extra_tools(),
            )
        )

    def settings(self) -> dict[str, str]:
        """What tools may know of the operator's settings: this process's environment, and the time a command has."""
        return {**os.environ, TERMINAL_TIMEOUT: str(self.config.terminal_timeout)}

    def messages(self, item: Any) -> list[Message]:
        """The conversation as it begins. Raises HookError for a prompt that is no text."""
        prompt = prompt_of(type(self), self.format_prompt(item))
        system = self.config.system_prompt
        said: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*said, {"role": "user", "content": prompt}]

    async def rollout(self, item: Any, place: Place, split: str = "train") -> AgentRollout:
        """One conversation in a sandbox of its own, with its reward. Raises RolloutsFailedError where the sampler
        failed, and whatever ``prepare``, ``format_prompt`` and ``compute_reward`` raise."""
        server = self._policy(split)
        async with self._tool_context(place) as (ctx, sandbox, state, settings):
            await self.pool.run(lambda: self.prepare(item, ctx))
            loop = HermesAgentLoop(
                server,
                max_turns=self.config.max_agent_turns,
                task_id=ctx.task_id,
                temperature=place.temperature,
                max_tokens=self.config.max_token_length,
                budget_config=self.config.build_budget_config(),
                toolbox=place.selection.toolbox,
                sandbox=sandbox,
                settings=settings,
                state=state,
                parser=server.parser if isinstance(server, OpenAIAgentServer) else None,  # some leave calls in the text
                pool=self.pool,
            )
            result = await self._conversation(loop, self.messages(item))
            rollout = AgentRollout(
                *(item, result, server.trajectories, server.parse_errors, place.temperature, place.selection.toolsets)
            )
            rollout.reward = await self._reward(rollout, ctx)
        return rollout

    async def _conversation(self, loop: HermesAgentLoop, messages: list[Message]) -> AgentResult:
        """Ended early by its own time limit it counts as it is; ended by the sampler's failure it does not count."""
        try:
            async with asyncio.timeout(self.config.terminal_lifetime) as limit:
                result = await loop.run(messages)
        except TimeoutError:
            if not limit.expired():
                raise
            return _timed_out(messages, self.config.terminal_lifetime)
        if result.error and not isinstance(result.failure, ConversationFullError):
            raise RolloutsFailedError(f"no answer in turn {result.turns_used}: {result.error}") from result.failure
        return result

    async def _reward(self, rollout: AgentRollout, ctx: ToolContext) -> Score:
        if not any(one.get("role") == "assistant" for one in rollout.result.messages):
            raise RolloutsFailedError(rollout.result.error or "the model said nothing")
        hook: Callable[..., Any] = self.compute_reward
        found = (
            hook(rollout.item, rollout.result, ctx)
            if inspect.iscoroutinefunction(hook)
            else await self.pool.run(lambda: hook(rollout.item, rollout.result, ctx))
        )
        value = await found if inspect.isawaitable(found) else found
        score = value if isinstance(value, Score) else Score(value)
        return Score(*score_of(type(self), score.value, score.parts, "compute_reward"))

    @asynccontextmanager
    async def _tool_context(self, place: Place) -> AsyncIterator[tuple[ToolContext, Any, dict[str, Any], Any]]:
        task_id, settings = uuid.uuid4().hex, self.settings()
        state: dict[str, Any] = {}
        sandbox = task_sandbox(self.config.terminal_backend, task_id, self.config.docker_options())
        ctx = ToolContext(task_id, sandbox, place.selection.toolbox, settings=settings, state=state)
        try:
            yield ctx, sandbox, state, settings
        finally:
            # Also when the rollout is cancelled: what it started must not outlive it.
            # Not in the pool: its threads may all wait for commands that this ends.
            await asyncio.shield(asyncio.create_task(asyncio.to_thread(ctx.cleanup)))

    def _policy(self, split: str) -> AgentServer | OpenAIAgentServer:
        named = self.config.tool_call_parser
        parser = get_parser(parser_for_model(self.config.tokenizer_name) if named == AUTO else named)
        if self.server_configs and self.server_configs[0].server_type == "openai":
            return OpenAIAgentServer(self.server, parser, split, self.config.extra_body or {})
        return AgentServer(self.server, parser, split, limit_tokens=self._limit_tokens())

    def _limit_tokens(self) -> int | None:
        """A sequence that reaches the trainer's limit would be refused."""
        limits = [self.config.max_rollout_tokens, self.trainer_max_tokens and self.trainer_max_tokens - 1]
        return min((one for one in limits if one), default=None)

    async def connect(self) -> None:
        """MCP servers are started, once, before the first rollout. Raises EndpointError."""
        async with self._connecting:
            for one in mcp_servers(self.config.mcp_servers or {})[len(self._servers) :]:
                self._servers.append(await asyncio.to_thread(McpToolset, one))

    def _extra_tools(self) -> list[Tool]:
        return [*self.own_tools(), *mcp_tools(self._servers)]

    def _explorers(self) -> int:
        """How many rollouts of this group are sampled warmer; over many groups exactly the share."""
        self._explore_due += self.config.explore_temperature_share * self.config.group_size
        count = math.floor(self._explore_due + 1e-9)
        self._explore_due -= count
        return count

    def _told(self, selection: Selection) -> Selection:
        if selection.dropped and not self._has_told:
            self._has_told = True
            log.warning("tools that cannot be had here:\n%s", selection.report)
        if not selection.toolbox.names():
            log.warning("the policy has no tools")
        return selection

    def _eval_metrics(self, rollouts: Sequence[AgentRollout]) -> dict[str, float]:
        rewards = [one.reward for one in rollouts if one.reward is not None]
        return {
            "eval/mean_reward": _mean([one.value for one in rewards]),
            "eval/percent_correct": _mean([one.parts.get("correct", float(one.value > 0)) for one in rewards]),
            "eval/mean_tool_calls": _mean([one.tool_calls.total() for one in rollouts]),
            "eval/mean_turns": _mean([one.result.turns_used for one in rollouts]),
            "eval/n_items": float(len(rollouts)),
        }


def _timed_out(messages: list[Message], seconds: int) -> AgentResult:
    turns = sum(one.get("role") == "assistant" for one in messages)
    return AgentResult(messages, turns_used=turns, error=f"it took longer than terminal_lifetime = {seconds} s")


def _sample(rollout: AgentRollout) -> dict[str, Any]:
    reward = rollout.reward or Score(math.nan)
    return {
        "item": rollout.item,
        "reward": reward.value,
        "parts": reward.parts,
        "turns": rollout.result.turns_used,
        "conversation": readable(rollout.result.messages),
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
