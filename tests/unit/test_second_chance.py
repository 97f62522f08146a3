"""What ``tests/run.py`` excuses: a failure beside other tests that does not come again alone, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parent.parent / "run.py"
FILE = """
import os
from pathlib import Path
import pytest

@pytest.fixture
def leaves_something(request):
    yield
    assert not Path("ERROR").exists()

def test_crowded():
    seen = Path("seen")
    before = seen.exists()
    seen.touch()
    assert before and not Path("DEFECT").exists()

def test_other(leaves_something):
    pass

def test_that_takes_its_worker_along():
    if Path("CRASH").exists() and not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(1)  # as a test that runs out of its time does
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("also", "arguments", "code", "says"),
    [
        ("", [], 0, "FAILED BESIDE OTHERS, PASSED ALONE"),
        ("DEFECT", [], 1, "1 failed in"),
        ("ERROR", [], 1, "1 error in"),
        ("CRASH", ["-n", "2", "--dist", "worksteal"], 0, "FAILED BESIDE OTHERS, PASSED ALONE"),
        ("", ["-x"], 1, "stopping after 1 failures"),
    ],
    ids=["crowd", "defect", "leftover", "worker-gone", "cut-short"],
)
def test_only_a_failure_that_does_not_come_again_is_excused(
    tmp_path: Path, also: str, arguments: list[str], code: int, says: str
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(RUNNER, tests)
    (tests / "test_some.py").write_text(FILE)
    if also:
        (tmp_path / also).touch()
    done = subprocess.run(
        [sys.executable, str(tests / "run.py"), "-q", "tests", *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert done.returncode == code, done.stdout
    assert says in done.stdout, done.stdout
    assert ("Once more" in done.stdout) == (also != "ERROR" and "-x" not in arguments)
