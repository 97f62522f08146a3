"""What can be continued and what cannot, each refusal naming what does not fit; and what the new run is given."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.checkpoints import MARKER, inspect, last_complete
from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.records import CheckpointMarker
from hermes_rl_mcp.contracts.runs import RunRequest, RunStatus
from hermes_rl_mcp.errors import PreflightError, ResumeError, UnknownRunError
from hermes_rl_mcp.files import now
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.rollout_api.journal_lines import head
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.resume import Source, carry_over, changed, continue_from, find_source, told, warnings
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.runs.store import RunStore

OLD, NEW = "0000aaaa", "0000bbbb"
STEP = 4


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def request(home: Home, run_id: str = OLD, env: dict[str, Any] | None = None, **changes: Any) -> RunRequest:
    values: dict[str, Any] = {
        "run_id": run_id,
        "created_at": now(),
        "environment": "sums",
        "env_file": "/envs/sums.py",
        "env_class": "Sums",
        "env_sha256": "0" * 64,
        "profile": "local",
        "base_model": "builtin:tiny",
        "model_path": str(home.model_dir("builtin:tiny")),
        "tokenizer_name": str(home.model_dir("builtin:tiny")),
        "env": {"total_steps": 9, "group_size": 2, "batch_size": 4, "wandb_name": f"sums-{run_id}", **(env or {})},
        "trainer": TrainerConfig(lora_rank=8, lora_alpha=16.0),
    }
    return RunRequest.model_validate({**values, **changes})


def write_checkpoint(folder: Path, step: int = STEP, **marked: Any) -> Path:
    """A checkpoint as the trainer lays it out."""
    target = folder / f"step_{step}"
    (target / "adapter").mkdir(parents=True)
    config = {
        "r": 8,
        "lora_alpha": 16.0,
        "base_model_name_or_path": "/elsewhere/rl/models/tiny",
        "auto_mapping": None,
        "peft_type": "LORA",
    }
    contents = {
        "adapter/adapter_config.json": json.dumps(config),
        "adapter/adapter_model.safetensors": f"weights of step {step}",
        "optimizer.safetensors": f"moments of step {step}",
        "rng.json": "{}",
        "counters.json": json.dumps({"step": step}),
    }
    for name, text in contents.items():
        (target / name).write_text(text)
    seal(target, step=step, **marked)
    return target


def seal(target: Path, **marked: Any) -> None:
    """(Re)writes the marker so that it fits the files."""
    files = [path for path in target.rglob("*") if path.is_file() and path.name != MARKER]
    values: dict[str, Any] = {
        "step": STEP,
        "policy_version": STEP,
        "base_model": "builtin:tiny",
        "base_sha256": "b" * 64,
        "lora_rank": 8,
        "files": {str(path.relative_to(target)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "created_at": now(),
    }
    (target / MARKER).write_text(CheckpointMarker.model_validate({**values, **marked}).model_dump_json())


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


@pytest.fixture
def old(home: Home) -> RunPaths:
    """A stopped run with a checkpoint of step 4 that had come to step 6."""
    asked = request(home)
    paths = home.run(OLD)
    paths.dir.mkdir(parents=True)
    paths.request.write_text(asked.model_dump_json())
    paths.supervisor_lock.touch()
    state = RunState.create(paths, first_record(home, asked), "made by a test")
    state.move(RunStatus.STOPPING, "made by a test")
    state.move(RunStatus.STOPPED, "made by a test")
    write_checkpoint(paths.checkpoints)
    paths.metrics.write_text(lines(1, 2, 3, 4, 5, 6) + '{"step": 7, "torn')
    paths.rollouts.write_text(lines(1, 1, 4, 4, 5))
    paths.env_metrics.write_text(lines(2, 4, 6) + "no JSON\n")
    paths.journal.write_bytes(head() + b"what the rollout API knew\n")
    positions = paths.checkpoints / "env_checkpoints" / f"sums-{OLD}"
    positions.mkdir(parents=True)
    for step in (2, 4, 6):
        (positions / f"step-{step}.json").write_text(json.dumps({"at": step}))
    return paths


def refusal(home: Home, **changes: Any) -> ResumeError:
    with pytest.raises(ResumeError) as caught:
        continue_from(find_source(home, OLD), request(home, NEW, **changes))
    return caught.value


def draft_of(home: Home, source: Source, asked: RunRequest) -> RunPaths:
    draft = RunPaths(home.runs / ".new-x" / NEW)
    draft.dir.mkdir(parents=True)
    carry_over(source, asked, draft)
    return draft


def test_fi_37_a_good_checkpoint_is_continued_with_all_that_was_known_at_its_step(home: Home, old: RunPaths) -> None:
    before = {path: path.read_bytes() for path in old.dir.rglob("*") if path.is_file()}
    source = find_source(home, OLD)
    asked = continue_from(source, request(home, NEW))
    assert (asked.resume_from, asked.resume_step, warnings(source, asked)) == (OLD, STEP, [])
    record = first_record(home, asked)
    assert (record.resumed_from, record.resumed_step) == (OLD, STEP)
    draft = draft_of(home, source, asked)
    assert inspect(draft.checkpoints / "step_4").marker == source.checkpoint.marker
    assert draft.metrics.read_text() == lines(1, 2, 3, 4)
    assert draft.rollouts.read_text() == lines(1, 1, 4, 4)
    assert draft.env_metrics.read_text() == lines(2, 4)
    assert draft.journal.read_bytes() == old.journal.read_bytes()
    positions = draft.checkpoints / "env_checkpoints" / f"sums-{NEW}"
    assert [path.name for path in positions.iterdir()] == ["step-4.json"]
    assert json.loads((positions / "step-4.json").read_text()) == {"at": 6}, "behind the batches in the journal"
    assert all(path.stat().st_mode & 0o077 == 0 for path in draft.dir.rglob("*"))
    assert {path: path.read_bytes() for path in old.dir.rglob("*") if path.is_file()} == before


def test_batches_of_another_size_stay_behind_and_the_environment_goes_back_to_the_checkpoint(
    home: Home, old: RunPaths
) -> None:
    source = find_source(home, OLD)
    asked = continue_from(source, request(home, NEW, env={"batch_size": 8}))
    [warning] = warnings(source, asked)
    assert "batch_size" in warning and "step 4" in warning
    draft = draft_of(home, source, asked)
    assert not draft.journal.exists()
    [position] = (draft.checkpoints / "env_checkpoints" / f"sums-{NEW}").iterdir()
    assert json.loads(position.read_text()) == {"at": 4}


def test_a_damaged_position_of_the_environment_is_named_and_goes_when_it_is_removed(home: Home, old: RunPaths) -> None:
    damaged = old.checkpoints / "env_checkpoints" / f"sums-{OLD}" / "step-6.json"
    damaged.write_text("{")
    source = find_source(home, OLD)
    asked = continue_from(source, request(home, NEW))
    first = RunPaths(home.runs / ".new-y" / NEW)
    first.dir.mkdir(parents=True)
    with pytest.raises(ResumeError, match=r"step-6\.json is damaged") as caught:
        carry_over(source, asked, first)
    assert "Remove this file" in caught.value.hint
    damaged.unlink()
    [position] = (draft_of(home, source, asked).checkpoints / "env_checkpoints" / f"sums-{NEW}").iterdir()
    assert json.loads(position.read_text()) == {"at": 4}


@pytest.mark.parametrize("damage", ["lost", "overwritten"])
def test_a_changed_environment_file_and_a_lost_journal_are_said(home: Home, old: RunPaths, damage: str) -> None:
    old.journal.unlink()
    if damage == "overwritten":
        old.journal.write_bytes(b"\0" * 4096)
    source = find_source(home, OLD)
    first, second = warnings(source, request(home, NEW, env_sha256="1" * 64))
    assert "sums.py has changed" in first and "journal" in second


def test_what_the_old_run_was_told_is_what_the_new_one_is_told_without_names_made_for_the_old(
    home: Home, old: RunPaths
) -> None:
    values = told(request(home))
    assert values["model_name"] == "builtin:tiny" and values["lora_rank"] == 8 and values["batch_size"] == 4
    assert "wandb_name" not in values and "tokenizer_name" not in values
    source = find_source(home, OLD)
    assert changed(source, {**values, "total_steps": 20}) == {"total_steps": (9, 20)}


def test_a_run_that_is_not_there_or_goes_on_is_not_continued(home: Home, old: RunPaths) -> None:
    with pytest.raises(UnknownRunError):
        find_source(home, NEW)
    asked = request(home, NEW)
    home.run(NEW).dir.mkdir()
    home.run(NEW).request.write_text(asked.model_dump_json())
    RunState.create(home.run(NEW), first_record(home, asked), "made by a test")
    lock = locks.take(home.run(NEW).supervisor_lock)  # its supervisor lives
    assert lock is not None
    with pytest.raises(ResumeError, match="has not ended") as caught:
        find_source(home, NEW)
    lock.release()
    assert "rl_stop_training" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model": "Qwen/Qwen3-8B"}, ["builtin:tiny", "Qwen/Qwen3-8B", "model_name"]),
        ({"trainer": TrainerConfig(lora_rank=16, lora_alpha=16.0)}, ["lora_rank", "8", "16"]),
        ({"trainer": TrainerConfig(lora_rank=8, lora_alpha=32.0)}, ["lora_alpha", "16.0", "32.0"]),
        ({"env": {"total_steps": STEP}}, ["Nothing is left", "step 4", "Raise total_steps above 4"]),
        ({"trainer": TrainerConfig(lora_rank=8, lora_alpha=16.0, checkpoint_dir="/tmp/x")}, ["checkpoint_dir"]),
    ],
)
def test_fi_37_a_configuration_that_does_not_fit_is_refused_with_both_values(
    home: Home, old: RunPaths, changes: dict[str, Any], words: list[str]
) -> None:
    text = str(refusal(home, **changes))
    assert all(word in text for word in words), text


def test_other_learning_settings_may_change(home: Home, old: RunPaths) -> None:
    trainer = TrainerConfig(lora_rank=8, lora_alpha=16.0, learning_rate=1e-3, seed=5, grad_clip_norm=0.0)
    assert continue_from(find_source(home, OLD), request(home, NEW, trainer=trainer)).resume_step == STEP


def test_fi_37_a_run_without_a_complete_checkpoint_names_the_unfinished_ones(home: Home, old: RunPaths) -> None:
    (old.checkpoints / "step_4" / MARKER).unlink()
    (old.checkpoints / ".writing-step_8").mkdir()
    text = str(refusal(home))
    assert "no complete checkpoint" in text and "step_4" in text and ".writing-step_8" in text


def test_fi_22_an_unfinished_checkpoint_is_passed_over_for_the_complete_one_before_it(
    home: Home, old: RunPaths
) -> None:
    half = write_checkpoint(old.checkpoints, 8)
    (half / MARKER).unlink()
    aside = write_checkpoint(old.checkpoints, 9)
    aside.rename(old.checkpoints / ".writing-step_9")  # whole, but its writer was killed before it got its name
    assert find_source(home, OLD).step == STEP
    assert last_complete(old.checkpoints) == old.checkpoints / "step_4"
    assert [one.marker.step for one in RunStore(home).checkpoints(OLD)] == [STEP]


def _lose_a_file(folder: Path) -> None:
    (folder / "optimizer.safetensors").unlink()


def _alter_a_file(folder: Path) -> None:
    (folder / "optimizer.safetensors").write_text("moments of another")


def _cut_the_marker(folder: Path) -> None:
    (folder / MARKER).write_text((folder / MARKER).read_text()[:-9])


def _pretend_a_later_step(folder: Path) -> None:
    seal(folder, step=9)


def _point_outside(folder: Path) -> None:
    outside = folder.parent.parent / "metrics.jsonl"
    seal(folder, files={"../../metrics.jsonl": hashlib.sha256(outside.read_bytes()).hexdigest()})


def _add_a_pickle(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"\x80\x04.")
    seal(folder)


def _add_an_unlisted_pickle(folder: Path) -> None:
    (folder / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x04.")


def _add_a_stranger(folder: Path) -> None:
    (folder / "notes.json").write_text("{}")


def _add_code(folder: Path) -> None:
    (folder / "adapter" / "modeling.py").write_text("print()")
    seal(folder)


def _link_a_file(folder: Path) -> None:
    target = folder.parent / "elsewhere"
    (folder / "rng.json").rename(target)
    (folder / "rng.json").symlink_to(target)


def _link_the_folder(folder: Path) -> None:
    target = folder.parent.parent / "elsewhere"
    folder.rename(target)
    folder.symlink_to(target)


def _link_all(folder: Path) -> None:
    target = folder.parent.parent / "elsewhere"
    folder.parent.rename(target)
    folder.parent.symlink_to(target)


def _make_a_pipe(folder: Path) -> None:
    (folder / "rng.json").unlink()
    os.mkfifo(folder / "rng.json")


def _configure(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        seal(folder)

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(_lose_a_file, "optimizer.safetensors is missing", id="lost"),
        pytest.param(_alter_a_file, "optimizer.safetensors is not the file that was written", id="altered"),
        pytest.param(_cut_the_marker, "complete.json is damaged", id="marker"),
        pytest.param(_pretend_a_later_step, "its marker is that of step 9", id="step"),
    ],
)
def test_fi_37_a_damaged_checkpoint_is_refused_with_the_damage_named(
    home: Home, old: RunPaths, damage: Callable[[Path], None], words: str
) -> None:
    write_checkpoint(old.checkpoints, 2)  # an older whole one is not taken in its place unasked
    damage(old.checkpoints / "step_4")
    error = refusal(home)
    assert words in error.message and "step_4" in error.message
    assert "Remove the folder" in error.hint


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(_add_a_pickle, "optimizer.pt is a pickle", id="pickle"),
        pytest.param(_add_an_unlisted_pickle, "adapter_model.bin is a pickle", id="unlisted"),
        pytest.param(_point_outside, "outside of it", id="outside"),
        pytest.param(_link_a_file, "rng.json is a symbolic link", id="link"),
        pytest.param(_link_the_folder, "step_4 is a symbolic link", id="linked folder"),
        pytest.param(_link_all, "checkpoints is a symbolic link", id="linked checkpoints"),
        pytest.param(_make_a_pipe, "rng.json is no regular file", id="pipe"),
    ],
)
def test_fi_37_sec_18_nothing_that_can_run_code_or_lies_elsewhere_is_continued(
    home: Home, old: RunPaths, damage: Callable[[Path], None], words: str
) -> None:
    damage(old.checkpoints / "step_4")
    assert words in refusal(home).message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(_configure(base_model_name_or_path="evil/other-repo"), "names the base model 'evil/other-repo'"),
        pytest.param(_configure(auto_mapping={"base_model_class": "../evil"}), "auto_mapping"),
        pytest.param(_configure(r=64), "has rank 64, its marker 8"),
        pytest.param(_configure(r="x"), "no adapter configuration"),
        pytest.param(_add_a_stranger, "notes.json does not belong to it"),
        pytest.param(_add_code, "modeling.py does not belong to it"),
    ],
)
def test_sec_19_an_adapter_that_speaks_of_another_base_or_of_code_is_refused(
    home: Home, old: RunPaths, damage: Callable[[Path], None], words: str
) -> None:
    damage(old.checkpoints / "step_4")
    assert words in refusal(home).message


def test_a_checkpoint_that_changes_between_look_and_copy_makes_no_run(home: Home, old: RunPaths) -> None:
    source = find_source(home, OLD)
    _alter_a_file(old.checkpoints / "step_4")
    with pytest.raises(ResumeError, match=r"optimizer\.safetensors"):
        draft_of(home, source, request(home, NEW))


def test_a_checkpoint_that_cannot_be_read_says_so(home: Home, old: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("hermes_rl_mcp.checkpoints.hashlib.sha256", broken)
    assert "Input/output error" in refusal(home).message


def test_a_copy_that_cannot_be_written_says_so(home: Home, old: RunPaths) -> None:
    draft = RunPaths(home.runs / ".new-x" / NEW)
    draft.dir.mkdir(parents=True)
    draft.metrics.mkdir()
    with pytest.raises(PreflightError, match="could not be copied"):
        carry_over(find_source(home, OLD), request(home, NEW), draft)


def test_checkpoints_that_lie_elsewhere_are_not_continued(home: Home, old: RunPaths, tmp_path: Path) -> None:
    elsewhere = TrainerConfig(lora_rank=8, lora_alpha=16.0, checkpoint_dir=str(tmp_path / "mine"))
    old.request.write_text(request(home, trainer=elsewhere).model_dump_json())
    with pytest.raises(ResumeError, match="outside of its own directory"):
        find_source(home, OLD)


@pytest.mark.parametrize(
    ("named", "base_model"),
    [
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/abc", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/models/mine", "/models/mine"),
        ("/old/home/rl/models/smollm2-135m", "builtin:smollm2-135m"),
    ],
)
def test_a_base_is_known_by_its_name_wherever_its_files_lie(
    home: Home, old: RunPaths, named: str, base_model: str
) -> None:
    folder = old.checkpoints / "step_4"
    _configure(base_model_name_or_path=named)(folder)
    seal(folder, base_model=base_model)
    asked = request(home, NEW, base_model=base_model, model_path="/somewhere/else")
    assert continue_from(find_source(home, OLD), asked).resume_step == STEP
