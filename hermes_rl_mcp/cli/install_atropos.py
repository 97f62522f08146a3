"""``hermes-rl install-atropos``: a virtual environment in which environments written for Atropos can run.

Invariant: a half-made virtual environment is never taken for a whole one, however the installation ended.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hermes_rl_mcp.errors import InvalidValueError, PreflightError
from hermes_rl_mcp.files import make_private_dir, write_atomic
from hermes_rl_mcp.paths import Home

REQUIREMENTS = (
    "atroposlib==0.4.0",
    "transformers>=5.24,<6",
    "pydantic>=2.12,<3",
    "httpx>=0.28,<1",
    "pyyaml>=6,<7",
)
"""The library, and what the product's own side of such an environment imports."""


def install(home: Home, further: list[str]) -> Path:
    """Makes or completes the home's virtual environment for Atropos; returns its Python. ``further`` are requirements
    of the environments themselves. Raises PreflightError, InvalidValueError for a strange word."""
    for word in further:
        if word.startswith("-"):
            raise InvalidValueError(f"{word!r} is no package.", hint="Name packages, such as gymnasium.")
    folder, python = home.atropos_venv, home.atropos_python
    fresh = not home.atropos_installed.is_file()
    try:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
            make_private_dir(folder.parent)
            _run([sys.executable, "-P", "-m", "venv", str(folder)], "The virtual environment could not be made")
        _run([str(python), "-P", "-m", "pip", "install", *REQUIREMENTS, *further], "pip could not install everything")
        _run([str(python), "-P", "-c", "import atroposlib.envs.base, httpx, yaml"], "atroposlib cannot be imported")
        write_atomic(home.atropos_installed, "\n".join([*REQUIREMENTS, *further, ""]))
    except BaseException:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return python


def _run(command: list[str], otherwise: str) -> None:
    """The program's own words go to stderr as they come."""
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
    except OSError as error:
        raise PreflightError(f"{otherwise}: {error}.", hint="Check HERMES_HOME and its permissions.") from error
    if code:
        raise PreflightError(
            f"{otherwise} (exit code {code}).",
            hint="What it said stands above. About 1 GB of disk and a package index are needed.",
        )
