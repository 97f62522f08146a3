"""Every bench of this folder, one after the other: ``all.py [--only step zero]``, which is what ``make bench`` runs.

Each is a process of its own. Only JSON lines reach stdout, the last one a summary; everything else goes to stderr. The
exit status is 1 if a bar was missed or a bench failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import emit, progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of file names; default all")
    only = parser.parse_args().only
    scripts = sorted(Path(__file__).parent.glob("bench_*.py"))
    scripts = [script for script in scripts if not only or any(part in script.name for part in only)]
    lines: list[dict[str, Any]] = []
    failed: list[str] = []
    began = time.monotonic()
    for script in scripts:
        progress(f"== {script.name}")
        found, code = run(script)
        lines += found
        if code not in (0, 1) or (code == 1 and all(line.get("ok") for line in found)):
            failed.append(script.name)
    missed = [line["bench"] for line in lines if not line["ok"]]
    ok = not missed and not failed
    seconds = round(time.monotonic() - began)
    emit({"bench": "summary", "lines": len(lines), "missed": missed, "failed": failed, "seconds": seconds, "ok": ok})
    return 0 if ok else 1


def run(script: Path) -> tuple[list[dict[str, Any]], int]:
    """Its lines, passed on as they come, and its exit status."""
    lines = []
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            try:
                line = json.loads(text)
            except ValueError:
                progress(text.rstrip())
                continue
            emit(line)
            lines.append(line)
    return lines, process.returncode


if __name__ == "__main__":
    sys.exit(main())
