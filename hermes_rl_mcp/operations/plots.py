"""Runs' curves as a picture: a child process draws it, since neither the server nor its libraries have numpy.

Pictures are cached by what they show. Several servers may draw, read and clean up at once: a caller has its bytes from
the child, never from a file that another one could have removed.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from anyio import to_thread

from hermes_rl_mcp import __version__
from hermes_rl_mcp.contracts.sections import PlotInfo
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, MissingExtraError
from hermes_rl_mcp.files import make_private_dir, read_file, write_atomic
from hermes_rl_mcp.operations.children import program_environ, run_helper, turn
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.redact import redact_text, secret_values

log = logging.getLogger(__name__)

CURVES = ("reward/mean", "eval/percent_correct", "train/percent_correct", "rollouts/length_mean", "train/loss")
"""Metrics that are drawn."""
MAX_RUNS = 7
"""Side by side in one picture: so many colours are told apart by everybody."""
PLOT_S = 40.0
"""From the call to the picture, waiting for the pictures of others included."""
_MAX_PNG_BYTES = 2 * 2**20
_PNG = b"\x89PNG\r\n\x1a\n"
_KEPT = 200
"""Pictures in the cache, of all runs; the oldest go."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(?:matplotlib|numpy)")


async def plot_info(context: Context, reader: RunReader) -> PlotInfo:
    """What a plot of the run would show, and where it is."""
    lines = await to_thread.run_sync(reader.metrics)
    curves = [name for name in CURVES if any(isinstance(line.get(name), int | float) for line in lines)]
    return PlotInfo(uri=f"rl://runs/{reader.record.run_id}/plot", steps=len(lines), curves=curves)


async def plot_png(context: Context, *readers: RunReader) -> bytes:
    """A PNG, 960 x 720, of reward, accuracy, length and loss over the steps, of one run or of several side by side.

    Drawn again only when a run has something new. Raises HermesRLError if it cannot be drawn.
    """
    if not 1 <= len(readers) <= MAX_RUNS:
        raise InvalidValueError(
            f"A picture of {len(readers)} runs cannot be drawn.", hint=f"Name 1 to {MAX_RUNS} runs."
        )
    cache = context.home.plot_cache
    picture = cache / await to_thread.run_sync(_name, context, readers)
    with anyio.move_on_after(PLOT_S):
        if (found := await to_thread.run_sync(_cached, picture)) is not None:
            return found
        async with turn(context.home.turns, "plot", 1):
            found = await to_thread.run_sync(_cached, picture)  # somebody else may have drawn it meanwhile
            if found is None:
                found = await _draw(context, readers)
                await to_thread.run_sync(_keep, picture, found)
        return found
    raise _not_drawn(f"not done within {PLOT_S:g} s; the machine is busy")


async def _draw(context: Context, readers: Sequence[RunReader]) -> bytes:
    folders = [str(context.home.run(reader.record.run_id).dir) for reader in readers]
    cache = context.home.plot_cache
    with suppress(OSError):  # on a full disk it may be there already
        await to_thread.run_sync(make_private_dir, cache / "matplotlib")
    environ = {
        **program_environ(context.home, context.operator.environ),
        "MPLCONFIGDIR": str(cache / "matplotlib"),  # its list of fonts, which takes seconds to make
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.plots", *folders, "-"]
    try:
        # Not in the folder that the server happens to be in: matplotlib would take settings from there.
        done = await run_helper(command, environ, cwd=cache, max_bytes=_MAX_PNG_BYTES)
    except OSError as error:
        raise _not_drawn(str(error)) from error
    if done.code == 0 and done.stdout.startswith(_PNG):
        return done.stdout
    if _MISSING.search(done.last_line):
        raise MissingExtraError("Drawing a plot", "train")
    said = redact_text(done.last_line, secret_values(context.operator.environ))[:300]
    raise _not_drawn(said or f"the drawing process ended with code {done.code}")


def _not_drawn(why: str) -> HermesRLError:
    return HermesRLError(f"The plot could not be drawn: {why}.", hint="The figures are in the metrics section.")


def _name(context: Context, readers: Sequence[RunReader]) -> str:
    """The run's id, or one id for these runs together, and a hash of all that the picture depends on."""
    digest = hashlib.sha256(__version__.encode())
    for reader in readers:
        record = reader.record
        paths = context.home.run(record.run_id)
        digest.update(f"\0{record.run_id} {record.status} {record.total_steps}".encode())
        for path in (paths.metrics, paths.env_metrics, paths.evaluation):
            digest.update(f" {_size(path)}".encode())
    ids = [reader.record.run_id for reader in readers]
    together = ids[0] if len(ids) == 1 else "c" + hashlib.sha256(" ".join(ids).encode()).hexdigest()[:8]
    return f"{together}-{digest.hexdigest()[:16]}.png"


def _cached(picture: Path) -> bytes | None:
    try:
        found = read_file(picture, _MAX_PNG_BYTES)
    except OSError:
        return None
    return found if found.startswith(_PNG) else None


def _keep(picture: Path, drawn: bytes) -> None:
    """Older pictures of the same runs go, and of all others those beyond _KEPT. A cache: errors are only logged."""
    try:
        make_private_dir(picture.parent)
        write_atomic(picture, drawn)
        together = picture.name.partition("-")[0]
        others = sorted(_ages(picture), reverse=True)
        stale = [path for _, path in others if path.name.startswith(f"{together}-")]
        for path in {*stale, *(path for _, path in others[_KEPT - 1 :])}:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the picture %s could not be kept: %s", picture.name, error)


def _ages(picture: Path) -> Iterator[tuple[int, Path]]:
    """All other pictures, each with when it was made."""
    for path in picture.parent.glob("*.png"):
        with suppress(FileNotFoundError):  # another server cleans up as well
            if path.name != picture.name:
                yield path.stat().st_mtime_ns, path


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
