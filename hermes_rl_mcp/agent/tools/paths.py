"""Paths and lines as the file tools share them. Invariant: no path is taken for an option or for shell code."""

from __future__ import annotations

from hermes_rl_mcp.agent.interfaces import CallContext

MAX_LINE_CHARS = 2000


def resolved(context: CallContext, path: str) -> str:
    """``~`` is the sandbox's home."""
    if path != "~" and not path.startswith("~/"):
        return path
    home = context.state.get("home")
    if home is None:
        done = context.sandbox().run('printf %s "$HOME"', timeout_s=30.0, limit_bytes=4096)
        home = context.state["home"] = done.output.decode(errors="replace") or context.sandbox().workdir
    return home + path[1:]


def operand(path: str) -> str:
    """A path that no program takes for an option."""
    return f"./{path}" if path.startswith("-") else path


def cut_line(line: str) -> str:
    """At most ``MAX_LINE_CHARS`` of a line, and how many more there are."""
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}... [{len(line) - MAX_LINE_CHARS} more]"
