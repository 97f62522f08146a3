"""The command line as a user types it: each test starts ``hermes-rl`` itself."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from hermes_rl_mcp import __version__

TIMEOUT_S = 200


def hermes_rl(environ: dict[str, str], *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", *args]
    return subprocess.run(
        command, env=environ, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_version_is_that_of_the_package(environ: dict[str, str]) -> None:
    done = hermes_rl(environ, "--version")
    assert (done.returncode, done.stdout) == (0, f"hermes-rl-mcp {__version__}\n")


def test_help_names_every_command_and_loads_nothing_heavy(environ: dict[str, str]) -> None:
    done = hermes_rl(environ, "--help")
    assert done.returncode == 0
    for command in ("demo", "doctor", "envs", "runs", "config"):
        assert command in done.stdout
    code = (
        "import sys, hermes_rl_mcp.cli.main\n"
        "heavy = {'mcp', 'pydantic', 'anyio', 'plotext', 'psutil', 'torch', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_key_from_stdin_lands_in_the_private_file_and_is_never_printed(environ: dict[str, str]) -> None:
    secret = "s3cr3t-value-of-a-key"
    outputs = [
        hermes_rl(environ, "config", "set", "WANDB_API_KEY", "-", stdin=secret + "\n"),
        hermes_rl(environ, "config", "get", "WANDB_API_KEY"),
        hermes_rl(environ, "config", "list"),
        hermes_rl(environ, "config", "list", "--json"),
        hermes_rl(environ, "doctor", "--json"),
    ]
    assert [done.returncode for done in outputs[:4]] == [0, 0, 0, 0]
    assert all(secret not in done.stdout + done.stderr for done in outputs)
    file = Path(environ["HERMES_HOME"]) / ".env"
    assert secret in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert hermes_rl(environ, "config", "unset", "WANDB_API_KEY").returncode == 0
    assert hermes_rl(environ, "config", "get", "WANDB_API_KEY").returncode == 1


def test_an_error_is_a_sentence_and_a_way_out_without_traceback(environ: dict[str, str]) -> None:
    done = hermes_rl(environ, "config", "set", "not a name", "x")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Error: 'not a name' is not a variable name." in done.stderr
    assert "What to do:" in done.stderr
    assert "Traceback" not in done.stderr
