"""How often rl_check_status gives fresh metrics. The run is a real record whose supervisor lock this test holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from full_run import checkpoint
from live_run import LIMIT_S, RUN_ID, LiveRun

from hermes_rl_mcp.contracts.estimates import Estimate
from hermes_rl_mcp.contracts.records import METRIC_NAMES
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.contracts.vitals import EnvState, Vitals
from hermes_rl_mcp.errors import UnknownRunError
from hermes_rl_mcp.files import now, write_atomic
from hermes_rl_mcp.paths import Home


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(Home(tmp_path / "hermes"))
    yield live
    assert live.lock is not None
    live.lock.release()


@pytest.mark.anyio
async def test_within_the_limit_the_last_snapshot_is_repeated_also_by_another_server(run: LiveRun) -> None:
    run.step(1)
    first = await run.operations().check_status(RUN_ID)
    assert (first.status, first.metrics.step, first.rate_limited) == ("running", 1, False)
    assert (first.metrics.reward_mean, first.eta_seconds) == (0.1, 18.0)
    run.step(2)
    run.time += 600
    again = await run.operations().check_status(RUN_ID)
    assert again.rate_limited
    assert again.next_check_in_seconds == LIMIT_S - 600
    assert again.metrics == first.metrics
    assert again.message is not None
    assert "20 minutes" in again.message
    run.time += 1200
    fresh = await run.operations().check_status(RUN_ID)
    assert (fresh.rate_limited, fresh.metrics.step) == (False, 2)


@pytest.mark.anyio
async def test_a_change_of_state_comes_through_the_limit_and_a_run_that_ended_has_none(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    run.state.move(RunStatus.FAILED, "test", error="broke", hint="mend it")
    for _ in range(2):
        ended = await run.operations().check_status(RUN_ID)
        assert (ended.status, ended.error, ended.hint, ended.rate_limited) == ("failed", "broke", "mend it", False)


@pytest.mark.anyio
async def test_an_unknown_run_never_arms_the_limit(run: LiveRun) -> None:
    with pytest.raises(UnknownRunError) as error:
        await run.operations().check_status("ffffffff")
    assert error.value.payload["active_runs"] == [RUN_ID]
    assert not run.home.checks.exists()


@pytest.mark.anyio
async def test_a_clock_that_was_set_back_does_not_lock_the_user_out(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    run.time -= 10 * LIMIT_S
    assert not (await run.operations().check_status(RUN_ID)).rate_limited


@pytest.mark.anyio
async def test_a_damaged_note_of_the_last_check_is_ignored(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    (run.home.checks / f"{RUN_ID}.json").write_text("{")
    assert not (await run.operations().check_status(RUN_ID)).rate_limited


async def _waited(run: LiveRun, event: Callable[[], None]) -> Any:
    """Status as a long poll of 40 s gives it if ``event`` happens meanwhile."""
    notes: list[str] = []

    async def progress(done: float, total: float | None, message: str) -> None:
        notes.append(message)
        if len(notes) == 1:
            event()

    with anyio.fail_after(30):
        answer = await run.operations().check_status(RUN_ID, 40, progress)
    assert notes, "a wait says how it is going"
    return answer


@pytest.mark.anyio
async def test_waiting_ends_at_the_next_step(run: LiveRun) -> None:
    answer = await _waited(run, lambda: run.step(1))
    assert answer.metrics.step == 1


@pytest.mark.anyio
async def test_waiting_within_the_limit_ends_at_a_change_of_state(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    answer = await _waited(run, lambda: run.state.move(RunStatus.STOPPING, "test"))
    assert (answer.status, answer.rate_limited) == ("stopping", False)


@pytest.mark.anyio
async def test_waiting_sleeps_through_the_limit(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    run.step(1)

    def pass_time() -> None:
        run.time += LIMIT_S

    answer = await _waited(run, pass_time)
    assert (answer.metrics.step, answer.rate_limited) == (1, False)


@pytest.mark.anyio
async def test_waiting_within_the_limit_does_not_end_at_a_step(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    run.step(1)
    answer = await run.operations().check_status(RUN_ID, 1)
    assert answer.rate_limited
    assert answer.metrics.step is None


@pytest.mark.anyio
async def test_a_step_that_came_between_two_calls_is_shown_without_waiting(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    run.step(1)
    run.time += LIMIT_S
    with anyio.fail_after(30):
        assert (await run.operations().check_status(RUN_ID, 50)).metrics.step == 1


@pytest.mark.anyio
async def test_results_average_the_first_and_last_five_steps_and_thin_out_the_history(run: LiveRun) -> None:
    for number in range(1, 31):
        run.step(number)
    results = await run.operations().get_results(RUN_ID, max_points=4)
    assert [row.step for row in results.history] == [1, 11, 20, 30]
    assert results.reward_first5 == pytest.approx(0.3)
    assert results.reward_last5 == pytest.approx(2.8)
    assert results.final_metrics["step"] == 30
    assert (results.adapter_path, results.checkpoints, results.preview) == (None, [], None)


@pytest.mark.anyio
async def test_without_a_completion_record_the_newest_complete_checkpoint_gives_the_adapter(run: LiveRun) -> None:
    for step in (1, 2):
        checkpoint(run.paths.checkpoints, step)
    adapter = run.paths.checkpoints / "step_2" / "adapter"
    assert (await run.operations().get_results(RUN_ID)).adapter_path == str(adapter)


@pytest.mark.anyio
async def test_results_say_when_no_step_changed_the_model(run: LiveRun) -> None:
    for number in (1, 2, 3):
        run.step(number, **{"policy/version": 0})
    [flag] = (await run.operations().get_results(RUN_ID)).flags
    assert (flag.name, flag.severity) == ("adapter_not_moving", "error")
    assert "never changed" in flag.evidence
    run.step(4, **{"policy/version": 1})
    assert (await run.operations().get_results(RUN_ID)).flags == []


@pytest.mark.anyio
async def test_a_new_flag_comes_through_the_limit_once_and_one_that_goes_does_not(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    for number in (1, 2, 3):
        run.step(number, **{"rollouts/truncated_fraction": 1.0})
    told = await run.operations().check_status(RUN_ID)
    assert (told.rate_limited, [flag.name for flag in told.flags], told.metrics.step) == (False, ["all_truncated"], 3)
    again = await run.operations().check_status(RUN_ID)
    assert (again.rate_limited, [flag.name for flag in again.flags]) == (True, ["all_truncated"])
    run.step(4, **{"rollouts/truncated_fraction": 0.0})
    assert (await run.operations().check_status(RUN_ID)).rate_limited


@pytest.mark.anyio
async def test_a_stall_that_begins_and_one_that_ends_come_through_the_limit(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    run.state.update(stalled=True, stalled_reason="the trainer waits for the environment")
    told = await run.operations().check_status(RUN_ID)
    assert (told.stalled, told.rate_limited, [flag.name for flag in told.flags]) == (True, False, ["stalled"])
    assert told.flags[0].evidence == "the trainer waits for the environment"
    run.state.update(stalled=False, stalled_reason=None)
    over = await run.operations().check_status(RUN_ID)
    assert (over.stalled, over.rate_limited, over.flags) == (False, False, [])


@pytest.mark.anyio
async def test_waiting_within_the_limit_ends_at_a_new_flag_that_no_step_brings(run: LiveRun) -> None:
    await run.operations().check_status(RUN_ID)
    state = EnvState(time=now(), failed=3, unusable_in_a_row=3, first_error="RuntimeError: x", first_reason="failed")
    answer = await _waited(run, lambda: write_atomic(run.paths.env_state, state.model_dump_json()))
    assert [flag.name for flag in answer.flags] == ["groups_failing"]
    assert not answer.rate_limited
    listed = await run.operations().list_runs()
    assert (listed.runs[0].note or "").startswith("needs attention: groups_failing")


@pytest.mark.anyio
async def test_what_the_processes_wait_for_is_told(run: LiveRun) -> None:
    starting = Vitals(time=now(), waiting="waiting for the environment to register")
    write_atomic(run.paths.vitals, starting.model_dump_json())
    assert (await run.operations().check_status(RUN_ID)).waiting == "", "that was while it was starting"
    vitals = Vitals(time=now(), running_seconds=0.1, waiting="The trainer waits for the environment.")
    write_atomic(run.paths.vitals, vitals.model_dump_json())
    run.time += LIMIT_S
    assert (await run.operations().check_status(RUN_ID)).waiting == vitals.waiting
    run.state.move(RunStatus.FAILED, "test")
    assert (await run.operations().check_status(RUN_ID)).waiting == "", "a run that ended waits for nothing"


@pytest.mark.anyio
async def test_a_status_of_a_run_of_ten_thousand_steps_reads_only_their_end(run: LiveRun) -> None:
    line = json.dumps({"time": now(), **dict.fromkeys(METRIC_NAMES, 0.123456789)})[1:]
    run.paths.metrics.write_text("".join(f'{{"step": {number}, {line}\n' for number in range(1, 10_001)))
    assert run.paths.metrics.stat().st_size > 5_000_000
    operations = run.operations()
    await operations.check_status(RUN_ID)
    took_s = []
    for _ in range(5):
        run.time += LIMIT_S
        started = time.process_time()  # another process that takes the core must not fail this
        answer = await operations.check_status(RUN_ID)
        took_s.append(time.process_time() - started)
        assert (answer.metrics.step, answer.rate_limited) == (10_000, False)
    assert min(took_s) < 0.05, took_s


@pytest.mark.anyio
async def test_a_run_that_cannot_be_read_is_listed_and_hides_no_other(run: LiveRun) -> None:
    broken = run.home.run("fedcba98")
    broken.dir.mkdir()
    broken.record.write_text("{")
    listed = await run.operations().list_runs()
    assert {row.run_id: row.status for row in listed.runs} == {RUN_ID: "running", "fedcba98": "unreadable"}
    assert listed.count == 2
    assert all(row.note for row in listed.runs if row.status == "unreadable")
    assert (await run.operations().list_runs(limit=1)).count == 2


@pytest.mark.anyio
async def test_time_left_is_that_of_the_estimate_until_three_steps_give_a_pace(run: LiveRun) -> None:
    said = Estimate(
        memory_bytes=1,
        disk_bytes=1,
        seconds_per_step=5.0,
        startup_seconds=20.0,
        total_seconds=70.0,
        sampled_tokens=1,
        basis="b",
    )
    write_atomic(run.paths.request, run.request.model_copy(update={"estimate": said}).model_dump_json())
    seen = []
    for step in range(1, 5):
        seen.append((await run.operations().check_status(RUN_ID)).eta_seconds)
        run.step(step)
        run.time += LIMIT_S
    assert seen == [50.0, 45.0, 40.0, 14.0]
