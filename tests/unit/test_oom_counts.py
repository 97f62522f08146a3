"""Evidence of the kernel for a killed process, in both generations of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl_mcp.runs.oom import OomKills, count


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/user/run", "user/run/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 9\n"),
        ("0::/", "memory.events", "oom_kill 2\n"),
        ("4:cpu,memory:/jobs/a", "memory/jobs/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_kills_of_the_machine_and_of_the_own_control_group_are_counted(
    tmp_path: Path, line: str, file: str, text: str
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 5\nswap_ra 0\n")
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    (cgroups / file).parent.mkdir(parents=True, exist_ok=True)
    (cgroups / file).write_text(text)
    assert count(proc, cgroups) == (5, 2)
    assert count(proc, cgroups).since(OomKills(4, 2)).words == (
        "the kernel counted 1 out-of-memory kill meanwhile, 0 in the run's own control group"
    )


def test_counters_that_are_not_there_or_did_not_move_are_no_evidence(tmp_path: Path) -> None:
    assert count(tmp_path, tmp_path) == (0, 0)
    assert OomKills(3, 1).since(OomKills(3, 1)).words == ""
