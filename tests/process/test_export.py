"""What ``hermes-rl export`` leaves: a folder that stock libraries load, that is what was trained, and says nothing of
the machine it came from."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
import yaml
from peft import PeftModel
from run_parts import run_request
from run_weights import EVIL, RUN_ID, make_run
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hermes_rl_mcp.contracts.records import ArmScore, Evaluation, ExportRecord
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.errors import ConfirmationError, HermesRLError, InvalidValueError, PreflightError
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs.runconfig import first_record
from trainer.export import check
from trainer.export.__main__ import export, parse
from trainer.export.check import ExportError


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("private-home"))


@pytest.fixture(scope="module")
def base(home: Home) -> Path:
    return home.root / "my-base"


@pytest.fixture(scope="module")
def run_dir(home: Home, base: Path) -> Path:
    return make_run(home, base, environment=EVIL)


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(run_dir, tmp_path / RUN_ID))


def written(run_dir: Path, output: Path, *arguments: str) -> ExportRecord:
    export(parse(["--run", str(run_dir), "--output", str(output), "--torch-threads", "1", *arguments]))
    return ExportRecord.model_validate_json((output / "export.json").read_text())


def logits(model: torch.nn.Module, ids: Sequence[int] = (52, 45, 53, 63)) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits
    return found


def trained_logits(base: Path, run_dir: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits(PeftModel.from_pretrained(model, run_dir / "checkpoints" / "step_4" / "adapter"))


def largest(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max())


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", 0.1)], ids=["fp32", "bf16"])
def test_a_merged_model_is_loaded_by_plain_transformers_and_is_the_trained_one(
    run_dir: Path, base: Path, tmp_path: Path, dtype: str, within: float
) -> None:
    record = written(run_dir, tmp_path / "m", "--format", "safetensors", "--dtype", dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    trained = trained_logits(base, run_dir)
    assert largest(logits(model.float()), trained) < within
    assert largest(logits(AutoModelForCausalLM.from_pretrained(base)), trained) > 3 * within
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "m"))
    assert one.chat_template == two.chat_template and one("2+3=€")["input_ids"] == two("2+3=€")["input_ids"]
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == 1
    figures = record.check
    assert record.dtype == dtype and record.step == record.policy_version == 4
    assert 0 < figures.error_max <= figures.tolerance_max < figures.moved_max
    assert set(record.files) == {path.name for path in (tmp_path / "m").iterdir()} - {"export.json"}


def test_an_exported_adapter_is_loaded_by_stock_peft_and_is_the_trained_one(
    run_dir: Path, base: Path, tmp_path: Path
) -> None:
    record = written(run_dir, tmp_path / "a", "--step", "2")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert largest(logits(PeftModel.from_pretrained(model, tmp_path / "a")), trained_logits(base, run_dir)) == 0
    assert (record.format, record.step) == ("adapter", 2)
    assert record.check.error_max < 1e-5 < record.check.moved_max


def test_nothing_of_the_machine_or_of_its_secrets_is_in_an_export(run_dir: Path, tmp_path: Path) -> None:
    for kind in ("adapter", "safetensors"):
        written(run_dir, tmp_path / kind, "--format", kind)
        for path in (tmp_path / kind).iterdir():
            data = path.read_bytes()
            for word in (b"private-home", b"/secret/place", b"n0nce", b"s3cret-prefix", b"sk-hidden"):
                assert word not in data, (path.name, word)
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path.name
        assert stat.S_IMODE((tmp_path / kind).stat().st_mode) == 0o700
    assert (
        json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "my-base"
    )


def test_the_card_has_the_hubs_header_and_takes_an_environments_words_as_data(own_run: Path, tmp_path: Path) -> None:
    arms = [ArmScore(accuracy=a, low=a - 0.1, high=a + 0.1, policy_version=v) for a, v in ((0.25, 0), (0.5, 4))]
    verdict = "improved by 0.25 | 95% interval 0.12 to 0.38"
    evaluation = Evaluation(status="completed", step=4, items=64, base=arms[0], adapter=arms[1], verdict=verdict)
    (own_run / "evaluation.json").write_text(evaluation.model_dump_json())
    written(own_run, tmp_path / "a")
    text = (tmp_path / "a" / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["hermes-rl-mcp", "reinforcement-learning", "grpo", "lora"],
    }
    titles = [line for line in body.splitlines() if line.startswith("#")]
    assert titles[0] == "# `my-base` trained on `x/'<script> # injected`".replace("<script>", "<script>")
    assert titles[1:] == ["## Results", "## Use", "## Settings", "## Check"]
    assert "0.150 in the first 4 steps" not in body and "0.250 in the first 4 steps" in body, "of steps 1 to 4"
    assert "`improved by 0.25 / 95% interval 0.12 to 0.38`" in body
    assert "| trained | 0.500 | 0.400 to 0.600 |" in body


def test_what_bf16_would_lose_is_written_in_float32_and_refused_when_bf16_was_asked_for(
    home: Home, base: Path, tmp_path: Path, run_dir: Path
) -> None:
    bf16 = tmp_path / "bf16-base"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(bf16)
    AutoTokenizer.from_pretrained(base).save_pretrained(bf16)
    faint = make_run(Home(tmp_path / "other"), bf16, adapter_std=3e-4)
    record = written(faint, tmp_path / "m", "--format", "safetensors")
    assert record.dtype == "float32" and "bfloat16" in record.note
    with pytest.raises(ExportError, match="lost in bfloat16"):
        written(faint, tmp_path / "n", "--format", "safetensors", "--dtype", "bfloat16")
    assert not (tmp_path / "n").exists()


def test_an_export_without_the_adapter_in_it_is_found_out(run_dir: Path, base: Path) -> None:
    trained = check.reference(
        base, run_dir / "checkpoints" / "step_4" / "adapter", ["2+3=5 and more"], 1, lambda _: None
    )
    tokenizer = check.load_tokenizer(base)
    with pytest.raises(ExportError, match="does not reproduce"):
        check.check(trained, check.load_merged(base), tokenizer, torch.float32)
    with pytest.raises(ExportError, match="other tokens"):
        tokenizer.chat_template = tokenizer.chat_template + "!"
        check.check(trained, check.load_merged(base), tokenizer, torch.float32)


def test_an_adapter_that_learned_nothing_is_exported_and_called_that(base: Path, tmp_path: Path) -> None:
    record = written(make_run(Home(tmp_path / "other"), base, adapter_std=0.0), tmp_path / "a")
    assert record.check.adapter_max_abs == 0
    assert record.check.moved_max < 1e-5  # with and without an adapter of zeros the products are not rounded alike
    assert "nothing was learned" in (tmp_path / "a" / "README.md").read_text()


def test_another_or_altered_base_is_refused(home: Home, base: Path, tmp_path: Path, run_dir: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "my-base"))
    own = make_run(Home(tmp_path / "other"), copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for kind in ("adapter", "safetensors"):
        with pytest.raises(PreflightError, match="other base weights"):
            written(own, tmp_path / "m", "--format", kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my-base", "other"], "nothing is left over"


def test_an_altered_checkpoint_is_refused_and_the_others_are_named(own_run: Path, tmp_path: Path) -> None:
    weights = own_run / "checkpoints" / "step_4" / "adapter" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(PreflightError, match="hash differs") as caught:
        written(own_run, tmp_path / "a")
    assert "2, 4" in caught.value.hint
    assert written(own_run, tmp_path / "a", "--step", "2").step == 2
    with pytest.raises(InvalidValueError, match="no checkpoint of step 3"):
        written(own_run, tmp_path / "b", "--step", "3")


def test_only_an_earlier_export_is_replaced_and_only_by_force(run_dir: Path, tmp_path: Path) -> None:
    written(run_dir, tmp_path / "a", "--step", "2")
    with pytest.raises(InvalidValueError, match="exists already"):
        written(run_dir, tmp_path / "a")
    assert written(run_dir, tmp_path / "a", "--force").step == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidValueError, match="no earlier export"):
        written(run_dir, tmp_path / "mine", "--force")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mine"]


def test_a_place_where_no_folder_can_be_made_is_told_with_a_way_out(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match=r"No folder can be made in .*/file: .*") as refused:
        written(run_dir, tmp_path / "file" / "out")
    assert "--output" in refused.value.hint
    with pytest.raises(PreflightError, match="No folder can be made in /proc: "):
        written(run_dir, Path("/proc/out"))


def test_a_disk_without_room_is_told_before_anything_is_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PreflightError, match="disk space"):
        written(run_dir, tmp_path / "m", "--format", "safetensors")
    assert list(tmp_path.iterdir()) == []


CONVERTER = '''
"""What llama.cpp's converter does for a Llama, by its own package."""
import sys
import gguf, torch
from transformers import AutoModelForCausalLM

model_dir, out = sys.argv[1], sys.argv[sys.argv.index("--outfile") + 1]
assert sys.argv[sys.argv.index("--outtype") + 1] == "f32"
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
config = model.config
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
writer = gguf.GGUFWriter(out, "llama")
writer.add_context_length(config.max_position_embeddings)
writer.add_embedding_length(config.hidden_size)
writer.add_block_count(config.num_hidden_layers)
writer.add_feed_forward_length(config.intermediate_size)
writer.add_head_count(config.num_attention_heads)
writer.add_head_count_kv(config.num_key_value_heads)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_vocab_size(config.vocab_size)
writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
for name, tensor in model.state_dict().items():
    if name == "lm_head.weight":
        continue
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}.get(
        ".".join(name.split(".")[-2:])
    )
    if heads:
        tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)
    SPOIL
    writer.add_tensor(names.get_name(name, (".weight",)), tensor.contiguous().numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
'''


def converter(folder: Path, spoil: str = "pass") -> str:
    script = folder / "convert_hf_to_gguf.py"
    script.write_text(CONVERTER.replace("SPOIL", spoil))
    return str(script)


@pytest.mark.slow
def test_gguf_is_made_by_the_given_converter_and_read_back(run_dir: Path, tmp_path: Path) -> None:
    tools = tmp_path / "llama.cpp"
    tools.mkdir()
    converter(tools)
    record = written(run_dir, tmp_path / "g", "--format", "gguf", "--converter", str(tools))
    name = f"{RUN_ID}-step-4.gguf"
    assert sorted(path.name for path in (tmp_path / "g").iterdir()) == [name, "README.md", "export.json"]
    assert 0 < record.check.error_max < 1e-4 < record.check.moved_max and not record.note
    assert f"llama-server -m {name}" in (tmp_path / "g" / "README.md").read_text()


@pytest.mark.slow
def test_a_gguf_file_that_is_not_what_was_trained_is_found_out(run_dir: Path, tmp_path: Path) -> None:
    spoiled = converter(tmp_path, "tensor = tensor * (0 if 'v_proj' in name else 1)")
    with pytest.raises(ExportError, match="does not reproduce"):
        written(run_dir, tmp_path / "g", "--format", "gguf", "--converter", spoiled)
    assert not (tmp_path / "g").exists()


def test_a_converter_that_fails_or_is_not_there_is_told_with_a_way_out(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('Model FooForCausalLM is not supported')")
    with pytest.raises(PreflightError, match="FooForCausalLM is not supported"):
        written(run_dir, tmp_path / "g", "--format", "gguf", "--converter", str(broken))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PreflightError) as caught:
        written(run_dir, tmp_path / "g", "--format", "gguf")
    assert "llama.cpp" in caught.value.hint and "--converter" in caught.value.hint
    with pytest.raises(HermesRLError, match="no file"):
        written(run_dir, tmp_path / "g", "--format", "gguf", "--converter", str(tmp_path / "gone.py"))


@pytest.mark.slow
def test_the_command_exports_checks_and_says_so(environ: dict[str, str], base: Path, tmp_path: Path) -> None:
    home = Home(Path(environ["HERMES_HOME"]))
    make_run(home, base)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "export", *arguments]
        return subprocess.run(program, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=250)

    done = command(RUN_ID, "--merge", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["path"] == str(tmp_path / f"{RUN_ID}-step-4-merged")
    assert answer["check"]["error_max"] < answer["check"]["moved_max"]
    assert "checking it" in done.stderr
    again = command(RUN_ID, "--merge")
    assert again.returncode == 1 and "--force" in again.stderr and not again.stdout
    unknown = command("deadbeef")
    assert unknown.returncode == 1 and "hermes-rl runs list" in unknown.stderr


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_export_by_tool_gives_the_same_and_replaces_its_folder_only_with_a_persons_word(
    environ: dict[str, str], base: Path
) -> None:
    home = Home(Path(environ["HERMES_HOME"]))
    paths = RunPaths(make_run(home, base))
    request = run_request(RUN_ID, base_model=str(base), model_path=str(base))
    paths.request.write_text(request.model_dump_json())
    record = first_record(home, request).model_copy(update={"status": RunStatus.COMPLETED})
    paths.record.write_text(record.model_dump_json())

    async def exported(*, confirm: bool) -> ExportRecord:
        begun = await Operations.from_environ(environ).start_training(export_of=RUN_ID, confirm=confirm)
        assert begun.export is not None and begun.export.status == "running"
        with anyio.fail_after(250):
            while True:
                [export] = (await Operations.from_environ(environ).get_results(RUN_ID)).exports
                if export.status != "running":
                    break
                await anyio.sleep(0.1)
        assert export.status == "completed", export
        return ExportRecord.model_validate_json((Path(export.path) / "export.json").read_text())

    first = await exported(confirm=False)
    assert (first.format, first.step) == ("adapter", 4)
    assert first.check.error_max < 1e-5 < first.check.moved_max
    with pytest.raises(ConfirmationError, match="Replace the export"):
        await Operations.from_environ(environ).start_training(export_of=RUN_ID)
    second = await exported(confirm=True)
    assert second.created_at > first.created_at and second.files.keys() == first.files.keys()
    assert [path.name for path in home.exports.iterdir()] == [f"{RUN_ID}-step-4-adapter"]
