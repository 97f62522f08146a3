"""W&B can fail in any way without reaching training."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_parts import until

from trainer.wandb_sink import WandbSink


class FakeRun:
    """Records, and fails or hangs where it is told to."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False
        self.hang: threading.Event | None = None
        self.fail_at: int | None = None

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fail_at:
            raise ConnectionError("the service is gone")
        self.logged.append((step, values))

    def finish(self) -> None:
        if self.hang is not None:
            self.hang.wait(30)
        self.finished = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRun]:
    """In place of the package, which would start a service process of its own."""
    fake = FakeRun()

    def init(**settings: Any) -> FakeRun:
        if settings["project"] == "broken":
            raise RuntimeError("no permission")
        return fake

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    yield fake
    if fake.hang is not None:
        fake.hang.set()


def _sink(tmp_path: Path, project: str = "p") -> WandbSink:
    return WandbSink(project=project, group="g", name="n", folder=tmp_path, config={})


def test_known_values_arrive_under_their_step(tmp_path: Path, run: FakeRun) -> None:
    sink = _sink(tmp_path)
    sink.log(1, {"reward/mean": 0.5, "train/loss": None})
    sink.log(2, {"reward/mean": 0.6})
    sink.finish()
    assert run.logged == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.6})]
    assert run.finished


@pytest.mark.parametrize(("project", "fail_at"), [("broken", None), ("p", 2)])
def test_a_failure_at_the_start_or_midway_reaches_nobody(
    tmp_path: Path, run: FakeRun, project: str, fail_at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    run.fail_at = fail_at
    sink = _sink(tmp_path, project)
    for step in range(1, 2000):
        sink.log(step, {"reward/mean": 0.5})
    sink.finish()
    until(lambda: not sink._thread.is_alive())
    assert "W&B is off for the rest of this run" in caplog.text


def test_a_finish_that_hangs_is_left_behind(
    tmp_path: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.wandb_sink._FINISH_S", 0.1)
    run.hang = threading.Event()
    sink = _sink(tmp_path)
    sink.log(1, {"reward/mean": 0.5})
    sink.finish()
    assert "did not finish" in caplog.text
    assert run.logged == [(1, {"reward/mean": 0.5})]


@pytest.mark.parametrize("method", ["log", "finish"])
def test_the_stand_in_takes_no_argument_that_the_real_package_does_not_take(method: str) -> None:
    wandb = pytest.importorskip("wandb")
    ours = set(inspect.signature(getattr(FakeRun, method)).parameters) - {"self", "values"}
    assert ours <= set(inspect.signature(getattr(wandb.Run, method)).parameters)
