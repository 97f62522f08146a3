"""``hermes-rl runs prune`` as a user types it, beside a run that goes on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from process_rig import Rig
from test_cli_commands import hermes_rl

pytestmark = pytest.mark.anyio


def on_terminal(environ: dict[str, str], answer: str, *args: str) -> tuple[int, str]:
    """The exit code and what was printed, for a person who types ``answer``."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", *args]
    with subprocess.Popen(command, env=environ, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        os.close(theirs)
        os.write(ours, answer.encode() + b"\n")
        printed = run.communicate(timeout=200)[0].decode()
    os.close(ours)
    return run.returncode, printed


async def test_fi_41_old_runs_go_when_somebody_says_so_and_a_live_run_is_never_touched(rig: Rig) -> None:
    ended = await rig.start()
    await rig.end(ended)
    live = await rig.start({"trainer": {"hold_at": 1}})
    await rig.running(live)

    shown = hermes_rl(rig.environ, "runs", "prune", "--older-than", "0s", "--dry-run")
    assert shown.returncode == 0 and ended in shown.stdout
    assert live not in shown.stdout, (rig.store.get(live).error, rig.explain(live))
    assert "1 of 2 runs" in shown.stdout
    unasked = hermes_rl(rig.environ, "runs", "prune", "--max-size", "0")
    assert unasked.returncode == 1 and "--yes" in unasked.stderr
    code, printed = on_terminal(rig.environ, "n", "runs", "prune", "--max-size", "0")
    assert code == 1 and "Nothing was deleted" in printed
    assert rig.paths(ended).dir.is_dir()

    code, printed = on_terminal(rig.environ, "y", "runs", "prune", "--max-size", "0")
    assert code == 0 and "1 runs deleted" in printed
    assert f"{live} " in printed and "it goes on" in printed  # why there is still more than was asked for
    assert not rig.paths(ended).dir.exists()
    assert rig.store.get(live).status.value == "running"
    again = hermes_rl(rig.environ, "runs", "prune", "--older-than", "0s", "--yes")
    assert again.returncode == 0 and "Nothing to delete: 1 runs" in again.stdout

    rig.go(live)
    await rig.end(live)
    done = hermes_rl(rig.environ, "runs", "prune", "--older-than", "0s", "--yes")
    assert done.returncode == 0 and not rig.paths(live).dir.exists()
    assert not [path for path in rig.home.logs.iterdir() if live in path.name]


async def test_what_is_no_age_or_size_or_says_nothing_is_refused_with_an_example(environ: dict[str, str]) -> None:
    for arguments, example in (
        ([], "--older-than 30d"),
        (["--older-than", "30"], "30d"),
        (["--older-than", "-1d"], "30d"),
        (["--max-size", "10X"], "10G"),
    ):
        done = hermes_rl(environ, "runs", "prune", *arguments, "--yes")
        assert done.returncode == 1 and example in done.stderr
    assert hermes_rl(environ, "runs", "prune", "--older-than", "1.5h", "--max-size", "10GiB", "--yes").returncode == 0
