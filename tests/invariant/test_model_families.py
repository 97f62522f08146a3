"""Every family of models: shared prompts, blocks of attention, recomputation and the sampler give the plain numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from trainer.backends.base import Datum, SampleRequest
from trainer.backends.local import device, recompute
from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.lora import LeanLinear
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.rows import RowCosts, build_rows
from trainer.backends.local.train import Learner
from trainer.backends.training import LossSettings

WINDOW = 6
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": (MistralConfig, {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2-mixed": (Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 20}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 20,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 20,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config_class, fields = FAMILIES[request.param]
    folder = build_tiny_llama(tmp_path_factory.mktemp(request.param), config_class=config_class, **fields)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms begin as ones, biases as zeros: errors in either would not be seen
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    model = load_model(folder, adapter_std=0.1)
    assert sum(isinstance(module, LeanLinear) for module in model.peft.modules()) == 14
    return model


def _group(number: int, prompt: int, lengths: Sequence[int], rng: random.Random) -> list[Datum]:
    start = [rng.randrange(2, 250) for _ in range(prompt)]
    data = []
    for length in lengths:
        tokens = np.array(start + [rng.randrange(2, 250) for _ in range(length)], np.int64)
        trained = np.arange(len(tokens)) >= prompt
        values = np.array([rng.gauss(0, 1) for _ in tokens], np.float32)
        data.append(Datum(number, tokens, trained, trained * -5.5, trained * values, 0.8, np.zeros_like(trained)))
    return data


@pytest.fixture(scope="module")
def data() -> list[Datum]:
    """Longer than the window; a lone sequence; a completion of one token."""
    rng = random.Random(2)
    return _group(0, 11, [9, 14, 1, 7], rng) + _group(1, 3, [20], rng) + _group(2, 4, [5, 12], rng)


def _gradient(model: LoadedModel) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.adapter_parameters()])


def _plain(folder: Path, model: LoadedModel, data: Sequence[Datum]) -> torch.Tensor:
    """One sequence at a time through transformers' and peft's own layers, all logits."""
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    from peft import get_peft_model

    peft = get_peft_model(stock, model.peft.peft_config["default"]).eval()
    peft.load_state_dict(model.peft.state_dict())
    total = sum(int(datum.trainable_T.sum()) for datum in data)
    for datum in data:
        ids = torch.from_numpy(datum.tokens_T)
        logprobs = torch.log_softmax(peft(input_ids=ids[None]).logits[0, :-1] / datum.temperature, -1)
        chosen = logprobs.gather(1, ids[1:, None])[:, 0]
        ratio = torch.exp(chosen - torch.from_numpy(datum.sampler_logprobs_T[1:]).float())
        terms = ratio * torch.from_numpy(datum.advantages_T[1:])
        (-terms[torch.from_numpy(datum.trainable_T[1:])].sum() / total).backward()
    return torch.cat([p.grad.flatten() for p in peft.parameters() if p.requires_grad])


def _fast(model: LoadedModel, data: Sequence[Datum], **options: Any) -> torch.Tensor:
    learner = Learner(model, micro_batch_tokens=8192, **options)
    learner.drop_gradients()
    learner.forward_backward(data, LossSettings())
    return _gradient(model)


def _differ(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize("block_cost", [0.0, 1e9], ids=["blocks", "dense"])
def test_the_gradient_is_that_of_plain_sequences(
    folder: Path, model: LoadedModel, data: list[Datum], monkeypatch: pytest.MonkeyPatch, block_cost: float
) -> None:
    assert model.plain_rows == ""
    monkeypatch.setitem(device._BLOCK_COST, "cpu", block_cost)
    expected = _plain(folder, model, data)
    assert _differ(expected, _fast(model, data)) < 1e-5
    assert _differ(expected, _fast(model, data, share_prompts=False)) < 1e-5
    assert _differ(expected, _fast(replace(model, plain_rows="for this test"), data)) < 1e-5
    assert _differ(expected, _fast(model, data, gradient_checkpointing=True)) < 1e-5


def test_the_sampler_gives_the_trainer_s_logprobs(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings())
    try:
        prompts = [[5, 9, 33, 70, 12, 8, 90, 41, 7], [11, 3]]
        requests = [SampleRequest(tuple(prompt), n=3, max_tokens=12, seed=1) for prompt in prompts]
        results = [future.result(30) for future in [backend.submit(request) for request in requests]]
    finally:
        backend.close()
    data = []
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        for completion in result.completions:
            tokens = np.array(prompt + completion.token_ids, np.int64)
            trained = np.arange(len(tokens)) >= len(prompt)
            sampled = np.concatenate([np.zeros(len(prompt)), completion.logprobs]).astype(np.float32)
            data.append(Datum(number, tokens, trained, sampled, sampled, 1.0, np.zeros_like(trained)))
    assert max(len(datum.tokens_T) for datum in data) > 2 * WINDOW
    rows = build_rows(data, share_prompts=True, costs=RowCosts(model.hidden, 8192))
    with torch.no_grad():
        trainer = Learner(model, micro_batch_tokens=8192).logprobs(rows)
    members = [datum for row in rows for _, datum in row.members]
    sampler = np.concatenate([datum.sampler_logprobs_T[datum.trainable_T] for datum in members])
    assert float((trainer - torch.from_numpy(sampler)).abs().max()) < 5e-5


def _kept(model: LoadedModel, *, whole_layers: bool) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters not counted."""
    seen = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.arange(2, 66)[None]
    layers = recompute.whole_layers(model.body) if whole_layers else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), layers:
        hidden = model.hidden_states(ids, mask=None, positions_BT=torch.arange(64)[None])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.peft.parameters()}
    assert hidden.requires_grad
    return sum(size for at, size in seen.items() if at not in own)


def test_whole_layers_keep_less_and_nothing_stays_switched_on(model: LoadedModel) -> None:
    assert _kept(model, whole_layers=True) < 0.5 * _kept(model, whole_layers=False)
    assert not any(module.training for module in model.body.modules())


def test_a_model_whose_attention_cannot_be_replaced_is_trained_in_plain_rows_and_says_so(
    tmp_path: Path, data: list[Datum], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_attention_backend", False)
    folder = build_tiny_llama(tmp_path)
    model = load_model(folder, adapter_std=0.1)
    assert model.plain_rows in caplog.text and "row of its own" in caplog.text
    assert _differ(_plain(folder, model, data), _fast(model, data)) < 1e-5
