"""Of the same kind."""

from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.envs.server_handling.vllm_server import aiohttp as aiohttp


class SGLangServer(VLLMServer):
    pass
