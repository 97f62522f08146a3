"""The gradient of a step is the one a naive implementation gives, however the batch is laid out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings

from hermes_rl_mcp.contracts.rollout_api import ScoredData
from trainer.backends.base import Datum
from trainer.backends.local import head
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.rows import RowCosts, build_rows, micro_batches
from trainer.backends.local.train import Learner
from trainer.backends.training import AdamParams, LossSettings, NonFiniteError, Reduction, StepAbandonedError
from trainer.batching import build_batch

Gradient = dict[str, torch.Tensor]
TOKEN_MEAN = LossSettings()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_tiny_llama(tmp_path_factory.mktemp("model")))


def _group(
    number: int, prompt: list[int], lengths: Sequence[int], rng: random.Random, temperature: float
) -> list[Datum]:
    data = []
    for length in lengths:
        completion = [rng.randrange(2, 250) for _ in range(length)]
        trained = [rng.random() < 0.8 for _ in range(length)]
        trained[-1] = True
        data.append(
            Datum.of(
                number,
                prompt + completion,
                [False] * len(prompt) + trained,
                [0.0] * len(prompt) + [rng.uniform(-7, -4) if one else 0.0 for one in trained],
                [0.0] * len(prompt) + [rng.gauss(0, 1) if one else 0.0 for one in trained],
                temperature,
            )
        )
    return data


@pytest.fixture(scope="module")
def data() -> list[Datum]:
    """Groups with a shared prompt, a prompt of one token, one-token completions, a lone sequence, equal completions."""
    rng = random.Random(5)
    groups = [
        _group(0, [rng.randrange(2, 250) for _ in range(17)], [5, 9, 1, 6], rng, 1.0),
        _group(1, [0], [7, 3], rng, 0.7),
        _group(2, [rng.randrange(2, 250) for _ in range(8)], [4], rng, 1.3),
        _group(3, [9, 9, 9], [12, 12, 2], rng, 1.0),
    ]
    twin = groups[3][0]
    groups[3].append(replace(twin, advantages_T=-twin.advantages_T))
    return [datum for group in groups for datum in group]


def _naive(model: LoadedModel, data: Sequence[Datum], reduction: str) -> tuple[float, Gradient]:
    """One sequence at a time, all logits, ordinary log-softmax."""
    model.peft.zero_grad()
    total = sum(int(datum.trainable_T.sum()) for datum in data)
    loss = torch.zeros(())
    for datum in data:
        logits = model.peft(input_ids=torch.tensor(datum.tokens_T)[None]).logits[0, :-1].float()
        targets = torch.tensor(datum.tokens_T[1:])
        logprobs = torch.log_softmax(logits / datum.temperature, -1).gather(1, targets[:, None])[:, 0]
        ratio = torch.exp(logprobs - torch.tensor(datum.sampler_logprobs_T[1:]))
        terms = ratio * torch.tensor(datum.advantages_T[1:])
        loss = loss - terms[torch.tensor(datum.trainable_T[1:])].sum()
    loss = loss / total if reduction == "token_mean" else loss
    loss.backward()
    return float(loss.detach()), _gradient(model)


def _gradient(model: LoadedModel) -> Gradient:
    return {n: p.grad.clone() for n, p in model.peft.named_parameters() if p.grad is not None}


def _learner(model: LoadedModel, *, tokens: int = 8192, share: bool = True) -> Learner:
    return Learner(model, micro_batch_tokens=tokens, share_prompts=share)


def _fast(
    model: LoadedModel, data: Sequence[Datum], learner: Learner, loss: LossSettings = TOKEN_MEAN
) -> tuple[float, Gradient]:
    learner.drop_gradients()
    found = learner.forward_backward(data, loss)
    return found.loss, _gradient(model)


def _difference(one: Gradient, other: Gradient) -> float:
    """Relative to the norm of the whole gradient."""
    assert one.keys() == other.keys()
    norm = torch.stack([g.norm() for g in one.values()]).norm()
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm() / norm)


@pytest.mark.parametrize("reduction", ["token_mean", "token_sum"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tokens", [64, 100, 8192])
def test_gradient_equals_the_naive_one_whatever_the_micro_batch_and_layout(
    model: LoadedModel, data: list[Datum], tokens: int, share: bool, reduction: Reduction
) -> None:
    loss, expected = _naive(model, data, reduction)
    fast_loss, got = _fast(model, data, _learner(model, tokens=tokens, share=share), LossSettings(reduction=reduction))
    assert fast_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert _difference(expected, got) < 1e-5


def test_gradient_does_not_depend_on_the_order_of_the_sequences(model: LoadedModel, data: list[Datum]) -> None:
    shuffled = list(data)
    random.Random(1).shuffle(shuffled)
    _, expected = _fast(model, data, _learner(model))
    _, got = _fast(model, shuffled, _learner(model))
    assert _difference(expected, got) < 1e-5


def test_gradient_does_not_change_when_logits_are_computed_in_chunks(
    model: LoadedModel, data: list[Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = _fast(model, data, _learner(model))
    monkeypatch.setitem(head._CHUNK_ELEMENTS, "cpu", 3 * model.head.vocabulary)
    _, got = _fast(model, data, _learner(model))
    assert _difference(expected, got) < 1e-5


def test_models_without_free_masks_get_plain_rows_with_the_same_gradient(model: LoadedModel, data: list[Datum]) -> None:
    _, expected = _naive(model, data, "token_mean")
    _, got = _fast(model, data, _learner(replace(model, plain_rows="for this test")))
    assert _difference(expected, got) < 1e-5


def test_a_shared_prompt_is_computed_once(data: list[Datum]) -> None:
    group = [datum for datum in data if datum.group == 0]
    (row,) = build_rows(group, share_prompts=True, costs=RowCosts(48, 8192))
    assert len(row) == 17 + sum(len(datum.tokens_T) - 17 - 1 for datum in group)
    assert [len(one) for one in micro_batches([row], 64)] == [1]


def test_long_completions_share_their_prompt_where_attention_goes_by_blocks() -> None:
    prompt, answer = 40, 300
    group = [
        Datum.of(
            0,
            list(range(prompt)) + [50 + at] * answer,
            [False] * prompt + [True] * answer,
            [0.0] * prompt + [-1.0] * answer,
            [0.0] * prompt + [1.0] * answer,
            1.0,
        )
        for at in range(4)
    ]
    (row,) = build_rows(group, share_prompts=True, costs=RowCosts(48, 8192, block=1e4))
    assert len(row) == prompt + 4 * (answer - 1)
    dense = build_rows(group, share_prompts=True, costs=RowCosts(48, 8192))
    assert len(dense) == 4, "pairs of siblings would cost more than the prompts saved"


def test_a_token_of_one_completion_leaves_its_siblings_alone(model: LoadedModel, data: list[Datum]) -> None:
    group = [datum for datum in data if datum.group == 0]
    changed = replace(group[1], tokens_T=group[1].tokens_T.copy())
    changed.tokens_T[18] = 77
    learner = _learner(model)

    def first_logprobs(members: list[Datum]) -> torch.Tensor:
        rows = build_rows(members, share_prompts=True, costs=RowCosts(48, 8192))
        return learner.logprobs(rows)[: int(members[0].trainable_T.sum())].detach()

    assert torch.equal(first_logprobs(group), first_logprobs([group[0], changed, *group[2:]]))


def _wire_group(scores: list[float], offset: int = 0) -> ScoredData:
    prompt, completions = [5, 6, 7], [[20 + offset, 30 + at, 40] for at in range(len(scores))]
    return ScoredData(
        tokens=[prompt + one for one in completions],
        masks=[[-100] * 3 + one for one in completions],
        scores=scores,
        inference_logprobs=[[1.0] * 3 + [-5.0, -5.5, -6.0]] * len(scores),
    )


def test_a_group_of_equal_scores_adds_exactly_nothing(model: LoadedModel) -> None:
    with_signal = build_batch([_wire_group([1.0, 0.0])], settings(), model.head.vocabulary)
    and_without = build_batch(
        [_wire_group([0.5, 0.5 + 1e-9, 0.5], 9), _wire_group([1.0, 0.0])], settings(), model.head.vocabulary
    )
    _, expected = _fast(model, with_signal.data, _learner(model))
    _, got = _fast(model, and_without.data, _learner(model))
    assert and_without.zero_variance_groups == 1
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_missing_logprob_takes_its_token_out_of_the_gradient(model: LoadedModel) -> None:
    complete, holed = _wire_group([1.0, 0.0]), _wire_group([1.0, 0.0])
    assert holed.inference_logprobs is not None
    holed.inference_logprobs[0] = [1.0, 1.0, 1.0, -5.0, 1.0, -6.0]
    masked = _wire_group([1.0, 0.0])
    masked.masks[0][4] = -100
    batch = build_batch([holed], settings(), model.head.vocabulary)
    assert batch.missing_logprobs == 1
    _, expected = _fast(model, build_batch([masked], settings(), model.head.vocabulary).data, _learner(model))
    _, got = _fast(model, batch.data, _learner(model))
    _, full = _fast(model, build_batch([complete], settings(), model.head.vocabulary).data, _learner(model))
    assert _difference(expected, got) == 0.0
    assert _difference(full, got) > 0.01


def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_untouched(
    model: LoadedModel, data: list[Datum]
) -> None:
    learner = _learner(model)
    before = [parameter.detach().clone() for parameter in model.adapter_parameters()]
    broken = replace(data[0], sampler_logprobs_T=np.where(data[0].trainable_T, np.float32(-1e4), np.float32(0.0)))
    with pytest.raises(NonFiniteError):
        learner.forward_backward([broken, *data[1:]], TOKEN_MEAN)
    assert all(torch.equal(a, b) for a, b in zip(before, model.adapter_parameters(), strict=True))
    assert not learner.optimizer.state


def test_an_abandoned_step_leaves_weights_untouched(model: LoadedModel, data: list[Datum]) -> None:
    before = [parameter.detach().clone() for parameter in model.adapter_parameters()]
    answers = iter([False, True])
    with pytest.raises(StepAbandonedError):
        _learner(model, tokens=64).forward_backward(data, TOKEN_MEAN, lambda: next(answers))
    assert all(torch.equal(a, b) for a, b in zip(before, model.adapter_parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.adapter_parameters())


def test_clipping_bounds_the_gradient_but_reports_its_norm_before(
    tmp_path: Path, model: LoadedModel, data: list[Datum]
) -> None:
    learner = Learner(load_model(build_tiny_llama(tmp_path)), micro_batch_tokens=8192)
    learner.forward_backward(data, LossSettings(reduction="token_sum"))
    norm = learner.optim_step(AdamParams(1.0, 0.0, 0.0, 1.0, grad_clip_norm=1e-3)).grad_norm
    assert norm > 1.0
    moved = [state["exp_avg"].norm() for state in learner.optimizer.state.values()]
    assert float(torch.stack(moved).norm()) == pytest.approx(1e-3, rel=1e-3)
