"""``hermes-rl install-atropos``: a virtual environment in which environments written for Atropos can run.

Invariant: after a failure there is no half-made virtual environment that the server would take for a whole one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hermes_rl_mcp.errors import InvalidValueError, PreflightError
from hermes_rl_mcp.files import make_private_dir

REQUIREMENTS = (
    "atroposlib==0.4.0",
    "transformers>=5.24,<6",
    "pydantic>=2.12,<3",
    "httpx>=0.28,<1",
    "pyyaml>=6,<7",
)
"""The library, and what the product's own side of such an environment imports."""


def install(folder: Path, further: list[str]) -> Path:
    """Makes or completes the virtual environment ``folder`` and returns its Python. ``further`` are requirements of the
    environments themselves. Raises PreflightError with the end of pip's words, InvalidValueError for a strange word."""
    for word in further:
        if word.startswith("-"):
            raise InvalidValueError(f"{word!r} is no package.", hint="Name packages, such as gymnasium.")
    python = folder / "bin" / "python"
    fresh = not python.is_file()
    try:
        if fresh:
            make_private_dir(folder.parent)
            _run([sys.executable, "-P", "-m", "venv", str(folder)], "The virtual environment could not be made")
        _run([str(python), "-P", "-m", "pip", "install", *REQUIREMENTS, *further], "pip could not install everything")
        _run([str(python), "-P", "-c", "import atroposlib.envs.base, httpx, yaml"], "atroposlib cannot be imported")
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
