"""What runs is the text that is on disk now."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hermes_rl_mcp.envs.loading import load_environment

SOURCE = """
from hermes_rl_mcp.envs import BaseEnv

class Own(BaseEnv):
    level = {level}
"""


def test_an_edit_within_the_second_and_of_the_same_size_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # whatever the shell says
    path = tmp_path / "own_levels.py"
    seen = []
    for level in (1, 7):
        path.write_text(SOURCE.format(level=level))
        os.utime(path, (1_000_000_000, 1_000_000_000))  # all that Python's own cache would compare
        seen.append(load_environment(str(path)).__dict__["level"])
    assert seen == [1, 7]
