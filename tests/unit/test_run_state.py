"""The state machine: terminal states absorb, and nobody overwrites what he has not seen."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.runs import Event, RunRequest, RunStatus
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs.reconcile import reconcile
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import MOVES, RunState, StateConflictError, UnreadableRecordError, read_record

S = RunStatus


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = Home(tmp_path).run("0123abcd")
    paths.dir.mkdir(parents=True)
    return paths


def create(paths: RunPaths, status: RunStatus = S.QUEUED) -> RunState:
    request = RunRequest(
        run_id=paths.run_id,
        created_at="2026-01-01T00:00:00+00:00",
        environment="e",
        env_file="/e.py",
        env_class="E",
        env_sha256="",
        profile="local",
        base_model="builtin:tiny",
        model_path="/m",
        tokenizer_name="/m",
        env={"total_steps": 2, "group_size": 2, "batch_size": 4, "max_token_length": 8},
        trainer=TrainerConfig(),
    )
    record = first_record(Home(paths.dir.parents[2]), request)
    return RunState.create(paths, record.model_copy(update={"status": status}), "created")


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_only_the_drawn_moves_are_possible(paths: RunPaths, before: RunStatus, after: RunStatus) -> None:
    state = create(paths, before)
    if after in MOVES[before]:
        state.move(after, "test")
        assert read_record(paths).status is after
        return
    with pytest.raises(StateConflictError):
        state.move(after, "test")
    assert read_record(paths).status is before


def test_terminal_states_absorb(paths: RunPaths) -> None:
    assert all(not MOVES[status] for status in S if status.terminal)
    assert all(MOVES[status] for status in S if not status.terminal)
    state = create(paths)
    state.move(S.FAILED, "test", error="broken")
    with pytest.raises(StateConflictError, match="closed"):
        state.update(detail="late")


def test_a_write_over_an_unseen_revision_is_refused_and_changes_nothing(paths: RunPaths) -> None:
    first = create(paths)
    second = RunState.load(paths)
    first.update(detail="by the first")
    with pytest.raises(StateConflictError, match="revision"):
        second.move(S.FAILED, "by the second")
    assert read_record(paths) == first.record
    assert len(paths.events.read_text().splitlines()) == 1


def test_every_write_raises_the_revision_and_an_unchanged_update_writes_nothing(paths: RunPaths) -> None:
    state = create(paths)
    assert state.record.revision == 1
    state.update(detail="a")
    state.update(detail="a")
    state.update_process("api", ready=True)
    assert read_record(paths).revision == 3 and read_record(paths).processes["api"].ready


def test_events_are_numbered_on_over_a_change_of_writer(paths: RunPaths) -> None:
    create(paths).note("n")
    RunState.load(paths).move(S.STARTING, "go")
    events = [Event.model_validate_json(line) for line in paths.events.read_text().splitlines()]
    assert [(event.seq, event.reason) for event in events] == [(1, "created"), (2, "n"), (3, "go")]
    assert events[-1].status is S.STARTING


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "missing"),
        ("", "damaged"),
        ('{"run_id": "0123abcd"', "damaged"),
        ('{"schema_version": 99, "new": true}', "schema version 99"),
        ("\x00\xff", "damaged"),
    ],
)
def test_a_record_that_cannot_be_read_says_why_and_is_left_alone(
    paths: RunPaths, text: str | None, reason: str
) -> None:
    if text is not None:
        paths.record.write_text(text, encoding="latin-1")
    with pytest.raises(UnreadableRecordError, match=reason):
        read_record(paths)
    assert not paths.record.exists() if text is None else paths.record.read_text(encoding="latin-1") == text


def test_a_known_record_of_a_later_version_or_another_run_is_refused(paths: RunPaths) -> None:
    state = create(paths)
    paths.record.write_text(state.record.model_copy(update={"schema_version": 2}).model_dump_json())
    with pytest.raises(UnreadableRecordError, match="schema version 2"):
        read_record(paths)
    paths.record.write_text(state.record.model_copy(update={"run_id": "ffffffff"}).model_dump_json())
    with pytest.raises(UnreadableRecordError, match="that of run ffffffff"):
        read_record(paths)


@pytest.mark.parametrize("end", [S.COMPLETED, S.STOPPED, S.FAILED, S.INTERRUPTED])
def test_a_writer_that_dies_between_the_last_event_and_the_record_is_believed_and_the_run_ends_once(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, end: RunStatus
) -> None:
    state = create(paths, S.STOPPING)
    state.update(error="what had happened" if end is S.FAILED else None)

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as at_the_write, pytest.raises(KeyboardInterrupt):
        at_the_write.setattr("hermes_rl_mcp.runs.state.write_atomic", killed)
        state.move(end, "judged")
    assert read_record(paths).status is S.STOPPING
    closed = reconcile(paths, read_record(paths))
    assert closed.status is end is read_record(paths).status and closed.ended_at is not None
    assert bool(closed.error) == (end in (S.FAILED, S.INTERRUPTED))
    events = [Event.model_validate_json(line) for line in paths.events.read_text().splitlines()]
    assert [event.status for event in events] == [S.STOPPING, end]
    assert [event.seq for event in events] == [1, 2]
