"""Whose run it is, and what a person is asked: decided from what is on record, in words that stay the same."""

from __future__ import annotations

import os

import pytest

from hermes_rl_mcp.contracts.estimates import Estimate
from hermes_rl_mcp.contracts.runs import PROGRAM, Identity, Starter
from hermes_rl_mcp.contracts.settings import OperatorLimits
from hermes_rl_mcp.operations.asking import GIB, Caller, is_anothers, start_question, starter
from hermes_rl_mcp.runs.process import identity_of

MINE = Caller("mine", "1")
ELSEWHERE = Identity(pid=7, started_at=1.0, boot_id="b")
HERE = identity_of(os.getpid())


@pytest.mark.parametrize(
    ("by", "caller", "alive", "anothers"),
    [
        (Starter(client="theirs", server=ELSEWHERE), MINE, False, True),
        (Starter(client="theirs", server=HERE), MINE, True, True),
        (Starter(client=PROGRAM, server=ELSEWHERE), MINE, False, True),
        (Starter(client="mine", version="0", server=HERE), MINE, True, False),
        (Starter(client="mine", server=ELSEWHERE), MINE, False, False),
        (Starter(client="mine", server=ELSEWHERE), MINE, True, True),
        (Starter(client="mine"), MINE, True, False),
        (None, MINE, True, False),
        (Starter(client="theirs", server=ELSEWHERE), None, True, False),
    ],
    ids=[
        "another client whose server is gone",
        "another client of this server",
        "a program at a shell",
        "my own after an update",
        "my own after a restart of its server",
        "another window of mine",
        "mine and no server known",
        "of an earlier version",
        "a person at a shell stops it",
    ],
)
def test_whose_run_it_is(by: Starter | None, caller: Caller | None, alive: bool, anothers: bool) -> None:
    assert is_anothers(by, caller, alive=lambda identity: alive) is anothers


def test_what_is_started_here_is_ones_own_here() -> None:
    assert not is_anothers(starter(MINE), MINE)
    assert is_anothers(starter(MINE), Caller("theirs"))
    assert is_anothers(starter(None), MINE)


def estimated(hours: float | None, disk_gib: float = 1.0, gpu_gib: float | None = None) -> Estimate:
    return Estimate.model_construct(
        total_seconds=None if hours is None else hours * 3600,
        disk_bytes=int(disk_gib * GIB),
        gpu_memory_bytes=None if gpu_gib is None else int(gpu_gib * GIB),
    )


def test_a_question_names_every_ceiling_that_is_passed_and_stays_the_same_when_the_estimate_wavers() -> None:
    limits = OperatorLimits(ask_hours=2, ask_disk_gib=10, ask_gpu_memory_gib=20)
    assert start_question(limits, estimated(2, 10, 20)) is None
    assert start_question(OperatorLimits(), estimated(1e6, 1e6, 1e6)) is None
    assert start_question(limits, estimated(None)) is None
    question = start_question(limits, estimated(123.4, 30.04))
    assert question == (
        "Start a run that is estimated to take about 120 hours (asked above 2: ask_hours), "
        "30 GiB of disk (asked above 10: ask_disk_gib)?"
    )
    assert start_question(limits, estimated(123.9, 30.01)) == question
    assert "20.5 GiB" not in str(start_question(limits, estimated(1, 1, 20.6)))
    assert "21 GiB of GPU memory" in str(start_question(limits, estimated(1, 1, 20.6)))
