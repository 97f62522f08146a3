"""``python -P -m trainer.wandb_child``: the only process that loads wandb, so nothing of it can hold the trainer.

Reads JSON lines from standard input: first ``{"settings": {...}}``, then ``{"step": n, "values": {...}}`` per step; the
end of input ends the W&B run. Writes JSON lines to standard output: ``{"state": ..., "url": ..., "error": ...}``.
Where W&B cannot be reached, or refuses the key, the run is kept in W&B's offline format. Invariant: some seconds after
its input ended the process is gone, whatever W&B does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

INIT_TIMEOUT_S = 30
"""W&B's own is 90 s; its metrics wait meanwhile, training does not."""
LEAVE_S = 30.0
"""From the end of input to leaving without W&B's consent; the trainer waits less than this."""


def main() -> int:
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever W&B prints goes to the log
    lines = iter(sys.stdin)
    first = next(lines, None)
    if first is None:
        return 0

    def say(**values: str | None) -> None:
        print_line(said, values)

    try:
        _forward(json.loads(first)["settings"], lines, say)
    except Exception as error:  # noqa: BLE001  whatever W&B raises is reported to the trainer's log and status
        say(state="failed", error=_sentence(error))
        for _ in lines:  # keep the pipe empty, so that the trainer never finds it full
            pass
    _leave_in_time()
    return 0


def print_line(stream: IO[str], values: dict[str, str | None]) -> None:
    stream.write(json.dumps(values) + "\n")
    stream.flush()


def _forward(settings: dict[str, Any], lines: Iterator[str], say: Callable[..., None]) -> None:
    import wandb

    common = {**settings, "tags": ["trainer"], "save_code": False}
    quiet = {"silent": True, "console": "off", "init_timeout": INIT_TIMEOUT_S}
    try:
        run = wandb.init(**common, settings=wandb.Settings(**quiet))
        offline, why = bool(getattr(run, "offline", False)), None
    except Exception as error:  # noqa: BLE001  no key, a wrong one, no network: each has a class of its own
        why = _sentence(error)
        say(state="connecting", error=f"offline: {why}")
        wandb.teardown()
        run = wandb.init(**common, mode="offline", settings=wandb.Settings(**quiet))
        offline = True
    folder = os.path.dirname(str(run.dir))
    kept = f"offline{f': {why}' if why else ''}; send it later with: wandb sync {folder}"
    say(state="offline" if offline else "online", url=getattr(run, "url", None), error=kept if offline else None)
    for line in lines:
        step = json.loads(line)
        run.log(step["values"], step=step["step"])
    _leave_in_time()
    run.finish()
    say(state="finished", url=getattr(run, "url", None), error=kept if offline else None)


def _sentence(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:300]


def _leave_in_time() -> None:
    timer = threading.Timer(LEAVE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
