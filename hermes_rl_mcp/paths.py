"""Where things are on disk: the only module that spells file names.

Pure functions of a home directory and an environment mapping; nothing is created here.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROCESS_LOGS = ("api", "trainer", "env", "supervisor")
RUN_ID = re.compile(r"[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class Home:
    """Everything under ``$HERMES_HOME`` (default ``~/.hermes``). ``session`` names the selection file."""

    root: Path
    session: str = "session"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Home:
        """Reads ``HERMES_HOME`` and ``HERMES_RL_SESSION``."""
        root = environ.get("HERMES_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".hermes")
        return cls(Path(root).expanduser().absolute(), environ.get("HERMES_RL_SESSION") or "session")

    @property
    def env_file(self) -> Path:
        return self.root / ".env"

    @property
    def rl(self) -> Path:
        return self.root / "rl"

    @property
    def session_file(self) -> Path:
        return self.rl / f"{self.session}.json"

    @property
    def settings_file(self) -> Path:
        """What the person who starts servers has set for all of them."""
        return self.rl / "server.yaml"

    @property
    def runs(self) -> Path:
        return self.rl / "runs"

    @property
    def checks(self) -> Path:
        """Last status check per run, for the rate limit."""
        return self.rl / "checks"

    @property
    def schema_cache(self) -> Path:
        return self.rl / "cache" / "schemas"

    @property
    def speed_cache(self) -> Path:
        """What this machine was measured to do, per shape of the work."""
        return self.rl / "cache" / "speed"

    @property
    def plot_cache(self) -> Path:
        """Drawn pictures of runs."""
        return self.rl / "cache" / "plots"

    @property
    def turns(self) -> Path:
        """Locks that bound how many helper processes of a kind work at once, over all servers."""
        return self.rl / "cache" / "turns"

    @property
    def atropos_venv(self) -> Path:
        """Virtual environment for environments that are written for Atropos."""
        return self.rl / "atropos-venv"

    @property
    def atropos_python(self) -> Path:
        return self.atropos_venv / "bin" / "python"

    @property
    def atropos_installed(self) -> Path:
        """There once everything is in the virtual environment; holds what was asked for."""
        return self.atropos_venv / "installed.txt"

    @property
    def exports(self) -> Path:
        """Where exports by tool lie."""
        return self.rl / "exports"

    @property
    def models(self) -> Path:
        return self.rl / "models"

    @property
    def logs(self) -> Path:
        return self.root / "logs" / "rl_training"

    @property
    def inference_tests(self) -> Path:
        return self.logs / "inference_tests"

    def run(self, run_id: str) -> RunPaths:
        """Paths of one run. Raises ValueError for an id that is not 8 hex characters."""
        if not RUN_ID.match(run_id):
            raise ValueError(f"not a run id: {run_id!r}")
        return RunPaths(self.runs / run_id)

    def log(self, process: str, run_id: str) -> Path:
        """``process`` is one of PROCESS_LOGS."""
        if process not in PROCESS_LOGS:
            raise ValueError(f"no process of a run: {process!r}")
        return self.logs / f"{process}_{run_id}.log"

    def model_dir(self, name: str) -> Path:
        """Where ``builtin:NAME`` is materialised."""
        return self.models / name.removeprefix("builtin:")


@dataclass(frozen=True)
class RunPaths:
    """One run directory. The comment behind each name is its only writer."""

    dir: Path

    @property
    def run_id(self) -> str:
        return self.dir.name

    @property
    def request(self) -> Path:  # launcher
        return self.dir / "request.json"

    @property
    def config(self) -> Path:  # supervisor
        return self.dir / "config.yaml"

    @property
    def record(self) -> Path:  # supervisor
        return self.dir / "run.json"

    @property
    def events(self) -> Path:  # supervisor
        return self.dir / "events.jsonl"

    @property
    def stop_request(self) -> Path:  # whoever asks first
        return self.dir / "stop.json"

    @property
    def supervisor_lock(self) -> Path:  # held (flock) by the live supervisor
        return self.dir / "supervisor.lock"

    @property
    def metrics(self) -> Path:  # trainer
        return self.dir / "metrics.jsonl"

    @property
    def progress(self) -> Path:  # trainer
        return self.dir / "progress.json"

    @property
    def wandb_state(self) -> Path:  # trainer
        return self.dir / "wandb.json"

    @property
    def rollouts(self) -> Path:  # trainer
        return self.dir / "rollouts.jsonl"

    @property
    def checkpoints(self) -> Path:  # trainer
        return self.dir / "checkpoints"

    @property
    def exports(self) -> Path:  # requests: the server that was asked; logs: the program that exports
        return self.dir / "exports"

    @property
    def env_metrics(self) -> Path:  # environment
        return self.dir / "env_metrics.jsonl"

    @property
    def env_rollouts(self) -> Path:  # environment
        return self.dir / "env_rollouts.jsonl"

    @property
    def evaluation(self) -> Path:  # environment
        return self.dir / "evaluation.json"

    @property
    def env_state(self) -> Path:  # environment
        return self.dir / "env_state.json"

    @property
    def vitals(self) -> Path:  # supervisor
        return self.dir / "vitals.json"

    @property
    def reserve(self) -> Path:  # launcher; the supervisor spends it
        return self.dir / "reserve"

    @property
    def journal(self) -> Path:  # rollout API
        return self.dir / "rollout_journal.jsonl"

    def report(self, process: str) -> Path:
        """What a child says about its own end (``ChildReport``); written by that child."""
        return self.dir / f"report_{process}.json"


def claims_dir(environ: Mapping[str, str]) -> Path:
    """Per-user folder of machine-wide claims on devices and ports.

    ``HERMES_RL_CLAIMS_DIR`` overrides (tests), else ``hermes-rl`` in the user's runtime folder, else a folder in the
    temp dir. Clients that pass almost no environment must get the same folder as a shell: so the usual runtime folder
    is looked for even if ``XDG_RUNTIME_DIR`` is not set.
    """
    if override := environ.get("HERMES_RL_CLAIMS_DIR"):
        return Path(override)
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if runtime.is_dir():
        return runtime / "hermes-rl"
    return Path(tempfile.gettempdir()) / f"hermes-rl-{os.getuid()}"


def install_root() -> Path:
    """The folder that holds the packages ``hermes_rl_mcp``, ``trainer`` and ``environments``."""
    return Path(__file__).resolve().parent.parent


def bundled_environments() -> Path:
    return install_root() / "environments"
