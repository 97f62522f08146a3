"""Before an update the sampler's logprobs are the trainer's, through the real endpoint and with a live adapter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import httpx
import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, serving, settings, step
from transformers import Gemma2Config, MistralConfig, PreTrainedConfig

from trainer.backends.base import Datum, SampleRequest
from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.rows import RowCosts, TokenArrays, build_rows
from trainer.backends.local.train import Learner
from trainer.backends.training import AdamParams, LossName, LossSettings

EQUAL = 5e-5
"""Nats, in fp32."""
SOON_S = 0.05
PROMPTS = ["2+3=", "a prompt that is rather longer than the other ones", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_tiny_llama(tmp_path_factory.mktemp("model")), adapter_std=0.1)


@pytest.fixture(scope="module")
def backend(model: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(model, settings())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def client(backend: LocalBackend) -> Iterator[httpx.Client]:
    with serving(backend) as client:
        yield client


def _sample(client: httpx.Client, backend: LocalBackend, temperature: float, top_p: float) -> list[Datum]:
    data = []
    for number, prompt in enumerate(PROMPTS):
        ids = backend.encode(prompt)
        params = {"n": 4, "max_new_tokens": 24, "temperature": temperature, "top_p": top_p}
        replies = client.post("/generate", json={"input_ids": ids, "sampling_params": params}).json()
        for reply in replies:
            triples = reply["meta_info"]["output_token_logprobs"]
            completion, logprobs = [t[1] for t in triples], [t[0] for t in triples]
            data.append(
                Datum.of(
                    number,
                    ids + completion,
                    [False] * len(ids) + [True] * len(completion),
                    [0.0] * len(ids) + logprobs,
                    [0.0] * len(ids) + [1.0] * len(completion),
                    temperature or 1.0,
                )
            )
    return data


def _worst(model: LoadedModel, data: list[Datum], *, share: bool) -> float:
    rows = build_rows(data, share_prompts=share, costs=RowCosts(model.hidden, 8192))
    trained_M = Learner(model, micro_batch_tokens=8192).logprobs(rows).detach().numpy()
    return float(abs(trained_M - TokenArrays.of(rows).sampler_logprobs_M).max())


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (0.0, 1.0)])
def test_sampler_and_trainer_agree_on_every_logprob(
    model: LoadedModel, backend: LocalBackend, client: httpx.Client, temperature: float, top_p: float, share: bool
) -> None:
    data = _sample(client, backend, temperature, top_p)
    assert sum(int(datum.trainable_T.sum()) for datum in data) > 100
    assert _worst(model, data, share=share) <= EQUAL


@pytest.mark.parametrize(
    ("config_class", "fields"), [(MistralConfig, {}), (Gemma2Config, {"head_dim": 12, "final_logit_softcapping": 5.0})]
)
def test_they_agree_on_models_with_a_sliding_window_too(
    tmp_path: Path, config_class: type[PreTrainedConfig], fields: dict[str, Any]
) -> None:
    folder = build_tiny_llama(tmp_path, config_class=config_class, sliding_window=8, **fields)
    model = load_model(folder, adapter_std=0.1)
    assert not model.free_masks
    backend = LocalBackend(model, settings())
    try:
        with serving(backend) as client:
            data = _sample(client, backend, 1.0, 1.0)
        assert max(len(datum.tokens_T) for datum in data) > 3 * 8
        assert _worst(model, data, share=False) <= EQUAL
    finally:
        backend.close()


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("correction", ["off", "truncate", "mask"])
def test_before_an_update_no_ratio_is_clipped_and_none_differs_from_one(
    backend: LocalBackend, client: httpx.Client, loss_fn: LossName, correction: Literal["off", "truncate", "mask"]
) -> None:
    config = settings(
        loss_fn=loss_fn, importance_correction=correction, importance_cap=1.001, clip_low_threshold=0.9998
    )
    data = _sample(client, backend, 0.8, 1.0)
    found = backend.forward_backward(data, LossSettings.of(config, 24))
    backend.publish()
    assert found.tokens > 100
    assert found.clip_fraction == 0.0
    assert found.ratio_mean == pytest.approx(1.0, abs=EQUAL)
    assert found.ratio_max == pytest.approx(1.0, abs=2 * EQUAL)
    assert found.mismatch_kl == pytest.approx(0.0, abs=EQUAL**2)


def test_a_wrong_temperature_would_be_seen(model: LoadedModel, backend: LocalBackend, client: httpx.Client) -> None:
    data = [replace(datum, temperature=1.0) for datum in _sample(client, backend, 0.6, 1.0)]
    assert _worst(model, data, share=True) > 0.1


def test_the_logprobs_endpoint_agrees_with_generate(backend: LocalBackend, client: httpx.Client) -> None:
    for datum in _sample(client, backend, 0.8, 1.0):
        reply = client.post("/logprobs", json={"input_ids": datum.tokens_T.tolist(), "temperature": 0.8}).json()
        scored = [entry["logprob"] for entry in reply["logprobs"]]
        assert scored[0] is None
        for at, trained in enumerate(datum.trainable_T):
            if trained:
                assert scored[at] == pytest.approx(datum.sampler_logprobs_T[at], abs=1e-4)


def test_sampling_follows_each_optimizer_step_at_once(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings())
    try:
        with serving(backend) as client:
            before = _sample(client, backend, 1.0, 1.0)
            version = client.get("/health").json()["policy_version"]
            result = step(backend, before, 5e-2)
            assert result.policy_version == version + 1 == client.get("/health").json()["policy_version"]
            assert _worst(model, before, share=True) > 1e-2
            assert _worst(model, _sample(client, backend, 1.0, 1.0), share=True) <= EQUAL
    finally:
        backend.close()


def test_the_first_token_of_new_weights_comes_within_50_ms_of_the_optimizers_step(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings())
    delays = []
    try:
        with serving(backend) as client:
            data = _sample(client, backend, 1.0, 1.0)
        for _ in range(5):
            drawn: list[float] = []
            backend.forward_backward(data, LossSettings())
            waiting = backend.submit(
                SampleRequest((70, 71, 72), max_tokens=1), lambda *_, drawn=drawn: drawn.append(time.perf_counter())
            )
            backend.optim_step(AdamParams(1e-5))
            stepped = time.perf_counter()
            version = backend.publish()
            assert waiting.result(30).policy_version == version
            delays.append(drawn[0] - stepped)
    finally:
        backend.close()
    assert 0 < median(delays) <= SOON_S


def test_in_bf16_the_mismatch_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.backends.local.model.precision", lambda device: torch.bfloat16)
    model = load_model(build_tiny_llama(tmp_path), adapter_std=0.1)
    assert model.dtype == torch.bfloat16
    backend = LocalBackend(model, settings())
    try:
        with serving(backend) as client:
            data = _sample(client, backend, 1.0, 1.0)
        found = backend.forward_backward(data, LossSettings())
    finally:
        backend.close()
    assert found.mismatch_kl is not None and 1e-8 < found.mismatch_kl < 1e-2
    assert found.ratio_max is not None and found.ratio_max > 1.001
