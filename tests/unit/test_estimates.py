"""What is said before a run: from the best source there is, and never beyond what operator and machine allow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run_preflight import request

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.estimates import Actual, Estimate
from hermes_rl_mcp.contracts.runs import RunRecord, RunRequest, RunStatus
from hermes_rl_mcp.contracts.settings import OperatorLimits
from hermes_rl_mcp.errors import CeilingError, PreflightError
from hermes_rl_mcp.operations.actual import actual
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.forecast.ceilings import GIB, check_limits, check_memory
from hermes_rl_mcp.runs.forecast.device import Memory
from hermes_rl_mcp.runs.forecast.earlier import Earlier, find_earlier
from hermes_rl_mcp.runs.forecast.estimate import Measured, estimate
from hermes_rl_mcp.runs.forecast.footprint import work_of
from hermes_rl_mcp.runs.forecast.modelfiles import SMOLLM2_SHAPE, ModelFiles, locate, shape_from_config, shape_from_name
from hermes_rl_mcp.runs.forecast.speed import speed_request, typical
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.server import figures

ARITHMETIC = {"total_steps": 60, "group_size": 8, "batch_size": 64, "max_token_length": 12}
GSM8K = {"total_steps": 2, "group_size": 8, "batch_size": 32, "max_token_length": 112}


def _request(
    tmp_path: Path, model: str = "builtin:tiny", env: dict[str, Any] = ARITHMETIC, **changes: Any
) -> RunRequest:
    trainer = TrainerConfig(**{"lora_rank": 16, **changes.pop("trainer", {})})
    return request(tmp_path, base_model=model, model_path=model, env=env, trainer=trainer, **changes)


def _estimate(wanted: RunRequest, earlier: Earlier | None = None, **typical_lengths: int) -> Estimate:
    model = locate(wanted.base_model, wanted.model_path, {"HOME": "/none"})
    work = work_of(wanted, **typical_lengths)
    measured = Measured(typical(speed_request(wanted, model.shape, work)), "rough")
    return estimate(wanted, model, work, measured=measured, earlier=earlier)


def _past_run(home: Home, run: RunRequest, *, steps: int, **figures_: Any) -> RunRecord:
    """As it lies on disk when it has ended."""
    paths = home.run(run.run_id)
    paths.dir.mkdir(parents=True)
    paths.request.write_text(run.model_dump_json())
    record = first_record(home, run).model_copy(update=figures_)
    RunState.create(paths, record, "made for a test")
    lines = [
        {
            "step": step,
            "time": "",
            "time/step_s": 3.0 if step == 1 else 1.0,
            "time/sample_s": 0.4,
            "time/train_s": 0.4,
            "tokens/sampled_per_s": 500.0,
            "rollouts/length_mean": 200.0 / run.env["batch_size"],  # type: ignore[operator]
            "rollouts/truncated_fraction": 0.0,
        }
        for step in range(1, steps + 1)
    ]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return record


def _earlier(tmp_path: Path, now: RunRequest, **changes: Any) -> Earlier:
    home = Home(tmp_path / "home")
    old = now.model_copy(update={"run_id": "aaaaaaaa", **changes})
    _past_run(
        home,
        old,
        steps=10,
        status=RunStatus.FAILED,
        peak_memory_bytes=600 * 2**20,
        startup_seconds=20.0,
        disk_bytes=8_000_000,
    )
    found = find_earlier(home, now)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "env", "typical_lengths", "memory", "disk", "tokens"),
    [
        ("builtin:tiny", ARITHMETIC, {"typical_prompt": 8, "typical_answer": 4}, 583 * 2**20, 7_383_000, 10_552),
        (
            *("builtin:smollm2-135m", GSM8K, {"typical_prompt": 200, "typical_answer": 200}),
            *(3922 * 2**20, 59_280_000, 6110),
        ),
    ],
)
def test_formulas_are_within_a_factor_of_two_of_what_runs_of_both_builtin_models_took(
    tmp_path: Path,
    model: str,
    env: dict[str, Any],
    typical_lengths: dict[str, int],
    memory: int,
    disk: int,
    tokens: int,
) -> None:
    said = _estimate(_request(tmp_path, model, env), **typical_lengths)
    for value, took in (
        (said.memory_bytes, memory),
        (said.disk_bytes - said.fetch_bytes, disk),
        (said.sampled_tokens, tokens),
    ):
        assert took / 2 <= value <= took * 2


def test_gradient_checkpointing_takes_less_memory_and_more_time_and_a_reference_more_time(tmp_path: Path) -> None:
    plain = _estimate(_request(tmp_path, "builtin:smollm2-135m", GSM8K))
    again = _estimate(_request(tmp_path, "builtin:smollm2-135m", GSM8K, trainer={"gradient_checkpointing": True}))
    assert again.memory_bytes < 0.7 * plain.memory_bytes
    reference = _estimate(_request(tmp_path, "builtin:smollm2-135m", GSM8K, trainer={"kl_coef": 0.1}))
    assert reference.memory_bytes == plain.memory_bytes
    for longer in (again, reference):
        assert plain.seconds_per_step is not None and longer.seconds_per_step is not None
        assert 1.02 < longer.seconds_per_step / plain.seconds_per_step < 1.4


def test_the_evaluation_at_the_end_is_part_of_the_time_in_all(tmp_path: Path) -> None:
    without = _request(tmp_path, env={**ARITHMETIC, "eval_items": 0})
    few, many = (_request(tmp_path, env={**ARITHMETIC, "eval_items": items}) for items in (100, 2000))
    for earlier in (None, _earlier(tmp_path, without.model_copy(update={"run_id": "bbbbbbbb"}))):
        none_s, few_s, many_s = (_estimate(one, earlier).total_seconds or 0.0 for one in (without, few, many))
        assert none_s < few_s < many_s
        assert (many_s - none_s) / (few_s - none_s) == pytest.approx(20, rel=0.3)


def test_the_shape_gives_the_number_of_parameters_of_a_known_model_and_of_its_adapter() -> None:
    assert SMOLLM2_SHAPE.parameters == pytest.approx(134.5e6, rel=0.01)
    assert SMOLLM2_SHAPE.adapter_parameters(16) == 4_884_480


def test_an_earlier_run_of_the_same_settings_is_repeated_and_named(tmp_path: Path) -> None:
    now = _request(tmp_path, env={**ARITHMETIC, "total_steps": 10})
    said = _estimate(now, _earlier(tmp_path, now))
    assert said.memory_bytes == 600 * 2**20
    assert said.disk_bytes == pytest.approx(8_000_000, rel=0.01)
    assert said.seconds_per_step == 1.0
    assert said.startup_seconds == 20.0
    assert said.total_seconds == pytest.approx(20 + 2 + 10, abs=0.5)
    assert said.sampled_tokens == 2000
    assert "run aaaaaaaa" in said.basis and "10 steps" in said.basis


def test_an_earlier_run_is_scaled_by_the_tokens_and_sequences_of_a_step(tmp_path: Path) -> None:
    old = _request(tmp_path, env={**ARITHMETIC, "total_steps": 10})
    now = old.model_copy(update={"run_id": "bbbbbbbb", "env": {**old.env, "batch_size": 128, "total_steps": 20}})
    said = _estimate(now, _earlier(tmp_path, now, env=old.env))
    assert said.seconds_per_step == pytest.approx(2.0, rel=0.01)
    assert said.sampled_tokens == 20 * 400
    assert "scaled" in said.basis


def test_only_the_steps_that_are_left_of_a_continued_run_count(tmp_path: Path) -> None:
    now = _request(tmp_path)
    rest = now.model_copy(update={"resume_from": "aaaaaaaa", "resume_step": 50})
    whole, left = _estimate(now), _estimate(rest)
    assert left.sampled_tokens == pytest.approx(whole.sampled_tokens / 6, rel=0.01)
    assert left.total_seconds is not None and whole.total_seconds is not None
    assert left.total_seconds < whole.total_seconds


@pytest.mark.parametrize("change", [{"base_model": "x/Other-1B"}, {"environment": "other"}, {"device": "cuda"}])
def test_a_run_of_another_model_environment_or_device_is_no_measure(tmp_path: Path, change: dict[str, Any]) -> None:
    now = _request(tmp_path)
    _past_run(Home(tmp_path / "home"), now.model_copy(update={"run_id": "aaaaaaaa", **change}), steps=10)
    assert find_earlier(Home(tmp_path / "home"), now) is None


def test_a_run_of_the_same_lengths_goes_before_a_newer_one_of_others(tmp_path: Path) -> None:
    now, home = _request(tmp_path), Home(tmp_path / "home")
    other = {**now.env, "max_token_length": 99}
    for run_id, env in (("aaaaaaaa", now.env), ("bbbbbbbb", other)):  # by its id the second counts as the newer one
        _past_run(home, now.model_copy(update={"run_id": run_id, "env": env}), steps=5)
    found = find_earlier(home, now)
    assert found is not None and found.record.run_id == "aaaaaaaa"


def test_what_a_run_took_is_told_in_the_figures_of_the_estimate(tmp_path: Path) -> None:
    home, run = Home(tmp_path / "home"), _request(tmp_path)
    record = _past_run(home, run, steps=4, peak_memory_bytes=5, startup_seconds=20.0, disk_bytes=7, running_seconds=6.0)
    lines = [json.loads(line) for line in home.run(run.run_id).metrics.read_text().splitlines()]
    assert actual(record, lines, None) == Actual(
        memory_bytes=5,
        disk_bytes=7,
        seconds_per_step=1.0,
        startup_seconds=20.0,
        total_seconds=26.0,
        sampled_tokens=800,
    )
    continued = record.model_copy(update={"resumed_step": 2})
    assert actual(continued, lines, None).sampled_tokens == 400
    assert actual(first_record(home, run), [], None) == Actual()


def _fitting(wanted: RunRequest, hint: str) -> RunRequest:
    """``wanted`` with the settings that the hint names."""
    env, trainer = dict(wanted.env), wanted.trainer
    words = hint.replace(",", " ").replace(".", " ").split()
    for name, value in zip(words, words[2:], strict=False):
        if value.isdigit() and name in ("total_steps",):
            env[name] = int(value)
        elif value.isdigit() and name in TrainerConfig.model_fields:
            trainer = trainer.model_copy(update={name: int(value)})
    changed = wanted.model_copy(update={"env": env, "trainer": trainer})
    assert changed != wanted, hint
    return changed


@pytest.mark.parametrize(
    ("limits", "changes", "names"),
    [
        (OperatorLimits(max_hours=0.006), {}, ["hours", "0.006", "total_steps"]),
        (
            OperatorLimits(max_disk_gib=0.007),
            {"trainer": {"keep_checkpoints": 0, "save_checkpoint_interval": 1}},
            ["disk", "0.007", "keep_checkpoints"],
        ),
        (
            OperatorLimits(max_gpu_memory_gib=0.7),
            {
                "device": "cuda",
                "trainer": {"micro_batch_tokens": 8192},
                "env": {**ARITHMETIC, "batch_size": 1024},
            },
            ["GPU memory", "0.7", "micro_batch_tokens"],
        ),
    ],
)
def test_beyond_a_ceiling_the_error_names_estimate_ceiling_and_a_setting_that_fits(
    tmp_path: Path, limits: OperatorLimits, changes: dict[str, Any], names: list[str]
) -> None:
    wanted = _request(tmp_path, **changes)
    with pytest.raises(CeilingError) as caught:
        check_limits(limits, wanted, _estimate(wanted), _estimate)
    text = str(caught.value)
    assert all(name in text for name in names), text
    assert caught.value.details["estimated"] > caught.value.details["allowed"]
    fitting = _fitting(wanted, caught.value.hint)
    check_limits(limits, fitting, _estimate(fitting), _estimate)
    check_limits(OperatorLimits(), wanted, _estimate(wanted), _estimate)


@settings(deadline=None)  # a busy machine
@given(hours=st.floats(0.005, 5), steps=st.integers(1, 5000), batch=st.integers(1, 32))
def test_the_advised_number_of_steps_always_fits(
    tmp_path_factory: pytest.TempPathFactory, hours: float, steps: int, batch: int
) -> None:
    env = {**ARITHMETIC, "total_steps": steps, "batch_size": 8 * batch}
    wanted = _request(tmp_path_factory.mktemp("r"), env=env, trainer={"save_checkpoint_interval": 0})
    limits = OperatorLimits(max_hours=hours)
    try:
        check_limits(limits, wanted, _estimate(wanted), _estimate)
    except CeilingError as error:
        if "total_steps" in error.hint:
            fitting = _fitting(wanted, error.hint)
            check_limits(limits, fitting, _estimate(fitting), _estimate)


def test_a_model_that_no_setting_fits_into_memory_is_refused_and_one_that_waits_for_memory_is_warned_of(
    tmp_path: Path,
) -> None:
    big = _request(tmp_path, "x/Big-70B")
    said = _estimate(big)
    with pytest.raises(PreflightError, match=r"this machine has 24\.0 GiB") as caught:
        check_memory(big, said, _estimate, host=Memory(24 * GIB, 24 * GIB), gpu=None)
    assert "smaller model" in caught.value.hint
    small = _request(tmp_path)
    said = _estimate(small)
    assert check_memory(small, said, _estimate, host=Memory(24 * GIB, 24 * GIB), gpu=None) == []
    [warning] = check_memory(small, said, _estimate, host=Memory(24 * GIB, 2**20), gpu=None)
    assert "free" in warning
    gpu = _request(tmp_path, device="cuda")
    busy = Memory(24 * GIB, 2**20, holders="pid 12: 23000 MiB")
    [warning] = check_memory(gpu, _estimate(gpu), _estimate, host=Memory(24 * GIB, 24 * GIB), gpu=busy)
    assert "GPU memory" in warning and "pid 12" in warning


def test_a_run_that_fits_with_a_smaller_micro_batch_is_told_which(tmp_path: Path) -> None:
    wanted = _request(
        tmp_path, "builtin:smollm2-135m", {**GSM8K, "batch_size": 256}, trainer={"micro_batch_tokens": 8192}
    )
    with pytest.raises(PreflightError) as caught:
        check_memory(wanted, _estimate(wanted), _estimate, host=Memory(8 * GIB, 8 * GIB), gpu=None)
    fitting = _fitting(wanted, caught.value.hint)
    assert _estimate(fitting).memory_bytes <= 8 * GIB


@pytest.mark.parametrize(
    ("config", "layers", "kv_heads", "tied"),
    [
        ({"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}, 2, 4, True),
        ({"n_embd": 8, "n_layer": 3, "n_head": 2, "vocab_size": 9, "tie_word_embeddings": False}, 3, 2, False),
        (
            {
                "model_type": "multimodal",
                "text_config": {
                    **{"hidden_size": 8, "num_hidden_layers": 5, "num_attention_heads": 4},
                    **{"num_key_value_heads": 1, "vocab_size": 9},
                },
            },
            *(5, 1, True),
        ),
    ],
)
def test_the_shape_is_read_from_configurations_of_several_families(
    config: dict[str, Any], layers: int, kv_heads: int, tied: bool
) -> None:
    shape = shape_from_config(config)
    assert shape is not None
    assert (shape.layers, shape.kv_heads, shape.tied) == (layers, kv_heads, tied)
    assert shape_from_config({"hidden_size": "large"}) is None


@pytest.mark.parametrize(
    ("name", "parameters"), [("Qwen/Qwen3-8B", 8e9), ("x/Small-360M-Instruct", 360e6), ("x/y", 8e9)]
)
def test_a_model_that_is_not_here_has_the_size_that_its_name_says(name: str, parameters: float) -> None:
    assert parameters / 1.6 < shape_from_name(name).parameters < parameters * 1.6


def test_a_guess_from_the_name_is_said_to_be_one(tmp_path: Path) -> None:
    wanted = _request(tmp_path, "x/Small-360M")
    said = _estimate(wanted)
    assert "guessed from its name" in said.basis
    assert said.fetch_bytes == pytest.approx(2 * 360e6, rel=0.5)
    work = work_of(wanted)
    known = ModelFiles(tmp_path, SMOLLM2_SHAPE, guessed=False)
    speed = typical(speed_request(wanted, known.shape, work))
    assert "guessed" not in estimate(wanted, known, work, measured=Measured(speed, "b"), earlier=None).basis


def test_longer_answers_more_sequences_and_a_larger_model_take_more_of_everything(tmp_path: Path) -> None:
    base = _estimate(_request(tmp_path))
    for changed in (
        _request(tmp_path, env={**ARITHMETIC, "max_token_length": 120}),
        _request(tmp_path, env={**ARITHMETIC, "batch_size": 640}),
        _request(tmp_path, "builtin:smollm2-135m"),
    ):
        said = _estimate(changed)
        assert said.memory_bytes > base.memory_bytes and said.disk_bytes > base.disk_bytes
        assert (said.total_seconds or 0) > (base.total_seconds or 0)


def test_figures_are_told_in_units_that_people_read() -> None:
    assert [figures.amount(n) for n in (None, 5, 2048, 310 * 2**20, int(5.25 * 2**30))] == [
        *("unknown", "5 B", "2.0 KiB", "310 MiB", "5.2 GiB"),
    ]
    assert [figures.duration(s) for s in (None, 0.243, 36.4, 430, 9000)] == [
        "unknown",
        "0.24 s",
        "36 s",
        "7.2 min",
        "2.5 h",
    ]
    assert [figures.count(n) for n in (None, 6092, 1_240_000)] == ["unknown", "6,092", "1.2 million"]


def test_estimate_and_outcome_stand_side_by_side_without_the_model_that_was_fetched(tmp_path: Path) -> None:
    said = _estimate(_request(tmp_path)).model_copy(
        update={"disk_bytes": 330 * 2**20, "fetch_bytes": 270 * 2**20, "seconds_per_step": 0.5}
    )
    lines = figures.compared(said, Actual(disk_bytes=62 * 2**20, seconds_per_step=0.25))
    assert lines == ["estimate / actual:", "  disk 60 MiB / 62 MiB", "  per step 0.5 s / 0.25 s"]
    assert figures.compared(None, Actual(seconds_per_step=0.25)) == [lines[0], "  per step unknown / 0.25 s"]
    assert figures.compared(said, None) == []
    text = "\n".join(figures.expected(said))
    assert "disk 330 MiB, 270 MiB of it the model" in text and said.basis in text


def test_the_estimate_uses_the_environments_own_word_for_its_answers_within_the_budget(tmp_path: Path) -> None:
    wanted = _request(tmp_path, env={**ARITHMETIC, "max_token_length": 100})
    assert _estimate(wanted, typical_answer=10).sampled_tokens == 60 * 64 * 10
    assert _estimate(wanted, typical_answer=500).sampled_tokens == 60 * 64 * 85
    assert replace(work_of(wanted)).answer == 45
