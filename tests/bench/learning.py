"""Does it learn, and as fast as TRL? ``learning.py [--seeds 3] [--minutes 1] [--only arithmetic shorter modes]``.

- ``arithmetic``: builtin:tiny, synchronous, against TRL's GRPOTrainer;
- ``shorter``: SmolLM2-135M gets more for shorter answers (``learning_envs/shorter.py``), synchronous, against TRL;
- ``modes``: arithmetic asynchronous (``max_batches_offpolicy`` 3), which must learn as the synchronous runs do.

Ours is the real product: ``hermes-rl demo``, its server and a run of three processes, in a home of its own. TRL gets
the same model, prompts, rewards, LoRA, learning rate, group, batch and lengths, and as many seconds. Both clocks start
with the first sample, when everything is loaded. Reward after equal wall time is the mean over the steps that ended in
the last quarter of it. Prints the lines of ``report.py``; curves go to ``build/learning`` as JSON and text.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from models import FOLDER, smollm2
from report import ROOT, Report, cores, progress, quiet_environ

from trainer.models.materialise import materialise

HERE = Path(__file__).parent
OUTPUT = ROOT / "build" / "learning"
POLL_S = 0.2
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 120.0
LATE = 0.25
"""Share of the wall time over whose steps the reward at its end is averaged."""
FIRST_STEPS = 2


@dataclass(frozen=True)
class Task:
    """What both trainers are given."""

    name: str
    model: str
    folder: Path
    seconds: float
    group: int
    batch: int
    limit: int
    rate: float
    rank: int = 16
    alpha: float = 32.0


@dataclass(frozen=True)
class Curve:
    """One run; a point per step."""

    s: list[float]
    """Seconds since training began, at the step's end."""
    reward: list[float]
    length: list[float]
    """Mean tokens of an answer."""

    @classmethod
    def of(cls, points: Sequence[dict[str, Any]], seconds: float) -> Curve:
        """Steps that ended within the time; the first one in any case."""
        kept = [point for point in points if point["s"] <= seconds] or list(points[:1])
        if not kept:
            raise RuntimeError("not one step was made")
        return cls(*([float(point[name]) for point in kept] for name in ("s", "reward", "length")))

    def late(self, values: list[float], seconds: float) -> float:
        found = [value for s, value in zip(self.s, values, strict=True) if s > seconds * (1 - LATE)]
        return fmean(found or values[-1:])

    def early(self, values: list[float]) -> float:
        return fmean(values[:FIRST_STEPS])


def ours(task: Task, seed: int, offpolicy: int) -> Curve:
    """A run of the product, stopped when its time is over."""
    with tempfile.TemporaryDirectory() as home:
        environ = {
            **quiet_environ(cores()),
            "HERMES_HOME": home,
            "HERMES_RL_CLAIMS_DIR": f"{home}/claims",
            "HERMES_RL_ENV_DIRS": str(HERE / "learning_envs"),
        }
        values = {
            "seed": seed,
            "max_batches_offpolicy": offpolicy,
            "learning_rate": task.rate,
            "lora_rank": task.rank,
            "lora_alpha": task.alpha,
            "save_checkpoint_interval": 0,
            "eval_items": 0,
            "torch_threads": cores(),
        }
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "demo", "--json"]
        command += ["--env", task.name, "--model", task.model, "--steps", "10000"]
        command += ["--group-size", str(task.group), "--batch-size", str(task.batch), "--max-tokens", str(task.limit)]
        for name, value in values.items():
            command += ["--set", f"{name}={json.dumps(value)}"]
        with (Path(home) / "demo.log").open("w+") as log:
            demo = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                points = _follow(demo, Path(home) / "rl" / "runs", task.seconds)
            except RuntimeError as error:
                log.seek(0)
                raise RuntimeError(f"{error}:\n{log.read()[-3000:]}") from None
            finally:
                if demo.poll() is None:
                    demo.send_signal(signal.SIGINT)  # the demo stops its run
                demo.wait(STOP_TIMEOUT_S)
    return Curve.of(points, task.seconds)


def _follow(demo: subprocess.Popen[bytes], runs: Path, seconds: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + START_TIMEOUT_S + 2 * seconds
    while True:
        points, clock = [], 0.0
        for file in runs.glob("*/metrics.jsonl"):
            for text in file.read_text().splitlines():
                line = json.loads(text)
                # Before its first sample, the first step waits for the environment to start.
                clock += line["time/step_s"] if points else line["time/sample_s"] + line["time/train_s"]
                points.append({"s": clock, "reward": line["reward/mean"], "length": line["rollouts/length_mean"]})
        if clock >= seconds:
            return points
        if demo.poll() is not None:
            raise RuntimeError(f"the demo ended with {demo.returncode} after {len(points)} steps")
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {len(points)} steps in {START_TIMEOUT_S + 2 * seconds:.0f} s")
        time.sleep(POLL_S)


def trl(task: Task, seed: int) -> Curve:
    arguments = [task.name, str(task.folder)]
    for name in ("seconds", "group", "batch", "limit", "rate", "rank", "alpha"):
        arguments += [f"--{name}", str(getattr(task, name))]
    arguments += ["--seed", str(seed), "--threads", str(cores())]
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [sys.executable, str(HERE / "learn_trl.py"), *arguments],
            env=quiet_environ(cores()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
        errors.seek(0)
        if done.returncode:
            raise RuntimeError(f"learn_trl.py ended with {done.returncode}:\n{errors.read()[-3000:]}")
    return Curve.of([json.loads(line) for line in done.stdout.splitlines()], task.seconds)


class Study:
    """Runs, judges and keeps the curves."""

    def __init__(self, seeds: int) -> None:
        self.report = Report()
        self._seeds = range(seeds)
        self._curves: dict[str, dict[str, list[Curve]]] = {}

    def against_trl(self, task: Task) -> None:
        mine, other = [], []
        for seed in self._seeds:
            mine.append(self._told(task, "ours", seed, ours(task, seed, 0)))
            other.append(self._told(task, "TRL", seed, trl(task, seed)))
        self._keep(task.name, {"ours, synchronous": mine, "TRL": other})
        ends = [fmean(one.late(one.reward, task.seconds) for one in ways) for ways in (mine, other)]
        steps = [fmean(len(one.s) for one in ways) for ways in (mine, other)]
        note = f"{task.seconds:.0f} s, {len(mine)} seeds; {steps[0]:.0f} steps against {steps[1]:.0f}"
        self.report.compare(f"learning {task.name}: reward after equal wall time", *ends, "reward", ">= 1", note)
        if task.name == "shorter":
            shares = [one.late(one.length, task.seconds) / one.early(one.length) for one in mine]
            note = "length at the end over length at the start, worst seed"
            self.report.within("learning shorter: length falls", max(shares), "share", "<= 0.8", note)
        else:
            self._rises(task, mine, "synchronous")

    def asynchronous(self, task: Task) -> None:
        mine = [self._told(task, "ours, asynchronous", seed, ours(task, seed, 3)) for seed in self._seeds]
        self._keep(f"{task.name}, asynchronous", {"ours, asynchronous": mine})
        self._rises(task, mine, "asynchronous")

    def _rises(self, task: Task, curves: list[Curve], mode: str) -> None:
        rises = [one.late(one.reward, task.seconds) - one.early(one.reward) for one in curves]
        note = "; ".join(f"{one.early(one.reward):.2f} to {one.late(one.reward, task.seconds):.2f}" for one in curves)
        self.report.within(f"learning {task.name}, {mode}: reward rises", min(rises), "reward", ">= 0.2", note)

    def _told(self, task: Task, who: str, seed: int, curve: Curve) -> Curve:
        late = [curve.late(values, task.seconds) for values in (curve.reward, curve.length)]
        progress(
            f"{task.name}, {who}, seed {seed}: {len(curve.s)} steps, reward {curve.early(curve.reward):.3f} to "
            f"{late[0]:.3f}, length {curve.early(curve.length):.1f} to {late[1]:.1f}"
        )
        return curve

    def _keep(self, name: str, curves: dict[str, list[Curve]]) -> None:
        self._curves[name] = curves
        OUTPUT.mkdir(parents=True, exist_ok=True)
        content = {
            name: {who: [vars(one) for one in several] for who, several in ways.items()}
            for name, ways in self._curves.items()
        }
        (OUTPUT / "curves.json").write_text(json.dumps(content, indent=1) + "\n")
        plots = []
        for what in ("reward", "length"):
            runs = {who: [(one.s, getattr(one, what)) for one in several] for who, several in curves.items()}
            plots.append(drawn(f"{name}: {what}", runs))
        text = "\n\n".join(plots)
        (OUTPUT / f"{name.replace(', ', '_')}.txt").write_text(text + "\n")
        progress(text)


def drawn(title: str, ways: dict[str, list[tuple[list[float], list[float]]]]) -> str:
    """Each way's runs over seconds, with a marker of its own."""
    import plotext

    markers = dict(zip(ways, "o+x", strict=False))
    figure = plotext.figure
    figure.clear()
    figure.plot_size(90, 18)
    figure.title(f"{title} ({', '.join(f'{mark}: {who}' for who, mark in markers.items())})")
    figure.label("seconds", "x")
    for who, runs in ways.items():
        for seconds, values in runs:
            figure.draw(figure.signal(seconds, values, marker=markers[who]))
    return str(figure.build().string(colorless=True)).rstrip("\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="of training a run; default 0.35 for arithmetic, 1.5 for shorter")
    parser.add_argument("--only", nargs="+", choices=["arithmetic", "shorter", "modes"])
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    study = Study(options.seeds)
    wanted = options.only or ["arithmetic", "modes", "shorter"]

    def seconds(minutes: float) -> float:
        return 60 * (options.minutes or minutes)

    tiny = materialise("builtin:tiny", FOLDER / "tiny", progress)
    arithmetic = Task("arithmetic", "builtin:tiny", tiny, seconds(0.35), 8, 64, 12, 1e-3)
    if "arithmetic" in wanted:
        study.against_trl(arithmetic)
    if "modes" in wanted:
        study.asynchronous(arithmetic)
    if "shorter" in wanted:
        folder, what = smollm2()
        progress(f"shorter: {what}")
        study.against_trl(Task("shorter", str(folder), folder, seconds(1.5), 8, 16, 48, 3e-4))
    return study.report.exit_code


if __name__ == "__main__":
    sys.exit(main())
