"""The environment's client against the real sampler and the real tiny model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from env_rig import TINY, child_environ, until
from leash import leash, leashed

from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_LOGPROB
from hermes_rl_mcp.envs import APIServerConfig, SamplingClient
from hermes_rl_mcp.envs.tokenizer import load_tokenizer

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4
"""Between the sampler's logprobs, decoded step by step, and one pass over the whole sequence, in fp32."""


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sampler")
    listener = socket.create_server(("127.0.0.1", 0))
    fd = listener.fileno()
    command = [sys.executable, "-P", "-m", "trainer.serve", "--model", "builtin:tiny", "--listen-fd", str(fd)]
    environ = {**child_environ(dict(os.environ)), "HERMES_HOME": str(folder), "OMP_WAIT_POLICY": "PASSIVE"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--torch-threads", "1"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=leashed(environ),
            pass_fds=(fd, leash()),
        )
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until(lambda: _ready(process, url, folder / "log"), timeout_s=90)
        yield url
    finally:
        process.terminate()
        process.wait(20)
        listener.close()


def _ready(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return bool(httpx.get(f"{url}/health", timeout=2).json()["status"] == "ok")
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_logprobs_kept_over_two_turns_are_those_of_the_model_on_exactly_these_tokens(
    sampler: str, server_type: Literal["vllm", "sglang"]
) -> None:
    tokenizer: Any = load_tokenizer(str(TINY))
    config = APIServerConfig(base_url=f"{sampler}/v1", server_type=server_type)
    client = SamplingClient([config], lambda: tokenizer)
    session = client.session([{"role": "user", "content": "3+5="}], max_tokens=12)
    await session.reply()
    session.add({"role": "user", "content": "2+2="})
    await session.reply()
    await client.close()
    assert len(session.trajectories) == 1
    trajectory = session.trajectory
    async with httpx.AsyncClient(timeout=30) as http:
        reply = (await http.post(f"{sampler}/logprobs", json={"input_ids": trajectory.tokens_T})).json()
    assert [entry["token_id"] for entry in reply["logprobs"]] == trajectory.tokens_T
    trained = 0
    for entry, mask, logprob in zip(reply["logprobs"], trajectory.masks_T, trajectory.logprobs_T, strict=True):
        if mask == MASKED:
            assert logprob == NO_LOGPROB
        else:
            trained += 1
            assert abs(entry["logprob"] - logprob) < TOLERANCE
    assert trained == sum(len(completion.token_ids) for completion in trajectory.completions) >= 2
    assert trajectory.notes.policy_version == 0
