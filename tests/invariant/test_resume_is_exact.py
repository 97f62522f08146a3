"""A run that goes on from a checkpoint takes the very steps the uninterrupted run took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings, step

from hermes_rl_mcp.checkpoints import inspect
from hermes_rl_mcp.errors import PreflightError
from trainer.backends.base import Datum, SampleRequest
from trainer.backends.local.backend import LocalBackend
from trainer.checkpoints import Checkpoints, Counters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backends(folder: Path) -> Iterator[list[LocalBackend]]:
    both = [LocalBackend(load_model(folder, adapter_std=0.0, seed=seed), settings()) for seed in (0, 0, 5)]
    yield both
    for backend in both:
        backend.close()


def _step(backend: LocalBackend) -> tuple[list[list[int]], float, int]:
    """Sample, score by length parity, train."""
    prompt = tuple(backend.encode("2+3="))
    completions = backend.submit(SampleRequest(prompt, n=4, max_tokens=6)).result().completions
    data = [
        Datum.of(
            0,
            [*prompt, *one.token_ids],
            [False] * len(prompt) + [True] * len(one.token_ids),
            [0.0] * len(prompt) + one.logprobs,
            [0.0] * len(prompt) + [float(at) - 1.5] * len(one.token_ids),
            1.0,
        )
        for at, one in enumerate(completions)
    ]
    result = step(backend, data, 1e-2)
    return [one.token_ids for one in completions], result.found.loss, result.policy_version


def _checkpoints(folder: Path, backend: LocalBackend) -> Checkpoints:
    return Checkpoints(folder, backend, base_model="tiny-llama", lora_rank=4)


def test_samples_losses_and_weights_are_bit_identical_after_a_restore(
    tmp_path: Path, backends: list[LocalBackend]
) -> None:
    whole, resumed, _ = backends
    for _ in range(3):
        _step(whole)
    saved = _checkpoints(tmp_path, whole).save(
        Counters(step=3, optimizer_steps=3, policy_version=3, steps_without_signal=0)
    )
    counters = _checkpoints(tmp_path, resumed).restore(inspect(saved))
    assert (counters.step, resumed.policy_version) == (3, 3)
    assert [_step(whole) for _ in range(3)] == [_step(resumed) for _ in range(3)]
    for one, other in zip(whole._model.adapter_parameters(), resumed._model.adapter_parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_the_optimizer_state_the_next_step_would_differ(tmp_path: Path, backends: list[LocalBackend]) -> None:
    whole, _, other = backends
    for _ in range(2):
        _step(whole)
    saved = _checkpoints(tmp_path, whole).save(
        Counters(step=2, optimizer_steps=2, policy_version=2, steps_without_signal=0)
    )
    _checkpoints(tmp_path, other).restore(inspect(saved))
    other._learner.optimizer.state.clear()
    assert _step(whole)[:2] == _step(other)[:2]
    assert not torch.equal(whole._model.adapter_parameters()[1], other._model.adapter_parameters()[1])


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, backends: list[LocalBackend]) -> None:
    saved = _checkpoints(tmp_path / "run", backends[0]).save(
        Counters(step=1, optimizer_steps=1, policy_version=1, steps_without_signal=0)
    )
    base = build_tiny_llama(tmp_path / "other", seed=9)
    with pytest.raises(PreflightError, match="other base weights"):
        LocalBackend.open(base, settings(), lambda _: None, adapter=saved / "adapter")
