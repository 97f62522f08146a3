"""What a batch without signal costs the trainer: ``bench_zero_variance.py [--rounds 5]``.

The real loop with the real backend and SmolLM2-135M takes a group of 8 answers, then the same group with equal scores,
in turns. Compared is the time from the batch to its acknowledgement, without sampling, which is the same for both: so
the bar is stricter than one on whole steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from models import smollm2
from report import Report, cores, interleaved
from workers import workers

BAR = "<= 0.05"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=cores())
    options = parser.parse_args()
    folder, what = smollm2()
    arguments = [str(folder), "--new-tokens", str(options.new_tokens), "--threads", str(options.threads)]
    script = {"loop": (Path(__file__).parent / "step_ours.py", [*arguments, "--without-signal"])}
    normal: list[float] = []
    without: list[float] = []
    with workers(script, options.threads) as started:
        loop = started["loop"]

        def pair() -> str:
            """The child alternates: a step, then the batch without signal."""
            normal.append(loop.step()["after_sampling_s"])
            without.append(loop.step()["after_sampling_s"])
            return f"step {normal[-1]:.3f} s, without signal {without[-1]:.4f} s"

        interleaved({"pair": pair}, options.rounds, warm_ups=1, label="zero variance")
    report = Report()
    note = f"8 answers of {options.new_tokens} tokens, {what}; theirs: our normal training step"
    report.compare("batch of zero variance against a normal step", without[1:], normal[1:], "s", BAR, note)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
