"""Asks a child process what an environment can be told, because only the environment's own code knows.

The answer is cached by the contents it was made from. An environment that cannot be imported is an
EnvironmentFileError (or MissingExtraError) that quotes the last line of its traceback.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp import __version__, lifeline
from hermes_rl_mcp.contracts.environments import EnvironmentInfo, EnvironmentSchema, ValidationReply
from hermes_rl_mcp.errors import EnvironmentFileError, HermesRLError, MissingExtraError
from hermes_rl_mcp.files import make_private_dir, read_file, read_tail, write_atomic
from hermes_rl_mcp.interpreters import environment_program
from hermes_rl_mcp.paths import install_root
from hermes_rl_mcp.redact import redact, redact_field, redact_text, secret_values

log = logging.getLogger(__name__)

TIMEOUT_S = 45.0
"""An environment may import datasets or torch on a slow disk; one that loads data at import is broken."""
ATROPOS_FACTOR = 3
"""Atropos' library imports much before the environment itself is begun."""
_MESSAGE_BYTES = 65_536
"""Of the child's output, which may be a flood; the traceback is at its end."""
_EXTRA_OF_MODULE = {
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "safetensors": "train",
    "numpy": "train",
    "jinja2": "train",
    "math_verify": "train",
    "datasets": "train",
    "atroposlib": "atropos",
    "wandb": "wandb",
    "tinker": "tinker",
}


def file_sha256(path: Path) -> str:
    """Hash of one file. Raises EnvironmentFileError if it cannot be read."""
    try:
        return hashlib.sha256(read_file(Path(os.path.realpath(path)))).hexdigest()
    except OSError as error:
        raise EnvironmentFileError(
            f"Environment file not found or not readable: {path} ({error.strerror}).",
            hint="Call rl_list_environments and select again.",
        ) from error


@dataclass(frozen=True)
class Describer:
    """Runs the environment's ``describe`` subcommand. ``environ`` is what the child may see."""

    cache: Path
    environ: Mapping[str, str]
    timeout_s: float = TIMEOUT_S

    async def describe(self, info: EnvironmentInfo) -> EnvironmentSchema:
        """The environment's fields; from the cache while neither its file nor the SDK changed."""
        path = (
            self.cache
            / f"{await anyio.to_thread.run_sync(_fingerprint, info, environment_program(info.base, self.environ))}.json"
        )
        try:
            return EnvironmentSchema.model_validate_json(read_file(path))
        except OSError:
            pass
        except ValidationError:
            log.info("the cached description %s is of another version; asking again", path.name)
        schema = _without_secrets(EnvironmentSchema.model_validate(await self._run(info, None)))
        try:
            make_private_dir(path.parent)
            write_atomic(path, schema.model_dump_json(indent=1))
        except OSError as error:  # it is only a cache
            log.warning("the description of %s could not be kept: %s", info.name, error)
        return schema

    async def validate(self, info: EnvironmentInfo, values: Mapping[str, JsonValue]) -> ValidationReply:
        """Each value judged and coerced by the environment's own config class."""
        return ValidationReply.model_validate(await self._run(info, dict(values)))

    async def _run(self, info: EnvironmentInfo, values: dict[str, JsonValue] | None) -> JsonValue:
        with tempfile.TemporaryDirectory(prefix="hermes-rl-describe-") as folder:
            output = Path(folder) / "out.json"
            command = environment_program(info.base, self.environ)
            command += [f"{info.file_path}:{info.class_name}", "describe", "--output", str(output)]
            if values is not None:
                (Path(folder) / "in.json").write_text(json.dumps(values), encoding="utf-8")
                command += ["--values", str(Path(folder) / "in.json")]
            errors = Path(folder) / "stderr"
            code = await self._child(command, errors, info)
            if code != 0 or not output.is_file():
                raise _failure(info, code, read_tail(errors, _MESSAGE_BYTES), secret_values(self.environ))
            answer: JsonValue = json.loads(read_file(output))
            return answer

    async def _child(self, command: list[str], errors: Path, info: EnvironmentInfo) -> int:
        timeout_s = self.timeout_s * (ATROPOS_FACTOR if info.base == "atroposlib" else 1)
        with errors.open("wb") as stderr, lifeline.held() as reading:
            environ = {**self.environ, "PYTHONPATH": str(install_root()), lifeline.VARIABLE: str(reading)}
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=environ,
                start_new_session=True,
                pass_fds=(reading,),
            )
            try:
                with anyio.fail_after(timeout_s):
                    return await process.wait()
            except TimeoutError:
                raise EnvironmentFileError(
                    f"Environment '{info.name}' ({info.file_path}) gave no description within {timeout_s:g} s.",
                    hint="Move downloads and other slow work from module level and config_init into setup().",
                ) from None
            finally:
                with anyio.CancelScope(shield=True):
                    await end_session(process)


def _without_secrets(schema: EnvironmentSchema) -> EnvironmentSchema:
    """A key in an environment's own source stays there: its process has it, and nobody else needs it."""
    fields = [
        field.model_copy(
            update={
                "default": redact_field(field.name, field.default),
                "json_schema": {
                    name: redact_field(field.name if name == "default" else name, value)
                    for name, value in field.json_schema.items()
                },
            }
        )
        for field in schema.fields
    ]
    return schema.model_copy(update={"fields": fields, "server": redact(schema.server)})


async def end_session(process: anyio.abc.Process) -> None:
    """A child that still runs, at a timeout or because the call was cancelled, goes with its whole session."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("process %d ended by itself", process.pid)
        await process.wait()
    await process.aclose()


def _fingerprint(info: EnvironmentInfo, program: Sequence[str]) -> str:
    """Over the file, its class, its Python, the SDK's sources, and the size and age of the Python files beside it."""
    digest = hashlib.sha256()
    file = Path(info.file_path)
    for part in (__version__, *program, info.file_path, info.class_name, file_sha256(file)):
        digest.update(part.encode() + b"\0")
    sdk = sorted((install_root() / "hermes_rl_mcp" / "envs").rglob("*.py"))
    for other in [*sdk, *sorted(file.parent.glob("*.py"))]:
        try:
            stat = other.stat()
        except OSError:
            continue  # a dangling link, or gone since the listing
        digest.update(os.fsencode(f"{other}:{stat.st_size}:{stat.st_mtime_ns}\0"))
    return digest.hexdigest()[:32]


_LOCATION = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_MISSING = re.compile(r"^(?:ModuleNotFoundError|ImportError): No module named '(?P<module>[\w.]+)'")


def _failure(info: EnvironmentInfo, code: int, stderr: str, secrets: Sequence[str]) -> HermesRLError:
    """The last line of the traceback, and where in the user's file it happened."""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    last = next((line.strip() for line in reversed(lines) if not line.startswith(" ")), "no message")
    if code == 0:
        last = "its own code ended the process, as by sys.exit(0), before there was an answer"
    if missing := _MISSING.match(last):
        module = missing["module"].split(".")[0]
        if extra := _EXTRA_OF_MODULE.get(module):
            return MissingExtraError(f"Environment '{info.name}' ({info.file_path}) imports '{module}' and", extra)
    places = [(m["file"], m["line"]) for m in _LOCATION.finditer(stderr)]
    own = [place for place in places if place[0] == info.file_path] or places
    where = f"{own[-1][0]}:{own[-1][1]}" if own else info.file_path
    last = last.removesuffix(f" ({where})")
    return EnvironmentFileError(
        f"Environment '{info.name}' cannot be loaded: {redact_text(last, secrets)[:500]} ({where}; exit code {code}).",
        hint="Repair the environment file, then call rl_select_environment again.",
        details={"file_path": info.file_path},
    )
