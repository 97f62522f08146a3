"""Windows of a log: whatever is asked for, byte by byte, no secret is put together again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl_mcp.operations.log_window import log_window

SHAPED, KNOWN = "sk-" + "Zq8Y" * 8, "known-secret-value"


@pytest.mark.parametrize("line", [f"key {SHAPED} end", f"Bearer {SHAPED[3:]}", f"my password={SHAPED[3:]} é", KNOWN])
def test_windows_that_cut_a_secret_show_no_part_of_it(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log"
    path.write_text(f"before é\n{line}\nafter\n")
    size = path.stat().st_size
    for limit in (1, 5, 16):
        text = "".join(log_window(path, offset, limit, [KNOWN]).text for offset in range(0, size, limit))
        assert "Zq8Y" not in text and "known" not in text
        assert text.startswith("before") and text.endswith("after\n")


def test_a_window_without_secrets_is_what_stands_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("step 1: reward 0.5\nstep 2 é\n")
    window = log_window(path, 7, 11, [])
    assert (window.text, window.offset, window.length, window.size) == (" reward 0.5", 7, 11, path.stat().st_size)
    assert log_window(path, -1, 3, []).text == "é\n"
