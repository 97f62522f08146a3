"""Who reaches the rollout API: no web page, no rebound host name, nobody outside the secret prefix."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from rollout_rig import RolloutServer, group, running

from hermes_rl_mcp.contracts.config import Ports, RunConfig, RunSection, ServerEntry, TrainerConfig
from hermes_rl_mcp.contracts.runs import ChildReport

PREFIX = "s3cr3t-part"


def write_config(folder: Path) -> Path:
    run = RunSection(
        run_id="0123abcd",
        environment="arithmetic",
        env_file="arithmetic.py",
        env_class="Arithmetic",
        env_sha256="0",
        profile="local",
        base_model="builtin:tiny",
        model_path="tiny",
        nonce="n0nce",
        path_prefix=PREFIX,
    )
    config = RunConfig(
        run=run,
        ports=Ports(rollout_api=1, trainer=2),
        env={},
        openai=[ServerEntry(model_name="m", base_url="http://127.0.0.1:2/v1")],
        trainer=TrainerConfig(),
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutServer]:
    folder = tmp_path_factory.mktemp("run")
    with running(folder, "--config", str(write_config(folder)), prefix=f"/{PREFIX}") as server:
        yield server


def test_health_proves_whose_server_this_is(server: RolloutServer) -> None:
    assert server.client.get("/health").json()["nonce"] == "n0nce"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/batch", "/s3cr3t-par/health", "/s3cr3t-partx/health", "/x/../health"]
)
def test_sec_07_nothing_is_found_outside_the_prefix(server: RolloutServer, path: str) -> None:
    assert server.client.get(f"http://127.0.0.1:{server.port}{path}").status_code == 404


def test_every_path_works_below_the_prefix(server: RolloutServer) -> None:
    base = f"http://127.0.0.1:{server.port}/{PREFIX}"
    assert server.client.get(base).json() == {"message": "AtroposLib API"}
    server.register(batch_size=4)
    server.post(group(1))
    assert server.tags() == [1]
    assert server.client.get("/register-env/").status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "null"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "0.0.0.0"},
        {"host": ""},
        {"host": "[::2]:80"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_sec_06_web_pages_and_foreign_host_names_are_refused(
    server: RolloutServer, headers: dict[str, str], method: str
) -> None:
    reply = server.client.request(method, "/reset_data", headers=headers)
    assert reply.status_code == 403
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.9:1", "[::1]", "[::1]:8000"])
def test_every_name_of_this_machine_is_accepted(server: RolloutServer, host: str) -> None:
    assert server.client.get("/health", headers={"host": host}).status_code == 200


def test_sec_06_a_preflight_request_gets_no_permission(server: RolloutServer) -> None:
    reply = server.client.options("/reset_data", headers={"access-control-request-method": "POST"})
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_the_log_does_not_tell_the_prefix_or_the_nonce(server: RolloutServer) -> None:
    server.client.get("/nothing-here")
    text = server.log.read_text()
    assert "Rollout API listens" in text
    assert PREFIX not in text and "n0nce" not in text


def test_sec_05_it_listens_on_loopback_only_and_takes_no_descriptor_along(server: RolloutServer) -> None:
    assert server.process
    listening = [c for c in psutil.Process(server.process.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"]


def run_api(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.rollout_api", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)


def test_another_host_needs_an_explicit_word(server: RolloutServer) -> None:
    result = run_api("--host", "0.0.0.0", "--port", "0")
    assert result.returncode == 1 and "--allow-remote" in result.stderr and "Traceback" not in result.stderr


def test_a_port_in_use_is_said_in_one_sentence(server: RolloutServer) -> None:
    result = run_api("--port", str(server.port))
    assert result.returncode == 1 and f"port {server.port}" in result.stderr and "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unreadable_config_is_reported_and_left_in_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}")
    result = run_api("--config", str(tmp_path / "config.yaml"), "--port", "0")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    report = ChildReport.model_validate_json((tmp_path / "report_api.json").read_text())
    assert (report.process, report.status) == ("api", "failed") and "config.yaml" in (report.error or "")


def test_an_interrupt_ends_it_with_status_0(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        assert server.end(signal.SIGINT) == 0


def test_it_ends_when_its_parent_does(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    server = RolloutServer(tmp_path / "api.log", environ={"HERMES_RL_LIFELINE_FD": str(read_end)})
    try:
        server.start(pass_fds=(read_end,))
        os.close(read_end)
        os.close(write_end)
        assert server.process and server.process.wait(60) == 0
    finally:
        server.close()


def test_the_process_loads_nothing_heavy() -> None:
    code = (
        "import sys, hermes_rl_mcp.rollout_api.__main__;"
        "heavy = {'numpy', 'torch', 'transformers', 'peft', 'wandb', 'datasets', 'mcp'} & set(sys.modules);"
        "sys.exit(1 if print(heavy) or heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
