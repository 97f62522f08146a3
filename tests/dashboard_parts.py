"""A home with runs as people meet them: one under way, one completed, one failed; and texts that want to be markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from run_parts import run_request

from hermes_rl_mcp.contracts.records import ArmScore, Evaluation, Preview, RolloutLine, TrainerSummary
from hermes_rl_mcp.contracts.runs import ChildReport, Event, Identity, ProcessRecord, RunRecord, RunStatus
from hermes_rl_mcp.contracts.vitals import Vitals
from hermes_rl_mcp.files import now
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.runconfig import first_record

NOBODY = Identity(pid=2**22 + 1, started_at=0.0, boot_id="no boot of this machine")
"""In place of a process: a pid that no system gives."""
GOING, COMPLETED, FAILED = "a1b2c3d4", "60aa11bb", "dead0001"
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\x1b[2J\x00 {{7*7}} javascript:alert(3)"
STEPS = [
    json.loads(line)
    for line in Path(__file__).with_name("unit").joinpath("arithmetic_60_steps.jsonl").read_text().splitlines()
]
VALUES = {"total_steps": 60, "group_size": 8, "batch_size": 64, "max_token_length": 16}


def completed(home: Home) -> None:
    """Sixty steps, with evaluation, preview and rollouts."""
    record = _run(home, COMPLETED, "arithmetic", RunStatus.COMPLETED, 60, hours_ago=5.0)
    paths = home.run(COMPLETED)
    base = ArmScore(accuracy=0.37, low=0.31, high=0.44, policy_version=0)
    adapter = ArmScore(accuracy=0.83, low=0.77, high=0.88, policy_version=60)
    verdict = "improved by 0.46, 95% interval 0.38 to 0.53"
    paths.evaluation.write_text(
        Evaluation(
            status="completed",
            step=60,
            items=10,
            repeats=19,
            base=base,
            adapter=adapter,
            difference=0.46,
            low=0.38,
            high=0.53,
            verdict=verdict,
        ).model_dump_json()
    )
    summary = TrainerSummary(
        steps=60,
        policy_version=60,
        adapter_path=str(paths.checkpoints / "step_60" / "adapter"),
        base_model="builtin:tiny",
        model_path="m",
        reward_first5=0.48,
        reward_last5=0.87,
        preview=Preview(prompt="4+2=", before="It is 6", after="6"),
    )
    report = ChildReport(
        process="trainer", status="completed", step=60, finished_at=now(), detail=summary.model_dump(mode="json")
    )
    paths.report("trainer").write_text(report.model_dump_json())
    _log(home, record, "step {step}: reward 0.5")


def failed(home: Home, text: str = "the trainer ended with code 1: CUDA out of memory") -> None:
    record = _run(home, FAILED, "gsm8k", RunStatus.FAILED, 7, hours_ago=30.0, error=text, hint="Lower batch_size.")
    _log(home, record, "Traceback (most recent call last): step {step}")


@contextmanager
def going(home: Home, *, steps: int = 34, text: str = "", flags: bool = False) -> Iterator[None]:
    """A run that goes on as far as readers can tell: this process holds its supervisor's lock. ``text`` stands wherever
    others may write."""
    waiting = text or "the environment waits for answers of the trainer"
    record = _run(home, GOING, "arithmetic", RunStatus.RUNNING, steps, hours_ago=0.01, text=text)
    (home.run(GOING).vitals).write_text(
        Vitals(time=now(), step=steps, running_seconds=20, waiting=waiting).model_dump_json()
    )
    if flags:
        _truncate(home)
    _log(home, record, "12:00:00 INFO step {step}: reward 0.5 ", text)
    lock = locks.take(home.run(GOING).supervisor_lock)
    assert lock is not None
    try:
        yield
    finally:
        lock.release()


def step(home: Home, number: int) -> None:
    """One more step of the run that goes on."""
    with home.run(GOING).metrics.open("a") as file:
        file.write(json.dumps(STEPS[number - 1]) + "\n")


def _run(
    home: Home,
    run_id: str,
    environment: str,
    status: RunStatus,
    steps: int,
    *,
    hours_ago: float,
    text: str = "",
    **changes: Any,
) -> RunRecord:
    began = datetime.now(UTC) - timedelta(hours=hours_ago)
    request = run_request(run_id, environment=text or environment, env=VALUES, created_at=began.isoformat())
    paths = home.run(run_id)
    paths.dir.mkdir(parents=True)
    home.logs.mkdir(parents=True, exist_ok=True)
    ended = (began + timedelta(minutes=1)).isoformat() if status.terminal else None
    processes = {
        name: ProcessRecord(
            log=str(home.log(name, run_id)),
            identity=None if status.terminal else NOBODY,
            ready=not status.terminal,
            exit_code=0 if status.terminal else None,
        )
        for name in ("api", "trainer", "env")
    }
    record = RunRecord.model_validate(
        {
            **first_record(home, request).model_dump(),
            "status": status,
            "detail": text,
            "running_since": began.isoformat(),
            "running_seconds": 36.0,
            "ended_at": ended,
            "processes": processes,
            **changes,
        }
    )
    paths.request.write_text(request.model_dump_json())
    paths.record.write_text(record.model_dump_json())
    lines = [{**line, f"reward/{text}": 1.0} if text else line for line in STEPS[:steps]]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths.rollouts.write_text("".join(_rollouts(number, text) for number in range(1, steps + 1)))
    reasons = ("asked for", "device free", "all three processes are ready")
    states = (RunStatus.QUEUED, RunStatus.STARTING, RunStatus.RUNNING)
    events = [
        Event(seq=index + 1, time=began.isoformat(), status=state, reason=text or reason)
        for index, (state, reason) in enumerate(zip(states, reasons, strict=True))
    ]
    if status.terminal:
        events.append(Event(seq=4, time=ended or "", status=status, reason=text or "after the last step"))
    paths.events.write_text("".join(event.model_dump_json() + "\n" for event in events))
    return record


def _rollouts(number: int, text: str) -> str:
    found = []
    for group in range(4):
        a, b = (number + group) % 7 + 1, group + 2
        for index, answer in enumerate((str(a + b), f"It is {a + b}")):
            reward = 1.0 - 0.9 * index
            line = RolloutLine(
                step=number,
                group=group,
                policy_version=max(0, number - 1 - group % 2),
                prompt=f"{a}+{b}= {text}".strip(),
                completion=f"{answer} {text}".strip(),
                reward=reward,
                reward_parts={"correct": 1.0, "format": 1.0 - index},
                advantage=0.45 - 0.9 * index,
                tokens=len(answer),
                finish_reason="stop" if group != 3 else "length",
            )
            found.append(line.model_dump_json() + "\n")
    return "".join(found)


def _truncate(home: Home) -> None:
    """As if every answer had ended by length."""
    path = home.run(GOING).metrics
    lines = [{**json.loads(line), "rollouts/truncated_fraction": 1.0} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _log(home: Home, record: RunRecord, line: str, text: str = "") -> None:
    for process in ("api", "trainer", "env", "supervisor"):
        lines = "".join(f"{line.format(step=number)}{text}\n" for number in range(1, 61))
        home.log(process, record.run_id).write_text(lines)
