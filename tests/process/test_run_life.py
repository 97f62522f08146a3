"""A run from start to end, every way it can go, with a real supervisor and real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import psutil
import pytest
import yaml
from process_rig import HOLD, Rig, until, zombies

from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.runs import ProcessName, RunRecord, RunStatus
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.operations import starting, training
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.runs.claims import holder
from hermes_rl_mcp.runs.forecast.preflight import preflight
from hermes_rl_mcp.runs.state import RunState, StateConflictError

pytestmark = pytest.mark.anyio


async def test_run_starts_in_order_and_completes_by_proof(rig: Rig) -> None:
    run_id = await rig.start(request=rig.request(server_values={"timeout": 77, "base_url": "http://evil/v1"}))
    record = await rig.end(run_id)
    assert record.status is RunStatus.COMPLETED
    assert record.processes["trainer"].exit_code == 0 and not record.processes["trainer"].forced
    assert all(process.ready for process in record.processes.values())
    assert rig.store.metrics(run_id).lines[-1]["step"] == 3
    started = [event.reason.split()[0] for event in rig.events(run_id) if " started, pid " in event.reason]
    assert started == ["api", "trainer", "env"]
    assert [event.seq for event in rig.events(run_id)] == list(range(1, len(rig.events(run_id)) + 1))
    assert not rig.marked(run_id)
    assert (await launch.stop(rig.home, run_id, "too late")) == record, "a stop after the end changes nothing"
    check_config(rig, record)


def check_config(rig: Rig, record: RunRecord) -> None:
    """The processes were told the run's ports, its secret prefix and its model."""
    config = RunConfig.model_validate(yaml.safe_load(rig.paths(record.run_id).config.read_text()))
    assert config.ports == record.ports
    base = f"http://127.0.0.1:{config.ports.trainer}/{config.run.path_prefix}/v1"
    assert (config.openai[0].base_url, config.openai[0].timeout) == (base, 77)
    assert config.env["rollout_server_url"] == f"http://127.0.0.1:{config.ports.rollout_api}/{config.run.path_prefix}"
    assert config.env["tokenizer_name"] == config.run.model_path
    assert config.trainer.wandb_run_name == f"fake-{record.run_id}" == record.wandb_run_name
    assert len(config.run.path_prefix) >= 20 and "/" not in config.run.path_prefix


@pytest.mark.parametrize(("role", "title"), [("api", "rollout API"), ("trainer", "trainer"), ("env", "environment")])
async def test_a_dead_child_fails_the_run_and_is_named_as_the_cause(rig: Rig, role: ProcessName, title: str) -> None:
    run_id = await rig.start({**HOLD, role: {"die_after_ready": 7, "say": "first\nlast words\n"}})
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED
    assert record.error == f"The {title} exited with code 7. Its last log line: last words"
    assert record.processes[role].exit_code == 7
    assert not rig.marked(run_id) and record.leftover_pids == []


async def test_a_child_that_dies_while_starting_fails_the_run_at_once_and_nothing_more_is_started(rig: Rig) -> None:
    began = time.monotonic()
    run_id = await rig.start({"trainer": {"die_at_start": 1, "say": "no such model\n"}}, trainer_ready_s=300)
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED and "no such model" in (record.error or "")
    assert record.processes["env"].identity is None
    assert time.monotonic() - began < 60, "it must not wait for the deadline"


async def test_a_killed_trainer_that_left_a_report_fails_with_its_words(rig: Rig) -> None:
    report = {"status": "failed", "step": 2, "error": "CUDA out of memory at step 2.", "hint": "Halve batch_size."}
    run_id = await rig.start({"trainer": {"die_after_ready": -9, "report": report}})
    record = await rig.end(run_id)
    assert (record.error, record.hint) == ("CUDA out of memory at step 2.", "Halve batch_size.")
    assert record.processes["trainer"].exit_code == -signal.SIGKILL


async def test_trainer_exit_0_without_completion_record_is_no_completion(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"no_report": True}})
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED and "without completing" in (record.error or "")


async def test_trainer_crash_after_its_completion_record_is_no_completion(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"exit_code": 139}})
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED and "code 139" in (record.error or "")


async def test_fi_07_environment_that_ends_early_fails_the_run_with_the_step(rig: Rig) -> None:
    run_id = await rig.start({**HOLD, "env": {"die_after_ready": 0}})
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED
    assert record.error in ("The environment ended at step 0 of 3.", "The environment ended at step 1 of 3.")
    assert (record.processes["env"].exit_code, record.processes["env"].forced) == (0, False)
    assert not rig.marked(run_id) and record.leftover_pids == []


async def test_environment_may_end_once_the_queue_holds_all_that_is_needed(rig: Rig) -> None:
    # After step 1 of 3 the trainer needs 2 batches of 4 sequences: 4 groups of 2.
    knobs = {**HOLD, "api": {"current_step": 1, "queue_size": 4}, "env": {"die_after_ready": 0}}
    run_id = await rig.start(knobs)
    await rig.wait(run_id, lambda record: "environment is done" in record.detail)
    rig.go(run_id)
    assert (await rig.end(run_id)).status is RunStatus.COMPLETED


async def test_a_busy_rollout_api_costs_no_run_whose_environment_is_done(rig: Rig) -> None:
    api = {"current_step": 1, "queue_size": 4, "mute_until_go": True}
    run_id = await rig.start({**HOLD, "api": api, "env": {"die_after_ready": 0}}, cascade_s=60)
    await until(lambda: [event for event in rig.events(run_id) if event.reason == "env exited with code 0"])
    rig.go(run_id)
    record = await rig.end(run_id)
    assert (record.status, record.error) == (RunStatus.COMPLETED, None)


async def test_fi_29_trainer_that_completes_but_hangs_is_made_to_exit_and_counts_as_completed(rig: Rig) -> None:
    run_id = await rig.start(
        {"trainer": {"hang_after_report": True, "ignore_term": True}}, completion_exit_s=0.3, kill_s=0.5
    )
    record = await rig.end(run_id)
    assert record.status is RunStatus.COMPLETED
    assert record.processes["trainer"].forced and record.processes["trainer"].exit_code == -signal.SIGKILL
    assert record.error is None and rig.store.report(run_id, "trainer") is not None
    assert rig.events(run_id)[-1].reason == "the trainer completed but did not exit; it was made to"
    assert not rig.marked(run_id)


async def test_readiness_has_a_deadline_and_the_error_says_what_was_waited_for(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"never_ready": True, "say": "step 1 of loading\n"}}, trainer_ready_s=8)
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED
    assert "not ready after 8 s" in (record.error or "") and "loading the fake model" in (record.error or "")
    assert "step 1 of loading" in (record.error or "")


async def test_fi_17_an_answer_without_the_runs_nonce_is_never_believed(rig: Rig) -> None:
    run_id = await rig.start({"api": {"nonce": "stranger"}}, api_ready_s=8)
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED and "another program answers" in (record.error or "")
    assert record.processes["trainer"].identity is None


@pytest.mark.parametrize(("waits", "words"), [("api", "waiting for the rollout API"), ("trainer", "the fake model")])
async def test_fi_09_stop_while_starting_starts_nothing_more(rig: Rig, waits: str, words: str) -> None:
    knobs = {"api": {"silent": True}} if waits == "api" else {waits: {"never_ready": True}}
    run_id = await rig.start(knobs)
    waiting = await rig.wait(run_id, lambda record: words in record.detail)
    assert waiting.status is RunStatus.STARTING
    answer = await launch.stop(rig.home, run_id, "changed my mind")
    assert answer.status in (RunStatus.STARTING, RunStatus.STOPPING, RunStatus.STOPPED)
    record = await rig.end(run_id)
    assert record.status is RunStatus.STOPPED and record.stop_reason == "changed my mind"
    assert record.error is None and record.processes["env"].identity is None
    assert (record.processes["trainer"].identity is None) is (waits == "api")
    assert not rig.marked(run_id) and record.leftover_pids == []


async def test_fi_20_a_run_whose_record_was_damaged_can_be_stopped_and_is_readable_again(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"hold_at": 1}})
    await rig.running(run_id)
    rig.home.run(run_id).record.write_text("{garbage")
    await launch.stop(rig.home, run_id, "test")
    assert (await rig.end(run_id)).status is RunStatus.STOPPED
    assert not rig.marked(run_id)


async def test_fi_10_stop_returns_at_once_and_kills_what_ignores_sigterm(rig: Rig) -> None:
    deaf = {"ignore_term": True}
    term_s = {"env_term_s": 1, "trainer_term_s": 1, "api_term_s": 1}
    run_id = await rig.start({"api": deaf, "trainer": {"hold_at": 1, **deaf}, "env": deaf}, **term_s)
    await rig.running(run_id)
    answer = await training.stop_training(Context(load_settings(rig.environ)), run_id)
    # Carrying it out takes three times a second; the tool does not wait for that.
    assert answer.status in ("running", "stopping") and answer.message.startswith("Stopping")
    record = await rig.end(run_id)
    assert record.status is RunStatus.STOPPED
    seen = [event.status for event in rig.events(run_id)]
    assert seen[-1] is RunStatus.STOPPED and RunStatus.STOPPING in seen
    assert {process.exit_code for process in record.processes.values()} == {-signal.SIGKILL}
    assert all(process.forced for process in record.processes.values())
    assert not rig.marked(run_id) and record.leftover_pids == []


@pytest.mark.parametrize("where", ["group", "session"])
async def test_fi_11_a_grandchild_is_found_when_the_trainer_dies(rig: Rig, where: str) -> None:
    run_id = await rig.start({"trainer": {"grandchild": where, "die_on_go": 1}})
    await rig.running(run_id)
    assert len(rig.marked(run_id)) == 4
    rig.go(run_id)
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED and record.leftover_pids == []
    assert not rig.marked(run_id)
    # The record is closed before the supervisor goes, and the device is free once it has gone.
    await until(lambda: holder(Path(rig.environ["HERMES_RL_CLAIMS_DIR"]), "cpu") is None)


@pytest.mark.parametrize("lead_s", [0.0, 0.2])
async def test_fi_36_stop_and_completion_race_to_one_end_with_its_proof(rig: Rig, lead_s: float) -> None:
    await race(rig, lead_s)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_fi_36_stop_and_completion_race_to_either_end_at_any_moment(rig: Rig) -> None:
    ends = [await race(rig, lead_s) for lead_s in (*(number / 40 for number in range(14)), 0.5, None)]
    assert set(ends) == {RunStatus.COMPLETED, RunStatus.STOPPED}, "the moments cover both sides"


async def test_fi_36_a_trainer_that_completes_while_a_stop_waits_for_the_environment_has_completed(rig: Rig) -> None:
    knobs = {"trainer": {"hold_at": 1, "hang_after_report": True, "term_exit": 9}, "env": {"ignore_term": True}}
    run_id = await rig.start(knobs)
    running = await rig.running(run_id)
    await launch.stop(rig.home, run_id, "race")
    await rig.wait(run_id, lambda record: record.detail == "stopping the environment")
    rig.go(run_id)
    await until(lambda: rig.store.report(run_id, "trainer"))
    environment = running.processes["env"].identity
    assert environment is not None
    os.kill(environment.pid, signal.SIGKILL)  # only now is the trainer signalled
    record = await rig.end(run_id)
    assert (record.status, record.stop_reason) == (RunStatus.COMPLETED, "race")
    assert record.processes["trainer"].forced and record.processes["trainer"].exit_code == 9


async def race(rig: Rig, lead_s: float | None) -> RunStatus:
    """A stop that comes ``lead_s`` after the trainer was let go, which then completes within some 0.2 s; None: as soon
    as it has completed."""
    run_id = await rig.start({"trainer": {"hold_at": 1, "step_s": 0.1}})
    await rig.running(run_id)
    rig.go(run_id)
    if lead_s is None:
        await until(lambda: rig.store.report(run_id, "trainer"))
    else:
        await anyio.sleep(lead_s)  # the injected moment, not a wait for anything
    await launch.stop(rig.home, run_id, "race")
    record = await rig.end(run_id)
    reported = rig.store.report(run_id, "trainer") is not None
    if record.status is RunStatus.COMPLETED:
        assert reported and (record.processes["trainer"].exit_code == 0 or record.processes["trainer"].forced)
    else:
        assert record.status is RunStatus.STOPPED
    await launch.stop(rig.home, run_id, "again")
    assert rig.store.get(run_id) == record
    terminal = [event.status for event in rig.events(run_id) if event.status.terminal]
    assert terminal == [record.status]
    with pytest.raises(StateConflictError):
        RunState.load(rig.paths(run_id)).move(RunStatus.COMPLETED, "a late writer")
    with pytest.raises(StateConflictError):
        RunState.load(rig.paths(run_id)).update(detail="a late writer")
    assert rig.store.get(run_id) == record and not rig.marked(run_id)
    return record.status


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


class StrangersServer(ThreadingHTTPServer):
    allow_reuse_address = True


PORTS_S = 240
"""A run of a test beside may hold both for as long as it takes."""


@pytest.fixture(params=["answers 200", "only listens"])
def strangers(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Another program on the ports that a run would like: on one at least, the other may be that of a run beside."""
    servers: list[StrangersServer] = []
    deadline = time.monotonic() + PORTS_S
    while not servers and time.monotonic() < deadline:
        for port in (8000, 8001):
            with contextlib.suppress(OSError):
                servers.append(StrangersServer(("127.0.0.1", port), Stranger))
        threading.Event().wait(0.05)
    assert servers, "other runs hold both ports"
    if request.param == "answers 200":
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [server.server_port for server in servers]
    for server in servers:
        if request.param == "answers 200":
            server.shutdown()
        server.server_close()


@pytest.mark.timeout(PORTS_S + 120)
async def test_fi_17_a_stranger_on_the_port_is_neither_believed_nor_killed(rig: Rig, strangers: list[int]) -> None:
    run_id = await rig.start(HOLD)
    record = await rig.running(run_id)
    assert record.ports is not None
    assert not {record.ports.rollout_api, record.ports.trainer} & set(strangers)
    await launch.stop(rig.home, run_id, "test")
    assert (await rig.end(run_id)).status is RunStatus.STOPPED
    for port in strangers:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()


async def test_second_run_on_a_device_waits_for_the_first_and_then_starts(rig: Rig) -> None:
    first = await rig.start(HOLD)
    await rig.running(first)
    second, third = await rig.start(HOLD), await rig.start(HOLD)
    waiting = await rig.wait(third, lambda record: record.queue_position == 2)
    assert waiting.status is RunStatus.QUEUED and waiting.ports is None
    assert (await rig.wait(second, lambda record: record.queue_position == 1)).status is RunStatus.QUEUED

    await launch.stop(rig.home, second, "not needed")
    stopped = await rig.end(second)
    assert stopped.status is RunStatus.STOPPED and stopped.processes["api"].identity is None
    await rig.wait(third, lambda record: record.queue_position == 1)

    await launch.stop(rig.home, first, "make room")
    assert (await rig.end(first)).status is RunStatus.STOPPED
    assert (await rig.running(third)).queue_position is None
    await launch.stop(rig.home, third, "done")
    await rig.end(third)
    ended, began = rig.store.get(first).ended_at, rig.store.get(third).running_since
    assert ended is not None and began is not None and ended < began


async def test_sec_01_sec_03_keys_go_by_environment_to_who_needs_them_and_files_are_private(rig: Rig) -> None:
    keys = {"WANDB_API_KEY": "sentinel-wandb", "HF_TOKEN": "sentinel-hf", "OPENAI_API_KEY": "sentinel-openai"}
    rig.environ |= keys
    run_id = await rig.start(HOLD)
    record = await rig.running(run_id)
    seen = {}
    for name, process in record.processes.items():
        assert process.identity is not None
        live = psutil.Process(process.identity.pid)
        seen[name] = {key for key in keys if key in live.environ()}
        config = rig.paths(run_id).config.read_text()
        prefix = config.split("path_prefix:")[1].split()[0]
        assert prefix in config and not any(secret in " ".join(live.cmdline()) for secret in [prefix, *keys.values()])
        assert "127.0.0.1" in {connection.laddr.ip for connection in live.net_connections("tcp")} or name == "env"
        assert all(c.laddr.ip == "127.0.0.1" for c in live.net_connections("tcp") if c.status == "LISTEN")
        assert live.environ().get("PYTHONUNBUFFERED") == "1"
    assert seen == {"api": set(), "trainer": {"WANDB_API_KEY", "HF_TOKEN"}, "env": {"HF_TOKEN"}}
    await launch.stop(rig.home, run_id, "test")
    await rig.end(run_id)
    written = [*rig.paths(run_id).dir.rglob("*"), *rig.home.logs.iterdir(), rig.paths(run_id).dir, rig.home.runs]
    for path in written:
        if path.exists():
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
            assert not path.is_file() or not any(key.encode() in path.read_bytes() for key in keys.values()), path


async def test_a_flood_of_undecodable_output_neither_blocks_the_run_nor_its_log_tail(rig: Rig) -> None:
    run_id = await rig.start({"env": {"spew_bytes": 20_000_000}})
    assert (await rig.end(run_id)).status is RunStatus.COMPLETED
    began = time.process_time()  # a busy machine costs none
    tail = rig.log_tail(run_id, "env", 1000)
    assert time.process_time() - began < 3 and len(tail) <= 1000 and "\ufffd" in tail


async def test_sec_02_an_address_in_a_childs_last_words_is_shown_without_the_secret_prefix(rig: Rig) -> None:
    run_id = await rig.start({**HOLD, "env": {"die_after_ready": 7, "say": "no answer from http://h:1/{prefix}/x\n"}})
    record = await rig.end(run_id)
    prefix = yaml.safe_load(rig.paths(run_id).config.read_text())["run"]["path_prefix"]
    assert "no answer from http://h:1/***/x" in (record.error or "")
    assert prefix not in rig.paths(run_id).record.read_text()


async def test_a_run_that_is_being_made_is_not_closed_by_a_reader(rig: Rig) -> None:
    home, request = rig.home, rig.request()
    preflight(home, request, rig.environ)
    with launch._draft(home, request) as (draft, lock):
        launch._publish(home, request, draft)
    assert rig.store.get(request.run_id).status is RunStatus.QUEUED
    lock.release()
    assert rig.store.get(request.run_id).status is RunStatus.INTERRUPTED, "its launcher is gone"


async def test_fi_34_same_idempotency_key_is_the_same_run(rig: Rig) -> None:
    first = await rig.start(HOLD, rig.request(idempotency_key="once"))
    again = await rig.start(HOLD, rig.request(idempotency_key="once"))
    operations = Context(load_settings(rig.environ))
    as_tool = await starting.start_training(operations, "once")  # although nothing is selected
    assert as_tool.run_id == again == first and len(rig.store.list()) == 1
    await launch.stop(rig.home, first, "test")
    await rig.end(first)


async def test_supervisor_that_dies_at_once_is_reported_with_its_log_and_on_record(rig: Rig) -> None:
    request = rig.request()
    broken = rig.folder / "broken.json"
    broken.write_text("not json")
    with pytest.raises(PreflightError, match="died at once") as caught:
        await launch.start(rig.home, request, {**rig.environ, "HERMES_RL_CHILD_COMMANDS": str(broken)})
    assert "Invalid JSON" in caught.value.message
    record = rig.store.get(request.run_id)
    assert record.status is RunStatus.FAILED and "Invalid JSON" in (record.error or "")
    await until(lambda: not zombies())  # also those of earlier tests, whose supervisors may only be leaving


async def test_wait_change_wakes_on_a_step_and_on_a_change_of_state(rig: Rig) -> None:
    run_id = await rig.start(HOLD)
    record = await rig.running(run_id)
    await until(lambda: rig.store.metrics(run_id).lines)
    record = rig.store.get(run_id)
    with anyio.fail_after(100):
        assert (await rig.store.wait_change(run_id, record.revision, 1, 0.3)).revision == record.revision
        assert (await rig.store.wait_change(run_id, record.revision, 0, 60)).status is RunStatus.RUNNING
        rig.go(run_id)
        changed = await rig.store.wait_change(run_id, record.revision, 3, 60)
    assert changed.revision > record.revision
    await rig.end(run_id)
