"""The home: is it private, what do its runs say, what did they leave behind, who has the ports. Reads only: a look at
a run whose supervisor is gone would close it, so records are read here without that."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import ValidationError

from hermes_rl_mcp.cli.findings import Finding
from hermes_rl_mcp.cli.text import printable
from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations.inference_records import TEST_ID, TestPaths, TestState
from hermes_rl_mcp.paths import RUN_ID, Home
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.process import MARKER, is_alive
from hermes_rl_mcp.runs.state import UnreadableRecordError, read_record

PORTS = (8000, 8001)
_SHOWN = 5
"""Of a list; the rest is counted."""


def folders(home: Home, claims: Path) -> Iterator[Finding]:
    """Writable, and closed to other users."""
    fix = "Set HERMES_HOME to a folder that you may write to."
    yield _writable("home folder", home.root, fix)
    private = [path for path in (home.rl, home.logs, home.env_file) if path.exists() and _others_may(path)]
    for path in private:
        mode = "600" if path == home.env_file else "700"
        yield Finding("privacy", "problem", f"other users can read {path}", f"Run: chmod {mode} {path}")
    if not private:
        yield Finding("privacy", "ok", "settings, runs and logs are readable by you alone")
    yield _claims(claims)


def _claims(folder: Path) -> Finding:
    fix = "Remove it, or set HERMES_RL_CLAIMS_DIR to a folder of your own with mode 700."
    if folder.exists():
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            return Finding("claims folder", "problem", f"{folder} is not yours alone, so no run can start", fix)
    return _writable("claims folder", folder, fix)


def _writable(name: str, folder: Path, fix: str) -> Finding:
    """Writes a file and takes it away again, in the folder or in the nearest parent that exists."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(name, "problem", f"{folder}: {error.strerror or error}", fix)
    return Finding(name, "ok", str(folder) if existing == folder else f"{folder} (will be made)")


def _others_may(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def runs(home: Home) -> Iterator[Finding]:
    """How many there are, which cannot be read, and which have lost their supervisor."""
    known, unreadable = _records(home)
    active = [record for record in known.values() if not record.status.terminal]
    lost = [record.run_id for record in active if not locks.is_held(home.run(record.run_id).supervisor_lock)]
    going = [record.run_id for record in active if record.run_id not in lost]
    text = f"{len(known)} on record" + (f"; going on: {_some(going)}" if going else "")
    yield Finding("runs", "ok", text)
    for run_id, reason in list(unreadable.items())[:_SHOWN]:
        fix = f"It keeps no other run from working. If you do not need it: rm -r {home.runs / run_id}"
        yield Finding("unreadable run", "warning", f"{run_id}: {printable(reason, 200)}", fix)
    if lost:
        fix = "hermes-rl runs list closes them and ends what is left of their processes."
        yield Finding("stale runs", "warning", f"without a supervisor: {_some(lost)}", fix)


def leftovers(home: Home) -> Iterator[Finding]:
    """Processes of runs of this home that are over, or that nobody knows. None is touched."""
    known, _ = _records(home)
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            value = environ.get(MARKER)
            if value is None or environ.get("HERMES_HOME") != str(home.root):
                continue
            run_id = value.partition(".")[0]
            record = known.get(run_id)
            if (record is not None and not record.status.terminal) or _test_goes_on(home, run_id):
                continue
            state = record.status.value if record is not None else "unknown"
            command = printable(" ".join(process.cmdline())[:120])
            found.append((process.pid, f"pid {process.pid} of run {run_id} ({state}): {command}"))
        except (psutil.Error, OSError):
            continue  # gone, a zombie, or another user's
    if not found:
        yield Finding("leftover processes", "ok", "none")
    for pid, text in found[:_SHOWN]:
        yield Finding("leftover process", "problem", text, f"Run: kill {pid} (then, if it stays: kill -9 {pid})")
    if len(found) > _SHOWN:
        rest = " ".join(str(pid) for pid, _ in found[_SHOWN:])
        yield Finding("leftover process", "problem", f"{len(found) - _SHOWN} more", f"Run: kill {rest}")


def _test_goes_on(home: Home, name: str) -> bool:
    """Whether this is an inference test (``test-<id>``) whose runner lives."""
    test_id = name.removeprefix("test-")
    if test_id == name or not TEST_ID.match(test_id):
        return False
    try:
        state = TestState.model_validate_json(read_file(TestPaths(home.inference_tests / test_id).state))
    except (OSError, ValidationError):
        return False
    return state.runner is not None and is_alive(state.runner)


def ports(home: Home) -> Iterator[Finding]:
    """8000 and 8001, which a run takes if they are free."""
    known, _ = _records(home)
    ours = {
        port: record.run_id
        for record in known.values()
        if record.ports is not None and not record.status.terminal
        for port in (record.ports.rollout_api, record.ports.trainer)
    }
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                holder = f"run {ours[port]}" if port in ours else _holder(port)
                yield Finding(f"port {port}", "ok", f"held by {holder}; a run takes the next free one")
            else:
                yield Finding(f"port {port}", "ok", "free")


def models(folder: Path) -> Iterator[Finding]:
    found = []
    for model in sorted(folder.glob("*/")) if folder.is_dir() else []:
        size = sum(f.stat().st_size for f in model.rglob("*") if f.is_file())
        found.append(f"{model.name} ({size / 1e6:.0f} MB)")
    yield Finding("embedded models", "ok", ", ".join(found) if found else f"none unpacked yet in {folder}")


def _records(home: Home) -> tuple[dict[str, RunRecord], dict[str, str]]:
    """Records by run id, and the reason for each that cannot be read."""
    known: dict[str, RunRecord] = {}
    unreadable: dict[str, str] = {}
    try:
        names = sorted(name for name in os.listdir(home.runs) if RUN_ID.match(name))
    except OSError:
        return {}, {}
    for run_id in names:
        try:
            known[run_id] = read_record(home.run(run_id))
        except UnreadableRecordError as error:
            unreadable[run_id] = str(error)
    return known, unreadable


def _holder(port: int) -> str:
    """Who listens there, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            here = connection.laddr.port if connection.laddr else None
            if connection.status == psutil.CONN_LISTEN and here == port and connection.pid:
                return f"{printable(psutil.Process(connection.pid).name(), 40)} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return "another program"


def _some(run_ids: list[str]) -> str:
    more = f" and {len(run_ids) - _SHOWN} more" if len(run_ids) > _SHOWN else ""
    return ", ".join(run_ids[:_SHOWN]) + more
