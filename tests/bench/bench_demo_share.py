"""How much of a demo run's wall time is sampling or training: ``bench_demo_share.py [--rounds 1]``.

``hermes-rl demo`` in a home of its own, with all its processes; then, over the run's ``metrics.jsonl``, the sum of
``time/sample_s + time/train_s`` over the sum of ``time/step_s``. The first step holds the environment's start; the
share without it is given, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import Report, progress

BAR = ">= 0.85"
TIMEOUT_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the demo takes")
    options = parser.parse_args()
    runs = [demo(["--steps", str(options.steps)] if options.steps else []) for _ in range(options.rounds)]
    report = Report()
    note = f"{len(runs[0])} steps"
    report.within("demo: share of time in sampling or training", [share(one) for one in runs], "share", BAR, note)
    report.within("demo: the same without the first step", [share(one[1:]) for one in runs], "share", None, note)
    return report.exit_code


def demo(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as home:
        environ = {**os.environ, "HERMES_HOME": home, "HERMES_RL_CLAIMS_DIR": f"{home}/claims"}
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "demo", "--json", *arguments]
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the demo ended with {done.returncode}:\n{done.stderr[-3000:]}")
        summary = json.loads(done.stdout)
        file = Path(home) / "rl" / "runs" / summary["run_id"] / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        progress(f"demo: {len(lines)} steps, reward {summary['reward_first5']:.2f} to {summary['reward_last5']:.2f}")
        return lines


def share(lines: Sequence[dict[str, Any]]) -> float:
    compute = sum((line["time/sample_s"] or 0.0) + (line["time/train_s"] or 0.0) for line in lines)
    return compute / sum(line["time/step_s"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
