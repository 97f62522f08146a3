"""What every bench says and how: JSON objects, one a line, on stdout; progress and anything else on stderr.

    {"bench": ..., "ours": ..., "theirs": ..., "unit": ..., "ratio": ..., "bar": ..., "ok": ...}

``ratio`` is always ours divided by theirs. ``bar`` says what ``ratio`` must be: ``"<= 0.5"`` where smaller is better
(seconds, bytes), ``">= 4"`` where larger is better (throughput). Where there is nothing to compare with, ``theirs`` and
``ratio`` are null and ``bar`` says what ``ours`` must be, in ``unit``. A line without a bar is for information and ok.
``note`` may follow: of what the figures are. Values are medians of interleaved runs (``interleaved``, ``median``).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
_POLL_S = 0.002


class Report:
    """Writes the lines and remembers whether a bar was missed. A bench ends with ``sys.exit(report.exit_code)``."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    @property
    def exit_code(self) -> int:
        return 1 if self.missed else 0

    def compare(
        self,
        bench: str,
        ours: float | Sequence[float],
        theirs: float | Sequence[float],
        unit: str,
        bar: str | None,
        note: str = "",
    ) -> bool:
        """Ours against theirs; of several values the medians. ``bar`` bounds ours / theirs. True: kept."""
        mine, other = median(ours), median(theirs)
        ratio = mine / other if other else float("inf")
        return self._line(bench, mine, other, unit, ratio, bar, ratio, note)

    def within(self, bench: str, ours: float | Sequence[float], unit: str, bar: str | None, note: str = "") -> bool:
        """Ours alone; of several values the median. ``bar`` bounds it. True: kept."""
        mine = median(ours)
        return self._line(bench, mine, None, unit, None, bar, mine, note)

    def skipped(self, bench: str, why: str) -> None:
        """A line that says why nothing was measured; counts as ok."""
        line = dict.fromkeys(("ours", "theirs", "unit", "ratio", "bar"))
        emit({"bench": bench, **line, "ok": True, "note": f"skipped: {why}"})

    def _line(
        self,
        bench: str,
        ours: float,
        theirs: float | None,
        unit: str,
        ratio: float | None,
        bar: str | None,
        judged: float,
        note: str,
    ) -> bool:
        ok = keeps(judged, bar)
        if not ok:
            self.missed.append(bench)
        line: dict[str, object] = {
            "bench": bench,
            "ours": short(ours),
            "theirs": None if theirs is None else short(theirs),
            "unit": unit,
            "ratio": None if ratio is None else short(ratio),
            "bar": bar,
            "ok": ok,
        }
        emit({**line, "note": note} if note else line)
        return ok


def emit(line: Mapping[str, object]) -> None:
    """One JSON line on stdout, at once."""
    sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def keeps(value: float, bar: str | None) -> bool:
    """Whether the value satisfies ``"<= x"`` or ``">= x"``. NaN satisfies neither."""
    if bar is None:
        return True
    sign, bound = bar.split()
    if sign not in ("<=", ">="):
        raise ValueError(f"A bar is '<= x' or '>= x', not {bar!r}.")
    return value <= float(bound) if sign == "<=" else value >= float(bound)


def median(values: float | Sequence[float]) -> float:
    return float(values) if isinstance(values, int | float) else statistics.median(values)


def short(value: float) -> float | None:
    """Four significant digits; what is not finite is null, as JSON has no name for it."""
    return float(f"{value:.4g}") if value - value == 0 else None


def interleaved(
    ways: Mapping[str, Callable[[], T]], rounds: int, *, warm_ups: int = 0, label: str = ""
) -> dict[str, list[T]]:
    """Each way once a round, every second round backwards, so that drift of the machine falls on all alike.

    Results of the first ``warm_ups`` rounds are dropped.
    """
    results: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(warm_ups + rounds):
        order = list(ways) if turn % 2 == 0 else list(reversed(list(ways)))
        for name in order:
            result = ways[name]()
            if turn >= warm_ups:
                results[name].append(result)
            shown = f"{result:.3f}" if isinstance(result, float) else str(result)
            kind = "warm-up" if turn < warm_ups else f"round {turn - warm_ups + 1} of {rounds}"
            progress(f"{label} {kind}: {name} {shown}".strip())
    return results


# Fresh processes and their memory


def quiet_environ(threads: int) -> dict[str, str]:
    """What every measured process gets: the same number of threads, idle ones asleep, nothing from the Hub."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def fresh(
    script: Path,
    *arguments: str,
    threads: int,
    python: Path | str = sys.executable,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 1800.0,
) -> dict[str, Any]:
    """Runs a script in a process of its own; the answer is the last line of its stdout, a JSON object.

    Raises RuntimeError with the end of its output if it fails.
    """
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [str(python), str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**quiet_environ(threads), **(environ or {})},
            timeout=timeout_s,
            check=False,
        )
        errors.seek(0)
        told = errors.read()
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{script.name} {' '.join(arguments)} ended with {done.returncode}:\n{told[-3000:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


class Memory:
    """Grows while ``extra_memory`` measures; bytes."""

    def __init__(self, before: int) -> None:
        self.before = before
        """RSS when the measurement began, after memory that nothing uses was given back."""
        self.peak = before
        """Largest RSS since."""

    @property
    def extra(self) -> int:
        return max(0, self.peak - self.before)

    def so_far(self) -> Memory:
        """Itself, brought up to now."""
        self.peak = max(self.peak, _high_water())
        return self


@contextmanager
def extra_memory() -> Iterator[Memory]:
    """Peak RSS of this process inside the block minus RSS before it. Enter it once the model is loaded.

    Exact on Linux (the kernel's high-water mark, set back first); elsewhere polled every 2 ms. Meant for a fresh
    process: what an allocator kept from earlier work would be used again and not be seen.
    """
    process = psutil.Process()
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    exact = _reset_high_water()
    memory = Memory(process.memory_info().rss)
    done = threading.Event()

    def poll() -> None:
        while not done.wait(_POLL_S):
            memory.peak = max(memory.peak, process.memory_info().rss)

    thread = None if exact else threading.Thread(target=poll, daemon=True)
    if thread:
        thread.start()
    try:
        yield memory
    finally:
        done.set()
        memory.so_far()


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _high_water() > 0
    except OSError:
        return False


def _high_water() -> int:
    """0 where there is no such mark."""
    if not sys.platform.startswith("linux"):
        return 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def cores() -> int:
    """Cores that this process may use: the number of torch threads of every measurement."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
