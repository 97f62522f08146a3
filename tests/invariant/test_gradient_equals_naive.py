"""The gradient of a batch, from the wire to the adapter, is that of ``naive_gradient``, which shares no line with the
trainer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from naive_gradient import LONGEST_COMPLETION, Gradient, difference, gradient, naive, plain_sequences
from peft import PeftModel
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings
from transformers import AutoModelForCausalLM

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.rollout_api import ScoredData
from trainer.backends.local import adapter_files
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.train import Learner
from trainer.backends.training import Estimator, ForwardBackward, LossName, LossSettings, Reduction
from trainer.batching import build_batch

LAYOUTS = [(True, 8192), (True, 64), (False, 8192), (False, 64)]
"""Prompt shared or not; tokens of a micro-batch, of which the small one splits groups into several rows."""
FEW = LAYOUTS[1:3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, folder: Path, model: LoadedModel) -> PeftModel:
    """The same weights, loaded by peft from the trainer's own export, in float64."""
    adapter = tmp_path_factory.mktemp("adapter")
    adapter_files.save(model.peft, adapter, {})
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded: PeftModel = PeftModel.from_pretrained(base, adapter, is_trainable=True).double().eval()
    return loaded


def fast(
    model: LoadedModel, groups: Sequence[ScoredData], config: TrainerConfig, *, share: bool = True, tokens: int = 8192
) -> tuple[ForwardBackward, Gradient]:
    learner = Learner(model, micro_batch_tokens=tokens, share_prompts=share)
    learner.drop_gradients()
    data = build_batch(groups, config, model.head.vocabulary).data
    found = learner.forward_backward(data, LossSettings.of(config, LONGEST_COMPLETION))
    return found, gradient(model.peft)


class Writer:
    """Groups as an environment would send them, at random but always the same for one seed."""

    def __init__(self, model: PeftModel, seed: int, noise: float = 0.5) -> None:
        self._model = model
        self._noise = noise
        self.rng = random.Random(seed)

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(2, 250) for _ in range(count)]

    def group(
        self, prompt: list[int], completions: Sequence[list[int]], temperature: float = 1.0, **fields: Any
    ) -> ScoredData:
        """Some of the tokens that were not the first or last of a completion are another's (a tool's, say)."""
        tokens = [prompt + one for one in completions]
        masks = [
            [-100] * len(prompt)
            + [t if j in (0, len(one) - 1) or self.rng.random() < 0.8 else -100 for j, t in enumerate(one)]
            for one in completions
        ]
        values = {
            "scores": [self.rng.gauss(0, 1) for _ in completions],
            "masks": masks,
            "inference_logprobs": [
                self.logprobs(ids, mask, temperature) for ids, mask in zip(tokens, masks, strict=True)
            ],
            "generation_params": {"temperature": temperature},
            **fields,
        }
        return ScoredData(tokens=tokens, **values)

    def logprobs(self, tokens: list[int], mask: list[int], temperature: float) -> list[float]:
        """The policy's, more or less, as from a sampler a few steps behind; 1.0 where nothing was sampled."""
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([tokens])).logits[0, :-1] / temperature
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        noisy = [min(0.0, value + self.rng.gauss(0, self._noise)) for value in found]
        return [1.0] + [value if mask[j] != -100 else 1.0 for j, value in enumerate(noisy, 1)]

    def teacher(self, group: ScoredData) -> dict[str, Any]:
        """Candidates at every position, more or fewer of them."""
        ids = [[self.rng.sample(range(250), self.rng.randrange(1, 5)) for _ in one] for one in group.tokens]
        values = [[[self.rng.uniform(-4, -1.5) for _ in place] for place in one] for one in ids]
        return {"distill_token_ids": ids, "distill_logprobs": values}


def batch(model: PeftModel, seed: int = 5) -> list[ScoredData]:
    """Every shape that a layout with shared prompts could get wrong, in one batch."""
    writer = Writer(model, seed)
    words, rng = writer.words, writer.rng
    twin = words(6)
    alike = words(2)
    groups = [
        writer.group(words(17), [words(n) for n in (5, 9, 1, 6)]),
        writer.group([0], [words(7), words(3)], temperature=0.7),
        writer.group(words(4), [twin, twin, twin, words(2)], temperature=1.3),
        writer.group(
            words(9), [alike + words(3), alike + words(12), alike], advantages=[[0.3] * 14, [-1.1] * 23, [0.4] * 11]
        ),
        writer.group(words(8), [words(4)], advantages=[[rng.gauss(0, 1) for _ in range(12)]]),
        writer.group(words(30), [words(13) for _ in range(4)]),
        writer.group(words(5), [words(4), words(6)], scores=[0.7, 0.7]),
    ]
    groups[0].masks[1][17] = -100  # the member's prompt goes on where its siblings' completions begin
    groups[0].masks[3][17:] = [-100] * 6  # nothing of this one is trained
    groups[3].masks[1][9] = -100  # what is its prompt still was sampled in the same words by a sibling
    groups[0].overrides = [{}, {"temperature": 0.9}, {}, {}]
    groups[5].overrides = [{}, {"set_advantage_to_zero": True}, {}, {"finish_reason": "length"}]
    return groups


@pytest.fixture(scope="module")
def groups(reference: PeftModel) -> list[ScoredData]:
    return batch(reference)


def agree(
    reference: PeftModel,
    model: LoadedModel,
    groups: Sequence[ScoredData],
    config: TrainerConfig,
    layouts: Sequence[tuple[bool, int]] = LAYOUTS,
) -> None:
    loss, expected = naive(reference, groups, config)
    for share, tokens in layouts:
        found, got = fast(model, groups, config, share=share, tokens=tokens)
        # A sum of terms of both signs keeps the rounding of each, however small it comes out.
        terms = found.tokens if config.loss_reduction == "token_sum" else 1
        assert found.loss == pytest.approx(loss, rel=1e-5, abs=1e-6 * terms), (share, tokens)
        assert difference(expected, got) < 1e-5, (share, tokens)


@pytest.mark.parametrize("reduction", get_args(Reduction))
@pytest.mark.parametrize("loss_fn", get_args(LossName))
def test_every_loss_and_reduction_gives_the_naive_gradient_in_every_layout(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData], loss_fn: LossName, reduction: Reduction
) -> None:
    config = settings(loss_fn=loss_fn, loss_reduction=reduction)
    if reduction == "token_mean":
        agree(reference, model, groups, config)
    else:
        agree(reference, model, groups[:5], config, FEW)


@pytest.mark.parametrize("kl_in", ["loss", "advantage"])
@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_every_kl_gives_the_naive_gradient_towards_the_base_and_towards_what_the_wire_brings(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData], estimator: Estimator, kl_in: str
) -> None:
    rng = random.Random(3)
    brought = [group.model_copy() for group in groups[:3]]
    brought[1].ref_logprobs = [[rng.uniform(-8, -2) for _ in one] for one in groups[1].tokens]
    config = settings(kl_coef=0.3, kl_estimator=estimator, kl_in=kl_in, loss_fn="ppo")
    agree(reference, model, brought, config, FEW)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "cispo", "gspo"])
def test_every_importance_correction_gives_the_naive_gradient(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData], loss_fn: LossName, correction: str, level: str
) -> None:
    config = settings(loss_fn=loss_fn, importance_correction=correction, importance_level=level, importance_cap=1.5)
    agree(reference, model, groups[:3], config, FEW)


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_thresholds_of_the_ratio_are_those_of_the_configuration(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData], loss_fn: LossName
) -> None:
    config = settings(loss_fn=loss_fn, clip_low_threshold=0.9, clip_high_threshold=1.05)
    agree(reference, model, groups[:3], config, FEW)


def test_distillation_gives_the_naive_gradient_even_where_scores_are_equal(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData]
) -> None:
    writer = Writer(reference, 2)
    taught = [group.model_copy(update=writer.teacher(group)) for group in groups[:3]]
    taught += [groups[6].model_copy(update=writer.teacher(groups[6])), groups[3]]
    agree(reference, model, taught, settings(distill_coef=0.5), FEW)
    agree(reference, model, taught[:1], settings(distill_coef=0.5, loss_reduction="seq_mean"), FEW)


def test_a_place_without_a_teacher_changes_nothing_however_it_is_marked(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData]
) -> None:
    """The last two tokens of one sequence are taught, with 50 candidates each; the rest of the group is not."""
    rng = random.Random(3)
    size, before = len(groups[0].tokens), len(groups[0].tokens[0]) - 2
    ids = [rng.sample(range(250), 50) for _ in range(2)]
    values = [[-5.0 - number / 50 for number in range(50)] for _ in ids]
    config = settings(distill_coef=0.5)

    def marked(id_row: list[int], value_row: list[float], wider: int = 0) -> tuple[Any, Any]:
        return (
            [id_row] * before + [one + [-1] * wider for one in ids],
            [value_row] * before + [one + [0.0] * wider for one in values],
        )

    shortest = marked([], [])
    ways = {
        "rows of -1": marked([-1] * 50, [0.0] * 50),
        "rows wider by -1": marked([], [], wider=2),
        "probability 1": marked([0] * 50, [0.0] * 50),
    }

    def found(teacher: tuple[Any, Any], others: Any) -> tuple[float, float | None, Gradient]:
        update = {"distill_token_ids": [teacher[0], *others[0]], "distill_logprobs": [teacher[1], *others[1]]}
        result, slope = fast(model, [groups[0].model_copy(update=update)], config)
        return result.loss, result.distill_kl, slope

    none: Any = ([[]] * (size - 1),) * 2
    loss, distance, slope = found(shortest, none)
    assert distance is not None and distance > 0
    untaught, _ = fast(model, groups[:1], settings())
    assert loss > untaught.loss
    for name, way in ways.items():
        other = found(way, none)
        assert (other[0], other[1]) == (loss, distance), name
        assert difference(other[2], slope) == 0.0, name
    rows: Any = tuple([[[pad] * 50] * len(one) for one in groups[0].tokens[1:]] for pad in (-1, 0.0))
    assert found(shortest, rows)[:2] == (loss, distance)


@pytest.mark.parametrize("rule", ["drop", "recompute"])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "gspo", "dro"])
def test_missing_logprobs_are_left_out_or_taken_as_sampled_by_the_current_policy(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData], loss_fn: LossName, rule: str
) -> None:
    holed = [group.model_copy(deep=True) for group in groups[:3]]
    rng = random.Random(4)
    holes = 0
    for group in holed[:2]:
        for mask, logprobs in zip(group.masks, group.inference_logprobs or [], strict=True):
            for at, value in enumerate(mask):
                if value != -100 and rng.random() < 0.3:
                    logprobs[at] = rng.choice([1.0, 0.25, math.inf, -math.inf, math.nan])
                    holes += 1
    holes += sum(value != -100 for mask in holed[2].masks for value in mask)
    holed[2].inference_logprobs = None
    config = settings(loss_fn=loss_fn, missing_logprobs=rule)
    assert build_batch(holed, config, model.head.vocabulary).missing_logprobs == holes
    agree(reference, model, holed, config, FEW)


@pytest.mark.parametrize("fields", [{"overlong": "cut"}, {"overlong": "drop"}, {"mask_truncated_completions": True}])
def test_what_is_cut_or_taken_out_of_the_loss_leaves_the_naive_gradient_of_the_rest(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData], fields: dict[str, Any]
) -> None:
    config = settings(max_token_trainer_length=20, **fields)
    longer = sum(len(tokens) > 20 for group in groups for tokens in group.tokens)
    assert build_batch(groups, config, model.head.vocabulary).overlong_sequences == longer > 5
    agree(reference, model, groups, config, FEW)


def test_neither_the_order_of_groups_nor_that_within_a_group_changes_the_gradient(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData]
) -> None:
    rng = random.Random(8)
    shuffled = []
    for group in groups:
        order = rng.sample(range(len(group.scores)), len(group.scores))
        lists = {name: value for name, value in group if isinstance(value, list) and value}
        shuffled.append(group.model_copy(update={name: [value[at] for at in order] for name, value in lists.items()}))
    rng.shuffle(shuffled)
    config = settings(loss_fn="ppo", loss_reduction="seq_mean")
    _, expected = naive(reference, groups, config)
    for share, tokens in LAYOUTS:
        _, got = fast(model, shuffled, config, share=share, tokens=tokens)
        assert difference(expected, got) < 1e-5


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_a_group_of_equal_scores_adds_nothing_to_the_last_bit(
    model: LoadedModel, groups: list[ScoredData], reduction: Reduction
) -> None:
    config = settings(loss_reduction=reduction, kl_coef=0.2)
    alone, expected = fast(model, groups[:1], config)
    beside, got = fast(model, [groups[6], *groups[:1]], config)
    assert alone.loss == beside.loss
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_gradients_of_several_calls_add_up_to_that_of_one(model: LoadedModel, groups: list[ScoredData]) -> None:
    config = settings(loss_reduction="token_sum")
    _, expected = fast(model, groups, config)
    learner = Learner(model, micro_batch_tokens=64)
    learner.drop_gradients()
    losses = [
        learner.forward_backward(
            build_batch(part, config, model.head.vocabulary).data, LossSettings.of(config, LONGEST_COMPLETION)
        ).loss
        for part in (groups[:2], groups[2:3], groups[3:])
    ]
    assert sum(losses) == pytest.approx(fast(model, groups, config)[0].loss, rel=1e-5)
    learner.drop_gradients()
    for part in (groups[:2], groups[2:3], groups[3:]):
        learner.forward_backward(
            build_batch(part, config, model.head.vocabulary).data, LossSettings.of(config, LONGEST_COMPLETION)
        )
    assert difference(expected, gradient(model.peft)) < 1e-5


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight"),
    [(-1.0, 0.2, 0.0), (-1.0, 2.0, 2.0), (1.0, 0.2, -0.2), (1.0, 2.0, 0.0), (-1.0, 1.1, 1.1), (1.0, 0.9, -0.9)],
)
def test_ppo_takes_the_smaller_of_clipped_and_unclipped_for_both_signs_of_the_advantage(
    reference: PeftModel, model: LoadedModel, advantage: float, ratio: float, weight: float
) -> None:
    """``weight`` is the derivative of the loss by the token's logprob."""
    tokens = [7, 8, 9, 30]
    logits = reference(input_ids=torch.tensor([tokens])).logits[0, 2]
    chosen = torch.log_softmax(logits, -1)[30]
    reference.zero_grad(set_to_none=True)
    chosen.backward()
    by_logprob = gradient(reference)
    sampled = float(chosen.detach()) - math.log(ratio)
    assert sampled < 0
    group = ScoredData(
        tokens=[tokens],
        masks=[[-100, -100, -100, 30]],
        scores=[1.0],
        advantages=[[advantage] * 4],
        inference_logprobs=[[1.0, 1.0, 1.0, sampled]],
    )
    found, got = fast(model, [group], settings(loss_fn="ppo"))
    low, high = 0.8, 1.2
    assert found.loss == pytest.approx(-min(ratio * advantage, min(max(ratio, low), high) * advantage), rel=1e-5)
    norm = torch.stack([g.norm() for g in by_logprob.values()]).norm()
    for name, expected in by_logprob.items():
        assert float((got[name] - weight * expected).norm() / norm) < 1e-5
    assert found.clip_fraction == (1.0 if weight == 0.0 else 0.0)


def test_what_a_pass_found_is_what_the_naive_reference_finds(
    reference: PeftModel, model: LoadedModel, groups: list[ScoredData]
) -> None:
    config = settings(loss_fn="ppo", kl_coef=0.1)
    gaps, logprobs, entropies, distances, clipped = [], [], [], [], []
    for one in plain_sequences(groups, config):
        ids, at = torch.tensor([one.tokens]), torch.tensor(one.at)
        with torch.no_grad():
            all_M = torch.log_softmax(reference(input_ids=ids).logits[0, at - 1] / one.temperature, -1)
            with reference.disable_adapter():
                base_M = torch.log_softmax(reference(input_ids=ids).logits[0, at - 1] / one.temperature, -1)
        for chosen, base, token, sent, advantage in zip(
            all_M, base_M, ids[0, at].tolist(), one.sampled, one.advantages, strict=True
        ):
            assert sent is not None
            ratio = math.exp(float(chosen[token]) - sent)
            gaps.append(float(chosen[token]) - sent)
            logprobs.append(float(chosen[token]))
            entropies.append(float(-(chosen.exp() * chosen).sum()))
            distances.append(math.exp(float(base[token] - chosen[token])) - float(base[token] - chosen[token]) - 1)
            clipped.append(ratio > 1.2 if advantage > 0 else ratio < 0.8)
    count = len(gaps)
    found, _ = fast(model, groups, config, tokens=64)
    assert found.tokens == count
    assert found.logprob_mean == pytest.approx(sum(logprobs) / count, rel=1e-5)
    assert found.entropy == pytest.approx(sum(entropies) / count, rel=1e-5)
    assert found.ratio_mean == pytest.approx(sum(map(math.exp, gaps)) / count, rel=1e-5)
    assert found.ratio_max == pytest.approx(math.exp(max(gaps)), rel=1e-4)
    assert found.mismatch_kl == pytest.approx(sum(math.exp(gap) - gap - 1 for gap in gaps) / count, rel=1e-4)
    assert found.kl_reference == pytest.approx(sum(distances) / count, rel=1e-4)
    assert found.clip_fraction == pytest.approx(sum(clipped) / count)
    assert sum(clipped) > 5


def test_on_policy_nothing_is_clipped_and_every_ratio_is_one(reference: PeftModel, model: LoadedModel) -> None:
    writer = Writer(reference, 6, noise=0.0)
    groups = [writer.group(writer.words(9), [writer.words(6) for _ in range(4)], heat) for heat in (1.0, 0.7)]
    for loss_fn in get_args(LossName):
        found, _ = fast(model, groups, settings(loss_fn=loss_fn))
        assert (found.clip_fraction, found.ratio_mean) == (0.0, pytest.approx(1.0, abs=1e-5))
        assert found.ratio_max == pytest.approx(1.0, abs=5e-5)
        assert found.mismatch_kl == pytest.approx(0.0, abs=1e-8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@examples(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_settings_on_any_batch_give_the_naive_gradient_in_any_layout(
    reference: PeftModel, model: LoadedModel, data: st.DataObject
) -> None:
    loss_fn = data.draw(st.sampled_from(get_args(LossName)))
    low, high = data.draw(st.sampled_from([(None, None), (0.7, 1.5), (0.95, 1.05)]))
    clips = loss_fn in ("ppo", "cispo", "gspo")
    config = settings(
        loss_fn=loss_fn,
        loss_reduction=data.draw(st.sampled_from(get_args(Reduction))),
        clip_low_threshold=low if clips else None,
        clip_high_threshold=high if clips else None,
        dro_beta=data.draw(st.sampled_from([0.0, 0.05, 1.0])),
        kl_coef=data.draw(st.sampled_from([0.0, 0.1])),
        kl_estimator=data.draw(st.sampled_from(get_args(Estimator))),
        kl_in=data.draw(st.sampled_from(["loss", "advantage"])),
        importance_correction=data.draw(st.sampled_from(["off"] if loss_fn == "dro" else ["off", "truncate", "mask"])),
        importance_level=data.draw(st.sampled_from(["token", "sequence"])),
        importance_cap=data.draw(st.sampled_from([1.2, 2.0, 10.0])),
        missing_logprobs=data.draw(st.sampled_from(["drop", "recompute"])),
        overlong=data.draw(st.sampled_from(["cut", "drop"])),
        mask_truncated_completions=data.draw(st.booleans()),
        distill_coef=data.draw(st.sampled_from([0.0, 0.5])),
        max_token_trainer_length=data.draw(st.sampled_from([12, 25, 9000])),
    )
    seed = data.draw(st.integers(0, 10**6))
    groups = batch(reference, seed)
    writer = Writer(reference, seed)
    for group in groups:
        for mask, logprobs in zip(group.masks, group.inference_logprobs or [], strict=True):
            for at, value in enumerate(mask):
                if value != -100 and writer.rng.random() < 0.05:
                    logprobs[at] = 1.0
    groups = [g.model_copy(update=writer.teacher(g)) if writer.rng.random() < 0.5 else g for g in groups]
    groups = [g for g in groups if writer.rng.random() < 0.7] or groups[:1]
    if next(plain_sequences(groups, config), None) is None:
        assert not build_batch(groups, config, model.head.vocabulary).data
        return
    agree(reference, model, groups, config, [data.draw(st.sampled_from(LAYOUTS))])
