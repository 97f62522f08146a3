"""Atropos' clients of sampling endpoints, set right: one layer of retries, evaluation apart, conversations that
continue token by token, and sequences also of endpoints that answer with text alone.

Nothing on disk is touched. Called once per process, before an environment is made.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import NO_LOGPROB
from hermes_rl_mcp.envs.community.sampled import Answer, ending, note

ATTEMPTS = 3
"""Of one call, whatever went wrong; the original makes up to 27."""
PATIENCE_S = 20.0
"""For an endpoint that is not there or says that it is busy, however many attempts that takes."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
"""Between two attempts."""
_NOT_NOW = (None, 429, 503)
_MAY_PASS = (0, 408, *_NOT_NOW)
_SPLIT: ContextVar[str] = ContextVar("split", default="train")
"""Of the call under way; the original's manager forgets it, and an evaluation takes training's places."""
VERSIONS: ContextVar[list[int | None]] = ContextVar("versions")
"""Filled with the policy versions of the answer that is being read."""
_MANAGED = ("chat_completion", "completion", "tokens_and_logprobs_completion", "get_logprobs")
_RETRIED = (
    *("_chat_comp", "_chat_eval", "_comp", "_comp_eval", "_logprobs", "_logprobs_eval"),
    *("_tokens_and_logprobs_comp", "_tokens_and_logprobs_comp_eval"),
)

Call = Callable[..., Awaitable[Any]]


def mend_servers() -> None:
    """All of it. Raises ModuleNotFoundError without atroposlib."""
    handling = "atroposlib.envs.server_handling"
    names = ("server_baseline", "server_manager", "managed_server", "openai_server", "vllm_server", "sglang_server")
    modules = {name: importlib.import_module(f"{handling}.{name}") for name in names}
    server = modules["server_baseline"].APIServer
    manager = modules["server_manager"].ServerManager
    _retries(server)
    _splits(manager, server)
    _continuations(modules["managed_server"].ManagedServer)
    _texts(manager, modules["managed_server"].ManagedServer)
    openai, vllm, sglang = modules["openai_server"], modules["vllm_server"], modules["sglang_server"]
    for found in (openai.OpenAIServer, vllm.VLLMServer, sglang.SGLangServer):
        _notes_texts(found)
        if found is not openai.OpenAIServer:
            _notes_tokens(found)


def no_retries_below(server: Any) -> None:
    """One server object: its OpenAI client makes no attempts of its own."""
    if hasattr(server, "openai"):
        server.openai.max_retries = 0


def _retries(server: Any) -> None:
    for name in _RETRIED:
        policy = getattr(server, name).retry
        policy.stop, policy.reraise = _enough, True
        policy.retry = _is_worth_another
        policy.wait = lambda state: min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**state.attempt_number)
    outer = server.chat_completion.retry
    outer.stop, outer.reraise = (lambda state: True), True


def _enough(state: Any) -> bool:
    if _status(state.outcome.exception()) in _NOT_NOW:
        return bool(state.seconds_since_start >= PATIENCE_S)
    return bool(state.attempt_number >= ATTEMPTS)


def _is_worth_another(state: Any) -> bool:
    """A request that was refused is refused again."""
    error = state.outcome.exception()
    if error is None:
        return False
    status = _status(error)
    return isinstance(error, Exception) and (status in _MAY_PASS or not 400 <= (status or 0) < 500)


def _status(error: BaseException | None) -> int | None:
    """Of HTTP; 0 for an error that has nothing to do with it, None for an endpoint that cannot be reached."""
    for name in ("status_code", "status"):
        if isinstance(found := getattr(error, name, None), int):
            return found
    unreachable = isinstance(error, ConnectionError) or type(error).__name__ in (
        *("APIConnectionError", "ClientConnectorError", "ServerDisconnectedError", "ClientOSError"),
    )
    return None if unreachable else 0


def _splits(manager: Any, server: Any) -> None:
    for name in _MANAGED:
        setattr(manager, name, _remembering(getattr(manager, name)))
        setattr(server, name, _told(getattr(server, name)))


def _remembering(original: Call) -> Call:
    @wraps(original)
    async def call(self: Any, **kwargs: Any) -> Any:
        token = _SPLIT.set(kwargs.get("split", "train"))
        try:
            return await original(self, **kwargs)
        finally:
            _SPLIT.reset(token)

    return call


def _told(original: Call) -> Call:
    @wraps(original)
    async def call(self: Any, **kwargs: Any) -> Any:
        return await original(self, **{"split": _SPLIT.get(), **kwargs})

    return call


def _notes_tokens(server: Any) -> None:
    original: Call = server._tokens_and_logprobs_completion_wrapper

    @wraps(original)
    async def call(self: Any, **kwargs: Any) -> Any:
        versions: list[int | None] = []
        token = VERSIONS.set(versions)
        try:
            reply = await original(self, **kwargs)
        finally:
            VERSIONS.reset(token)
        _, ids, _, reasons = reply
        known = versions if len(versions) == len(ids) else [None] * len(ids)
        temperature = float(kwargs.get("temperature", 1.0))
        note(
            Answer(tuple(one), "", ending(reason), version, temperature)
            for one, reason, version in zip(ids, reasons, known, strict=True)
        )
        return reply

    server._tokens_and_logprobs_completion_wrapper = call


def _notes_texts(server: Any) -> None:
    for name in ("_chat_completion_wrapper", "_completion_wrapper"):
        setattr(server, name, _noting(getattr(server, name)))


def _noting(original: Call) -> Call:
    @wraps(original)
    async def call(self: Any, **kwargs: Any) -> Any:
        reply = await original(self, **kwargs)
        version, temperature = getattr(reply, "policy_version", None), float(kwargs.get("temperature") or 1.0)
        note(Answer((), _text(choice), ending(choice.finish_reason), version, temperature) for choice in reply.choices)
        return reply

    return call


def _text(choice: Any) -> str:
    message = getattr(choice, "message", None)
    return (message.content if message is not None else choice.text) or ""


def _continuations(managed: Any) -> None:
    """A turn that ended by a special token is followed by the template's own one; the model must not see it twice. And
    an answer without any text does not make the next call with the same prompt its continuation."""
    original = managed._compute_input_ids

    @wraps(original)
    def ids(self: Any, input_text: str, extending_node: Any) -> list[int]:
        end = getattr(self.tokenizer, "eos_token", None)
        if extending_node is None or not end or extending_node.tokens[-1] != self.tokenizer.eos_token_id:
            return list(original(self, input_text, extending_node))
        rest = input_text[len(extending_node.full_text) :].removeprefix(end)
        return [*extending_node.tokens, *self.tokenizer.encode(rest, add_special_tokens=False)]

    def extended(self: Any, input_text: str) -> Any:
        nodes = self.current_nodes
        fitting = (one for one in nodes if input_text.startswith(one.full_text) and input_text != one.full_text)
        return next(fitting, None)

    managed._compute_input_ids = ids
    managed._find_extending_node = extended


def _texts(manager: Any, managed: Any) -> None:
    original = manager.managed_server
    kind = _text_only(managed)

    @asynccontextmanager
    async def managed_server(self: Any, tokenizer: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        without_tokens = [one for one in self.servers if type(one).__name__ in ("OpenAIServer", "TrlVllmServer")]
        if not without_tokens or self.use_proxy:
            async with original(self, tokenizer=tokenizer, **kwargs) as found:
                yield found
            return
        server = max(without_tokens, key=lambda one: one.sem._value)
        made = kind(server, tokenizer=tokenizer, preserve_think_blocks=kwargs.get("preserve_think_blocks", False))
        try:
            yield made
        finally:
            made.reset()

    manager.managed_server = managed_server


def _text_only(managed: Any) -> Any:
    """The class of managed servers for endpoints that give text: for tests and evaluations, as what is trained on must
    be what was sampled. Tokens are made from the text, and their logprobs are marked as unknown."""

    async def chat_completion(self: Any, **kwargs: Any) -> Any:
        reply = await self.server.chat_completion(**kwargs)
        keep(self, self._convert_messages_to_prompt(kwargs.get("messages", []), tools=kwargs.get("tools")), reply)
        return reply

    async def completion(self: Any, **kwargs: Any) -> Any:
        reply = await self.server.completion(**kwargs)
        keep(self, kwargs.get("prompt", ""), reply)
        return reply

    def keep(self: Any, prompt: str, reply: Any) -> None:
        before = self._find_extending_node(prompt)
        prompt_ids = self._compute_input_ids(prompt, before)
        if before is not None:
            self.current_nodes.remove(before)
        for choice in reply.choices:
            text = _text(choice)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if choice.finish_reason != "length" and self.tokenizer.eos_token_id is not None:
                ids = [*ids, self.tokenizer.eos_token_id]
            unknown = [NO_LOGPROB] * len(ids)
            node = self._create_sequence_node(
                prompt, None, prompt_ids, ids, unknown, text, choice.finish_reason or "stop", before
            )
            self.current_nodes.append(node)

    return type("TextManagedServer", (managed,), {"chat_completion": chat_completion, "completion": completion})
