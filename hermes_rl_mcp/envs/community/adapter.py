"""Makes a class derived from Atropos' BaseEnv one of ours, so that the same loop serves, tests and evaluates it.

Invariant: the environment's own hooks run in the order that Atropos runs them; what Atropos' loop did around them (off-
policy limit, registration, checks of groups, retries) is ours.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import JsonValue

from hermes_rl_mcp.contracts.rollout_api import MASKED
from hermes_rl_mcp.envs.base import ROLLOUT_ATTEMPTS, BaseEnv, EvalReport, Groups
from hermes_rl_mcp.envs.community.mends import EVALUATION, SINK
from hermes_rl_mcp.envs.community.sampled import SAMPLED, Answer, with_notes
from hermes_rl_mcp.envs.community.servers import no_retries_below
from hermes_rl_mcp.envs.community.source import working_folder
from hermes_rl_mcp.envs.config import APIServerConfig, BaseEnvConfig, EvalHandling
from hermes_rl_mcp.envs.groups import REJECTED, BadGroupError
from hermes_rl_mcp.errors import EnvironmentFileError

log = logging.getLogger(__name__)

_MODULE = "atroposlib.envs.base"
_OUTPUTS = ("data_path_to_save_groups", "data_dir_to_save_evals")
"""Config fields; what they name is written by our side alone."""
_PER_SEQUENCE = ("masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides")
_NO_LIMIT_S = 30 * 86_400.0
"""In place of Atropos' -1, a group that may take as long as it likes."""


def is_community(chosen: type) -> bool:
    """Whether the class descends from Atropos' BaseEnv."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(chosen, module.BaseEnv) and chosen is not module.BaseEnv


def adapt(inner: type[Any]) -> type[BaseEnv]:
    """An environment class of ours that drives ``inner``. Raises EnvironmentFileError if a hook is missing."""
    missing = sorted(getattr(inner, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentFileError(
            f"{inner.__name__} lacks what Atropos asks of an environment: {', '.join(missing)}.",
            hint="Only a class that defines these can be run.",
        )
    try:
        inspect.signature(inner).bind(None, [], slurm=False, testing=False)
    except (TypeError, ValueError) as error:
        raise EnvironmentFileError(
            f"{inner.__name__} cannot be made out of a config and server configs, as Atropos' loop does: {error}.",
            hint="This class is not meant to be served; choose another one.",
        ) from error
    return type(
        inner.__name__,
        (CommunityEnv,),
        {"inner_class": inner, "name": inner.name, "__module__": inner.__module__, "__doc__": inner.__doc__},
    )


class CommunityEnv(BaseEnv):
    """One environment of Atropos' kind. ``adapt`` makes the subclass that can be used."""

    inner_class: Any = None
    trainer_defaults: ClassVar[dict[str, JsonValue]] = {"missing_logprobs": "recompute"}
    """Most of these environments ask for text and tokenise it themselves, so no logprobs come along."""

    @classmethod
    def config_init(cls) -> Any:
        """The environment's own config, and its servers as a list: a single one would have its address ignored."""
        config, servers = cls.inner_class.config_init()
        several = list(servers) if isinstance(servers, list | tuple) else [servers]
        server_class = sys.modules[_MODULE].APIServerConfig
        return config, [
            server if isinstance(server, server_class) else _full(server, server_class) for server in several
        ]

    def __init__(self, config: Any, server_configs: Sequence[Any], slurm: bool = False, testing: bool = False) -> None:
        for server in server_configs:
            server.health_check = False  # a real generation each second; who calls finds out whether it is there
            if server.tokenizer_name == "none":
                server.tokenizer_name = config.tokenizer_name  # a served model's name need not be loadable
        paths = {name: os.path.abspath(given) for name in _OUTPUTS if (given := getattr(config, name, None))}
        config = config.model_copy(update=paths)
        own = config.model_copy(update={"use_wandb": False, **dict.fromkeys(_OUTPUTS)})
        os.chdir(working_folder(Path(sys.modules[self.inner_class.__module__].__file__ or "")))
        self.inner = self.inner_class(own, list(server_configs), slurm=slurm, testing=testing)
        super().__init__(_shared(config), [_server(one) for one in server_configs], slurm, testing)
        self._tokenizer = self.inner.tokenizer
        for made in self.inner.server.servers:
            no_retries_below(made)
            if not hasattr(made, "tokenizer"):
                made.tokenizer = self.inner.tokenizer
        setattr(self.inner, SINK, self._take_metrics)

    @property
    def curr_step(self) -> int:
        """Batches the trainer has taken so far, as both sides know it."""
        return int(self.inner.curr_step)

    @curr_step.setter
    def curr_step(self, value: int) -> None:
        self.inner.curr_step = value

    async def setup(self) -> None:
        await self.inner.setup()

    async def get_next_item(self) -> Any:
        return await self.inner.get_next_item()

    async def collect_trajectories(self, item: Any) -> tuple[Groups, list[Any]]:
        """A group from which the environment left answers out is filled up with further answers to the same item."""
        groups, backlog = await self._collect(item)
        size = self.config.group_size
        for _ in range(ROLLOUT_ATTEMPTS - 1):
            if len(groups) != 1 or not 0 < len(groups[0]["scores"]) < size:
                break
            further, more = await self._collect(item)
            groups, backlog = [_joined(groups[0], one, size) for one in further[:1]] or groups, [*backlog, *more]
        found = [group for group in groups if group.get("group_overrides") or len(group["scores"]) >= size]
        if not found:
            raise BadGroupError(
                REJECTED,
                f"{type(self).__name__} gave no whole group; Atropos' environments leave out what is too short or cut "
                "off at max_token_length, and groups with equal scores; or something failed that they only logged",
            )
        return found, backlog

    async def _collect(self, item: Any) -> tuple[list[Any], list[Any]]:
        answers: list[Answer] = []
        token = SAMPLED.set(answers)
        try:
            groups, backlog = await self.inner.collect_trajectories(item)
            if groups:
                groups = await self.inner.postprocess_histories(groups)
        except Exception as error:
            if (cause := _behind(error)) is error:
                raise
            raise cause from error
        finally:
            SAMPLED.reset(token)
            await self.inner.cleanup()  # Atropos calls it after each group
        several = groups if isinstance(groups, list) else [groups]
        return [self._whole(group, answers) for group in several if group and group.get("scores")], list(backlog or [])

    async def evaluate(self) -> EvalReport:
        """Metrics wherever the environment leaves them: with ``evaluate_log``, in ``eval_metrics``, or for the next
        ``wandb_log``."""
        setattr(self.inner, EVALUATION, None)
        logged: dict[str, float] = {}
        setattr(self.inner, SINK, lambda metrics: logged.update(_numbers(metrics)))
        try:
            await self.inner.evaluate()
            metrics, samples, parameters = getattr(self.inner, EVALUATION) or ({}, [], {})
            pairs = getattr(self.inner, "eval_metrics", None)
            if isinstance(pairs, list):  # the custom of most environments: kept until the next log
                metrics = {**{name: value for name, value in pairs if isinstance(name, str)}, **metrics}
            if not metrics and not logged:
                await self.inner.wandb_log({})
        finally:
            setattr(self.inner, SINK, self._take_metrics)
        return EvalReport({**logged, **_numbers(metrics)}, samples, parameters)

    async def wandb_log(self, metrics: dict[str, float] | None = None) -> None:
        self._ours = await self.create_rollout_table(dict(metrics or {}))
        await self.inner.wandb_log({})

    def _take_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._metrics_sink({**_numbers(metrics), **getattr(self, "_ours", {})})

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        if self._point_at_checkpoints():
            self.inner.save_checkpoint(step, data)

    def load_checkpoint(self) -> None:
        if self.checkpoint_dir is None or not self._point_at_checkpoints():
            return
        found = [int(path.stem.removeprefix("step-")) for path in self.checkpoint_dir.glob("step-*.json")]
        step = max((step for step in found if step <= self.curr_step), default=None)
        if step is None:
            log.warning("no environment state up to step %d in %s", self.curr_step, self.checkpoint_dir)
            return
        now, self.inner.curr_step = self.inner.curr_step, step
        try:
            self.inner.load_checkpoint()
        finally:
            self.inner.curr_step = now

    async def cleanup(self) -> None:
        await self.inner.cleanup()

    def _point_at_checkpoints(self) -> bool:
        """The environment's own methods make the path out of two attributes."""
        if self.checkpoint_dir is None:
            return False
        self.inner.checkpoint_dir = str(self.checkpoint_dir.parent.parent)
        self.inner.wandb_prepend = self.checkpoint_dir.name
        return True

    def _whole(self, group: Mapping[str, Any], answers: Sequence[Answer]) -> Any:
        """With notes, and with messages where they are wanted and the environment gives none, as Atropos does."""
        for masks_T in group.get("masks") or []:
            self.inner.completion_lengths.append(sum(mask != MASKED for mask in masks_T))
        group = with_notes(group, answers, lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True))
        if not self.config.include_messages or group.get("messages"):
            return group
        texts = [self.tokenizer.decode(tokens_T) for tokens_T in group.get("tokens") or []]
        return {**group, "messages": [[{"role": "user", "content": text}] for text in texts]}


def _joined(group: Mapping[str, Any], further: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Both, at most ``size`` sequences. A column that one of them lacks is left out."""
    joined = dict(group)
    for name in (*_PER_SEQUENCE, "tokens"):
        mine, theirs = group.get(name) or [], further.get(name) or []
        if mine:
            joined[name] = [*mine, *theirs][:size] if theirs else None
    return joined


def _behind(error: Exception) -> Exception:
    """What made the retries fail; the error of the retrying itself says nothing."""
    while (attempt := getattr(error, "last_attempt", None)) is not None:
        found = attempt.exception()
        if not isinstance(found, Exception):
            break
        error = found
    return error


def _full(server: Any, server_class: Any) -> Any:
    """A server without an address of its own, with all fields."""
    return server_class(**server.model_dump())


def _shared(config: Any) -> BaseEnvConfig:
    """The fields that both kinds have, unjudged: the environment's own class has judged them."""
    values = {name: getattr(config, name) for name in BaseEnvConfig.model_fields if hasattr(config, name)}
    handling = getattr(config, "eval_handling", None)
    values["eval_handling"] = EvalHandling(getattr(handling, "value", handling) or EvalHandling.STOP_TRAIN)
    values["eval_items"] = 0
    if values["worker_timeout"] <= 0:
        values["worker_timeout"] = _NO_LIMIT_S
    return BaseEnvConfig.model_construct(**values)


def _server(config: Any) -> APIServerConfig:
    values = {name: getattr(config, name) for name in APIServerConfig.model_fields if hasattr(config, name)}
    return APIServerConfig.model_construct(**values)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What is a finite number; tables and texts stay behind."""
    found = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            found[str(name)] = number
    return found
