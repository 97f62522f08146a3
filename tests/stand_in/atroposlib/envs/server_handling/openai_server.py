"""An endpoint that answers with text."""

from types import SimpleNamespace
from typing import Any

import httpx

from atroposlib.envs.server_handling.server_baseline import APIServer


class StatusError(Exception):
    def __init__(self, status_code: int) -> None:
        super().__init__(f"HTTP {status_code}")
        self.status_code = status_code


class OpenAIServer(APIServer):
    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = await client.post(f"{self.config.base_url}/chat/completions", json={"model": "m", **kwargs})
        if reply.status_code >= 400:
            raise StatusError(reply.status_code)
        choices = [
            SimpleNamespace(
                finish_reason=one["finish_reason"], message=SimpleNamespace(content=one["message"]["content"])
            )
            for one in reply.json()["choices"]
        ]
        return SimpleNamespace(choices=choices)

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        raise NotImplementedError
