"""Does choosing items help? ``exploration.py [--seeds 3] [--steps 60]``: item_value against none.

``arithmetic`` with levels 1 to 3 mixed: builtin:tiny knows only the first, so most groups of the environment's own
choice are all wrong and teach nothing. Both ways are the real product (``hermes-rl demo``) with the same seed and
steps. Prints the lines of ``report.py``: the share of groups without signal over the last half of the steps, and the
held-out accuracy at the end. Curves go to ``build/exploration`` as JSON and text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from report import ROOT, Report, cores, progress, quiet_environ

OUTPUT = ROOT / "build" / "exploration"
TIMEOUT_S = 3600.0
EVAL_ITEMS = 200
WAYS = ("none", "item_value")
FALLS = "<= 0.8"
NO_LOSS = ">= 0.8"
"""What training added to the held-out accuracy; little, as of three levels the model can learn one."""


@dataclass(frozen=True)
class Run:
    """One run; a value a step."""

    zero_variance: list[float]
    reward: list[float]
    base: float
    accuracy: float
    """Held-out, of the adapter."""

    @property
    def late(self) -> float:
        return fmean(self.zero_variance[len(self.zero_variance) // 2 :])


def run(way: str, seed: int, steps: int) -> Run:
    with tempfile.TemporaryDirectory() as home:
        environ = {**quiet_environ(cores()), "HERMES_HOME": home, "HERMES_RL_CLAIMS_DIR": f"{home}/claims"}
        values = {"mixed_up_to": 3, "exploration_model": way, "seed": seed, "eval_items": EVAL_ITEMS}
        values |= {"torch_threads": cores(), "save_checkpoint_interval": 0}
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "demo", "--json", "--env", "arithmetic"]
        command += ["--model", "builtin:tiny", "--steps", str(steps)]
        for name, value in values.items():
            command += ["--set", f"{name}={json.dumps(value)}"]
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
        found = json.loads(done.stdout.splitlines()[-1])["evaluation"]
        [file] = (Path(home) / "rl" / "runs").glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    made = Run(
        [line["groups/zero_variance_fraction"] for line in lines],
        [line["reward/mean"] for line in lines],
        *(float(found[arm]["accuracy"]) for arm in ("base", "adapter")),
    )
    progress(f"{way}, seed {seed}: without signal {made.late:.2f}, held-out {made.base:.3f} to {made.accuracy:.3f}")
    return made


def keep(runs: dict[str, list[Run]]) -> None:
    """Curves of the means over seeds, as JSON and drawn."""
    import plotext

    OUTPUT.mkdir(parents=True, exist_ok=True)
    content = {way: [vars(one) for one in several] for way, several in runs.items()}
    (OUTPUT / "curves.json").write_text(json.dumps(content, indent=1) + "\n")
    figure = plotext.figure
    figure.clear()
    figure.plot_size(90, 18)
    markers = dict(zip(runs, "o+", strict=True))
    figure.title(f"groups without signal ({', '.join(f'{mark}: {way}' for way, mark in markers.items())})")
    figure.label("step", "x")
    for way, several in runs.items():
        means = [fmean(values) for values in zip(*(one.zero_variance for one in several), strict=False)]
        figure.draw(figure.signal(list(range(1, len(means) + 1)), means, marker=markers[way]))
    text = str(figure.build().string(colorless=True)).rstrip("\n")
    (OUTPUT / "zero_variance.txt").write_text(text + "\n")
    progress(text)


def judge(runs: dict[str, list[Run]], steps: int) -> int:
    report = Report()
    plain, chosen = (runs[way] for way in WAYS)
    note = f"arithmetic, levels 1 to 3, {steps} steps, {len(plain)} seeds; last half of the steps; theirs: none"
    report.compare("exploration: groups without signal", _late(chosen), _late(plain), "share", FALLS, note)
    gains = [fmean(one.accuracy - one.base for one in several) for several in (chosen, plain)]
    ends = [fmean(one.accuracy for one in several) for several in (chosen, plain)]
    note = f"held-out accuracy at the end {ends[0]:.3f} against {ends[1]:.3f}, of all three levels; theirs: none"
    report.compare("exploration: gain in held-out accuracy", *gains, "accuracy", NO_LOSS, note)
    return report.exit_code


def _late(runs: Sequence[Run]) -> float:
    return fmean(one.late for one in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way in WAYS:
            runs[way].append(run(way, seed, options.steps))
    keep(runs)
    return judge(runs, options.steps)


if __name__ == "__main__":
    sys.exit(main())
