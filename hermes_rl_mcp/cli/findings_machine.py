"""Python, packages, torch, GPU, memory, disk. Torch and the GPU's tool are asked in children with a bound."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_rl_mcp import __version__
from hermes_rl_mcp.cli.findings import Finding, Verdict
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.interpreters import atropos_python
from hermes_rl_mcp.runs.forecast.device import cpu_count, free_disk_bytes, host_memory

GIB = 1024**3
MIN_DISK_GIB = 1.0
"""A small adapter with its optimizer state and the embedded model; below this a checkpoint may not fit."""
LOW_MEMORY_GIB = 2.0
TORCH_TIMEOUT_S = 120.0
"""A first import of torch reads a gigabyte of libraries from disk."""
SMI_TIMEOUT_S = 5.0
"""It answers in well under a second; with a GPU that fell off the bus it hangs."""
TRAIN_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "numpy",
    "jinja2",
    "math_verify",
    "datasets",
    "gguf",
    "matplotlib",
)
EXTRAS = {"wandb": "wandb", "tinker": "tinker"}
FLOORS: tuple[tuple[str, str, Verdict, str], ...] = (
    ("mcp", "1.23", "problem", "older ones do not check who asks over HTTP (CVE-2025-66416)"),
    ("torch", "2.6", "problem", "older ones run code out of weight files (CVE-2025-32434)"),
    ("torch", "2.10", "warning", "older ones have a flaw in reading weight files (CVE-2026-24747)"),
    ("vllm", "0.18", "warning", "older ones run a model's own code although told not to (CVE-2026-27893)"),
)
"""Package, least version, how bad less is, and why. Only for what is installed."""
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
(torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
                  "gpus": [[gpu.name, gpu.total_memory, torch.cuda.mem_get_info(i)[0]] for i, gpu in enumerate(gpus)]}))
"""


def python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("hermes-rl-mcp", "ok", f"{__version__} with mcp {importlib.metadata.version('mcp')}")


def packages() -> Iterator[Finding]:
    missing = [name for name in TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        fix = "Run: pip install 'hermes-rl-mcp[train]'"
        yield Finding("extra train", "problem", f"missing: {', '.join(missing)}", fix)
    else:
        versions = (f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft"))
        yield Finding("extra train", "ok", ", ".join(versions))
    for extra, package in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            yield Finding(f"extra {extra}", "ok", f"not installed; if wanted: pip install 'hermes-rl-mcp[{extra}]'")
        else:
            yield Finding(f"extra {extra}", "ok", importlib.metadata.version(package))


def atropos(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The Python of environments written for Atropos."""
    try:
        python = atropos_python(environ)
    except InvalidValueError as error:
        yield Finding("atropos", "problem", error.message, error.hint)
        return
    if python is not None:
        yield Finding("atropos", "ok", f"environments written for it run with {python}")
    elif importlib.util.find_spec("atroposlib") is not None:
        yield Finding("atropos", "ok", f"atroposlib {importlib.metadata.version('atroposlib')} beside this package")
    else:
        yield Finding("atropos", "ok", "not installed; if wanted: hermes-rl install-atropos")


def floors() -> Iterator[Finding]:
    """Versions with known holes."""
    fine: dict[str, str] = {}
    for package, least, verdict, why in FLOORS:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(version) < _numbers(least):
            fix = f"Run: pip install --upgrade '{package}>={least}'"
            yield Finding("versions", verdict, f"{package} {version} is below {least}: {why}", fix)
        else:
            fine[package] = f"{package} {version} (at least {least})"  # the highest of a package comes last
    yield Finding("versions", "ok", "; ".join(fine.values()))


def torch(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Version and device, as a child that imports torch sees them."""
    if importlib.util.find_spec("torch") is None:
        return
    command = [sys.executable, "-P", "-c", _ASK_TORCH]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, env=dict(environ), check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("torch", "problem", f"no answer within {TORCH_TIMEOUT_S:.0f} s", "Try again, or reinstall torch.")
        return
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        fix = "Reinstall torch for this Python and this machine."
        yield Finding("torch", "problem", f"cannot be used: {last}", fix)
        return
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    build = f"CUDA {answer['cuda']}" if answer["cuda"] else "CPU build"
    yield Finding("torch", "ok", f"{answer['version']} ({build})")
    if answer["gpus"]:
        found = (f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free" for name, total, free in answer["gpus"])
        yield Finding("device", "ok", "; ".join(found))
    else:
        yield Finding("device", "ok", f"CPU, {cpu_count()} cores; torch sees no GPU")


def gpu(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What the driver's own tool says, which hangs when a GPU does."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return
    fix = "Restart the machine or its driver; see: dmesg | grep -i nvrm"
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("nvidia-smi", "problem", f"no answer within {SMI_TIMEOUT_S:.0f} s", fix)
        return
    except OSError as error:
        yield Finding("nvidia-smi", "warning", f"cannot be started: {error.strerror}", fix)
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith("GPU")]
    if done.returncode != 0 or not lines:
        yield Finding("nvidia-smi", "warning", f"exit code {done.returncode}, {len(lines)} GPUs", fix)
    else:
        yield Finding("nvidia-smi", "ok", f"{len(lines)} GPUs: {re.sub(r' [(]UUID.*', '', lines[0])}")


def memory() -> Finding:
    free = host_memory().free / GIB
    if free < LOW_MEMORY_GIB:
        fix = "Close other programs, or train the tiny model only."
        return Finding("memory", "warning", f"{free:.1f} GiB free", fix)
    return Finding("memory", "ok", f"{free:.1f} GiB free")


def disk(root: Path) -> Finding:
    free = free_disk_bytes(root) / GIB
    if free < MIN_DISK_GIB:
        fix = f"Free some space (hermes-rl runs prune), or set HERMES_HOME elsewhere than {root}."
        return Finding("disk", "problem", f"{free:.1f} GiB free", fix)
    return Finding("disk", "ok", f"{free:.1f} GiB free")


def _numbers(version: str) -> tuple[int, ...]:
    """``2.10.0+cpu`` as (2, 10, 0). A release candidate counts as the release."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
