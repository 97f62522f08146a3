"""``python -P -m hermes_rl_mcp.runs RUN_DIR``: the detached supervisor process of one run.

It stays alone with its run: it never returns to the shell it came from, and without the run's lock it does nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import anyio

from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.runs.supervisor import Supervisor

_LOCK_TIMEOUT_S = 1.0
"""A reader that probes the lock holds it for an instant; longer means another supervisor."""


def main() -> int:
    """Exit code 0 once the run's end is on record, 1 if there is no way to write it, 4 if its directory was deleted."""
    parser = argparse.ArgumentParser(prog="python -m hermes_rl_mcp.runs", description="Carry out one run.")
    parser.add_argument("run_dir", type=Path, help="HOME/rl/runs/RUN_ID")
    parser.add_argument("--lock-fd", type=int, help="descriptor of supervisor.lock, locked by the launcher")
    arguments = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # its lines would carry the secret path prefix
    run_dir: Path = arguments.run_dir.absolute()
    home = Home(run_dir.parents[2])
    paths = home.run(run_dir.name)
    if arguments.lock_fd is not None:
        lock = locks.adopt(paths.supervisor_lock, arguments.lock_fd)
    elif (taken := locks.take(paths.supervisor_lock, timeout_s=_LOCK_TIMEOUT_S)) is not None:
        lock = taken
    else:
        parser.exit(3, f"{run_dir}: another supervisor carries out this run\n")
    try:
        request = RunRequest.model_validate_json(read_file(paths.request))
        supervisor = Supervisor(home, request, RunState.load(paths), dict(os.environ))
        status = anyio.run(supervisor.run)
        logging.getLogger(__name__).info("run %s: %s", request.run_id, status or "its directory was deleted")
    except OSError as error:  # its children are gone; a reader closes the record once that can be done
        logging.getLogger(__name__).error("run %s could not be closed: %s", run_dir.name, error)
        return 1
    finally:
        lock.release()
    return 0 if status else 4


if __name__ == "__main__":
    sys.exit(main())
