"""Tests of an environment without a model: answers are written down, and one group is made of them.

::

    def test_the_right_sum_is_worth_more() -> None:
        group = one_group(Sums, ["8", "9"], item=(3, 5))
        assert group["scores"] == [1.0, 0.0]

Invariant: everything but the sampling is real: prompts, scoring, masks, the checks a group must pass. Nothing heavy is
loaded and no network is used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.endpoint import Prompt, SampleParams
from hermes_rl_mcp.envs.groups import checked
from hermes_rl_mcp.envs.hook_rules import check_hooks
from hermes_rl_mcp.envs.loading import defaults_of
from hermes_rl_mcp.envs.sampling import SamplingClient
from hermes_rl_mcp.envs.trajectory import Completion, ScoredDataGroup
from hermes_rl_mcp.errors import InvalidValueError

E = TypeVar("E", bound=BaseEnv)

_END = 256
_LOGPROB = -0.5


class BytesTokenizer:
    """One token for each byte of UTF-8, one for the end of a turn; a chat template that only appends."""

    eos_token_id = _END
    all_special_ids = (_END,)
    eos_token = "<|end|>"
    chat_template: str | None = "bytes"

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], tools: Any = None, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        text = f"[tools]{json.dumps(tools)}\n" if tools else ""
        for message in messages:
            text += f"[{message['role']}]{message.get('content') or ''}{self.eos_token}"
        return f"{text}[assistant]" if add_generation_prompt else text

    def encode(self, text: str, **_: Any) -> list[int]:
        pieces = text.split(self.eos_token)
        ids = list(pieces[0].encode())
        for piece in pieces[1:]:
            ids += [_END, *piece.encode()]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        end = b"" if skip_special_tokens else self.eos_token.encode()
        return b"".join(end if one == _END else bytes([one]) for one in token_ids).decode(errors="replace")


class ScriptedClient(SamplingClient):
    """Gives the written answers in their order, over and over; ``asked`` are the texts of the prompts."""

    def __init__(self, answers: Sequence[str]) -> None:
        super().__init__([], BytesTokenizer)
        if not answers:
            raise InvalidValueError("There are no answers to give.", hint='For example ["8", "9"].')
        self.answers = list(answers)
        self.asked: list[str] = []

    async def _ask(self, prompt: Prompt, params: SampleParams, split: str) -> list[Completion]:
        self.asked.append(prompt.text)
        return [self._completion(params.max_tokens) for _ in range(params.n)]

    def _completion(self, limit: int) -> Completion:
        text = self.answers[self.calls % len(self.answers)]
        self.calls += 1
        ids = [*text.encode(), _END]
        cut = len(ids) > limit
        ids = ids[:limit]
        kept = self.renderer.decode(ids, special=False)
        return Completion(kept, ids, [_LOGPROB] * len(ids), "length" if cut else "stop", 0)


async def make(environment: type[E], answers: Sequence[str] = ("",), **config: Any) -> E:
    """The environment, set up, with ``answers`` for a model and ``config`` over its defaults. Call its ``cleanup`` when
    done. Raises EnvironmentFileError for hooks that are missing or cannot be called."""
    check_hooks(environment, "process")
    default, _ = defaults_of(environment)
    values = {name: getattr(default, name) for name in type(default).model_fields}
    chosen = type(default).model_validate({**values, **config})
    env = environment(chosen, [])
    env.server = ScriptedClient(answers)
    env._tokenizer = BytesTokenizer()
    await env.setup()
    return env


def one_group(environment: type[BaseEnv], answers: Sequence[str], item: Any = None, **config: Any) -> ScoredDataGroup:
    """The group that these answers make, one sequence each: ``["scores"]``, ``["messages"]``, ``["overrides"]``...

    ``item`` None = the next one. ``config``: fields of its configuration. Raises what the environment raises, and
    BadGroupError for a group that could not be trained on.
    """

    async def run() -> ScoredDataGroup:
        env = await make(environment, answers, **{"group_size": len(answers), **config})
        try:
            asked = await env.get_next_item() if item is None else item
            groups = await env.groups_for(asked)
            if not groups:
                raise InvalidValueError(f"{environment.__name__} gave no group for {asked!r}.", hint="See its log.")
            checked(groups[0], group_size=env.config.group_size)
            return groups[0]
        finally:
            await env.cleanup()

    return run_now(run())


T = TypeVar("T")


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """For tests that are plain functions."""
    return asyncio.run(work)
