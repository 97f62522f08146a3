"""Shared by all tests: an own home and claims folder per test, the asyncio backend, and a leak check at the end.

Not covered anywhere in this suite: Windows, macOS, multi-GPU, the real Hub, the real W&B and Tinker services.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import psutil
import pytest

from hermes_rl_mcp.runs.forecast.device import detect_device

MARK = "HERMES_RL_TEST_MARK"
_SUITE = uuid.uuid4().hex
os.environ[MARK] = _SUITE  # inherited by every process a test starts, also by those that left its group

_GONE_S = 60.0
"""Processes that were told to end do so at once, unless the machine is busy."""

# The same examples every time, so that a run says something of the change it tests. ``--hypothesis-profile default``
# looks for others.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and detect_device(os.environ) != "cuda":
        pytest.skip("no GPU that the installed torch can use")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def environ_below(folder: Path) -> dict[str, str]:
    """What a client passes to a stdio server, plus an own home and claims folder. Nothing reaches a hub."""
    keep = {
        name: os.environ[name] for name in ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER") if name in os.environ
    }
    return {
        **keep,
        MARK: _SUITE,
        "HERMES_HOME": str(folder / "hermes"),
        "HERMES_RL_CLAIMS_DIR": str(folder / "claims"),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture
def environ(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """One for each test. What a failed one left running in its home ends with it: that would be a second failure."""
    yield environ_below(tmp_path)
    if request.node.stash.get(_FAILED, False):
        _kill(_living(lambda environ: environ.get("HERMES_HOME", "").startswith(f"{tmp_path}{os.sep}")))


@pytest.fixture(scope="module")
def module_environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One for a whole module, for tests that leave nothing behind that another would miss."""
    return environ_below(tmp_path_factory.mktemp("module"))


def _living(ours: Callable[[dict[str, str]], bool]) -> list[psutil.Process]:
    """Processes other than this one, by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and ours(process.environ()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_GONE_S)


def _name(process: psutil.Process) -> str:
    """Empty if it is gone."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return ""


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Every process that a test started is gone when the suite ends; leftovers are named, ended and fail the suite."""
    yield
    deadline = time.monotonic() + _GONE_S
    while (left := _living(lambda environ: environ.get(MARK) == _SUITE)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    names = [name for process in left if (name := _name(process))]
    _kill(left)
    assert not names, "processes outlived the tests:\n" + "\n".join(names)
