"""Chooses a server; forgets what a call is for."""

from contextlib import asynccontextmanager
from typing import Any

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer


class ServerManager:
    def __init__(self, configs: Any) -> None:
        self.servers = [(VLLMServer if one.server_type == "vllm" else OpenAIServer)(one) for one in configs]
        self.use_proxy = False

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, preserve_think_blocks: bool = False) -> Any:
        if type(self.servers[0]) is OpenAIServer:
            raise NotImplementedError("OpenAI endpoints do not support token IDs")
        yield ManagedServer(self.servers[0], tokenizer)


def _routed(name: str) -> Any:
    async def call(self: Any, **kwargs: Any) -> Any:
        kwargs.pop("split", None)
        return await getattr(self.servers[0], name)(**kwargs)

    return call


for _name in ("chat_completion", "completion", "tokens_and_logprobs_completion", "get_logprobs"):
    setattr(ServerManager, _name, _routed(_name))
