"""The real trainer, killed while it writes a checkpoint, and asked to go on from checkpoints that are not its own."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from three_processes import PREFIX, Run, run_directory
from tiny_llama import build_tiny_llama

from hermes_rl_mcp.checkpoints import MARKER, last_complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

READY_S, EXIT_S = 300.0, 300.0
SIZES = {"group_size": 2, "batch_size": 2, "total_steps": 60}


def _post(run: Run, count: int, seed: int = 3) -> None:
    """Groups of another seed differ; the same ones, sent again soon, would count as sent once."""
    rng = random.Random(seed)
    for mark in range(count):
        completions = [[50 + mark % 60, 60, 61 + at] for at in range(2)]
        group: dict[str, Any] = {
            "tokens": [[40, 41, *one] for one in completions],
            "masks": [[-100, -100, *one] for one in completions],
            "scores": [rng.random(), rng.random()],
            "inference_logprobs": [[1.0, 1.0, -5.0, -4.0, -4.0]] * 2,
        }
        url = f"http://127.0.0.1:{run.ports['api']}/{PREFIX}/scored_data"
        assert httpx.post(url, json=group, trust_env=False, timeout=60).status_code == 200


def _ready(run: Run) -> bool:
    return run.health().get("status") == "ok"


def _half_written(run: Run) -> list[Path]:
    return list(run.paths.checkpoints.glob(".writing-*/*"))


def _kill_while_it_writes(run: Run) -> None:
    """SIGKILL in the middle of a checkpoint. It is stopped first: one that was complete by then does not count, and the
    next is waited for."""
    trainer = run.processes["trainer"]
    deadline = time.monotonic() + READY_S
    while True:
        while not _half_written(run):
            assert trainer.poll() is None, run.log("trainer")
            assert time.monotonic() < deadline
        trainer.send_signal(signal.SIGSTOP)
        while psutil.Process(trainer.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        if _half_written(run):
            break
        trainer.send_signal(signal.SIGCONT)
    trainer.kill()
    trainer.wait(60)


def test_fi_22_real_a_checkpoint_whose_writer_was_killed_is_never_offered_and_its_batch_comes_again(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    base = str(build_tiny_llama(tmp_path / "base"))
    often = {"save_checkpoint_interval": 1, "keep_checkpoints": 0, "lora_rank": 64}
    with run_directory(tmp_path, environ, model=base, model_path=base, env=SIZES, trainer=often) as run:
        run.start("api")
        run.start("trainer")
        run.wait(lambda: _ready(run), READY_S)
        _post(run, SIZES["total_steps"])
        _kill_while_it_writes(run)
        [half] = run.paths.checkpoints.glob(".writing-*")
        good = last_complete(run.paths.checkpoints)
        assert good is not None and half.name.endswith(f"step_{int(good.name[5:]) + 1}")
        trained = len(run.metrics())
        assert trained == int(good.name[5:]) + 1, "the step is on record, its checkpoint is not"

        run.start("trainer", "--resume")
        assert run.processes["trainer"].wait(EXIT_S) == 0, run.log("trainer")
        assert f"restoring {good.name}" in run.log("trainer")
        steps = [line["step"] for line in run.metrics()]
        assert steps == list(range(1, SIZES["total_steps"] + 1))
        assert not list(run.paths.checkpoints.glob(".writing-*"))
        run.end("api")


def _edit(run: Run, section: str, **values: Any) -> None:
    config = yaml.safe_load(run.paths.config.read_text())
    config[section].update(values)
    run.paths.config.write_text(yaml.safe_dump(config))


def _refused(run: Run) -> str:
    assert run.start("trainer", "--resume").wait(EXIT_S) == 1, run.log("trainer")
    report = run.report()
    assert report.status == "failed" and report.hint
    return f"{report.error} {report.hint}"


def test_fi_37_real_the_trainer_itself_refuses_what_is_not_its_own_checkpoint_and_continues_what_is(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    base = build_tiny_llama(tmp_path / "base")
    sizes = {**SIZES, "total_steps": 5}
    with run_directory(tmp_path, environ, model=str(base), model_path=str(base), env=sizes) as run:
        assert "no complete checkpoint" in _refused(run)  # missing
        run.start("api")
        run.start("trainer")
        run.wait(lambda: _ready(run), READY_S)
        _post(run, 3)
        run.wait(lambda: len(run.metrics()) == 3, READY_S)
        assert run.end("trainer") == 143
        good = run.paths.checkpoints / "step_3"
        original = run.paths.config.read_text()

        _edit(run, "trainer", lora_rank=4)
        text = _refused(run)
        assert "lora_rank is 16 there and 4 in the configuration" in text, text
        _edit(run, "trainer", lora_rank=16)
        _edit(run, "run", base_model="builtin:tiny")
        text = _refused(run)
        assert str(base) in text and "builtin:tiny" in text, text
        run.paths.config.write_text(original)

        kept = tmp_path / "kept"
        shutil.copytree(good, kept)
        for damage, words in (
            (lambda: (good / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
            (lambda: (good / "optimizer.pt").write_bytes(b"\x80\x04."), "optimizer.pt is a pickle"),
            (lambda: (good / MARKER).unlink(), "no complete checkpoint"),
        ):
            _damaged(run, good, kept, damage, words)

        other = build_tiny_llama(tmp_path / "other", seed=9)
        shutil.move(base / "model.safetensors", tmp_path / "aside")
        shutil.copyfile(other / "model.safetensors", base / "model.safetensors")
        marker = json.loads((good / MARKER).read_text())
        text = _refused(run)
        assert marker["base_sha256"][:12] in text and "base weights" in text, text
        shutil.move(tmp_path / "aside", base / "model.safetensors")

        run.start("trainer", "--resume")
        run.wait(lambda: _ready(run), READY_S)
        _post(run, 2, seed=4)
        assert run.processes["trainer"].wait(EXIT_S) == 0, run.log("trainer")
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
        assert [line["policy/version"] for line in run.metrics()] == [1, 2, 3, 4, 5]
        run.end("api")


def _damaged(run: Run, good: Path, kept: Path, damage: Callable[[], Any], words: str) -> None:
    damage()
    text = _refused(run)
    assert words in text, text
    shutil.rmtree(good)
    shutil.copytree(kept, good)
