"""Environments written for Atropos, through the ten tools. With atroposlib itself: slow, and in a Python of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from taught_model import teach

from hermes_rl_mcp.cli.install_atropos import REQUIREMENTS
from hermes_rl_mcp.interpreters import environment_program
from hermes_rl_mcp.paths import install_root

LIBRARY = REQUIREMENTS[0]
BUILD = Path(__file__).parents[2] / "build" / "atropos-venv"
ENVIRONMENT = '''
"""Answers that are long are good."""

from typing import Optional

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from .sums import sums


class LongConfig(BaseEnvConfig):
    highest: int = Field(9, ge=1, description="Largest summand.")


class LongEnv(BaseEnv):
    name = "long"
    env_config_cls = LongConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(model_name="none", base_url="http://localhost:9/v1", server_type="vllm")
        return LongConfig(tokenizer_name="none", group_size=4), server

    async def setup(self):
        self.items = sums(self.config.highest)
        self.asked = 0
        self.eval_metrics = []

    async def get_next_item(self):
        self.asked += 1
        return self.items[self.asked % len(self.items)]

    async def collect_trajectories(self, item):
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": item}], tokenize=True, add_generation_prompt=True
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
            )
            for node in managed.get_state()["nodes"]:
                assert node.tokens[: len(prompt)] == prompt
                group["tokens"].append(node.tokens)
                group["masks"].append(node.masked_tokens)
                group["inference_logprobs"].append(node.logprobs)
                group["scores"].append(float(sum(mask != -100 for mask in node.masked_tokens)))
        return group, []

    async def evaluate(self, *args, **kwargs):
        self.eval_metrics.append(("eval/asked", self.asked))

    async def wandb_log(self, wandb_metrics: Optional[dict] = None):
        metrics = dict(wandb_metrics or {})
        metrics["train/asked"] = self.asked
        await super().wandb_log(metrics)

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {"asked": self.asked})


if __name__ == "__main__":
    LongEnv.cli()
'''
SUMS = 'def sums(highest):\n    return [f"{left}+1=" for left in range(1, highest + 1)]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Environments as somebody else wrote them: two files, one of which imports the other."""
    made = tmp_path / "envs"
    made.mkdir()
    (made / "long.py").write_text(ENVIRONMENT)
    (made / "sums.py").write_text(SUMS)
    return made


def test_without_atroposlib_the_environment_is_listed_and_the_answer_says_how_to_get_it(
    environ: dict[str, str], folder: Path
) -> None:
    script = "import atroposlib"
    if subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0:
        pytest.skip("atroposlib is installed in this Python")
    answers = ask(environ, folder, "rl_list_environments()", "rl_select_environment('long')")
    assert {one["name"]: one["base"] for one in answers[0]["environments"]}["long"] == "atroposlib"
    assert "hermes-rl install-atropos" in answers[1]["hint"]


def test_under_another_python_only_our_package_can_be_imported_from_our_installation(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    [_, flag, bootstrap] = environment_program("atroposlib", {"HERMES_RL_ATROPOS_PYTHON": str(python)})
    environment = tmp_path / "look.py"
    environment.write_text(
        textwrap.dedent("""
        import importlib.util, os, sys
        from hermes_rl_mcp.envs import BaseEnv
        assert importlib.util.find_spec("trainer") is None, sys.path
        assert importlib.util.find_spec("environments") is None, sys.path
        assert "PYTHONPATH" not in os.environ
        class Look(BaseEnv):
            async def get_next_item(self): return 1
            async def collect_trajectories(self, item): return None, []
        """)
    )
    root = str(Path(bootstrap).parents[3])
    libraries = sysconfig.get_paths()["purelib"]
    done = subprocess.run(
        # -S: an editable installation puts its folder on the path of this very Python by a file of its own
        [sys.executable, flag, "-S", "-c", RUN_WITHOUT_SITE, libraries, bootstrap, f"{environment}:Look", "describe"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "look"


RUN_WITHOUT_SITE = """
import runpy, sys
sys.path.append(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ask(environ: dict[str, str], folder: Path, *calls: str, timeout_s: float = 900) -> list[dict[str, Any]]:
    """Answers of the ten tools, asked one after the other in a process of their own."""
    script = "import asyncio, json\nfrom hermes_rl_mcp.tools import *\nasync def main():\n"
    script += "".join(f"    print(await {call}, end=chr(0))\n" for call in calls) + "asyncio.run(main())\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**environ, "HERMES_RL_ENV_DIRS": str(folder)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.split("\0")[:-1]]


@pytest.fixture(scope="session")
def atropos_python() -> str:
    """A Python with atroposlib: the one that is named, else one made once per checkout."""
    if named := os.environ.get("HERMES_RL_ATROPOS_PYTHON"):
        return named
    python = BUILD / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(BUILD)], check=True)
    command = [str(python), "-m", "pip", "install", "-q", *REQUIREMENTS]
    try:
        installed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("atroposlib could not be installed within 600 s")
    if installed.returncode:
        pytest.skip(f"atroposlib cannot be installed here: {installed.stderr[-300:]}")
    return str(python)


@pytest.fixture(scope="session")
def upstream() -> Path:
    """Atropos' own folder ``environments``: where ``HERMES_RL_ATROPOS_ENVIRONMENTS`` says, else out of the library's
    source package, as the installed one has none."""
    if named := os.environ.get("HERMES_RL_ATROPOS_ENVIRONMENTS"):
        return Path(named)
    folder = BUILD.with_name("atropos-source")
    if not (folder / "environments").is_dir():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        with tempfile.TemporaryDirectory() as text:
            try:
                got = subprocess.run([*command, "-d", text, LIBRARY], capture_output=True, timeout=300, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip("the source of atroposlib could not be fetched within 300 s")
            packed = list(Path(text).glob("*.tar.gz"))
            if got.returncode or not packed:
                pytest.skip(f"the source of atroposlib cannot be had here: {got.stderr[-300:]!r}")
            with tarfile.open(packed[0]) as archive:
                archive.extractall(text, filter="data")
            found = next(Path(text).glob("*/environments"), None)
            if found is None:
                pytest.skip("the source package has no environments")
            shutil.copytree(found, folder / "environments")
    return folder / "environments"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_file_of_atropos_itself_is_tested_and_trained_as_it_is(
    environ: dict[str, str], tmp_path: Path, atropos_python: str, upstream: Path
) -> None:
    file = tmp_path / "environments" / "gsm8k_server.py"
    file.parent.mkdir()
    shutil.copy(upstream / file.name, file)
    data = tmp_path / "gsm8k"  # what it loads from the Hub is looked for first beside the folder of environments
    data.mkdir()
    parts = [{"split": name, "path": f"{name}.jsonl"} for name in ("train", "test")]
    (data / "README.md").write_text(
        f"---\n{json.dumps({'configs': [{'config_name': 'main', 'data_files': parts}]})}\n---\n"
    )
    for part in parts:
        rows = [{"question": f"What is 1 + {one}?", "answer": f"#### {one + 1}"} for one in (1, 2, 3)]
        (data / part["path"]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = tmp_path / "model"
    answers = [rf"So it is \boxed{{{number}}}" for number in (2, 3, 4)]
    teach(model, install_root() / "trainer" / "models" / "tiny", answers, prompt_bytes=900, steps=200)

    environ |= {"HERMES_RL_ATROPOS_PYTHON": atropos_python, "HERMES_RL_ALLOW_MODELS": str(model)}
    environ["HF_HOME"] = str(tmp_path / "hub")  # data of the same name may be kept from elsewhere
    edits = {
        **{"model_name": str(model), "total_steps": 3, "group_size": 8, "batch_size": 16, "max_token_length": 48},
        **{"max_token_trainer_length": 2048, "steps_per_eval": -1},
    }
    [selected, *edited, begun] = ask(
        environ,
        file.parent,
        "rl_select_environment('gsm8k_server')",
        *(f"rl_edit_config({name!r}, {value!r})" for name, value in edits.items()),
        "rl_test_inference(num_steps=1, group_size=8)",
    )
    assert not [answer for answer in (selected, *edited) if answer.get("error")]
    tested = begun
    while tested["status"] == "running":
        [tested] = ask(environ, file.parent, f"rl_test_inference(test_id={begun['test_id']!r})")
    assert tested["models_tested"][0]["steps_tested"] == 1, tested

    run_id, status = train(environ, file.parent)
    assert status["status"] == "completed", status
    lines = [json.loads(line) for line in (run_of(environ, run_id) / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    trained = [line for line in lines if line["train/loss"] is not None]
    assert trained and all(line["train/grad_norm"] > 0 for line in trained), lines
    assert lines[-1]["policy/version"] == len(trained)
    assert all(line["tokens/missing_logprobs"] == 0 and line["policy/lag"] is not None for line in lines)


def train(environ: dict[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
    """A run from its start to its end, and what it then says."""
    [started] = ask(environ, folder, "rl_start_training()")
    run_id = started["run_id"]
    status: dict[str, Any] = {"status": "queued"}
    while status["status"] in ("queued", "starting", "running", "stopping"):
        [status] = ask(environ, folder, f"rl_check_status({run_id!r}, wait_seconds=20)")
    return run_id, status


def run_of(environ: dict[str, str], run_id: str) -> Path:
    return Path(environ["HERMES_HOME"]) / "rl" / "runs" / run_id


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_unmodified_environment_is_described_tested_and_trained_through_the_ten_tools(
    environ: dict[str, str], folder: Path, atropos_python: str
) -> None:
    environ["HERMES_RL_ATROPOS_PYTHON"] = atropos_python
    edits = {
        "model_name": "builtin:tiny",
        "total_steps": 3,
        "group_size": 4,
        "batch_size": 8,
        "max_token_length": 6,
        "steps_per_eval": 2,
        "save_checkpoint_interval": 1,
        "max_batches_offpolicy": 0,
        "highest": 5,
    }
    [selected, *edited, begun] = ask(
        environ,
        folder,
        "rl_select_environment('long')",
        *(f"rl_edit_config({name!r}, {value!r})" for name, value in edits.items()),
        "rl_test_inference(num_steps=2, group_size=4)",
    )
    assert "error" not in selected or not selected["error"]
    assert not [answer for answer in edited if answer.get("error")]
    tested = begun
    while tested["status"] == "running":
        [tested] = ask(environ, folder, f"rl_test_inference(test_id={begun['test_id']!r})")
    assert tested["status"] == "completed", tested
    assert tested["models_tested"][0]["steps_tested"] == 2

    run_id, status = train(environ, folder)
    assert status["status"] == "completed", status
    [results] = ask(environ, folder, f"rl_get_results({run_id!r})")
    assert results["final_metrics"]["policy/version"] >= 1, results
    assert results["final_metrics"]["tokens/missing_logprobs"] == 0

    run = run_of(environ, run_id)
    lines = [json.loads(line) for line in (run / "env_metrics.jsonl").read_text().splitlines()]
    assert any("train/asked" in line for line in lines), lines
    assert any("eval/asked" in line for line in lines), lines
    positions = sorted((run / "checkpoints" / "env_checkpoints").rglob("step-*.json"))
    assert positions and json.loads(positions[-1].read_text())["asked"] > 0
