"""A step in its parts: gradients gather, nothing is sampled in between, and whatever fails leaves all as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings, step

from trainer.backends.base import Datum, SampleRequest
from trainer.backends.local import train
from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.rows import build_rows
from trainer.backends.training import AdamParams, LossSettings, NonFiniteError, StepAbandonedError

PROMPT = (70, 71, 72)
SUM = LossSettings(reduction="token_sum")
SAMPLE = SampleRequest(PROMPT, max_tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backend(folder: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend(load_model(folder), settings())
    yield backend
    backend.close()


def _datum(group: int, completion: list[int], advantage: float) -> Datum:
    prompt, length = len(PROMPT), len(completion)
    return Datum.of(
        group,
        [*PROMPT, *completion],
        [False] * prompt + [True] * length,
        [0.0] * prompt + [-5.0] * length,
        [0.0] * prompt + [advantage] * length,
        1.0,
    )


DATA = [_datum(0, [50, 60, 1], 1.0), _datum(0, [51, 61], -1.0), _datum(1, [52, 1], 0.5)]


def _impossible(logprob: float) -> Datum:
    return replace(DATA[0], sampler_logprobs_T=np.where(DATA[0].trainable_T, np.float32(logprob), np.float32(0)))


def _gradients(backend: LocalBackend) -> list[torch.Tensor]:
    return [p.grad.clone() for p in backend._model.adapter_parameters() if p.grad is not None]


def _weights(backend: LocalBackend) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in backend._model.adapter_parameters()]


def test_gradients_of_several_calls_gather_until_the_optimizer_steps(backend: LocalBackend) -> None:
    backend.forward_backward(DATA, SUM)
    expected = _gradients(backend)
    backend.optim_step(AdamParams(0.0))
    assert not _gradients(backend)
    backend.forward_backward(DATA[:2], SUM)
    backend.forward_backward(DATA[2:], SUM)
    for one, other in zip(expected, _gradients(backend), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    backend.publish()


def test_nothing_is_sampled_between_the_gradient_and_the_new_version(backend: LocalBackend) -> None:
    backend.forward_backward(DATA, SUM)
    sample = backend.submit(SAMPLE)
    score = backend.score(PROMPT, 1.0)
    backend.optim_step(AdamParams(1e-2))
    assert not sample.done()
    assert not score.done()
    assert backend.publish() == 1
    assert sample.result(10).policy_version == 1
    assert score.result(10).policy_version == 1


def test_loss_and_gradient_that_are_not_finite_leave_weights_version_and_sampling(backend: LocalBackend) -> None:
    before = _weights(backend)
    with pytest.raises(NonFiniteError, match="loss"):
        backend.forward_backward([_impossible(-1e4)], SUM)
    assert backend.submit(SAMPLE).result(10).policy_version == 0
    clipped = LossSettings(loss_fn="ppo", clip_low=0.8, clip_high=1.2)  # the loss is finite, its gradient is not
    backend.forward_backward([_impossible(-1e4)], clipped)
    with pytest.raises(NonFiniteError, match="gradient"):
        backend.optim_step(AdamParams(1e-2))
    assert backend.submit(SAMPLE).result(10).policy_version == 0
    assert all(map(torch.equal, before, _weights(backend)))
    assert not _gradients(backend)
    assert not backend._learner.optimizer.state


def test_a_pass_that_is_abandoned_takes_the_earlier_gradient_with_it_and_sampling_goes_on(
    backend: LocalBackend,
) -> None:
    backend.forward_backward(DATA, SUM)
    with pytest.raises(StepAbandonedError):
        backend.forward_backward(DATA, SUM, lambda: True)
    assert not _gradients(backend)
    assert backend.submit(SAMPLE).result(10).policy_version == 0


def test_adam_takes_the_parameters_of_each_step(backend: LocalBackend) -> None:
    before = _weights(backend)
    backend.forward_backward(DATA, SUM)
    backend.optim_step(AdamParams(0.0, 0.5, 0.6, 1e-3))
    assert all(map(torch.equal, before, _weights(backend)))
    group = backend._learner.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.0, (0.5, 0.6), 1e-3)
    backend.publish()


def test_raw_ratios_are_those_of_trainer_and_sampler_whatever_the_loss_does_with_them(backend: LocalBackend) -> None:
    scored = [backend.score(one.tokens_T.tolist(), 1.0).result(10).positions for one in DATA]
    logprobs = np.array([p.logprob for s in scored for p in s[len(PROMPT) :] if p is not None])
    ratios = np.exp(logprobs + 5.0)
    for loss in (SUM, LossSettings(importance_correction="mask"), LossSettings(loss_fn="gspo", clip_low=1.0)):
        found = step(backend, DATA, 0.0, loss).found
        assert found.tokens == len(ratios) == 7
        assert found.logprob_mean == pytest.approx(logprobs.mean(), rel=1e-4)
        assert found.ratio_mean == pytest.approx(ratios.mean(), rel=1e-4)
        assert found.ratio_max == pytest.approx(ratios.max(), rel=1e-4)
        assert found.mismatch_kl == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-3)


def test_entropy_is_the_policys_at_the_temperature_of_each_token(backend: LocalBackend) -> None:
    data = [replace(DATA[0], temperature=0.5), DATA[1]]
    total = 0.0
    for one in data:
        with torch.no_grad():
            logits_TV = backend._model.peft(input_ids=torch.from_numpy(one.tokens_T)[None]).logits[0, :-1].float()
        logprobs_TV = torch.log_softmax(logits_TV / one.temperature, -1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        total += float(entropy_T[torch.from_numpy(one.trainable_T[1:])].sum())
    assert step(backend, data, 0.0).found.entropy == pytest.approx(total / 5, rel=1e-4)


def test_tokens_without_a_sampler_logprob_have_ratio_one_and_stay_out_of_the_comparison(
    backend: LocalBackend,
) -> None:
    holed = replace(DATA[0], missing_T=DATA[0].trainable_T.copy(), sampler_logprobs_T=np.zeros(6, np.float32))
    found = backend.forward_backward([holed], LossSettings())
    backend.publish()
    assert found.loss == pytest.approx(-1.0, rel=1e-6)  # minus ratio times advantage
    assert (found.ratio_mean, found.ratio_max, found.mismatch_kl, found.logprob_mean) == (None, None, None, None)
    mixed = backend.forward_backward([holed, DATA[1]], LossSettings())
    alone = backend.forward_backward([DATA[1]], LossSettings())
    backend.publish()
    assert mixed.ratio_mean == pytest.approx(alone.ratio_mean, rel=1e-6)
    assert (mixed.tokens, alone.tokens) == (5, 2)


def test_the_reference_is_the_base_unless_a_sequence_brings_its_own(backend: LocalBackend) -> None:
    k3 = LossSettings(kl_coef=1.0)
    own = backend.forward_backward(DATA, k3)
    assert own.kl_reference is not None and own.kl_reference > 0  # the adapter changes something
    base = [backend._engine.run(lambda d=d: _base_logprobs(backend, d), exclusive=True).result(10) for d in DATA]
    brought = [replace(one, reference_logprobs_T=logprobs_T) for one, logprobs_T in zip(DATA, base, strict=True)]
    assert backend.forward_backward(brought, k3).kl_reference == pytest.approx(own.kl_reference, rel=1e-4)
    far = replace(brought[0], reference_logprobs_T=base[0] - 1)
    mixed = backend.forward_backward([far, *DATA[1:]], k3).kl_reference
    assert mixed == pytest.approx(backend.forward_backward([far, *brought[1:]], k3).kl_reference, rel=1e-4)
    assert mixed != pytest.approx(own.kl_reference, rel=0.1)
    assert backend.forward_backward(DATA, SUM).kl_reference is None
    backend.publish()


@torch.no_grad()
def _base_logprobs(backend: LocalBackend, datum: Datum) -> np.ndarray:
    ids = torch.from_numpy(datum.tokens_T)
    with backend._model.peft.disable_adapter():
        logits_TV = backend._model.peft(input_ids=ids[None]).logits[0, :-1].float()
    chosen = torch.log_softmax(logits_TV, -1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()]).astype(np.float32)


def test_a_penalty_on_the_advantage_and_the_loss_it_stands_for(backend: LocalBackend) -> None:
    """-rho·(A - c·k1) has at rho = 1 the gradient of -rho·A plus that of c·k2."""
    on_policy = [replace(one, missing_T=one.trainable_T.copy()) for one in DATA]
    backend.forward_backward(on_policy, LossSettings(kl_coef=0.3, kl_estimator="k1", kl_in="advantage"))
    penalised = _gradients(backend)
    backend.optim_step(AdamParams(0.0))
    backend.forward_backward(on_policy, LossSettings(kl_coef=0.3, kl_estimator="k2"))
    for one, other in zip(penalised, _gradients(backend), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    backend.publish()


def test_a_sequence_that_were_split_over_micro_batches_is_noticed(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = replace(DATA[0], trainable_T=DATA[0].trainable_T & (np.arange(6) < 5))
    monkeypatch.setattr(train, "build_rows", lambda data, **how: build_rows([half, *data[1:]], **how))
    with pytest.raises(AssertionError, match="split over micro-batches"):
        backend.forward_backward(DATA, SUM)


def test_data_without_a_trained_token_are_refused(backend: LocalBackend) -> None:
    nothing = replace(DATA[0], trainable_T=np.zeros(6, np.bool_))
    with pytest.raises(ValueError, match="no sequence has a token"):
        backend.forward_backward([nothing], SUM)
    assert backend.submit(SAMPLE).result(10).completions
