"""The shapes that environments written for Atropos expect around sampling: OpenAI-like replies, ``managed_server``.

Thin: all sampling is done by ``SamplingClient``. Unlike the original, the first turn of a conversation keeps its mask,
and an empty completion does not make a later call with the same prompt look like its continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_rl_mcp.contracts.rollout_api import MASKED
from hermes_rl_mcp.contracts.sampling_api import FinishReason
from hermes_rl_mcp.envs.endpoint import Prompt, SampleParams
from hermes_rl_mcp.envs.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from hermes_rl_mcp.envs.sampling import SamplingClient


@dataclass(frozen=True)
class ReplyMessage:
    content: str
    role: str = "assistant"


@dataclass(frozen=True)
class ReplyChoice:
    index: int
    message: ReplyMessage
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Reply:
    choices: list[ReplyChoice]


@dataclass(frozen=True)
class SequenceNode:
    """One sequence, under Atropos' names."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any]
    trajectory: Trajectory


def reply_of(trajectories: Sequence[Trajectory]) -> Reply:
    lasts = [trajectory.last for trajectory in trajectories]
    return Reply([ReplyChoice(i, ReplyMessage(c.text), c.text, c.finish_reason) for i, c in enumerate(lasts)])


def _node(trajectory: Trajectory) -> SequenceNode:
    """Ids made from a text, for want of the sampler's own, must never be trained on: all of them are masked."""
    exact = trajectory.exact
    masked_tokens = trajectory.masks_T if exact else [MASKED] * len(trajectory.tokens_T)
    metadata = {"finish_reason": trajectory.last.finish_reason, "exact": exact}
    return SequenceNode(
        trajectory.text, trajectory.tokens_T, masked_tokens, trajectory.logprobs_T, metadata, trajectory
    )


class ManagedServer:
    """Keeps every sequence it sampled. A call whose prompt exactly extends one of them continues it; of calls that run
    at once no two continue the same one."""

    def __init__(self, client: SamplingClient, preserve_think_blocks: bool = False) -> None:
        self._client = client
        self._preserve = preserve_think_blocks
        self._trajectories: list[Trajectory] = []
        self._growing: set[int] = set()
        """Identities of those that a call under way continues."""

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        split: str = "train",
        **params: Any,
    ) -> Reply:
        text = self._client.renderer.prompt(messages, tools, preserve_think_blocks=self._preserve)
        return await self._call(text, list(messages), tools, split, params)

    async def completion(self, *, prompt: str, split: str = "train", **params: Any) -> Reply:
        return await self._call(prompt, None, None, split, params)

    def get_state(self) -> dict[str, list[SequenceNode]]:
        """``nodes``: one for each sequence, in the order in which they began."""
        return {"nodes": [_node(one) for one in self._trajectories]}

    def reset(self) -> None:
        self._trajectories.clear()

    async def _call(
        self, text: str, messages: list[Message] | None, tools: Any, split: str, params: dict[str, Any]
    ) -> Reply:
        asked = SampleParams(**{k: v for k, v in params.items() if k in SampleParams.__dataclass_fields__})
        if asked.n == 1:
            for trajectory in self._trajectories:
                if id(trajectory) in self._growing:
                    continue
                self._growing.add(id(trajectory))
                try:
                    if await self._client.extend(trajectory, text, messages, asked, split):
                        return reply_of([trajectory])
                finally:
                    self._growing.discard(id(trajectory))
        prompt = Prompt(self._client.renderer.encode(text), text, messages, tools)
        fresh = await self._client.fresh(prompt, asked, split)
        self._trajectories += fresh
        return reply_of(fresh)
