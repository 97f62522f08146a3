"""What is found before a run starts, and what its processes are started with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_run_state import create

from hermes_rl_mcp.contracts.config import Ports, TrainerConfig
from hermes_rl_mcp.contracts.rollout_api import HealthReply
from hermes_rl_mcp.contracts.runs import ChildReport, RunRequest
from hermes_rl_mcp.errors import MissingExtraError, PreflightError
from hermes_rl_mcp.files import create_once, trim_log
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import outcome
from hermes_rl_mcp.runs.forecast.device import chosen_device, cpu_count, detect_device, free_disk_bytes
from hermes_rl_mcp.runs.forecast.footprint import checkpoint_bytes
from hermes_rl_mcp.runs.forecast.modelfiles import locate
from hermes_rl_mcp.runs.forecast.preflight import preflight
from hermes_rl_mcp.runs.oom import OomKills
from hermes_rl_mcp.runs.runconfig import make_config
from hermes_rl_mcp.runs.specs import Handover, child_spec, supervisor_environ


def request(tmp_path: Path, **changes: object) -> RunRequest:
    (tmp_path / "env.py").touch()
    values = {
        "run_id": "0123abcd",
        "created_at": "2026-01-01T00:00:00+00:00",
        "environment": "e",
        "env_file": str(tmp_path / "env.py"),
        "env_class": "E",
        "env_sha256": "",
        "profile": "local",
        "base_model": "builtin:tiny",
        "model_path": "/m",
        "tokenizer_name": "/m",
        "env": {"total_steps": 4, "group_size": 2, "batch_size": 4, "max_token_length": 8},
        "trainer": TrainerConfig(),
    }
    return RunRequest.model_validate({**values, **changes})


def test_a_sound_request_passes(tmp_path: Path) -> None:
    preflight(Home(tmp_path / "home"), request(tmp_path), {})


def test_a_dry_check_makes_no_folder(tmp_path: Path) -> None:
    preflight(Home(tmp_path / "home"), request(tmp_path), {}, dry=True)
    assert not (tmp_path / "home").exists()
    (tmp_path / "home").touch()
    with pytest.raises(PreflightError, match="home is not writable"):
        preflight(Home(tmp_path / "home"), request(tmp_path), {}, dry=True)


def test_a_missing_environment_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"gone\.py"):
        preflight(Home(tmp_path / "home"), request(tmp_path, env_file="/gone.py"), {})


def test_missing_packages_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    with pytest.raises(MissingExtraError) as caught:
        preflight(Home(tmp_path / "home"), request(tmp_path), {})
    assert "pip install 'hermes-rl-mcp[train]'" in caught.value.hint and "peft" in caught.value.message


def test_too_little_disk_is_refused_with_numbers(tmp_path: Path) -> None:
    trainer = TrainerConfig(lora_rank=512, save_checkpoint_interval=1, keep_checkpoints=0)
    env = {"total_steps": 1_000_000, "group_size": 2, "batch_size": 4, "max_token_length": 8}
    with pytest.raises(PreflightError, match="GiB free; 1000000 checkpoints of about") as caught:
        preflight(Home(tmp_path / "home"), request(tmp_path, base_model="x/Big-70B", trainer=trainer, env=env), {})
    assert caught.value.details["needed_bytes"] > caught.value.details["free_bytes"] > 0


def test_a_disk_that_is_nearly_full_is_not_said_to_have_0_0_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl_mcp.runs.forecast.preflight.free_disk_bytes", lambda folder: 900 * 2**10)
    with pytest.raises(
        PreflightError, match=r"has 0\.9 MiB free; .* MiB \(lora_rank \d+\) and logs need [1-9]\d*\.\d MiB"
    ):
        preflight(Home(tmp_path / "home"), request(tmp_path), {})


@pytest.mark.parametrize("dry", [False, True])
def test_a_claims_folder_that_cannot_be_used_is_refused_before_a_run_exists(tmp_path: Path, dry: bool) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "public").mkdir(mode=0o755)
    for folder, words in (("file/claims", "cannot be used|not writable"), ("public", "is not private")):
        environ = {"HERMES_RL_CLAIMS_DIR": str(tmp_path / folder)}
        with pytest.raises(PreflightError, match=words) as caught:
            preflight(Home(tmp_path / "home"), request(tmp_path), environ, dry=dry)
        assert "HERMES_RL_CLAIMS_DIR" in caught.value.hint


def test_a_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(PreflightError, match="cannot be created"):
        preflight(Home(tmp_path / "home"), request(tmp_path), {})


@pytest.mark.parametrize(
    ("model", "rank", "low_mb", "high_mb"),
    [("Qwen/Qwen3-8B", 32, 800, 1300), ("builtin:tiny", 16, 0.5, 3), ("Qwen/Qwen2.5-0.5B-Instruct", 16, 50, 150)],
)
def test_checkpoint_sizes_are_of_the_right_order(model: str, rank: int, low_mb: float, high_mb: float) -> None:
    shape = locate(model, model, {"HOME": "/none"}).shape
    assert low_mb < checkpoint_bytes(shape, rank) / 1e6 < high_mb
    assert checkpoint_bytes(shape, 2 * rank) == pytest.approx(2 * checkpoint_bytes(shape, rank), rel=0.05)


def test_sec_03_children_get_exactly_what_they_are_allowed(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    config = make_config(request(tmp_path), Ports(rollout_api=8000, trainer=8001))
    secret = {"OPENAI_API_KEY": "k", "WANDB_API_KEY": "w", "HF_TOKEN": "h", "AWS_SECRET_ACCESS_KEY": "a"}
    environ = {**secret, "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "LD_PRELOAD": "/x.so", "PYTHONSTARTUP": "/x"}
    handover = Handover(api_socket=3, trainer_socket=4, lifeline=5, device_ticket=6)
    specs = {
        name: child_spec(
            name,
            home=home,
            run_dir=home.run("0123abcd").dir,
            config=config,
            environ=environ,
            commands={},
            handover=handover,
        )
        for name in ("api", "trainer", "env")
    }
    common = {"PATH", "HERMES_HOME", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "HERMES_RL_RUN_ID"}
    common |= {"HERMES_RL_LIFELINE_FD"}
    omp = {"OMP_WAIT_POLICY", "OMP_NUM_THREADS"}
    assert set(specs["api"].environ) == common
    assert set(specs["env"].environ) == common | omp | {"HF_TOKEN"}
    assert set(specs["trainer"].environ) == common | omp | {"HF_TOKEN", "WANDB_API_KEY", "CUDA_VISIBLE_DEVICES"}
    assert specs["env"].environ["OMP_NUM_THREADS"] == "1"
    assert specs["trainer"].environ["OMP_NUM_THREADS"] == str(cpu_count())
    assert specs["trainer"].argv[:4] == (sys.executable, "-P", "-m", "trainer")
    assert specs["env"].argv[4:6] == (f"{tmp_path}/env.py:E", "serve")
    assert (specs["api"].pass_fds, specs["env"].pass_fds) == ((3, 5), (5,))
    assert not any(secret in repr(specs) for secret in ("'k'", "'w'", "'h'")), "a spec in a log shows no keys"
    passed = supervisor_environ(home, environ)
    assert "AWS_SECRET_ACCESS_KEY" not in passed and "OPENAI_API_KEY" not in passed and passed["HF_TOKEN"] == "h"


@pytest.mark.parametrize(
    ("step", "out", "groups", "enough"),
    [(0, 0, 7, False), (0, 0, 8, True), (3, 0, 2, True), (3, 0, 1, False), (3, 1, 0, True), (2, 1, 1, False)],
)
def test_the_queue_covers_the_rest_when_with_the_batch_in_training_nothing_is_missing(
    tmp_path: Path, step: int, out: int, groups: int, enough: bool
) -> None:
    config = make_config(request(tmp_path), Ports(rollout_api=8000, trainer=8001))
    rollouts = HealthReply(
        status="ok",
        nonce="n",
        trainer_registered=True,
        trainer_started=True,
        environments=1,
        current_step=step,
        batches_out=out,
        queue_size=groups,
        groups_received=0,
        groups_rejected=0,
    )
    assert outcome.covers_rest(rollouts, config) is enough
    assert not outcome.covers_rest(None, config)


def test_a_failure_is_told_in_the_childs_own_words_if_it_left_any(tmp_path: Path) -> None:
    paths = Home(tmp_path).run("0123abcd")
    paths.dir.mkdir(parents=True)
    log = tmp_path / "trainer.log"
    log.write_text("Traceback ...\nValueError: bad\n")
    verdict = outcome.failure(paths, "trainer", 1, log, oom_kills=OomKills())
    assert verdict.error == "The trainer exited with code 1. Its last log line: ValueError: bad"
    report = ChildReport(process="trainer", status="failed", error="GPU out of memory.", hint="Halve.", finished_at="x")
    paths.report("trainer").write_text(report.model_dump_json())
    verdict = outcome.failure(paths, "trainer", 1, log, oom_kills=OomKills())
    assert (verdict.error, verdict.hint) == ("GPU out of memory.", "Halve.")


def test_a_traceback_at_the_end_of_the_log_is_quoted_without_secrets_and_cut_in_its_middle(tmp_path: Path) -> None:
    paths, log = Home(tmp_path).run("0123abcd"), tmp_path / "trainer.log"

    def said(text: str) -> str:
        log.write_text(text)
        return outcome.failure(paths, "trainer", 1, log, oom_kills=OomKills(), secrets=["s3cret-key"]).error or ""

    trace = (
        'Traceback (most recent call last):\n  File "t.py", line 3, in step\n    loss()\nValueError: s3cret-key\nof x\n'
    )
    found = said(f"step 1\n{trace}")
    assert "step 1" not in found and "in step" in found and "s3cret" not in found and found.endswith("of x")
    assert said(trace + "retried\n" * 20).endswith("Its last log line: retried"), "it went on after that"
    long = said(trace.replace("    loss()\n", f"    {'deeper' * 1000}\n"))
    assert len(long) < 1700 and "Traceback" in long and long.endswith("of x")


def test_a_kill_from_outside_asks_about_memory_and_quotes_the_kernel(tmp_path: Path) -> None:
    paths = Home(tmp_path).run("0123abcd")
    verdict = outcome.failure(paths, "trainer", -9, tmp_path / "none", oom_kills=OomKills(machine=2, group=1))
    assert "signal 9 (SIGKILL)" in (verdict.error or "") and "2 out-of-memory kills" in (verdict.hint or "")
    assert "kernel" not in (outcome.failure(paths, "trainer", -9, tmp_path / "none", oom_kills=OomKills()).hint or "")


def test_the_last_log_line_masks_keys(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ok\nHF_TOKEN=hf_abcdefghijklmnopqrstuvwx rejected\n\n")
    assert "hf_abc" not in outcome.last_line(log) and "rejected" in outcome.last_line(log)
    assert outcome.last_line(tmp_path / "none") == ""


def test_an_outgrown_log_is_cut_and_its_end_kept(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"a" * 1000 + b"end")
        assert not trim_log(log, 2000, 10)
        assert trim_log(log, 500, 10)
        writer.write(b"more")
    assert log.read_bytes() == b"more" and (tmp_path / "child.log.1").read_bytes() == b"aaaaaaaend"


def test_create_once_keeps_the_first_text(tmp_path: Path) -> None:
    assert create_once(tmp_path / "stop.json", "first") and not create_once(tmp_path / "stop.json", "second")
    assert (tmp_path / "stop.json").read_text() == "first" and len(list(tmp_path.iterdir())) == 1


def test_hiding_all_gpus_means_cpu() -> None:
    assert detect_device({"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    assert free_disk_bytes(Path("/not/there/yet")) > 0


def test_run_records_start_without_processes(tmp_path: Path) -> None:
    paths = Home(tmp_path).run("0123abcd")
    paths.dir.mkdir(parents=True)
    record = create(paths).record
    assert all(process.identity is None for process in record.processes.values())


def test_only_the_checkpoints_that_are_kept_need_room(tmp_path: Path) -> None:
    trainer = TrainerConfig(lora_rank=512, save_checkpoint_interval=1, keep_checkpoints=2)
    env = {"total_steps": 100_000, "group_size": 2, "batch_size": 4, "max_token_length": 8}
    preflight(Home(tmp_path / "home"), request(tmp_path, base_model="builtin:tiny", trainer=trainer, env=env), {})


def test_a_run_takes_the_device_it_was_told_and_a_gpu_that_is_not_there_is_refused() -> None:
    assert chosen_device("auto", "cuda") == chosen_device("cuda", "cuda") == "cuda"
    assert chosen_device("cpu", "cuda") == chosen_device("auto", "cpu") == "cpu"
    with pytest.raises(PreflightError, match="device = 'cuda'"):
        chosen_device("cuda", "cpu")
