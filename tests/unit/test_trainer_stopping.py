"""What a signal does to the trainer at each stage of its life."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hermes_rl_mcp.paths import install_root

PROGRAM = """
import os, signal, sys
from trainer.stopping import StopSignal

stop = StopSignal()
stop.install()
for stage in sys.argv[1:]:
    getattr(stop, stage)()

class DiesLate:
    def __del__(self, kill=os.kill, pid=os.getpid(), term=signal.SIGTERM):
        kill(pid, term)

if "completed" in sys.argv:
    sys.late = DiesLate()  # goes after Python has taken its signal handlers away
else:
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(0 if stop.event.is_set() == (sys.argv[1:] == ["gracefully"]) else 1)
"""


@pytest.mark.parametrize(
    ("stages", "code"), [([], 128 + signal.SIGTERM), (["gracefully"], 0), (["gracefully", "completed"], 0)]
)
def test_a_signal_ends_a_starting_trainer_asks_a_training_one_and_does_nothing_to_one_that_has_completed(
    stages: list[str], code: int
) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *stages], cwd=install_root(), timeout=60, check=False)
    assert done.returncode == code
