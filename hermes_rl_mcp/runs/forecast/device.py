"""What this machine has to train with, found out without loading torch and without waiting on a hung driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from pydantic import JsonValue

from hermes_rl_mcp.errors import PreflightError

_NVIDIA_SMI_TIMEOUT_S = 5.0
"""It answers in well under a second; with a GPU that fell off the bus it hangs."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes of one kind of memory. ``holders`` names the processes that have some of a GPU's, if there are any."""

    total: int
    free: int
    holders: str = ""


def detect_device(environ: Mapping[str, str] | None = None) -> Literal["cpu", "cuda"]:
    """``cuda`` if there is an NVIDIA GPU that processes may use and the installed torch was built for it."""
    environ = os.environ if environ is None else environ
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or _torch_is_cpu_only():
        return "cpu"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) or _smi_lists_gpu() else "cpu"


def chosen_device(wanted: JsonValue, found: Literal["cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """What a run with ``device = wanted`` trains on, and so which device it waits for. Raises PreflightError."""
    if wanted == "cuda" and found == "cpu":
        raise PreflightError(
            "device = 'cuda', but no GPU can be used here: none was found, or the installed torch is a CPU build.",
            hint="Set device to 'auto' or 'cpu', or run: hermes-rl doctor",
            details={"field": "device"},
        )
    return "cpu" if wanted == "cpu" else found


def cpu_count() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> Memory:
    """Of the machine, or of the container this process lives in if that is less."""
    whole = psutil.virtual_memory()
    total, free = int(whole.total), int(whole.available)
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    if limit is not None and limit < total:
        total, free = limit, min(free, max(0, limit - (used or 0)))
    return Memory(total, free)


def gpu_memory(environ: Mapping[str, str] | None = None) -> Memory | None:
    """Of the first GPU that processes may use, as its driver's tool says; None if it does not say."""
    environ = os.environ if environ is None else environ
    wanted = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    sizes = _smi("--query-gpu=memory.total,memory.free", wanted)
    if not sizes:
        return None
    try:
        total, free = (int(part) * 2**20 for part in sizes[0].split(","))
    except ValueError:
        return None
    held = [line.split(",") for line in _smi("--query-compute-apps=pid,used_memory", wanted)]
    holders = ", ".join(f"pid {row[0].strip()}: {row[1].strip()} MiB" for row in held if len(row) == 2)
    return Memory(total, free, holders)


def free_disk_bytes(path: Path) -> int:
    """Free space for this user on the file system that holds, or will hold, ``path``."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _smi(query: str, gpu: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, query, "--format=csv,noheader,nounits", f"--id={gpu}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _torch_is_cpu_only() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _smi_lists_gpu() -> bool:
    """WSL has no /dev/nvidia0, but the tool."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "-L"], capture_output=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout
