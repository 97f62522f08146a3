"""How long a trainer that has completed waits for its evaluation: never for ever, and never for nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from hermes_rl_mcp.contracts.config import RunConfig
from trainer import evaluation_wait


class Machine:
    """A clock that a wait itself moves on by a second, and a sampler as a test wants it then."""

    def __init__(self, at: Callable[[int], None] = lambda second: None) -> None:
        self.second = 0
        self.activity = 0
        self.failure: Exception | None = None
        self.leave = Event()
        self.leave.wait = lambda timeout=None: self._tick(at)  # type: ignore[method-assign]

    def _tick(self, at: Callable[[int], None]) -> bool:
        self.second += 1
        at(self.second)
        return self.leave.is_set()

    def waits(self, file: Path, limit_s: float = 500) -> tuple[str, int]:
        clock = lambda: float(self.second)  # noqa: E731
        why = evaluation_wait.wait(file, self, self.leave, limit_s, first_sign_s=60, quiet_s=100, clock=clock)
        return why, self.second


def test_it_ends_with_the_result(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"

    def at(second: int) -> None:
        machine.activity = second
        if second == 300:
            file.touch()

    machine = Machine(at)
    assert machine.waits(file) == ("the evaluation is done", 300)


def test_it_ends_when_nobody_asks_anything(tmp_path: Path) -> None:
    assert Machine().waits(tmp_path / "e") == ("nothing was asked for evaluation for 60 s", 61)


def test_it_ends_some_time_after_the_last_request(tmp_path: Path) -> None:
    def at(second: int) -> None:
        machine.activity = min(second, 50)

    machine = Machine(at)
    assert machine.waits(tmp_path / "e") == ("nothing was asked for evaluation for 100 s", 151)


def test_it_ends_at_its_limit_however_busy_the_sampler_is(tmp_path: Path) -> None:
    def at(second: int) -> None:
        machine.activity = second

    machine = Machine(at)
    assert machine.waits(tmp_path / "e") == ("the evaluation was not done within 500 s", 501)


def test_it_ends_at_a_signal_and_with_the_sampler(tmp_path: Path) -> None:
    def stop(second: int) -> None:
        if second == 3:
            stopped.leave.set()

    def fail(second: int) -> None:
        failed.failure = RuntimeError("out of memory") if second == 3 else None

    stopped, failed = Machine(stop), Machine(fail)
    assert stopped.waits(tmp_path / "e") == ("asked to end", 3)
    assert failed.waits(tmp_path / "e") == ("the sampler has failed", 3)


@pytest.mark.parametrize(
    ("base", "env", "written", "expected"),
    [
        ("hermes_rl_mcp", {"eval_items": -1}, False, True),
        ("hermes_rl_mcp", {"eval_items": 100}, False, True),
        ("hermes_rl_mcp", {"eval_items": 0}, False, False),
        ("hermes_rl_mcp", {"eval_items": -1}, True, False),
        ("hermes_rl_mcp", {}, False, False),
        ("atroposlib", {"eval_items": -1}, False, False),
    ],
    ids=["automatic", "told so", "told not to", "skipped already", "older", "atropos"],
)
def test_only_an_environment_that_may_evaluate_is_waited_for(
    tmp_path: Path, base: str, env: dict[str, Any], written: bool, expected: bool
) -> None:
    names = ("run_id", "environment", "env_file", "env_class", "env_sha256", "profile", "base_model", "model_path")
    run = {**dict.fromkeys(names, "x"), "nonce": "n", "path_prefix": "", "env_base": base}
    values = {"run": run, "ports": {"rollout_api": 1, "trainer": 2}, "env": env, "openai": [], "trainer": {}}
    file = tmp_path / "evaluation.json"
    if written:
        file.touch()
    assert evaluation_wait.is_expected(RunConfig.model_validate(values), file) is expected


def test_long_runs_allow_as_long_as_they_took_and_short_ones_ten_minutes() -> None:
    assert (evaluation_wait.bound_s(30.0), evaluation_wait.bound_s(7200.0)) == (600.0, 7200.0)
