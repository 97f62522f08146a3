"""One sampling endpoint over HTTP: the request and reply shapes of its server type, and bounded patience.

Invariant: a call ends within the endpoint's ``timeout``. Busy (503, 429) is waited for, a lost connection is tried
again for ``RECONNECT_S``, a server error three times; a refusal (4xx) and a wrong answer are errors at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from hermes_rl_mcp.contracts.sampling_api import FinishReason
from hermes_rl_mcp.envs import scoring
from hermes_rl_mcp.envs.config import APIServerConfig
from hermes_rl_mcp.envs.scoring import Scores
from hermes_rl_mcp.envs.timings import Timings
from hermes_rl_mcp.envs.trajectory import Completion, Message
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

RECONNECT_S = 60.0
"""A sampler that restarts is back by then; one that is gone should fail the run soon enough to be seen."""
SERVER_ERROR_ATTEMPTS = 3
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
BUSY = (429, 503)
OPENAI_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length"}


@dataclass(frozen=True)
class SampleParams:
    """How to sample; the names of the OpenAI API."""

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    stop: str | list[str] | list[int] | None = None
    seed: int | None = None
    adapter: bool = True
    """False: the base model alone. Our own sampler's; not sent to servers of type openai."""
    evaluation: bool = False
    """Whether it is for an evaluation, which shares a busy sampler with the training. Our own sampler's."""

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise InvalidValueError(
                f"n and max_tokens must be at least 1, found n={self.n}, max_tokens={self.max_tokens}."
            )


@dataclass(frozen=True)
class Prompt:
    """One prompt in every form an endpoint may want it."""

    ids: list[int]
    text: str
    messages: list[Message] | None = None
    """None for a plain text prompt."""
    tools: list[dict[str, Any]] | None = None


@dataclass
class Usage:
    """What an endpoint said that its answers took. Nothing is guessed: what it does not say stays None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    providers: set[str] = field(default_factory=set)
    """Who answered behind a broker such as OpenRouter."""

    def add(self, reply: Any) -> None:
        """Of one reply in the form of OpenAI; OpenRouter adds ``usage.cost`` in US dollars and ``provider``."""
        if not isinstance(reply, dict):
            return
        if isinstance(reply.get("provider"), str):
            self.providers.add(reply["provider"])
        said = reply.get("usage")
        if not isinstance(said, dict):
            return
        for name, key in (("prompt_tokens",) * 2, ("completion_tokens",) * 2, ("cost_usd", "cost")):
            value = said.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                setattr(self, name, (getattr(self, name) or 0) + value)


@dataclass
class Endpoint:
    """``encode`` makes ids of an answer's text, for endpoints that give text only."""

    config: APIServerConfig
    encode: Callable[[str, bool], list[int]]
    """Text and whether it ended by itself (then the end-of-sequence id is appended)."""
    reconnect_s: float = RECONNECT_S
    request_keys: dict[str, Any] = field(default_factory=dict)
    """Further ones of a request in the form of OpenAI."""
    in_flight: int = 0
    usage: Usage = field(default_factory=Usage)
    _http: httpx.AsyncClient | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.config.base_url:
            raise InvalidValueError(
                "The sampling server has no address.", hint="Set openai.base_url, for example http://127.0.0.1:8001/v1."
            )
        self.timings = Timings(self.config.rolling_buffer_length)
        self._train = asyncio.Semaphore(self.config.num_max_requests_at_once)
        self._eval = asyncio.Semaphore(self.config.num_requests_for_eval)

    async def sample(self, prompt: Prompt, params: SampleParams, *, split: str = "train") -> list[Completion]:
        """``params.n`` completions. ``split`` "eval" has its own limit of requests in flight."""
        async with self._place(split):
            with self.timings.of(split):
                return await self._sample(prompt, params)

    async def openai_reply(
        self, prompt: Prompt, params: SampleParams, extra_body: Mapping[str, Any], *, split: str = "train"
    ) -> dict[str, Any]:
        """One chat answer as the endpoint gave it, for agents: calls taken apart, reasoning apart."""
        url = f"{self.config.base_url.rstrip('/')}/chat/completions"
        body = {**openai_body(self.config.model_name, prompt, params), **self.request_keys, **extra_body, "n": 1}
        async with self._place(split):
            reply = await self._post(url, body)
        self.usage.add(reply)
        parse_openai(reply, lambda text, ended: [])  # raises for what is no answer
        return dict(reply)

    async def score(
        self,
        context_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        top: int = 0,
        adapter: bool = True,
        split: str = "train",
    ) -> Scores:
        """What the model thinks of ``token_ids`` after ``context_ids``, at temperature 1, and of the ``top`` likeliest
        tokens at each place. For types vllm and sglang; raises InvalidValueError for others."""
        kind = self.config.server_type
        body = scoring.body_for(kind, context_ids, token_ids, top, adapter=adapter)
        url = self.config.base_url.rstrip("/").removesuffix("/v1") + "/generate"
        async with self._place(split):
            reply = await self._post(url, body)
        return scoring.parse(kind, reply, len(context_ids), token_ids, top)

    @asynccontextmanager
    async def _place(self, split: str) -> AsyncIterator[None]:
        """One of the requests that may be under way at once; counted from when it begins to wait."""
        self.in_flight += 1
        try:
            async with self._eval if split == "eval" else self._train:
                yield
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def _sample(self, prompt: Prompt, params: SampleParams) -> list[Completion]:
        base = self.config.base_url.rstrip("/")
        native = base.removesuffix("/v1")
        if self.config.server_type == "vllm":
            completions = parse_vllm(await self._post(f"{native}/generate", vllm_body(prompt, params)))
        elif self.config.server_type == "sglang":
            completions = parse_sglang(await self._post(f"{native}/generate", sglang_body(prompt, params)))
        elif self.config.server_type == "trl":
            completions = parse_trl(await self._post(f"{native}/generate/", trl_body(prompt, params)), self.encode)
        else:
            return await self._sample_text(base, prompt, params)
        if len(completions) != params.n:
            raise EndpointError(
                f"{native}/generate answered {len(completions)} completions where {params.n} were asked."
            )
        return completions

    async def _sample_text(self, base: str, prompt: Prompt, params: SampleParams) -> list[Completion]:
        """OpenAI-compatible. An endpoint that ignores n is asked again for the missing ones."""
        url = f"{base}/completions" if prompt.messages is None else f"{base}/chat/completions"
        first = 1 if self.config.n_kwarg_is_ignored else params.n
        body = {**openai_body(self.config.model_name, prompt, params), **self.request_keys}

        async def ask(n: int) -> list[Completion]:
            reply = await self._post(url, {**body, "n": n})
            self.usage.add(reply)
            return parse_openai(reply, self.encode)

        completions = (await ask(first))[: params.n]
        missing = params.n - len(completions)
        if missing:
            more = await asyncio.gather(*(ask(1) for _ in range(missing)))
            completions += [completion for reply in more for completion in reply[:1]]
        if len(completions) != params.n:
            raise EndpointError(f"{url} answered {len(completions)} choices where {params.n} were asked.")
        return completions

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        started = time.monotonic()
        lost_since: float | None = None
        errors = 0
        wait_s = FIRST_WAIT_S
        while True:
            remaining_s = self.config.timeout - (time.monotonic() - started)
            if remaining_s <= 0:
                raise EndpointError(f"{url} was busy for {self.config.timeout} s.", hint="Is the sampler alive?")
            try:
                response = await self._client().post(url, json=body, timeout=remaining_s)
            except httpx.ReadTimeout as error:
                raise EndpointError(f"{url} did not answer within {self.config.timeout} s.") from error
            except httpx.TransportError as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > self.reconnect_s:
                    raise EndpointError(
                        f"{url} could not be reached for {self.reconnect_s:.0f} s: {type(error).__name__}: {error}",
                        hint="Start the sampling server, or correct openai.base_url.",
                    ) from error
            else:
                lost_since = None
                if response.status_code == 200:
                    return _json(response)
                errors += response.status_code not in BUSY
                if (response.status_code < 500 and response.status_code not in BUSY) or errors >= SERVER_ERROR_ATTEMPTS:
                    raise EndpointError(f"{url} answered {response.status_code}: {response.text[:300]}")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            loopback = urlsplit(self.config.base_url).hostname in ("127.0.0.1", "localhost", "::1")
            key = _api_key(self.config)
            self._http = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=not loopback,  # a proxy for the outside world must not see loopback traffic
            )
        return self._http


def vllm_body(prompt: Prompt, params: SampleParams) -> dict[str, Any]:
    common = {"n": params.n, "max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p}
    return {"prompt": {"prompt_token_ids": prompt.ids}, "logprobs": 0, **common, **_optional(params), **_ours(params)}


def sglang_body(prompt: Prompt, params: SampleParams) -> dict[str, Any]:
    sampling = {
        "n": params.n,
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        **_optional(params),
    }
    return {
        "input_ids": prompt.ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_text_in_logprobs": False,
        **_ours(params),
    }


def openai_body(model: str, prompt: Prompt, params: SampleParams) -> dict[str, Any]:
    what: dict[str, Any] = {"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}
    if prompt.tools:
        what["tools"] = prompt.tools
    body = {**what, "model": model, "max_tokens": params.max_tokens, "temperature": params.temperature}
    return {**body, "top_p": params.top_p, **_optional(params)}


def trl_body(prompt: Prompt, params: SampleParams) -> dict[str, Any]:
    """Of ``trl vllm-serve``, which knows neither stop nor seed."""
    if params.stop is not None:
        raise InvalidValueError("A server of type trl cannot stop at a text.", hint="Leave stop out, or use vllm.")
    sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": -1, "min_p": 0.0}
    return {
        **{"prompts": [prompt.text], "n": params.n, "repetition_penalty": 1.0, "max_tokens": params.max_tokens},
        **sampling,
    }


def parse_vllm(reply: Any) -> list[Completion]:
    """``logprobs`` is [n][T][1] {"<token id>": logprob}; the sampled token comes first."""
    completions = []
    try:
        versions = reply.get("policy_versions") or [reply.get("policy_version")] * len(reply["logprobs"])
        for index, (entries_T, finish) in enumerate(zip(reply["logprobs"], reply["finish_reasons"], strict=True)):
            pairs = [next(iter((entry[0] if isinstance(entry, list) else entry).items())) for entry in entries_T]
            text = (reply.get("text") or [])[index : index + 1]
            completions.append(_completion(pairs, finish, text[0] if text else "", versions[index]))
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration, IndexError) as error:
        raise _wrong_shape("vllm", error) from error
    return completions


def parse_sglang(reply: Any) -> list[Completion]:
    """One object for n = 1, a list of them otherwise."""
    completions = []
    try:
        for one in reply if isinstance(reply, list) else [reply]:
            meta = one["meta_info"]
            pairs = [(entry[1], entry[0]) for entry in meta["output_token_logprobs"]]
            finish = meta["finish_reason"]
            reason = finish["type"] if isinstance(finish, dict) else finish
            completions.append(_completion(pairs, reason, one.get("text") or "", meta.get("policy_version")))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _wrong_shape("sglang", error) from error
    return completions


def parse_trl(reply: Any, encode: Callable[[str, bool], list[int]]) -> list[Completion]:
    """``completion_ids`` is [n][T]. An answer that the model ended itself ends in the end-of-sequence id."""
    try:
        rows = [[int(one) for one in row] for row in reply["completion_ids"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong_shape("trl", error) from error
    end = encode("", True)
    return [Completion("", row, None, "stop" if end and row[-1:] == end else "length") for row in rows]


def parse_openai(reply: Any, encode: Callable[[str, bool], list[int]]) -> list[Completion]:
    """Text only: ids are made from it and logprobs stay None. A broker may answer 200 with nothing but an error."""
    if isinstance(reply, dict) and reply.get("error") and not reply.get("choices"):
        raise EndpointError(f"The sampling server answered with an error: {str(reply['error'])[:300]}")
    completions = []
    try:
        for choice in reply["choices"]:
            text = (choice["message"].get("content") if "message" in choice else choice["text"]) or ""
            reason = OPENAI_FINISH.get(choice.get("finish_reason"))
            completions.append(
                Completion(text, encode(text, reason == "stop"), None, reason, reply.get("policy_version"))
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise _wrong_shape("openai", error) from error
    return completions


def _completion(pairs: Sequence[tuple[Any, Any]], reason: Any, text: str, version: int | None) -> Completion:
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    logprobs = [float(logprob) for _, logprob in pairs]
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in logprobs):
        raise ValueError("a logprob is not a finite number of at most 0")
    # Rounding in the softmax can leave a hair above 0, which the wire would read as "no logprob".
    ids = [int(token_id) for token_id, _ in pairs]
    return Completion(text, ids, [min(logprob, 0.0) for logprob in logprobs], reason, version)


def _optional(params: SampleParams) -> dict[str, Any]:
    given = {"stop": params.stop, "seed": params.seed}
    return {name: value for name, value in given.items() if value is not None}


def _ours(params: SampleParams) -> dict[str, Any]:
    """What only our own sampler knows, left out where it says nothing: other servers may refuse strange keys."""
    given = {"adapter": params.adapter, "evaluation": params.evaluation}
    usual = {"adapter": True, "evaluation": False}
    return {name: value for name, value in given.items() if value != usual[name]}


def _wrong_shape(server_type: str, error: Exception) -> EndpointError:
    return EndpointError(
        f"The sampling server's answer is not of server type {server_type}: {type(error).__name__}: {error}",
        hint="Check openai.server_type against the server that runs at openai.base_url.",
    )


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise EndpointError(f"{response.url} did not answer JSON: {response.text[:200]!r}") from error


def _api_key(config: APIServerConfig) -> str:
    """A literal key, or ``$NAME`` out of the environment; the OpenAI variable when an openai server has none."""
    if config.api_key.startswith("$"):
        return os.environ.get(config.api_key[1:], "")
    if not config.api_key and config.server_type == "openai":
        return os.environ.get("OPENAI_API_KEY", "")
    return config.api_key
