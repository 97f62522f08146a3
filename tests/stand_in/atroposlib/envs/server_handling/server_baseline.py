"""Server configs, and the server that counts attempts and retries."""

import asyncio
from functools import wraps
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import BaseModel


def retry(call: Any) -> Any:
    """As tenacity does it: three attempts for everything, unless the policy at ``.retry`` says otherwise."""
    policy = SimpleNamespace(reraise=False, wait=lambda state: 0.0, retry=lambda state: True)
    policy.stop = lambda state: state.attempt_number >= 3

    @wraps(call)
    async def attempts(*args: Any, **kwargs: Any) -> Any:
        number = 0
        while True:
            number += 1
            try:
                return await call(*args, **kwargs)
            except Exception as error:
                outcome = SimpleNamespace(exception=lambda found=error: found)
                state = SimpleNamespace(attempt_number=number, seconds_since_start=0.0, outcome=outcome)
                if not policy.retry(state) or policy.stop(state):
                    raise
                await asyncio.sleep(policy.wait(state))

    attempts.retry = policy  # type: ignore[attr-defined]
    return attempts


class ServerBaseline(BaseModel):
    timeout: int = 1200
    num_max_requests_at_once: int = 512
    num_requests_for_eval: int = 64
    model_name: str = "default"
    rolling_buffer_length: int = 1000
    server_type: Literal["openai", "trl", "sglang", "vllm"] = "openai"
    tokenizer_name: str = "none"


class APIServerConfig(ServerBaseline):
    api_key: str | None = ""
    base_url: str | None = ""
    n_kwarg_is_ignored: bool = False
    health_check: bool = True


class APIServer:
    def __init__(self, config: APIServerConfig) -> None:
        self.config = config
        self.sem = asyncio.Semaphore(config.num_max_requests_at_once)
        self.eval_sem = asyncio.Semaphore(config.num_requests_for_eval)

    @retry
    async def chat_completion(self, **kwargs: Any) -> Any:
        return await (self._chat_comp if kwargs.pop("split", "train") == "train" else self._chat_eval)(**kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        return await (self._comp if kwargs.pop("split", "train") == "train" else self._comp_eval)(**kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        training = kwargs.pop("split", "train") == "train"
        return await (self._tokens_and_logprobs_comp if training else self._tokens_and_logprobs_comp_eval)(**kwargs)

    async def get_logprobs(self, **kwargs: Any) -> Any:
        return await self._logprobs(**kwargs)


def _called(wrapper: str, places: str) -> Any:
    async def call(self: Any, **kwargs: Any) -> Any:
        async with getattr(self, places):
            return await getattr(self, wrapper)(**kwargs)

    return retry(call)


for _name, _wrapper in (
    *(("_chat_comp", "_chat_completion_wrapper"), ("_comp", "_completion_wrapper")),
    *(("_tokens_and_logprobs_comp", "_tokens_and_logprobs_completion_wrapper"), ("_logprobs", "_get_logprobs_wrapper")),
):
    setattr(APIServer, _name, _called(_wrapper, "sem"))
    setattr(APIServer, "_chat_eval" if _name == "_chat_comp" else f"{_name}_eval", _called(_wrapper, "eval_sem"))
