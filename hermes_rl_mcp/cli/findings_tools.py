"""What agents' tools need and what of it is there: toolsets, and the engine of container sandboxes.

Invariant: nothing here is a problem. What an environment's policy cannot have is left out of its tools, and is said.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping

from hermes_rl_mcp.agent.toolbox import check_tool_availability, missing_tools
from hermes_rl_mcp.agent.toolsets import BUILTIN
from hermes_rl_mcp.cli.findings import Finding
from hermes_rl_mcp.cli.text import printable

_ENGINE_S = 10.0


def toolsets(effective: Mapping[str, str]) -> Iterator[Finding]:
    """One line for those that are whole, and one for each that lacks something and is not just made of others."""
    whole, _ = check_tool_availability(quiet=True, settings=effective)
    yield Finding("toolsets", "ok", f"whole: {', '.join(whole)}")
    for name, one in BUILTIN.sets.items():
        _, dropped = missing_tools(one.tools, effective)
        for reason in dict.fromkeys(dropped.values()):
            names = ", ".join(tool for tool, why in dropped.items() if why == reason)
            what = "all its tools" if len(dropped) == len(one.tools) else names
            yield Finding(f"toolset {name}", "ok", f"without {what}: {reason}")


def containers(effective: Mapping[str, str]) -> Finding:
    """Whether ``terminal_backend: docker`` can work."""
    program = shutil.which("docker", path=effective.get("PATH"))
    without = "needed for terminal_backend docker alone; local needs none"
    if program is None:
        return Finding("containers", "ok", f"docker is not in PATH; {without}")
    try:
        done = subprocess.run(
            [program, "version", "--format", "{{.Server.Version}}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ENGINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("containers", "ok", f"docker does not answer ({type(error).__name__}); {without}")
    if done.returncode:
        said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        return Finding("containers", "ok", f"docker has no engine: {printable(said, 200)}; {without}")
    return Finding("containers", "ok", f"docker {printable(done.stdout.strip(), 40)}")
