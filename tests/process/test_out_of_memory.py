"""FI-27: memory that runs out fails the run with the phase and with settings that take less.

On a CPU the address space of the real trainer is limited from outside, as a container or ulimit would."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from three_processes import PREFIX, Run, run_directory

READY_S = 300.0
EXIT_S = 300.0
ROOM_BYTES = 48 * 2**20
ROWS, LENGTH = 64, 400
"""One batch of so many sequences of so many tokens needs some hundred megabytes to learn from, and to sample."""
SETTINGS: dict[str, Any] = {"micro_batch_tokens": 16_384, "sampler_max_rows": 512}


def _run(folder: Path, environ: dict[str, str], **trainer: Any) -> AbstractContextManager[Run]:
    env = {"total_steps": 3, "batch_size": ROWS, "group_size": ROWS, "max_token_length": 200}
    return run_directory(folder, environ, env=env, trainer={**SETTINGS, **trainer})


def _ready(run: Run) -> None:
    run.start("api")
    run.start("trainer")
    run.wait(lambda: run.health().get("status") == "ok", READY_S)


def _leave_little(run: Run) -> None:
    """The trainer has its model and its threads; from now on it gets hardly anything."""
    pid = run.processes["trainer"].pid
    limit = psutil.Process(pid).memory_info().vms + ROOM_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def _train(run: Run) -> None:
    """A batch without a prompt to share, so that every token is learned."""
    tokens = [[1 + at, *([60] * (LENGTH - 1))] for at in range(ROWS)]
    group = {
        "tokens": tokens,
        "masks": [[-100, *one[1:]] for one in tokens],
        "scores": [float(at % 2) for at in range(ROWS)],
        "inference_logprobs": [[1.0, *([-4.0] * (LENGTH - 1))]] * ROWS,
    }
    url = f"http://127.0.0.1:{run.ports['api']}/{PREFIX}/scored_data"
    assert httpx.post(url, json=group, trust_env=False, timeout=200).status_code == 200


def _sample(run: Run) -> None:
    body = {"input_ids": [40, 41], "sampling_params": {"n": 512, "max_new_tokens": LENGTH, "temperature": 5.0}}
    with suppress(httpx.TransportError):  # the trainer goes while we wait
        assert httpx.post(f"{run.trainer_url}/generate", json=body, trust_env=False, timeout=EXIT_S).status_code >= 500


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("work", "phase", "says"),
    [
        pytest.param(
            _train, "training step 1", "micro_batch_tokens 16384 -> 8192", id="training", marks=pytest.mark.slow
        ),
        pytest.param(
            _sample, "sampling for step 1", "sampler_max_rows 512 -> 256", id="sampling", marks=pytest.mark.slow
        ),
    ],
)
def test_fi_27_a_run_that_outgrows_its_memory_says_in_which_phase_and_what_takes_less(
    tmp_path: Path, environ: dict[str, str], work: Callable[[Run], None], phase: str, says: str
) -> None:
    with _run(tmp_path, environ) as run:
        _ready(run)
        _leave_little(run)
        work(run)
        assert run.processes["trainer"].wait(EXIT_S) == 1, run.log("trainer")
        report = run.report()
        error = report.error or ""
        assert report.status == "failed"
        assert error.startswith(f"host_oom: this machine ran out of memory while {phase}"), report
        assert "GiB were free" in error
        assert says in (report.hint or ""), report


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("share", "work", "says"),
    [
        (1e-5, None, "The model itself does not fit"),
        (2e-3, _train, "micro_batch_tokens 16384 -> 8192"),
        (2e-3, _sample, "sampler_max_rows 512 -> 256"),
    ],
    ids=["load", "training", "sampling"],
)
def test_fi_27_a_gpu_that_is_too_small_fails_the_run_with_phase_and_settings(
    tmp_path: Path, environ: dict[str, str], share: float, work: Callable[[Run], None] | None, says: str
) -> None:
    """A limit on torch's allocator stands for the small GPU."""
    limited = {**environ, "PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{share}"}
    with _run(tmp_path, limited, device="cuda") as run:
        if work is None:
            run.start("api")
            run.start("trainer")
        else:
            _ready(run)
            work(run)
        assert run.processes["trainer"].wait(EXIT_S) == 1, run.log("trainer")
        report = run.report()
        assert (report.error or "").startswith("gpu_oom: the GPU ran out of memory while"), report
        assert "GiB were free" in (report.error or "") and says in (report.hint or ""), report
