"""How old answers are when they are trained on: real environments and a real rollout API, a scripted sampler that names
its policy version, and a trainer that is slow, quick, killed, and sees its API killed."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from env_rig import TINY, Api, EnvProcess, Sampler, child_environ, run_env, serving, until, write_config, write_env

GROUP, BATCH = 2, 8
STRAGGLER_ONE_IN = 12
STRAGGLER_S = 0.25


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    chance = random.Random(0)

    def delay_s() -> float:
        return STRAGGLER_S if chance.randrange(STRAGGLER_ONE_IN) == 0 else chance.uniform(0.0, 0.03)

    with serving(Sampler(delays=delay_s, policy_version=0)) as running:
        yield running


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    server = Api(tmp_path, child_environ(dict(os.environ)), "--journal", str(tmp_path / "journal.jsonl"))
    server.start()
    yield server
    server.close()


Start = Callable[..., EnvProcess]


@pytest.fixture
def start(tmp_path: Path, environ: dict[str, str], api: Api, sampler: Sampler) -> Iterator[Start]:
    """``start(name, **fields)``: an environment of its own folder and name."""
    started: list[EnvProcess] = []

    def run(name: str, **fields: Any) -> EnvProcess:
        env = {
            "group_size": GROUP,
            "batch_size": BATCH,
            "max_token_length": 8,
            "tokenizer_name": str(TINY),
            "rollout_server_url": api.url,
            "total_steps": 1000,
            "steps_per_eval": -1,
            "ensure_scores_are_not_same": False,
            "use_wandb": False,
            "wandb_name": name,
            **fields,
        }
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, env, {"base_url": f"{sampler.url}/v1", "server_type": "vllm"})
        spec = f"{write_env(folder)}:CountingEnv"
        started.append(run_env(folder, child_environ(environ), spec, "serve", "--config", str(config)))
        return started[-1]

    yield run
    for process in started:
        process.stop()


class Trainer:
    """Takes batches, notes how old their answers are, and publishes a new version now and then a little late."""

    def __init__(self, api: Api, sampler: Sampler) -> None:
        self.api = api
        self.sampler = sampler
        self.chance = random.Random(1)
        self.lags: list[list[int]] = []
        """Of each step, of each sequence."""
        self.owners: list[set[int]] = []
        self.attempts = itertools.count()
        self.register()

    @property
    def step(self) -> int:
        return len(self.lags)

    def register(self) -> None:
        self.api.register_trainer(batch_size=BATCH, starting_step=self.step, attempt=str(next(self.attempts)))

    def lease(self) -> dict[str, Any]:
        def reply() -> dict[str, Any] | None:
            answer: dict[str, Any] = self.api.http.get("/batch", params={"lease": 1, "wait_s": 0.5}).json()
            return answer if answer["batch"] else None

        found: dict[str, Any] = until(reply, why=lambda: self.api.log.read_text()[-2000:])
        return found

    def train(self, reply: dict[str, Any]) -> None:
        """The version rises while the batch is out; most steps bring one."""
        version = self.sampler.policy_version
        notes = [note for group in reply["batch"] for note in group["overrides"]]
        self.lags.append([version - note["policy_version"] for note in notes])
        self.owners.append({group["env_id"] for group in reply["batch"]})
        self._pause()
        if self.chance.random() < 0.9:
            self.sampler.policy_version += 1
        self._pause()
        self.api.acknowledge(reply["lease_id"])

    def _pause(self) -> None:
        threading.Event().wait(self.chance.choice((0.0, 0.0, 0.02, 0.1)))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.train(self.lease())


@pytest.mark.parametrize("allowed", [1, 3])
def test_no_answer_is_older_than_the_setting_allows_whatever_takes_long(
    allowed: int, api: Api, sampler: Sampler, start: Start
) -> None:
    trainer = Trainer(api, sampler)
    start("one", max_batches_offpolicy=allowed, max_num_workers=64)
    trainer.steps(10)
    while allowed not in trainer.lags[-1] and trainer.step < 60:
        reply = trainer.lease()
        # Sampling goes on while a batch is trained, up to the limit; not every one of these steps brings a version.
        until(lambda: api.health()["queue_size"] == allowed * BATCH // GROUP, why=lambda: api.log.read_text()[-2000:])
        trainer.train(reply)
        trainer.steps(allowed)
    lags = [lag for step in trainer.lags for lag in step]
    assert min(lags) == 0 and max(lags) == allowed
    assert "too old" not in api.log.read_text()


def test_on_policy_every_answer_is_of_the_version_that_is_trained(api: Api, sampler: Sampler, start: Start) -> None:
    """Also with two environments, one of which would allow more, and when the rollout API or the trainer dies."""
    trainer = Trainer(api, sampler)
    environments = [start("first", max_batches_offpolicy=0), start("second", max_batches_offpolicy=2)]
    trainer.steps(1)
    until(lambda: api.health()["environments"] == 2, why=lambda: environments[1].text)
    trainer.steps(8)
    reply = trainer.lease()
    api.kill()
    api.start()
    trainer.train(reply)
    trainer.steps(5)
    trainer.lease()  # and dies with it
    trainer.register()
    trainer.steps(10)
    # While only the second one was there, its own word held: two batches may have been waiting after the first step.
    # From then on the stricter one's holds for both.
    assert {lag for step in trainer.lags[3:] for lag in step} == {0}
    assert {frozenset(owners) for owners in trainer.owners[-20:]} >= {frozenset({0, 1})}
    assert all(environment.process.poll() is None for environment in environments)
    assert "too old" not in api.log.read_text()
