"""Which Python runs an environment. One written for Atropos may have a Python of its own, with atroposlib in it.

Looked up at each start: installing atroposlib needs no restart of anything.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.paths import Home, install_root

ATROPOS_PYTHON = "HERMES_RL_ATROPOS_PYTHON"
"""Names the interpreter; otherwise the one of ``hermes-rl install-atropos``, otherwise the product's own."""


def environment_program(base: Literal["hermes_rl_mcp", "atroposlib"], environ: Mapping[str, str]) -> list[str]:
    """The command to which ``FILE:Class COMMAND ...`` is appended. Raises InvalidValueError for a Python that is not
    there."""
    if base == "atroposlib" and (python := atropos_python(environ)) is not None:
        bootstrap = install_root() / "hermes_rl_mcp" / "envs" / "community" / "bootstrap.py"
        return [str(python), "-P", str(bootstrap)]
    return [sys.executable, "-P", "-m", "hermes_rl_mcp.envs"]


def atropos_python(environ: Mapping[str, str]) -> Path | None:
    """None: atroposlib is expected beside the product itself. Raises InvalidValueError for a Python that is not there,
    or whose installation was not finished."""
    if named := environ.get(ATROPOS_PYTHON, "").strip():
        python = Path(named).expanduser()
        if not python.is_file():
            raise InvalidValueError(
                f"{ATROPOS_PYTHON} = {named!r} is no file.",
                hint="Name the bin/python of a virtual environment that has atroposlib, or unset it.",
            )
        return python
    home = Home.from_environ(environ)
    if not home.atropos_python.is_file():
        return None
    if not home.atropos_installed.is_file():
        raise InvalidValueError(
            f"The installation for environments written for Atropos was not finished ({home.atropos_venv}).",
            hint="Run: hermes-rl install-atropos",
        )
    return home.atropos_python
