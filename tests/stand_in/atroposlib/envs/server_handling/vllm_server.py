"""An endpoint that answers with token ids and logprobs."""

from types import SimpleNamespace
from typing import Any

import httpx

from atroposlib.envs.server_handling.openai_server import OpenAIServer


class ClientResponseError(Exception):
    def __init__(self, request_info: Any, history: Any, *, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class ClientSession:
    """Of aiohttp, what is used here."""

    def __init__(self, *, raise_for_status: Any = None) -> None:
        self._check = raise_for_status

    async def post(self, url: str, body: Any) -> Any:
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = await client.post(url, json=body)
        found = SimpleNamespace(status=reply.status_code, request_info=None, history=())
        found.content_type = reply.headers.get("content-type", "").split(";")[0]

        async def text() -> str:
            return reply.text

        async def json() -> Any:
            return reply.json()

        found.text, found.json = text, json
        if self._check:
            await self._check(found)
        elif reply.status_code >= 400:
            raise ClientResponseError(None, (), status=reply.status_code, message="")
        return found


aiohttp = SimpleNamespace(ClientSession=ClientSession, ClientResponseError=ClientResponseError)


class VLLMServer(OpenAIServer):
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
        prompt = kwargs.pop("input_ids")
        session = aiohttp.ClientSession()
        body = {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, **kwargs}
        reply = await (await session.post(f"{(self.config.base_url or '').replace('/v1', '')}/generate", body)).json()
        pairs = [[next(iter(one[0].items())) for one in tokens] for tokens in reply["logprobs"]]
        ids = [[int(token) for token, _ in tokens] for tokens in pairs]
        return prompt, ids, [[value for _, value in tokens] for tokens in pairs], reply["finish_reasons"]
