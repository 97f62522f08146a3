"""Models and adapters that bring code along: it is not run, and a pickle is not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import load_model

from hermes_rl_mcp.envs.tokenizer import load_tokenizer
from hermes_rl_mcp.errors import HermesRLError, PreflightError
from trainer import serve
from trainer.backends.local import adapter_files
from trainer.backends.local.model import load
from trainer.models.materialise import materialise

BASE = "0" * 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture
def evil(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model folder with code of its own for everything, and the file that this code would make."""
    folder, mark = tmp_path / "evil", tmp_path / "executed"
    shutil.copytree(base, folder)
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit('got in')\n")
    for name, auto_map in (
        ("config.json", {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.T", "evil.T"]}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map}))
    return folder, mark


def test_sec_17_code_that_a_known_model_brings_along_is_left_lying(evil: tuple[Path, Path]) -> None:
    folder, mark = evil
    model = load_model(folder)
    assert model.peft is not None
    assert load_tokenizer(str(folder)) is not None
    assert not mark.exists()


def test_sec_17_a_model_that_only_its_own_code_can_load_is_refused_with_a_sentence(evil: tuple[Path, Path]) -> None:
    folder, mark = evil
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "evil_one", "architectures": ["M"]}))
    with pytest.raises((ValueError, HermesRLError), match=r"trust_remote_code|evil_one"):
        load(folder, device=torch.device("cpu"), rank=4, alpha=8.0, seed=0, progress=lambda _: None)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PreflightError, match="could not be loaded"):
        load_tokenizer(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00002.bin"])
def test_sec_18_a_base_model_of_pickles_is_refused(base: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"x": torch.zeros(1)}, folder / name)
    with pytest.raises(PreflightError, match="safetensors"):
        materialise(str(folder), folder)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapter_files.save(load_model(base).peft, folder, {"base_sha256": BASE, "base_model": "m"})
    adapter_files.check_base(folder, BASE)
    return folder


def change(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_sec_18_an_adapter_of_pickles_is_refused(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, adapter / "adapter_model.bin")
    with pytest.raises(PreflightError, match="other formats can run code"):
        adapter_files.check_base(adapter, BASE)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"auto_mapping": {"base_model_class": "os", "parent_library": "os"}}, "auto_mapping"),
        ({"peft_type": "PROMPT_TUNING"}, "not that of a LoRA adapter"),
        ({"peft_type": None}, "not that of a LoRA adapter"),
    ],
)
def test_sec_19_an_adapter_that_asks_for_more_than_weights_is_refused(
    adapter: Path, values: dict[str, object], says: str
) -> None:
    change(adapter, **values)
    with pytest.raises(PreflightError, match=says):
        adapter_files.check_base(adapter, BASE)


def test_sec_19_an_adapter_of_another_base_is_refused_whatever_it_calls_its_base(adapter: Path) -> None:
    change(adapter, base_model_name_or_path="attacker/other-model")
    with pytest.raises(PreflightError, match="other base weights"):
        adapter_files.check_base(adapter, "1" * 64)


def test_sec_19_the_base_that_an_adapter_names_is_never_fetched(base: Path, adapter: Path) -> None:
    change(adapter, base_model_name_or_path="attacker/other-model", revision="evil")
    (adapter / "hermes_rl.json").unlink()
    (adapter / "evil.py").write_text("raise SystemExit('got in')\n")
    loaded = load(base, device=torch.device("cpu"), rank=4, alpha=8.0, seed=0, adapter=adapter, progress=lambda _: None)
    assert loaded.peft.peft_config["default"].peft_type == "LORA"


def test_sec_09_a_sampler_started_by_hand_stays_on_loopback_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        serve.main(["--model", "builtin:tiny", "--host", "0.0.0.0"])
    assert left.value.code == 2
    assert "--allow-remote" in capsys.readouterr().err
