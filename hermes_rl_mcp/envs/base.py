"""The class an environment is: what one item is, how it is asked, how an answer is scored, what is logged.

Invariant: a group that leaves here has group_size sequences, or says how many it has, or is not sent; one failed
rollout is replaced or left out (``on_failed_rollout``), it is no reason to lose the others.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import JsonValue

from hermes_rl_mcp.envs.config import APIServerConfig, BaseEnvConfig
from hermes_rl_mcp.envs.exploration import KEPT_ITEMS, ItemValue, is_json, item_key
from hermes_rl_mcp.envs.groups import REJECTED, BadGroupError
from hermes_rl_mcp.envs.hook_rules import (
    default_hook,
    groups_of,
    is_own,
    messages_of,
    missing_error,
    must_define,
    rollout_of,
    score_of,
)
from hermes_rl_mcp.envs.rollout_table import RolloutTable
from hermes_rl_mcp.envs.sampling import SamplingClient
from hermes_rl_mcp.envs.saying import said
from hermes_rl_mcp.envs.telling import EvalReport, Score, Telling
from hermes_rl_mcp.envs.thinking import is_thinking, request_keys, with_thinking
from hermes_rl_mcp.envs.tokenizer import load_tokenizer
from hermes_rl_mcp.envs.trajectory import Completion, Message, ScoredDataGroup, ScoredDataItem, Trajectory, group_of
from hermes_rl_mcp.errors import ResumeError
from hermes_rl_mcp.files import write_atomic

__all__ = ["BaseEnv", "EvalReport", "Groups", "RolloutsFailedError", "Score"]

log = logging.getLogger(__name__)

EXPLORATION, FURTHER = "exploration", "further_items"
"""Keys of the saved position that are not the environment's own."""
ROLLOUT_ATTEMPTS = 3
"""How often one place of a group is sampled before the group is given up."""
LEAST_GROUP = 2
"""Answers that can still be compared with each other."""

Groups = ScoredDataGroup | list[ScoredDataGroup] | None
MetricsSink = Callable[[Mapping[str, float]], None]


class RolloutsFailedError(Exception):
    """Too many rollouts of one group failed; carries the last failure as its cause."""


class BaseEnv(Telling):
    """Subclass, set ``name`` and ``env_config_cls``, and write the hooks.

    The shortest environment has ``get_next_item``, ``get_messages`` and ``score_answer``. Override
    ``collect_trajectory`` for multi-turn rollouts, or ``collect_trajectories`` to make whole groups yourself.
    """

    name: ClassVar[str | None] = None
    """What the environment is called; the file's stem when None."""
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    trainer_defaults: ClassVar[dict[str, JsonValue]] = {}
    """Trainer fields that suit this environment (``{"learning_rate": 1e-3}``); a profile may overrule them."""
    typical_tokens: ClassVar[tuple[int, int] | None] = None
    """Tokens of a prompt and of an answer, about; for the estimate before a run. None = told from max_token_length."""

    def __init__(
        self,
        config: Any,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.config = config
        self.server_configs = list(server_configs)
        self.slurm = slurm
        self.testing = testing
        self.server = SamplingClient(self.server_configs, lambda: self.tokenizer)
        if is_thinking(config):
            self.server.request_keys = lambda base_url: request_keys(config, base_url)
        self.further_items: deque[Any] = deque()
        """Items that rollouts gave for later; they come before new ones, and are part of the saved position."""
        self.rollout_table = RolloutTable(config.num_rollouts_to_keep, config.num_rollouts_per_group_for_logging)
        self.exploration = self._exploration()
        """What chooses items in place of ``get_next_item``'s order; None = nothing."""
        self.curr_step = 0
        """Batches the trainer has taken so far."""
        self.trainer_max_tokens: int | None = None
        """Longest sequence that the trainer takes; None where there is no trainer."""
        self.run_dir: Path | None = None
        """Directory of the run this process belongs to; None outside a run."""
        self.checkpoint_dir: Path | None = None
        self._tokenizer: Any = None
        self._metrics_sink: MetricsSink = lambda metrics: None

    # What subclasses write.

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Defaults of this environment: its config and its sampling servers."""
        return cls.env_config_cls(), [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    async def setup(self) -> None:
        """Called once before anything else. Loads the data."""
        await self.load_dataset()

    async def load_dataset(self) -> None:
        """Loads what ``get_next_item`` hands out. Nothing to load by default."""

    @must_define
    async def get_next_item(self) -> Any:
        """The next thing to ask about. None = nothing at the moment."""
        raise missing_error(type(self), ["get_next_item"])

    @must_define
    def get_messages(self, item: Any) -> list[Message]:
        """The conversation that asks ``item``; used by the default rollout."""
        raise missing_error(type(self), ["get_messages"])

    @must_define
    def score_answer(self, item: Any, completion: Completion) -> float | Score | Awaitable[float | Score]:
        """Reward of one answer; may be async. Used by the default rollout."""
        raise missing_error(type(self), ["score_answer"])

    @default_hook
    async def collect_trajectory(self, item: Any) -> tuple[ScoredDataItem | None, list[Any]]:
        """One scored rollout of ``item``, and further items to queue. None = it failed."""
        trajectory = (await self.server.chat(self._messages(item), max_tokens=self.config.max_token_length))[0]
        return await self.score(item, trajectory), []

    @default_hook
    async def collect_trajectories(self, item: Any) -> tuple[Groups, list[Any]]:
        """One group of ``group_size`` scored rollouts (or several, or None), and further items to queue."""
        if is_own(type(self), "collect_trajectory"):
            return await self._collect_singly(item)
        return await self._collect_together(item), []

    async def postprocess_histories(self, groups: Groups) -> Groups:
        """What ``collect_trajectories`` gave, just before it is judged and sent: filter or score it again. None and []
        drop it. Not called where there is none."""
        return groups

    @default_hook
    async def evaluate(self) -> EvalReport | Mapping[str, float] | None:
        """Runs every ``steps_per_eval`` trainer steps and for the ``evaluate`` command."""
        return None

    async def get_eval_items(self, count: int) -> Sequence[Any] | None:
        """Up to ``count`` different items that training never asks, always the same ones in the same order, for the
        evaluation at the end of a run; fewer only where there are no more. None = there is no such thing."""
        return None

    async def evaluate_item(self, item: Any) -> Score | float:
        """Score of one answer to a held-out item. ``self.server`` then samples from the base or from the adapter, as is
        due, with a seed that both have in common. What counts is the part ``correct`` if the score has one, else the
        score itself. By default what training does, once."""
        if is_own(type(self), "collect_trajectory"):
            scored, _ = rollout_of(type(self), await self.collect_trajectory(item))
        else:
            [trajectory] = await self.server.chat(self._messages(item), max_tokens=self.config.max_token_length)
            scored = await self.score(item, trajectory)
        if scored is None:
            raise RolloutsFailedError("collect_trajectory gave no answer")
        parts = (scored.get("overrides") or {}).get("reward_parts") or {}
        return Score(*score_of(type(self), scored["scores"], parts, "collect_trajectory"))

    async def wandb_log(self, metrics: dict[str, float] | None = None) -> None:
        """Called once per trainer step. Add your own metrics to the dict and call ``super().wandb_log(metrics)``."""
        self._metrics_sink(await self.create_rollout_table(dict(metrics or {})))

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Called at the trainer's checkpoint interval, about once a second between, and at the end. Override it to pass
        ``data`` (JSON, small) to ``super()``."""
        if self.exploration is not None:
            data = {**(data or {}), EXPLORATION: self.exploration.state()}
        if waiting := [one for one in list(self.further_items)[:KEPT_ITEMS] if is_json(one)]:
            data = {**(data or {}), FURTHER: waiting}
        if data is None or self.checkpoint_dir is None:
            return
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(self.checkpoint_dir / f"step-{step}.json", json.dumps(data))

    def load_checkpoint(self) -> None:
        """Called when training resumes at ``curr_step``: sets an attribute for every key of the last state saved by
        then. In a run that continues another, that state is where the other's last known batch was made."""
        if self.checkpoint_dir is None:
            return
        found = [int(path.stem.removeprefix("step-")) for path in self.checkpoint_dir.glob("step-*.json")]
        step = max((step for step in found if step <= self.curr_step), default=None)
        if step is None:
            log.warning("no environment state up to step %d in %s", self.curr_step, self.checkpoint_dir)
            return
        path = self.checkpoint_dir / f"step-{step}.json"
        try:
            saved = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ResumeError(
                f"The environment's position {path} cannot be read: {said(error)}.", hint="Remove it to begin anew."
            ) from error
        self.further_items.extend(saved.pop(FURTHER, []))
        learnt = saved.pop(EXPLORATION, None)
        if self.exploration is not None and learnt is not None:
            self.exploration.restore(learnt)
        for key, value in saved.items():
            setattr(self, key, value)

    async def cleanup(self) -> None:
        """Called once at the end, also after errors."""

    def item_key(self, item: Any) -> str | None:
        """By what an item is known when it comes again, for ``exploration_model``. None = it cannot be known again."""
        return item_key(item)

    # What subclasses use.

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of ``config.tokenizer_name``, loaded at first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config.tokenizer_name)
        return self._tokenizer

    @classmethod
    def env_name(cls) -> str:
        if cls.name:
            return cls.name
        module = sys.modules.get(cls.__module__)
        return Path(getattr(module, "__file__", None) or cls.__name__).stem

    def on_metrics(self, sink: MetricsSink) -> None:
        """Where ``wandb_log`` hands its metrics to."""
        self._metrics_sink = sink

    async def score(self, item: Any, trajectory: Trajectory) -> ScoredDataItem:
        """The trajectory with what ``score_answer`` says of its last completion."""
        result = self.score_answer(item, trajectory.last)
        verdict = await result if inspect.isawaitable(result) else result
        score = verdict if isinstance(verdict, Score) else Score(verdict)
        return trajectory.item(*score_of(type(self), score.value, score.parts))

    @classmethod
    def cli(cls) -> None:
        """``if __name__ == "__main__": MyEnv.cli()`` gives the file its commands: serve, process, evaluate, ..."""
        from hermes_rl_mcp.envs.commands import main

        main(sys.argv[1:], cls)

    async def next_item(self) -> Any:
        """The next item to train on: one that waits, ``get_next_item``'s, or what ``exploration_model`` chooses. None =
        none yet."""
        if self.further_items:
            return self.further_items.popleft()
        if self.exploration is None:
            return await self.get_next_item()
        return await self.exploration.pick(self.get_next_item)

    async def groups_for(self, item: Any) -> list[ScoredDataGroup] | None:
        """The groups that ``item`` becomes, collected and processed. None = there are none. Raises HookError for what a
        hook must not give, and what the hooks raise."""
        made = await self.collect_trajectories(item)
        found, more = groups_of(type(self), made)
        self.further_items.extend(more)
        if not found:
            return found
        processed, _ = groups_of(type(self), (await self.postprocess_histories(made[0]), []), "postprocess_histories")
        if not processed:
            raise BadGroupError(REJECTED, "postprocess_histories dropped it")
        if self.exploration is not None:
            for group in processed:
                self.exploration.observe(item, group.get("scores") or [])
        return processed

    def _exploration(self) -> ItemValue | None:
        if getattr(self.config, "exploration_model", "none") == "none":
            return None
        return ItemValue(self.config.exploration_rate, lambda item: self.item_key(item))

    # The default rollouts.

    def _messages(self, item: Any) -> list[Message]:
        messages = messages_of(type(self), self.get_messages(item))
        told = is_thinking(self.config) and any(one.server_type != "openai" for one in self.server_configs)
        return with_thinking(self.config, messages) if told else messages

    async def _collect_together(self, item: Any) -> ScoredDataGroup:
        """One sampling call for the whole group; places whose scoring failed are sampled again."""
        messages = self._messages(item)
        items: list[ScoredDataItem] = []
        failure: Exception | None = None
        for _ in range(self._attempts):
            missing = self.config.group_size - len(items)
            if not missing:
                break
            for trajectory in await self.server.chat(messages, n=missing, max_tokens=self.config.max_token_length):
                try:
                    items.append(await self.score(item, trajectory))
                except Exception as error:  # noqa: BLE001 - user code; one bad answer must not take the group along
                    log.warning("scoring failed, sampling a replacement: %s", said(error), extra={"error": error})
                    failure = error
        return self._group(items, failure)

    async def _collect_singly(
        self, item: Any, before: Callable[[int], None] = lambda place: None
    ) -> tuple[ScoredDataGroup, list[Any]]:
        """``group_size`` independent rollouts; each failed one is run again. ``before`` is called with the place in the
        group (0 to G-1) in the task of each rollout, so that it may set context variables."""
        backlog: list[Any] = []
        failures: list[Exception] = []

        async def one(place: int) -> ScoredDataItem | None:
            scored: ScoredDataItem | None
            before(place)
            for _ in range(self._attempts):
                try:
                    scored, more = rollout_of(type(self), await self.collect_trajectory(item))
                except Exception as error:  # noqa: BLE001 - user code; one failed rollout must not take the group along
                    log.warning("a rollout failed, running it again: %s", said(error), extra={"error": error})
                    failures.append(error)
                    continue
                backlog.extend(more)
                if scored is not None:
                    return scored
            return None

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(place)) for place in range(self.config.group_size)]
        items = [scored for task in running if (scored := task.result()) is not None]
        return self._group(items, failures[0] if failures else None), backlog

    @property
    def _attempts(self) -> int:
        return 1 if self.config.on_failed_rollout == "shrink" else ROLLOUT_ATTEMPTS

    def _group(self, items: list[ScoredDataItem], failure: Exception | None) -> ScoredDataGroup:
        group = group_of(items)
        if len(items) < self.config.group_size:
            if self.config.on_failed_rollout == "shrink" and len(items) >= LEAST_GROUP:
                group["group_overrides"] = {"group_size": len(items)}
                return group
            why = f": {said(failure)}" if failure else ""
            raise RolloutsFailedError(
                f"{self.config.group_size - len(items)} of {self.config.group_size} rollouts failed "
                f"{self._attempts} times{why}"
            ) from failure
        return group
