"""An environment of Atropos' kind under a Python of its own, in which a stand-in takes the place of its library: found,
described, tested against text and served to the trainer, with what the library gets wrong set right around it."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from env_rig import END_ID, TINY, Api, EnvProcess, Sampler, child_environ, json_lines, run_env, serving, until
from env_rig import write_config as write_run_config

from hermes_rl_mcp.catalog.describe import Describer
from hermes_rl_mcp.catalog.scan import find, scan
from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_LOGPROB
from hermes_rl_mcp.interpreters import ATROPOS_PYTHON, environment_program

SLOW_S = 120.0
"""Starting such a process takes three seconds; on a machine that does much else, many times that."""
STAND_IN = Path(__file__).parents[1] / "stand_in"
ENVIRONMENT = '''
"""Answers that are not empty, the longer the better."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from .words import QUESTION


class TalkConfig(BaseEnvConfig):
    turns: int = 1


class TalkEnv(BaseEnv):
    name = "talk"
    env_config_cls = TalkConfig

    @classmethod
    def config_init(cls):
        return TalkConfig(group_size=3, worker_timeout=-1), APIServerConfig(base_url="http://127.0.0.1:9/v1")

    async def setup(self):
        self.results = []

    async def get_next_item(self):
        return QUESTION

    async def collect_trajectories(self, item):
        messages = [{"role": "user", "content": item}]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(self.config.turns):
                n = self.config.group_size if self.config.turns == 1 else 1
                reply = await managed.chat_completion(messages=messages, n=n, max_tokens=8, temperature=0.7)
                answer = {"role": "assistant", "content": reply.choices[0].message.content}
                messages = [*messages, answer, {"role": "user", "content": "and?"}]
            for node in managed.get_state()["nodes"]:
                if sum(mask != -100 for mask in node.masked_tokens) < 2:
                    continue
                group["tokens"].append(node.tokens)
                group["masks"].append(node.masked_tokens)
                group["inference_logprobs"].append(node.logprobs)
                group["scores"].append(float(len(node.tokens)))
        return group, []

    async def evaluate(self, *args, **kwargs):
        reply = await self.server.chat_completion(
            messages=[{"role": "user", "content": "eval"}], n=1, max_tokens=8, temperature=0.0, split="eval"
        )
        self.results.append(len(reply.choices[0].message.content))

    async def wandb_log(self, wandb_metrics=None):
        metrics = dict(wandb_metrics or {})
        if self.results:
            metrics["eval/length"] = self.results.pop()
        await super().wandb_log(metrics)
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment with our libraries and the stand-in, and without our package."""
    folder = tmp_path_factory.mktemp("atropos")
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "offered.pth").write_text(f"{STAND_IN}\n{sysconfig.get_paths()['purelib']}\n")
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    made = folder / "bin" / "python"
    made.parent.mkdir()
    made.symlink_to(Path(sys.base_prefix) / "bin" / Path(sys.executable).resolve().name)
    return str(made)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "envs"
    folder.mkdir()
    (folder / "words.py").write_text("QUESTION = '3+5='\n")
    made = folder / "talk.py"
    made.write_text(ENVIRONMENT)
    return made


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    """Of three answers to one question the last is empty."""
    texts = ("8", "It is 8", "")
    with serving(Sampler(answer=lambda prompt, index: [*texts[index].encode(), END_ID])) as running:
        yield running


@pytest.fixture
def api(tmp_path: Path, environ: dict[str, str]) -> Iterator[Api]:
    server = Api(tmp_path, child_environ(environ))
    server.start()
    yield server
    server.close()


def start(tmp_path: Path, environ: dict[str, str], python: str, file: Path, *arguments: str) -> EnvProcess:
    program = environment_program("atroposlib", {ATROPOS_PYTHON: python})
    return run_env(tmp_path, child_environ(environ), f"{file}:TalkEnv", *arguments, program=tuple(program))


@pytest.mark.slow
def test_an_atropos_environment_is_found_described_and_serves_the_trainer_full_groups_and_evaluations_included(
    tmp_path: Path, environ: dict[str, str], python: str, file: Path, sampler: Sampler, api: Api
) -> None:
    info = find(scan(None, [file.parent]).environments, "talk")
    assert (info.base, info.class_name) == ("atroposlib", "TalkEnv")
    describer = Describer(tmp_path / "cache", {**child_environ(environ), ATROPOS_PYTHON: python})
    schema = anyio.run(describer.describe, info)
    assert {"turns": 1, "group_size": 3}.items() <= {field.name: field.default for field in schema.fields}.items()

    fields = {"tokenizer_name": str(TINY), "rollout_server_url": api.url, "total_steps": 2, "steps_per_eval": 1}
    server = {"base_url": f"{sampler.url}/v1", "server_type": "vllm"}
    config = write_run_config(tmp_path, {**fields, "max_batches_offpolicy": 1, "batch_size": 6}, server)
    env = start(tmp_path, environ, python, file, "serve", "--config", str(config))
    try:
        api.register_trainer(batch_size=6)
        groups = until(api.take, SLOW_S, why=lambda: env.text)
        metrics = tmp_path / "env_metrics.jsonl"
        until(lambda: any("eval/length" in line for line in json_lines(metrics)), SLOW_S, why=lambda: env.text)
        assert env.stop() == 0, env.text
    finally:
        env.stop()
    assert len(groups) == 2
    for group in groups:
        said = {"policy_version": 3, "finish_reason": "stop", "temperature": 0.7}
        assert group["overrides"] == [said] * 3
        assert group["generation_params"] == {"policy_version": 3, "temperature": 0.7}
        # Of three answers the environment leaves one out; the place is filled from a second question.
        assert [sum(mask != MASKED for mask in masks) for masks in group["masks"]] == [2, 8, 2]


@pytest.mark.slow
def test_conversations_go_on_token_by_token_and_a_refusal_is_not_asked_again(
    tmp_path: Path, environ: dict[str, str], python: str, file: Path, sampler: Sampler
) -> None:
    words = ["--env.tokenizer_name", str(TINY), "--env.group_size", "1", "--env.turns", "2", "--env.total_steps", "1"]
    words += ["--openai.base_url", f"{sampler.url}/v1", "--openai.api_key", "x", "--env.data_path_to_save_groups"]
    sampler.statuses = [400, 503]
    exact = tmp_path / "exact.jsonl"
    env = start(tmp_path, environ, python, file, "process", *words, str(exact), "--openai.server_type", "vllm")
    assert env.process.wait(SLOW_S) == 0, env.text
    assert len(sampler.requests) == 4  # refused, not now, and the two turns
    first, second = (one["prompt"]["prompt_token_ids"] for one in sampler.requests[2:])
    assert second[: len(first) + 2] == [*first, ord("8"), END_ID]
    assert second[len(first) + 2] != END_ID
    [line] = json_lines(exact)
    assert [mask for mask in line["masks"][0] if mask != MASKED] == [ord("8"), END_ID] * 2
    assert "400: scripted" in env.text

    text = tmp_path / "text.jsonl"
    env = start(tmp_path, environ, python, file, "process", *words, str(text), "--openai.server_type", "openai")
    assert env.process.wait(SLOW_S) == 0, env.text
    [line] = json_lines(text)
    assert [mask for mask in line["masks"][0] if mask != MASKED] == [ord("8"), END_ID] * 2
    assert set(line["inference_logprobs"][0]) == {NO_LOGPROB}
    assert json.dumps(sampler.requests[-1]["messages"]).count("assistant") == 1
