"""``python -P -m trainer --config RUN/config.yaml``: the trainer and sampler process of one run.

Invariant: standard output stays silent; everything goes to the log on standard error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hermes_rl_mcp import lifeline
from trainer.process import prepare


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train a LoRA adapter from scored rollouts.")
    parser.add_argument("--config", type=Path, required=True, help="a run's config.yaml; results go beside it")
    parser.add_argument("--listen-fd", type=int, default=None, help="descriptor of a bound socket to serve on")
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint")
    options = parser.parse_args(arguments)
    lifeline.watch(prepare())
    from trainer.compose import run

    return run(options.config, options.listen_fd, resume=options.resume)


if __name__ == "__main__":
    sys.exit(main())
