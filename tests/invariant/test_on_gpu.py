"""On a GPU: bf16 base with fp32 LoRA, the mismatch of sampler and trainer, learning, and running out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import settings

from trainer import out_of_memory
from trainer.backends.base import Datum, SampleRequest
from trainer.backends.local.backend import LocalBackend
from trainer.backends.training import AdamParams, LossSettings, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

PROMPT = [5, 9, 33, 70]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    config = settings(device="auto", lora_rank=8, lora_alpha=16.0)
    backend = LocalBackend.open(build_tiny_llama(tmp_path), config, lambda _: None)
    yield backend
    backend.close()


def _sampled(backend: LocalBackend, wanted: int | None = None) -> list[Datum]:
    """A group; the token ``wanted`` is worth 1, every other one 0."""
    result = backend.submit(SampleRequest(tuple(PROMPT), n=16, max_tokens=8, seed=backend.policy_version)).result(60)
    shares = [sum(one == wanted for one in c.token_ids) / len(c.token_ids) for c in result.completions]
    data = []
    for completion, share in zip(result.completions, shares, strict=True):
        tokens = np.array(PROMPT + completion.token_ids, np.int64)
        trained = np.arange(len(tokens)) >= len(PROMPT)
        logprobs = np.array([0.0] * len(PROMPT) + completion.logprobs, np.float32)
        advantage = np.float32(share - np.mean(shares))
        data.append(Datum(0, tokens, trained, logprobs, trained * advantage, 1.0, np.zeros_like(trained)))
    return data


def test_the_base_is_bf16_and_the_adapter_fp32(backend: LocalBackend) -> None:
    assert backend._model.device.type == "cuda" and backend._model.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in backend._model.adapter_parameters()} == {torch.float32}
    assert backend.plain_rows == ""
    assert (backend.peak_gpu_bytes() or 0) > 0


def test_the_mismatch_of_sampler_and_trainer_is_small_and_reported(backend: LocalBackend) -> None:
    with torch.no_grad():  # a fresh adapter is zero and would hide what its layers do differently
        for name, parameter in backend._model.peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    found = backend.forward_backward(_sampled(backend), LossSettings())
    assert found.mismatch_kl is not None and 0 <= found.mismatch_kl < 1e-2
    assert found.ratio_mean == pytest.approx(1.0, abs=0.05)


def test_training_makes_the_rewarded_token_likelier(backend: LocalBackend) -> None:
    likely = int(_sampled(backend)[0].tokens_T[len(PROMPT)])

    def share() -> float:
        data = [_sampled(backend) for _ in range(4)]
        return float(np.mean([np.mean(d.tokens_T[len(PROMPT) :] == likely) for group in data for d in group]))

    before = share()
    for _ in range(30):
        data = _sampled(backend, likely)
        if any(datum.advantages_T.any() for datum in data):
            train_step(backend, data, LossSettings(), AdamParams(1e-2))
    assert share() > before + 0.1


def test_running_out_of_memory_is_recognised_and_leaves_the_weights(backend: LocalBackend) -> None:
    before = [parameter.detach().clone() for parameter in backend._model.adapter_parameters()]
    tokens = np.arange(240) % 200 + 2
    trained = np.arange(240) >= 1
    ones = trained.astype(np.float32)
    data = [Datum(number, tokens, trained, -5.0 * ones, ones, 1.0, np.zeros_like(trained)) for number in range(64)]
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            backend.forward_backward(data, LossSettings())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert out_of_memory.kind(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, backend._model.adapter_parameters(), strict=True))
