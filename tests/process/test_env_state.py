"""Real environment processes that cannot make a usable group: told early, with the reason, and then given up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnosis_parts import record, seen
from env_rig import TINY, Api, EnvProcess, Sampler, child_environ, run_env, serving, until, write_config, write_env

from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.contracts.runs import ChildReport, RunStatus
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.envs.groups import CONSECUTIVE_LIMIT
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.runs.watch.diagnosis import diagnose

JUDGE = """
    def score_answer(self, item, completion):
        import httpx
        request = httpx.Request("POST", "https://judge.example/v1/grade")
        httpx.Response(401, request=request, text="bad key").raise_for_status()
"""
SOMETIMES = """
    def score_answer(self, item, completion):
        if item <= 6:
            raise RuntimeError(f"not yet at {item}")
        return float(len(completion.text))
"""
WAITS = """
    async def get_next_item(self):
        import asyncio
        from pathlib import Path
        self.count += 1
        item = self.count
        while item > FROM and not Path(__file__).with_name("go").exists():
            await asyncio.sleep(0.02)
        return item
"""
"""Poses no item beyond FROM until a file ``go`` lies beside it, so that what comes before is seen."""
NO_NUMBER = """
    def score_answer(self, item, completion):
        return VALUE
"""
OWN_GROUPS = """
    async def collect_trajectories(self, item):
        group, more = await super().collect_trajectories(item)
        group["scores"] = [None] * len(group["scores"])
        return group, more
"""

Start = Callable[[str], EnvProcess]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    server = Api(tmp_path_factory.mktemp("api"), child_environ(dict(os.environ)))
    server.start()
    yield server
    server.close()


@pytest.fixture
def start(tmp_path: Path, environ: dict[str, str], api: Api) -> Iterator[Start]:
    """The counting environment with further lines of its class, serving."""
    started: list[EnvProcess] = []
    api.reset()

    def run(extra: str) -> EnvProcess:
        env: dict[str, Any] = {
            "group_size": 2,
            "batch_size": 4,
            "max_token_length": 8,
            "tokenizer_name": str(TINY),
            "rollout_server_url": api.url,
            "total_steps": 50,
            "steps_per_eval": -1,
            "ensure_scores_are_not_same": False,
            "use_wandb": False,
        }
        config = write_config(tmp_path, env, {"base_url": f"{sampler.url}/v1", "server_type": "vllm"})
        spec = f"{write_env(tmp_path, extra)}:CountingEnv"
        started.append(run_env(tmp_path, child_environ(environ), spec, "serve", "--config", str(config)))
        api.register_trainer(batch_size=4)
        return started[-1]

    with serving(Sampler()) as sampler:
        yield run
        for process in started:
            process.stop()


def waits(last: int) -> str:
    return WAITS.replace("FROM", str(last))


def state_of(folder: Path) -> EnvState:
    path = RunPaths(folder).env_state
    return EnvState.model_validate_json(path.read_bytes()) if path.exists() else EnvState(time="")


def flags_of(folder: Path, status: RunStatus = RunStatus.RUNNING) -> list[Flag]:
    return diagnose(seen(record=record(status), env_state=state_of(folder)))


def test_fi_26_a_judge_that_refuses_is_told_at_the_first_groups_and_ends_the_environment_with_its_words(
    tmp_path: Path, start: Start
) -> None:
    env = start(JUDGE + waits(CONSECUTIVE_LIMIT // 2))
    [flag] = until(lambda: flags_of(tmp_path), why=lambda: env.text)
    assert (flag.name, flag.severity) == ("groups_failing", "error")
    assert "401" in flag.evidence
    told_at = int(flag.evidence.split()[0])
    assert told_at < CONSECUTIVE_LIMIT, "told before it is given up"
    (tmp_path / "go").touch()
    assert env.process.wait(200) == 1
    report = ChildReport.model_validate_json((tmp_path / "report_env.json").read_bytes())
    assert "groups in a row could not be used" in str(report.error)
    assert "401" in str(report.error)
    assert state_of(tmp_path).unusable_in_a_row >= CONSECUTIVE_LIMIT
    assert [flag.name for flag in flags_of(tmp_path, RunStatus.FAILED)] == ["groups_failing"], "the results explain it"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (NO_NUMBER.replace("VALUE", "None"), "score_answer gave NoneType None"),
        (NO_NUMBER.replace("VALUE", "float('nan')"), "score_answer gave float nan"),
        (OWN_GROUPS, "scores.0"),
    ],
    ids=["none", "nan", "own-groups"],
)
def test_scores_that_are_no_numbers_are_named_as_missing_rewards(
    tmp_path: Path, start: Start, extra: str, words: str
) -> None:
    env = start(extra)
    [flag] = until(lambda: flags_of(tmp_path), why=lambda: env.text)
    assert flag.name == "rewards_missing"
    assert words in flag.evidence


def test_a_row_of_failures_that_ends_takes_its_error_back(tmp_path: Path, api: Api, start: Start) -> None:
    env = start(SOMETIMES + waits(6))
    until(lambda: "not yet at" in state_of(tmp_path).first_error, why=lambda: env.text)
    (tmp_path / "go").touch()
    until(lambda: state_of(tmp_path).sent > 0, why=lambda: env.text)
    now = state_of(tmp_path)
    assert (now.unusable_in_a_row, now.first_error, now.first_reason, now.failed) == (0, "", "", 6)
    assert flags_of(tmp_path) == []
