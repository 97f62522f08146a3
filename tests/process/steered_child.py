"""A scripted child that does nothing of its own accord: ``steered_child.py ROLE KNOBS.json [the usual arguments]``.

Besides the knobs of ``fake_child.py`` it obeys the lines of ``RUN/orders_ROLE``, at whatever point of its life it is:

  step                    trainer: one more line in metrics.jsonl
  complete [CODE|hang]    trainer: the remaining steps and the completion record; then that exit code, or none at all
  fail                    a report of failure, exit code 1
  exit CODE               nothing but that exit code
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import fake_child

BROKEN = "steered_child_broken"
"""File in the run's directory that says how this program failed; then the test means nothing."""
_POLL_S = 0.02


class SteeredChild(fake_child.Child):
    """Obeys orders in a thread of its own; the main thread behaves as the knobs say."""

    steps = 0

    def run(self) -> int:
        threading.Thread(target=self.obey, daemon=True).start()
        return super().run()

    def train(self) -> int:
        return fake_child.wait_for_ever()

    def obey(self) -> None:
        try:
            self.obey_for_ever()
        except BaseException:
            (self.run_dir / BROKEN).write_text(traceback.format_exc())
            raise

    def obey_for_ever(self) -> None:
        orders = self.run_dir / f"orders_{self.role}"
        done = 0
        while True:
            lines = orders.read_text().splitlines() if orders.exists() else []
            for line in lines[done:]:
                self.carry_out(*line.split())
            done = len(lines)
            time.sleep(_POLL_S)

    def carry_out(self, order: str, *arguments: str) -> None:
        total = self.config["env"]["total_steps"]
        if order == "step" and self.steps < total:
            self.take_step()
        elif order == "complete":
            while self.steps < total:
                self.take_step()
            self.report("completed", total)
            if arguments != ("hang",):
                os._exit(int(arguments[0]) if arguments else 0)
        elif order == "fail":
            self.report("failed", self.steps, error="It was told to fail.")
            os._exit(1)
        elif order == "exit":
            os._exit(int(arguments[0]))

    def take_step(self) -> None:
        self.steps += 1
        line = {"step": self.steps, "time": datetime.now(UTC).isoformat(), "reward/mean": 0.5}
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    fake_child.Child = SteeredChild  # type: ignore[misc]
    sys.exit(fake_child.main())
