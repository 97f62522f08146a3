"""Pictures of runs: drawn by a child, kept while they are new, and safe beside other servers."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
from plot_parts import drawn_run, evaluated, folder_of, learning, picture_size

from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, MissingExtraError
from hermes_rl_mcp.operations import plots
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.settings import load_settings

IDS = ("00000001", "00000002")


@pytest.fixture
def context(environ: dict[str, str]) -> Context:
    made = Context(load_settings(environ))
    for run_id in IDS:
        drawn_run(made.home, run_id, learning(12))
    return made


@pytest.mark.anyio
async def test_a_picture_is_drawn_once_and_replaced_when_the_run_has_something_new(
    context: Context, environ: dict[str, str]
) -> None:
    one, other = [await RunReader.open(context, run_id) for run_id in IDS]
    first: dict[int, bytes] = {}

    async def ask(number: int) -> None:  # as several servers would
        first[number] = await plots.plot_png(Context(load_settings(environ)), one)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(ask, number)
    [kept] = folder_of(context.home)
    assert {picture_size(picture) for picture in first.values()} == {(960, 720)}
    assert set(first.values()) == {kept.read_bytes()}
    made = kept.stat().st_mtime_ns
    assert await plots.plot_png(context, one) == first[0]
    assert kept.stat().st_mtime_ns == made

    together = await plots.plot_png(context, one, other)
    assert len(folder_of(context.home)) == 2
    evaluated(context.home.run(IDS[0]), 12)
    newer = await plots.plot_png(context, one)
    assert len({first[0], together, newer}) == 3
    assert kept not in folder_of(context.home)
    [kept] = [path for path in folder_of(context.home) if path.name.startswith(IDS[0])]
    assert len(folder_of(context.home)) == 2
    kept.write_bytes(b"damaged")
    assert await plots.plot_png(context, one) == newer
    assert kept.read_bytes() == newer


def test_a_full_cache_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_KEPT", 3)
    names = [f"0000000{n}-1.png" for n in range(5)]
    for age, name in enumerate(names):
        (tmp_path / name).write_bytes(b"old")
        os.utime(tmp_path / name, ns=(10**9 * age, 10**9 * age))
    plots._keep(tmp_path / "00000003-2.png", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003-2.png", "00000004-1.png"]


@pytest.mark.anyio
async def test_what_cannot_be_drawn_says_why(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = await RunReader.open(context, IDS[0])
    for readers in ((), (reader,) * 8):
        with pytest.raises(InvalidValueError, match="1 to 7"):
            await plots.plot_png(context, *readers)
    program = context.home.root / "python"
    monkeypatch.setattr(plots.sys, "executable", str(program))
    with pytest.raises(HermesRLError, match="could not be drawn"):
        await plots.plot_png(context, reader)
    for said, error in (
        ("echo ModuleNotFoundError: No module named \"'matplotlib'\" >&2; exit 1", MissingExtraError),
        ("echo not a picture; exit 0", HermesRLError),
    ):
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o700)
        with pytest.raises(error):
            await plots.plot_png(context, reader)
    assert folder_of(context.home) == []
    monkeypatch.setattr(plots, "PLOT_S", 0.2)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(HermesRLError, match=r"within 0\.2 s"):
        await plots.plot_png(context, reader)
