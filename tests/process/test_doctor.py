"""``hermes-rl doctor`` as a user types it: what it finds, what it advises, and that it leaves everything as it was.

All but one test give the child a stand-in for torch that imports at once; the doctor asks it as it asks the real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_rig import HOLD, Rig

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.paths import install_root
from hermes_rl_mcp.runs import launch

TIMEOUT_S = 180
TORCH = """
class version: cuda = None
class cuda:
    is_available = staticmethod(lambda: False)
class _Tensor:
    __matmul__ = sum = item = lambda self, *rest: self
ones = lambda *size: _Tensor()
__version__ = "2.99"
"""


@pytest.fixture
def light(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The usual environment, with a torch that is quick to ask."""
    folder = tmp_path / "stand-in" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(TORCH)
    return {**environ, "PYTHONPATH": os.pathsep.join([str(folder.parent), str(install_root())])}


def doctor(environ: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "doctor", *flags]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def found(environ: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Findings by name."""
    report = json.loads(doctor(environ, "--json").stdout)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        by_name.setdefault(finding["name"], []).append(finding)
        assert finding["verdict"] in ("ok", "warning", "problem")
        assert finding["fix"] or finding["verdict"] == "ok", finding
    assert report["ok"] == all(f["verdict"] != "problem" for f in report["findings"])
    return by_name


def one(findings: dict[str, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    [finding] = findings[name]
    return finding


def test_sec_30_a_sound_machine_has_no_problem_and_the_real_torch_is_asked(environ: dict[str, str]) -> None:
    done = doctor(environ, "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    problems = [finding for finding in findings.values() if finding["verdict"] == "problem"]
    assert (problems, done.returncode) == ([], 0)
    assert findings["torch"]["found"].startswith("2.") and "device" in findings
    assert "mcp 2." in findings["versions"]["found"] and "torch 2." in findings["versions"]["found"]
    assert {"memory", "disk", "home folder", "privacy", "claims folder", "leftover processes", "client"} <= set(
        findings
    )
    assert "... asking torch" in done.stderr


def test_every_line_has_its_verdict_and_every_fault_its_remedy(light: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = doctor({**light, "HERMES_HOME": str(tmp_path / "file")})
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert all(line.startswith(("ok ", "warning ", "problem ", " ")) for line in lines[:-1])
    assert lines[-1].endswith("problems: see above.")
    at = next(i for i, line in enumerate(lines) if line.startswith("problem  home folder"))
    assert lines[at + 1].strip() == "Set HERMES_HOME to a folder that you may write to."


def test_what_other_users_can_read_is_a_problem(light: dict[str, str]) -> None:
    home = Path(light["HERMES_HOME"])
    for folder in (home / "rl", home / "logs" / "rl_training"):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    (home / ".env").write_text("WANDB_API_KEY=abcdefgh\n")
    (home / ".env").chmod(0o644)
    claims = Path(light["HERMES_RL_CLAIMS_DIR"])
    claims.mkdir()
    claims.chmod(0o777)
    findings = found(light)
    assert {finding["fix"] for finding in findings["privacy"]} == {
        f"Run: chmod 700 {home / 'rl'}",
        f"Run: chmod 700 {home / 'logs' / 'rl_training'}",
        f"Run: chmod 600 {home / '.env'}",
    }
    assert one(findings, "claims folder")["verdict"] == "problem"
    assert stat.S_IMODE(claims.stat().st_mode) == 0o777, "it only says so"


def test_fi_40_the_values_that_a_server_would_work_with_are_shown_with_their_source(
    light: dict[str, str], tmp_path: Path
) -> None:
    home = Path(light["HERMES_HOME"])
    home.mkdir(mode=0o700)
    (home / ".env").write_text(
        "HF_HOME=/data/hf\nCUDA_VISIBLE_DEVICES=1\nHERMES_RL_PATH=/opt/cuda/bin\nHF_TOKEN=s3ntinel-token\n"
        "HTTPS_PROXY=http://user:s3ntinel-pass@proxy:1\nHERMES_RL_SECRET_JUDGE=s3ntinel-judge\n"
        "SEARXNG_URL=http://127.0.0.1:1\n"
    )
    (home / ".env").chmod(0o600)
    shell = {**light, "CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/opt/lib", "WANDB_API_KEY": "s3ntinel-wandb"}
    findings = found(shell)
    assert one(findings, "HF_HOME")["found"] == f"/data/hf ({home / '.env'})"
    assert one(findings, "CUDA_VISIBLE_DEVICES")["verdict"] == "warning", "the shell's value hides the file's"
    assert "hermes-rl config set LD_LIBRARY_PATH" in one(findings, "LD_LIBRARY_PATH")["fix"]
    assert one(findings, "PATH of a run")["found"].startswith("/opt/cuda/bin:")
    assert "search" in one(findings, "toolsets")["found"], "a server that searches is named in the file"
    assert "HERMES_RL_VISION_URL" in one(findings, "toolset vision")["found"]
    assert one(findings, "containers")["verdict"] == "ok"
    assert one(findings, "WANDB_API_KEY")["verdict"] == "warning"
    assert one(findings, "HERMES_RL_SECRET_JUDGE")["found"] == f"set in {home / '.env'} (***)"
    assert "s3ntinel" not in json.dumps(findings)


def test_an_unknown_profile_and_a_broken_environment_are_said_with_the_way_out(
    light: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "envs"
    folder.mkdir()
    (folder / "bad.py").write_text("def (:\n")
    findings = found({**light, "HERMES_RL_ENV_DIRS": str(folder)})
    assert "bad.py" in one(findings, "environment file")["found"]
    findings = found({**light, "HERMES_RL_PROFILE": "nope"})
    assert one(findings, "settings")["verdict"] == "problem" and "nope" in one(findings, "settings")["found"]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Somebody takes connections there and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        yield listening.getsockname()[1]


def test_a_hub_that_does_not_answer_is_a_warning_within_a_bound(light: dict[str, str], silent_port: int) -> None:
    online = {name: value for name, value in light.items() if name != "HF_HUB_OFFLINE"}
    began = time.monotonic()
    findings = found({**online, "HF_ENDPOINT": f"http://127.0.0.1:{silent_port}"})
    assert one(findings, "hub")["verdict"] == "warning"
    assert time.monotonic() - began < 170
    findings = found({**online, "HTTPS_PROXY": f"http://127.0.0.1:{silent_port}"})
    assert one(findings, "hub")["verdict"] == "warning", "the proxy is what is asked"


def test_fi_46_a_gpu_tool_that_hangs_is_reported_and_not_waited_for(light: dict[str, str], tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 300\n")
    tool.chmod(0o755)
    began = time.monotonic()
    findings = found({**light, "PATH": f"{tool.parent}:{light['PATH']}"})
    assert one(findings, "nvidia-smi")["verdict"] == "problem" and "no answer" in one(findings, "nvidia-smi")["found"]
    assert time.monotonic() - began < 170


@pytest.mark.anyio
async def test_runs_ports_and_leftovers_are_named_and_left_as_they_are(rig: Rig, light: dict[str, str]) -> None:
    rig.environ |= {"PYTHONPATH": light["PYTHONPATH"]}
    going = await rig.start(HOLD)
    record = await rig.running(going)
    ended = await rig.start({"trainer": {"die_at_start": 1}, "env": {}}, request=rig.request(device="cpu"))
    await launch.stop(rig.home, ended, "test")
    assert (await rig.end(ended)).status in (RunStatus.STOPPED, RunStatus.FAILED)
    (rig.home.runs / "deadbeef").mkdir()
    (rig.home.runs / "deadbeef" / "run.json").write_text("{garbage")
    marked = {**rig.environ, "HERMES_RL_RUN_ID": f"{ended}.x", "HERMES_HOME": str(rig.home.root)}
    sleeper = subprocess.Popen(  # noqa: ASYNC220 - a process that a run left behind
        [sys.executable, "-c", "import time; time.sleep(300)"], env=marked, stdin=subprocess.DEVNULL
    )
    try:
        findings = found(light)
        assert going in one(findings, "runs")["found"] and ended not in one(findings, "runs")["found"]
        assert "deadbeef" in one(findings, "unreadable run")["found"]
        left = one(findings, "leftover process")
        assert left["verdict"] == "problem" and f"pid {sleeper.pid} of run {ended}" in left["found"]
        assert f"kill {sleeper.pid}" in left["fix"]
        assert record.ports is not None
        for port in {8000, 8001} & {record.ports.rollout_api, record.ports.trainer}:
            assert f"run {going}" in one(findings, f"port {port}")["found"]
        assert sleeper.poll() is None
        assert rig.store.get(going).status is RunStatus.RUNNING
        assert record.supervisor is not None
        os.kill(record.supervisor.pid, signal.SIGKILL)
        sleeper.kill()
        sleeper.wait(60)
        before = rig.paths(going).record.read_bytes()
        findings = found(light)
        assert going in one(findings, "stale runs")["found"]
        assert rig.paths(going).record.read_bytes() == before, "a look of the doctor closes no run"
    finally:
        sleeper.kill()
        sleeper.wait(60)
    assert rig.store.get(going).status is RunStatus.INTERRUPTED
