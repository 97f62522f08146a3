"""Carries out one run: waits for the device, starts the three processes, watches them, ends them in order.

It alone writes the run's record, and it writes a terminal status only after the processes are gone or are listed as
leftovers. It holds ``supervisor.lock`` while it lives. Before every start of a process, and about ten times a second,
it looks whether a stop was asked for (``stop.json``) and whether a process has ended. What the processes are doing is
looked at beside that (``onlooker``).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup, TaskStatus

from hermes_rl_mcp.checkpoints import last_complete
from hermes_rl_mcp.contracts.config import Ports, RunConfig
from hermes_rl_mcp.contracts.rollout_api import HealthReply
from hermes_rl_mcp.contracts.runs import START_ORDER, ProcessName, RunRequest, RunStatus, StopRequest
from hermes_rl_mcp.files import create_once, now, read_file, write_atomic
from hermes_rl_mcp.paths import Home, claims_dir
from hermes_rl_mcp.redact import redact_text, secret_values
from hermes_rl_mcp.runs import ending, family, oom, outcome, reserve
from hermes_rl_mcp.runs.claims import Ticket, bind_loopback, take_ticket
from hermes_rl_mcp.runs.health import Health, NotReadyError, wait_ready
from hermes_rl_mcp.runs.logs import LogKeeper
from hermes_rl_mcp.runs.outcome import Verdict
from hermes_rl_mcp.runs.process import ManagedProcess, identity_of
from hermes_rl_mcp.runs.runconfig import make_config, to_yaml
from hermes_rl_mcp.runs.specs import ChildCommands, Handover, child_spec, marker
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.runs.watch.onlooker import Onlooker

_log = logging.getLogger(__name__)

_TICK_S = 0.1
_SIGTERM_SETTLE_S = 1.0
"""When the machine shuts down, children get SIGTERM when we do: wait for ours before judging theirs."""
_GONE_S = 1.0
"""A directory that is missing for so long was deleted; shorter may be a network file system's hiccup."""
_EVALUATING = "training is complete; the environment evaluates what was learned"
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
        self._stays_s = 0.0  # how long the trainer may stay up after it, to be evaluated; 0 = not at all
        self._env_may_go = False
        self._oom_kills_before = oom.count()
        self._logs = LogKeeper(self._limits.log_max_bytes, state.note)
        self._said_unreadable = False
        self._missed_at: float | None = None  # monotonic; since when the run's directory is missing
        self._deleted = False
        self._began = 0.0  # monotonic; when it had the device
        self._onlooker: Onlooker | None = None

    async def run(self) -> RunStatus | None:
        """From queue to terminal record. None: the run's directory was deleted meanwhile, so there is no record."""
        family.adopt_orphans()
        async with anyio.create_task_group() as group:
            await group.start(self._listen)
            verdict = await self._live()
            group.cancel_scope.cancel()
        return None if self._deleted else verdict.status

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
            async with anyio.create_task_group() as aside:
                verdict = await self._until_over(stack, aside)
                aside.cancel_scope.cancel()
            ended = await self._end(verdict)
        return ended

    async def _until_over(self, stack: AsyncExitStack, aside: TaskGroup) -> Verdict:
        try:
            self._state.update(supervisor=identity_of(os.getpid()), detail="waiting for its turn")
            if not self._paths.reserve.exists():  # of an earlier version
                reserve.make(self._paths.reserve)
            ticket = await self._queue()
            stack.callback(ticket.release)
            await self._start_all(stack, ticket, aside)
            await self._watch()
        except _Over as over:
            return over.verdict
        except Exception as error:  # noqa: BLE001 - the run's boundary: its processes must be ended and the record closed
            return await self._upset(error)

    async def _upset(self, error: Exception) -> Verdict:
        """What it means that this supervisor could not go on."""
        while not self._paths.dir.exists():
            if self._is_gone():
                return _deleted(self._paths.dir)
            await anyio.sleep(_TICK_S)
        if reserve.is_full(error):
            return self._disk_full(self._paths.dir, f"the run's record could not be written there ({error})")
        _log.exception("supervisor failed", exc_info=error)
        return Verdict(
            RunStatus.FAILED,
            "supervisor failed",
            f"The run's supervisor failed: {type(error).__name__}: {error}",
            f"See its log: {self._home.log('supervisor', self._request.run_id)}",
        )

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

    async def _start_all(self, stack: AsyncExitStack, ticket: Ticket, aside: TaskGroup) -> None:
        await self._check()
        self._began = time.monotonic()
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
        self._onlooker = Onlooker(
            self._home, self._state, config, self._health, self._processes, self._limits, self._secrets()
        )
        aside.start_soon(self._onlooker.run)
        sockets = {"api": api_socket, "trainer": trainer_socket}
        for name in START_ORDER:
            await self._check()
            self._spawn(name, config, handover)
            if name in sockets:
                sockets[name].close()  # only the child listens, and once it died nobody answers
            await self._wait_ready(name, self._health)
        startup_s = round(time.monotonic() - self._began, 3)
        self._state.move(
            RunStatus.RUNNING, "all three processes are ready", detail="training", startup_seconds=startup_s
        )

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
        self._say(f"starting the {title}")
        try:
            await wait_ready(
                lambda: health.ask(name),
                watch=self._check,
                say=self._say,
                limit_s=self._limits.ready_s(name),
            )
        except NotReadyError as error:
            line = outcome.last_line(self._processes[name].spec.log, self._secrets())
            sentence = f"The {title} was {error}." + (f" Its last log line: {line}" if line else "")
            hint = f"See its log: {self._processes[name].spec.log}"
            raise _Over(Verdict(RunStatus.FAILED, f"{name} not ready", sentence, hint)) from None
        self._state.update_process(name, ready=True)

    # ---- watch

    async def _watch(self) -> NoReturn:
        while True:
            await self._check()
            await self._pause()

    async def _pause(self) -> None:
        """A tick, cut short by a signal."""
        with anyio.move_on_after(_TICK_S):
            await self._asked_to_end.wait()
        if self._asked_to_end.is_set():
            self._asked_to_end = anyio.Event()

    async def _check(self) -> None:
        """Raises _Over if the run has to end. Completion goes before a stop, and a stop before a death."""
        if self._is_gone():
            raise _Over(_deleted(self._paths.dir))
        if self._missed_at is not None:
            return  # whatever happens meanwhile has that cause
        self._logs.check(process.spec.log for process in self._processes.values())
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
        if self._onlooker and (full := self._onlooker.full_disk):
            raise _Over(self._disk_full(full.folder, f"{full.free_bytes // 1024} KiB are left there"))

    def _say(self, detail: str) -> None:
        with suppress(OSError):  # words alone are not worth a run
            self._state.update(detail=detail)

    def _is_gone(self) -> bool:
        """Whether somebody deleted the run's directory."""
        if self._paths.dir.exists():
            self._missed_at = None
            return False
        if self._missed_at is None:
            self._missed_at = time.monotonic()
        self._deleted = time.monotonic() - self._missed_at >= _GONE_S
        return self._deleted

    def _note_exits(self) -> list[ProcessName]:
        """Records exits as they are seen. In the order of dependence: a dead API takes the others with it."""
        dead: list[ProcessName] = []
        for name in START_ORDER:
            process = self._processes.get(name)
            if process is None or (code := process.poll()) is None:
                continue
            dead.append(name)
            if self._state.record.processes[name].exit_code != code:
                with suppress(OSError):  # who died is judged all the same, and the closing record has it
                    self._state.update_process(name, exit_code=code, forced=process.forced)
                    self._state.note(f"{name} {outcome.exit_words(code)}")
        return dead

    def _completion(self) -> Verdict | None:
        trainer = self._processes.get("trainer")
        if trainer is None:
            return None
        known = self._completed_at is not None
        if not self._has_completed():
            return None
        if not known:
            self._say(_EVALUATING if self._stays_s else "the trainer is done; waiting for it to exit")
        code = trainer.poll()
        if code == 0 or (code is not None and trainer.forced):
            return Verdict(RunStatus.COMPLETED, "the trainer completed and exited")
        if code is not None:
            return self._lost_in_evaluation(trainer.exit_code) if self._stays_s else self._failure("trainer")
        assert self._completed_at is not None
        if self._stays_s and "env" in self._processes and self._processes["env"].poll() is not None:
            return Verdict(RunStatus.COMPLETED, "the trainer completed; the environment is gone and evaluates no more")
        if time.monotonic() - self._completed_at > self._limits.completion_exit_s + self._stays_s:
            return Verdict(RunStatus.COMPLETED, "the trainer completed but did not exit; it was made to")
        return None

    def _lost_in_evaluation(self, code: int | None) -> Verdict:
        """All was saved before; what is missing is in the evaluation's own record."""
        words = outcome.exit_words(code or 0)
        return Verdict(RunStatus.COMPLETED, f"the trainer completed; while it was evaluated it {words}")

    def _has_completed(self) -> bool:
        """Whether the trainer's completion record is there; if so, its exit counts as one after it."""
        if self._completed_at is None:
            report = outcome.read_report(self._paths, "trainer")
            if report is not None and report.status == "completed":
                self._completed_at = time.monotonic()
                self._stays_s = report.stays_s
        return self._completed_at is not None

    def _stop_asked(self) -> Verdict | None:
        try:
            text = read_file(self._paths.stop_request)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and not self._said_unreadable:
                self._said_unreadable = True  # the next read may succeed, and nothing is concluded from this one
                _log.warning("%s cannot be read now: %s", self._paths.stop_request, error)
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
            if outcome.covers_rest(await self._rollouts(self._health), self._config):
                self._env_may_go = True
                self._say("the environment is done; training on what it sent")
                return None
            # The trainer may have completed while we asked.
            return self._completion() or outcome.ended_early(self._paths, self._config)
        cause = await self._cause(name)
        self._note_exits()
        if (verdict := self._completion()) or self._completed_at is not None:
            return verdict
        return self._failure(cause)

    async def _rollouts(self, health: Health) -> HealthReply | None:
        """Asked again for a while if there is no answer: a busy rollout API costs no run that has all it needs."""
        deadline = time.monotonic() + self._limits.cascade_s
        while (found := await health.rollouts()) is None and time.monotonic() < deadline:
            if self._processes["api"].poll() is not None:
                break
            await anyio.sleep(_TICK_S)
        return found

    async def _cause(self, name: ProcessName) -> ProcessName:
        """Who is to blame for this death. A server that fails stops answering before it ends, so whoever needs it may
        well be dead first: those that do not answer get some time to be seen dead."""
        needed = START_ORDER[: START_ORDER.index(name)]
        deadline = time.monotonic() + self._limits.cascade_s
        while True:
            for other in needed:
                if self._processes[other].poll() is not None:
                    return other
            if time.monotonic() >= deadline or await self._all_well(needed):
                return name
            await anyio.sleep(_TICK_S)

    async def _all_well(self, names: tuple[ProcessName, ...]) -> bool:
        if self._health is None or ("api" in names and await self._health.rollouts() is None):
            return False
        if "trainer" not in names:
            return True
        trainer = await self._health.sampler()
        return trainer is not None and trainer.status != "failed"

    def _disk_full(self, folder: Path, what: str) -> Verdict:
        named = self._config.trainer.checkpoint_dir if self._config else ""
        return outcome.disk_full(folder, what, last_complete(Path(named) if named else self._paths.checkpoints))

    # ---- end

    async def _end(self, verdict: Verdict) -> Verdict:
        """Ends all processes, then writes how the run ended."""
        verdict = self._masked(verdict)
        self._state.begin_end()
        if self._deleted:
            self._state.abandon()
            _log.error("%s", verdict.error)
        if verdict.status is RunStatus.STOPPED:
            self._state.move(
                RunStatus.STOPPING, f"stop asked for: {verdict.reason}", stop_reason=verdict.reason, detail=""
            )
        else:
            self._state.update(error=verdict.error, hint=verdict.hint)
        left = await ending.stop_processes(self._state, self._processes, self._limits, self._has_completed)
        if self._config is not None:
            left += await ending.end_leftovers(marker(self._config), left, self._limits)
        if verdict.status is RunStatus.STOPPED and self._completed():
            verdict = Verdict(RunStatus.COMPLETED, "the trainer completed before the stop reached it")
        verdict = outcome.with_way_on(verdict, self._paths)  # only now: the trainer saves when it is ended
        used = await to_thread.run_sync(ending.disk_bytes, self._home, self._paths)
        peak = self._onlooker.peak_memory_bytes if self._onlooker else None
        await ending.close(
            self._state, verdict, self._limits, leftover_pids=sorted(left), peak_memory_bytes=peak, disk_bytes=used
        )
        return verdict

    def _masked(self, verdict: Verdict) -> Verdict:
        """What a child said may hold its address or a key; an agent reads the record, and neither is for it."""
        error, hint = (text and self._mask(text) for text in (verdict.error, verdict.hint))
        return replace(verdict, error=error, hint=hint)

    def _mask(self, text: str) -> str:
        return redact_text(text, self._secrets())

    def _secrets(self) -> list[str]:
        run = self._config.run if self._config else None
        return [*secret_values(self._environ), *((run.nonce, run.path_prefix) if run else ())]

    def _failure(self, name: ProcessName) -> Verdict:
        process = self._processes[name]
        code, log = process.poll(), process.spec.log
        assert code is not None
        ooms = oom.count().since(self._oom_kills_before)
        verdict = outcome.failure(self._paths, name, code, log, oom_kills=ooms, secrets=self._secrets())
        free, folder = reserve.fullest({self._paths.dir, log.parent})
        words = f"{verdict.error} {outcome.last_line(log, self._secrets())}"
        if free < reserve.FULL_BYTES or reserve.says_full(words):
            return outcome.because_disk_full(verdict, self._disk_full(folder, ""))
        return verdict

    def _completed(self) -> bool:
        """Proof as for any completion: the record, and exit 0, one that we forced after the record, or one within the
        evaluation that follows it."""
        trainer = self._processes.get("trainer")
        report = outcome.read_report(self._paths, "trainer")
        if trainer is None or report is None or report.status != "completed":
            return False
        forced = trainer.forced and self._completed_at is not None
        return trainer.exit_code == 0 or forced or report.stays_s > 0


def _deleted(folder: Path) -> Verdict:
    return Verdict(RunStatus.FAILED, "deleted", f"{folder} was deleted while its run was going; its processes end.")


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port
