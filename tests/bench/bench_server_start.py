"""How long a client waits for the server: from starting the process to the answer of tools/list. Bar: 1.2 s.

Medians of several starts, for both protocol eras in turns, and the size of what a model reads. The server is compiled,
as an installed one is: the first start, which may write byte code, is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

from report import Report, interleaved

STARTS = 7
BAR = "<= 1.2"
CLIENT = {"name": "bench", "version": "1"}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}
ERAS: dict[str, list[dict[str, Any]]] = {
    "2025-11-25": [
        {
            "id": 0,
            "method": "initialize",
            "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT},
        },
        {"method": "notifications/initialized"},
        {"id": 1, "method": "tools/list"},
    ],
    "2026-07-28": [{"id": 1, "method": "tools/list", "params": {"_meta": META}}],
}


def start(messages: list[dict[str, Any]], home: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds, and the tools."""
    environ = {**os.environ, "HERMES_HOME": home}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    before = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "hermes_rl_mcp.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for message in messages:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        process.stdin.flush()
        while True:
            answer = json.loads(process.stdout.readline())
            if answer.get("id") == 1:
                seconds = time.monotonic() - before
                process.stdin.close()
                return seconds, answer["result"]["tools"]


def main() -> int:
    report = Report()
    with tempfile.TemporaryDirectory() as home:
        ways = {era: partial(start, messages, home) for era, messages in ERAS.items()}
        found = interleaved(
            {era: lambda way=way: way()[0] for era, way in ways.items()}, STARTS, warm_ups=1, label="server start"
        )
        for era, times in found.items():
            note = f"worst {max(times):.2f} s"
            report.within(f"server: start to tools/list, {era}", times, "s", BAR, note)
        _, tools = start(ERAS["2025-11-25"], home)
        whole = len(json.dumps(tools))
        read = len(json.dumps([{k: v for k, v in tool.items() if k != "outputSchema"} for tool in tools]))
        report.within("server: tools/list", whole, "bytes", None, f"of which a model reads about {read}")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
