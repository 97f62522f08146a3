"""Does choosing items help? ``exploration.py [--seeds 11 12 13 14]``: ``exploration_model: item_value`` against none.

Fixed before the seeds below were run, and not to be changed for them:

- Setting: ``arithmetic`` with levels 1 to 3 mixed, alike often, builtin:tiny, 60 steps of 8 groups of 8. The model can
  learn level 1 within these steps; of levels 2 and 3 it knows next to nothing, so that groups of the environment's own
  choice are mostly all wrong and teach nothing. Both ways get the same seeds, in turn.
- Share of groups without signal: ``groups/zero_variance_fraction``, mean of all steps and seeds. Bar: at most 0.8 of
  none's.
- Held-out accuracy: the chance that an answer sampled at temperature 1 gets the reward, computed from the adapter's own
  probabilities (no sampling noise), mean of the held-out problems of a level, then of the levels, which is how often
  training asks them. Bar: not lower than none's by more than 0.02, mean of the pairs.
- It must be a setting in which something is learnt: with none, the accuracy at the end is at least 1.5 times that of
  the base model. Else the other figures say nothing.

Both ways are the real product (``hermes-rl demo``). Prints the lines of ``report.py``; what every run gave goes to
``build/exploration`` as it comes, with curves drawn as text at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from report import ROOT, Report, progress, quiet_environ

from environments.arithmetic import evaluation_problems

OUTPUT = ROOT / "build" / "exploration"
TINY = ROOT / "trainer" / "models" / "tiny"
TIMEOUT_S = 3600.0
LEVELS = (1, 2, 3)
STEPS = 60
SEEDS = (11, 12, 13, 14)
PROBLEMS = 100
"""Held-out ones of a level, where there are as many; level 1 has ten."""
WAYS = ("none", "item_value")
SHARE_BAR, LOSS_BAR, LEARNS_BAR = "<= 0.8", ">= -0.02", ">= 1.5"


@dataclass(frozen=True)
class Run:
    """One run; lists have a value a step."""

    way: str
    seed: int
    zero_variance: list[float]
    reward: list[float]
    accuracy: float
    """Held-out, of the adapter; see above."""
    of_levels: list[float]
    """The same, level by level."""

    @property
    def share(self) -> float:
        """Of groups without signal."""
        return fmean(self.zero_variance)


def run(way: str, seed: int) -> Run:
    with tempfile.TemporaryDirectory() as home:
        environ = {**quiet_environ(1), "HERMES_HOME": home, "HERMES_RL_CLAIMS_DIR": f"{home}/claims"}
        values = {"difficulty": LEVELS[0], "mixed_up_to": LEVELS[-1], "exploration_model": way, "seed": seed}
        values |= {"eval_items": 0, "steps_per_eval": -1, "torch_threads": 1, "save_checkpoint_interval": 0}
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "demo", "--json", "--env", "arithmetic"]
        command += ["--model", "builtin:tiny", "--steps", str(STEPS)]
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
        adapter = json.loads(done.stdout.splitlines()[-1])["adapter_path"]
        [file] = (Path(home) / "rl" / "runs").glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        of_levels = held_out_accuracy(Path(adapter))
    made = Run(
        way=way,
        seed=seed,
        zero_variance=[line["groups/zero_variance_fraction"] for line in lines],
        reward=[line["reward/mean"] for line in lines],
        accuracy=fmean(of_levels),
        of_levels=of_levels,
    )
    if len(made.reward) != STEPS:
        raise RuntimeError(f"{way}, seed {seed}: {len(made.reward)} steps where {STEPS} were asked")
    progress(f"{way}, seed {seed}: without signal {made.share:.3f}, held-out {made.accuracy:.3f}")
    return made


def held_out_accuracy(adapter: Path | None) -> list[float]:
    """Of each level, with the base model alone for None."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    return [
        fmean(chance(model, tokenizer, one.text, str(one.answer)) for one in evaluation_problems(level, PROBLEMS))
        for level in LEVELS
    ]


def chance(model: Any, tokenizer: Any, problem: str, answer: str) -> float:
    """That exactly this answer is sampled at temperature 1, its end included."""
    import torch

    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(asked, add_special_tokens=False)
    said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1].float()
    logprobs_T = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(said)[:, None])
    return math.exp(float(logprobs_T.sum()))


def keep(runs: Sequence[Run]) -> None:
    """What is known so far."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    content = {"levels": LEVELS, "steps": STEPS, "runs": [asdict(one) for one in runs]}
    (OUTPUT / "runs.json").write_text(json.dumps(content, indent=1) + "\n")


def draw(runs: Sequence[Run]) -> None:
    """Means over seeds as curves."""
    import plotext

    texts = []
    for title, name in (("groups without signal", "zero_variance"), ("mean reward of what was asked", "reward")):
        figure = plotext.figure
        figure.clear()
        figure.plot_size(90, 18)
        figure.title(f"{title} (o: none, +: item_value)")
        figure.label("step", "x")
        for way, marker in zip(WAYS, "o+", strict=True):
            curves = [getattr(one, name) for one in runs if one.way == way]
            means = [fmean(values) for values in zip(*curves, strict=True)]
            figure.draw(figure.signal(list(range(1, len(means) + 1)), means, marker=marker))
        texts.append(str(figure.build().string(colorless=True)).rstrip("\n"))
    (OUTPUT / "curves.txt").write_text("\n\n".join(texts) + "\n")
    progress("\n\n".join(texts))


def judge(runs: Sequence[Run], base_of_levels: Sequence[float]) -> int:
    report = Report()
    of: Mapping[str, list[Run]] = {way: [one for one in runs if one.way == way] for way in WAYS}
    plain, chosen = of["none"], of["item_value"]
    base = fmean(base_of_levels)
    note = f"arithmetic, levels 1 to 3, {STEPS} steps, {len(plain)} seeds; means; theirs: none"
    shares = [fmean(one.share for one in several) for several in (chosen, plain)]
    report.compare("exploration: groups without signal", *shares, "share", SHARE_BAR, note)
    ends = [fmean(one.accuracy for one in several) for several in (chosen, plain)]
    levels = ", ".join(
        f"{way} {[round(fmean(values), 3) for values in zip(*(one.of_levels for one in of[way]), strict=True)]}"
        for way in WAYS
    )
    pairs = [one.accuracy - other.accuracy for one, other in zip(chosen, plain, strict=True)]
    note = f"{ends[0]:.3f} against {ends[1]:.3f}; base {base:.3f}; pairs {[round(one, 3) for one in pairs]}; by level: "
    report.within("exploration: held-out accuracy less none's", fmean(pairs), "accuracy", LOSS_BAR, note + levels)
    note = "held-out accuracy of none at the end; theirs: the base model"
    report.compare("exploration: something is learnt", ends[1], base, "accuracy", LEARNS_BAR, note)
    return report.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options = parser.parse_args()
    base_of_levels = held_out_accuracy(None)
    progress(f"held-out accuracy of the base model, by level: {[round(one, 4) for one in base_of_levels]}")
    runs: list[Run] = []
    for seed in options.seeds:
        for way in WAYS:
            runs.append(run(way, seed))
            keep(runs)
    draw(runs)
    return judge(runs, base_of_levels)


if __name__ == "__main__":
    sys.exit(main())
