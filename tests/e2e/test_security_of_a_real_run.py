"""One real run of the demo, watched from outside: in a network of its own without a way out, with a umask of 0, and
with keys in the home that must turn up nowhere. Started once; each test looks at one thing."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_rl_mcp.paths import Home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRETS = {
    "OPENAI_API_KEY": "SENTINEL-openai-0123456789",
    "WANDB_API_KEY": "SENTINEL-wandb-0123456789",
    "HF_TOKEN": "SENTINEL-hf-0123456789abc",
    "HERMES_RL_SECRET_JUDGE": "SENTINEL-judge-0123456789",
    "TAVILY_API_KEY": "SENTINEL-tavily-0123456789",
}
TIMEOUT_S = 400
LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
START = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:  # a fresh network has its loopback switched off
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
os.umask(0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass
class Watched:
    """What was seen of the processes while they lived, and what was left."""

    home: Home
    report: dict[str, Any] = field(default_factory=dict)
    code: int = -1
    arguments: set[str] = field(default_factory=set)
    environ: dict[str, set[str]] = field(default_factory=dict)
    """Secrets' names by what the process is."""
    listeners: set[str] = field(default_factory=set)
    """Local addresses of the whole network, in the kernel's hex."""
    unroutable: int = 0
    """Packets for which there was no way, as the kernel counts them."""
    output: str = ""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make a network namespace")
    folder = tmp_path_factory.mktemp("real")
    names = ("HOME", "LOGNAME", "PATH", "USER", "HERMES_RL_TEST_MARK")
    keep = {name: os.environ[name] for name in names if name in os.environ}
    environ = {**keep, "HERMES_HOME": str(folder / "hermes"), "HERMES_RL_CLAIMS_DIR": str(folder / "claims")}
    home = Home.from_environ(environ)
    home.root.mkdir(mode=0o700)
    home.env_file.write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    home.env_file.chmod(0o600)
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "demo", "--json", "--steps", "3"]
    watched = Watched(home)
    with (folder / "stderr").open("wb") as errors, (folder / "stdout").open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "-n", sys.executable, "-c", START, *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            look(watched, str(home.root))
            time.sleep(0.1)
    if process.poll() is None:
        process.terminate()
        process.wait(60)
        pytest.fail("the demo did not end: " + (folder / "stderr").read_text()[-3000:])
    watched.code = process.returncode
    watched.output = (folder / "stderr").read_text() + (folder / "stdout").read_text()
    assert watched.code == 0, watched.output[-3000:]
    watched.report = json.loads((folder / "stdout").read_text())
    yield watched


def look(watched: Watched, home: str) -> None:
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if environ.get("HERMES_HOME") != home:
                continue
            words = process.cmdline()
            watched.arguments.add(" ".join(words))
            part = next((word for word in words if word.startswith(("hermes_rl_mcp.", "trainer"))), "other")
            watched.environ.setdefault(part, set()).update(set(SECRETS) & set(environ))
            folder = Path(f"/proc/{process.pid}/net")
            for table in ("tcp", "tcp6"):
                rows = [line.split() for line in (folder / table).read_text().splitlines()[1:]]
                watched.listeners |= {row[1].partition(":")[0] for row in rows if row[3] == LISTENING}
            watched.unroutable = max(watched.unroutable, no_routes(folder))
        except (psutil.Error, OSError):
            continue


def no_routes(folder: Path) -> int:
    names, values = (line.split() for line in (folder / "snmp").read_text().splitlines()[:2])
    six = dict(line.split() for line in (folder / "snmp6").read_text().splitlines())
    return int(dict(zip(names, values, strict=True))["OutNoRoutes"]) + int(six["Ip6OutNoRoutes"])


def test_sec_28_everything_works_without_a_network_and_nothing_tries_to_leave(run: Watched) -> None:
    assert run.report["status"] == "completed", run.report
    assert run.unroutable == 0, "something looked for a name or a host outside"


def test_sec_05_every_listener_of_the_whole_network_is_on_loopback(run: Watched) -> None:
    assert run.listeners and run.listeners <= LOOPBACK


def test_sec_01_no_key_stands_on_a_command_line(run: Watched) -> None:
    assert any("trainer" in line for line in run.arguments)
    assert not [line for line in run.arguments if "SENTINEL" in line]


def test_sec_03_each_process_has_only_its_own_keys(run: Watched) -> None:
    assert run.environ["hermes_rl_mcp.rollout_api"] == set()
    assert run.environ["trainer"] == {"WANDB_API_KEY", "HF_TOKEN"}
    assert run.environ["hermes_rl_mcp.envs"] == {"HF_TOKEN", "HERMES_RL_SECRET_JUDGE", "TAVILY_API_KEY"}


def test_sec_02_no_file_and_no_line_of_output_has_a_key(run: Watched) -> None:
    files = [path for path in run.home.root.rglob("*") if path.is_file() and path != run.home.env_file]
    assert {"run.json", "config.yaml", "metrics.jsonl", "adapter_model.safetensors"} <= {path.name for path in files}
    assert not [path for path in files if b"SENTINEL" in path.read_bytes()]
    assert "SENTINEL" not in run.output


def test_sec_25_with_a_umask_of_0_every_file_is_its_owners_alone(run: Watched) -> None:
    found = [run.home.root, *run.home.root.rglob("*")]
    others = {str(path): oct(path.stat().st_mode) for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077}
    assert others == {}
