"""What the processes of a run are started with: program, arguments, environment, descriptors.

Every environment is an allow-list: a child gets the variables named here and no other. Keys travel by environment,
never by argument; the secret path prefix travels in the 0600 ``config.yaml``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.agent import settings as agent_settings
from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.runs import ProcessName
from hermes_rl_mcp.interpreters import ATROPOS_PYTHON, environment_program
from hermes_rl_mcp.paths import Home, RunPaths, install_root
from hermes_rl_mcp.redact import SECRET_PREFIX
from hermes_rl_mcp.runs.forecast.device import cpu_count
from hermes_rl_mcp.runs.process import MARKER, ProcessSpec

CHILD_COMMANDS = "HERMES_RL_CHILD_COMMANDS"
"""Names a JSON file (``ChildCommands``) that replaces programs and deadlines; for tests and for debugging a child."""

_BASE = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LOGNAME", "HERMES_HOME", "HERMES_RL_TEST_MARK")
_HUB = (
    *("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_DATASETS_CACHE", "XDG_CACHE_HOME"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "TRANSFORMERS_OFFLINE"),
)
_GPU = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")
_TRAINER_PREFIXES = ("WANDB_", "PIP_")
"""W&B's key and settings; pip's, because a builtin model may be fetched by it."""
_PREFIXES: dict[ProcessName, tuple[str, ...]] = {"api": (), "trainer": _TRAINER_PREFIXES, "env": (SECRET_PREFIX,)}
_SUPERVISOR = (CHILD_COMMANDS, ATROPOS_PYTHON, "HERMES_RL_CLAIMS_DIR", "XDG_RUNTIME_DIR")

_TOOLS = agent_settings.PLAIN + agent_settings.KEYS
"""For the tools of environments whose model calls tools; their sandboxes get none of it."""
_ALLOWED: dict[ProcessName, tuple[str, ...]] = {
    "api": _BASE,
    "trainer": _BASE + _HUB + _GPU,
    "env": _BASE + _HUB + _TOOLS,
}


class Limits(BaseModel):
    """How long the supervisor waits for what, and how much it lets grow. Every one is a bound, not a delay."""

    model_config = ConfigDict(extra="forbid")

    api_ready_s: float = 60.0
    """Loads no model; on a busy machine its imports take some seconds."""
    trainer_ready_s: float = 3600.0
    """May download a model of 16 GB over a slow line."""
    env_ready_s: float = 900.0
    """May download a data set and tokenise it."""
    completion_exit_s: float = 60.0
    """From the trainer's completion record to its exit; releasing a GPU takes seconds, hanging takes for ever."""
    env_term_s: float = 10.0
    """Open rollouts are worth nothing once the run ends."""
    trainer_term_s: float = 60.0
    """It finishes or abandons its step and writes a checkpoint."""
    api_term_s: float = 5.0
    kill_s: float = 5.0
    """SIGKILL needs no co-operation; what is still there sits in the kernel."""
    cascade_s: float = 5.0
    """A process that fails while one that it needs does not answer: so long that one has to be seen dead first. A
    trainer that failed stops answering, then writes its report and lets go of its memory."""
    vitals_s: float = 2.0
    """Between two looks at the processes; a person watches no closer."""
    stall_s: float = 300.0
    """Nothing has moved for so long: stalled. Decoding rounds, micro-batches and phases all count as movement; what is
    left is one slow judge or tool call of the environment, or a large checkpoint, and those take a minute or two."""
    full_disk_s: float = 30.0
    """How long the closing record is tried again if not even the reserve helps; somebody may be making room."""
    log_max_bytes: int = 64 * 2**20
    """Per log. Hours of a talkative trainer; a log that grows beyond is cut to its end."""

    def term_s(self, name: ProcessName) -> float:
        return {"api": self.api_term_s, "trainer": self.trainer_term_s, "env": self.env_term_s}[name]

    def ready_s(self, name: ProcessName) -> float:
        return {"api": self.api_ready_s, "trainer": self.trainer_ready_s, "env": self.env_ready_s}[name]


class ChildCommands(BaseModel):
    """Replacements for what the supervisor starts. The usual arguments are appended to each command."""

    model_config = ConfigDict(extra="forbid")

    commands: dict[ProcessName, list[str]] = Field(default_factory=dict)
    limits: Limits = Field(default_factory=Limits)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ChildCommands:
        name = environ.get(CHILD_COMMANDS)
        return cls.model_validate_json(Path(name).read_bytes()) if name else cls()


@dataclass(frozen=True)
class Handover:
    """Descriptors that children inherit: the bound sockets, the lifeline's read end, the device's ticket."""

    api_socket: int
    trainer_socket: int
    lifeline: int
    device_ticket: int


def child_spec(
    name: ProcessName,
    *,
    home: Home,
    run_dir: Path,
    config: RunConfig,
    environ: Mapping[str, str],
    commands: Mapping[ProcessName, list[str]],
    handover: Handover,
    resume: bool = False,
) -> ProcessSpec:
    """How to start one child of the run that ``config`` describes. ``resume``: its directory holds a checkpoint."""
    config_path = str(RunPaths(run_dir).config)
    modules: dict[ProcessName, str] = {
        "api": "hermes_rl_mcp.rollout_api",
        "trainer": "trainer",
        "env": "hermes_rl_mcp.envs",
    }
    own = [sys.executable, "-P", "-m", modules[name]]
    if name == "env":
        own = environment_program(config.run.env_base, {**environ, "HERMES_HOME": str(home.root)})
    program = commands.get(name) or own
    arguments: dict[ProcessName, list[str]] = {
        "api": ["--config", config_path, "--listen-fd", str(handover.api_socket)],
        "trainer": [
            *("--config", config_path, "--listen-fd", str(handover.trainer_socket)),
            *(["--resume"] if resume else []),
        ],
        "env": [f"{config.run.env_file}:{config.run.env_class}", "serve", "--config", config_path],
    }
    descriptors: dict[ProcessName, tuple[int, ...]] = {
        "api": (handover.api_socket, handover.lifeline),
        "trainer": (handover.trainer_socket, handover.lifeline, handover.device_ticket),
        "env": (handover.lifeline,),
    }
    return ProcessSpec(
        name=name,
        argv=(*program, *arguments[name]),
        environ={
            **_child_environ(name, environ, torch_threads=config.trainer.torch_threads),
            "HERMES_HOME": str(home.root),
            MARKER: marker(config),
            lifeline.VARIABLE: str(handover.lifeline),
        },
        log=home.log(name, config.run.run_id),
        cwd=run_dir,
        pass_fds=descriptors[name],
    )


def marker(config: RunConfig) -> str:
    """Value of the marker variable: the run id, and a part nobody else can know, so that it cannot be met by chance."""
    return f"{config.run.run_id}.{config.run.nonce}"


def supervisor_environ(home: Home, environ: Mapping[str, str]) -> dict[str, str]:
    """Everything that any child may get, and what the supervisor itself reads."""
    names = {*_BASE, *_HUB, *_GPU, *_TOOLS, *_SUPERVISOR}
    prefixes = tuple(prefix for some in _PREFIXES.values() for prefix in some)
    return {**_pick(names, environ, prefixes=prefixes), **_python(), "HERMES_HOME": str(home.root)}


def _child_environ(name: ProcessName, environ: Mapping[str, str], *, torch_threads: int) -> dict[str, str]:
    picked = {**_pick(set(_ALLOWED[name]), environ, prefixes=_PREFIXES[name]), **_python()}
    if name == "trainer":
        # Spinning threads would take the cores from the environment that the trainer waits for.
        picked |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(torch_threads or cpu_count())}
    if name == "env":
        picked |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    return picked


def _pick(names: set[str], environ: Mapping[str, str], *, prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in names or name.startswith(prefixes)}


def _python() -> dict[str, str]:
    return {"PYTHONPATH": str(install_root()), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
