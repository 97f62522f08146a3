"""Where an environment stands is on disk when a run ends, and the one that goes on with it begins there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from env_rig import TINY, Api, EnvProcess, Sampler, child_environ, run_env, serving, until, write_config, write_env

GROUP, BATCH = 2, 4
KEEPS_COUNT = """
    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {"count": self.count})
"""


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with serving(Sampler()) as running:
        yield running


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    server = Api(tmp_path, child_environ(dict(os.environ)))
    server.start()
    yield server
    server.close()


class Positions:
    """The environment's files below the trainer's checkpoints."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        self.folder = checkpoints / "env_checkpoints" / "counting"

    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.json"))

    def count(self, step: int) -> int:
        count: int = json.loads((self.folder / f"step-{step}.json").read_text())["count"]
        return count


def _start(folder: Path, environ: dict[str, str], api: Api, sampler: Sampler, extra: str, **fields: Any) -> EnvProcess:
    env = {
        "group_size": GROUP,
        "batch_size": BATCH,
        "max_batches_offpolicy": 1,
        "max_token_length": 8,
        "tokenizer_name": str(TINY),
        "rollout_server_url": api.url,
        "total_steps": 50,
        "steps_per_eval": -1,
        "ensure_scores_are_not_same": False,
        "use_wandb": False,
        **fields,
    }
    config = write_config(folder, env, {"base_url": f"{sampler.url}/v1", "server_type": "vllm"})
    spec = f"{write_env(folder, extra)}:CountingEnv"
    return run_env(folder, child_environ(environ), spec, "serve", "--config", str(config))


def test_the_position_is_kept_at_checkpoints_now_and_then_between_them_and_at_the_end(
    tmp_path: Path, environ: dict[str, str], api: Api, sampler: Sampler
) -> None:
    positions = Positions(tmp_path / "checkpoints")
    api.register_trainer(batch_size=BATCH, checkpoint_dir=str(positions.checkpoints), save_checkpoint_interval=3)
    env = _start(tmp_path, environ, api, sampler, KEEPS_COUNT)
    try:
        for _ in range(3):
            api.next_batch()
        until(lambda: positions.steps() == [3], why=lambda: env.text)
        at_checkpoint = positions.count(3)
        assert 6 <= at_checkpoint <= 9
        api.next_batch()
        until(lambda: positions.steps() == [3, 4], why=lambda: env.text)  # a second later, without a checkpoint
        api.next_batch()
        until(lambda: positions.steps() == [3, 5], why=lambda: env.text)  # of those in between the newest is enough
        api.next_batch()
        until(lambda: positions.steps() == [3, 6], why=lambda: env.text)
        api.next_batch()
        until(lambda: api.received() >= 8 * BATCH // GROUP, why=lambda: env.text)
        assert env.stop() == 0
        assert positions.steps() == [3, 6, 7]
        assert positions.count(3) == at_checkpoint
        assert positions.count(7) >= 8 * BATCH // GROUP
    finally:
        env.stop()


def test_an_environment_of_a_resumed_run_asks_for_what_comes_behind_its_position(
    tmp_path: Path, environ: dict[str, str], api: Api, sampler: Sampler
) -> None:
    positions = Positions(tmp_path / "checkpoints")
    positions.folder.mkdir(parents=True)
    (positions.folder / "step-3.json").write_text('{"count": 41}')
    asked: list[str] = []

    def answer(prompt: list[int], index: int) -> list[int]:
        asked.append(bytes(one for one in prompt if one < 256).decode(errors="replace"))
        return [56, 1]

    sampler.answer = answer
    api.register_trainer(batch_size=BATCH, checkpoint_dir=str(positions.checkpoints), starting_step=3)
    env = _start(tmp_path, environ, api, sampler, KEEPS_COUNT)
    try:
        api.next_batch()
        assert {word for text in asked[: 2 * GROUP] for word in ("41", "42", "43") if word in text} == {"42", "43"}
    finally:
        env.stop()


def test_a_position_that_cannot_be_saved_does_not_end_the_run(
    tmp_path: Path, environ: dict[str, str], api: Api, sampler: Sampler
) -> None:
    api.register_trainer(batch_size=BATCH, checkpoint_dir=str(tmp_path / "c"), save_checkpoint_interval=1)
    broken = "\n    def save_checkpoint(self, step, data=None):\n        raise OSError(28, 'No space left on device')\n"
    env = _start(tmp_path, environ, api, sampler, broken)
    try:
        for _ in range(3):
            api.next_batch()
        until(lambda: "No space left on device" in env.text, why=lambda: env.text)
        assert env.process.poll() is None
        api.next_batch()
    finally:
        assert env.stop() == 0
