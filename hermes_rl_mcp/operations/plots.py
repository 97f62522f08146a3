"""A run's curves as a picture: a child process draws it, since neither the server nor its libraries have numpy."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import anyio
from anyio import to_thread

from hermes_rl_mcp.contracts.sections import PlotInfo
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.files import make_private_dir, read_file
from hermes_rl_mcp.operations.children import helper_environ
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader

CURVES = ("reward/mean", "eval/percent_correct", "train/percent_correct", "rollouts/length_mean", "train/loss")
"""Metrics that are drawn."""
_DRAW_S = 30
_MAX_PNG_BYTES = 2 * 2**20


async def plot_info(context: Context, reader: RunReader) -> PlotInfo:
    """What a plot of the run would show, and where it is."""
    lines = await to_thread.run_sync(reader.metrics)
    curves = [name for name in CURVES if any(isinstance(line.get(name), int | float) for line in lines)]
    return PlotInfo(uri=f"rl://runs/{reader.record.run_id}/plot", steps=len(lines), curves=curves)


async def plot_png(context: Context, reader: RunReader) -> bytes:
    """A PNG of reward, accuracy, length and loss over the steps; drawn again only when there are new steps.

    Raises HermesRLError if it cannot be drawn.
    """
    paths = context.home.run(reader.record.run_id)
    size = await to_thread.run_sync(_size, paths.metrics)
    name = hashlib.sha256(f"{reader.record.run_id} {size} {reader.status}".encode()).hexdigest()[:16]
    picture = context.home.rl / "cache" / "plots" / f"{reader.record.run_id}-{name}.png"
    if not picture.is_file():
        await to_thread.run_sync(make_private_dir, picture.parent)
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.plots", str(paths.dir), str(picture)]
        with anyio.move_on_after(_DRAW_S) as deadline:
            done = await anyio.run_process(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                env=helper_environ(context.home, context.operator.environ),
            )
        if deadline.cancelled_caught or done.returncode != 0:
            said = "" if deadline.cancelled_caught else done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise HermesRLError(
                f"The plot could not be drawn: {'; '.join(said) or f'not done within {_DRAW_S} s'}.",
                hint="The figures are in the metrics section.",
            )
    return await to_thread.run_sync(read_file, picture, _MAX_PNG_BYTES)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
