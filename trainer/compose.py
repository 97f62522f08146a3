"""Puts the trainer's parts together for one run and tells the truth about how it ended.

Invariants: the endpoint answers /health before the model is there; a run that did not finish never exits 0; a report
is written last, after everything it speaks of.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import yaml
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.checkpoints import ADAPTER, Checkpoint, inspect, newest
from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.records import TrainerSummary, WandbState
from hermes_rl_mcp.contracts.rollout_api import Registration
from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.contracts.sampling_api import EVALUATING
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, PreflightError, ResumeError
from hermes_rl_mcp.files import write_atomic
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.redact import redact_text, secret_values
from trainer import evaluation_wait, out_of_memory
from trainer.backends.base import Backend
from trainer.checkpoints import Checkpoints, Counters
from trainer.http_server import HttpServer, listener
from trainer.loop import Loop, Outcome, Recorders
from trainer.metrics import JsonLines, LastEvaluation, Metrics, utc_now
from trainer.progress import ProgressFile
from trainer.rollout_client import RolloutClient
from trainer.run_files import keep_steps_up_to, last_step, rewards
from trainer.sampling_app import create_app
from trainer.service import SamplingService
from trainer.stopping import EXIT_CODE, StopSignal
from trainer.wandb_sink import WandbSink

_log = logging.getLogger(__name__)


def run(config_path: Path, listen_fd: int | None, *, resume: bool) -> int:
    """The exit code: 0 completed, 1 failed, 143 asked to stop. Call from the main thread."""
    paths = RunPaths(config_path.resolve().parent)
    stop = StopSignal()
    stop.install()
    with suppress(FileNotFoundError):
        paths.report("trainer").unlink()
    try:
        config = read_config(config_path)
        trainer = _Trainer(config, paths, stop, listen_fd, resume=resume)
        try:
            return trainer.run()
        finally:
            trainer.close()
    except HermesRLError as error:
        _log.error("%s", error)
        _report_failure(paths, error.message, error.hint)
    except Exception as error:  # noqa: BLE001  process boundary: whatever happened goes into the report and the log
        _log.exception("the trainer failed")
        _report_failure(
            paths,
            f"The trainer failed: {type(error).__name__}: {error}",
            "See the trainer's log (hermes-rl runs logs RUN_ID --process trainer).",
        )
    return 1


def read_config(path: Path) -> RunConfig:
    """Raises InvalidValueError with the first problem."""
    try:
        return RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidValueError(f"Cannot read {path}: {error.strerror}.", hint="Give a run's config.yaml.") from error
    except (ValidationError, yaml.YAMLError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        detail = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise InvalidValueError(f"{path} is no run configuration: {detail}.", hint="Correct the file.") from error


class _Trainer:
    """One run. ``close`` in every case."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, stop: StopSignal, listen_fd: int | None, *, resume: bool
    ) -> None:
        self._config = config
        self._paths = paths
        self._stop = stop
        self._resume = resume
        self._backend: Backend | None = None
        self._loop: Loop | None = None
        self._wandb_state = WandbState()
        self._memory_before = ""
        self._began = time.monotonic()
        settings = config.trainer
        self._group = settings.wandb_group or config.run.run_id
        self._service = SamplingService(
            nonce=config.run.nonce,
            model=config.run.base_model,
            wandb_group=self._group if settings.use_wandb else None,
            wandb_project=settings.wandb_project if settings.use_wandb else None,
        )
        app = create_app(self._service, path_prefix=config.run.path_prefix)
        self._server = HttpServer(app, listener("127.0.0.1", config.ports.trainer, listen_fd))

    def close(self) -> None:
        self._server.stop()
        if self._backend is not None:
            self._backend.close()

    def run(self) -> int:
        try:
            folder = Path(self._config.trainer.checkpoint_dir or self._paths.checkpoints)
            self._check_directory(folder)
            checkpoint = self._checkpoint(folder) if self._resume else None
            backend = self._load()
            run, rank = self._config.run, self._config.trainer.lora_rank
            checkpoints = Checkpoints(
                folder,
                backend,
                base_model=run.base_model,
                lora_rank=rank,
                keep=self._config.trainer.keep_checkpoints,
            )
            start = self._restore(checkpoints, checkpoint) if checkpoint is not None else None
            self._stop.gracefully()
            outcome = self._train(backend, checkpoints, start)
        except Exception as error:
            told = self._told(error)
            self._service.failed(f"failed: {told}")
            if told is error:
                raise
            raise told from error
        if not outcome.finished:
            _log.info("asked to stop; last checkpoint: %s", outcome.checkpoint)
            return EXIT_CODE
        stays_s = self._evaluation_s()
        self._report_completion(backend, outcome, stays_s)
        if stays_s:
            self._stay(backend, stays_s)
        self._stop.completed()
        self._service.phase("finished")
        return 0

    def _evaluation_s(self) -> float:
        """How long to stay up for the environment's evaluation; 0 = there will be none."""
        if self._stop.event.is_set() or not evaluation_wait.is_expected(self._config, self._paths.evaluation):
            return 0.0
        return evaluation_wait.bound_s(time.monotonic() - self._began)

    def _stay(self, backend: Backend, limit_s: float) -> None:
        """All is saved and on record; signals only end the wait now."""
        self._service.phase(EVALUATING)
        ProgressFile(self._paths.progress).finishing(
            self._config.total_steps, "evaluating the base and the result on held-out items"
        )
        try:
            _log.info("%s", evaluation_wait.wait(self._paths.evaluation, backend, self._stop.event, limit_s))
        except Exception:  # noqa: BLE001  whatever it is, the run is complete
            _log.exception("the evaluation was not waited for")

    def _told(self, error: Exception) -> Exception:
        """``error``, or what is to be said of memory that ran out."""
        which = out_of_memory.kind(error)
        if which is None:
            return error
        phase = self._service.health().phase
        if self._loop is not None:
            sampling = self._backend is not None and error is self._backend.failure
            phase = f"{'sampling for' if sampling else 'training'} step {self._loop.step + 1}"
        longest = self._config.max_token_length
        return out_of_memory.failure(
            which, error, phase, self._config.trainer, longest_answer=longest, before=self._memory_before
        )

    def _load(self) -> Backend:
        from trainer.models.materialise import materialise

        run = self._config.run
        folder = materialise(run.base_model, run.model_path, self._service.phase)
        from trainer.backends.local.backend import LocalBackend

        self._memory_before = f"Before the model was loaded, {LocalBackend.free_memory(self._config.trainer)}."
        self._backend = LocalBackend.open(folder, self._config.trainer, self._service.phase)
        self._service.loaded(self._backend)
        return self._backend

    def _check_directory(self, folder: Path) -> None:
        """A used run directory is refused unless resuming was asked for."""
        good = newest(folder)
        if not self._resume and (good is not None or self._paths.metrics.exists()):
            raise PreflightError(
                f"{self._paths.dir} already holds a run (last checkpoint: {good or 'none'}).",
                hint="Add --resume to go on from it, or copy config.yaml into a new folder.",
            )

    def _checkpoint(self, folder: Path) -> Checkpoint:
        """The newest one, proven whole and of this configuration before anything large is loaded."""
        found = newest(folder)
        if found is None:
            raise ResumeError(f"There is no complete checkpoint in {folder}.", hint="Start without --resume.")
        self._service.phase(f"checking {found.name}")
        checkpoint = inspect(found)
        run, settings = self._config.run, self._config.trainer
        checkpoint.require_fit(
            base_model=run.base_model,
            model_path=run.model_path,
            lora_rank=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
        )
        if checkpoint.step > self._config.total_steps:
            raise ResumeError(
                f"The checkpoint {found} is beyond total_steps = {self._config.total_steps}.",
                hint=f"Set total_steps above {checkpoint.step}.",
            )
        return checkpoint

    def _restore(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> Counters:
        self._service.phase(f"restoring {checkpoint.folder.name}")
        counters = checkpoints.restore(checkpoint)
        for path in (self._paths.metrics, self._paths.rollouts):
            keep_steps_up_to(path, counters.step)
        return counters

    def _train(self, backend: Backend, checkpoints: Checkpoints, start: Counters | None) -> Outcome:
        sink = self._wandb()
        try:
            return self._run_loop(backend, checkpoints, start, sink)
        finally:
            if sink is not None:
                self._wandb_state = sink.finish()

    def _run_loop(
        self, backend: Backend, checkpoints: Checkpoints, start: Counters | None, sink: WandbSink | None
    ) -> Outcome:
        config, settings = self._config, self._config.trainer
        with httpx.Client(trust_env=False) as http:
            source = RolloutClient(
                self._rollout_url(),
                http,
                self._stop.event,
                on_answer=self._polling,
                retain=settings.save_checkpoint_interval > 0,  # else there is none to go back to before the end
            )
            loop = self._loop = Loop(
                settings,
                backend,
                source,
                checkpoints,
                Recorders(
                    JsonLines(self._paths.metrics),
                    JsonLines(self._paths.rollouts),
                    LastEvaluation(self._paths.env_metrics),
                    lambda step, values: self._after_step(step, values, sink),
                    ProgressFile(self._paths.progress),
                ),
                total_steps=config.total_steps,
                max_token_length=config.max_token_length,
                stopping=self._stop.event.is_set,
                start=start,
                earlier_rewards=rewards(self._paths.metrics) if start else (),
            )
            self._service.phase("registering with the rollout API")
            source.register(self._registration(start.step if start else 0))
            self._service.phase("waiting for rollouts")
            return loop.run()

    def _polling(self) -> None:
        """The first answer to a poll: the environment may register, requests are answered."""
        self._service.ready("training")
        if self._backend is not None and (failure := self._backend.failure):
            raise failure
        if self._loop is not None:
            self._loop.waiting()

    def _after_step(self, step: int, values: Metrics, sink: WandbSink | None) -> None:
        self._service.at_step(step)
        if sink is not None:
            sink.log(step, values)

    def _wandb(self) -> WandbSink | None:
        config, settings = self._config, self._config.trainer
        if not settings.use_wandb:
            return None
        return WandbSink(
            project=settings.wandb_project,
            group=self._group,
            name=settings.wandb_run_name or f"{config.run.environment}-{config.run.run_id}",
            folder=self._paths.dir,
            state_file=self._paths.wandb_state,
            config={**_without_address(config.env), **settings.model_dump(), "base_model": config.run.base_model},
        )

    def _registration(self, starting_step: int) -> Registration:
        config, settings = self._config, self._config.trainer
        return Registration(
            wandb_group=self._group,
            wandb_project=settings.wandb_project,
            batch_size=config.batch_size,
            max_token_len=settings.max_token_trainer_length,
            checkpoint_dir=str(settings.checkpoint_dir or self._paths.checkpoints),
            save_checkpoint_interval=settings.save_checkpoint_interval,
            starting_step=starting_step,
            num_steps=config.total_steps,
            attempt=secrets.token_hex(8),
        )

    def _rollout_url(self) -> str:
        url = self._config.env.get("rollout_server_url")
        if isinstance(url, str) and url:
            return url
        prefix = self._config.run.path_prefix
        return f"http://127.0.0.1:{self._config.ports.rollout_api}" + (f"/{prefix}" if prefix else "")

    def _report_completion(self, backend: Backend, outcome: Outcome, stays_s: float) -> None:
        run = self._config.run
        assert outcome.checkpoint is not None
        extra: dict[str, JsonValue] = {
            "overlong_sequences": outcome.overlong_sequences,
            "tokens_without_logprob": outcome.missing_logprobs,
            "malformed_groups": outcome.malformed_groups,
            "gpu_memory_bytes": backend.peak_gpu_bytes(),
            "prompts_not_shared_because": backend.plain_rows or None,
            "wandb_url": self._wandb_state.url,
            "wandb_error": self._wandb_state.error,
        }
        summary = TrainerSummary(
            steps=self._config.total_steps,
            policy_version=backend.policy_version,
            adapter_path=str((outcome.checkpoint / ADAPTER).absolute()),
            base_model=run.base_model,
            model_path=run.model_path,
            reward_first5=outcome.reward_first5,
            reward_last5=outcome.reward_last5,
            preview=outcome.preview,
            extra=extra,
        )
        report = ChildReport(
            process="trainer",
            status="completed",
            step=self._config.total_steps,
            finished_at=utc_now(),
            stays_s=stays_s,
            detail=summary.model_dump(mode="json"),
        )
        write_atomic(self._paths.report("trainer"), report.model_dump_json(indent=1) + "\n")


def _without_address(env: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """For other people's eyes: the address of the run's API holds its secret path prefix."""
    return {name: value for name, value in env.items() if name != "rollout_server_url"}


def _report_failure(paths: RunPaths, error: str, hint: str) -> None:
    step = last_step(paths.metrics)
    error = redact_text(error, secret_values(os.environ))
    report = ChildReport(
        process="trainer", status="failed", step=step, error=error, hint=hint or None, finished_at=utc_now()
    )
    try:
        write_atomic(paths.report("trainer"), report.model_dump_json(indent=1) + "\n")
    except OSError as problem:
        _log.error("the report could not be written: %s", problem)
