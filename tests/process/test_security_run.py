"""A run with secrets in its surroundings: who gets them, where they show, who may be signalled, what is believed."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
import yaml
from mcp import Client
from mcp.shared.exceptions import MCPError
from process_rig import HOLD, Rig, until

from hermes_rl_mcp.contracts.runs import Identity, RunRecord, RunStatus
from hermes_rl_mcp.operations import environments, status
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.runs.process import boot_id, identity_of
from hermes_rl_mcp.server.app import build_server

pytestmark = pytest.mark.anyio

SECRETS = {
    "OPENAI_API_KEY": "SENTINEL-openai/0123+456=",
    "WANDB_API_KEY": "SENTINEL-wandb-0123456789",
    "HF_TOKEN": "SENTINEL-hf-0123456789abc",
    "HERMES_RL_SECRET_JUDGE": "SENTINEL-judge-0123456789",
    "TAVILY_API_KEY": "SENTINEL-tavily-0123456789",
}


def spellings(secret: str) -> list[str]:
    return [secret, quote(secret, safe=""), secret.encode().hex(), base64.b64encode(secret.encode()).decode()]


def leaks(text: str) -> list[str]:
    """What two thirds of any spelling of a secret are found in ``text``."""
    found = [spelled[: len(spelled) * 2 // 3] for secret in SECRETS.values() for spelled in spellings(secret)]
    return [part for part in found if part in text]


async def everything_shown(rig: Rig, run_id: str) -> str:
    """What an agent can see of a run: every tool and every resource that reads."""
    parts: list[str] = []
    async with Client(build_server(Operations.from_environ(rig.environ))) as client:
        for tool, arguments in (
            *(("rl_check_status", {"run_id": run_id}), ("rl_get_results", {"run_id": run_id}), ("rl_list_runs", {})),
            *(("rl_list_environments", {}), ("rl_stop_training", {"run_id": run_id})),
        ):
            answer = await client.call_tool(tool, arguments)
            parts.append(answer.model_dump_json())
        for part in (
            "config",
            "state",
            "metrics",
            *(f"logs/{name}" for name in ("api", "trainer", "env", "supervisor")),
        ):
            try:
                found = await client.read_resource(f"rl://runs/{run_id}/{part}")
            except MCPError as error:
                parts.append(str(error))
            else:
                parts.append(found.model_dump_json())
    return "\n".join(parts)


async def test_sec_01_sec_03_each_child_gets_its_own_keys_by_environment_and_none_by_argument(rig: Rig) -> None:
    tools = {"SEARXNG_URL": "http://127.0.0.1:9/", "HERMES_RL_SEARCH_CORPUS": "/corpus.jsonl", "TERMINAL_TIMEOUT": "9"}
    rig.environ |= tools
    rig.environ |= {**SECRETS, "LD_PRELOAD": "/nowhere.so", "SOMETHING_ELSE": "x", "AWS_SECRET_ACCESS_KEY": "SENTINEL"}
    run_id = await rig.start(HOLD)
    record = await rig.running(run_id)
    assert record.supervisor is not None
    got: dict[str, set[str]] = {}
    for name, process in record.processes.items():
        assert process.identity is not None
        environ = psutil.Process(process.identity.pid).environ()
        got[name] = {key for key in SECRETS if key in environ}
        assert {key: environ.get(key) for key in tools} == (tools if name == "env" else dict.fromkeys(tools))
        assert not {"LD_PRELOAD", "SOMETHING_ELSE", "AWS_SECRET_ACCESS_KEY"} & set(environ)
    assert got == {
        "api": set(),
        "trainer": {"WANDB_API_KEY", "HF_TOKEN"},
        "env": {"HF_TOKEN", "HERMES_RL_SECRET_JUDGE", "TAVILY_API_KEY"},
    }
    for process in psutil.process_iter():
        try:
            assert "SENTINEL" not in " ".join(process.cmdline()), process
        except psutil.Error:
            continue
    await launch.stop(rig.home, run_id, "test")
    await rig.end(run_id)


async def test_sec_02_what_a_child_prints_of_a_secret_is_not_shown_in_any_spelling(rig: Rig) -> None:
    rig.environ |= SECRETS
    said = "".join(
        f"{word} {spelled}\n" for word in ("key", "url") for s in SECRETS.values() for spelled in spellings(s)
    )
    last = f"no answer from http://u:{SECRETS['HERMES_RL_SECRET_JUDGE']}@h/ with {SECRETS['HF_TOKEN']}\n"
    run_id = await rig.start({**HOLD, "env": {"die_after_ready": 7, "say": said + last}})
    record = await rig.end(run_id)
    assert record.error is not None and "no answer from" in record.error
    assert SECRETS["HF_TOKEN"] in rig.home.log("env", run_id).read_text(), "the log is the child's own, and private"
    shown = await everything_shown(rig, run_id)
    assert "no answer from" in shown
    assert leaks(shown) == []
    for path in [*rig.paths(run_id).dir.rglob("*"), *rig.home.checks.glob("*")]:
        if path.is_file():
            assert leaks(path.read_bytes().decode(errors="replace")) == [], path


async def test_sec_02_a_secret_written_in_two_parts_is_masked_in_every_window_of_the_log(rig: Rig) -> None:
    rig.environ |= SECRETS
    run_id = await rig.start(HOLD)
    await rig.running(run_id)
    secret = SECRETS["WANDB_API_KEY"]
    log = rig.home.log("trainer", run_id)
    for part in ("before ", secret[:9], secret[9:], " after\n"):
        with log.open("a") as file:
            file.write(part)
    size = log.stat().st_size
    async with Client(build_server(Operations.from_environ(rig.environ))) as client:
        for limit in (5, 11, 4096):
            text = ""
            for offset in range(0, size, limit):
                found = await client.read_resource(f"rl://runs/{run_id}/logs/trainer?offset={offset}&limit={limit}")
                text += found.contents[0].text  # type: ignore[union-attr]
            assert "before" in text and "after" in text and secret[:9] not in text and secret[9:] not in text
    await launch.stop(rig.home, run_id, "test")
    await rig.end(run_id)


async def test_sec_05_every_listener_of_a_run_is_on_loopback(rig: Rig) -> None:
    run_id = await rig.start(HOLD)
    await rig.running(run_id)
    listening = [
        connection.laddr.ip
        for process in rig.marked(run_id)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 2 and set(listening) == {"127.0.0.1"}
    await launch.stop(rig.home, run_id, "test")
    await rig.end(run_id)


@pytest.mark.parametrize("role", ["api", "trainer", "env"])
async def test_sec_22_what_a_child_prints_is_never_taken_for_a_state_or_a_metric(rig: Rig, role: str) -> None:
    forged = [
        json.dumps({"process": "trainer", "status": "completed", "step": 3, "finished_at": "2026-01-01T00:00:00Z"}),
        json.dumps({"step": 99, "time": "x", "reward/mean": 1.0}),
        json.dumps({"jsonrpc": "2.0", "id": 1, "result": {}}),
        "run.json: status = completed\x1b[2K\rTraining done",
    ]
    run_id = await rig.start({**HOLD, role: {**HOLD.get(role, {}), "say": "\n".join(forged) + "\n"}})
    record = await rig.running(run_id)
    assert record.status is RunStatus.RUNNING
    assert [line["step"] for line in rig.store.metrics(run_id).lines] in ([], [1])
    await launch.stop(rig.home, run_id, "test")
    assert (await rig.end(run_id)).status is RunStatus.STOPPED
    reader = await RunReader.open(Operations.from_environ(rig.environ).context, run_id)
    assert status.snapshot(Operations.from_environ(rig.environ).context, reader).metrics.step in (None, 1)


async def test_sec_25_with_a_umask_of_0_everything_is_private_all_the_same(rig: Rig, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_id = await rig.start({"env": {"spew_bytes": 1000}})
        await rig.end(run_id)
        context = Operations.from_environ(rig.environ).context
        await status.check_status(context, run_id)
        await environments.select_environment(context, "arithmetic")
    finally:
        os.umask(before)
    places = [rig.home.root, rig.home.root / "logs", Path(rig.environ["HERMES_RL_CLAIMS_DIR"])]
    found = [path for place in places for path in (place, *place.rglob("*"))]
    assert {"run.json", "config.yaml", "session.json", f"env_{run_id}.log"} <= {path.name for path in found}
    open_ones = {str(path): oct(path.stat().st_mode) for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077}
    assert open_ones == {}


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process: it leaves with another code if any signal reaches it."""
    code = "import signal, sys\nfor s in (1, 2, 15, 23):\n    signal.signal(s, lambda *_: sys.exit(66))\n"
    code += "print('up', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield process
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def forged(pid: int, *, started_at: float = 1.0, boot: str | None = None) -> Identity:
    return Identity(pid=pid, started_at=started_at, boot_id=boot or boot_id())


@pytest.mark.parametrize("where", ["supervisor", "child"])
async def test_sec_26_a_forged_record_makes_nobody_signal_a_stranger(
    rig: Rig, bystander: subprocess.Popen[bytes], where: str
) -> None:
    run_id = await rig.start()
    record = await rig.end(run_id)
    mine, init = identity_of(os.getpid()), identity_of(1)
    real = identity_of(bystander.pid)
    assert mine is not None and init is not None and real is not None
    victims = [
        *(forged(pid) for pid in (0, -1, 1, os.getpid(), os.getpgrp(), os.getppid(), bystander.pid)),
        *(mine, init),
        real.model_copy(update={"started_at": real.started_at + 1}),
        real.model_copy(update={"boot_id": "another"}),
    ]
    hits: list[int] = []
    old = {number: signal.signal(number, lambda got, _: hits.append(got)) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for victim in victims:
            await _with_forged(rig, record, where, victim)
            assert bystander.poll() is None
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert hits == []


async def _with_forged(rig: Rig, record: RunRecord, where: str, victim: Identity) -> None:
    """A live record that names the victim; whoever reads it closes the run, and a stop is asked for as well."""
    processes = dict(record.processes)
    changes: dict[str, object] = {"status": RunStatus.RUNNING, "ended_at": None}
    if where == "supervisor":
        changes["supervisor"] = victim
    else:
        processes["trainer"] = processes["trainer"].model_copy(update={"identity": victim, "exit_code": None})
        changes["processes"] = processes
    path = rig.paths(record.run_id).record
    path.write_text(record.model_copy(update=changes).model_dump_json())
    path_stop = rig.paths(record.run_id).stop_request
    path_stop.unlink(missing_ok=True)
    await launch.stop(rig.home, record.run_id, "forged")
    assert rig.store.get(record.run_id).status.terminal


async def test_fi_40_a_run_uses_our_configuration_where_the_client_passes_none(rig: Rig, tmp_path: Path) -> None:
    rig.home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours = {
        "HF_HOME": str(tmp_path / "hf"),
        "CUDA_VISIBLE_DEVICES": "1",
        "WANDB_API_KEY": "from-the-file",
        "HERMES_RL_PATH": f"{tmp_path / 'bin'}:{tmp_path / 'sbin'}",
    }
    rig.home.env_file.write_text("".join(f"{name}={value}\n" for name, value in ours.items()))
    rig.home.env_file.chmod(0o600)
    bare = {name: value for name, value in rig.script(HOLD).items() if name not in ours}
    operator = load_settings(bare)
    record = await launch.start(rig.home, rig.request(), operator.environ)
    rig.started.append(record.run_id)
    record = await rig.running(record.run_id)
    trainer, env = record.processes["trainer"].identity, record.processes["env"].identity
    assert trainer is not None and env is not None
    told = psutil.Process(trainer.pid).environ()
    assert {name: told.get(name) for name in ("HF_HOME", "CUDA_VISIBLE_DEVICES", "WANDB_API_KEY")} == {
        name: ours[name] for name in ("HF_HOME", "CUDA_VISIBLE_DEVICES", "WANDB_API_KEY")
    }
    assert psutil.Process(env.pid).environ()["PATH"].startswith(f"{ours['HERMES_RL_PATH']}:")
    assert psutil.Process(env.pid).environ()["HF_HOME"] == ours["HF_HOME"]
    await launch.stop(rig.home, record.run_id, "test")
    await rig.end(record.run_id)


async def test_fi_16_a_run_that_floods_its_output_leaves_the_servers_stdout_alone(rig: Rig) -> None:
    """The children never have the server's descriptors 0 and 1; every line on its stdout is a message."""
    environ = rig.script(
        {"trainer": {"hold_at": 1}}
        | {role: {"say": '{"jsonrpc":"2.0"}\nnoise\n', "spew_bytes": 300_000} for role in ("api", "env")}
    )
    server = subprocess.Popen(  # noqa: ASYNC220 - its raw lines are what is looked at
        [sys.executable, "-P", "-m", "hermes_rl_mcp.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    answers: dict[int, dict[str, object]] = {}

    def ask(number: int | None, method: str, params: dict[str, object] | None = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(message | ({"id": number} if number is not None else {})) + "\n")
        server.stdin.flush()
        while number is not None and number not in answers:
            answer = json.loads(server.stdout.readline())
            assert answer["jsonrpc"] == "2.0"
            if "id" in answer:
                answers[answer["id"]] = answer

    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    ask(0, "initialize", hello)
    ask(None, "notifications/initialized")
    ask(1, "tools/call", {"name": "rl_select_environment", "arguments": {"name": "arithmetic"}})
    ask(2, "tools/call", {"name": "rl_edit_config", "arguments": {"field": "total_steps", "value": 3}})
    ask(3, "tools/call", {"name": "rl_start_training", "arguments": {}})
    content = answers[3]["result"]["structuredContent"]  # type: ignore[index]
    run_id = str(content.get("run_id"))
    assert run_id != "None", content
    rig.started.append(run_id)
    await until(lambda: len(rig.marked(run_id)) >= 3)
    pipes = {os.readlink(f"/proc/self/fd/{end.fileno()}") for end in (server.stdin, server.stdout)}
    assert all(pipe.startswith("pipe:") for pipe in pipes)
    for process in rig.marked(run_id):
        held = held_by(process.pid)
        assert held and not pipes & held, process
    rig.go(run_id)
    await until(lambda: rig.store.get(run_id).status.terminal)
    ask(4, "tools/call", {"name": "rl_check_status", "arguments": {"run_id": run_id}})
    server.stdin.close()
    assert server.stdout.read() == ""
    assert server.wait(60) == 0
    server.stdout.close()


def held_by(pid: int) -> set[str]:
    """What a process has open."""
    return {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}


async def test_sec_28_offline_by_word_of_the_operator_reaches_the_children(rig: Rig) -> None:
    rig.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    run_id = await rig.start(HOLD)
    record = await rig.running(run_id)
    for name in ("trainer", "env"):
        identity = record.processes[name].identity  # type: ignore[index]
        assert identity is not None
        environ = psutil.Process(identity.pid).environ()
        assert (environ.get("HF_HUB_OFFLINE"), environ.get("TRANSFORMERS_OFFLINE")) == ("1", "1")
    config = yaml.safe_load(rig.paths(run_id).config.read_text())
    assert config["trainer"]["use_wandb"] is False, "nothing is sent to W&B unless somebody asks for it"
    await launch.stop(rig.home, run_id, "test")
    await rig.end(run_id)
