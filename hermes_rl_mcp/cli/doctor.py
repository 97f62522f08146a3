"""``hermes-rl doctor``: can this machine train, and if not, what to do.

Each check looks at one thing and changes nothing that stays. Torch is asked in a child process, so that a broken
build of it is a finding and not a crash.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hermes_rl_mcp import __version__, paths
from hermes_rl_mcp.cli import config
from hermes_rl_mcp.runs.device import cpu_count, free_disk_bytes, free_memory_bytes

Verdict = Literal["ok", "note", "fail"]
GIB = 1024**3
MIN_DISK_GIB = 1.0
"""A small adapter with its optimizer state and the embedded model; below this a checkpoint may not fit."""
LOW_MEMORY_GIB = 2.0
TORCH_TIMEOUT_S = 120.0
"""A first import of torch reads a gigabyte of libraries from disk."""
PORTS = (8000, 8001)
TRAIN_PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "jinja2", "math_verify", "datasets", "gguf")
EXTRAS = {"wandb": "wandb", "tinker": "tinker", "atropos": "atroposlib"}
KEYS = ("HF_TOKEN", "WANDB_API_KEY", "HERMES_RL_INFERENCE_API_KEY", "OPENAI_API_KEY", "TINKER_API_KEY")
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
(torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
                  "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus]}))
"""


@dataclass(frozen=True)
class Check:
    """One finding. ``fix`` says what to do about anything that is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """All checks in the order in which a person would ask; a ``fail`` means that training cannot run."""
    home = paths.Home.from_environ(environ)
    yield _python()
    yield Check("hermes-rl-mcp", "ok", f"{__version__} with mcp {importlib.metadata.version('mcp')}")
    train = _train_packages()
    yield train
    if train.verdict == "ok":
        yield from _torch(environ)
    yield from _optional_packages()
    yield _memory()
    yield _home(home.root)
    yield _disk(home.root)
    yield _claims(paths.claims_dir(environ))
    yield from (_port(port) for port in PORTS)
    yield from _keys(home.env_file, environ)
    yield _models(home.models)
    yield _environments(paths.bundled_environments())


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _train_packages() -> Check:
    missing = [name for name in TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return Check("extra train", "fail", f"missing: {', '.join(missing)}", "Run: pip install 'hermes-rl-mcp[train]'")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft"))
    return Check("extra train", "ok", ", ".join(versions))


def _torch(environ: Mapping[str, str]) -> Iterator[Check]:
    """Version and device, as a child that imports torch sees them."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, env=dict(environ), check=False
        )
    except subprocess.TimeoutExpired:
        yield Check("torch", "fail", f"import took over {TORCH_TIMEOUT_S:.0f} s", "Try again, or reinstall torch.")
        return
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        yield Check("torch", "fail", f"cannot be used: {last}", "Reinstall torch for this Python and this machine.")
        return
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    build = f"CUDA {answer['cuda']}" if answer["cuda"] else "CPU build"
    yield Check("torch", "ok", f"{answer['version']} ({build})")
    if answer["gpus"]:
        found = ", ".join(f"{name} {memory / GIB:.0f} GiB" for name, memory in answer["gpus"])
        yield Check("device", "ok", found)
        return
    yield Check("device", "ok", f"CPU, {cpu_count()} cores; no GPU seen")


def _optional_packages() -> Iterator[Check]:
    for extra, package in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            yield Check(f"extra {extra}", "note", "not installed", f"If wanted: pip install 'hermes-rl-mcp[{extra}]'")
        else:
            yield Check(f"extra {extra}", "ok", importlib.metadata.version(package))


def _memory() -> Check:
    free = free_memory_bytes() / GIB
    if free < LOW_MEMORY_GIB:
        return Check("memory", "note", f"{free:.1f} GiB free", "Close other programs, or train the tiny model only.")
    return Check("memory", "ok", f"{free:.1f} GiB free")


def _home(root: Path) -> Check:
    return _writable("HERMES_HOME", root, "Set HERMES_HOME to a folder that you may write to.")


def _claims(folder: Path) -> Check:
    return _writable("claims folder", folder, "Set XDG_RUNTIME_DIR or HERMES_RL_CLAIMS_DIR to a folder of your own.")


def _writable(name: str, folder: Path, fix: str) -> Check:
    """Writes a file and takes it away again, in the folder or in the nearest parent that exists."""
    existing = _nearest(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check(name, "fail", f"{folder}: {error.strerror or error}", fix)
    return Check(name, "ok", str(folder) if existing == folder else f"{folder} (will be made)")


def _nearest(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _disk(root: Path) -> Check:
    free = free_disk_bytes(root) / GIB
    if free < MIN_DISK_GIB:
        return Check(
            "disk", "fail", f"{free:.1f} GiB free", f"Free some space, or set HERMES_HOME elsewhere than {root}."
        )
    return Check("disk", "ok", f"{free:.1f} GiB free")


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Check(f"port {port}", "note", "in use", "Nothing to do: a run takes the next free one.")
    return Check(f"port {port}", "ok", "free")


def _keys(file: Path, environ: Mapping[str, str]) -> Iterator[Check]:
    in_file = config.values(file)
    for name in KEYS:
        if in_file.get(name):
            yield Check(name, "ok", f"set in {file}")
        elif environ.get(name):
            fix = f"Clients pass no keys on to a server; to make it stay: hermes-rl config set {name} -"
            yield Check(name, "note", "set in this shell only", fix)
        else:
            yield Check(name, "note", "not set", f"Only if you use that service: hermes-rl config set {name} -")
    if config.readable_by_others(file):
        yield Check(".env", "note", f"others can read {file}", f"Run: chmod 600 {file}")


def _models(folder: Path) -> Check:
    found = []
    for model in sorted(folder.glob("*/")) if folder.is_dir() else []:
        size = sum(f.stat().st_size for f in model.rglob("*") if f.is_file())
        found.append(f"{model.name} ({size / 1e6:.0f} MB)")
    return Check("embedded models", "ok", ", ".join(found) if found else f"none unpacked yet in {folder}")


def _environments(folder: Path) -> Check:
    files = [f for f in folder.rglob("*.py") if not f.name.startswith("_")] if folder.is_dir() else []
    if not files:
        return Check("environments", "fail", f"none in {folder}", "Reinstall hermes-rl-mcp: its files are incomplete.")
    return Check("environments", "ok", f"{len(files)} files in {folder}; hermes-rl envs lists them")
