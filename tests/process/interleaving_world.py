"""Everything that the interleaving test acts on: a home, two places for servers, runs of steered children, bystanders.

Servers are processes of their own that are killed without notice: ``DriverServer`` is the product's operations behind
JSON lines, ``McpServer`` the shipped MCP server spoken to over its stdin and stdout. Children do what they are ordered
to and nothing else, so a run stays where it is until something happens to it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interleaving_watch import STEERED, Acknowledged, Violated, Watch
from process_rig import Rig
from server_rig import environ_with, select

from hermes_rl_mcp.contracts.runs import Identity, RunStatus
from hermes_rl_mcp.files import write_atomic
from hermes_rl_mcp.paths import install_root
from hermes_rl_mcp.runs.process import boot_id, identity_of, is_alive, signal_process
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.specs import CHILD_COMMANDS
from hermes_rl_mcp.runs.state import RunState, read_record

HERE = Path(__file__).parent
ANSWER_S = 120.0
"""No answer takes longer, also on a busy machine; a server that hangs takes for ever."""
STUBBORN = {"ignore_term": True, "lifeline_grace_s": 300}
BEHAVIOURS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "stubborn trainer": {"trainer": STUBBORN},
    "descendants": {"trainer": {"grandchild": "session"}, "env": {"grandchild": "group", "ignore_term": True}},
    "never ready": {"trainer": {"never_ready": True}},
    "dies at start": {"env": {"die_at_start": 5}},
}
SHORT = {"completion_exit_s": 0.3, "env_term_s": 0.5, "trainer_term_s": 0.5, "api_term_s": 0.5, "kill_s": 2}
"""Children that hang or ignore signals are no rarity here; one that is killed for being late breaks no invariant."""
SMALL = {"group_size": 2, "batch_size": 4, "max_token_length": 16}
ROLES = ("supervisor", "api", "trainer", "env")


class Server:
    """A process with JSON lines on stdin and stdout. Answers come in any order.

    ``start``, ``stop`` and ``look`` ask and return the question's number; ``result`` gives what came of it: the fields
    of the answer, or ``refused`` if it was refused with a sentence.
    """

    def __init__(self, argv: list[str], environ: dict[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                argv,
                env={**environ, "PYTHONPATH": str(install_root())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )
        self.killed = False
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._changed:
                self._answers[answer.get("id", -1)] = answer
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def send(self, message: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        number = next(self._ids)
        self.process.stdin.write(json.dumps({**message, "id": number}) + "\n")
        self.process.stdin.flush()
        return number

    def answer(self, number: int, timeout_s: float = ANSWER_S) -> dict[str, Any] | None:
        """None if it is still out after ``timeout_s``, or was lost with a killed server."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or not self._reader.is_alive(), timeout_s)
            found = self._answers.get(number)
        if found is None and not self.killed and self.process.poll() is not None:
            raise Violated(f"a server ended by itself, exit code {self.process.returncode}")
        return found

    def kill(self) -> None:
        """With its whole process group, as a client does in the end."""
        self.killed = True
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(ANSWER_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # what was not sent yet
                continue


class DriverServer(Server):
    def __init__(self, environ: dict[str, str], log: Path, signal_log: Path, plant: str | None) -> None:
        argv = [sys.executable, str(HERE / "driver_server.py"), str(signal_log), *([plant] if plant else [])]
        super().__init__(argv, environ, log)

    def ready(self) -> None:
        if self.answer(0) is None:
            raise Violated("a server did not start")

    def result(self, number: int, timeout_s: float) -> dict[str, Any] | None:
        """What the operation gave; ``refused`` in it if it was refused with a sentence."""
        answer = self.answer(number, timeout_s)
        if answer is not None and "raised" in answer:
            raise Violated(f"a server raised {answer['raised']}")
        return None if answer is None else {**answer.get("ok", {}), **answer}

    def start(self, request: dict[str, Any], environ: dict[str, str]) -> int:
        return self.send({"do": "start", "request": request, "environ": environ})

    def stop(self, run_id: str) -> int:
        return self.send({"do": "stop", "run_id": run_id})

    def look(self) -> int:
        return self.send({"do": "look"})


class McpServer(Server):
    """``behaves`` names the file that says what children the next run gets."""

    def __init__(self, environ: dict[str, str], log: Path, behaves: Path) -> None:
        super().__init__([sys.executable, "-P", "-m", "hermes_rl_mcp.server"], environ, log)
        self._behaves = behaves

    def ready(self) -> None:
        client = {"name": "interleavings", "version": "1"}
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        if self.answer(self.send({"jsonrpc": "2.0", "method": "initialize", "params": hello})) is None:
            raise Violated("a server did not start")

    def result(self, number: int, timeout_s: float) -> dict[str, Any] | None:
        answer = self.answer(number, timeout_s)
        if answer is None:
            return None
        result = answer.get("result", {})
        content: dict[str, Any] | None = result.get("structuredContent")
        if content is None:
            raise Violated(f"a server answered {answer}")
        if result.get("isError"):
            return {"refused": content["error"]}
        if "runs" in content:
            return {"shown": {run["run_id"]: run["status"] for run in content["runs"]}}
        return content

    def call(self, tool: str, **arguments: Any) -> int:
        params = {"name": tool, "arguments": {name: value for name, value in arguments.items() if value is not None}}
        return self.send({"jsonrpc": "2.0", "method": "tools/call", "params": params})

    def start(self, request: dict[str, Any], environ: dict[str, str]) -> int:
        write_atomic(self._behaves, Path(environ[CHILD_COMMANDS]).read_text())
        return self.call("rl_start_training", idempotency_key=request["idempotency_key"])

    def stop(self, run_id: str) -> int:
        return self.call("rl_stop_training", run_id=run_id, confirm=True)

    def look(self) -> int:
        return self.call("rl_list_runs")


class Pending:
    """A question that a server has not answered yet."""

    def __init__(self, server: Server, number: int, then: Callable[[dict[str, Any]], None]) -> None:
        self.server, self.number, self._then = server, number, then
        self.done = False

    def settle(self, timeout_s: float) -> None:
        """Takes the answer if there is one by then. An answer that a kill cut off never comes, which is no fault."""
        found = self.server.result(self.number, timeout_s)
        if found is not None:
            self._then(found)
        elif timeout_s >= ANSWER_S and not self.server.killed:
            raise Violated(f"a server did not answer within {ANSWER_S:g} s")
        self.done = found is not None or self.server.killed


class World:
    """One example's home and processes. ``plant`` is a defect of ``plants.py`` for all its servers; ``shipped`` ones
    have none."""

    def __init__(
        self, folder: Path, environ: dict[str, str], plant: str | None, bystanders: list[Bystander], shipped: bool
    ) -> None:
        self.rig = Rig(
            folder, {**environ, "HERMES_HOME": str(folder / "home"), "HERMES_RL_CLAIMS_DIR": str(folder / "c")}
        )
        self.home = self.rig.home
        self.home.logs.mkdir(parents=True)
        self.folder = folder
        self.plant = plant
        self.shipped = shipped
        if shipped:
            select(self.rig, total_steps=1)
        self.bystanders = bystanders
        self.signal_log = folder / "signals.jsonl"
        self.watch = Watch(self.home, self.signal_log)
        self.servers: dict[str, Server] = {}
        self.pending: list[Pending] = []
        self.runs: list[str] = []
        """In the order in which they were seen first."""
        self._clock = itertools.count()
        self._began = time.monotonic()
        self.trace: list[str] = []
        self._scripts = {name: self._script(knobs) for name, knobs in BEHAVIOURS.items()}

    def note(self, words: str) -> None:
        self.trace.append(f"{time.monotonic() - self._began:7.2f} s  {words}")

    def _script(self, knobs: dict[str, dict[str, Any]]) -> dict[str, str]:
        environ = self.rig.script(knobs, **SHORT)
        commands = Path(environ[CHILD_COMMANDS])
        commands.write_text(commands.read_text().replace("fake_child.py", STEERED))
        return environ

    # ---- servers

    def server(self, slot: str) -> Server:
        """The one in this place; a new one if there is none."""
        if slot not in self.servers:
            self.note(f"server {slot} starts")
            server = self.servers[slot] = self._new_server(self.folder / f"server_{slot}.log")
            server.ready()
        return self.servers[slot]

    def _new_server(self, log: Path) -> Server:
        if not self.shipped:
            return DriverServer(self.rig.environ, log, self.signal_log, self.plant)
        behaves = self.folder / "behaves.json"
        environ = environ_with(self.rig, {**self.rig.environ, CHILD_COMMANDS: str(behaves)})
        return McpServer(environ, log, behaves)

    def kill_server(self, slot: str) -> None:
        if server := self.servers.pop(slot, None):
            server.kill()
            self.settle(0)

    def ask(self, server: Server, number: int, then: Callable[[dict[str, Any]], None], wait: bool) -> None:
        pending = Pending(server, number, then)
        self.pending.append(pending)
        if wait:
            pending.settle(ANSWER_S)

    def settle(self, timeout_s: float) -> None:
        """Takes what answers there are; with a timeout, all of them."""
        for pending in self.pending:
            if not pending.done:
                pending.settle(timeout_s)
        self.pending = [pending for pending in self.pending if not pending.done]

    # ---- what can be asked of a server

    def start(self, slot: str, behaviour: str, key: str | None, wait: bool) -> None:
        request = self.rig.request(idempotency_key=key, env={**SMALL, "total_steps": 1})
        sent = next(self._clock)

        def answered(answer: dict[str, Any]) -> None:
            run_id = answer.get("run_id")
            self.note(f"started {run_id}" if run_id else f"a start was refused: {answer['refused']}")
            if key is not None and run_id:
                self.watch.a_key_gave(key, run_id)
            elif run_id:
                self.watch.starts.append(Acknowledged(run_id, sent, next(self._clock)))

        server = self.server(slot)
        number = server.start(request.model_dump(mode="json"), self._scripts[behaviour])
        self.ask(server, number, answered, wait)

    def stop(self, slot: str, run_id: str, wait: bool) -> None:
        server = self.server(slot)
        self.ask(server, server.stop(run_id), lambda answer: None, wait)

    def look(self, slot: str, wait: bool) -> None:
        server = self.server(slot)

        def answered(answer: dict[str, Any]) -> None:
            if "shown" not in answer:
                raise Violated(f"a server could not show its runs: {answer}")
            self.watch.a_server_showed(answer["shown"], fresh=wait)

        self.ask(server, server.look(), answered, wait)

    # ---- what can happen to a run

    def pick(self, number: int, *, alive: bool) -> str | None:
        """``alive``: the one that has the device, if any. Else numbers count back from the newest."""
        self.runs += [run_id for run_id in self.watch.run_ids() if run_id not in self.runs]
        busy = (RunStatus.STARTING, RunStatus.RUNNING)
        found = [run_id for run_id in self.runs if alive and self.watch.record(run_id).status in busy]
        if not found:
            return self.runs[-1 - number % len(self.runs)] if self.runs else None
        return found[number % len(found)]

    def order(self, run_id: str, role: str, order: str) -> None:
        with (self.home.run(run_id).dir / f"orders_{role}").open("a") as file:
            file.write(order + "\n")

    def kill(self, run_id: str, role: str) -> None:
        """SIGKILL to each of its processes in this role, by identity."""
        for seen in self.watch.processes():
            if seen.run_id == run_id and seen.role == role:
                if role == "supervisor":
                    self.watch.lost.add(run_id)
                signal_process(seen.identity, signal.SIGKILL)

    def wait_until_ready(self, run_id: str, timeout_s: float) -> None:
        """Until it is running; not for one that has ended or whose turn has not come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            record = self.watch.record(run_id)
            if record.queue_position or record.status is RunStatus.RUNNING or record.status.terminal:
                return
            time.sleep(0.02)

    # ---- forged records

    def forge(self, status: RunStatus, supervisor: Identity, children: dict[str, Identity]) -> str:
        """A run directory that claims these processes and that nobody supervises."""
        request = self.rig.request()
        paths = self.home.run(request.run_id)
        draft = self.folder / "draft" / request.run_id
        draft.mkdir(parents=True)
        record = first_record(self.home, request)
        processes = {
            name: process.model_copy(update={"identity": children.get(name)})
            for name, process in record.processes.items()
        }
        changes = {"status": status, "supervisor": supervisor, "processes": processes}
        self.home.runs.mkdir(parents=True, exist_ok=True)
        write_atomic(draft / "request.json", request.model_dump_json())
        RunState.create(type(paths)(draft), record.model_copy(update=changes), "forged")
        self.watch.lost.add(request.run_id)
        draft.rename(paths.dir)
        return request.run_id

    def forge_bystanders(self) -> str:
        """Their pids, as if they had belonged to processes of the run that began earlier."""
        forged = [
            bystander.identity.model_copy(update={"started_at": bystander.identity.started_at - 5})
            for bystander in self.bystanders
        ]
        return self.forge(RunStatus.RUNNING, forged[0], dict(zip(("api", "trainer"), forged[1:], strict=True)))

    def forge_special(self, slot: str) -> str:
        """Init, everybody, our own group, and the server itself, which alone is there to read it."""
        for other in set(self.servers) - {slot}:
            self.kill_server(other)
        init, itself = identity_of(1), identity_of(self.server(slot).process.pid)
        assert init is not None and itself is not None
        nobody = init.model_copy(update={"pid": -1})
        run_id = self.forge(
            RunStatus.RUNNING, nobody, {"api": init, "trainer": itself, "env": init.model_copy(update={"pid": 0})}
        )
        self.look(slot, wait=True)
        return run_id

    def forge_queued_before_reboot(self) -> str:
        """Servers that start from now on give it its turn."""
        lost = Identity(pid=1, started_at=1.0, boot_id=f"not {boot_id()}")
        return self.forge(RunStatus.QUEUED, lost, {})

    # ---- the end

    def finish(self) -> None:
        """Everything that was asked for comes to its end: stops every run, waits, and looks again."""
        self.note("the end: every run is stopped")
        self.settle(ANSWER_S)
        for run_id in self.watch.run_ids():
            self.stop("A", run_id, wait=True)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self.look("A", wait=True)
            open_runs = [run_id for run_id in self.watch.run_ids() if run_id not in self.watch.shown]
            if not open_runs:
                break
            time.sleep(0.1)
        else:
            raise Violated(f"stopped, but not ended: {[self.watch.record(run_id) for run_id in open_runs]}")
        self.check()

    def check(self) -> None:
        self.watch.check()
        for bystander in self.bystanders:
            bystander.check()

    def explain(self) -> str:
        """What was done, and what the files say."""
        records = [self.home.run(run_id) for run_id in self.watch.run_ids()]
        parts = ["steps:", *self.trace]
        for paths in records:
            record = read_record(paths).model_dump_json(exclude_defaults=True)
            parts += [f"--- {paths.run_id}", paths.events.read_text(), record]
        parts += [f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(self.folder.glob("server_*.log"))]
        return "\n".join(parts)

    def close(self) -> None:
        """Ends whatever is left, by identity."""
        for slot in list(self.servers):
            self.servers.pop(slot).kill()
        deadline = time.monotonic() + ANSWER_S
        while (left := self.watch.processes()) and time.monotonic() < deadline:
            for seen in left:
                signal_process(seen.identity, signal.SIGKILL)
            time.sleep(0.05)


class Bystander:
    """A process of nobody's run. ``check`` raises Violated if it was signalled."""

    def __init__(self, log: Path, environ: dict[str, str]) -> None:
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "bystander.py"), str(log)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == b"listening\n"
        found = identity_of(self.process.pid)
        assert found is not None
        self.identity = found

    def check(self) -> None:
        if got := self._log.read_text():
            raise Violated(f"a process that belongs to no run got signals {got.split()}")
        if not is_alive(self.identity):
            raise Violated("a process that belongs to no run was killed")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
