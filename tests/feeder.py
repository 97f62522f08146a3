"""An environment that plays a recording: ``feeder.py RECORDING.jsonl [the usual arguments]``.

It posts the recorded groups in order to the run's real rollout API, a few ahead of the trainer, beginning behind those
that the API has received already, also in a journal of an earlier run; so every run gets the very same batches. It
posts no more of them than ``RECORDING.jsonl.most`` says, if there is such a file: then a run gets no further.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

AHEAD_GROUPS = 5
MOST = ".most"


def most() -> float:
    try:
        return int(Path(sys.argv[1] + MOST).read_text())
    except FileNotFoundError:
        return math.inf


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    recording = Path(sys.argv[1]).read_text().splitlines()
    config: dict[str, Any] = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    with httpx.Client(base_url=config["env"]["rollout_server_url"], trust_env=False) as http:
        group_size = config["env"]["group_size"]
        body = {"max_token_length": 16, "desired_name": "feeder", "weight": 1.0, "group_size": group_size}
        while (reply := http.post("/register-env", json=body).json())["status"] != "success":
            time.sleep(0.05)
        health = http.get("/health").json()
        for number, line in list(enumerate(recording, 1))[health["groups_received"] :]:
            while number > most() or http.get("/health").json()["queue_size"] > AHEAD_GROUPS:
                time.sleep(0.005)
            sent = http.post("/scored_data", content=line, headers={"Content-Type": "application/json"})
            assert sent.status_code == 200, sent.text
        while True:  # as an environment does that has nothing left to make
            http.get("/status-env", params={"env_id": reply["env_id"]})
            time.sleep(1)


if __name__ == "__main__":
    main()
