"""A checkpoint is whole or absent, its adapter loads in stock peft, and a full disk costs no earlier one."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings
from transformers import AutoModelForCausalLM

from hermes_rl_mcp.checkpoints import ADAPTER, MARKER, inspect, last_complete, read_marker
from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.base_hash import weights_sha256
from trainer.checkpoints import Checkpoints, Counters
from trainer.failures import CheckpointError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(base: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend(load_model(base), settings())
    yield backend
    backend.close()


@pytest.fixture
def checkpoints(tmp_path: Path, backend: LocalBackend) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", backend, base_model="tiny-llama", lora_rank=4)


def _at(step: int) -> Counters:
    return Counters(step=step, optimizer_steps=step, policy_version=step, steps_without_signal=0)


def test_the_marker_lists_every_file_with_its_hash(base: Path, checkpoints: Checkpoints) -> None:
    folder = checkpoints.save(_at(3))
    marker = read_marker(folder)
    assert marker is not None
    assert (folder.name, marker.step, marker.base_sha256) == ("step_3", 3, weights_sha256(base))
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert set(marker.files) == set(found) - {MARKER}
    assert marker.files == {name: hashlib.sha256(found[name].read_bytes()).hexdigest() for name in marker.files}


def test_stock_peft_loads_the_adapter_and_it_changes_the_logits(
    base: Path, checkpoints: Checkpoints, backend: LocalBackend
) -> None:
    folder = checkpoints.save(_at(1)) / ADAPTER
    ids = torch.tensor([backend.encode("2+3=")])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        after = PeftModel.from_pretrained(plain, folder)(input_ids=ids).logits
        live = backend._model.peft(input_ids=ids).logits
    assert float((after - before).abs().max()) > 1e-3
    assert torch.allclose(after, live, atol=1e-5)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, backend: LocalBackend) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, backend, base_model="tiny-llama", lora_rank=4, keep=2)
    for step in (2, 10, 4, 12):  # by number, not by name
        checkpoints.save(_at(step))
    assert sorted(path.name for path in folder.iterdir()) == ["step_10", "step_12"]
    assert last_complete(folder) == folder / "step_12"


def test_the_adapter_names_its_base(checkpoints: Checkpoints, backend: LocalBackend) -> None:
    folder = checkpoints.save(_at(2)) / ADAPTER
    notes = json.loads((folder / "hermes_rl.json").read_text())
    assert notes == {
        "base_model": "tiny-llama",
        "base_sha256": backend.base_sha256,
        "policy_version": "2",
        "step": "2",
    }
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata()["base_sha256"] == backend.base_sha256


def test_sec_18_no_file_of_a_checkpoint_is_a_pickle(checkpoints: Checkpoints) -> None:
    suffixes = {path.suffix for path in checkpoints.save(_at(1)).rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors"}


def test_the_latest_complete_checkpoint_wins_and_incomplete_ones_do_not_count(checkpoints: Checkpoints) -> None:
    folders = [checkpoints.save(_at(step)) for step in (2, 10, 9)]
    (folders[1].parent / "step_11").mkdir()
    assert last_complete(folders[0].parent) == folders[1]
    (folders[1] / MARKER).unlink()
    assert last_complete(folders[0].parent) == folders[2]


def test_leftovers_of_a_killed_writer_are_cleared(checkpoints: Checkpoints) -> None:
    folder = checkpoints.save(_at(1)).parent
    (folder / ".writing-step_2").mkdir()
    (folder / ".writing-step_2" / "half").write_text("x")
    checkpoints.save(_at(2))
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]


def test_fi_22_a_stale_marker_is_cleared_before_its_folder_is_written_again(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.save(_at(2))
    (folder / "optimizer.safetensors").unlink()  # a writer or remover that was killed; the marker says complete
    removed: list[bool] = []
    real = shutil.rmtree

    def remove(path: Path, **options: bool) -> None:
        removed.append((Path(path) / MARKER).exists())
        real(path, **options)

    monkeypatch.setattr("trainer.checkpoints.shutil.rmtree", remove)
    assert last_complete(folder.parent) is None
    assert inspect(checkpoints.save(_at(2))).step == 2
    assert removed == [False], "whoever is killed while removing it must not leave a marker"


def test_a_full_disk_names_the_last_good_checkpoint_and_leaves_it_alone(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = checkpoints.save(_at(1))
    before = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.checkpoints.os.fsync", full)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        checkpoints.save(_at(2))
    assert str(good) in str(caught.value)
    assert {path: path.read_bytes() for path in good.rglob("*") if path.is_file()} == before
    assert [path.name for path in good.parent.iterdir()] == ["step_1"]


def test_the_base_hash_does_not_depend_on_how_tensors_are_split_over_files(tmp_path: Path, base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert weights_sha256(tmp_path) == weights_sha256(base)
    other = build_tiny_llama(tmp_path / "other", seed=1)
    assert weights_sha256(other) != weights_sha256(base)
