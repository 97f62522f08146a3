"""Which calls need a person's word, and what the person is asked. Asks nobody itself: see ``server/asking.py``.

Invariant: a question is the same text for as long as the same would be done. In a protocol without sessions the call
comes again with the answer, and an answer counts only for the question that is put together then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hermes_rl_mcp.contracts.estimates import Estimate
from hermes_rl_mcp.contracts.runs import PROGRAM, Identity, RunRecord, Starter
from hermes_rl_mcp.contracts.settings import OperatorLimits
from hermes_rl_mcp.runs.process import identity_of, is_alive

GIB = 2**30


@dataclass(frozen=True)
class Caller:
    """An MCP client, as it names itself. No secret proves the name: it tells clients apart, it keeps nobody out."""

    client: str
    version: str = ""


def starter(caller: Caller | None) -> Starter:
    """What is kept with a run that ``caller`` starts from this process; None: a program or a person at a shell."""
    here = identity_of(os.getpid())
    return Starter(client=caller.client, version=caller.version, server=here) if caller else _program(here)


def _program(here: Identity | None) -> Starter:
    return Starter(client=PROGRAM, server=here)


def is_anothers(by: Starter | None, caller: Caller | None, alive: Callable[[Identity], bool] = is_alive) -> bool:
    """Whether what ``by`` started belongs to somebody else than ``caller``.

    Another name is another client. Under the same name it is another one only while the server that it spoke to still
    runs elsewhere: a server that its client started anew finds its own runs, and two windows of one program are two.
    A person at a shell (no caller) answers for themselves, and of old runs nobody knows whose they are.
    """
    if by is None or caller is None:
        return False
    if by.client != caller.client:
        return True
    return by.server is not None and by.server != identity_of(os.getpid()) and alive(by.server)


def stop_question(record: RunRecord | None, run_id: str, by: Starter, caller: Caller) -> str:
    """Of a run that goes on and is another's."""
    what = f" ({record.environment} on {record.base_model})" if record else ""
    return (
        f"Stop run {run_id}{what}? {_whose(by, caller)} The trainer writes a checkpoint first, from which the run can "
        "be continued."
    )


def stop_export_question(run_id: str, name: str, by: Starter, caller: Caller) -> str:
    """Of an export that goes on and is another's."""
    return f"Stop the export {name} of run {run_id}? {_whose(by, caller)}"


def overwrite_question(path: str, made: str) -> str:
    """Of an export that is there already. ``made``: when it was."""
    return f"Replace the export of {made} in {path}? It is made again from the same checkpoint."


def start_question(limits: OperatorLimits, estimate: Estimate) -> str | None:
    """Of a start whose estimate is beyond a soft ceiling; None if it is beyond none."""
    seconds, gpu = estimate.total_seconds, estimate.gpu_memory_bytes
    wanted = [
        ("hours", seconds and seconds / 3600, limits.ask_hours, "ask_hours"),
        ("GiB of disk", estimate.disk_bytes / GIB, limits.ask_disk_gib, "ask_disk_gib"),
        ("GiB of GPU memory", gpu and gpu / GIB, limits.ask_gpu_memory_gib, "ask_gpu_memory_gib"),
    ]
    over = [
        f"{_rough(value)} {unit} (asked above {ceiling:g}: {name})"
        for unit, value, ceiling, name in wanted
        if value is not None and ceiling is not None and value > ceiling
    ]
    return f"Start a run that is estimated to take about {', '.join(over)}?" if over else None


def _whose(by: Starter, caller: Caller) -> str:
    name = f"{by.client} {by.version}".strip()
    if by.client != caller.client:
        return f"It was started by {name}, not by {caller.client}."
    return f"It was started by another {name}, whose server still runs."


def _rough(value: float) -> str:
    """Two digits: an estimate that is made again may differ in the third."""
    return f"{float(f'{value:.2g}'):g}"
