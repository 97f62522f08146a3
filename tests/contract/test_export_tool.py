"""An export that a tool started: one program, its state on disk for every server, ended by a tool, never by accident.

That a real export gives the trained weights is in tests/process/test_export.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import mcp.types as t
import psutil
import pytest
from many_runs import fill
from mcp import Client
from mcp_rig import Tools, in_memory

from hermes_rl_mcp.contracts.exports import ExportRequest
from hermes_rl_mcp.contracts.records import ExportCheck, ExportRecord
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.process import end_all, marked
from hermes_rl_mcp.server.app import build_server

RUN, STEP = "00000001", 3
NAME = f"step-{STEP}-adapter"
pytestmark = pytest.mark.anyio


@pytest.fixture
def home(environ: dict[str, str]) -> Iterator[Home]:
    """With one completed run. Its weights are no weights, so that every export of it fails after a moment."""
    home = Home.from_environ(environ)
    fill(home, 1, steps=STEP, log_bytes=100)
    yield home
    for path in home.run(RUN).exports.glob("*.json"):
        end_all(marked(ExportRequest.model_validate_json(path.read_text()).mark), term_s=1, kill_s=5)


def program(home: Home) -> psutil.Process:
    """The one that exports."""
    request = ExportRequest.model_validate_json((home.run(RUN).exports / f"{NAME}.json").read_text())
    found = [one.pid for one in marked(request.mark)]
    [pid] = [one for one in found if os.getsid(one) == one]  # not what it has just started to ask for something
    return psutil.Process(pid)


async def frozen(call: Tools, home: Home) -> psutil.Process:
    """Starts an export and stops the clock of its program, so that a slow test sees it at work."""
    assert (await call("rl_start_training", export_of=RUN))["export"]["status"] == "running"
    found = program(home)
    found.send_signal(signal.SIGSTOP)
    return found


async def ended(call: Tools) -> dict[str, Any]:
    with anyio.fail_after(250):
        while True:
            [export] = (await call("rl_get_results", run_id=RUN))["exports"]
            if export["status"] != "running":
                found: dict[str, Any] = export
                return found
            await anyio.sleep(0.05)


def earlier_export(folder: Path) -> Path:
    """As an export leaves it, as far as it is looked at."""
    folder.mkdir(parents=True)
    zeros = dict.fromkeys(ExportCheck.model_fields, 0)
    record = ExportRecord(
        run_id=RUN,
        step=STEP,
        policy_version=STEP,
        format="adapter",
        dtype="float32",
        base_model="builtin:tiny",
        base_sha256="0" * 64,
        created_at="2026-01-01T00:00:00+00:00",
        check=ExportCheck.model_validate(zeros),
        files={},
    )
    (folder / "export.json").write_text(record.model_dump_json())
    return folder


async def test_one_that_fails_says_why_and_what_to_do_and_can_be_tried_again(
    environ: dict[str, str], home: Home
) -> None:
    async with in_memory(environ) as call:
        answer = await call("rl_start_training", export_of=RUN)
        assert (answer["run_id"], answer["status"], answer["export"]["name"]) == (RUN, "completed", NAME)
        assert "rl_get_results" in answer["message"]
        export = await ended(call)
        assert export["status"] == "failed" and export["error"] and export["hint"]
        log = home.run(RUN).exports / f"{NAME}.log"
        said = log.read_text()
        assert export["log"] == str(log)
        assert f"Error: {export['error']}\n" in said and f"What to do: {export['hint']}" in said
        assert log.stat().st_mode & 0o077 == 0
        assert export["path"] == str(home.exports / f"{RUN}-{NAME}") and not list(home.exports.iterdir())
        again = await call.raw("rl_start_training", {"export_of": RUN})
        assert again.structured_content and again.structured_content["export"]["requested_at"] > export["requested_at"]
        text = await call.raw("rl_get_results", {"run_id": RUN})
        assert isinstance(text.content[0], t.TextContent) and f"export {NAME} (adapter)" in text.content[0].text


async def test_it_belongs_to_no_server_is_never_begun_twice_and_is_ended_with_what_it_left(
    environ: dict[str, str], home: Home
) -> None:
    async with in_memory({**environ, "WANDB_API_KEY": "k" * 40}) as call, in_memory(environ) as other:
        process = await frozen(call, home)
        assert os.getsid(process.pid) == process.pid, "what ends this server's session does not end it"
        assert "WANDB_API_KEY" not in process.environ()
        begun = (await other("rl_start_training", export_of=RUN))["export"]
        assert (begun["status"], program(home).pid) == ("running", process.pid), "the same one"
        left = home.exports / f".{RUN}-{NAME}.partial-xyz"
        left.mkdir()
        process.send_signal(signal.SIGCONT)
        assert f"{NAME} is stopped" in (await other("rl_stop_training", run_id=RUN))["message"]
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        assert not left.exists()
        assert (await ended(call))["status"] == "stopped"
        assert (await call("rl_stop_training", run_id=RUN))[
            "message"
        ] == "Run '00000001' is not running (status: completed)."


async def test_one_whose_program_was_killed_is_failed_and_not_for_ever_running(
    environ: dict[str, str], home: Home
) -> None:
    async with in_memory(environ) as call:
        process = await frozen(call, home)
        process.kill()
        export = await ended(call)
        assert (export["status"], export["hint"]) == ("failed", "See its log, then start it again.")
        assert export["error"]


async def test_an_earlier_export_is_replaced_and_anothers_is_ended_only_with_a_persons_word(
    environ: dict[str, str], home: Home
) -> None:
    folder = earlier_export(home.exports / f"{RUN}-{NAME}")
    async with Client(
        build_server(Operations.from_environ(environ)), client_info=t.Implementation(name="theirs", version="1")
    ) as theirs:
        call = Tools(theirs, (await theirs.list_tools()).tools)
        error = await call.error("rl_start_training", export_of=RUN)
        assert str(folder) in error["question"] and "2026-01-01" in error["question"]
        assert "confirm=true" in error["hint"]
        assert not list(home.run(RUN).exports.glob("*.json"))
        answer = await call("rl_start_training", export_of=RUN, confirm=True)
        assert answer["export"]["status"] == "running"
        process = program(home)
        process.send_signal(signal.SIGSTOP)
        assert "--force" in process.cmdline()
        async with in_memory(environ) as mine:
            refused = await mine.error("rl_stop_training", run_id=RUN)
            assert "theirs" in refused["question"] and NAME in refused["question"]
            assert process.is_running()
            process.send_signal(signal.SIGCONT)
            assert "stopped" in (await mine("rl_stop_training", run_id=RUN, confirm=True))["message"]
        assert (folder / "export.json").is_file(), "what it would have replaced"
        [export] = (await call("rl_get_results", run_id=RUN))["exports"]
        assert export["status"] == "stopped", "the earlier one is not taken for it"


async def test_what_cannot_be_exported_is_refused_with_a_way_on(environ: dict[str, str], home: Home) -> None:
    folder = home.exports / f"{RUN}-{NAME}"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    async with in_memory({**environ, "PATH": "/nowhere"}) as call:
        assert "HERMES_RL_PATH" in (await call.error("rl_start_training", export_of=RUN, export_format="gguf"))["hint"]
        for confirm in (False, True):
            error = await call.error("rl_start_training", export_of=RUN, confirm=confirm)
            assert "no earlier export" in error["error"] and "Move it away" in error["hint"]
        assert "not found" in (await call.error("rl_start_training", export_of="ffffffff"))["error"]
        for further in ({"dry_run": True}, {"resume_from": RUN}, {"idempotency_key": "once"}):
            assert "export_of" in (await call.error("rl_start_training", export_of=RUN, **further))["error"]
        request = home.run(RUN).request
        kept = request.read_text()
        request.unlink()
        assert "damaged or gone" in (await call.error("rl_start_training", export_of=RUN))["error"]
        request.write_text(kept)
        for checkpoint in home.run(RUN).checkpoints.glob("*/complete.json"):
            checkpoint.unlink()
        assert "no complete checkpoint" in (await call.error("rl_start_training", export_of=RUN))["error"]
        assert (await call("rl_get_results", run_id=RUN))["exports"] == []
    assert (folder / "thesis.txt").read_text() == "years of work"
