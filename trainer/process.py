"""What a process of this package sets up before it imports torch.

Invariant: idle compute threads sleep instead of spinning, so that they do not starve the other processes of a run; and
the thread that computes does not starve the one that answers requests.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import MutableMapping

_SWITCH_S = 5e-4
"""Longest turn of a thread that others wait for. With Python's 5 ms, and a small model whose operations hardly let go
of the interpreter, a request of a few steps waits longer to be read than it takes to be sampled."""


def prepare() -> MutableMapping[str, str]:
    """Logging to standard error and quiet defaults for the libraries. Returns the process's environment."""
    sys.setswitchinterval(_SWITCH_S)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpcore", "urllib3", "filelock"):  # httpx would log every poll, with the secret prefix
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # peft asks by an old name
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch loads its OpenMP runtime
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return os.environ
