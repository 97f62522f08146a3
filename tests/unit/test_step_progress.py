"""progress.json: quiet while steps are quick, telling while one takes long."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl_mcp.contracts.records import StepProgress
from trainer.progress import ProgressFile


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress.json"


def _text(path: Path) -> str:
    return StepProgress.model_validate_json(path.read_text()).text


def test_steps_shorter_than_two_seconds_write_nothing(path: Path, clock: Clock) -> None:
    progress = ProgressFile(path, clock)
    for step in range(1, 20):
        clock.now += 1.5
        progress.say(step, "sampling")
        progress.say(step, "training")
    assert not path.exists()


def test_a_long_step_tells_how_far_it_is_and_a_new_phase_at_once(path: Path, clock: Clock) -> None:
    progress = ProgressFile(path, clock)
    progress.say(3, "sampling", "0 tokens so far")
    clock.now += 2.5
    progress.say(3, "sampling", "70 tokens so far")
    assert _text(path) == "step 3: sampling, 70 tokens so far"
    clock.now += 0.5
    progress.say(3, "sampling", "90 tokens so far")
    assert _text(path) == "step 3: sampling, 70 tokens so far", "one text per two seconds is enough"
    progress.say(3, "training", "8 sequences")
    assert _text(path) == "step 3: training, 8 sequences"


def test_a_file_that_cannot_be_written_does_not_stop_training_and_is_told_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    progress = ProgressFile(tmp_path / "gone" / "progress.json", clock)
    for _ in range(5):
        progress.say(1, "sampling")
        clock.now += 5
    assert len(caplog.records) == 1, "the warning goes to the same full disk"
    (tmp_path / "gone").mkdir()
    progress.say(1, "sampling")
    assert _text(tmp_path / "gone" / "progress.json") == "step 1: sampling"


def test_what_follows_the_last_step_is_told_at_once_and_is_newer_than_that_step(path: Path, clock: Clock) -> None:
    ProgressFile(path, clock).finishing(4, "writing the last checkpoint")
    assert StepProgress.model_validate_json(path.read_text()).step == 5
    assert _text(path) == "writing the last checkpoint"
