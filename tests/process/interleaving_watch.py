"""What must hold of runs at every moment, whatever happens to their processes and servers.

``Watch`` looks at files and processes itself, without the product's reader, which may close lost runs. A look is no
snapshot of one instant; so what seems wrong is looked at again before it counts.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from steered_child import BROKEN

from hermes_rl_mcp.contracts.runs import ChildReport, Event, Identity, RunRecord, RunStatus, has_ended
from hermes_rl_mcp.paths import RUN_ID, Home
from hermes_rl_mcp.runs.process import identity_of, is_alive
from hermes_rl_mcp.runs.state import MOVES, UnreadableRecordError, read_record

SETTLE_S = 60.0
"""For a process that a killed supervisor had just started: nobody knows of it, but it sees its lifeline end. Generous,
for a busy machine; a process that nobody ends lives for minutes."""
_SECOND_LOOK_S = 0.1
"""A process that was just forked shows its parent's command line for an instant."""
_ONE = ("supervisor", "trainer")
STEERED = "steered_child.py"


class Violated(AssertionError):
    """An invariant does not hold."""


class Seen(NamedTuple):
    """A live process of a run."""

    identity: Identity
    run_id: str
    role: str


@dataclass
class Acknowledged:
    """A start, by the order in which starts were asked for and answered."""

    run_id: str
    sent: int
    answered: int


@dataclass
class Watch:
    """Invariants of one home. ``check`` raises Violated."""

    home: Home
    signal_log: Path
    closed: dict[str, bytes] = field(default_factory=dict)
    """Records that were terminal when first seen, byte for byte."""
    shown: dict[str, str] = field(default_factory=dict)
    """Terminal states that a server has told."""
    keys: dict[str, str] = field(default_factory=dict)
    """Run that each idempotency key gave."""
    starts: list[Acknowledged] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Runs whose supervisor was killed or never was."""
    first_events: dict[str, list[Event]] = field(default_factory=dict)

    def run_ids(self) -> list[str]:
        folder = self.home.runs
        return sorted(path.name for path in folder.iterdir() if RUN_ID.match(path.name)) if folder.is_dir() else []

    def check(self) -> None:
        records = {run_id: self.record(run_id) for run_id in self.run_ids()}
        self.one_supervisor_per_run_and_one_trainer_per_device()
        for run_id, record in records.items():
            broken = self.home.run(run_id).dir / BROKEN
            assert not broken.exists(), broken.read_text()
            self.events_are_whole(run_id)
            if record.status.terminal:
                self.a_closed_record_stays(run_id)
                self.its_end_had_a_cause(record)
                self.nothing_of_a_closed_run_lives(record)
        self.queued_runs_start_in_order()
        self.signals_reach_only_the_runs()

    def record(self, run_id: str) -> RunRecord:
        try:
            return read_record(self.home.run(run_id))
        except UnreadableRecordError as error:
            raise Violated(f"{run_id}: {error}") from None

    # ---- processes

    def processes(self) -> list[Seen]:
        """Live processes of all runs of this home, supervisors included."""
        found = []
        for process in psutil.process_iter():
            try:
                environ, cmdline = process.environ(), process.cmdline()
            except psutil.Error:
                continue
            if environ.get("HERMES_HOME") != str(self.home.root):
                continue
            identity = identity_of(process.pid)
            if identity is None or not is_alive(identity):
                continue
            if marker := environ.get("HERMES_RL_RUN_ID"):
                found.append(Seen(identity, marker.partition(".")[0], _role(cmdline)))
            elif folder := [part for part in cmdline if Path(part).parent == self.home.runs]:
                found.append(Seen(identity, Path(folder[0]).name, "supervisor"))
        return found

    def one_supervisor_per_run_and_one_trainer_per_device(self) -> None:
        if _too_many(found := self.processes()):
            time.sleep(_SECOND_LOOK_S)
            later = self.processes()
            if message := _too_many([one for one in found if one in later]):
                raise Violated(message)

    def nothing_of_a_closed_run_lives(self, record: RunRecord) -> None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            left = [one for one in self.processes() if one.run_id == record.run_id]
            left = [one for one in left if one.identity.pid not in record.leftover_pids]
            if not left:
                return
            if time.monotonic() > deadline:
                raise Violated(f"{record.run_id} is {record.status}, but there live {left}")
            time.sleep(0.05)

    def signals_reach_only_the_runs(self) -> None:
        lines = self.signal_log.read_text().splitlines() if self.signal_log.exists() else []
        for sent in map(json.loads, lines):
            who = f"the supervisor of {sent['by']}" if sent["by"] else "a server"
            if sent["forbidden"]:
                raise Violated(f"{who} wanted to signal init, every process or itself: {sent}")
            if sent["target"] is None:
                continue
            if sent["by"]:
                if sent["target"]["cmdline"] and not sent["target"]["marker"].startswith(f"{sent['by']}."):
                    raise Violated(f"{who} signalled a process that is not of its run: {sent}")
            elif not self._is_ours(sent["target"]):
                raise Violated(f"a server signalled a process that is not of a run: {sent}")

    def _is_ours(self, target: dict[str, Any]) -> bool:
        known = self.run_ids()
        supervises = any(Path(part).parent == self.home.runs for part in target["cmdline"])
        return supervises or target["marker"].partition(".")[0] in known or not target["cmdline"]

    # ---- records

    def a_closed_record_stays(self, run_id: str) -> None:
        text = self.home.run(run_id).record.read_bytes()
        first = self.closed.setdefault(run_id, text)
        if text != first:
            raise Violated(f"{run_id} had ended, and its record changed from {first!r} to {text!r}")

    def its_end_had_a_cause(self, record: RunRecord) -> None:
        if record.status is RunStatus.COMPLETED:
            self.completion_is_proven(record)
        if record.status is RunStatus.STOPPED and not self.home.run(record.run_id).stop_request.exists():
            raise Violated(f"{record.run_id} is stopped, and nobody asked for it")
        if record.status is RunStatus.INTERRUPTED and record.supervisor and record.run_id not in self.lost:
            raise Violated(f"{record.run_id} is interrupted, and nobody killed its supervisor")

    def completion_is_proven(self, record: RunRecord) -> None:
        try:
            path = self.home.run(record.run_id).report("trainer")
            report = ChildReport.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise Violated(f"{record.run_id} is completed without the trainer's record: {error}") from None
        trainer = record.processes["trainer"]
        if report.status != "completed" or not (trainer.exit_code == 0 or trainer.forced):
            raise Violated(f"{record.run_id} is completed, but its trainer said {report} and went as {trainer}")

    def events_are_whole(self, run_id: str) -> None:
        record = self.record(run_id)  # before its events: whoever sees a state finds the reason for it
        lines = self.home.run(run_id).events.read_text().splitlines()
        events = [Event.model_validate_json(line) for line in lines]
        if [event.seq for event in events] != list(range(1, len(events) + 1)):
            raise Violated(f"{run_id}: events have gaps or repeats: {[event.seq for event in events]}")
        ends = [event for event in events if event.status.terminal]
        if len(ends) > 1 or (ends and ends[0] is not events[-1]):
            raise Violated(f"{run_id} ended more than once, or went on after its end: {lines}")
        if record.status.terminal and (not ends or ends[0].status is not record.status):
            raise Violated(f"{run_id} is {record.status}, which no event says: {lines}")
        for before, after in itertools.pairwise(events):
            if after.status is not before.status and after.status not in MOVES[before.status]:
                raise Violated(f"{run_id}: {before.status} became {after.status}: {lines}")
        first = self.first_events.setdefault(run_id, events)
        if events[: len(first)] != first:
            raise Violated(f"{run_id}: its history was rewritten: {lines}")
        self.first_events[run_id] = events

    def a_server_showed(self, statuses: dict[str, str], *, fresh: bool) -> None:
        """What a server once told of the end of a run stays true. ``fresh``: asked after all that was shown before."""
        for run_id, status in statuses.items():
            ended = has_ended(status)
            if (ended or fresh) and (before := self.shown.get(run_id, status)) != status:
                raise Violated(f"{run_id} was shown as {before}, and later as {status}")
            if ended:
                self.shown[run_id] = status
        if fresh and (lost := self.shown.keys() - statuses.keys()):
            raise Violated(f"runs are not listed any more: {lost}")

    def a_key_gave(self, key: str, run_id: str) -> None:
        if self.keys.setdefault(key, run_id) != run_id:
            raise Violated(f"the key {key} gave run {self.keys[key]}, and later {run_id}")

    # ---- queue

    def queued_runs_start_in_order(self) -> None:
        """Of two starts, one answered before the other was asked for, the first has the device first."""
        for one in self.starts:
            for other in self.starts:
                if one.answered < other.sent and (other_began := self._began(other.run_id)):
                    began = self._began(one.run_id)
                    overtaken = other_began.time < began.time if began else self._still_waits(one.run_id)
                    if overtaken:
                        raise Violated(f"run {other.run_id} had the device before {one.run_id}, which came first")

    def _began(self, run_id: str) -> Event | None:
        return next((e for e in self.first_events.get(run_id, []) if e.status is RunStatus.STARTING), None)

    def _still_waits(self, run_id: str) -> bool:
        record = self.record(run_id)
        alive = record.supervisor is not None and is_alive(record.supervisor)
        return alive and record.status is RunStatus.QUEUED


def _too_many(found: list[Seen]) -> str:
    holders = [f"run {one.run_id}" if one.role == "supervisor" else "the device" for one in found if one.role in _ONE]
    roles = [one.role for one in found if one.role in _ONE]
    twice = [what for what, count in Counter(zip(roles, holders, strict=True)).items() if count > 1]
    return f"more than one live {twice[0][0]} for {twice[0][1]}: {found}" if twice else ""


def _role(cmdline: list[str]) -> str:
    """The argument that the rig gives to each scripted child; nothing for what such a child started."""
    script = next((i for i, part in enumerate(cmdline) if part.endswith(STEERED)), None)
    return "descendant" if script is None else cmdline[script + 1]
