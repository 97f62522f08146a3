"""What is broken around Atropos' environments with today's libraries, set right in this process before one is loaded.

Nothing on disk is touched. Every mend can be made twice without harm.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from functools import wraps
from typing import Any

from hermes_rl_mcp.envs.community.servers import VERSIONS, mend_servers

SINK = "_hermes_rl_sink"
"""Attribute of an environment: where its metrics go."""
EVALUATION = "_hermes_rl_evaluation"
"""Attribute of an environment: what its last evaluation handed over (metrics, samples, generation parameters)."""
_SAID_CHARS = 500
"""Of a server's reason."""
_DONE = "_hermes_rl_mended"


def mend() -> None:
    """All of them. Raises ModuleNotFoundError without atroposlib."""
    os.environ["WANDB_MODE"] = "disabled"  # the trainer logs; an environment must not ask for a key or a network
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request of the OpenAI client
    _templates()
    base = importlib.import_module("atroposlib.envs.base").BaseEnv
    if not getattr(base, _DONE, False):
        _answers()
        mend_servers()
        _metrics(base)
        _evaluations(base)
        setattr(base, _DONE, True)


def _templates() -> None:
    """From version 5 on transformers answers a mapping where the environments take a list of ids for granted."""
    tokenizer = importlib.import_module("transformers").PreTrainedTokenizerBase
    original = tokenizer.apply_chat_template
    if getattr(original, _DONE, False):
        return

    @wraps(original)
    def as_before(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("return_dict", False)
        return original(self, *args, **kwargs)

    setattr(as_before, _DONE, True)
    tokenizer.apply_chat_template = as_before


class _Saying:
    """aiohttp for one module: an answer that is refused raises with what the server said, not with its number alone;
    of one that is not, the policy versions are noted."""

    def __init__(self, aiohttp: Any) -> None:
        self._aiohttp = aiohttp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._aiohttp, name)

    def ClientSession(self, *args: Any, **kwargs: Any) -> Any:
        return self._aiohttp.ClientSession(*args, raise_for_status=self._check, **kwargs)

    async def _check(self, response: Any) -> None:
        if response.status >= 400:
            said = (await response.text())[:_SAID_CHARS]
            raise self._aiohttp.ClientResponseError(
                response.request_info, response.history, status=response.status, message=said
            )
        if (versions := VERSIONS.get(None)) is not None and response.content_type == "application/json":
            said = await response.json()  # kept by the response, which is read again
            if isinstance(said, dict):
                one = [said.get("policy_version")] * len(said.get("logprobs") or [])
                versions.extend(said.get("policy_versions") or one)


def _answers() -> None:
    for name in ("vllm_server", "sglang_server"):
        module: Any = importlib.import_module(f"atroposlib.envs.server_handling.{name}")
        module.aiohttp = _Saying(module.aiohttp)


def _metrics(base: Any) -> None:
    """What would go to W&B is handed to the adapter as well."""
    original = base.wandb_log

    @wraps(original)
    async def wandb_log(self: Any, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        await original(self, metrics)
        if sink := getattr(self, SINK, None):
            sink(metrics)

    base.wandb_log = wandb_log


def _evaluations(base: Any) -> None:
    """The adapter writes the files; an environment without a folder for them would fail."""

    @wraps(base.evaluate_log)
    async def evaluate_log(
        self: Any,
        metrics: Mapping[str, Any],
        *args: Any,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        setattr(self, EVALUATION, (dict(metrics), list(samples or []), dict(generation_parameters or {})))

    base.evaluate_log = evaluate_log
