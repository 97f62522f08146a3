"""Carries out one run: waits for the device, starts the three processes, watches them, ends them in order.

It alone writes the run's record, and it writes a terminal status only after the processes are gone or are listed as
leftovers. It holds ``supervisor.lock`` while it lives. Before every start of a process, and about ten times a second,
it looks whether a stop was asked for (``stop.json``) and whether a process has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
from anyio import to_thread
from anyio.abc import TaskStatus

from hermes_rl_mcp.contracts.config import Ports, RunConfig
from hermes_rl_mcp.contracts.runs import START_ORDER, STOP_ORDER, ProcessName, RunRequest, RunStatus, StopRequest
from hermes_rl_mcp.files import create_once, now, trim_log, write_atomic
from hermes_rl_mcp.paths import Home, claims_dir
from hermes_rl_mcp.redact import redact_text, secret_values
from hermes_rl_mcp.runs import outcome
from hermes_rl_mcp.runs.claims import Ticket, bind_loopback, take_ticket
from hermes_rl_mcp.runs.health import Health, NotReadyError, wait_ready
from hermes_rl_mcp.runs.outcome import Verdict
from hermes_rl_mcp.runs.process import ManagedProcess, end_all, identity_of, marked
from hermes_rl_mcp.runs.runconfig import make_config, to_yaml
from hermes_rl_mcp.runs.specs import ChildCommands, Handover, child_spec, marker
from hermes_rl_mcp.runs.state import RunState

_log = logging.getLogger(__name__)

_TICK_S = 0.1
_SIGTERM_SETTLE_S = 1.0
"""When the machine shuts down, children get SIGTERM when we do: wait for ours before judging theirs."""
_LEFTOVER_TERM_S = 3.0
"""For processes that left their group; nobody waits for a result of theirs."""
_LOG_CHECK_S = 5.0
_LOG_MAX_BYTES = 64 * 2**20
_LOG_KEEP_BYTES = 2**20
_PREFERRED_PORTS = Ports(rollout_api=8000, trainer=8001)


class _Over(Exception):
    """The run has to end, as the verdict says."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class Supervisor:
    """One run's life. ``state`` was loaded by the holder of the supervisor lock."""

    def __init__(self, home: Home, request: RunRequest, state: RunState, environ: Mapping[str, str]) -> None:
        self._home = home
        self._request = request
        self._state = state
        self._environ = environ
        self._paths = home.run(request.run_id)
        self._children = ChildCommands.from_environ(environ)
        self._limits = self._children.limits
        self._processes: dict[ProcessName, ManagedProcess] = {}
        self._config: RunConfig | None = None
        self._health: Health | None = None
        self._asked_to_end = anyio.Event()
        self._signalled: StopRequest | None = None  # a stop that could not be put on disk
        self._completed_at: float | None = None  # monotonic time at which the completion record was seen
        self._env_may_go = False
        self._oom_kills_before = outcome.count_oom_kills()
        self._logs_checked_at = time.monotonic()

    async def run(self) -> RunStatus:
        """From queue to terminal record."""
        async with anyio.create_task_group() as group:
            await group.start(self._listen)
            self._state.update(supervisor=identity_of(os.getpid()), detail="waiting for its turn")
            verdict = await self._live()
            group.cancel_scope.cancel()
        return verdict.status

    async def _listen(self, *, task_status: TaskStatus[None]) -> None:
        """A signal wakes the supervisor; without a stop request on disk it is one."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for sig in signals:
                reason = f"the supervisor received {signal.Signals(sig).name}"
                request = StopRequest(reason=reason, requested_at=now())
                try:
                    create_once(self._paths.stop_request, request.model_dump_json())
                except OSError:  # a full disk; the signal counts all the same
                    _log.exception("the stop request could not be written")
                    self._signalled = request
                self._asked_to_end.set()

    async def _live(self) -> Verdict:
        async with AsyncExitStack() as stack:
            try:
                ticket = await self._queue()
                stack.callback(ticket.release)
                await self._start_all(stack, ticket)
                await self._watch()
            except _Over as over:
                verdict = over.verdict
            except Exception as error:  # noqa: BLE001 - the run's boundary: its processes must be ended and the record closed
                _log.exception("supervisor failed")
                verdict = Verdict(
                    RunStatus.FAILED,
                    "supervisor failed",
                    f"The run's supervisor failed: {type(error).__name__}: {error}",
                    f"See its log: {self._home.log('supervisor', self._request.run_id)}",
                )
            return await self._end(verdict)

    # ---- start

    async def _queue(self) -> Ticket:
        """Waits until every run before us on this device is gone."""
        ticket = take_ticket(claims_dir(self._environ), self._request.device, self._request.run_id)
        while ahead := ticket.ahead():
            self._state.update(
                queue_position=len(ahead), detail=f"waiting for the {self._request.device} behind run {ahead[-1]}"
            )
            try:
                await self._check()
            except _Over:
                ticket.release()
                raise
            await self._pause()
        return ticket

    async def _start_all(self, stack: AsyncExitStack, ticket: Ticket) -> None:
        await self._check()
        self._state.move(RunStatus.STARTING, f"has the {self._request.device}", queue_position=None, detail="")
        api_socket = stack.enter_context(bind_loopback(_PREFERRED_PORTS.rollout_api))
        trainer_socket = stack.enter_context(bind_loopback(_PREFERRED_PORTS.trainer))
        ports = Ports(rollout_api=_port(api_socket), trainer=_port(trainer_socket))
        config = self._config = make_config(self._request, ports)
        write_atomic(self._paths.config, to_yaml(config))
        self._state.update(ports=ports)
        read_end, write_end = os.pipe()  # the children see its end when we are gone
        stack.callback(os.close, read_end)
        stack.callback(os.close, write_end)
        handover = Handover(api_socket.fileno(), trainer_socket.fileno(), read_end, ticket.lock.fd)
        self._health = await stack.enter_async_context(Health(config))
        sockets = {"api": api_socket, "trainer": trainer_socket}
        for name in START_ORDER:
            await self._check()
            self._spawn(name, config, handover)
            if name in sockets:
                sockets[name].close()  # only the child listens, and once it died nobody answers
            await self._wait_ready(name, self._health)
        self._state.move(RunStatus.RUNNING, "all three processes are ready", detail="training")

    def _spawn(self, name: ProcessName, config: RunConfig, handover: Handover) -> None:
        spec = child_spec(
            name,
            home=self._home,
            run_dir=self._paths.dir,
            config=config,
            environ=self._environ,
            commands=self._children.commands,
            handover=handover,
            resume=self._request.resume_from is not None,
        )
        try:
            process = self._processes[name] = ManagedProcess.spawn(spec)
        except OSError as error:
            sentence = f"The {outcome.TITLES[name]} could not be started: {error}"
            raise _Over(Verdict(RunStatus.FAILED, f"{name} not started", sentence)) from error
        self._state.update_process(name, identity=process.identity)
        self._state.note(f"{name} started, pid {process.identity.pid}")

    async def _wait_ready(self, name: ProcessName, health: Health) -> None:
        title = outcome.TITLES[name]
        self._state.update(detail=f"starting the {title}")
        try:
            await wait_ready(
                lambda: health.ask(name),
                watch=self._check,
                say=lambda words: self._state.update(detail=words),
                limit_s=self._limits.ready_s(name),
            )
        except NotReadyError as error:
            line = outcome.last_line(self._processes[name].spec.log, self._secrets())
            sentence = f"The {title} was {error}." + (f" Its last log line: {line}" if line else "")
            hint = f"See its log: {self._processes[name].spec.log}"
            raise _Over(Verdict(RunStatus.FAILED, f"{name} not ready", sentence, hint)) from None
        self._state.update_process(name, ready=True)

    # ---- watch

    async def _watch(self) -> None:
        while True:
            await self._check()
            self._trim_logs()
            await self._pause()

    async def _pause(self) -> None:
        """A tick, cut short by a signal."""
        with anyio.move_on_after(_TICK_S):
            await self._asked_to_end.wait()
        if self._asked_to_end.is_set():
            self._asked_to_end = anyio.Event()

    async def _check(self) -> None:
        """Raises _Over if the run has to end. Completion goes before a stop, and a stop before a death."""
        dead = self._note_exits()
        if verdict := self._completion():
            raise _Over(verdict)
        if verdict := self._stop_asked():
            raise _Over(verdict)
        if self._completed_at is not None:
            return  # the others may go once the trainer is done
        for name in dead:
            if verdict := await self._death(name):
                raise _Over(verdict)

    def _note_exits(self) -> list[ProcessName]:
        """Records exits as they are seen. In the order of dependence: a dead API takes the others with it."""
        dead: list[ProcessName] = []
        for name in START_ORDER:
            process = self._processes.get(name)
            if process is None or (code := process.poll()) is None:
                continue
            dead.append(name)
            if self._state.record.processes[name].exit_code != code:
                self._state.update_process(name, exit_code=code, forced=process.forced)
                self._state.note(f"{name} {outcome.exit_words(code)}")
        return dead

    def _completion(self) -> Verdict | None:
        trainer = self._processes.get("trainer")
        if trainer is None:
            return None
        if self._completed_at is None:
            report = outcome.read_report(self._paths, "trainer")
            if report is None or report.status != "completed":
                return None
            self._completed_at = time.monotonic()
            self._state.update(detail="the trainer is done; waiting for it to exit")
        code = trainer.poll()
        if code == 0 or (code is not None and trainer.forced):
            return Verdict(RunStatus.COMPLETED, "the trainer completed and exited")
        if code is not None:
            return self._failure("trainer", code, trainer)
        if time.monotonic() - self._completed_at > self._limits.completion_exit_s:
            return Verdict(RunStatus.COMPLETED, "the trainer completed but did not exit; it was made to")
        return None

    def _stop_asked(self) -> Verdict | None:
        try:
            text = self._paths.stop_request.read_bytes()
        except FileNotFoundError:
            return Verdict(RunStatus.STOPPED, self._signalled.reason) if self._signalled else None
        try:
            reason = StopRequest.model_validate_json(text).reason
        except ValueError:  # somebody's intent is clear even if the text is not
            reason = "stop.json (unreadable)"
        return Verdict(RunStatus.STOPPED, reason)

    async def _death(self, name: ProcessName) -> Verdict | None:
        """What the end of this process means; None if it may go."""
        process = self._processes[name]
        code = process.exit_code
        assert code is not None
        if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
            with anyio.move_on_after(_SIGTERM_SETTLE_S):
                await self._asked_to_end.wait()
            if verdict := self._stop_asked():
                return verdict
        if name == "env" and code == 0 and self._config and self._health:
            if self._env_may_go:
                return None
            if outcome.covers_rest(await self._health.rollouts(), self._config):
                self._env_may_go = True
                self._state.update(detail="the environment is done; training on what it sent")
                return None
            # The trainer may have completed while we asked.
            return self._completion() or outcome.ended_early(self._paths, self._config)
        return self._failure(name, code, process)

    # ---- end

    async def _end(self, verdict: Verdict) -> Verdict:
        """Ends all processes, then writes how the run ended."""
        verdict = self._masked(verdict)
        if verdict.status is RunStatus.STOPPED:
            self._state.move(
                RunStatus.STOPPING, f"stop asked for: {verdict.reason}", stop_reason=verdict.reason, detail=""
            )
        else:
            self._state.update(error=verdict.error, hint=verdict.hint)
        stuck = await self._stop_processes()
        leftovers = await self._end_leftovers()
        if verdict.status is RunStatus.STOPPED and self._completed():
            verdict = Verdict(RunStatus.COMPLETED, "the trainer completed before the stop reached it")
        self._state.move(
            verdict.status,
            verdict.reason,
            error=verdict.error,
            hint=verdict.hint,
            leftover_pids=sorted({*stuck, *leftovers}),
        )
        return verdict

    def _masked(self, verdict: Verdict) -> Verdict:
        """What a child said may hold its address or a key; an agent reads the record, and neither is for it."""
        error, hint = (text and redact_text(text, self._secrets()) for text in (verdict.error, verdict.hint))
        return replace(verdict, error=error, hint=hint)

    def _secrets(self) -> list[str]:
        run = self._config.run if self._config else None
        return [*secret_values(self._environ), *((run.nonce, run.path_prefix) if run else ())]

    def _failure(self, name: ProcessName, code: int, process: ManagedProcess) -> Verdict:
        log, ooms = process.spec.log, self._oom_kills()
        return outcome.failure(self._paths, name, code, log, oom_kills=ooms, secrets=self._secrets())

    async def _stop_processes(self) -> list[int]:
        stuck: list[int] = []
        for name in STOP_ORDER:
            process = self._processes.get(name)
            if process is None:
                continue
            self._state.update(detail=f"stopping the {outcome.TITLES[name]}")
            # After its completion record the trainer has nothing left to save.
            patient = name != "trainer" or self._completed_at is None
            term_s = self._limits.term_s(name) if patient else self._limits.kill_s
            gone = await process.stop(term_s=term_s, kill_s=self._limits.kill_s)
            if process.exit_code is not None:
                self._state.update_process(name, exit_code=process.exit_code, forced=process.forced)
            if gone:
                process.reap()
            else:
                stuck.append(process.identity.pid)
        return stuck

    async def _end_leftovers(self) -> list[int]:
        """Descendants that left their group are known by the run's marker."""
        if self._config is None:
            return []
        own = marker(self._config)
        found = await to_thread.run_sync(marked, own)
        if found:
            _log.warning("ending processes that left their group: %s", [one.pid for one in found])
            await to_thread.run_sync(lambda: end_all(found, term_s=_LEFTOVER_TERM_S, kill_s=self._limits.kill_s))
        return [one.pid for one in await to_thread.run_sync(marked, own)] if found else []

    def _completed(self) -> bool:
        """Proof as for any completion: the record, and exit 0 or one that we forced after the record."""
        trainer = self._processes.get("trainer")
        report = outcome.read_report(self._paths, "trainer")
        if trainer is None or report is None or report.status != "completed":
            return False
        return trainer.exit_code == 0 or (trainer.forced and self._completed_at is not None)

    def _oom_kills(self) -> int:
        return outcome.count_oom_kills() - self._oom_kills_before

    def _trim_logs(self) -> None:
        """A child that floods its log must not fill the disk."""
        if time.monotonic() - self._logs_checked_at < _LOG_CHECK_S:
            return
        self._logs_checked_at = time.monotonic()
        for process in self._processes.values():
            if trim_log(process.spec.log, _LOG_MAX_BYTES, _LOG_KEEP_BYTES):
                self._state.note(f"{process.spec.name} log cut: it had outgrown {_LOG_MAX_BYTES} bytes")


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port
