"""How fast this machine is at the work of a run: measured once by a short child process, and kept.

Invariant: nobody waits longer than he said. A measurement that takes longer is given up and typical figures of a
processor are taken, and said to be just that.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import anyio
from pydantic import ValidationError

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.estimates import Shape, Speed, SpeedRequest
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.files import make_private_dir, write_atomic
from hermes_rl_mcp.paths import install_root
from hermes_rl_mcp.runs.forecast.device import cpu_count
from hermes_rl_mcp.runs.forecast.footprint import Work

log = logging.getLogger(__name__)

FRESH_S = 3600.0
"""A kept measurement older than this is repeated if there is time: how busy a machine is changes."""
_ROUND_TO = 4
"""Numbers of tokens and rows are rounded to 2^(k/4), so that a small edit does not ask for a new measurement."""
_CPU_TRAIN_FLOPS, _CPU_DECODE_FLOPS, _CPU_BYTES_PER_S = 50e9, 25e9, 10e9
"""Per core; what two cores of a server of the 2020s did with fp32."""
_GPU_TRAIN_FLOPS, _GPU_DECODE_FLOPS, _GPU_BYTES_PER_S = 40e12, 40e12, 400e9
_PASS_S_PER_LAYER, _TOKEN_S_PER_LAYER = 3e-3, 3e-5
"""What a layer costs however small it is."""
_IMPORT_S = 3.0


def speed_request(request: RunRequest, shape: Shape, work: Work) -> SpeedRequest:
    """What to measure for this run."""
    tokens = min(request.trainer.micro_batch_tokens, max(work.trained_tokens, 64))
    return SpeedRequest(
        shape=shape,
        device=request.device,
        threads=request.trainer.torch_threads,
        lora_rank=request.trainer.lora_rank,
        rows=_rounded(work.rows),
        context=_rounded(work.prompt + work.longest // 2),
        train_tokens=_rounded(tokens),
    )


def kept(folder: Path, wanted: SpeedRequest) -> Speed | None:
    """The last measurement of this on this machine, however old."""
    try:
        return Speed.model_validate_json(_file(folder, wanted).read_bytes())
    except (OSError, ValidationError):
        return None


def age_s(folder: Path, wanted: SpeedRequest) -> float:
    """Since that measurement, by the file's own date; below 0 if the clock was set back."""
    return time.time() - _file(folder, wanted).stat().st_mtime


async def measure(folder: Path, wanted: SpeedRequest, environ: Mapping[str, str], *, wait_s: float) -> Speed | None:
    """Runs the child for at most ``wait_s``. None if it did not answer in time or failed; then nothing is kept."""
    reading, writing = os.pipe()
    try:
        process = await anyio.open_process(
            [sys.executable, "-P", "-m", "trainer.calibrate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environ, "PYTHONPATH": str(install_root()), lifeline.VARIABLE: str(reading)},
            start_new_session=True,
            pass_fds=(reading,),
        )
        answer = b""
        try:
            with anyio.move_on_after(wait_s):
                answer = await _conversation(process, wanted)
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
    finally:
        os.close(writing)
        os.close(reading)
    try:
        speed = Speed.model_validate_json(answer)
    except ValidationError:
        log.info("no measurement of this machine: exit code %s within %.0f s", process.returncode, wait_s)
        return None
    _keep(folder, wanted, speed)
    return speed


def typical(wanted: SpeedRequest) -> Speed:
    """What such work takes on common hardware."""
    shape = wanted.shape
    cores = wanted.threads or cpu_count()
    gpu = wanted.device == "cuda"
    train = _GPU_TRAIN_FLOPS if gpu else _CPU_TRAIN_FLOPS * cores
    decode = _GPU_DECODE_FLOPS if gpu else _CPU_DECODE_FLOPS * cores
    weights = shape.parameters * (2 if gpu else 4)
    head = shape.hidden * shape.vocabulary
    return Speed(
        pass_s=shape.layers * _PASS_S_PER_LAYER + weights / (_GPU_BYTES_PER_S if gpu else _CPU_BYTES_PER_S),
        row_s=2 * shape.parameters / decode,
        prefill_token_s=2 * shape.parameters / train,
        train_token_s=5 * shape.parameters / train + shape.layers * _TOKEN_S_PER_LAYER,
        head_token_s=6 * head / train,
        import_s=_IMPORT_S,
    )


async def _conversation(process: anyio.abc.Process, wanted: SpeedRequest) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    try:
        await process.stdin.send(wanted.model_dump_json().encode())
        await process.stdin.aclose()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return b""  # it died at once
    answer = b""
    async for part in process.stdout:
        answer += part
    return answer if await process.wait() == 0 else b""


async def _end(process: anyio.abc.Process) -> None:
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("the measurement ended by itself")
        await process.wait()
    await process.aclose()


def _keep(folder: Path, wanted: SpeedRequest, speed: Speed) -> None:
    try:
        make_private_dir(folder)
        write_atomic(_file(folder, wanted), speed.model_dump_json(indent=1))
    except OSError as error:  # it is only a cache
        log.warning("the measurement could not be kept: %s", error)


def _file(folder: Path, wanted: SpeedRequest) -> Path:
    """Another processor, number of cores or torch gives another name."""
    parts = (wanted.model_dump_json(), _processor(), str(cpu_count()), _torch_version(), platform.python_version())
    return folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.json"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _rounded(count: int) -> int:
    power = round(_ROUND_TO * (max(1, count)).bit_length())
    sizes = [round(2 ** (k / _ROUND_TO)) for k in range(power + 1)]
    return min(sizes, key=lambda size: abs(size - count))
