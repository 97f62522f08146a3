"""Sampling as environments see it: messages in, token-exact trajectories out, over one or several endpoints.

Invariant: the ids sent are the ids kept. A conversation is continued by appending the tokens of what is new; if the
chat template rewrites what was said before (drops think blocks, trims text), a new trajectory begins and is counted.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hermes_rl_mcp.envs.config import APIServerConfig
from hermes_rl_mcp.envs.endpoint import RECONNECT_S, Endpoint, Prompt, SampleParams, Usage
from hermes_rl_mcp.envs.familiar import ManagedServer, Reply, reply_of
from hermes_rl_mcp.envs.scoring import Scores, prompt_form
from hermes_rl_mcp.envs.tokenizer import Renderer
from hermes_rl_mcp.envs.trajectory import Completion, Message, Trajectory
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

log = logging.getLogger(__name__)

Tools = list[dict[str, Any]] | None


@dataclass
class Arm:
    """One answer of one side of an evaluation: what all sampling calls made for it have in common."""

    adapter: bool
    """False: the base model."""
    seed: int
    """The same on both sides."""
    calls: int = 0
    versions: set[int | None] = field(default_factory=set)
    """Policy versions that answered."""

    def apply(self, params: SampleParams) -> SampleParams:
        """For the next call. Each gets its own seed, else the turns of a conversation would share their luck."""
        digest = hashlib.sha256(f"{self.seed}:{self.calls}".encode()).digest()
        self.calls += 1
        return replace(params, adapter=self.adapter, evaluation=True, seed=int.from_bytes(digest[:6], "big"))


_ARM: ContextVar[Arm | None] = ContextVar("arm", default=None)


MORE_ROOM = (
    "Show fewer tools (enabled_toolsets), ask for less, let tools say less, or raise the smallest of "
    "max_rollout_tokens, max_token_trainer_length and the model's context (another model)."
)


class ConversationFullError(EndpointError):
    """No room is left for another answer."""


class SamplingClient:
    """``env.server``. Calls go to the endpoint with the fewest requests in flight."""

    def __init__(self, configs: Sequence[APIServerConfig], tokenizer: Callable[[], Any]) -> None:
        self.configs = list(configs)
        self.reconnect_s = RECONNECT_S
        """How long a lost endpoint is tried again; set before the first call."""
        self.calls = 0
        """Sampling calls answered so far."""
        self.rewritten = 0
        """Turns at which a new sample began, because the chat template had rewritten what was said before."""
        self.request_keys: Callable[[str], dict[str, Any]] = lambda base_url: {}
        """Further keys of a request to an endpoint of type openai, by its address."""
        self._tokenizer = tokenizer
        self._renderer: Renderer | None = None
        self._endpoints: list[Endpoint] = []

    async def chat(
        self, messages: Sequence[Message], *, tools: Tools = None, split: str = "train", **params: Any
    ) -> list[Trajectory]:
        """``n`` answers to one conversation. ``params`` are those of ``SampleParams``; ``split`` is train or eval."""
        text = self.renderer.prompt(messages, tools)
        prompt = Prompt(self.renderer.encode(text), text, list(messages), tools)
        return await self.fresh(prompt, SampleParams(**params), split)

    def session(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        split: str = "train",
        preserve_think_blocks: bool = False,
        **params: Any,
    ) -> Session:
        """A conversation of several turns; ``params`` hold for every turn. ``preserve_think_blocks`` as in
        ``managed_server``."""
        return Session(self, messages, tools, SampleParams(**params), split, preserve_think_blocks)

    async def chat_completion(
        self, *, messages: Sequence[Message], tools: Tools = None, split: str = "train", **params: Any
    ) -> Reply:
        """Atropos' name: an OpenAI-like reply (``.choices[i].message.content``), ids not kept."""
        return reply_of(await self.chat(messages, tools=tools, split=split, **_known(params)))

    async def completion(self, *, prompt: str, split: str = "train", **params: Any) -> Reply:
        """Atropos' name: continuations of raw text (``.choices[i].text``)."""
        asked = Prompt(self.renderer.encode(prompt), prompt)
        return reply_of(await self.fresh(asked, SampleParams(**_known(params)), split))

    @asynccontextmanager
    async def managed_server(
        self, tokenizer: Any = None, track_tree: bool = False, preserve_think_blocks: bool = False
    ) -> AsyncIterator[ManagedServer]:
        """Atropos' name: a server that keeps what it sampled; see ``get_state()["nodes"]``.

        ``preserve_think_blocks``: thoughts of earlier turns stay in the conversation where the chat template would drop
        them, so that it goes on in one sequence. ``tokenizer`` and ``track_tree`` are accepted for the sake of existing
        code: the environment's own tokenizer is used, and what extends no sequence begins one.
        """
        yield ManagedServer(self, preserve_think_blocks)

    async def score_tokens(
        self,
        context_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        top: int = 0,
        adapter: bool = True,
        split: str = "train",
    ) -> Scores:
        """What the model thinks of ``token_ids`` after ``context_ids``, whoever wrote them: their logprobs at
        temperature 1 and the ``top`` likeliest tokens at each place. ``adapter=False``: the base model alone, of our
        own sampler. Raises InvalidValueError where the endpoint's type cannot tell, EndpointError where it fails."""
        endpoint, params, split = self._chosen(SampleParams(adapter=adapter), split)
        scores = await endpoint.score(context_ids, token_ids, top=top, adapter=params.adapter, split=split)
        self._count(scores.policy_version)
        return scores

    async def get_logprobs(
        self,
        *,
        input_ids: Sequence[int] | None = None,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        top_k: int = 1,
        split: str = "train",
        **unused: Any,
    ) -> dict[str, Any]:
        """Atropos' name: ``prompt_tokens`` [T], and the ``top_k`` likeliest tokens at each of their places as
        ``prompt_topk_token_ids`` and ``prompt_topk_logprobs`` [T][K], [] at the first. Ids win over text over
        messages."""
        if input_ids is None:
            input_ids = self.renderer.encode(self.renderer.prompt(messages or []) if prompt is None else prompt)
        scores = await self.score_tokens(input_ids[:1], input_ids[1:], top=top_k, split=split)
        return prompt_form(input_ids, scores)

    @property
    def renderer(self) -> Renderer:
        if self._renderer is None:
            self._renderer = Renderer(self._tokenizer())
        return self._renderer

    async def fresh(
        self, prompt: Prompt, params: SampleParams, split: str, limit_tokens: int | None = None
    ) -> list[Trajectory]:
        """New trajectories, one per completion. ``limit_tokens``: the longest one, prompt and completion; raises
        ConversationFullError where that leaves no room."""
        trajectories = []
        for completion in await self._ask(prompt, _within(prompt, params, limit_tokens), split):
            trajectory = Trajectory(copy.deepcopy(prompt.messages or []), temperature=params.temperature)
            trajectory.add_context(prompt.text, prompt.ids)
            self._add(trajectory, completion)
            trajectories.append(trajectory)
        return trajectories

    async def extend(
        self,
        trajectory: Trajectory,
        prompt_text: str,
        messages: list[Message] | None,
        params: SampleParams,
        split: str,
        limit_tokens: int | None = None,
    ) -> bool:
        """Sample on from ``prompt_text`` within ``trajectory``. False, and nothing done, if it does not extend it.
        ``limit_tokens`` as in ``fresh``."""
        suffix = prompt_text.removeprefix(trajectory.text)
        if not suffix or not prompt_text.startswith(trajectory.text) or not trajectory.completions:
            return False
        suffix_ids = self.renderer.encode(suffix)
        prompt = Prompt([*trajectory.tokens_T, *suffix_ids], prompt_text, messages)
        [completion] = await self._ask(prompt, _within(prompt, replace(params, n=1), limit_tokens), split)
        trajectory.add_context(suffix, suffix_ids)
        trajectory.messages = copy.deepcopy(messages or [])
        self._add(trajectory, completion)
        return True

    @contextmanager
    def on(self, arm: Arm) -> Iterator[None]:
        """Within it, every call of this task and of tasks begun there samples for ``arm``, whatever it asks for as to
        seed and split; temperature and lengths stay those of the call."""
        token = _ARM.set(arm)
        try:
            yield
        finally:
            _ARM.reset(token)

    def usage(self) -> Usage:
        """What all endpoints together said that their answers took."""
        total = Usage()
        for one in (endpoint.usage for endpoint in self._endpoints):
            total.add({"usage": {**asdict(one), "cost": one.cost_usd}})
            total.providers |= one.providers
        return total

    def server_metrics(self) -> dict[str, float]:
        """``server/server_N_request_time_avg`` and its like, of each endpoint that was asked; Atropos' names."""
        found = [endpoint.timings.metrics(f"server/server_{number}") for number, endpoint in enumerate(self._endpoints)]
        return {name: value for one in found for name, value in one.items()}

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()

    def _add(self, trajectory: Trajectory, completion: Completion) -> None:
        text = self.renderer.decode(completion.token_ids, special=True)
        if completion.logprobs is not None or not completion.text:
            # The ids are the truth; a server's own text may have been cut at a stop string.
            completion = replace(completion, text=self.renderer.decode(completion.token_ids, special=False))
        trajectory.add_completion(completion, text)

    async def openai_reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        split: str = "train",
        extra_body: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> dict[str, Any]:
        """One answer of an endpoint of type openai as it came, tool calls and reasoning included."""
        prompt = Prompt([], "", list(messages), tools)
        endpoint, asked, split = self._chosen(SampleParams(**params), split)
        reply = await endpoint.openai_reply(prompt, asked, extra_body or {}, split=split)
        self._count(reply.get("policy_version"))
        return reply

    async def _ask(self, prompt: Prompt, params: SampleParams, split: str) -> list[Completion]:
        endpoint, asked, split = self._chosen(params, split)
        completions = await endpoint.sample(prompt, asked, split=split)
        self._count(*(completion.policy_version for completion in completions))
        return completions

    def _chosen(self, params: SampleParams, split: str) -> tuple[Endpoint, SampleParams, str]:
        """The least busy endpoint, and how it is asked in this task."""
        if not self._endpoints:
            if not self.configs:
                raise InvalidValueError("No sampling server is configured.", hint="Give the openai section one entry.")
            self._endpoints = [
                Endpoint(config, self._encode_answer, self.reconnect_s, self.request_keys(config.base_url))
                for config in self.configs
            ]
        endpoint = min(self._endpoints, key=lambda one: one.in_flight)
        arm = _ARM.get()
        if arm is not None:
            params, split = arm.apply(params), "eval"
        elif split == "eval":
            params = replace(params, evaluation=True)
        return endpoint, params, split

    def _count(self, *versions: int | None) -> None:
        self.calls += 1
        if (arm := _ARM.get()) is not None:
            arm.versions.update(versions)

    def _encode_answer(self, text: str, ended: bool) -> list[int]:
        end = self.renderer.tokenizer.eos_token_id
        return self.renderer.encode(text) + ([end] if ended and end is not None else [])


class Session:
    """One conversation over several turns.

    ``reply()`` samples the next assistant turn, ``add()`` says what the world answered. ``trajectories`` has one entry
    as long as the chat template only appends; each further entry is a new sample that began where it did not.
    """

    def __init__(
        self,
        client: SamplingClient,
        messages: Sequence[Message],
        tools: Tools,
        params: SampleParams,
        split: str,
        preserve_think_blocks: bool = False,
    ) -> None:
        self.messages: list[Message] = copy.deepcopy(list(messages))
        self.trajectories: list[Trajectory] = []
        self._client = client
        self._tools = tools
        self._params = replace(params, n=1)
        self._split = split
        self._preserve = preserve_think_blocks

    @property
    def trajectory(self) -> Trajectory:
        """The one that holds the latest turn."""
        return self.trajectories[-1]

    def add(self, *messages: Message) -> None:
        """What the user, a tool or the world says next."""
        self.messages.extend(copy.deepcopy(list(messages)))

    async def reply(self, *, limit_tokens: int | None = None, **params: Any) -> Completion:
        """The next assistant turn. ``params`` override those of the session for this turn. ``limit_tokens``: the
        longest conversation; raises ConversationFullError where there is no room for an answer, there or in the
        model's context."""
        asked = replace(self._params, **params)
        text = self._client.renderer.prompt(self.messages, self._tools, preserve_think_blocks=self._preserve)
        try:
            await self._sample(text, asked, limit_tokens)
        except ConversationFullError:
            raise
        except EndpointError as error:
            if not _says_full(error):
                raise
            raise ConversationFullError(error.message, hint=MORE_ROOM) from error
        self.messages.append({"role": "assistant", "content": self.trajectory.last.text})
        return self.trajectory.last

    async def _sample(self, text: str, asked: SampleParams, limit_tokens: int | None) -> None:
        """An answer to ``text``, in the trajectory that it goes on or in a new one."""
        if not (
            self.trajectories
            and await self._client.extend(
                self.trajectory, text, self.messages, asked, self._split, limit_tokens=limit_tokens
            )
        ):
            if self.trajectories:
                self._client.rewritten += 1
                log.log(
                    logging.WARNING if self._client.rewritten == 1 else logging.DEBUG,
                    "the chat template rewrites what was said before (think blocks?): a new sample begins at message "
                    "%d; said once",
                    len(self.messages),
                )
            prompt = Prompt(self._client.renderer.encode(text), text, self.messages, self._tools)
            self.trajectories += await self._client.fresh(prompt, asked, self._split, limit_tokens)


def _says_full(error: EndpointError) -> bool:
    """Whether an endpoint refused a prompt for its length: vLLM's, SGLang's and our own sampler's words."""
    text = str(error).lower()
    return "answered 400" in text and "context" in text


def _within(prompt: Prompt, params: SampleParams, limit_tokens: int | None) -> SampleParams:
    """With no more new tokens than fit."""
    if limit_tokens is None:
        return params
    room = limit_tokens - len(prompt.ids)
    if room < 1:
        raise ConversationFullError(
            f"The conversation has {len(prompt.ids)} tokens; {limit_tokens} leave no room for an answer.",
            hint=MORE_ROOM,
        )
    return replace(params, max_tokens=min(params.max_tokens, room))


def _known(params: dict[str, Any]) -> dict[str, Any]:
    """Without the stray keys that environments written for Atropos pass along."""
    return {name: value for name, value in params.items() if name in SampleParams.__dataclass_fields__}
