"""The loop's promises, with the real local backend on a tiny model and batches out of a list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnosis_parts import seen
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings, step

from hermes_rl_mcp.checkpoints import read_marker
from hermes_rl_mcp.contracts.records import METRIC_NAMES, RolloutLine
from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.runs.watch.diagnosis import diagnose
from trainer.backends.local.backend import LocalBackend
from trainer.batching import build_batch
from trainer.checkpoints import Checkpoints
from trainer.failures import TrainingFailedError
from trainer.loop import Loop, Outcome, Recorders
from trainer.metrics import JsonLines, LastEvaluation
from trainer.progress import ProgressFile
from trainer.rollout_client import Lease

PROMPT = [40, 41, 42]


def _group(scores: list[float], *, logprob: float = -5.0, **fields: Any) -> ScoredData:
    completions = [[50 + at, 60, 1] for at in range(len(scores))]
    values = {
        "tokens": [PROMPT + one for one in completions],
        "masks": [[-100] * 3 + one for one in completions],
        "scores": scores,
        "inference_logprobs": [[1.0] * 3 + [logprob] * 3] * len(scores),
        **fields,
    }
    return ScoredData.model_validate(values)


SIGNAL = [_group([1.0, 0.0]), _group([0.5, 0.5])]
NO_SIGNAL = [_group([1.0, 1.0]), _group([0.0, 0.0])]


class Listed:
    """A source that checks, at each acknowledgement, that the step is already on record."""

    def __init__(self, batches: list[list[ScoredData]], metrics: Path) -> None:
        self._batches = batches
        self._metrics = metrics
        self.acknowledged: list[str] = []
        self.covered: list[int] = []

    def next_batch(self) -> Lease | None:
        return Lease(self._batches.pop(0), str(len(self._batches))) if self._batches else None

    def acknowledge(self, lease: Lease) -> None:
        assert lease.lease_id is not None
        self.acknowledged.append(lease.lease_id)
        assert len(self._metrics.read_text().splitlines()) == len(self.acknowledged)

    def checkpointed(self, step: int) -> None:
        assert read_marker(self._metrics.parent / "checkpoints" / f"step_{step}") is not None
        self.covered.append(step)


class Rig:
    """One loop in one folder."""

    def __init__(self, folder: Path, backend: LocalBackend) -> None:
        self.folder = folder
        self.backend = backend
        self.metrics_file = folder / "metrics.jsonl"
        self.checkpoints = Checkpoints(folder / "checkpoints", backend, base_model="tiny", lora_rank=4)
        self.source = Listed([], self.metrics_file)

    def run(self, batches: list[list[ScoredData]], *, total_steps: int | None = None, **config: Any) -> Outcome:
        self.source = Listed(list(batches), self.metrics_file)
        recorders = Recorders(
            JsonLines(self.metrics_file),
            JsonLines(self.folder / "rollouts.jsonl"),
            LastEvaluation(self.folder / "env_metrics.jsonl"),
            lambda step, values: None,
            ProgressFile(self.folder / "progress.json"),
        )
        loop = Loop(
            settings(learning_rate=1e-2, **config),
            self.backend,
            self.source,
            self.checkpoints,
            recorders,
            total_steps=total_steps if total_steps is not None else len(batches),
            max_token_length=4,
            stopping=lambda: False,
        )
        return loop.run()

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.backend._model.adapter_parameters()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rig(tmp_path: Path, base: Path) -> Iterator[Rig]:
    backend = LocalBackend(load_model(base, adapter_std=0.0), settings())
    yield Rig(tmp_path, backend)
    backend.close()


def test_every_batch_gets_one_line_and_is_acknowledged_after_it(rig: Rig) -> None:
    outcome = rig.run([SIGNAL, NO_SIGNAL, SIGNAL])
    assert outcome.finished
    assert len(rig.source.acknowledged) == 3
    lines = rig.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(set(line) == {"step", "time", *METRIC_NAMES} for line in lines)
    assert [line["policy/version"] for line in lines] == [1, 1, 2]
    assert [line["groups/zero_variance_fraction"] for line in lines] == [0.5, 1.0, 0.5]
    assert outcome.reward_first5 == pytest.approx(0.5)


def test_a_batch_without_signal_moves_nothing_even_after_adam_has_momentum(rig: Rig) -> None:
    rig.run([SIGNAL, SIGNAL])
    before = rig.weights()
    rig.metrics_file.unlink()
    rig.run([NO_SIGNAL], save_checkpoint_interval=0)
    assert all(torch.equal(a, b) for a, b in zip(before, rig.weights(), strict=True))
    [line] = rig.metrics()
    assert (line["train/loss"], line["train/learning_rate"], line["tokens/trained"]) == (None, None, 0)
    assert rig.backend.policy_version == 2
    assert line["reward/mean"] == 0.5


def test_batches_without_signal_in_a_row_fail_with_a_diagnosis(rig: Rig) -> None:
    with pytest.raises(TrainingFailedError, match=r"3 batches in a row.*equal") as caught:
        rig.run([SIGNAL] + [NO_SIGNAL] * 9, max_steps_without_signal=3)
    assert str(rig.folder / "checkpoints" / "step_4") in caught.value.message
    assert "reward" in caught.value.hint
    assert len(rig.metrics()) == 4 == len(rig.source.acknowledged)


def test_a_batch_with_signal_starts_the_count_anew(rig: Rig) -> None:
    assert rig.run(([NO_SIGNAL] * 2 + [SIGNAL]) * 3, max_steps_without_signal=3).finished


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (_group([1.0, 0.0], inference_logprobs=None), "logprob"),
        (_group([1.0, 0.0], masks=[[1]] * 2), "well formed"),
        (
            _group([1.0, 0.0], tokens=[[*PROMPT, 10**6, 60, 1]] * 2),
            r"group 0: tokens\[0\]\[3\] is 1000000; the model's",
        ),
        (_group([1.0, 0.0], overrides=[{"finish_reason": "length"}] * 2), r"out of the loss .*2 ended by length"),
    ],
)
def test_the_diagnosis_names_the_cause(rig: Rig, broken: ScoredData, words: str) -> None:
    with pytest.raises(TrainingFailedError, match=words):
        rig.run([[broken]] * 2, max_steps_without_signal=2, mask_truncated_completions=True)


def test_a_run_whose_sequences_are_all_dropped_as_too_long_is_not_told_to_make_them_longer(rig: Rig) -> None:
    with pytest.raises(TrainingFailedError, match="longer than max_token_trainer_length") as failed:
        rig.run([SIGNAL[:1]] * 2, max_steps_without_signal=2, max_token_trainer_length=5, overlong="drop")
    assert failed.value.hint == "Raise max_token_trainer_length, or set overlong to cut."


@pytest.mark.parametrize(("rule", "words", "trained"), [("cut", "cut", 4), ("drop", "left out", 0)])
def test_sequences_beyond_the_trainers_limit_are_in_log_metrics_and_outcome(
    rig: Rig, caplog: pytest.LogCaptureFixture, rule: str, words: str, trained: int
) -> None:
    outcome = rig.run([SIGNAL[:1]] * 2, max_token_trainer_length=5, overlong=rule)
    assert outcome.overlong_sequences == 4
    assert [(line["rollouts/overlong"], line["tokens/trained"]) for line in rig.metrics()] == [(2, trained)] * 2
    assert f"step 2: 2 sequences beyond max_token_trainer_length 5 {words}" in caplog.text


def test_tokens_without_logprob_are_trained_on_if_so_configured_and_in_log_metrics_and_outcome(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    text_only = [_group([1.0, 0.0], inference_logprobs=None)]
    outcome = rig.run([text_only], missing_logprobs="recompute")
    assert outcome.missing_logprobs == 6
    [line] = rig.metrics()
    assert (line["tokens/missing_logprobs"], line["tokens/trained"], line["policy/version"]) == (6, 6, 1)
    assert (line["ratio/mean"], line["logprobs/mean"], line["logprobs/diff"]) == (None, None, None)
    assert "step 1: 6 tokens without logprob taken as sampled by the current policy" in caplog.text


def test_a_sequence_set_to_zero_does_not_count_as_trained(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rig.run([[_group([1.0, 0.5, 0.0], overrides=[{}, {}, {"set_advantage_to_zero": True}])]])
    [line] = rig.metrics()
    assert line["tokens/trained"] == 3, "the second's advantage is 0, too"
    assert "step 1: out of the loss, scores counted: 1 set to advantage zero by the environment" in caplog.text
    assert (line["reward/mean"], line["rollouts/length_mean"]) == (0.5, 3.0)


NOT_FINITE = [_group([1.0, 0.0], logprob=-1e4)]


def test_fi_23_a_step_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(rig: Rig) -> None:
    with pytest.raises(TrainingFailedError, match="Step 3: loss or gradient is not finite") as caught:
        rig.run([SIGNAL, SIGNAL, NOT_FINITE])
    assert str(rig.folder / "checkpoints" / "step_2") in caught.value.message
    assert "learning rate" in caught.value.hint
    assert len(rig.metrics()) == 2 == len(rig.source.acknowledged)
    assert rig.backend.policy_version == 2


def test_fi_23_a_step_that_is_not_finite_is_left_out_with_null_and_flagged_if_so_configured(rig: Rig) -> None:
    outcome = rig.run([SIGNAL, NOT_FINITE, SIGNAL], on_non_finite="skip", save_checkpoint_interval=1)
    assert outcome.finished
    assert "NaN" not in rig.metrics_file.read_text()
    lines = rig.metrics()
    assert [line["policy/version"] for line in lines] == [1, 1, 2]
    assert [line["train/loss"] is None for line in lines] == [False, True, False]
    assert len(rig.source.acknowledged) == 3
    good = str(rig.folder / "checkpoints" / "step_1")
    [flag] = diagnose(seen(lines[:2], last_checkpoint=good))
    assert (flag.name, flag.severity, flag.since_step) == ("not_finite", "error", 2)
    assert "step 2: train/loss and train/grad_norm" in flag.evidence
    assert good in flag.evidence


def test_fi_23_nothing_but_steps_that_are_not_finite_fails_with_that_cause(rig: Rig) -> None:
    with pytest.raises(TrainingFailedError, match="From 3 batches in a row nothing was learned: loss or gradient"):
        rig.run([SIGNAL, *[NOT_FINITE] * 5], on_non_finite="skip", max_steps_without_signal=3)
    assert len(rig.metrics()) == 4


def test_within_a_long_step_the_micro_batches_are_counted(rig: Rig) -> None:
    seen: list[tuple[int, int]] = []
    before = rig.backend.activity
    data = build_batch(SIGNAL, settings(), rig.backend.vocabulary_size).data
    step(rig.backend, data, 1e-3, progress=lambda number, of: seen.append((number, of)))
    assert seen
    assert seen == [(number, len(seen)) for number in range(1, len(seen) + 1)]
    assert rig.backend.activity > before + len(seen), "the job itself counts too"


def test_the_progress_of_a_long_step_says_which_micro_batch_is_under_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(ProgressFile, "_write", lambda self, step, text: said.append(text))
    monkeypatch.setattr("trainer.progress.QUIET_S", 0.0)
    rig.run([SIGNAL])
    assert "step 1: training, 2 sequences, micro-batch 1 of 1" in said


def test_a_step_that_breaks_leaves_the_steps_before_it_in_a_checkpoint(rig: Rig) -> None:
    with pytest.raises(AttributeError):
        rig.run([SIGNAL, [None]])  # type: ignore[list-item]  # what no source sends: stands for any defect
    assert read_marker(rig.folder / "checkpoints" / "step_1") is not None
    assert rig.source.acknowledged == ["1"]


def test_checkpoints_come_by_interval_and_at_the_end(rig: Rig) -> None:
    outcome = rig.run([SIGNAL] * 5, save_checkpoint_interval=2)
    folder = rig.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2", "step_4", "step_5"]
    assert rig.source.covered == [2, 4, 5]
    assert outcome.checkpoint == folder / "step_5"
    marker = read_marker(folder / "step_5")
    assert marker is not None and marker.policy_version == 5


def test_a_source_that_ends_leaves_a_checkpoint_and_says_unfinished(rig: Rig) -> None:
    outcome = rig.run([SIGNAL] * 2, total_steps=9)
    assert (outcome.finished, outcome.preview) == (False, None)
    assert outcome.checkpoint == rig.folder / "checkpoints" / "step_2"


def test_the_learning_rate_warms_up_by_optimizer_steps(rig: Rig) -> None:
    rig.run([SIGNAL, NO_SIGNAL, SIGNAL, SIGNAL, SIGNAL], warmup_steps=2)
    assert [line["train/learning_rate"] for line in rig.metrics()] == [5e-3, None, 1e-2, 1e-2, 1e-2]


def test_the_preview_answers_the_first_prompt_with_base_and_adapter(rig: Rig) -> None:
    outcome = rig.run([SIGNAL] * 12)
    base = rig.backend.greedy(PROMPT, 4, adapter=False)
    trained = rig.backend.greedy(PROMPT, 4, adapter=True)
    assert base != trained
    assert outcome.preview is not None
    assert outcome.preview.prompt == rig.backend.decode(PROMPT)
    assert (outcome.preview.before, outcome.preview.after) == (rig.backend.decode(base), rig.backend.decode(trained))


def test_training_raises_the_probability_of_the_rewarded_completion(rig: Rig) -> None:
    def logprob() -> float:
        scores = rig.backend.score([*PROMPT, 50, 60, 1], 1.0).result().positions[3:]
        return sum(one.logprob for one in scores if one is not None)

    before = logprob()
    rig.run([SIGNAL] * 4)
    assert logprob() > before + 0.5


def test_a_sample_of_rollouts_is_logged_as_it_was_trained(rig: Rig) -> None:
    note = {"policy_version": 0, "finish_reason": "stop", "reward_parts": {"correct": 1.0}}
    rig.run([[_group([1.0, 0.0, 0.0, 0.0], overrides=[note, {}, {}, {}])]], rollouts_logged_per_step=2)
    lines = (rig.folder / "rollouts.jsonl").read_text().splitlines()
    first, second = (RolloutLine.model_validate_json(line) for line in lines)
    assert first.prompt == rig.backend.decode(PROMPT)
    assert first.completion == rig.backend.decode([50, 60])
    assert (first.reward, first.advantage, first.tokens, first.finish_reason) == (1.0, 0.75, 3, "stop")
    assert (second.reward, second.advantage) == (0.0, -0.25)
