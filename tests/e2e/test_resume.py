"""A run that was killed goes on as a new one: real supervisor, rollout API and trainer."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from feeder import MOST

from hermes_rl_mcp.contracts.runs import RunRecord, RunStatus
from hermes_rl_mcp.errors import ResumeError
from hermes_rl_mcp.files import read_tail, write_atomic
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.runs.process import signal_process
from hermes_rl_mcp.runs.store import RunStore

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

FEEDER = Path(__file__).parent.parent / "feeder.py"
STEPS, INTERVAL, GROUP, GROUPS = 40, 7, 4, 2
TINY = {
    "model_name": "builtin:tiny",
    "device": "cpu",
    "torch_threads": 1,
    "lora_rank": 8,
    "group_size": GROUP,
    "batch_size": GROUP * GROUPS,
    "total_steps": STEPS,
    "save_checkpoint_interval": INTERVAL,
}
END_S = 300


class Home:
    """One home and its runs, over the same operations that the tools use."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self.recording = Path()
        self.ops = Operations.from_environ(environ)
        self.store: RunStore = self.ops.context.runs

    async def choose(self, **edits: Any) -> None:
        await self.ops.select_environment("arithmetic")
        sessions = self.ops.context.sessions
        # All edits at once: each by its tool would start a process.
        sessions.select(sessions.read().model_copy(update={"edits": {**TINY, **edits}}))

    def paths(self, run_id: str) -> RunPaths:
        return self.store.paths(run_id)

    def metrics(self, run_id: str) -> list[dict[str, Any]]:
        return self.store.metrics(run_id).lines

    async def until(self, run_id: str, condition: Callable[[RunRecord], bool]) -> RunRecord:
        with anyio.fail_after(END_S):
            while not condition(record := self.store.get(run_id)):
                assert record.status is not RunStatus.FAILED, (record.error, self.logs(run_id))
                await anyio.sleep(0.01)
        return record

    async def ended(self, run_id: str) -> RunRecord:
        return await self.until(run_id, lambda record: record.status.terminal)

    def logs(self, run_id: str) -> str:
        home = self.ops.context.home
        return "\n".join(read_tail(home.log(name, run_id), 3000) for name in ("supervisor", "api", "trainer", "env"))

    async def kill_at(self, run_id: str, step: int) -> None:
        """SIGKILL for the supervisor, the rollout API, the trainer and the environment at once. A run that is fed gets
        no further than that step."""
        await self.until(run_id, lambda _: len(self.metrics(run_id)) >= step)
        record = self.store.get(run_id)
        identities = [record.supervisor, *(process.identity for process in record.processes.values())]
        pids = [identity.pid for identity in identities if identity is not None]
        assert len(pids) == 4
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
        assert (await self.ended(run_id)).status is RunStatus.INTERRUPTED

    def feed_up_to(self, step: int) -> None:
        """No more batches than for that many steps, from now on."""
        write_atomic(Path(f"{self.recording}{MOST}"), str(step * GROUPS))

    def close(self) -> None:
        for record in self.store.active():
            if record.supervisor is not None:
                signal_process(record.supervisor, signal.SIGTERM)


@pytest.fixture
def home(environ: dict[str, str]) -> Iterator[Home]:
    home = Home(environ)
    yield home
    home.close()


@pytest.fixture
def fed(tmp_path: Path, environ: dict[str, str]) -> Iterator[Home]:
    """A home whose runs get recorded batches from ``feeder.py`` in place of an environment."""
    recording = tmp_path / "recording.jsonl"
    rng = random.Random(5)
    recording.write_text("".join(json.dumps(_group(rng)) + "\n" for _ in range(STEPS * GROUPS)))
    commands = tmp_path / "commands.json"
    commands.write_text(json.dumps({"commands": {"env": [sys.executable, str(FEEDER), str(recording)]}}))
    home = Home({**environ, "HERMES_RL_CHILD_COMMANDS": str(commands)})
    home.recording = recording
    yield home
    home.close()


def _group(rng: random.Random) -> dict[str, Any]:
    """Four answers to one prompt, with logprobs that the sampler might have given."""
    prompt = [rng.randrange(40, 60) for _ in range(5)]
    answers = [[rng.randrange(40, 60) for _ in range(rng.randrange(1, 6))] for _ in range(GROUP)]
    return {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": [rng.random() for _ in range(GROUP)],
        "inference_logprobs": [[1.0] * len(prompt) + [-3 * rng.random() for _ in answer] for answer in answers],
    }


def _learned(paths: RunPaths) -> dict[str, bytes]:
    folder = paths.checkpoints / f"step_{STEPS}"
    names = ("adapter/adapter_model.safetensors", "optimizer.safetensors", "rng.json", "counters.json")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.slow
async def test_fi_37_real_a_killed_run_that_is_resumed_is_bit_identical_to_one_that_was_not(fed: Home) -> None:
    await fed.choose(eval_items=0)  # a recording evaluates nothing
    whole = (await fed.ops.start_training()).run_id
    assert (await fed.ended(whole)).status is RunStatus.COMPLETED

    fed.feed_up_to(10)
    killed = (await fed.ops.start_training()).run_id
    await fed.kill_at(killed, 10)
    before = {path: path.read_bytes() for path in fed.paths(killed).dir.rglob("*") if path.is_file()}
    kept = fed.store.checkpoints(killed)[-1].marker.step
    trained = len(fed.metrics(killed))
    assert kept < trained == 10, "killed between two checkpoints"
    fed.feed_up_to(19)

    answer = await fed.ops.start_training(resume_from=killed)
    assert (answer.resumed_from, answer.resumed_step) == (killed, kept)
    assert not [text for text in answer.warnings if killed in text]
    await fed.kill_at(answer.run_id, 19)  # once more, now a run that continues another
    fed.feed_up_to(STEPS)
    second = await fed.ops.start_training(resume_from=answer.run_id)
    assert second.resumed_step is not None and second.resumed_step > kept
    assert (await fed.ended(second.run_id)).status is RunStatus.COMPLETED

    assert _learned(fed.paths(second.run_id)) == _learned(fed.paths(whole))
    for name in ("train/loss", "train/grad_norm", "reward/mean", "policy/version"):
        assert [line[name] for line in fed.metrics(second.run_id)] == [line[name] for line in fed.metrics(whole)]
    assert [line["step"] for line in fed.metrics(second.run_id)] == list(range(1, STEPS + 1))
    assert {path: path.read_bytes() for path in before} == before, "the old run is only read"
    results = await fed.ops.get_results(second.run_id)
    assert (results.resumed_from, results.resumed_step) == (answer.run_id, second.resumed_step)


@pytest.mark.slow
async def test_fi_37_real_a_live_run_goes_on_without_gap_or_repetition_and_with_its_environment(home: Home) -> None:
    await home.choose(total_steps=12, save_checkpoint_interval=4)
    old = (await home.ops.start_training()).run_id
    with pytest.raises(ResumeError, match="has not ended"):
        await home.ops.start_training(resume_from=old)
    await home.kill_at(old, 6)
    before = home.metrics(old)
    kept = home.store.checkpoints(old)[-1].marker.step
    assert kept in (4, 8)
    assert f"resume_from='{old}'" in str(home.store.get(old).hint)
    shown = await home.ops.check_status(old)
    assert shown.status == "interrupted"

    await home.ops.edit_config("total_steps", 14)
    await home.ops.edit_config("lora_rank", 4)
    with pytest.raises(ResumeError, match="lora_rank is 8 there and 4 in"):
        await home.ops.start_training(resume_from=old)
    await home.ops.edit_config("lora_rank", 8)
    answer = await home.ops.start_training("a key", resume_from=old)
    assert (answer.resumed_from, answer.resumed_step) == (old, kept)
    assert not [text for text in answer.warnings if old in text]
    assert "total_steps 12 -> 14" in answer.message and "lora_rank" not in answer.message
    again = await home.ops.start_training("a key", resume_from=old)
    assert (again.run_id, again.resumed_from) == (answer.run_id, old)
    new = answer.run_id
    assert (await home.ended(new)).status is RunStatus.COMPLETED, home.logs(new)

    lines = home.metrics(new)
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert lines[:kept] == before[:kept]
    repeated = [(line["train/loss"], line["reward/mean"]) for line in lines[kept : len(before)]]
    assert repeated == [(line["train/loss"], line["reward/mean"]) for line in before[kept:]], "the very same batches"
    trained = [line["train/loss"] is not None for line in lines]
    assert [line["policy/version"] for line in lines] == [sum(trained[:at]) for at in range(1, 15)]
    counters = json.loads((home.paths(new).checkpoints / "step_14" / "counters.json").read_text())
    assert (counters["step"], counters["optimizer_steps"]) == (14, sum(trained))
    assert home.store.get(old).status is RunStatus.INTERRUPTED, "the old run stays what it is"

    positions = home.paths(new).checkpoints / "env_checkpoints" / f"arithmetic-{new}"
    drawn = {int(path.stem[5:]): json.loads(path.read_text())["_drawn"] for path in positions.iterdir()}
    in_journal = (len(before) + 2) * GROUPS  # trained, out, and in the queue
    assert drawn[kept] >= kept * GROUPS
    assert drawn[max(drawn)] >= drawn[kept] + 14 * GROUPS - in_journal, "it did not begin anew"
    assert "no environment state" not in home.logs(new)
    with pytest.raises(ResumeError, match="Nothing is left to train"):
        await home.ops.start_training(resume_from=new)
