"""One whole step, ours against TRL's GRPOTrainer: ``bench_step_vs_trl.py [--rounds 3] [--new-tokens 100] ...``.

A step samples one group of 8 completions of 100 tokens to a prompt of 200 and trains LoRA of rank 16 on all linear
layers, in fp32 with the same number of threads. TRL generates with transformers and is measured twice: with gradient
checkpointing, its default, and without; ours without, its default, and for information with. Each is a process of its
own that does one step to warm up; then they take turns.
Extra memory is the peak of the resident set since the model was loaded, minus the resident set then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from models import smollm2
from report import Report, cores, interleaved, progress
from workers import workers

HERE = Path(__file__).parent
TIME_BAR, MEMORY_BAR = "<= 0.5", "<= 0.2"
OURS: dict[str, list[str]] = {"ours": [], "ours, gradient checkpointing": ["--checkpointing"]}
THEIRS: dict[str, list[str]] = {"TRL": [], "TRL without gradient checkpointing": ["--no-checkpointing"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=cores())
    options = parser.parse_args()
    folder, what = smollm2()
    shape = [str(folder)]
    for name in ("prompt_tokens", "group", "new_tokens", "threads"):
        shape += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    scripts = {name: (HERE / "step_ours.py", [*shape, *extra]) for name, extra in OURS.items()}
    scripts |= {name: (HERE / "step_trl.py", [*shape, *extra]) for name, extra in THEIRS.items()}
    progress(f"step: {what}, 1 x {options.group} x {options.new_tokens}, {options.threads} threads")
    with workers(scripts, options.threads) as started:
        found = interleaved(
            {name: worker.step for name, worker in started.items()}, options.rounds, warm_ups=1, label="step"
        )
    report = Report()
    size = f"1 x {options.group} x {options.new_tokens} tokens from {options.prompt_tokens}"
    note = f"{size}, {what}"
    for name in THEIRS:
        _compare(report, f"step against {name}", found["ours"], found[name], note)
        _parts(report, f"step against {name}", found["ours"], found[name], note)
    both, theirs = found["ours, gradient checkpointing"], found["TRL"]
    _compare(report, "step, both with gradient checkpointing", both, theirs, note, bars=False)
    return report.exit_code


Steps = list[dict[str, Any]]


def _compare(report: Report, bench: str, ours: Steps, theirs: Steps, note: str, *, bars: bool = True) -> None:
    times = ([one["s"] for one in ways] for ways in (ours, theirs))
    report.compare(bench, *times, "s", TIME_BAR if bars else None, note)
    most = (max(one["extra_bytes"] / 1e6 for one in ways) for ways in (ours, theirs))
    report.compare(f"{bench}, extra memory", *most, "MB", MEMORY_BAR if bars else None, note)


def _parts(report: Report, bench: str, ours: Steps, theirs: Steps, note: str) -> None:
    sampling = ([one["sample_s"] for one in ways] for ways in (ours, theirs))
    report.compare(f"{bench}, sampling alone", *sampling, "s", None, note)
    rest = ([one["s"] - one["sample_s"] for one in ways] for ways in (ours, theirs))
    report.compare(f"{bench}, all but sampling", *rest, "s", None, note)


if __name__ == "__main__":
    sys.exit(main())
