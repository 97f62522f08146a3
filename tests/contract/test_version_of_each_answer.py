"""Where a step lies between the answers to one request, each names the version that sampled it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, serving, settings

from hermes_rl_mcp.envs.endpoint import parse_sglang, parse_vllm
from trainer.backends.base import OnToken, SampleRequest, SampleResult
from trainer.backends.local.backend import LocalBackend

IDS = [70, 71, 72]


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    """Two rows; at the first token of a request a step is ready, which has to wait for the rows under way."""
    backend = LocalBackend(load_model(build_tiny_llama(tmp_path)), settings(sampler_max_rows=2))
    submit = backend.submit

    def then_publish(request: SampleRequest, on_token: OnToken | None = None) -> Future[SampleResult]:
        steps: list[Future[None]] = []

        def publish(*token: object) -> None:
            if not steps:
                steps.append(backend._engine.run(lambda: setattr(backend, "_version", 1), exclusive=True))

        return submit(request, publish)

    monkeypatch.setattr(backend, "submit", then_publish)
    yield backend
    backend.close()


def _reply(client: httpx.Client, body: dict[str, Any]) -> Any:
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_in_the_shape_of_vllm(backend: LocalBackend) -> None:
    with serving(backend) as client:
        reply = _reply(client, {"prompt": {"prompt_token_ids": IDS}, "n": 3, "max_tokens": 4})
    assert [one.policy_version for one in parse_vllm(reply)] == [0, 0, 1]
    assert reply["policy_version"] == 0


def test_in_the_shape_of_sglang(backend: LocalBackend) -> None:
    with serving(backend) as client:
        reply = _reply(client, {"input_ids": IDS, "sampling_params": {"n": 3, "max_new_tokens": 4}})
    assert [one.policy_version for one in parse_sglang(reply)] == [0, 0, 1]


def test_a_server_that_names_one_version_means_all_answers() -> None:
    entry = [[{"5": -0.5}]]
    reply = {"logprobs": [entry, entry], "finish_reasons": ["stop", "stop"], "policy_version": 7}
    assert [one.policy_version for one in parse_vllm(reply)] == [7, 7]
    assert [one.policy_version for one in parse_vllm({**reply, "policy_version": None})] == [None, None]
