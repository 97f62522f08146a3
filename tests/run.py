"""Runs pytest, and what failed once more by itself: ``run.py [ARGUMENTS OF PYTEST]``.

These tests drive real processes beside each other, on machines that others use too. A test that fails in that crowd and
passes alone is named at the end and does not fail the run; a defect fails twice. A test that ran out of its time took
its worker with it and counts as one that failed. Only a few failures are given that chance, and none when anything but
a test's own body failed (a process that outlived the tests is never excused), or when the run was told to end at a
failure: the tests behind it were not run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

FEW = 3
"""More failures than that are no accident."""
ROOT = Path(__file__).resolve().parent.parent
TESTS_FAILED = 1
_CRASHED = re.compile(r"worker '\w+' crashed while running ")
_ENDS_EARLY = re.compile(r"-[a-zA-Z]*x|--(exitfirst|maxfail|stepwise|sw)\b")
"""Arguments with which a run does not come to all tests."""


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report, cache = Path(folder, "report.xml"), Path(folder, "cache")
        code = _pytest(*arguments, f"--junit-xml={report}", "-o", f"cache_dir={cache}")
        failed = _failed(cache)
        if code != TESTS_FAILED or not 0 < len(failed) <= FEW or _errors(report) or _may_end_early(arguments):
            return code
        _say(f"Once more, by themselves: {', '.join(failed)}")
        code = _pytest(*failed, "-o", f"cache_dir={cache}")
        if code == 0:
            _say(f"FAILED BESIDE OTHERS, PASSED ALONE (the failure is shown above): {', '.join(failed)}")
        return code


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT).returncode


def _failed(cache: Path) -> list[str]:
    """Ids of the tests that failed; none where the run did not come to its end."""
    path = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _errors(report: Path) -> bool:
    """Whether something failed before or after a test: a fixture, the collection, the look for processes left over."""
    errors = ElementTree.parse(report).getroot().iter("error")
    return any(not _CRASHED.search(error.get("message", "")) for error in errors)


def _may_end_early(arguments: Sequence[str]) -> bool:
    return any(_ENDS_EARLY.match(argument) for argument in arguments)


def _say(text: str) -> None:
    sys.stderr.write(f"\n{text}\n\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
