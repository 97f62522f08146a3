"""env_state.json: seldom, but at once when a row of bad groups begins or ends; never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.envs.base import RolloutsFailedError
from hermes_rl_mcp.envs.groups import BadGroupError, MissingScoreError, Tally
from hermes_rl_mcp.envs.reports import STATE_S, StateFile
from hermes_rl_mcp.paths import RunPaths


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, clock: Clock) -> StateFile:
    return StateFile(tmp_path, ["r0123456789"], clock)


def shown(folder: Path) -> EnvState:
    return EnvState.model_validate_json(RunPaths(folder).env_state.read_bytes())


def test_it_is_written_at_most_once_a_second(tmp_path: Path, file: StateFile, clock: Clock) -> None:
    tally = Tally()
    file.offer(tally.state(1))
    tally.count_sent()
    clock.now += STATE_S / 2
    file.offer(tally.state(1))
    assert shown(tmp_path).sent == 0
    clock.now += STATE_S
    file.offer(tally.state(1))
    assert shown(tmp_path).sent == 1


def test_the_first_failure_and_the_group_that_ends_the_row_are_told_at_once(
    tmp_path: Path, file: StateFile, clock: Clock
) -> None:
    tally = Tally()
    file.offer(tally.state(0))
    tally.count_failed(RuntimeError("first"))
    file.offer(tally.state(0))
    assert (shown(tmp_path).unusable_in_a_row, shown(tmp_path).first_error) == (1, "RuntimeError: first")
    tally.count_failed(RuntimeError("second"))
    file.offer(tally.state(0))
    assert shown(tmp_path).unusable_in_a_row == 1, "the second can wait"
    tally.count_sent()
    file.offer(tally.state(0))
    assert (shown(tmp_path).unusable_in_a_row, shown(tmp_path).first_error, shown(tmp_path).failed) == (0, "", 2)


def test_the_last_state_before_the_end_is_always_written(tmp_path: Path, file: StateFile) -> None:
    tally = Tally()
    for _ in range(20):
        tally.count_failed(RuntimeError("x"))
        file.offer(tally.state(1))
    file.offer(tally.state(0), last=True)
    assert shown(tmp_path).unusable_in_a_row == 20


def test_the_address_of_the_run_is_masked_and_a_long_error_cut(tmp_path: Path, file: StateFile) -> None:
    tally = Tally()
    tally.count_failed(RuntimeError("POST http://127.0.0.1:8000/r0123456789/generate answered 500 " + "x" * 5000))
    file.offer(tally.state(0))
    assert "r0123456789" not in shown(tmp_path).first_error
    assert len(shown(tmp_path).first_error) <= 1000


def test_a_file_that_cannot_be_written_does_not_stop_the_environment(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "gone")
    file.offer(Tally().state(0))
    StateFile(None).offer(Tally().state(0))


def test_the_kind_of_the_first_bad_group_is_kept() -> None:
    failure = RolloutsFailedError("4 of 4 rollouts failed")
    failure.__cause__ = MissingScoreError("None")
    for error, reason in ((failure, "no_score"), (RuntimeError("x"), "failed")):
        tally = Tally()
        tally.count_failed(error)
        tally.count_dropped(BadGroupError("too_long", "later"))
        assert (tally.state(0).first_reason, tally.state(0).dropped) == (reason, 1)
    tally = Tally()
    tally.count_dropped(BadGroupError("too_long", "70 tokens"))
    assert (tally.state(3).first_reason, tally.state(3).first_error) == ("too_long", "too_long: 70 tokens")
    assert tally.state(3).running == 3
